"""The server's side of --ramp: a load that rises and falls, and the answers to compare with."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dynspec_benchmark import machine
from dynspec_benchmark.plan import random_prompts
from dynspec_benchmark.worker import Send, Server, check_length, digest, greedy

_SHOWN_ERRORS = 5


class Requests:
    """Prompts, taken in turn, and how many tokens each is to get."""

    def __init__(self, job: dict[str, Any], vocab_size: int) -> None:
        lengths = job["prompt_lens"]
        # All lengths in turn, so that a batch holds different ones.
        self.prompts = [
            random_prompts(f"ramp {number}", 1, lengths[number % len(lengths)], vocab_size)[0]
            for number in range(job["prompts"])
        ]
        self._tokens: int = job["output_len"]

    def tokens(self, prompt: int) -> int:
        """Output tokens: by a quarter more or less, because equally long requests that begin
        together would also end together."""
        return max(1, round(self._tokens * (0.75 + 0.125 * (prompt * 3 % 5))))


class Load:
    """Clients that each send one request after the other, more and then fewer of them.

    Args:
        server: started.
        requests: what to send.
        send: hears of each stage, so that a load that stands still can be told from a long one.
    """

    def __init__(self, server: Server, requests: Requests, send: Send) -> None:
        self._engine = server.engine
        self._requests = requests
        self._send = send
        self.answers: dict[int, Counter[str]] = {}
        """By prompt: how often which digest came."""
        self.errors: list[str] = []
        self.sent = 0
        self._clients = 0
        self._answered: set[int] = set()
        self._stage_over = asyncio.Event()

    async def run(self, stages: Sequence[int]) -> None:
        """Run so many clients after each other. A stage is over when each client of it has had an
        answer; those that are too many for the next end with the request they have."""
        tasks: dict[int, asyncio.Task[None]] = {}
        for clients in stages:
            self._clients = clients
            self._answered.clear()
            self._stage_over.clear()
            for number in range(clients):
                if number not in tasks or tasks[number].done():
                    tasks[number] = asyncio.create_task(self._client(number))
            await self._stage_over.wait()
            self._send("stage", {"clients": clients})
        self._clients = 0
        await asyncio.gather(*tasks.values())

    async def _client(self, number: int) -> None:
        while number < self._clients:
            await self._request()
            self._answered.add(number)
            if self._answered.issuperset(range(self._clients)):
                self._stage_over.set()

    async def _request(self) -> None:
        prompt = self.sent % len(self._requests.prompts)
        self.sent += 1
        tokens = self._requests.tokens(prompt)
        try:
            output = await self._engine.async_generate(
                input_ids=self._requests.prompts[prompt], sampling_params=greedy(tokens)
            )
            check_length(output, tokens)
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")
        else:
            self.answers.setdefault(prompt, Counter())[digest(output["output_ids"])] += 1


def ramp(job: dict[str, Any], send: Send) -> None:
    """Start a server, ramp its load until the goal is reached, and tell what came of it."""
    with Server(job, send) as server:
        requests = Requests(job, server.vocab_size)
        load = Load(server, requests, send)
        run = server.engine.loop.run_until_complete
        before = _idle(server, load)
        # The first one leaves in the caches whatever stays there.
        run(load.run(job["stages"]))
        settled = _idle(server, load)
        began = time.monotonic()
        ramps, reason, switches = 1, None, settled["switches"]
        while reason is None:
            run(load.run(job["stages"]))
            ramps += 1
            last, switches = switches, _switches(server)
            send("ramp", {"ramps": ramps, "sent": load.sent, "switches": switches})
            reason = _reached(job, switches, switches - last, time.monotonic() - began)
        server.check_dynspec()
        send(
            "ramped",
            {
                "ended": reason,
                "ramps": ramps,
                "sent": load.sent,
                "errors": len(load.errors),
                "first_errors": load.errors[:_SHOWN_ERRORS],
                "before": before,
                "settled": settled,
                "after": _idle(server, load),
                "steps": server.steps(),
                "answers": {prompt: dict(found) for prompt, found in load.answers.items()},
            },
        )


def _reached(job: dict[str, Any], switches: int, more: int, seconds: float) -> str | None:
    """Return why it is enough, or None."""
    if job["seconds"] is not None:
        return "seconds" if seconds >= job["seconds"] else None
    if switches >= job["toggles"]:
        return "toggles"
    # A policy that rests under this load would rest forever.
    return None if more else "no more switches"


def _idle(server: Server, load: Load) -> dict[str, Any]:
    return {
        "switches": _switches(server),
        "used_kv_tokens": server.used_kv_tokens(),
        "gpu_used_mib": machine.used_mib(),
        "sent": load.sent,
    }


def _switches(server: Server) -> int:
    return int(server.state()["dynspec"]["switches"])


def answer(job: dict[str, Any], send: Send) -> None:
    """Start a server and answer all prompts twice, in differently large batches: where the two
    differ, rounding decides, and nothing can be said."""
    with Server(job, send) as server:
        requests = Requests(job, server.vocab_size)
        for at_once in job["at_once"]:
            found: list[str] = []
            for start in range(0, len(requests.prompts), at_once):
                chunk = range(start, min(start + at_once, len(requests.prompts)))
                outputs = server.engine.generate(
                    input_ids=[requests.prompts[n] for n in chunk],
                    sampling_params=[greedy(requests.tokens(n)) for n in chunk],
                )
                found += [digest(output["output_ids"]) for output in outputs]
                send("answered", {"answers": len(found)})
            send("answers", {"digests": found})
