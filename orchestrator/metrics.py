"""Counters of one worker process, safe from any thread: claims, lock holds, ends, tokens and cost.

``take`` hands out what has come since the last time, to be added to the ``minutes`` table; ``text`` is the process's own
totals for Prometheus. How long a claim's FOR UPDATE lock was held is the price that ADR-0004 watches.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from orchestrator.domain import histogram
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.snapshot import LockHold
from orchestrator.domain.words import OutcomeClass
from orchestrator.repositories.minutes import MinuteCounts

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


class Metrics:
    """What one worker process did."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: dict[str, MinuteCounts] = {}
        self._totals: dict[str, MinuteCounts] = {}

    def claimed(self, agents: Iterable[str], hold_seconds: float) -> None:
        """Count one claim statement that took a task for each of *agents*, or, without any, an empty one.

        An empty claim locked nothing: its time is not a hold.
        """
        names = list(agents)
        with self._lock:
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
        """Count recorded attempts: pairs of the agent's name and the outcome."""
        with self._lock:
            for agent, outcome in ends:
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

    def text(self) -> str:
        """This process's totals in the text format of Prometheus."""
        with self._lock:
            totals = sorted(self._totals.values(), key=lambda each: each.agent)
            agents = [each for each in totals if each.agent]
            own = self._totals.get("", MinuteCounts(""))
            holds = list(own.holds or [0] * histogram.BUCKETS)
            lines = [
                "# HELP orchestrator_worker_claims_total Claim statements of this process.",
                "# TYPE orchestrator_worker_claims_total counter",
                f'orchestrator_worker_claims_total{{result="tasks"}} {own.claims}',
                f'orchestrator_worker_claims_total{{result="empty"}} {own.empty_claims}',
                "# HELP orchestrator_worker_tasks_claimed_total Tasks claimed by this process.",
                "# TYPE orchestrator_worker_tasks_claimed_total counter",
                *(f"orchestrator_worker_tasks_claimed_total{{{_label(each)}}} {each.claims}" for each in agents),
                "# HELP orchestrator_worker_attempts_total Recorded attempts of this process.",
                "# TYPE orchestrator_worker_attempts_total counter",
            ]
            for each in agents:
                for end, count in (("done", each.done), ("failed", each.failed), ("other", each.other)):
                    lines.append(f'orchestrator_worker_attempts_total{{{_label(each)},end="{end}"}} {count}')
            lines += [
                "# HELP orchestrator_worker_tokens_total Tokens used by recorded attempts, as far as known.",
                "# TYPE orchestrator_worker_tokens_total counter",
                *(f"orchestrator_worker_tokens_total{{{_label(each)}}} {each.tokens}" for each in agents),
                "# HELP orchestrator_worker_cost_usd_total Cost of recorded attempts, as far as known.",
                "# TYPE orchestrator_worker_cost_usd_total counter",
                *(f"orchestrator_worker_cost_usd_total{{{_label(each)}}} {each.cost_usd:g}" for each in agents),
                "# HELP orchestrator_worker_lock_hold_seconds From FOR UPDATE sent to COMMIT answered.",
                "# TYPE orchestrator_worker_lock_hold_seconds histogram",
            ]
            seen = 0
            for bound, count in zip(histogram.BOUNDS_MS, holds, strict=False):
                seen += count
                lines.append(f'orchestrator_worker_lock_hold_seconds_bucket{{le="{bound / 1000:.6g}"}} {seen}')
            lines += [
                f'orchestrator_worker_lock_hold_seconds_bucket{{le="+Inf"}} {sum(holds)}',
                f"orchestrator_worker_lock_hold_seconds_sum {own.hold_ms / 1000:.6f}",
                f"orchestrator_worker_lock_hold_seconds_count {sum(holds)}",
            ]
        return "\n".join(lines) + "\n"

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


def _label(counts: MinuteCounts) -> str:
    name = counts.agent.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'agent="{name}"'


__all__ = ["FAILED", "Metrics"]
