"""Running servers one after the other, and keeping what they tell."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynspec_benchmark import machine
from dynspec_benchmark.engine_args import adaptive_steps, engine_arguments
from dynspec_benchmark.errors import BenchmarkError, UsageError
from dynspec_benchmark.models import Model
from dynspec_benchmark.plan import ADAPTIVE, DYNSPEC, Config, Plan, Point
from dynspec_benchmark.process import Worker, environment
from dynspec_benchmark.results import Measurement, Results, write_json

Say = Callable[[str], None]

# The one line of dynspec that is kept; what it says is for people.
_GRAPHS_LINE = re.compile(r"^.*sglang_dynspec: CUDA graphs of plain decode captured.*$", re.M)
_ADAPTIVE_FILE = "adaptive.json"


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds."""

    start: float
    """That a server may take to start."""
    call: float
    """That one call, of all requests of a point, may take."""
    total: float | None = None
    """After which nothing new is begun."""


@dataclass(frozen=True, slots=True)
class Lab:
    """Where and how servers are run."""

    plan: Plan
    model: Model
    output: Path
    limits: Limits
    installed: dict[str, Any]
    """What probe() has found."""

    def job(self, config: Config, **job: Any) -> dict[str, Any]:
        """Return a worker's job: a server, and what to do with it.

        Raises:
            UsageError: the user asks for an argument that the release does not have.
        """
        dynspec = None
        if config.kind == DYNSPEC:
            dynspec = {"policy": config.policy, "draft_state": config.draft_state}
        arguments = engine_arguments(
            config,
            self.plan,
            self.model,
            fields=self.installed["fields"],
            gpu=self.installed["gpu"] is not None,
            adaptive_config=self.output / _ADAPTIVE_FILE,
        )
        return {"engine": arguments, "dynspec": dynspec, **job}

    def worker(self, name: str, config: Config, job: dict[str, Any], log: str) -> Worker:
        """Return the process for a job, not yet started."""
        variables = environment(
            speculative=config.speculative,
            simulate_accept_length=self.plan.simulate_accept_length,
        )
        return Worker(name, job, environment=variables, log=self.output / "logs" / log)


def probe(plan: Plan, output: Path, timeout: float) -> dict[str, Any]:
    """Return what is installed.

    Raises:
        BenchmarkError: SGLang cannot be imported.
        OSError: a file cannot be written.
    """
    config = output / _ADAPTIVE_FILE
    write_json(config, adaptive_steps(plan.num_steps, plan.adaptive_cut))
    job = {"job": "probe", "adaptive_config": str(config)}
    variables = environment(speculative=False, simulate_accept_length=None)
    log = output / "logs" / "probe.log"
    with Worker("SGLang", job, environment=variables, log=log) as worker:
        return worker.event(timeout, "importing it")


def skipped(plan: Plan, installed: dict[str, Any]) -> dict[str, str]:
    """Return the configurations that the installed SGLang cannot run, and why."""
    refusal = installed["adaptive_refusal"]
    if refusal is None:
        return {}
    release = installed["software"]["sglang"]
    return {
        config.label: f"SGLang {release} cannot be measured so: {refusal}"
        for config in plan.configs
        if config.kind == ADAPTIVE
    }


def check_jobs(lab: Lab) -> None:
    """Check that the arguments of every server exist.

    Raises:
        UsageError: one does not, or dynspec is not installed.
    """
    for config in lab.plan.configs:
        lab.job(config)
        if config.kind == DYNSPEC and lab.installed["software"]["sglang_dynspec"] is None:
            raise UsageError(f"{config.label} needs sglang_dynspec; pip install sglang-dynspec")


def crowded(name: str, ready: dict[str, Any], peak: int) -> str | None:
    """Return a note if a server runs fewer requests at once than it gets, or None.

    Args:
        name: of the server.
        ready: what it has told of itself.
        peak: the most requests at once.
    """
    allowed = ready["max_running_requests"]
    if allowed is None or allowed >= peak:
        return None
    return (
        f"NOTE: {name} runs at most {allowed} requests at once, so others of {peak} wait; lower "
        "--mem-fraction-static or the load"
    )


class Benchmark:
    """All servers of a plan.

    Args:
        lab: where to run them.
        results: gains the measurements.
        say: prints a line.
        progress: called for each point that is done, with what comes next.
    """

    def __init__(
        self, lab: Lab, results: Results, *, say: Say, progress: Callable[[str, int], None]
    ) -> None:
        self._lab = lab
        self._results = results
        self._say = say
        self._progress = progress
        self._began = time.monotonic()
        self.unfinished = False

    def run(self) -> None:
        """Measure whatever has not been measured. What fails is kept as a failure.

        Raises:
            OSError: a file cannot be written.
        """
        for number, config in self._lab.plan.schedule():
            if config.label in self._results.data["skipped"]:
                self._progress(config.label, len(self._lab.plan.points))
                continue
            points = self._missing(number, config)
            self._progress(config.label, len(self._lab.plan.points) - len(points))
            if not points:
                continue
            if self._out_of_time():
                return
            try:
                self._serve(number, config, points)
            except BenchmarkError as error:
                self._say(f"FAILED: {error}")
                self._results.add_failure(number, config, str(error))

    def _missing(self, number: int, config: Config) -> list[Point]:
        plan = self._lab.plan
        return [point for point in plan.points if not self._results.has(number, config, point)]

    def _out_of_time(self) -> bool:
        total = self._lab.limits.total
        self.unfinished = total is not None and time.monotonic() - self._began > total
        return self.unfinished

    def _serve(self, number: int, config: Config, points: Sequence[Point]) -> None:
        plan, limits = self._lab.plan, self._lab.limits
        job = self._lab.job(
            config,
            job="measure",
            points=[[p.prompt_tokens, p.output_tokens, p.c] for p in points],
            repeats=plan.repeats,
        )
        name = f"{config.label}, round {number + 1}"
        log = f"round{number + 1}-{plan.configs.index(config)}-{config.kind}.log"
        with self._lab.worker(name, config, job, log) as worker:
            ready = worker.event(limits.start, "starting")
            self._keep_server(number, config, worker, ready)
            for point in points:
                self._measure(worker, number, config, point, ready)
                if point is not points[-1] and self._out_of_time():
                    return
            worker.event(limits.call, "ending")

    def _keep_server(
        self, number: int, config: Config, worker: Worker, ready: dict[str, Any]
    ) -> None:
        graphs = _GRAPHS_LINE.search(worker.log_text())
        told = {key: ready[key] for key in ready if key not in ("event", "log_size")}
        self._results.add_server(
            {
                "config": config.label,
                "round": number,
                **told,
                "gpu_used_mib": machine.used_mib(),
                "graphs": graphs[0].strip() if graphs else None,
                "log": str(worker.log.relative_to(self._lab.output)),
            }
        )
        if note := crowded(worker.name, ready, self._lab.plan.peak):
            self._say(note)

    def _measure(
        self,
        worker: Worker,
        number: int,
        config: Config,
        point: Point,
        ready: dict[str, Any],
    ) -> None:
        call = self._lab.limits.call
        worker.event(call, f"warming up for {point}")
        runs = [
            _run(worker.event(call, f"running {point}"), number)
            for _ in range(self._lab.plan.repeats)
        ]
        entry = self._results.add_point(
            config,
            point,
            backend=ready["attention_backend"] or "default",
            runs=runs,
            steps=worker.event(call, f"ending {point}")["steps"],
            kv_tokens=(ready["memory"] or {}).get("token_capacity"),
        )
        self._say(_line(number, entry))
        self._progress(config.label, 1)


def _run(event: dict[str, Any], number: int) -> dict[str, Any]:
    return {
        "round": number,
        "repeat": event["repeat"],
        "seconds": round(event["seconds"], 4),
        "tok_s": round(event["tokens"] / event["seconds"], 1),
        "accept_length": event["accept_length"],
        "digests": event["digests"],
    }


def _line(number: int, entry: Measurement) -> str:
    parts = [
        f"round {number + 1}  {entry['config']}  prompt {entry['prompt_tokens']}  "
        f"c {entry['c']}:  {entry['tok_s']:.1f} tok/s"
        f" ({entry['tok_s_min']:.1f} to {entry['tok_s_max']:.1f}, {len(entry['runs'])} runs)"
    ]
    if entry["accept_length"] is not None:
        parts.append(f"accept length {entry['accept_length']:.2f}")
    if entry["plain_share"] is not None and entry["steps"] is not None:
        parts.append(f"plain {entry['plain_share']:.0%}")
    ids = entry["ids"]
    if ids is not None:
        parts.append(ids.get("note") or f"ids {ids['equal']} of {ids['compared']} equal")
    if entry["waits_for_kv"]:
        parts.append(f"more than the {entry['kv_tokens']} tokens of the KV pool")
    return "  ".join(parts)
