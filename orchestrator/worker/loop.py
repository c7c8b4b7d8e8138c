"""``Worker``: many slots around the three units. What runs where:

    event loop       agents, by the thousand; starting, stopping and ending them
    claimer          ``claim`` for free slots                                  (connection 1)
    recorder         ``record`` as group commit, transcripts, sweeps           (connection 2)
    heartbeat        renews the lease, and watches loop and lease             (connection 3)
    listener         hints of new tasks and cancel requests                   (connection 4)

Claims are handed to the loop, and outcomes to the recorder, in batches: a task costs no thread switch of its own. Only
the loop starts, stops and ends attempts; the other threads ask it to.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar
from uuid import UUID

from orchestrator import metrics
from orchestrator.agents.custody import end_agents
from orchestrator.agents.processes import harden, raise_descriptor_limit
from orchestrator.agents.protocol import Agent
from orchestrator.database.notify import CANCEL, Listener, payload
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput, OrchestratorError
from orchestrator.liveness import boot_clock, identity
from orchestrator.metrics import Metrics
from orchestrator.service import CLAIM_PATIENCE, AgentLike, Orchestrator
from orchestrator.worker.alerting import Alerter
from orchestrator.worker.claimer import Claimer
from orchestrator.worker.desk import Desk
from orchestrator.worker.exposition import Health, Port, exposed
from orchestrator.worker.gates import Gates
from orchestrator.worker.heartbeat import Heartbeat
from orchestrator.worker.observer import Attempt, Key, Observer, Observers, Watched
from orchestrator.worker.recorder import Recorder, interrupted
from orchestrator.worker.shutdown import Signals, cancel_rest
from orchestrator.worker.spool import Spool
from orchestrator.worker.watchdog import Sweeper, once

log = logging.getLogger(__name__)
T = TypeVar("T")

CONCURRENCY = 10
STOPPING = 2.5
"""Seconds that stopped agents get at a shutdown before their trees are killed from outside; with KILLING, RECORDING and
LAST_CLAIM the five that a shutdown may take beyond its grace."""
LAST_CLAIM = 1.0
KILLING = 0.5
RECORDING = 1.0
LEASE_OVER = "the lease could not be renewed"
TICK = 0.25
LOOK_EVERY = 2.0
STUBBORN = 15.0
"""Seconds after its kill grace that an agent may take to stop before the worker drains for it."""


class Worker:
    """Works on tasks of *agents* until told to stop.

    - ``agents``: names, decorated functions or agents; None: all that are configured
    - ``concurrency``: agents at work at once
    - ``plan_id``: claim only this plan's tasks
    - ``heartbeat``, ``lease``, ``sweep``, ``poll``, ``grace``: seconds; None: as the orchestrator's settings say
    - ``observers``: told what happens; see ``Observer``
    - ``signals``: handle SIGTERM and SIGINT while ``run`` is in the main thread
    - ``watchdog``: False leaves dead workers, and alerts and their hooks, to others
    - ``metrics_port``: serve the counters at http://127.0.0.1:PORT/metrics while it runs; also ``HOST:PORT``
    - ``health_port``: answer probes at ``/live`` and ``/ready`` there; may be the same port

    Raises InvalidInput for settings that cannot be (a heartbeat of more than half of the lease), UnknownAgent.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        agents: Sequence[AgentLike] | None = None,
        concurrency: int | None = None,
        *,
        plan_id: int | None = None,
        plan: str | None = None,
        name: str | None = None,
        heartbeat: float | None = None,
        lease: float | None = None,
        sweep: float | None = None,
        poll: float | None = None,
        grace: float | None = None,
        observers: Sequence[Observer] = (),
        signals: bool = True,
        watchdog: bool = True,
        metrics_port: Port | None = None,
        health_port: Port | None = None,
    ) -> None:
        settings = orchestrator.settings.changed(
            heartbeat=heartbeat, lease=lease, sweep=sweep, poll=poll, grace=grace, concurrency=concurrency
        )
        self._orchestrator = orchestrator
        self._settings = settings
        self._agents: list[Agent] = orchestrator.resolve(agents)
        if not self._agents:
            raise InvalidInput("a worker needs an agent to work for", hint="define one in orchestrator.toml")
        self._plan, self._plan_id = plan, plan_id
        self._signals, self._watchdog = signals, watchdog
        self._metrics_port, self._health_port = metrics_port, health_port
        self._who = identity()
        self.metrics = Metrics()
        self._observers = Observers(observers)
        self._desk = Desk(settings.concurrency or CONCURRENCY, self._who, name or f"{self._who.host}-{self._who.pid}")
        self._started = False
        self._until_idle = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_before_start: tuple[float | None] | None = None
        self._changed: asyncio.Event | None = None
        self._draining: str | None = None
        self._grace: float | None = None
        self._hurry = False
        self._stop_new: tuple[OutcomeClass, str] | None = None
        self._expired_for: UUID | None = None
        self._kick_planned = False
        self._ticks = 0
        self._ticked = math.inf
        self._hears: Listener | None = None
        self._rebirth = threading.Lock()
        self._look_at = 0.0
        self._asked_since: dict[Key, float] = {}
        margin = max(float(getattr(agent, "kill_grace", 2.0)) for agent in self._agents) + 1.0
        self._stubborn_after = margin + STUBBORN
        self._heartbeat = Heartbeat(
            heartbeat=settings.heartbeat,
            lease=settings.lease,
            margin=min(margin, settings.lease / 2),
            renew=self._renew,
            dead=self._declared_dead,
            expired=self._lease_over,
            good=self._lease_good,
            draining=lambda: self._call(self._drain, "drained by an operator", None),
            reconcile=self._ask_to_reconcile,
            stuck=self._loop_stuck,
            ticks=lambda: self._ticks,
        )
        sweeper = Sweeper(orchestrator, self._who, lambda: self._recorder.look_around()) if watchdog else None
        known = [orchestrator.known(agent) for agent in self._agents]
        self._gates = Gates(self._agents, known, orchestrator.breakers)
        self._recorder = Recorder(
            orchestrator,
            self._desk,
            self._gates,
            self.metrics,
            self._observers,
            sweeper,
            Spool(str(orchestrator.url)),
            sweep=settings.sweep,
            cancel=lambda keys: self._call(self._stop_keys, keys, OutcomeClass.CANCELLED, "cancelled on request"),
            lost=lambda keys: self._call(self._stop_keys, keys, OutcomeClass.LOST, "the task is not this worker's"),
            work=lambda: self._claimer.hint(),
        )
        self._claimer: Claimer

    # -- for callers, from any thread ---------------------------------------------------------------------------------

    @property
    def id(self) -> UUID | None:
        """The id under which this worker is registered now; None before that."""
        return self._desk.worker

    @property
    def name(self) -> str:
        """The name under which it is registered."""
        return self._desk.name

    def watched(self) -> list[Watched]:
        """The running attempts, the oldest first."""
        return sorted((attempt.watched() for attempt in self._desk.attempts()), key=lambda each: -each.seconds)

    def _metrics_text(self) -> str:
        desk = self._desk
        gauges = (
            ("slots", "Agents that this process runs at once, at most.", desk.slots),
            ("running", "Agents at work now.", desk.running),
            ("unrecorded", "Ended attempts that are not committed yet.", desk.ended - desk.recorded),
            ("heartbeat_age_seconds", "Since the last confirmed renewal of the lease.", self._heartbeat.age),
        )
        own = [metrics.gauge(f"orchestrator_worker_{name}", what, value) for name, what, value in gauges]
        name, what = "orchestrator_worker_pool_wait_seconds", "How long units of work waited for a connection."
        own.append(metrics.histogram_of(name, what, metrics.POOL_SECONDS, *self._orchestrator.pool_waits()))
        return metrics.text(chain(self.metrics.families(), own))

    def health(self) -> Health:
        """What a probe hears; from any thread. A database that is away makes no worker dead: a new one would not help."""
        still = time.monotonic() - self._ticked
        if still > self._settings.lease / 2:
            return Health(f"the event loop has not moved for {still:.0f} s")
        if self._draining is None and self._desk.worker is not None and not self._recorder.alive:
            return Health("the recorder has ended")
        if self._loop is None or self._desk.worker is None:
            return Health(wait="not registered")
        if self._draining is not None:
            return Health(wait=f"claims no more: {self._draining}")
        if not self._heartbeat.safe or self._stop_new is not None:
            return Health(wait=f"the lease was renewed {self._heartbeat.age:.0f} s ago")
        return Health()

    def stop(self, grace: float | None = None) -> None:
        """Claim no more; after *grace* seconds (default: the setting) stop the agents; then ``run`` returns.

        Returns at once. Calling it again can only shorten the grace.
        """
        seconds = self._settings.grace if grace is None else grace
        if self._loop is None:
            self._stop_before_start = (seconds,)
        else:
            self._call(self._drain, "told to stop", seconds)

    def run(self, *, until_idle: bool = False) -> int:
        """Work until SIGTERM, SIGINT, ``stop`` or a drain, with *until_idle* also until nothing is left to do.

        Idle: no task of the agents runs anywhere, is due, or waits for a retry. Returns 0, or 130 after a second SIGINT.
        Raises DatabaseUnavailable when the database cannot be reached at the start, SchemaOutOfDate. Can be called once.
        """
        loop = asyncio.new_event_loop()
        # What is there now stays: to look through it for garbage, a hundred thousand objects each time, would cost more
        # than claiming a task does.
        gc.freeze()
        try:
            asyncio.set_event_loop(loop)
            return loop.run_until_complete(self.run_async(until_idle=until_idle))
        finally:
            # Not asyncio.run: it would wait for ever for a coroutine that swallows its cancellation.
            try:
                cancel_rest(loop)
            finally:
                asyncio.set_event_loop(None)
                loop.close()
                gc.unfreeze()

    async def run_async(self, *, until_idle: bool = False) -> int:
        """As ``run``, on the caller's event loop."""
        if self._started:
            raise InvalidInput("a worker runs once; make another one")
        self._started = True
        self._until_idle = until_idle
        loop = self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._claimer = Claimer(
            self._orchestrator,
            self._desk,
            self._agents,
            self._gates,
            self.metrics,
            self._observers,
            poll=self._settings.poll,
            plan_id=self._plan_id,
            may_claim=self._may_claim,
            start=lambda attempts: self._call(self._begin, attempts),
            dead=self._heartbeat.renew_now,
            idle=(lambda: self._call(self._drain, "idle", None)) if until_idle else None,
        )
        harden()
        raise_descriptor_limit()
        handlers = Signals(loop, lambda name: self._drain(name, self._settings.grace), self._end_now, self._abandon)
        with exposed(self._metrics_text, self.health, metrics=self._metrics_port, probes=self._health_port):
            if not self._signals:
                return await self._work()
            with handlers:
                return await self._work()

    # -- the course of a run, on the loop -----------------------------------------------------------------------------

    async def _work(self) -> int:
        await _in_thread(lambda: self._orchestrator.check_schema(CLAIM_PATIENCE))
        asked = boot_clock()
        self._desk.worker = await _in_thread(self._register)
        log.info("worker %s (%s) works with %d slots", self._desk.name, self._desk.worker, self._desk.slots)
        listener = self._hears = self._listener()
        hooks = self._orchestrator.hooks
        alerter = Alerter(self._orchestrator, hooks) if hooks and self._watchdog else None
        ticker = asyncio.get_running_loop().call_soon(self._tick)
        try:
            self._heartbeat.begin(self._desk.worker, asked)
            self._recorder.begin()
            self._claimer.begin()
            listener.start()
            if alerter is not None:
                alerter.begin()
            threading.Thread(target=self._tidy, name="tidy", daemon=True).start()
            if self._stop_before_start is not None:
                self._drain("told to stop", self._stop_before_start[0])
            await self._until(lambda: self._draining is not None)
            await self._wind_down()
        finally:
            self._claimer.close()
            if alerter is not None:
                alerter.close(0.5)
            self._heartbeat.close()
            listener.stop(0.2)
            ticker.cancel()
            self._loop = None
        return 130 if self._hurry else 0

    def _tidy(self) -> None:
        """Remove workspaces that killed workers of this host left, as far as nothing is lost by it."""
        try:
            gone = [
                each.folder.name for each in self._orchestrator.workspaces(remove=True, abandoned=True) if not each.keep
            ]
        except (OrchestratorError, OSError) as error:
            log.debug("workspaces were not looked at: %s", error)
            return
        if gone:
            log.info("removed the abandoned workspaces %s", ", ".join(gone))

    async def _wind_down(self) -> None:
        """From "no more claims" to "everything is recorded"."""
        loop = asyncio.get_running_loop()
        self._claimer.close()
        began = loop.time()
        while not self._at_rest():
            left = None if self._grace is None else began + self._grace - loop.time()
            if self._hurry or (left is not None and left <= 0):
                break
            await self._until(lambda: self._at_rest() or self._hurry, left, and_grace=self._grace)
        if not self._at_rest():
            # What is stopped becomes pending again: a claim that is still on its way would take it once more.
            await self._until(lambda: self._claimer.done.is_set() or self._hurry, LAST_CLAIM)
            self._stop_everything(OutcomeClass.INTERRUPTED, "the worker is shutting down")
            # A claim that hangs in a dead network is not worth the time that agents get.
            await self._until(lambda: self._at_rest() or self._hurry, STOPPING if self._desk.running > 0 else RECORDING)
            if self._desk.running > 0:
                await self._kill_everything()
                await self._until(self._at_rest, KILLING)
            self._give_up_on_rest()
        prompt = self._grace is not None
        await _in_thread(lambda: self._recorder.close(RECORDING if prompt or self._hurry else 30.0))
        await self._close_agents(0.5 if self._hurry else 2.0)
        await _in_thread(self._sign_off)

    def _at_rest(self) -> bool:
        return self._claimer.done.is_set() and self._desk.running <= 0

    async def _until(
        self, condition: Callable[[], bool], timeout: float | None = None, *, and_grace: float | None = None
    ) -> None:
        """Wait until *condition* holds, looking whenever something changed; at most *timeout* seconds.

        With *and_grace* also until the grace is no longer that.
        """
        assert self._changed is not None
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while not condition() and (and_grace is None or self._grace == and_grace):
            left = 0.25 if deadline is None else min(0.25, deadline - loop.time())
            if left <= 0:
                return
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                continue

    async def _kill_everything(self) -> None:
        worker = self._desk.worker
        if worker is None:
            return
        try:
            await _in_thread(lambda: end_agents(worker, 0.0))
        except Exception:
            log.exception("agents could not be killed")

    def _give_up_on_rest(self) -> None:
        """What still has not ended is recorded as interrupted: its coroutine will never run again."""
        for attempt in self._desk.attempts():
            if attempt.task is not None:
                attempt.task.cancel()
                # asyncio would complain about the very thing that is recorded here.
                attempt.task._log_destroy_pending = False  # type: ignore[attr-defined]
            why = "the agent did not end when it was asked to"
            self._end(attempt, interrupted(attempt, why, boot_clock() - attempt.began))

    async def _close_agents(self, timeout: float) -> None:
        closing = [asyncio.ensure_future(agent.aclose()) for agent in self._agents]
        if not closing:
            return
        _, late = await asyncio.wait(closing, timeout=timeout)
        for each in late:
            each.cancel()
        for each in closing:
            if each.done() and not each.cancelled() and (error := each.exception()) is not None:
                log.error("an agent could not be closed: %s", error, exc_info=error)

    def _register(self) -> UUID:
        orchestrator, settings = self._orchestrator, self._settings
        worker = orchestrator.register(
            self._who,
            name=self._desk.name,
            slots=self._desk.slots,
            agents=[orchestrator.known(agent).route for agent in self._agents],
            plan=self._plan,
            lease=settings.lease,
            heartbeat=settings.heartbeat,
        )
        try:
            self._desk.name = once(lambda: orchestrator.worker_name(worker)) or self._desk.name
        except OrchestratorError as error:
            log.debug("the name of worker %s is not known: %s", worker, error)
        return worker

    def _sign_off(self) -> None:
        """Hand back what this worker never heard of, and say that it ended; not while outcomes lie in the spool.

        A row without this is judged by its lease, or by the next worker on this host: then its tasks are taken back.
        """
        worker = self._desk.worker
        if worker is None or self._recorder.spooled or self._desk.held or not self._claimer.done.is_set():
            return
        try:
            rest = once(lambda: self._orchestrator.owned(worker))
            if rest:
                once(lambda: self._orchestrator.hand_back(worker, sorted(rest), "its worker ended"))
        except Exception as error:  # noqa: BLE001 - whatever it was, the row stays and will be judged
            log.warning("worker %s could not hand back its tasks: %s", self._desk.name, error)
            return
        self._orchestrator.stop_worker(worker)

    # -- attempts, on the loop ----------------------------------------------------------------------------------------

    def _begin(self, attempts: list[Attempt]) -> None:
        loop = asyncio.get_running_loop()
        for attempt in attempts:
            if self._stop_new is not None:
                attempt.stop.request(*self._stop_new)
            elif attempt.claim.claimed_by != self._desk.worker:
                # The answer to its claim was held up until this process had died and gone on as another worker.
                attempt.stop.request(OutcomeClass.LOST, "its worker was declared dead")
            elif not self._heartbeat.safe:
                # Its claim was answered so late that somebody else may have the task by now.
                attempt.stop.request(OutcomeClass.INTERRUPTED, LEASE_OVER)
            attempt.task = loop.create_task(self._execute(attempt))
            if self._observers:
                self._observers.tell("started", attempt.claim)

    async def _execute(self, attempt: Attempt) -> None:
        try:
            outcome = await self._orchestrator.execute(attempt.claim, attempt.agent, attempt, attempt.stop)
        except asyncio.CancelledError:
            outcome = interrupted(attempt, "its execution was cancelled", boot_clock() - attempt.began)
        except GeneratorExit:  # the loop is gone, and this coroutine was given up before
            raise
        except BaseException as error:  # SystemExit of an agent must not end the worker
            log.exception("agent %s of task %s raised", attempt.claim.agent, attempt.claim.task_id)
            outcome = Outcome(
                attempt.stop.reason or OutcomeClass.TRANSIENT,
                cause=type(error).__qualname__,
                message=str(error) or type(error).__qualname__,
                elapsed=boot_clock() - attempt.began,
            )
        self._end(attempt, outcome)

    def _end(self, attempt: Attempt, outcome: Outcome) -> None:
        if attempt.ended:
            return
        outcome = attempt.end(outcome)
        attempt.task = None
        if self._gates.ended(attempt, outcome):
            self._claimer.hint()
        desk = self._desk
        desk.queue.append(attempt)
        desk.ended += 1
        if self._observers:
            self._observers.tell("ended", attempt.claim, outcome)
        if not self._kick_planned:
            # One wake-up for all that end in this turn of the loop.
            self._kick_planned = True
            asyncio.get_running_loop().call_soon(self._kick)

    def _kick(self) -> None:
        self._kick_planned = False
        self._desk.wake()
        if self._draining is not None:
            self._change()

    def _stop_keys(self, keys: list[Key], reason: OutcomeClass, message: str) -> None:
        for key in keys:
            attempt = self._desk.held.get(key)
            if attempt is not None and not attempt.ended:
                attempt.stop.request(reason, message)

    def _stop_everything(self, reason: OutcomeClass, message: str) -> None:
        self._stop_new = reason, message
        for attempt in self._desk.attempts():
            attempt.stop.request(reason, message)

    def _change(self) -> None:
        if self._changed is not None:
            self._changed.set()

    def _tick(self) -> None:
        self._ticks += 1
        self._ticked = time.monotonic()
        loop = self._loop
        if loop is None:
            return
        loop.call_later(min(TICK, self._settings.lease / 20), self._tick)
        if loop.time() >= self._look_at:
            self._look_at = loop.time() + LOOK_EVERY
            self._look_for_stubborn(loop.time())

    def _look_for_stubborn(self, now: float) -> None:
        """A worker with an agent that will not stop takes no new tasks: its slot is gone, and who knows what else.

        What survives SIGKILL is shown on the task's row, for the alert and for ``why``.
        """
        asked = {attempt.key: attempt for attempt in self._desk.attempts() if attempt.stop.reason is not None}
        self._asked_since = {key: self._asked_since.get(key, now) for key in asked}
        for attempt in asked.values():
            attempt.show_left()
        for key, since in self._asked_since.items():
            if now - since > self._stubborn_after and self._draining is None:
                agent = asked[key].claim.agent
                log.error("agent %s of task %s attempt %s does not stop: this worker claims no more", agent, *key)
                self._drain("an agent does not stop", None)

    # -- shutting down ------------------------------------------------------------------------------------------------

    def _drain(self, why: str, grace: float | None) -> None:
        if self._draining is None:
            self._draining, self._grace = why, grace
            if why != "idle":
                log.info("worker %s claims no more: %s", self._desk.name, why)
            self._observers.tell("stopping", why)
        elif grace is not None and (self._grace is None or grace < self._grace):
            self._grace = grace
        self._claimer.close()
        self._change()

    def _end_now(self) -> None:
        """The second SIGINT: nobody waits for anything."""
        self._hurry = True
        self._drain("SIGINT", 0.0)
        self._stop_everything(OutcomeClass.INTERRUPTED, "the worker was stopped at once")
        worker = self._desk.worker
        if worker is not None:
            threading.Thread(target=lambda: end_agents(worker, 0.0), name="kill", daemon=True).start()
        self._change()

    def _abandon(self) -> None:
        """The third SIGINT, in its handler: end the trees and the process."""
        self._leave(130)

    def _leave(self, code: int) -> None:
        try:
            self._observers.tell("leaving")
            if self._desk.worker is not None:
                end_agents(self._desk.worker, 0.0)
        finally:
            os._exit(code)

    # -- the lease: called on the heartbeat's threads -----------------------------------------------------------------

    def _may_claim(self) -> bool:
        # Not while new attempts would be stopped at once: a task would be claimed and handed back in a circle.
        return self._heartbeat.safe and self._stop_new is None and not self._rebirth.locked()

    def _renew(self, worker: UUID) -> tuple[bool, bool]:
        renewal = self._orchestrator.renew(worker, deaf=self._hears is not None and self._hears.deaf)
        return renewal.alive, renewal.draining

    def _lease_good(self) -> None:
        if self._stop_new is not None and self._expired_for is not None:
            self._call(self._lease_confirmed)

    def _lease_confirmed(self) -> None:
        if self._expired_for is not None and self._draining is None:
            self._expired_for = self._stop_new = None

    def _lease_over(self) -> None:
        self._call(self._stop_for_lease)

    def _stop_for_lease(self) -> None:
        self._expired_for = self._desk.worker
        if self._desk.running > 0:
            log.warning("worker %s could not renew its lease: stopping its agents before it ends", self._desk.name)
        self._stop_everything(OutcomeClass.INTERRUPTED, LEASE_OVER)

    def _declared_dead(self, old: UUID) -> UUID | None:
        """Stop everything, wait until it has stopped, and register anew. None when the worker is ending."""
        with self._rebirth:
            self._desk.worker = None
            stopped = threading.Event()
            self._call(self._stop_for_death, stopped)
            deadline = boot_clock() + 10
            while self._desk.running > 0 and boot_clock() < deadline and self._loop is not None:
                # Only then: the same task, claimed again by this process, must not run beside its lost attempt.
                stopped.wait(0.05)
            while self._loop is not None:
                asked = boot_clock()
                try:
                    new = self._register()
                except OrchestratorError as error:
                    log.debug("could not register: %s", error)
                    threading.Event().wait(min(1.0, self._settings.heartbeat))
                    continue
                self._heartbeat.confirmed(asked)
                self._desk.worker = new
                self._call(self._born_again)
                log.warning("worker %s goes on as %s", old, new)
                return new
        return None

    def _stop_for_death(self, stopped: threading.Event) -> None:
        self._stop_everything(OutcomeClass.LOST, "its worker was declared dead")
        if self._desk.running <= 0:
            stopped.set()

    def _born_again(self) -> None:
        self._expired_for = None
        if self._draining is None:
            self._stop_new = None
        self._claimer.hint()

    def _ask_to_reconcile(self) -> None:
        self._recorder.reconcile = True
        self._desk.record_now.set()

    def _loop_stuck(self) -> None:
        log.critical(
            "an agent has kept the event loop of worker %s busy for half a lease: the process ends, its tasks are lost",
            self._desk.name,
        )
        self._leave(70)

    # -- hints --------------------------------------------------------------------------------------------------------

    def _listener(self) -> Listener:
        orchestrator = self._orchestrator
        names = {payload(agent.name) for agent in self._agents}

        def heard(what: str) -> None:
            if what in names:
                self._claimer.hint()
            elif what == CANCEL:
                self._recorder.asked_to_cancel()

        return Listener(str(orchestrator.url), heard, connected=self._claimer.hint, pooler=orchestrator.pooler)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have the loop call *function*; from any thread. After the end of the run nothing happens."""
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("the loop has ended")


async def _in_thread(function: Callable[[], T]) -> T:
    """Run *function* on a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def work() -> None:
        value: Any = None
        failure: BaseException | None = None
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001 - it is raised again where the thread is awaited
            failure = error
        try:
            loop.call_soon_threadsafe(settle, value, failure)
        except RuntimeError:
            log.debug("the loop has ended")

    threading.Thread(target=work, daemon=True).start()
    return await future


__all__ = ["Worker"]
