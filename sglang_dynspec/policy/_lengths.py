"""Accept lengths as they can be, whatever an outcome says."""

from __future__ import annotations

from collections.abc import Iterable


def within(accept_lens: Iterable[int], num_steps: int) -> list[int]:
    """Return accept lengths, each brought between 1 and what ``num_steps`` draft steps can gain."""
    most = num_steps + 1
    # In this order nan becomes 1: max() and min() keep their first argument then.
    return [min(most, max(1, length)) for length in accept_lens]
