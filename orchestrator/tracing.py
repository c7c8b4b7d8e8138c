"""Spans of OpenTelemetry for a task's way: add, then claim, execute and record of each attempt, in one trace.

The context travels with the task, as a W3C traceparent in its row: whoever claims it, on whatever host, goes on with the
adder's trace. Nothing is imported and nothing is measured unless the setting ``tracing`` asks for it:

    on        spans go to the tracer provider that this process has set up
    NAME      an exporter of that name (otlp, console, ...), set up here; OTEL_* variables configure it
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.domain.given import NewTask
from orchestrator.domain.outcome import Claim, Outcome, traceparent
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput
from orchestrator.repositories.runs import Ended, Recorded
from orchestrator.settings import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

OFF = "off"
_WELL = frozenset({OutcomeClass.DONE, OutcomeClass.SUSPENDED, OutcomeClass.INTERRUPTED, OutcomeClass.CANCELLED})


def tracing(setting: str) -> Tracing | None:
    """Return what makes spans as *setting* says, None for ``off``. Raises InvalidInput for what is not installed."""
    if setting == OFF:
        return None
    try:
        from opentelemetry import trace
    except ImportError:
        raise InvalidInput(
            f"tracing is {setting!r}, and OpenTelemetry is not installed",
            hint='pip install "orchestrator[otel]", or leave tracing out of the settings',
        ) from None
    return Tracing(trace.get_tracer_provider() if setting == "on" else _provider(setting))


_PROVIDERS: dict[str, Any] = {}


def _provider(name: str) -> TracerProvider:
    """The provider that sends to the exporter called *name*; one for each in a process, ended with it."""
    if name in _PROVIDERS:
        made: TracerProvider = _PROVIDERS[name]
        return made
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    except ImportError:
        raise InvalidInput(
            f"tracing is {name!r}, and the SDK of OpenTelemetry is not installed",
            hint='pip install "orchestrator[otel]"',
        ) from None
    # Standard output is for answers.
    exporter = ConsoleSpanExporter(out=sys.stderr) if name == "console" else _exporter(name)
    provider = TracerProvider(resource=Resource.create({"service.version": __version__} | _service()))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _PROVIDERS[name] = provider
    return provider


def _service() -> dict[str, str]:
    import os

    return {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "orchestrator"}


def _exporter(name: str) -> Any:
    from importlib.metadata import entry_points

    group = entry_points(group="opentelemetry_traces_exporter")
    known = {each.name: each for each in group}
    found = known.get(name) or (known.get("otlp_proto_http") if name == "otlp" else None)
    if found is None:
        raise InvalidInput(
            f"tracing: no exporter is called {name!r}; there are on, off, {', '.join(sorted({*known, 'console'}))}",
            hint="pip install opentelemetry-exporter-otlp" if name.startswith("otlp") else None,
        )
    return found.load()()


class Tracing:
    """Makes spans with a tracer of *provider*. Safe from any thread."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._tracer = provider.get_tracer("orchestrator", __version__)
        self._words = TraceContextTextMapPropagator()

    @contextmanager
    def adding(self, tasks: Sequence[NewTask], what: str = "orchestrator.add") -> Iterator[list[NewTask]]:
        """A span around the adding of *tasks*, which are passed on with its context.

        Its parent is the traceparent that they bring along, if that is one, else the context of the caller.
        """
        given = {task.traceparent for task in tasks}
        if any(text is not None and traceparent(text) is None for text in given):
            yield list(tasks)  # it is refused by whoever adds them
            return
        (parent,) = given if len(given) == 1 else (None,)
        with self._tracer.start_as_current_span(
            what,
            None if parent is None else self._context(parent),
            self._trace.SpanKind.PRODUCER,
            attributes={"orchestrator.tasks": len(tasks), **_agent({task.agent for task in tasks})},
        ) as span:
            own = self._told(span)
            keep = len(given) > 1
            yield [task if keep and task.traceparent is not None else replace(task, traceparent=own) for task in tasks]

    def claimed(self, claims: Sequence[Claim], began: int) -> list[Claim]:
        """A span for the claim of each, from *began* (ns since 1970) until now; they are passed on with its context."""
        ended = time.time_ns()
        passed = []
        for claim in claims:
            span = self._start("orchestrator.claim", claim, began, self._trace.SpanKind.CONSUMER)
            span.end(ended)
            passed.append(replace(claim, traceparent=self._told(span) or claim.traceparent))
        return passed

    @contextmanager
    def executing(self, claim: Claim) -> Iterator[tuple[Claim, Callable[[Outcome], None]]]:
        """A span, current meanwhile, around the execution of *claim*; the agent gets the claim with its context.

        The second value is to be called with the outcome.
        """
        span = self._start("orchestrator.execute", claim, None, self._trace.SpanKind.INTERNAL)

        def ended(outcome: Outcome) -> None:
            span.set_attribute("orchestrator.outcome", outcome.status.value)
            if outcome.cause is not None:
                span.set_attribute("orchestrator.cause", outcome.cause)
            if outcome.usage is not None and outcome.usage.total_tokens is not None:
                span.set_attribute("orchestrator.tokens", outcome.usage.total_tokens)
            if outcome.usage is not None and outcome.usage.cost_usd is not None:
                span.set_attribute("orchestrator.cost_usd", outcome.usage.cost_usd)
            if outcome.status not in _WELL:
                # The class alone: a message is what an agent wrote.
                span.set_status(self._trace.StatusCode.ERROR, outcome.status.value)

        with self._trace.use_span(span, end_on_exit=True, record_exception=False):
            yield replace(claim, traceparent=self._told(span) or claim.traceparent), ended

    def recorded(self, batch: Sequence[Ended], done: Sequence[Recorded], began: int) -> None:
        """A span for the record of each, from *began* (ns since 1970) until now."""
        now = time.time_ns()
        for ended, recorded in zip(batch, done, strict=True):
            span = self._start("orchestrator.record", ended.claim, began, self._trace.SpanKind.INTERNAL)
            span.set_attribute("orchestrator.outcome", ended.outcome.status.value)
            span.set_attribute("orchestrator.late", recorded.late)
            if recorded.status is not None:
                span.set_attribute("orchestrator.status", recorded.status.value)
            span.end(now)

    def _start(self, name: str, claim: Claim, began: int | None, kind: Any) -> Span:
        attributes: dict[str, Any] = {
            "orchestrator.task": claim.task_id,
            "orchestrator.attempt": claim.attempt,
            "orchestrator.agent": claim.agent,
        }
        if claim.plan is not None:
            attributes["orchestrator.plan"] = claim.plan
        context = self._context(claim.traceparent)
        return self._tracer.start_span(name, context, kind, attributes=attributes, start_time=began)

    def _context(self, text: str | None) -> Context:
        from opentelemetry.context import Context

        return self._words.extract({} if text is None else {"traceparent": text}, Context())

    def _told(self, span: Span) -> str | None:
        carrier: dict[str, str] = {}
        self._words.inject(carrier, self._trace.set_span_in_context(span))
        return traceparent(carrier.get("traceparent"))


def _agent(names: set[str]) -> dict[str, str]:
    return {"orchestrator.agent": next(iter(names))} if len(names) == 1 else {}


__all__ = ["OFF", "Tracing", "tracing"]
