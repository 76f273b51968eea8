"""CUDA graphs beside SGLang's own: what they take, and what happens where that is not to be had."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from sglang_dynspec.engine.ranks import Agreement
from sglang_dynspec.errors import InstallError, RanksError, UnsupportedError

logger = logging.getLogger("sglang_dynspec")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Captured:
    """What capturing has taken."""

    seconds: float
    gigabytes: float
    """GPU memory, in units of 2**30 bytes."""

    def report(self, what: str) -> None:
        """Say so in the log."""
        logger.info(
            "sglang_dynspec: CUDA graphs of %s captured: %.1f s, %.2f GB of GPU memory.",
            what,
            self.seconds,
            self.gigabytes,
        )


def capture(
    what: str,
    make: Callable[[], T],
    device: str,
    *,
    strict: bool,
    agreement: Agreement,
    otherwise: str = "Plain steps do without them",
) -> tuple[T, Captured] | None:
    """Capture graphs, on all ranks or on none.

    Args:
        what: is to run from them, in words.
        make: captures them.
        device: where.
        strict: a capture that fails stops the server.
        agreement: of the ranks of the server.
        otherwise: what happens then, for the log.

    Returns:
        What ``make`` returned, and what it took; None if it failed, which is in the log then.

    Raises:
        InstallError: it failed, under strict.
        RanksError: it failed here, and other ranks wait for this one in their captures.
    """
    started, free = time.perf_counter(), _free_bytes(device)
    try:
        made = make()
    except Exception as error:
        sentence = (
            f"capturing CUDA graphs of {what} failed ({type(error).__name__}: {error}). If GPU "
            "memory is short, lower --mem-fraction-static or --cuda-graph-max-bs"
        )
        if strict:
            raise InstallError(sentence) from error
        logger.error("sglang_dynspec: %s. %s.", sentence, otherwise, exc_info=error)
        tell_failure(agreement, f"graphs of {what}", sentence)
        return None
    took = time.perf_counter() - started
    gigabytes = (free - _free_bytes(device)) / (1 << 30)
    without = [
        rank for rank, done in enumerate(agreement.together(f"graphs of {what}", True)) if not done
    ]
    if without:
        ranks = ", ".join(map(str, without))
        message = "sglang_dynspec: capturing CUDA graphs of %s failed on rank %s. %s."
        logger.error(message, what, ranks, otherwise)
        return None
    return made, Captured(took, gigabytes)


def tell_failure(agreement: Agreement, about: str, sentence: str) -> None:
    """Tell other ranks that what all do at the same time has failed here.

    Raises:
        RanksError: they do not answer, since they wait for this one.
    """
    try:
        agreement.together(about, False)
    except UnsupportedError as error:
        raise RanksError(f"{sentence}; other ranks are stuck in it") from error


def total_bytes(device: str) -> int:
    """Memory of the device in bytes, or 0 where that is not known."""
    return _bytes(device)[1]


def _free_bytes(device: str) -> int:
    return _bytes(device)[0]


def _bytes(device: str) -> tuple[int, int]:
    query = getattr(torch.get_device_module(device), "mem_get_info", None)
    return (0, 0) if query is None else query()  # a CPU has no such figures
