"""The test of wheels itself: on a small wheel, and on the SGLang that is installed."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import textwrap
import zipfile
from pathlib import Path

import pytest
from wheels import __main__ as command
from wheels import check, fetch, report, tables
from wheels.source import NotInSourceError, Source

from sglang_dynspec import engine
from sglang_dynspec.engine import contract, support
from sglang_dynspec.engine.contract import OBJECTS, Instance, Live, Name, resolve
from sglang_dynspec.engine.dialect import SUPPORTED, installed_release, select
from sglang_dynspec.errors import UnsupportedError

FILES = {
    "box/__init__.py": "from .shelf import Tray as Dish",
    "box/shelf.py": """
        from dataclasses import dataclass, field
        from typing import ClassVar, Generic, TypeVar

        import torch

        from box.base import Base, Record

        T = TypeVar("T")

        @dataclass
        class Tray(Record, Generic[T]):
            kind: ClassVar[str] = "flat"
            slots: list = field(default_factory=list)
            secret: int = field(default=0, init=False)
            needed: int = field(repr=False)

        class Shelf(Base, torch.nn.Module):
            height: int
            if torch.cuda.is_available():
                def lift(self, weight, *tools, force=1, **more): ...

            def __init__(self, size, /, depth=2):
                self.size, self.inner.depth = size, depth

            @property
            def width(self): ...

            @width.setter
            def width(self, value): ...

        try:
            from box.fast import polish
        except ImportError:
            polish = None
    """,
    "box/base.py": """
        from dataclasses import dataclass
        from box.deep import Deepest as _Deepest

        @dataclass
        class Record:
            label: str

        class Base(_Deepest):
            def paint(self, color, coats):
                for self.coat in range(coats):
                    pass
    """,
    "box/deep.py": """
        class Deepest:
            def dust(self):
                with open("x") as self.cloth:
                    self.other.value: int = 1
    """,
    "box/fast.py": "def polish(wax): ...",
    "box/broken.py": "def (:",
}


def write_wheel(
    folder: Path, files: dict[str, str], name: str = "box-1.0-py3-none-any.whl"
) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as wheel:
        for file, source in files.items():
            wheel.writestr(file, textwrap.dedent(source))
    return path


@pytest.fixture
def box(tmp_path: Path) -> Source:
    return Source(write_wheel(tmp_path, FILES))


@pytest.fixture(scope="module")
def installed() -> Source:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    return Source(Path(spec.origin).parent.parent)


def test_a_name_is_found_through_imports_and_bases(box):
    assert box.find("box:Dish").module == "box.shelf"
    assert box.find("box.shelf:Shelf.dust").module == "box.deep"
    assert isinstance(box.find("box.shelf:polish").node, ast.FunctionDef)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("box.nowhere:X", "no module named box.nowhere"),
        ("box.shelf:Rack", "module box.shelf has no name Rack"),
        ("box.shelf:Shelf.fly", "Shelf has no attribute fly"),
        ("box.broken:X", "box.broken cannot be parsed"),
    ],
)
def test_what_is_not_there_is_said(box, path, says):
    with pytest.raises(NotInSourceError, match=says):
        box.find(path)


@pytest.mark.parametrize(
    ("path", "takes"),
    [
        ("box.shelf:Shelf", "(self, size, depth=Ellipsis)"),
        ("box.shelf:Shelf.lift", "(self, weight, *tools, force=Ellipsis, **more)"),
        ("box.shelf:Tray", "(label, slots=Ellipsis, needed)"),
    ],
)
def test_signatures(box, path, takes):
    assert str(box.signature(box.find(path))) == takes


def test_attributes_are_what_a_class_declares_or_sets_on_self(box):
    shelf = box.find("box.shelf:Shelf")
    assert box.declared(shelf) >= {"height", "lift", "width", "paint", "dust"}
    assert box.assigned(shelf) == {"size", "inner.depth", "coat", "cloth", "other.value"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (Name("box.nowhere:X", "read", "test"), "is not there (no module named box.nowhere)"),
        (Name("box.shelf:Shelf.paint", "wrap", "test"), "is inherited"),
        (
            Name("box.shelf:Shelf.paint", "call", "test", parameters=("coats",)),
            "takes (color, coats), expected (coats, ...)",
        ),
        (
            Name("box.shelf:Shelf.paint", "call", "test", parameters=("color",)),
            "needs coats, which dynspec does not pass",
        ),
        (
            Name("box.shelf:Shelf.lift", "call", "test", ("weight",), ("speed",)),
            "does not take speed",
        ),
        (Name("box.shelf:Shelf", "read", "test", fields=("width", "color")), "has no color"),
    ],
)
def test_a_mismatch_is_one_sentence_that_names_it(box, name, says):
    problems = [p for p in check.name_problems(box, name) if says in p]
    assert len(problems) == 1
    assert problems[0].startswith(name.path)


def test_what_is_wrapped_may_need_more_than_the_table_knows(box):
    assert check.name_problems(box, Name("box.base:Base.paint", "wrap", "test", ("color",))) == []


def test_attributes_of_live_objects_and_of_others(box, monkeypatch):
    monkeypatch.setitem(OBJECTS, "scheduler.shelf", "box.shelf:Shelf")
    table = tables.Table(
        "1.0",
        "1.0",
        (),
        (Live("scheduler.shelf", ("size", "width", "color"), "test"),),
        (
            Instance("box.shelf:Shelf", ("inner.depth", "inner.height"), "test"),
            Instance("box.shelf:Rack", ("x",), "test"),
        ),
    )
    assert check.problems(box, table) == [
        "scheduler.shelf (box.shelf:Shelf) has no color",
        "box.shelf:Shelf has no inner.height",
        "box.shelf:Rack is not there (module box.shelf has no name Rack)",
    ]


def test_a_class_made_of_the_fields_of_a_package(tmp_path):
    source = Source(
        write_wheel(
            tmp_path,
            {
                "sglang/srt/server_args.py": "class ServerArgs: ...\nServerArgs = make(ServerArgs)",
                "sglang/srt/arg_groups/fields/parallel.py": """
                    class Parallel:
                        tp_size: int = 1
                        derived = 2
                """,
            },
        )
    )
    name = Name("sglang.srt.server_args:ServerArgs", "read", "test", fields=("tp_size", "derived"))
    assert check.name_problems(source, name) == [f"{name.path} has no derived"]


def fingerprint(tmp_path: Path, body: str) -> dict[str, str]:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    source = Source(write_wheel(folder, {"m.py": body}))
    return check.fingerprints(
        source, tables.Table("1.0", "1.0", (Name("m:f", "call", "test"),), (), ())
    )


def test_a_fingerprint_is_that_of_the_code(tmp_path):
    first = fingerprint(tmp_path, "def f(a, b=1):\n    return a + b")
    same = 'def f(a: int, b: int = 1) -> int:\n    """Add."""\n    # so\n    return (a + b)'
    assert fingerprint(tmp_path, same) == first
    assert list(first) == ["m:f"]
    for other in ("def f(a, b=1):\n    return a - b", "def f(a, b=2):\n    return a + b"):
        assert fingerprint(tmp_path, other) != first


def test_the_installed_release_is_as_the_table_says(installed):
    assert check.problems(installed, tables.table(installed_release())) == []


def test_the_source_says_what_the_import_says(installed):
    for name in tables.table(installed_release()).names:
        if name.use == "read" and not name.parameters:
            continue
        read = installed.signature(installed.find(name.path)).parameters.values()
        real = inspect.signature(resolve(name.path)).parameters.values()
        needed = [
            [p.name for p in ps if p.name != "self" and contract._is_needed(p)]
            for ps in (read, real)
        ]
        assert [p.name for p in read if p.name != "self"] == [
            p.name for p in real if p.name != "self"
        ]
        assert needed[0] == needed[1], name.path


def test_every_supported_release_has_a_complete_table_and_a_record():
    for key in SUPPORTED:
        table = tables.table(key)
        assert all(entry.why for entry in (*table.names, *table.live, *table.instances))
        assert {entry.path for entry in table.live} <= set(OBJECTS)
        called = {name.path for name in table.names if name.use != "read"}
        assert set(report.recorded()[key]) <= called
        assert report.recorded()[key]


def test_every_import_from_sglang_is_in_the_table():
    known = {name.path for key in SUPPORTED for name in tables.table(key).names}
    for file in Path(engine.__file__).parent.rglob("*.py"):
        if file.name == "server_arguments.py":
            continue  # of the doctor's, without which a server does as well
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "sglang."
            ):
                continue
            for alias in node.names:
                path = f"{node.module}:{alias.name}"
                module = f"{node.module}.{alias.name}:"
                assert any(k.startswith((path, module)) for k in known), (file.name, path)


def test_every_argument_that_is_refused_is_in_the_newest_table():
    fields = {
        field
        for name in tables.table(SUPPORTED[-1]).names
        if name.path == "sglang.srt.server_args:ServerArgs"
        for field in name.fields
    }
    assert fields >= {argument for argument, _, _ in support._ARGUMENTS}


@pytest.mark.parametrize("release", report.LEFT_OUT)
def test_releases_that_are_left_out_are_refused(release):
    with pytest.raises(UnsupportedError, match="is not supported"):
        select(tables.key_of(release))


def test_a_release_is_held_against_its_own_table_or_those_beside_it():
    def keys(release: str) -> list[str]:
        return [table.key for table in tables.candidates(tables.key_of(release))]

    assert keys("0.5.10.post1") == ["0.5.10"]
    assert keys("0.5.8.post1") == ["0.5.9"]
    assert keys("0.5.20.1") == ["0.5.20", "0.5.21"]
    assert keys("0.6.0rc1") == [SUPPORTED[-1]]
    assert sorted(["0.5.10", "0.5.9.post1", "0.5.9"], key=tables.order) == [
        "0.5.9",
        "0.5.9.post1",
        "0.5.10",
    ]


def test_wheels_are_downloaded_once(tmp_path, monkeypatch):
    asked = []

    def pip(*arguments: str) -> str:
        asked.append(arguments)
        write_wheel(tmp_path, {}, "sglang-0.5.24-cp311-cp311-linux_x86_64.whl")
        return ""

    monkeypatch.setenv(fetch.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(fetch, "_pip", pip)
    assert fetch.wheel("0.5.24") == fetch.wheel("0.5.24")
    assert len(asked) == 1
    assert {"--no-deps", "sglang==0.5.24"} <= set(asked[0])


def test_the_list_of_releases_is_what_pip_says(monkeypatch):
    said = "sglang (0.5.10)\nAvailable versions: 0.5.10, 0.5.9.post1, 0.5.9\n  INSTALLED: 0.5.9\n"
    monkeypatch.setattr(fetch, "_pip", lambda *_: said)
    assert fetch.releases() == ["0.5.9", "0.5.9.post1", "0.5.10"]
    monkeypatch.setattr(fetch, "_pip", lambda *_: "")
    with pytest.raises(fetch.FetchError, match="no list of releases"):
        fetch.releases()


def test_a_release_that_does_not_fit_fails_the_command(tmp_path, capsys):
    new = write_wheel(tmp_path, {"sglang/__init__.py": ""}, "sglang-9.9.9-py3-none-any.whl")
    assert command.main([str(new)]) == 1
    said = capsys.readouterr().out
    assert f"9.9.9, held against {SUPPORTED[-1]}:" in said
    assert f"MISMATCH: {contract.FORWARD} is not there" in said
    assert "FAILED: not as the table says: 9.9.9." in said


def test_a_release_that_is_not_to_be_had_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(fetch.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(fetch, "_run", lambda *_: (1, "", "ERROR: No matching distribution found"))
    assert command.main(["9.9.9"]) == 2
    assert "error: pip download" in capsys.readouterr().err


def made(release: str, problems: list[str], changed: list[str]) -> report.Outcome:
    table = tables.candidates(tables.key_of(release))[0]
    return report.Outcome(release, table, problems, {"m:f": release}, changed)


def test_the_tables(capsys):
    outcomes = [
        made("0.5.9", [], []),
        made("0.5.8.post1", ["m:f takes (a | b)"], ["m:f"]),
        made("0.5.23", [], ["m:f"]),
        made("0.5.24", ["m:f is not there"], []),
    ]
    assert [one.failed for one in outcomes] == [False, False, False, True]
    lines = report.markdown(outcomes).splitlines()
    assert lines[2] == "| 0.5.9 | 0.5.9 to 0.5.11 | ok | 0 |  |"
    assert lines[3] == "| 0.5.8.post1 |  | not supported; 0.5.9: m:f takes (a \\| b) | 1 | 1 |"
    text = report.text(outcomes)
    assert "  mismatch: m:f takes (a | b)" in text
    assert "  warning: m:f has changed" in text
    assert "  MISMATCH: m:f is not there" in text


def test_the_register_names_the_releases():
    lines = report.register().splitlines()
    assert len(lines) > 80
    layout = [line for line in lines if "spec_utils:draft_tp_context" in line]
    releases = [line.split(" | ")[3] for line in layout]
    assert releases == ["0.5.9 to 0.5.20", "0.5.21", "0.5.22", "0.5.23"]


def test_recording_keeps_what_is_not_recorded_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RECORD", tmp_path / "functions.json")
    report.record(
        [made("0.5.10", [], []), made("0.5.10.post1", [], []), made("0.5.8.post1", [], [])]
    )
    report.record([made("0.5.9", [], [])])
    recorded = json.loads(report.RECORD.read_text())
    assert {key: entry["release"] for key, entry in recorded.items()} == {
        "0.5.9": "0.5.9",
        "0.5.10": "0.5.10.post1",
    }
