"""Tasks that need others (S14): woken once and always, closed to the last descendant, whoever moves at the same time."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from orchestrator.domain.given import NewTask
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.words import TaskStatus
from orchestrator.repositories.adding import AddingRepository
from orchestrator.repositories.filters import TaskFilter
from orchestrator.repositories.operations import OperationsRepository
from orchestrator.repositories.runs import Ended
from orchestrator.repositories.workers import WorkerRepository
from tests.making import BROKEN, CRASHED, DONE, Making, new_worker

WaitUntil = Callable[..., Any]


@pytest.fixture
def made(engine: Engine) -> Making:
    return Making.on(engine)


def claims(made: Making, number: int) -> dict[int, Claim]:
    """The next *number* claims by task id."""
    return {claim.task_id: claim for claim in made.claim(number)}


def record(made: Making, *ended: tuple[Claim, Outcome]) -> set[str]:
    return made.runs.record_runs([Ended(claim, outcome) for claim, outcome in ended]).wake


def waiting(made: Making, number: int = 1) -> Callable[[], bool]:
    """Whether *number* sessions wait for a lock."""

    def sessions_wait() -> bool:
        return len(made.query("SELECT 1 FROM pg_locks WHERE NOT granted")) >= number

    return sessions_wait


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Call all in threads that start together; return what each returned, or raise what one of them raised."""
    start = threading.Barrier(len(calls))
    found: list[Any] = [None] * len(calls)

    def call(place: int) -> None:
        start.wait()
        try:
            found[place] = calls[place]()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=call, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


# -- waking -------------------------------------------------------------------------------------------------------


def test_a_child_waits_for_its_last_parent(made: Making) -> None:
    """Of three parents the last one that is done wakes the child, in whatever order, and says so once."""
    parents = [made.add() for _ in range(3)]
    child, grandchild = made.add("child", after=tuple(parents)), None
    grandchild = made.add("grandchild", after=(child, parents[0]))
    held = claims(made, 3)
    assert record(made, (held[parents[2]], DONE)) == set()
    assert record(made, (held[parents[0]], DONE)) == set()
    assert made.status(child, grandchild) == ["blocked", "blocked"]
    assert record(made, (held[parents[1]], DONE)) == {"child"}
    assert made.status(child, grandchild) == ["pending", "blocked"]
    made.run(child, agent="child")
    assert made.status(grandchild) == ["pending"]


def test_parents_of_one_batch_wake_together(made: Making) -> None:
    """All parents in one commit: the child is woken in that very commit."""
    parents = [made.add() for _ in range(3)]
    child = made.add("child", after=tuple(parents))
    assert record(made, *((claim, DONE) for claim in claims(made, 3).values())) == {"child"}
    assert made.status(child) == ["pending"]


@pytest.mark.parametrize("change", ["held_at = now()", "available_at = now() + interval '1 day'"])
def test_a_woken_child_may_still_wait(made: Making, change: str) -> None:
    """A held child, and one whose time has not come, are pending, and not taken."""
    parent = made.add()
    child = made.add(after=(parent,))
    made.query(f"UPDATE tasks SET {change} WHERE id = :id", id=child)
    made.run(parent)
    assert made.status(child) == ["pending"]
    assert made.claim(5) == []


def test_a_retry_or_a_loss_wakes_nobody(made: Making) -> None:
    """A parent that is to run again leaves its child as it is."""
    parent = made.add()
    child = made.add(after=(parent,))
    made.run(parent, CRASHED)
    made.query("UPDATE tasks SET due = true, available_at = now() WHERE id = :id", id=parent)
    (claim,) = made.claim()
    assert claim.task_id == parent
    WorkerRepository(made.engine).mark_gone([made.worker], "test")
    made.tasks.take_back()
    assert made.status(parent, child) == ["pending", "blocked"]


def test_two_parents_that_end_in_the_same_instant(made: Making, wait_until: WaitUntil) -> None:
    """Neither commit sees the other's parent as done when it begins; the child is woken all the same, by exactly one."""
    first, second = made.add(), made.add()
    child = made.add("child", after=(first, second))
    held = claims(made, 2)
    found: list[set[str]] = []
    with made.engine.connect() as connection:
        # Both have moved their own task and stand before the child.
        connection.execute(text("SELECT 1 FROM tasks WHERE id = :id FOR UPDATE"), {"id": child})
        threads = [
            threading.Thread(target=lambda claim=held[id_]: found.append(record(made, (claim, DONE))))
            for id_ in (first, second)
        ]
        for thread in threads:
            thread.start()
        wait_until(waiting(made, 2))
        connection.rollback()
    for thread in threads:
        thread.join()
    assert made.status(child) == ["pending"]
    assert sorted(map(sorted, found)) == [[], ["child"]]


def test_many_families_whose_parents_end_together(made: Making) -> None:
    """Forty children of two parents each, ended by two recorders in opposite order: each child is woken exactly once."""
    pairs = [(made.add(), made.add()) for _ in range(40)]
    children = [added.id for added in made.add_all([NewTask("child", after=pair) for pair in pairs])]
    held = claims(made, 80)
    other = new_worker(made.engine, "other", ["child"])
    halves = [[held[one] for one, _ in pairs], [held[two] for _, two in reversed(pairs)]]

    def end(half: list[Claim]) -> int:
        return sum("child" in record(made, *((claim, DONE) for claim in half[n : n + 4])) for n in range(0, 40, 4))

    woken = at_once(lambda: end(halves[0]), lambda: end(halves[1]))
    assert set(made.status(*children)) == {"pending"}
    assert sum(woken) >= 10
    assert len(made.claim(100, "child", worker=other)) == 40


# -- closing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outcome", "verb"), [(BROKEN, "failed"), (None, "cancelled")], ids=["failed", "cancelled"])
def test_all_descendants_are_closed_and_name_the_parent(made: Making, outcome: Outcome | None, verb: str) -> None:
    """A→B→C→D, F of A and the running G, and E added afterwards: all cancelled, without a run, naming A."""
    a = made.add(name="first step")
    b = made.add(after=(a,))
    c = made.add(after=(b,))
    d = made.add(after=(c, a))
    g = made.add("other")
    f = made.add(after=(a, g))
    beside = made.add(after=(g,))
    (other,) = made.claim(1, "other")
    if outcome is None:
        OperationsRepository(made.engine).cancel_one(a, actor="ops")
    else:
        made.run(a, outcome)
    e = made.add(after=(a,))
    late = made.add(after=(d,))
    past = "failed" if verb == "failed" else "was cancelled"
    for task in (b, c, d, e, f, late):
        row = made.row(task)
        cause = "parent_cancelled" if task == late else f"parent_{verb}"
        assert (row.status, row.error_class, row.error_cause) == ("cancelled", "cancelled", cause)
        assert row.finished_at is not None
        assert made.runs.of_task(task) == []
    assert {made.row(task).error_message for task in (b, c, d, f)} == {f"needs {a} first step, which {past}"}
    assert made.row(e).error_message == f"needs {a}, which {past}"
    assert made.row(late).error_message == f"needs {d}, which was cancelled"
    made.end(other)
    assert made.status(f, beside) == ["cancelled", "pending"]


def test_a_descendant_of_several_names_the_oldest(made: Making) -> None:
    """Of two parents that fail in one commit, the smaller id is named; each family by its own."""
    a, b = made.add(), made.add()
    of_a, of_both, of_b = made.add(after=(a,)), made.add(after=(b, a)), made.add(after=(b,))
    below = made.add(after=(of_both, of_b))
    record(made, *((claim, BROKEN) for claim in claims(made, 2).values()))
    named = [made.row(task).error_message.split()[1] for task in (of_a, of_both, of_b, below)]
    assert named == [str(a), str(a), str(b), str(a)]


def test_done_and_failed_parents_in_one_batch(made: Making) -> None:
    """A child of both is cancelled, a child of the done one is woken, whatever the order in the batch."""
    for order in (1, -1):
        good, bad = made.add(), made.add()
        both, of_good = made.add("other", after=(good, bad)), made.add("other", after=(good,))
        held = claims(made, 2)
        batch = [(held[good], DONE), (held[bad], BROKEN)][::order]
        assert record(made, *batch) == {"other"}
        assert made.status(both, of_good) == ["cancelled", "pending"]
        assert made.row(both).error_message.startswith(f"needs {bad} ")


def test_a_child_added_below_a_descendant_that_is_being_closed(made: Making, wait_until: WaitUntil) -> None:
    """The add holds the second level while the first fails: its child is closed as well, not left blocked for ever."""
    a = made.add()
    b = made.add(after=(a,))
    (claim,) = made.claim()
    with Session(made.engine) as session, session.begin():
        (new,) = AddingRepository(made.engine).add_many([NewTask("coder", after=(b,))], session)
        assert new.status is TaskStatus.BLOCKED
        recorder = threading.Thread(target=made.end, args=(claim, BROKEN))
        recorder.start()
        wait_until(waiting(made))
    recorder.join()
    assert made.status(a, b, new.id) == ["failed", "cancelled", "cancelled"]
    assert made.row(new.id).error_message.startswith(f"needs {a} ")


def test_adds_at_all_levels_race_with_the_failure(made: Making) -> None:
    """However adds to a growing family and the failure of its head interleave, nobody stays blocked."""
    chance = random.Random(7)
    heads = [made.add() for _ in range(10)]
    families = [[head] for head in heads]
    held = claims(made, 10)

    def add(mine: list[list[int]]) -> None:
        for _ in range(4):
            for family in mine:
                family.append(made.add("other", after=(chance.choice(family),)))

    def fail() -> None:
        for head in heads:
            record(made, (held[head], BROKEN))

    at_once(lambda: add(families[::2]), lambda: add(families[1::2]), fail)
    assert made.query("SELECT count(*) FROM tasks WHERE status = 'cancelled'")[0][0] == 40


def test_recorders_with_crossing_families_do_not_deadlock(made: Making, wait_until: WaitUntil) -> None:
    """One batch wakes the later child and closes the earlier, the other the reverse: locks are taken in id order."""
    tasks = [made.add() for _ in range(4)]
    low = made.add("other", after=(tasks[0], tasks[3]))
    high = made.add("other", after=(tasks[1], tasks[2]))
    held = claims(made, 4)
    deadlocks = made.query("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")[0][0]
    with made.engine.connect() as connection:
        connection.execute(text("SELECT 1 FROM tasks WHERE id = :id FOR UPDATE"), {"id": low})
        threads = [
            threading.Thread(target=record, args=(made, (held[tasks[0]], BROKEN), (held[tasks[1]], DONE))),
            threading.Thread(target=record, args=(made, (held[tasks[2]], BROKEN), (held[tasks[3]], DONE))),
        ]
        for thread in threads:
            thread.start()
        wait_until(waiting(made, 2))
        # Neither holds the higher one while it waits for the lower one.
        with made.engine.connect() as other:
            other.execute(text("SELECT 1 FROM tasks WHERE id = :id FOR UPDATE NOWAIT"), {"id": high})
        connection.rollback()
    for thread in threads:
        thread.join()
    assert made.status(low, high) == ["cancelled", "cancelled"]
    assert made.query("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")[0][0] == deadlocks


# -- retry --------------------------------------------------------------------------------------------------------


def test_retry_brings_a_whole_family_back_to_its_end(made: Making) -> None:
    """After a failure, a retry of the head alone: all run in order, and their results are there for each other."""
    a = made.add(name="a")
    b, c = made.add(after=(a,), name="b"), made.add(after=(a,), name="c")
    d = made.add(after=(b, c), name="d")
    made.run(a, BROKEN)
    assert made.status(b, c, d) == ["cancelled"] * 3
    OperationsRepository(made.engine).retry_one(a, actor="ops")
    for task in (a, b, c):
        made.run(task, replace(DONE, result=task))
    assert made.tasks.parents_results([d]) == {d: {"b": b, "c": c}}
    made.run(d)
    for task in (b, c, d):
        row = made.row(task)
        assert (row.status, row.error_cause, row.error_message, row.attempt) == ("done", None, None, 1)


# -- size ---------------------------------------------------------------------------------------------------------


def test_a_chain_of_thousands(made: Making) -> None:
    """Five thousand tasks, each needing the one before: closed in one commit, brought back in one call, woken one by one."""
    added = made.add_all([NewTask("coder", name=f"t{n}", after=(f"t{n - 1}",) if n else ()) for n in range(5000)])
    assert [each.status for each in added[:2]] == [TaskStatus.PENDING, TaskStatus.BLOCKED]
    made.run(added[0].id, BROKEN)
    count = "SELECT status, count(*) FROM tasks GROUP BY status"
    assert dict(map(tuple, made.query(count))) == {"failed": 1, "cancelled": 4999}
    assert made.row(added[-1].id).error_message == f"needs {added[0].id} t0, which failed"
    done = OperationsRepository(made.engine).retry(TaskFilter(ids=[added[0].id]), actor="ops")
    assert len(done.family) == 4999
    assert dict(map(tuple, made.query(count))) == {"pending": 1, "blocked": 4999}
    for each in added[:3]:
        made.run(each.id)
    assert dict(map(tuple, made.query(count))) == {"done": 3, "pending": 1, "blocked": 4996}


def test_many_parents_that_fail_above_one_chain(made: Making) -> None:
    """Two hundred parents of one commit above a chain of two hundred: each link is looked at once."""
    parents = tuple(each.id for each in made.add_all([NewTask("coder") for _ in range(200)]))
    chain = [NewTask("other", name="c0", after=parents)]
    chain += [NewTask("other", name=f"c{n}", after=(f"c{n - 1}",)) for n in range(1, 200)]
    added = made.add_all(chain)
    record(made, *((claim, BROKEN) for claim in claims(made, 200).values()))
    assert set(made.status(*(each.id for each in added))) == {"cancelled"}
    assert {
        row.error_message.split()[1] for row in made.query("SELECT error_message FROM tasks WHERE agent = 'other'")
    } == {str(min(parents))}
