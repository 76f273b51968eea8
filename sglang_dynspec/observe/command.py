"""The subcommand ``plot``: the chart of a trace."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from sglang_dynspec.errors import ConfigError
from sglang_dynspec.observe.figure import check_matplotlib
from sglang_dynspec.observe.trace_file import TraceFile, read_trace

_DESCRIPTION = """\
Draw what a server decided and what came of it: load, draft steps with the reasons of their changes,
accept length, tokens per second predicted and actual, over time.
"""

_EPILOG = """\
The file is what a server with SGLANG_DYNSPEC_TRACE=FILE has written. FILE.1, which holds what came
before, is read as well. Of several runs of a server in one file the last is drawn.

exit code: 0 if the chart was drawn; 2 if it cannot be.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("file", metavar="FILE", help="a trace, JSON lines")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PICTURE",
        help="where to write it, as .png, .svg or .pdf (default: FILE with .png in its suffix's "
        "place)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Draw and return the exit code.

    Raises:
        DynspecError: matplotlib is missing, the trace cannot be read or the picture not written.
    """
    check_matplotlib()
    from sglang_dynspec.observe.trace_plot import draw

    trace = read_trace(arguments.file)
    output: Path = arguments.output or Path(arguments.file).with_suffix(".png")
    try:
        draw(trace, output)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot write --output {os.fspath(output)!r}: {reason}; give a file that can be "
            "written and ends in .png, .svg or .pdf"
        ) from error
    print("\n".join(_summary(trace)))
    print(f"Written: {output}")
    return 0


def _summary(trace: TraceFile) -> Iterator[str]:
    total, switches = trace.total(), trace.switches
    reasons = ", ".join(f"{n} by {reason}" for reason, n in switches.most_common())
    yield (
        f"{trace.policy}: {total.steps} decode steps in {trace.seconds:.1f} s, "
        f"{switches.total()} switches{f' ({reasons})' if reasons else ''}."
    )
    for n in trace.ladder:
        spans = [s.by_num_steps[n] for s in trace.spans() if n in s.by_num_steps]
        seconds = sum(count.seconds for count in spans)
        if spans and seconds > 0:
            tokens, requests = (sum(getattr(c, f) for c in spans) for f in ("tokens", "requests"))
            yield (
                f"  num_steps {n}: {100 * seconds / total.seconds:.1f}% of the decode time, "
                f"{tokens / seconds:.0f} tokens/s, accept length {tokens / requests:.2f}"
            )
    if trace.entries[-1].dropped:
        yield f"{trace.entries[-1].dropped} lines were dropped while it was written."
    if trace.runs > 1:
        yield f"The file holds {trace.runs} runs of the server; this is the last."
