"""Where speculation pays, and which policy follows: pure functions of measured tables.

What is best is judged by the geometric mean of the throughput over the measured points, each
counting once. The ratio of two such means is the mean ratio, so the policy with the best mean is
also the one that gains most against always-on and against no speculation, and that loses least
against the better mode of each point. (A sum of tokens per second would leave the decision to the
points with the most requests.)

Plain steps are counted at the throughput of the server without speculation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from sglang_dynspec.errors import ConfigError
from sglang_dynspec.measured import Curve, Point, Table

Verdict = Literal["never", "always", "threshold"]

WORTH_SWITCHING = 1.02
"""Speculation comes back only where it gains at least this much (throughput with / without)."""

SAME = 0.01
"""Means and ratios that differ by no more than this share count as equal."""

HOW_TO_MEASURE = """\
Measure the same load at two concurrencies or more, each without and with speculation: either with
  python examples/benchmark/run.py --model-path ... --draft-model-path ... \\
      --configs no_spec static --concurrency 1,8,32,128
and give its results.json; or, against a server without --speculative-algorithm and then against one
with it, for every concurrency N,
  python -m sglang.bench_serving --backend sglang --dataset-name random --random-input-len 1024 \\
      --random-output-len 256 --random-range-ratio 1 --max-concurrency N --num-prompts 4*N \\
      --output-file no-spec.jsonl   (or spec.jsonl)
and give --no-spec no-spec.jsonl --spec spec.jsonl"""


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy with one threshold on the number of requests, or one of the two extremes."""

    verdict: Verdict
    last_paying: int = 0
    """The largest measured number of requests at which it speculates; 0 for ``never``."""
    crossover: float | None = None
    """Requests at which the two modes are equally fast, interpolated; None without a threshold."""
    off_at: int | None = None
    on_at: int | None = None

    @property
    def policy(self) -> str:
        """As ``parse_policy`` reads it."""
        if self.verdict != "threshold":
            return self.verdict
        return f"batch_size(off_at={self.off_at}, on_at={self.on_at})"

    @property
    def is_narrow(self) -> bool:
        """Whether less than the usual room is left between ``on_at`` and ``off_at``."""
        if self.off_at is None or self.on_at is None:
            return False
        return self.off_at - self.on_at < _room(self.off_at)

    def speculates(self, c: int) -> bool:
        """Whether it speculates at a measured number of requests."""
        return self.verdict == "always" or c <= self.last_paying


@dataclass(frozen=True, slots=True)
class Advised:
    """A measured point, and what a choice does there. Throughput in output tokens per second."""

    c: int
    no_spec: float
    static_spec: float
    speculate: bool

    @property
    def ratio(self) -> float:
        """With speculation / without."""
        return self.static_spec / self.no_spec

    @property
    def tok_s(self) -> float:
        return self.static_spec if self.speculate else self.no_spec

    @property
    def over_always(self) -> float:
        """Throughput / that of always-on."""
        return self.tok_s / self.static_spec

    @property
    def over_never(self) -> float:
        """Throughput / that without speculation."""
        return self.tok_s / self.no_spec

    @property
    def of_best(self) -> float:
        """Throughput / that of the better mode, at most 1."""
        return self.tok_s / max(self.static_spec, self.no_spec)


@dataclass(frozen=True, slots=True)
class Means:
    """Geometric means over points of the three ratios of :class:`Advised`."""

    over_always: float
    over_never: float
    of_best: float

    @property
    def loss(self) -> float:
        """The share that is lost against the better mode of each point, 0 to 1."""
        return 1 - self.of_best


@dataclass(frozen=True, slots=True)
class Band:
    """Neighbouring measured points at which speculation pays, or at which it does not."""

    first: int
    last: int
    pays: bool


@dataclass(frozen=True, slots=True)
class CurveAdvice:
    """What to do under one load."""

    curve: Curve
    choice: Choice
    points: tuple[Advised, ...]
    left_out: tuple[Point, ...]
    """Points with one mode only."""
    bands: tuple[Band, ...]
    means: Means

    @property
    def rises(self) -> tuple[Advised, Advised] | None:
        """The neighbours between which the ratio rises most, or None if it falls steadily."""
        pairs = list(zip(self.points, self.points[1:], strict=False))
        one, next_ = max(pairs, key=lambda pair: pair[1].ratio / pair[0].ratio)
        return (one, next_) if next_.ratio > one.ratio * (1 + SAME) else None


@dataclass(frozen=True, slots=True)
class Key:
    """One way to decide under all loads of a server, and what it loses (:class:`Means`)."""

    looks_at: str
    policy: str | None
    """None where no shipped policy looks at this."""
    loss: float
    limit: int | None = None
    """Without a policy: the largest measured value of the key at which to speculate."""


@dataclass(frozen=True, slots=True)
class ServerAdvice:
    """What to do on a server that gets all loads which were measured with one attention backend."""

    backend: str | None
    curves: tuple[CurveAdvice, ...]
    choice: Choice
    """One for all loads."""
    means: Means
    by_load: Means
    """Of the choices that each load would get for itself."""
    keys: tuple[Key, ...]
    """By rising loss."""

    @property
    def moves(self) -> bool:
        """Whether thresholds of their own would serve the loads better than a common one."""
        return self.means.loss - self.by_load.loss > SAME


@dataclass(frozen=True, slots=True)
class TableAdvice:
    """What one table says."""

    table: Table
    curves: tuple[CurveAdvice, ...]
    left_out: tuple[Curve, ...]
    """Curves with fewer than two points that have both modes."""
    servers: tuple[ServerAdvice, ...]
    """One for each attention backend with several loads."""


def advise(tables: Iterable[Table]) -> list[TableAdvice]:
    """Work out the advice for some tables.

    Raises:
        ConfigError: no curve of any table has two points that were measured in both modes.
    """
    tables = list(tables)
    advice = [_of_table(table) for table in tables]
    if not any(each.curves for each in advice):
        raise ConfigError(_nothing_to_compare(tables))
    return advice


def choose(points: Iterable[tuple[int, float]]) -> Choice:
    """Choose one threshold on the number of requests.

    It is the one with the best mean over the points; of equal ones that which speculates least.
    Between the last point that speculates and the next one, the logarithm of the ratio is
    interpolated linearly in the logarithm of the number of requests. ``off_at`` is the first whole
    number of requests at which plain decode is at least as fast by that line. ``on_at`` is the
    largest at which speculation gains 2 per cent and which is an eighth below ``off_at``, so that a
    batch that loses a request does not switch for nothing; but not below the last point that
    speculates, where it has been measured to pay.

    Args:
        points: requests at once, and throughput with / without speculation; several of one number
            of requests count by their mean.
    """
    groups = _grouped(points)
    cut = _best_cut([sum(logs) for _, logs in groups])
    if cut == 0:
        return Choice("never")
    if cut == len(groups):
        return Choice("always", last_paying=groups[-1][0])
    (low, low_logs), (high, high_logs) = groups[cut - 1], groups[cut]
    line = _Line(low, _mean(low_logs), high, _mean(high_logs))
    crossover = line.where(1.0)
    # What is a whole number but for rounding is one.
    off_at = min(max(math.ceil(crossover - 1e-9 * crossover), low + 1), high)
    worth_it = math.floor(line.where(WORTH_SWITCHING) * (1 + 1e-9))
    on_at = max(low, min(worth_it, off_at - _room(off_at)))
    return Choice("threshold", low, crossover, off_at, on_at)


def bands_of(points: Iterable[Advised]) -> tuple[Band, ...]:
    """Return the stretches of points at which speculation pays, and those at which it does not."""
    bands = []
    for pays, group in groupby(points, key=lambda point: point.ratio > 1):
        members = list(group)
        bands.append(Band(members[0].c, members[-1].c, pays))
    return tuple(bands)


def means_of(points: Sequence[Advised]) -> Means:
    """Return the geometric means over at least one point."""

    def mean(ratio: Callable[[Advised], float]) -> float:
        return math.exp(_mean([math.log(ratio(point)) for point in points]))

    return Means(
        mean(lambda point: point.over_always),
        mean(lambda point: point.over_never),
        mean(lambda point: point.of_best),
    )


# --- a threshold --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Line:
    """The ratio between two measured points: its logarithm is linear in that of the requests."""

    low: int
    low_log: float
    """Logarithm of the ratio, > 0."""
    high: int
    high_log: float
    """At most 0."""

    def where(self, ratio: float) -> float:
        """Return the requests, ``low`` to ``high``, at which the line has a ratio."""
        share = (self.low_log - math.log(ratio)) / (self.low_log - self.high_log)
        share = min(max(share, 0.0), 1.0)
        found = self.low * math.pow(self.high / self.low, share)
        return min(max(found, float(self.low)), float(self.high))


def _grouped(points: Iterable[tuple[int, float]]) -> list[tuple[int, list[float]]]:
    """Return the logarithms of the ratios by rising key."""
    groups: dict[int, list[float]] = defaultdict(list)
    for key, ratio in points:
        groups[key].append(math.log(ratio))
    return sorted(groups.items())


def _best_cut(gains: Sequence[float]) -> int:
    """Return how many of the first gains add up to the most; the fewest of equal ones."""
    best = 0
    total = most = 0.0
    for n, gain in enumerate(gains, 1):
        total += gain
        if total > most:
            best, most = n, total
    return best


def _room(off_at: int) -> int:
    return math.ceil(off_at / 8)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# --- curves and servers -------------------------------------------------------------------------


def _of_table(table: Table) -> TableAdvice:
    usable = [curve for curve in table.curves if len(_comparable(curve)) > 1]
    curves = tuple(_of_curve(curve) for curve in usable)
    servers = [
        tuple(group) for _, group in groupby(curves, key=lambda advice: advice.curve.backend)
    ]
    return TableAdvice(
        table=table,
        curves=curves,
        left_out=tuple(curve for curve in table.curves if curve not in usable),
        servers=tuple(_of_server(group, table.num_steps) for group in servers if len(group) > 1),
    )


def _of_curve(curve: Curve) -> CurveAdvice:
    both = _comparable(curve)
    choice = choose((c, static_spec / no_spec) for c, no_spec, static_spec in both)
    points = tuple(Advised(*point, choice.speculates(point[0])) for point in both)
    return CurveAdvice(
        curve=curve,
        choice=choice,
        points=points,
        left_out=tuple(point for point in curve.points if point.ratio is None),
        bands=bands_of(points),
        means=means_of(points),
    )


def _comparable(curve: Curve) -> list[tuple[int, float, float]]:
    return [
        (point.c, point.no_spec, point.static_spec)
        for point in curve.points
        if point.no_spec is not None and point.static_spec is not None
    ]


def _of_server(curves: tuple[CurveAdvice, ...], num_steps: int) -> ServerAdvice:
    loads = [(advice.curve, point) for advice in curves for point in advice.points]
    choice = choose((point.c, point.ratio) for _, point in loads)
    means = means_of([_decided(point, choice.speculates(point.c)) for _, point in loads])
    return ServerAdvice(
        backend=curves[0].curve.backend,
        curves=curves,
        choice=choice,
        means=means,
        by_load=means_of([point for _, point in loads]),
        keys=_keys(loads, choice, means.loss, num_steps),
    )


def _keys(
    loads: Sequence[tuple[Curve, Advised]], choice: Choice, loss: float, num_steps: int
) -> tuple[Key, ...]:
    keys = [Key("requests", choice.policy, loss)]
    if choice.off_at is not None and choice.on_at is not None:
        # Its budget is one of requests, too: it does not look at their context.
        width = num_steps + 1
        text = f"token_budget(max_tokens={(choice.off_at - 1) * width}"
        slack = (choice.off_at - 1 - choice.on_at) * width
        text += f", slack={slack})" if slack else ")"
        keys.append(Key("tokens verified in a step", text, loss))
    if (prompt_tokens := _prompt_tokens(loads)) is not None:
        keys.append(prompt_tokens)
    return tuple(sorted(keys, key=lambda key: key.loss))


def _prompt_tokens(loads: Sequence[tuple[Curve, Advised]]) -> Key | None:
    """Return what the best limit on the prompt tokens of the whole batch would lose, if there is
    one."""
    groups = _grouped((curve.context * point.c, point.ratio) for curve, point in loads)
    cut = _best_cut([sum(logs) for _, logs in groups])
    if not 0 < cut < len(groups):
        return None
    limit = groups[cut - 1][0]
    decided = [_decided(point, curve.context * point.c <= limit) for curve, point in loads]
    return Key("prompt tokens of the batch", None, means_of(decided).loss, limit)


def _decided(point: Advised, speculate: bool) -> Advised:
    return Advised(point.c, point.no_spec, point.static_spec, speculate)


def _nothing_to_compare(tables: Sequence[Table]) -> str:
    found = "; ".join(
        f"{table.source}{', ' if curve.label else ''}{curve.label}: "
        f"without at {_where(curve, lambda p: p.no_spec)}, "
        f"with at {_where(curve, lambda p: p.static_spec)}"
        for table in tables
        for curve in table.curves
    )
    return (
        "no load was measured at two concurrencies or more both without and with speculation "
        f"(requests at once: {found or 'nothing'})\n{HOW_TO_MEASURE}"
    )


def _where(curve: Curve, value: Callable[[Point], float | None]) -> str:
    return ", ".join(str(p.c) for p in curve.points if value(p) is not None) or "none"
