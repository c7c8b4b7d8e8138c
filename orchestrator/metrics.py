"""Counters of one worker process, safe from any thread: claims, lock holds, ends, tokens and cost.

``take`` hands out what has come since the last time, to be added to the ``minutes`` table; ``families`` are the process's
own totals for Prometheus, ``queue_families`` those of the whole queue. How long a claim's FOR UPDATE lock was held is the
price that ADR-0004 watches. The names are explained in docs/metrics.md; a test compares.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from orchestrator.database.engine import WAIT_BOUNDS
from orchestrator.domain import histogram
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.snapshot import LockHold, WorkerRow
from orchestrator.domain.words import OutcomeClass
from orchestrator.repositories.health import QueueNumbers
from orchestrator.repositories.minutes import MinuteCounts

if TYPE_CHECKING:
    from prometheus_client import Metric

FAILED = frozenset(
    {
        OutcomeClass.TRANSIENT,
        OutcomeClass.PERMANENT,
        OutcomeClass.TIMED_OUT,
        OutcomeClass.STALLED,
        OutcomeClass.OVER_BUDGET,
    }
)
"""Ends of an attempt that count as failures; what is neither done nor failed was limited, stopped, asked or lost."""

BATCHES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
CLAIM_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
WAKE_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
QUEUE_SECONDS = (0.01, 0.1, 1.0, 10.0, 60.0, 300.0, 1800.0, 3600.0, 14400.0, 86400.0)
POOL_SECONDS = WAIT_BOUNDS
SECONDS = (0.1, 1.0, 10.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 14400.0, 43200.0)


class Metrics:
    """What one worker process did."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: dict[str, MinuteCounts] = {}
        self._totals: dict[str, MinuteCounts] = {}
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._batches = _Histogram(BATCHES)
        self._seconds = _Histogram(SECONDS)
        self._claim_seconds = _Histogram(CLAIM_SECONDS)
        self._queue_seconds = _Histogram(QUEUE_SECONDS)
        self._wake_seconds = _Histogram(WAKE_SECONDS)

    def claimed(
        self,
        agents: Iterable[str],
        hold_seconds: float,
        *,
        seconds: float | None = None,
        waits: Iterable[float | None] = (),
        woken: float | None = None,
    ) -> None:
        """Count one claim statement that took a task for each of *agents*, or, without any, an empty one.

        An empty claim locked nothing: its time is not a hold. *seconds* is what the whole claim took, *waits* are how long
        its tasks could have run already, *woken* is how long ago a hint said that there was work.
        """
        names = list(agents)
        with self._lock:
            if seconds is not None:
                self._claim_seconds.add(seconds)
            if woken is not None:
                self._wake_seconds.add(woken)
            for wait in waits:
                if wait is not None:
                    self._queue_seconds.add(max(0.0, wait))
            for counts in self._both(""):
                if not names:
                    counts.empty_claims += 1
                    continue
                counts.claims += 1
                counts.hold_ms += hold_seconds * 1000
                if counts.holds is None:
                    counts.holds = [0] * histogram.BUCKETS
                counts.holds[histogram.bucket(hold_seconds * 1000)] += 1
            for name in names:
                for counts in self._both(name):
                    counts.claims += 1

    def ended(self, ends: Iterable[tuple[str, Outcome]]) -> None:
        """Count the attempts that one transaction recorded: pairs of the agent's name and the outcome."""
        batch = list(ends)
        if not batch:
            return
        with self._lock:
            self._batches.add(len(batch))
            for agent, outcome in batch:
                self._outcomes[agent, outcome.status.value] += 1
                self._seconds.add(outcome.elapsed)
                usage = outcome.usage
                for counts in self._both(agent):
                    if outcome.status is OutcomeClass.DONE:
                        counts.done += 1
                    elif outcome.status in FAILED:
                        counts.failed += 1
                    else:
                        counts.other += 1
                    if usage is None:
                        continue
                    tokens = usage.total_tokens
                    if tokens is None and (usage.input_tokens is not None or usage.output_tokens is not None):
                        tokens = (usage.input_tokens or 0) + (usage.output_tokens or 0)
                    counts.tokens += tokens or 0
                    if usage.cost_usd is None:
                        counts.unknown_cost += 1
                    else:
                        counts.cost_usd += usage.cost_usd

    def take(self) -> list[MinuteCounts]:
        """Return what has come since the last time and begin anew. ``give_back`` undoes it."""
        with self._lock:
            new, self._new = self._new, {}
        return list(new.values())

    def give_back(self, counts: Iterable[MinuteCounts]) -> None:
        """Take back what could not be written."""
        with self._lock:
            for each in counts:
                _add(self._new.setdefault(each.agent, MinuteCounts(each.agent)), each)

    def hold(self) -> LockHold:
        """How long this process's claims held their locks, since it started."""
        with self._lock:
            counts = self._totals.get("")
            holds = list(counts.holds or ()) if counts is not None else []
            total = counts.hold_ms if counts is not None else 0.0
        number = sum(holds)
        if not number:
            return LockHold()
        return LockHold(total / number, histogram.quantile(holds, 0.5), histogram.quantile(holds, 0.99), number)

    def families(self) -> Iterator[Metric]:
        """This process's totals as metrics of Prometheus."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        with self._lock:
            totals = sorted(self._totals.values(), key=lambda each: each.agent)
            agents = [replace(each) for each in totals if each.agent]
            own = replace(self._totals.get("", MinuteCounts("")))
            holds = list(own.holds or [0] * histogram.BUCKETS)
            outcomes = sorted(self._outcomes.items())
            batches, seconds = self._batches.copy(), self._seconds.copy()
            claim, queue, wake = (
                each.copy() for each in (self._claim_seconds, self._queue_seconds, self._wake_seconds)
            )

        claims = CounterMetricFamily("orchestrator_worker_claims_total", "Claim statements.", labels=["result"])
        claims.add_metric(["tasks"], own.claims)
        claims.add_metric(["empty"], own.empty_claims)
        yield claims
        ended = CounterMetricFamily(
            "orchestrator_worker_attempts_total", "Recorded attempts.", labels=["agent", "outcome"]
        )
        for (agent, outcome), number in outcomes:
            ended.add_metric([agent, outcome], number)
        yield ended
        for name, what, value in (
            ("tasks_claimed", "Tasks claimed.", "claims"),
            ("tokens", "Tokens used by recorded attempts, as far as known.", "tokens"),
            ("cost_usd", "Cost of recorded attempts in USD, as far as known.", "cost_usd"),
            ("unknown_cost_attempts", "Recorded attempts of whose cost nothing is known.", "unknown_cost"),
        ):
            family = CounterMetricFamily(f"orchestrator_worker_{name}_total", what, labels=["agent"])
            for each in agents:
                family.add_metric([each.agent], getattr(each, value))
            yield family
        yield HistogramMetricFamily(
            "orchestrator_worker_lock_hold_seconds",
            "From FOR UPDATE sent to COMMIT answered, of claims that took tasks.",
            buckets=_hold_buckets(holds),
            sum_value=own.hold_ms / 1000,
        )
        for name, what, found in (
            ("record_batch_size", "Attempts recorded by one transaction.", batches),
            ("run_seconds", "How long recorded attempts took.", seconds),
            ("claim_seconds", "How long claims took, with the wait for a connection, also of empty ones.", claim),
            ("queue_seconds", "How long claimed tasks could have run already.", queue),
            ("wakeup_seconds", "From the hint that there is work to the claim that took some.", wake),
        ):
            yield HistogramMetricFamily(
                f"orchestrator_worker_{name}", what, buckets=found.buckets(), sum_value=found.total
            )

    def _both(self, agent: str) -> tuple[MinuteCounts, MinuteCounts]:
        new = self._new.get(agent)
        if new is None:
            new = self._new[agent] = MinuteCounts(agent)
        total = self._totals.get(agent)
        if total is None:
            total = self._totals[agent] = MinuteCounts(agent)
        return new, total


def _add(to: MinuteCounts, more: MinuteCounts) -> None:
    to.claims += more.claims
    to.empty_claims += more.empty_claims
    to.hold_ms += more.hold_ms
    if more.holds is not None:
        to.holds = histogram.added([to.holds or [], more.holds])
    to.done += more.done
    to.failed += more.failed
    to.other += more.other
    to.tokens += more.tokens
    to.cost_usd += more.cost_usd
    to.unknown_cost += more.unknown_cost


@dataclass(slots=True)
class _Histogram:
    """Counts of values by upper bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def add(self, value: float) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> _Histogram:
        return _Histogram(self.bounds, list(self.counts), self.total)

    def buckets(self) -> list[tuple[str, float]]:
        """Bounds and cumulative counts."""
        return _buckets(self.bounds, self.counts or [0] * (len(self.bounds) + 1))


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    names = [*(f"{bound:.6g}" for bound in bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))


def _hold_buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    return _buckets([bound / 1000 for bound in histogram.BOUNDS_MS], counts)


def histogram_of(name: str, what: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
    """A histogram without labels, of *counts* by *bounds* and one more."""
    from prometheus_client.core import HistogramMetricFamily

    return HistogramMetricFamily(name, what, buckets=_buckets(bounds, counts), sum_value=total)


def gauge(name: str, what: str, value: float) -> Metric:
    """A gauge without labels."""
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(name, what, value=value)


def counter(name: str, what: str, value: float) -> Metric:
    """A counter without labels; its name ends with ``_total``."""
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(name, what, value=value)


def text(families: Iterable[Metric]) -> str:
    """*families* in the text format of Prometheus."""
    from prometheus_client import CollectorRegistry, generate_latest

    class Collected:
        def collect(self) -> Iterable[Metric]:
            return families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected())
    return generate_latest(registry).decode()


# -- the queue ----------------------------------------------------------------------------------------------------

STATES = ("ready", "retrying", "not_due", "held", "blocked", "waiting", "running")


def queue_families(found: QueueNumbers | None) -> Iterator[Metric]:
    """The queue as metrics of Prometheus; None: it could not be read."""
    from prometheus_client.core import GaugeHistogramMetricFamily, GaugeMetricFamily

    def labelled(name: str, what: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"orchestrator_{name}", what, labels=labels)

    yield gauge("orchestrator_up", "Whether the queue could be read.", 0 if found is None else 1)
    if found is None:
        return
    tasks = labelled("tasks", "Live tasks; counting stops at 25,000 for each agent and state.", "agent", "state")
    oldest = labelled("oldest_wait_seconds", "Since when the oldest ready task could run.", "agent")
    paused = labelled("agent_paused", "Whether the agent is paused.", "agent")
    live = labelled("agent_live_workers", "Live workers that know the agent.", "agent")
    for agent in found.agents:
        for state in STATES:
            number = getattr(agent, state)
            tasks.add_metric([agent.name, state], number if isinstance(number, int) else number.n)
        since = agent.oldest_ready_at
        wait = 0.0 if since is None else max(0.0, (found.now - since).total_seconds())
        oldest.add_metric([agent.name], wait)
        paused.add_metric([agent.name], agent.state == "paused")
        live.add_metric([agent.name], agent.live_workers)
    yield from (tasks, oldest, paused, live)

    workers = labelled("workers", "Workers that have not signed off.", "state")
    states = Counter(each.state or "live" for each in found.workers)
    for state in ("live", "silent", "draining", "stopping", "dead"):
        workers.add_metric([state], states[state])
    yield workers
    yield gauge("orchestrator_slots", "Slots of all workers that live.", sum(_slots(each) for each in found.workers))

    attempts = labelled("attempts_last_hour", "Attempts that ended in the last hour.", "agent", "end")
    tokens = labelled("tokens_last_hour", "Tokens of those, as far as known.", "agent")
    cost = labelled("cost_usd_last_hour", "Cost of those in USD, as far as known.", "agent")
    unknown = labelled("unknown_cost_attempts_last_hour", "Those of whose cost nothing is known.", "agent")
    for name, hour in sorted(found.hours.items()):
        for end in ("done", "failed", "other"):
            attempts.add_metric([name, end], getattr(hour, end))
        tokens.add_metric([name], hour.tokens)
        cost.add_metric([name], hour.cost_usd)
        unknown.add_metric([name], hour.unknown_cost)
    yield from (attempts, tokens, cost, unknown)

    yield GaugeHistogramMetricFamily(
        "orchestrator_lock_hold_last_hour_seconds",
        "Lock hold of the claims of all workers in the last hour.",
        buckets=_hold_buckets(found.holds),
        gsum_value=found.hold_ms / 1000,
    )
    alerts = labelled("alerts", "What a person should look at.", "kind")
    for kind, number in sorted(Counter(each.kind for each in found.alerts).items()):
        alerts.add_metric([kind], number)
    yield alerts
    finished = labelled("finished_tasks_estimate", "Ended tasks as the planner estimates them.", "status")
    for status, estimate in found.finished.items():
        if estimate is not None:
            finished.add_metric([status], estimate)
    yield finished
    what = "The oldest transaction that keeps vacuum from removing dead rows."
    yield gauge("orchestrator_oldest_transaction_seconds", what, found.oldest_transaction)
    yield gauge("orchestrator_lock_waiters", "Sessions of ours that wait for a lock now.", found.lock_waiters)
    yield gauge("orchestrator_longest_lock_wait_seconds", "How long the longest of them has waited.", found.lock_wait)


def _slots(worker: WorkerRow) -> int:
    return 0 if worker.state in ("silent", "dead") else worker.slots


__all__ = ["FAILED", "POOL_SECONDS", "Metrics", "counter", "gauge", "histogram_of", "queue_families", "text"]
