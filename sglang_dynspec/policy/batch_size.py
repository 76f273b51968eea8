"""Speculation by the size of the decode batch."""

from __future__ import annotations

from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy._checks import shown, whole_number
from sglang_dynspec.policy.base import BatchView, Policy


class BatchSize(Policy):
    """Decode plainly from a batch size up, and speculate again once the batch is clearly smaller.

    Between ``on_at`` and ``off_at`` the mode stays as it is, so that a batch which gains and loses
    a request around the threshold does not switch at each of them. The first batch is speculative
    unless it has ``off_at`` requests or more.

    Args:
        off_at: requests from which on to decode plainly, >= 1. With 1 every batch is plain.
        on_at: requests down from which to speculate again, 1 to ``off_at - 1``; by default three
            quarters of ``off_at``, rounded down.

    Raises:
        PolicyError: a value is no whole number >= 1, or ``on_at`` is not below ``off_at``.
    """

    def __init__(self, off_at: int, on_at: int | None = None) -> None:
        super().__init__()
        self.off_at = whole_number(self, "off_at", off_at, at_least=1)
        # off_at=1 makes this 0, which no batch reaches.
        self.on_at = self.off_at * 3 // 4 if on_at is None else self._checked(on_at)
        self._speculating = True

    def decide(self, batch: BatchView) -> int:
        self._speculating = self._speculates(batch)
        return batch.max_steps if self._speculating else 0

    def wants_draft_prefill(self, batch: BatchView) -> bool:
        return self._speculates(batch)

    def _speculates(self, batch: BatchView) -> bool:
        if self.on_at < batch.batch_size < self.off_at:
            return self._speculating
        return batch.batch_size < self.off_at

    def _checked(self, on_at: int) -> int:
        whole_number(self, "on_at", on_at, at_least=1)
        if on_at < self.off_at:
            return on_at
        fix = (
            f"lower on_at to {self.off_at * 3 // 4}, or leave it out"
            if self.off_at > 1
            else "leave it out: with off_at=1 no batch is small enough to speculate"
        )
        raise PolicyError(
            f"{shown(self, 'off_at', self.off_at)[:-1]}, on_at={on_at}): on_at={on_at} must be "
            f"below off_at={self.off_at}; {fix}"
        )
