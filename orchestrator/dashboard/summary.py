"""The summary of ``run``: a table in plan order, and nearest to the prompt what is still to be done.

``render`` is pure. ``look.width = NO_LIMIT`` (a pipe) cuts nothing.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from orchestrator.dashboard import short
from orchestrator.dashboard.frame import NO_LIMIT, SYMBOLS, Column, Line, Look, Place, join, row, widest
from orchestrator.dashboard.plain import spent
from orchestrator.dashboard.run_view import (
    ORDER,
    ROWS_FOR_ALL,
    WORDS,
    answer_command,
    cost_unknown,
    counts_line,
    kind,
    totals,
)
from orchestrator.dashboard.text import cells
from orchestrator.domain.snapshot import PlanTask, RunView, Spend

_UNENDED = frozenset({"running", "retrying", "not_due", "held", "waiting", "ready", "blocked"})


def outcome(task: PlanTask, what: str) -> str:
    """Return what became of a task: ``done``, ``permanent: command_not_found``, ``not run: needs review (cancelled)``."""
    error = task.error
    if what == "failed" and error is not None:
        more = error.message if error.cause in (None, "", error.error_class) else error.cause
        return ": ".join(part for part in (error.error_class, more) if part)
    if what in ("cancelled", "not_run"):
        word = WORDS.get(what, what)
        return f"{word}: {error.message}" if error and error.message else word
    if what == "waiting":
        return f"waits: {task.question.text}" if task.question else "waits for a person"
    if what == "held":
        return f"held{' ' + task.note if task.note else ''}"
    return WORDS.get(what, what)


def counts_text(counts: Counter[str], separator: str) -> str:
    """Return ``17 done · 1 failed``."""
    return separator.join(f"{counts[what]:,} {WORDS.get(what, what)}" for what in ORDER if counts[what])


def end_text(view: RunView, now: datetime) -> str:
    """Return the one sentence that a run ends with: counts, time, tokens, cost."""
    counts = Counter(kind(task, now) for task in view.tasks)
    elapsed = short.age(short.since(view.started_at, view.ended_at or now) or 0)
    return "; ".join([counts_text(counts, ", ") or "nothing to do", elapsed, *reversed(spent(totals(view.tasks)))])


def render(view: RunView, now: datetime, look: Look, *, again: str | None = None) -> list[Line]:
    """Return the summary of a plan that is being left.

    *again* is the command that goes on with it (without ``--retry-failed``, which is added where it helps). Over
    ``ROWS_FOR_ALL`` tasks only those that are not done have a row.
    """
    kinds = {task.id: kind(task, now) for task in view.tasks}
    counts = Counter(kinds.values())
    rows = list(view.tasks)
    if len(rows) > ROWS_FOR_ALL:
        rows = [task for task in rows if kinds[task.id] != "done"]
    hidden = len(view.tasks) - len(rows)
    values = [_values(task, kinds[task.id], look) for task in rows]
    spent_all = totals(view.tasks)
    places = _places(values, spent_all, view, now, look)
    lines = []
    if rows and not look.tiny:
        lines.append(_captions(look, places))
    if hidden:
        lines.append(Line(look).symbol("done").add(f" {hidden:,} done"))
    lines += [row(look, places, each) for each in values]
    lines.append(_total(view, counts, now, look, places))
    lines += _what_is_left(view, kinds, look)
    if again:
        redo = any(what in ("failed", "cancelled", "not_run") for what in kinds.values())
        if redo or any(what in _UNENDED for what in kinds.values()):
            text = f"again: {again}{' --retry-failed' if redo else ''}"
            if cells(look.show(text)) <= look.width:
                lines.append(look.line(text))
    return [line.trimmed() for line in lines]


def _values(task: PlanTask, what: str, look: Look) -> dict[str, tuple[str, str]]:
    none = look.sign(short.NONE)
    spend, began = task.spend, task.attempt > 0
    if spend.usd is not None:
        cost = short.money(spend.usd, partial=spend.usd_partial)
    else:
        cost = short.UNKNOWN if cost_unknown(spend) else none
    tokens = none if spend.tokens is None else short.tokens(spend.tokens, partial=spend.tokens_partial)
    word = WORDS.get(what, what)
    style = "bold red" if what == "failed" else ""
    return {
        "symbol": (look.symbol(what), SYMBOLS[what][2]),
        "id": (str(task.id), ""),
        "task": (task.name, ""),
        "outcome": (word if look.tiny else outcome(task, what), style),
        "attempts": (str(task.attempt) if began else none, ""),
        "time": (none if task.elapsed is None else short.duration(task.elapsed), ""),
        "tokens": (tokens, ""),
        "cost": (cost, ""),
    }


def _places(
    values: list[dict[str, tuple[str, str]]], spend: Spend, view: RunView, now: datetime, look: Look
) -> dict[str, Place]:
    def natural(key: str, least: int, most: int = NO_LIMIT) -> int:
        return widest((each[key][0] for each in values), least, most)

    unlimited = look.width >= NO_LIMIT
    elapsed = short.age(short.since(view.started_at, view.ended_at or now) or 0)
    money = "" if spend.usd is None else short.money(spend.usd, partial=spend.usd_partial)
    ids = natural("id", 2)
    cost = natural("cost", max(4 if look.tiny else 6, cells(money)))
    time = natural("time", max(6, cells(elapsed)))
    task = natural("task", 4, NO_LIMIT if unlimited else 40 if look.width >= 120 else 24)
    if look.tiny:
        task = max(4, min(task, look.width - 2 - ids - 1 - 10 - time - 1 - cost - 1))
        columns = [
            Column("symbol", 1, 0),
            Column("id", ids, 1, right=True),
            Column("task", task, 2, rest=1, most=natural("task", 4)),
            Column("outcome", natural("outcome", 4, 9), 3),
            Column("time", time, 4, right=True),
            Column("cost", cost, 5, right=True),
        ]
        return join(columns, look.width)
    columns = [
        Column("symbol", 1, 0),
        Column("id", ids, 1, right=True),
        Column("task", task, 2, caption="task"),
        Column(
            "outcome",
            natural("outcome", 7) if unlimited else 12,
            3,
            gap=2,
            caption="outcome",
            rest=0 if unlimited else 1,
        ),
        Column("attempts", 8, 6, right=True, caption="attempts"),
        Column("time", time, 4, right=True, caption="time"),
        Column("tokens", natural("tokens", 6), 7, right=True, caption="tokens"),
        Column("cost", cost, 5, right=True, caption="cost"),
    ]
    return join(columns, look.width)


def _captions(look: Look, places: dict[str, Place]) -> Line:
    line = Line(look).to(places["id"].start).add("id", "dim")
    for place in places.values():
        caption = place.column.caption
        if caption:
            line.to(place.end - len(caption) if place.column.right else place.start).add(caption, "dim")
    return line


def _total(view: RunView, counts: Counter[str], now: datetime, look: Look, places: dict[str, Place]) -> Line:
    """Return the line of totals, its figures under their columns."""
    spend = totals(view.tasks)
    elapsed = short.age(short.since(view.started_at, view.ended_at or now) or 0)
    figures = {
        "time": elapsed,
        "tokens": "" if spend.tokens is None else short.tokens(spend.tokens, partial=spend.tokens_partial),
        "cost": "" if spend.usd is None else short.money(spend.usd, partial=spend.usd_partial),
    }
    shown = {key: text for key, text in figures.items() if text and key in places}
    if look.tiny:
        line = Line(look)
        counts_into = counts_line(counts, look)
        for text, style in counts_into.parts:
            line.add(text, style)
        for text in shown.values():
            if line.width + 2 + len(text) <= look.width:
                line.add(f"  {text}")
        return line
    room = min((places[key].end - cells(text) for key, text in shown.items()), default=look.width) - 1
    line = Line(look)
    words = f"  {counts_text(counts, look.separator) or 'nothing to do'}"
    if look.width >= NO_LIMIT and cells(view.plan) + cells(words) > room:  # in a pipe nothing is cut
        line.add(view.plan, "bold").add(words)
        for text in shown.values():
            line.add("  ").add(text)
        return line
    line.fill(view.plan, max(4, room - cells(words)), "bold").fill(words, room - line.width)
    for key, text in shown.items():
        line.right(text, end=places[key].end)
    return line


def _with_command(look: Look, line: Line, text: str, command: str) -> Line:
    """Return *line* with *text* and the command; where both do not fit the text is cut, or the command left out."""
    room = look.width - line.width - 4 - cells(look.show(command))
    if room >= min(16, cells(look.show(text))):
        return line.fill(text, room).add(f"    {command}")
    return line.fill(text, look.width - line.width)


def _what_is_left(view: RunView, kinds: dict[int, str], look: Look) -> list[Line]:
    """Return what a person has to do or to know: failures, questions, what is unknown."""
    lines = []
    for task in view.tasks:
        if kinds[task.id] != "failed":
            continue
        error = task.error
        why = (error.message or error.cause or error.error_class) if error else "failed"
        line = Line(look).symbol("failed").add(f" {task.id} ")
        lines.append(_with_command(look, line, f"{task.name}: {why}", f"orchestrator logs {task.id}"))
    for task in view.tasks:
        if kinds[task.id] == "waiting" and task.question is not None:
            line = Line(look).symbol("waiting").add(f" {task.id} ")
            lines.append(_with_command(look, line, f"{task.name}: {task.question.text}", answer_command(task.question)))
    unknown = [task.id for task in view.tasks if cost_unknown(task.spend) or task.spend.usd_partial]
    spend = totals(view.tasks)
    if unknown:
        ids = ", ".join(map(str, unknown[:8])) + (f" and {len(unknown) - 8:,} more" if len(unknown) > 8 else "")
        least = f": the total is at least {short.money(spend.usd)}" if spend.usd is not None else ""
        lines.append(Line(look).symbol("waiting", "").fill(f" cost of {ids} is unknown{least}", look.width - 1))
    return lines
