"""--ramp: one dynspec server under a load that rises and falls, and everything that must hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dynspec_benchmark.measure import Lab
from dynspec_benchmark.plan import NO_SPEC, Config
from dynspec_benchmark.process import Worker

Say = Callable[[str], None]

_PROMPTS = 64  # different ones
_MAX_GROWTH_MIB = 512  # of device memory; the caches of a first ramp are not counted
# SGLang's words and ours, for graphs of any kind.
_CAPTURE = re.compile(r"(?=.*\bcaptur(?:e|ed|ing)\b).*\b(?:graphs?|batches|num tokens)\b", re.I)


@dataclass(frozen=True, slots=True)
class Goal:
    """When to end."""

    toggles: int
    """Changes of the mode that are enough."""
    seconds: float | None = None
    """If given, what counts instead."""


def ramp(lab: Lab, config: Config, goal: Goal, *, say: Say) -> dict[str, Any]:
    """Run it all, and return what was found. ``problems`` holds a sentence for each thing wrong.

    Raises:
        BenchmarkError: a server does not start, ends, or does not answer.
        OSError: a file cannot be written.
    """
    found = _ramped(lab, config, goal, say)
    answers = found.pop("answers")
    comparable = lab.plan.simulate_accept_length is None
    if comparable:
        found["outputs"] = compare(answers, _expected(lab, say))
    found["problems"] = problems(found, goal)
    for line in summary(found):
        say(line)
    return {"config": config.label, **found}


def compare(answers: dict[str, dict[str, int]], expected: Sequence[set[str]]) -> dict[str, int]:
    """Count answers that are equal to those without speculation, and those that differ from an
    answer that does not itself vary.

    Args:
        answers: by prompt, how often which digest came.
        expected: by prompt, the digests without speculation.
    """
    counts = {"compared": 0, "equal": 0, "different": 0}
    for prompt, digests in answers.items():
        known = expected[int(prompt)]
        for digest, times in digests.items():
            counts["compared"] += times
            counts["equal"] += times * (digest in known)
            counts["different"] += times * (digest not in known and len(known) == 1)
    return {**counts, "varying": sum(len(known) > 1 for known in expected)}


def problems(found: dict[str, Any], goal: Goal) -> list[str]:
    """Return what is wrong, a sentence each."""
    settled, after = found["settled"], found["after"]
    wrong = []
    if found["errors"]:
        wrong.append(
            f"{found['errors']} of {found['sent']} requests failed: "
            f"{'; '.join(found['first_errors'])}"
        )
    if goal.seconds is None and after["switches"] < goal.toggles:
        wrong.append(
            f"only {after['switches']} of {goal.toggles} switches, and a whole ramp brought no "
            "more; name a policy that switches under this load"
        )
    used_before, used_after = found["before"]["used_kv_tokens"], after["used_kv_tokens"]
    if used_before != used_after:
        wrong.append(f"{used_after} KV slots are in use at rest, {used_before} were before")
    growth = _growth(settled["gpu_used_mib"], after["gpu_used_mib"])
    if growth is not None and growth > _MAX_GROWTH_MIB:
        wrong.append(f"device memory grew by {growth} MiB after the first ramp")
    if found["captures"]:
        wrong.append(
            f"{len(found['captures'])} lines of the log tell of graphs captured while serving, the "
            f"first: {found['captures'][0]}"
        )
    outputs = found.get("outputs")
    # In less than float32, differently cut batches round differently: counted, not held against.
    if outputs is not None and outputs["different"] and found["dtype"] == "float32":
        wrong.append(
            f"{outputs['different']} of {outputs['compared']} outputs are not those without "
            "speculation"
        )
    return wrong


def summary(found: dict[str, Any]) -> list[str]:
    """Return lines that tell the figures."""
    before, settled, after = found["before"], found["settled"], found["after"]
    by_num_steps = found["steps"]["by_num_steps"]
    steps = ", ".join(f"{count} with {n} draft steps" for n, count in by_num_steps.items())
    outputs = found.get("outputs")
    if outputs is None:
        compared = "outputs: not comparable (simulated acceptance)"
    else:
        compared = (
            f"outputs: {outputs['equal']} of {outputs['compared']} equal to those without "
            f"speculation, {outputs['different']} different, {outputs['varying']} of "
            f"{_PROMPTS} prompts vary without speculation too"
        )
    return [
        f"{found['ramps']} ramps, {found['sent']} requests, {found['errors']} errors, "
        f"{after['switches']} switches",
        f"decode steps: {steps}",
        compared,
        f"KV slots in use at rest: {before['used_kv_tokens']} before, {after['used_kv_tokens']} "
        "after",
        f"device memory in use [MiB]: {before['gpu_used_mib']} before, {settled['gpu_used_mib']} "
        f"after the first ramp, {after['gpu_used_mib']} after the last",
        f"graphs captured while serving: {len(found['captures'])} lines of the log",
    ]


def captures(log: str) -> list[str]:
    """Return the lines of a log that tell of captured graphs."""
    return [line for line in log.splitlines() if _CAPTURE.match(line)]


def _ramped(lab: Lab, config: Config, goal: Goal, say: Say) -> dict[str, Any]:
    levels = sorted({point.c for point in lab.plan.points})
    job = lab.job(
        config,
        job="ramp",
        stages=[*levels, *reversed(levels[:-1])],
        **asdict(goal),
        **_requests(lab),
    )
    with lab.worker(config.label, config, job, "ramp.log") as worker:
        ready = worker.event(lab.limits.start, "starting")
        say(f"{config.label}: started in {ready['startup_s']:.0f} s")
        found = _followed(worker, lab, say)
        found["captures"] = captures(worker.log_text(ready["log_size"]))
        worker.event(lab.limits.call, "ending")
    found.pop("event")
    return {"dtype": ready["dtype"], "startup_s": ready["startup_s"], **found}


def _followed(worker: Worker, lab: Lab, say: Say) -> dict[str, Any]:
    while True:
        event = worker.event(lab.limits.call, "running a stage")
        if event["event"] == "ramped":
            return event
        if event["event"] == "ramp":
            say(f"ramp {event['ramps']}: {event['sent']} requests, {event['switches']} switches")


def _expected(lab: Lab, say: Say) -> list[set[str]]:
    config = Config(NO_SPEC)
    job = lab.job(config, job="answer", at_once=[lab.plan.peak, 1], **_requests(lab))
    passes = []
    with lab.worker(config.label, config, job, "ramp-no_spec.log") as worker:
        worker.event(lab.limits.start, "starting")
        say("answering the same prompts without speculation")
        while (event := worker.event(lab.limits.call, "answering"))["event"] != "done":
            if event["event"] == "answers":
                passes.append(event["digests"])
    return [set(answers) for answers in zip(*passes, strict=True)]


def _requests(lab: Lab) -> dict[str, Any]:
    points = lab.plan.points
    return {
        "prompts": _PROMPTS,
        "prompt_lens": sorted({point.prompt_tokens for point in points}),
        "output_len": points[0].output_tokens,
    }


def _growth(before: list[int] | None, after: list[int] | None) -> int | None:
    """Return how much the device that grew most has grown by."""
    if before is None or after is None:
        return None
    return max(b - a for a, b in zip(before, after, strict=True))
