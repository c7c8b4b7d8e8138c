"""Agents that are commands: any program that takes a prompt and says something.

Reading order: ``CommandAgent`` (an agent as a file defines it), then ``CommandAttempt`` (one execution, from the first byte to
the proof that nothing of it runs any more). What an execution is started with is in ``launch``; what the output means is
the business of ``readers`` and ``verdict``; how a tree is ended that of ``processes``.

Both outputs are read as bytes, whenever there are some, so the agent is never blocked by us and no line is too long.
Secrets are taken out first; after that the reader, the transcript and all messages see the same text.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from orchestrator.agents import census, processes
from orchestrator.agents.environment import Environment, environment
from orchestrator.agents.faults import Fault
from orchestrator.agents.launch import Refused, Start
from orchestrator.agents.logins import Slot, take_slot
from orchestrator.agents.meter import Meter, Report
from orchestrator.agents.protocol import Defined, Live, Stop
from orchestrator.agents.readers import EventsFile, make_reader, merge
from orchestrator.agents.redact import Secrets
from orchestrator.agents.telling import Output, Telling
from orchestrator.agents.verdict import verdict
from orchestrator.agents.workspaces import MADE, Unusable, Workspace, open_workspace
from orchestrator.domain.given import AgentDefinition, Login
from orchestrator.domain.outcome import Claim, Outcome, TranscriptSize
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput

BUSY_FACTOR = 4
"""The idle limit is this much longer while the agent waits for a tool that it has started."""

_CHUNK = 256 * 1024
_DRAIN = 16 * 1024 * 1024
_FIRST_TICK = 0.25
_LONGEST_TICK = 1.0
_REST_PAUSE = 0.1
_PROMPTS = ("stdin", "argument", "file")
_WORKSPACES = ("none", "directory", *MADE)


class CommandAgent(Defined):
    """A command as an agent. Raises ``InvalidInput`` for a definition that can never work.

    *worker_token* names the worker process in the marks of its trees; default is each claim's ``claimed_by``. With
    *talks* its input stays open.
    """

    def __init__(self, definition: AgentDefinition, *, worker_token: str | None = None, talks: bool = False) -> None:
        super().__init__(definition)
        self._talks = talks
        self._worker_token = worker_token
        self._environment: Environment | None = None
        command = definition.command
        where = f"agent {definition.name!r}"
        if not command:
            raise InvalidInput(f"{where}: the command is empty", agent=definition.name)
        if definition.shell and not isinstance(command, str):
            raise InvalidInput(
                f"{where}: with shell: true the command is one text for the shell, found a list",
                hint="write it as one text, or leave shell out",
                agent=definition.name,
            )
        if definition.prompt not in _PROMPTS:
            raise InvalidInput(f"{where}: prompt must be one of {', '.join(_PROMPTS)}, found {definition.prompt!r}")
        if definition.workspace not in _WORKSPACES:
            raise InvalidInput(
                f"{where}: workspace must be one of {', '.join(_WORKSPACES)}, found {definition.workspace!r}"
            )
        make_reader(definition.output, _Silent())
        if not isinstance(command, str):
            self._argv = tuple(command)
        elif definition.shell:
            self._argv = (command,)
        else:
            try:
                self._argv = tuple(shlex.split(command))
            except ValueError as error:
                raise InvalidInput(f"{where}: the command {command!r} cannot be read: {error}") from None
        if not self._argv:
            raise InvalidInput(f"{where}: the command is empty", agent=definition.name)

    @property
    def shared_directory(self) -> Callable[[str | None], str] | None:
        """For workspace: directory, from a task's ``dir`` to the real path that no two of its tasks use at once."""
        if self._definition.workspace != "directory":
            return None
        return lambda given: os.path.realpath(self._directory(given) or "")

    def describe(self) -> dict[str, Any]:
        """What it is, for people: the template of its command and the names of its variables, no values."""
        given = self._definition
        around = self._surroundings()
        hidden = Secrets(around.secrets)
        return {
            "kind": "command",
            "command": [hidden.text(part) for part in self._argv],
            "shell": given.shell,
            "prompt": given.prompt,
            "output": given.output,
            "workspace": given.workspace,
            "dir": self._directory(None),
            "environment": list(around.names),
            "secret": list(given.env_secret),
            "secret_missing": list(around.missing),
            "secret_too_short": list(hidden.too_short),
            "idle_seconds": given.idle_seconds,
            "kill_grace": given.kill_grace,
        }

    async def aclose(self) -> None:
        """Nothing is shared between executions."""

    async def execute(self, claim: Claim, live: Live, stop: Stop) -> Outcome:
        """Run the command for *claim*; see ``Agent.execute``."""
        if stop.reason is not None:  # asked to end before it began
            return Outcome(status=stop.reason, cause=str(stop.reason), message=stop.message)
        given = self._definition
        try:
            space = await open_workspace(
                given.workspace,
                self._directory(claim.dir),
                task=claim.task_id,
                attempt=claim.attempt,
                agent=given.name,
                worker=str(claim.claimed_by),
                before=claim.workspace,
                again=given.session != "fresh",
            )
        except Unusable as error:
            status = OutcomeClass.TRANSIENT if error.passing else OutcomeClass.PERMANENT
            return Outcome(status, cause=error.cause, message=f"agent {given.name!r}: {error.message}")
        try:
            if (told := space.told()) is not None:
                live.workspace(told)
            outcome = await self._attempts(claim, live, stop, space)
            told, notes = await space.close(outcome)
        finally:
            space.release()
        return replace(outcome, workspace=told, notes=(*outcome.notes, *notes))

    async def _attempts(self, claim: Claim, live: Live, stop: Stop, space: Workspace) -> Outcome:
        """Run the command, and once more without its session if that could not be resumed and the definition says so."""
        session = claim.session if self._definition.session != "fresh" else None
        outcome, silent = await self._once(claim, live, stop, session, space)
        failed = outcome.status in (OutcomeClass.TRANSIENT, OutcomeClass.PERMANENT) and stop.reason is None
        if session and failed and silent and self._definition.session == "resume-then-fresh":
            note = f"session {session} could not be resumed ({outcome.message or outcome.cause}); started a fresh one"
            outcome, _ = await self._once(claim, live, stop, None, space)
            outcome = replace(outcome, notes=(note, *outcome.notes))
        return outcome

    async def _once(
        self, claim: Claim, live: Live, stop: Stop, session: str | None, space: Workspace
    ) -> tuple[Outcome, bool]:
        """Run the command once; also say whether it ended without a word on stdout."""
        around = self._surroundings()
        secrets = Secrets(around.secrets)
        resume = self._definition.resume
        start = Start(self._definition, resume if resume and session else self._argv, claim, session, talks=self._talks)
        login = self._definition.login
        slot: Slot | None = None
        try:
            try:
                start.prepare(around, space.path)
                if login is not None and login.folder is not None and login.variable is not None:
                    slot = _slot(self._definition, login)
                    start.env[login.variable] = str(slot.path)
                token = self._worker_token or claim.claimed_by
                mark = census.new_mark(token, claim.task_id, claim.attempt)
                tree = start.spawn(mark)
            except Refused as refused:
                outcome = refused.outcome
                return replace(outcome, message=secrets.text(outcome.message or "")), False
            attempt = self._attempt(self._definition, claim, live, stop, start, tree, secrets, resumed=bool(session))
            for name in around.missing:
                attempt.notes.append(f"secret {name} is not set in the worker's environment")
            for name in secrets.too_short:
                attempt.notes.append(f"secret {name} is too short to be hidden in what the agent writes")
            return replace(await attempt.run(), variables=tuple(sorted(start.env))), not attempt.spoke
        finally:
            start.clean()
            if slot is not None:
                slot.free()

    def _attempt(self, *given: Any, **more: Any) -> CommandAttempt:
        return CommandAttempt(*given, **more)

    def _surroundings(self) -> Environment:
        if self._environment is None:
            self._environment = environment(self._definition, os.environ)
        return self._environment

    def _directory(self, task_dir: str | None) -> str | None:
        """Return the absolute directory of an execution; None for that of this process."""
        given = self._definition
        named = task_dir if task_dir is not None else given.dir
        base = given.base_dir or os.getcwd()  # noqa: PTH109 - a text is wanted
        if named is None:
            return base if given.workspace in ("directory", "worktree") else None
        return os.path.normpath(os.path.join(base, os.path.expanduser(named)))  # noqa: PTH111, PTH118


def _slot(definition: AgentDefinition, login: Login) -> Slot:
    try:
        return take_slot(login, definition.base_dir or os.getcwd())  # noqa: PTH109 - a text is wanted
    except OSError as error:
        said = f"agent {definition.name!r}: login {login.name!r} has no settings folder: {error}"
        raise Refused("settings_folder", said, OutcomeClass.TRANSIENT) from error


class _Silent:
    """Signals that nobody hears, to check a kind of output by."""

    def message(self, text: str) -> None: ...
    def tool(self, name: str, text: str) -> None: ...
    def usage(self, report: Report) -> None: ...
    def session(self, session: str) -> None: ...
    def result(self, value: Any) -> None: ...
    def error(self, fault: Fault) -> None: ...
    def progress(self, percent: float | None, message: str | None) -> None: ...
    def checkpoint(self, name: str, value: Any) -> str | None: ...


class CommandAttempt(Telling):
    """One execution. It is also the ``Signals`` that the reader calls."""

    ends_by_itself = True
    """Whether it is worth a note that it still ran after its result."""

    def __init__(
        self,
        definition: AgentDefinition,
        claim: Claim,
        live: Live,
        stop: Stop,
        start: Start,
        tree: processes.ProcessTree,
        secrets: Secrets,
        *,
        resumed: bool,
    ) -> None:
        super().__init__(live, Meter(claim.meter, resumed=resumed))
        self._definition = definition
        self._stop = stop
        self._answered = claim.answers
        self._start = start
        self._tree = tree
        self._secrets = secrets
        self._loop = asyncio.get_running_loop()
        self._reader = make_reader(definition.output, self)
        self._events = EventsFile(self)
        self._events_at = 0
        self._events_inode: int | None = None
        self._events_redactor = secrets.stream()
        self._outputs = {"stdout": Output("stdout", secrets), "stderr": Output("stderr", secrets)}
        self._open = {"stdout": tree.stdout, "stderr": tree.stderr}
        self._input = memoryview(start.prompt)
        self._heard = self._loop.time()
        self._woken: asyncio.Future[None] = self._loop.create_future()
        self._timers: list[asyncio.TimerHandle] = []
        self._pause = _FIRST_TICK
        self.notes: list[str] = []

    @property
    def spoke(self) -> bool:
        """Whether the agent wrote anything to stdout."""
        return self._outputs["stdout"].bytes > 0

    async def run(self) -> Outcome:
        """See the process to its end, and its tree with it; return what came of it."""
        tree, given = self._tree, self._definition
        reason: OutcomeClass | None = None
        code: int | None = None
        signal: int | None = None
        try:
            self._listen()
            self._tick_in(self._next_tick())
            tree.exited.add_done_callback(self._wake)
            self._stop.on_request(self._wake)
            await self._woken
            if tree.exited.done():
                returncode = tree.exited.result()
                code, signal = (returncode, None) if returncode >= 0 else (None, -returncode)
                await self._end_rest()
            else:
                # a result that had come before the request is a result
                self._read_events()
                given_before = self._reader.has_result or self._asks
                what = "question" if self._asks else "result"
                if self._stop.reason is not None and not given_before:
                    reason = self._stop.reason
                    await self._before_the_end()
                elif self._stop.reason is not None:
                    self.notes.append(f"the agent was told to end after it had given its {what}; the {what} counts")
                elif self.ends_by_itself:
                    self.notes.append(
                        f"the agent still ran {given.result_grace:g} s after its {what} and was ended; the {what} counts"
                    )
                if self._stop.reason is not None:
                    ended = await tree.end_at_last(given.kill_grace, self._stop.stuck, self._pipes())
                else:
                    ended = await tree.end(given.kill_grace, self._pipes())
                self._tell(ended, whole=True)
            await self._drain()
        finally:
            tree.exited.remove_done_callback(self._wake)
            for timer in self._timers:
                timer.cancel()
            self.lift_grace()
            self._hush()
            try:
                if tree.returncode is None:  # only on the way out by an exception
                    await self._end_now()
            finally:
                tree.close()
        return self._conclude(code, signal, reason)

    async def _before_the_end(self) -> None:
        """What is said to an agent that is asked to end, before it gets a signal: nothing."""

    async def _end_now(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(asyncio.ensure_future(self._tree.end(0.0, self._pipes())))

    def _conclude(self, code: int | None, signal: int | None, reason: OutcomeClass | None) -> Outcome:
        for name, output in self._outputs.items():
            self._pass_on(name, *output.take(b"", final=True))
        self._read_events(final=True)
        findings = merge(self._reader.close(), self._events.close())
        outcome = verdict(
            findings,
            exit_code=code,
            signal=signal,
            exit_codes=self._definition.exit_codes,
            stop_reason=reason,
            stop_message=self._stop.message if reason is not None else None,
            answered=self._answered,
        )
        size = TranscriptSize(
            bytes=sum(output.bytes for output in self._outputs.values()),
            replaced=any(output.replaced for output in self._outputs.values()),
        )
        usage = self._meter.close(ended=reason is None)
        return replace(outcome, usage=usage, transcript=size, notes=(*outcome.notes, *self.notes))

    # Reading and writing -------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        for name, fd in self._open.items():
            self._loop.add_reader(fd, self._read, name)
        if self._tree.stdin >= 0:
            self._write()

    def _write(self) -> None:
        """Write what the prompt still has as far as the pipe takes it; at its end, or the agent's, close it."""
        fd = self._tree.stdin
        try:
            while self._input:
                self._input = self._input[os.write(fd, self._input) :]
        except BlockingIOError:
            self._loop.add_writer(fd, self._write)
            return
        except OSError:  # it does not read its input, as is its right
            self._input = memoryview(b"")
        self._close_input()

    def _close_input(self) -> None:
        fd, self._tree.stdin = self._tree.stdin, -1
        if fd >= 0:
            self._loop.remove_writer(fd)
            os.close(fd)

    def _read(self, name: str) -> bool:
        """Read once from an output; False when there is nothing to read now, or never again."""
        fd = self._open.get(name, -1)
        if fd < 0:
            return False
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close_output(name)
            return False
        self._heard = self._loop.time()
        self._pass_on(name, *self._outputs[name].take(data))
        return True

    def _close_output(self, name: str) -> None:
        fd = self._open.pop(name, -1)
        if fd >= 0:
            self._loop.remove_reader(fd)
            os.close(fd)
            setattr(self._tree, name, -1)

    def _hush(self) -> None:
        for name in list(self._open):
            self._close_output(name)
        self._close_input()

    def _pass_on(self, name: str, data: bytes, text: str, size: int) -> None:
        # First as it was written, then what is read from it: a result stands behind the line that holds it.
        if text:
            self._live.write(name, text, size)
        if data:
            self._reader.feed(name, data)
            self.doing(self._reader.busy)
        self._has_said_all()

    @property
    def _asks(self) -> bool:
        return self._events.asked or self._reader.asked

    def _has_said_all(self) -> None:
        said = self._reader.has_result or self._asks
        self.has_said_all(said, self._definition.result_grace, self._wake)

    def _wake(self, _: object = None) -> None:
        """Something has happened that ends the attempt: its exit, a request, or too long a life after its result."""
        if not self._woken.done():
            self._woken.set_result(None)

    async def _drain(self) -> None:
        """Read what is still in the pipes. What a leftover goes on writing is not waited for."""
        left = _DRAIN
        for name in list(self._open):
            while left > 0 and self._read(name):
                left -= 1
                if left % 64 == 0:
                    await asyncio.sleep(0)

    # The rest of the tree ------------------------------------------------------------------------------------------

    async def _end_rest(self) -> None:
        """After the process itself has ended: end what it left running, and never wait for it longer than that."""
        await self._drain()
        tree = self._tree
        if not self._open and not tree.has_rest():
            return
        # the last of a pipeline, or a helper that is just closing: it gets a moment, not a signal
        deadline = self._loop.time() + _REST_PAUSE
        while (self._open or tree.has_rest()) and self._loop.time() < deadline:  # noqa: ASYNC110 - no event says it
            await asyncio.sleep(0.01)
        if self._open or tree.has_rest():
            self._tell(await tree.end(self._definition.kill_grace, self._pipes()), whole=False)

    def _pipes(self) -> tuple[int, ...]:
        """Return the inodes of the pipes that are still open: whoever holds their other end belongs to the tree."""
        return tuple(os.fstat(fd).st_ino for fd in self._open.values())

    def _tell(self, ended: census.Ended, *, whole: bool) -> None:
        """Put into the notes what the ladder did."""
        count = len(ended.ended)
        if not whole and count:
            what = "1 process was" if count == 1 else f"{count} processes were"
            how = " by SIGKILL" if ended.forced else ""
            self.notes.append(f"{what} still running after the agent had ended, and ended{how}")
        elif whole and ended.forced:
            self.notes.append(f"the agent did not end within {self._definition.kill_grace:g} s and was killed")
        if ended.waited:
            self.notes.append(f"something survived SIGKILL for {ended.waited:.0f} s")
        if ended.survivors:
            self._start.survived = True
            pids = ", ".join(str(process.pid) for process in ended.survivors)
            self.notes.append(f"will not stop: process {pids} is still there after SIGKILL")

    # Meanwhile -----------------------------------------------------------------------------------------------------

    def _tick_in(self, seconds: float) -> None:
        self._timers = [timer for timer in self._timers if not timer.cancelled() and timer.when() > self._loop.time()]
        self._timers.append(self._loop.call_later(seconds, self._tick))

    def _next_tick(self) -> float:
        idle = self._definition.idle_seconds
        return self._pause if idle is None else min(self._pause, max(0.01, idle / 4))

    def _tick(self) -> None:
        """Read the events file and look at the clock; less often while nothing happens."""
        heard = self._heard
        self._read_events()
        self._pause = _FIRST_TICK if self._heard > heard else min(self._pause * 1.25, _LONGEST_TICK)
        idle = self._definition.idle_seconds
        busy = self._reader.busy
        self.doing(busy)
        if idle is not None and self._grace is None:
            limit = idle * BUSY_FACTOR if busy else idle
            silent = self._loop.time() - self._heard
            if silent >= limit:
                within = f" while it waited for {busy}" if busy else ""
                self._stop.request(
                    OutcomeClass.STALLED, f"no sign of life for {silent:.1f} s{within} (limit {limit:g} s)"
                )
                return
        self._tick_in(self._next_tick())

    def _read_events(self, final: bool = False) -> None:
        """Read what was appended to the events file since the last time."""
        with contextlib.suppress(OSError):
            while self._events_size() > self._events_at:
                fd = os.open(self._start.events, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    data = os.pread(fd, _CHUNK, self._events_at)
                finally:
                    os.close(fd)
                if not data:
                    break
                self._heard = self._loop.time()
                self._events_at += len(data)
                self._events.feed(self._events_redactor.feed(data))
                if not final:
                    break
        if final:
            self._events.feed(self._events_redactor.flush())
        elif self._events.asked:
            self._has_said_all()

    def _events_size(self) -> int:
        """The bytes of the events file. One that was written anew, instead of appended to, is read from its start."""
        found = os.stat(self._start.events)  # noqa: PTH116 - cheap, often
        before, self._events_inode = self._events_inode, found.st_ino
        if found.st_size < self._events_at or (before not in (None, found.st_ino) and self._events_at):
            self._events.feed(self._events_redactor.flush())
            self._events.begin_again()
            self._events_at = 0
        return found.st_size
