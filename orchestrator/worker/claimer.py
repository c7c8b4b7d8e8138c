"""The thread of unit 1: claims for free slots, as many at once as there are, and nothing that cannot start at once.

While there is work, it waits for a quarter of the slots or 2 ms, so that batches do not decay to single tasks. When a
claim comes back empty, it sleeps until a hint, a due instant or the next poll; polls are jittered downwards only.
A hint is answered by a claim; a poll looks first whether there is anything, which is one small statement.
Tasks that a worker was lost with ("suspects") are claimed one at a time: a killer takes no innocents along twice. They, and
tasks with a concurrency key or in a directory of their own, cost a claim of their own: it is made when a look, once in a
poll's time, has seen such tasks.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence

from orchestrator.agents.protocol import Agent
from orchestrator.domain.outcome import Claim
from orchestrator.errors import DatabaseUnavailable
from orchestrator.metrics import Metrics
from orchestrator.repositories.claims import Known
from orchestrator.service import Orchestrator
from orchestrator.worker.desk import Desk
from orchestrator.worker.gates import Gates
from orchestrator.worker.observer import Attempt, Complaints, Observers
from orchestrator.worker.watchdog import once

log = logging.getLogger(__name__)

BATCHING = 0.002
"""Seconds that a busy claimer waits for more free slots."""
SECOND_LOOK = 0.02
"""Seconds until the next look when a claim found less than it asked for: others may have held the rest."""


class Claimer:
    """Claims for the agents of one worker. ``start`` is called with new attempts, on this thread."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        desk: Desk,
        agents: Sequence[Agent],
        gates: Gates,
        metrics: Metrics,
        observers: Observers,
        *,
        poll: float,
        plan_id: int | None,
        may_claim: Callable[[], bool],
        start: Callable[[list[Attempt]], None],
        dead: Callable[[], None],
        idle: Callable[[], None] | None,
    ) -> None:
        self._orchestrator = orchestrator
        self._desk = desk
        self._agents = {(agent.name, agent.definition): agent for agent in agents}
        self._known: list[Known] = [orchestrator.known(agent) for agent in agents]
        self._gates = gates
        self._metrics = metrics
        self._observers = observers
        self._poll = poll
        self._plan_id = plan_id
        self._may_claim = may_claim
        self._start = start
        self._dead = dead
        self._idle = idle
        self._served = False
        """Whether the database has answered in this turn; most turns do not ask it."""
        self._look_at = 0.0
        self._suspects = self._keyed = False
        """Whether the last look saw such tasks."""
        self._found = True
        self._hinted = False
        self._hinted_at: float | None = None
        """When an idle slot heard that there is work, until a claim has answered."""
        self._next_poll = 0.0
        self.paused = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="claimer", daemon=True)
        self.done = threading.Event()

    def begin(self) -> None:
        """Start claiming."""
        self._thread.start()

    def close(self) -> None:
        """Claim no more. ``done`` is set when a claim that is on its way has been started, too."""
        self._closing.set()
        self._desk.claim_now.set()
        if self._thread.ident is None:
            self.done.set()

    def hint(self) -> None:
        """There may be work."""
        if not self._hinted and self._desk.free > 0:
            self._hinted_at = time.monotonic()
        self._hinted = True
        self._desk.claim_now.set()

    def _run(self) -> None:
        wake = self._desk.claim_now
        complaints = Complaints(log)
        try:
            while not self._closing.is_set():
                wake.clear()
                try:
                    pause = self._turn()
                    if self._served:
                        self._observers.reached("claimer", None)
                except DatabaseUnavailable as error:
                    self._observers.reached("claimer", str(error))
                    self._found = True
                    pause = self._jitter()
                except Exception as error:  # noqa: BLE001 - the worker goes on, whatever it was
                    complaints.say("a claim failed", error)
                    pause = self._jitter()
                if pause > 0 and not self._closing.is_set():
                    wake.wait(pause)
        finally:
            self._observers.leave("claimer")
            self.done.set()

    def _turn(self) -> float:
        """Claim once if there is room; return how long to wait."""
        desk = self._desk
        self._served = False
        if self.paused or desk.worker is None or not self._may_claim():
            return min(self._jitter(), 0.25)
        if self._hinted:
            # Cleared before the claim: a hint that comes while it runs asks for another one.
            self._hinted = False
            self._found = True
        polled = not self._found
        free = desk.free
        quarter = max(1, desk.slots // 4)
        if free < quarter and self._found:
            # Woken by the first free slot, then by the last of a quarter.
            if free <= 0:
                desk.wanted = 1
                if desk.free <= 0:
                    return self._jitter()
            desk.wanted = quarter
            if desk.free < quarter:
                desk.claim_now.wait(BATCHING)
                desk.claim_now.clear()
            free = desk.free
        if free <= 0:
            desk.wanted = 1
            return self._jitter()
        if self._found is False and not self._due():
            return max(0.001, self._next_poll - time.monotonic())
        # Who is hinted all the time looks at last after another poll's time.
        if (polled or time.monotonic() >= self._look_at + self._poll) and not self._look():
            return self._nothing()
        took = self._probe() + self._claim_suspect()
        asked = desk.free
        if asked > 0:
            took += self._claim_offered(asked)
        else:
            self._found = True
            return 0.0
        if took >= asked:
            self._found = True
            return 0.0
        # Less than asked: that was all, unless others hold some of it just now.
        self._found = False
        desk.wanted = 1
        if took:
            self._next_poll = time.monotonic() + SECOND_LOOK
            return SECOND_LOOK
        return self._nothing()

    def _nothing(self) -> float:
        """There is nothing to claim now; return how long to wait."""
        desk = self._desk
        self._found = False
        desk.wanted = 1
        if self._idle is not None and not desk.held and self._orchestrator.idle(self._known, self._plan_id):
            self._idle()
        pause = self._gates.soon(self._jitter())
        self._next_poll = time.monotonic() + pause
        return pause

    def _due(self) -> bool:
        """Whether it is time to look again although the last look found nothing."""
        return time.monotonic() >= self._next_poll or (self._idle is not None and not self._desk.held)

    def _look(self) -> bool:
        """Whether there is anything to claim."""
        worker = self._desk.worker
        if worker is None:
            return False
        began = time.monotonic()
        seen = self._orchestrator.look(worker, self._known, plan_id=self._plan_id, patience=self._closing)
        self._served = True
        self._look_at = time.monotonic() + self._poll
        if not seen.ready:
            self._hinted_at = None
            self._metrics.claimed([], 0.0, seconds=time.monotonic() - began, waits=[])
        self._keyed, self._suspects = seen.keyed, seen.suspects
        if not seen.alive:
            self._dead()
        return seen.alive and seen.ready

    def _claim_suspect(self) -> int:
        desk = self._desk
        if not self._suspects or (desk.suspect is not None and desk.suspect in desk.held):
            return 0
        self._suspects = False
        return sum(self._claim(1, known, suspects=True) for known, _ in self._gates.offers(1, desk.attempts)[-1:])

    def _claim_offered(self, free: int) -> int:
        """Claim for the agents whose gates are open."""
        took = 0
        for known, limit in self._gates.offers(free, self._desk.attempts):
            if took < free:
                took += self._claim(min(limit, free - took), known)
        return took

    def _probe(self) -> int:
        """Claim one task for each login that is to be probed."""
        worker = self._desk.worker
        took = 0
        for name, known in () if worker is None else once(lambda: self._gates.probes(worker)):
            found = self._claim(1, known, probe=name) or self._claim(1, known, suspects=True, probe=name)
            if not found:
                self._gates.nothing_to_probe(name)
            took += found
        return took

    def _claim(self, limit: int, known: list[Known], *, suspects: bool = False, probe: str | None = None) -> int:
        self._desk.claims_begun += 1
        try:
            return self._claim_now(limit, known, suspects, probe)
        finally:
            self._desk.claims_ended += 1

    def _claim_now(self, limit: int, known: list[Known], suspects: bool, probe: str | None) -> int:
        desk = self._desk
        worker = desk.worker
        if worker is None or self._closing.is_set():
            return 0
        # Tasks with keys are looked for while there are some; a claim that finds nothing else looks by itself. What was
        # found for some of the agents says nothing of the others.
        part = suspects or len(known) < len(self._known)
        keyed = not suspects and (part or self._keyed)
        hinted, began = self._hinted_at, time.monotonic()
        claimed = self._orchestrator.claim(
            worker, known, limit, plan_id=self._plan_id, suspects=suspects, keyed=keyed, patience=self._closing
        )
        if claimed.keys is not None and not part:
            self._keyed = claimed.keys
        self._served = True
        claims = claimed.claims
        if not suspects or claims:
            now = time.monotonic()
            self._metrics.claimed(
                [claim.agent for claim in claims],
                claimed.hold_seconds,
                seconds=now - began,
                waits=[claim.waited for claim in claims],
                woken=now - hinted if hinted is not None and claims else None,
            )
        if not suspects and self._hinted_at == hinted:
            self._hinted_at = None
        if not claimed.alive:
            self._dead()
            return 0
        if not claims:
            return 0
        attempts = [self._attempt(claim) for claim in claims]
        for attempt in attempts:
            desk.held[attempt.key] = attempt
        if suspects:
            desk.suspect = attempts[0].key
        desk.taken += len(attempts)
        self._gates.started(claims)
        if probe is not None:
            self._gates.probing(probe, attempts[0])
        self._start(attempts)
        return len(attempts)

    def _attempt(self, claim: Claim) -> Attempt:
        return Attempt(claim, self._agents[claim.agent, claim.definition], self._desk.board)

    def _jitter(self) -> float:
        return self._poll * random.uniform(0.8, 1.0)


__all__ = ["Claimer"]
