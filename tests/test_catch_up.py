"""Draft state ``catch_up``: speculation comes back with the acceptance it would have had."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.in_force import (
    MTP_SERVERS,
    OVERLAPS,
    InForce,
    ids,
    in_force,
    prompts,
    reference,
    ring,
    ring_of,
    server_name,
)
from support.policies import PlainFirst, Recorder, Toggle

from sglang_dynspec import BatchView, Never
from sglang_dynspec.engine import catch_up, install
from sglang_dynspec.engine.catch_up import CatchUp, share
from sglang_dynspec.engine.ranks import Agreement
from sglang_dynspec.engine.temporarily import temporarily
from sglang_dynspec.errors import InstallError, UnsupportedError
from sglang_dynspec.settings import Settings
from sglang_dynspec.testing.scheduler import Output, Request

EVEN = [Request(input_ids=p, max_new_tokens=150) for p in prompts(4, seed=6)]
ONE_BY_ONE = [
    Request(input_ids=p, max_new_tokens=100, arrive_at_step=7 * i)
    for i, p in enumerate(prompts(5, seed=4))
]
# Each algorithm once, one of them without the overlap scheduler where that can be.
CASES = [("EAGLE", True), ("EAGLE3", OVERLAPS[-1]), ("STANDALONE", True), *MTP_SERVERS]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    # Before any server of this module: a process has one scheduler at a time.
    return {
        "even": reference(EVEN),
        "one_by_one": reference(ONE_BY_ONE),
    }


@pytest.fixture(scope="module", params=CASES, ids=server_name)
def server(request: pytest.FixtureRequest, expected: object) -> Iterator[InForce]:
    algorithm, overlap = request.param
    with in_force(algorithm, overlap=overlap, draft_state="catch_up") as made:
        yield made


def chunks(outputs: Sequence[Output]) -> list[list[int]]:
    """What each step gained, so that two runs are equal only if each proposal was."""
    return [output.chunks for output in outputs]


@pytest.mark.parametrize("steps", [1, 10, 60])
def test_comes_back_as_if_the_draft_had_been_there(server, expected, steps):
    # `warm` is SGLang's own draft-extend at every step.
    warm = server.run(PlainFirst(steps), EVEN, "warm")
    outputs = server.run(PlainFirst(steps), EVEN)
    assert ids(outputs) == expected["even"]
    assert chunks(outputs) == chunks(warm)
    assert server.steps(0) == steps
    assert server.controller.failure is None


@pytest.mark.parametrize("seed", [1, 2])
def test_while_the_mode_changes_and_requests_come_and_go(server, expected, seed):
    class WithPrefill(Toggle):
        def wants_draft_prefill(self, batch: BatchView) -> bool:
            return True

    warm = server.run(WithPrefill(seed), ONE_BY_ONE, "warm")
    outputs = server.run(WithPrefill(seed), ONE_BY_ONE)
    assert ids(outputs) == expected["one_by_one"]
    assert chunks(outputs) == chunks(warm)


class DeepOff(PlainFirst):
    """Sees no use for the draft's prefill."""

    def wants_draft_prefill(self, batch: BatchView) -> bool:
        return False


def test_a_prefill_that_was_left_out_is_caught_up_with_too(server, expected):
    warm = server.run(PlainFirst(10), EVEN, "warm")
    outputs = server.run(DeepOff(10), EVEN)
    assert server.controller.counts.draft_prefills_skipped > 0
    assert ids(outputs) == expected["even"]
    assert chunks(outputs) == chunks(warm)


def test_speculation_right_after_such_a_prefill(server, expected):
    outputs = server.run(DeepOff(0), ONE_BY_ONE)
    assert ids(outputs) == expected["one_by_one"]
    assert chunks(outputs) == chunks(server.run(PlainFirst(0), ONE_BY_ONE, "warm"))


def test_much_is_spread_over_plain_steps(server, expected, monkeypatch):
    monkeypatch.setattr(catch_up, "TOKENS_A_STEP", 30)
    taken = []
    run = CatchUp.run

    def recording(self: CatchUp, batch: Any, plan: catch_up.Plan, *others: Any) -> None:
        taken.append(plan.total)
        run(self, batch, plan, *others)

    monkeypatch.setattr(CatchUp, "run", recording)
    policy = Recorder(PlainFirst(40))
    before = replace(ring().totals)
    outputs = server.run(policy, EVEN)
    assert ids(outputs) == expected["even"]
    # 160 tokens of four requests, with one more for each request and each step it takes.
    assert len(taken) == 7
    assert max(taken) <= 30
    totals, counts = ring().totals, server.controller.counts.by_num_steps
    assert totals.times - before.times == len(taken)
    # Of seven of the steps that are counted.
    assert 0 < totals.seconds - before.seconds < sum(count.seconds for count in counts.values())
    postponed = server.controller.counts.postponed
    assert postponed == 6
    assert server.steps(0) == 40 + postponed
    late = server.run(PlainFirst(40 + postponed), EVEN, "warm")
    assert chunks(outputs) == chunks(late)


def test_where_it_cannot_be_spread_the_newest_will_have_to_do(server, expected, monkeypatch):
    monkeypatch.setattr(catch_up, "TOKENS_A_STEP", 30)
    policy = PlainFirst(40)
    # From the first speculative step on, batches that plain decode leaves to SGLang.
    monkeypatch.setattr(
        server.dialect, "blocked", lambda _: None if policy.plain else "hidden_states"
    )
    outputs = server.run(policy, EVEN)
    assert ids(outputs) == expected["even"]
    assert server.steps(0) == 40
    assert server.controller.counts.postponed == 0
    assert server.controller.failure is None


def test_what_the_ring_no_longer_has_makes_requests_cold(server, expected):
    with ring_of(16):
        assert ring().tokens == 16
        policy = Recorder(PlainFirst(40))
        outputs = server.run(policy, EVEN)
        assert ids(outputs) == expected["even"]
        assert ring().totals.lost == 4 * 24
        assert ring().totals.tokens == 4 * 16
    cold = [view.cold for view in policy.views]
    assert cold[:17] == [0] * 17
    assert cold[17:42] == [4] * 25
    assert 0 in cold[42:] or len(cold) < 42 + catch_up.RECOVERY_STEPS
    first = next(o for o in policy.outcomes if o.num_steps)
    assert first.cold == (0, 1, 2, 3)
    assert first.usual_accept_lens == ()
    plain = [o for o in policy.outcomes if not o.num_steps]
    assert [o.cold for o in plain[:17]] == [()] * 17
    assert server.controller.failure is None


def test_as_many_tokens_as_the_ring_has_leave_no_hole(server):
    with ring_of(40):
        outputs = server.run(PlainFirst(40), EVEN)
        assert ring().totals.lost == 0
    assert chunks(outputs) == chunks(server.run(PlainFirst(40), EVEN, "warm"))


def test_hidden_states_of_another_size_than_expected(server, monkeypatch):
    current = install.runtime()
    if not current.dialect.keeps_hidden(current.worker):
        pytest.skip("a standalone draft reads none")
    monkeypatch.setattr(current.dialect, "kept_hidden_size", lambda _: 16)
    with ring_of(60):
        small = ring().tokens
        outputs = server.run(PlainFirst(10), EVEN)
        assert ring().tokens < small
    assert server.controller.failure is None
    assert chunks(outputs) == chunks(server.run(PlainFirst(10), EVEN, "warm"))


def test_never_leaves_the_draft_model_alone(server):
    class DeepNever(Never):
        def wants_draft_prefill(self, batch: BatchView) -> bool:
            return False

    server.run(DeepNever(), EVEN)
    assert server.draft_wrote_nothing()
    assert ring().totals.times == 0 or server.steps(3) == 0


def test_an_operator_leaves_it_to_sglang_for_a_while(server, monkeypatch):
    # The draft catches up before the first step of SGLang's own: after them what was kept would be
    # of other positions.
    controller = server.controller
    take, taken = controller.take, itertools.count(1)

    def paused_for_some_steps(decision: Any) -> None:
        take(decision)
        change = {20: controller.pause, 35: controller.resume}.get(next(taken))
        if change is not None:
            change()

    monkeypatch.setattr(controller, "take", paused_for_some_steps)
    warm = server.run(PlainFirst(25), EVEN, "warm")
    assert controller.counts.passthrough["paused"] == 15
    taken = itertools.count(1)
    outputs = server.run(PlainFirst(25), EVEN)
    assert controller.counts.passthrough["paused"] == 15
    assert server.steps(0) == 25
    assert ring().totals.times >= 2
    assert chunks(outputs) == chunks(warm)
    assert ids(outputs) == ids(warm)


def test_a_budget_for_less_than_a_token_is_refused(server):
    current = install.runtime()
    with pytest.raises(UnsupportedError, match=r"SGLANG_DYNSPEC_CATCH_UP_BYTES is 8, .* raise it"):
        CatchUp(current.dialect, current.worker, 8)


def test_without_memory_for_it_the_draft_is_kept_warm(server, monkeypatch, caplog):
    def allocate(self: CatchUp, hidden_size: int) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(CatchUp, "_allocate", allocate)
    scheduler, alone = server.scheduler.scheduler, Agreement()
    assert install._catch_up(scheduler, Settings(policy="never"), alone) is None
    assert "cannot be kept (no room), so the draft state is warm instead" in caplog.text
    for settings in (Settings(strict=True), Settings(catch_up_bytes=1 << 20)):
        with pytest.raises(InstallError, match=r"no room.*lower --mem-fraction-static"):
            install._catch_up(scheduler, settings, alone)


@pytest.mark.parametrize("when", ["plain", "speculative"])
def test_a_draft_that_cannot_catch_up_is_no_outage(server, expected, monkeypatch, when):
    # The last test of a server: a failure is for good.
    if when == "plain":
        monkeypatch.setattr(catch_up, "TOKENS_A_STEP", 30)

    def fails(*_: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(CatchUp, "run", fails)
    with temporarily(server.controller, failure=None):
        outputs = server.run(PlainFirst(40), EVEN)
        assert server.controller.failure == "the draft model could not catch up: RuntimeError: boom"
    assert ids(outputs) == expected["even"]
    assert server.steps(0) == 40


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=300), st.integers(2, 4096))
def test_a_share_fits_and_gains_on_what_plain_steps_add(behind, least):
    limit = max(least, 2 * len(behind))
    counts = share(behind, limit)
    assert all(0 <= count <= n for count, n in zip(counts, behind, strict=True))
    # SGLang's buffers hold so many tokens, with one of each request that is not behind.
    assert sum(max(count, 1) for count in counts) <= limit
    # Or else a plain step adds as many.
    assert counts == behind or sum(counts) > len(behind)
