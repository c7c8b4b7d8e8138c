"""The hand: adds work, operates like people do, and breaks what can break. All by seeded random sources.

Two threads: people may have to wait for the database, the one that breaks things never does. What that begins it undoes
later, when it is due. At most one fault at a time hits a place of the fleet, and one place at least is left alone.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import psycopg

from orchestrator.database.transient import transient
from orchestrator.domain.outcome import RetryPolicy
from orchestrator.errors import Conflict, DatabaseUnavailable, NotFound
from orchestrator.liveness import boot_clock
from orchestrator.repositories.filters import TaskFilter
from orchestrator.repositories.retention import RetentionRepository
from orchestrator.service import Orchestrator
from orchestrator.settings import Settings
from tests.chaos.environment import Environment
from tests.chaos.fleet import KINDS, LEASE, Fleet, Member

BACKLOG = 40
"""Live tasks that the hand keeps up."""
SHORT, LONG = (0.3, LEASE / 2), (LEASE + 1, LEASE * 2)
STEPS = (0, 1, 2, 3, 5, 8, 15, 30, 60)
"""How long agents work, in fifths of a second: many short ones, some for longer than a lease."""
ENDINGS = ("done",) * 12 + ("later",) * 3 + ("transient", "permanent")
PRUNE_AGE = 10.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Deed:
    """One act of an operator: ``reason`` is in the audit trail; ``sure`` is False when its answer was lost."""

    action: str
    reason: str
    tasks: tuple[int, ...]
    sure: bool


class Nobody(Exception):
    """There is no place of the fleet that the act could hit, or no task."""


Act = tuple[int, str, Callable[[], None]]
"""How often, its name, and what it does."""


@dataclass
class Hand:
    """Acts until it is told to stop, then heals."""

    environment: Environment
    fleet: Fleet
    random: Random
    deeds: list[Deed] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    added: set[int] = field(default_factory=set)
    restarts: list[list[float]] = field(default_factory=list)
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _number: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        settings = Settings(heartbeat=1.0, lease=LEASE)
        self._orchestrator = Orchestrator(self.environment.cluster.url, settings=settings)
        self._retention = RetentionRepository(self._orchestrator._engine)
        self._choose = Random(self.random.random())
        self._over = threading.Event()
        self._people = threading.Thread(target=self._be_people, name="people", daemon=True)

    def act_until(self, end: float) -> None:
        """Act at random until *end* (boot clock)."""
        self._people.start()
        faults: list[Act] = [
            (4, "kill", self._kill),
            (1, "kill with guardian", self._kill_with_guardian),
            (2, "stop shortly", lambda: self._stop(SHORT)),
            (3, "stop long", lambda: self._stop(LONG)),
            (2, "freeze network shortly", lambda: self._network("freeze", SHORT)),
            (3, "freeze network long", lambda: self._network("freeze", LONG)),
            (2, "swallow answers", self._swallow),
            (3, "cut network", self._cut),
            (2, "refuse connections", lambda: self._network("refuse", LONG)),
            (1, "restart database", self._restart),
            (3, "terminate backends", self._terminate_backends),
            (3, "deploy", self._deploy),
            (1, "deploy without network", self._deploy_without_network),
        ]
        next_act = boot_clock()
        while (now := boot_clock()) < end:
            self._undo(now)
            self.fleet.revive()
            if now >= next_act:
                self._do(self.random, faults)
                next_act = boot_clock() + self.random.uniform(0.3, 1.6)
            wait(0.05)

    def _be_people(self) -> None:
        acts: list[Act] = [(5, "cancel", self._cancel), (4, "retry", self._retry), (1, "prune", self._prune)]
        while not self._over.wait(self._choose.uniform(0.3, 1.6)):
            self._fill()
            self._do(self._choose, acts)

    def _do(self, choose: Random, acts: list[Act]) -> None:
        ((_, name, act),) = choose.choices(acts, [weight for weight, _, _ in acts])
        try:
            act()
        except Nobody:
            say(f"{name}: nobody is free for it")
        except (DatabaseUnavailable, psycopg.OperationalError) as error:
            say(f"{name}: {str(error).splitlines()[0]}")
        else:
            say(name)
            self.done[name] += 1

    def heal(self) -> None:
        """Undo everything at once, and let people finish what they do."""
        self._over.set()
        while self._due:
            _, _, undo = heapq.heappop(self._due)
            undo()
        self.fleet.heal()
        if self._people.ident is not None:
            self._people.join(60)
            if self._people.is_alive():
                raise RuntimeError("an operation has not come back a minute after everything was healed")

    def close(self) -> None:
        """Close its connections."""
        self._over.set()
        self._orchestrator.close()

    def _undo(self, now: float) -> None:
        """Undo what is due."""
        while self._due and self._due[0][0] <= now:
            _, _, undo = heapq.heappop(self._due)
            undo()

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        heapq.heappush(self._due, (boot_clock() + seconds, next(self._number), undo))

    # -- faults -------------------------------------------------------------------------------------------------------

    def _victim(self) -> Member | None:
        """A place that works and that nothing is done to, unless it is the last one."""
        free = [member for member in self.fleet.members if not member.busy and self.fleet.works(member)]
        return self.random.choice(free) if len(free) > 1 else None

    def _hit(self, seconds: float, begin: Callable[[Member], None], undo: Callable[[Member], None]) -> None:
        member = self._victim()
        if member is None:
            raise Nobody
        member.busy = True
        begin(member)

        def later() -> None:
            undo(member)
            member.busy = False

        self._later(seconds, later)

    def _kill(self) -> None:
        self._hit(self.random.uniform(0.0, 3.0), self.fleet.kill, lambda _member: None)

    def _kill_with_guardian(self) -> None:
        kill = lambda member: self.fleet.kill(member, guardian=True)  # noqa: E731
        self._hit(self.random.uniform(0.0, 3.0), kill, lambda _member: None)

    def _stop(self, span: tuple[float, float]) -> None:
        self._hit(self.random.uniform(*span), self.fleet.freeze, self.fleet.thaw)

    def _network(self, how: str, span: tuple[float, float]) -> None:
        self._hit(
            self.random.uniform(*span), lambda member: getattr(member.proxy, how)(), lambda member: member.proxy.thaw()
        )

    def _swallow(self) -> None:
        def undo(member: Member) -> None:
            member.proxy.cut()  # what was swallowed never comes; a connection that lost bytes does not live on
            member.proxy.thaw()

        self._hit(self.random.uniform(*LONG), lambda member: member.proxy.mute(), undo)

    def _cut(self) -> None:
        self._hit(0.0, lambda member: member.proxy.cut(), lambda _member: None)

    def _deploy(self) -> None:
        self._hit(0.0, self.fleet.terminate, lambda _member: None)

    def _deploy_without_network(self) -> None:
        how = self.random.choice(["freeze", "refuse"])

        def begin(member: Member) -> None:
            getattr(member.proxy, how)()
            self.fleet.terminate(member)

        self._hit(self.random.uniform(*LONG), begin, lambda member: member.proxy.thaw())

    def _restart(self) -> None:
        began = boot_clock()
        self.environment.end_server(self.random.choice(["immediate", "immediate", "kill", "fast"]))
        wait(self.random.uniform(0.0, 1.0))
        self.environment.start_server()
        self.restarts.append([began, boot_clock()])

    def _terminate_backends(self) -> None:
        rows = self.environment.rows(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        pids = [row["pid"] for row in rows]
        some = self.random.sample(pids, min(len(pids), self.random.randint(1, 6)))
        self.environment.rows("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS pid", some)

    # -- what people do -----------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        def fill() -> None:
            (row,) = self.environment.rows(
                "SELECT count(*) AS n FROM tasks WHERE status NOT IN ('done', 'failed', 'cancelled')"
            )
            while row["n"] < BACKLOG:
                row["n"] += self._add()

        try:
            fill()
        except (DatabaseUnavailable, psycopg.OperationalError, NotFound, Conflict) as error:
            say(f"  add: {str(error).splitlines()[0]}")

    def _add(self) -> int:
        choose = self._choose
        family: list[dict[str, Any]] = []
        for number in range(choose.choice([1, 1, 1, 2, 3])):
            task: dict[str, Any] = {
                "agent": choose.choice(KINDS),
                "input": f"{choose.choice(STEPS)} {choose.choice(ENDINGS)}",
                "max_retries": choose.choice([0, 1, 2, 3]),
                "retry": RetryPolicy(0.2, 2.0, 1.0),
                "priority": choose.choice([0, 0, 0, 1, 5]),
                "name": f"n{next(self._number)}",
            }
            if number and choose.random() < 0.8:
                task["after"] = [choose.choice(family)["name"]]
            if choose.random() < 0.2:
                task["unique_key"] = f"key-{choose.randint(1, 8)}"
            family.append(task)
        added = self._orchestrator.add_many(family)
        self.added.update(each.id for each in added)
        return sum(each.created for each in added)

    def _pick(self, statuses: list[str], most: int) -> list[int]:
        rows = self.environment.rows("SELECT id FROM tasks WHERE status = ANY(%s) ORDER BY id", statuses)
        ids = [row["id"] for row in rows]
        return sorted(self._choose.sample(ids, min(len(ids), self._choose.randint(1, most))))

    def _cancel(self) -> None:
        statuses = self._choose.choice([["running"], ["running"], ["pending", "blocked"], ["pending", "running"]])
        self._operate("cancel", self._pick(statuses, 3))

    def _retry(self) -> None:
        self._operate("retry", self._pick(["failed", "cancelled"], 3))

    def _operate(self, action: str, ids: list[int]) -> None:
        if not ids:
            raise Nobody
        reason = f"chaos {next(self._number)}"
        operations = self._orchestrator.operations
        try:
            method = operations.cancel if action == "cancel" else operations.retry
            wanted = TaskFilter(ids=ids)
            changed = transient(lambda: method(wanted, actor="chaos", reason=reason), give_up_after=0)
        except (NotFound, Conflict):
            self.deeds.append(Deed(action, reason, (), True))
        except Exception:
            self.deeds.append(Deed(action, reason, tuple(ids), False))
            raise
        else:
            self._orchestrator.notify({*changed.wake, "cancel"})
            touched = (*changed.ids, *changed.requested)
            self.deeds.append(Deed(action, reason, touched, True))

    def _prune(self) -> None:
        transient(lambda: self._retention.prune(PRUNE_AGE, kinds=("tasks",), actor="chaos"), give_up_after=0)


def say(text: str) -> None:
    """A line of progress, for people."""
    print(f"{boot_clock():10.1f}  {text}", file=sys.stderr, flush=True)


def wait(seconds: float) -> None:
    """Let time pass."""
    threading.Event().wait(seconds)
