"""The names of SGLang that not every supported release has, by the releases that they came with or
went after; the dialects put their contracts together from them."""

from __future__ import annotations

from dataclasses import replace

from sglang_dynspec.engine.contract import (
    DECODE_BATCH_FIELDS,
    DRAFT_CONFIG,
    DRAFT_RUNNER,
    DRAFT_WORKER,
    FORWARD,
    PREFILL_BATCH_FIELDS,
    RESOLVE_EXTRAS,
    RESOLVE_LENGTHS,
    RUN_BATCH,
    STASH,
    TARGET_RUNNER,
    Instance,
    Live,
    Name,
)

_CUDA_GRAPH_RUNNER = "sglang.srt.model_executor.cuda_graph_runner:CudaGraphRunner"
_DECODE_GRAPH_RUNNER = (
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner"
)
_DRAFT_GRAPH_RUNNERS = (
    "sglang.srt.speculative.eagle_draft_cuda_graph_runner:EAGLEDraftCudaGraphRunner",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner:EAGLEDraftExtendCudaGraphRunner",
)
_DRAFT_WORKER = "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker"
_ADAPTIVE_WORKER = "sglang.srt.speculative.eagle_worker_v2:EAGLEWorkerV2"
_WIDTHS = ("speculative_num_steps", "speculative_num_draft_tokens")
_PLAIN_FORWARD = "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation"


# A plain step that samples as a verification does.

VERIFIED_BY_METHOD = Name(
    "sglang.srt.speculative.eagle_info_v2:EagleVerifyInputV2Mixin.sample",
    "call",
    "how a verification samples",
    parameters=("batch", "logits_output", "vocab_mask"),
)
VERIFIED_BY_FUNCTION = Name(
    "sglang.srt.speculative.eagle_utils:eagle_sample",
    "call",
    "how a verification samples",
    parameters=("verify_input", "batch", "logits_output"),
)
_TREE_LOGPROBS = ("batch", "logits_output", "predict", "accept_index", "speculative_num_steps")
LOGPROBS_TO_0_5_15 = Name(
    "sglang.srt.layers.utils.logprob:compute_spec_v2_logprobs",
    "call",
    "log-probabilities of accepted tokens",
    parameters=_TREE_LOGPROBS,
)
LOGPROBS_TO_0_5_17 = replace(
    LOGPROBS_TO_0_5_15, path="sglang.srt.layers.logprob_processor:compute_spec_v2_logprobs"
)
LOGPROBS_FROM_0_5_18 = Name(
    "sglang.srt.layers.logprob_processor:compute_spec_logprobs",
    "call",
    "log-probabilities of accepted tokens",
    parameters=("batch", "logits_output", "predict"),
    keywords=("accept_index",),
)


def _arguments(*fields: str) -> Name:
    return Name(
        "sglang.srt.server_args:ServerArgs",
        "read",
        "arguments that dynspec does not go together with, which came later (engine/support.py)",
        fields=fields,
    )


def _draft_input(*more: str, fields: tuple[str, ...] = ()) -> Name:
    return Name(
        "sglang.srt.speculative.eagle_info:EagleDraftInput",
        "call",
        "the draft state of the next step",
        keywords=(
            "topk_p",
            "topk_index",
            "hidden_states",
            "num_tokens_per_req",
            "num_tokens_for_logprob_per_req",
            *more,
        ),
        fields=fields,
    )


def _result(*fields: str) -> Name:
    return Name(
        "sglang.srt.managers.utils:GenerationBatchResult",
        "read",
        "what the scheduler reads back, which came later",
        fields=fields,
    )


def _sampling(field: str) -> Name:
    return Name(
        "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo",
        "read",
        "what plain decode would have to sample with, which came later",
        fields=(field,),
    )


VOCAB_MASK = _sampling("vocab_mask")
GRAMMAR_MASK = _sampling("grammar_mask")
VERIFIED_FROM_0_5_18 = (VERIFIED_BY_FUNCTION, GRAMMAR_MASK, LOGPROBS_FROM_0_5_18)


def _graph_runner(path: str) -> Name:
    return Name(
        path,
        "call",
        "graphs of plain decode",
        parameters=("model_runner",),
        keywords=("attn_backend", "speculative_num_steps", "speculative_num_draft_tokens"),
    )


def _one_mode(path: str, *fields: str) -> Instance:
    return Instance(path, fields, "graphs of plain decode keep the hidden states of one mode")


def _timed(field: str, *paths: str) -> tuple[Instance, ...]:
    return tuple(Instance(path, (field,), "graphs are timed at start") for path in paths)


# Ranks.

BROADCAST_TO_0_5_12 = Name(
    "sglang.srt.managers.scheduler:broadcast_pyobj",
    "wrap",
    "rank 0's decision goes to the other ranks with the requests",
    parameters=("data", "rank", "dist_group"),
)
BROADCAST_FROM_0_5_13 = replace(
    BROADCAST_TO_0_5_12,
    path="sglang.srt.managers.scheduler_components.request_receiver:broadcast_pyobj",
)

# DP attention.

EXCHANGE_TO_0_5_12 = Name(
    "sglang.srt.managers.scheduler_dp_attn_mixin:MLPSyncBatchInfo.all_gather",
    "wrap",
    "what a rank of DP attention wants travels in its number of tokens for logits",
)
EXCHANGE_FROM_0_5_13 = replace(
    EXCHANGE_TO_0_5_12,
    path="sglang.srt.managers.scheduler_components.dp_attn:MLPSyncBatchInfo.all_gather",
)
_EXCHANGED = (
    "num_tokens",
    "num_tokens_for_logprob",
    "global_num_tokens_for_logprob",
    "is_extend_in_batch",
)


def _exchanged(exchange: Name) -> Name:
    return Name(
        exchange.path.rpartition(".")[0],
        "read",
        "what the ranks of DP attention tell each other",
        fields=_EXCHANGED,
    )


# Metrics.

LOG_STATS_OF_0_5_9 = Name(
    "sglang.srt.metrics.collector:SchedulerMetricsCollector.log_stats",
    "wrap",
    "dynspec's metrics follow SGLang's",
    parameters=("stats",),
)
LOG_STATS_FROM_0_5_10 = replace(
    LOG_STATS_OF_0_5_9,
    path="sglang.srt.observability.metrics_collector:SchedulerMetricsCollector.log_stats",
)


def metric_labels(log_stats: Name) -> Instance:
    """What SGLang's metrics are labelled with."""
    return Instance(log_stats.path.rpartition(".")[0], ("labels",), "dynspec's metrics have them")


def _verified(tokens: str) -> tuple[str, ...]:
    kept = (f"spec_num_{tokens}_tokens", "spec_num_forward_ct")
    return (*kept, *(name.replace("_num_", "_total_num_") for name in kept))


_VERIFIED_WHY = "plain steps are taken out of SGLang's accept length and accept rate"
VERIFIED_COUNTS_TO_0_5_11 = Live("scheduler", _verified("accepted"), _VERIFIED_WHY)
VERIFIED_COUNTS_OF_0_5_12 = Live("scheduler", _verified("accept"), _VERIFIED_WHY)
VERIFIED_COUNTS_FROM_0_5_13: tuple[Live, ...] = (
    Live("scheduler", ("metrics_reporter",), _VERIFIED_WHY),
    Live("scheduler.metrics_reporter", _verified("accept"), _VERIFIED_WHY),
)

# The worker gets a ModelWorkerBatch: 0.5.9 to 0.5.12.

MODEL_WORKER_BATCH: tuple[Name, ...] = (
    BROADCAST_TO_0_5_12,
    EXCHANGE_TO_0_5_12,
    _exchanged(EXCHANGE_TO_0_5_12),
    Name(FORWARD, "wrap", "routed by the decision", parameters=("model_worker_batch",)),
    Name(
        "sglang.srt.managers.schedule_batch:ModelWorkerBatch",
        "read",
        "the decode batch at the worker's door",
        fields=(
            *DECODE_BATCH_FIELDS,
            *PREFILL_BATCH_FIELDS,
            "capture_hidden_mode",
            "extend_seq_lens",
            "extend_prefix_lens",
        ),
    ),
    Name(
        _PLAIN_FORWARD,
        "call",
        "the plain decode itself",
        parameters=("model_worker_batch",),
        keywords=("is_verify",),
    ),
    VERIFIED_BY_METHOD,
    VOCAB_MASK,
    Name(_CUDA_GRAPH_RUNNER, "call", "graphs of plain decode", parameters=("model_runner",)),
)
VERIFIED_ID = _draft_input("verified_id", "new_seq_lens", "verify_done")
BONUS_TOKENS = _draft_input("bonus_tokens", "new_seq_lens", "verify_done")

# Attributes that a class of graph runners has up to 0.5.13, for all its graphs.

ONE_GRAPH_RUNNER_LIVE: tuple[Live, ...] = (
    Live(TARGET_RUNNER, ("graph_runner",), "its graphs, of verification or of plain decode"),
)
ONE_GRAPH_RUNNER = _one_mode(_CUDA_GRAPH_RUNNER, "capture_hidden_mode", "recapture_if_needed")

# Lengths, and the draft's parallel layout.

LENGTHS_ON_REQUEST: tuple[Instance, ...] = (
    Instance("sglang.srt.managers.schedule_batch:Req", ("kv_committed_len",), "context tokens"),
)
LENGTHS_ON_KV: tuple[Instance, ...] = (
    Instance("sglang.srt.managers.schedule_batch:Req", ("kv",), "context tokens"),
    Instance(
        "sglang.srt.managers.schedule_batch:ReqKvInfo", ("kv_committed_len",), "context tokens"
    ),
)
PARALLEL_FROM_0_5_21 = Name(
    "sglang.srt.runtime_context:get_parallel",
    "call",
    "which replica a scheduler is, for the status",
)
ARGUMENTS_IN_EFFECT_FROM_0_5_19 = Name(
    "sglang.srt.arg_groups.model_override_base:resolving_view",
    "call",
    "what SGLang has made of its arguments (engine/server_arguments.py)",
    parameters=("server_args",),
)
LAYOUT_BY_GROUP = Name(
    "sglang.srt.speculative.spec_utils:draft_tp_context",
    "call",
    "the draft model's parallel layout",
    parameters=("tp_group",),
)
LAYOUT_BY_GROUP_AND_OWNER = replace(LAYOUT_BY_GROUP, keywords=("owns_attention",))
LAYOUT_BY_GROUP_LIVE: tuple[Live, ...] = (
    Live(DRAFT_WORKER, ("draft_tp_context",), "the draft model's parallel layout"),
    Live(DRAFT_RUNNER, ("tp_group",), "the draft model's parallel layout"),
)
HIDDEN_SIZE = Live(DRAFT_CONFIG, ("hidden_size",), "the shape of proposals")

# What came with a release, and is there since.

FROM_0_5_12: tuple[Name, ...] = (
    LOG_STATS_FROM_0_5_10,
    _result("speculative_num_draft_tokens"),
    _arguments("enable_hisparse", "enable_return_indexer_topk", "speculative_adaptive"),
    Name(
        f"{_ADAPTIVE_WORKER}.build_adaptive_runtime_state",
        "call",
        "draft steps between none and all",
        parameters=_WIDTHS,
    ),
    Name(
        f"{_ADAPTIVE_WORKER}._override_worker_state",
        "call",
        "graphs for another number of draft steps",
        parameters=_WIDTHS,
    ),
    Name(
        "sglang.srt.speculative.adaptive_runtime_state:SpecRuntimeState",
        "read",
        "what a step with fewer draft steps needs",
        fields=(
            "draft_attn_backend",
            "cuda_graph_runner",
            "target_attn_backend",
            "target_graph_runner",
            "draft_extend_attn_backend",
            "cuda_graph_runner_for_draft_extend",
        ),
    ),
)
INSTANCES_FROM_0_5_12: tuple[Instance, ...] = (
    metric_labels(LOG_STATS_FROM_0_5_10),
    Instance(_ADAPTIVE_WORKER, _WIDTHS, "set for a step with fewer draft steps"),
    Instance(
        _DRAFT_WORKER,
        (
            *_WIDTHS,
            "draft_attn_backend",
            "cuda_graph_runner",
            "draft_extend_attn_backend",
            "cuda_graph_runner_for_draft_extend",
            "draft_runner.draft_attn_backend",
        ),
        "set for a step with fewer draft steps",
    ),
)
GRAPHS_BY_SIZE = _timed("graphs", _CUDA_GRAPH_RUNNER, *_DRAFT_GRAPH_RUNNERS)

FROM_0_5_13: tuple[Name, ...] = (
    *FROM_0_5_12,
    BROADCAST_FROM_0_5_13,
    EXCHANGE_FROM_0_5_13,
    _exchanged(EXCHANGE_FROM_0_5_13),
    Name(FORWARD, "wrap", "routed by the decision", parameters=("batch", "on_publish")),
    Name(
        "sglang.srt.managers.schedule_batch:ScheduleBatch",
        "read",
        "the decode batch at the worker's door",
        fields=(
            *DECODE_BATCH_FIELDS,
            *PREFILL_BATCH_FIELDS,
            "extend_lens",
            "prefix_lens",
            "chunked_req_next_prompt_token",
            "replace_embeds",
            "replace_positions",
        ),
    ),
    _draft_input("bonus_tokens", fields=("future_indices",)),
    _result("new_seq_lens"),
    Name(
        _PLAIN_FORWARD,
        "call",
        "the plain decode itself",
        parameters=("batch",),
        keywords=("is_verify",),
    ),
    Name(RUN_BATCH, "wrap", "lengths after a plain step", parameters=("batch",)),
    Name(RESOLVE_EXTRAS, "wrap", "only pending tokens are needed", parameters=("batch",)),
    Name(RESOLVE_LENGTHS, "wrap", "lengths are known", parameters=("batch",)),
    Name(STASH, "wrap", "only pending tokens are kept", parameters=("future_indices", "payload")),
    Name(
        f"{_DRAFT_WORKER}.init_attention_backend",
        "call",
        "the draft's step after a plain one, with one token a request",
    ),
)
LIVE_FROM_0_5_13: tuple[Live, ...] = (
    *VERIFIED_COUNTS_FROM_0_5_13,
    Live("scheduler", ("enable_overlap",), "whether lengths are relayed"),
    Live(DRAFT_CONFIG, ("spec_hidden_size",), "the shape of proposals"),
)
INSTANCES_FROM_0_5_13: tuple[Instance, ...] = (
    *INSTANCES_FROM_0_5_12,
    Instance(
        _DRAFT_WORKER,
        ("_topk1_parents_prealloc", "_topk1_score_indices_prealloc"),
        "found by their prefix, and set for a step with fewer draft steps",
    ),
    Instance(
        "sglang.srt.managers.scheduler:Scheduler",
        ("future_map",),
        "asked for the proposals that a plain step did without, when that step fails",
    ),
    Instance(
        "sglang.srt.managers.overlap_utils:FutureMap",
        (
            "device",
            "output_tokens_buf",
            "new_seq_lens_buf",
            "needs_cpu_seq_lens",
            "publish_ready",
        ),
        "pending tokens and lengths, from step to step",
    ),
)

# Of 0.5.13 alone.

OF_0_5_13: tuple[Name, ...] = (
    _graph_runner(_CUDA_GRAPH_RUNNER),
    Name(
        f"{_DRAFT_WORKER}.init_cuda_graphs",
        "call",
        "the draft's step after a plain one, with one token a request",
    ),
    Name(
        "sglang.srt.speculative.draft_utils:DraftBackendFactory.create_decode_backend",
        "call",
        "left out while graphs for 0 draft steps are captured",
    ),
)

FROM_0_5_14: tuple[Name, ...] = (
    *FROM_0_5_13,
    _arguments("speculative_use_rejection_sampling"),
    _graph_runner(_DECODE_GRAPH_RUNNER),
    Name(
        f"{_DRAFT_WORKER}._capture_cuda_graphs",
        "call",
        "the draft's step after a plain one, with one token a request",
    ),
    Name(
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend",
        "read",
        "copied to the attention of the decode graphs, for models that ask for it",
        fields=("prefill_attention_backend_str", "decode_attention_backend_str"),
    ),
)
LIVE_FROM_0_5_14: tuple[Live, ...] = (
    *LIVE_FROM_0_5_13,
    Live(
        TARGET_RUNNER,
        ("decode_cuda_graph_runner",),
        "its graphs, of verification or of plain decode",
    ),
)
INSTANCES_FROM_0_5_14: tuple[Instance, ...] = (
    *INSTANCES_FROM_0_5_13,
    *_timed("backend", _DECODE_GRAPH_RUNNER, *_DRAFT_GRAPH_RUNNERS),
    *_timed(
        "_graphs",
        "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend:FullCudaGraphBackend",
    ),
    *_timed("size", "sglang.srt.model_executor.runner.shape_key:ShapeKey"),
)

FROM_0_5_16: tuple[Name, ...] = (
    *FROM_0_5_14,
    _sampling("return_sampling_masks"),
    _arguments("enable_unified_memory"),
    Name(
        _PLAIN_FORWARD,
        "call",
        "hidden states are kept or not",
        keywords=("batch", "capture_hidden_mode"),
    ),
    Name(
        "sglang.srt.managers.overlap_utils:RelayPayload",
        "read",
        "what is kept for the next step",
        fields=("topk_p", "bonus_tokens"),
    ),
)
INSTANCES_FROM_0_5_16: tuple[Instance, ...] = (
    *INSTANCES_FROM_0_5_14,
    Instance(
        _DRAFT_WORKER,
        ("seed_dsa_topk_from_draft_extend",),
        "sparse attention in the draft model, which dynspec does not support yet",
    ),
)

FROM_0_5_17: tuple[Name, ...] = (
    *FROM_0_5_16,
    Name(
        "sglang.srt.model_executor.model_runner:ModelRunner._decode_cuda_graph_runner_cls",
        "call",
        "the class of graphs",
    ),
)
INSTANCES_FROM_0_5_17: tuple[Instance, ...] = (
    *INSTANCES_FROM_0_5_16,
    _one_mode(_DECODE_GRAPH_RUNNER, "return_hidden_states_mode"),
)

FROM_0_5_22: tuple[Name, ...] = (
    *FROM_0_5_17,
    _sampling("has_watermark_candidates"),
)

# Of some releases only.

MODE_ON_BATCH = Name(
    "sglang.srt.managers.schedule_batch:ScheduleBatch",
    "read",
    "asks for the hidden states of one forward",
    fields=("capture_hidden_mode",),
)
RECAPTURING = _one_mode(_DECODE_GRAPH_RUNNER, "capture_hidden_mode", "recapture_if_needed")
WIDTH_FROM_ARGUMENTS = Name(
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner:resolve_num_tokens_per_req",
    "read",
    "one, for as long as graphs for one token a request are captured",
)
READ_DONE_TO_0_5_17: tuple[Live, ...] = (
    Live(TARGET_RUNNER, ("war_fastpath_read_done_event",), "when a plain step has read its batch"),
    Live(
        "scheduler.draft_worker", ("war_fastpath_runner",), "when a plain step has read its batch"
    ),
)
READ_DONE_FROM_0_5_18: tuple[Live, ...] = (
    Live(TARGET_RUNNER, ("shared_read_done_event",), "when a plain step has read its batch"),
    Live(
        "scheduler.draft_worker",
        ("last_shared_read_runner",),
        "when a plain step has read its batch",
    ),
)


def layout_by(parameter: str) -> Name:
    """From 0.5.22 on, what makes the context of the draft model, with what it is called with."""
    return Name(
        "sglang.srt.speculative.spec_utils:draft_tp_context",
        "call",
        "the draft model's parallel layout",
        parameters=(parameter,),
    )


def layout_in(attribute: str) -> Live:
    """From 0.5.21 on, where the draft worker keeps what its context is made with."""
    return Live(DRAFT_WORKER, (attribute,), "the draft model's parallel layout")
