"""Lists, single tasks, status, alerts and costs."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from orchestrator.domain import histogram
from orchestrator.domain.alerts import Thresholds
from orchestrator.domain.given import NewTask
from orchestrator.domain.outcome import Budget, Outcome, Usage
from orchestrator.domain.words import OutcomeClass, TaskStatus
from orchestrator.errors import DatabaseUnavailable, InvalidInput, NotFound
from orchestrator.repositories import overview, reading
from orchestrator.repositories.agents import AgentRepository
from orchestrator.repositories.bounded import bounded
from orchestrator.repositories.filters import TaskFilter
from orchestrator.repositories.minutes import MinuteCounts, MinuteRepository
from orchestrator.repositories.operations import OperationsRepository
from orchestrator.repositories.reading import ReadingRepository
from tests.making import BROKEN, CRASHED, DONE, Making, new_worker

INPUTS = Path(__file__).parent / "inputs"


@pytest.fixture
def made(engine: Engine) -> Making:
    return Making.on(engine)


@pytest.fixture
def read(engine: Engine) -> ReadingRepository:
    return ReadingRepository(engine)


def listed(read: ReadingRepository, **wanted: Any) -> list[int]:
    return [task["id"] for task in read.tasks(TaskFilter(**wanted))[0]]


# -- single tasks -------------------------------------------------------------------------------------------------


def test_a_task_sums_the_usage_of_its_runs(made: Making, read: ReadingRepository) -> None:
    """Known parts are added up; a run of unknown cost makes the sum incomplete, not zero."""
    task = made.add(max_retries=5)
    known = Usage(10, 5, 15, 0.25, "agent", "delta", True)
    for usage in (known, None, known):
        made.query("UPDATE tasks SET due = true, available_at = now() WHERE id = :id", id=task)
        made.run(task, Outcome(OutcomeClass.TRANSIENT, usage=usage))
    assert read.task(task)["usage"] == {
        "input_tokens": 20,
        "output_tokens": 10,
        "total_tokens": 30,
        "cost_usd": 0.5,
        "cost_source": "agent",
        "counter": "delta",
        "complete": False,
    }
    fresh = read.task(made.add())
    assert set(fresh["usage"].values()) == {None}


def test_a_running_task_shows_what_it_used_so_far(made: Making, read: ReadingRepository) -> None:
    """What the running attempt has reported is added to its ended attempts and is never complete."""
    task = made.add()
    made.run(task, Outcome(OutcomeClass.INTERRUPTED, usage=Usage(total_tokens=10, cost_usd=0.5, complete=True)))
    made.claim()
    live = json.dumps({"total_tokens": 7, "cost_usd": 0.25, "cost_source": "agent"})
    made.query("UPDATE tasks SET live_usage = CAST(:live AS jsonb) WHERE id = :id", id=task, live=live)
    usage = read.task(task)["usage"]
    assert (usage["total_tokens"], usage["cost_usd"], usage["complete"]) == (17, 0.75, False)


def test_runs_come_by_attempt(made: Making, read: ReadingRepository) -> None:
    """Runs are ascending by attempt; none before the first end; no such task is NotFound."""
    task = made.add()
    assert read.runs(task) == []
    for _ in range(3):
        made.run(task, Outcome(OutcomeClass.INTERRUPTED))
    assert [run["attempt"] for run in read.runs(task)] == [1, 2, 3]
    for call in (read.runs, read.task, read.entity):
        for missing in (999, 0, -1, 2**70):
            with pytest.raises(NotFound, match=f"task {missing} does not exist"):
                call(missing)


def test_statuses_and_ended(made: Making, read: ReadingRepository) -> None:
    """``ended`` names only those that have ended; unknown ids are left out."""
    done, live = made.add(), made.add()
    made.run(done)
    assert read.statuses([done, live, 999]) == {done: TaskStatus.DONE, live: TaskStatus.PENDING}
    assert read.ended([done, live, 999]) == {done: TaskStatus.DONE}
    assert read.statuses([]) == {}


def test_parents_and_children_are_named(made: Making, read: ReadingRepository) -> None:
    """A task names the ids that it needs, and who needs it."""
    a, b = made.add(), made.add()
    child = made.add(after=(b, a), name="child")
    assert read.task(child)["depends_on"] == [a, b]
    assert [need["id"] for need in read.needed_by(a)] == [child]
    assert {task["id"]: task["depends_on"] for task in read.tasks(TaskFilter())[0]} == {child: [a, b], b: [], a: []}


# -- lists --------------------------------------------------------------------------------------------------------


def test_pages_are_newest_first_and_complete(made: Making, read: ReadingRepository) -> None:
    """Following next_after_id visits every task once, also while new ones are added; the last page ends the list."""
    made.add_all([NewTask("coder") for _ in range(25)])
    seen: list[int] = []
    after: int | None = None
    while True:
        page, after = read.tasks(TaskFilter(limit=10, after_id=after))
        seen += [task["id"] for task in page]
        made.add()
        if after is None:
            break
    assert seen == list(range(25, 0, -1))
    page, after = read.tasks(TaskFilter(limit=28))
    assert (len(page), after) == (28, None)


def test_filters_have_to_hold_together(made: Making, read: ReadingRepository) -> None:
    """Status, agent, tags, ids and search are conditions that all count."""
    a = made.add(tags={"team": "x", "k": "v"}, title="Fix the Parser")
    b = made.add("other", tags={"team": "x"}, name="parse-2")
    c = made.add(unique_key="PARSE-key")
    made.run(a)
    assert listed(read, statuses=["done"]) == [a]
    assert listed(read, statuses=["done", "pending"]) == [c, b, a]
    assert listed(read, agents=["other", "nobody"]) == [b]
    assert listed(read, tags={"team": "x"}) == [b, a]
    assert listed(read, tags={"team": "x", "k": "v"}) == [a]
    assert listed(read, search="parse") == [c, b, a]
    assert listed(read, search="parse", agents=["other"]) == [b]
    assert listed(read, ids=[a, c, 999]) == [c, a]
    assert listed(read, plan="nowhere") == []


@pytest.mark.parametrize("hostile", ["%", "_", "/", "\\", "'", '"', "a%b", "[/red]", "Ä", "$1", "%s", "%(x)s", ":x"])
def test_search_and_agent_are_literal(made: Making, read: ReadingRepository, hostile: str) -> None:
    """Characters with a meaning in SQL, patterns or drivers find themselves and nothing else."""
    plain = made.add(title="plain xyz")
    task = made.add(hostile, title=f"title {hostile} end")
    assert listed(read, search=hostile) == [task]
    assert listed(read, agents=[hostile]) == [task]
    assert plain in listed(read)


def test_hostile_names_are_found_again(made: Making, read: ReadingRepository) -> None:
    """Every hostile name that can be stored is found by agent, search, tag and key, exactly, and nothing else is."""
    names = [json.loads(line) for line in (INPUTS / "hostile-names.jsonl").read_text().splitlines() if line.strip()]
    texts = [next(v for v in name.values() if isinstance(v, str)) if isinstance(name, dict) else name for name in names]
    stored: dict[str, int] = {}
    for text in texts:
        try:
            stored.setdefault(text, made.add(text, title=text, unique_key=text, tags={text: text}))
        except InvalidInput:
            continue
    assert len(stored) > 3
    for text, task in stored.items():
        assert listed(read, agents=[text]) == [task]
        assert listed(read, tags={text: text}) == [task]
        assert task in listed(read, search=text)
        assert read.task(task)["unique_key"] == text


@pytest.mark.parametrize(
    "wanted",
    [
        {"statuses": ["finished"]},
        {"limit": 0},
        {"limit": -1},
        {"limit": 10**9},
        {"search": "\x00"},
        {"agents": ["\ud800"]},
        {"search": "x" * 2000},
        {"ids": [0]},
        {"ids": [2**63]},
    ],
)
def test_a_filter_that_makes_no_sense_is_refused(read: ReadingRepository, wanted: dict[str, Any]) -> None:
    """InvalidInput, never an error of the database."""
    with pytest.raises(InvalidInput):
        read.tasks(TaskFilter(**wanted))


def test_lists_read_no_inputs_and_results(made: Making, read: ReadingRepository) -> None:
    """The columns are not in the statement unless asked for; with ``full`` they are there."""
    task = made.add(input={"prompt": "x"})
    made.run(task)
    statements: list[str] = []
    listener = lambda *args: statements.append(args[2])  # noqa: E731
    event.listen(made.engine, "before_cursor_execute", listener)
    try:
        (found,), _ = read.tasks(TaskFilter())
    finally:
        event.remove(made.engine, "before_cursor_execute", listener)
    assert (found["input"], found["result"]) == (None, None)
    assert not any("tasks.input" in statement or "result" in statement for statement in statements)
    (whole,), _ = read.tasks(TaskFilter(), full=True)
    assert (whole["input"], whole["result"]) == ({"prompt": "x"}, {"ok": True})
    assert list(whole) == list(found)


def test_held_tasks_say_who_holds_them(made: Making, read: ReadingRepository) -> None:
    """``list`` and ``show`` have the last one who held a task, and the reason; others have no note."""
    held, other = made.add(), made.add()
    operations = OperationsRepository(made.engine)
    operations.hold(TaskFilter(ids=[held]), actor="ann", reason="first")
    operations.release(TaskFilter(ids=[held]), actor="ann")
    operations.hold(TaskFilter(ids=[held]), actor="ops", reason="after the freeze")
    notes = {task["id"]: task.get("note") for task in read.tasks(TaskFilter())[0]}
    assert notes == {held: "held by ops: after the freeze", other: None}
    assert read.task(held)["note"] == "held by ops: after the freeze"


def test_a_page_without_an_index_looks_through_a_window(
    made: Making, read: ReadingRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rare match is found in one page while there is time, else by going on; no statement reads without bound."""
    monkeypatch.setattr(reading, "WINDOW", 10)
    rare = made.add(title="needle")
    made.add_all([NewTask("coder") for _ in range(24)])
    assert [task["id"] for task in read.tasks(TaskFilter(search="needle"))[0]] == [rare]
    monkeypatch.setattr(reading, "EMPTY_SECONDS", 0)
    pages = []
    after: int | None = None
    while True:
        page, after = read.tasks(TaskFilter(search="needle", after_id=after))
        pages.append([task["id"] for task in page])
        if after is None:
            break
    assert pages == [[], [], [rare]]


@pytest.mark.parametrize("statuses", [("pending",), ("pending", "failed"), ("blocked", "cancelled"), ("running",)])
def test_rare_statuses_come_from_their_indexes(
    made: Making, read: ReadingRepository, monkeypatch: pytest.MonkeyPatch, statuses: tuple[str, ...]
) -> None:
    """Old tasks in a rare status are found in one page, in order, each once, however many newer ones are done."""
    monkeypatch.setattr(reading, "WINDOW", 5)
    monkeypatch.setattr(reading, "EMPTY_SECONDS", 0)
    ready, suspect, held, failed, cancelled = (made.add(title="x") for _ in range(5))
    later = made.add(at=datetime.now(UTC) + timedelta(hours=1), title="x")
    blocked = made.add(after=(ready,), title="x")
    running = made.add("other", title="x")
    made.claim(1, "other")
    made.query("UPDATE tasks SET lost_count = 1 WHERE id = :id", id=suspect)
    made.query("UPDATE tasks SET held_at = now() WHERE id IN (:held, :later)", held=held, later=later)
    ended = "UPDATE tasks SET status = :status, finished_at = now() WHERE id = :id"
    made.query(ended, status="failed", id=failed)
    made.query(ended, status="cancelled", id=cancelled)
    made.add_all([NewTask("coder", title="y") for _ in range(30)])
    made.query("UPDATE tasks SET status = 'done', finished_at = now() WHERE title = 'y'")
    by_status = {
        "pending": {ready, suspect, held, later},
        "failed": {failed},
        "cancelled": {cancelled},
        "blocked": {blocked},
        "running": {running},
    }
    wanted = sorted({id_ for status in statuses for id_ in by_status[status]}, reverse=True)
    first, following = read.tasks(TaskFilter(statuses=statuses, search="x", limit=1))
    assert [task["id"] for task in first] == wanted[:1]
    rest = read.tasks(TaskFilter(statuses=statuses, search="x", after_id=following))[0] if following else []
    assert [task["id"] for task in [*first, *rest]] == wanted


def test_all_statements_of_a_read_see_one_instant(made: Making) -> None:
    """What is committed between two statements of a read is in neither."""
    from sqlalchemy import text
    from sqlalchemy.orm import sessionmaker

    made.add()
    with bounded(sessionmaker(made.engine)) as session:
        before = session.scalar(text("SELECT count(*) FROM tasks"))
        made.add()
        assert session.scalar(text("SELECT count(*) FROM tasks")) == before == 1


def test_reads_are_read_only_and_limited_in_time(engine: Engine) -> None:
    """A write is refused, a long statement is given up with a message, and no setting outlives the transaction."""
    from sqlalchemy import text
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.orm import sessionmaker

    sessions = sessionmaker(engine)
    with pytest.raises(DBAPIError, match="read-only"), bounded(sessions) as session:
        session.execute(text("DELETE FROM tasks"))
    with pytest.raises(DatabaseUnavailable, match=r"longer than 0\.05 s"), bounded(sessions, 0.05) as session:
        session.execute(text("SELECT pg_sleep(30)"))
    with engine.connect() as connection:
        for name, value in (("statement_timeout", "0"), ("transaction_read_only", "off"), ("enable_seqscan", "on")):
            assert connection.scalar(text(f"SHOW {name}")) == value


# -- status -------------------------------------------------------------------------------------------------------


def test_status_of_an_empty_queue(engine: Engine, read: ReadingRepository) -> None:
    """All keys are there, counts are 0, times unknown."""
    assert read.status() == {
        "counts": {
            "pending": 0,
            "running": 0,
            "blocked": 0,
            "waiting": 0,
            "capped": False,
            "finished": {"done": 0, "failed": 0, "cancelled": 0, "estimate": True},
        },
        "agents": [],
        "running": [],
        "workers": [],
        "lock_hold_ms": {"mean": None, "p50": None, "p99": None, "count": 0},
        "alerts": [],
        "questions": {"open": 0, "capped": False, "oldest_seconds": None},
    }


def test_status_counts_every_kind(made: Making, read: ReadingRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready, retrying, not due, held, suspect, blocked, running and ended tasks are each counted once."""
    ready = made.add(priority=3)
    made.add()
    later = made.add(at=datetime.now(UTC) + timedelta(hours=1))
    held = made.add()
    OperationsRepository(made.engine).hold(TaskFilter(ids=[held]), actor="ops")
    made.add(after=(ready,))
    suspect = made.add()
    made.query("UPDATE tasks SET lost_count = 1 WHERE id = :id", id=suspect)
    retrying = made.add("other", max_retries=5)
    made.run(retrying, CRASHED, "other")
    runs = made.add("other")
    made.claim(1, "other")
    failed = made.add("other")
    made.run(failed, BROKEN, "other")
    made.query("UPDATE tasks SET available_at = clock_timestamp() - interval '90 seconds' WHERE id = :id", id=ready)
    status = read.status()
    assert status["counts"] == {
        "pending": 6,
        "running": 1,
        "blocked": 1,
        "waiting": 0,
        "capped": False,
        "finished": {"done": 0, "failed": 1, "cancelled": 0, "estimate": True},
    }
    coder, other = status["agents"]
    kinds = ("name", "ready", "retrying", "not_due", "held", "blocked", "running", "live_workers", "state")
    assert [coder[kind] for kind in kinds] == ["coder", 3, 0, 1, 1, 1, 0, 1, "ok"]
    assert [other[kind] for kind in kinds] == ["other", 0, 1, 0, 0, 0, 1, 0, "ok"]
    assert coder["oldest_wait_seconds"] >= 90
    assert list(coder["oldest_wait_by_priority"]) == ["3", "0"]
    assert coder["oldest_wait_by_priority"]["0"] < coder["oldest_wait_by_priority"]["3"]
    assert other["oldest_wait_seconds"] is None
    assert [task["id"] for task in status["running"]] == [runs]
    assert (status["running"][0]["worker"], status["running"][0]["attempt"]) == ("w", 1)
    assert [(w["name"], w["running"], w["state"]) for w in status["workers"]] == [("w", 1, "live")]
    assert later not in [task["id"] for task in status["running"]]
    monkeypatch.setattr(overview, "CAP", 1)
    capped = read.status()
    assert capped["counts"]["capped"] is True
    assert capped["agents"][0]["capped"] is True
    assert capped["agents"][0]["ready"] == 2  # one at the cap, and the suspect


def test_ready_tasks_of_many_routes(made: Making, read: ReadingRepository) -> None:
    """Routes of one agent (definitions of plans) are one agent; each priority has its own oldest."""
    for number in range(5):
        made.add(definition=f"hash{number}", priority=number % 2)
    for number in range(30):
        made.add(f"agent-{number:02}")
    status = read.status()
    assert len(status["agents"]) == 31
    assert status["counts"]["pending"] == 35
    coder = next(agent for agent in status["agents"] if agent["name"] == "coder")
    assert (coder["ready"], list(coder["oldest_wait_by_priority"])) == (5, ["1", "0"])


def test_lock_hold_and_rates_come_from_minutes(made: Making, read: ReadingRepository) -> None:
    """All workers' minutes of the last hour are added up; older ones do not count."""

    holds = [0] * histogram.BUCKETS
    holds[histogram.bucket(2.0)] = 9
    holds[histogram.bucket(50.0)] = 1
    minutes = MinuteRepository(made.engine)
    minutes.add(made.worker, [MinuteCounts("", claims=30, hold_ms=68.0, holds=holds)])
    minutes.add(made.worker, [MinuteCounts("coder", done=4, failed=1, other=2, cost_usd=1.5)])
    status = read.status()
    hold = status["lock_hold_ms"]
    assert (hold["count"], hold["mean"]) == (10, 6.8)
    assert 1.5 < hold["p50"] <= 2.5
    assert 40 < hold["p99"] < 65
    (coder,) = [agent for agent in status["agents"] if agent["name"] == "coder"]
    assert (coder["done_last_hour"], coder["failed_last_hour"], coder["usd_last_hour"]) == (4, 1, 1.5)
    made.query("UPDATE minutes SET minute = minute - interval '2 hours'")
    assert read.status()["lock_hold_ms"]["count"] == 0


# -- alerts -------------------------------------------------------------------------------------------------------


def test_over_budget_is_an_alert(made: Making, read: ReadingRepository) -> None:
    """A task that still runs past its seconds and the kill grace is named with how much; before that it is not."""
    task = made.add(budget=Budget(seconds=100), name="slow")
    made.claim()
    assert read.alerts() == []
    made.query("UPDATE tasks SET started_at = clock_timestamp() - interval '157 seconds' WHERE id = :id", id=task)
    assert read.alerts(kill_grace=3600) == []
    (alert,) = read.alerts()
    assert (alert.kind, alert.task_id, alert.name) == ("over_budget", task, "slow")
    assert re.search(r"1[5-9]\d% of its budget of 100 s", alert.what)
    assert alert.command == f"orchestrator cancel {task}"
    (shown,) = read.status()["alerts"]
    assert shown["task_id"] == task
    assert datetime.fromisoformat(shown["since"]).tzinfo is not None


def test_a_silent_worker_is_an_alert(made: Making, read: ReadingRepository) -> None:
    """Older than two heartbeats is silent; dead with tasks in hand is named until they are taken back."""
    made.add()
    made.claim()
    made.query("UPDATE workers SET renewed_at = clock_timestamp() - interval '31 seconds'")
    (alert,) = read.alerts()
    assert (alert.kind, alert.name, alert.heals) == ("worker_silent", "w", True)
    assert re.fullmatch(r"silent \d+ s of 40 s lease, holds 1 task", alert.what)
    made.query("UPDATE workers SET dead_at = clock_timestamp()")
    (alert,) = read.alerts()
    assert alert.kind == "worker_dead"
    made.tasks.take_back()
    assert [alert.kind for alert in read.alerts()] == ["no_worker"]
    assert read.workers() == []


def test_ready_tasks_without_a_worker_are_an_alert(made: Making, read: ReadingRepository) -> None:
    """Named with how many and since when; not for a paused agent, and gone with a worker for it."""
    for _ in range(3):
        made.add("scraper")
    (alert,) = read.alerts()
    assert (alert.kind, alert.name) == ("no_worker", "scraper")
    assert alert.what == "no live worker, 3 ready tasks wait"
    assert alert.command == "orchestrator worker --agent scraper"
    AgentRepository(made.engine).pause("scraper", actor="ops")
    assert read.alerts() == []
    AgentRepository(made.engine).resume("scraper", actor="ops")
    new_worker(made.engine, "s", ["scraper"])
    assert read.alerts() == []


def test_a_draining_worker_serves_nobody(made: Making, read: ReadingRepository) -> None:
    """A worker that drains claims nothing more: ready tasks of its agents have no worker."""
    made.add()
    made.query("UPDATE workers SET draining_at = clock_timestamp()")
    assert [alert.kind for alert in read.alerts()] == ["no_worker"]
    assert read.workers()[0]["state"] == "draining"


def test_a_queue_that_does_not_drain_is_an_alert(made: Making, read: ReadingRepository) -> None:
    """Ready for more than an hour while no attempt of the agent ended; an ended attempt takes it back."""
    task = made.add()
    assert read.alerts() == []
    made.query("UPDATE tasks SET available_at = clock_timestamp() - interval '2 hours' WHERE id = :id", id=task)
    (alert,) = read.alerts()
    assert (alert.kind, alert.heals) == ("queue_not_draining", True)
    MinuteRepository(made.engine).add(made.worker, [MinuteCounts("coder", done=1)])
    assert read.alerts() == []


# -- costs --------------------------------------------------------------------------------------------------------


def test_costs_by_agent_day_plan_and_model(made: Making, read: ReadingRepository) -> None:
    """Sums of what is known, with the number of runs of unknown cost; a sum of which nothing is known is null."""
    for agent, usage in (
        ("a", Usage(1, 2, 3, 0.5, model="m1")),
        ("a", None),
        ("b", Usage(total_tokens=7, model="m2")),
        ("b", None),
    ):
        made.run(made.add(agent), Outcome(OutcomeClass.DONE, usage=usage), agent)
    first, second = read.costs("agent")
    assert first == {
        "agent": "a",
        "runs": 2,
        "unknown_cost_runs": 1,
        "input_tokens": 1,
        "output_tokens": 2,
        "total_tokens": 3,
        "cost_usd": 0.5,
    }
    assert (second["agent"], second["unknown_cost_runs"], second["total_tokens"]) == ("b", 2, 7)
    assert (second["cost_usd"], second["input_tokens"]) == (None, None)
    days = read.costs("day")
    dates = made.query("SELECT DISTINCT CAST(timezone('UTC', finished_at) AS date) FROM runs ORDER BY 1")
    assert [row["day"] for row in days] == [date.isoformat() for (date,) in dates]
    assert sum(row["runs"] for row in days) == 4
    assert [row["model"] for row in read.costs("model")] == ["m1", "m2", None]
    assert [(row["plan"], row["runs"]) for row in read.costs("plan")] == [(None, 4)]
    assert read.costs("agent", since=datetime.now(UTC) + timedelta(hours=1)) == []
    with pytest.raises(InvalidInput):
        read.costs("colour")  # type: ignore[arg-type]


# -- with a history -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_screens_do_not_read_history(made: Making, read: ReadingRepository) -> None:
    """With 300,000 finished tasks, lists and status touch a bounded number of rows and no table as a whole."""
    made.query(
        "INSERT INTO tasks (agent, input, status, attempt, started_at, finished_at)"
        " SELECT 'coder', '1', CASE WHEN n % 100 = 0 THEN 'failed' ELSE 'done' END, 1, now(), now()"
        " FROM generate_series(1, 300000) AS n"
    )
    made.add_all([NewTask("coder") for _ in range(1000)])
    made.query("ANALYZE tasks")
    plans: list[str] = []

    def explain(connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.lstrip().upper().startswith(("SELECT", "WITH")) and "set_config" not in statement:
            with connection.connection.cursor() as cursor:
                cursor.execute("EXPLAIN (ANALYZE, TIMING OFF) " + statement, parameters)
                plans.append("\n".join(line for (line,) in cursor.fetchall()))

    event.listen(made.engine, "before_cursor_execute", explain)
    try:
        read.status()
        for wanted in (TaskFilter(), TaskFilter(statuses=["failed"]), TaskFilter(statuses=["running"])):
            read.tasks(wanted)
    finally:
        event.remove(made.engine, "before_cursor_execute", explain)
    assert len(plans) > 10
    for plan in plans:
        assert "Seq Scan on tasks" not in plan, plan
        assert "Seq Scan on runs" not in plan, plan
    finished = read.status()["counts"]["finished"]
    assert abs(finished["done"] - 297_000) < 30_000
    assert finished["estimate"] is True


def test_done_is_done(made: Making, read: ReadingRepository) -> None:
    """A done task has its result and no error."""
    task = made.add()
    made.run(task, DONE)
    found = read.task(task)
    assert (found["status"], found["result"], found["error"]) == ("done", {"ok": True}, None)


def test_a_long_wait_is_an_alert_although_the_queue_drains(made: Making, read: ReadingRepository) -> None:
    """More than four hours of waiting are named; so is nothing while the agent is paused."""
    task = made.add()
    MinuteRepository(made.engine).add(made.worker, [MinuteCounts("coder", done=1)])
    made.query("UPDATE tasks SET available_at = clock_timestamp() - interval '5 hours' WHERE id = :id", id=task)
    (alert,) = read.alerts()
    assert (alert.kind, alert.name) == ("oldest_wait", "coder")
    assert "has waited for 5 h" in alert.what
    AgentRepository(made.engine).pause("coder", actor="ops")
    assert read.alerts() == []


@pytest.mark.parametrize(("done", "failed", "raised"), [(11, 10, False), (9, 10, True), (0, 9, False), (0, 10, True)])
def test_many_failures_are_an_alert(
    made: Making, read: ReadingRepository, done: int, failed: int, raised: bool
) -> None:
    """Ten and more failed attempts that are more than half of the last hour's."""
    MinuteRepository(made.engine).add(made.worker, [MinuteCounts("coder", done=done, failed=failed)])
    assert [alert.kind for alert in read.alerts()] == ["failures_spike"] * raised


def test_slow_claims_are_an_alert(made: Making, read: ReadingRepository) -> None:
    """A p99 above 50 ms is named once there are a hundred claims to judge by."""
    holds = [0] * histogram.BUCKETS
    holds[histogram.bucket(80.0)] = 60
    counts = MinuteCounts("", claims=60, hold_ms=4800.0, holds=holds)
    MinuteRepository(made.engine).add(made.worker, [counts])
    assert read.alerts() == []
    MinuteRepository(made.engine).add(made.worker, [counts])
    (alert,) = read.alerts()
    assert (alert.kind, alert.subject, alert.command) == ("lock_hold", "database", "orchestrator doctor")


def test_a_task_that_does_not_stop_is_an_alert(made: Making, read: ReadingRepository) -> None:
    """Still running a minute and its kill grace after it was asked to end."""
    task = made.add(name="stubborn")
    made.claim()
    OperationsRepository(made.engine).cancel_one(task, actor="ops")
    assert read.alerts() == []
    made.query(
        "UPDATE tasks SET cancel_requested_at = clock_timestamp() - interval '63 seconds' WHERE id = :id", id=task
    )
    assert read.alerts(kill_grace=3600) == []
    (alert,) = read.alerts()
    assert (alert.kind, alert.task_id, alert.command) == ("will_not_stop", task, f"orchestrator why {task}")
    assert "on w" in alert.what


def test_an_old_transaction_is_an_alert(made: Making) -> None:
    """A transaction that holds a snapshot or has written, and is older than the limit, is named; a claim's is not."""
    read = ReadingRepository(made.engine, Thresholds(old_transaction=1e-9))
    assert read.alerts() == []
    with made.engine.connect() as beside:
        beside.exec_driver_sql("INSERT INTO audit (actor, action) VALUES ('x', 'x')")
        kinds = [alert.kind for alert in read.alerts()]
        assert kinds == [alert["kind"] for alert in read.status()["alerts"]] == ["long_transaction"]
        beside.rollback()
