"""An agent from a package of its own: it greets whom the task names. ``plugin: greeter`` in a plan uses it."""

from __future__ import annotations

import asyncio

from orchestrator.agents.protocol import AgentDefaults, Live, Stop
from orchestrator.domain.given import AgentDefinition
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput


class Greeter:
    """Greets after ``pause`` seconds, unless it is asked to end before."""

    def __init__(self, given: AgentDefinition) -> None:
        self.name = given.name
        self.definition = given.hash if given.local else None
        self.defaults = AgentDefaults(given.max_retries, given.retry, given.budget)
        self.greeting = given.options.get("greeting", "Hello")
        self.pause = given.options.get("pause", 0)
        if not isinstance(self.greeting, str) or not self.greeting:
            raise InvalidInput(f"agent {given.name!r}: options.greeting: expected text, found {self.greeting!r}")

    async def execute(self, claim: Claim, live: Live, stop: Stop) -> Outcome:
        """Return the greeting as the result."""
        live.progress(0, "thinking of a name")
        try:
            await asyncio.wait_for(stop.wait(), self.pause)
        except TimeoutError:
            live.write("message", f"{self.greeting}, {claim.input}!")
            return Outcome(OutcomeClass.DONE, result=f"{self.greeting}, {claim.input}!")
        assert stop.reason is not None
        return Outcome(stop.reason, cause=str(stop.reason), message=stop.message)

    async def aclose(self) -> None:
        """Nothing is kept open."""


def make(given: AgentDefinition) -> Greeter:
    """Return the agent of *given*: what the entry point names."""
    return Greeter(given)
