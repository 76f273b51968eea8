"""A plain step's token, sampled as SGLang's verification samples: what the releases have in common.

The verification treats some requests otherwise than the target's ordinary sampler does: it leaves
out min_p and custom logit processors, for one, and lays out log-probabilities by accepted token. A
tree of one node, the pending token, with no draft below it, makes it a plain decode; from 0.5.14 on
SGLang runs such trees itself, for 0 draft steps (EAGLEWorkerV2._build_trivial_verify_input).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

Barrier = Callable[[], None]
"""From 0.5.17 on: brings grammars up to date with the step before, waiting for it (`Scheduler.
_advance_pending_grammar`)."""


def one_node_tree(tokens: torch.Tensor) -> SimpleNamespace:
    """The attributes of an EagleVerifyInput that sampling reads.

    Args:
        tokens: pending tokens, shape (bs,), int64.
    """
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    none = torch.full_like(rows, -1)
    links = {"index": rows, "next_token": none, "next_sibling": none}
    return SimpleNamespace(
        draft_token=tokens,
        draft_token_num=1,
        draft_probs=None,
        grammar=None,
        spec_steps=0,  # up to 0.5.13
        topk=1,
        max_tree_depth=1,  # from 0.5.14 on
        tree_topk=1,
        **{f"retrive_{name}": value for name, value in links.items()},  # up to 0.5.10
        **{f"retrieve_{name}": value for name, value in links.items()},
    )


def take_mask(batch: Any, field: str, barrier: Barrier | None) -> Any:
    """Fill the mask of the batch's grammars, and take it from the sampling information, so that it
    is applied once.

    Args:
        field: of SamplingBatchInfo, that holds it.
        barrier: called first, where there is one.

    Returns:
        As the release's verification takes it; None without a grammar.
    """
    if not batch.has_grammar:
        return None
    if barrier is not None:
        barrier()
    sampling = batch.sampling_info
    sampling.update_regex_vocab_mask()
    mask = getattr(sampling, field)
    setattr(sampling, field, None)
    return mask
