"""The frame of ``dashboard``: the whole queue on one screen, what needs a person first.

Reading order: ``render`` (which panes get how many rows), ``pane_lines`` (one of them alone), then what needs a person
and what runs; the other panes are in ``panes``. Pure: a snapshot, ``now`` on the database's clock and a ``Look`` in,
lines out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from orchestrator.dashboard import panes, short
from orchestrator.dashboard.controls import Subject, Target, around
from orchestrator.dashboard.frame import Column, Line, Look, Place, bar, join, plural, row, rule, spark, widest
from orchestrator.dashboard.panes import task_name
from orchestrator.dashboard.run_view import answer_command, cost_unknown
from orchestrator.dashboard.text import cells
from orchestrator.domain.alerts import ORDER
from orchestrator.domain.snapshot import Alert, Count, Question, RunningTask, Snapshot, WorkerRow
from orchestrator.domain.values import value

QUIET = 60.0
"""Seconds without output after which a task counts as quiet."""

_HINTS = (
    ("select", "↑↓ select"),
    ("open", "⏎ open"),
    ("pane", "1-5 pane"),
    ("/", "/ filter"),
    ("a", "a answer"),
    ("x", "x cancel"),
    ("l", "l logs"),
    ("w", "w why"),
    ("r", "r retry"),
    ("p", "p freeze"),
)


@value
class Away:
    """Why there is no newer snapshot. ``slow``: reads time out; else the database cannot be reached."""

    since: datetime
    error: str
    next_try_at: datetime | None = None
    slow: bool = False


def away_line(away: Away, now: datetime, look: Look, taken_at: datetime | None) -> Line:
    """Return the bright line above a picture that has grown old. *now* and ``away`` are on the local clock."""
    word = "database slow" if away.slow else "database away"
    head = f"{word} {short.age(short.since(away.since, now) or 0)}: "
    tails = []
    if away.next_try_at is not None:
        tails.append(f"; next try in {short.age((away.next_try_at - now).total_seconds())}")
    if taken_at is not None:
        tails.append(f"; below is as of {short.clock(taken_at, now)}")
    # The reason gives way first: what is known and what comes next matter more than how a driver puts it.
    error = look.show(away.error)
    while tails and len(head) + min(18, cells(error)) + sum(map(len, tails)) > look.width:
        tails.pop()
    tail = "".join(tails)
    return Line(look).fill(head + look.cut(error, look.width - len(head) - len(tail)) + tail, look.width, "bold red")


def render_away(
    snapshot: Snapshot | None,
    away: Away,
    now: datetime,
    look: Look,
    *,
    refresh: float | None = None,
    order: Sequence[int] = (),
) -> list[Line]:
    """Return the last picture, dimmed and with its ages frozen, under one line that says why."""
    lines = [away_line(away, now, look, snapshot.taken_at if snapshot else None)]
    if snapshot is not None and look.height > 1:
        smaller = replace(look, height=look.height - 1)
        below = render(snapshot, snapshot.taken_at, smaller, refresh=refresh, order=order)
        for line in below:
            line.dimmed = True
        lines += below
    return lines


def render(
    snapshot: Snapshot,
    now: datetime,
    look: Look,
    *,
    refresh: float | None = None,
    selected: Target | None = None,
    order: Sequence[int] = (),
    pane: str | None = None,
) -> list[Line]:
    """Return the frame for *look*: at most its rows, no line wider than its columns.

    *refresh* is the time between two snapshots in seconds, None for a single picture. The lines about *selected* are
    marked. Running tasks whose ids are in *order* keep it: see ``ranked``. *pane* is the one that is shown alone.
    """
    snapshot = ranked(snapshot, now, order)
    if not snapshot.any_task:
        lines = _empty(snapshot, now, look, refresh)
    elif pane is not None:
        lines = _alone(snapshot, now, look, refresh, pane, selected)
    elif look.tiny or look.height < 15:
        lines = _small(snapshot, now, look)
    else:
        lines = _panes(snapshot, now, look, refresh)
    lines = [line.trimmed() for line in lines[: look.height]]
    for line in lines:
        line.marked = selected is not None and line.target == selected
    return lines


def pane_lines(snapshot: Snapshot, now: datetime, look: Look, pane: str) -> list[Line]:
    """Return all of one pane, its rule first: ``needs``, ``running``, ``agents``, ``workers`` or ``failures``."""
    if pane == "needs":
        rows = _needs(snapshot, now, look, len(snapshot.alerts) + len(snapshot.questions) + 1)
        return [_needs_rule(snapshot, look), *rows] if _needy(snapshot) else [_all_well(look)]
    if pane == "agents":
        return panes.agents_pane(snapshot, now, look, len(snapshot.agents))
    if pane == "workers":
        names = widest((worker.name for worker in snapshot.workers), 6, 40)
        return panes.workers_pane(snapshot, now, look, len(snapshot.workers), names)
    if pane == "failures":
        return panes.failures_pane(snapshot, now, look, len(snapshot.failures))
    places, rows = _running_rows(snapshot, now, look, len(snapshot.running))
    return [_running_rule(snapshot, look, places if rows else None), *rows]


def subject_of(snapshot: Snapshot, target: Target, now: datetime) -> Subject | None:
    """Return what a key would act on, None when nothing on any pane is about it."""
    if isinstance(target, str):
        return Subject(None, target)
    for task in snapshot.running:
        if task.id == target:
            age = short.age(short.since(task.started_at, now) or 0)
            on = f" on {task.worker}" if task.worker else ""
            kind = "stopping" if _stopping(task) else "running"
            return Subject(task.id, task.agent, task_name(task), kind, f"{task.agent}{on} for {age}")
    for question in snapshot.questions:
        if question.task_id == target:
            facts = f"{question.agent}, waiting"
            return Subject(target, question.agent, task_name(question), "waiting", facts, question=question)
    for failure in snapshot.failures:
        if failure.task_id == target:
            facts = f"{failure.agent}, failed {short.clock(failure.at, now)}"
            return Subject(target, failure.agent, task_name(failure), "failed", facts)
    for alert in snapshot.alerts:
        if alert.task_id == target:
            return Subject(target, "", alert.name)
    return None


def _alone(
    snapshot: Snapshot, now: datetime, look: Look, refresh: float | None, pane: str, selected: Target | None
) -> list[Line]:
    """Return the frame with one pane: as many rows as fit, the selected one among them."""
    small = look.tiny or look.height < 15
    header = [_tiny_header(snapshot, now, look)] if small else _headers(snapshot, now, look, refresh)
    hint = None if small else _hint(look)
    title, *rows = pane_lines(snapshot, now, look, pane)
    room = look.height - len(header) - 1 - (1 if hint else 0)
    lines = [*header, title, *around(rows, room, selected)]
    if hint:
        lines.append(hint)
    return lines


def _running_rule(snapshot: Snapshot, look: Look, places: dict[str, Place] | None) -> Line:
    return rule(look, f"running {short.counted(snapshot.running_count)}", places=places)


def _empty(snapshot: Snapshot, now: datetime, look: Look, refresh: float | None) -> list[Line]:
    lines = [_header(snapshot, now, look, None), look.line("no task yet; start with one of")]
    for command in ('orchestrator add coder --input "Fix the failing test"', "orchestrator run plan.yaml"):
        if len(command) + 2 <= look.width:
            lines.append(look.line(f"  {command}"))
    if snapshot.alerts or snapshot.questions:
        lines += _needs(snapshot, now, look, max(1, look.height - len(lines) - 1))
    return lines


def _small(snapshot: Snapshot, now: datetime, look: Look) -> list[Line]:
    """Return the frame of a small screen: one header line, what needs a person (at most half), what runs."""
    needs = _needs(snapshot, now, look, max(1, (look.height - 1) // 2)) if _needy(snapshot) else []
    lines = [_tiny_header(snapshot, now, look), *needs]
    return lines + _running_rows(snapshot, now, look, look.height - len(lines))[1]


def _panes(snapshot: Snapshot, now: datetime, look: Look, refresh: float | None) -> list[Line]:
    """Return the frame with all its panes; rows that a pane does not need go to the running tasks, theirs to the rest."""
    header = _headers(snapshot, now, look, refresh)
    hint = _hint(look)
    rest = look.height - len(header) - (1 if hint else 0)
    needs = _needs(snapshot, now, look, max(3, rest // 4)) if _needy(snapshot) else []
    agents_all = max(len(snapshot.agents), len(snapshot.workers) if look.wide else 0)
    agents_most = min(8 if look.wide else 4, agents_all)
    failures_most = min(5 if look.height >= 30 else 2, len(snapshot.failures))
    top = [_needs_rule(snapshot, look), *needs] if needs else [_all_well(look)]
    room = rest - len(top)

    def left() -> int:
        return room - (agents_most + 1 if agents_most else 0) - (failures_most + 1 if failures_most else 0)

    least = 1 + min(3, max(1, len(snapshot.running)))
    while left() < least and agents_most > 2:
        agents_most -= 1
    if left() < least:
        failures_most = 0
    if left() < least:
        agents_most = 0
    spare = left() - least if not snapshot.running else left() - 1 - len(snapshot.running)
    if spare > 0 and len(snapshot.running) >= snapshot.running_count.n:
        if needs:
            more = _needs(snapshot, now, look, max(3, rest // 4) + spare)
            spare, room = spare - (len(more) - len(needs)), room - (len(more) - len(needs))
            top = [top[0], *more]
        grown = min(spare, agents_all - agents_most)
        agents_most += grown
        failures_most += min(spare - grown, len(snapshot.failures) - failures_most) if failures_most else 0
    places, running = _running_rows(snapshot, now, look, left() - 1)
    lines = [*header, *top, _running_rule(snapshot, look, places if running else None), *running]
    if agents_most:
        lines += panes.agents_and_workers(snapshot, now, look, agents_most)
    if failures_most:
        lines += panes.failures_pane(snapshot, now, look, failures_most)
    if hint:
        lines.append(hint)
    return lines


def _hint(look: Look) -> Line | None:
    """Return the line of keys, dropped from its end where it is too long, never ``?`` and quit."""
    if not look.keys:
        return None
    always = "  ".join(text for key, text in (("?", "? keys"), ("q", "q quit")) if key in look.keys)
    names = [text for key, text in _HINTS if key in look.keys]
    if look.ascii:
        names = [text.replace("↑↓", "up/down").replace("⏎", "Enter") for text in names]
    while names and 1 + sum(len(name) + 2 for name in names) + len(always) > look.width:
        names.pop()
    return look.line((" " + "  ".join([*names, always]), "dim"))


# The header


def _where(snapshot: Snapshot, *, port: bool) -> str:
    server = snapshot.server
    host = "local" if server.host.startswith("/") else server.host
    host = f"{host}:{server.port}" if port and server.port else host
    return f"{host}/{server.database}"


def _workers_text(workers: Sequence[WorkerRow]) -> str:
    live = sum(1 for worker in workers if worker.state != "dead")
    if not live:
        return "no live worker"
    for state in ("dead", "silent", "draining"):
        n = sum(1 for worker in workers if worker.state == state)
        if n:
            return f"{plural(live, 'worker')}, {n} {state}"
    return plural(live, "worker")


def _header(snapshot: Snapshot, now: datetime, look: Look, refresh: float | None) -> Line:
    server = snapshot.server
    line = Line(look).add(_where(snapshot, port=look.wide), "bold")
    if look.wide:
        versions = [f"PostgreSQL {server.version}" if server.version else "", f"orchestrator {server.orchestrator}"]
        known = ", ".join(versions if server.orchestrator else versions[:1])
        if known:
            line.add(f"  {known}")
    style = "" if any(worker.state != "dead" for worker in snapshot.workers) else "red"
    line.add("   ").add(_workers_text(snapshot.workers), style)
    if not snapshot.any_task:
        return line
    clock = short.clock(now)
    paces = [clock]
    if refresh is not None:
        pace = f"refresh {refresh:.3g}s"
        read = snapshot.read_seconds
        if read is not None and (look.wide or read > 0.1):
            paces.insert(0, f"{pace}, {read * 1000:.0f} ms  {clock}")
        paces.insert(0 if len(paces) == 1 else 1, f"{pace}  {clock}")
    for right in paces:
        if line.width + 2 + len(right) <= look.width:
            return line.right(right)
    return line


def _headers(snapshot: Snapshot, now: datetime, look: Look, refresh: float | None) -> list[Line]:
    lines = [_header(snapshot, now, look, refresh)]
    hour = snapshot.minutes[-60:]
    done, failed = sum(minute.done for minute in hour), sum(minute.failed for minute in hour)
    spent, partial = sum(minute.usd for minute in hour), any(minute.unknown_cost for minute in hour)
    usd = f"{short.money(spent, partial=partial)}/h" if spent or partial else ""
    rate = per_minute(snapshot)
    if not look.wide:
        right = [f"{rate:.0f}/min", *([usd] if usd else [])] if hour else []
        lines.append(_counts(snapshot, look, ["  ".join(right), right[0] if right else ""]))
        return lines
    oldest = min((agent.oldest_ready_at for agent in snapshot.agents if agent.oldest_ready_at), default=None)
    waits = f"oldest ready {short.age(short.since(oldest, now) or 0)}" if oldest else ""
    lines.append(_counts(snapshot, look, [waits]))
    line = Line(look)
    if hour:
        line.add(spark(look, [minute.done + minute.failed for minute in hour[-20:]]), "dim").add(f" {rate:.1f}/min")
        line.add(f"{look.separator}1h: {done:,} done, {failed:,} failed{look.separator if usd else ''}{usd}")
    hold = hold_text(snapshot)
    if hold and line.width + len(hold) + 2 <= look.width:
        line.right(hold)
    lines.append(line)
    return lines


def per_minute(snapshot: Snapshot) -> float:
    """Return how many attempts ended a minute, over the last five whole minutes and the one that goes on."""
    last = snapshot.minutes[-6:]
    if not last:
        return 0.0
    span = (snapshot.taken_at - last[0].at).total_seconds() / 60
    return sum(minute.done + minute.failed for minute in last) / max(1.0, span)


def hold_text(snapshot: Snapshot) -> str:
    """Return how long claims held their locks, empty when nobody claimed."""
    hold = snapshot.lock_hold
    if hold.mean is None:
        return ""
    parts = [f"{hold.mean:.1f} ms mean"]
    parts += [f"{value:.1f} {name}" for value, name in ((hold.p50, "p50"), (hold.p99, "p99")) if value is not None]
    return f"lock hold {', '.join(parts)}"


def _counts(snapshot: Snapshot, look: Look, rights: Sequence[str]) -> Line:
    """Return the counts by kind, and at the end the first of *rights* that fits beside the four main ones."""
    slots = sum(worker.slots for worker in snapshot.workers if worker.state != "dead")
    running = short.counted(snapshot.running_count) + (f"/{slots:,}" if slots else "")
    main: list[tuple[str, str, Count]] = [
        ("ready", "ready", snapshot.ready),
        ("retrying", "retrying", snapshot.retrying),
        ("blocked", "blocked", snapshot.blocked),
    ]
    more = [("not_due", "not due", snapshot.not_due), ("held", "held", snapshot.held)]
    if look.width < 80:
        line = Line(look).symbol("running").add(running)
        for symbol, _, count in main + more:
            text = f" {look.symbol(symbol)}{short.counted(count)}"
            if count.n and line.width + cells(text) <= look.width:
                line.add(" ").symbol(symbol).add(short.counted(count))
    else:
        line = Line(look).add(f"{running} running")
        for _, word, count in main:
            if count.n or word == "ready":
                line.add(f"{look.separator}{short.counted(count)} {word}")
        reserve = len(rights[0]) + 2 if rights and rights[0] else 0
        for _, word, count in more:
            text = f"{look.separator}{short.counted(count)} {word}"
            if count.n and line.width + cells(text) + reserve <= look.width:
                line.add(text)
    for right in rights:
        if right and line.width + 2 + cells(right) <= look.width:
            return line.right(right)
    return line


def _tiny_header(snapshot: Snapshot, now: datetime, look: Look) -> Line:
    clock = short.clock(now)
    figures: list[tuple[str, str]] = [("running", short.counted(snapshot.running_count))]
    if snapshot.ready.n:
        figures.append(("ready", short.counted(snapshot.ready)))
    alerts, questions = _totals(snapshot)
    if alerts:
        figures.append(("alert", f"{alerts:,}"))
    if questions:
        figures.append(("waiting", f"{questions:,}"))

    def width(items: list[tuple[str, str]]) -> int:
        return sum(2 + len(text) for _, text in items)

    dropped = ["ready", "running"]
    while dropped and width(figures) + 6 > look.width:
        drop = dropped.pop(0)
        figures = [figure for figure in figures if figure[0] != drop]
    line = Line(look).fill(snapshot.server.database, max(4, look.width - width(figures)), "bold")
    for what, text in figures:
        line.add(" ").symbol(what).add(text)
    if line.width + 2 + len(clock) <= look.width:
        line.right(clock)
    return line


# What needs a person


def _needy(snapshot: Snapshot) -> bool:
    return bool(snapshot.alerts or snapshot.questions)


def _totals(snapshot: Snapshot) -> tuple[int, int]:
    alerts = snapshot.alert_count if snapshot.alert_count is not None else len(snapshot.alerts)
    questions = snapshot.question_count if snapshot.question_count is not None else len(snapshot.questions)
    return max(alerts, len(snapshot.alerts)), max(questions, len(snapshot.questions))


def _all_well(look: Look) -> Line:
    return Line(look).symbol("done").add(" nothing needs you")


def _needs_rule(snapshot: Snapshot, look: Look) -> Line:
    alerts, questions = _totals(snapshot)
    parts = [plural(n, word) for n, word in ((alerts, "alert"), (questions, "question")) if n]
    return rule(look, "needs you", look.separator.join(parts))


def alert_rank(alert: Alert) -> tuple[int, float]:
    """Return the place of an alert: by what kind it is, then the older first."""
    place = ORDER.index(alert.kind) if alert.kind in ORDER else len(ORDER)
    return place, alert.since.timestamp() if alert.since else float("inf")


def _question_rank(question: Question) -> tuple[float, float]:
    far = float("inf")
    return (
        question.deadline.timestamp() if question.deadline else far,
        question.asked_at.timestamp() if question.asked_at else far,
    )


def _needs(snapshot: Snapshot, now: datetime, look: Look, most: int) -> list[Line]:
    """Return the alerts, then the questions; what does not fit is counted, and one of three rows is a question."""
    alerts = sorted(snapshot.alerts, key=alert_rank)
    questions = sorted(snapshot.questions, key=_question_rank)
    alert_total, question_total = _totals(snapshot)
    total = alert_total + question_total
    rows = most if total <= most else max(0, most - 1)
    shown_questions = min(len(questions), max(0, rows - len(alerts)))
    if questions and not shown_questions and most >= 3:
        shown_questions = 1
    shown_alerts = min(len(alerts), rows - shown_questions)
    items: list[Alert | Question] = [*alerts[:shown_alerts], *questions[:shown_questions]]
    lines = _need_rows(items, now, look)
    left_alerts, left_questions = alert_total - shown_alerts, question_total - shown_questions
    if left_alerts or left_questions:
        parts = [plural(n, word) for n, word in ((left_alerts, "alert"), (left_questions, "question")) if n]
        line = look.line(f"{look.ellipsis} {left_alerts + left_questions:,} more: {', '.join(parts)}")
        if "pane" in look.keys and not look.tiny:
            line.right("1 all", "dim")
        lines.append(line)
    return lines


def _need_rows(items: Sequence[Alert | Question], now: datetime, look: Look) -> list[Line]:
    subjects = [_subject(item, look) for item in items]
    width = 0 if look.tiny else widest(subjects, 8, 36 if look.wide else 24)
    commands = [_command(item) for item in items] if look.wide else []
    column = widest((command for command in commands if len(command) <= look.width // 3), 0)
    lines = []
    for at, item in enumerate(items):
        asks = isinstance(item, Question)
        style = "yellow" if isinstance(item, Alert) and item.heals else None
        line = Line(look).symbol("waiting" if asks else "alert", style).add(" ")
        text = _question_text(item, now) if isinstance(item, Question) else item.what
        line.about(_target(item))
        if look.tiny:
            line.fill(subjects[at], max(4, look.width // 2)).add(" ")
            lines.append(line.fill(text, look.width - line.width))
            continue
        line.fill(subjects[at], width).to(2 + width + 2)
        begun = item.asked_at if isinstance(item, Question) else item.since
        age = short.coarse(short.since(begun, now) or 0) if begun else ""
        end = look.width - (column + 3 if column else 0)
        line.fill(text, end - line.width - 7).right(age, end=end)
        if column and len(commands[at]) <= column:
            line.right(commands[at])
        lines.append(line)
    return lines


def _target(item: Alert | Question) -> Target | None:
    if item.task_id is None and isinstance(item, Alert) and item.subject == "agent":
        return item.name
    return item.task_id


def _subject(item: Alert | Question, look: Look) -> str:
    if isinstance(item, Question):
        return str(item.task_id) if look.tiny else f"{item.task_id} {task_name(item)}"
    if item.task_id is not None:
        return str(item.task_id) if look.tiny else f"{item.task_id} {item.name}"
    return item.name if look.tiny else f"{item.subject} {item.name}"


def _question_text(question: Question, now: datetime) -> str:
    text = question.text
    choices = question.choices or (("approve", "deny") if question.kind == "approval" else ())
    if choices:
        text += f"  {' / '.join(choices)}"
    if question.deadline is not None:
        text += f"  by {short.until(question.deadline, now)}"
    return text


def _command(item: Alert | Question) -> str:
    return answer_command(item) if isinstance(item, Question) else (item.command or "")


# What runs


def running_rank(task: RunningTask, now: datetime) -> tuple[int, float, int]:
    """Return the place of a running task: what needs a person first, then the oldest."""
    started = task.started_at.timestamp()
    used = _share(task, now)
    if task.will_not_stop:
        return 0, started, task.id
    if used and used[0] >= 1:
        return 1, started, task.id
    if used and used[0] >= 0.8:
        return 2, -used[0], task.id
    if _stopping(task):
        return 4, started, task.id
    quiet = _quiet(task, now)
    if quiet >= QUIET:
        return 3, -quiet, task.id
    return 5, started, task.id


def ranked(snapshot: Snapshot, now: datetime, order: Sequence[int] = ()) -> Snapshot:
    """Return *snapshot* with its running tasks by rank; ids in *order* keep that order, others come behind them."""
    place = {task_id: at for at, task_id in enumerate(order)}
    tasks = sorted(snapshot.running, key=lambda task: (place.get(task.id, len(place)), running_rank(task, now)))
    return replace(snapshot, running=tuple(tasks))


def _share(task: RunningTask, now: datetime) -> tuple[float, str] | None:
    return short.nearest(task.budget, short.since(task.started_at, now), task.spend)


def _stopping(task: RunningTask) -> bool:
    return task.cancel_requested_at is not None or task.stopping is not None


def _quiet(task: RunningTask, now: datetime) -> float:
    return (now - (task.last_output_at or task.started_at)).total_seconds()


def _running_rows(snapshot: Snapshot, now: datetime, look: Look, room: int) -> tuple[dict[str, Place], list[Line]]:
    """Return the columns and at most *room* rows of running tasks."""
    tasks = snapshot.running[: max(0, room)]
    names = widest((task_name(task) for task in tasks), 4)
    ids = widest((str(task.id) for task in tasks), 1 if look.tiny else 6)
    if look.tiny:
        columns = [
            Column("symbol", 1, 0),
            Column("id", ids, 1),
            Column("task", 4, 2, rest=1, most=names),
            Column("age", 6, 3, right=True),
            Column("share", 5, 4),
        ]
    else:
        wide = look.wide
        columns = [
            Column("symbol", 1, 0),
            Column("id", ids, 1),
            Column("task", 18 if wide else 16, 2, rest=1, most=max(16, names)),
            Column("agent", widest((task.agent for task in tasks), 7, 14), 5, caption="agent"),
            Column("worker", widest((task.worker for task in tasks), 7, 16), 9, caption="worker"),
            Column("age", 6, 3, right=True, caption="age"),
            Column("bar", 8 if wide else 5, 6, caption="budget" if wide else ""),
            Column("share", 5, 4, caption="" if wide else "bdgt"),
            Column("cost", 7, 7, right=True, caption="cost"),
            Column("quiet", 6, 10, right=True, caption="quiet"),
            Column("output", 16, 8, rest=2, caption="last output"),
        ]
    places = join(columns, look.width)
    return places, [row(look, places, _running_values(task, now, look, places)).about(task.id) for task in tasks]


def _running_values(
    task: RunningTask, now: datetime, look: Look, places: dict[str, Place]
) -> dict[str, tuple[str, str]]:
    used = _share(task, now)
    symbol, colour = "running", "yellow" if used and used[0] >= 0.8 else "cyan"
    output, style = task.last_output or "", ""
    if _stopping(task):
        symbol, colour = "stopping", "yellow"
        output = task.stopping or "being stopped"
    if used and used[0] >= 1:
        symbol, colour = "alert", "red"
    if task.will_not_stop:
        symbol, colour, style = "alert", "red", "red"
        output = f"will not stop: {task.will_not_stop}"
    spend = task.spend
    cost = short.money(spend.usd, partial=spend.usd_partial) if spend.usd is not None else ""
    if not cost and cost_unknown(spend):
        cost = short.UNKNOWN
    quiet = _quiet(task, now)
    if task.activity is not None and quiet >= QUIET and not style and not _stopping(task):
        # What it said a minute ago explains less than what it waits for.
        output = f"{task.activity} {short.age(short.since(task.activity_since, now) or 0)}: {output}"
    values = {
        "symbol": (look.symbol(symbol), colour),
        "id": (str(task.id), ""),
        "task": (task_name(task), ""),
        "agent": (task.agent, ""),
        "worker": (task.worker, ""),
        "age": (short.age(short.since(task.started_at, now) or 0), ""),
        "cost": (cost, ""),
        "quiet": (short.age(quiet) if quiet >= QUIET and not task.will_not_stop else "", "yellow"),
        "output": (output, style),
    }
    if used:
        if "bar" in places:
            values["bar"] = (bar(look, used[0], places["bar"].width), colour)
        values["share"] = (f"{short.percent(*used):>4}", colour if used[0] >= 0.8 else "")
    return values
