"""Patches that every supported release needs."""

from __future__ import annotations

import inspect
import os
import pkgutil
from pathlib import Path
from typing import Any

from sglang_dynspec.testing._cpu.hooks import Patches

patches = Patches()

_ALSO = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_moe_mtp")
"""Model files beside Llama's: targets for DP attention, what they import, and a draft."""


@patches.after_import("torch")
def _ignore_streams(torch: Any) -> None:
    """Let stream bookkeeping that SGLang does on any device do nothing on a CPU."""
    record_stream = torch.Tensor.record_stream

    def record_stream_unless_cpu(tensor: Any, stream: Any) -> None:
        # With a torch.cpu.Stream the original raises "unknown parameter type"; EAGLEWorkerV2.verify
        # records whatever the device.
        if tensor.device.type != "cpu":
            record_stream(tensor, stream)

    torch.Tensor.record_stream = record_stream_unless_cpu
    # models/llama.py set_embed_and_head synchronizes "cuda" whatever the device.
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None


@patches.after_import("sglang.srt.environ")  # sglang.srt.models is no module that has a hook
def _load_few_models(environ: Any) -> None:
    """Skip SGLang's other 200 model files, a quarter of a start; by its own switch.

    Set SGLANG_DISABLED_MODEL_ARCHS, to nothing if need be, to choose yourself.
    """
    models = Path(environ.__file__).with_name("models")
    names = (module.name for module in pkgutil.iter_modules([str(models)]))
    others = (name for name in names if not name.startswith("llama") and name not in _ALSO)
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(others))


@patches.after_import("sglang.srt.layers.attention.attention_registry")
def _register_attention(registry: Any) -> None:
    def create(runner: Any) -> Any:
        from sglang_dynspec.testing._cpu.attention import CpuAttentionBackend

        return CpuAttentionBackend(runner)

    registry.ATTENTION_BACKENDS["torch_native"] = create


@patches.after_import("sglang.srt.speculative.draft_utils")
def _register_draft_attention(draft_utils: Any) -> None:
    """Add torch_native to the draft's backends, which upstream lists inside two methods."""
    factory = draft_utils.DraftBackendFactory
    create_backend = factory._create_backend
    # 0.5.18 and later return (name, backend) and write the name onto it.
    named = "stamps_children" in inspect.signature(create_backend).parameters

    def create_backend_with_ours(
        self: Any, backend_name: str, backend_map: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        from sglang_dynspec.testing._cpu import attention

        steps = self.speculative_num_steps
        error_template = kwargs.get("error_template", args[0] if args else "")
        for_decode = "in decode attention" in error_template

        def create() -> Any:
            runner = self.draft_model_runner
            backend = (
                attention.CpuMultiStepDraftBackend(runner, self.topk, steps)
                if for_decode
                else attention.CpuAttentionBackend(runner)
            )
            return ("torch_native", backend) if named else backend

        backend_map = {**backend_map, "torch_native": create}
        return create_backend(self, backend_name, backend_map, *args, **kwargs)

    factory._create_backend = create_backend_with_ours


@patches.after_import("sglang.srt.constrained.xgrammar_backend")
def _mask_on_a_cpu(xgrammar_backend: Any) -> None:
    """Mask logits by xgrammar's own code for CPUs, which SGLang calls from 0.5.18 on."""

    def apply_vocab_mask(self: Any, logits: Any, vocab_mask: Any) -> None:
        from xgrammar import apply_token_bitmask_inplace

        apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")

    xgrammar_backend.XGrammarGrammar.apply_vocab_mask = apply_vocab_mask
    # 0.5.17 pins their memory whether or not there is a GPU.
    if not hasattr(xgrammar_backend, "is_pin_memory_available"):

        def allocate(vocab_size: int, batch_size: int) -> Any:
            from xgrammar import allocate_token_bitmask

            return allocate_token_bitmask(batch_size, vocab_size)

        xgrammar_backend._allocate_token_bitmask = allocate


def gather_in_torch(gather_module: Any) -> None:
    """The overlap scheduler's relay of draft inputs (from 0.5.13 on): a Triton kernel upstream."""

    def gather_spec_extras(
        indices: Any,
        topk_p_buf: Any,
        topk_index_buf: Any,
        output_tokens_buf: Any,
        hidden_states_buf: Any,
    ) -> tuple[Any, Any, Any, Any]:
        hidden = None if hidden_states_buf is None else hidden_states_buf[indices]
        return topk_p_buf[indices], topk_index_buf[indices], output_tokens_buf[indices], hidden

    gather_module.gather_spec_extras = gather_spec_extras


@patches.after_import("sglang.srt.layers.dp_attention")
def _copy_rows_in_torch(dp_attention: Any) -> None:
    """Copying tokens to and from where all ranks' lie: a Triton kernel up to 0.5.18."""
    if not hasattr(dp_attention, "memcpy_cpu"):
        from sglang_dynspec.testing._cpu import kernels

        dp_attention.memcpy_triton = kernels.copy_rows


@patches.after_import("sglang.srt.distributed.parallel_state")
def _gather_through_gloo(parallel_state: Any) -> None:
    """Gather and scatter tokens between ranks by what is behind SGLang's custom operators, which
    are registered for CUDA alone up to 0.5.18."""
    group = parallel_state.GroupCoordinator
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(group, name, _through_gloo(getattr(group, name), getattr(group, f"_{name}")))


def _through_gloo(on_gpu: Any, plain: Any) -> Any:
    def collective(self: Any, output: Any, input: Any) -> Any:  # noqa: A002 - SGLang's name
        return (plain if input.device.type == "cpu" else on_gpu)(self, output, input)

    return collective


@patches.after_import("sglang.srt.model_executor.forward_batch_info")
def _do_not_pin(forward_batch_info: Any) -> None:
    """Pinning memory takes a driver, and up to 0.5.18 DP attention pins whatever the device."""
    from sglang_dynspec.testing._cpu.cuda_branches import on_a_cpu

    batch = forward_batch_info.ForwardBatch
    batch.prepare_mlp_sync_batch = on_a_cpu(batch.prepare_mlp_sync_batch)
