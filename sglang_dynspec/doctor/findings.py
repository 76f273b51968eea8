"""What a check has found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Status = Literal["ok", "note", "warning", "blocking"]
STATUSES: tuple[Status, ...] = get_args(Status)
"""From good to bad: as it should be; worth knowing; may not be what is wanted; dynspec will not be
in force, or a server will not start."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of one check.

    Attributes:
        check: ``group.name``, the same in every run; a check may have several findings.
        status: see ``STATUSES``.
        says: one sentence, the values that it is about in it.
        fix: what to do, where the status is not ok and something can be done.
        details: the same for programs, JSON-native.
    """

    check: str
    status: Status
    says: str
    fix: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return self.check.partition(".")[0]

    @property
    def name(self) -> str:
        return self.check.partition(".")[2].replace("_", " ")


def worst(findings: Iterable[Finding]) -> Status:
    """Return the worst status of some findings; ok for none."""
    return max((f.status for f in findings), key=STATUSES.index, default="ok")
