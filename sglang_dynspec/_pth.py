"""Where ``sglang_dynspec.pth`` lies that starts dynspec with the interpreter."""

from __future__ import annotations

import site
import sys
from pathlib import Path

NAME = "sglang_dynspec.pth"


def pth_files() -> list[Path]:
    """Return the files that an interpreter with the flags of this one runs at its start."""
    return [] if sys.flags.no_site else [*_in(_folders(bool(site.ENABLE_USER_SITE)))]


def skipped_pth_files() -> list[Path]:
    """Return the files that it leaves out, by a flag (-S, -s, -I) or in a virtual environment."""
    in_effect = pth_files()
    return [path for path in _in(_folders(user=True)) if path not in in_effect]


def _folders(user: bool) -> list[str]:
    return [*site.getsitepackages(), *([site.getusersitepackages()] if user else [])]


def _in(folders: list[str]) -> list[Path]:
    return [path for folder in folders if (path := Path(folder) / NAME).is_file()]
