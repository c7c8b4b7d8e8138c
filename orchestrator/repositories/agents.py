"""``AgentRepository``: what operators have set for an agent or a concurrency key, for all workers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, Text, bindparam, func, literal, literal_column, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import sessionmaker

from orchestrator.domain.entities import AgentState, ConcurrencyLimit, Task
from orchestrator.domain.shapes import time_json
from orchestrator.domain.storable import NAME_MAX, check_text
from orchestrator.domain.values import value
from orchestrator.errors import InvalidInput
from orchestrator.repositories.audit import note
from orchestrator.repositories.bounded import bounded
from orchestrator.repositories.breakers import close_for

LONGEST_PAUSE = 10 * 366 * 86_400.0
AT_ONCE = 1_000
"""Tasks that had been refused and become due when a person closes a breaker; the others come when their time has come."""


@value
class Resumed:
    """What ``resume`` undid; it is true when that was anything."""

    paused: bool
    breaker: bool

    def __bool__(self) -> bool:
        return self.paused or self.breaker


class AgentRepository:
    """The agents table: pauses. An agent without a row is not paused."""

    def __init__(self, engine: Engine) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)

    def pause(self, agent: str, *, actor: str, seconds: float | None = None, reason: str | None = None) -> None:
        """Let no worker claim tasks of *agent*, for *seconds* or until ``resume``; what runs goes on.

        Pausing again replaces time and reason. Committed on return. Raises InvalidInput.
        """
        _check(agent)
        check_text("reason", reason)
        if seconds is not None and not 0 < seconds <= LONGEST_PAUSE:
            raise InvalidInput(f"pause: expected more than 0 seconds and at most ten years, found {seconds:g}")
        now = func.clock_timestamp()
        until = None if seconds is None else now + timedelta(seconds=seconds)
        with self._sessions.begin() as session:
            values = {"paused_at": now, "paused_until": until, "reason": reason, "actor": actor}
            session.execute(
                insert(AgentState)
                .values(name=agent, **values)
                .on_conflict_do_update(index_elements=["name"], set_=values)
            )
            details = None if seconds is None else {"seconds": seconds}
            note(session, "pause", actor=actor, subject=agent, reason=reason, details=details)

    def resume(self, agent: str, *, actor: str, reason: str | None = None) -> Resumed:
        """Let *agent* be claimed again: no pause, and no open breaker. Committed on return. The caller wakes workers.

        Its tasks that wait because the provider had refused them are due at once.
        """
        _check(agent)
        check_text("reason", reason)
        with self._sessions.begin() as session:
            paused = session.scalars(
                update(AgentState)
                .where(AgentState.name == agent, AgentState.paused_at.is_not(None))
                .values(paused_at=None, paused_until=None, reason=None, actor=None)
                .returning(AgentState.name),
                execution_options={"synchronize_session": False},
            ).all()
            closed = close_for(session, agent)
            if closed:
                session.execute(_DUE_NOW, {"of_agent": agent}, execution_options={"synchronize_session": False})
            details = {"breaker": closed[0]} if closed else None
            note(session, "resume", actor=actor, subject=agent, reason=reason, details=details)
        return Resumed(bool(paused), bool(closed))

    def limit_key(self, key: str, max_running: int, *, actor: str, reason: str | None = None) -> None:
        """Let at most *max_running* tasks of the concurrency key *key* run at once; what runs goes on.

        Committed on return; workers see it at their next look. Raises InvalidInput.
        """
        check_text("concurrency key", key, NAME_MAX)
        check_text("reason", reason)
        if not 0 < max_running < 2**31:
            raise InvalidInput(f"limit: expected a number of tasks, 1 or more, found {max_running}")
        with self._sessions.begin() as session:
            session.execute(
                insert(ConcurrencyLimit)
                .values(key=key, max_running=max_running)
                .on_conflict_do_update(index_elements=["key"], set_={"max_running": max_running})
            )
            note(session, "limit", actor=actor, subject=key, reason=reason, details={"max_running": max_running})

    def paused(self) -> dict[str, dict[str, Any]]:
        """The agents that are paused now, with ``since``, ``until``, ``reason`` and ``actor``."""
        with bounded(self._sessions) as session:
            rows = session.scalars(
                select(AgentState).where(
                    AgentState.paused_at.is_not(None),
                    func.coalesce(AgentState.paused_until > func.clock_timestamp(), literal(True)),
                )
            ).all()
        return {
            row.name: {
                "since": time_json(row.paused_at),
                "until": time_json(row.paused_until),
                "reason": row.reason,
                "actor": row.actor,
            }
            for row in rows
        }


def _build_due_now() -> Any:
    """Uses tasks_not_due."""
    waiting = (
        select(Task.id)
        .where(
            Task.status == literal_column("'pending'"),
            ~Task.due,
            Task.agent == bindparam("of_agent", type_=Text),
            Task.limited_count > literal_column("0"),
        )
        .order_by(Task.id)
        .limit(AT_ONCE)
        .with_for_update(skip_locked=True, key_share=True)
        .cte("waiting")
        .prefix_with("MATERIALIZED")
    )
    return update(Task).where(Task.id == waiting.c.id).values(available_at=func.clock_timestamp(), due=True)


_DUE_NOW = _build_due_now()


def _check(agent: str) -> None:
    check_text("agent", agent, NAME_MAX)
    if not agent.strip():
        raise InvalidInput("agent: expected a name, found nothing")


__all__ = ["AgentRepository"]
