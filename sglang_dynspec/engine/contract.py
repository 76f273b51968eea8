"""The names of SGLang that dynspec wraps, calls or reads, with the reason.

This is the register to look at when a new SGLang release comes out, together with what each dialect
adds for its releases. ``probe`` holds the names against the SGLang that is installed, before the
wrappers around its steps are set; ``probe_live`` holds attributes against the objects of a running
server, where no class declares them, before dynspec is in force. (Only ``Scheduler.__init__`` and
``get_internal_state`` are wrapped before: the one is where all this happens, the other is where its
outcome shows.) ``nox -s contract`` holds all of it against the sources of every release.
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
        use: wrapped by us, called by us (or put in its place for a moment), or only read.
        why: what for.
        parameters: parameters that it must accept, in this order, ``self`` left out. What is called
            must need no others.
        keywords: parameters that it must accept by name.
        fields: attributes that it must declare (dataclass fields, annotations or class attributes).
    """

    path: str
    use: Use
    why: str
    parameters: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Live:
    """Attributes of an object of the running server.

    Attributes:
        path: the object, by attributes from the scheduler on; its class is in ``OBJECTS``.
        fields: attributes that it must have.
        why: what for.
    """

    path: str
    fields: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Instance:
    """Attributes of objects that come and go while serving, or that dynspec can do without.

    Nothing at the start of a server can show them, or should refuse it for lack of them. Only the
    test that reads the sources of a release does.

    Attributes:
        path: the class, as ``module:qualified.name``.
        fields: attributes that the class must declare, or its methods set on ``self``; ``a.b``
            where they set it on an attribute of ``self``.
        why: what for.
    """

    path: str
    fields: tuple[str, ...]
    why: str


SCHEDULER_INIT = "sglang.srt.managers.scheduler:Scheduler.__init__"
PREPARE_FOR_DECODE = "sglang.srt.managers.schedule_batch:ScheduleBatch.prepare_for_decode"
FORWARD = "sglang.srt.speculative.eagle_worker_v2:EAGLEWorkerV2.forward_batch_generation"
DRAFT_PREFILL = "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_prefill"
PROCESS_RESULT = "sglang.srt.managers.scheduler:Scheduler.process_batch_result"
INTERNAL_STATE = "sglang.srt.managers.scheduler:Scheduler.get_internal_state"
SET_INTERNAL_STATE = "sglang.srt.managers.scheduler:Scheduler.set_internal_state"
RUN_BATCH = "sglang.srt.managers.scheduler:Scheduler.run_batch"
RESOLVE_EXTRAS = "sglang.srt.managers.overlap_utils:FutureMap._resolve_spec_extras"
RESOLVE_LENGTHS = "sglang.srt.managers.overlap_utils:FutureMap.resolve_seq_lens_cpu"
STASH = "sglang.srt.managers.overlap_utils:FutureMap.stash"
SLEEP_ON_IDLE = "sglang.srt.managers.scheduler:Scheduler.maybe_sleep_on_idle"

DECODE_BATCH_FIELDS = (
    "forward_mode",
    "is_extend_in_batch",
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
PREFILL_BATCH_FIELDS = (
    "extend_num_tokens",
    "extend_logprob_start_lens",
    "return_logprob",
    "multimodal_inputs",
    "input_embeds",
    "global_num_tokens",
    "global_num_tokens_for_logprob",
    "reqs",
)
"""Of a batch that is prefilled, which a decode batch becomes to let the draft catch up."""

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
        "left out where the policy does without it; called to let the draft catch up",
        parameters=("batch", "target_hidden_states", "next_token_ids"),
    ),
    Name(
        INTERNAL_STATE,
        "wrap",
        "adds `dynspec` to /server_info",
        parameters=("recv_req",),
    ),
    Name(SLEEP_ON_IDLE, "wrap", "the last steps before idleness reach the metrics"),
    Name(
        "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_decode",
        "call",
        "writes the draft's KV of a plain step, draft state `warm`",
        parameters=("batch", "batch_result"),
    ),
    Name(
        "sglang.srt.managers.io_struct:GetInternalStateReqOutput",
        "read",
        "what /server_info shows",
        fields=("internal_state",),
    ),
    Name(
        "sglang.srt.speculative.eagle_worker_v2:EAGLEWorkerV2",
        "read",
        "one of the workers that dynspec supports, and the base of the other",
    ),
    Name(
        "sglang.srt.speculative.eagle_info:EagleDraftInput.is_draft_input",
        "call",
        "whether a batch comes with the draft state of a decode step",
    ),
    Name(
        "sglang.srt.managers.utils:GenerationBatchResult",
        "read",
        "what the worker returns",
        fields=("next_token_ids", "logits_output", "accept_lens", "next_draft_input"),
    ),
    Name(
        "sglang.srt.layers.logits_processor:LogitsProcessorOutput",
        "read",
        "the hidden states that the draft model consumes",
        fields=("hidden_states",),
    ),
    Name(
        "sglang.srt.speculative.eagle_info:EagleDraftInput",
        "read",
        "the proposals, which follow when the draft has caught up",
        fields=("topk_p", "topk_index", "hidden_states"),
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
            "is_all_greedy",
            "grammars",
        ),
    ),
    Name("sglang.srt.environ:envs", "read", "switches of SGLang that dynspec does not go with"),
    Name(
        "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.update_regex_vocab_mask",
        "call",
        "the mask of grammars, for a plain step that samples as a verification",
    ),
    Name(
        "sglang.srt.managers.schedule_batch:ScheduleBatch",
        "read",
        "whether this batch can be decoded plainly",
        fields=(
            "reqs",
            "req_to_token_pool",
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
            "device",
            "pp_size",
            "enable_dp_attention",
            "attn_cp_size",
            "disaggregation_mode",
            "enable_two_batch_overlap",
            "enable_pdmux",
            "enable_lora",
            "lora_paths",
            "enable_return_routed_experts",
            "enable_return_hidden_states",
        ),
    ),
    Name(
        "sglang.srt.server_args:ServerArgs",
        "read",
        "what the trace of decisions says of a server",
        fields=("model_path",),
    ),
    *(
        Name(
            f"sglang.srt.mem_cache.memory_pool:{pool}",
            "read",
            "the KV pools that dynspec supports with pages of more than one token",
        )
        for pool in ("MHATokenToKVPool", "MLATokenToKVPool")
    ),
    Name(
        "sglang.srt.model_executor.forward_batch_info:ForwardMode",
        "read",
        "what kind of batch it is",
        fields=("is_decode", "is_extend", "is_mixed", "is_idle", "EXTEND"),
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
        fields=("NULL", "LAST", "FULL"),
    ),
    Name(
        "sglang.srt.speculative.spec_info:SpeculativeAlgorithm",
        "read",
        "NONE hides speculation from the target for a plain step; whether the server speculates, "
        "and with a draft model that is a model of its own",
        fields=("NONE", "is_none", "is_standalone", "is_eagle3"),
    ),
    Name(
        "sglang.srt.speculative.standalone_worker_v2:StandaloneWorkerV2",
        "read",
        "supported as EAGLEWorkerV2 is, from which it has what dynspec wraps and calls",
        fields=("forward_batch_generation",),
    ),
)

# Changes while a server serves, without which it serves as well: probed by themselves.

CHANGES: tuple[Name, ...] = (
    Name(
        SET_INTERNAL_STATE,
        "wrap",
        "carries changes to the schedulers",
        parameters=("recv_req",),
    ),
    Name(
        "sglang.srt.managers.io_struct:SetInternalStateReq",
        "read",
        "carries changes to the schedulers",
        fields=("server_args",),
    ),
    Name(
        "sglang.srt.managers.io_struct:SetInternalStateReqOutput",
        "read",
        "the answer to a change",
        fields=("updated",),
    ),
)
_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
ROUTE: tuple[Name, ...] = (
    Name("sglang.srt.entrypoints.http_server:app", "read", "gets the route /dynspec"),
    Name(
        "sglang.srt.entrypoints.http_server:_global_state",
        "read",
        "where the route finds the tokenizer manager",
    ),
    Name(
        "sglang.srt.entrypoints.http_server:_GlobalState",
        "read",
        "where the route finds the tokenizer manager",
        fields=("tokenizer_manager",),
    ),
    Name(
        "sglang.srt.utils.auth:auth_level",
        "call",
        "the route is guarded as SGLang's own control routes are",
        parameters=("level",),
    ),
    Name(
        "sglang.srt.utils.auth:AuthLevel",
        "read",
        "the route is guarded as SGLang's own control routes are",
        fields=("ADMIN_OPTIONAL",),
    ),
    Name(
        f"{_TOKENIZER_MANAGER}.set_internal_state",
        "call",
        "the route sends changes to the schedulers",
        parameters=("obj",),
    ),
    Name(
        f"{_TOKENIZER_MANAGER}.get_internal_state",
        "call",
        "the route reads what has come of them",
    ),
    Name(
        f"{_TOKENIZER_MANAGER}.auto_create_handle_loop",
        "call",
        "up to 0.5.9 only other requests let the tokenizer manager read answers",
    ),
)

OBJECTS: dict[str, str] = {
    "scheduler": "sglang.srt.managers.scheduler:Scheduler",
    "scheduler.metrics_reporter": (
        "sglang.srt.managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter"
    ),
    "scheduler.token_to_kv_pool_allocator": "sglang.srt.mem_cache.allocator:TokenToKVPoolAllocator",
    "scheduler.tree_cache": "sglang.srt.mem_cache.radix_cache:RadixCache",
    "scheduler.draft_worker": "sglang.srt.speculative.eagle_worker_v2:EAGLEWorkerV2",
    "scheduler.draft_worker.req_to_token_pool": "sglang.srt.mem_cache.memory_pool:ReqToTokenPool",
    "scheduler.draft_worker.target_worker": "sglang.srt.managers.tp_worker:TpModelWorker",
    "scheduler.draft_worker.target_worker.model_runner": (
        "sglang.srt.model_executor.model_runner:ModelRunner"
    ),
    "scheduler.draft_worker.draft_worker": (
        "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker"
    ),
    "scheduler.draft_worker.draft_worker.draft_runner": (
        "sglang.srt.model_executor.model_runner:ModelRunner"
    ),
    "scheduler.draft_worker.target_worker.model_runner.model_config": (
        "sglang.srt.configs.model_config:ModelConfig"
    ),
    "scheduler.draft_worker.draft_worker.draft_runner.model_config": (
        "sglang.srt.configs.model_config:ModelConfig"
    ),
}
"""The classes of the objects in ``Live``, on the servers that dynspec supports."""

TARGET_RUNNER = "scheduler.draft_worker.target_worker.model_runner"
TARGET_CONFIG = f"{TARGET_RUNNER}.model_config"
DRAFT_WORKER = "scheduler.draft_worker.draft_worker"
DRAFT_RUNNER = "scheduler.draft_worker.draft_worker.draft_runner"
DRAFT_CONFIG = "scheduler.draft_worker.draft_worker.draft_runner.model_config"

# What every supported release has; a dialect adds those that differ.
LIVE: tuple[Live, ...] = (
    Live(
        "scheduler",
        ("draft_worker", "server_args", "spec_algorithm", "is_hybrid_ssm", "is_hybrid_swa"),
        "whether the server is one that dynspec supports (engine/support.py)",
    ),
    Live("scheduler", ("page_size",), "whether the server is one that dynspec supports"),
    Live(
        "scheduler.token_to_kv_pool_allocator",
        ("get_kvcache",),
        "whether pages of more than one token hold nothing but keys and values",
    ),
    Live(
        "scheduler",
        (
            "waiting_queue",
            "running_batch",
            "max_running_requests",
            "chunked_prefill_size",
            "tree_cache",
            "token_to_kv_pool_allocator",
        ),
        "what a policy sees, and the most that the draft can take in at once",
    ),
    Live("scheduler.token_to_kv_pool_allocator", ("available_size", "size"), "KV use"),
    Live("scheduler.tree_cache", ("evictable_size",), "KV use"),
    Live("scheduler.draft_worker", ("topk", "plan_stream"), "whether dynspec supports them"),
    Live(
        "scheduler.draft_worker",
        ("speculative_algorithm",),
        "whether the draft model reads the target's hidden states",
    ),
    Live(
        "scheduler.draft_worker",
        ("target_worker", "draft_worker", "req_to_token_pool", "speculative_num_steps", "device"),
        "what a plain step runs with",
    ),
    Live("scheduler.draft_worker.req_to_token_pool", ("req_to_token",), "the slots of a step"),
    Live("scheduler.draft_worker.target_worker", ("model_runner",), "the target"),
    Live(
        TARGET_RUNNER,
        ("spec_algorithm", "attn_backend", "device"),
        "the target as it is without speculation",
    ),
    Live(
        DRAFT_WORKER,
        ("speculative_num_draft_tokens", "draft_runner"),
        "the draft's step after a plain one",
    ),
    Live(
        DRAFT_RUNNER,
        ("attn_backend", "model_config"),
        "the draft's step after a plain one, and the shape of its proposals",
    ),
    Live(DRAFT_CONFIG, ("dtype",), "the shape of proposals"),
    Live(DRAFT_CONFIG, ("hf_config",), "the hidden states that an EAGLE-3 draft reads"),
    Live(TARGET_RUNNER, ("model_config",), "the hidden states that are kept for the draft"),
    Live(TARGET_CONFIG, ("hidden_size", "dtype"), "the hidden states that are kept for the draft"),
    Live(DRAFT_CONFIG, ("is_hybrid_swa",), "whether dynspec supports a standalone draft"),
)

INSTANCES: tuple[Instance, ...] = (
    Instance(
        "sglang.srt.sampling.penaltylib.orchestrator:BatchedPenalizerOrchestrator",
        ("is_required",),
        "whether a batch has penalties, which plain decode does not do yet",
    ),
    Instance(
        "sglang.srt.managers.schedule_batch:Req",
        ("sampling_params", "return_hidden_states"),
        "what a request asks for",
    ),
    Instance(
        "sglang.srt.sampling.sampling_params:SamplingParams",
        ("custom_params",),
        "whether a request asks for speculation, or for none",
    ),
    Instance(
        "sglang.srt.model_executor.model_runner:ModelRunner",
        ("init_new_workspace",),
        "restored after the attention of the decode graphs has been made",
    ),
    Instance(
        "sglang.srt.layers.attention.flashinfer_backend:FlashInferAttnBackend",
        ("skip_prefill",),
        "the attention of the decode graphs needs no masks of verification",
    ),
    Instance(
        "sglang.srt.layers.attention.triton_backend:TritonAttnBackend",
        ("skip_prefill",),
        "the attention of the decode graphs needs no masks of verification",
    ),
    Instance(
        "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker",
        ("draft_extend_attn_backend", "cuda_graph_runner_for_draft_extend"),
        "the draft's step after a plain one, and the timing of its graphs",
    ),
)


def probe(names: Iterable[Name]) -> list[str]:
    """Hold names against the installed SGLang.

    Returns:
        A sentence for each mismatch; empty when all is as the table says.
    """
    return [problem for name in names for problem in _problems(name)]


def probe_live(scheduler: Any, entries: Iterable[Live]) -> list[str]:
    """Hold attributes against the objects of a running server.

    Args:
        scheduler: SGLang's Scheduler.
        entries: what its objects must have.

    Returns:
        A sentence for each entry whose object lacks some; empty when all is as the table says.
    """
    problems: list[str] = []
    for entry in entries:
        found = scheduler
        for part in entry.path.split(".")[1:]:
            found = getattr(found, part, None)
        problems += lacking(entry.path, (f for f in entry.fields if not hasattr(found, f)))
    return problems


def owner_of(path: str) -> tuple[Any, str]:
    """What has the name at its end, a class or a module, and the name.

    Raises:
        ImportError, AttributeError: as :func:`resolve`.
    """
    module, _, qualname = path.partition(":")
    owner, _, attribute = qualname.rpartition(".")
    return (resolve(f"{module}:{owner}") if owner else importlib.import_module(module)), attribute


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


def signature_problems(name: Name, signature: inspect.Signature) -> list[str]:
    """Hold what a name is to accept against what it takes, its ``self`` aside."""
    takes = {n: p for n, p in signature.parameters.items() if n != "self"}
    passed = {*name.parameters, *name.keywords}
    problems = []
    if tuple(takes)[: len(name.parameters)] != name.parameters:
        expected = ", ".join((*name.parameters, "..."))
        problems.append(f"{name.path} takes ({', '.join(takes)}), expected ({expected})")
    if lacks := [k for k in name.keywords if k not in takes]:
        problems.append(f"{name.path} does not take {', '.join(lacks)}")
    # A wrapper passes on whatever SGLang passes; only what we call ourselves can lack an argument.
    needs = [n for n, p in takes.items() if _is_needed(p) and n not in passed]
    if needs and name.use == "call":
        problems.append(f"{name.path} needs {', '.join(needs)}, which dynspec does not pass")
    return problems


def inherited(name: Name) -> list[str]:
    """The sentence about a name that its class has from another: such a one cannot be wrapped."""
    return [f"{name.path} is inherited, expected in the class itself"]


def lacking(what: str, missing: Iterable[str]) -> list[str]:
    """The sentence about attributes that something lacks; none if there are none."""
    names = ", ".join(missing)
    return [f"{what} has no {names}"] if names else []


def _problems(name: Name) -> list[str]:
    try:
        found = resolve(name.path)
    except (ImportError, AttributeError) as error:
        return [f"{name.path} is not there ({error})"]
    problems = lacking(name.path, _undeclared(name, found))
    if name.use == "wrap" and not _is_own(name):
        problems += inherited(name)
    if name.use == "call" or name.parameters or name.keywords:
        problems += signature_problems(name, inspect.signature(found))
    return problems


def _is_own(name: Name) -> bool:
    owner, attribute = owner_of(name.path)
    return attribute in vars(owner)


def _is_needed(parameter: inspect.Parameter) -> bool:
    packed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in packed


def _undeclared(name: Name, found: Any) -> list[str]:
    if not name.fields:
        return []
    declared: set[str] = set()
    if dataclasses.is_dataclass(found):
        declared.update(f.name for f in dataclasses.fields(found))
    for cls in found.__mro__:
        declared.update(inspect.get_annotations(cls))
        declared.update(vars(cls))
    return [f for f in name.fields if f not in declared]
