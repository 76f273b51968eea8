"""The result processor: accept lengths back to the policy."""

from __future__ import annotations

import logging
from typing import Any

from sglang_dynspec.engine.runtime import DECISION, Runtime

logger = logging.getLogger("sglang_dynspec")


def before(runtime: Runtime, batch: Any, result: Any) -> None:
    """Take a plain step out of what SGLang is about to count as verified."""
    counts = runtime.verified_counts
    if counts is None:
        return
    try:
        decision = vars(result).get(DECISION)
        if decision is not None:
            counts.before(plain=decision.num_steps == 0, requests=len(batch.reqs))
    except Exception as error:
        runtime.verified_counts = None
        logger.warning(
            "sglang_dynspec: SGLang's accept length and accept rate count plain steps from now on.",
            exc_info=error,
        )


def observe(runtime: Runtime, result: Any) -> None:
    """Feed a processed result back, if a decision of ours led to it; else note when it ended."""
    decision = vars(result).pop(DECISION, None)
    if decision is None:
        runtime.controller.ended()
    else:
        # On the host by now: the result processor has just read it.
        seconds = runtime.controller.finished(decision, result.accept_lens.tolist())
        if decision.plan is not None and runtime.keeping is not None:
            runtime.keeping.totals.seconds += seconds
