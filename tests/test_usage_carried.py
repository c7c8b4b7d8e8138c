"""S50 through the database: what a resumed session had counted before is not counted again by the next attempt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from orchestrator import Orchestrator, Worker
from orchestrator.agents.building import build
from orchestrator.plans import agent_definition
from orchestrator.settings import Settings

STREAMS = Path(__file__).parent / "inputs" / "usage-streams"

SCRIPT = (
    'cat "$STREAMS/$KIND-$ORCHESTRATOR_ATTEMPT.jsonl" >> "$ORCHESTRATOR_EVENTS"; '
    'test "$ORCHESTRATOR_ATTEMPT" = 1 && exit 75; exit 0'
)


@pytest.fixture
def orc(database_url: str) -> Iterator[Orchestrator]:
    """An orchestrator on the test's database."""
    with Orchestrator(database_url, settings=Settings()) as made:
        yield made


@pytest.mark.parametrize("kind", ["delta", "process_total", "session_total", "mixed", "reset"])
def test_two_attempts_of_one_session_add_up(orc: Orchestrator, engine: Engine, kind: str) -> None:
    """Whatever kind of counter an agent reports, run 1 used 3,000 tokens, run 2 used 1,500, and the task 4,500."""
    definition = agent_definition(
        kind,
        {
            "command": ["sh", "-c", SCRIPT],
            "env": {"set": {"STREAMS": str(STREAMS), "KIND": kind}},
            "retry": {"initial": 0.01, "max": 0.01},
        },
        local=False,
        base_dir=str(STREAMS),
        line=0,
    )
    task = orc.add(kind)
    Worker(orc, agents=[build(definition)], concurrency=1).run(until_idle=True)
    with engine.connect() as connection:
        used = connection.execute(
            text("SELECT total_tokens FROM runs WHERE task_id = :id ORDER BY attempt"), {"id": task.id}
        ).scalars()
        assert list(used) == [3000, 1500]
    assert orc.reading.task(task.id)["usage"]["total_tokens"] == 4500
