"""The CPU engine: unmodified SGLang with EAGLE, EAGLE-3 or STANDALONE on a CPU, and tools to test
with it.

Runs SGLang 0.5.9 to 0.5.23. Importing this package imports neither torch nor
SGLang.

In one process, with a real Scheduler whose loop the test drives (see :mod:`.scheduler`):

    from sglang_dynspec.testing import InProcessScheduler, Request

    with InProcessScheduler("EAGLE3", num_steps=3, overlap=True, max_total_tokens=2048) as s:
        outputs = s.run([
            Request(input_ids=[70, 80, 90], max_new_tokens=32),
            Request(input_ids=[99] * 50, temperature=0.8, arrive_at_step=5, abort_at_step=20),
        ])
        outputs[0].token_ids, outputs[0].chunks, outputs[0].accept_length, outputs[0].finish_reason
        outputs[1].aborted, outputs[1].retractions, outputs[1].verify_steps, outputs[1].req
        s.scheduler                                  # SGLang's Scheduler; s.scheduler.draft_worker
        s.free_kv_slots(), s.free_request_slots()    # all of them when idle
        s.check_idle()                               # SGLang's leak check; run() has done it, too
        s.flush_cache()                              # forget the radix cache

Do not import SGLang before the first InProcessScheduler, unless the process was started with
``SGLANG_DYNSPEC_CPU_ENGINE=1`` or has called ``cpu_engine.install()``. Schedulers can follow each
other in one process (the first takes seconds, the next a fraction of one), but not overlap.

As an Engine or a server, in processes of their own (see :mod:`.cpu_engine`):

    import os, subprocess, sys
    from sglang_dynspec.testing import cpu_engine

    os.environ.update(cpu_engine.environment())
    cpu_engine.install()
    import sglang
    engine = sglang.Engine(**cpu_engine.server_args("EAGLE"))

    command = [sys.executable, "-m", "sglang.launch_server", *cpu_engine.command_line("EAGLE3")]
    subprocess.Popen([*command, "--port", "30000"], env={**os.environ, **cpu_engine.environment()})

The models (see :mod:`.models`) have a vocabulary of 512, never generate ids below 64, write varied
text that does not depend on the batch, and accept about 2.5 tokens a step at 3 draft steps; a draft
with stale KV or a wrong hidden state accepts little more than 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_dynspec.testing import cpu_engine
    from sglang_dynspec.testing.models import Models, make_models
    from sglang_dynspec.testing.scheduler import (
        InProcessScheduler,
        Output,
        Request,
        UnfinishedError,
    )

__all__ = [
    "InProcessScheduler",
    "Models",
    "Output",
    "Request",
    "UnfinishedError",
    "cpu_engine",
    "make_models",
]

_HOME = {
    "InProcessScheduler": "scheduler",
    "Models": "models",
    "Output": "scheduler",
    "Request": "scheduler",
    "UnfinishedError": "scheduler",
    "make_models": "models",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    from importlib import import_module

    if name == "cpu_engine":
        return import_module(f"{__name__}.cpu_engine")
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
