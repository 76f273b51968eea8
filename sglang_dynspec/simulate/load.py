"""Requests over time: built-in shapes, and traces from files."""

from __future__ import annotations

import csv
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from sglang_dynspec.errors import ConfigError
from sglang_dynspec.measured.curves import shown

SHAPES = ("constant", "ramp", "square", "bursts", "diurnal")
MOST_TOKENS = 10_000_000
"""Of one prompt or one output."""
_FIELDS = ("arrival", "prompt_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    arrival: float
    """Seconds since the trace began."""
    prompt_tokens: int
    output_tokens: int


class Load(ABC):
    """Says which requests come when."""

    duration: float
    """Seconds after which no request comes any more."""
    peak: int
    """The most requests at once, as far as that is known."""
    drains: bool = False
    """Whether the simulation goes on until the last request is answered."""

    @abstractmethod
    def fresh(self) -> Load:
        """Return the same load from its beginning."""

    @abstractmethod
    def arrivals(self, now: float, in_flight: int) -> Iterable[Request]:
        """Return the requests that come by now, each once.

        Args:
            now: seconds.
            in_flight: requests that run or wait.
        """

    @abstractmethod
    def next_arrival(self, now: float) -> float | None:
        """Return when the next request comes if all others have ended, or None for never."""


class Shape(Load):
    """As many requests at once as a function of time says; who has got an answer asks again.

    Args:
        level: from seconds to requests at once.
        duration: seconds.
        prompt_tokens: of each request.
        output_tokens: of each request, on average; lengths lie evenly between half and one and a
            half of it, so that requests do not end in step.
    """

    def __init__(
        self,
        level: Callable[[float], float],
        duration: float,
        *,
        peak: int,
        prompt_tokens: int = 128,
        output_tokens: int = 256,
    ) -> None:
        self.duration = duration
        self.peak = peak
        self._level = level
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self._sent = 0

    def fresh(self) -> Shape:
        again = copy(self)
        again._sent = 0
        return again

    def level(self, now: float) -> int:
        """Return the requests at once, at a time in seconds."""
        return round(self._level(now))

    def arrivals(self, now: float, in_flight: int) -> Iterable[Request]:
        missing = self.level(now) - in_flight
        return [self._request(now) for _ in range(missing)] if missing > 0 else ()

    def next_arrival(self, now: float) -> float | None:
        step = self.duration / 1000
        later = now + step
        while later < self.duration:
            if self.level(later) > 0:
                return later
            later += step
        return None

    def _request(self, now: float) -> Request:
        # The golden ratio spreads any number of values evenly (Weyl sequence).
        spread = self._sent * 0.6180339887498949 % 1.0
        self._sent += 1
        return Request(now, self.prompt_tokens, max(1, round(self.output_tokens * (0.5 + spread))))


def shape(
    kind: str,
    *,
    low: int,
    high: int,
    duration: float = 600.0,
    prompt_tokens: int = 128,
    output_tokens: int = 256,
) -> Shape:
    """Return a built-in load.

    Args:
        kind: ``constant`` (``high`` requests at once), ``ramp`` (low to high and back, once),
            ``square`` (low and high by turns, a minute each), ``bursts`` (low, and high for 5
            seconds of every 30), or ``diurnal`` (a sine from low to high and back, twice).
        low: requests at once (>= 0).
        high: requests at once (>= 1).
        duration: seconds.
        prompt_tokens: of each request.
        output_tokens: of each request, on average.

    Raises:
        ConfigError: another kind.
    """

    def ramp(t: float) -> float:
        return low + (high - low) * (1 - abs(2 * t / duration - 1))

    def square(t: float) -> float:
        return high if t % 120 >= 60 else low

    def bursts(t: float) -> float:
        return high if t % 30 >= 25 else low

    def diurnal(t: float) -> float:
        return low + (high - low) * (0.5 - 0.5 * math.cos(4 * math.pi * t / duration))

    levels: dict[str, Callable[[float], float]] = {
        "constant": lambda _: high,
        "ramp": ramp,
        "square": square,
        "bursts": bursts,
        "diurnal": diurnal,
    }
    if kind not in levels:
        raise ConfigError(f"no load is named {kind!r}; there are {', '.join(SHAPES)}")
    return Shape(
        levels[kind],
        duration,
        peak=high,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )


class Trace(Load):
    """Requests that come when they came once, whatever the server does.

    Args:
        requests: in any order; the first to come does so at 0 s.
    """

    drains = True

    def __init__(self, requests: Iterable[Request]) -> None:
        ordered = sorted(requests, key=lambda request: request.arrival)
        # Traces may have times of a clock.
        self._requests = [
            replace(request, arrival=request.arrival - ordered[0].arrival) for request in ordered
        ]
        self._next = 0
        self.duration = self._requests[-1].arrival if self._requests else 0.0
        self.peak = len(self._requests)

    @property
    def requests(self) -> Sequence[Request]:
        """By arrival."""
        return self._requests

    def fresh(self) -> Trace:
        again = copy(self)
        again._next = 0
        return again

    def arrivals(self, now: float, in_flight: int) -> Iterable[Request]:
        first = self._next
        while self._next < len(self._requests) and self._requests[self._next].arrival <= now:
            self._next += 1
        return self._requests[first : self._next]

    def next_arrival(self, now: float) -> float | None:
        return self._requests[self._next].arrival if self._next < len(self._requests) else None


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace: CSV with a header line, or one JSON object a line, with ``arrival`` (seconds),
    ``prompt_tokens`` and ``output_tokens``. The first arrival counts as 0. Other fields are left
    alone.

    Raises:
        ConfigError: it cannot be read; names the file, the line and the field.
    """
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the trace {name!r}: {reason}") from error
    rows = _json_rows(text, name) if text.lstrip().startswith("{") else _csv_rows(text, name)
    requests = [_request(row, f"{name}, line {line}") for line, row in rows]
    if not requests:
        raise ConfigError(
            f"{name} has no request; a line of CSV looks like 0.5,128,256 under the header "
            f"{','.join(_FIELDS)}"
        )
    return Trace(requests)


def _json_rows(text: str, name: str) -> Iterable[tuple[int, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{name}, line {number} is no JSON: {error}") from error


def _csv_rows(text: str, name: str) -> Iterable[tuple[int, Any]]:
    reader = csv.DictReader(text.splitlines())
    try:
        missing = [field for field in _FIELDS if field not in (reader.fieldnames or ())]
        if missing:
            raise ConfigError(
                f"{name}, line 1: the header lacks {', '.join(missing)}; write {','.join(_FIELDS)}"
            )
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise ConfigError(f"{name}, line {reader.line_num + 1} is no CSV: {error}") from error


def _request(row: Any, where: str) -> Request:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is {shown(row)}, no object with {', '.join(_FIELDS)}")
    for field in _FIELDS:
        if row.get(field) is None:
            raise ConfigError(f"{where} has no {field}; a request has {', '.join(_FIELDS)}")
    return Request(
        _number(row["arrival"], f"{where}, arrival"),
        _tokens(row["prompt_tokens"], f"{where}, prompt_tokens", at_least=0),
        _tokens(row["output_tokens"], f"{where}, output_tokens", at_least=1),
    )


def _tokens(value: Any, where: str, *, at_least: int) -> int:
    number = _number(value, where)
    if number != int(number) or not at_least <= number <= MOST_TOKENS:
        raise ConfigError(
            f"{where} is {shown(value)}; it must be a whole number, {at_least} to {MOST_TOKENS}"
        )
    return int(number)


def _number(value: Any, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"{where} is {shown(value)}; it must be a number >= 0")
    return number
