"""Wheels of SGLang from the package index, each downloaded once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CACHE_VARIABLE = "DYNSPEC_WHEEL_CACHE"
# The same wheel on every machine. It is only read, so it need not run here; the Python sources are
# the same in all of a release.
_TARGET = (
    "--only-binary=:all:",
    "--implementation=cp",
    "--python-version=3.11",
    "--platform=manylinux2014_x86_64",
    *(f"--platform=manylinux_2_{minor}_x86_64" for minor in range(45, 16, -1)),
)


class FetchError(Exception):
    """A release, or the list of them, is not to be had."""


def cache() -> Path:
    """Where wheels are kept: ``DYNSPEC_WHEEL_CACHE``, or a folder in the user's cache."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user) / "sglang-dynspec" / "wheels"


def releases() -> list[str]:
    """List all final and post releases on the index, oldest first.

    Raises:
        FetchError: the index does not say.
    """
    said = _pip("index", "versions", "sglang", *_TARGET)
    found = re.search(r"^Available versions: (.+)$", said, re.MULTILINE)
    if found is None:
        raise FetchError(f"no list of releases in what pip said: {said.strip()}")
    return found[1].split(", ")[::-1]


def wheel(release: str) -> Path:
    """Return the wheel of a release, from the cache if it is there.

    Raises:
        FetchError: there is no such release, or no wheel of it.
    """
    folder = cache()
    if cached := _cached(folder, release):
        return cached
    folder.mkdir(parents=True, exist_ok=True)
    _pip("download", "--no-deps", f"--dest={folder}", f"sglang=={release}", *_TARGET)
    if cached := _cached(folder, release):
        return cached
    raise FetchError(f"pip has downloaded no wheel of sglang {release} to {folder}")


def _cached(folder: Path, release: str) -> Path | None:
    return next(iter(sorted(folder.glob(f"sglang-{release}-*.whl"))), None)


def _pip(*arguments: str) -> str:
    code, said, errors = _run(sys.executable, "-m", "pip", *arguments)
    if code:
        raise FetchError(f"pip {' '.join(arguments[:1])} failed: {_last_error(errors)}")
    return said


def _run(*command: str) -> tuple[int, str, str]:
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def _last_error(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")]
    return (errors or stderr.strip().splitlines() or ["it did not say why"])[-1]
