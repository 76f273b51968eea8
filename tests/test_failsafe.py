"""What goes wrong must not stop a server, nor change a token."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from support.in_force import InForce, ids, in_force, prompts, reference
from support.policies import Alternate, FailsAt

import sglang_dynspec
from sglang_dynspec import Always, Never, Policy
from sglang_dynspec.engine import (
    batch_prep,
    draft_state,
    install,
    results,
    server_arguments,
    support,
)
from sglang_dynspec.engine.catch_up import CatchUp
from sglang_dynspec.engine.decode_graph import PlainTarget
from sglang_dynspec.engine.ranks import Agreement
from sglang_dynspec.engine.temporarily import temporarily
from sglang_dynspec.errors import InstallError
from sglang_dynspec.testing import cpu_engine
from sglang_dynspec.testing.scheduler import InProcessScheduler, Request

REQUESTS = [
    Request(input_ids=p, max_new_tokens=n)
    for p, n in zip(prompts(4, seed=8), (40, 25, 60, 10), strict=True)
]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return reference(REQUESTS)


@pytest.fixture
def server(expected: object) -> Iterator[InForce]:
    # A failure is for good, so each test has a server of its own.
    with in_force("EAGLE3") as made:
        yield made


def boom(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    "answer", [boom, lambda: -1, lambda: "three"], ids=["raises", "negative", "text"]
)
def test_a_policy_that_fails_midway(server, expected, caplog, answer):
    with caplog.at_level(logging.ERROR, logger="sglang_dynspec"):
        outputs = server.run(FailsAt(7, answer), REQUESTS)
    assert ids(outputs) == expected
    assert server.steps(0) == 3
    assert server.controller.counts.passthrough["static"] > 0
    assert len([r for r in caplog.records if r.name == "sglang_dynspec"]) == 1
    status = sglang_dynspec.status()
    assert status["state"] == "static"
    assert "FailsAt" in status["error"]
    # For good: another policy is not asked either.
    assert ids(server.run(Never(), REQUESTS)) == expected
    assert server.steps(0) == 0


class AfterCalls:
    """Fails at the nth call, before or after doing what it stands for."""

    def __init__(self, original: Any, n: int, after: bool) -> None:
        self.original, self.left, self.after = original, n, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not self.after:
            boom()
        result = self.original(*args, **kwargs)
        if self.left == 0:
            boom()
        return result


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("part", ["target", "result", "draft", "skip"])
def test_a_plain_step_that_fails_midway_is_run_by_sglang(
    server, expected, monkeypatch, caplog, part, after
):
    owner, name = {
        "target": (install.runtime().dialect, "forward_target"),
        "result": (install.runtime().dialect, "set_result"),
        "draft": (install.runtime().draft_extend, "run"),
        "skip": (draft_state, "skip"),
    }[part]
    monkeypatch.setattr(owner, name, AfterCalls(getattr(owner, name), 5, after))
    outputs = server.run(Alternate(), REQUESTS, "skip" if part == "skip" else "warm")
    assert ids(outputs) == expected
    assert "a plain decode step failed" in sglang_dynspec.status()["error"]
    assert server.steps(0) == 4
    assert server.steps(3) > 4
    assert "boom" in caplog.text


@pytest.mark.parametrize("owner", [batch_prep, results], ids=["decide", "observe"])
def test_a_bug_of_ours_beside_the_step_is_survived(server, expected, monkeypatch, owner):
    monkeypatch.setattr(owner, "decide" if owner is batch_prep else "observe", boom)
    assert ids(server.run(Alternate(), REQUESTS)) == expected
    assert sglang_dynspec.status()["state"] == "static"


def test_deactivate_gives_the_next_step_back(server, expected):
    assert ids(server.run(Never(), REQUESTS)) == expected
    controller = server.controller
    assert controller.counts.by_num_steps.keys() == {0}
    sglang_dynspec.deactivate()
    assert sglang_dynspec.status()["state"] == "inactive"
    outputs = server.scheduler.run(REQUESTS)
    assert ids(outputs) == expected
    assert controller.counts.by_num_steps.keys() == {0}
    assert max(max(output.chunks) for output in outputs) > 1  # speculation, SGLang's own


class DeactivatesAt(Policy):
    """Has dynspec deactivated in the middle of a step's preparation."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.left = step

    def decide(self, batch: Any) -> int:
        self.left -= 1
        if self.left == 0:
            sglang_dynspec.deactivate()
        return 0


def test_wrappers_entered_just_before_a_deactivation_pass_through(server):
    with temporarily(install._state, runtime=None):
        assert install._prepare_for_decode(lambda: "theirs", None, (), {}) == "theirs"
        assert install._forward(lambda batch: batch, None, ("batch",), {}) == "batch"
        assert install._process_result(lambda *args: args, None, (1, 2), {}) == (1, 2)


def test_activation_after_the_scheduler_says_that_it_came_too_late(server, caplog):
    sglang_dynspec.deactivate()
    with caplog.at_level(logging.WARNING, logger="sglang_dynspec"):
        sglang_dynspec.activate(policy="never")
    status = sglang_dynspec.status()
    assert status["state"] == "refused"
    assert "was built before" in status["reason"]
    assert "was built before" in caplog.text


def test_deactivate_from_within_a_step(server, expected):
    policy = DeactivatesAt(5)
    server.controller.use(policy)
    assert ids(server.scheduler.run(REQUESTS)) == expected
    assert policy.left == 0


@pytest.fixture
def captures_graphs(server, monkeypatch) -> PlainTarget:
    """A target on which SGLang has graphs, so far as we can tell, and capturing ours fails."""
    runtime = install.runtime()
    runner = runtime.worker.target_worker.model_runner
    monkeypatch.setattr(runner, runtime.dialect.graph_runner, object())

    def out_of_memory(model_runner: Any, *, keep_hidden: bool) -> Any:
        assert model_runner.spec_algorithm.is_none()
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(runtime.dialect, "capture_decode_graphs", out_of_memory)
    return PlainTarget(runtime.dialect, runtime.worker, Agreement())


def test_graphs_that_cannot_be_captured_are_done_without(
    server, captures_graphs, expected, caplog, monkeypatch
):
    runner = install.runtime().worker.target_worker.model_runner
    before = dict(vars(runner))
    with caplog.at_level(logging.ERROR, logger="sglang_dynspec"):
        captures_graphs.capture(keep_hidden=False, strict=False)
    assert "OutOfMemoryError: no room" in caplog.text
    assert "lower --mem-fraction-static or --cuda-graph-max-bs" in caplog.text
    assert vars(runner) == before
    assert captures_graphs.captured is None
    install.runtime().target = captures_graphs
    monkeypatch.undo()
    assert ids(server.run(Alternate(), REQUESTS)) == expected


def test_graphs_are_captured_anew_where_sglang_does_so(server, expected, monkeypatch):
    runtime = install.runtime()
    runner, attribute = runtime.worker.target_worker.model_runner, runtime.dialect.graph_runner
    captured: list[Any] = []

    def capture_decode_graphs(model_runner: Any, *, keep_hidden: bool) -> dict[str, Any]:
        captured.append(keep_hidden)
        return {attribute: None}  # as on this device, so that steps run

    monkeypatch.setattr(runtime.dialect, "capture_decode_graphs", capture_decode_graphs)
    monkeypatch.setattr(
        runtime, "target", PlainTarget(runtime.dialect, runtime.worker, Agreement())
    )
    with temporarily(runner, **{attribute: object()}):
        runtime.target.capture(keep_hidden=True, strict=True)
        runtime.target.renew()
        assert captured == [True]
    # Gone altogether here, because a CPU has none; then steps run eagerly.
    assert runtime.target.captured is not None
    assert ids(server.run(Never(), REQUESTS)) == expected
    assert runtime.target.captured is None
    with temporarily(runner, **{attribute: object()}):
        runtime.target.capture(keep_hidden=True, strict=True)
    with temporarily(runner, **{attribute: object()}):
        runtime.target.renew()
        assert captured == [True] * 3
        assert runtime.target.captured is not None


def test_dp_attention_stays_static_with_hidden_states_of_another_size(
    server, expected, monkeypatch
):
    current = install.runtime()
    monkeypatch.setattr(current.dialect, "kept_hidden_size", lambda _: 16)
    ring = CatchUp(current.dialect, current.worker, 1 << 20, replicas=2)
    with temporarily(current, catch_up=ring):
        outputs = server.run(Never(), REQUESTS)
    assert ids(outputs) == expected
    assert "SGLANG_DYNSPEC_DRAFT_STATE=warm" in server.controller.failure
    assert server.steps(0) == 0


def test_strict_does_not_do_without_graphs(server, captures_graphs):
    with pytest.raises(InstallError, match=r"OutOfMemoryError: no room.*--mem-fraction-static"):
        captures_graphs.capture(keep_hidden=False, strict=True)


def test_a_server_that_is_not_supported_serves_without_us_and_says_so(caplog):
    says = "the server runs without speculative decoding"
    sglang_dynspec.activate(policy="never")
    try:
        with InProcessScheduler(None) as scheduler:
            assert scheduler.run(REQUESTS)[0].token_ids
        status = sglang_dynspec.status()
        assert status["state"] == "refused"
        assert says in status["reason"]
        assert says in caplog.text
    finally:
        sglang_dynspec.deactivate()


def test_a_threshold_that_no_batch_reaches_is_said_at_start(caplog):
    sglang_dynspec.activate(policy="min_dwell(batch_size(off_at=64), steps=5)")
    try:
        with InProcessScheduler("EAGLE3", max_running_requests=16):
            assert sglang_dynspec.status()["state"] == "in_force"
    finally:
        sglang_dynspec.deactivate()
    assert "decodes plainly from 64 requests on, but the server runs at most 16" in caplog.text
    assert "lower off_at to 16 or less" in caplog.text


# --- batches that plain decode leaves to SGLang ---------------------------------------------------


@pytest.fixture(scope="module")
def shared(expected: object) -> Iterator[InForce]:
    with in_force("EAGLE3", enable_return_hidden_states=True) as made:
        yield made


@pytest.fixture
def leaves_hidden_states(shared: InForce, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave such requests to SGLang, as on releases up to 0.5.13."""
    monkeypatch.setattr(type(shared.dialect), "returns_hidden_states", False)


def hidden_states_request() -> Request:
    return Request(input_ids=[5, 6, 7], max_new_tokens=12, return_hidden_states=True)


@pytest.mark.usefixtures("leaves_hidden_states")
def test_what_plain_decode_does_not_do_goes_to_sglang_and_is_counted(shared):
    [theirs] = shared.run(Always(), [hidden_states_request()])
    [output] = shared.run(Never(), [hidden_states_request()])
    assert shared.steps(0) == 0
    assert shared.steps(3) > 0
    assert shared.controller.counts.passthrough["hidden_states"] == shared.steps(3)
    assert output.token_ids == theirs.token_ids


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"multimodal_inputs": [None, object()]}, "multimodal"),
        (
            {"sampling_info.sampling_seed": object(), "sampling_info.is_all_greedy": False},
            "sampling_seed",
        ),
        ({"sampling_info.has_watermark_candidates": True}, "watermark"),
        ({"sampling_info.return_sampling_masks": [False, True]}, "sampling_mask"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_reason_is_seen_on_a_real_batch(shared, monkeypatch, changed, reason):
    if reason in ("watermark", "sampling_mask") and not sampling_info_has(*changed):
        pytest.skip("a later SGLang's")
    blocked = shared.dialect.blocked
    seen = []

    def with_change(batch: Any) -> str | None:
        before = blocked(batch)
        with ExitStack() as stack:
            for path, value in changed.items():
                owner = batch.sampling_info if path.startswith("sampling_info.") else batch
                stack.enter_context(temporarily(owner, **{path.rpartition(".")[2]: value}))
            seen.append((before, blocked(batch)))
        return before

    monkeypatch.setattr(shared.dialect, "blocked", with_change)
    shared.run(Never(), REQUESTS[:1])
    assert set(seen) == {(None, reason)}


def sampling_info_has(path: str) -> bool:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    return hasattr(SamplingBatchInfo, path.rpartition(".")[2])


@pytest.mark.usefixtures("leaves_hidden_states")
def test_a_batch_with_one_such_request_goes_to_sglang_until_it_is_done(shared, expected):
    requests = [*REQUESTS, hidden_states_request()]
    outputs = shared.run(Never(), requests)
    assert ids(outputs)[:4] == expected
    assert shared.steps(0) > 0
    assert shared.controller.counts.passthrough["hidden_states"] > 0


# --- servers that dynspec stays out of ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("pp_size", 2, "--pp-size is 2"),
        ("disaggregation_mode", "decode", "--disaggregation-mode is decode"),
        ("speculative_adaptive", True, "--speculative-adaptive"),
        ("enable_lora", True, "LoRA"),
    ],
)
def test_server_arguments_that_are_refused(shared, monkeypatch, name, value, says):
    scheduler = shared.scheduler.scheduler
    assert support.refusal(scheduler) is None
    # Beside the real arguments, which later releases make read-only.
    changed = Overlaid(scheduler.server_args, name, value)
    monkeypatch.setattr(scheduler, "server_args", changed)
    assert says in support.refusal(scheduler)


@pytest.mark.parametrize(
    ("decided", "says"),
    [
        ({"attn_cp_size": 2}, "--attn-cp-size is 2"),
        ({"tp_size": 2, "moe_a2a_backend": "deepep"}, "--moe-a2a-backend is deepep"),
        ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling"),
    ],
)
def test_what_sglang_makes_of_the_arguments_is_looked_at(shared, monkeypatch, decided, says):
    scheduler = shared.scheduler.scheduler
    record = scheduler.server_args
    if not hasattr(record, "resolve_once"):
        pytest.skip("up to 0.5.18 that stands in the arguments themselves")
    made = [*record._resolved_overrides, ("of a model", decided)]
    monkeypatch.setattr(scheduler, "server_args", Overlaid(record, "_resolved_overrides", made))
    assert says in support.refusal(scheduler)


def test_as_many_ranks_of_dp_attention_as_sglang_has_made(shared, monkeypatch):
    scheduler = shared.scheduler.scheduler
    record = scheduler.server_args
    if not hasattr(record, "resolve_once"):
        pytest.skip("up to 0.5.18 that stands in the arguments themselves")
    decided = {"tp_size": 4, "enable_dp_attention": True, "dp_size": 2}
    made = [*record._resolved_overrides, ("of a model", decided)]
    monkeypatch.setattr(scheduler, "server_args", Overlaid(record, "_resolved_overrides", made))
    assert support.attention_replicas(record) == 1
    exchange = install._exchange(scheduler, 3)
    assert exchange is not None
    assert install._ranks(scheduler, 3, Agreement()) is None


@pytest.mark.parametrize("name", ["enable_dp_attention", "attn_dp_size"])
def test_what_dp_attention_is_refused_with(shared, monkeypatch, name):
    scheduler = shared.scheduler.scheduler
    two = Overlaid(Overlaid(scheduler.server_args, "tp_size", 2), "dp_size", 2)
    one, two = Overlaid(two, name, 0), Overlaid(two, name, 2)  # the second from 0.5.22 on
    assert support.attention_replicas(one) == 1
    assert support.attention_replicas(two) == 2
    monkeypatch.setattr(scheduler, "server_args", two)
    assert support.refusal(scheduler) is None
    monkeypatch.setattr(scheduler, "server_args", Overlaid(two, "moe_a2a_backend", "deepep"))
    assert "--moe-a2a-backend is deepep" in support.refusal(scheduler)
    of_draft = Overlaid(two, "speculative_moe_a2a_backend", "deepep")
    monkeypatch.setattr(scheduler, "server_args", of_draft)
    assert "--speculative-moe-a2a-backend is deepep" in support.refusal(scheduler)
    monkeypatch.setattr(scheduler, "server_args", Overlaid(two, "elastic_ep_backend", "mooncake"))
    assert "elastic EP" in support.refusal(scheduler)
    monkeypatch.setattr(scheduler, "server_args", two)
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "1")
    assert "SGLANG_SCHEDULER_SKIP_ALL_GATHER is not supported" in support.refusal(scheduler)
    monkeypatch.delenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER")
    monkeypatch.setattr(scheduler, "server_args", one)
    assert support.refusal(scheduler) is None


def test_dp_attention_as_it_is_asked_for():
    words = [
        "--model-path",
        "dummy",
        "--device",
        "cpu",
        "--speculative-algorithm",
        "EAGLE3",
        "--tp-size",
        "2",
    ]
    given = server_arguments._parsed([*words, "--enable-dp-attention", "--dp-size", "2"])
    assert support.attention_replicas(given) == 2
    assert support.attention_replicas(server_arguments._parsed([*words])) == 1
    if hasattr(given, "attn_dp_size"):
        given = server_arguments._parsed([*words, "--attn-dp-size", "2"])
        assert support.attention_replicas(given) == 2
    assert support.refusals_ahead(given) == []


class Overlaid:
    """An object with one attribute changed."""

    def __init__(self, below: Any, name: str, value: Any) -> None:
        self._below = below
        setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


def test_other_workers_and_models_are_refused(shared, monkeypatch):
    from sglang.srt.speculative.multi_layer_eagle_worker_v2 import MultiLayerEagleWorkerV2

    scheduler = shared.scheduler.scheduler
    monkeypatch.setattr(scheduler.draft_worker, "topk", 4)
    assert support.refusal(scheduler) is None
    monkeypatch.setattr(scheduler, "page_size", 16)
    assert "topk is 4 and --page-size 16, and only one" in support.refusal(scheduler)
    monkeypatch.setattr(scheduler, "draft_worker", object())
    assert "through object, and only EAGLEWorkerV2 and Standalone" in support.refusal(scheduler)
    multi_layer = object.__new__(MultiLayerEagleWorkerV2)
    monkeypatch.setattr(scheduler, "draft_worker", multi_layer)
    assert "without --enable-multi-layer-eagle" in support.refusal(scheduler)
    monkeypatch.undo()
    monkeypatch.setattr(scheduler, "is_hybrid_swa", True)
    assert "sliding-window" in support.refusal(scheduler)
    monkeypatch.undo()
    config = scheduler.draft_worker.target_worker.model_runner.model_config
    monkeypatch.setattr(config, "model_is_mrope", True, raising=False)
    assert "M-RoPE" in support.refusal(scheduler)


def test_pages_are_refused_in_pools_that_hold_more_than_keys_and_values(shared, monkeypatch):
    scheduler = shared.scheduler.scheduler
    monkeypatch.setattr(scheduler, "page_size", 64)
    assert support.refusal(scheduler) is None
    monkeypatch.setattr(scheduler.token_to_kv_pool_allocator, "get_kvcache", object)
    says = support.refusal(scheduler)
    assert "pages of 64 tokens" in says
    assert "class object" in says
    monkeypatch.setattr(scheduler, "page_size", 1)
    assert support.refusal(scheduler) is None


# From the release on that speculates without overlap in EAGLEWorkerV2, that drafts trees as well.
TREES = cpu_engine.speculates_without_overlap()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("EAGLE", None),
        ("NEXTN", None),
        ("STANDALONE", None),
        ("NGRAM", "--speculative-algorithm is NGRAM, and only EAGLE, EAGLE3 and STANDALONE are"),
        ("EAGLE --enable-multi-layer-eagle", "multi-layer EAGLE is not supported yet; start"),
        ("EAGLE3 --speculative-eagle-topk 4", None if TREES else "up to SGLang 0.5.12 only 1"),
    ],
)
def test_algorithms_that_are_refused_before_a_server_is_started(arguments, says):
    words = ["--model-path", "dummy", "--device", "cpu", "--speculative-algorithm"]
    given = server_arguments._parsed([*words, *arguments.split()])
    refusals = support.refusals_ahead(given)
    assert refusals == [] if says is None else says in " ".join(refusals)
