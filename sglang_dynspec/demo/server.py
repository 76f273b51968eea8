"""A server process: start it, wait until it is ready, and make sure that nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from sglang_dynspec.demo.errors import DemoError
from sglang_dynspec.testing.ports import HOST

_POLL = 0.25  # s
_HEALTH_TIMEOUT = 20.0  # s
_TAIL_LINES = 25

# Not through a proxy that the environment may name.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerProcess:
    """A command that serves HTTP on a port, in a process group of its own.

    Args:
        name: for messages.
        command: the program and its arguments.
        port: where it will listen.
        environment: its whole environment.
        log: file for its stdout and stderr.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self.name = name
        self.url = f"http://{HOST}:{port}"
        self.log = log
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        """Start it.

        Raises:
            OSError: the program or the log file cannot be opened.
        """
        self._output = self.log.open("wb")
        try:
            # A session of its own: Ctrl-C reaches this process only, which then ends all of the
            # server's processes, also those that would ignore it.
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            self._output.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_ready(self, timeout: float) -> None:
        """Wait until ``/health`` says 200.

        Args:
            timeout: seconds.

        Raises:
            DemoError: the process ends, or the time is over; with the end of its log.
        """
        deadline = time.monotonic() + timeout
        while not self._healthy():
            self.check_alive()
            if time.monotonic() > deadline:
                raise DemoError(f"{self.name} is not ready after {timeout:g} s. {self.log_tail()}")
            time.sleep(_POLL)

    def check_alive(self) -> None:
        """Do nothing while the process runs.

        Raises:
            DemoError: it has ended; with the end of its log.
        """
        assert self._process is not None
        how = _how_ended(self._process.pid)
        if how is not None:
            raise DemoError(f"{self.name} has ended ({how}). {self.log_tail()}")

    def stop(self, grace: float = 10.0) -> None:
        """End every process of the server. Nothing happens if it has been stopped.

        Args:
            grace: seconds between the polite signal and the other one.
        """
        process, self._process = self._process, None
        if process is None:
            return
        assert self._output is not None
        try:
            # To the first process only, which ends the others in order.
            os.kill(process.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while _how_ended(process.pid) is None and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            # Also when the first process has ended: its children may not have.
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            self._output.close()

    def _healthy(self) -> bool:
        try:
            # /health generates one token and takes a second by itself.
            with _opener.open(f"{self.url}/health", timeout=_HEALTH_TIMEOUT) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def log_tail(self) -> str:
        """Return the last lines of the log, with its name."""
        if self._output is not None and not self._output.closed:
            self._output.flush()
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        shown = "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:])
        return f"The end of {self.log}:\n{shown or '  (it is empty)'}"


def _how_ended(pid: int) -> str | None:
    """How a child has ended, or None. It stays a zombie, so that the number of its process group is
    not given to another."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    if ended.si_code == os.CLD_EXITED:
        return f"exit code {ended.si_status}"
    return signal.Signals(ended.si_status).name


def _signal_group(pid: int, number: signal.Signals) -> None:
    # Not there: all gone. macOS says "not permitted" of a group of zombies.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
