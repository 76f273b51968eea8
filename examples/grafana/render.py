"""Draw the panels of dynspec.json from a Prometheus server, to look at them without Grafana.

    python examples/grafana/render.py --prometheus http://localhost:9090 --last 120 dashboard.png

Needs matplotlib (`pip install sglang-dynspec[demo]`). What Grafana does beyond it (several data
sources, transformations, other units) it does not.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, MaxNLocator

DASHBOARD = Path(__file__).with_name("dynspec.json")
UNITS = {"ops": "per second", "s": "us"}
"""How those of the panels are called here; seconds are drawn as microseconds."""
GRID_WIDTH = 24  # Grafana's
# Not through a proxy that the environment may name.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Series:
    """One line of a panel."""

    name: str
    seconds: list[float]
    values: list[float]


@dataclass(frozen=True)
class Prometheus:
    """A server's query API over a span of time."""

    url: str
    start: float
    end: float
    step: float
    rate_interval: str
    instance: str
    model_name: str

    def series(self, target: dict[str, Any]) -> list[Series]:
        """The lines of a target, in the order of their names."""
        span = {"start": self.start, "end": self.end, "step": self.step}
        results = self._ask("query_range", target, **span)
        return sorted((self._series(target, one) for one in results), key=lambda s: s.name)

    def rows(self, target: dict[str, Any]) -> list[dict[str, str]]:
        """The labels of what a target is at the end."""
        return [one["metric"] for one in self._ask("query", target, time=self.end)]

    def _series(self, target: dict[str, Any], result: dict[str, Any]) -> Series:
        points = [(float(at) - self.start, float(value)) for at, value in result["values"]]
        return Series(
            legend(target["legendFormat"], result["metric"]),
            [at for at, _ in points],
            [value for _, value in points],
        )

    def _ask(self, what: str, target: dict[str, Any], **when: float) -> list[dict[str, Any]]:
        expression = target["expr"]
        for variable in ("rate_interval", "instance", "model_name"):
            prefix = "$__" if variable == "rate_interval" else "$"
            expression = expression.replace(prefix + variable, getattr(self, variable))
        asked = urllib.parse.urlencode({"query": expression, **when})
        with _opener.open(f"{self.url}/api/v1/{what}?{asked}", timeout=30) as answer:
            results: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return results


def legend(template: str, labels: dict[str, str]) -> str:
    """A target's legend with the labels of one series."""
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), template).strip()


def draw(panel: dict[str, Any], axes: Any, prometheus: Prometheus) -> None:
    """Draw one panel."""
    unit = UNITS.get(panel["fieldConfig"]["defaults"].get("unit"))
    title = f"{panel['title']} ({unit})" if unit else panel["title"]
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    if panel["type"] == "table":
        draw_table(panel, axes, prometheus)
        return
    lines = [line for target in panel["targets"] for line in prometheus.series(target)]
    draw_lines(panel, axes, lines)
    axes.set_xlim(0, prometheus.end - prometheus.start)
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda at, _: f"{int(at) // 60}:{int(at) % 60:02}")
    )


def draw_lines(panel: dict[str, Any], axes: Any, lines: Sequence[Series]) -> None:
    """Draw the lines of a panel, stacked or beside each other."""
    defaults = panel["fieldConfig"]["defaults"]
    custom, unit = defaults["custom"], defaults["unit"]
    scale = 1e6 if unit == "s" else 1
    if not lines:
        axes.text(0.5, 0.5, "no data", ha="center", va="center", transform=axes.transAxes)
    elif custom["stacking"]["mode"] == "normal":
        stack(axes, lines)
    else:
        style = "steps-post" if custom["lineInterpolation"] == "stepAfter" else "default"
        for line in lines:
            values = [value * scale for value in line.values]
            axes.plot(line.seconds, values, label=line.name, drawstyle=style, linewidth=1.6)
    if custom["scaleDistribution"]["type"] == "log":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    if "decimals" in defaults:
        axes.yaxis.set_major_locator(MaxNLocator(integer=defaults["decimals"] == 0, nbins=5))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if lines:
        place = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.16)}
        axes.legend(fontsize=8, ncols=4, frameon=False, **place)


def stack(axes: Any, lines: Sequence[Series]) -> None:
    """Draw lines on top of each other; one that begins late is 0 before."""
    seconds = sorted({at for line in lines for at in line.seconds})
    known = [dict(zip(line.seconds, line.values, strict=True)) for line in lines]
    values = [[one.get(at, 0.0) for at in seconds] for one in known]
    axes.stackplot(seconds, values, labels=[line.name for line in lines], alpha=0.7)


def draw_table(panel: dict[str, Any], axes: Any, prometheus: Prometheus) -> None:
    """Draw the rows of a table, each as names and values below each other."""
    axes.axis("off")
    order = panel["transformations"][0]["options"]["indexByName"]
    rows = [row for target in panel["targets"] for row in prometheus.rows(target)]
    cells = [[name, shortened(row.get(name, ""))] for row in rows for name in order]
    if cells:
        table = axes.table(cells, colWidths=[0.2, 0.8], cellLoc="left", bbox=(0, 0, 1, 0.95))
        table.auto_set_font_size(False)
        table.set_fontsize(8)
        for cell in table.get_celld().values():
            cell.set_edgecolor("lightgray")


def shortened(text: str) -> str:
    """The end of a path, which is what tells models apart."""
    return Path(text).name if text.startswith("/") else text


def render(prometheus: Prometheus, output: Path) -> None:
    """Draw all panels, where Grafana would put them, into a file."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    tops = sorted({panel["gridPos"]["y"] for panel in panels})
    figure = pyplot.figure(figsize=(12, 2.5 * len(tops)))
    grid = figure.add_gridspec(len(tops), GRID_WIDTH, hspace=0.8, wspace=3)
    for panel in panels:
        place = panel["gridPos"]
        columns = slice(place["x"], place["x"] + place["w"])
        draw(panel, figure.add_subplot(grid[tops.index(place["y"]), columns]), prometheus)
    figure.savefig(output, dpi=80, bbox_inches="tight")
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--prometheus", default="http://localhost:9090", help="its URL")
    parser.add_argument("--last", type=float, default=1800, help="seconds up to now")
    parser.add_argument("--end", type=float, help="seconds since 1970, instead of now")
    parser.add_argument("--rate-interval", default="1m", help="as Grafana's $__rate_interval")
    parser.add_argument("--instance", default=".*", help="a regular expression")
    parser.add_argument("--model-name", default=".*", help="a regular expression")
    given = parser.parse_args(arguments)
    end = time.time() if given.end is None else given.end
    span = (end - given.last, end, max(1.0, given.last / 400))
    found = (given.rate_interval, given.instance, given.model_name)
    render(Prometheus(given.prometheus, *span, *found), given.output)


if __name__ == "__main__":
    main()
