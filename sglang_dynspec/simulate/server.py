"""Continuous batching under a load, with the real policy objects.

What is modelled: requests join the batch as soon as there is room and leave it when they have
their tokens; a decode step takes what the cost table says, give or take noise; every request of a
batch makes the batch's mean progress; under the overlap scheduler an outcome arrives one step late.
What is not: KV memory (nothing is retracted), prefill beyond what the cost table includes or a rate
that is given, and the draft state (acceptance is there at once after plain steps).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy.base import BatchView, Policy, StepOutcome
from sglang_dynspec.simulate.acceptance import Acceptance, Drafts
from sglang_dynspec.simulate.costs import StepCosts
from sglang_dynspec.simulate.load import Load, Request

_NOISE_POOL = 4096
_SUMS = ("seconds", "best_seconds", "tokens", "steps", "switches", "batch_steps", "context_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The server around the policy.

    Args:
        max_running_requests: the most requests in a batch.
        prefill_tokens_per_s: prompt tokens a second while no decode step runs; None: prefill takes
            no time of its own, for tables whose throughput includes it.
        noise: standard deviation of a step's seconds, as a share.
        outliers: share of steps that take five times as long.
        overlap: outcomes arrive one step late.
    """

    max_running_requests: int = 256
    prefill_tokens_per_s: float | None = None
    noise: float = 0.03
    outliers: float = 0.001
    overlap: bool = True


@dataclass(slots=True)
class Totals:
    """What has happened so far, or in one interval."""

    seconds: float = 0.0
    """Of decode steps."""
    best_seconds: float = 0.0
    """What the best mode of each step would have taken for the same expected tokens."""
    tokens: int = 0
    steps: int = 0
    switches: int = 0
    batch_steps: int = 0
    """Sum of batch sizes."""
    context_steps: float = 0.0
    """Sum over steps of the mean tokens of a request."""
    by_num_steps: dict[int, float] = field(default_factory=dict)
    """Seconds by draft steps."""

    def add(self, other: Totals) -> None:
        """Add what happened in another interval."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for num_steps, seconds in other.by_num_steps.items():
            self.by_num_steps[num_steps] = self.by_num_steps.get(num_steps, 0.0) + seconds

    @property
    def regret(self) -> float:
        """Share of the decode time that the best mode of each step would have saved."""
        # Rounding may make the best a little worse than itself.
        return max(0.0, 1.0 - self.best_seconds / self.seconds) if self.seconds else 0.0


@dataclass(slots=True)
class Interval(Totals):
    """Totals between two times of the simulation."""

    start: float = 0.0
    end: float = 0.0
    waiting: int = 0
    """Requests that waited at the end."""

    @property
    def tok_s(self) -> float:
        """Output tokens per second, idle times included."""
        return self.tokens / (self.end - self.start) if self.end > self.start else 0.0

    @property
    def batch_size(self) -> float:
        """Mean over the steps."""
        return self.batch_steps / self.steps if self.steps else 0.0

    @property
    def context(self) -> float:
        """Tokens of a request, mean over the steps."""
        return self.context_steps / self.steps if self.steps else 0.0

    @property
    def num_steps(self) -> float:
        """Draft steps, mean over the decode time."""
        spent = sum(n * seconds for n, seconds in self.by_num_steps.items())
        return spent / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Result(Totals):
    """A whole simulation."""

    duration: float = 0.0
    """Simulated seconds, idle ones included."""
    requests: int = 0
    """Requests answered."""
    times_per_token: list[float] = field(default_factory=list)
    """Of each answered request, seconds in the batch / output tokens."""
    intervals: list[Interval] = field(default_factory=list)
    """By time; those in which no step was run are left out."""

    @property
    def tok_s(self) -> float:
        """Output tokens per second, idle times included."""
        return self.tokens / self.duration if self.duration else 0.0

    @property
    def switches_per_minute(self) -> float:
        """Of simulated time."""
        return 60.0 * self.switches / self.duration if self.duration else 0.0

    def share(self, num_steps: int) -> float:
        """Return the share of the decode time in a mode, 0 to 1."""
        return self.by_num_steps.get(num_steps, 0.0) / self.seconds if self.seconds else 0.0

    def time_per_token(self, quantile: float | None = None) -> float | None:
        """Return the seconds per output token, over answered requests; None if there is none.

        Args:
            quantile: 0 to 1, by nearest rank; None: the mean.
        """
        times = self.times_per_token
        if not times:
            return None
        if quantile is None:
            return sum(times) / len(times)
        return sorted(times)[max(0, math.ceil(quantile * len(times)) - 1)]


class Simulation:
    """One server, one load, one policy.

    Args:
        policy: as the scheduler would call it; keeps what it learns.
        costs: seconds of a step; its ladder is the server's.
        load: what is asked.
        acceptance: accept length with the most draft steps, by time.
        machine: the server; at most 16384 running requests.
        seed: of noise and acceptance; equal seeds give equal results.
        intervals: into how many intervals to divide the load's duration; up to twice as many if
            answers take longer than that.
    """

    def __init__(
        self,
        policy: Policy,
        costs: StepCosts,
        load: Load,
        acceptance: Acceptance,
        *,
        machine: Machine | None = None,
        seed: int = 0,
        intervals: int = 120,
    ) -> None:
        self._policy = policy
        self._costs = costs
        self._load = load
        self._acceptance = acceptance
        self._machine = machine or Machine()
        self._ladder = costs.ladder
        self._drafts = Drafts(self._ladder[-1], seed)
        self._noise = _noise(self._machine, seed)
        self._length = max(load.duration, 1.0) / intervals
        self._most_intervals = 2 * intervals
        self._waiting: deque[Request] = deque()
        self._running: list[tuple[float, int, float, int, float]] = []
        self._progress = 0.0
        self._prompts = 0
        self._joined = 0.0
        self._now = 0.0
        self._steps = 0
        self._late: StepOutcome | None = None
        self.result = Result()

    def run(self, report: Callable[[float], None] | None = None) -> Result:
        """Simulate until the load has ended, and return what happened.

        Args:
            report: hears the simulated time now and then.

        Raises:
            PolicyError: the policy raises, or answers nonsense.
        """
        result, last = self.result, self._ladder[-1]
        interval = Interval(start=0.0)
        probability, until = 0.0, -1.0
        while self._now < self._load.duration or self._load.drains:
            self._admit()
            if not self._running:
                later = self._load.next_arrival(self._now)
                if later is None:
                    break
                self._now = max(later, self._now)
                continue
            if self._now >= until:
                probability = self._drafts.probability(self._acceptance.at(self._now))
                until = self._now + 1.0
            try:
                last = self._step(last, probability, interval)
            except Exception as error:
                raise PolicyError(
                    f"policy {self._policy!r} failed at {self._now:.1f} s of the simulation, "
                    f"{len(self._running)} requests: {type(error).__name__}: {error}"
                ) from error
            if self._now - interval.start >= self._length:
                self._close(interval)
                interval = Interval(start=self._now)
                if report is not None:
                    report(self._now)
        self._close(interval)
        result.duration = self._now
        return result

    def _admit(self) -> None:
        self._waiting.extend(
            self._load.arrivals(self._now, len(self._running) + len(self._waiting))
        )
        prompts = 0
        while self._waiting and len(self._running) < self._machine.max_running_requests:
            request = self._waiting.popleft()
            prompts += request.prompt_tokens
            entry = (
                self._progress + request.output_tokens,
                request.prompt_tokens,
                self._progress,
                request.output_tokens,
                self._now,
            )
            heapq.heappush(self._running, entry)
            self._prompts += request.prompt_tokens
            self._joined += self._progress
        if prompts and self._machine.prefill_tokens_per_s:
            self._now += prompts / self._machine.prefill_tokens_per_s

    def _step(self, last: int, probability: float, interval: Interval) -> int:
        batch_size = len(self._running)
        context = self._prompts + self._progress * batch_size - self._joined
        step = self._steps
        self._steps += 1
        view = BatchView(
            batch_size=batch_size,
            ladder=self._ladder,
            context_tokens=int(context),
            waiting=len(self._waiting),
            last_num_steps=last,
            step=step,
        )
        num_steps = view.on_ladder(self._policy.decide(view))
        if self._late is not None:
            self._policy.observe(self._late)
            self._late = None
        costs = self._costs.seconds(batch_size, context / batch_size)
        seconds = costs[num_steps] * next(self._noise)
        lengths, tokens = self._drafts.draw(probability, num_steps, batch_size)
        rates = {n: self._drafts.expected(probability, n) / cost for n, cost in costs.items()}
        interval.seconds += seconds
        interval.best_seconds += seconds * rates[num_steps] / max(rates.values())
        interval.tokens += tokens
        interval.steps += 1
        # What the server was started with is no choice of the policy's.
        interval.switches += num_steps != last and step > 0
        interval.batch_steps += batch_size
        interval.context_steps += context / batch_size
        by_num_steps = interval.by_num_steps
        by_num_steps[num_steps] = by_num_steps.get(num_steps, 0.0) + seconds
        self._late = StepOutcome(
            step=step,
            num_steps=num_steps,
            batch_size=batch_size,
            accept_lens=lengths,
            seconds=seconds,
        )
        if not self._machine.overlap:
            self._policy.observe(self._late)
            self._late = None
        self._now += seconds
        self._advance(tokens / batch_size)
        return num_steps

    def _advance(self, gained: float) -> None:
        self._progress += gained
        while self._running and self._running[0][0] <= self._progress:
            _, prompt, joined, output, since = heapq.heappop(self._running)
            self._prompts -= prompt
            self._joined -= joined
            self.result.requests += 1
            self.result.times_per_token.append((self._now - since) / output)

    def _close(self, interval: Interval) -> None:
        interval.end = self._now
        interval.waiting = len(self._waiting)
        if interval.steps:
            self.result.intervals.append(interval)
            self.result.add(interval)
        if len(self.result.intervals) >= self._most_intervals:
            self._length *= 2
            self.result.intervals = _paired(self.result.intervals)


def _paired(intervals: list[Interval]) -> list[Interval]:
    """Make one interval of every two."""
    paired = intervals[::2]
    for first, second in zip(paired, intervals[1::2], strict=False):
        first.add(second)
        first.end, first.waiting = second.end, second.waiting
    return paired


def _noise(machine: Machine, seed: int) -> Iterator[float]:
    generator = random.Random(seed + 1)
    pool = [
        max(0.5, generator.gauss(1.0, machine.noise))
        * (5.0 if generator.random() < machine.outliers else 1.0)
        for _ in range(_NOISE_POOL)
    ]
    while True:
        yield from pool
