"""The server is restarted in immediate mode while workers idle, work, record and sweep: nothing is lost, nothing fails."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from orchestrator.database import schema, transient
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.worker import Worker
from tests.conftest import WaitUntil
from tests.faults import Fleet, ask, fresh_engine
from tests.making import Making
from tests.servers import Cluster
from tests.working import FakeAgent, Gate, Working, add, orchestrator, query, statuses

pytestmark = pytest.mark.slow

LISTENING = (
    "SELECT pid FROM pg_stat_activity WHERE application_name = 'orchestrator worker listener'"
    " AND query IN ('LISTEN orchestrator', 'SELECT 1')"  # the second keeps the line alive
)


@pytest.fixture(scope="module")
def cluster(test_folder: Path) -> Iterator[Cluster]:
    """A server of this module's own."""
    with Cluster(test_folder / "restarted") as made:
        schema.upgrade(made.url)
        yield made


@pytest.fixture
def engine(cluster: Cluster) -> Iterator[Engine]:
    """Empty tables, and an engine that never holds a connection."""
    schema.empty(cluster.start())
    with fresh_engine(cluster.url) as made:
        yield made


@pytest.fixture(autouse=True)
def _new_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other test's outage is going on."""
    monkeypatch.setattr(transient, "_episode", transient._Episode())


def test_twenty_seconds_without_the_server(
    cluster: Cluster, engine: Engine, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """Agents that end before, during and after the outage are recorded once; CPU and log stay quiet; it listens again.

    Cases S19 b, S20 a to c: one worker has an agent in each phase, another one is idle.
    """
    with Fleet(tmp_path) as fleet:
        busy = fleet.worker(cluster.url, "busy", "--concurrency", "3")
        fleet.add(cluster.url, "before", "during", "after")
        wait_until(lambda: len(fleet.read(what="begin")) == 3)
        idle = fleet.worker(cluster.url, "idle")
        wait_until(lambda: len(ask(cluster.url, LISTENING)) == 2)
        fleet.open("before")
        wait_until(lambda: fleet.read(what="end"))
        cluster.crash()
        began, used = time.monotonic(), {each.name: each.cpu() for each in (busy, idle)}
        fleet.open("during")
        wait_until(lambda: len(fleet.read(what="end")) == 2)
        threading.Event().wait(20 - (time.monotonic() - began))
        lasted = time.monotonic() - began
        share = {each.name: (each.cpu() - used[each.name]) / lasted for each in (busy, idle)}
        print(f"CPU during {lasted:.1f} s without the server: {share}")
        cluster.start()
        wait_until(lambda: statuses(engine) == {"running": 1, "done": 2}, 60)
        wait_until(lambda: len(ask(cluster.url, LISTENING)) == 2, 60)
        fleet.open("after")
        wait_until(lambda: statuses(engine) == {"done": 3})
        fleet.open("later")
        fleet.add(cluster.url, "later")
        wait_until(lambda: statuses(engine) == {"done": 4})
        assert (
            query(engine, "SELECT attempt, status, result ->> 'worked', exit_code FROM runs")
            == [(1, "done", "true", 0)] * 4
        )
        assert query(engine, "SELECT retry_count + lost_count FROM tasks") == [(0,)] * 4
        for each in (busy, idle):
            assert each.process.poll() is None
            # The answer in one word of each of the two threads of work; a lost hint is another matter.
            assert len(each.lines("lost the database")) == len(each.lines("the database is back")) == 1
            assert (
                len(each.lines("lost the connection that hears"))
                == len(each.lines("listening for new tasks again"))
                == 1
            )
            assert "Traceback" not in each.log.read_text()
        assert max(share.values()) < 0.30


def test_restarts_at_the_moment_of_the_end(cluster: Cluster, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Twenty agents end while the server crashes and recovers, six times: each has one run, done by its first attempt."""
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with orchestrator(cluster.url) as orc, caplog.at_level(logging.WARNING):
        with Working(Worker(orc, [FakeAgent(behave=(gate := _Gates()))], 20)) as working:
            for number in range(1, 7):
                add(engine, 20)
                for _ in range(20):
                    gate.now.entered()
                opening = threading.Thread(target=gate.open)
                pause = chance.uniform(0, 0.05)
                opening.start()
                threading.Event().wait(pause)
                cluster.crash()
                cluster.start()
                opening.join()
                deadline = time.monotonic() + 60
                while statuses(engine) != {"done": 20 * number}:
                    assert time.monotonic() < deadline, statuses(engine)
                    threading.Event().wait(0.05)
            assert working.error is None
    assert query(engine, "SELECT attempt, status, count(*) FROM runs GROUP BY 1, 2") == [(1, "done", 120)]
    assert query(engine, "SELECT max(retry_count + lost_count) FROM tasks") == [(0,)]
    assert "Traceback" not in caplog.text
    said = [record.getMessage() for record in caplog.records]
    assert sum("lost the database" in line for line in said) <= 6
    assert sum("lost the database" in line for line in said) == sum("the database is back" in line for line in said)


class _Gates:
    """A gate for each round."""

    def __init__(self) -> None:
        self.now = Gate()

    async def __call__(self, *arguments: object) -> Outcome:
        return await self.now(*arguments)  # type: ignore[arg-type]

    def open(self) -> None:
        opened, self.now = self.now, Gate(Outcome(OutcomeClass.DONE))
        opened.open()


def test_a_crash_in_the_middle_of_a_sweep(
    cluster: Cluster, engine: Engine, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    """300 orphans, the server crashes after some batches: the next sweep takes back the rest, each once (S20 d)."""
    monkeypatch.setattr("orchestrator.worker.watchdog.BATCH", 20)
    making = Making.on(engine)
    ids = add(engine, 300, "coder")
    assert len(making.claim(300)) == 300
    query(
        engine,
        "CREATE FUNCTION wait_here() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN IF NEW.task_id = {ids[150]} THEN PERFORM pg_advisory_xact_lock(7); END IF; RETURN NEW; END $$",
    )
    query(engine, "CREATE TRIGGER wait_here BEFORE INSERT ON runs FOR EACH ROW EXECUTE FUNCTION wait_here()")
    with engine.connect() as holder:
        query_on = holder.exec_driver_sql
        query_on("SELECT pg_advisory_lock(7)")
        assert making.query("UPDATE workers SET dead_at = now(), dead_why = 'for the test'") == []
        with orchestrator(cluster.url) as orc, Working(Worker(orc, [FakeAgent("another")])):
            wait_until(lambda: query(engine, "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))
            taken = query(engine, "SELECT count(*) FROM runs WHERE status = 'lost'")[0][0]
            cluster.crash()
            holder.invalidate()
            cluster.start()
            wait_until(lambda: statuses(engine) == {"pending": 300}, 60)
    query(engine, "DROP FUNCTION wait_here() CASCADE")
    assert 0 < taken < 300
    assert query(engine, "SELECT attempt, status, count(*) FROM runs GROUP BY 1, 2") == [(1, "lost", 300)]
    assert query(engine, "SELECT DISTINCT retry_count, lost_count FROM tasks") == [(0, 1)]
