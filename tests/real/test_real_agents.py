"""The real agent CLIs, by the recipes of ``docs/agents/``, against a model server on the loopback address.

``scripts/test-real-agents`` installs them and runs this. Every scenario judges what the product makes of a CLI: the
outcome, the session, the usage, and that nothing of it runs afterwards.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from tests.commands import process
from tests.real.clis import KEY, ROOT, Cli, ModelServer, blocks, folder, recipe
from tests.running import Heard, a_claim, execute

pytestmark = [pytest.mark.real, pytest.mark.agents, pytest.mark.timeout(900)]

CODING = ("claude-code", "codex", "gemini", "opencode")
"""Those that stream events and have sessions."""
SMALL = ("mini-swe-agent", "llm", "aider")
"""Those that print, and have none."""
ALL = (*CODING, *SMALL)
HANG = "wait for me [[mock:hang=600]]"


def ask(cli: Cli, prompt: str, live: Heard | None = None, *, session: str | None = None, **fields: object) -> Outcome:
    """One attempt with this prompt, and the proof that it left nothing behind."""
    outcome = execute(cli.agent(**fields), a_claim(agent=cli.page, input=prompt, session=session), live)
    assert cli.left() == []
    return outcome


@pytest.mark.parametrize("cli", CODING, indirect=True)
def test_an_answer_and_then_the_same_session(cli: Cli, server: ModelServer) -> None:
    """Result, session and usage are read; the next attempt goes on with the session, and counts its own part only."""
    live = Heard()
    first = ask(cli, "remember the word kumquat", live)
    assert first.status is OutcomeClass.DONE, first
    assert "kumquat" in first.result
    assert first.session
    assert live.sessions[:1] == [first.session]
    assert first.usage is not None
    assert first.usage.total_tokens
    assert first.usage.complete is True
    claim = a_claim(agent=cli.page, input="and now say sapodilla", session=first.session, meter=first.usage.carry)
    second = execute(cli.agent(), claim)
    assert second.status is OutcomeClass.DONE, second
    assert "sapodilla" in second.result
    assert second.session == first.session
    assert second.usage is not None
    assert second.usage.total_tokens
    assert second.usage.total_tokens < 2 * first.usage.total_tokens
    told = [request for request in server.requests() if "sapodilla" in str(request["body"])]
    assert any("kumquat" in str(request["body"]) for request in told), "the session did not go on"


@pytest.mark.parametrize("cli", CODING, indirect=True)
def test_a_round_with_a_tool(cli: Cli) -> None:
    """The tool call and what it answered are seen; the result is what the agent says after it."""
    live = Heard()
    outcome = ask(cli, "[[mock:bash=printf hi-%s from-42]]", live)
    assert outcome.status is OutcomeClass.DONE, outcome
    assert "hi-from-42" in outcome.result
    assert "hi-from-42" in str([text for kind, text in live.written if kind == "tool"])


@pytest.mark.parametrize("cli", CODING, indirect=True)
def test_a_limit(cli: Cli) -> None:
    """429 from the provider is a limit, not a failure that uses up a retry."""
    outcome = ask(cli, "please wait [[mock:status=429,retry_after=1]]", idle_seconds=200)
    assert outcome.status is OutcomeClass.RATE_LIMITED, outcome


@pytest.mark.parametrize("cli", CODING, indirect=True)
def test_an_overloaded_provider(cli: Cli) -> None:
    """529 is a limit as well."""
    outcome = ask(cli, "much to do [[mock:status=529,retry_after=1]]", idle_seconds=200)
    assert outcome.status is OutcomeClass.RATE_LIMITED, outcome


@pytest.mark.parametrize("cli", CODING, indirect=True)
def test_a_key_that_is_refused(cli: Cli) -> None:
    """401 waits for a login."""
    outcome = ask(cli, "let me in [[mock:status=401]]", idle_seconds=200)
    assert outcome.status is OutcomeClass.UNAUTHENTICATED, outcome


@pytest.mark.parametrize("cli", ALL, indirect=True)
def test_a_provider_that_hangs(cli: Cli) -> None:
    """The idle limit ends it, whatever its own limits are."""
    outcome = ask(cli, HANG, idle_seconds=15)
    assert (outcome.status, outcome.cause) == (OutcomeClass.STALLED, "stalled"), outcome


@pytest.mark.parametrize("cli", ALL, indirect=True)
def test_cancel(cli: Cli, server: ModelServer) -> None:
    """Asked to end while its provider hangs, it is gone with all that it had started."""
    words = f"cancel {cli.page}"
    outcome = execute(
        cli.agent(),
        a_claim(agent=cli.page, input=f"{words} {HANG}"),
        when=lambda _: server.asked(words),
        patience=600,
    )
    assert outcome.status is OutcomeClass.CANCELLED, outcome
    assert cli.left() == []


@pytest.mark.parametrize("cli", ALL, indirect=True)
def test_a_crash(cli: Cli, server: ModelServer) -> None:
    """Killed from outside, it is a failure that may pass."""
    words = f"crash {cli.page}"

    killed: list[int] = []

    def kill(_: Heard) -> bool:
        if not killed and server.asked(words):
            killed.append(cli.kill())
        return False

    outcome = execute(cli.agent(), a_claim(agent=cli.page, input=f"{words} {HANG}"), when=kill, patience=600)
    assert killed
    assert killed[0] > 0
    assert outcome.status is OutcomeClass.TRANSIENT, outcome
    assert outcome.cause in ("signal", "exit_code")
    assert cli.left() == []


@pytest.mark.parametrize("cli", ["mini-swe-agent"], indirect=True)
def test_mini_swe_agent(cli: Cli) -> None:
    """It works with its shell until it submits; what it submits is the result; what its provider refuses is told."""
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo patched-it"
    outcome = ask(cli, f"[[mock:bash={submit}]]")
    assert outcome.status is OutcomeClass.DONE, outcome
    assert outcome.result.strip() == "patched-it"
    assert outcome.usage is not None
    assert outcome.usage.turns == 1
    refused = ask(cli, "let me in [[mock:status=401]]")
    assert refused.status is OutcomeClass.UNAUTHENTICATED, refused


@pytest.mark.parametrize("cli", ["mini-swe-agent"], indirect=True)
def test_limits_of_mini_swe_agent(cli: Cli) -> None:
    """It has no other word for an overloaded provider than the provider's own."""
    for status in (429, 529):
        limited = ask(cli, f"please wait [[mock:status={status},retry_after=1]]")
        assert limited.status is OutcomeClass.RATE_LIMITED, limited


@pytest.mark.parametrize("cli", ["llm"], indirect=True)
def test_llm(cli: Cli) -> None:
    """Its output is the result; a limit and a refused key are what they are."""
    outcome = ask(cli, "say hello")
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, "mock: say hello")
    refused = ask(cli, "say hello [[mock:status=401]]")
    assert refused.status is OutcomeClass.UNAUTHENTICATED, refused
    for status in (429, 529):
        limited = ask(cli, f"say hello [[mock:status={status},retry_after=1]]")
        assert limited.status is OutcomeClass.RATE_LIMITED, limited


@pytest.mark.parametrize("cli", ["aider"], indirect=True)
def test_aider(cli: Cli) -> None:
    """What it prints is the result, also when its provider refused it: its exit code does not say so."""
    outcome = ask(cli, "say hello")
    assert outcome.status is OutcomeClass.DONE, outcome
    assert "mock: say hello" in outcome.result
    refused = ask(cli, "let me in [[mock:status=401]]")
    assert refused.status is OutcomeClass.DONE, refused
    assert "AuthenticationError" in refused.result


@pytest.mark.parametrize(("block", "name", "result"), [(0, "summary", "short"), (1, "shouting", "HELLO")])
def test_functions_of_frameworks(block: int, name: str, result: str, tmp_path: Path) -> None:
    """The functions of the page run as agents, in an environment that has the frameworks."""
    (tmp_path / "page.py").write_text(blocks("python-frameworks", "python")[block])
    code = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]
sys.path += {[each for each in sys.path if each.endswith("site-packages")]!r}
import page
from orchestrator.agents.building import build
from tests.running import a_claim, execute
print(repr(execute(build(page.{name}), a_claim(agent={name!r}, input="hello")).result))
"""
    python = folder() / "python" / "bin" / "python"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.strip() == repr(result), done.stderr


PLAN = """\
plan: real
tasks:
  - {{name: one, agent: claude, input: "say kumquat"}}
  - {{name: two, agent: codex, after: [one], input: "it said {{one.result}}"}}
  - {{name: tool, agent: claude, input: "[[mock:bash=printf hi-%s from-42]]"}}
  - {{name: tired, agent: claude, input: "x [[mock:status=500,times=1]]", retry: {{initial: 0.01, max: 0.01}}}}
agents:
  claude: {claude}
  codex: {codex}
"""


def test_a_plan_of_real_agents(tmp_path: Path, database_url: str, server: ModelServer, homes: Path) -> None:
    """``orchestrator run`` with two CLIs: a result is passed on, a failure is tried again, tokens and cost are summed."""
    env: dict[str, str] = {}
    given: dict[str, str] = {}
    for page in ("claude-code", "codex"):
        cli = Cli(page, homes / "plan", server)
        cli.prepare()
        env |= cli.env
        given |= {name: json.dumps({**agent, "dir": str(cli.work)}) for name, agent in recipe(page).items()}
    (tmp_path / "plan.yaml").write_text(PLAN.format(**given))
    said = process("run", "plan.yaml", "--json", url=database_url, cwd=tmp_path, env=env)
    assert said.code == 0, said
    tasks = {task["name"]: task for task in said.json["tasks"]}
    assert {task["status"] for task in tasks.values()} == {"done"}
    assert "kumquat" in tasks["two"]["result"]
    assert "hi-from-42" in tasks["tool"]["result"]
    shown = process("show", str(tasks["tired"]["id"]), "--json", url=database_url, cwd=tmp_path).json
    assert [run["status"] for run in shown["runs"]] == ["transient", "done"]
    assert shown["runs"][0]["session"] == shown["runs"][1]["session"]
    assert shown["usage"]["cost_usd"] > 0
    assert all(KEY not in str(task) for task in said.json["tasks"])
