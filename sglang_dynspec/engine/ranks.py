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

import json
import time
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
_FAIL_WITHIN = timedelta(seconds=20)
_ALL = "all"


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


class Agreement:
    """What ranks tell each other where one may be in another state than the rest: at start, and
    when something fails. Every rank calls :meth:`together` as often as the others, about the same.

    Not a collective: a rank that never comes must not keep the others waiting for good. So rank 0
    gathers the answers in the store by which the ranks have found each other, and what is written
    there first holds for all, be it rank 0's or that of a rank which has waited too long for it.

    Args:
        rank: this one.
        ranks: how many there are.
    """

    _made = 0

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self._rank, self._ranks = rank, ranks
        self._asked = 0
        self._over = False
        Agreement._made += 1
        # Another server's Scheduler may have been built in this process before.
        self._prefix = f"sglang_dynspec/{Agreement._made}"

    def together(self, about: str, mine: Any, within: timedelta | None = None) -> list[Any]:
        """Tell the others something, and hear what each of them tells at this point.

        Args:
            about: what it is about, which must be the same on all.
            mine: JSON-native.
            within: how long rank 0 waits for the others; a minute by default. They wait for it
                twice as long.

        Returns:
            What each rank tells, by rank.

        Raises:
            UnsupportedError: another rank is not in force, is not there in time, or tells something
                about something else.
        """
        if self._ranks == 1:
            return [mine]
        within = within or _AGREE_WITHIN
        store = self._next_store()
        store.set(str(self._rank), json.dumps({"about": about, "tells": mine}))
        if self._rank == 0:
            answers = _written_first(store, _answers(store, self._ranks, within))
        else:
            answers = _wait(store, _ALL, 2 * within)
            if answers is None:
                answers = _written_first(store, [{"fails": _NOT_THERE}])
        failed = [f"on rank {r}: {a['fails']}" for r, a in enumerate(answers) if "fails" in a]
        if not failed and any(answer["about"] != about for answer in answers):
            failed = [f"rank {rank} is at {answer['about']}" for rank, answer in enumerate(answers)]
        if failed:
            self._over = True
            raise UnsupportedError(
                f"it must be in force on all ranks, and {'; '.join(failed)}; install it and set "
                "the same variables on every node"
            )
        return [answer["tells"] for answer in answers]

    def fail(self, reason: str) -> None:
        """Tell the others, at their next :meth:`together`, why dynspec is not in force here."""
        if self._ranks == 1 or self._over:
            return
        self._over = True
        answer = {"fails": reason}
        store = self._next_store()
        store.set(str(self._rank), json.dumps(answer))
        if self._rank == 0:
            _written_first(store, [answer])

    def _next_store(self) -> Any:
        self._asked += 1
        prefix = f"{self._prefix}/{self._asked}"
        return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())


class Ranks:
    """This rank's end of the decisions.

    Args:
        rank: in the group; 0 decides.
        most: draft steps until something else is told.
        agreement: of these ranks.
    """

    def __init__(self, rank: int, most: int, agreement: Agreement) -> None:
        self.rank = rank
        self._agreement = agreement
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
        wish = self._wish
        # Mostly nothing is new, and this runs before every step.
        if wish.static is None and any(getattr(wish, name) != changes[name] for name in changes):
            self._wish = replace(wish, **changes)

    def ran(self, num_steps: int, accept_lens: Sequence[int]) -> None:
        """Note a decode step, for the comparison.

        Args:
            accept_lens: tokens that each request gained.
        """
        self._steps += 1
        self._digest = zlib.crc32(bytes(accept_lens), self._digest ^ num_steps)

    def fail_alike(self, what: str) -> bool:
        """Whether the others fail here as well. Each that fails asks, and waits for the others.

        Args:
            what: the place, in words that are the same on all.
        """
        try:
            self._agreement.together(f"failing: {what}", None, _FAIL_WITHIN)
        except Exception:
            return False
        return True

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


_NOT_THERE = "it has not started sglang_dynspec, or is stuck"


def _answers(store: Any, ranks: int, within: timedelta) -> list[Any]:
    until = time.monotonic() + within.total_seconds()
    found = []
    for rank in range(ranks):
        left = timedelta(seconds=max(until - time.monotonic(), 0.01))
        found.append(_wait(store, str(rank), left) or {"fails": _NOT_THERE})
    return found


def _written_first(store: Any, answers: list[Any]) -> Any:
    """Write all answers unless another rank has; return what is there."""
    return json.loads(store.compare_set(_ALL, "", json.dumps(answers)))


def _wait(store: Any, key: str, within: timedelta) -> Any:
    try:
        store.wait([key], within)
        return json.loads(store.get(key))
    except Exception:  # a timeout is another class from release to release of torch
        return None
