"""What screens are drawn from: frozen values that are read once and never look back at the database.

Reading order: ``Snapshot`` (the whole queue, for ``dashboard``), then ``RunView`` (one plan, for ``run``), then
``RunEvent`` (one change of state, for the history of ``run`` and its plain lines). Instants are timezone-aware, ages
are not stored: whoever draws passes ``now``. Unknown is None, never 0. Texts are as they were stored; the screen makes
them harmless.
"""

from __future__ import annotations

from datetime import datetime

from orchestrator.domain.outcome import Budget
from orchestrator.domain.values import value

UNLIMITED = Budget()


@value
class Count:
    """A number of rows. ``capped``: the counting stopped at ``n``, there may be more."""

    n: int = 0
    capped: bool = False


@value
class Spend:
    """What a task has used over all its attempts. ``*_partial``: at least this much, a part of it is unknown."""

    tokens: int | None = None
    usd: float | None = None
    turns: int | None = None
    tokens_partial: bool = False
    usd_partial: bool = False


@value
class ServerInfo:
    """Which database this is. ``host`` is a socket directory or ``embedded`` where there is no host name."""

    host: str
    database: str
    port: int | None = None
    version: str | None = None
    orchestrator: str | None = None
    schema: str | None = None


@value
class WorkerRow:
    """A worker that is not dead. ``state``: empty (well), ``silent``, ``draining`` or ``stopping``.

    ``silent`` means that its last renewal is older than twice its heartbeat; ``stopping`` counts its tasks that are
    being stopped. ``agents`` are names, ``routes`` what it claims by. ``deaf_since``: since when it has had no connection
    that hears of new tasks; ``clock_ahead``: seconds by which its host's clock is before the database's.
    """

    id: str
    name: str
    host: str = ""
    state: str = ""
    agents: tuple[str, ...] = ()
    running: int = 0
    slots: int = 0
    stopping: int = 0
    started_at: datetime | None = None
    renewed_at: datetime | None = None
    lease_seconds: float = 40.0
    routes: tuple[str, ...] = ()
    deaf_since: datetime | None = None
    clock_ahead: float | None = None


@value
class RunningTask:
    """A task that runs now. ``percent`` and ``last_output`` are what it said last; ``stopping`` is how its end goes on.

    ``activity`` is what its agent does, as far as it tells: the tool that it waits for, ``model call`` or ``rate limit``.
    ``will_not_stop`` is set (a sentence: what was sent, what is left) when its processes survive a stop.
    """

    id: int
    agent: str
    started_at: datetime
    name: str | None = None
    title: str | None = None
    plan: str | None = None
    worker: str = ""
    attempt: int = 1
    max_retries: int | None = None
    retry_count: int = 0
    budget: Budget = UNLIMITED
    spend: Spend = Spend()
    percent: float | None = None
    last_output: str | None = None
    last_output_at: datetime | None = None
    cancel_requested_at: datetime | None = None
    stopping: str | None = None
    will_not_stop: str | None = None
    activity: str | None = None
    activity_since: datetime | None = None


@value
class Unserved:
    """Ready tasks of an agent that no live worker takes. ``plan``: whose file defines the agent; None: the configuration."""

    ready: Count
    since: datetime | None = None
    plan: str | None = None
    local: bool = False


@value
class AgentRow:
    """An agent as the queue sees it.

    ``state``: empty (well), ``paused``, ``breaker`` (open), ``no_worker`` or ``login`` (needs one); ``state_until`` is
    when it ends by itself, or may (a breaker); ``state_reason`` says why, ``state_since`` since when. ``ready`` are pending
    tasks that are due and not held, the other counts are beside it. ``oldest_ready_at`` is since when the oldest ready task
    could run. ``done_hour`` counts tasks of this agent that were done in the last hour, ``attempts_hour`` and
    ``failed_hour`` its ended attempts.
    """

    name: str
    state: str = ""
    state_until: datetime | None = None
    state_reason: str | None = None
    live_workers: int = 0
    running: int = 0
    limit: int | None = None
    ready: Count = Count()
    retrying: Count = Count()
    not_due: Count = Count()
    held: Count = Count()
    blocked: Count = Count()
    waiting: Count = Count()
    oldest_ready_at: datetime | None = None
    done_hour: int | None = None
    failed_hour: int | None = None
    attempts_hour: int | None = None
    usd_hour: float | None = None
    unserved: tuple[Unserved, ...] = ()
    state_since: datetime | None = None


@value
class Alert:
    """Something that a person should look at.

    ``kind``: will_not_stop, no_worker, worker_silent, over_budget, queue_not_draining, breaker_open, needs_login, …
    ``subject`` is task, agent, worker, schedule or database; ``task_id`` is set for tasks, ``name`` is what the subject
    is called. ``what`` says what and how much, ``command`` what would change it. ``heals``: it may go by itself.
    ``plan`` is set where the agent is one of that plan's own.
    """

    kind: str
    subject: str
    name: str
    what: str
    task_id: int | None = None
    since: datetime | None = None
    command: str | None = None
    heals: bool = False
    plan: str | None = None


@value
class Episode:
    """One alert from when it was first seen until it was gone. ``ended_at`` is None while it goes on."""

    id: int
    alert: Alert
    begun_at: datetime
    ended_at: datetime | None = None


@value
class Question:
    """What a task waits to hear from a person. ``kind``: ask, approval or budget."""

    task_id: int
    text: str
    name: str | None = None
    title: str | None = None
    agent: str = ""
    kind: str = "ask"
    choices: tuple[str, ...] = ()
    asked_at: datetime | None = None
    deadline: datetime | None = None
    default: str | None = None


@value
class Failure:
    """A task that ended as failed."""

    task_id: int
    agent: str
    at: datetime
    name: str | None = None
    title: str | None = None
    error_class: str | None = None
    cause: str | None = None
    message: str | None = None
    attempt: int = 1
    max_retries: int | None = None
    retry_count: int = 0


@value
class Minute:
    """One minute of all workers together. ``unknown_cost`` counts the runs whose cost nobody knows."""

    at: datetime
    done: int = 0
    failed: int = 0
    usd: float = 0.0
    unknown_cost: int = 0


@value
class LockHold:
    """How long claims held their row locks, in milliseconds, over the last hour."""

    mean: float | None = None
    p50: float | None = None
    p99: float | None = None
    count: int = 0


@value
class Snapshot:
    """The queue at one instant, from bounded reads.

    ``running`` holds at most 200 tasks by rank and ``running_count`` all; ``questions`` at most 50 and ``alerts`` 50,
    with ``question_count`` and ``alert_count`` beside them; ``failures`` the last 20, newest first. ``minutes`` are the
    last 60 minutes, oldest first, the one that goes on as the last, a minute without work as zeros. ``read_seconds`` is
    what reading it took.
    """

    taken_at: datetime
    server: ServerInfo
    workers: tuple[WorkerRow, ...] = ()
    agents: tuple[AgentRow, ...] = ()
    running: tuple[RunningTask, ...] = ()
    running_count: Count = Count()
    ready: Count = Count()
    retrying: Count = Count()
    not_due: Count = Count()
    held: Count = Count()
    blocked: Count = Count()
    waiting: Count = Count()
    alerts: tuple[Alert, ...] = ()
    alert_count: int | None = None
    questions: tuple[Question, ...] = ()
    question_count: int | None = None
    failures: tuple[Failure, ...] = ()
    minutes: tuple[Minute, ...] = ()
    lock_hold: LockHold = LockHold()
    any_task: bool = True
    read_seconds: float | None = None


@value
class TaskError:
    """Why a task, or its last attempt, did not end well."""

    error_class: str
    cause: str | None = None
    message: str | None = None


@value
class PlanTask:
    """A task of a plan, as the view and the summary of ``run`` show it.

    ``needs`` are the ids that must be done before it. ``here``: this process runs it. ``elapsed`` is how long all its
    ended attempts took together, in seconds; the running one counts from ``started_at``. ``note``: who
    holds it and why (``by ops: after the freeze``), or what holds its agent back.
    """

    id: int
    name: str
    agent: str
    status: str
    title: str | None = None
    attempt: int = 0
    max_retries: int | None = None
    retry_count: int = 0
    started_at: datetime | None = None
    finished_at: datetime | None = None
    next_attempt_at: datetime | None = None
    held: bool = False
    needs: tuple[int, ...] = ()
    budget: Budget = UNLIMITED
    spend: Spend = Spend()
    elapsed: float | None = None
    percent: float | None = None
    last_output: str | None = None
    last_output_at: datetime | None = None
    cancel_requested_at: datetime | None = None
    stopping: str | None = None
    will_not_stop: str | None = None
    error: TaskError | None = None
    question: Question | None = None
    note: str | None = None
    here: bool = True


@value
class RunEvent:
    """One change of state in a ``run``, as a line that stays.

    ``kind``: plan, start, done, retry, failed, cancelled, waiting, interrupted, lost, not_run, away, back, stopping,
    end or note. ``elapsed`` is that attempt's seconds, ``detail`` what it said last or what went wrong. ``attempt`` is
    the one that the line is about, ``attempts`` the most that there can be. For ``plan``, ``away``, ``back``,
    ``stopping``, ``end`` and ``note``, ``detail`` is the whole sentence.
    """

    at: datetime
    kind: str
    task_id: int | None = None
    name: str = ""
    agent: str = ""
    attempt: int = 0
    attempts: int | None = None
    elapsed: float | None = None
    spend: Spend = Spend()
    error_class: str | None = None
    cause: str | None = None
    detail: str | None = None
    next_at: datetime | None = None
    question: Question | None = None


@value
class RunView:
    """A plan that is being worked here.

    ``tasks`` are in plan order and whole: counts are taken from them. ``away_since`` is set while the database is away
    (``away_error``, ``next_try_at``, ``unwritten`` results, ``lease_until``); ``stop_deadline`` while agents are being
    drained.
    """

    plan: str
    started_at: datetime
    tasks: tuple[PlanTask, ...] = ()
    slots: int = 4
    file: str | None = None
    ended_at: datetime | None = None
    stop_deadline: datetime | None = None
    away_since: datetime | None = None
    away_error: str | None = None
    next_try_at: datetime | None = None
    unwritten: int = 0
    lease_until: datetime | None = None
