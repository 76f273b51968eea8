"""What a running server says about dynspec: ``/server_info``, ``internal_states[].dynspec``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_dynspec.errors import DynspecError

PATH = "/server_info"
"""On every release from 0.5.9 on; ``/get_server_info`` is its older name, which logs a warning."""

IN_FORCE = "in_force"


class StatusError(DynspecError, ValueError):
    """A server's answer holds no status of dynspec."""


@dataclass(frozen=True, slots=True)
class ModeCount:
    """Decode steps with one num_steps: how many, requests in them, tokens these gained, and what
    they took."""

    steps: int = 0
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: ModeCount) -> ModeCount:
        return ModeCount(
            self.steps + other.steps,
            self.requests + other.requests,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
        )

    def __sub__(self, other: ModeCount) -> ModeCount:
        return ModeCount(
            self.steps - other.steps,
            self.requests - other.requests,
            self.tokens - other.tokens,
            self.seconds - other.seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The status of one scheduler. Counts are totals since the server started."""

    state: str
    """``in_force``; or ``static``, ``refused``, ``armed``, ``inactive``."""
    reason: str | None = None
    """Why it is not in force."""
    policy: str | None = None
    ladder: tuple[int, ...] = ()
    num_steps: int = 0
    """Draft steps of the latest decision."""
    batch_size: int = 0
    """Requests in the batch of the latest decision."""
    switches: int = 0
    by_num_steps: Mapping[int, ModeCount] = field(default_factory=dict)
    route: str | None = None
    """How it was activated."""

    @property
    def in_force(self) -> bool:
        return self.state == IN_FORCE

    @classmethod
    def from_server_info(cls, info: Mapping[str, Any]) -> Status:
        """Return the status of the first scheduler in an answer to ``/server_info``.

        Raises:
            StatusError: dynspec has not been started in the server.
        """
        states = info.get("internal_states") or [{}]
        dynspec = states[0].get("dynspec")
        if dynspec is None:
            raise StatusError(
                "the server shows no status of dynspec: it was not started in the scheduler's "
                "process. Install sglang-dynspec into the environment that runs SGLang, or put "
                "sglang_dynspec/bootstrap on PYTHONPATH, and set SGLANG_DYNSPEC_POLICY"
            )
        return cls.from_dict(dynspec)

    @classmethod
    def from_dict(cls, dynspec: Mapping[str, Any]) -> Status:
        """Return the status that :func:`sglang_dynspec.status` has put into ``dynspec``.

        What a state does not have, or a version does not know, takes the default.
        """
        return cls(
            state=dynspec["state"],
            reason=dynspec.get("reason") or dynspec.get("error"),
            policy=dynspec.get("policy"),
            ladder=tuple(dynspec.get("ladder", ())),
            num_steps=dynspec.get("num_steps", 0),
            batch_size=dynspec.get("batch_size", 0),
            switches=dynspec.get("switches", 0),
            by_num_steps={
                int(n): ModeCount(**count) for n, count in dynspec.get("by_num_steps", {}).items()
            },
            route=dynspec.get("route"),
        )
