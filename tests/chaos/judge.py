"""The judge: compares what agents wrote with what the database says. Each rule is one function that yields violations.

Two clocks meet here: agents write the boot clock, rows have the database's, which is this host's clock of the day. Their
difference is read at the beginning and at the end: what the clock of the day was set or slewed by meanwhile is allowed
for, and so is ``SLACK``, for hundredths of seconds. What a machine that is busy with other things takes longer for is
measured (``watch.py``) and allowed for as well, within bounds.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.liveness import boot_clock
from tests.chaos.environment import Environment
from tests.chaos.fleet import GRACE, KILL_GRACE, LEASE, SLOTS, Fleet
from tests.chaos.hand import Hand
from tests.chaos.ledger import Ledger, Signs, read

SLACK = 0.1
ENDED = ("done", "failed", "cancelled")
UNREACHABLE = 6
SHUTDOWN = GRACE + 5.0
"""Seconds in which a worker that was told to stop has ended."""
UNHURRIED = 5.0
"""Seconds on top of that: the server and the agents have to be given a processor, too."""
NEVER = 60.0
"""Seconds after which not even a busy machine is an excuse."""
ODD_LINES = 40
"""Lines of a worker's log, beside those of its tasks, for each thing that was done to it."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that was broken."""

    rule: str
    text: str
    task: int | None = None
    attempt: int | None = None


@dataclass(slots=True)
class Judge:
    """Everything that is known at the end."""

    environment: Environment
    fleet: Fleet
    hand: Hand
    ledger: Ledger = field(init=False)
    tasks: dict[int, dict[str, Any]] = field(init=False)
    gone: set[int] = field(init=False)
    allowed: list[str] = field(default_factory=list)
    began: float = field(default_factory=lambda: difference())

    def verdict(self) -> list[Violation]:
        """All violations."""
        self.ledger = read(self.environment.ledger)
        rows = self.environment.rows("SELECT * FROM tasks")
        pruned = {row["task"]["id"]: {**row["task"], "runs": row["runs"]} for row in self.environment.rows(_PRUNED)}
        self.gone = set(pruned)
        self.tasks = pruned | {row["id"]: row for row in self.environment.rows(_ENDED)}
        self.tasks |= {row["id"]: {**row, "runs": []} for row in rows if row["id"] not in self.tasks}
        self.workers = {str(row["id"]): row for row in self.environment.rows(_WORKERS)}
        self.offset = difference()
        self.slack = SLACK + abs(self.offset - self.began)
        found: list[Violation] = []
        for rule in (
            self._terminal,
            self._counted,
            self._recorded,
            self._families,
            self._overlaps,
            self._alive_after_record,
            self._audited,
            self._exits,
            self._tracebacks,
            self._lengths,
        ):
            found += rule()
        return found

    workers: dict[str, dict[str, Any]] = field(init=False)
    offset: float = field(init=False)
    slack: float = SLACK

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _terminal(self) -> Iterator[Violation]:
        for id_, task in self.tasks.items():
            if task["status"] not in ENDED:
                yield Violation("terminal", f"is {task['status']} at the end", id_, task["attempt"])
            if task["claimed_by"] is not None:
                yield Violation("terminal", "is ended and still claimed", id_)
        for id_ in sorted(self.hand.added - set(self.tasks)):
            yield Violation("terminal", "was added, and is neither there nor pruned", id_)

    def _counted(self) -> Iterator[Violation]:
        rows = self.environment.rows("SELECT task_id, count(*) AS n FROM audit WHERE action = 'retry' GROUP BY 1")
        retries = Counter({row["task_id"]: row["n"] for row in rows})
        for id_, task in self.tasks.items():
            attempts = [run["attempt"] for run in task["runs"]]
            if attempts != list(range(1, task["attempt"] + 1)):
                yield Violation("one run an attempt", f"attempt {task['attempt']}, runs of {attempts}", id_)
            if task["max_retries"] is not None and task["retry_count"] > task["max_retries"]:
                yield Violation("retries", f"{task['retry_count']} of {task['max_retries']}", id_)
            statuses = Counter(run["status"] for run in task["runs"])
            # A run that ended well while its task was being cancelled leaves it cancelled; a retry may do it again.
            if statuses["done"] > 1 + retries[id_]:
                yield Violation(
                    "done once", f"{statuses['done']} runs are done, it was opened {retries[id_]} times", id_
                )
            last = task["runs"][-1] if task["runs"] else None
            if task["status"] == "done" and (last is None or last["status"] != "done"):
                yield Violation("done once", "is done without a last run that is", id_)
            if task["status"] == "done" and last and task["result"] != last["result"]:
                yield Violation("done once", "its result is not that of its run", id_)

    def _recorded(self) -> Iterator[Violation]:
        runs = {(id_, run["attempt"]): run for id_, task in self.tasks.items() for run in task["runs"]}
        for line in self.ledger.broken:
            yield Violation("ledger", f"cannot be read: {line!r}")
        for (id_, attempt), signs in self.ledger.signs.items():
            run = runs.get((id_, attempt))
            if run is None:
                yield Violation("no side effect without a run", f"{signs.kind} left signs, no run", id_, attempt)
            if signs.begins != 1:
                yield Violation("one execution an attempt", f"{signs.begins} begins, pids {signs.pids}", id_, attempt)
        for (id_, attempt), run in runs.items():
            if run["status"] == "done":
                done = self.ledger.signs.get((id_, attempt))
                if done is None or (done.begins, done.ends) != (1, 1):
                    yield Violation("done is complete", f"done, but the ledger says {done}", id_, attempt)
                if run["result"] != f"{id_}.{attempt}":
                    yield Violation("done is complete", f"has the result {run['result']!r}", id_, attempt)

    def _families(self) -> Iterator[Violation]:
        signs = self.ledger.of_task()
        for row in self.environment.rows("SELECT task_id, depends_on FROM task_dependencies"):
            child, parent = row["task_id"], row["depends_on"]
            if child not in signs:
                continue
            first = min(each.first for each in signs[child].values())
            done = [each.ended_at for each in signs.get(parent, {}).values() if each.ended_at is not None]
            if not done or min(done) > first + self.slack:
                yield Violation("after", f"began before {parent}, which it needs, was done", child)
            if parent in self.tasks and self.tasks[parent]["status"] != "done":
                yield Violation("after", f"ran although {parent} is {self.tasks[parent]['status']}", child)

    # -- time ---------------------------------------------------------------------------------------------------------

    def _run(self, id_: int, attempt: int) -> dict[str, Any] | None:
        return next((run for run in self.tasks[id_]["runs"] if run["attempt"] == attempt), None)

    def _frozen(self, id_: int, attempt: int, last: float) -> bool:
        """Whether the attempt's worker stood still when it should have ended its agents, so that nobody did in time.

        Because it was stopped, or because it got no processor.
        """
        run = self._run(id_, attempt)
        worker = None if run is None else self.workers.get(str(run["worker_id"]))
        if worker is None or worker["dead_at"] is None:
            return False
        lease_end = float(worker["renewed"]) + self.offset + LEASE
        margin = KILL_GRACE + 1.0
        return any(
            start <= lease_end and (end >= lease_end - margin - 1.0) and last <= end + KILL_GRACE + 6.0
            for start, end in _merged(
                [*self.fleet.frozen.get(worker["pid"], []), *self.fleet.watch.stalls(worker["pid"])]
            )
        )

    def _overlaps(self) -> Iterator[Violation]:
        for id_, attempts in self.ledger.of_task().items():
            if id_ not in self.tasks:
                continue
            for earlier, later in ((a, b) for a in attempts for b in attempts if a < b):
                one, other = attempts[earlier], attempts[later]
                if one.last > other.first + SLACK:
                    text = f"{one.kind}: still there {one.last - other.first:.2f} s after attempt {later} began"
                    if self._frozen(id_, earlier, one.last):
                        self.allowed.append(f"task {id_} attempt {earlier} {text}")
                    else:
                        yield Violation("no overlap", text + self._about(id_, earlier, one), id_, earlier)

    def _alive_after_record(self) -> Iterator[Violation]:
        for (id_, attempt), signs in self.ledger.signs.items():
            run = self._run(id_, attempt) if id_ in self.tasks else None
            if run is None:
                continue
            late = signs.last - (float(run["recorded"]) + self.offset)
            if late > self.slack:
                text = f"{signs.kind}: wrote {late:.2f} s after its run ({run['status']}) was recorded"
                if run["status"] == "lost" and self._frozen(id_, attempt, signs.last):
                    self.allowed.append(f"task {id_} attempt {attempt} {text}")
                else:
                    yield Violation("gone when recorded", text + self._about(id_, attempt, signs), id_, attempt)

    def _about(self, id_: int, attempt: int, signs: Signs) -> str:
        run = self._run(id_, attempt)
        worker = self.workers.get(str(run["worker_id"])) if run else None
        if run is None or worker is None:
            return ""
        renewed = float(worker["renewed"]) + self.offset
        return (
            f"; {run['status']} ({run['cause']}), on {worker['name']} pid {worker['pid']}, seen {signs.first:.2f} to"
            f" {signs.last:.2f}, recorded {float(run['recorded']) + self.offset:.2f}, worker renewed {renewed:.2f},"
            f" dead: {worker['dead_why']}, stopped: {self.fleet.frozen.get(worker['pid'])},"
            f" without a processor: {self.fleet.watch.stalls(worker['pid'])}"
        )

    # -- around -------------------------------------------------------------------------------------------------------

    def _audited(self) -> Iterator[Violation]:
        rows = self.environment.rows("SELECT action, reason, task_id FROM audit WHERE actor = 'chaos'")
        written: dict[str, list[int]] = {}
        for row in rows:
            if row["reason"] is not None:
                written.setdefault(row["reason"], []).append(row["task_id"])
        for deed in self.hand.deeds:
            found = sorted(written.get(deed.reason, []))
            if (
                deed.sure
                and found != sorted(deed.tasks)
                and not (deed.action == "retry" and set(deed.tasks) <= set(found))
            ):
                yield Violation("audit", f"{deed.action} ({deed.reason}) changed {deed.tasks}, audited {found}")

    def _exits(self) -> Iterator[Violation]:
        registered = {worker["pid"] for worker in self.workers.values()}
        worked = {str(run["worker_id"]) for task in self.tasks.values() for run in task["runs"]}
        worked_as = {worker["pid"] for id_, worker in self.workers.items() if id_ in worked}
        for each in self.fleet.exits:
            if each.asked is None:
                continue
            # Before it was a worker it ends like any program that is told to, or finds no database (6, then it is
            # started again): also when it had been registered and the answer was lost.
            early = (each.code == -signal.SIGTERM and each.pid not in registered) or (
                each.code == UNREACHABLE and each.pid not in worked_as
            )
            if each.code != 0 and not early:
                yield Violation("exit code", f"worker {each.name} pid {each.pid} ended with {each.code}")
            stood_still = any(end > each.asked for _, end in self.fleet.frozen.get(each.pid, []))
            late = each.seconds - each.starved > SHUTDOWN + UNHURRIED or each.seconds > NEVER
            if late and not stood_still:
                text = f"worker {each.name} pid {each.pid} took {each.seconds:.1f} s"
                yield Violation("shutdown", f"{text}, for {each.starved:.1f} s of them without a processor")

    def _tracebacks(self) -> Iterator[Violation]:
        for file, lines in self._logs():
            for number, line in enumerate(lines):
                if "Traceback" in line or " CRITICAL " in line:
                    text = " | ".join(lines[number : number + 12])
                    yield Violation("traceback", f"{file.name} line {number + 1}: {text[:1500]}")

    def _lengths(self) -> Iterator[Violation]:
        for file, lines in self._logs():
            faults = sum(self.hand.done.values()) + len(self.fleet.exits) + 5
            limit = 4 * sum(task["attempt"] for task in self.tasks.values()) + ODD_LINES * faults
            if len(lines) > limit:
                yield Violation("log", f"{file.name} has {len(lines)} lines, expected at most {limit}")

    def _logs(self) -> Iterator[tuple[Path, list[str]]]:
        for file in sorted(self.environment.logs.glob("*.log")):
            yield file, file.read_text(errors="replace").splitlines()

    def counts(self) -> dict[str, Any]:
        """What happened, in numbers."""
        statuses = Counter(str(task["status"]) for task in self.tasks.values())
        runs = Counter(str(run["status"]) for task in self.tasks.values() for run in task["runs"])
        late = sum(run["late"] is not None for task in self.tasks.values() for run in task["runs"])
        return {
            "tasks": dict(sorted(statuses.items())),
            "runs": dict(sorted(runs.items())),
            "late": late,
            "pruned": len(self.gone),
            "ledger_lines": self.ledger.lines,
            "executions": len(self.ledger.signs),
            "processes_started": sum(member.starts for member in self.fleet.members),
            "exits": dict(
                sorted(Counter("killed" if e.asked is None else str(e.code) for e in self.fleet.exits).items())
            ),
            "workers_registered": len(self.workers),
            "workers_dead": sum(worker["dead_at"] is not None for worker in self.workers.values()),
            "slots": SLOTS * len(self.fleet.members),
        }


def difference() -> float:
    """The boot clock less the clock of the day; a thread may be held up between the two, so several times."""
    return max(boot_clock() - time.time() for _ in range(20))


def _merged(spans: list[list[float]]) -> list[list[float]]:
    """*spans* with those put together between which a worker had no time to end its agents."""
    merged: list[list[float]] = []
    for start, end in sorted(spans):
        if merged and start - merged[-1][1] < KILL_GRACE + 3.0:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    return merged


def as_json(violations: list[Violation]) -> list[dict[str, Any]]:
    """For the report."""
    return [asdict(violation) for violation in violations]


_ENDED = (
    "SELECT tasks.*, (SELECT coalesce(json_agg(r ORDER BY r.attempt), '[]') FROM"
    " (SELECT runs.*, extract(epoch FROM recorded_at) AS recorded FROM runs WHERE task_id = tasks.id) AS r)"
    " AS runs FROM tasks WHERE status IN ('done', 'failed', 'cancelled')"
)
"""All ended tasks, each with its runs as one list of JSON objects."""
_PRUNED = (
    "SELECT gone.what AS task, (SELECT coalesce(jsonb_agg(r.what || jsonb_build_object('recorded',"
    " extract(epoch FROM (r.what ->> 'recorded_at')::timestamptz)) ORDER BY (r.what ->> 'attempt')::int), '[]')"
    " FROM chaos.gone AS r WHERE r.kind = 'runs' AND r.what -> 'task_id' = gone.what -> 'id') AS runs"
    " FROM chaos.gone WHERE kind = 'tasks'"
)
"""The same of what was pruned, as ``Environment`` has kept it."""
_WORKERS = "SELECT *, extract(epoch FROM renewed_at)::float8 AS renewed FROM workers"
