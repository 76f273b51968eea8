"""Route by route, whether dynspec is started in the processes of a server."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from sglang_dynspec._pth import pth_files, skipped_pth_files
from sglang_dynspec.doctor import children, start_probe
from sglang_dynspec.doctor.findings import Finding, Status
from sglang_dynspec.errors import InstallError

PLUGIN, PLUGIN_GROUP, PLUGIN_FILTER = "dynspec", "sglang.srt.plugins", "SGLANG_PLUGINS"
BOOTSTRAP = Path(children.ROOT, "sglang_dynspec", "bootstrap")

_SOURCE = f"{inspect.getsource(start_probe)}\nanswer = look(job)\n"

_FLAGS = {
    "-S": "no .pth file and no sitecustomize is run, here nor in spawned processes",
    "-I": "PYTHONPATH, the user's site-packages and the working directory are left out",
    "-E": "PYTHONPATH and other PYTHON* variables are left out",
    "-s": "the user's site-packages are left out, as by PYTHONNOUSERSITE",
    "-P": "the working directory is not on the path, as by PYTHONSAFEPATH, so that a policy's "
    "module is not found there",
}


@dataclass(frozen=True, slots=True)
class _Start:
    """What the start of a fresh interpreter, and of a process spawned from it, has done."""

    fresh: Mapping[str, Any]
    spawned: Mapping[str, Any]
    output: str

    @property
    def armed(self) -> bool:
        return bool(self.fresh["armed"] and self.spawned["armed"])

    @property
    def sitecustomize(self) -> list[Path]:
        """Those on the path, as a spawned process has it; the first is the one that is run."""
        return [] if sys.flags.no_site else list(map(Path, self.spawned["sitecustomize"]))


def check(environ: Mapping[str, str], timeout: float) -> Iterator[Finding]:
    """Start interpreters and look at each route.

    Args:
        environ: the environment, with a policy named.
        timeout: seconds that the interpreters may take.
    """
    yield _flags()
    plugin = _plugin(environ)
    try:
        answer = children.ask(_SOURCE, {}, environ=environ, timeout=timeout, launcher_too=True)
    except children.ChildError as error:
        yield Finding(
            "routes.interpreter_start",
            "blocking",
            str(error),
            f"see that `{sys.executable} -c pass` and multiprocessing work in this environment",
        )
    else:
        start = _Start(answer.launcher, answer.spawned, answer.output)
        yield _sitecustomize(start)
        yield _interpreter_start(start, otherwise=plugin.status == "ok")
        yield from _copies(start)
    yield plugin
    yield _launch_script()


def _flags() -> Finding:
    flags = children.interpreter_flags()
    details = {"flags": flags}
    if not flags:
        return Finding("routes.flags", "ok", "none that leaves a route out", details=details)
    says = "; ".join(f"{flag}: {_FLAGS[flag]}" for flag in flags)
    fix = "start Python without it, unless it is meant" if "-S" in flags else None
    return Finding("routes.flags", "warning" if "-S" in flags else "note", says, fix, details)


def _sitecustomize(start: _Start) -> Finding:
    check, files = "routes.sitecustomize", start.sitecustomize
    ours = [file for file in files if _is_ours(file)]
    theirs = [file for file in files if not _is_ours(file)]
    details = {"wins": str(files[0]) if files else None, "shadowed": list(map(str, files[1:]))}
    if not files:
        return Finding(check, "ok", "none on the path, and none is needed", details=details)
    if files[0] in ours:
        also = f", and runs {theirs[0]}, which it shadows" if theirs else ""
        return Finding(check, "ok", f"{files[0]} (ours) wins{also}", details=details)
    says = f"{files[0]} wins"
    if len(files) > 1:
        says += f"; {', '.join(map(str, files[1:]))} {'is' if len(files) == 2 else 'are'} not run"
    if not ours:
        return Finding(check, "ok", f"{says}; ours is not on the path", details=details)
    return Finding(
        check,
        "note" if start.armed else "warning",
        f"{says}: ours is shadowed" + (", but the .pth file does its work" if start.armed else ""),
        f"put {ours[0].parent} before {files[0].parent} on PYTHONPATH; ours runs the other one",
        details,
    )


def _interpreter_start(start: _Start, *, otherwise: bool) -> Finding:
    check = "routes.interpreter_start"
    details = {"fresh": start.fresh["armed"], "spawned": start.spawned["armed"], "by": None}
    if start.armed:
        by = next(iter([*pth_files(), *start.sitecustomize]), "something that was not found")
        return Finding(
            check,
            "ok",
            f"armed in a fresh interpreter and in a process spawned from it, by {by}",
            details={**details, "by": str(by)},
        )
    where = "in a fresh interpreter" if not start.fresh["armed"] else "in a spawned process"
    reason, fix = _why_not(start)
    status: Status = "warning" if otherwise else "blocking"
    return Finding(check, status, f"not armed {where}: {reason}", fix, details)


def _why_not(start: _Start) -> tuple[str, str]:
    """Why the start of an interpreter did nothing, and what to do."""
    trouble = next((line for line in start.output.splitlines() if line.startswith("Error ")), None)
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    install = (
        "pip install sglang-dynspec into the environment that runs SGLang, or put "
        f"{BOOTSTRAP} on PYTHONPATH"
    )
    if sys.flags.no_site:
        return "-S leaves out .pth files and sitecustomize", "start Python without -S"
    if trouble:
        said = children.last_line(start.output)
        return f"{trouble.rstrip(':')}: {said}", "repair what it names, or reinstall sglang-dynspec"
    if any(_is_ours(file) for file in start.sitecustomize):
        winner = start.sitecustomize[0]
        return (
            f"the sitecustomize of {winner.parent} is run instead of ours",
            f"put {BOOTSTRAP} before {winner.parent} on PYTHONPATH",
        )
    if sys.flags.ignore_environment and any(_is_ours(Path(p, "sitecustomize.py")) for p in path):
        return (
            "the bootstrap folder is on PYTHONPATH, which -E and -I leave out",
            "start Python without -E and -I, or pip install sglang-dynspec",
        )
    if skipped_pth_files():
        return (
            f"{skipped_pth_files()[0]} is left out, because the user's site-packages are (by -s, "
            "-I, PYTHONNOUSERSITE or a virtual environment)",
            install,
        )
    if pth_files():
        return f"{pth_files()[0]} did nothing", "reinstall sglang-dynspec"
    return (
        "no sglang_dynspec.pth is installed, and no sitecustomize of ours is on the path",
        install,
    )


def _copies(start: _Start) -> Iterator[Finding]:
    """Two copies of the package: what is checked here is not what a server would run."""
    own = Path(children.ROOT, "sglang_dynspec")
    for told in (start.fresh, start.spawned):
        other = told["package"] and Path(told["package"]).parent
        if other and os.path.realpath(other) != os.path.realpath(own):
            yield Finding(
                "routes.copies",
                "warning",
                f"started processes run the sglang_dynspec in {other}, and doctor the one in {own}",
                "have one of them on the path only",
                {"started": str(other), "doctor": str(own)},
            )
            return


def _plugin(environ: Mapping[str, str]) -> Finding:
    check = "routes.plugin"
    folder = _sglang()
    if folder is None or not Path(folder, "srt", "plugins", "__init__.py").is_file():
        says = "this SGLang has no plugin mechanism, which came with 0.5.11"
        if folder is None:
            says = "without SGLang there is no plugin mechanism"
        return Finding(check, "note", says, details={"available": False, "filter": None})
    wanted = environ.get(PLUGIN_FILTER, "")
    details = {"available": True, "filter": wanted or None}
    if not any(point.name == PLUGIN for point in entry_points(group=PLUGIN_GROUP)):
        return Finding(
            check,
            "note",
            f"no installed distribution has the entry point {PLUGIN} in the group {PLUGIN_GROUP}",
            "pip install sglang-dynspec, for this route",
            details,
        )
    if wanted and PLUGIN not in [name.strip() for name in wanted.split(",")]:
        return Finding(
            check,
            "warning",
            f"{PLUGIN_FILTER} is {wanted!r}, which leaves out {PLUGIN}",
            f"export {PLUGIN_FILTER}={wanted.rstrip(', ')},{PLUGIN}, or unset it",
            details,
        )
    return Finding(
        check, "ok", f"SGLang's plugin mechanism finds {PLUGIN} in every process", details=details
    )


def _sglang() -> str | None:
    """The folder of the package, without importing it, which takes long."""
    spec = importlib.util.find_spec("sglang")
    return next(iter((spec and spec.submodule_search_locations) or ()), None)


def _launch_script() -> Finding:
    check, works = "routes.launch_script", "activate(policy=...) before Engine(...) works as well"
    try:
        from sglang_dynspec import activation

        variables = activation.variables_for_children()
    except ImportError as error:
        return Finding(check, "blocking", f"activate() cannot be imported: {error}", "install it")
    except InstallError as error:
        says, _, fix = str(error).partition(". ")
        return Finding(check, "warning", f"activate() in a launch script would refuse: {says}", fix)
    if variables:
        works += "; it puts the bootstrap folder on PYTHONPATH for the processes that are spawned"
    return Finding(check, "ok", works)


def _is_ours(file: Path) -> bool:
    return os.path.realpath(file).endswith(
        os.path.join("sglang_dynspec", "bootstrap", "sitecustomize.py")
    )
