"""The watchdog: dead workers are found, their tasks taken back once, and nobody is judged in the dark."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, event

from orchestrator import liveness
from orchestrator.agents import census
from orchestrator.domain.identity import Identity
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import ClaimLost, DatabaseUnavailable
from orchestrator.repositories.events import EventRepository, LiveRow
from orchestrator.repositories.runs import RunRepository
from orchestrator.repositories.tasks import Known, TaskRepository
from orchestrator.repositories.workers import WorkerRepository
from orchestrator.service import Orchestrator
from orchestrator.settings import Settings
from orchestrator.worker import Watchdog, Worker
from orchestrator.worker.watchdog import Sweeper, Swept
from tests.conftest import WaitUntil
from tests.working import FakeAgent, Working, add, orchestrator, query, statuses

ELSEWHERE = Identity("elsewhere", 4711, "another boot", "pid:[1]", 5, "t")


@pytest.fixture
def orc(database_url: str) -> Iterator[Orchestrator]:
    """An orchestrator of the test's own."""
    with orchestrator(database_url) as made:
        yield made


def register(engine: Engine, who: Identity = ELSEWHERE, name: str = "other", lease: float = 40.0) -> UUID:
    """A worker of another process."""
    return WorkerRepository(engine).register(
        who, name=name, slots=4, agents=["a"], plan=None, lease=lease, heartbeat=lease / 4
    )


def silence(engine: Engine, worker: UUID, seconds: float = 3600) -> None:
    """Make it look as if *worker* had last renewed so long ago."""
    query(
        engine,
        "UPDATE workers SET renewed_at = renewed_at - make_interval(secs => :s),"
        " renewing_since = renewing_since - make_interval(secs => :s) WHERE id = :id",
        s=seconds,
        id=worker,
    )


def witness(engine: Engine) -> UUID:
    """A worker that has been renewing for an hour."""
    worker = register(engine, name="witness")
    query(engine, "UPDATE workers SET renewing_since = renewing_since - interval '1 hour' WHERE id = :id", id=worker)
    return worker


def test_tasks_of_a_silent_worker_are_taken_back(engine: Engine, orc: Orchestrator) -> None:
    """With a witness a worker silent for more than its lease is dead: its tasks are pending, with a lost run each."""
    other = register(engine)
    add(engine, 3)
    claims = TaskRepository(engine).claim(other, [Known("a")], 3).claims
    assert len(claims) == 3
    witness(engine)
    silence(engine, other)
    swept = Sweeper(orc, liveness.identity()).sweep()
    assert swept.buried == [other]
    assert [status for _, _, status in swept.taken_back] == ["pending"] * 3
    assert query(engine, "SELECT status, worker FROM runs") == [("lost", "other")] * 3
    assert query(engine, "SELECT DISTINCT lost_count, retry_count FROM tasks") == [(1, 0)]
    assert Sweeper(orc, liveness.identity()).sweep().taken_back == []
    with pytest.raises(ClaimLost):
        RunRepository(engine).record_run(claims[0], Outcome(OutcomeClass.DONE, result=1))
    assert query(engine, "SELECT count(*) FROM runs WHERE late IS NOT NULL") == [(1,)]


def test_what_a_lost_attempt_used_is_on_record(engine: Engine, orc: Orchestrator) -> None:
    """Tokens that were flushed before the worker died are in its lost run, incomplete; the cost is unknown, not 0 (S34)."""
    other = register(engine)
    (task_id,) = add(engine)
    TaskRepository(engine).claim(other, [Known("a")], 1)
    live = LiveRow(task_id, 1, other, None, None, "a line", '{"total_tokens": 5000, "counter": "delta"}', None)
    EventRepository(engine).set_live([live])
    WorkerRepository(engine).mark_gone([other], "for the test")
    assert len(orc.take_back()) == 1
    assert query(engine, "SELECT status, total_tokens, usage_complete, cost_usd FROM runs") == [
        ("lost", 5000, False, None)
    ]


@pytest.mark.parametrize("end", ["UPDATE workers SET stopped_at = clock_timestamp()", "DELETE FROM workers"])
def test_nobodys_tasks_are_taken_back(engine: Engine, orc: Orchestrator, end: str) -> None:
    """A worker that signed off while its claim was still under way, one that a restored dump does not know: not stuck."""
    other = register(engine)
    add(engine)
    TaskRepository(engine).claim(other, [Known("a")], 1)
    query(engine, end)
    assert [status for _, _, status in Sweeper(orc, liveness.identity()).sweep().taken_back] == ["pending"]


def test_nobody_is_judged_in_the_dark(engine: Engine, orc: Orchestrator) -> None:
    """After an outage everybody is silent: without a witness nobody is dead, however long it was."""
    other = register(engine)
    add(engine)
    TaskRepository(engine).claim(other, [Known("a")], 1)
    silence(engine, other)
    mine = register(engine, name="mine")
    assert Sweeper(orc, liveness.identity()).sweep() == Swept()
    query(engine, "UPDATE workers SET renewing_since = renewing_since - interval '41 s' WHERE id = :id", id=mine)
    assert Sweeper(orc, liveness.identity()).sweep().buried == [other]


def test_looking_for_silent_ones_does_not_read_those_that_ended(engine: Engine, orc: Orchestrator) -> None:
    """However many processes of the last month have rows, the look takes the index of the living."""
    worker = register(engine)
    columns = "name, host, pid, slots, agents, lease, heartbeat"
    query(
        engine,
        f"INSERT INTO workers (id, stopped_at, dead_at, {columns})"
        " SELECT gen_random_uuid(), CASE n % 2 WHEN 0 THEN now() END, CASE n % 2 WHEN 1 THEN now() END,"
        f" {columns} FROM workers, generate_series(1, 2000) n WHERE id = :id",
        id=worker,
    )
    query(engine, "ANALYZE workers")
    asked: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> None:
        asked.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    assert not WorkerRepository(engine).late()
    assert WorkerRepository(engine).judge() == []
    event.remove(engine, "before_cursor_execute", note)
    assert len(asked) == 2
    with engine.connect() as connection:
        for statement, parameters in asked:
            plan = " ".join(connection.exec_driver_sql("EXPLAIN " + statement, parameters).scalars())
            assert "workers_live" in plan
            assert "Seq Scan" not in plan


def test_death_is_sticky(engine: Engine, orc: Orchestrator) -> None:
    """A dead worker that renews is told so, and what it would claim is nothing."""
    other = register(engine)
    witness(engine)
    silence(engine, other)
    orc.judge()
    add(engine)
    assert not orc.renew(other).alive
    claimed = TaskRepository(engine).claim(other, [Known("a")], 1)
    assert claimed.claims == []
    assert claimed.alive is False


@pytest.fixture
def neighbour(engine: Engine) -> Iterator[tuple[UUID, subprocess.Popen[bytes]]]:
    """A worker row of a process on this host, and the process."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = liveness.identity()
    who = Identity(mine.host, process.pid, mine.boot_id, mine.pid_namespace, liveness.started(process.pid), "t")
    yield register(engine, who, "neighbour"), process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_a_neighbour_whose_process_is_gone_is_dead_at_once(
    engine: Engine, orc: Orchestrator, neighbour: tuple[UUID, subprocess.Popen[bytes]]
) -> None:
    """Nobody waits for the lease of a process that can be seen to be gone; while it lives, it is left alone."""
    worker, process = neighbour
    add(engine, 2)
    TaskRepository(engine).claim(worker, [Known("a")], 2)
    sweeper = Sweeper(orc, liveness.identity())
    assert sweeper.sweep() == Swept()
    process.kill()
    process.wait()
    swept = sweeper.sweep()
    assert swept.buried == [worker]
    assert len(swept.taken_back) == 2
    ((why,),) = query(engine, "SELECT dead_why FROM workers WHERE id = :id", id=worker)
    assert f"process {process.pid} is gone" in why


def test_its_agents_are_ended_before_its_tasks_are_given_away(
    engine: Engine,
    orc: Orchestrator,
    neighbour: tuple[UUID, subprocess.Popen[bytes]],
    wait_until: WaitUntil,
) -> None:
    """An orphan of the dead neighbour still runs: it is ended first, and only then is the task pending again."""
    worker, process = neighbour
    (task_id,) = add(engine)
    TaskRepository(engine).claim(worker, [Known("a")], 1)
    mark = census.new_mark(worker, task_id, 1)
    orphan = subprocess.Popen(["sleep", "1000"], env={**os.environ, census.MARK_NAME: mark}, start_new_session=True)
    again = threading.Event()
    try:
        process.kill()
        process.wait()
        sweeper = Sweeper(orc, liveness.identity(), again.set)
        assert sweeper.sweep() == Swept()
        assert statuses(engine) == {"running": 1}
        assert orphan.wait(30) != 0
        assert again.wait(30)
        assert sweeper.sweep().buried == [worker]
        assert statuses(engine) == {"pending": 1}
    finally:
        orphan.kill()
        orphan.wait()


def test_the_end_of_a_lease_gives_nothing_away_that_still_runs_here(
    engine: Engine, orc: Orchestrator, neighbour: tuple[UUID, subprocess.Popen[bytes]]
) -> None:
    """The lease of the dead neighbour runs out while its orphan is being ended: the task waits for that all the same."""
    worker, process = neighbour
    (task_id,) = add(engine)
    TaskRepository(engine).claim(worker, [Known("a")], 1)
    mark = census.new_mark(worker, task_id, 1)
    orphan = subprocess.Popen(["sleep", "1000"], env={**os.environ, census.MARK_NAME: mark}, start_new_session=True)
    again = threading.Event()
    try:
        process.kill()
        process.wait()
        long = "renewed_at - interval '3 hours'"
        query(engine, f"UPDATE workers SET renewed_at = {long}, renewing_since = {long} WHERE id = :id", id=worker)
        witness = orc.register(liveness.identity(), name="witness", slots=0, agents=[], lease=7200, heartbeat=3600)
        query(engine, f"UPDATE workers SET renewing_since = {long} WHERE id = :id", id=witness)
        sweeper = Sweeper(orc, liveness.identity(), again.set)
        assert sweeper.sweep() == Swept()
        assert statuses(engine) == {"running": 1}
        assert orphan.wait(30) != 0
        assert again.wait(30)
        assert sweeper.sweep().buried == [worker]
        assert statuses(engine) == {"pending": 1}
    finally:
        orphan.kill()
        orphan.wait()


def test_agents_of_one_that_died_after_its_death_was_declared_are_ended(
    engine: Engine,
    orc: Orchestrator,
    neighbour: tuple[UUID, subprocess.Popen[bytes]],
    wait_until: WaitUntil,
) -> None:
    """Stopped for longer than its lease, declared dead as silent, then killed with its guardian: its agents are ended."""
    worker, process = neighbour
    (task_id,) = add(engine)
    TaskRepository(engine).claim(worker, [Known("a")], 1)
    mark = census.new_mark(worker, task_id, 1)
    orphan = subprocess.Popen(["sleep", "1000"], env={**os.environ, census.MARK_NAME: mark}, start_new_session=True)
    try:
        query(engine, "UPDATE workers SET dead_at = now(), dead_why = 'silent' WHERE id = :id", id=worker)
        sweeper = Sweeper(orc, liveness.identity())
        assert len(sweeper.sweep().taken_back) == 1
        assert orphan.poll() is None  # its worker lives: it ends them itself
        process.kill()
        process.wait()
        sweeper.sweep()
        assert orphan.wait(30) != 0
        sweeper.finish()
        sweeper.sweep()
        assert sweeper._clear == {worker}
    finally:
        orphan.kill()
        orphan.wait()


def test_a_worker_of_another_boot_is_no_neighbour(engine: Engine, orc: Orchestrator) -> None:
    """The same host name and a pid that is gone here: in another boot, that means nothing."""
    mine = liveness.identity()
    other = register(engine, Identity(mine.host, 2**22 + 1, "another boot", mine.pid_namespace, 5, "t"))
    namespace = register(engine, Identity(mine.host, 2**22 + 1, mine.boot_id, "pid:[1]", 5, "t"))
    assert Sweeper(orc, mine).sweep().buried == []
    assert query(
        engine, "SELECT count(*) FROM workers WHERE dead_at IS NULL AND id IN (:a, :b)", a=other, b=namespace
    ) == [(2,)]


def test_a_sweep_that_was_cut_short_goes_on(engine: Engine, orc: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database goes away in the middle of 30 orphans: what was done stays, the next sweep does the rest (S20)."""
    monkeypatch.setattr("orchestrator.worker.watchdog.BATCH", 10)
    other = register(engine)
    add(engine, 30)
    TaskRepository(engine).claim(other, [Known("a")], 30)
    witness(engine)
    silence(engine, other)
    take_back, calls = orc.take_back, 0

    def fragile(limit: int = 100) -> list[tuple[int, int, str]]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise DatabaseUnavailable("gone")
        return take_back(limit)

    monkeypatch.setattr(orc, "take_back", fragile)
    sweeper = Sweeper(orc, liveness.identity())
    with pytest.raises(DatabaseUnavailable):
        sweeper.sweep()
    assert statuses(engine) == {"pending": 10, "running": 20}
    assert len(sweeper.sweep().taken_back) == 20
    assert statuses(engine) == {"pending": 30}


def test_many_watchdogs_take_each_task_back_once(engine: Engine, database_url: str) -> None:
    """Four watchdogs sweep at once over 200 orphans: one lost run each (safe anywhere at any time)."""
    other = register(engine)
    add(engine, 200)
    TaskRepository(engine).claim(other, [Known("a")], 200)
    witness(engine)
    silence(engine, other)
    taken: list[tuple[int, int, str]] = []
    start = threading.Barrier(4)

    def sweep() -> None:
        with orchestrator(database_url) as own:
            start.wait(30)
            taken.extend(Sweeper(own, liveness.identity()).sweep().taken_back)

    threads = [threading.Thread(target=sweep) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with orchestrator(database_url) as own:
        taken += Sweeper(own, liveness.identity()).sweep().taken_back
    assert len(taken) == len(set(taken)) == 200
    assert query(engine, "SELECT count(*), count(DISTINCT task_id) FROM runs WHERE status = 'lost'") == [(200, 200)]


def test_a_killer_fails_after_its_third_worker(engine: Engine, orc: Orchestrator) -> None:
    """A task that takes its worker down each time ends failed with the reason, after three attempts (S04)."""
    add(engine, max_retries=2)
    witness(engine)
    known = [Known("a")]
    for attempt in (1, 2, 3):
        worker = register(engine)
        query(engine, "UPDATE tasks SET due = true, available_at = clock_timestamp() WHERE status = 'pending'")
        (claim,) = TaskRepository(engine).claim(worker, known, 1, suspects=attempt > 1).claims
        assert claim.attempt == attempt
        silence(engine, worker)
        Sweeper(orc, liveness.identity()).sweep()
    assert query(engine, "SELECT status, attempt, error_class, error_message FROM tasks") == [
        ("failed", 3, "lost", "worker lost 3 times")
    ]
    assert query(engine, "SELECT count(*) FROM runs WHERE status = 'lost'") == [(3,)]


def test_once_waits_for_a_witness(engine: Engine, database_url: str) -> None:
    """Alone it registers, renews for a lease, and only then judges; afterwards its own row says that it ended."""
    other = register(engine, lease=0.5)
    add(engine)
    TaskRepository(engine).claim(other, [Known("a")], 1)
    silence(engine, other)
    with orchestrator(database_url, Settings(heartbeat=0.1, lease=0.5)) as own:
        swept = Watchdog(own).once()
    assert swept.buried == [other]
    assert statuses(engine) == {"pending": 1}
    rows = query(
        engine,
        "SELECT renewed_at - started_at >= interval '0.4 s', stopped_at IS NOT NULL FROM workers WHERE slots = 0",
    )
    assert rows == [(True, True)]


def test_once_does_not_wait_when_nobody_is_silent(engine: Engine, database_url: str) -> None:
    """Without a silent worker there is nobody to judge: a lease of an hour is not waited for."""
    register(engine)
    with orchestrator(database_url, Settings(heartbeat=10, lease=3600)) as own:
        assert Watchdog(own).once() == Swept()


def test_once_can_be_stopped_while_it_waits(engine: Engine, database_url: str, wait_until: WaitUntil) -> None:
    """Ctrl-C while it waits for a witness: it signs off."""
    silence(engine, register(engine))
    with orchestrator(database_url, Settings(heartbeat=10, lease=3600)) as own:
        watchdog = Watchdog(own)
        thread = threading.Thread(target=watchdog.once)
        thread.start()
        wait_until(lambda: query(engine, "SELECT 1 FROM workers WHERE slots = 0"))
        watchdog.stop()
        thread.join(30)
        assert not thread.is_alive()
    assert query(engine, "SELECT stopped_at IS NOT NULL FROM workers WHERE slots = 0") == [(True,)]


def test_run_goes_on_through_an_outage(
    engine: Engine, orc: Orchestrator, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    """A fault of the database ends no watchdog; what became dead meanwhile is found afterwards."""
    judge, calls = orc.judge, 0

    def fragile(**options: Any) -> list[UUID]:
        nonlocal calls
        calls += 1
        if calls < 4:
            raise DatabaseUnavailable("gone")
        return judge(**options)

    monkeypatch.setattr(orc, "judge", fragile)
    other = register(engine)
    witness(engine)
    silence(engine, other)
    watchdog = Watchdog(orc)
    found: list[UUID] = []
    thread = threading.Thread(target=watchdog.run, args=(0.01, lambda swept: found.extend(swept.buried)))
    thread.start()
    wait_until(lambda: found == [other])
    watchdog.stop()
    thread.join(30)
    assert not thread.is_alive()


def test_a_worker_takes_back_for_others(engine: Engine, orc: Orchestrator) -> None:
    """The watchdog runs inside every worker: it takes the dead one's task back and does it."""
    other = register(engine)
    add(engine)
    TaskRepository(engine).claim(other, [Known("a")], 1)
    witness(engine)
    silence(engine, other)
    agent = FakeAgent()
    with Working(Worker(orc, [agent]), until_idle=True) as working:
        working.join()
    assert statuses(engine) == {"done": 1}
    assert query(engine, "SELECT status FROM runs ORDER BY attempt") == [("lost",), ("done",)]


def test_a_sweep_removes_what_is_no_longer_kept(
    engine: Engine, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With [retention] each sweep goes on with a pass for its spare time; without one tasks stay."""
    monkeypatch.setattr("random.random", lambda: 0.0)
    for retention, left in (({}, 3), ({"done": "1h"}, 1)):
        settings = Settings(database_url=database_url, retention=retention)
        with Orchestrator(database_url, settings=settings) as orc:
            if not retention:
                for _ in range(3):
                    add(engine)
                query(
                    engine,
                    "UPDATE tasks SET status = 'done', finished_at = now() - interval '2 hours' WHERE id IN (1, 2)",
                )
            sweeper = Sweeper(orc, liveness.identity(), spare=10.0)
            sweeper.sweep()
            assert query(engine, "SELECT count(*) AS n FROM tasks")[0].n == left


def test_a_sweep_without_time_to_spare_removes_nothing(
    engine: Engine, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing never takes longer than its share of a sweep; the pass goes on at the next one."""
    monkeypatch.setattr("random.random", lambda: 0.0)
    settings = Settings(database_url=database_url, retention={"done": "1h"})
    with Orchestrator(database_url, settings=settings) as orc:
        add(engine)
        query(engine, "UPDATE tasks SET status = 'done', finished_at = now() - interval '2 hours'")
        sweeper = Sweeper(orc, liveness.identity(), spare=0.0)
        sweeper.sweep()
        assert query(engine, "SELECT count(*) AS n FROM tasks")[0].n == 1
        sweeper._keeper._spare = 10.0
        sweeper.sweep()
        assert query(engine, "SELECT count(*) AS n FROM tasks")[0].n == 0
