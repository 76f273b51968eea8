"""Policies of a program's own main module, in real programs and the processes they spawn."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sglang_dynspec

CLASS = """
from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy import Policy, parse_policy, policy_text

class Mine(Policy):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def decide(self, batch):
        return self.size
"""

# What a launch script does, and what happens in the scheduler process that SGLang spawns.
SPAWN = """
import multiprocessing, sys

def scheduler(text, pipe):
    try:
        policy = parse_policy(text)
        pipe.send((policy.decide(None), policy_text(policy), type(policy).__module__))
    except PolicyError as error:
        pipe.send(("PolicyError", str(error), ""))

def launch(text):
    print("text:", text)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=scheduler, args=(text, theirs))
    process.start()
    theirs.close()
    print("child:", *ours.recv())
    process.join()
    assert process.exitcode == 0
"""

LAUNCH = """
if __name__ == "__main__":
    launch(policy_text(Mine(3)))
    # In this process it is the class it was made from, not a second import of it.
    assert type(parse_policy(policy_text(Mine(3)))) is Mine
"""

TELL = """
try:
    print("text:", policy_text(Mine(3)))
except PolicyError as error:
    print("PolicyError:", error)
"""


def python(*arguments: str, cwd: Path, stdin: str | None = None) -> str:
    """Run a Python program to its end; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        env=_environment(),
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _environment() -> dict[str, str]:
    root = str(Path(sglang_dynspec.__file__).parent.parent)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_DYNSPEC_")}
    return {**kept, "PYTHONPATH": root}


def write(path: Path, *parts: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(textwrap.dedent, parts)))
    return str(path)


def test_a_class_of_a_script_reaches_a_spawned_process(tmp_path: Path) -> None:
    script = write(tmp_path / "serve.py", CLASS, SPAWN, LAUNCH)
    assert python(script, cwd=tmp_path).splitlines() == [
        "text: __main__:Mine(3)",
        "child: 3 __main__:Mine(3) __mp_main__",
    ]


def test_a_class_of_a_module_run_with_m_goes_by_its_real_name(tmp_path: Path) -> None:
    write(tmp_path / "pkg" / "__init__.py", "")
    write(tmp_path / "pkg" / "serve.py", CLASS, SPAWN, LAUNCH)
    assert python("-m", "pkg.serve", cwd=tmp_path).splitlines() == [
        "text: pkg.serve:Mine(3)",
        "child: 3 pkg.serve:Mine(3) __mp_main__",
    ]


def test_a_class_of_an_imported_module_reaches_a_spawned_process(tmp_path: Path) -> None:
    write(tmp_path / "mine.py", CLASS)
    script = write(tmp_path / "serve.py", "from mine import *", SPAWN, LAUNCH)
    assert python(script, cwd=tmp_path).splitlines() == [
        "text: mine:Mine(3)",
        "child: 3 mine:Mine(3) mine",
    ]


GUARDED = 'if __name__ == "__main__":\n' + textwrap.indent(CLASS + TELL, "    ")
GUARDED_TOO = 'if "__main__" == __name__ and True:\n' + textwrap.indent(CLASS + TELL, "    ")
IN_ELSE = 'if __name__ != "__main__":\n    pass\nelse:\n' + textwrap.indent(CLASS + TELL, "    ")
IN_TRY = "try:\n" + textwrap.indent(GUARDED, "    ") + "\nfinally:\n    pass"
LOCAL = "def main():\n" + textwrap.indent(CLASS + TELL, "    ") + "\nmain()"
NESTED = CLASS + "class Outer:\n    Mine = Mine\n" + TELL
CONDITIONAL = "if True:\n" + textwrap.indent(CLASS, "    ") + TELL
BY_EXEC = f"exec({CLASS!r})\n{TELL}"
RENAMED = CLASS + "Other = Mine\ndel Mine\nMine = Other\n" + TELL
REPLACED = CLASS + "Other, Mine = Mine, None\n" + TELL.replace("Mine(3)", "Other(3)")
LAMBDA = CLASS + TELL.replace("Mine(3)", "Mine(lambda batch: 3)")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (GUARDED, ["PolicyError", "Mine", '`if __name__ == "__main__":`', "serve.py"]),
        (GUARDED_TOO, ["PolicyError", '`if __name__ == "__main__":`']),
        (IN_ELSE, ["PolicyError", '`if __name__ == "__main__":`']),
        (IN_TRY, ["PolicyError", '`if __name__ == "__main__":`']),
        (LOCAL, ["PolicyError", "inside a function"]),
        (BY_EXEC, ["PolicyError", "not defined at the top level of", "serve.py"]),
        (REPLACED, ["PolicyError", "no such class under that name"]),
        (LAMBDA, ["PolicyError", "argument 1", "function"]),
        (NESTED, ["text: __main__:Mine(3)"]),
        (CONDITIONAL, ["text: __main__:Mine(3)"]),
        (RENAMED, ["text: __main__:Mine(3)"]),
    ],
)
def test_what_a_script_is_told(program: str, words: list[str], tmp_path: Path) -> None:
    said = python(write(tmp_path / "serve.py", program), cwd=tmp_path)
    for word in words:
        assert word in said
    assert ("move the class to the top level of a module" in said) == (
        "PolicyError" in said and program is not LAMBDA
    )


def test_a_script_can_have_any_name_and_encoding(tmp_path: Path) -> None:
    script = tmp_path / "serve"
    script.write_bytes(("# coding: latin-1\n# é\n" + CLASS + TELL).encode("latin-1"))
    assert python(str(script), cwd=tmp_path) == "text: __main__:Mine(3)\n"


def test_a_command_line_program_has_no_file(tmp_path: Path) -> None:
    for word in ("PolicyError", "python -c", "notebook", "move the class"):
        assert word in python("-c", CLASS + TELL, cwd=tmp_path)


def test_standard_input_has_no_file(tmp_path: Path) -> None:
    for said in (
        python("-", cwd=tmp_path, stdin=CLASS + TELL),
        python(cwd=tmp_path, stdin=CLASS + TELL),
    ):
        assert "standard input" in said


def test_an_interactive_session_after_a_script(tmp_path: Path) -> None:
    script = write(tmp_path / "serve.py", "import sys")
    session = CLASS.replace("\n\n", "\n") + "\nprint(policy_text(Mine(3)))\n"
    done = subprocess.run(
        [sys.executable, "-i", script],
        cwd=tmp_path,
        input=session,
        capture_output=True,
        text=True,
        env=_environment(),
        timeout=180,
    )
    assert "PolicyError: policy class Mine cannot reach the scheduler processes" in done.stderr


def test_a_directory_run_as_a_program(tmp_path: Path) -> None:
    write(tmp_path / "app" / "__main__.py", CLASS, TELL)
    said = python("app", cwd=tmp_path)
    assert "PolicyError" in said
    assert "directory or zip file" in said


def test_the_main_module_of_a_package(tmp_path: Path) -> None:
    write(tmp_path / "app" / "__init__.py", "")
    write(tmp_path / "app" / "__main__.py", CLASS, TELL)
    said = python("-m", "app", cwd=tmp_path)
    assert "PolicyError" in said
    assert "main module of a package" in said


def test_a_spawned_process_says_what_it_does_not_find(tmp_path: Path) -> None:
    hidden = "def hide():\n" + textwrap.indent(CLASS, "    ")
    launch = 'if __name__ == "__main__":\n    launch("__main__:Mine(3)")'
    imports = CLASS.partition("class")[0]
    script = write(tmp_path / "serve.py", imports, hidden, SPAWN, launch)
    said = python(script, cwd=tmp_path)
    for word in ("child: PolicyError", "serve.py", "no 'Mine'", "move the class"):
        assert word in said


def test_a_text_for_another_program_says_which_one_this_is(tmp_path: Path) -> None:
    program = """
        from sglang_dynspec.policy import parse_policy
        from sglang_dynspec.errors import PolicyError
        try:
            parse_policy("__main__:Mine(3)")
        except PolicyError as error:
            print(error)
    """
    script = write(tmp_path / "other.py", program)
    for word in ("main program", "other.py", "no 'Mine'", "package.module:Class"):
        assert word in python(script, cwd=tmp_path)
    assert "a program without a file" in python("-c", textwrap.dedent(program), cwd=tmp_path)
