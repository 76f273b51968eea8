"""The interface: views, outcomes, and what every policy inherits."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import dataclass

import pytest
from strategies import view

from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy import BatchSize, BatchView, Never, Policy, Smaller, StepOutcome


@pytest.mark.parametrize(
    ("answer", "expected"), [(0, 0), (1, 0), (2, 2), (4, 2), (5, 5), (6, 5), (10**400, 5)]
)
def test_an_answer_is_rounded_down_to_the_ladder(answer: int, expected: int) -> None:
    assert BatchView(batch_size=1, ladder=(0, 2, 5)).on_ladder(answer) == expected


@pytest.mark.parametrize("answer", [-1, True, False, 1.0, None, "3", float("nan")])
def test_an_answer_that_is_no_number_of_steps_is_refused(answer: object) -> None:
    with pytest.raises(PolicyError, match=r"decide\(\) answered .*0 to batch.max_steps") as caught:
        view().on_ladder(answer)
    assert repr(answer) in str(caught.value)


def test_a_number_of_another_type_is_an_answer() -> None:
    class Number:
        def __index__(self) -> int:
            return 3

    assert view().on_ladder(Number()) == 3


def test_accept_length_and_rate() -> None:
    outcome = StepOutcome(step=0, num_steps=3, batch_size=2, accept_lens=(4, 1))
    assert outcome.accept_length == 2.5
    assert outcome.accept_rate == 0.5


def test_a_plain_or_empty_step_has_no_accept_rate() -> None:
    plain = StepOutcome(step=0, num_steps=0, batch_size=1, accept_lens=(1,))
    empty = StepOutcome(step=0, num_steps=3, batch_size=0, accept_lens=())
    assert plain.accept_rate is None
    assert empty.accept_rate is None
    assert empty.accept_length == 1.0


def test_repr_is_the_call_that_made_it() -> None:
    assert repr(BatchSize(32, on_at=24)) == "BatchSize(32, on_at=24)"
    assert repr(BatchSize(32) & Never()) == "Smaller(BatchSize(32), Never())"


def test_and_refuses_what_is_no_policy() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        Never() & 3  # type: ignore[operator]


def test_and_makes_one_flat_combination() -> None:
    a, b, c = Never(), BatchSize(8), BatchSize(9)
    assert (a & (b & c)).parts == ((a & b) & c).parts == (a, b, c)


def test_a_policy_without_parameters_refuses_arguments() -> None:
    class Mine(Policy):
        def decide(self, batch: BatchView) -> int:
            return 0

    with pytest.raises(TypeError):
        Mine(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Mine(typo=1)  # type: ignore[call-arg]


def test_a_frozen_dataclass_can_be_a_policy() -> None:
    @dataclass(frozen=True)
    class Mine(Policy):
        limit: int = 3

        def decide(self, batch: BatchView) -> int:
            return self.limit

    assert Mine(limit=2).decide(view()) == 2
    assert Mine(2)._arguments == ((2,), {})


def test_a_copy_keeps_the_arguments() -> None:
    assert repr(copy.deepcopy(BatchSize(32, on_at=24))) == "BatchSize(32, on_at=24)"


def test_a_combination_is_deterministic_if_all_its_parts_are() -> None:
    class Random(Policy):
        deterministic = False

        def decide(self, batch: BatchView) -> int:
            return 0

    assert (Never() & BatchSize(8)).deterministic
    assert not (Never() & Random()).deterministic
    assert Smaller.deterministic


def test_the_package_is_light() -> None:
    code = (
        "import sys, sglang_dynspec.policy\n"
        "heavy = {'torch', 'sglang', 'numpy', 'wrapt', 'importlib.metadata', 'asyncio'}\n"
        # `site` may have imported some of these before us.
        "assert not heavy & (set(sys.modules) - before), heavy & (set(sys.modules) - before)"
    )
    subprocess.run(
        [sys.executable, "-c", "import sys; before = set(sys.modules)\n" + code], check=True
    )
