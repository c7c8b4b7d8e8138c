"""What a ``run`` or a ``worker`` tells of its work: events of the worker made into lines, and the view of one plan.

``Teller`` turns what a worker observes into ``RunEvent``s. ``Following`` is one that also keeps the ``RunView`` of a plan:
what runs here is known without the database, everything else is read anew after each move and every ten seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from orchestrator.dashboard import short
from orchestrator.dashboard.frame import plural
from orchestrator.dashboard.run_view import kind
from orchestrator.domain.outcome import Claim, Outcome, Usage
from orchestrator.domain.settle import settle
from orchestrator.domain.snapshot import PlanTask, Question, RunEvent, RunView, Spend
from orchestrator.domain.words import OutcomeClass, TaskStatus
from orchestrator.repositories.runs import Recorded
from orchestrator.service import Orchestrator
from orchestrator.worker import Observer, Watched

REREAD = 10.0
"""Seconds after which the plan is read again though nothing happened here: others may work on it too."""
LOOK_AGAIN = 0.2
"""Seconds after which the view asks again what the agents here have said."""
SOONEST = 0.2
"""Seconds between two reads at least; a read that takes long is done less often."""

_SIGNALS = frozenset({"SIGINT", "SIGTERM", "SIGHUP"})


class Teller(Observer):
    """Turns what happens in a worker into events; ``tell`` is given each of them, from any thread."""

    def __init__(self, tell: Callable[[RunEvent], None], now: datetime, grace: float) -> None:
        self._tell = tell
        self._offset = now - datetime.now(UTC)
        self._grace = grace
        self._away_since: datetime | None = None
        self._unwritten: set[tuple[int, int]] = set()
        self._waiting = 0
        self.stopped_by: str | None = None

    def now(self) -> datetime:
        """The database's time, as far as this process knows."""
        return datetime.now(UTC) + self._offset

    def started(self, claim: Claim) -> None:
        """Tell that an agent begins."""
        self._tell(
            RunEvent(self.now(), "start", claim.task_id, self.name_of(claim), claim.agent, claim.attempt, _most(claim))
        )

    def ended(self, claim: Claim, outcome: Outcome) -> None:
        """Count a result that is not written yet."""
        self._unwritten.add((claim.task_id, claim.attempt))

    def recorded(self, claim: Claim, outcome: Outcome, recorded: Recorded) -> None:
        """Tell what came of an attempt."""
        self._unwritten.discard((claim.task_id, claim.attempt))
        self._tell(self._event(claim, outcome, recorded))

    def away(self, why: str) -> None:
        """Tell that the database is away."""
        self._away_since = self.now()
        self._waiting = len(self._unwritten)
        reason = " ".join(why.split())
        self._tell(RunEvent(self.now(), "away", detail=f"database away: {reason}; agents go on, results wait"))

    def back(self) -> None:
        """Tell that it is back."""
        now = self.now()
        took = short.age(short.since(self._away_since, now) or 0)
        self._away_since = None
        self._tell(RunEvent(now, "back", detail=f"database back after {took}"))

    def stopping(self, why: str) -> None:
        """Tell that the worker claims no more, unless that is because there is no more."""
        self.stopped_by = why
        if why == "idle":
            return
        detail = f"stopping ({why})"
        if why in _SIGNALS:
            detail = f"stopping ({why}): agents have {short.age(self._grace)} to finish"
            detail += "; Ctrl-C again ends them now" if why == "SIGINT" else ""
        self._tell(RunEvent(self.now(), "stopping", detail=detail))

    def name_of(self, claim: Claim) -> str:
        """What the task of *claim* is called."""
        return claim.name or claim.title or claim.agent

    def _event(self, claim: Claim, outcome: Outcome, recorded: Recorded) -> RunEvent:
        now = self.now()
        status, attempts, next_at = recorded.status, _most(claim), None
        detail = outcome.message or outcome.cause
        if recorded.late or status is None:
            what = "lost"
            detail = "the task was not this worker's any more; the result is kept as late"
        elif status is TaskStatus.PENDING:
            what = "interrupted" if outcome.status is OutcomeClass.INTERRUPTED else "retry"
            next_at = recorded.at or now + timedelta(seconds=recorded.delay)
            attempts = short.of(claim.attempt + 1, claim.max_retries, settle(claim, outcome).retry_count)
        else:
            what = status.value
            if status is TaskStatus.DONE:
                detail = _said(outcome)
        return RunEvent(
            now,
            what,
            claim.task_id,
            self.name_of(claim),
            claim.agent,
            claim.attempt,
            attempts,
            outcome.elapsed,
            spend_of(outcome.usage),
            None if outcome.status is OutcomeClass.DONE else outcome.status.value,
            outcome.cause,
            detail,
            next_at,
            question_of(claim, outcome, now) if status is TaskStatus.WAITING else None,
        )


def question_of(claim: Claim, outcome: Outcome, now: datetime) -> Question | None:
    """What an attempt that has just ended asks, for screens; the database has the rest of it."""
    if not outcome.asks:
        return None
    ask = outcome.asks[0]
    deadline = ask.deadline if ask.seconds is None else now + timedelta(seconds=ask.seconds)
    return Question(
        claim.task_id,
        ask.question,
        claim.name,
        claim.title,
        claim.agent,
        ask.kind.value,
        ask.choices,
        now,
        deadline,
        ask.default,
    )


def spend_of(usage: Usage | None) -> Spend:
    """What an attempt used, for screens."""
    if usage is None:
        return Spend()
    tokens = usage.total_tokens
    if tokens is None and (usage.input_tokens is not None or usage.output_tokens is not None):
        tokens = (usage.input_tokens or 0) + (usage.output_tokens or 0)
    partial = usage.complete is False
    return Spend(
        tokens=tokens,
        usd=usage.cost_usd,
        turns=usage.turns,
        tokens_partial=partial and tokens is not None,
        usd_partial=partial and usage.cost_usd is not None,
    )


def _most(claim: Claim) -> int | None:
    return short.of(claim.attempt, claim.max_retries, claim.retry_count)


def _said(outcome: Outcome) -> str | None:
    """The last line of a result that is a text."""
    if not isinstance(outcome.result, str):
        return None
    lines = outcome.result.strip().splitlines()
    return lines[-1][:500] if lines else None


class Following(Teller):
    """A ``Teller`` that knows the whole plan, and hands its ``RunView`` to whoever draws."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        plan: str,
        plan_id: int,
        ids: Iterable[int],
        *,
        slots: int,
        grace: float,
        file: str | None,
        show: Callable[[RunEvent], None],
        changed: Callable[[], None],
        failing: Callable[[], None] | None = None,
        leaving: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(self._take, orchestrator.reading.now(), grace)
        self._orchestrator = orchestrator
        self._plan_id = plan_id
        self._ids = set(ids)
        self._show = show
        self._changed = changed
        self._failing = failing
        self._leaving = leaving
        self._lock = threading.RLock()
        self._tasks: list[PlanTask] = []
        self._place: dict[int, int] = {}
        self._here: set[int] = set()
        self._watched: Callable[[], Sequence[Watched]] = list
        self._heard: list[tuple[PlanTask, PlanTask]] = []
        self._moves = 0
        self._moved: dict[int, int] = {}
        self._elsewhere: set[tuple[int, int]] = set()
        self._told: set[tuple[int, int]] = set()
        self._looked_at = 0.0
        self._view = RunView(plan, self.now(), slots=slots, file=file)
        self._asked = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._reread_on, name="plan", daemon=True)
        self.read(tell=False)

    # -- for the command ----------------------------------------------------------------------------------------------

    def begin(self, watched: Callable[[], Sequence[Watched]]) -> None:
        """Follow the plan from now on; *watched* are the attempts that run here."""
        self._watched = watched
        self._thread.start()

    def close(self) -> None:
        """Follow no more; the view stays as it is, with the time of its end."""
        self._ended.set()
        self._asked.set()
        if self._thread.is_alive():
            self._thread.join(5.0)
        with self._lock:
            self._here.clear()
            self._view = replace(self._view, ended_at=self.now(), stop_deadline=None)

    def view(self) -> RunView:
        """The plan as it is now, with what is known of the attempts that run here."""
        now = time.monotonic()
        if now - self._looked_at > LOOK_AGAIN:
            # Lines ask for the view at every event; what agents say need not be gathered as often.
            self._looked_at = now
            heard = [] if self._ended.is_set() else [(self._known(w.claim.task_id), w) for w in self._watched()]
            self._heard = [(task, _with(task, watched)) for task, watched in heard if task is not None]
        with self._lock:
            tasks = self._tasks.copy()
            for known, told in self._heard:
                place = self._place.get(known.id)
                if place is not None and tasks[place] is known:
                    tasks[place] = told
            return replace(
                self._view,
                tasks=tuple(tasks),
                away_since=self._away_since,
                unwritten=len(self._unwritten) if self._away_since is not None else 0,
            )

    def reread(self) -> None:
        """Read the plan soon: somebody has just changed it."""
        self._asked.set()

    def read(self, *, tell: bool = True) -> None:
        """Read the plan from the database. Raises DatabaseUnavailable; driver errors come as they are."""
        with self._lock:
            moved_before = self._moves
        found = self._orchestrator.snapshots.plan_tasks(self._plan_id)
        events: list[RunEvent] = []
        with self._lock:
            fresh: list[PlanTask] = []
            elsewhere: set[tuple[int, int]] = set()
            for task in found:
                if task.id not in self._ids:
                    continue
                old = self._known(task.id)
                if old is not None and (task.id in self._here or self._moved.get(task.id, 0) > moved_before):
                    # What happens here is known better than this picture, which may be older.
                    fresh.append(replace(old, spend=task.spend, cancel_requested_at=task.cancel_requested_at))
                    continue
                if task.status == TaskStatus.RUNNING:
                    elsewhere.add((task.id, task.attempt))
                if tell and old is not None:
                    events += self._news(old, task)
                fresh.append(replace(task, here=task.status != TaskStatus.RUNNING))
            self._elsewhere = elsewhere
            self._tasks = fresh
            self._place = {task.id: place for place, task in enumerate(fresh)}
        for event in events:
            self._show(event)
        self._changed()

    # -- what happens here --------------------------------------------------------------------------------------------

    def started(self, claim: Claim) -> None:
        """Show the task as running here."""
        with self._lock:
            self._here.add(claim.task_id)
            self._move(claim.task_id)
            task = self._known(claim.task_id)
            if task is not None:
                self._tasks[self._place[task.id]] = replace(
                    task,
                    status=TaskStatus.RUNNING.value,
                    attempt=claim.attempt,
                    max_retries=claim.max_retries,
                    retry_count=claim.retry_count,
                    started_at=claim.started_at,
                    finished_at=None,
                    next_attempt_at=None,
                    budget=claim.budget,
                    error=None,
                    percent=None,
                    last_output=None,
                    here=True,
                )
        super().started(claim)

    def ended(self, claim: Claim, outcome: Outcome) -> None:
        """Tell at once, before the slot is filled again, that a task is going to fail."""
        super().ended(claim, outcome)
        if self._failing is not None and settle(claim, outcome).status is TaskStatus.FAILED:
            self._failing()

    def recorded(self, claim: Claim, outcome: Outcome, recorded: Recorded) -> None:
        """Show what became of the task, and look what that means for others."""
        event = self._event(claim, outcome, recorded)
        with self._lock:
            self._here.discard(claim.task_id)
            self._move(claim.task_id)
            self._unwritten.discard((claim.task_id, claim.attempt))
            task = self._known(claim.task_id)
            if task is not None and recorded.status is not None and not recorded.late:
                status = recorded.status
                self._tasks[self._place[task.id]] = replace(
                    task,
                    status=status.value,
                    elapsed=(task.elapsed or 0.0) + outcome.elapsed,
                    next_attempt_at=event.next_at if status is TaskStatus.PENDING else None,
                    question=event.question,
                    here=True,
                )
        self._take(event)
        self._asked.set()

    def stopping(self, why: str) -> None:
        """Show until when agents may go on."""
        if why in _SIGNALS:
            with self._lock:
                self._view = replace(self._view, stop_deadline=self.now() + timedelta(seconds=self._grace))
        super().stopping(why)

    def leaving(self) -> None:
        """Give the terminal back while there is time."""
        if self._leaving is not None:
            self._leaving()

    def name_of(self, claim: Claim) -> str:
        """What the plan calls the task of *claim*."""
        task = self._known(claim.task_id)
        return task.name if task is not None else super().name_of(claim)

    def _move(self, task_id: int) -> None:
        """Note that the task moved here: pictures that were begun before are too old for it."""
        self._moves += 1
        self._moved[task_id] = self._moves

    def _known(self, task_id: int) -> PlanTask | None:
        with self._lock:
            place = self._place.get(task_id)
            return None if place is None else self._tasks[place]

    def _take(self, event: RunEvent) -> None:
        self._show(event)
        self._changed()

    # -- what happens elsewhere ---------------------------------------------------------------------------------------

    def _news(self, old: PlanTask, new: PlanTask) -> list[RunEvent]:
        """What became of a task without us: cancelled, not run, or worked on by another process."""
        now = self.now()
        begun = new.status == TaskStatus.RUNNING and (new.id, new.attempt) not in self._told
        if (old.status, old.attempt) == (new.status, new.attempt) and not begun:
            return []
        what = kind(new, now)
        error = new.error
        if new.status == TaskStatus.RUNNING:
            if (new.id, new.attempt) not in self._elsewhere:
                return []  # our own claim, as it looks before the agent here has begun; else the next read tells
            self._told.add((new.id, new.attempt))
            return [RunEvent(now, "start", new.id, new.name, new.agent, new.attempt, detail="elsewhere")]
        if new.status == TaskStatus.WAITING:
            return [asking(new, now)]
        if new.status in (TaskStatus.CANCELLED, TaskStatus.FAILED, TaskStatus.DONE):
            shown = "failed" if what == "failed" else what
            return [
                RunEvent(
                    now,
                    shown,
                    new.id,
                    new.name,
                    new.agent,
                    new.attempt,
                    elapsed=new.elapsed,
                    spend=new.spend,
                    error_class=error.error_class if error else None,
                    cause=error.cause if error else None,
                    detail=(error.message or error.cause) if error else None,
                )
            ]
        return []

    def _reread_on(self) -> None:
        """Read again after each move and every ten seconds; at most a tenth of the time is spent on it."""
        pause = SOONEST
        while not self._ended.is_set():
            self._asked.wait(REREAD)
            if self._ended.wait(pause):
                return
            self._asked.clear()
            began = time.monotonic()
            try:
                self.read()
            except Exception:  # noqa: BLE001 - the worker tells that the database is away; the view shows what it has
                self._ended.wait(1.0)
            pause = max(SOONEST, 10 * (time.monotonic() - began))


def _with(task: PlanTask, watched: Watched) -> PlanTask:
    """*task* with what its attempt here has said so far."""
    spend = task.spend
    if watched.usage is not None:
        own = spend_of(watched.usage)
        spend = replace(own, tokens_partial=own.tokens is not None, usd_partial=False)
    changes: dict[str, Any] = {"percent": watched.percent, "spend": spend}
    changes["last_output"] = watched.message or watched.last_output or task.last_output
    if watched.stopping is not None:
        changes["stopping"] = watched.stopping.value
    return replace(task, **changes)


def asking(task: PlanTask, now: datetime) -> RunEvent:
    """The line that says that *task* waits for a person."""
    return RunEvent(now, "waiting", task.id, task.name, task.agent, task.attempt, question=task.question)


def plan_line(view: RunView, new: int, database: str) -> str:
    """The first line of a run: how many tasks, slots, and where."""
    return f"{plural(len(view.tasks), 'task')} ({new:,} new), {plural(view.slots, 'slot')}, database {database}"
