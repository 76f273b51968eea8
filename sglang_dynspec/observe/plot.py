"""Charts of a timeline. Needs matplotlib: ``pip install 'sglang-dynspec[demo]'``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from sglang_dynspec.errors import DynspecError
from sglang_dynspec.observe.figure import new_figure
from sglang_dynspec.observe.timeline import Interval, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people with any colour vision tell apart.
_BLUE, _VERMILLION, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#7F7F7F"
_SHADE = "#E9E9E9"
_SIZE = (10.0, 7.2)  # inches


def draw(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Draw running requests, num_steps and accept length over time, and write a picture.

    Args:
        timeline: at least two samples.
        path: the file; its ending says which format (``.png``, ``.svg``, ``.pdf``).

    Raises:
        DynspecError: matplotlib is not installed.
        ValueError: the timeline has no decode step.
        OSError: the file cannot be written.
    """
    phases = timeline.phases()
    if not phases:
        raise ValueError("a timeline without decode steps cannot be drawn")
    figure = new_figure(*_SIZE)
    load, steps, accept = figure.subplots(3, sharex=True, height_ratios=[2.2, 1, 1.3])
    for axes in (load, steps, accept):
        _shade_plain(axes, phases)
        axes.grid(axis="y", color="white" if axes is steps else "#DDDDDD", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    _draw_load(load, timeline)
    _draw_steps(steps, timeline)
    _draw_accept(accept, timeline)
    accept.set_xlabel("time since the load began [s]")
    accept.set_xlim(timeline.samples[0].time, timeline.samples[-1].time)
    figure.suptitle(_title(timeline), fontsize=11)
    figure.savefig(path)


def thresholds(policy: str | None) -> dict[str, int]:
    """Return the batch sizes at which a policy given as text changes its mode, by their names; none
    if they are not known."""
    from sglang_dynspec.policy import BatchSize, parse_policy

    if policy is None:
        return {}
    try:
        parsed = parse_policy(policy)
    except DynspecError:
        # A class of the user's, which may be importable in the server only.
        return {}
    if not isinstance(parsed, BatchSize):
        return {}
    return {"off_at": parsed.off_at, "on_at": parsed.on_at}


def draw_threshold(axes: Axes, name: str, value: int) -> None:
    """Draw a threshold of a policy across a plot of requests."""
    axes.axhline(value, color=_VERMILLION, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"{name} = {value}",
        (1.0, value),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8,
        color=_VERMILLION,
    )


def _draw_load(axes: Axes, timeline: Timeline) -> None:
    from matplotlib.ticker import MaxNLocator

    samples = timeline.samples
    times = [sample.time for sample in samples]
    axes.step(
        times,
        [sample.in_flight for sample in samples],
        where="post",
        color=_GREY,
        linewidth=1.2,
        label="requests sent and not answered",
    )
    _steps(
        axes,
        timeline.intervals(),
        lambda interval: interval.batch_size,
        color=_BLUE,
        label="decode batch, mean",
    )
    top = max(sample.in_flight for sample in samples)
    for name, value in thresholds(timeline.policy).items():
        if 0 < value <= 2 * top:
            draw_threshold(axes, name, value)
            top = max(top, value)
    axes.set_ylim(0, top * 1.08 + 0.5)
    axes.set_ylabel("running requests")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper left", fontsize=8, frameon=True, framealpha=0.9)


def _draw_steps(axes: Axes, timeline: Timeline) -> None:
    intervals = timeline.intervals()
    _steps(axes, intervals, lambda interval: interval.num_steps, color=_VERMILLION)
    for interval in intervals:
        for n in interval.by_num_steps:
            if n != interval.num_steps:
                # Short visits to another mode, which a line through the main one would hide.
                axes.hlines(n, interval.start, interval.end, color=_VERMILLION, alpha=0.45)
    ladder = timeline.ladder or sorted(timeline.samples[-1].by_num_steps)
    axes.set_yticks(list(ladder))
    axes.set_ylim(-0.35, max(ladder) + 0.5)
    axes.set_ylabel("num_steps")


def _draw_accept(axes: Axes, timeline: Timeline) -> None:
    _steps(axes, timeline.intervals(), lambda interval: interval.accept_length, color=_GREEN)
    axes.set_ylim(0.8, None)
    axes.set_ylabel("accept length\n[tokens / request / step]")


def _steps(
    axes: Axes,
    intervals: Sequence[Interval],
    value: Callable[[Interval], float | None],
    *,
    color: str,
    label: str | None = None,
) -> None:
    """Draw a value that each interval has as a whole. It has none where no step ended."""
    edges = [interval.start for interval in intervals] + [intervals[-1].end]
    values = [value(interval) for interval in intervals]
    axes.stairs(
        [math.nan if v is None else v for v in values],
        edges,
        baseline=None,
        color=color,
        linewidth=1.8,
        label=label,
    )


def _shade_plain(axes: Axes, phases: Sequence[Interval]) -> None:
    label = "plain decode"
    for start, end in _plain(phases):
        axes.axvspan(start, end, color=_SHADE, linewidth=0, label=label, zorder=0)
        label = "_"  # matplotlib's name for "not in the legend"


def _plain(phases: Sequence[Interval]) -> Iterator[tuple[float, float]]:
    for phase in phases:
        if phase.num_steps == 0:
            yield phase.start, phase.end


def _title(timeline: Timeline) -> str:
    parts = [timeline.policy or "unknown policy", timeline.about.get("served")]
    if "sglang" in timeline.about:
        parts.append(f"SGLang {timeline.about['sglang']}")
    return "  |  ".join(part for part in parts if part)
