"""Keeping failures of ours out of other people's code."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turn an exception into an error in the log; under strict, let it through.

    Args:
        what: the action, as the subject of "... failed".
    """
    try:
        yield
    except Exception:
        from sglang_dynspec.settings import strict_from_environment

        if strict_from_environment():
            raise
        logging.getLogger("sglang_dynspec").exception(
            "sglang_dynspec is NOT in force: %s failed. SGLang runs as it does without it.", what
        )
