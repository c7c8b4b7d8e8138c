"""F67: what a running agent is doing and since when, from the events that it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine

from orchestrator import Orchestrator, Worker
from orchestrator.agents.building import build
from orchestrator.agents.faults import from_status
from orchestrator.agents.meter import Amount, Meter, Report
from orchestrator.agents.protocol import LIMIT
from orchestrator.agents.telling import Telling
from orchestrator.dashboard.why import diagnose
from orchestrator.domain.shapes import activity_of
from orchestrator.plans import agent_definition
from orchestrator.worker.observer import MODEL_CALL, Attempt, Board
from tests.conftest import WaitUntil
from tests.running import Heard, a_claim
from tests.working import QUICK, FakeAgent, Working, orchestrator, query

USE = {
    "type": "assistant",
    "message": {"id": "m", "content": [{"type": "tool_use", "id": "t", "name": "Bash", "input": {}}]},
}


@pytest.fixture
def orc(database_url: str) -> Iterator[Orchestrator]:
    """An orchestrator on the test's database."""
    with orchestrator(database_url, QUICK) as made:
        yield made


def test_a_tool_that_is_open_is_what_the_agent_does(orc: Orchestrator, engine: Engine, wait_until: WaitUntil) -> None:
    """``show``, ``status`` and ``why`` say which tool and since when; when the task is over nobody does anything."""
    script = f"import time; print({json.dumps(json.dumps(USE))}, flush=True); time.sleep(600)"
    given = {"command": [sys.executable, "-c", script], "output": "claude"}
    task = orc.add("cli")
    with Working(Worker(orc, [build(agent_definition("cli", given))], 1)):
        wait_until(lambda: orc.reading.task(task.id)["activity"])
        doing = orc.reading.task(task.id)["activity"]
        assert doing["what"] == "Bash"
        since = datetime.fromisoformat(doing["since"])
        assert timedelta(0) <= datetime.now(UTC) - since < timedelta(seconds=60)
        assert orc.status()["running"][0]["activity"] == doing
        assert any(each.text.startswith("in Bash for ") for each in diagnose(orc.diagnosis.facts(task.id)).reasons)
        assert orc.reading.task(task.id)["usage"]["complete"] is not False
        orc.cancel(task.id)
        wait_until(lambda: orc.get(task.id).status == "cancelled")
    assert orc.reading.task(task.id)["activity"] is None
    assert query(engine, "SELECT total_tokens, cost_usd, usage_complete FROM runs") == [(None, None, None)]


def test_between_tools_it_is_in_a_model_call() -> None:
    """What begins again has a time of its own; the same said twice goes on."""
    attempt = Attempt(a_claim(), FakeAgent(), Board())
    attempt.activity("Bash")
    attempt.activity("Bash")
    began = attempt.live_row().activity_age
    attempt.activity(None)
    row = attempt.live_row()
    assert (row.activity, began is not None) == (MODEL_CALL, True)


def test_an_agent_that_waits_for_its_provider_is_not_served() -> None:
    """A limit that it waits out by itself shows as such, until its next word; it is no sign of life for a probe."""
    heard = Heard()
    telling = Telling(heard, Meter())
    telling.error(from_status(429, "slow down"))
    telling.error(from_status(500, "oops"))
    telling.usage(Report(Amount(total=5)))
    telling.doing("Bash")
    telling.doing("Bash")
    telling.doing(None)
    assert heard.activities == [LIMIT, None, "Bash", None]
    attempt = Attempt(a_claim(), FakeAgent(), Board())
    attempt.activity(LIMIT)
    assert not attempt.served
    attempt.activity("Bash")
    assert attempt.served


@pytest.mark.parametrize(
    "live",
    [None, {}, {"activity": "x"}, {"activity": 3, "activity_since": "y"}, {"activity": "x", "activity_since": "y"}],
)
def test_what_is_not_known_is_null(live: dict[str, object] | None) -> None:
    """Whatever stands in the column."""
    assert activity_of(live) is None
