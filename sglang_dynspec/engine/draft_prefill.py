"""The draft model's prefill, which the policy may leave out, except under ``warm``."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dynspec.engine import batch_prep
from sglang_dynspec.engine.runtime import Runtime


def instead(
    runtime: Runtime, batch: Any, hidden: torch.Tensor | None, next_token_ids: torch.Tensor
) -> Any:
    """The draft state after a prefill that the draft model does not take part in, or None if it is
    to take part.

    Args:
        batch: the worker's batch, after the target's prefill.
        hidden: the target's hidden states, shape (tokens, hidden size).
        next_token_ids: sampled tokens, shape (bs,).
    """
    if runtime.draft_state == "warm":
        return None
    if not runtime.dialect.is_prefill(batch):
        if runtime.keeping is not None and batch.forward_mode.is_mixed():
            runtime.keeping.prefilled(batch, hidden, drafted=True)
        return None
    # Tokens that stand for images are no tokens to a draft that catches up later.
    # With DP attention the other ranks' drafts take part in it, which nobody has asked.
    wanted = (
        runtime.exchange is not None
        or any(batch.multimodal_inputs or ())
        or runtime.controller.wants_draft_prefill(batch_prep.after_prefill(runtime, batch))
    )
    if runtime.keeping is not None:
        runtime.keeping.prefilled(batch, hidden, drafted=wanted)
    if wanted:
        return None
    return runtime.dialect.blank_draft_input(runtime.worker, batch, next_token_ids)
