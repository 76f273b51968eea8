"""The subcommand ``doctor``: its arguments, and the order of the checks."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping

from sglang_dynspec._autoload import POLICY_VARIABLES
from sglang_dynspec.doctor import engine, policy, report, routes, versions
from sglang_dynspec.doctor.findings import Finding, worst
from sglang_dynspec.errors import DynspecError
from sglang_dynspec.settings import Settings

_DESCRIPTION = """\
Say whether dynspec will be in force on a server that is started from here, and what is in the way:
versions, settings, the ways in which dynspec is started, the policy, SGLang itself, and the
server's arguments, if they are given after --. Interpreters are started and SGLang is imported in
one of them, but no server and no model.

Run it with the Python, its flags, the environment and the user that will start the server.
"""

_EPILOG = """\
status of a finding:
  ok        as it should be
  note      worth knowing
  warning   may not be what is wanted
  blocking  dynspec will not be in force, or the server will not start

--json prints one object: format (1), version, status (the worst), exit_code, findings: a list of
{check, status, says, fix or null, details}. Programs go by check and status; sentences may change.

exit code: 0 if nothing is blocking; 1 if something is; 2 if doctor's arguments are wrong, or SGLang
does not accept the server's.
"""

_PROBE_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="leave out what SGLang has to be imported for, which takes 10 s or more",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="seconds that the import of SGLang may take (default: %(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what is found and return the exit code."""
    findings = list(_findings(arguments))
    code = _exit_code(findings)
    if arguments.json:
        print(json.dumps(report.as_json(findings, code), indent=1))
    else:
        colour, width = report.wants_colour(sys.stdout), report.width_of(sys.stdout)
        print(report.as_text(findings, colour=colour, width=width))
    return code


def _findings(arguments: argparse.Namespace) -> Iterator[Finding]:
    yield from (found := list(versions.check()))
    settings = _settings()
    yield from policy.check_settings(settings)
    environ = _with_policy(os.environ)
    yield from routes.check(environ, _PROBE_SECONDS)
    if isinstance(settings, Settings) and settings.policy is not None:
        yield policy.check_policy(settings, environ, arguments.timeout)
    if arguments.quick or worst(found) == "blocking":
        why = "--quick" if arguments.quick else "a version above is blocking"
        yield Finding("sglang.import", "note", f"SGLang is not looked at: {why}")
        return
    print("doctor: importing SGLang in a process of its own, 10 s or more ...", file=sys.stderr)
    yield from engine.check(arguments.rest, environ, arguments.timeout)


def _exit_code(findings: list[Finding]) -> int:
    if any(f.check == engine.ARGUMENTS and f.status == "blocking" for f in findings):
        return 2
    return 1 if worst(findings) == "blocking" else 0


def _settings() -> Settings | DynspecError:
    try:
        return Settings.from_environment()
    except DynspecError as error:
        return error


def _with_policy(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for processes that are to show whether dynspec is started in them: it is
    only where a policy is named."""
    if any(environ.get(name) for name in POLICY_VARIABLES):
        return dict(environ)
    return {**environ, POLICY_VARIABLES[0]: "never"}


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value
