"""The result processor: accept lengths back to the policy."""

from __future__ import annotations

from typing import Any

from sglang_dynspec.engine.runtime import DECISION, Runtime


def observe(runtime: Runtime, result: Any) -> None:
    """Feed a processed result back, if a decision of ours led to it; else note when it ended."""
    decision = vars(result).pop(DECISION, None)
    if decision is None:
        runtime.controller.ended()
    else:
        # On the host by now: the result processor has just read it.
        runtime.controller.finished(decision, result.accept_lens.tolist())
