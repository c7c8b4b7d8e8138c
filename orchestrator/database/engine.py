"""Engines and session factories: how a database URL becomes connections.

The URL goes to libpq as it is, so everything that libpq knows works (several hosts, ``target_session_attrs``,
``sslmode``, ``service``, ``options``). Nothing here sets session state: behind a transaction-mode pooler it would leak
to strangers, so units of work use ``SET LOCAL``. The time zone of a session is left to the server and the user.
"""

from __future__ import annotations

import logging
import re
import time
from bisect import bisect_left
from typing import Any
from urllib.parse import unquote, urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection, QueuePool

from orchestrator.database.lines import SILENCE, Line
from orchestrator.database.transient import stale_statement
from orchestrator.errors import InvalidInput

log = logging.getLogger("orchestrator.database")

SCHEMES = ("postgresql", "postgresql+psycopg", "postgres")
POOLERS = (None, "session", "transaction")

DEFAULTS = {
    "connect_timeout": "10",
    "keepalives": "1",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    # Without it a statement sent into a dead network waits for the kernel's retransmissions: a quarter of an hour.
    "tcp_user_timeout": "30000",
}
"""Connection parameters unless the URL says otherwise."""


WAIT_BOUNDS = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)
"""Upper bounds in seconds of the buckets of ``pool_waits``; one more takes what is longer."""


class _Pool(QueuePool):
    """A pool that counts how long its units waited for a connection, a new one being made included."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.waits = [0] * (len(WAIT_BOUNDS) + 1)
        self.waited = 0.0

    def _do_get(self) -> ConnectionPoolEntry:
        began = time.perf_counter()
        entry = super()._do_get()
        took = time.perf_counter() - began
        # Without a lock: a count that two threads lose is worth less than the lock would cost each unit.
        self.waits[bisect_left(WAIT_BOUNDS, took)] += 1
        self.waited += took
        return entry


def pool_waits(engine: Engine) -> tuple[list[int], float]:
    """How many units of *engine* waited how long for a connection, by WAIT_BOUNDS, and their seconds together."""
    pool = engine.pool
    return (list(pool.waits), pool.waited) if isinstance(pool, _Pool) else ([0] * (len(WAIT_BOUNDS) + 1), 0.0)


def make_engine(
    url: str,
    *,
    pool_size: int = 4,
    pooler: str | None = None,
    application_name: str = "orchestrator",
    silence: float = SILENCE,
) -> Engine:
    """Make an engine for ``url``. Nothing connects until the first use.

    - ``pool_size`` is a hard limit, without overflow: a worker's number of connections is a promise to the operator.
    - ``pooler="transaction"`` is for PgBouncer in transaction mode and turns prepared statements off; so does any pooler
      that is found to be there while ``pooler`` is None. ``"session"`` is for one that leaves a session to its client.
    - ``silence``: seconds without an answer after which the server is asked whether one will come.

    Raises InvalidInput for a URL that cannot be used; the first connection raises it for a database that is not UTF-8.
    """
    if pooler not in POOLERS:
        raise InvalidInput(
            f"pooler is {pooler!r}, expected 'transaction' or 'session'",
            hint='set pooler = "transaction" for PgBouncer in transaction mode, else leave it out',
        )
    parameters = connection_parameters(url, application_name=application_name)
    options: dict[str, Any] = {"prepare_threshold": None} if pooler == "transaction" else {}

    def connect() -> Line:
        connection = Line.open(parameters, silence=silence, cursor_factory=psycopg.RawCursor, **options)
        _require_utf8(connection)
        if pooler is None:
            connection.look()
            if connection.pooled:
                connection.prepare_threshold = None
        elif pooler == "transaction":
            connection.pooled = True
        return connection

    def check(context: ExceptionContext) -> None:
        _leave_a_standby(context)
        _leave_a_lost_line(context)
        if stale_statement(context.original_exception):
            if getattr(context.original_exception, "sqlstate", None) != "0A000":
                log.warning("a pooler changes the sessions beneath prepared statements: none are used from now on")
                options["prepare_threshold"] = None
            context.is_disconnect = True

    engine = create_engine(
        "postgresql+psycopg://",
        creator=connect,
        # $1 as the server takes it: the driver would look for its own %(name)s in every long statement, every time.
        paramstyle="numeric_dollar",
        poolclass=_Pool,
        pool_size=pool_size,
        max_overflow=0,
        pool_pre_ping=False,  # a round trip for every unit; what ``_replace_ended`` misses is retried by ``transient``
        pool_use_lifo=True,
        use_native_hstore=False,  # would look the type up on the first connection
    )
    event.listen(engine, "handle_error", check)
    event.listen(engine, "checkout", _replace_ended)
    return engine


def sessions(engine: Engine) -> sessionmaker[Session]:
    """A factory of Sessions. ``expire_on_commit`` is off: an entity that a unit returns is read after its commit."""
    return sessionmaker(engine, expire_on_commit=False)


def alone(connection: Connection) -> Connection:
    """Make each statement on *connection* a transaction of its own, until it goes back to the pool; return it.

    For units that are one statement: it saves the round trips of BEGIN and COMMIT, and the time that locks are held
    meanwhile. Commit all the same: on the connection of another engine than ours nothing is changed.
    """
    line = connection.connection.dbapi_connection
    if isinstance(line, Line):
        line.alone = True
    return connection


def connection_parameters(url: str, *, application_name: str = "orchestrator") -> dict[str, Any]:
    """The keyword arguments for ``psycopg.connect``. Raises InvalidInput; no message ever shows the password."""
    conninfo = _libpq_url(url)
    try:
        parameters: dict[str, Any] = dict(conninfo_to_dict(conninfo))
    except psycopg.Error as error:
        raise InvalidInput(
            f"the database URL {shown(url)} is not valid: {_reason(str(error), conninfo)}",
            hint="expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE",
        ) from None
    for name, value in DEFAULTS.items():
        parameters.setdefault(name, value)
    parameters.setdefault("application_name", application_name)
    if str(parameters.get("host", "")).startswith("/"):
        # libpq would go to the address in PGHOSTADDR instead of the socket.
        parameters.setdefault("hostaddr", "")
    # PGCLIENTENCODING must not decide how the bytes of a transcript are read.
    parameters["client_encoding"] = "utf8"
    return parameters


def shown(url: str) -> str:
    """``url`` as it may be shown: without its password, and without any password among its parameters."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "(not shown: it does not begin with postgresql://)"
    authority, slash, tail = rest.partition("/")
    if "@" in tail.partition("?")[0]:
        # An unescaped slash in the password: where it ends is a guess, so nothing before the last @ is shown.
        return f"{scheme}://***@{_without_secrets(rest.rpartition('@')[2])}"
    if "@" in authority:
        user = authority.partition("@")[0].partition(":")[0]
        authority = f"{user}:***@{authority.rpartition('@')[2]}" if ":" in authority.rpartition("@")[0] else authority
    return f"{scheme}://{authority}{slash}{_without_secrets(tail)}"


def _without_secrets(text: str) -> str:
    return re.sub(r"(?i)((?:ssl)?password=)[^&]*", r"\1***", text)


def _libpq_url(url: str) -> str:
    """``url`` spelled for libpq; refuses what libpq would misread instead of refusing."""
    if not url.strip():
        raise InvalidInput("the database URL is empty", hint="expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE")
    scheme, separator, rest = url.strip().partition("://")
    if not separator:
        raise InvalidInput(
            "the database URL has no scheme", hint="expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        )
    if scheme not in SCHEMES:
        name, _, driver = scheme.partition("+")
        if name in ("postgresql", "postgres"):
            raise InvalidInput(
                f"the database URL asks for the driver {driver!r}; only psycopg is used here",
                hint="write postgresql:// instead",
            )
        raise InvalidInput(
            f"the database URL begins with {scheme!r}, expected postgresql",
            hint="only PostgreSQL 14 or later can be used: postgresql://USER:PASSWORD@HOST:PORT/DATABASE",
        )
    authority, _, tail = rest.partition("/")
    path = tail.partition("?")[0]
    misread = authority.partition("?")[0].count("@") > 1 or "@" in path or "#" in authority
    # user:pa?word@host reads as host "user", port "pa": there is an @, but only behind the question mark.
    before, question, after = authority.partition("?")
    misread = misread or bool(question and "@" not in before and "@" in after and ":" in before)
    if misread:
        raise InvalidInput(
            f"the database URL {shown(url)} has a character in its user name or password that must be encoded",
            hint="write @ as %40, / as %2F, : as %3A, ? as %3F, # as %23 and % as %25 in the password",
        )
    return "postgresql://" + _joined_hosts(rest)


def _joined_hosts(rest: str) -> str:
    """Several ``host=NAME:PORT`` parameters (SQLAlchemy's spelling) as libpq's one list; else ``rest`` as it is."""
    front, question, query = rest.partition("?")
    pairs = [part.partition("=") for part in query.split("&") if part]
    hosts = [unquote(value) for name, _, value in pairs if name == "host"]
    if not question or len(hosts) < 2:
        return rest
    names, ports = [], []
    for host in hosts:
        name, _, port = host.partition(":")
        names.append(name)
        ports.append(port or "5432")
    others = ["=".join((name, value)) for name, _, value in pairs if name not in ("host", "port")]
    return front + "?" + "&".join([*others, "host=" + ",".join(names), "port=" + ",".join(ports)])


def _reason(message: str, conninfo: str) -> str:
    """libpq's reason, unless it quotes something that could be a part of the password."""
    try:
        parts = urlsplit(conninfo)
        password = parts.netloc.rpartition("@")[0].partition(":")[2]
    except ValueError:
        password = conninfo
    line = message.strip().splitlines()[0] if message.strip() else "it cannot be read"
    quoted = re.findall(r'"([^"]*)"', line)
    if password and any(text and (text in password or password in text or text in conninfo) for text in quoted):
        return re.sub(r'"[^"]*"', '"..."', line)
    return line


def _require_utf8(connection: Line) -> None:
    """Refuse a database in another encoding: what an agent says would be lost at the first foreign letter.

    The server reports its encoding when a connection is made, so this costs no round trip.
    """
    encoding = connection.info.parameter_status("server_encoding")
    if encoding in (None, "UTF8"):
        return
    name = connection.info.dbname
    connection.close()
    raise InvalidInput(
        f"the database {name!r} is encoded in {encoding}, expected UTF8",
        hint=f"make another: CREATE DATABASE {name}_utf8 ENCODING 'UTF8' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'",
    )


def _leave_a_standby(context: ExceptionContext) -> None:
    """After a failover the old primary may come back read-only under connections that still work: drop them all."""
    if getattr(context.original_exception, "sqlstate", None) == "25006":
        context.is_disconnect = True


def _leave_a_lost_line(context: ExceptionContext) -> None:
    """What fails in the driver itself leaves a connection that nothing more can be said to, not even ROLLBACK.

    It may not know that yet: a session that was ended amid several statements at once is left in pipeline mode.
    """
    error = context.original_exception
    if context.connection is not None and isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
        context.is_disconnect = True


def _replace_ended(connection: Line, record: ConnectionPoolEntry, _fairy: PoolProxiedConnection) -> None:
    """A session that was ended in its idle time (an idle limit, an operator, a restart) costs nobody a failed unit."""
    connection.alone = False
    if not record.info.get("used"):
        record.info["used"] = True  # it was made just now; the pool would give up after two dead ones
    elif connection.ended():
        raise DisconnectionError("the server has ended the session")
