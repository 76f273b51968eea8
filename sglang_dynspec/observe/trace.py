"""A trace of decisions: a file of JSON lines, written beside a server by a thread of its own.

The first line of a file, and the first after a server was started again, is a header::

    trace                 the format, 1
    run                   tells servers apart that wrote to one file
    time                  when it was written, in seconds since 1970, as everywhere here
    dynspec, sglang       versions
    policy                as text
    ladder                draft steps that can be run
    draft_state           catch_up, warm, skip
    max_running_requests  of the server
    model_path            of the server
    every                 decode steps after which a line is written in any case

Each other line was written for one decision. What it says of the batch is what the policy saw::

    time
    step                  number of the decode step since the server started, from 0
    why                   first, changed (num_steps is another than before), every (so many steps
                          since the last line), resumed (after a pause), end (of the trace; the
                          decision is the one of the line before, or later)
    num_steps, previous   draft steps of this step and of the one before it
    reason                what num_steps comes from: policy, catch_up, forced, asked, failure, or
                          why SGLang decided
    batch_size            requests in the decode batch
    context_tokens        of the whole batch
    waiting               requests in the waiting queue
    kv_usage              share of the KV pool that requests hold, 0 to 1
    cold                  requests whose draft model has missed too much
    pause                 seconds before this step in which no step was begun, if resumed; else 0
    steps                 what has ended since the line before, by draft steps: steps, requests
                          (summed over the steps), tokens that these gained, and seconds of decoding
    predicted             tokens per second by draft steps, as the policy predicts them, or null
    policy                as text, if another policy decides since this line; else null
    dropped               lines that were left out so far, because this file could not keep up

From ``steps`` follow the accept length (tokens / requests) and the tokens per second of decoding
(tokens / seconds). Keys may be added within a format. At ``LIMIT`` bytes a file is renamed to
``FILE.1``, which replaces an older one, and a new one begins with the header. A process that is
killed leaves no line for its last steps, at most ``every``.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

logger = logging.getLogger("sglang_dynspec")

FORMAT = 1
LIMIT = 64 << 20
"""Bytes of one file."""
OLD = ".1"
"""What the name of the file before gets appended."""
CLOSED = "closed"
"""Why nothing is written any more where nothing went wrong."""
_QUEUE = 1024
_LAST_WORDS = 5.0
"""Seconds that closing waits for lines to be written: a file system may hang."""

Totals = Mapping[int, tuple[int, int, int, float]]
"""Steps, requests, tokens and seconds by draft steps, since the server started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line before it is written; see the module for the fields of the same names."""

    time: float
    step: int
    why: str
    num_steps: int
    previous: int
    reason: str
    batch_size: int
    context_tokens: int
    waiting: int
    kv_usage: float
    cold: int
    totals: Totals
    """The line gets what they have grown by since the line before."""
    pause: float = 0.0
    predicted: Mapping[str, Any] | None = None
    policy: str | None = None


class TraceWriter:
    """Writes lines to a file, from a thread of its own.

    Whatever keeps it from writing is said once in the log, and ends the trace: `off` says what it
    was. Nothing raises.

    Args:
        path: the file; appended to if it is there.
        header: its first line, JSON-native; ``trace``, ``run`` and ``time`` are added.
        limit: bytes at which the file is renamed.
        most: lines that may wait to be written; more are dropped, and counted.
        opener: opens the file, as :func:`open` does.
    """

    def __init__(
        self,
        path: str,
        header: Mapping[str, Any],
        *,
        limit: int = LIMIT,
        most: int = _QUEUE,
        opener: Callable[..., IO[str]] = open,
    ) -> None:
        self.path = path
        self.lines = 0
        """Written so far, headers left out."""
        self.dropped = 0
        self.off: str | None = None
        """Why nothing is written any more, or None."""
        self._header = {"trace": FORMAT, "run": f"{time.time():.6f}-{os.getpid()}", **header}
        self._limit = limit
        self._opener = opener
        self._file: IO[str] | None = None
        self._size = 0
        self._totals: Totals = {}
        self._queue: queue.Queue[Line | None] = queue.Queue(most)
        self._thread = threading.Thread(target=self._run, name="dynspec-trace", daemon=True)
        try:
            self._open()
        except Exception as error:
            self.give_up(error)

    def start(self) -> None:
        """Begin to write what has been put."""
        if self.off is None:
            self._thread.start()

    def put(self, line: Line) -> bool:
        """Leave a line to be written. Does not wait.

        Returns:
            Whether there was room for it.
        """
        if self.off is not None:
            return False
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self.dropped += 1
            return False
        return True

    def close(self) -> None:
        """Write what has been put, and end the trace. Waits for some seconds at most."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=_LAST_WORDS)
            except queue.Full:
                return
            self._thread.join(_LAST_WORDS)
        elif self._thread.ident is None:
            self._close_file()
        if self.off is None:
            self.off = CLOSED

    def give_up(self, error: BaseException) -> None:
        """End the trace because of a failure, and say so, once."""
        if self.off is not None:
            return
        self.off = _describe(error)
        logger.disabled = False  # SGLang's dictConfig disables loggers that are older than it
        logger.warning(
            "sglang_dynspec: the trace %r is off: %s. %s The server is not affected.",
            self.path,
            self.off,
            _fix(error),
            exc_info=None if isinstance(error, OSError) else error,
        )

    def as_dict(self) -> dict[str, Any]:
        """Where the trace stands, JSON-native: path, lines, dropped, and off (why, or None)."""
        return {
            "path": self.path,
            "lines": self.lines,
            "dropped": self.dropped,
            "off": self.off,
        }

    # --- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (line := self._queue.get()) is not None and self.off is None:
                self._write(line)
                if self._queue.empty():
                    self._flush()
        except Exception as error:
            self.give_up(error)
        finally:
            self._close_file()

    def _write(self, line: Line) -> None:
        content = _content(line, self._totals, self.dropped)
        self._totals = line.totals
        self._append(content)
        self.lines += 1
        if self._size >= self._limit:
            self._rotate()

    def _append(self, content: Mapping[str, Any]) -> None:
        text = json.dumps(content, separators=(",", ":"), default=str) + "\n"
        assert self._file is not None
        self._file.write(text)
        self._size += len(text)  # ASCII, as json.dumps writes it

    def _flush(self) -> None:
        assert self._file is not None
        self._file.flush()

    def _rotate(self) -> None:
        assert self._file is not None
        self._file.close()
        os.replace(self.path, self.path + OLD)
        self._open()

    def _open(self) -> None:
        # A pipe would wait for its reader, and a device be renamed.
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise OSError(errno.EINVAL, "Not a regular file")
        self._file = self._opener(self.path, "a", encoding="utf-8")
        self._size = self._file.tell()
        if self._size:
            # A server that was killed may have left half a line.
            self._file.write("\n")
            self._size += 1
        self._append({**self._header, "time": time.time()})
        self._flush()

    def _close_file(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:  # what could not be written is tried again by close()
                self.give_up(error)


def _content(line: Line, before: Totals, dropped: int) -> dict[str, Any]:
    return {
        "time": round(line.time, 6),
        "step": line.step,
        "why": line.why,
        "num_steps": line.num_steps,
        "previous": line.previous,
        "reason": line.reason,
        "batch_size": line.batch_size,
        "context_tokens": line.context_tokens,
        "waiting": line.waiting,
        "kv_usage": round(line.kv_usage, 4),
        "cold": line.cold,
        "pause": round(line.pause, 6),
        "steps": _gained(line.totals, before),
        "predicted": _rounded(line.predicted),
        "policy": line.policy,
        "dropped": dropped,
    }


def _gained(totals: Totals, before: Totals) -> dict[str, dict[str, float]]:
    gained = {}
    for n, (steps, requests, tokens, seconds) in sorted(totals.items()):
        old = before.get(n, (0, 0, 0, 0.0))
        if steps < old[0]:  # counted from the beginning again
            old = (0, 0, 0, 0.0)
        if steps > old[0]:
            gained[str(n)] = {
                "steps": steps - old[0],
                "requests": requests - old[1],
                "tokens": tokens - old[2],
                "seconds": round(seconds - old[3], 6),
            }
    return gained


def _rounded(predicted: Mapping[str, Any] | None) -> dict[str, float] | None:
    if not predicted:
        return None
    return {str(n): round(float(value), 1) for n, value in predicted.items()}


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"


def _fix(error: BaseException) -> str:
    if isinstance(error, OSError):
        return (
            "Name a file in a folder that is there, can be written, and has room "
            "(SGLANG_DYNSPEC_TRACE), and start the server again."
        )
    return "This is a bug of sglang_dynspec; please report it."
