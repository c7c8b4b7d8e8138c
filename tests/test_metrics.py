"""Counters, the histogram of lock holds, and the minutes table."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.domain import histogram
from orchestrator.domain.outcome import Outcome, Usage
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput
from orchestrator.metrics import Metrics
from orchestrator.repositories.minutes import MinuteCounts, MinuteRepository
from orchestrator.worker.exposition import Exposition


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
    metrics = Metrics()
    metrics.claimed([], 5.0)
    metrics.claimed(["a", "a", "b"], 0.002)
    hold = metrics.hold()
    assert hold.count == 1
    assert hold.mean == pytest.approx(2.0)
    counts = {each.agent: each for each in metrics.take()}
    assert (counts[""].claims, counts[""].empty_claims) == (1, 1)
    assert (counts["a"].claims, counts["b"].claims) == (2, 1)


def test_ends_are_counted_by_what_they_mean() -> None:
    """Done, failed and all else are told apart; unknown cost is counted, never added as 0."""
    metrics = Metrics()
    metrics.ended(
        [
            ("a", Outcome(OutcomeClass.DONE, usage=Usage(input_tokens=3, output_tokens=4, cost_usd=0.5))),
            ("a", Outcome(OutcomeClass.TRANSIENT, usage=Usage(total_tokens=10))),
            ("a", Outcome(OutcomeClass.INTERRUPTED)),
        ]
    )
    (counts,) = metrics.take()
    assert (counts.done, counts.failed, counts.other) == (1, 1, 1)
    assert (counts.tokens, counts.cost_usd, counts.unknown_cost) == (17, 0.5, 1)
    assert metrics.take() == []


def test_given_back_counts_come_again() -> None:
    """Counts that could not be written are added to what came meanwhile."""
    metrics = Metrics()
    metrics.claimed(["a"], 0.001)
    taken = metrics.take()
    metrics.claimed(["a"], 0.001)
    metrics.give_back(taken)
    counts = {each.agent: each for each in metrics.take()}
    assert counts["a"].claims == 2
    assert sum(counts[""].holds or []) == 2


def test_counting_from_many_threads_loses_nothing() -> None:
    """Eight threads count 500 claims each: 4,000."""
    metrics = Metrics()

    def count() -> None:
        for _ in range(500):
            metrics.claimed(["a"], 0.001)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.hold().count == 4_000


def test_prometheus_text_escapes_names() -> None:
    """A name with quotes and line ends cannot break the format, and buckets are cumulative."""
    metrics = Metrics()
    metrics.claimed(['we"ird\nname'], 0.001)
    lines = metrics.text().splitlines()
    assert 'orchestrator_worker_tasks_claimed_total{agent="we\\"ird\\nname"} 1' in lines
    buckets = [int(line.rsplit(" ", 1)[1]) for line in lines if "_bucket{" in line]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 1


def test_counters_are_served_over_http() -> None:
    """GET /metrics on the loopback address answers with the text; any other path is not found; the port closes."""
    exposition = Exposition(lambda: "a_total 1\n", 0)
    url = f"http://127.0.0.1:{exposition.port}"
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        assert answer.read() == b"a_total 1\n"
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{url}/other", timeout=10)
    refused.value.close()
    with pytest.raises(InvalidInput, match=str(exposition.port)):
        Exposition(str, exposition.port)
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
