"""The CPU engine in this process and in all that it starts, before anything imports SGLang."""

from __future__ import annotations

import os

from support import on_gpu

from sglang_dynspec.testing import cpu_engine

if on_gpu.wanted():
    on_gpu.install()
os.environ.update(cpu_engine.environment())
cpu_engine.install()
