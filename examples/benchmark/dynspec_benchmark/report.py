"""Table and chart of results. Imports neither SGLang nor, for the table, anything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from dynspec_benchmark.plan import NO_SPEC, STATIC
from dynspec_benchmark.results import Measurement, configs_of, key_of

TABLE_FILE = "table.md"
CHART_FILE = "chart.png"


def write(data: dict[str, Any], output: Path) -> None:
    """Print the table, and write table and chart.

    Args:
        data: results.
        output: the folder.

    Raises:
        OSError: a file cannot be written.
    """
    if not data["measurements"]:
        print("Nothing has been measured: no table, no chart")
        return
    text = markdown(data)
    print(text, end="")
    output.mkdir(parents=True, exist_ok=True)
    (output / TABLE_FILE).write_text(text, encoding="utf-8")
    try:
        from dynspec_benchmark.chart import draw
    except ImportError as error:
        print(f"No chart: {error}; pip install matplotlib, here or where you draw it with --report")
        return
    draw(data, output / CHART_FILE)
    print(f"Table: {output / TABLE_FILE}; chart: {output / CHART_FILE}")


def panels(measurements: Iterable[Measurement]) -> Iterator[tuple[str, list[Measurement]]]:
    """Yield a title and the measurements of each backend, prompt and output length."""
    ordered = sorted(measurements, key=lambda e: (_panel_of(e)[1:], key_of(e)))
    for (backend, prompt, output), entries in groupby(ordered, _panel_of):
        yield f"{backend}, prompt {prompt}, output {output}", list(entries)


def _panel_of(entry: Measurement) -> tuple[str, int, int]:
    return key_of(entry)[:3]


def title(data: dict[str, Any]) -> str:
    """One line about what was measured on what."""
    hardware, software = data["hardware"], data["software"]
    speculation = data["speculation"]
    device = hardware["device"]
    parts = [
        f"SGLang {software['sglang']} on "
        + (device if device == "CPU" else f"{hardware['count']}x {device}"),
        data["model"],
        f"{speculation['algorithm']}, {speculation['num_steps']} draft steps",
    ]
    if speculation["simulated_accept_len"] is not None:
        parts.append(f"simulated accept length {speculation['simulated_accept_len']:g}")
    return "; ".join(parts)


def markdown(data: dict[str, Any]) -> str:
    """Return tables, and what has to be known about them."""
    measurements = data["measurements"]
    lines = [title(data) + ".", ""]
    for name, entries in panels(measurements):
        lines += [f"**{name}**", "", *_table(entries, configs_of(measurements)), ""]
    lines += [*_notes(data), ""]
    lines += [f"- `{label}`: {text}" for label, text in _outputs(measurements)]
    lines += [f"- `{label}` was skipped: {reason}" for label, reason in data["skipped"].items()]
    lines += [f"- FAILED: {failure['message']}" for failure in data["failures"]]
    return "\n".join(lines) + "\n"


def _table(entries: Sequence[Measurement], labels: Sequence[str]) -> Iterator[str]:
    shown = [label for label in labels if any(e["config"] == label for e in entries)]
    yield "| requests | " + " | ".join(f"`{label}`" for label in shown) + " |"
    yield "|---:|" + "---:|" * len(shown)
    for c, group in groupby(entries, lambda entry: int(entry["c"])):
        point = list(group)
        cells = {entry["config"]: _cell(entry, point) for entry in point}
        yield f"| {c} | " + " | ".join(cells.get(label, "-") for label in shown) + " |"


def _cell(entry: Measurement, point: Sequence[Measurement]) -> str:
    rate = f"{entry['tok_s']:.0f}"
    if entry["tok_s"] == max(e["tok_s"] for e in point) and len(point) > 1:
        rate = f"**{rate}**"
    ratios = []
    if entry["ratio"] is not None and entry["config"] != NO_SPEC:
        ratios.append(f"{entry['ratio']:.3f}")
        # The same number once more, where no_spec is the better one.
        best = entry["ratio_to_best"]
        if best not in (None, entry["ratio"]) and entry["config"] != STATIC:
            ratios.append(f"{best:.3f}")
    waits = " *" if entry["waits_for_kv"] else ""
    return rate + (f" ({'; '.join(ratios)})" if ratios else "") + waits


def _notes(data: dict[str, Any]) -> Iterator[str]:
    measurements = data["measurements"]
    runs = sorted({len(entry["runs"]) for entry in measurements})
    spread = max((e["tok_s_max"] - e["tok_s_min"]) / e["tok_s"] for e in measurements)
    yield (
        f"{data['unit'][0].upper()}{data['unit'][1:]}; medians of "
        f"{' to '.join(map(str, dict.fromkeys((runs[0], runs[-1]))))} runs, which lie within "
        f"{spread:.1%} of each other at most. In parentheses the ratio to `{NO_SPEC}`, and after "
        f"it the ratio to `{STATIC}` where that is better than `{NO_SPEC}`."
    )
    if any(entry["config"] == "adaptive" for entry in measurements):
        yield f"`adaptive`: {data['method']['adaptive']}."
    if any(entry["waits_for_kv"] for entry in measurements):
        yield "\\* More tokens than the KV pool holds: some requests wait for others to end."


def _outputs(measurements: Sequence[Measurement]) -> Iterator[tuple[str, str]]:
    """Yield a label, and how its outputs compare to those of the server without speculation."""
    for label in configs_of(measurements):
        entries = [e for e in measurements if e["config"] == label and e["ids"] is not None]
        compared = [entry for entry in entries if "compared" in entry["ids"]]
        parts = []
        if compared:
            total = {
                name: sum(entry["ids"][name] for entry in compared)
                for name in ("equal", "compared", "varying")
            }
            parts.append(f"{total['equal']} of {total['compared']} outputs equal to `{NO_SPEC}`")
            if total["varying"]:
                parts.append(f"which itself varies for {total['varying']} prompts")
        other = [entry["ids"]["note"] for entry in entries if "note" in entry["ids"]]
        if other:
            parts.append(f"{other[0]} at {len(other)} of {len(entries)} points")
        if parts:
            yield label, ", ".join(parts)
