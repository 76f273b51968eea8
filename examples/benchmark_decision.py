"""What a decision costs: view, policy and bookkeeping, on a real scheduler at batch 256.

    python examples/benchmark_decision.py [--policy "batch_size(off_at=32, on_at=24)"] [--batch 256]

Decisions are also timed with a trace of them beside without, by turns: with few lines (one every
100 decisions) and with a line for each; and with metrics, brought up to date every 40 steps as
SGLang does it, through files as in its servers.

Runs the CPU engine in this process, so SGLang must be installed. "In place" is between two forwards
on the CPU, which leave nothing of ours in its caches; "back to back" is what a server with a GPU,
whose processor does little else, comes closer to.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import sglang_dynspec
from sglang_dynspec.settings import Settings
from sglang_dynspec.testing import cpu_engine

BURST = 1000
BURST_AT = 10  # a call well within the run


by_trace: dict[str, list[float]] = {}
"""Seconds of a decision that is taken, see `burst_by_trace`."""


class Stopwatch:
    """Stands in a function's place and times every call; at one of them also many in a row."""

    def __init__(self, function: Callable[..., Any], burst: Callable[..., list[float]]) -> None:
        self.function, self._burst = function, burst
        self.in_place: list[float] = []
        self.in_a_row: list[float] = []

    def __call__(self, *args: Any) -> Any:
        if len(self.in_place) == BURST_AT:
            self.in_a_row = self._burst(self.function, *args)
        return clock(lambda: self.function(*args), self.in_place)


def clock(call: Callable[[], Any], into: list[float]) -> Any:
    """Call, and append the seconds it took."""
    started = time.perf_counter()
    result = call()
    into.append(time.perf_counter() - started)
    return result


def burst_of_decisions(decide: Callable[..., Any], runtime: Any, batch: Any) -> list[float]:
    """Decide on the same batch over and over, with a controller beside the one in force."""
    by_trace.update(burst_by_trace(decide, runtime, batch))
    aside = replace(runtime, controller=copy.deepcopy(runtime.controller))
    times: list[float] = []
    for _ in range(BURST):
        clock(lambda: decide(aside, batch), times)
    return times


TRACED = {"without more": None, "with a trace": 100, "with a line for each": 1}
"""Decisions from one line to the next."""
METRICS_EVERY = 40  # SGLang's --decode-log-interval
ROUNDS = 20


def burst_by_trace(decide: Callable[..., Any], runtime: Any, batch: Any) -> dict[str, list[float]]:
    """Decide on the same batch and take the decision, over and over: with a trace, with metrics,
    and without either."""
    from sglang_dynspec.engine.runtime import DECISION

    def once(aside: Any) -> None:
        decide(aside, batch)
        aside.controller.take(vars(batch.spec_info)[DECISION])

    with tempfile.TemporaryDirectory() as folder:
        asides = {
            name: with_trace(runtime, os.path.join(folder, f"{every}.jsonl"), every)
            for name, every in TRACED.items()
        }
        calls = {name: partial(once, aside) for name, aside in asides.items()}
        calls["with metrics"] = with_metrics(once, with_trace(runtime, "", None), folder)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):  # by turns, so that what else the machine does falls on all
            for name, call in calls.items():
                for _ in range(BURST // ROUNDS):
                    clock(call, times[name])
        for name, aside in asides.items():
            aside.controller.end_trace()
            if aside.controller.trace is not None:
                print(f"{name}: {aside.controller.trace.as_dict()}")
    return times


def with_metrics(once: Callable[[Any], None], aside: Any, folder: str) -> Callable[[], None]:
    """The same, with metrics brought up to date now and then."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    from sglang_dynspec.engine.metrics import Exporter

    exporter = Exporter(SimpleNamespace(labels={"model_name": "tiny", "tp_rank": 0}))
    number = count(1)

    def call() -> None:
        once(aside)
        if next(number) % METRICS_EVERY == 0:
            exporter.flush(aside, "in_force")

    exporter.flush(aside, "in_force")
    return call


def with_trace(runtime: Any, file: str, every: int | None) -> Any:
    """A runtime beside the one in force, whose decisions are traced."""
    from sglang_dynspec.engine import tracing

    aside = replace(runtime, controller=copy.deepcopy(runtime.controller))
    if every is not None:
        settings = Settings(trace_every=every)
        aside.controller.trace = tracing.begin(aside, file, settings, "")
    return aside


def burst_of_outcomes(observe: Callable[..., Any], runtime: Any, result: Any) -> list[float]:
    """Take in the same result over and over."""
    aside = replace(runtime, controller=copy.deepcopy(runtime.controller))
    times: list[float] = []
    for _ in range(BURST):
        again = copy.copy(result)  # the decision on it is taken off
        clock(lambda again=again: observe(aside, again), times)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--policy", default="batch_size(off_at=32, on_at=24) & accept_rate(min=0.3)"
    )
    parser.add_argument("--batch", type=int, default=256, help="requests in the decode batch")
    parser.add_argument("--tokens", type=int, default=60, help="tokens for each request")
    options = parser.parse_args()

    os.environ.update(cpu_engine.environment())
    cpu_engine.install()
    sglang_dynspec.activate(policy=options.policy, strict=True)
    from sglang_dynspec.engine import batch_prep, install, results
    from sglang_dynspec.testing.scheduler import InProcessScheduler, Request

    decide = batch_prep.decide = Stopwatch(batch_prep.decide, burst_of_decisions)
    observe = results.observe = Stopwatch(results.observe, burst_of_outcomes)
    draw = random.Random(0)
    requests = [
        Request([draw.randrange(4, 512) for _ in range(16)], max_new_tokens=options.tokens)
        for _ in range(options.batch)
    ]
    with InProcessScheduler(
        "EAGLE3",
        max_running_requests=options.batch,
        max_total_tokens=options.batch * (options.tokens + 64),
    ) as scheduler:
        started = time.perf_counter()
        scheduler.run(requests)
        seconds = time.perf_counter() - started
        status = install.status()
    print(f"{status['steps']} decode steps at batch {options.batch}, {status['by_num_steps']}")
    row("decision, back to back", decide.in_a_row)
    row("outcome, back to back", observe.in_a_row)
    for name, times in by_trace.items():
        usual = by_trace["without more"]
        median = statistics.median(times) / statistics.median(usual)
        mean = statistics.fmean(times) / statistics.fmean(usual)
        row(f"taken, {name}", times, f"; {median:.3f} of without, mean {mean:.3f}")
    row("decision, in place", decide.in_place)
    row("outcome, in place", observe.in_place)
    share = (sum(decide.in_place) + sum(observe.in_place)) / seconds
    print(f"in place together {100 * share:.3f}% of the {seconds:.1f} s that the run took here")


def row(name: str, times: list[float], more: str = "") -> None:
    """Print microseconds."""
    micro = sorted(1e6 * t for t in times)
    print(
        f"{name:27} median {statistics.median(micro):6.1f} us, "
        f"99th percentile {micro[int(0.99 * len(micro))]:6.1f} us, {len(micro)} times{more}"
    )


if __name__ == "__main__":
    main()
