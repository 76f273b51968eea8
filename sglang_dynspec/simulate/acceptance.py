"""How many draft tokens the target accepts, by time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

MOST_REQUESTS = _POOL = 1 << 14
"""In a batch."""
_GRID = 200
"""Acceptance probabilities are rounded to 1 / _GRID, to draw each distribution once."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Accept length of a step with the most draft steps, swinging between two values.

    Args:
        low: tokens a request gains in such a step (>= 1), bonus token included.
        high: the other end; equal to ``low`` for a fixed one.
        period: seconds from low to high and back.
    """

    low: float
    high: float
    period: float = 600.0

    def at(self, now: float) -> float:
        """Return the accept length at a time in seconds."""
        if self.low == self.high:
            return self.low
        swing = 0.5 - 0.5 * math.cos(2 * math.pi * now / self.period)
        return self.low + (self.high - self.low) * swing

    def in_words(self) -> str:
        """Return it for a report."""
        if self.low == self.high:
            return f"{self.low:g}"
        return f"{self.low:g} to {self.high:g} and back in {self.period:g} s"


class Drafts:
    """Draws accept lengths: each draft token is accepted with one probability, given that all
    before it are, which is the usual model (Leviathan et al., arXiv 2211.17192, section 3.1).

    Args:
        most: draft steps that the accept lengths of :class:`Acceptance` are for.
        seed: of the draws.
    """

    def __init__(self, most: int, seed: int) -> None:
        self._most = most
        self._random = random.Random(seed)
        self._pools: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._means: dict[tuple[float, int], float] = {}
        self._at = 0

    def probability(self, accept_length: float) -> float:
        """Return the probability that leads to an accept length with the most draft steps."""
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            if _expected(middle, self._most) < accept_length:
                low = middle
            else:
                high = middle
        return round(high * _GRID) / _GRID

    def expected(self, probability: float, num_steps: int) -> float:
        """Return the mean accept length of a step."""
        key = (probability, num_steps)
        if key not in self._means:
            self._means[key] = _expected(probability, num_steps)
        return self._means[key]

    def draw(
        self, probability: float, num_steps: int, batch_size: int
    ) -> tuple[tuple[int, ...], int]:
        """Return the tokens that each request gains, and their sum."""
        if num_steps == 0:
            return (1,) * batch_size, batch_size
        lengths, sums = self._pool(probability, num_steps)
        start = self._at
        if start + batch_size > _POOL:
            start = 0
        stop = self._at = start + batch_size
        return lengths[start:stop], sums[stop] - sums[start]

    def _pool(self, probability: float, num_steps: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        key = (round(probability * _GRID), num_steps)
        found = self._pools.get(key)
        if found is None:
            lengths, sums = [], [0]
            for _ in range(_POOL):
                gained = 1
                while gained <= num_steps and self._random.random() < probability:
                    gained += 1
                lengths.append(gained)
                sums.append(sums[-1] + gained)
            found = self._pools[key] = (tuple(lengths), tuple(sums))
        return found


def _expected(probability: float, num_steps: int) -> float:
    return sum(probability**i for i in range(num_steps + 1))
