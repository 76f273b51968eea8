"""Greedy output under any policy, on a real scheduler: equal to the server without speculation.

Each module-scoped server is built once; the policy is exchanged between runs.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.in_force import (
    SERVERS,
    InForce,
    accept_length,
    ids,
    in_force,
    prompts,
    reference,
    server_name,
)
from support.policies import Alternate, PlainFirst, Recorder, Toggle

from sglang_dynspec import Always, BatchSize, Never
from sglang_dynspec.engine import install, relay
from sglang_dynspec.testing.scheduler import Request


def mixed(longest: int) -> list[Request]:
    lengths = (20, longest, 45, 90, 120, 8, 160, 1)
    return [
        Request(input_ids=p, max_new_tokens=n)
        for p, n in zip(prompts(8, seed=3), lengths, strict=True)
    ]


MIXED = mixed(180)
LONG_MIXED = mixed(700)  # enough steps for 200 toggles
EVEN = [Request(input_ids=p, max_new_tokens=260) for p in prompts(8, seed=6)]
STAGGERED = [
    Request(input_ids=p, max_new_tokens=60 + 10 * (i % 3), arrive_at_step=6 * i)
    for i, p in enumerate(prompts(10, seed=4))
]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    # Before any server of this module: a process has one scheduler at a time.
    return {
        "mixed": reference(MIXED),
        "long": reference(LONG_MIXED),
        "staggered": reference(STAGGERED),
    }


@pytest.fixture(scope="module", params=SERVERS, ids=server_name)
def server(request: pytest.FixtureRequest, expected: object) -> Iterator[InForce]:
    algorithm, overlap = request.param
    with in_force(algorithm, overlap=overlap) as made:
        yield made


@pytest.mark.parametrize("draft_state", ["catch_up", "warm", "skip"])
@pytest.mark.parametrize("policy", [Never(), Always(), Alternate()], ids=repr)
def test_mixed_lengths(server, expected, policy, draft_state):
    assert ids(server.run(policy, MIXED, draft_state)) == expected["mixed"]
    assert (server.steps(0) > 0) == (not isinstance(policy, Always))
    assert (server.steps(3) > 0) == (not isinstance(policy, Never))
    assert server.controller.failure is None


@pytest.mark.parametrize("draft_state", ["catch_up", "skip"])
def test_random_toggling(server, expected, draft_state):
    assert ids(server.run(Toggle(seed=1), LONG_MIXED, draft_state)) == expected["long"]
    assert server.controller.counts.switches.total() >= 200


def test_batch_size_under_staggered_arrivals(server, expected):
    policy = Recorder(BatchSize(off_at=4, on_at=2))
    assert ids(server.run(policy, STAGGERED)) == expected["staggered"]
    assert max(view.batch_size for view in policy.views) >= 4
    assert server.steps(0) > 0
    assert server.steps(3) > 0
    plain = [o for o in policy.outcomes if o.num_steps == 0]
    assert all(o.accept_lens == (1,) * o.batch_size for o in plain)
    assert max(o.accept_length for o in policy.outcomes) > 1.5


def test_hovering_at_the_threshold_while_prefills_arrive_does_not_thrash(server):
    # As in vLLM #49548: three requests stay, a fourth comes and goes.
    stay = [Request(input_ids=p, max_new_tokens=150) for p in prompts(3, seed=9)]
    come = [
        Request(input_ids=p, max_new_tokens=4, arrive_at_step=8 + 8 * i)
        for i, p in enumerate(prompts(6, seed=10))
    ]
    policy = Recorder(BatchSize(off_at=4, on_at=2))
    server.run(policy, [*stay, *come])
    sizes = [view.batch_size for view in policy.views]
    assert sum(a < 4 <= b for a, b in itertools.pairwise(sizes)) >= 5
    # Off once, and on again when those that stay have ended.
    assert server.controller.counts.switches.total() <= 3


def test_a_policy_sees_the_batch_and_hears_every_outcome(server):
    policy = Recorder(Alternate())
    outputs = server.run(policy, EVEN)
    steps = [view.step for view in policy.views]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert sorted(o.step for o in policy.outcomes) == steps
    first = policy.views[0]
    assert first.ladder == (0, 3)
    assert first.batch_size == 8
    # Committed tokens: the prompts; the first sampled token of each is still pending.
    assert first.context_tokens == sum(len(r.input_ids) for r in EVEN)
    assert 0 < first.kv_usage < 1
    assert first.waiting == 0
    for view, outcome in zip(policy.views, policy.outcomes, strict=True):
        assert outcome.num_steps == Alternate().decide(view)
        assert outcome.seconds is not None
        assert outcome.seconds > 0
    # Overlap runs a step more for requests that have ended, and gives its tokens to nobody.
    gained = sum(sum(o.accept_lens) for o in policy.outcomes)
    delivered = sum(len(o.token_ids) - 1 for o in outputs)
    assert delivered <= gained <= delivered + 8 * 8


def test_the_status_says_what_has_been_run(server):
    server.run(Alternate(), EVEN)
    found = json.loads(json.dumps(install.status()))
    assert (found["state"], found["policy"], found["draft_state"]) == (
        "in_force",
        "support.policies:Alternate",
        "catch_up",
    )
    assert found["by_num_steps"]["3"]["seconds"] > 0
    assert 1.5 < found["accept_length"] < 4
    assert found["switches"] == sum(found["switches_by_reason"].values()) > 10
    assert (found["cold"], found["tp_rank"], found["dp_rank"] or 0) == (0, 0, 0)
    assert found["gpu_memory_gb"] > 0
    assert found["catch_up"]["tokens"] > 0
    assert (found["paused"], found["forced"], found["error"]) == (False, None, None)


def test_what_only_the_radix_cache_keeps_does_not_count_as_used(server):
    server.controller.use(Never())
    server.scheduler.run(EVEN)  # not flushed: some 2,000 of 8,192 slots stay cached
    policy = Recorder(Never())
    server.controller.use(policy)
    server.scheduler.run([Request(input_ids=[70, 71, 72], max_new_tokens=4)])
    assert server.scheduler.scheduler.tree_cache.evictable_size() > 2000
    assert policy.views[0].kv_usage < 0.01
    server.scheduler.flush_cache()


def test_plain_steps_neither_wait_for_lengths_nor_relay_proposals(server, monkeypatch):
    if not (server.dialect.has_relay and server.scheduler.scheduler.enable_overlap):
        pytest.skip("FutureMap relays by pool index from 0.5.13 on, under overlap")
    done: Counter[str] = Counter()

    def counted(name):
        original = getattr(relay, name)

        def call(*args, **kwargs):
            did = original(*args, **kwargs)
            done[name] += did
            return did

        return call

    for name in ("resolve_lengths", "resolve_extras", "stash"):
        monkeypatch.setattr(relay, name, counted(name))
    server.run(Never(), EVEN, "skip")
    plain = server.steps(0)
    # Some attention backends need no lengths on the host: there is nothing to wait for.
    needed = int(server.scheduler.scheduler.future_map.needs_cpu_seq_lens)
    lengths = needed * (plain - 1)
    assert done == {"resolve_lengths": lengths, "resolve_extras": plain, "stash": plain}
    done.clear()
    server.run(Never(), EVEN, "warm")
    assert done == {"resolve_lengths": lengths, "resolve_extras": 0, "stash": 0}
    done.clear()
    server.run(Always(), EVEN, "skip")
    assert not +done


# --- what requests ask for ----------------------------------------------------------------------


def asking(*wishes: str | None) -> list[Request]:
    """The mixed requests, each asking for something or for nothing."""
    return [
        replace(r, sampling_params={"custom_params": wish and {"dynspec": wish}})
        for r, wish in zip(MIXED, itertools.cycle(wishes))
    ]


def test_requests_opted_in_and_out_in_one_batch(server, expected):
    # As in sglang #30263. They disagree, so the policy decides.
    policy = Recorder(Alternate())
    assert ids(server.run(policy, asking("never", "always"))) == expected["mixed"]
    assert policy.views[0].asked_never == 4
    assert policy.views[0].asked_always >= 3  # one ends with its first token
    assert min(server.steps(0), server.steps(3)) > 10
    assert server.controller.failure is None


def test_requests_get_what_they_agree_on(server, expected):
    assert ids(server.run(Always(), asking("never", None))) == expected["mixed"]
    first = server.steps(0)
    assert first > 10  # as long as they are half of the batch
    assert server.controller.counts.switches["asked"] >= 1
    assert ids(server.run(Never(), asking("always"), "skip")) == expected["mixed"]
    assert server.steps(0) == 0
    assert server.controller.counts.draft_prefills_skipped == 0
    assert ids(server.run(Always(), asking("never", None, None))) == expected["mixed"]
    assert server.steps(0) < first
    assert server.steps(3) > 10


def test_a_wish_that_means_nothing_is_said_once(server, expected, caplog):
    for _ in range(2):
        server.run(Never(), asking("sometimes"))
        assert server.steps(3) == 0
    [said] = [r.getMessage() for r in caplog.records if "'sometimes'" in r.getMessage()]
    assert "neither 'never' nor 'always'" in said


# --- the draft's prefill ---------------------------------------------------------------------


def test_never_under_skip_leaves_the_draft_model_alone(server, expected):
    assert ids(server.run(Never(), MIXED, "skip")) == expected["mixed"]
    counts = server.controller.counts
    assert counts.draft_prefills == 0
    assert counts.draft_prefills_skipped > 0
    assert server.draft_wrote_nothing()
    server.run(Never(), MIXED, "warm")
    assert server.controller.counts.draft_prefills_skipped == 0
    assert not server.draft_wrote_nothing()


def test_prefills_with_and_without_the_draft_take_turns(server, expected):
    outputs = server.run(Toggle(seed=2), STAGGERED, "skip")
    assert ids(outputs) == expected["staggered"]
    counts = server.controller.counts
    assert counts.draft_prefills > 1
    assert counts.draft_prefills_skipped > 1
    assert server.controller.failure is None


def test_a_prefill_is_judged_by_the_batch_it_leads_to(server):
    policy = Recorder(BatchSize(off_at=4))
    server.run(policy, STAGGERED, "skip")
    first = policy.prefills[0]
    assert (first.batch_size, first.context_tokens) == (1, len(STAGGERED[0].input_ids))
    assert max(view.batch_size for view in policy.prefills) >= 4
    counts = server.controller.counts
    large = sum(view.batch_size >= 4 for view in policy.prefills)
    assert 0 < large <= counts.draft_prefills_skipped < len(policy.prefills)


# --- the draft's state ------------------------------------------------------------------------


def test_warm_comes_back_with_its_acceptance_and_skip_does_not(server):
    always = server.run(Always(), EVEN)
    warm = server.run(PlainFirst(100), EVEN, "warm")
    assert server.steps(0) == 100
    skip = server.run(PlainFirst(100), EVEN, "skip")
    # One token came from the prefill, and one from each plain step.
    assert all(output.chunks[:101] == [1] * 101 for output in (*warm, *skip))
    assert accept_length(warm, 101, 260) == pytest.approx(accept_length(always, 101, 260), rel=0.05)
    # What shows that the models can tell: their drafts look back some twenty tokens.
    assert accept_length(skip, 101, 111) < 0.75 * accept_length(warm, 101, 111)
