"""What must hold of a server under a load of many clients, in --ramp and in --wave."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

_MAX_GROWTH_MIB = 512  # of device memory; the caches of the warm-up are not counted
# SGLang's words and ours, for graphs of any kind.
_CAPTURE = re.compile(r"(?=.*\bcaptur(?:e|ed|ing)\b).*\b(?:graphs?|batches|num tokens)\b", re.I)


def problems(found: dict[str, Any]) -> list[str]:
    """Return what is wrong, a sentence each."""
    before, settled, after = found["before"], found["settled"], found["after"]
    wrong = []
    if found["errors"]:
        wrong.append(
            f"{found['errors']} of {found['sent']} requests failed: "
            f"{'; '.join(found['first_errors'])}"
        )
    used_before, used_after = before["used_kv_tokens"], after["used_kv_tokens"]
    if used_before != used_after:
        wrong.append(f"{used_after} KV slots are in use at rest, {used_before} were before")
    grown = growth(settled["gpu_used_mib"], after["gpu_used_mib"])
    if grown is not None and grown > _MAX_GROWTH_MIB:
        wrong.append(f"device memory grew by {grown} MiB after the warm-up")
    if found["captures"]:
        wrong.append(
            f"{len(found['captures'])} lines of the log tell of graphs captured while serving, the "
            f"first: {found['captures'][0]}"
        )
    outputs = found.get("outputs")
    # In less than float32, differently cut batches round differently: counted, not held against.
    if outputs is not None and outputs["different"] and found["dtype"] == "float32":
        wrong.append(
            f"{outputs['different']} of {outputs['compared']} outputs are not those without "
            "speculation"
        )
    return wrong


def compare(answers: dict[str, dict[str, int]], expected: Sequence[set[str]]) -> dict[str, int]:
    """Count answers that are equal to those without speculation, and those that differ from an
    answer that does not itself vary.

    Args:
        answers: by prompt, how often which digest came.
        expected: by prompt, the digests without speculation.
    """
    counts = {"compared": 0, "equal": 0, "different": 0}
    for prompt, digests in answers.items():
        known = expected[int(prompt)]
        for digest, times in digests.items():
            counts["compared"] += times
            counts["equal"] += times * (digest in known)
            counts["different"] += times * (digest not in known and len(known) == 1)
    return {**counts, "varying": sum(len(known) > 1 for known in expected)}


def by_prompt(passes: Iterable[Sequence[str]]) -> list[set[str]]:
    """Return the different answers to each prompt, of several passes over all prompts."""
    return [set(answers) for answers in zip(*passes, strict=True)]


def growth(before: list[int] | None, after: list[int] | None) -> int | None:
    """Return how much the device that grew most has grown by, or None if nobody tells."""
    if before is None or after is None:
        return None
    return max(b - a for a, b in zip(before, after, strict=True))


def captures(log: str) -> list[str]:
    """Return the lines of a log that tell of captured graphs."""
    return [line for line in log.splitlines() if _CAPTURE.match(line)]
