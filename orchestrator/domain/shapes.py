"""The JSON shapes of tasks and runs, and of what screens show: one place, so that no command can drift.

Everything here is pure. Times are ISO 8601 in UTC with their offset; what is unknown is null, never 0; the keys are
always all there, in this order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from orchestrator.domain.entities import QuestionRow, Run, Task
from orchestrator.domain.snapshot import Alert, Count, Episode, RunningTask, WorkerRow
from orchestrator.domain.words import TaskStatus

USAGE_KEYS = (
    "input_tokens",
    "output_tokens",
    "total_tokens",
    "cost_usd",
    "cost_source",
    "counter",
    "complete",
)


def time_json(at: datetime | None) -> str | None:
    """*at* as ISO 8601 in UTC, with its offset."""
    return None if at is None else at.astimezone(UTC).isoformat()


def usage_json(**known: Any) -> dict[str, Any]:
    """The usage object; what is left out is null."""
    return {key: known.get(key) for key in USAGE_KEYS}


def task_json(
    task: Task,
    *,
    depends_on: Sequence[int] = (),
    usage: dict[str, Any] | None = None,
    full: bool = True,
) -> dict[str, Any]:
    """The task object. *usage* is the sum over the task's runs (``usage_json``).

    Without *full*, ``input`` and ``result`` are null and their columns are not touched.
    """
    error = None
    if task.error_class is not None:
        error = {"class": task.error_class, "cause": task.error_cause, "message": task.error_message}
    retrying = task.status == TaskStatus.PENDING and task.attempt > 0 and not task.due
    doing = activity_of(task.live_usage) if task.status == TaskStatus.RUNNING else None
    return {
        "id": task.id,
        "agent": task.agent,
        "title": task.title,
        "status": str(task.status),
        "priority": task.priority,
        "attempt": task.attempt,
        "retry_count": task.retry_count,
        "lost_count": task.lost_count,
        "max_retries": task.max_retries,
        "retry": task.retry,
        "budget": {
            "seconds": task.budget_seconds,
            "tokens": task.budget_tokens,
            "usd": task.budget_usd,
            "turns": task.budget_turns,
            "on_limit": task.on_limit,
        },
        "available_at": time_json(task.available_at),
        "created_at": time_json(task.created_at),
        "started_at": time_json(task.started_at),
        "finished_at": time_json(task.finished_at),
        "claimed_by": None if task.claimed_by is None else str(task.claimed_by),
        "cancel_requested_at": time_json(task.cancel_requested_at),
        "held_at": time_json(task.held_at),
        "plan": task.plan,
        "name": task.name,
        "depends_on": list(depends_on),
        "unique_key": task.unique_key,
        "concurrency_key": task.concurrency_key,
        "tags": task.tags or {},
        "input": task.input if full else None,
        "result": task.result if full else None,
        "error": error,
        "next_attempt_at": time_json(task.available_at) if retrying else None,
        "usage": usage if usage is not None else usage_json(),
        "session": task.session,
        "workspace": task.workspace,
        "activity": activity_json(*doing) if doing is not None else None,
    }


def activity_of(live: Mapping[str, Any] | None) -> tuple[str, datetime] | None:
    """What the agent of a running task does, and since when, from ``tasks.live_usage``; None if it does not tell."""
    what, since = (live or {}).get("activity"), (live or {}).get("activity_since")
    if not isinstance(what, str) or not isinstance(since, str):
        return None
    try:
        return what, datetime.fromisoformat(since)
    except ValueError:
        return None


def activity_json(what: str | None, since: datetime | None) -> dict[str, Any] | None:
    """The activity object, null if it is unknown."""
    return None if what is None else {"what": what, "since": time_json(since)}


def run_json(run: Run) -> dict[str, Any]:
    """The run object."""
    return {
        "id": run.id,
        "task_id": run.task_id,
        "attempt": run.attempt,
        "status": str(run.status),
        "error_class": run.error_class,
        "cause": run.cause,
        "message": run.message,
        "exit_code": run.exit_code,
        "signal": run.signal,
        "worker": run.worker,
        "host": run.host,
        "started_at": time_json(run.started_at),
        "finished_at": time_json(run.finished_at),
        "recorded_at": time_json(run.recorded_at),
        "duration_seconds": run.duration_seconds,
        "result": run.result,
        "late": run.late,
        "usage": usage_json(
            input_tokens=run.input_tokens,
            output_tokens=run.output_tokens,
            total_tokens=run.total_tokens,
            cost_usd=run.cost_usd,
            cost_source=run.cost_source,
            counter=run.counter,
            complete=run.usage_complete,
        ),
        "session": run.session,
        "transcript": {
            "bytes": run.transcript_bytes,
            "dropped_bytes": run.transcript_dropped_bytes,
            "replaced": run.transcript_replaced,
        },
        "notes": run.notes or [],
        "workspace": run.workspace,
        "variables": run.variables,
    }


def question_json(
    question: QuestionRow, agent: str, plan: str | None, task_name: str | None, title: str | None, status: str
) -> dict[str, Any]:
    """The question object, with what names its task. ``verdict`` is null while it is open."""
    return {
        "id": question.id,
        "task_id": question.task_id,
        "agent": agent,
        "plan": plan,
        "task_name": task_name,
        "title": title,
        "task_status": str(status),
        "name": question.name,
        "kind": question.kind,
        "question": question.question,
        "choices": list(question.choices),
        "deadline": time_json(question.deadline),
        "default": question.default,
        "details": question.details,
        "attempt": question.attempt,
        "asked_at": time_json(question.asked_at),
        "answered_at": time_json(question.answered_at),
        "verdict": question.verdict,
        "answer": question.answer,
        "actor": question.actor,
        "reason": question.reason,
    }


def worker_json(worker: WorkerRow) -> dict[str, Any]:
    """A worker as ``workers`` and ``status`` show it; ``state`` is live, silent, draining, stopping or dead."""
    return {
        "id": worker.id,
        "name": worker.name,
        "host": worker.host,
        "state": worker.state or "live",
        "agents": list(worker.agents),
        "running": worker.running,
        "slots": worker.slots,
        "started_at": time_json(worker.started_at),
        "renewed_at": time_json(worker.renewed_at),
        "lease_seconds": worker.lease_seconds,
    }


def running_json(task: RunningTask, now: datetime) -> dict[str, Any]:
    """A running task as ``status`` shows it."""
    spend, budget = task.spend, task.budget
    return {
        "id": task.id,
        "agent": task.agent,
        "name": task.name,
        "title": task.title,
        "plan": task.plan,
        "worker": task.worker or None,
        "attempt": task.attempt,
        "started_at": time_json(task.started_at),
        "age_seconds": (now - task.started_at).total_seconds(),
        "budget": {
            "seconds": budget.seconds,
            "tokens": budget.tokens,
            "usd": budget.usd,
            "turns": budget.turns,
            "on_limit": budget.on_limit.value,
        },
        "usage": usage_json(
            total_tokens=spend.tokens,
            cost_usd=spend.usd,
            complete=False,
        ),
        "percent": task.percent,
        "last_output": task.last_output,
        "last_output_at": time_json(task.last_output_at),
        "activity": activity_json(task.activity, task.activity_since),
        "cancel_requested_at": time_json(task.cancel_requested_at),
    }


def alert_json(alert: Alert) -> dict[str, Any]:
    """An alert: what and how much, since when, and the command that would change it."""
    return {**asdict(alert), "since": time_json(alert.since)}


def episode_json(episode: Episode, event: str) -> dict[str, Any]:
    """What a hook is told of *episode*: the alert's own keys, and ``event`` (begun or ended) and the episode's times."""
    return {
        "event": event,
        "episode": episode.id,
        **alert_json(episode.alert),
        "begun_at": time_json(episode.begun_at),
        "ended_at": time_json(episode.ended_at) if event == "ended" else None,
    }


def counts_json(pending: Count, running: Count, blocked: Count, waiting: Count) -> dict[str, Any]:
    """The counts of live tasks; ``capped`` when one of them stopped at its cap, and there may be more."""
    counts = {"pending": pending, "running": running, "blocked": blocked, "waiting": waiting}
    return {**{name: count.n for name, count in counts.items()}, "capped": any(c.capped for c in counts.values())}


__all__ = [
    "USAGE_KEYS",
    "alert_json",
    "counts_json",
    "episode_json",
    "question_json",
    "run_json",
    "running_json",
    "task_json",
    "time_json",
    "usage_json",
    "worker_json",
]
