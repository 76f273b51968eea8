"""A load of clients that each send one request after the other, on the server's side."""

from __future__ import annotations

import asyncio
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
        square: a stage begins when the clients that are too many for it have ended, and only
            requests sent since then count for its end. Otherwise the stages run into each other,
            and the fewest clients are never alone for long.
    """

    def __init__(
        self, server: Server, requests: Requests, send: Send, *, square: bool = False
    ) -> None:
        self._engine = server.engine
        self._requests = requests
        self._send = send
        self._square = square
        self.answers: dict[int, Counter[str]] = {}
        """By prompt: how often which digest came."""
        self.errors: list[str] = []
        self.sent = 0
        self.tokens = 0
        """Of all answers."""
        self.verifications = 0
        """Speculative steps of all answers, as SGLang counts them."""
        self._clients = 0
        self._stage = 0
        self._answered: set[int] = set()
        self._stage_over = asyncio.Event()

    async def run(self, stages: Sequence[int]) -> None:
        """Run so many clients after each other. A stage is over when each client of it has had an
        answer; those that are too many for the next end with the request they have."""
        tasks: dict[int, asyncio.Task[None]] = {}
        for clients in stages:
            self._clients = clients
            if self._square:
                await asyncio.gather(*(tasks[number] for number in tasks if number >= clients))
            self._stage += 1
            self._answered.clear()
            self._stage_over.clear()
            for number in range(clients):
                if number not in tasks or tasks[number].done():
                    tasks[number] = asyncio.create_task(self._client(number))
            await self._stage_over.wait()
            self._send("stage", {"clients": clients})
        self._clients = 0
        await asyncio.gather(*tasks.values())

    def found(self) -> dict[str, Any]:
        """What is told of it at its end."""
        return {
            "sent": self.sent,
            "errors": len(self.errors),
            "first_errors": self.errors[:_SHOWN_ERRORS],
            "answers": {prompt: dict(digests) for prompt, digests in self.answers.items()},
        }

    async def _client(self, number: int) -> None:
        while number < self._clients:
            stage = self._stage
            await self._request()
            if stage == self._stage or not self._square:
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
            self.tokens += tokens
            self.verifications += output["meta_info"].get("spec_verify_ct") or 0


def at_rest(server: Server, load: Load) -> dict[str, Any]:
    """Wait until no request is left, and return what is in use then."""
    return {
        "switches": server.switches(),
        "used_kv_tokens": server.used_kv_tokens(),
        "gpu_used_mib": machine.used_mib(),
        "sent": load.sent,
    }


def answer_all(server: Server, requests: Requests, at_once: Sequence[int], send: Send) -> None:
    """Answer all prompts once for each number of them at once: where two of these differ, rounding
    decides, and nothing can be said."""
    for size in at_once:
        found: list[str] = []
        for start in range(0, len(requests.prompts), size):
            chunk = range(start, min(start + size, len(requests.prompts)))
            outputs = server.engine.generate(
                input_ids=[requests.prompts[n] for n in chunk],
                sampling_params=[greedy(requests.tokens(n)) for n in chunk],
            )
            found += [digest(output["output_ids"]) for output in outputs]
            send("answered", {"answers": len(found)})
        send("answers", {"digests": found})
