"""Tasks as a plan file has them: from one table or line to ``NewTask``, and from all of them to an order.

Placeholders in ``input`` are replaced once. With params alone that is when the plan is read. An input that quotes the
result of another task stays a template, as a whole, until the task is claimed (``resolve``): so a param's value can
never be read as a placeholder in the second round, because there is no second round.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from orchestrator.domain.given import AgentDefinition, NewTask
from orchestrator.domain.storable import TITLE_MAX
from orchestrator.domain.template import check, is_name, literal, look_up, placeholders, render
from orchestrator.errors import InvalidInput, did_you_mean
from orchestrator.plans.agents import ARGV_NAMES, argv_references, price_fault, read_budget, read_retry, short_hash
from orchestrator.plans.fields import Faults, Fields, quoted, shown
from orchestrator.plans.reading import Row

TASK_KEYS = (
    *("name", "agent", "input", "params", "title", "priority", "at", "max_retries", "retry", "budget", "unique_key"),
    *("concurrency_key", "after", "approval", "tags", "dir"),
)

_TEXT_KEYS = ("name", "agent", "title", "unique_key", "concurrency_key", "dir", "at")

_ELSEWHERE = {
    "prompt": "input",
    "text": "input",
    "args": "params",
    "depends_on": "after",
    "context": "after",
    "needs": "after",
    "id": "name, or unique_key",
    "key": "unique_key",
    "budget_seconds": "budget: {seconds: …}",
    "timeout": "budget: {seconds: …}",
    "retries": "max_retries",
    "at_time": "at",
}


def resolve(input: Any, values: Mapping[str, Any]) -> Any:  # noqa: A002 - its name
    """Return *input* with its placeholders replaced by *values* (``with_results``).

    For tasks whose ``template`` is True, once, after they were claimed. Raises ``InvalidInput`` if a placeholder asks
    for a part that a result does not have.
    """
    return _rendered(input, values)


def with_results(params: Mapping[str, Any] | None, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the placeholders of a task can name: *params*, and the results of its parents as ``{task.result}``.

    *results* are by the parents' names. It takes the place of the claim's ``params``, so that argv templates know it too.
    """
    return {**(params or {}), **{name: {"result": result} for name, result in results.items()}}


def argv_faults(
    definition: AgentDefinition, params: Mapping[str, Any] | None, after: tuple[str, ...] = ()
) -> list[str]:
    """Return a sentence for each placeholder in the agent's command that a task with these values could not fill."""
    return _reference_faults(argv_references(definition), params or {}, after, extra=ARGV_NAMES)


class Tasks:
    """The tasks of one file: takes them one by one, then puts them in order.

    *known* are the agents that may be named; None takes any name. *default_agent* is for tasks that name none.
    """

    def __init__(
        self,
        faults: Faults,
        known: Mapping[str, AgentDefinition] | None,
        default_agent: str | None,
        base_dir: str,
        prices: Mapping[str, Any],
    ) -> None:
        self.made: list[NewTask] = []
        self.warnings: list[tuple[int, str]] = []
        self.faults = faults
        self._known = known
        self._default_agent = default_agent
        self._base_dir = base_dir
        self._prices = prices
        self._argv: dict[str, list[str]] = {}
        self._lines: list[dict[str, int]] = []
        self._names: dict[str, int] = {}
        self._keys: dict[str, int] = {}
        self._refused: set[str] = set()
        self._directories: dict[str, NewTask] = {}
        self._warned: set[str] = set()

    def add(self, table: Mapping[str, Any], line: int, *, mapped: bool = False) -> None:
        """Take a task, or note what is wrong with it. A *mapped* one is foreign text: its input is no template."""
        before = len(self.faults.found)
        name = table.get("name")
        where = f"task {shown(name)}: " if isinstance(name, str) and name else ""
        fields = Fields(table, line, where, self.faults)
        task = self._task(fields, mapped)
        if len(self.faults.found) > before:
            if isinstance(name, str):
                self._refused.add(name)
            return
        at = len(self.made)
        if task.name is not None:
            first = self._names.setdefault(task.name, at)
            other = self.made[first] if first < at else None
            if other is not None and (task.unique_key is None or task.unique_key != other.unique_key):
                fields.fault("name", f"is already the name of the task in line {other.line}")
                return
        if task.unique_key is not None:
            first = self._keys.setdefault(task.unique_key, at)
            if first < at:
                earlier = self.made[first].line
                key = shown(task.unique_key)
                self.warnings.append(
                    (task.line, f"unique_key {key} was already seen in line {earlier}: line {task.line} adds nothing")
                )
        self._shared(task)
        self.made.append(task)
        self._lines.append({"after": fields.at("after")})

    def _shared(self, task: NewTask) -> None:
        """Warn of tasks that nothing keeps out of each other's directory, once for each directory."""
        definition = (self._known or {}).get(task.agent)
        if task.dir is None or task.concurrency_key is not None or definition is None or definition.workspace != "none":
            return
        where = os.path.realpath(task.dir)
        first = self._directories.setdefault(where, task)
        if first is task or where in self._warned or first.name in task.after:
            return
        self._warned.add(where)
        said = f"tasks in lines {first.line} and {task.line} may work in {where} at the same time"
        self.warnings.append((task.line, f"{said}; workspace: directory, or one concurrency_key, keeps them apart"))

    def _task(self, fields: Fields, mapped: bool) -> NewTask:
        fields.only(TASK_KEYS, _ELSEWHERE)
        agent = fields.text("agent") or self._default_agent
        definition = self._agent(fields, agent)
        params = fields.inner("params")
        values = fields.json("params") if params is not None else None
        after = self._after(fields)
        value = fields.json("input")
        names = tuple(each for each in after if isinstance(each, str))
        template = self._placeholders(fields, value, values, names, definition, mapped)
        if template and mapped:
            value = _each_text(value, literal)
        elif not template and not mapped:
            value = self._filled(fields, value, values or {})
        where = fields.text("dir", longest=4096)
        budget = read_budget(fields)
        if definition is not None and (said := price_fault(definition, budget, self._prices)):
            fields.fault("budget", f"usd: agent {definition.name!r}: {said}")
        if definition is not None and definition.python and not template:
            from orchestrator.agents.python import input_fault

            if said := input_fault(definition, value):
                fields.fault("input", said)
        task = NewTask(
            agent=agent or "",
            input=value,
            params=values,
            title=fields.text("title", longest=TITLE_MAX, empty=True),
            name=fields.text("name"),
            priority=fields.whole("priority", least=-(2**31)) or 0,
            at=self._instant(fields),
            max_retries=fields.whole("max_retries", least=0),
            retry=read_retry(fields),
            budget=budget,
            unique_key=fields.text("unique_key", empty=True),
            concurrency_key=fields.text("concurrency_key", empty=True),
            after=after,
            tags=self._tags(fields),
            definition=definition.hash if definition is not None and definition.local else None,
            task_hash=None,
            approval=fields.flag("approval"),
            template=template,
            dir=None if where is None else str(Path(self._base_dir, where)),
            line=fields.line,
        )
        object.__setattr__(task, "task_hash", task_hash(task, definition, where))
        return task

    def _agent(self, fields: Fields, agent: str | None) -> AgentDefinition | None:
        if agent is None:
            if fields.table.get("agent") is None:
                fields.faults.add(fields.line, f"{fields.where}names no agent; write agent: NAME, or give --agent NAME")
            return None
        if self._known is None:
            return None
        definition = self._known.get(agent)
        if definition is None:
            fields.fault("agent", f"unknown agent {shown(agent)}{did_you_mean(agent, self._known)}")
        return definition

    def _after(self, fields: Fields) -> tuple[int | str, ...]:
        value = fields.table.get("after")
        if value is None:
            return ()
        each_line = value.lines if isinstance(value, Row) else None
        made: dict[int | str, None] = {}
        for at, each in enumerate(value if isinstance(value, list) else [value]):
            line = each_line[at] if each_line else fields.at("after")
            if isinstance(each, bool) or not isinstance(each, (str, int)):
                fields.faults.add(
                    line, f"{fields.where}after: expected names of tasks, or ids, found {shown(each)}{quoted(each)}"
                )
            elif isinstance(each, int) and not 0 < each < 2**63:
                fields.faults.add(line, f"{fields.where}after: {each} is not the id of a task")
            else:
                made[each] = None
        return tuple(made)

    def _placeholders(
        self,
        fields: Fields,
        value: Any,
        params: Mapping[str, Any] | None,
        after: tuple[str, ...],
        definition: AgentDefinition | None,
        mapped: bool,
    ) -> bool:
        """Check every placeholder; say whether one of them has to wait for a result."""
        references = [] if mapped else _references(value)
        params = params or {}
        for fault in _reference_faults(references, params, after):
            fields.fault("input", fault)
        argv: list[str] = []
        if definition is not None:
            if definition.name not in self._argv:
                self._argv[definition.name] = argv_references(definition)
            argv = self._argv[definition.name]
            for fault in _reference_faults(argv, params, after, extra=ARGV_NAMES):
                fields.faults.add(fields.line, f"{fields.where}command of agent {definition.name!r}: {fault}")
        if not after:
            return False
        for name in params:
            if name in after and any(each.split(".")[0] == name for each in (*references, *argv)):
                fields.fault("params", f"{{{name}}} could mean the param or the task of that name: rename the param")
        return any(each.split(".")[0] in after for each in (*references, *argv))

    def _filled(self, fields: Fields, value: Any, params: Mapping[str, Any]) -> Any:
        try:
            return _rendered(value, params)
        except InvalidInput:  # was noted, in better words
            return value

    def _instant(self, fields: Fields) -> datetime | None:
        text = fields.text("at")
        if text is None:
            return None
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            fields.fault("at", f"expected a time such as 2026-12-01T09:00:00+01:00, found {shown(text)}")
            return None
        if at.tzinfo is None:
            fields.fault("at", f"{text} has no offset; expected a time such as 2026-12-01T09:00:00+01:00, or …Z")
            return None
        return at

    def _tags(self, fields: Fields) -> dict[str, str] | None:
        tags = fields.inner("tags")
        if tags is None:
            return None
        made: dict[str, str] = {}
        for key, value in tags.table.items():
            if not isinstance(value, str):
                tags.fault(key, f"expected text, found {shown(value)}{quoted(value)}")
            elif (text := tags.text(key, empty=True)) is not None:
                made[key] = text
        fields.json("tags")  # its keys
        return made

    def ordered(self) -> list[NewTask]:
        """Return the tasks, parents first and else as they stand in the file; faulty ones are noted and left out."""
        parents = [self._parents(at) for at in range(len(self.made))]
        children: dict[int, list[int]] = {}
        missing = [0] * len(self.made)
        for at, wanted in enumerate(parents):
            for parent in wanted or ():
                children.setdefault(parent, []).append(at)
                missing[at] += 1
        ready = [at for at, count in enumerate(missing) if count == 0 and parents[at] is not None]
        order: list[int] = []
        while ready:
            at = heapq.heappop(ready)
            order.append(at)
            for child in children.get(at, ()):
                missing[child] -= 1
                if missing[child] == 0:
                    heapq.heappush(ready, child)
        if len(order) < len(self.made):
            self._unplaced(set(range(len(self.made))) - set(order), parents)
        return [self.made[at] for at in order]

    def _parents(self, at: int) -> list[int] | None:
        """Return the places of the tasks that *at* waits for; None, and a fault, if one of them does not exist."""
        task = self.made[at]
        found: list[int] | None = []
        for name in task.after:
            if isinstance(name, int):
                continue
            parent = self._names.get(name)
            if parent is not None and parent < len(self.made):
                if found is not None:
                    found.append(parent)
                continue
            found = None
            said = f"task {shown(task.name)}: " if task.name else ""
            if name in self._refused:
                self.faults.add(self._lines[at]["after"], f"{said}after: the task {shown(name)} has faults itself")
            else:
                near = did_you_mean(name, (other for other in self._names if other != task.name))
                self.faults.add(self._lines[at]["after"], f"{said}after: there is no task {shown(name)}{near}")
        return found

    def _unplaced(self, rest: set[int], parents: list[list[int] | None]) -> None:
        """Name each cycle among *rest* once, and what hangs on one or on a faulty task."""
        inside: set[int] = set()
        seen: set[int] = set()
        for start in sorted(rest):
            path: list[int] = []
            places: dict[int, int] = {}
            at: int | None = start
            while at is not None and at not in seen:
                seen.add(at)
                places[at] = len(path)
                path.append(at)
                at = next((parent for parent in parents[at] or () if parent in rest), None)
            if at is not None and at in places:
                cycle = path[places[at] :][::-1]
                inside.update(cycle)
                low = cycle.index(min(cycle))
                cycle = cycle[low:] + cycle[:low]
                shown_part = cycle if len(cycle) <= 8 else [*cycle[:7], cycle[-1]]
                steps = [f"{shown(self.made[each].name)} (line {self.made[each].line})" for each in shown_part]
                if len(cycle) > 8:
                    steps.insert(7, f"… {len(cycle) - 8} more …")
                text = " → ".join([*steps, shown(self.made[cycle[0]].name)])
                self.faults.add(self._lines[cycle[0]]["after"], f"after: these tasks wait for each other: {text}")
        for at in sorted(rest - inside):
            if parents[at] is not None:
                bad = next(shown(self.made[each].name) for each in parents[at] or () if each in rest)
                said = f"task {shown(self.made[at].name)}: " if self.made[at].name else ""
                self.faults.add(self._lines[at]["after"], f"{said}after: the task {bad} has faults itself")


def task_hash(task: NewTask, definition: AgentDefinition | None, where: str | None = None) -> str:
    """Return the short hash of the task's resolved fields and its agent's definition: what makes it another task.

    *where* is ``dir`` as the file has it, so that a plan in another folder is the same plan.
    """
    told: dict[str, Any] = {
        key: value
        for key, value in (
            ("agent", task.agent),
            ("agent_hash", definition.hash if definition is not None else None),
            ("input", task.input),
            ("params", task.params),
            ("title", task.title),
            ("name", task.name),
            ("priority", task.priority),
            ("at", None if task.at is None else task.at.isoformat()),
            ("max_retries", task.max_retries),
            ("retry", None if task.retry is None else [task.retry.initial, task.retry.factor, task.retry.max]),
            ("budget", _budget_told(task)),
            ("unique_key", task.unique_key),
            ("concurrency_key", task.concurrency_key),
            ("after", task.after),
            ("approval", task.approval),
            ("tags", task.tags),
            ("template", task.template),
            ("dir", where if where is not None else task.dir),
        )
        if value is not None
    }
    return short_hash(told)


def _budget_told(task: NewTask) -> list[Any] | None:
    budget = task.budget
    return None if budget is None else [budget.seconds, budget.tokens, budget.usd, budget.turns, budget.on_limit]


def _reference_faults(
    references: list[str], params: Mapping[str, Any], after: tuple[str, ...], extra: tuple[str, ...] = ()
) -> list[str]:
    said: list[str] = []
    for reference in references:
        name, *path = reference.split(".")
        if name in params:
            try:
                look_up(reference, params)
            except InvalidInput as error:
                said.append(error.message)
        elif name in after:
            if path[:1] != ["result"]:
                said.append(f"placeholder {{{reference}}}: a task is quoted as {{{name}.result}}")
        else:
            tasks = [f"{each}.result" for each in after if is_name(each)]
            known = [*params, *extra, *tasks]
            said.extend(_with_near(reference, known))
    return said


def _with_near(reference: str, known: list[str]) -> list[str]:
    """Return check()'s sentence; *known* may hold whole references, of which the nearest is named."""
    wanted = reference if any("." in each for each in known) else reference.split(".")[0]
    if not check("{" + reference + "}", []):
        return []
    return [
        f"unknown placeholder {{{reference}}}{did_you_mean(wanted, known)}"
        f" (write {{{{{reference}}}}} for the literal text)"
    ]


def _references(value: Any) -> list[str]:
    """Return the placeholders of all texts within *value*, each once; keys are no templates."""
    if isinstance(value, str):
        return list(dict.fromkeys(placeholders(value)))
    found: dict[str, None] = {}
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            found.update(dict.fromkeys(placeholders(item)))
        elif isinstance(item, dict):
            waiting.extend(reversed(item.values()))
        elif isinstance(item, list):
            waiting.extend(reversed(item))
    return list(found)


def _rendered(value: Any, values: Mapping[str, Any]) -> Any:
    return _each_text(value, lambda text: render(text, values))


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return *value* with every text in it changed; without recursion, for deep values."""
    root: list[Any] = [value]
    waiting: list[tuple[Any, Any]] = [(root, 0)]
    while waiting:
        target, key = waiting.pop()
        item = target[key]
        if isinstance(item, str):
            target[key] = change(item)
        elif isinstance(item, dict):
            copy = dict(item)
            target[key] = copy
            waiting.extend((copy, each) for each in copy)
        elif isinstance(item, list):
            row = list(item)
            target[key] = row
            waiting.extend((row, at) for at in range(len(row)))
    return root[0]
