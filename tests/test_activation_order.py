"""Every order of import, activate, foreign wrap and deactivate, on SGLang's real modules.

Each order runs in a forked child of a process that has SGLang loaded. Where SGLang is to be
imported after activation, the child forgets the scheduler's module and imports it again, which
costs little because all that it imports is there.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

import pytest
import wrapt
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

SCHEDULER = "sglang.srt.managers.scheduler"
POLICY = "batch_size(off_at=4, on_at=3)"
STEPS = ("import", "activate", "environment", "plugin", "wrap", "deactivate")


@pytest.fixture(autouse=True, scope="module")
def scheduler_module():
    importlib.import_module(SCHEDULER)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.sampled_from(STEPS), max_size=8))
@example(["activate", "import"])
@example(["import", "activate"])
@example(["environment", "import", "plugin", "activate"])
@example(["import", "activate", "wrap", "deactivate", "activate"])
@example(["wrap", "activate", "wrap", "deactivate"])
@example(["activate", "import", "wrap", "deactivate"])
def test_any_order_leaves_one_wrapper_of_ours_and_all_of_theirs(steps):
    outcome = in_fork(lambda: run_order(steps))
    assert outcome["ours"] <= 1
    assert outcome["theirs"] == outcome["theirs_made"]
    # In force exactly if the last word was an activation, whatever came between.
    assert outcome["armed"] == outcome["active"]
    assert (outcome["ours"] == 1) >= (outcome["active"] and outcome["imported"])
    assert outcome["status"] == ("armed" if outcome["active"] else "inactive")
    assert outcome["environment_restored"]


def run_order(steps: list[str]) -> dict[str, Any]:
    """Do the steps in this process and say where they led."""
    from sglang_dynspec import _autoload, activation
    from sglang_dynspec.engine import install

    # As in a process that has done nothing yet, whatever tests ran before in this one's parent.
    activation._active, activation._hooked = None, False
    install._state = install._State()
    for name in [n for n in os.environ if n.startswith("SGLANG_DYNSPEC_")]:
        del os.environ[name]
    before = dict(os.environ)
    made, active, explicit = 0, False, False
    forget_scheduler()
    for step in steps:
        if step == "import":
            importlib.import_module(SCHEDULER)
        elif step == "wrap" and SCHEDULER in sys.modules:
            wrap_foreign(sys.modules[SCHEDULER].Scheduler)
            made += 1
        elif step == "activate":
            activation.activate(policy=POLICY)
            active = explicit = True
        elif step in ("environment", "plugin"):
            os.environ["SGLANG_DYNSPEC_POLICY"] = POLICY
            _autoload.plugin() if step == "plugin" else _autoload.run()
            active = True
            if not explicit:
                del os.environ["SGLANG_DYNSPEC_POLICY"]
        elif step == "deactivate":
            activation.deactivate()
            active = explicit = False
    imported = SCHEDULER in sys.modules
    chain = wrappers(sys.modules[SCHEDULER].Scheduler) if imported else []
    status = activation.status()["state"]
    if not active:
        assert install._state.settings_source is None
    armed = install._armed() if imported else active
    activation.deactivate()
    return {
        "ours": sum(w is install._scheduler_init for w in chain),
        "theirs": sum(w is foreign for w in chain),
        "theirs_made": made,
        "imported": imported,
        "active": active,
        "armed": armed,
        "status": status,
        "environment_restored": dict(os.environ) == before,
    }


def forget_scheduler() -> None:
    sys.modules.pop(SCHEDULER, None)


def foreign(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """What another plugin would wrap with."""
    return wrapped(*args, **kwargs)


def wrap_foreign(scheduler: type) -> None:
    scheduler.__init__ = wrapt.FunctionWrapper(vars(scheduler)["__init__"], foreign)  # type: ignore[misc]


def wrappers(scheduler: type) -> list[Any]:
    found, function = [], vars(scheduler)["__init__"]
    while isinstance(function, wrapt.FunctionWrapper):
        found.append(function._self_wrapper)
        function = function.__wrapped__
    return found


def in_fork(action: Any) -> dict[str, Any]:
    """Run in a forked child and hand back what it returned, as JSON."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            outcome: dict[str, Any] = action()
        except BaseException:
            outcome = {"failed": traceback.format_exc()}
        os.write(write, json.dumps(outcome).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        outcome = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert "failed" not in outcome, outcome["failed"]
    return outcome
