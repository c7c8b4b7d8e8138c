"""Tasks whose input quotes results of other tasks: what happens between the claim and the agent."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, cast
from uuid import uuid4

from orchestrator.domain.outcome import Claim
from orchestrator.domain.words import OutcomeClass
from orchestrator.plans import with_results
from orchestrator.service import Orchestrator
from orchestrator.settings import Settings


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
    outcome = asyncio.run(orchestrator.execute(claim, cast(Any, None), cast(Any, None), cast(Any, None)))
    assert (outcome.status, outcome.cause) == (OutcomeClass.PERMANENT, "bad_placeholder")
    assert outcome.message == "input: placeholder {t.result.diff}: t.result has no 'diff'; known: patch"
