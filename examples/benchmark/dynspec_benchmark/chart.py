"""The chart: throughput against concurrency, as a ratio to the server without speculation."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from dynspec_benchmark.plan import ADAPTIVE, NO_SPEC, STATIC
from dynspec_benchmark.report import panels, title
from dynspec_benchmark.results import Measurement, configs_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people with any colour vision tell apart, as in the other charts.
_BLUE, _VERMILLION, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#7F7F7F"
_KNOWN: dict[str, dict[str, Any]] = {
    NO_SPEC: {"color": _GREY, "linestyle": (0, (4, 3)), "label": "no speculation"},
    STATIC: {"color": _VERMILLION, "marker": "s", "label": "static speculation"},
    ADAPTIVE: {"color": _GREEN, "marker": "^", "label": "SGLang's adaptive mode"},
}
_OURS = (_BLUE, "#56B4E9", "#CC79A7", "#E69F00", "#000000")

_PANEL = (4.6, 3.4)  # inches
_LEAST_WIDTH = 7.5  # one panel alone would leave no room for the title
_DPI = 120


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw a panel for each backend and length of prompt and output, and write a picture.

    Args:
        data: results with at least one measurement.
        path: the file.

    Raises:
        OSError: it cannot be written.
    """
    found = list(panels(data["measurements"]))
    relative = all(entry["ratio"] is not None for _, entries in found for entry in entries)
    columns = _columns(found)
    rows = -(-len(found) // columns)
    width = max(_LEAST_WIDTH, _PANEL[0] * columns)
    # Without pyplot: no global state, and no window system asked.
    figure = Figure(figsize=(width, _PANEL[1] * rows + 0.9), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharey=relative, squeeze=False)
    styles = _styles(configs_of(data["measurements"]))
    for number, axes in enumerate(grid.flat):
        if number < len(found):
            _draw_panel(axes, found[number], styles, relative)
        else:
            axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(
            "throughput relative\nto no speculation" if relative else "output tokens per second",
            fontsize=9,
        )
    # When all is drawn: it ends the automatic choice of the upper limit.
    for axes in grid.flat:
        axes.set_ylim(bottom=0)
    _add_legend(figure, list(grid.flat))
    figure.suptitle(textwrap.fill(title(data), round(width * 14)), fontsize=9.5)
    figure.savefig(path)


def _columns(found: Sequence[tuple[str, Sequence[Measurement]]]) -> int:
    """Two or three beside each other; more could not be read where a README is shown."""
    return next((n for n in (3, 2) if len(found) % n == 0), min(len(found), 3))


def _draw_panel(
    axes: Axes,
    panel: tuple[str, Sequence[Measurement]],
    styles: dict[str, dict[str, Any]],
    relative: bool,
) -> None:
    name, entries = panel
    for label, style in styles.items():
        mine = [entry for entry in entries if entry["config"] == label]
        # What one token per second is in the unit of the axis.
        units = [entry["ratio"] / entry["tok_s"] if relative else 1.0 for entry in mine]
        requests = [entry["c"] for entry in mine]
        low, middle, high = (
            [entry[key] * unit for entry, unit in zip(mine, units, strict=True)]
            for key in ("tok_s_min", "tok_s", "tok_s_max")
        )
        axes.plot(requests, middle, markersize=4.5, **style)
        axes.fill_between(requests, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_title(name, fontsize=10)
    axes.set_xscale("log", base=2)
    _label_requests(axes, entries, relative)
    axes.tick_params(labelsize=8.5)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def _label_requests(axes: Axes, entries: Sequence[Measurement], relative: bool) -> None:
    """A tick for each number of requests; below it what a ratio of 1 stands for."""
    requests = sorted({entry["c"] for entry in entries})
    labels = [str(c) for c in requests]
    what = "requests at once"
    if relative:
        rates = {e["c"]: e["tok_s"] for e in entries if e["config"] == NO_SPEC}
        labels = [f"{c}\n{_short(rates[c])}" for c in requests]
        what += "; below, tok/s without speculation"
    axes.set_xticks(requests, labels)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(what, fontsize=9)


def _short(rate: float) -> str:
    return f"{rate:.0f}" if rate < 10_000 else f"{rate / 1000:.1f}k"


def _styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return how to draw each configuration. What is ours comes last, and so on top."""
    known = {label: {"linewidth": 1.6, **_KNOWN[label]} for label in labels if label in _KNOWN}
    ours = [label for label in labels if label not in _KNOWN]
    return known | {
        label: {
            "color": _OURS[number % len(_OURS)],
            "marker": "o",
            "linewidth": 2.2,
            "label": label,
        }
        for number, label in enumerate(ours)
    }


def _add_legend(figure: Figure, panels_drawn: Sequence[Axes]) -> None:
    handles: dict[str, Any] = {}
    for axes in panels_drawn:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=min(3, len(handles)),
        fontsize=8.5,
        frameon=False,
    )
