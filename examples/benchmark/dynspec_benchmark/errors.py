"""What ends the benchmark, or a part of it, early."""

from __future__ import annotations


class BenchmarkError(Exception):
    """A server did not do what it must. The message says what, and the benchmark goes on."""


class UsageError(Exception):
    """The benchmark cannot run as asked, and has not been started."""
