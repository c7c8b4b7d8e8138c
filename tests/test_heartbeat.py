"""The lease: who cannot renew stops its agents in time, who is declared dead goes on as another, and who is stuck ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine

from orchestrator import liveness
from orchestrator.agents.protocol import Live, Stop
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import DatabaseUnavailable
from orchestrator.repositories.workers import Renewal, WorkerRepository
from orchestrator.service import Orchestrator
from orchestrator.worker import Worker
from orchestrator.worker.heartbeat import Heartbeat
from tests.conftest import WaitUntil
from tests.working import FakeAgent, Gate, Working, add, orchestrator, query, statuses


@pytest.fixture
def orc(database_url: str) -> Iterator[Orchestrator]:
    """An orchestrator of the test's own."""
    with orchestrator(database_url) as made:
        yield made


class Lease:
    """A heartbeat whose clock, loop and renewals the test decides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, lease: float = 40.0, margin: float = 3.0) -> None:
        self.now = 1000.0
        self.ticks = 0
        self.ticking = True
        self.renew: Callable[[UUID], tuple[bool, bool]] = lambda worker: (True, False)
        self.expired = threading.Event()
        self.good = threading.Semaphore(0)
        self.stuck = threading.Event()
        self.renewed = threading.Semaphore(0)
        monkeypatch.setattr("orchestrator.worker.heartbeat.boot_clock", lambda: self.now)
        self.heartbeat = Heartbeat(
            heartbeat=0.02,
            lease=lease,
            margin=margin,
            renew=self._renew,
            dead=lambda worker: None,
            expired=self.expired.set,
            good=self.good.release,
            draining=lambda: None,
            reconcile=lambda: None,
            stuck=self.stuck.set,
            ticks=self._tick,
        )
        # The guard of a lease of 40 s would look four times a second.
        wait = self.heartbeat._closing.wait
        monkeypatch.setattr(self.heartbeat._closing, "wait", lambda _=None: wait(0.001))

    def _renew(self, worker: UUID) -> tuple[bool, bool]:
        self.renewed.release()
        return self.renew(worker)

    def _tick(self) -> int:
        self.ticks += self.ticking
        return self.ticks

    def advance(self, to: float) -> None:
        """Let time pass as it does for a machine that is awake."""
        while self.now < to:
            self.now = min(to, self.now + 0.5)
            self.looked()

    def looked(self) -> None:
        """Wait until the guard has looked at the clock a few times."""
        before = self.ticks
        while self.ticks < before + 5:
            threading.Event().wait(0.001)


@pytest.fixture
def lease(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lease]:
    """A lease of 40 s that agents need 3 s to die within."""
    made = Lease(monkeypatch)
    yield made
    made.heartbeat.close()


def unreachable(_worker: UUID) -> tuple[bool, bool]:
    """No renewal comes through."""
    raise DatabaseUnavailable("the database cannot be reached")


def test_agents_are_stopped_before_the_lease_ends(lease: Lease) -> None:
    """While renewals fail nothing happens, until only the time that agents need to die is left (S02)."""
    lease.renew = unreachable
    lease.heartbeat.begin(uuid4(), lease.now)
    lease.advance(1036.5)
    assert not lease.expired.is_set()
    assert lease.heartbeat.safe
    lease.advance(1037.0)
    assert lease.expired.wait(30)
    assert not lease.heartbeat.safe


def test_a_renewal_that_hangs_does_not_hide_the_end_of_the_lease(lease: Lease) -> None:
    """The guard looks at clocks alone: it needs no answer from the database (S02)."""
    hanging = threading.Event()

    def hang(_worker: UUID) -> tuple[bool, bool]:
        hanging.wait(30)
        return True, False

    lease.renew = hang
    lease.heartbeat.begin(uuid4(), lease.now)
    assert lease.renewed.acquire(timeout=30)
    lease.advance(1037.5)
    assert lease.expired.wait(30)
    hanging.set()


def test_a_lease_counts_from_before_its_renewal(lease: Lease) -> None:
    """An answer that took 5 s to come has used up 5 s of the lease: the database counts from when it wrote."""
    answered = threading.Event()

    def slow(_worker: UUID) -> tuple[bool, bool]:
        if not answered.is_set():
            lease.now = 1005.0
            answered.set()
            return True, False
        raise DatabaseUnavailable("gone")

    lease.renew = slow
    lease.heartbeat.begin(uuid4(), lease.now)
    assert answered.wait(30)
    lease.advance(1036.9)
    assert not lease.expired.is_set()
    lease.advance(1037.1)
    assert lease.expired.wait(30)


def test_a_renewal_that_is_answered_after_its_lease_is_worth_nothing(lease: Lease) -> None:
    """The network held its answer up for longer than the lease: whoever was stopped for it does not start again."""
    answer, asked = threading.Event(), threading.Event()

    def held_up(_worker: UUID) -> tuple[bool, bool]:
        asked.set()
        answer.wait()
        return True, False

    lease.heartbeat.begin(uuid4(), lease.now)
    assert lease.good.acquire(timeout=30)
    lease.renew = held_up
    assert asked.wait(30)
    lease.advance(lease.now + 45)
    assert lease.expired.wait(30)
    while lease.good.acquire(blocking=False):
        pass
    lease.renew = unreachable
    answer.set()
    for _ in range(3):
        assert lease.renewed.acquire(timeout=30)
    assert not lease.good.acquire(blocking=False)
    lease.renew = lambda worker: (True, False)
    assert lease.good.acquire(timeout=30)


def test_waking_up_is_a_second_chance(lease: Lease) -> None:
    """After an hour asleep the lease is over, but so were the agents: a renewal that comes through now saves them."""
    asleep = True

    def renew(_worker: UUID) -> tuple[bool, bool]:
        if asleep:
            raise DatabaseUnavailable("asleep")
        return True, False

    lease.renew = renew
    lease.heartbeat.begin(uuid4(), lease.now)
    assert lease.renewed.acquire(timeout=30)
    asleep = False
    lease.now = 4600.0
    while not lease.heartbeat.safe:
        threading.Event().wait(0.001)
    lease.looked()
    assert not lease.expired.is_set()


def test_waking_up_without_the_database_stops_the_agents(lease: Lease) -> None:
    """The second chance lasts two seconds."""
    lease.renew = unreachable
    lease.heartbeat.begin(uuid4(), lease.now)
    lease.looked()
    lease.now = 4600.0
    lease.looked()
    assert not lease.expired.is_set()
    lease.now = 4602.1
    assert lease.expired.wait(30)


def test_a_loop_that_stands_still_for_half_a_lease_ends_the_process(lease: Lease) -> None:
    """Counted by how long the guard itself was awake: a suspended machine is not a busy loop."""
    lease.heartbeat.begin(uuid4(), lease.now)
    lease.looked()
    lease.ticking = False
    for _ in range(3):
        lease.now += 1000.0
        threading.Event().wait(0.01)
    assert not lease.stuck.is_set()
    while not lease.stuck.is_set():
        lease.now += 0.25
        threading.Event().wait(0.002)


# -- with a database ---------------------------------------------------------------------------------------------------


def test_a_dead_worker_goes_on_as_another(
    engine: Engine, orc: Orchestrator, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
) -> None:
    """Declared dead in mid-task: it stops its agents, registers anew and works on; the result it had is only late (S06)."""
    gate = Gate()
    stopped: list[OutcomeClass] = []

    async def behave(claim: Claim, live: Live, stop: Stop) -> Outcome:
        if claim.attempt > 1:
            return Outcome(OutcomeClass.DONE, result="second")
        await gate(claim, live, stop)
        assert stop.reason is not None
        stopped.append(stop.reason)
        return Outcome(OutcomeClass.DONE, result="first")

    add(engine)
    worker = Worker(orc, [FakeAgent(behave=behave)], watchdog=False)
    with Working(worker):
        gate.entered()
        old = worker.id
        assert old is not None
        assert WorkerRepository(engine).mark_gone([old], "for the test") == [old]
        assert [status for _, _, status in orc.take_back()] == ["pending"]
        wait_until(lambda: statuses(engine) == {"done": 1})
        assert worker.id not in (None, old)
        wait_until(lambda: query(engine, "SELECT 1 FROM runs WHERE late IS NOT NULL"))
    assert stopped == [OutcomeClass.LOST]
    rows = query(engine, "SELECT attempt, status, result, late ->> 'result' FROM runs ORDER BY attempt")
    assert rows == [(1, "lost", None, "first"), (2, "done", "second", None)]
    assert query(engine, "SELECT count(*) FROM workers WHERE dead_at IS NULL") == [(1,)]
    assert sum("was declared dead" in record.getMessage() for record in caplog.records) == 1


def test_the_new_one_starts_nothing_beside_the_old_agents(
    engine: Engine, orc: Orchestrator, wait_until: WaitUntil
) -> None:
    """As long as an agent of the old life has not ended, there is no new one, and nothing is claimed."""
    told, dead, started = threading.Event(), threading.Event(), threading.Event()

    async def behave(claim: Claim, _live: Live, stop: Stop) -> Outcome:
        if claim.attempt > 1:
            return Outcome(OutcomeClass.DONE)
        started.set()
        await stop.wait()
        told.set()
        await asyncio.to_thread(dead.wait)
        return Outcome(OutcomeClass.LOST)

    add(engine)
    worker = Worker(orc, [FakeAgent(behave=behave)], watchdog=False)
    with Working(worker):
        assert started.wait(30)
        assert worker.id is not None
        WorkerRepository(engine).mark_gone([worker.id], "for the test")
        orc.take_back()
        assert told.wait(30)
        for _ in range(100):
            assert worker.id is None
            threading.Event().wait(0.002)
        assert statuses(engine) == {"pending": 1}
        dead.set()
        wait_until(lambda: statuses(engine) == {"done": 1})


def test_a_claim_that_is_answered_after_the_death_starts_nothing(
    engine: Engine, orc: Orchestrator, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer was held up in the network until this process went on as another worker: the task is not its any more."""
    claim, held, go_on = orc.claim, threading.Event(), threading.Event()
    begun: list[int] = []

    def held_up(*arguments: Any, **options: Any) -> Any:
        answer = claim(*arguments, **options)
        if answer.claims and not held.is_set():
            held.set()
            go_on.wait()
        return answer

    async def behave(claimed: Claim, _live: Live, _stop: Stop) -> Outcome:
        begun.append(claimed.attempt)
        return Outcome(OutcomeClass.DONE)

    monkeypatch.setattr(orc, "claim", held_up)
    add(engine)
    worker = Worker(orc, [FakeAgent(behave=behave)], watchdog=False)
    with Working(worker):
        wait_until(held.is_set)
        old = worker.id
        assert old is not None
        WorkerRepository(engine).mark_gone([old], "for the test")
        assert [status for _, _, status in orc.take_back()] == ["pending"]
        wait_until(lambda: worker.id not in (None, old))
        go_on.set()
        wait_until(lambda: statuses(engine) == {"done": 1})
    assert begun == [2]


def test_a_claim_that_is_answered_after_the_lease_starts_nothing(
    engine: Engine, orc: Orchestrator, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network held up the answer of the claim, and with it that of a renewal: somebody else may have the task now."""
    claim, renew = orc.claim, orc.renew
    claimed, renewing, over = threading.Event(), threading.Event(), threading.Event()
    begun: list[int] = []

    def late_claim(*arguments: Any, **options: Any) -> Any:
        answer = claim(*arguments, **options)
        if answer.claims and not claimed.is_set():
            claimed.set()
            over.wait()
        return answer

    def late_renewal(worker: UUID, *, deaf: bool = False) -> Renewal:
        renewal = renew(worker, deaf=deaf)
        if claimed.is_set() and not over.is_set():
            renewing.set()
            over.wait()
        return renewal

    async def behave(given: Claim, _live: Live, _stop: Stop) -> Outcome:
        begun.append(given.attempt)
        return Outcome(OutcomeClass.DONE)

    monkeypatch.setattr(orc, "claim", late_claim)
    monkeypatch.setattr(orc, "renew", late_renewal)
    add(engine)
    worker = Worker(orc, [FakeAgent(behave=behave)], heartbeat=0.05, lease=4.0, watchdog=False)
    with Working(worker):
        wait_until(lambda: claimed.is_set() and renewing.is_set())
        wait_until(lambda: worker._heartbeat.age > 4.0)
        over.set()
        wait_until(lambda: statuses(engine) == {"done": 1})
    assert begun == [2]
    assert query(engine, "SELECT status, message FROM runs ORDER BY attempt") == [
        ("interrupted", "the lease could not be renewed"),
        ("done", None),
    ]


def test_without_the_database_agents_are_stopped_and_handed_back(
    engine: Engine, orc: Orchestrator, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renewals fail until the lease is nearly over: the run is interrupted, still ours, and recorded when it works again."""
    gate = Gate()
    away, failed = threading.Event(), threading.Event()
    renew = orc.renew

    def cut(worker: UUID, *, deaf: bool = False) -> Renewal:
        if away.is_set():
            failed.set()
            raise DatabaseUnavailable("cut off")
        return renew(worker, deaf=deaf)

    monkeypatch.setattr(orc, "renew", cut)

    async def behave(claim: Claim, live: Live, stop: Stop) -> Outcome:
        return Outcome(OutcomeClass.DONE) if claim.attempt > 1 else await gate(claim, live, stop)

    add(engine)
    worker = Worker(orc, [FakeAgent(behave=behave)], heartbeat=0.05, watchdog=False)
    with Working(worker):
        gate.entered()
        away.set()
        assert failed.wait(30)
        worker._heartbeat._lease_end = liveness.boot_clock() + 1.0  # as if the rest of the lease had gone by
        wait_until(lambda: statuses(engine) == {"pending": 1})
        assert not worker._may_claim()
        away.clear()
        wait_until(lambda: statuses(engine) == {"done": 1})
    assert query(engine, "SELECT status, message FROM runs ORDER BY attempt") == [
        ("interrupted", "the lease could not be renewed"),
        ("done", None),
    ]
    assert query(engine, "SELECT retry_count, lost_count FROM tasks") == [(0, 0)]


def test_nothing_is_claimed_while_it_would_be_stopped_at_once(
    engine: Engine, orc: Orchestrator, wait_until: WaitUntil
) -> None:
    """The lease is good again, but the stop of before still stands: no circle of claiming and handing back."""
    worker = Worker(orc, [FakeAgent()], watchdog=False)
    with Working(worker):
        wait_until(lambda: worker.id is not None and worker._may_claim())
        worker._stop_new = OutcomeClass.INTERRUPTED, "for the test"
        assert not worker._may_claim()
        assert worker._heartbeat.safe


def test_age_alone_never_ends_a_run(engine: Engine, orc: Orchestrator, wait_until: WaitUntil) -> None:
    """A task that has run for three hours is nobody's to take back while its worker renews (S01)."""
    gate = Gate()
    add(engine)
    # Late is a renewal after two heartbeats: that must not happen here because the machine is slow.
    with Working(Worker(orc, [FakeAgent(behave=gate)], heartbeat=15, lease=30)) as working:
        gate.entered()
        assert working.worker.id is not None
        assert orc.renew(working.worker.id).alive
        query(engine, "UPDATE tasks SET started_at = started_at - interval '3 hours'")
        query(engine, "UPDATE workers SET renewing_since = renewing_since - interval '3 hours'")
        assert orc.witness()
        assert orc.judge() == []
        assert orc.take_back() == []
        gate.open()
        wait_until(lambda: statuses(engine) == {"done": 1})
    assert query(engine, "SELECT attempt, status FROM runs") == [(1, "done")]


def test_a_claim_whose_answer_was_lost_is_handed_back(
    engine: Engine, orc: Orchestrator, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database says that this worker runs a task, the worker never heard of it: pending again, with its run row."""
    claim = orc._tasks.claim
    lost = threading.Event()

    def forgetful(*arguments: Any, **options: Any) -> Any:
        claimed = claim(*arguments, **options)
        if claimed.claims and not lost.is_set():
            lost.set()
            raise DatabaseUnavailable("the connection broke at the commit")
        return claimed

    monkeypatch.setattr(orc._tasks, "claim", forgetful)
    add(engine)
    agent = FakeAgent()
    with Working(Worker(orc, [agent], heartbeat=0.02, watchdog=False)):
        wait_until(lambda: statuses(engine) == {"done": 1})
    assert lost.is_set()
    rows = query(engine, "SELECT attempt, status, cause FROM runs ORDER BY attempt")
    assert rows == [(1, "interrupted", "handed_back"), (2, "done", None)]
    assert len(agent.started) == 1


def test_a_claim_that_is_still_under_way_is_not_handed_back(
    engine: Engine, orc: Orchestrator, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit is made and its answer takes its time: however often it is looked at, the task stays with its worker."""
    claim, owned = orc._tasks.claim, orc.owned
    committed, looks, answer = threading.Event(), [0], threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        claimed = claim(*arguments, **options)
        if claimed.claims:
            committed.set()
            assert answer.wait(30)
        return claimed

    def counted(worker: UUID) -> set[tuple[int, int]]:
        looks[0] += committed.is_set()
        return owned(worker)

    monkeypatch.setattr(orc._tasks, "claim", slow)
    monkeypatch.setattr(orc, "owned", counted)
    add(engine)
    with Working(Worker(orc, [FakeAgent()], heartbeat=0.02, watchdog=False)):
        wait_until(lambda: looks[0] >= 4)
        answer.set()
        wait_until(lambda: statuses(engine) == {"done": 1})
    assert query(engine, "SELECT attempt, status FROM runs") == [(1, "done")]


def test_a_task_that_is_no_longer_ours_is_stopped(engine: Engine, orc: Orchestrator, wait_until: WaitUntil) -> None:
    """Somebody took the task back behind our back: reconciliation finds it and stops the agent as lost."""
    gate = Gate()
    reasons: list[OutcomeClass | None] = []

    async def behave(claim: Claim, live: Live, stop: Stop) -> Outcome:
        outcome = await gate(claim, live, stop)
        reasons.append(stop.reason)
        return outcome

    add(engine)
    worker = Worker(orc, [FakeAgent(behave=behave)], heartbeat=0.02, watchdog=False)
    with Working(worker):
        gate.entered()
        query(engine, "UPDATE tasks SET status = 'pending', claimed_by = NULL, held_at = clock_timestamp()")
        wait_until(lambda: reasons)
    assert reasons == [OutcomeClass.LOST]
    assert statuses(engine) == {"pending": 1}


def test_an_agent_that_blocks_the_loop_ends_the_process(
    engine: Engine, orc: Orchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be stopped through a loop that stands still; the guard leaves, so that nobody runs unwatched."""
    codes: list[int] = []
    left, inside = threading.Event(), threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    async def behave(_claim: Claim, _live: Live, _stop: Stop) -> Outcome:
        inside.set()
        left.wait(30)
        return Outcome(OutcomeClass.DONE)

    monkeypatch.setattr("orchestrator.worker.loop.os._exit", leave)
    add(engine)
    with Working(Worker(orc, [FakeAgent(behave=behave)], heartbeat=0.1, lease=1.0), grace=10):
        assert inside.wait(30)
        assert left.wait(30)
    assert codes == [70]


def test_identity_is_in_the_workers_row(engine: Engine, orc: Orchestrator) -> None:
    """Host, pid, boot and start time are there for others on this host to look at."""
    Worker(orc, [FakeAgent()]).run(until_idle=True)
    who = liveness.identity()
    assert query(engine, "SELECT host, pid, boot_id, pid_namespace, process_started FROM workers") == [
        (who.host, who.pid, who.boot_id, who.pid_namespace, who.process_started)
    ]
