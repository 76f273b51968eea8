"""Which servers dynspec can be in force on. Each refusal is one sentence with its remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from sglang_dynspec.engine.server_arguments import in_effect

# (argument, value that is fine, sentence). Untested combinations are refused, not guessed at.
_ARGUMENTS: tuple[tuple[str, object, str], ...] = (
    ("pp_size", 1, "pipeline parallelism is not supported"),
    ("attn_cp_size", 1, "context parallelism is not supported"),
    ("disaggregation_mode", "null", "prefill-decode disaggregation is not supported yet"),
    ("enable_two_batch_overlap", False, "two-batch overlap is not supported"),
    ("enable_pdmux", False, "PD multiplexing is not supported"),
    ("enable_lora", None, "LoRA is not supported yet"),
    # From 0.5.20 on, the arguments keep what was given, and SGLang sets enable_lora from this.
    ("lora_paths", None, "LoRA is not supported yet"),
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

_ALL_TO_ALL = "several ranks are supported without an all-to-all backend of experts only"

# As above, for servers with several ranks.
_ARGUMENTS_OF_SEVERAL_RANKS: tuple[tuple[str, object, str], ...] = (
    ("moe_a2a_backend", "none", _ALL_TO_ALL),
    ("speculative_moe_a2a_backend", "none", _ALL_TO_ALL),
    ("elastic_ep_backend", None, "several ranks are not supported together with elastic EP"),
)


def refusal(scheduler: Any) -> str | None:
    """Why dynspec must stay out of this scheduler, or None if it can be in force."""
    return (
        _speculation_refusal(scheduler)
        or _worker_refusal(scheduler)
        or next(_argument_refusals(in_effect(scheduler.server_args)), None)
        or _model_refusal(scheduler)
    )


def refusals_ahead(server_args: Any) -> list[str]:
    """All reasons to stay out that the server's arguments and the environment show by themselves,
    before there is a scheduler. Those that only the model shows are not among them.

    Args:
        server_args: SGLang's ServerArgs, or a view of what it has made of them.
    """
    return [*_speculation_refusals_ahead(server_args), *_argument_refusals(server_args)]


def attention_replicas(server_args: Any) -> int:
    """Ranks of DP attention, each with requests of its own; 1 without it."""
    # From 0.5.22 on --attn-dp-size, of which --enable-dp-attention is an older way to say it.
    said = getattr(server_args, "attn_dp_size", None) or 1
    return int(max(said, server_args.dp_size) if server_args.enable_dp_attention else said)


def environment_refusals() -> list[str]:
    """All reasons to stay out that SGLang's variables in the environment show by themselves."""
    from sglang.srt.environ import envs

    refusals = []
    if envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get():
        refusals.append(_PLAN_STREAM)
    spec_v2 = getattr(envs, "SGLANG_ENABLE_SPEC_V2", None)
    if spec_v2 is not None and not spec_v2.get() and not _speculates_without_overlap():
        refusals.append(_SPEC_V2)
    return refusals


def steps_refusal(steps: Sequence[int], most: int) -> str | None:
    """Why these draft steps cannot be had on a server with so many, or None if they can."""
    if all(n <= most for n in steps):
        return None
    return (
        f"steps are {', '.join(map(str, steps))}, but the server runs at most {most} draft steps; "
        "leave out what is above, or raise --speculative-num-steps"
    )


def only_on_off(worker: Any) -> str | None:
    """What keeps a worker to all of its draft steps or none, in words, or None.

    Other numbers need states of SGLang's adaptive speculation, which it has for EAGLE and EAGLE3
    with chains alone (``adaptive_unsupported_reason`` in its adaptive_spec_params.py).
    """
    if worker.speculative_algorithm.is_standalone():
        return "STANDALONE"
    return None if worker.topk == 1 else f"--speculative-eagle-topk {worker.topk}"


_NO_SPECULATION = (
    "the server runs without speculative decoding; start it with "
    "--speculative-algorithm EAGLE, EAGLE3 or STANDALONE"
)
_PLAN_STREAM = (
    "the overlap plan stream is not supported yet; start the server without "
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
)
_SPEC_V2 = (
    "SGLANG_ENABLE_SPEC_V2 is off, and this release then speculates without EAGLEWorkerV2; start "
    "the server with SGLANG_ENABLE_SPEC_V2=1"
)
_MULTI_LAYER = (
    "multi-layer EAGLE is not supported yet; start the server without --enable-multi-layer-eagle, "
    "or, where SGLang sets that for the model, without sglang_dynspec"
)
# NEXTN is SGLang's other name of EAGLE.
_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


def _wrong_algorithm(algorithm: str) -> str:
    return (
        f"--speculative-algorithm is {algorithm}, and only EAGLE, EAGLE3 and STANDALONE are "
        "supported; use one of them"
    )


def _wrong_worker(worker: type) -> str:
    # A draft model for each draft step, each with a state and graphs of its own.
    if worker.__name__.startswith("MultiLayerEagle"):
        return _MULTI_LAYER
    return (
        f"speculation runs through {worker.__name__}, and only EAGLEWorkerV2 and "
        "StandaloneWorkerV2 are supported; use --speculative-algorithm EAGLE, EAGLE3 or "
        "STANDALONE, up to SGLang 0.5.12 with the overlap scheduler and --speculative-eagle-topk "
        "1, and up to 0.5.10 with SGLANG_ENABLE_SPEC_V2=1"
    )


def _supported_workers() -> tuple[type, ...]:
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
    from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2

    # The second is derived from the first, and its draft worker from the first one's: both take
    # every method that dynspec wraps or calls from there.
    return EAGLEWorkerV2, StandaloneWorkerV2


def _wrong_topk(topk: int) -> str:
    return (
        f"--speculative-eagle-topk is {topk}, and up to SGLang 0.5.12 only 1 is supported; set it "
        "to 1, with --speculative-num-draft-tokens one more than --speculative-num-steps, or use "
        "0.5.13 or later"
    )


def _tree_in_pages(topk: int, page_size: int) -> str:
    # SGLang then keeps each branch of the tree in pages of its own (prepare_for_draft).
    return (
        f"--speculative-eagle-topk is {topk} and --page-size {page_size}, and only one of them "
        "above 1 is supported; set the other to 1"
    )


def _speculation_refusal(scheduler: Any) -> str | None:
    return _NO_SPECULATION if scheduler.spec_algorithm.is_none() else None


def _worker_refusal(scheduler: Any) -> str | None:
    worker = scheduler.draft_worker
    if type(worker) not in _supported_workers():
        return _wrong_worker(type(worker))
    if worker.plan_stream is not None:
        return _PLAN_STREAM
    if getattr(worker.draft_worker, "seed_dsa_topk_from_draft_extend", False):
        return "models with DeepSeek sparse attention in the draft model are not supported yet"
    if worker.topk != 1 and scheduler.page_size != 1:
        return _tree_in_pages(worker.topk, scheduler.page_size)
    if worker.speculative_algorithm.is_standalone() and _has_windows(worker.draft_worker):
        return "standalone draft models with sliding-window attention are not supported yet"
    return None


def _has_windows(draft_worker: Any) -> bool:
    return bool(draft_worker.draft_runner.model_config.is_hybrid_swa)


def _argument_refusals(server_args: Any) -> Iterator[str]:
    yield from _unsupported(server_args, _ARGUMENTS)
    if server_args.tp_size > 1:
        yield from _unsupported(server_args, _ARGUMENTS_OF_SEVERAL_RANKS)
    if attention_replicas(server_args) > 1:
        yield from _exchange_refusals()


def _unsupported(server_args: Any, arguments: tuple[tuple[str, object, str], ...]) -> Iterator[str]:
    for name, fine, sentence in arguments:
        # A release without the argument cannot have it set.
        value = getattr(server_args, name, fine)
        if value != fine and not (fine in (False, None, "none") and not value):
            yield f"{sentence} (--{name.replace('_', '-')} is {value})"


def _exchange_refusals() -> Iterator[str]:
    """What leaves the ranks of DP attention without the exchange in which they agree on a step, or
    has it mix prompts and steps."""
    from sglang.srt.environ import envs

    for name in ("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION"):
        switch = getattr(envs, name, None)  # the second from 0.5.21 on
        if switch is not None and switch.get():
            yield f"{name} is not supported with DP attention; start the server without it"


def _model_refusal(scheduler: Any) -> str | None:
    if scheduler.is_hybrid_ssm:
        return "hybrid models with state-space layers are not supported yet"
    if scheduler.is_hybrid_swa:
        return "models with sliding-window attention are not supported yet"
    # From 0.5.13 on, ForwardBatch of a plain decode takes their positions from lengths on the host,
    # which most attention backends do without.
    runner = scheduler.draft_worker.target_worker.model_runner
    if any(getattr(owner, "model_is_mrope", False) for owner in (runner, runner.model_config)):
        return "models with multimodal rotary positions (M-RoPE) are not supported yet"
    return _page_refusal(scheduler)


def _page_refusal(scheduler: Any) -> str | None:
    # A plain step writes KV in the slot that SGLang has reserved, whatever the page. Pools of other
    # kinds, of sparse attention say, keep more than that by the page, and are untested.
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    pool = type(scheduler.token_to_kv_pool_allocator.get_kvcache())
    if scheduler.page_size == 1 or pool in (MHATokenToKVPool, MLATokenToKVPool):
        return None
    return (
        f"KV pages of {scheduler.page_size} tokens are not supported yet with a pool of class "
        f"{pool.__name__}; start the server with --page-size 1 where the model can do with that"
    )


def _speculation_refusals_ahead(server_args: Any) -> Iterator[str]:
    algorithm = server_args.speculative_algorithm
    if algorithm is None:
        yield _NO_SPECULATION
        return
    worker = _worker_class(algorithm, server_args)
    # None stands for what SGLang chooses later, by the model.
    topk, page_size = server_args.speculative_eagle_topk, server_args.page_size
    if algorithm not in _ALGORITHMS:
        yield _wrong_algorithm(algorithm)
    elif topk not in (None, 1) and not _speculates_without_overlap():
        yield _wrong_topk(topk)  # SGLang takes an older worker then, or does not start (to 0.5.10)
    elif worker is not None and worker not in _supported_workers():
        yield _wrong_worker(worker)
    elif topk not in (None, 1) and page_size not in (None, 1):
        yield _tree_in_pages(topk, page_size)


def _worker_class(algorithm: str, server_args: Any) -> type | None:
    """The class that SGLang speculates with, or None where it does not say."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    try:
        worker = SpeculativeAlgorithm.from_string(algorithm).create_worker(server_args)
    except Exception:
        return None
    return worker if isinstance(worker, type) else None


def _speculates_without_overlap() -> bool:
    """Whether EAGLEWorkerV2 runs without the overlap scheduler, too, as from 0.5.13 on."""
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    without = SimpleNamespace(disable_overlap_schedule=True, enable_multi_layer_eagle=False)
    return _worker_class("EAGLE", without) is EAGLEWorkerV2
