"""Passing faults: told apart on a real server, tried again, given up in time, and said once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from tenacity import wait_none

from orchestrator.database import transient as module
from orchestrator.database.engine import make_engine
from orchestrator.database.transient import Fault, classify, transient, unavailable
from orchestrator.errors import DatabaseUnavailable
from tests.servers import TcpProxy


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITS", dict.fromkeys(module.WAITS, wait_none()))
    monkeypatch.setattr(module, "_episode", module._Episode())


@pytest.fixture
def own(database_url: str) -> Iterator[Engine]:
    """An engine whose connections a test may break."""
    engine = make_engine(database_url)
    yield engine
    engine.dispose()


def raised_by(engine: Engine, statement: str) -> BaseException:
    """The error of a statement, as a repository would see it."""
    with pytest.raises(DBAPIError) as raised, engine.begin() as connection:
        connection.execute(text(statement))
    return raised.value


@pytest.mark.parametrize(
    ("state", "fault"),
    [
        ("40001", "conflict"),
        ("40P01", "conflict"),
        ("55P03", "conflict"),
        ("25006", "read_only"),
        ("53300", "full"),
        ("53100", "full"),
        ("57P01", "connection"),
        ("57P02", "connection"),
        ("57P03", "connection"),
        ("08006", "connection"),
        ("08P01", "connection"),
        ("57P04", "connection"),
        ("57014", "slow"),
        ("23505", None),
        ("22P05", None),
        ("22021", None),
        ("42P01", None),
        ("26000", None),
    ],
)
def test_faults_by_sqlstate(engine: Engine, state: str, fault: Fault | None) -> None:
    """Each SQLSTATE, raised by the server itself, falls into its class; data and programming errors into none."""
    error = raised_by(engine, f"DO $$ BEGIN RAISE EXCEPTION 'said' USING ERRCODE = '{state}'; END $$")
    assert classify(error) == fault


def test_faults_without_sqlstate(database_url: str, own: Engine) -> None:
    """A refused connection, a session that was ended, and a pool that is used up."""
    nowhere = make_engine("postgresql://127.0.0.1:1/nothing")
    with pytest.raises(DBAPIError) as refused:
        nowhere.connect()
    assert classify(refused.value) == "connection"
    with own.connect() as connection:
        other = connection.scalar(text("SELECT pg_backend_pid()"))
        with psycopg.connect(database_url) as killer:
            killer.execute("SELECT pg_terminate_backend(%s)", [other])
        with pytest.raises(DBAPIError) as ended:
            connection.execute(text("SELECT 1"))
    assert classify(ended.value) == "connection"
    assert classify(PoolTimeout()) == "full"
    assert classify(ValueError("no")) is None
    assert classify(psycopg.InterfaceError("no")) is None


def test_a_unit_is_done_again_after_its_connection_died(own: Engine) -> None:
    """The server ends the session in the middle of a unit: the unit runs again from its beginning and commits once."""
    tries: list[int] = []
    waits: list[tuple[Fault, float]] = []

    def unit() -> int:
        with own.begin() as connection:
            tries.append(1)
            added = connection.scalar(text("INSERT INTO tasks (agent) VALUES ('a') RETURNING id"))
            if len(tries) == 1:
                connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
            assert isinstance(added, int)
            return added

    transient(unit, give_up_after=None, on_wait=lambda fault, seconds: waits.append((fault, seconds)))
    assert len(tries) == 2
    assert waits == [("connection", 0.0)]
    with own.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM tasks")) == 1


def test_a_deadlock_is_done_again(own: Engine) -> None:
    """Two units lock two rows crosswise: both end well."""
    with own.begin() as connection:
        connection.execute(text("INSERT INTO tasks (id, agent) OVERRIDING SYSTEM VALUE VALUES (1, 'a'), (2, 'a')"))
    barrier = threading.Barrier(2, timeout=30)
    met: set[int] = set()
    failures: list[BaseException] = []

    def unit(first: int, second: int) -> None:
        with own.begin() as connection:
            connection.execute(text("SET LOCAL deadlock_timeout = '20ms'"))
            lock = text("UPDATE tasks SET title = 'x' WHERE id = :id")
            connection.execute(lock, {"id": first})
            if first not in met:  # only the first time: the loser comes back alone
                met.add(first)
                barrier.wait()
            connection.execute(lock, {"id": second})

    def run(first: int, second: int) -> None:
        try:
            transient(lambda: unit(first, second), give_up_after=60)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in ((1, 2), (2, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("error", [ValueError("ours"), IntegrityError("", {}, psycopg.errors.UniqueViolation())])
def test_other_errors_pass_through_at_once(error: Exception) -> None:
    """A broken constraint or a mistake of ours is not tried again and stays what it is."""
    tries: list[int] = []

    def unit() -> None:
        tries.append(1)
        raise error

    with pytest.raises(type(error)) as raised:
        transient(unit, give_up_after=None)
    assert raised.value is error
    assert len(tries) == 1


def test_giving_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 0 seconds one try is made; the error is ours, its cause the driver's, and it says what to do."""
    tries: list[int] = []
    cause = psycopg.OperationalError("connection to server failed\n\tIs it running?")

    def unit() -> None:
        tries.append(1)
        raise cause

    with pytest.raises(DatabaseUnavailable) as raised:
        transient(unit, give_up_after=0)
    assert len(tries) == 1
    assert raised.value.__cause__ is cause
    assert raised.value.exit_code == 6
    assert str(raised.value) == "the database cannot be reached: connection to server failed Is it running?"
    assert raised.value.hint
    # A wait that would end after the limit is not begun.
    monkeypatch.setattr(module, "WAITS", dict.fromkeys(module.WAITS, lambda _state: 3600.0))
    with pytest.raises(DatabaseUnavailable):
        transient(unit, give_up_after=60)
    assert len(tries) == 2


@pytest.mark.parametrize(("state", "says"), [("25006", "read-only"), ("53300", "no room"), ("40P01", "other sessions")])
def test_each_kind_of_fault_is_explained(engine: Engine, state: str, says: str) -> None:
    """The error for people names the kind of fault and its remedy."""
    error = unavailable(raised_by(engine, f"DO $$ BEGIN RAISE EXCEPTION 'said' USING ERRCODE = '{state}'; END $$"))
    assert says in str(error)
    assert error.hint


def test_a_shutdown_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour's wait ends when the event is set, and no further try is made."""
    monkeypatch.setattr(module, "WAITS", dict.fromkeys(module.WAITS, lambda _state: 3600.0))
    stop = threading.Event()
    tries: list[float] = []

    def unit() -> None:
        tries.append(time.monotonic())
        raise psycopg.OperationalError("down")

    def waiting(_fault: Fault, _seconds: float) -> None:
        stop.set()

    with pytest.raises(DatabaseUnavailable):
        transient(unit, give_up_after=None, on_wait=waiting, stop=stop)
    assert 1 <= len(tries) <= 2
    with pytest.raises(DatabaseUnavailable):  # one try is made even so
        transient(unit, give_up_after=None, stop=stop)


def test_an_episode_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Many threads, many failures: one line when the database is lost and one when it is back."""
    caplog.set_level(logging.INFO, "orchestrator.database")
    up = threading.Event()
    failed = threading.Semaphore(0)

    def unit() -> str:
        if not up.is_set():
            failed.release()
            raise psycopg.OperationalError("no route")
        return "done"

    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(transient(unit, give_up_after=None))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        assert failed.acquire(timeout=30)
    up.set()
    for thread in threads:
        thread.join()
    assert results == ["done"] * 4
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0] == "lost the database: no route; trying again"
    assert lines[1].startswith("the database is back after ")


def test_a_cut_line_and_a_refused_one(database_url: str) -> None:
    """While the network refuses, units wait; when it is back, they go through."""
    with TcpProxy(database_url) as proxy:
        engine = make_engine(proxy.url)
        count = iter(range(100))

        def unit() -> bool:
            with engine.connect() as connection:
                return bool(connection.scalar(text("SELECT 1")))

        def waiting(_fault: Fault, _seconds: float) -> None:
            if next(count) == 3:
                proxy.thaw()

        try:
            assert unit()
            proxy.refuse()
            assert transient(unit, give_up_after=60, on_wait=waiting)
            assert next(count) >= 4
        finally:
            engine.dispose()


def test_waits_grow_and_stay_below_their_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real waits of each kind: never negative, never above the cap, conflicts the shortest."""
    monkeypatch.undo()
    caps: dict[str, float] = {"connection": 5, "conflict": 1, "read_only": 5, "full": 15, "slow": 15}

    class State:
        attempt_number = 60

    for fault, cap in caps.items():
        wait: Callable[[object], float] = module.WAITS[fault]  # type: ignore[assignment]
        assert all(0 < wait(State()) <= cap for _ in range(50))
