"""The recipes of docs/agents: they can be read, and the one that needs no program of others is executed."""

from __future__ import annotations

import asyncio
import re

import pytest

from orchestrator.agents.building import build
from orchestrator.agents.protocol import Stop
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.plans import agent_definition
from tests.real.clis import KEY, ROOT, model_server, recipe
from tests.running import Heard, a_claim

PAGES = sorted(path.stem for path in (ROOT / "docs" / "agents").glob("*.md") if "```yaml" in path.read_text())


@pytest.mark.parametrize("page", PAGES)
def test_a_recipe_can_be_read(page: str) -> None:
    """It defines one agent, without a fault."""
    ((name, given),) = recipe(page).items()
    build(agent_definition(name, given))


def test_every_page_is_listed() -> None:
    """The table names each page once, and each link leads somewhere."""
    folder = ROOT / "docs" / "agents"
    linked = re.findall(r"^\| \[[^]]+\]\(([^)]+)\)", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(linked) == sorted(path.name for path in folder.glob("*.md") if path.name != "README.md")


def test_an_openai_compatible_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed from a model server: the answer, its usage, and a limit with the time that was stated."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    ((name, given),) = recipe("openai-api").items()
    with model_server() as server:
        address = given["http"].replace("https://models.internal", server.url)
        agent = build(agent_definition(name, {**given, "http": address}))
        prompts = (
            "say hello",
            "x [[mock:status=429,retry_after=7]]",
            "x [[mock:status=401]]",
            "x [[mock:cut=200]]",
        )

        async def ask_all() -> list[Outcome]:
            found = [await agent.execute(a_claim(agent=name, input=each), Heard(), Stop()) for each in prompts]
            await agent.aclose()
            return found

        outcome, limited, refused, cut = asyncio.run(ask_all())
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, "mock: say hello")
    assert outcome.usage is not None
    assert outcome.usage.total_tokens == 7
    assert (limited.status, limited.retry_after) == (OutcomeClass.RATE_LIMITED, 7.0)
    assert refused.status is OutcomeClass.UNAUTHENTICATED
    assert (cut.status, cut.cause) == (OutcomeClass.TRANSIENT, "no_result")
