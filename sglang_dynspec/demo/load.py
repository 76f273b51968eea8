"""The load: clients that each send one request after the other, more and then fewer of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

Send = Callable[[int], Awaitable[Sequence[int]]]
"""Sends the prompt of that index and returns the output's token ids."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the load with a constant number of clients (>= 1)."""

    clients: int
    seconds: float
    """How long it lasts at least; it goes on until every client has had an answer to a request sent
    in it, so that on a slow machine, too, the batch really gets this large."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request."""

    prompt: int
    """Index of the prompt."""
    token_ids: tuple[int, ...]


class Load:
    """Runs stages one after the other. Prompts are taken in turn.

    Args:
        stages: one or more.
        send: what a client does. An exception in it ends the load.
        prompts: number of prompts there are.
        on_progress: called after every answer and at every change of stage.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        send: Send,
        *,
        prompts: int,
        on_progress: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stages = tuple(stages)
        self.stage = 0
        """Index of the current stage."""
        self.clients = 0
        """Clients of the current stage; 0 before the load and after it."""
        self.in_flight = 0
        self.answers: list[Answer] = []
        self._send = send
        self._prompts = prompts
        self._sent = 0
        self._on_progress = on_progress
        self._clock = clock
        self._began: float | None = None
        self._stage_began = 0.0
        self._unserved: set[int] = set()
        self._news = asyncio.Event()  # an answer, or a failure
        self._failed = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def seconds(self) -> float:
        """Seconds since the load began; 0 before."""
        return 0.0 if self._began is None else self._clock() - self._began

    @property
    def progress(self) -> float:
        """Share of the planned time that is done, 0 to 1. Stands still while a stage lasts longer
        than planned."""
        planned = sum(stage.seconds for stage in self.stages)
        if self._began is None:
            return 0.0
        if not planned:
            return self.stage / len(self.stages)
        now = self.stages[self.stage]
        before = sum(stage.seconds for stage in self.stages[: self.stage])
        return (before + min(self._clock() - self._stage_began, now.seconds)) / planned

    async def run(self) -> list[Answer]:
        """Run all stages and return the answers, in order of arrival.

        Raises:
            Exception: what ``send`` has raised first. The other requests are cancelled.
        """
        self._began = self._clock()
        try:
            for index, stage in enumerate(self.stages):
                await self._run_stage(index, stage)
            self.clients = 0
            await asyncio.gather(*self._tasks.values())
        finally:
            self.clients = 0
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        return self.answers

    async def _run_stage(self, index: int, stage: Stage) -> None:
        self.stage, self.clients, self._stage_began = index, stage.clients, self._clock()
        self._unserved = set(range(stage.clients))
        for client in range(stage.clients):
            # One that was to stop may still wait for its last answer; then it just goes on.
            if client not in self._tasks or self._tasks[client].done():
                self._tasks[client] = asyncio.create_task(self._client(client))
        self._on_progress()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._failed.wait(), stage.seconds)
        while self._unserved and not self._failed.is_set():
            await self._news.wait()
            self._news.clear()
        if self._failed.is_set():
            await asyncio.gather(*self._tasks.values())  # raises what the client has raised

    async def _client(self, client: int) -> None:
        while client < self.clients:
            stage = self.stage
            prompt = self._sent % self._prompts
            self._sent += 1
            self.in_flight += 1
            try:
                token_ids = await self._send(prompt)
            except Exception:
                self._failed.set()
                self._news.set()
                raise
            finally:
                self.in_flight -= 1
            self.answers.append(Answer(prompt, tuple(token_ids)))
            if stage == self.stage:
                self._unserved.discard(client)
            self._news.set()
            self._on_progress()
