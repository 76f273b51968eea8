"""SGLang 0.5.9 to 0.5.12: the speculative code knows no CPU, which takes the CUDA branches here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sglang_dynspec.testing._cpu.hooks import Patches

patches = Patches()

RELEASES = ("0.5.9", "0.5.10.post1", "0.5.11", "0.5.12.post1")


class _Launched:
    """Looks like a Triton kernel, ``kernel[grid](*args)``, and calls a function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


@patches.after_import("sglang.srt.speculative.eagle_utils")
def _tree_kernels(eagle_utils: Any) -> None:
    from sglang_dynspec.testing._cpu import kernels

    # verify_tree_greedy_func picks its kernel by this; on "CUDA" it imports sgl_kernel's, ours.
    eagle_utils._is_cuda = True
    eagle_utils.sgl_build_tree_kernel_efficient = kernels.build_tree_kernel_efficient


@patches.after_import("sglang.srt.speculative.eagle_info_v2")
def _verify_kernels(eagle_info_v2: Any) -> None:
    from sglang_dynspec.testing._cpu import kernels

    eagle_info_v2._is_cuda = True  # assign_extend_cache_locs_func returns None otherwise
    for name in (
        "top_k_renorm_prob",
        "top_p_renorm_prob",
        "tree_speculative_sampling_target_only",
    ):
        setattr(eagle_info_v2, name, getattr(kernels, name))
    eagle_info_v2.assign_draft_cache_locs_page_size_1 = _Launched(
        kernels.assign_draft_cache_locs_contiguous_cpu
    )
    eagle_info_v2.assign_extend_cache_locs = _Launched(kernels.assign_extend_cache_locs_cpu)
    fill_bonus_tokens = _Launched(kernels.fill_bonus_tokens_cpu)
    eagle_info_v2.fill_new_verified_id = fill_bonus_tokens
    eagle_info_v2.fill_bonus_tokens = fill_bonus_tokens  # its name from 0.5.12 on


@patches.after_import("sglang.srt.speculative.spec_utils")
def _spec_utils(spec_utils: Any) -> None:
    from sglang_dynspec.testing._cpu import kernels

    spec_utils.assign_req_to_token_pool = _Launched(kernels.assign_req_to_token_pool_cpu)
    spec_utils.generate_simulated_accept_index = _SimulatedAcceptance(spec_utils)


class _SimulatedAcceptance:
    """SGLANG_SIMULATE_ACC_LEN; upstream's function allocates on device "cuda" by name.

    Called like ``spec_utils.generate_simulated_accept_index``. Every call accepts the same number
    of tokens for all requests, as upstream does.
    """

    _TOKEN = 100  # upstream's "some legit token id"

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
        **accepted: Any,
    ) -> Any:
        import torch

        # accept_length up to 0.5.10, num_accepted_drafts in 0.5.11, num_correct_drafts in 0.5.12.
        [accepted_drafts] = accepted.values()
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


@patches.after_import("sglang.srt.mem_cache.memory_pool")
def _no_triton_kv_copy(memory_pool: Any) -> None:
    """Moving KV between slots: upstream's plain torch way instead of a Triton kernel's warm-up."""
    os.environ.setdefault("SGLANG_NATIVE_MOVE_KV_CACHE", "1")

    def init_nothing(pool: Any) -> None:
        pool._kv_copy_config = None

    memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup = init_nothing
