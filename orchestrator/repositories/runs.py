"""``RunRepository``: unit 3 of ADR-0004, the record of what came of an attempt, and reading those records.

``record_runs`` is a group commit: the runs of a batch and the moves of their tasks are one transaction. It is safe to
repeat after an unknown commit: it finds its own run and says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Engine,
    any_,
    bindparam,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.domain.asking import Ask
from orchestrator.domain.entities import Run, Task
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.settle import settle
from orchestrator.domain.storable import storable_json, storable_text
from orchestrator.domain.values import value
from orchestrator.domain.words import OutcomeClass, TaskStatus
from orchestrator.errors import ClaimLost, InvalidInput, NotFound
from orchestrator.repositories.asking import put_questions
from orchestrator.repositories.settling import Ending, write, write_alone

log = logging.getLogger(__name__)


@value
class Ended:
    """An attempt that ended and is to be recorded, with who ran it."""

    claim: Claim
    outcome: Outcome
    worker: str | None = None
    host: str | None = None


@value
class Recorded:
    """What recording did: the task's status afterwards; ``late`` when the attempt no longer owned its task.

    ``at`` is the instant of the next attempt if it was stated; it wins over ``delay``, in seconds from now.
    """

    task_id: int
    attempt: int
    status: TaskStatus | None
    delay: float = 0.0
    late: bool = False
    at: datetime | None = None


@value
class Batch:
    """The records of one group commit, in the order given, and the agents that may have work now."""

    recorded: list[Recorded]
    wake: set[str]


class RunRepository:
    """The runs table: written by ``record_runs`` and, for lost attempts, by ``TaskRepository.take_back``."""

    def __init__(self, engine: Engine, *, give_up_after: float = 86_400.0) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)
        self._give_up_after = give_up_after

    def record_run(self, claim: Claim, outcome: Outcome, *, worker: str | None = None, host: str | None = None) -> Run:
        """Insert the run of *claim* and settle its task, in one transaction; committed on return.

        Repeating it after an unknown commit returns the same run. When the attempt no longer owns its task, the outcome
        is kept in the ``late`` column of the run that the watchdog wrote, and ClaimLost is raised.
        """
        (recorded,) = self.record_runs([Ended(claim, outcome, worker, host)]).recorded
        if recorded.late:
            raise ClaimLost(
                f"task {claim.task_id} attempt {claim.attempt} was taken back from worker {claim.claimed_by}; "
                "its outcome is kept as late",
                task=claim.task_id,
                attempt=claim.attempt,
            )
        return self.get(claim.task_id, claim.attempt)

    def record_runs(self, batch: Sequence[Ended]) -> Batch:
        """Record a batch of attempts in one transaction; committed on return.

        What the database would refuse (NUL, lone surrogates, NaN) is replaced and noted beforehand. If it refuses a
        value all the same, the batch is halved until the value stands alone; there it is replaced: no neighbour waits
        for it and nothing else of it is lost. It is halved as well when it takes longer than the server allows. At most
        one element for each (task, attempt).
        """
        return self._record([storable(ended) for ended in batch])

    def _record(self, batch: list[Ended]) -> Batch:
        try:
            return self._record_once(batch)
        except DBAPIError as error:
            if len(batch) == 1 and _refused_value(error):
                return self._record_plain(batch[0], error)
            if len(batch) == 1 or not (_refused_value(error) or _too_long(error)):
                raise
        middle = len(batch) // 2
        first, second = self._record(batch[:middle]), self._record(batch[middle:])
        return Batch(first.recorded + second.recorded, first.wake | second.wake)

    def _record_plain(self, ended: Ended, error: DBAPIError) -> Batch:
        log.warning("the database refused a value of task %s: %s", ended.claim.task_id, error.orig)
        try:
            return self._record_once([_plain(ended, str(error.orig))])
        except DBAPIError as again:
            if not _refused_value(again):
                raise
            return self._record_once([_bare(ended, str(again.orig))])

    def _record_once(self, batch: list[Ended]) -> Batch:
        """Most attempts need no look at their task: they are recorded by one statement, the others in a transaction."""
        endings = [self._settled(ended, cancel_requested=False) for ended in batch]
        if any(ending.settlement.status is TaskStatus.WAITING for ending in endings):
            # What an attempt asks is written with its task's move, in one transaction.
            endings = [ending for ending in endings if ending.settlement.status is not TaskStatus.WAITING]
        with self._sessions.begin() as session:
            moved, wake = write_alone(session, endings) if endings else (set(), set())
        recorded = {key: _recorded(ending) for ending in endings if (key := _key(ending)) in moved}
        if len(recorded) < len(batch):
            rest = self._record_with_a_look([ended for ended in batch if _key(ended) not in moved])
            recorded |= {(done.task_id, done.attempt): done for done in rest.recorded}
            wake |= rest.wake
        return Batch([recorded[_key(ended)] for ended in batch], wake)

    def _record_with_a_look(self, batch: list[Ended]) -> Batch:
        ids = [ended.claim.task_id for ended in batch]
        with self._sessions.begin() as session:
            rows = {row.id: row for row in session.execute(_LOCK, {"ids": ids})}
            endings: list[Ending] = []
            late: list[Ended] = []
            families: list[int] = []
            for ended in batch:
                claim, row = ended.claim, rows.get(ended.claim.task_id)
                if (
                    row is None
                    or row.status != "running"
                    or row.attempt != claim.attempt
                    or row.claimed_by != claim.claimed_by
                ):
                    late.append(ended)
                    continue
                endings.append(self._settled(ended, cancel_requested=row.cancel_requested_at is not None))
                if row.is_parent:
                    families.append(claim.task_id)
            wake = write(session, endings, families)
            if any(ending.settlement.status is TaskStatus.WAITING for ending in endings):
                put_questions(session, _asked(endings))
            recorded = [_recorded(ending) for ending in endings] + [_keep_late(session, ended) for ended in late]
        return Batch(recorded, wake)

    def _settled(self, ended: Ended, *, cancel_requested: bool) -> Ending:
        settlement = settle(
            ended.claim, ended.outcome, cancel_requested=cancel_requested, give_up_after=self._give_up_after
        )
        return Ending(ended.claim, ended.outcome, settlement, ended.worker, ended.host)

    def get(self, task_id: int, attempt: int) -> Run:
        """The run of one attempt. Raises NotFound."""
        with self._sessions() as session:
            run = session.scalar(select(Run).where(Run.task_id == task_id, Run.attempt == attempt))
        if run is None:
            raise NotFound(f"task {task_id} has no run of attempt {attempt}", task=task_id, attempt=attempt)
        return run

    def of_task(self, task_id: int) -> list[Run]:
        """All runs of a task, by attempt. Uses the unique key runs_task_id_attempt_key."""
        with self._sessions() as session:
            return list(session.scalars(select(Run).where(Run.task_id == task_id).order_by(Run.attempt)))


def _key(ended: Ended | Ending) -> tuple[int, int]:
    return ended.claim.task_id, ended.claim.attempt


def _recorded(ending: Ending) -> Recorded:
    claim, settlement = ending.claim, ending.settlement
    return Recorded(claim.task_id, claim.attempt, settlement.status, settlement.delay, at=settlement.at)


def _asked(endings: Sequence[Ending]) -> Iterator[tuple[int, int, Ask]]:
    """What the attempts of tasks that are waiting now ask; one that did not say what still needs somebody's word."""
    for ending in endings:
        if ending.settlement.status is TaskStatus.WAITING:
            message = ending.outcome.message or "May it go on?"
            for ask in ending.outcome.asks or (Ask("suspended", message, yes="yes"),):
                yield ending.claim.task_id, ending.claim.attempt, ask


# -- the statements -----------------------------------------------------------------------------------------------

# In id order, everywhere: two recorders, or a recorder and an operator, must not wait for each other in a circle.
# FOR NO KEY UPDATE: the foreign keys of runs and dependencies (KEY SHARE) do not wait for it.
_LOCK = (
    select(
        Task.id,
        Task.status,
        Task.attempt,
        Task.claimed_by,
        Task.cancel_requested_at,
        # A column and not a look at the dependencies: after a wait for this lock the row is read anew, a subquery is not.
        Task.is_parent,
    )
    .where(Task.id == any_(bindparam("ids", type_=ARRAY(BigInteger))))
    .order_by(Task.id)
    .with_for_update(key_share=True, of=Task)
)


def _keep_late(session: Session, ended: Ended) -> Recorded:
    """An outcome whose fence is gone: our own earlier commit, or a late result that belongs beside the lost run."""
    claim, outcome = ended.claim, ended.outcome
    run = session.execute(
        select(Run.id, Run.status, Run.cause, Run.worker_id, Run.late, Task.status)
        .join(Task, Task.id == Run.task_id)
        .where(Run.task_id == claim.task_id, Run.attempt == claim.attempt)
    ).one_or_none()
    if run is None:
        log.warning(
            "task %s attempt %s has neither claim nor run: its outcome has no place", claim.task_id, claim.attempt
        )
        return Recorded(claim.task_id, claim.attempt, None, late=True)
    taken_back = run[1] == OutcomeClass.LOST or run[2] == "handed_back"
    if run[3] != claim.claimed_by:
        log.warning(
            "task %s attempt %s was not that of worker %s: its outcome has no place",
            claim.task_id,
            claim.attempt,
            claim.claimed_by,
        )
        return Recorded(claim.task_id, claim.attempt, None, late=True)
    if not taken_back:
        return Recorded(claim.task_id, claim.attempt, TaskStatus(run[5]))
    late: dict[str, Any] = {
        "status": outcome.status.value,
        "cause": outcome.cause,
        "message": outcome.message,
        "result": outcome.result,
        "exit_code": outcome.exit_code,
        "elapsed": outcome.elapsed,
    }
    if outcome.usage is not None:
        late["usage"] = {
            "input_tokens": outcome.usage.input_tokens,
            "output_tokens": outcome.usage.output_tokens,
            "total_tokens": outcome.usage.total_tokens,
            "cost_usd": outcome.usage.cost_usd,
        }
    session.execute(
        update(Run).where(Run.id == run[0], Run.late.is_(None)).values(late=late),
        execution_options={"synchronize_session": False},
    )
    return Recorded(claim.task_id, claim.attempt, None, late=True)


# -- values that the database refuses -----------------------------------------------------------------------------


def _too_long(error: DBAPIError) -> bool:
    """A ``statement_timeout`` of the role ended the statement: half of the batch takes half of the time."""
    return getattr(error.orig, "sqlstate", None) == "57014"


def _refused_value(error: DBAPIError) -> bool:
    """SQLSTATE class 22 (data exception), 54 (limit exceeded), or the driver's own refusal to send a value."""
    state = getattr(error.orig, "sqlstate", None)
    if state is None:
        return type(error.orig).__name__ in ("DataError", "UnicodeEncodeError")
    return state[:2] in ("22", "54") or state == "23514"


def _fine(ended: Ended) -> bool:
    """Whether nothing has to be replaced, as nearly always: looked at once, it costs a fraction of the replacing."""
    outcome, usage = ended.outcome, ended.outcome.usage
    texts = [outcome.cause, outcome.message, outcome.session, ended.worker, ended.host, *outcome.notes]
    numbers: list[tuple[Any, float]] = [(getattr(outcome, name), most) for name, most in _NUMBERS]
    if usage is not None:
        texts += [usage.cost_source, usage.counter, usage.model]
        numbers += [(getattr(usage, name), most) for name, most in _USED]
    for number, most in numbers:
        # True and 15.0 are no integers, and NaN is within no limits.
        if number is not None and not (type(number) in (int, type(most)) and -most <= number <= most):
            return False
    try:
        return (
            not storable_text("\n".join([text for text in texts if text]))[1]
            and (outcome.retry_at is None or outcome.retry_at.tzinfo is not None)
            and (outcome.result is None or not storable_json(outcome.result)[1])
            and (usage is None or usage.carry is None or not storable_json(usage.carry)[1])
        )
    except InvalidInput:
        return False


def storable(ended: Ended) -> Ended:
    """*ended* as the columns take it: what they would refuse is replaced, and the run says so.

    Texts and JSON get U+FFFD and the like (see ``domain.storable``); numbers beyond their column are left out.
    """
    if _fine(ended):
        return ended
    outcome = ended.outcome
    notes = list(outcome.notes)
    replaced = False

    def clean(value: str | None) -> str | None:
        nonlocal replaced
        if value is None:
            return None
        value, changed = storable_text(value)
        replaced = replaced or changed
        return value

    def number(name: str, value: float | None, most: float) -> Any:
        if value is None:
            return None
        if type(value) in (int, float) and -most <= value <= most:
            return value if type(most) is float else round(value)
        notes.append(f"{name} was {_short(value)} and is left out")
        return None

    cause, message, session = clean(outcome.cause), clean(outcome.message), clean(outcome.session)
    worker, host = clean(ended.worker), clean(ended.host)
    notes = [clean(note) or "" for note in notes]
    result = outcome.result
    if result is not None:
        try:
            result, changed = storable_json(result)
        except InvalidInput as error:
            result, changed = storable_text(repr(result))[0], True
            notes.append(f"the result is not JSON and is kept as text: {error.message}")
        replaced = replaced or changed
    usage = outcome.usage
    used: dict[str, Any] = {}
    if usage is not None:
        used = {name: number(name, getattr(usage, name), most) for name, most in _USED}
        used |= {name: clean(getattr(usage, name)) for name in ("cost_source", "counter", "model")}
        if usage.carry is not None:
            try:
                used["carry"] = storable_json(usage.carry)[0]
            except InvalidInput as error:
                used["carry"] = None
                notes.append(f"what the meter keeps is not JSON and is left out: {error.message}")
    numbers = {name: number(name, getattr(outcome, name), most) for name, most in _NUMBERS}
    retry_at = outcome.retry_at
    if retry_at is not None and retry_at.tzinfo is None:
        retry_at = retry_at.replace(tzinfo=UTC)
    if replaced:
        notes.append("characters that the database cannot hold were replaced")
    numbers["elapsed"] = numbers["elapsed"] or 0.0
    outcome = replace(
        outcome,
        cause=cause,
        message=message,
        session=session,
        result=result,
        usage=None if usage is None else replace(usage, **used),
        retry_at=retry_at,
        notes=tuple(notes),
        transcript=replace(outcome.transcript, replaced=True) if replaced else outcome.transcript,
        **numbers,
    )
    return Ended(ended.claim, outcome, worker, host)


def _short(value: object) -> str:
    """*value* for a note. The digits of a huge integer are not worth their length, and Python may refuse to print them."""
    try:
        text = storable_text(repr(value))[0]
    except ValueError:
        return "a number with thousands of digits"
    return text if len(text) <= 100 else f"{text[:100]}…"


# Limits of numbers: of the columns (integers), and of seconds and USD (thirty years, a thousand millions). How long to
# wait is cut where it is used.
_INTEGER, _BIGINT, _LARGEST = 2**31 - 1, 2**63 - 1, 1e9
_USED = (
    ("input_tokens", _BIGINT),
    ("output_tokens", _BIGINT),
    ("total_tokens", _BIGINT),
    ("turns", _INTEGER),
    ("cost_usd", _LARGEST),
)
_NUMBERS = (
    ("exit_code", _INTEGER),
    ("signal", _INTEGER),
    ("retry_after", math.inf),
    ("elapsed", _LARGEST),
)


def _plain(ended: Ended, why: str) -> Ended:
    """The same outcome with all its text as short plain ASCII, for a value that was refused."""
    outcome = ended.outcome

    def plain(value: str | None) -> str | None:
        return None if value is None else ascii(value)[1:-1][:PLAIN_MAX]

    return replace(
        ended,
        outcome=replace(
            outcome,
            cause=plain(outcome.cause),
            message=plain(outcome.message),
            result=None if outcome.result is None else ascii(outcome.result)[:PLAIN_MAX],
            session=plain(outcome.session),
            transcript=replace(outcome.transcript, replaced=True),
            notes=(f"the database refused a value; stored as plain text: {plain(why)}",),
        ),
    )


def _bare(ended: Ended, why: str) -> Ended:
    """What must be recorded in any case: the class. The last resort."""
    outcome = ended.outcome
    note = f"the database refused the outcome; only its class is stored: {ascii(why)[1:-1][:PLAIN_MAX]}"
    return Ended(ended.claim, Outcome(outcome.status, notes=(note,)))


PLAIN_MAX = 1_000_000
"""Characters that are kept of a text that the database refused."""


__all__ = ["Batch", "Ended", "Recorded", "RunRepository", "storable"]
