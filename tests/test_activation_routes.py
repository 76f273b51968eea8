"""The three routes into a real, spawned scheduler process, alone and together.

Each test starts an interpreter of its own; in most of them SGLang's Engine spawns its scheduler
from there, and the scheduler's status comes back through SGLang's server info.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.interpreters import BOOTSTRAP, make_bare_python, on_path
from support.servers import running_server

import sglang_dynspec
from sglang_dynspec.testing import cpu_engine
from sglang_dynspec.testing.ports import free_port

NEVER_VARIABLE = {"SGLANG_DYNSPEC_POLICY": "never"}
PROMPT = [5, 6, 7, 8]
POLICY = "batch_size(off_at=4, on_at=3)"

HEAD = """
    import json, os, sys
    from sglang_dynspec.testing import cpu_engine
"""

SERVE = """
    def serve():
        import sglang
        import sglang_dynspec
        here = sglang_dynspec.status()
        engine = sglang.Engine(**cpu_engine.server_args("EAGLE3"))
        out = engine.generate(
            input_ids=[5, 6, 7, 8],
            sampling_params=dict(temperature=0, max_new_tokens=8, ignore_eos=True),
        )
        state = engine.get_server_info()["internal_states"][0]
        print("REPORT " + json.dumps(
            {"here": here, "there": state.get("dynspec"), "ids": out["output_ids"]}
        ), flush=True)
        engine.shutdown()
"""

NEVER = 'import sglang_dynspec\nsglang_dynspec.activate(policy="never")\nserve()'


def script(tmp_path: Path, main: str, top: str = "", head: str = HEAD) -> Path:
    """A launch script: `top` runs in spawned processes too, `main` is guarded."""
    path = tmp_path / "launch.py"
    guarded = 'if __name__ == "__main__":\n' + textwrap.indent(textwrap.dedent(main), "    ")
    parts = [textwrap.dedent(part) for part in (head, top, SERVE)]
    path.write_text("\n".join([*parts, guarded]), encoding="utf-8")
    return path


def python(
    *args: str | Path,
    expect: int | None = 0,
    interpreter: str | Path = sys.executable,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter with the CPU engine's environment and nothing of dynspec beyond `env`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_DYNSPEC_")}
    done = subprocess.run(
        [str(interpreter), *map(str, args)],
        env=clean | cpu_engine.environment() | env,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd="/",  # not where "" on sys.path would find the source tree
    )
    if expect is not None:
        assert done.returncode == expect, done.stdout + done.stderr
    return done


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("REPORT "))
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Output of the server that nobody has touched."""
    path = script(tmp_path_factory.mktemp("plain"), "serve()")
    told = report(python(path))
    assert told["here"] == {"state": "inactive", "version": sglang_dynspec.__version__}
    assert told["there"] is None
    ids: list[int] = told["ids"]
    return ids


def test_launch_script_with_a_guarded_main(tmp_path, reference):
    told = report(python(script(tmp_path, NEVER)))
    assert told["here"]["state"] == "armed"
    assert told["here"]["route"] == "activate()"
    assert told["there"]["state"] == "in_force"
    assert told["there"]["policy"] == "never"
    assert told["there"]["by_num_steps"].keys() == {"0"}
    assert told["ids"] == reference


def test_isolated_interpreter(tmp_path, reference):
    path = script(tmp_path, NEVER)
    told = report(python("-I", path))
    assert told["there"]["state"] == "in_force"
    assert told["ids"] == reference


def test_all_three_routes_together_count_each_step_once(tmp_path, reference):
    path = script(tmp_path, NEVER)
    told = report(python(path, SGLANG_DYNSPEC_POLICY="always"))
    # What is given as an argument wins over the environment.
    assert told["there"]["policy"] == "never"
    tokens = told["there"]["by_num_steps"]["0"]
    assert tokens["steps"] == tokens["requests"] == tokens["tokens"]
    # One token comes from the prefill; under overlap a step more may be in flight at the end.
    assert 7 <= tokens["tokens"] <= 8
    assert told["ids"] == reference


def test_a_policy_class_of_the_launch_script(tmp_path, reference):
    policy = """
        from sglang_dynspec import Policy

        class EveryOther(Policy):
            def __init__(self, first=0):
                super().__init__()
                self.first = first

            def decide(self, batch):
                return 0 if batch.step % 2 == self.first else batch.max_steps
    """
    main = "import sglang_dynspec\nsglang_dynspec.activate(policy=EveryOther(first=1))\nserve()"
    path = script(tmp_path, main, top=policy)
    told = report(python(path))
    assert told["there"]["state"] == "in_force"
    assert told["there"]["policy"] == "__main__:EveryOther(first=1)"
    assert told["there"]["by_num_steps"].keys() == {"0", "3"}
    assert told["ids"] == reference


@pytest.mark.skipif(find_spec("sglang.srt.plugins") is None, reason="plugins came with 0.5.11")
def test_plugin_entry_point_alone(tmp_path, reference):
    # -S: no .pth and no sitecustomize, here nor in the spawned processes; the path is handed on.
    paths = [p for p in sys.path if p]
    head = f"""
        import json, os, sys
        sys.path[:] = [*{paths!r}, *sys.path]
        from sglang_dynspec.testing import cpu_engine
        os.environ.update(cpu_engine.environment())
        cpu_engine.install()
    """
    path = script(tmp_path, "serve()", head=head)
    told = report(python("-S", path, SGLANG_DYNSPEC_POLICY="never"))
    assert told["there"]["route"] == "plugin entry point"
    assert told["there"]["state"] == "in_force"
    assert told["there"]["by_num_steps"].keys() == {"0"}
    assert told["ids"] == reference


def test_unmodified_launch_server_with_only_the_environment_set(tmp_path, reference):
    with running_server(
        "EAGLE3", log=tmp_path / "server.log", SGLANG_DYNSPEC_POLICY=POLICY
    ) as server:
        assert server.generate(PROMPT, 8) == reference
        assert server.generate_n(PROMPT, 8, n=2) == [reference] * 2
        # Each message has all tokens up to it, or only what is new, by the release.
        chunks = server.stream(PROMPT, 8)
        assert reference in (chunks[-1], [token for chunk in chunks for token in chunk])
        server.text("/pause_generation", {})
        server.text("/continue_generation", {})
        assert "lushed" in server.text("/flush_cache", {})
        assert server.generate(PROMPT, 8) == reference
        told = server.dynspec()
    assert told["state"] == "in_force"
    assert told["route"] == "interpreter start"
    assert told["policy"] == POLICY
    log = (tmp_path / "server.log").read_text()
    lines = [line for line in log.splitlines() if "sglang_dynspec" in line and "in force" in line]
    assert len(lines) == 1, log
    assert POLICY in lines[0]


def test_a_server_with_a_policy_that_does_not_exist_serves_and_says_why(tmp_path, reference):
    with running_server(
        "EAGLE3", log=tmp_path / "server.log", SGLANG_DYNSPEC_POLICY="batch_sise(off_at=4)"
    ) as server:
        assert server.generate(PROMPT, 8) == reference
        told = server.dynspec()
    assert told["state"] == "refused"
    assert "batch_size" in told["reason"]
    assert "sglang_dynspec is NOT in force" in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize("through", ["variable", "file"])
def test_strict_stops_a_server_that_dynspec_cannot_be_in_force_on(tmp_path, through):
    file = tmp_path / "dynspec.toml"
    file.write_text('policy = "never"\nstrict = true\n')
    done = python(
        "-m",
        "sglang.launch_server",
        *cpu_engine.command_line(None, port=free_port()),
        expect=None,
        **(
            {"SGLANG_DYNSPEC_CONFIG": str(file)}
            if through == "file"
            else {"SGLANG_DYNSPEC_POLICY": "never", "SGLANG_DYNSPEC_STRICT": "1"}
        ),
    )
    assert done.returncode != 0
    assert "the server runs without speculative decoding" in done.stdout + done.stderr


def test_deactivate_before_the_server_starts(tmp_path, reference):
    # What the environment named before activate() must not come back for the scheduler.
    main = """
        import sglang_dynspec
        sglang_dynspec.activate(policy="always")
        sglang_dynspec.deactivate()
        serve()
    """
    told = report(python(script(tmp_path, main), SGLANG_DYNSPEC_POLICY="never"))
    assert told["here"]["state"] == "inactive"
    assert told["there"] is None
    assert told["ids"] == reference


def test_activation_after_sglang_is_imported(tmp_path, reference):
    main = f"import sglang.srt.managers.scheduler\n{NEVER}"
    told = report(python(script(tmp_path, main)))
    assert told["there"]["state"] == "in_force"
    assert told["ids"] == reference


# --- without an installed .pth --------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bare_python(tmp_path_factory.mktemp("bare"))


def test_activate_reaches_spawned_processes_without_a_pth(tmp_path, reference, bare_python):
    # A foreign sitecustomize is first on the path, and goes on running in every process.
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text(
        f"import os\nopen(os.path.join({str(theirs)!r}, str(os.getpid())), 'w').close()\n"
    )
    head = f"{textwrap.dedent(HEAD)}\ncpu_engine.install()"
    path = script(tmp_path, NEVER, head=head)
    told = report(python(path, interpreter=bare_python, PYTHONPATH=on_path(theirs)))
    assert told["there"]["state"] == "in_force"
    assert told["ids"] == reference
    ran_in = [name for name in os.listdir(theirs) if name.isdigit()]
    assert len(ran_in) >= 3  # the script, the scheduler, the detokenizer


def test_bootstrap_folder_on_pythonpath_starts_dynspec(bare_python, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import sys\nsys.theirs = __name__\n")
    again = tmp_path / "sglang_dynspec"
    again.symlink_to(Path(sglang_dynspec.__file__).parent)
    probe = (
        "import sys, json; print(json.dumps(['sglang_dynspec._autoload' in sys.modules, "
        "getattr(sys, 'theirs', None)]))"
    )

    def run(path: str) -> Any:
        done = python("-c", probe, interpreter=bare_python, PYTHONPATH=path, **NEVER_VARIABLE)
        assert "Traceback" not in done.stderr, done.stderr
        return json.loads(done.stdout)

    assert run(on_path()) == [False, None]
    assert run(on_path(BOOTSTRAP)) == [True, None]
    assert run(on_path(BOOTSTRAP, theirs)) == [True, "sitecustomize"]
    # The same folder once more, by another name: they must not run each other for ever.
    assert run(on_path(BOOTSTRAP, again / "bootstrap", theirs)) == [True, "sitecustomize"]
    # Alone: the package is found beside it.
    assert run(os.pathsep.join([str(BOOTSTRAP)])) == [True, None]


def test_activate_says_so_where_spawned_processes_cannot_be_reached(bare_python, tmp_path):
    path = tmp_path / "launch.py"
    path.write_text(
        f"import sys\nsys.path[:0] = {on_path().split(os.pathsep)!r}\n"
        "import sglang_dynspec\nsglang_dynspec.activate(policy='never')\n"
    )
    done = python("-I", path, interpreter=bare_python, expect=1)
    assert "InstallError" in done.stderr
    assert "install sglang-dynspec with pip" in done.stderr


def test_foreign_sitecustomize_runs_beside_ours(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import sys\nsys.theirs = __name__\n")
    probe = (
        "import sys, json; print(json.dumps([getattr(sys, 'theirs', None), "
        "'sglang_dynspec._autoload' in sys.modules, sys.modules['sitecustomize'].__file__]))"
    )
    for order in ([BOOTSTRAP, theirs], [theirs, BOOTSTRAP]):
        path = os.pathsep.join(map(str, order))
        done = python("-c", probe, PYTHONPATH=path, SGLANG_DYNSPEC_POLICY="never")
        ran, ours, file = json.loads(done.stdout)
        assert ran == "sitecustomize"
        # Behind theirs ours does not run, but the installed .pth has.
        assert ours
        assert Path(file).parent == theirs


@pytest.mark.parametrize("set_variable", [False, True])
def test_interpreter_start_loads_nothing_heavy(set_variable):
    probe = (
        "import sys, json; print(json.dumps(sorted(m for m in sys.modules "
        "if m.partition('.')[0] in ('sglang_dynspec', 'sglang', 'torch', 'wrapt'))))"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG", "PYTHON"))}
    if set_variable:
        clean["SGLANG_DYNSPEC_POLICY"] = "never"
    done = subprocess.run(
        [sys.executable, "-c", probe], env=clean, capture_output=True, text=True, check=True
    )
    loaded = json.loads(done.stdout)
    assert loaded == (["sglang_dynspec", "sglang_dynspec._autoload"] if set_variable else [])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import sglang_dynspec; sglang_dynspec.activate()", "no policy is named"),
        (
            "import sglang_dynspec\n"
            "class P(sglang_dynspec.Policy):\n    def decide(self, batch): return 0\n"
            "sglang_dynspec.activate(policy=P())",
            "",
        ),
        (
            "import sglang_dynspec\nsglang_dynspec.activate(policy='never')\n"
            "sglang_dynspec.activate(policy='always')",
            "call deactivate() before",
        ),
        (
            "import sglang_dynspec\nsglang_dynspec.activate(policy='never', draft_state='cold')",
            "draft_state",
        ),
    ],
)
def test_activate_refuses_what_could_not_work(source, says):
    done = python("-c", source, expect=1)
    assert "sglang_dynspec.errors." in done.stderr
    assert says in done.stderr


def test_activate_twice_with_the_same_settings_is_once():
    python(
        "-c",
        "import sglang_dynspec as d, os\n"
        "before = dict(os.environ)\n"
        "d.activate(policy='batch_size(off_at=8, on_at=4)')\n"
        "d.activate(policy='batch_size( off_at=8, on_at = 4 )')\n"
        "assert os.environ['SGLANG_DYNSPEC_POLICY'] == 'batch_size(off_at=8, on_at=4)'\n"
        "d.deactivate(); d.deactivate()\n"
        "assert dict(os.environ) == before and d.status()['state'] == 'inactive'",
    )
