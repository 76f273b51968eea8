"""Tensor parallelism: all ranks run the same steps, whatever the policy does.

A real server of two processes, or of four, that communicate through gloo. What each runs is written
down by the launch script, whose top runs in all.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support import device
from support.in_force import prompts, reference
from support.ranks import run_ranks

from sglang_dynspec.engine.dialect import installed_release
from sglang_dynspec.testing.scheduler import Request

COUNT, TOKENS = 6, 120
ROUNDS = int(os.environ.get("DYNSPEC_TEST_ROUNDS", "3"))
REPLACED_AT = 60 * ROUNDS
LONG_ONLY = pytest.mark.skipif(
    "DYNSPEC_TEST_ROUNDS" not in os.environ, reason="some minutes; DYNSPEC_TEST_ROUNDS=3 has it"
)
REQUESTS = [Request(input_ids=p, max_new_tokens=TOKENS) for p in prompts(COUNT, seed=21)]

SCRIPT = """
    import json, os, random, sys, time, zlib
    from sglang_dynspec import Policy
    from sglang_dynspec.engine import controller
    from sglang_dynspec.testing import cpu_engine
    from support import device

    device.prepare_launch_script()
    FOLDER = {folder!r}
    take = controller.Controller.take

    def rank():
        import torch.distributed as dist
        return dist.get_rank()

    def recording(self, decision):
        take(self, decision)
        with open(f"{{FOLDER}}/rank{{rank()}}.txt", "a") as file:
            print(decision.num_steps, decision.batch_size, self.static, drawn(), file=file)

    def drawn():
        # What this rank has sampled so far.
        from sglang_dynspec.engine import install
        requests = install.runtime().scheduler.running_batch.reqs
        return zlib.crc32(str([r.output_ids for r in requests]).encode())

    controller.Controller.take = recording

    class Random(Policy):
        # No two processes draw the same, so that ranks that asked their own would wait for good.
        def __init__(self, *, replaced_at=None, not_on_rank_1=False):
            super().__init__()
            self._draw = random.Random(f"{{os.getpid()}} {{time.time_ns()}}")
            self.replaced_at = replaced_at
            self.not_on_rank_1 = not_on_rank_1
            self._calls = 0

        def decide(self, batch):
            self._calls += 1
            if self.not_on_rank_1 and rank() == 1:
                raise RuntimeError("boom")
            if self._calls == self.replaced_at:
                from sglang_dynspec.engine import install
                install.runtime().controller.use(PlainUntilItFails())
            return self._draw.choice(batch.ladder)

        def wants_draft_prefill(self, batch):
            return rank() == 1  # they differ, and what rank 0 wants shows

    class PlainUntilItFails(Policy):
        calls = 0

        def decide(self, batch):
            self.calls += 1
            if self.calls == 20:
                raise RuntimeError("boom")
            return 0

    {top}

    def serve():
        import sglang
        arguments = cpu_engine.server_args("EAGLE3", tp_size={tp_size}, log_level="warning")
        engine = sglang.Engine(**arguments)
        greedy = dict(temperature=0, max_new_tokens={tokens}, ignore_eos=True)
        drawn = dict(temperature=0.8, max_new_tokens=40, ignore_eos=True)
        asked = {prompts!r}
        for _ in range({rounds}):
            outputs = engine.generate(input_ids=asked, sampling_params=greedy)
        engine.generate(input_ids=asked, sampling_params=drawn)
        told = engine.get_server_info()["internal_states"][0]["dynspec"]
        print("REPORT " + json.dumps([[o["output_ids"] for o in outputs], told]), flush=True)
        engine.shutdown()

    if __name__ == "__main__":
        import sglang_dynspec
        sglang_dynspec.activate(
            policy={policy}, draft_state={draft_state!r}, trace=FOLDER + "/trace.jsonl", strict=True
        )
        serve()
"""


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return reference(REQUESTS)


def launch(
    folder: Path,
    policy: str,
    *,
    draft_state: str = "catch_up",
    rounds: int = 1,
    top: str = "",
    succeeds: bool = True,
    tp_size: int = 2,
) -> subprocess.CompletedProcess[str]:
    return run_ranks(
        tp_size,
        folder,
        SCRIPT,
        timeout=500,
        succeeds=succeeds,
        top=top,
        policy=policy,
        draft_state=draft_state,
        tokens=TOKENS,
        rounds=rounds,
        prompts=[list(request.input_ids) for request in REQUESTS],
    )


class Served:
    """What came of a run of the launch script."""

    def __init__(self, folder: Path, policy: str, *, tp_size: int = 2, **how: Any) -> None:
        done = launch(folder, policy, tp_size=tp_size, **how)
        self.log = done.stdout + done.stderr
        [line] = [line for line in self.log.splitlines() if "REPORT " in line]
        self.ids: list[list[int]]
        self.status: dict[str, Any]
        self.ids, self.status = json.loads(line.partition("REPORT ")[2])
        self.steps = [
            [line.split() for line in (folder / f"rank{rank}.txt").read_text().splitlines()]
            for rank in range(tp_size)
        ]

    def modes(self) -> list[str]:
        """Draft steps of each step; the ranks must have run the same."""
        assert self.steps == [self.steps[0]] * len(self.steps)
        return [num_steps for num_steps, *_ in self.steps[0]]


@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=LONG_ONLY)])
def test_random_modes_then_another_policy_that_fails(tmp_path, expected, tp_size):
    # Hundreds of steps, at each of which the coins of the ranks fall differently.
    policy = f"Random(replaced_at={REPLACED_AT}, not_on_rank_1=True)"
    served = Served(tmp_path, policy, rounds=ROUNDS, tp_size=tp_size)
    modes = served.modes()
    assert served.ids == expected
    assert sum(a != b for a, b in itertools.pairwise(modes)) > REPLACED_AT // 3
    assert served.status["draft_prefills_skipped"] > 0
    # What rank 0 decides takes effect one step later, on both at once.
    first = REPLACED_AT + 2
    assert set(modes[first : first + 17]) == {"0"}
    static = [step[2] for step in served.steps[0]].index("True")
    assert first + 17 <= static <= first + 19
    assert set(modes[static:]) == {"3"}
    assert served.status["state"] == "static"
    assert "PlainUntilItFails" in served.status["error"]
    assert "RuntimeError: boom" in served.status["error"]
    # Rank 0 alone has traced them.
    _, *lines = map(json.loads, (tmp_path / "trace.jsonl").read_text().splitlines())
    traced = {line["step"]: str(line["num_steps"]) for line in lines}
    assert REPLACED_AT // 3 < len(traced) == len(lines)
    assert all(modes[step] == num_steps for step, num_steps in traced.items())


@pytest.mark.skipif(
    installed_release() == "0.5.9", reason="a server start; the newest release has it"
)
def test_ranks_that_have_run_different_steps_are_found_out(tmp_path, expected):
    top = """
    from sglang_dynspec.engine import ranks
    ranks.COMPARE_EVERY = 20
    ran = ranks.Ranks.ran

    def disagreeing(self, num_steps, batch_size):
        ran(self, num_steps + (self.rank == 1 and self._steps == 50), batch_size)

    ranks.Ranks.ran = disagreeing
    """
    served = Served(tmp_path, "Random()", top=textwrap.dedent(top))
    assert served.ids == expected
    assert served.status["state"] == "static"
    assert "ranks have run different steps (rank 0: " in served.status["error"]
    assert "rank 1: " in served.status["error"]
    modes = served.modes()
    static = [step[2] for step in served.steps[0]].index("True")
    assert 50 <= static <= 62
    assert set(modes[static:]) == {"3"}


@LONG_ONLY
def test_auto_decides_for_all_with_steps_timed_on_each(tmp_path, expected):
    top = """
    observe_timings = controller.Controller.observe_timings

    def observing(self, timings):
        observe_timings(self, timings)
        open(f"{FOLDER}/timed{rank()}", "w").close()

    controller.Controller.observe_timings = observing
    """
    served = Served(tmp_path, "'auto'", top=textwrap.dedent(top))
    assert served.ids == expected
    assert served.status["state"] == "in_force"
    assert len(served.modes()) > TOKENS // 4
    # A CPU has no graphs to time.
    assert len(list(tmp_path.glob("timed*"))) == 2 * device.ON_GPU


@LONG_ONLY
def test_what_fails_on_one_rank_alone_stops_the_server(tmp_path):
    # Rank 0 is in its plain step then, and would wait there for good.
    top = """
    from datetime import timedelta
    from sglang_dynspec.engine import plain_decode, ranks
    ranks._FAIL_WITHIN = timedelta(seconds=2)
    run = plain_decode.run

    def failing(dialect, target, worker, batch, **how):
        if rank() == 1 and int(batch.seq_lens[0]) > 20:
            raise RuntimeError("boom")
        return run(dialect, target, worker, batch, **how)

    plain_decode.run = failing
    """
    done = launch(tmp_path, "Random()", top=textwrap.dedent(top), succeeds=False)
    assert done.returncode != 0
    says = "a plain decode step failed: RuntimeError: boom, on rank 1 and not on all"
    assert says in done.stdout + done.stderr


AGREES = """
    import sys
    from datetime import timedelta
    import torch.distributed as dist
    from sglang_dynspec.engine import ranks

    rank, does = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method="file://{file}", rank=rank, world_size=2)
    ranks._AGREE_WITHIN = ranks._FAIL_WITHIN = timedelta(seconds=4)
    agreement = ranks.Agreement(rank, 2)
    try:
        if does == "tells":
            print("TOLD", agreement.together("numbers", rank + 7))
        elif does == "tells of another":
            print("TOLD", agreement.together("letters", "a"))
        elif does == "fails":
            agreement.fail("no policy")
        elif does == "comes late":
            dist.barrier()  # the other has given up
            print("TOLD", agreement.together("numbers", 7))
        elif does == "falls back":
            print("ALIKE", ranks.Ranks(rank, 3, agreement).fail_alike("boom"))
    except Exception as error:
        print("REFUSED", error)
    if does != "comes late":
        dist.barrier()
"""


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (["tells", "tells"], [r"TOLD \[7, 8\]", r"TOLD \[7, 8\]"]),
        (["tells", "fails"], ["REFUSED .*on rank 1: no policy", ""]),
        (["tells", "tells of another"], ["REFUSED .*rank 1 is at letters"] * 2),
        (["fails", "tells"], ["", "REFUSED .*on rank 0: no policy"]),
        (["tells", "leaves"], ["REFUSED .*on rank 1: it has not started", ""]),
        (["leaves", "tells"], ["", "REFUSED .*on rank 0: it has not started"]),
        (["falls back", "falls back"], ["ALIKE True", "ALIKE True"]),
        (["leaves", "falls back"], ["", "ALIKE False"]),
        (["comes late", "tells"], ["REFUSED", "REFUSED .*on rank 0: it has not started"]),
    ],
    ids=" and ".join,
)
def test_ranks_tell_each_other_and_nobody_waits_for_long(tmp_path, does, says):
    path = tmp_path / "agree.py"
    path.write_text(textwrap.dedent(AGREES).format(file=tmp_path / "store"), encoding="utf-8")
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", str(path), str(rank), what],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, what in enumerate(does)
    ]
    for process, wanted in zip(processes, says, strict=True):
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        assert re.search(wanted, said), said
        assert wanted or not said.strip()
