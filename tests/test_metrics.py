"""Counters, the histogram of lock holds, and the minutes table."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker

from orchestrator import metrics
from orchestrator.domain import histogram
from orchestrator.domain.outcome import Outcome, Usage
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput
from orchestrator.metrics import Metrics
from orchestrator.repositories.agents import AgentRepository
from orchestrator.repositories.filters import TaskFilter
from orchestrator.repositories.health import HealthRepository
from orchestrator.repositories.minutes import MinuteCounts, MinuteRepository
from orchestrator.repositories.operations import OperationsRepository
from orchestrator.service import Orchestrator
from orchestrator.settings import Settings
from orchestrator.worker import Watchdog, Worker
from orchestrator.worker.exposition import METRICS, Exposition
from tests.commands import Cli
from tests.conftest import WaitUntil
from tests.making import BROKEN, DONE, Making
from tests.servers import free_port


def samples(text: str) -> dict[tuple[Any, ...], float]:
    """The samples of *text* by name and labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_quantiles_are_exact_to_a_bucket() -> None:
    """Each quantile lies within a quarter of the true value, also in the last and in the first bucket."""
    values = [0.01, 0.4, 0.9, 2.0, 2.1, 2.2, 3.0, 7.0, 40.0, 500.0]
    counts = [0] * histogram.BUCKETS
    for value in values:
        counts[histogram.bucket(value)] += 1
    for q, true in [(0.1, 0.01), (0.5, 2.1), (0.9, 40.0), (1.0, 500.0)]:
        found = histogram.quantile(counts, q)
        assert found is not None
        assert true / 1.3 - 0.05 <= found <= true * 1.3 + 0.05
    assert histogram.quantile([], 0.5) is None


def test_what_is_longer_than_every_bound_is_counted() -> None:
    """A hold of an hour is in the last bucket, and a quantile of it is the longest bound, not an error."""
    counts = [0] * histogram.BUCKETS
    counts[histogram.bucket(3_600_000)] += 1
    assert histogram.quantile(counts, 0.5) == histogram.BOUNDS_MS[-1]


def test_empty_claims_are_no_holds() -> None:
    """A claim that found nothing locked nothing: it is counted apart and moves no quantile."""
    counted = Metrics()
    counted.claimed([], 5.0)
    counted.claimed(["a", "a", "b"], 0.002)
    hold = counted.hold()
    assert hold.count == 1
    assert hold.mean == pytest.approx(2.0)
    counts = {each.agent: each for each in counted.take()}
    assert (counts[""].claims, counts[""].empty_claims) == (1, 1)
    assert (counts["a"].claims, counts["b"].claims) == (2, 1)


def test_ends_are_counted_by_what_they_mean() -> None:
    """Done, failed and all else are told apart; unknown cost is counted, never added as 0."""
    counted = Metrics()
    counted.ended(
        [
            ("a", Outcome(OutcomeClass.DONE, usage=Usage(input_tokens=3, output_tokens=4, cost_usd=0.5))),
            ("a", Outcome(OutcomeClass.TRANSIENT, usage=Usage(total_tokens=10))),
            ("a", Outcome(OutcomeClass.INTERRUPTED)),
        ]
    )
    (counts,) = counted.take()
    assert (counts.done, counts.failed, counts.other) == (1, 1, 1)
    assert (counts.tokens, counts.cost_usd, counts.unknown_cost) == (17, 0.5, 1)
    assert counted.take() == []


def test_given_back_counts_come_again() -> None:
    """Counts that could not be written are added to what came meanwhile."""
    counted = Metrics()
    counted.claimed(["a"], 0.001)
    taken = counted.take()
    counted.claimed(["a"], 0.001)
    counted.give_back(taken)
    counts = {each.agent: each for each in counted.take()}
    assert counts["a"].claims == 2
    assert sum(counts[""].holds or []) == 2


def test_counting_from_many_threads_loses_nothing() -> None:
    """Eight threads count 500 claims each: 4,000."""
    counted = Metrics()

    def count() -> None:
        for _ in range(500):
            counted.claimed(["a"], 0.001)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted.hold().count == 4_000


def test_prometheus_text_escapes_names() -> None:
    """A name with quotes and line ends comes back whole from a parser of the format, and buckets are cumulative."""
    counted = Metrics()
    counted.claimed(['we"ird\nname'], 0.001)
    counted.ended([('we"ird\nname', Outcome(OutcomeClass.RATE_LIMITED, elapsed=70.0))] * 3)
    found = samples(metrics.text(counted.families()))
    assert found["orchestrator_worker_tasks_claimed_total", ("agent", 'we"ird\nname')] == 1
    outcome = (("agent", 'we"ird\nname'), ("outcome", "rate_limited"))
    assert found["orchestrator_worker_attempts_total", *outcome] == 3
    for name, number in (("lock_hold_seconds", 1), ("record_batch_size", 1), ("run_seconds", 3)):
        buckets = [value for key, value in found.items() if key[0] == f"orchestrator_worker_{name}_bucket"]
        assert buckets == sorted(buckets)
        assert buckets[-1] == found[f"orchestrator_worker_{name}_count",] == number
    assert found["orchestrator_worker_run_seconds_sum",] == 210
    assert found["orchestrator_worker_run_seconds_bucket", ("le", "60")] == 0
    assert found["orchestrator_worker_record_batch_size_bucket", ("le", "5")] == 1


def test_counters_are_served_over_http() -> None:
    """GET /metrics on the loopback address answers with the text; any other path is not found; the port closes."""
    exposition = Exposition({"/metrics": lambda: (200, METRICS, "a_total 1\n")}, 0)
    url = f"http://127.0.0.1:{exposition.port}"
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        assert answer.read() == b"a_total 1\n"
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{url}/other", timeout=10)
    refused.value.close()
    with pytest.raises(InvalidInput, match=str(exposition.port)):
        Exposition({}, exposition.port)
    exposition.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/metrics", timeout=10)


def test_minutes_of_several_workers_add_up(engine: Engine) -> None:
    """Counts flushed in parts, by two workers, are one sum; so are their holds."""
    minutes = MinuteRepository(engine)
    one, two = uuid4(), uuid4()
    for worker, milliseconds in [(one, 1.0), (one, 1.0), (two, 1.0), (two, 9.0)]:
        holds = [0] * histogram.BUCKETS
        holds[histogram.bucket(milliseconds)] = 1
        minutes.add(
            worker,
            [
                MinuteCounts("", claims=1, hold_ms=milliseconds, holds=holds),
                MinuteCounts("a", claims=2, done=1, cost_usd=0.25, unknown_cost=1),
            ],
        )
    hold = minutes.lock_hold()
    assert hold.count == 4
    assert hold.mean == pytest.approx(3.0)
    assert hold.p50 == pytest.approx(1.0, rel=0.3)
    assert hold.p99 == pytest.approx(9.0, rel=0.3)


def test_the_last_minutes_have_no_gaps(engine: Engine, sessions: sessionmaker[Session]) -> None:
    """Sixty complete minutes come back, oldest first; those without work are zeros, the present one is left out."""
    minutes = MinuteRepository(engine)
    minutes.add(uuid4(), [MinuteCounts("a", done=3, failed=1, cost_usd=0.5, unknown_cost=2)])
    with sessions.begin() as session:
        session.execute(text("UPDATE minutes SET minute = minute - interval '2 minutes'"))
    minutes.add(uuid4(), [MinuteCounts("a", done=100)])
    last = minutes.last()
    assert len(last) == 60
    assert [each.at for each in last] == sorted(each.at for each in last)
    assert sum(each.done for each in last) == 3
    (busy,) = [each for each in last if each.done]
    assert (busy.failed, busy.usd, busy.unknown_cost) == (1, 0.5, 2)


def test_no_holds_are_unknown_not_zero(engine: Engine) -> None:
    """Without a claim in the last hour mean and quantiles are unknown."""
    hold = MinuteRepository(engine).lock_hold()
    assert (hold.mean, hold.p50, hold.p99, hold.count) == (None, None, None, 0)


# -- the queue ----------------------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[1] / "docs"


def test_the_queue_in_numbers(engine: Engine, database_url: str, cli: Cli) -> None:
    """Tasks by agent and state, waits, workers, alerts and the last hour are as they are in the tables."""
    made = Making.on(engine)
    done, broken, _running = made.add(), made.add(), made.add()
    made.run(done, DONE)
    made.run(broken, BROKEN)
    made.claim(1)
    held, ready = made.add(), made.add()
    child = made.add(after=(ready,))
    made.add("lonely")
    OperationsRepository(engine).hold(TaskFilter(ids=[held]), actor="ops")
    AgentRepository(engine).pause("coder", actor="ops")
    made.query("UPDATE tasks SET available_at = now() - interval '5 minutes' WHERE id = :id", id=ready)
    holds = [0] * histogram.BUCKETS
    holds[histogram.bucket(2.0)] = 4
    minutes = MinuteRepository(engine)
    minutes.add(made.worker, [MinuteCounts("", claims=4, hold_ms=8.0, holds=holds)])
    minutes.add(made.worker, [MinuteCounts("coder", done=1, failed=1, tokens=30, cost_usd=0.5, unknown_cost=1)])

    found = samples(metrics.text(metrics.queue_families(HealthRepository(engine, database_url).numbers())))
    coder = ("agent", "coder")
    assert child
    assert {key[2][1]: value for key, value in found.items() if key[:2] == ("orchestrator_tasks", coder)} == {
        "ready": 1,
        "retrying": 0,
        "not_due": 0,
        "held": 1,
        "blocked": 1,
        "waiting": 0,
        "running": 1,
    }
    assert found["orchestrator_up",] == 1
    assert found["orchestrator_oldest_wait_seconds", coder] == pytest.approx(300, abs=60)
    assert found["orchestrator_agent_paused", coder] == 1
    assert found["orchestrator_agent_live_workers", coder] == 1
    assert found["orchestrator_agent_live_workers", ("agent", "lonely")] == 0
    assert found["orchestrator_workers", ("state", "live")] == 1
    assert found["orchestrator_slots",] == 4
    assert found["orchestrator_attempts_last_hour", coder, ("end", "failed")] == 1
    assert found["orchestrator_tokens_last_hour", coder] == 30
    assert found["orchestrator_cost_usd_last_hour", coder] == 0.5
    assert found["orchestrator_alerts", ("kind", "no_worker")] == 1
    assert found["orchestrator_finished_tasks_estimate", ("status", "failed")] == 1
    assert found["orchestrator_lock_hold_last_hour_seconds_bucket", ("le", "+Inf")] == 4
    assert found["orchestrator_lock_hold_last_hour_seconds_gsum",] == pytest.approx(0.008)

    assert samples(cli("metrics").out).keys() == found.keys()
    document = cli("metrics", "--json").json["metrics"]
    assert {each["name"] for each in document} == {key[0] for key in found}
    assert {"name": "orchestrator_slots", "labels": {}, "value": 4.0} in document


def test_a_queue_that_cannot_be_read_is_down() -> None:
    """Without the database there is one number, and it says so."""
    assert samples(metrics.text(metrics.queue_families(None))) == {("orchestrator_up",): 0}


def test_a_watchdog_serves_the_queue_and_its_sweeps(database_url: str, engine: Engine, wait_until: WaitUntil) -> None:
    """While it runs, its port answers with both; afterwards it is closed."""
    Making.on(engine).add()
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    with Orchestrator(database_url, settings=Settings(sweep=0.05)) as orchestrator:
        dog = Watchdog(orchestrator, metrics_port=port)
        thread = threading.Thread(target=dog.run)
        thread.start()
        try:

            def told() -> dict[tuple[Any, ...], float] | None:
                try:
                    with urllib.request.urlopen(url, timeout=10) as answer:
                        found = samples(answer.read().decode())
                except urllib.error.URLError:
                    return None
                return found if found["orchestrator_watchdog_sweeps_total",] else None

            found = wait_until(told)
        finally:
            dog.stop()
            thread.join()
    assert found is not None
    assert found["orchestrator_tasks", ("agent", "coder"), ("state", "ready")] == 1
    assert found["orchestrator_watchdog_failed_sweeps_total",] == 0
    assert found["orchestrator_watchdog_last_sweep_timestamp_seconds",] > 1.7e9
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


def test_what_claims_cost_and_what_they_waited_for(database_url: str, engine: Engine) -> None:
    """Of a real worker: claims, the wait in the queue, the wake-up by a hint, and waits for connections are counted."""
    from tests.working import FakeAgent, Working, orchestrator

    with orchestrator(database_url) as orc:
        worker = Worker(orc, [FakeAgent("coder")], 2, signals=False)
        with Working(worker):
            ids = [orc.add("coder").id for _ in range(3)]
            for id_ in ids:
                orc.wait(id_, timeout=30)
        found = samples(worker._metrics_text())
    assert found["orchestrator_worker_queue_seconds_count",] == 3
    assert found["orchestrator_worker_claim_seconds_count",] >= 1
    assert found["orchestrator_worker_claim_seconds_sum",] > 0
    assert found["orchestrator_worker_pool_wait_seconds_count",] >= 3
    claims = found["orchestrator_worker_claims_total", ("result", "tasks")]
    assert found["orchestrator_worker_wakeup_seconds_count",] <= claims


def test_waits_are_counted_by_what_they_were() -> None:
    """A wait before its time is none, one that is not known is left out, and so is the hint of a busy worker."""
    counted = Metrics()
    counted.claimed(["a", "a", "b"], 0.001, seconds=0.02, waits=[30.0, -1.0, None], woken=0.003)
    counted.claimed([], 0.001, seconds=0.001)
    found = samples(metrics.text(counted.families()))
    assert found["orchestrator_worker_queue_seconds_count",] == 2
    assert found["orchestrator_worker_queue_seconds_sum",] == 30
    assert found["orchestrator_worker_claim_seconds_count",] == 2
    assert found["orchestrator_worker_claim_seconds_bucket", ("le", "0.025")] == 2
    assert found["orchestrator_worker_wakeup_seconds_bucket", ("le", "0.001")] == 0
    assert found["orchestrator_worker_wakeup_seconds_bucket", ("le", "0.005")] == 1


def test_a_wait_for_a_lock_is_seen(database_url: str, engine: Engine, wait_until: WaitUntil) -> None:
    """A session of ours that waits for a row is counted, with how long; nobody waits afterwards."""
    made = Making.on(engine)
    made.add()
    health = HealthRepository(engine, database_url)
    with engine.connect() as holder, Orchestrator(database_url) as beside:
        holder.execute(text("SELECT FROM workers FOR UPDATE"))
        thread = threading.Thread(target=lambda: beside.renew(made.worker))
        thread.start()
        wait_until(lambda: health.numbers().lock_waiters == 1)
        assert health.numbers().lock_wait > 0
        holder.rollback()
        thread.join()
    found = health.numbers()
    assert (found.lock_waiters, found.lock_wait) == (0, 0.0)


# -- the documentation --------------------------------------------------------------------------------------------


def families(text: str) -> dict[str, str]:
    """Names as they are asked for in a query, without suffixes of histograms, and their types."""
    found = {}
    for family in text_string_to_metric_families(text):
        name = family.name
        if name.endswith(("_gcount", "_gsum")):
            continue
        found[f"{name}_total" if family.type == "counter" else name] = family.type
    return found


@pytest.fixture
def told(database_url: str, engine: Engine) -> dict[str, str]:
    """Every metric that there is, with its type."""
    Making.on(engine).add()
    with Orchestrator(database_url, settings=Settings()) as orchestrator:
        dog = Watchdog(orchestrator)
        from orchestrator.agents.functions import agent

        @agent("coder")
        async def coder(ctx: Any) -> None: ...

        worker = Worker(orchestrator, [coder])
        return families(dog._told.text()) | families(worker._metrics_text())


def test_every_metric_is_documented(told: dict[str, str]) -> None:
    """docs/metrics.md names every metric, and none that there is not."""
    documented = re.findall(r"(?m)^\| `(orchestrator_\w+)` \|", (DOCS / "metrics.md").read_text())
    assert len(documented) == len(set(documented))
    assert set(documented) == set(told)


UNWATCHED = {
    "orchestrator_watchdog_sweeps_total",
    "orchestrator_worker_cost_usd_total",
    "orchestrator_worker_running",
    "orchestrator_worker_slots",
    "orchestrator_worker_tasks_claimed_total",
    "orchestrator_worker_tokens_total",
    "orchestrator_worker_unknown_cost_attempts_total",
}
"""What no rule and no panel asks for: of the whole queue the watchdog's own numbers say the same."""


def test_rules_and_dashboard_ask_for_metrics_that_there_are(told: dict[str, str]) -> None:
    """Each query of the alert rules and of the Grafana dashboard names real metrics, in the form that fits their type."""
    rules = yaml.safe_load((DOCS / "monitoring" / "alerts.yml").read_text())["groups"][0]["rules"]
    dashboard = json.loads((DOCS / "monitoring" / "grafana.json").read_text())
    queries = [rule["expr"] for rule in rules]
    queries += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    real = {f"{name}_bucket" if kind in ("histogram", "gaugehistogram") else name for name, kind in told.items()}
    for query in queries:
        named = set(re.findall(r"orchestrator_\w+", query))
        assert named
        assert named <= real, query
        assert query.count("(") == query.count(")")
    assert len({rule["alert"] for rule in rules}) == len(rules)
    assert all({"summary", "remedy"} <= rule["annotations"].keys() for rule in rules)
    kinds = {kind for query in queries for kind in re.findall(r'kind="(\w+)"', query)}
    from orchestrator.domain.alerts import ORDER

    # Every kind of alert rings: by a rule of its own, or by one on the numbers that it is made of.
    numbers = {"no_worker", "worker_dead", "worker_silent", "queue_not_draining", "failures_spike", "long_transaction",
               "lock_hold", "oldest_wait"}  # fmt: skip
    assert kinds == set(ORDER) - numbers
    shown = set(re.findall(r"orchestrator_\w+", " ".join(queries)))
    assert {each for each in real if "_last_hour" not in each} - shown == UNWATCHED
    for rule in rules:
        command = rule["annotations"]["remedy"].split()
        from orchestrator.cli.commands import COMMANDS

        assert command[0] == "orchestrator"
        assert command[1] in COMMANDS
