"""A policy of one's own: speculate only with room to spare."""

from sglang_dynspec import BatchView, Policy, PolicyError


class SpareRoom(Policy):
    """Speculate while no request waits and the KV pool has room; decode plainly otherwise.

    A request that speculates holds KV slots for its drafts, and a step of it takes longer. Both are
    for the good of the requests that run, and at the cost of those that wait.

    Args:
        full: share of the KV pool in use from which to decode plainly, above 0, to 1.
        roomy: share up to which to speculate again, below ``full``.
        calm_steps: decode steps in a row that must have found room, and nobody waiting, before
            speculation begins again.
    """

    def __init__(self, full: float = 0.9, roomy: float = 0.8, calm_steps: int = 8) -> None:
        super().__init__()
        if not 0 <= roomy < full <= 1:
            raise PolicyError(f"roomy={roomy} and full={full} must be 0 <= roomy < full <= 1")
        if calm_steps < 1:
            raise PolicyError(f"calm_steps={calm_steps} must be 1 or more")
        self.full = full
        self.roomy = roomy
        self.calm_steps = calm_steps
        self._calm = calm_steps  # the first step may speculate

    def decide(self, batch: BatchView) -> int:
        if batch.waiting or batch.kv_usage >= self.full:
            self._calm = 0
        elif self._calm < self.calm_steps:
            self._calm = self._calm + 1 if batch.kv_usage <= self.roomy else 0
        return batch.max_steps if self._calm >= self.calm_steps else 0
