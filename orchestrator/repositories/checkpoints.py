"""``CheckpointRepository``: named results of steps, from which the next attempt of a task goes on.

The first write of a name wins, whoever comes later; a write counts only under its attempt's fence. Nothing is ever
overwritten, so repeating a write after an unknown commit finds the same value.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Engine,
    Integer,
    Text,
    Uuid,
    any_,
    bindparam,
    cast,
    column,
    func,
    literal,
    literal_column,
    select,
)
from sqlalchemy.dialects.postgresql import JSON, insert
from sqlalchemy.orm import sessionmaker

from orchestrator.domain.entities import Checkpoint, Task, table
from orchestrator.domain.shapes import time_json
from orchestrator.repositories.bounded import bounded


class NewCheckpoint(NamedTuple):
    """A step's result with its fence; ``value`` is JSON text that the column takes."""

    task_id: int
    attempt: int
    claimed_by: UUID
    name: str
    value: str


Stored = dict[tuple[int, int, str], Any]
"""Values by task id, attempt and name."""


class CheckpointRepository:
    """The checkpoints table."""

    def __init__(self, engine: Engine) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)

    def add(self, new: Sequence[NewCheckpoint]) -> Stored:
        """Write checkpoints in bulk; committed on return. Returns what is stored by (task id, attempt, name).

        That is the value of the first write, which may be another one. What is missing in the answer had lost its task.
        The tasks' rows are locked FOR SHARE in id order: whoever takes a task back waits, or comes first.
        """
        if not new:
            return {}
        with self._sessions.begin() as session:
            owners = {(each.task_id, each.attempt, each.claimed_by) for each in new}
            held = {tuple(row) for row in session.execute(_LOCK, {"ids": sorted({owner[0] for owner in owners})})}
            mine = [each for each in new if (each.task_id, each.attempt, each.claimed_by) in held]
            if not mine:
                return {}
            columns = zip(_NEW, zip(*mine, strict=True), strict=True)
            arrays = {f"new_{name}": list(values) for (name, _), values in columns}
            session.execute(_ADD, arrays)
            stored = {
                (row.task_id, row.name): row.value
                for row in session.execute(_READ, {"names": arrays["new_name"], "ids": arrays["new_task_id"]})
            }
        return {(each.task_id, each.attempt, each.name): stored[each.task_id, each.name] for each in mine}

    def of_tasks(self, task_ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The checkpoints of each of *task_ids* by name, in the order in which they were written. Uses checkpoints_pkey."""
        found: dict[int, dict[str, Any]] = {}
        with self._sessions() as session:
            for task_id, name, value in session.execute(
                select(Checkpoint.task_id, Checkpoint.name, Checkpoint.value)
                .where(Checkpoint.task_id == any_(literal(list(task_ids), ARRAY(BigInteger))))
                .order_by(Checkpoint.task_id, Checkpoint.at, Checkpoint.name)
            ):
                found.setdefault(task_id, {})[name] = value
        return found

    def shown(self, task_id: int, limit: int = 1_000) -> list[dict[str, Any]]:
        """The checkpoints of a task for ``show``: name, attempt, time, size in bytes, and the value if it is short."""
        text = cast(Checkpoint.value, Text)
        size, start = func.octet_length(text), func.left(text, SHORT + 1)
        with bounded(self._sessions) as session:
            rows = session.execute(
                select(
                    Checkpoint.name,
                    Checkpoint.attempt,
                    Checkpoint.at,
                    size,
                    start,
                )
                .where(Checkpoint.task_id == task_id)
                .order_by(Checkpoint.at, Checkpoint.name)
                .limit(limit)
            ).all()
        return [
            {
                "name": name,
                "attempt": attempt,
                "at": time_json(at),
                "bytes": bytes_,
                "value": json.loads(said) if len(said) <= SHORT else None,
            }
            for name, attempt, at, bytes_, said in rows
        ]


SHORT = 2_000
"""Characters of a checkpoint that are shown; of a longer one only the size is."""

_NEW: tuple[tuple[str, Any], ...] = (
    ("task_id", BigInteger()),
    ("attempt", Integer()),
    ("claimed_by", Uuid()),
    ("name", Text()),
    ("value", Text()),
)


def _new() -> Any:
    return (
        func.unnest(*(bindparam(f"new_{name}", type_=ARRAY(kind)) for name, kind in _NEW))
        .table_valued(*(column(name, kind) for name, kind in _NEW))
        .render_derived(name="new")
    )


def _build_add() -> Any:
    new = _new()
    rows = select(new.c.task_id, new.c.name, new.c.attempt, cast(new.c.value, JSON))
    return (
        insert(table(Checkpoint))
        .from_select(["task_id", "name", "attempt", "value"], rows)
        .on_conflict_do_nothing(index_elements=["task_id", "name"])
    )


# FOR SHARE, in id order: a claim, a record or a take-back of the task waits for us, or we for it.
_LOCK = (
    select(Task.id, Task.attempt, Task.claimed_by)
    .where(Task.id == any_(bindparam("ids", type_=ARRAY(BigInteger))), Task.status == literal_column("'running'", Text))
    .order_by(Task.id)
    .with_for_update(read=True, of=Task)
)
_ADD = _build_add()
_READ = select(Checkpoint.task_id, Checkpoint.name, Checkpoint.value).where(
    Checkpoint.task_id == any_(bindparam("ids", type_=ARRAY(BigInteger))),
    Checkpoint.name == any_(bindparam("names", type_=ARRAY(Text))),
)

__all__ = ["CheckpointRepository", "NewCheckpoint", "Stored"]
