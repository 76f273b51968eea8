"""The contract tables of all dialects, also where neither torch nor SGLang is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from sglang_dynspec.engine.contract import (
    CHANGES,
    COMMON,
    INSTANCES,
    LIVE,
    ROUTE,
    Instance,
    Live,
    Name,
)
from sglang_dynspec.engine.dialect import SUPPORTED, select


@dataclass(frozen=True)
class Table:
    """All that dynspec expects of a supported release, by the key that ``select`` takes."""

    key: str
    family: str
    names: tuple[Name, ...]
    live: tuple[Live, ...]
    instances: tuple[Instance, ...]


def table(key: str) -> Table:
    """Return the table of a supported release.

    Raises:
        UnsupportedError: it is not supported.
    """
    _stand_in()
    dialect = select(key)
    return Table(
        key,
        dialect.family,
        (*COMMON, *CHANGES, *ROUTE, *dialect.contract),
        (*LIVE, *dialect.live),
        (*INSTANCES, *dialect.instances),
    )


def candidates(key: str) -> list[Table]:
    """Tables that a release may fit: its own, or of an unsupported one those of its neighbours."""
    if key in SUPPORTED:
        return [table(key)]
    below = [k for k in SUPPORTED if order(k) < order(key)][-1:]
    above = [k for k in SUPPORTED if order(k) > order(key)][:1]
    return [table(k) for k in (*below, *above)]


def key_of(release: str) -> str:
    """What ``select`` is asked for: the release without its post part."""
    return release.partition(".post")[0]


def order(release: str) -> tuple[int, ...]:
    """Sort key of final and post releases; a pre-release counts as its final one."""
    numbers, _, post = release.partition(".post")
    leading = [_leading_digits(part) for part in numbers.split(".")]
    return (*(int(digits or 0) for digits in leading), int(post or 0))


def _leading_digits(text: str) -> str:
    return text[: len(text) - len(text.lstrip("0123456789"))]


_ROOTS = ("torch", "sglang")


def _stand_in() -> None:
    """Let the dialects import what is not installed: to read their tables nothing of it is used."""
    missing = [root for root in _ROOTS if importlib.util.find_spec(root) is None]
    if missing:
        sys.meta_path.append(_Absent(missing))


class _Absent(MetaPathFinder, Loader):
    """Finds any module below some roots, with any name in it."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = roots

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._roots:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
