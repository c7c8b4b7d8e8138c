"""Shell completion: what is offered, that it is silent, and that it starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine

from orchestrator.cli import completing
from orchestrator.cli.app import main
from orchestrator.database.embedded import EmbeddedServer
from orchestrator.domain.given import NewTask
from orchestrator.repositories.filters import TaskFilter
from orchestrator.repositories.operations import OperationsRepository
from orchestrator.repositories.plans import PlanRepository
from tests.commands import CONFIG
from tests.making import BROKEN, Making


def offered(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What bash gets for *line* with the cursor at its end; nothing may be said on stderr."""
    monkeypatch.setenv("_ORCHESTRATOR_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    with pytest.raises(SystemExit) as ended:
        main([])
    said = capsys.readouterr()
    assert (ended.value.code or 0, said.err) == (0, "")
    return said.out.split()


@pytest.fixture
def made(engine: Engine, database_url: str, test_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Making:
    """A queue, in the environment of a shell."""
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", database_url)
    monkeypatch.setattr(completing, "PATIENCE", 30)  # the words are looked at here, not the speed of the machine
    monkeypatch.chdir(test_folder)
    (test_folder / "orchestrator.toml").write_text(CONFIG)
    return Making.on(engine)


def test_words(made: Making, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands, ids for each command, the rest of a comma list, agents, plans, workers, statuses."""
    failed, held, ready = made.add(title="f"), made.add("other"), made.add()
    made.run(failed, BROKEN)
    OperationsRepository(made.engine).hold(TaskFilter(ids=[held]), actor="ops")
    PlanRepository(made.engine).submit("migrate", [NewTask("coder", name="t", task_hash="h")])
    last = ready + 1

    def asked(line: str) -> list[str]:
        return offered(f"orchestrator {line}", monkeypatch, capsys)

    assert asked("ca") == ["cancel"]
    assert asked("show ") == [str(id_) for id_ in (last, ready, held, failed)]
    assert asked("retry ") == [str(failed)]
    assert asked("release ") == [str(held)]
    assert asked(f"cancel {ready},{held}") == [f"{ready},{held}"]
    assert str(failed) not in asked("cancel ")
    assert asked("pause o") == ["other"]
    assert asked("add ") == ["coder", "review", "broken", "other"]
    assert asked("list --plan m") == ["migrate"]
    assert asked("list --status f") == ["failed"]
    assert asked("drain ") == ["w"]


def test_names_that_a_shell_would_take_apart(
    made: Making, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names with spaces or control characters are not offered."""
    made.add("two words")
    made.add("\x1b[2Jevil")
    made.add("well")
    assert offered("orchestrator list --agent ", monkeypatch, capsys) == ["coder", "review", "broken", "well"]


def test_a_database_that_is_away(
    made: Making, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids are not offered, what the file says is; nobody is told."""
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    assert offered("orchestrator show ", monkeypatch, capsys) == []
    assert offered("orchestrator add c", monkeypatch, capsys) == ["coder"]
    monkeypatch.setenv("ORCHESTRATOR_CONFIG", "missing.toml")
    assert offered("orchestrator add c", monkeypatch, capsys) == []


def test_no_server_is_started(
    made: Making, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a URL the embedded server is asked if it runs, and left alone if it does not."""
    monkeypatch.delenv("ORCHESTRATOR_DATABASE_URL")
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))

    def start(*_: object) -> None:
        raise AssertionError("completion started a server")

    monkeypatch.setattr(EmbeddedServer, "start", start)
    assert offered("orchestrator show ", monkeypatch, capsys) == []
    assert not (tmp_path / "home").exists()
