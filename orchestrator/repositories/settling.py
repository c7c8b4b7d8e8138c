"""Writing what ``settle`` decided, inside the caller's transaction: the task's move, and that of the tasks that need it.

Used by ``record_runs`` and ``take_back``. Nothing here decides: the only rules are how a family follows its parents.
Rows are locked in id order; a parent is always older than its children, so its id is smaller.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Double,
    Integer,
    Text,
    Uuid,
    any_,
    bindparam,
    case,
    cast,
    column,
    exists,
    func,
    literal,
    literal_column,
    null,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSON, TIMESTAMP
from sqlalchemy.orm import Session, aliased

from orchestrator.domain.entities import Dependency, Task, table
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.settle import Settlement
from orchestrator.domain.words import OutcomeClass, TaskStatus

Move = tuple[Claim, Outcome, Settlement]

_TIME = TIMESTAMP(timezone=True)
_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("id", BigInteger()),
    ("attempt", Integer()),
    ("claimed_by", Uuid()),
    ("status", Text()),
    ("elapsed", Double()),
    ("delay", Double()),
    ("at", _TIME),
    ("retry_count", Integer()),
    ("lost_count", Integer()),
    ("limited_count", Integer()),
    ("limited_since", _TIME),
    ("result", Text()),
    ("error_class", Text()),
    ("error_cause", Text()),
    ("error_message", Text()),
    ("session", Text()),
)


def _build_apply() -> Any:
    """One UPDATE for a whole batch, joined to arrays; each row moves only under its fence, by the primary key."""
    new = (
        func.unnest(*(bindparam(f"{name}s", type_=ARRAY(kind)) for name, kind in _COLUMNS))
        .table_valued(*(column(name, kind) for name, kind in _COLUMNS))
        .render_derived(name="new")
    )
    now = func.clock_timestamp()
    ended = new.c.status.in_([literal_column(f"'{word}'") for word in ("done", "failed", "cancelled")])
    pending = new.c.status == literal_column("'pending'")
    week = func.make_interval(0, 0, 0, 7)
    available = case(
        (~pending, Task.available_at),
        (new.c.at.is_not(None), func.least(func.greatest(new.c.at, now), now + week)),
        else_=now + func.make_interval(0, 0, 0, 0, 0, 0, new.c.delay),
    )
    return (
        update(table(Task))
        .where(
            Task.id == new.c.id,
            Task.attempt == new.c.attempt,
            Task.claimed_by == new.c.claimed_by,
            Task.status == literal_column("'running'"),
        )
        .values(
            status=new.c.status,
            claimed_by=null(),
            finished_at=case((ended, Task.started_at + func.make_interval(0, 0, 0, 0, 0, 0, new.c.elapsed))),
            available_at=available,
            due=case((pending, (new.c.delay <= 0) & new.c.at.is_(None)), else_=True),
            cancel_requested_at=case((new.c.status == literal_column("'cancelled'"), Task.cancel_requested_at)),
            retry_count=new.c.retry_count,
            lost_count=new.c.lost_count,
            limited_count=new.c.limited_count,
            limited_since=new.c.limited_since,
            result=cast(new.c.result, JSON),
            error_class=new.c.error_class,
            error_cause=new.c.error_cause,
            error_message=new.c.error_message,
            session=func.coalesce(new.c.session, Task.session),
            live_usage=null(),
        )
        .returning(Task.id)
        .execution_options(synchronize_session=False)
    )


_APPLY = _build_apply()


def apply(session: Session, moves: Sequence[Move], families: Iterable[int] | None = None) -> set[str]:
    """Move the tasks of *moves* under their fences, and their families with them; return agents that may have work now.

    ``families`` are the ids that have dependants (None: look for all). Raises AssertionError when a fence that the
    caller checked under lock no longer holds: the transaction must not commit then.
    """
    if not moves:
        return set()
    arrays: dict[str, list[Any]] = {f"{name}s": [] for name, _ in _COLUMNS}
    for claim, outcome, settlement in moves:
        _add(arrays, claim, outcome, settlement)
    moved = set(session.scalars(_APPLY, arrays))
    if len(moved) != len(moves):
        missing = sorted({claim.task_id for claim, _, _ in moves} - moved)
        raise AssertionError(f"tasks {missing} moved although their rows were locked")
    wake = {claim.agent for claim, _, s in moves if s.status is TaskStatus.PENDING and s.delay <= 0 and s.at is None}
    wide = None if families is None else set(families)
    done = [c.task_id for c, _, s in moves if s.status is TaskStatus.DONE and (wide is None or c.task_id in wide)]
    stopped = {
        c.task_id: s.status
        for c, _, s in moves
        if s.status in (TaskStatus.FAILED, TaskStatus.CANCELLED) and (wide is None or c.task_id in wide)
    }
    if done:
        wake |= wake_families(session, done)
    if stopped:
        close_families(session, stopped)
    return wake


def _add(arrays: dict[str, list[Any]], claim: Claim, outcome: Outcome, settlement: Settlement) -> None:
    done = settlement.status is TaskStatus.DONE
    cancelled = settlement.status is TaskStatus.CANCELLED
    if done:
        error: tuple[str | None, str | None, str | None] = (None, None, None)
    elif cancelled:
        error = (OutcomeClass.CANCELLED.value, "requested", outcome.message)
    else:
        error = (
            outcome.status.value,
            settlement.cause or outcome.cause,
            settlement.message or outcome.message,
        )
    arrays["ids"].append(claim.task_id)
    arrays["attempts"].append(claim.attempt)
    arrays["claimed_bys"].append(claim.claimed_by)
    arrays["statuss"].append(settlement.status.value)
    arrays["elapseds"].append(max(0.0, outcome.elapsed))
    arrays["delays"].append(settlement.delay)
    arrays["ats"].append(settlement.at)
    arrays["retry_counts"].append(settlement.retry_count)
    arrays["lost_counts"].append(settlement.lost_count)
    arrays["limited_counts"].append(settlement.limited_count)
    arrays["limited_sinces"].append(settlement.limited_since)
    arrays["results"].append(json.dumps(outcome.result) if done and outcome.result is not None else None)
    arrays["error_classs"].append(error[0])
    arrays["error_causes"].append(error[1])
    arrays["error_messages"].append(error[2])
    arrays["sessions"].append(outcome.session)


def wake_families(session: Session, done: Sequence[int]) -> set[str]:
    """Make blocked children of *done* ready when all that they need is done; return their agents.

    The children are locked first and judged by a second statement: of two parents that end in the same moment, the
    later one waits for the lock and then sees the earlier one's commit. Judged in one statement, each would miss it.
    """
    children = session.scalars(
        select(Task.id)
        .where(
            Task.id.in_(select(Dependency.task_id).where(Dependency.depends_on == any_(_ids(done)))),
            Task.status == TaskStatus.BLOCKED,
        )
        .order_by(Task.id)
        .with_for_update(key_share=True)
    ).all()
    if not children:
        return set()
    return unblock(session, children)


def unblock(session: Session, children: Sequence[int]) -> set[str]:
    """Move *children*, already locked, from blocked to pending where every parent is done; return their agents."""
    parent = aliased(Task)
    unmet = exists().where(
        Dependency.task_id == Task.id, parent.id == Dependency.depends_on, parent.status != TaskStatus.DONE
    )
    return set(
        session.scalars(
            update(Task)
            .where(Task.id == any_(_ids(children)), Task.status == TaskStatus.BLOCKED, ~unmet)
            .values(status=TaskStatus.PENDING, due=Task.available_at <= func.clock_timestamp())
            .returning(Task.agent),
            execution_options={"synchronize_session": False},
        )
    )


def close_families(session: Session, stopped: Mapping[int, TaskStatus]) -> list[int]:
    """Cancel every blocked descendant of tasks that failed or were cancelled, naming the one that stopped them.

    A descendant of several is told of the one with the smallest id. Returns the ids that were cancelled.
    """
    roots = (
        select(Dependency.task_id, Dependency.depends_on.label("root"))
        .where(Dependency.depends_on == any_(_ids(list(stopped))))
        .cte("descendants", recursive=True)
    )
    further = aliased(Dependency)
    descendants = roots.union(select(further.task_id, roots.c.root).where(further.depends_on == roots.c.task_id))
    pairs = session.execute(
        select(descendants.c.task_id, func.min(descendants.c.root)).group_by(descendants.c.task_id)
    ).all()
    if not pairs:
        return []
    root_of: dict[int, int] = {child: root for child, root in pairs}  # noqa: C416 - rows, not pairs
    locked = session.scalars(
        select(Task.id)
        .where(Task.id == any_(_ids(sorted(root_of))), Task.status.in_([TaskStatus.BLOCKED]))
        .order_by(Task.id)
        .with_for_update(key_share=True)
    ).all()
    if not locked:
        return []
    labels = dict(
        session.execute(
            select(Task.id, func.coalesce(Task.name, Task.title, Task.agent)).where(
                Task.id == any_(_ids(sorted({root_of[child] for child in locked})))
            )
        ).all()
    )
    for root in sorted({root_of[child] for child in locked}):
        verb = stopped[root].value
        session.execute(
            update(Task)
            .where(Task.id == any_(_ids([child for child in locked if root_of[child] == root])))
            .values(
                status=TaskStatus.CANCELLED,
                finished_at=func.clock_timestamp(),
                error_class=OutcomeClass.CANCELLED,
                error_cause=f"parent_{verb}",
                error_message=f"needs {root} {labels[root]}, which {'failed' if verb == 'failed' else 'was cancelled'}",
            ),
            execution_options={"synchronize_session": False},
        )
    return list(locked)


def _ids(ids: Sequence[int]) -> Any:
    return literal(list(ids), ARRAY(BigInteger))


__all__ = ["Move", "apply", "close_families", "unblock", "wake_families"]
