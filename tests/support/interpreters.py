"""Interpreters that have sglang_dynspec on their path at most: no .pth of it is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import sglang_dynspec

PACKAGE = Path(sglang_dynspec.__file__).parent
BOOTSTRAP = PACKAGE / "bootstrap"


def make_bare_python(folder: Path) -> Path:
    """An interpreter whose site-packages know nothing of us."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def on_path(*first: Path) -> str:
    """PYTHONPATH with what the tests run with, as plain folders: no .pth in them is read."""
    folders = [*first, PACKAGE.parent, *(p for p in sys.path if p.endswith("site-packages"))]
    return os.pathsep.join(map(str, folders))
