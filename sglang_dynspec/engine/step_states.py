"""Numbers of draft steps between none and all of the server's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from sglang_dynspec.engine.capture import Captured, capture
from sglang_dynspec.engine.dialect.base import Dialect
from sglang_dynspec.engine.ranks import Agreement
from sglang_dynspec.engine.temporarily import temporarily


class StepStates:
    """What a speculative step with fewer draft steps needs: attention backends, CUDA graphs and
    widths, made at start by SGLang's own adaptive code, and put in place for one forward.

    Outside of that forward everything is as on a server with all its draft steps, so that what the
    scheduler reserves, before it is known what the next step will be, is enough for any.
    """

    def __init__(self, dialect: Dialect, worker: Any, agreement: Agreement) -> None:
        self._dialect = dialect
        self._agreement = agreement
        self._worker = worker
        self._states: dict[int, list[tuple[Any, dict[str, Any]]]] = {}
        self.captured: dict[int, Captured | None] = {}
        """What the graphs of each have taken; None where it has none."""

    def build(self, steps: Sequence[int], *, strict: bool) -> None:
        """Make them.

        Args:
            steps: numbers of draft steps between 0 and the server's.
            strict: a capture that fails stops the server; otherwise that number is left out.

        Raises:
            InstallError: a capture failed, under strict.
        """
        for n in steps:
            what = f"speculation with {n} draft step{'s' if n > 1 else ''}"
            made = capture(
                what,
                partial(self._dialect.step_state, self._worker, n),
                self._worker.device,
                strict=strict,
                agreement=self._agreement,
                otherwise="No step runs so many",
            )
            if made is None:
                continue
            self._states[n], captured = made
            has_graphs = any(
                values.get(self._dialect.graph_runner) is not None for _, values in made[0]
            )
            self.captured[n] = captured if has_graphs else None
            if has_graphs:
                captured.report(what)

    @property
    def steps(self) -> tuple[int, ...]:
        """Those that can be run, ascending."""
        return tuple(sorted(self._states))

    @contextmanager
    def active(self, num_steps: int) -> Iterator[None]:
        """Run a forward with a number of draft steps; all of the server's need nothing."""
        with ExitStack() as stack:
            for target, values in self._states.get(num_steps, ()):
                stack.enter_context(temporarily(target, **values))
            yield
