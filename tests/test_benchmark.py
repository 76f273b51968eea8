"""examples/benchmark: its parts by themselves, and all of it once on the installed SGLang."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dynspec import BatchView
from sglang_dynspec.engine.dialect import installed_release
from sglang_dynspec.testing import cpu_engine, models

BENCHMARK = Path(__file__).parent.parent / "examples" / "benchmark"

if not BENCHMARK.is_dir():
    pytest.skip("only in a source checkout", allow_module_level=True)
sys.path.insert(0, str(BENCHMARK))

from dynspec_benchmark import measure, process, wave_report  # noqa: E402
from dynspec_benchmark.checks import captures, compare  # noqa: E402
from dynspec_benchmark.command import OK, UNFINISHED, USAGE, WRONG, main  # noqa: E402
from dynspec_benchmark.engine_args import adaptive_steps, engine_arguments  # noqa: E402
from dynspec_benchmark.errors import BenchmarkError, UsageError  # noqa: E402
from dynspec_benchmark.load import Load, Requests  # noqa: E402
from dynspec_benchmark.measure import skipped  # noqa: E402
from dynspec_benchmark.models import Model, checkpoint, random_weights  # noqa: E402
from dynspec_benchmark.plan import (  # noqa: E402
    Config,
    Plan,
    Point,
    check_method,
    check_points,
    parse_config,
    parse_configs,
)
from dynspec_benchmark.policies import RandomToggle  # noqa: E402
from dynspec_benchmark.process import Worker, environment  # noqa: E402
from dynspec_benchmark.ramp import Goal, problems  # noqa: E402
from dynspec_benchmark.results import (  # noqa: E402
    Results,
    about,
    begin,
    load,
    merge,
    resume,
    summarise,
    write_json,
    wrong,
)
from dynspec_benchmark.wave import Wave  # noqa: E402
from dynspec_benchmark.wave import begin as begin_wave  # noqa: E402
from dynspec_benchmark.wave import summarise as summarise_wave  # noqa: E402
from dynspec_benchmark.wave_worker import accept_length  # noqa: E402
from dynspec_benchmark.worker import difference, digest, summary  # noqa: E402

PLAN = Plan(
    configs=parse_configs(["no_spec", "static", "adaptive", "dynspec:never@skip"]),
    points=(Point(16, 8, 1), Point(16, 8, 2)),
    repeats=3,
    rounds=1,
    model={"name": "a model"},
    algorithm="EAGLE3",
    num_steps=3,
    simulate_accept_length=None,
    adaptive_cut=32,
)
NO_SPEC, STATIC, ADAPTIVE, NEVER = PLAN.configs
MODEL = Model("a model", "target", "draft")
PLAIN, SPECULATIVE = (
    {"by_num_steps": {"0": 9}, "passthrough": {}},
    {"by_num_steps": {"0": 1, "3": 3}, "passthrough": {"grammar": 1}},
)


# --- configurations and points -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("no_spec", Config("no_spec")),
        ("static", Config("static")),
        (" adaptive ", Config("adaptive")),
        ("dynspec:never", Config("dynspec", "never", "catch_up")),
        ("dynspec:never@skip", Config("dynspec", "never", "skip")),
        (
            "dynspec: batch_size( off_at = 64 ) @warm",
            Config("dynspec", "batch_size(off_at=64)", "warm"),
        ),
        ("dynspec:never@catch_up", Config("dynspec", "never", "catch_up")),
        ('dynspec:mine:Policy("a@b")', Config("dynspec", "mine:Policy('a@b')", "catch_up")),
    ],
)
def test_a_configuration_is_read(text: str, config: Config) -> None:
    assert parse_config(text) == config
    assert parse_config(config.label) == config
    assert config.speculative == (config.kind != "no_spec")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nospec", ["'nospec'", "no_spec, static, adaptive, dynspec:POLICY"]),
        ("static@skip", ["'static@skip'"]),
        ("static:never", ["'static:never'"]),
        ("dynspec", ["'dynspec'", "dynspec:never@skip"]),
        ("dynspec:", ["'dynspec:'", "dynspec:never@skip"]),
        ("dynspec:never@cold", ["@cold", "@catch_up, @warm or @skip"]),
        ("dynspec:nevr", ["'dynspec:nevr'", "did you mean 'never'"]),
    ],
)
def test_what_is_no_configuration_is_named(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        parse_config(text)
    for word in words:
        assert word in str(refused.value)


def test_a_configuration_cannot_be_named_twice() -> None:
    with pytest.raises(UsageError, match="dynspec:never@catch_up twice"):
        parse_configs(["dynspec:never", "no_spec", "dynspec:never@catch_up"])


def test_the_order_alternates() -> None:
    plan = replace(PLAN, configs=(NO_SPEC, STATIC, NEVER), rounds=3)
    names = ["".join(c.kind[0] for n, c in plan.schedule() if n == k) for k in range(3)]
    assert names == ["nsd", "dsn", "nsd"]


def test_prompts_are_the_points_own() -> None:
    prompts = Point(5, 8, 3).prompts(512)
    assert prompts == Point(5, 8, 3).prompts(512)
    assert prompts != Point(5, 9, 3).prompts(512)
    assert [len(prompt) for prompt in prompts] == [5, 5, 5]
    assert all(10 <= token < 384 for prompt in prompts for token in prompt)


def test_a_median_needs_three_runs() -> None:
    check_method(repeats=3, rounds=1)
    check_method(repeats=1, rounds=3)
    with pytest.raises(UsageError, match=r"are 2 runs .* raise --repeats to 2$"):
        check_method(repeats=1, rounds=2)


def test_a_point_must_fit_the_model() -> None:
    check_points([Point(100, 28, 1)], 3, None)
    check_points([Point(100, 28, 1)], 3, 133)
    with pytest.raises(UsageError, match=r"need a context of 133.* the model has 132"):
        check_points([Point(100, 28, 1)], 3, 132)


# --- server arguments ----------------------------------------------------------------------------
OLD = {"cuda_graph_bs", "attention_backend", "max_running_requests", "context_length"}
NEW = {"cuda_graph_bs_decode", "disable_prefill_cuda_graph", "attention_backend", "page_size"}
BETWEEN = {"cuda_graph_bs", "disable_piecewise_cuda_graph", "speculative_draft_load_format"}


def arguments(config: Config, plan: Plan = PLAN, model: Model = MODEL, **more: Any) -> Any:
    options: dict[str, Any] = {"fields": NEW, "gpu": True, "adaptive_config": Path("a.json")}
    return engine_arguments(config, plan, model, **(options | more))


@pytest.mark.parametrize(
    ("fields", "graphs", "prefill"),
    [
        (OLD, "cuda_graph_bs", None),
        (BETWEEN, "cuda_graph_bs", "disable_piecewise_cuda_graph"),
        (NEW, "cuda_graph_bs_decode", "disable_prefill_cuda_graph"),
    ],
)
def test_arguments_have_the_names_of_the_release(
    fields: set[str], graphs: str, prefill: str | None
) -> None:
    plan = replace(PLAN, points=(Point(16, 8, 3), Point(16, 8, 20)))
    found = arguments(NO_SPEC, plan, fields=fields)
    assert found[graphs] == [1, 2, 3, 4, 8, 16, 20]
    assert {name for name in found if "cuda_graph" in name} == {graphs, prefill} - {None}
    assert not any("cuda" in name for name in arguments(NO_SPEC, fields=fields, gpu=False))


def test_only_speculative_servers_get_speculation() -> None:
    plan = replace(PLAN, server_arguments={"speculative_attention_mode": "decode"})
    fields = NEW | {"speculative_attention_mode"}
    assert not any("specul" in name for name in arguments(NO_SPEC, plan, fields=fields))
    static, adaptive = (arguments(c, plan, fields=fields) for c in (STATIC, ADAPTIVE))
    assert arguments(NEVER, plan, fields=fields) == static
    assert static["speculative_num_draft_tokens"] == 4
    assert static["speculative_attention_mode"] == "decode"
    assert adaptive == static | {
        "speculative_adaptive": True,
        "speculative_adaptive_config": "a.json",
    }
    assert adaptive_steps(3, 32) == {"1": {"candidate_steps": [3]}, "32": {"candidate_steps": [0]}}


def test_the_user_has_the_last_word() -> None:
    plan = replace(PLAN, server_arguments={"page_size": 16, "disable_prefill_cuda_graph": None})
    found = arguments(STATIC, plan)
    assert found["page_size"] == 16
    assert "disable_prefill_cuda_graph" not in found
    misspelt = replace(PLAN, server_arguments={"page_sise": 16})
    with pytest.raises(UsageError, match=r"'page_sise' is no server argument.*'page_size'"):
        arguments(STATIC, misspelt)


def test_random_weights(tmp_path: Path) -> None:
    model = random_weights("tiny", tmp_path)
    target, draft = (
        json.loads((Path(str(path)) / "config.json").read_text())
        for path in (model.target, model.draft)
    )
    assert (target["architectures"], target["num_hidden_layers"]) == (["LlamaForCausalLM"], 8)
    assert (draft["architectures"], draft["num_hidden_layers"]) == (["LlamaForCausalLMEagle3"], 1)
    assert str(tmp_path) not in json.dumps(model.identity())
    plan = replace(PLAN, points=(Point(4096, 128, 1),))
    found = arguments(STATIC, plan, model, fields=BETWEEN)
    assert found["load_format"] == found["speculative_draft_load_format"] == "dummy"
    assert found["context_length"] == 5120
    assert "speculative_draft_load_format" not in arguments(STATIC, plan, model, fields=OLD)


def test_a_checkpoint_tells_its_context(tmp_path: Path) -> None:
    assert checkpoint("somebody/some-model", None).max_positions is None
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 77}}')
    assert checkpoint(str(tmp_path), None).max_positions == 77


def test_adaptive_is_skipped_where_it_cannot_be() -> None:
    installed = {"adaptive_refusal": "it has none", "software": {"sglang": "0.5.9"}}
    [(label, reason)] = skipped(PLAN, installed).items()
    assert label == "adaptive"
    assert "SGLang 0.5.9" in reason
    assert skipped(PLAN, installed | {"adaptive_refusal": None}) == {}


def test_the_environment_activates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DYNSPEC_POLICY", "never")
    monkeypatch.setenv("SGLANG_DYNSPEC_CONFIG", "a.toml")
    monkeypatch.setenv("SGLANG_DYNSPEC_CPU_ENGINE", "1")
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    found = environment(speculative=False, simulate_accept_length=None)
    assert {n for n in found if "DYNSPEC" in n} == {"SGLANG_DYNSPEC_CPU_ENGINE"}
    assert "SGLANG_SIMULATE_ACC_LEN" not in found
    found = environment(speculative=True, simulate_accept_length=2.2)
    assert found["SGLANG_SIMULATE_ACC_LEN"] == "2.2"


# --- results -------------------------------------------------------------------------------------
def run(tok_s: float, *outputs: str, round_: int = 0, accept: float | None = None) -> Any:
    return {
        "round": round_,
        "repeat": 0,
        "seconds": 1.0,
        "tok_s": tok_s,
        "accept_length": accept,
        "digests": "".join(digest([ord(c) for c in output]) for output in outputs),
    }


def circumstances(sglang: str = "0.5.17") -> dict[str, Any]:
    software = {"sglang": sglang, "torch": "2.11", "sglang_dynspec": "0.1", "python": "3.12"}
    hardware = {"device": "CPU", "count": 1}
    return {"hardware": hardware, "software": software, "command": "python run.py"}


def begun(plan: Plan = PLAN, sglang: str = "0.5.17") -> dict[str, Any]:
    return begin(plan, **circumstances(sglang))


def add(
    data: dict[str, Any], config: Config, runs: list[Any], steps: Any = None, **more: Any
) -> Any:
    """Add a measurement of two requests at once."""
    entry = {
        "backend": "triton",
        "config": config.label,
        "prompt_tokens": 16,
        "output_tokens": 8,
        "c": 2,
        "runs": runs,
        "steps": steps,
        "kv_tokens": 100,
        "waits_for_kv": False,
        **more,
    }
    data["measurements"].append(entry)
    return entry


def measured(plan: Plan = PLAN, **more: Any) -> dict[str, Any]:
    """Results with one point of three configurations."""
    data = begun(plan)
    add(data, NO_SPEC, [run(r, "x", "y") for r in (100, 120, 110)], **more)
    add(data, STATIC, [run(r, "x", "z", accept=2.0) for r in (150, 160, 140)], **more)
    add(data, NEVER, [run(r, "x", "y", accept=1.0) for r in (90, 99, 120)], PLAIN, **more)
    summarise(data)
    return data


def test_medians_ratios_and_spread() -> None:
    data = measured()
    found = {entry["config"]: entry for entry in data["measurements"]}
    never = found["dynspec:never@skip"]
    assert (never["tok_s"], never["tok_s_min"], never["tok_s_max"]) == (99, 90, 120)
    assert (never["ratio"], never["ratio_to_best"]) == (0.9, 0.66)
    assert (never["plain_share"], never["accept_length"]) == (1.0, 1.0)
    assert found["static"]["ratio"] == round(150 / 110, 4)
    assert found["static"]["plain_share"] is None
    assert data["rows"] == [
        {
            "backend": "triton",
            "prompt_tokens": 16,
            "output_tokens": 8,
            "c": 2,
            "no_spec": 110,
            "static_spec": 150,
            "dynspec:never@skip": 99,
        }
    ]


def test_without_a_baseline_there_is_no_ratio() -> None:
    data = begun()
    entry = add(data, STATIC, [run(5, "x", "y")])
    summarise(data)
    assert (entry["ratio"], entry["ratio_to_best"], entry["ids"]) == (None, None, None)


def test_different_outputs_of_plain_decode_are_wrong() -> None:
    data = measured()
    assert wrong(data) == []  # static differs, and may
    static, never = (data["measurements"][n] for n in (1, 2))
    assert static["ids"] == {"compared": 6, "equal": 3, "different": 3, "varying": 0}
    assert never["ids"] == {"compared": 6, "equal": 6, "different": 0, "varying": 0}

    never["runs"][1] = run(99, "x", "other")
    summarise(data)
    [problem] = wrong(data)
    assert "dynspec:never@skip" in problem
    assert "1 of 6 outputs" in problem

    # Not if some of it was speculative,
    speculative = copy.deepcopy(data)
    speculative["measurements"][2]["steps"] = SPECULATIVE
    summarise(speculative)
    assert speculative["measurements"][2]["plain_share"] == 0.25
    assert wrong(speculative) == []
    # nor where the server without speculation gives different outputs itself.
    data["measurements"][0]["runs"][0] = run(100, "x", "w")
    summarise(data)
    assert never["ids"] == {"compared": 6, "equal": 5, "different": 0, "varying": 1}
    assert wrong(data) == []


def test_under_simulated_acceptance_only_plain_decode_is_compared() -> None:
    data = measured(replace(PLAN, simulate_accept_length=2.2))
    no_spec, static, never = data["measurements"]
    assert no_spec["ids"]["equal"] == never["ids"]["equal"] == 6
    assert static["ids"] == {"note": "not comparable (simulated acceptance)"}
    never["steps"] = SPECULATIVE
    summarise(data)
    assert never["ids"] == static["ids"]


def test_results_are_kept_point_by_point(tmp_path: Path) -> None:
    results = Results(begun(), tmp_path / "deep" / "results.json")
    point = PLAN.points[1]
    for number in range(2):
        assert not results.has(number, NEVER, point)
        results.add_point(
            NEVER,
            point,
            backend="triton",
            runs=[run(10 + number, "x", "y", round_=number)],
            steps=PLAIN if number else SPECULATIVE,
            kv_tokens=47,
        )
        assert results.has(number, NEVER, point)
    assert not results.has(0, NEVER, PLAN.points[0])
    assert not results.has(0, STATIC, point)
    [entry] = load(results.path)["measurements"]
    assert [r["tok_s"] for r in entry["runs"]] == [10, 11]
    assert entry["steps"] == {"by_num_steps": {"0": 10, "3": 3}, "passthrough": {"grammar": 1}}
    assert entry["waits_for_kv"]  # 2 * (16 + 8) > 47
    assert not list(results.path.parent.glob("*.part"))


def test_only_the_same_benchmark_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    data = measured()
    data["failures"] = [{"config": "adaptive", "round": 0, "message": "hung"}]
    write_json(path, data)
    found = resume(path, begun())
    assert found["measurements"] == data["measurements"]
    assert found["failures"] == []  # tried again
    with pytest.raises(UsageError, match=r"repeats was 3 and is 4; .*Give the same arguments"):
        resume(path, begun(replace(PLAN, repeats=4, num_steps=5)))
    with pytest.raises(UsageError, match=r"software was .*0\.5\.17.* and is .*0\.5\.23"):
        resume(path, begun(sglang="0.5.23"))


def test_files_that_hold_no_results(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(UsageError, match="cannot read"):
        load(path)
    path.write_text("{")
    with pytest.raises(UsageError, match="is no JSON"):
        load(path)
    path.write_text("[]")
    with pytest.raises(UsageError, match="holds no results"):
        load(path)


def test_merged_files_add_up(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{n}.json" for n in range(3))
    write_json(first, measured())
    write_json(second, measured(backend="flashinfer"))
    again = begun()
    add(again, NEVER, [run(220, "x", "y")] * 3, PLAIN)
    write_json(third, again)
    data = merge([first, second, third])
    assert [(row["backend"], row["dynspec:never@skip"]) for row in data["rows"]] == [
        ("flashinfer", 99),
        ("triton", 220),
    ]
    # Compared to a baseline of another file.
    assert data["measurements"][-1]["ratio"] == 2.0
    assert len(data["measurements"]) == 6


def test_figures_of_different_things_are_not_merged(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.json" for n in range(2)]
    write_json(paths[0], measured())
    write_json(paths[1], begun(sglang="0.5.23"))
    with pytest.raises(UsageError, match=r"SGLang is '0\.5\.17' in the first and '0\.5\.23'"):
        merge(paths)


def test_what_is_kept_of_outputs_and_steps() -> None:
    outputs: list[dict[str, Any]] = [
        {"output_ids": [1, 2, 3], "meta_info": {"spec_accept_length": 3.0}},
        {"output_ids": [1, 2], "meta_info": {"spec_accept_length": 2.0}},
        {"output_ids": [1], "meta_info": {}},
    ]
    found = summary(outputs)
    assert (found["tokens"], found["accept_length"]) == (6, 2.5)
    assert found["digests"] == digest([1, 2, 3]) + digest([1, 2]) + digest([1])
    assert difference(SPECULATIVE, PLAIN) == {
        "by_num_steps": {"0": -8, "3": 3},
        "passthrough": {"grammar": 1},
    }
    assert difference(PLAIN, PLAIN) == {"by_num_steps": {}, "passthrough": {}}
    assert difference(None, None) is None


# --- report --------------------------------------------------------------------------------------
def test_a_report_of_several_files_needs_no_sglang(tmp_path: Path) -> None:
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    data = measured()
    data["skipped"] = {"adaptive": "SGLang 0.5.9 has none"}
    write_json(first, data)
    write_json(second, measured(backend="flashinfer", waits_for_kv=True))
    code = (
        "import sys\n"
        "for name in ('torch', 'sglang', 'sglang_dynspec', 'tqdm'): sys.modules[name] = None\n"
        "from dynspec_benchmark.command import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "--report", str(first), str(second), "--output", "out"],
        env={**os.environ, "PYTHONPATH": str(BENCHMARK)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    table = (tmp_path / "out" / "table.md").read_text()
    assert table in result.stdout
    for line in (
        "**triton, prompt 16, output 8**",
        "**flashinfer, prompt 16, output 8**",
        "| requests | `no_spec` | `static` | `dynspec:never@skip` |",
        "| 2 | 110 | **150** (1.364) | 99 (0.900; 0.660) |",
        "| 2 | 110 * | **150** (1.364) * | 99 (0.900; 0.660) * |",
        "- `static`: 6 of 12 outputs equal to `no_spec`",
        "- `adaptive` was skipped: SGLang 0.5.9 has none",
    ):
        assert line in table.splitlines()
    assert (tmp_path / "out" / "merged.json").is_file()
    if "No chart" not in result.stdout:
        assert (tmp_path / "out" / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(tmp_path / "results.json", measured())
    monkeypatch.delitem(sys.modules, "dynspec_benchmark.chart", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--report", str(tmp_path / "results.json")]) == OK
    [line] = [line for line in capsys.readouterr().out.splitlines() if "chart" in line.lower()]
    assert "pip install matplotlib" in line
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "table.md"}


# --- processes -----------------------------------------------------------------------------------
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Worker:
    path = tmp_path / "worker.py"
    path.write_text("import os, sys, time\npipe = int(sys.argv[2])\n" + script)
    monkeypatch.setattr(process, "_SCRIPT", path)
    return Worker("a server", {}, environment=os.environ, log=tmp_path / "logs" / "a.log")


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_worker_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import json, subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        "print('capturing', flush=True)\n"
        "os.write(pipe, json.dumps({'event': 'pid', 'pid': child.pid}).encode() + b'\\n')\n"
        "time.sleep(3600)\n"
    )
    pids = []

    def hang() -> None:
        with worker(tmp_path, monkeypatch, script) as running:
            pids.append(running.event(60, "starting")["pid"])
            assert not ended(pids[0])
            running.event(0.1, "running c 8")

    with pytest.raises(BenchmarkError) as failed:
        hang()
    assert "a server: running c 8 took more than 0.1 s" in str(failed.value)
    assert "  | capturing" in str(failed.value)
    assert ended(pids[0])


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "print('no memory')\nsys.exit(3)",
            ["has ended while starting (exit code 3)", "no memory"],
        ),
        ("os.kill(os.getpid(), 9)", ["(SIGKILL)", "(it is empty)"]),
        (
            'os.write(pipe, b\'{"event": "error", "message": "OSError: full"}\\n\')',
            ["starting failed: OSError: full"],
        ),
    ],
)
def test_a_worker_that_fails_says_why(
    script: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(BenchmarkError) as failed,
        worker(tmp_path, monkeypatch, script) as running,
    ):
        running.event(60, "starting")
    for word in words:
        assert word in str(failed.value)


# --- ramp ----------------------------------------------------------------------------------------
def ramped(**changes: Any) -> dict[str, Any]:
    rest = {"switches": 0, "used_kv_tokens": 0, "gpu_used_mib": [1000], "sent": 0}
    found = {
        "dtype": "float32",
        "sent": 50,
        "errors": 0,
        "first_errors": [],
        "before": rest,
        "settled": rest | {"switches": 90, "gpu_used_mib": [2000]},
        "after": rest | {"switches": 201, "gpu_used_mib": [2100]},
        "captures": [],
        "outputs": {"compared": 50, "equal": 50, "different": 0, "varying": 0},
    }
    return found | changes


def after(**changes: Any) -> dict[str, Any]:
    return {"after": ramped()["after"] | changes}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"errors": 2, "first_errors": ["OSError: a"]}, "2 of 50 requests failed: OSError: a"),
        (after(switches=7), "only 7 of 200 switches"),
        (after(used_kv_tokens=12), "12 KV slots are in use at rest, 0 were before"),
        (after(gpu_used_mib=[2513]), "device memory grew by 513 MiB"),
        ({"captures": ["Capture it"]}, "graphs captured while serving, the first: Capture it"),
        (
            {"outputs": {"compared": 50, "equal": 48, "different": 2, "varying": 0}},
            "2 of 50 outputs are not those without speculation",
        ),
    ],
)
def test_whatever_is_wrong_in_a_ramp_is_found(changes: dict[str, Any], problem: str) -> None:
    [found] = problems(ramped(**changes), Goal(200))
    assert problem in found


def test_what_is_no_problem_of_a_ramp() -> None:
    assert problems(ramped(), Goal(200)) == []
    # By the clock, switches are not counted.
    assert problems(ramped(**after(switches=1)), Goal(200, seconds=5)) == []
    different = {"compared": 50, "equal": 48, "different": 2, "varying": 0}
    assert problems(ramped(outputs=different, dtype="bfloat16"), Goal(200)) == []
    unknown = {"settled": {"gpu_used_mib": None}, **after(gpu_used_mib=None)}
    assert problems(ramped(**unknown), Goal(200)) == []


def test_answers_of_a_ramp_are_compared() -> None:
    expected = [{"a"}, {"b", "c"}, {"d"}]
    answers = {"0": {"a": 3, "x": 1}, "1": {"c": 2, "x": 1}}
    assert compare(answers, expected) == {
        "compared": 7,
        "equal": 5,
        "different": 1,
        "varying": 1,
    }


def test_captures_are_told_from_other_lines() -> None:
    log = (
        "Capture target decode CUDA graph begin. avail mem=1 GB\n"
        "Capturing batches (bs=8 avail_mem=1.00 GB):  10%\n"
        "sglang_dynspec: CUDA graphs of plain decode captured: 2.0 s\n"
        "Capture cuda graph bs [1, 2]\n"
        "Decode batch, #running-req: 1, cuda graph: True, gen throughput (token/s): 1\n"
    )
    assert captures(log) == log.splitlines()[:4]


def test_the_random_policy_toggles_and_repeats_itself() -> None:
    view = BatchView(batch_size=1, ladder=(0, 3))

    def decisions(seed: int) -> list[int]:
        policy = RandomToggle(seed=seed, mean_steps=4)
        return [policy.decide(view) for _ in range(400)]

    once = decisions(1)
    assert once == decisions(1)
    assert once != decisions(2)
    changes = sum(a != b for a, b in pairwise(once))
    assert set(once) == {0, 3}
    assert 70 <= changes <= 130
    with pytest.raises(ValueError, match="mean_steps is 0"):
        RandomToggle(mean_steps=0)


# --- wave ----------------------------------------------------------------------------------------
class PretendedEngine:
    """Takes a turn of the event loop for each token."""

    def __init__(self) -> None:
        self.running = 0
        self.seen: list[int] = []
        """Requests at once, at the end of each."""

    async def async_generate(self, *, input_ids: list[int], sampling_params: Any) -> Any:
        self.running += 1
        tokens = sampling_params["max_new_tokens"]
        for _ in range(tokens):
            await asyncio.sleep(0)
        self.seen.append(self.running)
        self.running -= 1
        return {"output_ids": [7] * tokens, "meta_info": {"spec_verify_ct": 2}}


@pytest.mark.parametrize("cycles", [1, 3])
def test_a_square_wave_is_low_and_high(cycles: int) -> None:
    engine = PretendedEngine()
    job = {"prompts": 5, "prompt_lens": [4], "output_len": 16}
    stages = []

    def send(kind: str, what: dict[str, Any]) -> None:
        stages.append((what["clients"], engine.seen[-1]))

    load = Load(
        SimpleNamespace(engine=engine),  # type: ignore[arg-type]
        Requests(job, 512),
        send,
        square=True,
    )
    asyncio.run(load.run([2, 6] * cycles))
    # Each stage has come to run just its clients.
    assert stages == [(2, 2), (6, 6)] * cycles
    assert max(engine.seen) == 6
    assert load.found()["errors"] == 0
    assert load.sent == len(engine.seen) == sum(sum(a.values()) for a in load.answers.values())
    assert load.verifications == 2 * load.sent
    requests = Requests(job, 512)
    assert load.tokens == sum(requests.tokens(n % 5) for n in range(load.sent))


def test_the_accept_length_is_of_speculative_steps() -> None:
    counts = {"tokens": {"0": 50, "1": 3, "3": 12}, "requests": {"0": 50, "1": 2, "3": 4}}
    assert accept_length(counts, 65, 0) == 15 / 6
    assert accept_length({"tokens": {"0": 5}, "requests": {"0": 5}}, 5, 0) is None
    assert accept_length(None, 60, 24) == 2.5
    assert accept_length(None, 60, 0) is None


def waved(config: Config, tok_s: float, **changes: Any) -> dict[str, Any]:
    rest = {"switches": None, "used_kv_tokens": 0, "gpu_used_mib": [1000], "sent": 0}
    entry = {
        "config": config.label,
        "dtype": "float32",
        "tok_s": tok_s,
        "accept_length": None,
        "steps": None,
        "switches": None,
        "sent": 3,
        "errors": 0,
        "first_errors": [],
        "before": rest,
        "settled": rest | {"gpu_used_mib": [2000]},
        "after": rest | {"gpu_used_mib": [2003]},
        "growth_mib": 3,
        "captures": [],
        "answers": {"0": {"a": 2}, "1": {"b": 1}},
        "passes": [],
    }
    return entry | changes


def wave_of(*entries: dict[str, Any], plan: Plan = PLAN) -> dict[str, Any]:
    data = begin_wave(Wave(1, 4, 20), about(plan, **circumstances()), {"adaptive": "it has none"})
    data["measurements"] = list(entries)
    summarise_wave(data)
    return data


def waves(plan: Plan = PLAN, **changes: Any) -> dict[str, Any]:
    """A dynspec server, and then the one without speculation, which varies at prompt 2."""
    plain = waved(NO_SPEC, 100, passes=[["a", "b", "c"], ["a", "b", "d"]])
    dynamic = {"steps": SPECULATIVE, "switches": 39, "accept_length": 2.345}
    return wave_of(waved(NEVER, 125, **dynamic | changes), plain, plan=plan)


def test_a_wave_is_told() -> None:
    data = waves()
    assert data["problems"] == []
    lines = wave_report.markdown(data).splitlines()
    assert lines[2:6] == [
        "| configuration | tok/s | to `no_spec` | to the fastest | accept length | "
        "steps by draft steps | switches | device memory [MiB] | KV tokens | requests | errors | "
        "outputs as `no_spec` |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| `dynspec:never@skip` | 125 | 1.250 | 1.000 | 2.35 | 0: 1, 3: 3 | 39 | 2000 (+3) | 0 | "
        "3 | 0 | 3 of 3 |",
        "| `no_spec` | 100 | 1.000 | 0.800 | - | - | - | 2000 (+3) | 0 | 3 | 0 | 3 of 3 |",
    ]
    assert "20 cycles of 1 and then 4 clients" in lines[7]
    assert "`no_spec` itself answers 1 prompts differently" in lines[8]
    assert lines[-1] == "- `adaptive` was skipped: it has none"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"errors": 1, "first_errors": ["OSError: a"]}, "1 of 3 requests failed: OSError: a"),
        ({"answers": {"0": {"x": 1}}}, "1 of 1 outputs are not those without speculation"),
        ({"captures": ["Capture it"]}, "graphs captured while serving, the first: Capture it"),
        (
            {"after": {"used_kv_tokens": 12, "gpu_used_mib": [2000]}},
            "12 KV slots are in use at rest, 0 were before",
        ),
        (
            {"after": {"used_kv_tokens": 0, "gpu_used_mib": [2513]}},
            "device memory grew by 513 MiB after the warm-up",
        ),
    ],
)
def test_whatever_is_wrong_in_a_wave_is_found(changes: dict[str, Any], problem: str) -> None:
    data = waves(**changes)
    [found] = data["problems"]
    assert found.startswith("dynspec:never@skip: ")
    assert problem in found
    assert f"- FAILED: {found}" in wave_report.markdown(data).splitlines()


def test_what_is_no_problem_of_a_wave() -> None:
    # An answer where the server without speculation varies, or to anything in less than float32.
    assert waves(answers={"2": {"x": 1}})["problems"] == []
    assert waves(answers={"0": {"x": 1}}, dtype="bfloat16")["problems"] == []
    # An answer that it has given in the wave only.
    other = waved(NO_SPEC, 100, answers={"0": {"x": 1}}, passes=[["a"], ["a"]])
    data = wave_of(other, waved(STATIC, 100, answers={"0": {"x": 1, "a": 1}}))
    assert data["measurements"][1]["outputs"]["equal"] == 2


def test_a_wave_without_comparable_outputs() -> None:
    different = {"answers": {"0": {"x": 1}}}
    simulated = waves(replace(PLAN, simulate_accept_length=2.2), **different)
    alone = wave_of(waved(STATIC, 100, **different))
    for data, words in (
        (simulated, "Outputs are not comparable: acceptance is simulated."),
        (alone, "Outputs are not compared: there are none of `no_spec`."),
    ):
        assert data["problems"] == []
        assert data["measurements"][0]["outputs"] is None
        assert words in wave_report.markdown(data)
    [entry] = alone["measurements"]
    assert (entry["ratio"], entry["ratio_to_fastest"]) == (None, 1.0)


def test_a_wave_of_which_every_request_failed() -> None:
    failed = {"errors": 3, "first_errors": ["OSError: a"], "answers": {}}
    data = wave_of(waved(NO_SPEC, 0.0, passes=[["a"], ["a"]], **failed))
    assert data["problems"] == ["no_spec: 3 of 3 requests failed: OSError: a"]
    assert data["measurements"][0]["ratio"] is None


# --- the command ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "name what to serve: --model-path"),
        (["--random", "8b", "--model-path", "x"], "name what to serve"),
        (["--random", "8b"], "--random needs --simulate-accept-length"),
        (["--model-path", "x", "--repeats", "1"], "a median takes at least 3"),
        (["--model-path", "x", "--configs", "fast"], "'fast' is no configuration"),
        (
            ["--model-path", "x", "--max-running-requests", "64"],
            "--max-running-requests 64 is below --concurrency 256",
        ),
        (
            ["--model-path", "x", "--context-length", "200"],
            "need a context of 261, with what speculation reserves, and the model has 200",
        ),
        (["--model-path", "x", "--ramp", "static"], "--ramp static is no dynspec server"),
        (["--report", "missing.json"], "cannot read missing.json"),
        (["--wave", "8,128", "--ramp"], "--wave 8,128 and --ramp do not go together"),
        (["--wave", "8,128", "--resume", "x.json"], "--wave 8,128 and --resume do not go together"),
        (["--wave", "8,128", "--report", "x.json"], "--wave 8,128 and --report do not go together"),
        (["--wave", "8,128", "--stop-after", "9"], "--wave 8,128 and --stop-after do not go"),
        (
            ["--wave", "8,128", "--concurrency", "8"],
            "--wave 8,128 and --concurrency do not go together: LOW and HIGH are the requests at "
            "once; leave one out",
        ),
        (
            ["--model-path", "x", "--wave", "8,128", "--max-running-requests", "64"],
            "--max-running-requests 64 is below HIGH of --wave, 128",
        ),
    ],
)
def test_arguments_that_cannot_be_used(
    words: list[str],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == USAGE
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--concurrency", "1,0"], "'0' is no whole number >= 1"),
        (["--concurrency", "4,4"], "'4,4' names a number twice"),
        (["--server-args", "page_size=1"], "'page_size=1' is no JSON"),
        (["--server-args", "[1]"], "'[1]' is no JSON object"),
        (["--adaptive-cut", "1"], "'1' is no whole number >= 2"),
        (["--wave", "8"], "'8' is no LOW,HIGH; give two numbers of clients"),
        (["--wave", "1,8,128"], "'1,8,128' is no LOW,HIGH"),
        (["--wave", "128,8"], "'128,8' is no LOW,HIGH; give two numbers of clients, the lower "),
        (["--wave", "8,8"], "'8,8' is no LOW,HIGH"),
        (["--wave", "0,8"], "'0' is no whole number >= 1"),
        (["--wave", "8,many"], "'many' is no whole number >= 1"),
        (["--wave", "8,128", "--cycles", "0"], "'0' is no whole number >= 1"),
    ],
)
def test_arguments_that_cannot_be_read(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


# --- the command with servers that only pretend ---------------------------------------------------
PRETENDER = """
import hashlib, json, os, sys

job = json.load(open(sys.argv[1]))
pipe = os.fdopen(int(sys.argv[2]), "w")

def send(event, **what):
    print(json.dumps({"event": event, **what}), file=pipe, flush=True)

dynspec = job.get("dynspec")
ready = {
    "startup_s": 1.0, "log_size": 0, "attention_backend": "pretended", "dtype": "float32",
    "max_running_requests": 8, "memory": {"token_capacity": 100},
}
if job["job"] == "measure":
    print("2030-01-01 sglang_dynspec: CUDA graphs of plain decode captured: 2.0 s.", flush=True)
if job["job"] == "probe":
    send(
        "probed",
        software={"sglang": "0.5.9", "torch": "2", "sglang_dynspec": "0", "python": "3"},
        gpu=None,
        fields=["model_path"],
        adaptive_refusal="it has none",
    )
if job["job"] == "measure":
    send("ready", **ready)
    if dynspec and os.path.exists(os.environ["BROKEN"]):
        os.abort()
    for prompt, output, c in job["points"]:
        send("warm")
        for repeat in range(job["repeats"]):
            send(
                "run", repeat=repeat, seconds=1.0, tokens=c * output,
                accept_length=None, digests="01234567" * c,
            )
        steps = {"by_num_steps": {"0": 5}, "passthrough": {}}
        send("point", steps=steps if dynspec else None)
if job["job"] == "ramp":
    send("ready", **ready)
    if os.path.exists(os.environ["BROKEN"]):
        print("Capture target decode CUDA graph begin.", flush=True)
    for clients in job["stages"]:
        send("stage", clients=clients)
    send("ramp", ramps=2, sent=9, switches=201)
    rest = {"switches": 201, "used_kv_tokens": 0, "gpu_used_mib": None, "sent": 9}
    send(
        "ramped", ended="toggles", ramps=2, sent=9, errors=0, first_errors=[], before=rest,
        settled=rest, after=rest, steps={"by_num_steps": {"0": 5, "3": 6}, "passthrough": {}},
        answers={str(n): {"a": 1} for n in range(9)},
    )
if job["job"] == "wave":
    send("ready", **ready)
    if dynspec and os.path.exists(os.environ["BROKEN"]):
        os.abort()
    for clients in job["cycle"] * (1 + job["cycles"]):
        send("stage", clients=clients)
    rest = {"switches": 7 if dynspec else None, "used_kv_tokens": 0, "gpu_used_mib": None}
    steps = {"by_num_steps": {"0": 5, "3": 6}, "passthrough": {}}
    send(
        "waved", tokens=100, seconds=1.0, accept_length=2.0, steps=steps if dynspec else None,
        before=rest, settled=rest, after=rest, sent=9, errors=0, first_errors=[],
        answers={str(n): {"a": 1} for n in range(9)},
    )
    for _ in job["at_once"]:
        send("answers", digests=["a"] * 64)
if job["job"] == "answer":
    send("ready", **ready)
    for _ in job["at_once"]:
        send("answered", answers=64)
        send("answers", digests=["a"] * 64)
send("done")
"""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts pretenders in the servers' place. While the file exists, those of dynspec fail."""
    script = tmp_path / "pretender.py"
    script.write_text(PRETENDER)
    monkeypatch.setattr(process, "_SCRIPT", script)
    monkeypatch.setenv("BROKEN", str(tmp_path / "broken"))
    return tmp_path / "broken"


def command(tmp_path: Path, *words: str) -> list[str]:
    """A benchmark of two points."""
    return [
        *("--model-path", "x", "--configs", "no_spec", "adaptive", "dynspec:never", "static"),
        *("--prompt-lens", "16", "--output-len", "8", "--concurrency", "1,2"),
        *("--output", str(tmp_path / "out"), *words),
    ]


def counts(data: dict[str, Any]) -> dict[str, list[int]]:
    """Runs of each point, by configuration."""
    found: dict[str, list[int]] = {}
    for entry in data["measurements"]:
        found.setdefault(entry["config"], []).append(len(entry["runs"]))
    return found


def test_what_failed_is_measured_when_resumed(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "results.json"
    broken.touch()
    assert main(command(tmp_path)) == WRONG
    said = capsys.readouterr().out
    assert "SKIPPED: adaptive: SGLang 0.5.9 cannot be measured so: it has none" in said
    assert "FAILED: dynspec:never@catch_up, round 1 has ended while warming up" in said
    # The others went on.
    assert counts(load(path)) == {"no_spec": [6, 6], "static": [6, 6]}
    assert len(load(path)["failures"]) == 2

    broken.unlink()
    assert main(command(tmp_path, "--resume", str(path))) == OK
    data = load(path)
    assert counts(data) == {"no_spec": [6, 6], "static": [6, 6], "dynspec:never@catch_up": [6, 6]}
    assert data["failures"] == []
    assert len(data["servers"]) == 8
    assert "graphs of plain decode captured" in data["servers"][0]["graphs"]
    assert "- `dynspec:never@catch_up`: 18 of 18 outputs equal" in capsys.readouterr().out

    assert main(command(tmp_path, "--resume", str(path), "--rounds", "3")) == USAGE
    assert "rounds was 2 and is 3" in capsys.readouterr().err


def test_a_benchmark_that_runs_out_of_time_goes_on_later(
    broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = count(0, 1)
    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: next(now)))
    path = tmp_path / "out" / "results.json"
    assert main(command(tmp_path, "--rounds", "1", "--stop-after", "3")) == UNFINISHED
    assert counts(load(path)) == {"no_spec": [3, 3], "dynspec:never@catch_up": [3]}
    more = ("--rounds", "1", "--resume", str(path))
    assert main(command(tmp_path, *more, "--stop-after", "2")) == UNFINISHED
    assert counts(load(path)) == {
        "no_spec": [3, 3],
        "dynspec:never@catch_up": [3, 3],
        "static": [3],
    }
    assert main(command(tmp_path, *more)) == OK


def test_a_ramp_is_judged(broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, "--ramp")) == OK
    said = capsys.readouterr().out
    assert "outputs: 9 of 9 equal to those without speculation" in said
    found = json.loads((tmp_path / "out" / "ramp.json").read_text())
    assert found["config"].startswith("dynspec:dynspec_benchmark.policies:RandomToggle(")
    assert (found["sent"], found["problems"], found["captures"]) == (9, [], [])

    broken.touch()
    ramp = ("--ramp", "dynspec:never@skip", "--simulate-accept-length", "2.2")
    assert main(command(tmp_path, *ramp)) == WRONG
    said = capsys.readouterr().out
    assert "outputs: not comparable (simulated acceptance)" in said
    assert "FAILED: 1 lines of the log tell of graphs captured while serving" in said


def wave_command(tmp_path: Path, *words: str) -> list[str]:
    return [
        *("--model-path", "x", "--configs", "no_spec", "adaptive", "dynspec:never", "static"),
        *("--wave", "1,20", "--cycles", "2", "--output", str(tmp_path / "out"), *words),
    ]


def test_a_wave_is_judged(broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out" / "wave.json"
    assert main(wave_command(tmp_path)) == OK
    said = capsys.readouterr().out
    assert "SKIPPED: adaptive: SGLang 0.5.9 cannot be measured so: it has none" in said
    assert "NOTE: static runs at most 8 requests at once, so others of 20 wait" in said
    assert (tmp_path / "out" / "wave.md").read_text() in said
    data = json.loads(path.read_text())
    labels = ["no_spec", "dynspec:never@catch_up", "static"]
    assert [entry["config"] for entry in data["measurements"]] == labels
    assert data["wave"] == {"low": 1, "high": 20, "cycles": 2}
    assert [entry["switches"] for entry in data["measurements"]] == [None, 0, None]
    assert [entry["outputs"]["equal"] for entry in data["measurements"]] == [9, 9, 9]
    assert (data["failures"], data["problems"]) == ([], [])
    assert {(tmp_path / "out" / entry["log"]).is_file() for entry in data["measurements"]} == {True}

    # The others go on where one fails.
    broken.touch()
    assert main(wave_command(tmp_path, "--simulate-accept-length", "2.2")) == WRONG
    assert (
        "FAILED: dynspec:never@catch_up has ended while running the wave" in capsys.readouterr().out
    )
    data = json.loads(path.read_text())
    assert [entry["config"] for entry in data["measurements"]] == ["no_spec", "static"]
    assert [entry["outputs"] for entry in data["measurements"]] == [None, None]
    assert [failure["config"] for failure in data["failures"]] == ["dynspec:never@catch_up"]


# --- all of it -----------------------------------------------------------------------------------
POLICY = "batch_size(off_at=2)"
DYNSPEC = f"dynspec:{POLICY}@warm"


def run_on_cpu_engine(output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark with the tiny models.

    Args:
        output: the folder.
        more: arguments: which servers get which load.
    """
    served = models.make_models()
    own = ("model_path", "max_running_requests", "random_seed", "log_level")
    server = {n: v for n, v in cpu_engine.server_args().items() if n not in own}
    words = [
        *("--model-path", str(served.target), "--draft-model-path", str(served.eagle3)),
        *("--server-args", json.dumps(server)),
        *("--prompt-lens", "12", "--output-len", "20", "--output", str(output), *more),
    ]
    return subprocess.run(
        [sys.executable, str(BENCHMARK / "run.py"), *words],
        env={**os.environ, **cpu_engine.environment(), "SGLANG_DYNSPEC_POLICY": "always"},
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(
    installed_release() == "0.5.9", reason="three server starts; the newest release has them"
)
def test_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the demo extra is not installed")
    words = ("--concurrency", "1,4", "--repeats", "3", "--rounds", "1")
    result = run_on_cpu_engine(tmp_path, "--configs", "no_spec", "static", DYNSPEC, *words)
    assert result.returncode == OK, result.stdout + result.stderr
    data = load(tmp_path / "results.json")
    found = {(entry["config"], entry["c"]): entry for entry in data["measurements"]}
    assert set(found) == {(label, c) for label in ("no_spec", "static", DYNSPEC) for c in (1, 4)}
    for (label, c), entry in found.items():
        assert len(entry["runs"]) == 3
        assert entry["tok_s_min"] <= entry["tok_s"] <= entry["tok_s_max"]
        assert entry["ids"] == {"compared": 3 * c, "equal": 3 * c, "different": 0, "varying": 0}
        assert (entry["accept_length"] is None) == (label == "no_spec")
    assert found["static", 1]["accept_length"] > 1.5
    assert [found[DYNSPEC, c]["plain_share"] for c in (1, 4)] == [0.0, 1.0]
    assert [sorted(row) for row in data["rows"]] == 2 * [
        sorted(
            ["backend", "prompt_tokens", "output_tokens", "c", "no_spec", "static_spec", DYNSPEC]
        )
    ]
    assert data["hardware"] == {"device": "CPU", "count": 1}
    assert set(data["startup_s"]) == {"no_spec", "static", DYNSPEC}
    assert {server["memory"]["token_capacity"] for server in data["servers"]} == {8192}
    assert not data["failures"]
    # One line for each point, and the table.
    lines = [line for line in result.stdout.splitlines() if line.startswith("round 1  ")]
    assert len(lines) == 6
    table = (tmp_path / "table.md").read_text()
    assert "**torch_native, prompt 12, output 20**" in table
    assert f"- `{DYNSPEC}`: 15 of 15 outputs equal to `no_spec`" in table
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    for server in data["servers"]:
        assert (tmp_path / server["log"]).is_file()
    # A policy of the environment has reached no server.
    assert "in force" not in (tmp_path / data["servers"][1]["log"]).read_text()


@pytest.mark.skipif(
    installed_release() == "0.5.9", reason="a server start; the newest release has it"
)
def test_wave(tmp_path: Path) -> None:
    # Outputs are compared where there is a server without speculation: see the fake ones above.
    dynamic = "dynspec:batch_size(off_at=3)@catch_up"
    words = ("--wave", "1,4", "--cycles", "2", "--configs", dynamic)
    result = run_on_cpu_engine(tmp_path, *words)
    assert result.returncode == OK, result.stdout + result.stderr
    data = json.loads((tmp_path / "wave.json").read_text())
    assert (tmp_path / "wave.md").read_text() in result.stdout
    assert (data["failures"], data["problems"]) == ([], [])
    [entry] = data["measurements"]
    assert (entry["config"], entry["dtype"]) == (dynamic, "float32")
    assert entry["sent"] >= 2 * (1 + 4)
    assert entry["after"]["used_kv_tokens"] == 0
    assert entry["tok_s"] > 0
    # Both modes in each cycle, so at least from the first low to the second high.
    assert set(entry["steps"]["by_num_steps"]) == {"0", "3"}
    assert entry["switches"] >= 3
    assert entry["accept_length"] > 1
