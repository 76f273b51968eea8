"""Seconds of a decode step by draft steps, batch size and context, learned from steps."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

_OCTAVE = math.log(2)
_BUCKETS_PER_OCTAVE = 4
_SHORT_CONTEXT = 512
"""Tokens of a request up to which contexts are not told apart; from there on octaves are."""

_FIRST = 5
"""Samples whose median a cell starts with, so that one slow step does not mislead it."""
_WEIGHT = 40
"""Samples that a cell remembers."""
_CAP = 0.15
"""A sample counts at most so far (in log seconds) from what its cell knows."""

_NOISE = 0.05
"""Of one sample."""
_BETWEEN = 0.06
"""Doubt per octave of batch size between two cells: graphs are padded to a size of their own."""
_BEYOND = 0.15
"""Doubt per octave beyond the outermost cell, if another mode shows the way."""
_BLIND = 0.4
"""The same if none does."""
_OTHER_CONTEXT = 0.15
"""Doubt per octave of context."""

_TIMED = 0.2
"""Doubt of a mode that has only been timed at start, against one that steps have shown: some of
what a step does runs outside of CUDA graphs."""
_OWN_SHARE = 0.7
"""Doubt whether a mode takes as much beyond its timing as another one does, of the log of that."""
_TIMED_PER_OCTAVE = 0.08
"""Doubt per octave of batch size where timings show the way."""

_LOG_RATIO = 0.5
_RATIO_PER_OCTAVE = 0.1
"""Before anything is known, a step with 3 draft steps takes exp(0.5 + 0.1 log2(batch)) times a
plain one, which lies among what was measured on H200 and RTX PRO 6000 (1.4 to 2.6 times with one
request, 3 to 5 times with 256)."""
_RATIO_DOUBT = 0.5


class Estimate(NamedTuple):
    """A logarithm, and the standard deviation of our belief in it."""

    log: float
    doubt: float


@dataclass(slots=True)
class _Cell:
    batch: float
    """Mean log batch size of the samples."""
    log: float
    samples: int = 0
    first: list[float] = field(default_factory=list)

    def add(self, batch: float, log: float) -> None:
        self.samples += 1
        share = 1.0 / min(self.samples, _WEIGHT)
        self.batch += share * (batch - self.batch)
        if self.samples <= _FIRST:
            self.first.append(log)
            self.log = sorted(self.first)[(len(self.first) - 1) // 2]
            return
        self.log += share * min(_CAP, max(-_CAP, log - self.log))

    @property
    def doubt(self) -> float:
        return _NOISE / math.sqrt(min(self.samples, _WEIGHT))


class _Line:
    """The cells of one mode and context, by batch size."""

    def __init__(self, context: float) -> None:
        self.context = context
        """Mean octave of the samples' contexts."""
        self.keys: list[int] = []
        self.cells: dict[int, _Cell] = {}

    def add(self, batch: float, context: float, log: float) -> None:
        self.context += (context - self.context) / _WEIGHT
        key = round(batch / _OCTAVE * _BUCKETS_PER_OCTAVE)
        cell = self.cells.get(key)
        if cell is None:
            cell = self.cells[key] = _Cell(batch, log)
            insort(self.keys, key)
        cell.add(batch, log)

    def around(self, batch: float) -> tuple[_Cell | None, _Cell | None]:
        """Return the nearest cells on both sides; twice the same one where it fits."""
        key = round(batch / _OCTAVE * _BUCKETS_PER_OCTAVE)
        if key in self.cells:
            return self.cells[key], self.cells[key]
        i = bisect_left(self.keys, key)
        below = self.cells[self.keys[i - 1]] if i else None
        above = self.cells[self.keys[i]] if i < len(self.keys) else None
        return below, above

    def inside(self, batch: float) -> Estimate | None:
        """Return what the cells say about a batch size between them."""
        below, above = self.around(batch)
        if below is None or above is None:
            return None
        if below is above:
            return Estimate(below.log, below.doubt)
        width = max(above.batch - below.batch, 1e-9)
        share = min(1.0, max(0.0, (batch - below.batch) / width))
        gap = width * min(share, 1 - share) / _OCTAVE
        return Estimate(
            below.log + share * (above.log - below.log),
            max(below.doubt, above.doubt) + _BETWEEN * gap,
        )


class _Timings:
    """Log seconds by batch size, for the sizes that graphs have been captured for."""

    def __init__(self) -> None:
        self._batches: list[float] = []
        self._logs: list[float] = []

    def add(self, batch: float, log: float) -> None:
        i = bisect_left(self._batches, batch)
        self._batches.insert(i, batch)
        self._logs.insert(i, log)

    def at(self, batch: float) -> float:
        """A batch between two sizes runs padded to the larger; one above all runs without graphs,
        and takes more by a guess."""
        i = bisect_left(self._batches, batch - 1e-9)
        if i < len(self._logs):
            return self._logs[i]
        return self._logs[-1] + 0.5 * (batch - self._batches[-1])


class CostModel:
    """A table of cells by mode, context and batch size, and what to believe beyond them.

    Each cell keeps the mean of the logarithm of its last samples, outliers capped (as the cells of
    eagle-harness are, there at twice the estimate). Between two cells it is interpolated.
    Beyond the outermost, and in a context not seen yet, a mode is taken to grow as another mode
    does that is known there: the ratio of two modes changes slowly with the load, their seconds do
    not. TurboSpec (arXiv 2406.14066, section 4) fits a linear model of batched tokens to a profile
    made beforehand; ours starts with nothing, or with timings of CUDA graphs, which say how modes
    compare but not what a step takes in all, and follows the server it runs in.
    """

    def __init__(self) -> None:
        self._lines: dict[int, dict[int, _Line]] = {}
        self._timings: dict[int, _Timings] = {}

    def add_timing(self, num_steps: int, batch_size: int, seconds: float) -> None:
        """Learn from a timing made before the server serves; arguments as of :meth:`add`."""
        if not 0 < seconds < math.inf:
            return
        timings = self._timings.setdefault(num_steps, _Timings())
        timings.add(math.log(batch_size), math.log(seconds))

    def add(self, num_steps: int, batch_size: int, context: float, seconds: float) -> None:
        """Learn from a step.

        Args:
            num_steps: draft steps.
            batch_size: requests.
            context: mean tokens of a request.
            seconds: of the step; what is not above 0 is left out.
        """
        if not 0 < seconds < math.inf:
            return
        lines = self._lines.setdefault(num_steps, {})
        octave = _octave(context)
        line = lines.setdefault(round(octave), _Line(octave))
        line.add(math.log(batch_size), octave, math.log(seconds))

    def estimates(
        self, ladder: tuple[int, ...], batch_size: int, context: float
    ) -> dict[int, Estimate]:
        """Return log seconds for every mode of a ladder.

        Before any step has been seen the plain mode stands at 0: what counts is how they compare.
        """
        batch, octave = math.log(batch_size), _octave(context)
        key = round(octave)
        found = {n: estimate for n in ladder if (estimate := self._known(n, batch, key))}
        # The one that is known nearest shows the others the way.
        away = [(self._distance(n, batch, octave), n) for n in ladder if n not in found]
        for distance, n in sorted(away):
            if distance < math.inf:
                found[n] = self._reached(n, batch, octave, found)
        return {n: found.get(n) or self._guess(n, batch, octave, found) for n in ladder}

    def _known(self, num_steps: int, batch: float, context: int) -> Estimate | None:
        line = self._lines.get(num_steps, {}).get(context)
        return None if line is None else line.inside(batch)

    def _nearest(self, num_steps: int, batch: float, context: float) -> tuple[int, _Line, _Cell]:
        lines = self._lines[num_steps]
        key = min(lines, key=lambda key: abs(lines[key].context - context))
        cells = [cell for cell in lines[key].around(batch) if cell is not None]
        return key, lines[key], min(cells, key=lambda cell: abs(cell.batch - batch))

    def _distance(self, num_steps: int, batch: float, context: float) -> float:
        """Octaves to the nearest cell of a mode; infinite if it has none."""
        if num_steps not in self._lines:
            return math.inf
        _, line, cell = self._nearest(num_steps, batch, context)
        return abs(cell.batch - batch) / _OCTAVE + abs(line.context - context)

    def _reached(
        self, num_steps: int, batch: float, context: float, known: dict[int, Estimate]
    ) -> Estimate:
        """Carry what is known of a mode elsewhere to this batch size and context."""
        near, line, cell = self._nearest(num_steps, batch, context)
        octaves = (batch - cell.batch) / _OCTAVE
        away = abs(line.context - context)
        timed = self._timed_growth(num_steps, cell.batch, batch)
        for other, here in known.items():
            there = self._known(other, cell.batch, near)
            if there is None:
                continue
            tilt = math.copysign(_RATIO_PER_OCTAVE, num_steps - other) * octaves
            beyond = _BEYOND
            others = self._timed_growth(other, cell.batch, batch)
            if timed is not None and others is not None:
                tilt, beyond = timed - others, _TIMED_PER_OCTAVE
            return Estimate(
                cell.log + here.log - there.log + tilt,
                cell.doubt + here.doubt + beyond * abs(octaves) + _OTHER_CONTEXT * away,
            )
        if timed is not None:
            doubt = _TIMED_PER_OCTAVE * abs(octaves) + _BLIND * away
            return Estimate(cell.log + timed, cell.doubt + doubt)
        return Estimate(
            cell.log + 0.5 * (batch - cell.batch), cell.doubt + _BLIND * (abs(octaves) + away)
        )

    def _timed_growth(self, num_steps: int, start: float, end: float) -> float | None:
        """By how much the log seconds of a mode grow between two log batch sizes, as timed."""
        timings = self._timings.get(num_steps)
        return None if timings is None else timings.at(end) - timings.at(start)

    def _guess(
        self, num_steps: int, batch: float, octave: float, found: dict[int, Estimate]
    ) -> Estimate:
        """From a known mode by what both took when timed; else between two known modes, or from
        one by the usual ratio."""
        if num_steps in self._timings:
            return self._timed(num_steps, batch, octave, found)
        below = max((n for n in found if n < num_steps), default=None)
        above = min((n for n in found if n > num_steps), default=None)
        if below is not None and above is not None:
            share = (num_steps - below) / (above - below)
            low, high = found[below], found[above]
            return Estimate(
                low.log + share * (high.log - low.log), max(low.doubt, high.doubt) + 0.1
            )
        known = below if below is not None else above
        base, doubt = (0.0, 0.0) if known is None else found[known]
        ratio = _log_ratio(num_steps, batch) - _log_ratio(known or 0, batch)
        return Estimate(base + ratio, doubt + (_RATIO_DOUBT if num_steps or known else 0.0))

    def _timed(
        self, num_steps: int, batch: float, octave: float, found: dict[int, Estimate]
    ) -> Estimate:
        log = self._timings[num_steps].at(batch)
        doubt = min(_RATIO_DOUBT, _TIMED + _OTHER_CONTEXT * octave)
        others = found.keys() & self._timings.keys()
        if not others:
            return Estimate(log, doubt)
        near = min(others, key=lambda n: abs(n - num_steps))
        known = found[near]
        # What steps take beyond their timing is carried over; but it may be that mode's own.
        beyond = known.log - self._timings[near].at(batch)
        return Estimate(log + beyond, known.doubt + doubt + _OWN_SHARE * max(0.0, beyond))


def _log_ratio(num_steps: int, batch: float) -> float:
    """Log seconds against a plain step's, before anything is known."""
    if num_steps == 0:
        return 0.0
    return _LOG_RATIO * (0.7 + 0.1 * num_steps) + _RATIO_PER_OCTAVE * batch / _OCTAVE


def _octave(context: float) -> float:
    return math.log2(max(1.0, context / _SHORT_CONTEXT))
