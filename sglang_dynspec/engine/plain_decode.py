"""One plain decode step of the target, with the result that a spec-v2 scheduler expects.

A decode batch arrives with ``seq_lens`` without the pending token, which is the last one sampled.
Its KV slot is already in ``req_to_token``, because SGLang reserves those of a whole speculative
step, so nothing is allocated here.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dynspec.engine import draft_state
from sglang_dynspec.engine.catch_up import CatchUp
from sglang_dynspec.engine.decode_graph import PlainTarget
from sglang_dynspec.engine.dialect.base import PROMPT_EMBEDDINGS, Dialect, OnPublish, pad_rows
from sglang_dynspec.engine.dialect.verified import Barrier
from sglang_dynspec.engine.draft_state import DraftExtend
from sglang_dynspec.engine.temporarily import temporarily


def run(
    dialect: Dialect,
    target: PlainTarget,
    worker: Any,
    batch: Any,
    *,
    extend: DraftExtend | None,
    keep: CatchUp | None = None,
    on_publish: OnPublish | None = None,
    as_verified: bool = False,
    barrier: Barrier | None = None,
) -> Any:
    """Decode one token for every request of the batch, without drafting.

    Args:
        worker: the EAGLEWorkerV2, or one derived from it.
        batch: its decode batch (ModelWorkerBatch or ScheduleBatch); changed as SGLang's own
            worker changes it.
        extend: writes the draft's KV too (``warm``).
        keep: keeps what the draft misses (``catch_up``).
        on_publish: from SGLang 0.5.13; to be called with the new lengths once they are known.
        as_verified: sample as SGLang's verification does, instead of with the ordinary sampler.
        barrier: from SGLang 0.5.17; to be called before grammars are looked at.

    Returns:
        SGLang's GenerationBatchResult, one token accepted for each request.
    """
    draft_input = batch.spec_info
    seq_lens = batch.seq_lens
    new_seq_lens = seq_lens + 1
    returned = dialect.returns_hidden_states and dialect.asked_for_hidden_states(batch)
    keep_hidden = (
        returned
        or (extend is not None and extend.reads_hidden)
        or (keep is not None and dialect.keeps_hidden(worker))
    )
    with target.active(), _as_plain_decode(dialect, worker, batch, new_seq_lens):
        result = dialect.forward_target(
            worker, batch, keep_hidden=keep_hidden, sample=not as_verified
        )
        if as_verified:
            dialect.sample_as_verified(batch, batch.input_ids, result, barrier)
    if on_publish is not None:
        on_publish(new_seq_lens)
    width = dialect.result_width(worker) if extend is None else extend.width
    dialect.set_result(result, tokens=result.next_token_ids, width=width, new_seq_lens=new_seq_lens)
    if keep is not None:
        keep.took_plain_step(batch, result.logits_output.hidden_states)
    # A copy: these are read later, and a graph writes the next step's to the same place.
    hidden = pad_rows(result.logits_output.hidden_states.clone(), width) if returned else None
    _hand_on(dialect, worker, batch, result, draft_input, extend)
    result.logits_output.hidden_states = hidden
    return result


def run_idle(
    dialect: Dialect,
    target: PlainTarget,
    worker: Any,
    batch: Any,
    *,
    extend: DraftExtend | None,
    on_publish: OnPublish | None = None,
) -> Any:
    """Take part in a plain decode step of other ranks (DP attention), without requests.

    Args:
        batch: the worker's, without requests.
        extend: see :func:`run`.
        on_publish: see :func:`run`.

    Returns:
        SGLang's GenerationBatchResult, of no tokens.
    """
    keep_hidden = extend is not None and extend.reads_hidden
    hidden = {"spec_info": None, "spec_algorithm": SpeculativeAlgorithm.NONE}
    with target.active(), temporarily(batch, **hidden):
        result = dialect.forward_target(worker, batch, keep_hidden=keep_hidden)
    if on_publish is not None:
        on_publish(batch.seq_lens)
    tokens = batch.input_ids.new_empty(0)
    width = dialect.result_width(worker) if extend is None else extend.width
    dialect.set_result(result, tokens=tokens, width=width, new_seq_lens=batch.seq_lens)
    blank = dialect.blank_draft_input(worker, batch, tokens)
    _hand_on(dialect, worker, batch, result, blank, extend)
    result.logits_output.hidden_states = None
    return result


def _hand_on(
    dialect: Dialect,
    worker: Any,
    batch: Any,
    result: Any,
    draft_input: Any,
    extend: DraftExtend | None,
) -> None:
    """Give the result proposals for the next step: the draft's, or those that there were."""
    if extend is not None:
        extend.run(batch, result)
    else:
        draft_state.skip(result, draft_input)
        dialect.publish_read_done(worker)


def _as_plain_decode(dialect: Dialect, worker: Any, batch: Any, new_seq_lens: torch.Tensor) -> Any:
    values: dict[str, Any] = {
        "input_ids": dialect.pending_tokens(batch.spec_info).to(torch.int64),
        "out_cache_loc": draft_state.window_slots(worker, batch, 1),
        "seq_lens": new_seq_lens,
        "spec_info": None,
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        **{name: None for name in PROMPT_EMBEDDINGS if hasattr(batch, name)},
    }
    # None where the attention backend works without host lengths.
    if batch.seq_lens_cpu is not None:
        values["seq_lens_cpu"] = batch.seq_lens_cpu + 1
    if batch.seq_lens_sum is not None:
        values["seq_lens_sum"] = batch.seq_lens_sum + len(new_seq_lens)
    return temporarily(batch, **values)
