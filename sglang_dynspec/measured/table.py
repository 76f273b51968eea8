"""Tables of output tokens per second by concurrency, without speculation and with it.

The format is JSON with a list ``rows``, one for each concurrency (and context, output length, and
attention backend); ``examples/benchmark`` writes it::

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
``prompt_tokens`` or ``ctx`` (prompt tokens, 0 by default), ``output_tokens`` and ``backend`` (any
text) tell loads apart. Rows of one point and one mode count as repeated runs: the median is taken.
What else a file holds is left alone, rows that only have figures of other modes too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import resources
from typing import Any

from sglang_dynspec.errors import ConfigError
from sglang_dynspec.measured import bench_serving
from sglang_dynspec.measured.curves import (
    DEFAULT_NUM_STEPS,
    Curve,
    Point,
    Row,
    Table,
    accept_length,
    curves_of,
    shown,
    tokens_per_second,
    whole,
)

__all__ = [
    "DEFAULT_NUM_STEPS",
    "Curve",
    "Point",
    "Table",
    "parse_table",
    "read_table",
    "read_text",
    "shipped_tables",
]

_FIELDS = {"c", "no_spec", "static_spec", "ctx", "prompt_tokens", "output_tokens", "backend"}
_LOOKS_LIKE = '{"rows": [{"c": 1, "no_spec": 92.6, "static_spec": 77.5}, ...]}'


def shipped_tables() -> list[str]:
    """Return the names of the tables that come with the package, for :func:`read_table`."""
    folder = resources.files("sglang_dynspec.measured") / "tables"
    return sorted(
        f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")
    )


def read_table(source: str | os.PathLike[str]) -> Table:
    """Read a table, or a file of sglang.bench_serving that tells which of its runs speculated.

    Args:
        source: a file, or the name of a table that comes with the package.

    Raises:
        ConfigError: it cannot be read, or a value in it is none that can be used; names the file,
            the row or line, and the field.
    """
    name = os.fspath(source)
    text = read_text(name)
    if bench_serving.looks_like_runs(text):
        return bench_serving.table_of(bench_serving.parse_runs(text, name))
    return parse_table(text, name)


def read_text(name: str) -> str:
    """Return the text of a file, or of a table that comes with the package.

    Raises:
        ConfigError: it cannot be read, or is no text.
    """
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
            f"cannot read {name!r}: {reason}; give a table or a file of sglang.bench_serving, or "
            f"the name of a table that comes with the package: {', '.join(shipped_tables())}"
        ) from error


def parse_table(text: str, source: str) -> Table:
    """Read the text of a table; ``source`` stands in errors.

    Raises:
        ConfigError: as :func:`read_table`.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source} is no JSON: {error}; a table looks like {_LOOKS_LIKE}"
        ) from error
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(
            f'{source} has no list "rows", so it is no table, and no file of sglang.bench_serving '
            f"either; a table looks like {_LOOKS_LIKE}"
        )
    speculation = content.get("speculation")
    speculation = speculation if isinstance(speculation, dict) else {}
    read = [_row(row, f"{source}, row {i + 1}") for i, row in enumerate(rows)]
    return Table(
        source=source,
        title="; ".join(
            _words(content.get(key))
            for key in ("model", "hardware", "software")
            if content.get(key)
        ),
        num_steps=_num_steps(speculation, source),
        accept_length=_accept_length(speculation, source),
        curves=curves_of(row for row in read if row is not None),
    )


def _row(row: Any, where: str) -> Row | None:
    """Return a row of the file, or None where it has figures of other modes only."""
    if not isinstance(row, dict):
        raise ConfigError(
            f'{where} is {shown(row)}; it must look like {{"c": 1, "no_spec": 92.6, ...}}'
        )
    if "c" not in row:
        raise ConfigError(f'{where} has no "c", the number of requests at once')
    no_spec = tokens_per_second(row.get("no_spec"), f"{where}, no_spec")
    static_spec = tokens_per_second(row.get("static_spec"), f"{where}, static_spec")
    if no_spec is None and static_spec is None:
        if row.keys() - _FIELDS:
            return None
        raise ConfigError(f"{where} has neither no_spec nor static_spec (output tokens per second)")
    context = "ctx" if "ctx" in row else "prompt_tokens"
    output_tokens = row.get("output_tokens")
    backend = row.get("backend")
    if backend is not None and not isinstance(backend, str):
        raise ConfigError(f"{where}, backend is {shown(backend)}; it must be a text, or null")
    return Row(
        c=whole(row["c"], f"{where}, c", at_least=1),
        no_spec=no_spec,
        static_spec=static_spec,
        context=whole(row.get(context, 0), f"{where}, {context}", at_least=0),
        backend=backend,
        output_tokens=None
        if output_tokens is None
        else whole(output_tokens, f"{where}, output_tokens", at_least=0),
    )


def _num_steps(speculation: Mapping[str, Any], source: str) -> int:
    if speculation.get("num_steps") is None:
        return DEFAULT_NUM_STEPS
    return whole(speculation["num_steps"], f"{source}, speculation.num_steps", at_least=1)


def _accept_length(speculation: Mapping[str, Any], source: str) -> float | None:
    for key in ("accept_length", "simulated_accept_len", "simulate_accept_length"):
        if speculation.get(key) is not None:
            return accept_length(speculation[key], f"{source}, speculation.{key}")
    return None


def _words(value: Any) -> str:
    """Return a text, or what a small object holds, for a title."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_word(item)}" for key, item in value.items())
    return _word(value)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)
