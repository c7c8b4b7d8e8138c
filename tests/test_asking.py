"""Agents that ask a person: command agents by the events file, Python functions by ``ctx.ask``, and the commands."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text

from orchestrator.agents.command import CommandAgent
from orchestrator.agents.functions import Context, agent
from orchestrator.agents.python import PythonAgent
from orchestrator.aio import AsyncOrchestrator
from orchestrator.domain.asking import Answered, Ask, Verdict
from orchestrator.domain.given import AgentDefinition
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass, TaskStatus
from orchestrator.errors import Conflict
from orchestrator.service import Orchestrator
from orchestrator.worker import Worker
from tests import functions_for_children as functions
from tests.commands import CONTROL, Cli
from tests.conftest import WaitUntil
from tests.running import Heard, a_claim, execute, run_async
from tests.working import QUICK, FakeAgent, Working

ASKS = """
import json, os, sys
def event(**line):
    with open(os.environ["ORCHESTRATOR_EVENTS"], "a") as file:
        file.write(json.dumps(line) + "\\n")
answers = json.load(open(os.environ["ORCHESTRATOR_ANSWERS"]))
"""


def script(code: str, **fields: Any) -> CommandAgent:
    """A command agent that runs this Python."""
    return CommandAgent(AgentDefinition(name="coder", hash="h", command=("python3", "-c", ASKS + code), **fields))


@pytest.fixture
def orc(database_url: str) -> Iterator[Orchestrator]:
    with Orchestrator(database_url, settings=QUICK) as made:
        yield made


# -- command agents ----------------------------------------------------------------------------------------------------


def test_a_command_asks_by_the_events_file() -> None:
    """The attempt ends suspended, whatever the exit code; the same question twice is one, other words are a note."""
    outcome = execute(
        script(
            "event(type='ask', name='send', question='Send it?', choices=['yes', 'no'], deadline=60, default='no')\n"
            "event(type='ask', name='send', question='Send it?')\n"
            "event(type='ask', name='send', question='Send all of it?')\n"
            "event(type='ask', question='')\n"
            "sys.exit(3)"
        )
    )
    assert (outcome.status, outcome.message) == (OutcomeClass.SUSPENDED, "Send it?")
    assert outcome.asks == (Ask("send", "Send it?", choices=("yes", "no"), seconds=60.0, default="no"),)
    assert outcome.notes == (
        "asked under the name 'send' twice, with other words: the first question counts",
        "a question was ignored: ask: expected a question, a text that is not empty",
    )


def test_a_command_that_does_not_end_after_its_question_is_ended() -> None:
    """It has its result grace; then its tree is ended, the question counts, and a note says so."""
    code = "event(type='ask', question='Send it?')\nimport time; time.sleep(600)"
    outcome = execute(script(code, result_grace=0.05))
    assert outcome.status is OutcomeClass.SUSPENDED
    assert "the agent still ran 0.05 s after its question and was ended; the question counts" in outcome.notes


def test_a_command_gets_its_answers_in_a_file() -> None:
    """ORCHESTRATOR_ANSWERS names a JSON object of the answers by name; text comes whole."""
    told = Answered("send", "Send it?", "yes \x1b[2J\nand ünï", Verdict.ANSWERED)
    outcome = execute(script("print(json.dumps(answers))"), a_claim(attempt=2, answered=(told,)))
    assert json.loads(outcome.result) == {"send": "yes \x1b[2J\nand ünï"}


# -- Python functions --------------------------------------------------------------------------------------------------


@agent("invoice")
async def invoice(ctx: Context) -> dict[str, Any]:
    """Ask twice, the second question by a name of its own."""
    ctx.session("s-1")
    sent = await ctx.ask("Send it?", choices=["yes", "no"], deadline=5, default="no")
    to = await ctx.ask(f"To whom? {os.getpid()}", name="to")
    return {"sent": sent, "to": to, "again": await ctx.ask("Send it?", choices=["yes", "no"])}


def on_loop(function: Any, **fields: Any) -> Outcome:
    return execute(PythonAgent.from_function(function), a_claim(**fields))


def test_an_async_function_asks_and_is_replayed() -> None:
    """The first question ends the attempt; with its answer the next one gets it at once and asks the second."""
    first = on_loop(invoice)
    assert (first.status, first.session) == (OutcomeClass.SUSPENDED, "s-1")
    assert first.asks == (Ask("Send it?", "Send it?", choices=("yes", "no"), seconds=5.0, default="no"),)
    second = on_loop(invoice, answered=(Answered("Send it?", "Send it?", "yes", Verdict.ANSWERED),))
    assert [ask.name for ask in second.asks] == ["to"]
    whole = (Answered("Send it?", "Send it?", "yes", Verdict.ANSWERED), Answered("to", "?", "all", Verdict.ANSWERED))
    third = on_loop(invoice, answered=whole)
    assert (third.status, third.result) == (OutcomeClass.DONE, {"sent": "yes", "to": "all", "again": "yes"})


def test_a_question_is_no_exception_that_a_function_catches() -> None:
    """`except Exception` does not see it; who catches everything is suspended all the same, with a note."""

    @agent("greedy")
    async def greedy(ctx: Context) -> str:
        try:
            await ctx.ask("Send it?")
        except Exception:
            return "swallowed"
        except BaseException:
            return "caught it all"
        return "sent"

    outcome = on_loop(greedy)
    assert (outcome.status, outcome.result) == (OutcomeClass.SUSPENDED, None)
    assert outcome.notes == ("it went on after ctx.ask and returned; the question counts, the result does not",)


def test_a_question_that_is_none_fails_by_the_name_of_its_field() -> None:
    """A wrong choice list is the function's own fault."""

    @agent("wrong")
    async def wrong(ctx: Context) -> str:
        return str(await ctx.ask("Send it?", choices=["yes"], default="perhaps"))

    outcome = on_loop(wrong)
    assert outcome.status is not OutcomeClass.SUSPENDED
    assert "default: 'perhaps' is none of the choices" in (outcome.message or "")


def test_a_plain_function_asks_from_its_child_process() -> None:
    """ctx.ask blocks in a plain function; the child lives on and serves the next attempt."""

    async def main() -> list[Outcome]:
        made = PythonAgent.from_function(functions.asks)
        from orchestrator.agents.protocol import Stop

        try:
            claim = a_claim(agent="asks")
            first = await made.execute(claim, Heard(), Stop())
            answered = (Answered("Send it?", "Send it?", "yes", Verdict.ANSWERED),)
            second = await made.execute(
                a_claim(agent="asks", attempt=2, answered=answered, claimed_by=claim.claimed_by), Heard(), Stop()
            )
            return [first, second]
        finally:
            await made.aclose()

    first, second = run_async(main)
    assert first.status is OutcomeClass.SUSPENDED
    assert first.asks == (Ask("Send it?", "Send it?", choices=("yes", "no"), seconds=60.0, default="no"),)
    assert (second.status, second.result["answer"]) == (OutcomeClass.DONE, "yes")


# -- in a worker -------------------------------------------------------------------------------------------------------


def test_a_question_from_start_to_end(orc: Orchestrator, wait_until: WaitUntil) -> None:
    """Asked, answered from another thread, replayed: two runs, one result, the answer in the transcript."""
    task = orc.add("invoice").id
    with Working(Worker(orc, agents=[invoice], signals=False)):
        wait_until(lambda: orc.questions.list())
        assert orc.answer(task, "yes", actor="ops") in (TaskStatus.PENDING, TaskStatus.RUNNING, TaskStatus.WAITING)
        wait_until(lambda: [each["name"] for each in orc.questions.list()] == ["to"])
        orc.answer(task, "all", actor="ops")
        done = orc.wait(task, 30)
    assert done.result == {"sent": "yes", "to": "all", "again": "yes"}
    assert [run.status for run in orc.runs(task)] == ["suspended", "suspended", "done"]
    assert [event.text for event in orc.events.of_attempt(task, 2) if event.kind == "answer"] == [
        "Send it? yes (by ops)"
    ]


def test_a_worker_takes_defaults_after_their_deadline(orc: Orchestrator) -> None:
    """Nobody answers: the sweep of the worker gives the default, and the task ends."""

    @agent("patient")
    async def patient(ctx: Context) -> str:
        return str(await ctx.ask("Send it?", choices=["yes", "no"], deadline=0, default="no"))

    task = orc.add("patient").id
    with Working(Worker(orc, agents=[patient], signals=False)):
        assert orc.wait(task, 30).result == "no"


def test_a_worker_is_idle_although_a_task_waits(orc: Orchestrator) -> None:
    """`until_idle` ends when only people can go on; the slot was free all the while."""
    waiting = orc.add("a", approval=True).id
    done = orc.add("a").id
    Worker(orc, agents=[FakeAgent()], concurrency=1, signals=False).run(until_idle=True)
    assert (orc.get(waiting).status, orc.get(done).status) == ("waiting", "done")


def test_the_library_approves_denies_and_answers(orc: Orchestrator) -> None:
    """The same words as the commands, for callers with and without a loop; the second one is a conflict."""
    first, second = (orc.add("a", approval=True).id for _ in range(2))
    assert orc.approve(first, actor="ann", reason="fine") is TaskStatus.PENDING
    with pytest.raises(Conflict, match="was approved by ann at "):
        orc.deny(first)

    async def main() -> TaskStatus:
        own = AsyncOrchestrator(str(orc.url), settings=QUICK)
        try:
            assert [each["task_id"] for each in await own.questions()] == [second]
            return await own.deny(second, actor="ann")
        finally:
            await own.close()

    assert run_async(main) is TaskStatus.CANCELLED


# -- the commands ------------------------------------------------------------------------------------------------------


def test_the_commands_of_people(cli: Cli, engine: Engine) -> None:
    """add --approval, questions, approve, deny, answer: documents, exit codes, and the words for the loser."""
    first, second = cli.add("coder", "--approval"), cli.add("coder", "--approval", "--title", "\x1b[2J evil")
    found = cli("questions", "--json").json["questions"]
    assert [(each["task_id"], each["kind"], each["verdict"]) for each in found] == [
        (first, "approval", None),
        (second, "approval", None),
    ]
    said = cli("questions")
    assert not CONTROL.search(said.out.replace("\n", ""))
    assert "\\x1b[2J evil" in said.out
    assert f"orchestrator approve {first}" in said.out
    assert cli("approve", str(first), "--reason", "fine", "--json").json["changed"] == [first]
    lost = cli("deny", str(first), "--json", code=5)
    assert "was approved by ops at " in lost.error["message"]
    assert cli("answer", str(second), "perhaps", "--json", code=2).error["hint"] == "choices: yes, no"
    cli("answer", str(second), code=2)
    cli("approve", "999", code=4)
    cli("approve", "--agent", "coder", code=2)
    assert cli("deny", "--agent", "coder", "--dry-run", "--json").json["changed"] == [second]
    cli("deny", "--agent", "coder", "--yes")
    assert cli("show", str(second), "--json").json["status"] == "cancelled"
    shown = cli("show", str(first), "--json").json["questions"]
    assert [(each["verdict"], each["actor"], each["reason"]) for each in shown] == [("approved", "ops", "fine")]
    assert cli("questions", "--json").json == {"questions": [], "next_after_id": None}
    assert [each["task_id"] for each in cli("questions", "--all", "--json").json["questions"]] == [second, first]
    assert "approved yes by ops" in cli("show", str(first)).out


def test_screens_show_the_question(cli: Cli, engine: Engine) -> None:
    """why, show, status and the dashboard say that a task waits for a person, and the command that answers."""
    task = cli.add("coder", "--approval")
    why = cli("why", str(task), "--json").json
    assert why["reasons"][0]["reason"] == "person"
    assert why["reasons"][0]["command"] == f"orchestrator approve {task}"
    status = cli("status", "--json").json
    assert status["questions"]["open"] == 1
    assert status["questions"]["oldest_seconds"] >= 0
    assert "1 open, the oldest" in cli("status").out
    board = cli("dashboard", "--once").out
    assert f"? {task} " in board
    assert "May it start?" in board
    assert "asks: May it start?" in cli("show", str(task)).out
    assert "asks: May it start?" in cli("list").out


def test_an_answer_from_a_file_and_standard_input(cli: Cli, engine: Engine) -> None:
    """A long answer comes from a file; - is standard input."""
    task = cli.add("coder")
    with engine.begin() as connection:
        connection.execute(text("UPDATE tasks SET status = 'waiting'"))
        connection.execute(
            text("INSERT INTO questions (task_id, name, question) VALUES (:id, 'a', 'A?'), (:id, 'b', 'B?')"),
            {"id": task},
        )
    (cli.folder / "long.md").write_text("line\n" * 1000)
    cli("answer", str(task), "--file", "long.md", "--name", "a")
    cli("answer", str(task), "--file", "-", stdin=b"from a pipe")
    answers = {each["name"]: each["answer"] for each in cli("show", str(task), "--json").json["questions"]}
    assert answers == {"a": "line\n" * 1000, "b": "from a pipe"}


PLAN = """
agents:
  asks: {command: [sh, -c, 'echo "{\\"type\\": \\"ask\\", \\"question\\": \\"Go on?\\"}" >> "$ORCHESTRATOR_EVENTS"']}
tasks:
  - {name: one, agent: coder, input: x, approval: true}
  - {name: two, agent: asks}
  - {name: three, agent: coder, input: x, after: [one]}
"""


def test_run_without_a_terminal_ends_with_three(cli: Cli, engine: Engine) -> None:
    """Only questions are left: the lines name them with their commands, exit code 3; after the answer it goes on."""
    cli.write("plan.yaml", PLAN)
    said = cli("run", "plan.yaml", code=3)
    assert "waiting  1 one asks: May it start? yes/no: orchestrator approve 1" in said.err
    assert "waiting  2 two asks: Go on?: orchestrator answer 2 TEXT" in said.err
    assert "? 1 one: May it start?    orchestrator approve 1" in said.out
    cli("approve", "1")
    cli("deny", "2")
    cli("run", "plan.yaml", code=1)
    assert [task["status"] for task in cli("list", "--json").json["tasks"]] == ["done", "cancelled", "done"]


def test_run_at_a_terminal_stays_and_asks(cli: Cli, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for each question in turn, says what is no answer, and works on until the plan is done."""
    from orchestrator.dashboard.live import RunPlain

    typed = iter(["perhaps", "yes"])
    asked: list[str] = []

    def ask(self: RunPlain, question: Any, gone: Any = None) -> str | None:
        asked.append(question.text)
        return next(typed)

    monkeypatch.setattr(RunPlain, "ask", ask)
    cli.write("plan.yaml", "tasks:\n  - {name: one, agent: coder, input: x, approval: true}\n")
    said = cli("run", "plan.yaml")
    assert asked == ["May it start?"] * 2
    assert "answer: 'perhaps' is none of the choices; choices: yes, no" in said.err
    assert "1 one: yes" in said.err
    assert "done     1 one" in said.err


def test_run_goes_on_when_somebody_else_answers(cli: Cli, orc: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the terminal waits for a line, another person answers: the run takes that and goes on."""
    from orchestrator.dashboard.live import RunPlain

    def ask(self: RunPlain, question: Any, gone: Any = None) -> str | None:
        assert gone() is False
        orc.approve(question.task_id, actor="ann")
        assert gone() is True
        return None

    monkeypatch.setattr(RunPlain, "ask", ask)
    cli.write("plan.yaml", "tasks:\n  - {name: one, agent: coder, input: x, approval: true}\n")
    assert "done     1 one" in cli("run", "plan.yaml").err


def test_the_live_view_waits_for_a_line_or_for_somebody_else() -> None:
    """The prompt ends by itself as soon as the question is answered elsewhere."""
    from orchestrator.dashboard.live import _wait_for_line

    read, write = os.pipe()
    with os.fdopen(read) as stdin, os.fdopen(write, "w") as person:
        assert _wait_for_line(stdin, lambda: True) is False
        person.write("yes\n")
        person.flush()
        assert _wait_for_line(stdin, lambda: True) is True
