"""Durable AI-agent tasks out of PostgreSQL. What is named here is the public surface; all of it is loaded lazily.

Importing this package opens nothing, reads no environment and configures no logging.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.agents.functions import Context, Permanent, RateLimited, StepResult, Transient, agent
    from orchestrator.agents.protocol import Agent, AgentDefaults, Live, Stop
    from orchestrator.aio import AsyncOrchestrator
    from orchestrator.domain.entities import Run, Task
    from orchestrator.domain.outcome import Budget, Claim, Outcome, RetryPolicy, Usage
    from orchestrator.domain.words import OutcomeClass, TaskStatus
    from orchestrator.errors import (
        ClaimLost,
        Conflict,
        DatabaseUnavailable,
        InvalidInput,
        InvalidPlan,
        InvalidTransition,
        NotFound,
        OrchestratorError,
        SchemaOutOfDate,
        UnknownAgent,
        WaitTimeout,
    )
    from orchestrator.repositories.runs import RunRepository
    from orchestrator.repositories.tasks import TaskRepository
    from orchestrator.service import Orchestrator
    from orchestrator.settings import Settings, __version__
    from orchestrator.worker import Watchdog, Worker

_HOMES = {
    "orchestrator.agents.functions": ("Context", "Permanent", "RateLimited", "StepResult", "Transient", "agent"),
    "orchestrator.agents.protocol": ("Agent", "AgentDefaults", "Live", "Stop"),
    "orchestrator.aio": ("AsyncOrchestrator",),
    "orchestrator.domain.entities": ("Run", "Task"),
    "orchestrator.domain.outcome": ("Budget", "Claim", "Outcome", "RetryPolicy", "Usage"),
    "orchestrator.domain.words": ("OutcomeClass", "TaskStatus"),
    "orchestrator.errors": (
        "ClaimLost",
        "Conflict",
        "DatabaseUnavailable",
        "InvalidInput",
        "InvalidPlan",
        "InvalidTransition",
        "NotFound",
        "OrchestratorError",
        "SchemaOutOfDate",
        "UnknownAgent",
        "WaitTimeout",
    ),
    "orchestrator.repositories.runs": ("RunRepository",),
    "orchestrator.repositories.tasks": ("TaskRepository",),
    "orchestrator.service": ("Orchestrator",),
    "orchestrator.settings": ("Settings", "__version__"),
    "orchestrator.worker": ("Watchdog", "Worker"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Agent",
    "AgentDefaults",
    "AsyncOrchestrator",
    "Budget",
    "Claim",
    "ClaimLost",
    "Conflict",
    "Context",
    "DatabaseUnavailable",
    "InvalidInput",
    "InvalidPlan",
    "InvalidTransition",
    "Live",
    "NotFound",
    "Orchestrator",
    "OrchestratorError",
    "Outcome",
    "OutcomeClass",
    "Permanent",
    "RateLimited",
    "RetryPolicy",
    "Run",
    "RunRepository",
    "SchemaOutOfDate",
    "Settings",
    "StepResult",
    "Stop",
    "Task",
    "TaskRepository",
    "TaskStatus",
    "Transient",
    "UnknownAgent",
    "Usage",
    "WaitTimeout",
    "Watchdog",
    "Worker",
    "__version__",
    "agent",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'orchestrator' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
