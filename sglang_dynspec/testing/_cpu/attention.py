"""An attention backend in plain torch for every forward mode of EAGLE, of chains and of trees.

SGLang's own ``torch_native`` knows plain prefill and decode only. This one adds TARGET_VERIFY,
DRAFT_EXTEND (both kinds) and the draft's decode steps, where step i reads i + 1 slots beyond the
committed length (upstream: ``FlashInferMultiStepDraftBackend`` and its siblings). With top-k above
1 each of a request's k branches has slots of its own there, and a node of the verified tree sees
its ancestors alone.

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
        topk: branches of the draft's tree, of ``num_steps`` slots each.
    """

    def __init__(
        self, runner: Any, draft_step: int | None = None, topk: int = 1, num_steps: int = 0
    ) -> None:
        super().__init__()
        self.device = runner.device
        self.token_to_kv_pool = runner.token_to_kv_pool  # 0.5.17 and later look for it here
        self._runner = runner
        self._draft_step = draft_step
        self._topk = topk
        self._num_steps = num_steps
        self._groups: list[_Group] = []

    def support_triton(self) -> bool:
        """There is no Triton on a CPU."""
        return False

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Length of the requests that DP attention pads a batch with; they read slot 0."""
        return 1

    get_cuda_graph_seq_len_fill_value = get_cpu_graph_seq_len_fill_value

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Work out, once a forward pass, what every request attends to."""
        lengths = forward_batch.seq_lens.tolist()
        rows = self._runner.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        verifies = forward_batch.forward_mode.is_target_verify()
        if not lengths:
            self._groups = []
        elif self._draft_step is not None and self._topk > 1:
            self._groups = [_branches(rows, lengths, self._draft_step, self._topk, self._num_steps)]
        elif verifies and _topk(forward_batch.spec_info) > 1:
            spec_info = forward_batch.spec_info
            self._groups = [_tree(rows, lengths, spec_info.draft_token_num, spec_info.custom_mask)]
        else:
            queries = self._query_counts(forward_batch, lengths)
            if self._draft_step is not None:
                lengths = [length + self._draft_step + 1 for length in lengths]
            elif verifies:
                lengths = [a + b for a, b in zip(lengths, queries, strict=True)]
            self._groups = _make_groups(rows, lengths, queries)

    def _query_counts(self, forward_batch: Any, lengths: list[int]) -> list[int]:
        mode = forward_batch.forward_mode
        if mode.is_decode_or_idle():
            return [1] * len(lengths)
        if mode.is_target_verify():
            return [forward_batch.spec_info.draft_token_num] * len(lengths)
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
        # DP attention pads a batch, for some forwards after the metadata have been worked out.
        padding = q.shape[0] - sum(len(part) for part in parts)
        if padding or not parts:
            parts.append(q.new_zeros(padding, layer.tp_q_head_num * layer.v_head_dim))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    forward_decode = forward_extend


class CpuMultiStepDraftBackend:
    """One backend for each decode step of the draft (upstream's shape for such a thing)."""

    def __init__(self, runner: Any, topk: int, num_steps: int) -> None:
        if num_steps < 2:
            # Upstream's own fail as well: they read their first step's backend.
            raise ValueError(f"there is no draft decode step in num_steps {num_steps}")
        self.attn_backends = [
            CpuAttentionBackend(runner, step, topk, num_steps) for step in range(num_steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """For all steps at once: they differ in how far they read."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def _topk(spec_info: Any) -> int:
    return int(getattr(spec_info, "tree_topk", spec_info.topk))


def _tree(rows: Tensor, lengths: list[int], nodes: int, custom_mask: Tensor) -> _Group:
    """The nodes of each request's tree: each sees what is committed, its ancestors and itself.

    Args:
        custom_mask: bool, flat; QLEN_ONLY has rows of ``nodes``, FULL_MASK of length + nodes.
    """
    requests, longest = len(lengths), max(lengths) + nodes
    whole = custom_mask.numel() != requests * nodes * nodes
    mask = torch.arange(longest) < torch.tensor(lengths).view(-1, 1, 1)
    mask = mask.repeat(1, nodes, 1)
    offset = 0
    for b, length in enumerate(lengths):
        row = length + nodes if whole else nodes
        view = custom_mask[offset : offset + nodes * row].view(nodes, row)
        mask[b, :, length : length + nodes] = view[:, row - nodes :].bool()
        offset += nodes * row
    return _Group(
        tokens=slice(0, requests * nodes), slots=rows[:, :longest].long(), mask=mask.unsqueeze(1)
    )


def _branches(rows: Tensor, lengths: list[int], step: int, topk: int, num_steps: int) -> _Group:
    """One query for each of a request's branches, which sees what is committed and its own branch.

    Branch k has ``num_steps`` slots from length + k * num_steps on (upstream:
    ``generate_draft_decode_kv_indices``).
    """
    longest = max(lengths) + step + 1
    ends = torch.tensor(lengths).view(-1, 1, 1)
    columns = torch.arange(longest).expand(len(lengths), topk, longest)
    branch = torch.arange(topk).view(1, -1, 1) * num_steps
    columns = torch.where(columns < ends, columns, columns + branch).clamp(max=rows.shape[1] - 1)
    slots = rows.long().gather(1, columns.flatten(1)).view(-1, longest)
    seen = torch.arange(longest) <= ends + step
    mask = seen.expand(-1, topk, -1).reshape(-1, 1, 1, longest)
    return _Group(tokens=slice(0, len(slots)), slots=slots, mask=mask)


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
