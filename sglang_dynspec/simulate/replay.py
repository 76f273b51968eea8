"""A traced server as a scenario: its batch sizes, its acceptance, and what its steps took."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_dynspec.observe.server_info import ModeCount
from sglang_dynspec.observe.trace_file import Span, TraceFile
from sglang_dynspec.simulate.acceptance import Acceptance, Drafts
from sglang_dynspec.simulate.costs import StepCosts, line_through
from sglang_dynspec.simulate.load import Request, Shape

OUTPUT_TOKENS = 16
"""Of a replayed request: so few that the batch follows the trace."""
LEAST_STEPS = 50
"""Of one mode, for its seconds to be taken from the trace."""
_LEAST_IN_A_ROW = 5
_SIZES = 4
"""Batch sizes from one power of two to the next that are told apart."""


class ReplayedLoad(Shape):
    """As many requests at once as the trace had in its decode batches.

    Args:
        trace: what to replay.
        output_tokens: of each request, on average. The trace does not know.
    """

    def __init__(self, trace: TraceFile, output_tokens: int = OUTPUT_TOKENS) -> None:
        spans = [span for span in trace.spans() if span.end > span.start]
        self._starts = [span.start for span in spans]
        self._spans = spans
        mean = sum(s.context * (s.end - s.start) for s in spans) / max(
            1e-9, sum(s.end - s.start for s in spans)
        )
        super().__init__(
            self._level_at,
            trace.seconds,
            peak=max((round(span.batch_size or 0) for span in spans), default=0),
            prompt_tokens=max(1, round(mean)),
            output_tokens=output_tokens,
        )

    def _level_at(self, now: float) -> float:
        span = self._span(now)
        return 0.0 if span is None else span.batch_size or 0.0

    def _span(self, now: float) -> Span | None:
        """The one at a time, or None in a pause."""
        i = bisect_right(self._starts, now) - 1
        return self._spans[i] if i >= 0 and now < self._spans[i].end else None

    def _request(self, now: float) -> Request:
        request, span = super()._request(now), self._span(now)
        if span is None:
            return request
        # The context that the trace had then: what a request brings and, on average, half of what
        # it gets.
        prompt = max(1, round(span.context - self.output_tokens / 2))
        return Request(now, prompt, request.output_tokens)


@dataclass(frozen=True, slots=True)
class ReplayedAcceptance(Acceptance):
    """The accept length of the trace's speculative steps; between these as it was last."""

    times: Sequence[float] = field(default=(), repr=False)
    lengths: Sequence[float] = field(default=(), repr=False)
    """From each time on, with the most draft steps."""

    def at(self, now: float) -> float:
        return self.lengths[max(0, bisect_right(self.times, now) - 1)]

    def in_words(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f}, where nothing was drafted as it was last,"


def acceptance_of(trace: TraceFile, num_steps: int) -> ReplayedAcceptance | None:
    """Return the accept length over time.

    Args:
        trace: with speculative steps.
        num_steps: draft steps that the accept lengths are to be for. Steps with fewer or more are
            taken to accept each draft with one probability.

    Returns:
        None without speculative steps.
    """
    times, lengths, drafts = [], [], Drafts(num_steps, 0)
    for span in trace.spans(most=200):
        found = _probability(span)
        if found is not None:
            times.append(span.start)
            lengths.append(drafts.expected(found, num_steps))
    if not times:
        return None
    return ReplayedAcceptance(min(lengths), max(lengths), times=times, lengths=lengths)


def _probability(span: Span) -> float | None:
    """That a draft is accepted, by most of the requests."""
    modes = {n: count for n, count in span.by_num_steps.items() if n > 0 and count.requests}
    if not modes:
        return None
    n = max(modes, key=lambda n: modes[n].requests)
    gained = modes[n].tokens / modes[n].requests
    return Drafts(n, 0).probability(min(n + 1.0, max(1.0, gained)))


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of the steps of one mode, by batch size."""

    num_steps: int
    points: Sequence[tuple[float, float]]
    """Requests and seconds, ascending."""
    steps: int

    @property
    def reach(self) -> tuple[float, float]:
        """The smallest batch and the largest."""
        return self.points[0][0], self.points[-1][0]


class TracedCosts(StepCosts):
    """What a step took in a traced server, by its draft steps and batch size, whatever the context.

    Args:
        measured: one mode or more, among them a plain one.
        context: mean tokens of a request in the trace.
        accept_length: of its steps with the most draft steps.
    """

    def __init__(self, measured: Sequence[Measured], context: float, accept_length: float) -> None:
        self.num_steps = max(mode.num_steps for mode in measured)
        self.accept_length = accept_length
        self.assumed = False
        self.max_batch = math.ceil(max(mode.reach[1] for mode in measured))
        self.backend = None
        self._contexts = [context]
        self._lines = {mode.num_steps: [line_through(mode.points)] for mode in measured}
        self._known = {}


def measured_in(trace: TraceFile) -> list[Measured]:
    """Return the seconds of the steps by mode and batch size, where there are enough of them."""
    sizes: dict[int, dict[int, ModeCount]] = {}
    for span in trace.spans():
        for n, count in span.by_num_steps.items():
            # Fewer are mostly the late ones of the mode before, and the change is in their seconds.
            if count.steps >= _LEAST_IN_A_ROW and count.requests and count.seconds > 0:
                size = round(_SIZES * math.log2(count.requests / count.steps))
                by_size = sizes.setdefault(n, {})
                by_size[size] = by_size.get(size, ModeCount()) + count
    found = []
    for n, by_size in sorted(sizes.items()):
        counts = [count for _, count in sorted(by_size.items())]
        steps = sum(count.steps for count in counts)
        if steps >= LEAST_STEPS:
            points = [(c.requests / c.steps, c.seconds / c.steps) for c in counts]
            found.append(Measured(n, points, steps))
    return found


def costs_of(trace: TraceFile) -> tuple[TracedCosts | None, str]:
    """Return the costs that the trace shows, and in words what they rest on, or what they lack.

    They are usable if plain steps and those with the most draft steps were each run often enough,
    and at batch sizes of which some are the same.
    """
    measured = {mode.num_steps: mode for mode in measured_in(trace)}
    most = trace.ladder[-1]
    for n in (0, most):
        if n not in measured:
            return None, (
                f"the trace has fewer than {LEAST_STEPS} steps with {n} draft steps, those aside "
                f"that were fewer than {_LEAST_IN_A_ROW} between two of its lines"
            )
    plain, full = measured[0].reach, measured[most].reach
    if plain[0] > full[1] or full[0] > plain[1]:
        return None, (
            f"the trace has plain steps at {_reach(plain)} requests and those with {most} draft "
            f"steps at {_reach(full)}, at no common batch size"
        )
    modes = [measured[n] for n in trace.ladder if n in measured]
    context = ReplayedLoad(trace).prompt_tokens
    said = "; ".join(
        f"{m.num_steps} draft steps at {_reach(m.reach)} requests, {m.steps} of them" for m in modes
    )
    counts = [s.by_num_steps[most] for s in trace.spans() if most in s.by_num_steps]
    total = sum(counts, ModeCount())
    return TracedCosts(modes, context, total.tokens / total.requests), said


def _reach(reach: tuple[float, float]) -> str:
    return f"{reach[0]:.3g}" if reach[0] == reach[1] else f"{reach[0]:.3g} to {reach[1]:.3g}"
