"""pytest fixtures for applications that use orchestrator: a real PostgreSQL, migrated, empty for each test.

Loaded by pytest as a plug-in. ``orchestrator_url`` is the database (``ORCHESTRATOR_TEST_URL`` if it is set, else an
embedded server of the test session's own); ``orchestrator`` is an ``Orchestrator`` on it; ``run_until_idle`` works what
is ready with the given agents, in the test's own process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from orchestrator.service import Orchestrator


@pytest.fixture(scope="session")
def orchestrator_url() -> Iterator[str]:
    """The URL of a migrated database for this test session."""
    from orchestrator.database import schema
    from orchestrator.database.embedded import EmbeddedServer

    given = os.environ.get("ORCHESTRATOR_TEST_URL")
    if given:
        schema.upgrade(given)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="orchestrator-testing-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        server = EmbeddedServer(Path(folder))
        url = server.start()
        try:
            schema.upgrade(url)
            yield url
        finally:
            server.stop(force=True)


@pytest.fixture
def orchestrator(orchestrator_url: str) -> Iterator[Orchestrator]:
    """An Orchestrator on an empty database; its connections are closed after the test."""
    from orchestrator.database import schema
    from orchestrator.service import Orchestrator
    from orchestrator.settings import Settings

    schema.empty(orchestrator_url)
    with Orchestrator(orchestrator_url, settings=Settings()) as made:
        yield made


@pytest.fixture
def run_until_idle(orchestrator: Orchestrator) -> Callable[..., None]:
    """Call it with agents: works everything that is ready for them, and returns when nothing is left."""
    from orchestrator.worker import Worker

    def run(*agents: Any, concurrency: int = 10) -> None:
        Worker(orchestrator, agents=list(agents), concurrency=concurrency).run(until_idle=True)

    return run
