"""Outputs under load against the outputs of a server without speculation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from sglang_dynspec.demo.load import Answer


@dataclass(frozen=True, slots=True)
class Difference:
    """An output that is not the expected one."""

    prompt: int
    """Index of the prompt."""
    position: int
    """The first output token that differs, from 0."""
    got: int | None
    """Its token id; None: the output had ended."""
    expected: int | None

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt}, output token {self.position}: {_shown(self.got)} with dynspec, "
            f"{_shown(self.expected)} without speculation"
        )


def differences(
    answers: Iterable[Answer], expected: Mapping[int, Sequence[int]]
) -> list[Difference]:
    """Compare token for token.

    Args:
        answers: outputs, several of a prompt allowed.
        expected: the output of every prompt.

    Returns:
        One entry for each answer that differs.
    """
    found = (_first(answer, expected[answer.prompt]) for answer in answers)
    return [difference for difference in found if difference is not None]


def _first(answer: Answer, expected: Sequence[int]) -> Difference | None:
    for position, (got, wanted) in enumerate(zip_longest(answer.token_ids, expected)):
        if got != wanted:
            return Difference(answer.prompt, position, got, wanted)
    return None


def _shown(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"
