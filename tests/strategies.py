"""What the policy tests draw from: batches, outcomes, policies, traces, and a model of a server."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st

from sglang_dynspec.policy import (
    AcceptRate,
    Always,
    BatchSize,
    BatchView,
    Fixed,
    Goodput,
    Hysteresis,
    MinDwell,
    Never,
    Policy,
    Smaller,
    StepOutcome,
    StepTiming,
    TokenBudget,
)

settings.register_profile("dynspec", max_examples=60, deadline=None, print_blob=True)
settings.load_profile("dynspec")

NAN = math.nan
INF = math.inf


def view(batch_size: int = 1, **fields: object) -> BatchView:
    """A batch on the ladder 0, 3."""
    return BatchView(**{"batch_size": batch_size, "ladder": (0, 3), **fields})  # type: ignore[arg-type]


def answers(policy: Policy, batch_sizes: list[int], **fields: object) -> list[int]:
    """What a policy answers to a row of batches."""
    return [policy.decide(view(size, **fields)) for size in batch_sizes]


@dataclass
class Scripted(Policy):
    """Answers what it was told, the last one for ever; remembers what it heard."""

    script: list[int]
    heard: list[StepOutcome] = field(default_factory=list)
    timings: list[StepTiming] = field(default_factory=list)
    asked: int = 0

    def decide(self, batch: BatchView) -> int:
        answer = self.script[min(self.asked, len(self.script) - 1)]
        self.asked += 1
        return answer

    def observe(self, outcome: StepOutcome) -> None:
        self.heard.append(outcome)

    def observe_timings(self, timings: Sequence[StepTiming]) -> None:
        self.timings = list(timings)


class Server:
    """A model of the controller and an overlapped scheduler around a policy.

    Rounds answers to the ladder, and hands the outcome of step t to the policy ``delay`` steps
    later: with 0 before step t + 1 is decided, as without overlap.

    Args:
        policy: the one in charge.
        accept: accepted drafts of a request in a step, from num_steps and the step's number.
        ladder, delay: see above.
    """

    def __init__(
        self,
        policy: Policy,
        accept: Callable[[int, int], int] = lambda num_steps, step: num_steps,
        ladder: tuple[int, ...] = (0, 3),
        delay: int = 1,
    ) -> None:
        self.policy = policy
        self.accept = accept
        self.ladder = ladder
        self.delay = delay
        self.step = 0
        self.last = ladder[-1]
        self.in_flight: deque[StepOutcome] = deque()

    def run(self, batch_size: int = 1, steps: int = 1) -> list[int]:
        """Decode some steps; returns the draft steps run in each."""
        return [self._one(batch_size) for _ in range(steps)]

    def _one(self, batch_size: int) -> int:
        batch = BatchView(
            batch_size=batch_size, ladder=self.ladder, last_num_steps=self.last, step=self.step
        )
        num_steps = batch.on_ladder(self.policy.decide(batch))
        length = 1 + self.accept(num_steps, self.step)
        self.in_flight.append(
            StepOutcome(
                step=self.step,
                num_steps=num_steps,
                batch_size=batch_size,
                accept_lens=(length,) * batch_size,
                seconds=0.01,
            )
        )
        self.step += 1
        self.last = num_steps
        while len(self.in_flight) > self.delay:
            self.policy.observe(self.in_flight.popleft())
        return num_steps


def runs(values: list[int]) -> list[int]:
    """The lengths of the runs of equal values."""
    lengths: list[int] = []
    for i, value in enumerate(values):
        if i and value == values[i - 1]:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def windows(flags: list[bool], size: int) -> Iterator[list[bool]]:
    """All stretches of ``size`` neighbours."""
    return (flags[i : i + size] for i in range(len(flags) - size + 1))


# --- Hypothesis -------------------------------------------------------------------------------

batch_sizes = st.integers(1, 64)
ladders = st.sets(st.integers(1, 8), min_size=1, max_size=4).map(lambda s: (0, *sorted(s)))

batch_size_policies = st.integers(1, 48).flatmap(
    lambda off_at: st.builds(
        BatchSize,
        st.just(off_at),
        st.none() if off_at == 1 else st.none() | st.integers(1, off_at - 1),
    )
)
token_budget_policies = st.integers(1, 256).flatmap(
    lambda most: st.builds(TokenBudget, st.just(most), st.integers(0, most - 1))
)
accept_rate_policies = st.builds(
    AcceptRate,
    st.floats(0, 0.9),
    margin=st.floats(0, 0.1),
    probe_every=st.integers(1, 40),
    probe_steps=st.integers(1, 6),
    warmup=st.integers(1, 64),
    memory=st.integers(1, 512),
)
simple_policies = st.one_of(
    st.builds(Always),
    st.builds(Never),
    st.builds(Fixed, st.integers(0, 12)),
    batch_size_policies,
    token_budget_policies,
    accept_rate_policies,
)


def _combined(inner: st.SearchStrategy[Policy]) -> st.SearchStrategy[Policy]:
    return st.one_of(
        st.builds(MinDwell, inner, steps=st.integers(1, 12)),
        st.builds(Hysteresis, inner, up=st.integers(1, 6), down=st.integers(1, 6)),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: Smaller(*parts)),
    )


policies: st.SearchStrategy[Policy] = st.recursive(simple_policies, _combined, max_leaves=5)
"""All that need no clock."""
goodput_policies = st.builds(
    Goodput,
    st.sampled_from(["throughput", "latency"]),
    explore=st.floats(0, 0.5),
    margin=st.floats(0, 0.5),
)
all_policies: st.SearchStrategy[Policy] = st.recursive(
    simple_policies | goodput_policies, _combined, max_leaves=5
)

_nasty_numbers = st.sampled_from([NAN, INF, -INF, 0, -1, -(10**30), 10**30, 10**400])
_nasty_floats = st.floats(allow_nan=True, allow_infinity=True)
nasty_views = st.builds(
    BatchView,
    batch_size=batch_sizes | _nasty_numbers,
    ladder=ladders,
    context_tokens=st.integers() | _nasty_numbers,
    waiting=st.integers() | _nasty_numbers,
    kv_usage=_nasty_floats,
    last_num_steps=st.integers(0, 8) | _nasty_numbers,
    step=st.integers(0, 100) | _nasty_numbers,
)
nasty_outcomes = st.builds(
    StepOutcome,
    step=st.integers(0, 100) | _nasty_numbers,
    num_steps=st.integers(0, 8) | _nasty_numbers,
    batch_size=batch_sizes | _nasty_numbers,
    accept_lens=st.lists(st.integers(1, 9) | _nasty_numbers, max_size=5).map(tuple),
    seconds=st.none() | _nasty_floats,
)
