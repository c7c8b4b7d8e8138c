"""What an agent is to the rest of the product: one coroutine that turns a ``Claim`` into an ``Outcome``.

Reading order: ``Agent`` (what an adapter implements), ``Live`` (where it says what happens meanwhile), ``Stop`` (how it
is told to end). Nothing here knows SQL, the worker or the command line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from orchestrator.domain.given import AgentDefinition, Login
from orchestrator.domain.outcome import Budget, Claim, Outcome, RetryPolicy, Usage
from orchestrator.domain.values import value
from orchestrator.domain.words import OutcomeClass

LIMIT = "rate limit"
"""What an agent does that waits, by itself, until its provider lets it go on."""


@value
class AgentDefaults:
    """What a task of this agent gets for whatever it leaves open; None falls through to the product's defaults.

    ``model`` is no default of a task: it names the price of what the agent uses, where the agent names no model itself.
    """

    max_retries: int | None = None
    retry: RetryPolicy | None = None
    budget: Budget | None = None
    model: str | None = None


class Live(Protocol):
    """Where a running attempt says what happens. Every call returns at once, is safe from any thread, never raises."""

    def write(self, kind: str, text: str, size: int | None = None) -> None:
        """Add to the transcript. ``kind``: stdout, stderr, message, tool, result, note, error, answer.

        ``text`` is already decoded and redacted; ``size`` is the number of bytes that the agent wrote for it (default:
        its UTF-8 length). Order is kept for each kind.
        """

    def progress(self, percent: float | None, message: str | None) -> None:
        """Set what the task row shows; None leaves that half as it is."""

    def usage(self, usage: Usage) -> None:
        """Set this attempt's own part so far (a running total of the attempt, not a difference)."""

    def session(self, session: str) -> None:
        """Set the agent's own session id, kept for the next attempt."""

    def workspace(self, told: dict[str, Any]) -> None:
        """Set where the attempt works, kept for the next attempt."""

    def activity(self, what: str | None) -> None:
        """Say what it is doing: the tool that it waits for, or ``LIMIT``; None is between tools, in a model call."""

    def keep(self, name: str, text: str) -> Future[Any]:
        """Keep the JSON *text* as the checkpoint *name* for later attempts.

        The future has the value that is stored, once it is: that of the first write of the name, whoever made it. It has
        ClaimLost when the attempt lost its task, InvalidInput when there is no more room, DatabaseUnavailable at the end.
        """


class Stop:
    """A request to end an attempt, made at most once: the first reason wins. Made and awaited on the event loop.

    Reasons are outcome classes: cancelled, timed_out, stalled, over_budget, interrupted, lost.
    """

    def __init__(self) -> None:
        self.reason: OutcomeClass | None = None
        self.message: str | None = None
        self.left: str | None = None
        """What is still there although it was killed, in words."""
        self._asked = asyncio.Event()
        self._callbacks: list[Callable[[], None]] = []

    def request(self, reason: OutcomeClass, message: str | None = None) -> bool:
        """Ask for the end; False if it was asked for before."""
        if self.reason is not None:
            return False
        self.reason, self.message = reason, message
        self._asked.set()
        for callback in self._callbacks:
            callback()
        return True

    def on_request(self, callback: Callable[[], None]) -> None:
        """Call *callback* when the end is asked for, at once if it was: for those who would need a task to wait."""
        if self.reason is not None:
            callback()
        else:
            self._callbacks.append(callback)

    def stuck(self, left: str | None) -> None:
        """Say what is *left* after SIGKILL; None when it is gone. People are told, and the slot stays taken."""
        self.left = left

    async def wait(self) -> OutcomeClass:
        """Return the reason as soon as there is one."""
        await self._asked.wait()
        assert self.reason is not None
        return self.reason


class Agent(Protocol):
    """What does the work of a task.

    ``definition`` is None for an agent of the configuration or of code; for an agent of a plan file it is the hash of
    its definition, and only tasks with that hash are claimed for it.
    """

    @property
    def name(self) -> str: ...

    @property
    def definition(self) -> str | None: ...

    @property
    def defaults(self) -> AgentDefaults: ...

    async def execute(self, claim: Claim, live: Live, stop: Stop) -> Outcome:
        """Do the work of *claim* and say what came of it.

        Called on the worker's event loop, outside any transaction. When it returns, nothing that it started runs any
        more: it has ended its whole process tree, and says so in ``notes`` if that took force. Processes that it was asked
        to stop and that survive SIGKILL it waits for, however long, and names by ``stop.stuck``. It watches *stop*; once
        asked, it returns an outcome with ``status = stop.reason`` unless the work had already ended.
        ``Outcome.elapsed`` is set by the caller. Exceptions become ``transient`` outcomes.
        """

    async def aclose(self) -> None:
        """Free what is shared between executions (warm child processes). Called once, at the worker's end."""


class Defined:
    """What an agent that a file defines says of itself to those who claim for it."""

    def __init__(self, definition: AgentDefinition) -> None:
        self._definition = definition

    @property
    def name(self) -> str:
        """The routing key."""
        return self._definition.name

    @property
    def definition(self) -> str | None:
        """The hash that a task must carry, for an agent of a plan file."""
        return self._definition.hash if self._definition.local else None

    @property
    def login(self) -> Login | None:
        """The account that it shares with others."""
        return self._definition.login

    @property
    def defaults(self) -> AgentDefaults:
        """What tasks of this agent get for what they leave open."""
        given = self._definition
        return AgentDefaults(given.max_retries, given.retry, given.budget, given.model)


class Describes(Protocol):
    """An agent that can say what it is, for ``agents`` and ``doctor``."""

    def describe(self) -> dict[str, Any]:
        """Kind, command or callable, and limits; never a secret's value."""
