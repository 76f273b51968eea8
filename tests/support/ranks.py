"""Launch scripts of servers with several ranks, each a process, on the CPU or a GPU of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from sglang_dynspec.testing import cpu_engine

TESTS = Path(__file__).parents[1]


def run_ranks(
    tp_size: int,
    folder: Path,
    script: str,
    *,
    timeout: float,
    succeeds: bool = True,
    **values: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a launch script to its end.

    Args:
        tp_size: ranks.
        script: its text, whose places are filled with ``values``, and ``folder`` and ``tp_size``
            with these.
        succeeds: whether its exit code must be 0.
    """
    path = folder / "launch.py"
    text = textwrap.dedent(script).format(folder=str(folder), tp_size=tp_size, **values)
    path.write_text(text, encoding="utf-8")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_DYNSPEC_")}
    done = subprocess.run(
        [sys.executable, "-P", str(path)],
        env=clean | cpu_engine.environment(tp_size=tp_size) | {"PYTHONPATH": _with_tests()},
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
