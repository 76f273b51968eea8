"""SGLang can be run in this process and in all that it starts, before anything imports it."""

from __future__ import annotations

from support import device

device.prepare()
