"""Which versions are there, and how dynspec is installed."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

import sglang_dynspec
from sglang_dynspec._pth import pth_files, skipped_pth_files
from sglang_dynspec.doctor.findings import Finding
from sglang_dynspec.engine.dialect import SUPPORTED, installed_release, select
from sglang_dynspec.errors import UnsupportedError

_WRAPT = ((2, 4, 1), (3,))
_HERE = Path(sglang_dynspec.__file__).parent


def check() -> Iterator[Finding]:
    """Compare versions with those that are needed, and look at the installation."""
    yield _python()
    yield _sglang()
    yield _torch()
    yield _wrapt()
    yield _own()
    yield _pth()


def _python() -> Finding:
    return Finding(
        "versions.python",
        "ok",
        f"{platform.python_version()}, {sys.executable}",
        details={"version": platform.python_version(), "executable": sys.executable},
    )


def _sglang() -> Finding:
    full = _version("sglang")
    details = {"version": full, "supported": list(SUPPORTED)}
    try:
        release = installed_release()
        if release not in SUPPORTED:
            select(release)  # which says so
    except UnsupportedError as error:
        fix = f"install SGLang {SUPPORTED[-1]}, or run doctor with the Python that runs your SGLang"
        return Finding("versions.sglang", "blocking", _says(error), fix, details)
    return Finding("versions.sglang", "ok", f"{full}, which is supported", details=details)


def _says(error: UnsupportedError) -> str:
    if find_spec("sglang") is None:
        return f"SGLang is not installed for {sys.executable}"
    return str(error)


def _torch() -> Finding:
    full = _version("torch")
    if full is None:
        return Finding(
            "versions.torch",
            "blocking",
            f"PyTorch is not installed for {sys.executable}, and SGLang needs it",
            "install SGLang with what it depends on",
            {"version": None},
        )
    return Finding("versions.torch", "ok", full, details={"version": full})


def _wrapt() -> Finding:
    full = _version("wrapt")
    numbers = tuple(map(int, re.findall(r"\d+", full or "")[:3]))
    if full is not None and _WRAPT[0] <= numbers < _WRAPT[1]:
        return Finding("versions.wrapt", "ok", full, details={"version": full})
    return Finding(
        "versions.wrapt",
        "blocking",
        f"wrapt is {'not installed' if full is None else full}; 2.4.1 or later, below 3, is needed",
        "pip install 'wrapt>=2.4.1,<3'",
        {"version": full},
    )


def _own() -> Finding:
    check, running = "versions.package", sglang_dynspec.__version__
    try:
        found = distribution("sglang-dynspec")
    except PackageNotFoundError:
        return Finding(
            check,
            "note",
            f"{running} in {_HERE}, not installed as a distribution: SGLang's plugin mechanism and "
            "an interpreter without its bootstrap folder on PYTHONPATH do not find it",
            "pip install sglang-dynspec",
            {"version": running, "folder": str(_HERE), "installed": None, "editable": None},
        )
    editable = _editable(found)
    details = {
        "version": running,
        "folder": str(_HERE),
        "installed": found.version,
        "editable": editable,
    }
    if found.version != running:
        return Finding(
            check,
            "warning",
            f"{running} runs from {_HERE}, but the installed distribution is {found.version}",
            "install the version that is to run, or take the other one off PYTHONPATH",
            details,
        )
    there = Path(editable) if editable else Path(str(found.locate_file("")))
    if os.path.realpath(there) != os.path.realpath(_HERE.parent):
        says = f"{running} in {_HERE}, found before the one that is installed, in {there}"
        fix = "take it off PYTHONPATH, unless it is meant"
        return Finding(check, "note", says, fix, details)
    how = "an editable install" if editable else "installed"
    return Finding(check, "ok", f"{running} in {_HERE}, {how}", details=details)


def _pth() -> Finding:
    check = "versions.pth"
    found, skipped = pth_files(), skipped_pth_files()
    details = {"files": list(map(str, found)), "skipped": list(map(str, skipped))}
    if found:
        return Finding(check, "ok", ", ".join(map(str, found)), details=details)
    if skipped:
        says = f"{skipped[0]} is there, but this interpreter does not run it"
        fix = "pip install sglang-dynspec where it does, or start Python without -S, -s and -I"
        return Finding(check, "note", says, fix, details)
    return Finding(
        check,
        "note",
        "sglang_dynspec.pth is in none of the folders in which this interpreter looks for it",
        "pip install sglang-dynspec",
        details,
    )


def _editable(found: Distribution) -> str | None:
    """The folder of an editable install, or None for an ordinary one."""
    try:
        told = json.loads(found.read_text("direct_url.json") or "{}")
    except ValueError:
        return None
    if not told.get("dir_info", {}).get("editable"):
        return None
    return str(told.get("url", "")).removeprefix("file://") or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
