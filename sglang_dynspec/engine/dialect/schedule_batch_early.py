"""SGLang 0.5.13 to 0.5.16: as 0.5.17, with other graph runners, and from release to release less of
what it has. The oldest is the last of this module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from sglang_dynspec.engine.contract import Instance, Live, Name
from sglang_dynspec.engine.dialect import graphs, names
from sglang_dynspec.engine.dialect.base import Dialect
from sglang_dynspec.engine.dialect.schedule_batch import ScheduleBatchDialect
from sglang_dynspec.engine.temporarily import temporarily


class DerivedModeDialect(ScheduleBatchDialect):
    """0.5.16: a graph runner has its mode of hidden states elsewhere."""

    family = "0.5.16"
    mask_field = "vocab_mask"
    contract: ClassVar[tuple[Name, ...]] = (
        *names.FROM_0_5_16,
        names.LAYOUT_BY_GROUP,
        names.WIDTH_FROM_ARGUMENTS,
        names.VERIFIED_BY_FUNCTION,
        names.VOCAB_MASK,
        names.LOGPROBS_TO_0_5_17,
    )
    instances: ClassVar[tuple[Instance, ...]] = (
        *names.INSTANCES_FROM_0_5_16,
        *names.LENGTHS_ON_REQUEST,
        names.RECAPTURING,
    )

    def graph_runner_class(self, model_runner: Any, mode: CaptureHiddenMode) -> Any:
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

        return graphs.keeping(DecodeCudaGraphRunner, "capture_hidden_mode", mode)


class ModeOnBatchDialect(DerivedModeDialect):
    """0.5.14 and 0.5.15: hidden states are asked for on the batch, for one forward."""

    family = "0.5.14 to 0.5.15"
    contract: ClassVar[tuple[Name, ...]] = (
        *names.FROM_0_5_14,
        names.LAYOUT_BY_GROUP,
        names.VERIFIED_BY_FUNCTION,
        names.VOCAB_MASK,
        names.LOGPROBS_TO_0_5_15,
        names.MODE_ON_BATCH,
    )
    instances: ClassVar[tuple[Instance, ...]] = (
        *names.INSTANCES_FROM_0_5_14,
        *names.LENGTHS_ON_REQUEST,
        names.RECAPTURING,
    )

    def one_token_graphs(self) -> AbstractContextManager[Any]:
        return nullcontext()  # SGLang's override is enough

    def blocked(self, batch: Any) -> str | None:
        return Dialect.blocked(self, batch)  # sampling masks came with 0.5.16

    def add_logprobs(self, batch: Any, logits: Any, predict: Any, accepted: Any) -> None:
        from sglang.srt.layers.utils.logprob import compute_spec_v2_logprobs

        compute_spec_v2_logprobs(batch, logits, predict, accepted, 0)

    def forward_target(
        self, worker: Any, batch: Any, *, keep_hidden: bool, sample: bool = True
    ) -> Any:
        # ForwardBatch.init_new takes it from the batch and resets it.
        batch.capture_hidden_mode = graphs.hidden_mode(keep_hidden=keep_hidden)
        return worker.target_worker.forward_batch_generation(batch, is_verify=not sample)


class WholeForwardBarrierDialect(ModeOnBatchDialect):
    """0.5.13: the scheduler's stream waits for whole forwards; one class has all graphs."""

    family = "0.5.13"
    graph_runner = "graph_runner"
    returns_hidden_states = False
    extend_runs_on_runner = False
    capture_draft_graphs: ClassVar[str] = "init_cuda_graphs"
    contract: ClassVar[tuple[Name, ...]] = (
        *names.FROM_0_5_13,
        *names.OF_0_5_13,
        names.VERIFIED_BY_METHOD,
        names.VOCAB_MASK,
        names.LOGPROBS_TO_0_5_15,
        names.LAYOUT_BY_GROUP,
        names.MODE_ON_BATCH,
    )
    live: ClassVar[tuple[Live, ...]] = (
        *names.LIVE_FROM_0_5_13,
        *names.ONE_GRAPH_RUNNER_LIVE,
        *names.LAYOUT_BY_GROUP_LIVE,
    )
    instances: ClassVar[tuple[Instance, ...]] = (
        *names.INSTANCES_FROM_0_5_13,
        *names.LENGTHS_ON_REQUEST,
        *names.GRAPHS_BY_SIZE,
        names.ONE_GRAPH_RUNNER,
    )

    def graph_runner_class(self, model_runner: Any, mode: CaptureHiddenMode) -> Any:
        from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner

        return graphs.keeping(CudaGraphRunner, "capture_hidden_mode", mode)

    def one_token_graphs(self) -> AbstractContextManager[Any]:
        from sglang.srt.speculative.draft_utils import DraftBackendFactory

        # 0.5.14 was the first to build none for 0 draft steps; this one fails.
        return temporarily(DraftBackendFactory, create_decode_backend=lambda _: None)

    def verified_sampler(self) -> Callable[..., Any]:
        from sglang.srt.speculative.eagle_info_v2 import EagleVerifyInputV2Mixin

        sample: Callable[..., Any] = EagleVerifyInputV2Mixin.sample
        return sample

    def publish_read_done(self, worker: Any) -> None:
        """There is nothing that would wait for less than the whole forward."""
