"""A real SGLang Scheduler inside this process, for tests that look inside or count steps.

Nothing of SGLang is mocked: scheduler, EAGLEWorkerV2, KV pool and radix cache are the real ones,
and the scheduler's own event loop runs. Only its sockets are replaced: requests come from a list,
each at the iteration of the loop that the test names, and outputs are collected.

    with InProcessScheduler("EAGLE3") as scheduler:
        [output] = scheduler.run([Request(input_ids=[5, 6, 7], max_new_tokens=32)])
        print(output.token_ids, output.accept_length)

The process must be prepared first, see :mod:`.cpu_engine`. SGLang keeps much of its state in
module globals, so a process gets one scheduler at a time; see :class:`InProcessScheduler`.
"""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_dynspec.errors import DynspecError, UnsupportedError
from sglang_dynspec.testing import cpu_engine
from sglang_dynspec.testing.ports import free_port

__all__ = ["InProcessScheduler", "Output", "Request", "UnfinishedError"]


class UnfinishedError(DynspecError, RuntimeError):
    """Requests did not finish within the iterations that a run may take."""


@dataclass
class Request:
    """One request of a run.

    Attributes:
        input_ids: the prompt.
        max_new_tokens: how many tokens to generate at most.
        temperature: 0 is greedy.
        arrive_at_step: the iteration of the scheduler's loop, counted from 0 in each run, before
            which the request arrives.
        abort_at_step: the iteration before which an abort of it arrives; None for never.
        ignore_eos: generate on after the end-of-sequence token.
        return_logprob: collect the logprob of every generated token.
        logprob_start_len: where in the prompt logprobs start; -1 for the generated tokens only.
        top_logprobs_num: collect the logprobs of so many likeliest tokens at each position as well.
        return_hidden_states: ask for them, on a server with ``enable_return_hidden_states``.
        custom_logit_processor: its text, on a server with ``enable_custom_logit_processor``.
        sampling_params: any other sampling parameters of SGLang (top_k, stop_token_ids, ...).
        fields: any other fields of SGLang's TokenizedGenerateReqInput.
        rid: the request's id; made when not given.
    """

    input_ids: Sequence[int]
    max_new_tokens: int = 32
    temperature: float = 0.0
    arrive_at_step: int = 0
    abort_at_step: int | None = None
    ignore_eos: bool = True
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_hidden_states: bool = False
    custom_logit_processor: str | None = None
    sampling_params: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    rid: str | None = None


@dataclass
class Output:
    """What a client would have got for a request.

    Attributes:
        rid: the request's id.
        token_ids: the generated tokens.
        chunks: how many of them came with each message: the first is the prefill's, each other
            what one decode step gained (the last may be cut by the end of the request).
        finish_reason: SGLang's, e.g. {"type": "length", "length": 32}; None while unfinished.
        logprobs: of the generated tokens, when asked for.
        top_logprobs: of the likeliest tokens at each of their positions, when asked for.
        hidden_states: of the target, when asked for: a list of rows for each prefill, then a row
            for each decoded token.
        cached_tokens: prompt tokens that the radix cache had.
        retractions: how often the request lost its KV to others and had to start over.
        verify_steps: decode steps that SGLang counted as verification.
        accepted_drafts: draft tokens accepted in them.
        req: SGLang's own Req object, for tests that look inside.
    """

    rid: str
    token_ids: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    hidden_states: list[Any] = field(default_factory=list)
    cached_tokens: int = 0
    retractions: int = 0
    verify_steps: int = 0
    accepted_drafts: int = 0
    req: Any = field(default=None, repr=False)

    @property
    def aborted(self) -> bool:
        """Whether it ended by an abort."""
        return self.finish_reason is not None and self.finish_reason.get("type") == "abort"

    @property
    def accept_length(self) -> float:
        """Mean tokens a decode step, bonus token included; 0.0 if there was none.

        Counted from what arrived, without the last step, which the end of the request may cut.
        """
        steps = self.chunks[1:-1]
        return sum(steps) / len(steps) if steps else 0.0


class InProcessScheduler:
    """A Scheduler of the installed SGLang in this process.

    Args:
        algorithm: None, "EAGLE", "EAGLE3", "NEXTN" or "STANDALONE".
        num_steps: draft steps.
        overlap: run ``event_loop_overlap`` (True) or ``event_loop_normal``.
        models: see :func:`.cpu_engine.server_args`.
        overrides: any other SGLang server argument.

    Attributes:
        scheduler: SGLang's Scheduler.

    Use it as a context manager, or call :meth:`close`. A second one in the same process is possible
    once the first is closed.

    Raises:
        UnsupportedError: the CPU engine is not installed in this process, or another scheduler is
            still open.
    """

    _open: InProcessScheduler | None = None
    _numbers = itertools.count()

    def __init__(
        self,
        algorithm: str | None = None,
        *,
        num_steps: int = 3,
        overlap: bool = True,
        models: Any = None,
        **overrides: Any,
    ) -> None:
        if InProcessScheduler._open is not None:
            raise UnsupportedError(
                "an InProcessScheduler is open already, and SGLang's state is process-wide: "
                "close it first, or start a process for each"
            )
        os.environ.update(cpu_engine.environment())
        cpu_engine.install()
        overrides.setdefault("skip_tokenizer_init", True)
        arguments = cpu_engine.server_args(
            algorithm, num_steps=num_steps, overlap=overlap, models=models, **overrides
        )
        self.scheduler = _build_scheduler(arguments)
        InProcessScheduler._open = self
        self._mailbox = _Mailbox(self.scheduler)

    def __enter__(self) -> InProcessScheduler:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Take SGLang's process-wide state down, so that another scheduler can be built."""
        if InProcessScheduler._open is self:
            _tear_down(self.scheduler)
            InProcessScheduler._open = None

    def run(
        self, requests: Iterable[Request], *, max_iterations: int | None = None
    ) -> list[Output]:
        """Run the event loop until all requests are done and SGLang's idle check has passed.

        Args:
            requests: what arrives and when; an iteration without work for the scheduler counts too.
            max_iterations: default: enough for every token to take ten iterations.

        Returns:
            One output for each request, in order.

        Raises:
            UnfinishedError: ``max_iterations`` were not enough; names what is left.
            Exception: whatever the scheduler raises, among it a leak found by the idle check.
        """
        plan = _Plan(requests, self.scheduler, self._numbers)
        limit = plan.default_limit() if max_iterations is None else max_iterations
        self._mailbox.start(plan, limit)
        try:
            _event_loop(self.scheduler)()
        except _AllDoneError:
            pass
        finally:
            self._mailbox.stop()
        return plan.outputs

    def free_kv_slots(self) -> int:
        """KV slots that no request holds: free ones and those only the radix cache keeps."""
        allocator, cache = self.scheduler.token_to_kv_pool_allocator, self.scheduler.tree_cache
        return int(allocator.available_size()) + int(cache.evictable_size())

    def free_request_slots(self) -> int:
        """Rows of req_to_token that no request holds."""
        return int(self.scheduler.req_to_token_pool.available_size())

    def check_idle(self) -> None:
        """Run SGLang's idle self check.

        Raises:
            ValueError: it found a leak.
        """
        scheduler = self.scheduler
        check = getattr(scheduler, "on_idle", None) or scheduler.self_check_during_idle
        check()

    def flush_cache(self) -> None:
        """Empty the radix cache and the pools. Only when idle.

        Raises:
            RuntimeError: SGLang refused, for requests are running.
        """
        if not self.scheduler.flush_cache():
            raise RuntimeError("SGLang refused to flush its cache: requests are running")


# --- feeding and collecting -----------------------------------------------------------------------
class _AllDoneError(Exception):
    """Leaves SGLang's endless event loop."""


class _Plan:
    """The requests of one run: what arrives when, and what has come back."""

    def __init__(self, requests: Iterable[Request], scheduler: Any, numbers: Iterable[int]) -> None:
        self._scheduler = scheduler
        self._requests = list(requests)
        self.outputs = [
            Output(rid=request.rid or f"dynspec-{next(iter(numbers))}")
            for request in self._requests
        ]
        self.by_rid = {output.rid: output for output in self.outputs}
        self._todo: dict[int, list[Any]] = {}
        for request, output in zip(self._requests, self.outputs, strict=True):
            message = _generate_message(request, output.rid, scheduler)
            self._todo.setdefault(request.arrive_at_step, []).append(message)
        for request, output in zip(self._requests, self.outputs, strict=True):
            if request.abort_at_step is not None:
                messages = self._todo.setdefault(request.abort_at_step, [])
                messages.append(_abort_message(output.rid))

    def default_limit(self) -> int:
        tokens = sum(len(r.input_ids) + r.max_new_tokens for r in self._requests)
        return 100 + max(self._todo, default=0) + 10 * tokens

    def due(self, iteration: int) -> list[Any]:
        return self._todo.pop(iteration, [])

    def done(self) -> bool:
        return not self._todo and all(o.finish_reason is not None for o in self.outputs)

    def unfinished(self) -> str:
        left = [o for o in self.outputs if o.finish_reason is None]
        parts = [f"{o.rid}: {len(o.token_ids)} tokens" for o in left]
        if self._todo:
            parts.append(f"messages still due at iterations {sorted(self._todo)}")
        return "; ".join(parts) or "only the idle iterations"


class _Mailbox:
    """Takes the place of the scheduler's sockets."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._plan: _Plan | None = None
        self._limit = self._iteration = self._idle = 0
        if hasattr(scheduler, "request_receiver"):  # 0.5.13 and later
            scheduler.request_receiver = self
            channels = scheduler.ipc_channels
            senders = (channels.send_to_tokenizer, channels.send_to_detokenizer)
        else:
            scheduler.recv_requests = self.recv_requests
            senders = (scheduler.send_to_tokenizer, scheduler.send_to_detokenizer)
        for sender in senders:
            sender.send_output = self._collect

    def start(self, plan: _Plan, limit: int) -> None:
        self._plan, self._limit = plan, limit
        self._iteration = self._idle = 0

    def stop(self) -> None:
        self._plan = None

    def recv_requests(self, local_reqs: list[Any] | None = None) -> list[Any]:
        """SGLang calls this at the start of every iteration of its event loop."""
        plan = self._plan
        assert plan is not None, "the event loop runs outside of run()"
        self._idle = self._idle + 1 if self._scheduler.last_batch is None else 0
        # The loop runs its idle check when two iterations in a row have no batch.
        if plan.done() and self._idle > 2:
            raise _AllDoneError
        if self._iteration >= self._limit:
            raise UnfinishedError(
                f"not done after {self._iteration} iterations of the event loop: "
                f"{plan.unfinished()}"
            )
        messages = [*(local_reqs or ()), *plan.due(self._iteration)]
        self._iteration += 1
        return messages

    def _collect(self, message: Any, received: Any = None) -> None:
        """SGLang calls this for everything that it sends to tokenizer or detokenizer."""
        plan = self._plan
        if plan is None:
            return
        if hasattr(message, "output_ids"):
            for i, rid in enumerate(message.rids):
                if rid in plan.by_rid:
                    _add_chunk(plan.by_rid[rid], message, i)
        elif type(message).__name__ == "AbortReq" and message.rid in plan.by_rid:
            # A request aborted while waiting gets no other message.
            reason = getattr(message, "finished_reason", None)
            plan.by_rid[message.rid].finish_reason = reason or {"type": "abort"}


def _add_chunk(output: Output, message: Any, i: int) -> None:
    tokens = list(message.output_ids[i])
    if tokens:
        output.token_ids.extend(tokens)
        output.chunks.append(len(tokens))
    output.finish_reason = message.finished_reasons[i]
    output.cached_tokens = message.cached_tokens[i]
    if message.retraction_counts:
        output.retractions = message.retraction_counts[i]
    if message.output_token_logprobs_val:
        output.logprobs.extend(message.output_token_logprobs_val[i])
    if message.output_top_logprobs_val:
        output.top_logprobs.extend(list(top or ()) for top in message.output_top_logprobs_val[i])
    # Up to 0.5.13 only of those that have asked, without saying which.
    if len(message.output_hidden_states or ()) == len(message.rids):
        output.hidden_states = message.output_hidden_states[i] or []
    if message.spec_verify_ct:
        output.verify_steps = message.spec_verify_ct[i]
        output.accepted_drafts = _accepted_drafts(message)[i]


def _accepted_drafts(message: Any) -> list[int]:
    for older in ("spec_accepted_tokens", "spec_accepted_drafts"):  # up to 0.5.10; 0.5.11
        if hasattr(message, older):
            return list(getattr(message, older))
    return list(message.spec_num_correct_drafts)


def _generate_message(request: Request, rid: str, scheduler: Any) -> Any:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling_params = SamplingParams(
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        ignore_eos=request.ignore_eos,
        **request.sampling_params,
    )
    sampling_params.normalize(scheduler.tokenizer)
    fields: dict[str, Any] = {
        "rid": rid,
        "input_text": None,
        "input_ids": list(request.input_ids),
        "mm_inputs": None,
        "sampling_params": sampling_params,
        "return_logprob": request.return_logprob,
        "logprob_start_len": request.logprob_start_len,
        "top_logprobs_num": request.top_logprobs_num,
        "return_hidden_states": request.return_hidden_states,
        "custom_logit_processor": request.custom_logit_processor,
        "token_ids_logprob": None,
        "stream": True,  # a message for every step
    }
    if hasattr(scheduler, "request_receiver"):  # 0.5.13 and later
        fields.update(
            input_ids=array("q", request.input_ids), input_embeds=None, token_type_ids=None
        )
    return TokenizedGenerateReqInput(**fields, **request.fields)


def _abort_message(rid: str) -> Any:
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(rid=rid)


# --- SGLang's process-wide state ------------------------------------------------------------------
def _build_scheduler(arguments: dict[str, Any]) -> Any:
    from sglang.srt.server_args import PortArgs, ServerArgs

    # SGLang draws one from `random`, which it has seeded: processes side by side would draw alike.
    server_args = ServerArgs(**{"nccl_port": free_port(), **arguments})
    import sglang.srt.managers.scheduler as scheduler_module

    if hasattr(server_args, "resolve"):
        server_args.resolve()
    ports = PortArgs.init_new(server_args)
    # As run_scheduler_process does: nothing to publish up to 0.5.16, ranks with it from 0.5.22 on.
    if hasattr(scheduler_module, "SpawnRanks"):
        ranks = scheduler_module.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        scheduler_module.publish(server_args, role="scheduler", ranks=ranks)
        return scheduler_module.Scheduler(server_args, ports)
    if hasattr(scheduler_module, "publish"):
        scheduler_module.publish(server_args, role="scheduler")
    return scheduler_module.Scheduler(server_args, ports, 0, 0, 0, 0, 0, 0, None)


def _event_loop(scheduler: Any) -> Any:
    if hasattr(scheduler, "run_event_loop"):
        return scheduler.run_event_loop
    return scheduler.event_loop_overlap if scheduler.enable_overlap else scheduler.event_loop_normal


def _tear_down(scheduler: Any) -> None:
    from sglang.srt.distributed import parallel_state

    # A run that failed leaves its batch there, and SGLang's watchdog would take it for a hang.
    for name in ("cur_batch", "cur_batch_for_debug"):
        if hasattr(scheduler, name):
            setattr(scheduler, name, None)
    parallel_state.destroy_model_parallel()
    if hasattr(parallel_state, "_ATTN_TP"):
        parallel_state._ATTN_TP = None  # 0.5.9 forgets this one, an alias of a destroyed group
    parallel_state.destroy_distributed_environment()
    _forget_experts()
    _thaw_flags()


def _forget_experts() -> None:
    """SGLang refuses to place a second model's experts in a process."""
    from sglang.srt.eplb import expert_location

    if hasattr(expert_location, "_global_expert_location_metadata"):  # up to 0.5.15
        expert_location._global_expert_location_metadata = None
    else:
        expert_location.set_global_expert_location_metadata(None, allow_overwrite=True)


def _thaw_flags() -> None:
    """0.5.15 freezes its flags once a scheduler is built, and then takes no other's arguments."""
    try:
        from sglang.srt.runtime_context import get_context, reset_context
    except ImportError:  # before that
        return
    if hasattr(get_context(), "freeze_flags"):
        reset_context()
