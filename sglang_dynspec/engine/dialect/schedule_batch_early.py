"""SGLang 0.5.13 to 0.5.16: as 0.5.17, with other graph runners, and from release to release less of
what it has. The oldest is the last of this module."""

from __future__ import annotations

from typing import Any, ClassVar

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from sglang_dynspec.engine.contract import Name
from sglang_dynspec.engine.dialect.base import Dialect
from sglang_dynspec.engine.dialect.schedule_batch import FROM_0_5_13, ScheduleBatchDialect


class RecapturingGraphsDialect(ScheduleBatchDialect):
    """0.5.16: graphs are captured anew in the middle of serving when a batch wants other hidden
    states than they keep."""

    family = "0.5.16"

    def graph_runner_class(self, model_runner: Any) -> Any:
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

        return DecodeCudaGraphRunner

    def keeping(self, runner_class: Any, mode: CaptureHiddenMode) -> Any:
        class PlainDecodeGraphRunner(runner_class):  # type: ignore[misc]
            @property
            def capture_hidden_mode(self) -> CaptureHiddenMode:
                return mode

            @capture_hidden_mode.setter
            def capture_hidden_mode(self, _derived: Any) -> None:
                """SGLang derives it from the server's arguments and from the batch."""

            def recapture_if_needed(self, forward_batch: Any) -> None:
                """What plain steps want never changes."""

        return PlainDecodeGraphRunner


class ModeOnBatchDialect(RecapturingGraphsDialect):
    """0.5.14 and 0.5.15: hidden states are asked for on the batch, for one forward."""

    family = "0.5.14 to 0.5.15"
    contract: ClassVar[tuple[Name, ...]] = (
        *FROM_0_5_13,
        Name(
            "sglang.srt.managers.schedule_batch:ScheduleBatch",
            "read",
            "asks for the hidden states of one forward",
            fields=("capture_hidden_mode",),
        ),
    )

    def blocked(self, batch: Any) -> str | None:
        return Dialect.blocked(self, batch)  # sampling masks came with 0.5.16

    def forward_target(self, worker: Any, batch: Any, *, keep_hidden: bool) -> Any:
        # ForwardBatch.init_new takes it from the batch and resets it.
        mode = CaptureHiddenMode.FULL if keep_hidden else CaptureHiddenMode.NULL
        batch.capture_hidden_mode = mode
        return worker.target_worker.forward_batch_generation(batch)


class WholeForwardBarrierDialect(ModeOnBatchDialect):
    """0.5.13: the scheduler's stream waits for whole forwards; one class has all graphs."""

    family = "0.5.13"
    graph_runner = "graph_runner"
    live: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]] = (
        ("scheduler.draft_worker.target_worker.model_runner", ("graph_runner",)),
        ("scheduler.draft_worker.draft_worker", ("draft_tp_context",)),
    )

    def graph_runner_class(self, model_runner: Any) -> Any:
        from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner

        return CudaGraphRunner

    def publish_read_done(self, worker: Any) -> None:
        """There is nothing that would wait for less than the whole forward."""
