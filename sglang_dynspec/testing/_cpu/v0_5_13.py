"""SGLang 0.5.13 to 0.5.15: the speculative code knows no CPU, which takes the CUDA branches here;
its Triton kernels have modules of their own."""

from __future__ import annotations

from typing import Any

from sglang_dynspec.testing._cpu import common, cuda_branches
from sglang_dynspec.testing._cpu.cuda_branches import Launched
from sglang_dynspec.testing._cpu.hooks import Patches

patches = Patches()

RELEASES = ("0.5.13.post1", "0.5.14", "0.5.15.post1")

_SPECULATIVE = "sglang.srt.speculative"

patches.after_import(f"{_SPECULATIVE}.eagle_info")(cuda_branches.idle_verify_input)
patches.after_import(f"{_SPECULATIVE}.eagle_utils")(cuda_branches.verify_as_on_cuda)
# 0.5.13 samples there, later ones in eagle_utils.
patches.after_import(f"{_SPECULATIVE}.eagle_info_v2")(cuda_branches.sample_in_torch)
patches.after_import(f"{_SPECULATIVE}.spec_utils")(cuda_branches.simulate_acceptance)
patches.after_import("sglang.srt.mem_cache.memory_pool")(cuda_branches.no_triton_kv_copy)
patches.after_import("sglang.srt.mem_cache.allocator.paged")(cuda_branches.pages_in_torch)
patches.after_import(f"{_SPECULATIVE}.triton_ops.gather_spec_extras")(common.gather_in_torch)


@patches.after_import(f"{_SPECULATIVE}.triton_ops.cache_locs")
def _slots_in_torch(cache_locs: Any) -> None:
    from sglang_dynspec.testing._cpu import kernels

    cache_locs._is_cuda = True  # assign_extend_cache_locs_func returns None otherwise
    for name in (
        "assign_draft_cache_locs_contiguous",
        "assign_extend_cache_locs",
        "assign_req_to_token_pool",
    ):
        setattr(cache_locs, name, Launched(getattr(kernels, f"{name}_cpu")))


@patches.after_import(f"{_SPECULATIVE}.triton_ops.eagle")
def _accepted_in_torch(eagle: Any) -> None:
    from sglang_dynspec.testing._cpu import kernels

    eagle.fill_bonus_tokens = Launched(kernels.fill_bonus_tokens_cpu)
    eagle.fill_accept_out_cache_loc = Launched(kernels.fill_accept_out_cache_loc_cpu)
