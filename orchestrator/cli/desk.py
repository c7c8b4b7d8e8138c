"""What the keys of a live view read and do: the same calls as the commands, with the same entries in the audit trail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.cli import options
from orchestrator.errors import Conflict, InvalidInput

if TYPE_CHECKING:
    from orchestrator.dashboard.controls import Asked, Subject
    from orchestrator.dashboard.frame import Line, Look
    from orchestrator.repositories.operations import Changed
    from orchestrator.service import Orchestrator

LOG_EVENTS = 500
"""Events of a transcript that a page of output shows."""

_VERDICTS = {"answer": "answered", "approve": "approved", "deny": "denied"}
_DONE = {"cancel": "cancelled", "retry": "opened again", "hold": "held", "release": "released"}


class Desk:
    """Reads and changes for a live view. *changed* is called after a change: the view's picture is old then."""

    deeds = frozenset({"answer", "approve", "deny", "cancel", "retry", "hold", "release", "pause", "resume"})
    pages = frozenset({"show", "logs", "why"})

    def __init__(self, orchestrator: Orchestrator, changed: Callable[[], None] = lambda: None) -> None:
        self._orchestrator = orchestrator
        self._changed = changed

    def page(self, what: str, task_id: int, look: Look) -> list[Line]:
        """Return the page *what* of a task. Raises NotFound; driver errors come as they are."""
        if what == "logs":
            return self._logs(task_id, look)
        if what == "why":
            from orchestrator.dashboard.why import diagnose, render_why

            return render_why(diagnose(self._orchestrator.diagnosis.facts(task_id)), look)
        from orchestrator.dashboard.show import render_show

        reading = self._orchestrator.reading
        task, ended = reading.task(task_id), reading.runs(task_id)
        output, size = last_output(self._orchestrator, task, ended)
        return render_show(
            {**task, "runs": ended, "questions": self._orchestrator.questions.of_task(task_id)},
            reading.now(),
            look,
            needed_by=reading.needed_by(task_id),
            output=output,
            output_bytes=size,
        )

    def do(self, asked: Asked) -> str:
        """Do it; return what came of it. Raises Conflict, InvalidInput, NotFound; driver errors come as they are."""
        deed, subject, actor = asked.deed, asked.subject, options.actor()
        states = self._orchestrator.agent_states
        if deed == "pause":
            states.pause(subject.agent, actor=actor)
            said = f"agent {subject.agent} is paused; what runs goes on"
        elif deed == "resume":
            was = states.resume(subject.agent, actor=actor)
            said = f"agent {subject.agent} goes on" if was else f"agent {subject.agent} was not paused"
        elif deed in _VERDICTS:
            said = self._say(asked, actor)
        else:
            said = self._change(deed, subject, actor)
        self._changed()
        return said

    def _change(self, deed: str, subject: Subject, actor: str) -> str:
        from orchestrator.repositories.filters import TaskFilter

        if subject.task_id is None:
            raise InvalidInput(f"{deed} needs a task")
        operations = self._orchestrator.operations
        which = TaskFilter(ids=[subject.task_id])
        does = {
            "cancel": operations.cancel,
            "retry": operations.retry,
            "hold": operations.hold,
            "release": operations.release,
        }
        changed = does[deed](which, actor=actor)
        self._orchestrator.notify(changed.wake)
        return f"{subject.title}: {_outcome(deed, changed)}"

    def _say(self, asked: Asked, actor: str) -> str:
        """Say it to the question that was on the screen, and to no other that the task may have asked since."""
        from orchestrator.domain.asking import Verdict
        from orchestrator.repositories.filters import TaskFilter

        subject, question = asked.subject, asked.subject.question
        if subject.task_id is None or question is None:
            raise InvalidInput(f"{asked.deed} needs a task that asks something")
        questions = self._orchestrator.questions
        every = questions.of_task(subject.task_id)
        same = [each for each in every if each["question"] == question.text and each["kind"] == question.kind]
        if every and not same:
            raise Conflict(f"task {subject.task_id} asks something else by now", task=subject.task_id)
        changed = questions.say(
            TaskFilter(ids=[subject.task_id]),
            Verdict(_VERDICTS[asked.deed]),
            actor=actor,
            text=asked.text or None,
            name=same[-1]["name"] if same else None,
        )
        self._orchestrator.notify(changed.wake)
        said = f"{subject.title}: {_VERDICTS[asked.deed]}"
        return f"{said} {asked.text}" if asked.text else said

    def _logs(self, task_id: int, look: Look) -> list[Line]:
        from orchestrator.dashboard.show import LogLines, logs_gap

        task = self._orchestrator.reading.task(task_id)
        attempt = int(task["attempt"])
        if not attempt:
            return [look.line((f"has not been started yet ({task['status']})", "dim"))]
        lines = LogLines(look)
        drawn: list[Line] = []
        for event in self._orchestrator.events.last(task_id, attempt, LOG_EVENTS):
            if event.kind == "dropped":
                drawn += [*lines.rest(), logs_gap(event.bytes or 0, look)]
            else:
                drawn += lines.add(event.kind, event.text)
        drawn += lines.rest()
        shown = [look.line(*line.parts) for line in drawn]
        return shown or [look.line((f"attempt {attempt} has said nothing yet", "dim"))]


def _outcome(deed: str, changed: Changed) -> str:
    if changed.requested:
        text = "asked to end"
    elif changed.already:
        from orchestrator.cli.changing import ALREADY

        text = ALREADY.get(deed, "as asked already")
    elif changed.ids:
        text = _DONE[deed]
    else:
        text = "left as it is"
    if changed.family:
        text += f", and {len(changed.family):,} that need it"
    if changed.skipped:
        text += f"; {changed.skipped[0].why}"
    return text


def last_output(
    orchestrator: Orchestrator, task: Mapping[str, Any], ended: Sequence[Mapping[str, Any]]
) -> tuple[list[str], int | None]:
    """The last lines that the newest attempt said, and the bytes of all of it if they are known."""
    attempt = int(task["attempt"])
    if not attempt:
        return [], None
    said = ""
    for event in orchestrator.events.last(int(task["id"]), attempt, 50):
        if event.kind in ("stdout", "stderr"):
            said += event.text
        else:
            said += ("\n" if said and not said.endswith("\n") else "") + event.text.rstrip("\n") + "\n"
    last = [run for run in ended if run["attempt"] == attempt]
    return said.splitlines()[-10:], last[0]["transcript"]["bytes"] if last else None
