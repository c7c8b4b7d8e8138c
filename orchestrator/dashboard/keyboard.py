"""The keys of a live view: where they come from, what they open, and the changes that they ask for.

``Keyboard`` joins ``Controls`` (what keys mean), ``KeyReader`` (where they come from) and a ``Desk`` (what can be read and
done). Whatever needs the database runs in a thread of its own and comes back through the view's inbox, so that a slow
database never holds up a frame or a key.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol

from orchestrator.dashboard import keys
from orchestrator.dashboard.controls import Asked, Controls, Page, Subject, Target, help_lines, window
from orchestrator.dashboard.frame import Line, Look, rule

PAGE_SECONDS = 1.0
"""A page that is open is read again this often."""
SAID_SECONDS = 6.0
"""What came of a key stands in the last line for this long."""


class Desk(Protocol):
    """What keys can do beyond the view. Both methods may wait for the database, and raise what it raises."""

    deeds: frozenset[str]
    """Of answer, approve, deny, cancel, retry, hold, release, pause, resume."""
    pages: frozenset[str]
    """Of show, why, logs."""

    def page(self, what: str, task_id: int, look: Look) -> list[Line]:
        """Return the page *what* of a task."""

    def do(self, asked: Asked) -> str:
        """Do what was asked and said yes to, with its entry in the audit trail; return in a few words what came of it."""


class Keyboard:
    """The keys of one view. All methods belong to the view's thread, *put* is called from any."""

    def __init__(
        self,
        controls: Controls,
        desk: Desk | None,
        put: Callable[[tuple[str, Any]], None],
        reason: Callable[[Exception], str],
    ) -> None:
        self.controls = controls
        self._desk = desk
        self._put = put
        self._reason = reason
        self._reader: keys.KeyReader | None = None
        self._page: list[Line] = []
        self._page_of: tuple[Page, int, bool] | None = None
        self._page_fault = ""
        self._page_at = float("-inf")
        self._reading = False
        self._said_at = 0.0

    # -- the terminal -------------------------------------------------------------------------------------------------

    def start(self, stdin: IO[str] | None, stream: IO[str]) -> None:
        """Read keys from *stdin*, where it and *stream* are one terminal; else there are none."""
        if stdin is not None and keys.usable(stdin, stream):
            self._reader = keys.KeyReader(
                stdin, lambda name: self._put(("key", name)), lambda text: self._put(("paste", text))
            )
            self._reader.start()

    @property
    def names(self) -> frozenset[str]:
        """The keys that work now, for ``Look.keys``."""
        return self.controls.names if self._reader is not None else frozenset()

    @property
    def lost(self) -> bool:
        """Whether there are keys, and the terminal is not set for them: it was given back, or others set it anew."""
        return self._reader is not None and not self._reader.taken

    def take(self) -> bool:
        """Set the terminal for keys, if we are in its foreground; return whether it is."""
        if self._reader is None:
            return False
        self._reader.take()
        return self._reader.taken

    def give_back(self, *, now: bool = False) -> None:
        """Set the terminal as it was, for the time of a stop. With *now* it is safe in a signal handler."""
        if self._reader is not None:
            self._reader.give_back(now=now)

    def close(self) -> None:
        """Read no more; the terminal is as it was."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    # -- what comes in ------------------------------------------------------------------------------------------------

    def take_in(
        self, what: str, value: Any, rows: Callable[[], Sequence[Target]], subject: Callable[[Target], Subject | None]
    ) -> bool:
        """Take a ``key``, a ``paste``, or what a thread of ours has brought; return whether the view is to be left."""
        if what == "paste":
            self.controls.paste(value)
        elif what == "said":
            self._say(value)
        elif what == "page":
            self._reading = False
            wanted, lines, fault = value
            if wanted[0] == self.controls.page:  # not of one that was left meanwhile
                self._page_fault = fault
                if lines is not None:
                    self._page_of, self._page = wanted, lines
        elif what == "key":
            page = self.controls.page
            done = self.controls.key(value, rows(), subject)
            if self.controls.said:
                self._said_at = time.monotonic()
            if self.controls.page != page:
                self._page_at = float("-inf")
                self._page_of, self._page_fault = None, ""
            if isinstance(done, Asked):
                self._do(done)
            return done == "quit"
        return False

    def _say(self, text: str) -> None:
        self.controls.said = text
        self._said_at = time.monotonic()

    def _do(self, asked: Asked) -> None:
        desk = self._desk
        assert desk is not None
        self._say(f"{asked.deed} {asked.subject.title} …" if asked.subject.task_id else f"{asked.deed} …")

        def work() -> None:
            try:
                said = desk.do(asked)
            except Exception as error:  # noqa: BLE001 - told where the key was struck
                said = f"{asked.deed}: {self._reason(error)}"
            self._put(("said", said))

        threading.Thread(target=work, name=asked.deed, daemon=True).start()

    # -- what is shown ------------------------------------------------------------------------------------------------

    def last_line(self, look: Look) -> Line | None:
        """Return what stands in the last line in place of the keys, None for the keys."""
        if self.controls.said and time.monotonic() - self._said_at > SAID_SECONDS:
            self.controls.said = ""
        return self.controls.last_line(look)

    def page_lines(self, look: Look, room: int) -> list[Line] | None:
        """Return the page that is open in *room* rows, None without one; ``tree`` is the view's own."""
        page = self.controls.page
        if page is None or page.what == "tree":
            return None
        if page.what == "keys":
            title, lines = "keys", help_lines(look)
        else:
            title, lines = f"{page.what} {page.task_id}", self._read(page, look)
        head = [rule(look, title, "Esc back" if not look.tiny else "")]
        if self._page_fault and page.what != "keys":
            text = f"not read again: {self._page_fault}" if self._page_of else self._page_fault
            head.append(Line(look).fill(text, look.width, "bold red"))
        room -= len(head)
        controls, last = self.controls, max(0, len(lines) - room)
        if page.what == "logs":  # the end is what one looks at
            shown, top = window(lines, room, last + controls.scroll)
            controls.scroll = top - last
        else:
            shown, controls.scroll = window(lines, room, controls.scroll)
        return [*head, *(line.trimmed() for line in shown)]

    def _read(self, page: Page, look: Look) -> list[Line]:
        wanted = (page, look.width, look.ascii)
        known = self._page_of == wanted
        if not self._reading and (not known or time.monotonic() - self._page_at >= PAGE_SECONDS):
            self._reading = True
            self._page_at = time.monotonic()
            threading.Thread(target=self._fetch, args=(wanted, look), name="page", daemon=True).start()
        if known:
            return self._page
        return [] if self._page_fault else [look.line((f"reading {look.ellipsis}", "dim"))]

    def _fetch(self, wanted: tuple[Page, int, bool], look: Look) -> None:
        page, desk = wanted[0], self._desk
        lines: list[Line] | None = None
        fault = ""
        try:
            assert desk is not None
            assert page.task_id is not None
            lines = desk.page(page.what, page.task_id, look)
        except Exception as error:  # noqa: BLE001 - shown above the page
            fault = self._reason(error)
        self._put(("page", (wanted, lines, fault)))
