"""SGLang 0.5.9 to 0.5.12: the worker gets a ModelWorkerBatch made for it, and may change it
freely."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, ClassVar

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleDraftInput

from sglang_dynspec.engine.contract import Instance, Live, Name
from sglang_dynspec.engine.dialect import graphs, names
from sglang_dynspec.engine.dialect.base import Dialect, blank_proposals, pad_rows
from sglang_dynspec.engine.temporarily import temporarily

_committed_len = attrgetter("kv_committed_len")


_LIVE: tuple[Live, ...] = (
    *names.ONE_GRAPH_RUNNER_LIVE,
    *names.LAYOUT_BY_GROUP_LIVE,
    names.HIDDEN_SIZE,
)
_INSTANCES: tuple[Instance, ...] = (*names.LENGTHS_ON_REQUEST, names.ONE_GRAPH_RUNNER)
_CONTRACT: tuple[Name, ...] = (
    *names.MODEL_WORKER_BATCH,
    names.LAYOUT_BY_GROUP,
    names.VERIFIED_ID,
)


class ModelWorkerBatchDialect(Dialect):
    """0.5.10 and 0.5.11."""

    family = "0.5.9 to 0.5.11"
    batch_parameter = "model_worker_batch"
    broadcast = names.BROADCAST_TO_0_5_12.path
    exchange = names.EXCHANGE_TO_0_5_12.path
    graph_runner = "graph_runner"
    accepted_tokens = "accepted"
    pending_field: ClassVar[str] = "verified_id"
    """Field of EagleDraftInput with the tokens that the target has not seen yet."""
    relays_to_standalone: ClassVar[bool] = True
    """Whether SGLang relays hidden states to a standalone draft, too, as up to 0.5.11."""
    live: ClassVar[tuple[Live, ...]] = (*_LIVE, names.VERIFIED_COUNTS_TO_0_5_11)
    instances: ClassVar[tuple[Instance, ...]] = (
        *_INSTANCES,
        names.metric_labels(names.LOG_STATS_FROM_0_5_10),
    )
    contract: ClassVar[tuple[Name, ...]] = (*_CONTRACT, names.LOG_STATS_FROM_0_5_10)

    def holds_counters(self, scheduler: Any) -> Any:
        return scheduler

    def context_tokens(self, batch: Any) -> int:
        return sum(map(_committed_len, batch.reqs))

    def pending_tokens(self, draft_input: Any) -> torch.Tensor:
        pending: torch.Tensor = getattr(draft_input, self.pending_field)
        return pending

    def blocked(self, batch: Any) -> str | None:
        # 0.5.9 drops them after the first token, and 0.5.10 computes them in another place.
        if batch.return_logprob:
            return "logprobs"
        return super().blocked(batch)

    def prefill_lengths(self, batch: Any) -> Sequence[int]:
        lengths: Sequence[int] = batch.extend_seq_lens
        return lengths

    def as_prefill(self, batch: Any, **of: Any) -> dict[str, Any]:
        return {
            **super().as_prefill(batch, **of),
            "extend_seq_lens": of["extend_lens"],
            "extend_prefix_lens": of["prefix_lens"].tolist(),
            "capture_hidden_mode": self._kept_by_prefill(standalone=of["standalone"]),
        }

    def as_idle_prefill(
        self, batch: Any, widths: Sequence[int], *, standalone: bool
    ) -> dict[str, Any]:
        return {
            **super().as_idle_prefill(batch, widths, standalone=standalone),
            "capture_hidden_mode": self._kept_by_prefill(standalone=standalone),
        }

    def _kept_by_prefill(self, *, standalone: bool) -> CaptureHiddenMode:
        none = standalone and not self.relays_to_standalone
        return CaptureHiddenMode.NULL if none else CaptureHiddenMode.LAST

    def verified_sampler(self) -> Callable[..., Any]:
        from sglang.srt.speculative.eagle_info_v2 import EagleVerifyInputV2Mixin

        sample: Callable[..., Any] = EagleVerifyInputV2Mixin.sample
        return sample

    def add_logprobs(self, batch: Any, logits: Any, predict: Any, accepted: Any) -> None:
        raise NotImplementedError("such a batch is not decoded plainly")

    def forward_target(
        self, worker: Any, batch: Any, *, keep_hidden: bool, sample: bool = True
    ) -> Any:
        mode = graphs.hidden_mode(keep_hidden=keep_hidden)
        # The lengths were made on the scheduler's stream; see EAGLEWorkerV2.verify.
        batch.seq_lens.record_stream(torch.get_device_module(worker.device).current_stream())
        with temporarily(batch, capture_hidden_mode=mode):
            return worker.target_worker.forward_batch_generation(batch, is_verify=not sample)

    def set_result(
        self,
        result: Any,
        *,
        tokens: torch.Tensor,
        width: int,
        new_seq_lens: torch.Tensor,
    ) -> None:
        # ScheduleBatch.maybe_wait_verify_done waits for this before it reads the lengths.
        done = torch.get_device_module(tokens.device).Event()
        done.record()
        ids = tokens.to(torch.int32)
        result.next_token_ids = pad_rows(ids, width)
        result.accept_lens = torch.ones_like(ids)
        result.next_draft_input = EagleDraftInput(
            new_seq_lens=new_seq_lens, verify_done=done, **{self.pending_field: ids}
        )

    def reads_hidden(self, worker: Any) -> bool:
        return self.relays_to_standalone or super().reads_hidden(worker)

    def blank_draft_input(self, worker: Any, batch: Any, tokens: torch.Tensor) -> Any:
        config = worker.draft_worker.draft_runner.model_config
        hidden_size = config.hidden_size if self.reads_hidden(worker) else None
        return EagleDraftInput(
            new_seq_lens=batch.seq_lens,
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
            **{self.pending_field: tokens},
            **blank_proposals(worker, tokens, hidden_size),
        )

    def draft_parallel_context(self, draft_worker: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = draft_worker.draft_tp_context(
            draft_worker.draft_runner.tp_group
        )
        return context

    def capture_decode_graphs(self, model_runner: Any, *, keep_hidden: bool) -> dict[str, Any]:
        from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner

        backend = graphs.attention_backend(model_runner)
        mode = graphs.hidden_mode(keep_hidden=keep_hidden)
        # Up to 0.5.10 a graph runner cannot be given a backend, and takes the model runner's.
        with temporarily(model_runner, attn_backend=backend):
            runner = graphs.keeping(CudaGraphRunner, "capture_hidden_mode", mode)(model_runner)
        return {"attn_backend": backend, self.graph_runner: runner}


class EarlierMetricsDialect(ModelWorkerBatchDialect):
    """0.5.9: SGLang's metrics are made in another module."""

    log_stats = names.LOG_STATS_OF_0_5_9.path
    instances: ClassVar[tuple[Instance, ...]] = (
        *_INSTANCES,
        names.metric_labels(names.LOG_STATS_OF_0_5_9),
    )
    contract: ClassVar[tuple[Name, ...]] = (*_CONTRACT, names.LOG_STATS_OF_0_5_9)


class BonusTokensDialect(ModelWorkerBatchDialect):
    """0.5.12: a pending token is called bonus token; the row width is read from the result."""

    family = "0.5.12"
    builds_steps = True
    times_graphs = True
    accepted_tokens = "accept"
    pending_field: ClassVar[str] = "bonus_tokens"
    relays_to_standalone: ClassVar[bool] = False
    contract: ClassVar[tuple[Name, ...]] = (
        *names.MODEL_WORKER_BATCH,
        names.LAYOUT_BY_GROUP,
        names.BONUS_TOKENS,
        *names.FROM_0_5_12,
        names.LOGPROBS_TO_0_5_15,
    )
    live: ClassVar[tuple[Live, ...]] = (*_LIVE, names.VERIFIED_COUNTS_OF_0_5_12)
    instances: ClassVar[tuple[Instance, ...]] = (
        *_INSTANCES,
        *names.INSTANCES_FROM_0_5_12,
        *names.GRAPHS_BY_SIZE,
    )

    def blocked(self, batch: Any) -> str | None:
        return Dialect.blocked(self, batch)

    def add_logprobs(self, batch: Any, logits: Any, predict: Any, accepted: Any) -> None:
        from sglang.srt.layers.utils.logprob import compute_spec_v2_logprobs

        compute_spec_v2_logprobs(batch, logits, predict, accepted, 0)

    def set_result(
        self,
        result: Any,
        *,
        tokens: torch.Tensor,
        width: int,
        new_seq_lens: torch.Tensor,
    ) -> None:
        super().set_result(result, tokens=tokens, width=width, new_seq_lens=new_seq_lens)
        result.speculative_num_draft_tokens = width

    def result_width(self, worker: Any) -> int:
        return 1
