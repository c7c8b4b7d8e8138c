"""Writing what tasks ask, inside the caller's transaction: by ``record_runs``, by adding, unblocking and retrying.

The caller holds the tasks' row locks and sets them ``waiting`` itself. What is answered is the business of ``questions``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import ARRAY, BigInteger, any_, func, insert, literal, select, text, update
from sqlalchemy.dialects.postgresql import insert as upsert

from orchestrator.domain.asking import APPROVAL, Ask, Verdict
from orchestrator.domain.entities import QuestionRow, table
from orchestrator.domain.storable import storable_json, storable_text
from orchestrator.errors import InvalidInput
from orchestrator.repositories import CallerSession


def put_questions(session: CallerSession, asked: Iterable[tuple[int, int, Ask]]) -> None:
    """Open the questions of *asked*: task id, attempt and what it asks. One that is open by that name stays as it is."""
    rows = [_row(*each) for each in asked]
    if rows:
        session.execute(
            upsert(table(QuestionRow))
            .values(rows)
            .on_conflict_do_nothing(index_elements=["task_id", "name"], index_where=text("answered_at IS NULL"))
        )


def ask_approval(session: CallerSession, task_ids: Sequence[int]) -> None:
    """Ask whether each of *task_ids* may start."""
    if not task_ids:
        return
    new = func.unnest(literal(sorted(task_ids), ARRAY(BigInteger)))
    session.execute(
        insert(table(QuestionRow)).from_select(
            ["task_id", "name", "kind", "question", "choices", "yes", "no"],
            select(
                new,
                literal(APPROVAL.name),
                literal(APPROVAL.kind.value),
                literal(APPROVAL.question),
                literal(list(APPROVAL.choices), ARRAY(QuestionRow.question.type)),
                literal(APPROVAL.yes),
                literal(APPROVAL.no),
            ),
        )
    )


def withdraw(session: CallerSession, task_ids: Sequence[int], *, actor: str | None, reason: str | None = None) -> None:
    """Close every open question of *task_ids*, whose tasks ended or were made anew without an answer."""
    if not task_ids:
        return
    session.execute(
        update(table(QuestionRow))
        .where(
            QuestionRow.task_id == any_(literal(list(task_ids), ARRAY(BigInteger))), QuestionRow.answered_at.is_(None)
        )
        .values(answered_at=func.clock_timestamp(), verdict=Verdict.WITHDRAWN.value, actor=actor, reason=reason)
    )


def _row(task_id: int, attempt: int, ask: Ask) -> dict[str, Any]:
    deadline: Any = ask.deadline
    if ask.seconds is not None:
        deadline = func.clock_timestamp() + literal(timedelta(seconds=ask.seconds))
    return {
        "task_id": task_id,
        "attempt": attempt,
        "name": _text(ask.name),
        "kind": ask.kind.value,
        "question": _text(ask.question),
        "choices": [_text(choice) for choice in ask.choices],
        "deadline": deadline,
        "default": _text(ask.default),
        "yes": _text(ask.yes),
        "no": _text(ask.no),
        "grants": ask.grants,
        "details": _object(ask.details),
    }


def _text(value: str | None) -> str | None:
    return None if value is None else storable_text(value)[0]


def _object(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """*value* as the column takes it; what is no JSON is left out rather than the question."""
    try:
        return None if value is None else storable_json(value)[0]
    except InvalidInput:
        return None


__all__ = ["ask_approval", "put_questions", "withdraw"]
