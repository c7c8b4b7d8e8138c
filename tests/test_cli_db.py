"""The embedded server on the command line: started by whoever needs it, shared, stopped by an explicit word only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.database.embedded import EmbeddedServer
from tests.commands import Said, process, start, strict

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(test_folder: Path) -> Iterator[Path]:
    """A home of this module's own, without a server yet."""
    folder = test_folder / "cli-home"
    yield folder
    EmbeddedServer(folder).stop(force=True)


class Calls:
    """Real processes with a home of their own."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.env = {"ORCHESTRATOR_HOME": str(home)}
        self.folder = folder

    def __call__(self, *arguments: str, code: int = 0) -> Said:
        said = process(*arguments, url=None, cwd=self.folder, env=self.env)
        assert said.code == code, said
        return said


@pytest.fixture
def call(home: Path, tmp_path: Path) -> Calls:
    """Commands without a URL."""
    return Calls(home, tmp_path)


@pytest.mark.timeout(400)
def test_it_is_started_used_and_stopped(call: Calls) -> None:
    """Every command finds the server that the first one started; a worker's connection keeps it up."""
    before = strict(call("db", "status", "--json", code=6).out)
    assert (before["embedded"], before["running"], before["schema"]) == (True, False, None)
    assert strict(call("db", "stop", "--json").out) == {"stopped": False}

    # a first command starts and migrates it
    added = strict(call("add", "coder", "--force", "--input", "x", "--json").out)
    assert added == {"id": 1, "created": True, "status": "pending"}
    after = strict(call("db", "status", "--json").out)
    assert (after["running"], after["compatible"]) == (True, True)

    # its URL is one line, and works as a URL
    url = call("db", "url").out
    assert url.count("\n") == 1
    assert strict(call("db", "url", "--json").out) == {"url": url.strip()}
    other = strict(call("--database-url", url.strip(), "list", "--json").out)
    assert [task["id"] for task in other["tasks"]] == [1]
    assert strict(call("db", "start", "--json").out)["started"] is False

    # while a worker is connected it is not stopped
    (call.folder / "orchestrator.toml").write_text('[agents.idle]\ncommand = ["true"]\n')
    with start("worker", url=None, cwd=call.folder, env=call.env, preexec_fn=_mind_signals) as worker:
        try:
            assert worker.stderr is not None
            assert "works for idle" in worker.stderr.readline()
            pause = threading.Event()
            while not strict(call("workers", "--json").out)["workers"]:
                pause.wait(0.05)
            refused = call("db", "stop", "--json", code=5)
            assert strict(refused.out)["error"]["code"] == "conflict"
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 0
        finally:
            worker.kill()

    # stopped it stays, until a command is given
    assert strict(call("db", "stop", "--json").out) == {"stopped": True}
    assert strict(call("db", "status", "--json", code=6).out)["running"] is False
    assert strict(call("list", "--json").out)["tasks"][0]["id"] == 1
    assert strict(call("db", "stop", "--force", "--json").out) == {"stopped": True}


def _mind_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_without_the_extra_the_hint_says_what_to_do(tmp_path: Path) -> None:
    """No URL and no binaries: exit code 6, with both ways out."""
    env = {"ORCHESTRATOR_HOME": str(tmp_path / "home"), "ORCHESTRATOR_PG_BINDIR": str(tmp_path)}
    said = process("list", "--json", url=None, cwd=tmp_path, env=env)
    assert said.code == 6
    assert strict(said.out)["error"]["code"] == "embedded_server"
