"""Workers for tests: agents whose behaviour is a coroutine, and a worker that runs in a thread of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from sqlalchemy import Engine, text

from orchestrator.agents.protocol import AgentDefaults, Live, Stop
from orchestrator.domain.outcome import Budget, Claim, Outcome, RetryPolicy
from orchestrator.domain.words import OutcomeClass
from orchestrator.service import Orchestrator
from orchestrator.settings import Settings
from orchestrator.worker import Worker

Behaviour = Callable[[Claim, Live, Stop], Awaitable[Outcome]]

QUICK = Settings(heartbeat=0.2, lease=20.0, sweep=0.2, poll=0.1, grace=5.0)
"""A fast heartbeat and poll with a long lease: nothing is declared dead because this machine is slow."""


class FakeAgent:
    """An agent that does what *behave* says; by default it is done at once."""

    kill_grace = 0.2
    definition: str | None = None

    def __init__(self, name: str = "a", behave: Behaviour | None = None, max_retries: int | None = None) -> None:
        self.name = name
        self.defaults = AgentDefaults(max_retries, RetryPolicy(0.001, 1, 0.001), Budget())
        self.behave = behave
        self.started: list[int] = []
        self.closed = False

    async def execute(self, claim: Claim, live: Live, stop: Stop) -> Outcome:
        self.started.append(claim.task_id)
        if self.behave is None:
            return Outcome(OutcomeClass.DONE)
        return await self.behave(claim, live, stop)

    async def aclose(self) -> None:
        self.closed = True


async def until_stopped(_claim: Claim, _live: Live, stop: Stop) -> Outcome:
    """Work for ever; when asked to stop, end at once."""
    reason = await stop.wait()
    return Outcome(reason, message=stop.message)


class Gate:
    """A behaviour that waits until ``open`` is called, from any thread, or until it is asked to stop."""

    def __init__(self, outcome: Outcome | None = None) -> None:
        self.outcome = outcome or Outcome(OutcomeClass.DONE)
        self.inside = threading.Semaphore(0)
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._open = False

    async def __call__(self, _claim: Claim, _live: Live, stop: Stop) -> Outcome:
        event = asyncio.Event()
        stop.on_request(event.set)
        self._waiting.append((asyncio.get_running_loop(), event))
        self.inside.release()
        if not self._open:
            await event.wait()
        return self.outcome if stop.reason is None else Outcome(stop.reason, message=stop.message)

    def entered(self) -> None:
        """Wait until one more agent is inside."""
        assert self.inside.acquire(timeout=30), "no agent was started"

    def open(self) -> None:
        """Let all of them go on."""
        self._open = True
        for loop, event in self._waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)


class Working:
    """Runs a worker in a thread for the length of a block; ``result`` is what ``run`` returned."""

    def __init__(self, worker: Worker, *, until_idle: bool = False, grace: float = 0.0) -> None:
        self.worker = worker
        self.result: int | None = None
        self.error: BaseException | None = None
        self._grace = grace
        self._until_idle = until_idle
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.result = self.worker.run(until_idle=self._until_idle)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Working:
        self.thread.start()
        return self

    def join(self) -> None:
        """Wait for the worker's end."""
        self.thread.join(30)
        assert not self.thread.is_alive(), "the worker did not end"
        if self.error is not None:
            raise self.error

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        self.worker.stop(self._grace)
        self.thread.join(30)
        if kind is None:
            self.join()


def add(engine: Engine, count: int = 1, agent: str = "a", **columns: Any) -> list[int]:
    """Add plain tasks by SQL, as a foreign application would; return their ids."""
    names = ["agent", *columns]
    values = {"agent": agent, "count": count, **columns}
    statement = (
        f"INSERT INTO tasks ({', '.join(names)}) SELECT {', '.join(':' + name for name in names)}"
        " FROM generate_series(1, :count) RETURNING id"
    )
    with engine.begin() as connection:
        return sorted(connection.execute(text(statement), values).scalars())


def query(engine: Engine, statement: str, **values: Any) -> list[Any]:
    """The rows of any statement, committed."""
    with engine.begin() as connection:
        result = connection.execute(text(statement), values)
        return list(result.all()) if result.returns_rows else []


def statuses(engine: Engine) -> dict[str, int]:
    """How many tasks have which status."""
    return dict(query(engine, "SELECT status, count(*) FROM tasks GROUP BY status"))


def orchestrator(url: str, settings: Settings = QUICK) -> Orchestrator:
    """An orchestrator of its own; close it."""
    return Orchestrator(url, settings=settings)
