"""What the machine says of its GPUs, without a process that would hold memory on one."""

from __future__ import annotations

import os
import subprocess
from typing import Any

_TIMEOUT = 30.0  # s


def hardware(gpu: dict[str, Any] | None) -> dict[str, Any]:
    """Return what the results are of.

    Args:
        gpu: what torch says, or None.
    """
    if gpu is None:
        return {"device": "CPU", "count": 1}
    drivers = _query("driver_version")
    return {**gpu, "driver": drivers[0] if drivers else None}


def used_mib() -> list[int] | None:
    """Return the memory in use on each GPU of ``CUDA_VISIBLE_DEVICES``, by default on all, or None
    where nobody tells."""
    try:
        return [int(value) for value in _query("memory.used")] or None
    except ValueError:  # "[N/A]": shared memory, say
        return None


def _query(field: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    if ours := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={ours}")
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
