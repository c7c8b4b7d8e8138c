"""What ``Orchestrator.run_next`` has in the place of a worker: a thread that renews the lease, and a ``Live`` for nobody."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from orchestrator.agents.protocol import Stop
from orchestrator.domain.outcome import Claim, Usage
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import ClaimLost, OrchestratorError
from orchestrator.liveness import boot_clock
from orchestrator.repositories.checkpoints import NewCheckpoint, Stored

log = logging.getLogger(__name__)

Keep = Callable[[Sequence[NewCheckpoint]], Stored]


class Unwatched:
    """A ``Live`` of which only checkpoints are kept, by *keep*: the run row has the result; a transcript needs a worker."""

    def __init__(self, claim: Claim, keep: Keep) -> None:
        self._claim, self._keep = claim, keep

    def write(self, kind: str, text: str, size: int | None = None) -> None: ...

    def progress(self, percent: float | None, message: str | None) -> None: ...

    def usage(self, usage: Usage) -> None: ...

    def session(self, session: str) -> None: ...

    def workspace(self, told: dict[str, Any]) -> None: ...

    def activity(self, what: str | None) -> None: ...

    def keep(self, name: str, text: str) -> Future[Any]:
        claim, kept = self._claim, Future[Any]()
        stored = self._keep([NewCheckpoint(claim.task_id, claim.attempt, claim.claimed_by, name, text)])
        key = (claim.task_id, claim.attempt, name)
        kept.set_result(stored[key]) if key in stored else kept.set_exception(ClaimLost("the task was taken back"))
        return kept


class LeaseKeeper:
    """Renews a lease from a thread of its own, and stops the agent before the lease has run out.

    *renew* returns whether the worker still lives; *lease* and *heartbeat* are in seconds.
    """

    def __init__(self, renew: Callable[[], bool], lease: float, heartbeat: float) -> None:
        self._renew, self._lease, self._heartbeat = renew, lease, heartbeat
        self._end = threading.Event()
        self._lease_end = boot_clock() + lease
        self._stop: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="renewal", daemon=True)
        self._thread.start()

    def watch(self, loop: asyncio.AbstractEventLoop, stop: Stop) -> None:
        """Stop the agent by *stop*, on *loop*, when the lease cannot be renewed."""

        def ask() -> None:
            loop.call_soon_threadsafe(stop.request, OutcomeClass.INTERRUPTED, "the lease could not be renewed")

        self._stop = ask

    def end(self) -> None:
        """Renew no more."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(
            min(self._heartbeat, 1.0 if boot_clock() > self._lease_end - self._lease / 2 else self._heartbeat)
        ):
            asked = boot_clock()
            try:
                alive = self._renew()
            except OrchestratorError as error:
                log.warning("renewal failed: %s", error)
                alive = True
            else:
                if alive:
                    self._lease_end = asked + self._lease
            if (not alive or boot_clock() > self._lease_end - self._lease / 4) and self._stop is not None:
                self._stop()


__all__ = ["LeaseKeeper", "Unwatched"]
