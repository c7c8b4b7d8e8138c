"""``SnapshotRepository``: the values that live screens are drawn from, each from one read-only transaction.

No connection is held between two snapshots. All reads are bounded: see ``overview``.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from typing import Any

from sqlalchemy import Engine, func, or_, select, text
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.database.schema import VERSION_TABLE
from orchestrator.domain.alerts import DEFAULTS, Thresholds
from orchestrator.domain.entities import AgentState, Dependency, Run, Task
from orchestrator.domain.snapshot import Failure, PlanTask, Question, ServerInfo, Snapshot, TaskError
from orchestrator.domain.words import TaskStatus, will_not_stop
from orchestrator.repositories import overview
from orchestrator.repositories.bounded import bounded
from orchestrator.repositories.questions import questions_of, read_questions

RUNNING = 200
"""Running tasks on a screen."""
COUNT_SECONDS = 5.0
"""How old the counts of waiting tasks may be: the one read whose cost grows with the queue."""
ALERTS = 50
QUESTIONS = 50
FAILURES = 20


class SnapshotRepository:
    """Reading for screens."""

    def __init__(self, engine: Engine, thresholds: Thresholds = DEFAULTS) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)
        self._thresholds = thresholds
        self._counting = threading.Lock()
        self._counted: dict[str, overview.AgentWork] = {}
        self._count_again = -math.inf

    def dashboard(self, *, version: str | None = None, kill_grace: float = 2.0) -> Snapshot:
        """The whole queue at one instant. *version* is that of this program, for the header.

        Raises DatabaseUnavailable when a part of it takes longer than two seconds.
        """
        began = time.perf_counter()
        with bounded(self._sessions) as session:
            now = overview.database_now(session)
            workers = overview.read_workers(session, now)
            running, running_count = overview.read_running(session, RUNNING)
            work = self._counts(session)
            agents = overview.read_agents(session, work, workers, now)
            server = _server(session, version)
            failures = _failures(session)
            minutes = overview.read_minutes(session, now)
            hold = overview.read_lock_hold(session, now)
            any_task = overview.any_task(session)
            found = overview.read_alerts(session, now, workers, agents, running, hold, self._thresholds, kill_grace)
            questions, question_count, _ = read_questions(session, QUESTIONS)
        each = list(work.values())
        return Snapshot(
            taken_at=now,
            server=server,
            workers=tuple(workers),
            agents=tuple(agents),
            running=tuple(running),
            running_count=running_count,
            ready=overview.total([w.ready for w in each]),
            retrying=overview.total([w.retrying for w in each]),
            not_due=overview.total([w.not_due for w in each]),
            held=overview.total([w.held for w in each]),
            blocked=overview.total([w.blocked for w in each]),
            waiting=overview.total([w.waiting for w in each]),
            alerts=tuple(found[:ALERTS]),
            alert_count=len(found),
            questions=questions,
            question_count=question_count.n,
            failures=failures,
            minutes=minutes,
            lock_hold=hold,
            any_task=any_task,
            read_seconds=time.perf_counter() - began,
        )

    def _counts(self, session: Session) -> dict[str, overview.AgentWork]:
        """The live tasks by agent. Those that wait are counted anew every COUNT_SECONDS, or less often if it takes long."""
        with self._counting:
            began = time.monotonic()
            if began >= self._count_again:
                self._counted = overview.read_queue(session)
                ended = time.monotonic()
                self._count_again = began + max(COUNT_SECONDS, 10 * (ended - began))
            work = {name: replace(each) for name, each in self._counted.items()}
        overview.count_running(session, work)
        return work

    def server(self, *, version: str | None = None) -> ServerInfo:
        """Which database this is."""
        with bounded(self._sessions) as session:
            return _server(session, version)

    def plan_tasks(self, plan_id: int) -> tuple[PlanTask, ...]:
        """The current tasks of a plan, in the plan's order, whole. Uses tasks_of_plan and runs_task_id_attempt_key."""
        current = (Task.plan_id == plan_id, Task.superseded_at.is_(None))
        with bounded(self._sessions) as session:
            rows = session.execute(select(*_PLAN_COLUMNS).where(*current).order_by(Task.plan_order, Task.id)).all()
            ids = [row.id for row in rows]
            needs: dict[int, list[int]] = {}
            for task_id, parent in session.execute(
                select(Dependency.task_id, Dependency.depends_on)
                .join(Task, Task.id == Dependency.task_id)
                .where(*current)
                .order_by(Dependency.depends_on)
            ):
                needs.setdefault(task_id, []).append(parent)
            elapsed: dict[int, float] = dict(
                session.execute(
                    select(Run.task_id, func.sum(Run.duration_seconds))
                    .join(Task, Task.id == Run.task_id)
                    .where(*current)
                    .group_by(Run.task_id)
                ).all()
            )
            spent = overview.spent(session, ids)
            waits = any(row.status == TaskStatus.WAITING for row in rows)
            asked = questions_of(session, *current) if waits else {}
            held = overview.held_by(session, [row.id for row in rows if row.held_at is not None])
            paused = set(session.scalars(_PAUSED))
        return tuple(
            _plan_task(
                row,
                needs.get(row.id, ()),
                elapsed.get(row.id),
                spent.get(row.id),
                held.get(row.id) or (f"agent {row.agent} is paused" if row.agent in paused else None),
                asked.get(row.id),
            )
            for row in rows
        )


_PAUSED = select(AgentState.name).where(
    AgentState.paused_at.is_not(None),
    or_(AgentState.paused_until.is_(None), AgentState.paused_until > func.clock_timestamp()),
)


_PLAN_COLUMNS = (
    Task.id,
    Task.name,
    Task.agent,
    Task.status,
    Task.title,
    Task.attempt,
    Task.max_retries,
    Task.retry_count,
    Task.started_at,
    Task.finished_at,
    Task.available_at,
    Task.due,
    Task.held_at,
    Task.budget_seconds,
    Task.budget_tokens,
    Task.budget_usd,
    Task.budget_turns,
    Task.on_limit,
    Task.progress_percent,
    Task.progress_message,
    Task.last_output,
    Task.last_output_at,
    Task.live_usage,
    Task.cancel_requested_at,
    Task.error_class,
    Task.error_cause,
    Task.error_message,
)


def _plan_task(
    row: Any, needs: Any, elapsed: float | None, spent: Any, note: str | None, question: Question | None
) -> PlanTask:
    later = row.status == TaskStatus.PENDING and not row.due
    running = row.status == TaskStatus.RUNNING
    return PlanTask(
        id=row.id,
        name=row.name or row.title or f"{row.agent} {row.id}",
        agent=row.agent,
        status=row.status,
        title=row.title,
        attempt=row.attempt,
        max_retries=row.max_retries,
        retry_count=row.retry_count,
        started_at=row.started_at,
        finished_at=row.finished_at,
        next_attempt_at=row.available_at if later else None,
        held=row.held_at is not None,
        needs=tuple(needs),
        budget=overview.budget_of(row),
        spend=overview.with_live(spent, row.live_usage if running else None),
        elapsed=None if elapsed is None else float(elapsed),
        percent=row.progress_percent,
        last_output=row.last_output or row.progress_message,
        will_not_stop=will_not_stop(row.progress_message) if running else None,
        last_output_at=row.last_output_at,
        cancel_requested_at=row.cancel_requested_at,
        error=None if row.error_class is None else TaskError(row.error_class, row.error_cause, row.error_message),
        note=note if row.status == TaskStatus.PENDING else None,
        question=question,
    )


def _failures(session: Session) -> tuple[Failure, ...]:
    """The last failures, newest first. Uses tasks_failed: the latest are looked for among the newest 500 ids."""
    newest = (
        select(
            Task.id,
            Task.agent,
            Task.finished_at,
            Task.name,
            Task.title,
            Task.error_class,
            Task.error_cause,
            Task.error_message,
            Task.attempt,
            Task.max_retries,
            Task.retry_count,
        )
        .where(Task.status == text("'failed'"))
        .order_by(Task.id.desc())
        .limit(500)
        .subquery()
    )
    rows = session.execute(select(newest).order_by(newest.c.finished_at.desc(), newest.c.id.desc()).limit(FAILURES))
    return tuple(
        Failure(
            task_id=row.id,
            agent=row.agent,
            at=row.finished_at,
            name=row.name,
            title=row.title,
            error_class=row.error_class,
            cause=row.error_cause,
            message=row.error_message,
            attempt=row.attempt,
            max_retries=row.max_retries,
            retry_count=row.retry_count,
        )
        for row in rows
    )


def _server(session: Session, version: str | None) -> ServerInfo:
    driver: Any = session.connection().connection.dbapi_connection
    info = driver.info
    schema = session.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().first()
    host = info.host or ""
    return ServerInfo(
        host=host,
        database=info.dbname,
        port=None if host.startswith("/") else info.port,
        version=(info.parameter_status("server_version") or "").split(" ")[0] or None,
        orchestrator=version,
        schema=schema,
    )


__all__ = ["SnapshotRepository"]
