"""What a decision costs: view, policy and bookkeeping, on a real scheduler at batch 256.

    python examples/benchmark_decision.py [--policy "batch_size(off_at=32, on_at=24)"] [--batch 256]

Runs the CPU engine in this process, so SGLang must be installed. Times every decision and every
outcome in place, and prints them beside the time of the steps they were part of.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import sglang_dynspec
from sglang_dynspec.testing import cpu_engine


def timed(function: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    """The function, with its seconds appended to a list."""

    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            into.append(time.perf_counter() - started)

    return call


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--policy", default="batch_size(off_at=32, on_at=24) & accept_rate(min=0.3)"
    )
    parser.add_argument("--batch", type=int, default=256, help="requests in the decode batch")
    parser.add_argument("--tokens", type=int, default=60, help="tokens for each request")
    options = parser.parse_args()

    cpu_engine.install()
    sglang_dynspec.activate(policy=options.policy, strict=True)
    from sglang_dynspec.engine import batch_prep, install, results
    from sglang_dynspec.testing.scheduler import InProcessScheduler, Request

    decide: list[float] = []
    observe: list[float] = []
    batch_prep.decide = timed(batch_prep.decide, decide)
    results.observe = timed(results.observe, observe)
    draw = random.Random(0)
    requests = [
        Request([draw.randrange(4, 512) for _ in range(16)], max_new_tokens=options.tokens)
        for _ in range(options.batch)
    ]
    with InProcessScheduler(
        "EAGLE3",
        max_running_requests=options.batch,
        max_total_tokens=options.batch * (options.tokens + 64),
    ) as scheduler:
        started = time.perf_counter()
        scheduler.run(requests)
        seconds = time.perf_counter() - started
        status = install.status()
    report(options.policy, decide, observe, seconds, status)


def report(
    policy: str, decide: list[float], observe: list[float], seconds: float, status: dict[str, Any]
) -> None:
    """Print microseconds, and the share of the whole run."""
    print(f"policy {policy}, {status['steps']} decode steps: {status['by_num_steps']}")
    for name, times in (("decision", decide), ("outcome", observe)):
        micro = sorted(1e6 * t for t in times)
        print(
            f"{name:9} median {statistics.median(micro):6.1f} us, "
            f"99th percentile {micro[int(0.99 * len(micro))]:6.1f} us, {len(micro)} times"
        )
    share = (sum(decide) + sum(observe)) / seconds
    print(f"together {100 * share:.3f}% of the {seconds:.1f} s that the steps took on this CPU")


if __name__ == "__main__":
    main()
