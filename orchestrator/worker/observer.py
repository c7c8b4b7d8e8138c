"""A running attempt: what its agent writes to, what is flushed of it, and what a live view reads.

``Attempt`` is the ``Live`` of one claim. ``Board`` knows which attempts have something to write, so that one flush of the
whole worker costs one statement however many agents there are. ``Observer`` is told of what happens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from orchestrator.agents.protocol import LIMIT, Agent, Stop
from orchestrator.domain.checkpoints import Room
from orchestrator.domain.outcome import Claim, Outcome, Usage
from orchestrator.domain.storable import storable_json, storable_text
from orchestrator.domain.values import value
from orchestrator.domain.words import WILL_NOT_STOP, OutcomeClass
from orchestrator.errors import ClaimLost, InvalidInput, OrchestratorError
from orchestrator.liveness import boot_clock
from orchestrator.repositories.events import LiveRow, NewEvent, Piece
from orchestrator.repositories.runs import Recorded
from orchestrator.transcripts import Transcript

log = logging.getLogger(__name__)

LAST_OUTPUT = 500
"""Characters of the last line that the task's row shows."""

ACTIVITY = 100
"""Characters of what an agent does that the task's row shows."""

MODEL_CALL = "model call"
"""What an agent does that tells of its tools and waits for none."""

Key = tuple[int, int]


class Observer:
    """Told what happens in a worker. Override what is wanted; nothing here may block, what it raises is logged.

    ``started`` and ``ended`` come on the event loop, the others on the worker's threads.
    """

    def started(self, claim: Claim) -> None:
        """An agent begins."""

    def ended(self, claim: Claim, outcome: Outcome) -> None:
        """An agent has ended; its outcome is not recorded yet."""

    def recorded(self, claim: Claim, outcome: Outcome, recorded: Recorded) -> None:
        """The run is committed; ``recorded.status`` is the task's status now (None: the attempt had lost its task)."""

    def away(self, why: str) -> None:
        """The database cannot be reached; agents live on."""

    def back(self) -> None:
        """The database is there again."""

    def stopping(self, why: str) -> None:
        """The worker claims no more."""

    def leaving(self) -> None:
        """The process ends at once. May be in a signal handler: only what is safe there."""


@value
class Watched:
    """One running attempt as a live view shows it. ``seconds`` since its claim came in."""

    claim: Claim
    seconds: float
    percent: float | None
    message: str | None
    last_output: str | None
    usage: Usage | None
    session: str | None
    stopping: OutcomeClass | None


class Keeping(NamedTuple):
    """A checkpoint on its way to the database, and who waits for it."""

    claim: Claim
    name: str
    text: str
    future: Future[Any]


class Board:
    """Which attempts have pieces or live columns to write. One lock for all: what is done under it is short.

    ``urgent`` are those with news that must not be lost with the worker, or is asked for at once: usage, session, what
    the agent does. A last line of output can wait longer.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self.lock = threading.Lock()
        self.keeping: deque[Keeping] = deque()
        """Checkpoints that are to be written."""
        self.wake = wake
        self._texts: set[Attempt] = set()
        self._lives: set[Attempt] = set()
        self._urgent: set[Attempt] = set()

    def text_changed(self, attempt: Attempt) -> None:
        self._texts.add(attempt)

    def live_changed(self, attempt: Attempt, *, urgent: bool = False) -> None:
        self._lives.add(attempt)
        if urgent:
            self._urgent.add(attempt)

    def forget(self, attempts: Iterable[Attempt]) -> None:
        """Nothing more is to be written of *attempts*."""
        with self.lock:
            for attempt in attempts:
                self._texts.discard(attempt)
                self._lives.discard(attempt)
                self._urgent.discard(attempt)

    def texts(self, of: Iterable[Attempt] | None = None) -> list[Attempt]:
        """The attempts with new pieces, all or those among *of*."""
        if not self._texts:
            return []
        with self.lock:
            return sorted(self._texts if of is None else self._texts.intersection(of), key=_by_id)

    def lives(self, of: Iterable[Attempt] | None = None) -> list[Attempt]:
        """The attempts whose live columns changed, all or those among *of*."""
        if not self._lives:
            return []
        with self.lock:
            return sorted(self._lives if of is None else self._lives.intersection(of), key=_by_id)

    def urgent(self) -> list[Attempt]:
        """The attempts with news in their live columns that should not wait."""
        if not self._urgent:
            return []
        with self.lock:
            return sorted(self._urgent, key=_by_id)

    def take_pieces(self, attempt: Attempt, *, tail: bool) -> list[Piece]:
        """The new pieces of *attempt*; ``give_back`` undoes it."""
        with self.lock:
            transcript = attempt.transcript
            if transcript is None:
                return []
            pieces = transcript.take(tail=tail)
            if not transcript.dirty:
                self._texts.discard(attempt)
            return pieces

    def give_back(self, attempt: Attempt, pieces: list[Piece]) -> None:
        """Take back pieces that could not be written."""
        with self.lock:
            if attempt.transcript is not None and pieces:
                attempt.transcript.give_back(pieces)
                self._texts.add(attempt)

    def take_live(self, attempt: Attempt) -> LiveRow:
        """The live columns of *attempt*; ``live_changed`` asks for them again."""
        with self.lock:
            self._lives.discard(attempt)
            self._urgent.discard(attempt)
            return attempt.live_row()


class Attempt:
    """One claim in this worker, and the ``Live`` of its agent."""

    __slots__ = (
        "_activity",
        "_activity_since",
        "_board",
        "_last",
        "_message",
        "_percent",
        "_room",
        "_session",
        "_usage",
        "_workspace",
        "agent",
        "began",
        "claim",
        "ended",
        "outcome",
        "probe",
        "stop",
        "task",
        "transcript",
    )

    def __init__(self, claim: Claim, agent: Agent, board: Board) -> None:
        self.claim = claim
        self.agent = agent
        self.stop = Stop()
        self.began = boot_clock()
        self.task: asyncio.Task[None] | None = None
        self.outcome: Outcome | None = None
        self.ended = False
        self.transcript: Transcript | None = None
        self.probe: str | None = None
        """The login whose breaker is open and that this attempt probes."""
        self._board = board
        self._percent: float | None = None
        self._room: Room | None = None
        self._message: str | None = None
        self._last: str | None = None
        self._usage: Usage | None = None
        self._session: str | None = None
        self._workspace: str | None = None
        self._activity: str | None = None
        self._activity_since: float | None = None

    @property
    def key(self) -> Key:
        return self.claim.task_id, self.claim.attempt

    @property
    def age(self) -> float:
        """Seconds since its claim came in."""
        return boot_clock() - self.began

    @property
    def served(self) -> bool:
        """Whether the provider has answered: the agent used tokens, or a tool."""
        return self._usage is not None or self._activity not in (None, LIMIT)

    # -- Live: from any thread ----------------------------------------------------------------------------------------

    def write(self, kind: str, text: str, size: int | None = None) -> None:
        """Add to the transcript."""
        try:
            with self._board.lock:
                if self.ended:
                    return
                if self.transcript is None:
                    self.transcript = Transcript()
                self.transcript.add(kind, text, size)
                self._board.text_changed(self)
                if text and not text.isspace():
                    self._last = text
                    self._board.live_changed(self)
        except Exception:
            log.exception("task %s: output of kind %r was not kept", self.claim.task_id, kind)

    def progress(self, percent: float | None, message: str | None) -> None:
        """Set what the task's row shows."""
        with self._board.lock:
            if self.ended:
                return
            if percent is not None:
                self._percent = float(percent)
            if message is not None:
                said = storable_text(str(message))[0][:LAST_OUTPUT]
                # Only the worker says what will not stop.
                self._message = f"“{said}”" if said.startswith(WILL_NOT_STOP) else said
            self._board.live_changed(self)

    def usage(self, usage: Usage) -> None:
        """Set this attempt's own part so far."""
        with self._board.lock:
            if not self.ended:
                self._usage = usage
                self._board.live_changed(self, urgent=True)

    def session(self, session: str) -> None:
        """Set the agent's own session id."""
        with self._board.lock:
            if not self.ended:
                self._session = storable_text(session)[0]
                self._board.live_changed(self, urgent=True)

    def activity(self, what: str | None) -> None:
        """Say what the agent does from now on."""
        with self._board.lock:
            what = MODEL_CALL if what is None else storable_text(what)[0][:ACTIVITY]
            if not self.ended and what != self._activity:
                self._activity, self._activity_since = what, boot_clock()
                self._board.live_changed(self, urgent=True)

    def workspace(self, told: dict[str, Any]) -> None:
        """Set where the attempt works."""
        with self._board.lock:
            if not self.ended:
                self._workspace = json.dumps(storable_json(told, "workspace")[0])
                self._board.live_changed(self, urgent=True)

    def keep(self, name: str, text: str) -> Future[Any]:
        """Have the recorder write a checkpoint, before the end of this attempt."""
        kept: Future[Any] = Future()
        with self._board.lock:
            if self._room is None:
                self._room = Room(self.claim.checkpoints)
            try:
                if self.ended:
                    raise ClaimLost(f"task {self.claim.task_id} attempt {self.claim.attempt} has ended")
                self._room.take(name, text)
            except OrchestratorError as error:
                kept.set_exception(error)
                return kept
            self._board.keeping.append(Keeping(self.claim, name, text, kept))
        self._board.wake()
        return kept

    # -- for the worker -----------------------------------------------------------------------------------------------

    def show_left(self) -> None:
        """Show on the task's row what of it is still there after SIGKILL, if that is news."""
        left = self.stop.left
        text = None if left is None else f"{WILL_NOT_STOP}{left}"[:LAST_OUTPUT]
        if text is None or text == self._message:
            return
        log.error("task %s attempt %s: %s; its slot stays taken", *self.key, text)
        with self._board.lock:
            if not self.ended:
                self._message = text
                self._board.live_changed(self)

    def end(self, outcome: Outcome) -> Outcome:
        """Close the attempt; return its outcome, completed by what was heard meanwhile. Later writes are ignored."""
        with self._board.lock:
            self.ended = True
            changes: dict[str, Any] = {}
            if self.transcript is not None:
                size = self.transcript.size()
                changes["transcript"] = replace(size, replaced=size.replaced or outcome.transcript.replaced)
            if outcome.usage is None and self._usage is not None:
                changes["usage"] = replace(
                    self._usage, complete=self._usage.complete if outcome.status is OutcomeClass.DONE else False
                )
            if outcome.session is None and self._session is not None:
                changes["session"] = self._session
        if changes:
            outcome = replace(outcome, **changes)
        self.outcome = outcome
        return outcome

    def live_row(self) -> LiveRow:
        """The live columns; the caller holds the board's lock."""
        claim, usage = self.claim, self._usage
        return LiveRow(
            claim.task_id,
            claim.attempt,
            claim.claimed_by,
            self._percent,
            self._message,
            last_line(self._last),
            None if usage is None else _usage_json(usage),
            self._session,
            self._activity,
            None if self._activity_since is None else max(0.0, boot_clock() - self._activity_since),
            self._workspace,
        )

    def watched(self) -> Watched:
        """What a live view shows."""
        with self._board.lock:
            return Watched(
                self.claim,
                boot_clock() - self.began,
                self._percent,
                self._message,
                last_line(self._last),
                self._usage,
                self._session,
                self.stop.reason,
            )


def _usage_json(usage: Usage) -> str:
    """*usage* as the task's row shows it. One odd number must not hold back the live columns of all other agents."""
    known = {name: value for name, value in asdict(usage).items() if value is not None}
    try:
        return json.dumps(storable_json(known, "usage")[0])
    except InvalidInput:
        known.pop("carry", None)
        return json.dumps(storable_json(known, "usage")[0])


def last_line(text: str | None) -> str | None:
    """The last line of *text* with something on it, shortened."""
    if text is None:
        return None
    lines = text[-4 * LAST_OUTPUT :].rstrip().splitlines()
    return storable_text(lines[-1].strip()[:LAST_OUTPUT])[0] if lines else None


def as_events(attempt: Attempt, pieces: Iterable[Piece]) -> list[NewEvent]:
    """*pieces* with the fence of *attempt*."""
    claim = attempt.claim
    return [
        NewEvent(claim.task_id, claim.attempt, claim.claimed_by, piece.seq, piece.kind, piece.text, piece.size)
        for piece in pieces
    ]


def _by_id(attempt: Attempt) -> Key:
    return attempt.key


class Complaints:
    """Says what goes wrong again and again once a minute, not at every turn of a thread."""

    EVERY = 60.0

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said: dict[str, float] = {}

    def say(self, what: str, error: Exception) -> None:
        """Log *what* with the traceback of *error*, unless the same was said within the last minute."""
        key = f"{what}: {type(error).__name__}: {error}"[:300]
        now = boot_clock()
        if now - self._said.get(key, -self.EVERY) < self.EVERY:
            return
        self._said = {each: at for each, at in self._said.items() if now - at < self.EVERY}
        self._said[key] = now
        self._logger.error("%s: %s", what, error, exc_info=error)


class Observers:
    """Several observers as one; a fault of theirs is logged and stops nobody."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)
        self._lock = threading.Lock()
        self._unserved: set[str] = set()
        self._away = False

    def __bool__(self) -> bool:
        return bool(self._observers)

    def tell(self, what: str, *arguments: Any) -> None:
        """Call the method *what* of each."""
        for observer in self._observers:
            try:
                getattr(observer, what)(*arguments)
            except Exception:
                log.exception("an observer's %s failed", what)

    def reached(self, who: str, why: str | None) -> None:
        """The thread *who* was served by the database (None), or was not (*why*).

        Tells ``away`` when the first one is not served, and ``back`` when all are again: once an outage.
        """
        if why is None and not self._away:
            return
        with self._lock:
            if why is None:
                self._unserved.discard(who)
            else:
                self._unserved.add(who)
            news = self._away is not bool(self._unserved)
            self._away = bool(self._unserved)
        if news and why is not None:
            self.tell("away", why)
        elif news:
            self.tell("back")

    def leave(self, who: str) -> None:
        """The thread *who* asks the database nothing more: nobody waits for it to be served."""
        with self._lock:
            self._unserved.discard(who)


__all__ = ["Attempt", "Board", "Complaints", "Key", "Observer", "Observers", "Watched", "as_events", "last_line"]
