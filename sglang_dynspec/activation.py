"""activate(), deactivate(), status(): the one funnel of all routes.

Three routes lead here: a launch script that calls :func:`activate`, the interpreter start with
``SGLANG_DYNSPEC_*`` in the environment, and SGLang's plugin entry point. Whichever comes first in
a process wins, and the others find it done.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wrapt

from sglang_dynspec import __version__
from sglang_dynspec._autoload import POLICY_VARIABLES
from sglang_dynspec._guard import guarded
from sglang_dynspec._pth import pth_files
from sglang_dynspec.errors import ConfigError, InstallError
from sglang_dynspec.policy import Policy
from sglang_dynspec.settings import Settings

SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
HTTP_MODULE = "sglang.srt.entrypoints.http_server"
BOOTSTRAP = str(Path(__file__).parent / "bootstrap")


@dataclass
class _Active:
    """What this process was activated with."""

    route: str
    settings: Settings | None
    """None: taken from the environment when a Scheduler is built."""
    environment_before: dict[str, str | None] = field(default_factory=dict)
    """Variables that activate() wrote, as they were."""


_lock = threading.RLock()
_active: _Active | None = None
_hooked = False


def activate(
    policy: Policy | str | None = None,
    *,
    draft_state: str | None = None,
    catch_up_bytes: int | None = None,
    steps: Sequence[int] | None = None,
    trace: str | os.PathLike[str] | None = None,
    trace_every: int | None = None,
    strict: bool | None = None,
    config: str | os.PathLike[str] | None = None,
) -> None:
    """Let a policy decide the draft steps of every server that is started from this process.

    Call it in a launch script before ``sglang.Engine(...)`` or ``launch_server(...)``. What is left
    out comes from the environment, then from the file, then from the defaults. The settings are
    written to ``os.environ``, where the spawned scheduler processes find them.

    Args:
        policy: a policy or its text form, for example ``"batch_size(off_at=32, on_at=24)"``.
        draft_state: ``"catch_up"`` (default) lets the draft take in what plain steps have left out
            when speculation comes back, ``"warm"`` keeps the draft's KV current during them,
            ``"skip"`` does neither.
        catch_up_bytes: memory for what the draft is to catch up with, on each GPU; by default
            512 MiB, or 1% of the GPU's memory where that is less.
        steps: draft steps that can be run beside 0 and the server's ``--speculative-num-steps``,
            for example ``[0, 1, 3]``; from SGLang 0.5.12 on.
        trace: a file in a folder that is there, for a line of JSON whenever num_steps changes, and
            at other steps now and then; ``python -m sglang_dynspec plot`` draws it.
        trace_every: decode steps after which the trace gets a line in any case, 100 by default.
        strict: stop the server where dynspec cannot be in force, instead of running without it.
        config: a TOML file with the same names.

    Raises:
        PolicyError: the policy cannot be built, or cannot reach a spawned process.
        ConfigError: a setting is wrong, no policy is named at all, or this process is already
            active with other settings.
        InstallError: processes spawned from this one would not start dynspec.
    """
    settings = Settings.resolve(
        policy=policy,
        draft_state=draft_state,
        catch_up_bytes=catch_up_bytes,
        steps=steps,
        trace=trace,
        trace_every=trace_every,
        strict=strict,
        config=config,
    )
    if settings.policy is None:
        raise ConfigError(
            "no policy is named; pass activate(policy=...), for example "
            'activate(policy="batch_size(off_at=32, on_at=24)"), or set SGLANG_DYNSPEC_POLICY'
        )
    global _active
    with _lock:
        if _active is not None and _active.settings is not None:
            if _active.settings == settings:
                return
            raise ConfigError(
                f"sglang_dynspec is already active in this process with {_active.settings}; "
                f"call deactivate() before activating {settings}"
            )
        variables = settings.to_environment() | variables_for_children()
        before = {name: os.environ.get(name) for name in variables}
        replaced = _active
        os.environ.update(variables)
        _active = _Active("activate()", settings, before)
        try:
            _arm()
        except BaseException:
            _active = replaced
            _write_environment(before)
            raise


def arm_from_environment(route: str) -> None:
    """Be active with the settings of the environment, unless something came first.

    The settings are read and checked when a Scheduler is built: at interpreter start the launch
    script, which may hold the policy's class, has not run yet, and the log is not set up.
    """
    global _active
    with _lock:
        if _active is None:
            _active = _Active(route, None)
            _arm()


def deactivate() -> None:
    """Leave SGLang to itself again, in this process and in those spawned from it later.

    The variables that name a policy are taken out of the environment, whoever set them. In a
    scheduler process the next step is SGLang's own. Wrappers stay where they are and pass
    everything through, because others may have wrapped them since.
    """
    global _active
    with _lock:
        if _active is None:
            return
        _write_environment(_active.environment_before)
        # Also one that was there before us: it would start dynspec in the next process.
        for name in POLICY_VARIABLES:
            os.environ.pop(name, None)
        _active = None
        if _hooked:
            from sglang_dynspec.engine import install

            install.disarm()


def _write_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def status() -> dict[str, Any]:
    """What is in force in this process, JSON-native.

    ``state`` is ``inactive``, ``armed`` (waiting for a Scheduler; in a launching process it stays
    so, as the schedulers run in processes of their own), ``in_force``, ``static`` (after a
    failure, or while an operator has left the server to SGLang), or ``refused`` with a ``reason``.
    A server shows its scheduler's status in ``/server_info`` under ``internal_states[].dynspec``.
    """
    with _lock:
        if _active is None:
            return {"state": "inactive", "version": __version__}
        if SCHEDULER_MODULE in sys.modules and _hooked:
            from sglang_dynspec.engine import install

            return install.status()
        return {"state": "armed", **_about(_active)}


def _about(active: _Active) -> dict[str, Any]:
    return {"version": __version__, "route": active.route}


def _arm() -> None:
    """Hook SGLang's scheduler and its HTTP server, now or when they are imported."""
    global _hooked
    if not _hooked:
        _hooked = True
        wrapt.register_post_import_hook(_on_scheduler_import, SCHEDULER_MODULE)
        wrapt.register_post_import_hook(_on_http_import, HTTP_MODULE)
    elif SCHEDULER_MODULE in sys.modules:
        _on_scheduler_import(None)


def _on_scheduler_import(_module: Any) -> None:
    if _active is None:
        return
    with guarded("hooking SGLang's scheduler"):
        from sglang_dynspec.engine import install

        install.arm(_settings, _about(_active))
        install.hook_scheduler()


def _on_http_import(http_server: Any) -> None:
    if _active is None:
        return
    from sglang_dynspec.engine import route

    route.add(http_server)


def _settings() -> Settings:
    settings = _active.settings if _active is not None else None
    return settings if settings is not None else Settings.resolve(trace_folder=False)


def variables_for_children() -> dict[str, str]:
    """What spawned processes need in their environment to start dynspec by themselves.

    They start it through ``sglang_dynspec.pth``; where that is not installed, through the
    bootstrap folder on PYTHONPATH.

    Raises:
        InstallError: neither is in effect in an interpreter with the flags of this one.
    """
    if pth_files():
        return {}
    if sys.flags.no_site or sys.flags.ignore_environment:
        raise InstallError(
            "processes spawned from this one cannot start sglang_dynspec: the interpreter runs "
            f"with {'-S' if sys.flags.no_site else '-E or -I'}, and sglang_dynspec.pth is not in "
            "effect. Start Python without that flag, or install sglang-dynspec with pip into the "
            "environment that runs SGLang"
        )
    path = os.environ.get("PYTHONPATH", "")
    if BOOTSTRAP in path.split(os.pathsep):
        return {}
    return {"PYTHONPATH": f"{BOOTSTRAP}{os.pathsep}{path}" if path else BOOTSTRAP}
