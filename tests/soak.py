"""Hours of service in minutes: random load on a real scheduler with dynspec in force, on a CPU.

Requests of every kind arrive at random, some are aborted, the KV pool is too small for all of them,
and a policy changes the mode at random at every step, over 50,000 times in 30 minutes. What comes
back is held against the output of the same requests without dynspec, and after each round every KV
slot must be back (in sglang #13826 some were lost)::

    nox -s "soak(release='0.5.23')" -- --minutes 30

Exit code 1 after the first thing that is wrong, with the seed that leads to it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace
from typing import Any

from support import device

device.prepare()

from support.in_force import InForce, in_force, prompts  # noqa: E402
from support.policies import Toggle  # noqa: E402

from sglang_dynspec import Always  # noqa: E402
from sglang_dynspec.engine.dialect import installed_release, select  # noqa: E402
from sglang_dynspec.testing.scheduler import Output, Request  # noqa: E402

SERVER = {
    "skip_tokenizer_init": False,
    "grammar_backend": "xgrammar",
    "enable_return_hidden_states": True,
    "max_total_tokens": 900,
    "max_running_requests": 12,
    "chunked_prefill_size": 64,
    "schedule_conservativeness": 0.05,  # more is promised than there is: requests are retracted
}
KINDS: list[dict[str, Any]] = [
    {},
    {},
    {"sampling_params": {"logit_bias": {"9": 3.0, "77": 4.0}}},
    {"sampling_params": {"min_p": 0.2}},
    {"sampling_params": {"regex": "(w4|w5|w6|w7)(w10|w11|w12|w13){5,60}"}},
    {"sampling_params": {"stop_token_ids": [*range(60, 90)]}},
    {"max_new_tokens": 1},
]
if select(installed_release()).family != "0.5.9 to 0.5.11":
    KINDS.append({"return_logprob": True, "top_logprobs_num": 2})
EARLY = installed_release().startswith(("0.5.9", "0.5.10"))
if not EARLY:
    KINDS.append({"return_hidden_states": True})
# What these return depends on chance, or on the steps.
SAMPLED = {"temperature": 0.9, "sampling_params": {"top_k": 20, "top_p": 0.9}}
PENALISED = {"sampling_params": {"frequency_penalty": 0.8, "repetition_penalty": 1.3}}
CORPUS = 120


def corpus(seed: int) -> list[Request]:
    """Requests, each with what it asks for; when they arrive is decided anew in each round."""
    draw = random.Random(seed)
    return [
        replace(
            Request(
                input_ids=prompt,
                max_new_tokens=draw.randrange(1, 90),
                ignore_eos=False,
            ),
            **draw.choice(KINDS),
        )
        for prompt in prompts(CORPUS, seed=seed, longest=120)
    ]


def load(
    known: list[Request], expected: list[Output], draw: random.Random
) -> tuple[list[Request], list[Output | None]]:
    """A round of requests, and what each must return (None: anything)."""
    requests: list[Request] = []
    wanted: list[Output | None] = []
    step = 0
    sampled = draw.random() < 0.5
    for _ in range(draw.randrange(10, 40)):
        step += draw.choice((0, 0, 0, 1, 2, 15))
        i = draw.randrange(len(known))
        request = replace(known[i], arrive_at_step=step)
        if draw.random() < 0.1:
            other = SAMPLED if sampled and draw.random() < 0.5 else PENALISED
            requests.append(replace(request, return_logprob=False, **other))
            wanted.append(None)
            continue
        if draw.random() < 0.15:
            request = replace(request, abort_at_step=step + draw.randrange(0, 60))
        requests.append(request)
        # The tokens that a grammar leaves are as likely as each other to the tiny model. Alone the
        # first is taken; in a batch with sampling SGLang keeps all that tie, and draws.
        tied = sampled and "regex" in request.sampling_params
        # There the verification leaves the bias out and a prefill does not, so that a request which
        # is retracted, and prefilled anew, gets another token.
        biased = EARLY and "logit_bias" in request.sampling_params
        wanted.append(None if tied or biased else expected[i])
    return requests, wanted


def complaint(request: Request, output: Output, wanted: Output | None) -> str | None:
    """What is wrong with an output, or None."""
    if output.finish_reason is None:
        return "did not finish"
    if wanted is None:
        return None if output.token_ids or output.aborted else "no output"
    if output.aborted:
        # Of an aborted request SGLang returns all that its last speculative step has accepted.
        both = min(len(output.token_ids), len(wanted.token_ids))
        same = output.token_ids[:both] == wanted.token_ids[:both]
        # Where its grammar was still being compiled, SGLang returns a token of its prefill.
        same = same or ("regex" in request.sampling_params and both == 1)
        return None if same and request.abort_at_step is not None else "cut, or not as expected"
    if output.finish_reason.get("type") == "stop":
        # A run that reaches the length goes past its stop token on SGLang 0.5.9.
        wanted = replace(wanted, token_ids=wanted.token_ids[: len(output.token_ids)])
    if output.token_ids != wanted.token_ids:
        return f"{output.token_ids} instead of {wanted.token_ids}"
    if len(output.logprobs) != len(wanted.logprobs):
        return f"{len(output.logprobs)} log-probabilities instead of {len(wanted.logprobs)}"
    return None


def round_of(server: InForce, known: list[Request], expected: list[Output], seed: int) -> list[str]:
    """Run a round; slots are checked by ``server.run``."""
    draw = random.Random(seed)
    requests, wanted = load(known, expected, draw)
    outputs = server.run(
        Toggle(seed=seed), requests, draw.choice(("catch_up", "catch_up", "warm", "skip"))
    )
    wrong = [
        f"request {i}: {what}"
        for i, (request, output) in enumerate(zip(requests, outputs, strict=True))
        if (what := complaint(request, output, wanted[i])) is not None
    ]
    if server.controller.failure is not None:
        wrong.append(f"fell back: {server.controller.failure}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    options = parser.parse_args()
    known = corpus(seed=1)
    end = time.monotonic() + 60 * options.minutes
    rounds = requests = switches = 0
    steps = {0: 0, 3: 0}
    with in_force("EAGLE3", **SERVER) as server:
        expected = server.run(Always(), known)
        while time.monotonic() < end or not rounds:
            wrong = round_of(server, known, expected, options.seed + rounds)
            counts = server.controller.counts
            switches += counts.switches.total()
            for n, count in counts.by_num_steps.items():
                steps[n] += count.steps
                requests += count.requests
            rounds += 1
            if wrong:
                print(f"WRONG in round {rounds}, --seed {options.seed + rounds - 1}:")
                print("\n".join(wrong))
                return 1
    print(
        f"OK: SGLang {installed_release()}, {rounds} rounds, {steps[0]} plain and {steps[3]} "
        f"speculative steps, {requests} requests in them, {switches} changes of "
        "the mode; every output as expected, every slot back."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
