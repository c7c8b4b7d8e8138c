"""Tasks whose input quotes results of other tasks: what happens between the claim and the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest

from orchestrator.agents.protocol import AgentDefaults, Live, Stop
from orchestrator.domain.given import AgentDefinition
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.liveness import identity
from orchestrator.plans import Plan, load_plan, with_results
from orchestrator.service import Orchestrator
from orchestrator.settings import Settings


class Echo:
    """An agent whose result is the input that it was given."""

    name = "echo"
    definition = None
    defaults = AgentDefaults()

    def __init__(self) -> None:
        self.seen: list[Claim] = []

    async def execute(self, claim: Claim, live: Live, stop: Stop) -> Outcome:
        """Keep the claim, return its input."""
        self.seen.append(claim)
        return Outcome(OutcomeClass.DONE, result=claim.input)

    async def aclose(self) -> None:
        """Nothing is held."""


@pytest.fixture
def orchestrator(database_url: str) -> Iterator[Orchestrator]:
    """An Orchestrator on the empty tables."""
    with Orchestrator(database_url, settings=Settings()) as made:
        yield made


def plan_of(folder: Path, text: str) -> Plan:
    """Read *text* as a plan with the one agent."""
    path = folder / "p.yaml"
    path.write_text(text)
    return load_plan(path, agents={"echo": AgentDefinition("echo", "e" * 16)})


def test_results_reach_the_next_task_as_they_are(orchestrator: Orchestrator, tmp_path: Path) -> None:
    """Params and results arrive character for character, whatever looks like a placeholder in them."""
    plan = plan_of(
        tmp_path,
        """
        tasks:
          - {name: two, agent: echo, after: [one], params: {p: "{one.result} {"}, input: ["{p}{one.result.x}}", "{{p}}"]}
          - {name: one, agent: echo, params: {p: "{p} {{two}} $(x)"}, input: {x: "{p}"}}
        """,
    )
    orchestrator.submit(plan)
    echo = Echo()
    while orchestrator.run_next([echo]) is not None:
        pass
    one, two = echo.seen
    assert one.input == {"x": "{p} {{two}} $(x)"}
    assert two.input == ["{one.result} {{p} {{two}} $(x)}", "{p}"]
    assert two.params == {"p": "{one.result} {", "one": {"result": one.input}}
    assert not two.template


def test_a_claim_within_a_plan(orchestrator: Orchestrator, tmp_path: Path) -> None:
    """A worker of one plan takes its tasks and no others of the same agent."""
    other = orchestrator.add("echo", "not mine")
    plan = plan_of(tmp_path, "tasks: [{name: a, agent: echo, input: mine}]")
    ids = [each.id for each in orchestrator.submit(plan).tasks]
    worker = orchestrator.register(identity(), name="w", slots=9, agents=["echo"], plan="p")
    known = [orchestrator.known(Echo())]
    assert [
        claim.task_id for claim in orchestrator.claim(worker, known, 9, plan_id=orchestrator.plan_id("p")).claims
    ] == ids
    assert [claim.task_id for claim in orchestrator.claim(worker, known, 9).claims] == [other.id]


def test_a_result_without_the_quoted_part() -> None:
    """A placeholder that the result cannot fill ends the task for good, before its agent is started."""
    claim = Claim(
        task_id=1,
        attempt=1,
        claimed_by=uuid4(),
        agent="coder",
        started_at=datetime.now(UTC),
        input="{t.result.diff}",
        params=with_results(None, {"t": {"patch": "x"}}),
        template=True,
    )
    orchestrator = Orchestrator("postgresql://nowhere.invalid/none", settings=Settings())
    outcome = asyncio.run(orchestrator.execute(claim, cast(Any, None), cast(Any, None), Stop()))
    assert (outcome.status, outcome.cause) == (OutcomeClass.PERMANENT, "bad_placeholder")
    assert outcome.message == "input: placeholder {t.result.diff}: t.result has no 'diff'; known: patch"
