"""``why``: for every status the reasons, the binding one first, each with its number and its command."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event

from orchestrator.dashboard.frame import Look
from orchestrator.dashboard.text import cells
from orchestrator.dashboard.why import diagnose, render_why, why_json
from orchestrator.domain.diagnosis import Diagnosis, Reason
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import NotFound
from orchestrator.repositories.agents import AgentRepository
from orchestrator.repositories.diagnosis import DiagnosisRepository
from orchestrator.repositories.filters import TaskFilter
from orchestrator.repositories.minutes import MinuteCounts, MinuteRepository
from orchestrator.repositories.operations import OperationsRepository
from orchestrator.repositories.tasks import Known
from orchestrator.repositories.workers import WorkerRepository
from tests.commands import Cli
from tests.making import BROKEN, CRASHED, Making, new_worker


@pytest.fixture
def made(engine: Engine) -> Making:
    return Making.on(engine)


def asked(engine: Engine, task_id: int) -> Diagnosis:
    return diagnose(DiagnosisRepository(engine).facts(task_id))


def codes(found: Diagnosis) -> list[str]:
    return [reason.reason for reason in found.reasons]


def only(found: Diagnosis) -> Reason:
    (reason,) = found.reasons
    return reason


# -- pending ------------------------------------------------------------------------------------------------------


def test_a_busy_key_or_directory_is_the_reason(made: Making, engine: Engine, cli: Cli) -> None:
    """It names the key with its numbers, or the directory, and who has it; raising the limit lifts it."""
    first, second = made.add(concurrency_key="db"), made.add(concurrency_key="db")
    assert codes(asked(engine, first)) == []
    (claim,) = made.claim(5)
    reason = only(asked(engine, second))
    assert (reason.reason, reason.number) == ("key_busy", 1)
    assert reason.text == f"its concurrency key db is in use by task {first} (1 of 1 run)"
    cli("limit", "--key", "db", "--max-running", "2")
    assert "key db has room (1 of 2 run)" in asked(engine, second).not_the_cause
    assert [each.task_id for each in made.claim(5)] == [second]
    made.end(claim)
    here = made.add(dir="/x/y")
    made.tasks.claim(made.worker, [Known("coder", directory=lambda given: given or "/")], 5)
    assert only(asked(engine, made.add(dir="/x"))).text == f"its directory /x/y is in use by task {here}"


def test_a_task_that_starts_next_has_no_reason(made: Making, engine: Engine) -> None:
    """Nothing stands in its way: no reason, and everything that was checked is named."""
    found = asked(engine, made.add())
    assert found.reasons == ()
    assert found.verdict.endswith("it starts at a worker's next look")
    assert found.not_the_cause == (
        "due",
        "not held",
        "needs nothing",
        "coder not paused",
        "1 live worker for coder",
        "4 of 4 slots free",
        "never lost with a worker",
        "first in the queue",
    )


def test_what_needs_a_person_comes_before_what_ends_by_itself(made: Making, engine: Engine) -> None:
    """Held, paused without end and no worker rank before not due, and that before the queue; each has its command."""
    first = made.add("lonely")
    task = made.add("lonely", at=DiagnosisRepository(engine).facts(first).now + timedelta(hours=2))
    OperationsRepository(engine).hold(TaskFilter(ids=[task]), actor="ops", reason="after the audit")
    AgentRepository(engine).pause("lonely", actor="ops", reason="too dear")
    found = asked(engine, task)
    assert codes(found) == ["held", "paused", "no_worker", "not_due", "ahead"]
    held, paused, worker, due, ahead = found.reasons
    assert held.text.startswith("held by ops 0s ago: after the audit")
    assert held.command == f"orchestrator release {task}"
    assert (paused.command, paused.until) == ("orchestrator resume lonely", None)
    assert "by ops: too dear" in paused.text
    assert worker.command == "orchestrator worker --agent lonely"
    assert due.number == pytest.approx(7200, abs=60)
    assert due.until is not None
    assert (ahead.number, ahead.command) == (1, f"orchestrator priority 1 {task}")
    assert "it will not start now" in found.verdict


def test_of_two_that_end_by_themselves_the_later_one_binds(made: Making, engine: Engine) -> None:
    """A pause until after the due time binds, a pause that ends before it does not."""
    now = DiagnosisRepository(engine).facts(made.add()).now
    task = made.add(at=now + timedelta(minutes=30))
    AgentRepository(engine).pause("coder", actor="ops", seconds=3600)
    assert codes(asked(engine, task))[:2] == ["paused", "not_due"]
    AgentRepository(engine).pause("coder", actor="ops", seconds=60)
    found = asked(engine, task)
    assert codes(found)[:2] == ["not_due", "paused"]
    assert "it will not start before" in found.verdict


def test_an_over_pause_is_no_cause(made: Making, engine: Engine) -> None:
    """A pause whose time is over holds nothing."""
    task = made.add()
    AgentRepository(engine).pause("coder", actor="ops", seconds=60)
    made.query("UPDATE agents SET paused_until = now() - interval '1 second'")
    assert codes(asked(engine, task)) == []


@pytest.mark.parametrize(
    ("outcome", "code", "text"),
    [
        (CRASHED, "retrying", "attempt 2 of 3 at"),
        (
            Outcome(OutcomeClass.RATE_LIMITED, message="429", retry_after=900),
            "limited",
            "limited by its provider 1 time",
        ),
    ],
)
def test_a_retry_says_when_and_after_what(made: Making, engine: Engine, outcome: Outcome, code: str, text: str) -> None:
    """A task between two attempts names the next one and how the last one ended."""
    task = made.add()
    made.run(task, outcome)
    made.query("UPDATE tasks SET due = false, available_at = now() + interval '10 minutes' WHERE id = :id", id=task)
    reason = only(asked(engine, task))
    assert reason.reason == code
    assert reason.number == pytest.approx(600, abs=30)
    assert text in reason.text
    assert outcome.message is not None
    assert outcome.message in reason.text


def test_workers_that_do_not_count(made: Making, engine: Engine) -> None:
    """Workers of another plan, draining and silent ones are named and do not count; plan-local agents need the file."""
    task = made.add()
    made.query("UPDATE workers SET plan = 'other'")
    reason = only(asked(engine, task))
    assert reason.reason == "no_worker"
    assert "w works on plan other only" in reason.text
    made.query("UPDATE workers SET plan = NULL")
    WorkerRepository(engine).drain("w")
    assert "(w is draining)" in only(asked(engine, task)).text
    made.query("UPDATE workers SET draining_at = NULL, renewed_at = now() - interval '35 seconds'")
    assert "(w is silent)" in only(asked(engine, task)).text
    made.query("UPDATE workers SET dead_at = now()")
    assert "(" not in only(asked(engine, task)).text
    made.query("UPDATE tasks SET definition = 'abc', plan = 'p' WHERE id = :id", id=task)
    assert only(asked(engine, task)).command == "orchestrator worker --plan FILE"


def test_busy_slots_and_the_tasks_ahead(made: Making, engine: Engine) -> None:
    """With all slots busy that is the cause, then the number ahead with the pace of the last hour."""
    for _ in range(4):
        made.add()
    made.claim(4)
    made.add(priority=7)
    made.add()
    task = made.add()
    after = made.add()
    MinuteRepository(engine).add(made.worker, [MinuteCounts("coder", done=1)])
    found = asked(engine, task)
    assert codes(found) == ["slots_busy", "ahead"]
    busy, ahead = found.reasons
    assert "(4 of 4)" in busy.text
    assert ahead.number == 2
    assert "coder ends 1 an hour, so ~2h" in ahead.text
    assert ahead.command == f"orchestrator priority 8 {task}"
    assert asked(engine, after).reasons[1].number == 3
    assert "it starts when its turn comes" in found.verdict


def test_the_command_puts_a_task_first(made: Making, engine: Engine) -> None:
    """What ``ahead`` proposes makes the task the next that is claimed."""
    for priority in (3, 9, 0):
        made.add(priority=priority)
    task = made.add()
    command = only(asked(engine, task)).command
    assert command is not None
    priority = int(command.split()[2])
    OperationsRepository(engine).set_priority(TaskFilter(ids=[task]), priority, actor="ops")
    assert [claim.task_id for claim in made.claim(1)] == [task]


def test_a_suspect_is_taken_one_at_a_time(made: Making, engine: Engine) -> None:
    """A task that was lost with its worker says so, with the losses and how many such tasks are ahead of it."""
    first, task = made.add(), made.add()
    made.add()
    made.query("UPDATE tasks SET lost_count = 2 WHERE id IN (:a, :b)", a=first, b=task)
    reason = only(asked(engine, task))
    assert (reason.reason, reason.number) == ("suspect", 2)
    assert "1 of them are ahead" in reason.text


# -- blocked ------------------------------------------------------------------------------------------------------


def test_a_blocked_task_names_the_root_of_the_chain(made: Making, engine: Engine) -> None:
    """The roots come first, each with the command for its status; then the direct parents between."""
    held, running, ready = made.add(name="held"), made.add(name="running"), made.add("other", name="ready")
    OperationsRepository(engine).hold(TaskFilter(ids=[held]), actor="ops")
    assert [claim.task_id for claim in made.claim(1)] == [running]
    middle = made.add(name="middle", after=(held, ready))
    task = made.add(after=(middle, running))
    found = asked(engine, task)
    assert "needs 2 tasks that are not done" in found.verdict
    assert [(r.text, r.command) for r in found.reasons] == [
        (f"waits in the end for {held} held (held)", f"orchestrator release {held}"),
        (f"needs {running} running (running)", f"orchestrator logs -f {running}"),
        (f"waits in the end for {ready} ready (pending)", f"orchestrator why {ready}"),
        (f"needs {middle} middle (blocked)", f"orchestrator why {middle}"),
    ]


def test_a_wide_and_deep_family_is_read_within_bounds(made: Making, engine: Engine) -> None:
    """A diamond of many parents is walked once for each task, and named up to the limit."""
    from orchestrator.domain.given import NewTask

    top = made.add()
    ids = [each.id for each in made.add_all([NewTask("coder", after=(top,)) for _ in range(60)])]
    task = made.add(after=tuple(ids))
    found = asked(engine, task)
    assert "needs 60 tasks" in found.verdict
    root, needs = found.reasons
    assert root.text.startswith(f"waits in the end for {top} ")
    assert needs.text.endswith("and 55 more")


# -- running ------------------------------------------------------------------------------------------------------


def test_a_running_task_says_how_it_is_doing(made: Making, engine: Engine) -> None:
    """Where, since when, attempt, worker's process; quiet, heartbeat, budget, spend and the last line."""
    from orchestrator.domain.outcome import Budget

    task = made.add(budget=Budget(seconds=7200))
    made.claim(1)
    made.query(
        "UPDATE tasks SET started_at = now() - interval '30 minutes', last_output = 'bisecting', progress_percent = 40,"
        " last_output_at = now() - interval '9 minutes', live_usage = '{\"cost_usd\": 1.08}' WHERE id = :id",
        id=task,
    )
    found = asked(engine, task)
    assert found.verdict == "running 30m00s on w (attempt 1 of 3, worker pid 1)"
    assert [reason.text.split(" ago")[0] for reason in found.reasons] == [
        "no output for 9m00s",
        "worker heartbeat 0s",
        "25% of 2h00m",
        "$1.08+",
        "40% done",
        "last: bisecting",
    ]
    assert found.next == f"orchestrator logs -f {task}"
    assert found.not_the_cause == ("its worker lives", "within its budget", "nobody asked to cancel it")


def test_a_running_task_in_trouble(made: Making, engine: Engine) -> None:
    """Being stopped, a silent worker and a budget that is over rank first, with their commands."""
    from orchestrator.domain.outcome import Budget

    task = made.add(budget=Budget(seconds=60))
    made.claim(1)
    OperationsRepository(engine).cancel(TaskFilter(ids=[task]), actor="ops", reason="wrong branch")
    made.query("UPDATE tasks SET started_at = now() - interval '2 minutes' WHERE id = :id", id=task)
    made.query("UPDATE workers SET renewed_at = now() - interval '31 seconds'")
    found = asked(engine, task)
    assert codes(found)[:3] == ["stopping", "worker_silent", "over_budget"]
    assert "cancel asked by ops: wrong branch" in found.reasons[0].text
    assert found.reasons[1].command == "orchestrator watchdog --once"
    assert found.reasons[2].number == pytest.approx(200, abs=10)
    made.query("UPDATE workers SET dead_at = now()")
    assert codes(asked(engine, task))[1] == "worker_dead"


# -- ended --------------------------------------------------------------------------------------------------------


def test_done(made: Making, engine: Engine) -> None:
    """A done task names its attempt, and there is nothing to change."""
    task = made.add()
    made.run(task)
    found = asked(engine, task)
    assert only(found).text == "attempt 1 ended well in 0.5s on w"
    assert found.next == f"orchestrator show {task}"
    made.query("INSERT INTO tasks (agent, status, finished_at) VALUES ('coder', 'done', now())")
    assert "never started" in asked(engine, task + 1).verdict


@pytest.mark.parametrize(
    ("outcome", "retries", "expected"),
    [
        (BROKEN, 2, ["permanent", "permanent_fault"]),
        (CRASHED, 0, ["transient", "no_retry_left"]),
        (Outcome(OutcomeClass.OVER_BUDGET, cause="tokens"), 2, ["over_budget"]),
    ],
)
def test_failed(made: Making, engine: Engine, outcome: Outcome, retries: int, expected: list[str]) -> None:
    """A failed task says what went wrong, why it is not tried again, who needed it, and how to open it again."""
    task = made.add(max_retries=retries)
    child = made.add(after=(task,))
    made.run(task, outcome)
    found = asked(engine, task)
    assert codes(found) == [*expected, "needed_by"]
    assert found.reasons[0].command == f"orchestrator retry {task}"
    child_found = asked(engine, child)
    assert child_found.verdict.startswith("not run; ended 0s ago, it was never started")
    reason = only(child_found)
    assert (reason.reason, reason.command) == ("parent_failed", f"orchestrator retry {task}")


def test_cancelled_by_a_person(made: Making, engine: Engine) -> None:
    """Who cancelled it, and why."""
    task = made.add()
    OperationsRepository(engine).cancel(TaskFilter(ids=[task]), actor="ops", reason="not wanted")
    found = asked(engine, task)
    assert only(found).text == "cancelled by ops 0s ago: not wanted"
    assert found.next == f"orchestrator retry {task}"


def test_what_was_replaced_cannot_be_opened_again(made: Making, engine: Engine) -> None:
    """A task that a later submission replaced names it, and proposes no retry that would be refused."""
    task = made.add()
    OperationsRepository(engine).cancel(TaskFilter(ids=[task]), actor="ops")
    made.query("UPDATE tasks SET superseded_at = now(), plan = 'p' WHERE id = :id", id=task)
    found = asked(engine, task)
    assert codes(found) == ["superseded"]
    assert "retry" not in str(why_json(found))


def test_waiting(made: Making, engine: Engine) -> None:
    """A task that waits for a person says so."""
    task = made.add()
    made.run(task, Outcome(OutcomeClass.SUSPENDED, message="Drop the table?"))
    reason = only(asked(engine, task))
    assert reason.reason == "person"
    assert "Drop the table?" in reason.text


# -- the screen, the document, the database ------------------------------------------------------------------------


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_line_is_wider_than_the_screen_and_no_command_is_cut(
    made: Making, engine: Engine, width: int, ascii_only: bool
) -> None:
    """Texts are wrapped; hostile text is harmless; a command stands whole on a line of its own."""
    made.add()
    task = made.add(title="翻訳: リリースノート v2.4 の全文 \x1b[2J [/red]")
    reason = "wait for the audit of the year, which takes its time " * 3
    OperationsRepository(engine).hold(TaskFilter(ids=[task]), actor="o\x1bps", reason=reason)
    lines = render_why(asked(engine, task), Look(width, 24, ascii_only))
    for line in lines:
        assert line.text.isprintable()
        assert "orchestrator" in line.text or cells(line.text) <= width
    assert any(line.text.endswith(f" orchestrator release {task}") for line in lines)
    if width == 80:
        assert " ".join(line.text for line in lines).count("which takes its time") == 3


def test_the_command_prints_the_screen_and_the_document(cli: Cli, engine: Engine) -> None:
    """``why`` at once for people and machines: same reasons, same order; an unknown id is not found."""
    task = cli.add()
    said = cli("why", str(task))
    assert said.out.splitlines()[0].startswith(f"· {task} coder  pending 0s; it will not start now")
    assert said.out.splitlines()[1] == " 1 no live worker takes tasks of coder"
    assert said.out.splitlines()[2] == "     to start one:      orchestrator worker --agent coder"
    document: dict[str, Any] = cli("why", str(task), "--json").json
    assert document.keys() == {"id", "status", "verdict", "reasons", "not_the_cause", "next"}
    assert (document["id"], document["status"]) == (task, "pending")
    assert document["reasons"][0] == {
        "reason": "no_worker",
        "text": "no live worker takes tasks of coder",
        "number": 0,
        "unit": "workers",
        "until": None,
        "command": "orchestrator worker --agent coder",
    }


def test_every_read_is_bounded_and_knows_its_index(made: Making, engine: Engine) -> None:
    """All statements run under a time limit with sequential scans off, and there is a fixed number of them."""
    made.add_all([])
    task = made.add()
    statements: list[str] = []

    def keep(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(engine, "before_cursor_execute", keep)
    try:
        asked(engine, task)
    finally:
        event.remove(engine, "before_cursor_execute", keep)
    assert "statement_timeout" in statements[0]
    assert len(statements) <= 20
    with pytest.raises(NotFound):
        DiagnosisRepository(engine).facts(2**70)


def test_a_worker_of_many_agents_counts_all_that_it_holds(made: Making, engine: Engine) -> None:
    """Slots that are busy with other agents' tasks are busy."""
    new_worker(engine, "both", ["coder", "other"])
    made.query("UPDATE workers SET dead_at = now() WHERE name = 'w'")
    (worker,) = made.query("SELECT id FROM workers WHERE name = 'both'")
    for _ in range(4):
        made.add("other")
    made.claim(4, "other", worker=worker.id)
    assert codes(asked(engine, made.add())) == ["slots_busy"]
