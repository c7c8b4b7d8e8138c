"""Which agents may start how many attempts now: open breakers, slow starts after one, and logins that agents share.

A worker leaves agents that may not start out of what it claims for, so the claim itself knows nothing of this. An attempt
that was refused shuts its agents' gate here at once and, by the recorder's next turn, for all workers; what other workers
found out is read once a second. From the provider's reset on one worker at a time claims one task as a probe. It opens
the gate for all when it is served: at its first sign of life, or at its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC
from uuid import UUID

from orchestrator.agents.protocol import Agent
from orchestrator.domain.given import Login
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.settle import LIMITED
from orchestrator.domain.words import OutcomeClass
from orchestrator.repositories.breakers import BreakerRepository, OpenBreaker, Refusal
from orchestrator.repositories.claims import Known
from orchestrator.worker.observer import Attempt

PROBE_LEASE = 30.0
"""Seconds after which another worker may probe if the one that does is not heard of."""
PROBE_PATIENCE = 300.0
"""Seconds that a probe works without a word until it counts as served: some agents say nothing before their end."""
PROBE_EVERY = 1.0
"""Seconds between two looks for a task to probe with."""
SLOW_START = 6.0
"""Seconds after a breaker closed in which starts double each second: 1, 2, 4, …"""

UNDECIDED = frozenset({OutcomeClass.INTERRUPTED, OutcomeClass.CANCELLED, OutcomeClass.LOST})
"""How a probe may end without an answer of the provider."""


@dataclass(slots=True)
class _Shut:
    kind: OutcomeClass
    due: float
    probed: bool = False


class Gates:
    """The gates of one worker. Called by the claimer, the recorder and the event loop; nothing here waits for long."""

    def __init__(self, agents: Sequence[Agent], known: Sequence[Known], breakers: BreakerRepository) -> None:
        self._breakers = breakers
        self._known = list(known)
        self._of: dict[tuple[str, str | None], str] = {}
        self._groups: dict[str, list[Known]] = {}
        self._logins: dict[str, Login] = {}
        for agent, each in zip(agents, known, strict=True):
            login: Login | None = getattr(agent, "login", None)
            name = each.route if login is None else login.name
            self._of[each.agent, each.definition] = name
            self._groups.setdefault(name, []).append(each)
            if login is not None and (login.concurrency is not None or login.stagger > 0):
                self._logins[name] = _stricter(self._logins.get(name), login)
        self._lock = threading.Lock()
        self._shut: dict[str, _Shut] = {}
        self._slow: dict[str, tuple[float, int]] = {}
        self._started: dict[str, float] = {}
        self._probe_at: dict[str, float] = {}
        self._probing: dict[str, Attempt] = {}
        self._refusals: list[Refusal] = []
        self._passed: list[str] = []
        self._released: list[str] = []

    # -- the claimer --------------------------------------------------------------------------------------------------

    def offers(self, free: int, running: Callable[[], Iterable[Attempt]]) -> list[tuple[list[Known], int]]:
        """What to claim for, and how many of each at most, when *free* slots are to be filled beside what is *running*."""
        if not (self._shut or self._slow or self._logins):
            return [(self._known, free)]
        now = time.monotonic()
        offers: list[tuple[list[Known], int]] = []
        rest: list[Known] = []
        counts: dict[str, int] | None = None
        with self._lock:
            for name, group in self._groups.items():
                if name in self._shut:
                    continue
                limit = self._allowed_slowly(name, now)
                if (login := self._logins.get(name)) is not None:
                    if login.stagger > 0:
                        early = now - self._started.get(name, -login.stagger) < login.stagger
                        limit = min(limit, 0 if early else 1)
                    if login.concurrency is not None:
                        if counts is None:
                            counts = self._count(running())
                        limit = min(limit, login.concurrency - counts.get(name, 0))
                if limit >= free:
                    rest += group
                elif limit > 0:
                    offers.append((group, limit))
        if rest:
            offers.append((rest, free))
        return offers

    def _allowed_slowly(self, name: str, now: float) -> int:
        slow = self._slow.get(name)
        if slow is None:
            return 1 << 30
        since, started = slow
        if now - since > SLOW_START:
            del self._slow[name]
            return 1 << 30
        return int(2 ** (now - since)) - started

    def _count(self, running: Iterable[Attempt]) -> dict[str, int]:
        counts: dict[str, int] = {}
        for attempt in running:
            name = self._name(attempt.claim)
            counts[name] = counts.get(name, 0) + 1
        return counts

    def started(self, claims: Iterable[Claim]) -> None:
        """Count the starts of *claims*."""
        if not (self._slow or self._logins):
            return
        now = time.monotonic()
        with self._lock:
            for claim in claims:
                name = self._name(claim)
                self._started[name] = now
                if name in self._slow:
                    since, started = self._slow[name]
                    self._slow[name] = since, started + 1

    def soon(self, pause: float) -> float:
        """*pause*, or less where a gate may let more through before it is over."""
        if not (self._shut or self._slow or self._logins):
            return pause
        now = time.monotonic()
        with self._lock:
            waits = [
                max(shut.due, self._probe_at.get(name, 0.0)) - now
                for name, shut in self._shut.items()
                if not shut.probed
            ]
            staggered = (
                self._started[name] + login.stagger - now
                for name, login in self._logins.items()
                if name in self._started
            )
            waits += [wait for wait in staggered if wait > 0]
            if self._slow:
                waits.append(0.1)
        return min(pause, max(0.05, min(waits))) if waits else pause

    def probes(self, worker: UUID) -> list[tuple[str, list[Known]]]:
        """The logins that this worker is to probe now, with the agents to claim one task for."""
        if not self._shut:
            return []
        now = time.monotonic()
        with self._lock:
            due = [
                name
                for name, shut in self._shut.items()
                if shut.due <= now and not shut.probed and self._probe_at.get(name, 0.0) <= now
            ]
            for name in due:
                self._probe_at[name] = now + PROBE_EVERY
        mine = [name for name in due if self._breakers.probe(name, worker, PROBE_LEASE)]
        with self._lock:
            for name in mine:
                if name in self._shut:
                    self._shut[name].probed = True
        return [(name, self._groups[name]) for name in mine]

    def probing(self, name: str, attempt: Attempt) -> None:
        """*attempt*, not started yet, is the probe of the login *name*."""
        with self._lock:
            attempt.probe = name
            self._probing[name] = attempt

    def nothing_to_probe(self, name: str) -> None:
        """There was no task for a probe."""
        with self._lock:
            self._released.append(name)
            if name in self._shut:
                self._shut[name].probed = False

    # -- the event loop -----------------------------------------------------------------------------------------------

    def ended(self, attempt: Attempt, outcome: Outcome) -> bool:
        """Learn from how *attempt* ended; say whether another one of its login may start for it."""
        refused = outcome.status in LIMITED
        name = self._name(attempt.claim) if refused or self._logins or attempt.probe is not None else ""
        if not refused and attempt.probe is None:
            return name in self._logins
        with self._lock:
            probe = attempt.probe == name
            if probe:
                attempt.probe = None
                self._probing.pop(name, None)
            if refused:
                self._refusals.append(self._refusal(name, attempt.claim, outcome, probe))
                # Until the answer of the database: nothing more is started, and nothing is probed.
                self._shut[name] = _Shut(outcome.status, time.monotonic() + PROBE_EVERY * 2, probed=True)
            elif outcome.status in UNDECIDED:
                self._released.append(name)
            else:
                self._pass(name)
        return False

    def _refusal(self, name: str, claim: Claim, outcome: Outcome, probe: bool) -> Refusal:
        at = outcome.retry_at
        return Refusal(
            name,
            tuple(each.agent for each in self._groups[name]),
            outcome.status,
            outcome.message or outcome.cause,
            claim.task_id,
            at if at is None or at.tzinfo is not None else at.replace(tzinfo=UTC),
            outcome.retry_after,
            probe,
        )

    def _pass(self, name: str) -> None:
        self._passed.append(name)
        if self._shut.pop(name, None) is not None:
            self._slow[name] = time.monotonic(), 0

    # -- the recorder -------------------------------------------------------------------------------------------------

    @property
    def news(self) -> bool:
        """Whether there is something that other workers should know."""
        return bool(self._refusals or self._passed or self._released)

    def exchange(self, worker: UUID | None) -> bool:
        """Tell the database what is new here, and hear what is new there; say whether a gate has opened.

        Raises DatabaseUnavailable; what was not told is told the next time.
        """
        self._tell(worker)
        with self._lock:
            for name, attempt in list(self._probing.items()):
                if attempt.served or attempt.age > PROBE_PATIENCE:
                    attempt.probe = None
                    del self._probing[name]
                    self._pass(name)
        self._tell(worker)
        if worker is not None:
            for name in list(self._probing):
                self._breakers.probe(name, worker, PROBE_LEASE)
        return self._hear(self._breakers.read(), worker)

    def _tell(self, worker: UUID | None) -> None:
        with self._lock:
            refusals, self._refusals = self._refusals, []
            passed, self._passed = self._passed, []
            released, self._released = self._released, []
        try:
            if refusals:
                self._breakers.refuse(refusals)
                refusals = []
            while worker is not None and passed:
                self._breakers.passed(passed[0], worker)
                passed.pop(0)
            while worker is not None and released:
                self._breakers.release(released[0], worker)
                released.pop(0)
        except BaseException:
            with self._lock:
                self._refusals[:0], self._passed[:0], self._released[:0] = refusals, passed, released
            raise

    def _hear(self, found: Sequence[OpenBreaker], worker: UUID | None) -> bool:
        now = time.monotonic()
        with self._lock:
            ours = {each.login for each in self._refusals}
            shut = {name: each for name, each in self._shut.items() if name in ours}
            for each in found:
                if each.login in self._groups and each.login not in ours and each.login not in self._passed:
                    probed = each.probe_by is not None and each.login not in self._released
                    shut[each.login] = _Shut(each.kind, now + each.seconds, probed)
            opened = [name for name in self._shut if name not in shut]
            for name in opened:
                self._slow[name] = now, 0
            self._shut = shut
        return bool(opened)

    def _name(self, claim: Claim) -> str:
        return self._of[claim.agent, claim.definition]


def _stricter(one: Login | None, other: Login) -> Login:
    if one is None:
        return other
    bounds = [each.concurrency for each in (one, other) if each.concurrency is not None]
    return Login(one.name, min(bounds, default=None), max(one.stagger, other.stagger))


__all__ = ["Gates"]
