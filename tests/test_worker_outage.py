"""The database goes away while a worker works: agents live on, nothing is lost, nothing is done twice."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from orchestrator.agents.protocol import Live, Stop
from orchestrator.database import transient
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import DatabaseUnavailable
from orchestrator.repositories.events import EventRepository
from orchestrator.service import Orchestrator
from orchestrator.worker import Observer, Worker
from tests.conftest import WaitUntil
from tests.servers import TcpProxy
from tests.working import FakeAgent, Gate, Working, add, orchestrator, query, statuses


@pytest.fixture(autouse=True)
def _new_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other test's outage is going on."""
    monkeypatch.setattr(transient, "_episode", transient._Episode())


@pytest.fixture
def proxy(database_url: str) -> Iterator[TcpProxy]:
    """The line between worker and database."""
    with TcpProxy(database_url) as made:
        yield made


@pytest.fixture
def orc(proxy: TcpProxy) -> Iterator[Orchestrator]:
    """An orchestrator behind the line."""
    with orchestrator(proxy.url) as made:
        yield made


class Weather(Observer):
    """Notes when the database goes and comes."""

    def __init__(self) -> None:
        self.is_away, self.is_back = threading.Event(), threading.Event()
        self.told: list[str] = []

    def away(self, why: str) -> None:
        self.told.append("away")
        self.is_away.set()

    def back(self) -> None:
        self.told.append("back")
        self.is_back.set()


def test_an_agent_that_ends_while_the_database_is_away_is_recorded_later(
    engine: Engine, orc: Orchestrator, proxy: TcpProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Its result and transcript are written once the database is back; it is not run again (S20 c)."""

    async def behave(claim: Claim, live: Live, stop: Stop) -> Outcome:
        live.write("stdout", "before\n")
        outcome = await gate(claim, live, stop)
        live.write("stdout", "after\n")
        return outcome

    (task_id,) = add(engine)
    gate, weather = Gate(Outcome(OutcomeClass.DONE, result=[1])), Weather()
    agent = FakeAgent(behave=behave)
    with (
        caplog.at_level(logging.WARNING),
        Working(Worker(orc, [agent], observers=[weather]), until_idle=True) as working,
    ):
        gate.entered()
        proxy.refuse()
        assert weather.is_away.wait(30)
        gate.open()
        while not working.worker._desk.ended:
            threading.Event().wait(0.001)
        proxy.thaw()
        working.join()
        assert weather.is_back.is_set()
    assert agent.started == [task_id]
    assert query(engine, "SELECT attempt, status, result FROM runs") == [(1, "done", [1])]
    text = "".join(event.text for event in EventRepository(engine).of_attempt(task_id, 1))
    assert text == "before\nafter\n"
    lost = [r for r in caplog.records if "lost the database" in r.getMessage()]
    back = [r for r in caplog.records if "database is back" in r.getMessage()]
    assert len(lost) == len(back) == 1


def test_an_idle_worker_comes_back_by_itself(
    engine: Engine, orc: Orchestrator, proxy: TcpProxy, wait_until: WaitUntil
) -> None:
    """After an outage in its idle time it finds new tasks, and hears hints again (S19, S20 a)."""
    weather = Weather()
    with Working(Worker(orc, [FakeAgent()], observers=[weather])):
        wait_until(lambda: query(engine, "SELECT 1 FROM pg_stat_activity WHERE query = 'LISTEN orchestrator'"))
        proxy.refuse()
        assert weather.is_away.wait(30)
        add(engine)
        proxy.thaw()
        wait_until(lambda: statuses(engine) == {"done": 1})
        wait_until(lambda: query(engine, "SELECT 1 FROM pg_stat_activity WHERE query = 'LISTEN orchestrator'"))


def test_an_outage_is_told_once(engine: Engine, orc: Orchestrator, proxy: TcpProxy, wait_until: WaitUntil) -> None:
    """However often its threads turn without a database, it is away once and back once; work that is held or not."""
    weather, gate = Weather(), Gate()
    add(engine)
    with Working(Worker(orc, [FakeAgent(behave=gate)], 2, observers=[weather])):
        gate.entered()
        for number in (1, 2):
            proxy.refuse()
            assert weather.is_away.wait(30)
            before = proxy.refused
            wait_until(lambda before=before: proxy.refused >= before + 30)  # type: ignore[misc]
            proxy.thaw()
            assert weather.is_back.wait(30)
            assert weather.told == ["away", "back"] * number
            weather.is_away.clear()
            weather.is_back.clear()


def test_terminated_sessions_are_replaced(engine: Engine, orc: Orchestrator, wait_until: WaitUntil) -> None:
    """All backends of a busy worker are terminated again and again: every task is done, each attempt has one run."""
    add(engine, 200)

    async def behave(_claim: Claim, _live: Live, _stop: Stop) -> Outcome:
        return Outcome(OutcomeClass.DONE)

    with Working(Worker(orc, [FakeAgent(behave=behave)], 5, heartbeat=0.1), until_idle=True) as working:
        for _ in range(20):
            query(
                engine,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name LIKE 'orchestrator%' AND datname = current_database()",
            )
            threading.Event().wait(0.01)
        working.join()
    assert statuses(engine) == {"done": 200}
    assert query(engine, "SELECT count(*), count(DISTINCT task_id) FROM runs WHERE status = 'done'") == [(200, 200)]
    assert query(engine, "SELECT DISTINCT status FROM runs WHERE status NOT IN ('done', 'interrupted')") == []


def test_a_record_whose_answer_was_lost_is_not_late(
    engine: Engine, orc: Orchestrator, proxy: TcpProxy, wait_until: WaitUntil
) -> None:
    """The commit happened, the answer did not come: the second try finds its own run and does nothing."""
    recorded: list[bool] = []

    class Ears(Observer):
        def recorded(self, claim: Claim, outcome: Outcome, recorded_: Any) -> None:
            recorded.append(recorded_.late)

    gate = Gate()
    add(engine)
    with Working(Worker(orc, [FakeAgent(behave=gate)], observers=[Ears()], watchdog=False), until_idle=True) as working:
        gate.entered()
        proxy.mute()
        gate.open()
        while not working.worker._desk.ended:
            threading.Event().wait(0.001)
        # The first statement of the record is on its way; its answer will never come.
        proxy.thaw()
        proxy.cut()
        working.join()
    assert recorded == [False]
    assert query(engine, "SELECT attempt, status FROM runs") == [(1, "done")]


def test_an_outcome_survives_the_end_of_its_process(
    engine: Engine, orc: Orchestrator, proxy: TcpProxy, database_url: str, wait_until: WaitUntil
) -> None:
    """Told to stop while the database is away: the outcome is spooled, and the next worker records it; no second run."""

    async def behave(claim: Claim, live: Live, stop: Stop) -> Outcome:
        outcome = await gate(claim, live, stop)
        live.write("stdout", "the end\n")
        return outcome

    (task_id,) = add(engine)
    gate, weather = Gate(Outcome(OutcomeClass.DONE, result="kept")), Weather()
    with Working(Worker(orc, [FakeAgent(behave=behave)], observers=[weather])) as working:
        gate.entered()
        proxy.refuse()
        assert weather.is_away.wait(30)
        gate.open()
        working.worker.stop(30)
        working.join()
    directory = working.worker._recorder._spool.directory
    assert len(list(directory.glob("*.json"))) == 1
    assert statuses(engine) == {"running": 1}
    proxy.thaw()
    agent = FakeAgent()
    with orchestrator(proxy.url) as again:
        Worker(again, [agent]).run(until_idle=True)
    assert agent.started == []
    assert query(engine, "SELECT attempt, status, result FROM runs") == [(1, "done", "kept")]
    assert [event.text for event in EventRepository(engine).of_attempt(task_id, 1)] == ["the end\n"]
    assert list(directory.iterdir()) == []


def test_a_slow_disk_keeps_an_outcome_once(
    engine: Engine, orc: Orchestrator, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process does not wait for ever for its recorder, which is still writing: neither writes what the other has."""
    monkeypatch.setattr("orchestrator.worker.loop.RECORDING", 0.05)
    add(engine)
    gate, weather = Gate(), Weather()
    with Working(Worker(orc, [FakeAgent(behave=gate)], observers=[weather])) as working:
        spool = working.worker._recorder._spool
        keep, closed = spool.keep, threading.Event()

        def slowly(*arguments: Any) -> Any:
            closed.wait(0.5)  # longer than the process waits for it
            return keep(*arguments)

        monkeypatch.setattr(spool, "keep", slowly)
        gate.entered()
        proxy.refuse()
        assert weather.is_away.wait(30)
        gate.open()
        working.worker.stop(30)
        working.join()
    assert len(list(spool.directory.iterdir())) == 1
    assert working.worker._recorder.spooled == 1


def test_a_transcript_that_hangs_in_the_network_is_kept_with_its_outcome(
    engine: Engine, orc: Orchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last pieces are in a transaction that does not come back when the worker ends: the spool has them."""

    async def behave(_claim: Claim, live: Live, _stop: Stop) -> Outcome:
        live.write("stdout", "the end\n")
        return Outcome(OutcomeClass.DONE)

    sent, answered = threading.Event(), threading.Event()

    def hang(_events: Any) -> None:
        sent.set()
        answered.wait(30)

    monkeypatch.setattr("orchestrator.worker.loop.RECORDING", 0.1)
    monkeypatch.setattr(orc.events, "add", hang)
    add(engine)
    with Working(Worker(orc, [FakeAgent(behave=behave)])) as working:
        assert sent.wait(30)
        working.worker.stop(0)
        working.join()
    kept: list[Any] = []
    working.worker._recorder._spool.offer(lambda ended, pieces: kept.append((ended, pieces)))
    answered.set()
    ((_, pieces),) = kept
    assert [piece.text for piece in pieces] == ["the end\n"]


def test_a_full_disk_at_the_end_loses_the_outcome_but_not_the_task(
    engine: Engine,
    orc: Orchestrator,
    proxy: TcpProxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No database and no spool: it is said, the process ends, and the row is left for the watchdog."""

    def full(*_: Any) -> Any:
        proxy.thaw()  # a moment too late
        raise OSError(28, "No space left on device")

    add(engine)
    gate, weather = Gate(), Weather()
    with Working(Worker(orc, [FakeAgent(behave=gate)], observers=[weather])) as working:
        monkeypatch.setattr(working.worker._recorder._spool, "keep", full)
        gate.entered()
        proxy.refuse()
        assert weather.is_away.wait(30)
        gate.open()
        working.worker.stop(30)
        working.join()
    assert "No space left" in caplog.text
    assert query(engine, "SELECT stopped_at FROM workers") == [(None,)]
    assert statuses(engine) == {"running": 1}


def test_nobody_waits_for_ever_for_a_database_at_the_start(proxy: TcpProxy, orc: Orchestrator) -> None:
    """Out of reach at the start: an error for people, after a few seconds of trying."""
    proxy.refuse()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orchestrator.service.CLAIM_PATIENCE", 0.1)
        patch.setattr("orchestrator.worker.loop.CLAIM_PATIENCE", 0.1)
        with pytest.raises(DatabaseUnavailable):
            Worker(orc, [FakeAgent()]).run()


def test_an_outage_costs_no_cpu(engine: Engine, orc: Orchestrator, proxy: TcpProxy, wait_until: WaitUntil) -> None:
    """While the database is away the worker's threads sleep between their attempts to connect."""
    weather = Weather()
    worker = Worker(orc, [FakeAgent()], observers=[weather])
    with Working(worker):
        wait_until(lambda: worker.id)
        proxy.refuse()
        assert weather.is_away.wait(30)
        before, began = proxy.refused, time.monotonic()
        wait_until(lambda: proxy.refused >= before + 20)
        # Claimer, recorder, heartbeat and listener, with the short pauses of tests: a slow machine only takes longer.
        assert time.monotonic() - began > 0.2
        proxy.thaw()
