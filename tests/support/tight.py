"""Requests that share prefixes and arrive one after another, and a KV pool for few of them."""

from __future__ import annotations

import random

from sglang_dynspec.testing.scheduler import Request

# The scheduler overcommits it.
TIGHT = {
    "max_total_tokens": 600,
    "max_running_requests": 8,
    "chunked_prefill_size": 64,
    "schedule_conservativeness": 0.05,
}


def tight_requests(count: int = 12, lengths: tuple[int, int] = (60, 150)) -> list[Request]:
    """So many requests, each of a length of output from the first of two to below the second."""
    draw = random.Random(5)
    shared = [draw.randrange(4, 512) for _ in range(150)]
    return [
        Request(
            input_ids=shared[: draw.randrange(20, 150)]
            + [draw.randrange(4, 512) for _ in range(draw.randrange(1, 60))],
            max_new_tokens=draw.randrange(*lengths),
            arrive_at_step=2 * i,
            ignore_eos=False,  # SGLang overcommits only where a request may end early
        )
        for i in range(count)
    ]
