"""Ends what a worker leaves behind when it dies without a chance to do so itself (SIGKILL, out of memory).

Run as a program by its path, with ``python -I -S``: one small process beside each worker process. It sleeps until the
worker is gone, then ends every tree that the worker had started, removes the worker's private directory, and exits.
It finds the trees by the table of live agents that it shares with the worker (plain memory, so the worker pays nothing
for each agent), by the mark in their environment, by their sessions, and by descent.

Arguments: worker's pid, worker's mark, kill grace in seconds, descriptor of the alarm pipe, descriptor of the table,
private directory. The end of the pipe says the same as the end of the worker: nobody is there any more.
"""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import select
import shutil
import signal
import struct
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.agents import census
else:  # by path: the package is not importable under -I, and importing it would cost ten times the start

    def _load() -> Any:
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "census.py")  # noqa: PTH100, PTH118, PTH120
        spec = importlib.util.spec_from_file_location("census", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    census = _load()

SLOT = struct.Struct("=QQ")
"""One live agent in the table: pid (0: free) and the clock ticks since boot before it was started."""

SLOTS = 8192
TABLE_BYTES = SLOT.size * SLOTS


def wait_for_death(worker: int, pipe: int) -> None:
    """Return when process *worker* is gone, or has closed its end of *pipe*."""
    watched: list[int] = [pipe]
    with contextlib.suppress(AttributeError, OSError):
        watched.append(os.pidfd_open(worker))
    if os.getppid() != worker:
        return
    poll = select.poll()
    for fd in watched:
        poll.register(fd, select.POLLIN | select.POLLHUP)
    while not poll.poll():
        pass


def live_agents(table: mmap.mmap) -> list[tuple[int, int]]:
    """Return (pid, earliest start) of the agents that the worker had not seen the end of."""
    return [(pid, start) for pid, start in SLOT.iter_unpack(table[:]) if pid]


def end_all(mark: str, agents: list[tuple[int, int]], grace: float) -> census.Ended:
    """End the trees of *agents* and everything that carries *mark*."""
    look = census.Census().look
    if not census.HAS_PROC:
        return _end_groups([pid for pid, _ in agents], grace)

    def find(known: Collection[tuple[int, int]]) -> list[census.Process]:
        processes = look()
        roots = []
        for pid, start in agents:
            root = processes.get(pid)
            # gone, or the very one: then the number still stands for its session; anything else is a stranger
            if root is None or (root.sid == pid and start <= root.start + 2 <= start + 500):
                roots.append(pid)
        return census.tree(processes, mark=mark, roots=roots, known=known)

    return census.drive(census.ladder(find, grace))


def _end_groups(groups: list[int], grace: float) -> census.Ended:
    for number, pause in ((signal.SIGTERM, grace), (signal.SIGKILL, 0.0)):
        groups = [pgid for pgid in groups if census.send_group(pgid, number)]
        if groups and pause:
            select.select([], [], [], pause)
    return census.Ended()


def main(arguments: list[str]) -> int:
    """Guard one worker to its end; the exit code is 0 unless something would not die."""
    worker, mark, grace, pipe, memory, directory = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        # a signal to the whole service must not take the guardian away before the worker
        signal.signal(number, signal.SIG_IGN)
    table = mmap.mmap(int(memory), TABLE_BYTES)
    wait_for_death(int(worker), int(pipe))
    ended = end_all(mark, live_agents(table), float(grace))
    if directory:
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if ended.survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
