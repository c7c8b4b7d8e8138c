"""Everything a worker does, through Debian's PgBouncer in transaction mode with three server connections (S21)."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine

from orchestrator.agents.protocol import Live, Stop
from orchestrator.database import transient
from orchestrator.database.notify import Listener
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.liveness import identity
from orchestrator.repositories.filters import TaskFilter
from orchestrator.worker import Worker
from orchestrator.worker.watchdog import Watchdog
from tests.commands import start
from tests.conftest import WaitUntil
from tests.faults import Fleet
from tests.servers import PgBouncer
from tests.working import QUICK, FakeAgent, Working, add, orchestrator, query, statuses, until_stopped

pytestmark = pytest.mark.real


@pytest.fixture
def pooler(database_url: str) -> Iterator[PgBouncer]:
    """The pooler in front of the empty tables."""
    with PgBouncer(database_url, pool_size=3) as made:
        yield made


@pytest.fixture(autouse=True)
def _new_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other test's outage is going on."""
    monkeypatch.setattr(transient, "_episode", transient._Episode())


def log_of(pooler: PgBouncer) -> str:
    """What the pooler complained about."""
    return "\n".join(re.findall(r".*(?:ERROR|WARNING).*", (pooler.folder / "log").read_text()))


@pytest.mark.parametrize("setting", ["transaction", "none"])
def test_four_workers_share_three_connections(
    engine: Engine, pooler: PgBouncer, caplog: pytest.LogCaptureFixture, setting: str
) -> None:
    """500 tasks, orphans of a dead worker among them: each done once, no error of statements, renewals in time.

    With the setting and without it: the pooler is found out.
    """
    add(engine, 500)
    with orchestrator(pooler.url, replace(QUICK, pooler=setting)) as orc:
        dead = orc.register(identity(), name="dead", slots=20, agents=["a"])
        agent = FakeAgent()
        assert len(orc.claim(dead, [orc.known(agent)], 20).claims) == 20
    query(engine, "UPDATE workers SET dead_at = now(), dead_why = 'for the test' WHERE name = 'dead'")

    async def work(_claim: Claim, live: Live, _stop: Stop) -> Outcome:
        live.write("stdout", "a line\n")
        return Outcome(OutcomeClass.DONE, result={"worked": True})

    with caplog.at_level(logging.WARNING), ExitStack() as stack:
        running = []
        for number in range(4):
            orc = stack.enter_context(orchestrator(pooler.url, replace(QUICK, pooler=setting)))
            worker = Worker(orc, [FakeAgent(behave=work)], 10, name=f"w{number}")
            running.append(stack.enter_context(Working(worker, until_idle=True)))
        for each in running:
            each.thread.join(90)
            each.join()
    assert statuses(engine) == {"done": 500}
    assert query(engine, "SELECT status, attempt, count(*) FROM runs GROUP BY 1, 2 ORDER BY 2, 1") == [
        ("done", 1, 480),
        ("lost", 1, 20),
        ("done", 2, 20),
    ]
    assert query(engine, "SELECT count(DISTINCT task_id) FROM run_events") == [(500,)]
    assert query(engine, "SELECT count(*) FROM workers WHERE dead_at IS NOT NULL AND name <> 'dead'") == [(0,)]
    assert "Traceback" not in caplog.text
    assert "lost the database" not in caplog.text
    assert log_of(pooler) == ""
    found_out = sum("a connection pooler is in between" in record.getMessage() for record in caplog.records)
    assert found_out == (0 if setting == "transaction" else 4)


def test_nothing_of_a_session_is_left_behind(engine: Engine, pooler: PgBouncer, database_url: str) -> None:
    """After the work the pooled sessions have no prepared statement, no subscription, no advisory lock, no setting."""

    add(engine, 50)
    with orchestrator(pooler.url) as orc:
        Worker(orc, [FakeAgent()], 5).run(until_idle=True)
    for _ in range(6):
        with psycopg.connect(pooler.url, autocommit=True) as stranger, stranger.transaction():
            question = (
                "SELECT (SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM pg_listening_channels()),"
                " (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()),"
                " current_setting('statement_timeout'), current_setting('transaction_read_only'),"
                " current_setting('enable_seqscan'), current_setting('idle_in_transaction_session_timeout')"
            )
            assert stranger.execute(question, prepare=False).fetchall() == [(0, 0, 0, "0", "off", "on", "0")]


def test_cancel_and_watchdog_and_hints(engine: Engine, pooler: PgBouncer, wait_until: WaitUntil) -> None:
    """A cancel request reaches the agent by the poll; a one-time watchdog sweeps; what is added is found by the poll."""
    with orchestrator(pooler.url, replace(QUICK, pooler="transaction")) as orc:
        with Working(Worker(orc, [FakeAgent(behave=until_stopped)])):
            (task,) = add(engine)
            wait_until(lambda: statuses(engine) == {"running": 1})
            orc.operations.cancel(TaskFilter(ids=[task]), actor="ops")
            wait_until(lambda: statuses(engine) == {"cancelled": 1})
        assert Watchdog(orc).once().buried == []


def test_a_worker_that_is_cut_off_by_the_pooler(
    engine: Engine, pooler: PgBouncer, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """The pooler is killed and started again under real workers: the outcome is recorded, work goes on."""
    with Fleet(tmp_path) as fleet:
        worker = fleet.worker(pooler.url, "w")
        fleet.add(pooler.url, "gate")
        wait_until(lambda: fleet.read(what="begin"))
        assert pooler._process is not None
        pooler._process.kill()
        pooler._process.wait()
        fleet.open("gate")
        wait_until(lambda: fleet.read(what="end") and worker.lines("lost the database"))
        pooler.__enter__()
        wait_until(lambda: statuses(engine) == {"done": 1})
        fleet.add(pooler.url, "gate")
        wait_until(lambda: statuses(engine) == {"done": 2})
        assert len(worker.lines("lost the database")) == len(worker.lines("the database is back")) == 1
        assert len(worker.lines("a connection pooler is in between")) == 1
    assert query(engine, "SELECT attempt, status FROM runs") == [(1, "done")] * 2


def test_three_processes_upgrade_through_it(empty_database: str, tmp_path: Path) -> None:
    """`db upgrade` three times at once on an empty database, then again: all exit 0."""
    with PgBouncer(empty_database, pool_size=3) as pooler:
        for _ in range(2):
            upgrades = [start("db", "upgrade", url=pooler.url, cwd=tmp_path) for _ in range(3)]
            said = [each.communicate(timeout=90) for each in upgrades]
            assert [each.returncode for each in upgrades] == [0, 0, 0], said
        assert log_of(pooler) == ""


@pytest.mark.parametrize("setting", ["session", None])
def test_a_pooler_in_session_mode(
    engine: Engine, database_url: str, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture, setting: str | None
) -> None:
    """Hints are heard through one that leaves sessions to their clients, once that is said; else polling is enough."""
    heard = threading.Event()
    with PgBouncer(database_url, pool_size=10, mode="session") as pooler, caplog.at_level(logging.WARNING):
        listener = Listener(pooler.url, lambda _: heard.set(), connected=heard.set, pooler=setting)
        listener.start()
        try:
            if setting is None:
                wait_until(lambda: "a connection pooler is in between" in caplog.text)
            assert heard.wait(0 if setting is None else 30) is (setting == "session")
        finally:
            listener.stop()
        with orchestrator(pooler.url, replace(QUICK, pooler=setting or "none")) as orc:
            add(engine, 20)
            Worker(orc, [FakeAgent()], 5).run(until_idle=True)
    assert statuses(engine) == {"done": 20}
