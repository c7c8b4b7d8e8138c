"""Questions and approvals in the database: who waits, who may answer, and what an answer does to a task."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import Engine

from orchestrator.domain.asking import Ask, QuestionKind, Verdict, decide, name_of, read_ask
from orchestrator.domain.given import NewTask
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass, TaskStatus
from orchestrator.errors import Conflict, InvalidInput, NotFound
from orchestrator.repositories.audit import AuditRepository
from orchestrator.repositories.filters import TaskFilter
from orchestrator.repositories.operations import OperationsRepository
from orchestrator.repositories.plans import PlanRepository
from orchestrator.repositories.questions import QuestionRepository
from orchestrator.repositories.retention import RetentionRepository
from orchestrator.repositories.runs import Ended
from orchestrator.worker.spool import _packed, _unpacked
from tests.making import Making

SEND = Ask("send", "Send it?", choices=("yes", "no"))


@pytest.fixture
def made(engine: Engine) -> Making:
    return Making.on(engine)


@pytest.fixture
def questions(engine: Engine) -> QuestionRepository:
    return QuestionRepository(engine)


def suspended(*asks: Ask) -> Outcome:
    return Outcome(OutcomeClass.SUSPENDED, cause="asked", message="it asks", asks=asks, session="s1")


def only(task: int) -> TaskFilter:
    return TaskFilter(ids=[task])


def asking(made: Making, *asks: Ask, **values: Any) -> int:
    """A task whose first attempt has ended with *asks*."""
    task = made.add(**values)
    made.run(task, suspended(*asks))
    return task


# -- a question, and its answer ----------------------------------------------------------------------------------------


def test_a_question_frees_the_slot_and_its_answer_starts_the_next_attempt(
    made: Making, questions: QuestionRepository
) -> None:
    """The task waits without a worker; the answer makes it pending, uses no retry, and is carried with the session."""
    task = asking(made, SEND)
    row = made.row(task)
    assert (row.status, row.claimed_by, row.retry_count, row.error_class) == ("waiting", None, 0, "suspended")
    assert made.claim() == []
    changed = questions.say(only(task), Verdict.ANSWERED, text="yes", actor="ops", reason="read it")
    assert (changed.ids, changed.wake) == ([task], {"coder"})
    row = made.row(task)
    assert (row.status, row.error_class, row.session) == ("pending", None, "s1")
    (claim,) = made.claim()
    assert (claim.attempt, claim.session) == (2, "s1")
    (told,) = questions.answers([task])[task]
    assert (told.name, told.answer, told.actor, told.reason, told.attempt) == ("send", "yes", "ops", "read it", 1)


def test_the_audit_trail_names_who_said_what_and_why(made: Making, questions: QuestionRepository) -> None:
    """An answer is one entry with actor, reason, question and answer."""
    task = asking(made, SEND)
    questions.say(only(task), Verdict.ANSWERED, text="no", actor="ann", reason="too early")
    (entry,), _ = AuditRepository(made.engine).list(task_id=task)
    assert (entry["action"], entry["actor"], entry["reason"]) == ("answer", "ann", "too early")
    assert entry["details"] == {"name": "send", "question": "Send it?", "answer": "no"}


def test_of_two_who_answer_at_once_one_wins(made: Making, questions: QuestionRepository) -> None:
    """Eight people answer in the same moment: one answer counts, seven are told who was first and when (S53)."""
    task = asking(made, SEND)
    start = threading.Barrier(8)
    won: list[str] = []
    lost: list[Conflict] = []

    def answer(who: str) -> None:
        start.wait()
        try:
            questions.say(only(task), Verdict.ANSWERED, text="yes", actor=who)
            won.append(who)
        except Conflict as error:
            lost.append(error)

    threads = [threading.Thread(target=answer, args=(f"p{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(lost) == 7
    (question,) = questions.of_task(task)
    assert question["actor"] == won[0]
    for error in lost:
        assert f"was answered 'yes' by {won[0]} at " in error.message
        assert error.ids["actor"] == won[0]


def test_a_choice_that_is_not_offered_changes_nothing(made: Making, questions: QuestionRepository) -> None:
    """InvalidInput names the choices; the question stays open. Case and spaces around a choice do not matter."""
    task = asking(made, SEND)
    with pytest.raises(InvalidInput, match="'maybe' is none of the choices") as caught:
        questions.say(only(task), Verdict.ANSWERED, text="maybe", actor="ops")
    assert caught.value.hint == "choices: yes, no"
    assert made.status(task) == ["waiting"]
    questions.say(only(task), Verdict.ANSWERED, text=" YES ", actor="ops")
    assert questions.answers([task])[task][0].answer == "yes"


def test_free_text_is_kept_whole(made: Making, questions: QuestionRepository) -> None:
    """Without choices every text is an answer, also a long one with odd characters; NUL is refused by name."""
    task = asking(made, Ask("why", "Why?"))
    with pytest.raises(InvalidInput, match="answer: a NUL character"):
        questions.say(only(task), Verdict.ANSWERED, text="a\0b", actor="ops")
    text = "  first line\n\x1b[2J ünï 🙂\n" + "x" * 300_000
    questions.say(only(task), Verdict.ANSWERED, text=text, actor="ops")
    assert questions.answers([task])[task][0].answer == text


def test_the_same_question_twice_is_one(made: Making, questions: QuestionRepository) -> None:
    """One open question of a name, whoever asks it again; the first words stay (S53)."""
    task = asking(made, SEND, SEND, Ask("send", "Send all of it?"))
    assert [each["question"] for each in questions.of_task(task)] == ["Send it?"]


def test_several_questions_want_a_name_and_all_of_their_answers(made: Making, questions: QuestionRepository) -> None:
    """The task goes on when nothing of it is open any more."""
    task = asking(made, SEND, Ask("to", "To whom?"))
    with pytest.raises(InvalidInput, match="asks 2 questions: 'send', 'to'"):
        questions.say(only(task), Verdict.ANSWERED, text="yes", actor="ops")
    questions.say(only(task), Verdict.ANSWERED, text="all", name="to", actor="ops")
    assert made.status(task) == ["waiting"]
    with pytest.raises(Conflict, match="'To whom\\?' was answered 'all' by ops"):
        questions.say(only(task), Verdict.ANSWERED, text="none", name="to", actor="ann")
    with pytest.raises(Conflict, match="asks nothing by the name 'x'"):
        questions.say(only(task), Verdict.ANSWERED, text="none", name="x", actor="ann")
    questions.say(only(task), Verdict.ANSWERED, text="no", actor="ops")
    assert made.status(task) == ["pending"]


def test_deny_cancels_and_takes_the_family_along(made: Making, questions: QuestionRepository) -> None:
    """A refused question ends its task as cancelled, with who and why; what needs it does not run."""
    task = asking(made, SEND)
    child = made.add(after=(task,))
    changed = questions.say(only(task), Verdict.DENIED, actor="ann", reason="never")
    assert changed.family == [child]
    row = made.row(task)
    assert (row.status, row.error_class, row.error_cause, row.error_message) == (
        "cancelled",
        "cancelled",
        "denied",
        "denied by ann: never",
    )
    assert row.finished_at is not None
    assert made.status(child) == ["cancelled"]
    assert questions.answers([task]) == {}


def test_deny_of_a_tool_is_the_answer(made: Making, questions: QuestionRepository) -> None:
    """A refused permission does not end the task: the agent is told, and goes on."""
    ask = Ask("bash 1", "Run rm -r build?", QuestionKind.PERMISSION, ("allow", "reject"), yes="allow", no="reject")
    task = asking(made, ask)
    questions.say(only(task), Verdict.DENIED, actor="ops")
    assert made.status(task) == ["pending"]
    assert questions.answers([task])[task][0].answer == "reject"


def test_more_budget_is_granted_or_the_task_has_failed(made: Making, questions: QuestionRepository) -> None:
    """An attempt over its budget that asks is waiting; approve raises the limits, deny fails the task."""
    ask = Ask("budget 1", "Spend 100 more?", QuestionKind.BUDGET, ("yes", "no"), yes="yes", no="no",
              grants={"tokens": 100, "usd": 1.5})  # fmt: skip
    over = Outcome(OutcomeClass.OVER_BUDGET, cause="tokens", asks=(ask,))
    first, second = (made.add(budget=None) for _ in range(2))
    made.query("UPDATE tasks SET budget_tokens = 1000")
    made.run(first, over)
    made.run(second, over)
    assert made.status(first, second) == ["waiting", "waiting"]
    questions.say(only(first), Verdict.APPROVED, actor="ops")
    row = made.row(first)
    assert (row.status, row.budget_tokens, row.budget_usd) == ("pending", 1100, None)
    questions.say(only(second), Verdict.DENIED, actor="ops")
    row = made.row(second)
    assert (row.status, row.error_class, row.error_cause) == ("failed", "over_budget", "denied")


def test_over_budget_without_a_question_has_failed(made: Making) -> None:
    """Only what asks waits."""
    task = made.add()
    made.run(task, Outcome(OutcomeClass.OVER_BUDGET, cause="tokens"))
    assert made.status(task) == ["failed"]


def test_a_suspended_attempt_without_words_can_still_be_let_go_on(made: Making, questions: QuestionRepository) -> None:
    """An adapter that only says suspended leaves a question that somebody can approve."""
    task = made.add()
    made.run(task, Outcome(OutcomeClass.SUSPENDED, message="wants a look"))
    (question,) = questions.of_task(task)
    assert question["question"] == "wants a look"
    questions.say(only(task), Verdict.APPROVED, actor="ops")
    assert made.status(task) == ["pending"]


def test_a_waiting_row_of_somebody_else_can_be_approved(made: Making, questions: QuestionRepository) -> None:
    """A task that was inserted as waiting asks nothing: approve lets it go on, answer is a conflict."""
    made.query("INSERT INTO tasks (agent, status) VALUES ('coder', 'waiting')")
    (row,) = made.query("SELECT id FROM tasks")
    with pytest.raises(Conflict, match="waits, but asks nothing"):
        questions.say(only(row.id), Verdict.ANSWERED, text="x", actor="ops")
    questions.say(only(row.id), Verdict.APPROVED, actor="ops")
    assert made.status(row.id) == ["pending"]


@pytest.mark.parametrize("state", ["pending", "done"])
def test_a_task_that_asks_nothing_is_a_conflict(made: Making, questions: QuestionRepository, state: str) -> None:
    """The error names the status."""
    task = made.add()
    if state == "done":
        made.run(task)
    with pytest.raises(Conflict, match=f"task {task} is {state} and asks nothing"):
        questions.say(only(task), Verdict.APPROVED, actor="ops")
    with pytest.raises(NotFound, match="task 999 does not exist; nothing was changed"):
        questions.say(only(999), Verdict.APPROVED, actor="ops")


# -- approvals ---------------------------------------------------------------------------------------------------------


def test_a_task_that_needs_an_approval_waits_for_it(made: Making, questions: QuestionRepository) -> None:
    """It is added as waiting, claimed by nobody, and pending once approved; a retry does not ask again."""
    task = made.add(approval=True)
    assert made.status(task) == ["waiting"]
    assert made.claim() == []
    (question,) = questions.list()
    assert (question["task_id"], question["kind"], question["attempt"]) == (task, "approval", 0)
    questions.say(only(task), Verdict.APPROVED, actor="ops")
    claim = made.run(task, Outcome(OutcomeClass.PERMANENT))
    assert claim.attempt == 1
    operations = OperationsRepository(made.engine)
    assert operations.retry_one(task, actor="ops") is TaskStatus.PENDING


def test_an_approval_is_asked_for_when_the_parents_are_done(made: Making, questions: QuestionRepository) -> None:
    """A blocked task asks nothing yet; then it is waiting, not pending."""
    parent = made.add()
    child = made.add(after=(parent,), approval=True)
    assert (made.status(child), questions.list()) == (["blocked"], [])
    made.run(parent)
    assert made.status(child) == ["waiting"]
    assert [each["task_id"] for each in questions.list()] == [child]


def test_yes_and_no_are_answers_to_an_approval(made: Making, questions: QuestionRepository) -> None:
    """`answer ID yes` approves and `answer ID no` denies."""
    first, second = made.add(approval=True), made.add(approval=True)
    questions.say(only(first), Verdict.ANSWERED, text="yes", actor="ops")
    questions.say(only(second), Verdict.ANSWERED, text="no", actor="ops")
    assert made.status(first, second) == ["pending", "cancelled"]
    assert [questions.of_task(task)[0]["verdict"] for task in (first, second)] == ["approved", "denied"]


def test_a_retried_task_that_nobody_approved_asks_again(made: Making, questions: QuestionRepository) -> None:
    """After a denial `retry` opens the question anew, and the old one stays in the history."""
    task = made.add(approval=True)
    questions.say(only(task), Verdict.DENIED, actor="ann")
    assert OperationsRepository(made.engine).retry_one(task, actor="ops") is TaskStatus.WAITING
    assert [each["verdict"] for each in questions.of_task(task)] == ["denied", None]
    questions.say(only(task), Verdict.APPROVED, actor="ops")
    assert made.status(task) == ["pending"]


def test_a_question_after_a_denial_and_a_retry_is_a_new_one(made: Making, questions: QuestionRepository) -> None:
    """A denied question is no answer: the retried task asks it again."""
    task = asking(made, SEND)
    questions.say(only(task), Verdict.DENIED, actor="ann")
    OperationsRepository(made.engine).retry_one(task, actor="ops")
    made.run(task, suspended(SEND))
    assert made.status(task) == ["waiting"]
    assert [each["verdict"] for each in questions.of_task(task)] == ["denied", None]


def test_many_are_approved_by_filter(made: Making, questions: QuestionRepository) -> None:
    """Filters match waiting tasks only; what wants words is skipped with the reason; a dry run changes nothing."""
    approvals = [made.add(approval=True) for _ in range(3)]
    wordy = asking(made, Ask("why", "Why?"))
    made.add("other", approval=True)
    wanted = TaskFilter(agents=["coder"])
    planned = questions.say(wanted, Verdict.APPROVED, actor="ops", dry_run=True)
    assert (planned.ids, planned.dry_run) == (approvals, True)
    assert made.status(*approvals) == ["waiting"] * 3
    changed = questions.say(wanted, Verdict.APPROVED, actor="ops")
    assert changed.ids == approvals
    (skipped,) = changed.skipped
    assert (skipped.id, skipped.why) == (wordy, f"task {wordy}: it asks for an answer, not for an approval")
    assert made.status(*approvals, wordy) == [*["pending"] * 3, "waiting"]


# -- deadlines ---------------------------------------------------------------------------------------------------------


def test_a_deadline_gives_the_default(made: Making, questions: QuestionRepository) -> None:
    """After the deadline the default is the answer, in the audit trail by the deadline; before it nothing happens."""
    task = asking(made, Ask("send", "Send it?", choices=("yes", "no"), seconds=3600, default="no"))
    assert questions.expire() == (0, set())
    made.query("UPDATE questions SET deadline = deadline - interval '2 hours'")
    assert questions.expire() == (1, {"coder"})
    assert questions.expire() == (0, set())
    assert made.status(task) == ["pending"]
    (told,) = questions.answers([task])[task]
    assert (told.answer, told.verdict, told.actor) == ("no", Verdict.EXPIRED, "deadline")
    (entry,), _ = AuditRepository(made.engine).list(task_id=task)
    assert (entry["action"], entry["actor"]) == ("expire", "deadline")


def test_a_deadline_without_default_cancels(made: Making, questions: QuestionRepository) -> None:
    """Nobody answered in time: the task is cancelled, says so, and what needs it does not run."""
    task = asking(made, Ask("send", "Send it?", seconds=0))
    child = made.add(after=(task,))
    assert questions.expire() == (1, set())
    row = made.row(task)
    assert (row.status, row.error_cause, row.error_message) == (
        "cancelled",
        "no_answer",
        "nobody answered in time: Send it?",
    )
    assert made.status(child) == ["cancelled"]


def test_two_deadlines_of_one_task(made: Making, questions: QuestionRepository) -> None:
    """The first ends the task, the second is withdrawn with it."""
    task = asking(made, Ask("a", "A?", seconds=0), Ask("b", "B?", seconds=0, default="x"))
    questions.expire()
    assert made.status(task) == ["cancelled"]
    assert [each["verdict"] for each in questions.of_task(task)] == ["expired", "withdrawn"]


def test_a_late_answer_is_told_of_the_deadline(made: Making, questions: QuestionRepository) -> None:
    """The person who comes after the deadline gets a conflict that says what was taken."""
    task = asking(made, Ask("send", "Send it?", seconds=0, default="no"))
    questions.expire()
    with pytest.raises(Conflict, match="'Send it\\?' was answered 'no' for want of an answer by deadline at "):
        questions.say(only(task), Verdict.ANSWERED, text="yes", actor="ops")


def test_open_questions_come_by_deadline_then_age(made: Making, questions: QuestionRepository) -> None:
    """The nearest deadline first, then the oldest; with answered ones the newest first, page by page."""
    old, soon, late = (
        asking(made, ask) for ask in (Ask("a", "A?"), Ask("b", "B?", seconds=60), Ask("c", "C?", seconds=6000))
    )
    young = asking(made, Ask("d", "D?"))
    assert [each["task_id"] for each in questions.list()] == [soon, late, old, young]
    questions.say(only(old), Verdict.ANSWERED, text="x", actor="ops")
    assert [each["task_id"] for each in questions.list(answered=True, limit=2)] == [young, late]
    assert [each["verdict"] for each in questions.list(answered=True, after_id=3)] == [None, "answered"]


# -- waiting tasks under other changes -----------------------------------------------------------------------------------


def test_cancel_of_a_waiting_task_withdraws_its_question(made: Making, questions: QuestionRepository) -> None:
    """Nothing stays open of a cancelled task, and who answers then is told."""
    task = asking(made, SEND)
    OperationsRepository(made.engine).cancel_one(task, actor="ops", reason="not wanted")
    assert (made.status(task), questions.list()) == (["cancelled"], [])
    with pytest.raises(Conflict, match="was withdrawn by ops at "):
        questions.say(only(task), Verdict.ANSWERED, text="yes", actor="ann")


def test_a_held_task_can_be_answered_and_stays_held(made: Making, questions: QuestionRepository) -> None:
    """Hold of a waiting task counts from its answer on."""
    task = asking(made, SEND)
    operations = OperationsRepository(made.engine)
    operations.hold(only(task), actor="ops")
    questions.say(only(task), Verdict.ANSWERED, text="yes", actor="ops")
    assert made.status(task) == ["pending"]
    assert made.claim() == []
    operations.release(only(task), actor="ops")
    assert len(made.claim()) == 1


def test_a_plan_made_anew_withdraws_the_question(made: Making, questions: QuestionRepository) -> None:
    """The task that a later submission replaces asks no more; the new one asks for itself."""
    plans = PlanRepository(made.engine)
    plans.submit("p", [NewTask("coder", name="x", approval=True, task_hash="1")])
    plans.submit("p", [NewTask("coder", name="x", approval=True, task_hash="2")])
    assert [(each["task_id"], each["verdict"]) for each in questions.list(answered=True)] == [
        (2, None),
        (1, "withdrawn"),
    ]


def test_questions_are_pruned_with_their_task(made: Making, questions: QuestionRepository) -> None:
    """A waiting task stays whatever its age; an ended one takes its questions along."""
    waiting, ended = asking(made, SEND), asking(made, SEND)
    questions.say(only(ended), Verdict.DENIED, actor="ops")
    made.query("UPDATE tasks SET created_at = created_at - interval '1 year'")
    RetentionRepository(made.engine).prune(0)
    assert [each["task_id"] for each in questions.list(answered=True)] == [waiting]


def test_cancel_wins_over_a_question(made: Making, questions: QuestionRepository) -> None:
    """A task that was told to cancel while its agent asked is cancelled, and asks nothing."""
    task = made.add()
    (claim,) = made.claim()
    OperationsRepository(made.engine).cancel_one(task, actor="ops")
    made.end(claim, suspended(SEND))
    assert (made.status(task), questions.of_task(task)) == (["cancelled"], [])


def test_a_late_outcome_asks_nothing(made: Making, questions: QuestionRepository) -> None:
    """An attempt that had lost its task cannot ask in its name."""
    task = made.add()
    (claim,) = made.claim()
    made.tasks.hand_back(made.worker, [(task, 1)], "test")
    made.end(claim, suspended(SEND))
    assert (made.status(task), questions.of_task(task)) == (["pending"], [])


def test_recording_twice_asks_once(made: Making, questions: QuestionRepository) -> None:
    """After an unknown commit the record is repeated: one run, one question; also when it was answered in between."""
    task = made.add()
    (claim,) = made.claim()
    made.end(claim, suspended(SEND))
    made.end(claim, suspended(SEND))
    assert len(questions.of_task(task)) == 1
    questions.say(only(task), Verdict.ANSWERED, text="yes", actor="ops")
    made.end(claim, suspended(SEND))
    assert len(questions.of_task(task)) == 1
    assert made.status(task) == ["pending"]


def test_hostile_words_are_stored(made: Making, questions: QuestionRepository) -> None:
    """NUL and lone surrogates in a question are replaced, everything else is kept as it is."""
    task = asking(made, Ask("a\0b", "Really\0? \ud800 \x1b[2J", choices=("x\0",), details={"n": float("nan")}))
    (question,) = questions.of_task(task)
    assert (question["name"], question["question"], question["choices"]) == (
        "a\ufffdb",
        "Really\ufffd? \ufffd \x1b[2J",
        ["x\ufffd"],
    )


def test_a_spooled_question_comes_back(made: Making) -> None:
    """An outcome that waits on disk keeps what it asks, with its deadline."""
    task = made.add()
    (claim,) = made.claim()
    ask = Ask("send", "Send it?", QuestionKind.PERMISSION, ("a", "b"), seconds=5.0, default="a", yes="a", no="b")
    ended, _ = _unpacked(_packed(Ended(claim, suspended(ask), "w", "h"), []))
    assert ended.outcome.asks == (ask,)
    assert ended.claim == claim
    assert ended.claim.task_id == task


# -- what is a question ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "question"),
        ({"question": "  "}, "question"),
        ({"question": 5}, "question"),
        ({"question": "x", "name": 5}, "name"),
        ({"question": "x", "name": "n" * 501}, "name"),
        ({"question": "x", "choices": "yes"}, "choices"),
        ({"question": "x", "choices": ["a", 5]}, "choices"),
        ({"question": "x", "choices": [str(n) for n in range(51)]}, "choices"),
        ({"question": "x", "choices": ["a"], "default": "b"}, "default"),
        ({"question": "x", "default": ["a"]}, "default"),
        ({"question": "x", "deadline": "tomorrow"}, "deadline"),
        ({"question": "x", "deadline": "2026-12-01T00:00:00"}, "deadline"),
        ({"question": "x", "deadline": -1}, "deadline"),
        ({"question": "x", "deadline": float("inf")}, "deadline"),
        ({"question": "x", "deadline": 10**400}, "deadline"),
        ({"question": "x", "deadline": True}, "deadline"),
    ],
)
def test_what_is_no_question_is_refused_by_the_name_of_its_field(given: dict[str, Any], field: str) -> None:
    """Whatever an agent writes, the fault names the field."""
    with pytest.raises(InvalidInput, match=f"ask: .*{field}"):
        read_ask(given)


def test_a_question_without_a_name_is_named_by_its_words() -> None:
    """The same words are the same question; long ones are told apart by their end."""
    assert read_ask({"question": " Send\nit? "}).name == "Send it?"
    long = "x" * 10_000
    assert name_of(long) == name_of(long)
    assert name_of(long) != name_of(long + "y")
    assert len(name_of(long)) <= 500


def test_a_default_that_refuses_denies() -> None:
    """The default `no` of an approval ends the task as a denial does; of an ordinary question it is the answer."""
    approval = Ask("a", "May it?", QuestionKind.APPROVAL, ("yes", "no"), default="no", yes="yes", no="no")
    assert decide(approval, Verdict.EXPIRED).status is TaskStatus.CANCELLED
    assert decide(Ask("a", "Send?", choices=("yes", "no"), default="no"), Verdict.EXPIRED).answer == "no"
