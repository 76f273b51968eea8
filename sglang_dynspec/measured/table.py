"""Tables of output tokens per second by concurrency, without speculation and with it.

The format is JSON with a list ``rows``, one for each concurrency (and context, and attention
backend); ``examples/benchmark`` writes it::

    {
      "model": "...", "hardware": "...", "software": "...",
      "speculation": {"num_steps": 3, "simulated_accept_len": 2.2},
      "rows": [
        {"c": 1, "no_spec": 204.6, "static_spec": 320.1},
        {"c": 32, "no_spec": 5146.5, "static_spec": null, "prompt_tokens": 128, "backend": "triton"}
      ]
    }

In a row ``c`` is the number of requests at once; ``no_spec`` and ``static_spec`` are output tokens
per second without and with speculation always on, and may be absent or null where not measured;
``prompt_tokens`` or ``ctx`` (prompt tokens, 0 by default) and ``backend`` (any text) tell loads
apart. What else a file holds is left alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from sglang_dynspec.errors import ConfigError

DEFAULT_NUM_STEPS = 3
"""Draft steps of the speculative rows, where a table does not say (SGLang's own default for EAGLE
on most models)."""

_MODES = ("no_spec", "static_spec")


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
    """Prompt tokens of a request."""
    backend: str | None
    points: tuple[Point, ...]

    @property
    def label(self) -> str:
        """For people, as in ``triton, context 4096``; empty for the only curve of a plain table."""
        parts = [self.backend] if self.backend else []
        return ", ".join(parts + ([f"context {self.context}"] if self.context else []))


@dataclass(frozen=True, slots=True)
class Table:
    """What one source says about one model on one machine."""

    source: str
    """The file, or the name of a shipped table."""
    title: str
    """Model, hardware and software, as far as the source names them."""
    num_steps: int
    """Draft steps of the speculative mode."""
    accept_length: float | None
    """Tokens a request gains in a speculative step, bonus token included, if the source says so."""
    curves: tuple[Curve, ...]


def shipped_tables() -> list[str]:
    """Return the names of the tables that come with the package, for :func:`read_table`."""
    folder = resources.files("sglang_dynspec.measured") / "tables"
    return sorted(
        f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")
    )


def read_table(source: str | os.PathLike[str]) -> Table:
    """Read a table.

    Args:
        source: a file, or the name of a table that comes with the package.

    Raises:
        ConfigError: it cannot be read, or a value in it is none that can be used; names the file,
            the row and the field.
    """
    name = os.fspath(source)
    return parse_table(_text(name), name)


def parse_table(text: str, source: str) -> Table:
    """Read the text of a table; ``source`` stands in errors.

    Raises:
        ConfigError: as :func:`read_table`.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is no JSON: {error}") from error
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(
            f'{source} has no list "rows"; a table looks like '
            '{"rows": [{"c": 1, "no_spec": 92.6, "static_spec": 77.5}, ...]}'
        )
    return Table(
        source=source,
        title="; ".join(
            _words(content.get(key))
            for key in ("model", "hardware", "software")
            if content.get(key)
        ),
        num_steps=_num_steps(content, source),
        accept_length=_accept_length(content, source),
        curves=_curves([_row(row, f"{source}, row {i + 1}") for i, row in enumerate(rows)]),
    )


def _text(name: str) -> str:
    try:
        if name in shipped_tables():
            return (
                resources.files("sglang_dynspec.measured") / "tables" / f"{name}.json"
            ).read_text("utf-8")
        with open(name, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot read the table {name!r}: {reason}; give a file, or a table that comes "
            f"with the package: {', '.join(shipped_tables())}"
        ) from error


def _row(row: Any, where: str) -> tuple[int, str | None, Point]:
    if not isinstance(row, dict):
        raise ConfigError(f'{where} is {row!r}; it must look like {{"c": 1, "no_spec": 92.6, ...}}')
    if "c" not in row:
        raise ConfigError(f'{where} has no "c", the number of requests at once')
    values = {mode: _number(row.get(mode), f"{where}, {mode}") for mode in _MODES}
    if all(value is None for value in values.values()):
        raise ConfigError(
            f"{where} has neither {_MODES[0]} nor {_MODES[1]} (output tokens per second)"
        )
    context = row.get("ctx", row.get("prompt_tokens", 0))
    backend = row.get("backend")
    return (
        _whole(context, f"{where}, {'ctx' if 'ctx' in row else 'prompt_tokens'}", at_least=0),
        None if backend is None else str(backend),
        Point(
            _whole(row["c"], f"{where}, c", at_least=1), values["no_spec"], values["static_spec"]
        ),
    )


def _curves(rows: Sequence[tuple[int, str | None, Point]]) -> tuple[Curve, ...]:
    groups: dict[tuple[int, str | None], dict[int, Point]] = {}
    for context, backend, point in rows:
        points = groups.setdefault((context, backend), {})
        known = points.get(point.c)
        # Modes that were measured apart stand in rows of their own.
        points[point.c] = point if known is None else _joined(known, point)
    return tuple(
        Curve(context, backend, tuple(points[c] for c in sorted(points)))
        for (context, backend), points in sorted(
            groups.items(), key=lambda item: (item[0][1] or "", item[0][0])
        )
    )


def _joined(first: Point, second: Point) -> Point:
    return Point(
        first.c,
        second.no_spec if second.no_spec is not None else first.no_spec,
        second.static_spec if second.static_spec is not None else first.static_spec,
    )


def _num_steps(content: Mapping[str, Any], source: str) -> int:
    speculation = content.get("speculation")
    if not isinstance(speculation, dict) or speculation.get("num_steps") is None:
        return DEFAULT_NUM_STEPS
    return _whole(speculation["num_steps"], f"{source}, speculation.num_steps", at_least=1)


def _accept_length(content: Mapping[str, Any], source: str) -> float | None:
    speculation = content.get("speculation")
    if not isinstance(speculation, dict):
        return None
    for key in ("accept_length", "simulated_accept_len", "simulate_accept_length"):
        if speculation.get(key) is not None:
            return _number(speculation[key], f"{source}, speculation.{key}")
    return None


def _whole(value: Any, where: str, *, at_least: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= at_least:
        return value
    raise ConfigError(f"{where} is {value!r}; it must be a whole number >= {at_least}")


def _number(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    raise ConfigError(f"{where} is {value!r}; it must be a number > 0, or null where not measured")


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_words(v)}" for k, v in value.items())
    return str(value)
