"""``RetentionRepository``: removing what has ended long enough ago, without holding anybody back.

Small transactions in id order that skip locked rows: claims go on, and a prune that is killed half-way has removed what
it had committed and can simply be run again. Live tasks are never touched, nor what live tasks still need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Engine,
    any_,
    delete,
    exists,
    false,
    func,
    literal,
    or_,
    select,
    text,
    true,
    update,
)
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.domain.entities import Audit, Dependency, Minute, Plan, Run, RunEvent, Task, WorkerRow, table
from orchestrator.domain.retention import Retention
from orchestrator.domain.words import ENDED, LIVE, TaskStatus
from orchestrator.errors import InvalidInput
from orchestrator.repositories.audit import note
from orchestrator.repositories.filters import TaskFilter, conditions

BATCH = 100
"""Tasks of one transaction: with transcripts of a megabyte each it still takes well below a second."""
AUTOMATIC_BATCH = 25
"""The same where it goes on by itself, beside the work of a worker."""
WINDOW = 5_000
"""Ids of tasks that one transaction looks through."""
TRANSCRIPTS = 500
"""The same where their transcripts are looked at."""
DRY = 10
"""So many times as many where nothing is locked."""
YOUNG_WINDOWS = 10
"""Windows without anything old after which an automatic pass takes all the rest for younger."""
ROWS = 1_000
"""Rows of other tables in one transaction."""

KINDS = ("tasks", "transcripts", "minutes", "workers", "audit", "plans")
"""What can be removed: whole tasks with their runs and transcripts; transcripts alone; the workers' minutes; rows of
workers that ended; the audit trail; plans of which no task is left."""
DEFAULT_KINDS = ("tasks", "minutes", "workers", "plans")
OF_TASKS = ("tasks", "transcripts")
"""Those that a filter can choose among."""

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
    automatic: bool = False

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
        kinds: Collection[str] | None = None,
        only: TaskFilter | None = None,
        dry_run: bool = False,
        actor: str = "prune",
        reason: str | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Pruned:
        """Remove what ended more than *older_than* seconds ago; committed batch by batch.

        *statuses* are the ended statuses whose tasks (or transcripts) go; *kinds* are of ``KINDS``, by default
        ``DEFAULT_KINDS``, or with *only*, which chooses among the tasks, the tasks alone. *stop* is asked between batches.
        Nothing is removed with *dry_run*; rows and bytes are counted all the same. What was removed is one entry in the
        audit trail, with *reason*. Raises InvalidInput.
        """
        where = [] if only is None else conditions(only.checked())
        if kinds is None:
            kinds = ("tasks",) if where else DEFAULT_KINDS
        _check(older_than, statuses, kinds, chosen=bool(where))
        pruned = Pruned(dry_run, self._before(older_than))
        try:
            for _ in self._steps(pruned, statuses, kinds, where):
                if stop():
                    pruned.interrupted = True
                    break
        finally:
            self._note(pruned, actor, older_than, reason, only if where else None)
        return pruned

    def keep(self, policy: Retention) -> Iterator[Pruned]:
        """Remove what *policy* no longer keeps, batch by batch: each ``next`` is one transaction, committed.

        It ends where tasks are younger, so that a pass costs what there is to remove and not the history; and at once
        when another process is at it. Each rule that removed something and came to its end is one entry in the audit
        trail.
        """
        for kind, statuses, older_than in policy.rules():
            pruned = Pruned(older_than=self._before(older_than), automatic=True)
            for _ in self._steps(pruned, statuses, (kind,)):
                yield pruned
            self._note(pruned, "retention", older_than)
            if pruned.interrupted:
                return

    def _before(self, older_than: float) -> datetime:
        with self._sessions() as session:
            before: datetime = session.execute(
                select(func.clock_timestamp() - literal(timedelta(seconds=older_than)))
            ).scalar_one()
        return before

    def _note(
        self,
        pruned: Pruned,
        actor: str,
        older_than: float,
        reason: str | None = None,
        only: TaskFilter | None = None,
    ) -> None:
        if pruned.dry_run or not any(pruned.rows.values()):
            return
        with self._sessions.begin() as session:
            details = {"rows": pruned.rows, "bytes": pruned.bytes, "older_than_seconds": older_than}
            if only is not None:
                details["only"] = {name: value for name, value in asdict(only).items() if value}
            note(session, "prune", actor=actor, subject="database", reason=reason, details=details)

    def _steps(
        self,
        pruned: Pruned,
        statuses: Collection[str],
        kinds: Collection[str],
        where: Sequence[ColumnElement[bool]] = (),
    ) -> Iterator[None]:
        """Do it, with a stop before each transaction."""
        before = pruned.older_than
        assert before is not None
        if "tasks" in kinds or "transcripts" in kinds:
            yield from self._tasks(pruned, before, statuses, "tasks" in kinds, where)
        if "minutes" in kinds:
            yield from self._others(pruned, "minutes", Minute, Minute.minute < before)
        if "workers" in kinds:
            yield from self._others(pruned, "workers", WorkerRow, _gone(before))
        if "audit" in kinds:
            yield from self._others(pruned, "audit", Audit, Audit.at < before)
        if "plans" in kinds:
            # A dry run has removed no tasks: what would have gone by now does not count.
            gone = statuses if pruned.dry_run and "tasks" in kinds else ()
            yield from self._others(pruned, "plans", Plan, _empty(before, gone))

    def _tasks(
        self,
        pruned: Pruned,
        before: datetime,
        statuses: Collection[str],
        whole: bool,
        where: Sequence[ColumnElement[bool]],
    ) -> Iterator[None]:
        # Words, not parameters: the planner is to see the predicates of the partial indexes in them.
        words = [literal(status, literal_execute=True) for status in sorted(statuses)]
        size = AUTOMATIC_BATCH if pruned.automatic else BATCH
        last = young = 0
        while True:
            yield
            with self._sessions() as session:
                if pruned.automatic and not session.scalar(_MINE, {"locks": LOCKS}):
                    pruned.interrupted = True
                    return
                # Windows of ids bound what one transaction reads when little of it can go, with a jump over the gaps.
                start = _start(session, last, whole)
                if start is None:
                    return
                first, created_at = start
                window = WINDOW if whole else TRANSCRIPTS
                end = first + (DRY * window if pruned.dry_run else window) - 1
                old = (Task.id >= first, Task.id <= end, Task.status.in_(words), Task.finished_at < before, *where)
                if pruned.dry_run:
                    _count(session, pruned, old, whole)
                    last = end
                    continue
                wanted = select(Task.id).where(*old)
                if not whole:
                    wanted = wanted.where(exists().where(RunEvent.task_id == Task.id))
                found = session.scalars(
                    wanted.order_by(Task.id).limit(size).with_for_update(skip_locked=True, of=Task)
                ).all()
                # A short batch: the rest of the window has nothing more, but what is locked, and that is for next time.
                last = end if len(found) < size else found[-1]
                young = 0 if found or created_at < before else young + 1
                if whole and found:
                    needed = _needed(session, found)
                    pruned.kept += len(needed)
                    found = [id_ for id_ in found if id_ not in needed]
                _remove(session, pruned, found, whole)
                session.commit()
            if pruned.automatic and young >= YOUNG_WINDOWS:
                return

    def _others(self, pruned: Pruned, name: str, entity: Any, condition: ColumnElement[bool]) -> Iterator[None]:
        if pruned.dry_run:
            with self._sessions() as session:
                pruned.add(name, session.scalar(select(func.count()).select_from(entity).where(condition)) or 0)
            return
        keys = [*table(entity).primary_key.columns]
        number = ROWS
        while number == ROWS:
            yield
            with self._sessions.begin() as session:
                some = select(*keys).where(condition).order_by(*keys).limit(ROWS).with_for_update(skip_locked=True)
                some_rows = some.cte("some").prefix_with("MATERIALIZED")
                same = [some_rows.c[key.name] == key for key in keys]
                number = session.connection().execute(delete(table(entity)).where(*same)).rowcount
            pruned.add(name, number)


LOCKS = 0x6B656570
"""The class of the advisory lock of whoever removes by itself: "keep" in ASCII."""
_MINE = text("SELECT pg_try_advisory_xact_lock(:locks, 0)")


def _start(session: Session, last: int, whole: bool) -> tuple[int, datetime] | None:
    """The first task behind the id *last* (without *whole* the first that has a transcript), and when it was added."""
    ids = Task.id if whole else RunEvent.task_id
    first = session.scalar(select(func.min(ids)).where(ids > last))
    if first is None:
        return None
    created = session.scalar(select(Task.created_at).where(Task.id == first))
    return int(first), created or datetime.min.replace(tzinfo=UTC)


def _count(session: Session, pruned: Pruned, old: Sequence[ColumnElement[bool]], whole: bool) -> None:
    """Add what would be removed of the window *old*: one statement instead of batches."""
    session.execute(text("SET LOCAL jit = off"))
    live = [status.value for status in sorted(LIVE)]
    child = table(Task).alias("child")
    needed = (
        select(Dependency.task_id)
        .join(child, child.c.id == Dependency.task_id)
        .where(Dependency.depends_on == Task.id, child.c.status.in_(live))
        .exists()
    )
    some = select(
        Task.id, _sum(_LARGE_OF_TASK).label("size"), needed.label("needed") if whole else false().label("needed")
    )
    tasks = some.where(*old).cte("old").prefix_with("MATERIALIZED")
    going = tasks.select().where(~tasks.c.needed).cte("going")

    def parts(entity: Any, size: Any) -> Any:
        counted = select(func.count().label("number"), func.coalesce(func.sum(size), 0).label("size"))
        return counted.join(going, going.c.id == entity.task_id).subquery()

    events = parts(RunEvent, _size(RunEvent.text))
    runs = parts(Run, _sum(_LARGE_OF_RUN)) if whole else None
    whole_tasks = select(
        func.count().filter(~tasks.c.needed).label("number"),
        func.coalesce(func.sum(tasks.c.size).filter(~tasks.c.needed), 0).label("size"),
        func.count().filter(tasks.c.needed).label("kept"),
    ).subquery()
    one_row = events.join(whole_tasks, true()) if runs is None else events.join(runs, true()).join(whole_tasks, true())
    columns = [*events.c, *(() if runs is None else runs.c), *whole_tasks.c]
    found = session.execute(select(*columns).select_from(one_row)).one()
    pruned.add("run_events", found[0], int(found[1]) + found[0] * _EVENT_BYTES)
    if whole:
        pruned.add("runs", found[2], int(found[3]) + found[2] * _RUN_BYTES)
        pruned.add("tasks", found[4], int(found[5]) + found[4] * _TASK_BYTES)
        pruned.kept += found[6]


def _check(older_than: float, statuses: Collection[str], kinds: Collection[str], *, chosen: bool) -> None:
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
        if chosen and kind not in OF_TASKS:
            raise InvalidInput(f"kind {kind}: filters choose among tasks and transcripts; {kind} know nothing of them")


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
        number, size = session.execute(
            select(func.count(), func.coalesce(func.sum(_sum(_LARGE_OF_RUN)), 0)).where(Run.task_id == wanted)
        ).one()
        pruned.add("runs", number, int(size) + number * _RUN_BYTES)
        size = session.scalar(select(func.coalesce(func.sum(_sum(_LARGE_OF_TASK)), 0)).where(Task.id == wanted)) or 0
        pruned.add("tasks", len(ids), int(size) + len(ids) * _TASK_BYTES)
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


_LARGE_OF_RUN = [_size(column) for column in (Run.result, Run.late, Run.message, Run.notes)]
_LARGE_OF_TASK = [
    _size(column) for column in (Task.input, Task.params, Task.result, Task.error_message, Task.last_output)
]


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
