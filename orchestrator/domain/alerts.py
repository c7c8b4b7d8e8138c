"""What a person should look at, judged from a snapshot's parts: pure, so that every screen raises the same alerts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from orchestrator.domain.snapshot import AgentRow, Alert, Count, RunningTask, WorkerRow

NOT_DRAINING = timedelta(hours=1)
"""A queue whose oldest ready task waits for longer, while no attempt of its agent ends, is stuck."""

ORDER = ("will_not_stop", "no_worker", "worker_dead", "worker_silent", "over_budget", "queue_not_draining")
"""Kinds by rank: what needs a person most comes first."""


def alerts(
    now: datetime,
    workers: Sequence[WorkerRow],
    agents: Sequence[AgentRow],
    running: Sequence[RunningTask],
    kill_grace: float = 2.0,
) -> list[Alert]:
    """Every alert, by rank, then the longest-lasting first. *kill_grace* is in seconds."""
    found: list[Alert] = []
    for task in running:
        found.extend(_of_task(now, task, kill_grace))
    for agent in agents:
        found.extend(_of_agent(now, agent))
    for worker in workers:
        found.extend(_of_worker(now, worker))
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
    ready, since = agent.ready, agent.oldest_ready_at
    if not ready.n or agent.state == "paused":
        return []
    if not agent.live_workers:
        verb = "waits" if ready == Count(1) else "wait"
        return [
            Alert(
                "no_worker",
                "agent",
                agent.name,
                f"no live worker, {_tasks(ready, 'ready')} {verb}",
                since=since,
                command=f"orchestrator worker --agent {agent.name}",
            )
        ]
    if since is not None and now - since > NOT_DRAINING and not agent.attempts_hour:
        return [
            Alert(
                "queue_not_draining",
                "agent",
                agent.name,
                f"{_tasks(ready, 'ready')}, and no attempt has ended in the last hour",
                since=since,
                command="orchestrator workers",
                heals=True,
            )
        ]
    return []


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
