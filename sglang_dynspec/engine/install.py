"""Putting dynspec in force in a scheduler process: probe the contract, then wrap all or nothing.

SGLang's module is only hooked at its import; everything else waits until a Scheduler is built.
Then the release, the contract and the settings are checked and the wrappers are set, before the
Scheduler stores bound methods in its dispatcher; the server's arguments are checked once it stands.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import wrapt

from sglang_dynspec.engine import contract
from sglang_dynspec.engine.dialect import installed_release, select
from sglang_dynspec.errors import (
    ContractError,
    DynspecError,
    InstallError,
    RanksError,
    UnsupportedError,
)
from sglang_dynspec.settings import strict_from_environment

if TYPE_CHECKING:
    from sglang_dynspec.engine.catch_up import CatchUp
    from sglang_dynspec.engine.exchange import Exchange
    from sglang_dynspec.engine.live import Changes
    from sglang_dynspec.engine.metrics import Exporter
    from sglang_dynspec.engine.ranks import Agreement, Ranks
    from sglang_dynspec.engine.runtime import Runtime
    from sglang_dynspec.settings import Settings

logger = logging.getLogger("sglang_dynspec")

_CATCH_UP_BYTES = 512 << 20
_RING_FIX = "lower --mem-fraction-static, or set SGLANG_DYNSPEC_CATCH_UP_BYTES"

SettingsSource = Callable[[], "Settings"]


@dataclass
class _State:
    """One per process."""

    settings_source: SettingsSource | None = None
    about: dict[str, Any] = field(default_factory=dict)
    scheduler_hooked: bool = False
    wrapped: bool = False
    dialect: Any = None
    runtime: Any = None
    exporter: Exporter | None = None
    """Of the metrics, once SGLang has brought its own up to date."""
    scheduler_seen: bool = False
    refusal: str | None = None
    changes: Any = None
    """What was asked for while serving, see ``live``."""


_state = _State()


def arm(settings_source: SettingsSource, about: dict[str, Any]) -> None:
    """Be in force in every Scheduler that is built in this process from now on.

    Args:
        settings_source: called when a Scheduler is built; may raise DynspecError.
        about: what every status is to carry, JSON-native.
    """
    _state.settings_source = settings_source
    _state.about = about
    _state.refusal = None
    if _state.scheduler_seen and _state.runtime is None:
        _state.refusal = (
            "the Scheduler of this process was built before; activate dynspec before SGLang is "
            "started"
        )
        _say(logging.WARNING, "sglang_dynspec is NOT in force: %s.", _state.refusal)


def disarm() -> None:
    """Leave every wrapper to SGLang's own behaviour, at once."""
    _state.settings_source = None
    # Where ranks must agree, the wrappers stay until all have heard of it, and pass through then.
    if _state.runtime is not None and _state.runtime.controller.release():
        _state.runtime.controller.end_trace()
        _state.runtime = None
        if _state.exporter is not None:
            _state.exporter.end()


def hook_scheduler() -> None:
    """Wrap the Scheduler's constructor, where all else is decided, and its state, where the outcome
    shows whatever it is; called after SGLang's scheduler module has been imported."""
    if _state.scheduler_hooked:
        return
    _wrap_each(
        {contract.SCHEDULER_INIT: _scheduler_init, contract.INTERNAL_STATE: _internal_state},
        enabled=_armed,
    )
    _state.scheduler_hooked = True
    _hook_changes()


def _hook_changes() -> None:
    """Let what a server does be changed while it serves. It serves without that as well."""
    problems = contract.probe(contract.CHANGES)
    if problems:
        message = "sglang_dynspec: nothing can be changed while serving: %s."
        _say(logging.WARNING, message, "; ".join(problems))
        return
    # Also when released: our keys mean nothing to SGLang, which up to 0.5.9 says yes to any.
    _wrap_each({contract.SET_INTERNAL_STATE: _set_internal_state}, enabled=lambda: True)


def status() -> dict[str, Any]:
    """What is in force in this process. JSON-native."""
    runtime = _state.runtime
    if runtime is not None:
        return {
            "state": _state_of(runtime),
            **_state.about,
            "draft_state": runtime.draft_state,
            "catch_up": runtime.keeping and runtime.keeping.as_dict(),
            "cuda_graphs": runtime.cuda_graphs(),
            "gpu_memory_gb": runtime.gpu_memory_gb(),
            "dp_rank": runtime.dialect.dp_rank(runtime.scheduler),
            "tp_rank": 0 if runtime.ranks is None else runtime.ranks.rank,
            "metrics": _state.exporter and _state.exporter.status(),
            **runtime.controller.as_dict(),
            **_changes().as_dict(),
        }
    if _state.refusal is not None:
        return {
            "state": "refused",
            **_state.about,
            "reason": _state.refusal,
            **_changes().as_dict(),
        }
    return {"state": "armed", **_state.about}


def _state_of(runtime: Runtime) -> str:
    return "static" if runtime.controller.static else "in_force"


def _changes() -> Changes:
    from sglang_dynspec.engine.live import Changes

    if _state.changes is None:
        _state.changes = Changes()
    made: Changes = _state.changes
    return made


def runtime() -> Any:
    """The Runtime in force in this process, or None."""
    return _state.runtime


def _armed() -> bool:
    return _state.settings_source is not None


def _in_force() -> bool:
    return _state.runtime is not None


def _scheduler_init(
    wrapped: Callable[..., Any], scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    _state.refusal = None
    # The settings themselves may be what is wrong: then only the environment can say `strict`.
    settings = _attempt(_read_settings, strict_from_environment())
    ready = settings is not None and _attempt(_prepare, settings.strict)
    result = wrapped(*args, **kwargs)
    if ready:
        _attempt(lambda: _engage(scheduler, settings), settings.strict)
    elif _state.refusal is not None:
        _disagree(scheduler)
    return result


def _disagree(scheduler: Any) -> None:
    """Tell the other ranks that dynspec is not in force on this one."""
    try:
        _agreement(scheduler).fail(_state.refusal or "")
    except Exception as error:  # SGLang runs as it does without us, also where it looks different
        message = (
            "sglang_dynspec: other ranks could not be told that it is not in force on this one."
        )
        _say(logging.WARNING, message, exc_info=error)


def _arguments(scheduler: Any) -> Any:
    from sglang_dynspec.engine.server_arguments import in_effect

    return in_effect(scheduler.server_args)


def _agreement(scheduler: Any) -> Agreement:
    """Between the ranks of a tensor-parallel server, or of this one with itself."""
    from sglang_dynspec.engine.ranks import Agreement

    if _arguments(scheduler).tp_size == 1:
        return Agreement()
    from torch.distributed import get_rank, get_world_size

    return Agreement(get_rank(), get_world_size())


def _attempt(action: Callable[[], Any], strict: bool) -> Any:
    """Run a part of the installation; what fails leaves SGLang as it is, unless strict."""
    try:
        return action()
    except Exception as error:
        expected = isinstance(error, DynspecError)
        reason = str(error) if expected else f"{type(error).__name__}: {error}"
        _state.refusal = reason
        if strict or isinstance(error, RanksError):
            raise
        _say(
            logging.ERROR,
            "sglang_dynspec is NOT in force: %s. SGLang runs as it does without it.",
            reason.rstrip("."),
            exc_info=None if expected else error,
        )
        return None


def _read_settings() -> Settings:
    assert _state.settings_source is not None
    settings = _state.settings_source()
    _warn_of_unknown_variables()
    return settings


def _prepare() -> bool:
    """Check the release and its names, and set the wrappers.

    Returns:
        True.

    Raises:
        UnsupportedError: the release is not supported, or not as expected.
    """
    release = installed_release()
    dialect = select(release)
    _require(contract.probe((*contract.COMMON, *dialect.contract)), release, dialect)
    _state.dialect = dialect
    _wrap_all()
    return True


def _require(problems: list[str], release: str, dialect: Any) -> None:
    if problems:
        raise ContractError(
            f"SGLang {release} does not look as expected: {'; '.join(problems)}. Use a released "
            f"SGLang {dialect.family}, or a newer sglang_dynspec"
        )


def _warn_of_unknown_variables() -> None:
    from sglang_dynspec.settings import unknown_variables

    for warning in unknown_variables():
        _say(logging.WARNING, "sglang_dynspec: %s", warning)


def _engage(scheduler: Any, settings: Settings) -> None:
    agreement = _agreement(scheduler)
    try:
        _require_same(settings, agreement)
        runtime = _make_runtime(scheduler, settings, agreement)
    except Exception as error:
        agreement.fail(str(error))
        raise
    agreement.together("the end of the start", None)
    if _state.runtime is not None:
        _say(
            logging.WARNING,
            "sglang_dynspec: a second Scheduler has been built in this process; the first is left "
            "to SGLang from now on.",
        )
        _state.runtime.controller.release()
        _state.runtime.controller.end_trace()
    _state.runtime = runtime
    _state.exporter = None
    _state.scheduler_seen = True
    _say_in_force(runtime, settings)
    if settings.trace is not None:
        _trace(runtime, settings.trace, settings)


def _require_same(settings: Settings, agreement: Agreement) -> None:
    """What ranks do at start follows from these."""
    mine = [settings.policy, settings.draft_state, list(settings.steps)]
    told = agreement.together("settings", mine)
    for rank, theirs in enumerate(told):
        if theirs != told[0]:
            raise UnsupportedError(
                f"policy, draft state and draft steps must be the same on all ranks, and are "
                f"{told[0]} on rank 0 and {theirs} on rank {rank}; set the same variables on every "
                "node"
            )


def _say_in_force(runtime: Runtime, settings: Settings) -> None:
    from sglang_dynspec.policy.thresholds import unreached

    most, ladder = runtime.scheduler.max_running_requests, runtime.controller.ladder
    _say(
        logging.INFO,
        "sglang_dynspec is in force: policy %s, draft steps %s, draft state %s, SGLang %s, "
        "max_running_requests %s%s.",
        settings.policy,
        "/".join(map(str, ladder)),
        runtime.draft_state,
        installed_release(),
        most,
        _with_others(runtime),
    )
    policy = runtime.controller.policy
    for says, fix in unreached(policy, most_requests=most, num_steps=ladder[-1]):
        _say(logging.WARNING, "sglang_dynspec: %s; %s.", says, fix)


def _with_others(runtime: Runtime) -> str:
    if runtime.exchange is not None:
        return f", agreed on by all ranks of DP attention (this is rank {runtime.exchange.rank})"
    if runtime.ranks is not None:
        return f", decided by rank 0 (this is rank {runtime.ranks.rank})"
    return ""


def _trace(runtime: Runtime, path: str, settings: Settings) -> None:
    """Trace decisions to a file, if they are taken on this rank."""
    from sglang_dynspec.engine import tracing

    leader = runtime.ranks or runtime.exchange
    if leader is not None and not leader.leads:
        return
    try:
        runtime.controller.trace = tracing.begin(runtime, path, settings, installed_release())
    except Exception as error:
        _say(logging.WARNING, "sglang_dynspec: the trace could not be begun.", exc_info=error)


def _ranks(scheduler: Any, most: int, agreement: Agreement) -> Ranks | None:
    """This rank's end where there are several with the same requests, or None."""
    from torch.distributed import get_rank

    from sglang_dynspec.engine.ranks import Ranks
    from sglang_dynspec.engine.support import attention_replicas

    arguments = _arguments(scheduler)
    if arguments.tp_size == 1 or attention_replicas(arguments) > 1:
        return None
    return Ranks(get_rank(), most, agreement)


def _exchange(scheduler: Any, most: int) -> Exchange | None:
    """This rank's end of DP attention, or None."""
    from torch.distributed import get_rank

    from sglang_dynspec.engine.exchange import Exchange
    from sglang_dynspec.engine.support import attention_replicas

    arguments = _arguments(scheduler)
    replicas = attention_replicas(arguments)
    if replicas == 1:
        return None
    rank, within = divmod(get_rank(), arguments.tp_size // replicas)
    return Exchange(rank, most, leads=within == 0)


def _make_runtime(scheduler: Any, settings: Settings, agreement: Agreement) -> Runtime:
    from sglang_dynspec.engine import support
    from sglang_dynspec.engine.controller import Controller
    from sglang_dynspec.engine.decode_graph import PlainTarget
    from sglang_dynspec.engine.draft_state import DraftExtend
    from sglang_dynspec.engine.runtime import Runtime
    from sglang_dynspec.engine.timing import Graphs

    refusal = support.refusal(scheduler)
    if refusal is not None:
        raise UnsupportedError(refusal)
    dialect = _state.dialect
    _require(
        contract.probe_live(scheduler, (*contract.LIVE, *dialect.live)),
        installed_release(),
        dialect,
    )
    worker = scheduler.draft_worker
    policy = settings.build_policy()
    step_states = _step_states(worker, settings, agreement)
    ladder = (0, *step_states.steps, worker.speculative_num_steps)
    ranks = _ranks(scheduler, ladder[-1], agreement)
    exchange = _exchange(scheduler, ladder[-1])
    controller = Controller(policy, ladder, ranks=ranks, agrees=exchange is not None)
    catch_up, draft_state = _catch_up(scheduler, settings, agreement), settings.draft_state
    if draft_state == "catch_up" and catch_up is None:
        draft_state = "warm"
    warm = draft_state == "warm"
    target = PlainTarget(dialect, worker, agreement)
    draft_extend = DraftExtend(dialect, worker, agreement)
    returned = dialect.returns_hidden_states and _arguments(scheduler).enable_return_hidden_states
    kept = catch_up is not None and dialect.keeps_hidden(worker)
    keep_hidden = returned or kept or (warm and draft_extend.reads_hidden)
    target.capture(keep_hidden=keep_hidden, strict=settings.strict)
    if warm:
        draft_extend.narrow(strict=settings.strict)
    if policy.wants_timings:
        graphs = Graphs(dialect, worker, target, draft_extend if warm else None, step_states)
        _time_graphs(graphs, controller, agreement)
    return Runtime(
        scheduler,
        worker,
        dialect,
        controller,
        target,
        draft_extend,
        step_states,
        draft_state,
        dialect.verified_counts(scheduler),
        catch_up,
        ranks,
        exchange,
    )


def _time_graphs(graphs: Any, controller: Any, agreement: Agreement) -> None:
    """Let the policy know what steps take. Where that fails it learns it from steps."""
    from sglang_dynspec.engine.capture import tell_failure
    from sglang_dynspec.engine.timing import in_words

    started, about = time.perf_counter(), "timing CUDA graphs"
    message = "sglang_dynspec: timing CUDA graphs failed; the policy learns from steps alone."
    try:
        timings = graphs.timings(controller.ladder)
    except Exception as error:
        _say(logging.WARNING, message, exc_info=error)
        tell_failure(agreement, about, f"{about} failed ({type(error).__name__}: {error})")
        return
    if not all(agreement.together(about, True)):
        _say(logging.WARNING, message)
        return
    if not timings:
        message = "sglang_dynspec: steps do not run from CUDA graphs throughout: none timed."
        _say(logging.INFO, message)
        return
    controller.observe_timings(timings)
    _say(
        logging.INFO,
        "sglang_dynspec: CUDA graphs timed for the policy: %.1f s. %s.",
        time.perf_counter() - started,
        in_words(timings),
    )


def _catch_up(scheduler: Any, settings: Settings, agreement: Agreement) -> CatchUp | None:
    """What keeps what the draft misses, or None: not wanted, or no memory for it."""
    from sglang_dynspec.engine.catch_up import CatchUp

    if settings.draft_state != "catch_up":
        return None
    made = _ring(scheduler, settings, agreement)
    lacks = None if isinstance(made, CatchUp) else made
    told = agreement.together("the ring", lacks)
    if isinstance(made, CatchUp) and not any(told):
        _say(
            logging.INFO,
            "sglang_dynspec: the draft can catch up with the last %d tokens of each request: %.2f "
            "GB (SGLANG_DYNSPEC_CATCH_UP_BYTES).",
            made.tokens,
            made.bytes / (1 << 30),
        )
        return made
    _say(
        logging.WARNING,
        "sglang_dynspec: what the draft misses cannot be kept (%s), so the draft state is warm "
        "instead of catch_up; %s.",
        lacks or next(f"on rank {rank}: {reason}" for rank, reason in enumerate(told) if reason),
        _RING_FIX,
    )
    return None


def _ring(scheduler: Any, settings: Settings, agreement: Agreement) -> CatchUp | str:
    """What keeps what the draft misses, or why there is no memory for it."""
    from torch import OutOfMemoryError

    from sglang_dynspec.engine.capture import total_bytes
    from sglang_dynspec.engine.catch_up import CatchUp
    from sglang_dynspec.engine.support import attention_replicas

    worker, budget = scheduler.draft_worker, settings.catch_up_bytes
    if budget is None:
        hundredth = total_bytes(worker.device) // 100
        budget = min(_CATCH_UP_BYTES, hundredth or _CATCH_UP_BYTES)
    # What the draft takes in follows from the size, and has to be the same on all ranks.
    budget = min(agreement.together("the ring's size", budget))
    try:
        return CatchUp(
            _state.dialect,
            worker,
            budget,
            scheduler.chunked_prefill_size,
            replicas=attention_replicas(_arguments(scheduler)),
        )
    except (OutOfMemoryError, UnsupportedError) as error:
        # Whoever names a size is to get it.
        if settings.strict or settings.catch_up_bytes:
            says = f"what the draft misses cannot be kept ({error}); {_RING_FIX}"
            raise InstallError(says) from error
        return str(error)


def _step_states(worker: Any, settings: Settings, agreement: Agreement) -> Any:
    from sglang_dynspec.engine.step_states import StepStates
    from sglang_dynspec.engine.support import only_on_off, steps_refusal

    made, most = StepStates(_state.dialect, worker, agreement), worker.speculative_num_steps
    refusal = steps_refusal(settings.steps, most)
    if refusal is not None:
        raise UnsupportedError(refusal)
    between = [n for n in settings.steps if 0 < n < most]
    what = only_on_off(worker) if _state.dialect.builds_steps else f"SGLang {installed_release()}"
    if between and what is not None:
        _say(
            logging.WARNING,
            "sglang_dynspec: %s can run 0 or %d draft steps only; %s left out. Others can be had "
            "with EAGLE and EAGLE3 at --speculative-eagle-topk 1, from SGLang 0.5.12 on.",
            what,
            most,
            ", ".join(map(str, between)),
        )
        return made
    made.build(between, strict=settings.strict)
    return made


def _say(level: int, message: str, *args: Any, **kwargs: Any) -> None:
    # SGLang's dictConfig (SGLANG_LOGGING_CONFIG_PATH) disables loggers that are older than it.
    logger.disabled = False
    logger.log(level, message, *args, **kwargs)


def _wrap_all() -> None:
    if not _state.wrapped:
        relayed = _RELAY_WRAPPERS if _state.dialect.has_relay else {}
        moved = {
            _state.dialect.broadcast: _broadcast,
            _state.dialect.exchange: _gather,
            _state.dialect.log_stats: _log_stats,
        }
        _wrap_each(_WRAPPERS | relayed | moved, enabled=_in_force)
        _state.wrapped = True


def _wrap_each(wrappers: dict[str, Any], enabled: Callable[[], bool]) -> None:
    """Wrap all of them, or none."""
    originals: list[tuple[Any, str, Any]] = []
    try:
        for path, wrapper in wrappers.items():
            originals.append(_wrap(path, wrapper, enabled))
    except Exception:
        for owner, attribute, original in originals:
            setattr(owner, attribute, original)
        raise


def _wrap(path: str, wrapper: Any, enabled: Callable[[], bool]) -> tuple[Any, str, Any]:
    # `enabled` instead of unwrapping: once something else has wrapped ours (SGLang's HookRegistry,
    # for one), ours cannot be taken out again without taking out theirs.
    owner, attribute = contract.owner_of(path)
    original = vars(owner)[attribute]
    setattr(owner, attribute, wrapt.FunctionWrapper(original, wrapper, enabled))
    return owner, attribute, original


def _prepare_for_decode(
    wrapped: Callable[..., Any], batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from sglang_dynspec.engine import batch_prep

    current = _state.runtime
    if current is not None:  # not deactivated by another thread since the wrapper was entered
        try:
            batch_prep.decide(current, batch)
        except Exception as error:
            current.controller.fail("the decision on a batch failed", error)
    return wrapped(*args, **kwargs)


def _forward(
    wrapped: Callable[..., Any], worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from sglang_dynspec.engine import worker as routing

    current = _state.runtime
    if current is None or worker is not current.worker:
        return wrapped(*args, **kwargs)
    return routing.forward(current, wrapped, args, kwargs)


def _draft_prefill(
    wrapped: Callable[..., Any], draft_worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from sglang_dynspec.engine import draft_prefill

    current = _state.runtime
    if current is None or draft_worker is not current.worker.draft_worker:
        return wrapped(*args, **kwargs)
    if current.keeping is not None and current.keeping.running:
        return wrapped(*args, **kwargs)
    try:
        batch = args[0] if args else kwargs["batch"]
        hidden = args[1] if len(args) > 1 else kwargs["target_hidden_states"]
        tokens = args[2] if len(args) > 2 else kwargs["next_token_ids"]
        blank = draft_prefill.instead(current, batch, hidden, tokens)
        if blank is not None:
            return blank
    except Exception as error:
        current.controller.fail("leaving out the draft model's prefill failed", error)
    return wrapped(*args, **kwargs)


def _process_result(
    wrapped: Callable[..., Any], scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from sglang_dynspec.engine import results

    current = _state.runtime
    if current is None or scheduler is not current.scheduler:
        return wrapped(*args, **kwargs)
    batch = args[0] if args else kwargs["batch"]
    result = args[1] if len(args) > 1 else kwargs["result"]
    results.before(current, batch, result)
    returned = wrapped(*args, **kwargs)
    try:
        results.observe(current, result)
    except Exception as error:
        current.controller.fail("reading a result failed", error)
    return returned


def _log_stats(
    wrapped: Callable[..., Any], collector: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from sglang_dynspec.engine.metrics import Exporter

    returned = wrapped(*args, **kwargs)
    current = _state.runtime
    if current is not None:
        if _state.exporter is None or _state.exporter.collector is not collector:
            _state.exporter = Exporter(collector)
        _state.exporter.flush(current, _state_of(current))
    return returned


def _sleep_on_idle(
    wrapped: Callable[..., Any], scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    current, exporter = _state.runtime, _state.exporter
    if current is not None and exporter is not None and scheduler is current.scheduler:
        exporter.flush_at_idle(current, _state_of(current))
    return wrapped(*args, **kwargs)


def _broadcast(
    wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    current = _state.runtime
    if current is None or current.ranks is None:
        return wrapped(*args, **kwargs)
    return current.ranks.exchange(wrapped, args, kwargs)


def _gather(
    wrapped: Callable[..., Any], info: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    current = _state.runtime
    if current is None or current.exchange is None:
        return wrapped(*args, **kwargs)
    returned = current.exchange.gather(wrapped, info, args, kwargs)
    verdict = current.exchange.verdict
    if verdict is not None:
        current.controller.follow(verdict)
    return returned


def _run_batch(
    wrapped: Callable[..., Any], scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from sglang_dynspec.engine import relay

    result = wrapped(*args, **kwargs)
    current = _state.runtime
    if current is None or scheduler is not current.scheduler:
        return result
    try:
        relay.note_lengths(current, args[0] if args else kwargs["batch"], result)
    except Exception as error:
        current.controller.fail("noting the lengths after a plain step failed", error)
    return result


def _before(name: str) -> Any:
    """A wrapper that lets a function of ``relay`` do the work, and SGLang where it does not."""

    def wrapper(
        wrapped: Callable[..., Any], future_map: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        from sglang_dynspec.engine import relay

        current = _state.runtime
        if current is None:
            return wrapped(*args, **kwargs)
        try:
            if getattr(relay, name)(current, future_map, *args, **kwargs):
                return None
        except Exception as error:
            current.controller.fail(f"the relay between steps failed ({name})", error)
        return wrapped(*args, **kwargs)

    return wrapper


def _internal_state(
    wrapped: Callable[..., Any], scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    output = wrapped(*args, **kwargs)
    try:
        # A copy: 0.5.9 hands out the live dictionary of its server arguments.
        output.internal_state = {**output.internal_state, "dynspec": status()}
    except Exception:
        logger.exception("sglang_dynspec: the status could not be added to /server_info")
    return output


def _set_internal_state(
    wrapped: Callable[..., Any], scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from sglang_dynspec.engine import change, live

    asked = (args[0] if args else kwargs["recv_req"]).server_args
    if not change.is_change(asked):
        return wrapped(*args, **kwargs)
    current = _state.runtime
    if current is not None and scheduler is not current.scheduler:
        current = None
    outcome = live.request(
        _changes(),
        asked,
        current and current.controller,
        not_in_force=_state.refusal or "it has been released, or was not started",
        most_requests=current and current.scheduler.max_running_requests,
    )
    return live.reply(outcome)


_WRAPPERS: dict[str, Any] = {
    contract.PREPARE_FOR_DECODE: _prepare_for_decode,
    contract.FORWARD: _forward,
    contract.DRAFT_PREFILL: _draft_prefill,
    contract.PROCESS_RESULT: _process_result,
    contract.SLEEP_ON_IDLE: _sleep_on_idle,
}

_RELAY_WRAPPERS: dict[str, Any] = {
    contract.RUN_BATCH: _run_batch,
    contract.RESOLVE_EXTRAS: _before("resolve_extras"),
    contract.RESOLVE_LENGTHS: _before("resolve_lengths"),
    contract.STASH: _before("stash"),
}
