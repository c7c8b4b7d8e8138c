"""Commands that the contract names and that are not part of this version: listed, and refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from orchestrator.cli import state
from orchestrator.cli.options import JsonOption
from orchestrator.errors import InvalidInput

PANEL = "Not part of this version yet"

COMMANDS = {
    "questions": "Show what waits for a person.",
    "approve": "Let a task that waits for approval start.",
    "deny": "Refuse a task that waits for approval.",
    "answer": "Answer the question of a task.",
    "limit": "Limit how much of an agent runs at once, its rate or its spend.",
    "schedule": "Add tasks by the clock.",
    "why": "Say why a task does not run.",
    "metrics": "Print metrics as Prometheus text.",
    "doctor": "Look for what is wrong, with remedies.",
}

INSTEAD = {
    "questions": "orchestrator list --status waiting shows tasks that wait",
    "limit": "orchestrator pause AGENT stops one; worker --concurrency bounds what one process runs",
    "schedule": "add --at takes a time; cron can call orchestrator add --unique-key KEY",
    "why": "orchestrator show ID says what there is to say, orchestrator alerts what is wrong",
    "metrics": "orchestrator status --json has the numbers",
    "doctor": "orchestrator alerts says what is wrong, orchestrator db status how the database is",
}


def register(app: typer.Typer) -> None:
    """Add the commands to *app*."""
    for name, said in COMMANDS.items():
        app.command(
            name,
            help=f"{said}\n\nNot part of this version yet.",
            short_help=said,
            rich_help_panel=PANEL,
            context_settings={"ignore_unknown_options": True},
        )(_refusing(name))


def _refusing(name: str) -> Callable[..., None]:
    def refuse(
        context: typer.Context,
        _arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENT]...", hidden=True)] = None,
        as_json: JsonOption = False,
    ) -> None:
        state.of(context, as_json)
        raise InvalidInput(f"{name!r} is not part of this version yet", hint=INSTEAD.get(name))

    return refuse
