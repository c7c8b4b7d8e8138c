"""The plain form of ``run``: one line a change of state, for logs and CI.

Lines are never rewritten, wrapped or coloured: time, word, id, name, facts. Reading order: ``line`` (one event),
``PlainLines`` (what it leaves out of a large plan, and the sign of life after a minute of silence).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from orchestrator.dashboard import short
from orchestrator.dashboard.run_view import answer_command, cost_unknown, retry_text
from orchestrator.dashboard.text import ascii_only, clean
from orchestrator.domain.snapshot import PlanTask, RunEvent, RunView, Spend

SILENCE = timedelta(seconds=60)
"""After this long without a line one ``running`` line is due, so that no CI takes us for dead."""

MANY = 500
"""Plans larger than this count their starts and ends instead of telling each."""

COUNT_EVERY = timedelta(seconds=10)


def line(event: RunEvent, *, ascii: bool = False) -> str:  # noqa: A002 - the word of every screen
    """Return *event* as one line without a line end."""
    return _safe(f"{short.clock(event.at)} {_facts(event)}", ascii)


def running_line(tasks: Sequence[PlanTask], now: datetime, *, ascii: bool = False) -> str:  # noqa: A002
    """Return the sign of life: how many run, and the oldest ten of them."""
    tasks = sorted((task for task in tasks if task.status == "running"), key=lambda task: task.started_at or now)
    named = [f"{task.id} {task.name} {short.age(short.since(task.started_at, now) or 0)}" for task in tasks[:10]]
    if len(tasks) > 10:
        named.append(f"{len(tasks) - 10:,} more")
    text = f"{len(tasks):,}: {', '.join(named)}" if tasks else "none"
    return _safe(f"{short.clock(now)} running  {text}", ascii)


def _safe(text: str, ascii_mode: bool) -> str:
    text = clean(text)
    return ascii_only(text) if ascii_mode else text


def _facts(event: RunEvent) -> str:
    kind = event.kind
    if kind == "end":
        return f"end      {event.detail}"
    if kind == "plan":
        return f"plan {event.name}: {event.detail}"
    if event.task_id is None:
        return event.detail or kind
    who = f"{event.task_id} {event.name}"
    if kind == "start":
        return f"start    {who} {event.agent} attempt {event.attempt}"
    if kind == "done":
        return " ".join(["done    ", who, *_measured(event)])
    if kind == "retry":
        return f"retry    {who} {retry_text(event)}"
    if kind == "failed":
        why = short.detail(event.cause, event.detail, event.error_class)
        return " ".join(filter(None, ("failed  ", who, event.error_class, why)))
    if kind == "waiting" and event.question is not None:
        question = event.question
        choices = f" {'/'.join(question.choices)}" if question.choices else ""
        return f"waiting  {who} asks: {question.text}{choices}: {answer_command(question)}"
    word = "not run" if kind == "not_run" else kind
    return f"{word:<8} {who} {event.detail or ''}".rstrip()


def _measured(event: RunEvent) -> list[str]:
    facts = [] if event.elapsed is None else [short.duration(event.elapsed)]
    return facts + spent(event.spend)


def spent(spend: Spend) -> list[str]:
    """Return cost and tokens as words; nothing for what the agent does not count."""
    facts = []
    if spend.usd is not None:
        facts.append(short.money(spend.usd, partial=spend.usd_partial))
    elif cost_unknown(spend):
        facts.append("cost unknown")
    if spend.tokens is not None:
        facts.append(f"{short.tokens(spend.tokens, partial=spend.tokens_partial)} tokens")
    return facts


class PlainLines:
    """Which lines of a run are written: all of a small plan, of a large one only what matters, with counts between."""

    def __init__(self, *, ascii: bool = False) -> None:  # noqa: A002
        self._ascii = ascii
        self._last: datetime | None = None
        self._counted_at: datetime | None = None
        self._started = 0
        self._done = 0

    def event(self, event: RunEvent, view: RunView) -> list[str]:
        """Return the lines for *event*; over ``MANY`` tasks starts and ends are only counted."""
        if len(view.tasks) > MANY and event.kind in ("start", "done"):
            self._started += event.kind == "start"
            self._done += event.kind == "done"
            return self.tick(view, event.at)
        lines = self._count(view, event.at) if event.kind == "end" else []
        self._last = event.at
        return [*lines, line(event, ascii=self._ascii)]

    def tick(self, view: RunView, now: datetime) -> list[str]:
        """Return what is due without an event: the count of a large plan, the sign of life after silence."""
        if self._last is None:
            self._last = now
        if self._counted_at is None:
            self._counted_at = now
        if now - self._counted_at >= COUNT_EVERY:
            lines = self._count(view, now)
            if lines:
                return lines
        if now - self._last >= SILENCE:
            self._last = now
            return [running_line(view.tasks, now, ascii=self._ascii)]
        return []

    def _count(self, view: RunView, now: datetime) -> list[str]:
        if not (self._started or self._done):
            return []
        ended = sum(1 for task in view.tasks if task.status in ("done", "failed", "cancelled"))
        text = f"{self._started:,} started, {self._done:,} done; {ended:,} of {len(view.tasks):,} ended"
        self._started = self._done = 0
        self._counted_at = self._last = now
        return [_safe(f"{short.clock(now)} count    {text}", self._ascii)]
