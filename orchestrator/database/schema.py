"""The schema: which revision the database has, which one this version needs, and how to get there.

``upgrade`` is one transaction under one transaction-level advisory lock: any number of processes may call it at once,
a kill half-way leaves the revision that was there before, and a transaction-mode pooler does no harm. What each applied
migration said of itself (``compatible``: workers of the version before may go on) is kept in ``orchestrator_revisions``,
so that an older worker can judge a newer schema that it does not know.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psycopg
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from orchestrator.database.engine import make_engine
from orchestrator.database.transient import UNREACHABLE_HINT
from orchestrator.domain.entities import Base
from orchestrator.errors import DatabaseUnavailable, InvalidInput, SchemaOutOfDate

if TYPE_CHECKING:  # Alembic takes longer to import than a short command to work, and only a migration needs it
    from alembic.config import Config

log = logging.getLogger(__name__)

VERSION_TABLE = "orchestrator_version"
REVISIONS_TABLE = "orchestrator_revisions"
LOCK_KEY = 0x6F72_6368_6573_7472
"""The advisory lock of migrations: "orchestr" in ASCII."""

DDL_LOCK_SECONDS = 5.0
"""How long one try waits for a table that is in use; whoever comes after an ALTER TABLE waits behind it."""

UPGRADE_HINT = "run orchestrator db upgrade"


class Status(NamedTuple):
    """``have`` is None for a database without our tables; ``compatible``: this version can work with ``have``."""

    have: str | None
    need: str
    compatible: bool


def migrations_directory() -> Path:
    """Where the migrations are: in the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_migrations", package.parent / "migrations"):
        if (folder / "env.py").exists():
            return folder
    raise InvalidInput(f"the migrations are missing: neither {package}/_migrations nor {package.parent}/migrations")


def configuration() -> Config:
    """Alembic's configuration, without alembic.ini."""
    from alembic.config import Config

    config = Config(output_buffer=io.StringIO(), stdout=io.StringIO())
    # Alembic's configuration interpolates percent signs, which a folder's name may contain.
    config.set_main_option("script_location", str(migrations_directory()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def head() -> str:
    """The revision that this version needs."""
    known = _revisions()
    if not known:
        raise InvalidInput(f"there is no migration in {migrations_directory()}")
    return known[-1]


def status(target: str | Engine) -> Status:
    """Which revision ``target`` has and which this version needs. Changes nothing. Raises DatabaseUnavailable."""
    with _connected(target) as connection:
        return _status(connection)


def check(engine: Engine) -> None:
    """Return if this version can work with the database's schema, else raise SchemaOutOfDate.

    Accepted besides the very revision: one that is exactly one step newer and marked compatible. Raises
    DatabaseUnavailable when the database cannot be asked.
    """
    found = status(engine)
    if found.compatible:
        return
    _refuse_unknown(found)
    raise SchemaOutOfDate(
        f"schema is at {found.have or 'nothing'}, needs {found.need}: {UPGRADE_HINT}",
        hint=UPGRADE_HINT,
        have=found.have,
        need=found.need,
    )


def upgrade(target: str | Engine, wait: float = 60.0, say: Callable[[str], None] | None = None) -> Status:
    """Bring the schema to the revision that this version needs; return what it was before.

    All in one transaction: on return it is committed, on any error nothing has changed. Others that upgrade at the same
    moment are waited for, at most ``wait`` seconds in all; ``say`` is told once that there is a wait. A schema newer
    than this version is left as it is if it is compatible. Raises SchemaOutOfDate, DatabaseUnavailable, InvalidInput.
    """
    tell = say or log.info
    deadline = time.monotonic() + wait
    told = False
    with _connected(target) as connection:
        before = _status(connection)
        if before.compatible:
            return before
        connection.rollback()
        while True:
            try:
                with connection.begin():
                    if not connection.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": LOCK_KEY}):
                        if not told:
                            tell("another process is upgrading the schema; waiting for it")
                            told = True
                        _limit_lock_waits(connection, max(deadline - time.monotonic(), 0.001))
                        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
                    # Whoever held the lock may have done the work: what counts is what is there now.
                    now = _status(connection)
                    if not now.compatible:
                        _refuse_unknown(now)
                        _migrate(connection)
                return before
            except DBAPIError as error:
                state = getattr(error.orig, "sqlstate", None)
                if state not in ("55P03", "40P01"):
                    raise _explained(error) from error
                if time.monotonic() >= deadline:
                    raise DatabaseUnavailable(
                        f"the schema could not be upgraded within {wait:.0f} s: other sessions hold locks on it",
                        hint="see pg_locks for who; try again, or stop the workers first",
                    ) from error
                if not told:
                    tell("tables are in use by other sessions; trying again")
                    told = True
                time.sleep(0.2)


def empty(target: str | Engine) -> None:
    """Delete every row of our tables, and start ids anew; committed on return. For test databases."""
    with _connected(target) as connection:
        tables = connection.scalars(
            text(
                "SELECT quote_ident(relname) FROM pg_class WHERE relkind = 'r' AND relname = ANY(:names)"
                " AND relnamespace = current_schema()::regnamespace ORDER BY 1"
            ),
            {"names": sorted(Base.metadata.tables)},
        ).all()
        if tables:
            connection.execute(text(f"TRUNCATE {', '.join(tables)} RESTART IDENTITY CASCADE"))
            connection.commit()


def script(revision: str = "head") -> str:
    """The SQL of all migrations up to ``revision``, for a database that one may not touch from here."""
    from alembic import command

    config = configuration()
    buffer = io.StringIO()
    config.output_buffer = buffer
    command.upgrade(config, revision, sql=True)
    return buffer.getvalue()


# -- inside ------------------------------------------------------------------------------------------------------------


@contextmanager
def _connected(target: str | Engine) -> Iterator[Connection]:
    engine = make_engine(target, pool_size=1, pooler="transaction") if isinstance(target, str) else target
    try:
        try:
            # The rollback at its end is inside, too: a session that was ended meanwhile fails there first.
            with engine.connect() as connection:
                yield connection
        except DBAPIError as error:
            raise _explained(error) from error
    finally:
        if isinstance(target, str):
            engine.dispose()


def _explained(error: DBAPIError) -> Exception:
    """The error that a person can act on; a fault of ours stays what it is."""
    cause = error.orig
    if isinstance(cause, psycopg.errors.DuplicateTable | psycopg.errors.DuplicateObject):
        return InvalidInput(
            f"the database already holds tables that are not ours: {str(cause).splitlines()[0]}",
            hint="use a database of its own, or a schema of its own: ?options=-csearch_path%3Dorchestrator",
        )
    if isinstance(cause, psycopg.errors.InsufficientPrivilege):
        return InvalidInput(
            f"the database user may not do this: {str(cause).splitlines()[0]}",
            hint="upgrade with the user that owns the tables, or GRANT it the right to create them",
        )
    if isinstance(cause, psycopg.OperationalError):
        return DatabaseUnavailable(
            f"the database cannot be reached: {str(cause).strip() or type(cause).__name__}",
            hint=UNREACHABLE_HINT,
        )
    return error


def _refuse_unknown(found: Status) -> None:
    """Raise SchemaOutOfDate for a revision of a later version."""
    if found.have is not None and not _known(found.have):
        raise SchemaOutOfDate(
            f"schema is at {found.have}, which this version does not know (it needs {found.need})",
            hint="install the version of orchestrator that the other processes use",
            have=found.have,
            need=found.need,
        )


def _limit_lock_waits(connection: Connection, seconds: float) -> None:
    connection.execute(
        text("SELECT set_config('lock_timeout', :limit, true)"), {"limit": f"{max(1, int(seconds * 1000))}ms"}
    )


def _end_with_the_client(connection: Connection) -> None:
    """Have the server look whether we are still there: a killed upgrade must not hold its locks to the statement's end."""
    try:
        with connection.begin_nested():
            connection.execute(text("SELECT set_config('client_connection_check_interval', '1s', true)"))
    except DBAPIError as error:  # a server's system that cannot tell
        log.debug("the server does not watch for clients that are gone: %s", error.orig)


def _migrate(connection: Connection) -> None:
    from alembic import command

    _limit_lock_waits(connection, DDL_LOCK_SECONDS)
    _end_with_the_client(connection)
    config = configuration()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _status(connection: Connection) -> Status:
    need = head()
    have = None
    if _exists(connection, VERSION_TABLE):
        have = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
    return Status(have, need, have == need or (have is not None and _is_next_and_compatible(connection, have, need)))


def _is_next_and_compatible(connection: Connection, have: str, need: str) -> bool:
    if _known(have) or not _exists(connection, REVISIONS_TABLE):
        return False
    rows = connection.execute(text(f"SELECT revision, compatible FROM {REVISIONS_TABLE}"))
    applied = {str(revision): bool(compatible) for revision, compatible in rows}
    unknown = [revision for revision in applied if not _known(revision)]
    return need in applied and unknown == [have] and applied[have]


def _exists(connection: Connection, table: str) -> bool:
    return connection.scalar(text("SELECT to_regclass(:table) IS NOT NULL"), {"table": table}) is True


def _known(revision: str) -> bool:
    return revision in _revisions()


def _revisions() -> list[str]:
    """Our revisions, oldest first: the numbers that the files of the migrations begin with."""
    return sorted(file.name[:4] for file in (migrations_directory() / "versions").glob("[0-9]*.py"))
