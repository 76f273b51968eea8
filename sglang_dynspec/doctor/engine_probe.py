"""What SGLang looks like, in the process that ``engine`` has spawned to import it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import sglang_dynspec
from sglang_dynspec.engine import contract, support
from sglang_dynspec.engine.dialect import installed_release, select
from sglang_dynspec.errors import ConfigError, DynspecError
from sglang_dynspec.settings import Settings

_SCHEDULER = contract.SCHEDULER_INIT.partition(":")[0]


def look(job: dict[str, Any]) -> dict[str, Any]:
    """Import SGLang as a scheduler process does, and say what is found.

    The answer has ``import_error``; and where SGLang could be imported ``status``, ``plugins``,
    ``contract``, ``changes``, ``layers`` and ``arguments``.
    """
    try:
        importlib.import_module(_SCHEDULER)
    except BaseException as error:
        return {"import_error": f"{type(error).__name__}: {error}"}
    answer: dict[str, Any] = {"import_error": None, "plugins": _load_plugins()}
    answer["status"] = sglang_dynspec.status()
    answer |= _contract()
    by_which = (*contract.CHANGES, *contract.ROUTE)
    answer["changes"] = {"names": len(by_which), "problems": contract.probe(by_which)}
    if "dialect" in answer:
        answer["environment"] = support.environment_refusals()
        if job["arguments"]:
            answer["arguments"] = _arguments(job["arguments"], answer["builds_steps"])
    return answer


def _load_plugins() -> list[str]:
    """Run the plugins as SGLang does in every process, for their hooks to show."""
    if find_spec("sglang.srt.plugins") is None:
        return []
    plugins = importlib.import_module("sglang.srt.plugins")
    plugins.load_plugins()
    return list(plugins.load_plugins_by_group(plugins.GENERAL_PLUGINS_GROUP))


def _contract() -> dict[str, Any]:
    from sglang_dynspec.engine.wrapped import foreign_layers

    try:
        dialect = select(installed_release())
    except (DynspecError, ImportError, AttributeError) as error:
        return {"contract": [f"{type(error).__name__}: {error}"], "names": 0, "layers": []}
    names = (*contract.COMMON, *dialect.contract)
    targets = list(dict.fromkeys(name.path for name in names if name.use == "wrap"))
    return {
        "dialect": type(dialect).__name__,
        "builds_steps": dialect.builds_steps,
        "contract": contract.probe(names),
        "names": len(names),
        "targets": targets,
        "layers": [[layer.target, layer.who] for layer in foreign_layers(targets)],
    }


def _arguments(words: Sequence[str], builds_steps: bool) -> dict[str, Any]:
    from sglang_dynspec.engine import server_arguments

    try:
        read = server_arguments.read(words)
    except ConfigError as error:
        return {"unusable": str(error)}
    num_steps = read.values.speculative_num_steps
    answer: dict[str, Any] = {
        "unusable": None,
        "unresolved": read.unresolved,
        "no_model": read.no_model,
        "refusals": support.refusals_ahead(read.values),
        "max_running_requests": read.max_running_requests,
        "num_steps": num_steps,
        "left_out_steps": [],
        "thresholds": [],
    }
    try:
        settings = Settings.resolve()
        if num_steps is not None:
            refusal = support.steps_refusal(settings.steps, num_steps)
            answer["refusals"] += [] if refusal is None else [refusal]
            between = [n for n in settings.steps if 0 < n < num_steps]
            answer["left_out_steps"] = [] if builds_steps else between
            answer["thresholds"] = _thresholds(settings, read.max_running_requests, num_steps)
    except DynspecError:
        pass  # told where the settings and the policy are checked
    return answer


def _thresholds(settings: Settings, most: int, num_steps: int) -> list[tuple[str, str]]:
    from sglang_dynspec.policy.thresholds import unreached

    policy = settings.build_policy()
    return unreached(policy, most_requests=most, num_steps=num_steps)
