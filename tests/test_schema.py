"""The schema: upgrades by many at once, half-way kills, versions that do not fit, and models equal to migrations."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from alembic import command
from sqlalchemy import Engine

from orchestrator.database import schema
from orchestrator.database.engine import make_engine
from orchestrator.database.schema import Status, head, status, upgrade
from orchestrator.domain.entities import Base
from orchestrator.errors import DatabaseUnavailable, InvalidInput, SchemaOutOfDate
from tests.conftest import WaitUntil
from tests.servers import PgBouncer

UPGRADE = """
import sys
from orchestrator.database import schema
schema.upgrade(sys.argv[1], say=lambda line: print(line, file=sys.stderr, flush=True))
print(schema.status(sys.argv[1]).have)
"""

NEXT = '''"""A later one."""
from alembic import op
revision = "{revision}"
down_revision = "{after}"
branch_labels = None
depends_on = None
compatible = {compatible}
def upgrade():
    op.execute("{sql}")
def downgrade():
    op.execute("SELECT 1")
'''


class Later:
    """A version of the project that has more migrations than this one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder / "migrations"
        shutil.copytree(schema.migrations_directory(), self._folder, ignore=shutil.ignore_patterns("__pycache__"))
        self._monkeypatch = monkeypatch

    def add(self, revision: str, after: str, *, compatible: bool = False, sql: str = "SELECT 1") -> None:
        """Add a migration."""
        (self._folder / "versions" / f"{revision}_later.py").write_text(
            NEXT.format(revision=revision, after=after, compatible=compatible, sql=sql)
        )

    def call(self, function: Callable[[], object]) -> None:
        """Call ``function`` as that version would."""
        with self._monkeypatch.context() as patch:
            patch.setattr(schema, "migrations_directory", lambda: self._folder)
            function()


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Later:
    """A later version, without further migrations so far."""
    return Later(tmp_path, monkeypatch)


@pytest.fixture
def empty_engine(empty_database: str) -> Iterator[Engine]:
    """An engine on a database without tables."""
    engine = make_engine(empty_database, pool_size=2)
    yield engine
    engine.dispose()


def rows(url: str, query: str) -> list[tuple[object, ...]]:
    """What a query returns, on a connection of its own."""
    with psycopg.connect(url) as connection:
        return connection.execute(query.encode()).fetchall()


def test_from_nothing_to_head(empty_database: str) -> None:
    """An empty database is upgraded, the second upgrade does nothing, and both say what was there before."""
    assert status(empty_database) == Status(None, head(), False)
    assert upgrade(empty_database).have is None
    assert status(empty_database) == Status(head(), head(), True)
    assert upgrade(empty_database).have == head()
    assert rows(empty_database, "SELECT version_num FROM orchestrator_version") == [(head(),)]
    assert (head(),) in rows(empty_database, "SELECT revision FROM orchestrator_revisions")


# Alembic compares the text of a generated column, not its meaning; the next test compares what PostgreSQL made of it.
@pytest.mark.filterwarnings("ignore:Computed default on")
def test_alembic_finds_nothing_to_do(engine: Engine) -> None:
    """``alembic check`` is content with the models and the migrations."""
    config = schema.configuration()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.check(config)


MADE = """
SELECT c.relname, 'column', a.attname,
       concat_ws(' ', format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity, a.attgenerated,
                 pg_get_expr(d.adbin, d.adrelid))
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE c.relkind = 'r' AND c.relnamespace = current_schema()::regnamespace AND c.relname NOT LIKE 'orchestrator%'
UNION ALL
SELECT conrelid::regclass::text, 'constraint', conname, pg_get_constraintdef(oid)
FROM pg_constraint WHERE connamespace = current_schema()::regnamespace AND conrelid::regclass::text NOT LIKE 'orchestrator%'
UNION ALL
SELECT tablename, 'index', indexname, indexdef
FROM pg_indexes WHERE schemaname = current_schema() AND tablename NOT LIKE 'orchestrator%'
"""


def test_the_models_equal_the_migrations(database_url: str, empty_engine: Engine, empty_database: str) -> None:
    """Columns, defaults, checks, keys and indexes: PostgreSQL says the same of both, word for word."""
    Base.metadata.create_all(empty_engine)
    by_models, by_migrations = set(rows(empty_database, MADE)), set(rows(database_url, MADE))
    assert by_models - by_migrations == set()
    assert by_migrations - by_models == set()
    assert len(by_models) > 50


def test_an_old_schema_is_explained(empty_engine: Engine) -> None:
    """The error names what is there, what is needed, and the command; its exit code is 6."""
    with pytest.raises(SchemaOutOfDate) as raised:
        schema.check(empty_engine)
    assert str(raised.value) == f"schema is at nothing, needs {head()}: run orchestrator db upgrade"
    assert raised.value.exit_code == 6
    assert raised.value.hint == "run orchestrator db upgrade"


def test_one_compatible_step_ahead(empty_engine: Engine, empty_database: str, later: Later) -> None:
    """A schema one revision newer and marked compatible is good enough for this version."""
    later.add("9001", head(), compatible=True)
    later.call(lambda: upgrade(empty_database))
    schema.check(empty_engine)
    assert status(empty_database) == Status("9001", head(), True)
    assert upgrade(empty_database).have == "9001"
    assert status(empty_database).have == "9001"


@pytest.mark.parametrize(
    "steps", [[("9001", False)], [("9001", True), ("9002", True)], [("9001", False), ("9002", True)]]
)
def test_other_newer_schemas_are_refused(
    empty_engine: Engine, empty_database: str, later: Later, steps: list[tuple[str, bool]]
) -> None:
    """Two steps ahead, or one that is not marked compatible: this version does not work with it, nor changes it."""
    after = head()
    for revision, compatible in steps:
        later.add(revision, after, compatible=compatible)
        after = revision
    later.call(lambda: upgrade(empty_database))
    for call in (lambda: schema.check(empty_engine), lambda: upgrade(empty_database)):
        with pytest.raises(SchemaOutOfDate, match=f"schema is at {after}, which this version does not know"):
            call()
    assert status(empty_database).have == after


def test_from_the_previous_revision(empty_database: str, later: Later) -> None:
    """A later version upgrades what this one made, and keeps the list of revisions."""
    upgrade(empty_database)
    later.add("9001", head(), compatible=True)
    later.call(lambda: upgrade(empty_database))
    assert rows(empty_database, "SELECT revision, compatible FROM orchestrator_revisions WHERE revision = '9001'") == [
        ("9001", True)
    ]


def test_a_failing_migration_changes_nothing(empty_database: str, later: Later) -> None:
    """All migrations of one upgrade are one transaction: the first is undone when the second fails."""
    upgrade(empty_database)
    later.add("9001", head(), sql="CREATE TABLE halfway ()")
    later.add("9002", "9001", sql="SELECT 1/0")
    with pytest.raises(Exception, match="division by zero"):
        later.call(lambda: upgrade(empty_database))
    assert status(empty_database) == Status(head(), head(), True)
    assert rows(empty_database, "SELECT to_regclass('halfway')") == [(None,)]


def test_offline_sql_makes_the_same_schema(empty_database: str) -> None:
    """The printed SQL, run by hand, gives a database that this version accepts."""
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute(schema.script().encode())
    assert status(empty_database).compatible
    assert rows(empty_database, "SELECT count(*) FROM orchestrator_revisions") != [(0,)]


@pytest.mark.slow
def test_the_alembic_command(empty_database: str) -> None:
    """``alembic upgrade head`` in a checkout does the same as ``db upgrade``, and ``--sql`` needs no database."""
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"ORCHESTRATOR_DATABASE_URL": empty_database}
    alembic = [sys.executable, "-m", "alembic"]
    subprocess.run([*alembic, "upgrade", "head"], cwd=root, env=environment, check=True, capture_output=True)
    assert status(empty_database).compatible
    printed = subprocess.run(
        [*alembic, "upgrade", "head", "--sql"], cwd=root, check=True, capture_output=True, text=True
    )
    assert "CREATE TABLE tasks" in printed.stdout


def test_foreign_tables_are_not_touched(empty_database: str) -> None:
    """A database that has a table of one of our names already is refused with a way out."""
    with psycopg.connect(empty_database) as connection:
        connection.execute("CREATE TABLE tasks (mine int)")
    with pytest.raises(InvalidInput, match="tables that are not ours") as raised:
        upgrade(empty_database)
    assert raised.value.hint is not None
    assert "search_path" in raised.value.hint
    assert status(empty_database).have is None


def test_a_schema_of_its_own(empty_database: str) -> None:
    """With the remedy of the hint, both live in one database."""
    with psycopg.connect(empty_database) as connection:
        connection.execute("CREATE TABLE tasks (mine int)")
        connection.execute("CREATE SCHEMA own")
    url = f"{empty_database}&options=-csearch_path%3Down"
    upgrade(url)
    assert status(url).compatible
    assert status(empty_database).have is None


def test_no_right_to_create(empty_database: str) -> None:
    """A user who may not create tables is told so."""
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute("CREATE ROLE orchestrator_test_reader LOGIN")
        try:
            connection.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
            with pytest.raises(InvalidInput, match="may not do this"):
                upgrade(empty_database.replace("//orchestrator@", "//orchestrator_test_reader@"))
        finally:
            connection.execute("DROP ROLE orchestrator_test_reader")


def test_nobody_answers() -> None:
    """A server that is down: exit code 6, for each call."""
    url = "postgresql://127.0.0.1:1/nothing"
    for call in (status, upgrade):
        with pytest.raises(DatabaseUnavailable) as raised:
            call(url)
        assert type(raised.value) is DatabaseUnavailable
        assert raised.value.__cause__ is not None


def test_waiting_for_another_upgrade(empty_database: str) -> None:
    """While another process holds the lock it is waited for, and said; then there is nothing left to do."""
    told = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            upgrade(empty_database, say=lambda _line: told.set())
        except BaseException as error:
            failures.append(error)

    with psycopg.connect(empty_database) as holder:
        holder.execute("SELECT pg_advisory_xact_lock(%s)", [schema.LOCK_KEY])
        thread = threading.Thread(target=run)
        thread.start()
        assert told.wait(30)
        assert status(empty_database).have is None
        holder.rollback()
    thread.join()
    assert failures == []
    assert status(empty_database).compatible


def test_the_wait_has_a_limit(empty_database: str) -> None:
    """Whoever waits in vain is told so with exit code 6."""
    with psycopg.connect(empty_database) as holder:
        holder.execute("SELECT pg_advisory_xact_lock(%s)", [schema.LOCK_KEY])
        with pytest.raises(DatabaseUnavailable, match="could not be upgraded within 0 s"):
            upgrade(empty_database, wait=0.05)


def test_tables_in_use(empty_database: str, later: Later, monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration waits only briefly for a busy table, so that others are not stuck behind it, and tries again."""
    upgrade(empty_database)
    later.add("9001", head(), sql="ALTER TABLE tasks ADD COLUMN later int")
    monkeypatch.setattr(schema, "DDL_LOCK_SECONDS", 0.05)
    with psycopg.connect(empty_database) as holder:
        holder.execute("SELECT * FROM tasks")
        lines: list[str] = []

        def say(line: str) -> None:
            lines.append(line)
            holder.rollback()

        later.call(lambda: upgrade(empty_database, say=say))
    assert lines == ["tables are in use by other sessions; trying again"]
    assert rows(empty_database, "SELECT version_num FROM orchestrator_version") == [("9001",)]


@pytest.mark.slow
def test_six_at_once(empty_database: str) -> None:
    """Six processes upgrade an empty database at the same moment: all succeed, and there is one version row."""
    command_line = [sys.executable, "-c", UPGRADE, empty_database]
    started = [
        subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(6)
    ]
    results = [(*process.communicate(timeout=100), process.returncode) for process in started]
    assert [(out.strip(), code) for out, _, code in results] == [(head(), 0)] * 6, results
    assert rows(empty_database, "SELECT version_num FROM orchestrator_version") == [(head(),)]


def test_six_threads_at_once(empty_database: str) -> None:
    """The same in one process."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            upgrade(empty_database)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert rows(empty_database, "SELECT version_num FROM orchestrator_version") == [(head(),)]


@pytest.mark.slow
def test_killed_half_way(empty_database: str, tmp_path: Path, wait_until: WaitUntil) -> None:
    """SIGKILL in the middle of a migration leaves the revision that was there; the next upgrade works."""
    folder = tmp_path / "migrations"
    shutil.copytree(schema.migrations_directory(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    upgrade(empty_database)
    later = NEXT.format(
        revision="9001", after=head(), compatible=False, sql="CREATE TABLE halfway (); SELECT pg_sleep(600)"
    )
    (folder / "versions" / "9001_later.py").write_text(later)
    code = (
        "from pathlib import Path; from orchestrator.database import schema\n"
        f"schema.migrations_directory = lambda: Path({str(folder)!r})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code + UPGRADE, empty_database], stderr=subprocess.DEVNULL)
    sleeping = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
    wait_until(lambda: rows(empty_database, sleeping))
    process.send_signal(signal.SIGKILL)
    process.wait()
    # The server notices a client that is gone only when it writes to it; an operator would do this.
    rows(empty_database, f"SELECT pg_terminate_backend(pid) FROM ({sleeping}) AS half")
    wait_until(lambda: not rows(empty_database, sleeping))
    assert status(empty_database) == Status(head(), head(), True)
    assert rows(empty_database, "SELECT to_regclass('halfway')") == [(None,)]
    assert upgrade(empty_database).compatible


@pytest.mark.real
def test_three_at_once_through_a_pooler(empty_database: str) -> None:
    """Behind PgBouncer in transaction mode too, with fewer connections than upgraders."""
    failures: list[BaseException] = []
    with PgBouncer(empty_database, pool_size=2) as pooler:

        def run() -> None:
            try:
                upgrade(pooler.url)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert rows(empty_database, "SELECT version_num FROM orchestrator_version") == [(head(),)]


def test_migrations_are_found_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package has them inside; a broken one says where they were expected."""
    package = tmp_path / "orchestrator"
    (package / "_migrations").mkdir(parents=True)
    (package / "_migrations" / "env.py").touch()
    monkeypatch.setattr(schema, "__file__", str(package / "database" / "schema.py"))
    assert schema.migrations_directory() == package / "_migrations"
    (package / "_migrations" / "env.py").unlink()
    with pytest.raises(InvalidInput, match="migrations are missing"):
        schema.migrations_directory()
