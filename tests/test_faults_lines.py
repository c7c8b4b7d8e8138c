"""Lines that die in silence: between a worker and the database, one by one, all at once, and for longer than a lease."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from orchestrator import service
from orchestrator.agents.protocol import Live, Stop
from orchestrator.database import transient
from orchestrator.database.engine import connection_parameters, make_engine
from orchestrator.database.lines import Line
from orchestrator.database.notify import Listener
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.worker import Worker
from tests.conftest import WaitUntil
from tests.faults import Fleet
from tests.servers import TcpProxy
from tests.working import FakeAgent, Working, add, orchestrator, query, statuses

LISTENING = "SELECT pid FROM pg_stat_activity WHERE application_name = 'orchestrator worker listener'"


@pytest.fixture(autouse=True)
def _new_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other test's outage is going on."""
    monkeypatch.setattr(transient, "_episode", transient._Episode())


@pytest.fixture
def proxy(database_url: str) -> Iterator[TcpProxy]:
    """The line between worker and database."""
    with TcpProxy(database_url) as made:
        yield made


def opened(url: str, silence: float = 0.1) -> Line:
    """A line that becomes suspicious soon."""
    return Line.open(connection_parameters(url), silence=silence)


def test_a_line_that_nobody_reads_is_given_up(proxy: TcpProxy) -> None:
    """The bytes are acknowledged by a middleman and go nowhere; the server has no work for the session."""
    with opened(proxy.url) as line:
        line.execute("SELECT 1")
        proxy.stall()
        with pytest.raises(
            psycopg.OperationalError, match=r"not answered for 0\.1 s: the session is idle in transaction"
        ):
            line.execute("SELECT 2")
        assert line.closed


def test_a_session_that_is_gone_is_given_up(engine: Engine, proxy: TcpProxy) -> None:
    """The server has ended the session, and the line never told."""
    with opened(proxy.url) as line:
        line.execute("SELECT 1")
        proxy.stall()
        query(engine, "SELECT pg_terminate_backend(:pid)", pid=line.info.backend_pid)
        with pytest.raises(psycopg.OperationalError, match="the session is gone"):
            line.execute("SELECT 2")


def test_a_server_that_is_slow_is_waited_for(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked several times and says that it is at work: nothing is cut, and the answer comes."""
    asked: list[str | None] = []
    lost = Line._lost

    def count(line: Line) -> str | None:
        asked.append(lost(line))
        return asked[-1]

    monkeypatch.setattr(Line, "_lost", count)
    with opened(database_url, 0.05) as line:
        assert line.execute("SELECT 7 FROM pg_sleep(0.5)").fetchone() == (7,)
    assert set(asked) == {None}


def test_a_question_that_nobody_answers(proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """New connections are refused as well: the line is lost."""
    with opened(proxy.url) as line:
        line.execute("SELECT 1")
        proxy.stall()
        proxy.refuse()
        with pytest.raises(psycopg.OperationalError, match=r"has not answered for 0\.1 s"):
            line.execute("SELECT 2")


def test_a_pool_replaces_a_dead_line(proxy: TcpProxy) -> None:
    """SQLAlchemy hears of it as of any lost connection: one failed unit, then a new one."""
    engine = make_engine(proxy.url, silence=0.1)
    try:
        with engine.connect() as connection:
            connection.execute(text("SELECT 1"))
        proxy.stall()
        with pytest.raises(OperationalError) as raised, engine.connect() as connection:
            connection.execute(text("SELECT 2"))
        assert transient.classify(raised.value) == "connection"
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT 3")) == 3
    finally:
        engine.dispose()


@pytest.mark.slow
def test_every_line_of_a_worker_is_replaced(
    engine: Engine,
    proxy: TcpProxy,
    wait_until: WaitUntil,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each of its connections dies in silence, one after the other, then all at once: it claims, records, renews, hears."""
    monkeypatch.setattr(service, "make_engine", _suspicious)
    monkeypatch.setattr("orchestrator.worker.loop.Listener", functools.partial(Listener, ping=0.3, answer=0.5))

    async def work(claim: Claim, live: Live, _stop: Stop) -> Outcome:
        live.write("stdout", "worked\n")
        return Outcome(OutcomeClass.DONE)

    def renewed_after(moment: object) -> bool:
        return bool(query(engine, "SELECT 1 FROM workers WHERE renewed_at > :moment", moment=moment))

    with orchestrator(proxy.url) as orc, Working(Worker(orc, [FakeAgent(behave=work)])):
        wait_until(lambda: query(engine, LISTENING) and query(engine, "SELECT 1 FROM workers"))
        add(engine, 5)
        wait_until(lambda: statuses(engine) == {"done": 5})
        wait_until(lambda: proxy.connections >= 4)
        count = proxy.connections
        done = 5
        for number in [*range(count), None]:
            proxy.stall(number if number is None or number < proxy.connections else 0)
            ((moment,),) = query(engine, "SELECT clock_timestamp()")
            add(engine, 5)
            done += 5
            wait_until(lambda done=done: statuses(engine) == {"done": done})  # type: ignore[misc]
            wait_until(lambda moment=moment: renewed_after(moment))  # type: ignore[misc]
        wait_until(lambda: proxy.connections >= count)
    assert query(engine, "SELECT attempt, status, count(*) FROM runs GROUP BY 1, 2") == [(1, "done", done)]
    assert "Traceback" not in caplog.text


def _suspicious(url: str, **options: object) -> Engine:
    return make_engine(url, **{**options, "silence": 0.3})  # type: ignore[arg-type]


@pytest.mark.slow
def test_who_cannot_renew_has_killed_its_agents_before_others_start_them(
    engine: Engine, database_url: str, proxy: TcpProxy, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """Only one worker is cut off: what its agents wrote ends before the second attempts begin (S02).

    The agents do not hear SIGTERM. The worker lives on, as another, and changes nothing of what the others did.
    """
    with Fleet(tmp_path, heartbeat=1, lease=8) as fleet:
        away = fleet.worker(proxy.url, "away", "--concurrency", "3")
        wait_until(lambda: query(engine, "SELECT 1 FROM workers WHERE name = 'away'"))
        tasks = fleet.add(database_url, "first", "first", "first", deaf=True)
        wait_until(lambda: len(fleet.read(what="begin")) == 3)
        near = fleet.worker(database_url, "near", "--concurrency", "3")
        wait_until(lambda: query(engine, "SELECT 1 FROM workers WHERE name = 'near'"))
        proxy.freeze()
        wait_until(lambda: fleet.read(attempt=2), 60)
        assert query(engine, "SELECT count(*) FROM workers WHERE name = 'away' AND dead_at IS NOT NULL") == [(1,)]
        fleet.open("first")  # they are tried again one at a time
        wait_until(lambda: statuses(engine) == {"done": 3}, 60)
        proxy.thaw()
        wait_until(lambda: query(engine, "SELECT 1 FROM workers WHERE name LIKE 'away%' AND dead_at IS NULL"), 60)
        wait_until(lambda: query(engine, "SELECT count(*) FROM runs WHERE late IS NOT NULL") == [(3,)], 60)
        assert away.process.poll() is None
        assert near.process.poll() is None
        for task in tasks:
            first, second = fleet.read(task, 1), fleet.read(task, 2)
            print(f"task {task}: silent for {second[0].at - first[-1].at:.2f} s between its attempts")
            assert first[-1].at < second[0].at
        assert "Traceback" not in away.log.read_text() + near.log.read_text()
    rows = query(
        engine,
        "SELECT attempt, status, late ->> 'status', result ->> 'worked', count(*) FROM runs GROUP BY 1, 2, 3, 4 ORDER BY 1",
    )
    assert rows == [(1, "lost", "interrupted", None, 3), (2, "done", None, "true", 3)]
    assert query(engine, "SELECT DISTINCT retry_count, lost_count FROM tasks") == [(0, 1)]


@pytest.mark.slow
def test_agents_live_on_as_long_as_the_lease_allows(
    engine: Engine, database_url: str, proxy: TcpProxy, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """An outage that is shorter than the lease stops nobody; the agent's only attempt is recorded."""
    with Fleet(tmp_path, heartbeat=1, lease=60) as fleet:
        fleet.worker(proxy.url, "away")
        (task,) = fleet.add(database_url, "gate")
        wait_until(lambda: fleet.read(task, what="begin"))
        proxy.freeze()
        began = time.monotonic()
        wait_until(lambda: fleet.read()[-1].at > began + 5)
        fleet.open("gate")
        wait_until(lambda: fleet.read(task, what="end"))
        proxy.thaw()
        wait_until(lambda: statuses(engine) == {"done": 1}, 60)
    assert query(engine, "SELECT attempt, status, result ->> 'worked' FROM runs") == [(1, "done", "true")]


@pytest.mark.slow
def test_a_kept_outcome_is_offered_by_the_next_worker(
    engine: Engine, database_url: str, proxy: TcpProxy, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """A process that ends during an outage keeps the outcome on disk; the next one on its host records it (S20)."""
    home = tmp_path / "home"
    with Fleet(tmp_path) as fleet:
        first = fleet.worker(proxy.url, "first", env={"ORCHESTRATOR_HOME": str(home)})
        (task,) = fleet.add(database_url, "gate")
        wait_until(lambda: fleet.read(task, what="begin"))
        proxy.refuse()
        fleet.open("gate")
        wait_until(lambda: fleet.read(task, what="end"))
        first.process.terminate()
        assert first.ended() == 0
        (kept,) = home.glob("spool/*/*.json")
        assert kept.stat().st_mode & 0o077 == 0
        proxy.thaw()
        second = fleet.worker(proxy.url, "second", "--until-idle", env={"ORCHESTRATOR_HOME": str(home)})
        assert second.ended() == 0
        assert not kept.exists()
    assert query(engine, "SELECT attempt, status, result ->> 'worked', late FROM runs") == [(1, "done", "true", None)]
    assert len(fleet.read(task, what="begin")) == 1
