"""Which commands there are, under which heading, and where each of them lives.

The top level knows names and first lines only; a command's module is imported when the command is called or asked for
its help. So ``orchestrator --help`` costs what typer costs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command

if TYPE_CHECKING:
    from collections.abc import Callable

WORK, LOOK, CHANGE, OPERATE = "Work", "Look", "Change tasks", "Operate"
LATER = "Not part of this version yet"

SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
"""How every level is set up: help as plain text, errors left to the boundary."""


class Place(NamedTuple):
    """Where a command is: its heading, its module, and its first line."""

    heading: str
    module: str
    summary: str


COMMANDS: dict[str, Place] = {
    "run": Place(WORK, "running", "Work a plan to its end, here: submit it, run it, show it."),
    "submit": Place(WORK, "adding", "Submit a plan for workers elsewhere; all of it or nothing."),
    "add": Place(WORK, "adding", "Add one task."),
    "worker": Place(WORK, "running", "Work on tasks until stopped."),
    "watchdog": Place(WORK, "running", "Take back tasks of dead workers, raise alerts."),
    "list": Place(LOOK, "looking", "List tasks, newest first."),
    "show": Place(LOOK, "looking", "Show a task: who, when, why, and what to do next."),
    "runs": Place(LOOK, "looking", "List the ended attempts of a task, the first one first."),
    "logs": Place(LOOK, "logs", "Print what an attempt said."),
    "why": Place(LOOK, "diagnosing", "Say why a task does not run, or what it is doing."),
    "status": Place(LOOK, "looking", "Show the queue in a few lines."),
    "alerts": Place(LOOK, "looking", "List what a person should look at; exit 1 if there is any."),
    "dashboard": Place(LOOK, "looking", "Show the queue live."),
    "costs": Place(LOOK, "looking", "Add up tokens and USD."),
    "cancel": Place(CHANGE, "changing", "Cancel tasks, and with them those that need them."),
    "retry": Place(CHANGE, "changing", "Open failed or cancelled tasks again."),
    "hold": Place(CHANGE, "changing", "Let nobody start these tasks until they are released."),
    "release": Place(CHANGE, "changing", "Undo hold."),
    "priority": Place(CHANGE, "changing", "Give tasks another priority."),
    "questions": Place(CHANGE, "asking", "List what waits for a person."),
    "approve": Place(CHANGE, "asking", "Approve what tasks ask: they go on."),
    "deny": Place(CHANGE, "asking", "Refuse what tasks ask: they are cancelled."),
    "answer": Place(CHANGE, "asking", "Answer the question of a task."),
    "agents": Place(OPERATE, "looking", "List the agents that are configured here or have work."),
    "workers": Place(OPERATE, "looking", "List the workers that live."),
    "pause": Place(OPERATE, "changing", "Let no worker start tasks of an agent."),
    "resume": Place(OPERATE, "changing", "Undo pause, and close an open breaker."),
    "limit": Place(OPERATE, "changing", "Say how many tasks of a concurrency key run at once."),
    "drain": Place(OPERATE, "changing", "Let a worker finish what it has, and end."),
    "audit": Place(OPERATE, "looking", "List who did what, newest first."),
    "prune": Place(OPERATE, "changing", "Remove what ended long ago."),
    "workspaces": Place(OPERATE, "workspaces", "List the workspaces on this host, and remove what is certain."),
    "doctor": Place(OPERATE, "diagnosing", "Look for what is wrong, with remedies."),
    "metrics": Place(OPERATE, "diagnosing", "Print metrics as Prometheus text."),
    "db": Place(OPERATE, "database", "The schema, and the embedded PostgreSQL of this user."),
    "schedule": Place(LATER, "later", "Add tasks by the clock."),
}

SUMMARIES = {name: place.summary for name, place in COMMANDS.items()}

_ANYTHING = {"ignore_unknown_options": True}
_CONTEXT: dict[str, dict[str, Any]] = {
    "priority": _ANYTHING,  # a negative number must not be taken for an option
    **{name: _ANYTHING for name, place in COMMANDS.items() if place.heading == LATER},
}


def load(name: str) -> Any:
    """Import the command *name* and return it as typer has it."""
    place = COMMANDS[name]
    module = import_module(f"orchestrator.cli.{place.module}")
    if place.heading == LATER:
        function: Callable[..., Any] = module.refusing(name)
    elif name == "db":
        return get_command(module.app)
    else:
        function = getattr(module, "list_" if name == "list" else name)
    alone = typer.Typer(**SETTINGS)
    context = {**SETTINGS["context_settings"], **_CONTEXT.get(name, {})}
    alone.command(name, context_settings=context)(function)
    return get_command(alone)


class Commands(TyperGroup):
    """The top level: commands by heading, each loaded when it is needed."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._loaded: dict[str, Any] = {}
        # Only the names are looked at, for the nearest one to a wrong one.
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, None for a name that there is not."""
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self._loaded:
            self._loaded[cmd_name] = load(cmd_name)
        return self._loaded[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one list of commands for each heading."""
        width = max(map(len, COMMANDS))
        for heading in dict.fromkeys(place.heading for place in COMMANDS.values()):
            with formatter.section(heading):
                rows = [(n.ljust(width), place.summary) for n, place in COMMANDS.items() if place.heading == heading]
                formatter.write_dl(rows)
