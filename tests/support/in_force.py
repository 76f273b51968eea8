"""A real scheduler in this process with dynspec in force, whose policy a test can exchange."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import sglang_dynspec
from sglang_dynspec import Policy
from sglang_dynspec.engine import install
from sglang_dynspec.engine.catch_up import CatchUp
from sglang_dynspec.engine.controller import Controller, Counts
from sglang_dynspec.engine.dialect.base import Dialect
from sglang_dynspec.engine.temporarily import temporarily
from sglang_dynspec.testing import cpu_engine
from sglang_dynspec.testing.scheduler import InProcessScheduler, Output, Request

OVERLAPS = (True, False) if cpu_engine.speculates_without_overlap() else (True,)
SERVERS = [(algorithm, overlap) for algorithm in ("EAGLE", "EAGLE3") for overlap in OVERLAPS]
MTP_SERVERS = [("NEXTN", True)] if cpu_engine.has_mtp() else []
SERVERS += MTP_SERVERS


def server_name(server: tuple[str, bool]) -> str:
    """How a parametrized test is called."""
    algorithm, overlap = server
    return f"{algorithm}-{'overlap' if overlap else 'sync'}"


def ids(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def accept_length(outputs: Sequence[Output], start: int, end: int) -> float:
    """Tokens a step over the steps that begin within a range of the output's positions."""
    gained = []
    for output in outputs:
        at = output.chunks[0]
        for chunk in output.chunks[1:-1]:
            if start <= at < end:
                gained.append(chunk)
            at += chunk
    return sum(gained) / len(gained)


CATCH_UP_BYTES = 8 << 20


def poison(catch_up: CatchUp) -> None:
    """Fill the ring with what shows where it is read before it is written."""
    catch_up._hidden.fill_(float("nan"))
    catch_up._ids.fill_(1 << 30)  # no token: an embedding looked up by it fails


def ring() -> CatchUp:
    """What keeps what the draft misses."""
    kept = install.runtime().catch_up
    assert isinstance(kept, CatchUp)
    return kept


def ring_of(tokens: int) -> Any:
    """Let it keep so many tokens of each request."""
    current, whole = install.runtime(), ring()
    return temporarily(current, catch_up=_catch_up(whole.bytes // whole.tokens * tokens))


def _catch_up(budget: int) -> CatchUp:
    current = install.runtime()
    most = current.scheduler.chunked_prefill_size
    return CatchUp(current.dialect, current.worker, budget, most)


class InForce:
    """What a test works with."""

    def __init__(self, scheduler: InProcessScheduler) -> None:
        self.scheduler = scheduler
        self._start = self.slots()
        current = install.runtime()
        if current.catch_up is None:  # so that a test can change the draft state of a server
            current.catch_up = _catch_up(CATCH_UP_BYTES)

    @property
    def controller(self) -> Controller:
        controller: Controller = install.runtime().controller
        return controller

    @property
    def dialect(self) -> Dialect:
        dialect: Dialect = install.runtime().dialect
        return dialect

    def slots(self) -> tuple[int, int]:
        return self.scheduler.free_kv_slots(), self.scheduler.free_request_slots()

    def run(
        self, policy: Policy, requests: Sequence[Request], draft_state: str = "catch_up"
    ) -> list[Output]:
        """Run requests under a policy, from an empty cache and with fresh counts.

        SGLang's own idle check runs at the end, and every slot must be back.
        """
        self._forget_draft_kv()
        poison(install.runtime().catch_up)
        install.runtime().draft_state = draft_state
        self.controller.counts = Counts()
        self.controller.use(policy)
        outputs = self.scheduler.run(requests)
        assert self.slots() == self._start
        self.scheduler.flush_cache()
        return outputs

    def _forget_draft_kv(self) -> None:
        """Clear what the last run left in the draft's KV: equal requests get equal slots, so that a
        step which writes nothing would find what should have been written."""
        for buffer in self._draft_kv():
            buffer.zero_()

    def draft_wrote_nothing(self) -> bool:
        """Whether the draft model has written no KV since the last run began."""
        return not any(bool(buffer.any()) for buffer in self._draft_kv())

    @staticmethod
    def _draft_kv() -> list[Any]:
        pool = install.runtime().worker.draft_worker.draft_runner.token_to_kv_pool
        return [*pool.k_buffer, *pool.v_buffer]

    def steps(self, num_steps: int) -> int:
        """Decode steps run with so many draft steps since the last run began."""
        count = self.controller.counts.by_num_steps.get(num_steps)
        return count.steps if count else 0


@contextmanager
def in_force(
    algorithm: str,
    *,
    overlap: bool = True,
    steps: Sequence[int] = (),
    draft_state: str = "warm",
    **overrides: Any,
) -> Iterator[InForce]:
    """A scheduler that was built under ``activate()``."""
    sglang_dynspec.activate(policy="never", draft_state=draft_state, steps=steps, strict=True)
    try:
        with InProcessScheduler(algorithm, overlap=overlap, **overrides) as scheduler:
            yield InForce(scheduler)
    finally:
        sglang_dynspec.deactivate()


def prompts(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    """Random prompts of mixed length, without special tokens."""
    draw = random.Random(seed)
    return [
        [draw.randrange(4, 512) for _ in range(draw.randrange(3, longest))] for _ in range(count)
    ]


@cache
def _reference(key: tuple[tuple[tuple[int, ...], int], ...]) -> tuple[tuple[int, ...], ...]:
    with InProcessScheduler(None) as scheduler:
        requests = [Request(input_ids=p, max_new_tokens=n) for p, n in key]
        return tuple(tuple(output.token_ids) for output in scheduler.run(requests))


def reference(requests: Sequence[Request]) -> list[list[int]]:
    """Greedy output of a plain server without us. Not while another scheduler is open."""
    key = tuple((tuple(r.input_ids), r.max_new_tokens) for r in requests)
    return [list(ids) for ids in _reference(key)]
