"""Other drafts than a chain of EAGLE's: a standalone model, and trees. All draft steps or none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from support.device import ON_GPU
from support.in_force import OVERLAPS, InForce, accept_length, ids, in_force, prompts, reference
from support.policies import PlainFirst, Toggle
from support.tight import TIGHT, tight_requests

from sglang_dynspec import Always, Never
from sglang_dynspec.engine import draft_state, install, support
from sglang_dynspec.engine.ranks import Agreement
from sglang_dynspec.settings import Settings
from sglang_dynspec.testing import cpu_engine
from sglang_dynspec.testing.scheduler import Request


class Served(NamedTuple):
    """A server by its draft."""

    algorithm: str
    topk: int = 1
    draft_tokens: int = 4
    overlap: bool = True
    page_size: int = 1

    def __str__(self) -> str:
        loop = "overlap" if self.overlap else "sync"
        return f"{self.algorithm}-{self.topk}-{self.draft_tokens}-{loop}-{self.page_size}"

    def in_force(self, **overrides: Any) -> Any:
        return in_force(
            self.algorithm,
            overlap=self.overlap,
            speculative_eagle_topk=self.topk,
            speculative_num_draft_tokens=self.draft_tokens,
            page_size=self.page_size,
            **overrides,
        )


# On a GPU SGLang 0.5.17 fails by itself, without dynspec, with a standalone draft, no overlap and
# pages in a tight pool: a device assertion, a token that does not exist.
PAGE_SIZE = 1 if ON_GPU else 16
STANDALONE = [
    Served("STANDALONE"),
    Served("STANDALONE", overlap=OVERLAPS[-1], page_size=PAGE_SIZE),
]
# Up to 0.5.12 SGLang drafts trees without overlap only, in an older worker.
TREES = [Served("EAGLE", 2, 6), Served("EAGLE3", 4, 10, overlap=False)]
SERVED = [*STANDALONE, *(TREES if cpu_engine.speculates_without_overlap() else ())]

# More drafts a request, and so a little more room.
POOL = {**TIGHT, "max_total_tokens": 700}


def staggered() -> list[Request]:
    return tight_requests(7, (40, 100))


EVEN = [Request(input_ids=p, max_new_tokens=65) for p in prompts(6, seed=6)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    # Before any server of this module: a process has one scheduler at a time.
    return reference(staggered())


@pytest.fixture(scope="module", params=SERVED, ids=str)
def server(request: pytest.FixtureRequest, expected: object) -> Iterator[InForce]:
    with request.param.in_force(**POOL) as made:
        yield made


@pytest.mark.parametrize("draft_state", ["catch_up", "warm", "skip"])
def test_random_toggling_with_retraction_radix_hits_and_chunks(server, expected, draft_state):
    outputs = server.run(Toggle(seed=1), staggered(), draft_state)
    assert ids(outputs) == expected
    assert server.controller.failure is None
    assert server.steps(0) > 30
    assert server.steps(3) > 30
    assert sum(o.cached_tokens for o in outputs) > 0
    assert sum(o.retractions for o in outputs) > 0
    counts = server.controller.counts
    assert (counts.draft_prefills_skipped > 1) == (draft_state != "warm")


def test_never_under_skip_leaves_the_draft_model_alone(server):
    few = [Request(input_ids=p, max_new_tokens=20) for p in prompts(2, seed=7)]
    server.run(Never(), few, "skip")
    assert server.draft_wrote_nothing()
    server.run(Never(), few, "warm")
    assert not server.draft_wrote_nothing()
    assert server.controller.failure is None


def test_warm_comes_back_with_its_acceptance_and_skip_does_not(server):
    always = server.run(Always(), EVEN)
    warm = server.run(PlainFirst(20), EVEN, "warm")
    assert server.steps(0) == 20
    skip = server.run(PlainFirst(20), EVEN, "skip")
    assert accept_length(warm, 21, 65) == pytest.approx(accept_length(always, 21, 65), rel=0.07)
    assert accept_length(skip, 21, 31) < 0.8 * accept_length(warm, 21, 31)


def test_the_ladder_is_all_or_nothing_and_the_log_says_so(server, caplog):
    settings = Settings(policy="never", steps=(1, 3))
    states = install._step_states(install.runtime().worker, settings, Agreement())
    assert states.steps == ()
    assert "can run 0 or 3 draft steps only; 1 left out" in caplog.text


def test_a_standalone_draft_with_sliding_windows_is_refused(server, monkeypatch):
    scheduler = server.scheduler.scheduler
    assert support.refusal(scheduler) is None
    draft = scheduler.draft_worker.draft_worker.draft_runner
    monkeypatch.setattr(draft.model_config, "is_hybrid_swa", True)
    says = "standalone draft models with sliding-window attention are not supported yet"
    standalone = scheduler.spec_algorithm.is_standalone()
    assert support.refusal(scheduler) == (says if standalone else None)


def test_a_plain_step_that_fails_is_run_by_sglang(server, expected, monkeypatch):
    # The last test of a server: a failure is for good. Under `skip` the relay has brought no
    # proposals to the step that SGLang takes over.
    skip, steps = draft_state.skip, iter(range(10))

    def fails_at_last(*args: Any) -> None:
        if next(steps, None) is None:
            raise RuntimeError("boom")
        skip(*args)

    monkeypatch.setattr(draft_state, "skip", fails_at_last)
    assert ids(server.run(Toggle(seed=3), staggered()[:3], "skip")) == expected[:3]
    assert server.controller.failure == "a plain decode step failed: RuntimeError: boom"
    assert server.steps(0) == 10
