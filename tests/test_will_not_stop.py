"""Processes that survive SIGKILL: the task keeps its slot and says so; it settles when they are gone, and not before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from orchestrator.agents import census
from orchestrator.agents.command import CommandAgent
from orchestrator.agents.protocol import Agent, Live, Stop
from orchestrator.agents.python import PythonAgent
from orchestrator.dashboard import why
from orchestrator.domain.given import AgentDefinition
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.repositories.diagnosis import DiagnosisRepository
from orchestrator.repositories.operations import OperationsRepository
from orchestrator.repositories.reading import ReadingRepository
from orchestrator.service import Orchestrator
from orchestrator.worker import Worker
from tests.conftest import WaitUntil
from tests.working import FakeAgent, Gate, Working, add, orchestrator, query, statuses


@pytest.fixture
def orc(database_url: str) -> Iterator[Orchestrator]:
    """An orchestrator of the test's own."""
    with orchestrator(database_url) as made:
        yield made


class Kernel:
    """Lets go of nothing until it is told to: signals do not arrive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lets_go = False
        self._send = census.send
        monkeypatch.setattr(census, "send", self.send)
        monkeypatch.setattr(census, "PATIENCE", 0.05)
        monkeypatch.setattr("orchestrator.worker.loop.LOOK_EVERY", 0.05)
        monkeypatch.setattr("orchestrator.worker.recorder.LIVE_EVERY", 0.05)

    def send(self, process: census.Process, number: int) -> bool:
        return self._send(process, number) if self.lets_go else True


def _command(folder: Path) -> Agent:
    begin = f"touch {folder}/began; exec sleep 600"
    return CommandAgent(AgentDefinition(name="a", hash="h", command=("sh", "-c", begin), kill_grace=0.05))


def _child(folder: Path) -> Agent:
    (folder / "sleeping_agent.py").write_text(
        f"import pathlib, time\n\n\ndef sleep(ctx):\n    pathlib.Path({str(folder)!r}, 'began').touch()\n    time.sleep(600)\n"
    )
    definition = AgentDefinition(
        name="a", hash="h", python="sleeping_agent:sleep", base_dir=str(folder), kill_grace=0.05
    )
    return PythonAgent.from_definition(definition)


@pytest.mark.slow
@pytest.mark.parametrize("make", [_command, _child], ids=["command", "child"])
def test_a_task_that_cannot_be_ended_keeps_its_slot_and_says_so(
    make: Callable[[Path], Agent],
    engine: Engine,
    orc: Orchestrator,
    tmp_path: Path,
    wait_until: WaitUntil,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Cancelled, killed and still there: running, with an alert and an answer to why; cancelled when it is gone."""
    kernel = Kernel(monkeypatch)
    (task,) = add(engine)
    reading, diagnosis = ReadingRepository(engine), DiagnosisRepository(engine)
    with Working(Worker(orc, [make(tmp_path)], 1)) as working:
        # Not earlier: what is cancelled before it has begun has nothing that could survive.
        wait_until((tmp_path / "began").exists)
        OperationsRepository(engine).cancel_one(task, actor="ops")
        wait_until(lambda: [each for each in reading.alerts() if each.kind == "will_not_stop"])
        (alert,) = (each for each in reading.alerts() if each.kind == "will_not_stop")
        assert alert.what.startswith("will not stop: TERM, KILL sent; 1 process left (")
        assert alert.task_id == task
        reason = why.diagnose(diagnosis.facts(task)).reasons[0]
        assert reason.reason == "will_not_stop"
        assert "1 process left" in reason.text
        assert statuses(engine) == {"running": 1}
        assert working.worker._desk.free == 0
        kernel.lets_go = True
        wait_until(lambda: statuses(engine) == {"cancelled": 1})
        assert reading.alerts() == []
    ((notes,),) = query(engine, "SELECT notes FROM runs")
    assert any(note.startswith("something survived SIGKILL for ") for note in notes)
    assert sum("its slot stays taken" in record.getMessage() for record in caplog.records) == 1


def test_an_agent_cannot_say_of_itself_that_it_will_not_stop(
    engine: Engine, orc: Orchestrator, wait_until: WaitUntil
) -> None:
    """Only its worker raises that alert: the same words in an agent's progress are words."""
    gate = Gate()

    async def behave(claim: Claim, live: Live, stop: Stop) -> Outcome:
        live.progress(1, "will not stop: ever")
        return await gate(claim, live, stop)

    add(engine)
    with Working(Worker(orc, [FakeAgent(behave=behave)])):
        wait_until(lambda: query(engine, "SELECT 1 FROM tasks WHERE progress_message IS NOT NULL"))
        assert ReadingRepository(engine).alerts() == []
        gate.open()
