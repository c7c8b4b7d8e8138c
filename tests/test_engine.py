"""Engines: which URLs are accepted, what is said about the others, and what a connection is like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import pq
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.database import lines
from orchestrator.database.engine import connection_parameters, make_engine, shown
from orchestrator.database.transient import classify
from orchestrator.errors import InvalidInput
from tests.servers import Cluster, PgBouncer, TcpProxy, database_of


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg", "postgres"])
def test_spellings_of_one_url(scheme: str) -> None:
    """The spellings of libpq, SQLAlchemy and hosters mean the same."""
    found = connection_parameters(f"{scheme}://ann:s%40crt@db.example:6543/work?sslmode=require")
    expected = {"user": "ann", "password": "s@crt", "host": "db.example", "port": "6543", "dbname": "work"}
    assert {name: found[name] for name in expected} == expected
    assert found["sslmode"] == "require"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u@a:5433,b:5434/d?target_session_attrs=read-write",
        "postgresql://u@/d?host=a:5433&host=b:5434&target_session_attrs=read-write",
        "postgresql://u@/d?host=a,b&port=5433,5434&target_session_attrs=read-write",
    ],
)
def test_several_hosts(url: str) -> None:
    """Several hosts, in each way to write them, arrive as libpq's list."""
    found = connection_parameters(url)
    assert (found["host"], found["port"]) == ("a,b", "5433,5434")
    assert found["target_session_attrs"] == "read-write"


def test_the_url_wins_over_the_defaults() -> None:
    """Keepalives and timeouts are set unless the URL sets them; the text encoding is ours alone."""
    found = connection_parameters("postgresql://h/d?connect_timeout=3&application_name=mine&client_encoding=latin1")
    assert found["connect_timeout"] == "3"
    assert found["application_name"] == "mine"
    assert found["client_encoding"] == "utf8"
    assert {"keepalives", "keepalives_idle", "tcp_user_timeout"} <= found.keys()
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    assert found.keys() <= known


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "is empty"),
        ("   ", "is empty"),
        ("host=localhost", "no scheme"),
        ("localhost/db", "no scheme"),
        ("mysql://u:hunter2@h/d", "begins with 'mysql'"),
        ("sqlite:///file.db", "begins with 'sqlite'"),
        ("postgresql+psycopg2://u:hunter2@h/d", "driver 'psycopg2'"),
        ("postgresql+asyncpg://u:hunter2@h/d", "driver 'asyncpg'"),
        ("postgresql://u:hunter2@h/d?bogus=1", "bogus"),
        ("postgresql://u:hunter2@h/d?sslmode", "sslmode"),
        ("postgresql://u:hunter%2@h/d", "not valid"),
        ("postgresql://u:hunter%zz2@h/d", "not valid"),
        ("postgresql://u:hun@ter2@h/d", "must be encoded"),
        ("postgresql://u:hun/ter2@h/d", "must be encoded"),
        ("postgresql://u:hun?ter2@h/d", "must be encoded"),
        ("postgresql://u:hun#ter2@h/d", "must be encoded"),
    ],
)
def test_a_bad_url_is_explained(url: str, says: str) -> None:
    """What is wrong is named with a hint; no part of the password is shown."""
    with pytest.raises(InvalidInput, match=says) as raised:
        make_engine(url)
    assert raised.value.hint
    told = f"{raised.value} {raised.value.hint} {raised.value.__cause__}"
    assert not any(piece in told for piece in ("hunter", "hun", "ter2"))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://u:hunter2@h:1/d?x=1", "postgresql://u:***@h:1/d?x=1"),
        ("postgresql://u@h/d", "postgresql://u@h/d"),
        ("postgresql:///d?user=u&password=hunter2&host=h", "postgresql:///d?user=u&password=***&host=h"),
        ("postgresql://h/d?sslpassword=hunter2", "postgresql://h/d?sslpassword=***"),
        ("postgresql://u:hun@ter2@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:hun/ter2@h/d", "postgresql://***@h/d"),
        ("u:hunter2@h", "(not shown: it does not begin with postgresql://)"),
    ],
)
def test_a_url_as_it_may_be_shown(url: str, expected: str) -> None:
    """Passwords are replaced wherever they can stand."""
    assert shown(url) == expected


def test_a_wrong_pooler_is_refused() -> None:
    """A misspelled pooler would break prepared statements much later."""
    with pytest.raises(InvalidInput, match="'transactional'"):
        make_engine("postgresql://h/d", pooler="transactional")


def test_nothing_connects_until_it_is_used() -> None:
    """Making an engine for a server that is down is no error."""
    make_engine("postgresql://127.0.0.1:1/d").dispose()


def test_a_connection_keeps_the_session_as_it_was(database_url: str) -> None:
    """The time zone is the server's or the user's; the name is ours; the database speaks UTF-8 with us."""
    engine = make_engine(database_url, application_name="orchestrator worker x")
    try:
        with engine.connect() as connection:
            reset, zone = connection.execute(
                text("SELECT reset_val, setting FROM pg_settings WHERE name = 'TimeZone'")
            ).one()
            assert zone == reset
            assert connection.scalar(text("SHOW application_name")) == "orchestrator worker x"
            assert connection.scalar(text("SHOW client_encoding")) == "UTF8"
            assert connection.scalar(text("SELECT 'Ж'")) == "Ж"
    finally:
        engine.dispose()


def test_the_pool_has_a_hard_limit(database_url: str) -> None:
    """No overflow: the number of connections is a promise."""
    engine = make_engine(database_url, pool_size=1)
    engine.pool._timeout = 0.01  # type: ignore[attr-defined]
    try:
        with engine.connect(), pytest.raises(PoolTimeout):
            engine.connect()
    finally:
        engine.dispose()


def test_entities_stay_readable_after_the_commit(sessions: sessionmaker[Session]) -> None:
    """What a unit of work returns is read after its Session is gone."""
    assert sessions.kw["expire_on_commit"] is False


def test_another_encoding_is_refused(server_url: str) -> None:
    """A LATIN1 database is refused at the first connection, with the way to make a right one."""
    name = "test_latin1"
    parameters = connection_parameters(server_url)
    with psycopg.connect(**parameters, autocommit=True) as admin:
        provider = "LOCALE_PROVIDER libc" if admin.info.server_version >= 150000 else ""
        admin.execute(
            f"CREATE DATABASE {name} ENCODING 'LATIN1' TEMPLATE template0 {provider} LC_COLLATE 'C' LC_CTYPE 'C'".encode()
        )
        engine = make_engine(database_of(server_url, name))
        try:
            with pytest.raises(InvalidInput, match="LATIN1, expected UTF8") as raised:
                engine.connect()
            assert raised.value.hint is not None
            assert "ENCODING 'UTF8'" in raised.value.hint
        finally:
            engine.dispose()
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def test_a_read_only_server_loses_its_connections(database_url: str) -> None:
    """After a failover the old primary still answers: its connections are dropped at the first refusal."""
    engine: Engine = make_engine(database_url)
    try:
        with engine.connect() as connection:
            first = connection.scalar(text("SELECT pg_backend_pid()"))
        with engine.connect() as connection, pytest.raises(DBAPIError) as raised:
            connection.execute(text("SELECT set_config('transaction_read_only', 'on', true), nextval('tasks_id_seq')"))
        assert raised.value.connection_invalidated
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT pg_backend_pid()")) != first
    finally:
        engine.dispose()


def test_reset_connections_are_replaced(database_url: str) -> None:
    """What ended in its idle time is replaced without a failed statement, and without a ping before every unit."""
    with TcpProxy(database_url) as proxy:
        engine = make_engine(proxy.url, pool_size=3)
        try:
            connections = [engine.connect() for _ in range(3)]
            for connection in connections:
                connection.close()
            proxy.cut()
            for _ in range(3):
                with engine.connect() as connection:
                    assert connection.scalar(text("SELECT 1")) == 1
        finally:
            engine.dispose()


def test_a_client_that_vanished_in_mid_transaction_keeps_no_lock(
    engine: Engine, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line is dead and nobody has told the server: the row is free after a while, and the client is told so."""
    monkeypatch.setattr(lines, "ABANDONED", 1)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO tasks (agent) VALUES ('a')"))
    with TcpProxy(database_url) as proxy:
        vanished = make_engine(proxy.url)
        with vanished.connect() as connection:
            connection.execute(text("SELECT id FROM tasks FOR UPDATE"))
            proxy.freeze()
            with engine.begin() as other:
                other.execute(text("SET LOCAL lock_timeout = '60s'"))
                assert len(other.execute(text("SELECT id FROM tasks FOR UPDATE")).all()) == 1
            proxy.thaw()
            with pytest.raises(DBAPIError) as caught:
                connection.execute(text("SELECT 1"))
            assert classify(caught.value) == "connection"
        with vanished.connect() as connection:
            connection.execute(text("SELECT 1"))
            connection.commit()
            raw = connection.connection.driver_connection
            assert raw is not None
            raw.autocommit = True
            assert raw.execute("SHOW idle_in_transaction_session_timeout").fetchone() == ("0",)
        vanished.dispose()


def test_a_line_that_was_lost_within_a_pipeline_is_not_spoken_to(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver may leave a dead connection in pipeline mode, where not even ROLLBACK can be said: it is dropped."""

    def lost(cursor: psycopg.Cursor[Any], *_: object, **__: object) -> None:
        cursor.connection.pgconn.enter_pipeline_mode()
        raise psycopg.OperationalError("cannot exit pipeline mode while busy")

    with monkeypatch.context() as patch:
        patch.setattr(engine.dialect, "do_executemany", lost)
        with pytest.raises(DBAPIError) as caught, engine.begin() as connection:
            connection.execute(text("SELECT CAST(:n AS int)"), [{"n": 1}, {"n": 2}])
    assert caught.value.connection_invalidated
    assert classify(caught.value) == "connection"
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
    assert caplog.records == []


@pytest.mark.real
def test_behind_a_pooler_in_transaction_mode(database_url: str) -> None:
    """A statement that was used often goes on working when the pooler changes the connection beneath it."""
    statement = text("SELECT CAST(:n AS int)")
    with PgBouncer(database_url, pool_size=2) as pooler:
        engine = make_engine(pooler.url, pooler="transaction")
        try:
            with engine.connect() as often, engine.connect() as other:
                for n in range(20):
                    with often.begin():
                        assert often.scalar(statement, {"n": n}) == n
                with other.begin():  # takes the server connection that was used last
                    other.execute(text("SELECT 1"))
                    with often.begin():
                        assert often.scalar(statement, {"n": 7}) == 7
        finally:
            engine.dispose()


@pytest.mark.slow
def test_a_failover_finds_the_primary(test_folder: Path) -> None:
    """With both hosts in the URL the promoted standby is used after the primary's death."""
    with Cluster(test_folder / "primary") as primary:
        with primary.standby(test_folder / "standby") as standby:
            hosts = f"{primary.server.sock},{standby.server.sock}"
            url = f"postgresql://orchestrator@/orchestrator?host={hosts}&port=5432,5432&target_session_attrs=read-write"
            engine = make_engine(url)
            try:
                with engine.connect() as connection:
                    assert connection.scalar(text("SHOW unix_socket_directories")) == str(primary.server.sock)
                primary.kill()
                with psycopg.connect(standby.url) as admin:
                    admin.execute("SELECT pg_promote()")
                with engine.connect() as connection:
                    assert connection.scalar(text("SHOW unix_socket_directories")) == str(standby.server.sock)
            finally:
                engine.dispose()
