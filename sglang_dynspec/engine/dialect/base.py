"""What the engine layer asks of a release; the answers that are the same on all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar

import torch
from sglang.srt.layers.moe.utils import (
    speculative_moe_a2a_backend_context,
    speculative_moe_backend_context,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dynspec.engine.contract import Instance, Live, Name
from sglang_dynspec.engine.dialect import adaptive, names, verified
from sglang_dynspec.engine.verified_counts import VerifiedCounts

# Attributes of SGLang's draft worker.
EXTEND_BACKEND = "draft_extend_attn_backend"
EXTEND_GRAPHS = "cuda_graph_runner_for_draft_extend"

PROMPT_EMBEDDINGS = ("input_embeds", "replace_embeds", "replace_positions")
"""Of a prompt's tokens, as far as the release has them. Up to 0.5.22 SGLang leaves them on a batch
that decodes under speculation, where they keep it from its graphs."""

LEFT_BY_PREFILL = ("multimodal_inputs", *PROMPT_EMBEDDINGS, "global_num_tokens")
"""What a prefill may have left on a batch that decodes since, as far as the release has it."""

OnPublish = Callable[[torch.Tensor], None]
"""Told of the committed lengths after a step, shape (bs,)."""


class Dialect(ABC):
    """The differences between releases of SGLang, one subclass for each family.

    Shapes: bs is the number of requests in the decode batch, width the padded row width of a
    speculative result (``--speculative-num-draft-tokens``).
    """

    family: ClassVar[str]
    """Releases in words, for messages."""
    contract: ClassVar[tuple[Name, ...]]
    """What this family has beyond ``contract.COMMON``."""
    batch_parameter: ClassVar[str]
    """Name of the batch among the parameters of ``forward_batch_generation``."""
    live: ClassVar[tuple[Live, ...]]
    """What objects of the running server have in this family beyond ``contract.LIVE``."""
    instances: ClassVar[tuple[Instance, ...]]
    """What other objects have in this family beyond ``contract.INSTANCES``."""
    broadcast: ClassVar[str] = names.BROADCAST_FROM_0_5_13.path
    """SGLang's broadcast of requests to the ranks of a tensor-parallel server."""
    exchange: ClassVar[str] = names.EXCHANGE_FROM_0_5_13.path
    """SGLang's exchange of batch sizes between the ranks of DP attention."""
    log_stats: ClassVar[str] = names.LOG_STATS_FROM_0_5_10.path
    """Where SGLang brings its own metrics up to date."""
    accepted_tokens: ClassVar[str] = "accept"
    """How the names of SGLang's counters call the tokens of verifications."""
    has_relay: ClassVar[bool] = False
    """Whether FutureMap relays by pool index, as from 0.5.13 (see ``relay``)."""
    graph_runner: ClassVar[str]
    """Attribute of the target's model runner that holds its decode graphs."""
    builds_steps: ClassVar[bool] = False
    """Whether numbers of draft steps between none and all can be had (:meth:`step_state`)."""
    times_graphs: ClassVar[bool] = False
    """Whether graphs can be timed by themselves. Up to 0.5.11 a graph of draft steps moves its
    positions on with each replay, past the end at last; from 0.5.12 on it sets them back."""
    mask_field: ClassVar[str] = "vocab_mask"
    """Field of SamplingBatchInfo with the mask of grammars."""
    returns_hidden_states: ClassVar[bool] = False
    """Whether a speculative step returns hidden states by request and token. Up to 0.5.13 it takes
    row i of all requests' rows for request i."""
    extend_runs_on_runner: ClassVar[bool] = False
    """Whether the draft-extend reads its attention backend from the draft's model runner."""

    def is_decode(self, batch: Any) -> bool:
        """Whether the worker's batch is a decode batch with draft state, and nothing else."""
        return bool(
            batch.forward_mode.is_decode()
            and not batch.is_extend_in_batch
            and batch.spec_info is not None
            and batch.spec_info.is_draft_input()
        )

    def is_prefill(self, batch: Any) -> bool:
        """Whether the worker's batch is a prefill, and nothing else."""
        return bool(batch.forward_mode.is_extend() and not batch.forward_mode.is_mixed())

    def blocked(self, batch: Any) -> str | None:
        """Why plain decode cannot run this ScheduleBatch, as a word to count under, or None.

        The batch goes to SGLang where a plain step could not return what SGLang's own does, or
        where nothing has been tested.
        """
        sampling = batch.sampling_info
        if not self.returns_hidden_states and self.asked_for_hidden_states(batch):
            return "hidden_states"
        # Which random number a token gets depends on where SGLang's steps begin, and how wide they
        # are. Greedy sampling needs none.
        if sampling.sampling_seed is not None and not sampling.is_all_greedy:
            return "sampling_seed"
        inputs = batch.multimodal_inputs
        # Counted rather than looped over: this runs before every step.
        if inputs is not None and inputs.count(None) != len(inputs):
            return "multimodal"
        return None

    def dp_rank(self, scheduler: Any) -> int | None:
        """Which replica of a data-parallel server this scheduler is, or None without any."""
        rank: int | None = getattr(scheduler, "ps", scheduler).dp_rank  # on ps from 0.5.13
        return rank

    def asked_for_hidden_states(self, batch: Any) -> bool:
        """Whether a request of this ScheduleBatch is to return the target's hidden states."""
        # On some releases the batch's flag outlives the request that has set it.
        return bool(
            batch.return_hidden_states and any(req.return_hidden_states for req in batch.reqs)
        )

    def as_verified(self, batch: Any) -> bool:
        """Whether a plain step of this ScheduleBatch must sample as SGLang's verification does,
        because that treats some of its requests otherwise than the ordinary sampler."""
        sampling = batch.sampling_info
        return bool(
            batch.has_grammar
            or batch.return_logprob
            or sampling.penalizer_orchestrator.is_required
            or sampling.logit_bias is not None
            or sampling.need_min_p_sampling
            or sampling.has_custom_logit_processor
        )

    def verified_counts(self, scheduler: Any) -> VerifiedCounts:
        """SGLang's counters of what verifications have gained."""
        return VerifiedCounts(self.holds_counters(scheduler), self.accepted_tokens)

    def holds_counters(self, scheduler: Any) -> Any:
        """What has these counters as attributes."""
        return scheduler.metrics_reporter

    @abstractmethod
    def context_tokens(self, batch: Any) -> int:
        """Committed tokens of a ScheduleBatch, from host state alone."""

    @abstractmethod
    def pending_tokens(self, draft_input: Any) -> torch.Tensor:
        """Sampled tokens whose KV the target has not written yet. Shape (bs,), integer."""

    @abstractmethod
    def forward_target(
        self, worker: Any, batch: Any, *, keep_hidden: bool, sample: bool = True
    ) -> Any:
        """Run the target's forward and sampler on a batch that looks like a plain decode.

        Args:
            keep_hidden: keep the hidden states that the draft model consumes.
            sample: with the target's ordinary sampler; without it there are logits only.

        Returns:
            SGLang's GenerationBatchResult, ``next_token_ids`` of shape (bs,) if sampled.
        """

    def sample_as_verified(
        self, batch: Any, tokens: torch.Tensor, result: Any, barrier: verified.Barrier | None
    ) -> None:
        """Sample as SGLang's verification does.

        Args:
            batch: the worker's, as the forward has seen it.
            tokens: those it was run on, shape (bs,), int64.
            result: of :meth:`forward_target` without sampling; gets ``next_token_ids`` (bs,), and
                log-probabilities where the batch asks for them.
            barrier: brings grammars up to date, where the scheduler has not.
        """
        mask = verified.take_mask(batch, self.mask_field, barrier)
        tree = verified.one_node_tree(tokens)
        if mask is not None:
            tree.grammar = next(g for g in batch.sampling_info.grammars if g)
        logits = result.logits_output
        predict, _, accepted = self.verified_sampler()(tree, batch, logits, mask)
        if batch.return_logprob:
            self.add_logprobs(batch, logits, predict, accepted)
        result.next_token_ids = predict

    @abstractmethod
    def verified_sampler(self) -> Callable[..., Any]:
        """SGLang's sampling of a verification: (tree, batch, logits, mask) -> tokens (bs,), accept
        lengths (bs,), indices of accepted tokens (bs, 1)."""

    @abstractmethod
    def add_logprobs(self, batch: Any, logits: Any, predict: Any, accepted: Any) -> None:
        """Have SGLang add the log-probabilities of accepted tokens to the logits' output."""

    @abstractmethod
    def set_result(
        self,
        result: Any,
        *,
        tokens: torch.Tensor,
        width: int,
        new_seq_lens: torch.Tensor,
    ) -> None:
        """Make of a plain result one that a spec-v2 scheduler accepts.

        Args:
            result: from ``forward_target``; gets ``next_token_ids`` (bs * width, int32) with the
                token of request i at ``i * width``, ``accept_lens`` (bs, int32) of ones, and
                ``next_draft_input``.
            tokens: sampled tokens, shape (bs,).
            width: row width that the result processor will assume.
            new_seq_lens: committed lengths after the step, shape (bs,), int64.
        """

    @abstractmethod
    def blank_draft_input(self, worker: Any, batch: Any, tokens: torch.Tensor) -> Any:
        """SGLang's EagleDraftInput after a prefill, with proposals that mean nothing.

        Args:
            tokens: sampled tokens, shape (bs,).
        """

    @abstractmethod
    def draft_parallel_context(self, draft_worker: Any) -> AbstractContextManager[Any]:
        """The context of the draft model's parallel layout."""

    def draft_context(self, draft_worker: Any) -> AbstractContextManager[Any]:
        """The contexts in which SGLang runs its draft model."""
        stack = ExitStack()
        stack.enter_context(self.draft_parallel_context(draft_worker))
        stack.enter_context(speculative_moe_backend_context())
        stack.enter_context(speculative_moe_a2a_backend_context())
        return stack

    def step_state(self, worker: Any, num_steps: int) -> list[tuple[Any, dict[str, Any]]]:
        """Make what a speculative step with fewer draft steps needs, where ``builds_steps``.

        Args:
            worker: SGLang's EAGLEWorkerV2.
            num_steps: draft steps, between 0 and the server's.

        Returns:
            Objects, and the attributes to set on each for the length of a forward.
        """
        with self.draft_context(worker.draft_worker):
            return adaptive.state(
                worker,
                num_steps,
                graph_runner=self.graph_runner,
                extend_runs_on_runner=self.extend_runs_on_runner,
            )

    @abstractmethod
    def capture_decode_graphs(self, model_runner: Any, *, keep_hidden: bool) -> dict[str, Any]:
        """Capture CUDA graphs of plain decode, in this release's own way.

        Args:
            model_runner: the target's, with speculation hidden.
            keep_hidden: capture the hidden states that the draft model consumes.

        Returns:
            Attributes of the model runner that a plain step is to run with.
        """

    def publish_read_done(self, worker: Any) -> None:  # noqa: B027 - not every release has it
        """Tell the scheduler's stream when a plain step has read what that stream writes next."""

    def one_token_extend(self, worker: Any) -> dict[str, Any] | None:
        """Prepare the draft-extend after a verification to take one token a request.

        Returns:
            Attributes of the draft worker that it is to run with, besides its number of draft
            tokens; None on releases where SGLang has only the full width.
        """
        return None

    def reads_hidden(self, worker: Any) -> bool:
        """Whether SGLang keeps the target's hidden states for the draft model. A standalone draft
        is a model of its own and has no use for them."""
        return self.keeps_hidden(worker)

    def keeps_hidden(self, worker: Any) -> bool:
        """Whether the draft's KV is made of the target's hidden states, besides tokens."""
        return not worker.speculative_algorithm.is_standalone()

    def kept_hidden_size(self, worker: Any) -> int:
        """Elements of the target's hidden states that the draft's KV is made of, for each token.

        EAGLE-3 reads those of several layers (EAGLEDraftExtendCudaGraphRunner has the same rule).
        """
        if not self.keeps_hidden(worker):
            return 0
        draft = worker.draft_worker.draft_runner.model_config.hf_config
        if not worker.speculative_algorithm.is_eagle3():
            return int(worker.target_worker.model_runner.model_config.hidden_size)
        size = getattr(draft, "target_hidden_size", None) or draft.hidden_size
        eagle = getattr(draft, "eagle_config", None) or {}
        if not eagle.get("use_aux_hidden_state", True):
            return int(size)
        layers = eagle.get("eagle_aux_hidden_state_layer_ids")
        number = getattr(draft, "num_aux_hidden_states", None) or len(layers or ()) or 3
        return int(size) * number

    @abstractmethod
    def prefill_lengths(self, batch: Any) -> Sequence[int]:
        """Tokens of each request in the worker's prefill batch."""

    def as_prefill(
        self,
        batch: Any,
        *,
        input_ids: torch.Tensor,
        out_cache_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        prefix_lens: torch.Tensor,
        extend_lens: list[int],
        standalone: bool,
    ) -> dict[str, Any]:
        """Fields that make the worker's decode batch one that the draft model prefills.

        Args:
            batch: that batch.
            input_ids: of all requests, shape (tokens,), int64.
            out_cache_loc: KV slot of each, shape (tokens,), int64.
            seq_lens: lengths with these tokens, shape (bs,).
            prefix_lens: lengths without them, shape (bs,), on the host.
            extend_lens: tokens of each request.
            standalone: whether the draft has no hidden states to hand on.
        """
        on_host = prefix_lens + torch.tensor(extend_lens)
        return {
            "forward_mode": ForwardMode.EXTEND,
            "is_extend_in_batch": True,
            "input_ids": input_ids,
            "out_cache_loc": out_cache_loc,
            "seq_lens": seq_lens,
            "seq_lens_cpu": on_host,
            "seq_lens_sum": int(on_host.sum()),
            "extend_num_tokens": sum(extend_lens),
            "extend_logprob_start_lens": extend_lens,
            "return_logprob": False,
            **{name: None for name in LEFT_BY_PREFILL if hasattr(batch, name)},
        }

    def as_idle_prefill(
        self, batch: Any, widths: Sequence[int], *, standalone: bool
    ) -> dict[str, Any]:
        """Fields that make the worker's batch without requests take part in what the drafts of
        other ranks of DP attention prefill.

        Args:
            widths: see :meth:`gathered`.
            standalone: see :meth:`as_prefill`.
        """
        return {"is_extend_in_batch": True, **self.gathered(batch, widths, own=0)}

    def gathered(self, batch: Any, widths: Sequence[int], *, own: int) -> dict[str, Any]:
        """Fields that tell the ranks of DP attention how many tokens of a prompt each brings.

        Args:
            batch: the worker's decode batch, or the one of a rank without requests.
            widths: tokens of each rank.
            own: of this one.
        """
        # Layers that do not gather are told of this rank alone.
        tokens = [own] if len(batch.global_num_tokens) == 1 else list(widths)
        values = {
            "global_num_tokens": tokens,
            "global_num_tokens_for_logprob": batch.global_num_tokens_for_logprob,
            "can_run_dp_prefill_cuda_graph": False,
        }
        draft = getattr(batch, "draft_global_num_tokens", None)
        if draft is not None:
            values["draft_global_num_tokens"] = [own] if len(draft) == 1 else list(widths)
        return {name: value for name, value in values.items() if hasattr(batch, name)}

    def result_width(self, worker: Any) -> int:
        """Row width of a flattened result without draft-extend. The result processor reads it from
        the draft worker up to 0.5.11, from the result later."""
        return int(worker.draft_worker.speculative_num_draft_tokens)


def blank_proposals(
    worker: Any, tokens: torch.Tensor, hidden_size: int | None
) -> dict[str, torch.Tensor | None]:
    """Proposals for the tokens (bs,), with the fields of EagleDraftInput.

    They are of the shapes and dtypes that SGLang relays, so that they mix with real ones.

    Args:
        hidden_size: None where hidden states are not relayed.
    """
    bs, dtype = len(tokens), worker.draft_worker.draft_runner.model_config.dtype
    hidden = None if hidden_size is None else tokens.new_zeros((bs, hidden_size), dtype=dtype)
    return {
        "topk_p": tokens.new_zeros((bs, worker.topk), dtype=torch.float32),
        "topk_index": tokens.new_zeros((bs, worker.topk), dtype=torch.int64),
        "hidden_states": hidden,
    }


def pad_rows(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Put row i at ``i * width`` among zeros: (bs, ...) -> (bs * width, ...).

    With a width of 1 these are the rows themselves, not a copy.
    """
    if width == 1:
        return rows
    padded = rows.new_zeros((rows.shape[0], width, *rows.shape[1:]))
    padded[:, 0] = rows
    return padded.flatten(0, 1)
