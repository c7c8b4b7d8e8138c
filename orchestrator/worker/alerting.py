"""The thread that looks for alerts and tells hooks of them, in a worker with hooks and in every standalone watchdog.

It has no part in the work: what it waits for (a slow read, a webhook that does not answer) holds nobody up. One process of
all looks, every LOOK_EVERY seconds; a hook is told of an episode once, by whoever takes that first. When a process dies
between a delivery and its note in the database, another delivers again: at least once then, with the same delivery id.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Sequence

from orchestrator.database.transient import transient
from orchestrator.domain.snapshot import Episode
from orchestrator.errors import DatabaseUnavailable
from orchestrator.hooks import Hook
from orchestrator.repositories.alerting import Telling, Wish
from orchestrator.service import Orchestrator
from orchestrator.worker.observer import Complaints

log = logging.getLogger(__name__)

LOOK_EVERY = 10.0
"""Seconds between two looks of all processes together."""
PAUSE = 3.0
"""Seconds between two turns of one process."""
AT_ONCE = 20
"""Deliveries to one hook in one turn: a storm of alerts must not be one of requests."""
FIRST, LAST, TRIES = 5.0, 600.0, 12
"""Seconds until a delivery is tried again, doubled each time up to LAST, until it was tried TRIES times: about an hour."""
NOTE = 30.0
"""Seconds that a delivery belongs to its process beyond the hook's timeout; so long its note may take."""

Tell = Callable[[str, Episode], None]


class Alerter:
    """Looks for alerts and tells *hooks*; ``tell`` hears what this process saw begin and end, on its thread."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        hooks: Sequence[Hook],
        *,
        tell: Tell | None = None,
        every: float = LOOK_EVERY,
        pause: float = PAUSE,
    ) -> None:
        self._orchestrator = orchestrator
        self._hooks = tuple(hooks)
        self._wishes = [Wish(hook.name, hook.kinds, hook.after) for hook in hooks]
        self._tell = tell
        self._every = every
        self._pause = pause
        self._stop = threading.Event()
        self._complaints = Complaints(log)
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)

    def begin(self) -> None:
        """Start looking."""
        self._thread.start()

    def close(self, timeout: float = 1.0) -> None:
        """Look no more; a command that runs is ended, and what was not heard is told by others. Waits for *timeout*."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def once(self) -> None:
        """Look, and tell what there is to tell now. Raises DatabaseUnavailable."""
        self._look(0.0)
        for hook in self._hooks:
            self._tell_hook(hook)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._look(self._every)
                for hook in self._hooks:
                    self._tell_hook(hook)
            except DatabaseUnavailable as error:
                log.debug("alerts were not looked for: %s", error)
            except Exception as error:  # noqa: BLE001 - the thread goes on, whatever it was
                self._complaints.say("looking for alerts failed", error)
            # Jittered, so that many workers do not ask at one moment for ever.
            self._stop.wait(self._pause * random.uniform(0.8, 1.2))

    def _look(self, every: float) -> None:
        looked = transient(lambda: self._orchestrator.alerting.look(every, self._wishes), give_up_after=0)
        if looked is None or self._tell is None:
            return
        for event, episodes in (("begun", looked.begun), ("ended", looked.ended)):
            for episode in episodes:
                self._tell(event, episode)

    def _tell_hook(self, hook: Hook) -> None:
        alerting = self._orchestrator.alerting
        for _ in range(AT_ONCE):
            if self._stop.is_set():
                return
            telling = transient(lambda: alerting.take(hook.name, hook.timeout + NOTE), give_up_after=0)
            if telling is None:
                return
            error = hook.tell(telling.episode, telling.event, os.environ, self._stop)
            if error is not None:
                self._not_told(telling, error)
                return  # the next one would most likely fail as well
            # It was heard: losing that would tell it twice.
            transient(lambda: alerting.told(telling), give_up_after=NOTE, stop=self._stop)  # noqa: B023 - called at once
            log.info("hook %s was told that alert %s has %s", hook.name, telling.episode.alert.kind, telling.event)

    def _not_told(self, telling: Telling, error: str) -> None:
        failures = telling.failures + 1
        again: float | None = min(LAST, FIRST * 2 ** (failures - 1))
        if self._stop.is_set():
            again = 0.0
        elif failures >= TRIES:
            again = None
        what = f"hook {telling.hook} was not told that alert {telling.episode.alert.kind} has {telling.event}: {error}"
        if again is None:
            log.error("%s; given up after %d tries", what, failures)
        elif failures == 1:
            log.warning("%s; it is tried again", what)
        transient(lambda: self._orchestrator.alerting.not_told(telling, error, again), give_up_after=0)


__all__ = ["Alerter", "Tell"]
