"""EAGLEWorkerV2.forward_batch_generation, routed by the decision on the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dynspec.engine import plain_decode
from sglang_dynspec.engine.controller import Decision
from sglang_dynspec.engine.runtime import DECISION, Runtime


def forward(
    runtime: Runtime,
    wrapped: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run one batch: plainly if that was decided, else through SGLang.

    Args:
        wrapped: SGLang's bound method.
        args: its arguments; the first is the batch.
        kwargs: its arguments by name, among them ``on_publish`` from 0.5.13, and from 0.5.17 on
            ``grammar_barrier``.
    """
    batch = _argument(args, kwargs, 0, runtime.dialect.batch_parameter)
    decision = None if batch is None else _take_decision(runtime, batch)
    if decision is None and _is_idle(runtime, batch):
        return _follow(runtime, wrapped, batch, args, kwargs)
    result = None
    if decision is not None and not _catch_up(runtime, batch, decision):
        runtime.controller.instead(decision)
    if decision is not None and decision.num_steps == 0:
        result = _try_plain(
            runtime,
            batch,
            as_verified=decision.as_verified,
            on_publish=_argument(args, kwargs, 1, "on_publish"),
            barrier=kwargs.get("grammar_barrier"),
        )
        if result is None:
            runtime.controller.instead(decision)
    if result is None:
        num_steps = 0 if decision is None else decision.num_steps
        with runtime.step_states.active(num_steps):
            result = wrapped(*args, **kwargs)
    if decision is not None:
        setattr(result, DECISION, decision)
    return result


def _is_idle(runtime: Runtime, batch: Any) -> bool:
    return (
        runtime.exchange is not None
        and batch is not None
        and batch.forward_mode.is_idle()
        and not batch.is_extend_in_batch
    )


def _follow(
    runtime: Runtime,
    wrapped: Callable[..., Any],
    batch: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Take part, without requests, in the step that the other ranks of DP attention run."""
    assert runtime.exchange is not None
    verdict = runtime.exchange.verdict
    if verdict is None:
        return wrapped(*args, **kwargs)
    keeping = runtime.keeping
    if verdict.extend is not None and keeping is not None:
        keeping.run_idle(batch, verdict.extend)
    if verdict.num_steps == 0:
        runtime.target.renew()
        return plain_decode.run_idle(
            runtime.dialect,
            runtime.target,
            runtime.worker,
            batch,
            extend=runtime.extending,
            on_publish=_argument(args, kwargs, 1, "on_publish"),
        )
    with runtime.step_states.active(verdict.num_steps):
        return wrapped(*args, **kwargs)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _take_decision(runtime: Runtime, batch: Any) -> Decision | None:
    try:
        return _decision_on(runtime, batch)
    except Exception as error:
        _fail(runtime, "reading the decision on a batch failed", error)
        return None


def _fail(runtime: Runtime, what: str, error: Exception) -> None:
    """Leave this step, and those to come, to SGLang.

    With DP attention it cannot be: the other ranks run what has been agreed on, and would wait for
    this one for good.
    """
    runtime.controller.fail(what, error)
    if runtime.exchange is not None:
        raise error


def _decision_on(runtime: Runtime, batch: Any) -> Decision | None:
    if not runtime.dialect.is_decode(batch):
        runtime.wishes.look_at(batch.reqs or ())
        runtime.controller.interrupt(_kind(batch))
        return None
    decision: Decision | None = vars(batch.spec_info).pop(DECISION, None)
    if decision is None:
        runtime.controller.interrupt("undecided")
    else:
        runtime.controller.take(decision)
    return decision


def _kind(batch: Any) -> str:
    mode = batch.forward_mode
    if mode.is_idle():
        return "idle"
    if mode.is_mixed():
        return "mixed"
    return "prefill" if mode.is_extend() else "other"


def _catch_up(runtime: Runtime, batch: Any, decision: Decision) -> bool:
    """Let the draft take in what it has missed, if that was decided.

    Returns:
        Whether that went well.
    """
    keeping = runtime.keeping
    if keeping is None:
        return True
    if decision.num_steps:
        keeping.took_speculative_step()
        if runtime.exchange is not None and decision.plan is None:
            keeping.give_up(batch.reqs)
    if decision.plan is None and decision.extend is None:
        return True
    try:
        keeping.run(batch, decision.plan, decision.extend)
    except Exception as error:
        _resolve_proposals(runtime, batch)
        _fail(runtime, "the draft model could not catch up", error)
        return False
    return True


def _try_plain(runtime: Runtime, batch: Any, **how: Any) -> Any:
    before = vars(batch).copy()
    try:
        runtime.target.renew()
        return plain_decode.run(
            runtime.dialect,
            runtime.target,
            runtime.worker,
            batch,
            extend=runtime.extending,
            keep=runtime.keeping,
            **how,
        )
    except Exception as error:
        # Nothing is committed yet: the KV written lies past the committed length, and lengths that
        # were published are published again. SGLang's own step can take over from the same batch.
        vars(batch).update(before)
        _resolve_proposals(runtime, batch)
        _fail(runtime, "a plain decode step failed", error)
        return None


def _resolve_proposals(runtime: Runtime, batch: Any) -> None:
    # The relay has brought only the pending tokens, if the draft was to be left alone.
    if batch.spec_info.topk_p is None:
        runtime.scheduler.future_map._resolve_spec_extras(batch)
