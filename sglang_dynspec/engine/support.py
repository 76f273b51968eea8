"""Which servers dynspec can be in force on. Each refusal is one sentence with its remedy."""

from __future__ import annotations

from typing import Any

# (argument, value that is fine, sentence). Untested combinations are refused, not guessed at.
_ARGUMENTS: tuple[tuple[str, object, str], ...] = (
    ("tp_size", 1, "tensor parallelism is not supported yet"),
    ("pp_size", 1, "pipeline parallelism is not supported"),
    ("enable_dp_attention", False, "DP attention is not supported yet"),
    ("attn_cp_size", 1, "context parallelism is not supported"),
    ("disaggregation_mode", "null", "prefill-decode disaggregation is not supported yet"),
    ("enable_two_batch_overlap", False, "two-batch overlap is not supported"),
    ("enable_pdmux", False, "PD multiplexing is not supported"),
    ("enable_lora", None, "LoRA is not supported yet"),
    ("enable_hisparse", False, "HiSparse is not supported"),
    ("enable_unified_memory", False, "the unified memory pool is not supported yet"),
    ("enable_return_routed_experts", False, "returning routed experts is not supported yet"),
    ("enable_return_indexer_topk", False, "returning indexer top-k is not supported yet"),
    (
        "speculative_adaptive",
        False,
        "SGLang's own --speculative-adaptive also changes the number of draft steps; "
        "start the server without it",
    ),
    (
        "speculative_use_rejection_sampling",
        False,
        "--speculative-use-rejection-sampling is not supported yet",
    ),
)


def refusal(scheduler: Any) -> str | None:
    """Why dynspec must stay out of this scheduler, or None if it can be in force."""
    return (
        _speculation_refusal(scheduler)
        or _worker_refusal(scheduler)
        or _argument_refusal(scheduler.server_args)
        or _model_refusal(scheduler)
    )


def _speculation_refusal(scheduler: Any) -> str | None:
    if scheduler.spec_algorithm.is_none():
        return (
            "the server runs without speculative decoding; start it with "
            "--speculative-algorithm EAGLE or EAGLE3"
        )
    return None


def _worker_refusal(scheduler: Any) -> str | None:
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    worker = scheduler.draft_worker
    if type(worker) is not EAGLEWorkerV2:
        return (
            f"speculation runs through {type(worker).__name__}, and only EAGLEWorkerV2 is "
            "supported: --speculative-algorithm EAGLE or EAGLE3, up to SGLang 0.5.12 with the "
            "overlap scheduler, and up to 0.5.10 with SGLANG_ENABLE_SPEC_V2=1"
        )
    if worker.plan_stream is not None:
        return (
            "the overlap plan stream is not supported yet; start the server without "
            "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
        )
    if getattr(worker.draft_worker, "seed_dsa_topk_from_draft_extend", False):
        return "models with DeepSeek sparse attention in the draft model are not supported yet"
    if worker.topk != 1:
        return (
            f"--speculative-eagle-topk is {worker.topk}, and only 1 is supported; set it to 1, "
            "with --speculative-num-draft-tokens one more than --speculative-num-steps"
        )
    return None


def _argument_refusal(server_args: Any) -> str | None:
    for name, fine, sentence in _ARGUMENTS:
        # A release without the argument cannot have it set.
        value = getattr(server_args, name, fine)
        if value != fine and not (fine in (False, None) and not value):
            return f"{sentence} (--{name.replace('_', '-')} is {value})"
    return None


def _model_refusal(scheduler: Any) -> str | None:
    if scheduler.page_size != 1:
        return (
            f"KV pages of {scheduler.page_size} tokens are not supported yet; start the server "
            "with --page-size 1"
        )
    if scheduler.is_hybrid_ssm:
        return "hybrid models with state-space layers are not supported yet"
    if scheduler.is_hybrid_swa:
        return "models with sliding-window attention are not supported yet"
    return None
