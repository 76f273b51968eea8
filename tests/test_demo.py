"""The demo: its parts by themselves, and all of it once on the installed SGLang."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

pytest.importorskip("rich", reason="the demo extra is not installed")
pytest.importorskip("matplotlib", reason="the demo extra is not installed")

from rich.console import Console

import sglang_dynspec
from sglang_dynspec.cli import main
from sglang_dynspec.demo.client import Client, greedy_payloads
from sglang_dynspec.demo.compare import Difference, differences
from sglang_dynspec.demo.errors import DemoError, UsageError
from sglang_dynspec.demo.load import Answer, Load, Stage
from sglang_dynspec.demo.plan import (
    Plan,
    baseline_environment,
    dynspec_environment,
    without_speculation,
    workload,
)
from sglang_dynspec.demo.prompts import text_prompts, token_prompts
from sglang_dynspec.demo.report import Report
from sglang_dynspec.demo.run import Outcome
from sglang_dynspec.demo.sampler import run_sampled
from sglang_dynspec.demo.server import ServerProcess
from sglang_dynspec.observe.plot import draw, thresholds
from sglang_dynspec.observe.server_info import ModeCount, Status, StatusError
from sglang_dynspec.observe.timeline import Interval, Sample, Timeline, TimelineError
from sglang_dynspec.testing.ports import free_port

POLICY = "batch_size(off_at=4, on_at=3)"


# --- the load ------------------------------------------------------------------------------------
class Desk:
    """Stands in for a server: a test sees the requests that wait, and answers them."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, asyncio.Future[Sequence[int]]]] = []

    async def send(self, prompt: int) -> Sequence[int]:
        future: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()
        self.waiting.append((prompt, future))
        return await future

    def answer(self) -> None:
        """Answer the request that has waited longest."""
        prompt, future = self.waiting.pop(0)
        future.set_result([prompt, prompt])


async def until(condition: Callable[[], bool], desk: Desk | None = None) -> None:
    """Let the event loop go on until something is so, with a desk that answers meanwhile."""
    while not condition():
        if desk is not None and desk.waiting:
            desk.answer()
        await asyncio.sleep(0)


def test_the_load_follows_its_stages() -> None:
    async def scenario() -> list[Answer]:
        desk = Desk()
        load = Load([Stage(1, 0), Stage(3, 0), Stage(1, 0)], desk.send, prompts=4)
        assert (load.clients, load.in_flight, load.seconds) == (0, 0, 0)
        running = asyncio.create_task(load.run())

        await until(lambda: len(desk.waiting) == 1)
        assert (load.stage, load.clients, load.in_flight) == (0, 1, 1)
        await until(lambda: load.stage == 1, desk)
        await until(lambda: len(desk.waiting) == 3)
        assert (load.clients, load.in_flight) == (3, 3)
        await until(lambda: load.stage == 2, desk)
        assert load.clients == 1
        # The other two get their last answers, and send no more.
        await until(lambda: load.in_flight == 1 or running.done(), desk)
        await until(running.done, desk)
        assert (load.clients, load.in_flight) == (0, 0)
        return await running

    answers = asyncio.run(scenario())
    assert all(answer.token_ids == (answer.prompt, answer.prompt) for answer in answers)
    # In turn, beginning anew after the last.
    assert {answer.prompt for answer in answers} == {0, 1, 2, 3}


def test_a_stage_waits_for_each_of_its_clients() -> None:
    async def scenario() -> None:
        desk = Desk()
        load = Load([Stage(2, 0), Stage(1, 0)], desk.send, prompts=100)
        running = asyncio.create_task(load.run())
        await until(lambda: len(desk.waiting) == 2)
        kept = desk.waiting.pop()  # one client gets no answer, the other one many
        for _ in range(20):
            await until(lambda: len(desk.waiting) == 1)
            desk.answer()
        assert load.stage == 0
        kept[1].set_result([1])
        await until(lambda: load.stage == 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())


def test_a_failed_request_ends_the_load_and_the_other_requests() -> None:
    async def scenario() -> None:
        desk = Desk()
        load = Load([Stage(3, 3600)], desk.send, prompts=5)
        running = asyncio.create_task(load.run())
        await until(lambda: len(desk.waiting) == 3)
        desk.waiting[1][1].set_exception(DemoError("refused"))
        with pytest.raises(DemoError, match="refused"):
            await running
        assert load.in_flight == 0
        assert desk.waiting[0][1].cancelled()

    asyncio.run(scenario())


def test_progress_is_a_share_of_the_planned_time() -> None:
    async def scenario() -> None:
        desk = Desk()
        now = 100.0
        load = Load([Stage(1, 0.01), Stage(1, 0.03)], desk.send, prompts=1, clock=lambda: now)
        assert load.progress == 0
        running = asyncio.create_task(load.run())
        await until(lambda: len(desk.waiting) == 1)
        now = 100.005
        assert load.progress == pytest.approx(0.125)
        now = 200.0
        assert load.progress == pytest.approx(0.25)
        await until(lambda: load.stage == 1, desk)
        now = 300.0
        assert load.progress == pytest.approx(1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


# --- prompts and comparison ----------------------------------------------------------------------
def test_token_prompts_are_the_same_every_time_and_all_different() -> None:
    prompts = token_prompts(32, first_id=64, vocab_size=512)
    assert prompts == token_prompts(32, first_id=64, vocab_size=512)
    assert len({tuple(prompt["input_ids"]) for prompt in prompts}) == 32
    assert all(64 <= token < 512 for prompt in prompts for token in prompt["input_ids"])


def test_text_prompts_are_all_different() -> None:
    assert len({prompt["text"] for prompt in text_prompts(100)}) == 100


def test_payloads_are_greedy_and_of_different_lengths() -> None:
    payloads = greedy_payloads([{"text": "a"}] * 10, tokens=48)
    lengths = [payload["sampling_params"]["max_new_tokens"] for payload in payloads]
    assert sum(lengths) / len(lengths) == 48
    assert len(set(lengths)) == 5
    assert {payload["sampling_params"]["temperature"] for payload in payloads} == {0}
    assert greedy_payloads([{}], tokens=1)[0]["sampling_params"]["max_new_tokens"] == 1


@pytest.mark.parametrize(
    ("got", "found"),
    [
        ((5, 6, 7), None),
        ((5, 9, 7), Difference(0, 1, 9, 6)),
        ((5, 6), Difference(0, 2, None, 7)),
        ((5, 6, 7, 8), Difference(0, 3, 8, None)),
        ((), Difference(0, 0, None, 5)),
    ],
)
def test_outputs_are_compared_token_for_token(
    got: tuple[int, ...], found: Difference | None
) -> None:
    answers = [Answer(1, (1, 2)), Answer(0, got)]
    assert differences(answers, {0: [5, 6, 7], 1: [1, 2]}) == ([found] if found else [])


# --- status and timeline -------------------------------------------------------------------------
def counts(**by_num_steps: tuple[int, int, int]) -> dict[int, ModeCount]:
    """`counts(n3=(steps, requests, tokens))`"""
    return {int(name[1:]): ModeCount(*numbers) for name, numbers in by_num_steps.items()}


def sample(time: float, clients: int = 1, **by_num_steps: tuple[int, int, int]) -> Sample:
    return Sample(
        time=time,
        clients=clients,
        in_flight=clients,
        num_steps=3,
        batch_size=clients,
        switches=int(time) // 2,
        by_num_steps=counts(**by_num_steps),
    )


def timeline(*samples: Sample) -> Timeline:
    return Timeline(
        policy=POLICY, ladder=(0, 3), about={"sglang": "0.0", "served": "x"}, samples=[*samples]
    )


RAMP = timeline(
    sample(0, 1, n3=(10, 10, 20)),
    sample(1, 1, n3=(20, 20, 45)),
    sample(2, 6, n3=(30, 30, 70)),
    sample(3, 6, n3=(31, 36, 82), n0=(20, 120, 120)),
    sample(4, 6, n3=(31, 36, 82), n0=(40, 240, 240)),
    sample(5, 0, n3=(31, 36, 82), n0=(40, 240, 240)),
)


def test_status_of_a_server() -> None:
    dynspec = {
        "state": "in_force",
        "policy": "BatchSize(off_at=4)",
        "ladder": [0, 3],
        "num_steps": 0,
        "batch_size": 7,
        "switches": 2,
        "by_num_steps": {"0": {"steps": 5, "requests": 30, "tokens": 30}},
        "error": None,
        "a field of a later version": 1,
    }
    status = Status.from_server_info({"internal_states": [{"dynspec": dynspec}]})
    assert status.in_force
    assert (status.ladder, status.batch_size, status.reason) == ((0, 3), 7, None)
    assert status.by_num_steps == counts(n0=(5, 30, 30))


def test_status_of_a_server_that_refused() -> None:
    info = {"internal_states": [{"dynspec": {"state": "refused", "reason": "no draft"}}]}
    status = Status.from_server_info(info)
    assert not status.in_force
    assert status.reason == "no draft"


@pytest.mark.parametrize("info", [{}, {"internal_states": []}, {"internal_states": [{}]}])
def test_a_server_without_dynspec_has_no_status(info: dict[str, Any]) -> None:
    with pytest.raises(StatusError, match="SGLANG_DYNSPEC_POLICY"):
        Status.from_server_info(info)


def test_intervals_are_differences() -> None:
    first, second, third, *_ = RAMP.intervals()
    assert (first.start, first.end, first.clients) == (0, 1, 1)
    assert (first.num_steps, first.batch_size, first.accept_length) == (3, 1.0, 2.5)
    assert second.tokens_per_second == 25
    assert third.num_steps == 0
    assert third.by_num_steps == counts(n0=(20, 120, 120), n3=(1, 6, 12))
    assert third.accept_length == pytest.approx(132 / 126)


def test_an_interval_without_steps_has_no_values() -> None:
    idle = RAMP.intervals()[-1]
    assert (idle.num_steps, idle.batch_size, idle.accept_length) == (None, None, None)
    assert idle.tokens_per_second == 0


def test_phases_last_as_long_as_clients_and_num_steps_do() -> None:
    speculative, plain = RAMP.phases()
    assert (speculative.start, speculative.end, speculative.num_steps) == (0, 2, 3)
    # With the idle interval, and with the one speculative step of the transition.
    assert (plain.start, plain.end, plain.num_steps) == (2, 5, 0)
    assert plain.total == ModeCount(41, 246, 252)


def test_total_and_switches() -> None:
    total = RAMP.total()
    assert total is not None
    assert total.by_num_steps == counts(n0=(40, 240, 240), n3=(21, 26, 62))
    assert RAMP.switches == 2
    assert (timeline().total(), timeline().phases(), timeline().switches) == (None, [], 0)


def test_a_timeline_comes_back_from_its_file(tmp_path: Path) -> None:
    RAMP.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json") == RAMP


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 99}', '"x"', "\udcff"])
def test_another_file_is_no_timeline(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(TimelineError, match=r"other\.json"):
        Timeline.load(path)


# --- sampling ------------------------------------------------------------------------------------
def status(state: str = "in_force", **values: Any) -> Status:
    return Status(state=state, ladder=(0, 3), **values)


def test_samples_are_taken_before_during_and_after() -> None:
    async def scenario() -> Timeline:
        desk, line, fetched = Desk(), timeline(), 0

        async def fetch() -> Status:
            nonlocal fetched
            fetched += 1
            if desk.waiting and fetched > 5:
                desk.answer()
            return status(batch_size=fetched)

        load = Load([Stage(1, 0)], desk.send, prompts=1)
        await run_sampled(load, fetch, line, every=0)
        assert len(line.samples) == fetched
        return line

    samples = asyncio.run(scenario()).samples
    assert [s.batch_size for s in samples] == [*range(1, len(samples) + 1)]
    assert (samples[0].clients, samples[-1].clients) == (0, 0)
    assert 1 in [s.clients for s in samples]


def test_the_load_ends_when_dynspec_falls_back() -> None:
    async def scenario() -> None:
        desk, answers = Desk(), [status(), status(), status("static", reason="a policy raised")]

        async def fetch() -> Status:
            return answers.pop(0)

        load = Load([Stage(1, 3600)], desk.send, prompts=1)
        with pytest.raises(DemoError, match=r"not in force .*static.*: a policy raised"):
            await run_sampled(load, fetch, timeline(), every=0)
        assert load.in_flight == 0

    asyncio.run(scenario())


# --- pictures and text ---------------------------------------------------------------------------
def test_the_chart_is_a_picture(tmp_path: Path) -> None:
    draw(RAMP, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_the_chart_says_what_it_shows(tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(RAMP, tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    for words in (POLICY, "off_at = 4", "on_at = 3", "num_steps", "plain decode", "[s]"):
        assert words in text


def test_a_timeline_without_steps_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without decode steps"):
        draw(timeline(sample(0), sample(1)), tmp_path / "chart.png")


@pytest.mark.parametrize(
    ("policy", "known"),
    [
        (POLICY, {"off_at": 4, "on_at": 3}),
        ("never", {}),
        ("no_module_of_this_name:Policy", {}),
        (None, {}),
    ],
)
def test_thresholds(policy: str | None, known: dict[str, int]) -> None:
    assert thresholds(policy) == known


def printed(act: Callable[[Report], None]) -> str:
    output = io.StringIO()
    act(Report(Console(file=output, highlight=False)))
    return output.getvalue()


def test_the_table_has_a_line_for_each_phase() -> None:
    lines = printed(lambda report: report.timeline(RAMP)).splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "- " in line]
    assert rows == [
        ["0.0 - 2.0", "1", "1.0", "3", "speculative", "2.50", "25"],
        ["2.0 - 5.0", "6", "6.0", "0", "plain decode", "1.02", "84"],
    ]


def test_a_log_gets_a_line_for_each_stage() -> None:
    def act(report: Report) -> None:
        load = Load([Stage(1, 0), Stage(8, 0)], Desk().send, prompts=1)
        with report.progress() as show:
            for load.stage, load.clients in ((0, 1), (0, 1), (1, 8), (1, 8)):
                show(load)

    lines = printed(act).splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["stage 1 of 2", "stage 2 of 2"]


def test_brackets_in_a_message_are_no_markup() -> None:
    assert printed(lambda report: report.line("[red] x[0]")) == "[red] x[0]\n"


# --- the verdict ---------------------------------------------------------------------------------
def test_no_problems() -> None:
    assert Outcome(RAMP, [Answer(0, (1,))], []).problems() == []


def test_a_mode_that_was_not_used_is_a_problem() -> None:
    line = replace(RAMP, samples=RAMP.samples[:3])
    [problem] = Outcome(line, [Answer(0, (1,))], []).problems()
    assert "num_steps 0" in problem


def test_a_different_output_is_a_problem() -> None:
    wrong = [Difference(7, 2, 5, 6)]
    [problem] = Outcome(RAMP, [Answer(7, (1,))], wrong).problems()
    assert "1 of 1 outputs" in problem
    assert "prompt 7, output token 2: token 5 with dynspec, token 6 without" in problem
    assert "rounding" not in problem
    [problem] = Outcome(RAMP, [Answer(7, (1,))], wrong, frozenset({7})).problems()
    assert "rounding" in problem


# --- what is served ------------------------------------------------------------------------------
def plan(tmp_path: Path = Path(), **changes: Any) -> Plan:
    return replace(
        Plan(
            policy=POLICY, stages=(Stage(1, 1), Stage(9, 1)), tokens=4, prompts=3, output=tmp_path
        ),
        **changes,
    )


def test_on_a_gpu_a_model_must_be_named() -> None:
    with pytest.raises(UsageError, match="--model-path"):
        workload(plan(), gpu=True)


def test_a_model_of_the_users() -> None:
    work = workload(
        plan(
            model_path="m",
            draft_model_path="d",
            server_arguments=("--speculative-attention-mode", "decode", "--dtype", "half"),
        ),
        gpu=True,
    )
    assert " ".join(work.with_speculation) == (
        "--model-path m --speculative-algorithm EAGLE3 --speculative-num-steps 3 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
        "--speculative-draft-model-path d --speculative-attention-mode decode --dtype half "
        "--max-running-requests 48"
    )
    assert " ".join(work.without_speculation) == (
        "--model-path m --dtype half --max-running-requests 48"
    )
    assert set(work.prompts[0]) == {"text"}


def test_max_running_requests_is_the_users_if_given() -> None:
    given = ("--max-running-requests=100",)
    work = workload(plan(model_path="m", server_arguments=given), gpu=True)
    assert work.without_speculation == ("--model-path", "m", *given)


def test_the_tiny_models_need_no_gpu() -> None:
    work = workload(plan(server_arguments=("--random-seed", "5")), gpu=False)
    assert "EAGLE3" in work.with_speculation
    assert not any(word.startswith("--speculative") for word in work.without_speculation)
    for words in (work.with_speculation, work.without_speculation):
        assert words[-2:] == ("--random-seed", "5")
    assert set(work.prompts[0]) == {"input_ids"}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("--a 1 --speculative-x 2 --b", "--a 1 --b"),
        ("--speculative-x=2 --b 1 2", "--b 1 2"),
        ("--a --speculative-x", "--a"),
        ("", ""),
    ],
)
def test_arguments_without_speculation(given: str, kept: str) -> None:
    assert without_speculation(given.split()) == tuple(kept.split())


def test_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("SGLANG_DYNSPEC_POLICY", "always")
    monkeypatch.setenv("SGLANG_DYNSPEC_CONFIG", "/some/file")
    ours, base = dynspec_environment(plan(), {"A": "1"}), baseline_environment({"A": "1"})
    assert ours["SGLANG_DYNSPEC_POLICY"] == POLICY
    assert not {"SGLANG_DYNSPEC_POLICY", "SGLANG_DYNSPEC_CONFIG"} & set(base)
    for environment in (ours, base):
        assert environment["A"] == "1"
        bootstrap, rest = environment["PYTHONPATH"].split(os.pathsep)
        assert (Path(bootstrap) / "sitecustomize.py").is_file()
        assert rest == "/elsewhere"


# --- a server process ----------------------------------------------------------------------------
SERVE = """
    import http.server, json, os, subprocess, sys
    print("a line of the log", flush=True)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found = {"/health": {}, "/child": child.pid}.get(self.path)
            self.send_response(200 if found is not None else 404)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def do_POST(self):
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"no such prompt")

    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def fake_server(tmp_path: Path, code: str = SERVE) -> ServerProcess:
    port = free_port()
    return ServerProcess(
        "the server",
        [sys.executable, "-c", textwrap.dedent(code), str(port)],
        port=port,
        # As it is, it would start the CPU engine.
        environment={k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")},
        log=tmp_path / "server.log",
    )


def test_a_server_is_stopped_with_all_its_processes(tmp_path: Path) -> None:
    with fake_server(tmp_path) as server:
        server.wait_ready(60)
        server.check_alive()
        with urllib.request.urlopen(f"{server.url}/child") as answer:
            child = psutil.Process(json.load(answer))
        assert child.is_running()
    gone, alive = psutil.wait_procs([child], timeout=30)
    assert (gone, alive) == ([child], [])
    server.stop()  # a second time does nothing
    assert "a line of the log" in server.log_tail()


def test_a_server_that_ignores_the_polite_signal_is_stopped(tmp_path: Path) -> None:
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    with fake_server(tmp_path, ignore + textwrap.dedent(SERVE)) as server:
        server.wait_ready(60)
        assert server._process is not None
        process = psutil.Process(server._process.pid)
        server.stop(grace=0.2)
    assert not process.is_running()


def test_a_server_that_ends_is_no_server(tmp_path: Path) -> None:
    with fake_server(tmp_path, "print('out of memory'); raise SystemExit(3)") as server:
        with pytest.raises(DemoError, match=r"has ended \(exit code 3\)(?s:.*)out of memory"):
            server.wait_ready(60)
        # And it is said again for as long as one asks.
        with pytest.raises(DemoError, match="exit code 3"):
            server.check_alive()


def test_a_killed_server_is_no_server(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    ended = pytest.raises(DemoError, match=r"has ended \(SIGKILL\)(?s:.*)it is empty")
    with fake_server(tmp_path, code) as server, ended:
        server.wait_ready(60)


def test_waiting_for_a_server_has_an_end(tmp_path: Path) -> None:
    ended = pytest.raises(DemoError, match=r"not ready after 0\.1 s")
    with fake_server(tmp_path, "import time; time.sleep(3600)") as server, ended:
        server.wait_ready(0.1)


def test_what_the_client_says_of_errors(tmp_path: Path) -> None:
    async def ask(url: str) -> None:
        async with Client(url) as client:
            with pytest.raises(DemoError, match=r"POST /generate: HTTP 400 .*no such prompt"):
                await client.generate({})
            with pytest.raises(DemoError, match=r"GET /server_info: HTTP 404"):
                await client.status()

    async def ask_in_vain(url: str) -> None:
        async with Client(url) as client:
            with pytest.raises(DemoError, match=r"GET /server_info: Client"):
                await client.status()

    with fake_server(tmp_path) as server:
        server.wait_ready(60)
        asyncio.run(ask(server.url))
    asyncio.run(ask_in_vain(server.url))


# --- the command ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--clients", "1,0"], "'0' is no whole number >= 1"),
        (["--clients", "1,x"], "'x' is no whole number >= 1"),
        (["--seconds-per-stage", "nan"], "'nan' is no number >= 0"),
        (["--tokens", "1.5"], "'1.5' is no whole number >= 1"),
        (["--policy", "no_such_policy"], "no_such_policy"),
        (["--policy", ""], "policy"),
        (["--draft-model-path", "d"], "--draft-model-path needs --model-path"),
    ],
)
def test_wrong_arguments(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    try:
        code: object = main(["demo", "--output", str(output), *argv])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("missing", "message"),
    [("sglang", "SGLang is not installed"), ("rich", "sglang-dynspec[demo]")],
)
def test_what_is_not_installed_is_named(
    missing: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "sglang_dynspec.demo.command.find_spec", lambda n: None if n == missing else find_spec(n)
    )
    assert main(["demo"]) == 2
    assert message in capsys.readouterr().err


def demo(output: Path, *options: str) -> subprocess.Popen[str]:
    root = Path(sglang_dynspec.__file__).parent.parent
    return subprocess.Popen(
        [sys.executable, "-m", "sglang_dynspec", "demo", "--output", str(output), *options],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_whole_demo(tmp_path: Path) -> None:
    short = ("--seconds-per-stage", "0", "--tokens", "32", "--prompts", "8")
    with demo(tmp_path / "new" / "folder", "--clients", "1,8,1", *short) as process:
        printed, _ = process.communicate()
    assert process.returncode == 0, printed
    assert "OK: " in printed
    assert (tmp_path / "new/folder/chart.png").stat().st_size > 0
    line = Timeline.load(tmp_path / "new/folder/timeline.json")
    assert (line.policy, line.ladder) == (POLICY, (0, 3))
    total: Interval | None = line.total()
    assert total is not None
    assert set(total.by_num_steps) == {0, 3}
    assert total.by_num_steps[0].tokens == total.by_num_steps[0].requests
    assert total.by_num_steps[3].tokens > total.by_num_steps[3].requests


def test_a_demo_that_is_ended_leaves_no_server(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        parent = psutil.Process(process.pid)
        assert process.stdout is not None
        # This line comes when its server is about to be started, or has been.
        while not process.stdout.readline().startswith("Starting the server"):
            assert process.poll() is None
        while not (children := parent.children(recursive=True)):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate()
    assert process.returncode == 130, printed
    assert "interrupted" in printed
    assert not [child for child in children if child.is_running()]
