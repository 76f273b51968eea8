"""--wave: a square wave of clients across the crossover, for one configuration after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dynspec_benchmark import checks
from dynspec_benchmark.errors import BenchmarkError
from dynspec_benchmark.measure import Lab, Say, crowded
from dynspec_benchmark.plan import ADAPTIVE, NO_SPEC, Config
from dynspec_benchmark.process import Worker

Entry = dict[str, Any]

WHAT = "throughput under a square wave of clients, one server configuration per process"
UNIT = "output tokens per second over all cycles that count, prefill included"


@dataclass(frozen=True, slots=True)
class Wave:
    """A load that is low and high in turn."""

    low: int
    """Clients."""
    high: int
    cycles: int
    """That count; one more comes before them."""


def begin(wave: Wave, about: dict[str, Any], skipped: dict[str, str]) -> dict[str, Any]:
    """Return results without a measurement.

    Args:
        wave: the load.
        about: what it runs on, see :func:`dynspec_benchmark.results.about`.
        skipped: by configuration, why it cannot be run.
    """
    return {
        "what": WHAT,
        **about,
        "unit": UNIT,
        "wave": asdict(wave),
        "measurements": [],
        "skipped": skipped,
        "failures": [],
        "problems": [],
    }


def run(lab: Lab, wave: Wave, data: dict[str, Any], *, say: Say, save: Callable[[], None]) -> None:
    """Run the wave on a server of each configuration. What fails is kept as a failure.

    Args:
        lab: where to run them.
        wave: the load.
        data: results of :func:`begin`; gains the measurements.
        say: prints a line.
        save: called after each configuration.

    Raises:
        OSError: a file cannot be written.
    """
    for number, config in enumerate(lab.plan.configs):
        if config.label in data["skipped"]:
            continue
        try:
            entry = _waved(lab, wave, config, f"wave-{number}-{config.kind}.log", say)
        except BenchmarkError as error:
            say(f"FAILED: {error}")
            data["failures"].append({"config": config.label, "message": str(error)})
        else:
            data["measurements"].append(entry)
            say(f"{config.label}: {entry['tok_s']:.1f} tok/s, {entry['errors']} errors")
        summarise(data)
        save()


def summarise(data: dict[str, Any]) -> None:
    """Work out everything that follows from the measurements: ratios, comparisons, problems."""
    entries = data["measurements"]
    baseline = next((entry for entry in entries if entry["config"] == NO_SPEC), None)
    fastest = max((entry["tok_s"] for entry in entries), default=None)
    simulated = data["speculation"]["simulated_accept_len"] is not None
    known = None if baseline is None or simulated else _known(baseline)
    data["problems"] = []
    for entry in entries:
        entry["ratio"] = _ratio(entry["tok_s"], baseline and baseline["tok_s"])
        entry["ratio_to_fastest"] = _ratio(entry["tok_s"], fastest)
        entry["outputs"] = None if known is None else checks.compare(entry["answers"], known)
        data["problems"] += [f"{entry['config']}: {p}" for p in checks.problems(entry)]


def _ratio(tok_s: float, other: float | None) -> float | None:
    # No throughput: all requests failed.
    return round(tok_s / other, 4) if other else None


def _known(baseline: Entry) -> list[set[str]]:
    """By prompt, all answers that the server without speculation has given."""
    known = checks.by_prompt(baseline["passes"])
    for prompt, digests in baseline["answers"].items():
        known[int(prompt)].update(digests)
    return known


def _waved(lab: Lab, wave: Wave, config: Config, log: str, say: Say) -> Entry:
    # Only what the others are compared to answers once more, and only if that means anything.
    again = config.kind == NO_SPEC and lab.plan.simulate_accept_length is None
    job = lab.job(
        config,
        job="wave",
        cycle=[wave.low, wave.high],
        cycles=wave.cycles,
        at_once=[wave.high, 1] if again else [],
        **lab.plan.closed_loop(),
    )
    with lab.worker(config.label, config, job, log) as worker:
        ready = worker.event(lab.limits.start, "starting")
        say(f"{config.label}: started in {ready['startup_s']:.0f} s")
        if note := crowded(config.label, ready, wave.high):
            say(note)
        found, passes = _followed(worker, lab.limits.call)
        found["captures"] = checks.captures(worker.log_text(ready["log_size"]))
    return {
        "config": config.label,
        "backend": ready["attention_backend"] or "default",
        "dtype": ready["dtype"],
        "startup_s": ready["startup_s"],
        "log": str(worker.log.relative_to(lab.output)),
        **_figures(config, found),
        "passes": passes,
    }


def _followed(worker: Worker, timeout: float) -> tuple[Entry, list[list[str]]]:
    """Return what the server has found, and its answers to all prompts in each further pass."""
    found: Entry = {}
    passes = []
    while (event := worker.event(timeout, "running the wave"))["event"] != "done":
        if event["event"] == "waved":
            found = {name: value for name, value in event.items() if name != "event"}
        elif event["event"] == "answers":
            passes.append(event["digests"])
    return found, passes


def _figures(config: Config, found: Entry) -> Entry:
    # SGLang's adaptive mode counts the steps without drafts among the others.
    accept_length = None if config.kind == ADAPTIVE else found["accept_length"]
    before, after = found["settled"]["switches"], found["after"]["switches"]
    return {
        **found,
        "seconds": round(found["seconds"], 4),
        "tok_s": round(found["tokens"] / found["seconds"], 1),
        "accept_length": accept_length and round(accept_length, 3),
        "switches": None if after is None else after - before,
        "growth_mib": checks.growth(
            found["settled"]["gpu_used_mib"], found["after"]["gpu_used_mib"]
        ),
    }
