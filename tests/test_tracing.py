"""Spans: one trace from the adder over every attempt; the context in the row, in the agent's environment, in ``ctx``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import Engine

from orchestrator.agents.functions import agent
from orchestrator.agents.protocol import Live, Stop
from orchestrator.domain.outcome import Claim, Outcome, traceparent
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput
from orchestrator.service import Orchestrator
from orchestrator.settings import Settings
from orchestrator.tracing import Tracing, tracing
from orchestrator.worker import Worker
from tests.commands import Cli, process
from tests.working import FakeAgent, orchestrator, query

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Spans:
    """A provider whose spans are kept in memory."""

    def __init__(self) -> None:
        self.provider = TracerProvider()
        self._kept = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._kept))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._kept.get_finished_spans() if span.name == f"orchestrator.{name}"]

    def tree(self) -> dict[str, list[ReadableSpan]]:
        return {name: self.named(name) for name in ("add", "claim", "execute", "record")}


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return {key.removeprefix("orchestrator."): value for key, value in (span.attributes or {}).items()}


def parent(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def own(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def work(orc: Orchestrator, *agents: Any) -> None:
    assert Worker(orc, list(agents), 1, signals=False).run(until_idle=True) == 0


def test_one_trace_over_a_retry(database_url: str, engine: Engine) -> None:
    """The adder's span is the root; each attempt hangs its claim on it, and execution and record on that claim."""
    spans, seen = Spans(), list[str | None]()

    async def behave(claim: Claim, _live: Live, _stop: Stop) -> Outcome:
        seen.append(claim.traceparent)
        return Outcome(OutcomeClass.TRANSIENT if claim.attempt == 1 else OutcomeClass.DONE, cause="first")

    with orchestrator(database_url) as orc:
        orc.tracing = Tracing(spans.provider)
        with spans.provider.get_tracer("app").start_as_current_span("request") as request:
            task = orc.add("a").id
        work(orc, FakeAgent(behave=behave))
    tree = spans.tree()
    (add,) = tree["add"]
    assert parent(add) == request.get_span_context().span_id
    stored = query(engine, "SELECT traceparent FROM tasks")[0][0]
    assert int(stored.split("-")[2], 16) == own(add)
    assert [len(tree[name]) for name in ("claim", "execute", "record")] == [2, 2, 2]
    for number in (0, 1):
        claim, execute, record = (tree[name][number] for name in ("claim", "execute", "record"))
        assert parent(claim) == own(add)
        assert parent(execute) == parent(record) == own(claim)
        assert [attributes(each)["attempt"] for each in (claim, execute, record)] == [number + 1] * 3
        assert {attributes(each)["task"] for each in (claim, execute, record)} == {task}
        assert int((seen[number] or "").split("-")[2], 16) == own(execute)
        assert (claim.start_time or 0) <= (claim.end_time or 0) <= (execute.end_time or 0) <= (record.end_time or 0)
    every = [span for each in tree.values() for span in each]
    assert {span.context.trace_id for span in every if span.context} == {request.get_span_context().trace_id}
    first, second = tree["execute"]
    assert (attributes(first)["outcome"], attributes(first)["cause"]) == ("transient", "first")
    assert (first.status.is_ok, first.status.description, second.status.is_ok) == (False, "transient", True)
    assert [attributes(each)["status"] for each in tree["record"]] == ["pending", "done"]


def test_a_task_without_a_context_begins_a_trace(database_url: str, engine: Engine) -> None:
    """Also one whose context is no context: it is not passed on."""
    spans = Spans()
    query(engine, "INSERT INTO tasks (agent, traceparent) VALUES ('a', NULL), ('a', E'nonsense\\n')")
    with orchestrator(database_url) as orc:
        orc.tracing = Tracing(spans.provider)
        work(orc, FakeAgent())
    claims = spans.named("claim")
    assert [parent(claim) for claim in claims] == [None, None]
    assert len({claim.context.trace_id for claim in claims if claim.context}) == 2


def test_a_context_can_be_given(database_url: str, engine: Engine) -> None:
    """With spans it is the parent of the adder's; without any it goes to the row, and to the agent, as it is."""
    spans, seen = Spans(), list[str | None]()

    async def behave(claim: Claim, _live: Live, _stop: Stop) -> Outcome:
        seen.append(claim.traceparent)
        return Outcome(OutcomeClass.DONE)

    with orchestrator(database_url) as orc:
        orc.add("a", traceparent=GIVEN)
        work(orc, FakeAgent(behave=behave))
        assert seen == [GIVEN]
        orc.tracing = Tracing(spans.provider)
        orc.add("a", traceparent=GIVEN)
        (add,) = spans.named("add")
        assert add.context is not None
        assert f"{add.context.trace_id:032x}-{parent(add):016x}" in GIVEN
        orc.add_many([{"agent": "a", "traceparent": GIVEN}, {"agent": "a"}])
        rows = [row[0] for row in query(engine, "SELECT traceparent FROM tasks ORDER BY id")]
        assert rows[2] == GIVEN
        assert rows[3] not in (GIVEN, None)
        with pytest.raises(InvalidInput, match="traceparent: expected a W3C trace context"):
            orc.add("a", traceparent="x")


@pytest.mark.parametrize(
    ("text", "well"),
    [
        (GIVEN, True),
        (None, False),
        ("", False),
        (GIVEN + "\n", False),
        (GIVEN.upper(), False),
        ("ff" + GIVEN[2:], False),
        ("00-" + "0" * 32 + GIVEN[35:], False),
        (GIVEN[:36] + "0" * 16 + "-01", False),
    ],
    ids=range(8),
)
def test_what_is_a_context(text: str | None, well: bool) -> None:
    """By the words of W3C's Trace Context, version by version."""
    assert traceparent(text) == (text if well else None)


def test_agents_know_their_context(cli: Cli, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """``add`` takes TRACEPARENT of its environment along; a command finds it there, never that of the worker itself."""
    cli.config('[agents.env]\ncommand = ["sh", "-c", "echo \\"<$TRACEPARENT>\\""]\n')
    monkeypatch.setenv("TRACEPARENT", GIVEN)
    cli("add", "env")
    monkeypatch.setenv("TRACEPARENT", "nonsense")
    cli("add", "env")
    monkeypatch.setenv("TRACEPARENT", GIVEN.replace("b7", "b8"))
    cli("worker", "--until-idle", "--quiet")
    assert [row[0].strip() for row in query(engine, "SELECT result FROM tasks ORDER BY id")] == [f"<{GIVEN}>", "<>"]


def test_functions_know_their_context(database_url: str, engine: Engine) -> None:
    """In ``ctx.traceparent``, on the loop and in a child process."""

    @agent("here")
    async def here(ctx: Any) -> Any:
        return ctx.traceparent

    @agent("there")
    def there(ctx: Any) -> Any:
        return ctx.traceparent

    with orchestrator(database_url) as orc:
        orc.add("here", traceparent=GIVEN)
        orc.add("there", traceparent=GIVEN)
        work(orc, here, there)
    assert query(engine, "SELECT result FROM tasks") == [(GIVEN,), (GIVEN,)]


def test_it_costs_nothing_where_nobody_asks() -> None:
    """Without the setting nothing of OpenTelemetry is imported; ``off`` makes no spans."""
    assert tracing("off") is None
    code = (
        "import sys; from orchestrator import Orchestrator, Worker; Orchestrator('postgresql://nobody@127.0.0.1:1/x');"
        " print(sorted(name for name in sys.modules if name.startswith('opentelemetry')))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert said.stdout == "[]\n"


def test_what_is_not_installed_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra, or the exporters that there are; exit code 2 before anything is done."""
    cli.config('tracing = "otlpp"\n')
    assert "no exporter is called 'otlpp'" in cli("list", code=2).err
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setenv("ORCHESTRATOR_TRACING", "on")
    assert 'pip install "orchestrator[otel]"' in cli("list", code=2).err


def test_the_environment_can_ask_for_it() -> None:
    """ORCHESTRATOR_TRACING goes before the file, as the database's URL does."""
    assert Settings.load(env={"ORCHESTRATOR_TRACING": "console"}).tracing == "console"


def test_console_spans_leave_stdout_alone(cli: Cli) -> None:
    """Standard output is for answers: the console's spans go to standard error."""
    cli.config('tracing = "console"\n[agents.a]\ncommand = ["true"]\n')
    said = process("add", "a", "--json", url=cli.url, cwd=cli.folder)
    assert said.json["created"] is True
    assert "orchestrator.add" in said.err
