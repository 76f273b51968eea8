"""Speculation by the share of draft tokens that the target model accepts."""

from __future__ import annotations

from enum import Enum, auto

from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy._checks import share, shown, whole_number
from sglang_dynspec.policy._lengths import within
from sglang_dynspec.policy.base import BatchView, Policy, StepOutcome

_LONGEST_INTERVAL = 8
"""Failed probes double the plain steps between two of them, up to this many times probe_every."""

_PATIENCE = 8
"""Decisions that a finished probe waits for its outcomes, which are one or two steps late."""

_MOST_STEPS = 1 << 16
"""An outcome with more draft steps than this is a mistake, and would overflow a float."""

_ROUNDING = 1e-9
"""Keeps a rate that is exactly on a threshold from falling to its other side by rounding."""


class _Tally:
    """Accepted and proposed draft tokens, the older ones counting less.

    Every draft token moves the rate by the same weight, so a step of 64 requests says 64 times as
    much as a step of one.
    """

    def __init__(self) -> None:
        self.seen = 0
        """Draft tokens seen, none forgotten."""
        self._accepted = 0.0
        self._drafts = 0.0

    @property
    def rate(self) -> float | None:
        """Accepted / proposed draft tokens, 0 to 1, or None before the first."""
        return self._accepted / self._drafts if self._drafts else None

    def add(self, outcome: StepOutcome, memory: int) -> None:
        lengths = within(outcome.usual_accept_lens, outcome.num_steps)
        accepted = sum(lengths) - len(lengths)
        drafts = outcome.num_steps * len(lengths)
        # No exp(): only + - * / give the same bits on every machine, and ranks must agree.
        kept = memory / (memory + drafts)
        self.seen += drafts
        self._accepted = self._accepted * kept + accepted
        self._drafts = self._drafts * kept + drafts


class _Mode(Enum):
    ON = auto()
    OFF = auto()
    PROBING = auto()
    WAITING = auto()
    """The probe has been run; its outcomes are on their way."""


class AcceptRate(Policy):
    """Speculate while enough draft tokens are accepted, and try again now and then if not.

    The accept rate is that of the last ``memory`` draft tokens or so. Below ``min`` the policy
    decodes plainly; every ``probe_every`` plain steps it then runs a probe of ``probe_steps``
    speculative steps, waits plainly for their outcomes, and speculates again if their accept rate
    is at least ``min + margin``. Between ``min`` and ``min + margin`` the mode stays as it is.

    What it costs: as long as the policy is off, at most
    ``probe_steps / (probe_every + probe_steps)`` of the steps are speculative. Each failed probe
    doubles the plain steps before the next one, up to 8 times ``probe_every``. So does a return
    that does not last its warm-up; one that does sets them back to ``probe_every``.

    If another policy keeps a probe from being run (``batch_size(32) & accept_rate()`` at high
    load), it is asked for until it is. If its outcomes do not come within 8 steps it counts for
    nothing, and the next one follows after as many plain steps as before.

    A probe finds the draft's KV as the plain steps left it: with ``draft_state="skip"`` it sees
    less accepted than lasting speculation would. Cold requests (``BatchView.cold``, draft state
    ``catch_up``) do not count; a probe of nothing else counts for nothing, as one whose outcomes do
    not come.

    Args:
        min: accept rate below which not to speculate, 0 to 1. With the accept length L (bonus
            token included) and n draft steps the rate is ``(L - 1) / n``.
        margin: how far above ``min`` a probe must be; ``min + margin`` is at most 1.
        probe_every: plain steps before the first probe, >= 1.
        probe_steps: speculative steps in a probe, >= 1.
        warmup: draft tokens to see, at the start and after each return, before speculation can be
            turned off, >= 1. N independent drafts tell the rate to about ``0.5 / sqrt(N)``.
        memory: draft tokens that the rate looks back on, >= 1: what d draft tokens found is
            weighted with ``memory / (memory + d)`` after the next d.

    Raises:
        PolicyError: a value is out of its range.
    """

    def __init__(
        self,
        min: float = 0.3,  # noqa: A002 - reads well where it is used: accept_rate(min=0.3)
        *,
        margin: float = 0.05,
        probe_every: int = 256,
        probe_steps: int = 8,
        warmup: int = 256,
        memory: int = 2048,
    ) -> None:
        super().__init__()
        self.min = share(self, "min", min)
        self.margin = share(self, "margin", margin)
        if self.min + self.margin > 1 + _ROUNDING:
            raise PolicyError(
                f"{shown(self, 'min', min)[:-1]}, margin={margin!r}): min + margin is above 1, "
                f"which no probe can reach; lower margin to {round(1 - self.min, 6)} or less"
            )
        self.probe_every = whole_number(self, "probe_every", probe_every, at_least=1)
        self.probe_steps = whole_number(self, "probe_steps", probe_steps, at_least=1)
        self.warmup = whole_number(self, "warmup", warmup, at_least=1)
        self.memory = whole_number(self, "memory", memory, at_least=1)
        self._mode = _Mode.ON
        self._tally = _Tally()
        self._interval = self.probe_every
        self._proven = True
        """Whether speculation has lasted a warm-up since the last probe turned it on."""
        self._plain = 0
        self._forget_probe()

    @property
    def rate(self) -> float | None:
        """The accept rate last measured, 0 to 1, or None before any draft."""
        return self._probe.rate if self._tally.rate is None else self._tally.rate

    def decide(self, batch: BatchView) -> int:
        if self._mode is _Mode.ON:
            return batch.max_steps
        if self._mode is _Mode.OFF and self._plain >= self._interval:
            self._start_probe(batch)
        if self._mode is _Mode.PROBING and self._continue_probe(batch):
            return batch.max_steps
        if self._mode is _Mode.WAITING:
            self._wait()
        self._plain += 1
        return 0

    def observe(self, outcome: StepOutcome) -> None:
        # A plain step says nothing, and the outcome's own num_steps tells what it was: it is late.
        if not 0 < outcome.num_steps <= _MOST_STEPS or not outcome.usual_accept_lens:
            return
        if self._mode is _Mode.ON:
            self._tally.add(outcome, self.memory)
            self._weigh()
        elif self._mode is not _Mode.OFF and outcome.step >= self._first_step:
            self._probe.add(outcome, self.memory)
            self._outcomes += 1
            if self._outcomes >= self.probe_steps:
                self._judge()

    def _weigh(self) -> None:
        """Turn speculation off if it does not pay, once enough is known."""
        rate = self._tally.rate
        if rate is None or self._tally.seen < self.warmup:
            return
        if rate >= self.min - _ROUNDING:
            self._proven = True
            self._interval = self.probe_every
            return
        if not self._proven:
            self._back_off()
        self._mode = _Mode.OFF
        self._plain = 0

    def _forget_probe(self) -> None:
        self._probe = _Tally()
        self._first_step = 0
        self._asked = False
        self._steps_run = 0
        self._outcomes = 0
        self._waited = 0

    def _start_probe(self, batch: BatchView) -> None:
        self._forget_probe()
        self._mode = _Mode.PROBING
        self._first_step = batch.step

    def _continue_probe(self, batch: BatchView) -> bool:
        """Return whether the probe goes on, by what was run rather than by what was asked for."""
        if self._asked and batch.last_num_steps > 0:
            self._steps_run += 1
        self._asked = True
        if self._steps_run < self.probe_steps:
            return True
        self._mode = _Mode.WAITING
        self._plain = 0
        return False

    def _wait(self) -> None:
        self._waited += 1
        if self._waited > _PATIENCE:
            self._mode = _Mode.OFF

    def _judge(self) -> None:
        """Speculate again if the probe went well."""
        if self._mode is _Mode.PROBING:
            self._plain = 0
        # Afresh: a return is judged by what comes after it, not by the probe that led to it.
        self._tally = _Tally()
        rate = self._probe.rate
        if rate is not None and rate >= self.min + self.margin - _ROUNDING:
            self._mode = _Mode.ON
            self._proven = False
        else:
            self._mode = _Mode.OFF
            self._back_off()

    def _back_off(self) -> None:
        self._interval = min(2 * self._interval, _LONGEST_INTERVAL * self.probe_every)
