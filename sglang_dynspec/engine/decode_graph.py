"""The target as it would be on a server without speculation."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dynspec.engine.dialect.base import Dialect
from sglang_dynspec.engine.temporarily import temporarily
from sglang_dynspec.errors import InstallError

logger = logging.getLogger("sglang_dynspec")


@dataclass(frozen=True, slots=True)
class Captured:
    """What capturing the graphs has taken."""

    seconds: float
    gigabytes: float
    """GPU memory, in units of 2**30 bytes."""


class PlainTarget:
    """Hides speculation from the target's model runner while a plain step runs.

    The target's graph runner has captured TARGET_VERIFY, not DECODE, because its
    ``spec_algorithm`` was set at capture; a plain step must not replay that. It runs from graphs of
    its own once :meth:`capture` has made them, and eagerly before.
    """

    def __init__(self, dialect: Dialect, worker: Any) -> None:
        self._dialect = dialect
        self._runner = worker.target_worker.model_runner
        self.captured: Captured | None = None
        """The graphs of plain decode, or None where it runs eagerly."""
        self._values = {"spec_algorithm": SpeculativeAlgorithm.NONE, dialect.graph_runner: None}

    def capture(self, *, keep_hidden: bool, strict: bool) -> None:
        """Capture decode graphs for the batch sizes of SGLang's own, where SGLang has any.

        Args:
            keep_hidden: capture the hidden states that the draft model consumes.
            strict: a capture that fails stops the server; otherwise plain steps run eagerly.

        Raises:
            InstallError: the capture failed, under strict.
        """
        if getattr(self._runner, self._dialect.graph_runner, None) is None:
            return  # --disable-cuda-graph, or a device without graphs
        started = time.perf_counter()
        free_before = self._free_bytes()
        try:
            with self.active():
                graphs = self._dialect.capture_decode_graphs(self._runner, keep_hidden=keep_hidden)
        except Exception as error:
            capture_failed("plain decode", error, strict=strict)
            return
        self._values.update(graphs)
        self.captured = Captured(
            seconds=time.perf_counter() - started,
            gigabytes=(free_before - self._free_bytes()) / (1 << 30),
        )
        logger.info(
            "sglang_dynspec: CUDA graphs of plain decode captured: %.1f s, %.2f GB of GPU memory.",
            self.captured.seconds,
            self.captured.gigabytes,
        )

    def _free_bytes(self) -> int:
        query = getattr(torch.get_device_module(self._runner.device), "mem_get_info", None)
        return 0 if query is None else int(query()[0])  # a CPU has no such figure

    def as_dict(self) -> dict[str, float] | None:
        """What is captured, JSON-native."""
        return None if self.captured is None else asdict(self.captured)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The model runner without speculation; restored exactly at the end."""
        with temporarily(self._runner, **self._values):
            yield


def capture_failed(what: str, error: Exception, *, strict: bool) -> None:
    """Report that graphs could not be captured.

    Args:
        what: is to run from them.
        strict: raise it.

    Raises:
        InstallError: under strict.
    """
    sentence = (
        f"capturing CUDA graphs of {what} failed ({type(error).__name__}: {error}). If GPU memory "
        "is short, lower --mem-fraction-static or --cuda-graph-max-bs"
    )
    if strict:
        raise InstallError(sentence) from error
    logger.error("sglang_dynspec: %s. It runs without.", sentence, exc_info=error)
