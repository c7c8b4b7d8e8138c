"""Which processes exist and to whose tree each belongs; and the one ladder that ends a tree.

Standard library only, and no import from this package: the guardian loads this file by its path, so that it starts in
milliseconds. Reading order: ``look`` (all processes), ``tree`` (who belongs to one), ``ladder`` (how it is ended).

A process belongs to a tree when one of these holds, the first kinds being evidence and the last two being closure:

- it is the process that we started, or lives in the session or process group that this process leads;
- its environment carries the mark of the tree (so a child that made a session of its own is found as well);
- it was seen as a member before, by pid and start time;
- it shares a session or group with a member, or leads it: the root began its own, so these began inside the tree;
- it descends from a member.

Without such evidence nothing is ever signalled: not the worker, not another agent's tree, not a stranger whose number
happens to be the same. Without ``/proc`` (macOS) ``look`` finds nothing, and the ladder signals the process group.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable
from typing import NamedTuple

MARK_NAME = "ORCHESTRATOR_TREE"
"""The environment variable that carries the marks of a process: its own, then those of the workers around it."""

HAS_PROC = os.path.exists("/proc/self/stat")  # noqa: PTH110 - pathlib would double the guardian's start

_MARK_BYTES = MARK_NAME.encode() + b"="
_TICKS = os.sysconf("SC_CLK_TCK") if HAS_PROC else 100
_ENVIRON_MAX = 4 << 20
PATIENCE = 5.0
"""Seconds after SIGKILL in which the kernel lets go of a process, as a rule."""


class Process(NamedTuple):
    """One process: ``start`` is in clock ticks since boot, and with the pid names it for good."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    state: str
    start: int
    marks: str

    @property
    def key(self) -> tuple[int, int]:
        """What names this process even when its number is used again."""
        return self.pid, self.start

    @property
    def alive(self) -> bool:
        """False for a zombie: it runs no more and holds nothing."""
        return self.state not in "ZX"


class Ended(NamedTuple):
    """What the ladder did: processes ended, whether it took SIGKILL, who would not go, and seconds until they went."""

    ended: tuple[Process, ...] = ()
    forced: bool = False
    survivors: tuple[Process, ...] = ()
    waited: float = 0.0


def worker_mark(worker: object) -> str:
    """Return what all trees of one worker process carry in their mark; *worker* is its UUID.

    It is a hash: the UUID itself is half of a fence and nobody's business down there.
    """
    return "w" + hashlib.sha256(str(worker).encode()).hexdigest()[:20]


def new_mark(worker: object, task_id: int, attempt: int) -> str:
    """Return a mark for one execution that nothing else will ever carry."""
    return f"{worker_mark(worker)}.{task_id}.{attempt}.{secrets.token_hex(6)}"


def ticks_now() -> int:
    """Return the present in the unit of ``Process.start``."""
    return int(time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) * _TICKS)


def _read(path: str, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(fd, size)
        while len(data) < size and len(data) >= 4096:
            more = os.read(fd, size - len(data))
            if not more:
                break
            data += more
        return data
    finally:
        os.close(fd)


def one(pid: int) -> Process | None:
    """Return process *pid* without its marks; None if there is none."""
    try:
        data = _read(f"/proc/{pid}/stat", 4095)
    except OSError:
        return None
    return _parse(pid, data)


def _parse(pid: int, data: bytes) -> Process | None:
    # the name in parentheses may hold anything, blanks and parentheses too
    rest = data[data.rfind(b")") + 2 :].split(b" ", 20)
    if len(rest) < 20:
        return None
    state = rest[0].decode("ascii", "replace")
    if state == "Z" and int(rest[17]) > 1:
        state = "S"  # only its first thread has ended: the others run on, and nobody can collect it before they end
    return Process(pid, int(rest[1]), int(rest[2]), int(rest[3]), state, int(rest[19]), "")


def _marks(pid: int) -> str:
    try:
        data = _read(f"/proc/{pid}/environ", _ENVIRON_MAX)
    except OSError:  # another user's, or gone
        return ""
    at = 0 if data.startswith(_MARK_BYTES) else data.find(b"\0" + _MARK_BYTES) + 1
    if at == 0 and not data.startswith(_MARK_BYTES):
        return ""
    return data[at + len(_MARK_BYTES) :].split(b"\0", 1)[0].decode("ascii", "replace")


class Census:
    """Looks at all processes, for many askers at once: who asks while a look is going on shares the next one.

    A mark that was seen once is remembered for as long as the process lives: it may replace its environment later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marked: dict[tuple[int, int], str] = {}
        self._taken = -1.0
        self._last: dict[int, Process] = {}

    def look(self, asked: float | None = None) -> dict[int, Process]:
        """Return every process by pid, as it was at some moment after *asked* (``time.monotonic``, default: now)."""
        if asked is None:
            asked = time.monotonic()
        with self._lock:
            if self._taken >= asked:
                return self._last
            taken = time.monotonic()
            self._last = self._scan()
            self._taken = taken
            return self._last

    def _scan(self) -> dict[int, Process]:
        found: dict[int, Process] = {}
        marked: dict[tuple[int, int], str] = {}
        try:
            names = os.listdir("/proc")  # noqa: PTH208
        except OSError:
            return found
        for name in names:
            if not name.isdecimal():
                continue
            process = one(int(name))
            if process is None:
                continue
            if process.ppid != 2 and process.pid > 2:
                marks = self._marked.get(process.key) or (_marks(process.pid) if process.alive else "")
                if marks:
                    marked[process.key] = marks
                    process = process._replace(marks=marks)
            found[process.pid] = process
        self._marked = marked
        return found


def tree(
    processes: dict[int, Process],
    *,
    mark: str | None = None,
    roots: Collection[int] = (),
    known: Collection[tuple[int, int]] = (),
    spare: Collection[int] = (),
) -> list[Process]:
    """Return the members of a tree among *processes*, zombies included, parents before children as far as possible.

    *roots* are pids that we started as session leaders, *known* are members seen before, *spare* is never touched.
    """
    own_sid = os.getsid(0)
    spared = {0, 1, 2, os.getpid(), *spare}
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process)
    leaders = set(roots)
    members: dict[int, Process] = {}
    waiting = [
        process
        for process in processes.values()
        if process.sid in leaders
        or process.pgid in leaders
        or process.pid in leaders
        or process.key in known
        or (mark is not None and mark in process.marks)
    ]
    while waiting:
        process = waiting.pop()
        if process.pid in members or process.pid in spared or (process.sid == own_sid and process.pid not in leaders):
            continue
        members[process.pid] = process
        waiting += children.get(process.pid, ())
        for led in (process.sid, process.pgid):
            # the root began a session of its own, so every session and group that a member is in began inside the tree
            if led not in leaders and led not in spared:
                leaders.add(led)
                waiting += [each for each in processes.values() if led in (each.sid, each.pgid, each.pid)]
    return sorted(members.values(), key=lambda process: process.start)


def holders(processes: dict[int, Process], pipes: Collection[int]) -> set[tuple[int, int]]:
    """Return the keys of those who can write to one of these *pipes* (inodes). Costs a look at every descriptor."""
    names = {f"pipe:[{inode}]" for inode in pipes}
    found: set[tuple[int, int]] = set()
    for process in processes.values():
        if process.pid == os.getpid() or process.ppid == 2 or not process.alive:
            continue
        folder = f"/proc/{process.pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):  # noqa: PTH208
                if os.readlink(f"{folder}/{name}") in names and _writes(process.pid, name):  # noqa: PTH115
                    found.add(process.key)
                    break
    return found


def _writes(pid: int, fd: str) -> bool:
    """Say whether a descriptor is open for writing."""
    for line in _read(f"/proc/{pid}/fdinfo/{fd}", 4095).splitlines():
        if line.startswith(b"flags:"):
            return int(line[6:], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def send(process: Process, number: int) -> bool:
    """Send a signal to exactly this process, never to another one that got its number; False if it is gone."""
    try:
        handle = os.pidfd_open(process.pid)
    except AttributeError:
        handle = -1
    except OSError:
        return False
    try:
        now = one(process.pid)
        if now is None or now.start != process.start:
            return False
        if handle >= 0:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(process.pid, number)
        return True
    except OSError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)


def send_group(pgid: int, number: int) -> bool:
    """Send a signal to a process group; False if it is empty."""
    try:
        os.killpg(pgid, number)
        return True
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody in it became another user; the others were reached
        return True


def ladder(
    find: Callable[[Collection[tuple[int, int]]], list[Process]],
    grace: float,
    patience: float | None = None,
    begun: Iterable[Process] = (),
) -> Generator[float, None, Ended]:
    """End a tree: SIGTERM to all of it, after *grace* seconds SIGKILL to all that is left, until nothing is.

    Yields the seconds to wait before it is resumed, so that a thread and an event loop can both drive it; it returns
    when a look finds no living member, or when some are still there *patience* (PATIENCE) after the first SIGKILL (then
    they are ``survivors``: uninterruptible in the kernel, or another user's). *find* gets the members seen so far.
    Members that appear in between are signalled like the rest.
    """
    seen: dict[tuple[int, int], Process] = {process.key: process for process in begun}

    def living() -> list[Process]:
        found = find(seen.keys())
        seen.update((process.key, process) for process in found)
        return [process for process in found if process.alive]

    asked: set[tuple[int, int]] = set()
    left = living()
    touched = {process.key: process for process in left}
    deadline = time.monotonic() + grace
    pause = 0.01
    while left and (remaining := deadline - time.monotonic()) > 0:
        for process in left:
            if process.key not in asked:
                asked.add(process.key)
                send(process, signal.SIGTERM)
                send(process, signal.SIGCONT)  # a stopped process hears nothing until it goes on
        yield min(pause, remaining)
        pause = min(pause * 1.7, 0.2)
        left = living()
        touched.update((process.key, process) for process in left)
    forced = bool(left)
    deadline = time.monotonic() + (PATIENCE if patience is None else patience)
    pause = 0.005
    while left and time.monotonic() < deadline:
        for process in left:
            send(process, signal.SIGKILL)
        yield pause
        pause = min(pause * 1.7, 0.2)
        left = living()
        touched.update((process.key, process) for process in left)
    return Ended(tuple(touched.values()), forced, tuple(left))


def drive(steps: Generator[float, None, Ended]) -> Ended:
    """Climb a ladder in this thread, sleeping in between."""
    while True:
        try:
            time.sleep(next(steps))
        except StopIteration as end:
            result: Ended = end.value
            return result


def reap(pids: Iterable[int]) -> set[int]:
    """Collect those of *pids* that are zombies of this process; return those that still live as its children."""
    living: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                living.add(pid)
    return living
