"""DP attention: each rank has requests and a policy of its own, and all run the same kind of step.

A real server of two processes that communicate through gloo, whose target has layers that gather
the tokens of both, or of four, two for each rank of DP attention. What each process hears and runs
is written down by the launch script, whose top runs in all.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.in_force import prompts, reference
from support.ranks import run_ranks

from sglang_dynspec.engine.dialect import installed_release, select
from sglang_dynspec.engine.exchange import Exchange, Verdict, Vote, combine, unpack
from sglang_dynspec.errors import RanksError
from sglang_dynspec.testing import cpu_engine
from sglang_dynspec.testing.ports import free_port
from sglang_dynspec.testing.scheduler import Request

ROUNDS = int(os.environ.get("DYNSPEC_TEST_ROUNDS", "1"))
LONG = ROUNDS > 1
LONG_ONLY = pytest.mark.skipif(
    not LONG, reason="a server start; DYNSPEC_TEST_ROUNDS=2 and more has it"
)
BUILDS = select(installed_release()).builds_steps
LENGTHS = (10, 90, 30, 60, 20, 75)  # taken in turn: rank 0 is without requests for a while
ALONE = 1  # and rank 1, while this one is run again by itself
REQUESTS = [
    Request(input_ids=p, max_new_tokens=n)
    for p, n in zip(prompts(len(LENGTHS), seed=22), LENGTHS, strict=True)
]

SCRIPT = """
    import itertools, json, os, random, time
    from sglang_dynspec import Policy
    from sglang_dynspec.engine import catch_up, controller, exchange, plain_decode, worker
    from sglang_dynspec.testing import cpu_engine
    from sglang_dynspec.testing.models import make_models
    from support import device

    device.prepare_launch_script()
    catch_up.TOKENS_A_STEP = 4  # so that some of it has to be spread
    FOLDER = {folder!r}
    FAIL = FOLDER + "/fail"

    def rank():
        import torch.distributed as dist
        return dist.get_rank()

    def note(kind, *words):
        with open(f"{{FOLDER}}/rank{{rank()}}.txt", "a") as file:
            print(kind, *words, file=file)

    take, gather = controller.Controller.take, exchange.Exchange.gather
    follow = worker._follow

    def taking(self, decision):
        take(self, decision)
        note("took", decision.num_steps, decision.reason, int(self.static))

    def gathering(self, *args):
        returned = gather(self, *args)
        if self.verdict is not None:
            said = self.verdict
            note("heard", said.num_steps, int(said.postponed), said.extend is not None)
        return returned

    def following(runtime, *args):
        note("followed", runtime.exchange.verdict.num_steps)
        return follow(runtime, *args)

    controller.Controller.take, exchange.Exchange.gather = taking, gathering
    worker._follow = following

    class Random(Policy):
        # No two processes draw the same, nor stay as long with what they have drawn.
        def __init__(self):
            super().__init__()
            self._draw = random.Random(f"{{os.getpid()}} {{time.time_ns()}}")
            self._left = 0

        def decide(self, batch):
            if rank() == {speaks_for_1} and os.path.exists(FAIL):
                raise RuntimeError("boom")
            if not self._left:
                self._left = self._draw.choice((1, 1, 1, 2, 5))
                self._now = self._draw.choice((*batch.ladder, batch.max_steps))
            self._left -= 1
            return self._now

    def serve():
        import sglang
        targets = {{"EAGLE3": dict(model_path=str(make_models().qwen3)), "NEXTN": {{}}}}
        arguments = cpu_engine.server_args(
            {algorithm!r},
            **targets[{algorithm!r}],
            tp_size={tp_size},
            dp_size=2,
            enable_dp_attention=True,
            port={port},
            log_level="warning",
        )
        engine = sglang.Engine(**arguments)
        greedy = [dict(temperature=0, max_new_tokens=n, ignore_eos=True) for n in {lengths!r}]
        asked, ids = {prompts!r}, []
        for turn in range({rounds} + 1):
            if turn == {rounds}:
                open(FAIL, "w").close()
            outputs = engine.generate(input_ids=asked, sampling_params=greedy)
            alone = engine.generate(input_ids=asked[{alone}], sampling_params=greedy[{alone}])
            outputs.append(alone)
            ids.append([output["output_ids"] for output in outputs])
        told = [state["dynspec"] for state in engine.get_server_info()["internal_states"]]
        print("REPORT " + json.dumps([ids, told]), flush=True)
        engine.shutdown()

    if __name__ == "__main__":
        import sglang_dynspec
        sglang_dynspec.activate(
            policy=Random(), draft_state={draft_state!r}, steps={steps!r}, strict=True
        )
        serve()
"""


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    ids = reference(REQUESTS)
    return [*ids, ids[ALONE]]


class Served:
    """What came of a run of the launch script."""

    def __init__(
        self,
        folder: Path,
        draft_state: str,
        rounds: int,
        tp_size: int = 2,
        algorithm: str = "EAGLE3",
        steps: tuple[int, ...] = (),
    ) -> None:
        done = run_ranks(
            tp_size,
            folder,
            SCRIPT,
            timeout=300,
            algorithm=algorithm,
            draft_state=draft_state,
            steps=steps,
            rounds=rounds,
            port=free_port(),
            lengths=list(LENGTHS),
            alone=ALONE,
            speaks_for_1=tp_size // 2,
            prompts=[list(request.input_ids) for request in REQUESTS],
        )
        [line] = [x for x in (done.stdout + done.stderr).splitlines() if "REPORT " in x]
        self.ids: list[list[list[int]]]
        self.status: list[dict[str, Any]]
        self.ids, self.status = json.loads(line.partition("REPORT ")[2])
        self.ranks = range(tp_size)
        self.notes = [
            [note.split() for note in (folder / f"rank{rank}.txt").read_text().splitlines()]
            for rank in self.ranks
        ]

    def of(self, rank: int, kind: str) -> list[list[str]]:
        return [words for word, *words in self.notes[rank] if word == kind]

    def heard(self) -> list[list[str]]:
        """What all ranks have heard, which must be the same."""
        heard = [self.of(rank, "heard") for rank in self.ranks]
        assert heard == [heard[0]] * len(self.ranks)
        return heard[0]


@pytest.mark.parametrize(
    "tp_size",
    [
        pytest.param(
            2,
            marks=pytest.mark.skipif(
                installed_release() == "0.5.9" and not LONG,
                reason="a server start; the newest release has it, as DYNSPEC_TEST_ROUNDS=2 and "
                "more",
            ),
        ),
        pytest.param(4, marks=LONG_ONLY),
    ],
)
def test_random_modes_of_each_rank_then_a_policy_that_fails_on_one(tmp_path, expected, tp_size):
    served = Served(tmp_path, "catch_up", ROUNDS, tp_size)
    assert served.ids == [expected] * (ROUNDS + 1)
    heard = served.heard()
    assert sum(a[0] != b[0] for a, b in itertools.pairwise(heard)) > 5 * ROUNDS
    assert {"0", "3"} == {num_steps for num_steps, _, _ in heard}
    assert any(postponed == "1" for _, postponed, _ in heard)
    for rank in served.ranks:
        # What it heard of it ran, with requests or without, and nothing else.
        ran = [note[1] for note in served.notes[rank] if note[0] != "heard"]
        assert ran == [num_steps for num_steps, _, _ in heard]
        assert {"0", "3"} == {num_steps for (num_steps,) in served.of(rank, "followed")}
    reasons = [words[1] for rank in served.ranks for words in served.of(rank, "took")]
    assert {"policy", "other_rank", "static"} <= set(reasons)
    # The failure on one rank holds on all, from the same step on.
    for rank in served.ranks:
        assert served.of(rank, "took")[-1] == ["3", "static", "1"]
    by_rank = sorted(served.status, key=lambda status: status["dp_rank"])
    assert [status["state"] for status in by_rank] == ["static", "static"]
    assert "another rank" in by_rank[0]["error"]
    assert "RuntimeError: boom" in by_rank[1]["error"]


@LONG_ONLY
def test_random_modes_with_a_warm_draft(tmp_path, expected):
    served = Served(tmp_path, "warm", ROUNDS)
    assert served.ids == [expected] * (ROUNDS + 1)
    assert served.heard()


@pytest.mark.skipif(not cpu_engine.has_mtp(), reason="no MTP layer in this SGLang")
@pytest.mark.parametrize("draft_state", ["catch_up", pytest.param("warm", marks=LONG_ONLY)])
def test_a_draft_whose_layers_gather_the_tokens_of_all_ranks(tmp_path, expected, draft_state):
    """A mixture of experts and its MTP layer: a rank that leaves out a forward pass of the draft
    leaves the others waiting."""
    served = Served(tmp_path, draft_state, ROUNDS, algorithm="NEXTN")
    assert served.ids == [expected] * (ROUNDS + 1)
    heard = served.heard()
    assert {"0", "3"} == {num_steps for num_steps, _, _ in heard}


@LONG_ONLY
@pytest.mark.skipif(not BUILDS, reason="SGLang has no adaptive speculation yet")
def test_draft_steps_between_none_and_all(tmp_path, expected):
    served = Served(tmp_path, "catch_up", ROUNDS, algorithm="NEXTN", steps=(1, 2, 3))
    assert served.ids == [expected] * (ROUNDS + 1)
    assert {"0", "1", "2", "3"} == {num_steps for num_steps, _, _ in served.heard()}


VOTES = [
    Vote(0),
    Vote(3),
    Vote(254, blocked=True),
    Vote(7, static=True, final=True),
    Vote(5, behind=True, postponed=True, extend=(1 << 18) - 1),
]


@pytest.mark.parametrize("vote", VOTES)
@pytest.mark.parametrize("tokens", [0, 1, 511, (1 << 32) - 1])
def test_a_vote_travels_beside_the_number_of_tokens(vote, tokens):
    number = vote.packed() | tokens
    assert 0 <= number < 1 << 63
    assert unpack(number) == vote
    assert number & ((1 << 32) - 1) == tokens
    assert unpack(tokens) is None


BEHIND = Vote(3, behind=True, extend=40)


@pytest.mark.parametrize(
    ("votes", "verdict"),
    [
        ([None, None], None),
        ([Vote(3), None], Verdict(3)),
        ([Vote(3), Vote(1)], Verdict(1)),
        ([Vote(3), Vote(0)], Verdict(0)),
        ([Vote(3), Vote(0, blocked=True)], Verdict(3)),
        ([Vote(1), Vote(0, blocked=True)], Verdict(3)),
        ([Vote(0), Vote(3, static=True)], Verdict(3, static=True)),
        ([Vote(0), Vote(3, static=True, final=True)], Verdict(3, static=True, final=True)),
        ([BEHIND, None], Verdict(3, extend=(40, 0), behind=frozenset({0}))),
        (
            [Vote(1), BEHIND],
            Verdict(1, extend=(5, 40), behind=frozenset({1})),
        ),
        ([BEHIND, Vote(0)], Verdict(0)),
        (
            [Vote(3, behind=True, postponed=True, extend=20), Vote(2)],
            Verdict(0, postponed=True, extend=(20, 5), behind=frozenset({0})),
        ),
        ([Vote(3, behind=True, postponed=True, extend=20), Vote(0, blocked=True)], Verdict(3)),
        ([BEHIND, Vote(3, static=True, final=True)], Verdict(3, static=True, final=True)),
    ],
)
def test_what_follows_from_votes(votes, verdict):
    requests = [0 if vote is None else 5 for vote in votes]
    assert combine(votes, requests, 3) == verdict


class Info:
    """What SGLang's MLPSyncBatchInfo has of its exchange."""

    def __init__(self, tokens: int, others: list[int], *, extends: bool = False) -> None:
        self.num_tokens = self.num_tokens_for_logprob = tokens
        self.is_extend_in_batch = extends
        self.global_num_tokens_for_logprob: list[int] = []
        self.gathers: list[int] = []
        self._others = others

    def all_gather(self, *, others_extend: bool = False) -> None:
        own = [self.num_tokens_for_logprob, *self._others]
        self.global_num_tokens_for_logprob = self.gathers or own
        self.is_extend_in_batch |= others_extend


def test_the_exchange_leaves_sglangs_numbers_as_they_are():
    exchange, heard = Exchange(0, 3), []
    exchange.propose(Vote(3), heard.append)
    info = Info(5, [Vote(0).packed() | 7, 0])
    exchange.gather(info.all_gather, info, (), {})
    assert info.global_num_tokens_for_logprob == [5, 7, 0]
    assert info.num_tokens_for_logprob == 5
    assert heard == [exchange.verdict] == [Verdict(0)]


def test_a_rank_without_a_decision_has_sglangs_step_run():
    exchange = Exchange(0, 3)
    info = Info(5, [Vote(0).packed() | 7])
    exchange.gather(info.all_gather, info, (), {})
    assert exchange.verdict == Verdict(3, static=True, final=True)


def test_what_another_rank_is_behind_with_waits_for_no_rank_without_a_decision():
    exchange = Exchange(0, 3)
    info = Info(5, [BEHIND.packed() | 7])
    exchange.gather(info.all_gather, info, (), {})
    assert exchange.verdict == Verdict(3, static=True, final=True)


def test_a_process_without_a_decision_that_does_not_speak_for_its_rank():
    exchange = Exchange(0, 3)
    info = Info(5, [7])
    info.gathers = [Vote(0).packed() | 5, Vote(0).packed() | 7]
    with pytest.raises(RanksError, match="without a decision"):
        exchange.gather(info.all_gather, info, (), {})


def test_prompts_come_before_decisions():
    exchange, heard = Exchange(0, 3), []
    exchange.propose(Vote(0), heard.append)
    info = Info(5, [40])
    exchange.gather(info.all_gather, info, (), {"others_extend": True})
    assert exchange.verdict is None
    assert not heard
    assert info.global_num_tokens_for_logprob == [5, 40]
    # What was proposed for that exchange is not there for the next.
    info = Info(0, [0])
    exchange.gather(info.all_gather, info, (), {})
    assert exchange.verdict is None
