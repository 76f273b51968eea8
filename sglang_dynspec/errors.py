"""What can go wrong, as exceptions that are also the builtin a caller may already catch."""

from __future__ import annotations


class DynspecError(Exception):
    """Base class of every error that sglang_dynspec raises on purpose."""


class PolicyError(DynspecError, ValueError):
    """A policy that cannot be built: unknown name, bad parameter, class out of reach."""


class ConfigError(DynspecError, ValueError):
    """A setting that cannot be used: a bad value, an unreadable or malformed file."""


class ChangeError(DynspecError, ValueError):
    """A change of what a running server does that cannot be made; nothing has been changed."""


class UnsupportedError(DynspecError, RuntimeError):
    """This SGLang, or these server arguments, cannot run with dynspec."""


class ContractError(UnsupportedError):
    """SGLang does not look as the contract table says it does."""


class InstallError(DynspecError, RuntimeError):
    """Dynspec supports this server, but could not be put in force in this process."""


class RanksError(InstallError):
    """Something has failed on some ranks of a server only; going on, they would wait for each other
    for good. Stops the server, whether strict or not."""
