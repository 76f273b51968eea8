"""The trace of decisions: the writer, what a scheduler writes, the chart, the replay."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.in_force import in_force, prompts
from support.policies import Alternate

import sglang_dynspec
from sglang_dynspec import Always, BatchSize, BatchView, Policy, cli
from sglang_dynspec.engine import install, tracing
from sglang_dynspec.engine.controller import Controller
from sglang_dynspec.errors import ConfigError
from sglang_dynspec.observe.trace import CLOSED, FORMAT, Line, TraceWriter
from sglang_dynspec.observe.trace_file import TraceError, TraceFile, read_trace
from sglang_dynspec.settings import Settings
from sglang_dynspec.simulate.replay import (
    ReplayedAcceptance,
    ReplayedLoad,
    acceptance_of,
    costs_of,
)
from sglang_dynspec.testing.scheduler import InProcessScheduler, Request

EXAMPLE = Path(__file__).parents[1] / "examples" / "trace" / "trace.jsonl"
HEADER = {"policy": "always", "ladder": [0, 3], "max_running_requests": 8}


def line(step: int, **fields: Any) -> Line:
    """A line at one second per step."""
    usual: dict[str, Any] = {
        "time": 1000.0 + step,
        "step": step,
        "why": "every",
        "num_steps": 3,
        "previous": 3,
        "reason": "policy",
        "batch_size": 2,
        "context_tokens": 100,
        "waiting": 0,
        "kv_usage": 0.5,
        "cold": 0,
        "totals": {3: (step, 2 * step, 4 * step, 0.01 * step)},
    }
    return Line(**usual | fields)


def write(path: Path, lines: list[Line], **how: Any) -> TraceWriter:
    """Write a whole trace."""
    writer = TraceWriter(str(path), HEADER, **how)
    writer.start()
    for each in lines:
        writer.put(each)
    writer.close()
    return writer


def contents(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines() if text]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="sglang_dynspec")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "sglang_dynspec"]


# --- the writer ---------------------------------------------------------------------------------


def test_a_header_and_then_what_each_line_adds(path: Path) -> None:
    predicted = {"0": 10.04, "3": 20}
    writer = write(path, [line(0, totals={}), line(5), line(8, predicted=predicted)])
    header, first, second, third = contents(path)
    assert (header["trace"], header["ladder"]) == (FORMAT, [0, 3])
    assert first["steps"] == {}
    assert second["steps"] == {"3": {"steps": 5, "requests": 10, "tokens": 20, "seconds": 0.05}}
    assert third["steps"] == {"3": {"steps": 3, "requests": 6, "tokens": 12, "seconds": 0.03}}
    assert third["predicted"] == {"0": 10.0, "3": 20.0}
    assert writer.as_dict() == {"path": str(path), "lines": 3, "dropped": 0, "off": CLOSED}


def test_counts_that_begin_again_are_no_loss(path: Path) -> None:
    write(path, [line(9), line(2)])
    assert contents(path)[2]["steps"]["3"]["steps"] == 2


def test_a_file_that_is_full_is_kept_once(path: Path) -> None:
    write(path, [line(i) for i in range(40)], limit=4000)
    old = path.with_name("trace.jsonl.1")
    assert sorted(os.listdir(path.parent)) == ["trace.jsonl", "trace.jsonl.1"]
    assert 4000 <= old.stat().st_size < 4500
    assert contents(old)[0]["run"] == contents(path)[0]["run"]
    steps = [entry.step for entry in read_trace(path).entries]
    assert steps == list(range(steps[0], 40))
    assert 0 < steps[0] < 30


def test_a_line_too_many_is_dropped_and_counted(path: Path) -> None:
    writer = TraceWriter(str(path), HEADER, most=3)
    for i in range(10):  # nobody writes yet
        writer.put(line(i))
    assert (writer.dropped, writer.lines) == (7, 0)
    writer.start()
    writer.close()
    *_, last = contents(path)
    assert (last["step"], last["dropped"], writer.lines) == (2, 7, 3)


def test_another_run_in_the_same_file(path: Path) -> None:
    write(path, [line(i) for i in range(3)])
    with path.open("a") as file:
        file.write('{"time":10')  # killed
    write(path, [line(i, num_steps=0) for i in range(2)])
    trace = read_trace(path)
    assert trace.runs == 2
    assert [entry.num_steps for entry in trace.entries] == [0, 0]


class Full(io.StringIO):
    """A file on a disk that is full after the header."""

    def __init__(self) -> None:
        super().__init__()
        self.flushes = 0
        self.failed = threading.Event()

    def flush(self) -> None:
        self.flushes += 1
        if self.flushes > 1:
            self.failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        self.flush()


def test_a_full_disk_is_said_once(path: Path, warnings: Callable[[], list[str]]) -> None:
    file = Full()
    writer = TraceWriter(str(path), HEADER, opener=lambda *_args, **_kwargs: file)
    writer.start()
    for i in range(5):
        writer.put(line(i))
    assert file.failed.wait(60)
    writer.close()
    writer.put(line(6))
    assert writer.off == "No space left on device"
    [said] = warnings()
    for word in (str(path), "No space left on device", "has room", "SGLANG_DYNSPEC_TRACE"):
        assert word in said


@pytest.mark.parametrize("kind", ["no such folder", "a folder", "a pipe"])
def test_a_path_that_cannot_be_written(
    path: Path, kind: str, warnings: Callable[[], list[str]]
) -> None:
    bad = {"no such folder": path / "in", "a folder": path.parent, "a pipe": path}[kind]
    if kind == "a pipe":  # which would wait for its reader
        os.mkfifo(path)
        with pytest.raises(ConfigError, match="no regular file"):
            Settings(trace=str(path))
    writer = write(bad, [line(0)])
    missing = kind == "no such folder"
    assert writer.off == ("No such file or directory" if missing else "Not a regular file")
    [said] = warnings()
    assert f"the trace {str(bad)!r} is off: {writer.off}" in said
    assert "Name a file in a folder that is there" in said


def test_what_cannot_be_written_as_json_ends_the_trace(
    path: Path, warnings: Callable[[], list[str]]
) -> None:
    writer = write(path, [line(0, predicted={"0": "much"})])
    assert writer.off is not None
    assert "ValueError" in writer.off
    assert "a bug of sglang_dynspec" in warnings()[0]


def test_the_file_of_a_replica() -> None:
    assert tracing.file_of("/a.b/t.jsonl", None) == "/a.b/t.jsonl"
    assert tracing.file_of("/a.b/t.jsonl", 0) == "/a.b/t.jsonl"
    assert tracing.file_of("/a.b/t.jsonl", 2) == "/a.b/t.dp2.jsonl"
    assert tracing.file_of("/a.b/t", 1) == "/a.b/t.dp1"


def test_one_rank_writes_for_all(path: Path) -> None:
    controller = Controller(Always(), (0, 3))
    runtime: Any = SimpleNamespace(ranks=SimpleNamespace(leads=False), controller=controller)
    install._trace(runtime, str(path), Settings())
    assert controller.trace is None
    assert not path.exists()


# --- which decisions get a line -----------------------------------------------------------------


class Tracing:
    """A controller with a trace, and a clock of its own."""

    def __init__(self, path: Path, policy: Policy, every: int = 4) -> None:
        self.now = 50.0
        self.controller = Controller(policy, (0, 3), lambda: self.now)
        writer = TraceWriter(str(path), HEADER)
        self.trace = self.controller.trace = tracing.Trace(writer, every, policy)

    def step(self, batch_size: int = 2) -> None:
        controller = self.controller
        view = BatchView(batch_size=batch_size, ladder=(0, 3), step=controller.next_step)
        decision = controller.decide(view)
        controller.take(decision)
        self.now += 0.01
        controller.finished(decision, [1 + decision.num_steps] * batch_size)


def test_lines_for_changes_for_every_so_many_steps_and_after_a_pause(path: Path) -> None:
    tracing_ = Tracing(path, BatchSize(off_at=4))
    for batch_size in (1, 1, 1, 1, 1, 1, 4, 4, 4):
        tracing_.step(batch_size)
    tracing_.now += 60.0
    tracing_.step(4)
    tracing_.controller.end_trace()
    _, *lines = contents(path)
    assert [(each["step"], each["why"]) for each in lines] == [
        (0, "first"),
        (4, "every"),
        (6, "changed"),
        (9, "resumed"),
        (9, "end"),
    ]
    assert lines[3]["pause"] == pytest.approx(60.01)
    assert lines[2]["steps"]["3"]["steps"] == 2
    assert sum(count["steps"] for each in lines for count in each["steps"].values()) == 10


def test_another_policy_is_named(path: Path) -> None:
    tracing_ = Tracing(path, Always(), every=1)
    tracing_.step()
    tracing_.controller.use(BatchSize(off_at=1))
    tracing_.step()
    tracing_.step()
    tracing_.controller.end_trace()
    _, *lines = contents(path)
    assert [each["policy"] for each in lines][:3] == [None, "batch_size(off_at=1)", None]


class Explains(Policy):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def decide(self, batch: BatchView) -> int:
        return 3

    def explain(self) -> dict[str, Any]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return {"tokens_per_second": self.answer}


@pytest.mark.parametrize(
    ("answer", "written"), [({"3": 70.0}, {"3": 70.0}), (3, None), (RuntimeError("boom"), None)]
)
@pytest.mark.parametrize("wrap", [lambda policy: policy, lambda policy: Always() & policy])
def test_predictions_are_those_of_explain(
    path: Path, answer: Any, written: Any, wrap: Callable[[Policy], Policy]
) -> None:
    tracing_ = Tracing(path, wrap(Explains(answer)))
    tracing_.step()
    tracing_.controller.end_trace()
    assert contents(path)[1]["predicted"] == written


def test_a_trace_that_fails_leaves_the_server_alone(
    path: Path, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracing_ = Tracing(path, Always(), every=1)

    def boom(*_args: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(tracing_.trace, "_put", boom)
    tracing_.step()
    tracing_.step()
    status = tracing_.controller.as_dict()
    assert status["error"] is None
    assert status["steps"] == 2
    assert status["trace"]["off"] == "RuntimeError: boom"
    assert len(warnings()) == 1


# --- in a scheduler -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The trace of a real scheduler that changes its mode, and its status at the end."""
    path = tmp_path_factory.mktemp("traced") / "trace.jsonl"
    sglang_dynspec.activate("batch_size(off_at=4, on_at=3)", trace=path, trace_every=5, strict=True)
    try:
        with InProcessScheduler("EAGLE3") as scheduler:
            requests = [
                Request(input_ids=ids, max_new_tokens=40, arrive_at_step=arrival)
                for ids, arrival in zip(
                    prompts(9, seed=4), (0, 0, 30, 30, 30, 30, 80, 120, 160), strict=True
                )
            ]
            scheduler.run(requests)
            status = install.status()
    finally:
        sglang_dynspec.deactivate()
    return path, status


def test_lines_agree_with_the_status(traced: tuple[Path, dict[str, Any]]) -> None:
    path, status = traced
    header, *lines = contents(path)
    assert header["policy"] == status["policy"]
    assert (header["ladder"], header["every"]) == (status["ladder"], 5)
    assert header["max_running_requests"] >= 4
    assert header["model_path"]
    totals: dict[str, Counter[str]] = {}
    for each in lines:
        for n, count in each["steps"].items():
            totals.setdefault(n, Counter()).update(count)
    for n, count in status["by_num_steps"].items():
        assert totals[n] == pytest.approx(count, abs=1e-3)
    changed = [each for each in lines if each["num_steps"] != each["previous"]]
    assert len(changed) == status["switches"] > 0
    assert {each["reason"] for each in changed} == {"policy"}
    assert [each["why"] for each in lines].count("end") == 1
    assert lines[-1]["step"] == status["steps"] - 1
    gaps = [b["step"] - a["step"] for a, b in pairwise(lines)]
    assert max(gaps) == 5
    assert status["trace"]["path"] == str(path)
    assert (status["trace"]["off"], status["trace"]["dropped"]) == (None, 0)


def test_a_server_whose_trace_cannot_be_written_serves(
    path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    # As where the folder has gone since, or is missing on the machine that serves.
    folder = path.parent / "gone"
    folder.mkdir()
    monkeypatch.setenv("SGLANG_DYNSPEC_TRACE", str(folder / "trace.jsonl"))
    opened = TraceWriter._open
    monkeypatch.setattr(TraceWriter, "_open", lambda self: (folder.rmdir(), opened(self)))
    with in_force("EAGLE3") as server:
        server.run(Alternate(), [Request(input_ids=prompts(1, seed=1)[0], max_new_tokens=8)])
        status = install.status()
    assert status["state"] == "in_force"
    assert status["by_num_steps"]["0"]["steps"] > 0
    assert status["trace"]["off"] == "No such file or directory"
    assert len([said for said in warnings() if "the trace" in said]) == 1


# --- the chart ----------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    return code, *capsys.readouterr()


def test_the_chart_of_a_real_trace(
    traced: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path, status = traced
    picture = tmp_path / "chart.png"
    code, out, _ = run(capsys, "plot", str(path), "--output", str(picture))
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"{status['switches']} switches ({status['switches']} by policy)" in out
    code, _, err = run(capsys, "plot", str(path), "--output", str(tmp_path / "chart.foo"))
    assert code == 2
    assert "ends in .png, .svg or .pdf" in err


def test_a_chart_with_predictions_waiting_requests_and_a_pause(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    lines = [line(i, waiting=i, predicted={"3": 400.0}) for i in range(5)]
    lines += [line(900, pause=890.0, num_steps=0, reason="catch_up"), line(910, num_steps=0)]
    write(path, lines)
    assert run(capsys, "plot", str(path))[0] == 0
    assert path.with_suffix(".png").exists()


def _cut(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def test_a_last_line_that_was_cut_off_is_left_out(path: Path) -> None:
    write(path, [line(i) for i in range(3)])
    _cut(path, '{"time":1003.0,"st')
    assert len(read_trace(path).entries) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, ["cannot read the trace", "No such file", "SGLANG_DYNSPEC_TRACE"]),
        ("arrival,prompt_tokens\n", ["line 1 is 'arrival,", 'begins with {"trace":1']),
        ('{"arrival": 1}\n', ["line 1", 'begins with {"trace":1']),
        ("", ["holds 0 decisions", "2 are needed"]),
        (
            '{"trace":2,"run":"a","ladder":[0,3],"dynspec":"9.0"}\n',
            ["format 2", "reads 1", "the version that wrote it (9.0)"],
        ),
        ('{"trace":1,"run":"a"}\n', ["line 1 lacks a run or a ladder"]),
        ('{"trace":1,"run":"a","ladder":[0,3]}\n{"x\n{"time":1}\n', ["line 2 is no JSON object"]),
        (
            '{"trace":1,"run":"a","ladder":[0,3]}\n{"time":1}\n{"time":2}\n',
            ["line 2 has no 'step'", "take the line out"],
        ),
        (
            '{"trace":1,"run":"a","ladder":[0,3]}\n{"time":"x"}\n{"time":2}\n',
            ["line 2 has 'x' where a number of seconds must be"],
        ),
    ],
)
def test_files_that_are_no_trace(path: Path, text: str | None, said: list[str]) -> None:
    if text is not None:
        path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    for word in [str(path), *said]:
        assert word in str(caught.value)


# --- the replay ---------------------------------------------------------------------------------


def both_modes(path: Path) -> TraceFile:
    """Ten lines of ten steps each, plain and speculative by turns, at 2, 4 and 8 requests."""
    lines, totals = [], {0: (0, 0, 0, 0.0), 3: (0, 0, 0, 0.0)}
    for i in range(30):
        lines.append(line(i, totals=dict(totals), num_steps=3 * (i % 2)))
        n, size = 3 * (i % 2), 2 << i // 10
        steps, requests, tokens, seconds = totals[n]
        per_step, gained = (0.02, 3) if n else (0.01, 1)
        totals[n] = (
            steps + 10,
            requests + 10 * size,
            tokens + 10 * size * gained,
            seconds + 10 * per_step,
        )
    write(path, lines)
    return read_trace(path)


def test_costs_acceptance_and_load_of_a_trace(path: Path) -> None:
    trace = both_modes(path)
    costs, said = costs_of(trace)
    assert costs is not None, said
    assert costs.ladder == (0, 3)
    assert costs.seconds(4, 50) == pytest.approx({0: 0.01, 3: 0.02})
    acceptance = acceptance_of(trace, 3)
    assert isinstance(acceptance, ReplayedAcceptance)
    assert acceptance.at(12.0) == pytest.approx(3.0, abs=0.03)
    load = ReplayedLoad(trace)
    assert [load.level(time) for time in (0.5, 10.5, 28.5, 99.0)] == [2, 4, 8, 0]
    assert load.prompt_tokens == 50


def test_costs_need_both_modes_at_one_batch_size(path: Path) -> None:
    costs, said = costs_of(read_trace(EXAMPLE))
    assert costs is None
    assert "plain steps at 6.2 to 18.8 requests and those with 3 draft steps at 1 to 5.58" in said
    write(path, [line(i * 30) for i in range(5)])
    costs, said = costs_of(read_trace(path))
    assert costs is None
    assert "fewer than 50 steps with 0 draft steps" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "Step seconds from the trace: 0 draft steps at 2 to 8 requests, 150 of them"),
        (("--table", "llama-8b-h200"), "Step seconds from the table llama-8b-h200"),
        (("--accept", "1.5"), "Accept lengths from --accept"),
    ],
)
def test_a_replay_says_what_is_from_the_trace(
    path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    both_modes(path)
    code, out, _ = run(
        capsys, "simulate", "--replay", str(path), "--policy", "never", "--policy", "auto", *options
    )
    assert code == 0
    words = " ".join(out.split())
    assert said in words
    assert "replay of trace.jsonl, batches up to 8 requests" in words
    assert "at most 8 running requests" in words


def test_a_real_trace_replays(
    traced: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = traced
    code, out, _ = run(capsys, "simulate", "--replay", str(path), "--policy", "always", "--json")
    assert code == 0
    result = json.loads(out)
    assert result["policies"][0]["steps"] > 0
    assert result["conditions"]["load"]["kind"] == "replay"
    assert "From the trace" in result["conditions"]["notes"][0]


def test_a_replay_brings_its_own_load(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both_modes(path)
    code, _, err = run(capsys, "simulate", "--replay", str(path), "--low", "3")
    assert code == 2
    assert "--low does not go with --replay" in err
