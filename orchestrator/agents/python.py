"""Agents that are Python functions, as the worker sees them.

An async function runs inside the task that executes it, without a task of its own: ``_drive`` stands between the two, so
that a stop reaches the function as CancelledError and, should it ignore that, closes it after ``kill_grace``. Whatever
it does, it runs no more when ``execute`` returns. A plain function runs in a warm child process (``children``).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Any

from orchestrator.agents import child
from orchestrator.agents.census import MARK_NAME
from orchestrator.agents.children import Pool, StartFailed
from orchestrator.agents.environment import environment, withheld
from orchestrator.agents.faults import Fault, outcome_of, qualified_name, shorten, told, trace_of
from orchestrator.agents.functions import AgentFunction, Context, is_async, to_json, where
from orchestrator.agents.hiding import Hiding, without_secrets
from orchestrator.agents.meter import Meter, read_report
from orchestrator.agents.protocol import AgentDefaults, Live, Stop
from orchestrator.agents.redact import Secrets
from orchestrator.agents.shipping import directions
from orchestrator.agents.typed import BadResult, Types, shown, types_of
from orchestrator.domain.asking import Ask, read_ask
from orchestrator.domain.given import AgentDefinition, Login
from orchestrator.domain.outcome import Claim, Outcome, Usage
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput

log = logging.getLogger(__name__)


class _Words:
    """What a function says about its attempt, passed on to the worker; safe from any thread."""

    def __init__(self, claim: Claim, live: Live) -> None:
        self._claim = claim
        self._live = live
        self._lock = threading.Lock()
        self._meter: Meter | None = None
        self.current: str | None = None
        self.notes: list[str] = []
        self.open = True
        self.spoke = False

    def progress(self, percent: float | None, message: str | None) -> None:
        if self.open:
            self._live.progress(percent, message)

    def usage(self, fields: dict[str, Any]) -> None:
        if not self.open:
            return
        self.spoke = True
        report = read_report(fields)
        if isinstance(report, str):
            if report not in self.notes and len(self.notes) < 20:
                self.notes.append(report)
            return
        with self._lock:
            if self._meter is None:
                self._meter = Meter(self._claim.meter, resumed=self._claim.session is not None)
                if self.current is not None:
                    self._meter.session(self.current)
            usage = self._meter.add(report)
        self._live.usage(usage)

    def session(self, session: str) -> None:
        if self.open:
            self.current = session
            if self._meter is not None:
                with self._lock:
                    self._meter.session(session)
            self._live.session(session)

    def log(self, text: str) -> None:
        if self.open:
            self.spoke = True
            self._live.write("message", text)

    def keep(self, name: str, text: str) -> Future[Any]:
        self.spoke = True
        return self._live.keep(name, text)

    def used(self, *, ended: bool) -> Usage | None:
        """The attempt's usage at its end."""
        return None if self._meter is None else self._meter.close(ended=ended)


class _Run:
    """One execution on the loop and what was done to stop it."""

    __slots__ = ("cancels", "forced", "grace", "over", "pending", "task", "timer")

    def __init__(self, grace: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.grace = grace
        self.cancels = 0
        self.pending = False
        self.forced = False
        self.over = False
        self.timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """Cancel the function; a grace later, close it."""
        if not self.over:
            self._cancel()
            self.timer = asyncio.get_running_loop().call_later(self.grace, self._force)

    def _force(self) -> None:
        if not self.over:
            self.forced = True
            self._cancel()

    def _cancel(self) -> None:
        self.cancels += 1
        self.pending = True
        self.task.cancel()

    async def settle(self) -> None:
        """Leave the worker's task as it was: no cancellation of ours may reach it."""
        self.over = True
        if self.timer is not None:
            self.timer.cancel()
        if self.pending:
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                self.pending = False
        for _ in range(self.cancels):
            self.task.uncancel()


@types.coroutine
def _drive(coroutine: Coroutine[Any, Any, Any], run: _Run) -> Generator[Any, Any, Any]:
    """Await *coroutine* as ``await`` would, until it must be closed: then it is, whatever it catches."""
    step: Any = coroutine.send
    given: Any = None
    while True:
        try:
            awaited = step(given)
        except StopIteration as end:
            return end.value
        try:
            given = yield awaited
            step = coroutine.send
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                run.pending = False
            if run.forced:
                _close(coroutine)
                raise
            step, given = coroutine.throw, error


async def _awaited(value: Any) -> Any:
    """The result of something else than a coroutine that an async function made."""
    return await value if inspect.isawaitable(value) else value


def _close(coroutine: Coroutine[Any, Any, Any]) -> None:
    """End a coroutine. One that even ignores that is left where it stands: nobody resumes it, so it runs no more."""
    try:
        coroutine.close()
    except BaseException:  # noqa: BLE001 - RuntimeError if it ignored the end, else whatever its cleanup raised
        return


class PythonAgent:
    """A Python function as an agent. Made by ``from_function`` or ``from_definition``."""

    def __init__(
        self,
        name: str,
        *,
        function: Any = None,
        isolation: str | None = None,
        defaults: AgentDefaults | None = None,
        kill_grace: float = 2.0,
        tasks_per_child: int = 1_000,
        memory_mb: int | None = None,
        definition: AgentDefinition | None = None,
    ) -> None:
        self._name = name
        self._function = function
        self._isolation = isolation
        self._defaults = defaults or AgentDefaults()
        self._kill_grace = kill_grace
        self._tasks_per_child = tasks_per_child
        self._memory_mb = memory_mb
        self._given = definition
        self._on_loop: bool | None = None
        self._broken: tuple[Fault, str] | None = None
        self._pool: Pool | None = None
        self._resolving: asyncio.Lock | None = None
        self._types = Types()
        if function is not None:
            self._types = types_of(function)
            self._on_loop = (isolation or ("loop" if is_async(function) else "process")) == "loop"

    @classmethod
    def from_function(cls, fn: AgentFunction[..., Any]) -> PythonAgent:
        """The agent that ``@agent`` made of a function; InvalidInput if no child process could ever run it."""
        made = cls(
            fn.name,
            function=fn.function,
            isolation=fn.isolation,
            defaults=AgentDefaults(fn.max_retries, fn.retry, fn.budget),
            kill_grace=fn.kill_grace,
            tasks_per_child=fn.tasks_per_child,
            memory_mb=fn.memory_mb,
        )
        if not made._on_loop:
            made._pool = made._make_pool(directions(fn.function))
        return made

    @classmethod
    def from_definition(cls, definition: AgentDefinition) -> PythonAgent:
        """The agent of a ``python: package.module:function`` definition. Its module is imported at the first task."""
        if not definition.python:
            raise InvalidInput(f"agent {definition.name!r} has no python function", agent=definition.name)
        if definition.isolation not in (None, "loop", "process"):
            raise InvalidInput(
                f"isolation of agent {definition.name!r} is 'loop' or 'process', found {definition.isolation!r}",
                agent=definition.name,
            )
        return cls(
            definition.name,
            isolation=definition.isolation,
            defaults=AgentDefaults(definition.max_retries, definition.retry, definition.budget, definition.model),
            kill_grace=definition.kill_grace,
            definition=definition,
        )

    @property
    def name(self) -> str:
        return self._name

    @property
    def definition(self) -> str | None:
        return self._given.hash if self._given is not None and self._given.local else None

    @property
    def login(self) -> Login | None:
        """The account that it shares with others."""
        return None if self._given is None else self._given.login

    @property
    def defaults(self) -> AgentDefaults:
        return self._defaults

    @property
    def shared_directory(self) -> Callable[[str | None], str] | None:
        """For workspace: directory, from a task's ``dir`` to the real path that no two of its tasks use at once."""
        made = self._given
        if made is None or made.workspace != "directory":
            return None
        base, own = made.base_dir or str(Path.cwd()), made.dir or ""
        return lambda given: str(Path(base, own if given is None else given).resolve())

    def describe(self) -> dict[str, Any]:
        """Kind, callable and how it runs."""
        path = self._given.python if self._given is not None else where(self._function)
        runs = {True: "loop", False: "process", None: self._isolation or "loop if async, else process"}[self._on_loop]
        return {"kind": "python", "python": path, "isolation": runs, "kill_grace": self._kill_grace}

    async def aclose(self) -> None:
        """End the warm children."""
        if self._pool is not None:
            await self._pool.aclose()

    async def execute(self, claim: Claim, live: Live, stop: Stop) -> Outcome:
        """Run the function for *claim*; see ``Agent.execute``."""
        if self._on_loop is None and self._broken is None:
            await self._resolve()
        if self._broken is not None:
            return _broken(*self._broken)
        secrets = self._secrets()
        if secrets is None:
            return await self._by_policy(claim, live, stop)
        hiding = Hiding(live, secrets)
        outcome = await self._by_policy(claim, hiding, stop)
        hiding.close()
        short = [f"secret {name} is too short to be hidden in what the function says" for name in secrets.too_short]
        return without_secrets(replace(outcome, notes=(*outcome.notes, *short)), secrets)

    def _secrets(self) -> Secrets | None:
        """What must not be stored or shown of this definition's ``env``; None if it names no secrets."""
        if self._given is None or not self._given.env_secret:
            return None
        return Secrets(environment(self._given, os.environ).secrets)

    async def _by_policy(self, claim: Claim, live: Live, stop: Stop) -> Outcome:
        policy = "resume" if self._given is None else self._given.session
        if policy == "fresh" and claim.session is not None:
            claim = replace(claim, session=None)
        outcome, silent = await self._once(claim, live, stop)
        failed = outcome.status in (OutcomeClass.TRANSIENT, OutcomeClass.PERMANENT) and stop.reason is None
        if claim.session and failed and silent and policy == "resume-then-fresh":
            note = f"session {claim.session} could not be resumed ({outcome.message or outcome.cause}); started a fresh one"
            outcome, _ = await self._once(replace(claim, session=None), live, stop)
            outcome = replace(outcome, notes=(note, *outcome.notes))
        return outcome

    async def _once(self, claim: Claim, live: Live, stop: Stop) -> tuple[Outcome, bool]:
        """Call the function once; also say whether it ended before it had used, logged or kept anything."""
        words = _Words(claim, live)
        how = self._execute_on_loop if self._on_loop else self._execute_in_child
        return await how(claim, words, live, stop), not words.spoke

    # On the loop -------------------------------------------------------------------------------------------------------

    async def _execute_on_loop(self, claim: Claim, words: _Words, live: Live, stop: Stop) -> Outcome:
        run = _Run(self._kill_grace)
        context: Context = Context(words, **_task_of(claim))
        failure: BaseException | None = None
        result: Any = None
        returned = False
        stop.on_request(run.stop)
        try:
            if run.cancels == 0:
                self._types.take(context)
                made = self._function(context)
                result = await _drive(made if isinstance(made, types.CoroutineType) else _awaited(made), run)
                returned = True
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit of a function must not end the worker
            failure = error
        words.open = False
        stopped = stop.reason is not None
        if run.cancels:
            await run.settle()
        else:
            run.over = True
        if isinstance(failure, asyncio.CancelledError) and not stopped and run.task.cancelling():
            raise failure  # the worker itself is being cancelled
        usage = words.used(ended=not stopped)
        notes = tuple(words.notes)
        if stop.reason is not None:
            if run.forced:
                text = f"it ignored its cancellation and was closed after {self._kill_grace:g} s"
                live.write("note", text)
                notes += (text,)
            elif returned:
                notes += ("it returned although it was told to stop; its result was kept",)
                try:
                    result = to_json(result)
                except Exception:  # noqa: BLE001 - only a result of a stopped attempt
                    result = None
            elif failure is not None and not isinstance(failure, asyncio.CancelledError):
                notes += (trace_of(failure, below=__file__),)
            return Outcome(
                stop.reason,
                cause=str(stop.reason),
                message=stop.message,
                result=result,
                usage=usage,
                session=words.current,
                notes=notes,
            )
        if context.open_question is not None:
            return _suspended(context.open_question, returned, usage, words)
        if failure is None:
            try:
                result = self._types.give(result)
            except Exception as error:  # noqa: BLE001 - Permanent, or what a foreign model_dump raises
                failure = error
        if failure is not None:
            outcome = outcome_of(failure, below=__file__)
            if isinstance(failure, BadResult):
                outcome = replace(outcome, result=failure.result)
            live.write("error", "\n".join(outcome.notes))
            return _complete(outcome, usage, words, notes)
        return Outcome(OutcomeClass.DONE, result=result, usage=usage, session=words.current, notes=notes)

    # In a child --------------------------------------------------------------------------------------------------------

    async def _execute_in_child(self, claim: Claim, words: _Words, live: Live, stop: Stop) -> Outcome:
        pool = self._pool
        assert pool is not None
        place = pool.acquire(claim.claimed_by)

        def give_up() -> None:
            place.cancel()

        if not place.done():
            stop.on_request(give_up)
        try:
            found = await place
        except StartFailed as failed:
            if failed.trace:
                live.write("error", failed.trace)
            return _broken(failed.fault, failed.trace)
        except asyncio.CancelledError:
            if stop.reason is None:
                if place.done() and not place.cancelled() and place.exception() is None:
                    pool.release(place.result())
                raise
            return Outcome(stop.reason, cause=str(stop.reason), message=stop.message)

        loop = asyncio.get_running_loop()

        def answer_from(kept: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(found.send, _kept(kept))

        def heard(frame: dict[str, Any]) -> None:
            kind = frame["t"]
            if kind == "progress":
                words.progress(frame["percent"], frame["message"])
            elif kind == "usage":
                words.usage(frame["fields"])
            elif kind == "session":
                words.session(frame["id"])
            elif kind == "log":
                words.log(frame["text"])
            elif kind == "keep":
                # Answered in any case, also when the task has ended meanwhile: a thread of the child waits for it.
                words.keep(frame["name"], frame["text"]).add_done_callback(answer_from)

        end = found.run(_task_of(claim), live, heard)

        def stopped() -> None:
            if not end.done():
                end.set_result({"t": "stop"})

        stop.on_request(stopped)
        try:
            frame = await end
        except asyncio.CancelledError:
            await pool.discard(found, 0.0)
            raise
        if frame is not None and frame["t"] == "end" and not frame.get("rest") and frame["status"] != "stopped":
            pool.release(found)
            return self._outcome(frame, words, live)
        ended = await pool.discard(found, self._kill_grace, None if stop.reason is None else stop.stuck)
        notes = _about(ended, leftovers=frame is not None and frame["t"] == "end" and bool(frame.get("rest")))
        if frame is not None and frame["t"] == "end" and frame["status"] != "stopped":
            outcome = self._outcome(frame, words, live)
            return _complete(outcome, outcome.usage, words, notes)
        usage = words.used(ended=False)
        if stop.reason is not None:
            died = Outcome(stop.reason, cause=str(stop.reason), message=stop.message)
        elif frame is not None:
            died = _death(-SIGTERM)
        else:
            died = _death(found.tree.returncode)
        return _complete(died, usage, words, notes)

    def _outcome(self, frame: dict[str, Any], words: _Words, live: Live) -> Outcome:
        words.open = False
        usage = words.used(ended=True)
        if frame["status"] == "done":
            return Outcome(
                OutcomeClass.DONE, result=frame["result"], usage=usage, session=words.current, notes=tuple(words.notes)
            )
        if frame["status"] == "suspended":
            return _suspended(read_ask(frame["ask"]), bool(frame["returned"]), usage, words)
        notes = tuple(frame.get("notes") or ())
        if notes:
            live.write("error", "\n".join(notes))
        at = frame.get("retry_at")
        return Outcome(
            OutcomeClass(frame["status"]),
            cause=frame.get("cause"),
            message=frame.get("message"),
            retry_at=None if at is None else datetime.fromisoformat(at),
            retry_after=frame.get("retry_after"),
            usage=usage,
            result=frame.get("result"),
            session=words.current,
            notes=(*notes, *words.notes),
        )

    # Loading -----------------------------------------------------------------------------------------------------------

    async def _resolve(self) -> None:
        """Import what the definition names: in a thread, for a large import must not hold up the loop."""
        if self._resolving is None:
            self._resolving = asyncio.Lock()
        async with self._resolving:
            if self._on_loop is not None or self._broken is not None:
                return
            assert self._given is not None
            try:
                target = await asyncio.to_thread(imported, self._given)
                function = target.function if isinstance(target, AgentFunction) else target
                if (
                    not callable(function)
                    or inspect.isasyncgenfunction(function)
                    or inspect.isgeneratorfunction(function)
                ):
                    raise TypeError(f"{self._given.python} is no function that returns a result: {function!r}")
                types = types_of(function)
            except Exception as error:  # noqa: BLE001 - user code runs at import, and may raise anything
                message = f"{self._given.python} cannot be imported: {qualified_name(type(error))}: {told(error)}"
                self._broken = Fault(OutcomeClass.PERMANENT, "import_error", message), trace_of(error, below=__file__)
                return
            isolation = self._isolation
            if isolation is None and isinstance(target, AgentFunction):
                isolation = target.isolation
            if isolation is None or (isolation == "loop" and not is_async(function)):
                isolation = "loop" if is_async(function) else "process"
            self._function = function
            self._types = types
            if isolation == "process":
                if isinstance(target, AgentFunction):
                    self._tasks_per_child, self._memory_mb = target.tasks_per_child, target.memory_mb
                self._pool = self._make_pool({"main": None, "path": self._given.python})
            self._on_loop = isolation == "loop"

    def _make_pool(self, way: dict[str, Any]) -> Pool:
        """Say how children start: with the variables that anybody may see; the others follow over the pipe."""
        own = dict(os.environ)
        cwd = None
        if self._given is not None:
            variables = environment(self._given, own).variables
            cwd = self._given.dir
            if cwd is not None and self._given.base_dir:
                cwd = str(Path(self._given.base_dir, cwd))
            secret: dict[str, str] = {}
        else:
            # /proc shows the environment that a process started with to every agent of the same user.
            variables = {name: value for name, value in own.items() if not withheld(name, value)}
            secret = {name: value for name, value in own.items() if name not in variables and name != MARK_NAME}
        hello = {"sys_path": [str(entry) for entry in sys.path], "argv": list(sys.argv), "environ": secret, **way}
        hello["memory_mb"] = self._memory_mb
        hello["forget"] = [name for name in secret if name.startswith("ORCHESTRATOR_")]
        return Pool(hello, variables, cwd=cwd, tasks_per_child=self._tasks_per_child, kill_grace=self._kill_grace)


def _broken(fault: Fault, trace: str) -> Outcome:
    """The outcome of every task of an agent that cannot be loaded."""
    return Outcome(fault.status, cause=fault.cause, message=shorten(fault.message), notes=(trace,) if trace else ())


def imported(definition: AgentDefinition) -> Any:
    """What ``python: package.module:name`` of *definition* names. Raises whatever its module raises, but SystemExit."""
    if definition.base_dir:
        base = str(Path(definition.base_dir).resolve())
        if base not in sys.path:
            sys.path.insert(0, base)
    try:
        return child.find(definition.python or "")
    except SystemExit as error:
        raise ImportError(f"its module called sys.exit({error.code!r})") from error


def input_fault(definition: AgentDefinition, value: Any) -> str | None:
    """What keeps *value* from being an input of *definition*, by its function's annotation; None: nothing known here.

    Imports the function's module. One that cannot be imported here may be known where the worker is.
    """
    if definition.python is None:
        return None
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a module prints is no answer of ours
            target = imported(definition)
        shape = types_of(target.function if isinstance(target, AgentFunction) else target).input
    except Exception as error:  # noqa: BLE001 - user code runs at import, and may raise anything
        log.debug("the input of agent %s is not checked here: %s", definition.name, error)
        return None
    if shape is None:
        return None
    try:
        shape.read(value)
    except InvalidInput as error:
        return f"expected {shown(shape.kind)}: {error.message}"
    return None


def _task_of(claim: Claim) -> dict[str, Any]:
    return {
        "agent": claim.agent,
        "task_id": claim.task_id,
        "attempt": claim.attempt,
        "input": claim.input,
        "params": claim.params,
        "title": claim.title,
        "name": claim.name,
        "plan": claim.plan,
        "session": claim.session,
        "answers": claim.answers,
        "traceparent": claim.traceparent,
        "checkpoints": claim.checkpoints,
    }


def _kept(kept: Future[Any]) -> dict[str, Any]:
    """The frame that tells a child what became of its checkpoint."""
    if kept.cancelled():
        return {"t": "kept", "error": "the attempt has ended"}
    error = kept.exception()
    return {"t": "kept", "value": kept.result()} if error is None else {"t": "kept", "error": str(error)}


def _suspended(ask: Ask, returned: bool, usage: Usage | None, words: _Words) -> Outcome:
    """The outcome of an attempt that asks *ask*."""
    notes = tuple(words.notes)
    if returned:
        notes += ("it went on after ctx.ask and returned; the question counts, the result does not",)
    return Outcome(
        OutcomeClass.SUSPENDED,
        cause="asked",
        message=shorten(ask.question),
        usage=usage,
        session=words.current,
        notes=notes,
        asks=(ask,),
    )


def _complete(outcome: Outcome, usage: Usage | None, words: _Words, notes: tuple[str, ...]) -> Outcome:
    """*outcome* with what the words of the attempt add to it."""
    words.open = False
    added = [note for note in (*notes, *words.notes) if note not in outcome.notes]
    return replace(outcome, usage=usage, session=words.current, notes=(*outcome.notes, *added))


def _about(ended: Any, *, leftovers: bool) -> tuple[str, ...]:
    """What it took to end a child, in sentences."""
    notes = []
    if leftovers:
        notes.append("processes that the function had left running were ended with its child process")
    if ended.forced:
        notes.append("its process tree did not end by SIGTERM and was killed")
    if ended.waited:
        notes.append(f"something survived SIGKILL for {ended.waited:.0f} s")
    if ended.survivors:
        pids = ", ".join(str(process.pid) for process in ended.survivors)
        notes.append(f"could not be ended: process {pids}")
    return tuple(notes)


def _death(returncode: int | None) -> Outcome:
    """The outcome of a task whose child process ended before it."""
    if returncode is not None and returncode < 0:
        try:
            name = Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        return Outcome(
            OutcomeClass.TRANSIENT,
            cause="signal",
            message=f"its child process was killed by {name}",
            signal=-returncode,
        )
    return Outcome(
        OutcomeClass.TRANSIENT,
        cause="exit_code",
        message=f"its child process ended with exit {returncode} before the function returned",
        exit_code=returncode,
    )
