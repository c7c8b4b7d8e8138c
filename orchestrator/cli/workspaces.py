"""``workspaces``: what agents left on this host, why it is still there, and removing what nobody loses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import options, printing, state
from orchestrator.cli.options import JsonOption
from orchestrator.errors import Conflict, InvalidInput

if TYPE_CHECKING:
    from orchestrator.agents.workspaces import Found


def workspaces(
    context: typer.Context,
    clean: Annotated[bool, typer.Option("--clean", help="Remove those of which nothing is lost.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what --clean would do.")] = False,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="TIME", help="Leave younger ones: 2h, 7d.")
    ] = None,
    force: Annotated[
        list[str] | None,
        typer.Option("--force", metavar="NAME", help="With --clean: remove this one with what is in it. Repeatable."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the workspaces on this host, and remove what is certain.

    Kept are uncommitted changes, commits that no branch holds, what a task or
    a process is in, what its task still needs or is not recorded yet, and
    whatever was not made here. Branches with commits always stay.

    \b
    Examples:
      orchestrator workspaces
      orchestrator workspaces --clean --older-than 7d --dry-run
      orchestrator workspaces --clean --force task-7-1f2e3d4c
    """
    own = state.of(context, as_json)
    names = options.several(force) if force else []
    if names and not clean:
        raise InvalidInput("--force names what --clean is to remove; give --clean too")
    age = 0.0 if older_than is None else options.seconds(older_than, "--older-than")
    with own.open() as orchestrator:
        found = orchestrator.workspaces(remove=clean and not dry_run, older_than=age, force=names)
    missing = sorted(set(names) - {each.folder.name for each in found})
    if missing:
        raise InvalidInput(
            f"no workspace here is called {', '.join(missing)}", hint="orchestrator workspaces lists them"
        )
    rows = [_row(each, clean, dry_run, names) for each in found]
    if as_json:
        printing.document({"workspaces": rows})
    else:
        _show(rows, clean)
    refused = [row["name"] for row in rows if row["name"] in names and not row["removed"] and not dry_run]
    if refused:
        raise Conflict(f"not removed: {', '.join(refused)}", hint="its reason stands in the list")


def _row(found: Found, clean: bool, dry_run: bool, forced: list[str]) -> dict[str, Any]:
    from datetime import UTC, datetime

    record, changes = found.record, found.changes
    created = None if record is None else datetime.fromtimestamp(record.created_at, UTC).isoformat()
    return {
        "name": found.folder.name,
        "path": str(found.folder / "tree") if record is not None else str(found.folder),
        "kind": None if record is None else record.kind,
        "task_id": None if record is None else record.task,
        "attempt": None if record is None else record.attempt,
        "agent": None if record is None else record.agent,
        "created_at": created,
        "ended": None if record is None else record.ended,
        "repository": None if record is None else record.repository,
        "branch": None if record is None else record.branch,
        "base": None if record is None else record.base,
        "commits": None if changes is None else changes.commits,
        "uncommitted": None if changes is None else len(changes.uncommitted),
        "kept_because": found.keep,
        "removed": clean and not dry_run and found.keep is None,
        "would_be_removed": found.keep is None or (dry_run and found.folder.name in forced and record is not None),
    }


def _show(rows: list[dict[str, Any]], clean: bool) -> None:
    from orchestrator.cli.looking import table

    table(
        [
            {
                "name": row["name"],
                "task": str(row["task_id"] or ""),
                "kind": row["kind"] or "",
                "state": row["kept_because"] or ("removed" if row["removed"] else "may go"),
                "path": "" if row["removed"] else row["path"],
            }
            for row in rows
        ],
        right=("task",),
    )
    gone = sum(row["removed"] for row in rows)
    may = sum(row["would_be_removed"] and not row["removed"] for row in rows)
    if not rows:
        printing.note("no workspaces here")
    elif gone or (clean and not may):
        printing.note(f"{gone:,} removed, {len(rows) - gone:,} kept")
    elif may:
        printing.note(f"{may:,} of {len(rows):,} may go: orchestrator workspaces --clean")
