"""Agents as plans and the configuration define them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InvalidInput, InvalidPlan
from orchestrator.plans import (
    agent_definition,
    definitions,
    secret_warnings,
)
from orchestrator.settings import Settings
from tests.plan_files import Load, loader


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write a plan file and load it with two configured agents."""
    return loader(tmp_path)


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({}, "expected exactly one of command, python, http, acp, plugin, found none of them"),
        ({"command": []}, "names no program"),
        ({"command": [""]}, "names no program"),
        ({"command": ["a", 1]}, 'found 1 in it; put it in quotes: "1"'),
        ({"command": ["{prompt}"]}, "the program itself cannot be a placeholder"),
        ({"command": ["python3", "-u", "-c", "print({title!r}, '{title}')"]}, "give it as an argument of its own"),
        ({"command": ["a", "\0"]}, "a NUL character"),
        ({"command": ["a"], "shell": True}, "with shell: true a command is one text"),
        ({"command": ["a"], "shell": "yes"}, "expected true or false, found 'yes'"),
        ({"command": ["a"], "prompt": "stdn"}, "expected one of stdin, argument, file, found 'stdn'"),
        ({"python": "a:b", "workspace": "worktree"}, "worktree is for agents that are commands or acp"),
        ({"http": "http://x", "workspace": "directory"}, "directory is for agents that are commands or acp"),
        ({"command": ["a"], "resume": ["a", "b"]}, "resume: names no {session}"),
        ({"python": "a:b", "resume": ["a", "{session}"]}, "the list of arguments of a command agent without a shell"),
        ({"command": ["a"], "options": {}}, "options: only a plugin agent has it"),
        ({"plugin": "a", "options": 1}, "options: expected a table"),
        ({"python": "mod"}, "expected module:function, found 'mod'"),
        ({"python": "os.path:__import__('x')"}, "expected module:function"),
        ({"command": ["a"], "env": {"CI": "1"}}, "env: unknown key 'CI'; write env: {set: {NAME: value}}"),
        ({"command": ["a"], "env": {"set": {"N": 1}}}, "env.set.N: expected text, found 1; put it in quotes"),
        ({"command": ["a"], "env": {"set": {"A=B": "1"}}}, "'A=B' cannot be the name of a variable"),
        ({"command": ["a"], "env": {"secret": "X"}}, "env.secret: expected a list of texts, found 'X'"),
        ({"command": ["a"], "exit_codes": {"x": "done"}}, "expected an exit code from 0 to 255"),
        ({"command": ["a"], "exit_codes": {"3": "lost"}}, "expected one of done, transient"),
        ({"command": ["a"], "kill_grace": -1}, "expected a number, 0 or more, found -1"),
        ({"command": ["a"], "idle_seconds": float("inf")}, "expected a number, more than 0, found inf"),
        ({"command": ["a"], "idle_seconds": 10**400}, "expected a number, more than 0, found 1"),
        ({"command": ["a"], "isolation": "thread"}, "expected one of loop, process, found 'thread'"),
    ],
)
def test_agents_that_are_refused(mapping: dict[str, Any], says: str) -> None:
    """Each key is checked, with what was expected and what was found."""
    with pytest.raises(InvalidPlan) as caught:
        agent_definition("a", mapping, line=3)
    assert says in caught.value.message
    assert all(line == 3 for line, _ in caught.value.faults)


def test_agents_of_the_configuration(tmp_path: Path) -> None:
    """The same keys under [agents.NAME] make the same agent, not local; all faults are told at once."""
    path = tmp_path / "orchestrator.toml"
    path.write_text(
        '[agents.coder]\ncommand = ["true"]\nexit_codes = {3 = "permanent"}\n[agents.sh]\ncommand = "a|b"\nshell = true'
    )
    made = definitions(Settings.load(path, {}))
    assert made["coder"] == agent_definition(
        "coder", {"command": ["true"], "exit_codes": {"3": "permanent"}}, base_dir=str(tmp_path)
    )
    assert (made["sh"].command, made["sh"].shell, made["sh"].local) == ("a|b", True, False)
    path.write_text('[agents.a]\ncommand = "x"\n[agents.b]\npromt = 1\n')
    with pytest.raises(InvalidInput, match=r"orchestrator.toml: 3 faults in its agents") as caught:
        definitions(Settings.load(path, {}))
    assert "agent 'b': unknown key 'promt'" in caught.value.message


def test_definition_hash() -> None:
    """The hash is that of what the agent does: a default said aloud changes nothing, a changed word does."""
    base = agent_definition("a", {"command": ["x"]})
    assert len(base.hash) == 16
    assert agent_definition("a", {"command": ["x"], "prompt": "stdin", "kill_grace": 2}).hash == base.hash
    assert agent_definition("a", {"command": ["x"]}, local=True, base_dir="/elsewhere", line=9).hash == base.hash
    others = [
        agent_definition("b", {"command": ["x"]}),
        agent_definition("a", {"command": ["x", "y"]}),
        agent_definition("a", {"command": ["x"], "env": {"set": {"A": "1"}}}),
        agent_definition("a", {"command": ["x"], "budget": {"seconds": 1}}),
    ]
    assert len({base.hash, *(each.hash for each in others)}) == 5


def test_short_secrets_are_warned_about(load: Load) -> None:
    """A secret too short to be blackened safely is told, without its value; one that is not set is not."""
    text = "agents:\n  a: {command: [x], env: {set: {IN: abcde}, secret: [IN, OUT, LONG, NONE]}}\ntasks: [{agent: a}]"
    plan = load(text, environ={"OUT": "xyz", "LONG": "123456"})
    assert [line for line, _ in plan.warnings] == [2, 2]
    assert "secret IN has 5 characters" in plan.warnings[0][1]
    assert "secret OUT has 3 characters" in plan.warnings[1][1]
    assert not any("xyz" in message or "abcde" in message for _, message in plan.warnings)
    assert secret_warnings(plan.agents["a"], {"OUT": "x" * 6})[0] == plan.warnings[0][1]
