"""Letting a CPU take the CUDA branches of SGLang's speculative code, with kernels in plain torch.

Up to 0.5.15 that code knows no CPU at all; up to 0.5.19 a CPU's branch never samples.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


class Launched:
    """Looks like a Triton kernel, ``kernel[grid](*args)``, and calls a function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


def verify_as_on_cuda(eagle_utils: Any) -> None:
    """Build and verify draft trees by what ``eagle_utils`` takes for CUDA kernels.

    On CUDA it also samples at temperature > 0. What its functions import from sgl_kernel when they
    are called comes from our stand-in.
    """
    from sglang_dynspec.testing._cpu import kernels

    eagle_utils._is_cuda, eagle_utils._is_cpu = True, False  # what its branches ask
    eagle_utils.sgl_build_tree_kernel_efficient = kernels.build_tree_kernel_efficient


def sample_in_torch(module: Any) -> None:
    """Give a module the kernels of verification by sampling that it imports for CUDA only."""
    from sglang_dynspec.testing._cpu import kernels

    for name in (
        "top_k_renorm_prob",
        "top_p_renorm_prob",
        "tree_speculative_sampling_target_only",
    ):
        setattr(module, name, getattr(kernels, name))


def simulate_acceptance(spec_utils: Any) -> None:
    """Stand in for a function that allocates on device "cuda" by name."""
    spec_utils.generate_simulated_accept_index = SimulatedAcceptance(spec_utils)


class SimulatedAcceptance:
    """SGLANG_SIMULATE_ACC_LEN; upstream's function allocates on device "cuda" by name.

    Called like ``spec_utils.generate_simulated_accept_index``. Every call accepts the same number
    of tokens for all requests, as upstream does.
    """

    _TOKEN = 100  # upstream's "some legit token id"
    # The argument that is filled: up to 0.5.10, in 0.5.11, from 0.5.12 on.
    _ACCEPTED_DRAFTS = ("accept_length", "num_accepted_drafts", "num_correct_drafts")

    def __init__(self, spec_utils: Any) -> None:
        self._length = spec_utils.SIMULATE_ACC_LEN
        self._method = spec_utils.SIMULATE_ACC_METHOD

    def __call__(
        self,
        accept_index: Any,
        predict: Any,
        bs: int,
        spec_steps: int,
        simulate_acc_len: float | None = None,
        simulate_acc_method: str | None = None,
        simulate_acc_token_mode: str = "fixed",
        **others: Any,
    ) -> Any:
        import torch

        if simulate_acc_token_mode != "fixed":  # 0.5.15 has another
            raise NotImplementedError(f"SGLANG_SIMULATE_ACC_TOKEN_MODE={simulate_acc_token_mode}")
        [accepted_drafts] = [others[name] for name in self._ACCEPTED_DRAFTS if name in others]
        wanted = self._length if simulate_acc_len is None else simulate_acc_len
        length = self._draw(wanted, simulate_acc_method or self._method, spec_steps + 1)
        simulated = torch.full((bs, spec_steps + 1), -1, dtype=torch.int32)
        simulated[:, :length] = accept_index[:, :1] + torch.arange(length)
        accepted_drafts.fill_(length - 1)
        predict.fill_(self._TOKEN)
        return simulated

    @staticmethod
    def _draw(wanted: float, method: str, longest: int) -> int:
        """A length from 1 to ``longest`` around ``wanted``, by upstream's two methods."""
        import torch

        if method == "multinomial":
            drawn = torch.normal(mean=wanted, std=1.0, size=(1,)).clamp(1.0, longest)
            return int(drawn.round().item())
        if method == "match-expected":
            wanted = max(1.0, min(wanted, longest))
            lower = int(wanted)
            return lower + int(float(torch.rand(1)) < wanted - lower)
        raise ValueError(f"unknown SGLANG_SIMULATE_ACC_METHOD: {method!r}")


def no_triton_kv_copy(memory_pool: Any) -> None:
    """Moving KV between slots: upstream's plain torch way instead of a Triton kernel's warm-up."""
    os.environ.setdefault("SGLANG_NATIVE_MOVE_KV_CACHE", "1")

    def init_nothing(pool: Any) -> None:
        pool._kv_copy_config = None

    memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup = init_nothing


def pages_in_torch(allocator: Any) -> None:
    """Allocate pages of more than one token by functions instead of Triton kernels.

    Args:
        allocator: SGLang's module of ``PagedTokenToKVPoolAllocator``.
    """
    from sglang_dynspec.testing._cpu import kernels

    allocator.alloc_extend_kernel = Launched(kernels.alloc_extend_cpu)
    allocator.alloc_decode_kernel = Launched(kernels.alloc_decode_cpu)


def idle_verify_input(eagle_info: Any) -> None:
    """Make the input of a verification without requests on the CPU: upstream names device "cuda"
    up to 0.5.15."""
    verify_input = eagle_info.EagleVerifyInput
    create = on_a_cpu(verify_input.create_idle_input.__func__)
    verify_input.create_idle_input = classmethod(create)


def on_a_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of SGLang make its tensors on the CPU, and pin none, where there is no GPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnACpu(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            named = dict(kwargs or {})
            if named.get("device") == "cuda":
                named["device"] = "cpu"
            named.pop("pin_memory", None)
            return func(*args, **named)

    def without_a_gpu(*args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_available():
            return function(*args, **kwargs)
        with OnACpu():
            return function(*args, **kwargs)

    return without_a_gpu
