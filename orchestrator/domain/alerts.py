"""What a person should look at, judged from a snapshot's parts: pure, so that every screen raises the same alerts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from orchestrator.domain.snapshot import AgentRow, Alert, Count, LockHold, RunningTask, WorkerRow

NOT_DRAINING = timedelta(hours=1)
"""A queue whose oldest ready task waits for longer, while no attempt of its agent ends, is stuck."""

OLDEST_WAIT = timedelta(hours=4)
"""A ready task that waits for longer is worth a word although its queue drains."""

FAILED_SHARE, FAILED_LEAST = 0.5, 10
"""So much of an agent's attempts of the last hour failed, and so many: something is wrong with all of them."""

HOLD_MS, HOLD_CLAIMS = 50.0, 100
"""Longest p99 of the time that claims hold their locks, judged over so many claims at least."""

OLD_TRANSACTION = timedelta(hours=1)
"""A transaction that is older keeps vacuum from removing the queue's dead rows, which slows every claim down."""

STOPPING = timedelta(seconds=60)
"""A task that is asked to end and runs on for longer, beyond its kill grace, does not stop."""

ORDER = (
    "will_not_stop",
    "no_worker",
    "worker_dead",
    "worker_silent",
    "over_budget",
    "queue_not_draining",
    "failures_spike",
    "long_transaction",
    "lock_hold",
    "oldest_wait",
)
"""Kinds by rank: what needs a person most comes first."""


def alerts(
    now: datetime,
    workers: Sequence[WorkerRow],
    agents: Sequence[AgentRow],
    running: Sequence[RunningTask],
    kill_grace: float = 2.0,
    *,
    hold: LockHold | None = None,
    oldest_transaction: float | None = None,
) -> list[Alert]:
    """Every alert, by rank, then the longest-lasting first. *kill_grace* and *oldest_transaction* are in seconds."""
    found: list[Alert] = []
    for task in running:
        found.extend(_of_task(now, task, kill_grace))
    for agent in agents:
        found.extend(_of_agent(now, agent))
    for worker in workers:
        found.extend(_of_worker(now, worker))
    found.extend(_of_database(now, hold, oldest_transaction))
    return sorted(found, key=lambda alert: (_rank(alert), alert.since or now, alert.name))


def _rank(alert: Alert) -> int:
    return ORDER.index(alert.kind) if alert.kind in ORDER else len(ORDER)


def _of_task(now: datetime, task: RunningTask, kill_grace: float) -> list[Alert]:
    name = task.name or task.title or task.agent
    if task.will_not_stop is not None:
        return [
            Alert(
                "will_not_stop",
                "task",
                name,
                f"will not stop: {task.will_not_stop}",
                task.id,
                task.cancel_requested_at,
                f"orchestrator why {task.id}",
            )
        ]
    asked = task.cancel_requested_at
    if asked is not None and now - asked > STOPPING + timedelta(seconds=kill_grace):
        on = f" on {task.worker}" if task.worker else ""
        what = f"asked to end {(now - asked).total_seconds():.0f} s ago and still running{on}"
        return [Alert("will_not_stop", "task", name, what, task.id, asked, f"orchestrator why {task.id}")]
    limit = task.budget.seconds
    if limit is None:
        return []
    end = task.started_at + timedelta(seconds=limit + kill_grace)
    if now <= end:
        return []
    share = (now - task.started_at).total_seconds() / limit
    on = f" on {task.worker}" if task.worker else ""
    what = f"still running{on} at {share:.0%} of its budget of {limit:g} s"
    return [Alert("over_budget", "task", name, what, task.id, end, f"orchestrator cancel {task.id}")]


def _of_agent(now: datetime, agent: AgentRow) -> list[Alert]:
    return [*_of_queue(now, agent), *_of_failures(agent)]


def _of_queue(now: datetime, agent: AgentRow) -> list[Alert]:
    ready, since = agent.ready, agent.oldest_ready_at
    if not ready.n or agent.state == "paused":
        return []
    if not agent.live_workers:
        verb = "waits" if ready == Count(1) else "wait"
        what = f"no live worker, {_tasks(ready, 'ready')} {verb}"
        command = f"orchestrator worker --agent {agent.name}"
        return [Alert("no_worker", "agent", agent.name, what, since=since, command=command)]
    wait = timedelta(0) if since is None else now - since
    if wait > NOT_DRAINING and not agent.attempts_hour:
        what = f"{_tasks(ready, 'ready')}, and no attempt has ended in the last hour"
        return [
            Alert(
                "queue_not_draining",
                "agent",
                agent.name,
                what,
                since=since,
                command="orchestrator workers",
                heals=True,
            )
        ]
    if wait > OLDEST_WAIT:
        what = f"the oldest of {_tasks(ready, 'ready')} has waited for {wait / timedelta(hours=1):.0f} h"
        command = f"orchestrator list --status pending --agent {agent.name}"
        return [Alert("oldest_wait", "agent", agent.name, what, since=since, command=command, heals=True)]
    return []


def _of_failures(agent: AgentRow) -> list[Alert]:
    failed, ended = agent.failed_hour or 0, agent.attempts_hour or 0
    if failed < FAILED_LEAST or failed <= FAILED_SHARE * ended:
        return []
    what = f"{failed:,} of {ended:,} attempts of the last hour failed"
    command = f"orchestrator list --status failed --agent {agent.name}"
    return [Alert("failures_spike", "agent", agent.name, what, command=command, heals=True)]


def _of_database(now: datetime, hold: LockHold | None, oldest: float | None) -> list[Alert]:
    found = []
    if oldest is not None and oldest > OLD_TRANSACTION.total_seconds():
        what = f"a transaction of {oldest / 3600:.1f} h keeps vacuum from removing dead rows"
        since = now - timedelta(seconds=oldest)
        found.append(
            Alert("long_transaction", "database", "vacuum", what, None, since, "orchestrator doctor", heals=True)
        )
    if hold is not None and hold.p99 is not None and hold.p99 > HOLD_MS and hold.count >= HOLD_CLAIMS:
        what = f"claims hold their locks for {hold.p99:.0f} ms (p99 of the last hour), more than {HOLD_MS:g}"
        found.append(Alert("lock_hold", "database", "claims", what, command="orchestrator doctor", heals=True))
    return found


def _of_worker(now: datetime, worker: WorkerRow) -> list[Alert]:
    holds = f"holds {_tasks(Count(worker.running))}" if worker.running else "holds nothing"
    if worker.state == "dead":
        what = f"is dead, {_tasks(Count(worker.running))} not taken back yet"
        command = "orchestrator watchdog --once"
        return [Alert("worker_dead", "worker", worker.name, what, None, worker.renewed_at, command, heals=True)]
    if worker.state == "silent" and worker.renewed_at is not None:
        silent = (now - worker.renewed_at).total_seconds()
        what = f"silent {silent:.0f} s of {worker.lease_seconds:g} s lease, {holds}"
        return [
            Alert(
                "worker_silent",
                "worker",
                worker.name,
                what,
                since=worker.renewed_at,
                command="orchestrator watchdog --once",
                heals=True,
            )
        ]
    return []


def _tasks(count: Count, kind: str = "") -> str:
    number = f"{count.n:,}" + ("+" if count.capped else "")
    noun = "task" if count.n == 1 and not count.capped else "tasks"
    return " ".join(part for part in (number, kind, noun) if part)


__all__ = ["NOT_DRAINING", "ORDER", "alerts"]
