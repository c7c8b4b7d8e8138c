"""Panes of the dashboard beside what needs a person and what runs: agents, workers, the latest failures.

Each is a rule with its captions and at most so many rows, what is wrong first; what is left out is counted.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from orchestrator.dashboard import short
from orchestrator.dashboard.frame import Column, Line, Look, join, row, rule, widest
from orchestrator.domain.snapshot import AgentRow, Failure, Question, RunningTask, Snapshot

_STATE_ORDER = {"no_worker": 0, "login": 1, "breaker": 2, "paused": 3}
_WORKER_ORDER = {"dead": 0, "silent": 1, "stopping": 2, "draining": 3}


def task_name(task: RunningTask | Failure | Question) -> str:
    """Return what a task is called: its name, else its title, else its agent."""
    return task.name or task.title or task.agent


def agent_state(agent: AgentRow, now: datetime) -> str:
    """Return what is wrong with an agent, empty if nothing is."""
    end = f" to {short.until(agent.state_until, now)}" if agent.state_until else ""
    if agent.state == "no_worker":
        return "no live worker"
    if agent.state == "login":
        return "needs a login"
    if agent.state == "breaker":
        return f"breaker{end or ' open'}"
    return f"{agent.state}{end}" if agent.state else ""


def agent_rank(agent: AgentRow) -> tuple[int, float, str]:
    """Return the place of an agent: wrong ones first, then the longest wait."""
    oldest = agent.oldest_ready_at.timestamp() if agent.oldest_ready_at else float("inf")
    return _STATE_ORDER.get(agent.state, 9 if not agent.state else 8), oldest, agent.name


def agents_and_workers(snapshot: Snapshot, now: datetime, look: Look, most: int) -> list[Line]:
    """Return the agents, on a wide screen with the workers beside them; a row is about its agent."""
    if not look.wide or not snapshot.workers:
        return agents_pane(snapshot, now, look, most)
    names = widest((worker.name for worker in snapshot.workers), 6, 16)
    right_width = 36 + names
    left_look = replace(look, width=look.width - right_width - 2)
    left = agents_pane(snapshot, now, left_look, most)
    right = workers_pane(snapshot, now, replace(look, width=right_width), most, names)
    lines = []
    for at in range(max(len(left), len(right))):
        line = Line(look)
        if at < len(left):
            line.about(left[at].target)
            for text, style in left[at].parts:
                line.add(text, style)
        if at < len(right):
            line.to(left_look.width + 2)
            for text, style in right[at].parts:
                line.add(text, style)
        lines.append(line)
    return lines


def _more(look: Look, left: int, wrong: int) -> Line:
    text = f"{wrong:,} of them not well" if wrong else "nothing wrong with them"
    return Line(look).fill(f"{look.ellipsis} {left:,} more, {text}", look.width, "" if wrong else "dim")


def agents_pane(snapshot: Snapshot, now: datetime, look: Look, most: int) -> list[Line]:
    """Return the agents, wrong ones first, then by the longest wait."""
    agents = sorted(snapshot.agents, key=agent_rank)
    shown = agents if len(agents) <= most else agents[: most - 1]
    columns = [
        Column("agent", widest((agent.name for agent in shown), 4, 24), 0),
        Column("state", 16, 1, gap=3, rest=1),
        Column("running", 7, 4, right=True, caption="running"),
        Column("ready", 7, 2, right=True, caption="ready"),
        Column("oldest", 6, 3, right=True, caption="oldest"),
        Column("done", 6, 5, right=True, caption="done/h"),
        Column("fail", 4, 6, right=True, caption="fail"),
        Column("clears", 6, 7, right=True, caption="clears"),
    ]
    places = join(columns, look.width)
    lines = [rule(look, f"agents {len(agents):,}", places=places)]
    for agent in shown:
        running = f"{agent.running:,}" + (f"/{agent.limit:,}" if agent.limit is not None else "")
        fail = ""
        if agent.attempts_hour and agent.failed_hour is not None:
            fail = short.percent(agent.failed_hour / agent.attempts_hour)
        oldest = short.since(agent.oldest_ready_at, now)
        values = {
            "agent": (agent.name, ""),
            "state": (agent_state(agent, now), "red" if agent.state in ("no_worker", "login") else "yellow"),
            "running": (running, ""),
            "ready": (short.counted(agent.ready), ""),
            "oldest": ("" if oldest is None else short.age(oldest), ""),
            "done": ("" if agent.done_hour is None else f"{agent.done_hour:,}", ""),
            "fail": (fail, ""),
            "clears": (short.clears(agent.ready, agent.done_hour), ""),
        }
        lines.append(row(look, places, values).about(agent.name))
    if len(shown) < len(agents):
        rest = agents[len(shown) :]
        lines.append(_more(look, len(rest), sum(1 for agent in rest if agent.state)))
    return lines


def workers_pane(snapshot: Snapshot, now: datetime, look: Look, most: int, names: int) -> list[Line]:
    """Return the workers, wrong ones first; *names* are the cells that their names get."""
    workers = sorted(snapshot.workers, key=lambda worker: (_WORKER_ORDER.get(worker.state, 9), worker.name))
    shown = workers if len(workers) <= most else workers[: most - 1]
    columns = [
        Column("worker", names, 0),
        Column("state", 12, 1, gap=3, rest=1),
        Column("slots", 6, 2, right=True, caption="slots"),
        Column("beat", 5, 3, right=True, caption="beat"),
        Column("up", 6, 4, right=True, caption="up"),
    ]
    places = join(columns, look.width)
    lines = [rule(look, f"workers {len(workers):,}", places=places, width=look.width)]
    for worker in shown:
        beat, up = short.since(worker.renewed_at, now), short.since(worker.started_at, now)
        state = f"stopping {worker.stopping}" if worker.state == "stopping" and worker.stopping else worker.state
        values = {
            "worker": (worker.name, ""),
            "state": (state, "red" if state in ("dead", "silent") else "yellow"),
            "slots": (f"{worker.running}/{worker.slots}", ""),
            "beat": ("" if beat is None else short.age(beat), ""),
            "up": ("" if up is None else short.age(up), ""),
        }
        lines.append(row(look, places, values))
    if len(shown) < len(workers):
        rest = workers[len(shown) :]
        lines.append(_more(look, len(rest), sum(1 for worker in rest if worker.state)))
    return lines


def failures_pane(snapshot: Snapshot, now: datetime, look: Look, most: int) -> list[Line]:
    """Return the latest failures, newest first."""
    hour = snapshot.minutes[-60:]
    failed = sum(minute.failed for minute in hour)
    ended = failed + sum(minute.done for minute in hour)
    lines = [rule(look, "latest failures", f"{failed:,} of {ended:,} in 1h" if hour else "")]
    shown = snapshot.failures[:most]
    ids = widest((str(failure.task_id) for failure in shown), 1)
    names = 18 if look.wide else widest((task_name(failure) for failure in shown), 4, 20)
    agents = widest((failure.agent for failure in shown), 7, 14)
    classes = widest((failure.error_class or "" for failure in shown), 11)
    for failure in shown:
        line = Line(look).add(f"{short.clock(failure.at, now)} ").symbol("failed").add(f" {failure.task_id:>{ids}} ")
        start = line.width
        line.fill(task_name(failure), names)
        text = short.detail(failure.cause, failure.message, failure.error_class)
        most_attempts = short.of(failure.attempt, failure.max_retries, failure.retry_count)
        if failure.attempt > 1:
            text += f" ({short.attempt(failure.attempt, most_attempts)})"
        if look.wide:
            line.to(start + names + 1).fill(failure.agent, agents).to(start + names + 1 + agents + 2)
            begin = line.width
            line.add(failure.error_class or "").to(begin + classes + 1)
        else:
            line.to(start + names + 2)
            text = f"{failure.error_class}: {text}" if failure.error_class else text
        lines.append(line.fill(text, look.width - line.width).about(failure.task_id))
    return lines
