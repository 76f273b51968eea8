"""A progress bar on stderr, where rich is installed and somebody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

Update = Callable[[str, float], None]
"""Hears what is being done, and how far all of it is, 0 to 1."""


@contextmanager
def progress() -> Iterator[Update]:
    """Show a bar while the block runs; yields what moves it."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda what, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=32), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        # A policy's text may hold what rich would read as markup.
        yield lambda what, done: bar.update(
            task, description=what.replace("[", r"\["), completed=done
        )
