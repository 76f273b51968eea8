"""Who else has wrapped the names of SGLang that dynspec wraps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_dynspec.engine import contract

# Code that SGLang's functions are made of: its own, and decorators that it takes from torch.
_NATIVE = ("sglang", "torch", "sglang_dynspec")
_HOOKS = "sglang.srt.plugins.hook_registry"


@dataclass(frozen=True, slots=True)
class Layer:
    """Something around, or in place of, a function of SGLang that dynspec wraps."""

    target: str
    """``module:qualified.name``."""
    who: str
    """The code that it comes from, or the plugins of SGLang that have asked for it."""


def foreign_layers(targets: list[str]) -> list[Layer]:
    """Return what is neither SGLang's nor ours around these names, the outermost first.

    Args:
        targets: as ``contract.Name.path``; those that do not exist are left out.
    """
    return [Layer(target, who) for target in targets for who in _foreigners(target)]


def _foreigners(target: str) -> list[str]:
    found = []
    for home in _homes(target):
        if home == _HOOKS:
            found.append(_plugins(target))
        elif home.partition(".")[0] not in _NATIVE:
            found.append(home)
    return list(dict.fromkeys(found))


def _homes(target: str) -> Iterator[str]:
    """The modules of the code of every layer, from the outermost to the function itself."""
    path, _, attribute = target.rpartition(".")
    try:
        owner = contract.resolve(path)
        layer = vars(owner)[attribute]
    except (ImportError, AttributeError, KeyError):
        return
    if owner.__module__ != path.partition(":")[0]:
        yield owner.__module__  # the class itself has been replaced
    seen: set[int] = set()
    while layer is not None and id(layer) not in seen:
        seen.add(id(layer))
        yield _home(layer)
        layer = _inner(layer)


def _home(layer: Any) -> str:
    # Not __module__, which functools.wraps copies from what is wrapped.
    wrapper = getattr(layer, "_self_wrapper", None)  # of a wrapt.FunctionWrapper
    function = layer if wrapper is None else wrapper
    function = getattr(function, "__func__", function)
    named = getattr(function, "__globals__", {}).get("__name__")
    return str(named or type(function).__module__)


def _inner(layer: Any) -> Any:
    for name in ("__wrapped__", "__func__", "func"):
        if name in dir(type(layer)) or name in getattr(layer, "__dict__", ()):
            return getattr(layer, name, None)
    return None


def _plugins(target: str) -> str:
    """The plugins that have hooked a name through SGLang's own registry."""
    registry = getattr(sys.modules.get(_HOOKS), "HookRegistry", None)
    hooks = getattr(registry, "_hooks", {}).get(target.replace(":", "."), ())
    names = [getattr(source, "plugin_name", None) or hook.__module__ for _, hook, source in hooks]
    return f"SGLang plugin {', '.join(dict.fromkeys(names))}" if names else "a hook of SGLang's"
