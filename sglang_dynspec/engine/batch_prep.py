"""What a policy sees: views of the batch being prepared, and of the one a prefill leads to."""

from __future__ import annotations

from typing import Any

from sglang_dynspec.engine.controller import Decision
from sglang_dynspec.engine.exchange import Verdict
from sglang_dynspec.engine.runtime import DECISION, Runtime
from sglang_dynspec.policy.base import BatchView


def decide(runtime: Runtime, batch: Any) -> None:
    """Decide the step that a ScheduleBatch is being prepared for; the decision stays on it."""
    if batch.spec_info is None or batch.req_to_token_pool is not runtime.worker.req_to_token_pool:
        return  # nothing to decode, or another scheduler's
    blocked, keeping = runtime.dialect.blocked(batch), runtime.keeping
    cold = () if keeping is None else keeping.cold(batch.reqs)
    controller = runtime.controller
    decision = controller.decide(view(runtime, batch, cold=len(cold)), blocked)
    decision.cold = cold
    may_wait = blocked is None and not controller.paused
    if keeping is not None and decision.num_steps and not controller.final:
        # Also before a step of SGLang's own while paused: what is kept is for the positions right
        # before this step, and for no later one.
        decision.plan = keeping.plan(batch.reqs, may_wait=may_wait)
        if decision.plan is not None and not decision.plan.complete:
            decision.num_steps, decision.postponed = 0, True
    setattr(batch.spec_info, DECISION, decision)
    if runtime.exchange is None:
        _settled(runtime, batch, decision)
        return
    exchange = runtime.exchange

    def settle(verdict: Verdict) -> None:
        controller.settle(decision, verdict)
        if exchange.rank not in verdict.behind:
            decision.plan = None
        elif decision.plan is None and keeping is not None:
            # The process that speaks for this rank has one, and its policy may be another.
            decision.plan = keeping.plan(batch.reqs, may_wait=may_wait)
        _settled(runtime, batch, decision)

    exchange.propose(controller.vote(decision), settle)


def _settled(runtime: Runtime, batch: Any, decision: Decision) -> None:
    decision.as_verified = decision.num_steps == 0 and runtime.dialect.as_verified(batch)
    runtime.controller.decided(decision)


def view(runtime: Runtime, batch: Any, *, cold: int = 0) -> BatchView:
    """What the policy may see of a ScheduleBatch; nothing of it waits for the device.

    Args:
        cold: requests whose draft KV has a hole.
    """
    return _view(
        runtime,
        batch_size=len(batch.reqs),
        context_tokens=runtime.dialect.context_tokens(batch),
        waiting=len(runtime.scheduler.waiting_queue),
        cold=cold,
        **runtime.wishes.count(batch.reqs),
    )


def after_prefill(runtime: Runtime, batch: Any) -> BatchView:
    """The decode batch that the worker's prefill batch leads to, with those that wait as far as
    they fit: as long as there are any, SGLang prefills before it decodes."""
    scheduler = runtime.scheduler
    running = scheduler.running_batch
    waiting = len(scheduler.waiting_queue)
    wanted = len(running.reqs) + len(batch.seq_lens) + waiting
    batch_size = min(wanted, scheduler.max_running_requests)
    return _view(
        runtime,
        batch_size=batch_size,
        context_tokens=runtime.dialect.context_tokens(running) + int(batch.seq_lens_sum),
        waiting=wanted - batch_size,
        **runtime.wishes.count([*running.reqs, *batch.reqs]),
    )


def _view(runtime: Runtime, **known: int) -> BatchView:
    controller, scheduler = runtime.controller, runtime.scheduler
    allocator = scheduler.token_to_kv_pool_allocator
    # As SGLang counts: what only the radix cache keeps is there for the taking.
    free = allocator.available_size() + scheduler.tree_cache.evictable_size()
    return BatchView(
        ladder=controller.ladder,
        kv_usage=1.0 - free / allocator.size,
        last_num_steps=controller.last_num_steps,
        step=controller.next_step,
        **known,
    )
