"""The CPU engine in this process and in all that it starts, before anything imports SGLang."""

from __future__ import annotations

import os

from sglang_dynspec.testing import cpu_engine

os.environ.update(cpu_engine.environment())
cpu_engine.install()
