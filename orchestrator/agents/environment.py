"""What environment a command agent gets: the worker's own less what is nobody else's business, or only what is allowed.

Order: the worker's environment (without ``allow``) or the allowed names of it, then ``secret``, then ``set``, then
``unset``, and last the variables of the contract, which nobody can override.

Left out by default: ``ORCHESTRATOR_*``, ``PG*``, database URLs, what a service manager says to the worker alone, the
worker's own trace context (an attempt has its own), and
the marks by which agent CLIs recognise that they run inside another one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from orchestrator.domain.given import AgentDefinition
from orchestrator.domain.values import value

NESTING_MARKS = frozenset(
    {
        "AI_AGENT",
        "CLAUDECODE",
        "CLAUDE_AGENT_SDK_VERSION",
        "CLAUDE_CODE_AGENT",
        "CLAUDE_CODE_CHILD_SESSION",
        "CLAUDE_CODE_ENTRYPOINT",
        "CLAUDE_CODE_EXECPATH",
        "CLAUDE_CODE_PARENT_SESSION_ID",
        "CLAUDE_CODE_SESSION_ID",
        "CLAUDE_CODE_SSE_PORT",
        "CODEX_INTERNAL_ORIGINATOR_OVERRIDE",
        "CODEX_SANDBOX",
        "CODEX_SANDBOX_NETWORK_DISABLED",
        "CODEX_THREAD_ID",
        "CURSOR_AGENT",
        "CURSOR_TRACE_ID",
        "GEMINI_CLI",
        "GOOSE_TERMINAL",
        "OPENCODE",
        "OPENCODE_PID",
        "OPENCODE_SERVER",
        "QWEN_CODE",
    }
)
"""Set by agent CLIs for what they start; a child that sees one refuses to start or does not save its session."""

_SERVICE = frozenset({"LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"})
_BASICS = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "TMPDIR")
"""Passed on beside ``allow``: without them hardly any program starts."""

_URL_NAME = re.compile(r"(^|_)(DATABASE|DB|POSTGRES|POSTGRESQL|SQLALCHEMY)_?(URL|URI|DSN)$|^SQLALCHEMY_DATABASE_URI$")
_URL_VALUE = re.compile(r"^\s*(postgres|postgresql)(\+\w+)?://", re.IGNORECASE)


def withheld(name: str, value: str) -> bool:
    """Say whether a variable of the worker is kept from its agents by default."""
    return (
        name.startswith(("ORCHESTRATOR_", "PG"))
        or name in NESTING_MARKS
        or name in _SERVICE
        or name in ("TRACEPARENT", "TRACESTATE")
        or _URL_NAME.search(name.upper()) is not None
        or _URL_VALUE.match(value) is not None
    )


@value
class Environment:
    """The part that is the same for every execution of an agent. ``missing``: secrets that the worker does not have."""

    variables: dict[str, str]
    secrets: dict[str, str]
    missing: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are passed on, for people; never a value."""
        return tuple(sorted(self.variables))


def environment(definition: AgentDefinition, own: Mapping[str, str]) -> Environment:
    """Return what an agent of *definition* gets out of the worker's *own* environment."""
    allow = definition.env_allow
    if allow is None:
        variables = {name: value for name, value in own.items() if not withheld(name, value)}
    else:
        patterns = (*_BASICS, *(name for name in allow if any(sign in name for sign in "*?[")))
        variables = {
            name: value
            for name, value in own.items()
            if name in allow or (not withheld(name, value) and any(fnmatchcase(name, each) for each in patterns))
        }
    secrets = {name: own[name] for name in definition.env_secret if name in own}
    variables.update(secrets)
    variables.update(definition.env_set)
    secrets.update((name, definition.env_set[name]) for name in definition.env_secret if name in definition.env_set)
    for name in definition.env_unset:
        variables.pop(name, None)
    missing = tuple(
        name for name in definition.env_secret if name not in variables and name not in definition.env_unset
    )
    return Environment(variables, secrets, missing)
