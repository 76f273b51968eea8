"""Speculation that comes back warm, at no cost while it is off (draft state ``catch_up``).

A plain step writes no KV for the draft. What it would have been made of is kept instead: the
token and the target's hidden states of the last :attr:`CatchUp.tokens` positions of each request,
in a ring on the device. Before speculation comes back, the draft model takes them in at once, as
it takes in a prompt, and makes a proposal. A request that was plain for longer has a hole: its
output is right in any case, but it speculates cold for a while.

Position p of the draft's KV is made of the target's hidden states at p and of the token at p + 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_dynspec.engine.dialect.base import Dialect
from sglang_dynspec.engine.temporarily import temporarily
from sglang_dynspec.errors import UnsupportedError

logger = logging.getLogger("sglang_dynspec")

TOKENS_A_STEP = 2048
"""Tokens taken in before one step, or as many as SGLang prefills at once where that is less; more
are spread over plain steps, so that no step takes long. A draft of one layer takes in so many in
about the time of one decode step of its target."""

RECOVERY_STEPS = 50
"""Speculative steps that a request with a hole counts as cold. With the trained pair of the tests
most of the little that it loses is back by then (README)."""

_RECORD = "dynspec_draft_kv"


@dataclass(slots=True)
class _Record:
    """How far the draft's KV of a request goes; lives on SGLang's request."""

    complete_at: int
    """Plain steps taken in all when it was complete; what was taken since is missing."""
    cold_until: int = 0
    """Speculative steps taken in all until which the request counts as cold."""


@dataclass(frozen=True, slots=True)
class _Look:
    """Which requests were cold when all were looked at: 256 of them take some 40 us, too long for
    every step."""

    asked: tuple[int, int]
    """Requests in the batch, and changes of records so far. A batch of as many that has had no
    prefill since is the same."""
    cold: tuple[int, ...]
    plain_steps: float
    """Taken in all up to which no other becomes cold."""
    speculative_steps: float
    """Taken in all from which on one is cold no more."""


@dataclass(slots=True)
class Plan:
    """What the draft is to take in before a step."""

    records: list[_Record | None]
    counts: list[int]
    """Tokens for each request, the oldest first."""
    behind: list[int]
    """Of those that the ring has for each request, how many are counted on; the rest is lost."""
    complete: bool
    """Whether that is all, so that speculation can begin."""

    @property
    def total(self) -> int:
        """Tokens for all requests."""
        return sum(self.counts)

    @property
    def width(self) -> int:
        """Tokens of the batch that the draft takes them in with: a request that is not behind takes
        part with one."""
        return sum(max(count, 1) for count in self.counts)


@dataclass(slots=True)
class Totals:
    """What has been done since the server started."""

    times: int = 0
    """Batches that the draft has taken something in for."""
    tokens: int = 0
    """Tokens taken in."""
    lost: int = 0
    """Tokens that the ring no longer had."""
    seconds: float = 0.0
    """Of the steps that came with it."""


class CatchUp:
    """Keeps what the draft has missed, and lets it catch up.

    Args:
        worker: SGLang's EAGLEWorkerV2, or one derived from it.
        budget: bytes for the ring.
        most: tokens that SGLang prefills at once, or None.
        replicas: ranks of DP attention.

    Raises:
        UnsupportedError: the budget does not suffice for one token a request.
    """

    def __init__(
        self,
        dialect: Dialect,
        worker: Any,
        budget: int,
        most: int | None = None,
        *,
        replicas: int = 1,
    ) -> None:
        self._dialect = dialect
        self._worker = worker
        self._budget = budget
        self._most = most
        self._replicas = replicas
        self.totals = Totals()
        self.running = False
        """Whether the draft is taking something in at the moment."""
        self._plain_steps = self._speculative_steps = 0
        self._behind = False
        """Whether any request may be."""
        self._coldest = 0
        """The latest ``cold_until`` of all."""
        self._changes = 0
        """Of records, beside what each step adds."""
        self._last_look: _Look | None = None
        self._allocate(dialect.kept_hidden_size(worker))

    def _allocate(self, hidden_size: int) -> None:
        rows, most = self._worker.req_to_token_pool.req_to_token.shape
        config = self._worker.target_worker.model_runner.model_config
        a_token = hidden_size * config.dtype.itemsize + torch.int32.itemsize
        self.tokens = min(self._budget // (rows * a_token), most)
        """Tokens kept for each request."""
        if self.tokens < 1:
            raise UnsupportedError(
                f"SGLANG_DYNSPEC_CATCH_UP_BYTES is {self._budget}, given or by default, but one "
                f"token of each of {rows} requests takes {rows * a_token} bytes; raise it, or "
                "lower --max-running-requests"
            )
        self.bytes = rows * self.tokens * a_token
        """Size of the ring."""
        device = self._worker.device
        shape = (rows, self.tokens)
        self._ids = torch.zeros(shape, dtype=torch.int32, device=device)
        self._hidden = torch.zeros((*shape, hidden_size), dtype=config.dtype, device=device)
        self._keep = self._one_kernel()

    def _one_kernel(self) -> Callable[..., None]:
        """What writes into the ring: one kernel on an NVIDIA GPU, compiled here."""
        if self._ids.device.type != "cuda":
            return _keep_in_torch
        try:
            from sglang_dynspec.engine.keep_kernel import keep

            zero = torch.zeros(1, dtype=torch.int64, device=self._ids.device)
            # Row 0 is the one that SGLang pads graphs with. Tokens are of either type.
            for ids in (zero, zero.to(torch.int32)):
                keep(self._ids, self._hidden, zero, zero, ids, self._hidden[0, :1])
        except Exception:
            logger.warning(
                "sglang_dynspec: the kernel that keeps what the draft misses cannot be compiled; "
                "several small ones of PyTorch do it.",
                exc_info=True,
            )
            return _keep_in_torch
        return keep

    # --- bookkeeping, on the host -----------------------------------------------------------------
    def plan(self, reqs: Sequence[Any], *, may_wait: bool) -> Plan | None:
        """What the draft must take in before it can speculate for these requests, or None.

        Args:
            reqs: SGLang's requests, in the order of the batch.
            may_wait: whether a plain step can be run first, so that this can be spread.
        """
        if not self._behind:
            return None
        records = [vars(req).get(_RECORD) for req in reqs]
        behind = [min(self._missing(record), self.tokens) for record in records]
        if not any(behind):
            self._behind = False
            return None
        limit = max(min(TOKENS_A_STEP, self._most or TOKENS_A_STEP), 2 * len(reqs))
        counts = share(behind, limit)
        if counts == behind:
            return Plan(records, behind, behind, complete=True)
        # Where it cannot be spread, the newest will have to do.
        return Plan(records, counts, behind if may_wait else counts, complete=not may_wait)

    def cold(self, reqs: Sequence[Any]) -> tuple[int, ...]:
        """Which of these requests have, or would have, draft KV with a hole: their indices."""
        if not self._behind and self._coldest <= self._speculative_steps:
            return ()
        asked = (len(reqs), self._changes)
        last = self._last_look
        if (
            last is None
            or last.asked != asked
            or self._plain_steps > last.plain_steps
            or self._speculative_steps >= last.speculative_steps
        ):
            last = self._last_look = self._look(reqs, asked)
        return last.cold

    def _look(self, reqs: Sequence[Any], asked: tuple[int, int]) -> _Look:
        plain_steps = speculative_steps = math.inf
        cold = []
        for i, req in enumerate(reqs):
            record = vars(req).get(_RECORD)
            if record is None:
                continue
            if self._missing(record) > self.tokens:
                cold.append(i)
                continue
            plain_steps = min(plain_steps, record.complete_at + self.tokens)
            if record.cold_until > self._speculative_steps:
                cold.append(i)
                speculative_steps = min(speculative_steps, record.cold_until)
        return _Look(asked, tuple(cold), plain_steps, speculative_steps)

    def took_speculative_step(self) -> None:
        """Note that one is being run."""
        self._speculative_steps += 1

    def _missing(self, record: _Record | None) -> int:
        return 0 if record is None else self._plain_steps - record.complete_at

    def _settle(self, plan: Plan) -> None:
        for record, count, behind in zip(plan.records, plan.counts, plan.behind, strict=True):
            if record is None or not count:
                continue
            lost = self._missing(record) - behind
            record.complete_at += lost + count
            if lost:
                self.totals.lost += lost
                self._mark_cold(record)
        self._changes += 1
        self.totals.times += 1
        self.totals.tokens += plan.total
        self._behind = not plan.complete

    def _mark_cold(self, record: _Record) -> None:
        record.cold_until = self._coldest = self._speculative_steps + RECOVERY_STEPS

    # --- keeping ----------------------------------------------------------------------------------
    def prefilled(self, batch: Any, hidden: torch.Tensor | None, *, drafted: bool) -> None:
        """Note a prefill, before the draft's own.

        Args:
            batch: the worker's batch, with the tokens of the prompts.
            hidden: the target's hidden states at all of them, shape (tokens, hidden size).
            drafted: whether the draft takes part; otherwise the end of each prompt is kept.

        Raises:
            UnsupportedError: with DP attention, hidden states of another size than expected.
        """
        self._fit(hidden)
        lengths = self._dialect.prefill_lengths(batch)
        self._changes += 1
        for req, length in zip(batch.reqs, lengths, strict=True):
            # Of a prompt in chunks the last counts: chunks before it that were left out are not
            # made up for, and not counted either.
            vars(req)[_RECORD] = _Record(self._plain_steps - (0 if drafted else length))
        if not drafted:
            self._behind = True
            self._keep_ends(batch, hidden, lengths)

    def took_plain_step(self, batch: Any, hidden: torch.Tensor | None) -> None:
        """Keep what the draft would have made its KV of, after a plain step.

        Args:
            batch: the worker's, as the step has found it: ``seq_lens`` (bs,) without the token that
                is being decoded.
            hidden: the target's hidden states, shape (bs, hidden size); None for a draft that does
                not read them.
        """
        self._plain_steps += 1
        self._behind = True
        ids = self._dialect.pending_tokens(batch.spec_info)
        self._put(batch.req_pool_indices, batch.seq_lens, ids, hidden)

    def _fit(self, hidden: torch.Tensor | None) -> None:
        """Let the ring take hidden states of this size, before the first of them are kept."""
        expected = self._hidden.shape[-1]
        size = expected if hidden is None else hidden.shape[-1]
        if expected in (0, size):
            return
        # Another model than those that the dialect knows.
        if self._replicas > 1:
            # A rank without requests takes part in catching up with what it expects.
            raise UnsupportedError(
                f"the target's hidden states have {size} elements, and by the draft's "
                f"configuration {expected}, which catch_up cannot do with under DP attention; "
                "start the server with SGLANG_DYNSPEC_DRAFT_STATE=warm"
            )
        self._allocate(size)
        logger.info(
            "sglang_dynspec: the target's hidden states have %d elements: the draft can catch up "
            "with the last %d tokens of each request.",
            size,
            self.tokens,
        )

    def _keep_ends(self, batch: Any, hidden: torch.Tensor | None, lengths: Sequence[int]) -> None:
        kept = [min(length, self.tokens) for length in lengths]
        figures = torch.tensor([kept, lengths]).to(batch.seq_lens.device, non_blocking=True)
        counts, ends = figures[0], figures[1].cumsum(0)
        row, offset = _ragged(counts, sum(kept))
        offset = offset - counts[row]  # from the end, negative
        at = ends[row] + offset
        positions = batch.seq_lens[row] + offset
        chosen = None if hidden is None else hidden[at]
        self._put(batch.req_pool_indices[row], positions, batch.input_ids[at], chosen)

    def _put(
        self,
        pool: torch.Tensor,
        positions: torch.Tensor,
        ids: torch.Tensor,
        hidden: torch.Tensor | None,
    ) -> None:
        if not self._hidden.shape[-1]:
            hidden = None
        self._keep(self._ids, self._hidden, pool, positions, ids, hidden)

    # --- catching up ------------------------------------------------------------------------------
    def give_up(self, reqs: Sequence[Any]) -> None:
        """Count all that these requests have missed as lost: they speculate without it."""
        if not self._behind:
            return
        for req in reqs:
            record = vars(req).get(_RECORD)
            missing = self._missing(record)
            if record is not None and missing:
                record.complete_at += missing
                self.totals.lost += missing
                self._mark_cold(record)
        self._changes += 1

    def run_idle(self, batch: Any, widths: Sequence[int]) -> None:
        """Take part, without requests, in what the drafts of other ranks take in.

        Args:
            batch: the worker's, without requests.
            widths: tokens of each rank of DP attention.
        """
        worker = self._worker
        keeps_hidden = self._dialect.keeps_hidden(worker)
        hidden = self._hidden[:0, 0] if keeps_hidden else None
        values = self._dialect.as_idle_prefill(batch, widths, standalone=not keeps_hidden)
        self._draft_prefills(batch, values, hidden, batch.input_ids)

    def _draft_prefills(
        self, batch: Any, values: dict[str, Any], hidden: torch.Tensor | None, tokens: torch.Tensor
    ) -> Any:
        """Run SGLang's prefill of the draft.

        Args:
            values: fields of the batch that make it a prefill.
            hidden: the target's hidden states at all of its tokens.
            tokens: what follows each request, shape (bs,).

        Returns:
            The draft state with proposals.
        """
        draft_worker = self._worker.draft_worker
        with (
            temporarily(self, running=True),
            temporarily(batch, spec_info=batch.spec_info, **values),
            self._dialect.draft_context(draft_worker),
        ):
            return draft_worker._draft_extend_for_prefill(batch, hidden, tokens)

    def run(self, batch: Any, plan: Plan | None, widths: Sequence[int] | None = None) -> None:
        """Let the draft take in what is planned, and its proposals follow if that is all.

        Args:
            batch: the worker's decode batch, before its step; its draft state gets the proposals.
            plan: None where only other ranks have one.
            widths: tokens of each rank of DP attention.
        """
        settles = plan is not None
        if plan is None:
            none = [0] * len(batch.seq_lens)
            plan = Plan([None] * len(none), none, none, complete=False)
        worker, draft_input = self._worker, batch.spec_info
        lens = batch.seq_lens
        # A request that is not behind takes part with its last token, whose KV goes to the slot
        # that SGLang keeps for padding, and whose proposal is left aside.
        taking = [count > 0 for count in plan.counts]
        counts = [max(count, 1) for count in plan.counts]
        behind = [max(n, 1) for n in plan.behind]
        on_host = lens.cpu() if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        prefixes = on_host - torch.tensor(behind)
        figures = torch.tensor([counts, behind, taking]).to(lens.device, non_blocking=True)
        length, first, takes = figures[0], lens - figures[1], figures[2].bool()
        row, offset = _ragged(length, sum(counts))
        positions, pool, takes_row = first[row] + offset, batch.req_pool_indices[row], takes[row]
        slots = positions % self.tokens
        end = first + length
        pending = self._dialect.pending_tokens(draft_input).to(torch.int64)
        following = self._ids[batch.req_pool_indices, end % self.tokens].to(torch.int64)
        table = worker.req_to_token_pool.req_to_token
        values = self._dialect.as_prefill(
            batch,
            input_ids=torch.where(takes_row, self._ids[pool, slots].to(torch.int64), 0),
            out_cache_loc=torch.where(takes_row, table[pool, positions].to(torch.int64), 0),
            seq_lens=end,
            prefix_lens=prefixes,
            extend_lens=counts,
            standalone=not self._dialect.keeps_hidden(worker),
        )
        if widths is not None:
            values |= self._dialect.gathered(batch, widths, own=sum(counts))
        hidden = None
        if self._dialect.keeps_hidden(worker):
            hidden = self._hidden[pool, slots].masked_fill_(~takes_row[:, None], 0)
        made = self._draft_prefills(
            batch, values, hidden, torch.where(end == lens, pending, following)
        )
        if plan.complete:
            _replace_proposals(draft_input, made, takes)
        if settles:
            self._settle(plan)

    def as_dict(self) -> dict[str, Any]:
        """JSON-native."""
        return {
            "tokens": self.tokens,
            "bytes": self.bytes,
            "times": self.totals.times,
            "taken_in": self.totals.tokens,
            "lost": self.totals.lost,
            "seconds": self.totals.seconds,
        }


def share(behind: Sequence[int], limit: int) -> list[int]:
    """How many tokens each request may take in at once, so that ``limit`` is not exceeded.

    A request that is not behind takes part with a token all the same. As a plain step adds one to
    each, more than that is taken in if there is more.

    Args:
        behind: tokens for each request.
        limit: tokens in all; twice as many as requests at least.
    """
    total, idle = sum(behind), behind.count(0)
    if total + idle <= limit:
        return list(behind)
    room = limit - len(behind)
    return [min(n * room // total + 1, n) for n in behind]


def _keep_in_torch(
    ring_ids: torch.Tensor,
    ring_hidden: torch.Tensor,
    pool: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor,
    hidden: torch.Tensor | None,
) -> None:
    """Write into the ring, as ``keep_kernel.keep`` does."""
    slots = positions % ring_ids.shape[1]
    ring_ids[pool, slots] = ids.to(torch.int32)
    if hidden is not None:
        ring_hidden[pool, slots] = hidden.to(ring_hidden.dtype)


def _ragged(counts: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For ``counts[i]`` elements of each row i: their rows, and their places in the row; (total,).

    Args:
        total: of the counts; without it the device would have to be waited for.
    """
    rows = torch.arange(len(counts), device=counts.device)
    row = torch.repeat_interleave(rows, counts, output_size=total)
    starts = counts.cumsum(0) - counts
    return row, torch.arange(total, device=counts.device) - starts[row]


def _replace_proposals(draft_input: Any, made: Any, takes: torch.Tensor) -> None:
    """Take the proposals of those that have caught up, keep those of the others."""
    for name in ("topk_p", "topk_index", "hidden_states"):
        old, new = getattr(draft_input, name), getattr(made, name)
        if new is None:
            continue
        chosen = new if old is None else torch.where(takes[:, None], new.to(old.dtype), old)
        setattr(draft_input, name, chosen)
