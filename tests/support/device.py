"""Where the tests run SGLang: on the CPU engine, or on an NVIDIA GPU.

    DYNSPEC_TEST_DEVICE=cuda python -P -m pytest tests/test_engine.py tests/test_catch_up.py ...

runs the engine tests on a GPU, with whatever SGLang is installed: real kernels, streams and CUDA
graphs, triton attention. SGLang's kernels for norms, activations and RoPE know 16 bits only, so
these three layers run as SGLang's own PyTorch code: in float32 the built models' text is safe from
rounding, and outputs can be compared token for token.

On a machine with one GPU all ranks of a launch script share it. NCCL allows that to processes of
different hosts, as which these then pass, connected through the loopback interface. Each collective
takes some milliseconds there, in which the processes are switched: nothing to measure speed by.
"""

from __future__ import annotations

import os
import pkgutil
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from sglang_dynspec.testing import cpu_engine

GRAPH_SIZES = [1, 2, 4, 8, 16]
_ONE_GPU_ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    # Each rank sees the other's memory as taken.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
}

ON_GPU = os.environ.get("DYNSPEC_TEST_DEVICE") == "cuda"


def prepare() -> None:
    """Prepare this process, and all that it starts. Before anything imports SGLang."""
    if ON_GPU:
        _take_gpu()
    os.environ.update(cpu_engine.environment())
    cpu_engine.install()


def prepare_launch_script() -> None:
    """Prepare a launch script, and each process that SGLang spawns from it, which run its top."""
    if ON_GPU:
        prepare()
        _compute_in_pytorch()
        if _one_gpu():
            _share_gpu()


def _one_gpu() -> bool:
    import torch

    return torch.cuda.device_count() == 1


def _share_gpu() -> None:
    """Place all ranks on the one GPU, this process as a host of its own."""
    from sglang.srt.server_args import ServerArgs

    os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
    check = ServerArgs.check_server_args

    def check_as_apart(self: ServerArgs) -> None:
        # SGLang's check is the last that is done with them, and takes no step of 0.
        check(self)
        object.__setattr__(self, "gpu_id_step", 0)

    ServerArgs.check_server_args = check_as_apart


def _take_gpu() -> None:
    """Let the tests build their servers on the GPU instead of the CPU engine."""
    from sglang_dynspec.testing.scheduler import InProcessScheduler

    on_cpu = cpu_engine.server_args

    def server_args(*args: Any, **overrides: Any) -> dict[str, Any]:
        _compute_in_pytorch()
        _forget_input_buffers()
        arguments = on_cpu(*args, **{**_gpu_arguments(), **overrides})
        return {name: value for name, value in arguments.items() if value is not None}

    cpu_engine.server_args = server_args
    cpu_engine.environment = lambda tp_size=1: _environment()
    cpu_engine.install = lambda: None
    InProcessScheduler.run = _run_alone(InProcessScheduler.run)  # type: ignore[method-assign]


def _run_alone(run: Any) -> Any:
    import torch

    def run_alone(*args: Any, **kwargs: Any) -> Any:
        # Each run has streams of its own, and a test works on the default one in between.
        torch.cuda.synchronize()
        outputs = run(*args, **kwargs)
        torch.cuda.synchronize()
        return outputs

    return run_alone


def _environment() -> dict[str, str]:
    package = find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    models = [f"{home}/srt/models" for home in package.submodule_search_locations]
    names = (module.name for module in pkgutil.iter_modules(models))
    others = (name for name in names if not name.startswith("llama") and name != "qwen3")
    return {
        "TRITON_F32_DEFAULT": "ieee",  # no TF32 in Triton's dot products
        "SGLANG_ENABLE_SPEC_V2": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(others),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(_ONE_GPU_ENVIRONMENT if _one_gpu() else {}),
    }


def _gpu_arguments() -> dict[str, Any]:
    from sglang.srt.server_args import ServerArgs

    known = {field.name for field in fields(ServerArgs)}
    without_prefill_graphs = ("disable_prefill_cuda_graph", "disable_piecewise_cuda_graph")
    graph_sizes = ("cuda_graph_bs_decode", "cuda_graph_bs")
    return {
        "device": "cuda",
        "attention_backend": "triton",
        "disable_cuda_graph": False,
        **{name: True for name in without_prefill_graphs if name in known},
        next(name for name in graph_sizes if name in known): GRAPH_SIZES,
        # Peers' memory is not to be had in one device.
        "disable_custom_all_reduce": _one_gpu(),
    }


def _compute_in_pytorch() -> None:
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding

    for layer in (RMSNorm, SiluAndMul, RotaryEmbedding):
        layer.forward_cuda = layer.forward_native


def _forget_input_buffers() -> None:
    """SGLang shares the input buffers of CUDA graphs in a process, and captures with what is in
    them: after a server with another vocabulary, tokens that do not exist."""
    try:
        from sglang.srt.model_executor import input_buffers
    except ImportError:  # before 0.5.12
        return
    input_buffers._forward_input_buffer_pool.clear()
