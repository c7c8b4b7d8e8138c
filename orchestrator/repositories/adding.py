"""``AddingRepository``: new tasks, one or many, in a transaction of their own or in the caller's.

Ids are drawn before the rows are written, so that results are positional and a refused add uses up none. A task that
needs others is written under a lock on those: a parent that ends in the same moment waits, and then sees its child.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
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
    cast,
    column,
    event,
    func,
    literal,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP, insert
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.domain.entities import Dependency, Task, table
from orchestrator.domain.given import NewTask
from orchestrator.domain.storable import NAME_MAX, TITLE_MAX, check_json, check_text
from orchestrator.domain.words import ENDED, LIVE, OutcomeClass, TaskStatus
from orchestrator.errors import InvalidInput, NotFound
from orchestrator.repositories import CallerSession

CHUNK = 5_000
"""Rows of one INSERT: large enough to be fast, small enough to keep memory flat."""

LOCKED_KEYS = 100
"""Up to so many unique keys in one call are locked before they are looked up; more would fill the lock table."""


@dataclass(frozen=True, slots=True)
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

        A task whose ``unique_key`` a live task has is not made: that one is returned. A task whose parents are not all
        done is ``blocked``; one whose parent has failed or was cancelled is ``cancelled`` at once, naming the parent.
        Without *session* everything is committed on return; with it nothing is, and the caller's commit decides.
        Raises InvalidInput (nothing is written) and NotFound for a parent that does not exist.
        """
        for task in tasks:
            check_task(task)
        if session is not None:
            return insert_tasks(session, tasks)
        with self._sessions.begin() as own:
            return insert_tasks(own, tasks)


def check_task(task: NewTask) -> None:
    """Raise InvalidInput, naming the field, for what the database or the domain would not take."""
    check_text("agent", task.agent, NAME_MAX)
    if not task.agent.strip():
        raise InvalidInput("agent: expected a name, found nothing")
    check_text("title", task.title, TITLE_MAX)
    check_text("name", task.name, NAME_MAX)
    check_text("unique_key", task.unique_key, NAME_MAX)
    check_text("concurrency_key", task.concurrency_key, NAME_MAX)
    check_json("input", task.input)
    check_json("params", task.params)
    for key, value in (task.tags or {}).items():
        check_text("tags", key, NAME_MAX)
        check_text(f"tags.{key}", value, TITLE_MAX)
    if not -(2**31) <= task.priority < 2**31:
        raise InvalidInput(f"priority: {task.priority} does not fit into 32 bits")
    if task.max_retries is not None and not 0 <= task.max_retries < 2**31:
        raise InvalidInput(f"max_retries: expected 0 or more, found {task.max_retries}")
    if task.at is not None and task.at.tzinfo is None:
        raise InvalidInput(f"at: expected a time with its offset from UTC, found {task.at.isoformat()}")
    budget = task.budget
    if budget is not None:
        for name in ("seconds", "tokens", "usd", "turns"):
            value = getattr(budget, name)
            if value is not None and not value > 0:
                raise InvalidInput(f"budget {name}: expected more than 0, found {value}")
    retry = task.retry
    if retry is not None and not (retry.initial >= 0 and retry.factor >= 1 and retry.max >= 0):
        raise InvalidInput(f"retry: expected initial ≥ 0, factor ≥ 1 and max ≥ 0, found {retry}")


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
    for place, task in enumerate(tasks):
        found = None if task.unique_key is None else taken.get(task.unique_key)
        if found is None:
            fresh.append(place)
            if task.unique_key is not None:
                taken[task.unique_key] = (-1 - place, TaskStatus.PENDING)
        elif found[0] >= 0:
            results[place] = Added(found[0], False, found[1])
            if task.name is not None:
                known[task.name] = found[0]
    ids = dict(zip(fresh, _draw_ids(session, len(fresh)), strict=True)) if fresh else {}
    known |= {name: ids[place] for place in fresh if (name := tasks[place].name) is not None}
    parents = {place: _parents(tasks[place], known) for place in fresh if tasks[place].after}
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
        statuses[ids[place]] = TaskStatus.CANCELLED if ids[place] in closed else status
    written: set[int] = set()
    for start in range(0, len(fresh), CHUNK):
        part = fresh[start : start + CHUNK]
        rows = [
            _row(ids[p], tasks[p], statuses[ids[p]], closed.get(ids[p]), plan, orders[p] if orders else None)
            for p in part
        ]
        arrays = {
            f"new_{name}": list(values) for (name, _), values in zip(_COLUMNS, zip(*rows, strict=True), strict=True)
        }
        written.update(session.execute(_INSERT, arrays).scalars())
    _link(session, [(ids[place], parent) for place, each in parents.items() for parent in each], written)
    for place in fresh:
        if ids[place] in written:
            results[place] = Added(ids[place], True, statuses[ids[place]])
    missing = [place for place, result in enumerate(results) if result is None]
    if missing:
        # Lost to a twin: one earlier in this call, or one that was added between our look and our insert.
        taken = _live_keys(session, sorted({tasks[p].unique_key or "" for p in missing}))
        for place in missing:
            twin = taken[tasks[place].unique_key or ""]
            results[place] = Added(twin[0], False, twin[1])
    return [result for result in results if result is not None]


def ready_agents(tasks: Sequence[NewTask], added: Sequence[Added]) -> set[str]:
    """The agents that may have work now that *tasks* were added."""
    return {
        task.agent
        for task, each in zip(tasks, added, strict=True)
        if each.created and each.status is TaskStatus.PENDING
    }


def after_commit(session: CallerSession, call: Any) -> None:
    """Run *call* once, after the caller's transaction has been committed; on a bare Connection, never (polling finds it)."""
    if isinstance(session, Session):
        event.listen(session, "after_commit", lambda _: call(), once=True)


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
            ids.append(need)
        elif need in known:
            ids.append(known[need])
        else:
            raise InvalidInput(f"after: no task named {need!r} in this submission", task=task.name)
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
    ("id", BigInteger()),
    ("agent", Text()),
    ("status", Text()),
    ("priority", Integer()),
    ("max_retries", Integer()),
    ("retry", Text()),
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
    ("unique_key", Text()),
    ("concurrency_key", Text()),
    ("tags", Text()),
    ("input", Text()),
    ("params", Text()),
    ("template", Boolean()),
    ("error_class", Text()),
    ("error_cause", Text()),
    ("error_message", Text()),
)


def _build_insert() -> Any:
    new = (
        func.unnest(*(bindparam(f"new_{name}", type_=ARRAY(kind)) for name, kind in _COLUMNS))
        .table_valued(*(column(name, kind) for name, kind in _COLUMNS))
        .render_derived(name="new")
    )
    now = func.clock_timestamp()
    values: dict[str, Any] = {name: new.c[name] for name, _ in _COLUMNS}
    for name in ("retry", "tags", "input", "params"):
        values[name] = cast(new.c[name], JSONB)
    values["available_at"] = func.coalesce(new.c.available_at, now)
    values["due"] = func.coalesce(new.c.available_at <= now, True)
    ended = new.c.status.in_([literal_column(f"'{status}'") for status in TaskStatus if status in ENDED])
    values["finished_at"] = case((ended, now))
    return (
        insert(table(Task))
        .from_select(list(values), select(*values.values()).order_by(new.c.id))
        .on_conflict_do_nothing()
        .returning(Task.id)
    )


_INSERT = _build_insert()


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


def _row(
    id_: int,
    task: NewTask,
    status: TaskStatus,
    closed: tuple[int, TaskStatus] | None,
    plan: tuple[int, str] | None,
    order: int | None,
) -> tuple[Any, ...]:
    budget, retry = task.budget, task.retry
    if closed is None:
        error: tuple[str | None, ...] = (None, None, None)
    else:
        verb = "failed" if closed[1] is TaskStatus.FAILED else "was cancelled"
        error = (OutcomeClass.CANCELLED.value, f"parent_{closed[1].value}", f"needs {closed[0]}, which {verb}")
    at: datetime | None = task.at
    return (
        id_,
        task.agent,
        status.value,
        task.priority,
        task.max_retries,
        None if retry is None else _json({"initial": retry.initial, "factor": retry.factor, "max": retry.max}),
        *(
            (None,) * 5
            if budget is None
            else (budget.seconds, budget.tokens, budget.usd, budget.turns, budget.on_limit.value)
        ),
        at,
        task.title,
        task.name,
        plan[1] if plan else None,
        plan[0] if plan else None,
        order,
        task.task_hash,
        task.definition,
        task.dir,
        task.unique_key,
        task.concurrency_key,
        _json(task.tags),
        _json(task.input),
        _json(task.params),
        task.template,
        *error,
    )


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
