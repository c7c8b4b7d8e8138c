"""The answer of ``why``: reasons made of facts, and their screen. Both are pure.

What needs a person ranks before what ends by itself, that before the mere order of the queue. Every reason has its number
and, where there is one, the command that would change it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from orchestrator.dashboard import short
from orchestrator.dashboard.frame import NO_LIMIT, Line, Look, plural, wrapped
from orchestrator.dashboard.run_view import answer_command
from orchestrator.dashboard.show import called, cost_of, kind_of, moment
from orchestrator.dashboard.text import cells
from orchestrator.domain.diagnosis import BreakerFacts, Deed, Diagnosis, Held, Reason, Relative, TaskFacts, WorkerFacts
from orchestrator.domain.outcome import Budget
from orchestrator.domain.shapes import time_json
from orchestrator.domain.snapshot import Count, Spend

QUIET = 60.0
"""Seconds without output that are worth a word."""

_ACT = {
    "failed": ("to open it again", "orchestrator retry {id}"),
    "cancelled": ("to open it again", "orchestrator retry {id}"),
    "running": ("to watch it", "orchestrator logs -f {id}"),
    "waiting": ("to see what it asks", "orchestrator show {id}"),
    "pending": ("to see why", "orchestrator why {id}"),
    "blocked": ("to see why", "orchestrator why {id}"),
}
"""What to do about a task that another one needs, by its status."""


def diagnose(facts: TaskFacts) -> Diagnosis:
    """Return why the task of *facts* is as it is."""
    task = facts.task
    judge = {"pending": _pending, "running": _running, "blocked": _blocked, "waiting": _waiting}
    verdict, reasons, clear, following = judge.get(str(task["status"]), _ended)(facts)
    return Diagnosis(
        id=int(task["id"]),
        status=str(task["status"]),
        kind=kind_of(task, facts.now),
        called=called(task),
        verdict=verdict,
        reasons=tuple(reasons),
        not_the_cause=tuple(clear),
        next=following,
    )


def why_json(found: Diagnosis) -> dict[str, Any]:
    """Return the document of ``why --json``."""
    return {
        "id": found.id,
        "status": found.status,
        "verdict": found.verdict,
        "reasons": [
            {
                "reason": each.reason,
                "text": each.text,
                "number": each.number,
                "unit": each.unit,
                "until": time_json(each.until),
                "command": each.command,
            }
            for each in found.reasons
        ],
        "not_the_cause": list(found.not_the_cause),
        "next": found.next,
    }


Judged = tuple[str, list[Reason], list[str], str | None]


# -- pending ------------------------------------------------------------------------------------------------------


def _pending(facts: TaskFacts) -> Judged:
    task, now = facts.task, facts.now
    person: list[Reason] = []
    clock: list[Reason] = []
    queue: list[Reason] = []
    clear: list[str] = []

    at = moment(task["available_at"]) or now
    if at > now or not facts.due:
        clock.append(_not_due(facts, at))
    else:
        clear.append("due")
    if task["held_at"]:
        person.append(_held(facts))
    else:
        clear.append("not held")
    clear.append("all that it needs is done" if task["depends_on"] else "needs nothing")
    if facts.pause is not None:
        (clock if facts.pause.until is not None else person).append(_paused(facts, facts.pause))
    else:
        clear.append(f"{task['agent']} not paused")
    if facts.breaker is not None:
        (person if facts.breaker.login else clock).append(_refused(facts, facts.breaker))

    able, worker = _able(facts)
    if worker is not None:
        person.append(worker)
    else:
        clear.append(f"{plural(len(able), 'live worker')} for {task['agent']}")
    slots, busy = sum(each.slots for each in able), sum(each.running for each in able)
    if able and busy >= slots:
        queue.append(_busy(facts, able, busy, slots))
    elif able:
        clear.append(f"{slots - busy:,} of {slots:,} slots free")
    for held in facts.keys:
        if len(held.tasks) >= held.room:
            queue.insert(0, _key_busy(held))
        else:
            clear.append(f"{held.kind} {held.name} has room ({len(held.tasks)} of {held.room} run)")
    if task["lost_count"]:
        queue.insert(0, _suspect(facts))
    else:
        clear.append("never lost with a worker")
        if facts.ahead.n:
            queue.append(_ahead(facts))
        elif not (person or clock):
            clear.append("first in the queue")

    # What ends last binds: whoever lifts the other first gains nothing.
    clock.sort(key=lambda reason: reason.until or now, reverse=True)
    since = moment((facts.last_run or {}).get("finished_at")) or moment(task["created_at"]) or now
    state = f"pending {short.age((now - since).total_seconds())}"
    if person:
        verdict = f"{state}; it will not start now"
    elif clock:
        until = clock[0].until
        verdict = f"{state}; it will not start before {short.clock(until, now)}" if until else f"{state}; not due yet"
    elif queue:
        verdict = f"{state}; it starts when its turn comes"
    else:
        verdict = f"{state}; it starts at a worker's next look"
    return verdict, [*person, *clock, *queue], clear, None


def _not_due(facts: TaskFacts, at: datetime) -> Reason:
    task, now = facts.task, facts.now
    seconds = (at - now).total_seconds()
    when = f"{short.clock(at, now)} (in {short.coarse(seconds)})" if seconds > 0 else "the next sweep makes it due"
    attempt = int(task["attempt"])
    if not attempt:
        text = f"not due before {when}" if seconds > 0 else f"its time has come: {when}"
        return Reason("not_due", text, max(0.0, seconds), "seconds", until=at)
    run = facts.last_run or {}
    said = short.reason(run.get("error_class"), run.get("cause"), run.get("message"))
    most = short.of(attempt + 1, task["max_retries"], int(task["retry_count"]))
    ended = f" after attempt {attempt} ended {said}" if said else ""
    if facts.limited_count:
        since = f" since {short.clock(facts.limited_since, now)}" if facts.limited_since else ""
        times = plural(facts.limited_count, "time")
        text = f"tried again at {when}: limited by its provider {times} in a row{since}{': ' + said if said else ''}"
        return Reason("limited", text, max(0.0, seconds), "seconds", until=at)
    text = f"{short.attempt(attempt + 1, most)} at {when}{ended}"
    return Reason("retrying", text, max(0.0, seconds), "seconds", until=at)


def _held(facts: TaskFacts) -> Reason:
    task, now = facts.task, facts.now
    since = moment(task["held_at"]) or now
    seconds = (now - since).total_seconds()
    text = f"held{_by(facts.held)} {short.age(seconds)} ago{_because(facts.held)}"
    return Reason("held", text, seconds, "seconds", f"orchestrator release {task['id']}", "to let it start")


def _paused(facts: TaskFacts, pause: Deed) -> Reason:
    agent, now = str(facts.task["agent"]), facts.now
    if pause.until is not None:
        left = (pause.until - now).total_seconds()
        text = f"agent {agent} is paused until {short.until(pause.until, now)} (in {short.coarse(left)}){_by(pause)}"
    else:
        left = (now - pause.at).total_seconds()
        text = f"agent {agent} has been paused for {short.age(left)}{_by(pause)}"
    command = f"orchestrator resume {shlex.quote(agent)}"
    return Reason("paused", text + _because(pause), left, "seconds", command, "to try now", pause.until)


def _refused(facts: TaskFacts, breaker: BreakerFacts) -> Reason:
    agent, now = str(facts.task["agent"]), facts.now
    left = (breaker.until - now).total_seconds()
    if breaker.login:
        text = f"agent {agent} needs a login"
    elif left > 0:
        text = f"agent {agent}: breaker open until {short.until(breaker.until, now)} (in {short.coarse(left)})"
    else:
        text = f"agent {agent}: breaker open"
    if breaker.probed:
        text += ", a probe is on its way"
    elif left <= 0:
        text += ", the next task is a probe"
    why = f": {breaker.message}" if breaker.message else ""
    seen = f", seen by {breaker.task_id}" if breaker.task_id is not None else ""
    command = f"orchestrator resume {shlex.quote(agent)}"
    aim = "after the login" if breaker.login else "to try now"
    until = breaker.until if left > 0 else None
    return Reason("breaker", text + why + seen, max(0.0, left), "seconds", command, aim, until)


def _able(facts: TaskFacts) -> tuple[list[WorkerFacts], Reason | None]:
    """Return the workers that would take the task; without any, the reason for that."""
    task = facts.task
    agent, plan = str(task["agent"]), task["plan"]
    well = [each for each in facts.workers if not each.state]
    able = [each for each in well if each.plan is None or each.plan == plan]
    if able:
        return able, None
    if facts.local:
        what = f"{agent} is defined in the plan {plan}: only a process that has loaded that file runs it"
        command, aim = "orchestrator worker --plan FILE", "to run it"
    else:
        what = f"no live worker takes tasks of {agent}"
        command, aim = f"orchestrator worker --agent {shlex.quote(agent)}", "to start one"
    others = [f"{each.name} works on plan {each.plan} only" for each in well]
    others += [f"{each.name} is {each.state}" for each in facts.workers if each.state]
    if others:
        more = f" and {len(others) - 3:,} more" if len(others) > 3 else ""
        what += f" ({', '.join(others[:3])}{more})"
    return [], Reason("no_worker", what, 0, "workers", command, aim)


def _busy(facts: TaskFacts, able: Sequence[WorkerFacts], busy: int, slots: int) -> Reason:
    agent = str(facts.task["agent"])
    where = able[0].name if len(able) == 1 else f"{len(able):,} workers"
    text = f"all slots of {where} are busy ({busy:,} of {slots:,})"
    command = f"orchestrator worker --agent {shlex.quote(agent)}"
    return Reason("slots_busy", text, busy, "tasks", command, "to add slots")


def _key_busy(held: Held) -> Reason:
    ids = ", ".join(map(str, held.tasks[:5])) + (", …" if len(held.tasks) > 5 else "")
    what = "concurrency key" if held.kind == "key" else "directory"
    text = f"its {what} {held.name} is in use by task {ids}"
    if held.kind == "key":
        text += f" ({len(held.tasks)} of {held.room} run)"
    return Reason(
        f"{held.kind}_busy", text, len(held.tasks), "tasks", f"orchestrator show {held.tasks[0]}", "to see it"
    )


def _suspect(facts: TaskFacts) -> Reason:
    lost = int(facts.task["lost_count"])
    text = f"lost with its worker {plural(lost, 'time')} before: each worker takes such tasks one at a time"
    if facts.suspects_ahead.n:
        text += f", and {short.counted(facts.suspects_ahead)} of them are ahead of it"
    return Reason("suspect", text, lost, "losses", f"orchestrator show {facts.task['id']}", "to see its attempts")


def _ahead(facts: TaskFacts) -> Reason:
    task, ahead, agent = facts.task, facts.ahead, str(facts.task["agent"])
    one = ahead == Count(1)
    text = f"{short.counted(ahead)} ready {'task is' if one else 'tasks are'} ahead of it"
    if facts.ended_hour is not None:
        text += f"; {agent} ends {facts.ended_hour:,} an hour"
        clears = short.clears(ahead, facts.ended_hour)
        text += f", so {clears}" if clears.startswith("~") else ""
    top = max(facts.top_priority or 0, int(task["priority"]))
    command = f"orchestrator priority {min(top + 1, 2**31 - 1)} {task['id']}"
    return Reason("ahead", text, ahead.n, "tasks", command, "to put it first")


# -- blocked, waiting ---------------------------------------------------------------------------------------------


def _blocked(facts: TaskFacts) -> Judged:
    task, now = facts.task, facts.now
    age = short.age((now - (moment(task["created_at"]) or now)).total_seconds())
    needs = facts.parent_count
    reasons = [_root(each, any(parent.id == each.id for parent in facts.parents)) for each in facts.roots]
    named = {each.id for each in facts.roots}
    between = [each for each in facts.parents if each.id not in named]
    if between:
        shown = ", ".join(f"{each.id} {each.called} ({each.status})" for each in between[:5])
        more = needs.n - len(facts.parents) + max(0, len(between) - 5)
        shown += f" and {short.number(more, capped=needs.capped)} more" if more > 0 else ""
        reasons.append(
            Reason("needs", f"needs {shown}", len(between), "tasks", f"orchestrator why {between[0].id}", "to see why")
        )
    if not reasons:
        text = "everything that it needs is done: it should have been opened when the last of it ended"
        reasons.append(Reason("needs_nothing", text, 0, "tasks", "orchestrator doctor", "to look for the fault"))
    clear = []
    if task["held_at"]:
        reasons.append(_held(facts))
    else:
        clear.append("not held")
    if facts.pause is not None:
        reasons.append(_paused(facts, facts.pause))
    else:
        clear.append(f"{task['agent']} not paused")
    tasks = f"{short.counted(needs)} {'task that is' if needs == Count(1) else 'tasks that are'} not done"
    return f"blocked {age}; it needs {tasks}", reasons, clear, None


def _root(each: Relative, direct: bool) -> Reason:
    status = "held" if each.held else each.status
    aim, command = ("to let it start", "orchestrator release {id}") if each.held else _ACT[each.status]
    what = "needs" if direct else "waits in the end for"
    return Reason("needs", f"{what} {each.id} {each.called} ({status})", 1, "tasks", command.format(id=each.id), aim)


def _waiting(facts: TaskFacts) -> Judged:
    task, now = facts.task, facts.now
    run, question = facts.last_run or {}, facts.question
    asked = question.asked_at if question is not None else None
    since = asked or moment(run.get("finished_at")) or moment(task["created_at"]) or now
    seconds = (now - since).total_seconds()
    if question is None:
        text, command = "waits for a person, but asks nothing", f"orchestrator approve {task['id']}"
    else:
        text, command = f"asks a person: {' '.join(question.text.split())}", answer_command(question)
        if question.choices:
            text += f" ({' / '.join(question.choices)})"
    until = question.deadline if question is not None else None
    if until is not None:
        then = "its default is taken" if question is not None and question.default else "it is given up"
        text += f"; at {short.clock(until, now)} {then}"
    reasons = [Reason("person", text, seconds, "seconds", command, "to let it go on", until)]
    if task["held_at"]:
        reasons.append(_held(facts))
    clear = [] if task["held_at"] else ["not held"]
    return f"waiting {short.age(seconds)}; it starts when it is answered", reasons, clear, None


# -- running ------------------------------------------------------------------------------------------------------

_STATE = frozenset({"quiet", "doing", "heartbeat", "budget", "spent", "progress", "said"})
"""Reasons that say how a running task is doing: one line, without a number before each."""


def _running(facts: TaskFacts) -> Judged:
    task, now, owner = facts.task, facts.now, facts.owner
    started = moment(task["started_at"]) or now
    seconds = (now - started).total_seconds()
    where = f" on {owner.name}" if owner else ""
    pid = f", worker pid {owner.pid}" if owner else ""
    most = short.of(int(task["attempt"]), task["max_retries"], int(task["retry_count"]))
    verdict = f"running {short.age(seconds)}{where} ({short.attempt(int(task['attempt']), most)}{pid})"
    clear: list[str] = []
    reasons = [*_stopping(facts), *_owner(facts, clear), *_budget(facts, seconds, clear)]
    if not task["cancel_requested_at"]:
        clear.append("nobody asked to cancel it")
    heard = facts.last_output_at or started
    quiet = (now - heard).total_seconds()
    if quiet >= QUIET:
        text = f"no output for {short.age(quiet)}" if facts.last_output_at else "no output yet"
        reasons.append(Reason("quiet", text, quiet, "seconds"))
    if doing := task.get("activity"):
        lasts = (now - (moment(doing["since"]) or now)).total_seconds()
        reasons.append(Reason("doing", f"in {doing['what']} for {short.age(lasts)}", lasts, "seconds"))
    if owner is not None:
        beat = (now - owner.renewed_at).total_seconds()
        reasons.append(Reason("heartbeat", f"worker heartbeat {short.age(beat)} ago", beat, "seconds"))
    used = _nearest(facts, seconds)
    if used is not None and used[0] < 1:
        reasons.append(Reason("budget", f"{short.percent(*used[:2])} of {used[2]}", used[0] * 100, "percent"))
    money = cost_of(task["usage"], "")
    if money:
        reasons.append(Reason("spent", money, task["usage"].get("cost_usd"), "usd"))
    if facts.percent is not None:
        reasons.append(Reason("progress", f"{facts.percent:.0f}% done", facts.percent, "percent"))
    if facts.last_output:
        reasons.append(Reason("said", f"last: {facts.last_output.strip()}"))
    return verdict, reasons, clear, f"orchestrator logs -f {task['id']}"


def _stopping(facts: TaskFacts) -> Iterator[Reason]:
    asked = moment(facts.task["cancel_requested_at"])
    if facts.will_not_stop is not None:
        host = f" on {facts.owner.name}" if facts.owner is not None else ""
        text = f"will not stop{host}: {facts.will_not_stop}; its slot stays taken, the worker claims no more"
        yield Reason("will_not_stop", text, 1, "tasks", f"orchestrator show {facts.task['id']}", "to see its worker")
    if asked is None:
        return
    seconds = (facts.now - asked).total_seconds()
    deed = facts.cancelled
    text = f"being stopped for {short.age(seconds)}: cancel asked{_by(deed)}{_because(deed)}"
    yield Reason("stopping", text, seconds, "seconds", f"orchestrator logs -f {facts.task['id']}", "to watch it")


def _owner(facts: TaskFacts, clear: list[str]) -> Iterator[Reason]:
    owner = facts.owner
    if owner is None or owner.state == "dead":
        who = "its worker is unknown here" if owner is None else f"its worker {owner.name} is dead"
        yield Reason(
            "worker_dead", f"{who}: the task is taken back by the next sweep", 1, "workers",
            "orchestrator watchdog --once", "to take it back now",
        )  # fmt: skip
    elif owner.state == "silent":
        beat = (facts.now - owner.renewed_at).total_seconds()
        yield Reason(
            "worker_silent", f"its worker {owner.name} has been silent for {short.age(beat)}", beat, "seconds",
            "orchestrator watchdog --once", "to judge it",
        )  # fmt: skip
    else:
        clear.append("its worker lives")


def _budget(facts: TaskFacts, seconds: float, clear: list[str]) -> Iterator[Reason]:
    used = _nearest(facts, seconds)
    if used is None:
        clear.append("no budget")
    elif used[0] >= 1:
        text = f"over budget: {short.percent(*used[:2])} of {used[2]}"
        command = f"orchestrator cancel {facts.task['id']}"
        yield Reason("over_budget", text, used[0] * 100, "percent", command, "to stop it")
    else:
        clear.append("within its budget")


def _nearest(facts: TaskFacts, seconds: float) -> tuple[float, str, str] | None:
    given, usage = facts.task["budget"], facts.task["usage"]
    budget = Budget(given["seconds"], given["tokens"], given["usd"], given["turns"])
    used = short.nearest(budget, seconds, Spend(usage.get("total_tokens"), usage.get("cost_usd")))
    return None if used is None else (*used, short.limit(budget, used[1]))


# -- ended --------------------------------------------------------------------------------------------------------


def _ended(facts: TaskFacts) -> Judged:
    task, now = facts.task, facts.now
    ended = moment(task["finished_at"]) or now
    attempts = int(task["attempt"])
    age = short.age((now - ended).total_seconds())
    not_run = kind_of(task, now) == "not_run"
    verdict = f"{'not run' if not_run else task['status']}; ended {age} ago"
    verdict += f", after {plural(attempts, 'attempt')}" if attempts else ", it was never started"
    if task["status"] == "done":
        return verdict, [_done(facts)], [], f"orchestrator show {task['id']}"
    reasons = list(_failed(facts) if task["status"] == "failed" else _cancelled(facts))
    if facts.needed_by.n:
        number = short.counted(facts.needed_by)
        noun = "task needs" if facts.needed_by == Count(1) else "tasks need"
        reasons.append(
            Reason("needed_by", f"{number} {noun} it, and cannot run without it", facts.needed_by.n, "tasks")
        )
    following = None if facts.superseded else f"orchestrator retry {task['id']}"
    return verdict, reasons, [], following


def _done(facts: TaskFacts) -> Reason:
    run, attempts = facts.last_run or {}, int(facts.task["attempt"])
    took = run.get("duration_seconds")
    text = f"attempt {attempts} ended well" if attempts else "it was entered as done"
    text += f" in {short.duration(took)}" if took is not None else ""
    text += f" on {run['worker']}" if run.get("worker") else ""
    if run.get("notes"):
        text += f" ({'; '.join(map(str, run['notes']))})"
    return Reason("done", text, took, "seconds")


def _failed(facts: TaskFacts) -> Iterator[Reason]:
    task = facts.task
    error = task["error"] or {}
    kind = error.get("class")
    said = short.reason(kind, error.get("cause"), error.get("message")) or "it failed, and nothing says why"
    retry = None if facts.superseded else f"orchestrator retry {task['id']}"
    yield Reason(str(kind or "failed"), said, int(task["attempt"]), "attempts", retry, "to open it again")
    most, used = task["max_retries"], int(task["retry_count"])
    if kind in ("transient", "timed_out", "stalled"):
        text = "it may not be retried" if most == 0 else f"no retry is left: {used:,} of {most or 0:,} used"
        yield Reason("no_retry_left", text, used, "retries")
    elif kind in ("rate_limited", "unauthenticated"):
        text = f"given up after {plural(facts.limited_count, 'limited attempt')} in a row"
        yield Reason("gave_up", text, facts.limited_count, "attempts")
    elif kind == "lost":
        yield Reason(
            "lost", f"lost with its worker {plural(int(task['lost_count']), 'time')}", task["lost_count"], "losses"
        )
    elif kind == "permanent":
        yield Reason(
            "permanent_fault", "such a fault is not retried: the same attempt would end the same way", 0, "retries"
        )
    if facts.superseded:
        yield _superseded(facts)


def _cancelled(facts: TaskFacts) -> Iterator[Reason]:
    task, error = facts.task, facts.task["error"] or {}
    retry = None if facts.superseded else f"orchestrator retry {task['id']}"
    if error.get("cause") in ("parent_failed", "parent_cancelled"):
        closed = [each for each in facts.parents if each.status in ("failed", "cancelled")]
        for each in closed[:3]:
            verb = "failed" if each.status == "failed" else "was cancelled"
            text = f"needs {each.id} {each.called}, which {verb}"
            command = f"orchestrator retry {each.id}"
            yield Reason(str(error["cause"]), text, 1, "tasks", command, "to open both again")
        if not closed:
            text = str(error.get("message") or "a task that it needs did not end well")
            yield Reason(str(error["cause"]), text, 1, "tasks", retry, "to open it again")
    elif facts.superseded:
        yield _superseded(facts)
        return
    else:
        at = facts.cancelled.at if facts.cancelled else moment(task["cancel_requested_at"])
        when = f" {short.age((facts.now - at).total_seconds())} ago" if at else ""
        text = f"cancelled{_by(facts.cancelled)}{when}{_because(facts.cancelled)}"
        seconds = (facts.now - at).total_seconds() if at else None
        yield Reason("cancelled", text, seconds, "seconds", retry, "to open it again")
    if facts.superseded:
        yield _superseded(facts)


def _superseded(facts: TaskFacts) -> Reason:
    plan = facts.task["plan"]
    command = f"orchestrator list --plan {shlex.quote(str(plan))}" if plan else None
    text = f"replaced by a later submission of plan {plan}"
    return Reason("superseded", text, 1, "tasks", command, "to see the new one")


def _by(deed: Deed | None) -> str:
    return f" by {deed.actor}" if deed is not None and deed.actor else ""


def _because(deed: Deed | None) -> str:
    return f": {deed.reason}" if deed is not None and deed.reason else ""


# -- the screen ---------------------------------------------------------------------------------------------------


def render_why(found: Diagnosis, look: Look) -> list[Line]:
    """Return the screen of ``why``. Texts are wrapped, commands are never cut."""
    head = Line(look).symbol(found.kind).add(f" {found.id} ")
    room = max(8, look.width - head.width - cells(look.show(found.verdict)) - 2) if look.width < NO_LIMIT else NO_LIMIT
    head.fill(found.called, room, "bold").add("  ")
    lines = wrapped(head, found.verdict, indent=3)
    number = 0
    state = [each for each in found.reasons if each.reason in _STATE]
    for each in found.reasons:
        if each in state:
            continue
        number += 1
        lines += wrapped(Line(look).add(f"{number:>2} "), each.text, indent=3)
        if each.command:
            label = f"{each.aim or 'to change it'}:"
            lines.append(look.line(f"     {label:<18} {each.command}"))
    said = [each for each in state if each.reason == "said"]
    doing = "; ".join(each.text for each in state if each.reason != "said")
    if doing:
        lines += wrapped(Line(look).add("   "), doing, indent=3)
    for each in said:
        lines.append(Line(look).add("   ").fill(each.text, look.width - 3))
    if found.not_the_cause:
        lines += wrapped(Line(look), f"not the cause: {', '.join(found.not_the_cause)}", "dim", indent=3)
    if found.next:
        lines.append(look.line(f"next  {found.next}"))
    return lines


__all__ = ["diagnose", "render_why", "why_json"]
