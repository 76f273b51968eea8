"""The subcommand ``advise``: its arguments, and what it reads."""

from __future__ import annotations

import argparse
import json

from sglang_dynspec.advise.advice import advise
from sglang_dynspec.advise.report import as_json, as_text
from sglang_dynspec.errors import ConfigError
from sglang_dynspec.measured import Table, bench_serving, parse_table, shipped_tables
from sglang_dynspec.measured.bench_serving import Run
from sglang_dynspec.measured.table import read_text

_DESCRIPTION = """\
Read measured throughput without speculation and with it, and say at which concurrencies
speculation pays, which policy follows, and what it would gain.
"""

_EPILOG = """\
FILE is
  a table:             {{"rows": [{{"c": 1, "no_spec": 92.6, "static_spec": 77.5}}, ...]}}, such as
                       the results.json of examples/benchmark
  a shipped table:     {tables}
  a benchmark's file:  what `python -m sglang.bench_serving --output-file FILE` has written, where
                       it tells by itself which server speculated

The files of sglang.bench_serving, with --spec, --no-spec or neither, make one table together.

exit code: 0 if there is advice, whatever it is; 2 if a file cannot be used, or nothing can be
compared.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG.format(tables=", ".join(shipped_tables()))
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="measured throughput in both modes, see below"
    )
    parser.add_argument(
        "--no-spec",
        action="append",
        default=[],
        metavar="FILE",
        help="results of sglang.bench_serving against a server without speculation; repeatable",
    )
    parser.add_argument(
        "--spec",
        action="append",
        default=[],
        metavar="FILE",
        help="the same with speculation always on; repeatable",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of text, for programs"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the advice and return the exit code.

    Raises:
        DynspecError: a file cannot be used, or nothing in the files can be compared.
    """
    advice = advise(read_all(arguments.files, arguments.no_spec, arguments.spec))
    print(json.dumps(as_json(advice), indent=1) if arguments.json else as_text(advice))
    return 0


def read_all(files: list[str], no_spec: list[str], spec: list[str]) -> list[Table]:
    """Read the tables, and make one table of all files of the benchmark.

    Args:
        files: tables, or files of the benchmark that tell which server speculated.
        no_spec, spec: files of the benchmark, of servers without speculation and with it.

    Raises:
        ConfigError: a file cannot be used, or there is none.
    """
    tables: list[Table] = []
    runs: list[Run] = []
    for name in files:
        text = read_text(name)
        if bench_serving.looks_like_runs(text):
            runs += bench_serving.parse_runs(text, name)
        else:
            tables.append(parse_table(text, name))
    for names, speculative in ((no_spec, False), (spec, True)):
        for name in names:
            runs += bench_serving.parse_runs(read_text(name), name, speculative=speculative)
    if runs:
        tables.append(bench_serving.table_of(runs))
    if not tables:
        raise ConfigError(
            "no file is given; give a table or files of sglang.bench_serving, or the name of a "
            f"table that comes with the package: {', '.join(shipped_tables())}"
        )
    return tables
