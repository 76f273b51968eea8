"""Making the policy, in the process that ``policy`` has spawned for it."""

from __future__ import annotations

import sys
from typing import Any

from sglang_dynspec.policy import BatchView
from sglang_dynspec.settings import Settings

_VIEW = BatchView(batch_size=1, ladder=(0, 3))


def look(job: dict[str, Any]) -> dict[str, Any]:
    """Say what is wrong with the policy, and whether it needs the working directory on the path."""
    error = _error()
    if error is None:
        return {"error": None, "needs_cwd": False}
    sys.path.insert(0, job["cwd"])
    if _error() is None:
        return {"error": None, "needs_cwd": True}
    return {"error": error, "needs_cwd": False}


def _error() -> str | None:
    # Whatever the policy's own code raises, SystemExit too, is an answer.
    try:
        policy = Settings.resolve().build_policy()
    except BaseException as error:
        return str(error)
    try:
        _VIEW.on_ladder(policy.decide(_VIEW))
    except BaseException as error:
        return f"its first decision failed: {type(error).__name__}: {error}"
    return None
