"""How far policies stay behind the best mode of each moment, over many tables, loads and accept
lengths. Nothing but the package is needed::

    python examples/simulate_grid.py [--policy TEXT ...] [--seconds 1200] [--json FILE]

Cells are every shipped table with its backends and contexts, times 11 loads, times 3 accept
lengths: 198 in all. With the default policies that is some 12 minutes of CPU time, on all cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_dynspec.measured import read_table, shipped_tables
from sglang_dynspec.simulate.acceptance import Acceptance
from sglang_dynspec.simulate.command import default_levels, make_policy
from sglang_dynspec.simulate.costs import StepCosts
from sglang_dynspec.simulate.load import shape
from sglang_dynspec.simulate.scenario import Scenario

POLICIES = ("auto", "best_threshold", "sglang_adaptive")
LOADS = (
    ("ramp", None),
    ("square", None),
    ("bursts", None),
    *(("constant", 2**i) for i in range(8)),
)
ACCEPTANCES = {
    "1.3": Acceptance(1.3, 1.3),
    "2.8": Acceptance(2.8, 2.8),
    "1.3 to 2.8": Acceptance(1.3, 2.8, 600.0),
}
UNKNOWN_CONTEXT = 128
WORST = 5


@dataclass(frozen=True)
class Cell:
    """One scenario and one policy."""

    table: str
    backend: str | None
    context: int
    load: str
    concurrency: int | None
    """Of a constant load."""
    acceptance: str
    policy: str
    seconds: float


@dataclass(frozen=True)
class Found:
    """What was simulated in a cell."""

    cell: Cell
    regret: float
    switches_late: float
    """A minute, in the second half."""


def cells(policies: list[str], seconds: float) -> Iterator[Cell]:
    """Yield all cells."""
    for name in shipped_tables():
        for curve in read_table(name).curves:
            for load, concurrency in LOADS:
                for acceptance in ACCEPTANCES:
                    for policy in policies:
                        yield Cell(
                            name,
                            curve.backend,
                            curve.context or UNKNOWN_CONTEXT,
                            load,
                            concurrency,
                            acceptance,
                            policy,
                            seconds,
                        )


def simulate(cell: Cell) -> Found:
    """Simulate one cell."""
    costs = StepCosts(read_table(cell.table), cell.backend)
    low, high = default_levels(cell.load, costs, cell.context)
    load = shape(
        cell.load,
        low=low,
        high=cell.concurrency or high,
        duration=cell.seconds,
        prompt_tokens=cell.context,
    )
    scenario = Scenario(costs, load, ACCEPTANCES[cell.acceptance])
    result = scenario.simulate(make_policy(cell.policy, scenario))
    late = [each for each in result.intervals if each.start >= cell.seconds / 2]
    minutes = sum(each.end - each.start for each in late) / 60
    return Found(cell, result.regret, sum(each.switches for each in late) / max(minutes, 1e-9))


def report(found: list[Found], policies: list[str], seconds: float) -> Iterator[str]:
    """Yield the lines of a report."""
    count = len(found) // len(policies)
    yield f"{count} cells of {seconds:g} simulated seconds."
    yield ""
    yield f"{'':16}  {'regret':>15}  {'steady load: switches a minute':>32}"
    yield f"{'policy':16}  {'mean':>6}  {'worst':>7}  {'mean':>6}  {'most':>6}  {'cells > 1':>16}"
    for policy in policies:
        mine = [each for each in found if each.cell.policy == policy]
        regrets = [each.regret for each in mine]
        steady = [each.switches_late for each in mine if is_steady(each.cell)]
        yield (
            f"{policy:16}  {100 * statistics.mean(regrets):5.2f}%  {100 * max(regrets):6.2f}%  "
            f"{statistics.mean(steady):6.2f}  {max(steady):6.1f}  "
            f"{sum(each > 1 for each in steady):9d} of {len(steady)}"
        )
    yield ""
    yield "Steady load: constant, accept length fixed; counted in the second half."
    for policy in policies:
        yield ""
        yield f"Worst of {policy}:"
        mine = [each for each in found if each.cell.policy == policy]
        for each in sorted(mine, key=lambda one: -one.regret)[:WORST]:
            yield f"  {100 * each.regret:5.2f}%  {told(each.cell)}"


def is_steady(cell: Cell) -> bool:
    """Whether neither load nor acceptance changes."""
    acceptance = ACCEPTANCES[cell.acceptance]
    return cell.load == "constant" and acceptance.low == acceptance.high


def told(cell: Cell) -> str:
    """Return a cell's conditions in words."""
    backend = f" {cell.backend}" if cell.backend else ""
    concurrency = f" {cell.concurrency}" if cell.concurrency else ""
    return (
        f"{cell.table}{backend}, context {cell.context}, {cell.load}{concurrency}, accept length "
        f"{cell.acceptance}"
    )


def main() -> None:
    """Simulate all cells on all cores, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("::")[0])
    parser.add_argument("--policy", action="append", metavar="TEXT", help=f"default: {POLICIES}")
    parser.add_argument("--seconds", type=float, default=1200.0, help="simulated, of each cell")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every cell there")
    arguments = parser.parse_args()
    policies = arguments.policy or list(POLICIES)
    every = list(cells(policies, arguments.seconds))
    with multiprocessing.get_context("spawn").Pool() as pool:
        found = pool.map(simulate, every, chunksize=1)
    print("\n".join(report(found, policies, arguments.seconds)))
    if arguments.json:
        rows = [
            {**asdict(each.cell), "regret": each.regret, "switches_late": each.switches_late}
            for each in found
        ]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
