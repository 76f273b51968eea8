"""SGLang 0.5.16 and later: they have CPU branches, which call ``sgl_kernel.*_cpu`` functions."""

from __future__ import annotations

from typing import Any

from sglang_dynspec.testing._cpu import common, cuda_branches
from sglang_dynspec.testing._cpu.hooks import Patches

patches = Patches()

RELEASES = (
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)


@patches.after_import("sglang.srt.speculative.eagle_utils")
def _sample_when_verifying(eagle_utils: Any) -> None:
    """Verify by rejection sampling at temperature > 0, as on a GPU; a CPU verifies greedily."""
    if hasattr(eagle_utils, "_verify_uses_greedy"):
        _answer_as_on_gpu(eagle_utils)
    else:  # before 0.5.20 eagle_sample asks for the device itself
        cuda_branches.verify_as_on_cuda(eagle_utils)


def _answer_as_on_gpu(eagle_utils: Any) -> None:
    from sglang_dynspec.testing._cpu import kernels

    uses_greedy = eagle_utils._verify_uses_greedy

    def uses_greedy_as_on_gpu(**facts: Any) -> bool:
        return bool(uses_greedy(**{**facts, "is_cpu": False}))

    eagle_utils._verify_uses_greedy = uses_greedy_as_on_gpu
    cuda_branches.sample_in_torch(eagle_utils)
    eagle_utils.sampling_softmax = kernels.softmax


@patches.after_import("sglang.srt.arg_groups.speculative_hook")
def _allow_overlap(speculative_hook: Any) -> None:
    """Leave the overlap scheduler on unless asked; upstream turns it off here on any CPU."""

    def keep(server_args: Any) -> None:
        return None

    speculative_hook._disable_overlap_schedule_for_cpu = keep


patches.after_import("sglang.kernels.ops.speculative.gather_spec_extras")(common.gather_in_torch)
