"""What operators do to tasks: cancel, retry, hold, release, priority, pause."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from orchestrator.domain.given import NewTask
from orchestrator.domain.words import TaskStatus
from orchestrator.errors import Conflict, InvalidInput, NotFound
from orchestrator.repositories.adding import AddingRepository
from orchestrator.repositories.agents import AgentRepository
from orchestrator.repositories.audit import AuditRepository
from orchestrator.repositories.filters import TaskFilter
from orchestrator.repositories.operations import OperationsRepository
from tests.making import BROKEN, CRASHED, DONE, Making


@pytest.fixture
def made(engine: Engine) -> Making:
    return Making.on(engine)


@pytest.fixture
def operations(engine: Engine) -> OperationsRepository:
    return OperationsRepository(engine)


def ids(*wanted: int) -> TaskFilter:
    return TaskFilter(ids=wanted)


# -- cancel -------------------------------------------------------------------------------------------------------


def test_cancel_of_a_pending_task_is_final_at_once(made: Making, operations: OperationsRepository) -> None:
    """A pending task is cancelled on return, says by whom and why, and is never claimed."""
    task = made.add()
    assert operations.cancel_one(task, actor="ops", reason="not needed") is TaskStatus.CANCELLED
    row = made.row(task)
    assert (row.status, row.error_class, row.error_cause) == ("cancelled", "cancelled", "requested")
    assert row.error_message == "by ops: not needed"
    assert row.finished_at is not None
    assert made.claim(10) == []


def test_cancel_takes_blocked_descendants_along(made: Making, operations: OperationsRepository) -> None:
    """Every blocked descendant is cancelled with the parent named; what does not hang on it stays."""
    a = made.add()
    b = made.add(after=(a,))
    c = made.add(after=(b,), name="third")
    other = made.add()
    done = operations.cancel(ids(a), actor="ops")
    assert (done.ids, sorted(done.family)) == ([a], [b, c])
    assert made.status(a, b, c, other) == ["cancelled", "cancelled", "cancelled", "pending"]
    assert made.row(c).error_cause == "parent_cancelled"
    assert str(a) in made.row(c).error_message


def test_cancel_of_a_running_task_waits_for_its_end(made: Making, operations: OperationsRepository) -> None:
    """A running task stays running with the request noted; whatever comes out then, it is cancelled, and never retried."""
    task = made.add()
    (claim,) = made.claim()
    assert operations.cancel_one(task, actor="ops") is TaskStatus.RUNNING
    first = made.row(task).cancel_requested_at
    assert first is not None
    assert operations.cancel_one(task, actor="other") is TaskStatus.RUNNING
    assert made.row(task).cancel_requested_at == first
    assert made.tasks.cancel_requests(made.worker) == [(task, 1)]
    made.end(claim, CRASHED)
    assert made.status(task) == ["cancelled"]
    assert made.runs.get(task, 1).status == "transient"
    assert made.claim(10) == []
    assert operations.cancel_one(task, actor="ops") is TaskStatus.CANCELLED


@pytest.mark.parametrize("outcome", [DONE, BROKEN], ids=["done", "failed"])
def test_cancel_of_an_ended_task_is_a_conflict(made: Making, operations: OperationsRepository, outcome: Any) -> None:
    """What is done or failed stays as it is, and the error names task and status."""
    task = made.add()
    made.run(task, outcome)
    before = made.row(task)
    with pytest.raises(Conflict, match=f"task {task} has ended as {before.status}") as caught:
        operations.cancel_one(task, actor="ops")
    assert caught.value.ids == {"task": task, "status": before.status}
    assert made.row(task) == before
    assert AuditRepository(made.engine).list() == ([], None)


def test_cancel_of_several_ids_skips_what_has_ended(made: Making, operations: OperationsRepository) -> None:
    """Among several ids, ended ones are skipped with the reason, the others cancelled."""
    ended, live = made.add(), made.add()
    made.run(ended)
    done = operations.cancel(ids(ended, live), actor="ops")
    assert done.ids == [live]
    assert [(skipped.id, skipped.status) for skipped in done.skipped] == [(ended, TaskStatus.DONE)]


def test_an_unknown_id_changes_nothing(made: Making, operations: OperationsRepository) -> None:
    """NotFound names the missing ids, and the known one beside them is left alone."""
    task = made.add()
    for change in (operations.cancel, operations.retry, operations.hold, operations.release):
        with pytest.raises(NotFound, match="task 999 does not exist"):
            change(ids(task, 999), actor="ops")
    assert made.status(task) == ["pending"]
    with pytest.raises(InvalidInput):
        operations.cancel(ids(2**63), actor="ops")


def test_bulk_cancel_by_filter(made: Making, operations: OperationsRepository) -> None:
    """A filter cancels what matches and lives, over more than one batch, and leaves the rest."""
    made.add_all([NewTask("coder", tags={"team": "a"}) for _ in range(1203)] + [NewTask("other") for _ in range(3)])
    (first,) = made.claim()
    made.end(first)
    (running,) = made.claim()
    preview = operations.cancel(TaskFilter(agents=["coder"]), actor="ops", dry_run=True)
    assert (len(preview.ids), preview.requested, preview.dry_run) == (1201, [running.task_id], True)
    assert made.query("SELECT count(*) FROM tasks WHERE status = 'cancelled'")[0][0] == 0
    done = operations.cancel(TaskFilter(agents=["coder"]), actor="ops", reason="over")
    assert (len(done.ids), done.requested, done.skipped) == (1201, [running.task_id], [])
    assert len(made.claim(10, "other")) == 3
    assert made.query("SELECT count(*) FROM audit WHERE action = 'cancel' AND reason = 'over'")[0][0] == 1202
    limited = operations.cancel(TaskFilter(agents=["other"], limit=2), actor="ops")
    assert len(limited.requested) == 2


def test_dry_run_of_cancel_names_the_family(made: Making, operations: OperationsRepository) -> None:
    """A dry run counts the descendants that would follow."""
    a = made.add()
    b = made.add(after=(a,))
    c = made.add(after=(b,))
    preview = operations.cancel(ids(a), actor="ops", dry_run=True)
    assert (preview.ids, preview.family) == ([a], [b, c])
    assert made.status(a, b, c) == ["pending", "blocked", "blocked"]


def test_cancel_and_finish_at_once_have_one_end(made: Making, operations: OperationsRepository) -> None:
    """However cancel and record meet: an accepted cancel ends as cancelled, a refused one as done, nothing else."""
    made.add_all([NewTask("coder") for _ in range(60)])
    claims = made.claim(60)
    accepted: set[int] = set()
    refused: set[int] = set()
    start = threading.Barrier(2)

    def cancel() -> None:
        start.wait()
        for claim in claims:
            try:
                operations.cancel_one(claim.task_id, actor="ops")
                accepted.add(claim.task_id)
            except Conflict:
                refused.add(claim.task_id)

    thread = threading.Thread(target=cancel)
    thread.start()
    start.wait()
    for claim in reversed(claims):
        made.end(claim, CRASHED if claim.task_id % 2 else DONE)
    thread.join()
    for claim in claims:
        (status,) = made.status(claim.task_id)
        if claim.task_id in refused:
            assert status == "done"
        else:
            assert status == "cancelled"
    assert accepted | refused == {claim.task_id for claim in claims}


def test_cancel_waits_for_a_row_lock_and_judges_after_it(
    made: Making, operations: OperationsRepository, wait_until: Callable[..., Any]
) -> None:
    """A cancel that waits behind a record sees what the record made of the task."""
    task = made.add()
    (claim,) = made.claim()
    found: list[Any] = []

    def cancel() -> None:
        try:
            found.append(operations.cancel_one(task, actor="ops"))
        except Conflict as error:
            found.append(error)

    with made.engine.connect() as connection:
        connection.execute(text("SELECT 1 FROM tasks WHERE id = :id FOR NO KEY UPDATE"), {"id": task})
        thread = threading.Thread(target=cancel)
        thread.start()
        wait_until(lambda: made.query("SELECT 1 FROM pg_locks WHERE NOT granted"))
        connection.execute(
            text("UPDATE tasks SET status = 'done', claimed_by = NULL, finished_at = clock_timestamp() WHERE id = :id"),
            {"id": task},
        )
        connection.commit()
    thread.join()
    assert isinstance(found[0], Conflict)
    assert made.status(task) == ["done"]
    assert claim.attempt == 1


# -- retry --------------------------------------------------------------------------------------------------------


def test_retry_opens_a_failed_task_again(made: Making, operations: OperationsRepository) -> None:
    """Counters start anew, the attempt goes on, errors and end are gone, and it is claimed again."""
    task = made.add(max_retries=0)
    made.query("UPDATE tasks SET lost_count = 0, limited_count = 3, limited_since = now() WHERE id = :id", id=task)
    made.run(task, CRASHED)
    made.query("UPDATE tasks SET retry_count = 2, lost_count = 1 WHERE id = :id", id=task)
    assert operations.retry_one(task, actor="ops") is TaskStatus.PENDING
    row = made.row(task)
    assert (row.attempt, row.retry_count, row.lost_count, row.limited_count) == (1, 0, 0, 0)
    assert (row.limited_since, row.error_class, row.error_message, row.finished_at) == (None,) * 4
    assert made.claim()[0].attempt == 2


@pytest.mark.parametrize("status", ["pending", "running", "done"])
def test_retry_of_what_has_not_failed_is_a_conflict(
    made: Making, operations: OperationsRepository, status: str
) -> None:
    """Only failed and cancelled tasks can be retried."""
    task = made.add()
    if status != "pending":
        (claim,) = made.claim()
        if status == "done":
            made.end(claim)
    with pytest.raises(Conflict, match=f"task {task} is {status}: only failed and cancelled tasks"):
        operations.retry_one(task, actor="ops")
    assert made.status(task) == [status]


def test_retry_revives_descendants_that_followed(made: Making, operations: OperationsRepository) -> None:
    """Descendants cancelled because of the parent are blocked again; one that a person cancelled stays so."""
    a = made.add(max_retries=0)
    b, by_hand = made.add(after=(a,)), made.add(after=(a,))
    c, below = made.add(after=(b,)), made.add(after=(by_hand,))
    operations.cancel_one(by_hand, actor="ops")
    made.run(a, BROKEN)
    assert made.status(a, b, c, by_hand, below) == ["failed", *["cancelled"] * 4]
    done = operations.retry(ids(a), actor="ops")
    assert (done.ids, done.family, done.wake) == ([a], [b, c], {"coder"})
    assert made.status(a, b, c, by_hand, below) == ["pending", "blocked", "blocked", "cancelled", "cancelled"]
    for task in (a, b, c):
        made.run(task)
    assert made.status(a, b, c) == ["done"] * 3


def test_retry_of_one_of_two_failed_parents_leaves_the_child(made: Making, operations: OperationsRepository) -> None:
    """A child of two failed parents stays cancelled until both are open again."""
    a, b = made.add(), made.add()
    child = made.add(after=(a, b))
    made.run(a, BROKEN)
    made.run(b, BROKEN)
    operations.retry_one(a, actor="ops")
    assert made.status(a, b, child) == ["pending", "failed", "cancelled"]
    operations.retry_one(b, actor="ops")
    assert made.status(a, b, child) == ["pending", "pending", "blocked"]


def test_retry_of_a_child_needs_its_parent(made: Making, operations: OperationsRepository) -> None:
    """A child whose parent stays failed is not opened to wait for ever: the error names the parent to retry."""
    a = made.add()
    child = made.add(after=(a,))
    made.run(a, BROKEN)
    with pytest.raises(Conflict, match=f"needs {a}, which failed: retry {a}"):
        operations.retry_one(child, actor="ops")
    assert made.status(child) == ["cancelled"]
    done = operations.retry(ids(child, a), actor="ops")
    assert (done.ids, done.family) == ([a, child], [])
    assert made.status(a, child) == ["pending", "blocked"]


def test_retry_of_a_child_of_a_running_parent_blocks_it(made: Making, operations: OperationsRepository) -> None:
    """A child that was cancelled alone becomes blocked while its parent still runs, and pending when it is done."""
    a = made.add()
    child = made.add(after=(a,))
    operations.cancel_one(child, actor="ops")
    (claim,) = made.claim()
    assert operations.retry_one(child, actor="ops") is TaskStatus.BLOCKED
    made.end(claim)
    assert made.status(child) == ["pending"]


def test_retry_meets_a_parent_that_ends_in_the_same_moment(
    made: Making, operations: OperationsRepository, wait_until: Callable[..., Any]
) -> None:
    """The child is never left blocked behind a parent that was done meanwhile."""
    a = made.add()
    child = made.add(after=(a,))
    operations.cancel_one(child, actor="ops")
    (claim,) = made.claim()
    with made.engine.connect() as connection:
        connection.execute(text("SELECT 1 FROM tasks WHERE id = :id FOR NO KEY UPDATE"), {"id": child})
        thread = threading.Thread(target=operations.retry_one, args=(child,), kwargs={"actor": "ops"})
        thread.start()  # it holds the parent now, and waits for the child
        wait_until(lambda: made.query("SELECT 1 FROM pg_locks WHERE NOT granted"))
        recorder = threading.Thread(target=made.end, args=(claim,))
        recorder.start()
        wait_until(lambda: len(made.query("SELECT 1 FROM pg_locks WHERE NOT granted")) >= 2)
        connection.rollback()
    thread.join()
    recorder.join()
    assert made.status(a, child) == ["done", "pending"]


def test_retry_meets_a_child_that_is_being_added(
    made: Making, operations: OperationsRepository, wait_until: Callable[..., Any]
) -> None:
    """A child added below a closed task while its head is retried is opened with it, not left behind as cancelled."""
    a = made.add()
    b = made.add(after=(a,))
    made.run(a, BROKEN)
    with Session(made.engine) as session, session.begin():
        (new,) = AddingRepository(made.engine).add_many([NewTask("coder", after=(b,))], session)
        assert new.status is TaskStatus.CANCELLED
        thread = threading.Thread(target=operations.retry_one, args=(a,), kwargs={"actor": "ops"})
        thread.start()
        wait_until(lambda: made.query("SELECT 1 FROM pg_locks WHERE NOT granted"))
    thread.join()
    assert made.status(a, b, new.id) == ["pending", "blocked", "blocked"]


def test_retry_respects_a_live_twin(made: Making, operations: OperationsRepository) -> None:
    """A unique key that a newer live task has is a conflict that names both; in bulk it is skipped and the rest moves."""
    old = made.add(unique_key="nightly")
    made.run(old, BROKEN)
    twin = made.add(unique_key="nightly")
    other = made.add()
    operations.cancel_one(other, actor="ops")
    with pytest.raises(Conflict, match=f"task {old} has the unique key 'nightly', which the live task {twin}"):
        operations.retry_one(old, actor="ops")
    done = operations.retry(TaskFilter(statuses=["failed", "cancelled"]), actor="ops")
    assert done.ids == [other]
    assert [skipped.id for skipped in done.skipped] == [old]


def test_retry_of_two_tasks_with_one_key_opens_the_older(made: Making, operations: OperationsRepository) -> None:
    """Two ended tasks of one key cannot both live; the first is opened, the second skipped, in dry run as well."""
    first = made.add(unique_key="k")
    operations.cancel_one(first, actor="ops")
    second = made.add(unique_key="k")
    operations.cancel_one(second, actor="ops")
    for dry_run in (True, False):
        done = operations.retry(ids(first, second), actor="ops", dry_run=dry_run)
        assert done.ids == [first]
        assert f"live task {first}" in done.skipped[0].why
    assert made.status(first, second) == ["pending", "cancelled"]


def test_retry_and_add_of_one_key_race(made: Making, operations: OperationsRepository) -> None:
    """Of a retry and an add of the same key at once, exactly one has the live task, and neither sees a database error."""
    for round_ in range(10):
        old = made.add(unique_key="k")
        operations.cancel_one(old, actor="ops")
        start = threading.Barrier(2)
        faults: list[BaseException] = []

        def retry(task: int = old, start: threading.Barrier = start, faults: list[BaseException] = faults) -> None:
            start.wait()
            try:
                operations.retry_one(task, actor="ops")
            except Conflict:
                pass
            except BaseException as error:
                faults.append(error)

        thread = threading.Thread(target=retry)
        thread.start()
        start.wait()
        made.add(unique_key="k")
        thread.join()
        assert faults == [], round_
        live = made.query("SELECT id FROM tasks WHERE unique_key = 'k' AND status = 'pending'")
        assert len(live) == 1
        operations.cancel_one(live[0].id, actor="ops")


def test_bulk_retry_over_batches_keeps_families_together(made: Making, operations: OperationsRepository) -> None:
    """More failures than one batch, each with a child: all are opened, once, and a dry run says the same."""
    parents = made.add_all([NewTask("coder") for _ in range(510)])
    made.add_all([NewTask("coder", after=(parent.id,)) for parent in parents])
    made.end_all(made.claim(510), BROKEN)
    everything = TaskFilter(statuses=["failed", "cancelled"])
    preview = operations.retry(everything, actor="ops", dry_run=True)
    done = operations.retry(everything, actor="ops")
    assert sorted(preview.ids + preview.family) == sorted(done.ids + done.family)
    assert len(done.ids) + len(done.family) == 1020
    counts = made.query("SELECT status, count(*) FROM tasks GROUP BY 1 ORDER BY 1")
    assert [tuple(row) for row in counts] == [("blocked", 510), ("pending", 510)]


def test_a_replaced_task_of_a_plan_is_not_retried(made: Making, operations: OperationsRepository) -> None:
    """A task that a later submission replaced is left alone, also as a descendant."""
    task = made.add()
    child = made.add(after=(task,))
    made.query("UPDATE tasks SET plan = 'p' WHERE id = :id", id=task)
    made.run(task, BROKEN)
    made.query("UPDATE tasks SET superseded_at = now() WHERE id = :id", id=child)
    assert operations.retry(ids(task), actor="ops").family == []
    operations.cancel_one(task, actor="ops")
    made.query("UPDATE tasks SET superseded_at = now() WHERE id = :id", id=task)
    with pytest.raises(Conflict, match="replaced by a later submission of plan p"):
        operations.retry_one(task, actor="ops")
    assert operations.retry(TaskFilter(statuses=["failed", "cancelled"]), actor="ops").ids == []


# -- hold, release, priority ----------------------------------------------------------------------------------------


def test_hold_and_release(made: Making, operations: OperationsRepository) -> None:
    """A held task is not claimed until it is released; both can be repeated."""
    task = made.add()
    assert operations.hold(ids(task), actor="ops").ids == [task]
    assert operations.hold(ids(task), actor="ops").already == [task]
    assert made.claim() == []
    released = operations.release(ids(task), actor="ops")
    assert (released.ids, released.wake) == ([task], {"coder"})
    assert operations.release(ids(task), actor="ops").already == [task]
    assert [claim.task_id for claim in made.claim()] == [task]


def test_hold_of_what_runs_or_has_ended_is_a_conflict(made: Making, operations: OperationsRepository) -> None:
    """Holding promises that nothing starts, so a running task is refused; an ended one, too."""
    task = made.add()
    (claim,) = made.claim()
    with pytest.raises(Conflict, match=f"task {task} is running: hold changes nothing"):
        operations.hold(ids(task), actor="ops")
    made.end(claim)
    for change in (operations.hold, operations.release):
        with pytest.raises(Conflict, match="is done"):
            change(ids(task), actor="ops")


def test_a_child_held_while_blocked_stays_held(made: Making, operations: OperationsRepository) -> None:
    """A hold on a blocked task survives its parent's end."""
    a = made.add()
    child = made.add(after=(a,))
    operations.hold(ids(child), actor="ops")
    made.run(a)
    assert made.status(child) == ["pending"]
    assert made.claim() == []
    operations.release(ids(child), actor="ops")
    assert made.claim()[0].task_id == child


def test_priority_changes_the_order(made: Making, operations: OperationsRepository) -> None:
    """A larger priority is claimed first; the audit says which."""
    first, second = made.add(), made.add()
    operations.set_priority(ids(second), 7, actor="ops", reason="urgent")
    assert [claim.task_id for claim in made.claim(2)] == [second, first]
    (entry,), _ = AuditRepository(made.engine).list()
    assert (entry["action"], entry["details"], entry["reason"]) == ("priority", {"priority": 7}, "urgent")
    with pytest.raises(InvalidInput, match="32 bits"):
        operations.set_priority(ids(second), 2**31, actor="ops")


def test_a_batch_never_holds_claims_back(made: Making, operations: OperationsRepository) -> None:
    """While a bulk change holds row locks, claims skip those rows and take others."""
    made.add_all([NewTask("coder") for _ in range(3)])
    with made.engine.connect() as connection:
        connection.execute(text("SELECT 1 FROM tasks ORDER BY id LIMIT 2 FOR NO KEY UPDATE"))
        assert [claim.task_id for claim in made.claim(3)] == [3]


def test_operations_survive_a_deadlock(made: Making, operations: OperationsRepository, wait_until: Any) -> None:
    """A batch that is the victim of a deadlock is done again; it may not surface, and nothing is done twice."""
    a, b = made.add(), made.add()
    with made.engine.connect() as connection:
        connection.execute(text("SET LOCAL deadlock_timeout = '1min'"))  # so that the other one is the victim
        connection.execute(text("SELECT 1 FROM tasks WHERE id = :id FOR UPDATE"), {"id": b})
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(operations.hold(ids(a, b), actor="ops")))
        thread.start()
        wait_until(lambda: made.query("SELECT 1 FROM pg_locks WHERE NOT granted"))
        connection.execute(text("SELECT 1 FROM tasks WHERE id = :id FOR UPDATE"), {"id": a})
        connection.commit()
    thread.join()
    assert results[0].ids == [a, b]
    assert made.query("SELECT count(*) FROM audit")[0][0] == 2


# -- agents and the audit trail -----------------------------------------------------------------------------------


def test_pause_and_resume(made: Making, engine: Engine) -> None:
    """A paused agent is not claimed; a pause for some time ends by itself; resume says whether it was paused."""
    agents = AgentRepository(engine)
    made.add()
    agents.pause("coder", actor="ops", reason="budget")
    assert made.claim() == []
    assert agents.paused()["coder"]["reason"] == "budget"
    agents.pause("coder", actor="ops", seconds=3600)
    assert agents.paused()["coder"]["until"] is not None
    made.query("UPDATE agents SET paused_until = clock_timestamp() - interval '1 second'")
    assert agents.paused() == {}
    assert len(made.claim()) == 1
    made.add()
    agents.pause("coder", actor="ops")
    assert agents.resume("coder", actor="ops").paused
    assert not agents.resume("coder", actor="ops")
    assert len(made.claim()) == 1
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InvalidInput):
            agents.pause("coder", actor="ops", seconds=seconds)


def test_the_audit_trail_is_paged(made: Making, operations: OperationsRepository) -> None:
    """Newest first, page by page, by task and by actor."""
    tasks = [made.add() for _ in range(3)]
    for task in tasks:
        operations.hold(ids(task), actor="ann")
    operations.release(ids(tasks[0]), actor="bob", reason="go")
    audit = AuditRepository(made.engine)
    page, after = audit.list(limit=3)
    rest, end = audit.list(limit=3, after_id=after)
    assert [entry["task_id"] for entry in page + rest] == [tasks[0], *reversed(tasks)]
    assert end is None
    assert [entry["action"] for entry in audit.list(task_id=tasks[0])[0]] == ["release", "hold"]
    assert [entry["actor"] for entry in audit.list(actor="bob")[0]] == ["bob"]
