"""The results as JSON: written after every point, so that an interrupted run is usable.

``measurements`` is long: one entry for each configuration and point, with every run. ``rows`` is
wide: one for each point, with the median of each configuration under its name (``static`` is
called ``static_spec`` there). :func:`wide_rows` makes the second from the first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dynspec_benchmark.errors import UsageError
from dynspec_benchmark.plan import DYNSPEC, NO_SPEC, STATIC, Config, Plan, Point
from dynspec_benchmark.worker import DIGEST

WHAT = "decode throughput against concurrency, one server configuration per process"
UNIT = "output tokens per second over the whole call, prefill included"

Measurement = dict[str, Any]
Key = tuple[str, int, int, int]
"""Backend, prompt tokens, output tokens, requests."""

_SIMULATED = "not comparable (simulated acceptance)"

# What has to be equal for figures to stand in one table.
_ONE_TABLE = ("hardware", "model", "speculation")


class Results:
    """Results in the making.

    Args:
        data: as read from a file, or from :func:`begin`.
        path: where they are kept.
    """

    def __init__(self, data: dict[str, Any], path: Path) -> None:
        self.data = data
        self.path = path

    def has(self, number: int, config: Config, point: Point) -> bool:
        """Whether a point has been measured in that round."""
        return any(
            entry["config"] == config.label
            and point_of(entry) == point
            and any(run["round"] == number for run in entry["runs"])
            for entry in self.data["measurements"]
        )

    def add_server(self, server: dict[str, Any]) -> None:
        """Keep what a server has told of itself."""
        self.data["servers"].append(server)

    def add_point(
        self,
        config: Config,
        point: Point,
        *,
        backend: str,
        runs: Sequence[dict[str, Any]],
        steps: dict[str, Any] | None,
        kv_tokens: int | None,
    ) -> Measurement:
        """Keep the runs of a point in one round, and return all that is known of it."""
        entry = self._entry(config, point, backend)
        entry["runs"].extend(runs)
        if steps is not None:
            entry["steps"] = _added(entry["steps"] or {}, steps)
        entry["kv_tokens"] = kv_tokens
        # More than the pool holds wait for a place, and c is not what has run at once.
        entry["waits_for_kv"] = (
            kv_tokens is not None
            and point.c * (point.prompt_tokens + point.output_tokens) > kv_tokens
        )
        self.save()
        return entry

    def add_failure(self, number: int, config: Config, message: str) -> None:
        """Keep what went wrong."""
        failure = {"round": number, "config": config.label, "message": message}
        self.data["failures"].append(failure)
        self.save()

    def save(self) -> None:
        """Write all, so that the file is always whole."""
        summarise(self.data)
        write_json(self.path, self.data)

    def _entry(self, config: Config, point: Point, backend: str) -> Measurement:
        wanted = (backend, *_numbers(point))
        for entry in self.data["measurements"]:
            if entry["config"] == config.label and key_of(entry) == wanted:
                found: Measurement = entry
                return found
        entry = {
            "backend": backend,
            "config": config.label,
            "prompt_tokens": point.prompt_tokens,
            "output_tokens": point.output_tokens,
            "c": point.c,
            "runs": [],
            "steps": None,
        }
        self.data["measurements"].append(entry)
        return entry


def begin(
    plan: Plan, *, hardware: dict[str, Any], software: dict[str, Any], command: str
) -> dict[str, Any]:
    """Return results without a measurement."""
    return {
        "what": WHAT,
        **about(plan, hardware=hardware, software=software, command=command),
        "method": {
            "rounds": plan.rounds,
            "repeats": plan.repeats,
            "value": "median of all runs of a point; every round starts every server anew, in "
            "alternating order; a short warm-up comes before each point",
            "adaptive": f"SGLang's --speculative-adaptive with {plan.num_steps} draft steps below "
            f"{plan.adaptive_cut} requests and 0 from there",
        },
        "unit": UNIT,
        "rows": [],
        "measurements": [],
        "startup_s": {},
        "servers": [],
        "skipped": {},
        "failures": [],
    }


def about(
    plan: Plan, *, hardware: dict[str, Any], software: dict[str, Any], command: str
) -> dict[str, Any]:
    """Return what figures are of."""
    return {
        "hardware": hardware,
        "software": software,
        "model": plan.model["name"],
        "speculation": {
            "algorithm": plan.algorithm,
            "topk": 1,
            "num_steps": plan.num_steps,
            "num_draft_tokens": plan.num_steps + 1,
            "simulated_accept_len": plan.simulate_accept_length,
        },
        "load": {
            "greedy": True,
            "ignore_eos": True,
            "radix_cache": not plan.server_arguments.get("disable_radix_cache", True),
            "max_running_requests": plan.server_arguments.get("max_running_requests", plan.peak),
        },
        "command": command,
        "plan": plan.as_dict(),
    }


def resume(path: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a file to go on with.

    Args:
        path: what an earlier run has written.
        fresh: results without a measurement, of what is asked for now.

    Raises:
        UsageError: the file is of another benchmark, and what differs.
    """
    data = load(path)
    then = {**data["plan"], "hardware": data["hardware"], "software": data["software"]}
    now = {**fresh["plan"], "hardware": fresh["hardware"], "software": fresh["software"]}
    # As read from a file: tuples become lists.
    now = json.loads(json.dumps(now))
    differences = [
        f"{name} was {then.get(name)!r} and is {now.get(name)!r}"
        for name in now
        if then.get(name) != now[name]
    ]
    if differences:
        raise UsageError(
            f"--resume {path} is of another benchmark: {'; '.join(differences)}. Give the same "
            "arguments, or start anew without --resume"
        )
    # What failed is tried again.
    data["failures"] = []
    return data


def load(path: Path) -> dict[str, Any]:
    """Read results.

    Raises:
        UsageError: there are none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}; give the results.json of a run") from error
    if not isinstance(data, dict) or not {"measurements", "plan"} <= data.keys():
        raise UsageError(f"{path} holds no results of this benchmark; give a run's results.json")
    return data


def merge(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the results of several files in one: later ones add to the first, and replace what
    they have measured again.

    Raises:
        UsageError: one cannot be read, or figures of different things would stand in one table.
    """
    merged = load(paths[0])
    for path in paths[1:]:
        more = load(path)
        _check_one_table(paths[0], merged, path, more)
        again = {_identity(entry) for entry in more["measurements"]}
        kept = [entry for entry in merged["measurements"] if _identity(entry) not in again]
        merged["measurements"] = [*kept, *more["measurements"]]
        merged["servers"] += more["servers"]
        merged["failures"] += more["failures"]
        merged["skipped"] |= more["skipped"]
        merged["command"] += f"\n{more['command']}"
    summarise(merged)
    return merged


def _check_one_table(first: Path, merged: dict[str, Any], path: Path, more: dict[str, Any]) -> None:
    parts = {name: (merged[name], more[name]) for name in _ONE_TABLE}
    parts["SGLang"] = (merged["software"]["sglang"], more["software"]["sglang"])
    parts["torch"] = (merged["software"]["torch"], more["software"]["torch"])
    for name, (one, other) in parts.items():
        if one != other:
            raise UsageError(
                f"{first} and {path} cannot be merged: {name} is {one!r} in the first and "
                f"{other!r} in the second"
            )


# --- what the runs mean --------------------------------------------------------------------------


def summarise(data: dict[str, Any]) -> None:
    """Work out everything that follows from the runs: medians, comparisons, wide rows."""
    measurements = data["measurements"]
    simulated = data["speculation"]["simulated_accept_len"] is not None
    baselines = {key_of(e): e for e in measurements if e["config"] == NO_SPEC}
    for entry in measurements:
        entry |= _middle(entry["runs"])
        entry["plain_share"] = _plain_share(entry)
    statics = {key_of(e): e for e in measurements if e["config"] == STATIC}
    for entry in measurements:
        baseline = baselines.get(key_of(entry))
        entry["ids"] = _compared(entry, baseline, simulated)
        entry |= _ratios(entry, baseline, statics.get(key_of(entry)))
    data["rows"] = wide_rows(measurements)
    data["startup_s"] = _startup(data["servers"])


def wide_rows(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """Return a row for each backend and load, with the median of each configuration in it."""
    rows: dict[Key, dict[str, Any]] = {}
    for entry in measurements:
        backend, prompt_tokens, output_tokens, c = key = key_of(entry)
        row = rows.setdefault(
            key,
            {
                "backend": backend,
                "prompt_tokens": prompt_tokens,
                "output_tokens": output_tokens,
                "c": c,
            },
        )
        row[wide_name(entry["config"])] = entry["tok_s"]
    return [rows[key] for key in sorted(rows)]


def wide_name(label: str) -> str:
    """Return the name of a configuration's column in the wide rows."""
    return "static_spec" if label == STATIC else label


def wrong(data: dict[str, Any]) -> list[str]:
    """Return what is not as it must be, a sentence each: plain decode that gave other outputs."""
    return [
        f"{entry['config']} ran nothing but plain decode at {point_of(entry)} ({entry['backend']}),"
        f" and {entry['ids']['different']} of {entry['ids']['compared']} outputs are none that the "
        "server without speculation gives"
        for entry in data["measurements"]
        if parse_kind(entry["config"]) == DYNSPEC
        and entry["plain_share"] == 1.0
        and entry["ids"] is not None
        and entry["ids"].get("different")
    ]


def parse_kind(label: str) -> str:
    """Return the kind of a configuration, by its label; without a need for dynspec."""
    return label.partition(":")[0]


def key_of(entry: Measurement) -> Key:
    """What it was that ran: the rest is the configuration."""
    return entry["backend"], entry["prompt_tokens"], entry["output_tokens"], entry["c"]


def point_of(entry: Measurement) -> Point:
    """The load of a measurement."""
    return Point(entry["prompt_tokens"], entry["output_tokens"], entry["c"])


def write_json(path: Path, data: Any) -> None:
    """Write a file in whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def _middle(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rates = [run["tok_s"] for run in runs]
    lengths = [run["accept_length"] for run in runs if run["accept_length"] is not None]
    return {
        "tok_s": round(median(rates), 1),
        "tok_s_min": round(min(rates), 1),
        "tok_s_max": round(max(rates), 1),
        "seconds": round(median(run["seconds"] for run in runs), 4),
        "accept_length": round(sum(lengths) / len(lengths), 3) if lengths else None,
    }


def _ratios(
    entry: Measurement, baseline: Measurement | None, static: Measurement | None
) -> dict[str, float | None]:
    """Throughput over that of no_spec, and over the better one of no_spec and static."""
    if baseline is None:
        return {"ratio": None, "ratio_to_best": None}
    best = max(baseline["tok_s"], static["tok_s"]) if static is not None else None
    return {
        "ratio": round(entry["tok_s"] / baseline["tok_s"], 4),
        "ratio_to_best": round(entry["tok_s"] / best, 4) if best is not None else None,
    }


def _plain_share(entry: Measurement) -> float | None:
    """Share of plain decode in the decode steps, or None where the server does not tell."""
    if entry["config"] == NO_SPEC:
        return 1.0
    if entry["steps"] is None:
        return None
    by_num_steps = entry["steps"]["by_num_steps"]
    total = sum(by_num_steps.values())
    return by_num_steps.get("0", 0) / total if total else None


def _compared(
    entry: Measurement, baseline: Measurement | None, simulated: bool
) -> dict[str, Any] | None:
    """Compare outputs to those of the server without speculation.

    An output is equal if that server gave it to the same prompt in any of its runs. Where its runs
    differ among themselves (bf16 rounds differently in differently cut batches), another output is
    not held against a configuration; ``varying`` counts such prompts.
    """
    if baseline is None:
        return None
    if simulated and entry["plain_share"] != 1.0:
        return {"note": _SIMULATED}
    known = [set(answers) for answers in zip(*map(_outputs, baseline["runs"]), strict=True)]
    equal = different = 0
    for run in entry["runs"]:
        for digest, answers in zip(_outputs(run), known, strict=True):
            equal += digest in answers
            different += digest not in answers and len(answers) == 1
    return {
        "compared": len(known) * len(entry["runs"]),
        "equal": equal,
        "different": different,
        "varying": sum(len(answers) > 1 for answers in known),
    }


def _outputs(run: dict[str, Any]) -> list[str]:
    text = run["digests"]
    return [text[start : start + DIGEST] for start in range(0, len(text), DIGEST)]


def _startup(servers: Iterable[dict[str, Any]]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {}
    for server in servers:
        seconds.setdefault(server["config"], []).append(server["startup_s"])
    return {config: round(median(values), 1) for config, values in seconds.items()}


def _added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {
        group: {
            name: one.get(group, {}).get(name, 0) + counts.get(name, 0)
            for name in {**one.get(group, {}), **counts}
        }
        for group, counts in other.items()
    }


def _identity(entry: Measurement) -> tuple[str, Key]:
    return entry["config"], key_of(entry)


def _numbers(point: Point) -> tuple[int, int, int]:
    return point.prompt_tokens, point.output_tokens, point.c


def configs_of(measurements: Iterable[Measurement]) -> list[str]:
    """Labels in the order in which they are shown: the known kinds first, then as measured."""
    order = {NO_SPEC: 0, STATIC: 1}
    labels = dict.fromkeys(entry["config"] for entry in measurements)
    return sorted(labels, key=lambda label: order.get(label, 2))
