"""``AddingRepository``: new tasks, one or many, in a transaction of their own or in the caller's.

Ids are drawn before the rows are written, so that results are positional and a refused add uses up none. A task that
needs others is written under a lock on those: a parent that ends in the same moment waits, and then sees its child.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Double,
    Engine,
    Integer,
    Text,
    any_,
    bindparam,
    case,
    column,
    event,
    func,
    literal,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import JSON, JSONB, TIMESTAMP, insert
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.database.engine import alone
from orchestrator.domain.entities import Dependency, Task, table
from orchestrator.domain.given import NewTask
from orchestrator.domain.outcome import traceparent
from orchestrator.domain.storable import NAME_MAX, TITLE_MAX, check_json, check_text
from orchestrator.domain.values import value
from orchestrator.domain.words import ENDED, LIVE, OutcomeClass, TaskStatus
from orchestrator.errors import Conflict, InvalidInput, NotFound
from orchestrator.repositories import CallerSession
from orchestrator.repositories.asking import ask_approval
from orchestrator.repositories.settling import close_families, unblock

CHUNK = 5_000
"""Rows of one INSERT: large enough to be fast, small enough to keep memory flat."""

TRIES = 10
"""How often a row is tried whose key others take and free in the same moments."""

LARGEST = 1e15
"""Limit of seconds and USD: further on, sums and times run out of the database's range."""

LOCKED_KEYS = 100
"""Up to so many unique keys in one call are locked before they are looked up; more would fill the lock table."""


@value
class Added:
    """A task that was made, or the live one that already has its unique key (``created`` is False)."""

    id: int
    created: bool
    status: TaskStatus


class AddingRepository:
    """Inserting tasks."""

    def __init__(self, engine: Engine) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)

    def add_many(self, tasks: Sequence[NewTask], session: CallerSession | None = None) -> list[Added]:
        """Make *tasks*, all or none; results are in the order given.

        A task whose ``unique_key`` a live task has is not made: that one is returned. One that needs an approval is
        ``waiting`` and asks for it. A task whose parents are not all done is ``blocked``; one whose parent has failed or
        was cancelled is ``cancelled`` at once, naming the parent. Without *session* everything is committed on return;
        with it nothing is, and the caller's commit decides. Raises InvalidInput (nothing is written) and NotFound for a
        parent that does not exist.
        """
        for task in tasks:
            check_task(task)
        if not tasks:
            return []
        if session is not None:
            return _insert_plain(session, tasks) if _plain(tasks) else insert_tasks(session, tasks)
        with self._sessions.begin() as own:
            if _plain(tasks):
                alone(own.connection())
                return _insert_plain(own, tasks)
            return insert_tasks(own, tasks)


def check_task(task: NewTask) -> None:
    """Raise InvalidInput, naming the field, for what the database or the domain would not take."""
    if not isinstance(task.agent, str):
        raise InvalidInput(f"agent: expected a name, found {task.agent!r}")
    check_text("agent", task.agent, NAME_MAX)
    if not task.agent.strip():
        raise InvalidInput("agent: expected a name, found nothing")
    check_text("title", task.title, TITLE_MAX)
    check_text("name", task.name, NAME_MAX)
    check_text("unique_key", task.unique_key, NAME_MAX)
    check_text("concurrency_key", task.concurrency_key, NAME_MAX)
    check_json("input", task.input)
    check_json("params", task.params)
    for field in ("params", "tags"):
        if not isinstance(getattr(task, field) or {}, Mapping):
            raise InvalidInput(f"{field}: expected names and values, found {getattr(task, field)!r}")
    for key, each in (task.tags or {}).items():
        check_text("tags", key, NAME_MAX)
        check_text(f"tags.{key}", each, TITLE_MAX)
    check_text("dir", task.dir)
    if task.traceparent is not None and traceparent(task.traceparent) is None:
        raise InvalidInput(f"traceparent: expected a W3C trace context, found {task.traceparent!r:.100}")
    check_text("definition", task.definition, NAME_MAX)
    _check_number("priority", task.priority, -(2**31), 2**31 - 1)
    if task.max_retries is not None:
        _check_number("max_retries", task.max_retries, 0, 2**31 - 1)
    if not isinstance(task.approval, bool):
        raise InvalidInput(f"approval: expected true or false, found {task.approval!r:.100}")
    if task.at is not None and task.at.tzinfo is None:
        raise InvalidInput(f"at: expected a time with its offset from UTC, found {task.at.isoformat()}")
    budget, retry = task.budget, task.retry
    if budget is not None:
        for name, most in (("seconds", None), ("tokens", 2**63 - 1), ("usd", None), ("turns", 2**31 - 1)):
            value = getattr(budget, name)
            if value is None:
                continue
            _check_number(f"budget {name}", value, 0, most, whole=most is not None)
            if not value > 0:
                raise InvalidInput(f"budget {name}: expected more than 0, found {value}")
    if retry is not None:
        for name, least in (("initial", 0), ("factor", 1), ("max", 0)):
            _check_number(f"retry {name}", getattr(retry, name), least, None, whole=False)


def _check_number(field: str, value: Any, least: float, most: float | None, *, whole: bool = True) -> None:
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise InvalidInput(f"{field}: expected a {'whole ' if whole else ''}number, found {value!r}")
    if not abs(value) <= sys.float_info.max or value < least or value > (most if most is not None else LARGEST):
        limits = f"{least:,} or more" if most is None else f"{least:,} to {most:,}"
        raise InvalidInput(f"{field}: expected {limits}, found {value}")


def insert_tasks(
    session: CallerSession,
    tasks: Sequence[NewTask],
    *,
    plan: tuple[int, str] | None = None,
    orders: Sequence[int] | None = None,
    named: dict[str, int] | None = None,
) -> list[Added]:
    """Write *tasks* inside the caller's transaction; ``after`` may name earlier tasks of the list, or of *named*.

    *plan* is the id and name of the plan that they belong to, *orders* their places in it.
    """
    results: list[Added | None] = [None] * len(tasks)
    keys = sorted({task.unique_key for task in tasks if task.unique_key is not None})
    # Of fifty that add one key at once, one inserts and the others find it: without this lock each would draw an id
    # first and then run into the unique index.
    lock_keys(session, keys)
    taken = _live_keys(session, keys)
    known = dict(named or {})
    fresh: list[int] = []
    doubles: dict[int, int] = {}
    first: dict[str, int] = {}
    for place, task in enumerate(tasks):
        found = None if task.unique_key is None else taken.get(task.unique_key)
        if found is not None:
            results[place] = Added(found[0], False, found[1])
        elif task.unique_key is not None and task.unique_key in first:
            doubles[place] = first[task.unique_key]
        else:
            fresh.append(place)
            if task.unique_key is not None:
                first[task.unique_key] = place
    ids = dict(zip(fresh, _draw_ids(session, len(fresh)), strict=True)) if fresh else {}
    parents: dict[int, list[int]] = {}
    for place, task in enumerate(tasks):
        if place in ids and task.after:
            parents[place] = _parents(task, known)
        if task.name is not None:
            result = results[place]
            known[task.name] = result.id if result is not None else ids[doubles.get(place, place)]
    states = _lock_parents(session, sorted({p for each in parents.values() for p in each} - set(ids.values())))
    statuses: dict[int, TaskStatus] = {}
    closed: dict[int, tuple[int, TaskStatus]] = {}
    for place in fresh:
        status = TaskStatus.PENDING
        for parent in parents.get(place, ()):
            state = states.get(parent) or statuses.get(parent)
            if parent in closed:
                closed.setdefault(ids[place], closed[parent])
            elif state in (TaskStatus.FAILED, TaskStatus.CANCELLED):
                closed.setdefault(ids[place], (parent, state))
            elif state is not TaskStatus.DONE:
                status = TaskStatus.BLOCKED
        if status is TaskStatus.PENDING and tasks[place].approval:
            status = TaskStatus.WAITING
        statuses[ids[place]] = TaskStatus.CANCELLED if ids[place] in closed else status
    belongs = {} if plan is None else {"plan_id": plan[0], "plan": plan[1]}
    rows = {
        place: _row(
            tasks[place],
            statuses[ids[place]],
            closed.get(ids[place]),
            id=ids[place],
            plan_order=None if orders is None else orders[place],
            **belongs,
        )
        for place in fresh
    }
    written, twins = _insert_rows(session, tasks, rows)
    for place in fresh:
        if place in twins:
            results[place] = Added(twins[place][0], False, twins[place][1])
        else:
            results[place] = Added(ids[place], True, statuses[ids[place]])
    waiting = [ids[place] for place in fresh if statuses[ids[place]] is TaskStatus.WAITING and ids[place] in written]
    ask_approval(session, waiting)
    instead = {ids[place]: twin[0] for place, twin in twins.items()}
    links = [
        (ids[place], instead.get(parent, parent))
        for place, each in parents.items()
        if ids[place] in written
        for parent in each
    ]
    adopted = sorted({parent for _, parent in links} & set(instead.values()))
    adopting = _lock_parents(session, adopted)
    _link(session, links, written)
    if adopting:
        _follow(session, adopting, links, results)
    for place, other in doubles.items():
        twin = results[other]
        assert twin is not None
        results[place] = Added(twin.id, False, twin.status)
    return [result for result in results if result is not None]


def _insert_plain(session: CallerSession, tasks: Sequence[NewTask]) -> list[Added]:
    """Write tasks that nothing can stand in the way of: one statement, which also gives them their ids, in their order."""
    rows = [_row(task, place=place) for place, task in enumerate(tasks)]
    ids = sorted(session.execute(_INSERT_PLAIN, {"new": rows}).scalars())
    return [Added(id_, True, TaskStatus.PENDING) for id_ in ids]


def _plain(tasks: Sequence[NewTask]) -> bool:
    return len(tasks) <= CHUNK and not any(task.unique_key is not None or task.after or task.approval for task in tasks)


def _insert_rows(
    session: CallerSession, tasks: Sequence[NewTask], rows: dict[int, dict[str, Any]]
) -> tuple[set[int], dict[int, tuple[int, TaskStatus]]]:
    """Insert *rows* (by place); return the ids that were written, and the twins of those that were not, by place.

    A row is not written when a task with its key was added between our look and this: only without the keys' locks.
    """
    written: set[int] = set()
    twins: dict[int, tuple[int, TaskStatus]] = {}
    left = sorted(rows)
    for _ in range(TRIES):
        for start in range(0, len(left), CHUNK):
            part = [rows[place] for place in left[start : start + CHUNK]]
            written.update(session.execute(_INSERT, {"new": part}).scalars())
        left = [place for place in left if rows[place]["id"] not in written]
        if not left:
            return written, twins
        live = _live_keys(session, sorted({key for place in left if (key := tasks[place].unique_key) is not None}))
        twins |= {place: live[key] for place in left if (key := tasks[place].unique_key) in live}
        # A twin that ended since then has freed its key: once more.
        left = [place for place in left if place not in twins]
        if not left:
            return written, twins
    task = tasks[left[0]]
    raise Conflict(
        f"{task.name or task.unique_key or task.agent}: other tasks with its key or name come and go all the time",
        hint="add it again",
    )


def _follow(
    session: CallerSession,
    adopting: dict[int, TaskStatus],
    links: Sequence[tuple[int, int]],
    results: list[Added | None],
) -> None:
    """Move new tasks that need a twin's task instead of their own to where that one's status puts them."""
    children = sorted({child for child, parent in links if parent in adopting})
    stopped = {id_: status for id_, status in adopting.items() if status in (TaskStatus.FAILED, TaskStatus.CANCELLED)}
    close_families(session, stopped)
    unblock(session, children)
    wanted = any_(literal([child for child, _ in links], ARRAY(BigInteger)))
    now = {
        id_: TaskStatus(status)
        for id_, status in session.execute(select(Task.id, Task.status).where(Task.id == wanted))
    }
    for place, result in enumerate(results):
        if result is not None and result.id in now:
            results[place] = Added(result.id, result.created, now[result.id])


def ready_agents(tasks: Sequence[NewTask], added: Sequence[Added]) -> set[str]:
    """The agents that may have work now that *tasks* were added."""
    return {
        task.agent
        for task, each in zip(tasks, added, strict=True)
        if each.created and each.status is TaskStatus.PENDING
    }


def after_commit(session: CallerSession, call: Callable[[], object]) -> None:
    """Run *call* once, after the caller's transaction has been committed; never after a rollback.

    On a bare Connection, never: it tells nobody of its commit, and polling finds the work.
    """
    if not isinstance(session, Session):
        return
    calls: list[Callable[[], object]] | None = session.info.get(_CALLS)
    if calls is None:
        calls = session.info[_CALLS] = []
        event.listen(session, "after_commit", _committed)
        event.listen(session, "after_rollback", _rolled_back)
    calls.append(call)


_CALLS = "orchestrator.after_commit"


def _committed(session: Session) -> None:
    if session.in_nested_transaction():
        return  # a savepoint was released: that is no commit yet
    calls, session.info[_CALLS][:] = list(session.info[_CALLS]), []
    for call in calls:
        call()


def _rolled_back(session: Session) -> None:
    if not session.in_nested_transaction():
        session.info[_CALLS].clear()


# -- the parts ----------------------------------------------------------------------------------------------------

_LOCK_KEYS = text(
    "SELECT count(pg_advisory_xact_lock(hashtextextended('orchestrator.unique_key.' || key, 0)))"
    " FROM (SELECT key FROM unnest(CAST(:keys AS text[])) AS key ORDER BY key) AS sorted"
)


def lock_keys(session: CallerSession, keys: Sequence[str]) -> None:
    """Keep everybody else from adding or opening a task with one of *keys* until the transaction ends.

    In sorted order, so that two calls cannot wait in a circle. More than LOCKED_KEYS are not locked: the unique index
    still decides then, after the fact.
    """
    if 0 < len(keys) <= LOCKED_KEYS:
        session.execute(_LOCK_KEYS, {"keys": list(keys)})


def _live_keys(session: CallerSession, keys: Sequence[str]) -> dict[str | None, tuple[int, TaskStatus]]:
    """The live tasks that have *keys*. Uses the unique index tasks_unique_key."""
    found: dict[str | None, tuple[int, TaskStatus]] = {}
    for start in range(0, len(keys), CHUNK):
        for key, id_, status in session.execute(
            select(Task.unique_key, Task.id, Task.status).where(
                Task.unique_key == any_(literal(list(keys[start : start + CHUNK]), ARRAY(Text))),
                Task.status.in_([literal_column(f"'{status}'") for status in TaskStatus if status in LIVE]),
            )
        ):
            found[key] = (id_, TaskStatus(status))
    return found


def _draw_ids(session: CallerSession, count: int) -> list[int]:
    return list(
        session.execute(
            text("SELECT nextval(pg_get_serial_sequence('tasks', 'id')) FROM generate_series(1, :count)"),
            {"count": count},
        ).scalars()
    )


def _parents(task: NewTask, known: dict[str, int]) -> list[int]:
    ids = []
    for need in task.after:
        if isinstance(need, int):
            if not 0 < need < 2**63:
                raise InvalidInput(f"after: {need} is not the id of a task", task=task.name)
            ids.append(need)
        elif need in known:
            ids.append(known[need])
        else:
            # Only what stands before it: ids grow from parents to children, and locks are taken in that order.
            raise InvalidInput(f"after: no task named {need!r} comes before this one", task=task.name)
    return sorted(set(ids))


def _lock_parents(session: CallerSession, ids: Sequence[int]) -> dict[int, TaskStatus]:
    """The statuses of *ids*, marked as parents and locked until the transaction ends, in id order."""
    if not ids:
        return {}
    wanted = any_(literal(list(ids), ARRAY(BigInteger)))
    session.execute(select(Task.id).where(Task.id == wanted).order_by(Task.id).with_for_update(key_share=True)).all()
    rows = session.execute(
        update(Task).where(Task.id == wanted).values(is_parent=True).returning(Task.id, Task.status),
        execution_options={"synchronize_session": False},
    ).all()
    states = {id_: TaskStatus(status) for id_, status in rows}
    missing = [id_ for id_ in ids if id_ not in states]
    if missing:
        raise NotFound(
            f"after: task {missing[0]} does not exist", hint="orchestrator list shows the ids", task=missing[0]
        )
    return states


_TIME = TIMESTAMP(timezone=True)
_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("agent", Text()),
    ("status", Text()),
    ("priority", Integer()),
    ("max_retries", Integer()),
    ("retry", JSONB()),
    ("budget_seconds", Double()),
    ("budget_tokens", BigInteger()),
    ("budget_usd", Double()),
    ("budget_turns", Integer()),
    ("on_limit", Text()),
    ("available_at", _TIME),
    ("title", Text()),
    ("name", Text()),
    ("plan", Text()),
    ("plan_id", BigInteger()),
    ("plan_order", Integer()),
    ("task_hash", Text()),
    ("definition", Text()),
    ("dir", Text()),
    ("traceparent", Text()),
    ("unique_key", Text()),
    ("concurrency_key", Text()),
    ("tags", JSONB()),
    ("input", JSONB()),
    ("params", JSONB()),
    ("template", Boolean()),
    ("needs_approval", Boolean()),
    ("error_class", Text()),
    ("error_cause", Text()),
    ("error_message", Text()),
)


def _build_insert(*, drawn: bool) -> Any:
    """The rows come as one JSON text, in the order of their ids: *drawn* before, or given as they are written."""
    names = (("id", BigInteger()), ("place", Integer()), *_COLUMNS)
    new = (
        func.json_to_recordset(bindparam("new", type_=JSON))
        .table_valued(*(column(name, kind) for name, kind in names))
        .render_derived(name="new", with_types=True)
    )
    now = func.clock_timestamp()
    values: dict[str, Any] = {name: new.c[name] for name, _ in _COLUMNS}
    values["available_at"] = func.coalesce(new.c.available_at, now)
    values["due"] = func.coalesce(new.c.available_at <= now, True)
    values["template"] = func.coalesce(new.c.template, False)
    values["needs_approval"] = func.coalesce(new.c.needs_approval, False)
    ended = new.c.status.in_([literal_column(f"'{status}'") for status in TaskStatus if status in ENDED])
    values["finished_at"] = case((ended, now))
    if not drawn:
        rows = select(*values.values()).order_by(new.c.place)
        return insert(table(Task)).from_select(list(values), rows).returning(Task.id)
    values["id"] = new.c.id
    rows = select(*values.values()).order_by(new.c.id)
    return insert(table(Task)).from_select(list(values), rows).on_conflict_do_nothing().returning(Task.id)


_INSERT = _build_insert(drawn=True)
_INSERT_PLAIN = _build_insert(drawn=False)


def _row(
    task: NewTask,
    status: TaskStatus = TaskStatus.PENDING,
    closed: tuple[int, TaskStatus] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One task as the object that the statement reads; what is left out is NULL."""
    row: dict[str, Any] = {"agent": task.agent, "status": status, "priority": task.priority, **more}
    optional = (
        ("input", task.input),
        ("max_retries", task.max_retries),
        ("title", task.title),
        ("name", task.name),
        ("task_hash", task.task_hash),
        ("definition", task.definition),
        ("dir", task.dir),
        ("traceparent", task.traceparent),
        ("unique_key", task.unique_key),
        ("concurrency_key", task.concurrency_key),
        ("tags", task.tags),
        ("params", task.params),
    )
    row.update((name, value) for name, value in optional if value is not None)
    if task.template:
        row["template"] = True
    if task.approval:
        row["needs_approval"] = True
    if task.at is not None:
        row["available_at"] = task.at.isoformat()
    if (retry := task.retry) is not None:
        row["retry"] = {"initial": retry.initial, "factor": retry.factor, "max": retry.max}
    if (budget := task.budget) is not None:
        row |= {
            "budget_seconds": budget.seconds,
            "budget_tokens": budget.tokens,
            "budget_usd": budget.usd,
            "budget_turns": budget.turns,
            "on_limit": budget.on_limit,
        }
    if closed is not None:
        verb = "failed" if closed[1] is TaskStatus.FAILED else "was cancelled"
        row["error_class"] = OutcomeClass.CANCELLED
        row["error_cause"] = f"parent_{closed[1].value}"
        row["error_message"] = f"needs {closed[0]}, which {verb}"
    return row


def _link(session: CallerSession, pairs: Iterable[tuple[int, int]], written: set[int]) -> None:
    links = [(child, parent) for child, parent in pairs if child in written]
    for start in range(0, len(links), CHUNK):
        part = links[start : start + CHUNK]
        session.execute(
            insert(table(Dependency))
            .from_select(
                ["task_id", "depends_on"],
                select(
                    func.unnest(literal([c for c, _ in part], ARRAY(BigInteger))),
                    func.unnest(literal([p for _, p in part], ARRAY(BigInteger))),
                ),
            )
            .on_conflict_do_nothing()
        )
    inner = sorted({parent for _, parent in links} & written)
    if inner:
        session.execute(
            update(Task).where(Task.id == any_(literal(inner, ARRAY(BigInteger)))).values(is_parent=True),
            execution_options={"synchronize_session": False},
        )


__all__ = ["Added", "AddingRepository", "after_commit", "check_task", "insert_tasks", "lock_keys", "ready_agents"]
