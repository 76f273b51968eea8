"""Speculation by the tokens that the target model verifies in a step."""

from __future__ import annotations

from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy._checks import shown, whole_number
from sglang_dynspec.policy.base import BatchView, Policy


class TokenBudget(Policy):
    """Run as many draft steps as fit a budget of verified tokens.

    A step with n draft steps of a chain verifies n + 1 tokens a request, so the answer is the
    largest n with ``batch_size * (n + 1) <= max_tokens``, and 0 where not even one fits. (With
    ``--speculative-eagle-topk`` above 1 a step verifies a tree, which is larger than that.)

    The budget is never exceeded by drafting. More steps than before are taken only once they fit
    ``max_tokens - slack``: between the two the number of steps stays as it is.

    Args:
        max_tokens: tokens verified in a step, >= 1.
        slack: tokens that must be left over before the draft steps grow, 0 to ``max_tokens - 1``.
            With 0, the default, the answer depends on the batch size alone; an eighth of
            ``max_tokens`` keeps a batch that comes and goes by a request from switching each time.

    Raises:
        PolicyError: a value is no whole number in its range.
    """

    def __init__(self, max_tokens: int, slack: int = 0) -> None:
        super().__init__()
        self.max_tokens = whole_number(self, "max_tokens", max_tokens, at_least=1)
        self.slack = self._checked(slack)
        self._num_steps: int | None = None

    def decide(self, batch: BatchView) -> int:
        self._num_steps = self._answer(batch)
        return self._num_steps

    def wants_draft_prefill(self, batch: BatchView) -> bool:
        return batch.on_ladder(self._answer(batch)) > 0

    def _answer(self, batch: BatchView) -> int:
        fits = self._largest(batch, self.max_tokens)
        grows_to = self._largest(batch, self.max_tokens - self.slack)
        before = fits if self._num_steps is None else self._num_steps
        return min(fits, max(before, grows_to))

    @staticmethod
    def _largest(batch: BatchView, tokens: int) -> int:
        # A batch size below 1 counts as 1; with nan, max() keeps its first argument.
        num_steps = int(tokens // max(1, batch.batch_size)) - 1
        return max(0, min(num_steps, batch.max_steps))

    def _checked(self, slack: int) -> int:
        whole_number(self, "slack", slack, at_least=0)
        if slack < self.max_tokens:
            return slack
        raise PolicyError(
            f"{shown(self, 'max_tokens', self.max_tokens)[:-1]}, slack={slack}): slack={slack} "
            f"must be below max_tokens={self.max_tokens}, or the draft steps could never grow; "
            f"lower it to {self.max_tokens // 8}, or leave it out"
        )
