"""Seconds of a decode step, from measured throughput."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dynspec.errors import ConfigError
from sglang_dynspec.measured import Curve, Table

ASSUMED_ACCEPT_LENGTH = 2.2
"""Of tables that do not say with which accept length they were measured."""

_LOG_GRID = math.log(1.05)
"""Contexts within 5 per cent of each other count as one, to look a cost up only once."""


@dataclass(frozen=True, slots=True)
class _Line:
    """Log seconds over log batch size, at one context; straight between points, flat below. Above
    them throughput stays, so that seconds grow with the batch."""

    batch: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, batch_size: int) -> float:
        x = math.log(batch_size)
        i = bisect_right(self.batch, x)
        if i == 0:
            return self.seconds[0]
        if i == len(self.batch):
            return self.seconds[-1] + x - self.batch[-1]
        share = (x - self.batch[i - 1]) / (self.batch[i] - self.batch[i - 1])
        return self.seconds[i - 1] + share * (self.seconds[i] - self.seconds[i - 1])


class StepCosts:
    """What a step of either mode takes.

    A server that serves ``c`` requests at ``r`` tokens per second, each of which gains ``a`` tokens
    a step, takes ``c * a / r`` seconds a step (Little's law). Prefill that the table's throughput
    includes is so spread over the decode steps. Between measured concurrencies the logarithms are
    interpolated, between measured contexts the seconds. Outside, the nearest measurement holds: the
    seconds of the smallest batch, the throughput of the largest one.

    Args:
        table: the measurements.
        backend: of which attention backend; None takes the table's first.
        accept_length: tokens a request gained in a speculative step of the measurement; by default
            the table's, else 2.2.

    Raises:
        ConfigError: the table has no such backend, or none with both modes measured, or the accept
            length is none that a speculative step can have.
    """

    def __init__(
        self, table: Table, backend: str | None = None, accept_length: float | None = None
    ) -> None:
        self.num_steps = table.num_steps
        self.accept_length = accept_length or table.accept_length or ASSUMED_ACCEPT_LENGTH
        self.assumed = not (accept_length or table.accept_length)
        """Whether nobody has said with which accept length the table was measured."""
        most = table.num_steps + 1
        if not 1 <= self.accept_length <= most:
            raise ConfigError(
                f"{table.source} is taken to have been measured with accept length "
                f"{self.accept_length:g}; with {table.num_steps} draft steps it lies between 1 and "
                f"{most}: give the true one (--accept-length)"
            )
        self.max_batch = 1
        self.backend = backend
        self._contexts: list[float] = []
        self._lines: dict[int, list[_Line]] = {0: [], table.num_steps: []}
        for curve in sorted(_usable(table, backend), key=lambda c: c.context):
            self.backend = curve.backend
            self._contexts.append(curve.context)
            self._lines[0].append(_line(curve, "no_spec", 1.0))
            self._lines[self.num_steps].append(_line(curve, "static_spec", self.accept_length))
            self.max_batch = max(self.max_batch, curve.points[-1].c)
        self._known: dict[tuple[int, int], dict[int, float]] = {}

    @property
    def contexts(self) -> tuple[float, ...]:
        """Measured prompt tokens of a request, ascending."""
        return tuple(self._contexts)

    @property
    def ladder(self) -> tuple[int, ...]:
        """Draft steps that have a cost."""
        return tuple(sorted(self._lines))

    def seconds(self, batch_size: int, context: float) -> dict[int, float]:
        """Return the seconds of a step by its draft steps.

        Args:
            batch_size: requests (>= 1).
            context: mean tokens of a request.
        """
        rounded = int(math.log(context) / _LOG_GRID) if context > 1 else 0
        key = (batch_size, rounded)
        known = self._known.get(key)
        if known is None:
            context = math.exp(rounded * _LOG_GRID)
            known = {n: self._seconds(n, batch_size, context) for n in self.ladder}
            self._known[key] = known
        return known

    def crossover(self, context: float, accept_length: float | None = None) -> int | None:
        """Return the smallest batch for which a plain step gains more tokens per second.

        Args:
            context: mean tokens of a request.
            accept_length: of a speculative step; by default that of the measurement.

        Returns:
            Requests, or None if speculation is ahead up to the largest measured batch.
        """
        gain = accept_length or self.accept_length
        for batch_size in range(1, self.max_batch + 1):
            costs = self.seconds(batch_size, context)
            if gain / costs[self.num_steps] < 1 / costs[0]:
                return batch_size
        return None

    def _seconds(self, num_steps: int, batch_size: int, context: float) -> float:
        lines = self._lines[num_steps]
        i = bisect_right(self._contexts, context)
        if i == 0 or i == len(lines):
            return math.exp(lines[min(i, len(lines) - 1)].at(batch_size))
        low, high = self._contexts[i - 1], self._contexts[i]
        share = (context - low) / (high - low)
        below, above = (math.exp(line.at(batch_size)) for line in lines[i - 1 : i + 1])
        return below + share * (above - below)


def _usable(table: Table, backend: str | None) -> Sequence[Curve]:
    complete = [c for c in table.curves if any(p.ratio is not None for p in c.points)]
    if not complete:
        raise ConfigError(
            f"{table.source} has no row with both no_spec and static_spec; simulation needs both"
        )
    names = list(dict.fromkeys(curve.backend for curve in complete))
    if backend is None:
        backend = names[0]
    elif backend not in names:
        has = ", ".join(str(name) for name in names if name) or "none by name"
        raise ConfigError(f"{table.source} has no backend {backend!r}; it has {has}")
    return [curve for curve in complete if curve.backend == backend]


def _line(curve: Curve, mode: str, accept_length: float) -> _Line:
    points = [(p.c, rate) for p in curve.points if (rate := getattr(p, mode)) is not None]
    return line_through([(c, c * accept_length / rate) for c, rate in points])


def line_through(points: Sequence[tuple[float, float]]) -> _Line:
    """Return the seconds of a step by its batch size, as measured.

    Args:
        points: requests, ascending, and seconds.
    """
    return _Line(
        tuple(math.log(c) for c, _ in points),
        tuple(math.log(seconds) for _, seconds in points),
    )
