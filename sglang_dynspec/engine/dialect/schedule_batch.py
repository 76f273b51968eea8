"""SGLang 0.5.23: the worker gets the scheduler's own ScheduleBatch, which the scheduler restores
afterwards (Scheduler._forward_isolation), and publishes the new lengths itself."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from operator import attrgetter
from typing import Any

import torch
from sglang.srt.layers.moe.utils import (
    speculative_moe_a2a_backend_context,
    speculative_moe_backend_context,
)
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_dynspec.engine.contract import FORWARD, Name
from sglang_dynspec.engine.dialect.base import Dialect, pad_rows

_committed_len = attrgetter("kv.kv_committed_len")


class ScheduleBatchDialect(Dialect):
    """0.5.23."""

    family = "0.5.23"
    batch_parameter = "batch"
    graph_runner = "decode_cuda_graph_runner"
    live = (
        ("scheduler.draft_worker.target_worker.model_runner", ("decode_cuda_graph_runner",)),
        ("scheduler.draft_worker.draft_worker", ("parallel_layout",)),
    )
    contract = (
        Name(FORWARD, "wrap", "routed by the decision", parameters=("batch", "on_publish")),
        Name(
            "sglang.srt.managers.schedule_batch:ScheduleBatch",
            "read",
            "the decode batch at the worker's door",
            fields=(
                "forward_mode",
                "input_ids",
                "req_pool_indices",
                "seq_lens",
                "seq_lens_cpu",
                "seq_lens_sum",
                "out_cache_loc",
                "spec_info",
                "spec_algorithm",
            ),
        ),
        Name(
            "sglang.srt.speculative.eagle_info:EagleDraftInput",
            "call",
            "the draft state of the next step",
            fields=("topk_p", "topk_index", "hidden_states", "bonus_tokens"),
        ),
        Name(
            "sglang.srt.managers.utils:GenerationBatchResult",
            "call",
            "what the scheduler reads back beyond 0.5.9",
            fields=("new_seq_lens", "speculative_num_draft_tokens"),
        ),
        Name(
            "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",
            "call",
            "the plain decode itself",
            parameters=("batch",),
            keywords=("capture_hidden_mode",),
        ),
        Name(
            "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo",
            "read",
            "what plain decode would have to sample with beyond 0.5.9",
            fields=("has_watermark_candidates", "return_sampling_masks"),
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
        if any(batch.sampling_info.return_sampling_masks or ()):
            return "sampling_mask"
        return super().blocked(batch)

    def context_tokens(self, batch: Any) -> int:
        return sum(map(_committed_len, batch.reqs))

    def pending_tokens(self, draft_input: Any) -> torch.Tensor:
        return draft_input.bonus_tokens

    def forward_target(self, worker: Any, batch: Any, *, keep_hidden: bool) -> Any:
        mode = CaptureHiddenMode.FULL if keep_hidden else CaptureHiddenMode.NULL
        return worker.target_worker.forward_batch_generation(batch, capture_hidden_mode=mode)

    def set_result(
        self,
        result: Any,
        *,
        tokens: torch.Tensor,
        width: int,
        new_seq_lens: torch.Tensor,
    ) -> None:
        ids = tokens.to(torch.int32)
        result.next_token_ids = pad_rows(ids, width)
        result.accept_lens = torch.ones_like(ids)
        result.speculative_num_draft_tokens = width
        result.new_seq_lens = new_seq_lens
        result.next_draft_input = EagleDraftInput(bonus_tokens=ids)

    def draft_context(self, draft_worker: Any) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(draft_tp_context(draft_worker.parallel_layout))
        stack.enter_context(speculative_moe_backend_context())
        stack.enter_context(speculative_moe_a2a_backend_context())
        return stack
