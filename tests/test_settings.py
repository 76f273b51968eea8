"""Arguments, environment and file, and what is said when one of them is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import policies

from sglang_dynspec.errors import ConfigError, DynspecError, PolicyError
from sglang_dynspec.policy import BatchSize, BatchView, Never, Policy, policy_text
from sglang_dynspec.settings import (
    Settings,
    strict_from_environment,
    unknown_variables,
)

WriteFile = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> WriteFile:
    """Write a settings file; returns its path."""

    def write_file(text: str) -> str:
        path = tmp_path / "dynspec.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_file


def resolve(**arguments: object) -> Settings:
    """Settings in an environment without our variables, unless given as ``environ``."""
    return Settings.resolve(**{"environ": {}, **arguments})  # type: ignore[arg-type]


# --- what comes from where --------------------------------------------------------------------


def test_defaults() -> None:
    assert resolve() == Settings()
    assert Settings() == Settings(policy=None, draft_state="catch_up", strict=False)


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().strict = True  # type: ignore[misc]


def test_arguments() -> None:
    expected = Settings(policy="never", draft_state="skip", strict=True)
    assert resolve(policy="never", draft_state="skip", strict=True) == expected
    assert resolve(policy=Never(), draft_state="skip", strict=True) == expected


def test_environment() -> None:
    environ = {
        "SGLANG_DYNSPEC_POLICY": " batch_size( 32 ) ",
        "SGLANG_DYNSPEC_DRAFT_STATE": "Skip",
        "SGLANG_DYNSPEC_CATCH_UP_BYTES": " 4096",
        "SGLANG_DYNSPEC_STEPS": " 3, 0,1 ",
        "SGLANG_DYNSPEC_TRACE": " /trace.jsonl ",
        "SGLANG_DYNSPEC_TRACE_EVERY": " 20",
        "SGLANG_DYNSPEC_STRICT": "Yes",
        "OTHER": "x",
    }
    expected = Settings(
        policy="batch_size(32)",
        draft_state="skip",
        catch_up_bytes=4096,
        steps=(0, 1, 3),
        trace="/trace.jsonl",
        trace_every=20,
        strict=True,
    )
    assert Settings.from_environment(environ) == resolve(environ=environ) == expected


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DYNSPEC_POLICY", "always")
    monkeypatch.delenv("SGLANG_DYNSPEC_CONFIG", raising=False)
    assert Settings.from_environment().policy == Settings.resolve().policy == "always"


def test_file(write: WriteFile) -> None:
    path = write(
        'policy = """never &\n  always"""\ndraft_state = "skip"\nsteps = [1]\nstrict = true\n'
        'trace = "/trace.jsonl"\ntrace_every = 7\n'
    )
    expected = Settings(
        policy="never & always",
        draft_state="skip",
        steps=(1,),
        trace="/trace.jsonl",
        trace_every=7,
        strict=True,
    )
    assert resolve(config=path) == expected
    assert resolve(config=Path(path)) == expected
    assert resolve(environ={"SGLANG_DYNSPEC_CONFIG": path}) == expected


def test_an_empty_file_is_a_file_of_defaults(write: WriteFile) -> None:
    assert resolve(config=write("# nothing\n")) == Settings()


def test_arguments_before_environment_before_file(write: WriteFile) -> None:
    path = write('policy = "fixed(1)"\ndraft_state = "skip"\nstrict = true')
    environ = {"SGLANG_DYNSPEC_POLICY": "fixed(2)", "SGLANG_DYNSPEC_STRICT": "0"}
    assert resolve(config=path, environ=environ) == Settings(policy="fixed(2)", draft_state="skip")
    assert resolve(config=path, environ=environ, policy="fixed(3)", strict=True) == Settings(
        policy="fixed(3)", draft_state="skip", strict=True
    )
    # False and "catch_up" are the defaults, and still count when they are given.
    assert resolve(config=path, strict=False, draft_state="catch_up") == Settings(policy="fixed(1)")


def test_the_argument_config_replaces_the_variable(write: WriteFile) -> None:
    path = write("strict = true")
    environ = {"SGLANG_DYNSPEC_CONFIG": "/no/such/file"}
    assert resolve(config=path, environ=environ) == Settings(strict=True)


@pytest.mark.parametrize("name", ["POLICY", "CONFIG", "STRICT", "DRAFT_STATE"])
@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_variable_is_not_set(name: str, value: str) -> None:
    assert resolve(environ={f"SGLANG_DYNSPEC_{name}": value}) == Settings()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[(text, True) for text in ("true", "1", "YES", "y", " True ")],
        *[(text, False) for text in ("false", "0", "No", "N")],
    ],
)
def test_booleans_are_read_as_sglang_reads_them(text: str, expected: bool) -> None:
    environ = {"SGLANG_DYNSPEC_STRICT": text}
    assert resolve(environ=environ).strict is expected
    assert strict_from_environment(environ) is expected


def test_strict_can_be_read_when_nothing_else_can() -> None:
    broken = {"SGLANG_DYNSPEC_POLICY": "((", "SGLANG_DYNSPEC_CONFIG": "/no/such/file"}
    assert strict_from_environment({**broken, "SGLANG_DYNSPEC_STRICT": "1"})
    assert strict_from_environment({**broken, "SGLANG_DYNSPEC_STRICT": "on"})
    assert not strict_from_environment(broken)
    assert not strict_from_environment({**broken, "SGLANG_DYNSPEC_STRICT": " "})


# --- to the children --------------------------------------------------------------------------

settings_ = st.builds(
    Settings,
    policy=st.none() | policies.map(policy_text) | st.just("a.b:C(x='=\"\\n')"),
    draft_state=st.sampled_from(["catch_up", "warm", "skip"]),
    catch_up_bytes=st.none() | st.integers(1, 1 << 40),
    steps=st.lists(st.integers(0, 16), max_size=5),
    trace=st.none() | st.sampled_from(["/trace.jsonl", "/a trace", "trace"]),
    trace_every=st.integers(1, 1 << 40),
    strict=st.booleans(),
)


@given(settings_)
def test_children_read_the_same_settings(settings: Settings) -> None:
    environ = settings.to_environment()
    assert Settings.from_environment(environ) == settings
    assert Settings.from_environment(environ).to_environment() == environ
    assert all(type(value) is str and "\0" not in value for value in environ.values())


def test_nothing_that_stood_there_before_shows_through() -> None:
    before = {
        "SGLANG_DYNSPEC_POLICY": "always",
        "SGLANG_DYNSPEC_DRAFT_STATE": "skip",
        "SGLANG_DYNSPEC_STEPS": "1",
        "SGLANG_DYNSPEC_TRACE": "/no/such/folder/trace.jsonl",
        "SGLANG_DYNSPEC_TRACE_EVERY": "0",
        "SGLANG_DYNSPEC_STRICT": "1",
        "SGLANG_DYNSPEC_CONFIG": "/no/such/file",
    }
    assert resolve(environ={**before, **Settings().to_environment()}) == Settings()


# --- the policy -------------------------------------------------------------------------------


class Mine(Policy):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def decide(self, batch: BatchView) -> int:
        return self.size


def test_an_instance_becomes_its_text_and_back() -> None:
    settings = resolve(policy=Mine(2) & BatchSize(8))
    assert settings.policy == f"{__name__}:Mine(2) & batch_size(8)"
    assert policy_text(settings.build_policy()) == settings.policy


def test_a_policy_is_checked_but_a_class_of_a_user_is_not_imported() -> None:
    text = "no_such_module:Mine(3) & batch_size(off_at=8)"
    assert resolve(policy=text).policy == text
    with pytest.raises(PolicyError, match="no_such_module"):
        resolve(policy=text).build_policy()


def test_without_a_policy_there_is_none_to_build() -> None:
    with pytest.raises(ConfigError, match="SGLANG_DYNSPEC_POLICY"):
        Settings().build_policy()


def test_a_wrong_argument_is_a_policy_error_and_the_rest_config_errors(write: WriteFile) -> None:
    for make in (lambda: resolve(policy="nevr"), lambda: Settings(policy="nevr")):
        with pytest.raises(PolicyError, match=r"did you mean 'never'"):
            make()
    path = write('policy = "batch_size(0)"')
    for where, make in {
        "SGLANG_DYNSPEC_POLICY": lambda: resolve(environ={"SGLANG_DYNSPEC_POLICY": "nevr("}),
        path: lambda: resolve(config=path),
    }.items():
        with pytest.raises(ConfigError, match=r"\^") as caught:
            make()
        assert where in str(caught.value)
        assert isinstance(caught.value.__cause__, PolicyError)


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"draft_state": "wram"}, ["draft_state", "'wram'", "did you mean 'warm'", "'skip'"]),
        ({"draft_state": 3}, ["draft_state", "3", "'warm'", "'skip'"]),
        ({"catch_up_bytes": 0}, ["catch_up_bytes is 0", "bytes", ">= 1"]),
        ({"catch_up_bytes": 1.5}, ["catch_up_bytes is 1.5", "536870912"]),
        (
            {"environ": {"SGLANG_DYNSPEC_CATCH_UP_BYTES": "512M"}},
            ["SGLANG_DYNSPEC_CATCH_UP_BYTES is '512M'", "bytes", "536870912"],
        ),
        ({"steps": 3}, ["steps is 3", "[0, 1, 3]"]),
        ({"steps": [1, -1]}, ["steps is [1, -1]", ">= 0"]),
        ({"steps": [True]}, ["steps is [True]", "whole numbers"]),
        ({"steps": "0,1"}, ["steps is '0,1'", "a list"]),
        ({"environ": {"SGLANG_DYNSPEC_STEPS": "0;1"}}, ["SGLANG_DYNSPEC_STEPS", "'0;1'", "0,1,3"]),
        ({"environ": {"SGLANG_DYNSPEC_STEPS": "-1"}}, ["SGLANG_DYNSPEC_STEPS is '-1'", "0,1,3"]),
        ({"trace": 3}, ["trace is 3", "path of a file"]),
        ({"trace": "a\0b"}, ["trace is", "path of a file"]),
        ({"trace": "/"}, ["trace is '/'", "path of a file"]),
        ({"trace": "/proc"}, ["trace is '/proc'", "a folder", "/proc/decisions.jsonl"]),
        (
            {"trace": "/no/such/t.jsonl"},
            ["SGLANG_DYNSPEC_TRACE", "'/no/such/t.jsonl'", "no folder '/no/such'", "make it"],
        ),
        (
            {"environ": {"SGLANG_DYNSPEC_TRACE": "/no/such/t.jsonl"}},
            ["SGLANG_DYNSPEC_TRACE", "no folder '/no/such'"],
        ),
        ({"trace_every": 0}, ["trace_every is 0", "decode steps", ">= 1", "100"]),
        ({"trace_every": True}, ["trace_every is True", "whole number"]),
        (
            {"environ": {"SGLANG_DYNSPEC_TRACE_EVERY": "often"}},
            ["SGLANG_DYNSPEC_TRACE_EVERY is 'often'", "whole number"],
        ),
        ({"strict": "yes"}, ["strict", "'yes'", "true or false"]),
        ({"strict": 1}, ["strict", "1", "true or false"]),
        ({"policy": 3}, ["3 is no policy", "instance"]),
        ({"policy": BatchSize}, ["no policy", "BatchSize(...)"]),
        ({"policy": ""}, ["empty"]),
        ({"config": "/no/such/file"}, ["'/no/such/file'", "No such file", "config="]),
        ({"config": "/"}, ["'/'", "Is a directory"]),
        ({"config": "a\0b"}, ["cannot read", "null byte"]),
        ({"config": 3}, ["config is 3", "path"]),
        ({"environ": {"SGLANG_DYNSPEC_CONFIG": "/no"}}, ["'/no'", "SGLANG_DYNSPEC_CONFIG"]),
        (
            {"environ": {"SGLANG_DYNSPEC_STRICT": "on"}},
            ["SGLANG_DYNSPEC_STRICT", "'on'", "true, 1, yes, y", "false, 0, no, n"],
        ),
        (
            {"environ": {"SGLANG_DYNSPEC_DRAFT_STATE": "cold"}},
            ["SGLANG_DYNSPEC_DRAFT_STATE", "'cold'", "'warm'", "'skip'"],
        ),
        # A wrong value is an error also where another one overrides it.
        (
            {"strict": True, "environ": {"SGLANG_DYNSPEC_STRICT": "on"}},
            ["SGLANG_DYNSPEC_STRICT", "'on'"],
        ),
    ],
)
def test_wrong_values(arguments: dict[str, object], words: list[str]) -> None:
    with pytest.raises(DynspecError) as caught:
        resolve(**arguments)
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "polcy = 'never'",
            ["unknown key 'polcy'", "did you mean 'policy'", "draft_state, catch_up_bytes, steps"],
        ),
        ("[dynspec]\npolicy = 'never'", ["unknown key 'dynspec'", "at the top level"]),
        ("policy = 3", ["policy is 3", "as a string"]),
        ("policy = ['never']", ["policy is ['never']", "as a string"]),
        ("policy = ''", ["policy: ", "empty"]),
        ("policy = 'batch_size(off_at=0)'", ["policy: ", "off_at=0", "^"]),
        ("draft_state = 'cold'", ["draft_state is 'cold'", "'warm'", "'skip'"]),
        ("draft_state = 1", ["draft_state is 1", "'warm'"]),
        ("steps = 3", ["steps is 3", "[0, 1, 3]"]),
        ("steps = [1.5]", ["steps is [1.5]", "whole numbers"]),
        ("trace = 1", ["trace is 1", "path of a file"]),
        ("trace_every = 1.5", ["trace_every is 1.5", "whole number"]),
        ("strict = 'yes'", ["strict is 'yes'", "true or false"]),
        ("strict = 1", ["strict is 1", "true or false"]),
        ("\npolicy = never\n", ["not valid TOML", "line 2"]),
        ("policy = 'a'\npolicy = 'b'\n", ["not valid TOML", "line 2"]),
        ("x = " + "[" * 100_000, ["not valid TOML"]),
    ],
)
def test_wrong_files(text: str, words: list[str], write: WriteFile) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        resolve(config=path)
    for word in [path, *words]:
        assert word in str(caught.value)


def test_a_file_that_is_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "dynspec.toml"
    path.write_bytes(b'policy = "\xff"')
    with pytest.raises(ConfigError, match="UTF-8") as caught:
        resolve(config=path)
    assert str(path) in str(caught.value)


def test_the_path_of_a_trace_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("trace.jsonl", Path("trace.jsonl"), "~/trace.jsonl"):
        assert resolve(trace=path).trace == str(tmp_path / "trace.jsonl")


def test_a_server_that_starts_does_not_ask_for_the_folder_of_a_trace() -> None:
    settings = resolve(trace="/no/such/trace.jsonl", trace_folder=False)
    assert settings.trace == "/no/such/trace.jsonl"


# --- unknown variables ------------------------------------------------------------------------


def test_known_variables_are_not_reported() -> None:
    known = {**Settings().to_environment(), "SGLANG_DYNSPEC_CPU_ENGINE": "1", "PATH": "/"}
    assert unknown_variables(known) == []


def test_unknown_variables_are_reported_with_the_closest() -> None:
    said = unknown_variables({"SGLANG_DYNSPEC_POLCY": "never", "SGLANG_DYNSPEC_XYZZY": "1"})
    assert len(said) == 2
    assert "SGLANG_DYNSPEC_POLCY" in said[0]
    assert "did you mean 'SGLANG_DYNSPEC_POLICY'" in said[0]
    assert "SGLANG_DYNSPEC_XYZZY" in said[1]
    assert "SGLANG_DYNSPEC_DRAFT_STATE" in said[1]


@given(st.dictionaries(st.sampled_from(["POLICY", "STRICT", "DRAFT_STATE"]), st.text(max_size=20)))
def test_any_environment_gives_settings_or_our_errors(values: dict[str, str]) -> None:
    environ = {f"SGLANG_DYNSPEC_{name}": value for name, value in values.items()}
    strict_from_environment(environ)
    try:
        settings = Settings.from_environment(environ)
    except ConfigError:
        return
    assert Settings.from_environment(settings.to_environment()) == settings
