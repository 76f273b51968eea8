"""Sessions: ``nox`` runs what CI runs, ``nox -s demo`` the demo."""

from __future__ import annotations

import os
import shutil

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_missing_interpreters = True

RELEASES = ["0.5.9", "0.5.23"]
# Those between run on demand: the release, and the file of what it needs.
BETWEEN = {
    "0.5.10.post1": "0.5.12.post1",
    "0.5.11": "0.5.12.post1",
    "0.5.12.post1": "0.5.12.post1",
    "0.5.13.post1": "0.5.17",
    "0.5.14": "0.5.17",
    "0.5.15.post1": "0.5.17",
    "0.5.16": "0.5.17",
    "0.5.17": "0.5.17",
    "0.5.18": "0.5.17",
    "0.5.19": "0.5.17",
    "0.5.20": "0.5.23",
    "0.5.21": "0.5.23",
    "0.5.22": "0.5.23",
}
# One torch for all: the CPU engine runs each release on it. torchvision must match it exactly.
TORCH = ["torch==2.14.1", "torchvision==0.29.1"]
# The libraries that mypy reads the types of.
TYPED = [
    "wrapt>=2.4.1,<3",
    "pytest",
    "hypothesis",
    "rich",
    "matplotlib",
    "tomli",
    "numpy",
    "aiohttp",
]


def build_wheel(session: nox.Session) -> str:
    """Build the wheel, which is what users install: with the .pth, without the source tree."""
    session.install("build")
    out = session.create_tmp()
    session.run("python", "-m", "build", "--wheel", "--outdir", out, silent=True)
    wheels = sorted(
        session.run(
            "python",
            "-c",
            "import glob, os, sys; print(max(glob.glob(sys.argv[1] + '/*.whl'), "
            "key=os.path.getmtime))",
            out,
            silent=True,
        ).split()
    )
    return wheels[-1]


def install_engine(session: nox.Session, release: str) -> None:
    """Install unmodified SGLang for the CPU engine, and our wheel over it."""
    needs = BETWEEN.get(release, release)
    session.install(*TORCH, "-r", f"tests/requirements/sglang-{needs}.txt")
    session.install("--no-deps", f"sglang=={release}")
    session.install(f"{build_wheel(session)}[demo,testing]", "pytest", "pytest-xdist", "hypothesis")


@nox.session
def lint(session: nox.Session) -> None:
    """Style and types."""
    session.install("ruff==0.17.6", "mypy==2.4.1", *TYPED)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


def run_suite(session: nox.Session, release: str) -> None:
    """Run the test suite on one SGLang release, against the installed wheel."""
    install_engine(session, release)
    # Not from the repository root on sys.path: what is tested is the wheel. A file stays in one
    # process, because its tests share servers.
    parallel = ("-n", "2", "--dist", "loadfile")
    options = ("-p", "no:cacheprovider", "--import-mode=importlib", *parallel)
    session.run("pytest", *options, *session.posargs)


def make_room(session: nox.Session) -> None:
    """On CI, give up the environment of a release that is done: each is 6 GB, mostly torch."""
    if os.environ.get("CI"):
        shutil.rmtree(session.virtualenv.location)


def run_soak(session: nox.Session, *options: str) -> None:
    """Random load with aborts, all kinds of requests and random modes."""
    session.run("python", "-P", "tests/soak.py", *options, env={"PYTHONPATH": "tests"})


@nox.session
@nox.parametrize("release", RELEASES)
def tests(session: nox.Session, release: str) -> None:
    """The test suite on the oldest and the newest supported release, and some soak on this."""
    run_suite(session, release)
    if release == RELEASES[-1] and not session.posargs:
        run_soak(session, "--minutes", "1")
    make_room(session)


@nox.session
@nox.parametrize("release", list(BETWEEN))
def tests_between(session: nox.Session, release: str) -> None:
    """The test suite on a release between; not part of a plain ``nox``."""
    run_suite(session, release)


@nox.session
@nox.parametrize("release", RELEASES)
def soak(session: nox.Session, release: str) -> None:
    """Random load with aborts, all kinds of requests and random modes; ``-- --minutes 30``."""
    install_engine(session, release)
    run_soak(session, *session.posargs)


@nox.session
def contract(session: nox.Session) -> None:
    """The names of SGLang that dynspec touches, in the wheels of all its releases, or of some.

    No SGLang is installed: ``-- 0.5.24`` says what has changed in a release that is new.
    """
    session.install("pip", "-e", ".")
    session.run("python", "-m", "wheels", *session.posargs, env={"PYTHONPATH": "tests"})


@nox.session
@nox.parametrize("release", RELEASES[-1:])
def demo(session: nox.Session, release: str) -> None:
    """A real SGLang server under rising and falling load."""
    install_engine(session, release)
    session.run("python", "-P", "-m", "sglang_dynspec", "demo", *session.posargs)


@nox.session
@nox.parametrize("release", RELEASES[-1:])
def benchmark(session: nox.Session, release: str) -> None:
    """What a decision costs, with its view and bookkeeping, and what several ranks add to it."""
    install_engine(session, release)
    session.run("python", "-P", "examples/benchmark_decision.py", *session.posargs)
    session.run("python", "-P", "examples/benchmark_ranks.py")
