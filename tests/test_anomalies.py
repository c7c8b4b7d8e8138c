"""Anomalies: the N-th database call fails, for N = 1, 2, 3 … until nothing fails, and the invariants hold each time.

A call fails before it reaches the server, or after the server did it and the answer was lost. The second kind is the
nasty one for COMMIT: nobody knows whether it happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, event, text
from tenacity import wait_none

from orchestrator import Orchestrator, TaskStatus
from orchestrator.database.transient import WAITS
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import OrchestratorError
from orchestrator.liveness import identity
from orchestrator.repositories.runs import Ended
from orchestrator.repositories.tasks import Known
from orchestrator.settings import Settings


class Fault:
    """Counts the statements and commits of an engine, and makes one of them fail as a lost connection."""

    def __init__(self, nth: int, *, after: bool) -> None:
        self.nth, self.after, self.seen, self.fired = nth, after, 0, False

    def step(self, connection: Any) -> None:
        self.seen += 1
        if self.seen == self.nth:
            self.fired = True
            raw = connection.connection.dbapi_connection
            if raw is not None:
                raw.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")


@contextmanager
def failing(engine: Engine, fault: Fault) -> Iterator[None]:
    """Put *fault* into the calls of *engine*."""

    def before_execute(conn: Any, cursor: Any, *_: Any) -> None:
        if not fault.after:
            fault.step(conn)

    def after_execute(conn: Any, cursor: Any, *_: Any) -> None:
        if fault.after:
            fault.step(conn)

    original = engine.dialect.do_commit

    def do_commit(dbapi_connection: Any) -> None:
        fault.seen += 1
        hit = fault.seen == fault.nth
        if hit:
            fault.fired = True
            if fault.after:
                original(dbapi_connection)
            dbapi_connection.dbapi_connection.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        original(dbapi_connection)

    event.listen(engine, "before_cursor_execute", before_execute)
    event.listen(engine, "after_cursor_execute", after_execute)
    engine.dialect.do_commit = do_commit  # type: ignore[method-assign]
    try:
        yield
    finally:
        event.remove(engine, "before_cursor_execute", before_execute)
        event.remove(engine, "after_cursor_execute", after_execute)
        engine.dialect.do_commit = original  # type: ignore[method-assign]


@pytest.fixture
def orc(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orchestrator]:
    """An orchestrator with an engine of its own, whose calls can be made to fail; it tries again at once."""
    monkeypatch.setitem(WAITS, "connection", wait_none())
    with Orchestrator(database_url, settings=Settings()) as made:
        yield made


def every_call(orc: Orchestrator, *, after: bool, work: Callable[[], None], check: Callable[[], None]) -> int:
    """Run *work* with its N-th call failing, N = 1, 2, 3 … until none fails; *check* after each. Returns the last N."""
    for nth in range(1, 100):
        fault = Fault(nth, after=after)
        with failing(orc._engine, fault):
            work()
        check()
        if not fault.fired:
            return nth
    raise AssertionError("the work never ran without a fault")


def patiently(call: Callable[[], Any]) -> Any:
    """Do what a worker's loop does at its next turn."""
    try:
        return call()
    except OrchestratorError:
        return call()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_claim_and_record_survive_the_loss_of_any_call(orc: Orchestrator, engine: Engine, after: bool) -> None:
    """Whichever call is lost, each task ends done with one run; a claim whose answer was lost is handed back."""
    worker = orc.register(identity(), name="w", slots=2, agents=["a"])

    def work() -> None:
        orc.add_many([{"agent": "a", "input": n} for n in range(2)])
        for _ in range(5):
            # A claim whose commit was done and whose answer was lost leaves rows that this worker does not know.
            claims = orc.claim(worker, [Known("a")], 2).claims
            orc.record([Ended(claim, Outcome(OutcomeClass.DONE, elapsed=0.1), "w", "h") for claim in claims])
            unknown = patiently(lambda: orc.owned(worker))
            if unknown:
                patiently(partial(orc.hand_back, worker, sorted(unknown), "the answer to its claim was lost"))

    def check() -> None:
        with engine.connect() as connection:
            rows = connection.execute(
                text(
                    "SELECT status, attempt, (SELECT count(*) FROM runs WHERE task_id = t.id) AS runs,"
                    " (SELECT count(*) FROM runs WHERE task_id = t.id AND status = 'done') AS done FROM tasks t"
                )
            ).all()
        assert len(rows) >= 2
        for row in rows:
            assert row.status == TaskStatus.DONE
            assert row.runs == row.attempt
            assert row.done == 1

    assert every_call(orc, after=after, work=work, check=check) > 5


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_taking_back_survives_the_loss_of_any_call(orc: Orchestrator, engine: Engine, after: bool) -> None:
    """Whichever call of the take-back is lost, the next sweep finishes it: one lost run each, and pending again."""

    def work() -> None:
        worker = orc.register(identity(), name="w", slots=2, agents=["a"])
        orc.add_many([{"agent": "a", "input": n} for n in range(3)])
        claimed: list[Any] = []
        while True:
            try:
                got = orc.claim(worker, [Known("a")], 3).claims
            except OrchestratorError:
                continue
            if not got:
                break
            claimed.extend(got)
        for _ in range(3):
            with suppress(OrchestratorError):
                orc.mark_gone([worker], "killed")
                while orc.take_back(2):
                    pass

    def check() -> None:
        with engine.begin() as connection:
            rows = connection.execute(
                text(
                    "SELECT t.status, t.attempt, t.lost_count, (SELECT count(*) FROM runs WHERE task_id = t.id) AS runs"
                    " FROM tasks t"
                )
            ).all()
            assert rows
            for row in rows:
                assert row.status == TaskStatus.PENDING
                assert (row.attempt, row.lost_count, row.runs) == (1, 1, 1)
            connection.execute(text("TRUNCATE tasks, runs, workers CASCADE"))

    assert every_call(orc, after=after, work=work, check=check) > 5


def test_adding_twice_after_a_lost_answer_makes_two_and_with_a_key_one(orc: Orchestrator, engine: Engine) -> None:
    """A repeated add after an unknown commit may make a second task; a unique key is what prevents it."""

    def work() -> None:
        orc.add("a", 1, unique_key="once")

    def check() -> None:
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM tasks")) == 1

    for after in (False, True):
        every_call(orc, after=after, work=work, check=check)
