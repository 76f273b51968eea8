"""SGLang 0.5.13 and later: the worker gets the scheduler's own ScheduleBatch, which the scheduler
restores afterwards (Scheduler._forward_isolation), and publishes the new lengths itself."""

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
from sglang_dynspec.engine.dialect.base import (
    EXTEND_BACKEND,
    EXTEND_GRAPHS,
    Dialect,
    blank_proposals,
    pad_rows,
)
from sglang_dynspec.engine.temporarily import temporarily

_committed_len = attrgetter("kv_committed_len")


class ScheduleBatchDialect(Dialect):
    """0.5.17."""

    family = "0.5.17"
    batch_parameter = "batch"
    has_relay = True
    graph_runner = "decode_cuda_graph_runner"
    builds_steps = True
    times_graphs = True
    returns_hidden_states = True
    extend_runs_on_runner = True
    mask_field = "grammar_mask"
    capture_draft_graphs: ClassVar[str] = "_capture_cuda_graphs"
    """Method of the draft worker."""
    live: ClassVar[tuple[Live, ...]] = (
        *names.LIVE_FROM_0_5_14,
        *names.LAYOUT_BY_GROUP_LIVE,
        *names.READ_DONE_TO_0_5_17,
    )
    instances: ClassVar[tuple[Instance, ...]] = (
        *names.INSTANCES_FROM_0_5_17,
        *names.LENGTHS_ON_REQUEST,
    )
    contract: ClassVar[tuple[Name, ...]] = (
        *names.FROM_0_5_17,
        names.LAYOUT_BY_GROUP,
        names.WIDTH_FROM_ARGUMENTS,
        names.VERIFIED_BY_FUNCTION,
        names.GRAMMAR_MASK,
        names.LOGPROBS_TO_0_5_17,
    )

    def blocked(self, batch: Any) -> str | None:
        if any(batch.sampling_info.return_sampling_masks or ()):
            return "sampling_mask"
        return super().blocked(batch)

    def context_tokens(self, batch: Any) -> int:
        return sum(map(_committed_len, batch.reqs))

    def pending_tokens(self, draft_input: Any) -> torch.Tensor:
        return draft_input.bonus_tokens

    def forward_target(
        self, worker: Any, batch: Any, *, keep_hidden: bool, sample: bool = True
    ) -> Any:
        return worker.target_worker.forward_batch_generation(
            batch,
            is_verify=not sample,
            capture_hidden_mode=graphs.hidden_mode(keep_hidden=keep_hidden),
        )

    def prefill_lengths(self, batch: Any) -> Sequence[int]:
        lengths: Sequence[int] = batch.extend_lens
        return lengths

    def as_prefill(self, batch: Any, **of: Any) -> dict[str, Any]:
        return {
            **super().as_prefill(batch, **of),
            "extend_lens": of["extend_lens"],
            "prefix_lens": of["prefix_lens"].tolist(),
            "chunked_req_next_prompt_token": None,
        }

    def verified_sampler(self) -> Callable[..., Any]:
        from sglang.srt.speculative.eagle_utils import eagle_sample

        sample: Callable[..., Any] = eagle_sample
        return sample

    def add_logprobs(self, batch: Any, logits: Any, predict: Any, accepted: Any) -> None:
        from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs

        compute_spec_v2_logprobs(batch, logits, predict, accepted, 0)

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

    def blank_draft_input(self, worker: Any, batch: Any, tokens: torch.Tensor) -> Any:
        config = worker.draft_worker.draft_runner.model_config
        hidden_size = config.spec_hidden_size if self.reads_hidden(worker) else None
        return EagleDraftInput(
            bonus_tokens=tokens,
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
            **blank_proposals(worker, tokens, hidden_size),
        )

    def draft_parallel_context(self, draft_worker: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = draft_worker.draft_tp_context(
            draft_worker.draft_runner.tp_group
        )
        return context

    def publish_read_done(self, worker: Any) -> None:
        # Scheduler._apply_war_barrier looks at the draft's runner, which has not run; without its
        # event the scheduler's stream would wait for the whole forward.
        runner = worker.target_worker.model_runner
        worker.war_fastpath_runner.war_fastpath_read_done_event = (
            runner.war_fastpath_read_done_event
        )
        runner.war_fastpath_read_done_event = None

    def result_width(self, worker: Any) -> int:
        return 1

    def one_token_extend(self, worker: Any) -> dict[str, Any] | None:
        # As EAGLEWorkerV2.build_adaptive_runtime_state does for 0 draft steps, less the target's.
        draft_worker = worker.draft_worker
        with (
            self.draft_context(draft_worker),
            worker._override_worker_state(0, 1),
            self.one_token_graphs(),
        ):
            draft_worker.init_attention_backend()
            getattr(draft_worker, self.capture_draft_graphs)()
            return {n: getattr(draft_worker, n) for n in (EXTEND_BACKEND, EXTEND_GRAPHS)}

    def one_token_graphs(self) -> AbstractContextManager[Any]:
        """What it takes beyond SGLang's override for draft-extend graphs of one token a request."""
        from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner as module

        # 0.5.17 derives it from the server's arguments, which its override leaves alone.
        return temporarily(module, resolve_num_tokens_per_req=lambda **_: 1)

    def capture_decode_graphs(self, model_runner: Any, *, keep_hidden: bool) -> dict[str, Any]:
        backend = graphs.attention_backend(model_runner)
        runner = self.graph_runner_class(model_runner, graphs.hidden_mode(keep_hidden=keep_hidden))(
            model_runner,
            attn_backend=backend,
            speculative_num_steps=0,
            speculative_num_draft_tokens=1,
        )
        return {"attn_backend": backend, self.graph_runner: runner}

    def graph_runner_class(self, model_runner: Any, mode: CaptureHiddenMode) -> Any:
        """SGLang's class of decode graphs, keeping the hidden states of this mode."""
        sglangs = model_runner._decode_cuda_graph_runner_cls()
        return graphs.keeping(sglangs, "return_hidden_states_mode", mode)
