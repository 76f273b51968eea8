"""A real `python -m sglang.launch_server` on the CPU engine, for the length of a test."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_dynspec.testing import cpu_engine

READY_WITHIN = 120.0  # seconds


class Server:
    """A server that answers on a port of this machine."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

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
def running_server(algorithm: str | None, log: Path, *options: str, **env: str) -> Iterator[Server]:
    """Start a server, wait until it is healthy, and kill all of it at the end."""
    port = free_port()
    words = cpu_engine.command_line(algorithm, port=port, host="127.0.0.1", log_level="info")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_DYNSPEC_")}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *words, *options],
            env=clean | cpu_engine.environment() | env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            server = Server(port)
            _wait_until_healthy(server, process, log)
            yield server
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_healthy(server: Server, process: subprocess.Popen[Any], log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline:
        try:
            server.get("/health")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            try:
                process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"the server died:\n{log.read_text()}") from None
        else:
            return
    raise AssertionError(f"the server was not healthy in {READY_WITHIN} s:\n{log.read_text()}")
