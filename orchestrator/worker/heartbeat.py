"""Renewals of the lease from a thread and a connection of their own, and what follows when they do not come through.

Two threads, since a renewal may hang in a dead network: ``_renew`` talks to the database, ``_guard`` only looks at
clocks. Before the last confirmed lease ends, less what agents need to die, the guard has all agents stopped: whoever takes
their tasks then starts them alone. If the event loop has not moved for half a lease, nothing can be stopped through it:
the guard ends all trees and the process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from uuid import UUID

from orchestrator.errors import DatabaseUnavailable
from orchestrator.liveness import boot_clock
from orchestrator.worker.observer import Complaints

log = logging.getLogger(__name__)

RECONCILE_EVERY = 3
"""Renewals from one reconciliation to the next."""
SECOND_CHANCE = 2.0
"""Seconds for a renewal after the machine slept through the end of the lease, before agents are stopped for it."""


class Heartbeat:
    """Keeps one worker's lease.

    ``renew(worker)`` returns (alive, draining) or raises. ``expired`` is called when the lease is about to end, ``good``
    after each renewal that is still worth something: one whose answer was held up by the network until its lease was
    over is not. ``dead`` is called with the old id when the worker was declared dead: it returns the new id, under which
    renewals go on. All are called on threads of the heartbeat.
    """

    def __init__(
        self,
        *,
        heartbeat: float,
        lease: float,
        margin: float,
        renew: Callable[[UUID], tuple[bool, bool]],
        dead: Callable[[UUID], UUID | None],
        expired: Callable[[], None],
        good: Callable[[], None],
        draining: Callable[[], None],
        reconcile: Callable[[], None],
        stuck: Callable[[], None],
        ticks: Callable[[], int],
    ) -> None:
        self._heartbeat = heartbeat
        self._lease = lease
        self._margin = margin
        self._renew = renew
        self._dead = dead
        self._expired = expired
        self._good = good
        self._draining = draining
        self._reconcile = reconcile
        self._stuck = stuck
        self._ticks = ticks
        self._worker: UUID | None = None
        self._lease_end = 0.0
        self._closing = threading.Event()
        self._now = threading.Event()
        self._renewer = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._guardian = threading.Thread(target=self._guard, name="heartbeat-guard", daemon=True)

    def begin(self, worker: UUID, asked: float) -> None:
        """Start for *worker*, which was registered by a call made at *asked* (``boot_clock``)."""
        self._worker = worker
        self._lease_end = asked + self._lease
        self._renewer.start()
        self._guardian.start()

    def close(self) -> None:
        """Renew no more; returns without waiting for a renewal that hangs."""
        self._closing.set()
        self._now.set()
        if self._renewer.ident is not None:
            self._renewer.join(1)
            self._guardian.join(1)

    def renew_now(self) -> None:
        """Do not wait for the next turn: there is reason to think that this worker was declared dead."""
        self._now.set()

    @property
    def safe(self) -> bool:
        """Whether an agent that starts now could be stopped before the lease ends."""
        return boot_clock() < self._lease_end - self._margin

    @property
    def age(self) -> float:
        """Seconds since the call that renewed the lease last."""
        return max(0.0, boot_clock() - (self._lease_end - self._lease)) if self._worker is not None else 0.0

    # -- renewing -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause, count = self._heartbeat, 0
        complaints = Complaints(log)
        while not self._closing.is_set():
            self._now.wait(pause)
            self._now.clear()
            if self._closing.is_set() or self._worker is None:
                return
            asked = boot_clock()
            try:
                alive, draining = self._renew(self._worker)
                if alive:
                    self._lease_end = asked + self._lease
                    count += 1
                    if self.safe:
                        self._good()
                    if draining:
                        self._draining()
                    if count % RECONCILE_EVERY == 0:
                        self._reconcile()
                else:
                    log.warning("worker %s was declared dead: stopping its agents, going on as a new one", self._worker)
                    new = self._dead(self._worker)
                    if new is None:
                        return
                    self._worker = new
                    count = 0
                    continue
            except DatabaseUnavailable as error:
                log.debug("no renewal: %s", error)
                pause = min(1.0, self._heartbeat)
            except Exception as error:  # noqa: BLE001 - the renewals go on, whatever it was
                complaints.say("the renewal failed", error)
                pause = min(1.0, self._heartbeat)
            else:
                pause = max(0.0, self._heartbeat - (boot_clock() - asked))

    def confirmed(self, asked: float) -> None:
        """A new registration, made by a call at *asked*, is as good as a renewal."""
        self._lease_end = asked + self._lease

    # -- looking at clocks --------------------------------------------------------------------------------------------

    def _guard(self) -> None:
        step = min(0.25, self._lease / 20)
        seen, still = self._ticks(), 0.0
        last = boot_clock()
        told_for, chance_for, chance = 0.0, 0.0, 0.0
        while not self._closing.wait(step):
            now = boot_clock()
            gap, last = now - last, now
            limit = self._lease_end - self._margin
            if gap > step + 1 and now >= limit and chance_for != self._lease_end:
                # Asleep or stopped meanwhile, as the agents most likely were: ask once before they are stopped for it.
                chance_for = self._lease_end
                chance = now + min(SECOND_CHANCE, self._lease / 4)
                self._now.set()
            if now >= max(limit, chance) and told_for != self._lease_end:
                told_for = self._lease_end
                self._expired()
            ticks = self._ticks()
            # What this thread itself slept through (a suspended machine) says nothing about the loop.
            still = 0.0 if ticks != seen else still + min(gap, 2 * step)
            seen = ticks
            if still > self._lease / 2:
                self._stuck()
                return


__all__ = ["Heartbeat"]
