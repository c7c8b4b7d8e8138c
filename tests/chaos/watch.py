"""Watches worker processes from outside: when they ended, and how long their threads waited for a processor.

What takes long on a machine that is busy with other things is told apart from what takes long by itself. The kernel
counts for each thread the time that it was ready to run and did not (``/proc/PID/task/TID/schedstat``). Where there is no
such file nothing is excused.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.liveness import boot_clock

STEP = 0.1
STARVED = 0.5
"""Seconds without a processor that count as having stood still."""
MOST = 0.8
"""The part of a step that a thread has waited when it counts as having waited for all of it."""


@dataclass(slots=True)
class Sample:
    """One step: its end, and the longest that one of the threads waited in it (or since before it began)."""

    at: float
    step: float
    waited: float


@dataclass(slots=True)
class _Watched:
    process: subprocess.Popen[bytes]
    looked: float
    threads: dict[int, float] = field(default_factory=dict)


class Watch:
    """A thread that looks every tenth of a second. Pids come again; what is asked about them is asked by time."""

    def __init__(self) -> None:
        self.samples: dict[int, list[Sample]] = {}
        self._watched: dict[int, _Watched] = {}
        self._ended: dict[int, float] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """Watch a process from now on."""
        self._ended.pop(process.pid, None)
        self._watched[process.pid] = _Watched(process, boot_clock())
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def ended(self, pid: int) -> float:
        """When the process with that number was first seen to have ended; now, if it is news."""
        return self._ended.get(pid, boot_clock())

    def starved(self, pid: int, start: float, end: float) -> float:
        """Seconds between *start* and *end* in which a thread of the process waited for a processor."""
        waited = sum(sample.waited for sample in self.samples.get(pid, ()) if start < sample.at <= end + STEP)
        return min(waited, max(0.0, end - start))

    def stalls(self, pid: int) -> list[list[float]]:
        """Spans of STARVED seconds and more in which a thread of the process got hardly any processor."""
        spans: list[list[float]] = []
        for sample in list(self.samples.get(pid, ())):
            if sample.waited < MOST * sample.step:
                continue
            start = sample.at - max(sample.waited, sample.step)
            if spans and start <= spans[-1][1] + STEP:
                spans[-1] = [min(start, spans[-1][0]), sample.at]
            else:
                spans.append([start, sample.at])
        return [span for span in spans if span[1] - span[0] >= STARVED]

    def _run(self) -> None:
        while not self._closing.wait(STEP):
            for pid, watched in list(self._watched.items()):
                now = boot_clock()
                if watched.process.poll() is not None:
                    self._ended[pid] = now
                    self._watched.pop(pid, None)
                    continue
                threads = waits(pid)
                waited = max((all_ - watched.threads.get(tid, 0.0) for tid, all_ in threads.items()), default=0.0)
                self.samples.setdefault(pid, []).append(Sample(now, now - watched.looked, max(0.0, waited)))
                watched.looked, watched.threads = now, threads


def waits(pid: int) -> dict[int, float]:
    """For each thread of a process, the seconds that it has waited for a processor in its life."""
    found: dict[int, float] = {}
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found[int(file.parent.name)] = int(file.read_text().split()[1]) / 1e9
    return found
