"""Writing what ``settle`` decided, inside the caller's transaction: the task's move, and that of the tasks that need it.

Used by ``record_runs`` and ``take_back``. Nothing here decides: the only rules are how a family follows its parents.
Rows are locked in id order; a parent is always older than its children, so its id is smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ARRAY,
    CTE,
    BigInteger,
    Boolean,
    ColumnElement,
    Double,
    Integer,
    Select,
    Text,
    Uuid,
    any_,
    bindparam,
    case,
    column,
    exists,
    false,
    func,
    literal,
    literal_column,
    null,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import INTERVAL, JSON, JSONB, TIMESTAMP, insert
from sqlalchemy.orm import Session, aliased

from orchestrator.database.engine import alone
from orchestrator.domain.entities import Dependency, Run, Task, table
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.settle import Settlement
from orchestrator.domain.values import value
from orchestrator.domain.words import OutcomeClass, TaskStatus
from orchestrator.repositories import CallerSession
from orchestrator.repositories.asking import ask_approval


@value
class Ending:
    """An attempt that ended, what was decided for its task, and who ran it."""

    claim: Claim
    outcome: Outcome
    settlement: Settlement
    worker: str | None = None
    host: str | None = None


_TIME = TIMESTAMP(timezone=True)
_RUN: tuple[tuple[str, Any], ...] = (
    ("task_id", BigInteger()),
    ("attempt", Integer()),
    ("status", Text()),
    ("cause", Text()),
    ("message", Text()),
    ("exit_code", Integer()),
    ("signal", Integer()),
    ("worker", Text()),
    ("worker_id", Uuid()),
    ("host", Text()),
    ("result", JSON()),
    ("input_tokens", BigInteger()),
    ("output_tokens", BigInteger()),
    ("total_tokens", BigInteger()),
    ("turns", Integer()),
    ("model", Text()),
    ("cost_usd", Double()),
    ("cost_source", Text()),
    ("counter", Text()),
    ("usage_complete", Boolean()),
    ("session", Text()),
    ("transcript_bytes", BigInteger()),
    ("transcript_dropped_bytes", BigInteger()),
    ("transcript_replaced", Boolean()),
    ("notes", JSONB()),
    ("workspace", JSONB()),
    ("variables", JSONB()),
)
_COUNTED = ("delay", "retry_count", "lost_count", "limited_count")
_NUMBERS = (*_COUNTED, "elapsed", "transcript_bytes", "transcript_dropped_bytes")
"""Columns that are zero where a row says nothing."""
_MOVE: tuple[tuple[str, Any], ...] = (
    ("next_status", Text()),
    ("elapsed", Double()),
    ("delay", Double()),
    ("reset_at", _TIME),
    ("retry_count", Integer()),
    ("lost_count", Integer()),
    ("limited_count", Integer()),
    ("limited_since", _TIME),
    ("error_class", Text()),
    ("error_cause", Text()),
    ("error_message", Text()),
    ("meter", JSONB()),
)


def _build_write() -> Any:
    """One statement for a whole batch: tasks are moved, each under its fence, and the runs of those that moved inserted.

    Returns (id, attempt) of those that moved. The rows come as one JSON text, which costs the client a tenth of what
    arrays do, column by column; what is usual is left out of it (``_row``). What nobody has looked at under the row's
    lock (``looked_at``) moves only if there was nothing to see: no request to cancel it, and no task that needs it.
    """
    ending = (
        func.json_to_recordset(bindparam("endings", type_=JSON))
        .table_valued(*(column(name, kind) for name, kind in (*_RUN, *_MOVE)))
        .render_derived(name="ending", with_types=True)
    )
    usual = {
        "worker": bindparam("worker", type_=Text),
        "worker_id": bindparam("worker_id", type_=Uuid),
        "host": bindparam("host", type_=Text),
        "transcript_replaced": false(),
        "next_status": ending.c.status,
    } | dict.fromkeys(_NUMBERS, literal_column("0"))
    new = (
        select(
            *(
                func.coalesce(ending.c[name], usual[name]).label(name) if name in usual else ending.c[name]
                for name, _ in (*_RUN, *_MOVE)
            )
        )
        .cte("new")
        .prefix_with("MATERIALIZED")
    )
    # Locked in id order, as everywhere. By arrays of ids: joined to ``new``, of which the planner knows nothing, the whole
    # table would be read as soon as it is small, and then still when it has grown.
    locked = (
        select(Task.id)
        .where(Task.id == any_(_array(select(new.c.task_id))), Task.status == literal_column("'running'", Text))
        .order_by(Task.id)
        .with_for_update(key_share=True, of=Task)
        .cte("locked")
        .prefix_with("MATERIALIZED")
    )
    now = func.clock_timestamp()
    done, cancelled, pending, failed = (
        new.c.next_status == literal_column(f"'{word}'", Text) for word in ("done", "cancelled", "pending", "failed")
    )
    available = case(
        (~pending, Task.available_at),
        (new.c.reset_at.is_not(None), func.least(func.greatest(new.c.reset_at, now), now + _seconds(_WEEK))),
        else_=now + _seconds(new.c.delay),
    )
    moved = (
        update(table(Task))
        .where(
            Task.id == any_(_array(select(locked.c.id))),
            Task.id == new.c.task_id,
            Task.attempt == new.c.attempt,
            Task.claimed_by == new.c.worker_id,
            Task.status == literal_column("'running'", Text),
            bindparam("looked_at", type_=Boolean) | (Task.cancel_requested_at.is_(None) & ~Task.is_parent),
        )
        .values(
            agent=Task.agent,  # see the claim
            status=new.c.next_status,
            claimed_by=null(),
            finished_at=case((done | failed | cancelled, Task.started_at + _seconds(new.c.elapsed))),
            available_at=available,
            due=case((pending, (new.c.delay <= literal_column("0", Double)) & new.c.reset_at.is_(None)), else_=true()),
            cancel_requested_at=case((cancelled, Task.cancel_requested_at)),
            retry_count=new.c.retry_count,
            lost_count=new.c.lost_count,
            limited_count=new.c.limited_count,
            limited_since=new.c.limited_since,
            result=case((done, new.c.result)),
            error_class=new.c.error_class,
            error_cause=new.c.error_cause,
            error_message=new.c.error_message,
            session=func.coalesce(new.c.session, Task.session),
            workspace=func.coalesce(new.c.workspace, Task.workspace),
            # What the next attempt of a resumed session is counted from; an attempt that says nothing leaves it.
            meter=func.coalesce(new.c.meter, Task.meter),
            live_usage=null(),
        )
        .returning(Task.id, Task.attempt, Task.started_at)
        .cte("moved")
    )
    runs = (
        insert(table(Run))
        .from_select(
            [*(name for name, _ in _RUN), "started_at", "finished_at"],
            select(
                *(new.c[name] for name, _ in _RUN), moved.c.started_at, moved.c.started_at + _seconds(new.c.elapsed)
            ).join(moved, (moved.c.id == new.c.task_id) & (moved.c.attempt == new.c.attempt)),
        )
        .on_conflict_do_nothing(index_elements=["task_id", "attempt"])
        .cte("written")
    )
    return select(moved.c.id, moved.c.attempt).add_cte(runs)


def _array(ids: Select[Any]) -> Any:
    return func.array(ids.scalar_subquery(), type_=ARRAY(BigInteger))


_WEEK = literal_column("604800", Double)


def _seconds(seconds: Any) -> Any:
    return func.make_interval(0, 0, 0, 0, 0, 0, seconds, type_=INTERVAL)


def write_alone(session: Session, endings: Sequence[Ending]) -> tuple[set[tuple[int, int]], set[str]]:
    """Move what can be moved without a look at it; return (id, attempt) of what moved and the agents with new work.

    What stays, with nothing written of it: attempts that no longer own their task, tasks that others need, and those
    that somebody asked to cancel. One statement; the caller commits all the same.
    """
    rows = alone(session.connection()).execute(_WRITE, _values(endings, looked_at=False))
    moved = {(id_, attempt) for id_, attempt in rows}
    # The end of a task with a key makes room for another one of that key.
    wakes = [e.claim for e in endings if _ready(e) or e.claim.keyed]
    wake = {claim.agent for claim in wakes if (claim.task_id, claim.attempt) in moved}
    return moved, wake


def _ready(ending: Ending) -> bool:
    settlement = ending.settlement
    return settlement.status is TaskStatus.PENDING and settlement.delay <= 0 and settlement.at is None


def write(session: Session, endings: Sequence[Ending], families: Iterable[int] | None = None) -> set[str]:
    """Insert the runs of *endings* and move their tasks, and the tasks that need them; return agents with new work.

    The caller holds the rows' locks and has checked the fences. ``families`` are the ids that have dependants (None: look
    for all). Raises AssertionError when a fence does not hold after all: the transaction must not commit then.
    """
    if not endings:
        return set()
    rows = session.connection().execute(_WRITE, _values(endings, looked_at=True))
    written = {(id_, attempt) for id_, attempt in rows}
    missing = sorted({(ending.claim.task_id, ending.claim.attempt) for ending in endings} - written)
    if missing:
        raise AssertionError(f"tasks moved although their rows were locked: {missing}")
    wide = None if families is None else set(families)
    wake: set[str] = set()
    done: list[int] = []
    stopped: dict[int, TaskStatus] = {}
    for ending in endings:
        task_id, settlement = ending.claim.task_id, ending.settlement
        if ending.claim.keyed:
            wake.add(ending.claim.agent)  # there is room for another task of its key
        if settlement.status is TaskStatus.PENDING:
            if _ready(ending):
                wake.add(ending.claim.agent)
        elif wide is None or task_id in wide:
            if settlement.status is TaskStatus.DONE:
                done.append(task_id)
            elif settlement.status in (TaskStatus.FAILED, TaskStatus.CANCELLED):
                stopped[task_id] = settlement.status
    if done and stopped:
        # Both at once and in id order: one after the other, two recorders could wait for each other's children.
        _lock_families(session, done, list(stopped))
    if done:
        wake |= wake_families(session, done)
    if stopped:
        close_families(session, stopped)
    return wake


def _values(endings: Sequence[Ending], *, looked_at: bool) -> dict[str, Any]:
    """What the statement is given: who ran them, if it was one worker, is said once."""
    ran = {(ending.worker, ending.claim.claimed_by, ending.host) for ending in endings}
    worker, worker_id, host = ran.pop() if len(ran) == 1 else (None, None, None)
    rows = [_row(ending) for ending in endings]
    if worker_id is None:
        for row, ending in zip(rows, endings, strict=True):
            row |= {"worker": ending.worker, "worker_id": str(ending.claim.claimed_by), "host": ending.host}
    return {"endings": rows, "worker": worker, "worker_id": worker_id, "host": host, "looked_at": looked_at}


def _row(ending: Ending) -> dict[str, Any]:
    """One ending as the object that the statement reads; what is left out is NULL there, or what is usual."""
    claim, outcome, settlement = ending.claim, ending.outcome, ending.settlement
    row: dict[str, Any] = {"task_id": claim.task_id, "attempt": claim.attempt, "status": outcome.status}
    if outcome.elapsed > 0:
        row["elapsed"] = outcome.elapsed
    if (session := outcome.session or claim.session) is not None:
        row["session"] = session
    if (workspace := outcome.workspace or claim.workspace) is not None:
        # A lost attempt says nothing: what its live row told is on the claim that is read back.
        row["workspace"] = workspace
    for name in _SAID:
        if (said := getattr(outcome, name)) is not None:
            row[name] = said
    if outcome.notes:
        row["notes"] = list(outcome.notes)
    if outcome.variables:
        row["variables"] = list(outcome.variables)
    size = outcome.transcript
    if size.bytes or size.dropped_bytes or size.replaced:
        row["transcript_bytes"], row["transcript_dropped_bytes"] = size.bytes, size.dropped_bytes
        row["transcript_replaced"] = size.replaced
    usage = outcome.usage
    if usage is not None:
        row |= {
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "total_tokens": usage.total_tokens,
            "turns": usage.turns,
            "model": usage.model,
            "cost_usd": usage.cost_usd,
            "cost_source": usage.cost_source,
            "counter": usage.counter,
            "usage_complete": usage.complete,
        }
        if usage.carry is not None:
            row["meter"] = usage.carry
    for name in _COUNTED:
        if number := getattr(settlement, name):
            row[name] = number
    if settlement.status is TaskStatus.DONE and outcome.status is OutcomeClass.DONE:
        return row
    row["next_status"] = settlement.status
    if settlement.at is not None:
        row["reset_at"] = settlement.at.isoformat()
    if settlement.limited_since is not None:
        row["limited_since"] = settlement.limited_since.isoformat()
    if settlement.status is TaskStatus.CANCELLED:
        row |= {"error_class": OutcomeClass.CANCELLED, "error_cause": "requested", "error_message": outcome.message}
    elif settlement.status is not TaskStatus.DONE:
        row["error_class"] = outcome.status
        row["error_cause"] = settlement.cause or outcome.cause
        row["error_message"] = settlement.message or outcome.message
    return row


_SAID = ("cause", "message", "exit_code", "signal", "result")

_WRITE = _build_write()


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


def _lock_families(session: Session, done: Sequence[int], stopped: Sequence[int]) -> None:
    children = select(Dependency.task_id).where(Dependency.depends_on == any_(_ids([*done, *stopped])))
    found = below(stopped)
    session.execute(
        select(Task.id)
        .where(Task.id.in_(children.union(select(found.c.task_id))), Task.status == TaskStatus.BLOCKED)
        .order_by(Task.id)
        .with_for_update(key_share=True, of=Task)
    ).all()


def unblock(session: CallerSession, children: Sequence[int]) -> set[str]:
    """Move *children*, already locked, from blocked to pending where every parent is done; return their agents.

    One that needs an approval becomes waiting instead, and asks for it.
    """
    parent = aliased(Task)
    unmet = exists().where(
        Dependency.task_id == Task.id, parent.id == Dependency.depends_on, parent.status != TaskStatus.DONE
    )
    moved = session.execute(
        update(Task)
        .where(Task.id == any_(_ids(children)), Task.status == TaskStatus.BLOCKED, ~unmet)
        .values(
            status=case((Task.needs_approval, TaskStatus.WAITING.value), else_=TaskStatus.PENDING.value),
            due=Task.available_at <= func.clock_timestamp(),
        )
        .returning(Task.id, Task.agent, Task.needs_approval),
        execution_options={"synchronize_session": False},
    ).all()
    ask_approval(session, [row.id for row in moved if row.needs_approval])
    return {row.agent for row in moved if not row.needs_approval}


def close_families(session: CallerSession, stopped: Mapping[int, TaskStatus]) -> list[int]:
    """Cancel every blocked descendant of tasks that failed or were cancelled, naming the one that stopped them.

    A descendant of several is told of the one with the smallest id. Returns the ids that were cancelled.
    """
    root_of: dict[int, int] = {}
    locked: set[int] = set()
    while new := _descendants(session, stopped).items() - root_of.items():
        root_of |= dict(new)
        locked |= set(
            session.scalars(
                select(Task.id)
                .where(Task.id == any_(_ids(sorted(child for child, _ in new))), Task.status == TaskStatus.BLOCKED)
                .order_by(Task.id)
                .with_for_update(key_share=True)
            )
        )
        # Once more: while we waited for a lock, whoever held it may have added a child below. Now nobody can.
    if not locked:
        return []
    labels = dict(
        session.execute(
            select(Task.id, func.coalesce(Task.name, Task.title, Task.agent)).where(
                Task.id == any_(_ids(sorted({root_of[child] for child in locked})))
            )
        ).all()
    )
    closed = sorted(locked)
    session.execute(
        _CLOSE,
        {
            "closed": closed,
            "causes": [f"parent_{stopped[root_of[child]].value}" for child in closed],
            "messages": [_needs(root_of[child], labels[root_of[child]], stopped[root_of[child]]) for child in closed],
        },
    )
    return closed


def _needs(root: int, label: str, status: TaskStatus) -> str:
    return f"needs {root} {label}, which {'failed' if status is TaskStatus.FAILED else 'was cancelled'}"


def _build_close() -> Any:
    names = ("closed", BigInteger()), ("causes", Text()), ("messages", Text())
    each = (
        func.unnest(*(bindparam(name, type_=ARRAY(kind)) for name, kind in names))
        .table_valued(*(column(name, kind) for name, kind in names))
        .render_derived(name="each")
    )
    return (
        update(table(Task))
        .where(Task.id == each.c.closed)
        .values(
            status=literal_column("'cancelled'", Text),
            finished_at=func.clock_timestamp(),
            error_class=literal_column("'cancelled'", Text),
            error_cause=each.c.causes,
            error_message=each.c.messages,
        )
    )


_CLOSE = _build_close()


def _descendants(session: CallerSession, stopped: Iterable[int]) -> dict[int, int]:
    """Every task that needs one of *stopped*, directly or not, with the smallest id of those that it needs."""
    found = below(list(stopped))
    links = (
        select(Dependency.depends_on)
        .where(Dependency.task_id == found.c.task_id)
        .offset(literal_column("0"))
        .lateral("links")
    )
    children: dict[int, list[int]] = {}
    for child, parent in session.execute(
        select(found.c.task_id, links.c.depends_on).select_from(found.join(links, true()))
    ):
        children.setdefault(parent, []).append(child)
    root_of: dict[int, int] = {}
    for root in sorted(stopped):
        waiting = [root]
        while waiting:
            # Each dependency is followed once, however many stopped above it: who is reached first keeps its root.
            for child in children.pop(waiting.pop(), ()):
                if child not in root_of:
                    root_of[child] = root
                    waiting.append(child)
    return root_of


def below(ids: Sequence[int], *conditions: ColumnElement[bool]) -> CTE:
    """Every task that needs one of *ids*, directly or not: a CTE with ``task_id``. Uses task_dependencies_depends_on.

    *conditions* have to hold for each link, and speak of ``Dependency`` and of what they correlate with it.
    """
    found = (
        select(Dependency.task_id)
        .where(Dependency.depends_on == any_(_ids(ids)), *conditions)
        .cte("below", recursive=True)
    )
    # OFFSET 0 keeps the planner from a join that reads all links again at every level: without statistics it would.
    further = (
        select(Dependency.task_id)
        .where(Dependency.depends_on == found.c.task_id, *conditions)
        .correlate(found)
        .offset(literal_column("0"))
        .lateral("further")
    )
    return found.union(select(further.c.task_id).select_from(found.join(further, true())))


def _ids(ids: Sequence[int]) -> Any:
    return literal(list(ids), ARRAY(BigInteger))


__all__ = ["Ending", "below", "close_families", "unblock", "wake_families", "write", "write_alone"]
