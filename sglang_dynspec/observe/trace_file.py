"""Reads what :mod:`sglang_dynspec.observe.trace` has written."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sglang_dynspec import __version__
from sglang_dynspec.errors import DynspecError
from sglang_dynspec.observe.server_info import ModeCount
from sglang_dynspec.observe.trace import FORMAT, OLD

_FIX = "give the file that SGLANG_DYNSPEC_TRACE named"


class TraceError(DynspecError, ValueError):
    """A file that is no trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line; see :mod:`sglang_dynspec.observe.trace` for the fields of the same names."""

    time: float
    """Seconds since the first line."""
    step: int
    why: str
    num_steps: int
    previous: int
    reason: str
    batch_size: int
    context_tokens: int
    waiting: int
    pause: float
    by_num_steps: Mapping[int, ModeCount]
    """What has ended since the line before."""
    predicted: Mapping[int, float]
    """Tokens per second by draft steps; empty where the policy predicts none."""
    dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What happened between two lines, or between more of them.

    Steps count for the span in which they ended, which is one or two after they began.
    """

    start: float
    """Seconds since the first line, as is ``end``."""
    end: float
    waiting: int
    """Requests in the waiting queue, at the most."""
    context: float
    """Tokens of a request."""
    by_num_steps: Mapping[int, ModeCount]
    predicted: float | None
    """Tokens per second in the mode in use, or None."""

    @property
    def total(self) -> ModeCount:
        """All steps."""
        return sum(self.by_num_steps.values(), ModeCount())

    @property
    def batch_size(self) -> float | None:
        """Mean requests in a step, or None if no step ended."""
        total = self.total
        return total.requests / total.steps if total.steps else None

    @property
    def accept_length(self) -> float | None:
        """Tokens a request gained in a speculative step, bonus token included, or None if no such
        step ended."""
        parts = [count for n, count in self.by_num_steps.items() if n > 0]
        total = sum(parts, ModeCount())
        return total.tokens / total.requests if total.requests else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding, or None if no step ended."""
        total = self.total
        return total.tokens / total.seconds if total.seconds > 0 else None

    def joined(self, later: Span) -> Span:
        """Return this span together with a later one."""
        ours, theirs = self.end - self.start, later.end - later.start
        share = ours / (ours + theirs) if ours + theirs > 0 else 0.5
        predicted = self.predicted if later.predicted is None else later.predicted
        if self.predicted is not None and later.predicted is not None:
            predicted = share * self.predicted + (1 - share) * later.predicted
        none = ModeCount()
        return Span(
            start=self.start,
            end=later.end,
            waiting=max(self.waiting, later.waiting),
            context=share * self.context + (1 - share) * later.context,
            by_num_steps={
                n: self.by_num_steps.get(n, none) + later.by_num_steps.get(n, none)
                for n in sorted({*self.by_num_steps, *later.by_num_steps})
            },
            predicted=predicted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """The trace of one run of a server."""

    path: str
    header: Mapping[str, Any]
    """Of that run, without ``trace``."""
    entries: Sequence[Entry]
    """At least two."""
    runs: int
    """Runs that the file holds; this is the last one."""

    @property
    def policy(self) -> str | None:
        """As text, as it was at first."""
        policy = self.header.get("policy")
        return policy if isinstance(policy, str) else None

    @property
    def ladder(self) -> tuple[int, ...]:
        """Draft steps that could be run, ascending."""
        return tuple(self.header["ladder"])

    @property
    def seconds(self) -> float:
        """From the first line to the last."""
        return self.entries[-1].time

    @property
    def switches(self) -> Counter[str]:
        """Changes of num_steps by what they came from."""
        return Counter(e.reason for e in self.entries if e.num_steps != e.previous)

    def spans(self, most: int | None = None) -> list[Span]:
        """Return what happened between each two lines, pauses left out.

        Args:
            most: how many are wanted at most, about; neighbours are joined until none is shorter
                than that share of the whole, but not over a pause.
        """
        shortest = self.seconds / most if most else 0.0
        spans: list[Span] = []
        for before, after in pairwise(self.entries):
            span = _span(before, after)
            last = spans[-1] if spans else None
            if last and last.end == span.start and last.end - last.start < shortest:
                spans[-1] = last.joined(span)
            else:
                spans.append(span)
        return spans

    def total(self) -> ModeCount:
        """Return all steps of the trace."""
        return sum((span.total for span in self.spans()), ModeCount())


def read_trace(path: str | os.PathLike[str]) -> TraceFile:
    """Read a trace, beginning with what was moved away when the file had grown too large
    (``FILE.1``). Of several runs of a server in one file the last counts. A line that was cut off
    at the end of a run is left out.

    Raises:
        TraceError: it cannot be read, is no trace, has a newer format, or no two lines.
    """
    name = os.fspath(path)
    run, runs, header = None, 0, dict[str, Any]()
    lines: list[tuple[str, dict[str, Any]]] = []
    old = [name + OLD] if os.path.exists(name + OLD) else []
    for file in (*old, name):
        for where, content in _lines(file):
            if "trace" in content:
                _check_header(content, where)
                if content["run"] != run:
                    run, runs, header, lines = content["run"], runs + 1, content, []
            else:
                lines.append((where, content))
    if len(lines) < 2:
        raise TraceError(
            f"{name} holds {len(lines)} decisions of the last run of the server, and 2 are needed; "
            "send it some requests, or give another file"
        )
    start = _number(lines[0][1].get("time"), lines[0][0])
    entries = [_entry(content, where, start) for where, content in lines]
    header = {key: value for key, value in header.items() if key != "trace"}
    return TraceFile(path=name, header=header, entries=entries, runs=runs)


def _lines(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    numbered = [(i, text) for i, text in enumerate(_read(name).split("\n"), 1) if text.strip()]
    for at, (number, text) in enumerate(numbered):
        where = f"{name}, line {number}"
        content = _parsed(text)
        if at == 0 and (content is None or "trace" not in content):
            raise TraceError(
                f"{where} is {text[:60]!r}, and a trace begins with "
                f'{{"trace":{FORMAT},"run":...}}; {_FIX}'
            )
        if content is not None:
            yield where, content
            continue
        # Cut off: the last of the file, or of a server that was killed.
        following = _parsed(numbered[at + 1][1]) if at + 1 < len(numbered) else {"trace": None}
        if following is None or "trace" not in following:
            raise TraceError(f"{where} is no JSON object: {text[:60]!r}; take the line out")


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _read(name: str) -> str:
    try:
        with open(name, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot read the trace {name!r}: {reason}; {_FIX}") from error


def _check_header(content: dict[str, Any], where: str) -> None:
    if content["trace"] != FORMAT:
        raise TraceError(
            f"{where}: the trace has format {content['trace']!r}, and sglang_dynspec {__version__} "
            f"reads {FORMAT}; use the version that wrote it ({content.get('dynspec', 'unknown')})"
        )
    ladder = content.get("ladder")
    good = isinstance(ladder, list) and ladder and all(type(n) is int and n >= 0 for n in ladder)
    if not good or "run" not in content:
        raise TraceError(f"{where} lacks a run or a ladder, as in [0, 3]; {_FIX}")


def _entry(content: dict[str, Any], where: str, start: float) -> Entry:
    try:
        return Entry(
            time=_number(content["time"], where) - start,
            step=int(content["step"]),
            why=str(content["why"]),
            num_steps=int(content["num_steps"]),
            previous=int(content["previous"]),
            reason=str(content["reason"]),
            batch_size=int(content["batch_size"]),
            context_tokens=int(content["context_tokens"]),
            waiting=int(content["waiting"]),
            pause=_number(content["pause"], where),
            by_num_steps={int(n): _count(count) for n, count in content["steps"].items()},
            predicted={int(n): float(v) for n, v in (content["predicted"] or {}).items()},
            dropped=int(content["dropped"]),
        )
    except KeyError as error:
        raise TraceError(f"{where} has no {error}; take the line out") from error
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{where} has a value that cannot be read: {error}") from error


def _count(count: Mapping[str, Any]) -> ModeCount:
    return ModeCount(
        int(count["steps"]), int(count["requests"]), int(count["tokens"]), float(count["seconds"])
    )


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TraceError(f"{where} has {value!r} where a number of seconds must be")
    return float(value)


def _span(before: Entry, after: Entry) -> Span:
    # A clock that was set back must not make a span end before it begins.
    end = max(before.time, after.time - after.pause)
    return Span(
        start=before.time,
        end=end,
        waiting=before.waiting,
        context=before.context_tokens / max(1, before.batch_size),
        by_num_steps=after.by_num_steps,
        predicted=before.predicted.get(before.num_steps),
    )
