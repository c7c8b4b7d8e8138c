"""What is wrong, and why: ``why`` of one task, ``doctor`` of the whole installation, ``metrics`` for those who watch."""

from __future__ import annotations

import sys

import typer

from orchestrator.cli import options, printing, state
from orchestrator.cli.options import IdArgument, JsonOption


def why(context: typer.Context, task_id: IdArgument, as_json: JsonOption = False) -> None:
    """Say why a task does not run, or what it is doing.

    The binding reason first, each with its number and the command that would
    change it; last what was checked and is not the cause.

    \b
    Examples:
      orchestrator why 7
      orchestrator why 7 --json | jq .reasons[0]
    """
    own = state.of(context, as_json)
    wanted = options.number(task_id, "task")
    with own.open() as orchestrator:
        facts = orchestrator.diagnosis.facts(wanted)
    from orchestrator.dashboard.terminal import look_for
    from orchestrator.dashboard.why import diagnose, render_why, why_json

    found = diagnose(facts)
    if as_json:
        printing.document(why_json(found))
    else:
        printing.lines(render_why(found, look_for(sys.stdout)))
