"""What a worker holds, and what its threads tell each other. No thread waits for another one here.

Each counter has one thread that writes it, so none needs a lock: the claimer counts what was ``taken``, the event loop
what has ``ended``, the recorder what is ``recorded``.
"""

from __future__ import annotations

import threading
from collections import deque
from uuid import UUID

from orchestrator.domain.identity import Identity
from orchestrator.worker.observer import Attempt, Board, Key

BATCH_ROWS = 500
"""Outcomes that one transaction records at most."""


class Desk:
    """The state that the threads of one worker share."""

    def __init__(self, slots: int, who: Identity, name: str) -> None:
        self.slots = slots
        self.who = who
        self.name = name
        self.worker: UUID | None = None
        """Under which id this process claims; None while it has none."""
        self.held: dict[Key, Attempt] = {}
        """From the claim until the record."""
        self.queue: deque[Attempt] = deque()
        """Ended and not yet recorded."""
        self.taken = 0
        self.ended = 0
        self.recorded = 0
        self.claim_now = threading.Event()
        self.record_now = threading.Event()
        self.board = Board(self.record_now.set)
        self.wanted = 1
        """So many slots must be free before the claimer is woken for them."""
        self.claims_begun = 0
        self.claims_ended = 0
        """Claim calls, counted by the claimer; one has ended when what it took is in ``held``."""
        self.suspect: Key | None = None
        """The one held task that was lost by a worker before."""

    @property
    def running(self) -> int:
        """Agents at work, or about to start."""
        return self.taken - self.ended

    @property
    def free(self) -> int:
        """Slots that a claim may fill now. A slot is free when its agent has ended, though its record is pending.

        At most one batch may be unrecorded: a database that cannot keep up holds the claims back.
        """
        if self.ended - self.recorded >= BATCH_ROWS:
            return 0
        return self.slots - self.running

    def attempts(self) -> list[Attempt]:
        """The attempts whose agents have not ended."""
        return [attempt for attempt in list(self.held.values()) if not attempt.ended]

    def wake(self) -> None:
        """Wake both threads: something ended."""
        self.record_now.set()
        if self.free >= self.wanted:
            self.claim_now.set()


__all__ = ["BATCH_ROWS", "Desk"]
