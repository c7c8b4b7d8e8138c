"""Starts agents as process trees and ends them, without fail: the one place that signals anything.

``spawn`` starts a process in a session of its own and returns a ``ProcessTree``; ``ProcessTree.end`` climbs the ladder:
SIGTERM to the whole tree, after the grace SIGKILL to the whole tree, and back only when a look at the process table
finds none of it (ADR-0005). ``Keeper`` is what one process does once for all its trees:

- it is a child subreaper while a tree lives, so that what an agent leaves behind becomes a child of this process, is
  seen, and is collected;
- it has one guardian beside it, which ends all trees when this process dies by SIGKILL;
- it keeps a private directory, which the guardian removes if we cannot.

An event loop drives it. Nothing here polls while an agent runs: the kernel says when a process has ended (pidfd).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.agents import census, guardian
from orchestrator.agents.census import Ended, Process

_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_RESTORED = tuple(
    number
    for name in (
        "SIGINT",
        "SIGHUP",
        "SIGQUIT",
        "SIGTERM",
        "SIGUSR1",
        "SIGUSR2",
        "SIGALRM",
        "SIGTTIN",
        "SIGTTOU",
        "SIGTSTP",
    )
    if (number := getattr(signal, name, None)) is not None
)
_DIRECTORY = "orchestrator-agents-"
_UNKNOWN_EXIT = 255
_ZOMBIE_AGE = 5.0


_libc_prctl: Any = None
with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
    _libc_prctl = ctypes.CDLL(None, use_errno=True).prctl


def _prctl(option: int, value: int) -> bool:
    """Call prctl; False where there is none or it refuses."""
    return _libc_prctl is not None and int(_libc_prctl(option, value, 0, 0, 0)) == 0


def harden() -> bool:
    """Make this process undumpable: no agent of the same user can read its memory, environment or descriptors.

    Children are dumpable again once they have replaced their image. Returns False where the system cannot do it.
    """
    return _prctl(_PR_SET_DUMPABLE, 0)


def raise_descriptor_limit(wanted: int = 65_536) -> int:
    """Raise the limit of open descriptors as far as it goes, at most to *wanted*, and return it.

    An agent costs four of them while it runs. For the start of a worker; agents inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    aim = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < aim:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (aim, hard))
            return aim
    return soft


def _default_signals() -> None:
    """In the child, between fork and exec: what the parent ignores must not be ignored by the agent."""
    for number in _RESTORED:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


class Keeper:
    """Everything that this process does once for all its trees. Get it with ``keeper()``."""

    def __init__(self, grace: float = 2.0) -> None:
        self.pid = os.getpid()
        self.sid = os.getsid(0)
        self.grace = grace
        self.census = census.Census()
        self.trees: dict[int, ProcessTree] = {}
        self._others: set[int] = set()
        self._foreign: set[tuple[int, int]] = set()
        self._adopted: set[int] = set()
        self._zombies: dict[tuple[int, int], float] = {}
        self._lock = threading.Lock()
        self._directory: str | None = None
        self._directory_lock = -1
        self._children = f"/proc/{self.pid}/task/{self.pid}/children"
        self.guardian = 0
        self.signals_seen = float("-inf")
        self.before_exec: Callable[[], None] | None = None
        self.files: dict[str, str] = {}
        self.empty_files: list[str] = []
        self._programs: dict[tuple[str, str], str | None] = {}
        self._mark = census.worker_mark(f"{self.pid} {os.urandom(8).hex()}")
        self.null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._table_fd, self._table = _shared_table()
        self._free = list(range(guardian.SLOTS - 1, -1, -1))
        self._inside = 0
        read_end, self._alarm = os.pipe()
        self._alarm_read = read_end
        self._env_mark = os.environ.get(census.MARK_NAME, "")
        self._swept = time.monotonic()
        self.threads = ThreadPoolExecutor(4, thread_name_prefix="orchestrator-trees")

    @property
    def directory(self) -> str:
        """A directory that only this user can read; gone when this process is, at the latest when the next one starts."""
        if self._directory is None:
            _remove_abandoned()
            self._directory = tempfile.mkdtemp(prefix=_DIRECTORY)
            self._directory_lock = os.open(f"{self._directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._directory_lock, fcntl.LOCK_EX)
        return self._directory

    def spare(self, pid: int) -> None:
        """Name a child of this process that somebody else in it started and will wait for."""
        self._others.add(pid)

    def guard(self) -> None:
        """Start the guardian if it is not there, or not any more."""
        if self.guardian and not census.reap([self.guardian]):
            self.guardian = 0
        if self.guardian:
            return
        command = [sys.executable, "-I", "-S", str(Path(guardian.__file__).resolve()), str(self.pid)]
        command += [self._mark, str(self.grace), str(self._alarm_read), str(self._table_fd), self.directory]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath},
            cwd="/",
            start_new_session=True,
            pass_fds=(self._alarm_read, self._table_fd),
        )
        self.guardian = process.pid
        process.returncode = 0  # it outlives us by design, and Popen need not complain of it

    def enter(self) -> int:
        """Take a slot of the shared table for a process that is about to start; −1 when all are taken.

        With the first one this process becomes a subreaper, with the last one that leaves it stops being one: whatever
        else it starts and lets go (a database server, say) is not meant to come back to it.
        """
        with self._lock:
            if self._inside == 0 and census.HAS_PROC:
                _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            self._inside += 1
            return self._free.pop() if self._free else -1

    def note(self, slot: int, pid: int, start: int) -> None:
        """Write a live agent into its slot."""
        if slot >= 0:
            guardian.SLOT.pack_into(self._table, slot * guardian.SLOT.size, pid, start)

    def leave(self, slot: int) -> None:
        """Give a slot back."""
        if slot >= 0:
            guardian.SLOT.pack_into(self._table, slot * guardian.SLOT.size, 0, 0)
        with self._lock:
            if slot >= 0:
                self._free.append(slot)
            self._inside -= 1
            if self._inside == 0 and census.HAS_PROC:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if time.monotonic() - self._swept > _ZOMBIE_AGE:
            self.sweep()

    def program(self, name: str, path: str | None) -> str | None:
        """Return where *path* has the program *name*; None where the search has to be made anew for each start.

        Remembered, because the search costs a failed exec for each folder, all in the time that a start blocks us.
        """
        if path is None or "/" in name or not all(folder.startswith("/") for folder in path.split(os.pathsep)):
            return None
        if (name, path) not in self._programs:
            if len(self._programs) > 1000:
                self._programs.clear()
            self._programs[name, path] = shutil.which(name, path=path)
        return self._programs[name, path]

    def forget_programs(self) -> None:
        """Search anew: one is not where it was."""
        self._programs.clear()

    def marks(self, mark: str) -> str:
        """Return the value of the mark variable for a child: its own, this worker's, those of the workers around us."""
        return f"{mark} {self._mark} {self._env_mark}".rstrip()

    def strangers(self) -> set[int]:
        """Return children of this process that nobody here has started: what agents left behind, or others' children.

        Costs one small read. Empty where there is no /proc: then nothing can be adopted either.
        """
        try:
            fd = os.open(self._children, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return set()
        try:
            data = b""
            while part := os.read(fd, 65536):
                data += part
        finally:
            os.close(fd)
        strangers = set(map(int, data.split()))
        strangers.difference_update(self.trees, self._others, self._adopted, (self.guardian,))
        return strangers

    def unexplained(self) -> bool:
        """Say whether this process has a child that has not been looked at yet."""
        strangers = self.strangers()
        if not strangers:
            if self._foreign:
                self._foreign.clear()
            return False
        found = {process.key for pid in strangers if (process := census.one(pid)) is not None}
        self._foreign &= found
        return bool(found - self._foreign)

    def looked_at(self, processes: Mapping[int, Process]) -> None:
        """Remember the present strangers as nobody's, so that they cost no second look."""
        for pid in self.strangers():
            process = processes.get(pid)
            if process is not None and process.alive:
                self._foreign.add(process.key)

    def adopt(self, pids: Collection[int]) -> None:
        """Collect these ended processes, now or when they are ours to collect."""
        self._adopted |= set(pids)
        self._adopted = census.reap(self._adopted)

    def sweep(self) -> None:
        """Collect what has ended and has no other parent any more.

        Members of our trees at once; unknown zombies in sessions other than ours (and as PID 1 any) when they have been
        there for five seconds: their own starter, if it lives in this process, would have waited for them by then.
        Done by itself every few seconds while agents come and go; a worker that is PID 1 also calls it when idle.
        """
        if self._adopted:
            self._adopted = census.reap(self._adopted)
        if self.trees:
            self.guard()
        self._swept = now = time.monotonic()
        zombies: dict[tuple[int, int], float] = {}
        for pid in self.strangers():
            process = census.one(pid)
            if process is None or process.alive or (process.sid == self.sid and self.pid != 1):
                continue
            zombies[process.key] = since = self._zombies.get(process.key, now)
            if now - since >= _ZOMBIE_AGE:
                census.reap([pid])
        self._zombies = zombies

    def close(self) -> None:
        """End the guardian and remove the private directory, when no tree is left. The next ``spawn`` begins anew.

        Nobody has to call it: when this process is gone the guardian does the same.
        """
        global _keeper
        os.close(self._alarm)
        os.close(self._alarm_read)
        if self.guardian:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.guardian, 0)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self._directory_lock)
        self.threads.shutdown()
        os.close(self.null)
        self._table.close()
        os.close(self._table_fd)
        if _keeper is self:
            _keeper = None


def _remove_abandoned() -> None:
    """Remove the directories of workers that were killed together with their guardians: nobody holds their lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.geteuid() or time.time() - folder.lstat().st_mtime < 60:
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _shared_table() -> tuple[int, mmap.mmap]:
    """Return memory that the guardian can still read when this process is dead."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("orchestrator-agents", os.MFD_CLOEXEC)
    else:
        fd, name = tempfile.mkstemp(prefix="orchestrator-agents-")
        Path(name).unlink()
    os.ftruncate(fd, guardian.TABLE_BYTES)
    return fd, mmap.mmap(fd, guardian.TABLE_BYTES)


_keeper: Keeper | None = None
_keeper_lock = threading.Lock()


def keeper() -> Keeper:
    """Return this process's keeper, made at the first call (a forked process gets its own)."""
    global _keeper
    found = _keeper
    if found is None or found.pid != os.getpid():
        with _keeper_lock:
            if _keeper is None or _keeper.pid != os.getpid():
                _keeper = Keeper()
            found = _keeper
    return found


class ProcessTree:
    """A process that we started, and everything that descends from it. Made by ``spawn``.

    ``stdin``, ``stdout``, ``stderr`` are our ends of its pipes as plain descriptors, non-blocking, −1 where there is
    none; whoever takes one closes it and calls ``closed``; ``close_pipes`` closes the rest.
    """

    def __init__(self, keep: Keeper, process: subprocess.Popen[bytes], mark: str, slot: int) -> None:
        self.pid = process.pid
        self.mark = mark
        self.stdin = self.stdout = self.stderr = -1
        self.returncode: int | None = None
        self._keep = keep
        self._process = process
        self._slot = slot
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._known: dict[tuple[int, int], Process] = {}
        self._pidfd = -1
        keep.trees[self.pid] = self
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            threading.Thread(target=self._wait, name=f"wait-{self.pid}", daemon=True).start()
        else:
            self._loop.add_reader(self._pidfd, self._collect)

    def _wait(self) -> None:
        """Where there is no pidfd: block in a thread of its own until the process has ended."""
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            status = _UNKNOWN_EXIT
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            self._loop.call_soon_threadsafe(self._ended, status)

    def _collect(self) -> None:
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # somebody waited for every child of this process, ours included
            pid, status = self.pid, _UNKNOWN_EXIT << 8
        if pid:
            self._ended(os.waitstatus_to_exitcode(status))

    def _ended(self, returncode: int) -> None:
        self._unwatch()
        self.returncode = self._process.returncode = returncode
        if not self._exited.done():
            self._exited.set_result(returncode)

    def _unwatch(self) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(RuntimeError, OSError):
                self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    @property
    def exited(self) -> asyncio.Future[int]:
        """Done when the process itself has ended: its exit code, or minus the number of the signal that ended it."""
        return self._exited

    async def wait(self) -> int:
        """Return the exit code of the process itself as soon as it has ended; what it started may still run."""
        return await asyncio.shield(self._exited)

    def has_rest(self) -> bool:
        """Say, after the process itself has ended, whether something of its tree may still run. Cheap, never wrong by No.

        A member that stayed in the group keeps the group; one that left it has become a child of this process, or
        descends from one that has.
        """
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return self._keep.unexplained()
        except PermissionError:
            return True
        return True

    def _find(self, asked: float, known: Collection[tuple[int, int]], pipes: Collection[int] = ()) -> list[Process]:
        processes = self._keep.census.look(asked)
        if pipes:
            known = {*known, *census.holders(processes, pipes)}
        spare = (set(self._keep.trees) | {self._keep.guardian}) - {self.pid}
        found = census.tree(processes, mark=self.mark, roots=(self.pid,), known=known, spare=spare)
        self._known.update((process.key, process) for process in found)
        if not found:
            self._keep.looked_at(processes)
        return found

    async def members(self) -> list[Process]:
        """Return the living members of the tree, the process itself included."""
        found = await self._loop.run_in_executor(self._keep.threads, self._find, time.monotonic(), set(self._known))
        return [process for process in found if process.alive]

    async def end(self, grace: float = 2.0, pipes: Collection[int] = ()) -> Ended:
        """End the whole tree, the process itself included, and return when it is gone.

        SIGTERM first, SIGKILL after *grace* seconds. ``Ended.survivors`` names what the kernel would not let go of.
        *pipes* are inodes of the tree's own pipes: whoever can still write to one is a member, however it got away.
        Being cancelled does not stop it: it goes on to SIGKILL at once and then lets the cancellation through.
        """
        try:
            ended = await self._climb(grace, pipes)
            if not ended.survivors:
                await asyncio.wait([self._exited], timeout=1.0)
        except asyncio.CancelledError:
            self.kill()
            await asyncio.shield(self._climb(0.0, pipes))
            await asyncio.wait([self._exited], timeout=1.0)  # collected, or nobody would: the next sweep may never come
            raise
        finally:
            self._keep.adopt({process.pid for process in self._known.values()} - {self.pid})
        return ended

    async def end_at_last(
        self, grace: float, stuck: Callable[[str | None], None], pipes: Collection[int] = ()
    ) -> Ended:
        """As ``end``, and again and again until nothing survives; *stuck* is told what does, and None when it is gone.

        ``Ended.waited`` is in seconds from the first time that something had survived SIGKILL.
        """
        ended = await self.end(grace, pipes)
        if not ended.survivors:
            return ended
        began = time.monotonic()
        left = ended.survivors
        try:
            while left:
                pids = ", ".join(str(process.pid) for process in left)
                what = "1 process" if len(left) == 1 else f"{len(left)} processes"
                stuck(f"TERM, KILL sent; {what} left ({pids})")
                left = (await self.end(0.0, pipes)).survivors
        finally:
            stuck(None)
        return ended._replace(survivors=(), waited=time.monotonic() - began)

    async def _climb(self, grace: float, pipes: Collection[int] = ()) -> Ended:
        if not census.HAS_PROC:
            return await self._end_group(grace)
        asked = time.monotonic()

        def find(known: Collection[tuple[int, int]]) -> list[Process]:
            return self._find(asked, known, pipes)

        steps = census.ladder(find, grace, begun=tuple(self._known.values()))

        def step() -> float | Ended:
            try:
                return next(steps)
            except StopIteration as end:
                result: Ended = end.value
                return result

        while True:
            said = await self._loop.run_in_executor(self._keep.threads, step)
            if isinstance(said, Ended):
                return said
            # the end of the process itself is known at once; anything else is looked for
            await (asyncio.sleep(said) if self._exited.done() else asyncio.wait([self._exited], timeout=said))
            asked = time.monotonic()

    async def _end_group(self, grace: float) -> Ended:
        """Without /proc: the process group is all that can be reached."""
        forced = False
        if census.send_group(self.pid, signal.SIGTERM):
            deadline = time.monotonic() + grace
            while census.send_group(self.pid, 0) and time.monotonic() < deadline:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.05)
            forced = census.send_group(self.pid, signal.SIGKILL)
        return Ended((), forced, ())

    def kill(self) -> None:
        """SIGKILL to the group and to every member seen so far, at once, without looking; for the way out."""
        if self.returncode is None or self._known:
            census.send_group(self.pid, signal.SIGKILL)
        for process in self._known.values():
            census.send(process, signal.SIGKILL)

    def close(self) -> None:
        """Forget the tree: pipes are closed, its place in the guardian's table is free. Call it when it is gone."""
        self.close_pipes()
        self._unwatch()
        if self._keep.trees.pop(self.pid, None) is not None:
            self._keep.leave(self._slot)
        if self.returncode is None:
            self._keep.adopt({self.pid})
            self._process.returncode = _UNKNOWN_EXIT

    def close_pipes(self) -> None:
        """Close our ends of the pipes that are still open."""
        for name in ("stdin", "stdout", "stderr"):
            fd = getattr(self, name)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    mark: str,
    cwd: str | None = None,
    stdin: bool = False,
    pass_fds: Sequence[int] = (),
) -> ProcessTree:
    """Start *argv* as the leader of a session of its own and return its tree. Call it on the event loop.

    It gets pipes for stdout and stderr, and for stdin with *stdin*, else an empty one; no other descriptor but
    *pass_fds*; default signal dispositions; *env* and the mark, nothing else. Raises what ``subprocess.Popen`` raises
    (``FileNotFoundError`` with the missing file or directory as ``filename``, …); then nothing was started.
    """
    keep = keeper()
    keep.guard()
    environment = dict(env)
    environment[census.MARK_NAME] = keep.marks(mark)
    before = _preparation(keep)
    ours: list[int] = []
    theirs: list[int] = []
    child_in = keep.null
    slot = keep.enter()
    try:
        if stdin:
            child_in, near_in = os.pipe()
            theirs.append(child_in)
            ours.append(near_in)
        else:
            near_in = -1
        near_out, far_out = os.pipe()
        ours.append(near_out)
        theirs.append(far_out)
        near_err, far_err = os.pipe()
        ours.append(near_err)
        theirs.append(far_err)
        for fd in ours:
            os.set_blocking(fd, False)

        def begin(executable: str | None) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                list(argv),
                executable=executable,
                stdin=child_in,
                stdout=far_out,
                stderr=far_err,
                env=environment,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=before,
                pass_fds=pass_fds,
            )

        start = census.ticks_now()
        program = keep.program(argv[0], environment.get("PATH"))
        try:
            process = begin(program)
        except FileNotFoundError:
            if program is None:
                raise
            keep.forget_programs()
            process = begin(None)
        keep.note(slot, process.pid, start)
    except BaseException:
        for fd in ours:
            os.close(fd)
        keep.leave(slot)
        raise
    finally:
        for fd in theirs:
            os.close(fd)
    tree = ProcessTree(keep, process, mark, slot)
    tree.stdin, tree.stdout, tree.stderr = near_in, near_out, near_err
    return tree


def _preparation(keep: Keeper) -> Callable[[], None] | None:
    """Return what must happen between fork and exec so that the agent's signals are the default ones.

    Nothing, as a rule: handlers end with exec, and Python's own ignored signals are restored by ``subprocess``. A
    signal that this process ignores is turned into one with an empty handler where that is possible (main thread); else
    the slow way around, a function in the child, is taken. Looked at once a second: asking is dear, changing is rare.
    """
    now = time.monotonic()
    if now - keep.signals_seen < 1.0:
        return keep.before_exec
    keep.signals_seen, keep.before_exec = now, None
    ignored = [number for number in _RESTORED if signal.getsignal(number) is signal.SIG_IGN]
    if not ignored:
        return None
    if threading.current_thread() is threading.main_thread() and _TERMINAL_SIGNALS.isdisjoint(ignored):
        for number in ignored:
            signal.signal(number, _nothing)
    else:
        keep.before_exec = _default_signals
    return keep.before_exec


_TERMINAL_SIGNALS = frozenset(
    getattr(signal, name) for name in ("SIGTTIN", "SIGTTOU", "SIGTSTP") if hasattr(signal, name)
)


def _nothing(number: int, frame: object) -> None:
    """Take a signal that was ignored before: still without effect here, but not inherited as ignored."""


def end_trees(mark: str, grace: float = 2.0, spare: Collection[int] = ()) -> Ended:
    """End every process on this host that carries *mark* in its environment, with its descendants. Blocks.

    For trees that this process has not started; ``custody`` says whose. Does nothing where there is no /proc.
    """
    look = census.Census().look

    def find(known: Collection[tuple[int, int]]) -> list[Process]:
        return census.tree(look(), mark=mark, known=known, spare=spare)

    return census.drive(census.ladder(find, grace))


async def in_thread(call: Callable[..., Ended], *arguments: object) -> Ended:
    """Run a blocking end of trees beside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, partial(call, *arguments))
