"""From a definition or a decorated function to the adapter that runs it."""

from __future__ import annotations

from typing import Any

from orchestrator.agents.command import CommandAgent
from orchestrator.agents.functions import AgentFunction
from orchestrator.agents.protocol import Agent
from orchestrator.agents.python import PythonAgent
from orchestrator.domain.given import AgentDefinition
from orchestrator.errors import InvalidInput


def build(given: AgentDefinition | AgentFunction[..., Any] | Agent) -> Agent:
    """The agent for *given*; an agent is returned as it is. Raises InvalidInput for one that cannot work here."""
    if isinstance(given, AgentFunction):
        return PythonAgent.from_function(given)
    if not isinstance(given, AgentDefinition):
        return given
    if given.command is not None:
        return CommandAgent(given)
    if given.python is not None:
        return PythonAgent.from_definition(given)
    if given.http is not None:
        from orchestrator.agents.http import HttpAgent

        return HttpAgent(given)
    if given.acp is not None:
        from orchestrator.agents.acp import AcpAgent

        return AcpAgent(given)
    if given.plugin is not None:
        from orchestrator.agents.plugins import make

        return make(given)
    raise InvalidInput(f"agent {given.name!r}: expected one of command, python, http, acp, plugin", agent=given.name)


__all__ = ["build"]
