"""What the demo prints. On a terminal with a progress bar; elsewhere, in a CI log for one, in plain
lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.box import ROUNDED
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_dynspec.demo.load import Load
from sglang_dynspec.observe.timeline import Interval, Timeline

_LOG_WIDTH = 100  # columns where there is no terminal to ask


class Report:
    """Prints to a console.

    Args:
        console: stdout's by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        if not self.console.is_terminal:
            self.console.width = _LOG_WIDTH

    def line(self, text: str, style: str = "") -> None:
        """Print text as it is, without reading markup in it."""
        self.console.print(text, style=style, markup=False, soft_wrap=True)

    @contextmanager
    def working(self, what: str, done: str) -> Iterator[None]:
        """Say what is being done; then, unless an exception ends it, what is done and in how many
        seconds."""
        began = time.monotonic()
        if self.console.is_terminal:
            with self.console.status(what):
                yield
        else:
            self.line(f"{what} ...")
            yield
        self.line(f"{done} ({time.monotonic() - began:.0f} s)")

    @contextmanager
    def progress(self) -> Iterator[Callable[[Load], None]]:
        """Show a load's progress: yields a function to call whenever it may have changed."""
        if not self.console.is_terminal:
            yield self._stage_lines()
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
        )
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task("load", total=1.0, state="")

            def update(load: Load) -> None:
                state = f"{_clients(load)}, {len(load.answers)} answers"
                bar.update(task, completed=load.progress, state=state)

            yield update
            bar.update(task, completed=1.0)

    def timeline(self, timeline: Timeline) -> None:
        """Print what was decided when: a line for as long as clients and num_steps stay the
        same."""
        table = Table(box=ROUNDED, title="What was decided when", title_justify="left")
        for header in ("time [s]", "clients", "batch size", "num_steps", "", "accept len", "tok/s"):
            table.add_column(header, justify="left" if not header else "right")
        for phase in timeline.phases():
            table.add_row(*_row(phase), style="dim" if phase.num_steps == 0 else "")
        self.console.print(table)

    def _stage_lines(self) -> Callable[[Load], None]:
        shown = -1

        def update(load: Load) -> None:
            nonlocal shown
            if load.stage != shown:
                shown = load.stage
                self.line(
                    f"  stage {shown + 1} of {len(load.stages)}: {_clients(load)} "
                    f"(at {load.seconds:.1f} s, {len(load.answers)} answers so far)"
                )

        return update


def _clients(load: Load) -> str:
    return f"{load.clients} client{'' if load.clients == 1 else 's'}"


def _row(phase: Interval) -> tuple[str, ...]:
    assert phase.batch_size is not None
    assert phase.accept_length is not None
    return (
        f"{phase.start:.1f} - {phase.end:.1f}",
        str(phase.clients),
        f"{phase.batch_size:.1f}",
        str(phase.num_steps),
        "plain decode" if phase.num_steps == 0 else "speculative",
        f"{phase.accept_length:.2f}",
        f"{phase.tokens_per_second:.0f}",
    )
