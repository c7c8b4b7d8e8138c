"""Every error that this package raises on purpose, as one tree.

    OrchestratorError            code, hint, ids; exit code of the command line
    ├── InvalidInput        2    bad values, plans, settings; nothing was changed
    │   ├── InvalidPlan          every fault of a plan file, with line numbers
    │   └── UnknownAgent         an agent that no configuration names
    ├── WaitsForPerson      3
    ├── NotFound            4    a task, run, worker, plan or agent that is not there
    ├── Conflict            5    the present state does not allow it
    │   ├── InvalidTransition    a move that TRANSITIONS does not have
    │   └── ClaimLost            the fence (task_id, attempt, claimed_by) no longer matches
    ├── DatabaseUnavailable 6    not reachable; the driver's error is ``__cause__``
    │   ├── SchemaOutOfDate      the schema is not one that this version can work with
    │   └── EmbeddedServerError  the embedded PostgreSQL could not be started
    ├── WaitTimeout              ``wait`` had a limit; also a TimeoutError
    └── InternalError       70

A message names the thing and its id, what was expected and what was found; ``hint`` is the next step for an operator.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, ClassVar


class OrchestratorError(Exception):
    """The root of the tree. ``ids`` holds what the error speaks of, by kind: ``{"task": 7, "attempt": 2}``."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, hint: str | None = None, **ids: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.ids: dict[str, Any] = ids


class InvalidInput(OrchestratorError):
    """A value that cannot be accepted. Nothing was changed."""

    code = "invalid_input"
    exit_code = 2


class InvalidPlan(InvalidInput):
    """A plan file with faults; ``faults`` lists them all as (line, message), line 0 for the file as a whole."""

    code = "invalid_plan"

    def __init__(self, message: str, faults: list[tuple[int, str]], *, hint: str | None = None, **ids: Any) -> None:
        super().__init__(message, hint=hint, **ids)
        self.faults = faults


class UnknownAgent(InvalidInput):
    """An agent name that no configuration knows."""

    code = "unknown_agent"


class WaitsForPerson(OrchestratorError):
    """Nothing is left to do here until a person has answered."""

    code = "waits_for_person"
    exit_code = 3


class NotFound(OrchestratorError):
    """The thing that was named does not exist."""

    code = "not_found"
    exit_code = 4


class Conflict(OrchestratorError):
    """The present state does not allow what was asked."""

    code = "conflict"
    exit_code = 5


class InvalidTransition(Conflict):
    """A task was asked to make a move that ``TRANSITIONS`` does not have."""

    code = "invalid_transition"


class ClaimLost(Conflict):
    """This attempt no longer owns its task: somebody took it back. Normal; the outcome is kept as ``late``."""

    code = "claim_lost"


class DatabaseUnavailable(OrchestratorError):
    """The database cannot be reached, or refused the work for now."""

    code = "database_unavailable"
    exit_code = 6


class SchemaOutOfDate(DatabaseUnavailable):
    """The schema of the database is not one that this version works with."""

    code = "schema_out_of_date"


class EmbeddedServerError(DatabaseUnavailable):
    """The embedded PostgreSQL could not be found, started or stopped."""

    code = "embedded_server"


class WaitTimeout(OrchestratorError, TimeoutError):
    """The task has not ended within the time that the caller of ``wait`` gave it. It goes on."""

    code = "wait_timeout"
    exit_code = 1


class InternalError(OrchestratorError):
    """A fault of ours."""

    code = "internal"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about the unknown *name*: the nearest known one, else all that there are."""
    names = sorted(set(known))
    near = get_close_matches(name.lower(), [each.lower() for each in names], n=1, cutoff=0.6)
    if near:
        return "; did you mean " + repr(next(each for each in names if each.lower() == near[0])) + "?"
    if not names:
        return "; there are none"
    return "; known: " + ", ".join(names[:12]) + (", …" if len(names) > 12 else "")


def unknown_agent(name: str, known: Iterable[str]) -> UnknownAgent:
    """The error for an agent name that nothing here defines, with the nearest one that something does."""
    names = sorted(known)
    near = get_close_matches(name, names, 1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else (f"known here: {', '.join(names)}" if names else "no agent is configured; define it in orchestrator.toml")
    )
    return UnknownAgent(f"no agent is called {name!r}", hint=hint, agent=name)
