"""Changing what dynspec does while a server serves.

A change arrives among SGLang's control requests, which its scheduler processes between two steps,
on all ranks in the same iteration. It is checked first, as far as that a new policy is made and
asked about the latest batch, and made then, or not at all.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sglang_dynspec.engine import change as changes
from sglang_dynspec.engine.change import Change
from sglang_dynspec.engine.controller import ASKED, FORCED, POLICY, Controller, describe
from sglang_dynspec.errors import ChangeError, DynspecError
from sglang_dynspec.policy._tune import tuned
from sglang_dynspec.policy.base import BatchView, Policy
from sglang_dynspec.policy.text import parse_policy, policy_text
from sglang_dynspec.policy.thresholds import unreached

logger = logging.getLogger("sglang_dynspec")


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a change comes to."""

    policy: str
    """The policy that is in charge then."""
    paused: bool
    forced: int | None
    """Draft steps that are run whatever the policy says."""
    decides: dict[str, Any]
    """The decision on the latest batch: ``batch_size``, ``num_steps``, and what it comes from, in
    ``by``: ``policy``, ``forced``, ``asked`` (by its requests) or ``SGLang``."""
    notes: list[str] = field(default_factory=list)
    """What may not be what is wanted."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has come of a request."""

    number: int
    """Of the requests that were to change something, from 1; of a dry run that of the latest."""
    what: str
    accepted: bool
    reason: str | None
    """Why not."""
    dry_run: bool
    time: float
    """Seconds since 1970."""
    id: int | None
    in_force: Prospect | None
    """What has been in force since, or would be."""


@dataclass
class Changes:
    """The changes that were asked for in this process."""

    applied: int = 0
    refused: int = 0
    last: Outcome | None = None
    last_dry_run: Outcome | None = None

    def as_dict(self) -> dict[str, Any]:
        """For the status, JSON-native."""
        return {
            "changes": {"applied": self.applied, "refused": self.refused},
            "last_change": self.last and asdict(self.last),
            "last_dry_run": self.last_dry_run and asdict(self.last_dry_run),
        }

    def note(self, what: str, asked: Change | None, result: Prospect | str) -> Outcome:
        """Keep an outcome.

        Args:
            what: the change in words.
            asked: the same, unless it could not even be read.
            result: what it has come to, or why it is refused.
        """
        dry_run = asked is not None and asked.dry_run
        accepted = isinstance(result, Prospect)
        if not dry_run:
            self.applied += accepted
            self.refused += not accepted
        outcome = Outcome(
            number=self.applied + self.refused,
            what=what,
            accepted=accepted,
            reason=None if isinstance(result, Prospect) else result,
            dry_run=dry_run,
            time=time.time(),
            id=None if asked is None else asked.id,
            in_force=result if isinstance(result, Prospect) else None,
        )
        if dry_run:
            self.last_dry_run = outcome
        else:
            self.last = outcome
        return outcome


def request(
    made: Changes,
    server_args: Mapping[str, Any],
    controller: Controller | None,
    *,
    not_in_force: str = "",
    most_requests: int | None = None,
) -> Outcome:
    """Do what a request asks for, or say why not. Raises nothing.

    Args:
        made: where it is noted.
        server_args: of the request to ``/set_internal_state``.
        controller: of the scheduler in force, or None.
        not_in_force: why there is none.
        most_requests: that the server runs at once.
    """
    asked: Change | None = None
    what = changes.short(", ".join(ascii(key) for key in server_args))
    result: Prospect | str
    was = "" if controller is None else controller.policy_text()
    try:
        asked = changes.from_keys(server_args)
        what = str(asked)
        if controller is None:
            raise ChangeError(f"dynspec is not in force: {not_in_force}")
        result = _make(asked, controller, most_requests)
    except DynspecError as error:
        result = str(error)
    except (Exception, SystemExit) as error:  # a policy of somebody's may do anything when made
        result = describe(error)
        logger.exception("sglang_dynspec: a change failed, and nothing has been changed")
    outcome = made.note(what, asked, result)
    if controller is None or controller.asks:
        _log(outcome, was)
    return outcome


def reply(outcome: Outcome) -> Any:
    """SGLang's answer to the request, in the form of its release."""
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    more: dict[str, Any] = {}
    if "server_args" in SetInternalStateReqOutput.__annotations__:  # up to 0.5.15
        more["server_args"] = {"dynspec": asdict(outcome)}
    return SetInternalStateReqOutput(updated=outcome.accepted and not outcome.dry_run, **more)


def _make(asked: Change, controller: Controller, most_requests: int | None) -> Prospect:
    """Check a change, and make it unless it is a dry run.

    Raises:
        DynspecError: it cannot be made, and nothing has been changed.
    """
    if controller.failure is not None and not asked.dry_run:
        raise ChangeError(
            f"{controller.failure}; until the server is restarted SGLang decides, and nothing can "
            "be changed: restart the server"
        )
    if controller.final and not asked.dry_run:
        raise ChangeError(
            "dynspec has been released in this process (deactivate()), and SGLang decides: restart "
            "the server"
        )
    if asked.policy is not None or asked.tune:
        make, prospect = _other_policy(asked, controller, most_requests)
    elif asked.num_steps is not None:
        make, prospect = _force(asked, asked.num_steps, controller)
    else:
        make, prospect = _pause_or_resume(asked, controller)
    if not asked.dry_run:
        make()
    return prospect


_Plan = tuple[Callable[[], None], Prospect]


def _other_policy(asked: Change, controller: Controller, most_requests: int | None) -> _Plan:
    text = asked.policy
    if text is None:
        text = tuned(policy_text(controller.policy), asked.tune)
    policy, view = _made(text, controller), _view(controller)
    notes: list[str] = []
    says = _asked_once(text, controller, view) if controller.asks else None
    if most_requests is not None:
        pairs = unreached(policy, most_requests=most_requests, num_steps=view.max_steps)
        notes += [f"{what}; {fix}" for what, fix in pairs]
    forced = controller.forced
    if controller.paused:
        notes.append("every step is left to SGLang (static); resume lets this policy decide")
    elif forced is not None:
        notes.append(f"{forced.num_steps} draft steps are forced; resume lets this policy decide")
    prospect = _prospect(controller, view, policy=policy_text(policy), says=says, notes=notes)
    return lambda: controller.use(policy), prospect


def _force(asked: Change, num_steps: int, controller: Controller) -> _Plan:
    accepted = ", ".join(map(str, controller.ladder))
    if num_steps not in controller.ladder:
        raise ChangeError(
            f"num_steps is {num_steps}, and this server can run {accepted}; give one of them, or "
            "start it with others in SGLANG_DYNSPEC_STEPS"
        )
    if controller.paused:
        raise ChangeError(
            f"num_steps is {num_steps}, and every step is left to SGLang (static); resume first"
        )
    seconds = math.inf if asked.seconds is None else asked.seconds
    prospect = _prospect(controller, _view(controller), forced=num_steps)
    return lambda: controller.force(num_steps, seconds), prospect


def _pause_or_resume(asked: Change, controller: Controller) -> _Plan:
    view = _view(controller)
    if asked.static:
        return controller.pause, _prospect(controller, view, paused=True)
    says, notes = None, []
    if controller.asks:
        try:  # not the policy itself, which would remember that it was asked
            says = _asked_once(policy_text(controller.policy), controller, view)
        except (Exception, SystemExit) as error:  # no reason to keep it from deciding
            notes = [describe(error)]
    prospect = _prospect(controller, view, says=says, paused=False, forced=None, notes=notes)
    return controller.resume, prospect


_AS_NOW: Any = object()


def _prospect(
    controller: Controller,
    view: BatchView,
    *,
    says: tuple[int, str] | None = None,
    policy: str | None = None,
    paused: bool = _AS_NOW,
    forced: int | None = _AS_NOW,
    notes: Sequence[str] = (),
) -> Prospect:
    if paused is _AS_NOW:
        paused = controller.paused
    if forced is _AS_NOW:
        forced = None if controller.forced is None else controller.forced.num_steps
    num_steps, by = says or (None, POLICY)
    if controller.failure is not None:
        notes = [*notes, f"{controller.failure}: SGLang decides until the server is restarted"]
    if paused or controller.failure is not None:
        num_steps, by = view.max_steps, "SGLang"
    elif forced is not None:
        num_steps, by = forced, FORCED
    return Prospect(
        policy=controller.policy_text() if policy is None else policy,
        paused=paused,
        forced=forced,
        decides={"batch_size": view.batch_size, "num_steps": num_steps, "by": by},
        notes=list(notes),
    )


def _made(text: str, controller: Controller) -> Policy:
    policy = parse_policy(text)
    if policy.wants_timings and controller.timings:
        policy.observe_timings(controller.timings)
    return policy


def _asked_once(text: str, controller: Controller, view: BatchView) -> tuple[int, str]:
    """What a batch gets under a policy, made for this question, and from whom. One that cannot
    decide is not put in charge, where it would leave the server to SGLang for good."""
    try:
        policy = _made(text, controller)
        says = view.on_ladder(policy.decide(view))
        asked = None if policy.weighs_requests else view.asked_steps
        return (says, POLICY) if asked is None else (asked, ASKED)
    except (Exception, SystemExit) as error:
        raise ChangeError(
            f"policy {changes.short(text)} fails in decide() for the latest batch, "
            f"{describe(error)}; correct it and send it again"
        ) from error


def _view(controller: Controller) -> BatchView:
    view = controller.view
    if view is None:
        view = BatchView(batch_size=1, ladder=controller.ladder)
    return replace(view, last_num_steps=controller.last_num_steps, step=controller.next_step)


def _log(outcome: Outcome, was: str) -> None:
    if outcome.dry_run:
        return
    if not outcome.accepted:
        # The lines below the first show where in the text.
        reason = (outcome.reason or "").partition("\n")[0]
        logger.warning(
            "sglang_dynspec: change %d refused: %s: %s.", outcome.number, outcome.what, reason
        )
        return
    found = outcome.in_force
    assert found is not None
    before = "" if found.policy == was else f", was {changes.short(was)}"
    logger.info(
        "sglang_dynspec: change %d made: %s; policy %s%s%s.",
        outcome.number,
        outcome.what,
        changes.short(found.policy),
        before,
        "".join(f"; {note}" for note in found.notes),
    )
