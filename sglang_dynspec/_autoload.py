"""Interpreter start: the way into processes that nobody wrote a launch script for.

Run by ``sglang_dynspec.pth`` (or ``.start``, from Python 3.15) in site-packages, or by
``bootstrap/sitecustomize.py``. It uses the standard library only, does nothing unless the
environment asks for it, and even then only waits for the import of SGLang: most Python processes
that inherit the environment never import it. Not even ``typing`` is imported here, which would be
most of the cost.
"""

from __future__ import annotations

import os
import sys

# Read here by name, because importing settings.py costs every process some milliseconds.
POLICY_VARIABLES = ("SGLANG_DYNSPEC_POLICY", "SGLANG_DYNSPEC_CONFIG")
CPU_ENGINE_VARIABLE = "SGLANG_DYNSPEC_CPU_ENGINE"


def run() -> None:
    """Wait for SGLang, if the environment names a policy. Safe to call twice: a ``.pth`` line can
    run twice in one start of a virtual environment."""
    if os.environ.get(CPU_ENGINE_VARIABLE) == "1":
        from sglang_dynspec.testing import cpu_engine

        cpu_engine.install()
    if _asked_for():
        _wait_for_sglang()


def plugin() -> None:
    """Entry point of the group ``sglang.srt.plugins`` (SGLang 0.5.11 and later)."""
    _arm("plugin entry point")


def _asked_for() -> bool:
    return any(os.environ.get(name) for name in POLICY_VARIABLES)


def _wait_for_sglang() -> None:
    if "sglang" in sys.modules:
        _arm("interpreter start")
    elif not any(isinstance(finder, _BeforeSglang) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeSglang())


def _arm(route: str) -> None:
    if not _asked_for():
        return  # or no longer: deactivate() takes it back
    from sglang_dynspec._guard import guarded

    with guarded(f"activation by {route}"):
        from sglang_dynspec import activation

        activation.arm_from_environment(route)


class _BeforeSglang:
    """Finds no module, but hears of the first import of SGLang.

    It stays where it is: Python is walking ``sys.meta_path`` when it hears, and would skip the next
    finder if this one left.
    """

    heard = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "sglang" and not self.heard:
            self.heard = True
            _arm("interpreter start")
