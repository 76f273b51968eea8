"""SGLang 0.5.18 to 0.5.23: as 0.5.17, with names that have moved since. The newest is the last of
this module."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, ClassVar

from sglang_dynspec.engine.contract import Name
from sglang_dynspec.engine.dialect.schedule_batch import ScheduleBatchDialect

_committed_len = attrgetter("kv.kv_committed_len")

_SHARED_READS = (
    (
        "scheduler.draft_worker.target_worker.model_runner",
        ("decode_cuda_graph_runner", "shared_read_done_event"),
    ),
    ("scheduler.draft_worker", ("last_shared_read_runner",)),
)


class SharedReadDialect(ScheduleBatchDialect):
    """0.5.18: the event after which the scheduler may write again is called otherwise."""

    family = "0.5.18"
    live: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]] = (
        *_SHARED_READS,
        ("scheduler.draft_worker.draft_worker", ("draft_tp_context",)),
    )

    def publish_read_done(self, worker: Any) -> None:
        runner = worker.target_worker.model_runner
        worker.last_shared_read_runner.shared_read_done_event = runner.shared_read_done_event
        runner.shared_read_done_event = None

    def one_token_graphs(self) -> AbstractContextManager[Any]:
        return nullcontext()  # SGLang's override is enough again


class LengthsOnKvDialect(SharedReadDialect):
    """0.5.20: a request's lengths are on its `kv`."""

    family = "0.5.20"

    def context_tokens(self, batch: Any) -> int:
        return sum(map(_committed_len, batch.reqs))


class WatermarkDialect(LengthsOnKvDialect):
    """0.5.22: watermarks; the context of the draft asks for nothing but who owns attention."""

    family = "0.5.22"
    draft_layout: ClassVar[str] = "draft_owns_attention"
    """Attribute of the draft worker that the draft's context takes."""
    live: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]] = (
        *_SHARED_READS,
        ("scheduler.draft_worker.draft_worker", ("draft_owns_attention",)),
    )
    contract: ClassVar[tuple[Name, ...]] = (
        *ScheduleBatchDialect.contract,
        Name(
            "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo",
            "read",
            "what plain decode would have to sample with beyond 0.5.17",
            fields=("has_watermark_candidates",),
        ),
        Name(
            "sglang.srt.speculative.spec_utils:draft_tp_context",
            "call",
            "the draft model's own parallel layout",
        ),
    )

    def blocked(self, batch: Any) -> str | None:
        if batch.sampling_info.has_watermark_candidates:
            return "watermark"
        return super().blocked(batch)

    def draft_parallel_context(self, draft_worker: Any) -> AbstractContextManager[Any]:
        from sglang.srt.speculative.spec_utils import draft_tp_context

        layout = getattr(draft_worker, self.draft_layout)
        context: AbstractContextManager[Any] = draft_tp_context(layout)
        return context


class OwnDraftLayoutDialect(WatermarkDialect):
    """0.5.23: the draft has a parallel layout of its own."""

    family = "0.5.23"
    draft_layout: ClassVar[str] = "parallel_layout"
    live: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]] = (
        *_SHARED_READS,
        ("scheduler.draft_worker.draft_worker", ("parallel_layout",)),
    )
