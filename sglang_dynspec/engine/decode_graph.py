"""The target as it would be on a server without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dynspec.engine.capture import Captured, capture
from sglang_dynspec.engine.dialect.base import Dialect
from sglang_dynspec.engine.ranks import Agreement
from sglang_dynspec.engine.temporarily import temporarily


class PlainTarget:
    """Hides speculation from the target's model runner while a plain step runs.

    The target's graph runner has captured TARGET_VERIFY, not DECODE, because its
    ``spec_algorithm`` was set at capture; a plain step must not replay that. It runs from graphs of
    its own once :meth:`capture` has made them, and eagerly before.
    """

    def __init__(self, dialect: Dialect, worker: Any, agreement: Agreement) -> None:
        self._dialect = dialect
        self._agreement = agreement
        self._runner = worker.target_worker.model_runner
        self.captured: Captured | None = None
        """The graphs of plain decode, or None where it runs eagerly."""
        self._eager = {"spec_algorithm": SpeculativeAlgorithm.NONE, dialect.graph_runner: None}
        self._values = self._eager
        self._theirs: Any = None
        """SGLang's graph runner when ours was captured."""
        self._keep_hidden = False

    def capture(self, *, keep_hidden: bool, strict: bool) -> None:
        """Capture decode graphs for the batch sizes of SGLang's own, where SGLang has any.

        Args:
            keep_hidden: capture the hidden states that the draft model consumes.
            strict: a capture that fails stops the server; otherwise plain steps run eagerly.

        Raises:
            InstallError: the capture failed, under strict.
        """
        self._theirs, self._keep_hidden = self._sglangs_graphs(), keep_hidden
        if self._theirs is None:
            return  # --disable-cuda-graph, or a device without graphs

        def make() -> dict[str, Any]:
            with self.active():
                return self._dialect.capture_decode_graphs(self._runner, keep_hidden=keep_hidden)

        made = capture(
            "plain decode", make, self._runner.device, strict=strict, agreement=self._agreement
        )
        if made is not None:
            graphs, self.captured = made
            self._values = self._eager | graphs
            self.captured.report("plain decode")

    def renew(self) -> None:
        """Capture anew where SGLang has, as it does for new weights with ``recapture_cuda_graph``:
        a graph keeps the tensors that it was captured with. Not within :meth:`active`."""
        if self.captured is not None and self._sglangs_graphs() is not self._theirs:
            self._values, self.captured = self._eager, None
            self.capture(keep_hidden=self._keep_hidden, strict=False)

    def _sglangs_graphs(self) -> Any:
        return getattr(self._runner, self._dialect.graph_runner, None)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The model runner without speculation; restored exactly at the end."""
        with temporarily(self._runner, **self._values):
            yield
