"""What the demo is to do, and with which server."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sglang_dynspec
from sglang_dynspec.demo.errors import UsageError
from sglang_dynspec.demo.load import Stage
from sglang_dynspec.demo.prompts import text_prompts, token_prompts
from sglang_dynspec.demo.server import ServerProcess
from sglang_dynspec.testing.ports import HOST

DEFAULT_POLICY = "batch_size(off_at=4, on_at=3)"
DEFAULT_CLIENTS = (1, 3, 6, 8, 6, 3, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that was asked for."""

    policy: str
    """As text."""
    stages: tuple[Stage, ...]
    tokens: int
    """Output tokens of a request."""
    prompts: int
    """Different prompts; the clients take them in turn."""
    output: Path
    """Folder for chart, timeline and logs."""
    algorithm: str = "EAGLE3"
    num_steps: int = 3
    """Draft steps of a speculative step."""
    model_path: str | None = None
    """The target model, or None: the tiny ones on the CPU engine."""
    draft_model_path: str | None = None
    server_arguments: tuple[str, ...] = ()
    """For both servers; those about speculation only for the one that has it."""
    start_timeout: float = 600.0
    """Seconds that a server may take to start."""

    @property
    def peak(self) -> int:
        """The most clients at a time."""
        return max(stage.clients for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Workload:
    """The servers' part of the plan, and prompts that suit the model."""

    title: str
    with_speculation: tuple[str, ...]
    """Arguments of ``sglang.launch_server``."""
    without_speculation: tuple[str, ...]
    environment: Mapping[str, str]
    """In addition to this process's."""
    prompts: tuple[Mapping[str, Any], ...]


def workload(plan: Plan, *, gpu: bool) -> Workload:
    """Return what to serve: the models asked for, or the tiny ones on the CPU engine.

    Args:
        plan: what was asked for.
        gpu: whether this machine has a GPU that SGLang would run on.

    Raises:
        UsageError: no model is named, and the tiny ones cannot be served on this machine.
    """
    if plan.model_path is not None:
        return _real(plan, plan.model_path)
    if gpu:
        raise UsageError(
            "this machine has a GPU, and the tiny models run on SGLang's CPU engine only. Name the "
            "models to serve, and after -- whatever else the server needs, for example:\n"
            "  python -m sglang_dynspec demo --model-path meta-llama/Llama-3.1-8B-Instruct \\\n"
            "    --draft-model-path lmsys/sglang-EAGLE3-LLaMA3.1-Instruct-8B \\\n"
            '    --policy "batch_size(off_at=32, on_at=24)" --clients 1,16,64,16,1 \\\n'
            "    -- --dtype bfloat16 --max-running-requests 64"
        )
    return _tiny(plan)


def without_speculation(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return server arguments less those that begin with ``--speculative``, with their values."""
    kept: list[str] = []
    dropping = False
    for argument in arguments:
        if argument.startswith("--"):
            dropping = argument.startswith("--speculative")
        if not dropping:
            kept.append(argument)
    return tuple(kept)


def server(
    name: str,
    arguments: Sequence[str],
    *,
    port: int,
    environment: Mapping[str, str],
    log: Path,
) -> ServerProcess:
    """Return a server, not yet started: ``python -m sglang.launch_server``, nothing else."""
    return ServerProcess(
        name,
        [
            sys.executable,
            *("-m", "sglang.launch_server"),
            *arguments,
            *("--host", HOST, "--port", str(port)),
        ],
        port=port,
        environment=environment,
        log=log,
    )


def dynspec_environment(plan: Plan, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a server starts dynspec by itself."""
    return {
        **os.environ,
        **_interpreter_start(),
        **extra,
        "SGLANG_DYNSPEC_POLICY": plan.policy,
    }


def baseline_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server without dynspec."""
    ours = ("SGLANG_DYNSPEC_POLICY", "SGLANG_DYNSPEC_CONFIG")
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    # The CPU engine, too, is started at interpreter start.
    return {**inherited, **_interpreter_start(), **extra}


def _interpreter_start() -> dict[str, str]:
    # With sglang_dynspec installed its .pth file would do. This works in a source checkout, too,
    # and does no harm where both are in effect.
    bootstrap = str(Path(sglang_dynspec.__file__).parent / "bootstrap")
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join([bootstrap, *paths])}


def _tiny(plan: Plan) -> Workload:
    from sglang_dynspec.testing import cpu_engine, models

    options = {
        # Info, because that is how a server is run, and the log is there to be read.
        "log_level": "info",
        "max_running_requests": max(16, plan.peak),
        "models": models.make_models(),
    }
    rest = plan.server_arguments
    return Workload(
        title=f"tiny Llama with {plan.algorithm} draft on the CPU engine",
        with_speculation=(
            *cpu_engine.command_line(plan.algorithm, num_steps=plan.num_steps, **options),
            *rest,
        ),
        without_speculation=(*cpu_engine.command_line(None, **options), *without_speculation(rest)),
        environment=cpu_engine.environment(),
        prompts=tuple(
            token_prompts(
                plan.prompts, first_id=models.DRAFT_VOCAB_OFFSET, vocab_size=models.VOCAB_SIZE
            )
        ),
    )


def _real(plan: Plan, model_path: str) -> Workload:
    common = ("--model-path", model_path)
    speculation = [
        *("--speculative-algorithm", plan.algorithm),
        *("--speculative-num-steps", str(plan.num_steps)),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(plan.num_steps + 1)),
    ]
    if plan.draft_model_path is not None:
        speculation += ["--speculative-draft-model-path", plan.draft_model_path]
    rest = plan.server_arguments
    if not any(a.split("=")[0] == "--max-running-requests" for a in rest):
        # Speculation resets it to 48 when it is not set.
        rest = (*rest, "--max-running-requests", str(max(48, plan.peak)))
    return Workload(
        title=f"{model_path} with {plan.algorithm} draft",
        with_speculation=(*common, *speculation, *rest),
        without_speculation=(*common, *without_speculation(rest)),
        # 0.5.9 and 0.5.10 have the worker that dynspec needs only with this.
        environment={"SGLANG_ENABLE_SPEC_V2": "1"},
        prompts=tuple(text_prompts(plan.prompts)),
    )
