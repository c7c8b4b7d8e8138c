"""Questions on screens, from their JSON objects: what is asked, of which task, until when, and how it is answered."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from orchestrator.dashboard import short
from orchestrator.dashboard.frame import Line, Look, wrapped
from orchestrator.dashboard.run_view import answer_command
from orchestrator.dashboard.show import Json, moment
from orchestrator.domain.snapshot import Question


def command_for(question: Json) -> str:
    """Return the command that would answer *question*: its default, else its first choice."""
    return answer_command(
        Question(
            question["task_id"],
            question["question"],
            kind=question["kind"],
            choices=tuple(question["choices"]),
            default=question["default"],
        )
    )


def question_lines(question: Json, now: datetime, look: Look) -> list[Line]:
    """Return one question of ``questions``: task, words, age; below it what can be said, or what was."""
    is_open = question["verdict"] is None
    line = Line(look).symbol("waiting" if is_open else "done").add(f" {question['task_id']} ")
    label = str(question["task_name"] or question["title"] or question["agent"])
    line.add(look.cut(label, 30), "bold").add("  ")
    asked = moment(question["asked_at"])
    age = "" if asked is None else short.age((now - asked).total_seconds())
    line.fill(" ".join(str(question["question"]).split()), look.width - line.width - len(age) - 2).right(age)
    lines = [line, Line(look).add("    ").fill(" | ".join(_details(question, now)), look.width - 4, "dim")]
    return [each.trimmed() for each in lines]


def _details(question: Json, now: datetime) -> list[str]:
    if question["verdict"] is not None:
        return [said(question, now)]
    details = []
    if question["choices"]:
        details.append("choices: " + ", ".join(question["choices"]))
    deadline = moment(question["deadline"])
    if deadline is not None:
        then = f"then {question['default']}" if question["default"] is not None else "then it is given up"
        details.append(f"until {short.clock(deadline, now)}, {then}")
    return [*details, command_for(question)]


def said(question: Json, now: datetime) -> str:
    """Return how a question was closed: the word, who said it, when and why."""
    at = moment(question["answered_at"])
    text = str(question["verdict"])
    if question["answer"] is not None:
        text += f" {question['answer']}"
    if question["actor"]:
        text += f" by {question['actor']}"
    if at is not None:
        text += f" at {short.clock(at, now)}"
    return text + (f": {question['reason']}" if question["reason"] else "")


def of_task(questions: Sequence[Json], now: datetime, look: Look) -> list[Line]:
    """Return the questions of one task, as ``show`` has them: the words whole, and what was said to them."""
    lines: list[Line] = []
    for question in questions:
        first = Line(look).add("  ").symbol("waiting" if question["verdict"] is None else "done").add(" ")
        lines += wrapped(first, str(question["question"]), indent=4)
        lines.append(Line(look).add("    ").fill(" | ".join(_details(question, now)), look.width - 4, "dim"))
    return [line.trimmed() for line in lines]


__all__ = ["command_for", "of_task", "question_lines", "said"]
