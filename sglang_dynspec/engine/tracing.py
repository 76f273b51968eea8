"""Which decisions get a line in the trace, and what stands in it.

All of it runs in the scheduler's loop: what it leaves to the writer's thread is the formatting and
the file.
"""

from __future__ import annotations

import atexit
import math
import os
import time
from typing import TYPE_CHECKING, Any

from sglang_dynspec import __version__
from sglang_dynspec.engine.controller import expectations, text_of
from sglang_dynspec.observe.trace import Line, TraceWriter
from sglang_dynspec.policy.base import Policy

if TYPE_CHECKING:
    from sglang_dynspec.engine.controller import Counts, Decision
    from sglang_dynspec.engine.runtime import Runtime
    from sglang_dynspec.settings import Settings

PAUSE = 1.0
"""Seconds without a decision after which the next one gets a line: what was counted before belongs
to the time before."""


class Trace:
    """Writes down the decisions of a controller. Never raises: what fails ends the trace.

    Args:
        writer: not yet started.
        every: decode steps after which a line is written in any case.
        policy: the one in the file's header.
    """

    def __init__(self, writer: TraceWriter, every: int, policy: Policy) -> None:
        self._writer = writer
        self._every = every
        self._policy = policy
        self._left = 0
        """Steps until a line is written in any case."""
        self._started = math.inf
        """When the last decision was begun, in seconds of the controller's clock."""
        self._last: Decision | None = None
        writer.start()
        atexit.register(self._writer.close)

    def taken(
        self, decision: Decision, previous: int, reason: str, counts: Counts, policy: Policy
    ) -> None:
        """Note a decision that is being run, and write a line if it is to have one.

        Args:
            decision: the one.
            previous: draft steps of the step before it.
            reason: what its draft steps come from.
            counts: of the steps that have ended.
            policy: the one in charge.
        """
        pause, self._started = decision.started - self._started, decision.started
        self._left -= 1
        as_before = decision.num_steps == previous and policy is self._policy
        if self._left >= 0 and as_before and pause < PAUSE:
            self._last = decision
            return
        if self._writer.off is not None:
            return
        try:
            why = self._why(decision.num_steps != previous, pause)
            self._last, self._left = decision, self._every - 1
            self._put(why, decision, previous, reason, counts, policy, pause)
        except Exception as error:
            self._writer.give_up(error)

    def close(self, counts: Counts, policy: Policy) -> None:
        """Write a last line, with what has ended since the one before, and end the trace."""
        atexit.unregister(self._writer.close)
        last = self._last
        try:
            if last is not None:
                self._put("end", last, last.num_steps, last.reason, counts, policy, 0.0)
            self._writer.close()
        except Exception as error:
            self._writer.give_up(error)

    def as_dict(self) -> dict[str, Any]:
        """Where the trace stands, JSON-native; see :meth:`TraceWriter.as_dict`."""
        return self._writer.as_dict()

    def _why(self, changed: bool, pause: float) -> str:
        if changed:
            return "changed"
        if self._last is None:
            return "first"
        return "resumed" if pause >= PAUSE else "every"

    def _put(
        self,
        why: str,
        decision: Decision,
        previous: int,
        reason: str,
        counts: Counts,
        policy: Policy,
        pause: float,
    ) -> None:
        view = decision.view
        assert view is not None
        taken = self._writer.put(
            Line(
                time=time.time(),
                step=decision.step,
                why=why,
                num_steps=decision.num_steps,
                previous=previous,
                reason=reason,
                batch_size=view.batch_size,
                context_tokens=view.context_tokens,
                waiting=view.waiting,
                kv_usage=view.kv_usage,
                cold=view.cold,
                totals={
                    n: (c.steps, c.requests, c.tokens, c.seconds)
                    for n, c in counts.by_num_steps.items()
                },
                pause=pause if pause >= PAUSE else 0.0,
                predicted=_predicted(policy),
                policy=None if policy is self._policy else text_of(policy),
            )
        )
        if taken:
            self._policy = policy


def begin(runtime: Runtime, path: str, settings: Settings, release: str) -> Trace:
    """Begin the trace of a scheduler.

    Args:
        runtime: in force.
        path: the file; a replica other than the first writes to one of its own.
        settings: what the header tells.
        release: of SGLang.
    """
    scheduler, controller = runtime.scheduler, runtime.controller
    header = {
        "dynspec": __version__,
        "sglang": release,
        "policy": text_of(controller.policy),
        "ladder": list(controller.ladder),
        "draft_state": runtime.draft_state,
        "max_running_requests": scheduler.max_running_requests,
        "model_path": scheduler.server_args.model_path,
        "every": settings.trace_every,
    }
    writer = TraceWriter(file_of(path, runtime.dialect.dp_rank(scheduler)), header)
    return Trace(writer, settings.trace_every, controller.policy)


def _predicted(policy: Policy) -> dict[str, Any] | None:
    try:
        return dict(expectations(policy.explain())) or None
    except Exception:  # as in the status: no reason to stop
        return None


def file_of(path: str, dp_rank: int | None) -> str:
    """The file of a replica: that of dp rank 1 is called ``x.dp1.jsonl`` for ``x.jsonl``."""
    if not dp_rank:
        return path
    stem, suffix = os.path.splitext(path)
    return f"{stem}.dp{dp_rank}{suffix}"
