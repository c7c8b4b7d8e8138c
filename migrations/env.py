"""How Alembic runs the migrations: from ``orchestrator db upgrade`` (which hands in its connection, already under the
migration lock) or from the ``alembic`` command in a checkout (which takes ORCHESTRATOR_DATABASE_URL).

Each migration says in its module whether workers of the version before may go on with it::

    revision = "0002"
    compatible = True

and that is written to ``orchestrator_revisions`` beside the version, online and offline alike.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from alembic import context
from alembic.runtime.migration import MigrationContext, MigrationInfo
from alembic.script import Script
from sqlalchemy import Connection, text

from orchestrator.database.engine import make_engine
from orchestrator.database.schema import LOCK_KEY, REVISIONS_TABLE, VERSION_TABLE
from orchestrator.domain.entities import Base

target_metadata = Base.metadata


def note_revision(
    ctx: MigrationContext, step: MigrationInfo, heads: Collection[Any], run_args: Mapping[str, Any]
) -> None:
    """Keep ``orchestrator_revisions`` in step with the version table, inside the same transaction."""
    revision = step.up_revision
    if not isinstance(revision, Script):
        return
    name = revision.revision.replace("'", "''")
    if step.is_upgrade:
        compatible = bool(getattr(revision.module, "compatible", False))
        ctx.impl.execute(
            text(
                f"CREATE TABLE IF NOT EXISTS {REVISIONS_TABLE} (revision text PRIMARY KEY,"
                " compatible boolean NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
            )
        )
        ctx.impl.execute(
            text(f"INSERT INTO {REVISIONS_TABLE} (revision, compatible) VALUES ('{name}', {str(compatible).lower()})")
        )
    else:
        ctx.impl.execute(text(f"DELETE FROM {REVISIONS_TABLE} WHERE revision = '{name}'"))


def ours(name: str | None, kind: str, _parents: object) -> bool:
    """Leave our own bookkeeping, and other people's tables in the same database, out of comparisons."""
    return kind != "table" or name in target_metadata.tables


def configure(**options: Any) -> None:
    """What online and offline have in common."""
    context.configure(
        target_metadata=target_metadata,
        version_table=VERSION_TABLE,
        include_name=ours,
        on_version_apply=note_revision,
        compare_server_default=True,
        **options,
    )


def run_offline() -> None:
    """Print the SQL; no database is needed."""
    configure(dialect_name="postgresql", literal_binds=True, dialect_opts={"paramstyle": "named"})
    with context.begin_transaction():
        context.run_migrations()


def run_with(connection: Connection) -> None:
    """Run on a connection whose transaction the caller owns."""
    configure(connection=connection)
    context.run_migrations()


def run_online() -> None:
    """Run on the connection that was handed in, else on one of our own, in one transaction under the same lock."""
    given = context.config.attributes.get("connection")
    if given is not None:
        run_with(given)
        return
    url = context.get_x_argument(as_dictionary=True).get("url") or os.environ.get("ORCHESTRATOR_DATABASE_URL")
    if not url:
        raise SystemExit(
            "set ORCHESTRATOR_DATABASE_URL, or give the database: alembic -x url=postgresql://HOST/NAME ..."
        )
    engine = make_engine(url, pool_size=1, pooler="transaction")
    try:
        with engine.begin() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
            run_with(connection)
    finally:
        engine.dispose()


if context.is_offline_mode():
    run_offline()
else:
    run_online()
