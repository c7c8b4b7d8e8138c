"""``db``: the schema, and this user's embedded server."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli import printing, state
from orchestrator.cli.commands import SETTINGS, SUMMARIES
from orchestrator.cli.options import JsonOption

app = typer.Typer(no_args_is_help=True, help=SUMMARIES["db"], **SETTINGS)


@app.command()
def upgrade(context: typer.Context, as_json: JsonOption = False) -> None:
    """Bring the schema to what this version needs.

    One transaction: on an error nothing has changed. Any number of processes
    may do it at once.

    \b
    Example:
      orchestrator --database-url postgresql://host/agents db upgrade
    """
    from orchestrator.database import schema
    from orchestrator.database.embedded import EmbeddedServer

    own = state.of(context, as_json)
    url = own.settings().database_url or EmbeddedServer(say=printing.note).start()
    before = schema.upgrade(url, say=printing.note)
    changed = before.have != before.need and not before.compatible
    now = schema.status(url) if changed else before
    if as_json:
        printing.document({"before": before.have, "schema": now.have, "needs": now.need, "changed": changed})
    elif changed:
        printing.note(f"schema upgraded from {before.have or 'nothing'} to {now.have}")
    else:
        printing.note(f"schema is at {now.have}: nothing to do")


@app.command()
def status(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show the schema and the server, changing nothing.

    The exit code is 6 if the database is no use as it is.

    \b
    Example:
      orchestrator db status --json
    """
    from orchestrator.database import schema
    from orchestrator.database.embedded import EmbeddedServer
    from orchestrator.database.engine import shown

    own = state.of(context, as_json)
    url = own.settings().database_url
    server = None if url else EmbeddedServer(say=printing.note).status()
    found = None if server is not None and not server.running else schema.status(url or server.url)  # type: ignore[union-attr]
    fits = found is not None and found.compatible
    if as_json:
        printing.document(
            {
                "url": shown(url or server.url),  # type: ignore[union-attr]
                "embedded": server is not None,
                "running": server is None or server.running,
                "pid": server.pid if server else None,
                "home": str(server.home) if server else None,
                "log": str(server.log) if server else None,
                "schema": found.have if found else None,
                "needs": found.need if found else schema.head(),
                "compatible": fits if found else None,
            }
        )
    else:
        from orchestrator.dashboard.text import clean

        printing.text(clean(f"database  {shown(url or server.url)}"))  # type: ignore[union-attr]
        if server is not None:
            state_of = f"running, process {server.pid}" if server.running else "not running: orchestrator db start"
            version = f"PostgreSQL {server.version}, " if server.version else ""
            printing.text(clean(f"embedded  {version}{state_of}"))
            printing.text(clean(f"home      {server.home}"))
            printing.text(clean(f"log       {server.log}"))
        if found is not None:
            rest = "fits" if fits else f"needs {found.need}: run orchestrator db upgrade"
            printing.text(f"schema    {found.have or 'nothing'}, {rest}")
    if not fits:
        raise typer.Exit(6)


@app.command()
def url(context: typer.Context, as_json: JsonOption = False) -> None:
    """Print the database URL alone, password included.

    The embedded server runs then.

    \b
    Example:
      psql "$(orchestrator db url)"
    """
    own = state.of(context, as_json)
    found = own.url()
    if as_json:
        printing.document({"url": found})
    else:
        printing.text(found)


@app.command()
def start(context: typer.Context, as_json: JsonOption = False) -> None:
    """Start the embedded server, or attach to it.

    And bring its schema to what this version needs.

    \b
    Example:
      orchestrator db start
    """
    from orchestrator.database import schema
    from orchestrator.database.embedded import EmbeddedServer

    own = state.of(context, as_json)
    _embedded_alone(own)
    server = EmbeddedServer(say=printing.note)
    before = server.status().running
    found = server.start()
    schema.upgrade(found, say=printing.note)
    if as_json:
        printing.document({"url": found, "started": not before})
    else:
        printing.text(f"{'runs already' if before else 'started'}: {found}")


@app.command()
def stop(
    context: typer.Context,
    force: Annotated[bool, typer.Option("--force", help="Also while workers are connected.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop the embedded server.

    While workers are connected: exit 5, unless --force.

    \b
    Example:
      orchestrator db stop
    """
    from orchestrator.database.embedded import EmbeddedServer

    own = state.of(context, as_json)
    _embedded_alone(own)
    stopped = EmbeddedServer(say=printing.note).stop(force=force)
    if as_json:
        printing.document({"stopped": stopped})
    else:
        printing.text("stopped" if stopped else "was not running")


@app.command()
def sql(
    context: typer.Context,
    revision: Annotated[str, typer.Option("--revision", metavar="ID", help="Up to this revision.")] = "head",
    as_json: JsonOption = False,
) -> None:
    """Print the SQL of all migrations.

    For a database that one may not touch from here.

    \b
    Example:
      orchestrator db sql > schema.sql
    """
    from alembic.util import CommandError

    from orchestrator.database import schema
    from orchestrator.errors import InvalidInput

    state.of(context, as_json)
    try:
        script = schema.script(revision)
    except CommandError:
        raise InvalidInput(f"there is no revision {revision!r}", hint=f"the newest is {schema.head()}") from None
    if as_json:
        printing.document({"sql": script})
    else:
        printing.text(script.rstrip("\n"))


def _embedded_alone(own: state.State) -> None:
    from orchestrator.errors import Conflict

    if not own.is_embedded:
        raise Conflict(
            "a database URL is set, so the embedded PostgreSQL is not the one in use",
            hint="unset ORCHESTRATOR_DATABASE_URL, --database-url and database_url to start or stop the embedded one",
        )
