"""From names to policy classes and back. Imports a policy's module only when it is asked for."""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy import _main_module
from sglang_dynspec.policy.base import Policy

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import EntryPoint

logger = logging.getLogger("sglang_dynspec")

ENTRY_POINT_GROUP = "sglang_dynspec.policies"
"""Other distributions name their policies here; ``name = "package.module:Class"``."""

SHIPPED = {
    "accept_rate": "sglang_dynspec.policy.accept_rate:AcceptRate",
    "always": "sglang_dynspec.policy.fixed:Always",
    "auto": "sglang_dynspec.policy.goodput:Goodput",
    "batch_size": "sglang_dynspec.policy.batch_size:BatchSize",
    "fixed": "sglang_dynspec.policy.fixed:Fixed",
    "hysteresis": "sglang_dynspec.policy.combine:Hysteresis",
    "min_dwell": "sglang_dynspec.policy.combine:MinDwell",
    "never": "sglang_dynspec.policy.fixed:Never",
    "token_budget": "sglang_dynspec.policy.token_budget:TokenBudget",
}
"""Names of our own policies. They come first: no other distribution can take them over."""

_MOVE_IT = (
    "move the class to the top level of a module that can be imported (on PYTHONPATH or "
    "installed), and write it as package.module:Class"
)


def find_class(name: str) -> type[Policy]:
    """Return the policy class of a name as it stands in a policy's text; imports it.

    Raises:
        PolicyError: nothing has that name, or what has it is no policy that can be made.
    """
    if name in SHIPPED:
        return _checked(name, _load(SHIPPED[name]))
    if ":" in name:
        return _checked(name, _load(name))
    entry_point = _entry_point(name)
    path = f"{entry_point.module}:{entry_point.attr}"
    return _checked(name, _load(path, source=f" (entry point of {_owner(entry_point)})"))


def check_name(name: str) -> None:
    """Refuse a bare name that is unknown, without importing what it stands for.

    Raises:
        PolicyError: neither a shipped policy nor an entry point has that name.
    """
    if name not in SHIPPED and ":" not in name:
        _entry_point(name)


def name_of(cls: type[Policy]) -> str:
    """Return the name under which a spawned scheduler process finds a class.

    Raises:
        PolicyError: it will not find it; says why, and what to do.
    """
    path = f"{cls.__module__}:{cls.__qualname__}"
    for name, shipped in SHIPPED.items():
        if path == shipped:
            return name
    if "<locals>" in cls.__qualname__:
        raise _unreachable(cls, "it is defined inside a function")
    if cls.__module__ in _main_module.NAMES:
        return _name_in_main(cls)
    if _lookup(sys.modules.get(cls.__module__), cls.__qualname__) is not cls:
        raise _unreachable(cls, f"module {cls.__module__!r} has no such class under that name")
    if not _can_be_imported(cls.__module__):
        raise _unreachable(cls, f"module {cls.__module__!r} cannot be imported by its name")
    return path


def _name_in_main(cls: type[Policy]) -> str:
    main = next((m for m in _main_module.modules() if _lookup(m, cls.__qualname__) is cls), None)
    if main is None:
        raise _unreachable(cls, "the main module has no such class under that name")
    reason = _main_module.why_unreachable(main, cls.__qualname__)
    if reason is not None:
        raise _unreachable(cls, reason)
    return f"{_main_module.real_name(main) or '__main__'}:{cls.__qualname__}"


def _unreachable(cls: type[Policy], reason: str) -> PolicyError:
    return PolicyError(
        f"policy class {cls.__qualname__} cannot reach the scheduler processes: {reason}. "
        f"Fix: {_MOVE_IT}"
    )


def _can_be_imported(module: str) -> bool:
    """Return whether another process with the same search path would find a module."""
    parent = module.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and path is None:
        return False
    # Not importlib.util.find_spec(): it answers for whatever is in sys.modules already.
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return any(finder.find_spec(module, path) is not None for finder in finders)


def _lookup(module: ModuleType | None, qualname: str) -> Any:
    """Return what a dotted name stands for in a module, or None."""
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _load(path: str, source: str = "") -> Any:
    module_name, _, qualname = path.partition(":")
    candidates = _modules(module_name, source)
    for module in candidates:
        found = _lookup(module, qualname)
        if found is not None:
            return found
    if module_name in _main_module.NAMES:
        raise PolicyError(_not_in_main(qualname, candidates))
    hint = suggestion(qualname, _policies_in(candidates[0]))
    raise PolicyError(f"module {module_name!r}{source} has no {qualname!r}{hint}")


def _modules(name: str, source: str) -> list[ModuleType]:
    if name in _main_module.NAMES:
        return _main_module.modules()
    for main in _main_module.modules():
        # Started with `python -m`: do not run it a second time.
        if _main_module.real_name(main) == name:
            return [main]
    try:
        return [importlib.import_module(name)]
    except (Exception, SystemExit) as error:
        hint = (
            "; put its directory on PYTHONPATH, or install it"
            if isinstance(error, ModuleNotFoundError)
            else ""
        )
        raise PolicyError(
            f"cannot import module {name!r}{source}: {type(error).__name__}: {error}{hint}"
        ) from error


def _not_in_main(qualname: str, mains: list[ModuleType]) -> str:
    files = [str(getattr(main, "__file__", None) or "a program without a file") for main in mains]
    where = " or ".join(dict.fromkeys(files)) or "nothing: no program has been started yet"
    return (
        f"the main program of this process is {where}, and it defines no {qualname!r} when it is "
        f"run again in a spawned process. Fix: {_MOVE_IT}"
    )


def _policies_in(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if _is_policy(value)]


def _is_policy(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Policy)


def _checked(name: str, found: Any) -> type[Policy]:
    if not _is_policy(found):
        what = "a class" if isinstance(found, type) else f"of type {type(found).__name__}"
        raise PolicyError(
            f"{name} is {what}, but no policy; it must be a subclass of "
            "sglang_dynspec.policy.Policy"
        )
    missing = sorted(found.__abstractmethods__)
    if missing:
        raise PolicyError(
            f"{name} cannot be made: it does not implement {', '.join(missing)}; "
            "a policy implements decide(self, batch) -> int"
        )
    return found  # type: ignore[no-any-return]


# --- entry points of other distributions ------------------------------------------------------


def _entry_point(name: str) -> EntryPoint:
    entry_points = _entry_points()
    found = entry_points.get(name, [])
    if not found:
        known = [*SHIPPED, *entry_points]
        raise PolicyError(
            f"unknown policy {name!r}{suggestion(name, known)}; known are "
            f"{', '.join(sorted(known))}; a class of your own is written package.module:Class"
        )
    if len({entry_point.value for entry_point in found}) > 1:
        raise PolicyError(
            f"policy {name!r} is claimed by {' and by '.join(map(_owner, found))}; uninstall one, "
            f"or write {' or '.join(entry_point.value for entry_point in found)}"
        )
    return found[0]


def _entry_points() -> dict[str, list[EntryPoint]]:
    # Reading the metadata of all distributions takes long, so only for a name that is not ours.
    from importlib.metadata import entry_points

    by_name: dict[str, list[EntryPoint]] = {}
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        if entry_point.name not in SHIPPED:
            by_name.setdefault(entry_point.name, []).append(entry_point)
        elif entry_point.value != SHIPPED[entry_point.name]:
            logger.error(
                "sglang_dynspec: policy %r of %s is ignored: the name is one of our own",
                entry_point.name,
                _owner(entry_point),
            )
    return by_name


def _owner(entry_point: EntryPoint) -> str:
    distribution = getattr(entry_point, "dist", None)
    return f"distribution {distribution.name!r}" if distribution else "an unknown distribution"


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known name closest to ``name``, or nothing."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
