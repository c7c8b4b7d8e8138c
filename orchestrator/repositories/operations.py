"""``OperationsRepository``: what operators do to tasks: cancel, retry, hold, release, priority.

Work is done in batches of at most 500 tasks, each a transaction of its own with its audit entries, in id order: locks
are held for milliseconds, and claims skip them. Statuses are judged under the row lock, so that an answer stays true:
a cancel that was accepted ends as cancelled, whatever the agent does a moment later.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Engine,
    Row,
    Text,
    and_,
    any_,
    func,
    literal,
    literal_column,
    null,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.database.transient import classify, unavailable
from orchestrator.domain.entities import Dependency, Task
from orchestrator.domain.storable import check_text
from orchestrator.domain.values import value
from orchestrator.domain.words import ENDED, LIVE, OutcomeClass, TaskStatus
from orchestrator.errors import Conflict, InvalidInput, NotFound
from orchestrator.repositories.adding import lock_keys
from orchestrator.repositories.asking import ask_approval, withdraw
from orchestrator.repositories.audit import note
from orchestrator.repositories.bounded import bounded
from orchestrator.repositories.filters import ALL, TaskFilter, by_status, conditions, indexed
from orchestrator.repositories.settling import below, close_families

BATCH = 500
"""Tasks of one transaction."""
FIND_SECONDS = 60.0
"""Longest time for finding the tasks that filters mean."""
TRIES = 6
"""How often a batch is tried when other sessions' locks or keys get in its way."""
REASON_MAX = 10_000

PARENT_CAUSES = ("parent_failed", "parent_cancelled")
OPENS = frozenset({TaskStatus.FAILED, TaskStatus.CANCELLED})
"""Statuses that ``retry`` opens again."""

T = TypeVar("T")
_NO_SYNC = {"synchronize_session": False}


@value
class Skipped:
    """A task that was left as it is, and why."""

    id: int
    status: TaskStatus
    why: str


@dataclass(slots=True)
class Changed:
    """What an operation did, or with ``dry_run`` would do.

    ``ids`` were changed at once; ``requested`` are running and were asked to end; ``already`` were as asked before;
    ``family`` are tasks that need those and followed them; ``wake`` are agents that may have work now.
    """

    action: str
    dry_run: bool = False
    ids: list[int] = field(default_factory=list)
    requested: list[int] = field(default_factory=list)
    already: list[int] = field(default_factory=list)
    family: list[int] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    wake: set[str] = field(default_factory=set)

    def add(self, other: Changed) -> None:
        """Add what a further batch did."""
        for name in ("ids", "requested", "already", "family", "skipped"):
            getattr(self, name).extend(getattr(other, name))
        self.wake |= other.wake


class OperationsRepository:
    """Changes that people ask for. Every one goes to the audit trail with its actor and reason."""

    def __init__(self, engine: Engine) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)

    def cancel(self, wanted: TaskFilter, *, actor: str, reason: str | None = None, dry_run: bool = False) -> Changed:
        """Cancel tasks, and with them the blocked tasks that need them; committed on return.

        Pending, blocked and waiting tasks are cancelled at once. A running one is asked to end and stays ``running``
        until its process is gone; whatever comes out then, it is cancelled. One that is done or failed is skipped; when
        it is the only one asked for by id, Conflict is raised. Without ids and statuses only live tasks are looked at.
        Raises NotFound for an id that there is not.
        """
        one = _only(wanted)

        def batch(session: Session, ids: Sequence[int], match: ColumnElement[bool]) -> Changed:
            return _cancel(session, ids, match, one, actor, reason, dry_run)

        return self._run("cancel", wanted, LIVE, reason, dry_run, batch)

    def cancel_one(self, task_id: int, *, actor: str, reason: str | None = None) -> TaskStatus:
        """Cancel one task as ``cancel`` does; return its status now: cancelled, or running until it has ended."""
        done = self.cancel(TaskFilter(ids=[task_id]), actor=actor, reason=reason)
        if done.ids:
            return TaskStatus.CANCELLED
        if done.requested:
            return TaskStatus.RUNNING
        return self._status(task_id)

    def retry(self, wanted: TaskFilter, *, actor: str, reason: str | None = None, dry_run: bool = False) -> Changed:
        """Open failed and cancelled tasks again, with the descendants that ended because of them; committed on return.

        ``retry_count``, ``lost_count`` and the count of rate limits start at 0; ``attempt`` goes on. A task whose
        parents are not all done becomes blocked, one that nobody has approved asks again. Skipped (Conflict when it is
        the only one asked for by id): a task in another status, one whose unique key a live task has, one that a later
        submission of its plan replaced, and one that needs a failed or cancelled task which is not opened as well.
        """
        one = _only(wanted)
        assumed: dict[int, TaskStatus] = {}

        def batch(session: Session, ids: Sequence[int], match: ColumnElement[bool]) -> Changed:
            return _retry(session, ids, match, one, actor, reason, dry_run, assumed)

        extra = () if wanted.ids else (Task.superseded_at.is_(None),)
        return self._run("retry", wanted, OPENS, reason, dry_run, batch, extra)

    def retry_one(self, task_id: int, *, actor: str, reason: str | None = None) -> TaskStatus:
        """Open one task again as ``retry`` does; return its status now: pending, blocked or waiting."""
        self.retry(TaskFilter(ids=[task_id]), actor=actor, reason=reason)
        return self._status(task_id)

    def hold(self, wanted: TaskFilter, *, actor: str, reason: str | None = None, dry_run: bool = False) -> Changed:
        """Let nobody claim the tasks until ``release``; committed on return.

        Running and ended tasks are skipped (Conflict when it is the only one asked for by id).
        """
        held = {"held_at": func.clock_timestamp()}
        return self._set(
            "hold", wanted, LIVE - {TaskStatus.RUNNING}, held, Task.held_at.is_not(None), actor, reason, dry_run
        )

    def release(self, wanted: TaskFilter, *, actor: str, reason: str | None = None, dry_run: bool = False) -> Changed:
        """Undo ``hold``; committed on return. A task that is not held is already as asked."""
        return self._set("release", wanted, LIVE, {"held_at": null()}, Task.held_at.is_(None), actor, reason, dry_run)

    def set_priority(
        self, wanted: TaskFilter, priority: int, *, actor: str, reason: str | None = None, dry_run: bool = False
    ) -> Changed:
        """Give live tasks another priority (larger is claimed first); committed on return.

        For a running task it counts from its next attempt. Ended ones are skipped (Conflict for the only one by id).
        """
        if not -(2**31) <= priority < 2**31:
            raise InvalidInput(f"priority: {priority} does not fit into 32 bits")
        details = {"priority": priority}
        return self._set(
            "priority", wanted, LIVE, details, Task.priority == priority, actor, reason, dry_run, details=details
        )

    # -- the frame of all of them ---------------------------------------------------------------------------------

    def _set(
        self,
        action: str,
        wanted: TaskFilter,
        possible: Collection[TaskStatus],
        values: dict[str, Any],
        so_already: ColumnElement[bool],
        actor: str,
        reason: str | None,
        dry_run: bool,
        details: dict[str, Any] | None = None,
    ) -> Changed:
        one = _only(wanted)

        def batch(session: Session, ids: Sequence[int], match: ColumnElement[bool]) -> Changed:
            changed = Changed(action, dry_run)
            for row in _lock(session, ids, match, so_already.label("so_already"), dry_run=dry_run):
                status = TaskStatus(row.status)
                if status not in possible:
                    _skip(changed, row.id, status, f"is {status.value}", one, action)
                else:
                    (changed.already if row.so_already else changed.ids).append(row.id)
                    if action != "hold" and status is TaskStatus.PENDING:
                        changed.wake.add(row.agent)
            if changed.ids and not dry_run:
                session.execute(update(Task).where(_is_one_of(changed.ids)).values(values), execution_options=_NO_SYNC)
                note(session, action, actor=actor, task_ids=changed.ids, reason=reason, details=details)
            return changed

        return self._run(action, wanted, possible, reason, dry_run, batch)

    def _run(
        self,
        action: str,
        wanted: TaskFilter,
        possible: Collection[TaskStatus],
        reason: str | None,
        dry_run: bool,
        batch: Callable[[Session, Sequence[int], ColumnElement[bool]], Changed],
        extra: Iterable[ColumnElement[bool]] = (),
    ) -> Changed:
        """Do *batch* for all tasks of *wanted*, 500 a transaction, in id order."""
        wanted.checked()
        check_text("reason", reason, REASON_MAX)
        if not wanted.ids and not wanted.statuses:
            match = and_(true(), *conditions(wanted), *extra, Task.status.in_(_literals(possible)))
        else:
            match = and_(true(), *conditions(wanted), *extra)
        if wanted.by_ids_alone:
            self._require(wanted.ids)
        total = Changed(action, dry_run)
        last, left = 0, wanted.limit
        some = None if indexed(wanted) else self._some(wanted, possible, extra)

        def do() -> tuple[Changed | None, int, int]:
            with self._sessions() as session:
                # A dry run locks nothing, so it may look at more at once.
                size = min(10 * BATCH if dry_run else BATCH, ALL if left is None else left)
                if some is not None:
                    start = bisect.bisect_right(some, last)
                    ids: Sequence[int] = some[start : start + size]
                else:
                    following = select(Task.id).where(match, Task.id > last).order_by(Task.id).limit(size)
                    ids = session.scalars(following).all()
                if not ids:
                    return None, last, 0
                changed = batch(session, ids, match)
                if dry_run:
                    session.rollback()
                else:
                    session.commit()
                return changed, ids[-1], len(ids)

        while left is None or left > 0:
            changed, last, number = _again(do)
            if changed is None:
                break
            total.add(changed)
            left = None if left is None else left - number
        return total

    def _some(
        self, wanted: TaskFilter, possible: Collection[TaskStatus], extra: Iterable[ColumnElement[bool]]
    ) -> list[int] | None:
        """The ids of all tasks that *wanted* means now, ascending; None where only a walk through all tasks knows them.

        One by one they are judged again under their locks.
        """
        statuses = {TaskStatus(status) for status in wanted.statuses} or set(possible)
        if TaskStatus.DONE in statuses:
            return None
        with bounded(self._sessions, FIND_SECONDS) as session:
            return list(session.scalars(by_status(sorted(statuses), [*conditions(wanted), *extra])))

    def _require(self, ids: Sequence[int]) -> None:
        with self._sessions() as session:
            found = set(session.scalars(select(Task.id).where(_is_one_of(ids))))
        missing = sorted(set(ids) - found)
        if missing:
            noun = "task" if len(missing) == 1 else "tasks"
            verb = "does" if len(missing) == 1 else "do"
            raise NotFound(
                f"{noun} {', '.join(map(str, missing[:20]))} {verb} not exist; nothing was changed",
                hint="orchestrator list shows the ids",
                task=missing[0],
                tasks=missing,
            )

    def _status(self, task_id: int) -> TaskStatus:
        with self._sessions() as session:
            status = session.scalar(select(Task.status).where(Task.id == task_id))
        if status is None:
            raise NotFound(f"task {task_id} does not exist", hint="orchestrator list shows the ids", task=task_id)
        return TaskStatus(status)


# -- cancel -------------------------------------------------------------------------------------------------------


def _cancel(
    session: Session,
    ids: Sequence[int],
    match: ColumnElement[bool],
    one: bool,
    actor: str,
    reason: str | None,
    dry_run: bool,
) -> Changed:
    changed = Changed("cancel", dry_run)
    if not dry_run:
        # The whole family at once and in id order: closing it later would take locks in another order than others do.
        _lock(session, sorted({*ids, *_descendants(session, ids)}), true())
    for row in _lock(session, ids, match, Task.cancel_requested_at, dry_run=dry_run):
        status = TaskStatus(row.status)
        if status is TaskStatus.CANCELLED or (status is TaskStatus.RUNNING and row.cancel_requested_at is not None):
            changed.already.append(row.id)
        elif status is TaskStatus.RUNNING:
            changed.requested.append(row.id)
        elif status in ENDED:
            _skip(changed, row.id, status, f"has ended as {status.value}", one, "cancel")
        else:
            changed.ids.append(row.id)
    if dry_run:
        changed.family = _blocked_descendants(session, changed.ids)
        return changed
    now = func.clock_timestamp()
    if changed.requested:
        session.execute(
            update(Task).where(_is_one_of(changed.requested)).values(cancel_requested_at=now),
            execution_options=_NO_SYNC,
        )
    if changed.ids:
        session.execute(
            update(Task)
            .where(_is_one_of(changed.ids))
            .values(
                status=TaskStatus.CANCELLED,
                finished_at=now,
                cancel_requested_at=now,
                held_at=null(),
                error_class=OutcomeClass.CANCELLED,
                error_cause="requested",
                error_message=f"by {actor}" + (f": {reason}" if reason else ""),
            ),
            execution_options=_NO_SYNC,
        )
        withdraw(session, changed.ids, actor=actor, reason=reason)
        changed.family = close_families(session, dict.fromkeys(changed.ids, TaskStatus.CANCELLED))
    if changed.ids or changed.requested:
        note(session, "cancel", actor=actor, task_ids=[*changed.ids, *changed.requested], reason=reason)
    return changed


def _descendants(session: Session, ids: Sequence[int]) -> list[int]:
    """Every task that needs one of *ids*, directly or not."""
    return list(session.scalars(select(below(ids).c.task_id)))


def _blocked_descendants(session: Session, ids: Sequence[int]) -> list[int]:
    family = set(_descendants(session, ids)) - set(ids)
    return list(
        session.scalars(
            select(Task.id).where(_is_one_of(sorted(family)), Task.status == TaskStatus.BLOCKED).order_by(Task.id)
        )
    )


# -- retry --------------------------------------------------------------------------------------------------------


def _retry(
    session: Session,
    ids: Sequence[int],
    match: ColumnElement[bool],
    one: bool,
    actor: str,
    reason: str | None,
    dry_run: bool,
    assumed: dict[int, TaskStatus],
) -> Changed:
    """Open *ids* and what hangs on them. *assumed* carries what earlier batches of a dry run would have changed."""
    changed = Changed("retry", dry_run)
    asked = set(ids)
    family: set[int] = set()
    rows: dict[int, Row[Any]] = {}
    # Until nobody is left: while we waited for a lock, whoever held it may have added a child, closed at once.
    while not rows or _revivable(session, ids) - family:
        family |= _revivable(session, ids)
        keys = _keys(session, sorted(asked | family))
        # Before any row: whoever adds a task with one of these keys takes them in this order, too.
        if not dry_run:
            lock_keys(session, keys)
        needs = _parents(session, asked | family)
        # The parents as well: one that ends in this moment waits for us, and then sees its child blocked again.
        rows = {
            row.id: row
            for row in _lock(
                session,
                sorted(asked | family | {parent for each in needs.values() for parent in each}),
                true(),
                match.label("match"),
                Task.error_cause,
                Task.superseded_at,
                Task.unique_key,
                Task.plan,
                Task.needs_approval,
                dry_run=dry_run,
            )
        }
        if not rows:
            break
    twins = _live_twins(session, keys)
    status = {id_: TaskStatus(row.status) for id_, row in rows.items()} | {
        id_: assumed[id_] for id_ in rows if id_ in assumed
    }
    opened: dict[int, TaskStatus] = {}
    # In ascending order: a parent is always older than its children.
    for id_ in sorted((asked | family) & rows.keys()):
        row, parents = rows[id_], [parent for parent in needs.get(id_, ()) if parent in status]
        direct = id_ in asked and row.match
        if id_ in assumed:
            continue
        if not direct and not (
            status[id_] is TaskStatus.CANCELLED
            and row.error_cause in PARENT_CAUSES
            and any(parent in opened for parent in parents)
        ):
            continue
        why = _obstacle(id_, row, status, parents, twins)
        if why is not None:
            if direct:
                _skip(changed, id_, status[id_], why, one, "retry")
            elif status[id_] in OPENS and row.unique_key in twins:
                changed.skipped.append(Skipped(id_, status[id_], why))
            continue
        ready = all(status[parent] is TaskStatus.DONE for parent in parents)
        new_status = TaskStatus.WAITING if row.needs_approval else TaskStatus.PENDING
        status[id_] = opened[id_] = new_status if ready else TaskStatus.BLOCKED
        if row.unique_key is not None:
            twins[row.unique_key] = id_
        (changed.ids if direct else changed.family).append(id_)
        if opened[id_] is TaskStatus.PENDING:
            changed.wake.add(row.agent)
    if dry_run:
        assumed.update(opened)
        return changed
    for new in (TaskStatus.PENDING, TaskStatus.BLOCKED, TaskStatus.WAITING):
        some = [id_ for id_, each in opened.items() if each is new]
        if some:
            session.execute(
                update(Task).where(_is_one_of(some)).values(status=new, **_OPENED), execution_options=_NO_SYNC
            )
        if new is TaskStatus.WAITING:
            ask_approval(session, some)
    if opened:
        note(session, "retry", actor=actor, task_ids=[*changed.ids, *changed.family], reason=reason)
    return changed


_OPENED: dict[str, Any] = {
    "retry_count": 0,
    "lost_count": 0,
    "limited_count": 0,
    "limited_since": null(),
    "available_at": func.clock_timestamp(),
    "due": True,
    "held_at": null(),
    "finished_at": null(),
    "cancel_requested_at": null(),
    "result": null(),
    "error_class": null(),
    "error_cause": null(),
    "error_message": null(),
    "progress_percent": null(),
    "progress_message": null(),
    "live_usage": null(),
    # A person who opens it again gives it its budget again; what was counted of sessions stays.
    "meter": Task.meter.op("-", return_type=JSONB)(literal_column("'spent'::text", Text)),
}


def _obstacle(
    id_: int, row: Row[Any], status: dict[int, TaskStatus], parents: Sequence[int], twins: dict[str, int]
) -> str | None:
    """Why the task cannot be opened, None if it can."""
    if status[id_] not in OPENS:
        return f"is {status[id_].value}: only failed and cancelled tasks can be retried"
    if row.superseded_at is not None:
        return f"was replaced by a later submission of plan {row.plan}"
    closed = [parent for parent in parents if status[parent] in OPENS]
    if closed:
        verb = "failed" if status[closed[0]] is TaskStatus.FAILED else "was cancelled"
        return f"needs {closed[0]}, which {verb}: retry {closed[0]}, and this one follows"
    twin = twins.get(row.unique_key)
    if twin is not None and twin != id_:
        return f"has the unique key {row.unique_key!r}, which the live task {twin} has now"
    return None


def _revivable(session: Session, ids: Sequence[int]) -> set[int]:
    """Descendants of *ids* that were cancelled because of a parent; judged again under their locks."""
    child = Task.__table__.alias("child")
    # A scalar subquery and no EXISTS: that one becomes a join, which reads all tasks again at every level.
    because = (
        select(
            and_(
                child.c.status == TaskStatus.CANCELLED.value,
                child.c.error_cause.in_(PARENT_CAUSES),
                child.c.superseded_at.is_(None),
            )
        )
        .where(child.c.id == Dependency.task_id)
        .correlate(Dependency)
        .scalar_subquery()
    )
    return set(session.scalars(select(below(ids, because).c.task_id)))


def _parents(session: Session, ids: Collection[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for task_id, parent in session.execute(
        select(Dependency.task_id, Dependency.depends_on).where(Dependency.task_id == any_(_array(sorted(ids))))
    ):
        found.setdefault(task_id, []).append(parent)
    return {task_id: sorted(each) for task_id, each in found.items()}


def _keys(session: Session, ids: Sequence[int]) -> list[str]:
    """The unique keys of *ids*, sorted. They never change while a task is in its plan, so no lock is needed."""
    found = session.scalars(select(Task.unique_key).distinct().where(_is_one_of(ids), Task.unique_key.is_not(None)))
    return sorted(key for key in found if key is not None)


def _live_twins(session: Session, keys: Sequence[str]) -> dict[str, int]:
    """The live tasks that have *keys*. Uses the unique index tasks_unique_key."""
    if not keys:
        return {}
    return {
        key: id_
        for key, id_ in session.execute(
            select(Task.unique_key, Task.id).where(
                Task.unique_key == any_(literal(list(keys), ARRAY(Text))), Task.status.in_(_literals(LIVE))
            )
        )
        if key is not None
    }


# -- the parts ----------------------------------------------------------------------------------------------------


def _lock(
    session: Session, ids: Sequence[int], match: ColumnElement[bool], *columns: Any, dry_run: bool = False
) -> Sequence[Row[Any]]:
    """The rows of *ids* that (still) match, locked in id order, as they are after any wait for their locks.

    A dry run only reads them.
    """
    rows = select(Task.id, Task.status, Task.agent, *columns).where(_is_one_of(ids), match).order_by(Task.id)
    return session.execute(rows if dry_run else rows.with_for_update(key_share=True, of=Task)).all()


def _skip(changed: Changed, id_: int, status: TaskStatus, why: str, one: bool, action: str) -> None:
    if one:
        hints = {
            "cancel": f"orchestrator retry {id_} would open it again" if status is TaskStatus.FAILED else None,
            "retry": f"orchestrator show {id_} says more",
            "hold": f"orchestrator cancel {id_} would end it" if status is TaskStatus.RUNNING else None,
        }
        raise Conflict(
            f"task {id_} {why}" + ("" if action == "retry" else f": {action} changes nothing"),
            hint=hints.get(action),
            task=id_,
            status=status.value,
        )
    changed.skipped.append(Skipped(id_, status, why))


def _again(do: Callable[[], T]) -> T:
    """Do a batch; again when it was the victim of a deadlock, or a twin with its unique key got in between.

    Only faults after which the batch surely was not committed: a retry that is repeated would not find its tasks failed.
    """
    for left in reversed(range(TRIES)):
        try:
            return do()
        except IntegrityError as error:
            diagnosis = getattr(error.orig, "diag", None)
            if left == 0 or getattr(diagnosis, "constraint_name", None) != "tasks_unique_key":
                raise
        except DBAPIError as error:
            fault = classify(error)
            if fault is None:
                raise
            if fault != "conflict" or left == 0:
                raise unavailable(error) from error
    raise AssertionError("unreachable")


def _only(wanted: TaskFilter) -> bool:
    return wanted.by_ids_alone and len(set(wanted.ids)) == 1


def _is_one_of(ids: Sequence[int]) -> ColumnElement[bool]:
    return Task.id == any_(_array(ids))


def _array(ids: Sequence[int]) -> Any:
    return literal(list(ids), ARRAY(BigInteger))


def _literals(statuses: Collection[TaskStatus]) -> list[Any]:
    return [literal(status.value, literal_execute=True) for status in TaskStatus if status in statuses]


__all__ = ["Changed", "OperationsRepository", "Skipped"]
