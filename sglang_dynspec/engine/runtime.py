"""What is in force in this process: one scheduler, its worker, and the controller between them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_dynspec.engine.capture import Captured
from sglang_dynspec.engine.catch_up import CatchUp
from sglang_dynspec.engine.controller import Controller
from sglang_dynspec.engine.decode_graph import PlainTarget
from sglang_dynspec.engine.dialect.base import Dialect
from sglang_dynspec.engine.draft_state import DraftExtend
from sglang_dynspec.engine.exchange import Exchange
from sglang_dynspec.engine.ranks import Ranks
from sglang_dynspec.engine.step_states import StepStates
from sglang_dynspec.engine.verified_counts import VerifiedCounts
from sglang_dynspec.engine.wishes import Wishes


@dataclass(slots=True)
class Runtime:
    """Made after SGLang's Scheduler has been built, when dynspec is in force."""

    scheduler: Any
    worker: Any
    dialect: Dialect
    controller: Controller
    target: PlainTarget
    draft_extend: DraftExtend
    step_states: StepStates
    draft_state: str
    """``catch_up``, ``warm`` or ``skip``."""
    verified_counts: VerifiedCounts | None
    """None after a failure."""
    catch_up: CatchUp | None = None
    ranks: Ranks | None = None
    """This rank's end of a tensor-parallel server."""
    exchange: Exchange | None = None
    """This rank's end of a server with DP attention."""
    wishes: Wishes = field(default_factory=Wishes)
    """What requests ask for."""

    @property
    def keeping(self) -> CatchUp | None:
        """What keeps what the draft misses, under ``catch_up``."""
        return self.catch_up if self.draft_state == "catch_up" else None

    @property
    def extending(self) -> DraftExtend | None:
        """What writes the draft's KV in plain steps, under ``warm``."""
        return self.draft_extend if self.draft_state == "warm" else None

    def gpu_memory_gb(self) -> float:
        """What we take, in units of 2**30 bytes: graphs of our own, and what the draft misses."""
        ring = 0 if self.keeping is None else self.keeping.bytes / (1 << 30)
        graphs = self._captured().values()
        return round(ring + sum(made.gigabytes for made in graphs if made is not None), 3)

    def cuda_graphs(self) -> dict[str, Any]:
        """What capturing our own graphs took, or None for what runs without. JSON-native."""
        return {name: captured and asdict(captured) for name, captured in self._captured().items()}

    def _captured(self) -> dict[str, Captured | None]:
        graphs = {"plain_decode": self.target.captured, "draft_extend": self.draft_extend.captured}
        return graphs | {f"num_steps_{n}": made for n, made in self.step_states.captured.items()}


# The decision travels on SGLang's own objects: from batch preparation to the worker on the draft
# state (ModelWorkerBatch is made anew in between, and keeps only that), from the worker to the
# result processor on the result.
DECISION = "dynspec_decision"
