"""Keys of the live views: what they mean, what they ask before a change, panes, filter and tree; a run on a terminal."""

from __future__ import annotations

import os
import re
import signal
import termios
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from sqlalchemy import Engine

from orchestrator.cli.desk import Desk
from orchestrator.dashboard import board, run_view
from orchestrator.dashboard.controls import Asked, Controls, Page, Subject, Target, asked_line, help_lines
from orchestrator.dashboard.filtering import filtered
from orchestrator.dashboard.frame import Line, Look
from orchestrator.dashboard.keyboard import Keyboard
from orchestrator.dashboard.keys import name_of, text_of
from orchestrator.dashboard.text import cells
from orchestrator.domain.snapshot import (
    AgentRow,
    Alert,
    Count,
    Failure,
    Minute,
    PlanTask,
    Question,
    RunningTask,
    RunView,
    ServerInfo,
    Snapshot,
    WorkerRow,
)
from orchestrator.errors import Conflict
from orchestrator.service import Orchestrator
from tests.conftest import WaitUntil
from tests.making import Making
from tests.test_dashboard_live import ROOT, SHELL, Session

NOW = datetime(2026, 11, 28, 12, 4, 31).astimezone()
DEEDS = frozenset({"answer", "approve", "deny", "cancel", "retry", "hold", "release", "pause", "resume"})
PAGES = frozenset({"show", "why", "logs"})
SUBJECTS: dict[Target, Subject] = {
    1: Subject(1, "coder", "one", "running", "coder on gpu-05 for 47m00s", 3),
    2: Subject(2, "coder", "two", "failed"),
    3: Subject(3, "coder", "three", "held"),
    4: Subject(4, "coder", "four", "ready"),
    5: Subject(5, "coder", "five", "waiting", question=Question(5, "Drop it?", choices=("drop", "keep"))),
    6: Subject(6, "coder", "six", "waiting", question=Question(6, "Why?")),
    7: Subject(7, "coder", "seven", "waiting", question=Question(7, "Start it?", kind="approval")),
}


def controls() -> Controls:
    """Return the controls of a dashboard where everything can be done."""
    return Controls(DEEDS, PAGES, panes=True, filters=True, freezes=True, quits=True)


def press(these: Controls, *names: str) -> object:
    """Strike keys on rows 1 to 4; return what the last one asks to be done."""
    done: object = None
    for name in names:
        done = these.key(name, [1, 1, 2, 3, 4], lambda target: SUBJECTS.get(target))
    return done


def test_a_change_asks_and_takes_only_y() -> None:
    """The question names what was selected; Enter, n, Esc, q and the same key again all mean no."""
    for key in ("enter", "n", "esc", "q", "x", "Y", "down"):
        these = controls()
        assert press(these, "down", "x") is None
        assert these.asked == Asked("cancel", SUBJECTS[1])
        assert press(these, key) is None
        assert these.asked is None
        assert (these.selected, these.page) == (1, None)
    assert press(controls(), "down", "x", "y") == Asked("cancel", SUBJECTS[1])


def asking(target: Target, *names: str) -> tuple[Controls, object]:
    """Return controls with the cursor on *target* after the keys *names*, and what the last of them asks to be done."""
    these = controls()
    these.selected = target
    return these, press(these, *names)


def test_a_choice_is_struck_by_its_number() -> None:
    """The last line has the numbers; only one of them answers, and whatever else is struck leaves the question open."""
    these, done = asking(5, "a")
    line = these.last_line(Look(100))
    assert done is None
    assert line is not None
    assert line.trimmed().text == " answer 5 five: Drop it?   1 drop   2 keep   Esc back"
    assert asking(5, "a", "2")[1] == Asked("answer", SUBJECTS[5], "keep")
    for key in ("3", "0", "y", "enter", "esc", "a", "12"):
        these, done = asking(5, "a", key)
        assert (done, these.asked, these.page) == (None, None, None)


def test_an_answer_of_words_is_typed_and_then_asked_for() -> None:
    """Enter does not send it: the words stand in the question, which takes y; Esc and an empty line send nothing."""
    these, _ = asking(6, "a", *"no q")
    these.paste("uestion")
    typed = these.last_line(Look(80))
    assert typed is not None
    assert "no question_" in typed.text
    assert press(these, "backspace", "enter") is None
    line = these.last_line(Look(80))
    assert line is not None
    assert line.text == " answer 6 six: no questio    y answer   n leave"
    assert press(these, "y") == Asked("answer", SUBJECTS[6], "no questio")
    for keys in (("a", "x", "esc"), ("a", " ", "enter"), ("a", "x", "enter", "enter")):
        these, done = asking(6, *keys)
        assert (done, these.asked, these.answering) == (None, None, None)


def test_approvals_take_y_and_d_denies_whatever_is_asked() -> None:
    """What wants no words is approved; a question with choices can be denied; a task that asks nothing is told of."""
    assert asking(7, "a", "y")[1] == Asked("approve", SUBJECTS[7])
    assert asking(7, "a", "enter")[1] is None
    for target in (5, 6, 7):
        assert asking(target, "d", "y")[1] == Asked("deny", SUBJECTS[target])
    line = asking(7, "d")[0].last_line(Look(80))
    assert line is not None
    assert line.text == " deny 7 seven: Start it?    y deny   n leave"
    for key in "ad":
        these, _ = asking(1, key)
        assert (these.asked, these.said) == (None, "1 one asks nothing")


@pytest.mark.parametrize("width", [20, 40, 80, 120])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_what_is_asked_of_a_person_fits_and_is_harmless(width: int, ascii_only: bool) -> None:
    """Long, wide and hostile questions, choices and answers stay on one line, with the keys that answer."""
    look = Look(width, 24, ascii=ascii_only)
    question = Question(48190, "\x1b]0;x\x07 審査 " * 20, choices=("\x1b[2J yes " * 9, "いいえ" * 9, "later"))
    subject = Subject(48190, "coder", "port-billing", "waiting", question=question)
    typed = controls()
    typed.answering, typed.answer = subject, "答え\x1b[2J" * 50
    lines = [asked_line(Asked(deed, subject, text), look)
             for deed, text in (("answer", ""), ("answer", "x\ny" * 90), ("approve", ""), ("deny", ""))]  # fmt: skip
    for line in (*lines, typed.last_line(look)):
        assert line is not None
        assert cells(line.trimmed().text) <= width
        assert line.text.isprintable()
    assert "3" in lines[0].text
    assert all("y" in line.text[-22:] for line in lines[1:])


def test_rows_that_move_do_not_move_the_question() -> None:
    """Between the key and its y the rows change their places: what was named is what is changed."""
    these = controls()
    press(these, "down", "x")
    assert these.key("y", [4, 3, 2], lambda _: None) == Asked("cancel", SUBJECTS[1])


def test_a_pasted_text_changes_nothing() -> None:
    """A burst is no key: it opens no question, and answers one with no."""
    assert name_of(b"xy") is None
    these = controls()
    these.paste("xy")
    assert (these.asked, these.filter) == (None, "")
    press(these, "down", "x")
    these.paste("y")
    assert these.asked is None


def test_bursts_of_a_held_key_are_that_key() -> None:
    """Moving keys and Esc may come together; what changes something or is mixed may not."""
    assert [name_of(burst) for burst in (b"jj", b"\x1b[B" * 3, b"\x1b[5~\x1b[5~", b"\x1b\x1b")] == [
        "j", "down", "pgup", "esc",
    ]  # fmt: skip
    assert [name_of(burst) for burst in (b"yy", b"xx", b"jk", b"\x1b[B\x1b[A", b"")] == [None] * 5
    assert (text_of(b"ab c"), text_of(b"a\x1b"), text_of(b"\xff")) == ("ab c", "", "")


def test_what_makes_no_sense_is_said_instead_of_asked() -> None:
    """A running task is not retried, a failed one not cancelled; h releases what is held; nothing selected is said."""
    these = controls()
    press(these, "x")
    assert these.said == "select what to cancel first: up and down"
    for target, key, said in (
        (1, "r", "only failed and cancelled tasks are retried"),
        (2, "x", "2 two is failed already"),
        (1, "h", "only what has not begun can be held"),
        ("coder", "x", "select a task to cancel"),
    ):
        these = controls()
        these.selected = target
        these.key(key, [], lambda target: SUBJECTS.get(target, Subject(None, "coder")))
        assert these.asked is None
        assert said in these.said
    these = controls()
    these.selected = 3
    assert press(these, "h", "y") == Asked("release", SUBJECTS[3])
    these.selected = 4
    assert press(these, "h", "y") == Asked("hold", SUBJECTS[4])
    these.selected = 99
    press(these, "x")
    assert these.said == "99 is no longer on the screen"


def test_the_cursor_belongs_to_the_id() -> None:
    """It moves over distinct targets, stops at the ends, and stays on its id when rows change places."""
    these = controls()
    press(these, "down", "down", "down")
    assert these.selected == 3
    these.key("down", [9, 3, 8], lambda _: None)
    assert these.selected == 8
    press(these, "end")
    assert these.selected == 4
    press(these, "down", "pgup")
    assert these.selected == 1


def test_pages_open_on_the_selected_task_and_esc_undoes_one_thing_at_a_time() -> None:
    """Enter, l and w open; Esc goes back: page, cursor, filter, pane."""
    these = controls()
    press(these, "enter")
    assert these.said == "select a task first: up and down"
    press(these, "2", "/", "a", "enter", "down", "l")
    assert (these.page, these.pane, these.filter) == (Page("logs", 1), "running", "a")
    press(these, "w", "up")
    assert (these.page, these.scroll) == (Page("why", 1), -1)
    left = []
    for _ in range(4):
        press(these, "esc")
        left.append((these.page is None, these.selected is None, these.filter == "", these.pane is None))
    assert [sum(each) for each in left] == [1, 2, 3, 4]


def test_panes_and_freezing() -> None:
    """A digit shows one pane and again all; Tab goes round; p freezes; q leaves, but not a text field."""
    these = controls()
    press(these, "3")
    assert these.pane == "agents"
    press(these, "3")
    assert these.pane is None
    seen = []
    for _ in range(6):
        press(these, "tab")
        seen.append(these.pane)
    assert seen == ["needs", "running", "agents", "workers", "failures", None]
    press(these, "p")
    assert these.frozen
    assert press(these, "/", "q") is None
    assert these.filter == "q"
    these.paste("wen coder")
    press(these, "backspace", "enter")
    assert (these.filter, these.typing) == ("qwen code", False)
    assert press(these, "q") == "quit"


def test_only_keys_that_work_are_named() -> None:
    """Without a desk nothing can be opened or changed, so neither the hint nor the list of keys names it."""
    bare = Controls().names
    assert bare == {"select", "?"}
    assert controls().names >= {"open", "x", "r", "h", "P", "R", "l", "w", "pane", "/", "p", "q"}
    shown = "\n".join(line.text for line in help_lines(Look(keys=bare)))
    assert "cancel" not in shown
    assert "filter" not in shown
    these = Controls()
    these.selected = 1
    assert press(these, "x", "y", "enter", "2", "/", "p", "q") is None
    assert (these.asked, these.page, these.pane, these.typing, these.frozen) == (None, None, None, False, False)


@pytest.mark.parametrize("width", [20, 40, 80, 120])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_last_line_fits_and_keeps_its_keys(width: int, ascii_only: bool) -> None:
    """Question, filter and answer stay on one line without control characters; the question never loses its y."""
    look = Look(width, 24, ascii=ascii_only)
    subject = Subject(48190, "coder", "審査 \x1b[2J" * 9, "running", "coder on gpu-05 for 47m00s", 3)
    line = asked_line(Asked("cancel", subject), look)
    assert "y" in line.text[-20:]
    these = controls()
    these.selected, these.said = 1, "\x1b[2J said " * 20
    for prepared in (line, these.last_line(look)):
        assert prepared is not None
        assert cells(prepared.trimmed().text) <= width
        assert prepared.text.isprintable()
    these.said, these.typing, these.filter = "", True, "x" * 200
    typed = these.last_line(look)
    assert typed is not None
    assert cells(typed.trimmed().text) <= width


def test_the_question_is_the_one_of_the_design() -> None:
    """It says what, where, since when and who needs it; of an agent only its name."""
    subject = Subject(48190, "coder", "port-billing", "running", "coder on gpu-05 for 47m00s", 3)
    assert asked_line(Asked("cancel", subject), Look(100)).text == (
        " cancel 48190 port-billing? coder on gpu-05 for 47m00s; 3 tasks need it    y cancel   n keep"
    )
    assert asked_line(Asked("pause", subject), Look()).text == " pause agent coder?    y pause   n leave"


# -- the dashboard ------------------------------------------------------------------------------------------------


def snapshot() -> Snapshot:
    """Return a queue of forty running tasks with something in each pane."""
    return Snapshot(
        NOW,
        ServerInfo("h", "db"),
        workers=tuple(WorkerRow(f"w{n}", f"gpu-{n:02}", agents=("coder",), slots=4) for n in range(30)),
        agents=tuple(AgentRow(f"agent-{n:02}", ready=Count(n)) for n in range(30)),
        running=tuple(
            RunningTask(100 + n, "coder" if n % 2 else "writer", NOW - timedelta(seconds=900 - n), name=f"task-{n}",
                        plan="p1" if n < 20 else "p2", worker=f"gpu-{n % 5:02}", last_output="Line")
            for n in range(40)
        ),
        running_count=Count(40),
        alerts=(Alert("no_worker", "agent", "agent-07", "no live worker", since=NOW),),
        failures=tuple(
            Failure(500 + n, "coder", NOW, f"bad-{n}", error_class="transient" if n % 2 else "permanent", message="m")
            for n in range(20)
        ),
    )  # fmt: skip


@pytest.mark.parametrize("pane", ["needs", "running", "agents", "workers", "failures"])
@pytest.mark.parametrize("size", [(120, 40), (80, 24), (40, 10), (20, 5)])
def test_a_pane_alone_fills_the_screen(pane: str, size: tuple[int, int]) -> None:
    """No more lines than rows, none too wide, and its last row is reached by the cursor."""
    look = Look(*size, keys=controls().names)
    lines = board.render(snapshot(), NOW, look, pane=pane)
    assert len(lines) <= size[1]
    assert all(cells(line.text) <= size[0] for line in lines)
    every = board.pane_lines(snapshot(), NOW, look, pane)
    targets = [line.target for line in every if line.target is not None]
    if targets:
        marked = [line for line in board.render(snapshot(), NOW, look, pane=pane, selected=targets[-1]) if line.marked]
        assert [line.target for line in marked] == [targets[-1]]


def test_rows_that_nothing_runs_in_go_to_the_other_panes() -> None:
    """A quiet queue shows more agents and failures; a busy one keeps the rows for what runs."""
    look = Look(80, 40)
    quiet = replace(snapshot(), running=snapshot().running[:2], running_count=Count(2))

    def failures(of: Snapshot) -> int:
        return sum(1 for line in board.render(of, NOW, look) if " bad-" in line.text)

    assert failures(snapshot()) == 5
    lines = board.render(quiet, NOW, look)
    assert len(lines) == 40
    assert sum(1 for line in lines if isinstance(line.target, str)) > 5


@pytest.mark.parametrize(
    ("text", "running", "failures"),
    [
        ("", 40, 20),
        ("task-3", 11, 0),
        ("agent:coder", 20, 20),
        ("agent:CODER plan:p2", 10, 0),
        ("worker:gpu-03", 8, 0),
        ("class:perm", 0, 10),
        ("line task-1", 11, 0),
        ("505", 0, 1),
        ("nothing", 0, 0),
        ("[/red]", 0, 0),
    ],
)
def test_filter(text: str, running: int, failures: int) -> None:
    """Every word must be found, in its field where it names one, whatever the case."""
    found = filtered(snapshot(), text)
    assert (len(found.running), len(found.failures)) == (running, failures)
    assert found.running_count == Count(40)


def test_what_a_key_would_act_on() -> None:
    """Running tasks, failures and agents are found by what the row is about; what is gone is not."""
    running = board.subject_of(snapshot(), 101, NOW)
    assert running is not None
    assert (running.title, running.kind, running.agent) == ("101 task-1", "running", "coder")
    assert "gpu-01 for 14m59s" in running.facts
    failed = board.subject_of(snapshot(), 505, NOW)
    assert failed is not None
    assert failed.kind == "failed"
    assert board.subject_of(snapshot(), "agent-07", NOW) == Subject(None, "agent-07")
    assert board.subject_of(snapshot(), 9, NOW) is None


def test_the_minute_that_goes_on_counts() -> None:
    """A queue that has just begun is not shown as one where nothing ends."""
    minutes = tuple(Minute(NOW.replace(second=0) - timedelta(minutes=59 - n)) for n in range(59))
    fresh = replace(snapshot(), minutes=(*minutes, Minute(NOW.replace(second=0), done=3)))
    assert board.per_minute(fresh) == pytest.approx(3 / (5 + 31 / 60))
    assert "1h: 3 done, 0 failed" in board.render(fresh, NOW, Look(120, 40))[2].text
    assert board.per_minute(snapshot()) == 0.0


# -- the region of run ------------------------------------------------------------------------------------------------


def plan() -> RunView:
    """Return a plan where 3 needs 1 and 2, and 4 needs 3."""
    return RunView(
        "p",
        NOW - timedelta(seconds=60),
        (
            PlanTask(4, "last", "a", "blocked", needs=(3,)),
            PlanTask(1, "first", "a", "done", elapsed=4.0),
            PlanTask(2, "second", "a", "running", started_at=NOW - timedelta(seconds=9), last_output="says"),
            PlanTask(3, "third", "a", "blocked", needs=(1, 2)),
        ),
    )


def test_the_plan_as_a_tree() -> None:
    """Each task stands once, below and right of what it needs last, whatever the plan's order."""
    look = Look(80, 24, keys=frozenset({"?"}))
    lines = [line.text for line in run_view.render(plan(), NOW, look, tree=True)][2:-1]
    assert lines == [
        "✓ 1 first  4.0s",
        "▸ 2 second  9s  says",
        "○ 3   third  blocked  needs 2",
        "○ 4     last  blocked",
    ]
    assert run_view.targets(plan(), NOW, look, tree=True) == [1, 2, 3, 4]


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (20, 5)])
def test_a_page_and_the_last_line_stay_in_the_region(size: tuple[int, int]) -> None:
    """The region keeps its height with a page, a tree and a question in it; the question is its last line."""
    look = Look(*size, keys=frozenset({"?"}))
    last = Line(look).add(" cancel 2?")
    for given in ({"page": [Line(look).add(str(n)) for n in range(50)]}, {"tree": True}, {"selected": 2}):
        lines = run_view.render(plan(), NOW, look, last=last, **given)
        assert len(lines) <= run_view.height_of(look)
        assert lines[-1].text == " cancel 2?"


def test_the_selected_row_is_marked_by_reverse_video() -> None:
    """One row is marked, and a key would act on its task."""
    marked = [line for line in run_view.render(plan(), NOW, Look(80, 24), selected=2) if line.marked]
    assert [line.target for line in marked] == [2]
    subject = run_view.subject_of(plan(), 2, NOW)
    assert subject == Subject(2, "a", "second", "running", "a for 9s", 1)
    assert run_view.subject_of(plan(), 99, NOW) is None


# -- the desk -----------------------------------------------------------------------------------------------------


class Slow:
    """A desk whose answers are given by the test."""

    deeds = DEEDS
    pages = PAGES

    def __init__(self) -> None:
        self.fails = False

    def page(self, what: str, task_id: int, look: Look) -> list[Line]:
        if self.fails:
            raise Conflict("no")
        return [look.line(f"{what} {task_id} line {n}") for n in range(50)]

    def do(self, asked: Asked) -> str:
        if self.fails:
            raise Conflict("it is done")
        return f"{asked.deed} {asked.subject.task_id}"


def test_pages_and_changes_come_back_through_the_inbox(wait_until: WaitUntil) -> None:
    """What waits for the database runs elsewhere: the view is told, of errors too, and a page keeps its old lines."""
    inbox: SimpleQueue[tuple[str, Any]] = SimpleQueue()
    desk = Slow()
    keyboard = Keyboard(controls(), desk, inbox.put, lambda error: f"away: {error}")
    look = Look(80, 24)

    def strike(name: str) -> None:
        assert not keyboard.take_in("key", name, lambda: [1], lambda _: SUBJECTS[1])

    def come() -> str:
        what, value = inbox.get(timeout=30)
        keyboard.take_in(what, value, lambda: [1], lambda _: SUBJECTS[1])
        return what

    def shown() -> list[str]:
        lines = keyboard.page_lines(look, 10)
        assert lines is not None
        return [line.text for line in lines]

    strike("down")
    strike("x")
    strike("y")
    assert come() == "said"
    assert keyboard.controls.said == "cancel 1"
    strike("l")
    assert shown()[1] == "reading …"
    assert come() == "page"
    assert shown()[1:] == [f"logs 1 line {n}" for n in range(41, 50)]
    strike("up")
    assert shown()[-1] == "logs 1 line 48"
    strike("enter")
    shown()
    assert come() == "page"
    assert shown()[1] == "show 1 line 0"
    desk.fails = True
    strike("x")
    strike("y")
    assert come() == "said"
    assert keyboard.controls.said == "cancel: away: it is done"
    strike("w")
    shown()
    assert come() == "page"
    assert shown()[1:] == ["away: no"]


@pytest.fixture
def orchestrator(database_url: str) -> Iterator[Orchestrator]:
    """Return an orchestrator on an empty database."""
    with Orchestrator(database_url) as orchestrator:
        yield orchestrator


def test_the_desk_does_what_the_commands_do(orchestrator: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change is the service's own, with its actor in the audit trail, and says what came of it."""
    monkeypatch.setenv("ORCHESTRATOR_ACTOR", "ops")
    task = orchestrator.add("coder", "x").id
    told: list[int] = []
    desk = Desk(orchestrator, lambda: told.append(1))

    def do(deed: str, kind: str) -> str:
        return desk.do(Asked(deed, Subject(task, "coder", "one", kind)))

    assert do("hold", "ready") == f"{task} one: held"
    assert do("hold", "ready") == f"{task} one: already held"
    assert do("release", "held") == f"{task} one: released"
    assert do("cancel", "ready") == f"{task} one: cancelled"
    assert do("retry", "cancelled") == f"{task} one: opened again"
    assert desk.do(Asked("pause", Subject(None, "coder"))) == "agent coder is paused; what runs goes on"
    assert desk.do(Asked("resume", Subject(None, "coder"))) == "agent coder goes on"
    found, _ = orchestrator.audit.list(limit=10)
    assert {each["actor"] for each in found} == {"ops"}
    assert [each["action"] for each in found] == ["resume", "pause", "retry", "cancel", "release", "hold"]
    assert len(told) == 7
    with pytest.raises(Conflict):
        do("retry", "failed")
    for what in sorted(desk.pages):
        lines = desk.page(what, task, Look(80, 24))
        assert lines
        assert all(cells(line.text) <= 80 for line in lines)


def test_the_desk_answers_the_question_that_was_on_the_screen(orchestrator: Orchestrator, engine: Engine) -> None:
    """Approve, deny and answer are the commands' own; a question that was replaced meanwhile is not answered instead."""
    desk, made = Desk(orchestrator), Making.on(engine)
    approve, deny, stale = (orchestrator.add("coder", "x", approval=True).id for _ in range(3))

    def do(deed: str, task: int) -> str:
        found = board.subject_of(orchestrator.snapshots.dashboard(), task, NOW)
        assert found is not None
        return desk.do(Asked(deed, found))

    assert do("approve", approve).endswith(": approved")
    assert do("deny", deny).endswith(": denied")
    assert [str(orchestrator.get(each).status) for each in (approve, deny, stale)] == [
        "pending",
        "cancelled",
        "waiting",
    ]
    shown = board.subject_of(orchestrator.snapshots.dashboard(), stale, NOW)
    made.query("UPDATE questions SET question = 'Something else?' WHERE task_id = :id", id=stale)
    assert shown is not None
    with pytest.raises(Conflict, match="asks something else by now"):
        desk.do(Asked("approve", shown))
    made.query("UPDATE questions SET kind = 'ask', choices = '{yes,no}' WHERE task_id = :id", id=stale)
    found = board.subject_of(orchestrator.snapshots.dashboard(), stale, NOW)
    assert found is not None
    assert desk.do(Asked("answer", found, "no")).endswith(": answered no")
    assert orchestrator.questions.of_task(stale)[0]["answer"] == "no"


# -- a run on a terminal ------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, threading
sys.path.insert(0, {root!r})
from tests.test_dashboard_keys import NOW, Slow, plan
from orchestrator.dashboard.frame import Paint
from orchestrator.dashboard.live import RunLive
live = RunLive(sys.stdout, plan, Paint.COLOR, clock=lambda: NOW, stdin=sys.stdin, desk=Slow())
ended = threading.Event()
def end(number, frame):
    if number == signal.SIGUSR1:
        live.release()
        os._exit(130)
    ended.set()
for number in (signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, end)
live.start()
while not ended.wait(0.01):
    pass
live.stop(keep=True)
print("left")
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Session]:
    """Return the view of a run on a pseudo-terminal, with its keys."""
    session = Session(tmp_path, ["-c", SCRIPT.format(root=str(ROOT))])
    try:
        session.until(lambda raw: "Ctrl-C stop" in raw)
        yield session
    finally:
        session.close()


def step(session: Session, key: str, shown: Callable[[str], object]) -> None:
    """Strike *key* and wait for what it shows."""
    mark = len(session.raw)
    session.key(key)
    session.until(shown, mark)


def test_keys_in_a_run(run: Session) -> None:
    """Select, ask, say no by Enter and yes by y, open and leave; Ctrl-C is still a signal, the terminal as before."""
    step(run, "\x1b[B", lambda raw: "\x1b[7m▸ 2 second" in raw)
    step(run, "x", lambda raw: "cancel 2 second?" in raw)
    step(run, "\r", lambda raw: "Ctrl-C stop" in raw)
    step(run, "x", lambda raw: "y cancel   n keep" in raw)
    step(run, "y", lambda raw: re.search(r"cancel 2(?! second)", raw))
    step(run, "l", lambda raw: "logs 2 line 49" in raw)
    step(run, "\x1b", lambda raw: "second" in raw)
    step(run, "t", lambda raw: "third" in raw)
    run.key("\x03")
    assert run.end() == 0
    assert "left" in run.raw
    assert run.raw.rindex("\x1b[?25h") > run.raw.rindex("\x1b[?25l")
    assert termios.tcgetattr(run.slave) == run.before


def test_an_end_at_once_gives_the_terminal_back(run: Session) -> None:
    """Before the process leaves without ado the cursor is back and the settings are as they were."""
    assert termios.tcgetattr(run.slave) != run.before
    run.process.send_signal(signal.SIGUSR1)
    assert run.end() == 130
    assert run.raw.rindex("\x1b[?25h") > run.raw.rindex("\x1b[?25l")
    assert termios.tcgetattr(run.slave) == run.before


def test_ctrl_z_where_nobody_could_continue(run: Session) -> None:
    """Ctrl-Z in a session that nobody could continue stops nothing: the view comes back with its keys."""
    mark = len(run.raw)
    run.key("\x1a")
    run.until(lambda raw: "\x1b[?25h" in raw and "Ctrl-C stop" in raw[raw.index("\x1b[?25h") :], mark)
    step(run, "\x1b[B", lambda raw: "\x1b[7m▸ 2 second" in raw)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.end() == 0
    assert termios.tcgetattr(run.slave) == run.before


def test_ctrl_z_really_stops_a_run(tmp_path: Path) -> None:
    """Under a shell Ctrl-Z stops the process with the terminal as it was; continued, view and keys are back."""
    session = Session(tmp_path, ["-c", SHELL, SCRIPT.format(root=str(ROOT))])
    try:
        session.until(lambda raw: "Ctrl-C stop" in raw)
        session.key("\x1a")
        session.until(lambda raw: re.search(r"stopped .*\n", raw))
        assert "stopped True True" in session.raw
        assert session.raw.rindex("\x1b[?25h") > session.raw.rindex("\x1b[?25l")
        mark = len(session.raw)
        session.key("\n")
        session.until(lambda raw: "Ctrl-C stop" in raw, mark)
        step(session, "\x1b[B", lambda raw: "\x1b[7m▸ 2 second" in raw)
        session.key("\x03")
        session.until(lambda raw: re.search(r"ended .*\n", raw), mark)
        assert "ended 0 True" in session.raw
    finally:
        session.close()
