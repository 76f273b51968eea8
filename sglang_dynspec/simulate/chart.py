"""Charts of a simulation. Needs matplotlib: ``pip install 'sglang-dynspec[demo]'``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_dynspec.observe.figure import new_figure
from sglang_dynspec.simulate.load import Shape
from sglang_dynspec.simulate.report import Outcome, Report, describe_load
from sglang_dynspec.simulate.server import Interval, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people with any colour vision tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
_GREY, _LANE = "#7F7F7F", "#EFEFEF"
_WIDTH, _HEIGHT, _LANE_HEIGHT = 10.0, 6.6, 0.32  # inches


def draw(report: Report, path: str | os.PathLike[str]) -> None:
    """Draw load, num_steps, tokens per second and regret over time, and write a picture.

    Args:
        report: one policy or more; four read well.
        path: the file; its ending says which format (``.png``, ``.svg``, ``.pdf``).

    Raises:
        DynspecError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    lanes = max(0.7, _LANE_HEIGHT * len(report.outcomes))
    figure = new_figure(_WIDTH, _HEIGHT + lanes)
    load, steps, tok_s, regret = figure.subplots(
        4, sharex=True, gridspec_kw={"height_ratios": [1.5, lanes, 2.2, 1.5]}
    )
    for axes in (load, steps, tok_s, regret):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        if axes is not steps:
            axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    _draw_load(load, report)
    _draw_steps(steps, report)
    _draw_each(tok_s, report, lambda interval: interval.tok_s)
    tok_s.set_ylabel("output tokens / s")
    _draw_each(regret, report, lambda interval: 100 * interval.regret)
    regret.set_ylim(0, max(1.0, regret.get_ylim()[1]))
    regret.set_ylabel("regret [%]")
    regret.set_xlabel("simulated time [s]")
    regret.set_xlim(0, max(outcome.result.duration for outcome in report.outcomes))
    figure.legend(
        *tok_s.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2 if len(report.outcomes) > 1 else 1,
        fontsize=8,
        frameon=False,
        handlelength=4,
    )
    figure.suptitle(_title(report), fontsize=10)
    figure.savefig(path)


def _draw_load(axes: Axes, report: Report) -> None:
    load = report.scenario.load
    if isinstance(load, Shape):
        times = [load.duration * i / 1200 for i in range(1201)]
        levels = [load.level(time) for time in times]
        axes.fill_between(times, levels, step="post", color=_GREY, alpha=0.25, linewidth=0)
        axes.step(times, levels, where="post", color=_GREY, linewidth=1.2)
    else:
        # How many requests there are at once depends on the policy.
        _draw_each(axes, report, lambda interval: interval.batch_size + interval.waiting)
    axes.set_ylim(0, None)
    axes.set_ylabel("requests\nat once")
    acceptance = report.scenario.acceptance
    if acceptance.low != acceptance.high:
        _draw_acceptance(axes, report)


def _draw_acceptance(axes: Axes, report: Report) -> None:
    end = max(outcome.result.duration for outcome in report.outcomes)
    times = [end * i / 600 for i in range(601)]
    right = axes.twinx()
    right.plot(
        times,
        [report.scenario.acceptance.at(time) for time in times],
        color="black",
        linewidth=1.2,
        linestyle=(0, (1, 1.5)),
    )
    right.set_ylim(1, report.scenario.costs.num_steps + 1)
    right.set_ylabel("accept length\n(dotted)")
    right.spines[["top", "left"]].set_visible(False)


def _draw_steps(axes: Axes, report: Report) -> None:
    """One lane for each policy, filled as high as the mean of its draft steps."""
    most, count = report.scenario.costs.num_steps, len(report.outcomes)
    for i, outcome in enumerate(report.outcomes):
        floor = count - 1 - i
        values, edges = _stairs(outcome.result, lambda interval: interval.num_steps / most)
        axes.axhspan(floor, floor + 0.8, color=_LANE, linewidth=0, zorder=0)
        axes.stairs(
            [floor + 0.8 * value for value in values],
            edges,
            baseline=floor,
            fill=True,
            color=_COLOURS[i % len(_COLOURS)],
            linewidth=0,
        )
    axes.set_yticks(
        [count - 1 - i + 0.4 for i in range(count)],
        [_short(outcome.name) for outcome in report.outcomes],
        fontsize=8,
    )
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.1, count)
    axes.spines["left"].set_visible(False)
    axes.set_title(
        f"draft steps (coloured: {most}; grey: 0, a plain decode)", fontsize=9, loc="left"
    )


def _draw_each(axes: Axes, report: Report, value: Callable[[Interval], float]) -> None:
    for i, outcome in enumerate(report.outcomes):
        values, edges = _stairs(outcome.result, value)
        axes.stairs(
            values,
            edges,
            baseline=None,
            color=_COLOURS[i % len(_COLOURS)],
            linestyle=_DASHES[i % len(_DASHES)],
            linewidth=1.6,
            label=_label(outcome),
        )
    axes.set_ylim(0, None)


def _stairs(result: Result, value: Callable[[Interval], float]) -> tuple[list[float], list[float]]:
    """Return values and edges, with a gap where no step was run."""
    values: list[float] = []
    edges = [0.0]
    for interval in result.intervals:
        if interval.start > edges[-1]:
            values.append(math.nan)
            edges.append(interval.start)
        values.append(value(interval))
        edges.append(max(interval.end, edges[-1]))
    return (values, edges) if values else ([math.nan], [0.0, 1.0])


def _label(outcome: Outcome) -> str:
    found = "" if outcome.policy == outcome.name else f" = {outcome.policy}"
    return f"{outcome.name}{found}: regret {100 * outcome.result.regret:.2f}%"


def _short(name: str) -> str:
    return name if len(name) <= 30 else f"{name[:29]}…"


def _title(report: Report) -> str:
    costs, acceptance = report.scenario.costs, report.scenario.acceptance
    backend = f" ({costs.backend})" if costs.backend else ""
    accept = f"{acceptance.low:.3g}"
    if acceptance.high != acceptance.low:
        accept += f" to {acceptance.high:.3g}"
    load = describe_load(report).partition(";")[0]
    return f"Simulated: {report.table.source}{backend}  |  {load}  |  accept length {accept}"
