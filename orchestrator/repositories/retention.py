"""``RetentionRepository``: removing what has ended long enough ago, without holding anybody back.

Small transactions in id order that skip locked rows: claims go on, and a prune that is killed half-way has removed what
it had committed and can simply be run again. Live tasks are never touched, nor what live tasks still need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Engine,
    any_,
    delete,
    exists,
    func,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.domain.entities import Audit, Dependency, Minute, Plan, Run, RunEvent, Task, WorkerRow, table
from orchestrator.domain.words import ENDED, LIVE, TaskStatus
from orchestrator.errors import InvalidInput
from orchestrator.repositories.audit import note

BATCH = 100
"""Tasks of one transaction: with transcripts of a megabyte each it still takes well below a second."""
WINDOW = 5_000
"""Tasks that one transaction looks through."""
ROWS = 1_000
"""Rows of other tables in one transaction."""

KINDS = ("tasks", "transcripts", "minutes", "workers", "audit", "plans")
"""What can be removed: whole tasks with their runs and transcripts; transcripts alone; the workers' minutes; rows of
workers that ended; the audit trail; plans of which no task is left."""
DEFAULT_KINDS = ("tasks", "minutes", "workers", "plans")

# Of a row without its large values, with its place in the page and in the indexes: enough for "about how much".
_TASK_BYTES, _RUN_BYTES, _EVENT_BYTES = 600, 350, 90


@dataclass(slots=True)
class Pruned:
    """Rows that were removed (with ``dry_run``: would be) and about how many bytes they take."""

    dry_run: bool = False
    older_than: datetime | None = None
    rows: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    kept: int = 0
    """Ended tasks that are old enough and were kept because live tasks need them."""
    interrupted: bool = False

    def add(self, name: str, number: int, size: int = 0) -> None:
        self.rows[name] = self.rows.get(name, 0) + number
        self.bytes += size


class RetentionRepository:
    """Removing rows."""

    def __init__(self, engine: Engine) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)

    def prune(
        self,
        older_than: float,
        *,
        statuses: Collection[str] = ("done", "failed", "cancelled"),
        kinds: Collection[str] = DEFAULT_KINDS,
        dry_run: bool = False,
        actor: str = "prune",
        stop: Callable[[], bool] = lambda: False,
    ) -> Pruned:
        """Remove what ended more than *older_than* seconds ago; committed batch by batch.

        *statuses* are the ended statuses whose tasks (or transcripts) go; *kinds* are of ``KINDS``. *stop* is asked
        between batches. Nothing is removed with *dry_run*; rows and bytes are counted all the same. What was removed is
        one entry in the audit trail. Raises InvalidInput.
        """
        _check(older_than, statuses, kinds)
        with self._sessions() as session:
            before: datetime = session.execute(
                select(func.clock_timestamp() - literal(timedelta(seconds=older_than)))
            ).scalar_one()
        pruned = Pruned(dry_run, before)
        try:
            if "tasks" in kinds or "transcripts" in kinds:
                self._tasks(pruned, before, statuses, "tasks" in kinds, stop)
            if "minutes" in kinds:
                self._others(pruned, "minutes", Minute, Minute.minute < before, stop)
            if "workers" in kinds:
                self._others(pruned, "workers", WorkerRow, _gone(before), stop)
            if "audit" in kinds:
                self._others(pruned, "audit", Audit, Audit.at < before, stop)
            if "plans" in kinds:
                # A dry run has removed no tasks: what would have gone by now does not count.
                gone = statuses if dry_run and "tasks" in kinds else ()
                self._others(pruned, "plans", Plan, _empty(before, gone), stop)
        finally:
            if not dry_run and any(pruned.rows.values()):
                with self._sessions.begin() as session:
                    details = {"rows": pruned.rows, "bytes": pruned.bytes, "older_than_seconds": older_than}
                    note(session, "prune", actor=actor, subject="database", details=details)
        return pruned

    def _tasks(
        self, pruned: Pruned, before: datetime, statuses: Collection[str], whole: bool, stop: Callable[[], bool]
    ) -> None:
        last = 0
        while True:
            if stop():
                pruned.interrupted = True
                return
            with self._sessions() as session:
                # Windows of ids bound what one transaction reads when little of it can go; the walk is index-only.
                ids = select(Task.id).where(Task.id > last).order_by(Task.id).limit(WINDOW).subquery()
                end = session.scalar(select(func.max(ids.c.id)))
                if end is None:
                    return
                statement = (
                    select(Task.id)
                    .where(
                        Task.id > last,
                        Task.id <= end,
                        Task.status.in_(sorted(statuses)),
                        Task.finished_at < before,
                    )
                    .order_by(Task.id)
                    .limit(BATCH)
                )
                if not pruned.dry_run:
                    statement = statement.with_for_update(skip_locked=True)
                found = session.scalars(statement).all()
                # A short batch: the rest of the window has nothing more, but what is locked, and that is for next time.
                last = end if len(found) < BATCH else found[-1]
                if not found:
                    continue
                if whole:
                    needed = _needed(session, found)
                    pruned.kept += len(needed)
                    found = [id_ for id_ in found if id_ not in needed]
                _remove(session, pruned, found, whole)
                if pruned.dry_run:
                    session.rollback()
                else:
                    session.commit()

    def _others(
        self, pruned: Pruned, name: str, entity: Any, condition: ColumnElement[bool], stop: Callable[[], bool]
    ) -> None:
        if pruned.dry_run:
            with self._sessions() as session:
                pruned.add(name, session.scalar(select(func.count()).select_from(entity).where(condition)) or 0)
            return
        keys = [*table(entity).primary_key.columns]
        while not stop():
            with self._sessions.begin() as session:
                some = select(*keys).where(condition).order_by(*keys).limit(ROWS).with_for_update(skip_locked=True)
                some_rows = some.cte("some").prefix_with("MATERIALIZED")
                same = [some_rows.c[key.name] == key for key in keys]
                number = session.connection().execute(delete(table(entity)).where(*same)).rowcount
            pruned.add(name, number)
            if number < ROWS:
                return
        pruned.interrupted = True


def _check(older_than: float, statuses: Collection[str], kinds: Collection[str]) -> None:
    if not 0 <= older_than <= 1000 * 366 * 86_400:
        raise InvalidInput(f"older than: expected 0 seconds or more, found {older_than:g}")
    for status in statuses:
        if status not in {each.value for each in ENDED}:
            raise InvalidInput(
                f"status: expected done, failed or cancelled, found {status!r}: live tasks are never removed"
            )
    for kind in kinds:
        if kind not in KINDS:
            raise InvalidInput(f"kind: expected {', '.join(KINDS)}, found {kind!r}")


def _needed(session: Session, ids: Sequence[int]) -> set[int]:
    """Those of *ids* that a live task needs. Asked after their locks are held: who adds a child locks its parents."""
    child = table(Task).alias("child")
    return set(
        session.scalars(
            select(Dependency.depends_on)
            .distinct()
            .join(child, child.c.id == Dependency.task_id)
            .where(
                Dependency.depends_on == any_(_array(ids)),
                child.c.status.in_([status.value for status in sorted(LIVE)]),
            )
        )
    )


def _remove(session: Session, pruned: Pruned, ids: Sequence[int], whole: bool) -> None:
    if not ids:
        return
    wanted = any_(_array(ids))
    events = select(func.count(), func.coalesce(func.sum(_size(RunEvent.text)), 0)).where(RunEvent.task_id == wanted)
    number, size = session.execute(events).one()
    pruned.add("run_events", number, int(size) + number * _EVENT_BYTES)
    if whole:
        large = [_size(column) for column in (Run.result, Run.late, Run.message, Run.notes)]
        number, size = session.execute(
            select(func.count(), func.coalesce(func.sum(_sum(large)), 0)).where(Run.task_id == wanted)
        ).one()
        pruned.add("runs", number, int(size) + number * _RUN_BYTES)
        large = [
            _size(column) for column in (Task.input, Task.params, Task.result, Task.error_message, Task.last_output)
        ]
        size = session.scalar(select(func.coalesce(func.sum(_sum(large)), 0)).where(Task.id == wanted)) or 0
        pruned.add("tasks", len(ids), int(size) + len(ids) * _TASK_BYTES)
    if pruned.dry_run:
        return
    connection = session.connection()
    connection.execute(delete(table(RunEvent)).where(RunEvent.task_id == wanted))
    if whole:
        # Runs and dependencies go with them (ON DELETE CASCADE).
        connection.execute(delete(table(Task)).where(Task.id == wanted))
    else:
        connection.execute(
            update(table(Run))
            .where(Run.task_id == wanted, Run.transcript_bytes > func.coalesce(Run.transcript_dropped_bytes, 0))
            .values(transcript_dropped_bytes=Run.transcript_bytes)
        )


def _size(column: Any) -> Any:
    """Bytes of a value as it is stored, compressed or not."""
    return func.coalesce(func.pg_column_size(column), 0)


def _sum(parts: Sequence[Any]) -> Any:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _gone(before: datetime) -> ColumnElement[bool]:
    """Workers that stopped or died long ago and own nothing any more."""
    return or_(WorkerRow.stopped_at < before, WorkerRow.dead_at < before) & ~exists().where(
        Task.status == TaskStatus.RUNNING, Task.claimed_by == WorkerRow.id
    )


def _empty(before: datetime, gone: Collection[str]) -> ColumnElement[bool]:
    """Plans of which no task is left; old ended tasks of statuses *gone* that no live task needs are as good as gone."""
    left = Task.plan_id == Plan.id
    if gone:
        child = table(Task).alias("child")
        needed = (
            select(Dependency.task_id)
            .join(child, child.c.id == Dependency.task_id)
            .where(Dependency.depends_on == Task.id, child.c.status.in_([status.value for status in sorted(LIVE)]))
            .exists()
        )
        left &= ~(Task.status.in_(sorted(gone)) & (Task.finished_at < before) & ~needed)
    return (Plan.submitted_at < before) & ~exists().where(left)


def _array(ids: Sequence[int]) -> Any:
    return literal(list(ids), ARRAY(BigInteger))


__all__ = ["DEFAULT_KINDS", "KINDS", "Pruned", "RetentionRepository"]
