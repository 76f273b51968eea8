"""What holds for every shipped policy and every combination of them."""

from __future__ import annotations

import copy
import json

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from strategies import (
    Server,
    all_policies,
    batch_sizes,
    ladders,
    nasty_outcomes,
    nasty_views,
    policies,
    runs,
)

from sglang_dynspec.policy import (
    AcceptRate,
    BatchView,
    Hysteresis,
    MinDwell,
    Policy,
    Smaller,
    StepOutcome,
    parse_policy,
    policy_text,
)


def parts(policy: Policy) -> list[Policy]:
    """A policy and all that it is made of."""
    inner: tuple[Policy, ...] = ()
    if isinstance(policy, Smaller):
        inner = policy.parts
    elif isinstance(policy, (Hysteresis, MinDwell)):
        inner = (policy.policy,)
    return [policy, *(part for child in inner for part in parts(child))]


@given(all_policies, st.lists(nasty_views | nasty_outcomes, max_size=40))
def test_nothing_breaks_a_policy(policy: Policy, trace: list[BatchView | StepOutcome]) -> None:
    for event in trace:
        if isinstance(event, BatchView):
            answer = policy.decide(event)
            assert type(answer) is int
            assert 0 <= answer <= event.max_steps
            assert event.on_ladder(answer) in event.ladder
        else:
            policy.observe(event)
        json.dumps(policy.explain(), allow_nan=False)


@given(all_policies, st.lists(nasty_views | nasty_outcomes, max_size=20), nasty_views)
def test_a_question_about_a_prefill_changes_nothing(
    policy: Policy, trace: list[BatchView | StepOutcome], prefill: BatchView
) -> None:
    asked = copy.deepcopy(policy)
    for event in trace:
        assert type(asked.wants_draft_prefill(prefill)) is bool
        if isinstance(event, BatchView):
            assert asked.decide(event) == policy.decide(event)
        else:
            asked.observe(event)
            policy.observe(event)


@given(policies, st.lists(nasty_views | nasty_outcomes, max_size=40))
def test_two_replicas_agree_at_each_step(
    policy: Policy, trace: list[BatchView | StepOutcome]
) -> None:
    # As on two ranks: one policy made here, one made from its text.
    assert policy.deterministic
    replica = parse_policy(policy_text(policy))
    for event in trace:
        if isinstance(event, BatchView):
            assert policy.decide(event) == replica.decide(event)
        else:
            policy.observe(event)
            replica.observe(event)


@given(policies, batch_sizes, ladders, st.integers(0, 2), st.integers(0, 8))
@settings(max_examples=150)
def test_constant_input_settles(
    policy: Policy, size: int, ladder: tuple[int, ...], delay: int, accepted: int
) -> None:
    server = Server(policy, lambda n, step: min(n, accepted), ladder=ladder, delay=delay)
    server.run(size, steps=400)
    late = server.run(size, steps=400)
    probing = [part for part in parts(policy) if isinstance(part, AcceptRate)]
    moves = len(runs(late)) - 1
    if not probing:
        assert moves == 0
    elif len(probing) == 1:
        # Nothing but its probes: each one way and back.
        assert moves <= 2 * (len(late) // probing[0].probe_every + 1)


@given(policies, st.integers(1, 12), st.lists(st.tuples(batch_sizes, st.integers(0, 3))), ladders)
def test_a_dwell_holds_around_anything(
    policy: Policy, dwell: int, trace: list[tuple[int, int]], ladder: tuple[int, ...]
) -> None:
    server = Server(
        MinDwell(policy, steps=dwell),
        lambda n, step: min(n, trace[step % len(trace)][1]),
        ladder=ladder,
    )
    run = [server.run(size)[0] for size, _ in trace for _ in range(5)]
    assert all(length >= dwell for length in runs(run)[:-1])


class PolicyInAServer(RuleBasedStateMachine):
    """Batches that come and go, outcomes that come late, in any order of events."""

    @initialize(policy=policies, ladder=ladders)
    def start(self, policy: Policy, ladder: tuple[int, ...]) -> None:
        self.policy = policy
        self.untouched = copy.deepcopy(policy)
        self.ladder = ladder
        self.step = 0
        self.last = ladder[-1]
        self.in_flight: list[tuple[int, int, int]] = []
        self.answers: list[int] = []

    @rule(size=batch_sizes, times=st.integers(1, 12))
    def decide(self, size: int, times: int) -> None:
        for _ in range(times):
            batch = BatchView(
                batch_size=size, ladder=self.ladder, last_num_steps=self.last, step=self.step
            )
            answer = self.policy.decide(batch)
            assert 0 <= answer <= batch.max_steps
            self.last = batch.on_ladder(answer)
            self.in_flight.append((self.step, self.last, size))
            self.step += 1
            if len(self.in_flight) > 2:
                self.finish(4)

    @rule(accepted=st.integers(0, 8))
    def finish(self, accepted: int) -> None:
        if self.in_flight:
            step, num_steps, size = self.in_flight.pop(0)
            length = 1 + min(num_steps, accepted)
            self.policy.observe(
                StepOutcome(
                    step=step, num_steps=num_steps, batch_size=size, accept_lens=(length,) * size
                )
            )

    @rule()
    def lose_an_outcome(self) -> None:
        if self.in_flight:
            self.in_flight.pop(0)

    @invariant()
    def its_text_is_that_of_its_first_state(self) -> None:
        assert policy_text(self.policy) == policy_text(self.untouched)

    @invariant()
    def its_rates_are_rates(self) -> None:
        for part in parts(self.policy):
            if isinstance(part, AcceptRate) and part.rate is not None:
                assert -1e-9 <= part.rate <= 1 + 1e-9


TestPolicyInAServer = PolicyInAServer.TestCase
TestPolicyInAServer.settings = settings(max_examples=50, stateful_step_count=30)
