"""What a caller hands in: a task that is to be made, and an agent as a file defines it. Values only, checked at the door."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from orchestrator.domain.outcome import Budget, RetryPolicy
from orchestrator.domain.values import value
from orchestrator.domain.words import OnLimit
from orchestrator.errors import InvalidInput


@value
class NewTask:
    """A task to be made. None means: left open, filled at the first claim from the agent or the defaults.

    ``after`` names the tasks that must be done first: ids, or names within the same submission. ``at`` is the instant
    (timezone-aware) before which it does not start. ``line`` is where it stands in its file, for messages.
    ``template`` is True when ``input`` still holds placeholders, because it quotes results of ``after`` tasks: whoever
    claims it passes it through ``plans.resolve``. ``dir`` is the directory that the agent runs in, if the task says so.
    """

    agent: str
    input: Any = None
    params: dict[str, Any] | None = None
    title: str | None = None
    name: str | None = None
    priority: int = 0
    at: datetime | None = None
    max_retries: int | None = None
    retry: RetryPolicy | None = None
    budget: Budget | None = None
    unique_key: str | None = None
    concurrency_key: str | None = None
    after: tuple[int | str, ...] = ()
    approval: bool = False
    tags: dict[str, str] | None = None
    definition: str | None = None
    task_hash: str | None = None
    template: bool = False
    dir: str | None = None
    line: int = 0
    traceparent: str | None = None


@value
class Login:
    """An account that agents share: what one of them is refused, all of them are.

    ``concurrency`` is how many attempts of it each worker runs at once, ``stagger`` the seconds between two starts. With
    ``folder`` each of them has a settings folder of its own, by the name in ``variable``: ``{slot}`` in it is a number
    from 1 on that no other attempt on this host has.
    """

    name: str
    concurrency: int | None = None
    stagger: float = 0.0
    folder: str | None = None
    variable: str | None = None


@value
class AgentDefinition:
    """An agent as ``orchestrator.toml`` or a plan defines it; exactly one of command, python, http, acp, plugin is set.

    ``resume`` is the command of an attempt that goes on with a session. ``hash`` covers every field that decides what
    the agent does; ``local`` is True for an agent of a plan file.
    """

    name: str
    hash: str
    local: bool = False
    command: tuple[str, ...] | str | None = None
    python: str | None = None
    http: str | None = None
    acp: tuple[str, ...] | None = None
    plugin: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    permissions: dict[str, str] = field(default_factory=dict)
    authenticate: str | None = None
    resume: tuple[str, ...] | None = None
    shell: bool = False
    prompt: str = "stdin"
    output: str = "text"
    workspace: str = "none"
    session: str = "resume"
    dir: str | None = None
    base_dir: str | None = None
    env_set: dict[str, str] = field(default_factory=dict)
    env_unset: tuple[str, ...] = ()
    env_allow: tuple[str, ...] | None = None
    env_secret: tuple[str, ...] = ()
    exit_codes: dict[int, str] = field(default_factory=dict)
    budget: Budget | None = None
    model: str | None = None
    login: Login | None = None
    max_retries: int | None = None
    retry: RetryPolicy | None = None
    idle_seconds: float | None = None
    connect_seconds: float | None = None
    kill_grace: float = 2.0
    result_grace: float = 5.0
    isolation: str | None = None
    line: int = 0


def address_fault(address: str) -> str | None:
    """Return what is wrong with the address of an agent, None if nothing is."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"{address!r} is not an address: {error}"
    if parts.scheme not in ("http", "https") or not host:
        return f"expected an address such as https://host/path, found {address!r}"
    if parts.username is not None or parts.password is not None:
        return 'an address holds no password; write headers: {Authorization: "Bearer {env.NAME}"} and env: {secret: [NAME]}'
    if "{" in address or "}" in address or any(ord(sign) <= 32 or ord(sign) == 127 for sign in address):
        return "an address holds no placeholders, spaces or control characters"
    return None


def new_task(given: Mapping[str, Any]) -> NewTask:
    """A NewTask from the arguments of ``add``. Raises InvalidInput for an unknown one."""
    if not isinstance(given, Mapping):
        raise InvalidInput(f"a task: expected the arguments of add as a mapping, found {given!r:.100}")
    values: dict[str, Any] = dict(given)
    parts = {
        part: values.pop(f"budget_{part}")
        for part in ("seconds", "tokens", "usd", "turns")
        if f"budget_{part}" in values
    }
    limit = values.pop("on_limit", None)
    if parts or limit is not None:
        if values.get("budget") is not None:
            raise InvalidInput("budget: give either budget or its parts, not both")
        parts = {name: value for name, value in parts.items() if value is not None}
        values["budget"] = {**parts, "on_limit": limit or OnLimit.FAIL} if parts or limit else None
    for name, kind in (("retry", RetryPolicy), ("budget", Budget)):
        if values.get(name) is not None:
            values[name] = _value(name, kind, values[name])
    after = values.get("after")
    if after is not None:
        try:
            values["after"] = (after,) if isinstance(after, int | str) else tuple(after)
        except TypeError:
            raise InvalidInput(f"after: expected ids of tasks, found {after!r:.100}") from None
    at = values.get("at")
    if at is not None and not isinstance(at, datetime):
        raise InvalidInput(f"at: expected a datetime, found {at!r}")
    try:
        return NewTask(**values)
    except TypeError:
        unknown = sorted(set(values) - set(NewTask.__dataclass_fields__))
        if "agent" not in values:
            raise InvalidInput("agent: a task needs the name of its agent") from None
        raise InvalidInput(f"unknown field {unknown[0]!r} of a task" if unknown else f"not a task: {given!r}") from None


def _value(name: str, kind: type[RetryPolicy] | type[Budget], given: Any) -> Any:
    """*given* as a value of *kind*, which it may be already. Raises InvalidInput."""
    if isinstance(given, kind):
        return given
    known = tuple(kind.__dataclass_fields__)
    if not isinstance(given, Mapping) or not set(given) <= set(known):
        raise InvalidInput(f"{name}: expected {', '.join(known)}, found {given!r:.100}")
    values = dict(given)
    if "on_limit" in values:
        try:
            values["on_limit"] = OnLimit(values["on_limit"])
        except ValueError:
            words = ", ".join(each.value for each in OnLimit)
            raise InvalidInput(f"on_limit: expected one of {words}, found {values['on_limit']!r:.100}") from None
    return kind(**values)
