"""What the demo asks: for the tiny models token ids from a seed, for real ones questions."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

_TOPICS = (
    "how a refrigerator works",
    "why the sky is blue",
    "what a hash table is",
    "how bread rises",
    "what causes the tides",
    "how a bill becomes law",
    "why leaves fall in autumn",
    "how a bicycle stays upright",
)
_FORMS = (
    "Explain {} to a child.",
    "Write a short encyclopedia article on {}.",
    "List the steps and causes behind {}.",
    "Write a dialogue between a teacher and a student on {}.",
)


def token_prompts(number: int, *, first_id: int, vocab_size: int) -> list[dict[str, Any]]:
    """Return prompts of 4 to 40 random tokens, always the same ones.

    Args:
        number: how many, >= 1.
        first_id: the least token id to use; those below are special.
        vocab_size: the model's.
    """
    rng = random.Random(0)
    return [
        {"input_ids": [rng.randrange(first_id, vocab_size) for _ in range(rng.randint(4, 40))]}
        for _ in range(number)
    ]


def text_prompts(number: int) -> list[dict[str, Any]]:
    """Return that many different questions, for the server's tokenizer to encode."""
    questions = [form.format(topic) for form, topic in product(_FORMS, _TOPICS)]
    return [
        {"text": f"({i // len(questions) + 1}) {questions[i % len(questions)]}\n"}
        for i in range(number)
    ]
