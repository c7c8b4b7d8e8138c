"""The one place that decides, without a database: every outcome class, the retry policy, losses and rate limits."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from orchestrator.domain.outcome import Claim, Outcome, RetryPolicy
from orchestrator.domain.settle import backoff, may_retry, settle
from orchestrator.domain.words import TRANSITIONS, OutcomeClass, TaskStatus

START = datetime(2026, 11, 1, 12, tzinfo=UTC)


def claim(**values: object) -> Claim:
    """A claim of task 1 with two retries, unless said otherwise."""
    given: dict[str, object] = {
        "task_id": 1,
        "attempt": 1,
        "claimed_by": UUID(int=1),
        "agent": "a",
        "started_at": START,
        **values,
    }
    return Claim(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", list(OutcomeClass))
def test_every_class_leads_to_a_status_that_running_may_become(kind: OutcomeClass) -> None:
    """Whatever an attempt ends with, the settlement is a move that the table of transitions has."""
    assert settle(claim(), Outcome(kind)).status in TRANSITIONS[TaskStatus.RUNNING]


@pytest.mark.parametrize("kind", list(OutcomeClass))
def test_a_requested_cancel_wins_over_every_outcome(kind: OutcomeClass) -> None:
    """With the cancel flag set under the lock, the task is cancelled whatever came out."""
    assert settle(claim(), Outcome(kind), cancel_requested=True).status is TaskStatus.CANCELLED


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (OutcomeClass.DONE, TaskStatus.DONE),
        (OutcomeClass.PERMANENT, TaskStatus.FAILED),
        (OutcomeClass.OVER_BUDGET, TaskStatus.FAILED),
        (OutcomeClass.CANCELLED, TaskStatus.CANCELLED),
        (OutcomeClass.INTERRUPTED, TaskStatus.PENDING),
        (OutcomeClass.SUSPENDED, TaskStatus.WAITING),
    ],
)
def test_classes_that_use_no_retry(kind: OutcomeClass, status: TaskStatus) -> None:
    """These classes leave the retry count as it was."""
    settlement = settle(claim(retry_count=1), Outcome(kind))
    assert (settlement.status, settlement.retry_count) == (status, 1)


@pytest.mark.parametrize("kind", [OutcomeClass.TRANSIENT, OutcomeClass.TIMED_OUT, OutcomeClass.STALLED])
def test_counted_failures_are_retried_up_to_max_retries(kind: OutcomeClass) -> None:
    """max_retries = 2 means three attempts, and the third failure is final."""
    first = settle(claim(retry_count=0), Outcome(kind))
    second = settle(claim(retry_count=1), Outcome(kind))
    third = settle(claim(retry_count=2), Outcome(kind))
    assert (first.status, first.retry_count) == (TaskStatus.PENDING, 1)
    assert (second.status, second.retry_count) == (TaskStatus.PENDING, 2)
    assert third.status is TaskStatus.FAILED


def test_no_retries_means_none() -> None:
    """max_retries = 0 fails at the first counted failure."""
    assert not may_retry(0, 1)
    assert settle(claim(max_retries=0), Outcome(OutcomeClass.TRANSIENT)).status is TaskStatus.FAILED


def test_backoff_is_full_jitter_below_a_capped_exponential() -> None:
    """Waits lie between 0 and min(max, initial × factor ** n), and use the whole of that range."""
    policy = RetryPolicy(initial=5, factor=2, max=600)
    for failures, ceiling in ((1, 5), (2, 10), (3, 20), (8, 600), (40, 600)):
        waits = [backoff(policy, failures) for _ in range(300)]
        assert all(0 <= wait <= ceiling for wait in waits)
        assert max(waits) > ceiling * 0.8
        assert min(waits) < ceiling * 0.2


def test_an_interruption_keeps_every_counter_and_starts_at_once() -> None:
    """A deploy costs nothing: no retry, no loss, no wait."""
    settlement = settle(claim(retry_count=1, lost_count=1, max_retries=0), Outcome(OutcomeClass.INTERRUPTED))
    assert (settlement.status, settlement.delay) == (TaskStatus.PENDING, 0)
    assert (settlement.retry_count, settlement.lost_count) == (1, 1)


def test_losses_are_counted_apart_and_end() -> None:
    """The first loss starts again at once, later ones wait, and more than max(max_retries, 2) are too many."""
    first = settle(claim(), Outcome(OutcomeClass.LOST))
    assert (first.status, first.delay, first.lost_count, first.retry_count) == (TaskStatus.PENDING, 0, 1, 0)
    assert settle(claim(lost_count=1), Outcome(OutcomeClass.LOST)).status is TaskStatus.PENDING
    third = settle(claim(lost_count=2), Outcome(OutcomeClass.LOST))
    assert (third.status, third.cause, third.message) == (TaskStatus.FAILED, "worker_lost", "worker lost 3 times")


def test_a_task_that_was_alone_is_the_suspect() -> None:
    """Alone on its worker, a task gets no more losses than retries."""
    assert settle(claim(max_retries=0), Outcome(OutcomeClass.LOST), alone=True).status is TaskStatus.FAILED
    assert settle(claim(max_retries=0), Outcome(OutcomeClass.LOST), alone=False).status is TaskStatus.PENDING


def test_a_rate_limit_waits_for_its_stated_reset() -> None:
    """The stated reset decides, no retry is used, and the row of limits in a row is kept."""
    reset = START + timedelta(hours=1)
    settlement = settle(claim(), Outcome(OutcomeClass.RATE_LIMITED, retry_at=reset, elapsed=1))
    assert (settlement.status, settlement.at, settlement.retry_count) == (TaskStatus.PENDING, reset, 0)
    assert (settlement.limited_count, settlement.limited_since) == (1, START + timedelta(seconds=1))
    assert settle(claim(), Outcome(OutcomeClass.RATE_LIMITED, retry_after=90)).delay == 90


@pytest.mark.parametrize("stated", [0.0, -5.0, float("nan"), START, START.replace(tzinfo=None)])
def test_a_stated_reset_that_is_over_is_none(stated: float | datetime) -> None:
    """It would be asked again without a pause, for ever: the usual wait counts."""
    given = {"retry_after": stated} if isinstance(stated, float) else {"retry_at": stated}
    settlement = settle(claim(), Outcome(OutcomeClass.RATE_LIMITED, elapsed=1, **given))
    assert settlement.at is None
    assert settlement.delay >= 30


def test_a_short_stated_reset_is_believed_three_times() -> None:
    """Less than a second, said again and again, is no pause either."""
    outcome = Outcome(OutcomeClass.RATE_LIMITED, retry_after=0.2)
    assert [settle(claim(limited_count=count), outcome).delay < 1 for count in range(5)] == [True] * 3 + [False] * 2
    seven = Outcome(OutcomeClass.RATE_LIMITED, retry_after=7)
    assert settle(claim(limited_count=50), seven).delay == 7


@pytest.mark.parametrize("seconds", [1e300, math.inf, 10**400], ids=["1e300", "inf", "10**400"])
def test_no_stated_reset_is_further_than_a_week(seconds: float) -> None:
    """However far away the provider says that it is."""
    assert settle(claim(), Outcome(OutcomeClass.RATE_LIMITED, retry_after=seconds)).delay == 7 * 86_400


def test_rate_limits_without_a_reset_wait_longer_each_time() -> None:
    """Thirty seconds, a minute, two … fifteen minutes, with a little on top."""
    for count, least in ((0, 30), (1, 60), (2, 120), (9, 900)):
        delay = settle(claim(limited_count=count, limited_since=START), Outcome(OutcomeClass.RATE_LIMITED)).delay
        assert least <= delay <= least * 1.1


def test_rate_limits_in_a_row_end_after_give_up_after() -> None:
    """A day of nothing but rate limits is a failure; a success in between starts the row anew."""
    since = START - timedelta(hours=25)
    limited = Outcome(OutcomeClass.RATE_LIMITED, message="429")
    given_up = settle(claim(limited_count=30, limited_since=since), limited)
    assert given_up.status is TaskStatus.FAILED
    assert given_up.message is not None
    assert "31 attempts" in given_up.message
    assert settle(claim(), Outcome(OutcomeClass.TRANSIENT)).limited_count == 0
