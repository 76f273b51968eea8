"""The draft model's state over plain steps.

A plain step writes no KV for the draft. ``warm`` writes it at once, so that speculation comes back
with its acceptance intact. ``skip`` leaves the hole: output stays right, because the target
verifies every token, but acceptance suffers until the hole is far behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_dynspec.engine.capture import Captured, capture
from sglang_dynspec.engine.dialect.base import EXTEND_BACKEND, EXTEND_GRAPHS, Dialect, pad_rows
from sglang_dynspec.engine.ranks import Agreement
from sglang_dynspec.engine.temporarily import temporarily


class DraftExtend:
    """SGLang's draft-extend, which follows a verification, after a plain step (``warm``).

    It writes as many tokens a request as a verification may accept, of which only the first counts
    after a plain step. :meth:`narrow` makes it write that one only. Otherwise the rest is written
    past the committed length, as rejected draft tokens are, and is overwritten next.
    """

    def __init__(self, dialect: Dialect, worker: Any, agreement: Agreement) -> None:
        self._dialect = dialect
        self._agreement = agreement
        self._worker = worker
        self._values: dict[str, Any] = {}
        self.width: int = worker.draft_worker.speculative_num_draft_tokens
        """Tokens that it writes for each request."""
        self.reads_hidden: bool = dialect.reads_hidden(worker)
        """Whether it needs the target's hidden states."""
        self.captured: Captured | None = None
        """Graphs of its own, or None."""

    def narrow(self, *, strict: bool) -> None:
        """Let it write one token a request, from CUDA graphs of its own where SGLang has any, on
        the releases that can.

        Args:
            strict: a capture that fails stops the server; otherwise all its width is written.

        Raises:
            InstallError: the capture failed, under strict.
        """
        what = "the draft model's step after a plain one"
        made = capture(
            what,
            lambda: self._dialect.one_token_extend(self._worker),
            self._worker.device,
            strict=strict,
            agreement=self._agreement,
        )
        values, captured = made or (None, None)
        if values is None:
            return
        self._values = {"speculative_num_draft_tokens": 1, **values}
        self.width = 1
        if captured is not None and values[EXTEND_GRAPHS] is not None:
            self.captured = captured
            captured.report(what)

    def run(self, batch: Any, result: Any) -> None:
        """Extend the draft by the token of a plain step.

        Args:
            batch: the worker's batch, with the lengths before the step.
            result: with ``next_token_ids`` (bs * width), ``accept_lens`` and ``next_draft_input``
                set, and hidden states of shape (bs, hidden) where it reads them; they are changed.
        """
        worker, output = self._worker, result.logits_output
        if self.reads_hidden:
            output.hidden_states = pad_rows(output.hidden_states, self.width)
        batch.out_cache_loc = window_slots(worker, batch, self.width)
        with self._dialect.draft_context(worker.draft_worker), self.narrowed():
            worker.draft_worker._draft_extend_for_decode(batch, result)

    @contextmanager
    def narrowed(self) -> Iterator[None]:
        """The draft worker as it runs after a plain step."""
        draft_worker = self._worker.draft_worker
        # What runs without graphs, above the sizes captured, takes it from the model runner.
        backend = self._values.get(EXTEND_BACKEND) or draft_worker.draft_runner.attn_backend
        with (
            temporarily(draft_worker, **self._values),
            temporarily(draft_worker.draft_runner, attn_backend=backend),
        ):
            yield


def skip(result: Any, draft_input: Any) -> None:
    """Hand the last proposal on, stale as it is (``skip``), or none where none was relayed."""
    following = result.next_draft_input
    following.topk_p = draft_input.topk_p
    following.topk_index = draft_input.topk_index
    following.hidden_states = draft_input.hidden_states


def window_slots(worker: Any, batch: Any, width: int) -> torch.Tensor:
    """KV slots of the ``width`` positions after the committed length. Shape (bs * width,), int64.

    The scheduler reserves them before every decode step.
    """
    pool, columns = batch.req_pool_indices, batch.seq_lens
    if width > 1:  # two kernels that a plain step does without
        pool = pool[:, None]
        columns = columns[:, None] + torch.arange(width, device=columns.device)
    return worker.req_to_token_pool.req_to_token[pool, columns].to(torch.int64).flatten()
