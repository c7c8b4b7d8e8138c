"""``run``, ``worker`` and ``watchdog``: the processes that work."""

from __future__ import annotations

import contextlib
import logging
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import options, printing, state
from orchestrator.cli.adding import (
    AgentForAll,
    FreshOption,
    MapOption,
    PlanArgument,
    PlanNameOption,
    check_agent,
    read_plan,
    submit_plan,
)
from orchestrator.cli.options import JsonOption
from orchestrator.errors import DatabaseUnavailable, InvalidInput

if TYPE_CHECKING:
    from orchestrator.agents.protocol import Agent
    from orchestrator.cli.following import Following
    from orchestrator.dashboard.live import RunLive, RunPlain
    from orchestrator.domain.given import AgentDefinition
    from orchestrator.domain.snapshot import Episode, PlanTask, RunEvent, RunView
    from orchestrator.plans import Plan
    from orchestrator.repositories.plans import Submitted
    from orchestrator.service import Orchestrator

SLOTS = 4
"""Slots of ``run`` unless it is told otherwise."""
LAST_LOOK = 5.0
"""Seconds that ``run`` tries to read what became of its plan when the database is away at the end."""
FOREVER = 10 * 366 * 86_400.0


ConcurrencyOption = Annotated[
    int | None, typer.Option("--concurrency", "-c", metavar="N", min=1, max=100_000, help="Agents at work at once.")
]
GraceOption = Annotated[
    str | None, typer.Option("--grace", metavar="S", help="What agents get to finish in when told to stop.")
]
MetricsPortOption = Annotated[
    str | None,
    typer.Option("--metrics-port", metavar="P", help="Serve numbers at http://127.0.0.1:P/metrics; HOST:P elsewhere."),
]
HealthPortOption = Annotated[
    str | None,
    typer.Option("--health-port", metavar="P", help="Answer probes at http://127.0.0.1:P/live and /ready."),
]
VerboseOption = Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more; twice: everything.")]


def _seconds(text: str | None, option: str) -> float | None:
    return None if text is None else options.seconds(text, option)


# -- run ---------------------------------------------------------------------------------------------------------------


def run(
    context: typer.Context,
    plan: PlanArgument,
    concurrency: ConcurrencyOption = None,
    agent: AgentForAll = None,
    map: MapOption = None,  # noqa: A002 - the option is --map
    name: PlanNameOption = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Start nothing more after the first failure.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Open failed tasks again, and what did not run because of them.")
    ] = False,
    fresh: FreshOption = False,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live view.")] = False,
    grace: GraceOption = None,
    verbose: VerboseOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Work a plan to its end, here: submit it, run it, show it.

    What is done stays done: run it again, and only the rest is done. The view
    is on stderr, the summary on stdout. Ctrl-C lets agents finish, twice ends
    them. Where only questions are left it asks at a terminal, else it ends
    with exit code 3. Exit code 1 when a task failed, was cancelled or did not
    run.

    \b
    Examples:
      orchestrator run plan.yaml
      orchestrator run plan.yaml --retry-failed --concurrency 8
      orchestrator run instances.jsonl --agent coder \\
          --map input=problem_statement --map unique_key=instance_id
    """
    own = state.of(context, as_json)
    seconds = _seconds(grace, "--grace")
    read = read_plan(own, plan, agent, map, name)
    configured = own.agents()
    agents = _agents_of(read, configured)
    with own.open(grace=seconds) as orchestrator:
        submitted = submit_plan(orchestrator, read, fresh=fresh)
        if retry_failed:
            _retry_failed(orchestrator, read.name)
        work = _Run(orchestrator, read, submitted, concurrency or own.settings().concurrency or SLOTS)
        with _logging(verbose, tell=work.note):
            code = work.work(agents, fail_fast=fail_fast, plain=plain, embedded=own.is_embedded)
        again = None if plan == "-" else _again(plan, agent, map, name)
        work.summary(again, as_json=as_json)
    raise typer.Exit(code)


def _agents_of(plan: Plan, configured: dict[str, AgentDefinition]) -> list[Agent]:
    """The agents that the tasks of *plan* name. Raises InvalidInput for a kind that cannot be run."""
    from orchestrator.agents.building import build

    named = {task.agent for task in plan.tasks}
    return [build(each) for name, each in {**configured, **plan.agents}.items() if name in named]


def _retry_failed(orchestrator: Orchestrator, plan: str) -> None:
    from orchestrator.domain.words import TaskStatus
    from orchestrator.repositories.filters import TaskFilter

    failed = TaskFilter(plan=plan, statuses=[TaskStatus.FAILED.value])
    changed = orchestrator.operations.retry(failed, actor=options.actor(), reason="run --retry-failed")
    orchestrator.notify(changed.wake)
    for skipped in changed.skipped:
        printing.note(f"left alone: task {skipped.id} {skipped.why}")


def _again(plan: str, agent: str | None, map: list[str] | None, name: str | None) -> str:  # noqa: A002
    words = ["orchestrator", "run", plan]
    words += ["--agent", agent] if agent else []
    words += [word for each in map or () for word in ("--map", each)]
    words += ["--name", name] if name else []
    return shlex.join(words)


class _Run:
    """One plan on its way to its end."""

    def __init__(self, orchestrator: Orchestrator, plan: Plan, submitted: Submitted, slots: int) -> None:
        self._orchestrator = orchestrator
        self._plan = plan
        self._submitted = submitted
        self._slots = slots
        self._ids = list(dict.fromkeys(task.id for task in submitted.tasks))
        self._following: Following | None = None
        self._worker: Any = None
        self._output: Any = None
        self._stopping = False
        self._away = False

    def work(self, agents: Sequence[Agent], *, fail_fast: bool, plain: bool, embedded: bool) -> int:
        """Do what there is to do; return the exit code."""
        from orchestrator.cli.following import Following

        self._following = following = Following(
            self._orchestrator,
            self._submitted.plan,
            self._submitted.plan_id,
            self._ids,
            slots=self._slots,
            grace=self._orchestrator.settings.grace,
            file=self._plan.path,
            show=self._show,
            changed=self._changed,
            failing=self._stop_at_failure if fail_fast else None,
            leaving=self._release,
        )
        if all(task.status in ("done", "failed", "cancelled") for task in following.view().tasks):
            following.close()
            printing.note(_nothing_to_do(following.view()))
            return self._code(0)
        where = "embedded" if embedded else self._orchestrator.shown_url
        return self._code(self._work(following, agents, plain, where))

    def _work(self, following: Following, agents: Sequence[Agent], plain: bool, where: str) -> int:
        from orchestrator.cli.desk import Desk
        from orchestrator.cli.following import asking, plan_line
        from orchestrator.dashboard.live import run_live
        from orchestrator.dashboard.summary import end_text
        from orchestrator.dashboard.terminal import is_terminal
        from orchestrator.database.transient import transient
        from orchestrator.domain.snapshot import RunEvent

        output = run_live(
            sys.stderr,
            following.view,
            plain=plain,
            clock=following.now,
            stdin=sys.stdin,
            desk=Desk(self._orchestrator, following.reread),
        )
        view = following.view()
        new = sum(added.created for added in self._submitted.tasks)
        output.start()
        self._output = output
        try:
            self._show(RunEvent(following.now(), "plan", name=view.plan, detail=plan_line(view, new, where)))
            for task in view.tasks:
                if task.status == "waiting":
                    self._show(asking(task, following.now()))
            following.begin(lambda: [] if self._worker is None else self._worker.watched())
            code = self._turn(following, agents)
            while code == 0 and following.stopped_by == "idle" and self._people(following, output):
                code = self._turn(following, agents)
            try:
                transient(following.read, give_up_after=LAST_LOOK)
            except DatabaseUnavailable as error:
                self._away = True
                self.note(f"{error.message}; the summary is as of the last look")
        finally:
            following.close()
            view = following.view()
            with contextlib.suppress(Exception):
                self._show(RunEvent(following.now(), "end", detail=end_text(view, following.now())))
            self._output = None
            # Where the summary goes elsewhere, the last picture is what the terminal keeps.
            output.stop(keep=not is_terminal(sys.stdout))
        return code

    def _turn(self, following: Following, agents: Sequence[Agent]) -> int:
        """Work until nothing is left that can be done without a person."""
        from orchestrator.worker import Worker

        self._worker = Worker(
            self._orchestrator,
            agents,
            self._slots,
            plan_id=self._submitted.plan_id,
            plan=self._submitted.plan,
            observers=[following],
        )
        return int(self._worker.run(until_idle=True))

    def _people(self, following: Following, output: RunLive | RunPlain) -> bool:
        """Ask the person at the terminal what waits for one; whether the run can go on."""
        from orchestrator.database.transient import transient
        from orchestrator.errors import Conflict

        try:
            transient(following.read, give_up_after=LAST_LOOK)
        except DatabaseUnavailable:
            return False
        waiting = [task for task in following.view().tasks if task.status == "waiting" and task.question is not None]
        if not waiting:
            return any(task.status == "pending" for task in following.view().tasks)
        task = min(waiting, key=lambda each: (_deadline(each), each.id))
        assert task.question is not None
        answer = output.ask(task.question, gone=lambda: self._answered(task.id))
        if answer is None:
            return self._answered(task.id)
        try:
            self._orchestrator.answer(task.id, answer, actor=options.actor())
        except (Conflict, InvalidInput) as error:
            self.note(error.message + (f"; {error.hint}" if error.hint else ""))
        else:
            self.note(f"{task.id} {task.name}: {answer}")
        return True

    def _answered(self, task_id: int) -> bool:
        """Whether somebody else has answered meanwhile."""
        try:
            return self._orchestrator.reading.statuses([task_id]).get(task_id) != "waiting"
        except Exception:  # noqa: BLE001 - the person at the terminal can still answer
            return False

    def _show(self, event: RunEvent) -> None:
        if self._output is not None:
            self._output.event(event)

    def note(self, said: str) -> None:
        """Tell something beside the view, as a line that stays."""
        from orchestrator.domain.snapshot import RunEvent

        if self._output is not None and self._following is not None:
            self._output.event(RunEvent(self._following.now(), "note", detail=said))
        else:
            printing.note(said)

    def _changed(self) -> None:
        if self._output is not None:
            self._output.changed()

    def _release(self) -> None:
        if self._output is not None:
            self._output.release()

    def _stop_at_failure(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._worker.stop(FOREVER)

    def _code(self, worked: int) -> int:
        from orchestrator.dashboard.run_view import kind

        assert self._following is not None
        view, now = self._following.view(), self._following.now()
        kinds = Counter(kind(task, now) for task in view.tasks)
        if kinds["done"] == len(view.tasks):
            return 0
        if self._away:
            return DatabaseUnavailable.exit_code
        if worked == 130 or self._following.stopped_by == "SIGINT":
            return 130
        if kinds["failed"] or kinds["cancelled"] or kinds["not_run"]:
            return 1
        return 3 if kinds["waiting"] else 1

    def summary(self, again: str | None, *, as_json: bool) -> None:
        """Print what became of the plan: a table, or the document."""
        assert self._following is not None
        if as_json:
            printing.document(self._document())
            return
        from orchestrator.dashboard.summary import render
        from orchestrator.dashboard.terminal import look_for

        printing.lines(render(self._following.view(), self._following.now(), look_for(sys.stdout), again=again))

    def _document(self) -> dict[str, Any]:
        from orchestrator.dashboard.run_view import cost_unknown, kind
        from orchestrator.repositories.filters import TaskFilter

        assert self._following is not None
        view, now = self._following.view(), self._following.now()
        found: dict[int, dict[str, Any]] = {}
        for start in range(0, len(self._ids), 200):
            part = self._ids[start : start + 200]
            tasks, _ = self._orchestrator.reading.tasks(TaskFilter(ids=part, limit=len(part)), full=True)
            found.update((task["id"], task) for task in tasks)
        tasks = [found[id_] for id_ in self._ids if id_ in found]
        kinds = Counter(kind(task, now) for task in view.tasks)
        ended = ("done", "failed", "cancelled", "not_run")
        usages = [task["usage"] for task in tasks if task["attempt"]]
        ended_at = view.ended_at or now
        return {
            "plan": view.plan,
            "tasks": tasks,
            "totals": {
                "tasks": len(tasks),
                **{what: kinds[what] for what in ended},
                "left": sum(count for what, count in kinds.items() if what not in ended),
                "elapsed_seconds": (ended_at - view.started_at).total_seconds(),
                **{key: _sum(usages, key) for key in ("input_tokens", "output_tokens", "total_tokens", "cost_usd")},
                "unknown_cost_tasks": sum(cost_unknown(task.spend) for task in view.tasks),
            },
        }


def _deadline(task: PlanTask) -> float:
    at = task.question.deadline if task.question is not None else None
    return float("inf") if at is None else at.timestamp()


def _sum(usages: Sequence[dict[str, Any]], key: str) -> Any:
    known = [usage[key] for usage in usages if usage[key] is not None]
    return sum(known) if known else None


def _nothing_to_do(view: RunView) -> str:
    if not view.tasks:
        return f"nothing to do: the plan {view.plan} has no tasks"
    counts = Counter(task.status for task in view.tasks)
    if counts["done"] == len(view.tasks):
        return f"nothing to do: all {len(view.tasks):,} tasks of {view.plan} are done; --fresh makes them anew"
    text = ", ".join(f"{count:,} {status}" for status, count in sorted(counts.items()))
    return f"nothing to do: every task of {view.plan} has ended ({text}); --retry-failed opens failed ones again"


# -- worker ------------------------------------------------------------------------------------------------------------


def worker(
    context: typer.Context,
    agent: Annotated[
        list[str] | None,
        typer.Option("--agent", "-a", metavar="NAME", help="Only these; else all that are configured."),
    ] = None,
    plan: Annotated[
        list[str] | None, typer.Option("--plan", metavar="FILE", help="Know the agents of this plan file as well.")
    ] = None,
    concurrency: ConcurrencyOption = None,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="What screens call it.")] = None,
    grace: GraceOption = None,
    heartbeat: Annotated[str | None, typer.Option("--heartbeat", metavar="S", help="Between two renewals.")] = None,
    lease: Annotated[
        str | None, typer.Option("--lease", metavar="S", help="Silent this long: it counts as dead.")
    ] = None,
    sweep: Annotated[
        str | None, typer.Option("--sweep", metavar="S", help="Between two looks for dead workers.")
    ] = None,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when nothing runs, is due, or waits for a retry.")
    ] = False,
    metrics_port: MetricsPortOption = None,
    health_port: HealthPortOption = None,
    verbose: VerboseOption = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only what is wrong.")] = False,
    migrate: Annotated[bool, typer.Option("--migrate", help="Upgrade the schema first, if it must be.")] = False,
) -> None:
    """Work on tasks until stopped.

    SIGTERM or Ctrl-C lets agents finish first. One line on stderr for each
    start and end. Several workers share the tasks.

    \b
    Examples:
      orchestrator worker
      orchestrator worker --agent coder,review --concurrency 20
      orchestrator worker --until-idle --quiet
      orchestrator worker --health-port 0.0.0.0:8080 --metrics-port 9465
    """
    own = state.of(context)
    _check_ports(metrics_port, health_port)
    agents = _agents_for_worker(own, options.several(agent), plan or [])
    changed = {
        "heartbeat": _seconds(heartbeat, "--heartbeat"),
        "lease": _seconds(lease, "--lease"),
        "sweep": _seconds(sweep, "--sweep"),
        "grace": _seconds(grace, "--grace"),
    }
    with own.open(migrate=migrate, **changed) as orchestrator, _logging(verbose, quiet=quiet):
        from orchestrator.cli.following import Teller
        from orchestrator.dashboard import plain
        from orchestrator.worker import Worker

        def tell(event: RunEvent) -> None:
            if not quiet or event.kind in ("away", "back", "failed", "lost"):
                printing.note(plain.line(event))

        teller = Teller(tell, orchestrator.reading.now(), orchestrator.settings.grace)
        made = Worker(
            orchestrator,
            agents,
            concurrency,
            name=name,
            observers=[teller],
            metrics_port=metrics_port,
            health_port=health_port,
        )
        _on_signals(lambda *_: made.stop())
        if not quiet:
            names = ", ".join(sorted({each.name for each in agents}))
            slots = orchestrator.settings.changed(concurrency=concurrency).concurrency or 10
            until = " until idle" if until_idle else ""
            printing.note(f"worker {made.name} works{until} for {names}: {slots} slots, {orchestrator.shown_url}")
        code = made.run(until_idle=until_idle)
        # The interpreter takes its handlers away while it ends: one more SIGTERM would make a clean end look like a crash.
        _on_signals(signal.SIG_IGN)
    raise typer.Exit(code)


def _check_ports(metrics_port: str | None, health_port: str | None) -> None:
    """Refuse what is no port before the database is asked for anything."""
    if metrics_port is None and health_port is None:
        return
    from orchestrator.worker.exposition import address

    for option, port in (("--metrics-port", metrics_port), ("--health-port", health_port)):
        if port is not None:
            address(port, option)


def _on_signals(handler: Any) -> None:
    """From now on *handler* has SIGTERM and SIGHUP, except while the worker handles them itself."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(number, handler)


def _agents_for_worker(own: state.State, names: Sequence[str], plans: Sequence[str]) -> list[Agent]:
    """The configured agents and those of *plans*, only *names* if there are any. Raises UnknownAgent, InvalidPlan."""
    from orchestrator.agents.building import build

    known = list(own.agents().values())
    for path in plans:
        known += read_plan(own, path, None, None, None).agents.values()
    for name in names:
        check_agent(
            name, {each.name: each for each in known}, hint="define it in orchestrator.toml, or name its --plan"
        )
    chosen = [build(each) for each in known if not names or each.name in names]
    if not chosen:
        raise InvalidInput(
            "a worker needs an agent to work for, and none is configured",
            hint="define one in orchestrator.toml under [agents.NAME], or name a plan: --plan FILE",
        )
    return chosen


# -- watchdog ----------------------------------------------------------------------------------------------------------


def watchdog(
    context: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="Look once and end; waits up to a lease for a witness.")] = False,
    interval: Annotated[str | None, typer.Option("--interval", metavar="S", help="Between two looks.")] = None,
    lease: Annotated[str | None, typer.Option("--lease", metavar="S", help="Its own lease.")] = None,
    metrics_port: MetricsPortOption = None,
    health_port: HealthPortOption = None,
    verbose: VerboseOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Take back tasks of dead workers, raise alerts.

    Also makes due what is due. Every worker takes back, too: this is for a
    host without one. Alerts are told once when they begin and once when they
    are over, here and to the hooks of [alerts.hooks]; a worker tells hooks.

    \b
    Examples:
      orchestrator watchdog --interval 10
      orchestrator watchdog --once --json
    """
    own = state.of(context, as_json)
    if as_json and not once:
        raise InvalidInput("--json goes with --once: without it the watchdog does not end")
    every, own_lease = _seconds(interval, "--interval"), _seconds(lease, "--lease")
    for option, port in (("--metrics-port", metrics_port), ("--health-port", health_port)):
        if once and port is not None:
            raise InvalidInput(f"{option} does not go with --once", hint="orchestrator metrics prints them once")
    _check_ports(metrics_port, health_port)
    if every == 0:
        raise InvalidInput("--interval: expected more than 0 seconds")
    with own.open(lease=own_lease) as orchestrator, _logging(verbose):
        from orchestrator.worker import Watchdog

        dog = Watchdog(
            orchestrator, lease=own_lease, metrics_port=metrics_port, health_port=health_port, on_alert=_tell_alert
        )
        with _stopping(dog):
            if not once:
                printing.note(
                    f"watchdog looks every {every or orchestrator.settings.sweep:g} s on {orchestrator.shown_url}"
                )
                dog.run(every, on_sweep=_tell_sweep)
                return
            swept = dog.once()
    if as_json:
        taken = [{"task_id": id_, "attempt": attempt, "status": to} for id_, attempt, to in swept.taken_back]
        printing.document({"buried": swept.buried, "taken_back": taken})
    else:
        _tell_sweep(swept)
        printing.note(f"{len(swept.buried):,} workers were dead, {len(swept.taken_back):,} tasks taken back")


def _tell_alert(event: str, episode: Episode) -> None:
    from orchestrator.dashboard.text import clean

    alert = episode.alert
    subject = str(alert.task_id) if alert.task_id is not None else alert.subject
    # Cleaned here, before lines are told apart: a name with a line break in it must stay on its line.
    if event == "begun":
        printing.note(clean(f"alert {alert.kind}: {subject} {alert.name}: {alert.what}"))
    else:
        printing.note(clean(f"alert {alert.kind} is over: {subject} {alert.name}"))


def _tell_sweep(swept: Any) -> None:
    for worker_id in swept.buried:
        printing.note(f"worker {worker_id} is dead")
    for task_id, attempt, status in swept.taken_back:
        printing.note(f"task {task_id} taken back from its attempt {attempt}: {status}")


@contextlib.contextmanager
def _stopping(dog: Any) -> Iterator[None]:
    """SIGTERM and SIGINT end the watchdog between two looks."""
    before = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError):  # not in the main thread
            before[number] = signal.signal(number, lambda *_: dog.stop())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- the log -----------------------------------------------------------------------------------------------------------


class _Lines(logging.Handler):
    """Log records as lines; whoever prints them makes foreign text in them harmless. Traces only if asked for."""

    def __init__(self, tell: Callable[[str], None], traces: bool) -> None:
        super().__init__()
        self._tell = tell
        self._traces = traces

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if record.exc_info and not self._traces:
                error = record.exc_info[1]
                record = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None})
                said = record.getMessage()
                if str(error) not in said:
                    record.msg, record.args = "%s: %s", (said, f"{type(error).__name__}: {error}")
            for line in self.format(record).splitlines():
                self._tell(line)
        except Exception:  # noqa: BLE001 - a log must not end the work that it tells of
            self.handleError(record)


@contextlib.contextmanager
def _logging(verbose: int, *, quiet: bool = False, tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Tell what the package logs, on stderr or by *tell*: warnings, with -v its steps, with -vv everything."""
    logger = logging.getLogger("orchestrator")
    handler = _Lines(tell or printing.note, traces=verbose > 0)
    time = "" if tell else "%(asctime)s "  # lines of a run have their own
    handler.setFormatter(logging.Formatter(f"{time}%(levelname)s %(message)s", "%H:%M:%S"))
    before = logger.level, logger.propagate
    if verbose:
        logger.setLevel(logging.DEBUG if verbose > 1 else logging.INFO)
    else:
        logger.setLevel(logging.ERROR if quiet else logging.WARNING)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
