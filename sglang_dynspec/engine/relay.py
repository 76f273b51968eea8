"""What the scheduler relays from one step to the next, when the steps are plain.

SGLang's FutureMap (from 0.5.13, under the overlap scheduler) hands lengths, pending tokens and
draft proposals from step to step on the device. A plain step that leaves the draft alone (``skip``,
``catch_up``) needs no proposals, and the host knows its new lengths without asking: one more for
each request. Neither exists on a server without speculation, so neither may cost a plain step
anything.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dynspec.engine.runtime import DECISION, Runtime

KNOWN_LENGTHS = "dynspec_known_lengths"


def resolve_extras(runtime: Runtime, future_map: Any, batch: Any) -> bool:
    """Before ``FutureMap._resolve_spec_extras``: for a plain step that leaves the draft
    alone, bring only the pending tokens.

    Returns:
        Whether that was all; if not, SGLang's own is to run.
    """
    draft_input = batch.spec_info
    if not _tokens_suffice(runtime, draft_input):
        return False
    indices = draft_input.future_indices
    if indices.device.type != "cpu":
        # As SGLang does: the indices were made on the scheduler's stream.
        indices.record_stream(torch.get_device_module(future_map.device).current_stream())
    draft_input.bonus_tokens = future_map.output_tokens_buf[indices]
    draft_input.topk_p = draft_input.topk_index = draft_input.hidden_states = None
    return True


def _tokens_suffice(runtime: Runtime, draft_input: Any) -> bool:
    if runtime.draft_state == "warm" or draft_input is None:
        return False
    decision = vars(draft_input).get(DECISION)
    return (
        decision is not None
        and decision.num_steps == 0
        and draft_input.future_indices is not None
        and draft_input.future_indices.shape[0] > 0
    )


def stash(runtime: Runtime, future_map: Any, future_indices: Any, payload: Any) -> bool:
    """Before ``FutureMap.stash``: without proposals, keep only the pending tokens.

    Returns:
        Whether that was all; if not, SGLang's own is to run.
    """
    if isinstance(payload, torch.Tensor):  # up to 0.5.14, of batches without speculation
        return False
    if payload.topk_p is not None or payload.bonus_tokens is None:
        return False
    kept = future_map.output_tokens_buf
    kept[future_indices] = payload.bonus_tokens.to(kept.dtype)
    return True


def note_lengths(runtime: Runtime, batch: Any, result: Any) -> None:
    """After ``Scheduler.run_batch``: bring the host's lengths up to date after a plain step.

    Under overlap SGLang restores the batch after the forward, so they stand where they were before
    it; without overlap it has read the new ones itself.
    """
    decision = vars(result).get(DECISION)
    if decision is None or decision.num_steps:
        return
    if not runtime.scheduler.enable_overlap or batch.seq_lens_cpu is None:
        return
    batch.seq_lens_cpu = batch.seq_lens_cpu + 1
    batch.seq_lens_sum = None  # SGLang sums up the lengths where it needs to
    setattr(batch, KNOWN_LENGTHS, True)


def resolve_lengths(
    runtime: Runtime, future_map: Any, batch: Any, stream_ordered: bool = False
) -> bool:
    """Before ``FutureMap.resolve_seq_lens_cpu``: do not wait for the device where the host knows.

    Requests that joined since come from a prefill, whose lengths the host knows as well.

    Returns:
        Whether the host knew; if not, SGLang's own is to run.
    """
    known = vars(batch).pop(KNOWN_LENGTHS, False)
    draft_input = batch.spec_info
    if (
        not known
        or stream_ordered
        or not future_map.needs_cpu_seq_lens
        or batch.seq_lens_cpu is None
        or draft_input is None
        or draft_input.future_indices is None
        or future_map.publish_ready is None
    ):
        return False
    future_map.publish_ready.wait()
    batch.seq_lens = future_map.new_seq_lens_buf[draft_input.future_indices]
    return True
