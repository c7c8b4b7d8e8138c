"""A real worker process is killed, or told to stop: no task is lost, none is done by two, and nothing stays behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from sqlalchemy import Engine

from orchestrator import liveness
from orchestrator.agents.protocol import Live, Stop
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.worker import Worker
from tests.conftest import WaitUntil
from tests.working import FakeAgent, add, orchestrator, query, statuses

ROOT = Path(__file__).parent.parent


class Process:
    """A worker process of ``tests.worker_process``."""

    def __init__(self, url: str, mode: str, grace: float = 30.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker_process", url, mode, str(grace)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def stdout(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def stderr(self) -> IO[str]:
        assert self.process.stderr is not None
        return self.process.stderr

    def inside(self) -> str:
        """Wait until an agent works; return its line."""
        line = self.stdout.readline()
        assert line.startswith("inside"), line + self.stderr.read()
        return line

    def says(self, words: str) -> None:
        """Wait until the log has *words*."""
        for line in self.stderr:
            if words in line:
                return
        pytest.fail(f"the log never said {words!r}")

    def ended(self, timeout: float = 60) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(timeout)


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    """Whatever a test started is killed at its end."""
    made: list[Process] = []
    yield made
    for each in made:
        each.process.kill()
        each.process.wait()
        each.stdout.close()
        each.stderr.close()


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("after-claim", marks=pytest.mark.slow),
        "during-run",
        "before-record",
        pytest.param("after-record", marks=pytest.mark.slow),
    ],
)
def test_a_killed_worker_loses_no_task(engine: Engine, database_url: str, processes: list[Process], point: str) -> None:
    """SIGKILL at any point: the next worker on this host has the task done at once, and each attempt has one run."""
    add(engine)
    killed = Process(database_url, point)
    processes.append(killed)
    assert killed.ended() == -signal.SIGKILL
    agent = FakeAgent()
    with orchestrator(database_url) as orc:
        Worker(orc, [agent]).run(until_idle=True)
    runs = query(engine, "SELECT attempt, status, late FROM runs ORDER BY attempt")
    if point == "after-record":
        assert runs == [(1, "done", None)]
        assert agent.started == []
    else:
        assert runs == [(1, "lost", None), (2, "done", None)]
        assert len(agent.started) == 1
    assert statuses(engine) == {"done": 1}
    assert query(engine, "SELECT retry_count FROM tasks") == [(0,)]
    ((why,),) = query(engine, "SELECT dead_why FROM workers WHERE name = 'killed'")
    assert "process" in why


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_what_an_agent_told_survives_its_worker(
    engine: Engine, database_url: str, processes: list[Process], wait_until: WaitUntil, how: signal.Signals
) -> None:
    """Tokens and USD are in the run, though incomplete, and the next attempt goes on in the same session (S34)."""
    add(engine)
    worker = Process(database_url, "tells", grace=0.0)
    processes.append(worker)
    worker.inside()
    wait_until(lambda: query(engine, "SELECT 1 FROM tasks WHERE live_usage IS NOT NULL AND session IS NOT NULL"))
    worker.process.send_signal(how)
    worker.ended()
    sessions: list[str | None] = []

    async def behave(claim: Claim, _live: Live, _stop: Stop) -> Outcome:
        sessions.append(claim.session)
        return Outcome(OutcomeClass.DONE)

    with orchestrator(database_url) as orc:
        Worker(orc, [FakeAgent(behave=behave)]).run(until_idle=True)
    lost = "lost" if how is signal.SIGKILL else "interrupted"
    assert query(
        engine,
        "SELECT status, input_tokens, output_tokens, total_tokens, cost_usd, turns, model, usage_complete, session"
        " FROM runs ORDER BY attempt",
    ) == [
        (lost, 900, 100, 1000, 0.25, 3, "m", False, "session-1"),
        ("done", None, None, None, None, None, None, None, "session-1"),
    ]
    assert sessions == ["session-1"]
    assert query(engine, "SELECT live_usage FROM tasks") == [(None,)]


def test_sigterm_hands_the_task_back(engine: Engine, database_url: str, processes: list[Process]) -> None:
    """After the grace the agent is stopped, its task is pending again, and the process ends with 0 (S05)."""
    add(engine, max_retries=0)
    worker = Process(database_url, "wait", grace=0.2)
    processes.append(worker)
    worker.inside()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.ended() == 0
    assert query(engine, "SELECT status, attempt, retry_count, lost_count FROM tasks") == [("pending", 1, 0, 0)]
    assert query(engine, "SELECT status FROM runs") == [("interrupted",)]
    assert query(engine, "SELECT stopped_at IS NOT NULL, dead_at FROM workers") == [(True, None)]
    assert "Traceback" not in worker.stderr.read()


@pytest.mark.slow
def test_a_second_interrupt_ends_it_at_once(engine: Engine, database_url: str, processes: list[Process]) -> None:
    """Ctrl-C twice, with an agent that hears nothing and a grace of a minute: exit 130, no traceback, task handed back."""
    add(engine)
    worker = Process(database_url, "stubborn", grace=60)
    processes.append(worker)
    worker.inside()
    worker.process.send_signal(signal.SIGINT)
    worker.says("claims no more")
    worker.process.send_signal(signal.SIGINT)
    assert worker.ended() == 130
    assert "Traceback" not in worker.stderr.read()
    assert statuses(engine) == {"pending": 1}


def test_a_second_interrupt_leaves_no_process(
    engine: Engine, database_url: str, processes: list[Process], wait_until: WaitUntil
) -> None:
    """The command's grandchild ignores SIGTERM; after the second Ctrl-C it is gone all the same."""
    add(engine)
    worker = Process(database_url, "command", grace=60)
    processes.append(worker)
    assert wait_until(lambda: query(engine, "SELECT last_output FROM tasks WHERE last_output LIKE 'inside %'"))
    ((line,),) = query(engine, "SELECT last_output FROM tasks")
    grandchild = int(line.split()[1])
    start = liveness.started(grandchild)
    assert start is not None
    worker.process.send_signal(signal.SIGINT)
    worker.says("claims no more")
    worker.process.send_signal(signal.SIGINT)
    assert worker.ended() == 130
    wait_until(lambda: liveness.gone(grandchild, start))
    assert "Traceback" not in worker.stderr.read()


@pytest.mark.slow
def test_a_stopped_worker_that_comes_back_changes_nothing(
    engine: Engine, database_url: str, processes: list[Process], wait_until: WaitUntil
) -> None:
    """SIGSTOP in mid-task, another does the task, SIGCONT: it notices, ends its agent and lives on as another (S06)."""
    add(engine)
    worker = Process(database_url, "wait")
    processes.append(worker)
    worker.inside()
    worker.process.send_signal(signal.SIGSTOP)
    query(
        engine,
        "UPDATE workers SET renewed_at = renewed_at - interval '1 hour', renewing_since = renewing_since - interval '1 hour'",
    )
    with orchestrator(database_url) as orc:
        witness = orc.register(liveness.identity(), name="witness", slots=0, agents=[], lease=7200, heartbeat=3600)
        query(
            engine, "UPDATE workers SET renewing_since = renewing_since - interval '1 hour' WHERE id = :id", id=witness
        )
        agent = FakeAgent()
        Worker(orc, [agent]).run(until_idle=True)
        assert statuses(engine) == {"done": 1}
        worker.process.send_signal(signal.SIGCONT)
        wait_until(lambda: query(engine, "SELECT 1 FROM workers WHERE name = 'killed' AND dead_at IS NULL"))
        wait_until(lambda: query(engine, "SELECT 1 FROM runs WHERE late IS NOT NULL"))
    assert worker.process.poll() is None
    assert query(engine, "SELECT attempt, status, late ->> 'status' FROM runs ORDER BY attempt") == [
        (1, "lost", "lost"),
        (2, "done", None),
    ]
    assert statuses(engine) == {"done": 1}
    worker.process.send_signal(signal.SIGTERM)
    assert worker.ended() == 0
