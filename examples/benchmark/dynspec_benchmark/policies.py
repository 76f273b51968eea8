"""A policy for stress: named ``dynspec_benchmark.policies:RandomToggle(seed=0, mean_steps=8)``."""

from __future__ import annotations

import random

from sglang_dynspec import BatchView, Policy


class RandomToggle(Policy):
    """Changes between plain decode and speculation after a random number of steps.

    The draws are of a generator of its own, one per decision, so equal seeds give equal answers on
    all ranks.

    Args:
        seed: another seed gives other moments.
        mean_steps: steps between two changes, on average (>= 1).
    """

    def __init__(self, seed: int = 0, mean_steps: float = 8) -> None:
        super().__init__()
        if mean_steps < 1:
            raise ValueError(f"mean_steps is {mean_steps}; it must be at least 1")
        self._draw = random.Random(seed)
        self._change = 1 / mean_steps
        self._plain = False

    def decide(self, batch: BatchView) -> int:
        """Mostly what it was in the last step."""
        if self._draw.random() < self._change:
            self._plain = not self._plain
        return 0 if self._plain else batch.max_steps
