"""Which variables of the worker an agent sees."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.agents.environment import Environment, environment
from orchestrator.domain.given import AgentDefinition

OWN = {
    "PATH": "/bin",
    "HOME": "/home/a",
    "LC_ALL": "C.UTF-8",
    "EDITOR": "vi",
    "API_TOKEN": "token-123",
    "ORCHESTRATOR_DATABASE_URL": "postgresql://x",
    "ORCHESTRATOR_HOME": "/h",
    "PGPASSWORD": "p",
    "PGHOST": "h",
    "DATABASE_URL": "sqlite:///x",
    "APP_DB_URL": "mysql://x",
    "ANYTHING": "postgresql+psycopg://u:p@h/d",
    "CLAUDECODE": "1",
    "CLAUDE_CODE_ENTRYPOINT": "cli",
    "AI_AGENT": "1",
    "CLAUDE_CODE_MAX_RETRIES": "1",
    "NOTIFY_SOCKET": "/run/n",
}


def of(**fields: Any) -> Environment:
    """The environment of an agent with these fields."""
    return environment(AgentDefinition(name="a", hash="h", command=("x",), **fields), OWN)


def test_by_default_all_but_what_is_nobody_elses_business() -> None:
    """Ours, the database's, database URLs by name or value, nesting marks and the service manager's are left out."""
    assert set(of().variables) == {"PATH", "HOME", "LC_ALL", "EDITOR", "API_TOKEN", "CLAUDE_CODE_MAX_RETRIES"}


def test_allow_lets_only_its_names_and_the_basics_through() -> None:
    """With ``allow`` everything else is left out; a name that stands there is passed on whatever it is."""
    assert set(of(env_allow=()).variables) == {"PATH", "HOME", "LC_ALL"}
    assert set(of(env_allow=("EDITOR", "PGHOST")).variables) == {"PATH", "HOME", "LC_ALL", "EDITOR", "PGHOST"}


def test_a_pattern_in_allow_brings_nothing_that_is_withheld() -> None:
    """``*`` is the default set again, not the database's password."""
    assert set(of(env_allow=("*",)).variables) == set(of().variables)
    assert "CLAUDE_CODE_MAX_RETRIES" in of(env_allow=("CLAUDE_*",)).variables
    assert "CLAUDE_CODE_ENTRYPOINT" not in of(env_allow=("CLAUDE_*",)).variables


def test_set_and_unset() -> None:
    """``set`` replaces and adds, ``unset`` takes away, also what ``allow`` brings."""
    given = of(env_set={"CI": "1", "EDITOR": "ed"}, env_unset=("HOME", "NOTHING"))
    assert given.variables["CI"] == "1"
    assert given.variables["EDITOR"] == "ed"
    assert "HOME" not in given.variables


def test_secrets_are_passed_on_and_known_by_value() -> None:
    """A secret reaches the agent with or without ``allow``; one that the worker lacks is named."""
    given = of(env_secret=("API_TOKEN", "OTHER"), env_allow=())
    assert given.variables["API_TOKEN"] == "token-123"
    assert given.secrets == {"API_TOKEN": "token-123"}
    assert given.missing == ("OTHER",)
    assert of(env_secret=("CI_KEY",), env_set={"CI_KEY": "v-123456"}).secrets == {"CI_KEY": "v-123456"}


@pytest.mark.parametrize("name", ["CLAUDECODE", "PGHOST"])
def test_set_can_bring_back_what_is_withheld(name: str) -> None:
    """What the author of the agent writes down himself is his decision."""
    assert of(env_set={name: "mine"}).variables[name] == "mine"
