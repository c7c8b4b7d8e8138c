"""The real agent CLIs, by the recipes of ``docs/agents/``, against a model server on the loopback address.

``scripts/test-real-agents`` installs them and runs this. Every scenario judges what the product makes of a CLI: the
outcome, the session, the usage, and that nothing of it runs afterwards.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.agents import processes
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from tests.commands import process
from tests.real.clis import KEY, ROOT, Cli, ModelServer, blocks, folder, model_server, recipe
from tests.running import Heard, a_claim, execute

pytestmark = [pytest.mark.real, pytest.mark.agents, pytest.mark.timeout(900)]

CODING = ("claude-code", "codex", "gemini", "opencode")
"""Those that stream events and have sessions."""
HANG = "wait for me [[mock:hang=600]]"


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    """One model server for all."""
    with model_server() as running:
        yield running


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for each CLI: some make a database in theirs at first."""
    return tmp_path_factory.mktemp("homes")


@pytest.fixture
def cli(request: pytest.FixtureRequest, server: ModelServer, homes: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The CLI of this test, in an environment of its own."""
    made = Cli(request.param, homes / request.param, server)
    made.prepare()
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Descendants whose parent was killed are ours to collect, as a worker does every few seconds."""
    yield
    deadline = time.monotonic() + 30
    while any(each.status() == psutil.STATUS_ZOMBIE for each in children()) and time.monotonic() < deadline:
        processes.keeper().sweep()
        time.sleep(0.1)


def children() -> list[psutil.Process]:
    """The child processes of this one that are still there."""
    return [each for each in psutil.Process().children() if each.is_running()]


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


@pytest.mark.parametrize("cli", ["claude-code", "codex"], indirect=True)
def test_an_overloaded_provider(cli: Cli) -> None:
    """529 is a limit as well."""
    outcome = ask(cli, "much to do [[mock:status=529]]", idle_seconds=60)
    assert outcome.status is OutcomeClass.RATE_LIMITED, outcome


@pytest.mark.parametrize("cli", ["claude-code", "gemini"], indirect=True)
def test_a_key_that_is_refused(cli: Cli) -> None:
    """401 waits for a login."""
    outcome = ask(cli, "let me in [[mock:status=401]]", idle_seconds=60)
    assert outcome.status is OutcomeClass.UNAUTHENTICATED, outcome


@pytest.mark.parametrize("cli", CODING, indirect=True)
def test_a_provider_that_hangs(cli: Cli) -> None:
    """The idle limit ends it, whatever its own limits are."""
    outcome = ask(cli, HANG, idle_seconds=15)
    assert (outcome.status, outcome.cause) == (OutcomeClass.STALLED, "stalled"), outcome


@pytest.mark.parametrize("cli", CODING, indirect=True)
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


@pytest.mark.parametrize("cli", CODING, indirect=True)
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
    """It works with its shell until it submits; what it submits is the result."""
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo patched-it"
    outcome = ask(cli, f"[[mock:bash={submit}]]")
    assert outcome.status is OutcomeClass.DONE, outcome
    assert outcome.result.strip() == "patched-it"
    assert outcome.usage is not None
    assert outcome.usage.turns == 1


@pytest.mark.parametrize("cli", ["llm"], indirect=True)
def test_llm(cli: Cli) -> None:
    """Its output is the result; a refused key is one."""
    outcome = ask(cli, "say hello")
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, "mock: say hello")
    refused = ask(cli, "say hello [[mock:status=401]]")
    assert refused.status is OutcomeClass.UNAUTHENTICATED, refused


@pytest.mark.parametrize("cli", ["aider"], indirect=True)
def test_aider(cli: Cli) -> None:
    """What it prints is the result."""
    outcome = ask(cli, "say hello")
    assert outcome.status is OutcomeClass.DONE, outcome
    assert "mock:" in outcome.result


ACP = {
    "gemini": (("gemini", "--acp"), {"authenticate": "gemini-api-key"}),
    "opencode": (("opencode", "acp"), {}),
}


@pytest.mark.parametrize("cli", list(ACP), indirect=True)
def test_the_agent_client_protocol(cli: Cli, server: ModelServer) -> None:
    """The same CLIs in a conversation: an answer with session and usage, a tool with leave, and cancel in the middle."""
    command, fields = ACP[cli.page]
    agent = cli.acp(*command, permissions="allow", **fields)
    first = execute(agent, a_claim(agent="acp", input="say kumquat"))
    assert first.status is OutcomeClass.DONE, first
    assert "kumquat" in first.result
    assert first.session
    assert first.usage is not None
    assert first.usage.total_tokens
    live = Heard()
    tool = execute(agent, a_claim(agent="acp", input="[[mock:bash=printf hi-%s from-42]]"), live)
    assert tool.status is OutcomeClass.DONE, tool
    assert "hi-from-42" in tool.result
    assert [text for kind, text in live.written if kind == "tool"]
    words = f"cancel acp {cli.page}"
    claim = a_claim(agent="acp", input=f"{words} {HANG}")
    stopped = execute(agent, claim, when=lambda _: server.asked(words), patience=600)
    assert stopped.status is OutcomeClass.CANCELLED, stopped
    assert cli.left() == []


def test_a_permission_that_is_denied(request: pytest.FixtureRequest, server: ModelServer, homes: Path) -> None:
    """Gemini CLI asks for leave before a shell tool; refused, it goes on without, and the run says so."""
    cli = Cli("gemini", homes / "gemini", server)
    cli.prepare()
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    for name, value in cli.env.items():
        monkeypatch.setenv(name, value)
    command, fields = ACP["gemini"]
    agent = cli.acp(*command, permissions={"read": "allow"}, **fields)
    denied = execute(agent, a_claim(agent="acp", input="[[mock:bash=touch denied-it]]"))
    assert denied.status is OutcomeClass.DONE, denied
    assert any("denied 1 tool use (execute:" in note for note in denied.notes), denied.notes
    assert not (cli.work / "denied-it").exists()


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
