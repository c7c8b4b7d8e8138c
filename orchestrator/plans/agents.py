"""Agents as plan files and ``orchestrator.toml`` define them: the same keys, the same checks, one ``AgentDefinition``."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from orchestrator.domain.given import AgentDefinition, Login, NewTask, address_fault
from orchestrator.domain.outcome import Budget, RetryPolicy
from orchestrator.domain.prices import Prices
from orchestrator.domain.storable import NAME_MAX, check_text
from orchestrator.domain.template import code_in, placeholders
from orchestrator.domain.words import OnLimit
from orchestrator.errors import InvalidInput, InvalidPlan
from orchestrator.plans.fields import Faults, Fields, quoted, shown
from orchestrator.settings import Settings

KINDS = ("command", "python", "http", "acp", "plugin")
"""The ways to say what an agent is; each has exactly one."""

AGENT_KEYS = (
    *KINDS,
    *(
        "shell",
        "resume",
        "prompt",
        "output",
        "workspace",
        "session",
        "dir",
        "env",
        "exit_codes",
        "budget",
        "model",
        "login",
        "max_retries",
        "retry",
    ),
    *("idle_seconds", "connect_seconds", "kill_grace", "result_grace", "isolation", "headers", "body"),
    *("permissions", "authenticate", "options"),
)

ARGV_NAMES = ("prompt", "id", "attempt", "title", "name", "workspace", "session")
"""What an argv template knows beside the task's params and the results of its ``after`` tasks."""

PROMPTS = ("stdin", "argument", "file")
OUTPUTS = ("text", "json", "jsonl", "claude", "codex", "gemini", "opencode", "openai")
HTTP_OUTPUTS = ("json", "jsonl", "text", "openai")
WORKSPACES = ("none", "directory", "temporary", "worktree")
SESSIONS = ("resume", "fresh", "resume-then-fresh")
DECISIONS = ("allow", "deny", "ask")
TOOL_KINDS = ("read", "edit", "delete", "move", "search", "execute", "think", "fetch", "switch_mode", "other")
"""The kinds of tools that the Agent Client Protocol knows."""

_OF_ONE_KIND = {
    "headers": "http",
    "body": "http",
    "permissions": "acp",
    "authenticate": "acp",
    "options": "plugin",
}
"""Keys that mean something for one kind of agent alone."""

EXIT_CLASSES = ("done", "transient", "rate_limited", "unauthenticated", "permanent")

TOKENS_ONLY = ("codex", "gemini", "openai")
"""Kinds of output that never name a cost."""
COST_TOLD = ("claude", "opencode")
"""Kinds of output that name their cost themselves."""

SHORTEST_SECRET = 6
"""A shorter value would be found, and blackened, all over innocent output."""

_ELSEWHERE = {
    "cmd": "command",
    "args": "command: [program, argument, …]",
    "url": "http",
    "cwd": "dir",
    "prompt_via": "prompt",
    "result": "output",
    "env_secret": "env: {secret: […]}",
    "secrets": "env: {secret: […]}",
    "budget_seconds": "budget: {seconds: …}",
    "timeout": "budget: {seconds: …}",
    "timeout_seconds": "budget: {seconds: …}",
    "idle_timeout_seconds": "idle_seconds",
    "retries": "max_retries",
}


def definitions(settings: Settings) -> dict[str, AgentDefinition]:
    """Return the agents of the configuration file by name. Raises ``InvalidInput`` that lists all that is wrong."""
    faults = Faults()
    made: dict[str, AgentDefinition] = {}
    base = None if settings.source_dir is None else str(settings.source_dir)
    for name, table in settings.agents.items():
        one = read_agent(name, table, local=False, base_dir=base, line=0, faults=faults)
        if one is None:
            continue
        made[name] = one
        if said := price_fault(one, one.budget, settings.prices):
            faults.add(0, f"agent {name!r}: budget.usd: {said}")
    if faults.found:
        file = settings.source or "settings"
        lines = "".join(f"\n  {message}" for _, message in faults.found[:20])
        raise InvalidInput(f"{file}: {_number(len(faults.found), 'fault')} in its agents{lines}", config=str(file))
    return made


def agent_definition(
    name: str, mapping: Mapping[str, Any], *, local: bool = False, base_dir: str | None = None, line: int = 0
) -> AgentDefinition:
    """Return the agent that *mapping* defines. Raises ``InvalidPlan`` with everything that is wrong with it."""
    faults = Faults()
    made = read_agent(name, mapping, local=local, base_dir=base_dir, line=line, faults=faults)
    if made is None or faults.found:
        found = faults.found
        lines = "".join(f"\n  {message}" for _, message in found[:20])
        raise InvalidPlan(f"agent {name!r}: {_number(len(found), 'fault')}{lines}", found, agent=name)
    return made


def read_agent(
    name: str, mapping: Any, *, local: bool, base_dir: str | None, line: int, faults: Faults
) -> AgentDefinition | None:
    """Return the agent that *mapping* defines; None, and at least one more of *faults*, if it cannot be one."""
    before = len(faults.found)
    try:
        check_text("name", name, NAME_MAX)
    except InvalidInput as error:
        faults.add(line, f"agent {name[:60]!r}: {error.message}")
        return None
    if not name:
        faults.add(line, "an agent needs a name")
        return None
    if not isinstance(mapping, dict):
        faults.add(line, f"agent {name!r}: expected a table of keys and values, found {shown(mapping)}")
        return None
    fields = Fields(mapping, line, f"agent {name!r}: ", faults)
    fields.only(AGENT_KEYS, _ELSEWHERE)
    kinds = [kind for kind in KINDS if mapping.get(kind) is not None]
    if len(kinds) != 1:
        found = f"both {' and '.join(kinds)}" if kinds else "none of them"
        faults.add(fields.line, f"agent {name!r}: expected exactly one of {', '.join(KINDS)}, found {found}")
    workspace = fields.choice("workspace", WORKSPACES, "none")
    if ("python" in kinds and workspace in ("temporary", "worktree")) or ("http" in kinds and workspace != "none"):
        fields.fault("workspace", f"{workspace} is for agents that are commands or acp")
    shell = fields.flag("shell")
    env = _Environment(fields)
    http = "http" in kinds
    for key, kind in _OF_ONE_KIND.items():
        if kind not in kinds and mapping.get(key) is not None:
            article = "an" if kind in ("http", "acp") else "a"
            fields.fault(key, f"only {article} {kind} agent has it")
    made = AgentDefinition(
        name=name,
        hash="",
        local=local,
        command=_command(fields, shell) if "command" in kinds else None,
        python=_python(fields) if "python" in kinds else None,
        http=_address(fields) if http else None,
        acp=_acp(fields) if "acp" in kinds else None,
        plugin=fields.text("plugin") if "plugin" in kinds else None,
        options=fields.json("options") or {} if "plugin" in kinds and fields.inner("options") is not None else {},
        permissions=_permissions(fields) if "acp" in kinds else {},
        authenticate=fields.text("authenticate") if "acp" in kinds else None,
        headers=_headers(fields, env) if http else {},
        body=fields.json("body") if http else None,
        resume=_resume(fields, shell) if mapping.get("resume") is not None else None,
        shell=shell,
        prompt=fields.choice("prompt", PROMPTS, "stdin"),
        output=fields.choice("output", HTTP_OUTPUTS, "json") if http else fields.choice("output", OUTPUTS, "text"),
        workspace=workspace,
        session=fields.choice("session", SESSIONS, "resume"),
        dir=fields.text("dir", longest=4096),
        base_dir=base_dir,
        env_set=env.set,
        env_unset=env.unset,
        env_allow=env.allow,
        env_secret=env.secret,
        exit_codes=_exit_codes(fields),
        budget=read_budget(fields),
        model=fields.text("model"),
        login=_login(fields),
        max_retries=fields.whole("max_retries", least=0),
        retry=read_retry(fields),
        idle_seconds=fields.number("idle_seconds", above=0),
        connect_seconds=fields.number("connect_seconds", above=0),
        kill_grace=_or(fields.number("kill_grace", least=0), 2.0),
        result_grace=_or(fields.number("result_grace", least=0), 5.0),
        isolation=fields.choice("isolation", ("loop", "process"), "") or None,
        line=fields.line,
    )
    if len(faults.found) > before:
        return None
    return replace(made, hash=definition_hash(made))


def definition_hash(definition: AgentDefinition) -> str:
    """Return the short hash of all that decides what the agent does: not where it is written down, nor on which host."""
    told = asdict(definition)
    for key in ("hash", "local", "line", "base_dir"):
        del told[key]
    return short_hash(told)


def short_hash(value: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of *value*'s canonical JSON."""
    return hashlib.sha256(_CANONICAL(value).encode()).hexdigest()[:16]


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def argv_references(definition: AgentDefinition) -> list[str]:
    """Return the placeholders of the agent's templates that are not its own names: params and results of tasks."""
    command = definition.command
    parts = [command] if isinstance(command, str) else list(command or ())
    parts += [*(definition.resume or ()), *(definition.acp or ()), *_texts(definition.body)]
    names = [reference for part in parts for reference in placeholders(part)]
    for header in definition.headers.values():
        names += [reference for reference in placeholders(header) if not reference.startswith("env.")]
    own = ARGV_NAMES if definition.body is None else (*ARGV_NAMES, "input")
    return [reference for reference in dict.fromkeys(names) if reference not in own]


def _texts(value: Any) -> Iterator[str]:
    """All texts within a JSON value, but its keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def secret_warnings(definition: AgentDefinition, environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a sentence for each named secret whose value, here and now, is too short to be blackened safely."""
    environ = os.environ if environ is None else environ
    said: list[str] = []
    for name in definition.env_secret:
        value = definition.env_set.get(name, environ.get(name, ""))
        if 0 < len(value) < SHORTEST_SECRET:
            said.append(
                f"agent {definition.name!r}: the value of the secret {name} has {_number(len(value), 'character')}; "
                f"values of fewer than {SHORTEST_SECRET} are not redacted"
            )
    return said


def read_budget(fields: Fields) -> Budget | None:
    """Return the budget of an agent or a task, None if it has none."""
    budget = fields.inner("budget")
    if budget is None:
        return None
    budget.only(("seconds", "tokens", "usd", "turns", "on_limit"))
    on_limit = budget.choice("on_limit", list(OnLimit), OnLimit.FAIL)
    return Budget(
        seconds=budget.number("seconds", above=0),
        tokens=budget.whole("tokens", least=1, most=2**63 - 1),
        usd=budget.number("usd", above=0),
        turns=budget.whole("turns", least=1),
        on_limit=OnLimit(on_limit),
    )


def price_fault(definition: AgentDefinition, budget: Budget | None, prices: Mapping[str, Any]) -> str | None:
    """Return why the cap in USD of *budget* could not be kept for this agent, and what to write; None if it can."""
    if budget is None or budget.usd is None:
        return None
    model, output = definition.model, definition.output
    if output in COST_TOLD or (model is None and output not in TOKENS_ONLY) or model in Prices(prices):
        return None
    table = "[prices.NAME]" if model is None else f"[prices.{json.dumps(model)}]"
    write = f"write {table} input = …, output = … (USD for a million tokens) in orchestrator.toml"
    if model is None:
        return f"{output} reports tokens and no cost, so a cap needs a price: give the agent model: NAME, and {write}"
    return f"no price of model {model!r} is known, so the cap could not be kept: {write}"


def check_prices(
    tasks: Sequence[NewTask], configured: Callable[[], Mapping[str, AgentDefinition]], prices: Mapping[str, Any]
) -> None:
    """Refuse a cap in USD for an agent of the configuration that reports tokens whose price is not known.

    Raises InvalidInput. *configured* is asked only when some task has such a cap.
    """
    for task in tasks:
        if task.budget is None or task.budget.usd is None:
            continue
        definition = configured().get(task.agent) if task.definition is None else None
        if definition is not None and (said := price_fault(definition, task.budget, prices)):
            raise InvalidInput(f"budget_usd: agent {task.agent!r}: {said}", agent=task.agent)


def read_retry(fields: Fields) -> RetryPolicy | None:
    """Return the retry policy of an agent or a task, None if it has none."""
    retry = fields.inner("retry")
    if retry is None:
        return None
    retry.only(("initial", "factor", "max"))
    usual = RetryPolicy()
    return RetryPolicy(
        initial=_or(retry.number("initial", above=0), usual.initial),
        factor=_or(retry.number("factor", least=1), usual.factor),
        max=_or(retry.number("max", above=0), usual.max),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _command(fields: Fields, shell: bool) -> tuple[str, ...] | str | None:
    value = fields.table["command"]
    if shell:
        if isinstance(value, str):
            return fields.text("command", longest=None)
        fields.fault("command", f"with shell: true a command is one text, found {shown(value)}")
        return None
    if isinstance(value, str):
        try:
            parts = shlex.split(value) or ["program"]
        except ValueError:
            parts = ["program", "argument"]
        advice = json.dumps(parts, ensure_ascii=False)
        fields.fault("command", f"expected a list of arguments; write {advice}, or shell: true if it wants a shell")
        return None
    parts_given = fields.texts("command")
    if parts_given is None:
        return None
    if not parts_given or not parts_given[0]:
        fields.fault("command", "names no program")
        return None
    if set(placeholders(parts_given[0])) - {"workspace"}:
        fields.fault("command", "the program itself cannot be a placeholder: a task would choose what is run")
    _no_code(fields, "command", parts_given)
    return parts_given


def _no_code(fields: Fields, key: str, parts: tuple[str, ...]) -> None:
    """A value within a program's text would be a part of the program; only a shell can be given it as a variable."""
    code, shell = code_in(parts) or (-1, True)
    if shell:
        return
    named = [name for name in placeholders(parts[code]) if name not in ("id", "attempt")]
    if named:
        fields.fault(
            key,
            f"{{{named[0]}}} within the text of a program would become a part of the program; give it as an argument of"
            f' its own, behind that text: "{{{named[0]}}}"',
        )


def _acp(fields: Fields) -> tuple[str, ...] | None:
    parts = fields.texts("acp")
    if parts is not None and (not parts or not parts[0]):
        fields.fault("acp", "names no program")
        return None
    if parts and set(placeholders(parts[0])) - {"workspace"}:
        fields.fault("acp", "the program itself cannot be a placeholder: a task would choose what is run")
    if parts:
        _no_code(fields, "acp", parts)
    return parts


def _permissions(fields: Fields) -> dict[str, str]:
    """The decisions of an acp agent by kind of tool; one word stands for all kinds."""
    value = fields.table.get("permissions")
    if value is None:
        return {}
    if isinstance(value, str):
        word = fields.choice("permissions", DECISIONS, "deny")
        return {"default": word}
    made: dict[str, str] = {}
    if (table := fields.inner("permissions")) is not None:
        table.only(("default", *TOOL_KINDS))
        for kind in table.table:
            if kind in ("default", *TOOL_KINDS):
                made[kind] = table.choice(kind, DECISIONS, "deny")
    return made


def _resume(fields: Fields, shell: bool) -> tuple[str, ...] | None:
    if fields.table.get("command") is None or shell:
        fields.fault("resume", "is the list of arguments of a command agent without a shell")
        return None
    parts = fields.texts("resume")
    if parts is not None and (not parts or not parts[0]):
        fields.fault("resume", "names no program")
        return None
    if parts and set(placeholders(parts[0])) - {"workspace"}:
        fields.fault("resume", "the program itself cannot be a placeholder: a task would choose what is run")
    if parts:
        _no_code(fields, "resume", parts)
    if parts and not any("session" in placeholders(part) for part in parts):
        fields.fault("resume", "names no {session}")
    return parts


def _python(fields: Fields) -> str | None:
    value = fields.text("python", longest=None)
    if value is not None and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", value):
        fields.fault("python", f"expected module:function, found {shown(value)}")
        return None
    return value


def _address(fields: Fields) -> str | None:
    value = fields.text("http", longest=4096)
    if value is None:
        return None
    if said := address_fault(value):
        fields.fault("http", said)
    return value


def _headers(fields: Fields, env: _Environment) -> dict[str, str]:
    """The headers of an http agent, whose ``{env.NAME}`` are names of its own ``env``."""
    headers = fields.inner("headers")
    made: dict[str, str] = {}
    for name in () if headers is None else headers.table:
        assert headers is not None
        if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
            headers.fault(name, f"{name!r} cannot be the name of a header")
            continue
        value = headers.text(name, longest=None, empty=True)
        if value is None:
            continue
        if any(sign in value for sign in "\r\n"):
            headers.fault(name, "a header is one line")
        for reference in placeholders(value):
            first, _, variable = reference.partition(".")
            if first == "env" and variable not in (*env.secret, *env.set):
                headers.fault(name, f"{{{reference}}}: name {variable or 'the variable'} under env: {{secret: [...]}}")
        made[name] = value
    return made


class _Environment:
    """The ``env`` table of an agent."""

    def __init__(self, fields: Fields) -> None:
        self.set: dict[str, str] = {}
        self.unset: tuple[str, ...] = ()
        self.allow: tuple[str, ...] | None = None
        self.secret: tuple[str, ...] = ()
        env = fields.inner("env")
        if env is None:
            return
        env.only(("set", "unset", "allow", "secret"), dict.fromkeys(env.table, "env: {set: {NAME: value}}"))
        values = env.inner("set")
        for name in () if values is None else values.table:
            assert values is not None
            value = values.table[name]
            if not isinstance(value, str):
                values.fault(name, f"expected text, found {shown(value)}{quoted(value)}")
            elif (text := values.text(name, longest=None, empty=True)) is not None:
                self.set[name] = text
                self._name(values, name, name)
        lists = {key: env.texts(key) for key in ("unset", "allow", "secret")}
        for key, names in lists.items():
            for name in names or ():
                self._name(env, key, name)
        self.unset = lists["unset"] or ()
        self.allow = lists["allow"]
        self.secret = lists["secret"] or ()

    @staticmethod
    def _name(fields: Fields, key: str, name: str) -> None:
        if not name or "=" in name or "\0" in name:
            fields.fault(key, f"{name!r} cannot be the name of a variable")


SETTINGS_FOLDERS = {"claude": "CLAUDE_CONFIG_DIR", "codex": "CODEX_HOME"}
"""The variable that names the settings folder of a CLI, by its kind of output."""


def _login(fields: Fields) -> Login | None:
    """The account that the agent uses: its name alone, or a table."""
    if not isinstance(fields.table.get("login"), dict):
        name = fields.text("login")
        return None if name is None else Login(name)
    login = fields.inner("login")
    assert login is not None
    login.only(("name", "concurrency", "stagger", "folder", "variable"))
    name = login.text("name")
    folder = login.text("folder", longest=4096)
    variable = login.text("variable") or SETTINGS_FOLDERS.get(str(fields.table.get("output")))
    if name is None and login.table.get("name") is None:
        login.fault("name", "is missing: agents that use one account give it one name")
    if folder is not None and "{slot}" not in folder:
        login.fault("folder", "expected {slot} in it: each attempt at work gets a folder of its own")
    if folder is not None and variable is None:
        login.fault("folder", "needs variable: the name of the variable that tells the program its settings folder")
    concurrency = login.whole("concurrency", least=1)
    stagger = _or(login.number("stagger", least=0), 0.0)
    return Login(name or "", concurrency, stagger, folder, None if folder is None else variable)


def _exit_codes(fields: Fields) -> dict[int, str]:
    codes = fields.inner("exit_codes")
    made: dict[int, str] = {}
    for key in () if codes is None else codes.table:
        assert codes is not None
        if not key.isdecimal() or int(key) > 255:
            codes.fault(key, "expected an exit code from 0 to 255")
            continue
        made[int(key)] = codes.choice(key, EXIT_CLASSES, "transient")
    return made


def folder(path: str | os.PathLike[str]) -> str:
    """Return the directory that a file's relative paths start from."""
    return str(Path(path).absolute().parent)
