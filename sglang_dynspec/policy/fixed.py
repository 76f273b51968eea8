"""Policies that always answer the same."""

from __future__ import annotations

from sglang_dynspec.policy._checks import whole_number
from sglang_dynspec.policy.base import BatchView, Policy


class Always(Policy):
    """Speculate in every step, with all the draft steps the server has."""

    def decide(self, batch: BatchView) -> int:
        return batch.max_steps


class Never(Policy):
    """Decode plainly in every step."""

    def decide(self, batch: BatchView) -> int:
        return 0

    def wants_draft_prefill(self, batch: BatchView) -> bool:
        return False


class Fixed(Policy):
    """Run the same number of draft steps in every step.

    Args:
        num_steps: draft steps, >= 0; more than the server has means all it has.

    Raises:
        PolicyError: ``num_steps`` is no whole number >= 0.
    """

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_steps = whole_number(self, "num_steps", num_steps, at_least=0)

    def decide(self, batch: BatchView) -> int:
        return min(self.num_steps, batch.max_steps)

    def wants_draft_prefill(self, batch: BatchView) -> bool:
        return batch.on_ladder(self.num_steps) > 0
