"""SGLang 0.5.20 to 0.5.23: they have CPU branches, which call ``sgl_kernel.*_cpu`` functions."""

from __future__ import annotations

from typing import Any

from sglang_dynspec.testing._cpu.hooks import Patches

patches = Patches()

RELEASES = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")


@patches.after_import("sglang.srt.speculative.eagle_utils")
def _sample_when_verifying(eagle_utils: Any) -> None:
    """Verify by rejection sampling at temperature > 0, as on a GPU; a CPU verifies greedily."""
    from sglang_dynspec.testing._cpu import kernels

    uses_greedy = eagle_utils._verify_uses_greedy

    def uses_greedy_as_on_gpu(**facts: Any) -> bool:
        return bool(uses_greedy(**{**facts, "is_cpu": False}))

    eagle_utils._verify_uses_greedy = uses_greedy_as_on_gpu
    for name in (
        "top_k_renorm_prob",
        "top_p_renorm_prob",
        "tree_speculative_sampling_target_only",
    ):
        setattr(eagle_utils, name, getattr(kernels, name))
    eagle_utils.sampling_softmax = kernels.softmax


@patches.after_import("sglang.srt.arg_groups.speculative_hook")
def _allow_overlap(speculative_hook: Any) -> None:
    """Leave the overlap scheduler on unless asked; upstream turns it off here on any CPU."""

    def keep(server_args: Any) -> None:
        return None

    speculative_hook._disable_overlap_schedule_for_cpu = keep


@patches.after_import("sglang.kernels.ops.speculative.gather_spec_extras")
def _gather_in_torch(gather_module: Any) -> None:
    """The overlap scheduler's relay of draft inputs: a Triton kernel upstream."""

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
