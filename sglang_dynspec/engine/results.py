"""The result processor: accept lengths back to the policy."""

from __future__ import annotations

from typing import Any

from sglang_dynspec.engine.runtime import DECISION, Runtime


def observe(runtime: Runtime, result: Any) -> None:
    """Feed a processed result back, if a decision of ours led to it."""
    decision = vars(result).pop(DECISION, None)
    if decision is not None:
        # On the host by now: the result processor has just read it.
        runtime.controller.finished(decision, result.accept_lens.tolist())
