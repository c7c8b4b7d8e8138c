"""``Orchestrator``: the three units of ADR-0004 on one screen, and the operations that command line and library share.

    claim     one transaction, committed before anything runs
    execute   no transaction, no connection
    record    one transaction, refused if the attempt no longer owns its task

This module cannot import SQLAlchemy, so it cannot open or keep a session: no transaction of ours is open while an agent
works. A crash between the units loses no task: the watchdog takes it back, and the agent runs again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload
from uuid import UUID

from orchestrator.agents.functions import AgentFunction, Context, named
from orchestrator.agents.protocol import Agent, Live, Stop
from orchestrator.agents.spending import Spending, needed
from orchestrator.database import schema
from orchestrator.database.embedded import WORKER_APPLICATION, EmbeddedServer
from orchestrator.database.engine import make_engine, pool_waits, shown
from orchestrator.database.lines import SILENCE
from orchestrator.database.notify import CANCEL, Notifier
from orchestrator.database.transient import transient
from orchestrator.domain.alerts import Thresholds
from orchestrator.domain.asking import Verdict
from orchestrator.domain.entities import Run, Task
from orchestrator.domain.given import AgentDefinition, NewTask, new_task
from orchestrator.domain.identity import Identity
from orchestrator.domain.outcome import Budget, Claim, Outcome, RetryPolicy
from orchestrator.domain.prices import Prices
from orchestrator.domain.retention import Retention
from orchestrator.domain.values import with_field
from orchestrator.domain.words import ENDED, OutcomeClass, TaskStatus
from orchestrator.errors import (
    DatabaseUnavailable,
    InvalidInput,
    NotFound,
    OrchestratorError,
    SchemaOutOfDate,
    WaitTimeout,
    unknown_agent,
)
from orchestrator.hooks import read_hooks
from orchestrator.liveness import boot_clock, identity
from orchestrator.plans import Plan, check_prices, definitions, resolve, with_results
from orchestrator.repositories import CallerSession
from orchestrator.repositories.adding import Added, AddingRepository, after_commit, ready_agents
from orchestrator.repositories.agents import AgentRepository
from orchestrator.repositories.alerting import AlertRepository
from orchestrator.repositories.audit import AuditRepository
from orchestrator.repositories.breakers import BreakerRepository
from orchestrator.repositories.checkpoints import CheckpointRepository, NewCheckpoint, Stored
from orchestrator.repositories.claims import Claimed, Known, Look
from orchestrator.repositories.diagnosis import DiagnosisRepository
from orchestrator.repositories.events import EventRepository
from orchestrator.repositories.filters import TaskFilter
from orchestrator.repositories.health import HealthRepository
from orchestrator.repositories.minutes import MinuteRepository
from orchestrator.repositories.operations import OperationsRepository
from orchestrator.repositories.plans import PlanRepository, Submitted
from orchestrator.repositories.questions import QuestionRepository
from orchestrator.repositories.reading import ReadingRepository
from orchestrator.repositories.retention import RetentionRepository
from orchestrator.repositories.runs import Ended, Recorded, RunRepository
from orchestrator.repositories.snapshots import SnapshotRepository
from orchestrator.repositories.tasks import TaskRepository
from orchestrator.repositories.workers import Neighbour, Renewal, WorkerRepository
from orchestrator.settings import Settings, __version__
from orchestrator.tracing import tracing
from orchestrator.workerless import LeaseKeeper, Unwatched

if TYPE_CHECKING:
    from orchestrator.agents.workspaces import Found

log = logging.getLogger(__name__)
T = TypeVar("T")
I = TypeVar("I")  # noqa: E741 - the input of an agent
AgentLike = str | AgentFunction[..., Any] | Agent

CLAIM_PATIENCE = 5.0
"""Seconds that a claim tries again after a database fault before it gives up its turn."""


class Orchestrator:
    """Durable agent tasks in one database.

    ``url`` is a PostgreSQL URL; without one, that of *settings* (``ORCHESTRATOR_DATABASE_URL`` or ``orchestrator.toml``
    when *settings* is left out too). Nothing connects until the first use, and nothing migrates: see ``embedded``.
    """

    def __init__(self, url: str | None = None, *, settings: Settings | None = None) -> None:
        self.settings = settings if settings is not None else Settings.load()
        self.url = url or self.settings.database_url
        if not self.url:
            raise InvalidInput(
                "no database URL was given",
                hint="pass one, set ORCHESTRATOR_DATABASE_URL, or use Orchestrator.embedded()",
            )
        self.pooler = None if self.settings.pooler == "none" else self.settings.pooler
        # Claim, record with events and sweep, one for reads; renewal has an engine of its own: it never waits for these.
        self._engine = make_engine(self.url, pool_size=3, pooler=self.pooler)
        self._renewal_engine = make_engine(
            self.url,
            pool_size=1,
            pooler=self.pooler,
            application_name=WORKER_APPLICATION,
            silence=min(SILENCE, self.settings.lease / 4),  # a dead line leaves time for another renewal
        )
        self._tasks = TaskRepository(self._engine)
        self._runs = RunRepository(self._engine, give_up_after=self.settings.give_up_after)
        self._workers = WorkerRepository(self._engine)
        self._renewals = WorkerRepository(self._renewal_engine)
        self._adding = AddingRepository(self._engine)
        self._plans = PlanRepository(self._engine)
        self.events = EventRepository(self._engine)
        self.minutes = MinuteRepository(self._engine)
        self.operations = OperationsRepository(self._engine)
        self.questions = QuestionRepository(self._engine)
        self.checkpoints = CheckpointRepository(self._engine)
        self.agent_states = AgentRepository(self._engine)
        self.breakers = BreakerRepository(self._engine)
        self.audit = AuditRepository(self._engine)
        self.tracing = tracing(self.settings.tracing)
        thresholds = Thresholds.read(self.settings.alerts)
        self.hooks = read_hooks(self.settings.alerts.get("hooks", {}))
        self.alerting = AlertRepository(self._engine, thresholds)
        self.reading = ReadingRepository(self._engine, thresholds)
        self.diagnosis = DiagnosisRepository(self._engine)
        self.health = HealthRepository(self._engine, self.url, thresholds)
        self.kept = Retention.read(self.settings.retention)
        self.retention = RetentionRepository(self._engine)
        self.snapshots = SnapshotRepository(self._engine, thresholds)
        self._notifier = Notifier(self._engine)
        self._prices = Prices(self.settings.prices)
        self._definitions: dict[str, AgentDefinition] | None = None

    @classmethod
    def embedded(cls, home: str | os.PathLike[str] | None = None, *, settings: Settings | None = None) -> Orchestrator:
        """Use this user's embedded PostgreSQL: start it or attach to it, and migrate it."""
        url = EmbeddedServer(None if home is None else Path(home)).start()
        schema.upgrade(url)
        return cls(url, settings=settings)

    def pool_waits(self) -> tuple[list[int], float]:
        """How long units of work waited for a connection: counts by ``metrics.POOL_SECONDS``, and seconds together."""
        return pool_waits(self._engine)

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return shown(str(self.url))

    def close(self) -> None:
        """Close every connection. The orchestrator can be used again; it connects anew."""
        self._notifier.close()
        self._engine.dispose()
        self._renewal_engine.dispose()

    def __enter__(self) -> Orchestrator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_schema(self, patience: float = 0.0) -> None:
        """Raise SchemaOutOfDate unless this version can work with the database's schema.

        Raises DatabaseUnavailable when the database cannot be asked within *patience* seconds.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                return schema.check(self._engine)
            except DatabaseUnavailable as error:
                if isinstance(error, SchemaOutOfDate) or time.monotonic() >= deadline:
                    raise
                time.sleep(min(0.2, patience))

    # -- the three units (ADR-0004) -------------------------------------------------------------------------------

    def claim(
        self,
        worker: UUID,
        agents: Sequence[Known],
        limit: int,
        *,
        plan_id: int | None = None,
        suspects: bool = False,
        keyed: bool = True,
        patience: threading.Event | None = None,
    ) -> Claimed:
        """Unit 1: take up to *limit* ready tasks; committed on return. Raises DatabaseUnavailable after a few tries."""
        began = time.time_ns()
        claimed = transient(
            lambda: self._tasks.claim(worker, agents, limit, plan_id=plan_id, suspects=suspects, keyed=keyed),
            give_up_after=CLAIM_PATIENCE,
            stop=patience,
        )
        again = [claim.task_id for claim in claimed.claims if claim.attempt > 1]
        if again:
            claimed = self._carry(claimed, again, patience)
        if self.tracing is not None:
            claimed = replace(claimed, claims=self.tracing.claimed(claimed.claims, began))
        unresolved = [claim.task_id for claim in claimed.claims if claim.template]
        if not unresolved:
            return claimed
        results = transient(
            lambda: self._tasks.parents_results(unresolved), give_up_after=CLAIM_PATIENCE, stop=patience
        )
        claims = [
            replace(claim, params=with_results(claim.params, results.get(claim.task_id, {})))
            if claim.template
            else claim
            for claim in claimed.claims
        ]
        return replace(claimed, claims=claims)

    def look(
        self,
        worker: UUID,
        agents: Sequence[Known],
        *,
        plan_id: int | None = None,
        patience: threading.Event | None = None,
    ) -> Look:
        """Whether there is something to claim; see ``TaskRepository.look``. Raises as ``claim`` does."""
        return transient(
            lambda: self._tasks.look(worker, agents, plan_id=plan_id), give_up_after=CLAIM_PATIENCE, stop=patience
        )

    def _carry(self, claimed: Claimed, again: Sequence[int], patience: threading.Event | None) -> Claimed:
        """*claimed* with what the attempts before left to those of *again*: answers, checkpoints."""
        said, left = transient(
            lambda: (self.questions.answers(again), self.checkpoints.of_tasks(again)),
            give_up_after=CLAIM_PATIENCE,
            stop=patience,
        )
        claims = [
            replace(claim, answered=said.get(claim.task_id, ()), checkpoints=left.get(claim.task_id, {}))
            if claim.task_id in said or claim.task_id in left
            else claim
            for claim in claimed.claims
        ]
        return replace(claimed, claims=claims)

    def keep(self, new: Sequence[NewCheckpoint], *, patience: threading.Event | None = None) -> Stored:
        """Write checkpoints, as ``CheckpointRepository.add``; waits out database faults until *patience* is set."""
        return transient(lambda: self.checkpoints.add(new), give_up_after=None, stop=patience)

    async def execute(self, claim: Claim, agent: Agent, live: Live, stop: Stop) -> Outcome:
        """Unit 2: let *agent* work, with no transaction and no connection. Never raises but CancelledError.

        The budget is kept here: its seconds by a timer, the rest by ``Spending``. ``elapsed`` is measured by a clock that
        goes on while a laptop sleeps.
        """
        if self.tracing is None:
            return await self._execute(claim, agent, live, stop)
        with self.tracing.executing(claim) as (traced, ended):
            outcome = await self._execute(traced, agent, live, stop)
            ended(outcome)
            return outcome

    async def _execute(self, claim: Claim, agent: Agent, live: Live, stop: Stop) -> Outcome:
        started = boot_clock()
        if stop.reason is not None:  # asked to end before it began: nothing of it may be seen
            return Outcome(stop.reason, cause=str(stop.reason), message=stop.message)
        spending = None
        if needed(claim, self._prices):
            model = agent.defaults.model
            loop = asyncio.get_running_loop()
            live = spending = Spending(claim, live, stop, self._prices, model=model, loop=loop)
            if (over := spending.over_before_it_began()) is not None:
                return over
        for line in claim.told:
            live.write("answer", line)
        if claim.template:
            try:
                claim = replace(claim, input=resolve(claim.input, claim.params), template=False)
            except InvalidInput as error:  # a result without the part that is quoted: no later attempt will find it
                return Outcome(OutcomeClass.PERMANENT, cause="bad_placeholder", message=f"input: {error.message}")
        seconds = claim.budget.seconds
        timer = (
            None
            if seconds is None
            else asyncio.get_running_loop().call_later(
                seconds, stop.request, OutcomeClass.TIMED_OUT, f"over its budget of {seconds:g} seconds"
            )
        )
        try:
            outcome = await agent.execute(claim, live, stop)
        except Exception as error:
            log.exception("agent %s of task %s raised", claim.agent, claim.task_id)
            cause = f"{type(error).__module__}.{type(error).__qualname__}"
            outcome = Outcome(stop.reason or OutcomeClass.TRANSIENT, cause=cause, message=str(error) or cause)
        finally:
            if timer is not None:
                timer.cancel()
        if spending is not None:
            outcome = spending.conclude(outcome)
        return with_field(outcome, "elapsed", boot_clock() - started)

    def record(self, batch: Sequence[Ended], *, patience: threading.Event | None = None) -> list[Recorded]:
        """Unit 3: write the runs of *batch* and settle its tasks, in one transaction; committed on return.

        Tries again after database faults for as long as the process lives, or until *patience* is set: then
        DatabaseUnavailable. What no longer owned its task comes back ``late``.
        """
        began = time.time_ns()
        done = transient(lambda: self._runs.record_runs(batch), give_up_after=None, stop=patience)
        if self.tracing is not None:
            self.tracing.recorded(batch, done.recorded, began)
        self.notify(done.wake)
        return done.recorded

    def run_next(self, agents: Sequence[AgentLike] | None = None) -> Run | None:
        """The three units once, for one task: claim, execute, record. None when nothing is ready for *agents*.

        Renews its lease while the agent works. *agents* defaults to all that are known here.
        """
        chosen = self.resolve(agents)
        worker = self.register(identity(), name="run_next", slots=1, agents=[self.known(each).route for each in chosen])
        renewal = LeaseKeeper(lambda: self.renew(worker).alive, self.settings.lease, self.settings.heartbeat)
        try:
            claims = self.claim(worker, self._unrefused(chosen), 1).claims
            if not claims:
                return None
            outcome = asyncio.run(self._execute_one(claims[0], chosen, renewal))
            self.record([Ended(claims[0], outcome, "run_next", identity().host)])
            return self._runs.get(claims[0].task_id, claims[0].attempt)
        finally:
            renewal.end()
            self.stop_worker(worker)

    def _unrefused(self, agents: Sequence[Agent]) -> list[Known]:
        """The agents that no provider refuses now. Probes are the business of workers."""
        behind = {name for each in transient(self.breakers.read, give_up_after=CLAIM_PATIENCE) for name in each.agents}
        return [self.known(agent) for agent in agents if agent.name not in behind]

    async def _execute_one(self, claim: Claim, agents: Sequence[Agent], renewal: LeaseKeeper) -> Outcome:
        agent = next(a for a in agents if (a.name, a.definition) == (claim.agent, claim.definition))
        stop = Stop()
        renewal.watch(asyncio.get_running_loop(), stop)
        try:
            return await self.execute(claim, agent, Unwatched(claim, self.keep), stop)
        finally:
            for each in agents:
                await each.aclose()

    # -- agents ---------------------------------------------------------------------------------------------------

    def definitions(self) -> dict[str, AgentDefinition]:
        """The agents of ``orchestrator.toml``."""
        if self._definitions is None:
            self._definitions = definitions(self.settings)
        return self._definitions

    def resolve(self, agents: Sequence[AgentLike] | None = None) -> list[Agent]:
        """Turn names, decorated functions and agents into agents; None: all that are configured.

        Raises UnknownAgent, with the nearest name, for a name that the configuration does not define.
        """
        from orchestrator.agents.building import build  # every kind of agent with it: not for those who only look

        known = self.definitions()
        chosen: list[Agent] = []
        for each in list(known) if agents is None else agents:
            found: Any = each
            if isinstance(each, str):
                if each not in known:
                    raise unknown_agent(each, known)
                found = known[each]
            chosen.append(build(found))
        return chosen

    def known(self, agent: Agent) -> Known:
        """What a claim needs to know of *agent*: its route, and what it gives to tasks that left it open."""
        given, settings = agent.defaults, self.settings
        return Known(
            agent.name,
            agent.definition,
            settings.max_retries if given.max_retries is None else given.max_retries,
            given.retry or RetryPolicy(settings.retry_initial, settings.retry_factor, settings.retry_max),
            given.budget or Budget(),
            getattr(agent, "shared_directory", None),
        )

    # -- adding ---------------------------------------------------------------------------------------------------

    @overload
    def add(
        self,
        agent: AgentFunction[[Context[I]], Any],
        input: I,
        *,
        session: CallerSession | None = None,
        **options: Any,
    ) -> Added: ...

    @overload
    def add(
        self,
        agent: str | AgentFunction[..., Any],
        input: Any = None,
        *,
        session: CallerSession | None = None,
        **options: Any,
    ) -> Added: ...

    def add(
        self,
        agent: str | AgentFunction[..., Any],
        input: Any = None,  # noqa: A002
        *,
        session: CallerSession | None = None,
        **options: Any,
    ) -> Added:
        """Add one task; with *session*, in the caller's own transaction.

        *agent* is a name, which is not checked (its worker may be elsewhere), or the decorated function itself: then
        *input* is checked against its annotation, and may be of that type.
        Options: title, name, priority, at (an aware datetime), max_retries, retry, budget or its parts
        (budget_seconds, budget_tokens, budget_usd, budget_turns, on_limit), unique_key, concurrency_key, after (ids),
        tags, params, traceparent. Without *session* it is committed on return and workers are woken. Returns id, created
        and status; ``created`` is False for the live task that already has the unique key. Raises InvalidInput and NotFound.
        """
        return self.add_many([{"agent": agent, "input": input, **options}], session=session)[0]

    def add_many(
        self, tasks: Iterable[Mapping[str, Any] | NewTask], *, session: CallerSession | None = None
    ) -> list[Added]:
        """Add many tasks, all or none; results are in the order given. Each is a mapping with the arguments of ``add``."""
        new = [task if isinstance(task, NewTask) else new_task(named(task)) for task in tasks]
        check_prices(new, self.definitions, self.settings.prices)
        if self.tracing is None:
            return self._add(new, session)
        with self.tracing.adding(new) as traced:
            return self._add(traced, session)

    def _add(self, new: Sequence[NewTask], session: CallerSession | None) -> list[Added]:
        if session is not None:
            added = self._adding.add_many(new, session)
            after_commit(session, lambda: self.notify(ready_agents(new, added)))
            return added
        added = transient(lambda: self._adding.add_many(new), give_up_after=CLAIM_PATIENCE)
        self.notify(ready_agents(new, added))
        return added

    def submit(self, plan: Plan, *, fresh: bool = False) -> Submitted:
        """Submit a plan, all or nothing; committed on return. What is unchanged since the last time stays as it is."""
        if self.tracing is None:
            return self._submit(plan.name, plan.tasks, fresh)
        with self.tracing.adding(plan.tasks, "orchestrator.submit") as tasks:
            return self._submit(plan.name, tasks, fresh)

    def _submit(self, name: str, tasks: Sequence[NewTask], fresh: bool) -> Submitted:
        submitted = transient(lambda: self._plans.submit(name, tasks, fresh=fresh), give_up_after=CLAIM_PATIENCE)
        self.notify(submitted.wake)
        return submitted

    def plan_id(self, name: str) -> int:
        """The id of the plan called *name*. Raises NotFound."""
        return transient(lambda: self._plans.find(name), give_up_after=0)

    def plan_tasks(self, plan_id: int) -> list[int]:
        """The ids of a plan's current tasks, in the plan's order."""
        return transient(lambda: self._plans.current(plan_id), give_up_after=0)

    def notify(self, agents: Iterable[str]) -> None:
        """Tell workers that there may be work for *agents*: a hint, after the commit, never an error."""
        self._notifier.notify(agents)

    # -- reading --------------------------------------------------------------------------------------------------

    def get(self, task_id: int) -> Task:
        """The task as a detached entity. Raises NotFound."""
        return transient(lambda: self.reading.entity(task_id), give_up_after=0)

    def runs(self, task_id: int) -> list[Run]:
        """The runs of a task, by attempt. Raises NotFound when there is no such task."""
        self.get(task_id)
        return transient(lambda: self._runs.of_task(task_id), give_up_after=0)

    def status(self) -> dict[str, Any]:
        """Counts, agents, running tasks, workers, lock-hold times and alerts, as ``orchestrator status --json``."""
        return transient(self.reading.status, give_up_after=0)

    def wait(self, task_id: int, timeout: float | None = None) -> Task:
        """Wait until the task has ended and return it. Raises WaitTimeout after *timeout* seconds, and NotFound."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 0.02
        while True:
            status = transient(lambda: self.reading.statuses([task_id]), give_up_after=CLAIM_PATIENCE).get(task_id)
            if status is None:
                raise NotFound(f"task {task_id} does not exist", task=task_id)
            if status in ENDED:
                return self.get(task_id)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise WaitTimeout(
                    f"task {task_id} is still {status.value} after {timeout:g} seconds",
                    hint=f"orchestrator show {task_id}",
                    task=task_id,
                )
            time.sleep(pause if left is None else min(pause, left))
            pause = min(1.0, pause * 1.5)

    # -- operating ------------------------------------------------------------------------------------------------

    def cancel(self, task_id: int, *, actor: str = "python", reason: str | None = None) -> TaskStatus:
        """Cancel a task; committed on return. A running one is asked to end and stays ``running`` until it has.

        Returns its status now. Raises Conflict when it is done or failed, NotFound when there is none.
        """
        status = transient(
            lambda: self.operations.cancel_one(task_id, actor=actor, reason=reason), give_up_after=CLAIM_PATIENCE
        )
        if status is TaskStatus.RUNNING:
            self.notify({CANCEL})
        return status

    def retry(self, task_id: int, *, actor: str = "python", reason: str | None = None) -> TaskStatus:
        """Open a failed or cancelled task again, with its descendants; committed on return. Raises Conflict."""
        status = transient(
            lambda: self.operations.retry_one(task_id, actor=actor, reason=reason), give_up_after=CLAIM_PATIENCE
        )
        self.notify({self.get(task_id).agent})
        return status

    def approve(
        self, task_id: int, *, name: str | None = None, actor: str = "python", reason: str | None = None
    ) -> TaskStatus:
        """Approve what a task asks; committed on return. Returns its status now: pending, or waiting for another answer.

        *name* says which question of several. Raises Conflict when nothing is open (somebody else was first, and the
        error says who), InvalidInput for a question that wants words, NotFound.
        """
        return self._say(task_id, Verdict.APPROVED, actor, name=name, reason=reason)

    def deny(
        self, task_id: int, *, name: str | None = None, actor: str = "python", reason: str | None = None
    ) -> TaskStatus:
        """Refuse what a task asks, as ``approve``; it is cancelled, unless it asked for leave to use a tool."""
        return self._say(task_id, Verdict.DENIED, actor, name=name, reason=reason)

    def answer(
        self, task_id: int, text: str, *, name: str | None = None, actor: str = "python", reason: str | None = None
    ) -> TaskStatus:
        """Answer what a task asks, as ``approve``. Raises InvalidInput for an answer that is none of the choices."""
        return self._say(task_id, Verdict.ANSWERED, actor, text=text, name=name, reason=reason)

    def _say(self, task_id: int, verdict: Verdict, actor: str, **said: Any) -> TaskStatus:
        # Once: repeated after a commit whose answer was lost it would find its own word and call it somebody else's.
        changed = transient(
            lambda: self.questions.say(TaskFilter(ids=[task_id]), verdict, actor=actor, **said), give_up_after=0
        )
        self.notify(changed.wake)
        return self._status(task_id)

    def _status(self, task_id: int) -> TaskStatus:
        status = transient(lambda: self.reading.statuses([task_id]), give_up_after=0).get(task_id)
        if status is None:
            raise NotFound(f"task {task_id} does not exist", task=task_id)
        return status

    def expire_questions(self) -> int:
        """Take the defaults of questions whose deadline has passed, or end their tasks; return how many there were."""
        total = 0
        while (expired := transient(self.questions.expire, give_up_after=0))[0]:
            self.notify(expired[1])
            total += expired[0]
        return total

    # -- workers and the watchdog ---------------------------------------------------------------------------------

    def register(
        self,
        who: Identity,
        *,
        name: str,
        slots: int,
        agents: Sequence[str],
        plan: str | None = None,
        lease: float | None = None,
        heartbeat: float | None = None,
    ) -> UUID:
        """Register this process as a worker under a fresh UUID; committed on return."""
        return transient(
            lambda: self._workers.register(
                who,
                name=name,
                slots=slots,
                agents=agents,
                plan=plan,
                lease=lease or self.settings.lease,
                heartbeat=heartbeat or self.settings.heartbeat,
                version=__version__,
            ),
            give_up_after=CLAIM_PATIENCE,
        )

    def worker_name(self, worker: UUID) -> str | None:
        """The name under which *worker* is registered."""
        return self._workers.name_of(worker)

    def renew(self, worker: UUID, *, deaf: bool = False) -> Renewal:
        """Renew the lease of *worker*, on a connection of its own; one try. Driver errors come as they are."""
        return transient(lambda: self._renewals.renew(worker, deaf=deaf), give_up_after=0)

    def stop_worker(self, worker: UUID) -> None:
        """Say that *worker* ended by itself; a database that is away is not waited for."""
        try:
            transient(lambda: self._workers.stop(worker), give_up_after=1)
        except OrchestratorError as error:
            log.warning("worker %s could not sign off: %s", worker, error)

    def drain(self, worker: str) -> UUID:
        """Ask a worker, by name or id, to claim no more and to end. Raises NotFound and Conflict."""
        return transient(lambda: self._workers.drain(worker), give_up_after=0)

    def judge(self, *, spare: Collection[UUID] = ()) -> list[UUID]:
        """Declare silent workers dead, if there is a witness, but those in *spare*; return their ids."""
        return transient(lambda: self._workers.judge(spare=spare), give_up_after=0)

    def witness(self) -> bool:
        """Whether somebody has been renewing for long enough that silence of others means something."""
        return transient(lambda: self._workers.witness(self.settings.lease), give_up_after=0)

    def late(self) -> bool:
        """Whether some live worker has missed two renewals, so that there may be something to judge."""
        return self._workers.late()

    def mark_gone(self, workers: Sequence[UUID], why: str) -> list[UUID]:
        """Declare workers dead whose processes are known to be gone; return those buried by this call."""
        return transient(lambda: self._workers.mark_gone(workers, why), give_up_after=0)

    def neighbours(self, who: Identity) -> list[Neighbour]:
        """Live workers of the same host, boot and PID namespace."""
        return transient(lambda: self._workers.neighbours(who), give_up_after=0)

    def fallen(self, who: Identity) -> list[Neighbour]:
        """Workers of the same host, boot and PID namespace that were declared dead lately."""
        return transient(lambda: self._workers.fallen(who), give_up_after=0)

    def take_back(self, limit: int = 100) -> list[tuple[int, int, str]]:
        """Take tasks of dead workers back, in id order; call again until it returns nothing."""
        return transient(lambda: self._tasks.take_back(limit, self.settings.give_up_after), give_up_after=0)

    def promote(self) -> float | None:
        """Make due what has become due; return the seconds until the next one."""
        agents, upcoming = transient(self._tasks.promote, give_up_after=0)
        self.notify(agents)
        return upcoming

    def cancel_requests(self, worker: UUID) -> list[tuple[int, int]]:
        """The (task, attempt) pairs of *worker* that somebody asked to cancel."""
        return transient(lambda: self._tasks.cancel_requests(worker), give_up_after=0)

    def owned(self, worker: UUID) -> set[tuple[int, int]]:
        """Every (task, attempt) that the database says *worker* runs."""
        return transient(lambda: self._tasks.owned(worker), give_up_after=0)

    def hand_back(self, worker: UUID, held: Sequence[tuple[int, int]], reason: str) -> int:
        """Give tasks back as ``interrupted``; return how many still were this worker's."""
        return transient(lambda: self._tasks.hand_back(worker, held, reason), give_up_after=0)

    def workspaces(
        self, *, remove: bool = False, older_than: float = 0.0, force: Sequence[str] = (), abandoned: bool = False
    ) -> list[Found]:
        """The workspaces on this host, each with the reason why it must stay; with *remove* those without are removed.

        *force* names some that are removed with what is in them, unless a task or a process works there. *abandoned*:
        only what an attempt that was killed, or had succeeded, left behind.
        """
        from orchestrator.agents.workspaces import survey

        def stays(records: list[tuple[str, int, int, str]]) -> dict[str, str | None]:
            return transient(lambda: self.reading.workspaces(records), give_up_after=0)

        return survey(stays, remove=remove, older_than=older_than, force=force, abandoned=abandoned)

    def idle(self, agents: Sequence[Known], plan_id: int | None = None) -> bool:
        """Whether no task of *agents* runs anywhere, is due, or waits for a retry."""
        return transient(lambda: self._tasks.idle(agents, plan_id), give_up_after=0)


__all__ = ["AgentLike", "Orchestrator"]
