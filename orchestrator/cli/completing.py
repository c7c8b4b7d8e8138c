"""What a shell is offered for a half-typed word: ids, agents, plans, workers, statuses.

It has to be quick and silent: nothing is started or migrated, a database that does not answer within a second offers
nothing, and no fault is ever told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from orchestrator.cli.state import State
    from orchestrator.service import Orchestrator

OFFERED = 50
"""Most words that are offered."""
PATIENCE = 1
"""Seconds that a connection may take."""

Offer = tuple[str, str]

_STATUSES: dict[str, list[str]] = {
    "cancel": ["pending", "running", "blocked", "waiting"],
    "retry": ["failed", "cancelled"],
    "hold": ["pending", "blocked", "waiting"],
    "release": ["pending", "blocked", "waiting"],
    "priority": ["pending", "running", "blocked", "waiting"],
    "approve": ["waiting"],
    "deny": ["waiting"],
    "answer": ["waiting"],
}
"""Which tasks a command is for; others are for all."""


def task_ids(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """The newest tasks that the command is for, with what they are called."""

    def read(orchestrator: Orchestrator) -> Iterable[Offer]:
        from orchestrator.dashboard.show import called
        from orchestrator.repositories.filters import TaskFilter

        wanted = TaskFilter(statuses=_STATUSES.get(ctx.info_name or "", ()), limit=OFFERED)
        for task in orchestrator.reading.tasks(wanted)[0]:
            if ctx.info_name != "release" or task["held_at"]:
                yield str(task["id"]), f"{task['status']} {called(task)}"

    return _offer(incomplete, _read(ctx, read))


def agents(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """The agents that are configured here, and those that have work."""
    configured = _safely(lambda: [(name, "configured") for name in _state(ctx).agents()])
    seen = _read(ctx, lambda orchestrator: [(str(each["name"]), "") for each in orchestrator.reading.agents()])
    return _offer(incomplete, [*configured, *seen])


def plans(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """The plans that were submitted last."""
    return _offer(
        incomplete, _read(ctx, lambda orchestrator: [(name, "") for name in orchestrator.reading.plans(OFFERED)])
    )


def workers(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """The workers that live."""
    return _offer(
        incomplete,
        _read(ctx, lambda orchestrator: [(w["name"], f"on {w['host']}") for w in orchestrator.reading.workers()]),
    )


def statuses(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """The words for a task's status."""
    from orchestrator.domain.words import TaskStatus

    return _offer(incomplete, [(status.value, "") for status in TaskStatus])


def _offer(incomplete: str, found: Iterable[Offer]) -> list[Offer]:
    """Those of *found* that go on with the last part of a comma list, each once. Foreign text is made harmless."""
    from orchestrator.dashboard.text import clean

    head, comma, part = incomplete.rpartition(",")
    offers: dict[str, str] = {}
    for word, what in found:
        # A word that a shell would have to quote, or that is not what it looks like, is not offered.
        if word.startswith(part) and clean(word) == word and not any(c.isspace() for c in word):
            offers.setdefault(f"{head}{comma}{word}", clean(what))
    return list(offers.items())[:OFFERED]


def _state(ctx: typer.Context) -> State:
    from orchestrator.cli.state import State

    given = ctx.find_root().params
    return State(database_url=given.get("database_url"), config=given.get("config"))


def _read(ctx: typer.Context, read: Callable[[Orchestrator], Iterable[Offer]]) -> list[Offer]:
    """What *read* finds in the database, nothing when it is away; an embedded server is not started for this."""

    def found() -> list[Offer]:
        from orchestrator.database.embedded import EmbeddedServer
        from orchestrator.service import Orchestrator

        settings = _state(ctx).settings()
        url = settings.database_url
        if not url:
            status = EmbeddedServer(say=lambda _: None).status()
            if not status.running:
                return []
            url = status.url
        url += f"{'&' if '?' in url else '?'}connect_timeout={PATIENCE}"
        with Orchestrator(url, settings=settings) as orchestrator:
            return list(read(orchestrator))

    return _safely(found)


def _safely(read: Callable[[], list[Any]]) -> list[Any]:
    try:
        return read()
    except Exception:  # noqa: BLE001 - a shell that completes a word has no place for faults
        return []
