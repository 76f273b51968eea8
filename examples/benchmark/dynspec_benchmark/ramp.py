"""--ramp: one dynspec server under a load that rises and falls, and everything that must hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dynspec_benchmark import checks
from dynspec_benchmark.measure import Lab, Say
from dynspec_benchmark.plan import CLOSED_LOOP_PROMPTS, NO_SPEC, Config
from dynspec_benchmark.process import Worker


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
        found["outputs"] = checks.compare(answers, _expected(lab, say))
    found["problems"] = problems(found, goal)
    for line in summary(found):
        say(line)
    return {"config": config.label, **found}


def problems(found: dict[str, Any], goal: Goal) -> list[str]:
    """Return what is wrong, a sentence each."""
    wrong = checks.problems(found)
    switches = found["after"]["switches"]
    if goal.seconds is None and switches < goal.toggles:
        wrong.append(
            f"only {switches} of {goal.toggles} switches, and a whole ramp brought no more; name a "
            "policy that switches under this load"
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
            f"{CLOSED_LOOP_PROMPTS} prompts vary without speculation too"
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


def _ramped(lab: Lab, config: Config, goal: Goal, say: Say) -> dict[str, Any]:
    levels = sorted({point.c for point in lab.plan.points})
    job = lab.job(
        config,
        job="ramp",
        stages=[*levels, *reversed(levels[:-1])],
        **asdict(goal),
        **lab.plan.closed_loop(),
    )
    with lab.worker(config.label, config, job, "ramp.log") as worker:
        ready = worker.event(lab.limits.start, "starting")
        say(f"{config.label}: started in {ready['startup_s']:.0f} s")
        found = _followed(worker, lab, say)
        found["captures"] = checks.captures(worker.log_text(ready["log_size"]))
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
    job = lab.job(config, job="answer", at_once=[lab.plan.peak, 1], **lab.plan.closed_loop())
    passes = []
    with lab.worker(config.label, config, job, "ramp-no_spec.log") as worker:
        worker.event(lab.limits.start, "starting")
        say("answering the same prompts without speculation")
        while (event := worker.event(lab.limits.call, "answering"))["event"] != "done":
            if event["event"] == "answers":
                passes.append(event["digests"])
    return checks.by_prompt(passes)
