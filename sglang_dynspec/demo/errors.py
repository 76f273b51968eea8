"""What ends the demo early."""

from __future__ import annotations

from sglang_dynspec.errors import DynspecError


class DemoError(DynspecError, RuntimeError):
    """The demo ran, and something did not go as it must. The message says what."""


class UsageError(DynspecError, RuntimeError):
    """The demo cannot run as asked, and has not been started."""
