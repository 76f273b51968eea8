"""Changing what dynspec does while a server serves.

First what can be asked for, and what is refused, on a controller by itself; then all of it over
HTTP on one real server under load, through both ways in, and on two ranks.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.in_force import prompts
from support.ranks import run_ranks
from support.servers import Server, running_server

from sglang_dynspec import cli
from sglang_dynspec.engine import change, contract, live, route
from sglang_dynspec.engine.change import Change
from sglang_dynspec.engine.contract import Name
from sglang_dynspec.engine.controller import Controller
from sglang_dynspec.engine.dialect import installed_release
from sglang_dynspec.errors import ChangeError, PolicyError
from sglang_dynspec.policy import Always, BatchSize, BatchView, Policy, StepOutcome, StepTiming
from sglang_dynspec.policy._tune import tuned
from sglang_dynspec.policy.text import parse_policy, policy_text

LADDER = (0, 1, 3)
POLICY = "batch_size(off_at=32, on_at=24)"

# --- what can be asked for ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "keys", "words"),
    [
        ({"policy": "never"}, {"dynspec_policy=never": 1}, "policy=never"),
        (
            {"policy": "batch_size(off_at=48, on_at=40)", "dry_run": True},
            {"dynspec_policy=batch_size(off_at=48, on_at=40)": 1, "dynspec_dry_run": 1},
            "policy=batch_size(off_at=48, on_at=40)",
        ),
        (
            {"set": {"off_at": 48, "on_at": 40}},
            {"dynspec_set_off_at": 48, "dynspec_set_on_at": 40},
            "set off_at=48 on_at=40",
        ),
        ({"num_steps": 0}, {"dynspec_num_steps": 0}, "num_steps=0"),
        (
            {"num_steps": 2, "seconds": 60.0},
            {"dynspec_num_steps": 2, "dynspec_seconds": 60.0},
            "num_steps=2 for 60 s",
        ),
        ({"static": True}, {"dynspec_static": 1}, "static"),
        ({"static": False}, {"dynspec_static": 0}, "resume"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_both_forms_of_a_change_say_the_same(body, keys, words):
    asked = change.from_json(body)
    assert asked == change.from_keys(keys)
    assert (asked.as_json(), asked.as_keys()) == (body, keys)
    assert str(asked) == words
    assert all(isinstance(value, (int, float)) for value in asked.as_keys().values())
    # As JSON has them where a client writes every number with a point.
    assert change.from_keys({key: float(value) for key, value in keys.items()}) == asked


def test_requests_without_our_keys_are_not_ours():
    assert not change.is_change({"pp_max_micro_batch_size": 8})
    assert not change.is_change({})
    assert change.is_change({"dynspec": 1})
    assert change.is_change({"pp_max_micro_batch_size": 8, "dynspec_static": 1})


BAD_KEYS: list[tuple[dict[Any, Any], list[str]]] = [
    ({"dynspec": 1}, ["'dynspec'", "accepted are", "dynspec_num_steps"]),
    ({"dynspec_num_stebs": 1}, ["did you mean dynspec_num_steps?", "accepted are"]),
    ({"dynspec_dry_run": 1}, ["no change is asked for", "give one of policy, set"]),
    ({"dynspec_policy=never": 0}, ["dynspec_policy=never is 0", "must be 1"]),
    ({"dynspec_policy=never": 1, "dynspec_policy=always": 1}, ["two policies", "name one"]),
    ({"dynspec_policy=": 1}, ["the policy is empty", "write for example"]),
    ({"dynspec_policy=batch_size(": 1}, ["found the end of the text", "expected"]),
    ({"dynspec_policy=batch_sise(off_at=3)": 1}, ["batch_sise", "did you mean 'batch_size'?"]),
    ({"dynspec_policy=batch_size(off_at=0)": 1}, ["off_at=0", "must be a whole number >= 1"]),
    ({"dynspec_policy=batch_size(of=3)": 1}, ["of=3", "accepted are batch_size(off_at"]),
    ({"dynspec_policy=nowhere.at_all:X": 1}, ["nowhere.at_all", "put its directory on PYTHONPATH"]),
    ({"dynspec_policy=os:path": 1}, ["os:path", "no policy", "must be a subclass"]),
    ({"dynspec_policy=test_live:X(\ud800)": 1}, ["\\ud800", "write it in ASCII"]),
    ({"dynspec_set_off": 3}, ["off is no parameter", "'off_at'?", "off_at (now 32)", "on_at (now"]),
    ({"dynspec_set_off_at": 0}, ["off_at=0", "must be a whole number >= 1"]),
    ({"dynspec_set_off_at": 2.5}, ["off_at=2.5", "must be a whole number"]),
    ({"dynspec_set_off_at": 20}, ["off_at=20", "must be below", "lower on_at to 15"]),
    ({"dynspec_set_off_at": True}, ["off_at is True", "must be a number", "write 1"]),
    ({"dynspec_set_off_at": "48"}, ["off_at is '48'", "must be a number"]),
    ({"dynspec_set_off_at": float("nan")}, ["off_at is nan", "must be a number"]),
    ({"dynspec_set_": 3}, ["set names the parameter ''", "such as off_at"]),
    ({"dynspec_num_steps": 2}, ["num_steps is 2", "can run 0, 1, 3", "SGLANG_DYNSPEC_STEPS"]),
    ({"dynspec_num_steps": -1}, ["num_steps is -1", "a whole number >= 0"]),
    ({"dynspec_num_steps": 1.5}, ["num_steps is 1.5", "a whole number >= 0"]),
    ({"dynspec_num_steps": 10**400}, ["num_steps is 1000", "a whole number >= 0"]),
    ({"dynspec_num_steps": None}, ["num_steps is None", "a whole number >= 0"]),
    ({"dynspec_num_steps": True}, ["num_steps is True", "a whole number >= 0", "write 1"]),
    ({"dynspec_num_steps": 1, "dynspec_seconds": 0}, ["seconds is 0", "above 0", "leave it out"]),
    ({"dynspec_num_steps": 1, "dynspec_seconds": -3}, ["seconds is -3", "above 0", "leave it out"]),
    ({"dynspec_seconds": 5}, ["seconds is 5", "no num_steps is given", "add it"]),
    ({"dynspec_static": 1, "dynspec_seconds": 5}, ["seconds is 5", "leave seconds out"]),
    ({"dynspec_static": 2}, ["static is 2", "1 or 0"]),
    ({"dynspec_static": "yes"}, ["static is 'yes'", "true or false"]),
    ({"dynspec_static": 1, "dynspec_dry_run": 7}, ["dry_run is 7", "1 or 0"]),
    (
        {"dynspec_static": 1, "dynspec_num_steps": 3},
        ["num_steps and static are given", "at a time"],
    ),
    ({"dynspec_static": 1, "dynspec_id": -1}, ["id is -1", "a whole number >= 0"]),
    (
        {"dynspec_static": 1, "pp_max_micro_batch_size": 8},
        ["pp_max_micro_batch_size is SGLang's own", "two requests"],
    ),
]
BAD_JSON: list[tuple[Any, list[str]]] = [
    ([], ["the body is []", "must be a JSON object"]),
    ({}, ["no change is asked for", "give one of"]),
    ({"polici": "never"}, ["'polici'", "did you mean policy?", "accepted are"]),
    ({"policy": 3}, ["policy is 3", "must be a policy's text"]),
    ({"policy": "a |"}, ["found '|'", "joined with '&'"]),
    ({"set": {}}, ["set is {}", "such as"]),
    ({"set": [1]}, ["set is [1]", "such as"]),
    ({"set": {"off_at": None}}, ["off_at is None", "must be a number"]),
    ({"static": "on"}, ["static is 'on'", "true or false"]),
    ({"num_steps": "2"}, ["num_steps is '2'", "a whole number"]),
    ({"policy": "never", "static": True}, ["policy and static are given", "at a time"]),
    ({"policy": "never", "id": 3}, ["'id'", "accepted are policy, set"]),
]


@pytest.mark.parametrize(("keys", "says"), BAD_KEYS, ids=[str(list(k))[:60] for k, _ in BAD_KEYS])
def test_a_bad_value_changes_nothing_and_says_why(caplog, keys, says):
    controller, made = serving(POLICY), live.Changes()
    before = controller.as_dict()
    with caplog.at_level(logging.INFO, logger="sglang_dynspec"):
        outcome = live.request(made, keys, controller)
    assert not outcome.accepted
    assert all(part in str(outcome.reason) for part in says), outcome.reason
    assert controller.as_dict() == before
    if outcome.dry_run:
        return
    told = made.as_dict()
    assert told["changes"] == {"applied": 0, "refused": 1}
    assert json.loads(json.dumps(told))["last_change"]["reason"] == outcome.reason
    [record] = caplog.records
    assert "\n" not in record.getMessage()
    assert "change 1 refused: " in record.getMessage()


@pytest.mark.parametrize(("body", "says"), BAD_JSON, ids=[str(b)[:40] for b, _ in BAD_JSON])
def test_a_bad_body_is_refused_before_it_is_sent(body, says):
    with pytest.raises(ChangeError) as error:
        change.from_json(body)
    assert all(part in str(error.value) for part in says), error.value


@pytest.mark.parametrize(
    ("text", "changes", "result"),
    [
        ("batch_size(32, 24)", {"off_at": 48}, "batch_size(48, 24)"),
        ("batch_size(32)", {"on_at": 8}, "batch_size(32, on_at=8)"),
        ("batch_size(off_at=32)", {"off_at": 48.0}, "batch_size(off_at=48)"),
        ("auto", {"margin": 0.5}, "auto(margin=0.5)"),
        (
            "min_dwell(batch_size(32), steps=5) & token_budget(512)",
            {"steps": 9, "off_at": 40, "token_budget.max_tokens": 64},
            "min_dwell(batch_size(40), steps=9) & token_budget(64)",
        ),
        (
            "hysteresis(batch_size(32), up=2, down=1) & min_dwell(never, steps=3)",
            {"up": 4, "min_dwell.steps": 7},
            "hysteresis(batch_size(32), up=4, down=1) & min_dwell(never, steps=7)",
        ),
        ("test_live:Parameters(on=False)", {"on": 1}, "test_live:Parameters(on=True)"),
        (
            "test_live:Parameters(parts=[batch_size(3), never])",
            {"off_at": 4},
            "test_live:Parameters(parts=[batch_size(4), never])",
        ),
    ],
)
def test_parameters_are_tuned_wherever_they_stand(text, changes, result, here):
    assert tuned(text, changes) == result


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("never", "off_at", "off_at is no parameter of never, which has none"),
        ("always & never", "x", "which has none; put another policy in its place"),
        (
            "min_dwell(batch_size(8), steps=2) & batch_size(9)",
            "off_at",
            "off_at stands for 2 parameters",
        ),
        (
            "hysteresis(batch_size(8), up=1, down=2)",
            "policy",
            "accepted are up (now 1), down (now 2), off_at (now 8), on_at (now None)",
        ),
        (
            "min_dwell(test_live:Parameters(), steps=2)",
            "stebs",
            "accepted are min_dwell.steps (now 2), on (now True), test_live:Parameters.steps ",
        ),
        (
            "min_dwell(test_live:Parameters(), steps=2)",
            "steps",
            "write one of min_dwell.steps, test_live:Parameters.steps",
        ),
    ],
)
def test_parameters_that_are_not_there_or_not_alone_are_refused(text, name, says, here):
    with pytest.raises(PolicyError) as error:
        tuned(text, {name: 3})
    assert says in str(error.value)


class Parameters(Policy):
    """Takes many kinds of arguments."""

    def __init__(self, on: bool = True, steps: int = 1, parts: Any = ()) -> None:
        super().__init__()

    def decide(self, batch: BatchView) -> int:
        return 0


class Fails(Policy):
    """Cannot decide."""

    def decide(self, batch: BatchView) -> int:
        raise KeyError("boom")


class Exits(Policy):
    """Ends the process when it is made."""

    def __init__(self) -> None:
        super().__init__()
        sys.exit(3)

    def decide(self, batch: BatchView) -> int:
        return 0


class Timed(Policy):
    """Hears of what steps take."""

    wants_timings = True
    heard: Any = ()

    def decide(self, batch: BatchView) -> int:
        return 0

    def observe_timings(self, timings: Any) -> None:
        self.heard = timings


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this module be found by its name."""
    monkeypatch.setitem(sys.modules, "test_live", sys.modules[__name__])


def serving(policy: str, clock: Callable[[], float] = time.perf_counter) -> Controller:
    """A controller that has decided on a batch of 12."""
    controller = Controller(parse_policy(policy), LADDER, clock)
    view = BatchView(batch_size=12, ladder=LADDER, waiting=4)
    controller.take(controller.decide(view))
    return controller


def ask(controller: Controller, **asked: Any) -> live.Outcome:
    return live.request(live.Changes(), Change(**asked).as_keys(), controller)


def decided(controller: Controller) -> int:
    view = BatchView(batch_size=12, ladder=LADDER, step=controller.next_step)
    decision = controller.decide(view)
    controller.take(decision)
    return decision.num_steps


# --- what comes of it -----------------------------------------------------------------------------


def test_each_change_is_in_force_from_the_next_step_on():
    now = [100.0]
    controller = serving(POLICY, lambda: now[0])
    assert ask(controller, policy="never").accepted
    assert decided(controller) == 0
    assert ask(controller, policy=POLICY).accepted
    assert decided(controller) == 3
    outcome = ask(controller, tune={"off_at": 10, "on_at": 6})
    assert policy_text(controller.policy) == "batch_size(off_at=10, on_at=6)"
    assert outcome.in_force is not None
    assert outcome.in_force.decides == {"batch_size": 12, "num_steps": 0, "by": "policy"}
    assert decided(controller) == 0
    ask(controller, num_steps=1, seconds=60)
    assert decided(controller) == 1
    now[0] += 61
    assert decided(controller) == 0
    ask(controller, num_steps=1)
    now[0] += 1e6
    assert decided(controller) == 1
    ask(controller, static=True)
    assert decided(controller) == 3
    assert controller.paused
    ask(controller, static=False)
    assert decided(controller) == 0


@pytest.mark.parametrize(
    ("asked", "decides"),
    [
        ({"policy": "never"}, {"num_steps": 0, "by": "policy"}),
        ({"tune": {"off_at": 10, "on_at": 6}}, {"num_steps": 0, "by": "policy"}),
        ({"num_steps": 1, "seconds": 5.0}, {"num_steps": 1, "by": "forced"}),
        ({"static": True}, {"num_steps": 3, "by": "SGLang"}),
        ({"static": False}, {"num_steps": 3, "by": "policy"}),
    ],
)
def test_a_dry_run_says_what_would_be_and_changes_nothing(asked, decides):
    controller, made = serving(POLICY), live.Changes()
    before, policy = controller.as_dict(), controller.policy
    keys = Change(**asked, dry_run=True, id=7).as_keys()
    outcome = live.request(made, keys, controller)
    assert outcome.accepted
    assert outcome.in_force is not None
    assert outcome.in_force.decides == {"batch_size": 12, **decides}
    assert controller.as_dict() == before
    assert controller.policy is policy
    told = made.as_dict()
    assert told["changes"] == {"applied": 0, "refused": 0}
    assert told["last_change"] is None
    assert (told["last_dry_run"]["id"], told["last_dry_run"]["dry_run"]) == (7, True)


def test_what_does_not_take_effect_at_once_is_said():
    controller = serving(POLICY)
    ask(controller, static=True)
    refused = ask(controller, num_steps=1)
    assert not refused.accepted
    assert "left to SGLang (static); resume first" in str(refused.reason)
    outcome = ask(controller, policy="never")
    assert outcome.in_force is not None
    assert "resume lets this policy decide" in outcome.in_force.notes[0]
    assert outcome.in_force.decides["by"] == "SGLang"
    assert decided(controller) == 3
    ask(controller, static=False)
    assert decided(controller) == 0
    ask(controller, num_steps=1)
    outcome = ask(controller, policy="always")
    assert outcome.in_force is not None
    assert "1 draft steps are forced" in outcome.in_force.notes[0]
    assert decided(controller) == 1
    keys = Change(policy=POLICY).as_keys()
    outcome = live.request(live.Changes(), keys, controller, most_requests=16)
    assert outcome.in_force is not None
    assert "the server runs at most 16 requests" in outcome.in_force.notes[0]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("test_live:Fails", "fails in decide() for the latest batch, KeyError: 'boom'"),
        ("test_live:Exits", "SystemExit: 3"),
    ],
)
def test_a_policy_that_cannot_decide_is_not_put_in_charge(policy, says):
    controller = serving(POLICY)
    outcome = ask(controller, policy=policy)
    assert not outcome.accepted
    assert says in str(outcome.reason)
    assert controller.failure is None
    assert decided(controller) == 3


@pytest.mark.usefixtures("here")
def test_a_new_policy_hears_what_steps_take_and_of_its_own_steps_only():
    controller = Controller(Always(), LADDER)
    timings = [StepTiming(num_steps=0, batch_size=1, seconds=0.01)]
    controller.observe_timings(timings)
    view = BatchView(batch_size=1, ladder=LADDER)
    before = controller.decide(view)
    controller.take(before)
    ask(controller, policy="test_live:Timed")
    assert controller.policy.heard == timings  # type: ignore[attr-defined]
    heard: list[StepOutcome] = []
    controller.policy.observe = heard.append  # type: ignore[method-assign]
    after = controller.decide(view)
    controller.take(after)
    controller.finished(before, [2])
    controller.finished(after, [1])
    assert [outcome.step for outcome in heard] == [after.step]


def test_after_a_failure_all_but_a_dry_run_is_refused():
    controller = serving(POLICY)
    controller.fail("a step failed", RuntimeError("boom"))
    for asked in ({"policy": "never"}, {"num_steps": 0}, {"static": True}, {"static": False}):
        outcome = ask(controller, **asked)
        assert not outcome.accepted
        assert "a step failed: RuntimeError: boom" in str(outcome.reason)
        assert "restart the server" in str(outcome.reason)
        dry = ask(controller, **asked, dry_run=True)
        assert dry.accepted
        assert dry.in_force is not None
        assert "until the server is restarted" in dry.in_force.notes[-1]
    assert policy_text(controller.policy) == POLICY


def test_where_dynspec_is_not_in_force_the_reason_is_said():
    made = live.Changes()
    keys = Change(policy="never").as_keys()
    outcome = live.request(made, keys, None, not_in_force="--pp-size is 2")
    assert not outcome.accepted
    assert outcome.reason == "dynspec is not in force: --pp-size is 2"
    assert made.as_dict()["changes"] == {"applied": 0, "refused": 1}


def test_a_policy_without_a_text_can_be_replaced_but_not_tuned():
    class Local(BatchSize):
        pass

    controller = serving(POLICY)
    controller.use(Local(off_at=8))
    outcome = ask(controller, tune={"off_at": 9})
    assert not outcome.accepted
    assert "Local" in str(outcome.reason)
    assert ask(controller, static=True).accepted
    assert ask(controller, static=False).accepted
    assert ask(controller, policy="never").accepted


def test_outcomes_of_all_schedulers_make_one_verdict():
    asked = Change(static=True, id=5)
    good = {"last_change": {"id": 5, "accepted": True, "reason": None}}
    bad = {"last_change": {"id": 5, "accepted": False, "reason": "no"}}
    assert change.verdict([good, good], asked)["accepted"]
    mixed = change.verdict([good, bad], asked)
    assert (mixed["accepted"], mixed["reason"]) == (False, "no")
    assert len(mixed["schedulers"]) == 2
    assert "was not started" in change.verdict([None], asked)["reason"]
    late = {"last_change": {"id": 6, "accepted": True, "reason": None}}
    assert "another change came right after" in change.verdict([late], asked)["reason"]


def test_a_server_without_the_route_serves_and_says_so_once(caplog, monkeypatch):
    name = Name("sglang.srt.nowhere:app", "read", "test")
    monkeypatch.setattr(contract, "ROUTE", (name,))
    with caplog.at_level(logging.WARNING, logger="sglang_dynspec"):
        route.add(ModuleType("http_server"))
    [record] = caplog.records
    assert "sglang.srt.nowhere:app is not there" in record.getMessage()
    assert "use /set_internal_state" in record.getMessage()


# --- a real server --------------------------------------------------------------------------------

KEY = "live-key"
START = "batch_size(off_at=4, on_at=3)"
PROMPTS = prompts(3, seed=31)
TOKENS = 48
WITHIN = 60.0  # s


class Live:
    """A server that is changed while it serves.

    Args:
        server: started with ``--admin-api-key``.
        expected: what its requests return, whatever is changed.
    """

    def __init__(self, server: Server, expected: list[list[int]]) -> None:
        self.server, self.expected = server, expected

    @contextmanager
    def load(self) -> Iterator[None]:
        """Keep a request of each prompt running; each must return what it did before."""
        stop, outputs = threading.Event(), [0] * len(PROMPTS)
        wrong: list[Any] = []

        def keep_asking(number: int) -> None:
            try:
                while not stop.is_set():
                    ids = self.server.generate(PROMPTS[number], TOKENS)
                    outputs[number] += 1
                    if ids != self.expected[number]:
                        wrong.append((number, ids))
            except Exception as error:
                wrong.append((number, error))

        threads = [threading.Thread(target=keep_asking, args=(n,)) for n in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert wrong == []
        assert all(outputs)

    def post(self, path: str, body: Any, key: str | None = KEY) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.server.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def status(self) -> dict[str, Any]:
        [status] = self.server.get("/dynspec")["schedulers"]
        return dict(status)

    def wait(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Wait until a status is as it should be."""
        deadline = time.monotonic() + WITHIN
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, status
        return status

    def through_route(self, asked: Change) -> dict[str, Any]:
        code, answer = self.post("/dynspec", asked.as_json())
        assert code == 200, answer
        assert answer["accepted"]
        [outcome] = answer["schedulers"]
        return dict(outcome)

    def through_keys(self, asked: Change) -> dict[str, Any]:
        code, updated = self.post("/set_internal_state", {"server_args": asked.as_keys()})
        assert (code, updated) == (200, [not asked.dry_run])
        name = "last_dry_run" if asked.dry_run else "last_change"
        return dict(self.status()[name])


@pytest.fixture(scope="module")
def serves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    log = tmp_path_factory.mktemp("live") / "server.log"
    options = {"admin_api_key": KEY}
    trace = {"SGLANG_DYNSPEC_TRACE": str(log.with_name("decisions.jsonl"))}
    with running_server("EAGLE3", log, options, SGLANG_DYNSPEC_POLICY=START, **trace) as server:
        expected = [server.generate(prompt, TOKENS) for prompt in PROMPTS]
        yield Live(server, expected)


@pytest.fixture(params=["through_route", "through_keys"])
def make(request: pytest.FixtureRequest, serves: Live) -> Iterator[Callable[..., dict[str, Any]]]:
    through = getattr(serves, request.param)
    yield lambda **asked: through(Change(**asked))
    serves.through_route(Change(static=False))
    serves.through_route(Change(policy=START))


def steps(status: dict[str, Any], num_steps: int) -> int:
    count = status["by_num_steps"].get(str(num_steps))
    return count["steps"] if count else 0


def test_every_change_takes_effect_under_load(serves, make):
    def runs(num_steps: int, passthrough: str | None = None) -> dict[str, Any]:
        """Wait until some steps have been run in a way, from now on."""
        before = serves.status()

        def so(status: dict[str, Any]) -> bool:
            if status["num_steps"] != num_steps:
                return False
            if passthrough is None:
                return steps(status, num_steps) > steps(before, num_steps) + 3
            count = before["passthrough"].get(passthrough, 0)
            return bool(status["passthrough"].get(passthrough, 0) > count + 3)

        return serves.wait(so)

    with serves.load():
        outcome = make(policy="never")
        assert outcome["accepted"]
        assert outcome["in_force"]["policy"] == "never"
        assert runs(0)["policy"] == "never"

        make(policy="batch_size(off_at=9, on_at=8)")
        runs(3)
        make(tune={"off_at": 2, "on_at": 1})
        status = runs(0)
        assert status["policy"] == "batch_size(off_at=2, on_at=1)"

        dry = make(policy="always", dry_run=True)
        assert dry["in_force"]["decides"]["num_steps"] == 3
        assert runs(0)["policy"] == "batch_size(off_at=2, on_at=1)"

        make(num_steps=3, seconds=3600.0)
        status = runs(3)
        assert status["forced"]["num_steps"] == 3
        assert status["switches_by_reason"]["forced"] >= 1

        make(static=False)
        assert runs(0)["forced"] is None

        make(static=True)
        status = runs(3, passthrough="paused")
        assert (status["state"], status["paused"]) == ("static", True)

        make(static=False)
        status = runs(0)
        assert (status["state"], status["paused"]) == ("in_force", False)
    assert serves.status()["last_change"]["what"] == "resume"


def test_what_a_request_asks_for_over_http(serves):
    def asking(wish: str) -> dict[str, Any]:
        before = serves.status()
        params = {"custom_params": {"dynspec": wish}, "temperature": 0, "max_new_tokens": TOKENS}
        body = {"input_ids": PROMPTS[0], "sampling_params": {**params, "ignore_eos": True}}
        answer = serves.server.get("/generate", body)
        assert answer["output_ids"] == serves.expected[0]
        after = serves.status()
        return {n: steps(after, n) - steps(before, n) for n in (0, 3)}

    run = asking("never")
    assert run[0] >= TOKENS - 2
    assert run[3] == 0
    serves.through_route(Change(policy="never"))
    run = asking("always")
    assert run[0] == 0
    assert run[3] > 0
    serves.through_route(Change(policy=START))


def test_the_trace_has_every_change_of_the_mode(serves):
    if serves.status()["switches"] < 2:  # run by itself
        serves.through_route(Change(num_steps=0))
        serves.server.generate(PROMPTS[0], TOKENS)
        serves.through_route(Change(static=False))
        serves.server.generate(PROMPTS[0], TOKENS)
    status = serves.status()
    trace = status["trace"]
    assert (trace["off"], trace["dropped"]) == (None, 0)

    def changes() -> list[dict[str, Any]]:
        lines = Path(trace["path"]).read_text(encoding="utf-8").splitlines(keepends=True)
        read = [json.loads(line) for line in lines if line.endswith("\n")]
        return [line for line in read if line.get("why") == "changed"]

    deadline = time.monotonic() + WITHIN
    while len(changes()) < status["switches"]:
        assert time.monotonic() < deadline, trace
    reasons = Counter(line["reason"] for line in changes())
    assert reasons == status["switches_by_reason"]


CYCLE = [
    Change(policy="never"),
    Change(num_steps=3),
    Change(static=False),
    Change(policy="batch_size(off_at=3, on_at=2)"),
    Change(tune={"off_at": 2, "on_at": 1}),
    Change(static=True),
    Change(policy="always"),
    Change(static=False),
    Change(num_steps=0, seconds=30.0),
    Change(static=False),
]


def test_a_hundred_changes_under_load_are_all_made_and_each_as_a_whole(serves, make):
    before = serves.status()["changes"]
    with serves.load():
        for asked in itertools.islice(itertools.cycle(CYCLE), 100):
            outcome = make(
                policy=asked.policy,
                tune=asked.tune,
                num_steps=asked.num_steps,
                seconds=asked.seconds,
                static=asked.static,
            )
            status = serves.status()
            assert outcome["what"] == str(asked)
            in_force = outcome["in_force"]
            forced = status["forced"] and status["forced"]["num_steps"]
            assert status["policy"] == in_force["policy"]
            assert status["paused"] == in_force["paused"]
            assert forced == in_force["forced"]
            assert status["last_change"]["number"] == outcome["number"]
        after = serves.status()["changes"]
    assert after["applied"] - before["applied"] == 100
    assert after["refused"] == before["refused"]


def test_what_is_refused_changes_nothing(serves):
    before = serves.status()
    for body, says in BAD_JSON:
        code, answer = serves.post("/dynspec", body)
        assert (code, answer["accepted"]) == (400, False)
        assert all(part in answer["reason"] for part in says)
    code, answer = serves.post("/dynspec", b"{")
    assert code == 400
    assert "no JSON" in answer["reason"]
    code, answer = serves.post("/dynspec", {"num_steps": 2})
    assert code == 400
    assert "this server can run 0, 3" in answer["reason"]
    numbers = {"dynspec_set_off": 3}, {"dynspec_static": 1, "pp_max_micro_batch_size": 8}
    for keys in numbers:
        code, updated = serves.post("/set_internal_state", {"server_args": keys})
        assert (code, updated) == (200, [False])
    after = serves.status()
    assert after["changes"]["refused"] == before["changes"]["refused"] + 3
    assert "pp_max_micro_batch_size is SGLang's own" in after["last_change"]["reason"]
    changing = ("changes", "last_change")
    assert {**after, **dict.fromkeys(changing)} == {**before, **dict.fromkeys(changing)}


def test_sglangs_own_keys_are_sglangs(serves):
    before = serves.status()
    own = {"server_args": {"pp_max_micro_batch_size": 8}}
    assert serves.post("/set_internal_state", own) == (200, [True])
    assert serves.status() == before


@pytest.mark.parametrize("key", [None, "wrong"])
def test_without_the_admin_key_nothing_can_be_changed(serves, key):
    before = serves.status()  # which takes none, as /server_info
    bodies = {
        "/dynspec": {"policy": "always"},
        "/set_internal_state": {"server_args": {"dynspec_policy=always": 1}},
    }
    for path, body in bodies.items():
        code, _ = serves.post(path, body, key)
        assert code == 401
    assert serves.status() == before


# --- the command line -----------------------------------------------------------------------------


@contextmanager
def without_route(url: str) -> Iterator[str]:
    """The URL of something between, that has no route /dynspec."""

    class Between(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.pass_on(None)

        def do_POST(self) -> None:
            self.pass_on(self.rfile.read(int(self.headers["Content-Length"])))

        def pass_on(self, body: bytes | None) -> None:
            headers = {
                k: v for k, v in self.headers.items() if k in ("Authorization", "Content-Type")
            }
            request = urllib.request.Request(url + self.path, body, headers)
            try:
                if self.path == "/dynspec":
                    raise urllib.error.HTTPError(url, 404, "Not Found", self.headers, None)
                with urllib.request.urlopen(request, timeout=60) as answer:
                    code, said = answer.status, answer.read()
            except urllib.error.HTTPError as error:
                code, said = error.code, error.read() if error.fp else b""
            self.send_response(code)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Between) as between:
        thread = threading.Thread(target=between.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{between.server_address[1]}"
        finally:
            between.shutdown()
            thread.join()


@pytest.fixture(params=["route", "no route"])
def url(request: pytest.FixtureRequest, serves: Live) -> Iterator[str]:
    if request.param == "route":
        yield serves.server.url
        return
    with without_route(serves.server.url) as between:
        yield between


def test_ctl(url, serves, capsys, monkeypatch):
    def ctl(*words: str, expect: int = 0) -> str:
        assert cli.main(["ctl", url, *words]) == expect
        said = capsys.readouterr()
        return said.out + said.err

    monkeypatch.setenv("DYNSPEC_ADMIN_API_KEY", KEY)
    assert "in force: policy never" in ctl("policy", "never")
    assert "in force, policy never" in ctl("status")
    said = ctl("policy", "batch_size(off_at=8, on_at=4)", "--dry-run")
    assert "would be in force: policy batch_size(off_at=8, on_at=4)" in said
    assert serves.status()["policy"] == "never"
    ctl("policy", "batch_size(off_at=8, on_at=4)")
    assert "policy batch_size(off_at=6, on_at=5)" in ctl("set", "off_at=6", "on_at=5")
    said = ctl("set", "off_ad=6", expect=1)
    assert "refused: off_ad is no parameter" in said
    assert "off_at (now 6)" in said
    assert "0 draft steps (forced)" in ctl("force", "0", "--for", "60")
    assert "0 draft steps forced for " in ctl("status")
    assert "SGLang alone (static)" in ctl("static")
    assert "static, as asked" in ctl("status")
    answer = json.loads(ctl("resume", "--json"))
    assert answer["accepted"]
    assert answer["schedulers"][0]["what"] == "resume"
    [status] = json.loads(ctl("status", "--json"))["schedulers"]
    assert status["policy"] == "batch_size(off_at=6, on_at=5)"
    monkeypatch.delenv("DYNSPEC_ADMIN_API_KEY")
    assert "asks for a key (HTTP 401)" in ctl("static", expect=2)
    assert "refuses the key" in ctl("static", "--admin-api-key", "x", expect=2)
    assert not serves.status()["paused"]


def test_ctl_says_what_is_wrong_before_it_asks_anybody(capsys):
    def ctl(*words: str) -> str:
        with suppress(SystemExit):  # from argparse
            assert cli.main(["ctl", *words]) == 2
        return str(capsys.readouterr().err)

    nobody = "127.0.0.1:9"
    assert "cannot reach http://127.0.0.1:9: " in ctl(nobody, "status")
    assert "is no URL of a server" in ctl("ftp://x", "status")
    assert "'off_at' is no NAME=NUMBER, such as off_at=48" in ctl(nobody, "set", "off_at")
    assert "'x' is no number" in ctl(nobody, "set", "off_at=x")
    assert "num_steps is 1.5; it must be a whole number" in ctl(nobody, "force", "1.5")
    assert "seconds is 0; it must be a number of seconds above 0" in ctl(
        nobody, "force", "1", "--for", "0"
    )
    assert "the policy is empty" in ctl(nobody, "policy", "")


# --- ranks ----------------------------------------------------------------------------------------

RANKS = """
    import asyncio, json
    from sglang_dynspec.engine import controller
    from sglang_dynspec.testing import cpu_engine

    FOLDER = {folder!r}
    take = controller.Controller.take

    def recording(self, decision):
        import torch.distributed as dist
        take(self, decision)
        with open(f"{{FOLDER}}/rank{{dist.get_rank()}}.txt", "a") as file:
            print(decision.num_steps, decision.batch_size, self.paused, file=file)

    controller.Controller.take = recording

    async def change(manager):
        from sglang.srt.managers.io_struct import SetInternalStateReq
        told = []
        for keys in {changes!r}:
            told += await manager.set_internal_state(SetInternalStateReq(server_args=keys))
        return told

    async def both(engine):
        greedy = dict(temperature=0, max_new_tokens={tokens}, ignore_eos=True)
        asking = engine.async_generate(input_ids={prompts!r}, sampling_params=greedy)
        return await asyncio.gather(asking, change(engine.tokenizer_manager))

    if __name__ == "__main__":
        import sglang, sglang_dynspec
        sglang_dynspec.activate(policy="never", strict=True)
        engine = sglang.Engine(
            **cpu_engine.server_args("EAGLE3", tp_size={tp_size}, log_level="warning")
        )
        outputs, told = engine.loop.run_until_complete(both(engine))
        status = engine.get_server_info()["internal_states"][0]["dynspec"]
        ids = [output["output_ids"] for output in outputs]
        print("REPORT " + json.dumps([ids, told, status]), flush=True)
        engine.shutdown()
"""


@pytest.mark.skipif(
    installed_release() == "0.5.9", reason="two ranks take long to start; the newest release has it"
)
def test_two_ranks_change_in_the_same_iteration(serves, tmp_path):
    changes = [asked.as_keys() for asked in CYCLE] * 2
    values = {"changes": changes, "tokens": TOKENS, "prompts": PROMPTS}
    done = run_ranks(2, tmp_path, RANKS, timeout=400, **values)
    [line] = [line for line in done.stdout.splitlines() if "REPORT " in line]
    ids, told, status = json.loads(line.partition("REPORT ")[2])
    assert ids == serves.expected
    assert told == [True] * len(changes)
    assert status["changes"] == {"applied": len(changes), "refused": 0}
    ran = [(tmp_path / f"rank{rank}.txt").read_text().splitlines() for rank in (0, 1)]
    assert ran[0] == ran[1]
    assert {line.split()[2] for line in ran[0]} == {"True", "False"}
    assert {line.split()[0] for line in ran[0]} == {"0", "3"}
