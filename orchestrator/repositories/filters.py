"""``TaskFilter``: which tasks ``list`` shows and the bulk commands change. Names are data: ``%`` and ``_`` are literal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Any

from sqlalchemy import ARRAY, BigInteger, ColumnElement, Select, Text, any_, literal, or_, select, text, union_all

from orchestrator.domain.entities import Plan, Task
from orchestrator.domain.storable import check_text
from orchestrator.domain.values import value
from orchestrator.domain.words import TaskStatus
from orchestrator.errors import InvalidInput, did_you_mean

LIMIT = 100
"""Tasks of one page unless the caller says otherwise."""
MAX_LIMIT = 10_000
SEARCH_MAX = 1_000
"""Longest text to search for, in characters."""


@value
class TaskFilter:
    """Conditions that all have to hold; what is left empty does not count.

    ``search`` is looked for, without regard to case, in title, name and unique key. ``tags`` must all be there with
    these values. ``limit`` None means a page of 100 when reading, and all when changing. ``after_id`` is the id behind
    which the page begins (newest first, so smaller ids).
    """

    statuses: Sequence[str] = ()
    agents: Sequence[str] = ()
    plan: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    search: str | None = None
    limit: int | None = None
    after_id: int | None = None
    ids: Sequence[int] = ()

    def checked(self) -> TaskFilter:
        """Return this filter; raise InvalidInput for a status that there is not, or a limit out of range."""
        for status in self.statuses:
            if status not in set(TaskStatus):
                raise InvalidInput(f"status {status!r} is not one{did_you_mean(status, TaskStatus)}", status=status)
        if self.limit is not None and not 0 < self.limit <= MAX_LIMIT:
            raise InvalidInput(f"limit: expected 1 to {MAX_LIMIT:,}, found {self.limit}")
        for id_ in self.ids:
            if not 0 < id_ < 2**63:
                raise InvalidInput(f"{id_} is not the id of a task")
        for agent in self.agents:
            check_text("agent", agent)
        for key, each in self.tags.items():
            check_text("tag", key)
            check_text(f"tag {key}", each)
        check_text("plan", self.plan)
        check_text("search", self.search, SEARCH_MAX)
        return self

    @property
    def by_ids_alone(self) -> bool:
        """Whether the tasks were named one by one."""
        return bool(self.ids) and not (self.statuses or self.agents or self.plan or self.tags or self.search)


def conditions(wanted: TaskFilter) -> list[ColumnElement[bool]]:
    """The WHERE of *wanted*, without its limit and its place in the list."""
    found: list[ColumnElement[bool]] = []
    if wanted.ids:
        found.append(Task.id == any_(literal(sorted(set(wanted.ids)), ARRAY(BigInteger))))
    if wanted.statuses:
        found.append(Task.status.in_(_words(wanted.statuses)))
    if wanted.plan is not None:
        # By id, for the index tasks_of_plan; tasks that were replaced by a later submission are shown as well.
        found.append(Task.plan_id == select(Plan.id).where(Plan.name == wanted.plan).scalar_subquery())
    if wanted.agents:
        found.append(Task.agent == any_(literal(list(wanted.agents), ARRAY(Text))))
    if wanted.tags:
        found.append(Task.tags.contains(wanted.tags))
    if wanted.search:
        found.append(
            or_(
                *(
                    column.icontains(wanted.search, autoescape=True)
                    for column in (Task.title, Task.name, Task.unique_key)
                )
            )
        )
    return found


def indexed(wanted: TaskFilter) -> bool:
    """Whether an index has the tasks of *wanted* in id order by themselves: those of a plan, those named by ids."""
    return bool(wanted.ids) or wanted.plan is not None


def by_status(
    statuses: Iterable[TaskStatus], where: Sequence[ColumnElement[bool]], limit: int | None = None
) -> Select[Any]:
    """The ids of tasks in *statuses*, of which ``done`` may be none, that hold *where*: newest first with *limit*.

    Each place comes from its partial index, so that the cost is that of the tasks in these statuses, whatever the
    history: tasks_failed, tasks_cancelled, tasks_running, tasks_parked, and for what is pending tasks_ready,
    tasks_suspect, tasks_not_due and tasks_held. Without a limit in id order.
    """
    parts = []
    for place in (place for status in statuses for place in _PLACES[status]):
        part = select(Task.id).where(text(place), *where)
        if limit is not None and place in _IN_ID_ORDER:
            parts.append(part.order_by(Task.id.desc()).limit(limit))
        else:
            # The LIMIT keeps the planner from walking all tasks by id for the order outside.
            parts.append(part.limit(ALL))
    found = union_all(*(part.subquery().select() for part in parts)).subquery()
    ids = select(found.c.id)
    return ids.order_by(found.c.id) if limit is None else ids.order_by(found.c.id.desc()).limit(limit)


ALL = 2**62
_READY = "tasks.status = 'pending' AND tasks.due AND tasks.held_at IS NULL AND tasks.lost_count"
_PLACES: dict[TaskStatus, tuple[str, ...]] = {
    TaskStatus.PENDING: (
        f"{_READY} = 0",
        f"{_READY} > 0",
        "tasks.status = 'pending' AND NOT tasks.due",
        "tasks.status = 'pending' AND tasks.held_at IS NOT NULL AND tasks.due",
    ),
    **{
        status: (f"tasks.status = '{status.value}'",)
        for status in TaskStatus
        if status not in (TaskStatus.PENDING, TaskStatus.DONE)
    },
}
_IN_ID_ORDER = {_PLACES[status][0] for status in (TaskStatus.RUNNING, TaskStatus.FAILED, TaskStatus.CANCELLED)}


def _words(statuses: Sequence[str]) -> list[Any]:
    # Literal, so that the planner sees the predicates of the partial indexes in them.
    return [literal(TaskStatus(status).value, literal_execute=True) for status in dict.fromkeys(statuses)]


__all__ = ["LIMIT", "TaskFilter", "by_status", "conditions", "indexed"]
