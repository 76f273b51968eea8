"""The command: its arguments, the order of its work, and its verdict."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from dynspec_benchmark import machine, wave, wave_report
from dynspec_benchmark.errors import BenchmarkError, UsageError
from dynspec_benchmark.measure import Benchmark, Lab, Limits, check_jobs, probe, skipped
from dynspec_benchmark.models import SHAPES, Model, checkpoint, random_weights
from dynspec_benchmark.plan import (
    DYNSPEC,
    NO_SPEC,
    Plan,
    Point,
    check_method,
    check_points,
    parse_config,
    parse_configs,
)
from dynspec_benchmark.ramp import Goal, ramp
from dynspec_benchmark.results import Results, about, begin, load, merge, resume, write_json, wrong
from dynspec_benchmark.wave import Wave

_N = TypeVar("_N", int, float)

RESULTS_FILE = "results.json"
RAMP_FILE = "ramp.json"
WAVE_FILE, WAVE_TABLE_FILE = "wave.json", "wave.md"
_DEFAULT_CONFIGS = ("no_spec", "static", "adaptive", "dynspec:batch_size(off_at=32, on_at=24)")
_DEFAULT_CONCURRENCY = (1, 8, 32, 128, 256)
_RAMP_CONFIG = "dynspec:dynspec_benchmark.policies:RandomToggle(seed=0, mean_steps=8)"
_PROBE_TIMEOUT = 300.0  # s; an import of torch and SGLang, on a slow disk

OK, WRONG, USAGE, UNFINISHED, INTERRUPTED = 0, 1, 2, 3, 130

_DESCRIPTION = """\
Measure the throughput of an SGLang server by concurrency and context length: without speculation,
with it always on, with SGLang's adaptive mode, and with dynspec under any policies. Every
configuration runs in servers of its own, one at a time, and gets the same prompts.
"""

_EPILOG = """\
configurations:
  no_spec             no speculation; what the others are compared to
  static              speculation in every step
  adaptive            SGLang's --speculative-adaptive: --num-steps below --adaptive-cut requests,
                      0 from there; skipped on releases that cannot do that
  dynspec:POLICY      dynspec with a policy, for example dynspec:never or
                      "dynspec:batch_size(off_at=64)@skip"; the draft state comes after @:
                      catch_up (the default), warm or skip

written to --output:
  results.json        everything, after every point; --resume goes on from it
  table.md  chart.png
  ramp.json           what --ramp has found
  wave.json  wave.md  what --wave has found, and its table
  logs/               what the servers said

exit code: 0 if all went well; 1 if a server failed, or plain decode of dynspec gave other outputs
than the server without speculation, or --ramp or --wave found anything wrong; 2 if the arguments
cannot be used; 3 if --stop-after came first.
"""


def main(words: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    arguments = _parser().parse_args(words)
    try:
        with _terminated_as_interrupted():
            if arguments.wave:
                return _wave(arguments, words)
            if arguments.report:
                return _report(arguments)
            if arguments.ramp:
                return _ramp(arguments)
            return _measure(arguments, words)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("interrupted; go on with --resume, if anything has been measured", file=sys.stderr)
        return INTERRUPTED
    except BenchmarkError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return WRONG


# --- measuring -----------------------------------------------------------------------------------


def _measure(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    lab = _lab(arguments, arguments.configs)
    output = lab.output
    results = Results(_begun(arguments, lab, words), output / RESULTS_FILE)
    for label, reason in results.data["skipped"].items():
        print(f"SKIPPED: {label}: {reason}")
    results.save()
    benchmark = _run(lab, results)
    _write_report(results.data, output)
    problems = wrong(results.data)
    for problem in problems:
        print(f"FAILED: {problem}")
    if results.data["failures"] or problems:
        return WRONG
    if benchmark.unfinished:
        print(f"Stopped after {arguments.stop_after:g} s; go on with --resume {results.path}")
        return UNFINISHED
    return OK


def _run(lab: Lab, results: Results) -> Benchmark:
    # SGLang brings it; --report is for machines that may not have it.
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    plan = lab.plan
    total = len(plan.points) * len(plan.configs) * plan.rounds
    with tqdm(total=total, unit="point", disable=not sys.stderr.isatty()) as bar:

        def progress(config: str, done: int) -> None:
            bar.set_description(config)
            bar.update(done)

        def say(line: str) -> None:
            with tqdm.external_write_mode():  # above the bar
                _say(line)

        benchmark = Benchmark(lab, results, say=say, progress=progress)
        benchmark.run()
    return benchmark


def _say(line: str) -> None:
    # At once, also into a file: a run takes long, and may be stopped.
    print(line, flush=True)


def _begun(arguments: argparse.Namespace, lab: Lab, words: Sequence[str]) -> dict[str, Any]:
    fresh = begin(lab.plan, **_circumstances(lab, words))
    fresh["skipped"] = skipped(lab.plan, lab.installed)
    return resume(arguments.resume, fresh) if arguments.resume else fresh


def _circumstances(lab: Lab, words: Sequence[str]) -> dict[str, Any]:
    return {
        "hardware": machine.hardware(lab.installed["gpu"]),
        "software": lab.installed["software"],
        "command": shlex.join(["python", "examples/benchmark/run.py", *words]),
    }


def _lab(arguments: argparse.Namespace, configs: Sequence[str]) -> Lab:
    output = _output(arguments)
    plan, model = _plan(arguments, configs, output)
    lab = Lab(plan, model, output, _limits(arguments), probe(plan, output, _PROBE_TIMEOUT))
    check_jobs(lab)
    return lab


def _plan(
    arguments: argparse.Namespace, configs: Sequence[str], output: Path
) -> tuple[Plan, Model]:
    check_method(arguments.repeats, arguments.rounds)
    levels = arguments.wave or arguments.concurrency or _DEFAULT_CONCURRENCY
    points = tuple(
        Point(prompt, arguments.output_len, c) for prompt in arguments.prompt_lens for c in levels
    )
    model = _model(arguments, output)
    server_arguments = _server_arguments(arguments, max(levels))
    context_length = server_arguments.get("context_length") or model.max_positions
    check_points(points, arguments.num_steps, context_length)
    plan = Plan(
        configs=parse_configs(configs),
        points=points,
        repeats=arguments.repeats,
        rounds=arguments.rounds,
        model=model.identity(),
        algorithm=arguments.algorithm,
        num_steps=arguments.num_steps,
        simulate_accept_length=arguments.simulate_accept_length,
        adaptive_cut=arguments.adaptive_cut,
        server_arguments=server_arguments,
    )
    return plan, model


def _model(arguments: argparse.Namespace, output: Path) -> Model:
    if (arguments.random is None) == (arguments.model_path is None):
        raise UsageError(
            "name what to serve: --model-path (and --draft-model-path) for a checkpoint, or "
            f"--random {'|'.join(SHAPES)} for random weights"
        )
    if arguments.random is None:
        return checkpoint(arguments.model_path, arguments.draft_model_path)
    if arguments.draft_model_path is not None:
        raise UsageError("--draft-model-path needs --model-path; --random makes its own draft")
    if arguments.algorithm != "EAGLE3":
        raise UsageError(
            f"--algorithm {arguments.algorithm} needs --model-path; --random makes an EAGLE3 draft"
        )
    if arguments.simulate_accept_length is None:
        raise UsageError(
            "--random needs --simulate-accept-length, for example 2.2: of random weights no draft "
            "is accepted"
        )
    return random_weights(arguments.random, output / "models")


def _server_arguments(arguments: argparse.Namespace, peak: int) -> dict[str, Any]:
    flags = {
        "attention_backend": arguments.attention_backend,
        "mem_fraction_static": arguments.mem_fraction_static,
        "max_running_requests": arguments.max_running_requests,
        "context_length": arguments.context_length,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    merged: dict[str, Any] = {**arguments.server_args, **given}
    allowed = merged.get("max_running_requests")
    if allowed is not None and allowed < peak:
        option = "HIGH of --wave," if arguments.wave else "--concurrency"
        raise UsageError(
            f"--max-running-requests {allowed} is below {option} {peak}, so requests would wait "
            "for each other; raise it, or leave it out"
        )
    return merged


def _limits(arguments: argparse.Namespace) -> Limits:
    return Limits(arguments.start_timeout, arguments.call_timeout, arguments.stop_after)


def _output(arguments: argparse.Namespace) -> Path:
    if arguments.output is not None:
        return Path(arguments.output)
    earlier = arguments.resume or (arguments.report or [None])[0]
    return earlier.parent if earlier else Path("benchmark-output")


# --- ramp ----------------------------------------------------------------------------------------


def _ramp(arguments: argparse.Namespace) -> int:
    config = parse_config(arguments.ramp)
    if config.kind != DYNSPEC:
        raise UsageError(f"--ramp {arguments.ramp} is no dynspec server; write dynspec:POLICY")
    lab = _lab(arguments, [config.label, NO_SPEC])
    found = ramp(lab, config, Goal(arguments.toggles, arguments.seconds), say=_say)
    write_json(lab.output / RAMP_FILE, found)
    for problem in found["problems"]:
        print(f"FAILED: {problem}")
    print(f"{'FAILED' if found['problems'] else 'OK'}: {lab.output / RAMP_FILE}")
    return WRONG if found["problems"] else OK


# --- wave ----------------------------------------------------------------------------------------

_NOT_WITH_WAVE = {
    "ramp": "each is a load of its own",
    "report": "it measures nothing",
    "resume": "a wave is run in one go",
    "stop_after": "a wave is run in one go",
    "concurrency": "LOW and HIGH are the requests at once",
}


def _wave(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    _check_wave(arguments)
    lab = _lab(arguments, arguments.configs)
    low, high = arguments.wave
    load = Wave(low, high, arguments.cycles)
    data = wave.begin(
        load, about(lab.plan, **_circumstances(lab, words)), skipped(lab.plan, lab.installed)
    )
    for label, reason in data["skipped"].items():
        print(f"SKIPPED: {label}: {reason}")
    path, table = lab.output / WAVE_FILE, lab.output / WAVE_TABLE_FILE
    write_json(path, data)
    wave.run(lab, load, data, say=_say, save=lambda: write_json(path, data))
    text = wave_report.markdown(data)
    table.write_text(text, encoding="utf-8")
    print(f"\n{text}")
    failed = data["failures"] or data["problems"]
    print(f"{'FAILED' if failed else 'OK'}: {path}; table: {table}")
    return WRONG if failed else OK


def _check_wave(arguments: argparse.Namespace) -> None:
    for name, reason in _NOT_WITH_WAVE.items():
        if getattr(arguments, name) is not None:
            low, high = arguments.wave
            raise UsageError(
                f"--wave {low},{high} and --{name.replace('_', '-')} do not go together: {reason}; "
                "leave one out"
            )


# --- report --------------------------------------------------------------------------------------


def _report(arguments: argparse.Namespace) -> int:
    output = _output(arguments)
    data = merge(arguments.report) if len(arguments.report) > 1 else load(arguments.report[0])
    if len(arguments.report) > 1:
        write_json(output / "merged.json", data)
    _write_report(data, output)
    return OK


def _write_report(data: dict[str, Any], output: Path) -> None:
    from dynspec_benchmark.report import write

    write(data, output)


# --- arguments -----------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run.py",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--configs",
        nargs="+",
        default=_DEFAULT_CONFIGS,
        metavar="CONFIG",
        help="what to compare, see below (default: no_spec static adaptive and dynspec with "
        "batch_size)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where to write (default: benchmark-output, or where the file of --resume or --report "
        "is)",
    )
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="go on with the results.json of an earlier run"
    )
    parser.add_argument(
        "--report",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: draw table and chart of results.json files, merged into one",
    )
    _add_ramp(parser.add_argument_group("ramp"))
    _add_wave(parser.add_argument_group("wave"))
    _add_load(parser.add_argument_group("load"))
    _add_method(parser.add_argument_group("method"))
    _add_model(parser.add_argument_group("model"))
    _add_server(parser.add_argument_group("server"))
    return parser


def _add_ramp(stress: argparse._ArgumentGroup) -> None:
    stress.add_argument(
        "--ramp",
        nargs="?",
        const=_RAMP_CONFIG,
        metavar="CONFIG",
        help="measure nothing: let the requests of one dynspec server rise through --concurrency "
        "and fall again, over and over, and look for errors, wrong outputs and leaks. By default "
        "its policy changes between plain decode and speculation at random",
    )
    stress.add_argument(
        "--toggles",
        type=_number(int, 1),
        default=200,
        metavar="N",
        help="changes of the mode to see before the end (default: %(default)s)",
    )
    stress.add_argument(
        "--seconds",
        type=_number(float, 1),
        metavar="S",
        help="instead of --toggles: how long to go on",
    )


def _add_wave(square: argparse._ArgumentGroup) -> None:
    square.add_argument(
        "--wave",
        type=_low_high,
        metavar="LOW,HIGH",
        help="instead of --concurrency: let LOW clients send one request after the other until "
        "each has had an answer, then HIGH clients, over and over, the same for each of --configs",
    )
    square.add_argument(
        "--cycles",
        type=_number(int, 1),
        default=20,
        metavar="N",
        help="of LOW and then HIGH, after one to warm up (default: %(default)s)",
    )


def _add_load(load: argparse._ArgumentGroup) -> None:
    load.add_argument(
        "--prompt-lens",
        type=_numbers,
        default=(128,),
        metavar="N,N,...",
        help="prompt tokens (default: 128)",
    )
    load.add_argument(
        "--output-len",
        type=_number(int, 1),
        default=128,
        metavar="N",
        help="output tokens (default: %(default)s)",
    )
    load.add_argument(
        "--concurrency",
        type=_numbers,
        metavar="N,N,...",
        help=f"requests at once (default: {','.join(map(str, _DEFAULT_CONCURRENCY))})",
    )


def _add_method(method: argparse._ArgumentGroup) -> None:
    method.add_argument(
        "--repeats",
        type=_number(int, 1),
        default=3,
        metavar="N",
        help="measured calls of a point in a server, after a warm-up (default: %(default)s)",
    )
    method.add_argument(
        "--rounds",
        type=_number(int, 1),
        default=2,
        metavar="N",
        help="servers of each configuration, in alternating order (default: %(default)s)",
    )
    method.add_argument(
        "--start-timeout",
        type=_number(float, 1),
        default=900.0,
        metavar="S",
        help="seconds that a server may take to start (default: %(default)g)",
    )
    method.add_argument(
        "--call-timeout",
        type=_number(float, 1),
        default=600.0,
        metavar="S",
        help="seconds that all requests of a point may take (default: %(default)g)",
    )
    method.add_argument(
        "--stop-after",
        type=_number(float, 1),
        metavar="S",
        help="seconds after which no further point is begun; go on with --resume",
    )


def _add_model(model: argparse._ArgumentGroup) -> None:
    model.add_argument("--model-path", metavar="MODEL", help="the checkpoint to serve")
    model.add_argument(
        "--draft-model-path", metavar="MODEL", help="its draft; none for models with one built in"
    )
    model.add_argument(
        "--algorithm",
        choices=("EAGLE", "EAGLE3"),
        default="EAGLE3",
        help="--speculative-algorithm (default: %(default)s)",
    )
    model.add_argument(
        "--random",
        choices=tuple(SHAPES),
        help="instead: a Llama of that shape and a one-layer EAGLE-3 head, with random weights",
    )
    model.add_argument(
        "--simulate-accept-length",
        type=_number(float, 1),
        metavar="X",
        help="let SGLang accept so many tokens a step, whatever the draft says; the outputs of "
        "speculative steps then mean nothing",
    )


def _add_server(server: argparse._ArgumentGroup) -> None:
    server.add_argument(
        "--num-steps",
        type=_number(int, 1),
        default=3,
        metavar="N",
        help="draft steps of a speculative step (default: %(default)s)",
    )
    server.add_argument(
        "--adaptive-cut",
        type=_number(int, 2),
        default=32,
        metavar="N",
        help="requests from which the adaptive configuration runs 0 draft steps "
        "(default: %(default)s)",
    )
    server.add_argument("--attention-backend", metavar="NAME", help="for all servers")
    server.add_argument("--mem-fraction-static", type=_number(float, 0), metavar="X")
    server.add_argument(
        "--max-running-requests",
        type=_number(int, 1),
        metavar="N",
        help="(default: the most of --concurrency, or HIGH of --wave)",
    )
    server.add_argument("--context-length", type=_number(int, 1), metavar="N")
    server.add_argument(
        "--server-args",
        type=_json_object,
        default={},
        metavar="JSON",
        help="any other arguments of sglang.Engine, as in '{\"page_size\": 1}'; null takes back a "
        "default of the benchmark; those that begin with speculative_ are left out for no_spec",
    )


def _numbers(text: str) -> tuple[int, ...]:
    at_least_one = _number(int, 1)
    numbers = tuple(at_least_one(word) for word in text.split(","))
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} names a number twice; leave one out")
    return numbers


def _low_high(text: str) -> tuple[int, int]:
    """Read the clients of a wave."""
    at_least_one = _number(int, 1)
    numbers = [at_least_one(word) for word in text.split(",")]
    if len(numbers) != 2 or numbers[0] >= numbers[1]:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no LOW,HIGH; give two numbers of clients, the lower first, as in 8,128"
        )
    low, high = numbers
    return low, high


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


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no JSON object; write it as in '{{\"page_size\": 1}}'"
        )
    return value


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
