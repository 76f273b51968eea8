"""What a simulation showed, as text for people and as JSON for programs."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dynspec.measured import Table
from sglang_dynspec.simulate.replay import TracedCosts
from sglang_dynspec.simulate.scenario import Scenario
from sglang_dynspec.simulate.server import Interval, Result

WIDTH = 100


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy did."""

    name: str
    """As the user wrote it."""
    policy: str
    """Its text; another one than the name where the name stands for what was found by trying."""
    result: Result


@dataclass(frozen=True, slots=True)
class Report:
    """Policies under one scenario."""

    table: Table
    scenario: Scenario
    load: dict[str, Any]
    """How the load was asked for: ``kind``, and ``low``, ``high`` or ``file``."""
    outcomes: Sequence[Outcome]
    notes: Sequence[str] = ()
    """What else there is to know of the conditions, as sentences."""


# --- text ---------------------------------------------------------------------------------------


def as_text(report: Report) -> str:
    """Return a report as plain text."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    for sentence in conditions(report):
        yield from textwrap.wrap(sentence, WIDTH, subsequent_indent="  ")
    yield ""
    yield from _grid(report)
    yield ""
    for outcome in report.outcomes:
        if outcome.policy != outcome.name:
            yield f"{outcome.name} is {outcome.policy}, found by trying."
    if _largest_batch(report) > report.scenario.costs.max_batch:
        yield (
            f"More than {report.scenario.costs.max_batch} requests were never measured: throughput "
            "is taken to stay as it is there."
        )
    yield from textwrap.wrap(
        "Regret is the share of the decode time that the best mode of each step would have saved. "
        "A model, not a measurement: no KV limit, acceptance is back at once after plain steps.",
        WIDTH,
    )


def _largest_batch(report: Report) -> float:
    intervals = (each for outcome in report.outcomes for each in outcome.result.intervals)
    return max((interval.batch_size for interval in intervals), default=0.0)


def conditions(report: Report) -> list[str]:
    """Return under what the policies were compared, as sentences."""
    scenario, table = report.scenario, report.table
    costs, machine = scenario.costs, scenario.machine
    backend = f", {costs.backend}" if costs.backend else ""
    prefill = (
        "prefill as the table includes it"
        if machine.prefill_tokens_per_s is None
        else f"prefill of {machine.prefill_tokens_per_s:g} tokens/s"
    )
    return [
        f"Costs: {table.source}{backend}{': ' if table.title else ''}{table.title}",
        f"Load: {describe_load(report)}",
        f"Accept length: {scenario.acceptance.in_words()} with {costs.num_steps} draft steps"
        f"{_measured_with(report)}",
        f"Server: at most {machine.max_running_requests} running requests, {prefill}, "
        f"noise {100 * machine.noise:g}%, seed {scenario.seed}",
        *report.notes,
    ]


def describe_load(report: Report) -> str:
    """Return the load in some words, for a title."""
    load, asked = report.scenario.load, report.load
    if asked["kind"] == "trace":
        name = os.path.basename(asked["file"])
        return f"trace {name}, {load.peak} requests over {load.duration:.4g} s"
    if asked["kind"] == "replay":
        return (
            f"replay of {os.path.basename(asked['file'])}, batches up to {load.peak} requests, "
            f"{load.duration:.4g} s; {asked['prompt_tokens']} tokens of context on average"
        )
    levels = f"{asked['low']} to {asked['high']}" if asked["low"] is not None else asked["high"]
    return (
        f"{asked['kind']}, {levels} requests at once, {load.duration:g} s; prompts of "
        f"{asked['prompt_tokens']} tokens, outputs of {asked['output_tokens']} on average"
    )


def _measured_with(report: Report) -> str:
    costs = report.scenario.costs
    if isinstance(costs, TracedCosts):
        return ""
    return f" (measured with {costs.accept_length:g}{', assumed' if costs.assumed else ''})"


def _grid(report: Report) -> Iterator[str]:
    ladder = report.scenario.costs.ladder
    modes = [f"{n} steps" if n else "plain" for n in ladder]
    rows = [
        ("", "", "ms per", "token", "switches", *("time in" for _ in modes), ""),
        ("policy", "tok/s", "mean", "p99", "a minute", *modes, "regret"),
    ]
    rows += [_row(outcome, ladder) for outcome in report.outcomes]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


def _row(outcome: Outcome, ladder: tuple[int, ...]) -> tuple[str, ...]:
    result = outcome.result
    return (
        outcome.name,
        f"{result.tok_s:.0f}" if result.tok_s >= 100 else f"{result.tok_s:.1f}",
        _milliseconds(result.time_per_token()),
        _milliseconds(result.time_per_token(0.99)),
        f"{result.switches_per_minute:.2f}",
        *(f"{100 * result.share(n):.1f}%" for n in ladder),
        f"{100 * result.regret:.2f}%",
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.2f}"


# --- JSON ---------------------------------------------------------------------------------------


def as_json(report: Report) -> dict[str, Any]:
    """Return a report for programs. These keys stay; others may be added::

    conditions
      table, title, backend, num_steps     of the measurements
      measured_accept_length               of the speculative ones; assumed_accept_length: true
                                           if nobody said so
      load                                 kind; low, high, prompt_tokens, output_tokens of a
                                           built-in load; file, requests of a trace; file,
                                           prompt_tokens, output_tokens of a replay
      duration                             seconds until the load ends
      accept_length                        low, high, period (seconds)
      max_running_requests, prefill_tokens_per_s, noise, seed
      notes                                a list of sentences, for people
    policies                               a list
      name, policy                         as asked for, and its text
      output_tok_s                         output tokens per simulated second
      time_per_token_s                     mean, p99; null if no request was answered
      requests                             answered
      simulated_s, decode_s                idle time included, and not
      tokens, steps, switches, switches_per_minute
      time_share                           of the decode time, by draft steps
      regret                               0 to 1, see Totals.regret
      intervals                            a list: start, end (seconds), batch_size (mean),
                                           waiting (at its end), num_steps (mean over decode
                                           time), output_tok_s, regret
    """
    return {
        "conditions": _conditions(report),
        "policies": [_policy(outcome, report.scenario) for outcome in report.outcomes],
    }


def _conditions(report: Report) -> dict[str, Any]:
    scenario, table = report.scenario, report.table
    acceptance, machine = scenario.acceptance, scenario.machine
    return {
        "table": table.source,
        "title": table.title,
        "backend": scenario.costs.backend,
        "num_steps": scenario.costs.num_steps,
        "measured_accept_length": scenario.costs.accept_length,
        "assumed_accept_length": scenario.costs.assumed,
        "load": report.load,
        "duration": scenario.load.duration,
        "accept_length": {
            "low": acceptance.low,
            "high": acceptance.high,
            "period": acceptance.period,
        },
        "max_running_requests": machine.max_running_requests,
        "prefill_tokens_per_s": machine.prefill_tokens_per_s,
        "noise": machine.noise,
        "seed": scenario.seed,
        "notes": list(report.notes),
    }


def _policy(outcome: Outcome, scenario: Scenario) -> dict[str, Any]:
    result = outcome.result
    return {
        "name": outcome.name,
        "policy": outcome.policy,
        "output_tok_s": result.tok_s,
        "time_per_token_s": {
            "mean": result.time_per_token(),
            "p99": result.time_per_token(0.99),
        },
        "requests": result.requests,
        "simulated_s": result.duration,
        "decode_s": result.seconds,
        "tokens": result.tokens,
        "steps": result.steps,
        "switches": result.switches,
        "switches_per_minute": result.switches_per_minute,
        "time_share": {str(n): result.share(n) for n in scenario.costs.ladder},
        "regret": result.regret,
        "intervals": [_interval(interval) for interval in result.intervals],
    }


def _interval(interval: Interval) -> dict[str, Any]:
    return {
        "start": interval.start,
        "end": interval.end,
        "batch_size": interval.batch_size,
        "waiting": interval.waiting,
        "num_steps": interval.num_steps,
        "output_tok_s": interval.tok_s,
        "regret": interval.regret,
    }
