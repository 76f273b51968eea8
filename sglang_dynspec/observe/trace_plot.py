"""The chart of a trace. Needs matplotlib: ``pip install 'sglang-dynspec[demo]'``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from sglang_dynspec.observe.figure import new_figure
from sglang_dynspec.observe.plot import draw_threshold, thresholds
from sglang_dynspec.observe.trace_file import Span, TraceFile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people with any colour vision tell apart.
_BLUE, _VERMILLION, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#7F7F7F"
_ORANGE, _SHADE = "#E69F00", "#E9E9E9"
_MARKERS = "v^sDoPX*"
_SIZE = (10.0, 8.4)  # inches
_MOST = 240
"""Spans that can be told apart in a chart."""


def draw(trace: TraceFile, path: str | os.PathLike[str]) -> None:
    """Draw load, num_steps, accept length and tokens per second over time, and write a picture.

    Args:
        trace: of one run.
        path: the file; its ending says which format (``.png``, ``.svg``, ``.pdf``).

    Raises:
        DynspecError: matplotlib is not installed.
        OSError: the file cannot be written.
        ValueError: its ending is none that can be written.
    """
    figure = new_figure(*_SIZE)
    load, steps, accept, speed = figure.subplots(4, sharex=True, height_ratios=[1.7, 1.2, 1, 1.7])
    scale, unit = _scale(trace.seconds)
    spans = trace.spans(_MOST)
    plain = _stretches(trace, plain=True, scale=scale)
    for axes in (load, steps, accept, speed):
        # All stretches in one: there may be thousands.
        axes.broken_barh(
            [(start, end - start) for start, end, _ in plain],
            (0, 1),
            transform=axes.get_xaxis_transform(),
            facecolors=_SHADE,
            linewidth=0,
            zorder=0,
        )
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    _draw_load(load, trace, spans, scale)
    _draw_steps(steps, trace, plain, scale)
    _draw(accept, spans, lambda span: span.accept_length, scale, color=_GREEN)
    accept.set_ylim(0.9, None)
    accept.set_ylabel("accept length\nof speculative steps")
    _draw_speed(speed, spans, scale)
    speed.set_xlabel(f"time since the first decision [{unit}]")
    speed.set_xlim(0, trace.seconds / scale or 1)
    figure.align_ylabels()
    figure.suptitle(_title(trace), fontsize=11)
    figure.savefig(path)


def _draw_load(axes: Axes, trace: TraceFile, spans: Sequence[Span], scale: float) -> None:
    from matplotlib.ticker import MaxNLocator

    if any(span.waiting for span in spans):
        _draw(axes, spans, lambda s: s.waiting, scale, color=_GREY, label="waiting", width=1.2)
    _draw(axes, spans, lambda s: s.batch_size, scale, color=_BLUE, label="decode batch, mean")
    top = max((s.batch_size or 0.0 for s in spans), default=1.0)
    for name, value in thresholds(trace.policy).items():
        if 0 < value <= 1.5 * top:
            draw_threshold(axes, name, value)
    axes.set_ylim(0, None)
    axes.set_ylabel("requests")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes)


def _draw_steps(
    axes: Axes, trace: TraceFile, plain: Sequence[tuple[float, float, int]], scale: float
) -> None:
    speculative = _stretches(trace, plain=False, scale=scale)
    for stretches, colour, label in (
        (speculative, _VERMILLION, "speculative"),
        (plain, "black", "plain decode (shaded)"),
    ):
        axes.hlines(
            [n for _, _, n in stretches],
            [start for start, _, _ in stretches],
            [end for _, end, _ in stretches],
            color=colour,
            linewidth=2.6,
            label=label,
        )
    joints = [(e.time / scale, e) for e in trace.entries if e.num_steps != e.previous]
    axes.vlines(
        [time for time, _ in joints],
        [e.previous for _, e in joints],
        [e.num_steps for _, e in joints],
        color=_VERMILLION,
        linewidth=0.7,
        alpha=0.6,
    )
    most = max(*trace.ladder, *(e.num_steps for e in trace.entries))
    for i, (reason, count) in enumerate(sorted(trace.switches.items())):
        axes.plot(
            [time for time, e in joints if e.reason == reason],
            [most * (1.2 + 0.16 * i)] * count,
            _MARKERS[i % len(_MARKERS)],
            color=(_BLUE, _GREEN, _ORANGE, _GREY)[i % 4],
            markersize=4,
            label=f"{count} switch{'' if count == 1 else 'es'} by {reason}",
        )
    axes.set_yticks(list(trace.ladder))
    rows = max(1, len(trace.switches))
    axes.set_ylim(-0.15 * most - 0.1, most * (1.2 + 0.16 * rows) + 0.1)
    axes.set_ylabel("num_steps")
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Above the axes, where it hides nothing."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=5, fontsize=8, frameon=False, borderpad=0
    )


def _draw_speed(axes: Axes, spans: Sequence[Span], scale: float) -> None:
    _draw(axes, spans, lambda s: s.tokens_per_second, scale, color=_BLUE, label="actual")
    if any(span.predicted is not None for span in spans):
        _draw(
            axes,
            spans,
            lambda s: s.predicted,
            scale,
            color=_ORANGE,
            label="predicted by the policy",
            width=1.3,
        )
    axes.set_ylim(0, None)
    axes.set_ylabel("tokens / s\nof decoding")
    _legend(axes)


def _draw(
    axes: Axes,
    spans: Sequence[Span],
    value: Callable[[Span], float | None],
    scale: float,
    *,
    color: str,
    label: str | None = None,
    width: float = 1.8,
) -> None:
    """Draw a value that each span has as a whole, with gaps where it has none."""
    values: list[float] = []
    edges = [spans[0].start / scale]
    for span in spans:
        if span.start / scale > edges[-1]:
            values.append(math.nan)
            edges.append(span.start / scale)
        found = value(span)
        values.append(math.nan if found is None else found)
        edges.append(span.end / scale)
    axes.stairs(values, edges, baseline=None, color=color, linewidth=width, label=label)


def _stretches(trace: TraceFile, *, plain: bool, scale: float) -> list[tuple[float, float, int]]:
    """Start, end and num_steps of the times between two lines with one num_steps, joined."""
    found: list[tuple[float, float, int]] = []
    for before, after in pairwise(trace.entries):
        n, start = before.num_steps, before.time / scale
        end = max(start, (after.time - after.pause) / scale)
        if (n == 0) != plain:
            continue
        if found and found[-1][1:] == (start, n):
            found[-1] = (found[-1][0], end, n)
        else:
            found.append((start, end, n))
    return found


def _scale(seconds: float) -> tuple[float, str]:
    if seconds > 5 * 3600:
        return 3600.0, "h"
    return (60.0, "min") if seconds > 600 else (1.0, "s")


def _title(trace: TraceFile) -> str:
    model = str(trace.header.get("model_path") or "")
    parts = [
        trace.policy or "unknown policy",
        os.path.basename(model.rstrip("/")),
        f"SGLang {trace.header['sglang']}" if "sglang" in trace.header else "",
    ]
    return "  |  ".join(part for part in parts if part)
