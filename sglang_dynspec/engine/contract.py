"""The names of SGLang that dynspec wraps, calls or reads, with the reason.

This is the register to look at when a new SGLang release comes out. ``probe`` holds the names
against the SGLang that is installed, before the wrappers around its steps are set; ``probe_live``
holds attributes against the objects of a running server, where no class declares them, before
dynspec is in force. (Only ``Scheduler.__init__`` and ``get_internal_state`` are wrapped before: the
one is where all this happens, the other is where its outcome shows.)
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Use = Literal["wrap", "call", "read"]


@dataclass(frozen=True, slots=True)
class Name:
    """One name of SGLang.

    Attributes:
        path: ``module:qualified.name``.
        use: wrapped by us, called by us, or only read.
        why: what for.
        parameters: parameters that it must accept, in this order, ``self`` left out.
        keywords: parameters that it must accept by name.
        fields: attributes that it must declare (dataclass fields, annotations or class attributes).
    """

    path: str
    use: Use
    why: str
    parameters: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


SCHEDULER_INIT = "sglang.srt.managers.scheduler:Scheduler.__init__"
PREPARE_FOR_DECODE = "sglang.srt.managers.schedule_batch:ScheduleBatch.prepare_for_decode"
FORWARD = "sglang.srt.speculative.eagle_worker_v2:EAGLEWorkerV2.forward_batch_generation"
DRAFT_PREFILL = "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_prefill"
PROCESS_RESULT = "sglang.srt.managers.scheduler:Scheduler.process_batch_result"
INTERNAL_STATE = "sglang.srt.managers.scheduler:Scheduler.get_internal_state"
RUN_BATCH = "sglang.srt.managers.scheduler:Scheduler.run_batch"
RESOLVE_EXTRAS = "sglang.srt.managers.overlap_utils:FutureMap._resolve_spec_extras"
RESOLVE_LENGTHS = "sglang.srt.managers.overlap_utils:FutureMap.resolve_seq_lens_cpu"
STASH = "sglang.srt.managers.overlap_utils:FutureMap.stash"

DECODE_BATCH_FIELDS = (
    "forward_mode",
    "input_ids",
    "req_pool_indices",
    "seq_lens",
    "seq_lens_cpu",
    "seq_lens_sum",
    "out_cache_loc",
    "spec_info",
    "spec_algorithm",
)
"""Of the decode batch that the worker gets; its class changed with 0.5.13."""

# Names with the same shape on every supported release; a dialect adds those that differ.
COMMON: tuple[Name, ...] = (
    Name(SCHEDULER_INIT, "wrap", "the place where arguments, worker and pools are known"),
    Name(PREPARE_FOR_DECODE, "wrap", "the decision is taken before the decode batch is prepared"),
    Name(
        PROCESS_RESULT,
        "wrap",
        "accept lengths are on the host here, and go back to the policy",
        parameters=("batch", "result"),
    ),
    Name(
        DRAFT_PREFILL,
        "wrap",
        "left out where the policy does without it, draft state `skip`",
        parameters=("batch", "target_hidden_states", "next_token_ids"),
    ),
    Name(
        INTERNAL_STATE,
        "wrap",
        "adds `dynspec` to /server_info",
        parameters=("recv_req",),
    ),
    Name(
        "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_decode",
        "call",
        "writes the draft's KV of a plain step, draft state `warm`",
        parameters=("batch", "batch_result"),
    ),
    Name(
        "sglang.srt.managers.utils:GenerationBatchResult",
        "call",
        "what the worker returns",
        fields=("next_token_ids", "logits_output", "accept_lens", "next_draft_input"),
    ),
    Name(
        "sglang.srt.model_executor.model_runner:ModelRunner._get_attention_backend",
        "call",
        "attention of the decode graphs",
        parameters=("init_new_workspace",),
    ),
    Name(
        "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo",
        "read",
        "what plain decode would have to sample with",
        fields=(
            "penalizer_orchestrator",
            "logit_bias",
            "need_min_p_sampling",
            "has_custom_logit_processor",
            "sampling_seed",
        ),
    ),
    Name(
        "sglang.srt.managers.schedule_batch:ScheduleBatch",
        "read",
        "whether this batch can be decoded plainly",
        fields=(
            "reqs",
            "spec_info",
            "sampling_info",
            "has_grammar",
            "return_logprob",
            "return_hidden_states",
            "multimodal_inputs",
        ),
    ),
    Name(
        "sglang.srt.server_args:ServerArgs",
        "read",
        "arguments that dynspec does not go together with (engine/support.py)",
        fields=(
            "tp_size",
            "pp_size",
            "enable_dp_attention",
            "disaggregation_mode",
            "enable_two_batch_overlap",
            "enable_lora",
        ),
    ),
    Name(
        "sglang.srt.model_executor.forward_batch_info:ForwardMode",
        "read",
        "what kind of batch it is",
        fields=("is_decode", "is_extend", "is_mixed", "is_idle"),
    ),
    Name(
        "sglang.srt.layers.moe.utils:speculative_moe_backend_context",
        "call",
        "a context that SGLang runs its draft in",
    ),
    Name(
        "sglang.srt.layers.moe.utils:speculative_moe_a2a_backend_context",
        "call",
        "a context that SGLang runs its draft in",
    ),
    Name(
        "sglang.srt.model_executor.forward_batch_info:CaptureHiddenMode",
        "read",
        "whether the target's hidden states are kept for the draft",
        fields=("NULL", "FULL"),
    ),
    Name(
        "sglang.srt.speculative.spec_info:SpeculativeAlgorithm",
        "read",
        "NONE hides speculation from the target for a plain step",
        fields=("NONE", "EAGLE", "EAGLE3"),
    ),
)

LIVE: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "scheduler",
        (
            "waiting_queue",
            "running_batch",
            "max_running_requests",
            "req_to_token_pool",
            "server_args",
            "page_size",
            "tree_cache",
        ),
    ),
    ("scheduler.token_to_kv_pool_allocator", ("available_size", "size")),
    ("scheduler.tree_cache", ("evictable_size",)),
    (
        "scheduler.draft_worker",
        ("target_worker", "draft_worker", "req_to_token_pool", "speculative_num_steps", "device"),
    ),
    ("scheduler.draft_worker.draft_worker", ("speculative_num_draft_tokens", "draft_runner")),
    ("scheduler.draft_worker.target_worker.model_runner", ("spec_algorithm", "attn_backend")),
)
"""Attributes that objects of a running server must have, on every supported release."""


def probe(names: Iterable[Name]) -> list[str]:
    """Hold names against the installed SGLang.

    Returns:
        A sentence for each mismatch; empty when all is as the table says.
    """
    return [problem for name in names for problem in _problems(name)]


def probe_live(scheduler: Any, attributes: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Hold attributes against the objects of a running server.

    Args:
        scheduler: SGLang's Scheduler.
        attributes: paths of objects from the scheduler on, and what each must have.

    Returns:
        A sentence for each object that lacks some; empty when all is as the table says.
    """
    problems = []
    for path, names in attributes:
        found = scheduler
        for part in path.split(".")[1:]:
            found = getattr(found, part, None)
        missing = [name for name in names if not hasattr(found, name)]
        if missing:
            problems.append(f"{path} has no {', '.join(missing)}")
    return problems


def resolve(path: str) -> Any:
    """The object behind ``module:qualified.name``.

    Raises:
        ImportError: the module cannot be imported.
        AttributeError: the module has no such name.
    """
    module, _, qualname = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _problems(name: Name) -> list[str]:
    try:
        found = resolve(name.path)
    except (ImportError, AttributeError) as error:
        return [f"{name.path} is not there ({error})"]
    return _parameter_problems(name, found) + _field_problems(name, found)


def _parameter_problems(name: Name, found: Any) -> list[str]:
    if not name.parameters and not name.keywords:
        return []
    has = [p for p in inspect.signature(found).parameters if p != "self"]
    fits = tuple(has[: len(name.parameters)]) == name.parameters
    if fits and set(name.keywords) <= set(has):
        return []
    expected = ", ".join((*name.parameters, "...", *name.keywords))
    return [f"{name.path} takes ({', '.join(has)}), expected ({expected})"]


def _field_problems(name: Name, found: Any) -> list[str]:
    if not name.fields:
        return []
    declared: set[str] = set()
    if dataclasses.is_dataclass(found):
        declared.update(f.name for f in dataclasses.fields(found))
    for cls in found.__mro__:
        declared.update(inspect.get_annotations(cls))
        declared.update(vars(cls))
    missing = [f for f in name.fields if f not in declared]
    return [f"{name.path} has no {', '.join(missing)}"] if missing else []
