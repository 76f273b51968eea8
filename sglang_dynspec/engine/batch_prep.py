"""The scheduler's batch preparation: a view of the batch, and the decision on it."""

from __future__ import annotations

from typing import Any

from sglang_dynspec.engine.runtime import DECISION, Runtime
from sglang_dynspec.policy.base import BatchView


def decide(runtime: Runtime, batch: Any) -> None:
    """Decide the step that a ScheduleBatch is being prepared for; the decision stays on it."""
    if batch.spec_info is None:
        return
    decision = runtime.controller.decide(view(runtime, batch), runtime.dialect.blocked(batch))
    setattr(batch.spec_info, DECISION, decision)


def view(runtime: Runtime, batch: Any) -> BatchView:
    """What the policy may see of a ScheduleBatch; nothing of it waits for the device."""
    controller, scheduler = runtime.controller, runtime.scheduler
    allocator = scheduler.token_to_kv_pool_allocator
    return BatchView(
        batch_size=len(batch.reqs),
        ladder=controller.ladder,
        context_tokens=runtime.dialect.context_tokens(batch),
        waiting=len(scheduler.waiting_queue),
        kv_usage=1.0 - allocator.available_size() / allocator.size,
        last_num_steps=controller.last_num_steps,
        step=controller.next_step,
    )
