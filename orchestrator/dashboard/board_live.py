"""The view of ``dashboard`` that goes on by itself, on stdout.

Reading order: ``board_live`` (what the command line calls), ``BoardLive``. Whatever the view changed on the terminal is
undone when it ends, by whatever way: return, exception, Ctrl-C, SIGTERM, SIGHUP; and for the time of a Ctrl-Z.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from queue import Empty, SimpleQueue
from typing import IO, Any

from orchestrator.dashboard import board
from orchestrator.dashboard.board import Away
from orchestrator.dashboard.controls import Controls, Subject, Target
from orchestrator.dashboard.faults import is_slow, reason_of
from orchestrator.dashboard.filtering import filtered
from orchestrator.dashboard.frame import Line, Look, Paint
from orchestrator.dashboard.keyboard import Desk, Keyboard
from orchestrator.dashboard.signals import Signals
from orchestrator.dashboard.terminal import Screen, examine, foreground, size
from orchestrator.domain.snapshot import Snapshot

REST_SECONDS = 1.0
RANK_SECONDS = 5.0
"""Rows change places at most this often: whoever reads must find them again."""
TRIES = (1, 2, 4, 8, 10)
"""Seconds before the next try while the database is away; the last one stays."""

SLOW_READ = 0.1
"""A snapshot that takes longer than this many seconds is read less often: ten times its own time apart."""


def _now() -> datetime:
    return datetime.now().astimezone()


def board_live(
    stream: IO[str],
    read: Callable[[], Snapshot],
    *,
    refresh: float = 1.0,
    once: bool = False,
    plain: bool = False,
    stdin: IO[str] | None = None,
    desk: Desk | None = None,
) -> int:
    """Show the queue on *stream* until it is left, and return the exit code: 0, 130 for Ctrl-C, 143 for SIGTERM.

    With *once*, or where *stream* is no terminal, one frame is printed. *read* is one snapshot; it is called from a
    thread of its own and may take its time. What the first one raises is raised here; later ones only mean that the
    picture grows old. Keys act through *desk*.
    """
    judged = examine(stream, plain=plain)
    if once or not judged.live:
        snapshot = read()
        columns, rows = size(stream)
        look = Look(columns, rows - 1 if judged.live else rows, ascii=judged.ascii)
        paint = judged.paint if judged.live else Paint.NONE
        lines = board.render(snapshot, snapshot.taken_at, look)
        stream.write("".join(f"{line.painted(paint)}\n" for line in lines))
        stream.flush()
        return 0
    view = BoardLive(stream, read, judged.paint, ascii=judged.ascii, refresh=refresh, desk=desk)
    return view.run(sys.stdin if stdin is None else stdin)


class BoardLive:
    """The loop of ``dashboard``: one frame for each snapshot, key and resize."""

    def __init__(
        self,
        stream: IO[str],
        read: Callable[[], Snapshot],
        paint: Paint = Paint.COLOR,
        *,
        ascii: bool = False,  # noqa: A002
        refresh: float = 1.0,
        desk: Desk | None = None,
    ) -> None:
        self._stream = stream
        self._read = read
        self._refresh = refresh
        self._ascii = ascii
        self._screen = Screen(stream, paint, full=True)
        # A SimpleQueue may be put to from a signal handler.
        self._inbox: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._ended = threading.Event()
        self._snapshot: Snapshot | None = None
        self._received = 0.0
        self._ranked_at = float("-inf")
        self._order: list[int] = []
        self._pace = refresh
        self._away: Away | None = None
        self._rows: list[Target] = []
        controls = Controls(
            desk.deeds if desk is not None else (),
            desk.pages if desk is not None else (),
            panes=True,
            filters=True,
            freezes=True,
            quits=True,
        )
        self._keyboard = Keyboard(controls, desk, self._inbox.put, reason_of)
        self._signals = Signals({})

    def run(self, stdin: IO[str] | None) -> int:
        """Show until ``q``, Ctrl-C, SIGTERM or SIGHUP; return the exit code."""
        first = self._read()
        self._take(first)
        reader = threading.Thread(target=self._read_on, args=(first,), name="snapshots", daemon=True)
        with self._terminal(stdin):
            self._draw()
            reader.start()
            while True:
                code = self._step()
                if code is not None:
                    return code

    @contextlib.contextmanager
    def _terminal(self, stdin: IO[str] | None) -> Iterator[None]:
        def puts(what: str, value: Any = None) -> Callable[[], None]:
            return lambda: self._inbox.put((what, value))

        self._signals = Signals(
            {
                "SIGINT": puts("end", 130),
                "SIGTERM": puts("end", 143),
                "SIGHUP": puts("end", 129),
                "SIGWINCH": puts("redraw"),
                "SIGCONT": puts("continue"),
                "SIGTSTP": puts("suspend"),
            },
            chain=False,
        )
        self._signals.install()
        try:
            self._keyboard.start(stdin, self._stream)
            yield
        finally:
            self._ended.set()
            self._keyboard.close()
            self._screen.close()
            self._signals.remove()

    def _step(self) -> int | None:
        """Wait for what happens next and show it; return the exit code when that is the end."""
        try:
            what, value = self._inbox.get(timeout=REST_SECONDS)
        except Empty:
            what, value = "rest", None
        if what == "end":
            return int(value)
        if what == "snapshot":
            self._away = None
            if not self._keyboard.controls.frozen:
                self._take(value)
        elif what == "away":
            self._away = value
        elif what == "suspend":
            self._keyboard.give_back()
            self._screen.close()
            self._signals.stop_here()
            return None
        elif what == "continue":
            self._keyboard.take()
            self._screen.redraw()
        elif what == "redraw":
            self._screen.redraw()
        elif what != "rest" and self._keyboard.take_in(what, value, lambda: self._rows, self._subject):
            return 0
        if what != "rest" or self._moves:
            self._draw()
        return None

    @property
    def _moves(self) -> bool:
        """Whether the picture changes without anything coming in: an outage's clock, a page, a word that has its time."""
        controls = self._keyboard.controls
        return self._away is not None or controls.page is not None or bool(controls.said) or self._keyboard.lost

    def _take(self, snapshot: Snapshot) -> None:
        """Take a new snapshot. Rows keep their places for a while, and as long as the cursor is on one."""
        self._received = time.monotonic()
        keep = self._keyboard.controls.selected is not None or self._received - self._ranked_at < RANK_SECONDS
        if not keep:
            self._ranked_at = self._received
        ordered = board.ranked(snapshot, snapshot.taken_at, self._order if keep else ())
        self._order = [task.id for task in ordered.running]
        self._snapshot = snapshot

    def _read_on(self, first: Snapshot) -> None:
        """Read snapshots until the end, at the asked pace or slower; the thread of its own."""
        self._pace = self._next_pace(first)
        tries = 0
        since: datetime | None = None
        while not self._ended.wait(self._pace if not tries else TRIES[min(tries, len(TRIES)) - 1]):
            try:
                snapshot = self._read()
            except Exception as error:  # noqa: BLE001 - the picture grows old, whatever the reason
                since = since or _now()
                tries += 1
                wait = TRIES[min(tries, len(TRIES)) - 1]
                self._inbox.put(
                    ("away", Away(since, reason_of(error), _now() + timedelta(seconds=wait), is_slow(error)))
                )
                continue
            tries, since = 0, None
            self._pace = self._next_pace(snapshot)
            self._inbox.put(("snapshot", snapshot))

    def _next_pace(self, snapshot: Snapshot) -> float:
        took = snapshot.read_seconds or 0.0
        return max(self._refresh, took * 10) if took > SLOW_READ else self._refresh

    def _draw(self) -> None:
        snapshot = self._snapshot
        if snapshot is None or not foreground(self._stream):
            return
        if self._keyboard.lost and self._keyboard.take():
            self._screen.redraw()
        look = Look(*size(self._stream), ascii=self._ascii, keys=self._keyboard.names)
        controls = self._keyboard.controls
        page = self._keyboard.page_lines(look, look.height - 1)
        if page is not None:
            lines = page
        elif self._away is not None:
            shown = filtered(snapshot, controls.filter)
            lines = board.render_away(shown, self._away, _now(), look, refresh=self._pace, order=self._order)
        else:
            lines = self._board(filtered(snapshot, controls.filter), look)
        last = self._keyboard.last_line(look) if look.keys else None
        if last is not None:
            # In the place of the keys, which is the last line; on a small screen, which has none, of whatever is there.
            lines = [
                *lines[: look.height - 1 if page is not None or look.tiny or look.height < 15 else -1],
                last.trimmed(),
            ]
        self._screen.draw(lines, look.width, look.height)

    def _board(self, snapshot: Snapshot, look: Look) -> list[Line]:
        if not self._keyboard.controls.frozen:
            now = snapshot.taken_at + timedelta(seconds=time.monotonic() - self._received)
            return self._frame(snapshot, now, look)
        age = time.monotonic() - self._received
        top = Line(look).fill(f"frozen {int(age)}s; p goes on", look.width, "bold yellow")
        below = replace(look, height=look.height - 1)
        return [top, *self._frame(snapshot, snapshot.taken_at, below)]

    def _frame(self, snapshot: Snapshot, now: datetime, look: Look) -> list[Line]:
        controls = self._keyboard.controls
        lines = board.render(
            snapshot,
            now,
            look,
            refresh=self._pace,
            selected=controls.selected,
            order=self._order,
            pane=controls.pane,
        )
        rows = lines
        if controls.pane is not None:  # the cursor reaches what does not fit, too
            rows = board.pane_lines(board.ranked(snapshot, now, self._order), now, look, controls.pane)
        self._rows = [line.target for line in rows if line.target is not None]
        return lines

    def _subject(self, target: Target) -> Subject | None:
        return None if self._snapshot is None else board.subject_of(self._snapshot, target, self._snapshot.taken_at)
