"""The words of the domain: task statuses, outcome classes, and the one table of moves between statuses.

``docs/states.md`` is generated from ``TRANSITIONS``; the CHECK constraints of the schema repeat the words.
"""

from __future__ import annotations

from enum import StrEnum


class TaskStatus(StrEnum):
    """Where a task is. Not due, retrying and held tasks are ``pending``; ``available_at`` and ``held_at`` say so."""

    PENDING = "pending"
    RUNNING = "running"
    BLOCKED = "blocked"
    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class OutcomeClass(StrEnum):
    """What came of an attempt: ``runs.status``, and ``error_class`` of all but ``done``."""

    DONE = "done"
    TRANSIENT = "transient"
    RATE_LIMITED = "rate_limited"
    UNAUTHENTICATED = "unauthenticated"
    PERMANENT = "permanent"
    TIMED_OUT = "timed_out"
    STALLED = "stalled"
    OVER_BUDGET = "over_budget"
    SUSPENDED = "suspended"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    LOST = "lost"


WILL_NOT_STOP = "will not stop: "
"""How the progress message of a running task begins whose processes survive SIGKILL; only its worker says so."""


def will_not_stop(message: str | None) -> str | None:
    """What of a running task survives SIGKILL, by its progress message; None as a rule."""
    return message.removeprefix(WILL_NOT_STOP) if message is not None and message.startswith(WILL_NOT_STOP) else None


class OnLimit(StrEnum):
    """What happens when a budget of tokens, USD or turns is used up."""

    FAIL = "fail"
    FINISH_TURN = "finish_turn"
    ASK = "ask"


ENDED = frozenset({TaskStatus.DONE, TaskStatus.FAILED, TaskStatus.CANCELLED})
"""Statuses that a task keeps until a person says otherwise."""

LIVE = frozenset(set(TaskStatus) - ENDED)
"""Statuses in which a ``unique_key`` is taken."""

TRANSITIONS: dict[TaskStatus, frozenset[TaskStatus]] = {
    TaskStatus.PENDING: frozenset(
        {TaskStatus.RUNNING, TaskStatus.WAITING, TaskStatus.BLOCKED, TaskStatus.CANCELLED, TaskStatus.FAILED}
    ),
    TaskStatus.RUNNING: frozenset(
        {TaskStatus.DONE, TaskStatus.FAILED, TaskStatus.CANCELLED, TaskStatus.PENDING, TaskStatus.WAITING}
    ),
    TaskStatus.BLOCKED: frozenset({TaskStatus.PENDING, TaskStatus.WAITING, TaskStatus.CANCELLED}),
    TaskStatus.WAITING: frozenset({TaskStatus.PENDING, TaskStatus.CANCELLED, TaskStatus.FAILED}),
    TaskStatus.DONE: frozenset(),
    TaskStatus.FAILED: frozenset({TaskStatus.PENDING, TaskStatus.BLOCKED, TaskStatus.WAITING}),
    TaskStatus.CANCELLED: frozenset({TaskStatus.PENDING, TaskStatus.BLOCKED, TaskStatus.WAITING}),
}
"""Every move that a task can make. An ended task moves again only by ``retry``, or with its retried parent."""
