"""Agents that other packages bring."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agents import plugins
from orchestrator.agents.building import build
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput
from orchestrator.plans import agent_definition
from tests.commands import ROOT, process
from tests.running import Heard, a_claim, execute

EXAMPLE = ROOT / "examples" / "greeter"
PLAN = """\
agents:
  hello: {plugin: greeter, options: {greeting: Hej}}
tasks:
  - {name: one, agent: hello, input: world}
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's entry point, and two that are wrong, as if they were installed."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    points = [
        EntryPoint("greeter", "orchestrator_greeter:make", plugins.GROUP),
        EntryPoint("broken", "no_such_module:make", plugins.GROUP),
        EntryPoint("nothing", "builtins:repr", plugins.GROUP),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)


def make(plugin: str, **options: Any) -> Any:
    """The agent of a definition with this plug-in."""
    return build(agent_definition("hello", {"plugin": plugin, "options": options}, local=True))


@pytest.mark.usefixtures("installed")
def test_an_agent_of_a_plugin() -> None:
    """It gets its definition with its own options, and is an agent like any other."""
    agent = make("greeter", greeting="Hej")
    live = Heard()
    outcome = execute(agent, a_claim(agent="hello", input="world"), live)
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, "Hej, world!")
    assert live.text("message") == "Hej, world!"
    assert agent.definition == agent_definition("hello", {"plugin": "greeter", "options": {"greeting": "Hej"}}).hash
    stopped = execute(make("greeter", pause=60), a_claim(agent="hello", input="x"), when=lambda heard: heard.progressed)
    assert stopped.status is OutcomeClass.CANCELLED


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("plugin", "options", "says"),
    [
        ("greter", {}, "plug-in 'greter' is not installed; did you mean 'greeter'?"),
        ("greeter", {"greeting": 1}, "options.greeting: expected text, found 1"),
        ("broken", {}, "plug-in 'broken' (no_such_module:make) failed: ModuleNotFoundError"),
        ("nothing", {}, "returned str, which has no name"),
    ],
)
def test_plugins_that_do_not_work(plugin: str, options: dict[str, Any], says: str) -> None:
    """What is missing or broken is said with the name of the plug-in and of the agent."""
    with pytest.raises(InvalidInput) as caught:
        make(plugin, **options)
    assert says in caught.value.message
    assert "agent 'hello'" in caught.value.message


@pytest.mark.slow
def test_the_example_is_installed_and_used(tmp_path: Path, database_url: str) -> None:
    """Built as a wheel and installed into a folder of its own, a plan finds it by name."""
    source = shutil.copytree(EXAMPLE, tmp_path / "greeter")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=source, check=True, capture_output=True
    )
    assert done.returncode == 0
    (wheel,) = (source / "dist").glob("*.whl")
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--target", site, wheel],
        check=True,
        cwd=tmp_path,
    )
    (tmp_path / "plan.yaml").write_text(PLAN)
    paths = {"PYTHONPATH": f"{ROOT}:{site}"}
    said = process("run", "plan.yaml", "--json", url=database_url, cwd=tmp_path, env=paths)
    assert said.code == 0, said
    assert said.json["tasks"][0]["result"] == "Hej, world!"
    refused = process("run", "plan.yaml", "--json", url=database_url, cwd=tmp_path)
    assert refused.code == 2
    assert "plug-in 'greeter' is not installed" in refused.error["message"]
