"""``PlanRepository``: submitting a plan, all or nothing, again and again.

A plan is known by its name, a task in it by its own name (or, without one, by its hash). What is unchanged stays as it
is; what is new is added; what changed is made anew, its old task being cancelled first if it is still live. One
transaction, under the lock of the plan's row: two submissions of one plan come one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from sqlalchemy import Engine, any_, func, literal, select, update
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.types import BigInteger

from orchestrator.domain.entities import Plan, Task, table
from orchestrator.domain.given import NewTask
from orchestrator.domain.values import value
from orchestrator.domain.words import ENDED, OutcomeClass, TaskStatus
from orchestrator.errors import NotFound
from orchestrator.repositories.adding import Added, check_task, insert_tasks, ready_agents
from orchestrator.repositories.asking import withdraw
from orchestrator.repositories.settling import close_families


@value
class Submitted:
    """What a submission did. ``tasks`` are in the plan's order; ``removed`` are ids that the plan no longer names."""

    plan_id: int
    plan: str
    tasks: list[Added]
    removed: list[int] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)
    wake: set[str] = field(default_factory=set)


@value
class _Known:
    id: int
    name: str | None
    task_hash: str | None
    status: TaskStatus


class PlanRepository:
    """The plans table, and tasks as parts of a plan."""

    def __init__(self, engine: Engine) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)

    def find(self, name: str) -> int:
        """The id of the plan called *name*. Raises NotFound."""
        with self._sessions() as session:
            found = session.scalar(select(Plan.id).where(Plan.name == name))
        if found is None:
            raise NotFound(f"no plan is called {name!r}", plan=name)
        return found

    def current(self, plan_id: int) -> list[int]:
        """The ids of the plan's current tasks, in the plan's order. Uses tasks_of_plan."""
        with self._sessions() as session:
            return list(
                session.scalars(
                    select(Task.id)
                    .where(Task.plan_id == plan_id, Task.superseded_at.is_(None))
                    .order_by(Task.plan_order, Task.id)
                )
            )

    def submit(self, name: str, tasks: Sequence[NewTask], *, fresh: bool = False) -> Submitted:
        """Submit *tasks*, parents before children, as the plan *name*; committed on return, all or nothing.

        With *fresh* every task is made anew. Raises InvalidInput when a task cannot be stored; nothing is written then.
        """
        for task in tasks:
            check_task(task)
        with self._sessions.begin() as session:
            plan_id = session.scalar(
                insert(table(Plan))
                .values(name=name)
                .on_conflict_do_update(index_elements=["name"], set_={"submitted_at": func.clock_timestamp()})
                .returning(Plan.id)
            )
            assert plan_id is not None
            before = [
                _Known(row.id, row.name, row.task_hash, TaskStatus(row.status))
                for row in session.execute(
                    select(Task.id, Task.name, Task.task_hash, Task.status)
                    .where(Task.plan_id == plan_id, Task.superseded_at.is_(None))
                    .order_by(Task.id)
                )
            ]
            return self._submit(session, plan_id, name, tasks, before, fresh)

    def _submit(
        self, session: Session, plan_id: int, name: str, tasks: Sequence[NewTask], before: list[_Known], fresh: bool
    ) -> Submitted:
        by_name = {known.name: known for known in before if known.name is not None}
        by_hash: dict[str | None, list[_Known]] = {}
        for known in before:
            if known.name is None:
                by_hash.setdefault(known.task_hash, []).append(known)
        kept: dict[int, _Known] = {}
        anew: set[str] = set()
        replaced: list[int] = []
        for place, task in enumerate(tasks):
            if task.name is not None:
                old = by_name.pop(task.name, None)
            else:
                same = by_hash.get(task.task_hash)
                old = same.pop(0) if same else None
            if old is None:
                if task.name is not None:
                    anew.add(task.name)
                continue
            # A live task waits for the very rows that it was made with: with a parent made anew, it is made anew too.
            moved = old.status is not TaskStatus.DONE and any(need in anew for need in task.after)
            if fresh or moved or old.task_hash != task.task_hash:
                replaced.append(old.id)
                if task.name is not None:
                    anew.add(task.name)
            else:
                kept[place] = old
        removed = sorted(known.id for known in [*by_name.values(), *(k for same in by_hash.values() for k in same)])
        self._supersede(session, replaced)
        places = [place for place in range(len(tasks)) if place not in kept]
        named = {tasks[place].name or "": known.id for place, known in kept.items()}
        added = insert_tasks(
            session,
            [tasks[place] for place in places],
            plan=(plan_id, name),
            orders=places,
            named=named,
        )
        results = {place: Added(known.id, False, known.status) for place, known in kept.items()}
        results |= dict(zip(places, added, strict=True))
        return Submitted(
            plan_id,
            name,
            [results[place] for place in range(len(tasks))],
            removed,
            replaced,
            ready_agents([tasks[place] for place in places], added),
        )

    def _supersede(self, session: Session, ids: Sequence[int]) -> None:
        """Take *ids* out of the plan; those still live are cancelled, running ones asked to end."""
        if not ids:
            return
        wanted = Task.id == any_(literal(sorted(ids), ARRAY(BigInteger)))
        locked = session.execute(
            select(Task.id, Task.status).where(wanted).order_by(Task.id).with_for_update(key_share=True)
        ).all()
        now = func.clock_timestamp()
        options = {"synchronize_session": False}
        # Its unique key is free for the task that comes instead, in this very transaction.
        session.execute(
            update(Task).where(wanted).values(superseded_at=now, unique_key=None), execution_options=options
        )
        running = [row.id for row in locked if row.status == TaskStatus.RUNNING]
        idle = [row.id for row in locked if row.status != TaskStatus.RUNNING and TaskStatus(row.status) not in ENDED]
        session.execute(
            update(Task)
            .where(Task.id == any_(literal(running, ARRAY(BigInteger))), Task.cancel_requested_at.is_(None))
            .values(cancel_requested_at=now),
            execution_options=options,
        )
        session.execute(
            update(Task)
            .where(Task.id == any_(literal(idle, ARRAY(BigInteger))))
            .values(
                status=TaskStatus.CANCELLED,
                finished_at=now,
                error_class=OutcomeClass.CANCELLED,
                error_cause="replaced",
                error_message="made anew by a later submission of its plan",
            ),
            execution_options=options,
        )
        withdraw(session, idle, actor=None, reason="made anew by a later submission of its plan")
        if idle:
            close_families(session, dict.fromkeys(idle, TaskStatus.CANCELLED))


__all__ = ["PlanRepository", "Submitted"]
