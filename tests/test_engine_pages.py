"""KV pages of more than one token: equal output, and every page back.

SGLang reserves slots ahead of the committed length page by page, shares only whole pages through
its radix cache, and frees by the page. It checks itself here: the allocator every slot that it
hands out, the scheduler after every step that no page is lost.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.in_force import OVERLAPS, InForce, accept_length, ids, in_force, prompts, reference
from support.policies import PlainFirst, Toggle
from support.tight import TIGHT, tight_requests

from sglang_dynspec import Always
from sglang_dynspec.engine.dialect import installed_release, select
from sglang_dynspec.testing.scheduler import Request

STEPS = (0, 1, 3) if select(installed_release()).builds_steps else (0, 3)

# Less and more than a speculative step reserves; one of them without the overlap scheduler where
# there is such a thing. Each test runs on one of them, both draft states on each.
SMALL = ("EAGLE3", True, 4)
LARGE = ("EAGLE", OVERLAPS[-1], 16)

FEW = [Request(input_ids=p, max_new_tokens=140) for p in prompts(2, seed=6)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return reference(tight_requests())


def name(value: tuple[str, bool, int] | str) -> str:
    return value if isinstance(value, str) else f"{value[0]}-{value[2]}"


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, expected: object) -> Iterator[InForce]:
    algorithm, overlap, page_size = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_DEBUG_MEMORY_POOL", "1")
        patch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
        patch.setenv("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1")  # from 0.5.20 on
        with in_force(
            algorithm, overlap=overlap, steps=STEPS, page_size=page_size, **TIGHT
        ) as made:
            assert made.scheduler.scheduler.token_to_kv_pool_allocator.page_size == page_size
            yield made


@pytest.mark.parametrize(
    ("server", "draft_state"), [(SMALL, "catch_up"), (LARGE, "skip")], indirect=["server"], ids=name
)
def test_toggling_with_chunked_prefill_radix_hits_and_retraction(server, expected, draft_state):
    outputs = server.run(Toggle(seed=2), tight_requests(), draft_state)
    assert ids(outputs) == expected
    assert sum(o.cached_tokens for o in outputs) > 0
    assert sum(o.retractions for o in outputs) > 0
    assert all(server.steps(n) > 10 for n in STEPS)
    assert server.controller.failure is None


@pytest.mark.parametrize("server", [LARGE], indirect=True, ids=name)
def test_aborted_requests_give_their_pages_back(server, expected):
    requests = tight_requests()[:6]
    for i in (0, 2, 4):
        requests[i].abort_at_step = requests[i].arrive_at_step + 15 + i
    outputs = server.run(Toggle(seed=3), requests)
    assert sum(o.aborted for o in outputs) == 3
    for output, whole in zip(outputs, expected, strict=False):
        assert output.token_ids == (whole[: len(output.token_ids)] if output.aborted else whole)


@pytest.mark.parametrize("server", [SMALL], indirect=True, ids=name)
def test_the_draft_finds_what_plain_steps_wrote(server):
    always = server.run(Always(), FEW)
    warm = server.run(PlainFirst(40), FEW, "warm")
    assert server.steps(0) == 40
    skip = server.run(PlainFirst(40), FEW, "skip")
    assert ids(warm) == ids(skip) == ids(always)
    length = accept_length(warm, 41, 140)
    assert length == pytest.approx(accept_length(always, 41, 140), rel=0.05)
    assert accept_length(skip, 41, 140) < 0.95 * length
