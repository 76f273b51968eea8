"""A worker process: start it, listen to it within time limits, and leave nothing of it behind."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dynspec_benchmark.errors import BenchmarkError

_SCRIPT = Path(__file__).parent.parent / "worker.py"
_TAIL_LINES = 25
_POLL = 0.1  # s
_GRACE = 60.0  # s that a server may take to end in order

# What activates dynspec. Its CPU engine for tests is no activation and stays.
_DYNSPEC, _CPU_ENGINE = "SGLANG_DYNSPEC_", "SGLANG_DYNSPEC_CPU_ENGINE"
_SIMULATE = "SGLANG_SIMULATE_ACC_LEN"


def environment(*, speculative: bool, simulate_accept_length: float | None) -> dict[str, str]:
    """Return the environment of a worker: this process's, without what would activate dynspec.

    A worker that is to run dynspec activates it by itself.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != _SIMULATE and (not name.startswith(_DYNSPEC) or name == _CPU_ENGINE)
    }
    # A policy can be named by its module, and the one for --ramp stands here.
    paths = [str(_SCRIPT.parent), *filter(None, [kept.get("PYTHONPATH")])]
    kept["PYTHONPATH"] = os.pathsep.join(paths)
    if speculative:
        # 0.5.9 and 0.5.10 have the newer of their two workers only with this.
        kept["SGLANG_ENABLE_SPEC_V2"] = "1"
    if simulate_accept_length is not None:
        kept[_SIMULATE] = str(simulate_accept_length)
    return kept


class Worker:
    """A process that does one job. Use it in a ``with`` statement.

    Args:
        name: for messages.
        job: what worker.py is to do.
        environment: the process's whole environment.
        log: file for stdout and stderr.
    """

    def __init__(
        self, name: str, job: dict[str, Any], *, environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        self._job = job
        self._environment = dict(environment)
        self._unread = b""

    def __enter__(self) -> Worker:
        """Start it.

        Raises:
            OSError: a file cannot be written.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="dynspec-benchmark-")
        job = Path(self._folder.name) / "job.json"
        job.write_text(json.dumps(self._job), encoding="utf-8")
        self._pipe, theirs = os.pipe()
        try:
            self._output: IO[bytes] = self.log.open("wb")
            # A session of its own: Ctrl-C reaches this process only, which then ends all of theirs.
            self._process = subprocess.Popen(
                [sys.executable, str(_SCRIPT), str(job), str(theirs)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                # It has said that it is done; what is left is the end of the interpreter.
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_GRACE)
        finally:
            self._end_all()
            os.close(self._pipe)
            self._output.close()
            self._folder.cleanup()

    def event(self, timeout: float, doing: str) -> dict[str, Any]:
        """Return the next event.

        Args:
            timeout: seconds to wait for it.
            doing: what the worker does meanwhile, for messages.

        Raises:
            BenchmarkError: it does not come in time, the process has ended, or it tells an error.
        """
        line = self._line(time.monotonic() + timeout)
        if line is None:
            raise BenchmarkError(
                f"{self.name}: {doing} took more than {timeout:g} s. {self.log_tail()}"
            )
        if not line:
            raise BenchmarkError(
                f"{self.name} has ended while {doing} ({self._how_ended()}). {self.log_tail()}"
            )
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "error":
            raise BenchmarkError(
                f"{self.name}: {doing} failed: {event['message']}. {self.log_tail()}"
            )
        return event

    def log_text(self, start: int = 0) -> str:
        """The log from a byte on."""
        return self.log.read_bytes()[start:].decode("utf-8", errors="replace")

    def log_tail(self) -> str:
        """The last lines of the log, with its name."""
        lines = self.log_text().splitlines()
        shown = "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:])
        return f"The end of {self.log}:\n{shown or '  (it is empty)'}"

    def _line(self, deadline: float) -> bytes | None:
        """Return a line of the pipe; nothing of it at its end, None if it does not come in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                read = os.read(self._pipe, 1 << 16)
                if not read:
                    return b""
                self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _how_ended(self) -> str:
        try:
            code = self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            return "still ending"
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def _end_all(self) -> None:
        """End the process and all that it has started, and wait until they are gone: the next
        server needs the memory."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + _GRACE
        while _alive(self._process.pid) and time.monotonic() < deadline:
            time.sleep(_POLL)


def _alive(group: int) -> bool:
    """Whether a process of the group still runs.

    Not by a signal, which also finds the dead: a container's first process may never collect them.
    """
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone meanwhile
            # After the name, which may hold anything: state, parent, group.
            state, _, its_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False
