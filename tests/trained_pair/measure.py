"""What the draft states are worth: accept length after plain steps, with the trained pair.

Requests speculate, are decoded plainly for some steps, and speculate again, on the real scheduler
of the installed SGLang. Printed is the accept length of their first 50 speculative steps after
that, against the same stretch of the same text with speculation always on::

    python -P tests/trained_pair/measure.py --json figures.json     # with tests/ on PYTHONPATH

``--holes`` lets the ring keep so little that a hole of 100, 1,000 and 4,000 tokens is left, and
prints how acceptance recovers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import device

device.prepare()

from support.in_force import InForce, in_force, ring_of  # noqa: E402
from support.policies import PlainBetween  # noqa: E402
from support.trained import PAIR, held_out_prompts  # noqa: E402

from sglang_dynspec import Always  # noqa: E402
from sglang_dynspec.engine.dialect import installed_release  # noqa: E402
from sglang_dynspec.testing.scheduler import Output, Request  # noqa: E402

BEFORE = 10  # speculative steps first
AFTER = 50
PROMPT = 200
STATES = ("catch_up", "warm", "skip")


def requests(count: int, tokens: int) -> list[Request]:
    return [
        Request(input_ids=prompt, max_new_tokens=tokens)
        for prompt in held_out_prompts(count, PROMPT)
    ]


def stretch(output: Output, plain: int, first: int, last: int) -> tuple[int, int]:
    """Positions of the output where the speculative steps ``first`` to ``last`` after the plain
    ones begin and end."""
    start = 1 + BEFORE + plain + first  # the first chunk is the prefill's token
    chunks = output.chunks
    return sum(chunks[:start]), sum(chunks[: min(start + last - first, len(chunks) - 1)])


def steps_within(output: Output, begin: int, end: int) -> float:
    """Steps from one position to another; a step that lies across an end counts by its share."""
    at, steps = 0, 0.0
    for chunk in output.chunks:
        inside = min(at + chunk, end) - max(at, begin)
        steps += max(inside, 0) / chunk
        at += chunk
    return steps


def accept_lengths(
    outputs: Sequence[Output], always: Sequence[Output], plain: int, first: int, last: int
) -> tuple[float, float]:
    """Accept length of a stretch of steps, and with speculation always on of the same text."""
    tokens, ours, theirs = 0, 0.0, 0.0
    for output, other in zip(outputs, always, strict=True):
        begin, end = stretch(output, plain, first, last)
        tokens += end - begin
        ours += steps_within(output, begin, end)
        theirs += steps_within(other, begin, end)
    return tokens / ours, tokens / theirs


def run(server: InForce, asked: list[Request], plain: int, state: str) -> list[Output]:
    return server.run(PlainBetween(BEFORE, plain), asked, state)


def after_plain_steps(server: InForce, lengths: Sequence[int], count: int) -> list[dict[str, Any]]:
    rows = []
    for plain in lengths:
        asked = requests(count, plain + 4 * (BEFORE + AFTER) + 8)
        always = server.run(Always(), asked)
        for state in STATES:
            outputs = run(server, asked, plain, state)
            equal = [o.token_ids for o in outputs] == [o.token_ids for o in always]
            # Much is caught up with over more plain steps.
            postponed = server.controller.counts.postponed
            ours, theirs = accept_lengths(outputs, always, plain + postponed, 0, AFTER)
            row = {
                "plain_steps": plain,
                "postponed": postponed,
                "draft_state": state,
                "accept_length": round(ours, 3),
                "always_on": round(theirs, 3),
                "ratio": round(ours / theirs, 3),
                "output_equal": equal,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def recovery(server: InForce, holes: Sequence[int], count: int) -> list[dict[str, Any]]:
    kept, reach, rows = 16, 200, []
    for hole in holes:
        plain = hole + kept
        asked = requests(count, plain + 4 * (BEFORE + reach) + 8)
        always = server.run(Always(), asked)
        with ring_of(kept):
            outputs = run(server, asked, plain, "catch_up")
        row: dict[str, Any] = {"hole": hole, "ratio_by_steps": {}}
        for first, last in ((0, 10), (10, 25), (25, 50), (50, 100), (100, 200)):
            ours, theirs = accept_lengths(outputs, always, plain, first, last)
            row["ratio_by_steps"][f"{first}-{last}"] = round(ours / theirs, 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--plain", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--holes", type=int, nargs="*", default=None)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    holes = [100, 1000, 4000] if options.holes == [] else options.holes or []
    pool = {"max_total_tokens": 60_000, "context_length": 8000, "max_running_requests": 8}
    with in_force("EAGLE3", models=PAIR, draft_state="catch_up", **pool) as server:
        found = {
            "sglang": installed_release(),
            "after_plain_steps": after_plain_steps(server, options.plain, options.requests),
            "recovery": recovery(server, holes, options.requests),
        }
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
