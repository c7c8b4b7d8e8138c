"""The view of ``run`` that goes on by itself, on stderr.

Reading order: ``run_live`` (what the command line calls), ``RunPlain``, ``RunLive``. Whatever the view changed on the
terminal is undone when it ends, and for the time of a Ctrl-Z.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from queue import Empty, SimpleQueue
from typing import IO, Any, Protocol

from orchestrator.dashboard import run_view
from orchestrator.dashboard.controls import Controls, Page, Subject, Target
from orchestrator.dashboard.faults import reason_of
from orchestrator.dashboard.frame import Line, Look, Paint, widest
from orchestrator.dashboard.keyboard import Desk, Keyboard
from orchestrator.dashboard.plain import PlainLines
from orchestrator.dashboard.signals import Signals
from orchestrator.dashboard.terminal import RELEASE, Screen, examine, foreground, size
from orchestrator.domain.snapshot import Question, RunEvent, RunView

FRAME_SECONDS = 0.25
REST_SECONDS = 1.0


class RunOutput(Protocol):
    """Where a ``run`` shows what it does. Every call is safe from any thread, returns at once and never raises."""

    def start(self) -> None:
        """Begin."""

    def event(self, event: RunEvent) -> None:
        """Show a change of state as a line that stays."""

    def changed(self) -> None:
        """Say that the view has changed otherwise: progress, output, spend."""

    def stop(self, *, keep: bool = False) -> None:
        """End, with the terminal as it was. *keep* leaves the last region on the screen."""

    def release(self) -> None:
        """Set the terminal as it was before the process ends at once; may be called in a signal handler."""


def run_live(
    stream: IO[str],
    source: Callable[[], RunView],
    *,
    plain: bool = False,
    clock: Callable[[], datetime] | None = None,
    stdin: IO[str] | None = None,
    desk: Desk | None = None,
) -> RunLive | RunPlain:
    """Return the output for a ``run`` on *stream*: a view on a terminal, else plain lines. The caller starts it.

    *source* is called from the output's own thread. *clock* is the time that the view's instants are compared with
    (the database's, where it differs). Keys are read from *stdin* (none without it) and act through *desk*.
    """
    judged = examine(stream, plain=plain)
    clock = clock or _now
    if judged.live:
        return RunLive(stream, source, judged.paint, ascii=judged.ascii, clock=clock, stdin=stdin, desk=desk)
    return RunPlain(stream, source, ascii=judged.ascii, clock=clock)


def _wait_for_line(stdin: IO[str], gone: Callable[[], bool]) -> bool:
    """Wait until a line can be read from *stdin*; False when *gone* says so first."""
    try:
        stdin.fileno()
    except (OSError, ValueError):
        return True
    while not select.select([stdin], [], [], 1.0)[0]:
        if gone():
            return False
    return True


def _now() -> datetime:
    return datetime.now().astimezone()


class RunPlain:
    """Plain lines, each flushed. A stream that is gone is let go: the run does not end for it."""

    def __init__(
        self,
        stream: IO[str],
        source: Callable[[], RunView],
        *,
        ascii: bool = False,  # noqa: A002
        clock: Callable[[], datetime] = _now,
    ) -> None:
        self._stream = stream
        self._source = source
        self._clock = clock
        self._lines = PlainLines(ascii=ascii)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._gone = False
        self._thread = threading.Thread(target=self._tick, name="plain-lines", daemon=True)

    def start(self) -> None:
        """Begin to watch for silence."""
        self._thread.start()

    def event(self, event: RunEvent) -> None:
        """Write the line of *event*, as far as the size of the plan allows."""
        view = self._source()
        with self._lock:
            self._write(self._lines.event(event, view))

    def changed(self) -> None:
        """Do nothing: plain lines tell of changes of state only."""

    def stop(self, *, keep: bool = False) -> None:
        """End the watching."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def release(self) -> None:
        """Do nothing: plain lines change nothing on a terminal."""

    def ask(self, question: Question, gone: Callable[[], bool] | None = None) -> str | None:
        """Return None: nobody is there to answer."""
        return None

    def _tick(self) -> None:
        while not self._ended.wait(1.0):
            view = self._source()
            with self._lock:
                self._write(self._lines.tick(view, self._clock()))

    def _write(self, lines: list[str]) -> None:
        if self._gone or not lines:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            for text in lines:
                self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
                self._stream.flush()
        except (OSError, ValueError):
            self._gone = True


class RunLive:
    """The region of a ``run`` and the history above it, drawn by a thread of its own.

    That thread alone has the screen and the keys; everybody else puts words into its inbox.
    """

    def __init__(
        self,
        stream: IO[str],
        source: Callable[[], RunView],
        paint: Paint = Paint.COLOR,
        *,
        ascii: bool = False,  # noqa: A002
        clock: Callable[[], datetime] = _now,
        stdin: IO[str] | None = None,
        desk: Desk | None = None,
    ) -> None:
        self._stream = stream
        self._source = source
        self._clock = clock
        self._ascii = ascii
        self._stdin = stdin
        self._screen = Screen(stream, paint, full=False)
        # A SimpleQueue may be put to from a signal handler; an Event or a Queue may not.
        self._inbox: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._history: list[RunEvent] = []
        self._lock = threading.Lock()
        self._told = False
        self._ended = False
        self._paused = False
        self._suspended = False
        self._asked: str | None = None
        pages = (desk.pages | {"tree"}) if desk is not None else {"tree"}
        controls = Controls(desk.deeds if desk is not None else (), pages)
        self._keyboard = Keyboard(controls, desk, self._inbox.put, reason_of)
        self._signals = Signals(
            {
                "SIGWINCH": lambda: self._inbox.put(("redraw", None)),
                "SIGCONT": lambda: self._inbox.put(("continue", None)),
                "SIGTSTP": lambda: self._inbox.put(("suspend", None)),
            }
        )
        self._thread = threading.Thread(target=self._draw_on, name="run-view", daemon=True)

    def start(self) -> None:
        """Draw the first frame, then go on by itself. In the main thread resizes and Ctrl-Z are seen at once."""
        self._signals.install()
        self._keyboard.start(self._stdin, self._stream)
        self._thread.start()

    def event(self, event: RunEvent) -> None:
        """Let *event* scroll up above the region."""
        self._inbox.put(("event", event))

    def changed(self) -> None:
        """Draw soon."""
        if not self._told:
            self._told = True
            self._inbox.put(("changed", None))

    def stop(self, *, keep: bool = False) -> None:
        """Draw what is left, end, give the terminal back. May be called twice."""
        if not self._ended:
            self._ended = True
            self._inbox.put(("end", None))
            if self._thread.is_alive() and self._thread is not threading.current_thread():
                self._thread.join(5.0)
            self._keyboard.close()
            self._take_events()
            with contextlib.suppress(Exception), self._lock:
                self._draw(keys=False)
        with self._lock:
            self._screen.close(keep=keep)
        self._signals.remove()

    def release(self) -> None:
        """Set the terminal as it was before the process ends at once; may be called in a signal handler."""
        self._keyboard.give_back(now=True)
        if self._screen.is_open:
            with contextlib.suppress(OSError, ValueError):
                os.write(self._stream.fileno(), RELEASE)

    def ask(self, question: Question, gone: Callable[[], bool] | None = None) -> str | None:
        """Ask *question* in the region's place and return the line that was typed, None at end of file.

        None too as soon as *gone*, asked once a second, says that it is answered elsewhere. A number chooses the choice
        of that number; an empty line takes the default. Blocks, so it belongs in a thread that may wait.
        """
        with self._lock:
            self._paused = True
            self._keyboard.give_back()
            self._screen.close()
        try:
            look = Look(*size(self._stream), ascii=self._ascii)
            lines = [Line(look).symbol("waiting").add(f" {question.task_id} ").fill(question.text, look.width - 14)]
            for n, choice in enumerate(question.choices, 1):
                lines.append(look.line(f"  [{n}] ").fill(choice, look.width - 6))
            self._asked = "".join(f"{line.trimmed().text}\n" for line in lines) + "answer: "
            self._stream.write(self._asked)
            self._stream.flush()
            stdin = self._stdin or sys.stdin
            if gone is not None and not _wait_for_line(stdin, gone):
                self._stream.write("answered elsewhere\n")
                return None
            typed = stdin.readline()
        except (OSError, ValueError):
            return None
        finally:
            self._asked = None
            self._paused = False
            self.changed()
        if not typed:
            return None
        text = typed.strip()
        if text.isdigit() and 1 <= int(text) <= len(question.choices):
            return question.choices[int(text) - 1]
        return text or question.default

    def _draw_on(self) -> None:
        drawn = due = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= due:
                with contextlib.suppress(Exception), self._lock:  # a view must never end the work that it shows
                    self._draw()
                drawn = time.monotonic()
                due = drawn + REST_SECONDS
                continue
            try:
                what, value = self._inbox.get(timeout=due - now)
            except Empty:
                continue
            if what == "end":
                return
            with contextlib.suppress(Exception):
                due = min(due, drawn + FRAME_SECONDS if self._take_in(what, value) else 0.0)

    def _take_in(self, what: str, value: Any) -> bool:
        """Take a word from the inbox; return whether the frame that shows it has time."""
        if what == "event":
            self._history.append(value)
            return True
        if what == "changed":
            self._told = False
            return True
        if what == "suspend":
            with self._lock:
                self._keyboard.give_back()
                self._screen.close(keep=True)
            # The main thread stops us a moment later: until it goes on, the terminal is not ours to draw on.
            self._suspended = True
            self._signals.stop_here()
        elif what == "continue":
            self._suspended = False
            if not self._paused:
                self._keyboard.take()
            elif self._asked is not None:  # the shell has written over it, and it still waits for a line
                self._stream.write(self._asked)
                self._stream.flush()
            self._screen.redraw()
        elif what == "redraw":
            self._screen.redraw()
        else:
            self._keyboard.take_in(what, value, self._rows, self._subject)
        return False

    def _take_events(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                what, value = self._inbox.get_nowait()
                if what == "event":
                    self._history.append(value)

    def _look(self) -> Look:
        return Look(*size(self._stream), ascii=self._ascii, keys=self._keyboard.names)

    @property
    def _is_tree(self) -> bool:
        return self._keyboard.controls.page == Page("tree")

    def _rows(self) -> list[Target]:
        return run_view.targets(self._source(), self._clock(), self._look(), tree=self._is_tree)

    def _subject(self, target: Target) -> Subject | None:
        return run_view.subject_of(self._source(), target, self._clock())

    def _draw(self, *, keys: bool = True) -> None:
        if self._paused or (self._suspended and keys):
            return
        view, now, look = self._source(), self._clock(), self._look()
        here = foreground(self._stream)
        if here and keys and self._keyboard.lost and self._keyboard.take():
            self._screen.redraw()
        names = widest((task.name for task in view.tasks), 4, 40)
        ids = len(str(max((task.id for task in view.tasks), default=100)))
        history = (run_view.history(event, now, look, names, ids) for event in self._history)
        lines: list[Line] = [line for line in history if line is not None]
        if not here:  # a region that is rewritten would fight with the shell's prompt
            self._screen.write_lines(lines)
        elif keys:
            page = self._keyboard.page_lines(look, max(1, run_view.height_of(look) - 3))
            frame = run_view.render(
                view,
                now,
                look,
                selected=self._keyboard.controls.selected if page is None else None,
                page=page,
                tree=self._is_tree,
                last=self._keyboard.last_line(look) if look.keys else None,
            )
            self._screen.draw(frame, look.width, look.height, lines)
        else:
            self._screen.draw(run_view.render(view, now, look), look.width, look.height, lines)
        self._history.clear()
