"""The server's side of --wave: the same square wave of clients for every configuration."""

from __future__ import annotations

import gc
import time
from typing import Any

from dynspec_benchmark.load import Load, Requests, answer_all, at_rest
from dynspec_benchmark.worker import Send, Server, difference, steps_of

_TOLD = ("by_num_steps", "seconds", "passthrough", "catch_up")


def wave(job: dict[str, Any], send: Send) -> None:
    """Start a server, run a cycle that does not count and then those that do, and tell what came
    of it. Answer all prompts once more where the job says how many at once.

    Raises:
        RuntimeError: a request of the first cycle fails.
    """
    with Server(job, send) as server:
        requests = Requests(job, server.vocab_size)
        before, settled = _warm_up(server, requests, job["cycle"], send)
        counted = _counts(server)
        # A load of its own: it counts from 0, and sends the prompts from the first on.
        load = Load(server, requests, send, square=True)
        gc.collect()
        began = time.perf_counter()
        server.engine.loop.run_until_complete(load.run(job["cycle"] * job["cycles"]))
        seconds = time.perf_counter() - began
        server.check_dynspec()
        after = at_rest(server, load)
        counts = difference(_counts(server), counted)
        send(
            "waved",
            {
                "tokens": load.tokens,
                "seconds": seconds,
                "accept_length": accept_length(counts, load.tokens, load.verifications),
                "steps": counts and {name: counts[name] for name in _TOLD},
                "before": before,
                "settled": settled,
                "after": after,
                **load.found(),
            },
        )
        answer_all(server, requests, job["at_once"], send)


def accept_length(counts: dict[str, Any] | None, tokens: int, verifications: int) -> float | None:
    """Return the tokens that a request gains in a speculative step, or None if there was none.

    Args:
        counts: of dynspec, by draft steps; None without it.
        tokens: of all answers.
        verifications: of all answers, as SGLang counts them: without dynspec every step is one.
    """
    if counts is None:
        return tokens / verifications if verifications else None
    gained, requests = (
        sum(count for num_steps, count in counts[group].items() if num_steps != "0")
        for group in ("tokens", "requests")
    )
    return gained / requests if requests else None


def _warm_up(
    server: Server, requests: Requests, cycle: list[int], send: Send
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Leave in the caches whatever stays there; return what is in use before and after."""
    load = Load(server, requests, send, square=True)
    before = at_rest(server, load)
    server.engine.loop.run_until_complete(load.run(cycle))
    if load.errors:
        raise RuntimeError(f"{len(load.errors)} of {load.sent} requests failed: {load.errors[0]}")
    return before, at_rest(server, load)


def _counts(server: Server) -> dict[str, dict[str, Any]] | None:
    status = server.state().get("dynspec")
    if status is None:
        return None
    by_num_steps = status["by_num_steps"]
    gained = {
        name: {n: count[name] for n, count in by_num_steps.items()}
        for name in ("requests", "tokens", "seconds")
    }
    kept = status["catch_up"] or {}
    taken = {name: kept[name] for name in ("times", "taken_in", "lost", "seconds") if name in kept}
    return {**steps_of(status), **gained, "catch_up": taken}
