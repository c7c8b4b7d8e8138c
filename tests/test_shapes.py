"""The JSON shapes of the contract: their keys in their order, unknown as null, times with their offset."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import Engine

from orchestrator.domain.entities import Run, Task
from orchestrator.domain.outcome import Budget, Outcome, TranscriptSize, Usage
from orchestrator.domain.shapes import (
    alert_json,
    counts_json,
    run_json,
    running_json,
    task_json,
    time_json,
    usage_json,
    worker_json,
)
from orchestrator.domain.snapshot import Alert, Count, RunningTask, Spend, WorkerRow
from orchestrator.domain.words import OnLimit, OutcomeClass
from orchestrator.repositories.filters import TaskFilter
from orchestrator.repositories.reading import ReadingRepository
from tests.making import Making

# As the contract has them.
TASK = (
    "id agent title status priority attempt retry_count lost_count max_retries retry budget {seconds tokens usd turns"
    " on_limit} available_at created_at started_at finished_at claimed_by cancel_requested_at held_at plan name depends_on"
    " unique_key concurrency_key tags input result error {class cause message} next_attempt_at usage session workspace"
    " activity"
)
RUN = (
    "id task_id attempt status error_class cause message exit_code signal worker host started_at finished_at"
    " recorded_at duration_seconds result late usage {input_tokens output_tokens total_tokens cost_usd cost_source counter"
    " complete} session transcript {bytes dropped_bytes replaced} notes workspace variables"
)
NOON = datetime(2030, 5, 1, 12, 0, tzinfo=timezone(timedelta(hours=2)))


def spelled(value: dict[str, Any], *inner: str) -> str:
    """The keys of *value* as the contract writes them, those of *inner* with their own keys."""
    return " ".join(
        f"{key} {{{' '.join(each)}}}" if key in inner and isinstance(each, dict) else key for key, each in value.items()
    )


def is_time(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00", value) is not None


@pytest.fixture
def made(engine: Engine) -> Making:
    return Making.on(engine)


@pytest.fixture
def read(engine: Engine) -> ReadingRepository:
    return ReadingRepository(engine)


# -- from the database --------------------------------------------------------------------------------------------


def test_keys_of_a_task_and_its_run(made: Making, read: ReadingRepository) -> None:
    """Exactly the contract's keys, in its order; nothing is added and nothing is left out."""
    made.run(made.add(), Outcome(OutcomeClass.PERMANENT, cause="c", message="m", usage=Usage(total_tokens=1)))
    task, (run,) = read.task(1), read.runs(1)
    assert spelled(task, "budget", "error") == TASK
    assert task["error"] == {"class": "permanent", "cause": "c", "message": "m"}
    assert spelled(run, "usage", "transcript") == RUN
    assert list(task["usage"]) == list(run["usage"])
    for name in ("available_at", "created_at", "started_at", "finished_at"):
        assert is_time(task[name]), name
    for name in ("started_at", "finished_at", "recorded_at"):
        assert is_time(run[name]), name
    for listed in read.tasks(TaskFilter())[0]:
        assert spelled(listed, "budget", "error") == TASK
    json.dumps([task, run], allow_nan=False)


def test_what_an_insert_by_hand_leaves_open_is_null(made: Making, read: ReadingRepository) -> None:
    """Rows with the fewest columns that the contract allows have all keys, and null where nobody knows."""
    made.query("""INSERT INTO tasks (agent, input) VALUES ('coder', '"Fix"')""")
    made.query(
        "INSERT INTO tasks (agent, input, status, attempt, started_at, finished_at)"
        " VALUES ('coder', '1', 'failed', 1, now() - interval '2 s', now())"
    )
    made.query(
        "INSERT INTO runs (task_id, attempt, status, started_at, finished_at)"
        " VALUES (2, 1, 'transient', now() - interval '2 s', now())"
    )
    task, (run,) = read.task(1), read.runs(2)
    known = {
        "id": 1, "agent": "coder", "status": "pending", "priority": 0, "attempt": 0, "retry_count": 0, "lost_count": 0,
        "depends_on": [], "tags": {}, "input": "Fix", "budget": dict.fromkeys(("seconds", "tokens", "usd", "turns", "on_limit")),
        "usage": usage_json(), "available_at": task["available_at"], "created_at": task["created_at"],
    }  # fmt: skip
    assert task == dict.fromkeys(task) | known
    assert set(task["usage"].values()) == {None}
    assert read.task(2)["error"] is None
    known = {
        "id": 1, "task_id": 2, "attempt": 1, "status": "transient", "error_class": "transient", "duration_seconds": 2.0,
        "usage": usage_json(), "transcript": {"bytes": None, "dropped_bytes": None, "replaced": None}, "notes": [],
    }  # fmt: skip
    known |= {name: run[name] for name in ("started_at", "finished_at", "recorded_at")}
    assert run == dict.fromkeys(run) | known


def test_zero_is_not_unknown(made: Making, read: ReadingRepository) -> None:
    """A known zero stays zero: tokens, cost, exit code, bytes; an empty result stays empty."""
    usage = Usage(0, 0, 0, 0.0, "agent", "delta", True)
    outcome = Outcome(OutcomeClass.DONE, result="", exit_code=0, usage=usage, transcript=TranscriptSize())
    made.run(made.add(priority=0, input=0), outcome)
    task, (run,) = read.task(1), read.runs(1)
    assert (task["input"], task["result"], run["result"], run["exit_code"]) == (0, "", "", 0)
    assert (run["usage"]["total_tokens"], run["usage"]["cost_usd"], run["usage"]["complete"]) == (0, 0.0, True)
    assert (task["usage"]["total_tokens"], task["usage"]["cost_usd"]) == (0, 0.0)
    assert run["transcript"] == {"bytes": 0, "dropped_bytes": 0, "replaced": False}


# -- pure ---------------------------------------------------------------------------------------------------------


def pending(**values: Any) -> Task:
    return Task(id=1, agent="a", status="pending", available_at=NOON, created_at=NOON, **values)


def test_times_have_their_offset() -> None:
    """Whatever offset the session had, times are told in UTC; none is null."""
    assert time_json(NOON) == "2030-05-01T10:00:00+00:00"
    assert time_json(None) is None
    assert time_json(datetime(2030, 1, 1, microsecond=5, tzinfo=UTC)) == "2030-01-01T00:00:00.000005+00:00"


@pytest.mark.parametrize(
    ("attempt", "due", "status", "shown"),
    [(1, False, "pending", True), (0, False, "pending", False), (1, True, "pending", False), (1, False, "done", False)],
)
def test_the_next_attempt_is_that_of_a_retry(attempt: int, due: bool, status: str, shown: bool) -> None:
    """Only a task that ran before and waits has a next attempt; one that was added for later has available_at."""
    task = pending(attempt=attempt, due=due)
    task.status = status
    found = task_json(task)
    assert found["next_attempt_at"] == (time_json(NOON) if shown else None)
    assert found["available_at"] == time_json(NOON)


def test_a_list_reads_no_large_values() -> None:
    """Without full, input and result are null although they are there, and their keys stay."""
    found = task_json(pending(attempt=1, input={"a": 1}, result={"b": 2}), full=False)
    assert (found["input"], found["result"]) == (None, None)
    assert spelled(found, "budget") == TASK.replace(" {class cause message}", "")


def test_a_run_that_was_lost_shows_what_came_late() -> None:
    """A late outcome is shown as it was kept, and the lost run has no result of its own."""
    late = {"status": "done", "result": 1}
    run = Run(
        id=1, task_id=2, attempt=1, status="lost", error_class="lost", late=late, started_at=NOON, finished_at=NOON
    )
    found = run_json(run)
    assert (found["late"], found["result"], found["recorded_at"]) == (late, None, None)
    assert spelled(found, "usage", "transcript") == RUN


def test_unknown_usage_is_all_null() -> None:
    """Every key of usage is there from the start."""
    assert usage_json() == dict.fromkeys(
        ("input_tokens", "output_tokens", "total_tokens", "cost_usd", "cost_source", "counter", "complete")
    )
    assert usage_json(cost_usd=0.0)["cost_usd"] == 0.0


def test_workers_running_tasks_and_alerts() -> None:
    """What status shows of them: plain values that are JSON, unknown as null, a well worker as live."""
    worker = worker_json(WorkerRow("id", "w", "h", agents=("a", "b"), running=2, slots=4, started_at=NOON))
    assert (worker["state"], worker["agents"], worker["renewed_at"]) == ("live", ["a", "b"], None)
    assert worker_json(WorkerRow("id", "w", state="silent"))["state"] == "silent"
    budget = Budget(60, 10, 0.5, 3, OnLimit.ASK)
    task = RunningTask(7, "a", NOON, budget=budget, spend=Spend(5, None), cancel_requested_at=NOON)
    found = running_json(task, NOON + timedelta(seconds=90))
    assert (found["age_seconds"], found["worker"], found["cancel_requested_at"]) == (90.0, None, time_json(NOON))
    assert found["budget"] == {"seconds": 60, "tokens": 10, "usd": 0.5, "turns": 3, "on_limit": "ask"}
    assert (found["usage"]["total_tokens"], found["usage"]["cost_usd"]) == (5, None)
    alert = alert_json(Alert("no_worker", "agent", "a", "no live worker", since=NOON))
    assert alert == {
        "kind": "no_worker", "subject": "agent", "name": "a", "what": "no live worker", "task_id": None,
        "since": time_json(NOON), "command": None, "heals": False, "plan": None,
    }  # fmt: skip
    json.dumps([worker, found, alert])


def test_one_capped_count_caps_them_all() -> None:
    """The counts say that there may be more as soon as one of them stopped at its cap."""
    counts = counts_json(Count(3), Count(1), Count(5, True), Count(0))
    assert counts == {"pending": 3, "running": 1, "blocked": 5, "waiting": 0, "capped": True}
    assert counts_json(Count(1), Count(), Count(), Count())["capped"] is False
