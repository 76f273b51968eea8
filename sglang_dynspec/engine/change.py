"""A change of what dynspec does while a server serves: what can be asked for, and in which form.

There are two forms: JSON for people and programs (``POST /dynspec``), and numbers under keys for
SGLang's ``/set_internal_state``, the one way to its schedulers that every release has; from 0.5.16
on that takes nothing but numbers, so a policy's text stands in the key. No name of SGLang stands
here, and nothing but the standard library is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from sglang_dynspec.errors import ChangeError, DynspecError
from sglang_dynspec.policy._syntax import parse

PREFIX = "dynspec"
_POLICY, _SET = "dynspec_policy=", "dynspec_set_"
_KEYS = (
    "dynspec_policy=TEXT",
    "dynspec_set_NAME",
    "dynspec_num_steps",
    "dynspec_seconds",
    "dynspec_static",
    "dynspec_dry_run",
    "dynspec_id",
)
_FIELDS = ("policy", "set", "num_steps", "seconds", "static", "dry_run")
_KINDS = "policy, set, num_steps or static"
_SHOWN = 200
MAX_ID = 1 << 53
"""Below this every number is the same as a float of JSON."""


@dataclass(frozen=True, slots=True)
class Change:
    """One of: another policy, other parameters of it, forced draft steps, SGLang left alone."""

    policy: str | None = None
    """Text of the policy that is to decide from now on."""
    tune: Mapping[str, float] = field(default_factory=dict)
    """Numbers for parameters of the policy in force."""
    num_steps: int | None = None
    """Draft steps that are to be run whatever the policy says."""
    seconds: float | None = None
    """For how long; None: until ``resume``."""
    static: bool | None = None
    """True: every step is left to SGLang. False: the policy decides again."""
    dry_run: bool = False
    """Say what would come of it, and change nothing."""
    id: int | None = None
    """By which the one who asks finds the answer."""

    def __str__(self) -> str:
        if self.policy is not None:
            return f"policy={short(self.policy)}"
        if self.tune:
            return "set " + " ".join(f"{name}={value!r}" for name, value in self.tune.items())
        if self.num_steps is not None:
            lasting = "" if self.seconds is None else f" for {self.seconds:g} s"
            return f"num_steps={self.num_steps}{lasting}"
        return "static" if self.static else "resume"

    def as_keys(self) -> dict[str, float]:
        """Return it as ``server_args`` of ``/set_internal_state``."""
        keys: dict[str, float] = {}
        if self.policy is not None:
            keys[_POLICY + self.policy] = 1
        keys |= {_SET + name: value for name, value in self.tune.items()}
        optional = {"num_steps": self.num_steps, "seconds": self.seconds, "id": self.id}
        keys |= {f"dynspec_{name}": value for name, value in optional.items() if value is not None}
        if self.static is not None:
            keys["dynspec_static"] = int(self.static)
        if self.dry_run:
            keys["dynspec_dry_run"] = 1
        return keys

    def as_json(self) -> dict[str, Any]:
        """Return it as the body of ``POST /dynspec``."""
        body = {
            "policy": self.policy,
            "set": dict(self.tune) or None,
            "num_steps": self.num_steps,
            "seconds": self.seconds,
            "static": self.static,
            "dry_run": self.dry_run or None,
        }
        return {name: value for name, value in body.items() if value is not None}


def is_change(server_args: Mapping[str, Any]) -> bool:
    """Whether a request to ``/set_internal_state`` has any key of ours."""
    return any(str(key).startswith(PREFIX) for key in server_args)


def from_keys(server_args: Mapping[str, Any]) -> Change:
    """Read a request to ``/set_internal_state``.

    Raises:
        ChangeError: it asks for nothing that can be done; names the value and what is accepted.
    """
    found: dict[str, Any] = {"tune": {}}
    theirs = [str(key) for key in server_args if not str(key).startswith(PREFIX)]
    if theirs:
        named = short(ascii(", ".join(theirs))[1:-1])
        raise ChangeError(
            f"{named} is SGLang's own, and the other keys are dynspec's; send them in two requests"
        )
    for key, value in server_args.items():
        if key.startswith(_POLICY):
            if "policy" in found:
                raise ChangeError("two policies are named; name one, or join them with '&'")
            _flag(short(ascii(key)[1:-1]), value, only=True)
            found["policy"] = key.removeprefix(_POLICY)
        elif key.startswith(_SET):
            found["tune"][key.removeprefix(_SET)] = value
        elif key in _KEYS[2:]:
            found[key.removeprefix("dynspec_")] = value
        else:
            raise _unknown(key, _KEYS, "key")
    return _checked(found)


def from_json(body: object) -> Change:
    """Read the body of ``POST /dynspec``.

    Raises:
        ChangeError: as :func:`from_keys`.
    """
    if not isinstance(body, Mapping):
        raise ChangeError(
            f"the body is {_value(body)}; it must be a JSON object such as "
            '{"policy": "batch_size(off_at=48)"}'
        )
    for key in body:
        if key not in _FIELDS:
            raise _unknown(str(key), _FIELDS, "field")
    found = {name: value for name, value in body.items() if value is not None}
    tune = found.pop("set", {})
    if not isinstance(tune, Mapping) or ("set" in body and not tune):
        raise ChangeError(
            f"set is {_value(tune)}; it must be an object of parameters and their numbers, such as "
            '{"off_at": 48}'
        )
    return _checked({**found, "tune": tune})


def short(text: str, most: int = _SHOWN) -> str:
    """Cut a text that is too long for a line."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


# --- checks -------------------------------------------------------------------------------------


def _checked(found: Mapping[str, Any]) -> Change:
    checks: dict[str, Callable[[str, Any], Any]] = {
        "policy": _policy,
        "num_steps": lambda name, value: _whole(name, value, "draft steps"),
        "seconds": _seconds,
        "static": _flag,
        "dry_run": _flag,
        "id": lambda name, value: _whole(name, value, "the request's id", most=MAX_ID),
    }
    values = {name: checks[name](name, value) for name, value in found.items() if name != "tune"}
    change = Change(
        tune={_name(name): _number(name, v) for name, v in found["tune"].items()}, **values
    )
    asked = [
        name
        for name, given in {
            "policy": change.policy is not None,
            "set": bool(change.tune),
            "num_steps": change.num_steps is not None,
            "static": change.static is not None,
        }.items()
        if given
    ]
    if change.seconds is not None and change.num_steps is None:
        raise ChangeError(
            f"seconds is {change.seconds:g}, which is for how long num_steps is to hold, and no "
            "num_steps is given; add it, or leave seconds out"
        )
    if not asked:
        raise ChangeError(f"no change is asked for; give one of {_KINDS}")
    if len(asked) > 1:
        raise ChangeError(f"{' and '.join(asked)} are given; give one of {_KINDS} at a time")
    return change


def _policy(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ChangeError(
            f"{name} is {_value(value)}; it must be a policy's text, such as batch_size(off_at=48)"
        )
    try:
        value.encode()
        parse(value)
    except UnicodeEncodeError:
        raise ChangeError(
            f"{name} is {short(value)!a}, which is no text in UTF-8; write it in ASCII"
        ) from None
    except DynspecError as error:
        raise ChangeError(str(error)) from error
    return value


def _name(name: object) -> str:
    if isinstance(name, str) and name.isprintable() and name.strip():
        return name
    raise ChangeError(
        f"set names the parameter {_value(name)}; it must be one of the policy's, such as off_at"
    )


def _whole(name: str, value: Any, what: str, most: float = math.inf) -> int:
    number = _number(name, value, f"a whole number >= 0 ({what})")
    if not (float(number).is_integer() and 0 <= number < most):
        raise ChangeError(f"{name} is {_value(value)}; it must be a whole number >= 0 ({what})")
    return int(number)


def _seconds(name: str, value: Any) -> float:
    number = _number(name, value, "a number of seconds above 0")
    if number <= 0:
        raise ChangeError(
            f"{name} is {_value(value)}; it must be a number of seconds above 0; leave it out to "
            "force num_steps until resume"
        )
    return float(number)


def _number(name: str, value: Any, what: str = "a number") -> float:
    if isinstance(value, bool):
        raise ChangeError(f"{name} is {value}; it must be {what}; write 1 for true and 0 for false")
    # A whole number may be too large for a float.
    if isinstance(value, (int, float)) and abs(value) < 1e300:
        return value
    raise ChangeError(f"{name} is {_value(value)}; it must be {what}")


def _flag(name: str, value: Any, only: bool = False) -> bool:
    """A yes or a no; with ``only`` a yes."""
    if isinstance(value, (bool, int, float)) and value in ((1,) if only else (0, 1)):
        return bool(value)
    accepted = "1" if only else "true or false (as a number 1 or 0)"
    raise ChangeError(f"{name} is {_value(value)}; it must be {accepted}")


def _unknown(key: str, known: Iterable[str], what: str) -> ChangeError:
    close = get_close_matches(key, list(known), n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return ChangeError(
        f"{short(key)!a} is no {what} of dynspec's{hint}; accepted are {', '.join(known)}"
    )


def _value(value: object) -> str:
    return short(ascii(value), 80)


# --- answers ------------------------------------------------------------------------------------


def verdict(states: Iterable[Mapping[str, Any] | None], asked: Change) -> dict[str, Any]:
    """What has come of a change, by the statuses of all schedulers.

    Args:
        states: ``internal_states[].dynspec`` after the change.
        asked: the change, with the id that it was sent with.

    Returns:
        ``accepted``, ``reason`` (why not) and ``schedulers``, the outcome on each. JSON-native.
    """
    name = "last_dry_run" if asked.dry_run else "last_change"
    outcomes = [_outcome(state, name, asked.id) for state in states]
    reasons = dict.fromkeys(o["reason"] for o in outcomes if not o["accepted"])
    return {
        "accepted": bool(outcomes) and not reasons,
        "dry_run": asked.dry_run,
        "reason": "; ".join(reasons) or None,
        "schedulers": outcomes,
    }


def _outcome(state: Mapping[str, Any] | None, name: str, asked: int | None) -> dict[str, Any]:
    if state is None:
        return _unanswered(
            "dynspec is not in force in the scheduler's process: it was not started there, or has "
            "been deactivated; install sglang-dynspec into the environment that runs SGLang, set "
            "SGLANG_DYNSPEC_POLICY, and restart the server"
        )
    last = state.get(name)
    if not last or last.get("id") != asked:
        return _unanswered(
            "another change came right after this one, so its outcome is not known; look at the "
            "status, and send it again if need be"
        )
    return dict(last)


def _unanswered(reason: str) -> dict[str, Any]:
    return {"accepted": False, "reason": reason}
