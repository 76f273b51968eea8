"""SGLang itself: whether dynspec is armed in a process that has imported it, whether it looks as
expected, who else has wrapped it, and whether a server's arguments go together with dynspec."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sglang_dynspec.doctor import children
from sglang_dynspec.doctor.findings import Finding

ARGUMENTS = "arguments.accepted"
"""The check that says whether SGLang accepts the server's arguments."""

_SOURCE = """
from sglang_dynspec.doctor.engine_probe import look
answer = look(job)
"""


def check(
    arguments: Sequence[str], environ: Mapping[str, str], timeout: float
) -> Iterator[Finding]:
    """Import SGLang in a spawned process, once, and tell what is found there.

    Args:
        arguments: the server's; none if they are not known.
        environ: the environment, with a policy named.
        timeout: seconds that this may take.
    """
    try:
        job = {"arguments": list(arguments)}
        told = children.ask(_SOURCE, job, environ=environ, timeout=timeout).spawned
    except children.ChildError as error:
        says, _, fix = str(error).partition("; ")
        yield Finding("sglang.import", "blocking", says, fix or "see that SGLang can be imported")
        return
    if told["import_error"] is not None:
        yield Finding(
            "sglang.import",
            "blocking",
            f"SGLang's scheduler cannot be imported: {told['import_error']}",
            "repair the installation of SGLang; its server would not start either",
        )
        return
    yield _activation(told)
    yield from _contract(told)
    yield from _changes(told["changes"])
    yield from _layers(told)
    yield from _environment(told)
    yield from _arguments(told)


def _activation(told: Mapping[str, Any]) -> Finding:
    check, status = "sglang.activation", told["status"]
    details = {"state": status["state"], "route": status.get("route"), "plugins": told["plugins"]}
    if status["state"] != "inactive":
        return Finding(
            check,
            "ok",
            "dynspec waits for a Scheduler in a spawned process that has imported SGLang, by "
            f"{status['route']}",
            details=details,
        )
    return Finding(
        check,
        "blocking",
        "no route has started dynspec in a spawned process that has imported SGLang",
        "see the routes above, or call sglang_dynspec.activate(policy=...) in a launch script",
        details,
    )


def _contract(told: Mapping[str, Any]) -> Iterator[Finding]:
    check = "sglang.contract"
    for problem in told["contract"]:
        yield Finding(
            check,
            "blocking",
            f"SGLang does not look as expected: {problem}",
            "use a released SGLang of the supported ones, unchanged, or a newer sglang_dynspec",
        )
    if not told["contract"]:
        yield Finding(
            check,
            "ok",
            f"all {told['names']} names of SGLang that dynspec uses are as expected",
            details={"dialect": told["dialect"], "names": told["names"]},
        )


def _changes(told: Mapping[str, Any]) -> Iterator[Finding]:
    check = "sglang.changes"
    for problem in told["problems"]:
        yield Finding(
            check,
            "warning",
            f"what the server does may not be changed while it serves: {problem}",
            "dynspec runs without that; to have it, use an unchanged SGLang of the supported ones",
        )
    if not told["problems"]:
        says = f"all {told['names']} names by which ctl reaches a server are as expected"
        yield Finding(check, "ok", says, details={"names": told["names"]})


def _layers(told: Mapping[str, Any]) -> Iterator[Finding]:
    check = "sglang.wrappers"
    for target, who in told["layers"]:
        yield Finding(
            check,
            "warning",
            f"{target.partition(':')[2]} is also wrapped or replaced by {who}",
            "see that it passes calls and results on unchanged, or leave it out",
            {"target": target, "by": who},
        )
    if told.get("targets") and not told["layers"]:
        says = f"nobody else has wrapped the {len(told['targets'])} names that dynspec wraps"
        yield Finding(check, "ok", says, details={"targets": told["targets"]})


def _environment(told: Mapping[str, Any]) -> Iterator[Finding]:
    for refusal in told.get("environment", ()):
        says, _, fix = refusal.partition("; ")
        yield Finding("sglang.environment", "blocking", says, fix or None)


def _arguments(told: Mapping[str, Any]) -> Iterator[Finding]:
    found = told.get("arguments")
    if found is None:
        yield Finding(
            "arguments.given",
            "note",
            "no server arguments are given, so that those are not checked",
            "doctor -- followed by what follows `python -m sglang.launch_server`",
        )
        return
    if found["unusable"] is not None:
        says, _, fix = found["unusable"].rpartition("; ")
        yield Finding(ARGUMENTS, "blocking", says, fix)
        return
    yield _accepted(found)
    for refusal in found["refusals"]:
        says, _, fix = refusal.partition("; ")
        argument = re.search(r"\((--\S+) is ", says)
        if not fix and argument:
            fix = f"start the server without {argument[1]}"
        yield Finding("arguments.supported", "blocking", says, fix or None)
    if not found["refusals"]:
        yield Finding("arguments.supported", "ok", "nothing that dynspec does not go together with")
    yield from _conflicts(found)


def _accepted(found: Mapping[str, Any]) -> Finding:
    details = {
        "max_running_requests": found["max_running_requests"],
        "num_steps": found["num_steps"],
        "unresolved": found["unresolved"],
    }
    if found["unresolved"] is None:
        says = f"SGLang accepts them; it runs at most {found['max_running_requests']} requests"
        return Finding(ARGUMENTS, "ok", says, details=details)
    because = "the model cannot be read" if found["no_model"] else "SGLang fails on them"
    return Finding(
        ARGUMENTS,
        "note" if found["no_model"] else "warning",
        f"checked only as they are written, because {because} here: {found['unresolved']}",
        "run doctor where the model and the device are",
        details,
    )


def _conflicts(found: Mapping[str, Any]) -> Iterator[Finding]:
    for says, fix in found["thresholds"]:
        yield Finding("arguments.thresholds", "warning", says, fix)
    if found["left_out_steps"]:
        left_out = ", ".join(map(str, found["left_out_steps"]))
        yield Finding(
            "arguments.steps",
            "warning",
            f"this SGLang runs 0 or {found['num_steps']} draft steps only; {left_out} left out",
            "use SGLang 0.5.12 or later, or leave SGLANG_DYNSPEC_STEPS out",
        )
