"""The command line: ``python -m sglang_dynspec``, or ``sglang-dynspec``.

Exit codes: 0 done; 1 the command ran and found something wrong; 2 it could not run as asked (a bad
argument, something not installed); 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from sglang_dynspec import __version__
from sglang_dynspec.errors import DynspecError

OK, FAILED, UNUSABLE, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand. Its module is imported once it is asked for, as it may need much more than the
    standard library. The module has ``add_arguments(parser)`` and ``run(arguments) -> int``, the
    exit code."""

    name: str
    help: str
    module: str
    passes_on: str | None = None
    """What arguments after ``--`` are for; they arrive as ``arguments.rest``. None: not taken."""


COMMANDS = (
    Command(
        "doctor",
        "say what keeps a server from running with dynspec, if anything",
        "sglang_dynspec.doctor.command",
        passes_on="SGLang server arguments",
    ),
    Command(
        "demo",
        "start a real SGLang server, load it, and watch the policy decide",
        "sglang_dynspec.demo.command",
        passes_on="SGLang server arguments",
    ),
    Command(
        "ctl",
        "show and change what a running server does",
        "sglang_dynspec.ctl.command",
    ),
    Command(
        "advise",
        "say from measured throughput which policy pays, and how much",
        "sglang_dynspec.advise.command",
    ),
    Command(
        "simulate",
        "run policies against a model of a server, without a GPU",
        "sglang_dynspec.simulate.command",
    ),
    Command(
        "plot",
        "draw the decisions that a server has traced",
        "sglang_dynspec.observe.command",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: the arguments after the program's name; those of this process by default.

    Returns:
        The exit code, see the module.

    Raises:
        SystemExit: from argparse, after ``--help``, ``--version`` or a bad argument.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    own, rest = _split(given)
    command = next((c for c in COMMANDS if own and c.name == own[0]), None)
    parser = _parser()
    if command is None:
        parser.parse_args(own)  # help, version, or an error
        parser.print_help()
        return UNUSABLE
    return _run(command, own[1:], rest)


def _run(command: Command, own: list[str], rest: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"{_program()} {command.name}",
        description=f"{command.help[0].upper()}{command.help[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module = import_module(command.module)
    module.add_arguments(parser)
    if command.passes_on:
        parser.usage = f"%(prog)s [options] [-- {command.passes_on}]"
    arguments = parser.parse_args(own)
    if rest is not None and not command.passes_on:
        parser.error(f"{command.name} takes no arguments after --")
    arguments.rest = rest or []
    return _guarded(parser.prog, module.run, arguments)


def _guarded(
    program: str, run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace
) -> int:
    try:
        return run(arguments)
    except DynspecError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`... | head`). Python would complain at its last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_program(),
        description="Dynamic speculative decoding for SGLang: before every decode step a policy "
        "decides how many draft steps to run, 0 being a plain decode.",
        epilog="`%(prog)s COMMAND --help` says more.",
    )
    parser.add_argument("--version", action="version", version=f"sglang-dynspec {__version__}")
    # Only for help and errors: the parser of a command is made from the command's own module.
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        commands.add_parser(command.name, help=command.help)
    return parser


def _split(argv: list[str]) -> tuple[list[str], list[str] | None]:
    # By hand: what argparse does with "--" differs between Python versions.
    if "--" not in argv:
        return argv, None
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _program() -> str:
    name = os.path.basename(sys.argv[0])
    return name if name == "sglang-dynspec" else "python -m sglang_dynspec"
