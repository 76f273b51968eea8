"""The contract table against the SGLang that is installed."""

from __future__ import annotations

import inspect
import sys

import pytest

from sglang_dynspec.engine import contract, install
from sglang_dynspec.engine.contract import COMMON, Name, probe, resolve
from sglang_dynspec.engine.dialect import SUPPORTED, installed_release, select
from sglang_dynspec.errors import UnsupportedError


def test_the_installed_release_is_as_the_table_says():
    dialect = select(installed_release())
    assert probe((*COMMON, *dialect.contract)) == []


def test_every_entry_says_why_and_every_wrapped_name_is_an_entry():
    dialect = select(installed_release())
    names = (*COMMON, *dialect.contract)
    assert all(name.why for name in names)
    wrapped = {name.path for name in names if name.use == "wrap"}
    relay = install._RELAY_WRAPPERS if dialect.has_relay else {}
    first = (contract.SCHEDULER_INIT, contract.INTERNAL_STATE)
    moved = (dialect.broadcast, dialect.exchange, dialect.log_stats)
    assert wrapped == {*first, *install._WRAPPERS, *relay, *moved}


def test_what_is_wrapped_is_of_a_class():
    # A function of a module that was imported by name elsewhere would stay as it was there
    # (sglang #21388); a class has its attribute in one place.
    for path in (contract.SCHEDULER_INIT, *install._WRAPPERS, *install._RELAY_WRAPPERS):
        assert inspect.isclass(resolve(path.rpartition(".")[0])), path
    assert inspect.isclass(resolve(select(installed_release()).log_stats.rpartition(".")[0]))
    # One is a function of a module: it is wrapped in the module that calls it.
    module = sys.modules[select(installed_release()).broadcast.partition(":")[0]]
    assert "broadcast_pyobj(" in inspect.getsource(module)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (Name("sglang.srt.nowhere:X", "read", "test"), "sglang.srt.nowhere:X is not there"),
        (Name("sglang.srt.managers.scheduler:Scheduler.fly", "call", "test"), "is not there"),
        (
            Name(contract.PROCESS_RESULT, "wrap", "test", parameters=("result", "batch")),
            "takes (batch, result), expected (result, batch, ...)",
        ),
        (
            Name(
                "sglang.srt.managers.utils:GenerationBatchResult",
                "read",
                "test",
                fields=("accept_lens", "accept_joy"),
            ),
            "has no accept_joy",
        ),
    ],
)
def test_a_mismatch_is_one_sentence_that_names_it(name, says):
    problems = probe([name])
    assert len(problems) == 1
    assert says in problems[0]


def test_wrapping_is_all_or_nothing(monkeypatch):
    first = contract.PREPARE_FOR_DECODE
    owner = resolve(first.rpartition(".")[0])
    before = vars(owner)["prepare_for_decode"]
    monkeypatch.setattr(
        install,
        "_WRAPPERS",
        {first: install._prepare_for_decode, "sglang.srt.nowhere:X.y": install._forward},
    )
    state = install._State(dialect=select(installed_release()))
    monkeypatch.setattr(install, "_state", state)
    with pytest.raises(ImportError):
        install._wrap_all()
    assert vars(owner)["prepare_for_decode"] is before
    assert not install._state.wrapped


def test_an_unknown_release_is_refused_with_the_ones_that_are_known():
    with pytest.raises(UnsupportedError, match=r"SGLang 0\.4\.1 is not supported") as error:
        select("0.4.1")
    assert all(release in str(error.value) for release in SUPPORTED)
