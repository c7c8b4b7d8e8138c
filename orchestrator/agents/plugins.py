"""Agents from other packages, by the entry-point group ``orchestrator.agents``.

An entry point names a function that takes an ``AgentDefinition`` (whose ``options`` are the plug-in's own keys) and
returns an ``Agent``. ``plugin: NAME`` in a plan or in ``orchestrator.toml`` uses it. Only the one that is named is
imported, when the agent is built.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from orchestrator.agents.protocol import Agent
from orchestrator.domain.given import AgentDefinition
from orchestrator.errors import InvalidInput, OrchestratorError, did_you_mean

GROUP = "orchestrator.agents"


def names() -> list[str]:
    """Return the names of the plug-ins that are installed."""
    return sorted({each.name for each in entry_points(group=GROUP)})


def make(definition: AgentDefinition) -> Agent:
    """Return the agent that the plug-in makes of *definition*.

    Raises ``InvalidInput`` when it is not installed, cannot be imported, refuses the definition, or returns no agent.
    """
    where, name = f"agent {definition.name!r}", definition.plugin or ""
    found = [each for each in entry_points(group=GROUP) if each.name == name]
    if not found:
        raise InvalidInput(
            f"{where}: plug-in {name!r} is not installed{did_you_mean(name, names())}",
            hint="install the package that brings it, next to orchestrator",
            agent=definition.name,
        )
    try:
        made = found[0].load()(definition)
    except OrchestratorError:
        raise
    except Exception as error:
        raise InvalidInput(
            f"{where}: plug-in {name!r} ({found[0].value}) failed: {type(error).__name__}: {error}",
            agent=definition.name,
        ) from error
    lacks = [each for each in ("name", "definition", "defaults", "execute", "aclose") if not hasattr(made, each)]
    if lacks:
        raise InvalidInput(
            f"{where}: plug-in {name!r} ({found[0].value}) returned {type(made).__name__}, which has no {lacks[0]}",
            agent=definition.name,
        )
    agent: Agent = made
    return agent


__all__ = ["GROUP", "make", "names"]
