"""One server in a process of its own: SGLang's settings and dynspec's are per process.

What it is to do stands in a JSON file; what it finds goes as a line of JSON each into a pipe,
because stdout and stderr belong to SGLang's log.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dynspec_benchmark.plan import Point

Send = Callable[[str, dict[str, Any]], None]
"""Sends an event: its kind, and what it tells."""

DIGEST = 8  # hexadecimal digits of an output's digest

_IDLE_WITHIN, _POLL = 10.0, 0.1  # s
_WARM_UP_PROMPT, _WARM_UP_OUTPUT = 64, 16  # tokens


def main(arguments: Sequence[str]) -> None:
    """Do a job.

    Args:
        arguments: path of the job's file, and number of the file descriptor for events.
    """
    path, descriptor = arguments
    # Only this process may keep the pipe open, so that its end is this process's end.
    os.set_inheritable(int(descriptor), False)
    with open(int(descriptor), "w", encoding="utf-8") as pipe:

        def send(kind: str, what: dict[str, Any]) -> None:
            pipe.write(json.dumps({"event": kind, **what}) + "\n")
            pipe.flush()

        job = json.loads(Path(path).read_text(encoding="utf-8"))
        try:
            _jobs()[job["job"]](job, send)
        except Exception as error:
            traceback.print_exc()
            send("error", {"message": f"{type(error).__name__}: {error}"})
            sys.exit(1)
        send("done", {})


# --- what is installed ---------------------------------------------------------------------------


def probe(job: dict[str, Any], send: Send) -> None:
    """Tell what is installed, and what of it can be measured."""
    import torch
    from sglang.srt.server_args import ServerArgs

    fields = list(inspect.signature(ServerArgs).parameters)
    send(
        "probed",
        {
            "software": {
                "sglang": version("sglang"),
                "torch": torch.__version__,
                "sglang_dynspec": _version_or_none("sglang-dynspec"),
                "python": platform.python_version(),
            },
            "gpu": _gpu(torch),
            "fields": fields,
            "adaptive_refusal": _adaptive_refusal(fields, job["adaptive_config"]),
        },
    )


def _gpu(torch: Any) -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "count": torch.cuda.device_count(),
        "memory_gib": round(properties.total_memory / (1 << 30), 1),
        "cuda": torch.version.cuda,
    }


def _version_or_none(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        try:
            # On PYTHONPATH, not installed.
            from sglang_dynspec import __version__
        except ImportError:
            return None
        return __version__


def _adaptive_refusal(fields: Sequence[str], config: str) -> str | None:
    """Return why SGLang's adaptive mode cannot be held at 0 steps by batch size, or None."""
    if "speculative_adaptive_config" not in fields:
        return "it has no --speculative-adaptive"
    try:
        from sglang.srt.speculative.adaptive_spec_params import (
            resolve_candidate_steps_from_config,
        )
    except ImportError:
        return "its --speculative-adaptive knows no steps by batch size"
    try:
        resolve_candidate_steps_from_config(cfg_path=config)
    except ValueError as error:
        return f"its --speculative-adaptive refuses 0 steps: {error}"
    return None


# --- measuring -----------------------------------------------------------------------------------


def measure(job: dict[str, Any], send: Send) -> None:
    """Start a server and measure points."""
    with Server(job, send) as server:
        vocab_size = server.vocab_size
        for prompt_tokens, output_tokens, c in job["points"]:
            point = Point(prompt_tokens, output_tokens, c)
            _measure_point(server, point, point.prompts(vocab_size), job["repeats"], send)
        # Also what a last failure has done to the mode.
        server.check_dynspec()


def _measure_point(
    server: Server, point: Point, prompts: list[list[int]], repeats: int, send: Send
) -> None:
    _warm_up(server, point, prompts)
    send("warm", {"point": str(point)})
    before = server.steps()
    for number in range(repeats):
        # Not in the middle of a run, and equally often before each.
        gc.collect()
        started = time.perf_counter()
        outputs = server.generate(prompts, point.output_tokens)
        seconds = time.perf_counter() - started
        send("run", {"repeat": number, "seconds": seconds, **summary(outputs)})
    send("point", {"steps": difference(server.steps(), before)})


def _warm_up(server: Server, point: Point, prompts: list[list[int]]) -> None:
    """Run all the point's requests at once, but short: only the first has its whole prompt."""
    short = [prompts[0], *(prompt[:_WARM_UP_PROMPT] for prompt in prompts[1:])]
    server.generate(short, min(_WARM_UP_OUTPUT, point.output_tokens))


def summary(outputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what is kept of a call's outputs."""
    lengths = [
        output["meta_info"]["spec_accept_length"]
        for output in outputs
        if output["meta_info"].get("spec_accept_length") is not None
    ]
    return {
        "tokens": sum(len(output["output_ids"]) for output in outputs),
        "accept_length": sum(lengths) / len(lengths) if lengths else None,
        "digests": "".join(digest(output["output_ids"]) for output in outputs),
    }


def digest(token_ids: Sequence[int]) -> str:
    """Return DIGEST hexadecimal digits that tell outputs apart."""
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()[:DIGEST]


def difference(after: Any, before: Any) -> dict[str, Any] | None:
    """Return what has been counted between two readings of :meth:`Server.steps`."""
    if after is None or before is None:
        return None
    return {
        group: {
            name: count - before[group].get(name, 0)
            for name, count in after[group].items()
            if count != before[group].get(name, 0)
        }
        for group in after
    }


class Server:
    """An SGLang engine, started in a ``with`` statement.

    Args:
        job: with ``engine``, the engine's arguments, and ``dynspec``, the policy and the draft
            state or None.
        send: hears ``ready``.
    """

    def __init__(self, job: dict[str, Any], send: Send) -> None:
        self._arguments = job["engine"]
        self._dynspec = job["dynspec"]
        self._send = send
        self.engine: Any = None

    def __enter__(self) -> Server:
        """Start it.

        Raises:
            RuntimeError: dynspec is in force and must not be, or the other way round.
        """
        if self._dynspec is not None:
            import sglang_dynspec

            # Strict: a server that would run without dynspec does not start.
            sglang_dynspec.activate(**self._dynspec, strict=True)
        started = time.perf_counter()
        import sglang

        self.engine = sglang.Engine(**self._arguments)
        seconds = time.perf_counter() - started
        try:
            # 0.5.9 answers no other question before its first request.
            self.generate([[10, 11, 12, 13]], 1)
            self.check_dynspec()
            self._send("ready", {"startup_s": round(seconds, 1), **self._about()})
        except BaseException:
            self.engine.shutdown()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.shutdown()

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return int(self.engine.tokenizer_manager.model_config.vocab_size)

    def generate(self, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
        """Send requests at once, and return their outputs in the same order.

        Raises:
            RuntimeError: an output is not as long as asked for.
        """
        outputs: list[dict[str, Any]] = self.engine.generate(
            input_ids=prompts, sampling_params=greedy(tokens)
        )
        for output in outputs:
            check_length(output, tokens)
        return outputs

    def state(self) -> dict[str, Any]:
        """SGLang's internal state."""
        state: dict[str, Any] = self.engine.get_server_info()["internal_states"][0]
        return state

    def steps(self) -> dict[str, dict[str, int]] | None:
        """Decode steps by draft steps, and steps left to SGLang by reason, since the start; None
        without dynspec."""
        status = self.state().get("dynspec")
        return None if status is None else steps_of(status)

    def switches(self) -> int | None:
        """Changes of the mode since the start; None without dynspec."""
        status = self.state().get("dynspec")
        return None if status is None else int(status["switches"])

    def used_kv_tokens(self) -> int | None:
        """Wait until no request is left, and return the KV slots in use then, or None if that
        cannot be told."""
        get_loads = getattr(self.engine.tokenizer_manager, "get_loads", None)
        if get_loads is None:
            return None
        deadline = time.monotonic() + _IDLE_WITHIN
        while True:
            [load] = self.engine.loop.run_until_complete(get_loads())
            idle = load.num_running_reqs == 0 and load.num_waiting_reqs == 0
            # What has ended is freed a moment later: a leak is what stays.
            if (idle and load.num_used_tokens == 0) or time.monotonic() > deadline:
                return int(load.num_used_tokens)
            time.sleep(_POLL)

    def check_dynspec(self) -> None:
        """Do nothing if dynspec is in force just where it was asked for.

        Raises:
            RuntimeError: it is not.
        """
        status = self.state().get("dynspec")
        if self._dynspec is None:
            if status is not None:
                raise RuntimeError(
                    f"dynspec is active in a server that is to run without it: {status}"
                )
        elif status is None or status.get("state") != "in_force":
            raise RuntimeError(f"dynspec is not in force: {status}")

    def _about(self) -> dict[str, Any]:
        state = self.state()
        return {
            # stdout is the log: what stands behind this was said while serving.
            "log_size": os.fstat(sys.stdout.fileno()).st_size,
            "attention_backend": state.get("attention_backend"),
            "dtype": str(self.engine.tokenizer_manager.model_config.dtype).removeprefix("torch."),
            "max_running_requests": state.get("effective_max_running_requests_per_dp"),
            "memory": state.get("memory_usage"),
        }


def greedy(tokens: int) -> dict[str, Any]:
    """Sampling parameters for exactly so many tokens, each the most probable one."""
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def check_length(output: dict[str, Any], tokens: int) -> None:
    """Do nothing if an output has exactly so many tokens.

    Raises:
        RuntimeError: it has not.
    """
    got = len(output["output_ids"])
    if got != tokens:
        raise RuntimeError(f"an output has {got} tokens instead of {tokens}: {output['meta_info']}")


def steps_of(status: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the counts of a status of dynspec."""
    return {
        "by_num_steps": {n: count["steps"] for n, count in status["by_num_steps"].items()},
        "passthrough": dict(status["passthrough"]),
    }


def _jobs() -> dict[str, Callable[[dict[str, Any], Send], None]]:
    from dynspec_benchmark import ramp_worker, wave_worker

    return {
        "probe": probe,
        "measure": measure,
        "ramp": ramp_worker.ramp,
        "answer": ramp_worker.answer,
        "wave": wave_worker.wave,
    }
