"""Running agents in tests: a claim, a ``Live`` that remembers, and one execution from start to end."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from orchestrator.agents.protocol import Agent, Stop
from orchestrator.domain.outcome import Claim, Outcome, Usage
from orchestrator.domain.words import OutcomeClass

FAKE = (sys.executable, str(Path(__file__).parent / "inputs" / "fake_agent.py"))
"""The stand-in agent: append a mode and its arguments."""


class Heard:
    """A ``Live`` that keeps everything."""

    def __init__(self) -> None:
        self.written: list[tuple[str, str]] = []
        self.kept: dict[str, Any] = {}
        self.sizes = 0
        self.progressed: list[tuple[float | None, str | None]] = []
        self.used: list[Usage] = []
        self.sessions: list[str] = []
        self.spaces: list[dict[str, Any]] = []
        self.activities: list[str | None] = []

    def write(self, kind: str, text: str, size: int | None = None) -> None:
        self.written.append((kind, text))
        if kind in ("stdout", "stderr"):
            self.sizes += len(text.encode()) if size is None else size

    def progress(self, percent: float | None, message: str | None) -> None:
        self.progressed.append((percent, message))

    def usage(self, usage: Usage) -> None:
        self.used.append(usage)

    def session(self, session: str) -> None:
        self.sessions.append(session)

    def keep(self, name: str, text: str) -> Future[Any]:
        kept: Future[Any] = Future()
        kept.set_result(self.kept.setdefault(name, json.loads(text)))
        return kept

    def activity(self, what: str | None) -> None:
        self.activities.append(what)

    def workspace(self, told: dict[str, Any]) -> None:
        self.spaces.append(told)

    def text(self, kind: str = "stdout") -> str:
        return "".join(text for each, text in self.written if each == kind)


class Forgetful(Heard):
    """A ``Live`` that only counts, for agents that say gigabytes."""

    def write(self, kind: str, text: str, size: int | None = None) -> None:
        self.sizes += size or 0


def a_claim(**fields: Any) -> Claim:
    """A claim of task 7, attempt 1, with these fields."""
    given: dict[str, Any] = {
        "task_id": 7,
        "attempt": 1,
        "claimed_by": uuid4(),
        "agent": "coder",
        "started_at": datetime.now(UTC),
    }
    return Claim(**{**given, **fields})


async def until(condition: Callable[[], Any], timeout: float = 30) -> Any:
    """The first true value of *condition*, while the event loop goes on."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still not true after {timeout} s"
        await asyncio.sleep(0.005)
    return value


PART = """
import fcntl, os, struct, termios
def part(data):
    os.write(1, data)
    while struct.unpack("i", fcntl.ioctl(1, termios.FIONREAD, bytes(4)))[0]:
        os.sched_yield()
"""
"""Code of an agent: ``part(data)`` writes to stdout and returns when it has been read, so that the next is a read of its own."""


def execute(
    agent: Agent,
    claim: Claim | None = None,
    live: Heard | None = None,
    *,
    when: Callable[[Heard], Any] | None = None,
    reason: OutcomeClass = OutcomeClass.CANCELLED,
    patience: float = 30,
) -> Outcome:
    """One execution; with *when*, it is asked to end for *reason* as soon as that is true, after *patience* s at most."""
    heard = live or Heard()

    async def both() -> Outcome:
        stop = Stop()
        running = asyncio.ensure_future(agent.execute(claim or a_claim(), heard, stop))
        if when is not None:
            await until(lambda: running.done() or when(heard), patience)
            stop.request(reason)
        return await running

    return asyncio.run(both())


def run_async(main: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine function to its end."""

    async def call() -> Any:
        return await main()

    return asyncio.run(call())


def pids_in(path: Path) -> set[int]:
    """The pids that the ``beat`` modes of the stand-in wrote to a file."""
    if not path.exists():
        return set()
    return {int(line.split()[0]) for line in path.read_text().splitlines() if line.count(" ") == 1}


def is_running(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in "ZX"


def descriptors() -> set[str]:
    """What this process has open, as names."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


WORKER = UUID("00000000-0000-4000-8000-00000000abcd")
