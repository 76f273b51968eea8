"""What to compare a policy with: SGLang's own rule, and the best threshold in hindsight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_dynspec.policy import Always, BatchSize, BatchView, Never, Policy, StepOutcome
from sglang_dynspec.simulate.acceptance import Drafts
from sglang_dynspec.simulate.load import Shape
from sglang_dynspec.simulate.scenario import Scenario

__all__ = ["Always", "BestThreshold", "Never", "SglangAdaptive", "best_threshold"]

_MOMENTS = 600
_NEAR = 0.01
"""A threshold is tried if its predicted regret is within this of the best one's."""


# --- SGLang's adaptive mode ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Range:
    """SGLang's defaults for batches of a size and above."""

    candidates: tuple[int, ...]
    down: float = 0.0
    """Added to the mean below which fewer steps are run."""


_RANGES = {
    1: _Range((1, 3, 5, 7), down=-0.25),
    8: _Range((0, 1, 3)),
    32: _Range((0, 1)),
    64: _Range((0,)),
}
_WEIGHT = 0.2
"""Of the newest step in the moving mean."""
_WARM_UP, _EVERY = 10, 5
"""Steps before the first change, and between two looks."""
_ALIKE = 1.5
"""A candidate is taken to a number of draft steps on the ladder within this factor."""


class SglangAdaptive(Policy):
    """A model of SGLang 0.5.23's ``--speculative-adaptive`` with its default configuration.

    Modelled: four ranges of the batch size, from 1, 8, 32 and 64 requests up, which may run 1, 3, 5
    or 7; 0, 1 or 3; 0 or 1; and 0 draft steps. Each keeps a moving mean of the accepted drafts per
    request (weight 0.2), and looks at it every 5 of its steps after its first 10. It goes down to
    the next candidate while the mean is at most half a draft below that (at most 0.5 for 0 steps;
    the range from 1 up asks for 0.25 less), else up while the mean is more than the candidate less
    a half. From 0 steps it goes up at the next look, whatever the load. Outcomes count for the
    range of their batch, also those of steps run before a change.

    The candidates are taken to the ladder: to the nearest draft steps on it, or left out if these
    are more than 1.5 times off. On a ladder of 0 and 3 that leaves 3; 0 or 3; 0; and 0.

    Not modelled: SGLang's 0 steps go through its speculative path and cost more than a plain
    decode. Here they cost the same, and the change of the mode costs nothing, which flatters it.
    Nor is the batch rounded up to the next size with a CUDA graph before its range is looked up.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ranges: dict[int, _Adapting] = {}

    def decide(self, batch: BatchView) -> int:
        if not self._ranges:
            self._ranges = {
                start: _Adapting(
                    _on_ladder(given.candidates, batch.ladder), given.down, batch.max_steps
                )
                for start, given in _RANGES.items()
            }
        return self._range(batch.batch_size).num_steps

    def observe(self, outcome: StepOutcome) -> None:
        if self._ranges:
            self._range(outcome.batch_size).add(outcome.accept_length - 1.0)

    def _range(self, batch_size: int) -> _Adapting:
        return self._ranges[max(start for start in self._ranges if start <= batch_size)]


class _Adapting:
    """The draft steps of one range of batch sizes.

    Args:
        candidates: draft steps, ascending.
        down: see :class:`_Range`.
        first: ``--speculative-num-steps``, where it begins if that is a candidate, else in the
            middle.
    """

    def __init__(self, candidates: tuple[int, ...], down: float, first: int) -> None:
        self._candidates = candidates
        self._down = down
        known = first in candidates
        self._at = candidates.index(first) if known else len(candidates) // 2
        self._mean = self.num_steps - 1.0
        self._steps = 0

    @property
    def num_steps(self) -> int:
        return self._candidates[self._at]

    def add(self, accepted: float) -> None:
        """Count a step with its mean of accepted drafts per request."""
        if self.num_steps > 0:
            self._mean += _WEIGHT * (accepted - self._mean)
        self._steps += 1
        counted = self._steps - _WARM_UP
        if counted > 0 and counted % _EVERY == 0:
            self._look()

    def _look(self) -> None:
        if self.num_steps == 0:
            self._at = min(1, len(self._candidates) - 1)
            if self._mean < 0:
                self._mean = self.num_steps - 1.0
            return
        before = self._at
        while self._at > 0 and self._mean <= self._fall(self._candidates[self._at - 1]):
            self._at -= 1
        if self._at < before:
            return
        while self._at + 1 < len(self._candidates) and self._mean > self.num_steps - 0.5:
            self._at += 1

    def _fall(self, below: int) -> float:
        return (below - 0.5 if below else 0.5) + self._down


def _on_ladder(candidates: tuple[int, ...], ladder: tuple[int, ...]) -> tuple[int, ...]:
    found = {0} if 0 in candidates else set()
    drafting = [n for n in ladder if n > 0]
    for candidate in candidates:
        if candidate > 0 and drafting:
            nearest = min(drafting, key=lambda n: abs(math.log(n / candidate)))
            if max(nearest / candidate, candidate / nearest) <= _ALIKE:
                found.add(nearest)
    return tuple(sorted(found)) or (ladder[-1],)


# --- the best threshold -------------------------------------------------------------------------


class BestThreshold(BatchSize):
    """The ``batch_size(off_at=N)`` with the least regret under one scenario, see
    :func:`best_threshold`. An oracle: no server knows load, costs and acceptance beforehand."""


def best_threshold(scenario: Scenario, tries: int = 3) -> BestThreshold:
    """Find the threshold that fits a scenario best, in hindsight.

    For every N from 1 (never) to one above the largest batch (always) the regret is predicted from
    the true costs and acceptance at 600 moments. The best ones are then simulated; the least regret
    wins. For a trace, the batch sizes of these moments are those of a server that never speculates.

    Args:
        scenario: costs, load and acceptance.
        tries: the most simulations; 1 trusts the prediction.

    Returns:
        A new policy.
    """
    candidates = list(_candidates(scenario, tries))
    if len(candidates) == 1:
        return BestThreshold(candidates[0])
    regrets = {n: scenario.simulate(BatchSize(n)).regret for n in candidates}
    return BestThreshold(min(candidates, key=lambda n: regrets[n]))


@dataclass(frozen=True, slots=True)
class _Moment:
    batch_size: int
    weight: float
    plain: float
    """Tokens per second of a plain step, as a share of the best mode's."""
    speculative: float


def _candidates(scenario: Scenario, tries: int) -> Iterator[int]:
    """Yield the most promising thresholds that differ in their predicted regret."""
    moments = list(_moments(scenario))
    top = max((moment.batch_size for moment in moments), default=1)
    context = scenario.costs.contexts[0]
    # Of many thresholds that are as good, the one nearest to where the modes are equal.
    middle = math.log(scenario.costs.crossover(context) or top + 1)
    ranked = sorted(
        (round(_predicted(moments, n), 6), abs(math.log(n) - middle), n) for n in range(1, top + 2)
    )
    least, seen = ranked[0][0], set[float]()
    for regret, _, n in ranked:
        if regret > least + _NEAR or len(seen) == tries:
            return
        if regret not in seen:
            seen.add(regret)
            yield n


def _moments(scenario: Scenario) -> Iterator[_Moment]:
    costs, acceptance = scenario.costs, scenario.acceptance
    drafts = Drafts(costs.num_steps, 0)
    for time, batch_size, context, weight in _batches(scenario):
        seconds = costs.seconds(batch_size, context)
        gained = drafts.expected(drafts.probability(acceptance.at(time)), costs.num_steps)
        plain, speculative = 1 / seconds[0], gained / seconds[costs.num_steps]
        best = max(plain, speculative)
        yield _Moment(batch_size, weight, plain / best, speculative / best)


def _batches(scenario: Scenario) -> Iterator[tuple[float, int, float, float]]:
    """Yield time, batch size, mean context and weight."""
    load = scenario.load
    if isinstance(load, Shape):
        context = load.prompt_tokens + load.output_tokens / 2
        for i in range(_MOMENTS):
            time = (i + 0.5) * load.duration / _MOMENTS
            batch_size = min(load.level(time), scenario.machine.max_running_requests)
            if batch_size > 0:
                yield time, batch_size, context, 1.0
        return
    result = scenario.simulate(Never(), intervals=_MOMENTS)
    for each in result.intervals:
        middle = (each.start + each.end) / 2
        yield middle, max(1, round(each.batch_size)), each.context, each.seconds


def _predicted(moments: list[_Moment], off_at: int) -> float:
    """Return the regret of a threshold, as :class:`BatchSize` would follow it."""
    on_at = off_at * 3 // 4
    speculating, gained, total = True, 0.0, 0.0
    for moment in moments:
        if not on_at < moment.batch_size < off_at:
            speculating = moment.batch_size < off_at
        gained += moment.weight * (moment.speculative if speculating else moment.plain)
        total += moment.weight
    return 1.0 - gained / total if total else 0.0
