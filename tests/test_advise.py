"""The command `advise`: where speculation pays, which policy follows, and what it would gain."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import answers

from sglang_dynspec import cli
from sglang_dynspec.advise import CurveAdvice, TableAdvice, advise
from sglang_dynspec.advise.advice import Band, choose
from sglang_dynspec.advise.report import AUTO, as_json, as_text
from sglang_dynspec.errors import ConfigError
from sglang_dynspec.measured import Curve, Point, Table, read_table, shipped_tables
from sglang_dynspec.policy import BatchSize, parse_policy

K25, K26, LLAMA = "kimi-k2.5-rtx-pro-6000", "kimi-k2.6-rtx-pro-6000", "llama-8b-h200"


def table(*curves: Curve, **fields: Any) -> Table:
    return Table(
        **{"source": "t", "title": "", "num_steps": 3, "accept_length": None, **fields},
        curves=curves,
    )


def curve(ratios: dict[int, float | None], context: int = 0, backend: str | None = None) -> Curve:
    """A curve of 100 tok/s without speculation; None where speculation was not measured."""
    return Curve(
        context,
        backend,
        tuple(Point(c, 100, None if r is None else 100 * r) for c, r in ratios.items()),
    )


def of(ratios: dict[int, float | None]) -> CurveAdvice:
    [advice] = advise([table(curve(ratios))])
    [found] = advice.curves
    return found


def shipped(name: str) -> TableAdvice:
    [advice] = advise([read_table(name)])
    return advice


def text_of(*tables: Table) -> str:
    """The text, with its lines joined."""
    return " ".join(as_text(advise(tables)).split())


# --- a threshold --------------------------------------------------------------------------------


def test_speculation_pays_up_to_a_crossover() -> None:
    advice = of({1: 1.5, 8: 1.2, 32: 0.8, 128: 0.5})
    choice = advice.choice
    assert choice.verdict == "threshold"
    # log(1.2) / (log(1.2) - log(0.8)) of the way from 8 to 32, both in logarithms.
    assert choice.crossover == pytest.approx(8 * 4 ** (math.log(1.2) / math.log(1.5)))
    assert (choice.off_at, choice.on_at) == (15, 13)
    assert choice.policy == "batch_size(off_at=15, on_at=13)"
    assert advice.bands == (Band(1, 8, True), Band(32, 128, False))
    assert [point.speculate for point in advice.points] == [True, True, False, False]
    assert [point.over_always for point in advice.points] == pytest.approx([1, 1, 1.25, 2])
    assert [point.over_never for point in advice.points] == pytest.approx([1.5, 1.2, 1, 1])
    assert advice.means.over_always == pytest.approx(2.5**0.25)
    assert advice.means.over_never == pytest.approx(1.8**0.25)
    assert advice.means.of_best == 1
    assert advice.rises is None


def test_off_at_is_the_first_whole_number_at_which_plain_is_as_fast() -> None:
    assert of({4: 2.0, 16: 0.5}).choice.off_at == 8  # The crossover is 8 exactly.
    assert of({4: 2.0, 16: 1.0}).choice.off_at == 16
    assert of({4: 1.0001, 16: 0.5}).choice.off_at == 5


def test_on_at_leaves_room_but_never_goes_below_a_point_that_pays() -> None:
    assert of({8: 4.0, 128: 0.25}).choice.on_at == 28  # An eighth below 32.
    assert of({8: 1.1, 128: 0.9}).choice.on_at == 22  # 2 per cent are gained there, off_at is 33.
    assert of({30: 2.0, 34: 0.5}).choice.on_at == 30
    assert of({8: 1.01, 128: 0.9}).choice.on_at == 8
    assert of({1: 1.5, 2: 0.5}).choice.policy == "batch_size(off_at=2, on_at=1)"


def test_a_narrow_band_comes_with_a_way_out() -> None:
    said = text_of(table(curve({32: 1.01, 64: 0.74})))
    assert "write min_dwell(batch_size(off_at=33, on_at=32), steps=50)" in said
    parse_policy("min_dwell(batch_size(off_at=33, on_at=32), steps=50)")
    assert "min_dwell" not in text_of(table(curve({1: 1.5, 8: 1.2, 32: 0.8})))


def test_equal_throughput_counts_as_not_paying() -> None:
    assert of({1: 1.0, 8: 1.0}).choice.policy == "never"
    assert of({1: 1.2, 8: 1.0}).choice.verdict == "threshold"


def test_points_of_one_concurrency_count_by_their_mean() -> None:
    assert choose([(1, 1.2), (4, 1.5), (4, 0.9), (8, 0.5)]).last_paying == 4


# --- never, always, back and forth --------------------------------------------------------------


def test_speculation_that_never_pays() -> None:
    advice = shipped(K25)
    [found] = advice.curves
    assert found.choice.policy == "never"
    assert found.bands == (Band(1, 250, False),)
    said = text_of(advice.table)
    assert "Speculation does not pay at any measured concurrency, 1 to 250 requests." in said
    assert "Serve without speculation" in said
    assert "policy `never`" in said
    assert "batch_size" not in said
    assert "export" not in said
    assert "max-running-requests" not in said


def test_speculation_that_always_pays() -> None:
    found = of({1: 1.5, 64: 1.2})
    assert found.choice.policy == "always"
    assert found.means.over_always == 1
    said = text_of(table(curve({1: 1.5, 64: 1.2})))
    assert "Speculation pays at every measured concurrency, 1 to 64 requests. Leave it" not in said
    assert "Leave speculation on; no policy is needed" in said
    assert "allows more than 64 requests, measure there too" in said
    assert "export" not in said


def test_a_ratio_that_rises_again_without_paying() -> None:
    found = shipped(K26).curves[2]
    assert found.curve.context == 65536
    assert [round(point.ratio, 2) for point in found.points] == [1.41, 0.95, 0.82, 0.89, 0.64]
    assert found.bands == (Band(1, 1, True), Band(4, 128, False))
    assert found.choice.policy == "batch_size(off_at=4, on_at=3)"
    assert found.means.loss == 0
    said = text_of(table(found.curve))
    assert "Speculation pays at 1 request, and not at 4 to 128." in said
    assert "rises from 0.82 at 32 to 0.89 at 64 requests. The threshold has the better mode" in said


def test_speculation_that_stops_paying_and_pays_again() -> None:
    ratios: dict[int, float | None] = {1: 1.5, 8: 0.9, 16: 1.2, 32: 0.7}
    found = of(ratios)
    assert [band.pays for band in found.bands] == [True, False, True, False]
    assert [point.speculate for point in found.points] == [True, True, True, False]
    assert found.means.of_best == pytest.approx(0.9**0.25)
    said = text_of(table(curve(ratios)))
    assert "pays at 1 and 16 requests, and not at 8 and 32" in said
    assert "It stops at about" in said
    assert "costs 2.6% against the better mode of each point" in said


def test_speculation_that_pays_where_no_threshold_reaches() -> None:
    found = of({1: 0.5, 8: 1.1})
    assert found.choice.policy == "never"
    said = text_of(table(curve({1: 0.5, 8: 1.1})))
    assert "Speculation pays at 8 requests, and not at 1." in said
    assert "No speculation costs 4.7%" in said
    assert found.means.over_always < 1.5

    assert of({1: 1.5, 8: 0.95, 16: 1.3}).choice.policy == "always"
    said = text_of(table(curve({1: 1.5, 8: 0.95, 16: 1.3})))
    assert "than speculation throughout, which costs 1.7%" in said


def test_a_rise_within_the_noise_is_not_told() -> None:
    assert of({1: 1.5, 8: 1.2, 16: 1.205, 32: 0.7}).rises is None


# --- several loads ------------------------------------------------------------------------------


def test_a_crossover_that_moves_with_the_context() -> None:
    advice = shipped(K26)
    [server] = advice.servers
    assert server.moves
    assert server.by_load.loss == 0
    assert [round(c.choice.crossover or 0, 1) for c in server.curves] == [104.3, 38.6, 3.3]
    by_name = {key.looks_at: key for key in server.keys}
    assert by_name["requests"].policy == server.choice.policy
    assert by_name["requests"].loss == server.means.loss == pytest.approx(0.0257, abs=1e-4)
    # The budget of tokens in a step is one of requests.
    assert by_name["tokens verified in a step"].loss == server.means.loss
    assert server.keys[0] == by_name["prompt tokens of the batch"]
    assert (server.keys[0].limit, server.keys[0].policy) == (65536, None)
    said = text_of(advice.table)
    assert "about 104 requests with context 0; about 38.6 requests with context 16384" in said
    assert "The number of requests alone is the wrong key" in said
    assert said.count(AUTO) == 1
    assert said.count("export ") == 4


def test_the_advised_token_budget_decides_as_the_batch_size_does() -> None:
    for curves in (
        [curve({1: 1.5, 40: 1.1, 64: 0.9}), curve({1: 1.2, 2: 0.9, 64: 0.5}, context=9)],
        [curve({1: 1.5, 2: 1.1, 64: 0.9}), curve({1: 1.2, 2: 0.7, 64: 0.5}, context=9)],
    ):
        [server] = advise([table(*curves)])[0].servers
        budget = next(k.policy for k in server.keys if k.policy and k.policy.startswith("token"))
        sizes = [*range(1, 70), *range(70, 0, -1), 40, 5, 40]
        assert [n == 3 for n in answers(parse_policy(budget), sizes)] == [
            n == 3 for n in answers(parse_policy(server.choice.policy), sizes)
        ]


def test_loads_that_agree_get_one_threshold() -> None:
    curves = [curve({1: 1.5, 8: 1.2, 32: 0.8}, context=n) for n in (128, 4096)]
    [server] = advise([table(*curves)])[0].servers
    assert not server.moves
    assert server.choice == of({1: 1.5, 8: 1.2, 32: 0.8}).choice
    said = text_of(table(*curves))
    assert "One threshold fits all loads" in said
    assert AUTO not in said


@pytest.mark.parametrize(
    ("ratio", "says"), [(0.5, "serve all of them without speculation"), (2, "leave speculation on")]
)
def test_loads_that_agree_on_no_threshold(ratio: float, says: str) -> None:
    said = text_of(table(*[curve({1: ratio, 8: ratio}, context=n) for n in (128, 4096)]))
    assert f"One answer fits all loads, {says}" in said
    assert "export" not in said


def test_loads_of_which_one_never_pays() -> None:
    said = text_of(
        table(
            curve({1: 2, 8: 1.5}, context=1),
            curve({1: 0.5, 8: 0.4}, context=2),
            curve({1: 2, 8: 0.5}),
        )
    )
    assert "it always pays with context 1; it never pays with context 2" in said
    assert "about 2.8 requests with context 0" in said


def test_loads_that_no_common_threshold_fits() -> None:
    [server] = advise(
        [table(curve({1: 2, 8: 0.5}, context=1), curve({1: 0.4, 8: 0.5}, context=2))]
    )[0].servers
    assert (server.choice.policy, server.moves) == ("never", True)
    assert [key.policy for key in server.keys if key.policy] == ["never"]
    said = text_of(table(curve({1: 2, 8: 0.5}, context=1), curve({1: 0.4, 8: 0.5}, context=2)))
    assert "`never` loses least of those that are shipped (15.9%)." in said
    assert "token_budget" not in said


def test_attention_backends_are_servers_of_their_own() -> None:
    assert shipped(LLAMA).servers == ()
    assert [c.curve.label for c in shipped(LLAMA).curves] == ["flashinfer", "triton"]


# --- what is missing ----------------------------------------------------------------------------


def test_points_with_one_mode_are_left_out_and_named() -> None:
    found = of({1: 1.5, 8: None, 32: 0.8})
    assert [point.c for point in found.points] == [1, 32]
    assert [point.c for point in found.left_out] == [8]
    assert "Left out, with one mode only: only without speculation at 8." in text_of(
        table(curve({1: 1.5, 8: None, 32: 0.8}))
    )


def test_curves_without_two_comparable_points_are_left_out_and_named() -> None:
    whole, partial = curve({1: 1.5, 8: 0.5}), curve({1: 1.5, 8: None, 9: None}, context=128)
    [advice] = advise([table(whole, partial)])
    assert [c.curve for c in advice.curves] == [whole]
    assert advice.left_out == (partial,)
    assert (
        "Left out, with fewer than two points that have both modes: context 128 "
        "(only without speculation at 8 and 9; both at 1)." in text_of(table(whole, partial))
    )


def test_nothing_to_compare_says_what_to_measure() -> None:
    with pytest.raises(ConfigError) as error:
        advise([table(curve({1: None, 8: None}, backend="triton")), table(curve({1: 2}))])
    said = str(error.value)
    assert "t, triton: without at 1, 8, with at none; t: without at 1, with at 1" in said
    assert "examples/benchmark/run.py" in said
    assert "python -m sglang.bench_serving" in said
    assert "--no-spec no-spec.jsonl --spec spec.jsonl" in said


def test_the_accept_length_of_the_measurement_is_told() -> None:
    one = curve({1: 1.5, 8: 0.5})
    assert "measured with accept length 2.2. What follows holds for that" in text_of(
        table(one, accept_length=2.2)
    )
    assert "accept length that the source does not tell. What follows holds" in text_of(table(one))


def test_a_threshold_above_the_limit_of_the_server_is_told() -> None:
    limit = "SGLang serves 48 requests at once unless --max-running-requests"
    assert limit in text_of(table(curve({1: 1.5, 64: 0.5})))
    assert limit not in text_of(table(curve({1: 1.5, 48: 0.5})))


# --- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_tables())
def test_the_command_prints_the_same_as_text_and_as_json(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["advise", name]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert cli.main(["advise", "--json", name]) == 0
    [found] = json.loads(capsys.readouterr().out)["tables"]
    assert found == json.loads(json.dumps(as_json([shipped(name)])))["tables"][0]
    for each in [*found["curves"], *found["servers"]]:
        parse_policy(each["policy"])
        assert each["export"] is None or each["export"] in text
    for point in found["curves"][0]["points"]:
        assert f"{point['no_spec']:.1f}" in text


def test_the_exported_line_is_one_that_a_shell_understands() -> None:
    [found] = as_json(advise([table(curve({1: 1.5, 8: 0.5}))]))["tables"][0]["curves"]
    shown = subprocess.run(
        ["sh", "-c", f'{found["export"]}; printf %s "$SGLANG_DYNSPEC_POLICY"'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown == found["policy"]
    assert isinstance(parse_policy(shown), BatchSize)


def run_of(c: int, tok_s: float, **fields: Any) -> str:
    known = {
        "dataset_name": "random",
        "random_input_len": 128,
        "random_output_len": 64,
        "random_range_ratio": 1.0,
        "completed": 4 * c,
    }
    return json.dumps({"max_concurrency": c, "output_throughput": tok_s, **known, **fields}) + "\n"


def test_files_of_the_benchmark_make_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, more, spec = (tmp_path / f"{name}.jsonl" for name in ("plain", "more", "spec"))
    plain.write_text(run_of(1, 100) + run_of(8, 500))
    more.write_text(run_of(8, 510) + run_of(8, 490))
    spec.write_text(run_of(1, 150, accept_length=2.5) + run_of(8, 250, accept_length=2.3))
    argv = ["advise", "--json", "--no-spec", str(plain), "--no-spec", str(more)]
    for last in (["--spec", str(spec)], [str(spec)]):  # It tells by itself.
        assert cli.main([*argv, *last]) == 0
        [found] = json.loads(capsys.readouterr().out)["tables"]
        [one] = found["curves"]
        assert [p["no_spec"] for p in one["points"]] == [100, 500]
        assert [p["static_spec"] for p in one["points"]] == [150, 250]
        assert (one["label"], found["accept_length"]) == ("context 128, output 64", 2.4)
        assert one["verdict"] == "threshold"


def test_a_table_and_the_benchmark_s_files_stay_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, spec = tmp_path / "plain.jsonl", tmp_path / "spec.jsonl"
    plain.write_text(run_of(1, 100) + run_of(8, 500))
    spec.write_text(run_of(1, 150) + run_of(8, 250))
    assert cli.main(["advise", K25, "--no-spec", str(plain), "--spec", str(spec)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{K25}: ")
    assert f"\n\n{plain}" in said


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "no file is given; "),
        (["missing.json"], "cannot read 'missing.json': No such file"),
        (["--spec", K25], f"{K25}, line 1 is no JSON"),
        (["--spec", "missing"], "cannot read 'missing'"),
    ],
)
def test_what_cannot_be_used_is_exit_code_2(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["advise", *argv]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"python -m sglang_dynspec advise: error: {says}")


def test_a_cut_off_file_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(run_of(1, 100) + run_of(8, 200)[:40])
    assert cli.main(["advise", "--spec", str(path)]) == 2
    assert f"{path}, line 2 is no JSON" in capsys.readouterr().err


def test_the_command_needs_the_standard_library_only() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'sglang', 'wrapt', 'rich', 'matplotlib'): sys.modules[name] = None\n"
        "from sglang_dynspec.cli import main\n"
        f"sys.exit(main(['advise', {LLAMA!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "export SGLANG_DYNSPEC_POLICY='batch_size(off_at=19, on_at=16)'" in result.stdout


# --- any curve ----------------------------------------------------------------------------------

throughput = st.floats(1e-3, 1e9) | st.floats(90, 110)
points = st.dictionaries(
    st.integers(1, 300) | st.integers(1, 10**9),
    st.tuples(throughput, throughput),
    min_size=2,
    max_size=7,
)
any_curve = points.map(
    lambda found: Curve(0, None, tuple(Point(c, *found[c]) for c in sorted(found)))
)


def total(tok_s: list[float]) -> float:
    """What the advice maximises: the logarithms, so that each point counts the same."""
    return math.fsum(math.log(each) for each in tok_s)


@given(any_curve)
def test_the_advice_parses_does_what_it_says_and_is_not_beaten(measured: Curve) -> None:
    [advice] = advise([table(measured)])
    [found] = advice.curves
    policy = parse_policy(found.choice.policy)
    # From above and from below: at a measured point the mode does not hang on what was before.
    for sizes in (found.points, found.points[::-1]):
        decided = answers(policy, [point.c for point in sizes])
        assert [n == 3 for n in decided] == [point.speculate for point in sizes]

    advised = total([point.tok_s for point in found.points])
    of_thresholds = [
        total([p.static_spec if i < cut else p.no_spec for i, p in enumerate(found.points)])
        for cut in range(len(found.points) + 1)  # The first is never, the last is always.
    ]
    slack = 1e-9 * max(1, abs(advised))
    assert advised >= max(of_thresholds) - slack
    assert found.means.over_always >= 1 - 1e-9
    assert found.means.over_never >= 1 - 1e-9
    assert 0 < found.means.of_best <= 1 + 1e-9


@given(any_curve)
def test_a_threshold_lies_between_the_points_around_it(measured: Curve) -> None:
    [found] = advise([table(measured)])[0].curves
    choice = found.choice
    if choice.verdict == "threshold":
        following = next(point.c for point in found.points if not point.speculate)
        assert choice.crossover is not None
        assert choice.off_at is not None
        assert choice.on_at is not None
        assert choice.last_paying <= choice.crossover <= following
        assert choice.last_paying <= choice.on_at < choice.off_at <= following


@given(st.lists(any_curve, min_size=2, max_size=3))
def test_any_loads_can_be_told(curves: list[Curve]) -> None:
    loads = [Curve(128 * i, None, each.points) for i, each in enumerate(curves)]
    advice = advise([table(*loads)])
    [server] = advice[0].servers
    parse_policy(server.choice.policy)
    assert server.means.loss >= server.by_load.loss - 1e-9
    assert list(server.keys) == sorted(server.keys, key=lambda key: key.loss)
    for key in server.keys:
        assert key.policy is None or parse_policy(key.policy)
    assert as_text(advice)
    json.dumps(as_json(advice), allow_nan=False)
