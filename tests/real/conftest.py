"""What the tests of the real agent CLIs share: a model server, homes, and an environment for each CLI."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.agents import processes
from tests.real.clis import Cli, ModelServer, model_server


@pytest.fixture(scope="session")
def server() -> Iterator[ModelServer]:
    """One model server for all."""
    with model_server() as running:
        yield running


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for each CLI: some make a database in theirs at first."""
    return tmp_path_factory.mktemp("homes")


@pytest.fixture
def cli(request: pytest.FixtureRequest, server: ModelServer, homes: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The CLI of this test, in an environment of its own."""
    made = Cli(request.param, homes / request.param, server)
    made.prepare()
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Descendants whose parent was killed are ours to collect, as a worker does every few seconds."""
    yield
    deadline = time.monotonic() + 30
    while any(each.status() == psutil.STATUS_ZOMBIE for each in _children()) and time.monotonic() < deadline:
        processes.keeper().sweep()
        time.sleep(0.1)


def _children() -> list[psutil.Process]:
    """The child processes of this one that are still there."""
    return [each for each in psutil.Process().children() if each.is_running()]
