"""Arguments of ``sglang.Engine`` for a configuration, in the words of the installed release."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dynspec_benchmark.errors import UsageError
from dynspec_benchmark.models import Model
from dynspec_benchmark.plan import ADAPTIVE, Config, Plan, tokens_needed

# The batch sizes that are worth a CUDA graph; those asked for come on top.
_GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

# Names by release, the newest first. Fields are looked up, versions are not.
_GRAPH_SIZES_FIELDS = ("cuda_graph_bs_decode", "cuda_graph_bs")
# Graphs of the prefill: they differ between configurations, and capturing them takes minutes.
_NO_PREFILL_GRAPH_FIELDS = ("disable_prefill_cuda_graph", "disable_piecewise_cuda_graph")


def engine_arguments(
    config: Config,
    plan: Plan,
    model: Model,
    *,
    fields: Collection[str],
    gpu: bool,
    adaptive_config: Path,
) -> dict[str, Any]:
    """Return the keyword arguments of ``sglang.Engine``.

    Args:
        config: which server.
        plan: the whole benchmark: every server of it gets the same sizes.
        model: what to serve.
        fields: names of the release's server arguments.
        gpu: whether there is one.
        adaptive_config: the file for SGLang's adaptive mode.

    Raises:
        UsageError: an argument that the user asked for is none of this release.
    """
    arguments = _common(plan, model, fields, gpu)
    if config.speculative:
        arguments |= _speculation(plan, model, fields)
    if config.kind == ADAPTIVE:
        arguments |= {
            "speculative_adaptive": True,
            "speculative_adaptive_config": str(adaptive_config),
        }
    arguments |= _asked_for(plan.server_arguments, fields, config)
    # None leaves SGLang's own default: the way to take back one of ours.
    return {name: value for name, value in arguments.items() if value is not None}


def adaptive_steps(num_steps: int, cut: int) -> dict[str, dict[str, list[int]]]:
    """Return SGLang's adaptive configuration: ``num_steps`` below a batch size, 0 from it on."""
    return {"1": {"candidate_steps": [num_steps]}, str(cut): {"candidate_steps": [0]}}


def _common(plan: Plan, model: Model, fields: Collection[str], gpu: bool) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model_path": model.target,
        "skip_tokenizer_init": True,
        "random_seed": 1,
        "disable_radix_cache": True,  # or a repetition would find its prompts in the cache
        "max_running_requests": plan.peak,
        "grammar_backend": "none",
        # dynspec's line about its graphs is of this level.
        "log_level": "info",
    }
    if model.random_weights:
        arguments["load_format"] = "dummy"
        arguments["context_length"] = _context_length(plan)
    if gpu:
        arguments |= _named(_NO_PREFILL_GRAPH_FIELDS, fields, True)
        arguments |= _named(_GRAPH_SIZES_FIELDS, fields, _graph_sizes(plan))
        arguments["chunked_prefill_size"] = 8192
    return arguments


def _speculation(plan: Plan, model: Model, fields: Collection[str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "speculative_algorithm": plan.algorithm,
        "speculative_draft_model_path": model.draft,
        "speculative_num_steps": plan.num_steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": plan.num_steps + 1,
    }
    if model.random_weights:
        arguments |= _named(("speculative_draft_load_format",), fields, "dummy")
    return arguments


def _named(names: Collection[str], fields: Collection[str], value: Any) -> dict[str, Any]:
    """Return the value under the first of the names that the release has; nothing if none."""
    found = next((name for name in names if name in fields), None)
    return {} if found is None else {found: value}


def _asked_for(
    arguments: dict[str, Any], fields: Collection[str], config: Config
) -> dict[str, Any]:
    for name in arguments:
        if name not in fields:
            close = get_close_matches(name, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"{name!r} is no server argument of the installed SGLang{hint}")
    return {
        name: value
        for name, value in arguments.items()
        if config.speculative or not name.startswith("speculative_")
    }


def _graph_sizes(plan: Plan) -> list[int]:
    top = int(plan.server_arguments.get("max_running_requests") or plan.peak)
    asked = {point.c for point in plan.points}
    return sorted({size for size in (*_GRAPH_SIZES, *asked, top) if size <= top})


def _context_length(plan: Plan) -> int:
    # Not the model's own: buffers of the attention backends grow with it.
    needed = max(tokens_needed(point, plan.num_steps) for point in plan.points)
    return max(4096, -(-needed // 1024) * 1024)
