"""Requests over time: built-in shapes, and traces from files."""

from __future__ import annotations

import csv
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sglang_dynspec.errors import ConfigError

SHAPES = ("constant", "ramp", "square", "bursts", "diurnal")
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
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        self._sent = 0

    def arrivals(self, now: float, in_flight: int) -> Iterable[Request]:
        missing = round(self._level(now)) - in_flight
        return [self._request(now) for _ in range(missing)] if missing > 0 else ()

    def next_arrival(self, now: float) -> float | None:
        step = self.duration / 1000
        later = now + step
        while later < self.duration:
            if round(self._level(later)) > 0:
                return later
            later += step
        return None

    def _request(self, now: float) -> Request:
        # The golden ratio spreads any number of values evenly (Weyl sequence).
        spread = self._sent * 0.6180339887498949 % 1.0
        self._sent += 1
        return Request(
            now, self._prompt_tokens, max(1, round(self._output_tokens * (0.5 + spread)))
        )


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
        requests: in any order.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = sorted(requests, key=lambda request: request.arrival)
        self._next = 0
        self.duration = self._requests[-1].arrival if self._requests else 0.0
        self.peak = len(self._requests)

    def arrivals(self, now: float, in_flight: int) -> Iterable[Request]:
        first = self._next
        while self._next < len(self._requests) and self._requests[self._next].arrival <= now:
            self._next += 1
        return self._requests[first : self._next]

    def next_arrival(self, now: float) -> float | None:
        return self._requests[self._next].arrival if self._next < len(self._requests) else None


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace: CSV with a header line, or one JSON object a line, with ``arrival`` (seconds),
    ``prompt_tokens`` and ``output_tokens``. Other fields are left alone.

    Raises:
        ConfigError: it cannot be read; names the file, the line and the field.
    """
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8", newline="") as file:
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
    missing = [field for field in _FIELDS if field not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(
            f"{name}, line 1: the header lacks {', '.join(missing)}; write {','.join(_FIELDS)}"
        )
    for row in reader:
        yield reader.line_num, row


def _request(row: Any, where: str) -> Request:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is {row!r}, no object with {', '.join(_FIELDS)}")
    arrival, prompt, output = (_number(row.get(field), f"{where}, {field}") for field in _FIELDS)
    if output < 1:
        raise ConfigError(f"{where}, output_tokens is {output:g}; it must be 1 or more")
    return Request(arrival, int(prompt), int(output))


def _number(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"{where} is {value!r}; it must be a number >= 0")
    return number
