"""The settings, and whether the policy can be made where it will be needed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from sglang_dynspec._autoload import CPU_ENGINE_VARIABLE, POLICY_VARIABLES
from sglang_dynspec.doctor import children
from sglang_dynspec.doctor.findings import Finding
from sglang_dynspec.errors import DynspecError
from sglang_dynspec.settings import CONFIG_VARIABLE, Settings, unknown_variables

_POLICY_VARIABLE = POLICY_VARIABLES[0]
_SOURCE = """
from sglang_dynspec.doctor.policy_probe import look
answer = look(job)
"""


def check_settings(settings: Settings | DynspecError) -> Iterator[Finding]:
    """Say which policy is set and by what.

    Args:
        settings: those of the environment, or what is wrong with them.
    """
    if isinstance(settings, DynspecError):
        fix = "correct it; until then a server runs without dynspec, or not at all under strict"
        yield Finding("settings.policy", "blocking", str(settings), fix)
    else:
        yield _policy(settings)
        yield _others(settings)
    for warning in unknown_variables():
        says, _, known = warning.partition("; known are ")
        yield Finding(
            "settings.variables",
            "warning",
            says,
            f"unset it, or write one of {known}",
            {"variable": warning.partition(" ")[0]},
        )
    if os.environ.get(CPU_ENGINE_VARIABLE) == "1":
        yield Finding(
            "settings.variables",
            "note",
            f"{CPU_ENGINE_VARIABLE} is 1: SGLang runs on a CPU with parts of it replaced, for "
            "tests only",
            f"unset {CPU_ENGINE_VARIABLE} for a real server",
            {"variable": CPU_ENGINE_VARIABLE},
        )


def check_policy(settings: Settings, environ: Mapping[str, str], timeout: float) -> Finding:
    """Make the policy in a spawned process, and ask it for a first decision there."""
    check, name = "policy.spawned_process", settings.policy
    job = {"cwd": os.getcwd()}
    try:
        told = children.ask(_SOURCE, job, environ=environ, timeout=timeout).spawned
    except children.ChildError as error:
        says, _, fix = str(error).partition("; ")
        return Finding(check, "blocking", f"{name}: {says}", fix or "see what it printed")
    details = {"policy": name, "working_directory_needed": told["needs_cwd"]}
    if told["error"] is not None:
        return Finding(
            check,
            "blocking",
            f"a scheduler process cannot make {name}: {told['error']}",
            _fix(told["error"]),
            details,
        )
    if told["needs_cwd"]:
        return Finding(
            check,
            "warning",
            f"{name} is found only because of the working directory {job['cwd']}, which `python "
            "-m` puts on the path, but `sglang serve` and a service do not",
            "put that folder on PYTHONPATH, or install the module",
            details,
        )
    says = f"{name} can be made in a spawned process, and decides"
    return Finding(check, "ok", says, details=details)


def _policy(settings: Settings) -> Finding:
    check = "settings.policy"
    from_environment = bool(os.environ.get(_POLICY_VARIABLE, "").strip())
    file = os.environ.get(CONFIG_VARIABLE, "").strip() or None
    source = _POLICY_VARIABLE if from_environment else file
    if settings.policy is None:
        where = f"neither {_POLICY_VARIABLE} nor {file}" if file else "nothing in the environment"
        return Finding(
            check,
            "blocking",
            f"{where} names a policy, and without one dynspec does nothing",
            f"export {_POLICY_VARIABLE}='batch_size(off_at=32, on_at=24)'; where a launch script "
            "calls activate(policy=...), set it to that policy for doctor alone",
            {"policy": None, "source": None, "file": file},
        )
    details = {"policy": settings.policy, "source": source, "file": file}
    also = f" (it wins over {file})" if file and from_environment else ""
    return Finding(check, "ok", f"{settings.policy}, from {source}{also}", details=details)


def _others(settings: Settings) -> Finding:
    steps = ",".join(map(str, settings.steps)) or "0 and the server's"
    return Finding(
        "settings.others",
        "ok",
        f"draft state {settings.draft_state}, draft steps {steps}, "
        f"strict {'on' if settings.strict else 'off'}"
        f"{f', trace {settings.trace}' if settings.trace else ''}",
        details={
            "draft_state": settings.draft_state,
            "steps": list(settings.steps),
            "trace": settings.trace,
            "strict": settings.strict,
        },
    )


def _fix(error: str) -> str:
    if "cannot import module" in error:
        return "put the module's folder on PYTHONPATH, or install it, for the server too"
    if "main program" in error:
        return (
            "in SGLANG_DYNSPEC_POLICY name a module that can be imported, package.module:Class; a "
            "class of a launch script is for activate(policy=...) in that script"
        )
    return "correct the policy; what it is told is what the server's log would say"
