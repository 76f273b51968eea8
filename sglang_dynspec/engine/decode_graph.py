"""The target as it would be on a server without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dynspec.engine.dialect.base import Dialect
from sglang_dynspec.engine.temporarily import temporarily


class PlainTarget:
    """Hides speculation from the target's model runner while a plain step runs.

    The target's graph runner has captured TARGET_VERIFY, not DECODE, because its
    ``spec_algorithm`` was set at capture; a plain step must not replay that, and runs eagerly.
    """

    def __init__(self, dialect: Dialect, worker: Any) -> None:
        self._runner = worker.target_worker.model_runner
        self.eager = getattr(self._runner, dialect.graph_runner) is not None
        """Whether the server runs from graphs that plain steps cannot use."""
        self._hidden = {"spec_algorithm": SpeculativeAlgorithm.NONE, dialect.graph_runner: None}

    @contextmanager
    def active(self) -> Iterator[None]:
        """The model runner without speculation; restored exactly at the end."""
        with temporarily(self._runner, **self._hidden):
            yield
