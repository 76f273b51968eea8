"""Metrics beside SGLang's own, on a server with ``--enable-metrics``.

They follow SGLang's: they are brought up to date when SGLang does that with its own
(``SchedulerMetricsCollector.log_stats``, every ``--decode-log-interval`` steps and after each
prefill), and once when the scheduler has nothing left to do. A step itself does nothing for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_dynspec import __version__
from sglang_dynspec.engine.controller import POLICY, Controller, Counts, expectations

if TYPE_CHECKING:
    from sglang_dynspec.engine.runtime import Runtime

logger = logging.getLogger("sglang_dynspec")

PREFIX = "sglang:dynspec_"
DECISION_BUCKETS = (
    *(5e-6, 1e-5, 2e-5, 3e-5, 4e-5, 5e-5, 7.5e-5, 1e-4),
    *(1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2),
)
"""In seconds."""

Totals = dict[tuple[str, "int | str"], float]
"""By what is counted, and the label it is counted under."""

_MODE = ("steps", "requests", "tokens", "seconds")


@dataclass
class Gain:
    """What has been run between two flushes."""

    steps: dict[int, float] = field(default_factory=dict)
    """By draft steps, as all of these."""
    requests: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    switches: dict[str, float] = field(default_factory=dict)
    """By reason."""
    passthrough: dict[str, float] = field(default_factory=dict)
    """By reason."""

    def accept_length(self) -> float | None:
        """Mean tokens that a request gained in a speculative step, or None without one."""
        requests = sum(n for num_steps, n in self.requests.items() if num_steps)
        tokens = sum(n for num_steps, n in self.tokens.items() if num_steps)
        return tokens / requests if requests else None

    def tokens_per_second(self) -> float | None:
        """Tokens in a second of decode steps, or None without one."""
        seconds = sum(self.seconds.values())
        return sum(self.tokens.values()) / seconds if seconds > 0 else None


class Deltas:
    """What counts have gained since they were last looked at.

    A controller may be given fresh counts; then what the old ones have gained since is added to
    what the new ones have.
    """

    def __init__(self) -> None:
        self._counts = Counts()
        self._before: Totals = {}

    def take(self, counts: Counts) -> Gain:
        """Return what has come since the last call."""
        gain = Gain()
        self._add(gain)
        if counts is not self._counts:
            self._counts, self._before = counts, {}
            self._add(gain)
        return gain

    def _add(self, gain: Gain) -> None:
        now = totals(self._counts)
        for (what, label), value in now.items():
            before = self._before.get((what, label), 0)
            into = getattr(gain, what)
            # Less than before: counted from nothing again.
            into[label] = into.get(label, 0) + (value - before if value >= before else value)
        self._before = now


def totals(counts: Counts) -> Totals:
    """Counts as a flat copy."""
    # Copied first: a flush may come from another thread, when dynspec is deactivated.
    modes = list(counts.by_num_steps.items())
    return {
        **{(what, n): getattr(mode, what) for n, mode in modes for what in _MODE},
        **{("switches", reason): n for reason, n in list(counts.switches.items())},
        **{("passthrough", reason): n for reason, n in list(counts.passthrough.items())},
    }


def predicted(controller: Controller) -> float | None:
    """Tokens per second that the policy expects of the draft steps in use, or None."""
    value = expectations(controller.explanation()).get(str(controller.last_num_steps))
    return None if value is None else float(value)


class Families:
    """The metrics themselves, with the labels of SGLang's.

    Args:
        collector: SGLang's SchedulerMetricsCollector. Its classes are used where it has some of its
            own (from 0.5.13 on, for Ray).
    """

    def __init__(self, collector: Any) -> None:
        # Not earlier: it looks for PROMETHEUS_MULTIPROC_DIR when it is imported.
        import prometheus_client

        self._collector, self._library = collector, prometheus_client
        self._shared = dict(collector.labels)
        gauge, counter = self._gauge, self._counter
        self.num_steps = gauge("num_steps", "Draft steps of the latest decode step.")
        self.steps = counter("steps_total", "Decode steps, by draft steps.", "num_steps")
        self.switches = counter(
            "switches_total",
            "Changes of the number of draft steps, by what they came from.",
            "reason",
        )
        self.passthrough = counter(
            "passthrough_total", "Batches that SGLang decided on instead of the policy.", "reason"
        )
        self.accept_length = gauge(
            "accept_length", "Tokens that a request gains in a speculative step, mean."
        )
        self.decision_seconds = self._make(
            "histogram",
            "decision_seconds",
            "Seconds that decisions take.",
            buckets=DECISION_BUCKETS,
        )()
        self.tokens_per_second = gauge(
            "tokens_per_second",
            "Tokens per second of decoding: what the policy expects, and what was gained.",
            "kind",
        )
        self.cold_requests = gauge(
            "cold_requests", "Requests of the latest decode step whose draft KV has a hole."
        )
        self.info = gauge(
            "info", "What is in force: 1.", "policy", "version", "draft_state", "state"
        )

    def _gauge(self, name: str, says: str, *labels: str) -> Any:
        of = self._make("gauge", name, says, *labels, multiprocess_mode="mostrecent")
        return of if labels else of()

    def _counter(self, name: str, says: str, *labels: str) -> Any:
        return self._make("counter", name, says, *labels)

    def _make(
        self, kind: str, name: str, says: str, *labels: str, **options: Any
    ) -> Callable[..., Any]:
        """Make a metric, and return what gives one of its series."""
        of_collector = getattr(self._collector, f"_{kind}_cls", None)
        made = (of_collector or getattr(self._library, kind.capitalize()))(
            name=PREFIX + name,
            documentation=says,
            labelnames=[*self._shared, *labels],
            **options,
        )
        series: dict[tuple[str, ...], Any] = {}

        def of(*values: str) -> Any:
            if values not in series:
                own = dict(zip(labels, values, strict=True))
                series[values] = made.labels(**self._shared, **own)
            return series[values]

        return of


class Exporter:
    """Brings the metrics up to date. What fails here turns them off, and nothing else.

    Args:
        collector: SGLang's SchedulerMetricsCollector.
    """

    def __init__(self, collector: Any) -> None:
        self.collector = collector
        self.failure: str | None = None
        self._families: Families | None = None
        self._deltas = Deltas()
        self._flushed: tuple[Any, ...] = ()
        self._flushed_policy: Any = None
        self._policy: Any = None
        self._policy_text = ""
        self._info: tuple[str, ...] = ()

    def status(self) -> str:
        """``on``, or ``off`` with the reason."""
        return "on" if self.failure is None else f"off: {self.failure}"

    def flush(self, runtime: Runtime, state: str) -> None:
        """Bring all metrics up to date.

        Args:
            state: as in ``status()``.
        """
        self._guarded(lambda: self._flush(runtime, state))

    def flush_at_idle(self, runtime: Runtime, state: str) -> None:
        """Do so if anything has been run or changed since. Called over and over."""
        controller = runtime.controller
        seen = (controller.last_ended, state)
        # By identity: how policies compare is their own affair.
        if seen == self._flushed and controller.policy is self._flushed_policy:
            return
        self.flush(runtime, state)
        self._guarded(self._nothing_runs)
        self._flushed, self._flushed_policy = seen, controller.policy

    def end(self) -> None:
        """dynspec is not in force any more."""
        self._guarded(lambda: self._say(()))

    def _guarded(self, action: Callable[[], None]) -> None:
        if self.failure is not None:
            return
        try:
            action()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            logger.warning(
                "sglang_dynspec: its metrics failed and are off from now on; nothing else is.",
                exc_info=error,
            )

    def _flush(self, runtime: Runtime, state: str) -> None:
        controller = runtime.controller
        if self._families is None:
            self._families = made = Families(self.collector)
            # A series that begins at its first value has no rate until its second.
            for n in controller.ladder:
                made.steps(str(n))
            made.switches(POLICY)
        self._count(self._deltas.take(controller.counts))
        self._observe(controller)
        self._say((self._policy_of(controller), __version__, runtime.draft_state, state))

    def _count(self, gain: Gain) -> None:
        families = self._made
        for counter, by_label in (
            (families.steps, gain.steps),
            (families.switches, gain.switches),
            (families.passthrough, gain.passthrough),
        ):
            for label, value in by_label.items():
                counter(str(label)).inc(value)
        _set(families.accept_length, gain.accept_length())
        _set(families.tokens_per_second("actual"), gain.tokens_per_second())

    def _observe(self, controller: Controller) -> None:
        families = self._made
        families.num_steps.set(controller.last_num_steps)
        families.cold_requests.set(controller.last_cold)
        expected = predicted(controller)
        if expected is not None:
            families.tokens_per_second("predicted").set(expected)
        taken = controller.decision_seconds
        while taken:
            families.decision_seconds.observe(taken.popleft())

    def _nothing_runs(self) -> None:
        self._made.cold_requests.set(0)

    def _policy_of(self, controller: Controller) -> str:
        if controller.policy is not self._policy:
            self._policy, self._policy_text = controller.policy, controller.policy_text()
        return self._policy_text

    def _say(self, info: tuple[str, ...]) -> None:
        """Let one set of labels be 1; prometheus_client cannot remove others when there are several
        processes."""
        if info == self._info or self._families is None:
            return
        if self._info:
            self._families.info(*self._info).set(0)
        if info:
            self._families.info(*info).set(1)
        self._info = info

    @property
    def _made(self) -> Families:
        assert self._families is not None
        return self._families


def _set(gauge: Any, value: float | None) -> None:
    """Set a gauge, or leave what it was."""
    if value is not None:
        gauge.set(value)
