"""Requests of every kind: plain steps return what SGLang's own speculative steps do."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from support.in_force import InForce, ids, in_force, prompts
from support.policies import Alternate, Toggle

from sglang_dynspec import Always, Never
from sglang_dynspec.engine.dialect import installed_release, select
from sglang_dynspec.testing.scheduler import InProcessScheduler, Output, Request

# Grammars and stop strings need a tokenizer, whose words are "w4" to "w511".
SERVER = {
    "skip_tokenizer_init": False,
    "grammar_backend": "xgrammar",
    "enable_return_hidden_states": True,
    "enable_custom_logit_processor": True,
}

OLDEST = select(installed_release()).family == "0.5.9 to 0.5.11"
"""Releases whose verification leaves out penalties and biases (to 0.5.10), and on which dynspec
leaves log-probabilities to SGLang."""

# Written as SGLang writes one; what it forbids, speculation proposes all the same.
FORBIDDEN = [*range(64, 320)]
FORBID = DisallowedTokensLogitsProcessor.to_str()

KINDS: dict[str, dict[str, Any]] = {
    "logit_bias": {"sampling_params": {"logit_bias": {"9": 3.0, "77": 4.0}}},
    "min_p": {"sampling_params": {"min_p": 0.2}},
    "regex": {
        "ignore_eos": False,
        "sampling_params": {"regex": "(w4|w5|w6|w7|w8|w9)(w10|w11|w12|w13|w14){10,60}"},
    },
    "ebnf": {
        "ignore_eos": False,
        "sampling_params": {"ebnf": 'root ::= ("w20" "w21"? | "w22" | "w23")+'},
    },
    "stop_token": {
        "ignore_eos": False,
        "sampling_params": {"stop_token_ids": [*range(60, 90), 106, 258]},
    },
    "one_token": {"max_new_tokens": 1},
    "custom_processor": {
        "custom_logit_processor": FORBID,
        "sampling_params": {"custom_params": {"token_ids": FORBIDDEN}},
    },
}
IGNORED = {"custom_processor"}
"""Kinds that SGLang's verification leaves out, so that only the prefill's token obeys them."""
if OLDEST:  # to 0.5.10
    IGNORED.add("logit_bias")
if not OLDEST:
    KINDS["logprobs"] = {"return_logprob": True, "top_logprobs_num": 3}
if select(installed_release()).returns_hidden_states:
    KINDS["hidden_states"] = {"return_hidden_states": True}
EMBEDDINGS: dict[str, Any] = {}
"""Embeddings in the place of a prompt's first tokens."""
if find_spec("sglang.srt.managers.embed_types"):  # from 0.5.11 on
    from sglang.srt.managers.embed_types import PositionalEmbeds

    OTHERS = torch.linspace(-1, 1, 2 * 64).reshape(2, 64)
    OVERRIDES = PositionalEmbeds(embeds=OTHERS, positions=[0, 1])
    EMBEDDINGS["fields"] = {"positional_embed_overrides": OVERRIDES}
if installed_release() == "0.5.23":
    # Before, SGLang's verification puts them into the place of its tokens, too.
    KINDS["embeddings"] = EMBEDDINGS
STOP = {"sampling_params": {"stop": ["w10", "w33"]}}
PENALTIES = {
    "sampling_params": {
        "frequency_penalty": 1.5,
        "presence_penalty": 1.0,
        "repetition_penalty": 1.6,
        "min_new_tokens": 8,
    }
}
OTHER_KINDS = {"none": {}, "penalties": PENALTIES, "stop": STOP}


def requests(kind: dict[str, Any], count: int = 4, seed: int = 3) -> list[Request]:
    return [
        Request(input_ids=p, arrive_at_step=3 * i, **{"max_new_tokens": 30, **kind})
        for i, p in enumerate(prompts(count, seed=seed))
    ]


@pytest.fixture(scope="module")
def without_speculation() -> dict[str, list[list[int]]]:
    with InProcessScheduler(None, **SERVER) as scheduler:
        outputs = {
            name: ids(scheduler.run(requests(kind)))
            for name, kind in {**OTHER_KINDS, **KINDS}.items()
        }
        # Prompts that are not in the radix cache.
        outputs["new_embeddings"] = ids(scheduler.run(requests(EMBEDDINGS, seed=33)))
        return outputs


@pytest.fixture(scope="module")
def server(without_speculation: object) -> Iterator[InForce]:
    with in_force("EAGLE3", **SERVER) as made:
        yield made


def assert_same(outputs: list[Output], theirs: list[Output]) -> None:
    assert ids(outputs) == ids(theirs)
    for ours, wanted in zip(outputs, theirs, strict=True):
        assert ours.finish_reason == wanted.finish_reason
        assert len(ours.logprobs) == len(wanted.logprobs)
        assert ours.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
        for top, wanted_top in zip(ours.top_logprobs, wanted.top_logprobs, strict=True):
            assert top == pytest.approx(wanted_top, abs=1e-4)
        # A speculative step appends rows past the end of the output as well.
        assert bool(ours.hidden_states) == bool(wanted.hidden_states)
        for row, wanted_row in zip(ours.hidden_states[1:], wanted.hidden_states[1:], strict=False):
            assert row == pytest.approx(wanted_row, abs=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_under_toggling(server, without_speculation, kind):
    theirs = server.run(Always(), requests(KINDS[kind]))
    assert server.steps(0) == 0
    for policy, draft_state in ((Alternate(), "catch_up"), (Toggle(seed=4), "skip")):
        outputs = server.run(policy, requests(KINDS[kind]), draft_state)
        assert_same(outputs, theirs)
        assert kind == "one_token" or server.steps(0) > 0
        assert set(server.controller.counts.passthrough) <= {"prefill", "mixed"}
        assert server.controller.failure is None
    if kind not in IGNORED:
        assert ids(theirs) == without_speculation[kind]
    if kind in ("logit_bias", "regex", "ebnf", "stop_token", "custom_processor", "embeddings"):
        assert without_speculation[kind] != without_speculation["none"]


@pytest.mark.skipif(not EMBEDDINGS, reason="SGLang has had them since 0.5.11")
def test_embeddings_of_a_prompt_are_of_that_alone(server, without_speculation, monkeypatch):
    # A step with them runs without CUDA graphs, and on one rank of DP attention that hangs.
    init_new, in_steps = ForwardBatch.init_new, []

    def noting(batch: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        made = init_new(batch, runner, *args, **kwargs)
        if made.forward_mode.is_decode():
            in_steps.append(made.replace_embeds)
        return made

    monkeypatch.setattr(ForwardBatch, "init_new", noting)
    outputs = server.run(Never(), requests(EMBEDDINGS, seed=33))
    assert ids(outputs) == without_speculation["new_embeddings"]
    assert in_steps
    assert set(in_steps) == {None}


def test_a_stop_string_ends_the_text(server, without_speculation):
    for policy in (Never(), Alternate()):
        outputs = server.run(policy, requests(STOP))
        for output, wanted in zip(outputs, without_speculation["stop"], strict=True):
            # SGLang 0.5.9 also returns what a speculative step has accepted after it.
            assert output.token_ids[: len(wanted)] == wanted
            assert len(output.token_ids) < 30
    assert without_speculation["stop"] != without_speculation["none"]


def test_log_probabilities_are_as_many_as_tokens(server):
    # As in sglang #17349, where a switch left some out.
    if OLDEST:
        pytest.skip("left to SGLang")
    outputs = server.run(Alternate(), requests(KINDS["logprobs"]))
    for output in outputs:
        assert len(output.logprobs) == len(output.token_ids) == 30
        assert [len(top) for top in output.top_logprobs] == [3] * 30
        assert all(
            top[0] >= value - 1e-4
            for top, value in zip(output.top_logprobs, output.logprobs, strict=True)
        )


def test_a_row_of_hidden_states_for_each_token(server):
    if "hidden_states" not in KINDS:
        pytest.skip("SGLang returns other rows")
    for draft_state in ("catch_up", "warm", "skip"):
        outputs = server.run(Never(), requests(KINDS["hidden_states"]), draft_state)
        for output in outputs:
            # The prefill's rows together, then one for each token but the first.
            assert len(output.hidden_states) == len(output.token_ids) == 30
            assert len({tuple(row) for row in output.hidden_states[1:]}) > 20


def test_penalties_are_counted_once(server, without_speculation):
    # As in sglang #22049.
    outputs = ids(server.run(Never(), requests(PENALTIES)))
    assert server.steps(0) > 0
    if installed_release() in ("0.5.9", "0.5.10"):  # their verification leaves penalties out
        assert outputs == ids(server.run(Always(), requests(PENALTIES)))
    else:
        assert outputs == without_speculation["penalties"] != without_speculation["none"]
    # Mixed with speculative steps, which count one token of each run, no output is right by itself.
    for draft_state in ("catch_up", "skip"):
        mixed = server.run(Alternate(), requests(PENALTIES), draft_state)
        assert [len(output.token_ids) for output in mixed] == [30] * 4
        assert server.controller.failure is None


def test_all_kinds_in_one_batch(server):
    together = [
        request
        for i, kind in enumerate(KINDS.values())
        for request in requests({**kind, "rid": None}, count=2)[i % 2 :]
    ]
    theirs = server.run(Always(), together)
    outputs = server.run(Toggle(seed=5), together, "skip")
    assert_same(outputs, theirs)
    assert server.steps(0) > 0
    assert server.steps(3) > 0
    assert server.controller.failure is None
