"""What live screens are drawn from: the whole queue for ``dashboard``, one plan for ``run``, from bounded reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine, event

from orchestrator.database import schema
from orchestrator.domain import histogram
from orchestrator.domain.given import NewTask
from orchestrator.domain.outcome import Budget, Outcome, RetryPolicy, Usage
from orchestrator.domain.snapshot import Count, LockHold, Minute, PlanTask, Spend
from orchestrator.domain.words import OnLimit, OutcomeClass
from orchestrator.errors import DatabaseUnavailable
from orchestrator.repositories import snapshots
from orchestrator.repositories.agents import AgentRepository
from orchestrator.repositories.bounded import bounded
from orchestrator.repositories.filters import TaskFilter
from orchestrator.repositories.minutes import MinuteCounts, MinuteRepository
from orchestrator.repositories.operations import OperationsRepository
from orchestrator.repositories.plans import PlanRepository
from orchestrator.repositories.snapshots import SnapshotRepository
from orchestrator.repositories.workers import WorkerRepository
from tests.making import BROKEN, CRASHED, Making, new_worker


@pytest.fixture
def made(engine: Engine) -> Making:
    return Making.on(engine)


@pytest.fixture
def shown(engine: Engine) -> SnapshotRepository:
    return SnapshotRepository(engine)


@contextmanager
def statements(engine: Engine) -> Iterator[list[tuple[str, Any]]]:
    """The statements, with their parameters, that *engine* sends meanwhile."""
    found: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        found.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(engine, "before_cursor_execute", note)


# -- the whole queue ----------------------------------------------------------------------------------------------


def test_an_empty_queue(engine: Engine, shown: SnapshotRepository) -> None:
    """Nothing is there: zeros where nothing was counted, no rate, and a minute of zeros for each of the last sixty."""
    found = shown.dashboard(version="1.2.3")
    assert (found.workers, found.agents, found.running, found.alerts, found.failures) == ((), (), (), (), ())
    assert (found.any_task, found.ready, found.running_count) == (False, Count(), Count())
    assert found.lock_hold == LockHold(None, None, None, 0)
    assert found.minutes == tuple(
        Minute(found.taken_at.replace(second=0, microsecond=0) - timedelta(minutes=back)) for back in range(59, -1, -1)
    )
    assert found.read_seconds is not None
    server = found.server
    assert (server.orchestrator, server.schema) == ("1.2.3", schema.head())
    assert server.version is not None
    with engine.connect() as connection:
        assert server.database == connection.exec_driver_sql("SELECT current_database()").scalar()
    assert shown.server(version="1.2.3") == server


def test_every_kind_of_task_is_counted_once(made: Making, shown: SnapshotRepository) -> None:
    """Ready, retrying, not due, held, blocked, waiting, running: in the totals and with their agents."""
    first = made.add()
    made.run(first, Outcome(OutcomeClass.RATE_LIMITED))
    parent = made.add(priority=1)
    made.add(after=(parent,))
    made.add(at=datetime(2999, 1, 1, tzinfo=UTC))
    held, waits = made.add(), made.add()
    OperationsRepository(made.engine).hold(TaskFilter(ids=[held]), actor="ops")
    made.query("UPDATE tasks SET status = 'waiting' WHERE id = :id", id=waits)
    runs = made.add("other", title="T")
    made.claim(1, "other")
    AgentRepository(made.engine).pause("third", actor="ops", reason="deploy")
    found = shown.dashboard()
    assert (found.ready, found.retrying, found.not_due) == (Count(1), Count(1), Count(1))
    assert (found.held, found.blocked, found.waiting) == (Count(1), Count(1), Count(1))
    assert (found.running_count, [task.id for task in found.running]) == (Count(1), [runs])
    coder, other, third = found.agents
    assert (coder.name, coder.ready, coder.retrying, coder.blocked, coder.running, coder.live_workers) == (
        "coder", Count(1), Count(1), Count(1), 0, 1,
    )  # fmt: skip
    assert (other.name, other.running, other.ready, other.live_workers) == ("other", 1, Count(), 0)
    assert (third.name, third.state, third.state_reason, third.state_until) == ("third", "paused", "deploy", None)
    assert coder.oldest_ready_at == made.row(parent).available_at
    assert found.any_task is True
    (worker,) = found.workers
    assert (worker.name, worker.running, worker.slots, worker.state, worker.agents) == ("w", 1, 4, "", ("coder",))
    assert worker.renewed_at is not None
    assert worker.renewed_at <= found.taken_at


def test_running_tasks_are_told_whole(made: Making, shown: SnapshotRepository) -> None:
    """Name, plan, worker, attempt, budget, progress, and what all attempts together have used."""
    budget = Budget(3600, 1000, 2.5, 9, OnLimit.ASK)
    made.add(name="n", title="T", budget=budget, max_retries=4, retry=RetryPolicy(0, 1, 0))
    (claim,) = made.claim()
    made.end(claim, replace(CRASHED, usage=Usage(total_tokens=10, cost_usd=0.5, turns=1)))
    (claim,) = made.claim()
    made.end(claim, replace(CRASHED, usage=None))
    made.claim()
    made.query(
        "UPDATE tasks SET progress_percent = 40, last_output = 'compiling', last_output_at = now(),"
        """ live_usage = '{"total_tokens": 5, "cost_usd": 0.25}'"""
    )
    OperationsRepository(made.engine).cancel_one(1, actor="ann")
    (task,) = shown.dashboard().running
    row = made.row(1)
    assert (task.id, task.agent, task.name, task.title, task.plan, task.worker) == (1, "coder", "n", "T", None, "w")
    assert (task.attempt, task.max_retries, task.retry_count, task.budget) == (3, 4, 2, budget)
    assert task.spend == Spend(15, 0.75, 1, tokens_partial=True, usd_partial=True)
    assert (task.started_at, task.percent, task.last_output, task.last_output_at) == (
        row.started_at, 40, "compiling", row.last_output_at,
    )  # fmt: skip
    assert (task.cancel_requested_at, task.stopping) == (row.cancel_requested_at, "cancel by ann")


def test_the_most_pressing_come_first(made: Making, shown: SnapshotRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over budget, near it, being stopped, then the oldest; what does not fit on the screen is counted."""
    made.add_all([NewTask("coder", budget=Budget(100) if n in (2, 3) else None) for n in range(6)])
    made.claim(6)
    made.query("UPDATE tasks SET started_at = now() - make_interval(secs => 10 * id)")
    made.query("UPDATE tasks SET started_at = now() - interval '90 s' WHERE id = 3")
    made.query("UPDATE tasks SET started_at = now() - interval '300 s' WHERE id = 4")
    OperationsRepository(made.engine).cancel_one(1, actor="ops")
    assert [task.id for task in shown.dashboard().running] == [4, 3, 1, 6, 5, 2]
    monkeypatch.setattr(snapshots, "RUNNING", 4)
    found = shown.dashboard()
    assert ([task.id for task in found.running], found.running_count) == ([4, 3, 1, 6], Count(6))
    (alert,) = found.alerts
    assert (alert.kind, alert.task_id, found.alert_count) == ("over_budget", 4, 1)


def test_the_last_failures(made: Making, shown: SnapshotRepository) -> None:
    """The twenty that failed last, newest first, by when they ended and not by when they were added."""
    made.add_all([NewTask("coder", title=f"t{n}", max_retries=0) for n in range(25)])
    made.end_all(made.claim(25), BROKEN)
    made.query("UPDATE tasks SET finished_at = now() - make_interval(mins => CAST((id * 7) % 25 AS integer))")
    failures = shown.dashboard().failures
    assert [failure.task_id for failure in failures] == sorted(range(1, 26), key=lambda id_: (id_ * 7) % 25)[:20]
    newest = failures[0]
    assert (newest.agent, newest.title, newest.error_class, newest.cause, newest.message) == (
        "coder", "t24", "permanent", "bad_input", "cannot be done",
    )  # fmt: skip
    assert (newest.attempt, newest.max_retries, newest.retry_count) == (1, 0, 0)


def test_waiting_tasks_are_counted_now_and_then(
    made: Making, shown: SnapshotRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of ready tasks are a few seconds old at most; running tasks are those of this very moment."""
    made.add("other")
    made.add_all([NewTask("coder") for _ in range(2)])
    assert shown.dashboard().ready == Count(3)
    made.claim()
    made.add("new")
    again = shown.dashboard()
    assert (again.ready, again.running_count) == (Count(3), Count(1))
    assert [agent.running for agent in again.agents if agent.name == "coder"] == [1]
    monkeypatch.setattr(snapshots, "COUNT_SECONDS", 0.0)
    monkeypatch.setattr(shown, "_count_again", 0.0)
    assert shown.dashboard().ready == Count(3)
    made.claim()
    monkeypatch.setattr(shown, "_count_again", 0.0)
    assert (shown.dashboard().ready, shown.dashboard().running_count) == (Count(2), Count(2))


def test_minutes_and_lock_hold(made: Making, shown: SnapshotRepository) -> None:
    """All workers' minutes together, in their places; what is older than an hour has none."""
    holds = [0] * histogram.BUCKETS
    holds[histogram.bucket(2.0)] = 10
    minutes = MinuteRepository(made.engine)
    for worker in (made.worker, new_worker(made.engine, "b")):
        minutes.add(worker, [MinuteCounts("", claims=3, hold_ms=20.0, holds=holds)])
        minutes.add(worker, [MinuteCounts("coder", done=2, failed=1, other=4, cost_usd=0.5, unknown_cost=1)])
    made.query("UPDATE minutes SET minute = minute - interval '5 minutes'")
    found = shown.dashboard()
    assert found.lock_hold.count == 20
    assert found.lock_hold.mean == pytest.approx(2.0)
    (busy,) = [minute for minute in found.minutes if minute.done]
    assert (busy.done, busy.failed, busy.usd, busy.unknown_cost) == (4, 2, 1.0, 2)
    assert timedelta(minutes=4) < found.taken_at - busy.at < timedelta(minutes=8)
    (coder,) = found.agents
    assert (coder.done_hour, coder.failed_hour, coder.attempts_hour, coder.usd_hour) == (4, 2, 14, 1.0)
    made.query("UPDATE minutes SET minute = minute - interval '1 hour'")
    found = shown.dashboard()
    assert ({minute.done for minute in found.minutes}, found.lock_hold.count) == ({0}, 0)


def test_workers_in_every_state(made: Making, shown: SnapshotRepository) -> None:
    """Silent, draining, stopping and dead ones with tasks are told apart; those that ended are gone."""
    names = {
        name: new_worker(made.engine, name) for name in ("silent", "draining", "stopping", "dead", "buried", "left")
    }
    workers = WorkerRepository(made.engine)
    made.query("UPDATE workers SET renewed_at = now() - interval '30 s' WHERE name = 'silent'")
    workers.drain("draining")
    made.add_all([NewTask("coder") for _ in range(2)])
    made.claim(1, worker=names["stopping"])
    made.claim(1, worker=names["dead"])
    OperationsRepository(made.engine).cancel_one(1, actor="ops")
    workers.mark_gone([names["dead"], names["buried"]], "test")
    workers.stop(names["left"])
    found = shown.dashboard()
    states = {worker.name: (worker.state, worker.running, worker.stopping) for worker in found.workers}
    assert states == {
        "dead": ("dead", 1, 0),
        "draining": ("draining", 0, 0),
        "silent": ("silent", 0, 0),
        "stopping": ("stopping", 1, 1),
        "w": ("", 0, 0),
    }
    assert [(alert.kind, alert.name) for alert in found.alerts] == [
        ("worker_dead", "dead"),
        ("worker_silent", "silent"),
    ]


# -- one plan -----------------------------------------------------------------------------------------------------


def test_a_plan_in_its_order(made: Making, shown: SnapshotRepository) -> None:
    """The plan's current tasks alone, whole, in the plan's order, with what each needs, used and took."""
    plans = PlanRepository(made.engine)
    budget = Budget(60, on_limit=OnLimit.FINISH_TURN)
    tasks = [
        NewTask("coder", name="a", task_hash="1", budget=budget, max_retries=1, title="T", retry=RetryPolicy(3600, 1, 3600)),
        NewTask("coder", name="b", task_hash="2", after=("a",)),
        NewTask("other", name="c", task_hash="3"),
        NewTask("coder", name="d", task_hash="4", after=("a", "b")),
    ]  # fmt: skip
    made.add()
    plan = plans.submit("p", tasks)
    plans.submit("q", [NewTask("coder", name="a", task_hash="x")])
    a, b, c, d = (task.id for task in plan.tasks)
    (claim,) = made.claim(1, plan_id=plan.plan_id)
    made.end(claim, replace(CRASHED, usage=Usage(total_tokens=7), elapsed=2.5))
    made.claim(1, "other", plan_id=plan.plan_id)
    made.query(
        "UPDATE tasks SET progress_percent = 10, progress_message = 'm', last_output = NULL WHERE id = :id", id=c
    )
    found = {task.name: task for task in shown.plan_tasks(plan.plan_id)}
    assert [(task.id, task.name) for task in found.values()] == [(a, "a"), (b, "b"), (c, "c"), (d, "d")]
    assert (found["a"].needs, found["b"].needs, found["d"].needs) == ((), (a,), (a, b))
    first = found["a"]
    assert (first.status, first.attempt, first.retry_count, first.max_retries) == ("pending", 1, 1, 1)
    assert (first.title, first.agent, first.budget, first.elapsed) == ("T", "coder", budget, 2.5)
    assert first.spend == Spend(tokens=7)
    assert first.error is not None
    assert (first.error.error_class, first.error.cause, first.error.message) == ("transient", "exit_code", "exit 1")
    assert first.next_attempt_at == made.row(a).available_at
    runs = found["c"]
    assert (runs.status, runs.started_at, runs.percent, runs.last_output) == (
        "running",
        made.row(c).started_at,
        10,
        "m",
    )
    assert (runs.elapsed, runs.spend, runs.next_attempt_at, runs.held) == (None, Spend(), None, False)
    OperationsRepository(made.engine).hold(TaskFilter(ids=[a]), actor="ops")
    held = shown.plan_tasks(plan.plan_id)[0]
    assert (held.held, held.note) == (True, "by ops")
    assert shown.plan_tasks(999) == ()


def test_a_plan_without_what_was_replaced(made: Making, shown: SnapshotRepository) -> None:
    """A changed task is shown as it is now; the one before it, and its dependencies, are gone from the view."""
    plans = PlanRepository(made.engine)
    first = [NewTask("coder", name="b", task_hash="1"), NewTask("coder", name="a", task_hash="1", after=("b",))]
    second = [NewTask("coder", name="b", task_hash="1"), NewTask("coder", name="a", task_hash="2")]
    plan = plans.submit("p", first)
    again = plans.submit("p", second)
    assert [(task.id, task.name, task.needs) for task in shown.plan_tasks(plan.plan_id)] == [
        (task.id, name, ()) for task, name in zip(again.tasks, ("b", "a"), strict=True)
    ]


def test_a_plan_task_is_all_there_is(made: Making, shown: SnapshotRepository) -> None:
    """What the repository cannot know (who runs here, questions, stops) keeps its default, the rest is filled."""
    plan = PlanRepository(made.engine).submit("p", [NewTask("coder", name="a", task_hash="1")])
    (task,) = shown.plan_tasks(plan.plan_id)
    assert task == PlanTask(id=plan.tasks[0].id, name="a", agent="coder", status="pending")


# -- bounds -------------------------------------------------------------------------------------------------------


def test_the_number_of_statements_does_not_grow(made: Making, shown: SnapshotRepository) -> None:
    """However many tasks, workers and agents there are: the same statements, in one read-only transaction."""
    made.run(made.add(), BROKEN)
    plan = PlanRepository(made.engine).submit("p", [NewTask("coder", name="a", task_hash="1")])

    def count() -> tuple[int, int]:
        with statements(made.engine) as whole:
            shown.dashboard()
        with statements(made.engine) as one:
            shown.plan_tasks(plan.plan_id)
        return len(whole), len(one)

    before = count()
    for n in range(10):
        new_worker(made.engine, f"w{n}", [f"a{n}"])
    tasks = [NewTask(f"a{n % 20}", name=f"t{n}", task_hash="1") for n in range(100)]
    PlanRepository(made.engine).submit("p", [NewTask("coder", name="a", task_hash="1"), *tasks])
    made.end_all(made.claim(50, *(f"a{n}" for n in range(10))), BROKEN)
    made.claim(50, *(f"a{n}" for n in range(20)))
    after = count()
    assert after[0] <= before[0] + 1  # what earlier attempts of running tasks used, all in one
    assert after[1] == before[1]


def test_a_snapshot_that_takes_too_long_is_given_up(
    made: Making, shown: SnapshotRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither waits for a lock on the table nor hangs: the database is called unavailable, and the next one works."""
    monkeypatch.setattr(snapshots, "bounded", partial(bounded, seconds=0.05))
    with made.engine.connect() as connection:
        connection.exec_driver_sql("LOCK TABLE tasks IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(DatabaseUnavailable, match=r"took longer than 0\.05 s"):
            shown.dashboard()
    monkeypatch.undo()
    assert shown.dashboard().any_task is False


def test_the_history_is_never_read(made: Making, shown: SnapshotRepository) -> None:
    """With 20,000 finished tasks and fresh statistics, no plan reads a table as a whole, seq scans allowed or not."""
    made.query(
        "INSERT INTO tasks (agent, input, status, attempt, started_at, finished_at)"
        " SELECT 'coder', '\"some text that is as long as a short prompt\"',"
        " CASE WHEN n % 100 = 0 THEN 'failed' ELSE 'done' END, 1, now(), now() FROM generate_series(1, 20000) AS n"
    )
    made.query(
        "INSERT INTO runs (task_id, attempt, status, started_at, finished_at)"
        " SELECT id, 1, 'done', now(), now() FROM tasks"
    )
    made.query(
        "INSERT INTO workers (id, name, host, pid, lease, heartbeat, stopped_at)"
        " SELECT gen_random_uuid(), 'old', 'h', 1, '40 s', '10 s', now() FROM generate_series(1, 5000)"
    )
    plan = PlanRepository(made.engine).submit("p", [NewTask("coder", name=f"t{n}", task_hash="1") for n in range(20)])
    made.add_all([NewTask(f"a{n % 5}") for n in range(200)])
    made.claim(20, *(f"a{n}" for n in range(5)))
    made.query("ANALYZE")
    with statements(made.engine) as sent:
        shown.dashboard()
        shown.plan_tasks(plan.plan_id)
    assert len(sent) > 15
    with made.engine.connect() as connection:
        for statement, parameters in sent:
            if "set_config" in statement:
                continue
            rows = connection.exec_driver_sql("EXPLAIN " + statement, parameters)
            lines = "\n".join(line for (line,) in rows)
            for table in ("tasks", "runs", "workers"):
                assert f"Seq Scan on {table}" not in lines, f"{statement}\n{lines}"
