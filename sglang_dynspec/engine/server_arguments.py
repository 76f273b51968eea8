"""SGLang's server arguments, read from a command line as SGLang reads them, without a server."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dynspec.errors import ConfigError

SPECULATIVE_MAX_RUNNING_REQUESTS = 48
"""What SGLang sets --max-running-requests to under speculation where it is not given."""

# SGLang leaves the arguments as they were given where the model has this name.
_NO_MODEL = ("--model-path", "dummy")


@dataclass(frozen=True, slots=True)
class ServerArguments:
    """What a server would run with."""

    values: Any
    """SGLang's ServerArgs, or on releases where that keeps only what was given, a view of what
    SGLang has made of it."""
    unresolved: str | None = None
    """Why the values are only those given, without what SGLang makes of them; else None."""
    no_model: bool = False
    """Whether that is because the model's files cannot be read from here."""

    @property
    def max_running_requests(self) -> int:
        """Requests that the server runs at once at most; the KV cache may allow fewer."""
        return int(self.values.max_running_requests or SPECULATIVE_MAX_RUNNING_REQUESTS)


def read(words: Sequence[str]) -> ServerArguments:
    """Read a server's command line.

    What depends on the model (its configuration file is looked at, its weights are not) or on the
    device may be out of reach here; then the arguments are as they were given.

    Raises:
        ConfigError: SGLang does not accept the command line.
    """
    try:
        record = _parsed(words)
        values = _resolved(record)
    except ConfigError:
        raise
    except Exception as error:
        given = _parsed([*words, *_NO_MODEL])
        return ServerArguments(given, _shown(error), isinstance(error, OSError))
    try:
        record.check_server_args()  # as SGLang does before it starts a process
    except Exception as error:
        raise _refused(_shown(error)) from error
    return ServerArguments(values)


def _parsed(words: Sequence[str]) -> Any:
    from sglang.srt.server_args import prepare_server_args

    said = io.StringIO()
    try:
        # argparse prints its whole usage, which is pages here, and leaves the program.
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return prepare_server_args(list(words))
    except SystemExit:
        _, found, reason = said.getvalue().rpartition("error: ")
        asks = "they ask for help instead of a server"
        raise _refused(reason.strip() if found else asks) from None


def in_effect(record: Any) -> Any:
    """What SGLang has made of the arguments of a running server.

    Args:
        record: its ServerArgs. Up to 0.5.18 they are complete when they are made; later they keep
            what was given, and what SGLang makes of that shows in a view.
    """
    if not hasattr(record, "resolve_once"):
        return record
    from sglang.srt.arg_groups.model_override_base import resolving_view

    return resolving_view(record)


def _resolved(record: Any) -> Any:
    if hasattr(record, "resolve_once"):
        record.resolve_once()
    return in_effect(record)


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        f"SGLang does not accept the server arguments: {reason}; correct them, and give what "
        "follows `python -m sglang.launch_server`"
    )


def _shown(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
