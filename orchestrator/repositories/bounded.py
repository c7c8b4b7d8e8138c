"""Reads that cannot hurt the queue: one picture, read-only, with a time limit, by indexes wherever there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.errors import DatabaseUnavailable

SECONDS = 2.0
"""Longest time of one statement of a screen."""

# All of it is local to the transaction: behind a transaction-mode pooler a session setting would leak to strangers.
# Sequential scans are off because a screen must not change its plan with the table's statistics; without them the
# planner would call a query so expensive that it compiles it, which takes longer than the query.
_BOUNDS = text(
    "SELECT set_config('transaction_read_only', 'on', true), set_config('statement_timeout', :timeout, true),"
    " set_config('enable_seqscan', :scan, true), set_config('jit', 'off', true)"
)


# Told with BEGIN, so it ends with the transaction as well. All statements see one instant: a task that moves between two
# of them is in neither twice nor nowhere.
_ONE_PICTURE = {"isolation_level": "REPEATABLE READ"}


@contextmanager
def bounded(sessions: sessionmaker[Session], seconds: float = SECONDS, *, scan: bool = False) -> Iterator[Session]:
    """A read-only transaction whose statements all see the same instant and may take *seconds* each.

    With *scan* it may read whole tables.

    Raises DatabaseUnavailable, with the server's error as its cause, for a statement that takes longer.
    """
    with sessions() as session:
        session.connection(execution_options=_ONE_PICTURE)
        session.execute(_BOUNDS, {"timeout": f"{int(seconds * 1000)}ms", "scan": "on" if scan else "off"})
        try:
            yield session
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != "57014":
                raise
            raise DatabaseUnavailable(
                f"reading took longer than {seconds:g} s and was given up",
                hint="ask for less (a filter, a smaller --limit), or see what the server is busy with in"
                " pg_stat_activity",
                seconds=seconds,
            ) from error


__all__ = ["SECONDS", "bounded"]
