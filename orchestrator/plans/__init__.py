"""Plan files: agents and tasks that are submitted together, out of YAML, TOML or JSON lines.

``load_plan`` reads a file, checks all of it and says everything that is wrong at once, with line numbers; nothing is
submitted here. Reading order: this module, then ``tasks`` (what a task may say, placeholders, order), ``agents`` (what
an agent may say), ``reading`` (file formats and lines), ``fields`` (checks of single keys).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, BinaryIO

from orchestrator.domain.given import AgentDefinition, NewTask
from orchestrator.domain.storable import NAME_MAX, check_text
from orchestrator.domain.values import value
from orchestrator.errors import InvalidInput, InvalidPlan, UnknownAgent, did_you_mean
from orchestrator.plans.agents import (
    agent_definition,
    check_prices,
    definition_hash,
    definitions,
    folder,
    price_fault,
    read_agent,
    secret_warnings,
    short_hash,
)
from orchestrator.plans.fields import Faults, Fields, shown
from orchestrator.plans.reading import Row, Unreadable, decoded, read_json_lines, read_toml
from orchestrator.plans.tasks import TASK_KEYS, Tasks, argv_faults, resolve, task_hash, with_results

__all__ = [
    "Plan",
    "agent_definition",
    "argv_faults",
    "check_prices",
    "definition_hash",
    "definitions",
    "load_plan",
    "price_fault",
    "resolve",
    "secret_warnings",
    "task_hash",
    "with_results",
]

PLAN_KEYS = ("plan", "agents", "tasks")

SUFFIXES = {".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".jsonl": "lines", ".ndjson": "lines", ".json": "lines"}

SHOWN_FAULTS = 20

_ELSEWHERE = {"task": "tasks", "name": "plan", "agent": "agents", "title": "plan"}


@value
class Plan:
    """A plan that was read and is free of faults.

    ``agents`` are those of the file itself; ``tasks`` stand parents first. A later task with a unique key already seen is
    still among ``tasks`` (it will be *existing*), and ``warnings`` names both lines. ``refused`` has what was left out
    when that was asked for, as (line, sentence). ``hash`` covers all tasks and their agents.
    """

    name: str
    path: str
    agents: dict[str, AgentDefinition] = field(default_factory=dict)
    tasks: list[NewTask] = field(default_factory=list)
    warnings: list[tuple[int, str]] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    hash: str = ""


def load_plan(
    path: str | os.PathLike[str],
    *,
    agents: Mapping[str, AgentDefinition] | None = None,
    agent: str | None = None,
    map: Mapping[str, str] | None = None,  # noqa: A002 - the option is --map
    plan_name: str | None = None,
    skip_invalid: bool = False,
    check_agents: bool = True,
    stdin: BinaryIO | None = None,
    environ: Mapping[str, str] | None = None,
    prices: Mapping[str, Any] | None = None,
) -> Plan:
    """Return the plan in the file *path* (by its suffix; ``-`` is JSON lines on standard input).

    - *agents*: the configured ones (``definitions(settings)``); an agent of the file goes before one of the same name
    - *agent*: for tasks that name none
    - *map*: JSON lines only: field of a task → field of the line (``a.b`` reaches inside); all others are ignored, and
      mapped text is no template
    - *plan_name*: else ``plan:`` in the file, else the file's stem
    - *skip_invalid*: leave faulty tasks, and those that wait for them, out into ``refused``
    - *check_agents*: False takes agents that nothing here defines
    - *prices*: by model, those of the settings: a budget of USD needs one where the agent reports tokens only

    Raises ``InvalidPlan`` with all faults and their lines, ``InvalidInput`` for arguments that do not fit.
    """
    shown_path = os.fspath(path)
    kind = _kind(shown_path)
    reading = _Reading(shown_path, dict(agents or {}), agent, check_agents, prices or {})
    if map is not None:
        _check_map(map, kind)
    try:
        if kind == "lines":
            reading.lines(map, stdin)
        else:
            reading.document(kind)
    except Unreadable as error:
        reading.faults.add(error.line, error.message)
        raise reading.invalid() from error
    except RecursionError:
        reading.faults.add(0, "is nested too deeply")
        raise reading.invalid() from None
    except OSError as error:
        raise InvalidPlan(
            f"{shown_path}: cannot be read: {error.strerror or error}", [(0, "cannot be read")], plan=shown_path
        ) from error
    return reading.plan(plan_name, skip_invalid, environ)


class _Reading:
    """One file on its way to a Plan."""

    def __init__(
        self,
        path: str,
        configured: dict[str, AgentDefinition],
        agent: str | None,
        check: bool,
        prices: Mapping[str, Any],
    ) -> None:
        self.path = path
        self.faults = Faults()
        self.local: dict[str, AgentDefinition] = {}
        self.name: str | None = None
        self.whole_file: list[tuple[int, str]] = []
        self.unmapped = False
        self._configured = configured
        self._agent = agent
        self._check = check
        self._prices = prices
        self._base_dir = str(Path.cwd()) if path == "-" else folder(path)
        self._tasks = self._tasks_for({})

    def _tasks_for(self, local: dict[str, AgentDefinition]) -> Tasks:
        known = {**self._configured, **local}
        if self._check and self._agent is not None and self._agent not in known:
            raise UnknownAgent(
                f"no configuration knows the agent {self._agent!r}{did_you_mean(self._agent, known)}", agent=self._agent
            )
        return Tasks(self.faults, known if self._check else None, self._agent, self._base_dir, self._prices)

    def lines(self, map: Mapping[str, str] | None, stdin: BinaryIO | None) -> None:  # noqa: A002 - as above
        """Read JSON lines, one at a time."""
        self.unmapped = map is None
        if self.path == "-":
            self._take(stdin if stdin is not None else sys.stdin.buffer, map)
            return
        with Path(self.path).open("rb") as file:
            self._take(file, map)

    def _take(self, rows: Iterable[bytes], map: Mapping[str, str] | None) -> None:  # noqa: A002 - as above
        for line, record in read_json_lines(rows, self.faults.add, foreign=map is not None):
            if map is None:
                self._tasks.add(record, line)
            elif (table := self._mapped(record, line, map)) is not None:
                self._tasks.add(table, line, mapped=True)

    def _mapped(self, record: dict[str, Any], line: int, map: Mapping[str, str]) -> dict[str, Any] | None:  # noqa: A002
        made: dict[str, Any] = {}
        good = True
        for target, source in map.items():
            found, value = _reach(record, source)
            outer, _, key = target.partition(".")
            if not found:
                self.faults.add(line, f"there is no field {source!r} for {target}{did_you_mean(source, record)}")
                good = False
            elif value is None and target in ("unique_key", "name", "agent"):
                self.faults.add(line, f"the field {source!r} for {target} is null")
                good = False
            elif key:
                made.setdefault(outer, {})[key] = _as_text(value) if outer == "tags" else value
            else:
                made[target] = _as_text(value) if target in _TEXT_TARGETS else value
        return made if good else None

    def document(self, kind: str) -> None:
        """Read a whole YAML or TOML file."""
        text = decoded(Path(self.path).read_bytes())
        if kind == "yaml":
            from orchestrator.plans.core_yaml import read_yaml

            top = read_yaml(text, self.faults.add)
        else:
            top = read_toml(text)
        if top is None:
            top = {}
        if not isinstance(top, dict):
            what = "a list of tasks has to stand under tasks:" if isinstance(top, list) else f"found {shown(top)}"
            raise Unreadable(1, f"expected a table with agents: and tasks:; {what}")
        fields = Fields(top, 1, "", self.faults)
        fields.only((*PLAN_KEYS, *(key for key in top if key.startswith("x-"))), _ELSEWHERE)
        self.name = fields.text("plan")
        self._agents(fields)
        self.whole_file = list(self.faults.found)
        # an agent with faults is known all the same: one mistake is not to be told once for each of its tasks
        table = top.get("agents")
        named = {name: AgentDefinition(name, "") for name in table} if isinstance(table, dict) else {}
        self._tasks = self._tasks_for({**named, **self.local})
        tasks = top.get("tasks")
        if tasks is None:
            return
        if not isinstance(tasks, list):
            fields.fault("tasks", f"expected a list of tasks, found {shown(tasks)}; each begins with - name: …")
            self.whole_file.append(self.faults.found[-1])
            return
        rows = tasks.lines if isinstance(tasks, Row) else [1] * len(tasks)
        for each, line in zip(tasks, rows, strict=True):
            if isinstance(each, dict):
                self._tasks.add(each, line)
            else:
                self.faults.add(line, f"expected a task with its keys, found {shown(each)}")

    def _agents(self, fields: Fields) -> None:
        inner = fields.inner("agents")
        for name in () if inner is None else inner.table:
            assert inner is not None
            made = read_agent(
                name, inner.table[name], local=True, base_dir=self._base_dir, line=inner.at(name), faults=self.faults
            )
            if made is not None:
                self.local[name] = made
                if said := price_fault(made, made.budget, self._prices):
                    self.faults.add(made.line, f"agent {name!r}: budget.usd: {said}")

    def plan(self, plan_name: str | None, skip_invalid: bool, environ: Mapping[str, str] | None) -> Plan:
        """Return the plan, or raise all that is wrong."""
        ordered = self._tasks.ordered()
        name = plan_name or self.name or ("stdin" if self.path == "-" else Path(self.path).stem)
        check_text("plan", name, NAME_MAX)
        if self.faults.found and (not skip_invalid or self.whole_file):
            raise self.invalid()
        warnings = list(self._tasks.warnings)
        for made in self.local.values():
            warnings.extend((made.line, said) for said in secret_warnings(made, environ))
        if not self._tasks.made and not self.faults.found:
            warnings.append((0, "the plan has no tasks"))
        told = [[each.hash for each in self.local.values()], [task.task_hash for task in ordered]]
        return Plan(
            name=name,
            path=self.path,
            agents=self.local,
            tasks=ordered,
            warnings=sorted(warnings),
            refused=sorted(self.faults.found),
            hash=short_hash(told),
        )

    def invalid(self) -> InvalidPlan:
        """Return the error that lists all faults, by line."""
        found = sorted(dict.fromkeys(self.faults.found))
        count = f"{len(found)} fault" + ("" if len(found) == 1 else "s")
        rows = [f"  line {line}: {message}" if line else f"  {message}" for line, message in found[:SHOWN_FAULTS]]
        if len(found) > SHOWN_FAULTS:
            rows.append(f"  … and {len(found) - SHOWN_FAULTS} more")
        hint = None
        if self.unmapped and any("unknown key" in message for _, message in found):
            hint = "records of another tool are read with --map FIELD=THEIRS, as in --map input=problem_statement"
        return InvalidPlan("\n".join([f"{self.path}: {count}", *rows]), found, hint=hint, plan=self.path)


_TEXT_TARGETS = ("name", "agent", "title", "unique_key", "concurrency_key")


def _kind(path: str) -> str:
    if path == "-":
        return "lines"
    kind = SUFFIXES.get(Path(path).suffix.lower())
    if kind is None:
        message = "cannot tell the format by the name; expected .yaml, .yml, .toml, .jsonl or .ndjson"
        raise InvalidPlan(f"{path}: {message}", [(0, message)], plan=path)
    return kind


def _check_map(map: Mapping[str, str], kind: str) -> None:  # noqa: A002 - as above
    if kind != "lines":
        raise InvalidInput("--map is for JSON lines: a YAML or TOML plan has the task's own fields")
    for target, source in map.items():
        outer, dot, key = target.partition(".")
        if outer not in TASK_KEYS or (dot and (outer not in ("params", "tags") or not key)):
            known = [*TASK_KEYS, "params.NAME", "tags.NAME"]
            raise InvalidInput(f"--map {target}={source}: a task has no field {target!r}{did_you_mean(target, known)}")
        if not source:
            raise InvalidInput(f"--map {target}=: names no field of the file")
        if dot and outer in map:
            raise InvalidInput(f"--map: give either {outer} or {target}, not both")


def _reach(record: dict[str, Any], source: str) -> tuple[bool, Any]:
    """Return whether *record* has *source*, a field or a path of fields and list indexes, and its value."""
    if source in record:
        return True, record[source]
    value: Any = record
    for step in source.split("."):
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return False, None
    return True, value


def _as_text(value: Any) -> Any:
    """Return a number as text, as foreign files have numbers for ids; all else as it is."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
