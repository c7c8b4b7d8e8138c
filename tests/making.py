"""Tasks, workers and moves for tests of the repositories: short ways through the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, text

from orchestrator.domain.given import NewTask
from orchestrator.domain.identity import Identity
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.repositories.adding import Added, AddingRepository
from orchestrator.repositories.runs import Ended, RunRepository
from orchestrator.repositories.tasks import Known, TaskRepository
from orchestrator.repositories.workers import WorkerRepository

DONE = Outcome(OutcomeClass.DONE, result={"ok": True}, elapsed=0.5)
BROKEN = Outcome(OutcomeClass.PERMANENT, cause="bad_input", message="cannot be done", elapsed=0.1)
CRASHED = Outcome(OutcomeClass.TRANSIENT, cause="exit_code", message="exit 1", elapsed=0.1)


@dataclass
class Making:
    """A queue with one worker."""

    engine: Engine
    worker: UUID

    @classmethod
    def on(cls, engine: Engine) -> Making:
        return cls(engine, new_worker(engine))

    @property
    def tasks(self) -> TaskRepository:
        return TaskRepository(self.engine)

    @property
    def runs(self) -> RunRepository:
        return RunRepository(self.engine)

    def add(self, agent: str = "coder", **values: Any) -> int:
        """Add one task; return its id."""
        return self.add_all([NewTask(agent, **values)])[0].id

    def add_all(self, tasks: Sequence[NewTask]) -> list[Added]:
        """Add tasks."""
        return AddingRepository(self.engine).add_many(tasks)

    def claim(self, limit: int = 1, *agents: str, **options: Any) -> list[Claim]:
        """Claim up to *limit* tasks of *agents* (coder)."""
        known = [Known(agent) for agent in agents or ("coder",)]
        return self.tasks.claim(options.pop("worker", self.worker), known, limit, **options).claims

    def run(self, task_id: int, outcome: Outcome = DONE, agent: str = "coder") -> Claim:
        """Claim tasks of *agent* until *task_id* comes, which must be the next one, and record *outcome*."""
        (claim,) = self.claim(1, agent)
        assert claim.task_id == task_id
        self.runs.record_runs([Ended(claim, outcome, "w", "host")])
        return claim

    def end(self, claim: Claim, outcome: Outcome = DONE) -> None:
        """Record *outcome* of *claim*."""
        self.runs.record_runs([Ended(claim, outcome, "w", "host")])

    def end_all(self, claims: Sequence[Claim], outcome: Outcome = DONE) -> None:
        """Record *outcome* of all *claims* in one transaction."""
        self.runs.record_runs([Ended(claim, outcome, "w", "host") for claim in claims])

    def status(self, *ids: int) -> list[str]:
        """The statuses of *ids*, in this order."""
        rows = {
            row.id: row.status for row in self.query("SELECT id, status FROM tasks WHERE id = ANY(:ids)", ids=list(ids))
        }
        return [rows[id_] for id_ in ids]

    def row(self, task_id: int) -> Any:
        """The whole row of a task."""
        (row,) = self.query("SELECT * FROM tasks WHERE id = :id", id=task_id)
        return row

    def query(self, statement: str, **values: Any) -> list[Any]:
        """The rows of any statement, in a transaction of its own that commits."""
        with self.engine.begin() as connection:
            result = connection.execute(text(statement), values)
            return list(result) if result.returns_rows else []


def new_worker(engine: Engine, name: str = "w", agents: Sequence[str] = ("coder",), lease: float = 40.0) -> UUID:
    """Register a worker with a name and agents."""
    who = Identity("host", 1, "boot", "ns", 1, "token")
    return WorkerRepository(engine).register(
        who, name=name, slots=4, agents=list(agents), plan=None, lease=lease, heartbeat=lease / 4
    )


__all__ = ["BROKEN", "CRASHED", "DONE", "Making", "new_worker"]
