"""Unit 1: which tasks a claim takes, in which order, and that no two take the same."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, event, text

from orchestrator.domain.given import NewTask
from orchestrator.domain.outcome import Budget, RetryPolicy
from orchestrator.domain.words import OnLimit
from orchestrator.repositories.agents import AgentRepository
from orchestrator.repositories.plans import PlanRepository
from orchestrator.repositories.tasks import Known, TaskRepository
from orchestrator.repositories.workers import WorkerRepository
from tests.making import CRASHED, Making, new_worker

ONE = ("coder",)
MANY = ("coder", "other", "third")


@pytest.fixture
def made(engine: Engine) -> Making:
    return Making.on(engine)


def taken(made: Making, limit: int, *agents: str, **options: Any) -> list[int]:
    return [claim.task_id for claim in made.claim(limit, *agents, **options)]


# -- order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agents", [ONE, MANY], ids=["one agent", "many agents"])
def test_larger_priority_first_then_first_in(made: Making, agents: tuple[str, ...]) -> None:
    """Tasks come by priority, equal ones in the order of adding, whatever the size of the batches."""
    priorities = [0, 5, -3, 5, 0, 9, -3, 0]
    ids = [made.add(agents[n % len(agents)], priority=p) for n, p in enumerate(priorities)]
    expected = [id_ for _, id_ in sorted(zip([-p for p in priorities], ids, strict=True))]
    assert taken(made, 3, *agents) + taken(made, 1, *agents) + taken(made, 50, *agents) == expected


def test_order_within_a_plan(made: Making) -> None:
    """A claim of one plan takes that plan's tasks alone, in the same order."""
    made.add(priority=100)
    plans = PlanRepository(made.engine)
    new = [NewTask("coder", name=f"t{n}", task_hash=f"h{n}", priority=n % 2) for n in range(4)]
    submitted = plans.submit("p", new)
    plans.submit("q", [NewTask("coder", name="x", task_hash="x", priority=50)])
    t0, t1, t2, t3 = (task.id for task in submitted.tasks)
    assert taken(made, 10, plan_id=submitted.plan_id) == [t1, t3, t0, t2]
    assert taken(made, 10, *MANY, plan_id=submitted.plan_id) == []


def test_a_retry_keeps_its_place(made: Making) -> None:
    """A task that failed and is due again is older than those added since, and comes before them."""
    first = made.add(max_retries=3, retry=RetryPolicy(0, 1, 0))
    (claim,) = made.claim()
    second = made.add()
    made.end(claim, CRASHED)
    made.tasks.promote()
    assert taken(made, 2) == [first, second]


# -- eligibility --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        "held_at = now()",
        "due = false, available_at = now() + interval '1 hour'",
        "available_at = now() + interval '1 hour'",
        "status = 'blocked'",
        "status = 'waiting'",
        "status = 'done', finished_at = now()",
        "status = 'cancelled', finished_at = now()",
        "lost_count = 1",
    ],
)
@pytest.mark.parametrize("agents", [ONE, MANY], ids=["one agent", "many agents"])
def test_what_is_not_ready_is_not_taken(made: Making, change: str, agents: tuple[str, ...]) -> None:
    """Held, not due, blocked, waiting, ended and suspect tasks stay; the ready one behind them is taken."""
    task, behind = made.add(priority=5), made.add()
    made.query(f"UPDATE tasks SET {change} WHERE id = :id", id=task)
    before = made.row(task)
    assert taken(made, 10, *agents) == [behind]
    after = made.row(task)
    assert (after.status, after.attempt, after.claimed_by) == (before.status, 0, None)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ("priority = 1", (True, True, False, False)),
        ("lost_count = 1", (True, True, False, True)),
        ("concurrency_key = 'k'", (True, True, True, False)),
        ("concurrency_key = 'k', lost_count = 1", (True, True, True, True)),
        ("held_at = now()", (True, False, False, False)),
        ("due = false, available_at = now() + interval '1 hour'", (True, False, False, False)),
        ("agent = 'somebody'", (True, False, False, False)),
        ("status = 'done', finished_at = now()", (True, False, False, False)),
    ],
)
def test_a_look_says_what_there_is(made: Making, change: str, seen: tuple[bool, ...]) -> None:
    """Ready at all, with a key, lost before: one statement that takes nothing; also of one plan alone."""
    plan = PlanRepository(made.engine).submit("p", [NewTask("other", name="t", task_hash="h")])
    assert plan.plan_id is not None
    made.query(f"UPDATE tasks SET {change} WHERE id = :id", id=plan.tasks[0].id)
    known = [Known("coder"), Known("other")]
    assert astuple(made.tasks.look(made.worker, known)) == seen
    assert astuple(made.tasks.look(made.worker, known, plan_id=plan.plan_id)) == seen
    assert astuple(made.tasks.look(made.worker, known, plan_id=plan.plan_id + 1)) == (True, False, False, False)
    assert astuple(made.tasks.look(made.worker, known[:1])) == (True, False, False, False)
    assert made.row(plan.tasks[0].id).attempt == 0


def test_a_look_leaves_paused_agents_out(made: Making) -> None:
    """What cannot start is nothing to claim, until somebody lets it go on."""
    made.add(definition="abc")
    known = [Known("coder", "abc")]
    agents = AgentRepository(made.engine)
    assert made.tasks.look(made.worker, known).ready
    agents.pause("coder", actor="test")
    assert not made.tasks.look(made.worker, known).ready
    agents.resume("coder", actor="test")
    assert made.tasks.look(made.worker, known).ready


def test_a_dead_worker_is_told(made: Making) -> None:
    """A look of a worker that was declared dead says so."""
    WorkerRepository(made.engine).mark_gone([made.worker], "for the test")
    assert not made.tasks.look(made.worker, [Known("coder")]).alive


def test_agents_are_told_apart_exactly(made: Making) -> None:
    """Only tasks of the named agents: no prefix, no pattern, no other case."""
    names = ["coder", "coder2", "Coder", "cod", "%", "_", "co\\", "co'der", 'co"der', "코더", "a b"]
    tasks = {name: made.add(name) for name in names}
    for name, task in tasks.items():
        assert taken(made, 50, name) == [task]
    assert made.claim(5, "nobody") == []
    assert made.tasks.claim(made.worker, [], 5).claims == []


def test_a_definition_is_part_of_the_route(made: Making) -> None:
    """A task of a plan's own agent is taken only by who has that very definition, and not under the bare name."""
    local = made.add(definition="abc")
    bare = made.add()
    assert made.tasks.claim(made.worker, [Known("coder", "xyz")], 5).claims == []
    assert [c.task_id for c in made.tasks.claim(made.worker, [Known("coder")], 5).claims] == [bare]
    (claim,) = made.tasks.claim(made.worker, [Known("coder", "abc"), Known("coder")], 5).claims
    assert (claim.task_id, claim.agent, claim.definition) == (local, "coder", "abc")


def test_paused_agents_are_left_alone(made: Making) -> None:
    """A paused agent's tasks stay, also among many agents; a pause that has run out does not count."""
    made.add()
    other = made.add("other")
    made.query("INSERT INTO agents (name, paused_at) VALUES ('coder', now())")
    assert taken(made, 5) == []
    assert taken(made, 5, *MANY) == [other]
    made.query("UPDATE agents SET paused_until = clock_timestamp() + interval '1 hour'")
    assert taken(made, 5) == []
    made.query("UPDATE agents SET paused_until = clock_timestamp() - interval '1 second'")
    assert len(taken(made, 5)) == 1


def test_suspects_are_taken_apart(made: Making) -> None:
    """A task that a worker was lost with comes only to a claim that asks for suspects, and nothing else does then."""
    suspect, plain = made.add(), made.add()
    made.query("UPDATE tasks SET lost_count = 2 WHERE id = :id", id=suspect)
    assert taken(made, 5) == [plain]
    another = made.add()
    for agents in (MANY, ONE):
        assert taken(made, 1, *agents, suspects=True) == ([suspect] if agents is MANY else [])
    assert taken(made, 5) == [another]


@pytest.mark.parametrize("agents", [ONE, MANY], ids=["one agent", "many agents"])
def test_undue_rows_are_put_right_and_hide_nothing(made: Making, agents: tuple[str, ...]) -> None:
    """Rows inserted by hand for tomorrow say that they are due: they are demoted, and ready ones behind them come now."""
    made.query(
        "INSERT INTO tasks (agent, priority, available_at)"
        " SELECT 'coder', 9, now() + interval '1 day' FROM generate_series(1, 300)"
    )
    ready = made.add()
    assert taken(made, 2, *agents) == [ready]
    assert made.query("SELECT count(*) FROM tasks WHERE due")[0][0] == 1  # the one that runs now
    made.query("UPDATE tasks SET available_at = clock_timestamp() WHERE id <= 2")
    assert made.tasks.promote()[0] == {"coder"}
    assert len(taken(made, 5, *agents)) == 2


def test_a_bare_insert_is_claimable(made: Making) -> None:
    """INSERT of agent and input alone makes a task that is claimed, with the worker's defaults."""
    made.query("""INSERT INTO tasks (agent, input) VALUES ('coder', '"Fix the parser"')""")
    (claim,) = made.claim()
    assert (claim.input, claim.attempt, claim.max_retries, claim.params) == ("Fix the parser", 1, 2, {})


# -- what a claim does --------------------------------------------------------------------------------------------


def test_a_claim_is_committed_and_fenced(made: Making) -> None:
    """On return the row is running, owned, one attempt further, started by the database's clock."""
    task = made.add(input={"a": [1]}, params={"p": 1}, title="T", name="n")
    (claim,) = made.claim()
    row = made.row(task)
    assert (row.status, row.attempt, row.claimed_by) == ("running", 1, made.worker)
    assert (claim.task_id, claim.attempt, claim.claimed_by) == (task, 1, made.worker)
    assert (claim.input, claim.params, claim.title, claim.name) == ({"a": [1]}, {"p": 1}, "T", "n")
    assert claim.started_at == row.started_at
    assert row.started_at >= row.created_at


def test_what_the_task_left_open_comes_from_the_agent(made: Making) -> None:
    """Only what is null is filled, part by part, and stays so for later attempts and other workers."""
    open_, given = (
        made.add(),
        made.add(max_retries=0, retry=RetryPolicy(1, 1, 1), budget=Budget(seconds=5, on_limit=OnLimit.FINISH_TURN)),
    )
    known = Known(
        "coder",
        max_retries=7,
        retry=RetryPolicy(3, 4, 50),
        budget=Budget(60, 1000, 2.5, 9, OnLimit.FINISH_TURN),
    )
    first, second = made.tasks.claim(made.worker, [known], 2).claims
    assert (first.max_retries, first.retry, first.budget) == (7, known.retry, known.budget)
    assert (second.max_retries, second.retry) == (0, RetryPolicy(1, 1, 1))
    assert second.budget == Budget(5, 1000, 2.5, 9, OnLimit.FINISH_TURN)
    row = made.row(open_)
    assert (row.max_retries, row.retry, row.budget_usd) == (7, {"initial": 3, "factor": 4, "max": 50}, 2.5)
    made.end(first, CRASHED)
    made.query("UPDATE tasks SET due = true, available_at = now()")
    (again,) = made.claim()
    assert (again.max_retries, again.budget) == (7, known.budget)
    assert made.row(given).max_retries == 0


def test_live_columns_of_an_earlier_attempt_are_gone(made: Making) -> None:
    """Progress and last output of the attempt before do not look like this one's; the session stays."""
    task = made.add()
    made.query("UPDATE tasks SET progress_percent = 50, last_output = 'x', last_output_at = now(), session = 's'")
    (claim,) = made.claim()
    row = made.row(task)
    assert (row.progress_percent, row.last_output, row.last_output_at, claim.session) == (None, None, None, "s")


# -- liveness of the worker ---------------------------------------------------------------------------------------


def test_a_dead_worker_claims_nothing(made: Making) -> None:
    """A worker that was declared dead, or never existed, gets nothing and learns that it is not alive."""
    made.add()
    WorkerRepository(made.engine).mark_gone([made.worker], "test")
    for worker in (made.worker, uuid4()):
        for agents in ([Known("coder")], [Known("coder"), Known("other")]):
            claimed = made.tasks.claim(worker, agents, 5)
            assert (claimed.claims, claimed.alive) == ([], False)
    assert made.status(1) == ["pending"]
    assert made.tasks.claim(new_worker(made.engine), [Known("coder")], 5).alive


def test_an_empty_queue_says_that_the_worker_lives(made: Making) -> None:
    """Nothing to take is not death."""
    claimed = made.tasks.claim(made.worker, [Known("coder")], 5)
    assert (claimed.claims, claimed.alive) == ([], True)


def test_death_and_claim_come_one_after_the_other(made: Making, wait_until: Any) -> None:
    """Whoever buries a worker waits for its claim under way; no claim appears after its tasks were taken back."""
    made.add_all([NewTask("coder") for _ in range(40)])
    workers = WorkerRepository(made.engine)
    with ThreadPoolExecutor(4) as pool:
        claims = [pool.submit(made.tasks.claim, made.worker, [Known("coder")], 1) for _ in range(20)]
        workers.mark_gone([made.worker], "test")
        while made.tasks.take_back():
            pass
        taken_later = [claim.result() for claim in claims]
    while made.tasks.take_back():
        pass
    assert made.query("SELECT count(*) FROM tasks WHERE status = 'running'")[0][0] == 0
    assert len({claim.task_id for each in taken_later for claim in each.claims}) <= 20


# -- at the same time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agents", [ONE, MANY], ids=["one agent", "many agents"])
def test_eight_threads_take_each_task_once(made: Making, agents: tuple[str, ...]) -> None:
    """However many claim at once: each task is taken exactly once, and all are taken."""
    made.add_all([NewTask(agents[n % len(agents)], priority=n % 3) for n in range(400)])
    start = threading.Barrier(8)

    def claim_all(size: int) -> list[int]:
        worker = new_worker(made.engine, f"t{size}")
        known = [Known(agent) for agent in agents]
        found: list[int] = []
        start.wait()
        while claims := made.tasks.claim(worker, known, size).claims:
            found += [claim.task_id for claim in claims]
        return found

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(claim_all, [1, 1, 2, 3, 5, 8, 13, 21]))
    everything = [task for each in results for task in each]
    assert len(everything) == len(set(everything))
    # A claim that meets only rows in other hands may come back empty: what they left is there for the next one.
    worker = new_worker(made.engine, "rest")
    while claims := made.tasks.claim(worker, [Known(agent) for agent in agents], 100).claims:
        everything += [claim.task_id for claim in claims]
    assert sorted(everything) == list(range(1, 401))
    assert made.query("SELECT count(*) FROM tasks WHERE attempt = 1 AND status = 'running'")[0][0] == 400


@pytest.mark.parametrize("agents", [ONE, MANY], ids=["one agent", "many agents"])
def test_rows_in_other_hands_are_skipped(made: Making, agents: tuple[str, ...]) -> None:
    """A claim neither waits for locked rows nor comes back empty because of them, however many there are."""
    made.add_all([NewTask("coder") for _ in range(60)])
    with made.engine.connect() as connection:
        connection.execute(text("SELECT 1 FROM tasks WHERE id <= 50 FOR NO KEY UPDATE"))
        assert taken(made, 2, *agents) == [51, 52]
        assert taken(made, 1, *agents) == [53]


def test_a_foreign_key_check_does_not_hold_a_claim_back(made: Making) -> None:
    """KEY SHARE on a task (an insert of a run or a dependency) does not make the claim skip it."""
    task = made.add()
    with made.engine.connect() as connection:
        connection.execute(text("SELECT 1 FROM tasks FOR KEY SHARE"))
        assert taken(made, 1) == [task]


# -- the limit (S08) ----------------------------------------------------------------------------------------------

SETTINGS = [
    (),
    ("enable_indexscan", "enable_indexonlyscan", "enable_bitmapscan"),
    ("enable_hashjoin", "enable_material", "enable_indexscan"),
    ("enable_hashjoin", "enable_mergejoin", "enable_seqscan"),
    ("enable_nestloop", "enable_hashjoin", "enable_sort"),
    ("enable_nestloop", "enable_mergejoin", "enable_material", "enable_memoize"),
]


@pytest.mark.parametrize("off", SETTINGS, ids=lambda off: "-".join(off) or "defaults")
@pytest.mark.parametrize("kind", ["one", "many", "plan", "suspects"])
def test_never_more_than_the_limit(made: Making, database_url: str, off: tuple[str, ...], kind: str) -> None:
    """With whatever plan, and without statistics, a claim takes and changes exactly what it was asked for, in order."""
    from orchestrator.database.engine import make_engine

    made.query(
        "INSERT INTO plans (name) VALUES ('p')",
    )
    made.query(
        "INSERT INTO tasks (agent, plan_id, lost_count, priority)"
        " SELECT CASE n % 2 WHEN 0 THEN 'coder' ELSE 'other' END, (SELECT id FROM plans), :lost, n % 5"
        " FROM generate_series(1, 300) AS n",
        lost=1 if kind == "suspects" else 0,
    )
    options = {"one": {}, "many": {}, "plan": {"plan_id": 1}, "suspects": {"suspects": True}}[kind]
    agents = [Known("coder")] if kind in ("one", "suspects") else [Known("coder"), Known("other")]
    settings = " ".join(f"-c {name}=off" for name in off)
    joint = "&" if "?" in database_url else "?"
    badly = make_engine(f"{database_url}{joint}options={settings.replace(' ', '%20').replace('=', '%3D')}")
    try:
        tasks = TaskRepository(badly)
        seen: set[int] = set()
        for limit in (1, 1, 2, 7, 30):
            claims = tasks.claim(made.worker, agents, limit, **options).claims  # type: ignore[arg-type]
            assert len(claims) == limit
            seen |= {claim.task_id for claim in claims}
            assert made.query("SELECT count(*) FROM tasks WHERE status = 'running'")[0][0] == len(seen)
    finally:
        badly.dispose()
    assert {row.priority for row in made.query("SELECT priority FROM tasks WHERE status = 'running'")} <= {3, 4}


# -- promotion ----------------------------------------------------------------------------------------------------


def test_promotion_makes_due_what_is_due(made: Making) -> None:
    """Only what is due is promoted, its agents are named, and the seconds until the next one are told."""
    soon = made.add(at=datetime.now(UTC) + timedelta(hours=1))
    late = made.add("other", at=datetime.now(UTC) + timedelta(hours=2))
    agents, seconds = made.tasks.promote()
    assert agents == set()
    assert seconds is not None
    assert 3000 < seconds <= 3600
    made.query("UPDATE tasks SET available_at = clock_timestamp() WHERE id = :id", id=soon)
    assert made.tasks.promote()[0] == {"coder"}
    assert taken(made, 5, *MANY) == [soon]
    made.query("UPDATE tasks SET available_at = clock_timestamp() WHERE id = :id", id=late)
    assert made.tasks.promote() == ({"other"}, None)


def test_promotion_reads_only_what_is_due(made: Making) -> None:
    """With 5,000 future-dated tasks the look for those that are due ends at the first that is not."""
    made.query(
        "INSERT INTO tasks (agent, due, available_at)"
        " SELECT 'coder', false, now() + interval '1 day' + n * interval '1 s' FROM generate_series(1, 5000) AS n"
    )
    made.query("ANALYZE tasks")
    plans: list[str] = []

    def explain(connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "ripe" in statement:
            with connection.connection.cursor() as cursor:
                cursor.execute("EXPLAIN (ANALYZE, TIMING OFF) " + statement, parameters)
                plans.append("\n".join(line for (line,) in cursor.fetchall()))

    event.listen(made.engine, "before_cursor_execute", explain)
    try:
        assert made.tasks.promote()[0] == set()
    finally:
        event.remove(made.engine, "before_cursor_execute", explain)
    (plan,) = plans
    assert "tasks_not_due" in plan, plan
    assert "Rows Removed by Filter" not in plan, plan


def test_a_task_at_a_time_that_has_passed_is_due_at_once(made: Making) -> None:
    """``at`` in the past needs no promotion."""
    task = made.add(at=datetime.now(UTC) - timedelta(days=1))
    assert taken(made, 1) == [task]
