"""Questions asked of a process like SGLang's scheduler: spawned from a fresh interpreter.

The fresh interpreter stands for ``python -m sglang.launch_server``. It has the flags and the
environment of this process, and spawns the one that answers as SGLang spawns its schedulers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dynspec.errors import DynspecError

ROOT = str(Path(__file__).parents[2])
"""The folder that this package is imported from."""

# `exec` is what is spawned, so that the fresh interpreter needs nothing of ours.
_LAUNCHER = """\
import json, sys
job = json.loads(sys.stdin.read())
if job["launcher"]:
    exec(job["launcher"], {"job": job})
if "" in sys.path:
    sys.path.remove("")
sys.path += [path for path in job["path"] if path not in sys.path]
import multiprocessing
child = multiprocessing.get_context("spawn").Process(
    target=exec, args=(job["spawned"], {"job": job})
)
child.start()
child.join()
sys.exit(child.exitcode)
"""

_ANSWERS = """
import json
with open(job[{out!r}], "w") as file:
    json.dump(answer, file)
"""


class ChildError(DynspecError, RuntimeError):
    """A child process gave no answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the processes said."""

    launcher: Any
    """The answer of the fresh interpreter; None if it was not asked."""
    spawned: Any
    """The answer of the process that it spawned."""
    output: str
    """What both have printed."""


def ask(
    source: str,
    job: Mapping[str, Any],
    *,
    environ: Mapping[str, str],
    timeout: float,
    launcher_too: bool = False,
) -> Answer:
    """Run code in a spawned process.

    Args:
        source: sets ``answer``, JSON-native; the job is there as ``job``.
        job: JSON-native.
        environ: the environment.
        timeout: seconds.
        launcher_too: run the code in the fresh interpreter before that, too.

    Raises:
        ChildError: there is no answer.
    """
    with tempfile.TemporaryDirectory(prefix="dynspec-doctor-") as folder:
        outs = {name: os.path.join(folder, name) for name in ("launcher_out", "spawned_out")}
        whole = {
            **job,
            **outs,
            "path": _path(),
            "launcher": source + _ANSWERS.format(out="launcher_out") if launcher_too else "",
            "spawned": source + _ANSWERS.format(out="spawned_out"),
        }
        output, code = _run(json.dumps(whole), environ, timeout, Path(folder, "output"))
        spawned = _read(outs["spawned_out"])
        if spawned is None:
            raise ChildError(
                f"a process spawned from {sys.executable} gave no answer (exit code {code}): "
                f"{last_line(output) or 'it printed nothing'}"
            )
        return Answer(_read(outs["launcher_out"]), spawned, output)


def last_line(output: str) -> str:
    """Return the last line of some output that has anything in it."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


def interpreter_flags() -> list[str]:
    """Return the flags of this interpreter that decide what others find at their start."""
    flags = sys.flags
    # Not in Python 3.10.
    safe_path = getattr(flags, "safe_path", False)
    given = {
        "-S": flags.no_site,
        "-I": flags.isolated,
        "-E": flags.ignore_environment and not flags.isolated,
        "-s": flags.no_user_site and not flags.isolated,
        "-P": safe_path and not flags.isolated,
    }
    return [flag for flag, is_set in given.items() if is_set]


def _path() -> list[str]:
    """The search path of this process, without the folder that the way of starting it put there:
    a server that is started in another way or elsewhere does not have that."""
    safe = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    found = [path for path in (sys.path if safe else sys.path[1:]) if path]
    return found if ROOT in found else [*found, ROOT]


def _run(text: str, environ: Mapping[str, str], timeout: float, log: Path) -> tuple[str, int]:
    command = [sys.executable, *interpreter_flags(), "-c", _LAUNCHER]
    with log.open("wb") as file:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,  # to be ended as a whole
        )
        try:
            child.communicate(text.encode(), timeout=timeout)
        except subprocess.TimeoutExpired:
            raise ChildError(
                f"a process spawned from {sys.executable} gave no answer in {timeout:g} s; allow "
                "it more with --timeout"
            ) from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    return log.read_text(errors="replace"), child.returncode


def _read(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return None
