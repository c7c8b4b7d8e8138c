"""Agents over HTTP: what is asked, what is read from the answer, and what each way to fail means (S45)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from orchestrator.agents import http
from orchestrator.agents.building import build
from orchestrator.agents.http import EventStream, HttpAgent
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidPlan
from orchestrator.plans import agent_definition
from orchestrator.worker import Worker
from tests.http_servers import Connection, Request, Service, never_accepting, serving
from tests.running import Heard, a_claim, execute
from tests.working import Working, orchestrator

TOKEN = "tok-0123456789"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret to send, and no proxy on the way to the loopback address."""
    monkeypatch.setenv("API_TOKEN", TOKEN)
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def agent(url: str, **fields: Any) -> HttpAgent:
    """An agent at this address that sends the secret."""
    given: dict[str, Any] = {
        "http": url,
        "headers": {"Authorization": "Bearer {env.API_TOKEN}"},
        "env": {"secret": ["API_TOKEN"]},
        **fields,
    }
    made = build(agent_definition("remote", given))
    assert isinstance(made, HttpAgent)
    return made


def ask(url: str, live: Heard | None = None, *, input: Any = "go", **fields: Any) -> Outcome:  # noqa: A002
    """One attempt."""
    return execute(agent(url, **fields), a_claim(agent="remote", input=input), live)


@contextlib.contextmanager
def answering(body: str | bytes, **how: Any) -> Iterator[Service]:
    """A service that always says the same."""
    with serving(lambda _, connection: connection.answer(body, **how)) as service:
        yield service


# -- what is asked and answered ----------------------------------------------------------------------------------------


def test_a_request_carries_the_task_and_a_document_is_the_result() -> None:
    """The input, the session and the task go out as JSON; JSON comes back as it is."""
    with answering('{"files": [1, null]}', X_Request_Id="req-9") as service:
        claim = a_claim(agent="remote", input={"a": "ä"}, session="s1", title="T", name="n", plan="p", params={"x": 1})
        outcome = execute(agent(service.url), claim)
    (request,) = service.requests
    assert outcome.status is OutcomeClass.DONE
    assert outcome.result == {"files": [1, None]}
    assert "HTTP 200 (request req-9)" in outcome.notes
    assert request.json == {
        "input": {"a": "ä"},
        "session": "s1",
        "answers": {},
        "task": {"id": 7, "attempt": 1, "agent": "remote", "name": "n", "title": "T", "plan": "p", "params": {"x": 1}},
    }
    assert request.headers["authorization"] == f"Bearer {TOKEN}"
    assert request.headers["idempotency-key"].startswith("7-1-")


def test_a_body_of_ones_own() -> None:
    """Placeholders in its texts are filled; a value never becomes syntax; the input can stand there whole."""
    body = {"model": "m", "text": "Do {prompt} as {name} with {x.y}", "raw": "{input}", "n": 3, "go_on": "{session}"}
    with answering("null") as service:
        claim = a_claim(agent="remote", input={"q": '"}'}, name="{id}", params={"x": {"y": 2}})
        execute(agent(service.url, body=body, headers={"X-Task": "{id}/{attempt}"}), claim)
    (request,) = service.requests
    assert request.json == {
        "model": "m",
        "text": 'Do {"q": "\\"}"} as {id} with 2',
        "raw": {"q": '"}'},
        "n": 3,
        "go_on": None,
    }
    assert request.headers["x-task"] == "7/1"
    assert "authorization" not in request.headers


@pytest.mark.parametrize(
    ("kind", "output", "body", "result"),
    [
        ("text/plain", "text", " hello \n", "hello"),
        ("application/x-ndjson", "json", '{"type":"progress","percent":5}\n{"type":"result","value":[1]}\n', [1]),
        ("text/event-stream", "json", ': hi\n\ndata: {"type":"result",\ndata: "value":2}\n\n', 2),
        ("text/event-stream", "jsonl", 'event: result\r\ndata: {"value":3}\r\n\r\n', 3),
        ("text/event-stream", "jsonl", 'event: result\rdata: {"value":4}', 4),
        ("text/event-stream", "text", "data: one\n\ndata:  two\n\n", "one two"),
        ("application/json", "jsonl", '{"type":"result","value":5}', 5),
        (
            "application/json",
            "openai",
            '{\n"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}',
            "hi",
        ),
        (
            "text/event-stream",
            "openai",
            'data: {"choices":[{"delta":{"content":"h"}}]}\n\ndata: {"choices":[{"delta":{"content":"i"},'
            '"finish_reason":"stop"}]}\n\ndata: {"choices":[],"usage":{"prompt_tokens":4}}\n\ndata: [DONE]\n\n',
            "hi",
        ),
    ],
)
def test_kinds_of_answers(kind: str, output: str, body: str, result: Any) -> None:
    """A document, lines, events, plain text: the type of the content and ``output`` say how it is read."""
    with answering(body, kind=kind) as service:
        outcome = ask(service.url, output=output)
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, result)


def test_a_stream_tells_as_it_comes() -> None:
    """Usage, session and progress are passed on while the answer still streams, one byte at a time."""
    lines = (
        {"type": "session", "id": "s9"},
        {"type": "usage", "input_tokens": 10, "output_tokens": 2, "cost_usd": 0.5},
        {"type": "progress", "percent": 50, "message": "half ä"},
        {"type": "result", "value": "ok"},
    )

    def respond(_: Request, connection: Connection) -> None:
        connection.head(200, "text/event-stream")
        for line in lines:
            for byte in f"data: {json.dumps(line, ensure_ascii=False)}\n\n".encode():
                connection.send(bytes([byte]))

    live = Heard()
    with serving(respond) as service:
        outcome = ask(service.url, live)
    assert outcome.result == "ok"
    assert outcome.session == "s9"
    assert live.sessions == ["s9"]
    assert (50.0, "half ä") in live.progressed
    assert outcome.usage is not None
    assert (outcome.usage.total_tokens, outcome.usage.cost_usd) == (12, 0.5)
    assert "half ä" in live.text("stdout")
    assert outcome.transcript.bytes == live.sizes > 0


def test_usage_of_a_chat_completion() -> None:
    """Tokens and model are read from it; the cost is not known."""
    body = {
        "id": "c1",
        "model": "gpt-mock",
        "choices": [{"message": {"content": "hi"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5},
    }
    with answering(json.dumps(body)) as service:
        outcome = ask(service.url, output="openai")
    assert outcome.usage is not None
    assert (outcome.usage.input_tokens, outcome.usage.output_tokens, outcome.usage.total_tokens) == (4, 1, 5)
    assert (outcome.usage.model, outcome.usage.cost_usd) == ("gpt-mock", None)
    assert any("finish_reason length" in note for note in outcome.notes)


# -- S45: the ways to fail ---------------------------------------------------------------------------------------------


def test_nobody_accepts() -> None:
    """(1) The limit of connecting stands apart from all others."""
    with never_accepting() as url:
        outcome = ask(url, connect_seconds=0.2)
    assert (outcome.status, outcome.cause) == (OutcomeClass.TRANSIENT, "connect_timeout")
    assert "within 0.2 s" in str(outcome.message)


def test_nobody_listens() -> None:
    """A refused connection may be a restart: transient."""
    with serving(lambda *_: None) as service:
        pass
    outcome = ask(service.url)
    assert (outcome.status, outcome.cause) == (OutcomeClass.TRANSIENT, "connect")
    assert f"http://127.0.0.1:{service.port}" in str(outcome.message)


@pytest.mark.parametrize("first", ["", 'data: {"type":"progress","percent":1}\n\n'])
def test_silence(first: str) -> None:
    """(2, 3) Silence before or within the answer is stalled, and what had come is kept."""

    def respond(_: Request, connection: Connection) -> None:
        if first:
            connection.head(200, "text/event-stream")
            connection.send(first)
        connection.wait_for_the_end()

    live = Heard()
    with serving(respond) as service:
        outcome = ask(service.url, live, idle_seconds=0.3)
        assert service.hung_up.acquire(timeout=20)
    assert (outcome.status, outcome.cause) == (OutcomeClass.STALLED, "stalled")
    assert "0.3 s" in str(outcome.message)
    assert live.text("stdout") == first


def test_an_endless_trickle_ends_with_the_budget() -> None:
    """(4) The idle limit does not see it; being asked to end closes the connection and keeps what came."""

    def respond(_: Request, connection: Connection) -> None:
        connection.head(200, "text/event-stream")
        for _number in range(5):
            connection.send(": still here\n\n")
        connection.wait_for_the_end()

    live = Heard()
    with serving(respond) as service:
        outcome = execute(
            agent(service.url, idle_seconds=60),
            a_claim(agent="remote"),
            live,
            when=lambda heard: heard.text("stdout").count("still here") == 5,
            reason=OutcomeClass.TIMED_OUT,
        )
        assert service.hung_up.acquire(timeout=20), "the connection was left open"
    assert outcome.status is OutcomeClass.TIMED_OUT
    assert outcome.transcript.bytes > 0


def test_cancel_before_any_answer_closes_the_connection() -> None:
    """A cancelled attempt leaves no request behind."""
    with serving(lambda _, connection: connection.wait_for_the_end()) as service:
        outcome = execute(agent(service.url), a_claim(agent="remote"), when=lambda _: service.requests)
        assert service.hung_up.acquire(timeout=20), "the connection was left open"
    assert (outcome.status, outcome.cause) == (OutcomeClass.CANCELLED, "cancelled")


def test_a_result_that_had_come_counts() -> None:
    """Being asked to end, or a broken connection, after the result undoes nothing."""

    def respond(_: Request, connection: Connection) -> None:
        connection.head(200, "application/x-ndjson", Content_Length="5000")
        connection.send('{"type":"result","value":1}\n')
        if service.requests[1:]:
            connection.wait_for_the_end()

    with serving(respond) as service:
        broken = ask(service.url)
        stopped = execute(
            agent(service.url), a_claim(agent="remote"), when=lambda heard: any(k == "result" for k, _ in heard.written)
        )
    assert (broken.status, broken.result) == (OutcomeClass.DONE, 1)
    assert any("its result had come" in note for note in broken.notes)
    assert (stopped.status, stopped.result) == (OutcomeClass.DONE, 1)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ('{"type":"result","value":1}', OutcomeClass.DONE),
        ('{"type":"ask","name":"q","question":"Send?"}', OutcomeClass.SUSPENDED),
        ('{"type":"error","message":"no","status":401}', OutcomeClass.UNAUTHENTICATED),
    ],
)
def test_a_stream_that_stays_open_after_its_last_word(line: str, status: OutcomeClass) -> None:
    """S33: it has its grace to end, then the connection is closed, and what was said counts, without any other limit."""

    def respond(_: Request, connection: Connection) -> None:
        connection.head(200, "application/x-ndjson")
        connection.send(line + "\n")
        connection.wait_for_the_end()

    with serving(respond) as service:
        outcome = ask(service.url, result_grace=0.05)
        assert service.hung_up.acquire(timeout=20), "the connection was left open"
    assert outcome.status is status
    assert any("still open 0.05 s after" in note for note in outcome.notes)


def test_a_connection_that_breaks() -> None:
    """A cut answer without result may succeed the next time."""

    def respond(_: Request, connection: Connection) -> None:
        connection.head(200, "application/x-ndjson", Content_Length="5000")
        connection.send('{"type":"progress","percent":1}\n')

    with serving(respond) as service:
        outcome = ask(service.url)
    assert (outcome.status, outcome.cause) == (OutcomeClass.TRANSIENT, "connection_lost")


@pytest.mark.parametrize(
    ("status", "headers", "body", "expected", "cause", "after"),
    [
        (429, {"Retry_After": "7"}, "slow down", OutcomeClass.RATE_LIMITED, "rate_limit", 7.0),
        (429, {"Retry_After_Ms": "1500", "Retry_After": "9"}, "", OutcomeClass.RATE_LIMITED, "rate_limit", 1.5),
        (429, {}, '{"error": {"message": "try again in 20s"}}', OutcomeClass.RATE_LIMITED, "rate_limit", 20.0),
        (429, {}, "", OutcomeClass.RATE_LIMITED, "rate_limit", None),
        (529, {}, "", OutcomeClass.RATE_LIMITED, "overloaded", None),
        (503, {"Retry_After": "3"}, "", OutcomeClass.RATE_LIMITED, "overloaded", 3.0),
        (503, {}, "", OutcomeClass.TRANSIENT, "http_503", None),
        (500, {}, "boom", OutcomeClass.TRANSIENT, "http_500", None),
        (401, {}, "", OutcomeClass.UNAUTHENTICATED, "authentication", None),
        (403, {}, "", OutcomeClass.UNAUTHENTICATED, "authentication", None),
        (404, {}, "", OutcomeClass.PERMANENT, "http_404", None),
        (400, {}, '{"error": {"message": "prompt is too long"}}', OutcomeClass.PERMANENT, "context_too_long", None),
        (301, {"Location": "/other"}, "", OutcomeClass.PERMANENT, "http_301", None),
    ],
)
def test_statuses(
    status: int, headers: dict[str, str], body: str, expected: OutcomeClass, cause: str, after: float | None
) -> None:
    """(5, 6) Each status has its class; a stated wait is honoured; the message names status, request and words."""
    with answering(body, status=status, X_Request_Id="r1", **headers) as service:
        outcome = ask(service.url)
    assert (outcome.status, outcome.cause, outcome.retry_after) == (expected, cause, after)
    assert str(outcome.message).startswith(f"HTTP {status} (request r1)")


@pytest.mark.parametrize("hang_up", [False, True])
@pytest.mark.parametrize(
    ("status", "expected", "after"), [(429, OutcomeClass.RATE_LIMITED, 7.0), (401, OutcomeClass.UNAUTHENTICATED, None)]
)
def test_a_refusal_whose_body_does_not_come(
    monkeypatch: pytest.MonkeyPatch, status: int, expected: OutcomeClass, after: float | None, hang_up: bool
) -> None:
    """The status and its headers count, whether the body stays away or breaks off; no limit is needed for that."""
    monkeypatch.setattr(http, "_REFUSAL_SECONDS", 0.1)

    def respond(_: Request, connection: Connection) -> None:
        connection.head(status, "text/plain", Retry_After="7", Content_Length="500")
        connection.send("not n")
        if not hang_up:
            connection.wait_for_the_end()

    with serving(respond) as service:
        outcome = ask(service.url)
    assert (outcome.status, outcome.message) == (expected, f"HTTP {status}: not n")
    if after is not None:
        assert outcome.retry_after == after


@pytest.mark.parametrize("stated", ["nan", "inf", "soon"])
def test_a_wait_that_is_none(stated: str) -> None:
    """What is no number of seconds and no date states no reset."""
    with answering("no", status=429, Retry_After=stated) as service:
        outcome = ask(service.url)
    assert (outcome.status, outcome.retry_after) == (OutcomeClass.RATE_LIMITED, None)


@pytest.mark.parametrize("status", [302, 307])
def test_a_redirect_shows_no_password(status: int) -> None:
    """What stands before the host of a new address is not told."""
    with answering("", status=status, Location="http://me:hidden@127.0.0.1:1/x@y") as service:
        outcome = ask(service.url)
    assert outcome.status is OutcomeClass.PERMANENT
    assert "hidden" not in str(outcome.message)
    assert "***@127.0.0.1:1/x@y" in str(outcome.message)


def test_a_wait_until_a_date() -> None:
    """A date is read by the server's own clock, which may be wrong by hours."""
    server = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=5)
    date = {"Date": format_datetime(server, True), "Retry_After": format_datetime(server + timedelta(seconds=90), True)}
    with answering("", status=429, **date) as service:
        outcome = ask(service.url)
    assert outcome.retry_after == 90.0


def test_what_is_no_json_fails_for_good() -> None:
    """(7) With an excerpt of what came instead."""
    with answering("<html>Sorry, down</html>", kind="text/html") as service:
        outcome = ask(service.url)
    assert (outcome.status, outcome.cause) == (OutcomeClass.PERMANENT, "not_json")
    assert "<html>Sorry, down</html>" in str(outcome.message)


def test_redirects_take_no_credentials_along() -> None:
    """(8) Within the host they are followed; to another host without the agent's headers; prompts are not dropped."""

    def respond(request: Request, connection: Connection) -> None:
        if request.path == "/run":
            connection.answer("", status=307, Location="/moved")
        elif request.path == "/moved":
            connection.answer("", status=308, Location=f"http://localhost:{other.port}/there")
        else:
            connection.answer('"home"')

    with answering('"there"') as other, serving(respond) as service:
        outcome = ask(service.url)
    assert outcome.result == "there"
    assert [request.headers.get("authorization") for request in service.requests] == [f"Bearer {TOKEN}"] * 2
    (elsewhere,) = other.requests
    assert TOKEN not in str(elsewhere)
    assert elsewhere.json["input"] == "go"
    assert any("sent no credentials" in note for note in outcome.notes)


def test_redirects_without_end() -> None:
    """They are followed a few times only."""
    with answering("", status=307, Location="/run") as service:
        outcome = ask(service.url)
    assert (outcome.status, outcome.cause, len(service.requests)) == (OutcomeClass.PERMANENT, "redirects", 6)


def test_a_huge_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """(9) Reading ends at the limit, and the connection is closed."""
    monkeypatch.setattr(http, "ANSWER_LIMIT", 1 << 20)

    def respond(_: Request, connection: Connection) -> None:
        connection.head(200, Content_Length=str(2 << 30))
        with contextlib.suppress(OSError):
            for _number in range(2 << 10):
                connection.send(b"x" * (1 << 20))
        connection.service.hung_up.release()

    live = Heard()
    with serving(respond) as service:
        outcome = ask(service.url, live)
        assert service.hung_up.acquire(timeout=20)
    assert (outcome.status, outcome.cause) == (OutcomeClass.PERMANENT, "too_large")
    assert outcome.transcript.bytes < 4 << 20


def test_secrets_come_back_blackened() -> None:
    """A service that repeats the key shows it nowhere: not in the result, the transcript, the message or a note."""

    def respond(request: Request, connection: Connection) -> None:
        key = request.headers["authorization"]
        if len(service.requests) == 1:
            connection.answer(f'{{"got": "{key}"}}', X_Request_Id=key)
        else:
            connection.answer(f"bad key {key}", status=401)

    live = Heard()
    with serving(respond) as service:
        good, bad = ask(service.url, live), ask(service.url, live)
    assert good.result == {"got": "Bearer [secret API_TOKEN]"}
    assert bad.status is OutcomeClass.UNAUTHENTICATED
    assert TOKEN not in f"{good} {bad} {live.written}"


def test_a_secret_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the key nothing is sent; another worker may have it."""
    monkeypatch.delenv("API_TOKEN")
    with answering("1") as service:
        outcome = ask(service.url)
    assert (outcome.status, outcome.cause) == (OutcomeClass.UNAUTHENTICATED, "secret_missing")
    assert "API_TOKEN" in str(outcome.message)
    assert service.requests == []


@pytest.mark.parametrize(
    ("line", "expected", "after"),
    [
        ('{"type":"error","message":"no","status":429,"retry_after":4}', OutcomeClass.RATE_LIMITED, 4.0),
        ('{"type":"error","error":{"message":"x","status":401}}', OutcomeClass.UNAUTHENTICATED, None),
        ('{"type":"error","message":"boom"}', OutcomeClass.TRANSIENT, None),
        ('{"type":"progress","percent":1}', OutcomeClass.TRANSIENT, None),
    ],
)
def test_failures_within_a_stream(line: str, expected: OutcomeClass, after: float | None) -> None:
    """After 200 a service can still say that it failed; a stream without a result is cut short."""
    with answering(line + "\n", kind="application/x-ndjson") as service:
        outcome = ask(service.url)
    assert (outcome.status, outcome.retry_after) == (expected, after)


_DEEP = "[" * 50_000


@pytest.mark.parametrize(
    ("status", "kind", "body", "expected"),
    [
        (429, "application/json", _DEEP, OutcomeClass.RATE_LIMITED),
        (500, "application/json", '{"error":' * 5_000, OutcomeClass.TRANSIENT),
        (
            200,
            "text/event-stream",
            "event: x\ndata: " + _DEEP + '\n\ndata: {"type":"result","value":1}\n\n',
            OutcomeClass.DONE,
        ),
        (
            200,
            "application/x-ndjson",
            '{"type":"error","error":{"status":429,"message":"wait","retry_after":1' + "0" * 400 + "}}\n",
            OutcomeClass.RATE_LIMITED,
        ),
    ],
)
def test_answers_beyond_what_can_be_read(status: int, kind: str, body: str, expected: OutcomeClass) -> None:
    """Nesting without end and numbers beyond every float change nothing about what the answer means."""
    with answering(body, status=status, kind=kind) as service:
        outcome = ask(service.url)
    assert outcome.status is expected


def test_connections_are_kept_and_closed() -> None:
    """One client serves all attempts of a loop, many at a time; ``aclose`` ends it."""
    with answering("1") as service:
        remote = agent(service.url)

        async def many() -> list[Outcome]:
            from orchestrator.agents.protocol import Stop

            found = await asyncio.gather(
                *(remote.execute(a_claim(agent="remote", task_id=n), Heard(), Stop()) for n in range(50))
            )
            await remote.aclose()
            return list(found)

        outcomes = asyncio.run(many())
    assert {outcome.status for outcome in outcomes} == {OutcomeClass.DONE}


def test_a_long_event_in_many_small_pieces() -> None:
    """Each piece is looked at once: an event of megabytes takes no more than its bytes."""
    stream = EventStream()
    piece = b"x" * 1024
    told = [stream.feed(part) for part in (b'data: "', *([piece] * 8192), b'"\n', b"\n")]
    assert b"".join(told) == b'"' + piece * 8192 + b'"\n'


def test_events_of_any_cut() -> None:
    """Server-sent events come out the same wherever the pieces end."""
    whole = b'event: a\r\ndata: {"x":\r\ndata: 1}\r\n\r\n: c\nid: 4\ndata: {"y":2}\n\nevent: error\ndata: bad\n\n'
    expected = [{"type": "a", "x": 1}, {"y": 2}, {"type": "error", "message": "bad"}]
    for size in range(1, len(whole) + 1):
        stream = EventStream()
        out = b"".join(stream.feed(whole[at : at + size]) for at in range(0, len(whole), size))
        assert [json.loads(line) for line in out.splitlines()] == expected


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"http": "ftp://x"}, "expected an address such as https://host/path"),
        ({"http": "https://u:p@host/"}, "an address holds no password"),
        ({"http": "https://host/{prompt}"}, "no placeholders"),
        ({"http": "https://host", "headers": {"A b": "x"}}, "cannot be the name of a header"),
        ({"http": "https://host", "headers": {"A": "{env.NOPE}"}}, "name NOPE under env: {secret: [...]}"),
        ({"http": "https://host", "headers": {"A": "x\ny"}}, "a header is one line"),
        ({"http": "https://host", "output": "claude"}, "expected one of json, jsonl, text, openai"),
        ({"command": ["x"], "body": {}}, "body: only an http agent has it"),
    ],
)
def test_definitions_that_are_refused(fields: dict[str, Any], says: str) -> None:
    """What can never work is said where it is written."""
    with pytest.raises(InvalidPlan) as caught:
        agent_definition("remote", fields)
    assert says in caught.value.message


def test_it_says_what_it_is_without_values() -> None:
    """``agents`` shows the address and the names of headers, never a value."""
    described = agent("https://host/run").describe()
    assert described["http"] == "https://host/run"
    assert described["headers"] == ["Authorization"]
    assert TOKEN not in str(described)


def test_a_worker_waits_out_a_limit(database_url: str) -> None:
    """429 with Retry-After puts the task off at no retry; every attempt is a run that names status and request."""

    def respond(_: Request, connection: Connection) -> None:
        if len(service.requests) == 1:
            connection.answer("slow down", status=429, Retry_After_Ms="50", X_Request_Id="r1")
        else:
            connection.answer('"ok"', X_Request_Id="r2")

    with serving(respond) as service, orchestrator(database_url) as orc:
        added = orc.add("remote", "go", max_retries=0)
        with Working(Worker(orc, [agent(service.url)]), until_idle=True) as working:
            working.join()
        task, runs = orc.get(added.id), orc.runs(added.id)
    assert (task.status, task.result, task.retry_count) == ("done", "ok", 0)
    assert [run.status for run in runs] == ["rate_limited", "done"]
    assert runs[0].message == "HTTP 429 (request r1): slow down"
    assert "HTTP 200 (request r2)" in (runs[1].notes or [])
