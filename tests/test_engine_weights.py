"""New weights for a server that runs: plain steps use them at once."""

from __future__ import annotations

from support.in_force import ids, in_force, prompts
from support.policies import Alternate

from sglang_dynspec.testing.models import make_models
from sglang_dynspec.testing.scheduler import InProcessScheduler, Request

REQUESTS = [Request(input_ids=p, max_new_tokens=24) for p in prompts(3, seed=8)]


def test_new_weights_while_the_mode_changes():
    old, new = make_models(), make_models(seed=1)
    with InProcessScheduler(None, models=new) as scheduler:
        wanted = ids(scheduler.run(REQUESTS))
    with in_force("EAGLE", models=old) as server:
        before = ids(server.run(Alternate(), REQUESTS))
        update(server.scheduler, new.target)
        after = ids(server.run(Alternate(), REQUESTS))
        assert server.steps(0) > 0
        assert server.steps(3) > 0
        assert server.controller.failure is None
    assert after == wanted != before


def update(scheduler: InProcessScheduler, model_path: object) -> None:
    """As a client of /update_weights_from_disk does."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    asked = UpdateWeightFromDiskReqInput(model_path=str(model_path), load_format="auto")
    answer = scheduler.scheduler._request_dispatcher(asked)
    assert answer.success, answer.message
