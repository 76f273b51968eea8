"""The policy interface: what a policy sees, what it answers, and what it hears back.

Nothing in this package imports torch or SGLang: a policy is plain Python that can be written and
tested without either.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_dynspec.errors import PolicyError

if TYPE_CHECKING:
    from typing_extensions import Self

    from sglang_dynspec.policy.combine import Smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """What a policy may look at before a decode step.

    Every field is known without waiting for the device. Under the overlap scheduler the lengths
    are those of the last processed result, one step old.
    """

    batch_size: int
    """Requests in the decode batch (>= 1)."""
    ladder: tuple[int, ...]
    """Draft steps that can be run, ascending; the first is 0 (plain decode), the last the server's
    ``--speculative-num-steps``."""
    context_tokens: int = 0
    """Prompt and output tokens of the whole batch, as committed so far."""
    waiting: int = 0
    """Requests in the waiting queue."""
    kv_usage: float = 0.0
    """Share of the KV pool that requests hold, 0 to 1; what only the radix cache keeps is free."""
    last_num_steps: int = 0
    """Draft steps of the previous decode step."""
    step: int = 0
    """Number of this decode step since the server started, from 0."""
    cold: int = 0
    """Requests whose draft model has missed more than could be kept for it (draft state
    ``catch_up``): few of their draft tokens will be accepted for a while."""
    asked_never: int = 0
    """Requests that have asked for no speculation, by ``custom_params={"dynspec": "never"}``."""
    asked_always: int = 0
    """Requests that have asked for speculation, by ``"always"``."""

    @property
    def max_steps(self) -> int:
        """The most draft steps that can be run."""
        return self.ladder[-1]

    @property
    def asked_steps(self) -> int | None:
        """Draft steps that the requests have asked for, or None.

        A step is the same for the whole batch. So requests get what they have asked for where all
        that have asked agree, and are half of the batch or more.
        """
        asked = self.asked_never + self.asked_always
        if not asked or (self.asked_never and self.asked_always) or 2 * asked < self.batch_size:
            return None
        return 0 if self.asked_never else self.max_steps

    def on_ladder(self, answer: object) -> int:
        """Return the largest value of the ladder that is not above a policy's answer.

        Raises:
            PolicyError: ``answer`` is no whole number >= 0.
        """
        # bool is an int to Python, but `return batch_size < 32` is a mistake, not one draft step.
        try:
            steps = -1 if isinstance(answer, bool) else operator.index(answer)  # type: ignore[arg-type]
        except TypeError:
            steps = -1
        if steps < 0:
            raise PolicyError(
                f"decide() answered {answer!r}; it must return a whole number of draft steps, "
                f"0 to batch.max_steps (here {self.max_steps})"
            )
        return self.ladder[bisect_right(self.ladder, steps) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a decode step brought. Arrives one or two steps late under the overlap scheduler."""

    step: int
    """The ``BatchView.step`` of the decision that led to it."""
    num_steps: int
    """Draft steps that were run; 0 is a plain decode."""
    batch_size: int
    """Requests in the step."""
    accept_lens: tuple[int, ...]
    """Tokens that each request gained, bonus token included (each >= 1)."""
    seconds: float | None = None
    """From the end of the batch before it, or from its own preparation where the device had nothing
    to do, to its own end, as the host sees it: result processing is part of it, prefills and idle
    times are not. None where that is not known."""
    cold: tuple[int, ...] = ()
    """Indices into ``accept_lens`` of the requests that were cold (``BatchView.cold``)."""

    @property
    def accept_length(self) -> float:
        """Mean tokens a request gained, bonus token included; 1.0 for an empty step."""
        return sum(self.accept_lens) / len(self.accept_lens) if self.accept_lens else 1.0

    @property
    def accept_rate(self) -> float | None:
        """Accepted draft tokens / draft tokens, 0 to 1, or None after a plain step."""
        drafts = self.num_steps * len(self.accept_lens)
        return (sum(self.accept_lens) - len(self.accept_lens)) / drafts if drafts else None

    @property
    def usual_accept_lens(self) -> tuple[int, ...]:
        """Those of the requests that were not cold."""
        if not self.cold:
            return self.accept_lens
        cold = set(self.cold)
        return tuple(n for i, n in enumerate(self.accept_lens) if i not in cold)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """What the device takes for a step, timed before the server serves.

    It is less than a step takes in service: a context of next to no tokens, and nothing of what
    runs outside of CUDA graphs.
    """

    num_steps: int
    """Draft steps; 0 is a plain decode."""
    batch_size: int
    """Requests in the step, as many as a CUDA graph has been captured for."""
    seconds: float


class Policy(ABC):
    """Decides before every decode step how many draft steps to run.

    A subclass implements :meth:`decide`, and :meth:`observe` if it learns. It is made in every
    scheduler process and called from its loop only, so it needs no locks; what it does counts in
    the time of a step. A change while serving makes another, and one more that is only asked once.
    An exception, or an answer that is no number of steps, puts the server on SGLang's own
    speculation for good, with an error in the log.

    Arguments of the constructor must be numbers, strings, booleans, None, lists, tuples or dicts
    of these, or other policies: the policy reaches the scheduler processes as text.
    """

    deterministic: bool = True
    """Whether equal views and outcomes give equal answers. Set to False, on the class or on an
    instance, in a policy that reads clocks, random numbers or ``StepOutcome.seconds``. No server
    needs it: rank 0 of a tensor-parallel one decides for all ranks in any case. A combination is
    deterministic if all its parts are, so ask the instance."""

    wants_timings: bool = False
    """Whether steps are to be timed at start for :meth:`observe_timings`, which takes a second or
    more. Set to True, on the class or on an instance."""

    weighs_requests: bool = False
    """Whether :meth:`decide` itself weighs what requests have asked for (``BatchView.asked_never``,
    ``asked_always``). Without it ``BatchView.asked_steps`` is run instead of its answer where there
    is one, and the policy is not asked."""

    _arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Remembered to write the policy as text for the spawned scheduler (policy/text.py).
        self = super().__new__(cls)
        # Past a __setattr__ of the subclass: it may be a frozen dataclass.
        object.__setattr__(self, "_arguments", (args, kwargs))
        return self

    def __init__(self) -> None:
        # object.__init__ takes any arguments once __new__ is overridden; a policy without
        # parameters must refuse them.
        super().__init__()

    @abstractmethod
    def decide(self, batch: BatchView) -> int:
        """Return the draft steps wanted, 0 to ``batch.max_steps``.

        The largest value of ``batch.ladder`` that is not above the answer is run.
        """

    def wants_draft_prefill(self, batch: BatchView) -> bool:
        """Say whether requests that are being prefilled need the draft model's prefill as well.

        Asked before a prefill unless the draft state is ``warm``. Without it the prefill costs what
        it does on a server without speculation, but should these requests speculate after all, few
        of their draft tokens are accepted: under ``catch_up`` those with a prompt longer than can
        be kept, under ``skip`` all. The default always wants it. An exception is treated as one of
        :meth:`decide` is.

        Args:
            batch: the decode batch that the prefill leads to: requests that run, that are being
                prefilled, and that wait, as many as the server runs at once. The context of those
                that wait does not count.
        """
        return True

    def observe(self, outcome: StepOutcome) -> None:  # noqa: B027 - optional on purpose
        """Hear what an earlier step brought."""

    def observe_timings(self, timings: Sequence[StepTiming]) -> None:  # noqa: B027 - optional
        """Hear, before the first decision, what the steps of every mode of the ladder take.

        Called where ``wants_timings``, once, if all of what a step runs has CUDA graphs.
        """

    def explain(self) -> dict[str, Any]:
        """Return what the policy knows, for ``status()`` and ``/server_info``: JSON-native keys and
        values. Asked from time to time, between steps."""
        return {}

    def __and__(self, other: Policy) -> Smaller:
        """``a & b`` asks both and takes the smaller answer."""
        from sglang_dynspec.policy.combine import Smaller

        if not isinstance(other, Policy):
            return NotImplemented
        return Smaller(self, other)

    def __repr__(self) -> str:
        args, kwargs = self._arguments
        shown = [repr(a) for a in args] + [f"{k}={v!r}" for k, v in kwargs.items()]
        return f"{type(self).__name__}({', '.join(shown)})"
