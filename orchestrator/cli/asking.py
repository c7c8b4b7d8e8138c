"""``questions``, ``approve``, ``deny``, ``answer``: what waits for a person, and the words that let it go on."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import options, printing, state
from orchestrator.cli.adding import file_text
from orchestrator.cli.changing import change, wanted_tasks
from orchestrator.cli.options import (
    AgentOption,
    DryRunOption,
    IdArgument,
    IdsArgument,
    JsonOption,
    PlanOption,
    ReasonOption,
    SearchOption,
    TagOption,
    YesOption,
)
from orchestrator.errors import InvalidInput

if TYPE_CHECKING:
    from orchestrator.domain.asking import Verdict
    from orchestrator.repositories.filters import TaskFilter

NameOption = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="Which question, of a task that asks several.")
]


def questions(
    context: typer.Context,
    ids: IdsArgument = None,
    agent: AgentOption = None,
    plan: PlanOption = None,
    tag: TagOption = None,
    search: SearchOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Answered ones too, newest first.")] = False,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=10_000, help="So many at most.")] = 100,
    after_id: Annotated[
        str | None, typer.Option("--after-id", metavar="ID", help="With --all: the page behind that question.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List what waits for a person.

    The nearest deadline first, then the oldest.

    \b
    Examples:
      orchestrator questions
      orchestrator questions --agent coder --json
      orchestrator questions 7 --all
    """
    own = state.of(context, as_json)
    if after_id is not None and not everything:
        raise InvalidInput("--after-id goes with --all: open questions are in the order of their deadlines")
    which = options.wanted(ids=options.task_ids(ids), agent=agent, plan=plan, tag=tag, search=search)
    behind = None if after_id is None else options.number(after_id, "question")
    with own.open() as orchestrator:
        found = orchestrator.questions.list(which, answered=everything, limit=limit + 1, after_id=behind)
        now = orchestrator.reading.now()
    page = found[:limit]
    more = len(found) > limit
    if as_json:
        printing.document({"questions": page, "next_after_id": page[-1]["id"] if more and everything else None})
        return
    for each in page:
        _print(each, now)
    if not page:
        printing.note("no question matches" if everything else "nothing waits for a person")
    elif more:
        printing.note(
            f"{len(page)} shown; more: --after-id {page[-1]['id']}"
            if everything
            else f"{len(page)} shown; more: --limit"
        )


def approve(
    context: typer.Context,
    ids: IdsArgument = None,
    agent: AgentOption = None,
    plan: PlanOption = None,
    tag: TagOption = None,
    search: SearchOption = None,
    name: NameOption = None,
    reason: ReasonOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Approve what tasks ask: they go on.

    Approvals before a run, leave to use a tool or to spend more, and questions
    with a "yes" among their choices. Of two people one wins; the other gets
    exit 5.

    \b
    Examples:
      orchestrator approve 7 --reason "reviewed"
      orchestrator approve --plan release --yes
    """
    own = state.of(context, as_json)
    which = wanted_tasks(ids, None, agent, plan, tag, search, yes, dry_run)
    _say(own, which, "approved", name=name, reason=reason, dry_run=dry_run)


def deny(
    context: typer.Context,
    ids: IdsArgument = None,
    agent: AgentOption = None,
    plan: PlanOption = None,
    tag: TagOption = None,
    search: SearchOption = None,
    name: NameOption = None,
    reason: ReasonOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Refuse what tasks ask: they are cancelled.

    And with them those that need them. Where leave to use a tool was asked
    for, the agent is told so and goes on; where leave to spend more, the task
    has failed.

    \b
    Examples:
      orchestrator deny 7 --reason "not before the freeze ends"
      orchestrator deny --agent coder --dry-run
    """
    own = state.of(context, as_json)
    which = wanted_tasks(ids, None, agent, plan, tag, search, yes, dry_run)
    _say(own, which, "denied", name=name, reason=reason, dry_run=dry_run)


def answer(
    context: typer.Context,
    id_: IdArgument,
    words: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="One of the choices, or any text where there are none.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", metavar="FILE", help="Take the text from a file; - is standard input.")
    ] = None,
    name: NameOption = None,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer the question of a task.

    The task goes on; its next attempt gets the text whole. A text that is none
    of the choices: exit 2. Somebody else was first: exit 5, with who and when.

    \b
    Examples:
      orchestrator answer 7 yes
      orchestrator answer 7 "Keep it as a view" --name legacy
      orchestrator answer 7 --file decision.md
    """
    own = state.of(context, as_json)
    if (words is None) == (file is None):
        raise InvalidInput("what is the answer? give TEXT or --file, one of them", hint="orchestrator questions")
    which = options.wanted(ids=[options.number(id_, "task")])
    text = words if file is None else file_text(file, "--file")
    _say(own, which, "answered", text=text, name=name, reason=reason)


def _say(own: state.State, which: TaskFilter, verdict: str, **said: Any) -> None:
    word = _verdict(verdict)
    change(own, which, lambda orc: orc.questions.say(which, word, actor=options.actor(), **said))


def _verdict(word: str) -> Verdict:
    from orchestrator.domain.asking import Verdict

    return Verdict(word)


def _print(question: dict[str, Any], now: datetime) -> None:
    from orchestrator.dashboard.questions import question_lines
    from orchestrator.dashboard.terminal import look_for

    printing.lines(question_lines(question, now, look_for(sys.stdout)))
