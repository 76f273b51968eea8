"""What was decided when: samples of a server's counts, and the differences between them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from sglang_dynspec.errors import DynspecError
from sglang_dynspec.observe.server_info import ModeCount, Status

_FORMAT = 1


class TimelineError(DynspecError, ValueError):
    """A file that is no timeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A server's status at one moment."""

    time: float
    """Seconds since the load began."""
    clients: int
    """Requests that the load means to keep running."""
    in_flight: int
    """Requests that are running; more than ``clients`` while earlier ones still end."""
    num_steps: int
    """Draft steps of the latest decision."""
    batch_size: int
    """Requests in the batch of the latest decision."""
    switches: int
    """Changes of num_steps since the server started."""
    by_num_steps: Mapping[int, ModeCount]
    """Totals since the server started."""

    @classmethod
    def of(cls, status: Status, *, time: float, clients: int, in_flight: int) -> Sample:
        """Return a sample with what a status says."""
        return cls(
            time=time,
            clients=clients,
            in_flight=in_flight,
            num_steps=status.num_steps,
            batch_size=status.batch_size,
            switches=status.switches,
            by_num_steps=status.by_num_steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What happened between two samples."""

    start: float
    """Seconds since the load began, as is ``end``."""
    end: float
    clients: int
    by_num_steps: Mapping[int, ModeCount]
    """Only the num_steps of which a step ended in this interval."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def total(self) -> ModeCount:
        """All steps of the interval."""
        return sum(self.by_num_steps.values(), ModeCount())

    @property
    def num_steps(self) -> int | None:
        """The num_steps of most steps, or None if no step ended."""
        # Of equally many, the larger num_steps: the steps take longer.
        return max(self.by_num_steps, key=lambda n: (self.by_num_steps[n].steps, n), default=None)

    @property
    def batch_size(self) -> float | None:
        """Mean requests in a step, or None if no step ended."""
        return self.total.requests / self.total.steps if self.by_num_steps else None

    @property
    def accept_length(self) -> float | None:
        """Mean tokens a request gained in a step, bonus token included, or None if no step
        ended."""
        return self.total.tokens / self.total.requests if self.total.requests else None

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all decode steps per second. Those that a prefill brings are not counted."""
        return self.total.tokens / self.seconds if self.seconds > 0 else 0.0

    def joined(self, later: Interval) -> Interval:
        """Return this interval together with the one that follows it."""
        modes = sorted({*self.by_num_steps, *later.by_num_steps})
        none = ModeCount()
        return Interval(
            start=self.start,
            end=later.end,
            clients=later.clients,
            by_num_steps={
                n: self.by_num_steps.get(n, none) + later.by_num_steps.get(n, none) for n in modes
            },
        )


@dataclass(kw_only=True)
class Timeline:
    """Samples of one load, in order of time, and the conditions they were taken under."""

    policy: str | None = None
    """As text, if known."""
    ladder: tuple[int, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)
    """Anything else worth keeping: release, model, stages. JSON-native."""
    samples: list[Sample] = field(default_factory=list)

    def intervals(self) -> list[Interval]:
        """Return what happened between each two samples."""
        return [_difference(a, b) for a, b in pairwise(self.samples)]

    def phases(self) -> list[Interval]:
        """Return the intervals, joined as long as clients and num_steps stay as they are.

        An interval in which no step ended belongs to the phase before it.
        """
        busy: list[Interval] = []
        for interval in self.intervals():
            if interval.num_steps is not None:
                busy.append(interval)
            elif busy:
                busy[-1] = busy[-1].joined(interval)
        groups = groupby(busy, key=lambda i: (i.clients, i.num_steps))
        return [_join_all(group) for _, group in groups]

    def total(self) -> Interval | None:
        """Return everything between the first sample and the last, or None without two."""
        return _difference(self.samples[0], self.samples[-1]) if len(self.samples) > 1 else None

    @property
    def switches(self) -> int:
        """Changes of num_steps between the first sample and the last."""
        return self.samples[-1].switches - self.samples[0].switches if self.samples else 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        content = {
            "format": _FORMAT,
            "policy": self.policy,
            "ladder": list(self.ladder),
            "about": self.about,
            # asdict() makes the keys of by_num_steps no strings, json.dumps does.
            "samples": [asdict(sample) for sample in self.samples],
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Timeline:
        """Read what :meth:`save` has written.

        Raises:
            OSError: the file cannot be read.
            TimelineError: it holds something else.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] == _FORMAT:
                return cls(
                    policy=content["policy"],
                    ladder=tuple(content["ladder"]),
                    about=content["about"],
                    samples=[_sample(entry) for entry in content["samples"]],
                )
            problem = f"format {content['format']!r}, and this version reads {_FORMAT}"
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
        raise TimelineError(f"{path} is no timeline that can be read: {problem}")


def _sample(entry: dict[str, Any]) -> Sample:
    counts = entry.pop("by_num_steps")
    return Sample(**entry, by_num_steps={int(n): ModeCount(**c) for n, c in counts.items()})


def _difference(before: Sample, after: Sample) -> Interval:
    none = ModeCount()
    gained = {n: c - before.by_num_steps.get(n, none) for n, c in after.by_num_steps.items()}
    return Interval(
        start=before.time,
        end=after.time,
        # As it was in nearly all of the interval: a stage's new number comes at its end.
        clients=before.clients,
        by_num_steps={n: count for n, count in sorted(gained.items()) if count.steps > 0},
    )


def _join_all(intervals: Iterable[Interval]) -> Interval:
    first, *rest = intervals
    for interval in rest:
        first = first.joined(interval)
    return first
