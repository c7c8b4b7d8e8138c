"""The server answers, but not as it should: sessions end, nothing can be written, nothing is left, everything takes too long."""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DatabaseError

from orchestrator.agents.protocol import Live, Stop
from orchestrator.database import schema, transient
from orchestrator.database.engine import connection_parameters
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.worker import Worker
from tests.conftest import WaitUntil
from tests.faults import Fleet, fresh_engine
from tests.servers import Cluster
from tests.working import QUICK, FakeAgent, Gate, Working, add, orchestrator, query, statuses


@pytest.fixture(autouse=True)
def _new_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other test's outage is going on."""
    monkeypatch.setattr(transient, "_episode", transient._Episode())


@pytest.fixture
def role_url(engine: Engine, database_url: str) -> Iterator[str]:
    """The same database for a role ``limited``, whose settings the test changes."""
    query(engine, "CREATE ROLE limited SUPERUSER LOGIN")
    name = connection_parameters(database_url)["user"]
    yield database_url.replace(f"//{name}@", "//limited@", 1)
    query(engine, "DROP ROLE limited")


def end_sessions(engine: Engine) -> None:
    """End all sessions of ``limited``, so that new ones come with its new settings."""
    query(engine, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'limited'")


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    """How many lines of the log have *words* in them."""
    return sum(words in record.getMessage() for record in caplog.records)


def test_a_database_that_is_read_only_for_a_while(
    engine: Engine, role_url: str, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
) -> None:
    """Claims and records wait until it can be written to (25006); what had ended is recorded, what was added runs."""
    add(engine)
    gate = Gate(Outcome(OutcomeClass.DONE, result="kept"))
    with (
        caplog.at_level(logging.WARNING),
        orchestrator(role_url) as orc,
        Working(Worker(orc, [FakeAgent(behave=gate)])),
    ):
        gate.entered()
        query(engine, "ALTER ROLE limited SET default_transaction_read_only = on")
        end_sessions(engine)
        gate.open()
        add(engine)
        wait_until(lambda: said(caplog, "lost the database"))
        assert statuses(engine) == {"running": 1, "pending": 1}
        query(engine, "ALTER ROLE limited RESET default_transaction_read_only")
        wait_until(lambda: statuses(engine) == {"done": 2})
        wait_until(lambda: said(caplog, "the database is back"))
    assert query(engine, "SELECT attempt, status, result FROM runs ORDER BY id") == [(1, "done", "kept")] * 2
    assert said(caplog, "lost the database") == said(caplog, "the database is back") == 1
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("53100", "could not extend file"),
        pytest.param("57014", "statement timeout", marks=pytest.mark.slow),
        pytest.param("58030", "could not write", marks=pytest.mark.slow),
    ],
)
def test_records_wait_for_a_server_that_cannot_write(
    engine: Engine, database_url: str, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture, state: str, words: str
) -> None:
    """Disk full, a canceled statement, a disk that fails: no task fails for it, and the outcomes are recorded later."""
    refuse = f"BEGIN RAISE EXCEPTION '{words}' USING ERRCODE = '{state}'; END"
    query(engine, f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ {refuse} $$")
    query(engine, "CREATE TRIGGER refuse BEFORE INSERT ON runs EXECUTE FUNCTION refuse()")
    try:
        add(engine, 3)
        with (
            caplog.at_level(logging.WARNING),
            orchestrator(database_url) as orc,
            Working(Worker(orc, [FakeAgent()], 3), until_idle=True) as working,
        ):
            wait_until(lambda: said(caplog, words))
            assert statuses(engine) == {"running": 3}
            query(engine, "DROP FUNCTION refuse() CASCADE")
            working.join()
    finally:
        query(engine, "DROP FUNCTION IF EXISTS refuse() CASCADE")
    assert query(engine, "SELECT attempt, status FROM runs") == [(1, "done")] * 3
    assert said(caplog, "lost the database") == said(caplog, "the database is back") == 1
    assert "Traceback" not in caplog.text


@pytest.mark.slow
def test_a_disk_that_is_full(test_folder: Path, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel has no room for another page of ``runs`` (ENOSPC): outcomes wait, and are recorded when there is some."""
    with Cluster(test_folder / "full") as cluster, fresh_engine(cluster.url) as engine:
        schema.upgrade(cluster.url)
        ((path,),) = query(engine, "SELECT pg_relation_filepath('runs')")
        file = cluster.server.data / path
        cluster.stop()
        file.rename(file.with_suffix(".aside"))
        file.symlink_to("/dev/full")  # reads as empty, and takes no byte
        cluster.start()
        add(engine, 3)
        with (
            caplog.at_level(logging.WARNING),
            orchestrator(cluster.url) as orc,
            Working(Worker(orc, [FakeAgent()], 3), until_idle=True) as working,
        ):
            wait_until(lambda: said(caplog, "No space left on device"), 60)
            assert statuses(engine) == {"running": 3}
            cluster.stop()
            file.unlink()
            file.with_suffix(".aside").rename(file)
            cluster.start()
            working.join()
        assert query(engine, "SELECT attempt, status FROM runs") == [(1, "done")] * 3
        assert query(engine, "SELECT max(retry_count + lost_count) FROM tasks") == [(0,)]
        assert "Traceback" not in caplog.text


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to write files beyond *size* bytes (EFBIG) to what is started in the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_wal_that_cannot_grow(test_folder: Path, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture) -> None:
    """The server falls and cannot rise, as with a full WAL disk: outcomes wait until it can, and no task fails."""
    with Cluster(test_folder / "wal") as cluster, fresh_engine(cluster.url) as engine:
        schema.upgrade(cluster.url)
        query(engine, "SELECT pg_switch_wal()")
        cluster.stop()
        with files_of_at_most(8 << 20):  # half a segment
            cluster.start()
        add(engine, 3)
        gate = Gate(Outcome(OutcomeClass.DONE, result="kept"))
        with (
            caplog.at_level(logging.WARNING),
            orchestrator(cluster.url) as orc,
            Working(Worker(orc, [FakeAgent(behave=gate)], 3), until_idle=True) as working,
        ):
            wait_until(lambda: statuses(engine) == {"running": 3})
            piece = (
                "SELECT count(pg_logical_emit_message(true, 'fill', repeat('x', 1000000))) FROM generate_series(1, 16)"
            )
            with pytest.raises(DatabaseError):
                query(engine, piece)
            wait_until(lambda: cluster.server.status().pid is None, 60)
            gate.open()
            wait_until(lambda: said(caplog, "lost the database"), 60)
            cluster.start()
            working.join()
        assert "File too large" in cluster.server.log.read_text()
        assert query(engine, "SELECT attempt, status, result FROM runs") == [(1, "done", "kept")] * 3
        assert query(engine, "SELECT max(retry_count + lost_count) FROM tasks") == [(0,)]
        assert "Traceback" not in caplog.text


@pytest.mark.slow
def test_a_batch_that_takes_too_long_is_halved(engine: Engine, role_url: str) -> None:
    """With a statement_timeout that a large group commit cannot keep, smaller ones are made (57014)."""
    slow = "BEGIN PERFORM pg_sleep(0.02); RETURN NEW; END"
    query(engine, f"CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ {slow} $$")
    query(engine, "CREATE TRIGGER slow BEFORE INSERT ON runs FOR EACH ROW EXECUTE FUNCTION slow()")
    query(engine, "ALTER ROLE limited SET statement_timeout = '400ms'")  # 20 of 40 rows
    inside = 0
    all_inside = Gate()

    async def together(claim: Claim, live: Live, stop: Stop) -> Outcome:
        nonlocal inside
        inside += 1
        if inside == 40:
            all_inside.open()
        return await all_inside(claim, live, stop)

    try:
        add(engine, 40)
        with orchestrator(role_url) as orc:
            Worker(orc, [FakeAgent(behave=together)], 40).run(until_idle=True)
    finally:
        query(engine, "DROP FUNCTION slow() CASCADE")
    assert statuses(engine) == {"done": 40}
    assert query(
        engine, "SELECT attempt, status, count(*), count(DISTINCT recorded_at) > 1 FROM runs GROUP BY 1, 2"
    ) == [(1, "done", 40, True)]


@pytest.mark.slow
def test_sessions_that_are_cut_when_idle(
    engine: Engine, role_url: str, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
) -> None:
    """With an idle_session_timeout that is shorter than every pause, work goes on and the log stays quiet (57P05)."""
    query(engine, "ALTER ROLE limited SET idle_session_timeout = '400ms'")
    with (
        caplog.at_level(logging.WARNING),
        orchestrator(role_url, replace(QUICK, poll=1.0, heartbeat=1.0, sweep=1.0)) as orc,
        Working(Worker(orc, [FakeAgent()])) as working,
    ):
        wait_until(lambda: working.worker.id)
        for number in range(1, 6):
            threading.Event().wait(0.5)  # longer than the limit
            add(engine)
            wait_until(lambda number=number: statuses(engine) == {"done": number})  # type: ignore[misc]
        wait_until(lambda: said(caplog, "listening for new tasks again"))
    assert query(engine, "SELECT attempt, status FROM runs") == [(1, "done")] * 5
    assert said(caplog, "lost the database") <= 2  # a new one may be cut before its first use, on a slow machine
    assert said(caplog, "lost the connection that hears") == said(caplog, "listening for new tasks again") == 1
    assert "Traceback" not in caplog.text


@pytest.mark.slow
def test_no_connection_is_left(test_folder: Path, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture) -> None:
    """Others take every slot of the server (53300): the worker waits, and goes on when some are free again."""
    others: list[psycopg.Connection[object]] = []

    def fill(parameters: dict[str, object]) -> bool:
        try:
            others.append(psycopg.connect(**parameters))  # type: ignore[arg-type]
        except psycopg.OperationalError:
            return True
        return False

    with Cluster(test_folder / "narrow", {"max_connections": "12"}) as cluster, fresh_engine(cluster.url) as engine:
        schema.upgrade(cluster.url)
        add(engine)
        gate = Gate(Outcome(OutcomeClass.DONE, result="kept"))
        parameters = connection_parameters(cluster.url, application_name="another")
        with (
            caplog.at_level(logging.WARNING),
            orchestrator(cluster.url) as orc,
            Working(Worker(orc, [FakeAgent(behave=gate)])),
        ):
            gate.entered()
            with psycopg.connect(**parameters, autocommit=True) as admin:
                wait_until(lambda: fill(parameters))
                while not said(caplog, "lost the database"):
                    # Whoever is quicker takes the slot that a session of the worker leaves.
                    admin.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'orchestrator%'"
                    )
                    wait_until(lambda: fill(parameters))
                gate.open()
                threading.Event().wait(1)
            for each in others:
                each.close()
            wait_until(lambda: statuses(engine) == {"done": 1})
            add(engine)
            wait_until(lambda: statuses(engine) == {"done": 2})
            wait_until(lambda: said(caplog, "the database is back"), 60)
        assert query(engine, "SELECT attempt, status, result FROM runs") == [(1, "done", "kept")] * 2
        assert said(caplog, "lost the database") <= 2
        assert "Traceback" not in caplog.text


@pytest.mark.slow
def test_no_transaction_is_open_while_agents_work(
    engine: Engine, role_url: str, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """Ten commands outlast idle_in_transaction_session_timeout; no session is idle in transaction, none pins rows (S22)."""
    query(engine, "ALTER ROLE limited SET idle_in_transaction_session_timeout = '5s'")
    sample = (
        "SELECT count(*) FILTER (WHERE state LIKE 'idle in transaction%' AND now() - state_change > interval '1 s'),"
        " count(*) FILTER (WHERE state LIKE 'idle%' AND backend_xmin IS NOT NULL AND now() - state_change > interval '1 s'),"
        " count(*)"
        " FROM pg_stat_activity WHERE usename = 'limited'"
    )
    seen: list[tuple[int, int, int]] = []
    with Fleet(tmp_path) as fleet:
        worker = fleet.worker(role_url, "w", "--concurrency", "10")
        fleet.add(role_url, *["gate"] * 10)
        wait_until(lambda: len(fleet.read(what="begin")) == 10, 60)
        began = fleet.read(what="begin")[-1].at
        while fleet.read()[-1].at < began + 6:
            seen += [tuple(row) for row in query(engine, sample)]
            threading.Event().wait(0.2)
        fleet.open("gate")
        wait_until(lambda: statuses(engine) == {"done": 10})
        worker.process.terminate()
        assert worker.ended() == 0
        assert worker.lines("lost") == []
    assert [(idle, pinned) for idle, pinned, _ in seen if idle or pinned] == []
    assert max(count for _, _, count in seen) <= 4
