"""The view of ``run PLAN``: one region that is rewritten in place, below a history of ended attempts that stays.

Reading order: ``render`` (the region), ``history`` (one line that scrolls up). Both are pure: values, ``now`` and a
``Look`` in, lines out. What needs a person comes first, what is well comes last or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime

from orchestrator.dashboard import short
from orchestrator.dashboard.controls import Subject, Target, around
from orchestrator.dashboard.frame import NO_LIMIT, Column, Line, Look, Place, bar, join, plural, row, widest
from orchestrator.dashboard.text import cells
from orchestrator.domain.snapshot import PlanTask, Question, RunEvent, RunView, Spend

ROWS_FOR_ALL = 50
"""Plans larger than this end their rows at the running tasks; the rest is counted."""

ORDER = (
    "done",
    "failed",
    "cancelled",
    "not_run",
    "running",
    "retrying",
    "not_due",
    "held",
    "waiting",
    "ready",
    "blocked",
)
"""The kinds of tasks in the order of the counts."""

WORDS = {"not_run": "not run", "not_due": "not due"}

_HINTS = (
    ("select", "↑↓ select"),
    ("open", "⏎ open"),
    ("a", "a answer"),
    ("x", "x cancel"),
    ("l", "l logs"),
    ("t", "t tree"),
)


def kind(task: PlanTask, now: datetime) -> str:
    """Return which of ``ORDER`` a task is: its status, with *pending* and *cancelled* told apart further."""
    if task.status == "cancelled":
        cause = task.error.cause if task.error else None
        return "not_run" if cause in ("parent_failed", "parent_cancelled") else "cancelled"
    if task.status != "pending":
        return task.status
    if task.held:
        return "held"
    if task.next_attempt_at is not None and task.next_attempt_at > now:
        return "retrying" if task.attempt else "not_due"
    return "ready"


def totals(tasks: Iterable[PlanTask]) -> Spend:
    """Return what *tasks* used together; partial if a part of it is unknown."""
    usd: float | None = None
    tokens: int | None = None
    usd_partial = tokens_partial = False
    for task in tasks:
        spend = task.spend
        if spend.usd is not None:
            usd = (usd or 0.0) + spend.usd
        if spend.tokens is not None:
            tokens = (tokens or 0) + spend.tokens
        usd_partial |= cost_unknown(spend) or spend.usd_partial
        tokens_partial |= spend.tokens_partial
    return Spend(tokens=tokens, usd=usd, usd_partial=usd_partial, tokens_partial=tokens_partial)


def cost_unknown(spend: Spend) -> bool:
    """Return whether something was spent whose cost nobody knows; an agent that counts nothing spends nothing."""
    return spend.usd is None and (spend.usd_partial or bool(spend.tokens))


def answer_command(question: Question) -> str:
    """Return the command that answers *question*: with its default, else its first choice."""
    if question.kind != "ask":
        return f"orchestrator approve {question.task_id}"
    choice = question.default or (question.choices[0] if question.choices else "TEXT")
    quoted = choice if choice.replace("-", "").replace("_", "").isalnum() else "'" + choice.replace("'", "'\\''") + "'"
    return f"orchestrator answer {question.task_id} {quoted}"


def share(task: PlanTask, now: datetime) -> tuple[float, str] | None:
    """Return how much of the nearest limit of its budget a running task has used."""
    return short.nearest(task.budget, short.since(task.started_at, now), task.spend)


def _rank(task: PlanTask, what: str, now: datetime) -> tuple[int, float, int]:
    """Return the place of a task in the order of the screen: what needs a person first, then oldest first."""
    started = task.started_at.timestamp() if task.started_at else 0.0
    if what == "running":
        used = share(task, now)
        if task.will_not_stop:
            return 0, started, task.id
        if used and used[0] >= 1:
            return 1, started, task.id
        if used and used[0] >= 0.8:
            return 4, -used[0], task.id
        return (5 if task.cancel_requested_at or task.stopping else 6), started, task.id
    if what == "waiting":
        question = task.question
        deadline = question.deadline.timestamp() if question and question.deadline else float("inf")
        return 2, deadline, task.id
    if what in ("retrying", "not_due"):
        at = task.next_attempt_at.timestamp() if task.next_attempt_at else 0.0
        return (7 if what == "retrying" else 8), at, task.id
    return {"failed": 3, "held": 9, "ready": 10, "blocked": 11}.get(what, 12), 0.0, task.id


class _Plan:
    """A view made ready for drawing: kinds, counts, ranks and root causes, each worked out once."""

    def __init__(self, view: RunView, now: datetime) -> None:
        self.view = view
        self.now = now
        self.kinds = {task.id: kind(task, now) for task in view.tasks}
        self.by_id = {task.id: task for task in view.tasks}
        self.counts = Counter(self.kinds.values())
        self.in_use = sum(1 for task in view.tasks if task.status == "running" and task.here)
        self.needed_by: Counter[int] = Counter()
        for task in view.tasks:
            if self.kinds[task.id] not in ("done", "cancelled"):
                self.needed_by.update(task.needs)

    @property
    def ended(self) -> int:
        return sum(self.counts[what] for what in ("done", "failed", "cancelled", "not_run"))

    def rank(self, task: PlanTask) -> tuple[int, float, int]:
        return _rank(task, self.kinds[task.id], self.now)

    def roots(self) -> dict[int, int]:
        """Return for each blocked task the task at the root of its waiting: of all that it needs the first by rank."""
        roots: dict[int, int] = {}
        for start in self.view.tasks:
            if self.kinds[start.id] != "blocked" or start.id in roots:
                continue
            stack = [start.id]
            path: set[int] = set()
            while stack:
                at = stack[-1]
                path.add(at)
                open_needs = [
                    need for need in self.by_id[at].needs if need in self.by_id and self.kinds[need] != "done"
                ]
                deeper = [
                    need
                    for need in open_needs
                    if self.kinds[need] == "blocked" and need not in roots and need not in path
                ]
                if deeper:
                    stack.append(deeper[0])
                    continue
                found = [roots.get(need, need) for need in open_needs]
                if found:
                    roots[at] = min(found, key=lambda need: self.rank(self.by_id[need]))
                else:
                    roots[at] = at
                stack.pop()
        return roots


def height_of(look: Look) -> int:
    """Return the rows that a region may take: the screen's less three, less one from twelve rows down."""
    return max(1, look.height - (1 if look.height <= 12 else 3))


def render(
    view: RunView,
    now: datetime,
    look: Look,
    *,
    selected: Target | None = None,
    page: Sequence[Line] | None = None,
    tree: bool = False,
    last: Line | None = None,
) -> list[Line]:
    """Return the region for *look*, of at most ``height_of`` rows; the lines about *selected* are marked.

    What does not fit is counted in the last row, with the questions and failures among it named. *page* stands in the
    place of the rows, or with *tree* the plan as a tree; *last* in the place of the keys.
    """
    plan = _Plan(view, now)
    most = height_of(look)
    lines = [_progress(plan, look)]
    if most >= 2:
        lines.append(_second(plan, look))
    hint = last or (_hint(look, plan) if most >= 8 else None)
    room = most - len(lines) - (1 if hint else 0)
    if page is not None:
        lines += page[: max(0, room)]
    elif tree:
        lines += around(_tree(plan, look), room, selected)
    else:
        lines += _rows(plan, look, room)
    lines = lines[: most - (1 if hint else 0)]
    if hint:
        lines.append(hint)
    lines = [line.trimmed() for line in lines]
    for line in lines:
        line.marked = selected is not None and line.target == selected
    return lines


def targets(view: RunView, now: datetime, look: Look, *, tree: bool) -> list[Target]:
    """Return what the rows are about that a cursor can stand on: those on the screen, of a tree all."""
    lines = _tree(_Plan(view, now), look) if tree else render(view, now, look)
    return [line.target for line in lines if line.target is not None]


def subject_of(view: RunView, target: Target, now: datetime) -> Subject | None:
    """Return what a key would act on, None when the plan has no such task."""
    task = next((task for task in view.tasks if task.id == target), None)
    if task is None:
        return None
    what = kind(task, now)
    facts = task.agent
    if what == "running":
        facts += f" for {short.age(short.since(task.started_at, now) or 0)}"
    elif what in WORDS or what in ("held", "blocked", "waiting", "retrying", "failed", "cancelled", "done"):
        facts += f", {WORDS.get(what, what)}"
    needed = sum(1 for each in view.tasks if target in each.needs and each.status not in ("done", "cancelled"))
    question = task.question if what == "waiting" else None
    return Subject(task.id, task.agent, task.name, what, facts, needed, question)


def _progress(plan: _Plan, look: Look) -> Line:
    """Return the first line: the plan, a bar of what has ended, and the totals."""
    view, tasks = plan.view, plan.view.tasks
    spent = totals(tasks)
    elapsed = short.age(short.since(view.started_at, view.ended_at or plan.now) or 0)
    cost = "" if spent.usd is None else short.money(spent.usd, partial=spent.usd_partial)
    used = "" if spent.tokens is None else f"{short.tokens(spent.tokens, partial=spent.tokens_partial)} tok"
    done = f" {plan.ended:,}/{len(tasks):,}"
    gap = " " if look.tiny else "  "
    right = gap + f"{elapsed:>6}"
    for extra in (f"{cost:>6}" if cost else "", "" if look.tiny else used):
        if extra and cells(right) + len(done) + cells(gap + extra) + 6 <= look.width:
            right += gap + extra
    line = (
        Line(look).fill(view.plan, max(4, min(look.width // 3, look.width - len(done) - len(right))), "bold").add(" ")
    )
    left = look.width - line.width - len(done) - len(right)
    width = min(left, 8) if look.tiny else left
    if width >= 4 and tasks:
        failed = plan.counts["failed"]
        red = max(1, round(failed / len(tasks) * width)) if failed else 0
        rest = plan.ended - failed
        good = width - red if plan.ended == len(tasks) else min(width - red - 1, round(rest / len(tasks) * width))
        good = max(0, good)
        full, empty = look.sign("━"), look.sign("╌")
        line.add(full * good).add(full * red, "red").add(empty * (width - good - red), "dim")
    line.add(done)
    return line.right(right)


def _second(plan: _Plan, look: Look) -> Line:
    """Return the second line: the counts, or what is wrong with all of it."""
    view, now = plan.view, plan.now
    if view.away_since is not None:
        text = f"database away {short.age(short.since(view.away_since, now) or 0)}: agents go on"
        if view.unwritten:
            noun = plural(view.unwritten, "result waits", "results wait")
            text += f", {noun} to be written"
        if view.lease_until is not None:
            text += f", lease ends in {short.age((view.lease_until - now).total_seconds())}"
        return Line(look).fill(text, look.width, "bold red")
    if view.stop_deadline is not None:
        left = short.age((view.stop_deadline - now).total_seconds())
        verb = "has" if plan.in_use == 1 else "have"
        text = f"stopping: {plural(plan.in_use, 'agent')} {verb} {left} to finish; Ctrl-C again ends them now"
        return Line(look).fill(text, look.width, "yellow")
    return counts_line(plan.counts, look)


def counts_line(counts: Counter[str], look: Look, order: Sequence[str] = ORDER) -> Line:
    """Return the counts by kind: in words, below 80 columns as symbol and number; kinds without a task are left out."""
    line = Line(look)
    for what in order:
        if not counts[what]:
            continue
        style = "red" if what == "failed" else ("bold magenta" if what == "waiting" else "")
        if look.width < 80:
            line.add(" " if line.width else "").symbol(what).add(f"{counts[what]:,}")
        else:
            line.add(look.separator if line.width else "")
            line.add(f"{counts[what]:,} {WORDS.get(what, what)}", style)
    return line


def _hint(look: Look, plan: _Plan) -> Line | None:
    """Return the line of keys, dropped from its end where it is too long, never ``?`` and what ends it all."""
    if not look.keys or look.tiny:
        return None
    always = "Ctrl-C stop"
    if "?" in look.keys:
        always = f"? keys   {always}"
    names = [text for key, text in _HINTS if key in look.keys and (key != "a" or plan.counts["waiting"])]
    if look.ascii:
        names = [text.replace("↑↓", "up/down").replace("⏎", "Enter") for text in names]
    while names and 3 + sum(len(name) + 2 for name in names) + len(always) > look.width:
        names.pop()
    return look.line((" " + "  ".join([*names, always]), "dim"))


def _rows(plan: _Plan, look: Look, room: int) -> list[Line]:
    """Return the rows of tasks for *room* lines, by rank, the last one counting what did not fit."""
    shown = [task for task in plan.view.tasks if plan.kinds[task.id] not in ("done", "cancelled", "not_run", "blocked")]
    blocked = [task for task in plan.view.tasks if plan.kinds[task.id] == "blocked"]
    if len(plan.view.tasks) > ROWS_FOR_ALL:
        shown = [task for task in shown if plan.kinds[task.id] in ("running", "waiting", "failed")]
        blocked = []
    shown.sort(key=plan.rank)
    names = widest((task.name for task in shown + blocked), 4, 24 if look.width < 120 else 40)
    ids = widest((str(task.id) for task in plan.view.tasks[:1] + plan.view.tasks[-1:] + tuple(shown)), 1)
    places = _places(plan, shown, look, ids, names)
    groups = [(task, _task_lines(plan, task, look, places, ids, names)) for task in shown]
    if sum(len(lines) for _, lines in groups) + bool(blocked) > room:
        groups = [(task, lines[:1]) for task, lines in groups]
    if blocked:
        each = look.wide or look.height >= 34
        lines = _blocked_rows(plan, blocked, look, ids, names) if each else [_blocked_line(plan, look)]
        groups += [(task, [line]) for task, line in zip(blocked, lines, strict=False)]
    flat = [(task, line.about(task.id)) for task, lines in groups for line in lines]
    if len(flat) <= room:
        return [line for _, line in flat]
    if room < 1:
        return []
    kept = flat[: room - 1]
    if room >= 3 and not any(plan.kinds[task.id] == "waiting" for task, _ in kept):
        question = next((pair for pair in flat if plan.kinds[pair[0].id] == "waiting"), None)
        if question:
            kept = [*kept[:-1], question]
    seen = {id(line) for _, line in kept}
    left = [(task, line) for task, line in flat if id(line) not in seen]
    text = f"{look.ellipsis} {len(left):,} more"
    by_kind = Counter(plan.kinds[task.id] for task, _ in left)
    what = []
    if by_kind["waiting"]:
        what.append(plural(by_kind["waiting"], "question"))
    if by_kind["failed"]:
        what.append(f"{by_kind['failed']:,} failed")
    if what:
        text += ": " + ", ".join(what)
    return [*(line for _, line in kept), Line(look).fill(text, look.width, "dim")]


def _places(plan: _Plan, shown: Sequence[PlanTask], look: Look, ids: int, names: int) -> dict[str, Place]:
    """Return the columns of running tasks for this width."""
    running = [task for task in shown if plan.kinds[task.id] == "running"]
    cost = widest((_cost(task) for task in running), 5)
    budgets = any(share(task, plan.now) for task in running)
    limits = widest((_limit(task, plan.now) for task in running), 9)
    columns = [
        Column("symbol", 1, 0),
        Column("id", ids, 1, right=True),
        Column("task", names if not look.tiny else min(names, max(4, look.width - ids - 11)), 2, rest=1),
        Column("agent", widest((task.agent for task in running), 5, 12), 7),
        Column("age", 6, 3, right=True),
        Column("bar", 14 if look.wide else 6, 6),
        Column("share", 5, 4),
        Column("limit", limits, 9, gap=0),
        Column("cost", cost, 5, right=True),
        Column("output", 24, 8, rest=2),
    ]
    if not budgets:
        columns = [column for column in columns if column.key not in ("bar", "share", "limit")]
    if not look.wide:
        columns = [column for column in columns if column.key != "limit"]
    return join(columns, look.width)


def _cost(task: PlanTask) -> str:
    spend = task.spend
    if spend.usd is None:
        return short.UNKNOWN if cost_unknown(spend) else ""
    return short.money(spend.usd, partial=spend.usd_partial)


def _limit(task: PlanTask, now: datetime) -> str:
    used = share(task, now)
    return f"of {short.limit(task.budget, used[1])}" if used else ""


def _lead(look: Look, what: str, task: PlanTask, ids: int, style: str | None = None) -> Line:
    return Line(look).symbol(what, style).add(f" {task.id:>{ids}} ")


def _task_lines(plan: _Plan, task: PlanTask, look: Look, places: dict[str, Place], ids: int, names: int) -> list[Line]:
    """Return the one or two lines of a task that is not blocked and not done."""
    what = plan.kinds[task.id]
    if what == "running":
        return [_running_row(plan, task, look, places)]
    if what == "waiting":
        return _question_lines(plan, task, look, ids, names)
    if what == "failed":
        return [_failed_line(plan, task, look, ids, names)]
    line = _lead(look, what, task, ids)
    if look.tiny:
        line.fill(task.name, min(names, max(4, look.width - line.width - 12))).add(" ")
    else:
        line.fill(task.name, names).to(ids + 3 + names + 1)
    return [line.fill(_note(plan, task, what), look.width - line.width)]


def _note(plan: _Plan, task: PlanTask, what: str) -> str:
    """Return why a pending task does not run yet."""
    now = plan.now
    if what == "retrying" and task.next_attempt_at is not None:
        left = short.age((task.next_attempt_at - now).total_seconds())
        most = short.of(task.attempt + 1, task.max_retries, task.retry_count)
        error = task.error
        why = short.detail(error.cause, error.message, error.error_class) or error.error_class if error else ""
        return f"{short.attempt(task.attempt + 1, most)} in {left} {why}".rstrip()
    if what == "not_due" and task.next_attempt_at is not None:
        left = short.coarse((task.next_attempt_at - now).total_seconds())
        return f"not before {short.clock(task.next_attempt_at, now)} (in {left})"
    if what == "held":
        return f"held{' ' + task.note if task.note else ''}; orchestrator release {task.id}"
    if task.note:
        return task.note
    if plan.in_use >= plan.view.slots:
        return f"next free slot ({plan.in_use} of {plan.view.slots} in use)"
    return "ready"


def _running_row(plan: _Plan, task: PlanTask, look: Look, places: dict[str, Place]) -> Line:
    now = plan.now
    used = share(task, now)
    ending = bool(task.cancel_requested_at or task.stopping)
    symbol, colour = "running", "cyan"
    if used and used[0] >= 0.8:
        colour = "yellow"
    if ending:
        symbol, colour = "stopping", "yellow"
    if task.will_not_stop or (used and used[0] >= 1):
        symbol, colour = "alert", "red"
    output = task.last_output or ""
    if ending:
        output = task.stopping or "being stopped"
    if task.will_not_stop:
        output = f"will not stop: {task.will_not_stop}"
    age = short.age(short.since(task.started_at, now) or 0)
    values = {
        "symbol": (look.symbol(symbol), colour),
        "id": (str(task.id), ""),
        "task": (task.name, ""),
        "agent": (task.agent, ""),
        "age": (age, ""),
        "cost": (_cost(task), ""),
        "output": (output, "red" if task.will_not_stop else ""),
    }
    if used:
        values["bar"] = (bar(look, used[0], places["bar"].width) if "bar" in places else "", colour)
        values["share"] = (f"{short.percent(*used):>4}", colour if used[0] >= 0.8 else "")
        values["limit"] = (_limit(task, now), "")
    return row(look, places, values)


def _question_lines(plan: _Plan, task: PlanTask, look: Look, ids: int, names: int) -> list[Line]:
    """Return a question: what is asked and since when; below it the choices and the command that answers."""
    question = task.question
    text = question.text if question else (task.note or "waits for a person")
    line = _lead(look, "waiting", task, ids)
    if look.tiny:
        return [line.fill(text, look.width - line.width)]
    asked = question.asked_at if question else None
    age = short.age(short.since(asked, plan.now) or 0) if asked else ""
    line.fill(task.name, names).to(ids + 3 + names + 2)
    indent = line.width
    line.fill(text, look.width - indent - cells(age) - 1).right(age)
    if question is None:
        return [line]
    command = answer_command(question)
    below = Line(look).to(indent)
    fits = look.width - indent - cells(look.show(command)) - 2
    choices = "  ".join(f"[{n}] {choice}" for n, choice in enumerate(question.choices, 1))
    if fits >= min(12, cells(choices)):
        below.fill(choices, fits).right(command)
    else:
        below.fill(choices, look.width - indent)
    return [line, below]


def _failed_line(plan: _Plan, task: PlanTask, look: Look, ids: int, names: int) -> Line:
    """Return a failure: what went wrong, what would change it, and how many tasks need this one."""
    error = task.error
    why = (error.message or error.cause or error.error_class) if error else "failed"
    line = _lead(look, "failed", task, ids)
    if look.tiny:
        return line.fill(f"{task.name}: {why}", look.width - line.width)
    line.fill(task.name, names).to(ids + 3 + names + 2)
    needs = plan.needed_by[task.id]
    text = f"{plural(needs, 'task needs it', 'tasks need it')}" if needs else "none needs it"
    how = "r retry" if "r" in look.keys else f"orchestrator retry {task.id}"
    for right in (f"{how}, {text}", text):
        room = look.width - line.width - len(right) - 2
        if room >= min(20, cells(look.show(why))):
            return line.fill(why, room).right(right, "dim")
    return line.fill(why, look.width - line.width)


def _blocked_line(plan: _Plan, look: Look) -> Line:
    """Return one line for all blocked tasks, by what they wait for in the end."""
    roots = plan.roots()
    groups = Counter(roots.values())
    total = plan.counts["blocked"]
    line = Line(look).symbol("blocked").add(f" {total:,} blocked")
    ordered = sorted(groups, key=lambda root: plan.rank(plan.by_id[root]))
    for at, root in enumerate(ordered):
        what = plan.kinds[root]
        text = f"{groups[root]:,} behind {look.symbol(what)} {root}"
        lead = ": " if not at else look.separator
        left = len(ordered) - at
        reserve = cells(f"{look.separator}{left - 1} more") if left > 1 else 0
        if line.width + len(lead) + cells(text) + reserve > look.width:
            line.add(f"{lead}{left} more")
            break
        line.add(lead).add(text)
    return line


def _blocked_rows(plan: _Plan, blocked: Sequence[PlanTask], look: Look, ids: int, names: int) -> list[Line]:
    """Return a row for each blocked task: what it needs, and the root of its waiting where that is another task."""
    roots = plan.roots()
    lines = []
    for task in blocked:
        needs = [need for need in task.needs if plan.kinds.get(need) != "done"]
        if len(needs) == 1:
            name = plan.by_id[needs[0]].name if needs[0] in plan.by_id else ""
            text = f"needs {needs[0]} {name}".rstrip()
        else:
            text = f"needs {len(needs):,} tasks"
        root = roots.get(task.id, task.id)
        if len(needs) > 1 or root not in (task.id, *needs):
            text += f", behind {look.symbol(plan.kinds[root])} {root}"
        line = _lead(look, "blocked", task, ids).fill(task.name, names).to(ids + 3 + names + 1)
        lines.append(line.fill(text, look.width - line.width))
    return lines


# The plan as a tree


def _tree(plan: _Plan, look: Look) -> list[Line]:
    """Return a line for each task of the plan, below and to the right of what it needs last."""
    tasks = plan.view.tasks
    depth: dict[int, int] = {}
    children: dict[int, list[PlanTask]] = {}
    for task in _parents_first(plan):
        needs = [need for need in task.needs if need in depth]
        parent = max(needs, key=lambda need: (depth[need], need), default=0)
        depth[task.id] = depth[parent] + 1 if parent else 0
        children.setdefault(parent, []).append(task)
    ids = widest((str(task.id) for task in tasks), 1)
    lines = []
    stack = list(reversed(children.get(0, ())))
    while stack:
        task = stack.pop()
        lines.append(_tree_line(plan, task, look, ids, depth[task.id]))
        stack += reversed(children.get(task.id, ()))
    return lines


def _parents_first(plan: _Plan) -> list[PlanTask]:
    """Return the tasks in the plan's order, each behind all that it needs."""
    ordered: dict[int, PlanTask] = {}
    open_ = [*reversed(plan.view.tasks)]
    waiting: set[int] = set()
    while open_:
        task = open_[-1]
        needs = [plan.by_id[need] for need in task.needs if need in plan.by_id and need not in ordered]
        needs = [need for need in needs if need.id not in waiting]
        if task.id in ordered or not needs:
            ordered.setdefault(task.id, task)
            open_.pop()
        else:
            waiting.add(task.id)
            open_ += reversed(needs)
    return list(ordered.values())


def _tree_line(plan: _Plan, task: PlanTask, look: Look, ids: int, depth: int) -> Line:
    what = plan.kinds[task.id]
    indent = min(2 * depth, look.width // 3)
    line = Line(look).symbol(what).add(f" {task.id:>{ids}} " + " " * indent)
    left = look.width - line.width
    line.fill(task.name, max(4, min(left, 40 if look.wide else 24)))
    others = len([need for need in task.needs if need in plan.by_id]) - 1
    facts = []
    if what == "running":
        facts.append(short.age(short.since(task.started_at, plan.now) or 0))
    elif what in ("done", "failed", "cancelled") and task.elapsed is not None:
        facts.append(short.duration(task.elapsed))
    if what not in ("done", "running"):
        facts.append(WORDS.get(what, what))
    if others > 0:
        facts.append(f"needs {others + 1}")
    if what == "running" and task.last_output:
        facts.append(task.last_output)
    if what == "failed" and task.error:
        facts.append(task.error.message or task.error.cause or "")
    text = "  ".join(fact for fact in facts if fact)
    return line.add("  ").fill(text, look.width - line.width - 2, "dim").about(task.id)


_HISTORY = {
    "done": "done",
    "retry": "retrying",
    "failed": "failed",
    "cancelled": "cancelled",
    "interrupted": "retrying",
    "lost": "retrying",
    "not_run": "not_run",
    "waiting": "waiting",
}


def history(event: RunEvent, now: datetime, look: Look, names: int, ids: int = 3) -> Line | None:
    """Return the line of *event* that stays above the region, None for what the region itself tells.

    *names* and *ids* are the cells that names and ids of this plan take; narrower screens get less of the names.
    """
    symbol = _HISTORY.get(event.kind)
    if symbol is None or event.task_id is None:
        if event.kind in ("away", "back", "note", "stopping") and event.detail:
            return look.line(f"{short.clock(event.at, now)} ").fill(event.detail, look.width - 9).trimmed()
        return None
    line = Line(look)
    if look.width >= 50:
        line.add(f"{short.clock(event.at, now)} ")
    line.symbol(symbol).add(f" {event.task_id:>{ids}} ")
    start = line.width
    most = NO_LIMIT if look.width >= 120 else max(4, min(24, (look.width - start) // 3))
    width = min(names, most)
    line.fill(event.name, width).to(start + width + 1)
    elapsed = "" if event.elapsed is None else short.duration(event.elapsed)
    line.add(f" {elapsed:>6}")
    if look.tiny:
        return line.add(" ").fill(outcome_text(event, now), look.width - line.width).trimmed()
    usd = "" if event.spend.usd is None else short.money(event.spend.usd, partial=event.spend.usd_partial)
    if event.spend.usd is None and cost_unknown(event.spend):
        usd = short.UNKNOWN
    line.add(f" {usd:>6}  ")
    return line.fill(outcome_text(event, now), look.width - line.width).trimmed()


def outcome_text(event: RunEvent, now: datetime) -> str:
    """Return what came of an attempt, as one text."""
    if event.kind == "retry":
        return retry_text(event)
    if event.kind == "failed":
        return ": ".join(part for part in (event.error_class, event.detail or event.cause) if part)
    if event.kind == "waiting":
        return f"asks: {event.question.text}" if event.question else (event.detail or "waits for a person")
    if event.kind in ("cancelled", "interrupted", "lost", "not_run"):
        word = "not run" if event.kind == "not_run" else event.kind
        return f"{word}: {event.detail}" if event.detail else word
    return event.detail or ""


def retry_text(event: RunEvent) -> str:
    """Return why and when an attempt is made again."""
    text = event.detail or event.cause or event.error_class or "failed"
    if event.next_at is not None:
        left = short.age(max(0.0, (event.next_at - event.at).total_seconds()))
        text += f"; {short.attempt(event.attempt + 1, event.attempts)} in {left}"
    return text
