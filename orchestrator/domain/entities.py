"""The rows: tasks, runs, workers and what hangs on them, as SQLAlchemy entities without I/O.

Reading order: ``Task`` (its verbs guard every move by ``TRANSITIONS``), ``Run``, ``WorkerRow``; then the small tables.
CHECK constraints repeat the invariants, so that bulk SQL cannot break them. Each index names the query that it is for;
that query names the index. Relationships are left out on purpose: a detached entity never queries behind our back.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Computed,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, INTERVAL, JSON, JSONB, TIMESTAMP
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from orchestrator.domain.asking import QuestionKind, Verdict
from orchestrator.domain.words import ENDED, LIVE, TRANSITIONS, OnLimit, OutcomeClass, TaskStatus
from orchestrator.errors import InvalidTransition

_NOW = text("clock_timestamp()")


def _words(column: str, words: type[StrEnum]) -> str:
    return f"{column} IN ({', '.join(repr(w.value) for w in words)})"


def _some(statuses: frozenset[TaskStatus]) -> str:
    return f"status IN ({', '.join(repr(s.value) for s in TaskStatus if s in statuses)})"


class Base(DeclarativeBase):
    """The registry of all tables, with stable constraint names: errors are told apart by them."""

    metadata = MetaData(
        naming_convention={
            "ix": "%(table_name)s_%(column_0_N_name)s",
            "uq": "%(table_name)s_%(column_0_N_name)s_key",
            "ck": "%(table_name)s_%(constraint_name)s_check",
            "fk": "%(table_name)s_%(column_0_N_name)s_fkey",
            "pk": "%(table_name)s_pkey",
        }
    )
    type_annotation_map = {
        datetime: TIMESTAMP(timezone=True),
        str: Text,
        UUID: Uuid,
        float: Double,
    }


def table(entity: type[Base]) -> Table:
    """The Core table of an entity, for statements that are not to pass through the ORM."""
    found = entity.__table__
    assert isinstance(found, Table)
    return found


class Plan(Base):
    """A named list of tasks that are submitted together, again and again."""

    __tablename__ = "plans"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime] = mapped_column(server_default=_NOW)
    submitted_at: Mapped[datetime] = mapped_column(server_default=_NOW)


READY = "status = 'pending' AND due AND held_at IS NULL"


class Task(Base):
    """What is to be done. ``attempt`` only ever grows; with ``claimed_by`` it is the fence.

    ``route`` is what workers claim by: the agent's name, for an agent of a plan file followed by its definition's hash. A
    task with a concurrency key has its hash behind that: such tasks are claimed by another way (repositories/keys.py).
    ``due`` is false while ``available_at`` lies ahead; the claim demotes what is not due, the promoter sets it.
    ``needs_approval`` is true until a person has said that it may start.
    """

    __tablename__ = "tasks"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    agent: Mapped[str]
    status: Mapped[str] = mapped_column(server_default=TaskStatus.PENDING.value)
    priority: Mapped[int] = mapped_column(Integer, server_default="0")
    attempt: Mapped[int] = mapped_column(Integer, server_default="0")
    retry_count: Mapped[int] = mapped_column(Integer, server_default="0")
    lost_count: Mapped[int] = mapped_column(Integer, server_default="0")
    limited_count: Mapped[int] = mapped_column(Integer, server_default="0")
    limited_since: Mapped[datetime | None]
    max_retries: Mapped[int | None] = mapped_column(Integer)
    retry: Mapped[dict[str, float] | None] = mapped_column(JSONB(none_as_null=True))
    budget_seconds: Mapped[float | None]
    budget_tokens: Mapped[int | None] = mapped_column(BigInteger)
    budget_usd: Mapped[float | None]
    budget_turns: Mapped[int | None] = mapped_column(Integer)
    on_limit: Mapped[str | None]
    available_at: Mapped[datetime] = mapped_column(server_default=_NOW)
    due: Mapped[bool] = mapped_column(Boolean, server_default="true")
    created_at: Mapped[datetime] = mapped_column(server_default=_NOW)
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    claimed_by: Mapped[UUID | None]
    cancel_requested_at: Mapped[datetime | None]
    held_at: Mapped[datetime | None]
    needs_approval: Mapped[bool] = mapped_column(Boolean, server_default="false")
    title: Mapped[str | None]
    name: Mapped[str | None]
    plan: Mapped[str | None]
    plan_id: Mapped[int | None] = mapped_column(BigInteger, ForeignKey("plans.id", ondelete="SET NULL"))
    plan_order: Mapped[int | None] = mapped_column(Integer)
    superseded_at: Mapped[datetime | None]
    task_hash: Mapped[str | None]
    definition: Mapped[str | None]
    route: Mapped[str] = mapped_column(
        Text(collation="C"),  # ranges of it are looked at: byte order, whatever the database's language
        Computed(
            "agent || coalesce(E'\\x1f' || definition, '') || coalesce(E'\\x1e' || md5(concurrency_key), '')",
            persisted=True,
        ),
    )
    dir: Mapped[str | None]
    unique_key: Mapped[str | None]
    concurrency_key: Mapped[str | None]
    tags: Mapped[dict[str, str] | None] = mapped_column(JSONB(none_as_null=True))
    input: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    params: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    template: Mapped[bool] = mapped_column(Boolean, server_default="false")
    is_parent: Mapped[bool] = mapped_column(Boolean, server_default="false")
    result: Mapped[Any | None] = mapped_column(JSON(none_as_null=True))
    error_class: Mapped[str | None]
    error_cause: Mapped[str | None]
    error_message: Mapped[str | None]
    session: Mapped[str | None]
    progress_percent: Mapped[float | None]
    progress_message: Mapped[str | None]
    last_output: Mapped[str | None]
    last_output_at: Mapped[datetime | None]
    meter: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    live_usage: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    workspace: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    traceparent: Mapped[str | None]

    __table_args__ = (
        CheckConstraint(_words("status", TaskStatus), name="status"),
        CheckConstraint("(status = 'running') = (claimed_by IS NOT NULL)", name="claimed_by"),
        CheckConstraint("status <> 'running' OR (started_at IS NOT NULL AND attempt > 0)", name="running"),
        CheckConstraint(f"(finished_at IS NOT NULL) = ({_some(ENDED)})", name="finished_at"),
        CheckConstraint(f"error_class IS NULL OR {_words('error_class', OutcomeClass)}", name="error_class"),
        CheckConstraint(f"on_limit IS NULL OR {_words('on_limit', OnLimit)}", name="on_limit"),
        CheckConstraint("attempt >= 0 AND retry_count >= 0 AND lost_count >= 0", name="counts"),
        CheckConstraint("max_retries IS NULL OR max_retries >= 0", name="max_retries"),
        CheckConstraint("budget_seconds IS NULL OR budget_seconds > 0", name="budget_seconds"),
        CheckConstraint("agent <> ''", name="agent"),
        # TaskRepository.claim: the ready tasks of a route in claim order. Suspects (lost_count > 0) have their own.
        Index(
            "tasks_ready",
            "route",
            text("priority DESC"),
            "id",
            postgresql_where=text(f"{READY} AND lost_count = 0"),
        ),
        Index(
            "tasks_suspect",
            "route",
            text("priority DESC"),
            "id",
            postgresql_where=text(f"{READY} AND lost_count > 0"),
        ),
        # TaskRepository.claim with a plan: `run PLAN` takes only its plan's tasks.
        Index(
            "tasks_ready_of_plan",
            "plan_id",
            text("priority DESC"),
            "id",
            postgresql_where=text(f"{READY} AND plan_id IS NOT NULL"),
        ),
        # TaskRepository.promote: what becomes due next.
        Index("tasks_not_due", "available_at", postgresql_where=text("status = 'pending' AND NOT due")),
        # take_back, reconcile, snapshots. Led by id, never by claimed_by: an index of one key fills with dead entries.
        Index("tasks_running", "id", postgresql_where=text("status = 'running'")),
        # TaskRepository.cancel_requests
        Index(
            "tasks_cancel_requested",
            "id",
            postgresql_where=text("status = 'running' AND cancel_requested_at IS NOT NULL"),
        ),
        # counts of status and snapshots: blocked and waiting tasks, and what is held
        Index("tasks_parked", "status", "agent", postgresql_where=text("status IN ('blocked', 'waiting')")),
        Index("tasks_held", "id", postgresql_where=text("status = 'pending' AND held_at IS NOT NULL")),
        # list --status failed, latest failures
        Index("tasks_failed", "id", postgresql_where=text("status = 'failed'")),
        Index("tasks_cancelled", "id", postgresql_where=text("status = 'cancelled'")),
        # list --plan, the view of `run`
        Index("tasks_of_plan", "plan_id", "id", postgresql_where=text("plan_id IS NOT NULL")),
        # one current task of a name in a plan
        Index(
            "tasks_plan_name",
            "plan_id",
            "name",
            unique=True,
            postgresql_where=text("plan_id IS NOT NULL AND name IS NOT NULL AND superseded_at IS NULL"),
        ),
        # adding: one live task of a unique key
        Index(
            "tasks_unique_key",
            "unique_key",
            unique=True,
            postgresql_where=text(f"unique_key IS NOT NULL AND {_some(LIVE)}"),
        ),
        {
            # Half-full pages keep the updates of a task's short life on its page; vacuum follows a queue's pace.
            "postgresql_with": {
                "fillfactor": 70,
                "autovacuum_vacuum_scale_factor": 0.02,
                "autovacuum_vacuum_threshold": 1000,
                "autovacuum_analyze_scale_factor": 0.05,
                "autovacuum_vacuum_cost_delay": 1,
            }
        },
    )

    def __repr__(self) -> str:
        values = vars(self)  # reading an attribute of a detached entity could fail
        return f"<Task {values.get('id')} {values.get('agent')} {values.get('status')}>"

    def guard(self, status: TaskStatus) -> None:
        """Raise InvalidTransition unless the task may move to *status* from where it is."""
        if status not in TRANSITIONS[TaskStatus(self.status)]:
            raise InvalidTransition(f"task {self.id} is {self.status}: it cannot become {status.value}", task=self.id)


class Dependency(Base):
    """A task needs another to be done first."""

    __tablename__ = "task_dependencies"

    task_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("tasks.id", ondelete="CASCADE"), primary_key=True)
    depends_on: Mapped[int] = mapped_column(
        BigInteger, ForeignKey("tasks.id", ondelete="CASCADE"), primary_key=True, index=True
    )


class ConcurrencyLimit(Base):
    """How many tasks of a concurrency key run at once, where it is not one."""

    __tablename__ = "concurrency_limits"

    key: Mapped[str] = mapped_column(primary_key=True)
    max_running: Mapped[int] = mapped_column(Integer)

    __table_args__ = (CheckConstraint("max_running > 0", name="max_running"),)


class KeyHolder(Base):
    """What a running attempt keeps others from: a concurrency key, a directory. Counts only while that attempt runs."""

    __tablename__ = "key_holders"

    task_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("tasks.id", ondelete="CASCADE"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    attempt: Mapped[int] = mapped_column(Integer)

    __table_args__ = (
        CheckConstraint("kind IN ('key', 'directory')", name="kind"),
        # repositories/keys.py: who holds a key
        Index(None, "kind", "name"),
    )


class Run(Base):
    """The record of one ended attempt: a fact, written once. ``late`` is a result that came after the task was taken back."""

    __tablename__ = "runs"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    task_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("tasks.id", ondelete="CASCADE"))
    attempt: Mapped[int] = mapped_column(Integer)
    status: Mapped[str]
    cause: Mapped[str | None]
    message: Mapped[str | None]
    exit_code: Mapped[int | None] = mapped_column(Integer)
    signal: Mapped[int | None] = mapped_column(Integer)
    worker: Mapped[str | None]
    worker_id: Mapped[UUID | None]
    host: Mapped[str | None]
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime]
    recorded_at: Mapped[datetime] = mapped_column(server_default=_NOW)
    duration_seconds: Mapped[float] = mapped_column(
        Computed("extract(epoch FROM finished_at - started_at)::double precision", persisted=True)
    )
    error_class: Mapped[str | None] = mapped_column(Computed("nullif(status, 'done')", persisted=True))
    result: Mapped[Any | None] = mapped_column(JSON(none_as_null=True))
    late: Mapped[Any | None] = mapped_column(JSON(none_as_null=True))
    input_tokens: Mapped[int | None] = mapped_column(BigInteger)
    output_tokens: Mapped[int | None] = mapped_column(BigInteger)
    total_tokens: Mapped[int | None] = mapped_column(BigInteger)
    turns: Mapped[int | None] = mapped_column(Integer)
    model: Mapped[str | None]
    cost_usd: Mapped[float | None]
    cost_source: Mapped[str | None]
    counter: Mapped[str | None]
    usage_complete: Mapped[bool | None] = mapped_column(Boolean)
    session: Mapped[str | None]
    transcript_bytes: Mapped[int | None] = mapped_column(BigInteger)
    transcript_dropped_bytes: Mapped[int | None] = mapped_column(BigInteger)
    transcript_replaced: Mapped[bool | None] = mapped_column(Boolean)
    notes: Mapped[list[str] | None] = mapped_column(JSONB(none_as_null=True))
    workspace: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    variables: Mapped[list[str] | None] = mapped_column(JSONB(none_as_null=True))

    __table_args__ = (
        # record_runs and take_back: one run an attempt, whoever writes it
        UniqueConstraint("task_id", "attempt"),
        CheckConstraint(_words("status", OutcomeClass), name="status"),
        CheckConstraint("attempt > 0", name="attempt"),
        CheckConstraint("finished_at >= started_at", name="finished_at"),
        {"postgresql_with": {"autovacuum_analyze_scale_factor": 0.05, "autovacuum_vacuum_insert_scale_factor": 0.1}},
    )

    def __repr__(self) -> str:
        values = vars(self)
        return f"<Run of task {values.get('task_id')} attempt {values.get('attempt')} {values.get('status')}>"


class QuestionRow(Base):
    """What a task asks a person, and what came of it. An open one keeps its task ``waiting``.

    ``attempt`` is the one that asked, 0 for an approval before the first.
    """

    __tablename__ = "questions"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    task_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("tasks.id", ondelete="CASCADE"))
    name: Mapped[str]
    kind: Mapped[str] = mapped_column(server_default=QuestionKind.ASK.value)
    question: Mapped[str]
    choices: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    deadline: Mapped[datetime | None]
    default: Mapped[str | None]
    yes: Mapped[str | None]
    no: Mapped[str | None]
    grants: Mapped[dict[str, float] | None] = mapped_column(JSONB(none_as_null=True))
    details: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
    attempt: Mapped[int] = mapped_column(Integer, server_default="0")
    asked_at: Mapped[datetime] = mapped_column(server_default=_NOW)
    answered_at: Mapped[datetime | None]
    verdict: Mapped[str | None]
    answer: Mapped[str | None]
    actor: Mapped[str | None]
    reason: Mapped[str | None]

    __table_args__ = (
        CheckConstraint(_words("kind", QuestionKind), name="kind"),
        CheckConstraint(f"verdict IS NULL OR {_words('verdict', Verdict)}", name="verdict"),
        CheckConstraint("(answered_at IS NULL) = (verdict IS NULL)", name="answered_at"),
        # put_questions: one open question of a name
        Index("questions_open_name", "task_id", "name", unique=True, postgresql_where=text("answered_at IS NULL")),
        # QuestionRepository: what is open, the most urgent first; what has passed its deadline
        Index("questions_open", "deadline", "asked_at", postgresql_where=text("answered_at IS NULL")),
        # QuestionRepository.of_task, answers for the next attempt, and the foreign key
        Index("questions_of_task", "task_id", "id"),
    )


class Checkpoint(Base):
    """The result of a step that an attempt has taken; the first write of a name stays."""

    __tablename__ = "checkpoints"

    task_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("tasks.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[Any] = mapped_column(JSON)
    attempt: Mapped[int] = mapped_column(Integer)
    at: Mapped[datetime] = mapped_column(server_default=_NOW)


class WorkerRow(Base):
    """One worker process: its lease, who it is on its host, and its death, which is set once and never reverts.

    ``agents`` are the routes that it claims by. ``deaf_since`` and ``clock_ahead`` (seconds) come with each renewal.
    """

    __tablename__ = "workers"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str]
    host: Mapped[str]
    pid: Mapped[int] = mapped_column(Integer)
    boot_id: Mapped[str | None]
    pid_namespace: Mapped[str | None]
    process_started: Mapped[int | None] = mapped_column(BigInteger)
    token: Mapped[str | None]
    version: Mapped[str | None]
    slots: Mapped[int] = mapped_column(Integer, server_default="0")
    agents: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    plan: Mapped[str | None]
    lease: Mapped[Any] = mapped_column(INTERVAL)
    heartbeat: Mapped[Any] = mapped_column(INTERVAL)
    started_at: Mapped[datetime] = mapped_column(server_default=_NOW)
    renewed_at: Mapped[datetime] = mapped_column(server_default=_NOW)
    renewing_since: Mapped[datetime] = mapped_column(server_default=_NOW)
    draining_at: Mapped[datetime | None]
    stopped_at: Mapped[datetime | None]
    dead_at: Mapped[datetime | None]
    dead_why: Mapped[str | None]
    held: Mapped[int | None] = mapped_column(Integer)
    deaf_since: Mapped[datetime | None]
    clock_ahead: Mapped[float | None]

    __table_args__ = (
        # renewals, judgement, snapshots: the few that live or died with tasks in hand
        Index("workers_live", "id", postgresql_where=text("stopped_at IS NULL AND dead_at IS NULL")),
        {"postgresql_with": {"fillfactor": 50}},
    )


class RunEvent(Base):
    """A piece of a transcript. Without a foreign key: each flush would lock the task's row."""

    __tablename__ = "run_events"

    task_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer, primary_key=True)
    seq: Mapped[int] = mapped_column(Integer, primary_key=True)
    kind: Mapped[str]
    at: Mapped[datetime] = mapped_column(server_default=_NOW)
    text: Mapped[str]
    bytes: Mapped[int | None] = mapped_column(BigInteger)


class Minute(Base):
    """What one worker did in one minute: claims, lock hold, ends. Screens read these rows and never count history."""

    __tablename__ = "minutes"

    minute: Mapped[datetime] = mapped_column(primary_key=True)
    worker_id: Mapped[UUID] = mapped_column(primary_key=True)
    agent: Mapped[str] = mapped_column(primary_key=True, server_default="")
    claims: Mapped[int] = mapped_column(BigInteger, server_default="0")
    empty_claims: Mapped[int] = mapped_column(BigInteger, server_default="0")
    hold_ms: Mapped[float] = mapped_column(server_default="0")
    holds: Mapped[list[int]] = mapped_column(ARRAY(BigInteger), server_default="{}")
    done: Mapped[int] = mapped_column(BigInteger, server_default="0")
    failed: Mapped[int] = mapped_column(BigInteger, server_default="0")
    other: Mapped[int] = mapped_column(BigInteger, server_default="0")
    tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    cost_usd: Mapped[float] = mapped_column(server_default="0")
    unknown_cost: Mapped[int] = mapped_column(BigInteger, server_default="0")


class AgentState(Base):
    """What operators and the provider breaker have set for an agent, for all workers."""

    __tablename__ = "agents"

    name: Mapped[str] = mapped_column(primary_key=True)
    paused_at: Mapped[datetime | None]
    paused_until: Mapped[datetime | None]
    reason: Mapped[str | None]
    actor: Mapped[str | None]


class AlertEpisode(Base):
    """An alert from when it was first seen until it was gone; ``subject``, ``name``, ``task_id`` and ``plan`` say of what."""

    __tablename__ = "alerts"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    kind: Mapped[str]
    key: Mapped[str]
    subject: Mapped[str]
    name: Mapped[str]
    task_id: Mapped[int | None] = mapped_column(BigInteger)
    plan: Mapped[str | None]
    what: Mapped[str]
    command: Mapped[str | None]
    heals: Mapped[bool] = mapped_column(Boolean, server_default="false")
    since: Mapped[datetime | None]
    begun_at: Mapped[datetime] = mapped_column(server_default=_NOW)
    seen_at: Mapped[datetime] = mapped_column(server_default=_NOW)
    ended_at: Mapped[datetime | None]

    __table_args__ = (
        # AlertRepository.look: an alert that goes on is one episode
        Index("alerts_open", "kind", "key", unique=True, postgresql_where=text("ended_at IS NULL")),
        # AlertRepository.look: episodes that are old enough to be forgotten
        Index("alerts_ended", "ended_at", postgresql_where=text("ended_at IS NOT NULL")),
        CheckConstraint("ended_at >= begun_at", name="ended_at"),
    )


class AlertDelivery(Base):
    """What one hook has been told of one episode. ``tries`` is the fence of who tells it now, until ``next_try_at``."""

    __tablename__ = "alert_deliveries"

    alert_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("alerts.id", ondelete="CASCADE"), primary_key=True)
    hook: Mapped[str] = mapped_column(primary_key=True)
    next_try_at: Mapped[datetime] = mapped_column(server_default=_NOW)
    tries: Mapped[int] = mapped_column(Integer, server_default="0")
    failures: Mapped[int] = mapped_column(Integer, server_default="0")
    begun_told_at: Mapped[datetime | None]
    ended_told_at: Mapped[datetime | None]
    gave_up_at: Mapped[datetime | None]
    error: Mapped[str | None]

    __table_args__ = (
        # AlertRepository.take: what is still to be told
        Index(
            "alert_deliveries_open",
            "next_try_at",
            postgresql_where=text("ended_told_at IS NULL AND gave_up_at IS NULL"),
        ),
        CheckConstraint("ended_told_at IS NULL OR begun_told_at IS NOT NULL", name="order"),
    )


class AlertLook(Base):
    """When somebody looked for alerts last: one row, so that one process looks for all."""

    __tablename__ = "alert_looks"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    looked_at: Mapped[datetime] = mapped_column(server_default=_NOW)

    __table_args__ = (CheckConstraint("id = 1", name="id"),)


class Breaker(Base):
    """The provider of some agents refuses them: no worker claims their tasks until it has let one probe pass.

    A row is there while the breaker is open. ``login`` is what the ``agents`` share: a login, else one agent's route.
    From ``until`` on one worker at a time may start one task as a probe; it holds ``probe_by`` until ``probe_until``.
    """

    __tablename__ = "breakers"

    login: Mapped[str] = mapped_column(primary_key=True)
    agents: Mapped[list[str]] = mapped_column(ARRAY(Text))
    kind: Mapped[str]
    message: Mapped[str | None]
    task_id: Mapped[int | None] = mapped_column(BigInteger)
    opened_at: Mapped[datetime] = mapped_column(server_default=_NOW)
    until: Mapped[datetime] = mapped_column(server_default=_NOW)
    stated: Mapped[bool] = mapped_column(Boolean, server_default="false")
    refusals: Mapped[int] = mapped_column(Integer, server_default="0")
    probe_by: Mapped[UUID | None]
    probe_until: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("kind IN ('rate_limited', 'unauthenticated')", name="kind"),
        CheckConstraint("(probe_by IS NULL) = (probe_until IS NULL)", name="probe"),
    )


class Audit(Base):
    """Who did what to which task, and why."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=_NOW)
    actor: Mapped[str]
    action: Mapped[str]
    task_id: Mapped[int | None] = mapped_column(BigInteger, index=True)
    subject: Mapped[str | None]
    reason: Mapped[str | None]
    details: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
