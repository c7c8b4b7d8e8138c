"""What a task asks a person, and what an answer does to it: pure, without I/O and without SQLAlchemy.

Reading order: ``Ask`` (what an attempt ends with), ``read_ask`` (the same from a mapping that an agent wrote), ``Answered``
(what the next attempt is told), then ``decide``, the one place that says what becomes of a task when a person speaks.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from orchestrator.domain.storable import NAME_MAX, storable_text
from orchestrator.domain.values import value
from orchestrator.domain.words import TaskStatus
from orchestrator.errors import InvalidInput

QUESTION_MAX = 20_000
"""Longest question, in characters; what is longer is cut, with a mark."""
CHOICES_MAX = 50
CHOICE_MAX = 500
ANSWER_MAX = 1_000_000
"""Longest answer, in characters."""
LONGEST_WAIT = 3650 * 86_400.0
"""Seconds that a deadline may lie ahead."""


class QuestionKind(StrEnum):
    """What is asked: whether a task may start, a question of an agent, leave to use a tool, leave to spend more."""

    APPROVAL = "approval"
    ASK = "ask"
    PERMISSION = "permission"
    BUDGET = "budget"


class Verdict(StrEnum):
    """How a question was closed. ``expired``: by its deadline; ``withdrawn``: its task was cancelled or made anew."""

    APPROVED = "approved"
    DENIED = "denied"
    ANSWERED = "answered"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"


@value
class Ask:
    """A question with which an attempt ends; the task waits until it is answered.

    ``name`` is its place: a task has one open question of a name. ``choices``: nothing else can be answered; without any
    every text can. ``seconds`` from now or ``deadline`` (an aware instant) is when ``default`` is taken as the answer, or,
    without a default, the task is given up. ``yes`` and ``no`` are what ``approve`` and ``deny`` answer, where they can.
    ``grants`` is what ``approve`` adds to the task's budget: ``{"tokens": 4000}``, by the names of ``Budget``.
    """

    name: str
    question: str
    kind: QuestionKind = QuestionKind.ASK
    choices: tuple[str, ...] = ()
    seconds: float | None = None
    deadline: datetime | None = None
    default: str | None = None
    yes: str | None = None
    no: str | None = None
    grants: dict[str, float] | None = None
    details: dict[str, Any] | None = None


APPROVAL = Ask("approval", "May it start?", QuestionKind.APPROVAL, choices=("yes", "no"), yes="yes", no="no")
"""What is asked before the first attempt of a task that needs an approval."""


@value
class Answered:
    """An answer as the attempts after it are told of it; ``attempt`` is the one that asked."""

    name: str
    question: str
    answer: str
    verdict: Verdict
    actor: str | None = None
    reason: str | None = None
    attempt: int = 0


def name_of(question: str) -> str:
    """The name of a question that was given none: its own words, as far as a name can be long."""
    words = " ".join(question.split()) or "question"
    if len(words) <= NAME_MAX:
        return words
    return f"{words[:80]} {hashlib.sha256(words.encode(errors='replace')).hexdigest()[:16]}"


def read_ask(given: Mapping[str, Any]) -> Ask:
    """The ``ask`` that an agent wrote: name, question, choices, deadline, default. Raises InvalidInput for what is none.

    ``deadline`` is a number of seconds from now, or an ISO time with its offset. Forbidden characters are replaced.
    """
    question = given.get("question")
    if not isinstance(question, str) or not question.strip():
        raise InvalidInput("ask: expected a question, a text that is not empty")
    question = _cut(question, QUESTION_MAX)
    name = given.get("name")
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise InvalidInput(f"ask: name: expected a text that is not empty, found {name!r:.100}")
    if name is not None and len(name) > NAME_MAX:
        raise InvalidInput(f"ask: name: {len(name):,} characters are too many, at most {NAME_MAX} are allowed")
    choices = _choices(given.get("choices"))
    default = given.get("default")
    if default is not None:
        default = _text("default", default)
        if choices and default not in choices:
            raise InvalidInput(f"ask: default: {default!r:.100} is none of the choices {', '.join(choices):.200}")
    seconds, deadline = _deadline(given.get("deadline"))
    return Ask(
        storable_text(name)[0] if name is not None else name_of(question),
        question,
        choices=choices,
        seconds=seconds,
        deadline=deadline,
        default=default,
    )


def _choices(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__iter__"):
        raise InvalidInput(f"ask: choices: expected a list of texts, found {given!r:.100}")
    choices = tuple(dict.fromkeys(_text("choices", each) for each in given))
    if len(choices) > CHOICES_MAX:
        raise InvalidInput(f"ask: choices: {len(choices)} are too many, at most {CHOICES_MAX} are allowed")
    return choices


def _text(field: str, given: Any) -> str:
    if not isinstance(given, str) or not given.strip():
        raise InvalidInput(f"ask: {field}: expected a text that is not empty, found {given!r:.100}")
    if len(given) > CHOICE_MAX:
        raise InvalidInput(f"ask: {field}: {len(given):,} characters are too many, at most {CHOICE_MAX} are allowed")
    return storable_text(given)[0]


def _deadline(given: Any) -> tuple[float | None, datetime | None]:
    if given is None:
        return None, None
    if isinstance(given, timedelta):
        given = given.total_seconds()
    if isinstance(given, str):
        try:
            given = datetime.fromisoformat(given)
        except ValueError:
            raise InvalidInput(f"ask: deadline: expected seconds or an ISO time, found {given!r:.100}") from None
    if isinstance(given, datetime):
        if given.tzinfo is None:
            raise InvalidInput(f"ask: deadline: expected a time with its offset from UTC, found {given.isoformat()}")
        return None, given
    valid = isinstance(given, int | float) and not isinstance(given, bool) and abs(given) <= sys.float_info.max
    if not valid or not 0 <= given <= LONGEST_WAIT:
        raise InvalidInput(f"ask: deadline: expected seconds from 0 to {LONGEST_WAIT:.0f}, found {given!r:.100}")
    return float(given), None


def _cut(text: str, most: int) -> str:
    text = storable_text(text)[0].strip()
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


# -- what becomes of it ------------------------------------------------------------------------------------------------


@value
class Decision:
    """What a person's word does: the answer that the next attempt gets, and the status that it ends the task with.

    ``status`` None: the task goes on once nothing else of it is open. ``cause`` is the error's, for a task that ends.
    """

    verdict: Verdict
    answer: str | None = None
    status: TaskStatus | None = None
    cause: str | None = None


def decide(ask: Ask, said: Verdict, text: str | None = None) -> Decision:
    """What *said* (approved, denied, answered or expired) does to the task that asked *ask*.

    ``text`` is the answer of ``answered``. Raises InvalidInput for an answer that is none of the choices, and for an
    ``approve`` of a question that wants words.
    """
    if said is Verdict.EXPIRED:
        if ask.default is None:
            return _refused(ask, said, "no_answer")
        if ask.default == ask.no and ask.kind is not QuestionKind.ASK:
            return _deny(ask, said)
        return Decision(said, ask.default)
    if said is Verdict.APPROVED:
        answer = ask.yes or next((each for each in ask.choices if each.casefold() in _YES), None)
        if answer is None:
            raise InvalidInput("it asks for an answer, not for an approval", hint=offered(ask))
        return Decision(said, answer)
    if said is Verdict.DENIED:
        return _deny(ask, said)
    assert text is not None
    if ask.choices:
        meant = [each for each in ask.choices if each == text] or [
            each for each in ask.choices if each.casefold() == text.strip().casefold()
        ]
        if len(meant) != 1:
            raise InvalidInput(f"answer: {text!r:.100} is none of the choices", hint=offered(ask))
        text = meant[0]
    if ask.kind is not QuestionKind.ASK and text == ask.no:
        return _deny(ask, Verdict.DENIED)
    return Decision(Verdict.APPROVED if ask.kind is not QuestionKind.ASK and text == ask.yes else said, text)


_YES = frozenset({"yes", "y", "ok", "approve", "approved", "allow"})


def _deny(ask: Ask, verdict: Verdict) -> Decision:
    if ask.kind is QuestionKind.PERMISSION:
        return Decision(verdict, ask.no or "deny")
    return _refused(ask, verdict, "denied")


def _refused(ask: Ask, verdict: Verdict, cause: str) -> Decision:
    # Work that was paid for and may not go on has failed; what a person did not want is cancelled.
    ends = TaskStatus.FAILED if ask.kind is QuestionKind.BUDGET else TaskStatus.CANCELLED
    return Decision(verdict, None, ends, cause)


def offered(ask: Ask) -> str:
    """The sentence that says what can be answered."""
    return f"choices: {', '.join(ask.choices)}" if ask.choices else "any text: orchestrator answer ID TEXT"


__all__ = [
    "ANSWER_MAX",
    "APPROVAL",
    "Answered",
    "Ask",
    "Decision",
    "QuestionKind",
    "Verdict",
    "decide",
    "name_of",
    "offered",
    "read_ask",
]
