"""Taking the tasks of lost workers back, and handing back what a worker does not want: the moves, without a process."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, text

from orchestrator.domain.given import NewTask
from orchestrator.domain.outcome import Claim, RetryPolicy
from orchestrator.errors import ClaimLost
from orchestrator.repositories.operations import OperationsRepository
from orchestrator.repositories.workers import WorkerRepository
from tests.making import DONE, Making, new_worker


@pytest.fixture
def made(engine: Engine) -> Making:
    return Making.on(engine)


def bury(made: Making, worker: UUID | None = None) -> None:
    WorkerRepository(made.engine).mark_gone([worker or made.worker], "test")


def again(made: Making, **options: Any) -> list[Claim]:
    """What a new worker gets now, waits left out."""
    made.query("UPDATE tasks SET due = true, available_at = now() WHERE status = 'pending'")
    worker = new_worker(made.engine, "again")
    return made.claim(100, worker=worker) + made.claim(100, worker=worker, suspects=True, **options)


# -- the move -----------------------------------------------------------------------------------------------------


def test_a_lost_attempt_has_its_run(made: Making) -> None:
    """One transaction: the lost run, with who it was and how long it took, and the task pending at once."""
    task = made.add(max_retries=1)
    (claim,) = made.claim()
    made.query("UPDATE tasks SET started_at = started_at - interval '90 s'")
    bury(made)
    assert made.tasks.take_back() == [(task, 1, "pending")]
    run, row = made.runs.get(task, 1), made.row(task)
    assert (run.status, run.error_class, run.cause, run.message) == ("lost", "lost", "worker_lost", "worker w is gone")
    assert (run.worker, run.worker_id, run.host, run.late) == ("w", made.worker, "host", None)
    assert run.started_at == claim.started_at - timedelta(seconds=90)
    assert 90 <= run.duration_seconds < 150
    assert (row.status, row.claimed_by, row.lost_count, row.retry_count, row.due) == ("pending", None, 1, 0, True)
    assert (row.error_class, row.error_cause) == ("lost", "worker_lost")
    assert made.tasks.take_back() == []
    (second,) = again(made)
    assert (second.attempt, second.lost_count) == (2, 1)


def test_what_a_lost_attempt_used_is_kept(made: Making) -> None:
    """The live usage becomes the run's, marked as incomplete; what the meter must know is in the next claim."""
    made.add()
    made.claim()
    live = {"input_tokens": 7, "total_tokens": 9, "cost_usd": 0.25, "cost_source": "agent", "counter": "delta"}
    live |= {"turns": 2, "model": "m", "carry": {"ids": ["x"]}, "unknown": 1}
    made.query("UPDATE tasks SET live_usage = CAST(:live AS jsonb)", live=json.dumps(live))
    bury(made)
    made.tasks.take_back()
    run = made.runs.get(1, 1)
    assert (run.input_tokens, run.output_tokens, run.total_tokens, run.cost_usd) == (7, None, 9, 0.25)
    assert (run.cost_source, run.counter, run.turns, run.model, run.usage_complete) == ("agent", "delta", 2, "m", False)
    assert made.row(1).live_usage is None
    (claim,) = again(made)
    assert claim.meter == {"ids": ["x"]}


def test_without_reports_usage_is_unknown(made: Making) -> None:
    """No report is not zero, and not complete either."""
    made.add()
    made.claim()
    bury(made)
    made.tasks.take_back()
    run = made.runs.get(1, 1)
    assert (run.total_tokens, run.cost_usd, run.usage_complete) == (None, None, None)


def test_one_odd_number_keeps_nobody_running(made: Making) -> None:
    """A usage that no column takes is left out with a note, and the neighbours of its batch are taken back with it."""
    made.add_all([NewTask("coder") for _ in range(3)])
    made.claim(3)
    made.query("""UPDATE tasks SET live_usage = '{"total_tokens": 1e30, "turns": 4}' WHERE id = 2""")
    bury(made)
    assert [each[2] for each in made.tasks.take_back()] == ["pending"] * 3
    run = made.runs.get(2, 1)
    assert (run.total_tokens, run.turns) == (None, 4)
    assert run.notes is not None
    assert run.notes[0].startswith("total_tokens was 1000")


def test_a_start_ahead_of_the_clock_has_no_negative_time(made: Making) -> None:
    """After a failover to a server whose clock is behind, a run takes no time, never less."""
    made.add()
    made.claim()
    made.query("UPDATE tasks SET started_at = now() + interval '1 hour'")
    bury(made)
    made.tasks.take_back()
    assert made.runs.get(1, 1).duration_seconds == 0


# -- whose tasks --------------------------------------------------------------------------------------------------


def test_only_tasks_of_workers_that_no_longer_live(made: Making) -> None:
    """The living keep theirs, however old; the dead, those that signed off and those nobody knows lose theirs."""
    workers = [made.worker, *(new_worker(made.engine, name) for name in ("dead", "stopped", "unknown"))]
    made.add_all([NewTask("coder") for _ in workers])
    for worker in workers:
        made.claim(1, worker=worker)
    made.query("UPDATE tasks SET started_at = started_at - interval '30 days'")
    bury(made, workers[1])
    WorkerRepository(made.engine).stop(workers[2])
    made.query("DELETE FROM workers WHERE id = :id", id=workers[3])
    assert [each[0] for each in made.tasks.take_back()] == [2, 3, 4]
    assert made.status(1, 2, 3, 4) == ["running", "pending", "pending", "pending"]
    assert made.runs.get(4, 1).message == f"worker {workers[3]} is gone"


# -- batches ------------------------------------------------------------------------------------------------------


def test_batches_in_id_order_until_nothing_is_left(made: Making) -> None:
    """Each call takes the oldest that are left, up to its limit, and says which."""
    made.add_all([NewTask("coder", priority=n % 3) for n in range(25)])
    made.claim(25)
    bury(made)
    batches = []
    while batch := made.tasks.take_back(10):
        batches.append([each[0] for each in batch])
    assert batches == [list(range(1, 11)), list(range(11, 21)), list(range(21, 26))]
    assert made.query("SELECT count(*) FROM runs WHERE status = 'lost'")[0][0] == 25


def test_rows_in_other_hands_are_for_the_next_call(made: Making) -> None:
    """A row that somebody is moving is neither waited for nor lost: the next call has it."""
    made.add_all([NewTask("coder") for _ in range(3)])
    made.claim(3)
    bury(made)
    with made.engine.connect() as connection:
        connection.execute(text("SELECT 1 FROM tasks WHERE id = 2 FOR NO KEY UPDATE"))
        assert [each[0] for each in made.tasks.take_back()] == [1, 3]
    assert [each[0] for each in made.tasks.take_back()] == [2]


def test_two_that_take_back_at_once(made: Making) -> None:
    """Two connections share the tasks out: each is taken back once, with one run and one loss."""
    made.add_all([NewTask("coder") for _ in range(60)])
    made.claim(60)
    bury(made)
    start = threading.Barrier(2)
    found: list[int] = []

    def take() -> None:
        start.wait()
        while batch := made.tasks.take_back(7):
            found.extend(each[0] for each in batch)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while batch := made.tasks.take_back():  # what one held when the other looked last
        found.extend(each[0] for each in batch)
    assert sorted(found) == list(range(1, 61))
    assert [tuple(row) for row in made.query("SELECT lost_count, count(*) FROM tasks GROUP BY 1")] == [(1, 60)]
    assert made.query("SELECT count(*), count(DISTINCT task_id) FROM runs")[0] == (60, 60)


def test_record_and_take_back_of_one_attempt(made: Making, wait_until: Any) -> None:
    """Whichever comes first decides: a record that waits for the watchdog finds its attempt gone, and is kept as late."""
    task = made.add()
    (claim,) = made.claim()
    bury(made)
    told: list[Any] = []

    def record() -> None:
        try:
            told.append(made.runs.record_run(claim, DONE))
        except ClaimLost as error:
            told.append(error)

    with made.engine.connect() as connection:
        connection.execute(text("SELECT 1 FROM tasks FOR NO KEY UPDATE"))
        thread = threading.Thread(target=record)
        thread.start()
        wait_until(lambda: made.query("SELECT 1 FROM pg_locks WHERE NOT granted"))
        # The row is in our hands: the watchdog does not wait for it, the record does, and comes first.
        assert made.tasks.take_back() == []
    thread.join()
    assert (told[0].status, made.status(task), made.tasks.take_back()) == ("done", ["done"], [])
    other = made.add()
    made = replace(made, worker=new_worker(made.engine, "other"))
    (claim,) = made.claim()
    bury(made)
    made.tasks.take_back()
    record()
    assert isinstance(told[1], ClaimLost)
    run = made.runs.get(other, 1)
    assert (run.status, run.late["status"], made.status(other)) == ("lost", "done", ["pending"])  # type: ignore[index]


# -- what becomes of the task -------------------------------------------------------------------------------------


def lose(made: Making, claims: int = 1) -> list[tuple[int, int, str]]:
    """A new worker claims, suspects last, and is lost with what it holds."""
    made.query("UPDATE tasks SET due = true, available_at = now() WHERE status = 'pending'")
    worker = new_worker(made.engine, "next")
    taken = made.claim(claims, worker=worker) or made.claim(1, worker=worker, suspects=True)
    assert taken
    bury(made, worker)
    return made.tasks.take_back()


def test_a_task_that_was_alone_each_time_fails_first(made: Making) -> None:
    """Alone on its worker, a task is the suspect: it fails when it was lost more often than it may be retried."""
    task = made.add(max_retries=1)
    assert lose(made) == [(task, 1, "pending")]
    assert lose(made) == [(task, 2, "failed")]
    row = made.row(task)
    assert (row.error_class, row.error_cause, row.error_message) == ("lost", "worker_lost", "worker lost 2 times")
    assert (row.retry_count, row.lost_count) == (0, 2)
    assert [run.status for run in made.runs.of_task(task)] == ["lost", "lost"]


def test_innocents_have_three_losses(made: Making) -> None:
    """With others on its worker it may be lost twice, whatever max_retries says; the third loss ends it."""
    task = made.add(max_retries=0)
    for expected in ("pending", "pending", "failed"):
        made.query("UPDATE tasks SET lost_count = 0 WHERE status = 'pending' AND id <> :id", id=task)
        made.add()
        worker = new_worker(made.engine, "next")
        made.query("UPDATE tasks SET due = true, available_at = now() WHERE status = 'pending'")
        made.claim(100, worker=worker)
        made.claim(1, worker=worker, suspects=True)
        bury(made, worker)
        assert {id_: status for id_, _, status in made.tasks.take_back()}[task] == expected
    assert made.row(task).error_message == "worker lost 3 times"


def test_alone_counts_when_the_worker_died(made: Making) -> None:
    """Held is what the worker held when it was buried: batches of one do not make a task a suspect."""
    made.add_all([NewTask("coder", max_retries=0) for _ in range(3)])
    made.claim(3)
    bury(made)
    found = []
    while batch := made.tasks.take_back(1):
        found += batch
    assert [each[2] for each in found] == ["pending"] * 3


def test_the_first_loss_waits_for_nothing_later_ones_do(made: Making) -> None:
    """A deploy that went wrong costs no time; a task that is lost again and again slows down."""
    task = made.add(max_retries=9, retry=RetryPolicy(3600, 1, 3600))
    lose(made)
    first = made.query("SELECT due, available_at <= now() AS now FROM tasks")[0]
    assert (first.due, first.now) == (True, True)
    lose(made)
    assert made.row(task).lost_count == 2
    assert made.row(task).due is False


def test_a_requested_cancel_ends_with_the_worker(made: Making) -> None:
    """The worker dies before it could stop the agent: cancelled, with its lost run, and its children with it."""
    task = made.add()
    child = made.add("other", after=(task,))
    made.claim()
    OperationsRepository(made.engine).cancel_one(task, actor="ops")
    bury(made)
    assert made.tasks.take_back() == [(task, 1, "cancelled")]
    row = made.row(task)
    assert (row.status, row.error_class, row.error_cause, row.lost_count) == ("cancelled", "cancelled", "requested", 0)
    assert made.runs.get(task, 1).status == "lost"
    assert made.row(child).error_cause == "parent_cancelled"


def test_children_of_a_task_that_fails_by_losses(made: Making) -> None:
    """They are closed as after any other failure."""
    task = made.add(max_retries=0)
    child = made.add("other", after=(task,))
    assert lose(made) == [(task, 1, "failed")]
    assert made.row(child).error_cause == "parent_failed"


# -- handing back -------------------------------------------------------------------------------------------------


def test_handing_back_counts_nothing(made: Making) -> None:
    """An interrupted run each, no counter moved, pending at once; the outcome of an agent that ran all the same is late."""
    made.add_all([NewTask("coder") for _ in range(3)])
    claims = made.claim(3)
    held = [(claim.task_id, claim.attempt) for claim in claims]
    assert made.tasks.hand_back(made.worker, held[:2], "the answer was lost") == 2
    assert made.tasks.hand_back(made.worker, held[:2], "the answer was lost") == 0
    row, run = made.row(1), made.runs.get(1, 1)
    assert (row.status, row.retry_count, row.lost_count, row.due) == ("pending", 0, 0, True)
    assert (run.status, run.cause, run.message) == ("interrupted", "handed_back", "the answer was lost")
    assert made.status(3) == ["running"]
    with pytest.raises(ClaimLost):
        made.runs.record_run(claims[0], DONE)
    late = made.runs.get(1, 1).late
    assert late is not None
    assert (late["status"], made.status(1)) == ("done", ["pending"])


def test_only_what_the_fence_matches_is_handed_back(made: Making) -> None:
    """Another attempt or another worker's task stays as it is."""
    made.add_all([NewTask("coder") for _ in range(2)])
    made.claim(1)
    other = new_worker(made.engine, "other")
    made.claim(1, worker=other)
    assert made.tasks.hand_back(made.worker, [(1, 2), (2, 1), (99, 1)], "x") == 0
    assert made.tasks.hand_back(uuid4(), [(1, 1), (2, 1)], "x") == 0
    assert made.status(1, 2) == ["running", "running"]
    assert made.tasks.owned(made.worker) == {(1, 1)}
    assert made.tasks.hand_back(made.worker, [(1, 1)], "x") == 1


def test_a_cancelled_one_is_not_handed_back_to_anybody(made: Making) -> None:
    """A requested cancel wins here as well."""
    task = made.add()
    made.claim()
    OperationsRepository(made.engine).cancel_one(task, actor="ops")
    assert made.tasks.hand_back(made.worker, [(task, 1)], "x") == 1
    assert made.status(task) == ["cancelled"]
