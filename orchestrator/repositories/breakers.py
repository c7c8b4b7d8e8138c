"""``BreakerRepository``: which providers refuse their agents now, for all workers, and who asks them again.

The table has a row for each open breaker and is nearly always empty: workers read all of it once a second. The claim does
not look at it: a worker leaves the agents behind an open breaker out of what it claims for.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, Text, any_, delete, func, literal, null, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.domain.entities import Breaker
from orchestrator.domain.settle import LONGEST_RESET, believed, limited_wait
from orchestrator.domain.values import value
from orchestrator.domain.words import OutcomeClass

LONGEST_LOGIN_WAIT = 60.0
"""Seconds between two probes of a login that is refused, at most: a person who has logged in does not wait for long."""


@value
class Refusal:
    """An attempt that the provider refused. ``probe``: it was the one that asked whether it would be refused again."""

    login: str
    agents: tuple[str, ...]
    kind: OutcomeClass
    message: str | None = None
    task_id: int | None = None
    retry_at: datetime | None = None
    retry_after: float | None = None
    probe: bool = False


@value
class OpenBreaker:
    """A breaker as workers see it. ``seconds`` until a probe may start, 0 when it may; ``probed``: one is on its way."""

    login: str
    agents: tuple[str, ...]
    kind: OutcomeClass
    seconds: float
    probe_by: UUID | None = None


class BreakerRepository:
    """The breakers table."""

    def __init__(self, engine: Engine) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)

    def read(self) -> list[OpenBreaker]:
        """Every open breaker. One read of a table with few rows or none."""
        now = func.clock_timestamp()
        wait = func.greatest(0, func.extract("epoch", Breaker.until - now))
        asked = Breaker.probe_until > now
        with self._sessions() as session:
            rows = session.execute(
                select(Breaker.login, Breaker.agents, Breaker.kind, wait, Breaker.probe_by, asked)
            ).all()
        return [
            OpenBreaker(login, tuple(agents), OutcomeClass(kind), float(seconds), probe_by if running else None)
            for login, agents, kind, seconds, probe_by, running in rows
        ]

    def refuse(self, refusals: Sequence[Refusal]) -> None:
        """Open the breakers of *refusals*, or keep them open for longer; committed on return.

        A stated reset counts, at most a week ahead. Without one the wait grows with each probe that was refused; attempts
        that were under way when the breaker opened tell nothing new.
        """
        with self._sessions.begin() as session:
            for refusal in sorted(refusals, key=lambda each: each.login):
                _refuse(session, refusal)

    def probe(self, login: str, worker: UUID, seconds: float) -> bool:
        """Let *worker* start one task of *login*, or go on with it, for *seconds*; False if its time has not come.

        False, too, while another worker's probe is on its way, and when the breaker is closed. Committed on return.
        """
        now = func.clock_timestamp()
        with self._sessions.begin() as session:
            got = session.scalars(
                update(Breaker)
                .where(
                    Breaker.login == login,
                    Breaker.until <= now,
                    or_(Breaker.probe_by.is_(None), Breaker.probe_by == worker, Breaker.probe_until <= now),
                )
                .values(probe_by=worker, probe_until=now + timedelta(seconds=seconds))
                .returning(Breaker.login),
                execution_options={"synchronize_session": False},
            ).all()
        return bool(got)

    def release(self, login: str, worker: UUID) -> None:
        """Give up the probe of *worker*: it found nothing to start, or it was ended before the provider answered."""
        with self._sessions.begin() as session:
            session.execute(
                update(Breaker)
                .where(Breaker.login == login, Breaker.probe_by == worker)
                .values(probe_by=null(), probe_until=null()),
                execution_options={"synchronize_session": False},
            )

    def passed(self, login: str, worker: UUID) -> None:
        """Close the breaker: the probe of *worker* was served. Committed on return."""
        with self._sessions.begin() as session:
            session.execute(
                delete(Breaker).where(Breaker.login == login, Breaker.probe_by == worker),
                execution_options={"synchronize_session": False},
            )


def close_for(session: Session, agent: str) -> list[str]:
    """Close every breaker that *agent* is behind, for a person, in the caller's transaction; return their kinds."""
    return list(
        session.scalars(
            delete(Breaker).where(literal(agent, Text) == any_(Breaker.agents)).returning(Breaker.kind),
            execution_options={"synchronize_session": False},
        )
    )


def _refuse(session: Session, refusal: Refusal) -> None:
    agents = sorted(set(refusal.agents))
    values: dict[str, Any] = {"login": refusal.login, "agents": agents, "kind": refusal.kind.value}
    session.execute(insert(Breaker).values(**values).on_conflict_do_nothing())
    row = session.execute(select(Breaker).where(Breaker.login == refusal.login).with_for_update()).scalar_one_or_none()
    if row is None:  # closed by a person in this moment
        return
    row.agents = sorted({*row.agents, *agents})
    now = session.scalar(select(func.clock_timestamp()))
    assert now is not None
    fresh = row.refusals == 0 or refusal.probe
    reset = refusal.retry_at
    if reset is None and refusal.retry_after is not None and refusal.retry_after > 0:
        reset = now + timedelta(seconds=min(refusal.retry_after, LONGEST_RESET.total_seconds()))
    if reset is not None:
        wait = (reset - now).total_seconds()
        reset = min(reset, now + LONGEST_RESET) if believed(wait, row.refusals) else None
    if fresh:
        row.refusals += 1
        row.kind = refusal.kind.value
        row.stated = reset is not None
        wait = limited_wait(refusal.kind, row.refusals)
        if refusal.kind is OutcomeClass.UNAUTHENTICATED:
            wait = min(wait, LONGEST_LOGIN_WAIT)
        row.until = reset or now + timedelta(seconds=wait)
        row.probe_by = row.probe_until = None
    elif reset is not None and reset > row.until:
        row.until, row.stated = reset, True
    else:
        return
    row.message, row.task_id = refusal.message, refusal.task_id


__all__ = ["BreakerRepository", "OpenBreaker", "Refusal", "close_for"]
