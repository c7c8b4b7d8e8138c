"""Where a command gets what it works with: settings, the database, and the one ``Orchestrator``.

Without a URL the embedded server of this user is started or attached to, and migrated. With a URL nothing is migrated
unless it was asked for: a schema that does not fit is an error that says what to run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.cli import printing

if TYPE_CHECKING:
    import typer

    from orchestrator.domain.given import AgentDefinition
    from orchestrator.service import Orchestrator
    from orchestrator.settings import Settings


@dataclass
class State:
    """The options that stand before the command, and what was made of them."""

    database_url: str | None = None
    config: str | None = None
    migrate: bool = False
    as_json: bool | None = None
    _settings: Settings | None = field(default=None, repr=False)

    def settings(self) -> Settings:
        """The settings of the file, the environment and the command line. Raises InvalidInput."""
        if self._settings is None:
            from orchestrator.settings import Settings

            self._settings = Settings.load(self.config).changed(database_url=self.database_url or None)
        return self._settings

    @property
    def is_embedded(self) -> bool:
        """Whether no URL was given."""
        return not self.settings().database_url

    def agents(self) -> dict[str, AgentDefinition]:
        """The agents of the configuration file."""
        from orchestrator.plans import definitions

        return definitions(self.settings())

    def url(self) -> str:
        """The URL of the database; without one the embedded server runs, and is migrated, when this returns."""
        settings = self.settings()
        if settings.database_url:
            return settings.database_url
        from orchestrator.database import schema
        from orchestrator.database.embedded import EmbeddedServer

        url = EmbeddedServer(say=printing.note).start()
        schema.upgrade(url, say=printing.note)
        return url

    @contextmanager
    def open(self, *, migrate: bool = False, **changed: Any) -> Iterator[Orchestrator]:
        """An orchestrator on a schema that fits, closed at the end. *changed* are settings of the command line.

        Raises SchemaOutOfDate, DatabaseUnavailable and InvalidInput.
        """
        from orchestrator.service import Orchestrator

        settings = self.settings().changed(**changed)
        embedded = self.is_embedded
        with Orchestrator(self.url(), settings=settings) as orchestrator:
            if (migrate or self.migrate) and not embedded:
                from orchestrator.database import schema

                schema.upgrade(str(orchestrator.url), say=printing.note)
            elif not embedded:
                orchestrator.check_schema()
            yield orchestrator


def of(context: typer.Context, as_json: bool = False) -> State:
    """The state of this invocation; *as_json* tells the error boundary how this command answers."""
    state = context.find_root().obj
    assert isinstance(state, State)
    state.as_json = as_json
    return state
