"""A policy is plain Python: its test needs neither SGLang nor a GPU. Run it with pytest."""

import pytest
from spare_room import SpareRoom

from sglang_dynspec import BatchView, PolicyError

LADDER = (0, 3)


def view(waiting: int = 0, kv_usage: float = 0.5) -> BatchView:
    return BatchView(batch_size=4, ladder=LADDER, waiting=waiting, kv_usage=kv_usage)


def test_speculates_from_the_first_step_when_there_is_room() -> None:
    assert SpareRoom().decide(view()) == 3


@pytest.mark.parametrize("tight", [view(waiting=1), view(kv_usage=0.9)], ids=["queue", "kv"])
def test_decodes_plainly_without_room(tight: BatchView) -> None:
    assert SpareRoom().decide(tight) == 0


def test_waits_for_calm_steps_in_a_row() -> None:
    policy = SpareRoom(calm_steps=3)
    loads = [view(waiting=1), view(), view(), view(waiting=1), view(), view(), view(), view()]
    assert [policy.decide(load) for load in loads] == [0, 0, 0, 0, 0, 0, 3, 3]


def test_stays_as_it_is_between_the_two_shares() -> None:
    policy = SpareRoom(full=0.9, roomy=0.8, calm_steps=1)
    between = view(kv_usage=0.85)
    assert policy.decide(between) == 3
    assert policy.decide(view(kv_usage=0.95)) == 0
    assert policy.decide(between) == 0
    assert policy.decide(view(kv_usage=0.8)) == 3


@pytest.mark.parametrize(
    "wrong", [{"full": 1.5}, {"roomy": 0.95}, {"full": 0.5, "roomy": 0.5}, {"calm_steps": 0}]
)
def test_refuses_what_makes_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(PolicyError):
        SpareRoom(**wrong)  # type: ignore[arg-type]
