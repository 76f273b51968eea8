"""The demo from its first server to its verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeVar

from sglang_dynspec.demo.client import Client, greedy_payloads
from sglang_dynspec.demo.compare import Difference, differences
from sglang_dynspec.demo.errors import DemoError
from sglang_dynspec.demo.load import Answer, Load
from sglang_dynspec.demo.plan import (
    Plan,
    Workload,
    baseline_environment,
    dynspec_environment,
    server,
)
from sglang_dynspec.demo.report import Report
from sglang_dynspec.demo.sampler import require_in_force, run_sampled
from sglang_dynspec.demo.server import ServerProcess
from sglang_dynspec.observe.timeline import Timeline
from sglang_dynspec.testing.ports import free_port

_T = TypeVar("_T")

_SAMPLE_EVERY = 0.2  # s
_SHOWN_DIFFERENCES = 5

TIMELINE_FILE = "timeline.json"
CHART_FILE = "chart.png"
DYNSPEC_LOG = "server-dynspec.log"
BASELINE_LOG = "server-no-speculation.log"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo has found."""

    timeline: Timeline
    answers: Sequence[Answer]
    differences: Sequence[Difference]
    undecided: frozenset[int] = frozenset()
    """Prompts that the server without speculation, too, answers differently from time to time."""

    def problems(self) -> list[str]:
        """Return what is not as it must be, a sentence each; nothing if all is well."""
        return [*self._unused_modes(), *self._different_outputs()]

    def _unused_modes(self) -> list[str]:
        total = self.timeline.total()
        used = total.by_num_steps if total else {}
        ladder = self.timeline.ladder
        return [
            f"no decode step was run with num_steps {n}: the load never made the policy choose it"
            for n in (ladder[0], ladder[-1])
            if n not in used
        ]

    def _different_outputs(self) -> list[str]:
        if not self.differences:
            return []
        lines = [
            f"{len(self.differences)} of {len(self.answers)} outputs are not those without "
            "speculation",
            *(f"  {difference}" for difference in self.differences[:_SHOWN_DIFFERENCES]),
        ]
        if self.undecided:
            alike = len({d.prompt for d in self.differences} & self.undecided)
            lines.append(
                f"  {alike} of these prompts get different outputs from the server without "
                "speculation as well, alone and among others: there the model's best two tokens "
                "are as close as rounding, and nothing can be said"
            )
        return ["\n".join(lines)]


def run(plan: Plan, work: Workload, report: Report) -> Outcome:
    """Run both servers, one after the other, and write the timeline.

    Raises:
        DemoError: a server does not start, ends, refuses a request, or runs without dynspec.
        StatusError: the server knows nothing of dynspec.
        OSError: a file cannot be written.
    """
    payloads = greedy_payloads(work.prompts, tokens=plan.tokens)
    timeline = Timeline(policy=plan.policy, about=_about(plan, work))
    answers = _loaded(plan, work, report, payloads, timeline)
    report.timeline(timeline)
    found, undecided = _compared(plan, work, report, payloads, answers)
    outcome = Outcome(timeline, answers, found, undecided)
    timeline.about["outputs"] = len(answers)
    timeline.about["problems"] = outcome.problems()
    timeline.save(plan.output / TIMELINE_FILE)
    return outcome


def _loaded(
    plan: Plan,
    work: Workload,
    report: Report,
    payloads: Sequence[Mapping[str, Any]],
    timeline: Timeline,
) -> list[Answer]:
    port = free_port()
    with server(
        "the server with dynspec",
        work.with_speculation,
        port=port,
        environment=dynspec_environment(plan, work.environment),
        log=plan.output / DYNSPEC_LOG,
    ) as running:
        with report.working("Starting the server with dynspec", "Server with dynspec ready"):
            running.wait_ready(plan.start_timeout)
        return _explained(running, _load(running.url, plan, report, payloads, timeline))


async def _load(
    url: str,
    plan: Plan,
    report: Report,
    payloads: Sequence[Mapping[str, Any]],
    timeline: Timeline,
) -> list[Answer]:
    async with Client(url) as client:
        status = await client.status()
        require_in_force(status)
        report.line(
            f"dynspec is in force{f' by {status.route}' if status.route else ''}: policy "
            f"{status.policy}, draft steps {'/'.join(map(str, status.ladder))}"
        )
        timeline.ladder = status.ladder

        async def send(prompt: int) -> list[int]:
            return await client.generate(payloads[prompt])

        with report.progress() as show:
            load = Load(plan.stages, send, prompts=len(payloads), on_progress=lambda: show(load))
            await run_sampled(load, client.status, timeline, every=_SAMPLE_EVERY)
        return load.answers


def _compared(
    plan: Plan,
    work: Workload,
    report: Report,
    payloads: Sequence[Mapping[str, Any]],
    answers: Sequence[Answer],
) -> tuple[list[Difference], frozenset[int]]:
    asked = sorted({answer.prompt for answer in answers})
    port = free_port()
    with server(
        "the server without speculation",
        work.without_speculation,
        port=port,
        environment=baseline_environment(work.environment),
        log=plan.output / BASELINE_LOG,
    ) as running:
        with report.working(
            "Starting the server without speculation", "Server without speculation ready"
        ):
            running.wait_ready(plan.start_timeout)
        with report.working(
            "Answering the same prompts without speculation",
            f"{len(answers)} outputs compared to those of {len(asked)} prompts",
        ):
            return _explained(
                running, _compare(running.url, payloads, asked, answers, at_a_time=plan.peak)
            )


async def _compare(
    url: str,
    payloads: Sequence[Mapping[str, Any]],
    asked: Sequence[int],
    answers: Sequence[Answer],
    *,
    at_a_time: int,
) -> tuple[list[Difference], frozenset[int]]:
    async with Client(url) as client:
        expected = await _answers(client, payloads, asked, at_a_time)
        found = differences(answers, expected)
        different = sorted({difference.prompt for difference in found})
        # A control: only where this server agrees with itself does a difference mean something.
        again = await _answers(client, payloads, different, 1)
        return found, frozenset(n for n in different if again[n] != expected[n])


async def _answers(
    client: Client,
    payloads: Sequence[Mapping[str, Any]],
    prompts: Sequence[int],
    at_a_time: int,
) -> dict[int, list[int]]:
    places = asyncio.Semaphore(at_a_time)

    async def answer(prompt: int) -> list[int]:
        async with places:
            return await client.generate(payloads[prompt])

    outputs = await asyncio.gather(*(answer(prompt) for prompt in prompts))
    return dict(zip(prompts, outputs, strict=True))


def _explained(running: ServerProcess, work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine; if it fails, add what the server's log says."""
    try:
        return asyncio.run(work)
    except DemoError as error:
        running.check_alive()
        raise DemoError(f"{error}. {running.log_tail()}") from error


def _about(plan: Plan, work: Workload) -> dict[str, Any]:
    return {
        "sglang": version("sglang"),
        "served": work.title,
        "stages": [[stage.clients, stage.seconds] for stage in plan.stages],
        "tokens_per_request": plan.tokens,
        "prompts": len(work.prompts),
    }
