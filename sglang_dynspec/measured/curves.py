"""What has been measured, whatever file it came from: points, curves, tables."""

from __future__ import annotations

import reprlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from sglang_dynspec.errors import ConfigError

DEFAULT_NUM_STEPS = 3
"""Draft steps of the speculative mode, where a source does not say (SGLang's own default for EAGLE
on most models)."""

MOST_REQUESTS = 10**9
MOST_TOKENS_PER_SECOND = 1e12
LEAST_TOKENS_PER_SECOND = 1e-6


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement of both modes, in output tokens per second; None where not measured."""

    c: int
    """Requests at once (>= 1)."""
    no_spec: float | None
    static_spec: float | None

    @property
    def ratio(self) -> float | None:
        """With speculation / without, or None where one of them is missing."""
        if self.no_spec is None or self.static_spec is None:
            return None
        return self.static_spec / self.no_spec


@dataclass(frozen=True, slots=True)
class Curve:
    """The points of one load, by rising concurrency."""

    context: int
    """Prompt tokens of a request; 0 where the source does not say."""
    backend: str | None
    """Attention backend."""
    points: tuple[Point, ...]
    output_tokens: int | None = None
    """Output tokens of a request, if the source says so."""

    @property
    def label(self) -> str:
        """For people, as in ``triton, context 4096``; empty for the only curve of a plain table."""
        parts = [self.backend] if self.backend else []
        parts += [f"context {self.context}"] if self.context else []
        parts += [f"output {self.output_tokens}"] if self.output_tokens is not None else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Table:
    """What one source says about one model on one machine."""

    source: str
    """The file or files, or the name of a shipped table."""
    title: str
    """Model, hardware and software, as far as the source names them."""
    num_steps: int
    """Draft steps of the speculative mode."""
    accept_length: float | None
    """Tokens a request gains in a speculative step, bonus token included, if the source says so."""
    curves: tuple[Curve, ...]
    notes: tuple[str, ...] = ()
    """What to know of the figures, as sentences."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure or two of one load: a row of a table, or a run of a benchmark."""

    c: int
    no_spec: float | None
    static_spec: float | None
    context: int = 0
    backend: str | None = None
    output_tokens: int | None = None


def curves_of(rows: Iterable[Row]) -> tuple[Curve, ...]:
    """Sort rows into curves. Where a point was measured more than once it gets the median."""
    loads: dict[tuple[str, int, int], dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        # Stand-ins that sort; -1 and "" are not taken by anything that was measured.
        output_tokens = -1 if row.output_tokens is None else row.output_tokens
        loads[(row.backend or "", row.context, output_tokens)][row.c].append(row)
    return tuple(
        Curve(
            context,
            backend or None,
            tuple(_point(c, points[c]) for c in sorted(points)),
            None if output_tokens < 0 else output_tokens,
        )
        for (backend, context, output_tokens), points in sorted(loads.items())
    )


def _point(c: int, rows: Iterable[Row]) -> Point:
    rows = list(rows)
    return Point(c, _median(row.no_spec for row in rows), _median(row.static_spec for row in rows))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def whole(value: Any, where: str, *, at_least: int, at_most: int = MOST_REQUESTS) -> int:
    """Return a whole number of a file.

    Raises:
        ConfigError: it is none, or out of range; ``where`` names file, place and field.
    """
    if isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= at_most:
        return value
    # What files hold in practice is too small, not too large.
    limit = f" and <= {at_most}" if isinstance(value, int) and value > at_most else ""
    raise ConfigError(f"{where} is {shown(value)}; it must be a whole number >= {at_least}{limit}")


def tokens_per_second(value: Any, where: str) -> float | None:
    """Return a throughput of a file, or None for null.

    Raises:
        ConfigError: as :func:`whole`.
    """
    if value is None:
        return None
    # With bounds on both sides ratios stay finite, and have a logarithm.
    if is_number(value) and LEAST_TOKENS_PER_SECOND <= value <= MOST_TOKENS_PER_SECOND:
        return float(value)
    raise ConfigError(
        f"{where} is {shown(value)}; it must be a number > 0 (output tokens per second), or null "
        "where not measured"
    )


def accept_length(value: Any, where: str) -> float | None:
    """Return the tokens that a request gains in a step, or None for null.

    Raises:
        ConfigError: as :func:`whole`.
    """
    if value is None:
        return None
    if is_number(value) and 0 < value <= MOST_REQUESTS:
        return float(value)
    raise ConfigError(
        f"{where} is {shown(value)}; it must be a number > 0 (tokens that a request gains in a "
        "step, bonus token included), or null where not known"
    )


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a number; true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """Return a value of a file for a message, cut where it is long or deep."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist = 2, 3, 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
