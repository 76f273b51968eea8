"""`auto` on a real scheduler: whatever it measures there, the output is right and it says why."""

from __future__ import annotations

import json
import math
from typing import Any

from support.in_force import ids, in_force, prompts, reference

from sglang_dynspec.engine import install
from sglang_dynspec.policy import BatchView
from sglang_dynspec.policy.goodput import Goodput
from sglang_dynspec.testing.scheduler import Request

STEPS = 1000


def changing_load() -> list[Request]:
    """A long request, and two waves of short ones."""
    drawn = iter(prompts(18, seed=11))
    waves = [
        Request(input_ids=next(drawn), max_new_tokens=24 + 4 * i, arrive_at_step=start + 2 * i)
        for start in (40, 150)
        for i in range(8)
    ]
    return [
        Request(input_ids=next(drawn), max_new_tokens=600),
        *waves,
        Request(input_ids=next(drawn), max_new_tokens=300, arrive_at_step=200),
    ]


class Explained(Goodput):
    """Keeps what it has said about its decisions."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[dict[str, Any]] = []

    def decide(self, batch: BatchView) -> int:
        answer = super().decide(batch)
        self.said.append({"step": batch.step, "answer": answer, **self.explain()})
        return answer


def test_a_thousand_steps_under_changing_load():
    load = changing_load()
    expected = reference(load)
    policy = Explained()
    with in_force("EAGLE3") as server:
        while len(policy.said) < STEPS:
            assert ids(server.run(policy, load)) == expected
            assert server.controller.failure is None
        status = json.loads(json.dumps(install.status()))
    assert {line["answer"] for line in policy.said} == {0, 3}
    for line in policy.said:
        assert line["answer"] in (line["num_steps"], line["trial"])
        assert set(line["tokens_per_second"]) == {"0", "3"}
        assert all(0 < value < math.inf for value in line["tokens_per_second"].values())
    assert all(line["actual_tokens_per_second"] > 0 for line in policy.said[10:])
    assert policy.said[-1]["decode_seconds"] > 0
    assert set(status["explanation"]) >= {"tokens_per_second", "actual_tokens_per_second"}
