"""Always, Never, Fixed, BatchSize and TokenBudget."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import answers, batch_sizes, ladders, view

from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy import Always, BatchSize, BatchView, Fixed, Never, Policy, TokenBudget


def test_fixed_policies() -> None:
    assert answers(Always(), [1, 64]) == [3, 3]
    assert answers(Never(), [1, 64]) == [0, 0]
    assert answers(Fixed(2), [1, 64]) == [2, 2]
    assert answers(Fixed(9), [1, 64]) == [3, 3]


# --- BatchSize --------------------------------------------------------------------------------


def test_batch_size_switches_at_its_thresholds() -> None:
    policy = BatchSize(off_at=8, on_at=5)
    assert answers(policy, [1, 7, 8, 7, 6, 5, 6, 7, 8]) == [3, 3, 0, 0, 0, 3, 3, 3, 0]


@pytest.mark.parametrize(("first", "expected"), [(1, 3), (6, 3), (7, 3), (8, 0), (9, 0)])
def test_batch_size_starts_speculative_below_off_at(first: int, expected: int) -> None:
    assert BatchSize(off_at=8, on_at=5).decide(view(first)) == expected


@pytest.mark.parametrize(
    ("off_at", "on_at"), [(1, 0), (2, 1), (3, 2), (4, 3), (8, 6), (32, 24), (10**20, 75 * 10**18)]
)
def test_the_default_band_is_a_quarter(off_at: int, on_at: int) -> None:
    assert BatchSize(off_at).on_at == on_at


def test_off_at_1_is_always_plain() -> None:
    assert answers(BatchSize(1), [1, 2, 1, 64, 1]) == [0] * 5


@given(st.data(), st.integers(2, 40))
def test_batch_size_never_moves_inside_its_band(data: st.DataObject, off_at: int) -> None:
    on_at = data.draw(st.integers(1, off_at - 1))
    policy = BatchSize(off_at, on_at)
    before = policy.decide(view(data.draw(batch_sizes)))
    for size in data.draw(st.lists(batch_sizes, max_size=40)):
        answer = policy.decide(view(size))
        if on_at < size < off_at:
            assert answer == before
        else:
            assert answer == (3 if size <= on_at else 0)
        before = answer


@given(
    st.sampled_from([BatchSize(8, 5), TokenBudget(32, slack=8), Fixed(2), Never(), Always()]),
    st.lists(batch_sizes, max_size=10),
    batch_sizes,
)
def test_a_prefill_wants_the_draft_where_the_batch_it_leads_to_would_speculate(
    policy: Policy, before: list[int], size: int
) -> None:
    policy = copy.deepcopy(policy)
    answers(policy, before)
    batch = view(size)
    wanted = policy.wants_draft_prefill(batch)
    assert wanted == (batch.on_ladder(policy.decide(batch)) > 0)


# --- TokenBudget ------------------------------------------------------------------------------


@given(st.integers(1, 300), batch_sizes, ladders)
def test_without_slack_the_largest_step_of_the_ladder_that_fits(
    max_tokens: int, size: int, ladder: tuple[int, ...]
) -> None:
    batch = BatchView(batch_size=size, ladder=ladder)
    fitting = [n for n in ladder if size * (n + 1) <= max_tokens]
    expected = max(fitting, default=0)
    assert batch.on_ladder(TokenBudget(max_tokens, slack=0).decide(batch)) == expected
    assert batch.on_ladder(TokenBudget(max_tokens).decide(batch)) == expected


def test_token_budget_grows_only_past_its_slack() -> None:
    policy = TokenBudget(32, slack=8)  # 3 steps fit 8 requests, and are taken up again at 6
    assert answers(policy, [8, 9, 8, 7, 6, 7, 8, 9]) == [3, 2, 2, 2, 3, 3, 3, 2]


@given(st.data(), st.integers(1, 256), ladders)
def test_token_budget_keeps_the_budget_and_moves_only_outside_its_band(
    data: st.DataObject, max_tokens: int, ladder: tuple[int, ...]
) -> None:
    slack = data.draw(st.integers(0, max_tokens - 1))
    policy = TokenBudget(max_tokens, slack)
    before: int | None = None
    for size in data.draw(st.lists(batch_sizes, min_size=1, max_size=40)):
        batch = BatchView(batch_size=size, ladder=ladder)
        num_steps = batch.on_ladder(policy.decide(batch))
        assert num_steps == 0 or size * (num_steps + 1) <= max_tokens
        if before is not None and num_steps > before:
            assert size * (num_steps + 1) <= max_tokens - slack
        if before is not None and num_steps < before:
            assert size * (before + 1) > max_tokens
        before = num_steps


def test_by_default_the_answer_depends_on_the_batch_size_alone() -> None:
    assert answers(TokenBudget(40), [10, 11, 10, 9, 8, 1]) == [3, 2, 3, 3, 3, 3]


def test_a_batch_that_hovers_at_the_boundary_does_not_flap() -> None:
    assert answers(TokenBudget(128, slack=16), [32, 33] * 20)[1:] == [2] * 39


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "kwargs", "words"),
    [
        (BatchSize, {"off_at": 0}, ["off_at=0", "whole number >= 1"]),
        (BatchSize, {"off_at": -3}, ["off_at=-3", "whole number >= 1"]),
        (BatchSize, {"off_at": True}, ["off_at=True", "whole number >= 1"]),
        (BatchSize, {"off_at": 8.0}, ["off_at=8.0", "whole number >= 1"]),
        (BatchSize, {"off_at": "8"}, ["off_at='8'", "whole number >= 1"]),
        (BatchSize, {"off_at": None}, ["off_at=None", "whole number >= 1"]),
        (BatchSize, {"off_at": 8, "on_at": 0}, ["on_at=0", "whole number >= 1"]),
        (BatchSize, {"off_at": 8, "on_at": False}, ["on_at=False", "whole number >= 1"]),
        (BatchSize, {"off_at": 8, "on_at": 8}, ["on_at=8", "below off_at=8", "lower on_at to 6"]),
        (BatchSize, {"off_at": 24, "on_at": 32}, ["on_at=32", "off_at=24", "lower on_at to 18"]),
        (BatchSize, {"off_at": 1, "on_at": 1}, ["on_at=1", "off_at=1", "no batch is small enough"]),
        (TokenBudget, {"max_tokens": 0}, ["max_tokens=0", "whole number >= 1"]),
        (TokenBudget, {"max_tokens": 1e3}, ["max_tokens=1000.0", "whole number >= 1"]),
        (TokenBudget, {"max_tokens": 8, "slack": -1}, ["slack=-1", "whole number >= 0"]),
        (TokenBudget, {"max_tokens": 8, "slack": 8}, ["slack=8", "below max_tokens=8", "to 1"]),
        (Fixed, {"num_steps": -1}, ["num_steps=-1", "whole number >= 0"]),
    ],
)
def test_bad_arguments(cls: type[Policy], kwargs: dict[str, object], words: list[str]) -> None:
    with pytest.raises(PolicyError) as caught:
        cls(**kwargs)
    for word in [cls.__name__, *words]:
        assert word in str(caught.value)
