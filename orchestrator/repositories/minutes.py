"""``MinuteRepository``: what each worker did in each minute. Screens add these rows up and never count history.

The row with an empty agent holds the worker's claims as statements, with the time their row locks were held; the rows
of agents count tasks: claimed, and how their attempts ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from orchestrator.domain import histogram
from orchestrator.domain.snapshot import LockHold, Minute


@dataclass(slots=True)
class MinuteCounts:
    """What to add to this minute for one agent; an empty name is the worker itself.

    ``holds`` are counts by bucket of ``domain.histogram``; ``tokens`` and ``cost_usd`` are sums of what is known, and
    ``unknown_cost`` counts ended attempts of whose cost nothing is known.
    """

    agent: str
    claims: int = 0
    empty_claims: int = 0
    hold_ms: float = 0.0
    holds: list[int] | None = None
    done: int = 0
    failed: int = 0
    other: int = 0
    tokens: int = 0
    cost_usd: float = 0.0
    unknown_cost: int = 0


class MinuteRepository:
    """The minutes table."""

    def __init__(self, engine: Engine) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)

    def add(self, worker: UUID, counts: Sequence[MinuteCounts]) -> None:
        """Add *counts* to the minute that it is by the database's clock; committed on return."""
        if not counts:
            return
        rows = [
            {
                "worker": worker,
                "agent": each.agent,
                "claims": each.claims,
                "empty_claims": each.empty_claims,
                "hold_ms": each.hold_ms,
                "holds": each.holds or [],
                "done": each.done,
                "failed": each.failed,
                "other": each.other,
                "tokens": each.tokens,
                "cost_usd": each.cost_usd,
                "unknown_cost": each.unknown_cost,
            }
            for each in sorted(counts, key=lambda each: each.agent)
        ]
        with self._sessions.begin() as session:
            session.execute(_ADD, rows)

    def lock_hold(self, minutes: int = 60) -> LockHold:
        """How long claims of all workers held their locks, over the last *minutes*. Uses the primary key."""
        with self._sessions() as session:
            rows = session.execute(_HOLDS, {"minutes": minutes}).all()
        counts = histogram.added(row.holds for row in rows)
        number = sum(counts)
        if number == 0:
            return LockHold()
        return LockHold(
            mean=sum(row.hold_ms for row in rows) / number,
            p50=histogram.quantile(counts, 0.5),
            p99=histogram.quantile(counts, 0.99),
            count=number,
        )

    def last(self, minutes: int = 60) -> tuple[Minute, ...]:
        """The last complete *minutes* of all workers together, oldest first, one without work as zeros."""
        with self._sessions() as session:
            return tuple(
                Minute(row.minute, int(row.done), int(row.failed), float(row.usd), int(row.unknown_cost))
                for row in session.execute(_LAST, {"minutes": minutes})
            )


_ADD = text("""
INSERT INTO minutes AS m (minute, worker_id, agent, claims, empty_claims, hold_ms, holds, done, failed, other, tokens,
                          cost_usd, unknown_cost)
VALUES (date_trunc('minute', clock_timestamp()), :worker, :agent, :claims, :empty_claims, :hold_ms,
        CAST(:holds AS bigint[]), :done, :failed, :other, :tokens, :cost_usd, :unknown_cost)
ON CONFLICT (minute, worker_id, agent) DO UPDATE SET
    claims = m.claims + excluded.claims,
    empty_claims = m.empty_claims + excluded.empty_claims,
    hold_ms = m.hold_ms + excluded.hold_ms,
    holds = coalesce((SELECT array_agg(coalesce(a, 0) + coalesce(b, 0) ORDER BY place)
                      FROM unnest(m.holds, excluded.holds) WITH ORDINALITY AS both_holds(a, b, place)), '{}'),
    done = m.done + excluded.done,
    failed = m.failed + excluded.failed,
    other = m.other + excluded.other,
    tokens = m.tokens + excluded.tokens,
    cost_usd = m.cost_usd + excluded.cost_usd,
    unknown_cost = m.unknown_cost + excluded.unknown_cost
""")

_HOLDS = text("""
SELECT hold_ms, holds FROM minutes
WHERE minute > clock_timestamp() - make_interval(mins => :minutes) AND agent = ''
""")

_LAST = text("""
SELECT at AS minute, coalesce(sum(m.done), 0) AS done, coalesce(sum(m.failed), 0) AS failed,
       coalesce(sum(m.cost_usd), 0) AS usd, coalesce(sum(m.unknown_cost), 0) AS unknown_cost
FROM generate_series(date_trunc('minute', clock_timestamp()) - make_interval(mins => :minutes),
                     date_trunc('minute', clock_timestamp()) - interval '1 minute', interval '1 minute') AS at
LEFT JOIN minutes AS m ON m.minute = at
GROUP BY at ORDER BY at
""")

__all__ = ["MinuteCounts", "MinuteRepository"]
