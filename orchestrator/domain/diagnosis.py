"""What ``why`` and ``doctor`` find: facts about one task as they were read, and the findings that people get to see.

Facts are what the database says, without judgement; ``dashboard.why`` makes reasons of them. Instants are
timezone-aware, unknown is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from orchestrator.domain.snapshot import Count, LockHold, Question, WorkerRow
from orchestrator.domain.values import value


@value
class Deed:
    """The last time that a person did a thing to a task or an agent."""

    at: datetime
    actor: str | None = None
    reason: str | None = None
    until: datetime | None = None


@value
class BreakerFacts:
    """The open breaker of an agent: the provider refuses it. ``login``: a probe has confirmed that a login is needed.

    From ``until`` on a probe decides; ``probed``: one is on its way. ``task_id`` is the task that was refused last.
    """

    at: datetime
    until: datetime
    message: str | None = None
    task_id: int | None = None
    login: bool = False
    probed: bool = False


@value
class WorkerFacts:
    """A worker that knows a task's agent, or that runs the task. ``plan``: it takes the tasks of this plan only.

    ``state``: empty (well), ``silent``, ``draining`` or ``dead``; ``running`` counts the tasks that it holds.
    """

    name: str
    host: str
    pid: int
    state: str
    slots: int
    running: int
    renewed_at: datetime
    plan: str | None = None


@value
class Relative:
    """Another task that matters: a parent, or the root of a chain of parents."""

    id: int
    agent: str
    status: str
    name: str | None = None
    title: str | None = None
    held: bool = False

    @property
    def called(self) -> str:
        return self.name or self.title or self.agent


@value
class Held:
    """What keeps a task out because others run: its concurrency key or its directory, and who has it.

    ``room``: so many may run at once; ``tasks``: the ids of those that do.
    """

    kind: str
    name: str
    room: int
    tasks: tuple[int, ...]


@value
class TaskFacts:
    """All that bears on whether a task runs.

    - ``task``: the task object of the contract; ``due`` from its row: whether its time has come, as a claim sees it
    - ``local``: its agent is defined in a plan file, so that only a process that loaded the plan knows it
    - ``ahead``: ready tasks of its agent that are claimed before it
    - ``suspects_ahead``: of those that were lost with a worker before, which are taken one at a time
    - ``workers``: live ones that know its agent, and ``owner`` the one that runs it
    - ``parents``: the first of the tasks that it needs and that are not done, ``parent_count`` how many there are
    - ``roots``: those at the far end of the chains, which wait for nothing but themselves
    - ``ended_hour``: attempts of its agent that ended in the last hour
    - ``keys``: its concurrency key and its directory, as far as running tasks have them
    - ``top_priority``: the priority of the ready task that is claimed next
    - ``last_run``: the run object of its newest ended attempt
    - ``last_output``, ``percent``: what the running attempt said last; ``will_not_stop``: what of it survives SIGKILL
    - ``question``: what a waiting task wants to hear from a person
    """

    now: datetime
    task: Mapping[str, Any]
    due: bool = True
    local: bool = False
    superseded: bool = False
    limited_count: int = 0
    limited_since: datetime | None = None
    pause: Deed | None = None
    breaker: BreakerFacts | None = None
    held: Deed | None = None
    cancelled: Deed | None = None
    workers: tuple[WorkerFacts, ...] = ()
    owner: WorkerFacts | None = None
    ahead: Count = Count()
    suspects_ahead: Count = Count()
    ended_hour: int | None = None
    parents: tuple[Relative, ...] = ()
    parent_count: Count = Count()
    roots: tuple[Relative, ...] = ()
    top_priority: int | None = None
    keys: tuple[Held, ...] = ()
    last_run: Mapping[str, Any] | None = None
    last_output: str | None = None
    last_output_at: datetime | None = None
    percent: float | None = None
    will_not_stop: str | None = None
    needed_by: Count = Count()
    question: Question | None = None


@value
class Reason:
    """Why something is as it is. ``reason`` is the code, ``number`` what it is about, ``unit`` what the number counts.

    ``command`` would change it, ``aim`` says what for (``to try now``). ``until``: it ends by itself then.
    """

    reason: str
    text: str
    number: float | int | None = None
    unit: str | None = None
    command: str | None = None
    aim: str | None = None
    until: datetime | None = None


@value
class Diagnosis:
    """The answer of ``why``: verdict, reasons with the binding one first, and what was checked and is not the cause.

    ``kind`` is what the task is on a screen (``ready``, ``held``, …); ``next`` is the command to go on with.
    """

    id: int
    status: str
    kind: str
    called: str
    verdict: str
    reasons: tuple[Reason, ...] = ()
    not_the_cause: tuple[str, ...] = ()
    next: str | None = None


@value
class SessionFacts:
    """A session, prepared transaction or replication slot that is in the way; ``seconds``: for how long."""

    who: str
    seconds: float | None = None
    pid: int | None = None
    bytes: int | None = None


@value
class DatabaseFacts:
    """What ``doctor`` reads of a database.

    - ``clock_ahead``: seconds that this host's clock is ahead of the database's, ``clock_error`` how sure that is
    - ``autovacuum_off``: tables of ours, or ``all``
    - ``pooled``: a pooler gives out sessions of its own; ``heard``: a notification arrived
    - ``settings``: those of the server that decide what a commit and a transaction mean
    - ``sees_all``: this user may look at the sessions of others
    """

    version_number: int
    version: str
    encoding: str
    read_only: bool
    clock_ahead: float
    clock_error: float
    settings: Mapping[str, str]
    connections: int
    max_connections: int
    sees_all: bool
    old_transactions: tuple[SessionFacts, ...]
    idle_in_transaction: tuple[SessionFacts, ...]
    prepared: tuple[SessionFacts, ...]
    slots: tuple[SessionFacts, ...]
    autovacuum_off: tuple[str, ...]
    pooled: bool
    heard: bool


@value
class QueueFacts:
    """What ``doctor`` reads of the queue's own tables, once the schema is there.

    ``dead_rows``: table, dead and live rows of those that have more dead ones than live ones. ``bloated``: index, its bytes
    and about how many it would have if it were made anew.
    """

    drift: tuple[str, ...]
    missing_indexes: tuple[str, ...]
    invalid_indexes: tuple[str, ...]
    dead_rows: tuple[tuple[str, int, int], ...]
    lock_hold: LockHold
    workers: tuple[WorkerRow, ...]
    worker_versions: tuple[str, ...]
    bloated: tuple[tuple[str, int, int], ...] = ()


@value
class Check:
    """One check of ``doctor``. ``state``: ok, warning or error; ``remedy`` says what to do about it."""

    check: str
    state: str
    text: str
    remedy: str | None = None


__all__ = [
    "Check",
    "DatabaseFacts",
    "Deed",
    "Diagnosis",
    "Held",
    "QueueFacts",
    "Reason",
    "Relative",
    "SessionFacts",
    "TaskFacts",
    "WorkerFacts",
]
