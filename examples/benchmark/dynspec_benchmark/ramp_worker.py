"""The server's side of --ramp: a load that rises and falls, and the answers to compare with."""

from __future__ import annotations

import time
from typing import Any

from dynspec_benchmark.load import Load, Requests, answer_all, at_rest
from dynspec_benchmark.worker import Send, Server


def ramp(job: dict[str, Any], send: Send) -> None:
    """Start a server, ramp its load until the goal is reached, and tell what came of it."""
    with Server(job, send) as server:
        load = Load(server, Requests(job, server.vocab_size), send)
        run = server.engine.loop.run_until_complete
        before = at_rest(server, load)
        # The first one leaves in the caches whatever stays there.
        run(load.run(job["stages"]))
        settled = at_rest(server, load)
        began = time.monotonic()
        ramps, reason, seen = 1, None, settled["switches"]
        while reason is None:
            run(load.run(job["stages"]))
            ramps += 1
            last, seen = seen, server.switches() or 0
            send("ramp", {"ramps": ramps, "sent": load.sent, "switches": seen})
            reason = _reached(job, seen, seen - last, time.monotonic() - began)
        server.check_dynspec()
        send(
            "ramped",
            {
                "ended": reason,
                "ramps": ramps,
                "before": before,
                "settled": settled,
                "after": at_rest(server, load),
                "steps": server.steps(),
                **load.found(),
            },
        )


def answer(job: dict[str, Any], send: Send) -> None:
    """Start a server and answer all prompts, in differently large batches."""
    with Server(job, send) as server:
        answer_all(server, Requests(job, server.vocab_size), job["at_once"], send)


def _reached(job: dict[str, Any], switches: int, more: int, seconds: float) -> str | None:
    """Return why it is enough, or None."""
    if job["seconds"] is not None:
        return "seconds" if seconds >= job["seconds"] else None
    if switches >= job["toggles"]:
        return "toggles"
    # A policy that rests under this load would rest forever.
    return None if more else "no more switches"
