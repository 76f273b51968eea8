"""The subcommand ``ctl``: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

from sglang_dynspec.cli import FAILED, OK
from sglang_dynspec.ctl.client import Client, CtlError, Keys
from sglang_dynspec.engine.change import Change, from_json
from sglang_dynspec.observe.server_info import IN_FORCE

_API_KEY, _ADMIN_API_KEY = "DYNSPEC_API_KEY", "DYNSPEC_ADMIN_API_KEY"

_DESCRIPTION = """\
Show what a running server does, or change it without a restart:

  ctl URL status                      what is in force, and what has been run
  ctl URL policy "TEXT"               put another policy in charge
  ctl URL set off_at=48 on_at=40      other numbers for parameters of the policy in charge
  ctl URL force 2 --for 60            run 2 draft steps for a minute, whatever the policy says
  ctl URL static                      leave every step to SGLang
  ctl URL resume                      let the policy decide again, after force and static

A change is checked first, and made between two steps or not at all. With --dry-run nothing is
changed, and what would come of it is said.
"""

_EPILOG = f"""\
It asks /dynspec, or, where the server has no such route, /set_internal_state and /server_info.
Keys can also be given in {_API_KEY} and {_ADMIN_API_KEY}.

exit code: 0 if the change was made, or dynspec is in force; 1 if it was refused, or dynspec is not
in force; 2 if the server could not be asked.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to a parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("url", metavar="URL", help="of the server, as http://localhost:30000")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON, for programs")
    common.add_argument("--api-key", metavar="KEY", help="that the server was started with")
    common.add_argument("--admin-api-key", metavar="KEY", help="that the server was started with")
    change = argparse.ArgumentParser(add_help=False, parents=[common])
    change.add_argument("--dry-run", action="store_true", help="change nothing")
    actions.add_parser("status", parents=[common], help="show what is in force")
    policy = actions.add_parser("policy", parents=[change], help="put another policy in charge")
    policy.add_argument("text", metavar="TEXT", help='such as "batch_size(off_at=48)"')
    tune = actions.add_parser("set", parents=[change], help="set parameters of the policy")
    tune.add_argument("pairs", metavar="NAME=NUMBER", nargs="+", type=_pair)
    force = actions.add_parser("force", parents=[change], help="run a number of draft steps")
    force.add_argument("num_steps", metavar="N", type=_number, help="draft steps, 0 is plain")
    force.add_argument(
        "--for", dest="seconds", metavar="S", type=_number, help="seconds (default: until resume)"
    )
    actions.add_parser("static", parents=[change], help="leave every step to SGLang")
    actions.add_parser("resume", parents=[change], help="let the policy decide again")


def run(arguments: argparse.Namespace) -> int:
    """Ask the server, print what it says, and return the exit code."""
    keys = Keys(
        arguments.api_key or os.environ.get(_API_KEY),
        arguments.admin_api_key or os.environ.get(_ADMIN_API_KEY),
    )
    if arguments.action == "status":
        return _status(Client(arguments.url, keys), as_json=arguments.json)
    # Read as the server would, so that a mistake is said without it.
    asked = from_json({**_BODIES[arguments.action](arguments), "dry_run": arguments.dry_run})
    return _change(Client(arguments.url, keys), asked, as_json=arguments.json)


_BODIES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "policy": lambda a: {"policy": a.text},
    "set": lambda a: {"set": dict(a.pairs)},
    "force": lambda a: {"num_steps": a.num_steps, "seconds": a.seconds},
    "static": lambda _: {"static": True},
    "resume": lambda _: {"static": False},
}


def _status(client: Client, *, as_json: bool) -> int:
    states = client.status()
    if as_json:
        print(json.dumps({"schedulers": states}, indent=1))
    elif not states:
        raise CtlError("the server names no scheduler")
    else:
        _print([_status_lines(state) for state in states])
    good = (state and (state["state"] == IN_FORCE or state.get("paused")) for state in states)
    return OK if all(good) else FAILED


def _status_lines(state: dict[str, Any] | None) -> list[str]:
    if state is None:
        return ["dynspec was not started in the scheduler's process"]
    if "policy" not in state:
        return [f"{state['state']}: {state.get('reason') or 'no Scheduler has been built'}"]
    lines = [
        f"{_state(state)}, policy {state['policy']}",
        f"latest step: {state['num_steps']} draft steps (of {_listed(state['ladder'])}), batch "
        f"size {state['batch_size']}",
    ]
    for num_steps, count in state["by_num_steps"].items():
        per_step = count["tokens"] / max(1, count["requests"])
        lines.append(
            f"run with {num_steps}: {count['steps']} steps, {per_step:.2f} tokens a request"
        )
    changes = state.get("changes")
    if changes:
        lines.append(f"changes: {changes['applied']} made, {changes['refused']} refused")
    last = state.get("last_change")
    if last:
        # The lines below the first show where in the text.
        why = "" if last["accepted"] else f", refused: {last['reason'].splitlines()[0]}"
        lines.append(f"latest change: {last['what']}{why}")
    return lines


def _state(state: dict[str, Any]) -> str:
    forced = state.get("forced")
    if state.get("error"):
        return f"static until a restart ({state['error']})"
    if state.get("paused"):
        return "static, as asked"
    if forced:
        left = forced["seconds_left"]
        lasting = "until resume" if left is None else f"for {left:.0f} s more"
        return f"in force, {forced['num_steps']} draft steps forced {lasting}"
    return str(state["state"]).replace("_", " ")


def _change(client: Client, asked: Change, *, as_json: bool) -> int:
    answer = client.make(asked)
    if as_json:
        print(json.dumps(answer, indent=1))
        return OK if answer["accepted"] else FAILED
    outcomes = answer["schedulers"]
    if not outcomes:
        print(f"refused: {answer['reason']}")
    _print([_outcome_lines(outcome, dry_run=asked.dry_run) for outcome in outcomes])
    return OK if answer["accepted"] else FAILED


def _outcome_lines(outcome: dict[str, Any], *, dry_run: bool) -> list[str]:
    would = "would be " if dry_run else ""
    if not outcome["accepted"]:
        return [f"{would}refused: {outcome['reason']}"]
    found = outcome["in_force"]
    lines = [f"{would}in force: {_in_force(found)}"]
    decides = found["decides"]
    if decides["num_steps"] is not None:
        lines.append(
            f"at batch size {decides['batch_size']}: {decides['num_steps']} draft steps "
            f"({decides['by']})"
        )
    return [*lines, *(f"note: {note}" for note in found["notes"])]


def _in_force(found: dict[str, Any]) -> str:
    if found["paused"]:
        return f"SGLang alone (static); policy {found['policy']} after resume"
    if found["forced"] is not None:
        return f"{found['forced']} draft steps (forced); policy {found['policy']} afterwards"
    return f"policy {found['policy']}"


def _print(blocks: list[list[str]]) -> None:
    """Print what each scheduler says; once, where all say the same."""
    if all(lines == blocks[0] for lines in blocks):
        for line in blocks[0] if blocks else ():
            print(line)
        return
    for number, lines in enumerate(blocks):
        for line in lines:
            print(f"scheduler {number}: {line}")


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))


def _pair(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    if not (equals and name.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=NUMBER, such as off_at=48")
    return name.strip(), _number(value)


def _number(text: str) -> float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise argparse.ArgumentTypeError(f"{text!r} is no number")
