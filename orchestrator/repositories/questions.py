"""``QuestionRepository``: what waits for people, and what they say to it.

Every answer is judged under the lock of its task's row, so that of two people who answer at once one wins and the other
is told who was first. Tasks are locked in id order, with the families of those that may end. What a word does is decided
by ``domain.asking.decide``; here it is only applied, and written to the audit trail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import ARRAY, BigInteger, Engine, Row, Text, any_, func, literal, literal_column, null, select, update
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.domain.asking import ANSWER_MAX, Answered, Ask, Decision, QuestionKind, Verdict, decide
from orchestrator.domain.entities import QuestionRow, Task
from orchestrator.domain.shapes import question_json
from orchestrator.domain.snapshot import Count, Question
from orchestrator.domain.storable import NAME_MAX, check_text
from orchestrator.domain.values import value
from orchestrator.domain.words import OutcomeClass, TaskStatus
from orchestrator.errors import Conflict, InvalidInput, NotFound, OrchestratorError
from orchestrator.repositories.asking import withdraw
from orchestrator.repositories.audit import note
from orchestrator.repositories.bounded import bounded
from orchestrator.repositories.filters import TaskFilter, conditions
from orchestrator.repositories.operations import BATCH, REASON_MAX, Changed, Skipped
from orchestrator.repositories.settling import below, close_families

COUNTED = 25_000
"""Open questions that are counted at most."""
EXPIRED_BY = "deadline"
"""The actor of an answer that a deadline gave."""

_ACTIONS = {
    Verdict.APPROVED: "approve",
    Verdict.DENIED: "deny",
    Verdict.ANSWERED: "answer",
    Verdict.EXPIRED: "expire",
}
_NO_SYNC = {"synchronize_session": False}


class QuestionRepository:
    """The questions table."""

    def __init__(self, engine: Engine) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)

    # -- reading ------------------------------------------------------------------------------------------------------

    def of_task(self, task_id: int) -> list[dict[str, Any]]:
        """Every question of a task, in the order in which they were asked. Uses questions_of_task."""
        statement = select(QuestionRow, *_OF_TASK).join(Task, Task.id == QuestionRow.task_id)
        with bounded(self._sessions) as session:
            rows = session.execute(statement.where(QuestionRow.task_id == task_id).order_by(QuestionRow.id))
            return [question_json(*row) for row in rows]

    def answers(self, task_ids: Sequence[int]) -> dict[int, tuple[Answered, ...]]:
        """What people answered to *task_ids* so far, for their next attempts. Uses questions_of_task."""
        with self._sessions() as session:
            rows = session.execute(
                select(
                    QuestionRow.task_id,
                    QuestionRow.name,
                    QuestionRow.question,
                    QuestionRow.answer,
                    QuestionRow.verdict,
                    QuestionRow.actor,
                    QuestionRow.reason,
                    QuestionRow.attempt,
                )
                .where(QuestionRow.task_id == any_(_array(task_ids)), QuestionRow.answer.is_not(None))
                .order_by(QuestionRow.task_id, QuestionRow.id)
            ).all()
        found: dict[int, tuple[Answered, ...]] = {}
        for row in rows:
            each = Answered(
                row.name, row.question, row.answer or "", Verdict(row.verdict or ""), row.actor, row.reason, row.attempt
            )
            found[row.task_id] = (*found.get(row.task_id, ()), each)
        return found

    # -- answering ----------------------------------------------------------------------------------------------------

    def say(
        self,
        wanted: TaskFilter,
        verdict: Verdict,
        *,
        actor: str,
        text: str | None = None,
        name: str | None = None,
        reason: str | None = None,
        dry_run: bool = False,
    ) -> Changed:
        """Say *verdict* (approved, denied, or answered with *text*) to what the tasks of *wanted* ask; committed on return.

        A task of which nothing else is open goes on: it is pending, and its next attempt is told. ``deny`` cancels it
        and what needs it, but for a tool permission, where it is the answer. *name* says which question of several.
        For the only task asked for by id Conflict is raised when nothing is open, naming who was first, and InvalidInput
        for an answer that is none of the choices; of many such tasks are skipped. Raises NotFound for unknown ids.
        """
        wanted.checked()
        check_text("reason", reason, REASON_MAX)
        check_text("name", name, NAME_MAX)
        if verdict is Verdict.ANSWERED:
            if text is None or not text.strip():
                raise InvalidInput("answer: expected a text that is not empty")
            check_text("answer", text, ANSWER_MAX)
        said = _Said(verdict, actor, text, name, reason)
        ids = self._matching(wanted)
        one = wanted.by_ids_alone and len(ids) == 1
        total = Changed(_ACTIONS[verdict], dry_run)
        for start in range(0, len(ids), BATCH):
            with self._sessions() as session:
                work = _Work(session, ids[start : start + BATCH], ending=True)
                for task_id in ids[start : start + BATCH]:
                    try:
                        work.say(task_id, said)
                    except OrchestratorError as error:
                        if one:
                            raise
                        work.changed.skipped.append(Skipped(task_id, work.status(task_id), error.message))
                work.write(said)
                work.changed.dry_run = dry_run
                if dry_run:
                    session.rollback()
                else:
                    session.commit()
            total.add(work.changed)
        return total

    def _matching(self, wanted: TaskFilter) -> Sequence[int]:
        with self._sessions() as session:
            if wanted.by_ids_alone:
                ids = sorted(set(wanted.ids))
                found = set(session.scalars(select(Task.id).where(Task.id == any_(_array(ids)))))
                missing = [id_ for id_ in ids if id_ not in found]
                if missing:
                    raise NotFound(
                        f"task {missing[0]} does not exist; nothing was changed",
                        hint="orchestrator questions shows what waits for a person",
                        task=missing[0],
                        tasks=missing,
                    )
                return ids
            # tasks_parked finds the waiting ones
            return session.scalars(
                select(Task.id)
                .where(*conditions(wanted), Task.status == literal_column("'waiting'", Text))
                .order_by(Task.id)
                .limit(wanted.limit)
            ).all()

    def expire(self, limit: int = BATCH) -> tuple[int, set[str]]:
        """Give up to *limit* questions whose deadline has passed their default, or end their tasks; committed on return.

        Returns how many there were and the agents that may have work now. Any number of watchdogs may call it at once:
        who comes second finds the question closed. Uses questions_open.
        """
        said = _Said(Verdict.EXPIRED, EXPIRED_BY)
        with self._sessions.begin() as session:
            late = session.execute(
                select(QuestionRow.task_id, QuestionRow.name)
                .where(_OPEN, QuestionRow.deadline <= func.clock_timestamp())
                .order_by(QuestionRow.deadline)
                .limit(limit)
            ).all()
            if not late:
                return 0, set()
            ids = sorted({row.task_id for row in late})
            work = _Work(session, ids, ending=True)
            orphaned = [id_ for id_ in ids if work.status(id_) is not TaskStatus.WAITING]
            withdraw(session, orphaned, actor=EXPIRED_BY)
            for task_id, name in sorted(late):
                if work.is_open(task_id, name):
                    work.say(task_id, _Said(Verdict.EXPIRED, EXPIRED_BY, name=name))
            work.write(said)
            return len(late), work.changed.wake

    # Last in the class: after it the word is no type any more.
    def list(
        self,
        wanted: TaskFilter | None = None,
        *,
        answered: bool = False,
        limit: int = 100,
        after_id: int | None = None,
    ) -> list[dict[str, Any]]:
        """The open questions of the tasks that *wanted* matches, by deadline, then the oldest first.

        With *answered* all questions, the newest first, behind the id *after_id*. Uses questions_open, questions_pkey.
        """
        statement = select(QuestionRow, *_OF_TASK).join(Task, Task.id == QuestionRow.task_id).limit(limit)
        if wanted is not None:
            statement = statement.where(*conditions(wanted.checked()))
        if answered:
            statement = statement.order_by(QuestionRow.id.desc())
            if after_id is not None:
                statement = statement.where(QuestionRow.id < after_id)
        else:
            statement = statement.where(_OPEN).order_by(QuestionRow.deadline, QuestionRow.asked_at, QuestionRow.id)
        with bounded(self._sessions) as session:
            return [question_json(*row) for row in session.execute(statement)]


@value
class _Said:
    """A word that was said, and by whom."""

    verdict: Verdict
    actor: str
    text: str | None = None
    name: str | None = None
    reason: str | None = None


@dataclass(slots=True)
class _Closed:
    """A question that is being closed in this transaction."""

    row: QuestionRow
    decision: Decision
    reason: str | None


@dataclass(slots=True)
class _Work:
    """One transaction's answers: tasks and questions under their locks, then what is written for all of them."""

    session: Session
    ids: Sequence[int]
    ending: bool
    changed: Changed = field(default_factory=lambda: Changed("answer"))
    _tasks: dict[int, Row[Any]] = field(default_factory=dict)
    _open: dict[int, list[QuestionRow]] = field(default_factory=dict)
    _closed: list[_Closed] = field(default_factory=list)
    _ended: dict[int, tuple[TaskStatus, str]] = field(default_factory=dict)
    _going_on: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The whole family at once and in id order: closing it later would take locks in another order than others do.
        family = set(self.session.scalars(select(below(self.ids).c.task_id))) if self.ending else set()
        rows: Any = self.session.execute(
            select(Task.id, Task.status, Task.agent)
            .where(Task.id == any_(_array(sorted({*self.ids, *family}))))
            .order_by(Task.id)
            .with_for_update(key_share=True, of=Task)
        ).all()
        self._tasks = {row.id: row for row in rows}
        for row in self.session.scalars(
            select(QuestionRow)
            .where(QuestionRow.task_id == any_(_array(self.ids)), _OPEN)
            .order_by(QuestionRow.task_id, QuestionRow.id)
        ):
            self._open.setdefault(row.task_id, []).append(row)

    def status(self, task_id: int) -> TaskStatus:
        return TaskStatus(self._tasks[task_id].status)

    def is_open(self, task_id: int, name: str) -> bool:
        """Whether the task waits for an answer to *name*, and has not been ended by one before."""
        waits = self.status(task_id) is TaskStatus.WAITING and task_id not in self._ended
        return waits and any(row.name == name for row in self._open.get(task_id, ()))

    def say(self, task_id: int, said: _Said) -> None:
        """Take *said* to the open question of a task. Raises Conflict and InvalidInput."""
        if self.status(task_id) is not TaskStatus.WAITING:
            raise self._too_late(task_id, said)
        rows = self._open.get(task_id, [])
        if not rows and said.name is None:
            self._without_question(task_id, said)
            return
        fitting = [row for row in rows if said.name is None or row.name == said.name]
        if not fitting:
            raise self._too_late(task_id, said)
        if len(fitting) > 1:
            names = ", ".join(repr(row.name) for row in fitting[:20])
            raise InvalidInput(
                f"task {task_id} asks {len(fitting)} questions: {names}", hint="say which with --name", task=task_id
            )
        (row,) = fitting
        try:
            decision = decide(_ask(row), said.verdict, said.text)
        except InvalidInput as error:
            raise InvalidInput(f"task {task_id}: {error.message}", hint=error.hint, task=task_id) from None
        self._closed.append(_Closed(row, decision, said.reason))
        rows.remove(row)
        self.changed.ids.append(task_id)
        if decision.status is not None:
            by = f"by {said.actor}" + (f": {said.reason}" if said.reason else "")
            message = f"nobody answered in time: {row.question}" if said.verdict is Verdict.EXPIRED else f"denied {by}"
            self._end(task_id, decision, message)
        elif not rows:
            self._go_on(task_id)

    def _without_question(self, task_id: int, said: _Said) -> None:
        """A task that somebody has put to waiting without a question: it can be let go on, or ended."""
        if said.verdict is Verdict.ANSWERED:
            raise Conflict(
                f"task {task_id} waits, but asks nothing", hint=f"orchestrator approve {task_id}", task=task_id
            )
        self.changed.ids.append(task_id)
        if said.verdict is Verdict.APPROVED:
            self._go_on(task_id)
        else:
            by = f"denied by {said.actor}" + (f": {said.reason}" if said.reason else "")
            self._end(task_id, Decision(said.verdict, None, TaskStatus.CANCELLED, "denied"), by)

    def _go_on(self, task_id: int) -> None:
        self._going_on.append(task_id)
        self.changed.wake.add(self._tasks[task_id].agent)

    def _end(self, task_id: int, decision: Decision, message: str) -> None:
        assert decision.status is not None
        self._ended[task_id] = decision.status, f"{decision.cause}\n{message}"

    def _too_late(self, task_id: int, said: _Said) -> Conflict:
        """The error for a word that comes when nothing is open: who was first, and when."""
        last = self.session.scalar(
            select(QuestionRow)
            .where(
                QuestionRow.task_id == task_id,
                QuestionRow.answered_at.is_not(None),
                *(() if said.name is None else (QuestionRow.name == said.name,)),
            )
            .order_by(QuestionRow.answered_at.desc())
            .limit(1)
        )
        if last is None:
            what = "asks nothing" if said.name is None else f"asks nothing by the name {said.name!r}"
            return Conflict(
                f"task {task_id} is {self.status(task_id)} and {what}",
                hint="orchestrator questions shows what waits for a person",
                task=task_id,
                status=self.status(task_id).value,
            )
        return Conflict(
            f"task {task_id}: {last.question!r:.200} was {told(last.verdict, last.answer)}"
            f" by {last.actor} at {_clock(last.answered_at)}",
            hint=f"orchestrator show {task_id} says what became of it",
            task=task_id,
            actor=last.actor,
            answered_at=_clock(last.answered_at),
        )

    def write(self, said: _Said) -> None:
        """Write what was said, move the tasks, and note it in the audit trail."""
        session, now = self.session, func.clock_timestamp()
        for closed in self._closed:
            session.execute(
                update(QuestionRow)
                .where(QuestionRow.id == closed.row.id)
                .values(
                    answered_at=now,
                    verdict=closed.decision.verdict.value,
                    answer=closed.decision.answer,
                    actor=said.actor,
                    reason=closed.reason,
                ),
                execution_options=_NO_SYNC,
            )
            if closed.row.kind == QuestionKind.BUDGET and closed.decision.status is None and closed.row.grants:
                self._grant(closed.row)
            details = {"name": closed.row.name, "question": closed.row.question[:500]}
            if closed.decision.answer is not None:
                details["answer"] = closed.decision.answer[:500]
            note(
                session,
                _ACTIONS[said.verdict],
                actor=said.actor,
                task_ids=[closed.row.task_id],
                reason=said.reason,
                details=details,
            )
        if self._going_on:
            approved = [c.row.task_id for c in self._closed if c.row.kind == QuestionKind.APPROVAL]
            session.execute(
                update(Task)
                .where(Task.id == any_(_array(self._going_on)))
                .values(
                    status=TaskStatus.PENDING,
                    due=Task.available_at <= now,
                    error_class=null(),
                    error_cause=null(),
                    error_message=null(),
                    needs_approval=Task.needs_approval & (Task.id != any_(_array(approved))),
                ),
                execution_options=_NO_SYNC,
            )
        for task_id, (status, told_) in self._ended.items():
            cause, _, message = told_.partition("\n")
            session.execute(
                update(Task)
                .where(Task.id == task_id)
                .values(
                    status=status,
                    finished_at=now,
                    held_at=null(),
                    error_class=OutcomeClass.CANCELLED if status is TaskStatus.CANCELLED else OutcomeClass.OVER_BUDGET,
                    error_cause=cause,
                    error_message=message,
                ),
                execution_options=_NO_SYNC,
            )
        if self._ended:
            withdraw(session, list(self._ended), actor=said.actor)
            closed_family = close_families(session, {id_: status for id_, (status, _) in self._ended.items()})
            self.changed.family += closed_family

    def _grant(self, row: QuestionRow) -> None:
        """Add what an approved budget question grants."""
        columns = {"tokens": Task.budget_tokens, "usd": Task.budget_usd, "turns": Task.budget_turns}
        columns["seconds"] = Task.budget_seconds
        added = {
            column.key: column + more for name, column in columns.items() if (more := (row.grants or {}).get(name))
        }
        if added:
            self.session.execute(update(Task).where(Task.id == row.task_id).values(added), execution_options=_NO_SYNC)


# -- for screens ------------------------------------------------------------------------------------------------------


def read_questions(session: Session, limit: int) -> tuple[tuple[Question, ...], Count, datetime | None]:
    """The open questions by deadline, then age; how many there are; since when the oldest waits. Uses questions_open."""
    first = (
        select(QuestionRow, *_OF_TASK)
        .join(Task, Task.id == QuestionRow.task_id)
        .where(_OPEN)
        .order_by(QuestionRow.deadline, QuestionRow.asked_at, QuestionRow.id)
        .limit(limit)
    )
    rows = session.execute(first).all() if limit else []
    some = select(QuestionRow.asked_at).where(_OPEN).limit(COUNTED + 1).subquery()
    number, oldest = session.execute(select(func.count(), func.min(some.c.asked_at))).one()
    return (
        tuple(_question(row[0], row.name, row.title, row.agent) for row in rows),
        Count(min(number, COUNTED), number > COUNTED),
        oldest,
    )


def questions_of(session: Session, *which: Any) -> dict[int, Question]:
    """The first open question of each waiting task that matches *which*."""
    rows = session.execute(
        select(QuestionRow, *_OF_TASK)
        .join(Task, Task.id == QuestionRow.task_id)
        .where(_OPEN, Task.status == literal_column("'waiting'", Text), *which)
        .order_by(QuestionRow.task_id, QuestionRow.id)
    )
    found: dict[int, Question] = {}
    for row in rows:
        found.setdefault(row[0].task_id, _question(row[0], row.name, row.title, row.agent))
    return found


def _question(row: QuestionRow, name: str | None, title: str | None, agent: str) -> Question:
    return Question(
        row.task_id,
        row.question,
        name,
        title,
        agent,
        row.kind,
        tuple(row.choices),
        row.asked_at,
        row.deadline,
        row.default,
    )


def told(verdict: str | None, answer: str | None) -> str:
    """How a question was closed, as words."""
    if verdict == Verdict.ANSWERED or (verdict == Verdict.EXPIRED and answer is not None):
        return f"answered {answer!r:.200}" + (" for want of an answer" if verdict == Verdict.EXPIRED else "")
    return "given up" if verdict == Verdict.EXPIRED else str(verdict)


def _ask(row: QuestionRow) -> Ask:
    return Ask(
        row.name,
        row.question,
        QuestionKind(row.kind),
        tuple(row.choices),
        default=row.default,
        yes=row.yes,
        no=row.no,
        grants=row.grants,
    )


def _clock(at: datetime | None) -> str:
    return "?" if at is None else at.astimezone().isoformat(timespec="seconds")


def _array(ids: Iterable[int]) -> Any:
    return literal(list(ids), ARRAY(BigInteger))


_OPEN = QuestionRow.answered_at.is_(None)
_OF_TASK = (Task.agent, Task.plan, Task.name, Task.title, Task.status)

__all__ = ["QuestionRepository", "questions_of", "read_questions", "told"]
