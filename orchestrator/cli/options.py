"""Options that several commands share, and how their values are read: lists, times, spans, ``k=v`` pairs, ids."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli import completing
from orchestrator.errors import InvalidInput, did_you_mean

if TYPE_CHECKING:
    from orchestrator.repositories.filters import TaskFilter

JsonOption = Annotated[bool, typer.Option("--json", help="Answer with one JSON document on stdout, errors too.")]
AgentOption = Annotated[
    list[str] | None,
    typer.Option("--agent", "-a", metavar="NAME", help="Of these agents.", autocompletion=completing.agents),
]
StatusOption = Annotated[
    list[str] | None,
    typer.Option(
        "--status",
        "-s",
        metavar="STATUS",
        help="In these statuses: pending, running, blocked, waiting, …",
        autocompletion=completing.statuses,
    ),
]
PlanOption = Annotated[
    str | None, typer.Option("--plan", metavar="NAME", help="Of this plan.", autocompletion=completing.plans)
]
TagOption = Annotated[list[str] | None, typer.Option("--tag", metavar="K=V", help="With these tags, all of them.")]
SearchOption = Annotated[
    str | None, typer.Option("--search", metavar="TEXT", help="With this text in name, title or unique key.")
]
ReasonOption = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Why; kept in the audit trail.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do it to all that the filters match.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
IdsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID]...", help="Task ids; comma lists too.", autocompletion=completing.task_ids),
]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The task's id.", autocompletion=completing.task_ids)]

ID_MAX = 2**63 - 1


def several(given: Sequence[str] | None) -> list[str]:
    """Return the values of an option that is repeatable and also takes comma lists, without doubles."""
    parts = (part.strip() for each in given or () for part in each.split(","))
    return list(dict.fromkeys(part for part in parts if part))


def number(text: str, what: str) -> int:
    """Return *text* as the id of a *what*. Raises InvalidInput."""
    bare = text.strip()
    if not (bare.isascii() and bare.isdecimal()) or not 0 < int(bare[:30]) <= ID_MAX:
        raise InvalidInput(f"expected the id of a {what}, a number, found {text!r}", hint="orchestrator list shows ids")
    return int(bare)


def task_ids(given: Sequence[str] | None) -> list[int]:
    """Return task ids in the order given, without doubles. Raises InvalidInput."""
    return list(dict.fromkeys(number(part, "task") for part in several(given)))


def statuses(given: Sequence[str] | None) -> list[str]:
    """Return statuses by the contract's words. Raises InvalidInput with the nearest one."""
    from orchestrator.domain.words import TaskStatus

    known = [status.value for status in TaskStatus]
    for word in several(given):
        if word not in known:
            raise InvalidInput(f"--status: there is no status {word!r}{did_you_mean(word, known)}")
    return several(given)


def pairs(given: Sequence[str] | None, option: str) -> dict[str, str]:
    """Return ``k=v`` values of a repeatable option. Raises InvalidInput for one without ``=`` or a key given twice.

    No comma lists here: a comma is part of a value.
    """
    found: dict[str, str] = {}
    for each in given or ():
        key, equals, value = each.partition("=")
        if not equals or not key:
            raise InvalidInput(f"{option}: expected NAME=VALUE, found {each!r}")
        if key in found:
            raise InvalidInput(f"{option}: {key!r} is given twice")
        found[key] = value
    return found


def wanted(
    *,
    ids: Sequence[int] = (),
    status: Sequence[str] | None = None,
    agent: Sequence[str] | None = None,
    plan: str | None = None,
    tag: Sequence[str] | None = None,
    search: str | None = None,
    limit: int | None = None,
    after_id: int | None = None,
) -> TaskFilter:
    """Return what ``list`` shows and the bulk commands change. Raises InvalidInput."""
    from orchestrator.repositories.filters import TaskFilter

    return TaskFilter(
        statuses=statuses(status),
        agents=several(agent),
        plan=plan,
        tags=pairs(tag, "--tag"),
        search=search or None,
        limit=limit,
        after_id=after_id,
        ids=ids,
    ).checked()


def seconds(text: str, option: str) -> float:
    """Return a span like ``30s``, ``1h30m``, ``2d`` or a bare number of seconds. Raises InvalidInput."""
    from orchestrator.domain.retention import span

    value = span(text)
    if value is None:
        raise InvalidInput(f"{option}: expected a span of time like 30s, 5m, 1h30m or 2d, found {text!r}")
    return value


def ahead(text: str) -> float | None:
    """Return the seconds from now that ``+30s``, ``now`` or ``now+2h`` mean, None for any other text."""
    bare = text.strip().lower()
    if bare == "now":
        return 0.0
    match = re.fullmatch(r"(?:now)?\s*\+\s*(.+)", bare)
    return None if match is None else seconds(match[1], "--at")


def instant(text: str, option: str = "--at") -> datetime:
    """Return an ISO 8601 instant; one without an offset is local time. Raises InvalidInput."""
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidInput(
            f"{option}: expected a time like 2027-01-31T09:00+01:00, +30s or now+2h, found {text!r}"
        ) from None
    try:
        return (at if at.tzinfo is not None else at.astimezone()).astimezone(UTC)
    except (OverflowError, ValueError, OSError):
        raise InvalidInput(f"{option}: {text!r} lies outside of what can be stored") from None


def later_than(now: datetime, span: float) -> datetime:
    """Return the instant *span* seconds after *now*."""
    return now + timedelta(seconds=span)


def actor() -> str:
    """Return who is doing this, for the audit trail: ``ORCHESTRATOR_ACTOR``, else the user's name."""
    named = os.environ.get("ORCHESTRATOR_ACTOR")
    if named:
        return named[:200]
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return f"uid {os.geteuid()}"


def shown_ids(ids: Iterable[int], most: int = 10) -> str:
    """Return ids as ``1, 2, 3 and 17 more``."""
    listed = list(ids)
    text = ", ".join(map(str, listed[:most]))
    return text if len(listed) <= most else f"{text} and {len(listed) - most:,} more"
