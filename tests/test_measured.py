"""Files of measured throughput: tables, and the results of sglang.bench_serving."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dynspec.errors import ConfigError
from sglang_dynspec.measured import Point, Table, parse_table, read_table, shipped_tables
from sglang_dynspec.measured.bench_serving import looks_like_runs, parse_runs, table_of
from sglang_dynspec.measured.table import DEFAULT_NUM_STEPS

# --- tables -------------------------------------------------------------------------------------


def table(*rows: object, **fields: object) -> str:
    return json.dumps({"rows": list(rows), **fields})


@pytest.mark.parametrize("name", shipped_tables())
def test_shipped_tables_can_be_read(name: str) -> None:
    found = read_table(name)
    assert found.title
    for curve in found.curves:
        assert [p.c for p in curve.points] == sorted({p.c for p in curve.points})
        assert any(p.ratio for p in curve.points)


def test_rows_become_curves_by_backend_context_and_output_length() -> None:
    rows = [
        {"c": 8, "no_spec": 10, "static_spec": 20, "backend": "triton", "prompt_tokens": 128},
        {"c": 1, "no_spec": 2, "static_spec": 3, "backend": "triton", "prompt_tokens": 128},
        {"c": 1, "no_spec": 4, "backend": "triton", "prompt_tokens": 128, "output_tokens": 16},
        {"c": 1, "no_spec": 5, "static_spec": None, "ctx": 4096},
    ]
    found = parse_table(table(*rows), "t.json").curves
    assert [curve.label for curve in found] == [
        "context 4096",
        "triton, context 128",
        "triton, context 128, output 16",
    ]
    assert found[1].points == (Point(1, 2, 3), Point(8, 10, 20))
    assert [point.ratio for point in found[0].points] == [None]


def test_modes_in_rows_of_their_own_are_joined_and_repeated_rows_give_the_median() -> None:
    rows = [
        {"c": 4, "no_spec": 10},
        {"c": 4, "static_spec": 7},
        *({"c": 4, "no_spec": n} for n in (90, 11)),
    ]
    [curve] = parse_table(table(*rows), "t").curves
    assert curve.points == (Point(4, 11, 7),)


def test_what_a_table_says_of_its_speculation() -> None:
    text = table(
        {"c": 1, "no_spec": 1},
        model="M",
        hardware={"device": "G", "count": 2},
        speculation={"num_steps": 5, "simulated_accept_len": 2.2},
    )
    found = parse_table(text, "t")
    assert (found.num_steps, found.accept_length) == (5, 2.2)
    assert found.title == "M; device G, count 2"
    bare = parse_table(table({"c": 1, "no_spec": 1}), "t")
    assert (bare.num_steps, bare.accept_length, bare.title) == (DEFAULT_NUM_STEPS, None, "")


def test_rows_of_other_modes_only_are_left_alone() -> None:
    rows = [{"c": 1, "no_spec": 2}, {"c": 2, "dynspec:never@skip": 3}]
    [curve] = parse_table(table(*rows), "t").curves
    assert [point.c for point in curve.points] == [1]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"c": 0, "no_spec": 1}, "row 2, c is 0; it must be a whole number >= 1"),
        ({"c": True, "no_spec": 1}, "row 2, c is True"),
        ({"c": 10**400, "no_spec": 1}, "row 2, c is 1000"),
        ({"no_spec": 1}, 'row 2 has no "c"'),
        ({"c": 2}, "row 2 has neither no_spec nor static_spec"),
        ({"c": 2, "no_spec": "fast"}, "row 2, no_spec is 'fast'; it must be a number > 0"),
        ({"c": 2, "static_spec": 0}, "row 2, static_spec is 0"),
        ({"c": 2, "static_spec": float("nan")}, "row 2, static_spec is nan"),
        ({"c": 2, "static_spec": 10**400}, "row 2, static_spec is 1000"),
        ({"c": 2, "no_spec": 1, "ctx": -1}, "row 2, ctx is -1"),
        ({"c": 2, "no_spec": 1, "output_tokens": 1.5}, "row 2, output_tokens is 1.5"),
        ({"c": 2, "no_spec": 1, "backend": 3}, "row 2, backend is 3; it must be a text"),
        ([1], "row 2 is [1]; it must look like"),
    ],
)
def test_a_bad_row_is_named(row: object, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_table(table({"c": 1, "no_spec": 1}, row), "t.json")
    assert f"t.json, {says}" in str(error.value)


@pytest.mark.parametrize(
    ("speculation", "says"),
    [
        ({"num_steps": 0}, "speculation.num_steps is 0"),
        ({"accept_length": -1}, "speculation.accept_length is -1; it must be a number > 0 (tokens"),
    ],
)
def test_bad_speculation_is_named(speculation: object, says: str) -> None:
    with pytest.raises(ConfigError, match=r"t\.json") as error:
        parse_table(table({"c": 1, "no_spec": 1}, speculation=speculation), "t.json")
    assert says in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"rows": []}', '{"rows": {}}', "[" * 10**5])
def test_what_is_no_table_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r't\.json .*"rows": \[\{"c": 1'):
        parse_table(text, "t.json")


def test_a_missing_file_names_the_shipped_tables(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"No such file.*{shipped_tables()[0]}"):
        read_table(tmp_path / "missing.json")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"cannot read .*t\.json"):
        read_table(tmp_path / "t.json")


# --- sglang.bench_serving -----------------------------------------------------------------------

# What a run of SGLang 0.5.9 writes, with the figures of one.
RUN_0_5_9: dict[str, Any] = {
    "tag": None,
    "backend": "sglang",
    "dataset_name": "random",
    "request_rate": float("inf"),
    "max_concurrency": 8,
    "sharegpt_output_len": None,
    "random_input_len": 1024,
    "random_output_len": 256,
    "random_range_ratio": 1.0,
    "server_info": None,
    "duration": 20.5,
    "completed": 32,
    "total_input_tokens": 32768,
    "total_input_text_tokens": 32768,
    "total_input_vision_tokens": 0,
    "total_output_tokens": 8192,
    "total_output_tokens_retokenized": 8190,
    "request_throughput": 1.56,
    "input_throughput": 1598.4,
    "output_throughput": 399.6,
    "total_throughput": 1998.0,
    **{
        f"{statistic}_{what}_ms": 12.5
        for statistic, what in [
            *((s, "e2e_latency") for s in ("mean", "median", "std", "p90", "p99")),
            *((s, w) for w in ("ttft", "tpot") for s in ("mean", "median", "std", "p99")),
            *((s, "itl") for s in ("mean", "median", "std", "p95", "p99")),
        ]
    },
    "concurrency": 7.6,
    "accept_length": None,
    "max_output_tokens_per_s": 450.0,
    "max_concurrent_requests": 10,
}
# 0.5.23 has more percentiles.
RUN_0_5_23: dict[str, Any] = {
    **RUN_0_5_9,
    **dict.fromkeys(
        (
            *("p95_e2e_latency_ms", "p90_ttft_ms", "p95_ttft_ms", "p90_tpot_ms", "p95_tpot_ms"),
            "p90_itl_ms",
        ),
        12.5,
    ),
}
RELEASES = {"0.5.9": RUN_0_5_9, "0.5.23": RUN_0_5_23}
DETAILS = {"input_lens": [1024], "output_lens": [256], "errors": [""], "generated_texts": ["x"]}

PLAIN_SERVER = {
    "model_path": "some/model",
    "version": "0.5.23",
    "attention_backend": "triton",
    "decode_attention_backend": None,
    "speculative_algorithm": None,
    "speculative_num_steps": None,
    "internal_states": [{"last_gen_throughput": 400.0}],
}
SPECULATIVE_SERVER = {
    **PLAIN_SERVER,
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 5,
    "internal_states": [{"avg_spec_accept_length": 2.4}],
}


def lines(*runs: dict[str, Any], base: dict[str, Any] = RUN_0_5_23) -> str:
    return "".join(json.dumps({**base, **run}) + "\n" for run in runs)


@pytest.mark.parametrize("base", RELEASES.values(), ids=RELEASES)
def test_runs_that_tell_by_themselves(base: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "both.jsonl"
    path.write_text(
        lines(
            {"server_info": PLAIN_SERVER, "max_concurrency": 1, "output_throughput": 100.5},
            {
                "server_info": PLAIN_SERVER,
                "max_concurrency": 8,
                "output_throughput": 700,
                **DETAILS,
            },
            {
                "server_info": SPECULATIVE_SERVER,
                "accept_length": 2.4,
                "max_concurrency": 8,
                "output_throughput": 600,
            },
            base=base,
        )
    )
    found = read_table(path)
    [curve] = found.curves
    assert curve.points == (Point(1, 100.5, None), Point(8, 700, 600))
    assert (curve.context, curve.output_tokens, curve.backend) == (1024, 256, "triton")
    assert (found.source, found.num_steps, found.accept_length) == (str(path), 5, 2.4)
    assert found.title == "some/model; SGLang 0.5.23"
    assert found.notes == ()


def test_silent_runs_take_the_mode_that_the_caller_names() -> None:
    runs = parse_runs(lines({}), "a", speculative=False)
    runs += parse_runs(lines({"output_throughput": 300}), "b", speculative=True)
    found = table_of(runs)
    assert found.source == "a, b"
    assert [curve.points for curve in found.curves] == [(Point(8, 399.6, 300),)]
    assert (found.num_steps, found.accept_length) == (DEFAULT_NUM_STEPS, None)


def test_an_accept_length_alone_tells_of_speculation() -> None:
    [run] = parse_runs(lines({"accept_length": 2.5}), "a")
    assert run.speculative


def test_silent_runs_of_an_unnamed_mode_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a, line 2: .* give the file with --spec or --no-spec"):
        parse_runs(lines({"accept_length": 2}, {}), "a")


def test_the_decode_server_speaks_behind_a_router() -> None:
    info = {"prefill": [PLAIN_SERVER], "decode": [SPECULATIVE_SERVER]}
    [run] = parse_runs(lines({"server_info": info}), "a")
    assert (run.speculative, run.num_steps) == (True, 5)


def test_the_backend_is_that_of_decoding() -> None:
    info = {**PLAIN_SERVER, "decode_attention_backend": "flashinfer"}
    [run] = parse_runs(lines({"server_info": info}), "a")
    assert run.backend == "flashinfer"


def test_repeated_runs_give_the_median() -> None:
    text = lines(*({"output_throughput": n} for n in (100, 900, 120)))
    [curve] = table_of(parse_runs(text, "a", speculative=True)).curves
    assert curve.points == (Point(8, None, 120),)


def test_servers_that_chose_different_backends_are_compared_and_that_is_said() -> None:
    other = {**SPECULATIVE_SERVER, "attention_backend": "fa3"}
    text = lines({"server_info": PLAIN_SERVER}, {"server_info": other})
    found = table_of(parse_runs(text, "a"))
    [curve] = found.curves
    assert curve.backend == "triton / fa3"
    assert curve.points[0].ratio == 1
    assert "triton, the one with speculation on fa3" in found.notes[0]


def test_other_data_sets_have_no_length_of_their_own() -> None:
    [run] = parse_runs(lines({"dataset_name": "sharegpt"}), "a", speculative=True)
    assert (run.context, run.output_tokens, run.range_ratio) == (0, None, None)


def test_notes_say_what_makes_figures_less_comparable() -> None:
    text = lines(
        {"server_info": PLAIN_SERVER, "concurrency": 3.0, "random_range_ratio": 0.0},
        {"server_info": {**SPECULATIVE_SERVER, "version": "0.5.9"}, "random_range_ratio": 0.0},
    )
    notes = " ".join(table_of(parse_runs(text, "a")).notes)
    assert "different releases: SGLang 0.5.23, SGLang 0.5.9" in notes
    assert "vary from 0 of" in notes
    assert "a, line 1: 3.0 requests ran on average where up to 8 could" in notes


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_concurrency": None}, "max_concurrency is null: "),
        ({"max_concurrency": 0}, "max_concurrency is 0; it must be a whole number >= 1"),
        ({"max_concurrency": "8"}, "max_concurrency is '8'"),
        ({"output_throughput": None}, "output_throughput is null; it must be a number > 0"),
        ({"output_throughput": float("nan")}, "output_throughput is nan"),
        ({"output_throughput": 0.0}, "output_throughput is 0.0"),
        ({"completed": 7}, "completed is 7: with so few requests answered there were never 8"),
        ({"completed": -1}, "completed is -1"),
        ({"errors": ["", "refused"]}, "errors: 1 requests failed, the first with 'refused'"),
        ({"accept_length": "2"}, "accept_length is '2'; it must be a number > 0"),
        ({"random_input_len": -3}, "random_input_len is -3"),
        ({"server_info": {"speculative_num_steps": "3"}}, "speculative_num_steps is '3'"),
        ({"server_info": PLAIN_SERVER}, "speculative_algorithm is None, but the file was given"),
        (
            {"server_info": {"speculative_adaptive": True}},
            "server_info.speculative_adaptive is true",
        ),
        (
            {"server_info": {"internal_states": [{"dynspec": {"state": "in_force"}}]}},
            "server_info.internal_states: the server ran with dynspec in force",
        ),
    ],
)
def test_a_run_that_cannot_be_used_is_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_runs(lines({}, fields), "runs.jsonl", speculative=True)
    assert str(error.value).startswith("runs.jsonl, line 2, ")
    assert says in str(error.value)


def test_a_missing_field_is_named() -> None:
    for field in ("max_concurrency", "output_throughput"):
        run = {key: value for key, value in RUN_0_5_9.items() if key != field}
        with pytest.raises(ConfigError, match=f"a, line 1, {field} is missing"):
            parse_runs(json.dumps(run), "a", speculative=True)


def test_a_plain_run_given_as_speculative_and_the_other_way_round() -> None:
    with pytest.raises(ConfigError, match=r"'EAGLE3', but .* with --no-spec; .* it with --spec"):
        parse_runs(lines({"server_info": SPECULATIVE_SERVER}), "a", speculative=False)
    with pytest.raises(ConfigError, match=r"accept_length is 2, but the file .* with --no-spec"):
        parse_runs(lines({"accept_length": 2}), "a", speculative=False)


def test_a_last_line_that_was_not_written_to_its_end() -> None:
    with pytest.raises(ConfigError, match=r"a, line 2 is no JSON: .* delete it, and repeat"):
        parse_runs(lines({}) + lines({})[:400], "a", speculative=True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\n\n", "a is empty; each line must be the result of one run"),
        ("\n[1]\n", r"a, line 2 is \[1\]; each line must be"),
        (lines({})[:300] + "\n" + lines({}), "a, line 1 is no JSON: .*; each line must be"),
        (table({"c": 1, "no_spec": 1}), "a, line 1 is a table .* without --spec"),
    ],
)
def test_what_is_no_file_of_runs(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_runs(text, "a", speculative=True)


def test_blank_lines_and_a_missing_last_newline_do_no_harm() -> None:
    text = "\n" + lines({}) + "\n" + lines({}).rstrip("\n")
    assert [run.where for run in parse_runs(text, "a", speculative=True)] == [
        "a, line 2",
        "a, line 4",
    ]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"dataset_name": "sharegpt"}, "dataset_name is 'sharegpt', but 'random' in a, line 1"),
        ({"random_range_ratio": 0.5}, "random_range_ratio is 0.5, but 1.0 in a, line 1"),
        (
            {"server_info": {"speculative_num_steps": 3}},
            "server_info.speculative_num_steps is 3, but 5 in a, line 1",
        ),
    ],
)
def test_runs_that_cannot_be_compared(other: dict[str, Any], says: str) -> None:
    first = {"server_info": {"speculative_num_steps": 5}}
    runs = parse_runs(lines(first, other), "a", speculative=True)
    with pytest.raises(ConfigError) as error:
        table_of(runs)
    assert f"a, line 2, {says}" in str(error.value)


def test_the_first_line_tells_runs_from_tables() -> None:
    assert looks_like_runs(lines({}))
    assert looks_like_runs(lines({})[:400])
    assert not looks_like_runs(table({"c": 1, "no_spec": 1}))
    assert not looks_like_runs("")


# --- the installed SGLang -----------------------------------------------------------------------


def installed(*paths: str) -> list[Path]:
    found = find_spec("sglang")
    assert found is not None
    assert found.submodule_search_locations is not None
    [root] = found.submodule_search_locations
    return [path for pattern in paths for path in sorted(Path(root).glob(pattern))]


def keys_of_a_result(tree: ast.AST) -> Iterator[set[str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            if {"max_concurrency", "output_throughput"} <= keys:
                yield keys


def test_the_installed_sglang_writes_these_fields() -> None:
    *_, source = installed("bench_serving.py", "benchmark/serving.py")
    [keys] = keys_of_a_result(ast.parse(source.read_text()))
    assert keys == RELEASES.get(version("sglang"), dict.fromkeys(keys)).keys()
    assert RUN_0_5_9.keys() <= keys


def test_the_installed_sglang_has_these_server_arguments() -> None:
    names = {
        node.target.id
        for source in installed("srt/server_args.py", "srt/arg_groups/fields/*.py")
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert PLAIN_SERVER.keys() - {"internal_states", "version"} <= names


# --- any file -----------------------------------------------------------------------------------

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def objects(*keys: str) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these keys, and any values."""
    return st.dictionaries(
        st.sampled_from(keys), json_values | st.integers(1, 9), max_size=len(keys)
    )


any_table = json_values | st.builds(
    lambda rows, rest: {**rest, "rows": rows},
    st.lists(
        objects("c", "no_spec", "static_spec", "ctx", "backend", "x") | json_values, max_size=3
    ),
    objects("model", "hardware", "speculation")
    | st.builds(lambda inner: {"speculation": inner}, objects("num_steps", "accept_length")),
)
any_run = json_values | st.builds(
    lambda fields, info: {**RUN_0_5_9, **fields, **info},
    objects(*RUN_0_5_9, "errors"),
    st.builds(
        lambda info: {"server_info": info},
        objects(*PLAIN_SERVER, "decode", "speculative_adaptive") | json_values,
    ),
)


def read_or_refused(read: Callable[[], Table]) -> Table | None:
    """The table, or None after an error of ours that names the file."""
    try:
        return read()
    except ConfigError as error:
        if not str(error).startswith("t"):
            raise
        return None


@given(any_table)
def test_any_json_is_a_table_or_a_config_error(content: Any) -> None:
    found = read_or_refused(lambda: parse_table(json.dumps(content), "t"))
    points = [point for curve in found.curves for point in curve.points] if found else []
    assert all(point.ratio is None or 0 < point.ratio < float("inf") for point in points)


@given(st.lists(any_run, max_size=3), st.none() | st.booleans())
def test_any_json_lines_are_runs_or_a_config_error(content: list[Any], said: bool | None) -> None:
    text = "\n".join(json.dumps(each) for each in content)
    read_or_refused(lambda: table_of(parse_runs(text, "t", speculative=said)))


@given(st.text(), st.booleans())
def test_any_text_is_read_or_a_config_error(text: str, said: bool) -> None:
    for read in (
        lambda: parse_table(text, "t"),
        lambda: parse_runs(text, "t", speculative=said),
    ):
        with pytest.raises(ConfigError):
            read()
