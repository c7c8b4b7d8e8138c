"""What a person should look at, judged from a snapshot's parts: pure, so that every screen raises the same alerts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

from orchestrator.domain.snapshot import AgentRow, Alert, Count, LockHold, RunningTask, Unserved, WorkerRow
from orchestrator.domain.values import value
from orchestrator.errors import InvalidInput, did_you_mean


@value
class Thresholds:
    """From where on something is an alert: the table ``[alerts]`` of the settings. Lengths of time are in seconds.

    - ``not_draining``: a ready task that waits for longer while no attempt of its agent ends
    - ``oldest_wait``: a ready task that waits for longer, although its queue drains
    - ``failed_share``, ``failed_least``: more than such a share of an agent's attempts of the last hour, and so many
    - ``hold_ms``, ``hold_claims``: p99 of the time that claims hold their locks, judged over so many claims at least
    - ``old_transaction``: it keeps vacuum from removing the queue's dead rows, which slows every claim down
    - ``stopping``: a task that is asked to end and runs on for longer, beyond its kill grace
    - ``listener_down``: a worker that hears of no new tasks for longer finds them by polling alone
    - ``transcript_bytes``: what transcripts may take in the database
    - ``off``: kinds that are no alerts here
    """

    not_draining: float = 3600.0
    oldest_wait: float = 4 * 3600.0
    failed_share: float = 0.5
    failed_least: int = 10
    hold_ms: float = 50.0
    hold_claims: int = 100
    old_transaction: float = 3600.0
    stopping: float = 60.0
    listener_down: float = 60.0
    transcript_bytes: int = 20 << 30
    off: frozenset[str] = frozenset()

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Thresholds:
        """Return the thresholds that ``[alerts]`` sets, defaults for the others. Raises InvalidInput."""
        values: dict[str, Any] = {}
        known = [each.name for each in fields(cls)]
        for key, each in table.items():
            if key == "hooks":
                continue
            if key not in known:
                raise InvalidInput(f"unknown key 'alerts.{key}'{did_you_mean(key, [*known, 'hooks'])}")
            values[key] = _kinds(each) if key == "off" else _number(key, each)
        return cls(**values)


def _kinds(value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidInput(f"alerts.off: expected a list of kinds, found {value!r}")
    for each in value:
        if each not in ORDER:
            raise InvalidInput(f"alerts.off: there is no kind {each!r}{did_you_mean(each, ORDER)}")
    return frozenset(value)


def _number(key: str, value: Any) -> float | int:
    well = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
    if not well or (key == "failed_share" and value > 1):
        raise InvalidInput(f"alerts.{key}: expected a number, more than 0, found {value!r}")
    number: float | int = value
    return number


DEFAULTS = Thresholds()

ORDER = (
    "will_not_stop",
    "no_worker",
    "needs_login",
    "worker_dead",
    "worker_silent",
    "over_budget",
    "queue_not_draining",
    "breaker_open",
    "failures_spike",
    "long_transaction",
    "lock_hold",
    "listener_down",
    "transcript_disk",
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
    thresholds: Thresholds = DEFAULTS,
    hold: LockHold | None = None,
    oldest_transaction: float | None = None,
    transcript_bytes: int | None = None,
) -> list[Alert]:
    """Every alert, by rank, then the longest-lasting first. *kill_grace* and *oldest_transaction* are in seconds."""
    found: list[Alert] = []
    for task in running:
        found.extend(_of_task(now, task, kill_grace, thresholds))
    for agent in agents:
        found.extend(_of_agent(now, agent, thresholds))
    for worker in workers:
        found.extend(_of_worker(now, worker, thresholds))
    found.extend(_of_database(now, hold, oldest_transaction, transcript_bytes, thresholds))
    left = [alert for alert in found if alert.kind not in thresholds.off]
    return sorted(left, key=lambda alert: (_rank(alert), alert.since or now, alert.name))


def _rank(alert: Alert) -> int:
    return ORDER.index(alert.kind) if alert.kind in ORDER else len(ORDER)


def _of_task(now: datetime, task: RunningTask, kill_grace: float, thresholds: Thresholds) -> list[Alert]:
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
    if asked is not None and now - asked > timedelta(seconds=thresholds.stopping + kill_grace):
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


def _of_agent(now: datetime, agent: AgentRow, thresholds: Thresholds) -> Iterator[Alert]:
    if agent.state != "paused":
        for each in agent.unserved:
            yield _no_worker(agent.name, each)
        if agent.state in ("breaker", "login"):
            yield _held_back(now, agent)  # that its queue does not drain is no news then
        else:
            yield from _of_queue(now, agent, thresholds)
    yield from _of_failures(agent, thresholds)


def _no_worker(agent: str, unserved: Unserved) -> Alert:
    verb = "waits" if unserved.ready == Count(1) else "wait"
    what = f"no live worker, {_tasks(unserved.ready, 'ready')} {verb}"
    command = f"orchestrator worker --agent {shlex.quote(agent)}"
    if unserved.local:
        # An agent of a plan file: nobody but a process that has loaded that very file knows it.
        what = f"no live worker has loaded plan {unserved.plan}, {_tasks(unserved.ready, 'ready')} {verb}"
        command = "orchestrator worker --plan FILE"
    return Alert("no_worker", "agent", agent, what, since=unserved.since, command=command, plan=unserved.plan)


def _held_back(now: datetime, agent: AgentRow) -> Alert:
    """The alert of an agent whose breaker is open, for want of a login or because its provider refuses."""
    because = f": {agent.state_reason}" if agent.state_reason else ""
    command = f"orchestrator resume {shlex.quote(agent.name)}"
    if agent.state == "login":
        what = f"needs a login{because}"
        return Alert("needs_login", "agent", agent.name, what, since=agent.state_since, command=command)
    left = None if agent.state_until is None else (agent.state_until - now).total_seconds()
    until = "" if left is None else f" for another {_long(max(0.0, left))}"
    what = f"breaker open{until}{because}"
    return Alert("breaker_open", "agent", agent.name, what, since=agent.state_since, command=command, heals=True)


def _of_queue(now: datetime, agent: AgentRow, thresholds: Thresholds) -> Iterator[Alert]:
    ready, since = agent.ready, agent.oldest_ready_at
    if not ready.n or since is None or agent.unserved:
        return
    wait = (now - since).total_seconds()
    if wait > thresholds.not_draining and not agent.attempts_hour:
        what = f"{_tasks(ready, 'ready')}, and no attempt has ended in the last hour"
        command = "orchestrator workers"
        yield Alert("queue_not_draining", "agent", agent.name, what, since=since, command=command, heals=True)
    elif wait > thresholds.oldest_wait:
        what = f"the oldest of {_tasks(ready, 'ready')} has waited for {_long(wait)}"
        command = f"orchestrator list --status pending --agent {shlex.quote(agent.name)}"
        yield Alert("oldest_wait", "agent", agent.name, what, since=since, command=command, heals=True)


def _of_failures(agent: AgentRow, thresholds: Thresholds) -> Iterator[Alert]:
    failed, ended = agent.failed_hour or 0, agent.attempts_hour or 0
    if failed < thresholds.failed_least or failed <= thresholds.failed_share * ended:
        return
    what = f"{failed:,} of {ended:,} attempts of the last hour failed"
    command = f"orchestrator list --status failed --agent {shlex.quote(agent.name)}"
    yield Alert("failures_spike", "agent", agent.name, what, command=command, heals=True)


def _of_database(
    now: datetime, hold: LockHold | None, oldest: float | None, transcripts: int | None, thresholds: Thresholds
) -> Iterator[Alert]:
    if oldest is not None and oldest > thresholds.old_transaction:
        what = f"a transaction of {_long(oldest)} keeps vacuum from removing dead rows"
        since = now - timedelta(seconds=oldest)
        yield Alert("long_transaction", "database", "vacuum", what, None, since, "orchestrator doctor", heals=True)
    slow = hold is not None and hold.p99 is not None and hold.count >= thresholds.hold_claims
    if slow and hold is not None and hold.p99 is not None and hold.p99 > thresholds.hold_ms:
        what = f"claims hold their locks for {hold.p99:.0f} ms (p99 of the last hour), more than {thresholds.hold_ms:g}"
        yield Alert("lock_hold", "database", "claims", what, command="orchestrator doctor", heals=True)
    if transcripts is not None and transcripts > thresholds.transcript_bytes:
        what = f"transcripts take {_size(transcripts)}, more than {_size(thresholds.transcript_bytes)}"
        command = "orchestrator prune --kind transcripts --older-than 30d --dry-run"
        yield Alert("transcript_disk", "database", "transcripts", what, command=command)


def _of_worker(now: datetime, worker: WorkerRow, thresholds: Thresholds) -> Iterator[Alert]:
    holds = f"holds {_tasks(Count(worker.running))}" if worker.running else "holds nothing"
    command = "orchestrator watchdog --once"
    if worker.state == "dead":
        what = f"is dead, {_tasks(Count(worker.running))} not taken back yet"
        yield Alert("worker_dead", "worker", worker.name, what, None, worker.renewed_at, command, heals=True)
    elif worker.state == "silent" and worker.renewed_at is not None:
        silent = (now - worker.renewed_at).total_seconds()
        what = f"silent {silent:.0f} s of {worker.lease_seconds:g} s lease, {holds}"
        yield Alert("worker_silent", "worker", worker.name, what, None, worker.renewed_at, command, heals=True)
    elif worker.deaf_since is not None:
        deaf = (now - worker.deaf_since).total_seconds()
        if deaf > thresholds.listener_down:
            what = f"has heard of no new task for {_long(deaf)}: it finds them by polling alone"
            command = "orchestrator doctor"
            yield Alert("listener_down", "worker", worker.name, what, None, worker.deaf_since, command, heals=True)


def _long(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )


def _size(number: int) -> str:
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number} B"


def _tasks(count: Count, kind: str = "") -> str:
    number = f"{count.n:,}" + ("+" if count.capped else "")
    noun = "task" if count.n == 1 and not count.capped else "tasks"
    return " ".join(part for part in (number, kind, noun) if part)


__all__ = ["DEFAULTS", "ORDER", "Thresholds", "alerts"]
