"""Results of ``sglang.bench_serving``, which newer releases call ``sglang.benchmark.serving``.

``--output-file`` names a file to which every run appends a line, a JSON object. The fields that
are read here have the same names from SGLang 0.5.9 to 0.5.23 (later releases add percentiles,
goodput and a cache report)::

    max_concurrency        requests at once
    output_throughput      output tokens per second over the whole run
    completed              requests that were answered
    concurrency            requests that were running on average
    accept_length          null without speculation, or on a server that does not tell
    dataset_name, random_input_len, random_output_len, random_range_ratio
    errors                 of each request; only with --output-details
    server_info            the server's own answer to /server_info, or null: speculative_algorithm,
                           speculative_num_steps, speculative_adaptive, attention_backend,
                           decode_attention_backend, model_path, version, internal_states.
                           A router of prefill and decode servers has a list of these in "decode"

A run counts as speculative or not by ``server_info`` and ``accept_length``, or, where both are
silent, by what the caller says of the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from sglang_dynspec.errors import ConfigError
from sglang_dynspec.measured import curves
from sglang_dynspec.measured.curves import DEFAULT_NUM_STEPS, Row, Table, shown

ONE_LINE_A_RUN = (
    "each line must be the result of one run, a JSON object, as `sglang.bench_serving "
    "--output-file FILE` appends it"
)

WELL_BELOW = 0.8
"""A run whose mean concurrency is below this share of its limit gets a note."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the benchmark."""

    where: str
    """File and line."""
    c: int
    """Requests at once, as limited by ``--max-concurrency``."""
    tok_s: float
    """Output tokens per second."""
    speculative: bool
    mean_concurrency: float | None
    accept_length: float | None
    """Mean since the server's start, bonus token included."""
    num_steps: int | None
    """Draft steps of a speculative server that tells."""
    dataset: str
    context: int
    """Prompt tokens of a request, 0 where the data set decides."""
    output_tokens: int | None
    range_ratio: float | None
    """Lengths of random prompts and outputs go from this share of the two above up to them."""
    backend: str | None
    """Attention backend of the server, for decoding."""
    model: str | None
    version: str | None
    """SGLang of the server."""


def looks_like_runs(text: str) -> bool:
    """Whether a text is the file of this benchmark, and not a table, going by its first line."""
    first = text.lstrip().partition("\n")[0]
    return '"max_concurrency"' in first or '"output_throughput"' in first


def parse_runs(text: str, source: str, *, speculative: bool | None = None) -> list[Run]:
    """Read the runs of a file.

    Args:
        text: of the file.
        source: stands in errors.
        speculative: whether the servers of all runs speculated; None if each run is to tell.

    Raises:
        ConfigError: a line is no result of a run, a value cannot be used, or it is not known
            whether the server speculated; names line and field.
    """
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{source} is empty; {ONE_LINE_A_RUN}")
    last = lines[-1][0]
    runs = []
    for n, line in lines:
        where = f"{source}, line {n}"
        cut_off = n == last and not text.endswith("\n")
        runs.append(_run(_object(line, where, cut_off=cut_off), where, speculative))
    return runs


def table_of(runs: Sequence[Run]) -> Table:
    """Make one table of runs, which may come from several files. Repeated runs give the median.

    Raises:
        ConfigError: the runs cannot stand in one table, as their loads or draft steps differ.
    """
    _check_one_load(runs)
    speculative = [run for run in runs if run.speculative]
    rename, notes = _backends(runs)
    accept_lengths = [run.accept_length for run in speculative if run.accept_length is not None]
    versions = [f"SGLang {version}" for version in _different(run.version for run in runs)]
    models = _different(run.model for run in runs)
    return Table(
        source=", ".join(dict.fromkeys(run.where.rpartition(", line ")[0] for run in runs)),
        title="; ".join(part for part in (", ".join(models), ", ".join(versions)) if part),
        num_steps=_one_num_steps(speculative),
        accept_length=median(accept_lengths) if accept_lengths else None,
        curves=curves.curves_of(
            Row(
                c=run.c,
                no_spec=None if run.speculative else run.tok_s,
                static_spec=run.tok_s if run.speculative else None,
                context=run.context,
                backend=rename(run.backend),
                output_tokens=run.output_tokens,
            )
            for run in runs
        ),
        notes=(*notes, *_differ("models", models), *_differ("releases", versions), *_loads(runs)),
    )


# --- one run ------------------------------------------------------------------------------------


def _object(line: str, where: str, *, cut_off: bool) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        fix = (
            "it is the last line and was not written to its end: delete it, and repeat that run"
            if cut_off
            else ONE_LINE_A_RUN
        )
        raise ConfigError(f"{where} is no JSON: {error}; {fix}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{where} is {shown(content)}; {ONE_LINE_A_RUN}")
    if "rows" in content:
        raise ConfigError(
            f"{where} is a table and no run of a benchmark; give it without --spec and --no-spec"
        )
    return content


def _run(content: Mapping[str, Any], where: str, said: bool | None) -> Run:
    info = _server(content.get("server_info"))
    accept_length = curves.accept_length(content.get("accept_length"), f"{where}, accept_length")
    _check_one_mode(info, where)
    random = str(content.get("dataset_name")).startswith("random")
    c = _concurrency(content, where)
    _check_answered(content, c, where)
    return Run(
        where=where,
        c=c,
        tok_s=_throughput(content, where),
        speculative=_speculative(info, accept_length, where, said),
        mean_concurrency=_number(content.get("concurrency")),
        accept_length=accept_length,
        num_steps=_num_steps(info, where),
        dataset=_text(content.get("dataset_name")) or "unknown",
        # With other data sets the two lengths are there, too, and mean nothing.
        context=_length(content, "random_input_len", where) or 0 if random else 0,
        output_tokens=_length(content, "random_output_len", where) if random else None,
        range_ratio=_number(content.get("random_range_ratio")) if random else None,
        backend=_text(info.get("decode_attention_backend")) or _text(info.get("attention_backend")),
        model=_text(info.get("model_path")),
        version=_text(info.get("version")),
    )


def _concurrency(content: Mapping[str, Any], where: str) -> int:
    field = f"{where}, max_concurrency"
    if content.get("max_concurrency") is None:
        state = "is null" if "max_concurrency" in content else "is missing"
        raise ConfigError(
            f"{field} {state}: how many requests ran at once was left to their arrival, so the "
            "run is no measurement of one concurrency; repeat it with --max-concurrency N (and "
            "without --request-rate), or delete the line"
        )
    return curves.whole(content["max_concurrency"], field, at_least=1)


def _check_answered(content: Mapping[str, Any], c: int, where: str) -> None:
    completed = content.get("completed")
    if completed is not None:
        curves.whole(completed, f"{where}, completed", at_least=0)
        if completed < c:
            raise ConfigError(
                f"{where}, completed is {completed}: with so few requests answered there were "
                f"never {c} at once (max_concurrency); repeat the run with --num-prompts "
                f"{4 * c} or more, or look for errors in the server's log"
            )
    errors = content.get("errors")
    failed = [error for error in errors if error] if isinstance(errors, list) else []
    if failed:
        raise ConfigError(
            f"{where}, errors: {len(failed)} requests failed, the first with {shown(failed[0])}; "
            "the throughput is not that of the load: repeat the run, and delete the line"
        )


def _throughput(content: Mapping[str, Any], where: str) -> float:
    field = f"{where}, output_throughput"
    value = curves.tokens_per_second(content.get("output_throughput"), field)
    if value is None:
        state = "is null" if "output_throughput" in content else "is missing"
        raise ConfigError(
            f"{field} {state}; it must be a number > 0 (output tokens per second): "
            f"{ONE_LINE_A_RUN}; if the run failed, delete the line and repeat it"
        )
    return value


def _length(content: Mapping[str, Any], key: str, where: str) -> int | None:
    value = content.get(key)
    return None if value is None else curves.whole(value, f"{where}, {key}", at_least=0)


# --- the server of a run ------------------------------------------------------------------------


def _server(info: Any) -> Mapping[str, Any]:
    """Return what the server says of itself, of the decode server behind a router; or nothing."""
    if not isinstance(info, dict):
        return {}
    decode = info.get("decode")
    if isinstance(decode, list) and decode and isinstance(decode[0], dict):
        return decode[0]
    return info


def _check_one_mode(info: Mapping[str, Any], where: str) -> None:
    """Refuse runs of servers that change between the two modes by themselves."""
    states = info.get("internal_states")
    for state in states if isinstance(states, list) else []:
        dynspec = state.get("dynspec") if isinstance(state, dict) else None
        if isinstance(dynspec, dict) and dynspec.get("state") == "in_force":
            raise ConfigError(
                f"{where}, server_info.internal_states: the server ran with dynspec in force "
                f"(policy {shown(dynspec.get('policy'))}), so its throughput is that of neither "
                "mode; measure once with speculation and once without, both with "
                "SGLANG_DYNSPEC_POLICY unset"
            )
    if info.get("speculative_adaptive") is True:
        raise ConfigError(
            f"{where}, server_info.speculative_adaptive is true: the server changed its draft "
            "steps by itself; measure without --speculative-adaptive"
        )


def _speculative(
    info: Mapping[str, Any], accept_length: float | None, where: str, said: bool | None
) -> bool:
    told: bool | None = None
    reason = ""
    if "speculative_algorithm" in info:
        algorithm = info["speculative_algorithm"]
        told, reason = algorithm is not None, f"speculative_algorithm is {shown(algorithm)}"
        reason = f"server_info.{reason}"
    elif accept_length is not None:
        told, reason = True, f"accept_length is {accept_length:g}"
    if told is None:
        if said is None:
            raise ConfigError(
                f"{where}: server_info and accept_length do not say whether the server speculated; "
                "give the file with --spec or --no-spec"
            )
        return said
    if said is not None and said != told:
        given, fix = ("--spec", "--no-spec") if said else ("--no-spec", "--spec")
        raise ConfigError(
            f"{where}, {reason}, but the file was given with {given}; if the file is right, "
            f"give it with {fix}"
        )
    return told


def _num_steps(info: Mapping[str, Any], where: str) -> int | None:
    value = info.get("speculative_num_steps")
    if value is None:
        return None
    return curves.whole(value, f"{where}, server_info.speculative_num_steps", at_least=0)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: Any) -> float | None:
    """Return a number that is only told to people; anything else is left out."""
    return float(value) if curves.is_number(value) and 0 <= value <= curves.MOST_REQUESTS else None


# --- all runs -----------------------------------------------------------------------------------


def _check_one_load(runs: Sequence[Run]) -> None:
    first = runs[0]
    for run in runs[1:]:
        for name, one, other in (
            ("dataset_name", first.dataset, run.dataset),
            ("random_range_ratio", first.range_ratio, run.range_ratio),
        ):
            if one != other:
                raise ConfigError(
                    f"{run.where}, {name} is {shown(other)}, but {shown(one)} in {first.where}; "
                    "runs that are compared must have the same load: give one load at a time"
                )


def _one_num_steps(speculative: Sequence[Run]) -> int:
    """Return the draft steps of all speculative runs."""
    telling = [run for run in speculative if run.num_steps]
    for run in telling[1:]:
        if run.num_steps != telling[0].num_steps:
            raise ConfigError(
                f"{run.where}, server_info.speculative_num_steps is {run.num_steps}, but "
                f"{telling[0].num_steps} in {telling[0].where}; give the runs of one number of "
                "draft steps at a time"
            )
    return (telling[0].num_steps if telling else None) or DEFAULT_NUM_STEPS


def _backends(runs: Sequence[Run]) -> tuple[Callable[[str | None], str | None], list[str]]:
    """Return what to call an attention backend, and notes.

    Without a choice by the user SGLang may take one backend for a server that speculates, and
    another one for a server that does not. These are compared then.
    """
    plain = _different(run.backend for run in runs if not run.speculative)
    speculative = _different(run.backend for run in runs if run.speculative)
    if len(plain) != 1 or len(speculative) != 1 or plain == speculative:
        return lambda backend: backend, []
    both = f"{plain[0]} / {speculative[0]}"
    return lambda backend: both if backend else None, [
        f"The server without speculation ran on attention backend {plain[0]}, the one with "
        f"speculation on {speculative[0]}."
    ]


def _different(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))


def _differ(what: str, values: Sequence[str]) -> list[str]:
    return [f"The runs are of different {what}: {', '.join(values)}."] if len(values) > 1 else []


def _loads(runs: Sequence[Run]) -> list[str]:
    notes = []
    ratio = runs[0].range_ratio
    if ratio is not None and ratio < 1:
        notes.append(
            f"Lengths of prompts and outputs vary from {ratio:g} of those named up to them "
            "(--random-range-ratio)."
        )
    low = [
        run
        for run in runs
        if run.mean_concurrency is not None and run.mean_concurrency < WELL_BELOW * run.c
    ]
    if low:
        run = low[0]
        more = f", and so in {len(low) - 1} more runs" if len(low) > 1 else ""
        notes.append(
            f"{run.where}: {run.mean_concurrency:.1f} requests ran on average where up to {run.c} "
            f"could{more}; more of them (--num-prompts) give a figure that is truer to {run.c}."
        )
    return notes
