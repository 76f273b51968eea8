"""The subcommand ``simulate``: its arguments, and the scenario that follows from them."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_dynspec.errors import ConfigError, PolicyError
from sglang_dynspec.measured import Table, read_table, shipped_tables
from sglang_dynspec.observe.trace_file import TraceFile
from sglang_dynspec.observe.trace_file import read_trace as read_decisions
from sglang_dynspec.policy import Policy, parse_policy
from sglang_dynspec.simulate.acceptance import MOST_REQUESTS, Acceptance
from sglang_dynspec.simulate.baselines import BestThreshold, SglangAdaptive, best_threshold
from sglang_dynspec.simulate.costs import StepCosts
from sglang_dynspec.simulate.load import MOST_TOKENS, SHAPES, Load, read_trace, shape
from sglang_dynspec.simulate.progress import Update, progress
from sglang_dynspec.simulate.replay import (
    OUTPUT_TOKENS,
    ReplayedLoad,
    acceptance_of,
    costs_of,
)
from sglang_dynspec.simulate.report import Outcome, Report, as_json, as_text
from sglang_dynspec.simulate.scenario import Scenario
from sglang_dynspec.simulate.server import Machine

DEFAULT_TABLE = "llama-8b-h200"
BASELINES = ("sglang_adaptive", "best_threshold")
"""Names that stand for a policy here, and are no policy's text."""
_DEFAULT_CONTEXT = 128
"""Prompt tokens where the table does not say."""
_USUAL_MOST = 256
"""The most that is asked by default: so many SGLang has CUDA graphs for, as a rule."""
_LEVELS = {"bursts": 4}
"""Requests at once between bursts, by default; other loads begin at 1."""
RESULT_FILE, CHART_FILE = "result.json", "chart.png"

_DESCRIPTION = """\
Run policies against a model of a server: measured costs of a step, a load over time, an accept
length over time. Says for each policy the tokens per second, how often it changed the mode, and its
regret: the share of the decode time that the best mode of each moment would have saved.
"""

_EPILOG = """\
policies (--policy, repeatable):
  any policy's text     auto, always, never, "batch_size(off_at=32)", package.module:Class(...)
  sglang_adaptive       a model of SGLang 0.5.23's --speculative-adaptive
  best_threshold        the batch_size(off_at=N) that is best for this very load, found by trying;
                        no server knows it

loads (--load):
  constant              --high requests at once
  ramp                  from --low to --high and back
  square                --low and --high by turns, a minute each
  bursts                --low, and --high in 5 s of every 30
  diurnal               a sine from --low to --high and back, twice

a replay (--replay):    what a server with SGLANG_DYNSPEC_TRACE=FILE has written: its batch sizes
                        and accept lengths over time and, without --table, the seconds of its own
                        steps where it ran enough of them

a trace (--trace):      CSV with the header arrival,prompt_tokens,output_tokens, or one JSON object
                        a line with these keys; arrival in seconds

exit code: 0 if the simulation ran; 2 if it cannot be run as asked.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument(
        "--policy",
        action="append",
        metavar="TEXT",
        help="a policy to run, repeatable, see below (default: auto)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help=f"write {RESULT_FILE} and {CHART_FILE} there; made if missing",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--list-tables", action="store_true", help="say which tables come with the package"
    )
    _add_costs(parser.add_argument_group("what a step costs"))
    _add_load(parser.add_argument_group("load"))
    _add_server(parser.add_argument_group("server"))


def _add_costs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--table",
        metavar="FILE",
        help="measured throughput, as advise takes it, or a shipped table's name "
        f"(default: {DEFAULT_TABLE})",
    )
    group.add_argument("--backend", metavar="NAME", help="its attention backend (default: first)")
    group.add_argument(
        "--accept-length",
        metavar="LENGTH",
        help="tokens a request gained in a speculative step of the measurement "
        "(default: the table's, else 2.2)",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--load", metavar="KIND", help=f"{', '.join(SHAPES)} (default: ramp), see below"
    )
    group.add_argument(
        "--low", metavar="N", help="requests at once at least (default: 1; bursts 4)"
    )
    group.add_argument(
        "--high",
        metavar="N",
        help="requests at once at most (default: the most that was measured, up to "
        f"{_USUAL_MOST}; square: half and twice the crossover)",
    )
    group.add_argument("--trace", metavar="FILE", help="requests with their arrivals, see below")
    group.add_argument(
        "--replay", metavar="FILE", help="the decisions that a server has traced, see below"
    )
    group.add_argument("--duration", metavar="S", help="simulated seconds (default: 600)")
    group.add_argument(
        "--prompt-tokens",
        metavar="N",
        help="of a request (default: the table's shortest, or 128 where it does not say)",
    )
    group.add_argument(
        "--output-tokens", metavar="N", help="of a request, on average (default: 256)"
    )
    group.add_argument(
        "--accept",
        metavar="LENGTH",
        help="accept length of a speculative step, or LOW:HIGH[:PERIOD] for one that swings, in "
        "PERIOD seconds (600) there and back (default: as measured)",
    )


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-running-requests", metavar="N", help="(default: 256; of a replay: the server's)"
    )
    group.add_argument(
        "--prefill-rate",
        metavar="TOK/S",
        help="prompt tokens a second, during which nothing is decoded (default: the table's "
        "throughput includes prefill)",
    )
    group.add_argument(
        "--noise",
        metavar="SHARE",
        default=0.03,
        help="standard deviation of a step's seconds (default: %(default)s)",
    )
    group.add_argument("--seed", metavar="N", default=0, help="of chance (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Simulate and return the exit code.

    Raises:
        DynspecError: it cannot be run as asked.
    """
    if arguments.list_tables:
        print("\n".join(_table_lines()))
        return 0
    names = list(dict.fromkeys(arguments.policy or ["auto"]))
    for name in names:
        _check_policy(name)
    if arguments.output is not None:
        from sglang_dynspec.observe.figure import check_matplotlib

        # Before the work, not after it.
        check_matplotlib()
        _make(arguments.output)
    table, scenario, load, notes = _asked(arguments)
    report = Report(table, scenario, load, compare(scenario, names), notes)
    content = as_json(report)
    if arguments.output is not None:
        _write(report, content, arguments.output)
    print(json.dumps(content, indent=1) if arguments.json else as_text(report))
    if arguments.output is not None and not arguments.json:
        print(f"\nWritten: {arguments.output / RESULT_FILE}, {arguments.output / CHART_FILE}")
    return 0


# --- policies -----------------------------------------------------------------------------------


def compare(scenario: Scenario, names: Sequence[str]) -> list[Outcome]:
    """Simulate policies one after the other.

    Args:
        scenario: the same for all.
        names: policies as text, or names of baselines.

    Raises:
        PolicyError: a policy cannot be made, or failed.
    """
    outcomes = []
    with progress() as update:
        for i, name in enumerate(names):
            outcomes.append(_outcome(scenario, name, update, i, len(names)))
    return outcomes


def _outcome(scenario: Scenario, name: str, update: Update, i: int, count: int) -> Outcome:
    duration = max(scenario.load.duration, 1e-9)
    update(name, i / count)
    policy = make_policy(name, scenario)
    result = scenario.simulate(
        policy, lambda now: update(name, (i + min(1.0, now / duration)) / count)
    )
    text = f"batch_size(off_at={policy.off_at})" if isinstance(policy, BestThreshold) else name
    return Outcome(name, text, result)


def make_policy(name: str, scenario: Scenario) -> Policy:
    """Return a new policy.

    Args:
        name: a policy as text, or the name of a baseline.
        scenario: what ``best_threshold`` is the best for.

    Raises:
        PolicyError: it cannot be made.
    """
    if name == "sglang_adaptive":
        return SglangAdaptive()
    if name == "best_threshold":
        return best_threshold(scenario)
    return parse_policy(name)


def _check_policy(name: str) -> None:
    if name in BASELINES:
        return
    try:
        parse_policy(name)
    except PolicyError as error:
        raise PolicyError(
            f"--policy takes {', '.join(BASELINES)} or the text of a policy: {error}"
        ) from error


# --- the scenario -------------------------------------------------------------------------------


_Asked = tuple[Table, Scenario, dict[str, Any], Sequence[str]]
"""Measurements, what follows from them, the load as it was asked for, and notes."""


def _asked(arguments: argparse.Namespace) -> _Asked:
    if arguments.replay is not None:
        return _replay(arguments)
    table = read_table(arguments.table or DEFAULT_TABLE)
    costs = _costs(arguments, table)
    acceptance = _acceptance(arguments.accept, costs)
    load, described = _load(arguments, costs)
    return table, _scenario(arguments, costs, load, acceptance), described, ()


def _costs(arguments: argparse.Namespace, table: Table) -> StepCosts:
    given = arguments.accept_length
    most = table.num_steps + 1
    measured = None if given is None else number("--accept-length", given, 1, most)
    return StepCosts(table, arguments.backend, measured)


def _scenario(
    arguments: argparse.Namespace,
    costs: StepCosts,
    load: Load,
    acceptance: Acceptance,
    most_requests: int = _USUAL_MOST,
) -> Scenario:
    rate = arguments.prefill_rate
    machine = Machine(
        max_running_requests=_given(
            arguments, "max_running_requests", most_requests, 1, MOST_REQUESTS
        ),
        prefill_tokens_per_s=None if rate is None else number("--prefill-rate", rate, 1, 1e12),
        noise=number("--noise", arguments.noise, 0, 0.5),
    )
    seed = whole("--seed", arguments.seed, 0, 2**63)
    return Scenario(costs, load, acceptance, machine, seed)


def _replay(arguments: argparse.Namespace) -> _Asked:
    _refuse(arguments, "--replay", "trace", "load", "low", "high", "duration", "prompt_tokens")
    trace = read_decisions(arguments.replay)
    table, costs, said = _replayed_costs(arguments, trace)
    acceptance: Acceptance | None = None
    if arguments.accept is None:
        acceptance = acceptance_of(trace, costs.num_steps)
    source = "the trace" if acceptance is not None else "--accept"
    if acceptance is None:
        if arguments.accept is None:
            source = f"the table: the trace has no speculative step, so {costs.accept_length:g}"
        acceptance = _acceptance(arguments.accept, costs)
    load = ReplayedLoad(trace, _given(arguments, "output_tokens", OUTPUT_TOKENS, 1, MOST_TOKENS))
    most = trace.header.get("max_running_requests")
    most = most if type(most) is int and 1 <= most <= MOST_REQUESTS else _USUAL_MOST
    described = {
        "kind": "replay",
        "file": arguments.replay,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
    }
    notes = (
        f"From the trace: batch sizes and contexts over time. {said} Accept lengths from {source}. "
        "When requests came and how long they were is not in a trace: whatever the policy, the "
        "batch is as large as it was then.",
    )
    return table, _scenario(arguments, costs, load, acceptance, most), described, notes


def _replayed_costs(
    arguments: argparse.Namespace, trace: TraceFile
) -> tuple[Table, StepCosts, str]:
    """Measurements, what a step takes, and where that is from."""
    given = [n for n in ("table", "backend", "accept_length") if getattr(arguments, n) is not None]
    traced, said = (None, "asked for") if given else costs_of(trace)
    if traced is not None:
        name = os.path.basename(arguments.replay)
        table = Table(name, "seconds of its own steps", traced.num_steps, None, ())
        return table, traced, f"Step seconds from the trace: {said}."
    table = read_table(arguments.table or DEFAULT_TABLE)
    return table, _costs(arguments, table), f"Step seconds from the table {table.source}: {said}."


def _refuse(arguments: argparse.Namespace, option: str, *names: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} does not go with {option}, whose file says all of the "
                "load; leave one of them out"
            )


def _acceptance(text: str | None, costs: StepCosts) -> Acceptance:
    if text is None:
        return Acceptance(costs.accept_length, costs.accept_length)
    parts = text.split(":")
    if len(parts) > 3:
        raise ConfigError(
            f"--accept {text!r} has {len(parts)} parts; write LENGTH or LOW:HIGH:PERIOD"
        )
    lengths = [
        number(f"--accept {text!r}: accept length", part, 1, costs.num_steps + 1)
        for part in parts[:2]
    ]
    period = number(f"--accept {text!r}: period", parts[2], 1, 1e9) if parts[2:] else 600.0
    return Acceptance(lengths[0], lengths[-1], period)


def _load(arguments: argparse.Namespace, costs: StepCosts) -> tuple[Load, dict[str, Any]]:
    if arguments.trace is None:
        return _shape(arguments, costs)
    names = ("load", "low", "high", "duration", "prompt_tokens", "output_tokens")
    _refuse(arguments, "--trace", *names)
    trace = read_trace(arguments.trace)
    described = {"kind": "trace", "file": arguments.trace, "requests": len(trace.requests)}
    return trace, described


def _shape(arguments: argparse.Namespace, costs: StepCosts) -> tuple[Load, dict[str, Any]]:
    kind = arguments.load or "ramp"
    if kind not in SHAPES:
        raise ConfigError(
            f"--load {kind!r} is unknown; choose {', '.join(SHAPES)}, or --trace FILE"
        )
    prompt_tokens = _given(
        arguments, "prompt_tokens", int(costs.contexts[0]) or _DEFAULT_CONTEXT, 0, MOST_TOKENS
    )
    output_tokens = _given(arguments, "output_tokens", 256, 1, MOST_TOKENS)
    low, high = default_levels(kind, costs, prompt_tokens)
    high = _given(arguments, "high", high, 1, MOST_REQUESTS)
    # What is not given fits what is.
    low = _given(arguments, "low", min(low, high), 0, MOST_REQUESTS)
    if kind == "constant" and arguments.low is not None:
        raise ConfigError("--low does not go with --load constant, which is --high all the time")
    if low > high:
        raise ConfigError(f"--low {low} is above --high {high}; swap them, or raise --high")
    load = shape(
        kind,
        low=low,
        high=high,
        duration=number(
            "--duration", 600 if arguments.duration is None else arguments.duration, 0.1, 1e6
        ),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )
    return load, {
        "kind": kind,
        "low": None if kind == "constant" else low,
        "high": high,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
    }


def default_levels(kind: str, costs: StepCosts, context: float) -> tuple[int, int]:
    """Return the requests at once between which a built-in load moves by default.

    Args:
        kind: of the load. A square wave lies around the batch at which the two modes are equal.
        costs: the table.
        context: tokens of a request.
    """
    top = min(_USUAL_MOST, costs.max_batch)
    if kind != "square":
        return min(_LEVELS.get(kind, 1), top), top
    crossover = costs.crossover(context) or top
    return max(1, crossover // 2), max(2, min(top, 2 * crossover))


# --- values -------------------------------------------------------------------------------------


def _given(arguments: argparse.Namespace, name: str, default: int, least: int, most: int) -> int:
    value = getattr(arguments, name)
    option = f"--{name.replace('_', '-')}"
    return default if value is None else whole(option, value, least, most)


def whole(what: str, value: object, least: int, most: int) -> int:
    """Return a whole number of the command line.

    Raises:
        ConfigError: it is none, or out of range.
    """
    try:
        found = int(str(value))
    except ValueError:
        found = least - 1
    if not least <= found <= most:
        raise ConfigError(
            f"{what} {value!r} is not accepted; give a whole number, {least} to {most}"
        )
    return found


def number(what: str, value: object, least: float, most: float) -> float:
    """Return a number of the command line.

    Raises:
        ConfigError: it is none, or out of range.
    """
    try:
        found = float(str(value))
    except ValueError:
        found = math.nan
    if not least <= found <= most:
        raise ConfigError(f"{what} {value!r} is not accepted; give a number, {least:g} to {most:g}")
    return found


# --- files --------------------------------------------------------------------------------------


def _table_lines() -> list[str]:
    lines = []
    for name in shipped_tables():
        table = read_table(name)
        lines.append(f"{name}{' (default)' if name == DEFAULT_TABLE else ''}: {table.title}")
        for curve in table.curves:
            counts = [point.c for point in curve.points]
            lines.append(
                f"  {curve.label or 'one load'}: {counts[0]} to {counts[-1]} requests, draft steps "
                f"{table.num_steps}"
            )
    return lines


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _write(report: Report, content: dict[str, Any], folder: Path) -> None:
    from sglang_dynspec.simulate.chart import draw

    try:
        (folder / RESULT_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        draw(report, folder / CHART_FILE)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write to --output {os.fspath(folder)!r}: {error.strerror or error}; give a "
        "folder that can be written"
    )
