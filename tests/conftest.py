"""Fixtures for all tests: a PostgreSQL of their own, its schema, empty tables, and a check of what a test left behind.

The server is the embedded one, in a temporary folder, without fsync; ``ORCHESTRATOR_PG_BINDIR`` runs the suite on other
binaries. ``ORCHESTRATOR_TEST_URL`` names an existing database instead; its name must contain "test", since every
table in it is emptied again and again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import hypothesis
import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import Pool

from orchestrator.database import schema
from orchestrator.database.embedded import EmbeddedServer
from orchestrator.database.engine import connection_parameters, make_engine
from orchestrator.database.engine import sessions as make_sessions
from tests.commands import Cli
from tests.servers import FAST, new_database

KEPT = {schema.VERSION_TABLE, schema.REVISIONS_TABLE}
"""Tables that are not emptied between tests."""

_FOLDER = "orchestrator-tests-"

T = TypeVar("T")


class WaitUntil(Protocol):
    """``wait_until(condition)`` returns the first true value of ``condition()``."""

    def __call__(self, condition: Callable[[], T], timeout: float = 30) -> T: ...


# -- before the first test ---------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Make the process independent of who started it: signals, environment, and a home that is nobody's."""
    # Ignored signals are inherited (nohup, a CI runner in the background): a Ctrl-C test would then wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python itself sets it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # How long an example takes says something of the machine.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")
    keep = {"ORCHESTRATOR_TEST_URL", "ORCHESTRATOR_PG_BINDIR"}
    for name in list(os.environ):
        if name not in keep and name.startswith(("ORCHESTRATOR_", "PG")):
            del os.environ[name]
    for name in ("DATABASE_URL", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES"):
        os.environ.pop(name, None)
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.geteuid()}-{os.getpid()}-"))
    folder.chmod(0o711)  # the user that root drops to must pass through
    config.stash[_folder_key] = folder
    os.environ["ORCHESTRATOR_HOME"] = str(folder / "home")


_folder_key = pytest.StashKey[Path]()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop whatever embedded server a test started by the environment, and remove the folder."""
    folder = config.stash.get(_folder_key, None)
    if folder is not None:
        _remove(folder)


def _remove_abandoned() -> None:
    """Remove the servers and folders of test runs that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}{os.geteuid()}-*"):
        pid = folder.name.removeprefix(_FOLDER).split("-")[1]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            _remove(folder)
        except (ValueError, OSError):
            continue


def _remove(folder: Path) -> None:
    for base in folder.glob("*/postgres"):
        with contextlib.suppress(Exception):
            EmbeddedServer(base.parent).stop(force=True)
    shutil.rmtree(folder, ignore_errors=True)


# -- the database ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def test_folder(pytestconfig: pytest.Config) -> Path:
    """A temporary folder that the user of a server may pass through, as root too (pytest's own is closed to it)."""
    return pytestconfig.stash[_folder_key]


@pytest.fixture(scope="session")
def server_url(test_folder: Path) -> str:
    """The URL of the session's server: an empty database of the embedded one, or ``ORCHESTRATOR_TEST_URL``."""
    given = os.environ.get("ORCHESTRATOR_TEST_URL")
    if given:
        name = connection_parameters(given).get("dbname", "")
        if "test" not in name:
            pytest.exit(
                f"ORCHESTRATOR_TEST_URL names the database {name!r}; only one with 'test' in its name is emptied"
            )
        return given
    server = EmbeddedServer(test_folder / "server", settings=FAST)
    return server.start()


@pytest.fixture(scope="session")
def migrated_url(server_url: str) -> Iterator[str]:
    """A database with the schema at head, for the whole session. Tests use ``database_url``."""
    if os.environ.get("ORCHESTRATOR_TEST_URL"):
        schema.upgrade(server_url)
        yield server_url
        return
    with new_database(server_url, "test") as url:
        schema.upgrade(url)
        yield url


@pytest.fixture
def empty_database(server_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a database without any table, for this test alone (about 0.1 s)."""
    number = request.config.stash.setdefault(_counter_key, [0])
    number[0] += 1
    with new_database(server_url, f"test_empty_{os.getpid()}_{number[0]}") as url:
        yield url


_counter_key = pytest.StashKey[list[int]]()


@pytest.fixture(scope="session")
def _truncate(migrated_url: str) -> Iterator[Callable[[], None]]:
    """Empty the tables that have rows or have given out ids; most tests touch few, and TRUNCATE costs a file for each."""
    with psycopg.connect(
        **connection_parameters(migrated_url, application_name="tests"), autocommit=True
    ) as connection:
        names = [
            name
            for (name,) in connection.execute(
                "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND NOT relispartition"
                " AND relnamespace = current_schema()::regnamespace ORDER BY 1"
            )
            if name not in KEPT
        ]
        used = [
            sql.SQL("SELECT {} WHERE (SELECT is_called FROM {})").format(sql.Literal(table), sql.Identifier(sequence))
            for table, sequence in connection.execute(
                "SELECT t.relname, s.relname FROM pg_class AS s JOIN pg_depend AS d ON d.objid = s.oid"
                " JOIN pg_class AS t ON t.oid = d.refobjid WHERE s.relkind = 'S' AND d.deptype = 'i'"
            )
            if table in names
        ]
        filled = sql.SQL(" UNION ").join(
            [
                *(
                    sql.SQL("SELECT {} WHERE EXISTS (SELECT FROM {})").format(sql.Literal(name), sql.Identifier(name))
                    for name in names
                ),
                *used,
            ]
        )
        connection.execute("SET lock_timeout = '10s'")

        def truncate() -> None:
            try:
                found = [name for (name,) in connection.execute(filled)] if names else []
                if found:
                    tables = sql.SQL(", ").join(map(sql.Identifier, found))
                    connection.execute(sql.SQL("TRUNCATE {} RESTART IDENTITY CASCADE").format(tables))
            except psycopg.errors.LockNotAvailable:
                holders = connection.execute(
                    "SELECT pid, application_name, state, left(query, 100), pg_terminate_backend(pid)"
                    " FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
                ).fetchall()
                pytest.fail(f"an earlier test left sessions with locks (ended now): {holders}")

        yield truncate


@pytest.fixture
def database_url(migrated_url: str, _truncate: Callable[[], None]) -> str:
    """The URL of a database at head whose tables are empty."""
    _truncate()
    return migrated_url


@pytest.fixture(scope="session")
def _session_engine(migrated_url: str) -> Iterator[Engine]:
    engine = make_engine(migrated_url, pool_size=20, application_name="tests")
    yield engine
    engine.dispose()


@pytest.fixture
def engine(database_url: str, _session_engine: Engine) -> Engine:
    """An engine on the empty tables. It is shared: a test that breaks connections makes its own."""
    return _session_engine


@pytest.fixture
def sessions(engine: Engine) -> sessionmaker[Session]:
    """A factory of Sessions on the empty tables."""
    return make_sessions(engine)


@pytest.fixture
def cli(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line, in this process, on the empty tables and in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return Cli(database_url, tmp_path, monkeypatch, capsys)


# -- waiting, and what a test may not leave ----------------------------------------------------------------------------


@pytest.fixture
def wait_until() -> WaitUntil:
    """Wait for a condition, at most 30 s, looking every 5 ms; fails with the condition's name."""

    def wait(condition: Callable[[], T], timeout: float = 30) -> T:
        deadline = time.monotonic() + timeout
        pause = threading.Event()
        while not (value := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"still not true after {timeout:.0f} s: {getattr(condition, '__name__', condition)}")
            pause.wait(0.005)
        return value

    return wait


_checked_out: dict[int, str] = {}


def _on_checkout(_connection: Any, record: Any, _proxy: Any) -> None:
    _checked_out[id(record)] = "".join(traceback.format_stack(limit=12)[:-1])


def _on_checkin(_connection: Any, record: Any) -> None:
    _checked_out.pop(id(record), None)


event.listen(Pool, "checkout", _on_checkout)
event.listen(Pool, "checkin", _on_checkin)
event.listen(Pool, "detach", _on_checkin)


def _children() -> set[int]:
    """Pids of our direct children, zombies included; multiprocessing's helpers and the guardian stay for the session."""
    found: set[int] = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(int(pid) for pid in listing.read_text().split())
    return {pid for pid in found if not any(name in _command(pid) for name in (b"multiprocessing.", b"guardian.py"))}


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail the test that leaves a pooled connection out or a child process behind."""
    before = _children()
    yield
    deadline = time.monotonic() + 5
    pause = threading.Event()
    while (_checked_out or _children() - before) and time.monotonic() < deadline:
        pause.wait(0.005)
    faults = [f"a pooled connection is still checked out, by:\n{where}" for where in _checked_out.values()]
    _checked_out.clear()
    for pid in _children() - before:
        faults.append(f"process {pid} is still there: {_command(pid).replace(bytes(1), b' ').decode(errors='replace')}")
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if faults:
        pytest.fail("\n".join(faults))
