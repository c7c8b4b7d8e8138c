"""Faults of the database that pass: told apart, waited out, and said once.

``transient`` goes around one whole unit of work (open a Session, work, commit). The unit must be one that may be done
again after a commit whose answer was lost; what an agent did is never repeated here.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable
from typing import Literal, TypeVar

import psycopg
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_before_delay,
    stop_never,
    stop_when_event_set,
    wait_random_exponential,
)
from tenacity.stop import stop_base

from orchestrator.errors import DatabaseUnavailable

log = logging.getLogger("orchestrator.database")

T = TypeVar("T")
Fault = Literal["connection", "conflict", "read_only", "full", "slow"]

WAITS = {
    # A restart takes a second, a failover half a minute; all workers of a fleet come back at once, hence full jitter.
    "connection": wait_random_exponential(multiplier=0.2, min=0.05, max=5),
    # The other transaction is over as soon as the server has told us: only the next collision is to be avoided.
    "conflict": wait_random_exponential(multiplier=0.01, min=0.002, max=1),
    # The new primary is not promoted, or not known here, yet.
    "read_only": wait_random_exponential(multiplier=0.5, min=0.2, max=5),
    # Out of connections, memory or disk: pressing harder makes it worse.
    "full": wait_random_exponential(multiplier=1, min=0.5, max=15),
    # A statement_timeout of the role, or an operator's pg_cancel_backend: busy now, or somebody wants it less busy.
    "slow": wait_random_exponential(multiplier=0.5, min=0.2, max=15),
}
"""How long to wait before the next try, by kind of fault; seconds."""

_SQLSTATES: dict[str, Fault] = {
    "57P01": "connection",  # admin_shutdown, also pg_terminate_backend
    "57P02": "connection",  # crash_shutdown
    "57P03": "connection",  # cannot_connect_now: starting up
    "57P04": "connection",  # database_dropped: a restore makes it anew
    "57P05": "connection",  # idle_session_timeout
    "57014": "slow",  # query_canceled: statement_timeout
    "25P03": "connection",  # idle_in_transaction_session_timeout ends the session
    "40003": "connection",  # statement_completion_unknown
    "40001": "conflict",  # serialization_failure
    "40P01": "conflict",  # deadlock_detected
    "55P03": "conflict",  # lock_not_available
    "25006": "read_only",  # read_only_sql_transaction: a standby
    "58030": "full",  # io_error
}
_CLASSES: dict[str, Fault] = {"08": "connection", "53": "full"}

SEE_DOCTOR = "; orchestrator doctor says more"
UNREACHABLE_HINT = f"check the database URL and that the server runs{SEE_DOCTOR}"
_HINTS: dict[Fault, str] = {
    "connection": UNREACHABLE_HINT,
    "conflict": "other sessions hold locks on the same rows: see pg_locks, then try again",
    "read_only": "the server is a standby: add target_session_attrs=read-write and all hosts to the URL",
    "full": "the server has no connections, memory or disk left; free some, then try again",
    "slow": "see what the server is busy with in pg_stat_activity, and whether statement_timeout of the role is too short",
}


def classify(error: BaseException) -> Fault | None:
    """Which passing fault ``error`` is, None if it is none: bad data, a broken constraint or a mistake of ours.

    Judged by SQLSTATE; an ``OperationalError`` without one comes from the driver and means the connection.
    """
    if isinstance(error, PoolTimeout):
        return "full"
    cause = driver_error(error)
    if cause is None:
        return None
    state = cause.sqlstate
    if state is not None:
        if stale_statement(cause):
            return "connection"
        return _SQLSTATES.get(state) or _CLASSES.get(state[:2])
    if isinstance(cause, psycopg.OperationalError) and _NO_SLOT.search(str(cause)):
        return "full"  # refused at the door: libpq then tells no SQLSTATE
    if isinstance(cause, psycopg.OperationalError):
        return "connection"
    return "connection" if isinstance(error, DBAPIError) and error.connection_invalidated else None


_NO_SLOT = re.compile(r"too many (clients|connections)|connection slots are reserved|no more connections allowed")


def stale_statement(error: BaseException | None) -> bool:
    """Whether a prepared statement of ours was unknown, or out of date: the connection is not what it was.

    Either a pooler has changed the session beneath it, or a migration has changed the type of a column.
    """
    state = getattr(error, "sqlstate", None)
    if state in ("26000", "42P05"):
        return "_pg3_" in str(error)
    diagnosis = getattr(error, "diag", None)
    return state == "0A000" and getattr(diagnosis, "source_function", None) == "RevalidateCachedQuery"


def driver_error(error: BaseException) -> psycopg.Error | None:
    """The driver's own error inside ``error``."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return cause if isinstance(cause, psycopg.Error) else None


def unavailable(error: BaseException) -> DatabaseUnavailable:
    """The error for people. The caller raises it ``from`` the driver's."""
    fault = classify(error) or "connection"
    text = {
        "connection": "the database cannot be reached",
        "conflict": "the database refused the work because of other sessions",
        "read_only": "the database is read-only",
        "full": "the database has no room for the work",
        "slow": "the database ended a statement that took too long",
    }[fault]
    return DatabaseUnavailable(f"{text}: {reason(error)}", hint=_HINTS[fault])


def reason(error: BaseException) -> str:
    """What the driver said, on one line."""
    said = str(driver_error(error) or error)
    return " ".join(said.split()) or type(error).__name__


def transient(
    operation: Callable[[], T],
    *,
    give_up_after: float | None,
    on_wait: Callable[[Fault, float], None] | None = None,
    stop: threading.Event | None = None,
) -> T:
    """Do ``operation`` until no passing fault stops it; return its value.

    - Only faults that ``classify`` knows are tried again; every other exception passes through at once.
    - ``give_up_after`` is in seconds from the first try and never overrun by a wait; 0 tries once, None never gives up.
    - ``stop`` ends the waiting when it is set; one try is always made.
    - ``on_wait(fault, seconds)`` is called before each wait.

    Raises DatabaseUnavailable, with the driver's error as its cause, when it gives up. The log has one line when the
    database is lost and one when it is back, however many threads are affected.
    """
    stops: stop_base = stop_never if give_up_after is None else stop_before_delay(give_up_after)
    if stop is not None:
        stops = stops | stop_when_event_set(stop)

    pausing = stop or threading.Event()
    tried_at = time.monotonic()

    def before(_state: RetryCallState) -> None:
        nonlocal tried_at
        tried_at = time.monotonic()

    def pause(seconds: float) -> None:
        pausing.wait(seconds)

    def before_sleep(state: RetryCallState) -> None:
        fault = classify(_failure(state))
        if on_wait is not None and fault is not None:
            on_wait(fault, state.upcoming_sleep)

    def after(state: RetryCallState) -> None:
        error = _failure(state)
        fault = classify(error)
        if fault == "conflict":
            log.debug("the database refused a unit of work (%s); try %d", reason(error), state.attempt_number)
        elif fault is not None:
            _episode.begin(reason(error), tried_at)

    def give_up(state: RetryCallState) -> T:
        error = _failure(state)
        if classify(error) is None:
            raise error
        raise unavailable(error) from (driver_error(error) or error)

    retrying = Retrying(
        retry=retry_if_exception(lambda error: classify(error) is not None),
        stop=stops,
        wait=_wait,
        sleep=pause,
        before=before,
        before_sleep=before_sleep,
        after=after,
        retry_error_callback=give_up,
    )
    value = retrying(operation)
    _episode.end(tried_at)
    return value


def _wait(state: RetryCallState) -> float:
    fault = classify(_failure(state))
    return WAITS[fault](state) if fault is not None else 0.0


def _failure(state: RetryCallState) -> BaseException:
    error = state.outcome.exception() if state.outcome is not None else None
    if error is None:
        raise AssertionError("asked for the failure of a try that did not fail")
    return error


class _Episode:
    """One loss of the database in this process: from the first failed unit until every thread that failed was served.

    Not until the first success: with all connection slots taken, or one of two hosts gone, some threads are served and
    others are not, and each would end the other's episode.
    """

    FORGET = 20.0
    """Seconds after which a thread that has not tried again since its failure no longer counts: more than any wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None
        self._ended_at = -math.inf
        self._failing: dict[int, float] = {}

    def begin(self, why: str, tried_at: float) -> None:
        with self._lock:
            now = time.monotonic()
            # A try that began before another thread's success tells of the loss that is over.
            if (self._since is None and tried_at > self._ended_at) or (
                self._since is not None and self._forgotten(now, 6 * self.FORGET)
            ):
                self._since = now
                self._failing.clear()
                log.warning("lost the database: %s; trying again", why)
            self._failing[threading.get_ident()] = now

    def end(self, tried_at: float) -> None:
        since = self._since
        if since is None or tried_at < since:  # the usual case takes no lock; an older try tells nothing of the loss
            return
        with self._lock:
            if self._since is None:
                return
            now = time.monotonic()
            self._failing.pop(threading.get_ident(), None)
            if self._forgotten(now, self.FORGET):
                log.warning("the database is back after %.1f s", now - self._since)
                self._since = None
                self._ended_at = now

    def _forgotten(self, now: float, seconds: float) -> bool:
        """Whether no thread that lives has failed in the last *seconds*, and not been served since."""
        alive = {thread.ident for thread in threading.enumerate()}
        return not any(now - at <= seconds and thread in alive for thread, at in self._failing.items())


_episode = _Episode()
