"""Agents that speak the Agent Client Protocol over their stdin and stdout: any of them, with the extra ``acp``.

An ACP agent is a command whose input is a conversation, so it is started, watched and ended as one. Reading order:
``AcpAgent`` (an agent as a file defines it), ``_Conversation`` (one execution), ``_Answers`` (what the other side may ask
of us), ``_Wire`` (messages to and from the process), ``AcpReader`` (what is known at the end).

We offer no files and no terminals: an agent uses its own tools. What it asks permission for is decided by the policy of
its definition, by the kind of tool; what no policy names is denied. ``ask`` ends the attempt with a question to a person;
the next one, in the same session, finds the answer when it asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.agents.command import CommandAgent, CommandAttempt
from orchestrator.agents.faults import Fault, from_status, from_text, shorten
from orchestrator.agents.meter import DELTA, SESSION_TOTAL, Amount, Report, dollars, tokens
from orchestrator.agents.reading import JOINED_LIMIT, Lines, Reader, brief, flatten, mapping, parse_objects, text_of
from orchestrator.domain.asking import Ask, QuestionKind, name_of
from orchestrator.domain.given import AgentDefinition
from orchestrator.domain.template import as_text
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput

if TYPE_CHECKING:
    from acp.client.connection import ClientSideConnection

_LEAVE = 1.0
"""Seconds that an agent has to end by itself once its input has ended."""
_SAID = 2_000
_AUTH_REQUIRED = -32000


class AcpAgent(CommandAgent):
    """An ACP agent. Raises ``InvalidInput`` for a definition that can never work, and when the extra is missing."""

    def __init__(self, definition: AgentDefinition) -> None:
        try:
            import acp  # noqa: F401 - said here, not in the middle of a task
        except ImportError as error:
            raise InvalidInput(
                f"agent {definition.name!r}: an acp agent needs the package agent-client-protocol",
                hint='install it: pip install "orchestrator[acp]"',
                agent=definition.name,
            ) from error
        super().__init__(
            replace(definition, command=definition.acp, prompt="stdin", output="text", result_grace=_LEAVE), talks=True
        )

    def describe(self) -> dict[str, Any]:
        """What it is, for people."""
        told = super().describe()
        for key in ("shell", "prompt", "output"):
            told.pop(key)
        return {**told, "kind": "acp", "permissions": dict(self._definition.permissions)}

    def _attempt(self, *given: Any, **more: Any) -> CommandAttempt:
        return _Conversation(*given, **more)


class AcpReader(Reader):
    """What an ACP agent said, in the place of what is read from stdout."""

    output = "acp"
    due = "the end of its turn"

    def __init__(self, signals: Any) -> None:
        super().__init__(signals)
        self._held: list[str] = []
        self._size = 0
        self._line = ""
        self._answered = False

    def _read(self, data: bytes) -> None:
        """The wire reads it."""

    def _end(self) -> None:
        self.flush()

    def _means(self, line: str) -> bool:
        return bool(line) and not line.startswith("{")

    def say(self, text: str) -> None:
        """Take in a piece of a message; whole lines are passed on."""
        if self._answered:
            self._held, self._size, self._answered = [], 0, False
        self._size += len(text)
        if self._size <= JOINED_LIMIT:
            self._held.append(text)
        self._line += text
        cut = self._line.rfind("\n") + 1 if len(self._line) <= _SAID else len(self._line)
        if cut:
            line, self._line = self._line[:cut].strip("\n"), self._line[cut:]
            if line:
                self._signals.message(line)

    def flush(self) -> None:
        """Pass on what has no end of line yet."""
        line, self._line = self._line, ""
        if line.strip():
            self._signals.message(line)

    def use(self, name: str, told: str) -> None:
        """A tool is used: what it said before is not its answer, if it says anything after."""
        self.flush()
        self._answered = True
        self._signals.tool(name, told)

    def opened(self, session: str) -> None:
        """The session has begun, or goes on."""
        self._session(session)

    def deny(self, name: str) -> None:
        """A permission was refused."""
        self._findings.denied = (*self._findings.denied, name)[:20]
        many = len(self._findings.denied)
        self._findings.notes = [note for note in self._findings.notes if not note.startswith("warning: denied")]
        self._findings.note(
            f"warning: denied {many} tool use{'s' if many > 1 else ''} ({'; '.join(self._findings.denied[:5])})"
        )

    def ask(self, ask: Ask) -> None:
        """A person has to decide: the attempt ends with this question."""
        self._findings.ask(ask)

    def note(self, text: str) -> None:
        """Keep a sentence for the run row."""
        self._findings.note(text)

    def finish(self) -> None:
        """The turn ended well."""
        self.flush()
        self._result("".join(self._held).strip(), succeeded=True)
        self.has_result = True

    def fail(self, fault: Fault) -> None:
        """The turn ended otherwise."""
        self.flush()
        self.has_result = True
        self._failed(fault)


class _Wire:
    """JSON messages to and from the process; the shape that the package's connection talks through."""

    def __init__(self, write: Any) -> None:
        self._write = write
        self._lines = Lines()
        self._came: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def feed(self, data: bytes) -> None:
        """Take in what the process wrote; what is no JSON object is noise."""
        for line in self._lines.feed(data):
            for message in parse_objects(line):
                self._came.put_nowait(message)

    def end(self) -> None:
        """The process writes nothing more."""
        self._came.put_nowait(None)

    async def receive(self) -> dict[str, Any] | None:
        return await self._came.get()

    async def send(self, message: dict[str, Any]) -> None:
        await self._write(json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")

    async def close(self) -> None:
        self.end()


class _Answers:
    """What the agent may ask of us."""

    def __init__(
        self,
        reader: AcpReader,
        signals: _Conversation,
        policy: Mapping[str, str],
        told: Mapping[str, str],
        secrets: Any,
    ) -> None:
        self._told = told
        self._reader = reader
        self._signals = signals
        self._policy = policy
        self._said = secrets.stream()
        self._tools: dict[str, tuple[str, str, str]] = {}
        self._used: set[str] = set()
        self.heard = False
        """Whether what comes belongs to this attempt: a loaded session first tells its history again."""

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        """Something happened in the session."""
        if not self.heard:
            return
        kind = update.session_update
        if kind == "agent_message_chunk":
            text = flatten(update.content.model_dump(mode="json"))
            self._reader.say(self._said.feed(text.encode("utf-8", "surrogatepass")).decode("utf-8", "replace"))
        elif kind in ("tool_call", "tool_call_update"):
            self._rest_of_message()
            self._tool(update)
        elif kind == "usage_update" and update.cost is not None and update.cost.currency.upper() == "USD":
            amount = Amount(cost=dollars(update.cost.amount))
            if amount.known():
                self._signals.usage(Report(amount, SESSION_TOTAL))

    def _rest_of_message(self) -> None:
        if rest := self._said.flush():
            self._reader.say(rest.decode("utf-8", "replace"))

    def close(self) -> None:
        """Nothing more comes."""
        self._rest_of_message()

    def _tool(self, update: Any) -> None:
        id_ = str(update.tool_call_id)
        title, kind, given = self._tools.get(id_, ("tool", "other", ""))
        title, kind = text_of(update.title) or title, text_of(update.kind) or kind
        given = brief(update.raw_input) if update.raw_input is not None else given
        self._tools[id_] = (title, kind, given)
        ended = update.status in ("completed", "failed")
        if id_ not in self._used:
            self._used.add(id_)
            self._reader.use(title, given or kind)
        if ended:
            self._tools.pop(id_, None)
            told = [each.model_dump(mode="json") for each in update.content or ()]
            words = flatten([mapping(each).get("content", each) for each in told])
            if not words and update.raw_output is not None:
                words = brief(update.raw_output)
            self._reader.use(title, shorten(words, 500) if words else str(update.status))
        open_ = [name for name, _, _ in self._tools.values()]
        self._reader.busy = open_[-1] if open_ else None

    async def request_permission(self, session_id: str, tool_call: Any, options: list[Any], **_: Any) -> Any:
        """Decide by the policy whether a tool may be used."""
        from acp.schema import AllowedOutcome, DeniedOutcome, RequestPermissionResponse

        self._rest_of_message()
        known = self._tools.get(str(tool_call.tool_call_id), ("a tool", "other", ""))
        title, kind = text_of(tool_call.title) or known[0], text_of(tool_call.kind) or known[1]
        decision = self._policy.get(kind, self._policy.get("default", "deny"))
        if decision == "ask":
            shown = brief(tool_call.raw_input) if tool_call.raw_input is not None else known[2]
            words = f"{kind}: {title}: {shown}" if shown else f"{kind}: {title}"
            name = name_of(words)
            if name not in self._told:
                choices = ("allow", "deny")
                question = f"May it use a tool? {words}"
                self._reader.ask(Ask(name, question, QuestionKind.PERMISSION, choices, yes="allow", no="deny"))
                self._signals.has_asked()
                return RequestPermissionResponse(outcome=DeniedOutcome(outcome="cancelled"))
            decision = self._told[name]
        wanted = ("allow_once", "allow_always") if decision == "allow" else ("reject_once", "reject_always")
        chosen = next((each for name in wanted for each in options if each.kind == name), None)
        if decision != "allow":
            self._reader.deny(f"{kind}: {shorten(title, 100)}")
        if chosen is None:
            return RequestPermissionResponse(outcome=DeniedOutcome(outcome="cancelled"))
        return RequestPermissionResponse(outcome=AllowedOutcome(outcome="selected", option_id=chosen.option_id))

    def on_connect(self, conn: Any) -> None:
        """Nothing to do."""


class _Conversation(CommandAttempt):
    """One execution: greet, open or load a session, prompt once, and let the agent end."""

    ends_by_itself = False

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._said = AcpReader(self)
        self._reader = self._said
        self._wire = _Wire(self._send)
        told = self._start.claim.answers
        self._answers = _Answers(self._said, self, self._definition.permissions, told, self._secrets)
        self._leaving: asyncio.Future[None] | None = None
        self._talk: asyncio.Future[None] | None = None
        self._connection: ClientSideConnection | None = None
        self._opened: str | None = None
        self._turned = asyncio.Event()

    def _listen(self) -> None:
        super()._listen()
        self._talk = asyncio.ensure_future(self._converse())

    def _write(self) -> None:
        """The prompt goes into the conversation, not into the pipe."""

    def has_asked(self) -> None:
        """A person has to decide: the turn is cancelled, so that the session is kept in order, and the agent ends."""
        if self._leaving is None:
            self._leaving = asyncio.ensure_future(self._before_the_end())
            self._has_said_all()

    async def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            fd = self._tree.stdin
            if fd < 0:
                raise ConnectionError("the agent's input has ended")
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                ready = asyncio.Event()
                self._loop.add_writer(fd, ready.set)
                try:
                    await ready.wait()
                finally:
                    self._loop.remove_writer(fd)
            except OSError as error:
                raise ConnectionError("the agent reads no more") from error

    def _pass_on(self, name: str, data: bytes, text: str, size: int) -> None:
        super()._pass_on(name, data, text, size)
        if name == "stdout" and data:
            self._wire.feed(data)

    def _close_output(self, name: str) -> None:
        super()._close_output(name)
        if name == "stdout":
            self._wire.end()

    async def _before_the_end(self) -> None:
        """Cancel the turn first: an agent that hears it says what was used, and keeps its session in order."""
        connection, session = self._connection, self._opened
        if connection is not None and session is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(connection.cancel(session_id=session), _LEAVE)
                await asyncio.wait_for(self._turned.wait(), _LEAVE)

    async def run(self) -> Any:
        """See ``CommandAttempt.run``; afterwards the conversation is over as well."""
        try:
            return await super().run()
        finally:
            for task in (self._leaving, self._talk):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task

    def _conclude(self, *given: Any) -> Any:
        self._answers.close()
        return super()._conclude(*given)

    async def _converse(self) -> None:
        from acp import PROTOCOL_VERSION, RequestError, text_block
        from acp.client.connection import ClientSideConnection
        from acp.schema import ClientCapabilities, Implementation

        from orchestrator.settings import __version__

        answers: Any = self._answers
        connection = self._connection = ClientSideConnection(answers, self._wire)
        try:
            hello = await connection.initialize(
                protocol_version=PROTOCOL_VERSION,
                client_capabilities=ClientCapabilities(),
                client_info=Implementation(name="orchestrator", title="orchestrator", version=__version__),
            )
            if method := self._definition.authenticate:
                await connection.authenticate(method_id=method)
            session = await self._session_of(connection, hello)
            self._opened = session
            self._said.opened(session)
            self._meter.session(session)
            self._answers.heard = True
            claim = self._start.claim
            prompt = "" if claim.input is None else as_text(claim.input)
            answer = await connection.prompt(session_id=session, prompt=[text_block(prompt)])
            self._answers.close()
            self._count(answer)
            self._finish(str(answer.stop_reason))
        except RequestError as error:
            self._answers.close()
            self._said.fail(self._fault(error))
        except (ConnectionError, asyncio.CancelledError):
            return  # it has ended, or is being ended: how is told by its process
        except Exception as error:  # noqa: BLE001 - an agent that breaks the protocol must not break the worker
            self._said.fail(Fault(OutcomeClass.TRANSIENT, "protocol", shorten(f"it broke the protocol: {error}", 500)))
        finally:
            self._turned.set()
            with contextlib.suppress(Exception):
                await connection.close()
        self._close_input()
        self._has_said_all()

    async def _session_of(self, connection: ClientSideConnection, hello: Any) -> str:
        """Return the session of the attempt before, loaded, or a new one."""
        from acp import RequestError

        cwd = self._start.cwd or os.getcwd()  # noqa: PTH109 - a text is wanted
        before = self._start.session
        if before:
            capable = hello.agent_capabilities is not None and hello.agent_capabilities.load_session
            if capable:
                try:
                    await connection.load_session(cwd=cwd, session_id=before, mcp_servers=[])
                    return before
                except RequestError as error:
                    fault = self._fault(error)
                    if self._definition.session != "resume-then-fresh" or fault.status is OutcomeClass.UNAUTHENTICATED:
                        raise
                    said = fault.message
            else:
                said = "it cannot load sessions"
            self._said.note(f"session {before} could not be resumed ({shorten(said, 200)}); started a fresh one")
        opened = await connection.new_session(cwd=cwd, mcp_servers=[])
        return str(opened.session_id)

    def _count(self, answer: Any) -> None:
        usage = answer.usage
        counts: dict[str, Any] = {} if usage is None else usage.model_dump(mode="json", by_alias=False)
        if not counts:  # one CLI tells it aside
            quota = mapping(mapping(answer.field_meta).get("quota"))
            counts = mapping(quota.get("token_count"))
        read, wrote = tokens(counts.get("input_tokens")), tokens(counts.get("output_tokens"))
        for part in ("cached_read_tokens", "cached_write_tokens"):
            if (more := tokens(counts.get(part))) is not None:
                read = (read or 0) + more
        if read is not None or wrote is not None:
            amount = Amount(read, wrote, (read or 0) + (wrote or 0))
            self.usage(Report(amount, DELTA, turns=1, final=True))

    def _finish(self, reason: str) -> None:
        if reason == "end_turn":
            self._said.finish()
        elif reason in ("max_tokens", "max_turn_requests"):
            cause = "max_tokens" if reason == "max_tokens" else "max_turns"
            self._said.fail(Fault(OutcomeClass.OVER_BUDGET, cause, f"the agent's own limit was reached ({reason})"))
        elif reason == "refusal":
            self._said.fail(Fault(OutcomeClass.PERMANENT, "refusal", "the agent refused to go on"))
        elif self._stop.reason is None and not self._asks:
            self._said.fail(Fault(OutcomeClass.TRANSIENT, "agent_error", f"the turn ended as {reason!r}"))

    def _fault(self, error: Any) -> Fault:
        """What an error of the protocol means: its data may name an HTTP status, its words the rest."""
        data = mapping(error.data)
        words = str(error)
        detail = flatten(data.get("details") or data.get("message") or data.get("error") or "")
        words = f"{words}: {detail}" if detail and detail not in words else words
        if error.code == _AUTH_REQUIRED:
            return Fault(OutcomeClass.UNAUTHENTICATED, "authentication", shorten(words))
        for key in ("http_status_code", "status", "statusCode", "code"):
            status = data.get(key)
            if isinstance(status, int) and not isinstance(status, bool) and 400 <= status <= 599:
                return from_status(status, words)
        text = f"{words} {data.get('errorKind') or ''} {json.dumps(error.data, default=str) if error.data else ''}"
        found = from_text(text)
        if found is not None:
            return replace(found, message=shorten(words))
        if error.code in (-32601, -32602, -32002):
            return Fault(OutcomeClass.PERMANENT, "protocol", shorten(words))
        return Fault(OutcomeClass.TRANSIENT, "agent_error", shorten(words))


__all__ = ["AcpAgent", "AcpReader"]
