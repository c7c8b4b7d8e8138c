"""``EventRepository``: what running attempts say, written in bulk, and reading it back as transcripts.

A transcript is rows of ``run_events``: its head piece by piece, and, once the head is full, one last row (``TAIL_SEQ``)
that is rewritten: the newest pieces as JSON, with the number of bytes left out before them in ``bytes``. Readers get
events only; the packed row is taken apart here. No row of tasks is locked for a piece; what the task's row shows is
one UPDATE for all attempts of a worker.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Double,
    Engine,
    Integer,
    Text,
    Uuid,
    bindparam,
    case,
    cast,
    column,
    func,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.orm import sessionmaker

from orchestrator.domain.entities import RunEvent, Task
from orchestrator.domain.values import value
from orchestrator.domain.words import TaskStatus

TAIL_SEQ = 2**31 - 1
"""The place of the row that holds the newest pieces of a long transcript."""

TAIL = "tail"
DROPPED = "dropped"


class Piece(NamedTuple):
    """A stretch of a transcript. ``size`` is in bytes as the agent wrote them."""

    seq: int
    kind: str
    text: str
    size: int


class NewEvent(NamedTuple):
    """A piece with its fence: it is written only while the attempt owns its task."""

    task_id: int
    attempt: int
    claimed_by: UUID
    seq: int
    kind: str
    text: str
    size: int


class LiveRow(NamedTuple):
    """What a task's row shows of a running attempt. None leaves a column as it is."""

    task_id: int
    attempt: int
    claimed_by: UUID
    percent: float | None
    message: str | None
    last_output: str | None
    usage: str | None
    """A JSON object by the names of ``Usage``."""
    session: str | None
    activity: str | None = None
    activity_age: float | None = None
    """Seconds that the activity goes on."""
    workspace: str | None = None
    """A JSON object: where the attempt works."""


@value
class Event:
    """A piece of a transcript as it is read. ``kind`` ``dropped`` stands where ``bytes`` bytes were left out."""

    seq: int
    kind: str
    at: datetime
    text: str
    bytes: int | None


def pack_tail(pieces: Sequence[Piece]) -> str:
    """The text of the row at ``TAIL_SEQ``."""
    return json.dumps([list(piece) for piece in pieces], ensure_ascii=False, separators=(",", ":"))


class EventRepository:
    """The run_events table, and the live columns of tasks."""

    def __init__(self, engine: Engine) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)

    def add(self, events: Sequence[NewEvent]) -> None:
        """Insert pieces in bulk; committed on return. Those of attempts that lost their task are left out.

        Repeating it after an unknown commit changes nothing; the row at ``TAIL_SEQ`` is replaced.
        """
        if not events:
            return
        arrays = {f"{name}s": list(values) for (name, _), values in zip(_PIECE, zip(*events, strict=True), strict=True)}
        with self._sessions.begin() as session:
            session.connection().execute(_ADD, arrays)

    def set_live(self, rows: Sequence[LiveRow]) -> set[tuple[int, int]]:
        """Show progress, last output, usage, session and activity on the tasks' rows; return the (task id, attempt) pairs done.

        What is missing in the answer has lost its task, or its row is locked by somebody else: try the latter again.
        Rows are locked in id order. Committed on return.
        """
        if not rows:
            return set()
        arrays = {f"{name}s": list(values) for (name, _), values in zip(_LIVE, zip(*rows, strict=True), strict=True)}
        with self._sessions.begin() as session:
            return {(task_id, attempt) for task_id, attempt in session.execute(_SET_LIVE, arrays)}

    def of_attempt(self, task_id: int, attempt: int, *, after: int = -1, limit: int | None = None) -> list[Event]:
        """The transcript of one attempt behind place *after*, in order, at most *limit* events.

        For following: ask again with the ``seq`` of the last event. Uses the primary key of run_events.
        """
        statement = (
            select(RunEvent.seq, RunEvent.kind, RunEvent.at, RunEvent.text, RunEvent.bytes)
            .where(
                RunEvent.task_id == task_id,
                RunEvent.attempt == attempt,
                (RunEvent.seq > after) | (RunEvent.seq == TAIL_SEQ),
            )
            .order_by(RunEvent.seq)
        )
        if limit is not None:
            statement = statement.limit(limit)
        with self._sessions() as session:
            rows = session.execute(statement).all()
        events: list[Event] = []
        for row in rows:
            events += _unpacked(row, after) if row.seq == TAIL_SEQ else [Event(*row)]
        return events if limit is None else events[:limit]

    def last(self, task_id: int, attempt: int, count: int) -> list[Event]:
        """The last *count* events of one attempt, in order."""
        with self._sessions() as session:
            rows = session.execute(
                select(RunEvent.seq, RunEvent.kind, RunEvent.at, RunEvent.text, RunEvent.bytes)
                .where(RunEvent.task_id == task_id, RunEvent.attempt == attempt)
                .order_by(RunEvent.seq.desc())
                .limit(count)
            ).all()
        events: list[Event] = []
        for row in reversed(rows):
            events += _unpacked(row, -1) if row.seq == TAIL_SEQ else [Event(*row)]
        return events[-count:]


def _unpacked(row: Any, after: int) -> list[Event]:
    try:
        pieces = [Piece(*piece) for piece in json.loads(row.text)]
    except (ValueError, TypeError):
        return [Event(row.seq, "note", row.at, row.text, row.bytes)]
    events = []
    if row.bytes and pieces and after < pieces[0].seq - 1:
        events.append(Event(pieces[0].seq - 1, DROPPED, row.at, "", row.bytes))
    return events + [Event(p.seq, p.kind, row.at, p.text, p.size) for p in pieces if p.seq > after]


# -- the statements -----------------------------------------------------------------------------------------------

_PIECE: tuple[tuple[str, Any], ...] = (
    ("task_id", BigInteger()),
    ("attempt", Integer()),
    ("claimed_by", Uuid()),
    ("seq", Integer()),
    ("kind", Text()),
    ("text", Text()),
    ("size", BigInteger()),
)
_LIVE: tuple[tuple[str, Any], ...] = (
    ("task_id", BigInteger()),
    ("attempt", Integer()),
    ("claimed_by", Uuid()),
    ("percent", Double()),
    ("message", Text()),
    ("last_output", Text()),
    ("usage", Text()),
    ("session", Text()),
    ("activity", Text()),
    ("activity_age", Double()),
    ("workspace", Text()),
)


def _arrays(columns: tuple[tuple[str, Any], ...]) -> Any:
    return (
        func.unnest(*(bindparam(f"{name}s", type_=ARRAY(kind)) for name, kind in columns))
        .table_valued(*(column(name, kind) for name, kind in columns))
        .render_derived(name="new")
    )


def _owned(new: Any) -> tuple[Any, ...]:
    """The fence of three, and that the task still runs."""
    return (
        Task.id == new.c.task_id,
        Task.attempt == new.c.attempt,
        Task.claimed_by == new.c.claimed_by,
        Task.status == TaskStatus.RUNNING.value,
    )


def _build_add() -> Any:
    new = _arrays(_PIECE)
    owned = select(new.c.task_id, new.c.attempt, new.c.seq, new.c.kind, new.c.text, new.c.size).join(
        Task, Task.id == new.c.task_id
    )
    statement = insert(RunEvent).from_select(
        ["task_id", "attempt", "seq", "kind", "text", "bytes"], owned.where(*_owned(new))
    )
    return statement.on_conflict_do_update(
        index_elements=["task_id", "attempt", "seq"],
        set_={"text": statement.excluded["text"], "bytes": statement.excluded["bytes"], "at": func.clock_timestamp()},
        where=RunEvent.seq == TAIL_SEQ,
    )


def _build_set_live() -> Any:
    new = _arrays(_LIVE)
    # In id order, as everywhere; what somebody holds is left for the next time, a screen can wait.
    mine = (
        select(Task.id, *(new.c[name] for name, _ in _LIVE[3:]))
        .join(new, Task.id == new.c.task_id)
        .where(*_owned(new))
        .order_by(Task.id)
        .with_for_update(skip_locked=True, key_share=True, of=Task)
        .cte("mine")
        .prefix_with("MATERIALIZED")
    )
    now = func.clock_timestamp()
    used = func.coalesce(cast(mine.c.usage, JSONB), Task.live_usage)
    since = now - func.make_interval(0, 0, 0, 0, 0, 0, func.coalesce(mine.c.activity_age, 0.0))
    doing = func.jsonb_build_object("activity", mine.c.activity, "activity_since", since, type_=JSONB)
    return (
        update(Task)
        .where(Task.id == mine.c.id)
        .values(
            progress_percent=func.coalesce(mine.c.percent, Task.progress_percent),
            progress_message=func.coalesce(mine.c.message, Task.progress_message),
            last_output=func.coalesce(mine.c.last_output, Task.last_output),
            last_output_at=case((mine.c.last_output.is_not(None), func.clock_timestamp()), else_=Task.last_output_at),
            live_usage=case(
                (mine.c.activity.is_(None), used),
                else_=func.coalesce(used, literal_column("'{}'::jsonb", JSONB)).op("||", return_type=JSONB)(doing),
            ),
            session=func.coalesce(mine.c.session, Task.session),
            workspace=func.coalesce(cast(mine.c.workspace, JSONB), Task.workspace),
        )
        .returning(Task.id, Task.attempt)
        .execution_options(synchronize_session=False)
    )


_ADD = _build_add()
_SET_LIVE = _build_set_live()

__all__ = ["DROPPED", "TAIL", "TAIL_SEQ", "Event", "EventRepository", "LiveRow", "NewEvent", "Piece", "pack_tail"]
