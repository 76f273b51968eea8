"""How many draft tokens are accepted, by their position, learned from steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_dynspec.policy._cost_model import Estimate
from sglang_dynspec.policy._lengths import within

_PRIOR = 0.6
_PRIOR_WEIGHT = 2.0
"""Before anything is known: of each position, as if 2 draft tokens had been seen."""
_MOST_STEPS = 64
"""Positions that are told apart."""
_MOST_DOUBT = 0.5
"""What age alone adds to the doubt of a log accept length, at most."""
_DRIFT, _LEAST_DRIFT = 0.05, 0.03
"""Doubt in the log accept length after one second of age; grows with its square root. At first, and
at least."""


class Acceptance:
    """Probabilities that a draft token is accepted, given that those before it are.

    For each position the accepted and the tested drafts are counted, the older ones counting less.
    The expected accept length of n draft steps is ``1 + p1 + p1 p2 + ... + p1 ... pn`` (Leviathan
    et al., arXiv 2211.17192, section 3.1, without its assumption that all p are equal; SmartSpec,
    arXiv 2406.14066, uses one rate for all positions).

    While nothing is drafted nothing is learned. How doubtful old knowledge is follows from how much
    earlier returns have found changed: a random walk whose step is estimated as it goes.

    Args:
        memory: draft tokens that count.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._tested = [_PRIOR_WEIGHT]
        self._accepted = [_PRIOR_WEIGHT * _PRIOR]
        self._seen = 0
        self._last = 0.0
        """When a draft was last seen."""
        self._drift = _DRIFT
        self._before: tuple[Estimate, float] | None = None
        """What was believed before a pause, and how long that took."""

    @property
    def seen(self) -> int:
        """Draft tokens seen so far."""
        return self._seen

    def add(self, num_steps: int, accept_lens: Sequence[int], now: float) -> None:
        """Learn from a speculative step.

        Args:
            num_steps: draft steps (>= 1).
            accept_lens: tokens that each request gained, bonus token included.
            now: seconds of decoding so far.
        """
        num_steps = min(num_steps, _MOST_STEPS)
        counts = [accept_lens.count(length) for length in range(1, num_steps + 2)]
        if sum(counts) != len(accept_lens):
            accept_lens = within(accept_lens, num_steps)
            counts = [accept_lens.count(length) for length in range(1, num_steps + 2)]
        while len(self._tested) < num_steps:
            # A position not seen yet is taken to be as the one before it, with little weight.
            self._tested.append(_PRIOR_WEIGHT)
            self._accepted.append(_PRIOR_WEIGHT * self._accepted[-1] / self._tested[-2])
        drafts = num_steps * len(accept_lens)
        self._seen += drafts
        self._last = now
        kept = self._memory / (self._memory + drafts)
        tested = len(accept_lens)
        for i in range(num_steps):
            accepted = tested - counts[i]
            self._tested[i] = self._tested[i] * kept + tested
            self._accepted[i] = self._accepted[i] * kept + accepted
            tested = accepted

    def pause(self, num_steps: int, now: float) -> None:
        """Note that drafts are looked at again after a time without any."""
        age = now - self._last
        if not self._seen or age < 1.0:
            return
        before = self._fresh(num_steps)
        self._before = (before, age)
        # What is old counts as much as its doubt by now allows.
        keep = (before.doubt / self.estimate(num_steps, now).doubt) ** 2
        for i in range(len(self._tested)):
            self._tested[i] *= keep
            self._accepted[i] *= keep
        self._last = now

    def resumed(self, num_steps: int) -> bool:
        """Compare what drafts after a pause have shown with what was believed before.

        Returns:
            Whether acceptance has changed meanwhile, as far as can be told.
        """
        if self._before is None:
            return False
        before, age = self._before
        self._before = None
        now = self._fresh(num_steps)
        change = abs(now.log - before.log)
        noise = math.hypot(now.doubt, before.doubt)
        moved = math.sqrt(max(0.0, change**2 - noise**2) / age)
        self._drift = max(_LEAST_DRIFT, 0.7 * self._drift + 0.3 * moved, min(moved, 0.1))
        return change > 3 * noise

    def estimate(self, num_steps: int, now: float) -> Estimate:
        """Return the log of the expected accept length of a step.

        Args:
            num_steps: draft steps; 0 gives 0 without doubt.
            now: seconds of decoding so far.
        """
        if num_steps == 0:
            return Estimate(0.0, 0.0)
        fresh = self._fresh(num_steps)
        age = min(_MOST_DOUBT, self._drift * math.sqrt(max(0.0, now - self._last)))
        return Estimate(fresh.log, math.hypot(fresh.doubt, age))

    def lengths(self, num_steps: int) -> list[float]:
        """Return the probabilities of accept lengths 1, 2, ... num_steps + 1."""
        alive, shares = 1.0, []
        for p in self._probabilities(num_steps):
            shares.append(alive * (1 - p))
            alive *= p
        return [*shares, alive]

    def _probabilities(self, num_steps: int) -> list[float]:
        known = [a / t for a, t in zip(self._accepted, self._tested, strict=True)]
        return [known[min(i, len(known) - 1)] for i in range(num_steps)]

    def _fresh(self, num_steps: int) -> Estimate:
        """The expected accept length as of the last draft; doubt by the delta method."""
        p = self._probabilities(num_steps)
        expected, variance = 1.0, 0.0
        # From the last position: E = 1 + p1 (1 + p2 (...)), and the derivative by p_i is the
        # bracket after it times the probability to get there.
        alive = math.prod(p)
        for i in range(num_steps - 1, -1, -1):
            tested = self._tested[min(i, len(self._tested) - 1)]
            alive = alive / p[i] if p[i] > 0 else math.prod(p[:i])
            variance += (alive * expected) ** 2 * p[i] * (1 - p[i]) / (tested + 1)
            expected = 1.0 + p[i] * expected
        return Estimate(math.log(expected), math.sqrt(variance) / expected)
