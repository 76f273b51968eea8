"""Temperature above zero: plain steps and verified steps draw from the target's distribution.

A chi-squared test of each against probabilities computed from the target's own logits, over many
short requests. The seed is fixed, so the outcome is always the same; a thousandth of all seeds
would fail by chance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.in_force import InForce, in_force

from sglang_dynspec import Always, Never
from sglang_dynspec.testing.scheduler import InProcessScheduler, Request

PROMPT = [11, 12, 13]
REQUESTS = 3000
FIRST_TOKENS = 64  # how many first tokens are followed to the second


@pytest.fixture(scope="module")
def logits() -> dict[tuple[int, ...], torch.Tensor]:
    """The target's next-token logits after the prompt, and after its likeliest tokens."""
    with InProcessScheduler(None) as scheduler:
        after = {(): next_logits(scheduler, PROMPT)}
        for token in after[()].topk(FIRST_TOKENS).indices.tolist():
            after[(token,)] = next_logits(scheduler, [*PROMPT, token])
    return after


def next_logits(scheduler: InProcessScheduler, prompt: list[int]) -> torch.Tensor:
    runner = scheduler.scheduler.tp_worker.model_runner
    seen: list[torch.Tensor] = []
    sample = runner.sample

    def spy(output: Any, *args: Any) -> Any:
        seen.append(output.next_token_logits.clone())
        return sample(output, *args)

    runner.sample = spy
    try:
        scheduler.run([Request(input_ids=prompt, max_new_tokens=1)])
    finally:
        del runner.sample
    return seen[0][0].double()


@pytest.fixture(scope="module", params=["EAGLE", "EAGLE3"])
def server(request: pytest.FixtureRequest, logits: object) -> Iterator[InForce]:
    with in_force(request.param, max_running_requests=64) as made:
        yield made


# At 0.8 the tiny models are sure of most tokens; at 2 many more are likely enough to count.
@pytest.mark.parametrize("temperature", [0.8, 2.0])
@pytest.mark.parametrize("policy", [Never(), Always()], ids=repr)
def test_token_frequencies(server, logits, policy, temperature):
    distribution = {k: torch.softmax(v / temperature, -1) for k, v in logits.items()}
    outputs = server.run(
        policy,
        [
            Request(input_ids=PROMPT, max_new_tokens=2, temperature=temperature)
            for _ in range(REQUESTS)
        ],
    )
    assert server.steps(3 if isinstance(policy, Never) else 0) == 0
    pairs = [tuple(output.token_ids) for output in outputs]
    assert all(len(pair) == 2 for pair in pairs)
    first = dict(enumerate(distribution[()].tolist()))
    # The first token is the prefill's; the second is that of the one decode step.
    both = {
        (token, second): first[token] * p
        for (token,), after in ((k, v) for k, v in distribution.items() if k)
        for second, p in enumerate(after.tolist())
    }
    check(Counter(pair[0] for pair in pairs), first)
    check(Counter(pairs), both)


def check(seen: Counter[Any], probability: dict[Any, float]) -> None:
    """Pearson's chi-squared test; all that is expected fewer than five times is one cell."""
    cells = {key: REQUESTS * p for key, p in probability.items() if REQUESTS * p >= 5}
    assert len(cells) >= 10, "too peaked a distribution to test anything"
    rest = REQUESTS - sum(cells.values())
    statistic = sum((seen[key] - e) ** 2 / e for key, e in cells.items())
    statistic += (REQUESTS - sum(seen[key] for key in cells) - rest) ** 2 / rest
    freedom = len(cells)
    assert statistic < critical(freedom), (statistic, critical(freedom))


def critical(freedom: int) -> float:
    """Upper 0.001 quantile of chi-squared, by the Wilson-Hilferty approximation (1931)."""
    z = 3.0902
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3
