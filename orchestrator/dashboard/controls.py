"""What keys mean: the cursor, the page that is open, the pane, the filter, and the question before a change.

``Controls`` is pure: key names and the subjects of the screen's rows go in, its attributes say what to show, and
``key`` returns what is to be done. Nothing is changed without a question in the last line that names what was selected
when the key was struck; ``y`` is the only yes (a choice's number, where a task asks which), and whatever else is typed
means no.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Literal

from orchestrator.dashboard.frame import Line, Look, plural
from orchestrator.dashboard.keys import MOVES
from orchestrator.dashboard.text import cells
from orchestrator.domain.snapshot import Question
from orchestrator.domain.values import value

Target = int | str
"""What a row is about: a task's id, or an agent's name."""

DEEDS = {"a": "answer", "d": "deny", "x": "cancel", "r": "retry", "h": "hold", "P": "pause", "R": "resume"}
"""Keys that change something. ``h`` is ``release`` for a task that is held, ``a`` is ``approve`` for what wants no words."""
PAGES = {"enter": "show", "w": "why", "l": "logs", "t": "tree"}
PANES = ("needs", "running", "agents", "workers", "failures")
"""The panes of the dashboard by their keys ``1`` to ``5``."""
FILTER_MAX = 200
ANSWER_MAX = 4000
"""Longest answer that is typed here; a longer one is for ``answer --file``."""

_ENDED = frozenset({"done", "failed", "cancelled", "not_run"})
_SAYS = frozenset({"answer", "approve", "deny"})
CHOICES = 9
"""So many choices of a question can be struck; one that has more is answered by the command."""


@value
class Subject:
    """What stood under the cursor. ``kind`` is what a task is on screens: running, failed, held, …

    ``task_id`` is None for an agent. ``facts`` say where it is and since when, ``needed_by`` counts the tasks that need
    it (None: nobody knows). ``question`` is what it asks a person.
    """

    task_id: int | None
    agent: str
    name: str = ""
    kind: str = ""
    facts: str = ""
    needed_by: int | None = None
    question: Question | None = None

    @property
    def title(self) -> str:
        return f"agent {self.agent}" if self.task_id is None else f"{self.task_id} {self.name}".rstrip()


@value
class Asked:
    """A change that waits for its yes. ``text`` is the answer, empty while it is still to be chosen."""

    deed: str
    subject: Subject
    text: str = ""

    @property
    def choices(self) -> tuple[str, ...]:
        """What can be chosen now, by number."""
        asks = self.deed == "answer" and not self.text and self.subject.question is not None
        return self.subject.question.choices[:CHOICES] if asks and self.subject.question else ()


@value
class Page:
    """What is shown in place of the rows: ``show``, ``logs`` or ``why`` of a task, the ``tree``, or the ``keys``."""

    what: str
    task_id: int | None = None


Done = Literal["quit"] | Asked | None


def refused(deed: str, subject: Subject) -> str | None:
    """Return why *deed* makes no sense for *subject*, None where it does; the database has the last word."""
    if deed in ("pause", "resume"):
        return None if subject.agent else "select a task or an agent first"
    if subject.task_id is None:
        return f"select a task to {deed}"
    if deed in _SAYS and subject.question is None:
        return f"{subject.title} asks nothing"
    kind = subject.kind
    word = {"not_run": "not run", "not_due": "not due"}.get(kind, kind)
    if deed == "cancel" and kind in _ENDED:
        return f"{subject.title} is {word} already"
    if deed == "retry" and kind and kind not in ("failed", "cancelled", "not_run"):
        return f"{subject.title} is {word}: only failed and cancelled tasks are retried"
    if deed == "hold" and (kind in _ENDED or kind in ("running", "stopping")):
        return f"{subject.title} is {word}: only what has not begun can be held"
    return None


class Controls:
    """The state of the keys of one view.

    *deeds* and *pages* are what can be done and opened here; *panes*, *filters*, *freezes* and *quits* say whether those
    keys exist.
    """

    def __init__(
        self,
        deeds: Collection[str] = (),
        pages: Collection[str] = (),
        *,
        panes: bool = False,
        filters: bool = False,
        freezes: bool = False,
        quits: bool = False,
    ) -> None:
        self._deeds = frozenset(deeds)
        self._pages = frozenset(pages)
        self._panes, self._filters, self._freezes, self._quits = panes, filters, freezes, quits
        self.selected: Target | None = None
        self.page: Page | None = None
        self.scroll = 0
        self.pane: str | None = None
        self.filter = ""
        self.typing = False
        self.frozen = False
        self.asked: Asked | None = None
        self.answering: Subject | None = None
        """Whose answer is being typed."""
        self.answer = ""
        self.said = ""

    @property
    def names(self) -> frozenset[str]:
        """The names of the keys that work, as ``Look.keys`` has them."""
        names = {"select", "?"}
        names |= {key for key, deed in DEEDS.items() if deed in self._deeds}
        names |= {"open" if key == "enter" else key for key, page in PAGES.items() if page in self._pages}
        for there, name in ((self._panes, "pane"), (self._filters, "/"), (self._freezes, "p"), (self._quits, "q")):
            if there:
                names.add(name)
        return frozenset(names)

    def key(self, name: str, rows: Sequence[Target], subject: Callable[[Target], Subject | None]) -> Done:
        """Take the key *name* and return what is to be done: leave the view, or a change that was said yes to.

        *rows* are what the rows on the screen are about, from the top; *subject* tells more about one of them.
        """
        self.said = ""
        if self.asked is not None:
            asked, self.asked = self.asked, None
            if asked.choices:
                at = int(name) if len(name) == 1 and name in "123456789" else 0
                return replace(asked, text=asked.choices[at - 1]) if 0 < at <= len(asked.choices) else None
            return asked if name == "y" else None
        if self.answering is not None:
            self._answer(name, self.answering)
            return None
        if self.typing:
            self._type(name)
            return None
        if name == "q" and self._quits:
            return "quit"
        if name == "esc" or (name == "q" and self.page is not None):
            self._back()
        elif name == "?":
            self._open(None if self.page == Page("keys") else Page("keys"))
        elif name in MOVES:
            self._move(name, rows)
        elif name in DEEDS:
            self._ask(DEEDS[name], subject)
        elif name in PAGES:
            self._turn(PAGES[name])
        elif name == "p" and self._freezes:
            self.frozen = not self.frozen
        elif self._panes and (name == "tab" or (len(name) == 1 and name in "12345")):
            self._choose(name)
        elif name == "/" and self._filters and self.page is None:
            self.typing = True
        return None

    def paste(self, text: str) -> None:
        """Take a burst that is no key: text for the field that is typed in, else nothing at all, and no yes."""
        self.asked = None
        if self.answering is not None:
            self.answer = (self.answer + text)[:ANSWER_MAX]
        elif self.typing:
            self.filter = (self.filter + text)[:FILTER_MAX]

    # -- what keys do -------------------------------------------------------------------------------------------------

    def _type(self, name: str) -> None:
        if name == "enter":
            self.typing = False
        elif name == "esc":
            self.typing, self.filter = False, ""
        elif name == "backspace":
            self.filter = self.filter[:-1]
        elif len(name) == 1:
            self.filter = (self.filter + name)[:FILTER_MAX]

    def _answer(self, name: str, subject: Subject) -> None:
        """Take a key of the answer's text. Enter ends it, and asks: what is sent cannot be taken back."""
        if name == "backspace":
            self.answer = self.answer[:-1]
        elif len(name) == 1:
            self.answer = (self.answer + name)[:ANSWER_MAX]
        elif name == "esc" or (name == "enter" and not self.answer.strip()):
            self.answering = None
        elif name == "enter":
            self.answering, self.asked = None, Asked("answer", subject, self.answer.strip())

    def _back(self) -> None:
        """Undo one thing: the page, the cursor, the filter, the pane."""
        if self.page is not None:
            self._open(None)
        elif self.selected is not None:
            self.selected = None
        elif self.filter:
            self.filter = ""
        else:
            self.pane = None

    def _open(self, page: Page | None) -> None:
        self.page = page
        self.scroll = 0

    def _turn(self, what: str) -> None:
        if what not in self._pages:
            return
        if what == "tree":
            self._open(None if self.page == Page("tree") else Page("tree"))
        elif isinstance(self.selected, int):
            self._open(Page(what, self.selected))
        else:
            self.said = "select a task first: up and down"

    def _move(self, name: str, rows: Sequence[Target]) -> None:
        if self.page is not None and self.page.what != "tree":
            self.scroll += MOVES[name]
            return
        targets = list(dict.fromkeys(rows))
        if not targets:
            return
        if self.selected not in targets:
            self.selected = targets[-1] if name == "end" else targets[0]
            return
        at = targets.index(self.selected) + MOVES[name]
        self.selected = targets[max(0, min(len(targets) - 1, at))]

    def _choose(self, name: str) -> None:
        if name == "tab":
            at = PANES.index(self.pane) + 1 if self.pane else 0
            pane = PANES[at] if at < len(PANES) else None
        else:
            pane = PANES[int(name) - 1]
            pane = None if pane == self.pane else pane
        self._open(None)
        self.pane = pane
        self.selected = None

    def _ask(self, deed: str, subject: Callable[[Target], Subject | None]) -> None:
        if deed not in self._deeds:
            return
        target = self.page.task_id if self.page is not None and self.page.task_id is not None else self.selected
        if target is None:
            self.said = f"select what to {deed} first: up and down"
            return
        found = subject(target)
        if found is None:
            self.said = f"{target} is no longer on the screen"
            return
        if deed == "hold" and found.kind == "held":
            deed = "release"
        question = found.question
        if deed == "answer" and question is not None and question.kind != "ask":
            deed = "approve"
        why_not = refused(deed, found)
        if why_not is not None:
            self.said = why_not
        elif deed == "answer" and question is not None and not question.choices:
            self.answering, self.answer = found, ""
        else:
            self.asked = Asked(deed, found)

    # -- what is shown of it ------------------------------------------------------------------------------------------

    def last_line(self, look: Look) -> Line | None:
        """Return what stands in the last line in place of the keys: a question, the filter, or what came of a key."""
        if self.asked is not None:
            return asked_line(self.asked, look)
        if self.answering is not None:
            return answer_line(self.answering, self.answer, look)
        if self.typing:
            line = look.line((" / ", "bold")).fill(self.filter[-max(1, look.width - 12) :] + "_", look.width - 3)
            hint = "agent: plan: worker: class:   Enter keep   Esc drop"
            return line.right(hint, "dim") if line.width + 2 + len(hint) <= look.width else line
        if self.said:
            return Line(look).add(" ").fill(self.said, look.width - 1, "bold")
        if self.filter:
            return look.line((" filter ", "bold")).fill(self.filter, look.width - 24).add("   Esc all", "dim")
        return None


def asked_line(asked: Asked, look: Look) -> Line:
    """Return the question before a change: what would be done to what, and the two keys. What it is gives way last."""
    subject = asked.subject
    if asked.choices:
        return _choices_line(asked, look)
    keys = f"    y {asked.deed}   n {'keep' if asked.deed == 'cancel' else 'leave'}"
    if look.tiny:
        keys = "  y/n"
    title = subject.title if subject.task_id is not None or asked.deed not in ("pause", "resume") else subject.agent
    if asked.deed in ("pause", "resume"):
        title = f"agent {subject.agent}"
    head = f" {asked.deed} {title}?"
    facts = []
    if asked.deed in _SAYS and subject.question is not None:
        words = asked.text if asked.deed == "answer" else subject.question.text
        line = Line(look).fill(f" {asked.deed} {title}: ", (look.width - cells(keys)) // 2, "bold")
        return line.fill(" ".join(words.split()), look.width - cells(keys) - line.width).add(keys)
    if asked.deed not in ("pause", "resume"):
        if subject.facts:
            facts.append(subject.facts)
        if subject.needed_by:
            facts.append(plural(subject.needed_by, "task needs it", "tasks need it"))
    room = look.width - cells(keys)
    line = Line(look).fill(head, room, "bold")
    while facts and line.width + 1 + cells(look.show("; ".join(facts))) > room:
        facts.pop(0)
    if facts:
        line.add(" " + "; ".join(facts))
    return line.add(keys)


def _choices_line(asked: Asked, look: Look) -> Line:
    """Return a question with its choices by number; the words give way to the numbers, the choices' words to both."""
    question = asked.subject.question
    assert question is not None
    numbered = [f"{n} {' '.join(choice.split())}" for n, choice in enumerate(asked.choices, 1)]
    keys = "   " + "   ".join(look.cut(each, 14 if look.tiny else 24) for each in numbered)
    end = "" if look.tiny else "   Esc back"
    if cells(look.show(keys)) + cells(end) > look.width - 8:
        keys, end = f"   1-{len(numbered)}", ""
    head = f" answer {asked.subject.title}: {' '.join(question.text.split())}"
    return Line(look).fill(head, look.width - cells(look.show(keys)) - cells(end), "bold").add(keys).add(end)


def answer_line(subject: Subject, text: str, look: Look) -> Line:
    """Return the field that an answer is typed into: whose it is, and the end of what has been typed."""
    hint = "   Enter send   Esc back" if look.width >= 60 else ""
    line = Line(look).fill(f" answer {subject.title}: ", max(10, (look.width - len(hint)) // 2), "bold")
    room = look.width - line.width - len(hint)
    shown = look.show(text) + "_"
    while cells(shown) > room:
        shown = shown[cells(shown) - room if shown.isascii() else 1 :]
    return line.add(shown).add(" " * (room - cells(shown)) + hint, "dim")


KEYS = (
    ("select", "arrows, j k, PgUp, PgDn, Home, End", "select, or scroll a page"),
    ("open", "Enter", "open the selected task"),
    ("l", "l", "what it says, live"),
    ("w", "w", "why it does not run"),
    ("t", "t", "the plan as a tree"),
    ("", "Esc", "back"),
    ("a", "a", "answer or approve what the selected task asks"),
    ("d", "d", "deny it"),
    ("x", "x", "cancel the selected task"),
    ("r", "r", "retry it"),
    ("h", "h", "hold or release it"),
    ("P", "P, R", "pause, resume its agent"),
    ("pane", "1-5, Tab", "one pane alone: needs you, running, agents, workers, failures"),
    ("/", "/", "filter: text, agent: plan: worker: class:"),
    ("p", "p", "freeze the picture, go on"),
    ("?", "?", "this list"),
    ("q", "q, Ctrl-C", "quit"),
)


def help_lines(look: Look) -> list[Line]:
    """Return all keys that exist here; what changes something says that it asks."""
    shown = [(keys, what) for name, keys, what in KEYS if not name or name in look.keys]
    if "q" not in look.keys:
        shown.append(("Ctrl-C", "let agents finish, twice: end them"))
    width = max(len(keys) for keys, _ in shown)
    lines = []
    for keys, what in shown:
        line = look.line("  ", (f"{keys:<{width}}", "bold"), "  ") if not look.tiny else look.line((keys, "bold"), " ")
        lines.append(line.fill(what, look.width - line.width).trimmed())
    if look.keys & {"a", "x", "r", "h", "P"}:
        lines.append(look.line(("  what changes something asks first, in the last line", "dim")).trimmed())
    return lines


def window(lines: Sequence[Line], room: int, top: int) -> tuple[list[Line], int]:
    """Return *room* of *lines* from *top* on, and the *top* that there is: never past the ends."""
    top = max(0, min(top, len(lines) - room))
    return list(lines[top : top + room]), top


def around(lines: Sequence[Line], room: int, selected: Target | None) -> list[Line]:
    """Return *room* of *lines* with the selected one among them."""
    at = next((n for n, line in enumerate(lines) if selected is not None and line.target == selected), 0)
    return window(lines, room, at - room // 2)[0]
