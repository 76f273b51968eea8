"""The metrics: what they count without SGLang, and a real server's scrape against its status."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.in_force import in_force
from support.policies import Alternate, Foresees, Toggle
from support.servers import Server, running_server

import sglang_dynspec
from sglang_dynspec import Always, BatchView, Never, Policy
from sglang_dynspec.engine import install, results
from sglang_dynspec.engine.controller import Controller, Counts, ModeCount
from sglang_dynspec.engine.metrics import PREFIX, Deltas, Exporter
from sglang_dynspec.engine.runtime import DECISION
from sglang_dynspec.engine.verified_counts import VerifiedCounts
from sglang_dynspec.testing.scheduler import Request

DASHBOARD = Path(__file__).parents[1] / "examples" / "grafana" / "dynspec.json"

Scrape = dict[str, list[tuple[dict[str, str], float]]]
"""Labels and value of each series, by the name of the sample."""


def samples(text: str) -> Scrape:
    found: Scrape = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


# --- what has been gained since -------------------------------------------------------------------


def counts(**plain: float) -> Counts:
    made = Counts(by_num_steps={0: ModeCount(**plain)})
    made.switches["policy"] = 2
    return made


def test_deltas_are_what_has_come_since():
    deltas, now = Deltas(), counts(steps=3, requests=6, tokens=6, seconds=0.5)
    first = deltas.take(now)
    assert (first.steps, first.tokens, first.switches) == ({0: 3}, {0: 6}, {"policy": 2})
    assert first.accept_length() is None
    now.by_num_steps[3] = ModeCount(steps=2, requests=4, tokens=10, seconds=1.0)
    now.by_num_steps[0].steps += 1
    now.passthrough["prefill"] += 1
    second = deltas.take(now)
    assert second.steps == {0: 1, 3: 2}
    assert second.switches == {"policy": 0}
    assert second.passthrough == {"prefill": 1}
    assert second.accept_length() == 2.5
    assert second.tokens_per_second() == 10.0
    third = deltas.take(now)
    assert not any(third.steps.values())
    assert third.accept_length() is None
    assert third.tokens_per_second() is None


def test_fresh_counts_are_counted_from_nothing_and_the_old_to_their_end():
    deltas, old = Deltas(), counts(steps=3)
    deltas.take(old)
    old.by_num_steps[0].steps += 2
    assert deltas.take(counts(steps=4)).steps == {0: 6}


def test_a_value_that_has_become_smaller_is_counted_from_nothing():
    deltas, now = Deltas(), counts(steps=3)
    deltas.take(now)
    now.by_num_steps[0].steps = 1
    assert deltas.take(now).steps == {0: 1}


# --- the metrics, with a collector as SGLang's is -------------------------------------------------


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    return prometheus_client.CollectorRegistry()


@pytest.fixture
def exporter(registry: prometheus_client.CollectorRegistry) -> Exporter:
    """With classes of its own, as SGLang's collector has them under Ray."""
    kinds = ("Gauge", "Counter", "Histogram")
    own = {
        f"_{kind.lower()}_cls": partial(getattr(prometheus_client, kind), registry=registry)
        for kind in kinds
    }
    return Exporter(SimpleNamespace(labels={"model_name": "m", "tp_rank": 0}, **own))


def in_charge(policy: Policy) -> Any:
    """As much of a Runtime as the metrics look at."""
    return SimpleNamespace(controller=Controller(policy, (0, 3)), draft_state="warm")


def run_step(controller: Controller, accept_lens: list[int]) -> None:
    view = BatchView(
        batch_size=len(accept_lens), ladder=controller.ladder, step=controller.next_step
    )
    decision = controller.decide(view)
    controller.decided(decision)
    controller.take(decision)
    controller.finished(decision, accept_lens)


def value(registry: prometheus_client.CollectorRegistry, name: str, **labels: str) -> float | None:
    own = {"model_name": "m", "tp_rank": "0", **labels}
    found: float | None = registry.get_sample_value(PREFIX + name, own)
    return found


class Incomparable(Never):
    """Compared with another, it raises, as one that holds an array does."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None  # type: ignore[assignment]


def test_policies_are_not_compared_when_nothing_runs(exporter):
    runtime = in_charge(Incomparable())
    exporter.flush_at_idle(runtime, "in_force")
    runtime.controller.use(Incomparable())
    exporter.flush_at_idle(runtime, "in_force")
    assert exporter.status() == "on"


def test_a_flush_turns_counts_into_metrics(exporter, registry):
    runtime = in_charge(Always())
    run_step(runtime.controller, [4, 1])
    exporter.flush(runtime, "in_force")
    assert exporter.status() == "on"
    assert value(registry, "steps_total", num_steps="3") == 1
    assert (
        value(registry, "steps_total", num_steps="0") == 0
    )  # from the start, so that it has a rate
    assert value(registry, "accept_length") == 2.5
    assert value(registry, "num_steps") == 3
    assert value(registry, "decision_seconds_count") == 1
    assert value(registry, "tokens_per_second", kind="predicted") is None
    exporter.flush(runtime, "in_force")
    assert value(registry, "accept_length") == 2.5
    assert value(registry, "decision_seconds_count") == 1
    runtime.controller.use(Never())
    run_step(runtime.controller, [1])
    exporter.flush(runtime, "in_force")
    assert value(registry, "accept_length") == 2.5  # of the last speculative steps
    assert value(registry, "switches_total", reason="policy") == 1


def test_what_is_predicted_is_that_of_the_mode_in_use(exporter, registry):
    runtime = in_charge(Foresees(1) & Always())
    for expected in (111, 333):
        run_step(runtime.controller, [1])
        exporter.flush(runtime, "in_force")
        assert value(registry, "tokens_per_second", kind="predicted") == expected


def test_one_set_of_labels_says_what_is_in_force(exporter, registry):
    runtime = in_charge(Always())
    labels = {"version": sglang_dynspec.__version__, "draft_state": "warm"}
    exporter.flush(runtime, "in_force")
    runtime.controller.use(Never())
    exporter.flush(runtime, "in_force")
    assert value(registry, "info", policy="always", state="in_force", **labels) == 0
    assert value(registry, "info", policy="never", state="in_force", **labels) == 1
    exporter.flush(runtime, "static")
    assert value(registry, "info", policy="never", state="in_force", **labels) == 0
    assert value(registry, "info", policy="never", state="static", **labels) == 1
    exporter.end()
    assert value(registry, "info", policy="never", state="static", **labels) == 0


def test_an_idle_scheduler_flushes_once(exporter, registry):
    runtime = in_charge(Always())
    exporter.flush(runtime, "in_force")
    run_step(runtime.controller, [2])
    runtime.controller.last_cold = 1
    for _ in range(3):
        exporter.flush_at_idle(runtime, "in_force")
    assert value(registry, "steps_total", num_steps="3") == 1
    assert value(registry, "cold_requests") == 0
    runtime.controller.decision_seconds.append(1.0)
    exporter.flush_at_idle(runtime, "in_force")
    assert len(runtime.controller.decision_seconds) == 1  # nothing has been run: not looked at
    exporter.flush_at_idle(runtime, "static")
    assert not runtime.controller.decision_seconds


def test_a_failure_is_said_once_and_turns_the_metrics_off(caplog):
    class Broken:
        @property
        def labels(self) -> dict[str, str]:
            raise RuntimeError("boom")

    exporter, runtime = Exporter(Broken()), in_charge(Always())
    with caplog.at_level(logging.WARNING, logger="sglang_dynspec"):
        exporter.flush(runtime, "in_force")
        exporter.flush(runtime, "in_force")
        exporter.flush_at_idle(runtime, "in_force")
        exporter.end()
    assert exporter.status() == "off: RuntimeError: boom"
    assert [r.getMessage() for r in caplog.records] == [
        "sglang_dynspec: its metrics failed and are off from now on; nothing else is."
    ]


# --- SGLang's own accept length -------------------------------------------------------------------


REQUESTS = [
    Request(input_ids=[5 + i, 6, 7], max_new_tokens=20 + 7 * i, arrive_at_step=4 * i)
    for i in range(4)
]


@pytest.mark.parametrize("interval", [1, 5])
def test_sglangs_accept_length_is_that_of_speculative_steps(interval):
    with in_force("EAGLE3", decode_log_interval=interval) as server:
        current = install.runtime()
        counted = current.verified_counts
        assert isinstance(counted, VerifiedCounts)
        for policy in (Alternate(), Toggle(7), Never()):
            server.controller.use(policy)
            server.scheduler.run(REQUESTS)
        owner, tokens = current.dialect.holds_counters(server.scheduler.scheduler), counted._tokens
        verified = owner.spec_total_num_forward_ct + owner.spec_num_forward_ct
        gained = getattr(owner, counted._total_tokens) + getattr(owner, tokens)
        speculative = server.controller.counts.by_num_steps[3]
        # The run has ended with plain steps: one of them may still be among what SGLang has.
        assert (verified - counted._kept, gained - counted._kept) == (
            speculative.requests,
            speculative.tokens,
        )
        assert counted._kept <= len(REQUESTS)


def test_counters_that_are_not_as_expected_are_left_alone_and_steps_go_on(caplog):
    counted = VerifiedCounts(SimpleNamespace(spec_num_forward_ct=1), "accept")
    runtime = SimpleNamespace(verified_counts=counted)
    result = SimpleNamespace(**{DECISION: SimpleNamespace(num_steps=0)})
    for _ in range(2):
        results.before(runtime, SimpleNamespace(reqs=[1]), result)
    assert runtime.verified_counts is None
    assert len(caplog.records) == 1


# --- a real server --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scrape, dict[str, Any]]]:
    """A scrape after some load, and the status of the same moment."""
    log = tmp_path_factory.mktemp("metrics") / "server.log"
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with running_server(
        "EAGLE3",
        log,
        {"enable_metrics": True, "decode_log_interval": 7},
        SGLANG_DYNSPEC_POLICY="support.policies:Foresees(5)",
        PYTHONPATH=os.pathsep.join(path),
    ) as server:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: server.generate([5 + i, 6, 7], 30 + 5 * i), range(4)))
        yield wait_for(lambda: _agreeing(server))


def _agreeing(server: Server) -> tuple[Scrape, dict[str, Any]] | None:
    """Both, if the last steps have come to the metrics."""
    status, scrape = server.dynspec(), samples(server.text("/metrics"))
    done = sum(mode["steps"] for mode in status["by_num_steps"].values())
    seen = sum(value for _, value in scrape.get(f"{PREFIX}steps_total", []))
    return (scrape, status) if seen == done else None


def wait_for(look: Callable[[], Any], timeout: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (found := look()):
        assert time.monotonic() < deadline, "the metrics do not follow the status"
        time.sleep(0.05)
    return found


def by(scrape: Scrape, name: str, label: str) -> dict[str, float]:
    return {labels[label]: value for labels, value in scrape[PREFIX + name]}


def only(scrape: Scrape, name: str) -> float:
    [(_, value)] = scrape[PREFIX + name]
    return value


def test_a_scrape_says_what_the_status_says(scraped):
    scrape, status = scraped
    assert status["state"] == "in_force"
    assert status["metrics"] == "on"
    modes = status["by_num_steps"]
    assert modes.keys() == {"0", "3"}
    assert by(scrape, "steps_total", "num_steps") == {n: m["steps"] for n, m in modes.items()}
    assert by(scrape, "switches_total", "reason") == status["switches_by_reason"]
    assert by(scrape, "passthrough_total", "reason") == status["passthrough"]
    assert only(scrape, "num_steps") == status["num_steps"]
    assert only(scrape, "decision_seconds_count") >= status["steps"] > 0
    assert only(scrape, "cold_requests") == 0
    assert 1 <= only(scrape, "accept_length") <= 4
    speeds = by(scrape, "tokens_per_second", "kind")
    assert speeds["predicted"] == Foresees.EXPECTED[str(status["num_steps"])]
    assert speeds["actual"] > 0


def test_info_says_what_is_in_force(scraped):
    scrape, status = scraped
    [(labels, one)] = scrape[f"{PREFIX}info"]
    assert one == 1
    names = ("policy", "version", "draft_state", "state")
    assert {name: labels[name] for name in names} == {name: status[name] for name in names}


def test_labels_are_those_of_sglangs_own_metrics(scraped):
    scrape, _ = scraped
    [(theirs, _)] = scrape["sglang:token_usage"]
    ours = [series for name, series in scrape.items() if name.startswith(PREFIX)]
    assert len(ours) >= 11
    for labels, _ in (one for series in ours for one in series):
        assert theirs.items() <= labels.items()


def test_the_dashboard_asks_for_what_there_is(scraped):
    scrape, _ = scraped
    of_prometheus = {"instance", "job"}
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    asked: set[str] = set()
    for expression in (target["expr"] for panel in panels for target in panel["targets"]):
        # prometheus_client 0.22 and later hand out sglang_ where Prometheus asks for OpenMetrics.
        [name] = re.findall(r'__name__=~"sglang\[:_\](\w+)"', expression)
        name = f"sglang:{name}"
        assert name in scrape, name
        asked.add(name)
        labels = set(re.findall(r"(\w+)=~?\"", expression)) - {"__name__"}
        for grouping in re.findall(r"by \(([^)]*)\)", expression):
            labels.update(grouping.split(", "))
        for present, _ in scrape[name]:
            assert labels <= present.keys() | of_prometheus, expression
    ours = {name for name in scrape if name.startswith(PREFIX)}
    of_histogram = {f"{PREFIX}decision_seconds_{part}" for part in ("sum", "count")}
    assert {name for name in asked if name.startswith(PREFIX)} == ours - of_histogram
