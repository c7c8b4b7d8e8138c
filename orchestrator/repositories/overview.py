"""What screens know of the whole queue, from bounded reads: workers, running tasks, agents, minutes, estimates.

Functions on a Session, so that ``status`` and the dashboard read the same things inside one transaction each. Nothing
here counts history: live tasks come from partial indexes and stop at a cap, rates from the minutes table, and the
number of finished tasks is the planner's estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, BigInteger, and_, any_, case, func, literal, or_, select, text
from sqlalchemy.orm import Session

from orchestrator.domain import histogram, snapshot
from orchestrator.domain.alerts import Thresholds, alerts
from orchestrator.domain.entities import AgentState, Breaker, Minute, Run, Task, WorkerRow
from orchestrator.domain.outcome import Budget
from orchestrator.domain.shapes import activity_of
from orchestrator.domain.snapshot import AgentRow, Alert, Count, LockHold, RunningTask, Spend, Unserved
from orchestrator.domain.words import OnLimit, OutcomeClass, TaskStatus, will_not_stop
from orchestrator.repositories.audit import last_entries
from orchestrator.repositories.claims import ROUTE_SEPARATOR
from orchestrator.repositories.keys import base_route

CAP = 25_000
"""Where counting stops."""
ROUTES = 500
"""Most routes whose ready tasks are looked at one by one."""
SMALL_BYTES = 8 << 20
"""A tasks table up to this size is counted instead of estimated: the planner knows nothing of it yet."""

_RUNNING = literal("running", literal_execute=True)


def database_now(session: Session) -> datetime:
    """The database's time."""
    now: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    return now


# -- workers ------------------------------------------------------------------------------------------------------


def read_workers(session: Session, now: datetime) -> list[snapshot.WorkerRow]:
    """Workers that are not dead or gone, and dead ones whose tasks have not all been taken back. Uses workers_live."""
    held: dict[UUID, int] = {}
    stopping: dict[UUID, int] = {}
    for worker, number, ending in session.execute(
        select(Task.claimed_by, func.count(), func.count(Task.cancel_requested_at))
        .where(Task.status == _RUNNING)
        .group_by(Task.claimed_by)
    ):
        if worker is not None:
            held[worker], stopping[worker] = number, ending
    rows = session.scalars(
        select(WorkerRow)
        .where(
            or_(
                and_(WorkerRow.stopped_at.is_(None), WorkerRow.dead_at.is_(None)),
                WorkerRow.id == any_(literal(list(held), ARRAY(WorkerRow.id.type))),
            )
        )
        .order_by(WorkerRow.name)
        .limit(10_000)
    ).all()
    return [_worker(row, now, held.get(row.id, 0), stopping.get(row.id, 0)) for row in rows]


def _worker(row: WorkerRow, now: datetime, running: int, stopping: int) -> snapshot.WorkerRow:
    if row.dead_at is not None or row.stopped_at is not None:
        state = "dead"
    elif now - row.renewed_at > row.heartbeat * 2:
        state = "silent"
    elif row.draining_at is not None:
        state = "draining"
    else:
        state = "stopping" if stopping else ""
    return snapshot.WorkerRow(
        id=str(row.id),
        name=row.name,
        host=row.host,
        state=state,
        agents=tuple(dict.fromkeys(_name(route) for route in row.agents)),
        routes=tuple(row.agents),
        running=running,
        slots=row.slots,
        stopping=stopping,
        started_at=row.started_at,
        renewed_at=row.renewed_at,
        lease_seconds=row.lease.total_seconds() if isinstance(row.lease, timedelta) else 40.0,
        deaf_since=row.deaf_since,
        clock_ahead=row.clock_ahead,
    )


def _name(route: str) -> str:
    return route.partition(ROUTE_SEPARATOR)[0]


# -- running tasks ------------------------------------------------------------------------------------------------


def read_running(session: Session, limit: int = 200) -> tuple[list[RunningTask], Count]:
    """At most *limit* running tasks, those nearest to a person's attention first, and how many there are.

    Rank: over budget, from 80 % of it, being stopped, then the oldest. Uses tasks_running.
    """
    share = func.extract("epoch", func.clock_timestamp() - Task.started_at) / Task.budget_seconds
    rank = case((share >= 1, 0), (share >= 0.8, 1), (Task.cancel_requested_at.is_not(None), 2), else_=3)
    rows = session.execute(
        select(*_RUNNING_COLUMNS, WorkerRow.name.label("worker"))
        .outerjoin(WorkerRow, WorkerRow.id == Task.claimed_by)
        .where(Task.status == _RUNNING)
        .order_by(rank, Task.started_at, Task.id)
        .limit(limit)
    ).all()
    number = count(session, select(literal(1)).where(Task.status == _RUNNING))
    earlier = spent(session, [row.id for row in rows if row.attempt > 1])
    cancelled = [row.id for row in rows if row.cancel_requested_at is not None]
    by = last_entries(session, "cancel", cancelled)
    return [_running(row, earlier.get(row.id), by.get(row.id, (None,))[0]) for row in rows], number


_RUNNING_COLUMNS = (
    Task.id,
    Task.agent,
    Task.started_at,
    Task.name,
    Task.title,
    Task.plan,
    Task.attempt,
    Task.max_retries,
    Task.retry_count,
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
)


def budget_of(row: Any) -> Budget:
    """The budget columns of a row as a value."""
    return Budget(
        row.budget_seconds,
        row.budget_tokens,
        row.budget_usd,
        row.budget_turns,
        OnLimit(row.on_limit or OnLimit.FAIL),
    )


def _running(row: Any, earlier: Spend | None, cancelled_by: str | None) -> RunningTask:
    stopping = None
    if row.cancel_requested_at is not None:
        stopping = f"cancel by {cancelled_by}" if cancelled_by else "cancel"
    doing = activity_of(row.live_usage)
    return RunningTask(
        id=row.id,
        agent=row.agent,
        started_at=row.started_at,
        name=row.name,
        title=row.title,
        plan=row.plan,
        worker=row.worker or "",
        attempt=row.attempt,
        max_retries=row.max_retries,
        retry_count=row.retry_count,
        budget=budget_of(row),
        spend=with_live(earlier, row.live_usage),
        percent=row.progress_percent,
        last_output=row.last_output or row.progress_message,
        will_not_stop=will_not_stop(row.progress_message),
        last_output_at=row.last_output_at,
        cancel_requested_at=row.cancel_requested_at,
        stopping=stopping,
        activity=doing[0] if doing else None,
        activity_since=doing[1] if doing else None,
    )


def held_by(session: Session, ids: Sequence[int]) -> dict[int, str]:
    """Who holds each of *ids* and why, as far as the audit trail knows: ``by ops: after the freeze``."""
    found = last_entries(session, "hold", ids)
    return {task_id: f"by {actor}" + (f": {reason}" if reason else "") for task_id, (actor, reason) in found.items()}


def spent(session: Session, ids: Sequence[int]) -> dict[int, Spend]:
    """What the ended attempts of *ids* used. Uses runs_task_id_attempt_key; only for the few tasks of a screen."""
    if not ids:
        return {}
    rows = session.execute(
        select(
            Run.task_id,
            func.sum(Run.total_tokens),
            func.sum(Run.cost_usd),
            func.sum(Run.turns),
            func.count() - func.count(Run.total_tokens),
            func.count() - func.count(Run.cost_usd),
        )
        .where(Run.task_id == any_(literal(list(ids), ARRAY(BigInteger))))
        .group_by(Run.task_id)
    )
    return {
        row[0]: Spend(
            None if row[1] is None else int(row[1]),
            None if row[2] is None else float(row[2]),
            None if row[3] is None else int(row[3]),
            tokens_partial=row[1] is not None and row[4] > 0,
            usd_partial=row[2] is not None and row[5] > 0,
        )
        for row in rows
    }


def with_live(earlier: Spend | None, live: dict[str, Any] | None) -> Spend:
    """What ended attempts used, and what the running one has reported so far."""
    earlier, live = earlier or Spend(), live or {}

    def both(one: Any, name: str) -> Any:
        other = live.get(name)
        return one if other is None else other if one is None else one + other

    return Spend(
        both(earlier.tokens, "total_tokens"),
        both(earlier.usd, "cost_usd"),
        both(earlier.turns, "turns"),
        tokens_partial=earlier.tokens_partial,
        usd_partial=earlier.usd_partial,
    )


# -- agents -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class AgentWork:
    """The tasks of one agent, while they are being counted."""

    ready: Count = Count()
    retrying: Count = Count()
    not_due: Count = Count()
    held: Count = Count()
    blocked: Count = Count()
    waiting: Count = Count()
    running: int = 0
    oldest: dict[int, datetime] = field(default_factory=dict)
    """Since when the oldest ready task of each priority could run."""
    routes: dict[str, tuple[Count, datetime | None]] = field(default_factory=dict)
    """The ready tasks by what workers claim by: how many, and since when the oldest could run."""

    def add_ready(self, route: str, number: Count, since: datetime | None) -> None:
        """Count ready tasks of *route*."""
        known, oldest = self.routes.get(route, (Count(), None))
        at = [each for each in (oldest, since) if each is not None]
        self.routes[route] = plus(known, number), min(at, default=None)
        self.ready = plus(self.ready, number)

    @property
    def oldest_ready_at(self) -> datetime | None:
        return min(self.oldest.values(), default=None)


def read_work(session: Session) -> dict[str, AgentWork]:
    """The live tasks by agent, running ones too."""
    work = read_queue(session)
    count_running(session, work)
    return work


def count_running(session: Session, work: dict[str, AgentWork]) -> None:
    """Set how many tasks of each agent run, in *work*. Uses tasks_running."""
    for each in work.values():
        each.running = 0
    for agent, number in session.execute(
        select(Task.agent, func.count()).where(Task.status == _RUNNING).group_by(Task.agent)
    ):
        work.setdefault(agent, AgentWork()).running = number


def read_queue(session: Session) -> dict[str, AgentWork]:
    """The live tasks by agent, but for those that run.

    Ready tasks are counted by route, each up to CAP, jumping from route to route in the index tasks_ready; the other
    kinds together up to CAP each, from tasks_suspect, tasks_not_due, tasks_held and tasks_parked.
    """
    work: dict[str, AgentWork] = {}

    def of(agent: str) -> AgentWork:
        return work.setdefault(agent, AgentWork())

    counted: set[str] = set()
    for route, number, priority, since in session.execute(_READY, {"cap": CAP, "routes": ROUTES}):
        base = base_route(route)
        mine = of(_name(base))
        first = route not in counted
        counted.add(route)
        mine.add_ready(base, Count(min(number, CAP), number > CAP) if first else Count(), since)
        if priority is not None and since is not None:
            mine.oldest[priority] = min(since, mine.oldest.get(priority, since))
    if len(counted) >= ROUTES:  # there may be more of them
        for mine in work.values():
            mine.ready = Count(mine.ready.n, True)
    for route, number, since, capped in session.execute(_SUSPECTS, {"cap": CAP}):
        base = base_route(route)
        mine = of(_name(base))
        mine.add_ready(base, Count(number, capped), since)
        mine.oldest[0] = min(since, mine.oldest.get(0, since))
    for agent, kind, number, capped in session.execute(_LATER, {"cap": CAP}):
        mine = of(agent)
        setattr(mine, kind, plus(getattr(mine, kind), Count(number, capped)))
    return work


def plus(one: Count, other: Count) -> Count:
    """Both counts together."""
    return Count(one.n + other.n, one.capped or other.capped)


def total(counts: Sequence[Count]) -> Count:
    """All *counts* together."""
    return Count(sum(count.n for count in counts), any(count.capped for count in counts))


# A loose index scan: from each route straight to the next, in each route from priority to priority. The head of a
# priority is where its oldest are; among the first fifty a retried one may be younger than those behind it.
_READY = text("""
WITH RECURSIVE routes AS (
  (SELECT route FROM tasks WHERE status = 'pending' AND due AND held_at IS NULL AND lost_count = 0
   ORDER BY route LIMIT 1)
  UNION ALL
  SELECT (SELECT t.route FROM tasks AS t
          WHERE t.status = 'pending' AND t.due AND t.held_at IS NULL AND t.lost_count = 0 AND t.route > routes.route
          ORDER BY t.route LIMIT 1)
  FROM routes WHERE routes.route IS NOT NULL
)
SELECT r.route, n.number, p.priority, p.since
FROM (SELECT route FROM routes WHERE route IS NOT NULL LIMIT :routes) AS r
CROSS JOIN LATERAL (
  SELECT count(*) AS number FROM (
    SELECT FROM tasks AS t
    WHERE t.status = 'pending' AND t.due AND t.held_at IS NULL AND t.lost_count = 0 AND t.route = r.route
    LIMIT :cap + 1) AS counted
) AS n
LEFT JOIN LATERAL (
  WITH RECURSIVE levels AS (
    (SELECT priority FROM tasks AS t
     WHERE t.status = 'pending' AND t.due AND t.held_at IS NULL AND t.lost_count = 0 AND t.route = r.route
     ORDER BY priority DESC LIMIT 1)
    UNION ALL
    SELECT (SELECT t.priority FROM tasks AS t
            WHERE t.status = 'pending' AND t.due AND t.held_at IS NULL AND t.lost_count = 0 AND t.route = r.route
              AND t.priority < levels.priority
            ORDER BY t.priority DESC LIMIT 1)
    FROM levels WHERE levels.priority IS NOT NULL
  )
  SELECT l.priority, (
    SELECT min(head.available_at) FROM (
      SELECT t.available_at FROM tasks AS t
      WHERE t.status = 'pending' AND t.due AND t.held_at IS NULL AND t.lost_count = 0 AND t.route = r.route
        AND t.priority = l.priority
      ORDER BY t.id LIMIT 50) AS head) AS since
  FROM (SELECT priority FROM levels WHERE priority IS NOT NULL LIMIT 20) AS l
) AS p ON true
""")

_SUSPECTS = text("""
SELECT route, count(*), min(available_at), sum(count(*)) OVER () > :cap AS capped FROM (
  SELECT route, available_at FROM tasks
  WHERE status = 'pending' AND due AND held_at IS NULL AND lost_count > 0 LIMIT :cap + 1) AS counted
GROUP BY route
""")

_LATER = text("""
SELECT agent, kind, count(*), sum(count(*)) OVER (PARTITION BY kind) > :cap AS capped FROM (
  (SELECT agent, CASE WHEN attempt > 0 THEN 'retrying' ELSE 'not_due' END AS kind FROM tasks
   WHERE status = 'pending' AND NOT due AND held_at IS NULL ORDER BY available_at LIMIT :cap + 1)
  UNION ALL
  (SELECT agent, 'held' FROM tasks WHERE status = 'pending' AND held_at IS NOT NULL ORDER BY id LIMIT :cap + 1)
  UNION ALL
  (SELECT agent, 'blocked' FROM tasks WHERE status = 'blocked' LIMIT :cap + 1)
  UNION ALL
  (SELECT agent, 'waiting' FROM tasks WHERE status = 'waiting' LIMIT :cap + 1)
) AS counted
GROUP BY agent, kind
""")


def read_agents(
    session: Session, work: dict[str, AgentWork], workers: Sequence[snapshot.WorkerRow], now: datetime
) -> list[AgentRow]:
    """The agents that have live tasks, live workers, a pause, or ended attempts in the last hour; by name."""
    paused = {
        row.name: row
        for row in session.scalars(
            select(AgentState).where(
                AgentState.paused_at.is_not(None),
                or_(AgentState.paused_until.is_(None), AgentState.paused_until > now),
            )
        )
    }
    shut = {name: row for row in session.scalars(select(Breaker).order_by(Breaker.refusals)) for name in row.agents}
    hour = {
        row[0]: row
        for row in session.execute(
            select(
                Minute.agent,
                func.sum(Minute.done),
                func.sum(Minute.failed),
                func.sum(Minute.done + Minute.failed + Minute.other),
                func.sum(Minute.cost_usd),
            )
            .where(Minute.minute > now - timedelta(hours=1), Minute.agent != "")
            .group_by(Minute.agent)
        )
    }
    live: dict[str, int] = {}
    served: set[str] = set()
    for worker in workers:
        if worker.state in ("", "stopping"):
            served.update(worker.routes)
            for agent in worker.agents:
                live[agent] = live.get(agent, 0) + 1
    unserved = _unserved(session, work, served)
    return [
        _agent(
            name,
            work.get(name, AgentWork()),
            paused.get(name),
            hour.get(name),
            live.get(name, 0),
            tuple(unserved.get(name, ())),
            shut.get(name),
        )
        for name in sorted({*work, *paused, *hour, *live, *shut})
    ]


def needs_login(breaker: Breaker) -> bool:
    """Whether a person has to log in: the refusal was confirmed by a probe. The first may be a lost race for a token."""
    return breaker.kind == OutcomeClass.UNAUTHENTICATED and breaker.refusals > 1


def _unserved(session: Session, work: dict[str, AgentWork], served: set[str]) -> dict[str, list[Unserved]]:
    """The ready tasks by agent whose routes are not *served*: one entry for the configured agent, one for each plan's own.

    Uses tasks_ready and tasks_suspect.
    """
    routes = {
        route: of for each in work.values() for route, of in each.routes.items() if route not in served and of[0].n
    }
    own = [route for route in routes if ROUTE_SEPARATOR in route]
    plans: dict[str, str | None] = dict(session.execute(_PLANS, {"routes": own}).all()) if own else {}
    together: dict[tuple[str, bool, str | None], Unserved] = {}
    for route, (number, since) in routes.items():
        local, plan = ROUTE_SEPARATOR in route, plans.get(route)
        key = _name(route), local, plan
        known = together.get(key, Unserved(Count(), plan=plan, local=local))
        at = [each for each in (known.since, since) if each is not None]
        together[key] = replace(known, ready=plus(known.ready, number), since=min(at, default=None))
    found: dict[str, list[Unserved]] = {}
    for (agent, _, _), each in sorted(together.items(), key=lambda pair: (pair[0][0], pair[0][1], pair[0][2] or "")):
        found.setdefault(agent, []).append(each)
    return found


_PLANS = text("""
SELECT r.route, t.plan FROM unnest(CAST(:routes AS text[])) AS r(route) CROSS JOIN LATERAL (
  (SELECT plan FROM tasks
   WHERE status = 'pending' AND due AND held_at IS NULL AND lost_count = 0 AND route = r.route LIMIT 1)
  UNION ALL
  (SELECT plan FROM tasks
   WHERE status = 'pending' AND due AND held_at IS NULL AND lost_count > 0 AND route = r.route LIMIT 1)
  LIMIT 1) AS t
""")


def _agent(
    name: str,
    work: AgentWork,
    paused: AgentState | None,
    hour: Any,
    live: int,
    unserved: tuple[Unserved, ...],
    breaker: Breaker | None,
) -> AgentRow:
    state, until, reason, since = "", None, None, None
    if paused is not None:
        state, until, reason, since = "paused", paused.paused_until, paused.reason, paused.paused_at
    elif unserved and not live:
        state = "no_worker"
    elif breaker is not None:
        state = "login" if needs_login(breaker) else "breaker"
        until, reason, since = breaker.until, breaker.message, breaker.opened_at
    return AgentRow(
        name=name,
        state=state,
        state_until=until,
        state_reason=reason,
        state_since=since,
        live_workers=live,
        running=work.running,
        ready=work.ready,
        retrying=work.retrying,
        not_due=work.not_due,
        held=work.held,
        blocked=work.blocked,
        waiting=work.waiting,
        oldest_ready_at=work.oldest_ready_at,
        done_hour=None if hour is None else int(hour[1]),
        failed_hour=None if hour is None else int(hour[2]),
        attempts_hour=None if hour is None else int(hour[3]),
        usd_hour=None if hour is None else float(hour[4]),
        unserved=unserved,
    )


# -- minutes ------------------------------------------------------------------------------------------------------


def read_lock_hold(session: Session, now: datetime) -> LockHold:
    """How long claims of all workers held their row locks over the last hour. Uses minutes_pkey."""
    rows = session.execute(
        select(Minute.hold_ms, Minute.holds).where(Minute.minute > now - timedelta(hours=1), Minute.agent == "")
    ).all()
    counts = histogram.added(row.holds for row in rows)
    number = sum(counts)
    if number == 0:
        return LockHold()
    return LockHold(
        mean=sum(row.hold_ms for row in rows) / number,
        p50=histogram.quantile(counts, 0.5),
        p99=histogram.quantile(counts, 0.99),
        count=number,
    )


def read_minutes(session: Session, now: datetime) -> tuple[snapshot.Minute, ...]:
    """The last 60 minutes of all workers together, oldest first, the one that goes on too. Uses minutes_pkey.

    So they add up to the same hour as the numbers of agents.
    """
    this = now.replace(second=0, microsecond=0)
    rows = {
        row[0]: row
        for row in session.execute(
            select(
                Minute.minute,
                func.sum(Minute.done),
                func.sum(Minute.failed),
                func.sum(Minute.cost_usd),
                func.sum(Minute.unknown_cost),
            )
            .where(Minute.minute > this - timedelta(minutes=60))
            .group_by(Minute.minute)
        )
    }
    found = []
    for back in range(59, -1, -1):
        at = this - timedelta(minutes=back)
        row = rows.get(at)
        found.append(
            snapshot.Minute(at)
            if row is None
            else snapshot.Minute(at, int(row[1]), int(row[2]), float(row[3]), int(row[4]))
        )
    return tuple(found)


def oldest_transaction(session: Session) -> float | None:
    """The age in seconds of the oldest transaction that keeps vacuum from removing dead rows here; None without one.

    Of other users' sessions it sees those that this user may look at.
    """
    found = session.scalar(_OLDEST)
    return None if found is None else float(found)


_OLDEST = text("""
SELECT extract(epoch FROM clock_timestamp() - min(xact_start))::float8 FROM pg_stat_activity
WHERE (datname = current_database() OR backend_type = 'walsender') AND pid <> pg_backend_pid()
  AND backend_type <> 'autovacuum worker' AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
""")


# -- alerts -------------------------------------------------------------------------------------------------------


def read_alerts(
    session: Session,
    now: datetime,
    workers: Sequence[snapshot.WorkerRow],
    agents: Sequence[AgentRow],
    running: Sequence[RunningTask],
    hold: LockHold,
    thresholds: Thresholds,
    kill_grace: float = 2.0,
) -> list[Alert]:
    """What a person should look at, of what the screens have read and of the database itself; the most urgent first."""
    return alerts(
        now,
        workers,
        agents,
        running,
        kill_grace,
        thresholds=thresholds,
        hold=hold,
        oldest_transaction=oldest_transaction(session),
        transcript_bytes=session.scalar(_TRANSCRIPTS),
    )


_TRANSCRIPTS = text("SELECT pg_total_relation_size(CAST('run_events' AS regclass))")


# -- counts -------------------------------------------------------------------------------------------------------


def any_task(session: Session) -> bool:
    """Whether there is any task at all. Uses tasks_pkey: EXISTS would read the pages that a prune has emptied."""
    return session.scalar(select(func.max(Task.id))) is not None


def finished_estimate(session: Session) -> dict[str, int | None]:
    """How many tasks are done, failed and cancelled, as far as the planner knows; None where it knows nothing.

    From pg_class and pg_stats. A small table is counted: its statistics are the oldest and cost the most to be wrong.
    """
    size, rows = session.execute(
        text("SELECT pg_relation_size('tasks'), reltuples FROM pg_class WHERE oid = CAST('tasks' AS regclass)")
    ).one()
    ended = (TaskStatus.DONE.value, TaskStatus.FAILED.value, TaskStatus.CANCELLED.value)
    if size <= SMALL_BYTES:
        counted: dict[str, int] = dict(session.execute(select(Task.status, func.count()).group_by(Task.status)).all())
        return {status: counted.get(status, 0) for status in ended}
    shares = session.execute(
        text(
            "SELECT CAST(CAST(most_common_vals AS text) AS text[]), most_common_freqs FROM pg_stats"
            " WHERE schemaname = current_schema() AND tablename = 'tasks' AND attname = 'status'"
        )
    ).one_or_none()
    if rows < 0 or shares is None or shares[0] is None:
        return dict.fromkeys(ended)
    share = dict(zip(shares[0], shares[1], strict=True))
    return {status: round(rows * share.get(status, 0.0)) for status in ended}


def count(session: Session, statement: Any) -> Count:
    """How many rows *statement* has, up to CAP."""
    number = session.scalar(select(func.count()).select_from(statement.limit(CAP + 1).subquery())) or 0
    return Count(min(number, CAP), number > CAP)
