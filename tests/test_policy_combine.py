"""Smaller, Hysteresis and MinDwell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Scripted, answers, runs, view

from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy import (
    AcceptRate,
    Always,
    BatchSize,
    Hysteresis,
    MinDwell,
    Never,
    Policy,
    Smaller,
    StepOutcome,
    StepTiming,
)

TIMING = StepTiming(num_steps=3, batch_size=1, seconds=0.01)
OUTCOME = StepOutcome(step=0, num_steps=3, batch_size=1, accept_lens=(2,))

scripts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def follow(policy: Policy, times: int, ladder: tuple[int, ...] = (0, 1, 2, 3)) -> list[int]:
    return answers(policy, [1] * times, ladder=ladder)


def test_smaller_takes_the_smallest_and_asks_all() -> None:
    a, b = Scripted([0, 3, 2]), Scripted([3, 1, 2])
    assert follow(Smaller(a, b), 3) == [0, 1, 2]
    assert a.asked == b.asked == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda inner: Never() & inner,
        lambda inner: Hysteresis(inner, up=3, down=3),
        lambda inner: MinDwell(inner, steps=3),
    ],
)
def test_a_combination_asks_and_tells_in_every_step(make: Callable[[Policy], Policy]) -> None:
    inner = Scripted([3, 0, 3])
    assert not make(inner).wants_timings
    inner.wants_timings = True
    policy = make(inner)
    assert policy.wants_timings
    policy.observe_timings([TIMING])
    assert inner.timings == [TIMING]
    for _ in range(3):
        policy.decide(view())
        policy.observe(OUTCOME)
    assert inner.asked == 3
    assert inner.heard == [OUTCOME] * 3


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (Smaller(Always(), BatchSize(8)), True),
        (Smaller(Always(), Never()), False),
        (Hysteresis(Never(), up=3, down=3), False),
        (Hysteresis(Always(), up=3, down=3), True),
        (MinDwell(Never(), steps=3), False),
        (AcceptRate(), True),
    ],
)
def test_the_draft_prefills_if_every_part_wants_it(policy: Policy, wanted: bool) -> None:
    assert policy.wants_draft_prefill(view()) is wanted


@pytest.mark.parametrize(
    "make",
    [
        lambda inner: Never() & inner,
        lambda inner: Hysteresis(inner, up=3, down=3),
        lambda inner: MinDwell(inner, steps=3),
    ],
)
def test_a_wrong_answer_of_a_part_is_not_hidden(make: Callable[[Policy], Policy]) -> None:
    with pytest.raises(PolicyError, match="decide"):
        make(Scripted([-1])).decide(view())


def test_hysteresis_follows_at_the_nth_wish() -> None:
    policy = Hysteresis(Scripted([0, 3, 3, 3, 3, 0, 0, 0]), up=3, down=2)
    assert follow(policy, 8) == [0, 0, 0, 3, 3, 3, 0, 0]


def test_hysteresis_starts_with_the_wish_of_the_policy() -> None:
    assert follow(Hysteresis(Scripted([2]), up=9, down=9), 1) == [2]


def test_an_interrupted_wish_counts_anew() -> None:
    policy = Hysteresis(Scripted([0, 3, 3, 0, 3, 3, 3]), up=3, down=1)
    assert follow(policy, 7) == [0, 0, 0, 0, 0, 0, 3]


def test_hysteresis_moves_to_the_least_change_wished_for() -> None:
    assert follow(Hysteresis(Scripted([0, 1, 3, 3, 3, 3, 3]), up=3, down=1), 7) == [
        0, 0, 0, 1, 1, 1, 3,
    ]  # fmt: skip
    assert follow(Hysteresis(Scripted([3, 0, 2, 2]), up=1, down=2), 4) == [3, 3, 2, 2]


def test_wishes_that_the_ladder_cannot_tell_apart_are_one_wish() -> None:
    policy = Hysteresis(Scripted([0, 1, 2, 1, 3]), up=1, down=1)
    assert follow(policy, 5, ladder=(0, 3)) == [0, 0, 0, 0, 3]
    held = MinDwell(Scripted([0, 1, 3]), steps=2)
    assert follow(held, 3, ladder=(0, 3)) == [0, 0, 3]


@given(scripts, st.integers(1, 6), st.integers(1, 6))
def test_hysteresis_moves_only_after_its_counts(script: list[int], up: int, down: int) -> None:
    given_ = follow(Hysteresis(Scripted(script), up=up, down=down), len(script))
    assert given_[0] == script[0]
    for i in range(1, len(script)):
        before, now = given_[i - 1], given_[i]
        if now > before:
            assert min(script[i - up + 1 : i + 1]) == now > before
            assert i >= up
        elif now < before:
            assert max(script[i - down + 1 : i + 1]) == now < before
            assert i >= down
        # And it does move once the wish has lasted for as long as anything was held.
        held = set(given_[i - up : i]) if i >= up else set()
        if len(held) == 1 and min(script[i - up + 1 : i + 1]) > before:
            assert now > before


@given(scripts, st.integers(1, 12))
def test_every_answer_is_held_for_its_dwell(script: list[int], steps: int) -> None:
    given_ = follow(MinDwell(Scripted(script), steps=steps), len(script))
    assert given_[0] == script[0]
    assert all(length >= steps for length in runs(given_)[:-1])
    for i in range(1, len(script)):
        # A change is to the wish of that moment, and comes as soon as it may.
        held_for = runs(given_[:i])[-1]
        assert given_[i] == (script[i] if held_for >= steps else given_[i - 1])


def test_a_dwell_of_one_follows_at_once() -> None:
    script = [0, 3, 0, 1, 2]
    assert follow(MinDwell(Scripted(script), steps=1), 5) == script
    assert follow(Hysteresis(Scripted(script), up=1, down=1), 5) == script


def test_a_wrapper_is_as_deterministic_as_its_policy() -> None:
    random = Scripted([0])
    random.deterministic = False
    assert not Hysteresis(random, up=1, down=1).deterministic
    assert not MinDwell(random, steps=1).deterministic
    assert MinDwell(Never(), steps=1).deterministic


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Smaller(), ["two policies or more", "not 0"]),
        (lambda: Smaller(Never()), ["two policies or more", "not 1"]),
        (lambda: Smaller(Never(), 3), ["Smaller", "policy", "not 3"]),
        (lambda: Smaller(Never(), BatchSize), ["instance", "BatchSize(...)"]),
        (lambda: Hysteresis(3, up=1, down=1), ["Hysteresis", "policy", "not 3"]),
        (lambda: Hysteresis(Never(), up=0, down=1), ["up=0", "whole number >= 1"]),
        (lambda: Hysteresis(Never(), up=1, down=1.5), ["down=1.5", "whole number >= 1"]),
        (lambda: MinDwell(Never, steps=1), ["MinDwell", "Never(...)"]),
        (lambda: MinDwell(Never(), steps=True), ["steps=True", "whole number >= 1"]),
    ],
)
def test_bad_arguments(make: Callable[[], Policy], words: list[str]) -> None:
    with pytest.raises(PolicyError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)
