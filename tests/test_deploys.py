"""Deploys: workers that are told to end, versions side by side, upgrades at once and upgrades that are killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Engine, text

from orchestrator.agents.protocol import Live, Stop
from orchestrator.database import schema
from orchestrator.database.engine import make_engine
from orchestrator.database.schema import head, status, upgrade
from orchestrator.database.transient import transient
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import SchemaOutOfDate
from orchestrator.worker import Worker
from tests.commands import ROOT, environment, process
from tests.conftest import WaitUntil
from tests.faults import AGENT, Fleet, ask, fresh_engine
from tests.servers import new_database
from tests.working import FakeAgent, Gate, Working, add, orchestrator, query, statuses

MIGRATION = '''"""A later one."""
from alembic import op
revision = "{revision}"
down_revision = "{after}"
branch_labels = None
depends_on = None
compatible = {compatible}
def upgrade():
    op.execute("{sql}")
def downgrade():
    pass
'''


def later_version(folder: Path, *, compatible: bool, sql: str = "ALTER TABLE tasks ADD later text DEFAULT ''") -> Path:
    """The migrations of the next version: ours and one more, 9001."""
    made = folder / "migrations"
    shutil.copytree(schema.migrations_directory(), made, ignore=shutil.ignore_patterns("__pycache__"))
    migration = MIGRATION.format(revision="9001", after=head(), compatible=compatible, sql=sql)
    (made / "versions" / "9001_later.py").write_text(migration)
    return made


def later(folder: Path, *arguments: str, url: str, cwd: Path) -> subprocess.Popen[str]:
    """Start a command of the next version."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.later_version", str(folder), *arguments],
        env=environment(url),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def revisions(url: str) -> list[tuple[str]]:
    """The rows of the version table."""
    return ask(url, "SELECT version_num FROM orchestrator_version")


# -- workers that are told to end --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_four_deploys_cost_a_task_nothing(
    engine: Engine, database_url: str, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """SIGTERM in mid-task, four times, with max_retries 0: handed back each time at once; the fifth worker ends it (S05)."""
    with Fleet(tmp_path) as fleet:
        (task,) = fleet.add(database_url, "gate", max_retries=0)
        for round_ in range(1, 5):
            worker = fleet.worker(database_url, f"w{round_}")
            (beginning,) = wait_until(lambda round_=round_: fleet.read(task, round_, "begin"))  # type: ignore[misc]
            started = psutil.Process(worker.process.pid).children(recursive=True)
            agents = [each for each in started if any(AGENT.name in word for word in each.cmdline())]
            assert agents
            assert beginning.attempt == round_
            worker.process.send_signal(signal.SIGTERM)
            assert worker.ended() == 0
            assert not any(agent.is_running() and agent.status() != "zombie" for agent in agents)
            assert query(engine, "SELECT status, attempt, retry_count, lost_count FROM tasks") == [
                ("pending", round_, 0, 0)
            ]
            assert query(engine, "SELECT count(*) FROM workers WHERE stopped_at IS NULL OR dead_at IS NOT NULL") == [
                (0,)
            ]
        fleet.open("gate")
        worker = fleet.worker(database_url, "w5", "--until-idle")
        assert worker.ended() == 0
    runs = query(engine, "SELECT attempt, status FROM runs ORDER BY attempt")
    assert runs == [*((round_, "interrupted") for round_ in range(1, 5)), (5, "done")]
    assert statuses(engine) == {"done": 1}


def test_only_the_new_workers_do_what_is_new(engine: Engine, database_url: str, wait_until: WaitUntil) -> None:
    """In the middle of a deploy: tasks of an agent that only new workers know wait for them and are never touched before."""
    gate = Gate()
    old, new = FakeAgent("a", behave=gate), FakeAgent("b")
    with ExitStack() as stack:
        stack.enter_context(Working(Worker(stack.enter_context(orchestrator(database_url)), [old], 5)))
        add(engine, 3, "b")
        add(engine, 5, "a")
        for _ in range(5):
            gate.entered()
        assert query(engine, "SELECT DISTINCT status, attempt, claimed_by FROM tasks WHERE agent = 'b'") == [
            ("pending", 0, None)
        ]
        both = [FakeAgent("a"), new]
        stack.enter_context(Working(Worker(stack.enter_context(orchestrator(database_url)), both, 5)))
        wait_until(lambda: query(engine, "SELECT count(*) FROM tasks WHERE status = 'done' AND agent = 'b'") == [(3,)])
        gate.open()
        wait_until(lambda: statuses(engine) == {"done": 8})
    assert sorted(new.started) == [1, 2, 3]
    assert query(engine, "SELECT DISTINCT attempt, status FROM runs") == [(1, "done")]


# -- versions side by side ---------------------------------------------------------------------------------------------


def test_a_worker_looks_at_the_schema_before_it_works(empty_database: str) -> None:
    """On an empty database it refuses, says what to do, and registers nothing; by itself it does not migrate."""
    with orchestrator(empty_database) as orc, pytest.raises(SchemaOutOfDate) as raised:
        Worker(orc, [FakeAgent()]).run()
    assert raised.value.message == f"schema is at nothing, needs {head()}: run orchestrator db upgrade"
    assert ask(empty_database, "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace") == [(0,)]


@pytest.mark.slow
def test_workers_and_schemas_that_do_not_fit(empty_database: str, tmp_path: Path) -> None:
    """Exit 6 with the remedy on an empty schema and on a later one; a compatible later one is worked on."""
    Fleet(tmp_path)
    command = ("worker", "--until-idle")
    said = process(*command, url=empty_database, cwd=tmp_path)
    assert (said.code, said.out) == (6, "")
    assert f"schema is at nothing, needs {head()}: run orchestrator db upgrade" in said.err
    for compatible, code in ((True, 0), (False, 6)):
        folder = tmp_path / str(compatible)
        folder.mkdir()
        migrations = later_version(folder, compatible=compatible)
        ask(empty_database, "DROP SCHEMA public CASCADE")
        ask(empty_database, "CREATE SCHEMA public")
        upgrading = later(migrations, "db", "upgrade", url=empty_database, cwd=tmp_path)
        assert upgrading.wait(60) == 0
        said_by_upgrade = upgrading.communicate()
        assert revisions(empty_database) == [("9001",)], said_by_upgrade
        said = process(*command, url=empty_database, cwd=tmp_path)
        assert said.code == code, said
    assert f"schema is at 9001, which this version does not know (it needs {head()})" in said.err
    assert "install the version of orchestrator that the other processes use" in said.err


@pytest.mark.slow
def test_a_rolling_upgrade(empty_database: str, tmp_path: Path, wait_until: WaitUntil) -> None:
    """Old workers work while the schema moves on beneath them, then beside new ones; none fails, no task is done twice."""
    upgrade(empty_database)
    migrations = later_version(tmp_path, compatible=True)

    async def work(_claim: Claim, live: Live, _stop: Stop) -> Outcome:
        live.write("stdout", "by the old one\n")
        return Outcome(OutcomeClass.DONE)

    with fresh_engine(empty_database) as engine, Fleet(tmp_path) as fleet, orchestrator(empty_database) as orc:
        fleet.open("gate")
        with Working(Worker(orc, [FakeAgent(behave=work)], 10, name="old")):
            added, moved = 0, later(migrations, "db", "upgrade", url=empty_database, cwd=tmp_path)
            while moved.poll() is None:
                orc.add_many([{"agent": "a"}] * 5)
                added += 5
                threading.Event().wait(0.02)
            assert moved.returncode == 0, moved.communicate()
            moved.communicate()
            assert revisions(empty_database) == [("9001",)]
            # The new one, with slow commands, gets its share only while the old one works as well.
            new = later(migrations, "worker", "--name", "new", url=empty_database, cwd=tmp_path)
            try:
                wait_until(lambda: query(engine, "SELECT 1 FROM workers WHERE name = 'new'"), 60)
                while not query(engine, "SELECT 1 FROM runs WHERE worker = 'new'"):
                    fleet.add(empty_database, *["gate"] * 20)
                    added += 20
                    threading.Event().wait(0.2)
                old_restarted = fleet.worker(empty_database, "old-again", "--until-idle")
                assert old_restarted.ended() == 0
                wait_until(lambda: statuses(engine) == {"done": added}, 60)
            finally:
                new.terminate()
                said = new.communicate(timeout=60)
            assert new.returncode == 0, said
        assert query(engine, "SELECT count(*), count(DISTINCT task_id), count(DISTINCT status) FROM runs") == [
            (added, added, 1)
        ]
        assert {name for (name,) in query(engine, "SELECT DISTINCT worker FROM runs")} >= {"old", "new"}
        assert query(engine, "SELECT count(*) FROM tasks WHERE retry_count + lost_count > 0 OR attempt > 1") == [(0,)]


def test_a_column_that_changes_its_type_beneath_a_prepared_statement(empty_database: str) -> None:
    """The first unit after the migration is tried again on a new connection; nobody has to restart anything."""
    ask(empty_database, "CREATE TABLE numbers (n int)")
    ask(empty_database, "INSERT INTO numbers VALUES (7)")
    engine = make_engine(empty_database)

    def unit() -> object:
        with engine.begin() as connection:
            return connection.scalar(text("SELECT n FROM numbers WHERE n = :n"), {"n": 7})

    try:
        assert {unit() for _ in range(10)} == {7}
        ask(empty_database, "ALTER TABLE numbers ALTER n TYPE bigint")
        assert transient(unit, give_up_after=20) == 7
    finally:
        engine.dispose()


# -- upgrades at once, and upgrades that are killed --------------------------------------------------------------------


@pytest.fixture
def databases(server_url: str) -> Iterator[list[str]]:
    """Twenty empty databases."""
    with ExitStack() as stack:
        yield [stack.enter_context(new_database(server_url, f"test_at_once_{os.getpid()}_{n}")) for n in range(20)]


@pytest.mark.slow
def test_six_upgrades_at_once_twenty_times(databases: list[str], tmp_path: Path) -> None:
    """From nothing, and from the revision before: all exit 0, the schema is at head, there is one version row (S44)."""
    migrations = later_version(tmp_path, compatible=False)
    for url in databases[10:]:
        upgrade(url)
    told = subprocess.run(
        [sys.executable, "-m", "tests.upgrades_at_once", "6", str(migrations), *databases],
        env=environment(None),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert told.stdout.splitlines() == ["0 0 0 0 0 0"] * 20, told
    assert [revisions(url) for url in databases] == [[("9001",)]] * 20


@pytest.mark.slow
def test_an_upgrade_that_is_killed(empty_database: str, tmp_path: Path, wait_until: WaitUntil) -> None:
    """SIGKILL at any moment of it leaves a whole revision, and the server lets go by itself: the next one succeeds."""
    migrations = later_version(
        tmp_path,
        compatible=False,
        sql="CREATE TABLE halfway (); SELECT pg_sleep(600) WHERE to_regclass('slowly') IS NOT NULL",
    )
    at_work = (
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND xact_start IS NOT NULL"
        " AND pid <> pg_backend_pid()"
    )
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")
    chance = random.Random(seed)
    ask(empty_database, "CREATE TABLE slowly ()")
    for _ in range(4):
        upgrading = later(migrations, "db", "upgrade", url=empty_database, cwd=tmp_path)
        wait_until(lambda: ask(empty_database, at_work), 60)
        threading.Event().wait(chance.uniform(0, 0.3))
        upgrading.kill()
        upgrading.communicate()
        assert status(empty_database).have in (None, head())
        assert ask(empty_database, "SELECT to_regclass('halfway')") == [(None,)]
        # Nobody ends that session: the server looks whether its client is still there.
        wait_until(lambda: not ask(empty_database, at_work), 60)
    ask(empty_database, "DROP TABLE slowly")
    upgrading = later(migrations, "db", "upgrade", url=empty_database, cwd=tmp_path)
    assert upgrading.wait(60) == 0, upgrading.communicate()
    upgrading.communicate()
    assert revisions(empty_database) == [("9001",)]
