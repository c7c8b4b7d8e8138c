"""Agents of the Agent Client Protocol, with an agent made by the protocol's own package."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agents.acp import AcpAgent
from orchestrator.agents.building import build
from orchestrator.domain.asking import Answered, QuestionKind, Verdict
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput, InvalidPlan
from orchestrator.plans import agent_definition
from tests.running import Heard, a_claim, execute

PROGRAM = [sys.executable, str(Path(__file__).parent / "inputs" / "acp_agent.py")]

pytestmark = pytest.mark.slow  # the package takes most of a second to import, in each agent's process


def agent(**fields: Any) -> AcpAgent:
    """The agent of these tests."""
    made = build(agent_definition("zed", {"acp": PROGRAM, **fields}))
    assert isinstance(made, AcpAgent)
    return made


def ask(prompt: str, live: Heard | None = None, *, before: str | None = None, **fields: Any) -> Outcome:
    """One attempt; *before* is the session of the attempt before."""
    return execute(agent(**fields), a_claim(agent="zed", input=prompt, session=before), live)


def test_a_turn() -> None:
    """What is said in pieces is the result; session, tokens and cost are told; the agent ends by itself."""
    live = Heard()
    outcome = ask("say Hello, {world}\nand ä", live)
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, "Hello, {world}\nand ä")
    assert [text for kind, text in live.written if kind == "message"] == ["Hello, {world}", "and ä"]
    assert live.sessions == [outcome.session]
    assert outcome.usage is not None
    assert (outcome.usage.input_tokens, outcome.usage.output_tokens, outcome.usage.cost_usd) == (13, 2, 0.25)
    assert outcome.usage.complete is True
    assert outcome.notes == ()


@pytest.mark.parametrize(
    ("permissions", "kind", "answered"),
    [
        (None, "execute", "n"),
        ("allow", "execute", "y"),
        ({"execute": "allow"}, "execute", "y"),
        ({"execute": "allow"}, "edit", "n"),
        ({"default": "allow", "edit": "deny"}, "edit", "n"),
        ({"default": "allow", "edit": "deny"}, "read", "y"),
    ],
)
def test_permissions(permissions: Any, kind: str, answered: str) -> None:
    """The policy answers by the kind of tool; what it does not name is denied, with a warning on the run."""
    live = Heard()
    more = {} if permissions is None else {"permissions": permissions}
    outcome = ask(f"tool {kind}", live, **more)
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, f"answered {answered}")
    assert any(f"denied 1 tool use ({kind}: run it)" in note for note in outcome.notes) is (answered == "n")
    assert [text for each, text in live.written if each == "tool"] == ["run it: ls", "run it: listed"]


def test_a_person_is_asked(tmp_path: Path) -> None:
    """The attempt ends with the question; the next one, in the same session, gets the answer when it asks again."""
    settings: dict[str, Any] = {"env": {"set": {"ACP_SESSIONS": str(tmp_path)}}, "permissions": {"execute": "ask"}}
    first = ask("tool execute", **settings)
    assert (first.status, first.cause) == (OutcomeClass.SUSPENDED, "asked"), first
    (question,) = first.asks
    assert question.question == "May it use a tool? execute: run it: ls"
    assert (question.kind, question.choices) == (QuestionKind.PERMISSION, ("allow", "deny"))
    assert first.session
    for answer, chosen in (("allow", "y"), ("deny", "n")):
        told = (Answered(question.name, question.question, answer, Verdict.ANSWERED),)
        claim = a_claim(agent="zed", input="tool execute", session=first.session, answered=told)
        second = execute(agent(**settings), claim)
        assert (second.status, second.result) == (OutcomeClass.DONE, f"answered {chosen}"), second
        assert second.session == first.session


def test_cancel_is_told_to_the_agent() -> None:
    """It hears that its turn is over, and what it used until then is known."""
    outcome = execute(agent(), a_claim(agent="zed", input="hang"), when=lambda heard: "hanging" in heard.text("stdout"))
    assert (outcome.status, outcome.cause) == (OutcomeClass.CANCELLED, "cancelled")
    assert outcome.usage is not None
    assert outcome.usage.total_tokens == 15
    assert outcome.session


def test_silence_is_stalled() -> None:
    """The idle limit holds for a conversation as well."""
    assert ask("hang", idle_seconds=3).status is OutcomeClass.STALLED


def test_a_session_goes_on(tmp_path: Path) -> None:
    """The next attempt loads it; what is told again of its history is not what this attempt says."""
    settings: dict[str, Any] = {"env": {"set": {"ACP_SESSIONS": str(tmp_path)}}}
    first = ask("say one", **settings)
    second = ask("say two", before=first.session, **settings)
    assert (second.session, second.result) == (first.session, "two")
    assert first.session is not None
    assert (tmp_path / first.session).read_text() == "say one\nsay two\n"


def test_a_session_that_cannot_go_on(tmp_path: Path) -> None:
    """By its policy the attempt fails, or starts afresh with a note; where sessions cannot be loaded it always does."""
    settings: dict[str, Any] = {"env": {"set": {"ACP_SESSIONS": str(tmp_path)}}}
    failed = ask("say one", before="gone", **settings)
    assert failed.status is OutcomeClass.TRANSIENT
    assert "Invalid session identifier" in str(failed.message)
    for more in ({**settings, "session": "resume-then-fresh"}, {}):
        fresh = ask("say one", before="gone", **more)
        assert (fresh.status, fresh.result) == (OutcomeClass.DONE, "one")
        assert fresh.session != "gone"
        assert any("session gone could not be resumed" in note for note in fresh.notes)


def test_a_login() -> None:
    """An agent that wants one is signed in by the method that its definition names, else waits for a login."""
    settings: dict[str, Any] = {"env": {"set": {"ACP_LOGIN": "1"}}}
    assert ask("say hi", **settings).status is OutcomeClass.UNAUTHENTICATED
    assert ask("say hi", authenticate="a-key", **settings).result == "hi"


@pytest.mark.parametrize(
    ("prompt", "expected", "cause"),
    [
        ("stop max_turn_requests", OutcomeClass.OVER_BUDGET, "max_turns"),
        ("stop refusal", OutcomeClass.PERMANENT, "refusal"),
        ("stop cancelled", OutcomeClass.TRANSIENT, "agent_error"),
        (
            'error {"code":-32603,"message":"x","data":{"http_status_code":429}}',
            OutcomeClass.RATE_LIMITED,
            "rate_limit",
        ),
        (
            'error {"code":-32603,"message":"x","data":{"errorKind":"rate_limit"}}',
            OutcomeClass.RATE_LIMITED,
            "rate_limit",
        ),
        ('error {"code":-32603,"message":"boom"}', OutcomeClass.TRANSIENT, "agent_error"),
        ("die", OutcomeClass.TRANSIENT, "exit_code"),
    ],
)
def test_failures(prompt: str, expected: OutcomeClass, cause: str) -> None:
    """The reason of a turn's end, an error of the protocol and a crash have their classes."""
    outcome = ask(prompt)
    assert (outcome.status, outcome.cause) == (expected, cause), outcome


def test_noise_between_the_messages() -> None:
    """A banner on stdout does not disturb the conversation."""
    assert ask("noise").result == "quiet"


def test_secrets_are_blackened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the value is split between two pieces of a message."""
    monkeypatch.setenv("API_TOKEN", "tok-0123456789")
    live = Heard()
    outcome = ask("say the key is tok-0123456789, yes", live, env={"secret": ["API_TOKEN"]})
    assert outcome.result == "the key is [secret API_TOKEN], yes"
    assert "tok-0123456789" not in str([text for kind, text in live.written if kind == "message"])


def test_a_program_that_speaks_something_else() -> None:
    """What is no agent of this protocol ends the attempt as its exit says."""
    other = build(agent_definition("zed", {"acp": ["cat", "/dev/null"]}))
    outcome = execute(other, a_claim(agent="zed", input="x"))
    assert (outcome.status, outcome.cause) == (OutcomeClass.TRANSIENT, "no_result")


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra."""
    monkeypatch.setitem(sys.modules, "acp", None)
    with pytest.raises(InvalidInput) as caught:
        agent()
    assert 'pip install "orchestrator[acp]"' in str(caught.value.hint)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"acp": []}, "acp: names no program"),
        ({"acp": ["{prompt}"]}, "the program itself cannot be a placeholder"),
        ({"acp": ["node", "-e", "serve('{title}')"]}, "give it as an argument of its own"),
        ({"acp": ["x"], "permissions": "maybe"}, "permissions: expected one of allow, deny, ask, found 'maybe'"),
        ({"acp": ["x"], "permissions": {"exec": "allow"}}, "unknown key 'exec'; did you mean 'execute'?"),
        ({"command": ["x"], "permissions": "allow"}, "permissions: only an acp agent has it"),
    ],
)
def test_definitions_that_are_refused(fields: dict[str, Any], says: str) -> None:
    """What can never work is said where it is written."""
    with pytest.raises(InvalidPlan) as caught:
        agent_definition("zed", fields)
    assert says in caught.value.message


def test_it_says_what_it_is() -> None:
    """Kind, command and policy."""
    described = agent(permissions="allow").describe()
    assert (described["kind"], described["permissions"]) == ("acp", {"default": "allow"})
    assert json.dumps(described)
