"""The draft model's state over plain steps.

A plain step writes no KV for the draft. ``warm`` writes it at once, so that speculation comes back
with its acceptance intact. ``skip`` leaves the hole: output stays right, because the target
verifies every token, but acceptance suffers until the hole is far behind. Under ``skip`` the policy
may leave out the draft's prefill as well.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dynspec.engine import batch_prep
from sglang_dynspec.engine.dialect.base import Dialect, pad_rows
from sglang_dynspec.engine.runtime import Runtime


def extend(dialect: Dialect, worker: Any, batch: Any, result: Any, width: int) -> None:
    """Run SGLang's own draft-extend over the token of a plain step (``warm``).

    It is the one that follows a verification, told that each request had one token accepted, so
    that its CUDA graph fits; of each row of ``width`` tokens only the first counts. The rest
    writes KV past the committed length, as rejected draft tokens do, and is overwritten next.

    Args:
        batch: the worker's batch, with the lengths before the step.
        result: with ``next_token_ids``, ``accept_lens`` and ``next_draft_input`` set, and hidden
            states of shape (bs, hidden); these are gone afterwards, so that nobody copies them to
            the host.
    """
    output = result.logits_output
    output.hidden_states = pad_rows(output.hidden_states, width)
    batch.out_cache_loc = window_slots(worker, batch, width)
    with dialect.draft_context(worker.draft_worker):
        worker.draft_worker._draft_extend_for_decode(batch, result)
    output.hidden_states = None


def instead_of_prefill(runtime: Runtime, batch: Any, next_token_ids: torch.Tensor) -> Any:
    """The draft state after a prefill that the draft model does not take part in, or None if it is
    to take part.

    Args:
        batch: the worker's batch, after the target's prefill.
        next_token_ids: sampled tokens, shape (bs,).
    """
    if runtime.draft_state != "skip" or not runtime.dialect.is_prefill(batch):
        return None
    if runtime.controller.wants_draft_prefill(batch_prep.after_prefill(runtime, batch)):
        return None
    return runtime.dialect.blank_draft_input(runtime.worker, batch, next_token_ids)


def skip(result: Any, draft_input: Any) -> None:
    """Hand the last proposal on, stale as it is (``skip``), or none where none was relayed."""
    following = result.next_draft_input
    following.topk_p = draft_input.topk_p
    following.topk_index = draft_input.topk_index
    following.hidden_states = draft_input.hidden_states
    result.logits_output.hidden_states = None


def window_slots(worker: Any, batch: Any, width: int) -> torch.Tensor:
    """KV slots of the ``width`` positions after the committed length. Shape (bs * width,), int64.

    The scheduler reserves them before every decode step.
    """
    table = worker.req_to_token_pool.req_to_token
    columns = batch.seq_lens[:, None] + torch.arange(width, device=batch.seq_lens.device)
    return table[batch.req_pool_indices[:, None], columns].to(torch.int64).flatten()
