"""What one decision for all ranks costs rank 0 of a tensor-parallel server, per step.

    python examples/benchmark_ranks.py [--batch 256] [--steps 3000]

Two processes run SGLang's broadcast of requests through gloo, as its schedulers do before every
step, on servers with GPUs as well: by turns without dynspec, with a decision that stays the same
(nothing is told), and with one that changes at every step. Needs SGLang, no GPU and no model.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

RANKS = 2
TURN = 100  # steps of a kind before the next kind's


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=256, help="requests in the decode batch")
    parser.add_argument("--steps", type=int, default=3000, help="of each kind")
    options = parser.parse_args()

    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        arguments = (Path(folder) / "store", options.batch, options.steps)
        torch.multiprocessing.spawn(rank, arguments, nprocs=RANKS)


def rank(number: int, store: Path, batch: int, steps: int) -> None:
    """Run one rank; the first prints."""
    import torch.distributed as dist

    from sglang_dynspec.testing import cpu_engine

    cpu_engine.install()
    dist.init_process_group(
        "gloo",
        init_method=store.as_uri(),
        rank=number,
        world_size=RANKS,
        timeout=timedelta(seconds=300),
    )
    broadcast = Timed(sglangs_broadcast())
    kinds = {
        name: step(broadcast, number, batch, changes=changes)
        for name, changes in {"alone": None, "nothing told": False, "told every time": True}.items()
    }
    ours: dict[str, list[float]] = {name: [] for name in kinds}
    theirs: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(max(1, steps // TURN)):
        for name, run in kinds.items():
            for _ in range(TURN):
                dist.barrier()  # so that nothing of what is timed is waiting for the other
                started = time.perf_counter()
                run()
                ours[name].append(time.perf_counter() - started - broadcast.seconds)
                theirs[name].append(broadcast.seconds)
    if number == 0:
        report(ours, theirs, batch)


class Timed:
    """Stands in a function's place, and knows how long its latest call took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = self._function(*args, **kwargs)
        self.seconds = time.perf_counter() - started
        return result


def sglangs_broadcast() -> Callable[..., Any]:
    """Return SGLang's broadcast of requests."""
    from sglang_dynspec.engine import contract
    from sglang_dynspec.engine.dialect import installed_release, select

    owner, attribute = contract.owner_of(select(installed_release()).broadcast)
    broadcast: Callable[..., Any] = getattr(owner, attribute)
    return broadcast


def step(
    broadcast: Callable[..., Any], number: int, batch: int, *, changes: bool | None
) -> Callable[[], None]:
    """Return what happens between two steps.

    Args:
        broadcast: of requests.
        number: of this rank.
        batch: requests in the batch.
        changes: whether the decision does, each time; None: SGLang alone.
    """
    import torch.distributed as dist

    from sglang_dynspec.engine.ranks import Agreement, Ranks

    group = dist.group.WORLD
    if changes is None:
        return lambda: broadcast([], number, group, src=0)
    ranks = Ranks(number, 3, Agreement(number, RANKS))
    accept_lens = [1] * batch
    state = {"num_steps": 0}

    def run() -> None:
        ranks.exchange(broadcast, ([], number, group), {"src": 0})
        if changes:
            state["num_steps"] = 3 - state["num_steps"]
        if ranks.leads:
            ranks.wish(num_steps=state["num_steps"])
        ranks.ran(state["num_steps"], accept_lens)

    return run


def report(ours: dict[str, list[float]], theirs: dict[str, list[float]], batch: int) -> None:
    """Print medians in microseconds."""
    print(f"rank 0 of {RANKS}, {batch} requests, {len(ours['alone'])} steps of each kind, medians:")
    for name in ours:
        own, broadcast = (1e6 * statistics.median(times[name]) for times in (ours, theirs))
        print(f"{name:16} {own:6.1f} us beside the broadcast, which takes {broadcast:6.1f} us")


if __name__ == "__main__":
    main()
