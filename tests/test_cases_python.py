"""The library as an application uses it: the examples of the documentation, and what it refuses."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from orchestrator import (
    AsyncOrchestrator,
    InvalidInput,
    NotFound,
    Orchestrator,
    OrchestratorError,
    TaskStatus,
    WaitTimeout,
    Worker,
    agent,
)
from orchestrator.domain.outcome import Budget
from tests.working import QUICK, orchestrator, query


@agent("invoice", max_retries=5, budget_seconds=60)
async def invoice(ctx: Any) -> dict[str, Any]:
    """On the worker's loop."""
    ctx.progress(50, "fetched")
    ctx.usage(input_tokens=900, cost_usd=0.01)
    return {"sent": ctx.input["order"]}


@agent("sync")
def in_child(ctx: Any) -> str:
    """In a child process."""
    print("said in the child")
    return str(ctx.input).upper()


@pytest.fixture
def orc(database_url: str) -> Iterator[Orchestrator]:
    """An orchestrator on the empty tables."""
    made = orchestrator(database_url)
    yield made
    made.close()


def test_tasks_of_the_callers_transaction(orc: Orchestrator, engine: Engine) -> None:
    """With a Session or a Connection a task lives and dies with the caller's transaction."""
    with Session(engine) as session, session.begin():
        kept = orc.add("invoice", {"order": 1}, session=session)
        assert query(engine, "SELECT id FROM tasks") == []
    with engine.begin() as connection:
        bulk = orc.add_many([{"agent": "invoice", "input": {"order": n}} for n in (2, 3)], session=connection)
    with pytest.raises(KeyError), Session(engine) as session, session.begin():  # noqa: PT012 - a whole transaction
        gone = orc.add("invoice", {"order": 4}, session=session)
        raise KeyError
    assert [row.id for row in query(engine, "SELECT id FROM tasks ORDER BY id")] == [kept.id, *(b.id for b in bulk)]
    with pytest.raises(NotFound, match=str(gone.id)):
        orc.get(gone.id)


def test_workers_run_both_kinds_of_functions(orc: Orchestrator) -> None:
    """``Worker.run(until_idle=True)`` does all that is there, async on the loop and plain in a child."""
    one = orc.add("invoice", {"order": 7})
    two = orc.add("sync", "loud", after=[one.id])
    assert Worker(orc, agents=[invoice, in_child], concurrency=100).run(until_idle=True) == 0
    first, second = orc.get(one.id), orc.get(two.id)
    assert (first.status, first.result, first.max_retries, first.budget_seconds) == ("done", {"sent": 7}, 5, 60)
    assert (second.status, second.result) == ("done", "LOUD")
    (run,) = orc.runs(one.id)
    assert (run.status, run.input_tokens, run.cost_usd) == ("done", 900, 0.01)
    assert repr(first) == f"<Task {one.id} invoice done>"
    assert repr(run) == f"<Run of task {one.id} attempt 1 done>"


def test_run_next_is_one_task(orc: Orchestrator) -> None:
    """The three units once, for one task after the other; None when nothing is ready."""
    ids = [task.id for task in orc.add_many([{"agent": "invoice", "input": {"order": n}} for n in range(2)])]
    found = [orc.run_next(agents=[invoice]) for _ in range(3)]
    assert [run and (run.task_id, run.status, run.result) for run in found] == [
        (ids[0], "done", {"sent": 0}),
        (ids[1], "done", {"sent": 1}),
        None,
    ]


def test_waiting_has_an_end(orc: Orchestrator) -> None:
    """``wait`` returns the ended task; after its limit it raises an error of the tree that is a TimeoutError too."""
    id_ = orc.add("nobody").id
    with pytest.raises(WaitTimeout, match=f"task {id_} is still pending after 0.01 seconds") as caught:
        orc.wait(id_, timeout=0.01)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, OrchestratorError)
    assert caught.value.ids == {"task": id_}
    assert orc.cancel(id_) is TaskStatus.CANCELLED
    assert orc.wait(id_, timeout=0).status == "cancelled"
    with pytest.raises(NotFound):
        orc.wait(id_ + 1)


def test_the_same_on_an_event_loop(database_url: str) -> None:
    """AsyncOrchestrator adds, waits while others work, cancels, and tells the status."""

    async def application() -> None:
        orc = AsyncOrchestrator(database_url, settings=QUICK)
        one = await orc.add("invoice", {"order": 1})
        more = await orc.add_many([{"agent": "nobody"}, {"agent": "nobody"}])
        waiting = asyncio.create_task(orc.wait(one.id, timeout=60))
        await asyncio.to_thread(orc.sync.run_next, [invoice])
        assert (await waiting).result == {"sent": 1}
        assert await orc.cancel(more[0].id) is TaskStatus.CANCELLED
        with pytest.raises(WaitTimeout, match=r"still pending after 0.01 seconds"):
            await orc.wait(more[1].id, timeout=0.01)
        assert (await orc.status())["counts"]["pending"] == 1
        assert [run.status for run in await orc.runs(one.id)] == ["done"]
        await orc.close()

    asyncio.run(application())


BAD: dict[str, tuple[Any, str]] = {
    "no agent": ({"input": 1}, "agent"),
    "agent is no text": ({"agent": 7}, "agent"),
    "agent is nothing": ({"agent": None}, "agent"),
    "agent is empty": ({"agent": " "}, "agent"),
    "not a mapping": ("coder", "mapping"),
    "unknown field": ({"agent": "a", "prioritty": 1}, "prioritty"),
    "input is no JSON": ({"agent": "a", "input": object()}, "input"),
    "input is not finite": ({"agent": "a", "input": {"x": math.inf}}, "input.x"),
    "priority is text": ({"agent": "a", "priority": "high"}, "priority"),
    "at has no offset": ({"agent": "a", "at": datetime(2030, 1, 1)}, "at"),
    "at is text": ({"agent": "a", "at": "tomorrow"}, "at"),
    "tags are a list": ({"agent": "a", "tags": ["x"]}, "tags"),
    "tag is a number": ({"agent": "a", "tags": {"x": 1}}, "tags.x"),
    "params are a list": ({"agent": "a", "params": [1]}, "params"),
    "after is an object": ({"agent": "a", "after": object()}, "after"),
    "after is a fraction": ({"agent": "a", "after": [1.5]}, "after"),
    "retry has an unknown part": ({"agent": "a", "retry": {"intial": 1}}, "retry"),
    "retry is a number": ({"agent": "a", "retry": 3}, "retry"),
    "budget has an unknown part": ({"agent": "a", "budget": {"minutes": 1}}, "budget"),
    "budget is no number": ({"agent": "a", "budget": {"seconds": "long"}}, "budget seconds"),
    "budget twice": ({"agent": "a", "budget": Budget(1.0), "budget_seconds": 1}, "budget"),
    "budget is nothing": ({"agent": "a", "budget_seconds": 0}, "budget seconds"),
    "on_limit is no word": ({"agent": "a", "on_limit": "explode"}, "on_limit"),
    "approval": ({"agent": "a", "approval": "yes"}, "approval"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_task_is_refused_by_the_name_of_its_field(orc: Orchestrator, engine: Engine, case: str) -> None:
    """A wrong value is InvalidInput that names the field, whatever its type; nothing is added, good neighbours neither."""
    given, field = BAD[case]
    with pytest.raises(InvalidInput, match=field):
        orc.add_many([{"agent": "a"}, given])
    assert query(engine, "SELECT id FROM tasks") == []
