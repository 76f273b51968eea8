"""Thresholds of a policy that no batch of a server reaches."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_dynspec.policy.base import Policy
from sglang_dynspec.policy.batch_size import BatchSize
from sglang_dynspec.policy.combine import Hysteresis, MinDwell, Smaller
from sglang_dynspec.policy.text import policy_text
from sglang_dynspec.policy.token_budget import TokenBudget


def unreached(policy: Policy, *, most_requests: int, num_steps: int) -> list[tuple[str, str]]:
    """Return a sentence and a fix for every threshold that means nothing on a server.

    Args:
        policy: policies inside it are looked at, too.
        most_requests: requests that the server runs at once at most.
        num_steps: the server's draft steps.
    """
    found = [_unreached(part, most_requests, num_steps) for part in _parts(policy)]
    return [pair for pair in found if pair is not None]


def _unreached(policy: Policy, most: int, num_steps: int) -> tuple[str, str] | None:
    limit = f"the server runs at most {most} requests (--max-running-requests)"
    if isinstance(policy, BatchSize) and policy.off_at > most:
        return (
            f"{policy_text(policy)} decodes plainly from {policy.off_at} requests on, but {limit}",
            f"start the server with --max-running-requests {policy.off_at} or more, or lower "
            f"off_at to {most} or less",
        )
    verified = most * (num_steps + 1)
    if isinstance(policy, TokenBudget) and policy.max_tokens >= verified:
        return (
            f"{policy_text(policy)} always has room for all {num_steps} draft steps: {limit}, "
            f"and verifies {verified} tokens in a step of all",
            f"raise --max-running-requests above {policy.max_tokens // (num_steps + 1)}, or lower "
            f"max_tokens below {verified}",
        )
    return None


def _parts(policy: Policy) -> Iterator[Policy]:
    yield policy
    inner = policy.parts if isinstance(policy, Smaller) else ()
    if isinstance(policy, (Hysteresis, MinDwell)):
        inner = (policy.policy,)
    for part in inner:
        yield from _parts(part)
