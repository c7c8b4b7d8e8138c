"""What is there: tasks and their runs and logs, the state of the queue, agents, workers, alerts, costs, the audit trail.

Each command is one read and one renderer; with ``--json`` the read alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import options, printing, state
from orchestrator.cli.options import (
    AgentOption,
    IdArgument,
    JsonOption,
    PlanOption,
    SearchOption,
    StatusOption,
    TagOption,
)
from orchestrator.errors import InvalidInput, did_you_mean

if TYPE_CHECKING:
    from orchestrator.dashboard.frame import Column, Look
    from orchestrator.service import Orchestrator


LimitOption = Annotated[int, typer.Option("--limit", "-n", metavar="N", help="At most this many.")]
AfterIdOption = Annotated[int | None, typer.Option("--after-id", metavar="ID", help="The page behind this id.")]


def list_(
    context: typer.Context,
    status: StatusOption = None,
    agent: AgentOption = None,
    plan: PlanOption = None,
    tag: TagOption = None,
    search: SearchOption = None,
    limit: LimitOption = 100,
    after_id: AfterIdOption = None,
    as_json: JsonOption = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="One JSON object a line, without the place of the next page.")
    ] = False,
) -> None:
    """List tasks, newest first.

    \b
    Examples:
      orchestrator list --status failed --agent coder,review
      orchestrator list --plan migrate-v3 --json
    """
    own = state.of(context, as_json or jsonl)
    wanted = options.wanted(
        status=status, agent=agent, plan=plan, tag=tag, search=search, limit=limit, after_id=after_id
    )
    with own.open() as orchestrator:
        found, following = orchestrator.reading.tasks(wanted, full=as_json or jsonl)
        now = orchestrator.reading.now()
        waiting = [] if as_json or jsonl else [task["id"] for task in found if task["status"] == "waiting"]
        asked = orchestrator.questions.list(options.wanted(ids=waiting), limit=len(waiting)) if waiting else []
    if jsonl:
        for task in found:
            printing.json_line(task)
    elif as_json:
        printing.document({"tasks": found, "next_after_id": following})
    else:
        from orchestrator.dashboard.show import list_end, render_list

        texts = {each["task_id"]: {"text": each["question"]} for each in asked}
        found = [{**task, "question": texts[task["id"]]} if task["id"] in texts else task for task in found]
        printing.lines(render_list(found, now, _look()))
        printing.note(list_end(len(found), following))


def show(context: typer.Context, task_id: IdArgument, as_json: JsonOption = False) -> None:
    """Show a task: who, when, why, and what to do next.

    \b
    Examples:
      orchestrator show 7
      orchestrator show 7 --json | jq .error
    """
    own = state.of(context, as_json)
    wanted = options.number(task_id, "task")
    with own.open() as orchestrator:
        task = orchestrator.reading.task(wanted)
        ended = orchestrator.reading.runs(wanted)
        asked, left = orchestrator.questions.of_task(wanted), orchestrator.checkpoints.shown(wanted)
        if as_json:
            printing.document({**task, "runs": ended, "questions": asked, "checkpoints": left})
            return
        from orchestrator.cli.desk import last_output

        output, size = last_output(orchestrator, task, ended)
        needed_by = orchestrator.reading.needed_by(wanted)
        now = orchestrator.reading.now()
    from orchestrator.dashboard.show import render_show

    kind = None
    definition = own.agents().get(task["agent"])
    if definition is not None:
        kind = next(
            (each for each in ("command", "python", "http", "acp", "plugin") if getattr(definition, each) is not None),
            None,
        )
    drawn = render_show(
        {**task, "runs": ended, "questions": asked, "checkpoints": left},
        now,
        _look(),
        needed_by=needed_by,
        output=output,
        output_bytes=size,
        agent_kind=kind,
        variables=True,
    )
    printing.lines(drawn)


def runs(context: typer.Context, task_id: IdArgument, as_json: JsonOption = False) -> None:
    """List the ended attempts of a task, the first one first.

    \b
    Example:
      orchestrator runs 7
    """
    own = state.of(context, as_json)
    wanted = options.number(task_id, "task")
    with own.open() as orchestrator:
        found = orchestrator.reading.runs(wanted)
        now = orchestrator.reading.now()
    if as_json:
        printing.document({"runs": found})
        return
    from orchestrator.dashboard.show import render_runs

    printing.lines(render_runs(found, now, _look(), captions=True))
    if not found:
        printing.note(f"task {wanted} has no ended attempt yet")


# -- the whole queue ---------------------------------------------------------------------------------------------------


def status(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show the queue in a few lines.

    Counts, the oldest waiting, workers, lock-hold times, alerts.

    \b
    Examples:
      orchestrator status
      orchestrator status --json | jq .counts
    """
    own = state.of(context, as_json)
    with own.open() as orchestrator:
        found = orchestrator.status()
        if as_json:
            printing.document(found)
            return
        from orchestrator.settings import __version__

        server = orchestrator.snapshots.server(version=__version__)
        now = orchestrator.reading.now()
    from orchestrator.dashboard.show import render_status

    printing.lines(render_status(found, now, _look(), server=server, last_hour=_last_hour(found["agents"])))


def _last_hour(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int, float, bool]:
    """What ended in the last hour: done, failed, USD, and whether the cost of some of it is unknown."""
    done = sum(each["done_last_hour"] or 0 for each in rows)
    failed = sum(each["failed_last_hour"] or 0 for each in rows)
    partial = any(each["usd_last_hour"] is None and each["done_last_hour"] for each in rows)
    return done, failed, sum(each["usd_last_hour"] or 0.0 for each in rows), partial


def alerts(context: typer.Context, as_json: JsonOption = False) -> None:
    """List what a person should look at; exit 1 if there is any.

    \b
    Example:
      orchestrator alerts || mail -s "orchestrator" ops < /dev/null
    """
    own = state.of(context, as_json)
    with own.open() as orchestrator:
        found = orchestrator.reading.alerts()
        now = orchestrator.reading.now()
    if as_json:
        from orchestrator.domain.shapes import alert_json

        printing.document({"alerts": [alert_json(alert) for alert in found]})
    else:
        from orchestrator.dashboard import short

        look = _look()
        drawn = []
        for alert in found:
            age = short.since(alert.since, now)
            subject = str(alert.task_id) if alert.task_id is not None else alert.subject
            line = look.line().symbol("alert").add(f" {subject} {alert.name}: {alert.what}")
            line.add("" if age is None else f"  {short.age(age)}", "dim")
            drawn.append(line)
            if alert.command:
                drawn.append(look.line(f"    {alert.command}"))
        printing.lines(drawn)
        if not found:
            printing.note("no alert")
    if found:
        raise typer.Exit(1)


def dashboard(
    context: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    refresh: Annotated[
        float, typer.Option("--refresh", metavar="S", min=0.1, max=3600, help="Seconds between two pictures.")
    ] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show the queue live.

    What needs you, what runs, agents, workers, failures. Without a terminal one picture is printed, as with --once.

    \b
    Examples:
      orchestrator dashboard
      orchestrator dashboard --once --json | jq .alerts
    """
    own = state.of(context, as_json)
    with own.open() as orchestrator:
        from orchestrator.settings import __version__

        if as_json:
            printing.document(orchestrator.snapshots.dashboard(version=__version__))
            return
        from orchestrator.cli.desk import Desk
        from orchestrator.dashboard.board_live import board_live

        code = board_live(
            sys.stdout,
            lambda: orchestrator.snapshots.dashboard(version=__version__),
            refresh=refresh,
            once=once,
            stdin=sys.stdin,
            desk=Desk(orchestrator),
        )
    raise typer.Exit(code)


def agents(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the agents that are configured here or have work.

    \b
    Example:
      orchestrator agents
    """
    own = state.of(context, as_json)
    configured = own.agents()
    with own.open() as orchestrator:
        seen = {each["name"]: each for each in orchestrator.reading.agents()}
    found: list[dict[str, Any]] = []
    for name in sorted({*configured, *seen}):
        definition = configured.get(name)
        kind = None
        if definition is not None:
            kind = next(
                (
                    each
                    for each in ("command", "python", "http", "acp", "plugin")
                    if getattr(definition, each) is not None
                ),
                None,
            )
        found.append({"name": name, "configured": definition is not None, "kind": kind, **seen.get(name, _IDLE)})
    if as_json:
        printing.document({"agents": found})
        return
    from orchestrator.dashboard import short

    rows = []
    for each in found:
        wait = each["oldest_wait_seconds"]
        rows.append(
            {
                "name": each["name"],
                "kind": each["kind"] or "elsewhere",
                "state": each["state_reason"] or each["state"] if each["state"] != "ok" else "",
                "running": f"{each['running']:,}",
                "ready": f"{each['ready']:,}",
                "oldest": "" if wait is None else short.age(wait),
                "workers": f"{each['live_workers']:,}",
            }
        )
    table(rows, right=("running", "ready", "oldest", "workers"))
    if not rows:
        printing.note("no agent is configured, and no task names one")


_IDLE: dict[str, Any] = {
    "state": "ok",
    "state_until": None,
    "state_reason": None,
    "live_workers": 0,
    "running": 0,
    "ready": 0,
    "retrying": 0,
    "not_due": 0,
    "held": 0,
    "blocked": 0,
    "waiting": 0,
    "capped": False,
    "oldest_wait_seconds": None,
    "oldest_wait_by_priority": {},
    "done_last_hour": None,
    "failed_last_hour": None,
    "usd_last_hour": None,
}


def workers(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the workers that live.

    \b
    Example:
      orchestrator workers --json
    """
    own = state.of(context, as_json)
    with own.open() as orchestrator:
        found = orchestrator.reading.workers()
        now = orchestrator.reading.now()
    if as_json:
        printing.document({"workers": found})
        return
    from orchestrator.dashboard import short
    from orchestrator.dashboard.show import moment

    def age(text: str | None) -> str:
        since = short.since(moment(text), now)
        return "" if since is None else short.age(since)

    rows = [
        {
            "name": each["name"],
            "state": each["state"],
            "slots": f"{each['running']:,}/{each['slots']:,}",
            "beat": age(each["renewed_at"]),
            "up": age(each["started_at"]),
            "agents": ", ".join(each["agents"]),
        }
        for each in found
    ]
    table(rows, right=("slots", "beat", "up"))
    if not rows:
        printing.note("no worker is alive; start one with orchestrator worker")


def audit(
    context: typer.Context,
    task: Annotated[str | None, typer.Option("--task", metavar="ID", help="Of this task.")] = None,
    actor: Annotated[str | None, typer.Option("--actor", metavar="NAME", help="By this person.")] = None,
    limit: LimitOption = 100,
    after_id: AfterIdOption = None,
    as_json: JsonOption = False,
) -> None:
    """List who did what, newest first.

    \b
    Example:
      orchestrator audit --task 7
    """
    own = state.of(context, as_json)
    if not 0 < limit <= 10_000:
        raise InvalidInput(f"--limit: expected 1 to 10,000, found {limit}")
    from orchestrator.domain.storable import check_text

    check_text("actor", actor)
    task_id = None if task is None else options.number(task, "task")
    with own.open() as orchestrator:
        found, following = orchestrator.audit.list(limit=limit, after_id=after_id, task_id=task_id, actor=actor)
        now = orchestrator.reading.now()
    if as_json:
        printing.document({"audit": found, "next_after_id": following})
        return
    from orchestrator.dashboard import short
    from orchestrator.dashboard.show import moment

    rows = []
    for each in found:
        at = moment(each["at"])
        rows.append(
            {
                "id": str(each["id"]),
                "at": short.clock(at, now) if at else "",
                "actor": each["actor"],
                "action": each["action"],
                "what": str(each["task_id"] or each["subject"] or ""),
                "reason": each["reason"] or "",
            }
        )
    table(rows, right=("id",))
    if not rows:
        printing.note("nothing was done by a person yet")
    elif following is not None:
        printing.note(f"{len(rows):,} shown; more: --after-id {following}")


def costs(
    context: typer.Context,
    by: Annotated[str, typer.Option("--by", metavar="WHAT", help="agent, day, plan or model.")] = "agent",
    since: Annotated[
        str | None, typer.Option("--since", metavar="T", help="Runs that ended since an ISO time, or for 7d.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Add up tokens and USD.

    With the number of runs whose cost is unknown; + is at least this much.

    \b
    Examples:
      orchestrator costs --by day --since 7d
      orchestrator costs --by plan --json
    """
    own = state.of(context, as_json)
    if by not in ("agent", "day", "plan", "model"):
        known = ("agent", "day", "plan", "model")
        raise InvalidInput(f"--by: expected agent, day, plan or model, found {by!r}{did_you_mean(by, known)}")
    with own.open() as orchestrator:
        begin = None if since is None else _since(orchestrator, since)
        found = orchestrator.reading.costs(by, since=begin)  # type: ignore[arg-type]
    if as_json:
        printing.document({"costs": found})
        return
    from orchestrator.dashboard import short

    rows = [
        {
            by: str(each[by]) if each[by] is not None else "–",
            "runs": f"{each['runs']:,}",
            "tokens": "–" if each["total_tokens"] is None else short.tokens(each["total_tokens"]),
            "cost": short.money(each["cost_usd"], partial=bool(each["unknown_cost_runs"])),
            "unknown": f"{each['unknown_cost_runs']:,}",
        }
        for each in found
    ]
    table(rows, right=("runs", "tokens", "cost", "unknown"))
    if not rows:
        printing.note("no run has ended yet")


def _since(orchestrator: Orchestrator, text: str) -> datetime:
    try:
        span = options.seconds(text, "--since")
    except InvalidInput:
        return options.instant(text, "--since")
    return options.later_than(orchestrator.reading.now(), -span)


# -- drawing -----------------------------------------------------------------------------------------------------------


def _look() -> Look:
    from orchestrator.dashboard.terminal import look_for

    return look_for(sys.stdout)


def table(rows: Sequence[Mapping[str, str]], right: Sequence[str] = ()) -> None:
    """Print *rows* under the names of their columns: by rank from the left, the last one taking what is left."""
    if not rows:
        return
    from orchestrator.dashboard.frame import NO_LIMIT, Column, join, row, widest

    look = _look()
    unlimited = look.width >= NO_LIMIT
    keys = list(rows[0])
    columns: list[Column] = []
    for rank, key in enumerate(keys):
        width = widest((each[key] for each in rows), len(key), NO_LIMIT if key in right or unlimited else 40)
        rest = 1 if key == keys[-1] and key not in right and not unlimited else 0
        columns.append(Column(key, width, rank, right=key in right, gap=2 if rank else 0, rest=rest))
    places = join(columns, look.width)
    captions = {key: (key, "dim") for key in keys}
    drawn = [row(look, places, captions)]
    drawn += [row(look, places, {key: (text, "") for key, text in each.items()}) for each in rows]
    printing.lines(drawn)
