"""The command line itself; what its commands do is tested with them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

import sglang_dynspec
from sglang_dynspec import cli
from sglang_dynspec.errors import ConfigError


def main(*argv: str) -> object:
    """Run a command line, and return the exit code however it comes."""
    try:
        return cli.main(argv)
    except SystemExit as error:
        return error.code


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[argparse.Namespace]]:
    """Makes a command `try` that does what a test says, and keeps the arguments it was run with."""

    def make(
        action: Callable[[], int] = lambda: 0, passes_on: str | None = None
    ) -> list[argparse.Namespace]:
        calls: list[argparse.Namespace] = []
        module = ModuleType("command_of_a_test")

        def add_arguments(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--number", type=int, default=0)

        def run(arguments: argparse.Namespace) -> int:
            calls.append(arguments)
            return action()

        module.add_arguments, module.run = add_arguments, run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        one = cli.Command("try", "try something", module.__name__, passes_on)
        monkeypatch.setattr(cli, "COMMANDS", (one,))
        return calls

    return make


def fails(error: BaseException) -> Callable[[], int]:
    def action() -> int:
        raise error

    return action


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--version") == 0
    assert capsys.readouterr().out == f"sglang-dynspec {sglang_dynspec.__version__}\n"


@pytest.mark.parametrize(("argv", "code"), [([], 2), (["--help"], 0)])
def test_help_lists_every_command(
    argv: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(*argv) == code
    shown = capsys.readouterr().out
    for each in cli.COMMANDS:
        assert f"{each.name} " in shown
        assert each.help in shown


@pytest.mark.parametrize("each", cli.COMMANDS, ids=lambda each: each.name)
def test_every_command_has_help(each: cli.Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(each.name, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m sglang_dynspec {each.name} ")


@pytest.mark.parametrize("argv", [["nonsense"], ["--nonsense"]])
def test_an_unknown_word_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(*argv) == 2
    assert "nonsense" in capsys.readouterr().err


def test_a_command_gets_its_arguments_and_gives_the_exit_code(
    command: Callable[..., list[argparse.Namespace]],
) -> None:
    calls = command(lambda: 1)
    assert main("try", "--number", "5") == 1
    [arguments] = calls
    assert (arguments.number, arguments.rest) == (5, [])


def test_what_stands_after_two_dashes_is_passed_on(
    command: Callable[..., list[argparse.Namespace]],
) -> None:
    calls = command(passes_on="server arguments")
    assert main("try", "--", "--number", "x", "--", "y") == 0
    [arguments] = calls
    assert (arguments.number, arguments.rest) == (0, ["--number", "x", "--", "y"])


def test_two_dashes_are_refused_by_a_command_that_passes_nothing_on(
    command: Callable[..., list[argparse.Namespace]], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = command()
    assert main("try", "--", "x") == 2
    assert not calls
    assert "takes no arguments after --" in capsys.readouterr().err


def test_an_error_of_ours_is_one_line(
    command: Callable[..., list[argparse.Namespace]], capsys: pytest.CaptureFixture[str]
) -> None:
    command(fails(ConfigError("no such file")))
    assert main("try") == 2
    assert capsys.readouterr().err == "python -m sglang_dynspec try: error: no such file\n"


def test_a_mistake_of_ours_is_not_hidden(
    command: Callable[..., list[argparse.Namespace]],
) -> None:
    command(fails(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main("try")


def test_interrupted(
    command: Callable[..., list[argparse.Namespace]], capsys: pytest.CaptureFixture[str]
) -> None:
    command(fails(KeyboardInterrupt()))
    assert main("try") == 130
    assert "interrupted" in capsys.readouterr().err


def test_help_needs_the_standard_library_only() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'sglang', 'wrapt', 'rich', 'matplotlib'): sys.modules[name] = None\n"
        "from sglang_dynspec.cli import main\n"
        "main(['demo', '--help'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--seconds-per-stage" in result.stdout


def test_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "sglang_dynspec", "--version"], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (
        0,
        f"sglang-dynspec {sglang_dynspec.__version__}\n",
    )
