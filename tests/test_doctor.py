"""The command `doctor`, in real interpreters: what it finds in a good setup and in bad ones."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.interpreters import BOOTSTRAP, PACKAGE, make_bare_python, on_path

from sglang_dynspec.doctor import report
from sglang_dynspec.doctor.findings import Finding, worst
from sglang_dynspec.policy import parse_policy
from sglang_dynspec.policy.thresholds import unreached
from sglang_dynspec.testing import cpu_engine

POLICY = "batch_size(off_at=8, on_at=6)"
HAS_PLUGINS = find_spec("sglang.srt.plugins") is not None


class Told:
    """What doctor has said."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        assert done.stdout.startswith("{"), done.stdout + done.stderr
        self.json: dict[str, Any] = json.loads(done.stdout)
        self.code, self.stderr = done.returncode, done.stderr

    def all(self, check: str) -> list[dict[str, Any]]:
        return [f for f in self.json["findings"] if f["check"] == check]

    def one(self, check: str) -> dict[str, Any]:
        [found] = self.all(check)
        return found

    def with_status(self, status: str) -> set[str]:
        return {f["check"] for f in self.json["findings"] if f["status"] == status}


def run(
    command: Sequence[str | Path], cwd: str | Path = "/", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with the CPU engine's environment and nothing of dynspec beyond `env`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    return subprocess.run(
        list(map(str, command)),
        env=clean | cpu_engine.environment() | env,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=cwd,
    )


def doctor(
    *words: str, interpreter: str | Path = sys.executable, **options: str
) -> subprocess.CompletedProcess[str]:
    return run([interpreter, "-m", "sglang_dynspec", "doctor", *words], **options)


def quick(**options: Any) -> Told:
    return Told(doctor("--quick", "--json", **{"SGLANG_DYNSPEC_POLICY": POLICY, **options}))


# --- a good setup ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good() -> Told:
    arguments = cpu_engine.command_line("EAGLE3", max_running_requests=8)
    return Told(doctor("--json", "--", *arguments, SGLANG_DYNSPEC_POLICY=POLICY))


def test_a_good_setup(good):
    assert good.code == 0, good.json
    assert good.json["status"] == "note"  # the CPU engine, and PYTHONPATH if the tests run so
    assert not good.with_status("warning")
    assert good.one("routes.interpreter_start")["details"]["fresh"] is True
    assert good.one("routes.interpreter_start")["details"]["spawned"] is True
    assert good.one("routes.plugin")["details"]["available"] is HAS_PLUGINS
    assert good.one("settings.policy")["details"] == {
        "policy": POLICY,
        "source": "SGLANG_DYNSPEC_POLICY",
        "file": None,
    }
    assert good.one("policy.spawned_process")["status"] == "ok"


def test_sglang_is_imported_where_a_scheduler_would_be(good):
    activation = good.one("sglang.activation")
    assert activation["status"] == "ok"
    assert activation["details"]["state"] == "armed"
    assert activation["details"]["route"] == "interpreter start"
    assert ("dynspec" in activation["details"]["plugins"]) is HAS_PLUGINS
    assert good.one("sglang.contract")["status"] == "ok"
    assert good.one("sglang.changes")["status"] == "ok"
    assert good.one("sglang.wrappers")["status"] == "ok"
    assert good.one("arguments.accepted")["details"]["max_running_requests"] == 8
    assert good.one("arguments.accepted")["details"]["unresolved"] is None
    assert good.one("arguments.supported")["status"] == "ok"
    assert "importing SGLang" in good.stderr


def test_the_shape_of_the_json(good):
    assert list(good.json) == ["format", "version", "status", "exit_code", "findings"]
    assert good.json["format"] == 1
    assert good.json["exit_code"] == good.code
    for finding in good.json["findings"]:
        assert list(finding) == ["check", "status", "says", "fix", "details"]
        assert finding["says"]
        assert finding["status"] in ("ok", "note", "warning", "blocking")
        assert finding["status"] != "ok" or finding["fix"] is None
    groups = list(dict.fromkeys(f["check"].partition(".")[0] for f in good.json["findings"]))
    assert groups == ["versions", "settings", "routes", "policy", "sglang", "arguments"]


# --- trouble with SGLang and its arguments --------------------------------------------------------

OTHERS = """
    import wrapt

    @wrapt.when_imported("sglang.srt.managers.schedule_batch")
    def _(module):
        @wrapt.patch_function_wrapper(module, "ScheduleBatch.prepare_for_decode")
        def traced(wrapped, instance, args, kwargs):
            return wrapped(*args, **kwargs)

    @wrapt.when_imported("sglang.srt.model_executor.model_runner")
    def _(module):
        module.ModelRunner._get_attention_backend = lambda self, other: None

    @wrapt.when_imported("sglang.srt.utils.auth")
    def _(module):
        del module.AuthLevel
"""

PLUGIN = """
    def start():
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        target = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
        HookRegistry.register(target, around, HookType.AROUND)

    def around(original, *args, **kwargs):
        return original(*args, **kwargs)
"""


@pytest.fixture(scope="module")
def troubled(tmp_path_factory) -> Told:
    """Others have wrapped SGLang, one of them as a plugin; the arguments cannot be had."""
    folder = tmp_path_factory.mktemp("others")
    (folder / "sitecustomize.py").write_text(textwrap.dedent(OTHERS))
    (folder / "other_plugin.py").write_text(textwrap.dedent(PLUGIN))
    metadata = folder / "other_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nother = other_plugin:start\n")
    arguments = cpu_engine.command_line(
        "EAGLE3",
        max_running_requests=None,
        pp_size=2,
        model_path=str(folder / "no-model"),
    )
    return Told(
        doctor(
            "--json",
            "--",
            *arguments,
            SGLANG_DYNSPEC_POLICY="batch_size(off_at=64) & token_budget(max_tokens=512)",
            SGLANG_DYNSPEC_STEPS="0,9",
            SGLANG_PLUGINS="other",
            PYTHONPATH=os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        )
    )


def test_another_wrapper_around_a_target(troubled):
    by = {f["details"]["target"].rpartition(".")[2]: f["details"]["by"] for f in wrappers(troubled)}
    expected = {"prepare_for_decode": "sitecustomize"}
    if HAS_PLUGINS:
        expected["process_batch_result"] = "SGLang plugin other"
    assert by == expected


def wrappers(told: Told) -> list[dict[str, Any]]:
    found = told.all("sglang.wrappers")
    assert {f["status"] for f in found} == {"warning"}
    return found


def test_a_changed_sglang(troubled):
    found = troubled.all("sglang.contract")
    assert {one["status"] for one in found} == {"blocking"}
    says = " ".join(one["says"] for one in found)
    assert "ModelRunner._get_attention_backend takes (other)" in says


def test_a_server_that_cannot_be_changed_while_it_serves(troubled):
    found = troubled.all("sglang.changes")
    assert {one["status"] for one in found} == {"warning"}
    assert any("auth:AuthLevel is not there" in one["says"] for one in found)


def test_unsupported_arguments(troubled):
    assert troubled.code == 1
    refused = troubled.all("arguments.supported")
    assert {f["status"] for f in refused} == {"blocking"}
    says = " ".join(f"{f['says']} FIX {f['fix']}" for f in refused)
    assert "(--pp-size is 2) FIX start the server without --pp-size" in says
    assert "steps are 0, 9, but the server runs at most 3 draft steps" in says


def test_a_model_that_is_not_here(troubled):
    accepted = troubled.one("arguments.accepted")
    assert accepted["status"] == "note"
    assert accepted["details"]["unresolved"]
    assert accepted["details"]["max_running_requests"] == 48


def test_thresholds_that_no_batch_reaches(troubled):
    batch_size, token_budget = (f["says"] for f in troubled.all("arguments.thresholds"))
    assert "from 64 requests on, but the server runs at most 48 requests" in batch_size
    assert "verifies 192 tokens" in token_budget


@pytest.mark.skipif(not HAS_PLUGINS, reason="plugins came with 0.5.11")
def test_a_filter_that_leaves_our_plugin_out(troubled):
    plugin = troubled.one("routes.plugin")
    assert (plugin["status"], plugin["details"]["filter"]) == ("warning", "other")
    assert "SGLANG_PLUGINS=other,dynspec" in plugin["fix"]
    assert troubled.one("sglang.activation")["details"]["plugins"] == ["other"]


def test_arguments_that_sglang_does_not_accept():
    arguments = ["--model-path", "dummy", "--no-such-argument", "1"]
    told = Told(doctor("--json", "--", *arguments, SGLANG_DYNSPEC_POLICY=POLICY))
    assert told.code == told.json["exit_code"] == 2
    assert "--no-such-argument" in told.one("arguments.accepted")["says"]
    assert "usage:" not in told.stderr


@pytest.mark.parametrize(
    ("policy", "most", "expected"),
    [
        ("batch_size(off_at=48)", 48, 0),
        ("batch_size(off_at=49)", 48, 1),
        ("token_budget(max_tokens=191)", 48, 0),
        ("token_budget(max_tokens=192)", 48, 1),
        ("hysteresis(min_dwell(batch_size(off_at=9), steps=2), up=2, down=1) & always", 8, 1),
        ("auto", 1, 0),
    ],
)
def test_unreached_thresholds(policy, most, expected):
    found = unreached(parse_policy(policy), most_requests=most, num_steps=3)
    assert len(found) == expected


# --- trouble with settings and the policy ---------------------------------------------------------


def test_no_policy():
    told = quick(SGLANG_DYNSPEC_POLICY="")
    assert told.code == 1
    assert told.with_status("blocking") == {"settings.policy"}
    assert "export SGLANG_DYNSPEC_POLICY=" in told.one("settings.policy")["fix"]
    # The routes are looked at all the same.
    assert told.one("routes.interpreter_start")["status"] == "ok"


def test_a_bad_policy_is_told_as_at_server_start():
    from sglang_dynspec.errors import ConfigError
    from sglang_dynspec.settings import Settings

    environ = {"SGLANG_DYNSPEC_POLICY": "batch_sise(off_at=4)", "SGLANG_DYNSPEC_POLICI": "x"}
    with pytest.raises(ConfigError) as at_start:
        Settings.resolve(environ=environ)
    told = quick(**environ)
    assert told.code == 1
    assert told.one("settings.policy")["says"] == str(at_start.value)
    [unknown] = (f for f in told.all("settings.variables") if f["status"] == "warning")
    assert "SGLANG_DYNSPEC_POLICI" in unknown["says"]


def test_a_policy_from_a_file(tmp_path):
    file = tmp_path / "dynspec.toml"
    file.write_text('policy = "never"\nsteps = [0, 1]\n')
    told = quick(SGLANG_DYNSPEC_POLICY="", SGLANG_DYNSPEC_CONFIG=str(file))
    assert told.code == 0, told.json
    assert told.one("settings.policy")["details"]["source"] == str(file)
    assert told.one("settings.others")["details"]["steps"] == [0, 1]


@pytest.fixture
def own_policies(tmp_path) -> Path:
    (tmp_path / "own_policies.py").write_text(
        textwrap.dedent(
            """
            from sglang_dynspec import Policy

            class Half(Policy):
                def decide(self, batch):
                    return batch.max_steps // 2

            class Broken(Policy):
                def decide(self, batch):
                    return batch.no_such_field
            """
        )
    )
    return tmp_path


def test_a_policy_class_that_is_found(own_policies):
    path = os.pathsep.join([str(own_policies), os.environ.get("PYTHONPATH", "")])
    told = quick(SGLANG_DYNSPEC_POLICY="own_policies:Half", PYTHONPATH=path)
    assert told.one("policy.spawned_process")["status"] == "ok"
    told = quick(SGLANG_DYNSPEC_POLICY="own_policies:Broken", PYTHONPATH=path)
    assert told.code == 1
    assert "no_such_field" in told.one("policy.spawned_process")["says"]


def test_a_policy_class_in_the_working_directory(own_policies):
    told = quick(SGLANG_DYNSPEC_POLICY="own_policies:Half", cwd=own_policies)
    found = told.one("policy.spawned_process")
    assert found["status"] == "warning"
    assert found["details"]["working_directory_needed"] is True


@pytest.mark.parametrize(
    ("policy", "says", "fix"),
    [
        ("no_such_module:Half", "cannot import module 'no_such_module'", "PYTHONPATH"),
        ("__main__:Half", "the main program of this process is", "activate(policy=...)"),
    ],
)
def test_a_policy_class_that_is_not_found(policy, says, fix):
    told = quick(SGLANG_DYNSPEC_POLICY=policy)
    found = told.one("policy.spawned_process")
    assert told.code == 1
    assert found["status"] == "blocking"
    assert says in found["says"]
    assert fix in found["fix"]


def copy_package(folder: Path) -> Path:
    copy = folder / "sglang_dynspec"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


# --- trouble with the routes ----------------------------------------------------------------------


def without_site(**env: str) -> Told:
    # -S leaves out what makes the package be found.
    code = (
        f"import sys; sys.path += {on_path().split(os.pathsep)!r}\n"
        "from sglang_dynspec.cli import main; sys.exit(main(['doctor', '--quick', '--json']))"
    )
    return Told(run([sys.executable, "-S", "-c", code], SGLANG_DYNSPEC_POLICY=POLICY, **env))


def test_an_interpreter_without_site():
    told = without_site(SGLANG_PLUGINS="other")
    assert told.code == 1
    assert told.one("routes.flags")["details"]["flags"] == ["-S"]
    start = told.one("routes.interpreter_start")
    assert start["status"] == "blocking"
    assert start["fix"] == "start Python without -S"
    assert told.one("routes.launch_script")["status"] == "warning"
    if HAS_PLUGINS:  # which is enough by itself
        told = without_site()
        assert told.one("routes.interpreter_start")["status"] == "warning"


def test_an_isolated_interpreter_and_a_second_copy(tmp_path):
    # The copy is what this interpreter runs; those that it starts find the installed one.
    copy = copy_package(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "for name in [name for name in sys.modules if name.startswith('sglang_dynspec')]:\n"
        "    del sys.modules[name]\n"
        "from sglang_dynspec.cli import main; sys.exit(main(['doctor', '--quick', '--json']))"
    )
    told = Told(run([sys.executable, "-I", "-c", code], SGLANG_DYNSPEC_POLICY=POLICY))
    assert told.one("routes.flags")["details"]["flags"] == ["-I"]
    assert told.one("routes.interpreter_start")["status"] == "ok"
    assert told.one("routes.copies")["status"] == "warning"
    assert told.one("routes.copies")["details"]["doctor"] == str(copy)


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bare_python(tmp_path_factory.mktemp("bare"))


@pytest.fixture
def theirs(tmp_path) -> Path:
    (tmp_path / "sitecustomize.py").touch()
    return tmp_path


def test_nothing_starts_it(bare_python):
    told = quick(interpreter=bare_python, PYTHONPATH=on_path(), SGLANG_PLUGINS="other")
    start = told.one("routes.interpreter_start")
    assert told.code == 1
    assert start["status"] == "blocking"
    assert "no sglang_dynspec.pth" in start["says"]
    assert str(BOOTSTRAP) in start["fix"]


def test_our_sitecustomize_wins(bare_python, theirs):
    told = quick(interpreter=bare_python, PYTHONPATH=on_path(BOOTSTRAP, theirs))
    ours = str(BOOTSTRAP / "sitecustomize.py")
    assert told.one("routes.sitecustomize")["details"]["wins"] == ours
    assert told.one("routes.interpreter_start")["details"]["by"] == ours


def test_our_sitecustomize_is_shadowed(bare_python, theirs):
    told = quick(
        interpreter=bare_python, PYTHONPATH=on_path(theirs, BOOTSTRAP), SGLANG_PLUGINS="other"
    )
    found = told.one("routes.sitecustomize")
    assert found["status"] == "warning"
    assert found["details"]["wins"] == str(theirs / "sitecustomize.py")
    assert found["details"]["shadowed"] == [str(BOOTSTRAP / "sitecustomize.py")]
    assert told.one("routes.interpreter_start")["status"] == "blocking"
    assert told.code == 1


def test_shadowing_is_harmless_beside_the_pth(theirs):
    path = os.pathsep.join([str(theirs), str(BOOTSTRAP), os.environ.get("PYTHONPATH", "")])
    told = quick(PYTHONPATH=path)
    assert told.one("routes.sitecustomize")["status"] == "note"
    assert told.one("routes.interpreter_start")["status"] == "ok"


def test_a_sitecustomize_that_fails_is_named(bare_python, theirs):
    (theirs / "sitecustomize.py").write_text("import no_such_module\n")
    told = quick(
        interpreter=bare_python, PYTHONPATH=on_path(theirs, BOOTSTRAP), SGLANG_PLUGINS="other"
    )
    assert "no_such_module" in told.one("routes.interpreter_start")["says"]


# --- without SGLang, and as text ------------------------------------------------------------------


def test_a_python_with_nothing_but_the_package(bare_python, tmp_path):
    copy_package(tmp_path)
    told = Told(
        doctor(
            "--json",
            interpreter=bare_python,
            PYTHONPATH=str(tmp_path),
            SGLANG_DYNSPEC_POLICY=POLICY,
        )
    )
    assert told.code == 1
    assert {"versions.sglang", "versions.torch", "versions.wrapt"} <= told.with_status("blocking")
    assert "pip install 'wrapt" in told.one("versions.wrapt")["fix"]
    assert told.one("versions.package")["details"]["installed"] is None
    assert "a version above is blocking" in told.one("sglang.import")["says"]
    assert told.one("policy.spawned_process")["status"] == "ok"


def test_text_and_exit_code():
    done = doctor("--quick", SGLANG_DYNSPEC_POLICY="nonsense(")
    assert done.returncode == 1
    assert "\033" not in done.stdout
    assert "  blocking  policy " in done.stdout
    assert "fix: " in done.stdout
    assert done.stdout.splitlines()[-1] == "1 thing in the way of dynspec."
    assert doctor("--nonsense").returncode == 2
    assert doctor("--timeout", "-1").returncode == 2


def test_colour_on_a_terminal_unless_told_otherwise(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert report.wants_colour(Terminal())
    assert not report.wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not report.wants_colour(Terminal())


def test_colour_changes_nothing_but_the_colour():
    findings = [
        Finding("routes.one", "ok", "fine " * 40),
        Finding("routes.two", "blocking", "bad", "do something"),
        Finding("sglang.three", "warning", "hm"),
    ]
    plain = report.as_text(findings, colour=False, width=60)
    coloured = report.as_text(findings, colour=True, width=60)
    for code in ("1", "32", "33", "1;31", "0"):
        coloured = coloured.replace(f"\033[{code}m", "")
    assert coloured == plain
    assert max(map(len, plain.splitlines())) <= 60
    assert plain.endswith("1 thing in the way of dynspec, 1 warning.")
    assert worst(findings) == "blocking"
    assert worst([]) == "ok"
