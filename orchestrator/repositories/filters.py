"""``TaskFilter``: which tasks ``list`` shows and the bulk commands change. Names are data: ``%`` and ``_`` are literal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ARRAY, BigInteger, ColumnElement, Text, any_, literal, or_, select

from orchestrator.domain.entities import Plan, Task
from orchestrator.domain.storable import check_text
from orchestrator.domain.words import TaskStatus
from orchestrator.errors import InvalidInput, did_you_mean

LIMIT = 100
"""Tasks of one page unless the caller says otherwise."""
MAX_LIMIT = 10_000
SEARCH_MAX = 1_000
"""Longest text to search for, in characters."""


@dataclass(frozen=True, slots=True)
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
        for key, value in self.tags.items():
            check_text("tag", key)
            check_text(f"tag {key}", value)
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
        found.append(Task.plan_id.in_(select(Plan.id).where(Plan.name == wanted.plan)))
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


def narrow(wanted: TaskFilter) -> bool:
    """Whether an index finds the tasks of *wanted* in id order, so that nothing else has to be read."""
    indexed = {TaskStatus.RUNNING, TaskStatus.FAILED, TaskStatus.CANCELLED}
    return bool(wanted.ids) or wanted.plan is not None or (bool(wanted.statuses) and set(wanted.statuses) <= indexed)


def _words(statuses: Sequence[str]) -> list[Any]:
    # Literal, so that the planner sees the predicates of the partial indexes in them.
    return [literal(TaskStatus(status).value, literal_execute=True) for status in dict.fromkeys(statuses)]


__all__ = ["LIMIT", "TaskFilter", "conditions", "narrow"]
