"""What is to be measured: configurations, points, method. Nothing here imports SGLang."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dynspec_benchmark.errors import UsageError

NO_SPEC = "no_spec"
STATIC = "static"
ADAPTIVE = "adaptive"
DYNSPEC = "dynspec"
KINDS = (NO_SPEC, STATIC, ADAPTIVE, DYNSPEC)
DRAFT_STATES = ("catch_up", "warm", "skip")

LEAST_RUNS = 3  # a median of fewer is no median
CLOSED_LOOP_PROMPTS = 64  # different ones, of --ramp and --wave

_CONFIGURATIONS = (
    "no_spec, static, adaptive, dynspec:POLICY and dynspec:POLICY@STATE (catch_up, warm, skip)"
)


@dataclass(frozen=True, slots=True)
class Config:
    """One kind of server."""

    kind: str
    """One of KINDS."""
    policy: str | None = None
    """Of a dynspec server, in canonical form."""
    draft_state: str = "catch_up"

    @property
    def label(self) -> str:
        """Its name in results, from which :func:`parse_config` makes it again."""
        if self.kind != DYNSPEC:
            return self.kind
        return f"{DYNSPEC}:{self.policy}@{self.draft_state}"

    @property
    def speculative(self) -> bool:
        """Whether the server is started with speculation."""
        return self.kind != NO_SPEC


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """A load: ``c`` requests sent at once."""

    prompt_tokens: int
    output_tokens: int
    c: int

    def __str__(self) -> str:
        return f"prompt {self.prompt_tokens}, output {self.output_tokens}, c {self.c}"

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Return the token ids to send: the same for every server with this vocabulary."""
        seed = f"{self.prompt_tokens} {self.output_tokens} {self.c}"
        return random_prompts(seed, self.c, self.prompt_tokens, vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a result depends on. Only a run with an equal plan may be resumed."""

    configs: tuple[Config, ...]
    points: tuple[Point, ...]
    repeats: int
    rounds: int
    model: dict[str, Any]
    """Names of target and draft, or the shape of random weights; see models.Model."""
    algorithm: str
    num_steps: int
    simulate_accept_length: float | None
    adaptive_cut: int
    server_arguments: dict[str, Any] = field(default_factory=dict)
    """Of ``sglang.Engine``, as asked for by the user."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-native."""
        return {
            **asdict(self),
            "configs": [config.label for config in self.configs],
            "points": [[p.prompt_tokens, p.output_tokens, p.c] for p in self.points],
        }

    @property
    def peak(self) -> int:
        """The most requests at once."""
        return max(point.c for point in self.points)

    def closed_loop(self) -> dict[str, Any]:
        """What clients send that each send one request after the other: part of a job."""
        return {
            "prompts": CLOSED_LOOP_PROMPTS,
            "prompt_lens": sorted({point.prompt_tokens for point in self.points}),
            "output_len": self.points[0].output_tokens,
        }

    def schedule(self) -> Iterator[tuple[int, Config]]:
        """Yield (round, configuration): A B C, C B A, ..., so that a drift of the machine's speed
        hits the first and the last alike."""
        for number in range(self.rounds):
            order = self.configs if number % 2 == 0 else tuple(reversed(self.configs))
            yield from ((number, config) for config in order)


def random_prompts(seed: str, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return ``count`` prompts of random token ids.

    Not of the lowest and highest ids, among which the special tokens of a vocabulary are.
    """
    draw = random.Random(seed)
    low, high = 10, max(11, vocab_size * 3 // 4)
    return [[draw.randrange(low, high) for _ in range(length)] for _ in range(count)]


def parse_configs(texts: Sequence[str]) -> tuple[Config, ...]:
    """Read configurations.

    Raises:
        UsageError: one cannot be read, or two are the same.
    """
    configs = tuple(map(parse_config, texts))
    for number, config in enumerate(configs):
        if config in configs[:number]:
            raise UsageError(f"--configs names {config.label} twice; leave one out")
    return configs


def parse_config(text: str) -> Config:
    """Read one configuration.

    Raises:
        UsageError: it cannot be read.
    """
    kind, colon, rest = text.strip().partition(":")
    if kind == DYNSPEC and rest.strip():
        return _dynspec(rest.strip(), text)
    if kind in KINDS and kind != DYNSPEC and not colon:
        return Config(kind)
    missing = "; dynspec needs a policy, as in dynspec:never@skip" if kind == DYNSPEC else ""
    raise UsageError(f"--configs: {text!r} is no configuration{missing}. Known: {_CONFIGURATIONS}")


def _dynspec(rest: str, text: str) -> Config:
    # Only a word at the very end: a policy's arguments may hold an @ in a string.
    state = re.search(r"@(\w*)$", rest)
    if state is None:
        return Config(DYNSPEC, _policy(rest, text))
    if state[1] not in DRAFT_STATES:
        raise UsageError(
            f"--configs: {text!r} ends in @{state[1]}, which is no draft state; write @catch_up, "
            "@warm or @skip"
        )
    return Config(DYNSPEC, _policy(rest[: state.start()].strip(), text), state[1])


def _policy(policy: str, text: str) -> str:
    try:
        from sglang_dynspec.errors import PolicyError
        from sglang_dynspec.policy.text import check_policy_text
    except ImportError as error:
        raise UsageError(
            f"--configs: {text!r} needs sglang_dynspec, which cannot be imported ({error}); "
            "pip install sglang-dynspec"
        ) from error
    try:
        return check_policy_text(policy)
    except PolicyError as error:
        raise UsageError(f"--configs: {text!r}: {error}") from error


def check_method(repeats: int, rounds: int) -> None:
    """Check that there are enough runs for a median.

    Raises:
        UsageError: there are not.
    """
    if repeats * rounds < LEAST_RUNS:
        raise UsageError(
            f"--rounds {rounds} of --repeats {repeats} are {repeats * rounds} runs of each point, "
            f"and a median takes at least {LEAST_RUNS}; raise --repeats to "
            f"{-(-LEAST_RUNS // rounds)}"
        )


def check_points(points: Sequence[Point], num_steps: int, context_length: int | None) -> None:
    """Check that every request fits the model.

    Raises:
        UsageError: one is longer than the context.
    """
    if context_length is None:
        return
    for point in points:
        needed = tokens_needed(point, num_steps)
        if needed > context_length:
            raise UsageError(
                f"a prompt of {point.prompt_tokens} and an output of {point.output_tokens} tokens "
                f"need a context of {needed}, with what speculation reserves, and the model has "
                f"{context_length}; lower --prompt-lens or --output-len, or raise --context-length "
                "if the model can take it"
            )


def tokens_needed(point: Point, num_steps: int) -> int:
    """Return the context that a request of the point needs. SGLang reserves a verification."""
    return point.prompt_tokens + point.output_tokens + num_steps + 2
