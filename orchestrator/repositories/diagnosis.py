"""``DiagnosisRepository``: what bears on whether one task runs, by a fixed number of bounded reads.

Counts stop at ``overview.CAP``; a chain of parents is followed through ``CHAIN`` tasks at most. Each read names its index.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, Engine, Integer, Text, and_, any_, func, literal, literal_column, select, text, union_all
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.domain.diagnosis import BreakerFacts, Deed, Held, Relative, TaskFacts, WorkerFacts
from orchestrator.domain.entities import (
    AgentState,
    Audit,
    Breaker,
    ConcurrencyLimit,
    Dependency,
    KeyHolder,
    Minute,
    Run,
    Task,
    WorkerRow,
)
from orchestrator.domain.shapes import run_json
from orchestrator.domain.snapshot import Count
from orchestrator.domain.words import TaskStatus, will_not_stop
from orchestrator.errors import NotFound
from orchestrator.repositories import overview
from orchestrator.repositories.bounded import bounded
from orchestrator.repositories.keys import DEFAULT_ROOM, base_route, overlap
from orchestrator.repositories.questions import questions_of
from orchestrator.repositories.reading import task_object

SHOWN = 20
"""Parents and roots that are named."""
CHAIN = 2_000
"""Tasks that are looked at on the way from a blocked task to what it waits for in the end."""
WORKERS = 1_000


class DiagnosisRepository:
    """Facts for ``why``."""

    def __init__(self, engine: Engine) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)

    def facts(self, task_id: int) -> TaskFacts:
        """All that bears on the task *task_id*, read in one transaction. Raises NotFound, DatabaseUnavailable."""
        with bounded(self._sessions) as session:
            now = overview.database_now(session)
            task = session.get(Task, task_id) if 0 < task_id < 2**63 else None
            if task is None:
                raise NotFound(f"task {task_id} does not exist", hint="orchestrator list shows the ids", task=task_id)
            status = TaskStatus(task.status)
            pending, running = status is TaskStatus.PENDING, status is TaskStatus.RUNNING
            parents, number = _parents(session, task_id)
            return TaskFacts(
                now=now,
                task=task_object(session, task),
                due=task.due,
                local=task.definition is not None,
                superseded=task.superseded_at is not None,
                limited_count=task.limited_count,
                limited_since=task.limited_since,
                pause=_pause(session, task.agent, now),
                breaker=_breaker(session, task.agent, now),
                held=_deed(session, task_id, "hold") if task.held_at is not None else None,
                cancelled=_deed(session, task_id, "cancel") if _may_be_cancelled(task) else None,
                workers=_workers(session, task, now) if pending else (),
                owner=_owner(session, task.claimed_by, now) if running else None,
                ahead=_ahead(session, task, task.lost_count > 0) if pending else Count(),
                suspects_ahead=_ahead(session, task, True) if pending and task.lost_count else Count(),
                ended_hour=_ended_hour(session, task.agent, now) if pending else None,
                parents=parents,
                parent_count=number,
                roots=_roots(session, task_id) if status is TaskStatus.BLOCKED else (),
                top_priority=_top_priority(session, task.route) if pending else None,
                keys=_keys(session, task) if pending else (),
                last_run=_last_run(session, task_id),
                question=questions_of(session, Task.id == task_id).get(task_id),
                last_output=task.last_output or task.progress_message,
                will_not_stop=will_not_stop(task.progress_message),
                last_output_at=task.last_output_at,
                percent=task.progress_percent,
                needed_by=_needed_by(session, task_id),
            )


def _may_be_cancelled(task: Task) -> bool:
    return task.cancel_requested_at is not None or task.status == TaskStatus.CANCELLED


def _deed(session: Session, task_id: int, action: str) -> Deed | None:
    """The last *action* of a person on the task. Uses audit_task_id."""
    row = session.execute(
        select(Audit.at, Audit.actor, Audit.reason)
        .where(Audit.task_id == task_id, Audit.action == action)
        .order_by(Audit.id.desc())
        .limit(1)
    ).one_or_none()
    return None if row is None else Deed(row.at, row.actor, row.reason)


def _pause(session: Session, agent: str, now: datetime) -> Deed | None:
    """The pause of an agent that holds now. Uses agents_pkey."""
    row = session.get(AgentState, agent)
    if row is None or row.paused_at is None or (row.paused_until is not None and row.paused_until <= now):
        return None
    return Deed(row.paused_at, row.actor, row.reason, row.paused_until)


def _breaker(session: Session, agent: str, now: datetime) -> BreakerFacts | None:
    """The open breaker of an agent. Reads all of a table that is nearly always empty."""
    row = session.scalars(
        select(Breaker).where(literal(agent, Text) == any_(Breaker.agents)).order_by(Breaker.until.desc()).limit(1)
    ).one_or_none()
    if row is None:
        return None
    probed = row.probe_until is not None and row.probe_until > now
    return BreakerFacts(row.opened_at, row.until, row.message, row.task_id, overview.needs_login(row), probed)


# -- workers ------------------------------------------------------------------------------------------------------


def _workers(session: Session, task: Task, now: datetime) -> tuple[WorkerFacts, ...]:
    """The live workers that know the task's agent, with how many tasks each holds. Uses workers_live, tasks_running."""
    rows = session.scalars(
        select(WorkerRow)
        .where(
            WorkerRow.stopped_at.is_(None),
            WorkerRow.dead_at.is_(None),
            literal(base_route(task.route), Text) == any_(WorkerRow.agents),
        )
        .order_by(WorkerRow.name)
        .limit(WORKERS)
    ).all()
    held = _held(session, [row.id for row in rows])
    return tuple(_worker(row, now, held.get(row.id, 0)) for row in rows)


def _owner(session: Session, worker: UUID | None, now: datetime) -> WorkerFacts | None:
    """The worker of a running task. Uses workers_pkey, tasks_running."""
    row = None if worker is None else session.get(WorkerRow, worker)
    return None if row is None else _worker(row, now, _held(session, [row.id]).get(row.id, 0))


def _held(session: Session, workers: list[UUID]) -> dict[UUID, int]:
    if not workers:
        return {}
    return {
        worker: number
        for worker, number in session.execute(
            select(Task.claimed_by, func.count())
            .where(
                Task.status == literal_column("'running'"),
                Task.claimed_by == any_(literal(workers, ARRAY(WorkerRow.id.type))),
            )
            .group_by(Task.claimed_by)
        )
        if worker is not None
    }


def _worker(row: WorkerRow, now: datetime, running: int) -> WorkerFacts:
    if row.dead_at is not None or row.stopped_at is not None:
        state = "dead"
    elif now - row.renewed_at > row.heartbeat * 2:
        state = "silent"
    else:
        state = "draining" if row.draining_at is not None else ""
    return WorkerFacts(row.name, row.host, row.pid, state, row.slots, running, row.renewed_at, row.plan)


# -- the queue ----------------------------------------------------------------------------------------------------


def _ready_of(route: str, suspects: bool) -> list[Any]:
    """The ready tasks of a route, as the claim's indexes tasks_ready and tasks_suspect have them."""
    zero = literal_column("0", Integer)
    return [
        Task.status == literal_column("'pending'"),
        Task.due,
        Task.held_at.is_(None),
        Task.lost_count > zero if suspects else Task.lost_count == zero,
        Task.route == route,
    ]


def _ahead(session: Session, task: Task, suspects: bool) -> Count:
    """The ready tasks of the route that a claim takes before *task*. Uses tasks_ready or tasks_suspect.

    Two ranges of the index: with OR in one statement all of the route's entries would be looked at.
    """
    ready = select(literal(1)).where(*_ready_of(task.route, suspects))
    higher = ready.where(Task.priority > task.priority).limit(overview.CAP + 1)
    older = ready.where(Task.priority == task.priority, Task.id < task.id).limit(overview.CAP + 1)
    return overview.count(session, union_all(higher.subquery().select(), older.subquery().select()))


def _top_priority(session: Session, route: str) -> int | None:
    """The priority of the ready task that is claimed next. Uses tasks_ready."""
    return session.scalar(
        select(Task.priority).where(*_ready_of(route, False)).order_by(Task.priority.desc(), Task.id).limit(1)
    )


def _keys(session: Session, task: Task) -> tuple[Held, ...]:
    """What of the task's key and directory running tasks have. Uses key_holders_kind_name.

    Which directory a task without ``dir`` works in, only its agent's host knows: that of the agent's others without one.
    """
    running = and_(
        Task.id == KeyHolder.task_id, Task.attempt == KeyHolder.attempt, Task.status == literal_column("'running'")
    )
    found: list[Held] = []
    if task.concurrency_key is not None:
        holders = session.scalars(
            select(KeyHolder.task_id)
            .join(Task, running)
            .where(KeyHolder.kind == "key", KeyHolder.name == task.concurrency_key)
            .order_by(KeyHolder.task_id)
            .limit(SHOWN)
        ).all()
        limit = session.get(ConcurrencyLimit, task.concurrency_key)
        room = DEFAULT_ROOM if limit is None else limit.max_running
        found.append(Held("key", task.concurrency_key, room, tuple(holders)))
    rows = session.execute(
        select(KeyHolder.task_id, KeyHolder.name, Task.agent, Task.dir)
        .join(Task, running)
        .where(KeyHolder.kind == "directory")
        .order_by(KeyHolder.task_id)
        .limit(WORKERS)
    ).all()
    for row in rows:
        if overlap(row.name, task.dir) if task.dir else row.agent == task.agent and row.dir is None:
            found.append(Held("directory", row.name, 1, (row.task_id,)))
    return tuple(found)


def _ended_hour(session: Session, agent: str, now: datetime) -> int | None:
    """Attempts of *agent* that ended in the last hour; None when nothing is known of it. Uses minutes_pkey."""
    found = session.scalar(
        select(func.sum(Minute.done + Minute.failed + Minute.other)).where(
            Minute.minute > now - timedelta(hours=1), Minute.agent == agent
        )
    )
    return None if found is None else int(found)


def _last_run(session: Session, task_id: int) -> dict[str, Any] | None:
    """The newest ended attempt. Uses runs_task_id_attempt_key."""
    run = session.scalar(select(Run).where(Run.task_id == task_id).order_by(Run.attempt.desc()).limit(1))
    return None if run is None else run_json(run)


# -- the family ---------------------------------------------------------------------------------------------------


def _parents(session: Session, task_id: int) -> tuple[tuple[Relative, ...], Count]:
    """The tasks that this one needs and that are not done, and how many. Uses task_dependencies_pkey, tasks_pkey."""
    wanted = (
        select(Task.id, Task.agent, Task.status, Task.name, Task.title, Task.held_at.is_not(None).label("held"))
        .join(Dependency, Dependency.depends_on == Task.id)
        .where(Dependency.task_id == task_id, Task.status != TaskStatus.DONE)
    )
    rows = session.execute(wanted.order_by(Task.id).limit(SHOWN)).all()
    number = overview.count(session, wanted) if len(rows) == SHOWN else Count(len(rows))
    return tuple(Relative(row.id, row.agent, row.status, row.name, row.title, row.held) for row in rows), number


def _roots(session: Session, task_id: int) -> tuple[Relative, ...]:
    """What a blocked task waits for in the end: the first tasks up the chains that are not blocked themselves."""
    rows = session.execute(_ROOTS, {"task": task_id, "chain": CHAIN, "shown": SHOWN})
    return tuple(Relative(row.id, row.agent, row.status, row.name, row.title, row.held) for row in rows)


# Up the chains through blocked tasks only. Uses task_dependencies_pkey and tasks_pkey. UNION ends at what was seen.
_ROOTS = text("""
WITH RECURSIVE up AS (
  SELECT t.id, t.status FROM task_dependencies AS d JOIN tasks AS t ON t.id = d.depends_on
  WHERE d.task_id = :task AND t.status <> 'done'
  UNION
  SELECT t.id, t.status FROM up
  JOIN task_dependencies AS d ON d.task_id = up.id
  JOIN tasks AS t ON t.id = d.depends_on
  WHERE up.status = 'blocked' AND t.status <> 'done'
), looked AS (SELECT id, status FROM up LIMIT :chain)
SELECT t.id, t.agent, t.status, t.name, t.title, t.held_at IS NOT NULL AS held
FROM looked JOIN tasks AS t ON t.id = looked.id
WHERE looked.status <> 'blocked'
ORDER BY (t.status IN ('failed', 'cancelled')) DESC, (t.status = 'waiting') DESC, t.id
LIMIT :shown
""")


def _needed_by(session: Session, task_id: int) -> Count:
    """How many tasks need this one directly. Uses task_dependencies_depends_on."""
    return overview.count(session, select(literal(1)).where(Dependency.depends_on == task_id))


__all__ = ["DiagnosisRepository"]
