"""Text to policy and back: what is written, what is understood, and what is said to the rest."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import policies

from sglang_dynspec.errors import PolicyError
from sglang_dynspec.policy import (
    AcceptRate,
    Always,
    BatchSize,
    BatchView,
    Fixed,
    Goodput,
    Hysteresis,
    MinDwell,
    Never,
    Policy,
    Smaller,
    TokenBudget,
    _registry,
    parse_policy,
    policy_text,
)
from sglang_dynspec.policy._syntax import (
    MAX_DEPTH,
    MAX_LENGTH,
    And,
    Call,
    Items,
    Literal,
    Node,
    PolicyNode,
    Table,
    parse,
    unparse,
)
from sglang_dynspec.policy.text import check_policy_text


class Mine(Policy):
    """A policy of a user: takes anything."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()
        self.args = args
        self.kwargs = kwargs

    def decide(self, batch: BatchView) -> int:
        return 0

    class Inner(Policy):
        def decide(self, batch: BatchView) -> int:
            return 0


class Unfinished(Policy):
    pass


class Broken(Policy):
    def __init__(self, size: int) -> None:
        super().__init__()
        raise OSError(f"no {size} today")

    def decide(self, batch: BatchView) -> int:
        return 0


class NoPolicy:
    pass


HERE = __name__


def refused(text: str, action: Callable[[str], object] = parse_policy) -> str:
    with pytest.raises(PolicyError) as caught:
        action(text)
    return str(caught.value)


# --- text to policy ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("never", "never"),
        ("never()", "never"),
        (" always ( ) ", "always"),
        ("fixed(2)", "fixed(2)"),
        ("batch_size(off_at=32, on_at=24)", "batch_size(off_at=32, on_at=24)"),
        ("batch_size(32,24,)", "batch_size(32, 24)"),
        ("batch_size(off_at=+1_000)", "batch_size(off_at=1000)"),
        ("batch_size(8, on_at=None)", "batch_size(8, on_at=None)"),
        ("token_budget(max_tokens=256)", "token_budget(max_tokens=256)"),
        ("accept_rate(min=.3)", "accept_rate(min=0.3)"),
        ("accept_rate(3e-1)", "accept_rate(0.3)"),
        (
            "batch_size(off_at=32, on_at=24) & accept_rate(min=0.3)",
            "batch_size(off_at=32, on_at=24) & accept_rate(min=0.3)",
        ),
        ("(always&never)&(fixed(1)&fixed(2))", "always & never & fixed(1) & fixed(2)"),
        ("((never))", "never"),
        ("min_dwell(batch_size(off_at=8), steps=20)", "min_dwell(batch_size(off_at=8), steps=20)"),
        (
            "hysteresis((always & never),\n  up=3,\n\tdown=1)",
            "hysteresis(always & never, up=3, down=1)",
        ),
        ("sglang_dynspec.policy:BatchSize(8)", "batch_size(8)"),
        ("sglang_dynspec.policy.batch_size : BatchSize(8)", "batch_size(8)"),
        (f"{HERE}:Mine.Inner", f"{HERE}:Mine.Inner"),
    ],
)  # fmt: skip
def test_what_is_understood(text: str, canonical: str) -> None:
    assert policy_text(parse_policy(text)) == canonical
    assert check_policy_text(text) in (canonical, unparse(parse(text)))


def test_all_shipped_names_are_their_classes() -> None:
    classes = {
        "accept_rate()": AcceptRate,
        "always": Always,
        "auto": Goodput,
        "batch_size(8)": BatchSize,
        "fixed(1)": Fixed,
        "hysteresis(never, up=1, down=1)": Hysteresis,
        "min_dwell(never, steps=1)": MinDwell,
        "never": Never,
        "token_budget(8)": TokenBudget,
        "never & always": Smaller,
    }
    assert {text: type(parse_policy(text)) for text in classes} == classes
    assert {text.partition("(")[0] for text in classes} - {"never & always"} == set(
        _registry.SHIPPED
    )


def test_values_of_every_kind_arrive() -> None:
    text = (
        f"{HERE}:Mine(1, -2.5, 'a\\'b', \"c\\n\\x41\\u00e9\\U0001f600\", True, None, [], (), (1,), "
        "[1, [2]], {'k': (1, 2), 3: None}, 1e999, name=[never, always & never])"
    )
    mine = parse_policy(text)
    assert isinstance(mine, Mine)
    assert mine.args == (
        1, -2.5, "a'b", "c\nAé😀", True, None, [], (), (1,), [1, [2]],
        {"k": (1, 2), 3: None}, float("inf"),
    )  # fmt: skip
    never, both = mine.kwargs["name"]  # type: ignore[misc]
    assert isinstance(never, Never)
    assert isinstance(both, Smaller)
    assert policy_text(parse_policy(policy_text(mine))) == policy_text(mine)


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words", "marked"),
    [
        ("", ["empty", "batch_size(off_at=32)"], ""),
        (" \n ", ["empty"], ""),
        ("never never", ["found 'never'", "'&' or the end of the text"], "never"),
        ("never)", ["found ')'", "end of the text"], ")"),
        ("never(", ["end of the text", "policy or a value"], ""),
        ("never(1", ["end of the text", "',' or ')'"], ""),
        ("never &", ["end of the text", "a policy"], ""),
        ("& never", ["found '&'", "a policy"], "&"),
        ("never & 3", ["found 3", "expected a policy"], "3"),
        ("never & (1, 2)", ["found (1, 2)", "expected a policy"], "(1, 2)"),
        ("3", ["found '3'", "expected a policy"], "3"),
        ("True", ["found True", "expected a policy"], "True"),
        ("never | always", ["'|'", "joined with '&'"], "|"),
        ("never and always", ["found 'and'", "'&'"], "and"),
        ("never; always", ["';'"], ";"),
        ("fixed(1 2)", ["found '2'", "',' or ')'"], "2"),
        ("fixed(num_steps=1, 2)", ["found '2'", "named argument"], "2"),
        ("fixed(num_steps=1, num_steps=2)", ["num_steps is given twice"], "num_steps"),
        ("fixed(a.b=1)", ["found 'a.b'", "name of a parameter"], "a.b"),
        ("fixed(1__0)", ["found '1__0'", "no number"], "1__0"),
        ("fixed(-x)", ["found 'x'", "expected a number"], "x"),
        ("fixed('abc)", ["no closing '"], "'abc)"),
        ("fixed('a\\qb')", ["unknown escape", "'\\\\q'"], "'a\\qb'"),
        ("fixed('\\ud8')", ["unknown escape"], "'\\ud8'"),
        ("fixed('\\Uffffffff')", ["unknown escape"], "'\\Uffffffff'"),
        ("fixed({x: 1})", ["found 'x'", "a number, a string"], "x"),
        ("fixed({1 2})", ["found '2'", "':'"], "2"),
        ("fixed([1, 2)", ["found ')'", "',' or ']'"], ")"),
        ("a.b.C(1)", ["'a.b.C'", "colon", "a.b:C"], "a.b.C"),
        ("a.b:", ["end of the text", "name of a class"], ""),
        ("batch_sise(off_at=3)", ["'batch_sise'", "did you mean 'batch_size'", "token_budget",
                                  "package.module:Class"], "batch_sise"),
        ("never & batchsize(3)", ["did you mean 'batch_size'"], "batchsize"),
        ("zzz", ["unknown policy 'zzz'", "accept_rate, always, auto, batch_size"], "zzz"),
        ("batch_size(of_at=8)", ["batch_size", "'of_at'", "of_at=8", "did you mean 'off_at'",
                                 "batch_size(off_at, on_at=None)"], "of_at=8"),
        ("batch_size()", ["batch_size", "missing", "'off_at'",
                          "batch_size(off_at, on_at=None)"], "batch_size"),
        ("batch_size(1, 2, 3)", ["too many", "batch_size(off_at, on_at=None)"], "batch_size"),
        ("batch_size(8, off_at=8)", ["multiple values", "'off_at'"], "batch_size"),
        ("never(1)", ["too many", "never takes no arguments"], "never"),
        ("never(x=1)", ["'x'", "x=1", "never takes no arguments"], "x=1"),
        ("min_dwell(never, 3)", ["min_dwell(policy, *, steps)"], "min_dwell"),
        ("batch_size(off_at=2.5)", ["off_at=2.5", "whole number >= 1"], "batch_size"),
        ("min_dwell(batch_size(0), steps=2)", ["off_at=0"], "batch_size"),
        ("min_dwell(3, steps=2)", ["policy must be a policy, not 3"], "min_dwell"),
        ("hysteresis('never', up=1, down=1)", ["must be a policy, not 'never'"], "hysteresis"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("action", [parse_policy, check_policy_text])
def test_what_is_said_of_a_mistake(
    text: str, words: list[str], marked: str, action: Callable[[str], object]
) -> None:
    said = refused(text, action)
    for word in words:
        assert word in said
    if marked:
        *_, line, marks = said.splitlines()
        assert line[marks.index("^") : marks.rindex("^") + 1] == marked


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no_such_module:X", ["no_such_module", "ModuleNotFoundError", "PYTHONPATH"]),
        (f"{HERE}:Mime", [HERE, "no 'Mime'", "did you mean 'Mine'"]),
        (f"{HERE}:Mine.Outer", ["no 'Mine.Outer'"]),
        (f"{HERE}:NoPolicy", ["NoPolicy is a class", "no policy", "subclass"]),
        (f"{HERE}:HERE", ["HERE is of type str", "no policy"]),
        (f"{HERE}:Unfinished", ["does not implement decide", "decide(self, batch)"]),
        (f"{HERE}:Broken(3)", ["Broken could not be made", "OSError", "no 3 today"]),
        (f"{HERE}:Broken(siez=3)", ["'siez'", "siez=3", "did you mean 'size'", "Broken(size)"]),
        ("__main__:NoSuchClass", ["main program", "NoSuchClass", "move the class"]),
    ],
)
def test_what_is_said_of_a_class(text: str, words: list[str]) -> None:
    said = refused(text)
    for word in [*words, "^^^"]:
        assert word in said
    # A check does not import, and so cannot know.
    assert check_policy_text(text) == text


@pytest.mark.parametrize("source", ["1/0", "import sys; sys.exit(3)", "syntax error"])
def test_a_module_that_cannot_be_imported(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dynspec_broken.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = refused("dynspec_broken:X")
    assert "cannot import module 'dynspec_broken'" in said
    assert any(kind in said for kind in ("ZeroDivisionError", "SystemExit", "SyntaxError"))


def test_checking_looks_at_shipped_policies_around_foreign_ones() -> None:
    assert "steps=0" in refused("min_dwell(no.such:Class(1), steps=0)", check_policy_text)
    text = "min_dwell(no.such:Class(any=1), steps=2) & no.such:Other"
    assert check_policy_text(text) == text


def test_a_long_line_is_shown_in_part() -> None:
    said = refused("fixed(" + "1, " * 500 + "2 3)")
    *_, line, marks = said.splitlines()
    assert len(line) < 120
    assert line[marks.index("^")] == "3"


def test_of_several_lines_the_one_in_question_is_shown() -> None:
    said = refused("never &\n  batch_size(\n    of_at=3)\n")
    assert said.splitlines()[-2:] == ["        of_at=3)", "        ^^^^^^^"]


def test_nesting_has_an_end() -> None:
    for opening in ("(", "min_dwell(", "fixed([", "fixed((", "fixed({1:"):
        assert f"deeper than {MAX_DEPTH}" in refused(opening * 2500)


def test_length_has_an_end() -> None:
    said = refused(f"{HERE}:Mine('{'x' * MAX_LENGTH}')")
    assert str(MAX_LENGTH) in said
    assert "file" in said
    assert "file" in refused("", lambda _: policy_text(Mine("x" * MAX_LENGTH)))


# --- entry points -----------------------------------------------------------------------------


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Install a distribution with entry points for policies."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, lines: str) -> None:
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{_registry.ENTRY_POINT_GROUP}]\n{lines}\n")
        importlib.invalidate_caches()

    return install


def test_an_entry_point_is_a_policy(distribution: Callable[[str, str], None]) -> None:
    distribution("other", f"mine = {HERE}:Mine")
    mine = parse_policy("mine(3) & never").parts[0]  # type: ignore[attr-defined]
    assert isinstance(mine, Mine)
    assert mine.args == (3,)
    # It travels by its class, which does not depend on what is installed.
    assert policy_text(mine) == f"{HERE}:Mine(3)"
    assert "mine" in refused("mien")


def test_a_check_does_not_import_an_entry_point(distribution: Callable[[str, str], None]) -> None:
    distribution("other", "absent = no_such_module:X")
    assert check_policy_text("absent") == "absent"
    said = refused("absent")
    assert "no_such_module" in said
    assert "entry point of distribution 'other'" in said


def test_two_distributions_with_one_name(distribution: Callable[[str, str], None]) -> None:
    distribution("one", f"mine = {HERE}:Mine")
    distribution("two", "mine = elsewhere:Mine")
    said = refused("mine")
    for word in ("'one'", "'two'", "uninstall one", f"{HERE}:Mine", "elsewhere:Mine"):
        assert word in said


def test_a_shipped_name_cannot_be_taken_over(
    distribution: Callable[[str, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    distribution("evil", f"batch_size = {HERE}:Mine\nother = {HERE}:Mine")
    assert type(parse_policy("batch_size(8)")) is BatchSize
    with caplog.at_level(logging.ERROR):
        assert type(parse_policy("other")) is Mine
    assert "'batch_size' of distribution 'evil' is ignored" in caplog.text


def test_entry_points_are_not_read_for_shipped_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(**_: object) -> object:
        raise AssertionError("read")

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    parse_policy("min_dwell(batch_size(8) & accept_rate(), steps=3)")
    with pytest.raises(PolicyError, match="read"):
        parse_policy("something_else")


# --- policy to text ---------------------------------------------------------------------------


def test_the_text_is_the_call_that_made_it() -> None:
    assert policy_text(BatchSize(32, on_at=24)) == "batch_size(32, on_at=24)"
    assert policy_text(BatchSize(8) & Never() & Always()) == "batch_size(8) & never & always"
    assert policy_text(Smaller(Never() & Never(), Always())) == "never & never & always"
    assert (
        policy_text(MinDwell(Hysteresis(Never() & Always(), up=2, down=1), steps=3))
        == "min_dwell(hysteresis(never & always, up=2, down=1), steps=3)"
    )
    assert policy_text(Mine([Never(), (1,)], {"a": {1: None}}, s="é\n'")) == (
        f"{HERE}:Mine([never, (1,)], {{'a': {{1: None}}}}, s=\"é\\n'\")"
    )
    assert policy_text(Mine(-float("inf"), -0.0)) == f"{HERE}:Mine(-1e999, -0.0)"


class Louder(BatchSize):
    """A user's subclass of a shipped policy is a policy of its own."""


class SmallerOfTwo(Smaller):
    def __init__(self, size: int) -> None:
        super().__init__(BatchSize(size), Always())


def test_a_subclass_of_a_shipped_policy_is_not_that_policy() -> None:
    assert policy_text(Louder(8)) == f"{HERE}:Louder(8)"
    assert policy_text(SmallerOfTwo(8)) == f"{HERE}:SmallerOfTwo(8)"
    assert policy_text(SmallerOfTwo(8) & Never()) == f"{HERE}:SmallerOfTwo(8) & never"


class Rootless(Policy):
    def __new__(cls, size: int) -> Rootless:
        return object.__new__(cls)

    def __init__(self, size: int) -> None:
        super().__init__()

    def decide(self, batch: BatchView) -> int:
        return 0


def recursive_list() -> list[object]:
    itself: list[object] = []
    itself.append(itself)
    return itself


class Number(int):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Mine(lambda batch: 0), ["Mine", "argument 1", "<lambda>", "function", "string"]),
        (lambda: Mine(f=len), ["argument f", "len"]),
        (lambda: Mine(1, object()), ["argument 2", "object", "numbers, strings"]),
        (lambda: Mine(x={1, 2}), ["argument x", "{1, 2}", "(set)"]),
        (lambda: Mine(x=b"x"), ["b'x'", "(bytes)"]),
        (lambda: Mine(x=1j), ["1j", "(complex)"]),
        (lambda: Mine(x=[1, {2: object()}]), ["argument x", "object"]),
        (lambda: Mine(x={(1, 2): 3}), ["key of the dict in argument x", "(1, 2)"]),
        (lambda: Mine(x=float("nan")), ["argument x", "nan"]),
        (lambda: Mine(x=Number(3)), ["(Number)", "int(...)"]),
        (lambda: Mine(x=10**5000), ["argument x"]),
        (lambda: Mine(recursive_list()), ["argument 1", "deeper than"]),
        (lambda: Mine(**{"a b": 1}), ["'a b'", "name of an argument"]),
        (lambda: Mine(MinDwell(Mine(object()), steps=1)), ["Mine", "object"]),
        (lambda: Rootless(3), ["Rootless", "Policy.__new__(cls, *args, **kwargs)"]),
        (lambda: 3, ["3 is no policy", "instance"]),
        (lambda: BatchSize, ["no policy", "BatchSize(...)"]),
    ],
)
def test_what_has_no_text(make: Callable[[], Policy], words: list[str]) -> None:
    policy = make()
    with pytest.raises(PolicyError) as caught:
        policy_text(policy)
    for word in words:
        assert word in str(caught.value)


def test_a_local_class_cannot_travel() -> None:
    class Local(Policy):
        def decide(self, batch: BatchView) -> int:
            return 0

    said = refused("", lambda _: policy_text(MinDwell(Local(), steps=1)))
    for word in ("Local", "inside a function", "move the class to the top level"):
        assert word in said


def test_a_class_that_is_not_where_it_says_cannot_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Mine()
    monkeypatch.setattr(sys.modules[HERE], "Mine", Unfinished)
    assert "no such class" in refused("", lambda _: policy_text(mine))


def test_a_module_made_on_the_fly_cannot_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("dynspec_made_up")
    code = "class Mine(Policy):\n    def decide(self, batch): return 0"
    exec(code, vars(module) | {"Policy": Policy}, vars(module))
    monkeypatch.setitem(sys.modules, "dynspec_made_up", module)
    said = refused("", lambda _: policy_text(module.Mine()))
    assert "'dynspec_made_up' cannot be imported" in said


# --- properties -------------------------------------------------------------------------------

names = st.sampled_from(["a", "off_at", "_x1", "Mine", "never", "größe", "e9", "nan"])
dotted = st.lists(names, min_size=1, max_size=3).map(".".join)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=12)
).map(Literal)
class_names = names | st.tuples(dotted, dotted).map(":".join)


def calls(arguments: st.SearchStrategy[Node]) -> st.SearchStrategy[Call]:
    return st.builds(
        lambda name, args, kwargs: Call(name, tuple(args), tuple(kwargs.items())),
        class_names,
        st.lists(arguments, max_size=3),
        st.dictionaries(names, arguments, max_size=3),
    )


def ands(parts: st.SearchStrategy[Call]) -> st.SearchStrategy[And]:
    return st.lists(parts, min_size=2, max_size=3).map(lambda some: And(tuple(some)))


def larger(nodes: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    some = st.lists(nodes, max_size=3).map(tuple)
    return st.one_of(
        st.builds(Items, st.sampled_from([list, tuple]), some),
        st.lists(st.tuples(scalars, nodes), max_size=3).map(lambda items: Table(tuple(items))),
        calls(nodes),
        ands(calls(nodes)),
    )


nodes: st.SearchStrategy[Node] = st.recursive(scalars | class_names.map(Call), larger, max_leaves=8)
trees: st.SearchStrategy[PolicyNode] = calls(nodes) | ands(calls(nodes))


def exact(node: Node) -> object:
    """A tree with the types of its numbers, since 1 == 1.0 == True."""
    return repr(node)


@given(trees)
def test_a_tree_survives_being_written(tree: PolicyNode) -> None:
    text = unparse(tree)
    assert exact(parse(text)) == exact(tree)
    assert unparse(parse(text)) == text


@given(trees, st.data())
def test_spaces_do_not_matter(tree: PolicyNode, data: st.DataObject) -> None:
    text = unparse(tree)
    if "'" in text or '"' in text:
        return
    space = data.draw(st.sampled_from(["  ", "\n", "\t", " \n "]))
    assert exact(parse(space + text.replace(" ", space) + space)) == exact(tree)


@given(policies)
def test_a_policy_survives_being_written(policy: Policy) -> None:
    text = policy_text(policy)
    again = parse_policy(text)
    assert type(again) is type(policy)
    assert policy_text(again) == text == check_policy_text(text)


FRAGMENTS = [
    "never", "batch_size", "accept_rate", "off_at", "min", "(", ")", "[", "]", "{", "}", ",", "=",
    ":", "&", "-", "+", ".", "'", '"', "\\", "1", "0.5", "1e999", "True", "None", " ", "\n", "é",
    "\0", "x.y:Z",
]  # fmt: skip


@given(st.text(max_size=40) | st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join))
@example("batch_size(off_at=1e999)")
@example("fixed(" + "9" * 5000 + ")")
@example("accept_rate(min='\\U00110000')")
@example("\u0661\u0662")
def test_any_text_is_a_policy_or_a_policy_error(text: str) -> None:
    # Nothing but a PolicyError may come out.
    with contextlib.suppress(PolicyError):
        canonical = check_policy_text(text)
        assert check_policy_text(canonical) == canonical


@given(trees, st.data())
def test_a_damaged_text_is_a_policy_or_a_policy_error(
    tree: PolicyNode, data: st.DataObject
) -> None:
    text = unparse(tree)
    at = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 3))
    damaged = text[:at] + data.draw(st.sampled_from(["", *FRAGMENTS])) + text[at + length :]
    with contextlib.suppress(PolicyError):
        again = unparse(parse(damaged))
        assert unparse(parse(again)) == again
