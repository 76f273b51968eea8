"""Draft steps between none and all, on a real scheduler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from support.in_force import OVERLAPS, InForce, ids, in_force, prompts, reference
from support.policies import Recorder, Toggle

from sglang_dynspec.engine import install, timing
from sglang_dynspec.engine.dialect import installed_release, select
from sglang_dynspec.engine.ranks import Agreement
from sglang_dynspec.engine.step_states import StepStates
from sglang_dynspec.engine.timing import Graphs
from sglang_dynspec.errors import InstallError, UnsupportedError
from sglang_dynspec.policy import Fixed, Goodput
from sglang_dynspec.settings import Settings
from sglang_dynspec.testing.scheduler import Request

STEPS = (0, 1, 2, 3)

BUILDS = select(installed_release()).builds_steps


def requests() -> list[Request]:
    lengths = (20, 300, 45, 90, 120, 8, 160, 1)
    return [
        Request(input_ids=p, max_new_tokens=n, arrive_at_step=5 * i)
        for i, (p, n) in enumerate(zip(prompts(8, seed=8), lengths, strict=True))
    ]


@pytest.mark.skipif(BUILDS, reason="this SGLang has adaptive speculation")
def test_without_adaptive_speculation_the_log_says_what_can_be_run(caplog):
    with in_force("EAGLE3", steps=(1, 3)) as server:
        assert server.controller.ladder == (0, 3)
    assert "can run 0 or 3 draft steps only; 1 left out" in caplog.text


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return reference(requests())


@pytest.fixture(
    scope="module", params=OVERLAPS, ids=lambda overlap: "overlap" if overlap else "sync"
)
def server(request: pytest.FixtureRequest) -> Iterator[InForce]:
    if not BUILDS:
        pytest.skip("SGLang has no adaptive speculation yet")
    request.getfixturevalue("expected")  # before: a process has one scheduler at a time
    with in_force("EAGLE3", overlap=request.param, steps=STEPS) as made:
        yield made


@pytest.mark.parametrize("draft_state", ["catch_up", "warm", "skip"])
def test_any_sequence_of_draft_steps(server, expected, draft_state):
    assert server.controller.ladder == STEPS
    policy = Recorder(Toggle(seed=2))
    assert ids(server.run(policy, requests(), draft_state)) == expected
    assert server.controller.failure is None
    assert all(server.steps(n) > 10 for n in STEPS)
    for outcome in policy.outcomes:
        assert max(outcome.accept_lens) <= outcome.num_steps + 1


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_fixed_number_runs_so_many_and_accepts_as_the_server_does(server, expected, num_steps):
    policy = Recorder(Fixed(num_steps))
    assert ids(server.run(policy, requests())) == expected
    assert {outcome.num_steps for outcome in policy.outcomes} == {num_steps}
    # All drafts of a step are accepted often enough: they are no leftovers of another width.
    full = [o for o in policy.outcomes if max(o.accept_lens) == num_steps + 1]
    assert len(full) > 0.3 * len(policy.outcomes)


def test_between_steps_the_worker_is_as_it_was(server):
    before = everything(server)
    server.run(Toggle(seed=3), requests()[:3])
    assert everything(server) == before


def everything(server: InForce) -> list[dict[str, object]]:
    worker = server.scheduler.scheduler.draft_worker
    states = install.runtime().step_states._states.values()
    touched = {name for state in states for _, values in state for name in values}
    objects = (
        worker,
        worker.draft_worker,
        worker.draft_worker.draft_runner,
        worker.target_worker.model_runner,
    )
    return [
        {name: id(value) for name, value in vars(o).items() if name in touched} for o in objects
    ]


def test_auto_chooses_among_them(server, expected):
    policy = Recorder(Goodput())
    assert ids(server.run(policy, requests())) == expected
    assert set(policy.inner.explain()["tokens_per_second"]) == {"0", "1", "2", "3"}


def test_a_number_that_cannot_be_captured_is_left_out(server, monkeypatch, caplog):
    runtime = install.runtime()

    def out_of_memory(worker: object, num_steps: int) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(runtime.dialect, "step_state", out_of_memory)
    states = StepStates(runtime.dialect, runtime.worker, Agreement())
    states.build([1, 2], strict=False)
    assert states.steps == ()
    assert "speculation with 1 draft step failed (RuntimeError: no room)" in caplog.text
    assert "No step runs so many" in caplog.text
    with pytest.raises(InstallError, match="2 draft steps failed"):
        states.build([2], strict=True)


class Summed(Graphs):
    """Takes numbers for graphs."""

    def _seconds(self, graph: float) -> float:
        return graph


def graphs(*, warm: bool) -> Graphs:
    now = install.runtime()
    extend = now.draft_extend if warm else None
    return Summed(now.dialect, now.worker, now.target, extend, now.step_states)


@pytest.mark.parametrize("warm", [True, False])
def test_a_mode_takes_what_its_graphs_take(server, monkeypatch, warm):
    monkeypatch.setattr(timing, "captured", lambda runner: {1: 0.25, 8: 1.0})
    timings = graphs(warm=warm).timings(STEPS)
    assert {t.batch_size for t in timings} == {1, 8}
    # Target and draft-extend; from 2 draft steps on, those after the first.
    assert [t.seconds for t in timings if t.batch_size == 8] == [1.0 + warm, 2.0, 3.0, 3.0]
    assert timing.in_words(timings[:4]).startswith("1 request with 0/1/2/3 draft steps: ")
    policy = Goodput()
    server.controller.use(policy)
    install._time_graphs(graphs(warm=warm), server.controller, Agreement())
    estimates = policy._costs.estimates(STEPS, 8, 100.0)
    assert math.exp(estimates[3].log - estimates[0].log) == pytest.approx(3.0 / (1.0 + warm))


def test_without_graphs_nothing_is_timed(server, caplog):
    assert graphs(warm=True).timings(STEPS) == []
    caplog.set_level("INFO")
    install._time_graphs(graphs(warm=True), server.controller, Agreement())
    assert "do not run from CUDA graphs throughout: none timed" in caplog.text


def test_timing_that_fails_leaves_dynspec_in_force(server, monkeypatch, caplog):
    def broken(runner: object) -> None:
        raise RuntimeError("no clock")

    monkeypatch.setattr(timing, "captured", broken)
    install._time_graphs(graphs(warm=True), server.controller, Agreement())
    assert "timing CUDA graphs failed" in caplog.text
    assert server.controller.failure is None


def test_sizes_close_to_each_other_are_not_all_timed():
    sizes = [1, 2, 3, 4, *range(8, 257, 8)]
    kept = timing.thinned(sizes)
    assert (kept[0], kept[-1]) == (1, 256)
    assert len(kept) <= 16
    assert all(1.4 < b / a < 3 for a, b in itertools.pairwise(kept))
    assert timing.thinned([]) == []


def test_the_status_has_the_ladder(server):
    assert install.status()["ladder"] == list(STEPS)
    assert {"num_steps_1", "num_steps_2"} <= set(install.status()["cuda_graphs"])


def test_more_than_the_server_runs_is_refused(server):
    settings = Settings(policy="never", steps=(1, 5))
    with pytest.raises(UnsupportedError, match=r"steps are 1, 5, but .* at most 3 draft steps"):
        install._step_states(install.runtime().worker, settings, Agreement())
