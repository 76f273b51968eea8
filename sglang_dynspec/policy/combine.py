"""Policies made of policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy._checks import inner_policy, whole_number
from sglang_dynspec.policy.base import BatchView, Policy, StepOutcome, StepTiming


class Smaller(Policy):
    """Ask all policies and take the smallest answer; usually written ``a & b``.

    Every policy is asked in every step and hears every outcome, so that each keeps its own state
    up to date. ``(a & b) & c`` is one combination of three.

    Args:
        policies: two or more.

    Raises:
        PolicyError: fewer than two arguments, or one that is no policy.
    """

    def __init__(self, *policies: Policy) -> None:
        super().__init__()
        if len(policies) < 2:
            raise PolicyError(
                f"Smaller takes two policies or more, not {len(policies)}; "
                "a policy by itself needs no combination"
            )
        parts: list[Policy] = []
        for policy in policies:
            inner_policy(self, "every argument", policy)
            parts.extend(policy.parts if type(policy) is Smaller else (policy,))
        self.parts: tuple[Policy, ...] = tuple(parts)
        self.deterministic = all(part.deterministic for part in parts)
        self.wants_timings = any(part.wants_timings for part in parts)
        if type(self) is Smaller:
            self._arguments = (self.parts, {})

    def decide(self, batch: BatchView) -> int:
        # A list, not a generator that min() could leave early: all have to be asked.
        return min([batch.on_ladder(part.decide(batch)) for part in self.parts])

    def wants_draft_prefill(self, batch: BatchView) -> bool:
        return all(part.wants_draft_prefill(batch) for part in self.parts)

    def observe(self, outcome: StepOutcome) -> None:
        for part in self.parts:
            part.observe(outcome)

    def observe_timings(self, timings: Sequence[StepTiming]) -> None:
        for part in self.parts:
            part.observe_timings(timings)

    def explain(self) -> dict[str, Any]:
        return {"parts": [part.explain() for part in self.parts]}


class Hysteresis(Policy):
    """Follow a policy only once its wish for a change has lasted.

    The first answer is the policy's own. From then on a wish for more draft steps than are held is
    followed at its ``up``-th decision in a row, a wish for fewer at its ``down``-th. What is
    followed is the least change wished for on the way: after wishes for 1, 3 and 3 steps it moves
    to 1. A wish for what is held starts the count anew.

    A policy that probes, as AcceptRate does, goes on asking until its probe is run; here that
    takes ``up`` decisions longer.

    Args:
        policy: the one to follow. It is asked in every step and hears every outcome.
        up: decisions in a row that must ask for more draft steps, >= 1.
        down: decisions in a row that must ask for fewer, >= 1. 1 follows at once.

    Raises:
        PolicyError: ``policy`` is none, or a number is no whole number >= 1.
    """

    def __init__(self, policy: Policy, *, up: int, down: int) -> None:
        super().__init__()
        self.policy = inner_policy(self, "policy", policy)
        self.up = whole_number(self, "up", up, at_least=1)
        self.down = whole_number(self, "down", down, at_least=1)
        self.deterministic = policy.deterministic
        self.wants_timings = policy.wants_timings
        self._held: int | None = None
        # The wishes in a row for more (or for fewer) than is held, and the least change among them.
        self._in_a_row = 0
        self._target = 0

    def decide(self, batch: BatchView) -> int:
        wish = batch.on_ladder(self.policy.decide(batch))
        if self._held is None or wish == self._held:
            self._settle(wish)
        else:
            self._count(wish, self._held)
        assert self._held is not None
        return batch.on_ladder(self._held)

    def wants_draft_prefill(self, batch: BatchView) -> bool:
        return self.policy.wants_draft_prefill(batch)

    def observe(self, outcome: StepOutcome) -> None:
        self.policy.observe(outcome)

    def observe_timings(self, timings: Sequence[StepTiming]) -> None:
        self.policy.observe_timings(timings)

    def explain(self) -> dict[str, Any]:
        return self.policy.explain()

    def _count(self, wish: int, held: int) -> None:
        more = wish > held
        if self._in_a_row and more == (self._target > held):
            self._in_a_row += 1
            self._target = min(self._target, wish) if more else max(self._target, wish)
        else:
            self._in_a_row = 1
            self._target = wish
        if self._in_a_row >= (self.up if more else self.down):
            self._settle(self._target)

    def _settle(self, num_steps: int) -> None:
        self._held = num_steps
        self._in_a_row = 0


class MinDwell(Policy):
    """Follow a policy, but give every answer at least a number of times in a row.

    The first answer is the policy's own, and is held as long as any other. When the time is over,
    the policy's wish of that very moment is followed; what it wished for meanwhile is forgotten.

    Args:
        policy: the one to follow. It is asked in every step and hears every outcome.
        steps: decode steps between two changes, >= 1. 1 follows at once.

    Raises:
        PolicyError: ``policy`` is none, or ``steps`` is no whole number >= 1.
    """

    def __init__(self, policy: Policy, *, steps: int) -> None:
        super().__init__()
        self.policy = inner_policy(self, "policy", policy)
        self.steps = whole_number(self, "steps", steps, at_least=1)
        self.deterministic = policy.deterministic
        self.wants_timings = policy.wants_timings
        self._held: int | None = None
        self._times = 0

    def decide(self, batch: BatchView) -> int:
        wish = batch.on_ladder(self.policy.decide(batch))
        if self._held is None or (wish != self._held and self._times >= self.steps):
            self._held = wish
            self._times = 0
        self._times += 1
        return batch.on_ladder(self._held)

    def wants_draft_prefill(self, batch: BatchView) -> bool:
        return self.policy.wants_draft_prefill(batch)

    def observe(self, outcome: StepOutcome) -> None:
        self.policy.observe(outcome)

    def observe_timings(self, timings: Sequence[StepTiming]) -> None:
        self.policy.observe_timings(timings)

    def explain(self) -> dict[str, Any]:
        return self.policy.explain()
