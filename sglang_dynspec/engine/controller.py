"""From a view of the batch to a number of draft steps, and from its outcome back to the policy.

No SGLang name stands here: what the engine layer learns from a release arrives as a
:class:`~sglang_dynspec.policy.base.BatchView`, so that the fail-safe can be tested by itself.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_dynspec.engine.exchange import Vote
from sglang_dynspec.errors import RanksError
from sglang_dynspec.policy.base import BatchView, Policy, StepOutcome, StepTiming
from sglang_dynspec.policy.text import policy_text

if TYPE_CHECKING:
    from sglang_dynspec.engine.exchange import Verdict
    from sglang_dynspec.engine.ranks import Ranks
    from sglang_dynspec.engine.tracing import Trace

logger = logging.getLogger("sglang_dynspec")

STATIC = "static"
"""Pass-through reason of every step after the fail-safe, or after `Controller.release`."""

PAUSED = "paused"
"""Pass-through reason of every step while an operator has left the server to SGLang."""

POLICY, FORCED, ASKED, CATCHING_UP, FAILURE = "policy", "forced", "asked", "catch_up", "failure"
"""What a change of the mode can come from, beside the pass-through reasons."""

OTHER_RANK = "other_rank"
"""What it comes from where another rank of DP attention wants less, or cannot decode plainly."""

RELEASED = "released"
"""What rank 0 tells the others when they are to leave every step to SGLang."""


@dataclass(slots=True)
class Decision:
    """What one decode step is to run. Travels with the batch to the worker, and with the result
    back to the result processor."""

    step: int
    """Number of the decode step, from 0."""
    num_steps: int
    """Draft steps to run, a value of the ladder."""
    passthrough: str | None
    """Why SGLang decides instead of the policy, or None."""
    batch_size: int
    """Requests in the batch."""
    started: float
    """When the step was prepared, in seconds of the controller's clock."""
    reason: str = POLICY
    """What the number of draft steps comes from."""
    as_verified: bool = False
    """Whether a plain step is to sample as a verification does."""
    cold: tuple[int, ...] = ()
    """Indices of the requests whose draft KV has a hole."""
    plan: Any = None
    """What the draft is to take in before the step, as `CatchUp.plan` made it, or None."""
    postponed: bool = False
    """Whether speculation was wanted, and the draft first takes in a part of what it has missed."""
    extend: tuple[int, ...] | None = None
    """Under DP attention: tokens that the draft of each rank takes in before the step, if any."""
    view: BatchView | None = None
    """What the policy saw."""


@dataclass(slots=True)
class ModeCount:
    """Totals of the steps run with one num_steps."""

    steps: int = 0
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass
class Counts:
    """What has been run since the server started."""

    by_num_steps: dict[int, ModeCount] = field(default_factory=dict)
    switches: Counter[str] = field(default_factory=Counter)
    """By what they came from."""
    passthrough: Counter[str] = field(default_factory=Counter)
    draft_prefills: int = 0
    draft_prefills_skipped: int = 0
    postponed: int = 0

    @property
    def accept_length(self) -> float | None:
        """Mean tokens a request gained in a speculative step, or None before the first."""
        counts = [count for n, count in self.by_num_steps.items() if n > 0]
        requests = sum(count.requests for count in counts)
        return sum(count.tokens for count in counts) / requests if requests else None


@dataclass(frozen=True, slots=True)
class Forced:
    """A number of draft steps that an operator wants, whatever the policy says."""

    num_steps: int
    until: float
    """In seconds of the controller's clock; infinite for good."""


class Controller:
    """Asks the policy, keeps to the ladder, and stands in for the policy once it has failed.

    Args:
        policy: decides; replaced by SGLang's own behaviour for good when it raises or answers
            something that is no number of steps.
        ladder: draft steps that can be run, ascending; the first is 0, the last the server's
            ``--speculative-num-steps``.
        clock: seconds, monotonic.
        ranks: this rank's end, where several ranks must decide the same. Then rank 0 alone asks its
            policy, and what it has told holds.
        agrees: whether decisions are agreed on with the other ranks of DP attention, which goes on
            when SGLang decides here.
    """

    def __init__(
        self,
        policy: Policy,
        ladder: Sequence[int],
        clock: Callable[[], float] = time.perf_counter,
        ranks: Ranks | None = None,
        agrees: bool = False,
    ) -> None:
        self.policy = policy
        self.ladder = tuple(ladder)
        self.failure: str | None = None
        self.counts = Counts()
        self.last_num_steps = self.ladder[-1]
        self.last_batch_size = 0
        self.last_cold = 0
        """Requests of the latest step whose draft KV has a hole."""
        self.view: BatchView | None = None
        """What the latest decision was taken on."""
        self.timings: Sequence[StepTiming] = ()
        """What steps take, where that has been timed at start."""
        self.decision_seconds: deque[float] = deque(maxlen=512)
        """What the latest decisions have taken, until somebody takes them out."""
        self.trace: Trace | None = None
        """Writes decisions down, if that is asked for."""
        self._clock = clock
        self._ranks = ranks
        self._agrees = agrees
        self._paused = False
        self._forced: Forced | None = None
        self._step = 0
        self._since = 0
        """Number of the first step that is the policy's."""
        self._released = False
        self._said_rounded = False
        self._ended = -math.inf
        """When the result of the last batch of any kind had been processed."""

    @property
    def static(self) -> bool:
        """Whether SGLang decides: after a failure, when released, or while paused."""
        return self.final or self._paused

    @property
    def final(self) -> bool:
        """Whether SGLang decides for good: after a failure, or when released."""
        return self.failure is not None or self._released

    @property
    def paused(self) -> bool:
        """Whether an operator has left the server to SGLang."""
        return self._paused

    @property
    def forced(self) -> Forced | None:
        """What an operator wants instead of the policy's answers, while that holds."""
        forced = self._forced
        return forced if forced is not None and self._clock() < forced.until else None

    @property
    def last_ended(self) -> float:
        """When the latest result had been processed, in seconds of the controller's clock."""
        return self._ended

    @property
    def next_step(self) -> int:
        """Number that the next decision will have."""
        return self._step

    def use(self, policy: Policy) -> None:
        """Put another policy in charge, from the next step on. Does not undo a failure.

        It hears of no step that was decided before it came.
        """
        self.policy, self._since = policy, self._step

    def pause(self) -> None:
        """Leave every step to SGLang until :meth:`resume`. On all ranks in the same iteration."""
        self._paused = True

    def force(self, num_steps: int, seconds: float = math.inf) -> None:
        """Run so many draft steps for a while, whatever the policy says.

        Args:
            num_steps: a value of the ladder.
        """
        if num_steps not in self.ladder:
            raise ValueError(f"{num_steps} draft steps cannot be run, only {self.ladder}")
        self._forced = Forced(num_steps, self._clock() + seconds)

    def resume(self) -> None:
        """Let the policy decide again, after :meth:`pause` and :meth:`force`. On all ranks in the
        same iteration."""
        self._paused, self._forced = False, None

    def release(self) -> bool:
        """Leave every later step to SGLang.

        Returns:
            Whether that holds already. Where several ranks must decide the same it holds once all
            have heard of it.
        """
        if self._ranks is not None and not self.final:
            self._ranks.wish(static=RELEASED)
            return False
        self._released = True
        if not self._agrees:
            return True
        self.end_trace()
        return False

    def end_trace(self) -> None:
        """End the trace, if there is one, with what has ended since its last line."""
        if self.trace is not None:
            self.trace.close(self.counts, self.policy)

    def observe_timings(self, timings: Sequence[StepTiming]) -> None:
        """Tell the policy what steps take, as timed at start."""
        self.timings = timings
        if not self.asks:
            return
        try:
            self.policy.observe_timings(timings)
        except Exception as error:
            self._policy_failed("raised in observe_timings()", error)

    def decide(self, view: BatchView, blocked: str | None = None) -> Decision:
        """Decide one decode step. It counts once it is taken (:meth:`take`): a batch that is being
        prepared may still run as part of a prefill.

        Args:
            view: the batch about to run.
            blocked: why this batch cannot be decoded plainly, or None. Then a wish for a plain
                step becomes SGLang's own step, counted under that reason.
        """
        started = self._clock()
        self.view = view
        self._heed()
        num_steps, passthrough = self._ask(view, blocked)
        reason = passthrough or self._overruled(view)[0] or POLICY
        return Decision(
            self._step, num_steps, passthrough, view.batch_size, started, reason, view=view
        )

    def vote(self, decision: Decision) -> Vote:
        """What this rank says to the others of DP attention."""
        plan, passthrough = decision.plan, decision.passthrough
        static = passthrough in (STATIC, PAUSED)
        blocked = passthrough is not None and not static
        return Vote(
            # Of a step that is postponed, or blocked, what the policy wants.
            num_steps=self._wanted(decision, blocked),
            blocked=blocked,
            static=static,
            final=self.final,
            behind=plan is not None,
            postponed=plan is not None and not plan.complete,
            extend=0 if plan is None else plan.width,
        )

    def follow(self, verdict: Verdict) -> None:
        """Leave every step to SGLang if another rank of DP attention does."""
        if verdict.final and not self.final:
            self.failure = "another rank has left its steps to SGLang"
            self._say_static(None)

    def _wanted(self, decision: Decision, blocked: bool) -> int:
        if blocked:
            return 0
        return self.ladder[-1] if decision.postponed else decision.num_steps

    def settle(self, decision: Decision, verdict: Verdict) -> None:
        """Bring a decision in line with what all ranks of DP attention run."""
        decision.extend, decision.postponed = verdict.extend, verdict.postponed
        if verdict.num_steps != decision.num_steps or (verdict.static and not self.static):
            decision.num_steps, decision.reason = verdict.num_steps, OTHER_RANK

    def decided(self, decision: Decision) -> None:
        """Note what a decision has taken, with all that is decided beside the policy."""
        self.decision_seconds.append(self._clock() - decision.started)

    def take(self, decision: Decision) -> None:
        """Note that the step decided on is being run."""
        self._step += 1
        self.last_batch_size = decision.batch_size
        self.last_cold = len(decision.cold)
        if decision.passthrough is not None:
            self.counts.passthrough[decision.passthrough] += 1
        self.counts.postponed += decision.postponed
        self._ran(decision, CATCHING_UP if decision.postponed else decision.reason)

    def instead(self, decision: Decision) -> None:
        """Note that SGLang runs a step of its own for a plain one that failed."""
        decision.num_steps = self.ladder[-1]
        self._ran(decision, FAILURE)

    def wants_draft_prefill(self, view: BatchView) -> bool:
        """Ask the policy whether a prefill needs the draft model's as well; it does where SGLang
        decides.

        Args:
            view: the decode batch that the prefill leads to.
        """
        self._heed()
        wanted = self.static or self._ask_for_draft_prefill(view)
        if wanted:
            self.counts.draft_prefills += 1
        else:
            self.counts.draft_prefills_skipped += 1
        return wanted

    def interrupt(self, reason: str) -> None:
        """Note a batch that is none of ours (prefill, idle)."""
        self.counts.passthrough[reason] += 1

    def ended(self) -> None:
        """Note that the result of a batch that is none of ours has been processed."""
        self._ended = self._clock()

    def finished(self, decision: Decision, accept_lens: Sequence[int]) -> float:
        """Give the outcome of a step to the policy.

        Args:
            decision: the one that led to the step.
            accept_lens: tokens that each request gained, bonus token included.

        Returns:
            Seconds that the step has taken.
        """
        count = self.counts.by_num_steps.setdefault(decision.num_steps, ModeCount())
        count.steps += 1
        count.requests += len(accept_lens)
        count.tokens += sum(accept_lens)
        # The device takes one batch after another, and a result is processed once it is there. So a
        # step has taken the time since the batch before it ended, whatever that was, or since it
        # was prepared itself where the device had nothing to do.
        begun, self._ended = max(self._ended, decision.started), self._clock()
        seconds = self._ended - begun
        count.seconds += seconds
        if self._ranks is not None:
            self._ranks.ran(decision.num_steps, accept_lens)
        if self.static or not self.asks or decision.step < self._since:
            return seconds
        outcome = StepOutcome(
            step=decision.step,
            num_steps=decision.num_steps,
            batch_size=len(accept_lens),
            accept_lens=tuple(accept_lens),
            cold=decision.cold,
            seconds=seconds,
        )
        try:
            self.policy.observe(outcome)
        except Exception as error:
            self._policy_failed("raised in observe()", error)
        return seconds

    def fail(self, what: str, error: BaseException) -> None:
        """Fall back to SGLang's own behaviour for good, and say so once.

        Raises:
            RanksError: other ranks have not failed here, and know nothing of it: they would wait
                in the collectives of another step.
        """
        if self.failure is not None:
            return
        failure = f"{what}: {describe(error)}"
        if self._ranks is not None:
            if not self._ranks.fail_alike(what):
                raise RanksError(
                    f"{failure}, on rank {self._ranks.rank} and not on all; restart the server"
                ) from error
            self._ranks.wish(static=failure)
        self.failure = failure
        self._say_static(error)

    @property
    def asks(self) -> bool:
        """Whether the policy of this process is the one that decides."""
        return self._ranks is None or self._ranks.leads

    def _policy_failed(self, how: str, error: BaseException) -> None:
        what = f"policy {self.policy_text()} {how}"
        if self._ranks is None:
            self.fail(what, error)
            return
        # Not at once: the other ranks do not know yet.
        self._ranks.wish(static=f"{what}: {describe(error)}")
        logger.error("sglang_dynspec: %s.", what, exc_info=error)

    def _heed(self) -> None:
        """Bring into force what rank 0 has told."""
        told = None if self._ranks is None else self._ranks.told.static
        if told is None or self.final:
            return
        if told == RELEASED:
            self._released = True
            self.end_trace()
            return
        self.failure = told
        self._say_static(None)

    def _say_static(self, error: BaseException | None) -> None:
        logger.error(
            "sglang_dynspec: %s. Falling back to static speculation (%d draft steps) until the "
            "server is restarted; requests are not affected.",
            self.failure,
            self.ladder[-1],
            exc_info=error,
        )

    def as_dict(self) -> dict[str, Any]:
        """Counts and modes with JSON-native keys and values."""
        return {
            "policy": self.policy_text(),
            "ladder": list(self.ladder),
            "num_steps": self.last_num_steps,
            "batch_size": self.last_batch_size,
            "cold": self.last_cold,
            "accept_length": self.counts.accept_length,
            "steps": self._step,
            "paused": self._paused,
            "forced": self._forced_as_dict(),
            "switches": self.counts.switches.total(),
            "switches_by_reason": dict(self.counts.switches),
            "by_num_steps": {
                str(n): asdict(c) for n, c in sorted(self.counts.by_num_steps.items())
            },
            "passthrough": dict(self.counts.passthrough),
            "draft_prefills": self.counts.draft_prefills,
            "draft_prefills_skipped": self.counts.draft_prefills_skipped,
            "postponed": self.counts.postponed,
            "explanation": self.explanation(),
            "trace": self.trace and self.trace.as_dict(),
            "error": self.failure,
        }

    def explanation(self) -> dict[str, Any]:
        """What the policy knows, in its own words."""
        # Asked by whoever looks at the status: no reason to stop deciding.
        try:
            return self.policy.explain()
        except Exception as error:
            return {"error": describe(error)}

    def policy_text(self) -> str:
        """The policy as one writes it, or the name of its class."""
        return text_of(self.policy)

    def _forced_as_dict(self) -> dict[str, Any] | None:
        forced = self.forced
        if forced is None:
            return None
        left = forced.until - self._clock()
        return {"num_steps": forced.num_steps, "seconds_left": left if left < math.inf else None}

    def _ran(self, decision: Decision, reason: str) -> None:
        previous, self.last_num_steps = self.last_num_steps, decision.num_steps
        if decision.num_steps != previous:
            self.counts.switches[reason] += 1
        if self.trace is not None:
            self.trace.taken(decision, previous, reason, self.counts, self.policy)

    def _ask(self, view: BatchView, blocked: str | None) -> tuple[int, str | None]:
        most = self.ladder[-1]
        if self.static:
            return most, PAUSED if self._paused else STATIC
        wanted = self._ask_policy(view) if self.asks else None
        if self._ranks is not None:
            if wanted is not None:
                self._ranks.wish(num_steps=wanted)
            wanted = self._ranks.told.num_steps
        if wanted is None:
            return most, STATIC
        if wanted > 0 or blocked is None:
            return wanted, None
        return most, blocked

    def _overruled(self, view: BatchView) -> tuple[str | None, int | None]:
        """What stands above the policy, and how many draft steps it wants."""
        forced = self.forced
        if forced is not None:
            return FORCED, forced.num_steps
        asked = None if self.policy.weighs_requests else view.asked_steps
        return (None, None) if asked is None else (ASKED, asked)

    def _ask_policy(self, view: BatchView) -> int | None:
        """The policy's answer, or what overrules it; None if the policy has failed."""
        _, overruled = self._overruled(view)
        if overruled is not None:
            return overruled
        try:
            answer = self.policy.decide(view)
            num_steps = view.on_ladder(answer)
        except Exception as error:
            self._policy_failed("failed in decide()", error)
            return None
        if num_steps == 0 and answer and not self._said_rounded:
            self._say_rounded(answer)
        return num_steps

    def _ask_for_draft_prefill(self, view: BatchView) -> bool:
        if self.asks:
            _, overruled = self._overruled(view)
            try:
                wanted = bool(
                    self.policy.wants_draft_prefill(view) if overruled is None else overruled
                )
            except Exception as error:
                self._policy_failed("failed in wants_draft_prefill()", error)
                wanted = True
            if self._ranks is None:
                return wanted
            self._ranks.wish(draft_prefill=wanted)
        assert self._ranks is not None
        return self._ranks.told.draft_prefill

    def _say_rounded(self, answer: int) -> None:
        self._said_rounded = True
        logger.warning(
            "sglang_dynspec: the policy asked for %d draft steps, but this server can run only %s, "
            "so the step is a plain decode. Said once.",
            answer,
            " or ".join(map(str, self.ladder)),
        )


def text_of(policy: Policy) -> str:
    """A policy as one writes it, or its class where it has no text form."""
    try:
        return policy_text(policy)
    except Exception:
        return type(policy).__name__


def expectations(explanation: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a policy says of tokens per second by draft steps, or of ``a & b`` the first part that
    says something."""
    own = explanation.get("tokens_per_second")
    if isinstance(own, Mapping):
        return own
    return next(
        (found for part in explanation.get("parts", ()) if (found := expectations(part))), {}
    )


def describe(error: BaseException) -> str:
    """Kind and message of an exception, whatever its own ``__str__`` does."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
