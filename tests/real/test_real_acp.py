"""Agents of the Agent Client Protocol that others made: two real CLIs, and the examples of the protocol's own package."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from orchestrator.agents.building import build
from orchestrator.agents.protocol import Agent
from orchestrator.domain.asking import Answered, QuestionKind, Verdict
from orchestrator.domain.words import OutcomeClass
from orchestrator.plans import agent_definition
from tests.real.clis import Cli, ModelServer, folder
from tests.running import Heard, a_claim, execute

pytestmark = [pytest.mark.real, pytest.mark.agents, pytest.mark.timeout(900)]

HANG = "wait for me [[mock:hang=600]]"
TOOL = "[[mock:bash=printf hi-%s from-42]]"
ACP: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "gemini": (("gemini", "--acp"), {"authenticate": "gemini-api-key"}),
    "opencode": (("opencode", "acp"), {}),
}


def agent(cli: Cli, **fields: Any) -> Agent:
    """This CLI as an agent of the protocol."""
    command, more = ACP[cli.page]
    return cli.acp(*command, **more, **fields)


@pytest.mark.parametrize("cli", list(ACP), indirect=True)
def test_a_turn_and_a_tool(cli: Cli) -> None:
    """An answer comes in pieces, with session and usage; a tool that the policy allows is used."""
    live = Heard()
    first = execute(agent(cli), a_claim(agent="acp", input="say kumquat and then say it once more"), live)
    assert first.status is OutcomeClass.DONE, first
    assert "kumquat" in first.result
    assert first.session
    assert live.sessions[:1] == [first.session]
    assert live.text("message").count("kumquat") == 1
    assert first.usage is not None
    assert first.usage.total_tokens
    live = Heard()
    tool = execute(agent(cli, permissions="allow"), a_claim(agent="acp", input=TOOL), live)
    assert tool.status is OutcomeClass.DONE, tool
    assert "hi-from-42" in tool.result
    assert [text for kind, text in live.written if kind == "tool"]
    assert cli.left() == []


@pytest.mark.parametrize("cli", list(ACP), indirect=True)
def test_cancel_in_a_conversation(cli: Cli, server: ModelServer) -> None:
    """Cancelled while its provider hangs, its process is gone as well."""
    words = f"cancel acp {cli.page}"
    claim = a_claim(agent="acp", input=f"{words} {HANG}")
    stopped = execute(agent(cli), claim, when=lambda _: server.asked(words), patience=600)
    assert stopped.status is OutcomeClass.CANCELLED, stopped
    assert stopped.session
    assert cli.left() == []


@pytest.mark.parametrize("cli", ["opencode"], indirect=True)
def test_a_session_is_loaded(cli: Cli, server: ModelServer) -> None:
    """A new process goes on with the session of the one before; its replayed history is no part of the result."""
    first = execute(agent(cli), a_claim(agent="acp", input="remember the word persimmon"))
    assert first.status is OutcomeClass.DONE, first
    second = execute(agent(cli), a_claim(agent="acp", input="and say medlar", session=first.session))
    assert second.status is OutcomeClass.DONE, second
    assert second.session == first.session
    assert "medlar" in second.result
    assert "persimmon" not in second.result
    told = [request for request in server.requests() if "medlar" in str(request["body"])]
    assert any("persimmon" in str(request["body"]) for request in told), "the session did not go on"


@pytest.mark.parametrize("cli", list(ACP), indirect=True)
def test_a_permission_that_is_denied(cli: Cli) -> None:
    """It asks for leave before a shell tool; refused, the tool does not run, and the run says so."""
    cli.permissions({"bash": "ask"})
    outcome = execute(
        agent(cli, permissions={"read": "allow"}), a_claim(agent="acp", input="[[mock:bash=touch denied-it]]")
    )
    assert any("denied 1 tool use (execute:" in note for note in outcome.notes), outcome
    assert not (cli.work / "denied-it").exists()
    assert cli.left() == []


@pytest.mark.parametrize("cli", list(ACP), indirect=True)
def test_a_person_decides(cli: Cli) -> None:
    """Asked for leave, the attempt ends with the question; the next one has the answer, and the tool runs."""
    cli.permissions({"bash": "ask"})
    asking = agent(cli, permissions={"execute": "ask", "default": "allow"}, session="resume-then-fresh")
    words = "[[mock:bash=touch allowed-it]]"
    first = execute(asking, a_claim(agent="acp", input=words))
    assert (first.status, first.cause) == (OutcomeClass.SUSPENDED, "asked"), first
    assert not (cli.work / "allowed-it").exists()
    (question,) = first.asks
    assert (question.kind, question.choices) == (QuestionKind.PERMISSION, ("allow", "deny"))
    assert "touch allowed-it" in question.question
    told = (Answered(question.name, question.question, "allow", Verdict.ANSWERED),)
    claim = a_claim(agent="acp", input=words, session=first.session, answered=told)
    second = execute(asking, claim)
    assert second.status is OutcomeClass.DONE, second
    assert (cli.work / "allowed-it").exists()
    assert cli.left() == []


@pytest.mark.parametrize(
    ("program", "result"), [("echo_agent.py", "say quince"), ("agent.py", "Client sent:say quince")]
)
def test_the_examples_of_the_package(program: str, result: str) -> None:
    """The agents that the protocol's own package ships as examples answer; what they cannot load is begun afresh."""
    path = folder() / "examples" / "examples" / program
    made = build(agent_definition("example", {"acp": [sys.executable, str(path)]}))
    first = execute(made, a_claim(agent="example", input="say quince"))
    assert (first.status, first.result) == (OutcomeClass.DONE, result), first
    assert first.session
    second = execute(made, a_claim(agent="example", input="say quince", session="gone"))
    assert second.status is OutcomeClass.DONE, second
    assert any("session gone could not be resumed" in note for note in second.notes), second
