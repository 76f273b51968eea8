"""What a plain step keeps for the draft, in one kernel (see ``catch_up``). NVIDIA GPUs only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _keep(  # type: ignore[no-untyped-def]
    ring_ids,
    ring_hidden,
    pool,
    positions,
    ids,
    hidden,
    tokens,
    size,
    hidden_stride,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = (
        tl.load(pool + row).to(tl.int64) * tokens + tl.load(positions + row).to(tl.int64) % tokens
    )
    if part == 0:
        tl.store(ring_ids + slot, tl.load(ids + row).to(tl.int32))
    at = part * block + tl.arange(0, block)
    mask = at < size
    values = tl.load(hidden + row * hidden_stride + at, mask=mask)
    tl.store(ring_hidden + slot * size + at, values, mask=mask)


def keep(
    ring_ids: torch.Tensor,
    ring_hidden: torch.Tensor,
    pool: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor,
    hidden: torch.Tensor | None,
) -> None:
    """Write tokens and hidden states of some positions into the ring.

    Args:
        ring_ids: shape (rows, tokens), int32.
        ring_hidden: shape (rows, tokens, size); size may be 0.
        pool: row of each, shape (n,).
        positions: in the sequence, shape (n,); the ring has them modulo its tokens.
        ids: shape (n,).
        hidden: shape (n, size), or None.
    """
    tokens = ring_ids.shape[1]
    size = 0 if hidden is None else ring_hidden.shape[-1]
    source = ring_hidden if hidden is None else hidden.to(ring_hidden.dtype)
    if source.stride(-1) != 1:
        source = source.contiguous()
    grid = (len(pool), max(triton.cdiv(size, _BLOCK), 1))
    _keep[grid](
        ring_ids,
        ring_hidden,
        pool.contiguous(),
        positions.contiguous(),
        ids.contiguous(),
        source,
        tokens,
        size,
        source.stride(0),
        block=_BLOCK,
    )
