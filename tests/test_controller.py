"""The controller: ladder, counts, outcomes, and the fail-safe. No SGLang."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from sglang_dynspec.engine.controller import STATIC, Controller, Decision
from sglang_dynspec.engine.ranks import Agreement, Ranks
from sglang_dynspec.errors import RanksError
from sglang_dynspec.policy import Always, BatchView, Never, Policy, StepOutcome

LADDER = (0, 1, 3)


class Scripted(Policy):
    """Answers from a list; remembers what it saw."""

    def __init__(self, *answers: Any) -> None:
        super().__init__()
        self.answers = list(answers)
        self.views: list[BatchView] = []
        self.outcomes: list[StepOutcome] = []
        self.draft_prefill: Any = True

    def decide(self, batch: BatchView) -> int:
        self.views.append(batch)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    def wants_draft_prefill(self, batch: BatchView) -> bool:
        if isinstance(self.draft_prefill, Exception):
            raise self.draft_prefill
        return self.draft_prefill  # type: ignore[no-any-return]

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def view(controller: Controller, batch_size: int = 2) -> BatchView:
    return BatchView(batch_size=batch_size, ladder=controller.ladder, step=controller.next_step)


def step(controller: Controller, blocked: str | None = None) -> Decision:
    """Decide a step and take it."""
    decision = controller.decide(view(controller), blocked)
    controller.take(decision)
    return decision


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(clock: Clock) -> Callable[[Policy], Controller]:
    return lambda policy: Controller(policy, LADDER, clock)


@pytest.mark.parametrize(("answer", "run"), [(0, 0), (1, 1), (2, 1), (3, 3), (99, 3)])
def test_the_largest_step_of_the_ladder_not_above_the_answer_is_run(make, answer, run):
    assert make(Scripted(answer)).decide(view(make(Never()))).num_steps == run


def test_decisions_are_numbered_and_switches_counted(make):
    controller = make(Scripted(3, 3, 0, 0, 3))
    decisions = [step(controller) for _ in range(5)]
    assert [d.step for d in decisions] == [0, 1, 2, 3, 4]
    assert controller.counts.switches.total() == 2
    assert controller.as_dict()["num_steps"] == 3


def test_a_blocked_batch_is_never_decoded_plainly(make):
    controller = make(Scripted(0, 3, 0))
    assert step(controller, blocked="grammar").num_steps == 3
    # A wish that needs no plain decode is not a pass-through.
    assert step(controller, blocked="grammar").num_steps == 3
    assert step(controller).num_steps == 0
    assert controller.counts.passthrough == {"grammar": 1}


@pytest.mark.parametrize(
    "answer", [RuntimeError("boom"), -1, 1.5, "3", None, True, float("nan"), KeyError("x")]
)
def test_a_policy_that_fails_is_out_for_good_and_it_is_said_once(make, caplog, answer):
    controller = make(Scripted(0, answer, 0, 0))
    with caplog.at_level(logging.ERROR, logger="sglang_dynspec"):
        ran = [step(controller).num_steps for _ in range(4)]
    assert ran == [0, 3, 3, 3]
    assert controller.static
    assert len(controller.policy.views) == 2  # not asked again
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None
    assert controller.as_dict()["error"] in caplog.text
    assert controller.counts.passthrough[STATIC] == 3


def test_a_policy_that_fails_in_observe_is_out_too(make, caplog):
    class Forgetful(Never):
        def observe(self, outcome: StepOutcome) -> None:
            raise ValueError("cannot remember")

    controller = make(Forgetful())
    decision = step(controller)
    controller.finished(decision, [1, 1])
    controller.finished(decision, [1, 1])
    assert "cannot remember" in controller.failure
    assert step(controller).num_steps == 3
    assert len(caplog.records) == 1


def test_released_means_static_without_an_error(make, caplog):
    controller = make(Never())
    controller.release()
    assert step(controller).num_steps == 3
    assert controller.failure is None
    assert not caplog.records


def test_outcomes_carry_what_was_run(make):
    policy = Scripted(3, 0)
    controller = make(policy)
    first, second = (step(controller) for _ in range(2))
    controller.finished(first, [4, 1])
    controller.finished(second, [1, 1])
    assert [(o.step, o.num_steps, o.batch_size, o.accept_lens) for o in policy.outcomes] == [
        (0, 3, 2, (4, 1)),
        (1, 0, 2, (1, 1)),
    ]
    assert controller.as_dict()["by_num_steps"] == {
        "0": {"steps": 1, "requests": 2, "tokens": 2, "seconds": 0.0},
        "3": {"steps": 1, "requests": 2, "tokens": 5, "seconds": 0.0},
    }


def test_seconds_under_overlap_run_from_one_end_to_the_next(make, clock):
    policy = Scripted(3, 3)
    controller = make(policy)
    first = step(controller)
    clock.now += 0.25
    second = step(controller)
    clock.now += 0.5
    controller.finished(first, [1])
    clock.now += 0.125
    controller.finished(second, [1])
    assert [outcome.seconds for outcome in policy.outcomes] == pytest.approx([0.75, 0.125])


def test_idle_time_before_a_step_is_not_its_own(make, clock):
    policy = Scripted(3, 3)
    controller = make(policy)
    controller.finished(step(controller), [1])
    clock.now += 60.0
    decision = step(controller)
    clock.now += 0.5
    controller.finished(decision, [1])
    assert policy.outcomes[1].seconds == pytest.approx(0.5)


def test_a_prefill_between_two_steps_is_no_step_time(make, clock):
    policy = Scripted(3, 3)
    controller = make(policy)
    first = step(controller)
    clock.now += 0.25
    controller.finished(first, [1])
    controller.interrupt("prefill")
    second = step(controller)
    clock.now += 4.0
    controller.ended()
    clock.now += 0.5
    controller.finished(second, [1])
    assert policy.outcomes[1].seconds == pytest.approx(0.5)
    assert controller.counts.passthrough == {"prefill": 1}


def test_the_status_has_the_policys_explanation_and_survives_one_that_raises(make):
    controller = make(Never())
    assert controller.as_dict()["explanation"] == {}
    policy = Scripted(3)
    controller.use(policy)
    policy.explain = lambda: {"why": "so"}
    assert controller.as_dict()["explanation"] == {"why": "so"}
    policy.explain = lambda: 1 / 0
    assert controller.as_dict()["explanation"] == {"error": "ZeroDivisionError: division by zero"}
    assert controller.failure is None


def test_another_policy_takes_over_but_does_not_undo_a_failure(make):
    controller = make(Never())
    controller.use(Always())
    assert step(controller).num_steps == 3
    controller.use(Never())
    assert step(controller).num_steps == 0
    controller.fail("the test said so", RuntimeError("x"))
    controller.use(Never())
    assert step(controller).num_steps == 3


def test_a_step_that_is_decided_and_not_taken_never_was(make):
    controller = make(Scripted(0, 0, 3))
    controller.decide(view(controller))  # its batch was mixed into a prefill
    assert controller.next_step == 0
    assert controller.counts.switches.total() == 0
    first = step(controller)
    assert (first.step, first.num_steps) == (0, 0)
    assert step(controller).step == 1


def test_a_plain_step_that_fails_counts_as_what_was_run_instead(make):
    controller = make(Never())
    decision = step(controller)
    controller.instead(decision)
    controller.finished(decision, [3])
    assert controller.as_dict()["num_steps"] == 3
    assert controller.as_dict()["by_num_steps"] == {
        "3": {"steps": 1, "requests": 1, "tokens": 3, "seconds": 0.0}
    }


def test_an_answer_below_the_ladder_is_said_once(caplog):
    controller = Controller(Scripted(1, 1, 3), (0, 3))
    ran = [step(controller).num_steps for _ in range(3)]
    assert ran == [0, 0, 3]
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "asked for 1 draft steps" in caplog.text
    assert controller.failure is None


class UnspeakableError(Exception):
    """An error whose message is an error."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_that_cannot_be_printed_is_survived_as_well(make):
    controller = make(Scripted(UnspeakableError()))
    assert step(controller).num_steps == 3
    assert "UnspeakableError" in controller.failure


# --- the draft's prefill ----------------------------------------------------------------------


def test_the_policy_says_whether_the_draft_prefills(clock):
    policy = Scripted()
    controller = Controller(policy, LADDER, clock)
    assert controller.wants_draft_prefill(view(controller)) is True
    policy.draft_prefill = False
    assert controller.wants_draft_prefill(view(controller)) is False
    status = controller.as_dict()
    assert (status["draft_prefills"], status["draft_prefills_skipped"]) == (1, 1)


def test_a_policy_that_cannot_hear_timings_is_replaced(clock, monkeypatch):
    policy = Scripted(0)
    controller = Controller(policy, LADDER, clock)
    controller.observe_timings([])
    assert controller.failure is None
    monkeypatch.setattr(policy, "observe_timings", lambda timings: 1 / 0)
    controller.observe_timings([])
    assert "observe_timings(): ZeroDivisionError" in controller.failure
    assert step(controller).num_steps == 3


def test_the_draft_prefills_where_sglang_decides(clock):
    policy = Scripted()
    policy.draft_prefill = RuntimeError("no idea")
    controller = Controller(policy, LADDER, clock)
    assert controller.wants_draft_prefill(view(controller)) is True
    assert controller.failure is not None
    assert "wants_draft_prefill(): RuntimeError: no idea" in controller.failure
    policy.draft_prefill = False
    assert controller.wants_draft_prefill(view(controller)) is True


# --- several ranks -------------------------------------------------------------------------------


def test_a_release_while_paused_is_told_to_all_ranks():
    ranks = Ranks(0, LADDER[-1], Agreement())
    controller = Controller(Never(), LADDER, ranks=ranks)
    controller.pause()
    assert not controller.release()
    assert not controller.final
    assert ranks.exchange(lambda data, *_: data, ([], 0, None), {}) == []
    controller.decide(view(controller))
    assert controller.final
    controller.resume()
    assert controller.decide(view(controller)).num_steps == 3


def test_what_other_ranks_do_not_answer_to_stops_the_server():
    # Nobody is there at all.
    controller = Controller(Never(), LADDER, ranks=Ranks(1, LADDER[-1], Agreement(1, 2)))
    with pytest.raises(RanksError, match=r"a step failed: ValueError: boom, on rank 1 and not on"):
        controller.fail("a step failed", ValueError("boom"))
    assert controller.failure is None


def test_what_fails_on_all_ranks_is_left_to_sglang():
    controller = Controller(Never(), LADDER, ranks=Ranks(0, LADDER[-1], Agreement()))
    controller.fail("a step failed", ValueError("boom"))
    assert controller.decide(view(controller)).passthrough == STATIC


# --- an operator ---------------------------------------------------------------------------------


def test_an_operator_forces_a_number_of_steps_for_a_while():
    now = [0.0]
    controller = Controller(Never(), LADDER, clock=lambda: now[0])
    controller.force(3, seconds=60)
    decision = controller.decide(view(controller))
    assert (decision.num_steps, decision.reason) == (3, "forced")
    assert controller.wants_draft_prefill(view(controller))
    assert controller.as_dict()["forced"] == {"num_steps": 3, "seconds_left": 60}
    now[0] = 60.0
    decision = controller.decide(view(controller))
    assert (decision.num_steps, decision.reason) == (0, "policy")
    assert controller.as_dict()["forced"] is None
    with pytest.raises(ValueError, match="2 draft steps"):
        controller.force(2)


def test_an_operator_leaves_the_server_to_sglang_and_takes_it_back():
    controller = Controller(Never(), LADDER)
    controller.take(controller.decide(view(controller)))
    controller.pause()
    decision = controller.decide(view(controller))
    assert (decision.num_steps, decision.passthrough) == (3, "paused")
    controller.take(decision)
    assert controller.static
    assert controller.failure is None
    controller.resume()
    controller.take(controller.decide(view(controller)))
    assert controller.last_num_steps == 0
    assert controller.as_dict()["switches_by_reason"] == {"policy": 2, "paused": 1}
