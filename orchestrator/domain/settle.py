"""The one place that decides what becomes of a task after an attempt.

``settle`` is pure: record and watchdog call it with the task's counters as they are under the row lock, and SQL only
applies the ``Settlement``. The retry policy comes from the task row, so that a watchdog on another host, without the
agent's configuration, decides the same. tenacity's stop and wait objects are evaluated here and nowhere slept on: the
computed wait goes into ``available_at``, PostgreSQL is the sleep, and a crash loses nothing.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

from tenacity import RetryCallState, Retrying, stop_after_attempt, wait_exponential, wait_random_exponential

from orchestrator.domain.outcome import Claim, Outcome, RetryPolicy
from orchestrator.domain.values import value
from orchestrator.domain.words import OutcomeClass, TaskStatus

LONGEST_RESET = timedelta(days=7)
"""A stated reset further away than this is not believed."""

LIMITED_WAIT = wait_exponential(multiplier=30, exp_base=2, max=900)
"""Seconds to wait after a rate limit without a stated reset, by how many came in a row: 30 s, 1 min, … 15 min."""

LOGIN_WAIT = wait_exponential(multiplier=2, exp_base=2, max=900)
"""The same after a refused login: parallel programs of one login lose the race for its token, and are fine a moment later."""

COUNTED = frozenset({OutcomeClass.TRANSIENT, OutcomeClass.TIMED_OUT, OutcomeClass.STALLED})
"""Classes that use up a retry."""

LIMITED = frozenset({OutcomeClass.RATE_LIMITED, OutcomeClass.UNAUTHENTICATED})
"""Classes that wait for the provider and use up no retry, but ``give_up_after``."""


@value
class Settlement:
    """The task's move: its next status, when it may start again, and its counters afterwards.

    ``delay`` is in seconds from now by the database's clock; ``at`` is a stated instant and wins over ``delay``.
    ``cause`` and ``message``, where set, replace those of the outcome on the task row (never on the run).
    """

    status: TaskStatus
    delay: float = 0.0
    at: datetime | None = None
    retry_count: int = 0
    lost_count: int = 0
    limited_count: int = 0
    limited_since: datetime | None = None
    cause: str | None = None
    message: str | None = None


def backoff(policy: RetryPolicy, failures: int) -> float:
    """Seconds before the next attempt after *failures* counted ones: full jitter over an exponential, capped."""
    wait = wait_random_exponential(multiplier=policy.initial, exp_base=policy.factor, max=policy.max)
    return max(0.0, float(wait(_after(failures))))


def may_retry(max_retries: int, failures: int) -> bool:
    """Whether a task with *failures* counted failures gets another attempt: up to ``max_retries`` after the first."""
    return not stop_after_attempt(max_retries + 1)(_after(failures))


def settle(
    claim: Claim,
    outcome: Outcome,
    *,
    cancel_requested: bool = False,
    give_up_after: float = 86_400.0,
    alone: bool = False,
) -> Settlement:
    """Decide the task's move after *outcome* of *claim*.

    ``cancel_requested`` is the flag as read under the row lock; with it the task is cancelled whatever came out.
    ``give_up_after`` is in seconds; ``alone`` says that a lost task was the only one of its worker.
    """
    kept = {
        "retry_count": claim.retry_count,
        "lost_count": claim.lost_count,
        "limited_count": claim.limited_count,
        "limited_since": claim.limited_since,
    }
    if cancel_requested:
        return Settlement(TaskStatus.CANCELLED, **kept)  # type: ignore[arg-type]
    kind = outcome.status
    if kind is OutcomeClass.DONE:
        return Settlement(TaskStatus.DONE, retry_count=claim.retry_count, lost_count=claim.lost_count)
    if kind is OutcomeClass.CANCELLED:
        return Settlement(TaskStatus.CANCELLED, **kept)  # type: ignore[arg-type]
    if kind is OutcomeClass.INTERRUPTED:
        return Settlement(TaskStatus.PENDING, **kept)  # type: ignore[arg-type]
    if kind is OutcomeClass.SUSPENDED or (kind is OutcomeClass.OVER_BUDGET and outcome.asks):
        return Settlement(TaskStatus.WAITING, **kept)  # type: ignore[arg-type]
    if kind in COUNTED:
        failures = claim.retry_count + 1
        if may_retry(claim.max_retries, failures):
            return Settlement(
                TaskStatus.PENDING, backoff(claim.retry, failures), retry_count=failures, lost_count=claim.lost_count
            )
        return Settlement(TaskStatus.FAILED, retry_count=claim.retry_count, lost_count=claim.lost_count)
    if kind in LIMITED:
        return _limited(claim, outcome, give_up_after)
    if kind is OutcomeClass.LOST:
        return _lost(claim, alone)
    return Settlement(TaskStatus.FAILED, retry_count=claim.retry_count, lost_count=claim.lost_count)


def _limited(claim: Claim, outcome: Outcome, give_up_after: float) -> Settlement:
    ended = claim.started_at + timedelta(seconds=outcome.elapsed)
    since = claim.limited_since or ended
    if (ended - since).total_seconds() >= give_up_after and claim.limited_count > 0:
        return Settlement(
            TaskStatus.FAILED,
            retry_count=claim.retry_count,
            lost_count=claim.lost_count,
            limited_count=claim.limited_count + 1,
            limited_since=since,
            message=f"gave up after {claim.limited_count + 1} attempts in a row since {since:%Y-%m-%d %H:%M} UTC: "
            f"{outcome.message or outcome.status.value}",
        )
    at = outcome.retry_at
    if at is not None and not believed(
        (at.replace(tzinfo=at.tzinfo or UTC) - ended).total_seconds(), claim.limited_count
    ):
        at = None
    if outcome.retry_after is not None and believed(outcome.retry_after, claim.limited_count):
        delay = min(outcome.retry_after, LONGEST_RESET.total_seconds())
    else:
        # Up to a tenth on top, never less: the waiting tasks of one provider must not all come back in one instant.
        delay = limited_wait(outcome.status, claim.limited_count + 1) * random.uniform(1.0, 1.1)
    return Settlement(
        TaskStatus.PENDING,
        delay,
        at=at,
        retry_count=claim.retry_count,
        lost_count=claim.lost_count,
        limited_count=claim.limited_count + 1,
        limited_since=since,
    )


def believed(wait: float, refusals: int) -> bool:
    """Whether a stated wait of *wait* seconds is one, after *refusals* in a row.

    A reset that is over, and one of less than a second that was wrong three times, would only be asked again at once,
    for ever: then the usual wait counts.
    """
    return wait > 0 and (wait >= 1 or refusals < 3)


def limited_wait(kind: OutcomeClass, refusals: int) -> float:
    """Seconds until the provider is asked again after *refusals* in a row, where it states no time."""
    wait = LOGIN_WAIT if kind is OutcomeClass.UNAUTHENTICATED else LIMITED_WAIT
    return float(wait(_after(refusals)))


def _lost(claim: Claim, alone: bool) -> Settlement:
    lost = claim.lost_count + 1
    if lost > max(claim.max_retries, 2) or (alone and lost > claim.max_retries):
        return Settlement(
            TaskStatus.FAILED,
            retry_count=claim.retry_count,
            lost_count=lost,
            cause="worker_lost",
            message=f"worker lost {lost} time{'s' if lost > 1 else ''}",
        )
    # The first loss is most often the worker's own fault (a deploy, the machine): no wait. Later ones are suspicious.
    delay = 0.0 if lost == 1 else backoff(claim.retry, lost - 1)
    return Settlement(TaskStatus.PENDING, delay, retry_count=claim.retry_count, lost_count=lost)


_POLICY = Retrying()


def _after(failures: int) -> RetryCallState:
    state = RetryCallState(retry_object=_POLICY, fn=None, args=(), kwargs={})
    state.attempt_number = max(1, failures)
    return state
