"""Commands that the contract names and that are not part of this version: listed, and refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from orchestrator.cli import state
from orchestrator.cli.commands import SUMMARIES
from orchestrator.cli.options import JsonOption
from orchestrator.errors import InvalidInput

INSTEAD = {
    "schedule": "add --at takes a time; cron can call orchestrator add --unique-key KEY",
}


def refusing(name: str) -> Callable[..., None]:
    """The command *name*: it takes anything and refuses it."""

    def refuse(
        context: typer.Context,
        _arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENT]...", hidden=True)] = None,
        as_json: JsonOption = False,
    ) -> None:
        state.of(context, as_json)
        raise InvalidInput(f"{name!r} is not part of this version yet", hint=INSTEAD.get(name))

    refuse.__doc__ = f"{SUMMARIES[name]}\n\nNot part of this version yet."
    return refuse
