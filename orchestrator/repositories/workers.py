"""``WorkerRepository``: leases, their renewal, and death, which is set once and never reverts.

Liveness is judged by a worker's own row alone, by the database's clock, and never by the age of a task. Nobody judges in
the dark: a process may declare others dead only while some worker has been renewing without a gap for a full lease
(``renewing_since``), so that neither a database restart nor a sleeping laptop looks like mass death.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import ColumnElement, Engine, Select, any_, case, exists, func, literal, select, update
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.orm import Session, aliased, sessionmaker
from sqlalchemy.types import Uuid

from orchestrator.domain.entities import Task, WorkerRow
from orchestrator.domain.identity import Identity
from orchestrator.domain.values import value
from orchestrator.domain.words import TaskStatus
from orchestrator.errors import Conflict, NotFound


@value
class Renewal:
    """The answer to a renewal: False means that this worker was declared dead, or never existed here."""

    alive: bool
    draining: bool


@value
class Neighbour:
    """A worker row of the same host, boot and PID namespace: its process can be looked at directly."""

    id: UUID
    name: str
    pid: int
    process_started: int | None
    token: str | None


class WorkerRepository:
    """The workers table."""

    def __init__(self, engine: Engine) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)

    def register(
        self,
        identity: Identity,
        *,
        name: str,
        slots: int,
        agents: Sequence[str],
        plan: str | None,
        lease: float,
        heartbeat: float,
        version: str | None = None,
    ) -> UUID:
        """Add a worker row under a fresh UUID; committed on return. Nothing is inherited from an older row.

        ``agents`` are routes (``Known.route``): an agent of a plan file is another one than its namesakes. ``lease`` and
        ``heartbeat`` are seconds. A name that a live worker already has gets ``-2``, ``-3``, …: ``drain`` and the screens
        go by name.
        """
        worker = uuid4()
        with self._sessions.begin() as session:
            # Two that register at once may get one name; names are for people, nothing is decided by them.
            taken = set(
                session.scalars(
                    select(WorkerRow.name).where(
                        WorkerRow.name.startswith(name, autoescape=True),
                        WorkerRow.dead_at.is_(None),
                        WorkerRow.stopped_at.is_(None),
                    )
                )
            )
            unique, number = name, 2
            while unique in taken:
                unique, number = f"{name}-{number}", number + 1
            session.execute(
                insert(WorkerRow).values(
                    id=worker,
                    name=unique,
                    host=identity.host,
                    pid=identity.pid,
                    boot_id=identity.boot_id,
                    pid_namespace=identity.pid_namespace,
                    process_started=identity.process_started,
                    token=identity.token,
                    version=version,
                    slots=slots,
                    agents=list(agents),
                    plan=plan,
                    lease=timedelta(seconds=lease),
                    heartbeat=timedelta(seconds=heartbeat),
                    clock_ahead=_ahead(time.time()),
                )
            )
        return worker

    def name_of(self, worker: UUID) -> str | None:
        """The name that ``register`` gave."""
        with self._sessions() as session:
            return session.scalar(select(WorkerRow.name).where(WorkerRow.id == worker))

    def renew(self, worker: UUID, *, deaf: bool = False) -> Renewal:
        """Renew the lease of *worker*, and tell how it is; committed on return. *deaf*: it hears of no new tasks.

        ``renewing_since`` starts anew when this renewal comes late (after two heartbeats): who was away cannot say that
        others were silent meanwhile.
        """
        now = func.clock_timestamp()
        late = now - WorkerRow.renewed_at > (WorkerRow.heartbeat + WorkerRow.heartbeat)
        with self._sessions.begin() as session:
            row = session.execute(
                update(WorkerRow)
                .where(WorkerRow.id == worker, WorkerRow.dead_at.is_(None))
                .values(
                    renewed_at=now,
                    renewing_since=case((late, now), else_=WorkerRow.renewing_since),
                    deaf_since=func.coalesce(WorkerRow.deaf_since, now) if deaf else None,
                    clock_ahead=_ahead(time.time()),
                )
                .returning(WorkerRow.draining_at)
            ).one_or_none()
        return Renewal(False, False) if row is None else Renewal(True, row.draining_at is not None)

    def stop(self, worker: UUID) -> None:
        """Say that *worker* ended by itself and holds nothing. Committed on return."""
        with self._sessions.begin() as session:
            session.execute(
                update(WorkerRow)
                .where(WorkerRow.id == worker, WorkerRow.stopped_at.is_(None))
                .values(stopped_at=func.clock_timestamp())
            )

    def judge(self, *, spare: Collection[UUID] = ()) -> list[UUID]:
        """Declare dead every worker whose lease has run out, if there is a witness; return their ids.

        Those in *spare* are left for the next time. The age is checked again under the row lock; a row that is locked
        (its worker claims or renews) is left for the next time, too. Uses workers_live. Committed on return.
        """
        with self._sessions.begin() as session:
            if session.scalar(_some_silent_for(WorkerRow.lease)) is None:
                return []
            victim = aliased(WorkerRow)
            candidates = session.scalars(
                select(victim.id)
                .where(
                    victim.dead_at.is_(None),
                    victim.stopped_at.is_(None),
                    victim.renewed_at < func.clock_timestamp() - victim.lease,
                    exists().where(*_witness(victim.lease)),
                )
                .order_by(victim.id)
            ).all()
            guilty = [each for each in candidates if each not in spare]
            return _bury(session, guilty, "silent for longer than its lease", silent_only=True)

    def witness(self, lease: float) -> bool:
        """Whether some worker has been renewing without a gap for *lease* seconds, up to now."""
        with self._sessions() as session:
            return bool(session.scalar(select(exists().where(*_witness(literal(timedelta(seconds=lease)))))))

    def late(self) -> bool:
        """Whether some live worker has missed two renewals: it may turn out to be dead. Uses workers_live."""
        with self._sessions() as session:
            return session.scalar(_some_silent_for(WorkerRow.heartbeat + WorkerRow.heartbeat)) is not None

    def mark_gone(self, workers: Sequence[UUID], why: str) -> list[UUID]:
        """Declare *workers* dead because their processes are known to be gone; return those that this call buried.

        The caller has looked at the processes, on their own host. Committed on return.
        """
        with self._sessions.begin() as session:
            return _bury(session, sorted(workers), why, silent_only=False)

    def neighbours(self, identity: Identity) -> list[Neighbour]:
        """Live worker rows of the same host, boot and PID namespace as *identity*, itself left out. Uses workers_live."""
        return self._beside(identity, WorkerRow.dead_at.is_(None), WorkerRow.stopped_at.is_(None))

    def fallen(self, identity: Identity) -> list[Neighbour]:
        """The same of workers that were declared dead in the last hour; the newest hundred."""
        return self._beside(
            identity, WorkerRow.dead_at > func.clock_timestamp() - literal(timedelta(hours=1)), most=100
        )

    def _beside(self, identity: Identity, *conditions: ColumnElement[bool], most: int | None = None) -> list[Neighbour]:
        if identity.boot_id is None:
            return []
        with self._sessions() as session:
            rows = session.execute(
                select(WorkerRow.id, WorkerRow.name, WorkerRow.pid, WorkerRow.process_started, WorkerRow.token)
                .where(
                    *conditions,
                    WorkerRow.host == identity.host,
                    WorkerRow.boot_id == identity.boot_id,
                    WorkerRow.pid_namespace.is_not_distinct_from(identity.pid_namespace),
                )
                .order_by(WorkerRow.dead_at.desc())
                .limit(most)
            ).all()
        return [
            Neighbour(*row)
            for row in rows
            if (row.pid, row.process_started) != (identity.pid, identity.process_started)
        ]

    def drain(self, name: str) -> UUID:
        """Ask the live worker called *name* (or with that UUID) to claim no more and to end. Committed on return.

        Raises NotFound when no worker has that name, Conflict when it no longer lives.
        """
        with self._sessions.begin() as session:
            try:
                which = WorkerRow.id == UUID(name)
            except ValueError:
                which = WorkerRow.name == name
            row = session.execute(
                select(WorkerRow.id, WorkerRow.dead_at, WorkerRow.stopped_at)
                .where(which)
                .order_by(WorkerRow.started_at.desc())
                .limit(1)
                .with_for_update(key_share=True)
            ).one_or_none()
            if row is None:
                raise NotFound(f"no worker is called {name!r}", hint="orchestrator workers lists them", worker=name)
            if row.dead_at is not None or row.stopped_at is not None:
                raise Conflict(f"worker {name} has already ended", worker=name)
            session.execute(
                update(WorkerRow)
                .where(WorkerRow.id == row.id, WorkerRow.draining_at.is_(None))
                .values(draining_at=func.clock_timestamp())
            )
            return row.id  # type: ignore[no-any-return]


def _ahead(clock: float) -> Any:
    """By how many seconds *clock*, just read, is before the database's."""
    return clock - func.extract("epoch", func.clock_timestamp())


def _some_silent_for(span: Any) -> Select[Any]:
    """A live worker that has not renewed for *span*, if there is one. Uses workers_live.

    Not EXISTS: by the statistics many rows are neither dead nor stopped, as if the two had nothing to do with each other,
    and the first of many would be found soon in the table itself, which has a row of every process of the last month.
    """
    return (
        select(WorkerRow.id)
        .where(
            WorkerRow.dead_at.is_(None),
            WorkerRow.stopped_at.is_(None),
            WorkerRow.renewed_at < func.clock_timestamp() - span,
        )
        .order_by(WorkerRow.id)
        .limit(1)
    )


def _witness(lease: Any) -> tuple[ColumnElement[bool], ...]:
    return (
        WorkerRow.dead_at.is_(None),
        WorkerRow.stopped_at.is_(None),
        WorkerRow.renewed_at > func.clock_timestamp() - (WorkerRow.heartbeat + WorkerRow.heartbeat),
        WorkerRow.renewing_since <= func.clock_timestamp() - lease,
    )


def _bury(session: Session, workers: Sequence[UUID], why: str, *, silent_only: bool) -> list[UUID]:
    if not workers:
        return []
    conditions: list[ColumnElement[bool]] = [WorkerRow.dead_at.is_(None), WorkerRow.stopped_at.is_(None)]
    if silent_only:
        conditions.append(WorkerRow.renewed_at < func.clock_timestamp() - WorkerRow.lease)
    # FOR UPDATE, not the weaker lock: it has to wait for a claim, which holds FOR KEY SHARE on its worker's row.
    locked = session.scalars(
        select(WorkerRow.id)
        .where(WorkerRow.id == any_(literal(list(workers), ARRAY(Uuid))), *conditions)
        .order_by(WorkerRow.id)
        .with_for_update(skip_locked=silent_only)
    ).all()
    if not locked:
        return []
    held = (
        select(func.count())
        .select_from(Task)
        .where(Task.status == TaskStatus.RUNNING, Task.claimed_by == WorkerRow.id)
        .scalar_subquery()
    )
    return list(
        session.scalars(
            update(WorkerRow)
            .where(WorkerRow.id == any_(literal(list(locked), ARRAY(Uuid))), *conditions)
            .values(dead_at=func.clock_timestamp(), dead_why=why, held=held)
            .returning(WorkerRow.id),
            execution_options={"synchronize_session": False},
        )
    )


__all__ = ["Neighbour", "Renewal", "WorkerRepository"]
