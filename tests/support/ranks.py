"""Launch scripts of servers with two ranks, each a process on the CPU, or on a GPU of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from sglang_dynspec.testing import cpu_engine

TESTS = Path(__file__).parents[1]


def run_two_ranks(
    folder: Path, script: str, *, timeout: float, succeeds: bool = True, **values: Any
) -> subprocess.CompletedProcess[str]:
    """Run a launch script to its end.

    Args:
        script: its text, whose places are filled with ``values``, and ``folder`` with the folder.
        succeeds: whether its exit code must be 0.
    """
    path = folder / "launch.py"
    text = textwrap.dedent(script).format(folder=str(folder), **values)
    path.write_text(text, encoding="utf-8")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_DYNSPEC_")}
    done = subprocess.run(
        [sys.executable, "-P", str(path)],
        env=clean | cpu_engine.environment(tp_size=2) | {"PYTHONPATH": _with_tests()},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0 or not succeeds, done.stdout + done.stderr
    return done


def _with_tests() -> str:
    """``PYTHONPATH`` by which a script finds this package."""
    return os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
