"""Checks of constructor arguments; errors name the value, what is accepted, and the fix."""

from __future__ import annotations

from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy.base import Policy


def whole_number(owner: Policy, name: str, value: object, at_least: int) -> int:
    """Return ``value`` if it is an int >= ``at_least``; ``owner`` is the policy being made."""
    # bool is an int to Python: off_at=True would mean off_at=1 without this.
    if isinstance(value, int) and not isinstance(value, bool) and value >= at_least:
        return value
    raise PolicyError(f"{shown(owner, name, value)}: {name} must be a whole number >= {at_least}")


def share(owner: Policy, name: str, value: object) -> float:
    """Return ``value`` if it is a number from 0 to 1; ``owner`` is the policy being made."""
    hint = ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if 0 <= value <= 1:
            return float(value)
        if 1 < value <= 100:
            hint = f"; for {value} percent write {value / 100}"
    raise PolicyError(f"{shown(owner, name, value)}: {name} must be a number from 0 to 1{hint}")


def inner_policy(owner: Policy, name: str, value: object) -> Policy:
    """Return ``value`` if it is a policy; ``owner`` is the combination being made."""
    if isinstance(value, Policy):
        return value
    fix = f": {value.__name__}(...)" if isinstance(value, type) else ""
    raise PolicyError(
        f"{type(owner).__name__}: {name} must be a policy, not {value!r}; "
        f"pass an instance of a Policy subclass{fix}"
    )


def shown(owner: Policy, name: str, value: object) -> str:
    """Return the call as a user would have written it, with the one argument in question."""
    return f"{type(owner).__name__}({name}={value!r})"
