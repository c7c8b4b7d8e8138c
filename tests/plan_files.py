"""Writing plan files for tests, and loading them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.domain.given import NewTask
from orchestrator.errors import InvalidPlan
from orchestrator.plans import Plan, agent_definition, load_plan, resolve, with_results

INPUTS = Path(__file__).parent / "inputs"

AGENTS = {
    "coder": agent_definition("coder", {"command": ["true"]}),
    "review": agent_definition("review", {"python": "pkg.agents:review"}),
}

YAML = """\
plan: nightly
agents:
  local:
    command: [fake, --model, "{model}", --, "{prompt}"]
    env: {set: {CI: "1"}, unset: [X], allow: [PATH], secret: [TOKEN_OF_ANY]}
    budget: {seconds: 1800}
    max_retries: 1
    retry: {initial: 1, max: 60}
    exit_codes: {0: done, 3: permanent}
    dir: sub
tasks:
  - name: fix-parser
    agent: local
    input: "Fix {file}. Keep {{file}} and {\\"a\\": {}}."
    params: {file: tests/test_parser.py, model: small}
    title: Fix
    priority: -3
    at: 2026-12-01T09:00:00+01:00
    max_retries: 0
    retry: {initial: 0.5}
    budget: {seconds: 60}
    unique_key: k
    concurrency_key: repo
    tags: {team: a}
    dir: work
  - name: check
    agent: review
    after: [fix-parser]
    input: {diff_of: "{fix-parser.result}", "{x}": 1}
"""

TOML = """\
plan = "nightly"
[agents.local]
command = ["fake", "--model", "{model}", "--", "{prompt}"]
env = {set = {CI = "1"}, unset = ["X"], allow = ["PATH"], secret = ["TOKEN_OF_ANY"]}
budget.seconds = 1800
max_retries = 1
retry = {initial = 1, max = 60}
exit_codes = {0 = "done", 3 = "permanent"}
dir = "sub"
[[tasks]]
name = "fix-parser"
agent = "local"
input = 'Fix {file}. Keep {{file}} and {"a": {}}.'
params = {file = "tests/test_parser.py", model = "small"}
title = "Fix"
priority = -3
at = 2026-12-01T09:00:00+01:00
max_retries = 0
retry.initial = 0.5
budget = {seconds = 60}
unique_key = "k"
concurrency_key = "repo"
tags = {team = "a"}
dir = "work"
[[tasks]]
name = "check"
agent = "review"
after = ["fix-parser"]
input = {diff_of = "{fix-parser.result}", "{x}" = 1}
"""

Load = Callable[..., Plan]
FindFaults = Callable[..., list[tuple[int, str]]]


def loader(folder: Path) -> Load:
    """Return what writes a text to a file in *folder* and loads it as a plan."""

    def load(text: str, name: str = "p.yaml", **options: Any) -> Plan:
        path = folder / name
        path.write_bytes(textwrap.dedent(text).encode("utf-8"))
        return load_plan(path, **{"agents": AGENTS, **options})

    return load


def fault_finder(folder: Path) -> FindFaults:
    """Return what loads a wrong plan and gives back its faults."""

    def faults(text: str, name: str = "p.yaml", **options: Any) -> list[tuple[int, str]]:
        with pytest.raises(InvalidPlan) as caught:
            loader(folder)(text, name, **options)
        assert caught.value.exit_code == 2
        assert all(message in caught.value.message for _, message in caught.value.faults[:20])
        return caught.value.faults

    return faults


def filled(task: NewTask, results: dict[str, Any]) -> Any:
    """Return the input as the agent of a claimed task sees it."""
    return resolve(task.input, with_results(task.params, results))
