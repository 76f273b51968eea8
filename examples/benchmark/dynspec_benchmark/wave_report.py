"""The table of --wave. Imports no SGLang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dynspec_benchmark.plan import NO_SPEC
from dynspec_benchmark.report import title

_NONE = "-"
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "tok/s": lambda entry: f"{entry['tok_s']:.0f}",
    f"to `{NO_SPEC}`": lambda entry: _number(entry["ratio"]),
    "to the fastest": lambda entry: _number(entry["ratio_to_fastest"]),
    "accept length": lambda entry: _number(entry["accept_length"], 2),
    "steps by draft steps": lambda entry: _steps(entry["steps"]),
    "switches": lambda entry: _number(entry["switches"], 0),
    "device memory [MiB]": lambda entry: _memory(entry),
    "KV tokens": lambda entry: _number(entry["after"]["used_kv_tokens"], 0),
    "requests": lambda entry: str(entry["sent"]),
    "errors": lambda entry: str(entry["errors"]),
    f"outputs as `{NO_SPEC}`": lambda entry: _outputs(entry["outputs"]),
}


def markdown(data: dict[str, Any]) -> str:
    """Return the table, and what has to be known about it."""
    lines = [title(data) + ".", ""]
    if data["measurements"]:
        lines += [*_table(data["measurements"]), ""]
    lines += [*_notes(data), ""]
    lines += [f"- `{label}` was skipped: {reason}" for label, reason in data["skipped"].items()]
    lines += [f"- FAILED: {failure['message']}" for failure in data["failures"]]
    lines += [f"- FAILED: {problem}" for problem in data["problems"]]
    return "\n".join(lines).rstrip() + "\n"


def _table(entries: list[dict[str, Any]]) -> Iterator[str]:
    yield "| configuration | " + " | ".join(_COLUMNS) + " |"
    yield "|---|" + "---:|" * len(_COLUMNS)
    for entry in entries:
        cells = [cell(entry) for cell in _COLUMNS.values()]
        yield f"| `{entry['config']}` | " + " | ".join(cells) + " |"


def _notes(data: dict[str, Any]) -> Iterator[str]:
    wave, unit = data["wave"], data["unit"]
    yield (
        f"{unit[0].upper()}{unit[1:]}: {wave['cycles']} cycles of {wave['low']} and then "
        f"{wave['high']} clients, after one that does not count. Accept length: tokens that a "
        "request gains in a speculative step. Device memory: after the first cycle, and what it "
        "has grown by at the end. KV tokens: in use at the end, without a request."
    )
    entries = data["measurements"]
    if data["speculation"]["simulated_accept_len"] is not None:
        yield "Outputs are not comparable: acceptance is simulated."
    elif not any(entry["config"] == NO_SPEC for entry in entries):
        yield f"Outputs are not compared: there are none of `{NO_SPEC}`."
    elif varying := entries[0]["outputs"]["varying"]:
        yield (
            f"`{NO_SPEC}` itself answers {varying} prompts differently in different batches; such "
            "prompts are held against nobody."
        )


def _number(value: float | None, digits: int = 3) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _steps(steps: dict[str, dict[str, int]] | None) -> str:
    if steps is None:
        return _NONE
    return ", ".join(f"{n}: {count}" for n, count in steps["by_num_steps"].items()) or _NONE


def _memory(entry: dict[str, Any]) -> str:
    settled, growth = entry["settled"]["gpu_used_mib"], entry["growth_mib"]
    return _NONE if settled is None else f"{', '.join(map(str, settled))} ({growth:+d})"


def _outputs(outputs: dict[str, int] | None) -> str:
    return _NONE if outputs is None else f"{outputs['equal']} of {outputs['compared']}"
