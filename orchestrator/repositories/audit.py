"""``AuditRepository``: who did what to which task, and why. Written in the transaction that does it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ARRAY, BigInteger, Engine, any_, cast, func, insert, literal, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.domain.entities import Audit
from orchestrator.domain.shapes import time_json
from orchestrator.domain.storable import storable_text
from orchestrator.repositories.bounded import bounded


class AuditRepository:
    """The audit table."""

    def __init__(self, engine: Engine) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)

    def list(
        self, *, limit: int = 100, after_id: int | None = None, task_id: int | None = None, actor: str | None = None
    ) -> tuple[list[dict[str, Any]], int | None]:
        """Entries, newest first, and the id to go on behind (None: there are no more). Uses audit_pkey, audit_task_id."""
        statement = select(Audit).order_by(Audit.id.desc()).limit(limit + 1)
        if after_id is not None:
            statement = statement.where(Audit.id < after_id)
        if task_id is not None:
            statement = statement.where(Audit.task_id == task_id)
        if actor is not None:
            statement = statement.where(Audit.actor == actor)
        with bounded(self._sessions) as session:
            rows = session.scalars(statement).all()
        found = [_json(row) for row in rows[:limit]]
        return found, (rows[limit - 1].id if len(rows) > limit else None)

    def write(
        self,
        action: str,
        *,
        actor: str,
        task_id: int | None = None,
        subject: str | None = None,
        reason: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        """Add an entry in a transaction of its own, for what is not a change in the database. Committed on return."""
        with self._sessions.begin() as session:
            note(
                session,
                action,
                actor=actor,
                task_ids=[] if task_id is None else [task_id],
                subject=subject,
                reason=reason,
                details=details,
            )


def last_entries(session: Session, action: str, ids: Sequence[int]) -> dict[int, tuple[str, str | None]]:
    """Who did *action* last to each of *ids*, and the reason. Uses audit_task_id; for the few tasks of a screen."""
    if not ids:
        return {}
    rows = session.execute(
        select(Audit.task_id, Audit.actor, Audit.reason)
        .where(Audit.task_id == any_(literal(list(ids), ARRAY(BigInteger))), Audit.action == action)
        .order_by(Audit.id)
    )
    return {task_id: (actor, reason) for task_id, actor, reason in rows if task_id is not None}


def note(
    session: Session,
    action: str,
    *,
    actor: str,
    task_ids: Sequence[int] = (),
    subject: str | None = None,
    reason: str | None = None,
    details: dict[str, Any] | None = None,
) -> None:
    """Add an entry for each of *task_ids* (without any: one for *subject*) in the caller's transaction."""
    if not task_ids and subject is None:
        return
    actor, reason = storable_text(actor)[0], None if reason is None else storable_text(reason)[0]
    subject = None if subject is None else storable_text(subject)[0]
    ids: list[int | None] = list(task_ids) or [None]
    session.execute(
        insert(Audit).from_select(
            ["task_id", "actor", "action", "subject", "reason", "details"],
            select(
                func.unnest(literal(ids, ARRAY(BigInteger))),
                literal(actor),
                literal(action),
                literal(subject),
                literal(reason),
                cast(literal(None if details is None else json.dumps(details)), JSONB),
            ),
        )
    )


def _json(row: Audit) -> dict[str, Any]:
    return {
        "id": row.id,
        "at": time_json(row.at),
        "actor": row.actor,
        "action": row.action,
        "task_id": row.task_id,
        "subject": row.subject,
        "reason": row.reason,
        "details": row.details,
    }


__all__ = ["AuditRepository", "note"]
