"""The CPU engine itself: models, kernels, the in-process scheduler, Engine and HTTP server.

Most tests share schedulers of this process, which start in a fraction of a second after the first.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.servers import running_server

from sglang_dynspec.errors import UnsupportedError
from sglang_dynspec.testing import (
    InProcessScheduler,
    Models,
    Output,
    Request,
    UnfinishedError,
    cpu_engine,
    make_models,
)
from sglang_dynspec.testing.models import DRAFT_VOCAB_OFFSET, VOCAB_SIZE

SUBPROCESS_LIMIT = 300  # seconds; a start takes 10 when the machine is idle

needs_both_loops = pytest.mark.skipif(
    not cpu_engine.speculates_without_overlap(), reason="spec v2 under overlap only, up to 0.5.12"
)
needs_trees = pytest.mark.skipif(
    not cpu_engine.speculates_without_overlap(), reason="spec v2 drafts no trees up to 0.5.12"
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randrange(3, 60))] for _ in range(12)]


@pytest.fixture(scope="module")
def plain_text(models: Models, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy text of the target alone, one request at a time."""
    with InProcessScheduler(None, models=models) as scheduler:
        return [scheduler.run([greedy(prompt)])[0].token_ids for prompt in prompts]


def greedy(prompt: list[int], tokens: int = 60, **options: Any) -> Request:
    return Request(prompt, max_new_tokens=tokens, **options)


def token_ids(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def mean_accept_length(outputs: list[Output]) -> float:
    return sum(output.accept_length for output in outputs) / len(outputs)


# --- models ---------------------------------------------------------------------------------------
def test_models_are_made_by_their_seed_alone(models: Models, tmp_path: Path) -> None:
    again, other = make_models(tmp_path / "a"), make_models(tmp_path / "b", seed=1)
    for ours, same, different in zip(
        contents(models), contents(again), contents(other), strict=True
    ):
        assert ours == same
        assert ours != different


def contents(models: Models) -> list[bytes]:
    return [(home / "model.safetensors").read_bytes() for home in homes(models)]


def homes(models: Models) -> tuple[Path, ...]:
    """As ``Models`` is made of them."""
    return models.target, models.eagle, models.eagle3, models.standalone


def test_models_are_made_once_by_many_at_a_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: make_models(tmp_path), range(4)))
    assert len(made) == 1
    assert [home.name for home in tmp_path.iterdir()] == [made.pop().target.parent.name]


def test_text_is_varied_and_far_from_ties(
    models: Models, prompts: list[list[int]], plain_text: list[list[int]]
) -> None:
    """An independent implementation agrees, and rounding could not change a single token."""
    import torch
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(models.target, torch_dtype=torch.float32)
    least_lead = math.inf
    for prompt, text in zip(prompts, plain_text, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        assert logits.argmax(-1).tolist() == text
        least_lead = min(least_lead, float((best[:, 0] - best[:, 1]).min()))
    assert least_lead > 1.0
    tokens = [token for text in plain_text for token in text]
    assert min(tokens) >= DRAFT_VOCAB_OFFSET
    assert len({tuple(tokens[i : i + 3]) for i in range(len(tokens))}) > 0.95 * len(tokens)


# --- kernels --------------------------------------------------------------------------------------
def chain(tokens: list[int], requests: int) -> dict[str, Any]:
    """A draft chain (first token: the root) for each of several equal requests."""
    import torch

    n = len(tokens)
    following = torch.tensor([*range(1, n), -1]).repeat(requests, 1)
    return {
        "predicts": torch.zeros(requests * n, dtype=torch.int32),
        "accept_index": torch.full((requests, n), -1, dtype=torch.int32),
        "accept_token_num": torch.zeros(requests, dtype=torch.int32),
        "candidates": torch.tensor(tokens).repeat(requests, 1),
        "retrive_index": torch.arange(requests * n).view(requests, n),
        "retrive_next_token": following,
        "retrive_next_sibling": torch.full((requests, n), -1),
    }


def test_greedy_verification_accepts_what_the_target_says() -> None:
    import torch

    from sglang_dynspec.testing._cpu import kernels

    arguments = chain([9, 1, 2, 3], requests=3)
    wanted = torch.tensor([[1, 2, 3, 4], [1, 5, 3, 4], [7, 2, 3, 4]])
    kernels.verify_tree_greedy(**arguments, target_predict=wanted)
    assert arguments["accept_token_num"].tolist() == [3, 1, 0]
    assert arguments["accept_index"].tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [8, -1, -1, -1]]
    predicts = arguments["predicts"].view(3, 4)
    assert predicts[0].tolist() == [1, 2, 3, 4]
    assert predicts[1, :2].tolist() == [1, 5]
    assert predicts[2, 0] == 7


def test_verification_by_sampling_keeps_the_target_distribution() -> None:
    import torch

    from sglang_dynspec.testing._cpu import kernels

    requests, generator = 12000, torch.Generator().manual_seed(0)
    probs = torch.tensor([[0.5, 0.2, 0.2, 0.1, 0.0], [0.1, 0.6, 0.1, 0.1, 0.1], [0.2] * 5])
    arguments = chain([4, 1, 2], requests)
    kernels.tree_speculative_sampling_target_only(
        **arguments,
        uniform_samples=torch.rand(requests, 3, generator=generator),
        uniform_samples_for_final_sampling=torch.rand(requests, generator=generator),
        target_probs=probs.repeat(requests, 1, 1),
        draft_probs=torch.zeros(requests, 3, 5),
    )
    predicts = arguments["predicts"].view(requests, 3)
    accepted = arguments["accept_token_num"]
    assert chi_squared(predicts[:, 0], probs[0]) < 25
    assert chi_squared(predicts[accepted >= 1, 1], probs[1]) < 25
    assert chi_squared(predicts[accepted == 2, 2], probs[2]) < 25
    # A draft is accepted as often as the target would have said it.
    assert float((accepted >= 1).float().mean()) == pytest.approx(0.2, abs=0.02)


def chi_squared(drawn: Any, probs: Any) -> float:
    """Statistic of at most 4 degrees of freedom; infinite when something impossible was drawn."""
    expected = probs * len(drawn)
    counts = drawn.long().bincount(minlength=len(probs))
    if counts[probs == 0].any():
        return math.inf
    possible = probs > 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


def test_renormalisation_keeps_the_best_tokens() -> None:
    import torch

    from sglang_dynspec.testing._cpu import kernels

    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]])
    by_count = kernels.top_k_renorm_prob(probs, torch.tensor([2, 10]))
    assert by_count[0].tolist() == pytest.approx([0, 4 / 7, 3 / 7, 0])
    assert by_count[1].tolist() == pytest.approx([0.25] * 4)
    by_mass = kernels.top_p_renorm_prob(probs, torch.tensor([0.6, 1.0]))
    assert by_mass[0].tolist() == pytest.approx([0, 4 / 7, 3 / 7, 0])
    assert by_mass[1].tolist() == pytest.approx([0.25] * 4)


def test_pages_are_filled_before_new_ones_are_taken() -> None:
    import torch

    from sglang_dynspec.testing._cpu import kernels

    free_pages = torch.tensor([7, 3, 9, 5, 1])
    slots = torch.empty(13, dtype=torch.int64)
    kernels.alloc_extend_cpu(
        prefix_lens=torch.tensor([6, 0, 5, 4, 4]),
        seq_lens=torch.tensor([13, 3, 7, 5, 4]),  # the last one needs nothing
        last_loc=torch.tensor([9, -1, 20, 27, 11]),
        free_pages=free_pages,
        out_indices=slots,
        bs_upper=8,
        page_size=4,
    )
    assert slots.tolist() == [10, 11, 28, 29, 30, 31, 12, 36, 37, 38, 21, 22, 20]
    slots = torch.empty(2, dtype=torch.int64)
    kernels.alloc_decode_cpu(
        seq_lens=torch.tensor([5, 6]),
        last_loc=torch.tensor([11, 20]),
        free_pages=free_pages,
        out_indices=slots,
        bs_upper=2,
        page_size=4,
    )
    assert slots.tolist() == [28, 21]


def test_a_kernel_without_implementation_says_so() -> None:
    import sgl_kernel
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.rmsnorm"):
        sgl_kernel.rmsnorm(1, 2)
    with pytest.raises(NotImplementedError, match=r"flash_attn\.flash_attn_varlen_func"):
        flash_attn_varlen_func()


# --- the in-process scheduler ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("algorithm", "overlap"),
    [
        ("EAGLE", True),
        ("EAGLE3", True),
        pytest.param("EAGLE", False, marks=needs_both_loops),
        pytest.param("EAGLE3", False, marks=needs_both_loops),
    ],
)
def test_speculation_writes_the_same_text(
    models: Models,
    prompts: list[list[int]],
    plain_text: list[list[int]],
    algorithm: str,
    overlap: bool,
) -> None:
    with InProcessScheduler(algorithm, overlap=overlap, models=models) as scheduler:
        assert scheduler.scheduler.enable_overlap is overlap
        assert type(scheduler.scheduler.draft_worker).__name__ == "EAGLEWorkerV2"
        slots = scheduler.free_kv_slots(), scheduler.free_request_slots()
        together = scheduler.run([greedy(prompt) for prompt in prompts])
        staggered = scheduler.run(
            [greedy(prompt, arrive_at_step=3 * i) for i, prompt in enumerate(prompts)]
        )
        assert (scheduler.free_kv_slots(), scheduler.free_request_slots()) == slots
        scheduler.check_idle()
    assert token_ids(together) == plain_text
    assert token_ids(staggered) == plain_text
    assert 2.2 <= mean_accept_length(together) <= 3.0
    first = together[0]
    assert first.finish_reason == {"type": "length", "length": 60}
    assert sum(first.chunks) == 60
    assert first.chunks[0] == 1  # the prefill's
    assert first.verify_steps >= len(first.chunks) - 1


def test_a_standalone_draft_writes_the_same_text(
    models: Models, prompts: list[list[int]], plain_text: list[list[int]]
) -> None:
    with InProcessScheduler("STANDALONE", models=models) as scheduler:
        draft = scheduler.scheduler.draft_worker.draft_worker.draft_runner
        assert draft.model_config.hidden_size < 64
        outputs = scheduler.run([greedy(prompt) for prompt in prompts[:6]])
    assert token_ids(outputs) == plain_text[:6]
    assert 2.0 <= mean_accept_length(outputs) <= 3.0


@needs_trees
def test_trees_write_the_same_text_and_find_more_than_their_first_branch(
    models: Models,
    prompts: list[list[int]],
    plain_text: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang_dynspec.testing._cpu import kernels

    write_path, paths = kernels._write_path, []

    def noted(b: int, path: list[int], *out: Any) -> None:
        paths.append([row - path[0] for row in path])
        write_path(b, path, *out)

    monkeypatch.setattr(kernels, "_write_path", noted)
    tree = {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 12}
    with InProcessScheduler("EAGLE3", models=models, **tree) as scheduler:
        outputs = scheduler.run([greedy(prompt) for prompt in prompts[:6]])
    assert token_ids(outputs) == plain_text[:6]
    assert 2.2 <= mean_accept_length(outputs) <= 3.5
    # The likeliest child of the root is its first: others have been accepted, too.
    assert {path[1] for path in paths if len(path) > 1} > {1}


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_any_number_of_draft_steps(
    models: Models, prompts: list[list[int]], plain_text: list[list[int]], num_steps: int
) -> None:
    with InProcessScheduler("EAGLE3", num_steps=num_steps, models=models) as scheduler:
        outputs = scheduler.run([greedy(prompt) for prompt in prompts[:4]])
    assert token_ids(outputs) == plain_text[:4]
    assert max(max(output.chunks) for output in outputs) == num_steps + 1


@pytest.mark.skipif(cpu_engine.speculates_without_overlap(), reason="it works from 0.5.13 on")
def test_speculation_without_overlap_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="overlap"):
        cpu_engine.server_args("EAGLE3", overlap=False)


@pytest.mark.parametrize("algorithm", [None, "EAGLE3"])
def test_pages_of_more_than_one_token(
    models: Models,
    prompts: list[list[int]],
    plain_text: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str | None,
) -> None:
    monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", "1")  # the allocator checks what it hands out
    with InProcessScheduler(algorithm, models=models, page_size=8) as scheduler:
        outputs = scheduler.run([greedy(prompt) for prompt in prompts])
        assert scheduler.free_kv_slots() == 8192
    assert token_ids(outputs) == plain_text


def test_chunked_prefill_radix_hits_and_retraction(models: Models) -> None:
    rng = random.Random(5)
    shared = [rng.randrange(4, VOCAB_SIZE) for _ in range(150)]
    requests = [
        greedy(
            shared[: rng.randrange(20, 150)]
            + [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randrange(1, 60))],
            tokens=rng.randrange(60, 150),
            arrive_at_step=2 * i,
            ignore_eos=False,  # SGLang overcommits only where a request may end early
        )
        for i in range(10)
    ]
    with InProcessScheduler(None, models=models) as roomy:
        expected = roomy.run(requests)
    # A pool for few of them, that the scheduler overcommits.
    tight = {
        "max_total_tokens": 600,
        "max_running_requests": 8,
        "chunked_prefill_size": 64,
        "schedule_conservativeness": 0.05,
    }
    with InProcessScheduler("EAGLE3", models=models, **tight) as scheduler:
        outputs = scheduler.run(requests)
        assert scheduler.free_kv_slots() == 600
    assert token_ids(outputs) == token_ids(expected)
    assert sum(output.retractions for output in outputs) > 0
    assert sum(output.cached_tokens for output in outputs) > 500


def test_aborted_requests_give_everything_back(
    models: Models, prompts: list[list[int]], plain_text: list[list[int]]
) -> None:
    with InProcessScheduler("EAGLE3", models=models, max_running_requests=2) as scheduler:
        slots = scheduler.free_kv_slots(), scheduler.free_request_slots()
        stays, midway, waiting, next_one = scheduler.run(
            [
                greedy(prompts[0]),
                greedy(prompts[1], tokens=200, abort_at_step=8),
                greedy(prompts[2], abort_at_step=4),  # no room for it before step 8
                greedy(prompts[3], arrive_at_step=6),
            ]
        )
        assert (scheduler.free_kv_slots(), scheduler.free_request_slots()) == slots
    assert token_ids([stays, next_one]) == [plain_text[0], plain_text[3]]
    assert midway.aborted
    assert midway.token_ids[:60] == plain_text[1][: len(midway.token_ids)]
    assert 0 < len(midway.token_ids) < 60
    assert waiting.aborted
    assert not waiting.token_ids


def test_sampling_follows_its_parameters(models: Models, prompts: list[list[int]]) -> None:
    for algorithm in (None, "EAGLE3"):
        with InProcessScheduler(algorithm, models=models) as scheduler:
            free = scheduler.run([Request(prompts[0], temperature=1.0) for _ in range(4)])
            top_one = scheduler.run(
                [Request(prompts[0], temperature=1.0, sampling_params={"top_k": 1})]
            )
            [expected] = scheduler.run([Request(prompts[0])])
        assert len({tuple(output.token_ids) for output in free}) == 4
        assert top_one[0].token_ids == expected.token_ids


def test_logprobs_are_those_of_the_target(models: Models, prompts: list[list[int]]) -> None:
    # 0.5.9 has no logprobs under spec v2 (and raises for EAGLE-3).
    algorithms = [None] if metadata.version("sglang") == "0.5.9" else [None, "EAGLE3"]
    results = []
    for algorithm in algorithms:
        with InProcessScheduler(algorithm, models=models) as scheduler:
            results += scheduler.run([greedy(prompts[0], tokens=20, return_logprob=True)])
    for result in results:
        assert len(result.logprobs) == 20
        assert result.logprobs == pytest.approx(results[0].logprobs, abs=1e-4)
        assert all(-3 < logprob < 0 for logprob in result.logprobs)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_acceptance_needs_warm_draft_kv(
    models: Models, prompts: list[list[int]], plain_text: list[list[int]], algorithm: str
) -> None:
    """Losing the draft's last 24 positions costs most of the acceptance, and nothing else."""
    with InProcessScheduler(algorithm, models=models) as scheduler:
        run = lambda: scheduler.run([greedy(prompt) for prompt in prompts])  # noqa: E731
        warm = run()
        scheduler.flush_cache()
        forget_draft_kv(scheduler.scheduler.draft_worker, positions=24)
        cold = run()
    assert token_ids(cold) == token_ids(warm) == plain_text
    assert mean_accept_length(warm) > 2.2
    assert mean_accept_length(cold) < 1.4


def forget_draft_kv(worker: Any, positions: int) -> None:
    """Zero the draft's KV of each request's latest positions before every decode step."""
    forward = worker.forward_batch_generation

    def forward_after_forgetting(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_decode():
            pool = worker.draft_worker.draft_runner.token_to_kv_pool
            rows = worker.req_to_token_pool.req_to_token
            requests = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
            for row, length in zip(*requests, strict=True):
                slots = rows[row, max(0, length - positions) : length].long()
                for buffer in (*pool.k_buffer, *pool.v_buffer):
                    buffer[slots] = 0
        return forward(batch, *args, **kwargs)

    worker.forward_batch_generation = forward_after_forgetting


def test_a_run_that_does_not_end_says_what_is_left(
    models: Models, prompts: list[list[int]], plain_text: list[list[int]]
) -> None:
    with InProcessScheduler(None, models=models) as scheduler:
        request = greedy(prompts[0], rid="slow")
        with pytest.raises(UnfinishedError, match="slow: 4 tokens"):
            scheduler.run([request], max_iterations=5)
    with InProcessScheduler(None, models=models) as scheduler:
        assert token_ids(scheduler.run([request])) == plain_text[:1]


def test_schedulers_may_follow_but_not_overlap(models: Models) -> None:
    with (
        InProcessScheduler(None, models=models),
        pytest.raises(UnsupportedError, match="open already"),
    ):
        InProcessScheduler(None, models=models)


# --- other processes ------------------------------------------------------------------------------
def python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a Python without our environment variables, and kill what it leaves behind."""
    clean = {k: v for k, v in os.environ.items() if k not in cpu_engine.environment()}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=clean | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=SUBPROCESS_LIMIT)
    finally:
        kill_group(process.pid)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


LOADED = "import sys; print([m for m in ('torch', 'sglang', 'wrapt') if m in sys.modules])"


def test_importing_the_package_loads_neither_torch_nor_sglang() -> None:
    result = python(
        "-c", f"import sglang_dynspec.testing, sglang_dynspec.testing.cpu_engine; {LOADED}"
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_installing_loads_nothing_before_sglang() -> None:
    code = f"from sglang_dynspec.testing import cpu_engine; cpu_engine.install(); {LOADED}"
    result = python("-c", code)
    assert result.stdout.strip() == "[]", result.stderr


def test_a_real_sgl_kernel_is_not_shadowed(tmp_path: Path) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("REAL = True\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from sglang_dynspec.testing import cpu_engine; cpu_engine.install()\n"
        "import sgl_kernel; assert sgl_kernel.REAL; del sys.modules['sgl_kernel']\n"
        "import sglang\n"
    )
    result = python("-c", code, str(tmp_path))
    assert result.returncode != 0
    assert "UnsupportedError" in result.stderr
    assert str(tmp_path / "sgl_kernel") in result.stderr


def test_an_unknown_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.99")
    with pytest.raises(UnsupportedError) as refusal:
        cpu_engine._family()
    for fact in ("0.5.99", "0.5.9,", "0.5.23", "SGLANG_DYNSPEC_CPU_ENGINE"):
        assert fact in str(refusal.value)


def test_simulated_acceptance(models: Models) -> None:
    code = (
        "import json\n"
        "from pathlib import Path\n"
        "from sglang_dynspec.testing import InProcessScheduler, Models, Request\n"
        "import sys\n"
        "models = Models(*map(Path, sys.argv[1:]))\n"
        "with InProcessScheduler('EAGLE3', models=models) as s:\n"
        "    [output] = s.run([Request([70, 80, 90], max_new_tokens=300)])\n"
        "print(json.dumps(output.chunks))\n"
    )
    result = python(
        "-c",
        code,
        *map(str, homes(models)),
        SGLANG_SIMULATE_ACC_LEN="2.5",
        SGLANG_SIMULATE_ACC_METHOD="match-expected",
    )
    assert result.returncode == 0, result.stderr
    chunks = json.loads(result.stdout.splitlines()[-1])[1:-1]
    assert set(chunks) == {2, 3}
    assert sum(chunks) / len(chunks) == pytest.approx(2.5, abs=0.2)


ENGINE = """
import json, os, sys
if __name__ == "__main__":
    from pathlib import Path
    from sglang_dynspec.testing import Models, cpu_engine
    os.environ.update(cpu_engine.environment())
    cpu_engine.install()
    import sglang
    models, prompts = Models(*map(Path, sys.argv[1:5])), json.loads(sys.argv[5])
    engine = sglang.Engine(**cpu_engine.server_args("EAGLE3", models=models))
    greedy = dict(temperature=0, max_new_tokens=60, ignore_eos=True)
    results = engine.generate(input_ids=prompts, sampling_params=greedy)
    text = engine.generate(prompt="w70 w80", sampling_params=dict(temperature=0, max_new_tokens=4))
    engine.shutdown()
    print(json.dumps([[r["output_ids"] for r in results], text["text"]]))
"""


@pytest.fixture
def engine_script(tmp_path: Path) -> Path:
    """A file, because SGLang's spawned processes import the main module anew."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    return script


def test_engine(
    models: Models, prompts: list[list[int]], plain_text: list[list[int]], engine_script: Path
) -> None:
    result = python(str(engine_script), *map(str, homes(models)), json.dumps(prompts))
    assert result.returncode == 0, result.stderr
    texts, words = json.loads(result.stdout.splitlines()[-1])
    assert texts == plain_text
    assert len(words.split()) == 4
    assert all(word.startswith("w") for word in words.split())


def test_http_server(
    tmp_path: Path, models: Models, prompts: list[list[int]], plain_text: list[list[int]]
) -> None:
    with running_server("EAGLE3", tmp_path / "server.log") as server:
        # It is healthy by now: running_server has waited for /health.
        assert [server.generate(prompt, 60) for prompt in prompts[:3]] == plain_text[:3]
