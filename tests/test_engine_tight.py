"""Chunked prefill, radix-cache hits, a KV pool too small for all, aborts: equal output."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.in_force import (
    SERVERS,
    InForce,
    ids,
    in_force,
    reference,
    ring,
    ring_of,
    server_name,
)
from support.policies import Toggle
from support.tight import TIGHT, tight_requests

from sglang_dynspec import BatchSize, Never, Policy
from sglang_dynspec.engine.catch_up import CatchUp


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return reference(tight_requests())


@pytest.fixture(scope="module", params=SERVERS, ids=server_name)
def server(request: pytest.FixtureRequest, expected: object) -> Iterator[InForce]:
    algorithm, overlap = request.param
    with in_force(algorithm, overlap=overlap, **TIGHT) as made:
        yield made


@pytest.mark.parametrize(
    "policy", [Toggle(seed=2), Never(), BatchSize(off_at=3, on_at=2)], ids=repr
)
def test_chunked_prefill_radix_hits_and_retraction(server, expected, policy: Policy):
    outputs = server.run(policy, tight_requests())
    assert ids(outputs) == expected
    assert sum(o.cached_tokens for o in outputs) > 0
    assert sum(o.retractions for o in outputs) > 0
    assert server.steps(0) > 0


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_ring_that_is_too_short(server, expected, monkeypatch, tokens):
    cold, seen = CatchUp.cold, []

    def checked(self, reqs):
        seen.append(cold(self, reqs))
        # Not looked at anew at every step, and always as if.
        assert seen[-1] == self._look(reqs, (0, 0)).cold
        return seen[-1]

    monkeypatch.setattr(CatchUp, "cold", checked)
    with ring_of(tokens):
        outputs = server.run(Toggle(seed=4), tight_requests())
        # What it had not written yet no embedding could look up (support.in_force.poison).
        assert server.controller.failure is None
        assert ring().totals.times > 10
        assert ring().totals.lost > 0
        assert len(set(seen)) > 4
    assert ids(outputs) == expected
    assert server.controller.counts.draft_prefills_skipped > 0


def test_aborts_midway(server, expected):
    requests = tight_requests()
    for i in range(0, 12, 2):
        requests[i].abort_at_step = requests[i].arrive_at_step + 30 + i
    outputs = server.run(Toggle(seed=3), requests)
    cut = 0
    for output, whole in zip(outputs, expected, strict=True):
        if output.aborted:
            cut += 1
            assert output.token_ids == whole[: len(output.token_ids)]
        else:
            assert output.token_ids == whole
    assert cut >= 3
