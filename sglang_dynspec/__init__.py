"""Dynamic speculative decoding for SGLang.

Before every decode step a policy decides how many draft steps to run, 0 being a plain decode.
Importing this module is cheap: what a name needs is loaded when the name is used.
"""

from __future__ import annotations

__version__ = "0.1.0"

# Not from typing, whose import would be most of the cost at interpreter start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from sglang_dynspec.activation import activate, deactivate, status
    from sglang_dynspec.errors import (
        ConfigError,
        ContractError,
        DynspecError,
        InstallError,
        PolicyError,
        UnsupportedError,
    )
    from sglang_dynspec.policy import (
        AcceptRate,
        Always,
        BatchSize,
        BatchView,
        Goodput,
        Hysteresis,
        MinDwell,
        Never,
        Policy,
        StepOutcome,
        StepTiming,
        TokenBudget,
    )

__all__ = [
    "AcceptRate",
    "Always",
    "BatchSize",
    "BatchView",
    "ConfigError",
    "ContractError",
    "DynspecError",
    "Goodput",
    "Hysteresis",
    "InstallError",
    "MinDwell",
    "Never",
    "Policy",
    "PolicyError",
    "StepOutcome",
    "StepTiming",
    "TokenBudget",
    "UnsupportedError",
    "activate",
    "deactivate",
    "status",
]

_HOMES = {"activate": "activation", "deactivate": "activation", "status": "activation"}


def __getattr__(name: str) -> object:
    # Lazily, because the interpreter-start route imports this package in every Python process
    # that has a policy set, most of which never import SGLang.
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name) or ("errors" if name.endswith("Error") else "policy")
    found: object = getattr(import_module(f"{__name__}.{home}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
