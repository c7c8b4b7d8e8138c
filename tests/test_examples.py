"""The examples: the plan can be read, and its agents do by themselves what the plan wants of them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.plans import load_plan, resolve, with_results

EXAMPLES = Path(__file__).parent.parent / "examples"


def survey(what: str, folder: Path, prompt: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run the example's command as the worker would, in another folder than its own repository."""
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "survey.py"), what],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", **env},
        input=prompt,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_quickstart_can_be_read() -> None:
    """Two agents and five tasks, the page last; no fault and no warning."""
    plan = load_plan(EXAMPLES / "quickstart.yaml")
    assert (plan.name, sorted(plan.agents), plan.warnings) == ("quickstart", ["report", "survey"], [])
    assert [task.name for task in plan.tasks] == ["size", "functions", "imports", "links", "page"]
    assert plan.tasks[-1].template


@pytest.mark.parametrize(("what", "key"), [("size", "kinds"), ("functions", "functions"), ("links", "documents")])
def test_surveys(what: str, key: str, tmp_path: Path) -> None:
    """Each gives one JSON object, a log, and progress up to the end."""
    events = tmp_path / "events"
    done = survey(what, tmp_path, "README.md docs examples", ORCHESTRATOR_EVENTS=str(events))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[key]
    assert done.stderr.count("\n") > 3
    assert json.loads(events.read_text().splitlines()[-1]) == {"type": "progress", "percent": 100, "message": "done"}


def test_one_survey_fails_once(tmp_path: Path) -> None:
    """The first attempt asks for another one, which does the work."""
    first = survey("imports", tmp_path, ORCHESTRATOR_ATTEMPT="1")
    assert (first.returncode, first.stdout) == (75, "")
    assert "busy" in first.stderr
    second = survey("imports", tmp_path, ORCHESTRATOR_ATTEMPT="2")
    assert "sqlalchemy" in json.loads(second.stdout)["foreign"]


def test_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python agent makes a page of the answers, as the plan hands them over."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from agents import report  # type: ignore[import-not-found]  # as the plan names it

    monkeypatch.delitem(sys.modules, "agents")
    task = load_plan(EXAMPLES / "quickstart.yaml").tasks[-1]
    answers: dict[str, Any] = {
        name: {"n": 1, "of": {"a": 2}, "list": [{"x": "y", "z": 3}]} for name in map(str, task.after)
    }
    said: list[Any] = []
    context = SimpleNamespace(
        input=resolve(task.input, with_results(task.params, answers)),
        progress=lambda percent, message: said.append(percent),
        log=said.append,
    )
    page = asyncio.run(report.function(context))
    assert page.startswith("# The state of this repository\n\n## Size\n\n- n: 1\n- of: a 2\n- list: y 3\n")
    assert said[-1] == 100
