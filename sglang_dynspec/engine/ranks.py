"""One decision for all ranks of a tensor-parallel server.

Ranks that run different modes wait for each other in a collective for good (sglang #31071, #35898).
So rank 0 alone asks the policy, and tells the others with the requests that SGLang broadcasts at
the start of every iteration of its scheduler: no collective is added, and nothing is sent while the
decision stays the same. What is told holds from that iteration on, on rank 0 as well, so a decision
takes effect one step late. A failure of the policy and a release are told in the same way.

All else that a step depends on (the batch, its lengths, what plain decode does not do) is equal on
all ranks, because their schedulers are. Every now and then they compare what they have run.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sglang_dynspec.errors import UnsupportedError

COMPARE_EVERY = 256
"""Decode steps from one comparison of the ranks to the next."""

_AGREE_WITHIN = timedelta(seconds=60)

_agreements = 0


@dataclass(frozen=True, slots=True)
class Word:
    """What rank 0 tells; travels among SGLang's requests."""

    num_steps: int
    """Draft steps wanted, a value of the ladder."""
    draft_prefill: bool = True
    """Whether the draft model is to prefill."""
    static: str | None = None
    """Why SGLang decides from now on, or None."""
    compare: bool = False
    """Whether the ranks are to compare what they have run."""


class Ranks:
    """This rank's end.

    Args:
        rank: in the group; 0 decides.
        most: draft steps until something else is told.
    """

    def __init__(self, rank: int, most: int) -> None:
        self.rank = rank
        self.told = Word(num_steps=most)
        """What holds on all ranks."""
        self._wish = self.told
        self._steps = self._compared = self._digest = 0

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0

    def wish(self, **changes: Any) -> None:
        """On rank 0: what is to hold from the next iteration on. ``static`` is for good."""
        if self._wish.static is None:
            self._wish = replace(self._wish, **changes)

    def ran(self, num_steps: int, batch_size: int) -> None:
        """Note a decode step, for the comparison."""
        self._steps += 1
        self._digest = zlib.crc32(b"%d %d" % (num_steps, batch_size), self._digest)

    def exchange(
        self, broadcast: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run SGLang's broadcast of requests, with a word among them if there is one.

        Args:
            broadcast: SGLang's, ``(data, rank, group, src=...)``.
        """
        word = self._outgoing()
        if word is not None:
            args = ([*args[0], word], *args[1:])
        received = broadcast(*args, **kwargs)
        if not any(type(request) is Word for request in received):
            return received
        for heard in received:
            if type(heard) is Word:
                self._hear(heard, args[2])
        return [request for request in received if type(request) is not Word]

    def _outgoing(self) -> Word | None:
        if not self.leads:
            return None
        if self._steps - self._compared >= COMPARE_EVERY:
            return replace(self._wish, compare=True)
        return None if self._wish == self.told else self._wish

    def _hear(self, word: Word, group: Any) -> None:
        self.told = replace(word, compare=False)
        if word.compare:
            self._compare(group)

    def _compare(self, group: Any) -> None:
        """All ranks are here: they have just received the same word."""
        self._compared = self._steps
        mine = torch.tensor([self._steps, self._digest])
        all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(all_of_them, mine, group=group)
        found = [tuple(figures.tolist()) for figures in all_of_them]
        if len(set(found)) > 1:
            said = ", ".join(
                f"rank {rank}: {steps} steps, digest {digest:08x}"
                for rank, (steps, digest) in enumerate(found)
            )
            self.told = replace(self.told, static=f"ranks have run different steps ({said})")
            self._wish = self.told


def agree(reason: str | None) -> None:
    """Be in force on all ranks or on none. Each rank calls it, whatever it has found.

    Args:
        reason: why not on this rank, or None.

    Raises:
        UnsupportedError: another rank is not ready.
    """
    global _agreements
    _agreements += 1
    # Not a collective: a rank on which dynspec was not started must not keep the others waiting.
    store = dist.PrefixStore(
        f"sglang_dynspec/{_agreements}", dist.distributed_c10d._get_default_store()
    )
    rank = dist.get_rank()
    store.set(str(rank), reason or "")
    if rank == 0:
        answers = [reason or "", *(_answer(store, r) for r in range(1, dist.get_world_size()))]
        store.set("verdict", _verdict(answers))
    verdict = _wait(store, "verdict", 2 * _AGREE_WITHIN)
    if verdict is None:
        verdict = "rank 0 has not started sglang_dynspec"
    if verdict and reason is None:
        raise UnsupportedError(
            f"it must be in force on all ranks, and {verdict}; install it and set its variables on "
            "every node"
        )


def _answer(store: Any, rank: int) -> str:
    answer = _wait(store, str(rank), _AGREE_WITHIN)
    return "it has not started sglang_dynspec" if answer is None else answer


def _verdict(answers: Sequence[str]) -> str:
    return "; ".join(f"on rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer)


def _wait(store: Any, key: str, within: timedelta) -> str | None:
    try:
        store.wait([key], within)
        text: str = store.get(key).decode()
        return text
    except Exception:  # a timeout is another class from release to release of torch
        return None
