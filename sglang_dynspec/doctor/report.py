"""Findings as text and as JSON.

The JSON object has ``format`` (1), ``version`` (of sglang_dynspec), ``status`` (the worst of the
findings), ``exit_code``, and ``findings``: a list of objects with ``check``, ``status``, ``says``,
``fix`` (or null) and ``details``. Keys and the values of ``check`` and ``status`` stay as they are
within a format; sentences may change.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, TextIO

from sglang_dynspec import __version__
from sglang_dynspec.doctor.findings import Finding, Status, worst

FORMAT = 1

_COLOURS: dict[Status, str] = {"ok": "32", "note": "36", "warning": "33", "blocking": "1;31"}
_NAME_WIDTH = 18
_WIDTH = 100  # columns where there is no terminal to ask, and at most


def as_json(findings: Sequence[Finding], exit_code: int) -> dict[str, Any]:
    """Return the findings for programs, see the module."""
    return {
        "format": FORMAT,
        "version": __version__,
        "status": worst(findings),
        "exit_code": exit_code,
        "findings": [
            {
                "check": finding.check,
                "status": finding.status,
                "says": finding.says,
                "fix": finding.fix,
                "details": dict(finding.details),
            }
            for finding in findings
        ],
    }


def as_text(findings: Iterable[Finding], *, colour: bool, width: int = _WIDTH) -> str:
    """Return the findings for people, one paragraph for each group of checks."""
    findings = list(findings)
    lines = []
    for group, members in groupby(findings, key=lambda finding: finding.group):
        lines += [_painted(group, "1", colour), *(_item(f, colour, width) for f in members), ""]
    return "\n".join([*lines, _verdict(findings, colour)])


def wants_colour(stream: TextIO) -> bool:
    """Whether to write in colour: on a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width_of(stream: TextIO) -> int:
    """Return how many columns a line may have."""
    if not stream.isatty():
        return _WIDTH
    return max(60, min(_WIDTH, shutil.get_terminal_size().columns))


def _item(finding: Finding, colour: bool, width: int) -> str:
    start = f"  {finding.status:<8}  {finding.name:<{_NAME_WIDTH}}"
    indent = " " * len(start)
    lines = _wrapped(finding.says, start, indent, width)
    if finding.fix is not None:
        lines += "\n" + _wrapped(f"fix: {finding.fix}", indent, f"{indent}     ", width)
    painted = _painted(f"{finding.status:<8}", _COLOURS[finding.status], colour)
    return f"  {painted}{lines[10:]}"


def _wrapped(text: str, first: str, later: str, width: int) -> str:
    # Paths and commands are to be copied, so they are not broken.
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _verdict(findings: Sequence[Finding], colour: bool) -> str:
    blocking = sum(finding.status == "blocking" for finding in findings)
    warnings = sum(finding.status == "warning" for finding in findings)
    if blocking:
        text = f"{_count(blocking, 'thing')} in the way of dynspec"
    else:
        text = "Nothing found in the way of dynspec"
    text += f", {_count(warnings, 'warning')}." if warnings else "."
    return _painted(text, _COLOURS[worst(findings)], colour)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _painted(text: str, code: str, colour: bool) -> str:
    return f"\033[{code}m{text}\033[0m" if colour else text
