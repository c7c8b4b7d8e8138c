"""``AlertRepository``: alerts as episodes, and what each hook has been told of them.

Whoever looks writes down what began and what is gone; one process looks for all (``alert_looks``). A hook is told of an
episode by whoever takes its row first: for as long as that may need, the row is nobody else's (``next_try_at``).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.domain.alerts import DEFAULTS, Thresholds
from orchestrator.domain.snapshot import Alert, Episode
from orchestrator.domain.values import value
from orchestrator.repositories import overview
from orchestrator.repositories.bounded import bounded

GONE = 15.0
"""Seconds that an alert must not have been seen for before its episode ends: one look may miss it."""
KEPT_DAYS = 30
TEXT = 500
"""Characters that are kept of a name and of what is the matter."""
RUNNING = 1000


@value
class Wish:
    """What a hook wants to hear: of *kinds* (None: all), once an episode has gone on for *after* seconds."""

    hook: str
    kinds: tuple[str, ...] | None = None
    after: float = 0.0


@value
class Looked:
    """The episodes that one look began and ended."""

    begun: tuple[Episode, ...] = ()
    ended: tuple[Episode, ...] = ()


@value
class Telling:
    """What is to be told to *hook* now: that *episode* has ``begun`` or ``ended``. ``failures``: times that it was not heard."""

    hook: str
    event: str
    episode: Episode
    tries: int
    failures: int


@value
class HookState:
    """How a hook does: what waits to be told to it, what was given up, and the last error (without secrets)."""

    hook: str
    waiting: int
    gave_up: int
    error: str | None


class AlertRepository:
    """The tables alerts, alert_deliveries and alert_looks."""

    def __init__(self, engine: Engine, thresholds: Thresholds = DEFAULTS) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)
        self._thresholds = thresholds

    def look(self, every: float, wishes: Sequence[Wish] = ()) -> Looked | None:
        """Write down which alerts there are, unless somebody did so within *every* seconds: then None.

        Begins and ends episodes, and notes for each of *wishes* what its hook is to be told. Committed on return.
        """
        turn = self._turn(every)
        if turn is None:
            self._wish(wishes)
            return None
        found = self._read()
        with self._sessions.begin() as session:
            # Who read slowly must not end what another has begun meanwhile.
            if session.scalar(_MINE, {"turn": turn}) is None:
                return None
            before = {(row.kind, row.key) for row in session.execute(_OPEN)}
            rows = {(alert.kind, _key(alert)): _row(alert) for alert in found}
            begun = [_episode(session.execute(_BEGIN, row).one()) for key, row in rows.items() if key not in before]
            if again := [row for key, row in rows.items() if key in before]:
                session.execute(_AGAIN, again)
            ended = [_episode(row) for row in session.execute(_END, {"gone": GONE})]
            session.execute(_FORGET, {"days": KEPT_DAYS})
            _add_wishes(session, wishes)
        return Looked(tuple(begun), tuple(ended))

    def open(self) -> list[Episode]:
        """The episodes that go on, the oldest first. Uses alerts_open."""
        with bounded(self._sessions) as session:
            return [_episode(row) for row in session.execute(_EPISODES)]

    def take(self, hook: str, seconds: float) -> Telling | None:
        """The next thing to tell *hook*, for *seconds* nobody else's; committed on return. Uses alert_deliveries_open."""
        with self._sessions.begin() as session:
            row = session.execute(_TAKE, {"hook": hook, "seconds": seconds}).one_or_none()
        return None if row is None else Telling(hook, row.event, _episode(row), row.tries, row.failures)

    def told(self, telling: Telling) -> None:
        """*telling* was heard. Committed on return; nothing happens if it has become somebody else's meanwhile."""
        with self._sessions.begin() as session:
            session.execute(_TOLD, _fence(telling) | {"ended": telling.event == "ended"})

    def not_told(self, telling: Telling, error: str, again: float | None) -> None:
        """*telling* was not heard because of *error*; try again in *again* seconds, None: never. Committed on return."""
        with self._sessions.begin() as session:
            session.execute(_NOT_TOLD, _fence(telling) | {"error": error[:TEXT], "again": again})

    def hooks(self, names: Sequence[str]) -> list[HookState]:
        """How the hooks called *names* do."""
        with bounded(self._sessions, scan=True) as session:
            return [HookState(*row) for row in session.execute(_STATES, {"hooks": list(names)})]

    def _turn(self, every: float) -> datetime | None:
        """Whether it is our turn to look: when this look began; None if somebody else's was within *every* seconds."""
        with self._sessions.begin() as session:
            if not session.scalar(_DUE, {"every": every}):
                return None
            turn: datetime | None = session.scalar(_TURN, {"every": every})
            return turn

    def _wish(self, wishes: Sequence[Wish]) -> None:
        if wishes:
            with self._sessions.begin() as session:
                _add_wishes(session, wishes)

    def _read(self) -> list[Alert]:
        with bounded(self._sessions) as session:
            now = overview.database_now(session)
            workers = overview.read_workers(session, now)
            running, _ = overview.read_running(session, RUNNING)
            agents = overview.read_agents(session, overview.read_work(session), workers, now)
            hold = overview.read_lock_hold(session, now)
            return overview.read_alerts(session, now, workers, agents, running, hold, self._thresholds)


def _add_wishes(session: Session, wishes: Sequence[Wish]) -> None:
    for wish in wishes:
        kinds = None if wish.kinds is None else list(wish.kinds)
        session.execute(_WISH, {"hook": wish.hook, "kinds": kinds, "after": wish.after})


def _key(alert: Alert) -> str:
    """What tells an alert of a kind from the others. A message is no part of it: its numbers change."""
    parts = (alert.subject, alert.task_id if alert.task_id is not None else alert.name, alert.plan)
    return "\x1f".join("" if part is None else str(part) for part in parts)[:TEXT]


def _row(alert: Alert) -> dict[str, Any]:
    return {
        "kind": alert.kind,
        "key": _key(alert),
        "subject": alert.subject,
        "name": alert.name[:TEXT],
        "task_id": alert.task_id,
        "plan": alert.plan,
        "what": alert.what[:TEXT],
        "command": alert.command,
        "heals": alert.heals,
        "since": alert.since,
    }


def _episode(row: Any) -> Episode:
    alert = Alert(row.kind, row.subject, row.name, row.what, row.task_id, row.since, row.command, row.heals, row.plan)
    return Episode(row.id, alert, row.begun_at, row.ended_at)


def _fence(telling: Telling) -> dict[str, Any]:
    return {"alert": telling.episode.id, "hook": telling.hook, "tries": telling.tries}


_DUE = text("""
SELECT NOT EXISTS (
  SELECT FROM alert_looks WHERE id = 1 AND looked_at > clock_timestamp() - make_interval(secs => :every))
""")

_TURN = text("""
INSERT INTO alert_looks AS l (id, looked_at) VALUES (1, clock_timestamp())
ON CONFLICT (id) DO UPDATE SET looked_at = excluded.looked_at
WHERE l.looked_at <= clock_timestamp() - make_interval(secs => :every)
RETURNING looked_at
""")

_MINE = text("SELECT id FROM alert_looks WHERE id = 1 AND looked_at = :turn FOR UPDATE")

_OPEN = text("SELECT kind, key FROM alerts WHERE ended_at IS NULL")

_COLUMNS = "id, kind, subject, name, what, task_id, since, command, heals, plan, begun_at, ended_at"

_BEGIN = text(f"""
INSERT INTO alerts (kind, key, subject, name, task_id, plan, what, command, heals, since)
VALUES (:kind, :key, :subject, :name, :task_id, :plan, :what, :command, :heals, :since)
RETURNING {_COLUMNS}
""")

_AGAIN = text("""
UPDATE alerts SET seen_at = clock_timestamp(), what = :what, command = :command, since = coalesce(since, :since)
WHERE kind = :kind AND key = :key AND ended_at IS NULL
""")

_END = text(f"""
UPDATE alerts SET ended_at = clock_timestamp()
WHERE ended_at IS NULL AND seen_at < clock_timestamp() - make_interval(secs => :gone)
RETURNING {_COLUMNS}
""")

_FORGET = text("""
DELETE FROM alerts WHERE id IN (
  SELECT id FROM alerts WHERE ended_at < clock_timestamp() - make_interval(days => :days) ORDER BY id LIMIT 500)
""")

_WISH = text("""
INSERT INTO alert_deliveries (alert_id, hook)
SELECT id, :hook FROM alerts AS a
WHERE ended_at IS NULL AND begun_at <= clock_timestamp() - make_interval(secs => :after)
  AND (CAST(:kinds AS text[]) IS NULL OR kind = ANY(CAST(:kinds AS text[])))
  AND NOT EXISTS (SELECT FROM alert_deliveries AS d WHERE d.alert_id = a.id AND d.hook = :hook)
ORDER BY id
ON CONFLICT DO NOTHING
""")

_EPISODES = text(f"SELECT {_COLUMNS} FROM alerts WHERE ended_at IS NULL ORDER BY begun_at, id")

# ``next_try_at`` is also the lease of whoever tells it: when that one dies, another tells it again.
_TAKE = text("""
WITH next AS MATERIALIZED (
  SELECT d.alert_id, d.hook FROM alert_deliveries AS d JOIN alerts AS a ON a.id = d.alert_id
  WHERE d.hook = :hook AND d.ended_told_at IS NULL AND d.gave_up_at IS NULL AND d.next_try_at <= clock_timestamp()
    AND (d.begun_told_at IS NULL OR a.ended_at IS NOT NULL)
  ORDER BY d.alert_id LIMIT 1
  FOR NO KEY UPDATE OF d SKIP LOCKED
)
UPDATE alert_deliveries AS d
SET next_try_at = clock_timestamp() + make_interval(secs => :seconds), tries = d.tries + 1
FROM next, alerts AS a
WHERE d.alert_id = next.alert_id AND d.hook = next.hook AND a.id = next.alert_id
RETURNING a.id, a.kind, a.subject, a.name, a.what, a.task_id, a.since, a.command, a.heals, a.plan, a.begun_at, a.ended_at,
  d.tries, d.failures, CASE WHEN d.begun_told_at IS NULL THEN 'begun' ELSE 'ended' END AS event
""")

_TOLD = text("""
UPDATE alert_deliveries
SET begun_told_at = coalesce(begun_told_at, clock_timestamp()),
    ended_told_at = CASE WHEN CAST(:ended AS boolean) THEN clock_timestamp() END,
    next_try_at = clock_timestamp(), failures = 0, error = NULL
WHERE alert_id = :alert AND hook = :hook AND tries = :tries
""")

_NOT_TOLD = text("""
UPDATE alert_deliveries
SET failures = failures + 1, error = :error,
    next_try_at = clock_timestamp() + make_interval(secs => coalesce(CAST(:again AS float8), 0)),
    gave_up_at = CASE WHEN CAST(:again AS float8) IS NULL THEN clock_timestamp() END
WHERE alert_id = :alert AND hook = :hook AND tries = :tries
""")

_STATES = text("""
SELECT hook, count(*) FILTER (WHERE gave_up_at IS NULL AND failures > 0) AS waiting,
       count(*) FILTER (WHERE gave_up_at IS NOT NULL) AS gave_up,
       (array_agg(error ORDER BY next_try_at DESC) FILTER (WHERE error IS NOT NULL))[1] AS error
FROM alert_deliveries WHERE hook = ANY(:hooks) GROUP BY hook ORDER BY hook
""")

__all__ = ["AlertRepository", "HookState", "Looked", "Telling", "Wish"]
