"""Checkpoints: steps that a later attempt skips, from Python functions and from commands, and what is kept of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from orchestrator.agents.command import CommandAgent
from orchestrator.agents.functions import Context, agent
from orchestrator.agents.protocol import Stop
from orchestrator.agents.python import PythonAgent
from orchestrator.domain.checkpoints import Room, checkpoint_text
from orchestrator.domain.given import AgentDefinition
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput
from orchestrator.repositories.checkpoints import CheckpointRepository, NewCheckpoint
from orchestrator.repositories.retention import RetentionRepository
from orchestrator.service import Orchestrator
from orchestrator.worker import Worker
from tests import functions_for_children as functions
from tests.commands import Cli
from tests.making import CRASHED, Making
from tests.running import Heard, a_claim, execute, run_async
from tests.working import QUICK


@pytest.fixture
def orc(database_url: str) -> Iterator[Orchestrator]:
    with Orchestrator(database_url, settings=QUICK) as made:
        yield made


def on_loop(function: Any, live: Heard | None = None, **fields: Any) -> Outcome:
    return execute(PythonAgent.from_function(agent("it")(function)), a_claim(**fields), live)


# -- in the database -----------------------------------------------------------------------------------------------------


def test_the_first_write_wins_and_only_under_its_fence(engine: Engine) -> None:
    """A second value of a name gets the first one back; an attempt that lost its task writes nothing."""
    made, checkpoints = Making.on(engine), CheckpointRepository(engine)
    task = made.add()
    (claim,) = made.claim()

    def new(name: str, value: str, attempt: int = 1) -> NewCheckpoint:
        return NewCheckpoint(task, attempt, claim.claimed_by, name, value)

    assert checkpoints.add([new("a", "1"), new("b", '{"x": [null]}')]) == {
        (task, 1, "a"): 1,
        (task, 1, "b"): {"x": [None]},
    }
    assert checkpoints.add([new("a", "2"), new("c", "3", attempt=2)]) == {(task, 1, "a"): 1}
    made.end(claim, CRASHED)
    assert checkpoints.add([new("d", "4")]) == {}
    assert checkpoints.of_tasks([task]) == {task: {"a": 1, "b": {"x": [None]}}}


def test_checkpoints_are_pruned_with_their_task(engine: Engine) -> None:
    """Nothing of an ended task stays behind."""
    made, checkpoints = Making.on(engine), CheckpointRepository(engine)
    task = made.add()
    (claim,) = made.claim()
    checkpoints.add([NewCheckpoint(task, 1, claim.claimed_by, "a", "1")])
    made.end(claim)
    made.query("UPDATE tasks SET finished_at = finished_at - interval '1 hour'")
    RetentionRepository(engine).prune(0)
    assert made.query("SELECT * FROM checkpoints") == []


def test_what_cannot_be_kept_is_refused() -> None:
    """Names that are none, results without a JSON form, too large ones, and more than a task may have."""
    for name, value in (("", 1), ("n" * 501, 1), ("a\0", 1), ("a", b"bytes"), ("a", "x" * 1_000_001)):
        with pytest.raises(InvalidInput):
            checkpoint_text(name, value)
    assert json.loads(checkpoint_text("a", ["nul \0"])) == ["nul \ufffd"]
    room = Room(dict.fromkeys(map(str, range(999))))
    room.take("a", "1")
    with pytest.raises(InvalidInput, match="at most 1,000 checkpoints"):
        room.take("b", "1")


# -- Python functions ----------------------------------------------------------------------------------------------------


def test_a_step_is_taken_once() -> None:
    """Sync and async functions, with arguments; what is there is not called again."""
    called: list[str] = []

    async def fetch(order: int) -> dict[str, int]:
        called.append("fetch")
        return {"order": order}

    def sign(*, by: str) -> str:
        called.append("sign")
        return f"signed by {by}"

    async def work(ctx: Context) -> list[Any]:
        return [await ctx.step("fetch", fetch, 7), await ctx.step("sign", sign, by="me"), await ctx.step("sign", sign)]

    heard = Heard()
    assert on_loop(work, heard).result == [{"order": 7}, "signed by me", "signed by me"]
    assert called == ["fetch", "sign"]
    assert on_loop(work, attempt=2, checkpoints=heard.kept).result == [{"order": 7}, "signed by me", "signed by me"]
    assert called == ["fetch", "sign"]


def test_a_step_returns_what_is_stored() -> None:
    """When another attempt was first, its value counts."""

    async def work(ctx: Context) -> Any:
        return await ctx.step("a", lambda: "mine")

    heard = Heard()
    heard.kept["a"] = "theirs"
    assert on_loop(work, heard).result == "theirs"


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, "x" * 1_000_001])
def test_a_result_that_cannot_be_kept_fails_for_good(value: Any) -> None:
    """The error names the step; another attempt would return the same."""

    async def work(ctx: Context) -> Any:
        return await ctx.step("a", lambda: value)

    outcome = on_loop(work)
    assert (outcome.status, outcome.cause) == (OutcomeClass.PERMANENT, "step_result")
    assert (outcome.message or "").startswith("step 'a': ")


def test_a_plain_function_keeps_its_steps_over_the_pipe() -> None:
    """ctx.step blocks until it is durable; the next attempt, in the same child, skips it."""

    async def main() -> list[Any]:
        made, heard = PythonAgent.from_function(functions.steps), Heard()
        try:
            claim = a_claim(agent="steps")
            first = await made.execute(claim, heard, Stop())
            again = a_claim(agent="steps", attempt=2, checkpoints=heard.kept, claimed_by=claim.claimed_by)
            return [first, await made.execute(again, heard, Stop()), heard.kept]
        finally:
            await made.aclose()

    first, second, kept = run_async(main)
    assert first.status is OutcomeClass.DONE
    assert kept == {"pid": first.result["pid"], "twice": 2}
    assert second.result == {**first.result, "called": 0}
    assert first.result["called"] == 1


# -- commands and workers ------------------------------------------------------------------------------------------------


def test_a_command_keeps_and_finds_checkpoints(orc: Orchestrator, tmp_path: Path) -> None:
    """A line in the events file is kept before the attempt's end; the next one has it in ORCHESTRATOR_CHECKPOINTS."""
    code = (
        "import json, os, sys\n"
        "left = json.load(open(os.environ['ORCHESTRATOR_CHECKPOINTS']))\n"
        "if left: print(json.dumps(left)); sys.exit(0)\n"
        "with open(os.environ['ORCHESTRATOR_EVENTS'], 'a') as f:\n"
        "    for value in (1, 2): f.write(json.dumps({'type': 'checkpoint', 'name': 'a', 'value': value}) + '\\n')\n"
        "sys.exit(75)\n"
    )
    made = CommandAgent(
        AgentDefinition(
            name="c", hash="h", command=("python3", "-c", code), output="json", retry=None, dir=str(tmp_path)
        )
    )
    task = orc.add("c", retry={"initial": 0.001, "max": 0.001}).id
    Worker(orc, agents=[made], signals=False).run(until_idle=True)
    assert orc.get(task).result == {"a": 1}
    assert [run.status for run in orc.runs(task)] == ["transient", "done"]


def test_steps_survive_the_death_of_their_worker(orc: Orchestrator, cli: Cli, engine: Engine) -> None:
    """A step that returned is durable: its process is killed at once, and the next attempt goes on behind it."""
    task = orc.add("dies_behind_a_step", retry={"initial": 0.001, "max": 0.001}).id
    Worker(orc, agents=[functions.dies_behind_a_step], signals=False).run(until_idle=True)
    assert orc.get(task).result == "first"
    first, second = orc.runs(task)
    assert (first.status, first.signal, second.status) == ("transient", signal.SIGKILL, "done")
    (shown,) = cli("show", str(task), "--json").json["checkpoints"]
    assert (shown["name"], shown["attempt"], shown["value"], shown["bytes"]) == ("a", 1, "first", 7)
    assert "── checkpoints" in cli("show", str(task)).out
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM checkpoints")).scalar_one() == 1


def test_run_next_keeps_steps_too(orc: Orchestrator) -> None:
    """The three units once, without a worker: a step is written all the same."""

    @agent("it")
    async def work(ctx: Context) -> Any:
        return await ctx.step("a", os.getpid)

    task = orc.add("it").id
    run = orc.run_next(agents=[work])
    assert run is not None
    assert run.result == os.getpid()
    assert orc.checkpoints.of_tasks([task]) == {task: {"a": os.getpid()}}
