"""The advice as text for people, and as JSON for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_dynspec.advise.advice import (
    SAME,
    Advised,
    Choice,
    CurveAdvice,
    Key,
    Means,
    ServerAdvice,
    TableAdvice,
)
from sglang_dynspec.measured import Curve, Point

WIDTH = 100

AUTO = "Policy `auto` measures what steps cost while it serves, and needs no threshold."
"""Said where no single threshold fits."""

SERVER_LIMIT = 48
"""``--max-running-requests`` that SGLang sets under speculation when the user does not."""

_HEADINGS = (
    "requests",
    "no speculation",
    "always on",
    "ratio",
    "advised",
    "over always on",
    "over no speculation",
)


def export_line(choice: Choice) -> str | None:
    """Return the line for a shell that puts a choice in force; None where no policy is needed."""
    if choice.verdict != "threshold":
        return None
    return f"export SGLANG_DYNSPEC_POLICY='{choice.policy}'"


# --- text ---------------------------------------------------------------------------------------


def as_text(advice: Sequence[TableAdvice]) -> str:
    """Return all advice as plain text."""
    return "\n\n".join("\n".join(_table(each)) for each in advice)


def _table(advice: TableAdvice) -> Iterator[str]:
    table = advice.table
    yield from _wrapped(f"{table.source}: {table.title}" if table.title else table.source)
    yield from _wrapped(f"Output tokens per second, {_measured_with(advice)}")
    for note in table.notes:
        yield from _wrapped(note)
    if advice.left_out:
        curves = "; ".join(
            f"{_load(curve)} ({_missing(curve.points)})" for curve in advice.left_out
        )
        yield from _wrapped(f"Left out, with fewer than two points that have both modes: {curves}.")
    for curve_advice in advice.curves:
        yield ""
        yield from _curve(curve_advice, several=len(table.curves) > 1)
    for server in advice.servers:
        yield ""
        yield from _server(server)
    if advice.curves:
        yield ""
        yield from _closing(advice)


def _measured_with(advice: TableAdvice) -> str:
    table = advice.table
    if table.accept_length is None:
        return (
            "measured with an accept length that the source does not tell. What follows holds for "
            "that accept length."
        )
    return (
        f"measured with accept length {table.accept_length:.3g}. What follows holds for that "
        "accept length: a higher one moves the crossover up, a lower one down."
    )


def _curve(advice: CurveAdvice, *, several: bool) -> Iterator[str]:
    if several or advice.curve.label:
        yield f"{_load(advice.curve)}:"
        yield ""
    yield from _grid(advice)
    if advice.left_out:
        yield from _wrapped(f"Left out, with one mode only: {_missing(advice.left_out)}.")
    yield ""
    yield from _wrapped(_where_it_pays(advice))
    if advice.rises and advice.choice.verdict == "threshold":
        yield from _wrapped(_not_steady(advice.rises, advice.means))
    yield from _verdict(advice)


def _grid(advice: CurveAdvice) -> list[str]:
    rows = [_HEADINGS]
    for point in advice.points:
        rows.append(
            (
                str(point.c),
                f"{point.no_spec:.1f}",
                f"{point.static_spec:.1f}",
                f"{point.ratio:.2f}",
                "speculate" if point.speculate else "plain",
                _gain(point.over_always),
                _gain(point.over_never),
            )
        )
    means = advice.means
    rows.append(("mean", "", "", "", "", _gain(means.over_always), _gain(means.over_never)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _where_it_pays(advice: CurveAdvice) -> str:
    points, bands = advice.points, advice.bands
    if len(bands) == 1:
        at = f"at {'any' if not bands[0].pays else 'every'} measured concurrency"
        pays = "Speculation pays" if bands[0].pays else "Speculation does not pay"
        return f"{pays} {at}, {points[0].c} to {points[-1].c} requests."
    pays = _and([_band(band.first, band.last) for band in bands if band.pays])
    not_ = _and([_band(band.first, band.last) for band in bands if not band.pays])
    word = "request" if pays == "1" else "requests"
    text = f"Speculation pays at {pays} {word}, and not at {not_}."
    if advice.choice.crossover is not None:
        text += (
            f" It stops at about {_about(advice.choice.crossover)} requests (interpolated between "
            f"{advice.choice.last_paying} and {_next(advice)})."
        )
    return text


def _not_steady(rise: tuple[Advised, Advised], means: Means) -> str:
    one, two = rise
    cost = (
        " The threshold has the better mode at every measured point all the same."
        if means.of_best == 1
        else ""
    )
    return (
        f"The ratio does not fall steadily: it rises from {one.ratio:.2f} at {one.c} to "
        f"{two.ratio:.2f} at {two.c} requests.{cost}"
    )


def _verdict(advice: CurveAdvice) -> Iterator[str]:
    choice, alternates = advice.choice, len(advice.bands) > 2
    if choice.verdict == "never":
        if any(band.pays for band in advice.bands):
            yield from _wrapped(
                "A threshold speculates at all smaller concurrencies too, which loses more than it "
                f"gains. No speculation {_costs(advice.means)}"
            )
        yield from _wrapped(
            "Serve without speculation: start the server without --speculative-algorithm. On a "
            "server that has it, policy `never` with SGLANG_DYNSPEC_DRAFT_STATE=skip gives the "
            "same throughput."
        )
        return
    if choice.verdict == "always":
        if len(advice.bands) > 1:
            yield from _wrapped(
                "No threshold has a better mean over the measured points than speculation "
                f"throughout, which {_costs(advice.means)}"
            )
        yield from _wrapped(
            "Leave speculation on; no policy is needed (`always` does the same). If the server "
            f"allows more than {choice.last_paying} requests, measure there too: it may stop "
            "paying."
        )
        return
    if alternates:
        yield from _wrapped(
            "No threshold fits all of this; the one with the best mean over the measured points "
            f"{_costs(advice.means)}"
        )
    yield ""
    yield f"  {export_line(choice)}"
    if choice.is_narrow:
        yield ""
        yield from _wrapped(
            f"on_at is close to off_at, as speculation was measured to pay at {choice.last_paying}."
            f" Where the load hovers there, write min_dwell({choice.policy}, steps=50)."
        )


def _costs(means: Means) -> str:
    return f"costs {means.loss:.1%} against the better mode of each point, in the mean."


def _server(server: ServerAdvice) -> Iterator[str]:
    backend = f"{server.backend}, a" if server.backend else "A"
    yield f"{backend}ll {len(server.curves)} loads on one server:"
    yield ""
    if not server.moves:
        yield from _one_for_all(server)
        return
    yield from _wrapped(
        f"Where speculation stops paying moves with the load: {_crossovers(server)}. The number "
        "of requests alone is the wrong key for a server that gets all of them. Lost against the "
        f"better mode of each point, in the mean of the {_count(server)} points:"
    )
    yield ""
    yield from _keys(server)
    yield ""
    yield from _wrapped(
        f"Of the policies with one key, {_lowest(server)} {AUTO} For a server that "
        "gets one load only, take the line of that load."
    )
    if (line := export_line(server.choice)) is not None:
        yield ""
        yield f"  {line}"


def _one_for_all(server: ServerAdvice) -> Iterator[str]:
    means = server.means
    gains = (
        f"in the mean of the {_count(server)} points it is {_gain(means.over_always)} over always "
        f"on and {_gain(means.over_never)} over no speculation, {means.loss:.1%} below the better "
        "mode of each point"
    )
    line = export_line(server.choice)
    if line is None:
        what = {
            "never": "serve all of them without speculation",
            "always": "leave speculation on for all of them",
        }[server.choice.verdict]
        yield from _wrapped(f"One answer fits all loads, {what}: {gains}.")
        return
    yield from _wrapped(f"One threshold fits all loads: {gains}.")
    yield ""
    yield f"  {line}"


def _keys(server: ServerAdvice) -> Iterator[str]:
    rows = [("a threshold for each load", "those above", f"{server.by_load.loss:.1%}")]
    for key in server.keys:
        rows.append((key.looks_at, _policy_of(key), f"{key.loss:.1%}"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for name, policy, loss in rows:
        yield f"  {name.ljust(widths[0])}  {policy.ljust(widths[1])}  {loss.rjust(widths[2])}"


def _policy_of(key: Key) -> str:
    if key.policy is not None:
        return key.policy
    return f"a policy of your own: speculate up to {key.limit}"


def _lowest(server: ServerAdvice) -> str:
    first = server.keys[0]
    best = next(key for key in server.keys if key.policy is not None)
    same = "; token_budget loses as much, as it looks at the number of requests too"
    shipped = (
        f"`{best.policy}` loses least of those that are shipped "
        f"({best.loss:.1%}{same if server.choice.verdict == 'threshold' else ''})."
    )
    if best.loss - first.loss <= SAME:
        return shipped
    return (
        f"one on the {first.looks_at} would lose least ({first.loss:.1%}), but it has to be "
        f"written (BatchView.context_tokens counts them, with the outputs); {shipped}"
    )


def _crossovers(server: ServerAdvice) -> str:
    said = []
    for advice in server.curves:
        at = {
            "never": "it never pays",
            "always": "it always pays",
            "threshold": f"about {_about(advice.choice.crossover or 0)} requests",
        }[advice.choice.verdict]
        said.append(f"{at} with {_load(advice.curve)}")
    return "; ".join(said)


def _closing(advice: TableAdvice) -> Iterator[str]:
    yield from _wrapped(
        "Means are geometric, over the measured points of a load, each counting once. Plain steps "
        "are counted at the throughput without speculation; draft state `warm` gives some of that "
        "up to keep the draft model ready, and `catch_up`, the default, next to nothing."
    )
    most = max(point.c for curve in advice.curves for point in curve.points)
    if most > SERVER_LIMIT and any(curve.choice.verdict != "never" for curve in advice.curves):
        yield from _wrapped(
            f"With speculation SGLang serves {SERVER_LIMIT} requests at once unless "
            f"--max-running-requests says otherwise; set it (measured here: up to {most})."
        )


def _load(curve: Curve) -> str:
    return curve.label or f"context {curve.context}"


def _missing(points: Sequence[Point]) -> str:
    said = []
    for what, there, other in (
        ("without speculation", "no_spec", "static_spec"),
        ("with speculation", "static_spec", "no_spec"),
    ):
        at = [
            str(p.c) for p in points if getattr(p, there) is not None and getattr(p, other) is None
        ]
        if at:
            said.append(f"only {what} at {_and(at)}")
    both = [str(p.c) for p in points if p.ratio is not None]
    return "; ".join(said + ([f"both at {_and(both)}"] if both else []))


def _count(server: ServerAdvice) -> int:
    return sum(len(advice.points) for advice in server.curves)


def _next(advice: CurveAdvice) -> int:
    return next(point.c for point in advice.points if not point.speculate)


def _band(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _about(requests: float) -> str:
    return f"{requests:.1f}" if requests < 100 else f"{requests:.0f}"


def _gain(ratio: float) -> str:
    text = f"{100 * (ratio - 1):+.1f}%"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


# --- JSON ---------------------------------------------------------------------------------------


def as_json(advice: Sequence[TableAdvice]) -> dict[str, Any]:
    """Return all advice as objects, lists, numbers and texts.

    Throughput is in output tokens per second. ``over_always``, ``over_never`` and ``of_best`` are
    ratios: the throughput of the policy over that of always-on, of no speculation, and of the
    better mode. Those under ``mean`` are geometric means over the points. ``requests`` are requests
    at once::

        {"tables": [{
          "source", "title", "num_steps", "accept_length", "notes": [...],
          "curves": [{
            "label", "backend", "context", "output_tokens",
            "verdict": "never" | "always" | "threshold", "policy", "export", "crossover",
            "bands": [{"from", "to", "pays"}],
            "points": [{"requests", "no_spec", "static_spec", "ratio", "speculate",
                        "over_always", "over_never", "of_best"}],
            "left_out": [{"requests", "no_spec", "static_spec"}],
            "mean": {"over_always", "over_never", "of_best"}}],
          "left_out": [{"label", "backend", "context", "output_tokens",
                        "points": [{"requests", "no_spec", "static_spec"}]}],
          "servers": [{
            "backend", "loads", "moves",
            "verdict", "policy", "export", "crossover", "mean": {...}, "mean_by_load": {...},
            "keys": [{"looks_at", "policy", "limit", "loss"}]}]}]}

    ``policy`` is a text for ``SGLANG_DYNSPEC_POLICY``, ``export`` the line for a shell, null where
    no policy is needed. ``servers`` has an entry for each attention backend with several loads:
    one policy for all of them, and whether thresholds of their own would serve them better
    (``moves``).
    """
    return {"tables": [_json_table(each) for each in advice]}


def _json_table(advice: TableAdvice) -> dict[str, Any]:
    table = advice.table
    return {
        "source": table.source,
        "title": table.title,
        "num_steps": table.num_steps,
        "accept_length": table.accept_length,
        "notes": list(table.notes),
        "curves": [_json_curve(curve) for curve in advice.curves],
        "left_out": [
            {**_json_load(curve), "points": [_json_point(point) for point in curve.points]}
            for curve in advice.left_out
        ],
        "servers": [_json_server(server) for server in advice.servers],
    }


def _json_curve(advice: CurveAdvice) -> dict[str, Any]:
    return {
        **_json_load(advice.curve),
        **_json_choice(advice.choice),
        "bands": [{"from": b.first, "to": b.last, "pays": b.pays} for b in advice.bands],
        "points": [
            {
                "requests": point.c,
                "no_spec": point.no_spec,
                "static_spec": point.static_spec,
                "ratio": point.ratio,
                "speculate": point.speculate,
                "over_always": point.over_always,
                "over_never": point.over_never,
                "of_best": point.of_best,
            }
            for point in advice.points
        ],
        "left_out": [_json_point(point) for point in advice.left_out],
        "mean": _json_means(advice.means),
    }


def _json_server(server: ServerAdvice) -> dict[str, Any]:
    return {
        "backend": server.backend,
        "loads": [_load(advice.curve) for advice in server.curves],
        "moves": server.moves,
        **_json_choice(server.choice),
        "mean": _json_means(server.means),
        "mean_by_load": _json_means(server.by_load),
        "keys": [
            {
                "looks_at": key.looks_at,
                "policy": key.policy,
                "limit": key.limit,
                "loss": key.loss,
            }
            for key in server.keys
        ],
    }


def _json_load(curve: Curve) -> dict[str, Any]:
    return {
        "label": curve.label,
        "backend": curve.backend,
        "context": curve.context,
        "output_tokens": curve.output_tokens,
    }


def _json_choice(choice: Choice) -> dict[str, Any]:
    return {
        "verdict": choice.verdict,
        "policy": choice.policy,
        "export": export_line(choice),
        "crossover": choice.crossover,
    }


def _json_means(means: Means) -> dict[str, float]:
    return {
        "over_always": means.over_always,
        "over_never": means.over_never,
        "of_best": means.of_best,
    }


def _json_point(point: Point) -> dict[str, Any]:
    return {"requests": point.c, "no_spec": point.no_spec, "static_spec": point.static_spec}
