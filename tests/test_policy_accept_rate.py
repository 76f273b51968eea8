"""AcceptRate, alone and in the model of a server whose outcomes come late."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Server, runs, view, windows

from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy import AcceptRate, BatchSize, Hysteresis, MinDwell, Policy, StepOutcome

delays = st.integers(0, 3)


def none(num_steps: int, step: int) -> int:
    return 0


def everything(num_steps: int, step: int) -> int:
    return num_steps


def small(**fields: object) -> AcceptRate:
    """Off after 2 bad steps of one request; a probe of 2 steps after 10 plain ones."""
    defaults = {"min": 0.5, "probe_every": 10, "probe_steps": 2, "warmup": 6, "memory": 30}
    return AcceptRate(**{**defaults, **fields})  # type: ignore[arg-type]


def outcome(accept_len: int, num_steps: int = 3, requests: int = 1, step: int = 0) -> StepOutcome:
    return StepOutcome(
        step=step,
        num_steps=num_steps,
        batch_size=requests,
        accept_lens=(accept_len,) * requests,
    )


def plain_between(run: list[int]) -> list[int]:
    """Lengths of the plain stretches between speculative ones, without the first and last."""
    lengths = runs(run)
    first = 0 if run[0] == 0 else 1
    return lengths[first::2][: -1 if run[-1] == 0 else None]


def test_it_speculates_while_drafts_are_accepted() -> None:
    assert set(Server(small(), everything).run(steps=500)) == {3}


def test_it_decides_nothing_before_the_warmup() -> None:
    policy = AcceptRate(0.5, warmup=12)
    for _ in range(3):
        policy.observe(outcome(1))
        assert policy.decide(view()) == 3
    policy.observe(outcome(1))
    assert policy.decide(view()) == 0


def test_the_warmup_counts_drafts_and_so_requests() -> None:
    policy = AcceptRate(0.5, warmup=12)
    policy.observe(outcome(1, requests=4))
    assert policy.decide(view()) == 0


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_off_with_probes_that_are_farther_and_farther_apart(delay: int) -> None:
    run = Server(small(), none, delay=delay).run(steps=500)
    lengths = runs(run)
    assert lengths[0] == 2 + delay  # the warm-up, and what was decided before its outcome came
    assert set(lengths[2:-1:2]) == {2}  # the probes
    assert plain_between(run) == [10, 20, 40, 80, 80, 80, 80, 80]


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_it_comes_back_with_a_good_probe(delay: int) -> None:
    server = Server(small(), lambda n, step: n if step >= 100 else 0, delay=delay)
    run = server.run(steps=400)
    assert run[-1] == 3
    # Probes end at 10, 20, 40, 80 plain steps after the last; the next good one is within 80.
    back = len(run) - runs(run)[-1]
    assert 100 <= back <= 100 + 80 + 2 + delay


def test_a_lasting_return_sets_the_interval_back() -> None:
    server = Server(small(), lambda n, step: n if 100 <= step < 300 else 0)
    run = server.run(steps=800)
    after = plain_between(run[300:])
    assert after[0] == 10


def test_a_return_that_does_not_last_its_warmup_counts_as_a_failed_probe() -> None:
    # The worst that can happen: all accepted in the 2 steps of each probe, and nothing after it.
    run: list[int] = []

    def accept(num_steps: int, step: int) -> int:
        return num_steps if 0 in run[-2:] else 0

    server = Server(small(), accept, delay=0)
    for _ in range(1000):
        run += server.run()
    lengths = runs(run)
    assert set(lengths[2:-1:2]) == {4}  # a probe of 2, and a warm-up of 2 that it did not last
    assert plain_between(run)[:6] == [10, 20, 40, 80, 80, 80]


@given(st.integers(0, 10), delays, st.integers(1, 8))
def test_constant_acceptance_settles(tenths: int, delay: int, requests: int) -> None:
    # As in sglang #24055, where a moving average made the mode flap at constant load.
    server = Server(
        AcceptRate(0.5, margin=0.1, probe_every=10, probe_steps=2, warmup=40, memory=100),
        lambda n, step: tenths if n else 0,
        ladder=(0, 10),
        delay=delay,
    )
    run = server.run(batch_size=requests, steps=600)
    if tenths >= 5:
        assert set(run) == {10}
    else:
        off = run[run.index(0) :]
        assert run.index(0) <= 4 + delay
        assert all(length == 2 for length in runs(off)[1:-1:2])
        assert plain_between(off)[-1] == 80


@given(st.integers(1, 12), st.integers(1, 6), delays, st.lists(st.integers(0, 3), min_size=1))
def test_probing_costs_no_more_than_its_share(
    probe_every: int, probe_steps: int, delay: int, accepted: list[int]
) -> None:
    policy = AcceptRate(
        0.9, margin=0.1, probe_every=probe_every, probe_steps=probe_steps, warmup=1, memory=1
    )
    # At most 2 of 3 drafts accepted, in any order: never good enough to come back.
    server = Server(policy, lambda n, step: min(n, accepted[step % len(accepted)], 2), delay=delay)
    run = server.run(steps=400)
    assert 0 in run
    off = run[run.index(0) :]
    limit = Fraction(probe_steps, probe_every + probe_steps)
    for end in range(1, len(off) + 1):
        assert Fraction(sum(n > 0 for n in off[:end]), end) <= limit
    for window in windows([n > 0 for n in off], probe_every + probe_steps):
        assert sum(window) <= probe_steps


@given(st.integers(0, 6), delays)
def test_inside_its_band_it_stays_as_it_is(twentieths: int, delay: int) -> None:
    # Band 0.5 to 0.8; 0.5 to 0.75 are tried, first coming from above and then from below.
    accepted = 10 + min(twentieths, 5)
    phases = [20, accepted, 0, accepted]

    def accept(num_steps: int, step: int) -> int:
        return phases[min(step // 300, 3)] if num_steps else 0

    policy = AcceptRate(0.5, margin=0.3, probe_every=10, probe_steps=2, warmup=20, memory=100)
    run = Server(policy, accept, ladder=(0, 20), delay=delay).run(steps=1200)
    assert set(run[:600]) == {20}
    assert all(length == 2 for length in runs(run[900 + delay :])[1:-1:2])
    assert sum(n > 0 for n in run[900 + delay :]) <= 300 * 2 / 12 + 2


def test_a_rate_exactly_on_the_threshold_counts_as_reached() -> None:
    # 3 of 10 is 0.3 only up to rounding, and the sums of a long row round differently.
    policy = AcceptRate(0.3, warmup=10, memory=7)
    for _ in range(1000):
        policy.observe(outcome(4, num_steps=10))
        assert policy.decide(view(ladder=(0, 10))) == 10
    back = AcceptRate(0.1, margin=0.2, warmup=10, probe_every=1, probe_steps=3)
    server = Server(back, lambda n, step: 3 if step > 4 else 0, ladder=(0, 10))
    assert server.run(steps=40)[-1] == 10


def test_old_drafts_are_forgotten() -> None:
    policy = AcceptRate(0.5, memory=30, warmup=1)
    for _ in range(1000):
        policy.observe(outcome(4))
    for _ in range(20):
        policy.observe(outcome(1))
    assert policy.decide(view()) == 0


def test_every_draft_weighs_the_same() -> None:
    # Two requests with nothing accepted and 30 with everything: the rate is that of the drafts.
    policy = AcceptRate(0.5, memory=10**9)
    policy.observe(outcome(1, requests=2))
    policy.observe(outcome(4, requests=30))
    assert policy.rate == pytest.approx(30 / 32)


def test_late_outcomes_of_the_time_before_do_not_count_for_a_probe() -> None:
    policy = small(probe_every=1)
    policy.observe(outcome(1, requests=2, step=0))
    assert policy.decide(view(step=1)) == 0
    assert policy.decide(view(step=2)) == 3  # the probe begins
    for step in (0, 1, 1):
        policy.observe(outcome(4, step=step))
    assert policy.decide(view(step=3, last_num_steps=3)) == 3
    assert policy.decide(view(step=4, last_num_steps=3)) == 0
    policy.observe(outcome(1, step=2))
    policy.observe(outcome(1, step=3))
    assert [policy.decide(view(step=5)), policy.rate] == [0, 0.0]


def test_plain_outcomes_say_nothing() -> None:
    policy = small()
    for _ in range(100):
        policy.observe(outcome(1, num_steps=0))
    assert policy.rate is None
    assert policy.decide(view()) == 3


def test_a_probe_whose_outcomes_never_come_counts_for_nothing() -> None:
    policy = small()
    policy.observe(outcome(1, requests=2))
    last, run = 3, []
    for step in range(60):
        last = policy.decide(view(step=step, last_num_steps=last))
        run.append(last)
    # Neither back, nor farther apart.
    assert runs(run) == [10, 2] * 5


@pytest.mark.parametrize(("delay", "comes_back"), [(8, True), (9, False)])
def test_a_probe_waits_8_steps_for_its_outcomes(delay: int, comes_back: bool) -> None:
    server = Server(small(), lambda n, step: n if step >= 15 else 0, delay=delay)
    assert (set(server.run(steps=400)[-50:]) == {3}) == comes_back


def test_a_probe_is_asked_for_until_it_is_run() -> None:
    # At high load the batch size forbids speculation, and acceptance gets good meanwhile.
    server = Server(BatchSize(8) & small(), lambda n, step: n if step > 20 else 0)
    server.run(batch_size=1, steps=10)
    assert set(server.run(batch_size=16, steps=300)) == {0}
    assert server.run(batch_size=1, steps=20)[-1] == 3
    assert set(server.run(batch_size=1, steps=100)) == {3}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda policy: Hysteresis(policy, up=6, down=4),
        lambda policy: MinDwell(policy, steps=15),
        lambda policy: MinDwell(Hysteresis(policy, up=6, down=4), steps=15),
    ],
)
@given(delay=delays)
def test_it_comes_back_inside_a_wrapper(wrap: Callable[[Policy], Policy], delay: int) -> None:
    server = Server(wrap(small()), lambda n, step: n if step >= 200 else 0, delay=delay)
    early = server.run(steps=200)
    assert 0 in early
    assert set(server.run(steps=400)[200:]) == {3}


def test_lengths_out_of_range_are_clipped() -> None:
    nan, inf = float("nan"), float("inf")
    policy = AcceptRate(0.5, memory=10**9)
    policy.observe(
        StepOutcome(
            step=0,
            num_steps=3,
            batch_size=6,
            accept_lens=(99, 10**400, inf, -5, 0, nan),  # type: ignore[arg-type]
        )
    )
    assert policy.rate == pytest.approx(0.5)


@pytest.mark.parametrize("num_steps", [-1, 0, 10**400, 10**9, float("nan"), float("inf")])
def test_an_absurd_number_of_steps_is_ignored(num_steps: int) -> None:
    policy = small()
    policy.observe(outcome(2, num_steps=num_steps))
    assert policy.rate is None


def test_an_outcome_without_requests_is_ignored() -> None:
    policy = small()
    policy.observe(outcome(2, requests=0))
    assert policy.rate is None


def test_without_a_draft_on_the_ladder_it_stays_plain() -> None:
    assert set(Server(small(), none, ladder=(0,)).run(steps=100)) == {0}


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"min": -0.1}, ["min=-0.1", "from 0 to 1"]),
        ({"min": float("nan")}, ["min=nan", "from 0 to 1"]),
        ({"min": float("inf")}, ["min=inf", "from 0 to 1"]),
        ({"min": 30}, ["min=30", "from 0 to 1", "30 percent", "0.3"]),
        ({"min": "0.3"}, ["min='0.3'", "from 0 to 1"]),
        ({"min": True}, ["min=True", "from 0 to 1"]),
        ({"min": 0.98}, ["min=0.98", "margin=0.05", "above 1", "margin to 0.02"]),
        ({"margin": -1}, ["margin=-1", "from 0 to 1"]),
        ({"probe_every": 0}, ["probe_every=0", "whole number >= 1"]),
        ({"probe_steps": 0}, ["probe_steps=0", "whole number >= 1"]),
        ({"probe_steps": 2.0}, ["probe_steps=2.0", "whole number >= 1"]),
        ({"warmup": 0}, ["warmup=0", "whole number >= 1"]),
        ({"memory": False}, ["memory=False", "whole number >= 1"]),
    ],
)
def test_bad_arguments(kwargs: dict[str, object], words: list[str]) -> None:
    with pytest.raises(PolicyError) as caught:
        AcceptRate(**kwargs)  # type: ignore[arg-type]
    for word in ["AcceptRate", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(("low", "margin"), [(0, 0), (1, 0), (0.95, 0.05), (0.7, 0.3)])
def test_the_ends_of_the_range_are_allowed(low: float, margin: float) -> None:
    assert AcceptRate(low, margin=margin).min == low
