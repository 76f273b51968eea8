"""One kind of step for all ranks of DP attention, each of which has a scheduler and a batch of its
own.

Before every decode step SGLang's schedulers tell each other how many tokens they bring, because
their ranks share the layers behind attention. What a rank wants to run travels in one of these
numbers, in bits that it leaves unused, and is read where SGLang itself reads the number: nothing is
sent beside it, and nothing waited for. All ranks then run the smallest number of draft steps that
any rank with requests wants, and those without requests follow.

A batch of prompts on any rank comes before all decoding, on all of them: SGLang asks for that in an
exchange of its own, and decisions are taken after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sglang_dynspec.errors import RanksError, UnsupportedError

# The number is an int64; a batch has far fewer than 2**32 tokens.
_TOKENS = (1 << 32) - 1
_NUM_STEPS = 32  # eight bits: one more than the draft steps, 0 is no vote
_BLOCKED, _STATIC, _FINAL, _BEHIND, _POSTPONED = (1 << bit for bit in range(40, 45))
_EXTEND = 45  # eighteen bits: tokens for the draft
_MOST_EXTEND = (1 << 18) - 1
_MOST_STEPS = (1 << 8) - 2


@dataclass(frozen=True, slots=True)
class Vote:
    """What a rank with requests wants for its next step."""

    num_steps: int
    """Draft steps."""
    blocked: bool = False
    """Whether its batch cannot be decoded plainly."""
    static: bool = False
    """Whether SGLang is to decide this step."""
    final: bool = False
    """Whether SGLang is to decide from this step on."""
    behind: bool = False
    """Whether its draft has something to take in before it speculates."""
    postponed: bool = False
    """Whether that is not all of it, so that a plain step has to follow."""
    extend: int = 0
    """Tokens that its draft takes in, if it is behind."""

    def packed(self) -> int:
        """As a number of which the lower 32 bits are free."""
        flags = (
            _BLOCKED * self.blocked
            | _STATIC * self.static
            | _FINAL * self.final
            | _BEHIND * self.behind
            | _POSTPONED * self.postponed
        )
        extend = min(self.extend, _MOST_EXTEND)
        return flags | (self.num_steps + 1) << _NUM_STEPS | extend << _EXTEND


def unpack(number: int) -> Vote | None:
    """The vote in a number, or None: the rank has no requests, or does not decode."""
    return _unpack(number & ~_TOKENS)


@lru_cache(maxsize=1024)  # votes are few, and there is one of each rank before every step
def _unpack(number: int) -> Vote | None:
    num_steps = (number >> _NUM_STEPS & 0xFF) - 1
    if num_steps < 0:
        return None
    return Vote(
        num_steps,
        blocked=bool(number & _BLOCKED),
        static=bool(number & _STATIC),
        final=bool(number & _FINAL),
        behind=bool(number & _BEHIND),
        postponed=bool(number & _POSTPONED),
        extend=number >> _EXTEND & _MOST_EXTEND,
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks run."""

    num_steps: int
    static: bool = False
    """Whether SGLang decides this step, because a rank asks for that."""
    final: bool = False
    """Whether it does from now on."""
    postponed: bool = False
    """Whether speculation is wanted, and the draft of a rank first takes in a part of what it has
    missed."""
    extend: tuple[int, ...] | None = None
    """Tokens that the draft of each rank takes in before the step, 0 without requests; None if none
    takes in anything."""
    behind: frozenset[int] = frozenset()
    """Ranks whose drafts have missed something of it; others take part for their sake."""


def combine(votes: Sequence[Vote | None], requests: Sequence[int], most: int) -> Verdict | None:
    """What follows from the votes of all ranks, the same on each; None if none has requests.

    Args:
        requests: of each rank. One that is not behind takes part in what drafts take in with a
            token of each.
        most: draft steps of SGLang's own steps.
    """
    given = [vote for vote in votes if vote is not None]
    if not given:
        return None
    static, final = any(v.static for v in given), any(v.final for v in given)
    blocked, postponed = any(v.blocked for v in given), any(v.postponed for v in given)
    least = most if static else min(v.num_steps for v in given)
    if least == 0 and not blocked:
        return Verdict(0)
    extend, behind = None, frozenset[int]()
    # A rank whose draft needs several steps cannot have them: what it lacks is given up.
    cannot_wait = postponed and (static or blocked)
    if any(v.behind for v in given) and not final and not cannot_wait:
        behind = frozenset(i for i, vote in enumerate(votes) if vote is not None and vote.behind)
        extend = tuple(
            vote.extend if vote is not None and vote.behind else number
            for vote, number in zip(votes, requests, strict=True)
        )
        if postponed:
            return Verdict(0, postponed=True, extend=extend, behind=behind)
    return Verdict(least or most, static, final, extend=extend, behind=behind)


_Pending = tuple[Vote, Callable[[Verdict], None]]


class Exchange:
    """This rank's end.

    Args:
        rank: among those of DP attention.
        leads: whether this process speaks for its rank; others with the same requests follow.
        most: draft steps of SGLang's own steps.

    Raises:
        UnsupportedError: too many draft steps for the exchange.
    """

    def __init__(self, rank: int, most: int, *, leads: bool = True) -> None:
        if most > _MOST_STEPS:
            raise UnsupportedError(
                f"with DP attention at most {_MOST_STEPS} draft steps can be agreed on; lower "
                "--speculative-num-steps"
            )
        self.rank = rank
        self.leads = leads
        self.verdict: Verdict | None = None
        """On the latest exchange; None if no rank decodes."""
        self._most = most
        self._pending: _Pending | None = None

    def propose(self, vote: Vote, settle: Callable[[Verdict], None]) -> None:
        """Take part in the exchange that follows.

        Args:
            settle: called with what all ranks run.
        """
        self._pending = vote, settle

    def gather(self, wrapped: Callable[..., Any], info: Any, args: Any, kwargs: Any) -> Any:
        """Run SGLang's exchange, with this rank's vote in it.

        Args:
            wrapped: ``MLPSyncBatchInfo.all_gather``, bound to ``info``.
        """
        pending, self._pending, self.verdict = self._pending, None, None
        decodes = not info.is_extend_in_batch and info.num_tokens > 0
        vote = None
        if decodes:
            # Without a decision SGLang's own step is all that this rank can run.
            vote = pending[0] if pending is not None else Vote(self._most, static=True, final=True)
        own = info.num_tokens_for_logprob
        if vote is not None:
            info.num_tokens_for_logprob = own | vote.packed()
        returned = wrapped(*args, **kwargs)
        gathered = info.global_num_tokens_for_logprob
        info.num_tokens_for_logprob = own
        tokens = info.global_num_tokens_for_logprob = [number & _TOKENS for number in gathered]
        if info.is_extend_in_batch:
            return returned
        # Of batches that decode, one for each request.
        self.verdict = combine([unpack(number) for number in gathered], tokens, self._most)
        if self.verdict is not None and decodes:
            self._settle(pending, self.verdict)
        return returned

    def _settle(self, pending: _Pending | None, verdict: Verdict) -> None:
        if pending is not None:
            pending[1](verdict)
        elif verdict.num_steps != self._most or verdict.extend is not None:
            # It is not this process that speaks for its rank.
            raise RanksError(
                "a batch without a decision has met a step that other ranks have agreed on; "
                "restart the server"
            )
