"""What comes of holding the tables against releases, and how it is said."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dynspec.engine.contract import Instance, Live
from sglang_dynspec.engine.dialect import SUPPORTED

from . import check, tables
from .source import Source

RECORD = Path(__file__).with_name("functions.json")

LEFT_OUT = {
    "0.5.8.post1": "older than the oldest that dynspec is made for",
}
"""Releases that are not supported and need not be, and why. ``select`` refuses them; what they lack
is said, and is no failure."""


@dataclass(frozen=True)
class Outcome:
    """One release against the table that it fits, or fits best.

    Attributes:
        release: as on the index.
        table: its own, or of an unsupported release the nearest.
        problems: a sentence for each mismatch.
        functions: fingerprints of its functions.
        changed: functions that are not as in the release that was recorded.
    """

    release: str
    table: tables.Table
    problems: Sequence[str] = ()
    functions: dict[str, str] = field(default_factory=dict)
    changed: Sequence[str] = ()

    @property
    def supported(self) -> bool:
        return tables.key_of(self.release) in SUPPORTED

    @property
    def new(self) -> bool:
        """Whether nobody has looked at it yet."""
        return not self.supported and self.release not in LEFT_OUT

    @property
    def warnings(self) -> Sequence[str]:
        """Functions to look at."""
        return () if self.release in LEFT_OUT else self.changed

    @property
    def failed(self) -> bool:
        """Whether it is not as it should be. A release that is too new to be known should fit."""
        return bool(self.problems) and self.release not in LEFT_OUT

    @property
    def verdict(self) -> str:
        said = "; ".join(self.problems) or "ok"
        return said if self.supported else f"not supported; {self.table.key}: {said}"


def outcome(release: str, source: Source) -> Outcome:
    """Hold the tables that a release may fit against its source; the best fit counts."""
    found = [(check.problems(source, t), t) for t in tables.candidates(tables.key_of(release))]
    problems, table = min(found, key=lambda pair: len(pair[0]))
    functions = check.fingerprints(source, table)
    before = recorded().get(table.key, {})
    return Outcome(release, table, problems, functions, differing(before, functions))


def differing(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Functions that both know, and that differ."""
    return [path for path in now if path in before and before[path] != now[path]]


def recorded() -> dict[str, dict[str, str]]:
    """Fingerprints by key of a supported release."""
    return {key: entry["functions"] for key, entry in _read_record().items()}


def record(outcomes: Iterable[Outcome]) -> None:
    """Write down the fingerprints of supported releases. The last post release of each counts,
    which is what the tests run on."""
    entries = _read_record()
    for one in outcomes:
        if one.supported:
            entries[one.table.key] = {"release": one.release, "functions": one.functions}
    in_order = {key: entries[key] for key in SUPPORTED if key in entries}
    RECORD.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")


def _read_record() -> dict[str, Any]:
    entries: dict[str, Any] = json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else {}
    return entries


HEADINGS = ("release", "dialect", "contract", "functions changed", "since the one before")


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """The table, without its headings."""
    made: list[tuple[str, ...]] = []
    for i, one in enumerate(outcomes):
        before = outcomes[i - 1].functions if i else {}
        changed = str(len(one.changed)) if one.table.key in recorded() else "no record"
        since = str(len(differing(before, one.functions))) if i else ""
        dialect = one.table.family if one.supported else ""
        made.append((one.release, dialect, one.verdict, changed, since))
    return made


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The table in Markdown."""
    lines: list[tuple[str, ...]] = [HEADINGS, ("---", "---", "---", "---:", "---:")]
    lines += [tuple(cell.replace("|", "\\|") for cell in row) for row in rows(outcomes)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text(outcomes: Sequence[Outcome]) -> str:
    """The table for a terminal, and below it what does not fit into a cell."""
    short = [
        HEADINGS,
        *(_short(row, one) for row, one in zip(rows(outcomes), outcomes, strict=True)),
    ]
    widths = [max(len(row[i]) for row in short) for i in range(len(HEADINGS))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in short]
    return "\n".join([*(line.rstrip() for line in lines), *details(outcomes)])


def details(outcomes: Sequence[Outcome]) -> list[str]:
    """Every mismatch and every change, a line each."""
    lines = []
    for one in outcomes:
        if one.problems or one.warnings:
            lines += ["", f"{one.release}, held against {one.table.key}:"]
        lines += [f"  {'MISMATCH' if one.failed else 'mismatch'}: {p}" for p in one.problems]
        lines += [f"  warning: {path} has changed" for path in one.warnings]
    return lines


def register() -> str:
    """The contract in Markdown: every name, what is asked of it, on which releases, and why."""
    known: dict[tuple[str, ...], list[str]] = {}
    for key in SUPPORTED:
        for entry in _entries(tables.table(key)):
            releases = known.setdefault(entry, [])
            if key not in releases:
                releases.append(key)
    lines = ["| name of SGLang | use | asked of it | releases | why |", "|---|---|---|---|---|"]
    for (path, use, asked, why), keys in known.items():
        lines.append(f"| `{path}` | {use} | {asked} | {_span(keys)} | {why} |")
    return "\n".join(lines)


def _short(row: tuple[str, ...], one: Outcome) -> tuple[str, ...]:
    count = len(one.problems)
    verdict = f"{count} mismatch{'es' if count > 1 else ''}" if count else "ok"
    verdict = verdict if one.supported else f"not supported; {one.table.key}: {verdict}"
    return (*row[:2], verdict, *row[3:])


def _entries(table: tables.Table) -> Iterable[tuple[str, str, str, str]]:
    for name in table.names:
        takes = [*name.parameters, *(f"{k}=" for k in name.keywords)]
        asked = [f"({', '.join(takes)})"] if takes or name.use == "call" else []
        yield name.path, name.use, " ".join([*asked, ", ".join(name.fields)]).strip(), name.why
    attributes: list[Live | Instance] = [*table.live, *table.instances]
    for entry in attributes:
        yield entry.path, "read", ", ".join(entry.fields), entry.why


def _span(keys: Sequence[str]) -> str:
    """Releases in words: all, one, or from one to another, in as many pieces as it takes."""
    if tuple(keys) == SUPPORTED:
        return "all"
    pieces: list[list[str]] = []
    for key in keys:
        follows = pieces and SUPPORTED.index(key) == SUPPORTED.index(pieces[-1][-1]) + 1
        pieces[-1].append(key) if follows else pieces.append([key])
    words = [p[0] if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in pieces]
    return ", ".join(words)
