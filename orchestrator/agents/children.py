"""The worker's side of warm child processes: ``Child`` is one of them, ``Pool`` all of an agent's.

A child runs one task at a time, so that stopping a task never hits another one, and is used again until it has run
``tasks_per_child``. The pool starts children as they are needed: up to the number of processors at once, and more
while tasks wait for longer than a moment (their functions block, so more of them is what helps).
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.agents import census, child
from orchestrator.agents.faults import Fault
from orchestrator.agents.processes import ProcessTree, spawn
from orchestrator.agents.protocol import Live
from orchestrator.domain.words import OutcomeClass

WAIT_BEFORE_MORE = 0.05
"""Seconds that a task waits for a busy child before the pool grows beyond the number of processors."""
IDLE_SECONDS = 60.0
_READ = 1 << 18
_STREAM_READ = 1 << 16
_ROOT = str(Path(__file__).resolve().parents[2])


class StartFailed(Exception):
    """A child could not load its function, or could not be started."""

    def __init__(self, fault: Fault, trace: str = "") -> None:
        super().__init__(fault.message)
        self.fault = fault
        self.trace = trace


class Lifeline:
    """A pipe of which this process holds the writing end until it dies; every child waits at the other end."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.read_end, self.write_end = os.pipe()


_lifeline: Lifeline | None = None


def lifeline() -> int:
    """The reading end of this process's lifeline."""
    global _lifeline
    if _lifeline is None or _lifeline.pid != os.getpid():
        _lifeline = Lifeline()
    return _lifeline.read_end


class Child:
    """One child process. ``on_frame`` of the running task gets what it says; ``run`` resolves with its ``end``."""

    def __init__(self, tree: ProcessTree, sock: socket.socket, on_gone: Callable[[Child], None]) -> None:
        self.tree = tree
        self.tasks = 0
        self.idle_since = 0.0
        self.gone = False
        self.usable = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._on_gone = on_gone
        self._held = bytearray()
        self._unsent = bytearray()
        self._end: asyncio.Future[dict[str, Any] | None] | None = None
        self._on_frame: Callable[[dict[str, Any]], None] | None = None
        self._live: Live | None = None
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}
        self._fds = {"stdout": tree.stdout, "stderr": tree.stderr}
        tree.stdout = tree.stderr = -1
        self._loop.add_reader(sock.fileno(), self._readable)
        for stream, fd in self._fds.items():
            self._loop.add_reader(fd, self._read_stream, stream)
        tree.exited.add_done_callback(self._exited)

    def run(
        self, task: dict[str, Any], live: Live, on_frame: Callable[[dict[str, Any]], None]
    ) -> asyncio.Future[dict[str, Any] | None]:
        """Start a task; the future is its ``end`` frame, None if the child ended without one."""
        self.tasks += 1
        self._live, self._on_frame = live, on_frame
        self._decoders.clear()
        self._end = self._loop.create_future()
        if self.gone:
            self._end.set_result(None)
        else:
            self.send(task)
        return self._end

    def finish(self) -> None:
        """Take the rest of the task's output and forget the task."""
        self._drain()
        if self._live is not None:
            for stream, decoder in self._decoders.items():
                if text := decoder.decode(b"", final=True):
                    self._live.write(stream, text, 0)
        self._live = self._on_frame = self._end = None

    def send(self, frame: dict[str, Any]) -> None:
        """Write a frame without blocking; what the pipe does not take follows when it can."""
        data = child.pack(frame)
        if not self._unsent:
            try:
                sent = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:  # it has gone; ``_exited`` says so
                return
            if sent == len(data):
                return
            data = data[sent:]
            self._loop.add_writer(self._sock.fileno(), self._writable)
        self._unsent += data

    def _writable(self) -> None:
        try:
            sent = self._sock.send(self._unsent[: 1 << 20])
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._unsent.clear()
        else:
            del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> bool:
        try:
            data = self._sock.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._sock.fileno())
            return False
        held = self._held
        held += data
        start = 0
        while len(held) - start >= child.HEADER.size:
            (size,) = child.HEADER.unpack_from(held, start)
            if size > child.FRAME_LIMIT:
                self.tree.kill()  # nothing that our own code there writes is as long
                break
            stop = start + child.HEADER.size + size
            if len(held) < stop:
                break
            frame = json.loads(bytes(held[start + child.HEADER.size : stop]))
            start = stop
            self._take(frame)
        del held[:start]
        return True

    def _take(self, frame: dict[str, Any]) -> None:
        kind = frame["t"]
        if kind == "end":
            if self._end is not None and not self._end.done():
                self._end.set_result(frame)
        elif kind == "ready":
            if not self.ready.done():
                self.ready.set_result(None)
        elif kind == "failed":
            if not self.ready.done():
                fault = Fault(OutcomeClass.PERMANENT, "import_error", str(frame["message"]))
                self.ready.set_exception(StartFailed(fault, str(frame["trace"])))
        elif self._on_frame is not None:
            self._on_frame(frame)

    def _read_stream(self, stream: str) -> bool:
        fd = self._fds.get(stream, -1)
        if fd < 0:
            return False
        try:
            data = os.read(fd, _STREAM_READ)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(fd)
            os.close(fd)
            del self._fds[stream]
            return False
        if self._live is not None:
            decoder = self._decoders.get(stream)
            if decoder is None:
                decoder = self._decoders[stream] = codecs.getincrementaldecoder("utf-8")("replace")
            self._live.write(stream, decoder.decode(data), len(data))
        return True

    def _drain(self) -> None:
        """Read what is already in the pipes, and no more: something in the child may write without end."""
        for stream in tuple(self._fds):
            for _ in range(64):
                if not self._read_stream(stream):
                    break

    def _exited(self, _: object) -> None:
        """The process has ended: what it sent before still counts."""
        self.gone = True
        while self._sock.fileno() >= 0 and self._readable():
            pass
        if not self.ready.done():
            code = self.tree.returncode
            words = f"the child process ended with {code} before it was ready"
            self.ready.set_exception(StartFailed(Fault(OutcomeClass.TRANSIENT, "child_start", words)))
            self.ready.exception()
        if self._end is not None and not self._end.done():
            self._end.set_result(None)
        self._on_gone(self)

    def close(self) -> None:
        """Let go of a child: it ends by itself when it is idle. Its pipes are closed, its tree is not ended."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
        for fd in self._fds.values():
            self._loop.remove_reader(fd)
            os.close(fd)
        self._fds.clear()

    async def end(self, grace: float, stuck: Callable[[str | None], None] | None = None) -> census.Ended:
        """End the child with everything that it started, and forget it; see ``Tree.end_at_last`` for *stuck*."""
        self.gone = True
        try:
            ended = await (self.tree.end(grace) if stuck is None else self.tree.end_at_last(grace, stuck))
        finally:
            self.finish()
            self.close()
            self.tree.close()
        return ended

    async def retire(self, grace: float) -> census.Ended:
        """Let an idle child end by itself, or end it after *grace* seconds."""
        self.gone = True
        self.close()
        if not self.tree.exited.done():
            await asyncio.wait([self.tree.exited], timeout=grace)
        ended = census.Ended()
        try:
            if not self.tree.exited.done() or self.tree.has_rest():
                ended = await self.tree.end(0.0)
        finally:
            self.tree.close()
        return ended


class Pool:
    """The children of one agent."""

    def __init__(
        self,
        hello: Mapping[str, Any],
        environ: Mapping[str, str],
        *,
        cwd: str | None,
        tasks_per_child: int,
        kill_grace: float,
    ) -> None:
        self._hello = dict(hello)
        self._environ = dict(environ)
        self._cwd = cwd
        self._tasks_per_child = tasks_per_child
        self._kill_grace = kill_grace
        self._idle: list[Child] = []
        self._waiters: deque[tuple[float, asyncio.Future[Child]]] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._retiring: set[asyncio.Task[census.Ended]] = set()
        self._count = 0
        self._usable = 0
        self._owner: object = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._processors = os.cpu_count() or 1
        self._closed = False

    def acquire(self, owner: object) -> asyncio.Future[Child]:
        """A child that is free, as soon as there is one; give it back with ``release`` or ``discard``.

        *owner* is the worker under whose mark children start; those of an owner before are replaced. Cancelling the
        future gives up the place in the queue.
        """
        if owner != self._owner:
            # The old owner was declared dead, and whoever ends its trees must not find ours among them.
            self._owner = owner
            for idle in self._idle:
                self._retire(idle)
            self._idle.clear()
        future: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        while self._idle:
            found = self._idle.pop()
            if not found.gone:
                future.set_result(found)
                return future
        self._waiters.append((time.monotonic(), future))
        self._grow()
        return future

    def release(self, found: Child) -> None:
        """Give a child back after a task that left nothing behind."""
        found.finish()
        if found.gone:
            return
        if self._closed or found.tasks >= self._tasks_per_child:
            self._retire(found)
            self._grow()
            return
        while self._waiters:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(found)
                return
        found.idle_since = time.monotonic()
        self._idle.append(found)
        if self._idle_timer is None:
            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._shrink)

    async def discard(
        self, found: Child, grace: float, stuck: Callable[[str | None], None] | None = None
    ) -> census.Ended:
        """End a child with everything that it started; see ``Child.end``."""
        ended = await found.end(grace, stuck)
        self._grow()
        return ended

    def _grow(self) -> None:
        """Start children for those who wait: at once while there are few, later while there are many."""
        while self._waiters and self._waiters[0][1].done():
            self._waiters.popleft()
        if not self._waiters or self._closed:
            return
        waiting = sum(not future.done() for _, future in self._waiters) if len(self._waiters) < 64 else 64
        missing = min(waiting, self._processors) - len(self._starting)
        late = time.monotonic() - self._waiters[0][0] >= WAIT_BEFORE_MORE
        for _ in range(missing):
            if self._count >= self._processors and not late:
                break
            self._count += 1
            task = asyncio.get_running_loop().create_task(self._start())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WAIT_BEFORE_MORE, self._grow_later)

    def _grow_later(self) -> None:
        self._timer = None
        self._grow()

    async def _start(self) -> None:
        try:
            found = self._spawn()
        except OSError as error:
            self._count -= 1
            fault = Fault(OutcomeClass.TRANSIENT, "child_start", f"no child process could be started: {error}")
            self._fail(StartFailed(fault))
            return
        try:
            await found.ready
        except StartFailed as error:
            self._fail(error)
            await found.end(0.0)
            return
        except asyncio.CancelledError:
            await found.end(0.0)
            raise
        if not found.gone:
            found.usable = True
            self._usable += 1
        self.release(found)

    def _fail(self, error: StartFailed) -> None:
        """Tell everybody who waits: what keeps one child from loading keeps all.

        Where only the start failed (no memory, no more processes), they wait for the children that there are.
        """
        if error.fault.status is OutcomeClass.TRANSIENT and self._usable > 0:
            return
        waiters, self._waiters = self._waiters, deque()
        for _, waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    def _spawn(self) -> Child:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            tree = spawn(
                [sys.executable, "-P", "-c", child.BOOT, _ROOT, str(theirs.fileno()), str(lifeline())],
                env=self._environ,
                mark=census.new_mark(self._owner, 0, 0),
                cwd=self._cwd,
                pass_fds=(theirs.fileno(), lifeline()),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        found = Child(tree, ours, self._gone)
        found.send(self._hello)
        return found

    def _gone(self, found: Child) -> None:
        self._count -= 1
        self._usable -= found.usable
        if found in self._idle:
            self._idle.remove(found)
            self._retire(found)
        self._grow()

    def _retire(self, found: Child) -> None:
        task = asyncio.get_running_loop().create_task(found.retire(self._kill_grace))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _shrink(self) -> None:
        """Let go of children that nobody needed for a while; one stays warm."""
        self._idle_timer = None
        before = time.monotonic() - IDLE_SECONDS
        old = [idle for idle in self._idle[1:] if idle.idle_since <= before]
        for idle in old:
            self._idle.remove(idle)
            self._retire(idle)
        if len(self._idle) > 1 and not self._closed:
            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._shrink)

    async def aclose(self) -> None:
        """End all children that are not at work; those at work end with their task."""
        self._closed = True
        for timer in (self._timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        for task in tuple(self._starting):
            task.cancel()
        for idle in self._idle:
            self._retire(idle)
        self._idle.clear()
        self._fail(StartFailed(Fault(OutcomeClass.INTERRUPTED, "closed", "the agent was closed")))
        pending = [*self._starting, *self._retiring]
        if pending:
            await asyncio.gather(*pending, return_exceptions=True)
        with contextlib.suppress(ValueError):
            self._waiters.clear()
