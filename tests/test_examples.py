"""Every example is run, as its text says, on the CPU engine with the tiny models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import sglang_dynspec
from sglang_dynspec.demo.server import ServerProcess
from sglang_dynspec.engine.dialect import installed_release
from sglang_dynspec.testing import cpu_engine
from sglang_dynspec.testing.ports import HOST, free_port

EXAMPLES = Path(__file__).parent.parent / "examples"
PACKAGE = Path(sglang_dynspec.__file__).parent
READY_WITHIN = 300.0  # s

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="only in a source checkout")


def environment(*paths: Path, **more: str) -> dict[str, str]:
    """What a user's shell would have, and the CPU engine. Dynspec need not be installed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_DYNSPEC_")}
    # The bootstrap folder starts the CPU engine; without a policy it starts nothing else.
    path = os.pathsep.join(map(str, (*paths, PACKAGE / "bootstrap", PACKAGE.parent)))
    return {**clean, **cpu_engine.environment(), "PYTHONPATH": path, **more}


@contextmanager
def serving(
    tmp_path: Path, command: list[str], environ: dict[str, str], **arguments: Any
) -> Iterator[str]:
    """Run a command that serves, and yield its address once it does."""
    port = free_port()
    words = cpu_engine.command_line("EAGLE3", host=HOST, port=port, log_level="info", **arguments)
    log = tmp_path / "server.log"
    with ServerProcess(
        command[-1], [*command, *words], port=port, environment=environ, log=log
    ) as server:
        server.wait_ready(READY_WITHIN)
        yield server.url


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def generate(url: str, first_token: int = 70) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    body = {"input_ids": [first_token, 80, 90], "sampling_params": sampling}
    ids: list[int] = ask(f"{url}/generate", body)["output_ids"]
    return ids


def dynspec(url: str) -> dict[str, Any]:
    status: dict[str, Any] = ask(f"{url}/server_info")["internal_states"][0]["dynspec"]
    return status


def steps(status: dict[str, Any]) -> dict[int, int]:
    """Decode steps by num_steps."""
    return {int(n): count["steps"] for n, count in status["by_num_steps"].items()}


def test_launch_script(tmp_path: Path) -> None:
    script = EXAMPLES / "launch_script" / "launch.py"
    command = [sys.executable, str(script), "--policy", "never"]
    with serving(tmp_path, command, environment()) as url:
        assert len(generate(url)) == 24
        status = dynspec(url)
    assert status["state"] == "in_force"
    assert status["policy"] == "never"
    assert set(steps(status)) == {0}


def test_offline_engine() -> None:
    script = EXAMPLES / "launch_script" / "offline.py"
    words = cpu_engine.command_line("EAGLE3")
    prompts = ["--prompt", "w70 w80 w90", "--prompt", "w71"]
    result = subprocess.run(
        [sys.executable, str(script), "--policy", "always", *prompts, "--tokens", "12", *words],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    [first] = [line for line in lines if line.startswith("'w70 w80 w90' -> ")]
    assert first.count("w") == 3 + 12
    assert any(line.startswith("'w71' -> ") for line in lines)
    [status] = [line for line in lines if line.startswith("dynspec: ")]
    assert "in_force" in status
    assert "'3': " in status
    assert "'0': " not in status


def test_environment_only(tmp_path: Path) -> None:
    script = EXAMPLES / "sitecustomize" / "run.sh"
    environ = environment(
        PYTHON=sys.executable,
        PYTHONPATH="",
        DYNSPEC_BOOTSTRAP=str(PACKAGE / "bootstrap"),
        SGLANG_DYNSPEC_POLICY="batch_size(off_at=1)",
    )
    with serving(tmp_path, ["sh", str(script)], environ) as url:
        assert len(generate(url)) == 24
        status = dynspec(url)
    assert status["state"] == "in_force"
    assert status["policy"] == "batch_size(off_at=1)"
    assert status["route"] == "interpreter start"
    assert set(steps(status)) == {0}


def test_run_sh_names_a_missing_bootstrap(tmp_path: Path) -> None:
    result = subprocess.run(
        ["sh", str(EXAMPLES / "sitecustomize" / "run.sh")],
        env=environment(DYNSPEC_BOOTSTRAP=str(tmp_path)),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert f"no sitecustomize.py in {tmp_path}" in result.stderr


@pytest.mark.skipif(
    installed_release() == "0.5.9", reason="nothing in it depends on the release; time"
)
def test_what_the_policy_guide_says(tmp_path: Path) -> None:
    text = (EXAMPLES / "policy_guide.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    script = tmp_path / "guide.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, str(script)], env=environment(), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_custom_policy_by_its_own_test() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'sglang'): sys.modules[name] = None\n"
        "import pytest\n"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    folder = EXAMPLES / "custom_policy"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "PYTEST_"))}
    result = subprocess.run(
        [sys.executable, "-c", code, "-p", "no:cacheprovider", "-c", os.devnull, str(folder)],
        env={**clean, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


def test_custom_policy(tmp_path: Path) -> None:
    script = EXAMPLES / "custom_policy" / "launch.py"
    command = [sys.executable, str(script), "--calm-steps", "2"]
    # Two places for six requests, so that the others wait.
    with serving(tmp_path, command, environment(), max_running_requests=2) as url:
        alone = generate(url)
        quiet = dynspec(url)
        with ThreadPoolExecutor(6) as pool:
            outputs = list(pool.map(lambda n: generate(url, 70 + n), range(6)))
        busy = dynspec(url)
    assert quiet["policy"].startswith("spare_room:SpareRoom(")
    assert set(steps(quiet)) == {3}
    assert busy["state"] == "in_force"
    assert steps(busy)[0] > 0
    assert steps(busy)[3] > steps(quiet)[3]
    assert outputs[0] == alone
