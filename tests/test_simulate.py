"""The simulator and the command `simulate`: costs, loads, the server's arithmetic, baselines."""

from __future__ import annotations

import builtins
import io
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Scripted, answers, policies

import sglang_dynspec
from sglang_dynspec import cli
from sglang_dynspec.errors import ConfigError, DynspecError, PolicyError
from sglang_dynspec.measured import Curve, Point, Table, read_table, shipped_tables
from sglang_dynspec.policy import Always, BatchSize, BatchView, Never, Policy, StepOutcome
from sglang_dynspec.simulate.acceptance import Acceptance, Drafts
from sglang_dynspec.simulate.baselines import BestThreshold, SglangAdaptive, best_threshold
from sglang_dynspec.simulate.command import default_levels, make_policy
from sglang_dynspec.simulate.costs import StepCosts
from sglang_dynspec.simulate.load import SHAPES, Load, Request, Shape, Trace, read_trace, shape
from sglang_dynspec.simulate.progress import progress
from sglang_dynspec.simulate.scenario import Scenario
from sglang_dynspec.simulate.server import Machine, Result

K25, K26, LLAMA = "kimi-k2.5-rtx-pro-6000", "kimi-k2.6-rtx-pro-6000", "llama-8b-h200"


def table(
    points: dict[int, tuple[float | None, float | None]],
    *more: Curve,
    num_steps: int = 3,
    accept_length: float | None = 2.0,
) -> Table:
    """A table of one curve: tokens per second without and with speculation, by requests."""
    curve = Curve(0, None, tuple(Point(c, *both) for c, both in points.items()))
    return Table("t", "", num_steps, accept_length, (curve, *more))


SMALL = table({1: (100, 200), 4: (300, 400), 16: (800, 400)})


def scenario(
    measured: Table | str = SMALL,
    load: Load | None = None,
    accept: float | Acceptance = 2.0,
    backend: str | None = None,
    **fields: Any,
) -> Scenario:
    costs = StepCosts(read_table(measured) if isinstance(measured, str) else measured, backend)
    if not isinstance(accept, Acceptance):
        accept = Acceptance(accept, accept)
    return Scenario(costs, load or constant(4), accept, **fields)


def constant(c: int, duration: float = 60.0, **fields: int) -> Shape:
    return shape("constant", low=0, high=c, duration=duration, **fields)


# --- what a step costs --------------------------------------------------------------------------


def test_costs_follow_from_throughput_by_littles_law() -> None:
    costs = StepCosts(SMALL)
    assert costs.seconds(4, 100) == pytest.approx({0: 4 / 300, 3: 4 * 2.0 / 400})
    assert StepCosts(SMALL, None, 3.0).seconds(1, 1)[3] == pytest.approx(3.0 / 200)
    assert (costs.ladder, costs.max_batch, costs.contexts) == ((0, 3), 16, (0,))


def test_between_measured_batches_logarithms_are_interpolated() -> None:
    costs = StepCosts(SMALL)
    low, high = costs.seconds(1, 1), costs.seconds(4, 1)
    for n in (0, 3):
        assert costs.seconds(2, 1)[n] == pytest.approx(math.sqrt(low[n] * high[n]))


def test_outside_the_nearest_measurement_holds() -> None:
    costs = StepCosts(table({4: (300, 400), 16: (800, 400)}))
    assert costs.seconds(1, 1) == costs.seconds(4, 1)
    assert costs.seconds(64, 1)[0] == pytest.approx(64 / 800)


def test_between_contexts_seconds_are_interpolated() -> None:
    far = Curve(1000, None, (Point(1, 50, 100),))
    costs = StepCosts(table({1: (100, 200)}, far))
    assert costs.seconds(1, 500)[0] == pytest.approx((0.01 + 0.02) / 2, rel=0.03)
    assert costs.seconds(1, 10**6)[0] == pytest.approx(0.02)


def test_where_the_two_modes_cross() -> None:
    assert StepCosts(SMALL).crossover(1) == 7
    assert StepCosts(SMALL).crossover(1, accept_length=0.9) == 1
    assert StepCosts(table({1: (100, 200)})).crossover(1) is None


@pytest.mark.parametrize(
    ("measured", "backend", "said"),
    [
        (SMALL, "triton", "t has no backend 'triton'; it has none by name"),
        (table({1: (100, None)}), None, "no row with both no_spec and static_spec"),
        (table({1: (1, 1)}, accept_length=4.5), None, "between 1 and 4.*--accept-length"),
    ],
)
def test_tables_that_cannot_be_simulated(measured: Table, backend: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StepCosts(measured, backend)


# --- acceptance ---------------------------------------------------------------------------------


def test_acceptance_swings() -> None:
    swing = Acceptance(1.5, 2.5, period=100)
    assert [round(swing.at(t), 3) for t in (0, 25, 50, 100)] == [1.5, 2.0, 2.5, 1.5]


@pytest.mark.parametrize("length", [1.0, 1.3, 2.2, 3.9, 4.0])
def test_draws_have_the_mean_that_is_asked(length: float) -> None:
    drafts = Drafts(3, seed=1)
    p = drafts.probability(length)
    drawn, total = drafts.draw(p, 3, 10_000)
    assert sum(drawn) == total
    assert total / 10_000 == pytest.approx(length, rel=0.03)
    assert drafts.expected(p, 3) == pytest.approx(length, rel=0.01)
    assert drafts.draw(p, 0, 3) == ((1, 1, 1), 3)


# --- loads --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "levels"),
    [
        ("constant", {0: 10, 300: 10}),
        ("ramp", {0: 2, 150: 6, 300: 10, 599.9: 2}),
        ("square", {0: 2, 59: 2, 60: 10, 119: 10, 120: 2}),
        ("bursts", {0: 2, 24: 2, 26: 10, 31: 2}),
        ("diurnal", {0: 2, 150: 10, 300: 2, 450: 10}),
    ],
)
def test_shapes(kind: str, levels: dict[float, int]) -> None:
    load = shape(kind, low=2, high=10, duration=600)
    assert {time: load.level(time) for time in levels} == levels


def test_shapes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'saw'.*constant, ramp"):
        shape("saw", low=1, high=2)


def test_a_server_idles_where_nothing_is_asked() -> None:
    result = scenario(load=shape("square", low=0, high=4, duration=120)).simulate(Never())
    assert result.duration == pytest.approx(120, rel=0.01)
    assert result.seconds == pytest.approx(60, rel=0.03)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_traces_are_read(tmp_path: Path) -> None:
    csv = write(
        tmp_path / "t.csv",
        "id,arrival,prompt_tokens,output_tokens\na,1700000002.5,7,3\nb,1700000000,5,2\n",
    )
    lines = write(
        tmp_path / "t.jsonl",
        '{"arrival": 0, "prompt_tokens": 5, "output_tokens": 2, "more": [1]}\n\n'
        '{"arrival": 2.5, "prompt_tokens": 7, "output_tokens": 3}\n',
    )
    expected = [Request(0, 5, 2), Request(2.5, 7, 3)]
    assert list(read_trace(csv).requests) == expected
    assert list(read_trace(lines).requests) == expected


HEADER = "arrival,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEADER, r"has no request.*arrival,prompt_tokens"),
        ("arrival,output_tokens\n1,1\n", r"line 1: the header lacks prompt_tokens"),
        (HEADER + "0,1,1\n1,x,1\n", r"line 3, prompt_tokens is 'x'; it must be a number >= 0"),
        (HEADER + "0,1\n", r"line 2 has no output_tokens"),
        (HEADER + "0,1,0\n", r"line 2, output_tokens is '0'; it must be a whole number, 1 to"),
        (HEADER + "0,1.5,1\n", r"line 2, prompt_tokens is '1.5'; it must be a whole number"),
        (HEADER + "-1,1,1\n", r"line 2, arrival is '-1'"),
        (HEADER + f"0,1,{'9' * 140000}\n", r"line 2 is no CSV"),
        ('{"arrival": 0}\n', r"line 1 has no prompt_tokens"),
        ('{"arrival": 0\n', r"line 1 is no JSON"),
        ('{"arrival": true, "prompt_tokens": 1, "output_tokens": 1}', r"line 1, arrival is True"),
        ('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1}\n[1]', r"line 2 is \[1\]"),
    ],
)
def test_traces_that_cannot_be_read(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path / "trace", text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_traces_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "none")


# --- the server ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_tables())
def test_a_constant_load_gives_the_tables_throughput(name: str) -> None:
    """Little's law, and back."""
    curve = read_table(name).curves[-1]
    for point in (curve.points[1], curve.points[-1]):
        for policy, tok_s in ((Never(), point.no_spec), (Always(), point.static_spec)):
            assert tok_s is not None
            duration = max(30_000, 300 * point.c) / tok_s  # For the noise to average out.
            load = constant(point.c, duration, prompt_tokens=curve.context, output_tokens=64)
            result = scenario(name, load, 2.2, curve.backend).simulate(policy)
            assert result.tok_s == pytest.approx(tok_s, rel=0.02)


def test_the_regret_of_one_mode_is_what_the_table_says() -> None:
    for c, never, always in ((1, 0.5, 0.0), (4, 0.25, 0.0), (16, 0.0, 0.5)):
        asked = scenario(load=constant(c))
        assert asked.simulate(Never()).regret == pytest.approx(never, abs=0.01)
        assert asked.simulate(Always()).regret == pytest.approx(always, abs=0.01)


def test_equal_seeds_give_equal_results() -> None:
    def run(seed: int) -> Result:
        asked = scenario(LLAMA, shape("ramp", low=1, high=64, duration=10), seed=seed)
        return asked.simulate(make_policy("auto", asked))

    assert run(3) == run(3)
    assert run(3) != run(4)


def requests_of(rate: float, count: int) -> Iterator[Request]:
    for i in range(count):
        yield Request(i / rate, 10 + i % 7, 1 + i * 37 % 50)


def test_every_request_of_a_trace_is_answered() -> None:
    trace = Trace(requests_of(rate=200, count=500))  # More than can be served at once.
    asked = scenario(load=trace, machine=Machine(max_running_requests=8))
    for policy in (Never(), Always()):
        result = asked.simulate(policy, intervals=4)
        assert result.requests == len(result.times_per_token) == 500
        assert result.duration > trace.duration
        assert len(result.intervals) <= 8
        assert max(interval.batch_size for interval in result.intervals) <= 8


def test_prefill_takes_its_time() -> None:
    trace = Trace([Request(0, 1000, 10)])
    machine = Machine(noise=0, outliers=0, prefill_tokens_per_s=1000)
    result = scenario(load=trace, machine=machine).simulate(Never())
    assert result.seconds == pytest.approx(0.1)
    assert result.duration == pytest.approx(1.1)
    assert result.time_per_token() == result.time_per_token(0.99) == pytest.approx(0.11)


@pytest.mark.parametrize("overlap", [True, False])
def test_outcomes_come_one_step_late_under_overlap(overlap: bool) -> None:
    class Late(Policy):
        heard = -1

        def decide(self, batch: BatchView) -> int:
            assert self.heard == batch.step - (2 if overlap and batch.step else 1)
            return 0

        def observe(self, outcome: StepOutcome) -> None:
            self.heard = outcome.step

    policy = Late()
    # Heard before the next decision without overlap, and after it with it.
    asked = scenario(load=constant(2, 1.0), machine=Machine(overlap=overlap))
    assert asked.simulate(policy).steps > 10


def test_a_policy_that_fails_is_named() -> None:
    with pytest.raises(PolicyError, match=r"failed at 0.0 s.*4 requests.*answered -1"):
        scenario().simulate(Scripted([-1]))


@st.composite
def tables(draw: st.DrawFn) -> Table:
    rates = st.floats(1, 1e4)
    sizes = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=4)))
    points = {c: (c * draw(rates), c * draw(rates)) for c in sizes}
    num_steps = draw(st.integers(1, 5))
    return table(points, num_steps=num_steps, accept_length=draw(st.floats(1, num_steps + 1)))


@st.composite
def any_load(draw: st.DrawFn) -> Load:
    if draw(st.booleans()):
        rows = st.tuples(st.floats(0, 5), st.integers(0, 300), st.integers(1, 30))
        return Trace(Request(*row) for row in draw(st.lists(rows, min_size=1, max_size=30)))
    low = draw(st.integers(0, 8))
    return shape(
        draw(st.sampled_from(SHAPES)),
        low=low,
        high=draw(st.integers(max(1, low), 16)),
        duration=draw(st.floats(0.001, 0.3)),
        output_tokens=draw(st.integers(1, 30)),
    )


baselines = st.sampled_from(["auto", "sglang_adaptive", "best_threshold"])


@settings(max_examples=40)
@given(tables(), any_load(), st.one_of(policies, baselines), st.data())
def test_nothing_is_lost_in_any_simulation(
    measured: Table, load: Load, policy: Policy | str, data: st.DataObject
) -> None:
    lengths = st.floats(1, measured.num_steps + 1)
    accept = Acceptance(data.draw(lengths), data.draw(lengths), 1.0)
    machine = Machine(
        max_running_requests=data.draw(st.integers(1, 20)), overlap=data.draw(st.booleans())
    )
    asked = scenario(measured, load, accept, machine=machine)
    if isinstance(policy, str):
        policy = make_policy(policy, asked)
    result = asked.simulate(policy, intervals=5)

    assert 0 <= result.regret < 1
    assert len(result.intervals) <= 10
    for name in ("tokens", "steps", "switches", "batch_steps"):
        assert getattr(result, name) == sum(getattr(each, name) for each in result.intervals)
    assert result.batch_steps <= result.tokens <= result.batch_steps * (measured.num_steps + 1)
    assert result.seconds <= result.duration * (1 + 1e-9)
    if result.steps:
        assert sum(map(result.share, asked.costs.ladder)) == pytest.approx(1)
    if isinstance(load, Trace):
        wanted = sum(request.output_tokens for request in load.requests)
        assert result.requests == len(load.requests)
        # The last step of a request may gain more than it still needs.
        most = wanted + measured.num_steps * result.requests
        assert wanted - 1e-6 <= result.tokens <= most + 1e-6


# --- baselines ----------------------------------------------------------------------------------


def outcome(batch_size: int, num_steps: int, accept_length: int) -> StepOutcome:
    return StepOutcome(
        step=0,
        num_steps=num_steps,
        batch_size=batch_size,
        accept_lens=(accept_length,) * batch_size,
        seconds=0.01,
    )


def test_sglang_adaptive_follows_the_batch_size() -> None:
    assert answers(SglangAdaptive(), [1, 7, 8, 31, 32, 64, 500]) == [3, 3, 3, 3, 0, 0, 0]
    ladders = {(0, 1): [1, 1, 1, 0], (0, 4): [4, 4, 0, 0], (0, 1, 3, 5, 7): [7, 1, 1, 0]}
    for ladder, expected in ladders.items():
        assert answers(SglangAdaptive(), [1, 8, 32, 64], ladder=ladder) == expected


def test_sglang_adaptive_stops_probes_and_comes_back() -> None:
    policy = SglangAdaptive()
    ran = []
    for step in range(40):
        [num_steps] = answers(policy, [8])
        ran.append(num_steps)
        accepted = 3 if step >= 24 else 0
        policy.observe(outcome(8, num_steps, 1 + min(num_steps, accepted)))
    # 10 to warm up and 5 more; then none for 5, a probe of 5, and none for 5 again.
    assert ran == [3] * 15 + [0] * 5 + [3] * 20


def test_sglang_adaptive_keeps_some_steps_for_few_requests() -> None:
    policy = SglangAdaptive()
    for _ in range(50):
        [num_steps] = answers(policy, [1], ladder=(0, 1, 3, 5, 7))
        policy.observe(outcome(1, num_steps, 1))
    assert num_steps == 1


def test_the_best_threshold_lies_where_the_modes_cross() -> None:
    asked = scenario(load=shape("ramp", low=1, high=16, duration=60))
    found = best_threshold(asked)
    assert isinstance(found, BestThreshold)
    assert 6 <= found.off_at <= 9
    regret = asked.simulate(found).regret
    for n in (1, 3, 5, 12, 17):
        assert asked.simulate(BatchSize(n)).regret >= regret


def test_the_best_threshold_of_a_steady_load_is_its_better_mode() -> None:
    for c in (1, 16):
        asked = scenario(load=constant(c, 5.0))
        assert asked.simulate(best_threshold(asked, tries=1)).regret < 0.001


def test_the_best_threshold_of_a_trace() -> None:
    asked = scenario(load=Trace(requests_of(rate=20, count=200)))
    regret = asked.simulate(best_threshold(asked)).regret
    assert regret <= asked.simulate(Always()).regret
    assert regret <= asked.simulate(Never()).regret


# --- what policy auto must reach ----------------------------------------------------------------

SUBSET = [
    (name, backend, load, accept)
    for name, backend in ((K25, None), (K26, None), (LLAMA, "triton"))
    for load, accept in (("ramp", 2.8), ("square", (1.3, 2.8)), ("bursts", 1.3), ("constant", 2.8))
]


def test_auto_stays_close_to_the_best_mode_of_each_moment() -> None:
    regrets = []
    for name, backend, kind, accept in SUBSET:
        costs = StepCosts(read_table(name), backend)
        low, high = default_levels(kind, costs, 128)
        high = 16 if kind == "constant" else high
        low_accept, high_accept = accept if isinstance(accept, tuple) else (accept, accept)
        # The slow servers take few steps in this time, the fast one many.
        duration = 120.0 if name == LLAMA else 480.0
        asked = Scenario(
            costs,
            shape(kind, low=low, high=high, duration=duration),
            Acceptance(low_accept, high_accept, duration),
        )
        regrets.append(asked.simulate(make_policy("auto", asked)).regret)
    assert len(regrets) == 12
    assert statistics.mean(regrets) <= 0.03
    assert max(regrets) <= 0.06


# --- the command --------------------------------------------------------------------------------


def simulate(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["simulate", *argv])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = simulate(
        capsys, "--duration", "5", "--policy", "always", "--policy", "best_threshold"
    )
    assert (code, err) == (0, "")
    assert "Load: ramp, 1 to 256 requests at once, 5 s" in out
    assert "Accept length: 2.2 with 3 draft steps (measured with 2.2)" in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert rows["policy"] == [
        "tok/s",
        "mean",
        "p99",
        "a",
        "minute",
        "plain",
        "3",
        "steps",
        "regret",
    ]
    assert rows["always"][3:6] == ["0.00", "0.0%", "100.0%"]
    assert "best_threshold is batch_size(off_at=" in out


def test_the_command_writes_files_and_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "a" / "b"
    argv = ["--duration", "3", "--load", "bursts", "--high", "32", "--accept", "1.2:3:2", "--seed"]
    code, out, err = simulate(
        capsys, *argv, "7", "--policy", "sglang_adaptive", "--output", str(folder), "--json"
    )
    assert (code, err) == (0, "")
    content = json.loads(out)
    assert content == json.loads((folder / "result.json").read_text())
    assert (folder / "chart.png").read_bytes().startswith(b"\x89PNG")
    conditions = content["conditions"]
    assert conditions["load"] == {
        "kind": "bursts",
        "low": 4,
        "high": 32,
        "prompt_tokens": 128,
        "output_tokens": 256,
    }
    assert conditions["accept_length"] == {"low": 1.2, "high": 3.0, "period": 2.0}
    assert conditions["seed"] == 7
    [policy] = content["policies"]
    assert policy["name"] == "sglang_adaptive"
    assert set(policy["time_share"]) == {"0", "3"}
    assert policy["tokens"] > 0
    assert policy["intervals"][-1]["end"] == policy["simulated_s"]


def test_the_command_takes_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = write(tmp_path / "t.csv", HEADER + "0,10,20\n3,10,20\n")
    code, out, _ = simulate(
        capsys, "--trace", str(trace), "--prefill-rate", "100", "--output", str(tmp_path / "o")
    )
    assert code == 0
    assert "Load: trace t.csv, 2 requests over 3 s" in out
    assert "prefill of 100 tokens/s" in out


def test_the_command_says_what_was_never_measured(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--table", K26, "--load", "constant", "--duration", "2", "--policy", "never"]
    said = "More than 128 requests were never measured"
    assert said in simulate(capsys, *argv, "--high", "200")[1]
    assert said not in simulate(capsys, *argv)[1]


def test_the_command_lists_tables(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = simulate(capsys, "--list-tables")
    assert code == 0
    assert all(name in out for name in shipped_tables())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--load saw", "--load 'saw' is unknown; choose constant, ramp"),
        ("--high 0", "--high '0' is not accepted; give a whole number, 1 to 16384"),
        ("--high ten", "--high 'ten'"),
        ("--low 300", "--low 300 is above --high 256"),
        ("--load constant --low 1", "--low does not go with --load constant"),
        ("--accept 5", "accept length '5' is not accepted; give a number, 1 to 4"),
        ("--accept 1:2:0", "period '0'"),
        ("--accept 1:2:3:4", "has 4 parts; write LENGTH or LOW:HIGH:PERIOD"),
        ("--accept-length 0.5", "--accept-length '0.5'"),
        ("--noise nan", "--noise 'nan' is not accepted; give a number, 0 to 0.5"),
        ("--duration 0", "--duration '0'"),
        ("--policy best", "sglang_adaptive, best_threshold or the text of a policy"),
        ("--trace t --low 1", "--low does not go with --trace"),
        ("--table nothing", "cannot read 'nothing'"),
        ("--backend fa3", "has no backend 'fa3'; it has flashinfer, triton"),
    ],
)
def test_what_the_command_refuses(capsys: pytest.CaptureFixture[str], argv: str, said: str) -> None:
    code, out, err = simulate(capsys, *argv.split())
    assert (code, out) == (2, "")
    assert said in err


def test_the_command_says_what_is_missing_before_it_works(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    usual = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return usual(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    code, _, err = simulate(capsys, "--output", str(tmp_path))
    assert code == 2
    assert "pip install 'sglang-dynspec[demo]'" in err


def test_the_command_says_where_it_cannot_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    file = write(tmp_path / "file", "")
    code, _, err = simulate(capsys, "--duration", "1", "--output", str(file / "in"))
    assert code == 2
    assert "cannot write to --output" in err
    assert issubclass(ConfigError, DynspecError)


def test_progress_is_shown_where_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for screen, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", screen)
        with progress() as update:
            update("fixed(num_steps=[1])", 0.5)
        assert ("[1]" in screen.getvalue()) == shown


GRID = Path(__file__).parent.parent / "examples" / "simulate_grid.py"


@pytest.mark.skipif(not GRID.is_file(), reason="only in a source checkout")
def test_the_grid(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    command = [sys.executable, str(GRID), "--policy", "never", "--seconds", "0.5", "--json", path]
    root = str(Path(sglang_dynspec.__file__).parent.parent)
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    cells = json.loads(path.read_text())
    assert f"{len(cells)} cells of 0.5 simulated seconds." in done.stdout
    assert "Worst of never:" in done.stdout
    assert {cell["table"] for cell in cells} == set(shipped_tables())
    assert all(0 <= cell["regret"] < 1 for cell in cells)
