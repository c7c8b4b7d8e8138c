"""Agents that are asked over HTTP: one POST an attempt, whose answer is a document or a stream of lines or events.

Reading order: ``HttpAgent`` (an agent as a file defines it), ``_Exchange`` (one attempt), ``EventStream`` (server-sent
events to lines), then what a failure of the connection means.

Three limits stand apart: ``connect_seconds`` until the connection is there, ``idle_seconds`` between two signs of life,
and the budget of seconds for the whole, which the worker watches. Being asked to end closes the connection.
Credentials go to the host that the definition names and to no other. They are taken out of whatever comes back before
anybody sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from orchestrator.agents.faults import Fault, from_status, from_text, retry_after_seconds, shorten
from orchestrator.agents.meter import Meter
from orchestrator.agents.protocol import Defined, Live, Stop
from orchestrator.agents.readers import JsonlReader, make_reader
from orchestrator.agents.reading import LINE_LIMIT, Reader, flatten, mapping
from orchestrator.agents.redact import Secrets
from orchestrator.agents.telling import Output, Telling
from orchestrator.agents.verdict import verdict
from orchestrator.domain.given import AgentDefinition, address_fault
from orchestrator.domain.outcome import Claim, Outcome, TranscriptSize
from orchestrator.domain.template import as_text, render
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS = 10.0
"""How long a connection may take, where the agent says nothing."""
ANSWER_LIMIT = LINE_LIMIT
"""Bytes of an answer that is no stream. A longer one is not read to its end."""

_EXCERPT = 64 * 1024
_REFUSAL_SECONDS = 2.0
_REDIRECTS = 5
_STREAMS = (
    "text/event-stream",
    "application/x-ndjson",
    "application/jsonl",
    "application/json-lines",
    "application/jsonlines",
)
_ACCEPT = "application/json, application/x-ndjson, text/event-stream, text/plain;q=0.5, */*;q=0.1"
_REQUEST_IDS = ("x-request-id", "request-id", "x-amzn-requestid", "x-correlation-id", "cf-ray")


class HttpAgent(Defined):
    """A service as an agent. Raises ``InvalidInput`` for a definition that can never work."""

    def __init__(self, definition: AgentDefinition) -> None:
        where = f"agent {definition.name!r}"
        if not definition.http:
            raise InvalidInput(f"{where}: the address is empty", agent=definition.name)
        if said := address_fault(definition.http):
            raise InvalidInput(f"{where}: http: {said}", agent=definition.name)
        super().__init__(definition)
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def describe(self) -> dict[str, Any]:
        """What it is, for people: its address and the names of its headers, no values."""
        given = self._definition
        _, secrets, missing = _variables(given)
        return {
            "kind": "http",
            "http": given.http,
            "headers": sorted(given.headers),
            "output": given.output,
            "secret": list(given.env_secret),
            "secret_missing": list(missing),
            "secret_too_short": list(Secrets(secrets).too_short),
            "connect_seconds": given.connect_seconds or CONNECT_SECONDS,
            "idle_seconds": given.idle_seconds,
        }

    async def aclose(self) -> None:
        """Close the connections that were kept for the next attempt."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    async def execute(self, claim: Claim, live: Live, stop: Stop) -> Outcome:
        """Ask the service for *claim*; see ``Agent.execute``."""
        if stop.reason is not None:  # asked to end before it began
            return Outcome(status=stop.reason, cause=str(stop.reason), message=stop.message)
        exchange = _Exchange(self._definition, claim, live, stop)
        return await exchange.run(self._connections())

    def _connections(self) -> httpx.AsyncClient:
        """The client, shared by all attempts of one loop."""
        import httpx

        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            given = self._definition
            idle = given.idle_seconds
            timeout = httpx.Timeout(connect=given.connect_seconds or CONNECT_SECONDS, read=idle, write=idle, pool=None)
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=5.0)
            # A host that is gone closes nothing: the system asks it, and ends the connection if there is no answer.
            trusted = _certificates()
            kept = httpx.AsyncHTTPTransport(verify=trusted, limits=limits, socket_options=_KEEPALIVE)
            proxied = any(name in os.environ for name in ("ALL_PROXY", "all_proxy"))
            mounts = {} if proxied else {"all://": kept}
            self._client = httpx.AsyncClient(
                verify=trusted, timeout=timeout, limits=limits, mounts=mounts, follow_redirects=False
            )
            self._loop = loop
        return self._client


@cache
def _certificates() -> ssl.SSLContext:
    """The authorities that are trusted: reading them takes longer than many a request, so once a process."""
    import httpx

    return httpx.create_ssl_context()


def _keepalive() -> list[tuple[int, int, int]]:
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


_KEEPALIVE = _keepalive()


def _variables(given: AgentDefinition) -> tuple[dict[str, str], dict[str, str], tuple[str, ...]]:
    """What ``{env.NAME}`` can name, the secret part of it, and the secrets that this process does not have."""
    secrets = {name: os.environ[name] for name in given.env_secret if name in os.environ}
    secrets.update((name, given.env_set[name]) for name in given.env_secret if name in given.env_set)
    return {**given.env_set, **secrets}, secrets, tuple(name for name in given.env_secret if name not in secrets)


def _cancel(task: asyncio.Future[None]) -> None:
    task.cancel()


class _Unusable(Exception):
    """The attempt is over before or after the answer, with this fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class _Exchange(Telling):
    """One attempt: the request, the answer, and what became of them."""

    def __init__(self, given: AgentDefinition, claim: Claim, live: Live, stop: Stop) -> None:
        session = claim.session if given.session != "fresh" else None
        super().__init__(live, Meter(claim.meter, resumed=bool(session)))
        self._given = given
        self._claim = claim
        self._stop = stop
        self._session = session
        self._env, secrets, self._missing = _variables(given)
        # A header that carries a secret may come back whole, with what stands around it.
        self._secrets = Secrets({name: value.strip() for name, value in secrets.items()})
        self._output = Output("stdout", self._secrets)
        self._reader: Reader | None = None
        self._events: EventStream | None = None
        self._answered = ""
        self._streaming = False
        self._asking: asyncio.Future[None] | None = None
        self._held_open = False
        self.notes: list[str] = []

    async def run(self, client: httpx.AsyncClient) -> Outcome:
        """Ask, read the answer, and judge it."""
        for name in self._missing:
            self.notes.append(f"secret {name} is not set in the worker's environment")
        for name in self._secrets.too_short:
            self.notes.append(f"secret {name} is too short to be hidden in what the agent writes")
        asking = self._asking = asyncio.ensure_future(self._ask(client))
        self._stop.on_request(lambda: _cancel(asking))
        fault: Fault | None = None
        try:
            await asyncio.wait([asking])
        finally:
            if not asking.done():  # this coroutine is being cancelled: the connection goes first
                asking.cancel()
                await asyncio.wait([asking])
            self.lift_grace()
        if not asking.cancelled():
            error = asking.exception()
            if isinstance(error, _Unusable):
                fault = error.fault
            elif error is not None:
                fault = self._connection_fault(error)
        return self._judge(fault)

    async def _ask(self, client: httpx.AsyncClient) -> None:
        """Send the request, follow where it may be followed, and read the answer."""
        address, headers, content = self._request()
        at_home = True
        for _ in range(_REDIRECTS + 1):
            sent = headers if at_home else {name: headers[name] for name in _OURS}
            async with client.stream("POST", address, headers=sent, content=content) as response:
                if not 300 <= response.status_code <= 399:
                    await self._take(response)
                    return
                target = self._redirected(response, address)
            at_home = at_home and _origin(target) == _origin(address)
            if not at_home:
                self.notes.append(f"redirected to {_origin(target)}, which was sent no credentials")
            address = target
        raise _Unusable(
            Fault(OutcomeClass.PERMANENT, "redirects", f"more than {_REDIRECTS} redirects, the last to {address}")
        )

    def _request(self) -> tuple[str, dict[str, str], bytes]:
        given, claim = self._given, self._claim
        values: dict[str, Any] = {
            "prompt": "" if claim.input is None else as_text(claim.input),
            "id": claim.task_id,
            "attempt": claim.attempt,
            "title": claim.title or "",
            "name": claim.name or "",
            "workspace": "",
            "session": self._session or "",
            **claim.params,
        }
        try:
            if given.body is None:
                body: Any = {
                    "input": claim.input,
                    "session": self._session,
                    "answers": claim.answers,
                    "task": {
                        "id": claim.task_id,
                        "attempt": claim.attempt,
                        "agent": claim.agent,
                        "name": claim.name,
                        "title": claim.title,
                        "plan": claim.plan,
                        "params": claim.params,
                    },
                }
            else:
                body = _filled(given.body, values, claim.input)
            headers = {name: render(text, {**values, "env": self._env}) for name, text in given.headers.items()}
        except InvalidInput as error:
            where = f"agent {given.name!r}"
            if lacks := next((name for name in self._missing if f"env has no {name!r}" in error.message), None):
                words = f"{where}: secret {lacks}, which its headers need, is not set in the worker's environment"
                raise _Unusable(Fault(OutcomeClass.UNAUTHENTICATED, "secret_missing", words)) from None
            raise _Unusable(Fault(OutcomeClass.PERMANENT, "bad_template", f"{where}: {error.message}")) from None
        for name, text in headers.items():
            if any(sign in text for sign in "\r\n\0"):
                words = f"agent {given.name!r}: header {name} would hold a line break or NUL"
                raise _Unusable(Fault(OutcomeClass.PERMANENT, "bad_input", words))
        ours = {
            "Content-Type": "application/json",
            "Accept": _ACCEPT,
            "Accept-Encoding": "identity",
            "User-Agent": "orchestrator",
            # the same attempt is never sent twice by us, but a proxy on the way may do it
            "Idempotency-Key": f"{claim.task_id}-{claim.attempt}-{claim.claimed_by.hex[:12]}",
        }
        named = {name.lower() for name in headers}
        sent = {**{name: text for name, text in ours.items() if name.lower() not in named}, **headers}
        encoded = {name: text.encode("utf-8", "surrogatepass").decode("latin-1") for name, text in sent.items()}
        for name in _OURS:
            encoded.setdefault(name, ours[name])
        assert given.http is not None
        return given.http, encoded, json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")

    def _redirected(self, response: httpx.Response, address: str) -> str:
        """Return where a redirect leads, if it may be followed. One that would drop the prompt is not."""
        status = response.status_code
        location = response.headers.get("location", "")
        target: str = urljoin(address, location)
        self._answered = self._answer_line(response)
        if status not in (307, 308) or not location:
            to = f" to {_shown(target)}" if location else ""
            words = f"{self._answered}: moved{to}; correct http of agent {self._given.name!r}"
            raise _Unusable(Fault(OutcomeClass.PERMANENT, f"http_{status}", words))
        if (said := address_fault(target)) or (address.startswith("https:") and not target.startswith("https:")):
            words = f"{self._answered}: redirect to {_shown(target)} not followed: {said or 'it leaves https'}"
            raise _Unusable(Fault(OutcomeClass.PERMANENT, f"http_{status}", words))
        return target

    def _answer_line(self, response: httpx.Response) -> str:
        line = f"HTTP {response.status_code}"
        id_ = next((response.headers[name] for name in _REQUEST_IDS if name in response.headers), "")
        return f"{line} (request {shorten(str(id_), 100)})" if id_ else line

    async def _take(self, response: httpx.Response) -> None:
        """Read an answer that is no redirect."""
        self._answered = self._answer_line(response)
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if response.status_code >= 400:
            raise _Unusable(await self._refusal(response))
        streaming = self._streaming = kind in _STREAMS
        output = self._given.output
        self._reader = _Lines(self) if streaming and output in ("json", "jsonl") else make_reader(output, self)
        if response.status_code == 204:
            self._reader = make_reader("text", self)
        if kind == "text/event-stream":
            self._events = EventStream(whole=output == "text")
        size = 0
        async for data in response.aiter_bytes():
            size += len(data)
            if not streaming and size > ANSWER_LIMIT:
                words = f"{self._answered}: the answer has more than {ANSWER_LIMIT >> 20} MB and is no stream; it was cut off"
                raise _Unusable(Fault(OutcomeClass.PERMANENT, "too_large", words))
            self._pass_on(*self._output.take(data))

    def _pass_on(self, data: bytes, text: str, size: int, *, final: bool = False) -> None:
        if text:
            self._live.write("stdout", text, size)
        assert self._reader is not None
        if self._events is not None:
            data = self._events.feed(data + b"\n\n" if final else data)
        if data:
            self._reader.feed("stdout", data)
        if not final:
            said = self._reader.has_result or self._reader.asked
            self.has_said_all(said, self._given.result_grace, self._hang_up)

    def _hang_up(self) -> None:
        if self._asking is not None and not self._asking.done():
            self._held_open = True
            self._asking.cancel()

    async def _refusal(self, response: httpx.Response) -> Fault:
        """Return what a status of 400 or more means, with an excerpt of what came with it."""
        import httpx

        held = b""
        # The status alone says what happened: a body that does not come, or breaks off, is not waited for.
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(_REFUSAL_SECONDS):
                async for data in response.aiter_bytes():
                    held += data
                    if len(held) >= _EXCERPT:
                        break
        data, text, size = self._output.take(held[:_EXCERPT])
        _, more, last = self._output.take(b"", final=True)
        text, size = text + more, size + last
        if text:
            self._live.write("stdout", text, size)
        words = _words_of(text)
        now = _date_of(response.headers.get("date"))
        wait = _wait_of(response.headers, now)
        status = response.status_code
        fault = from_status(status, words, retry_after=wait, now=now)
        if status == 503 and wait is not None:
            # it says when to come back: that is no crash
            fault = replace(fault, status=OutcomeClass.RATE_LIMITED, cause="overloaded", retry_after=wait)
        return replace(fault, message=shorten(f"{self._answered}: {words}" if words else self._answered))

    def _connection_fault(self, error: BaseException) -> Fault:
        """Return what a failure below HTTP means."""
        import httpx

        host = _origin(self._given.http or "")
        words = shorten(self._secrets.text(str(error) or type(error).__name__), 300)
        if isinstance(error, httpx.ConnectTimeout):
            limit = self._given.connect_seconds or CONNECT_SECONDS
            return Fault(OutcomeClass.TRANSIENT, "connect_timeout", f"no connection to {host} within {limit:g} s")
        if isinstance(error, httpx.TimeoutException):
            after = f" after {self._answered}" if self._answered else ""
            said = f"no sign of life from {host} for {self._given.idle_seconds:g} s{after}"
            return Fault(OutcomeClass.STALLED, "stalled", said)
        if isinstance(error, httpx.ConnectError | httpx.ProxyError):
            cause = "tls" if isinstance(_root(error), ssl.SSLError) else "connect"
            return Fault(OutcomeClass.TRANSIENT, cause, f"no connection to {host}: {words}")
        if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
            return Fault(OutcomeClass.PERMANENT, "bad_address", f"{host}: {words}")
        if isinstance(error, httpx.HTTPError):
            when = f"after {self._answered}" if self._answered else "before an answer came"
            return Fault(OutcomeClass.TRANSIENT, "connection_lost", f"the connection to {host} broke {when}: {words}")
        raise error

    def _judge(self, fault: Fault | None) -> Outcome:
        """Return the outcome: why it was asked to end, what went wrong, or what the answer says."""
        if self._reader is not None:
            self._pass_on(*self._output.take(b"", final=True), final=True)
        findings = self._reader.close() if self._reader is not None else None
        reason = self._stop.reason
        said = "question" if findings is not None and findings.asks else "result"
        given = self._reader is not None and (self._reader.has_result or self._reader.asked)
        if self._held_open and reason is None:
            grace = self._given.result_grace
            self.notes.append(
                f"the stream was still open {grace:g} s after its {said} and was closed; the {said} counts"
            )
        if reason is not None and given:
            self.notes.append(f"the agent was asked to end after it had given its {said}; the {said} counts")
            reason = None
        if fault is not None and reason is None and given:
            self.notes.append(f"{fault.message}; its {said} had come and counts")
            fault = None
        if self._answered and (fault is None or reason is not None):
            self.notes.append(self._secrets.text(self._answered))
        if findings is None or reason is not None or fault is not None:
            outcome = self._failure(fault, reason, findings.result if findings is not None else None)
            if findings is not None:
                outcome = replace(outcome, session=findings.session, notes=tuple(findings.notes))
        elif findings.result_due and not (findings.has_result or findings.is_error or findings.asks):
            outcome = self._nothing(findings.output, findings.last_line)
        else:
            outcome = replace(
                verdict(
                    findings, exit_code=0, signal=None, exit_codes={}, stop_reason=None, answered=self._claim.answers
                ),
                exit_code=None,
            )
        size = TranscriptSize(bytes=self._output.bytes, replaced=self._output.replaced)
        usage = self._meter.close(ended=reason is None and fault is None)
        return replace(outcome, usage=usage, transcript=size, notes=(*outcome.notes, *self.notes))

    def _failure(self, fault: Fault | None, reason: OutcomeClass | None, result: Any) -> Outcome:
        if reason is not None:
            return Outcome(status=reason, cause=str(reason), message=self._stop.message, result=result)
        if fault is None:  # cancelled without a reason: by whoever closes the loop
            return Outcome(status=OutcomeClass.INTERRUPTED, cause="interrupted")
        return Outcome(
            status=fault.status,
            cause=fault.cause,
            message=self._secrets.text(fault.message),
            result=result,
            retry_at=fault.retry_at,
            retry_after=fault.retry_after,
        )

    def _nothing(self, output: str, last: str) -> Outcome:
        """An answer that came to its end without what was due: broken if it should be JSON, else cut short."""
        excerpt = f": {shorten(last, 500)}" if last else ", and is empty"
        if output == "json":
            words = f"{self._answered}: the answer is no JSON{excerpt}"
            return Outcome(status=OutcomeClass.PERMANENT, cause="not_json", message=words)
        words = f"{self._answered}: the answer ended without a result{excerpt}"
        status = OutcomeClass.TRANSIENT if self._streaming else OutcomeClass.PERMANENT
        return Outcome(status=status, cause="no_result", message=words)


_OURS = ("Content-Type", "Accept", "Accept-Encoding", "User-Agent", "Idempotency-Key")
"""Headers that may go to a host to which a redirect leads."""


class _Lines(JsonlReader):
    """A stream of the contract's lines, in which a service can also say that it failed."""

    due = "a line of type result"

    def _event(self, event: dict[str, Any]) -> None:
        if event.get("type") == "error":
            error = event.get("error", event)
            words = flatten(mapping(error).get("message")) or flatten(error) or "an error without a message"
            status: Any = mapping(error).get("status")
            wait: Any = mapping(error).get("retry_after")
            stated = isinstance(wait, int | float) and not isinstance(wait, bool) and wait >= 0
            after = float(min(wait, sys.float_info.max)) if stated else None
            if isinstance(status, int) and 400 <= status <= 599:
                fault: Fault | None = from_status(status, words, retry_after=after)
            else:
                fault = from_text(words)
            self.has_result = True
            self._failed(fault or Fault(OutcomeClass.TRANSIENT, "agent_error", shorten(words)))
        else:
            super()._event(event)


class EventStream:
    """Server-sent events to lines: the data of each event, on one line. ``whole``: as it stands, for a text.

    An event that has a name, but data without a ``type``, gets its name as type.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._size = 0
        self._name = b""
        self._after_cr = False

    def feed(self, data: bytes) -> bytes:
        """Return the lines that *data* completes. An event of more than 16 MB is left out."""
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
        self._after_cr = data.endswith(b"\r")
        first, *lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest += first  # what was held is not looked through again
        told = b""
        if lines:
            told = self._line(bytes(self._rest)) + b"".join(self._line(line) for line in lines[:-1])
            self._rest = bytearray(lines[-1])
        if len(self._rest) > LINE_LIMIT:
            self._rest.clear()
            self._size = LINE_LIMIT + 1
        return told

    def _line(self, line: bytes) -> bytes:
        if not line:
            return self._event()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._size += len(value)
            if self._size <= LINE_LIMIT:
                self._data.append(value)
        elif field == b"event":
            self._name = value
        return b""

    def _event(self) -> bytes:
        parts, name, size = self._data, self._name, self._size
        self._data, self._name, self._size = [], b"", 0
        if not parts or size > LINE_LIMIT:
            return b""
        if self._whole:
            return b"\n".join(parts)
        joined = b" ".join(parts)  # a line break between tokens of JSON is a space
        if name and name != b"message":
            try:
                value = json.loads(joined)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict) and "type" not in value:
                joined = json.dumps({"type": name.decode("utf-8", "replace"), **value}).encode()
            elif value is None and name == b"error":
                joined = json.dumps({"type": "error", "message": joined.decode("utf-8", "replace")}).encode()
        return joined + b"\n"


def _filled(template: Any, values: Mapping[str, Any], given: Any) -> Any:
    """*template*, a JSON value, with the placeholders in its texts filled; a text that is just ``{input}`` is the input."""
    if isinstance(template, str):
        if template == "{input}":
            return given
        if template == "{session}" and not values["session"]:
            return None
        return render(template, {**values, "input": given})
    if isinstance(template, dict):
        return {key: _filled(each, values, given) for key, each in template.items()}
    if isinstance(template, list | tuple):
        return [_filled(each, values, given) for each in template]
    return template


def _words_of(text: str) -> str:
    """The message in the body of a refusal: in one of the usual forms of JSON, else its text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return shorten(text, 500)
    error = mapping(value).get("error", value)
    words = flatten(mapping(error).get("message")) or flatten(mapping(error).get("detail")) or flatten(error)
    kind = mapping(error).get("type")
    if words:
        return shorten(f"{kind}: {words}" if isinstance(kind, str) and kind not in words else words, 500)
    return shorten(text, 500)


def _wait_of(headers: Mapping[str, str], now: datetime | None) -> float | None:
    """The seconds after which a refusal says to come back, if it says so."""
    try:
        return max(0.0, float(headers["retry-after-ms"]) / 1000)
    except (KeyError, ValueError):
        return retry_after_seconds(headers.get("retry-after"), now=now)


def _date_of(value: str | None) -> datetime | None:
    """The server's own clock, which the date in its Retry-After is read by."""
    try:
        at = parsedate_to_datetime(value or "")
    except ValueError:
        return None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def _origin(address: str) -> str:
    parts = urlsplit(address)
    usual = {"http": 80, "https": 443}.get(parts.scheme)
    port = parts.port or usual
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}" if port == usual else f"{parts.scheme}://{host}:{port}"


def _shown(address: str) -> str:
    """*address* without the password that may stand in it."""
    before, at, behind = address.partition("//")[2].partition("/")[0].rpartition("@")
    return address.replace(before + at + behind, "***@" + behind, 1) if at else address


def _root(error: BaseException) -> BaseException:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


__all__ = ["ANSWER_LIMIT", "CONNECT_SECONDS", "EventStream", "HttpAgent"]
