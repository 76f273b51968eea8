"""Policies that only tests need."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

from sglang_dynspec import BatchView, Policy, StepOutcome


class Alternate(Policy):
    """Plain, speculative, plain, ..."""

    def decide(self, batch: BatchView) -> int:
        return 0 if batch.step % 2 == 0 else batch.max_steps


class Toggle(Policy):
    """A seeded draw from the ladder before every step, and a coin before every prefill."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def decide(self, batch: BatchView) -> int:
        return self._random.choice(batch.ladder)

    def wants_draft_prefill(self, batch: BatchView) -> bool:
        return self._random.choice((False, True))


class PlainFirst(Policy):
    """Plain for so many steps from its first on, then always speculative."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    @property
    def plain(self) -> bool:
        """Whether the next step is."""
        return self._left > 0

    def decide(self, batch: BatchView) -> int:
        self._left -= 1
        return 0 if self._left >= 0 else batch.max_steps


class PlainBetween(Policy):
    """Speculative for some steps, plain for some, then always speculative."""

    def __init__(self, before: int, plain: int) -> None:
        super().__init__()
        self._plain = range(before, before + plain)
        self._step = -1

    def decide(self, batch: BatchView) -> int:
        self._step += 1
        return 0 if self._step in self._plain else batch.max_steps


class Recorder(Policy):
    """Passes on to another policy and keeps what went in and out."""

    def __init__(self, inner: Policy) -> None:
        super().__init__()
        self.inner = inner
        self.views: list[BatchView] = []
        self.outcomes: list[StepOutcome] = []
        self.prefills: list[BatchView] = []

    def decide(self, batch: BatchView) -> int:
        self.views.append(batch)
        return self.inner.decide(batch)

    def wants_draft_prefill(self, batch: BatchView) -> bool:
        self.prefills.append(batch)
        return self.inner.wants_draft_prefill(batch)

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)
        self.inner.observe(outcome)


class FailsAt(Policy):
    """Toggles, and calls something else at one step."""

    def __init__(self, step: int, answer: Callable[[], int]) -> None:
        super().__init__()
        self._at, self._answer = step, answer
        self._calls = 0

    def decide(self, batch: BatchView) -> int:
        self._calls += 1
        if self._calls == self._at:
            return self._answer()
        return 0 if self._calls % 2 else batch.max_steps


class Foresees(Policy):
    """Plain for some steps, speculative for as many, and so on; says what it expects of each."""

    EXPECTED: ClassVar[dict[str, float]] = {"0": 111.0, "3": 333.0}

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps

    def decide(self, batch: BatchView) -> int:
        return batch.max_steps if batch.step // self._steps % 2 else 0

    def explain(self) -> dict[str, Any]:
        return {"tokens_per_second": self.EXPECTED}
