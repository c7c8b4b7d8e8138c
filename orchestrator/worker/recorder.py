"""The thread of unit 3: group commit of outcomes, and on the same connection all else that a worker writes or asks.

Whatever outcomes are ready when the previous commit returns go into the next one; an idle recorder waits for nothing. A
fault of the database is waited out for as long as the process lives (``patience``); what is left then is spooled.
Between records, by the clock: transcripts each second, and of the live columns usage, session and activity; all live
columns every 5 s; cancel requests each second, the minute's
counts every 2 s, reconciliation at every third renewal, and the sweep of the watchdog.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from orchestrator.database.transient import transient
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass, TaskStatus
from orchestrator.errors import ClaimLost, DatabaseUnavailable
from orchestrator.metrics import Metrics
from orchestrator.repositories.checkpoints import NewCheckpoint
from orchestrator.repositories.events import NewEvent, Piece
from orchestrator.repositories.runs import Ended, Recorded
from orchestrator.service import Orchestrator
from orchestrator.worker.desk import BATCH_ROWS, Desk
from orchestrator.worker.gates import Gates
from orchestrator.worker.observer import Attempt, Complaints, Keeping, Key, Observers, as_events
from orchestrator.worker.spool import Spool
from orchestrator.worker.watchdog import Sweeper, once

log = logging.getLogger(__name__)
T = TypeVar("T")

BATCH_BYTES = 8 << 20
EVENTS_EVERY = 1.0
GATES_EVERY = 1.0
LIVE_EVERY = 5.0
CANCEL_EVERY = 1.0
MINUTES_EVERY = 1.5


class Recorder:
    """Records what ended. ``cancel`` and ``lost`` are called with keys of running attempts, on this thread."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        desk: Desk,
        gates: Gates,
        metrics: Metrics,
        observers: Observers,
        sweeper: Sweeper | None,
        spool: Spool,
        *,
        sweep: float,
        cancel: Callable[[list[Key]], None],
        lost: Callable[[list[Key]], None],
        work: Callable[[], None],
    ) -> None:
        self._orchestrator = orchestrator
        self._desk = desk
        self._gates = gates
        self._metrics = metrics
        self._observers = observers
        self._sweeper = sweeper
        self._spool = spool
        self._sweep_every = sweep
        self._cancel = cancel
        self._lost = lost
        self._work = work
        self.patience = threading.Event()
        """Set when waiting for the database is over: what cannot be recorded then is spooled."""
        self.reconcile = False
        self.sweep_now = True
        self.cancel_now = False
        self.spooled = 0
        self._served = False
        """Whether the database has answered to one of these chores; often there is nothing to ask."""
        self._keeping = threading.Lock()
        self._kept: set[Key] = set()
        self._in_flight: dict[Key, list[Piece]] = {}
        """Pieces of transcripts in a transaction that has not come back yet. Who pops them answers for them."""
        self._unknown: set[Key] = set()
        self._claims_then = 0
        self._complaints = Complaints(log)
        self._closing = False
        self._now = time.monotonic()
        self._next_events = self._next_live = self._next_cancel = self._next_sweep = self._next_minutes = 0.0
        self._next_gates = 0.0
        self._due_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def begin(self) -> None:
        """Start recording and sweeping."""
        self._thread.start()

    def close(self, timeout: float | None) -> None:
        """Record what is left and end; after *timeout* seconds without the database, spool it. Blocks."""
        self._closing = True
        self._desk.record_now.set()
        if self._thread.ident is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.patience.set()
            self._desk.record_now.set()
            self._thread.join(timeout)
        if self._thread.is_alive():
            # It hangs in a dead network. If its commit comes through after all, the fence knows the copy for what it is.
            for attempt in list(self._desk.held.values()):
                if attempt.outcome is not None:
                    self._keep(attempt)

    @property
    def alive(self) -> bool:
        """Whether its thread goes on, or has not begun."""
        return self._thread.ident is None or self._thread.is_alive()

    def asked_to_cancel(self) -> None:
        """Somebody may have asked to cancel a task: look now."""
        self.cancel_now = True
        self._desk.record_now.set()

    def look_around(self) -> None:
        """Sweep now."""
        self.sweep_now = True
        self._desk.record_now.set()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        desk = self._desk
        while True:
            closing = self._closing
            desk.record_now.clear()
            batch = self._batch()
            # What an attempt has kept is durable before its end is.
            self._keep_checkpoints()
            if batch:
                self._record(batch)
            self._now = time.monotonic()
            if not (closing or self.patience.is_set()):
                try:
                    self._served = False
                    self._chores()
                    if self._served:
                        self._observers.reached("recorder", None)
                except DatabaseUnavailable as error:
                    self._observers.reached("recorder", str(error))
                    log.debug("not now: %s", error)
                except Exception as error:  # noqa: BLE001 - the worker goes on, whatever it was
                    self._complaints.say("housekeeping failed", error)
            if desk.queue or desk.board.keeping:
                continue
            if closing:
                break
            desk.record_now.wait(self._pause())
        self._last_words()

    def _pause(self) -> float:
        now = time.monotonic()
        times = [self._next_sweep, self._next_minutes, self._next_gates]
        if self._desk.held:
            times += [self._next_events, self._next_live, self._next_cancel]
        if self._due_at is not None:
            times.append(self._due_at)
        # At least a little, whatever the times say: a chore that fails at once must not be a busy loop.
        return min(self._sweep_every, max(0.005, min(times) - now))

    def _batch(self) -> list[Attempt]:
        queue, size = self._desk.queue, 0
        batch: list[Attempt] = []
        while queue and len(batch) < BATCH_ROWS and size < BATCH_BYTES:
            attempt = queue.popleft()
            batch.append(attempt)
            outcome = attempt.outcome
            if outcome is not None and outcome.result is not None:
                size += _weight(outcome.result)
        return batch

    def _keep_checkpoints(self) -> None:
        """Write the checkpoints that wait, as one commit; waits out database faults as a record does."""
        keeping = self._desk.board.keeping
        while keeping:
            part = [keeping.popleft() for _ in range(min(len(keeping), BATCH_ROWS))]
            new = [NewCheckpoint(k.claim.task_id, k.claim.attempt, k.claim.claimed_by, k.name, k.text) for k in part]
            try:
                stored = self._orchestrator.keep(new, patience=self.patience)
            except Exception as error:  # noqa: BLE001 - whoever waits is told
                if not isinstance(error, DatabaseUnavailable):
                    self._complaints.say("checkpoints could not be written", error)
                for each in part:
                    _resolve(each, error)
                continue
            for each in part:
                key = (each.claim.task_id, each.claim.attempt, each.name)
                lost = ClaimLost(f"task {key[0]} attempt {key[1]} lost its task", task=key[0], attempt=key[1])
                _resolve(each, stored.get(key) if key in stored else lost)

    # -- recording ----------------------------------------------------------------------------------------------------

    def _record(self, batch: list[Attempt]) -> None:
        """Write the transcripts' ends, then the runs. Returns when they are committed or spooled."""
        try:
            self._flush_ends(batch)
            recorded = self._orchestrator.record([self._ended(attempt) for attempt in batch], patience=self.patience)
        except DatabaseUnavailable as error:
            log.warning("%d outcomes could not be recorded before the end: %s", len(batch), error)
            for attempt in batch:
                self._keep(attempt)
            return
        except Exception:
            log.exception("a batch of %d outcomes could not be recorded", len(batch))
            self._record_apart(batch)
            return
        self._settled(batch, recorded)

    def _record_apart(self, batch: list[Attempt]) -> None:
        """One by one: a mistake over one outcome must not hold its neighbours back."""
        for attempt in batch:
            try:
                recorded = self._orchestrator.record([self._ended(attempt)], patience=self.patience)
            except DatabaseUnavailable:
                self._keep(attempt)
            except Exception as error:
                log.exception("the outcome of task %s cannot be recorded", attempt.claim.task_id)
                self._record_fault(attempt, error)
            else:
                self._settled([attempt], recorded)

    def _record_fault(self, attempt: Attempt, error: Exception) -> None:
        """Spool an outcome that cannot be recorded, and record in its place that it could not."""
        self._spool_one(attempt)
        attempt.outcome = Outcome(
            OutcomeClass.TRANSIENT,
            cause="unrecordable",
            message=f"its outcome could not be recorded: {type(error).__name__}",
            elapsed=attempt.outcome.elapsed if attempt.outcome is not None else 0.0,
        )
        try:
            recorded = self._orchestrator.record([self._ended(attempt)], patience=self.patience)
        except Exception:
            log.exception("task %s stays as it is until it is reconciled", attempt.claim.task_id)
            self._leave(attempt)
        else:
            self._settled([attempt], recorded)

    def _ended(self, attempt: Attempt) -> Ended:
        assert attempt.outcome is not None
        return Ended(attempt.claim, attempt.outcome, self._desk.name, self._desk.who.host)

    def _settled(self, batch: list[Attempt], recorded: list[Recorded]) -> None:
        desk = self._desk
        self._observers.reached("recorder", None)
        self._metrics.ended([(attempt.claim.agent, attempt.outcome) for attempt in batch if attempt.outcome])
        retry: float | None = None
        for attempt, done in zip(batch, recorded, strict=True):
            desk.held.pop(attempt.key, None)
            if done.late:
                log.warning(
                    "task %s attempt %s was taken back from this worker; its result is kept beside the lost run",
                    done.task_id,
                    done.attempt,
                )
            elif done.status is TaskStatus.PENDING:
                retry = done.delay if retry is None else min(retry, done.delay)
        desk.recorded += len(batch)
        if self._observers:
            for attempt, done in zip(batch, recorded, strict=True):
                if attempt.outcome is not None:
                    self._observers.tell("recorded", attempt.claim, attempt.outcome, done)
        if retry is not None and retry > 0:
            due = time.monotonic() + retry
            self._due_at = due if self._due_at is None else min(self._due_at, due)
        if retry == 0.0 or not desk.held:
            self._work()
        elif desk.free >= desk.wanted:
            desk.claim_now.set()

    def _keep(self, attempt: Attempt) -> None:
        """Spool an outcome for the next worker here, once, though ``close`` grew tired of waiting for a slow disk."""
        with self._keeping:
            if attempt.key not in self._kept:
                self._kept.add(attempt.key)
                self._spool_one(attempt)
                self._leave(attempt)

    def _spool_one(self, attempt: Attempt) -> None:
        self._desk.board.give_back(attempt, self._in_flight.pop(attempt.key, []))
        pieces = self._desk.board.take_pieces(attempt, tail=True)
        self._desk.board.forget([attempt])
        try:
            path = self._spool.keep(self._ended(attempt), pieces)
        except OSError as error:
            log.error(  # noqa: TRY400 - the fault is the disk's, a traceback says nothing about it
                "the outcome of task %s attempt %s is lost: no database, and no spool: %s", *attempt.key, error
            )
        else:
            log.warning("the outcome of task %s attempt %s is kept in %s", *attempt.key, path)

    def _leave(self, attempt: Attempt) -> None:
        """The attempt leaves the desk unrecorded, so that the process can end; its worker's row says no farewell."""
        self.spooled += 1
        self._desk.held.pop(attempt.key, None)
        self._desk.recorded += 1

    # -- transcripts and live columns ---------------------------------------------------------------------------------

    def _flush_ends(self, batch: list[Attempt]) -> None:
        """The last pieces and live columns of attempts that are about to be recorded; waits out database faults."""
        board = self._desk.board
        if texts := board.texts(batch):
            self._flush_texts(texts, tail=True, patience=self.patience)
        if lives := board.lives(batch):
            rows = [board.take_live(attempt) for attempt in lives]
            transient(lambda: self._orchestrator.events.set_live(rows), give_up_after=None, stop=self.patience)

    def _flush_texts(self, attempts: list[Attempt], *, tail: bool, patience: threading.Event | None = None) -> None:
        board = self._desk.board
        taken: list[tuple[Attempt, list[Piece]]] = []
        size = 0
        for attempt in attempts:
            pieces = board.take_pieces(attempt, tail=tail)
            taken.append((attempt, pieces))
            size += sum(len(piece.text) for piece in pieces)
            if size >= BATCH_BYTES // 2:
                self._add_events(taken, patience)
                taken, size = [], 0
        self._add_events(taken, patience)

    def _add_events(self, taken: list[tuple[Attempt, list[Piece]]], patience: threading.Event | None) -> None:
        events: list[NewEvent] = []
        for attempt, pieces in taken:
            events += as_events(attempt, pieces)
        if not events:
            return
        self._in_flight = {attempt.key: pieces for attempt, pieces in taken}
        try:
            transient(
                lambda: self._orchestrator.events.add(events),
                give_up_after=0 if patience is None else None,
                stop=patience,
            )
        except BaseException:
            for attempt, _ in taken:
                self._desk.board.give_back(attempt, self._in_flight.pop(attempt.key, []))
            raise
        self._in_flight = {}
        self._served = True

    def _flush_live(self, attempts: list[Attempt]) -> None:
        board = self._desk.board
        if not attempts:
            return
        rows = [board.take_live(attempt) for attempt in attempts]
        done: set[Key] = set()
        try:
            for start in range(0, len(rows), BATCH_ROWS):
                part = rows[start : start + BATCH_ROWS]
                done |= self._once(lambda part=part: self._orchestrator.events.set_live(part))  # type: ignore[misc]
        finally:
            with board.lock:
                for attempt in attempts:
                    if attempt.key not in done and not attempt.ended:
                        board.live_changed(attempt)

    # -- by the clock -------------------------------------------------------------------------------------------------

    def _chores(self) -> None:
        """What is due now. Raises DatabaseUnavailable at the first fault; the rest comes the next time."""
        now, desk = self._now, self._desk
        if self._gates.news or now >= self._next_gates:
            self._next_gates = now + GATES_EVERY
            if once(lambda: self._gates.exchange(desk.worker)):
                self._work()
        if desk.held and (self.cancel_now or now >= self._next_cancel):
            self.cancel_now = False
            self._next_cancel = now + CANCEL_EVERY
            self._look_for_cancels()
        urgent = now >= self._next_events
        if urgent:
            self._next_events = now + EVENTS_EVERY
            tail = now >= self._next_live
            if texts := desk.board.texts():
                self._flush_texts(texts, tail=tail)
        if now >= self._next_live:
            self._next_live = now + LIVE_EVERY
            self._flush_live(desk.board.lives())
        elif urgent:
            self._flush_live(desk.board.urgent())
        if now >= self._next_minutes:
            self._next_minutes = now + MINUTES_EVERY
            self._flush_minutes()
        if self.reconcile:
            self.reconcile = False
            self._reconcile()
        if self.sweep_now or now >= self._next_sweep:
            self.sweep_now = False
            self._next_sweep = now + self._sweep_every
            self._sweep()
        elif self._due_at is not None and now >= self._due_at and self._sweeper is not None:
            self._due(self._sweeper.promote())
            self._served = True
            self._work()

    def _once(self, operation: Callable[[], T]) -> T:
        value = once(operation)
        self._served = True
        return value

    def _sweep(self) -> None:
        if self._sweeper is None:
            return
        due_before = self._due_at
        swept = self._sweeper.sweep()
        self._served = True
        self._due(swept.next_due)
        if (
            swept.taken_back
            or swept.offered
            or swept.expired
            or (due_before is not None and due_before <= time.monotonic())
        ):
            self._work()

    def _due(self, seconds: float | None) -> None:
        self._due_at = None if seconds is None else time.monotonic() + seconds

    def _look_for_cancels(self) -> None:
        worker = self._desk.worker
        if worker is None:
            return
        asked = self._once(lambda: self._orchestrator.cancel_requests(worker))
        if asked:
            self._cancel(asked)

    def _flush_minutes(self) -> None:
        worker = self._desk.worker
        counts = self._metrics.take()
        if not counts:
            return
        try:
            if worker is None:
                raise DatabaseUnavailable("this worker is not registered")
            self._once(lambda: self._orchestrator.minutes.add(worker, counts))
        except BaseException:
            self._metrics.give_back(counts)
            raise

    def _reconcile(self) -> None:
        """Compare what the database says this worker runs with what it holds; both commits and answers get lost.

        A row unknown here twice in a row is handed back. A running attempt that the database does not know as ours is
        stopped: its outcome could only be late.
        """
        desk, worker = self._desk, self._desk.worker
        if worker is None:
            return
        before = {attempt.key for attempt in desk.attempts() if attempt.claim.claimed_by == worker}
        owned = self._once(lambda: self._orchestrator.owned(worker))
        claims = desk.claims_begun
        foreign = [key for key in before - owned if key in desk.held and not desk.held[key].ended]
        if foreign:
            self._lost(foreign)
        ended = desk.claims_ended
        unknown = owned - set(desk.held)
        # A claim that was under way at the last look may have been the one that took them; it must have ended since.
        twice = sorted(unknown & self._unknown) if ended >= self._claims_then else []
        self._unknown, self._claims_then = unknown, claims
        if twice:
            log.warning("tasks %s are this worker's, but it never heard of its claim: handed back", twice)
            self._once(lambda: self._orchestrator.hand_back(worker, twice, "the answer to its claim was lost"))
            self._work()

    def _last_words(self) -> None:
        try:
            if not self.patience.is_set():
                if texts := self._desk.board.texts():
                    self._flush_texts(texts, tail=True)
                self._flush_minutes()
                if self._gates.news:
                    once(lambda: self._gates.exchange(self._desk.worker))
        except DatabaseUnavailable as error:
            log.debug("the last counts were not written: %s", error)
        except Exception:
            log.exception("the last counts were not written")


def _resolve(kept: Keeping, value: Any) -> None:
    if not kept.future.set_running_or_notify_cancel():
        return
    if isinstance(value, Exception):
        kept.future.set_exception(value)
    else:
        kept.future.set_result(value)


def _weight(value: Any) -> int:
    """About how many bytes *value* is as JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, bool | int | float):
        return 16
    try:
        return len(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return 1024


def interrupted(attempt: Attempt, why: str, elapsed: float) -> Outcome:
    """The outcome of an attempt whose agent would not end although it was asked to."""
    reason = attempt.stop.reason or OutcomeClass.INTERRUPTED
    return replace(Outcome(reason, cause="did_not_stop", message=why), elapsed=elapsed, notes=(why,))


__all__ = ["Recorder", "interrupted"]
