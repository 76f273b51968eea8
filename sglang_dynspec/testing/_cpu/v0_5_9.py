"""SGLang 0.5.9 to 0.5.12: the speculative code knows no CPU, which takes the CUDA branches here."""

from __future__ import annotations

from typing import Any

from sglang_dynspec.testing._cpu import cuda_branches
from sglang_dynspec.testing._cpu.cuda_branches import Launched
from sglang_dynspec.testing._cpu.hooks import Patches

patches = Patches()

RELEASES = ("0.5.9", "0.5.10.post1", "0.5.11", "0.5.12.post1")

_SPECULATIVE = "sglang.srt.speculative"

patches.after_import(f"{_SPECULATIVE}.eagle_info")(cuda_branches.idle_verify_input)
patches.after_import(f"{_SPECULATIVE}.eagle_utils")(cuda_branches.verify_as_on_cuda)
patches.after_import(f"{_SPECULATIVE}.eagle_info_v2")(cuda_branches.sample_in_torch)
patches.after_import(f"{_SPECULATIVE}.spec_utils")(cuda_branches.simulate_acceptance)
patches.after_import("sglang.srt.mem_cache.memory_pool")(cuda_branches.no_triton_kv_copy)
patches.after_import("sglang.srt.mem_cache.allocator")(cuda_branches.pages_in_torch)


@patches.after_import(f"{_SPECULATIVE}.eagle_info_v2")
def _slots_in_torch(eagle_info_v2: Any) -> None:
    from sglang_dynspec.testing._cpu import kernels

    eagle_info_v2._is_cuda = True  # assign_extend_cache_locs_func returns None otherwise
    eagle_info_v2.assign_draft_cache_locs_page_size_1 = Launched(
        kernels.assign_draft_cache_locs_contiguous_cpu
    )
    eagle_info_v2.assign_extend_cache_locs = Launched(kernels.assign_extend_cache_locs_cpu)
    fill_bonus_tokens = Launched(kernels.fill_bonus_tokens_cpu)
    eagle_info_v2.fill_new_verified_id = fill_bonus_tokens
    eagle_info_v2.fill_bonus_tokens = fill_bonus_tokens  # its name from 0.5.12 on


@patches.after_import(f"{_SPECULATIVE}.spec_utils")
def _tables_in_torch(spec_utils: Any) -> None:
    from sglang_dynspec.testing._cpu import kernels

    spec_utils.assign_req_to_token_pool = Launched(kernels.assign_req_to_token_pool_cpu)
