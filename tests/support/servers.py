"""A real `python -m sglang.launch_server` on the CPU engine, for the length of a test."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_dynspec.demo.server import HOST, ServerProcess, free_port
from sglang_dynspec.testing import cpu_engine

__all__ = ["Server", "free_port", "running_server"]

READY_WITHIN = 300.0  # seconds


class Server:
    """A server that answers at a URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def generate(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        body = {
            "input_ids": prompt,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": True,
            },
        }
        ids: list[int] = self.get("/generate", body)["output_ids"]
        return ids

    def dynspec(self) -> dict[str, Any]:
        """The status of the scheduler process."""
        status: dict[str, Any] = self.get("/get_server_info")["internal_states"][0]["dynspec"]
        return status


@contextmanager
def running_server(algorithm: str | None, log: Path, **env: str) -> Iterator[Server]:
    """Start a server, wait until it is healthy, and end all of it afterwards."""
    port = free_port()
    words = cpu_engine.command_line(algorithm, port=port, host=HOST, log_level="info")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_DYNSPEC_")}
    with ServerProcess(
        "the server under test",
        [sys.executable, "-m", "sglang.launch_server", *words],
        port=port,
        environment=clean | cpu_engine.environment() | env,
        log=log,
    ) as process:
        process.wait_ready(READY_WITHIN)
        yield Server(process.url)
