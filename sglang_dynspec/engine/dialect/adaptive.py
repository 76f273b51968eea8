"""SGLang's adaptive speculation (0.5.12 and later), as far as we use it: states for other numbers
of draft steps, without the policy that goes with them upstream."""

from __future__ import annotations

from typing import Any


def state(
    worker: Any, num_steps: int, *, graph_runner: str, extend_runs_on_runner: bool
) -> list[tuple[Any, dict[str, Any]]]:
    """Build a state, and return what it sets on which object.

    Args:
        worker: SGLang's EAGLEWorkerV2.
        num_steps: draft steps (>= 1).
        graph_runner: attribute of the target's model runner that holds its graphs.
        extend_runs_on_runner: whether the draft-extend reads its backend from the draft's runner.
    """
    built = worker.build_adaptive_runtime_state(num_steps, num_steps + 1)
    draft_worker, target = worker.draft_worker, worker.target_worker.model_runner
    draft_runner = draft_worker.draft_runner
    # As EAGLEWorkerV2.apply_runtime_state does, less the server's arguments: nothing reads them in
    # a forward, and what the scheduler reserves comes from them.
    runner_values = {"draft_attn_backend": built.draft_attn_backend}
    if extend_runs_on_runner and built.draft_extend_attn_backend is not None:
        runner_values["attn_backend"] = built.draft_extend_attn_backend
    with worker._override_worker_state(num_steps, num_steps + 1):
        chain = {n: v for n, v in vars(draft_worker).items() if n.startswith("_topk1_")}
    widths = {"speculative_num_steps": num_steps, "speculative_num_draft_tokens": num_steps + 1}
    target_values = {
        "attn_backend": built.target_attn_backend,
        graph_runner: built.target_graph_runner,
    }
    return [
        (worker, widths),
        (
            draft_worker,
            {
                **widths,
                **chain,
                "draft_attn_backend": built.draft_attn_backend,
                "cuda_graph_runner": built.cuda_graph_runner,
                "draft_extend_attn_backend": built.draft_extend_attn_backend,
                "cuda_graph_runner_for_draft_extend": built.cuda_graph_runner_for_draft_extend,
            },
        ),
        (draft_runner, runner_values),
        (target, target_values),
    ]
