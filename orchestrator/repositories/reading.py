"""``ReadingRepository``: tasks, runs and the state of the queue, as the commands print them.

Every method is one read-only transaction whose statements may take two seconds each: a slow screen never hurts the
queue. Lists are paged by key and read neither inputs nor results unless they are asked for.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from sqlalchemy import ARRAY, BigInteger, Engine, Uuid, any_, func, literal, select
from sqlalchemy.orm import Session, defer, sessionmaker

from orchestrator.domain.alerts import DEFAULTS, Thresholds
from orchestrator.domain.entities import Dependency, Plan, Run, Task, WorkerRow
from orchestrator.domain.shapes import (
    alert_json,
    counts_json,
    run_json,
    running_json,
    task_json,
    time_json,
    usage_json,
    worker_json,
)
from orchestrator.domain.snapshot import AgentRow, Alert
from orchestrator.domain.words import ENDED, TaskStatus
from orchestrator.errors import InvalidInput, NotFound
from orchestrator.repositories import overview
from orchestrator.repositories.bounded import bounded
from orchestrator.repositories.filters import LIMIT, TaskFilter, by_status, conditions, indexed
from orchestrator.repositories.overview import AgentWork
from orchestrator.repositories.questions import read_questions

WINDOW = 20_000
"""Ids that one statement looks through when no index knows its filter."""
PAGE_SECONDS = 1.0
EMPTY_SECONDS = 5.0
"""How long a page goes on looking, window after window, and as long as it is empty; the next page goes on behind them."""
DENSE_WINDOWS = 2
"""Windows after which tasks of a status that has an index are looked for there: they are rare among the newest."""

COSTS_SECONDS = 60.0
"""Longest time for adding up costs: the one read that goes through history."""

CostsBy = Literal["agent", "day", "plan", "model"]


class ReadingRepository:
    """Reading for commands and the library."""

    def __init__(self, engine: Engine, thresholds: Thresholds = DEFAULTS) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)
        self._thresholds = thresholds

    def now(self) -> datetime:
        """The database's time: what every stored instant is compared with."""
        with bounded(self._sessions) as session:
            return overview.database_now(session)

    # -- single tasks ---------------------------------------------------------------------------------------------

    def entity(self, task_id: int) -> Task:
        """The task as a detached entity. Raises NotFound."""
        with bounded(self._sessions) as session:
            return _task(session, task_id)

    def task(self, task_id: int) -> dict[str, Any]:
        """The task object, with what its attempts used. Raises NotFound."""
        with bounded(self._sessions) as session:
            return task_object(session, _task(session, task_id))

    def runs(self, task_id: int) -> list[dict[str, Any]]:
        """The run objects of a task, ascending by attempt; empty before its first attempt has ended. Raises NotFound."""
        with bounded(self._sessions) as session:
            _status(session, task_id)
            rows = session.scalars(select(Run).where(Run.task_id == task_id).order_by(Run.attempt)).all()
        return [run_json(run) for run in rows]

    def workspaces(self, records: Sequence[tuple[str, int, int, str]]) -> dict[str, str | None]:
        """Why each workspace must stay, as far as the queue knows; None: it need not.

        *records* are (name, task id, attempt, worker id) as its record says. Uses tasks_pkey, workers_pkey and
        runs_task_id_attempt_key.
        """
        ids = any_(literal(sorted({task for _, task, _, _ in records}), ARRAY(BigInteger)))
        workers = any_(literal(sorted({UUID(worker) for *_, worker in records if worker}), ARRAY(Uuid)))
        with bounded(self._sessions) as session:
            rows = session.execute(select(Task.id, Task.status, Task.workspace).where(Task.id == ids)).all()
            runs = session.execute(select(Run.task_id, Run.attempt, Run.workspace).where(Run.task_id == ids)).all()
            known = {str(id_) for id_ in session.scalars(select(WorkerRow.id).where(WorkerRow.id == workers))}
        tasks = {row.id: row for row in rows}
        recorded = {(run.task_id, run.attempt) for run in runs}
        told = {(run.workspace or {}).get("name") for run in runs}
        found: dict[str, str | None] = {}
        for name, task_id, attempt, worker in records:
            task = tasks.get(task_id)
            current = task is not None and (task.workspace or {}).get("name") == name
            if task is None or not (current or name in told or worker in known):
                found[name] = "no task of this queue knows it"
            elif task.status not in ENDED and (current or (task_id, attempt) not in recorded):
                found[name] = f"task {task_id} is {task.status}"
            elif (task_id, attempt) not in recorded:
                found[name] = f"attempt {attempt} of task {task_id} is not recorded yet"
            else:
                found[name] = None
        return found

    def needed_by(self, task_id: int, limit: int = 50) -> list[dict[str, Any]]:
        """The tasks that need this one directly: id, name, title, agent and status of at most *limit*."""
        with bounded(self._sessions) as session:
            rows = session.execute(
                select(Task.id, Task.name, Task.title, Task.agent, Task.status)
                .join(Dependency, Dependency.task_id == Task.id)
                .where(Dependency.depends_on == task_id)
                .order_by(Task.id)
                .limit(limit)
            )
            return [dict(row._mapping) for row in rows]

    def statuses(self, task_ids: Sequence[int]) -> dict[int, TaskStatus]:
        """The status of each of *task_ids* that exists."""
        with bounded(self._sessions) as session:
            return {
                id_: TaskStatus(status)
                for id_, status in session.execute(
                    select(Task.id, Task.status).where(Task.id == any_(_array(task_ids)))
                )
            }

    def ended(self, task_ids: Sequence[int]) -> dict[int, TaskStatus]:
        """The status of those of *task_ids* that have ended."""
        return {id_: status for id_, status in self.statuses(task_ids).items() if status in ENDED}

    # -- lists ----------------------------------------------------------------------------------------------------

    def tasks(self, wanted: TaskFilter, *, full: bool = False) -> tuple[list[dict[str, Any]], int | None]:
        """Task objects, newest first, and the id to go on behind (None: there are no more).

        Without *full*, ``input`` and ``result`` are null and not read. When no index knows the filter, a page goes
        through the newest tasks for a second (for five while it has none): it may then be short, even empty, and still
        name the id to go on behind. Raises InvalidInput.
        """
        limit = wanted.checked().limit or LIMIT
        with bounded(self._sessions) as session:
            ids, floor = _page(session, wanted, limit + 1)
            statement = select(Task).where(Task.id == any_(_array(ids[:limit]))).order_by(Task.id.desc())
            if not full:
                statement = statement.options(
                    defer(Task.input, raiseload=True),
                    defer(Task.params, raiseload=True),
                    defer(Task.result, raiseload=True),
                )
            page = session.scalars(statement).all() if ids else []
            found = _objects(session, page, full=full)
        if len(ids) > limit:
            return found, ids[limit - 1]
        return found, floor

    # -- the whole queue ------------------------------------------------------------------------------------------

    def status(self, *, kill_grace: float = 2.0) -> dict[str, Any]:
        """The document of ``status``: counts, agents, running, workers, lock_hold_ms, questions, alerts.

        Counts of live tasks stop at 25,000 an agent; ``finished`` is the planner's estimate and says so.
        """
        with bounded(self._sessions) as session:
            now = overview.database_now(session)
            workers = overview.read_workers(session, now)
            running, running_count = overview.read_running(session)
            work = overview.read_work(session)
            agents = overview.read_agents(session, work, workers, now)
            hold = overview.read_lock_hold(session, now)
            finished = overview.finished_estimate(session)
            found = overview.read_alerts(session, now, workers, agents, running, hold, self._thresholds, kill_grace)
            _, asked, asked_at = read_questions(session, 0)
        each = list(work.values())
        counts = counts_json(
            overview.total([c for w in each for c in (w.ready, w.retrying, w.not_due, w.held)]),
            running_count,
            overview.total([w.blocked for w in each]),
            overview.total([w.waiting for w in each]),
        )
        return {
            "counts": {**counts, "finished": {**finished, "estimate": True}},
            "agents": [_agent_json(agent, work.get(agent.name), now) for agent in agents],
            "running": [running_json(task, now) for task in running],
            "workers": [worker_json(worker) for worker in workers],
            "lock_hold_ms": {"mean": hold.mean, "p50": hold.p50, "p99": hold.p99, "count": hold.count},
            "questions": {
                "open": asked.n,
                "capped": asked.capped,
                "oldest_seconds": None if asked_at is None else max(0.0, (now - asked_at).total_seconds()),
            },
            "alerts": [alert_json(alert) for alert in found],
        }

    def workers(self) -> list[dict[str, Any]]:
        """The workers that live, and dead ones whose tasks have not all been taken back; by name."""
        with bounded(self._sessions) as session:
            found = overview.read_workers(session, overview.database_now(session))
        return [worker_json(worker) for worker in found]

    def agents(self) -> list[dict[str, Any]]:
        """The agents that have live tasks, live workers, a pause, or attempts in the last hour; by name."""
        with bounded(self._sessions) as session:
            now = overview.database_now(session)
            work = overview.read_work(session)
            found = overview.read_agents(session, work, overview.read_workers(session, now), now)
        return [_agent_json(agent, work.get(agent.name), now) for agent in found]

    def alerts(self, *, kill_grace: float = 2.0) -> list[Alert]:
        """What a person should look at, the most urgent first; ``shapes.alert_json`` makes JSON of each."""
        with bounded(self._sessions) as session:
            now = overview.database_now(session)
            workers = overview.read_workers(session, now)
            running, _ = overview.read_running(session, 1000)
            agents = overview.read_agents(session, overview.read_work(session), workers, now)
            hold = overview.read_lock_hold(session, now)
            return overview.read_alerts(session, now, workers, agents, running, hold, self._thresholds, kill_grace)

    def plans(self, limit: int = LIMIT) -> list[str]:
        """The names of plans, the one submitted last first."""
        with bounded(self._sessions) as session:
            return list(
                session.scalars(select(Plan.name).order_by(Plan.submitted_at.desc(), Plan.id.desc()).limit(limit))
            )

    def costs(self, by: CostsBy = "agent", *, since: datetime | None = None) -> list[dict[str, Any]]:
        """Tokens and USD of all runs (that ended since *since*), by agent, day (UTC), plan or model.

        Each has ``runs`` and how many of them are of unknown cost; a sum is null when nothing of it is known, and too
        low when some of it is not. This reads history: a minute is allowed for it.
        """
        columns: dict[str, Any] = {
            "agent": Task.agent,
            "day": func.to_char(func.timezone("UTC", Run.finished_at), "YYYY-MM-DD"),
            "plan": Task.plan,
            "model": Run.model,
        }
        if by not in columns:
            raise InvalidInput(f"by: expected agent, day, plan or model, found {by!r}")
        key = columns[by].label("key")
        statement = (
            select(
                key,
                func.count(),
                func.count() - func.count(Run.cost_usd),
                func.sum(Run.input_tokens),
                func.sum(Run.output_tokens),
                func.sum(Run.total_tokens),
                func.sum(Run.cost_usd),
            )
            .group_by(key)
            .order_by(key)
        )
        if by in ("agent", "plan"):
            statement = statement.join(Task, Task.id == Run.task_id)
        if since is not None:
            statement = statement.where(Run.finished_at >= since)
        with bounded(self._sessions, COSTS_SECONDS, scan=True) as session:
            rows = session.execute(statement).all()
        return [
            {
                by: row[0],
                "runs": row[1],
                "unknown_cost_runs": row[2],
                "input_tokens": _int(row[3]),
                "output_tokens": _int(row[4]),
                "total_tokens": _int(row[5]),
                "cost_usd": None if row[6] is None else float(row[6]),
            }
            for row in rows
        ]


# -- the parts ----------------------------------------------------------------------------------------------------


def task_object(session: Session, task: Task) -> dict[str, Any]:
    """The task object of *task*, with what its attempts used."""
    return _objects(session, [task], full=True)[0]


def _task(session: Session, task_id: int) -> Task:
    found = session.get(Task, task_id) if 0 < task_id < 2**63 else None
    if found is None:
        raise NotFound(f"task {task_id} does not exist", hint="orchestrator list shows the ids", task=task_id)
    return found


def _status(session: Session, task_id: int) -> TaskStatus:
    found = session.scalar(select(Task.status).where(Task.id == task_id)) if 0 < task_id < 2**63 else None
    if found is None:
        raise NotFound(f"task {task_id} does not exist", hint="orchestrator list shows the ids", task=task_id)
    return TaskStatus(found)


def _page(session: Session, wanted: TaskFilter, number: int) -> tuple[list[int], int | None]:
    """The *number* newest ids of *wanted*, and the id behind which to go on when time was over before that many."""
    where = conditions(wanted)
    if wanted.after_id is not None:
        where.append(Task.id < wanted.after_id)
    newest = select(Task.id).order_by(Task.id.desc()).limit(number)
    if indexed(wanted) or not conditions(wanted):
        return list(session.scalars(newest.where(*where))), None
    statuses = {TaskStatus(status) for status in wanted.statuses}
    somewhere = bool(statuses) and TaskStatus.DONE not in statuses
    if somewhere and statuses <= _NARROW:
        return list(session.scalars(by_status(sorted(statuses), where, number))), None
    ids: list[int] = []
    floor = wanted.after_id
    began = time.monotonic()
    for windows in itertools.count(1):
        # From id to id, with a jump over what was removed: no window has more rows than ids.
        top = session.scalar(select(func.max(Task.id)).where(*([] if floor is None else [Task.id < floor])))
        if top is None:
            return ids, None
        floor = max(0, top - WINDOW + 1)
        window = newest.where(*where, Task.id >= floor, Task.id <= top).limit(number - len(ids))
        ids += session.scalars(window)
        if len(ids) >= number:
            return ids, None
        over = time.monotonic() - began > (PAGE_SECONDS if ids else EMPTY_SECONDS)
        if somewhere and (over or windows >= DENSE_WINDOWS):
            rest = by_status(sorted(statuses), [*where, Task.id < floor], number - len(ids))
            return [*ids, *session.scalars(rest)], None
        if over:
            return ids, floor
    raise AssertionError("unreachable")


_NARROW = {TaskStatus.RUNNING, TaskStatus.FAILED, TaskStatus.CANCELLED}
"""Statuses whose index has them in id order."""


def _objects(session: Session, tasks: Sequence[Task], *, full: bool) -> list[dict[str, Any]]:
    ids = [task.id for task in tasks]
    if not ids:
        return []
    parents: dict[int, list[int]] = {}
    for task_id, parent in session.execute(
        select(Dependency.task_id, Dependency.depends_on)
        .where(Dependency.task_id == any_(_array(ids)))
        .order_by(Dependency.task_id, Dependency.depends_on)
    ):
        parents.setdefault(task_id, []).append(parent)
    usage = _usage(session, ids)
    held = overview.held_by(session, [task.id for task in tasks if task.held_at is not None])
    found = [
        task_json(
            task,
            depends_on=parents.get(task.id, ()),
            usage=_with_live(usage.get(task.id), task),
            full=full,
        )
        for task in tasks
    ]
    for each in found:
        if each["id"] in held:
            each["note"] = f"held {held[each['id']]}"
    return found


def _usage(session: Session, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
    """What the ended attempts of *ids* used, added up. Uses runs_task_id_attempt_key."""

    def same(column: Any) -> Any:
        """The value that all have in common, else "mixed"."""
        return func.min(column), func.max(column)

    rows = session.execute(
        select(
            Run.task_id,
            func.sum(Run.input_tokens),
            func.sum(Run.output_tokens),
            func.sum(Run.total_tokens),
            func.sum(Run.cost_usd),
            *same(Run.cost_source),
            *same(Run.counter),
            func.bool_and(func.coalesce(Run.usage_complete, literal(False))),
        )
        .where(Run.task_id == any_(_array(ids)))
        .group_by(Run.task_id)
    )
    return {
        row[0]: usage_json(
            input_tokens=_int(row[1]),
            output_tokens=_int(row[2]),
            total_tokens=_int(row[3]),
            cost_usd=None if row[4] is None else float(row[4]),
            cost_source=row[5] if row[5] == row[6] else "mixed",
            counter=row[7] if row[7] == row[8] else "mixed",
            complete=row[9],
        )
        for row in rows
    }


def _with_live(usage: dict[str, Any] | None, task: Task) -> dict[str, Any] | None:
    """*usage* and what the running attempt has reported so far, which is never complete."""
    live = {key: value for key, value in (task.live_usage or {}).items() if not key.startswith("activity")}
    if not live or task.status != TaskStatus.RUNNING:
        return usage
    both = dict(usage) if usage is not None else usage_json()
    for key in ("input_tokens", "output_tokens", "total_tokens", "cost_usd"):
        if live.get(key) is not None:
            both[key] = (both[key] or 0) + live[key]
    for key in ("cost_source", "counter"):
        if live.get(key) is not None:
            both[key] = live[key] if both[key] in (None, live[key]) else "mixed"
    both["complete"] = False
    return both


def _agent_json(agent: AgentRow, work: AgentWork | None, now: datetime) -> dict[str, Any]:
    def wait(since: datetime | None) -> float | None:
        return None if since is None else max(0.0, (now - since).total_seconds())

    kinds = ("ready", "retrying", "not_due", "held", "blocked", "waiting")
    counts = {kind: getattr(agent, kind) for kind in kinds}
    oldest = {} if work is None else work.oldest
    return {
        "name": agent.name,
        "state": agent.state or "ok",
        "state_until": time_json(agent.state_until),
        "state_reason": agent.state_reason,
        "live_workers": agent.live_workers,
        "running": agent.running,
        **{kind: count.n for kind, count in counts.items()},
        "capped": any(count.capped for count in counts.values()),
        "oldest_wait_seconds": wait(agent.oldest_ready_at),
        "oldest_wait_by_priority": {
            str(priority): wait(since) for priority, since in sorted(oldest.items(), reverse=True)
        },
        "done_last_hour": agent.done_hour,
        "failed_last_hour": agent.failed_hour,
        "usd_last_hour": agent.usd_hour,
    }


def _array(ids: Sequence[int]) -> Any:
    return literal([id_ for id_ in ids if 0 < id_ < 2**63], ARRAY(BigInteger))


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


__all__ = ["CostsBy", "ReadingRepository", "TaskFilter", "task_object"]
