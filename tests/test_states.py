"""The state machine of a task, walked at random against the real database, with every invariant checked after each step.

The rules are what workers, watchdog and operators do; a small model beside the database says what must be true. The walk
that a newcomer's suite takes is short; ``scripts/test --all`` takes long ones.
"""

from __future__ import annotations

from typing import Any, ClassVar
from uuid import UUID

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Engine, text

from orchestrator.domain.given import NewTask
from orchestrator.domain.identity import Identity
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.words import ENDED, TRANSITIONS, OutcomeClass, TaskStatus
from orchestrator.errors import Conflict
from orchestrator.repositories.adding import AddingRepository
from orchestrator.repositories.operations import OperationsRepository
from orchestrator.repositories.retention import RetentionRepository
from orchestrator.repositories.runs import Ended, RunRepository
from orchestrator.repositories.tasks import Known, TaskRepository
from orchestrator.repositories.workers import WorkerRepository

KNOWN = [Known("a"), Known("b")]
OUTCOMES = st.sampled_from([kind for kind in OutcomeClass if kind not in (OutcomeClass.LOST, OutcomeClass.SUSPENDED)])


class States(RuleBasedStateMachine):
    """Two workers, a watchdog and an operator on one queue."""

    engine: ClassVar[Engine]
    claims = Bundle("claims")
    stale = Bundle("stale")

    def __init__(self) -> None:
        super().__init__()
        self.tasks = TaskRepository(self.engine)
        self.runs = RunRepository(self.engine)
        self.workers = WorkerRepository(self.engine)
        self.adding = AddingRepository(self.engine)
        self.operations = OperationsRepository(self.engine)
        self.retention = RetentionRepository(self.engine)
        self.statuses: dict[int, TaskStatus] = {}
        self.attempts: dict[int, int] = {}
        self.settled: set[tuple[int, int]] = set()
        self.live: set[UUID] = set()

    @initialize()
    def start(self) -> None:
        with self.engine.begin() as connection:
            connection.execute(text("TRUNCATE tasks, workers, runs, task_dependencies, audit CASCADE"))

    # -- what workers do ------------------------------------------------------------------------------------------

    @rule(
        agent=st.sampled_from(["a", "b"]),
        priority=st.integers(-2, 2),
        retries=st.integers(0, 2),
        key=st.sampled_from([None, None, "k1", "k2"]),
        parent=st.integers(0, 3),
    )
    def submit(self, agent: str, priority: int, retries: int, key: str | None, parent: int) -> None:
        """Add a task, half of them behind an earlier one."""
        after = (sorted(self.statuses)[-parent],) if 0 < parent <= len(self.statuses) else ()
        self.adding.add_many([NewTask(agent, priority=priority, max_retries=retries, unique_key=key, after=after)])

    @rule(target=claims, limit=st.integers(1, 3), suspects=st.booleans(), fresh=st.booleans())
    def claim(self, limit: int, suspects: bool, fresh: bool) -> Any:
        """A worker, an old or a new one, claims."""
        worker = next(iter(sorted(self.live)), None)
        if worker is None or fresh:
            worker = self._register()
        claimed = self.tasks.claim(worker, KNOWN, limit, suspects=suspects)
        assert claimed.alive
        assert len(claimed.claims) <= limit
        for claim in claimed.claims:
            assert claim.attempt == self.attempts.get(claim.task_id, 0) + 1
            assert (claim.lost_count > 0) == suspects
        return tuple(claimed.claims)

    @precondition(lambda self: self.live)
    @rule(compares=st.booleans())
    def claim_unanswered(self, compares: bool) -> None:
        """The line is cut at the commit of a claim: the worker compares and gives it back, unless it dies before."""
        worker = min(self.live)
        before = self.tasks.owned(worker)
        lost = self.tasks.claim(worker, KNOWN, 2).claims
        unknown = self.tasks.owned(worker) - before
        assert unknown == {(claim.task_id, claim.attempt) for claim in lost}
        if compares:
            assert self.tasks.hand_back(worker, sorted(unknown), "unknown") == len(unknown)
            assert self.tasks.owned(worker) == before
            assert self.tasks.hand_back(worker, sorted(unknown), "unknown") == 0

    @rule(target=stale, held=consumes(claims), kind=OUTCOMES, twice=st.booleans())
    def record(self, held: tuple[Claim, ...], kind: OutcomeClass, twice: bool) -> tuple[Claim, ...]:
        """The outcomes of a claim are recorded, at times twice, as after an unknown commit."""
        if not held:
            return held
        batch = [Ended(claim, Outcome(kind, elapsed=0.5, message="m"), "w", "host") for claim in held]
        owned = self._owned(held)
        first = self.runs.record_runs(batch).recorded
        assert {(r.task_id, r.attempt) for r in first if not r.late} >= owned
        if twice:
            again = self.runs.record_runs(batch).recorded
            assert [r.late for r in again] == [r.late for r in first]
        return held

    @rule(held=stale, kind=OUTCOMES)
    def record_late(self, held: tuple[Claim, ...], kind: OutcomeClass) -> None:
        """Somebody reports an attempt that was settled long ago: nothing moves."""
        before = self._rows()
        if held:
            self.runs.record_runs([Ended(claim, Outcome(kind, elapsed=9), "w", "host") for claim in held])
        assert self._rows() == before

    @rule(held=consumes(claims), target=stale)
    def hand_back(self, held: tuple[Claim, ...]) -> tuple[Claim, ...]:
        """A worker gives back what it never started."""
        for claim in held:
            self.tasks.hand_back(claim.claimed_by, [(claim.task_id, claim.attempt)], "never started")
        return held

    # -- what the watchdog and time do ----------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule()
    def crash(self) -> None:
        """A worker dies with all that it holds; its tasks are taken back, in batches; it can never claim again."""
        worker = min(self.live)
        assert self.workers.mark_gone([worker], "killed") == [worker]
        assert self.workers.mark_gone([worker], "killed again") == []
        self._is_dead(worker)

    @precondition(lambda self: self.live)
    @rule(beyond=st.booleans(), witnessed=st.booleans())
    def stop_and_continue(self, beyond: bool, witnessed: bool) -> None:
        """A worker stands still: for less than its lease, or unseen, that is nothing; else it is dead when it goes on."""
        worker = max(self.live)
        others = self.live - {worker}
        self._age(others, renewing_since=3600 if witnessed else 1)
        self._age({worker}, renewed_at=60 if beyond else 30)
        if beyond and witnessed and others:
            assert self.workers.judge() == [worker]
            assert self.workers.judge() == []
            self._is_dead(worker)
        else:
            assert self.workers.judge() == []
            assert self.tasks.take_back() == []
            assert self.workers.renew(worker).alive

    @precondition(lambda self: self.live)
    @rule()
    def restart(self) -> None:
        """The database was away for longer than any lease: nobody is dead, neither before they renew nor after."""
        self._age(self.live, renewed_at=600, renewing_since=3600)
        for worker in sorted(self.live):
            assert self.workers.judge() == []
            assert self.workers.renew(worker).alive
        assert not self.workers.witness(40)
        assert self.tasks.take_back() == []

    @rule()
    def time_passes(self) -> None:
        """Every wait is over, and the promoter sees it."""
        with self.engine.begin() as connection:
            connection.execute(
                text("UPDATE tasks SET available_at = available_at - interval '8 days' WHERE status = 'pending'")
            )
        self.tasks.promote()

    # -- what operators do ----------------------------------------------------------------------------------------

    @precondition(lambda self: self.statuses)
    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        """Cancel any task: at once when it does not run, by request when it does, refused when it is done or failed."""
        task = self._some(which)
        status = self.statuses[task]
        try:
            self.operations.cancel_one(task, actor="op", reason=None)
        except Conflict:
            assert status in (TaskStatus.DONE, TaskStatus.FAILED)
        else:
            now = self._rows()[task]
            assert now.status == "cancelled" or (now.status == "running" and now.cancel_requested_at is not None)

    @precondition(lambda self: self.statuses)
    @rule(which=st.integers(0, 5))
    def retry(self, which: int) -> None:
        """Retry any task: only failed and cancelled ones open again, with their counts at zero and their attempt kept."""
        task = self._some(which)
        status = self.statuses[task]
        try:
            self.operations.retry_one(task, actor="op", reason=None)
        except Conflict:
            row = self._rows()[task]
            assert row.status == status
        else:
            assert status in (TaskStatus.FAILED, TaskStatus.CANCELLED)
            row = self._rows()[task]
            assert row.status in ("pending", "blocked", "cancelled")
            assert row.attempt == self.attempts.get(task, 0)

    @rule()
    def prune(self) -> None:
        """What has ended goes, except what live tasks need; what lives stays."""
        with self.engine.begin() as connection:
            connection.execute(
                text(
                    "UPDATE tasks SET created_at = created_at - interval '9 days', started_at = started_at - interval"
                    " '9 days', finished_at = finished_at - interval '9 days' WHERE finished_at IS NOT NULL"
                )
            )
        before = set(self.statuses)
        self.retention.prune(86_400, kinds=("tasks",))
        left = self._rows()
        with self.engine.connect() as connection:
            needed = set(
                connection.scalars(
                    text(
                        "SELECT d.depends_on FROM task_dependencies d JOIN tasks t ON t.id = d.task_id"
                        " WHERE t.finished_at IS NULL"
                    )
                )
            )
        for id_ in before - set(left):
            assert self.statuses[id_] in ENDED
            del self.statuses[id_], self.attempts[id_]
        assert {id_ for id_ in left if self.statuses[id_] in ENDED} <= needed

    # -- what must always be true ---------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        """Moves are in the table, attempts only grow, each attempt has one run, and only running tasks have owners."""
        rows = self._rows()
        for id_, row in rows.items():
            status = TaskStatus(row.status)
            before = self.statuses.get(id_)
            if before is not None and before is not status and row.attempt == self.attempts[id_]:
                assert self._reachable(before, status), f"task {id_} moved from {before} to {status}"
            assert row.attempt >= self.attempts.get(id_, 0)
            assert (row.claimed_by is not None) == (status is TaskStatus.RUNNING)
            assert (row.finished_at is not None) == (status in ENDED)
            expected = row.attempt - (1 if status is TaskStatus.RUNNING else 0)
            assert row.runs == expected, f"task {id_} is {status} at attempt {row.attempt} with {row.runs} runs"
            assert not (status is TaskStatus.BLOCKED and row.unmet == 0)
            assert not (status in (TaskStatus.PENDING, TaskStatus.RUNNING) and row.unmet > 0)
            self.statuses[id_], self.attempts[id_] = status, row.attempt

    def _reachable(self, start: TaskStatus, end: TaskStatus) -> bool:
        """One rule may move a task twice (taken back and failed; retried and closed with its parent)."""
        return end in TRANSITIONS[start] or any(end in TRANSITIONS[middle] for middle in TRANSITIONS[start])

    def _rows(self) -> dict[int, Any]:
        with self.engine.connect() as connection:
            return {
                row.id: row
                for row in connection.execute(
                    text(
                        "SELECT id, status, attempt, claimed_by, finished_at, cancel_requested_at, retry_count, lost_count,"
                        " (SELECT count(*) FROM runs WHERE task_id = t.id) AS runs,"
                        " (SELECT count(*) FROM task_dependencies d JOIN tasks p ON p.id = d.depends_on"
                        "  WHERE d.task_id = t.id AND p.status <> 'done') AS unmet FROM tasks t"
                    )
                )
            }

    def _register(self) -> UUID:
        worker = self.workers.register(
            Identity("host", 1, "boot", None, 1, "token"),
            name="w",
            slots=3,
            agents=["a", "b"],
            plan=None,
            lease=40,
            heartbeat=10,
        )
        self.live.add(worker)
        return worker

    def _is_dead(self, worker: UUID) -> None:
        """All that it held is taken back, and it can neither renew nor claim."""
        self.live.discard(worker)
        while self.tasks.take_back(2):
            pass
        assert self.tasks.owned(worker) == set()
        assert not self.workers.renew(worker).alive
        refused = self.tasks.claim(worker, KNOWN, 3)
        assert (refused.claims, refused.alive) == ([], False)

    def _age(self, workers: set[UUID], **seconds: float) -> None:
        """Let these instants of *workers* be so many seconds ago."""
        values = ", ".join(f"{name} = clock_timestamp() - {age} * interval '1 s'" for name, age in seconds.items())
        with self.engine.begin() as connection:
            connection.execute(text(f"UPDATE workers SET {values} WHERE id = ANY(:ids)"), {"ids": list(workers)})

    def _owned(self, held: tuple[Claim, ...]) -> set[tuple[int, int]]:
        rows = self._rows()
        return {
            (c.task_id, c.attempt)
            for c in held
            if c.task_id in rows and rows[c.task_id].claimed_by == c.claimed_by and rows[c.task_id].attempt == c.attempt
        }

    def _some(self, which: int) -> int:
        ids = sorted(self.statuses)
        return ids[which % len(ids)]


@pytest.fixture
def machine(engine: Engine) -> type[States]:
    """The machine on the test's database."""
    States.engine = engine
    return States


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def test_a_short_walk(machine: type[States]) -> None:
    """Twenty walks of twenty steps keep every invariant."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20, stateful_step_count=20, deadline=None, database=None, suppress_health_check=QUIET
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_long_walks(machine: type[States]) -> None:
    """Sixty walks of fifty steps keep every invariant."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60, stateful_step_count=50, deadline=None, database=None, suppress_health_check=QUIET
        ),
    )
