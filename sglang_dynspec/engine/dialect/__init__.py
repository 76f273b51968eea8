"""What differs between releases of SGLang. The only place that compares version numbers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from sglang_dynspec.errors import UnsupportedError

if TYPE_CHECKING:
    from sglang_dynspec.engine.dialect.base import Dialect

SUPPORTED = ("0.5.9", "0.5.17", "0.5.23")
"""Releases that the test suite runs on; 0.5.17 has been run on a GPU by hand instead."""


def installed_release() -> str:
    """The version of the installed SGLang, without a local or post-release part.

    Raises:
        UnsupportedError: SGLang is importable, but not installed as a distribution.
    """
    try:
        full = version("sglang")
    except PackageNotFoundError:
        raise UnsupportedError(
            "the version of SGLang is unknown, because no distribution named sglang is installed; "
            "install SGLang with pip"
        ) from None
    return full.partition("+")[0].partition(".post")[0]


def select(release: str) -> Dialect:
    """The dialect of a release.

    Raises:
        UnsupportedError: dynspec has not been tested on it.
    """
    if release == "0.5.9":
        from sglang_dynspec.engine.dialect.model_worker_batch import ModelWorkerBatchDialect

        return ModelWorkerBatchDialect()
    if release == "0.5.23":
        from sglang_dynspec.engine.dialect.schedule_batch import OwnDraftLayoutDialect

        return OwnDraftLayoutDialect()
    if release == "0.5.17":
        from sglang_dynspec.engine.dialect.schedule_batch import ScheduleBatchDialect

        return ScheduleBatchDialect()
    raise UnsupportedError(
        f"SGLang {release} is not supported; this version of sglang_dynspec supports "
        f"{', '.join(SUPPORTED)}"
    )
