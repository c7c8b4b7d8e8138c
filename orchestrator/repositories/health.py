"""``HealthRepository``: what ``doctor`` and ``metrics`` read: catalogs, statistics views and counters, never history."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import uuid4

import psycopg
from sqlalchemy import Engine, func, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.database.drift import drift
from orchestrator.database.engine import connection_parameters
from orchestrator.database.transient import transient
from orchestrator.domain import histogram, snapshot
from orchestrator.domain.alerts import DEFAULTS, Thresholds
from orchestrator.domain.diagnosis import DatabaseFacts, QueueFacts, SessionFacts
from orchestrator.domain.entities import Base, WorkerRow
from orchestrator.domain.snapshot import AgentRow, Alert
from orchestrator.domain.values import value
from orchestrator.errors import InvalidInput
from orchestrator.repositories import overview
from orchestrator.repositories.bounded import bounded

T = TypeVar("T")

OLD = 300.0
"""Seconds from which on a transaction counts as old: vacuum cannot remove what it may still see."""
IDLE = 10.0
"""Seconds from which on a session of ours has no business to be idle in a transaction."""
DEAD_ROWS = 50_000
BLOAT_TIMES, BLOAT_BYTES = 3, 16 << 20
"""An index is bloated when it is larger than so many times what it needs, and by so many bytes."""
HEARING = 2.0
"""Seconds that a notification may take."""
DRIFT_SECONDS = 15.0

SETTINGS = (
    "autovacuum",
    "default_transaction_isolation",
    "default_transaction_read_only",
    "fsync",
    "full_page_writes",
    "idle_session_timeout",
    "statement_timeout",
    "synchronous_commit",
    "track_counts",
)


@value
class AgentHour:
    """What ended of one agent in the last hour."""

    done: int = 0
    failed: int = 0
    other: int = 0
    tokens: int = 0
    cost_usd: float = 0.0
    unknown_cost: int = 0


@value
class QueueNumbers:
    """What ``metrics`` tells of the queue.

    ``holds`` are counts by bucket of ``domain.histogram`` over the last hour, ``hold_ms`` their sum; ``finished`` the
    planner's estimates; ``oldest_transaction`` the seconds of the oldest one that keeps vacuum from its work.
    ``lock_waiters`` are our sessions that wait for a lock, ``lock_wait`` the seconds that the longest has waited.
    """

    now: datetime
    agents: tuple[AgentRow, ...]
    workers: tuple[snapshot.WorkerRow, ...]
    alerts: tuple[Alert, ...]
    hours: dict[str, AgentHour]
    holds: list[int]
    hold_ms: float
    finished: dict[str, int | None]
    oldest_transaction: float
    lock_waiters: int
    lock_wait: float


class HealthRepository:
    """Reading the state of the database itself."""

    def __init__(self, engine: Engine, url: str, thresholds: Thresholds = DEFAULTS) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)
        self._url = url
        self._thresholds = thresholds

    def database(self) -> DatabaseFacts:
        """What holds for any database, whatever its schema. Raises DatabaseUnavailable, InvalidInput."""
        return _once(self._database)

    def queue(self) -> QueueFacts:
        """What holds for our tables. Raises DatabaseUnavailable, InvalidInput when they may not be read."""
        return _once(self._queue)

    def numbers(self) -> QueueNumbers:
        """What ``metrics`` tells, from the reads of ``status``. Raises DatabaseUnavailable, InvalidInput."""
        return _once(self._numbers)

    def _numbers(self) -> QueueNumbers:
        with bounded(self._sessions) as session:
            now = overview.database_now(session)
            workers = overview.read_workers(session, now)
            running, _ = overview.read_running(session, 1000)
            agents = overview.read_agents(session, overview.read_work(session), workers, now)
            hold, oldest = overview.read_lock_hold(session, now), overview.oldest_transaction(session)
            found = overview.read_alerts(session, now, workers, agents, running, hold, self._thresholds)
            waiting = session.execute(_LOCK_WAITS).one()
            claims = session.execute(_HOLDS, {"since": now - timedelta(hours=1)}).all()
            return QueueNumbers(
                now=now,
                agents=tuple(agents),
                workers=tuple(workers),
                alerts=tuple(found),
                hours={
                    row[0]: AgentHour(int(row[1]), int(row[2]), int(row[3]), int(row[4]), float(row[5]), int(row[6]))
                    for row in session.execute(_HOURS, {"since": now - timedelta(hours=1)})
                },
                holds=histogram.added(row.holds for row in claims),
                hold_ms=float(sum(row.hold_ms for row in claims)),
                finished=overview.finished_estimate(session),
                oldest_transaction=oldest or 0.0,
                lock_waiters=waiting.waiters,
                lock_wait=max(0.0, waiting.longest),
            )

    def _database(self) -> DatabaseFacts:
        with bounded(self._sessions) as session:
            asked = time.time()
            now = float(session.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
            answered = time.time()
            row = session.execute(_SERVER).one()
            settings: dict[str, str] = dict(session.execute(_SETTINGS, {"names": list(SETTINGS)}).all())
            return DatabaseFacts(
                version_number=row.number,
                version=row.version,
                encoding=row.encoding,
                read_only=row.read_only,
                clock_ahead=(asked + answered) / 2 - now,
                clock_error=(answered - asked) / 2,
                settings=settings,
                connections=row.connections,
                max_connections=row.max_connections,
                sees_all=row.sees_all,
                old_transactions=_sessions(session, _OLD, OLD),
                idle_in_transaction=_sessions(session, _IDLE, IDLE),
                prepared=_sessions(session, _PREPARED, OLD),
                slots=_sessions(session, _SLOTS, OLD),
                autovacuum_off=_autovacuum_off(session, settings),
                pooled=_pooled(session),
                heard=self._heard(),
            )

    def _queue(self) -> QueueFacts:
        with bounded(self._sessions, DRIFT_SECONDS, scan=True) as session:
            different = drift(session.connection())
        with bounded(self._sessions) as session:
            now = overview.database_now(session)
            valid = {name: well for name, well in session.execute(_INDEXES)}  # noqa: C416 - a row is no pair to mypy
            return QueueFacts(
                drift=tuple(different),
                missing_indexes=tuple(sorted(_expected() - valid.keys())),
                invalid_indexes=tuple(sorted(name for name, well in valid.items() if not well)),
                dead_rows=tuple(
                    (row.relname, row.dead, row.live)
                    for row in session.execute(_DEAD, {"least": DEAD_ROWS, "names": sorted(Base.metadata.tables)})
                ),
                lock_hold=overview.read_lock_hold(session, now),
                workers=tuple(overview.read_workers(session, now)),
                worker_versions=_versions(session),
                bloated=tuple(
                    (row.relname, row.size, row.needed)
                    for row in session.execute(
                        _BLOAT,
                        {"times": BLOAT_TIMES, "bytes": BLOAT_BYTES, "names": sorted(Base.metadata.tables)},
                    )
                ),
            )

    def _heard(self) -> bool:
        """Whether a notification arrives on a connection of ours."""
        channel, said = "orchestrator_doctor", uuid4().hex
        parameters = connection_parameters(self._url, application_name="orchestrator doctor")
        try:
            with contextlib.ExitStack() as stack:
                one, other = (
                    stack.enter_context(contextlib.closing(psycopg.connect(**parameters, autocommit=True)))
                    for _ in range(2)
                )
                one.execute(f"LISTEN {channel}")
                other.execute("SELECT pg_notify(%s, %s)", (channel, said))
                heard = any(each.payload == said for each in one.notifies(timeout=HEARING, stop_after=1))
                one.execute(f"UNLISTEN {channel}")
                return heard
        except psycopg.Error:
            return False


def _once(read: Callable[[], T]) -> T:
    """One try; what the server refuses this user is said as such."""
    try:
        return transient(read, give_up_after=0)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != "42501":
            raise
        raise InvalidInput(
            f"the database user may not read this: {str(error.orig).splitlines()[0]}",
            hint="GRANT SELECT ON ALL TABLES IN SCHEMA … to it, or ask as the user of the workers",
        ) from error


def _sessions(session: Session, statement: Any, seconds: float) -> tuple[SessionFacts, ...]:
    rows = session.execute(statement, {"seconds": seconds})
    return tuple(SessionFacts(row.who, row.seconds, row.pid, row.bytes) for row in rows)


def _autovacuum_off(session: Session, settings: dict[str, str]) -> tuple[str, ...]:
    if settings.get("autovacuum") == "off" or settings.get("track_counts") == "off":
        return ("all",)
    return tuple(session.scalars(_VACUUM_OFF, {"names": sorted(Base.metadata.tables)}))


def _pooled(session: Session) -> bool:
    """Whether the session is not the server's own: a pooler gives it a number of its own."""
    driver = session.connection().connection.driver_connection
    pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
    return isinstance(driver, psycopg.Connection) and driver.info.backend_pid != pid


def _expected() -> set[str]:
    names: set[str] = set()
    for table in Base.metadata.sorted_tables:
        names.update(str(index.name) for index in table.indexes)
        names.add(f"{table.name}_pkey")
    return names


def _versions(session: Session) -> tuple[str, ...]:
    """The versions of the live workers. Uses workers_live."""
    return tuple(
        sorted(
            version
            for version in session.scalars(
                select(WorkerRow.version)
                .distinct()
                .where(WorkerRow.stopped_at.is_(None), WorkerRow.dead_at.is_(None))
                .where(WorkerRow.renewed_at > func.clock_timestamp() - timedelta(hours=1))
            )
            if version
        )
    )


_SERVER = text("""
SELECT current_setting('server_version_num')::int AS number, current_setting('server_version') AS version,
       current_setting('server_encoding') AS encoding,
       pg_is_in_recovery() OR current_setting('default_transaction_read_only') = 'on'
         AS read_only,
       (SELECT sum(numbackends) FROM pg_stat_database)::int AS connections,  -- others' sessions may not be ours to see
       current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
         AS max_connections,
       pg_has_role(current_user, 'pg_read_all_stats', 'usage') AS sees_all
""")

_LOCK_WAITS = text("""
SELECT count(DISTINCT l.pid) AS waiters,
       coalesce(extract(epoch FROM clock_timestamp() - min(l.waitstart)), 0)::float8 AS longest
FROM pg_locks AS l JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE NOT l.granted AND a.datname = current_database() AND a.application_name LIKE 'orchestrator%'
""")

# As sessions get them: the present values are those of this very transaction.
_SETTINGS = text("SELECT name, reset_val FROM pg_settings WHERE name = ANY(:names)")

_OLD = text("""
SELECT coalesce(nullif(application_name, ''), backend_type) || ' of ' || coalesce(usename, '?')
         || ', ' || coalesce(state, backend_type) AS who,
       extract(epoch FROM clock_timestamp() - xact_start)::float8 AS seconds, pid, NULL::bigint AS bytes
FROM pg_stat_activity
WHERE (datname = current_database() OR backend_type = 'walsender') AND pid <> pg_backend_pid()
  AND backend_type <> 'autovacuum worker' AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
  AND xact_start < clock_timestamp() - make_interval(secs => :seconds)
ORDER BY xact_start LIMIT 20
""")

_IDLE = text("""
SELECT application_name || ' of ' || coalesce(usename, '?') AS who,
       extract(epoch FROM clock_timestamp() - state_change)::float8 AS seconds, pid, NULL::bigint AS bytes
FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'orchestrator%' AND state LIKE 'idle in transaction%'
  AND state_change < clock_timestamp() - make_interval(secs => :seconds)
ORDER BY state_change LIMIT 20
""")

_PREPARED = text("""
SELECT gid AS who, extract(epoch FROM clock_timestamp() - prepared)::float8 AS seconds, NULL::int AS pid,
       NULL::bigint AS bytes
FROM pg_prepared_xacts
WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => :seconds)
ORDER BY prepared LIMIT 20
""")

_SLOTS = text("""
SELECT slot_name AS who, NULL::float8 AS seconds, active_pid AS pid,
       CASE WHEN NOT pg_is_in_recovery() THEN pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint END AS bytes
FROM pg_replication_slots
WHERE NOT active AND (restart_lsn IS NOT NULL OR xmin IS NOT NULL) AND :seconds > 0
ORDER BY slot_name LIMIT 20
""")

_VACUUM_OFF = text("""
SELECT c.relname FROM pg_class AS c, pg_options_to_table(c.reloptions) AS o
WHERE c.relnamespace = current_schema()::regnamespace AND c.relname = ANY(:names)
  AND o.option_name = 'autovacuum_enabled' AND o.option_value IN ('false', 'off', 'no', '0')
ORDER BY 1
""")

_INDEXES = text("""
SELECT c.relname, i.indisvalid AND i.indisready FROM pg_index AS i
JOIN pg_class AS c ON c.oid = i.indexrelid
WHERE c.relnamespace = current_schema()::regnamespace
""")

# An entry is its columns, as wide as the statistics say, and 20 bytes; pages are two thirds full.
_BLOAT = text("""
SELECT relname, size, needed FROM (
  SELECT c.relname, pg_relation_size(c.oid) AS size,
         (c.reltuples * (coalesce(w.width, 32) + 20) * 1.5)::bigint + 16384 AS needed
  FROM pg_index AS i
  JOIN pg_class AS c ON c.oid = i.indexrelid
  JOIN pg_class AS t ON t.oid = i.indrelid
  LEFT JOIN LATERAL (
    SELECT sum(s.avg_width) AS width FROM pg_attribute AS a
    JOIN pg_stats AS s ON s.schemaname = current_schema() AND s.tablename = t.relname AND s.attname = a.attname
    WHERE a.attrelid = t.oid AND a.attnum = ANY(i.indkey)
  ) AS w ON true
  WHERE t.relnamespace = current_schema()::regnamespace AND t.relname = ANY(:names) AND c.reltuples >= 0
) AS sizes
WHERE size > :times * needed AND size - needed > :bytes
ORDER BY size - needed DESC LIMIT 20
""")

_DEAD = text("""
SELECT relname, n_dead_tup AS dead, n_live_tup AS live FROM pg_stat_user_tables
WHERE schemaname = current_schema() AND relname = ANY(:names) AND n_dead_tup > :least AND n_dead_tup > n_live_tup
ORDER BY 1
""")

# Both use minutes_pkey.
_HOLDS = text("SELECT hold_ms, holds FROM minutes WHERE minute > :since AND agent = ''")

_HOURS = text("""
SELECT agent, sum(done), sum(failed), sum(other), sum(tokens), sum(cost_usd), sum(unknown_cost)
FROM minutes WHERE minute > :since AND agent <> '' GROUP BY agent
""")

__all__ = ["AgentHour", "HealthRepository", "QueueNumbers"]
