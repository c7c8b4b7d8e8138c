"""Unit 3: the run of an attempt and its task's move, under the fence, once, whatever the agent produced."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text

from orchestrator.domain.given import NewTask
from orchestrator.domain.outcome import Claim, Outcome, RetryPolicy, TranscriptSize, Usage
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import ClaimLost, NotFound
from orchestrator.repositories import runs as runs_module
from orchestrator.repositories.filters import TaskFilter
from orchestrator.repositories.operations import OperationsRepository
from orchestrator.repositories.runs import Ended
from orchestrator.repositories.workers import WorkerRepository
from tests.making import BROKEN, CRASHED, DONE, Making, new_worker

VALUES = Path(__file__).parent / "inputs" / "hostile-values.jsonl"
NUL, HALF, MARK = chr(0), chr(0xD800), chr(0xFFFD)


@pytest.fixture
def made(engine: Engine) -> Making:
    return Making.on(engine)


def lose(made: Making, worker: Any) -> None:
    """Bury *worker* and take its tasks back, to be claimed again at once."""
    WorkerRepository(made.engine).mark_gone([worker], "test")
    made.tasks.take_back()
    made.query("UPDATE tasks SET due = true, available_at = now() WHERE status = 'pending'")


def claimed(made: Making, **values: Any) -> Claim:
    made.add(**values)
    (claim,) = made.claim()
    return claim


# -- what is stored -----------------------------------------------------------------------------------------------


def test_all_of_an_outcome_is_stored(made: Making) -> None:
    """Every part of the outcome has its column, on the run and where it belongs on the task."""
    claim = claimed(made)
    usage = Usage(10, 5, 15, 0.25, "agent", "delta", True, 3, "m-1")
    outcome = Outcome(
        OutcomeClass.DONE,
        cause="no_change",
        message="fine",
        result={"a": [1, None, 2.5]},
        exit_code=0,
        usage=usage,
        session="s-1",
        transcript=TranscriptSize(100, 7, False),
        notes=("one", "two"),
        elapsed=1.5,
    )
    run = made.runs.record_run(claim, outcome, worker="w", host="h")
    assert (run.status, run.error_class, run.cause, run.message) == ("done", None, "no_change", "fine")
    assert (run.result, run.late, run.exit_code, run.signal) == ({"a": [1, None, 2.5]}, None, 0, None)
    assert (run.worker, run.worker_id, run.host) == ("w", claim.claimed_by, "h")
    assert (run.input_tokens, run.output_tokens, run.total_tokens, run.turns) == (10, 5, 15, 3)
    assert (run.cost_usd, run.cost_source, run.counter, run.model) == (0.25, "agent", "delta", "m-1")
    assert (run.usage_complete, run.session, run.notes) == (True, "s-1", ["one", "two"])
    assert (run.transcript_bytes, run.transcript_dropped_bytes, run.transcript_replaced) == (100, 7, False)
    assert run.started_at == claim.started_at
    assert run.finished_at - run.started_at == timedelta(seconds=1.5)
    assert run.duration_seconds == 1.5
    row = made.row(claim.task_id)
    assert (row.status, row.result, row.session, row.claimed_by) == ("done", {"a": [1, None, 2.5]}, "s-1", None)
    assert (row.finished_at, row.error_class, row.error_message) == (run.finished_at, None, None)


def test_the_meter_goes_on_with_the_next_attempt(made: Making) -> None:
    """What the meter must know of an attempt is in the next claim, and stays when an attempt says nothing of it."""
    made.add(retry=RetryPolicy(0, 1, 0), max_retries=9)
    carried: dict[str, Any] = {"amount": [1, None, 0.5], "ids": ["a"]}
    found = []
    for usage in (None, Usage(total_tokens=1, carry=carried), None, Usage(carry={"ids": [NUL]})):
        (claim,) = made.claim()
        found.append(claim.meter)
        made.end(claim, replace(CRASHED, usage=usage))
    assert found == [None, None, carried, carried]
    assert made.row(1).meter == {"ids": [MARK]}


def test_what_is_unknown_is_null(made: Making) -> None:
    """An outcome that says nothing but its class leaves nulls, not zeros and not empty texts."""
    run = made.runs.record_run(claimed(made), Outcome(OutcomeClass.DONE))
    for name in ("cause", "message", "exit_code", "signal", "worker", "host", "result", "late", "session", "notes"):
        assert getattr(run, name) is None, name
    for name in ("input_tokens", "total_tokens", "turns", "model", "cost_usd", "cost_source", "usage_complete"):
        assert getattr(run, name) is None, name
    assert made.query("SELECT result IS NULL AND late IS NULL FROM runs")[0][0]


def test_a_result_of_a_failure_stays_on_the_run(made: Making) -> None:
    """Only a done task has a result; what a failed attempt produced is on its run, and why it failed on both."""
    claim = claimed(made)
    made.end(claim, replace(BROKEN, result=["half"]))
    row, run = made.row(claim.task_id), made.runs.get(claim.task_id, 1)
    assert (row.result, run.result) == (None, ["half"])
    assert (row.error_class, row.error_cause, row.error_message) == ("permanent", "bad_input", "cannot be done")
    assert (run.error_class, run.cause, run.message) == ("permanent", "bad_input", "cannot be done")


def test_a_retry_waits_in_the_database(made: Making) -> None:
    """The wait goes into available_at by the database's clock; due says whether it lies ahead."""
    at_once, later, limited = (
        claimed(made, retry=RetryPolicy(0, 1, 0)),
        claimed(made),
        claimed(made),
    )
    made.end(at_once, CRASHED)
    made.end(later, Outcome(OutcomeClass.RATE_LIMITED, retry_after=3600))
    reset = datetime.fromisoformat("2999-01-01T00:00:00")  # without an offset: taken as UTC
    made.end(limited, Outcome(OutcomeClass.RATE_LIMITED, retry_at=reset))
    rows = made.query(
        "SELECT status, due, retry_count, limited_count, extract(epoch FROM available_at - now()) AS wait"
        " FROM tasks ORDER BY id"
    )
    assert [(row.status, row.due, row.retry_count, row.limited_count) for row in rows] == [
        ("pending", True, 1, 0),
        ("pending", False, 0, 1),
        ("pending", False, 0, 1),
    ]
    assert rows[0].wait <= 0
    assert 3500 < rows[1].wait <= 3600
    assert 604_700 < rows[2].wait <= 604_800  # a reset further away than a week is not believed


@pytest.mark.parametrize(
    "retry",
    [
        "[]",
        '"soon"',
        '{"initial": "x", "factor": null, "max": []}',
        '{"initial": -1, "factor": -1, "max": -1}',
        '{"initial": 1e300, "factor": 1e300, "max": 1e300}',
        '{"initial": 1e999, "factor": 1e999, "max": 1e999}',
    ],
)
def test_a_policy_that_makes_no_sense(made: Making, retry: str) -> None:
    """Whatever an INSERT by hand put into retry: the task is claimed, its failure recorded, its wait within bounds."""
    made.query("INSERT INTO tasks (agent, retry) VALUES ('coder', CAST(:retry AS jsonb))", retry=retry)
    (claim,) = made.claim()
    made.end(claim, CRASHED)
    (row,) = made.query("SELECT status, available_at - now() < interval '11 years' AS bounded FROM tasks")
    assert (row.status, row.bounded) == ("pending", True)


# -- the fence ----------------------------------------------------------------------------------------------------

WRONG = ["attempt", "worker", "status"]


@pytest.mark.parametrize("part", WRONG)
def test_the_fence_has_three_parts(made: Making, part: str) -> None:
    """Another attempt, another worker, or a task that does not run: nothing is written, and the caller is told."""
    claim = claimed(made)
    if part == "attempt":
        wrong = replace(claim, attempt=2)
    elif part == "worker":
        wrong = replace(claim, claimed_by=uuid4())
    else:
        made.query("UPDATE tasks SET status = 'waiting', claimed_by = NULL")
        wrong = claim
    before = made.row(claim.task_id)
    with pytest.raises(ClaimLost) as told:
        made.runs.record_run(wrong, DONE)
    assert (told.value.ids["task"], told.value.ids["attempt"]) == (claim.task_id, wrong.attempt)
    assert made.row(claim.task_id) == before
    assert made.runs.of_task(claim.task_id) == []


def test_a_stranger_does_not_write_beside_a_lost_run(made: Making) -> None:
    """The late column belongs to the worker whose attempt it was, and to nobody else."""
    claim = claimed(made)
    lose(made, made.worker)
    with pytest.raises(ClaimLost):
        made.runs.record_run(replace(claim, claimed_by=uuid4()), DONE)
    assert made.runs.get(claim.task_id, 1).late is None


def test_the_move_and_its_lock_come_one_after_the_other(made: Making, wait_until: Any) -> None:
    """A record that waits for a row which is cancelled meanwhile sees the request, and cancels."""
    claim = claimed(made)
    with made.engine.connect() as connection:
        connection.execute(text("UPDATE tasks SET cancel_requested_at = now()"))
        thread = threading.Thread(target=made.end, args=(claim,))
        thread.start()
        wait_until(lambda: made.query("SELECT 1 FROM pg_locks WHERE NOT granted"))
        connection.commit()
        thread.join()
    assert made.status(claim.task_id) == ["cancelled"]


# -- once, and again ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [DONE, BROKEN, CRASHED], ids=lambda outcome: outcome.status.value)
def test_a_record_repeated_after_an_unknown_commit(made: Making, outcome: Outcome) -> None:
    """The second time finds its own run and returns it; nothing is counted or written again."""
    claim = claimed(made)
    first = made.runs.record_run(claim, outcome)
    before = made.row(claim.task_id)
    again = made.runs.record_run(claim, replace(outcome, message="another"))
    assert (again.id, again.message, again.recorded_at) == (first.id, first.message, first.recorded_at)
    assert made.row(claim.task_id) == before
    assert again.late is None


def test_a_record_repeated_while_the_next_attempt_runs(made: Making) -> None:
    """An old commit's answer may come when the retry already runs: it is not touched."""
    first = claimed(made, retry=RetryPolicy(0, 1, 0))
    made.end(first, CRASHED)
    made.claim()
    before = made.row(first.task_id)
    assert made.runs.record_run(first, CRASHED).attempt == 1
    assert made.row(first.task_id) == before
    assert len(made.runs.of_task(first.task_id)) == 1


def test_a_batch_may_hold_old_and_new(made: Making) -> None:
    """Repeated, late and new outcomes of one batch each get their own answer, in the order given."""
    old, lost = claimed(made), claimed(made)
    made.end(old)
    lose(made, made.worker)
    other = new_worker(made.engine, "other")
    new = claimed(replace(made, worker=other))
    batch = made.runs.record_runs([Ended(claim, DONE) for claim in (new, lost, old)])
    assert [(r.task_id, r.status, r.late) for r in batch.recorded] == [
        (new.task_id, "done", False),
        (lost.task_id, None, True),
        (old.task_id, "done", False),
    ]


def test_two_that_record_one_attempt_at_once(made: Making) -> None:
    """The recorder and the spool of its own host may both offer an outcome: one run, both are told the same."""
    claims = [claimed(made) for _ in range(5)]
    start = threading.Barrier(2)
    found: list[list[Any]] = []

    def record() -> None:
        start.wait()
        found.append([made.runs.record_run(claim, DONE).id for claim in claims])

    threads = [threading.Thread(target=record) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert made.query("SELECT count(*) FROM runs")[0][0] == 5


# -- late outcomes (S06) ------------------------------------------------------------------------------------------


def test_a_late_outcome_is_kept_once_beside_its_lost_run(made: Making) -> None:
    """It fills the late column of its own run, never another's, and the task does not change; the first one stays."""
    late = claimed(made)
    lose(made, made.worker)
    second = replace(made, worker=new_worker(made.engine, "b"))
    (now,) = second.claim(suspects=True)
    before = made.row(late.task_id)
    outcome = replace(DONE, usage=Usage(1, 2, 3, 0.5), message="done after all")
    for repeat in (outcome, BROKEN):
        with pytest.raises(ClaimLost):
            made.runs.record_run(late, repeat)
        assert made.row(late.task_id) == before
    run = made.runs.get(late.task_id, 1)
    assert (run.status, run.cause, run.result) == ("lost", "worker_lost", None)
    assert run.late == {
        "status": "done",
        "cause": None,
        "message": "done after all",
        "result": {"ok": True},
        "exit_code": None,
        "elapsed": 0.5,
        "usage": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3, "cost_usd": 0.5},
    }
    second.end(now)
    assert [each.late is None for each in made.runs.of_task(late.task_id)] == [False, True]
    assert made.status(late.task_id) == ["done"]


def test_an_older_attempt_reports_after_the_last_one_failed(made: Making) -> None:
    """Attempt 3 fails for good, then attempt 2 reports success: the task stays failed, and attempt 2 has its late."""
    made.add(max_retries=3)
    workers = [made, *(replace(made, worker=new_worker(made.engine, name)) for name in "bc")]
    claims = []
    for each in workers:
        (claim,) = each.claim() or each.claim(suspects=True)
        claims.append(claim)
        if each is not workers[-1]:
            lose(made, each.worker)
    assert [claim.attempt for claim in claims] == [1, 2, 3]
    workers[-1].end(claims[2], BROKEN)
    before = made.row(1)
    with pytest.raises(ClaimLost):
        made.runs.record_run(claims[1], DONE)
    assert made.row(1) == before
    assert before.status == "failed"
    runs = made.runs.of_task(1)
    assert [run.status for run in runs] == ["lost", "lost", "permanent"]
    assert [run.late and run.late["status"] for run in runs] == [None, "done", None]


def test_a_late_outcome_without_any_run(made: Making) -> None:
    """A task that was removed meanwhile: the caller is told, nothing fails."""
    claim = claimed(made)
    made.query("DELETE FROM tasks")
    with pytest.raises(ClaimLost):
        made.runs.record_run(claim, DONE)
    with pytest.raises(NotFound):
        made.runs.get(claim.task_id, 1)


# -- a requested cancel -------------------------------------------------------------------------------------------


def test_a_requested_cancel_wins(made: Making) -> None:
    """Whatever came out, the task is cancelled; the run keeps its own class and result, and children follow."""
    kinds = list(OutcomeClass)
    made.add_all([NewTask("coder") for _ in kinds])
    claims = made.claim(len(kinds))
    children = [made.add(after=(claim.task_id,)) for claim in claims]
    wanted = TaskFilter(ids=[claim.task_id for claim in claims])
    assert len(OperationsRepository(made.engine).cancel(wanted, actor="ops").requested) == len(kinds)
    batch = [Ended(claim, Outcome(kind, result="R")) for claim, kind in zip(claims, kinds, strict=True)]
    assert made.runs.record_runs(batch).wake == set()
    rows = made.query("SELECT * FROM tasks WHERE id <= :last", last=claims[-1].task_id)
    assert {(row.status, row.error_class, row.error_cause, row.result) for row in rows} == {
        ("cancelled", "cancelled", "requested", None)
    }
    assert all(row.cancel_requested_at and row.finished_at for row in rows)
    runs = made.query("SELECT status, result FROM runs ORDER BY task_id")
    assert [(run.status, run.result) for run in runs] == [(kind, "R") for kind in kinds]
    assert set(made.status(*children)) == {"cancelled"}
    assert made.claim(5) == []


# -- what the database would refuse (S24) -------------------------------------------------------------------------


@pytest.mark.parametrize("line", VALUES.read_text("utf-8").splitlines(), ids=lambda line: json.loads(line)["case"])
def test_hostile_results_are_kept(made: Making, line: str) -> None:
    """Whatever the result holds, the run is recorded; what fits comes back as it was, what does not is replaced."""
    value = json.loads(line)["result"]
    claim = claimed(made)
    run = made.runs.record_run(claim, Outcome(OutcomeClass.DONE, result=value))
    stored = made.row(claim.task_id).result
    assert stored == run.result
    clean = "\\u0000" not in line.replace("\\\\", "") and "NaN" not in line and "Infinity" not in line
    nested = str(value).count("[") > 100
    if clean and not nested:
        assert stored == value
        assert (run.notes, run.transcript_replaced) == (None, False)
    else:
        assert run.status == "done"
        assert nested or (stored != value and run.transcript_replaced)
    # As text it is jsonb's equal: no NUL is left that only the json type lets pass.
    made.query("SELECT CAST(result AS jsonb) FROM tasks WHERE result IS NOT NULL")


def test_every_text_of_an_outcome_is_made_storable(made: Making) -> None:
    """NUL and lone surrogates in any text are replaced, and noted once; names of models and hosts are texts as well."""
    bad = f"a{NUL}b{HALF}c"
    outcome = Outcome(
        OutcomeClass.PERMANENT,
        cause=bad,
        message=bad,
        session=bad,
        notes=(bad,),
        result={bad: bad},
        usage=Usage(cost_source=bad, counter=bad, model=bad, carry={bad: 1}),
    )
    run = made.runs.record_run(claimed(made), outcome, worker=bad, host=bad)
    good = f"a{MARK}b{MARK}c"
    assert (run.cause, run.message, run.session, run.result) == (good, good, good, {good: good})
    assert (run.cost_source, run.counter, run.model, run.worker, run.host) == (good,) * 5
    assert run.notes == [good, "characters that the database cannot hold were replaced"]
    assert run.transcript_replaced is True
    assert made.row(run.task_id).error_message == good


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("elapsed", float("nan")),
        ("elapsed", float("inf")),
        ("elapsed", -5.0),
        ("retry_after", float("nan")),
        ("exit_code", 2**40),
        ("signal", -(2**31) - 1),
        ("input_tokens", 2**63),
        ("total_tokens", 10**5000),
        ("output_tokens", True),
        ("turns", 2**31),
        ("cost_usd", float("-inf")),
        ("cost_usd", 10**400),
        ("total_tokens", "many"),
    ],
    ids=lambda value: hex(value)[:12] if isinstance(value, int) else str(value),
)
def test_numbers_out_of_range_are_left_out(made: Making, name: str, value: Any) -> None:
    """A number that no column holds becomes null with a note; everything else of the outcome is recorded."""
    outcome = Outcome(OutcomeClass.RATE_LIMITED, message="m", elapsed=1.0, usage=Usage(1, 2, 3, 4.0, turns=5))
    if name in Usage.__dataclass_fields__:
        assert outcome.usage is not None
        outcome = replace(outcome, usage=replace(outcome.usage, **{name: value}))
    else:
        outcome = replace(outcome, **{name: value})
    run = made.runs.record_run(claimed(made), outcome)
    assert (run.message, made.status(run.task_id)) == ("m", ["pending"])
    if name == "elapsed":
        assert run.duration_seconds == 0
    elif name != "retry_after":
        assert getattr(run, name) is None
        assert (run.input_tokens, run.output_tokens).count(None) <= 1
    if value != -5.0:
        assert run.notes is not None
        assert run.notes[0].startswith(name)
        assert len(run.notes[0]) < 200


@pytest.mark.parametrize("seconds", [1e300, float("inf"), 10**400], ids=["1e300", "inf", "10**400"])
def test_a_wait_beyond_all_measure_is_a_week(made: Making, seconds: float) -> None:
    """The task waits as long as the breaker of its provider, not as if nothing had been stated."""
    run = made.runs.record_run(claimed(made), Outcome(OutcomeClass.RATE_LIMITED, retry_after=seconds))
    row = made.row(run.task_id)
    assert row.available_at > datetime.now(UTC) + timedelta(days=6)


def test_a_whole_number_given_as_a_float_is_one(made: Making) -> None:
    """JSON has one kind of number: 15.0 tokens are 15."""
    run = made.runs.record_run(claimed(made), replace(DONE, usage=Usage(total_tokens=15.0)))  # type: ignore[arg-type]
    assert (run.total_tokens, run.notes) == (15, None)


@pytest.mark.parametrize(
    "result", [b"bytes", {1, 2}, object(), {"at": datetime(2020, 1, 1)}], ids=lambda r: type(r).__name__
)
def test_a_result_that_is_no_json_is_kept_as_text(made: Making, result: Any) -> None:
    """It is kept as Python prints it, with a note that names the place."""
    run = made.runs.record_run(claimed(made), replace(DONE, result=result))
    assert run.result == repr(result)
    assert run.notes is not None
    assert "not JSON" in run.notes[0]


def test_a_refused_value_holds_no_neighbour_back(made: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value in a batch of eight that only the server refuses: seven are recorded as they are, it as plain text."""
    monkeypatch.setattr(runs_module, "storable", lambda ended: ended)
    made.add_all([NewTask("coder") for _ in range(8)])
    claims = made.claim(8)
    outcomes = [replace(DONE, result={"n": n}) for n in range(8)]
    usage = Usage(total_tokens=7, cost_usd=0.5)
    outcomes[5] = replace(DONE, message=f"a{NUL}b", result={"x": f"{NUL}é"}, usage=usage, elapsed=2.0)
    batch = made.runs.record_runs([Ended(c, o, "w", "h") for c, o in zip(claims, outcomes, strict=True)])
    assert [(r.task_id, r.status) for r in batch.recorded] == [(claim.task_id, "done") for claim in claims]
    runs = [made.runs.get(claim.task_id, 1) for claim in claims]
    for n, run in enumerate(runs):
        if n != 5:
            assert (run.result, run.notes, run.transcript_replaced) == ({"n": n}, None, False)
    bad = runs[5]
    assert bad.message == "a\\x00b"
    assert isinstance(bad.result, str)
    assert "\\xe9" in bad.result
    assert (bad.total_tokens, bad.cost_usd, bad.duration_seconds, bad.transcript_replaced) == (7, 0.5, 2.0, True)
    assert bad.notes is not None
    assert bad.notes[0].startswith("the database refused a value")


def test_nothing_keeps_an_attempt_unrecorded(made: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    """If even the plain text of an outcome is refused, its class alone is recorded, and the run says what is missing."""
    monkeypatch.setattr(runs_module, "storable", lambda ended: ended)
    usage = Usage(total_tokens="many")  # type: ignore[arg-type]
    run = made.runs.record_run(claimed(made), replace(DONE, usage=usage))
    assert (run.status, run.result, run.total_tokens, made.status(run.task_id)) == ("done", None, None, ["done"])
    assert run.notes is not None
    assert "invalid input syntax" in run.notes[0]


def test_another_fault_is_no_refused_value(made: Making) -> None:
    """Only data is replaced: a fault of the schema or the server is raised, and nothing of the batch is written."""
    claims = [claimed(made), claimed(made)]
    made.query("ALTER TABLE runs RENAME COLUMN notes TO notes_away")
    try:
        with pytest.raises(Exception, match="notes"):
            made.end_all(claims)
    finally:
        made.query("ALTER TABLE runs RENAME COLUMN notes_away TO notes")
    assert made.status(*(claim.task_id for claim in claims)) == ["running", "running"]


# -- waking -------------------------------------------------------------------------------------------------------


def test_only_work_for_now_wakes_anybody(made: Making) -> None:
    """The agents to wake are those of tasks that may run at once, not those of tasks that wait or are blocked."""
    made.add_all([NewTask(f"a{n}", retry=RetryPolicy(0, 1, 0)) for n in range(4)])
    agents = [f"a{n}" for n in range(4)]
    claims = {claim.agent: claim for claim in made.claim(4, *agents)}
    other = made.add("other")
    made.add("child", after=(claims["a2"].task_id,))
    made.add("both", after=(claims["a2"].task_id, other))
    made.add("later", after=(claims["a2"].task_id,), at=datetime.fromisoformat("2999-01-01T00:00:00+00:00"))
    outcomes = {
        "a0": Outcome(OutcomeClass.INTERRUPTED),
        "a1": Outcome(OutcomeClass.RATE_LIMITED),
        "a2": DONE,
        "a3": BROKEN,
    }
    wake = made.runs.record_runs([Ended(claims[name], outcomes[name]) for name in agents]).wake
    assert {"a0", "child"} <= wake
    assert not wake & {"a1", "a2", "a3", "both"}
