"""What operators do: cancel, retry, hold, release, priority; pause, resume, drain, prune.

Tasks are named by ids or by the filters of ``list``; what is done goes to the audit trail with actor and reason.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import completing, options, printing, state
from orchestrator.cli.options import (
    AgentOption,
    DryRunOption,
    IdsArgument,
    JsonOption,
    PlanOption,
    ReasonOption,
    SearchOption,
    StatusOption,
    TagOption,
    YesOption,
)
from orchestrator.errors import Conflict, InvalidInput

if TYPE_CHECKING:
    from orchestrator.repositories.filters import TaskFilter
    from orchestrator.repositories.operations import Changed
    from orchestrator.service import Orchestrator

_DONE = {
    "cancel": "cancelled",
    "retry": "opened again",
    "hold": "held",
    "release": "released",
    "priority": "given the priority",
    "approve": "approved",
    "deny": "denied",
    "answer": "answered",
}
ALREADY = {
    "cancel": "already cancelled or asked to end",
    "hold": "already held",
    "release": "not held in the first place",
    "priority": "already of that priority",
}
"""What is said of tasks that a change found as it would have made them."""


def cancel(
    context: typer.Context,
    ids: IdsArgument = None,
    status: StatusOption = None,
    agent: AgentOption = None,
    plan: PlanOption = None,
    tag: TagOption = None,
    search: SearchOption = None,
    reason: ReasonOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Cancel tasks, and with them those that need them.

    A running task is asked to end; it is cancelled once its processes are gone.
    A task that is done or failed stays so: exit 5.

    \b
    Examples:
      orchestrator cancel 7 8,9 --reason superseded
      orchestrator cancel --agent coder --status pending --dry-run
      orchestrator cancel --agent coder --status pending --yes
    """
    own = state.of(context, as_json)
    which = wanted_tasks(ids, status, agent, plan, tag, search, yes, dry_run)
    change(own, which, lambda orc: orc.operations.cancel(which, actor=options.actor(), reason=reason, dry_run=dry_run))


def retry(
    context: typer.Context,
    ids: IdsArgument = None,
    status: StatusOption = None,
    agent: AgentOption = None,
    plan: PlanOption = None,
    tag: TagOption = None,
    search: SearchOption = None,
    reason: ReasonOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Open failed or cancelled tasks again.

    And what did not run because of them. Their failures are forgotten; the count of attempts goes on.

    \b
    Examples:
      orchestrator retry 7
      orchestrator retry --plan migrate-v3 --status failed --yes
    """
    own = state.of(context, as_json)
    which = wanted_tasks(ids, status, agent, plan, tag, search, yes, dry_run)
    change(own, which, lambda orc: orc.operations.retry(which, actor=options.actor(), reason=reason, dry_run=dry_run))


def hold(
    context: typer.Context,
    ids: IdsArgument = None,
    status: StatusOption = None,
    agent: AgentOption = None,
    plan: PlanOption = None,
    tag: TagOption = None,
    search: SearchOption = None,
    reason: ReasonOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Let nobody start these tasks until they are released.

    \b
    Examples:
      orchestrator hold 7 --reason "after the freeze"
      orchestrator hold --tag team=billing --yes
    """
    own = state.of(context, as_json)
    which = wanted_tasks(ids, status, agent, plan, tag, search, yes, dry_run)
    change(own, which, lambda orc: orc.operations.hold(which, actor=options.actor(), reason=reason, dry_run=dry_run))


def release(
    context: typer.Context,
    ids: IdsArgument = None,
    status: StatusOption = None,
    agent: AgentOption = None,
    plan: PlanOption = None,
    tag: TagOption = None,
    search: SearchOption = None,
    reason: ReasonOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Undo hold.

    \b
    Examples:
      orchestrator release 7
      orchestrator release --tag team=billing --yes
    """
    own = state.of(context, as_json)
    which = wanted_tasks(ids, status, agent, plan, tag, search, yes, dry_run)
    change(own, which, lambda orc: orc.operations.release(which, actor=options.actor(), reason=reason, dry_run=dry_run))


def priority(
    context: typer.Context,
    number: Annotated[int, typer.Argument(metavar="N", help="Larger is claimed first; the usual one is 0.")],
    ids: IdsArgument = None,
    status: StatusOption = None,
    agent: AgentOption = None,
    plan: PlanOption = None,
    tag: TagOption = None,
    search: SearchOption = None,
    reason: ReasonOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Give tasks another priority.

    \b
    Examples:
      orchestrator priority 10 7
      orchestrator priority -5 --plan cleanup --yes
    """
    own = state.of(context, as_json)
    which = wanted_tasks(ids, status, agent, plan, tag, search, yes, dry_run)
    change(
        own,
        which,
        lambda orc: orc.operations.set_priority(which, number, actor=options.actor(), reason=reason, dry_run=dry_run),
    )


def wanted_tasks(
    ids: Sequence[str] | None,
    status: Sequence[str] | None,
    agent: Sequence[str] | None,
    plan: str | None,
    tag: Sequence[str] | None,
    search: str | None,
    yes: bool,
    dry_run: bool,
) -> TaskFilter:
    """Which tasks are meant. Raises InvalidInput for none, and for filters without ``--yes``."""
    which = options.wanted(ids=options.task_ids(ids), status=status, agent=agent, plan=plan, tag=tag, search=search)
    if which.by_ids_alone:
        return which
    if not (which.ids or which.statuses or which.agents or which.plan or which.tags or which.search):
        raise InvalidInput(
            "which tasks? name ids, or filters", hint="orchestrator list shows ids and takes the filters"
        )
    if not (yes or dry_run):
        raise InvalidInput("a change by filters needs --yes", hint="--dry-run says what it would do; then use --yes")
    return which


def change(own: state.State, which: TaskFilter, does: Callable[[Orchestrator], Changed]) -> None:
    """Do a change, wake who may have work now, and say what was done. Tasks named by id that were not changed: exit 5."""
    with own.open() as orchestrator:
        changed = does(orchestrator)
        if not changed.dry_run:
            orchestrator.notify(changed.wake)
    refused = changed.skipped if which.by_ids_alone else []
    if own.as_json:
        answer: dict[str, Any] = {
            "action": changed.action,
            "dry_run": changed.dry_run,
            "changed": changed.ids,
            "requested": changed.requested,
            "already": changed.already,
            "family": changed.family,
            "skipped": [{"id": each.id, "status": each.status, "why": each.why} for each in changed.skipped],
        }
        if refused:
            message = "; ".join(f"task {each.id} {each.why}" for each in refused)
            answer["error"] = {"code": Conflict.code, "message": message, "hint": None}
        printing.document(answer)
    else:
        _say(changed)
    if refused:
        raise typer.Exit(Conflict.exit_code)


def _say(changed: Changed) -> None:
    would = "would be " if changed.dry_run else ""
    rows = [
        (changed.ids, f"{would}{_DONE[changed.action]}"),
        (changed.requested, f"running: {would}asked to end"),
        (changed.family, f"{would}changed with them, because they need them"),
        (changed.already, ALREADY.get(changed.action, "as asked already")),
    ]
    for ids, what in rows:
        if ids:
            noun = "task" if len(ids) == 1 else "tasks"
            printing.text(f"{len(ids):,} {noun} {what}: {options.shown_ids(ids)}")
    for skipped in changed.skipped[:20]:
        printing.note(f"left alone: task {skipped.id} {skipped.why}")
    if len(changed.skipped) > 20:
        printing.note(f"left alone: {len(changed.skipped) - 20:,} more")
    if not any(ids for ids, _ in rows) and not changed.skipped:
        printing.note("no task matches")


# -- agents and workers ------------------------------------------------------------------------------------------------

AgentsArgument = Annotated[
    list[str],
    typer.Argument(metavar="AGENT...", help="Names of agents; comma lists too.", autocompletion=completing.agents),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Take a name that nothing here knows.")]


def pause(
    context: typer.Context,
    agents: AgentsArgument,
    span: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="How long: 30m, 2h; else until resume.")
    ] = None,
    reason: ReasonOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Let no worker start tasks of an agent.

    What runs goes on.

    \b
    Examples:
      orchestrator pause coder --for 30m --reason "deploy"
      orchestrator pause coder,review
    """
    own = state.of(context, as_json)
    names = options.several(agents)
    seconds = None if span is None else options.seconds(span, "--for")
    with own.open() as orchestrator:
        if not force:
            _check_known(own, orchestrator, names)
        for name in names:
            orchestrator.agent_states.pause(name, actor=options.actor(), seconds=seconds, reason=reason)
    if as_json:
        printing.document({"agents": names, "paused": True, "seconds": seconds})
    else:
        until = "until resumed" if span is None else f"for {span}"
        _tell(f"paused {until}: {', '.join(names)}")


def limit(
    context: typer.Context,
    agent: Annotated[str | None, typer.Argument(metavar="[AGENT]", help="Limits of an agent come later.")] = None,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="A concurrency key.")] = None,
    max_running: Annotated[
        int | None, typer.Option("--max-running", metavar="N", min=1, help="So many tasks of it run at once.")
    ] = None,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say how many tasks of a concurrency key run at once.

    One, where nothing is said. What runs goes on.

    \b
    Examples:
      orchestrator limit --key database --max-running 3
    """
    own = state.of(context, as_json)
    if agent is not None:
        raise InvalidInput(
            "the limit of an agent is not part of this version yet",
            hint=f"orchestrator pause {agent} stops it; limit --key KEY --max-running N is for a concurrency key",
            agent=agent,
        )
    if key is None or max_running is None:
        raise InvalidInput("limit needs --key KEY and --max-running N")
    with own.open() as orchestrator:
        orchestrator.agent_states.limit_key(key, max_running, actor=options.actor(), reason=reason)
    if as_json:
        printing.document({"key": key, "max_running": max_running})
    else:
        _tell(f"at most {max_running} of key {key} run at once")


def resume(
    context: typer.Context,
    agents: AgentsArgument,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
) -> None:
    """Undo pause, and close an open breaker.

    \b
    Example:
      orchestrator resume coder
    """
    own = state.of(context, as_json)
    names = options.several(agents)
    with own.open() as orchestrator:
        was = {name: orchestrator.agent_states.resume(name, actor=options.actor(), reason=reason) for name in names}
        orchestrator.notify(names)
    if as_json:
        printing.document(
            {
                "agents": names,
                "paused": False,
                "was_paused": [name for name in names if was[name].paused],
                "breaker_closed": [name for name in names if was[name].breaker],
            }
        )
    else:
        for name in names:
            closed = "breaker closed: " if was[name].breaker else ""
            _tell(f"{closed or ('resumed: ' if was[name].paused else 'was not paused: ')}{name}")


def drain(
    context: typer.Context,
    worker: Annotated[
        str, typer.Argument(metavar="WORKER", help="A worker's name or id.", autocompletion=completing.workers)
    ],
    as_json: JsonOption = False,
) -> None:
    """Let a worker finish what it has, and end.

    It claims no more.

    \b
    Example:
      orchestrator drain gpu-07
    """
    own = state.of(context, as_json)
    with own.open() as orchestrator:
        found = orchestrator.drain(worker)
    if as_json:
        printing.document({"worker": worker, "id": found})
    else:
        _tell(f"worker {worker} drains ({found})")


def prune(
    context: typer.Context,
    older_than: Annotated[str, typer.Option("--older-than", metavar="TIME", help="What ended so long ago: 30d, 12h.")],
    status: Annotated[
        list[str] | None, typer.Option("--status", "-s", metavar="STATUS", help="Only done, failed or cancelled tasks.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Only tasks, transcripts, minutes, workers, audit or plans."),
    ] = None,
    agent: AgentOption = None,
    plan: PlanOption = None,
    tag: TagOption = None,
    search: SearchOption = None,
    reason: ReasonOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="As in other changes; --older-than says enough without it.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove what ended long ago.

    Tasks with their runs and transcripts, minutes, workers that are gone, and
    plans without tasks; the audit trail only by --kind audit. With a filter:
    only the tasks that it matches. Live tasks, and what they need, stay. It can
    be interrupted and run again.

    \b
    Examples:
      orchestrator prune --older-than 30d --dry-run
      orchestrator prune --older-than 7d --kind transcripts
      orchestrator prune --older-than 1d --plan nightly --reason "disk full"
    """
    own = state.of(context, as_json)
    span = options.seconds(older_than, "--older-than")
    chosen: dict[str, Any] = {}
    if status:
        chosen["statuses"] = options.statuses(status)
    if kind:
        chosen["kinds"] = options.several(kind)
    if agent or plan is not None or tag or search:
        chosen["only"] = options.wanted(agent=agent, plan=plan, tag=tag, search=search)
    with own.open() as orchestrator, _interruptible() as interrupted:
        pruned = orchestrator.retention.prune(
            span, dry_run=dry_run, actor=options.actor(), reason=reason, stop=interrupted.is_set, **chosen
        )
    rows = {name: number for name, number in pruned.rows.items() if number}
    if as_json:
        printing.document(
            {
                "dry_run": pruned.dry_run,
                "older_than": pruned.older_than,
                "rows": pruned.rows,
                "bytes": pruned.bytes,
                "kept": pruned.kept,
                "interrupted": pruned.interrupted,
            }
        )
        if pruned.interrupted:
            raise typer.Exit(printing.INTERRUPTED)
        return
    from orchestrator.dashboard import short

    counted = ", ".join(f"{name} {number:,}" for name, number in sorted(rows.items())) or "nothing"
    would = "would remove" if dry_run else "removed"
    printing.text(f"{would}: {counted}" + (f", about {short.size(pruned.bytes)}" if pruned.bytes else ""))
    if pruned.kept:
        printing.note(f"{pruned.kept:,} old tasks stay because live tasks need them")
    if pruned.interrupted:
        printing.note("interrupted: the rest is still there; run it again")
        raise typer.Exit(printing.INTERRUPTED)


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets, so that a batch comes to its end; the second one is as ever."""
    asked = threading.Event()

    def ask(_number: int, _frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _check_known(own: state.State, orchestrator: Orchestrator, names: Sequence[str]) -> None:
    from orchestrator.cli.adding import check_agent

    configured = own.agents()
    missing = [name for name in names if name not in configured]
    if not missing:
        return
    known = {*configured, *(str(each["name"]) for each in orchestrator.reading.agents())}
    for name in missing:
        check_agent(name, dict.fromkeys(known))


def _tell(said: str) -> None:
    from orchestrator.dashboard.text import clean

    printing.text(clean(said))
