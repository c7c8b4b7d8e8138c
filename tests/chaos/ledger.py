"""What agents did, outside the database: one file to which every agent appends a line for each sign of life.

A line is written by one ``write`` to an ``O_APPEND`` file, so lines of many processes never mix. Times are seconds of the
boot clock, which all processes of a host share. Shell agents read them from ``/proc/uptime``: hundredths, cut off.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.liveness import boot_clock

VARIABLE = "CHAOS_LEDGER"
"""The environment variable that names the file."""

BEGIN, BEAT, END, FAIL = "begin", "beat", "end", "fail"


def note(task_id: int, attempt: int, what: str, kind: str) -> None:
    """Append one line; it is in the kernel when this returns."""
    line = f"{boot_clock():.4f} {task_id} {attempt} {what} {os.getpid()} {kind}\n"
    file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


@dataclass(slots=True)
class Signs:
    """The signs of life of one attempt."""

    kind: str = ""
    begins: int = 0
    ends: int = 0
    first: float = 0.0
    last: float = 0.0
    ended_at: float | None = None
    pids: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Ledger:
    """The file, read."""

    signs: dict[tuple[int, int], Signs]
    lines: int
    broken: list[str]

    def of_task(self) -> dict[int, dict[int, Signs]]:
        """The signs by task, then by attempt."""
        tasks: dict[int, dict[int, Signs]] = defaultdict(dict)
        for (task_id, attempt), signs in self.signs.items():
            tasks[task_id][attempt] = signs
        return tasks


def read(path: Path) -> Ledger:
    """Read the whole file; lines that cannot be read are kept as ``broken``."""
    signs: dict[tuple[int, int], Signs] = {}
    broken: list[str] = []
    lines = 0
    for line in path.read_text(errors="replace").splitlines():
        lines += 1
        try:
            time_, task, attempt, what, pid, kind = line.split()
            at, key = float(time_), (int(task), int(attempt))
            one = signs.setdefault(key, Signs(kind, first=at, last=at))
            one.pids.add(int(pid))
        except ValueError:
            broken.append(line)
            continue
        one.first, one.last = min(one.first, at), max(one.last, at)
        one.begins += what == BEGIN
        if what == END:
            one.ends += 1
            one.ended_at = at
    return Ledger(signs, lines, broken)
