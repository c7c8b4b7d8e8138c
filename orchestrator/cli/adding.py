"""``add`` and ``submit``: tasks into the queue."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import completing, options, printing, state
from orchestrator.cli.options import JsonOption
from orchestrator.errors import InvalidInput, UnknownAgent, did_you_mean

if TYPE_CHECKING:
    from orchestrator.plans import Plan
    from orchestrator.repositories.plans import Submitted
    from orchestrator.service import Orchestrator


def add(
    context: typer.Context,
    agent: Annotated[
        str, typer.Argument(metavar="AGENT", help="The agent that is to do it.", autocompletion=completing.agents)
    ],
    text: Annotated[str | None, typer.Option("--input", "-i", metavar="TEXT", help="The prompt, as it is.")] = None,
    input_file: Annotated[
        str | None, typer.Option("--input-file", metavar="FILE", help="The prompt from a file; - is standard input.")
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option("--param", metavar="K=V", help="A value for the agent's {K}. Repeatable.")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="What people see of it.")] = None,
    priority: Annotated[int, typer.Option("--priority", metavar="N", help="Larger is claimed first.")] = 0,
    at: Annotated[str | None, typer.Option("--at", metavar="T", help="Not before: an ISO time, +30s, now+2h.")] = None,
    max_retries: Annotated[
        int | None, typer.Option("--max-retries", metavar="N", min=0, help="Failures allowed; else the agent's.")
    ] = None,
    budget_seconds: Annotated[
        str | None, typer.Option("--budget-seconds", metavar="S", help="Longest time of an attempt: 90, 30m.")
    ] = None,
    budget_tokens: Annotated[
        int | None, typer.Option("--budget-tokens", metavar="N", min=1, help="Most tokens of all attempts together.")
    ] = None,
    budget_usd: Annotated[
        float | None, typer.Option("--budget-usd", metavar="X", help="Most USD of all attempts together.")
    ] = None,
    budget_turns: Annotated[
        int | None, typer.Option("--budget-turns", metavar="N", min=1, help="Most turns of all attempts together.")
    ] = None,
    on_limit: Annotated[
        str | None, typer.Option("--on-limit", metavar="WHAT", help="Then: fail (default), finish_turn or ask.")
    ] = None,
    unique_key: Annotated[
        str | None, typer.Option("--unique-key", metavar="KEY", help="Add nothing while a live task has this key.")
    ] = None,
    concurrency_key: Annotated[
        str | None, typer.Option("--concurrency-key", metavar="KEY", help="Run one task of this key at a time.")
    ] = None,
    after: Annotated[
        list[str] | None, typer.Option("--after", metavar="ID", help="Only when these tasks are done. Repeatable.")
    ] = None,
    approval: Annotated[bool, typer.Option("--approval", help="Start only when a person has said approve ID.")] = False,
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="K=V", help="For list --tag. Repeatable.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Take an agent's name that is configured only elsewhere.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Add one task.

    The input is optional; standard input is read only by --input-file -.

    \b
    Examples:
      orchestrator add coder --input "Fix the failing test" --title fix-test
      git diff | orchestrator add review --input-file - --priority 5
      orchestrator add nightly --at +2h --unique-key nightly-report --json
    """
    own = state.of(context, as_json)
    values: dict[str, Any] = {
        "title": title,
        "priority": priority,
        "approval": approval,
        "max_retries": max_retries,
        "budget_seconds": None if budget_seconds is None else options.seconds(budget_seconds, "--budget-seconds"),
        "budget_tokens": budget_tokens,
        "budget_usd": budget_usd,
        "budget_turns": budget_turns,
        "on_limit": on_limit,
        "unique_key": unique_key,
        "concurrency_key": concurrency_key,
        "after": options.task_ids(after) or None,
        "tags": options.pairs(tag, "--tag") or None,
        "params": options.pairs(param, "--param") or None,
    }
    span = None if at is None else options.ahead(at)
    if at is not None and span is None:
        values["at"] = options.instant(at)
    known = own.agents()
    if not force:
        check_agent(agent, known)
    if agent in known:
        from orchestrator.plans import argv_faults

        if faults := argv_faults(known[agent], values["params"]):
            raise InvalidInput(f"agent {agent!r}: {faults[0]}", hint="give it with --param NAME=VALUE", agent=agent)
    given = _input(text, input_file)
    if agent in known and known[agent].python:
        from orchestrator.agents.python import input_fault

        if said := input_fault(known[agent], given):
            raise InvalidInput(f"input of agent {agent!r}: {said}", agent=agent)
    from orchestrator.domain.outcome import traceparent

    with own.open() as orchestrator:
        if span is not None:
            values["at"] = options.later_than(orchestrator.reading.now(), span)
        values["traceparent"] = traceparent(os.environ.get("TRACEPARENT"))
        added = orchestrator.add(agent, given, **{name: value for name, value in values.items() if value is not None})
    if as_json:
        printing.document({"id": added.id, "created": added.created, "status": added.status})
    elif added.created:
        printing.text(f"task {added.id} added, {added.status}")
    else:
        printing.text(f"task {added.id} has this unique key already, {added.status}; nothing was added")


FORCE_HINT = "define it in orchestrator.toml under [agents.NAME], or use --force if it is configured elsewhere"


def check_agent(name: str, known: Mapping[str, Any], *, hint: str = FORCE_HINT) -> None:
    """Raise UnknownAgent, with the nearest name, unless *name* is configured."""
    if name not in known:
        where = did_you_mean(name, known) if known else "; no agent is configured"
        raise UnknownAgent(
            f"no agent is called {name!r}{where}",
            hint=hint,
            agent=name,
        )


def _input(text: str | None, file: str | None) -> str | None:
    if text is not None and file is not None:
        raise InvalidInput("give either --input or --input-file, not both")
    if file is None:
        return text
    return file_text(file, "--input-file")


def file_text(file: str, option: str) -> str:
    """The text in *file*, ``-`` is standard input. Raises InvalidInput for what cannot be read or is no UTF-8."""
    shown = "standard input" if file == "-" else file
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise InvalidInput(f"{option}: {shown} cannot be read: {error.strerror or error}") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{option}: {shown} is not UTF-8 text: byte {error.start + 1} is 0x{data[error.start]:02x}"
        ) from None


# -- plans -------------------------------------------------------------------------------------------------------------

PlanArgument = Annotated[
    str, typer.Argument(metavar="PLAN", help="A .yaml, .toml or .jsonl file; - is JSON lines on stdin.")
]
AgentForAll = Annotated[str | None, typer.Option("--agent", "-a", metavar="NAME", help="For tasks that name no agent.")]
MapOption = Annotated[
    list[str] | None,
    typer.Option("--map", metavar="FIELD=THEIRS", help="JSON lines of another tool: which of their fields is which."),
]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Make all tasks anew, done ones too.")]
PlanNameOption = Annotated[str | None, typer.Option("--name", metavar="NAME", help="The plan's name, else the file's.")]


def read_plan(
    own: state.State,
    path: str,
    agent: str | None,
    map: list[str] | None,  # noqa: A002 - the option is --map
    name: str | None,
    *,
    skip_invalid: bool = False,
) -> Plan:
    """Read a plan, and tell its warnings. Raises InvalidPlan with all faults."""
    from orchestrator.plans import load_plan

    mapping = options.pairs([part for each in map or () for part in each.split(",")], "--map") or None
    plan = load_plan(
        path,
        agents=own.agents(),
        agent=agent,
        map=mapping,
        plan_name=name,
        skip_invalid=skip_invalid,
        prices=own.settings().prices,
    )
    for line, said in plan.warnings:
        printing.note(f"warning: {path}: " + (f"line {line}: {said}" if line else said))
    return plan


def submit_plan(orchestrator: Orchestrator, plan: Plan, *, fresh: bool) -> Submitted:
    """Submit *plan*, and name the tasks that it no longer has."""
    submitted = orchestrator.submit(plan, fresh=fresh)
    if submitted.removed:
        noun = "task is" if len(submitted.removed) == 1 else "tasks are"
        printing.note(
            f"note: {len(submitted.removed):,} {noun} no longer in the plan and left alone: "
            + options.shown_ids(submitted.removed)
        )
    return submitted


def submit(
    context: typer.Context,
    plan: PlanArgument,
    agent: AgentForAll = None,
    map: MapOption = None,  # noqa: A002 - the option is --map
    name: PlanNameOption = None,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Leave faulty tasks out instead of refusing the plan.")
    ] = False,
    plan_agents: Annotated[
        bool, typer.Option("--plan-agents", help="Take agents that the plan defines: work it with worker --plan FILE.")
    ] = False,
    fresh: FreshOption = False,
    as_json: JsonOption = False,
) -> None:
    """Submit a plan for workers elsewhere; all of it or nothing.

    Again later: what is unchanged stays, what changed is made anew.

    \b
    Examples:
      orchestrator submit plan.yaml
      orchestrator submit instances.jsonl --agent coder \\
          --map input=problem_statement --map unique_key=instance_id
    """
    own = state.of(context, as_json)
    read = read_plan(own, plan, agent, map, name, skip_invalid=skip_invalid)
    if read.agents and not plan_agents and any(task.agent in read.agents for task in read.tasks):
        names = ", ".join(sorted(read.agents))
        raise InvalidInput(
            f"{plan} defines agents of its own ({names}); no worker knows them unless it loads this plan",
            hint="work it here with orchestrator run, or use --plan-agents and start worker --plan FILE",
            plan=read.name,
        )
    with own.open() as orchestrator:
        submitted = submit_plan(orchestrator, read, fresh=fresh)
    created = sum(task.created for task in submitted.tasks)
    existing = len(submitted.tasks) - created
    if as_json:
        printing.document(
            {
                "plan": submitted.plan,
                "created": created,
                "existing": existing,
                "refused": [{"line": line, "message": message} for line, message in read.refused],
                "tasks": [
                    {"id": added.id, "name": task.name, "created": added.created}
                    for task, added in zip(read.tasks, submitted.tasks, strict=True)
                ],
                "removed": submitted.removed,
                "replaced": submitted.replaced,
            }
        )
        return
    for line, message in read.refused:
        printing.note(f"refused: {plan}: line {line}: {message}")
    ids = [task.id for task in submitted.tasks]
    what = f"{created:,} created, {existing:,} existing" + (f", {len(read.refused):,} refused" if read.refused else "")
    span = f"; tasks {min(ids)} to {max(ids)}" if len(ids) > 1 else f"; task {ids[0]}" if ids else ""
    from orchestrator.dashboard.text import clean

    printing.text(clean(f"plan {submitted.plan}: {what}{span}"))
