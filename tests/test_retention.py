"""``prune``: what it removes, what it never touches, and that it holds nobody back (S23)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import Engine, text

from orchestrator.domain.given import NewTask
from orchestrator.domain.retention import Retention, span
from orchestrator.errors import InvalidInput, NotFound
from orchestrator.repositories import retention
from orchestrator.repositories.audit import AuditRepository
from orchestrator.repositories.filters import TaskFilter
from orchestrator.repositories.plans import PlanRepository
from orchestrator.repositories.retention import RetentionRepository
from orchestrator.repositories.workers import WorkerRepository
from tests.making import BROKEN, Making

HOUR = 3600.0
LIVE = ("status = 'pending'", "status = 'blocked'", "status = 'waiting'", "held_at = now()")


@pytest.fixture
def made(engine: Engine) -> Making:
    return Making.on(engine)


@pytest.fixture
def retained(engine: Engine) -> RetentionRepository:
    return RetentionRepository(engine)


def age(made: Making, seconds: float = 2 * HOUR + 0.5) -> None:
    """Make everything that ended older."""
    for table, columns in (
        ("tasks", ("created_at", "started_at", "finished_at")),
        ("runs", ("started_at", "finished_at", "recorded_at")),
        ("minutes", ("minute",)),
        ("audit", ("at",)),
        ("workers", ("stopped_at", "dead_at")),
        ("plans", ("submitted_at",)),
    ):
        parts = ", ".join(f"{column} = {column} - make_interval(secs => {seconds})" for column in columns)
        made.query(f"UPDATE {table} SET {parts}")


def transcript(made: Making, task_id: int, text: str = "x" * 1000) -> None:
    made.query(
        "INSERT INTO run_events (task_id, attempt, seq, kind, text) VALUES (:id, 1, 0, 'stdout', :text)",
        id=task_id,
        text=text,
    )


def left(made: Making) -> list[int]:
    return [row.id for row in made.query("SELECT id FROM tasks ORDER BY id")]


def test_old_ended_tasks_go_with_all_that_is_theirs(made: Making, retained: RetentionRepository) -> None:
    """Task, runs, transcript and dependencies are removed; younger ones and live ones stay, whatever their age."""
    old, live = made.add(input="y" * 5000), made.add("other")
    child = made.add("other", after=(old,))
    made.run(old)
    transcript(made, old)
    made.query("UPDATE tasks SET status = 'done', finished_at = now() WHERE id = :id", id=child)
    age(made)
    young = made.add()
    made.run(young)
    preview = retained.prune(HOUR, dry_run=True)
    assert left(made) == [old, live, child, young]
    done = retained.prune(HOUR)
    assert (done.rows["tasks"], done.rows["runs"], done.rows["run_events"]) == (2, 1, 1)
    assert (preview.rows, preview.bytes) == (done.rows, done.bytes)
    assert done.bytes > 1000
    assert left(made) == [live, young]
    for table, count in (("runs", 1), ("run_events", 0), ("task_dependencies", 0)):
        assert made.query(f"SELECT count(*) FROM {table}")[0][0] == count
    assert not any(retained.prune(HOUR).rows.values())


@pytest.mark.parametrize("change", LIVE)
def test_live_tasks_and_their_parents_stay(made: Making, retained: RetentionRepository, change: str) -> None:
    """A done parent is kept while a live task needs it, directly; its own done parent may go."""
    grandparent = made.add()
    made.run(grandparent)
    parent = made.add(after=(grandparent,))
    made.run(parent)
    child = made.add(after=(parent,))
    made.query(f"UPDATE tasks SET {change} WHERE id = :id", id=child)
    age(made)
    done = retained.prune(HOUR)
    assert left(made) == [parent, child]
    assert done.kept == 1


def test_a_child_that_is_added_meanwhile_keeps_its_parent(
    made: Making, retained: RetentionRepository, wait_until: Any
) -> None:
    """Add and prune of one parent come one after the other: the child has its parent, or is refused."""
    parent = made.add()
    made.run(parent)
    age(made)
    found: list[Any] = []

    def add() -> None:
        try:
            found.append(made.add(after=(parent,)))
        except NotFound as error:
            found.append(error)

    with made.engine.connect() as connection:  # as prune does: locked, not yet removed
        connection.execute(text("SELECT 1 FROM tasks WHERE id = :id FOR UPDATE"), {"id": parent})
        thread = threading.Thread(target=add)
        thread.start()
        wait_until(lambda: made.query("SELECT 1 FROM pg_locks WHERE NOT granted"))
        connection.execute(text("DELETE FROM tasks WHERE id = :id"), {"id": parent})
        connection.commit()
    thread.join()
    assert isinstance(found[0], NotFound)
    other = made.add()
    made.run(other)
    age(made)
    with made.engine.connect() as connection:  # as add does: locked, its child not yet visible
        connection.execute(text("SELECT 1 FROM tasks WHERE id = :id FOR NO KEY UPDATE"), {"id": other})
        assert retained.prune(HOUR).rows.get("tasks", 0) == 0
    assert left(made) == [other]


def test_failed_ones_can_be_kept_longer(made: Making, retained: RetentionRepository) -> None:
    """Only the statuses that were named go."""
    done, failed = made.add(), made.add()
    made.run(done)
    made.run(failed, BROKEN)
    age(made)
    retained.prune(HOUR, statuses=["done", "cancelled"])
    assert left(made) == [failed]
    retained.prune(HOUR, statuses=["failed"])
    assert left(made) == []


def test_filters_choose_among_the_tasks(made: Making, retained: RetentionRepository) -> None:
    """Only what they match goes, and nothing that knows no task; the audit trail says what was chosen and why."""
    one = made.add(agent="coder", tags={"team": "a"}, title="Clean up")
    others = [made.add(agent="coder"), made.add(agent="writer", tags={"team": "a"})]
    for task, agent in zip((one, *others), ("coder", "coder", "writer"), strict=True):
        made.run(task, agent=agent)
    age(made)
    only = TaskFilter(agents=["coder"], tags={"team": "a"}, search="clean")
    assert retained.prune(HOUR, only=only, dry_run=True).rows["tasks"] == 1
    assert set(retained.prune(HOUR, only=only, reason="full").rows) == {"run_events", "runs", "tasks"}
    assert left(made) == others
    (entry,) = made.query("SELECT reason, details FROM audit WHERE action = 'prune'")
    assert entry.reason == "full"
    assert entry.details["only"] == {"agents": ["coder"], "tags": {"team": "a"}, "search": "clean"}
    with pytest.raises(InvalidInput, match="kind minutes: filters choose among tasks"):
        retained.prune(HOUR, only=only, kinds=["minutes"])


def test_transcripts_alone(made: Making, retained: RetentionRepository) -> None:
    """Tasks and runs stay; the run says that its transcript is gone."""
    task, live = made.add(), made.add()
    made.run(task)
    for id_ in (task, live):
        transcript(made, id_)
    made.query("UPDATE runs SET transcript_bytes = 1000, transcript_dropped_bytes = 10")
    age(made)
    done = retained.prune(HOUR, kinds=["transcripts"])
    assert done.rows == {"run_events": 1}
    assert made.query("SELECT task_id FROM run_events")[0][0] == live
    assert made.runs.get(task, 1).transcript_dropped_bytes == 1000
    assert left(made) == [task, live]


def test_other_kinds(made: Making, retained: RetentionRepository) -> None:
    """Minutes, rows of workers that ended, audit and empty plans go when they are asked for and old."""
    PlanRepository(made.engine).submit("empty", [])
    PlanRepository(made.engine).submit("full", [NewTask("coder", name="t", task_hash="h")])
    made.query(
        "INSERT INTO minutes (minute, worker_id) SELECT now() - make_interval(mins => n), :w"
        " FROM generate_series(1, 1500) AS n",
        w=made.worker,
    )
    AuditRepository(made.engine).write("x", actor="a", subject="s")
    (claim,) = made.claim()
    WorkerRepository(made.engine).mark_gone([made.worker], "test")
    age(made)
    preview = retained.prune(HOUR, kinds=["minutes", "workers", "audit", "plans"], dry_run=True)
    done = retained.prune(HOUR, kinds=["minutes", "workers", "audit", "plans"])
    assert done.rows == preview.rows == {"minutes": 1500, "workers": 0, "audit": 1, "plans": 1}
    assert [row.action for row in made.query("SELECT action FROM audit")] == ["prune"]
    made.tasks.take_back()
    assert claim.attempt == 1
    assert retained.prune(HOUR, kinds=["workers"]).rows == {"workers": 1}


def test_a_dry_run_tells_what_the_run_then_does(made: Making, retained: RetentionRepository) -> None:
    """Also of plans that lose their last task only in the run itself, and of those that keep one."""
    plans = PlanRepository(made.engine)
    for plan in ("goes", "failed", "needed", "young"):
        plans.submit(plan, [NewTask("coder", name=name, task_hash="h") for name in ("one", "two")])
    made.end_all(made.claim(8))
    made.query("UPDATE tasks SET status = 'failed' WHERE id = 3")
    age(made)
    made.query("UPDATE tasks SET finished_at = now() WHERE id = 8")
    made.add(after=(5,))
    preview = retained.prune(HOUR, statuses=["done"], dry_run=True)
    assert (preview.rows["tasks"], preview.rows["plans"], preview.kept) == (5, 1, 1)
    done = retained.prune(HOUR, statuses=["done"])
    assert (done.rows, done.bytes, done.kept) == (preview.rows, preview.bytes, preview.kept)
    assert [row.name for row in made.query("SELECT name FROM plans ORDER BY id")] == ["failed", "needed", "young"]


def test_batches_reach_every_row(made: Making, retained: RetentionRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches and windows, with live and locked tasks in between: all that may go goes, in the end."""
    monkeypatch.setattr(retention, "BATCH", 3)
    monkeypatch.setattr(retention, "WINDOW", 10)
    made.add_all([NewTask("coder" if n % 3 else "other") for n in range(60)])
    made.end_all(made.claim(100))
    age(made)
    with made.engine.connect() as connection:
        connection.execute(text("SELECT 1 FROM tasks WHERE id = 2 FOR NO KEY UPDATE"))
        assert retained.prune(HOUR).rows["tasks"] == 39
    assert retained.prune(HOUR).rows["tasks"] == 1
    assert [row[0] for row in made.query("SELECT DISTINCT agent FROM tasks")] == ["other"]


def test_it_can_be_stopped_and_run_again(
    made: Making, retained: RetentionRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was committed before the stop is gone, the rest is there, and the next run finishes."""
    monkeypatch.setattr(retention, "BATCH", 5)
    made.add_all([NewTask("coder") for _ in range(20)])
    made.end_all(made.claim(100))
    age(made)
    asked = iter([False, False, True])
    first = retained.prune(HOUR, stop=lambda: next(asked, True))
    assert (first.rows["tasks"], first.interrupted) == (10, True)
    second = retained.prune(HOUR)
    assert (second.rows["tasks"], second.interrupted) == (10, False)


def test_claims_go_on_meanwhile(made: Making, retained: RetentionRepository) -> None:
    """While a batch holds its locks, another task is claimed and recorded."""
    old = made.add()
    made.run(old)
    age(made)
    task = made.add()
    with made.engine.connect() as connection:
        connection.execute(text("DELETE FROM tasks WHERE id = :id"), {"id": old})
        made.run(task)
        connection.rollback()


@pytest.mark.parametrize(
    "wrong",
    [
        {"older_than": -1},
        {"older_than": float("nan")},
        {"older_than": 1, "statuses": ["running"]},
        {"older_than": 1, "kinds": ["everything"]},
    ],
)
def test_what_makes_no_sense_is_refused(retained: RetentionRepository, wrong: dict[str, Any]) -> None:
    """Nothing is removed for a status that lives, an unknown kind, or an age below zero."""
    with pytest.raises(InvalidInput):
        retained.prune(**wrong)


# -- by itself ----------------------------------------------------------------------------------------------------


def kept(retained: RetentionRepository, **table: Any) -> dict[str, int]:
    """The rows that one whole automatic pass removes."""
    rows: dict[str, int] = {}
    seen: list[Any] = []
    for pruned in retained.keep(Retention.read({"minutes": "never", "workers": "never", **table})):
        if not any(pruned is each for each in seen):
            seen.append(pruned)
    for pruned in seen:
        for name, number in pruned.rows.items():
            rows[name] = rows.get(name, 0) + number
    return rows


def test_each_kind_and_status_has_its_own_age(made: Making, retained: RetentionRepository) -> None:
    """Transcripts go first, then what is done with its runs, failures last; the audit trail says what went."""
    done, failed = made.add(), made.add()
    made.run(done)
    made.run(failed, BROKEN)
    for id_ in (done, failed):
        transcript(made, id_)
    policy = {"transcripts": "1h", "failed_transcripts": "3h", "done": "5h", "failed": "7h"}
    assert kept(retained, **policy) == {}
    age(made)
    assert kept(retained, **policy) == {"run_events": 1}
    age(made)
    assert kept(retained, **policy) == {"run_events": 1}
    age(made)
    assert kept(retained, **policy) == {"run_events": 0, "runs": 1, "tasks": 1}
    assert left(made) == [failed]
    age(made)
    assert kept(retained, **policy) == {"run_events": 0, "runs": 1, "tasks": 1}
    entries = made.query("SELECT actor, details FROM audit ORDER BY id")
    assert [row.actor for row in entries] == ["retention"] * 4
    assert entries[0].details["rows"] == {"run_events": 1}


def test_without_a_setting_tasks_are_kept(made: Making, retained: RetentionRepository) -> None:
    """Only the workers' minutes and rows of workers that ended go by default, after a month."""
    task = made.add()
    made.run(task)
    made.query("INSERT INTO minutes (minute, worker_id) VALUES (now() - interval '20 days', :w)", w=made.worker)
    age(made, 20 * 24 * HOUR)
    list(retained.keep(Retention()))
    assert left(made) == [task]
    assert made.query("SELECT 1 FROM minutes") == []


def test_a_pass_ends_where_tasks_are_younger(
    made: Making, retained: RetentionRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind enough windows with nothing old it looks no further; imported ones among old ones are found."""
    monkeypatch.setattr(retention, "WINDOW", 5)
    monkeypatch.setattr(retention, "YOUNG_WINDOWS", 2)
    made.add_all([NewTask("coder") for _ in range(30)])
    made.end_all(made.claim(100))
    made.query(
        "UPDATE tasks SET created_at = now() - interval '9 h', finished_at = now() - interval '2 h' WHERE id < 6"
    )
    made.query("UPDATE tasks SET finished_at = now() - interval '2 h' WHERE id IN (8, 29)")
    assert kept(retained, done="1h")["tasks"] == 6
    assert 29 in left(made)
    assert retained.prune(HOUR).rows["tasks"] == 1


def test_one_process_at_a_time_removes_by_itself(made: Making, retained: RetentionRepository) -> None:
    """While another one holds the lock a pass ends at once and nothing is removed twice or waited for."""
    task = made.add()
    made.run(task)
    age(made)
    with made.engine.connect() as connection:
        connection.execute(retention._MINE, {"locks": retention.LOCKS})
        assert kept(retained, done="1h") == {}
        connection.rollback()
    assert kept(retained, done="1h")["tasks"] == 1


@pytest.mark.parametrize(
    "table",
    [
        {"dnoe": "1d"},
        {"done": "soon"},
        {"done": 0},
        {"done": True},
        {"failed": "-1d"},
        {"every": "never"},
        {"done": []},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(table: dict[str, Any]) -> None:
    """The key is named, with the nearest one or what was expected."""
    with pytest.raises(InvalidInput, match="retention"):
        Retention.read(table)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30d", 30 * 86400), ("1h30m", 5400), ("90", 90), ("1.5h", 5400), ("", None), ("x", None), ("9999999d", None)],
)
def test_spans_of_time(text: str, seconds: float | None) -> None:
    """What people write for a length of time, in seconds."""
    assert span(text) == seconds
