"""A real `python -m sglang.launch_server` on the CPU engine, for the length of a test."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_dynspec.demo.server import ServerProcess
from sglang_dynspec.testing import cpu_engine
from sglang_dynspec.testing.ports import HOST, free_port

READY_WITHIN = 300.0  # seconds


class Server:
    """A server that answers at a URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return json.loads(self.text(path, body))

    def text(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            said: bytes = answer.read()
        return said.decode()

    def generate(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        ids: list[int] = self.get("/generate", _asking(prompt, max_new_tokens))["output_ids"]
        return ids

    def generate_n(self, prompt: list[int], max_new_tokens: int, n: int) -> list[list[int]]:
        answers = self.get("/generate", _asking(prompt, max_new_tokens, n=n))
        return [answer["output_ids"] for answer in answers]

    def stream(self, prompt: list[int], max_new_tokens: int) -> list[list[int]]:
        """The ids of each message."""
        body = {**_asking(prompt, max_new_tokens), "stream": True}
        lines = self.text("/generate", body).splitlines()
        parts = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert parts.pop() == "[DONE]"
        return [json.loads(part)["output_ids"] for part in parts]

    def dynspec(self) -> dict[str, Any]:
        """The status of the scheduler process."""
        status: dict[str, Any] = self.get("/get_server_info")["internal_states"][0]["dynspec"]
        return status


def _asking(prompt: list[int], max_new_tokens: int, **more: Any) -> dict[str, Any]:
    greedy = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": {**greedy, **more}}


@contextmanager
def running_server(
    algorithm: str | None, log: Path, options: Mapping[str, Any] | None = None, **env: str
) -> Iterator[Server]:
    """Start a server, wait until it is healthy, and end all of it afterwards.

    Args:
        options: more of SGLang's server arguments.
        env: more of its environment.
    """
    port = free_port()
    ours = {"port": port, "host": HOST, "log_level": "info", **(options or {})}
    words = cpu_engine.command_line(algorithm, **ours)
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
