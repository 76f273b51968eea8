"""Greedy output under any policy, on a real scheduler: equal to the server without speculation.

Each module-scoped server is built once; the policy is exchanged between runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from support.in_force import InForce, in_force, prompts, reference
from support.policies import Alternate, PlainFirst, Recorder, Toggle

from sglang_dynspec import Always, BatchSize, Never, Policy
from sglang_dynspec.engine.dialect import installed_release
from sglang_dynspec.testing.scheduler import Output, Request

# 0.5.9 has EAGLEWorkerV2 only under the overlap scheduler.
OVERLAPS = [True] if installed_release() == "0.5.9" else [True, False]
SERVERS = [(algorithm, overlap) for algorithm in ("EAGLE", "EAGLE3") for overlap in OVERLAPS]

LENGTHS = (20, 700, 45, 90, 300, 8, 160, 1)
MIXED = [
    Request(input_ids=p, max_new_tokens=n) for p, n in zip(prompts(8, seed=3), LENGTHS, strict=True)
]
STAGGERED = [
    Request(input_ids=p, max_new_tokens=60 + 10 * (i % 3), arrive_at_step=6 * i)
    for i, p in enumerate(prompts(10, seed=4))
]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    # Before any server of this module: a process has one scheduler at a time.
    return {
        "mixed": reference(MIXED),
        "staggered": reference(STAGGERED),
        "tight": tight_reference(),
    }


@pytest.fixture(
    scope="module", params=SERVERS, ids=lambda s: f"{s[0]}-{'overlap' if s[1] else 'sync'}"
)
def server(request: pytest.FixtureRequest, expected: object) -> Iterator[InForce]:
    algorithm, overlap = request.param
    with in_force(algorithm, overlap=overlap) as made:
        yield made


def ids(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("draft_state", ["warm", "skip"])
@pytest.mark.parametrize("policy", [Never(), Always(), Alternate()], ids=repr)
def test_mixed_lengths(server, expected, policy, draft_state):
    assert ids(server.run(policy, MIXED, draft_state)) == expected["mixed"]
    assert (server.steps(0) > 0) == (not isinstance(policy, Always))
    assert (server.steps(3) > 0) == (not isinstance(policy, Never))
    assert server.controller.failure is None


@pytest.mark.parametrize("draft_state", ["warm", "skip"])
def test_random_toggling(server, expected, draft_state):
    assert ids(server.run(Toggle(seed=1), MIXED, draft_state)) == expected["mixed"]
    assert server.controller.counts.switches >= 200


def test_batch_size_under_staggered_arrivals(server, expected):
    policy = Recorder(BatchSize(off_at=4, on_at=2))
    assert ids(server.run(policy, STAGGERED)) == expected["staggered"]
    assert max(view.batch_size for view in policy.views) >= 4
    assert server.steps(0) > 0
    assert server.steps(3) > 0
    plain = [o for o in policy.outcomes if o.num_steps == 0]
    assert all(o.accept_lens == (1,) * o.batch_size for o in plain)
    assert max(o.accept_length for o in policy.outcomes) > 1.5


def test_a_policy_sees_the_batch_and_hears_every_outcome(server):
    policy = Recorder(Alternate())
    outputs = server.run(policy, MIXED)
    steps = [view.step for view in policy.views]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert sorted(o.step for o in policy.outcomes) == steps
    first = policy.views[0]
    assert first.ladder == (0, 3)
    assert first.batch_size == 7  # one of the eight wants a single token, the prefill's
    # Committed tokens: the prompts, whose first sampled token is still pending.
    assert first.context_tokens == sum(len(r.input_ids) for r in MIXED if r.max_new_tokens > 1)
    assert 0 < first.kv_usage < 1
    assert first.waiting == 0
    for view, outcome in zip(policy.views, policy.outcomes, strict=True):
        assert outcome.num_steps == Alternate().decide(view)
        assert outcome.seconds is None or outcome.seconds > 0
    # Overlap runs a step more for requests that have ended, and gives its tokens to nobody.
    gained = sum(sum(o.accept_lens) for o in policy.outcomes)
    delivered = sum(len(o.token_ids) - 1 for o in outputs)
    assert delivered <= gained <= delivered + 8 * 8


# --- chunked prefill, radix-cache hits, retraction, aborts --------------------------------------

TIGHT = {"max_total_tokens": 700, "chunked_prefill_size": 64, "max_running_requests": 8}


def tight_requests() -> list[Request]:
    draw = random.Random(5)
    shared = [draw.randrange(4, 512) for _ in range(150)]
    return [
        Request(
            input_ids=shared[: draw.randrange(20, 150)]
            + [draw.randrange(4, 512) for _ in range(draw.randrange(1, 60))],
            max_new_tokens=draw.randrange(60, 150),
            arrive_at_step=2 * i,
        )
        for i in range(24)
    ]


def tight_reference() -> list[list[int]]:
    return reference(tight_requests())


@pytest.fixture(
    scope="module", params=SERVERS, ids=lambda s: f"{s[0]}-{'overlap' if s[1] else 'sync'}"
)
def tight_server(request: pytest.FixtureRequest, expected: object) -> Iterator[InForce]:
    algorithm, overlap = request.param
    with in_force(algorithm, overlap=overlap, **TIGHT) as made:
        yield made


@pytest.mark.parametrize(
    "policy", [Toggle(seed=2), Never(), BatchSize(off_at=5, on_at=3)], ids=repr
)
def test_chunked_prefill_radix_hits_and_retraction(tight_server, expected, policy: Policy):
    outputs = tight_server.run(policy, tight_requests())
    assert ids(outputs) == expected["tight"]
    assert sum(o.cached_tokens for o in outputs) > 0
    assert sum(o.retractions for o in outputs) > 0
    assert tight_server.steps(0) > 0


def test_aborts_midway(tight_server, expected):
    requests = tight_requests()
    for i in range(0, 24, 3):
        requests[i].abort_at_step = requests[i].arrive_at_step + 30 + i
    outputs = tight_server.run(Toggle(seed=3), requests)
    cut = 0
    for output, whole in zip(outputs, expected["tight"], strict=True):
        if output.aborted:
            cut += 1
            assert output.token_ids == whole[: len(output.token_ids)]
        else:
            assert output.token_ids == whole
    assert cut >= 3


# --- the draft's state ------------------------------------------------------------------------

LONG = [Request(input_ids=p, max_new_tokens=400) for p in prompts(8, seed=6)]


def accept_length_after(outputs: list[Output], position: int) -> float:
    """Tokens a step over the steps that begin at or after a position of the output."""
    gained = []
    for output in outputs:
        at = output.chunks[0]
        for chunk in output.chunks[1:-1]:
            if at >= position:
                gained.append(chunk)
            at += chunk
    return sum(gained) / len(gained)


def test_warm_comes_back_with_its_acceptance_and_skip_does_not(server):
    always = accept_length_after(server.run(Always(), LONG), 101)
    warm = accept_length_after(server.run(PlainFirst(100), LONG, "warm"), 101)
    assert server.steps(0) == 100
    assert warm == pytest.approx(always, rel=0.05)
    skip = accept_length_after(server.run(PlainFirst(100), LONG, "skip"), 101)
    # What shows that the tiny models can tell the difference at all.
    assert skip < 0.9 * warm
