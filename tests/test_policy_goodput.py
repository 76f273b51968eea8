"""`auto`: what it measures, when it tries, and that it ends up with what is best."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy import (
    BatchView,
    Goodput,
    StepOutcome,
    StepTiming,
    parse_policy,
    policy_text,
)

LADDER = (0, 3)


@dataclass
class Clocked:
    """A server whose steps take what a function says; outcomes arrive one step late."""

    policy: Goodput
    seconds: Callable[[int, int], float]
    """By draft steps and batch size."""
    accepted: Callable[[int, int], int]
    """Of a request's drafts, by draft steps and a number that goes on counting."""
    ladder: tuple[int, ...] = LADDER
    step: int = 0
    now: float = 0.0
    last: int = 3
    late: list[StepOutcome] = field(default_factory=list)
    drawn: int = 0

    def run(self, batch_sizes: Iterable[int]) -> list[int]:
        """Run a step for each batch size, and return the draft steps."""
        answers = []
        for size in batch_sizes:
            view = BatchView(
                batch_size=size,
                ladder=self.ladder,
                context_tokens=200 * size,
                last_num_steps=self.last,
                step=self.step,
            )
            self.last = view.on_ladder(self.policy.decide(view))
            answers.append(self.last)
            while self.late:
                self.policy.observe(self.late.pop())
            seconds = self.seconds(self.last, size)
            self.now += seconds
            self.late.append(
                StepOutcome(
                    step=self.step,
                    num_steps=self.last,
                    batch_size=size,
                    accept_lens=tuple(self._length() for _ in range(size)),
                    seconds=seconds,
                )
            )
            self.step += 1
        return answers

    def _length(self) -> int:
        self.drawn += 1
        return 1 + self.accepted(self.last, self.drawn) if self.last else 1


def costs(ratio: float) -> Callable[[int, int], float]:
    """Seconds of a step: a speculative one takes ``ratio`` times a plain one."""
    return lambda n, size: (0.01 + 0.0001 * size) * (ratio if n else 1.0)


def share(answers: list[int], num_steps: int) -> float:
    return answers.count(num_steps) / len(answers)


def two_of_three(n: int, drawn: int) -> int:
    """2 drafts accepted of 3 (accept length 3)."""
    return min(n, 2)


@pytest.mark.parametrize("size", [1, 8, 200])
@pytest.mark.parametrize(("ratio", "best"), [(1.5, 3), (2.5, 3), (3.5, 0), (6.0, 0)])
def test_it_finds_the_better_mode_knowing_nothing(size, ratio, best):
    server = Clocked(Goodput(), costs(ratio), two_of_three)
    server.run([size] * 500)
    assert share(server.run([size] * 1500), best) > 0.97


def test_it_finds_the_best_of_three():
    seconds = {0: 0.010, 1: 0.013, 3: 0.030}
    server = Clocked(
        Goodput(), lambda n, size: seconds[n], lambda n, drawn: min(n, 1), ladder=(0, 1, 3)
    )
    server.run([16] * 800)
    # 100, 2 / 0.013 = 154 and 2 / 0.03 = 67 tokens per second for each request.
    assert share(server.run([16] * 1500), 1) > 0.97


def timed(seconds: Callable[[int, int], float], ladder: tuple[int, ...] = LADDER) -> Goodput:
    policy = Goodput()
    policy.observe_timings(
        [
            StepTiming(num_steps=n, batch_size=size, seconds=seconds(n, size))
            for size in (1, 2, 4, 8, 16, 32, 64, 128, 256)
            for n in ladder
        ]
    )
    return policy


@pytest.mark.parametrize(("ratio", "best"), [(1.2, 3), (6.0, 0)])
def test_timings_tell_the_mode_of_the_first_step(ratio, best):
    # Less than a step takes in service, as timings are.
    policy = timed(lambda n, size: 0.7 * costs(ratio)(n, size))
    server = Clocked(policy, costs(ratio), two_of_three)
    assert server.run([12] * 500) == [best] * 500


def test_timings_show_the_way_to_another_batch_size():
    # Speculation takes twice as long with up to 16 requests, from 32 on four times.
    def seconds(n: int, size: int) -> float:
        return costs(4.0 if size > 16 else 2.0)(n, size)

    server = Clocked(timed(lambda n, size: 0.8 * seconds(n, size)), seconds, two_of_three)
    assert share(server.run([8] * 300), 3) > 0.95
    # The first step of the new load is decided by the last evaluation.
    assert share(server.run([64] * 100), 0) > 0.9


@pytest.mark.parametrize(
    ("plain", "speculative", "best"),
    [(1.0, 8.0, 0), (5.0, 1.0, 3)],
    ids=["of speculation", "of plain steps"],
)
def test_what_runs_outside_of_graphs_is_found_out(plain, speculative, best):
    # As timed, a speculative step takes 2.5 times a plain one, and gains 3 tokens.
    timing = costs(2.5)
    server = Clocked(
        timed(timing), lambda n, size: timing(n, size) * (speculative if n else plain), two_of_three
    )
    server.run([16] * 300)
    assert share(server.run([16] * 500), best) > 0.95


def test_timings_of_some_modes_only_are_of_use():
    server = Clocked(
        timed(costs(1.5), ladder=(0, 3)),
        lambda n, size: costs(1.0 + n / 6)(n, size),
        lambda n, drawn: min(n, 2),
        ladder=(0, 1, 3),
    )
    server.run([8] * 500)
    assert share(server.run([8] * 500), 3) > 0.9


def test_each_load_gets_its_own_mode():
    server = Clocked(
        Goodput(), lambda n, size: costs(1.5 if size < 32 else 5.0)(n, size), two_of_three
    )
    wave = [4] * 300 + [128] * 300
    server.run(wave * 3)
    answers = server.run(wave)
    assert share(answers[20:300], 3) > 0.95
    assert share(answers[320:], 0) > 0.95


def test_it_comes_back_when_drafts_are_accepted_again():
    accepted = [0]
    server = Clocked(Goodput(), costs(1.5), lambda n, drawn: min(n, accepted[0]))
    server.run([8] * 1000)
    assert share(server.run([8] * 1000), 0) > 0.9
    accepted[0] = 3
    until = server.now + 400
    while server.now < until:
        server.run([8] * 100)
    assert share(server.run([8] * 500), 3) > 0.9


def test_without_a_share_for_trials_there_are_none_but_the_free_ones():
    accepted = [0]
    server = Clocked(Goodput(explore=0), costs(1.5), lambda n, drawn: min(n, accepted[0]))
    server.run([8] * 20_000)
    accepted[0] = 3
    assert share(server.run([8] * 40_000), 0) == 1
    assert server.policy.explain()["trial_seconds"] <= 32 * costs(1.5)(3, 8) + 1e-9


def test_what_cannot_pay_is_never_tried_again():
    server = Clocked(Goodput(), costs(12.0), lambda n, drawn: 0)
    server.run([64] * 500)
    assert server.run([64] * 20_000) == [0] * 20_000


def test_one_slow_step_changes_nothing():
    slow = set()

    def seconds(n: int, size: int) -> float:
        return 30.0 if server.step in slow else costs(2.0)(n, size)

    server = Clocked(Goodput(), seconds, two_of_three)
    server.run([8] * 1000)
    slow.update(range(server.step + 100, server.step + 1000, 300))
    assert share(server.run([8] * 1000), 3) > 0.97


def test_latency_counts_every_request_where_throughput_counts_tokens():
    # Half the requests gain 4 tokens, half 1: 2.5 on average, but 0.625 steps per token.
    def uneven(n: int, drawn: int) -> int:
        return 3 if drawn % 2 else 0

    for objective, best in (("throughput", 3), ("latency", 0)):
        server = Clocked(Goodput(objective), costs(2.0), uneven)
        server.run([16] * 500)
        assert share(server.run([16] * 1000), best) > 0.95, objective


@pytest.mark.parametrize(("change_seconds", "changes"), [(0.0, True), (2.0, False)])
def test_a_change_must_pay_back_what_it_costs(change_seconds, changes):
    """Which mode is better changes with the load every 100 steps, by a few tenths of a second."""
    before = [0]

    def seconds(n: int, size: int) -> float:
        change = change_seconds if n != before[0] else 0.0
        before[0] = n
        return costs(2.5 if size < 32 else 3.6)(n, size) + change

    server = Clocked(Goodput(), seconds, two_of_three)
    wave = [16] * 100 + [64] * 100
    server.run(wave * 20)
    answers = server.run(wave * 5)
    switches = sum(a != b for a, b in itertools.pairwise(answers))
    assert (switches >= 8) is changes
    said = server.policy.explain()["change_seconds"]
    assert said == pytest.approx(change_seconds, rel=0.5, abs=0.005)


def test_no_trial_begins_while_the_batch_grows():
    server = Clocked(Goodput(), costs(1.02), lambda n, drawn: 0)
    server.run([4] * 30_000)
    assert share(server.run([4] * 100), 0) == 1
    growing = [int(4 * 1.08**i) for i in range(50)]
    assert server.run(growing)[10:] == [0] * 40
    # Once it has grown, what is not known there is looked at.
    assert share(server.run([growing[-1]] * 500), 3) > 0


def test_an_outcome_without_seconds_or_with_a_broken_clock_is_survived():
    policy = Goodput()
    for step, seconds in enumerate([None, 0.0, -1.0, float("nan"), float("inf"), 1e300, 0.01]):
        policy.decide(BatchView(batch_size=2, ladder=LADDER, step=step))
        policy.observe(
            StepOutcome(step=step, num_steps=3, batch_size=2, accept_lens=(1, 4), seconds=seconds)
        )
    assert policy.explain()["decode_seconds"] == pytest.approx(0.01)


@settings(max_examples=30, deadline=None)
@given(
    st.floats(1.0, 6.0),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.005, 0.01, 0.05]),
    st.lists(st.integers(1, 128), min_size=1, max_size=6),
    st.integers(0, 1000),
)
def test_trials_keep_to_their_share(ratio, accepted, explore, sizes, seed):
    noise = random.Random(seed)
    policy = Goodput(explore=explore)
    server = Clocked(
        policy,
        lambda n, size: costs(ratio)(n, size) * noise.uniform(0.9, 1.1),
        lambda n, drawn: min(n, accepted),
    )
    for size in sizes:
        server.run([size] * 400)
    said = policy.explain()
    longest = 1.1 * costs(ratio)(3, max(sizes))
    # Those that are free, and the trial that was begun last, which noise may make a little longer.
    allowed = explore * 1.3 * said["decode_seconds"] + (32 + 8) * longest
    assert said["trial_seconds"] <= allowed


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 60)), min_size=1, max_size=8))
def test_equal_traces_give_equal_decisions(trace):
    def run() -> list[int]:
        noise = random.Random(1)
        server = Clocked(
            Goodput(),
            lambda n, size: costs(2.0)(n, size) * noise.uniform(0.8, 1.2),
            lambda n, drawn: min(n, drawn % 4),
        )
        return server.run([size for size, times in trace for _ in range(times)])

    assert run() == run()


def test_it_is_auto_as_text_and_needs_one_rank_to_decide():
    policy = parse_policy("auto('latency', explore=0.02)")
    assert isinstance(policy, Goodput)
    assert policy_text(Goodput(explore=0.02)) == "auto(explore=0.02)"
    assert not policy.deterministic
    assert not parse_policy("auto & batch_size(64)").deterministic


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"objective": "speed"}, ["objective='speed'", "'throughput' or 'latency'"]),
        ({"explore": 1}, ["explore=1", "0 to 0.5"]),
        ({"margin": -0.1}, ["margin=-0.1", "0 to 1"]),
        ({"explore": 5}, ["for 5 percent write 0.05"]),
    ],
)
def test_what_is_said_of_a_bad_value(arguments, words):
    with pytest.raises(PolicyError) as caught:
        Goodput(**arguments)
    assert all(word in str(caught.value) for word in words)
