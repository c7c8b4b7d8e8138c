"""The screens of the short commands: tasks in the shape of ``list`` and ``show``, runs, status, and frames of logs.

Everything takes the JSON objects of the contract (times as ISO 8601 text) and a ``Look``; a width of ``NO_LIMIT`` (a
pipe) shows all columns and cuts nothing. Keys beside the contract's are shown where they are there: ``note``,
``question`` and ``questions`` of a task, ``created_by``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from orchestrator.dashboard import short
from orchestrator.dashboard.frame import NO_LIMIT, SYMBOLS, Column, Line, Look, Place, join, plural, row, rule, widest
from orchestrator.dashboard.text import cells
from orchestrator.domain.outcome import Budget
from orchestrator.domain.snapshot import ServerInfo, Spend

Json = Mapping[str, Any]

_STREAMS = frozenset({"stdout", "stderr"})
_LOG_STYLES = {"stderr": "yellow", "error": "red", "note": "dim", "answer": "bold magenta"}

LINES_OF_DATA = 20
"""Lines of an input or result that ``show`` prints."""

_SYMBOL_OF_RUN = {"done": "done", "cancelled": "cancelled", "suspended": "waiting"}


def moment(value: Any) -> datetime | None:
    """Return the instant that an ISO 8601 text of the contract means."""
    return None if value is None else datetime.fromisoformat(str(value))


def called(task: Json) -> str:
    """Return what a task is called: its name, else its title, else its agent."""
    return str(task.get("name") or task.get("title") or task.get("agent") or "")


def kind_of(task: Json, now: datetime) -> str:
    """Return what a task is on a screen: its status, with *pending* and *cancelled* told apart further."""
    status = str(task["status"])
    if status == "running":
        return "stopping" if task.get("cancel_requested_at") else "running"
    if status == "cancelled":
        error = task.get("error") or {}
        return "not_run" if error.get("cause") in ("parent_failed", "parent_cancelled") else "cancelled"
    if status != "pending":
        return status
    if task.get("held_at"):
        return "held"
    due = moment(task.get("next_attempt_at")) or moment(task.get("available_at"))
    if due is not None and due > now:
        return "retrying" if task.get("attempt") else "not_due"
    return "ready"


def cost_of(usage: Json | None, none: str, *, began: bool = True) -> str:
    """Return the cost of *usage*: ``$0.41``, ``?`` for what nobody knows, *none* where nothing was counted."""
    usage = usage or {}
    usd = usage.get("cost_usd")
    if usd is not None:
        return short.money(float(usd), partial=usage.get("complete") is False)
    counted = usage.get("total_tokens") or usage.get("input_tokens") or usage.get("output_tokens")
    return short.UNKNOWN if began and counted else none


def _age(task: Json, now: datetime) -> float | None:
    for key in ("finished_at", "started_at", "created_at"):
        if key == "started_at" and task["status"] != "running":
            continue
        at = moment(task.get(key))
        if at is not None:
            return (now - at).total_seconds()
    return None


def _share(task: Json, now: datetime) -> tuple[float, str, str] | None:
    """Return how much of the nearest limit a running task has used, its letter, and the limit."""
    given = task.get("budget") or {}
    budget = Budget(given.get("seconds"), given.get("tokens"), given.get("usd"), given.get("turns"))
    usage = task.get("usage") or {}
    usd = usage.get("cost_usd")
    spend = Spend(usage.get("total_tokens"), None if usd is None else float(usd))
    used = short.nearest(budget, short.since(moment(task.get("started_at")), now), spend)
    return None if used is None else (*used, short.limit(budget, used[1]))


def note_of(task: Json, now: datetime) -> str:
    """Return the one thing to know about a task beyond its status."""
    what = kind_of(task, now)
    error = task.get("error") or {}
    note = str(task.get("note") or "")
    attempt, retries = int(task.get("attempt") or 0), task.get("max_retries")
    if what == "retrying":
        at = moment(task.get("next_attempt_at")) or moment(task.get("available_at")) or now
        most = short.of(attempt + 1, retries, int(task.get("retry_count") or 0))
        of = f"{attempt + 1} of {most}" if most else f"attempt {attempt + 1}"
        why = short.detail(error.get("cause"), error.get("message"), error.get("class")) or error.get("class") or note
        return f"{of} in {short.age((at - now).total_seconds())}{': ' + why if why else ''}"
    if what == "not_due":
        at = moment(task.get("available_at")) or now
        return f"not before {short.clock(at, now)} (in {short.coarse((at - now).total_seconds())})"
    if what == "held":
        since = moment(task["held_at"])
        return note or f"held since {short.clock(since, now) if since else '?'}"
    if what == "running":
        used = _share(task, now)
        return note or (f"{short.percent(used[0], used[1])} of {used[2]}" if used else "")
    if what == "stopping":
        return note or "being stopped"
    if what == "waiting":
        asks = [each["question"] for each in task.get("questions") or () if each["verdict"] is None]
        question = (task.get("question") or {}).get("text") or (asks[0] if asks else None)
        return f"asks: {question}" if question else note or "waits for a person"
    if what == "blocked":
        needs = task.get("depends_on") or []
        return note or (f"needs {needs[0]}" if len(needs) == 1 else f"needs {len(needs):,} tasks")
    if what in ("cancelled", "not_run"):
        return str(error.get("message") or note)
    if what == "failed":
        return short.reason(error.get("class"), error.get("cause"), error.get("message"))
    return note


# list


def render_list(tasks: Sequence[Json], now: datetime, look: Look) -> list[Line]:
    """Return the table of ``list``, with its captions; empty for no task."""
    if not tasks:
        return []
    unlimited = look.width >= NO_LIMIT
    none = look.sign(short.NONE)
    values: list[dict[str, tuple[str, str]]] = []
    for task in tasks:
        what = kind_of(task, now)
        age = _age(task, now)
        values.append(
            {
                "symbol": (look.symbol(what), SYMBOLS[what][2]),
                "id": (str(task["id"]), ""),
                "status": (str(task["status"]), ""),
                "task": (called(task), ""),
                "agent": (str(task["agent"]), ""),
                "age": (short.UNKNOWN if age is None else short.age(age), ""),
                "cost": (cost_of(task.get("usage"), none, began=bool(task.get("attempt"))), ""),
                "note": (note_of(task, now), ""),
            }
        )

    def natural(key: str, least: int, most: int = NO_LIMIT) -> int:
        return widest((each[key][0] for each in values), least, most)

    name = natural("task", 4) if unlimited else 18 if look.width < 120 else natural("task", 18, 40)
    columns = [
        Column("symbol", 1, 0),
        Column("id", natural("id", 6 if not look.tiny else 2), 1, caption="id"),
        Column("status", natural("status", 9), 4, caption="status"),
        Column("task", name if not look.tiny else 8, 2, caption="task", rest=1, most=natural("task", 4)),
        Column("agent", natural("agent", 7, NO_LIMIT if unlimited else 14), 6, caption="agent"),
        Column("age", 6, 3, right=True, caption="age"),
        Column("cost", natural("cost", 6), 7, right=True, caption="cost"),
        Column("note", natural("note", 4) if unlimited else 12, 5, caption="note", rest=2),
    ]
    places = join(columns, look.width)
    lines = [] if look.tiny else [_captions(look, places)]
    return lines + [row(look, places, each).about(int(task["id"])) for each, task in zip(values, tasks, strict=True)]


def _captions(look: Look, places: Mapping[str, Place]) -> Line:
    line = Line(look)
    for place in places.values():
        caption = place.column.caption
        if caption:
            line.to(place.end - len(caption) if place.column.right else place.start).add(caption, "dim")
    return line


def list_end(shown: int, next_after_id: int | None) -> str:
    """Return the last line of ``list``, for stderr."""
    if not shown and next_after_id is None:
        return "no task matches"
    more = f"; more: --after-id {next_after_id}" if next_after_id is not None else ""
    return f"{shown:,} shown{more}"


# show


def render_show(
    task: Json,
    now: datetime,
    look: Look,
    *,
    runs: Sequence[Json] | None = None,
    needed_by: Sequence[Json] = (),
    output: Sequence[str] = (),
    output_bytes: int | None = None,
    agent_kind: str | None = None,
    variables: bool = False,
) -> list[Line]:
    """Return the screen of ``show``: who, when and why; the attempts; the last output; the next command.

    *runs* is by default the task's own key of that name. *needed_by* are tasks (id, name, status) that need this one,
    *output* the last lines of the newest attempt's output, *output_bytes* the size of all of it. With *variables* the names
    of those that the newest attempt's agent was given stand there as well.
    """
    runs = list(task.get("runs") or ()) if runs is None else list(runs)
    what = kind_of(task, now)
    lines = [_show_head(task, now, look, what)]
    for name, text in _facts(task, now, look, what, needed_by, agent_kind):
        line = Line(look).add(f"  {name:<10} ", "dim")
        lines.append(line.fill(text, look.width - line.width))
    lines += _data(task, look)
    if task.get("questions"):
        from orchestrator.dashboard.questions import of_task

        lines.append(rule(_ruled(look), "questions"))
        lines += of_task(task["questions"], now, look)
    if task.get("checkpoints"):
        lines.append(rule(_ruled(look), "checkpoints"))
        for each in task["checkpoints"][:LINES_OF_DATA]:
            line = (
                Line(look).add("  ").add(look.cut(str(each["name"]), 30), "bold").add(f"  attempt {each['attempt']}  ")
            )
            text = json.dumps(each["value"], ensure_ascii=False) if each["bytes"] <= 200 else short.size(each["bytes"])
            lines.append(line.fill(text, look.width - line.width, "dim"))
        more = len(task["checkpoints"]) - LINES_OF_DATA
        if more > 0:
            lines.append(Line(look).add(f"  {look.ellipsis} {more:,} more: --json", "dim"))
    if runs:
        lines.append(rule(_ruled(look), "attempts"))
        lines += render_runs(runs, now, look)
        if variables:
            lines += _variables(runs[-1], look)
    if output:
        attempt = task.get("attempt") or 1
        size = "" if output_bytes is None else short.size(output_bytes)
        lines.append(rule(_ruled(look), f"last output of attempt {attempt}", size))
        lines += [Line(look).add("  ").fill(text, look.width - 2) for text in output]
    following = _next(task, what, bool(runs or output))
    line = Line(look)
    for label, command in following:
        piece = f"{label}  {command}" if not line.width else f"   {label}: {command}"
        if line.width + cells(piece) <= look.width:
            line.add(piece)
    if line.width:
        lines.append(line)
    return [each.trimmed() for each in lines]


def _variables(run: Json, look: Look) -> list[Line]:
    """Return the names of the variables that an attempt's agent was given, on as many lines as they take."""
    names = run.get("variables") or ()
    if not names:
        return []
    lines = [rule(_ruled(look), f"variables of attempt {run['attempt']}", f"{len(names)} names, no values")]
    line = Line(look)
    for name in names:
        if line.width and line.width + 2 + cells(look.show(str(name))) > min(look.width, 120):
            lines.append(line)
            line = Line(look)
        line.add("  ").fill(str(name), look.width - 2, "dim")
    return [*lines, line]


def _ruled(look: Look) -> Look:
    """Return *look* with an edge: a rule into a pipe is as long as on an ordinary screen."""
    return look if look.width < NO_LIMIT else Look(80, look.height, look.ascii)


def _show_head(task: Json, now: datetime, look: Look, what: str) -> Line:
    words = {"not_run": "not run", "not_due": "not due", "ready": "pending", "stopping": "being stopped"}
    line = Line(look).symbol(what).add(f" {task['id']} ")
    state = words.get(what, what)
    age = _age(task, now)
    attempt = int(task.get("attempt") or 0)
    if age is not None:
        state += f" {short.age(age)} ago" if task.get("finished_at") else f" for {short.age(age)}"
    if task.get("finished_at") and attempt:
        state += f", after {plural(attempt, 'attempt')}"
    elif what in ("running", "stopping"):
        most = short.of(attempt, task.get("max_retries"), int(task.get("retry_count") or 0))
        state += f", {short.attempt(attempt, most)}"
    plan = f"plan {task['plan']}" if task.get("plan") else ""
    room = look.width - line.width - cells(state) - 2 if look.width < NO_LIMIT else NO_LIMIT
    line.fill(called(task), max(8, room), "bold").add("  ").fill(state, look.width - line.width)
    if plan and line.width + 2 + cells(look.show(plan)) <= look.width:
        line.right(plan)
    return line


def _facts(
    task: Json, now: datetime, look: Look, what: str, needed_by: Sequence[Json], agent_kind: str | None
) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    kind = f" ({agent_kind})" if agent_kind else ""
    facts.append(("agent", f"{task['agent']}{kind}, priority {task.get('priority', 0)}"))
    if task.get("title") and task.get("name"):
        facts.append(("title", str(task["title"])))
    facts.append(("created", _times(task, now)))
    error = task.get("error")
    if error:
        cause = f" {error['cause']}" if error.get("cause") not in (None, "", error.get("class")) else ""
        message = f": {error['message']}" if error.get("message") else ""
        facts.append(("error", f"{error.get('class', '')}{cause}{message}"))
    note = note_of(task, now)
    if note and what not in ("failed", "cancelled", "not_run", "done", "running", "blocked"):
        facts.append(("state", note))
    budget = _budget_text(task, now)
    if budget:
        facts.append(("budget", budget))
    doing = task.get("activity")
    if doing:
        since = moment(doing["since"])
        facts.append(
            ("doing", str(doing["what"]) + (f" for {short.age(short.since(since, now) or 0)}" if since else ""))
        )
    spent = _spent_text(task.get("usage"))
    if spent:
        facts.append(("spent", spent))
    if task.get("depends_on"):
        facts.append(("needs", ", ".join(map(str, task["depends_on"]))))
    if needed_by:
        shown = ", ".join(f"{each['id']} {called(each)} ({each['status']})" for each in needed_by[:5])
        facts.append(("needed by", shown + (f" and {len(needed_by) - 5:,} more" if len(needed_by) > 5 else "")))
    for key, name in (("unique_key", "key"), ("concurrency_key", "one by one"), ("session", "session")):
        if task.get(key):
            facts.append((name, str(task[key])))
    space = task.get("workspace")
    if space:
        kept = "" if space.get("kept", True) else " (removed)"
        on = f", branch {space['branch']}" if space.get("branch") else ""
        facts.append(("workspace", f"{space.get('path')}{kept}{on}"))
    if task.get("tags"):
        facts.append(("tags", ", ".join(f"{key}={value}" for key, value in task["tags"].items())))
    return facts


def _times(task: Json, now: datetime) -> str:
    created, started, ended = (moment(task.get(key)) for key in ("created_at", "started_at", "finished_at"))
    text = short.clock(created, now) if created else short.UNKNOWN
    if task.get("created_by"):
        text += f" by {task['created_by']}"
    if started and (ended or task["status"] == "running"):
        text += f"; started {short.clock(started, now)}"
    if ended:
        text += f", ended {short.clock(ended, now)}" if started else f"; ended {short.clock(ended, now)}"
        begun = started or created
        if begun:
            text += f" ({short.age((ended - begun).total_seconds())})"
    return text


def _budget_text(task: Json, now: datetime) -> str:
    given = task.get("budget") or {}
    limits = []
    if given.get("seconds") is not None:
        seconds = None
        if task["status"] == "running":
            seconds = short.since(moment(task.get("started_at")), now)
        else:
            runs = task.get("runs") or ()
            seconds = runs[-1].get("duration_seconds") if runs else None
        limit = short.age(float(given["seconds"]))
        limits.append(limit if seconds is None else f"{short.age(seconds)} of {limit} in the last attempt")
    usage = task.get("usage") or {}
    if given.get("usd") is not None:
        used = usage.get("cost_usd")
        limits.append(f"{short.money(None if used is None else float(used))} of {short.money(float(given['usd']))}")
    if given.get("tokens") is not None:
        limits.append(f"{short.tokens(usage.get('total_tokens'))} of {short.tokens(given['tokens'])} tokens")
    if given.get("turns") is not None:
        limits.append(f"{given['turns']} turns")
    return ", ".join(limits)


def _spent_text(usage: Json | None) -> str:
    usage = usage or {}
    parts = []
    if usage.get("cost_usd") is not None:
        parts.append(cost_of(usage, ""))
    if usage.get("total_tokens") is not None:
        parts.append(f"{short.tokens(usage['total_tokens'])} tokens")
        if usage.get("cost_usd") is None:
            parts.append("cost unknown")
    return ", ".join(parts)


def _data(task: Json, look: Look) -> list[Line]:
    """Return input and result, each with up to ``LINES_OF_DATA`` lines, then its size."""
    lines: list[Line] = []
    for key in ("input", "result"):
        value = task.get(key)
        if value is None:
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)
        given = text.split("\n")
        if len(given) == 1:
            line = Line(look).add(f"  {key:<10} ", "dim")
            if cells(look.show(text)) <= look.width - line.width:
                lines.append(line.add(text))
                continue
        lines.append(Line(look).add(f"  {key}", "dim"))
        lines += [Line(look).add("    ").fill(each, look.width - 4) for each in given[:LINES_OF_DATA]]
        if len(given) > LINES_OF_DATA:
            size = short.size(len(text.encode(errors="replace")))
            more = f"{look.ellipsis} {len(given) - LINES_OF_DATA:,} more lines, {size} in all: --json"
            lines.append(Line(look).add("    ").fill(more, look.width - 4, "dim"))
    return lines


def _next(task: Json, what: str, began: bool) -> list[tuple[str, str]]:
    """Return what to do next, as label and command."""
    task_id = task["id"]
    steps: list[tuple[str, str]] = []
    if what in ("failed", "cancelled", "not_run"):
        steps.append(("next", f"orchestrator retry {task_id}"))
    elif what == "held":
        steps.append(("next", f"orchestrator release {task_id}"))
    elif what == "waiting":
        asks = [each for each in task.get("questions") or () if each["verdict"] is None]
        kind = asks[0]["kind"] if asks else "approval"
        steps.append(
            ("next", f"orchestrator answer {task_id} TEXT" if kind == "ask" else f"orchestrator approve {task_id}")
        )
    elif what in ("running", "stopping"):
        return [("next", f"orchestrator logs -f {task_id}")]
    if began:
        label = "all of it" if steps else "next"
        steps.append((label, f"orchestrator logs {task_id}"))
    return steps


# runs


def render_runs(runs: Sequence[Json], now: datetime, look: Look, *, captions: bool = False) -> list[Line]:
    """Return a row for each attempt: its class, start, time, cost, worker, and what it said."""
    none = look.sign(short.NONE)
    values: list[dict[str, tuple[str, str]]] = []
    for run in runs:
        started, elapsed = moment(run.get("started_at")), run.get("duration_seconds")
        status = str(run["status"])
        usage = run.get("usage")
        text = short.detail(run.get("cause"), run.get("message"), status)
        late = run.get("late")
        if late:
            outcome = late.get("status") if isinstance(late, Mapping) else None
            said = late.get("message") if isinstance(late, Mapping) else None
            text = f"{text or 'worker lost'}; late result: {said or outcome or 'kept'}"
        notes = "; ".join(map(str, run.get("notes") or ()))
        text = f"{text}; {notes}" if text and notes else text or notes
        style = "" if status in _SYMBOL_OF_RUN else "red"
        values.append(
            {
                "attempt": (str(run["attempt"]), ""),
                "status": (status, style),
                "started": (short.clock(started, now) if started else short.UNKNOWN, ""),
                "time": (short.UNKNOWN if elapsed is None else short.duration(float(elapsed)), ""),
                "cost": (cost_of(usage, none), ""),
                "worker": (str(run.get("worker") or none), ""),
                "text": (text, ""),
            }
        )

    def natural(key: str, least: int, most: int = NO_LIMIT) -> int:
        return widest((each[key][0] for each in values), least, most)

    unlimited = look.width >= NO_LIMIT
    columns = [
        Column("attempt", natural("attempt", 2), 0, right=True, caption="n" if captions else ""),
        Column("status", natural("status", 10), 1, caption="outcome"),
        Column("started", natural("started", 8), 5, caption="started"),
        Column("time", natural("time", 6), 2, right=True, caption="time"),
        Column("cost", natural("cost", 6), 3, right=True, caption="cost"),
        Column("worker", natural("worker", 8, NO_LIMIT if unlimited else 20), 6, caption="worker"),
        Column("text", natural("text", 4) if unlimited else 12, 4, caption="message", rest=1),
    ]
    places = join(columns, look.width)
    lines = [_captions(look, places)] if captions and values else []
    return lines + [row(look, places, each) for each in values]


# status


def render_status(
    status: Json,
    now: datetime,
    look: Look,
    *,
    server: ServerInfo | None = None,
    last_hour: tuple[int, int, float, bool] | None = None,
) -> list[Line]:
    """Return the screen of ``status`` from its JSON document.

    *last_hour* is what ended in it: done, failed, USD, and whether some cost is unknown.
    """
    lines: list[Line] = []
    if server is not None:
        lines.append(_server_line(server, look))
    counts, agents, workers = status["counts"], status["agents"], status["workers"]
    lines.append(_fact(look, "tasks", look.separator.join(_task_counts(counts, agents))))
    finished = counts.get("finished") or {}
    if finished.get("done") is not None or finished.get("failed") is not None:
        text = f"{short.estimate(finished.get('done'))} done, {short.estimate(finished.get('failed'))} failed"
        lines.append(_fact(look, "finished", f"{text}  (the planner's estimates)"))
    if last_hour is not None:
        done, failed, usd, partial = last_hour
        money = short.money(usd, partial=partial)
        lines.append(
            _fact(
                look,
                "last hour",
                f"{done:,} done, {plural(failed, 'failed attempt')}, {money}, {(done + failed) / 60:.1f}/min",
            )
        )
    lines.append(_fact(look, "workers", _workers_text(workers, now)))
    oldest = _oldest(agents)
    if oldest:
        lines.append(_fact(look, "oldest", oldest))
    hold = status["lock_hold_ms"]
    if hold.get("mean") is not None:
        figures = f"{hold['mean']:.1f} ms mean, {hold['p50']:.1f} p50, {hold['p99']:.1f} p99"
        lines.append(_fact(look, "lock hold", f"{figures}  ({hold['count']:,} claims in 1h)"))
    questions = status.get("questions") or {}
    if questions.get("open"):
        age = short.age(questions["oldest_seconds"] or 0)
        capped = "+" if questions["capped"] else ""
        text = f"{questions['open']:,}{capped} open, the oldest {age}  orchestrator questions"
        lines.append(_fact(look, "questions", text, "bold magenta"))
    alerts = status.get("alerts") or []
    if alerts:
        lines.append(_alerts_line(alerts, look))
    return [line.trimmed() for line in lines]


def _server_line(server: ServerInfo, look: Look) -> Line:
    host = "local" if server.host.startswith("/") else server.host
    where = f"{host}:{server.port}" if server.port else host
    parts = [f"PostgreSQL {server.version}"] if server.version else []
    parts += [f"orchestrator {server.orchestrator}"] if server.orchestrator else []
    parts += [f"schema {server.schema}"] if server.schema else []
    line = Line(look).fill(f"{where}/{server.database}", look.width, "bold")
    return line.fill("  " + ", ".join(parts), look.width - line.width) if parts else line


def _fact(look: Look, name: str, text: str, style: str = "") -> Line:
    line = Line(look).add(f"{name:<9} ", "dim")
    return line.fill(text, look.width - line.width, style)


def _task_counts(counts: Json, agents: Sequence[Json]) -> list[str]:
    plus = "+" if counts.get("capped") else ""
    parts = [f"{counts['running']:,} running"]
    kinds = (("ready", "ready"), ("retrying", "retrying"), ("not_due", "not due"), ("held", "held"))
    if any("ready" in agent for agent in agents) or not counts.get("pending"):
        for key, word in kinds:
            n = sum(int(agent.get(key) or 0) for agent in agents)
            if n or key == "ready":
                parts.append(f"{n:,}{plus if n else ''} {word}")
    else:
        parts.append(f"{counts['pending']:,}{plus} pending")
    parts += [f"{counts[key]:,}{plus} {key}" for key in ("blocked", "waiting") if counts.get(key)]
    return parts


def _workers_text(workers: Sequence[Json], now: datetime) -> str:
    live = [worker for worker in workers if worker.get("state") != "dead"]
    if not live:
        return "none alive"
    slots = sum(int(worker.get("slots") or 0) for worker in live)
    running = sum(int(worker.get("running") or 0) for worker in live)
    text = f"{len(live):,} live, {running:,} of {slots:,} slots"
    for state in ("silent", "draining", "stopping"):
        found = [worker for worker in live if worker.get("state") == state]
        if not found:
            continue
        beat = short.since(moment(found[0].get("renewed_at")), now)
        named = f"{found[0]['name']}{', ' + short.age(beat) if beat is not None and state == 'silent' else ''}"
        more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
        text += f"; {len(found):,} {state} ({named}{more})"
    return text


def _oldest(agents: Sequence[Json]) -> str:
    waiting = [agent for agent in agents if agent.get("oldest_wait_seconds") is not None]
    waiting.sort(key=lambda agent: -float(agent["oldest_wait_seconds"]))
    words = {"no_worker": "no live worker", "login": "needs a login", "breaker": "breaker open"}
    parts = []
    for agent in waiting[:5]:
        state = agent.get("state")
        why = f" ({words.get(str(state), state)})" if state and state != "ok" else ""
        parts.append(f"{agent['name']} {short.age(float(agent['oldest_wait_seconds']))}{why}")
    if len(waiting) > 5:
        parts.append(f"{len(waiting) - 5:,} more")
    return ", ".join(parts)


def _alerts_line(alerts: Sequence[Json], look: Look) -> Line:
    command = "orchestrator alerts"
    parts = []
    for alert in alerts[:3]:
        subject = alert.get("task_id") or alert.get("name") or ""
        parts.append(f"{subject} {alert.get('what') or alert.get('kind')}".strip())
    text = f"{len(alerts):,}: {'; '.join(parts)}"
    if len(alerts) > 3:
        text += f"; {look.ellipsis}"
    line = Line(look).add(f"{'alerts':<9} ", "dim")
    room = look.width - line.width - len(command) - 2
    if room < 20:
        return line.fill(text, look.width - line.width, "red")
    return line.fill(text, room, "red").add(f"  {command}")


# logs


def logs_head(task: Json, run: Json | None, attempt: int, now: datetime, look: Look) -> Line:
    """Return the frame line above an attempt's output: which attempt of what, by whom, where, since when."""
    started = moment((run or {}).get("started_at") or task.get("started_at"))
    parts = [f"{called(task)} {task['id']}", str(task["agent"])]
    if run and run.get("worker"):
        parts.append(str(run["worker"]))
    if started is not None:
        parts.append(short.clock(started, now))
    return rule(_ruled(look), f"attempt {attempt} {', '.join(parts)}")


def logs_end(run: Json, look: Look) -> Line:
    """Return the frame line below an attempt's output: how it ended."""
    parts = [str(run["status"])]
    if run.get("duration_seconds") is not None:
        parts[0] += f" {short.duration(float(run['duration_seconds']))}"
    if run.get("exit_code") is not None:
        parts.append(f"exit {run['exit_code']}")
    usage = run.get("usage") or {}
    if usage.get("total_tokens") is not None:
        parts.append(f"{short.tokens(usage['total_tokens'])} tokens")
    if usage.get("cost_usd") is not None:
        parts.append(cost_of(usage, ""))
    return rule(_ruled(look), ", ".join(parts))


class LogLines:
    """Turns the events of a transcript into lines: stretches of stdout and stderr are joined until a line is whole.

    Nothing is cut. Other kinds are things of their own; each begins a new line.
    """

    def __init__(self, look: Look) -> None:
        self._look = Look(NO_LIMIT, look.height, look.ascii)
        self._open: dict[str, str] = {}

    def add(self, kind: str, text: str) -> list[Line]:
        """Return the lines that are whole with *text*."""
        if kind not in _STREAMS:
            return [*self.rest(), *self._lines(kind, text.rstrip("\n"))]
        whole, newline, rest = (self._open.pop(kind, "") + text).rpartition("\n")
        if rest:
            self._open[kind] = rest
        return self._lines(kind, whole) if newline else []

    def rest(self) -> list[Line]:
        """Return what has no line end yet, at the end of a transcript or before something else."""
        opened, self._open = self._open, {}
        return [line for kind, text in opened.items() for line in self._lines(kind, text)]

    def _lines(self, kind: str, text: str) -> list[Line]:
        lead = f"{kind} " if kind in ("answer", "note", "error") else ""
        lines = []
        for at, each in enumerate(text.split("\n")):
            line = Line(self._look).add("" if at else lead, "dim")
            lines.append(line.add(each.removesuffix("\r").expandtabs(8), _LOG_STYLES.get(kind, "")))
        return lines


def logs_gap(dropped: int, look: Look) -> Line:
    """Return the line that stands where the middle of a transcript was left out."""
    mark = look.ellipsis
    return look.line((f"{mark} {short.size(dropped)} left out (head 1 MB and tail 256 KB are kept) {mark}", "dim"))
