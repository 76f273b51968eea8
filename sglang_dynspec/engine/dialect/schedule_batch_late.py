"""SGLang 0.5.18 to 0.5.23: as 0.5.17, with names that have moved since. The newest is the last of
this module."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, ClassVar

from sglang_dynspec.engine.contract import Instance, Live, Name
from sglang_dynspec.engine.dialect import names
from sglang_dynspec.engine.dialect.schedule_batch import ScheduleBatchDialect

_committed_len = attrgetter("kv.kv_committed_len")


def _dp_rank() -> int | None:
    """From 0.5.21 on the scheduler does not have it."""
    from sglang.srt.runtime_context import get_parallel

    rank: int | None = get_parallel().dp_rank
    return rank


class SharedReadDialect(ScheduleBatchDialect):
    """0.5.18: the event after which the scheduler may write again is called otherwise."""

    family = "0.5.18"
    live: ClassVar[tuple[Live, ...]] = (
        *names.LIVE_FROM_0_5_14,
        *names.LAYOUT_BY_GROUP_LIVE,
        *names.READ_DONE_FROM_0_5_18,
    )
    contract: ClassVar[tuple[Name, ...]] = (
        *names.FROM_0_5_17,
        *names.VERIFIED_FROM_0_5_18,
        names.LAYOUT_BY_GROUP,
    )

    def forward_target(self, worker: Any, batch: Any, **how: Any) -> Any:
        # A verification leaves its event here, which the scheduler reads from the draft's runner;
        # a plain step without graphs publishes none, and must not pass on that one.
        worker.target_worker.model_runner.shared_read_done_event = None
        return super().forward_target(worker, batch, **how)

    def publish_read_done(self, worker: Any) -> None:
        runner = worker.target_worker.model_runner
        worker.last_shared_read_runner.shared_read_done_event = runner.shared_read_done_event
        runner.shared_read_done_event = None

    def add_logprobs(self, batch: Any, logits: Any, predict: Any, accepted: Any) -> None:
        from sglang.srt.layers.logprob_processor import compute_spec_logprobs

        compute_spec_logprobs(batch, logits, predict, accept_index=accepted)

    def one_token_graphs(self) -> AbstractContextManager[Any]:
        return nullcontext()  # SGLang's override is enough again


class LengthsOnKvDialect(SharedReadDialect):
    """0.5.19 and 0.5.20: a request's lengths are on its `kv`, and ServerArgs stay as given."""

    family = "0.5.19 to 0.5.20"
    contract: ClassVar[tuple[Name, ...]] = (
        *SharedReadDialect.contract,
        names.ARGUMENTS_IN_EFFECT_FROM_0_5_19,
    )
    instances: ClassVar[tuple[Instance, ...]] = (
        *names.INSTANCES_FROM_0_5_17,
        *names.LENGTHS_ON_KV,
    )

    def context_tokens(self, batch: Any) -> int:
        return sum(map(_committed_len, batch.reqs))


class AttentionOwnerDialect(LengthsOnKvDialect):
    """0.5.21: the context of the draft also asks who owns attention."""

    family = "0.5.21"
    live: ClassVar[tuple[Live, ...]] = (
        *LengthsOnKvDialect.live,
        names.layout_in("draft_owns_attention"),
    )
    contract: ClassVar[tuple[Name, ...]] = (
        *names.FROM_0_5_17,
        *names.VERIFIED_FROM_0_5_18,
        names.LAYOUT_BY_GROUP_AND_OWNER,
        names.PARALLEL_FROM_0_5_21,
        names.ARGUMENTS_IN_EFFECT_FROM_0_5_19,
    )

    def dp_rank(self, scheduler: Any) -> int | None:
        return _dp_rank()

    def draft_parallel_context(self, draft_worker: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = draft_worker.draft_tp_context(
            draft_worker.draft_runner.tp_group, owns_attention=draft_worker.draft_owns_attention
        )
        return context


class WatermarkDialect(LengthsOnKvDialect):
    """0.5.22: watermarks; the context of the draft asks for nothing but who owns attention."""

    family = "0.5.22"
    draft_layout: ClassVar[str] = "draft_owns_attention"
    """Attribute of the draft worker that the draft's context takes."""
    live: ClassVar[tuple[Live, ...]] = (
        *names.LIVE_FROM_0_5_14,
        *names.READ_DONE_FROM_0_5_18,
        names.layout_in("draft_owns_attention"),
    )
    contract: ClassVar[tuple[Name, ...]] = (
        *names.FROM_0_5_22,
        *names.VERIFIED_FROM_0_5_18,
        names.layout_by("owns_attention"),
        names.PARALLEL_FROM_0_5_21,
        names.ARGUMENTS_IN_EFFECT_FROM_0_5_19,
    )

    def dp_rank(self, scheduler: Any) -> int | None:
        return _dp_rank()

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
    live: ClassVar[tuple[Live, ...]] = (
        *names.LIVE_FROM_0_5_14,
        *names.READ_DONE_FROM_0_5_18,
        names.layout_in("parallel_layout"),
    )
    contract: ClassVar[tuple[Name, ...]] = (
        *names.FROM_0_5_22,
        *names.VERIFIED_FROM_0_5_18,
        names.layout_by("layout"),
        names.PARALLEL_FROM_0_5_21,
        names.ARGUMENTS_IN_EFFECT_FROM_0_5_19,
    )
