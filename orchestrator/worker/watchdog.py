"""The watchdog: finds dead workers and takes their tasks back. Runs in every worker, and as ``orchestrator watchdog``.

Safe anywhere at any time: who is dead is decided by the database, and only with a witness (``WorkerRepository``), or by
looking at the very process on its own host. One sweep is a few bounded statements.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar
from uuid import UUID

from orchestrator import metrics
from orchestrator.agents.custody import agents_of, end_agents
from orchestrator.database.transient import transient
from orchestrator.domain.identity import Identity
from orchestrator.errors import DatabaseUnavailable, OrchestratorError
from orchestrator.liveness import boot_clock, gone, identity
from orchestrator.repositories.events import NewEvent, Piece
from orchestrator.repositories.health import QueueNumbers
from orchestrator.repositories.retention import Pruned
from orchestrator.repositories.runs import Ended
from orchestrator.repositories.workers import Neighbour
from orchestrator.service import Orchestrator
from orchestrator.worker.alerting import Alerter, Tell
from orchestrator.worker.exposition import Health, Port, exposed
from orchestrator.worker.spool import Spool

log = logging.getLogger(__name__)
T = TypeVar("T")

BATCH = 100
"""Tasks that one transaction takes back."""
HANGING = 120.0
"""Seconds that one look may take: longer than a dead line, or a statement, keeps it."""
SPARE = 0.1
"""Seconds of a worker's sweep for removing what is no longer kept."""
FRESH = 5.0
"""Seconds for which the numbers of the queue are told again without being read."""


@dataclass(slots=True)
class Swept:
    """What one sweep did. ``taken_back`` holds (task id, attempt, new status); ``next_due`` is in seconds from now.

    ``offered`` counts the outcomes that an ended process had left on this host's disk and that are recorded now,
    ``expired`` the questions whose deadline had passed.
    """

    buried: list[UUID] = field(default_factory=list)
    taken_back: list[tuple[int, int, str]] = field(default_factory=list)
    next_due: float | None = None
    offered: int = 0
    expired: int = 0

    def add(self, later: Swept) -> None:
        """Add what a later sweep did."""
        self.buried += later.buried
        self.taken_back += later.taken_back
        self.next_due = later.next_due
        self.offered += later.offered
        self.expired += later.expired


class Sweeper:
    """One sweep after the other, for a worker or a standalone watchdog. Used from one thread.

    ``again`` is called, from another thread, when the agents of a dead neighbour are gone and a sweep can go on.
    ``spare`` is for how many seconds of a sweep old rows may be removed: nobody's work is to wait for that.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        who: Identity,
        again: Callable[[], None] = lambda: None,
        *,
        spare: float = SPARE,
    ) -> None:
        self._orchestrator = orchestrator
        self._keeper = _Keeper(orchestrator, spare)
        self._who = who
        self._again = again
        self._spool = Spool(str(orchestrator.url))
        self._ending: dict[UUID, threading.Thread] = {}
        self._lingering: set[UUID] = set()
        """Neighbours that are gone, but not their agents."""
        self._clear: set[UUID] = set()
        """Dead workers of this host of which nothing runs any more."""

    def sweep(self) -> Swept:
        """Make due what is due, bury the dead, take their tasks back. Raises DatabaseUnavailable at the first fault.

        Whatever it had done by then is committed; the next sweep goes on from there.
        """
        swept = Swept()
        # First what this host has kept: when its worker has been declared dead, it is only a late result.
        swept.offered = self._spool.offer(self._offer)
        swept.next_due = self.promote()
        swept.expired = once(self._orchestrator.expire_questions)
        swept.buried += self._gone_neighbours()
        # Not those whose agents are just being ended, although their leases may be over by now: nobody else on this host
        # may start what still runs here.
        swept.buried += once(lambda: self._orchestrator.judge(spare=self._lingering))
        self._end_fallen()
        for worker in swept.buried:
            log.warning("worker %s is dead; its tasks are taken back", worker)
        while taken := once(lambda: self._orchestrator.take_back(BATCH)):
            swept.taken_back += taken
            for task_id, attempt, status in taken:
                log.warning("task %s attempt %s was lost with its worker; the task is %s", task_id, attempt, status)
        self._keeper.go_on()
        return swept

    def promote(self) -> float | None:
        """Make due what is due; return the seconds until the next task becomes due."""
        while (upcoming := once(self._orchestrator.promote)) is not None and upcoming <= 0:
            pass
        return upcoming

    def _offer(self, ended: Ended, pieces: list[Piece]) -> None:
        claim = ended.claim
        events = [NewEvent(claim.task_id, claim.attempt, claim.claimed_by, *piece) for piece in pieces]
        once(lambda: self._orchestrator.events.add(events))
        # One try: what the database does not take now stays in its file.
        impatient = threading.Event()
        impatient.set()
        (recorded,) = self._orchestrator.record([ended], patience=impatient)
        if recorded.late:
            log.warning("a kept outcome of task %s attempt %s came too late", claim.task_id, claim.attempt)
        else:
            log.info("a kept outcome of task %s attempt %s was recorded", claim.task_id, claim.attempt)

    def finish(self) -> None:
        """Wait for the ends of agents that were begun."""
        for thread in list(self._ending.values()):
            thread.join()

    def _gone_neighbours(self) -> list[UUID]:
        """Declare dead the workers of this host whose processes are gone, as soon as their agents are gone, too."""
        buried: list[UUID] = []
        self._lingering = set()
        for neighbour in once(lambda: self._orchestrator.neighbours(self._who)):
            why = gone(neighbour.pid, neighbour.process_started)
            if why is None:
                continue
            if not self._without_agents(neighbour):
                self._lingering.add(neighbour.id)
                continue
            buried += once(lambda: self._orchestrator.mark_gone([neighbour.id], why))  # noqa: B023 - called at once
        return buried

    def _end_fallen(self) -> None:
        """End the agents of workers of this host that were declared dead as silent ones, and whose process is gone since.

        One that is stopped or cut off has its agents still; when it is killed in that state, its guardian with it, nobody
        else looks for them: they are no neighbour's any more.
        """
        fallen = once(lambda: self._orchestrator.fallen(self._who))
        self._clear.intersection_update(each.id for each in fallen)
        for each in fallen:
            if each.id in self._clear or gone(each.pid, each.process_started) is None:
                continue
            if self._without_agents(each):
                self._clear.add(each.id)

    def _without_agents(self, neighbour: Neighbour) -> bool:
        """Whether no agent of the dead *neighbour* runs; if some do, a thread ends them and ``again`` is called."""
        thread = self._ending.get(neighbour.id)
        if thread is not None and thread.is_alive():
            return False
        if not agents_of(neighbour.id):
            self._ending.pop(neighbour.id, None)
            return True

        def end() -> None:
            try:
                ended = end_agents(neighbour.id)
            except Exception:
                log.exception("the agents of dead worker %s could not be ended", neighbour.name)
                return
            if ended.survivors:
                pids = ", ".join(str(process.pid) for process in ended.survivors)
                log.error("processes %s of dead worker %s do not end; its tasks wait for that", pids, neighbour.name)
            else:
                self._again()

        thread = threading.Thread(target=end, name="end-agents", daemon=True)
        self._ending[neighbour.id] = thread
        thread.start()
        return False


class _Keeper:
    """Automatic retention, a little at each sweep: one pass after the other, ``every`` seconds apart.

    The first one begins within a minute, at random: workers that start together are not to remove together.
    """

    def __init__(self, orchestrator: Orchestrator, spare: float) -> None:
        self._orchestrator = orchestrator
        self._spare = spare
        self._pass: Iterator[Pruned] | None = None
        self._next = boot_clock() + random.random() * min(60.0, orchestrator.kept.every)

    def go_on(self) -> None:
        """Remove for the spare time what is no longer kept. Raises DatabaseUnavailable; the pass then begins anew."""
        until = boot_clock() + self._spare
        if self._pass is None:
            if boot_clock() < self._next:
                return
            self._pass = self._orchestrator.retention.keep(self._orchestrator.kept)
            self._next = boot_clock() + self._orchestrator.kept.every
        steps = self._pass
        while boot_clock() < until:
            try:
                more = once(lambda: next(steps, None))
            except Exception:
                self._pass = None
                raise
            if more is None:
                self._pass = None
                return


class Watchdog:
    """The standalone watchdog. It registers itself as a worker without slots, so that it can be a witness.

    ``metrics_port``: while ``run`` goes on, serve its counters and the whole queue's numbers at
    http://127.0.0.1:PORT/metrics; also ``HOST:PORT``. ``health_port``: answer probes at ``/live`` and ``/ready`` there.
    It looks for alerts and tells the hooks of them; ``on_alert`` hears ``begun`` or ``ended`` of those that it saw itself.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        *,
        name: str = "watchdog",
        lease: float | None = None,
        metrics_port: Port | None = None,
        health_port: Port | None = None,
        on_alert: Tell | None = None,
    ) -> None:
        settings = orchestrator.settings.changed(lease=lease)
        self._orchestrator = orchestrator
        self._name = name
        self._lease = settings.lease
        self._heartbeat = settings.heartbeat
        self._stopping = threading.Event()
        self._swept_again = threading.Event()
        self._metrics_port, self._health_port = metrics_port, health_port
        self._told = _Told(orchestrator)
        self._alerter = Alerter(orchestrator, orchestrator.hooks, tell=on_alert)
        self._turned = math.inf
        self._every = settings.sweep
        self._away: str | None = "it has not looked yet"

    def stop(self) -> None:
        """End ``run`` or the waiting of ``once``; from any thread, and from a signal handler."""
        self._stopping.set()
        self._swept_again.set()

    def once(self) -> Swept:
        """Sweep once; if somebody may be dead, stay until that is known.

        That is: until they renew, or a sweep buries them, for which somebody must have been renewing for their whole
        lease; without another such witness this process becomes it. Returns early, with what was found by then, when
        ``stop`` is called. Raises DatabaseUnavailable.
        """
        who = identity()
        worker = self._register(who)
        renewals = _Renewals(self._orchestrator, worker, self._heartbeat)
        sweeper = Sweeper(self._orchestrator, who, self._swept_again.set)
        try:
            total = sweeper.sweep()
            sweeper.finish()
            while not self._stopping.is_set() and once(self._orchestrator.late):
                self._stopping.wait(min(1.0, self._heartbeat / 2))
                total.add(sweeper.sweep())
            total.add(sweeper.sweep())
            self._alerter.once()
            return total
        finally:
            renewals.end()
            self._orchestrator.stop_worker(worker)

    def run(self, interval: float | None = None, on_sweep: Callable[[Swept], None] | None = None) -> None:
        """Sweep every *interval* seconds (default: the setting ``sweep``) until ``stop``; outages are waited out.

        Raises DatabaseUnavailable only when it cannot register at the start, InvalidInput for a port that is taken.
        """
        who = identity()
        if interval is not None:
            self._every = interval
        with exposed(self._told.text, self.health, metrics=self._metrics_port, probes=self._health_port):
            self._run(who, on_sweep)

    def health(self) -> Health:
        """What a probe hears; from any thread. A database that is away makes no watchdog dead: a new one would not help."""
        still = time.monotonic() - self._turned
        if still > self._every + HANGING:
            return Health(f"its last look began {still:.0f} s ago")
        return Health(wait="it was told to stop" if self._stopping.is_set() else self._away)

    def _run(self, who: Identity, on_sweep: Callable[[Swept], None] | None) -> None:
        every = self._every
        worker = self._register(who)
        renewals = _Renewals(self._orchestrator, worker, self._heartbeat, lambda: self._register(who))
        sweeper = Sweeper(self._orchestrator, who, self._swept_again.set)
        self._alerter.begin()
        try:
            while not self._stopping.is_set():
                pause = every
                self._turned = time.monotonic()
                try:
                    swept = sweeper.sweep()
                    self._told.swept(swept)
                    self._away = None
                    if swept.next_due is not None:
                        pause = min(every, max(0.0, swept.next_due))
                    if on_sweep is not None:
                        on_sweep(swept)
                except DatabaseUnavailable as error:
                    self._told.failed += 1
                    self._away = f"its last look failed: {error.message}"
                    log.debug("no sweep: %s", error)
                except Exception as error:
                    self._told.failed += 1
                    self._away = f"its last look failed: {type(error).__name__}"
                    log.exception("the sweep failed")
                self._swept_again.wait(pause)
                if not self._stopping.is_set():
                    self._swept_again.clear()
        finally:
            self._alerter.close()
            renewals.end()
            self._orchestrator.stop_worker(renewals.worker)

    def _register(self, who: Identity) -> UUID:
        return self._orchestrator.register(
            who, name=self._name, slots=0, agents=[], lease=self._lease, heartbeat=self._heartbeat
        )


class _Told:
    """What a watchdog tells Prometheus: its own counters, and the queue as read at most every FRESH seconds."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._lock = threading.Lock()
        self._read_at = -math.inf
        self._numbers: QueueNumbers | None = None
        self.sweeps = self.failed = self.buried = self.taken_back = 0
        self.last = 0.0

    def swept(self, swept: Swept) -> None:
        """Count a sweep that came through."""
        self.sweeps += 1
        self.buried += len(swept.buried)
        self.taken_back += len(swept.taken_back)
        self.last = time.time()

    def text(self) -> str:
        """All of it in the text format of Prometheus."""
        own = (
            metrics.counter("orchestrator_watchdog_sweeps_total", "Sweeps that came through.", self.sweeps),
            metrics.counter("orchestrator_watchdog_failed_sweeps_total", "Sweeps that did not.", self.failed),
            metrics.counter("orchestrator_watchdog_workers_buried_total", "Workers it declared dead.", self.buried),
            metrics.counter("orchestrator_watchdog_tasks_taken_back_total", "Tasks it took back.", self.taken_back),
            metrics.gauge("orchestrator_watchdog_last_sweep_timestamp_seconds", "When the last one ended.", self.last),
        )
        return metrics.text(chain(metrics.queue_families(self._read()), own))

    def _read(self) -> QueueNumbers | None:
        # One at a time: many who ask must not take all connections away from the sweeps.
        with self._lock:
            if boot_clock() - self._read_at > FRESH:
                try:
                    self._numbers = self._orchestrator.health.numbers()
                except OrchestratorError as error:
                    log.debug("the queue could not be read: %s", error)
                    self._numbers = None
                self._read_at = boot_clock()
            return self._numbers


class _Renewals:
    """Renews the row of a process that holds no tasks; one that was declared dead is registered again."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        worker: UUID,
        heartbeat: float,
        register: Callable[[], UUID] | None = None,
    ) -> None:
        self.worker = worker
        self._orchestrator = orchestrator
        self._heartbeat = heartbeat
        self._register = register
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="renewal", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._end.set()
        self._thread.join(5)

    def _run(self) -> None:
        pause = self._heartbeat
        while not self._end.wait(pause):
            asked = boot_clock()
            try:
                if not self._orchestrator.renew(self.worker).alive and self._register is not None:
                    log.warning("this watchdog was declared dead; it registers again")
                    self.worker = self._register()
            except Exception as error:  # noqa: BLE001 - renewing must go on whatever it was
                log.debug("no renewal: %s", error)
                pause = min(1.0, self._heartbeat)
            else:
                pause = max(0.0, self._heartbeat - (boot_clock() - asked))


def once(operation: Callable[[], T]) -> T:
    """Do one unit of work, one try; a fault of the database that passes is a DatabaseUnavailable."""
    return transient(operation, give_up_after=0)


__all__ = ["Sweeper", "Swept", "Watchdog"]
