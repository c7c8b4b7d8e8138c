"""Concurrency keys and shared directories: at most so many at once, exactly, and at no cost for tasks without."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from orchestrator.domain.given import NewTask
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.repositories.claims import described
from orchestrator.repositories.keys import _LOCKS, overlap
from orchestrator.repositories.plans import PlanRepository
from orchestrator.repositories.tasks import Known, TaskRepository
from orchestrator.worker import Worker
from tests.conftest import WaitUntil
from tests.making import BROKEN, CRASHED, Making, new_worker
from tests.working import FakeAgent, Working, add, orchestrator, query, statuses


@pytest.fixture
def made(engine: Engine) -> Making:
    return Making.on(engine)


def ids(claims: list[Claim]) -> list[int]:
    return [claim.task_id for claim in claims]


# -- keys ----------------------------------------------------------------------------------------------------------


def test_one_of_a_key_runs_at_a_time(made: Making) -> None:
    """The second task of a key waits for the first one's end, whatever that is; others pass by."""
    first, second, other, plain = (made.add(concurrency_key=key) for key in ("db", "db", "web", None))
    claims = made.claim(10)
    assert ids(claims) == [first, other, plain]
    assert made.claim(10) == []
    made.end(claims[0], BROKEN)
    (claim,) = made.claim(10)
    assert claim.task_id == second
    made.end(claim)
    assert made.claim(10) == []


def test_a_key_holds_across_agents_and_plans(made: Making) -> None:
    """The key is the queue's, not the agent's: another agent's task waits too, also in a claim of a plan alone."""
    first = made.add("coder", concurrency_key="db")
    submitted = PlanRepository(made.engine).submit(
        "p",
        [NewTask("other", name="t", task_hash="h", concurrency_key="db"), NewTask("other", name="u", task_hash="i")],
    )
    keyed, plain = (task.id for task in submitted.tasks)
    (claim,) = made.claim(1, "coder")
    assert claim.task_id == first
    assert ids(made.claim(5, "other", plan_id=submitted.plan_id)) == [plain]
    made.end(claim)
    assert ids(made.claim(5, "other", plan_id=submitted.plan_id)) == [keyed]


def test_a_limit_of_a_key(made: Making) -> None:
    """As many run as the limit says, and no slot is left empty."""
    made.query("INSERT INTO concurrency_limits VALUES ('db', 3)")
    tasks = [made.add(concurrency_key="db") for _ in range(5)]
    claims = made.claim(2) + made.claim(10)
    assert ids(claims) == tasks[:3]
    made.end(claims[1])
    assert ids(made.claim(10)) == [tasks[3]]


def test_the_more_urgent_comes_first_with_or_without_a_key(made: Making) -> None:
    """A key is no rank: tasks come by priority and age, those with a key among those without."""
    plan = [(0, None), (5, "a"), (3, None), (5, None), (0, "b"), (9, "a"), (3, "c")]
    tasks = [made.add(priority=priority, concurrency_key=key) for priority, key in plan]
    made.query("INSERT INTO concurrency_limits VALUES ('a', 9)")
    order = [tasks[n] for n in (5, 1, 3, 2, 6, 0, 4)]
    assert ids(made.claim(2)) + ids(made.claim(1)) + ids(made.claim(9)) == order


def test_a_busy_key_does_not_hide_what_can_run(made: Making) -> None:
    """S09: thousands of tasks of a busy key, blocked and future ones in front: the plain one behind is taken."""
    parent = made.add("never")
    first = made.add(concurrency_key="a", priority=9)
    made.query(
        "INSERT INTO tasks (agent, concurrency_key, priority) SELECT 'coder', 'a', 9 FROM generate_series(1, 3000)"
    )
    made.query("INSERT INTO tasks (agent, status) SELECT 'coder', 'blocked' FROM generate_series(1, 500)")
    made.query(
        "INSERT INTO tasks (agent, available_at, due) SELECT 'coder', now() + interval '1 day', n % 2 = 0"
        " FROM generate_series(1, 500) AS n"
    )
    plain = made.add()
    assert ids(made.claim(2)) == [first, plain]
    assert made.status(parent) == ["pending"]


def test_many_keys_are_looked_at_in_turn(made: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are more keys than one look takes, the next look goes on behind them and then from the start."""
    monkeypatch.setattr("orchestrator.repositories.keys.KEYS_AT_ONCE", 7)
    tasks = made.query(
        "INSERT INTO tasks (agent, concurrency_key) SELECT 'coder', 'k' || n FROM generate_series(1, 40) AS n RETURNING id"
    )
    repository, got = TaskRepository(made.engine), set()
    for _ in range(9):
        got |= set(ids(repository.claim(made.worker, [Known("coder")], 50).claims))
    assert got == {row.id for row in tasks}


def test_room_is_never_lost(made: Making) -> None:
    """A task that is lost, cancelled, retried or removed gives its key back, though nobody says so."""
    first, second = made.add(concurrency_key="k", max_retries=5), made.add(concurrency_key="k")
    dead = new_worker(made.engine, "dead")
    (claim,) = made.claim(1, worker=dead)
    made.query("UPDATE workers SET dead_at = now() WHERE id = :id", id=dead)
    made.tasks.take_back()
    (again,) = made.claim(5) or made.claim(5, suspects=True)
    made.end(again, CRASHED)
    made.query("DELETE FROM tasks WHERE id = :id", id=first)
    left = ids(made.claim(5)) or [again.task_id]
    assert second in {again.task_id, *left}
    assert made.query("SELECT count(*) FROM key_holders")[0][0] <= 1
    assert claim.task_id == first


def test_a_lost_task_with_a_key_is_a_suspect_like_others(made: Making) -> None:
    """It is left out of ordinary claims and taken as a suspect, one at a time, within its key."""
    task = made.add(concurrency_key="k")
    made.query("UPDATE tasks SET lost_count = 1")
    other = made.add(concurrency_key="k")
    assert ids(made.claim(5)) == [other]
    assert made.claim(5, suspects=True) == []
    made.query("UPDATE tasks SET status = 'pending', claimed_by = NULL, lost_count = 0 WHERE id = :id", id=other)
    assert ids(made.claim(5, suspects=True)) == [task]


@pytest.mark.parametrize(
    "change", ["held_at = now()", "available_at = now() + interval '1 hour'", "status = 'waiting'"]
)
def test_what_is_not_ready_keeps_nobody_out(made: Making, change: str) -> None:
    """A held, future or waiting task of a key neither runs nor holds the key."""
    task = made.add(concurrency_key="k")
    made.query(f"UPDATE tasks SET {change} WHERE id = :id", id=task)
    behind = made.add(concurrency_key="k")
    assert ids(made.claim(5)) + ids(made.claim(5)) == [behind]


def test_a_paused_agent_keeps_its_keyed_tasks(made: Making) -> None:
    """A pause holds for tasks with a key as for others, and does not stop the key's tasks of other agents."""
    made.add("coder", concurrency_key="k")
    other = made.add("other", concurrency_key="k")
    made.query("INSERT INTO agents (name, paused_at) VALUES ('coder', now())")
    assert ids(made.claim(5, "coder", "other")) == [other]


def test_keys_are_data(made: Making) -> None:
    """Keys of any spelling are told apart exactly."""
    names = [
        "a",
        "A",
        "a ",
        "%",
        "_",
        "a'b",
        'a"b',
        "\u00e9",
        "e\u0301",
        "\\",
        "x" * 200,
        "",
        "1; DROP TABLE tasks",
        "코",
    ]
    tasks = [made.add(concurrency_key=name) for name in names for _ in range(2)]
    assert ids(made.claim(99)) == tasks[::2]
    assert {row.name for row in made.query("SELECT name FROM key_holders")} == set(names)


def test_at_most_three_whoever_claims(made: Making) -> None:
    """S11: eight claimers at once, with more urgent ones added on the way: never above the limit, and all get done."""
    made.query("INSERT INTO concurrency_limits VALUES ('db', 3)")
    made.query("INSERT INTO tasks (agent, concurrency_key) SELECT 'coder', 'db' FROM generate_series(1, 60)")
    running, most, done = 0, 0, 0
    lock = threading.Lock()

    def work(number: int) -> None:
        nonlocal running, most, done
        worker = new_worker(made.engine, f"w{number}")
        misses = 0
        while misses < 200:
            claims = made.claim(4, worker=worker)
            misses = 0 if claims else misses + 1
            with lock:
                running += len(claims)
                most = max(most, running)
                if done == 30 and claims:
                    made.query(
                        "INSERT INTO tasks (agent, concurrency_key, priority)"
                        " SELECT 'coder', 'db', 5 FROM generate_series(1, 20)"
                    )
                done += len(claims)
                running -= len(claims)
            made.end_all(claims)
            if done >= 60 and not made.query("SELECT FROM tasks WHERE status <> 'done' LIMIT 1"):
                return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    overlaps = made.query(
        "SELECT max(n) FROM (SELECT a.id, count(*) AS n FROM runs AS a JOIN runs AS b"
        " ON b.started_at <= a.started_at AND a.started_at < b.recorded_at GROUP BY a.id) AS x"
    )[0][0]
    assert made.query("SELECT count(*) FROM tasks WHERE status <> 'done'")[0][0] == 0
    assert most == 3
    assert overlaps <= 3


def test_two_claimers_of_one_key_do_not_wait_for_each_other(made: Making) -> None:
    """While one claim of a key is on its way, another takes what else there is and comes back without waiting."""
    made.add(concurrency_key="k")
    plain = made.add()
    with made.engine.begin() as connection:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCKS}, hashtext('key k'))")
        assert ids(made.claim(5)) == [plain]
    assert len(made.claim(5)) == 1


def _cost(made: Making) -> tuple[str, int]:
    """The nodes of the plan of a claim without keys, and the blocks that it touches."""
    from orchestrator.repositories import tasks as module

    known, _ = described((Known("coder"),))
    values = {"worker": made.worker, "known": known, "limit": 10}
    sent: list[tuple[str, Any]] = []

    def note(_c: object, _cursor: object, statement: str, parameters: Any, _x: object, _many: bool) -> None:
        sent.append((statement, parameters))

    with made.engine.connect() as connection:
        event.listen(connection, "before_cursor_execute", note)
        connection.execute(module._build_claim(False, False, False), values)
        connection.rollback()
        statement, parameters = sent[-1]
        found = connection.exec_driver_sql(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters
        ).scalar_one()
        plan = found if isinstance(found, list) else json.loads(found)
        connection.rollback()

    def nodes(node: dict[str, Any]) -> str:
        inner = " ".join(nodes(each) for each in node.get("Plans", ()))
        return f"{node['Node Type']}:{node.get('Index Name', '')}({inner})"

    top = plan[0]["Plan"]
    return nodes(top), top["Shared Hit Blocks"] + top["Shared Read Blocks"]


def test_tasks_without_a_key_cost_the_same_beside_those_with(made: Making) -> None:
    """The claim of plain tasks has the same plan, and touches no more blocks, when 5,000 tasks of busy keys lie before."""
    made.query("INSERT INTO tasks (agent) SELECT 'coder' FROM generate_series(1, 5000)")
    made.query("ANALYZE tasks")
    before = _cost(made)
    made.query(
        "INSERT INTO tasks (agent, concurrency_key, priority)"
        " SELECT 'coder', 'k' || n % 50, 9 FROM generate_series(1, 5000) AS n"
    )
    made.query("ANALYZE tasks")
    after = _cost(made)
    assert "tasks_ready" in after[0]
    assert before[0] == after[0]
    assert after[1] <= before[1] + 30  # a level more of an index


# -- directories -----------------------------------------------------------------------------------------------------


def serial(*paths: str) -> list[Known]:
    """The agent coder, whose tasks hold the directory that they name, by its real path."""
    return [Known("coder", directory=lambda given: os.path.realpath(given or paths[0]))]


def test_tasks_of_one_directory_do_not_overlap(made: Making, tmp_path: Path) -> None:
    """By real path: links, dots, trailing slashes and directories within each other are the same room; others are not."""
    home = tmp_path / "a dir é"
    (home / "inner").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(home)
    same = [home, f"{home}/", tmp_path / "link", f"{tmp_path}/other/../a dir é", home / "inner", tmp_path]
    other = made.add(dir=str(tmp_path / "other"))
    tasks = [made.add(dir=str(each)) for each in same]
    default = made.add()
    known = serial(str(home))
    claimed = made.tasks.claim(made.worker, known, 20).claims
    assert ids(claimed) == [other, tasks[0]]
    for claim in claimed:
        made.end(claim)
    seen = []
    while claims := made.tasks.claim(made.worker, known, 20).claims:
        assert len(claims) == 1, "only one of them fits"
        seen += ids(claims)
        made.end(claims[0])
    assert sorted(seen) == sorted([*tasks[1:], default])


def test_a_directory_and_a_key_are_both_held(made: Making, tmp_path: Path) -> None:
    """A task of a directory agent with a key needs room in both."""
    one, two = str(tmp_path / "1"), str(tmp_path / "2")
    first = made.add(dir=one, concurrency_key="k")
    made.add(dir=two, concurrency_key="k")
    made.add(dir=one)
    free = made.add(dir=two)
    assert ids(made.tasks.claim(made.worker, serial(one), 9).claims) == [first, free]


def test_directories_within_each_other() -> None:
    """Two paths overlap when one is the other or contains it; a common beginning of names is no overlap."""
    assert overlap("/a/b", "/a/b")
    assert overlap("/a", "/a/b/c")
    assert overlap("/a/b", "/")
    assert not overlap("/a/b", "/a/bc")
    assert not overlap("/a/b", "/a/c")


# -- with workers ----------------------------------------------------------------------------------------------------


def test_two_workers_share_a_key(database_url: str, engine: Engine) -> None:
    """Six tasks of one key on two workers with eight slots each: never two at once, at no poll's pace, until idle."""
    inside, most = 0, 0
    lock = threading.Lock()

    async def behave(_claim: Claim, _live: Any, _stop: Any) -> Outcome:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        with lock:
            inside -= 1
        return Outcome(OutcomeClass.DONE)

    add(engine, 6, concurrency_key="db")
    add(engine, 4)
    one, two = orchestrator(database_url), orchestrator(database_url)
    try:
        workers = [Worker(each, [FakeAgent(behave=behave)], 8, signals=False) for each in (one, two)]
        with Working(workers[0], until_idle=True) as first, Working(workers[1], until_idle=True) as second:
            first.join()
            second.join()
    finally:
        one.close()
        two.close()
    assert statuses(engine) == {"done": 10}
    assert most >= 1
    overlaps = query(
        engine,
        "SELECT count(*) FROM runs a JOIN runs b ON a.id < b.id JOIN tasks t ON t.id = a.task_id"
        " JOIN tasks u ON u.id = b.task_id WHERE t.concurrency_key = 'db' AND u.concurrency_key = 'db'"
        " AND a.started_at < b.finished_at AND b.started_at < a.finished_at",
    )
    assert overlaps == [(0,)]


def test_idle_waits_for_what_waits_for_a_key(database_url: str, engine: Engine, wait_until: WaitUntil) -> None:
    """A worker that works until idle does not leave while a task of its agent waits for a busy key."""
    holder = Making.on(engine)
    first = holder.add("a", concurrency_key="k")
    (claim,) = holder.claim(1, "a")
    assert claim.task_id == first
    second = holder.add("a", concurrency_key="k")
    with (
        orchestrator(database_url) as orc,
        Working(Worker(orc, [FakeAgent()], 2, signals=False), until_idle=True) as it,
    ):
        wait_until(lambda: query(engine, "SELECT FROM workers WHERE name <> 'w' AND stopped_at IS NULL"))
        assert it.thread.is_alive()
        holder.end(claim)
        it.join()
    assert holder.status(second) == ["done"]
