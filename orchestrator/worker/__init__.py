"""The worker: the three units with many slots. Reading order: ``loop`` (what runs where), then one file for each thread.

loop        the event loop: agents run here; start, drain, end
claimer     unit 1 for free slots
recorder    unit 3 as group commit; transcripts, cancel requests, reconciliation and sweeps on the same connection
heartbeat   renewals, the end of the own lease, and a loop that stands still
watchdog    dead workers and their tasks; also ``orchestrator watchdog``
alerting    looking for alerts, and telling hooks of them
exposition  what is served over HTTP: metrics and probes
spool       outcomes that could not be recorded before the process ended
observer    a running attempt as agents write to it and screens read it
shutdown    signals
"""

from __future__ import annotations

from orchestrator.worker.loop import Worker
from orchestrator.worker.observer import Observer, Watched
from orchestrator.worker.watchdog import Watchdog

__all__ = ["Observer", "Watchdog", "Watched", "Worker"]
