"""Speculation by measured cost and acceptance: the most tokens per second, without a threshold."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy._acceptance import Acceptance
from sglang_dynspec.policy._checks import share, shown
from sglang_dynspec.policy._cost_model import CostModel, Estimate
from sglang_dynspec.policy._lengths import within
from sglang_dynspec.policy.base import BatchView, Policy, StepOutcome, StepTiming

if TYPE_CHECKING:
    from typing import TypeGuard

_MEMORY = 4096
"""Draft tokens that the acceptance looks back on."""
_DWELL = 16
"""Steps between two changes of the mode under one load, trials left out."""
_PAYS_BACK = 64
"""Steps within which a change of the mode must have gained what it has cost."""
_CHANGES = 5
"""Changes of the mode that are remembered, in what one costs."""
_AGAIN = 8
"""Decisions for which an evaluation holds while the batch hardly changes."""
_BELIEF = 1.5
"""How many standard deviations a mode may be better than believed, to be worth a trial."""
_UNSURE = 0.1
"""Doubt in log seconds above which the cost of a mode is hardly known."""
_NOISE = 0.05
"""Doubt that every cost has for some steps, and that is no reason for a trial."""
_SURE = 0.02
"""Doubt in log tokens per second below which a trial would tell nothing new."""
_FREE = 32
"""Steps of trials that are not charged: at the start nothing is known."""
_FIRST_INTERVAL, _LONGEST_INTERVAL = 5.0, 160.0
"""Seconds of decoding between trials of a mode, doubled by each that changes nothing."""
_LOOK = 4
"""Steps of a trial between two looks at what it has shown."""
_DRAFTS = 192
"""Draft tokens that a trial looks at, if nothing is clear before."""
_SHORTEST_TRIAL, _LONGEST_TRIAL = 4, 64
_LASTING = 30.0
"""Seconds of decoding after which a change of the mode has proved right."""
_BURST = 1.3
"""A batch that has grown so much within _BURST_STEPS grows quickly; one of another size than a mode
was chosen for, by so much, is another load."""
_BURST_STEPS = 8
_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 1e6
"""Between these lie the seconds of any step."""
_FORGOTTEN = 64
"""Decisions without an outcome after which they are taken not to have been run."""


@dataclass(slots=True)
class _Mode:
    """When a mode that is not run may be tried."""

    next_trial: float = 0.0
    """Seconds of decoding before which it is not, if its cost is known."""
    last_trial: float = -_FIRST_INTERVAL
    interval: float = _FIRST_INTERVAL


@dataclass(slots=True)
class _Trial:
    """A few steps of another mode, to learn from."""

    num_steps: int
    steps: int
    """Decisions to ask for it, if nothing is clear before."""
    left: int
    """Those still to come."""
    paused: bool
    """Whether drafts are looked at again after a time without."""


class Goodput(Policy):
    """Run the draft steps with the most expected tokens per second, as measured here and now.

    Before each step the value of every mode ``n`` on the ladder is ``batch * E[n] / T[n]``: the
    tokens that a step with n draft steps gains, from the acceptance of each draft position, over
    the seconds it takes, from a table by mode, batch size and context that the steps fill.
    SmartSpec and TurboSpec (arXiv 2406.14066) call it goodput; Cascade (arXiv 2506.20675) calls
    the same ratio against a plain step utility, and turns speculation off below 1. Ours differs:

    - n = 0 is a mode among others, with no draft and no verification.
    - No profile is needed beforehand: the CUDA graphs, where there are any, are timed at start, and
      steps tell the rest. What is not known is carried over from batch sizes, contexts and modes
      that are, with a doubt that grows with the distance.
    - A mode that is not run is tried only where it could be better by more than ``margin`` within
      1.5 standard deviations of that doubt (an upper confidence bound, as in BanditSpec, arXiv
      2505.15141); where it cannot be, it never is. A trial ends as soon as it is clear. Trials get
      rarer each time nothing comes of them (5 to 160 seconds of decoding), are not begun while the
      batch grows quickly, and take at most the share ``explore`` of the decode time, the first 32
      steps of trials not counted.
    - A mode is left only for one that is better by ``margin``, as figures are noisy, and by what a
      change costs over the next 64 steps: the first step after one is timed by itself. Under one
      load it is left at most every 16 steps.

    A trial finds the draft's KV as the plain steps left it: with ``draft_state="skip"`` it sees
    less accepted than lasting speculation would, so that speculation comes back late. What cold
    requests accept (``BatchView.cold``, draft state ``catch_up``) is left out of the acceptance.

    Args:
        objective: ``"throughput"`` (tokens per second), or ``"latency"``: the least mean over
            requests of the step's seconds per token gained, ``T[n] * mean(1 / accept length)``,
            which speculates less where acceptance is uneven.
        explore: share of decode time for trials, 0 to 0.5.
        margin: by how much a mode must be better, 0 to 0.5.

    Raises:
        PolicyError: a value is out of its range.
    """

    deterministic = False
    wants_timings = True

    def __init__(
        self,
        objective: Literal["throughput", "latency"] = "throughput",
        *,
        explore: float = 0.01,
        margin: float = 0.02,
    ) -> None:
        super().__init__()
        if objective not in ("throughput", "latency"):
            raise PolicyError(
                f"{shown(self, 'objective', objective)}: objective must be 'throughput' or "
                "'latency'"
            )
        self.objective = objective
        self.explore = _at_most_half(self, "explore", explore)
        self.margin = _at_most_half(self, "margin", margin)
        self._costs = CostModel()
        self._acceptance = Acceptance(_MEMORY)
        self._modes: dict[int, _Mode] = {}
        self._held: int | None = None
        """The mode in use, trials apart."""
        self._held_for = 0
        self._held_since = 0.0
        self._held_at = 1
        """Batch size for which it was chosen."""
        self._trial: _Trial | None = None
        self._time = 0.0
        """Seconds of decoding so far."""
        self._tried = 0.0
        """Of these, in trials."""
        self._free = _FREE
        self._change_seconds = 0.0
        """What the first step after a change takes more than another."""
        self._changes = 0
        self._batches: deque[int] = deque(maxlen=_BURST_STEPS)
        self._asked: dict[int, tuple[bool, float]] = {}
        """Of decisions whose outcome is to come: whether in a trial, and the mean context."""
        self._last: StepOutcome | None = None
        self._from_trial = False
        """Whether that was of a trial."""
        self._decisions = 0
        # The last evaluation: for which batch and at which decision, and what it found.
        self._batch_size = 1
        self._evaluated_at = -_AGAIN
        self._seconds: dict[int, Estimate] = {}
        self._values: dict[int, Estimate] = {}

    # --- before a step ----------------------------------------------------------------------

    def decide(self, batch: BatchView) -> int:
        size = _size(batch.batch_size)
        self._batches.append(size)
        self._decisions += 1
        if self._held not in batch.ladder:
            self._begin(batch)
        if self._trial is not None and not self._goes_on(self._trial, batch):
            self._end_trial(self._trial, batch)
        if self._trial is None:
            self._held_for += 1
            if self._due():
                self._evaluate(batch)
                self._move()
        answer = self._held
        if self._trial is not None:
            self._trial.left -= 1
            answer = self._trial.num_steps
        assert answer is not None
        context = _tokens(batch.context_tokens) / size
        self._asked[batch.step] = (self._trial is not None, context)
        return answer

    def wants_draft_prefill(self, batch: BatchView) -> bool:
        # A trial may come at any time, unless drafts could not pay however many are accepted.
        if self._held is None:
            return True
        return self._held > 0 or any(self._hope(n) > self.margin for n in self._values if n > 0)

    def _begin(self, batch: BatchView) -> None:
        """Choose the mode of the first step, by what is usual."""
        self._evaluate(batch)
        self._held = self._best()
        self._held_at = self._batch_size

    def _due(self) -> bool:
        moved = abs(self._batches[-1] - self._batch_size) * 16 > self._batch_size
        return moved or self._decisions - self._evaluated_at >= _AGAIN

    def _evaluate(self, batch: BatchView) -> None:
        self._batch_size = _size(batch.batch_size)
        self._evaluated_at = self._decisions
        context = _tokens(batch.context_tokens) / self._batch_size
        self._seconds = self._costs.estimates(batch.ladder, self._batch_size, context)
        self._values = {n: self._value(n, seconds) for n, seconds in self._seconds.items()}

    def _value(self, num_steps: int, seconds: Estimate) -> Estimate:
        """Log of the tokens per second of each request."""
        gain = self._acceptance.estimate(num_steps, self._time)
        log = gain.log
        if self.objective == "latency":
            lengths = self._acceptance.lengths(num_steps)
            log = -math.log(sum(p / (i + 1) for i, p in enumerate(lengths)))
        return Estimate(log - seconds.log, math.hypot(gain.doubt, seconds.doubt))

    def _best(self) -> int:
        return max(self._values, key=lambda n: self._values[n].log)

    def _lead(self, num_steps: int) -> float:
        """By how much a mode is better than what is held, in log tokens per second."""
        assert self._held is not None
        return self._values[num_steps].log - self._values[self._held].log

    def _doubt(self, num_steps: int) -> float:
        assert self._held is not None
        return math.hypot(self._values[num_steps].doubt, self._values[self._held].doubt)

    # --- changes of the mode ----------------------------------------------------------------

    def _move(self) -> None:
        """Change the mode, or begin a trial of one."""
        if self._held_for < _DWELL and not self._other_load():
            return
        best = self._best()
        # A guess must promise more than what is known.
        if self._lead(best) > self.margin + self._change_log() + 0.5 * self._seconds[best].doubt:
            self._hold(best)
        elif not self._grows():
            self._consider_trial()

    def _change_log(self) -> float:
        """What a change costs, in log tokens per second over the steps that are to pay it back."""
        assert self._held is not None
        change = max(0.0, self._change_seconds)
        return change and change / (_PAYS_BACK * _exp(self._seconds[self._held].log))

    def _other_load(self) -> bool:
        return not 1 / _BURST < self._batch_size / self._held_at < _BURST

    def _grows(self) -> bool:
        return self._batches[-1] > _BURST * self._batches[0] + 1

    def _hold(self, num_steps: int) -> None:
        if self._held is not None:
            # A stay that did not last counts as a trial that changed nothing.
            lasted = self._time - self._held_since >= _LASTING
            self._postpone(self._mode(self._held), afresh=lasted)
        self._held = num_steps
        self._held_for = 0
        self._held_since = self._time
        self._held_at = self._batch_size

    def _mode(self, num_steps: int) -> _Mode:
        return self._modes.setdefault(num_steps, _Mode())

    def _postpone(self, mode: _Mode, *, afresh: bool) -> None:
        if afresh:
            mode.interval = _FIRST_INTERVAL
        mode.next_trial = self._time + mode.interval
        mode.interval = min(_LONGEST_INTERVAL, 2 * mode.interval)

    # --- trials -----------------------------------------------------------------------------

    def _hope(self, num_steps: int) -> float:
        """By how much a mode may be better than what is held, within what can be believed."""
        assert self._held is not None
        doubt = self._values[num_steps].doubt
        if num_steps == self._held or doubt <= _SURE:
            return -math.inf
        # What is held may be slower than believed, too, where it is hardly known.
        unknown = max(0.0, self._seconds[self._held].doubt - _NOISE)
        return self._lead(num_steps) + _BELIEF * (doubt + unknown)

    def _consider_trial(self) -> None:
        n = max(self._values, key=self._hope)
        if self._hope(n) <= self.margin:
            return
        mode = self._mode(n)
        unknown = self._seconds[n].doubt > _UNSURE
        if self._time < (mode.last_trial + _FIRST_INTERVAL if unknown else mode.next_trial):
            return
        steps = self._trial_steps(n)
        if not self._affordable(n, steps):
            return
        mode.last_trial = self._time
        paused = n > 0 and self._held == 0
        if paused:
            self._acceptance.pause(n, self._time)
        self._trial = _Trial(n, steps, steps, paused)

    def _trial_steps(self, num_steps: int) -> int:
        """Enough to tell cost and acceptance, and no more."""
        if num_steps == 0:
            return _SHORTEST_TRIAL
        drafts = num_steps * self._batch_size
        return min(_LONGEST_TRIAL, max(_SHORTEST_TRIAL, math.ceil(_DRAFTS / drafts)))

    def _affordable(self, num_steps: int, steps: int) -> bool:
        if self._free >= steps:
            self._free -= steps
            return True
        cost = steps * _exp(self._seconds[num_steps].log)
        return self._tried + cost <= self.explore * self._time

    def _goes_on(self, trial: _Trial, batch: BatchView) -> bool:
        if trial.left <= 0 or self._grows() or trial.num_steps not in batch.ladder:
            return False
        if trial.left == trial.steps or trial.left % _LOOK:
            return True
        self._evaluate(batch)
        n = trial.num_steps
        return abs(self._lead(n)) < self.margin + 2 * self._doubt(n)

    def _end_trial(self, trial: _Trial, batch: BatchView) -> None:
        self._trial = None
        n, held = trial.num_steps, self._held
        changed = trial.paused and self._acceptance.resumed(n)
        self._evaluate(batch)
        self._held_for = _DWELL
        if n in self._values and self._lead(n) > self.margin + 0.5 * self._doubt(n):
            self._hold(n)
        if self._held == held:
            mode = self._mode(n)
            if changed:
                mode.interval = max(_FIRST_INTERVAL, mode.interval / 4)
            self._postpone(mode, afresh=False)

    # --- after a step -----------------------------------------------------------------------

    def observe_timings(self, timings: Sequence[StepTiming]) -> None:
        for timing in timings:
            self._costs.add_timing(timing.num_steps, _size(timing.batch_size), timing.seconds)

    def observe(self, outcome: StepOutcome) -> None:
        in_trial, context = self._asked.pop(outcome.step, (False, 0.0))
        if len(self._asked) > _FORGOTTEN:
            self._asked.clear()
        if outcome.num_steps not in self._values:
            return  # none of ours
        last, self._last = self._last, outcome
        came_from_trial, self._from_trial = self._from_trial, in_trial
        # What a request with a hole in its draft's KV accepts says nothing of the others, and will
        # not last.
        lengths = outcome.usual_accept_lens
        if outcome.num_steps > 0 and lengths:
            self._acceptance.add(outcome.num_steps, lengths, self._time)
        seconds = outcome.seconds
        if not _is_step_time(seconds):
            return
        self._time += seconds
        if in_trial:
            self._tried += seconds
        # The first step after a change has something of both modes.
        if last is not None and last.num_steps == outcome.num_steps:
            self._costs.add(outcome.num_steps, _size(outcome.batch_size), context, seconds)
        elif last is not None:
            more = self._note_change(self._seconds[outcome.num_steps], seconds)
            if came_from_trial and not in_trial:
                self._tried += more

    def _note_change(self, usual: Estimate, seconds: float) -> float:
        """Learn from the first step after a change, and return what it took beyond the usual."""
        if usual.doubt > _UNSURE:
            return 0.0
        more = seconds - _exp(usual.log)
        self._changes = min(_CHANGES, self._changes + 1)
        self._change_seconds += (more - self._change_seconds) / self._changes
        return max(0.0, more)

    def explain(self) -> dict[str, Any]:
        """Return the last evaluation, and what trials have taken.

        ``num_steps`` is the mode in use, ``trial`` one being tried or None; ``tokens_per_second``
        is what was predicted for a decode batch of ``batch_size``, and ``doubt`` its standard
        deviation as a share, both by draft steps; ``actual_tokens_per_second`` is what the last
        step gained (None before the first); ``change_seconds`` is what a change of the mode costs;
        the other seconds are of decoding.
        """
        predicted = {
            str(n): self._batch_size * _exp(value.log) for n, value in self._values.items()
        }
        return {
            "num_steps": self._held,
            "trial": None if self._trial is None else self._trial.num_steps,
            "batch_size": self._batch_size,
            "tokens_per_second": predicted,
            "actual_tokens_per_second": self._actual(),
            "doubt": {str(n): value.doubt for n, value in self._values.items()},
            "change_seconds": max(0.0, self._change_seconds),
            "decode_seconds": self._time,
            "trial_seconds": self._tried,
        }

    def _actual(self) -> float | None:
        last = self._last
        if last is None or not _is_step_time(last.seconds):
            return None
        return sum(within(last.accept_lens, last.num_steps)) / last.seconds


def _is_step_time(seconds: float | None) -> TypeGuard[float]:
    """Whether a step can take so long; a clock that has gone wrong says anything."""
    return seconds is not None and _LEAST_SECONDS < seconds < _MOST_SECONDS


def _size(batch_size: float) -> int:
    # In this order nan becomes 1: max() and min() keep their first argument then.
    return int(min(1 << 20, max(1, batch_size)))


def _tokens(context_tokens: float) -> int:
    return int(min(1 << 40, max(0, context_tokens)))


def _exp(log: float) -> float:
    return math.exp(max(-100.0, min(100.0, log)))


def _at_most_half(owner: Policy, name: str, value: object) -> float:
    number = share(owner, name, value)
    if number > 0.5:
        raise PolicyError(f"{shown(owner, name, value)}: {name} must be a number from 0 to 0.5")
    return number
