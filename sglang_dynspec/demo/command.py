"""The subcommand ``demo``: its arguments and its verdict."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from sglang_dynspec.demo.errors import DemoError, UsageError
from sglang_dynspec.demo.load import Stage
from sglang_dynspec.demo.plan import DEFAULT_CLIENTS, DEFAULT_POLICY, Plan, workload
from sglang_dynspec.settings import Settings

if TYPE_CHECKING:
    from sglang_dynspec.demo.report import Report
    from sglang_dynspec.demo.run import Outcome

_N = TypeVar("_N", int, float)

_DESCRIPTION = """\
Start an unmodified SGLang server with a policy, load it with more and then fewer clients, and show
what the policy decided when. Then start a server without speculation, and check that it gives the
same outputs, token for token.

Without --model-path, tiny models made on the fly run on a CPU; this takes about a minute.
Arguments after -- go to both servers, those about speculation only to the first.
"""

_EPILOG = """\
written to --output:
  chart.png                   load, num_steps and accept length over time
  timeline.json               the samples behind it
  server-dynspec.log          what the two servers said
  server-no-speculation.log

exit code: 0 if all outputs are equal and both plain and speculative steps were run; 1 if not, or if
a server failed; 2 if the demo cannot be run as asked.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the demo to a parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument(
        "--policy",
        default=DEFAULT_POLICY,
        metavar="TEXT",
        help="the policy (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        metavar="FOLDER",
        help="where to write; made if missing (default: %(default)s)",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--clients",
        type=_clients,
        default=DEFAULT_CLIENTS,
        metavar="N,N,...",
        help="clients of each stage, every one sending request after request "
        f"(default: {','.join(map(str, DEFAULT_CLIENTS))})",
    )
    load.add_argument(
        "--seconds-per-stage",
        type=_number(float, 0),
        default=2.5,
        metavar="S",
        help="how long a stage lasts at least; in any case until every client has had an answer "
        "(default: %(default)s)",
    )
    load.add_argument(
        "--tokens",
        type=_number(int, 1),
        default=48,
        metavar="N",
        help="output tokens of a request (default: %(default)s)",
    )
    load.add_argument(
        "--prompts",
        type=_number(int, 1),
        default=32,
        metavar="N",
        help="different prompts, taken in turn (default: %(default)s)",
    )
    server = parser.add_argument_group("server")
    server.add_argument("--model-path", metavar="MODEL", help="the model to serve")
    server.add_argument(
        "--draft-model-path", metavar="MODEL", help="its draft; none for models with one built in"
    )
    server.add_argument(
        "--algorithm",
        choices=("EAGLE", "EAGLE3"),
        default="EAGLE3",
        help="--speculative-algorithm (default: %(default)s)",
    )
    server.add_argument(
        "--num-steps",
        type=_number(int, 1),
        default=3,
        metavar="N",
        help="draft steps of a speculative step (default: %(default)s)",
    )
    server.add_argument(
        "--start-timeout",
        type=_number(float, 1),
        default=600.0,
        metavar="S",
        help="seconds that a server may take to start (default: %(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return its exit code.

    Raises:
        DynspecError: it cannot be run as asked.
    """
    _check_installed()
    plan = _plan(arguments)
    work = workload(plan, gpu=_has_gpu())
    plan.output.mkdir(parents=True, exist_ok=True)

    from sglang_dynspec.demo.report import Report
    from sglang_dynspec.demo.run import run as run_demo

    report = Report()
    report.line(f"Policy {plan.policy}; {work.title}")
    try:
        with _terminated_as_interrupted():
            outcome = run_demo(plan, work, report)
    except DemoError as error:
        report.line(f"FAILED: {error}", "bold red")
        return 1
    return _verdict(plan, outcome, report)


def _verdict(plan: Plan, outcome: Outcome, report: Report) -> int:
    from sglang_dynspec.demo.run import CHART_FILE, TIMELINE_FILE
    from sglang_dynspec.observe.plot import draw

    draw(outcome.timeline, plan.output / CHART_FILE)
    report.line(f"Chart: {plan.output / CHART_FILE}; timeline: {plan.output / TIMELINE_FILE}")
    problems = outcome.problems()
    if problems:
        for problem in problems:
            report.line(f"FAILED: {problem}", "bold red")
        return 1
    total = outcome.timeline.total()
    assert total is not None
    steps = {n: count.steps for n, count in total.by_num_steps.items()}
    report.line(
        f"OK: {len(outcome.answers)} outputs equal, token for token, to those without "
        f"speculation; {steps.pop(0)} plain and {sum(steps.values())} speculative steps, "
        f"{outcome.timeline.switches} switches.",
        "bold green",
    )
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    if arguments.draft_model_path and not arguments.model_path:
        raise UsageError("--draft-model-path needs --model-path")
    # Settings read the policy, and bring it to its canonical form.
    policy = Settings(policy=arguments.policy).policy
    if policy is None:
        raise UsageError("--policy is empty")
    return Plan(
        policy=policy,
        stages=tuple(Stage(n, arguments.seconds_per_stage) for n in arguments.clients),
        tokens=arguments.tokens,
        prompts=arguments.prompts,
        output=arguments.output,
        algorithm=arguments.algorithm,
        num_steps=arguments.num_steps,
        model_path=arguments.model_path,
        draft_model_path=arguments.draft_model_path,
        server_arguments=tuple(arguments.rest),
        start_timeout=arguments.start_timeout,
    )


def _check_installed() -> None:
    if find_spec("sglang") is None:
        raise UsageError(
            f"SGLang is not installed for {sys.executable}. Run the demo with the Python that "
            "runs your SGLang"
        )
    missing = [name for name in ("matplotlib", "rich") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the demo needs {' and '.join(missing)}; pip install 'sglang-dynspec[demo]'"
        )


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end the servers as Ctrl-C does: by default it would leave them running."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _clients(text: str) -> tuple[int, ...]:
    at_least_one = _number(int, 1)
    return tuple(at_least_one(word) for word in text.split(","))


def _number(kind: type[_N], least: _N) -> Callable[[str], _N]:
    """Return a function that reads a number from an argument, and refuses one below ``least``."""

    def read(text: str) -> _N:
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not (value >= least and math.isfinite(value)):
            what = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is no {what} >= {least}")
        return value

    return read
