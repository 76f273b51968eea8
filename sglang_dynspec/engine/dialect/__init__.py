"""What differs between releases of SGLang. The only place that compares version numbers."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from sglang_dynspec.errors import UnsupportedError

if TYPE_CHECKING:
    from sglang_dynspec.engine.dialect.base import Dialect

_DIALECTS = {
    "0.5.9": ("model_worker_batch", "EarlierMetricsDialect"),
    "0.5.10": ("model_worker_batch", "ModelWorkerBatchDialect"),
    "0.5.11": ("model_worker_batch", "ModelWorkerBatchDialect"),
    "0.5.12": ("model_worker_batch", "BonusTokensDialect"),
    "0.5.13": ("schedule_batch_early", "WholeForwardBarrierDialect"),
    "0.5.14": ("schedule_batch_early", "ModeOnBatchDialect"),
    "0.5.15": ("schedule_batch_early", "ModeOnBatchDialect"),
    "0.5.16": ("schedule_batch_early", "DerivedModeDialect"),
    "0.5.17": ("schedule_batch", "ScheduleBatchDialect"),
    "0.5.18": ("schedule_batch_late", "SharedReadDialect"),
    "0.5.19": ("schedule_batch_late", "LengthsOnKvDialect"),
    "0.5.20": ("schedule_batch_late", "LengthsOnKvDialect"),
    "0.5.21": ("schedule_batch_late", "AttentionOwnerDialect"),
    "0.5.22": ("schedule_batch_late", "WatermarkDialect"),
    "0.5.23": ("schedule_batch_late", "OwnDraftLayoutDialect"),
}

SUPPORTED = tuple(_DIALECTS)
"""The test suite runs on the oldest and the newest. By hand its engine tests were run on those
between, on the CPU engine, and 0.5.17 on a GPU as well."""


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
    if release not in _DIALECTS:
        raise UnsupportedError(
            f"SGLang {release} is not supported; this version of sglang_dynspec supports "
            f"{', '.join(SUPPORTED)}"
        )
    module, name = _DIALECTS[release]
    # Each imports names that only its releases have.
    dialect = getattr(import_module(f"{__name__}.{module}"), name)
    return dialect()  # type: ignore[no-any-return]
