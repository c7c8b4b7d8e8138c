"""How the tables in a database differ from what this version expects of them."""

from __future__ import annotations

import warnings
from typing import Any

from sqlalchemy import Connection

from orchestrator.database.schema import VERSION_TABLE
from orchestrator.domain.entities import Base


def drift(connection: Connection) -> list[str]:
    """Each difference between the models and the tables, in words; what is there beside them is not looked at."""
    from alembic.autogenerate import compare_metadata  # late, as in schema: few commands need Alembic
    from alembic.runtime.migration import MigrationContext

    tables = Base.metadata.tables

    def ours(name: str | None, kind: str, _parents: object) -> bool:
        return kind != "table" or name in tables

    context = MigrationContext.configure(
        connection,
        opts={"version_table": VERSION_TABLE, "include_name": ours, "compare_type": True},
    )
    with warnings.catch_warnings():
        # It compares the text of a generated column, not its meaning, and says so.
        warnings.simplefilter("ignore")
        found = compare_metadata(context, Base.metadata)
    return sorted(_words(each) for each in found)


def _words(difference: Any) -> str:
    if isinstance(difference, list):
        return "; ".join(sorted(_words(each) for each in difference))
    kind = difference[0]
    if kind in ("add_table", "remove_table"):
        return f"table {difference[1].name} is {'missing' if kind == 'add_table' else 'not ours'}"
    if kind in ("add_column", "remove_column"):
        return f"column {difference[2]}.{difference[3].name} is {'missing' if kind == 'add_column' else 'not ours'}"
    if kind.startswith("modify_"):
        _, _, table, column, _, have, need = difference
        return f"column {table}.{column}: {kind.removeprefix('modify_')} is {have}, expected {need}"
    thing, state = difference[1], "missing" if kind.startswith("add_") else "not ours"
    return f"{kind.partition('_')[2]} {getattr(thing, 'name', thing)} is {state}"


__all__ = ["drift"]
