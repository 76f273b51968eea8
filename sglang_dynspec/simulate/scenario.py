"""What policies are compared under: the same costs, load, acceptance, server and chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_dynspec.policy.base import Policy
from sglang_dynspec.simulate.acceptance import Acceptance
from sglang_dynspec.simulate.costs import StepCosts
from sglang_dynspec.simulate.load import Load
from sglang_dynspec.simulate.server import Machine, Result, Simulation


@dataclass(frozen=True, slots=True)
class Scenario:
    """All of a simulation but the policy.

    Args:
        costs: seconds of a step.
        load: what is asked; every simulation begins it afresh.
        acceptance: accept length with the most draft steps, by time.
        machine: the server.
        seed: of noise and acceptance.
    """

    costs: StepCosts
    load: Load
    acceptance: Acceptance
    machine: Machine = field(default_factory=Machine)
    seed: int = 0

    def simulate(
        self,
        policy: Policy,
        report: Callable[[float], None] | None = None,
        *,
        intervals: int = 120,
    ) -> Result:
        """Run a policy, which must be new, and return what happened.

        Args:
            policy: one that has decided nothing yet.
            report: hears the simulated seconds now and then.
            intervals: see :class:`~sglang_dynspec.simulate.server.Simulation`.

        Raises:
            PolicyError: the policy failed.
        """
        simulation = Simulation(
            policy,
            self.costs,
            self.load.fresh(),
            self.acceptance,
            machine=self.machine,
            seed=self.seed,
            intervals=intervals,
        )
        return simulation.run(report)
