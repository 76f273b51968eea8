"""What speculative decoding calls of sgl_kernel, in plain torch on CPU tensors.

Names and parameters are those of sgl_kernel, ``retrive`` included; semantics are those of its CUDA
kernels (sgl-kernel ``csrc/speculative/``, ``sampling.cuh`` for the sampling one). In the argument
lists: bs requests, n tree nodes each (``draft_token_num``), v the vocabulary size.

A draft tree is given as first child and next sibling of each node: ``retrive_next_token[b, i]``,
``retrive_next_sibling[b, i]``, -1 for none. ``retrive_index[b, i]`` is the node's row in flat
tensors of bs * n.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

Tensor = Any  # torch.Tensor; torch is not a typed dependency of this project


# --- the draft tree -------------------------------------------------------------------------------
def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int = 0,
) -> None:
    """Fill mask, positions and links of each request's draft tree, in place.

    Args:
        parent_list: int64 [bs, topk * (depth - 1) + 1], candidate number of each expanded parent.
        selected_index: int64 [bs, n - 1], candidate numbers of the nodes after the root, ascending.
        verified_seq_len: int64 [bs], tokens before the root.
        tree_mask: bool, flat; FULL_MASK (0) has rows of seq_len + n, QLEN_ONLY (1) rows of n.
        positions: int64 [bs * n].
        retrive_index, retrive_next_token, retrive_next_sibling: int64 [bs, n], -1 on entry.

    Raises:
        NotImplementedError: the bit-packed mask (2).
    """
    if int(tree_mask_mode) not in (0, 1):
        raise NotImplementedError("build_tree_kernel_efficient: bit-packed masks")
    n = draft_token_num
    selected, parents = selected_index.tolist(), parent_list.tolist()
    offset = 0
    for b, length in enumerate(verified_seq_len.tolist()):
        parent_of = _parents(selected[b], parents[b], topk)
        first_child, next_sibling = _links(parent_of)
        mask, depths = _ancestors(parent_of)
        row = length + n if int(tree_mask_mode) == 0 else n
        view = tree_mask[offset : offset + n * row].view(n, row)
        view[:, row - n :] = torch.tensor(mask, dtype=torch.bool).to(tree_mask.dtype)
        offset += n * row
        positions[b * n : (b + 1) * n] = torch.tensor(depths) + length
        retrive_index[b] = torch.arange(b * n, (b + 1) * n)
        retrive_next_token[b] = torch.tensor(first_child)
        retrive_next_sibling[b] = torch.tensor(next_sibling)


def _parents(selected: list[int], parents: list[int], topk: int) -> list[int]:
    """Parent node of each node; the root's is -1, and so is that of a node cut off from it."""
    node_of = {candidate: i + 1 for i, candidate in enumerate(selected)}
    result = [-1]
    for candidate in selected:
        group = candidate // topk
        result.append(0 if group == 0 else node_of.get(int(parents[group]), -1))
    return result


def _links(parent_of: list[int]) -> tuple[list[int], list[int]]:
    first_child, next_sibling = [-1] * len(parent_of), [-1] * len(parent_of)
    for node in range(len(parent_of) - 1, 0, -1):
        parent = parent_of[node]
        if parent >= 0:
            next_sibling[node] = first_child[parent]
            first_child[parent] = node
    return first_child, next_sibling


def _ancestors(parent_of: list[int]) -> tuple[list[list[bool]], list[int]]:
    """Which nodes each node sees (itself, its ancestors, the root), and its depth."""
    mask = [[False] * len(parent_of) for _ in parent_of]
    depths = []
    for node in range(len(parent_of)):
        mask[node][0] = True
        depth, at = 0, node
        while at > 0:
            mask[node][at] = True
            depth, at = depth + 1, parent_of[at]
        depths.append(depth)
    return mask, depths


# --- verification ---------------------------------------------------------------------------------
def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow the tree while a child is what the target predicts after its parent.

    Args:
        predicts: int32 [bs * n], out: the target's token at every accepted node.
        accept_index: int32 [bs, depth], out: flat rows of the accepted nodes, root first, then -1.
        accept_token_num: int32 [bs], out: how many drafts were accepted (root not counted).
        candidates: int64 [bs, n], the tree's tokens.
        target_predict: int64 [bs, n], the target's argmax at each node.
    """
    wanted = target_predict.reshape(-1).tolist()
    tree = _Tree(candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    for b in range(len(tree.tokens)):
        node, path = 0, [tree.rows[b][0]]
        while len(path) < accept_index.shape[1]:
            want = wanted[path[-1]]
            match = next((c for c in tree.children(b, node) if tree.tokens[b][c] == want), None)
            if match is None:
                break
            node = match
            path.append(tree.rows[b][node])
        _write_path(b, path, accept_index, accept_token_num)
        for row in path:
            predicts[row] = wanted[row]


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Rejection sampling that leaves every token distributed as the target would sample it.

    At a node, one coin is compared with the summed probability of the children looked at so far;
    the first child that reaches it is accepted. If none does, the next token is drawn from the
    target's probabilities without those children; at the end of a fully accepted path, from all.

    Args:
        predicts, accept_index, accept_token_num, candidates: see :func:`verify_tree_greedy`.
        uniform_samples: float32 [bs, n], a coin a node.
        uniform_samples_for_final_sampling: float32 [bs].
        target_probs: float32 [bs, n, v], after temperature, top-k and top-p.
        draft_probs: float32 [bs, n, v], zeros on entry; scratch: rejected children's probabilities.
        threshold_single, threshold_acc: SGLang's server arguments; 1.0 keeps the distribution.
    """
    threshold_acc = max(threshold_acc, 1e-9)
    tree = _Tree(candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    for b in range(len(tree.tokens)):
        node, path = 0, [tree.rows[b][0]]
        while len(path) < accept_index.shape[1]:
            coin, summed, accepted = float(uniform_samples[b, node]), 0.0, None
            for child in tree.children(b, node):
                token = tree.tokens[b][child]
                probability = float(target_probs[b, node, token])
                summed += probability
                if probability > 0 and (
                    coin < summed / threshold_acc or probability >= threshold_single
                ):
                    accepted = child
                    break
                draft_probs[b, node, token] = probability
            if accepted is None:
                break
            predicts[path[-1]] = tree.tokens[b][accepted]
            node = accepted
            path.append(tree.rows[b][node])
        _write_path(b, path, accept_index, accept_token_num)
        rest = target_probs[b, node]
        if len(path) < accept_index.shape[1]:
            rest = (rest - draft_probs[b, node]).clamp_min(0)
        predicts[path[-1]] = _draw(rest, float(uniform_samples_for_final_sampling[b]))


class _Tree:
    """Draft trees as Python lists, which are faster to walk than tensors."""

    def __init__(self, tokens: Tensor, rows: Tensor, child: Tensor, sibling: Tensor) -> None:
        self.tokens: list[list[int]] = tokens.tolist()
        self.rows: list[list[int]] = rows.tolist()
        self._child: list[list[int]] = child.tolist()
        self._sibling: list[list[int]] = sibling.tolist()

    def children(self, b: int, node: int) -> list[int]:
        found, at = [], self._child[b][node]
        while at != -1:
            found.append(at)
            at = self._sibling[b][at]
        return found


def _write_path(b: int, path: list[int], accept_index: Tensor, accept_token_num: Tensor) -> None:
    accept_index[b, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
    accept_token_num[b] = len(path) - 1


def _draw(weights: Tensor, coin: float) -> int:
    """An index by inverse transform; coin in [0, 1), weights [v] need not sum to 1."""
    cumulated = weights.double().cumsum(0)
    over = (cumulated > coin * cumulated[-1]).nonzero()
    if len(over):
        return int(over[0])
    possible = weights.nonzero()
    return int(possible[-1]) if len(possible) else len(weights) - 1


def top_k_renorm_prob(probs: Tensor, top_k: Tensor | int) -> Tensor:
    """Keep each row's ``top_k`` greatest probabilities (all that tie with the last), sum to 1.

    Args:
        probs: float32 [rows, v].
        top_k: int, or int [rows].
    """
    k = torch.as_tensor(top_k).long().expand(probs.shape[0]).clamp(1, probs.shape[-1])
    least = probs.sort(dim=-1, descending=True).values.gather(1, k.view(-1, 1) - 1)
    return _normalised(probs * (probs >= least))


def top_p_renorm_prob(probs: Tensor, top_p: Tensor | float) -> Tensor:
    """Keep each row's greatest probabilities until they sum to ``top_p``, then let them sum to 1.

    Args:
        probs: float32 [rows, v].
        top_p: float, or float [rows].
    """
    p = torch.as_tensor(top_p).float().expand(probs.shape[0]).view(-1, 1)
    ordered, index = probs.sort(dim=-1, descending=True)
    before = ordered.double().cumsum(-1) - ordered.double()
    kept = torch.where(before < p, ordered, torch.zeros_like(ordered))
    return _normalised(torch.zeros_like(probs).scatter(1, index, kept))


def softmax(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Probabilities at a temperature; float32 [rows, v], temperatures [rows, 1]."""
    return torch.softmax(logits.float() / temperatures, dim=-1)


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=-1, keepdim=True)


# --- where KV lies --------------------------------------------------------------------------------
def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    *_unused: Any,
) -> None:
    """Write the slots of ``out_cache_loc`` into each request's row, from start to end."""
    at = 0
    for row, start, end in _spans(req_pool_indices, start_offset, end_offset):
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    *_unused: Any,
) -> None:
    """Read each request's slots, from start to end, into ``out_cache_loc`` one after another."""
    at = 0
    for row, start, end in _spans(req_pool_indices, start_offset, end_offset):
        out_cache_loc[at : at + end - start] = req_to_token[row, start:end]
        at += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Slots for topk * num_steps draft tokens behind each request's committed ones."""
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_steps, out_cache_loc
    )


def alloc_extend_cpu(
    prefix_lens: Tensor,
    seq_lens: Tensor,
    last_loc: Tensor,
    free_pages: Tensor,
    out_indices: Tensor,
    bs_upper: int,
    page_size: int,
    *_unused: Any,
) -> None:
    """Slots for each request's tokens from prefix_lens to seq_lens: first the rest of its last
    page, which ends at ``last_loc`` so far, then free pages.

    The caller looks only afterwards whether there were enough of these (up to 0.5.20); the slots
    mean nothing then.
    """
    at, pages = 0, iter(free_pages.tolist())
    for start, end, last in _spans(prefix_lens, seq_lens, last_loc):
        slots = list(range(last + 1, last + 1 + min(-start % page_size, end - start)))
        while len(slots) < end - start:
            page = next(pages, 0)
            slots += range(page * page_size, (page + 1) * page_size)
        out_indices[at : at + end - start] = torch.tensor(slots[: end - start])
        at += end - start


def alloc_decode_cpu(
    seq_lens: Tensor,
    last_loc: Tensor,
    free_pages: Tensor,
    out_indices: Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """A slot for the last of each request's ``seq_lens`` tokens, as :func:`alloc_extend_cpu`."""
    alloc_extend_cpu(seq_lens - 1, seq_lens, last_loc, free_pages, out_indices, bs_upper, page_size)


def _spans(first: Tensor, second: Tensor, third: Tensor) -> list[tuple[int, int, int]]:
    return list(zip(first.tolist(), second.tolist(), third.tolist(), strict=True))


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, stride: int
) -> None:
    """Each request's last accepted token: number accept_lens[b] of the stride from b * stride."""
    rows = torch.arange(accept_lens.numel()) * stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[rows])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor, *_unused: Any
) -> None:
    """Slots of the accepted nodes, packed at the front; accept_index has -1 for "none"."""
    rows = accept_index.reshape(-1)
    rows = rows[rows >= 0].long()
    accept_out_cache_loc[: rows.numel()] = out_cache_loc[rows]


def copy_rows(
    dst: Tensor, src: Tensor, dim: int, offset: Tensor, count: Tensor, offset_src: bool
) -> None:
    """Copy ``count`` rows between the beginning of one and the offset of the other, as
    ``dp_attention.memcpy_triton``.

    Args:
        dim: 0, the only one there is upstream.
        offset, count: integers of one element.
        offset_src: whether the offset is the source's.
    """
    start, rows = int(offset), int(count)
    if offset_src:
        dst[:rows] = src[start : start + rows]
    else:
        dst[start : start + rows] = src[:rows]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Copy KV rows between slots; data_ptrs: address of each buffer, strides: bytes of its rows."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + source * size, size) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(address + target * size, row, size)


# Names that SGLang 0.5.16 and later call on a CPU.
build_tree_kernel_efficient_cpu = build_tree_kernel_efficient
verify_tree_greedy_cpu = verify_tree_greedy
