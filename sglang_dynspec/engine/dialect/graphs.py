"""CUDA graphs of plain decode: what the releases have in common."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from sglang_dynspec.engine.temporarily import temporarily


def hidden_mode(*, keep_hidden: bool) -> CaptureHiddenMode:
    """Which of the target's hidden states a plain step keeps: all, for the draft, or none."""
    return CaptureHiddenMode.FULL if keep_hidden else CaptureHiddenMode.NULL


def attention_backend(model_runner: Any) -> Any:
    """A second attention backend of the target's kind, for decode.

    It works in the workspace of the first: plain and speculative steps follow each other on one
    stream.
    """
    # The call leaves what it is told on the runner; SGLang restores that where it does the same
    # (EAGLEWorkerV2.build_adaptive_runtime_state).
    with temporarily(model_runner, init_new_workspace=False):
        backend = model_runner._get_attention_backend(init_new_workspace=False)
    # It never prefills, so it needs no masks of batch size * context length for verification.
    if hasattr(backend, "skip_prefill"):
        backend.skip_prefill = True
    # Set on the first only, for the models that ask which kernels they run with.
    for name in ("prefill_attention_backend_str", "decode_attention_backend_str"):
        if hasattr(model_runner.attn_backend, name):
            setattr(backend, name, getattr(model_runner.attn_backend, name))
    return backend


def keeping(runner_class: Any, attribute: str, mode: CaptureHiddenMode) -> Any:
    """A class of decode graphs that keep the hidden states of one mode, and no others.

    Args:
        runner_class: SGLang's.
        attribute: where it keeps the mode, which it derives from the server's arguments. Up to
            0.5.16 it also captures anew, in the middle of serving, when a batch wants another one;
            of plain steps none does.
    """

    def fixed(_self: Any) -> CaptureHiddenMode:
        return mode

    def ignore(_self: Any, _value: Any) -> None:
        pass

    members = {attribute: property(fixed, ignore), "recapture_if_needed": ignore}
    return type("PlainDecodeGraphRunner", (runner_class,), members)
