"""``python -m wheels``: hold the contract against SGLang releases that are not installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_dynspec.engine.dialect import SUPPORTED

from . import fetch, report, tables
from .source import Source

OLDEST = "0.5.8.post1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 if all is as expected, 1 if a release is not, 2 if one is not to be had.
    """
    options = _parser().parse_args(arguments)
    if options.register:
        print(report.register())
        return 0
    try:
        releases = options.releases or _all()
        outcomes = [_outcome(release) for release in releases]
    except fetch.FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.record:
        report.record(outcomes)
    if options.markdown:
        print(report.markdown(outcomes))
        print("\n".join(report.details(outcomes)), file=sys.stderr)
    else:
        print(report.text(outcomes))
    sentences, failed = _verdict(outcomes)
    print("", *sentences, sep="\n", file=sys.stderr if options.markdown else sys.stdout)
    return int(failed)


def _verdict(outcomes: Sequence[report.Outcome]) -> tuple[list[str], bool]:
    """What there is to do, and whether it is a failure."""
    wrong = [one.release for one in outcomes if one.failed]
    stale = [one.release for one in outcomes if one.supported and one.release in report.LEFT_OUT]
    new = [one.release for one in outcomes if one.new and not one.problems]
    changed = sum(len(one.warnings) for one in outcomes)
    said = []
    if changed:
        said.append(f"{changed} functions are not as in the release that was recorded: see above.")
    if new:
        said.append(f"New, and as the table says: {', '.join(new)}. Run the test suite on it.")
    if stale:
        said.append(f"FAILED: supported by now, and still in LEFT_OUT: {', '.join(stale)}.")
    if wrong:
        said.append(f"FAILED: not as the table says: {', '.join(wrong)}.")
    if not (wrong or stale):
        said.append("OK: every release is as expected.")
    return said, bool(wrong or stale)


def _all() -> list[str]:
    known = fetch.releases()
    missing = [key for key in SUPPORTED if key not in map(tables.key_of, known)]
    if missing:
        raise fetch.FetchError(f"the index has no release of {', '.join(missing)}")
    return [r for r in known if tables.order(r) >= tables.order(OLDEST)]


def _outcome(release: str) -> report.Outcome:
    wheel = Path(release)
    if wheel.suffix == ".whl":
        return report.outcome(wheel.name.split("-")[1], Source(wheel))
    return report.outcome(release, Source(fetch.wheel(release)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m wheels", description=__doc__)
    parser.add_argument(
        "releases",
        nargs="*",
        help=f"releases, or paths of wheels; all from {OLDEST} on if there are none",
    )
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument(
        "--register", action="store_true", help="print every name with its releases, and end"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="write down the functions of supported releases as they are now",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
