"""An attention backend in plain torch for every forward mode of EAGLE with top-k 1.

SGLang's own ``torch_native`` knows plain prefill and decode only. This one adds TARGET_VERIFY,
DRAFT_EXTEND (both kinds) and the draft's decode steps, where step i reads i + 1 slots beyond the
committed length (upstream: ``FlashInferMultiStepDraftBackend`` and its siblings).

A request's result does not depend on its batch beyond float32 rounding: keys of other requests are
never in its row, and padding is masked out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache import memory_pool

Tensor = Any

# 0.5.14 and later say where KV goes with an object instead of a tensor.
_KVWriteLoc = getattr(memory_pool, "KVWriteLoc", None)


@dataclass
class _Group:
    """Requests with equally many queries, which attend in one call.

    Attributes:
        tokens: slice of the flat query tensor, in which they lie one after another.
        slots: int64 [requests, longest], where each one's keys lie; padded with slot 0.
        mask: bool [requests, 1, queries, longest], what each query sees.
    """

    tokens: slice
    slots: Tensor
    mask: Tensor


class CpuAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """Attention over SGLang's KV pool.

    Args:
        runner: the ModelRunner whose pools are read.
        draft_step: for step ``draft_step`` of the draft's decode; None for everything else.
    """

    def __init__(self, runner: Any, draft_step: int | None = None) -> None:
        super().__init__()
        self.device = runner.device
        self._runner = runner
        self._draft_step = draft_step
        self._groups: list[_Group] = []

    def support_triton(self) -> bool:
        """There is no Triton on a CPU."""
        return False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Work out, once a forward pass, what every request attends to."""
        lengths = forward_batch.seq_lens.tolist()
        queries = self._query_counts(forward_batch, lengths)
        if self._draft_step is not None:
            lengths = [length + self._draft_step + 1 for length in lengths]
        elif forward_batch.forward_mode.is_target_verify():
            lengths = [a + b for a, b in zip(lengths, queries, strict=True)]
        rows = self._runner.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        self._groups = _make_groups(rows, lengths, queries)

    def _query_counts(self, forward_batch: Any, lengths: list[int]) -> list[int]:
        mode = forward_batch.forward_mode
        if mode.is_decode_or_idle():
            return [1] * len(lengths)
        if mode.is_target_verify():
            spec_info = forward_batch.spec_info
            if getattr(spec_info, "tree_topk", spec_info.topk) != 1:
                raise NotImplementedError("the CPU engine verifies chains only: eagle_topk 1")
            return [spec_info.draft_token_num] * len(lengths)
        counts = forward_batch.extend_seq_lens_cpu
        if counts is None:
            counts = forward_batch.extend_seq_lens.tolist()
        return [int(count) for count in counts]

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **_unused: Any,
    ) -> Tensor:
        """Write this pass's keys and values, then attend.

        Args:
            q: [tokens, heads * head_dim]; k, v: [tokens, kv_heads, head_dim] or flat.

        Returns:
            [tokens, heads * v_head_dim].
        """
        pool = self._runner.token_to_kv_pool
        if save_kv_cache and k is not None:
            loc = forward_batch.out_cache_loc
            pool.set_kv_buffer(layer, loc if _KVWriteLoc is None else _KVWriteLoc(loc, None), k, v)
        keys = pool.get_key_buffer(layer.layer_id)
        values = pool.get_value_buffer(layer.layer_id)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        parts = [
            _attend(q[group.tokens], keys[group.slots], values[group.slots], group.mask, layer)
            for group in self._groups
        ]
        if not parts:
            return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    forward_decode = forward_extend


class CpuMultiStepDraftBackend:
    """One backend for each decode step of the draft (upstream's shape for such a thing)."""

    def __init__(self, runner: Any, topk: int, num_steps: int) -> None:
        if topk != 1:
            raise NotImplementedError(
                f"the CPU engine drafts chains only: eagle_topk 1, not {topk}"
            )
        if num_steps < 2:
            # Upstream's own fail as well: they read their first step's backend.
            raise ValueError(f"there is no draft decode step in num_steps {num_steps}")
        self.attn_backends = [CpuAttentionBackend(runner, step) for step in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """For all steps at once: they differ in how far they read."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def _make_groups(rows: Tensor, lengths: list[int], queries: list[int]) -> list[_Group]:
    """Put neighbours with equally many queries together (decode and verify: all of them)."""
    groups, first, token = [], 0, 0
    while first < len(lengths):
        last, count = first, queries[first]
        while last < len(lengths) and queries[last] == count:
            last += 1
        members, longest = lengths[first:last], max(lengths[first:last])
        # Query j of a request of length n stands at position n - count + j and sees up to there.
        ends = (
            torch.tensor(members).view(-1, 1, 1, 1) - count + torch.arange(count).view(1, 1, -1, 1)
        )
        stop = token + count * len(members)
        groups.append(
            _Group(
                tokens=slice(token, stop),
                slots=rows[first:last, :longest].long(),
                mask=torch.arange(longest) <= ends,
            )
        )
        first, token = last, stop
    return groups


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, layer: Any) -> Tensor:
    """q [requests * queries, heads, dim]; keys, values [requests, longest, kv_heads, dim]."""
    requests, queries = mask.shape[0], mask.shape[2]
    out = F.scaled_dot_product_attention(
        q.view(requests, queries, *q.shape[1:]).transpose(1, 2),
        keys.to(q.dtype).transpose(1, 2),
        values.to(q.dtype).transpose(1, 2),
        attn_mask=mask,
        scale=layer.scaling,
        enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
    )
    return out.transpose(1, 2).reshape(requests * queries, -1)
