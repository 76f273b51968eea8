"""What the steps of every mode take, by replaying their CUDA graphs before the server serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from sglang_dynspec.engine.decode_graph import PlainTarget
from sglang_dynspec.engine.dialect.base import EXTEND_GRAPHS, Dialect
from sglang_dynspec.engine.draft_state import DraftExtend
from sglang_dynspec.engine.step_states import StepStates
from sglang_dynspec.policy.base import StepTiming

_WARM_UP, _REPLAYS = 2, 5
_SIZES_PER_OCTAVE = 2
"""Of batch sizes, that are timed: those between take what lies between."""


class Graphs:
    """The CUDA graphs that a step of each mode replays, by batch size.

    A replay reads and writes what capturing has left in SGLang's buffers: no slot of a request, so
    long as there has been none. How often each is replayed is fixed, so that with several ranks
    each does the same.

    Args:
        extend: the draft-extend after plain steps (``warm``), or None.
    """

    def __init__(
        self,
        dialect: Dialect,
        worker: Any,
        target: PlainTarget,
        extend: DraftExtend | None,
        states: StepStates,
    ) -> None:
        self._dialect = dialect
        self._worker = worker
        self._target = target
        self._extend = extend
        self._states = states

    def timings(self, ladder: Sequence[int]) -> list[StepTiming]:
        """Time every mode of a ladder, at batch sizes that all have graphs for.

        Returns:
            Nothing where part of a step has no graph: modes could not be compared.
        """
        if not self._dialect.times_graphs:
            return []
        modes = {n: self._of(n) for n in ladder}
        runners = [graphs for parts in modes.values() for graphs in parts]
        sizes = sorted(set[int].intersection(*map(set, runners)))
        return [
            StepTiming(
                num_steps=n,
                batch_size=size,
                seconds=sum(self._seconds(graphs[size]) for graphs in parts),
            )
            for size in thinned(sizes)
            for n, parts in modes.items()
        ]

    def _of(self, num_steps: int) -> list[dict[int, torch.cuda.CUDAGraph]]:
        """The graphs that a step replays one after another, each by batch size."""
        draft_worker = self._worker.draft_worker
        with self._mode(num_steps):
            runners = [getattr(self._worker.target_worker.model_runner, self._dialect.graph_runner)]
            if num_steps > 1:  # the first proposal comes from the draft-extend
                runners.append(draft_worker.cuda_graph_runner)
            if num_steps > 0 or self._extend is not None:
                runners.append(getattr(draft_worker, EXTEND_GRAPHS))
        return [captured(runner) for runner in runners]

    @contextmanager
    def _mode(self, num_steps: int) -> Iterator[None]:
        with ExitStack() as stack:
            if num_steps > 0:
                stack.enter_context(self._states.active(num_steps))
            else:
                stack.enter_context(self._target.active())
                if self._extend is not None:
                    stack.enter_context(self._extend.narrowed())
            yield

    def _seconds(self, graph: torch.cuda.CUDAGraph) -> float:
        device = torch.get_device_module(self._worker.device)
        begun, ended = device.Event(enable_timing=True), device.Event(enable_timing=True)
        for _ in range(_WARM_UP):
            graph.replay()
        begun.record()
        for _ in range(_REPLAYS):
            graph.replay()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1000 / _REPLAYS


def captured(runner: Any) -> dict[int, torch.cuda.CUDAGraph]:
    """Return a graph runner's graphs by batch size; empty without a runner, or one without any.

    Up to 0.5.13 a runner keeps them in ``graphs`` by batch size, later in its backend by a
    ``ShapeKey`` whose ``size`` that is. Keys that say more (streams, LoRA) are left out, and so is
    what runs in part eagerly and is no plain CUDAGraph.
    """
    backend = getattr(runner, "backend", None)
    graphs = getattr(runner, "graphs", None) or getattr(backend, "_graphs", None) or {}
    return {
        size: graph
        for key, graph in graphs.items()
        if isinstance(graph, torch.cuda.CUDAGraph) and (size := _size(key)) is not None
    }


def _size(key: Any) -> int | None:
    if isinstance(key, int):
        return key
    more = [value for name, value in getattr(key, "__dict__", {}).items() if name != "size"]
    return getattr(key, "size", None) if all(value is None for value in more) else None


def thinned(sizes: Sequence[int]) -> list[int]:
    """Leave out of ascending sizes those that are close to the one before; the last stays."""
    kept: list[int] = []
    for size in sizes:
        if kept and size < kept[-1] * 2 ** (1 / _SIZES_PER_OCTAVE):
            continue
        kept.append(size)
    return [*kept[:-1], sizes[-1]] if sizes else []


def in_words(timings: Sequence[StepTiming]) -> str:
    """Say what the smallest and the largest batch take, for the log."""
    sizes = sorted({timing.batch_size for timing in timings})
    parts = []
    for size in dict.fromkeys((sizes[0], sizes[-1])):
        of_size = {t.num_steps: t.seconds for t in timings if t.batch_size == size}
        steps = "/".join(map(str, of_size))
        took = "/".join(f"{1000 * seconds:.1f}" for seconds in of_size.values())
        requests = "1 request" if size == 1 else f"{size} requests"
        parts.append(f"{requests} with {steps} draft steps: {took} ms")
    return "; ".join(parts)
