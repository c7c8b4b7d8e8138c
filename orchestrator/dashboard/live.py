"""Views that go on by themselves: ``run`` on stderr, ``dashboard`` on stdout.

Reading order: ``run_live`` and ``board_live`` (what the command line calls), ``RunLive``, ``RunPlain``, ``BoardLive``.
Whatever a view changed on the terminal is undone when it ends, by whatever way: return, exception, Ctrl-C, SIGTERM,
SIGHUP; and for the time of a Ctrl-Z.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, Any, Protocol

from orchestrator.dashboard import board, keys, run_view
from orchestrator.dashboard.board import Away
from orchestrator.dashboard.frame import Line, Look, Paint, rule, widest
from orchestrator.dashboard.plain import PlainLines
from orchestrator.dashboard.terminal import Screen, examine, foreground, size
from orchestrator.database.transient import classify, reason
from orchestrator.domain.snapshot import Question, RunEvent, RunView, Snapshot
from orchestrator.errors import OrchestratorError

FRAME_SECONDS = 0.25
REST_SECONDS = 1.0
RANK_SECONDS = 5.0
"""Rows change places at most this often: whoever reads must find them again."""
TRIES = (1, 2, 4, 8, 10)
"""Seconds before the next try while the database is away; the last one stays."""

SLOW_READ = 0.1
"""A snapshot that takes longer than this many seconds is read less often: ten times its own time apart."""


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


def run_live(
    stream: IO[str], source: Callable[[], RunView], *, plain: bool = False, clock: Callable[[], datetime] | None = None
) -> RunLive | RunPlain:
    """Return the output for a ``run`` on *stream*: a view on a terminal, else plain lines. The caller starts it.

    *source* is called from the output's own thread. *clock* is the time that the view's instants are compared with
    (the database's, where it differs).
    """
    judged = examine(stream, plain=plain)
    clock = clock or _now
    if judged.live:
        return RunLive(stream, source, judged.paint, ascii=judged.ascii, clock=clock)
    return RunPlain(stream, source, ascii=judged.ascii, clock=clock)


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

    def ask(self, question: Question) -> str | None:
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
    """The region of a ``run`` and the history above it, drawn by a thread of its own."""

    def __init__(
        self,
        stream: IO[str],
        source: Callable[[], RunView],
        paint: Paint = Paint.COLOR,
        *,
        ascii: bool = False,  # noqa: A002
        clock: Callable[[], datetime] = _now,
        stdin: IO[str] | None = None,
    ) -> None:
        self._stream = stream
        self._source = source
        self._clock = clock
        self._ascii = ascii
        self._stdin = sys.stdin if stdin is None else stdin
        self._screen = Screen(stream, paint, full=False)
        self._events: SimpleQueue[RunEvent] = SimpleQueue()
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._resized = False
        self._paused = False
        self._signals = _Signals({})
        self._thread = threading.Thread(target=self._draw_on, name="run-view", daemon=True)

    def start(self) -> None:
        """Draw the first frame, then go on by itself. In the main thread resizes and Ctrl-Z are seen at once."""
        self._signals = _Signals(
            {"SIGWINCH": self._on_resize, "SIGCONT": self._on_continue, "SIGTSTP": self._on_stop_key}
        )
        self._signals.install()
        self._thread.start()

    def event(self, event: RunEvent) -> None:
        """Let *event* scroll up above the region."""
        self._events.put(event)
        self._wake.set()

    def changed(self) -> None:
        """Draw soon."""
        self._wake.set()

    def stop(self, *, keep: bool = False) -> None:
        """Draw what is left, end, give the terminal back. May be called twice."""
        if not self._ended.is_set():
            self._ended.set()
            self._wake.set()
            if self._thread.is_alive() and self._thread is not threading.current_thread():
                self._thread.join(5.0)
            with contextlib.suppress(Exception):
                self._draw()
        with self._lock:
            self._screen.close(keep=keep)
        self._signals.remove()

    def ask(self, question: Question) -> str | None:
        """Ask *question* in the region's place and return the line that was typed, None at end of file.

        A number chooses the choice of that number; an empty line takes the default. Blocks until a line is there, so it
        belongs in a thread that may wait.
        """
        with self._lock:
            self._paused = True
            self._screen.close()
        try:
            look = Look(*size(self._stream), ascii=self._ascii)
            lines = [Line(look).symbol("waiting").add(f" {question.task_id} ").fill(question.text, look.width - 14)]
            for n, choice in enumerate(question.choices, 1):
                lines.append(look.line(f"  [{n}] ").fill(choice, look.width - 6))
            self._stream.write("".join(f"{line.trimmed().text}\n" for line in lines) + "answer: ")
            self._stream.flush()
            typed = self._stdin.readline()
        except (OSError, ValueError):
            return None
        finally:
            self._paused = False
            self._wake.set()
        if not typed:
            return None
        text = typed.strip()
        if text.isdigit() and 1 <= int(text) <= len(question.choices):
            return question.choices[int(text) - 1]
        return text or question.default

    def _draw_on(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            with contextlib.suppress(Exception):  # a view must never end the work that it shows
                self._draw()
            self._ended.wait(max(0.0, 0 if self._resized else FRAME_SECONDS - (time.monotonic() - began)))
            self._wake.wait(REST_SECONDS - FRAME_SECONDS)
            self._wake.clear()

    def _draw(self) -> None:
        with self._lock:
            if self._paused:
                return
            view = self._source()
            now = self._clock()
            look = Look(*size(self._stream), ascii=self._ascii)
            if self._resized:
                self._resized = False
                self._screen.redraw()
            names = widest((task.name for task in view.tasks), 4, 40)
            ids = len(str(max((task.id for task in view.tasks), default=100)))
            lines = []
            with contextlib.suppress(Empty):
                while True:
                    line = run_view.history(self._events.get_nowait(), now, look, names, ids)
                    if line is not None:
                        lines.append(line)
            if foreground(self._stream):
                self._screen.draw(run_view.render(view, now, look), look.width, look.height, lines)
            else:  # a region that is rewritten would fight with the shell's prompt
                self._screen.write_lines(lines)

    def _on_resize(self) -> None:
        self._resized = True
        self._wake.set()

    def _on_stop_key(self) -> None:
        # The drawing thread may be in the middle of a frame; a terminal that does not take it must not block Ctrl-Z.
        if self._lock.acquire(timeout=1.0):
            try:
                self._screen.close(keep=True)
                self._signals.stop_here()
            finally:
                self._lock.release()

    def _on_continue(self) -> None:
        self._screen.redraw()
        self._wake.set()


class _Signals:
    """Handlers for the time of a view, given back at its end. Does nothing outside the main thread.

    With *chain* a handler that was there before is called after ours.
    """

    def __init__(self, actions: dict[str, Callable[[], None]], *, chain: bool = True) -> None:
        self._chain = chain
        self._actions = {getattr(signal, name): action for name, action in actions.items() if hasattr(signal, name)}
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Set the handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._actions:
            before = signal.getsignal(number)
            if number == signal.SIGTSTP and before is not signal.SIG_DFL:
                continue  # ignored by whoever started us, or somebody else's
            self._before[number] = before
            signal.signal(number, self._on_signal)

    def remove(self) -> None:
        """Give the handlers back."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            with contextlib.suppress(TypeError, ValueError):
                signal.signal(number, before)
        self._before = {}

    def stop_here(self) -> None:
        """Really stop the process, as Ctrl-Z means it; returns when it is continued."""
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._actions[signal.Signals(number)]()
        before = self._before.get(number)
        if self._chain and callable(before):
            before(number, frame)


def board_live(
    stream: IO[str],
    read: Callable[[], Snapshot],
    *,
    refresh: float = 1.0,
    once: bool = False,
    plain: bool = False,
    stdin: IO[str] | None = None,
    details: Callable[[int, Look], list[Line]] | None = None,
) -> int:
    """Show the queue on *stream* until it is left, and return the exit code: 0, 130 for Ctrl-C, 143 for SIGTERM.

    With *once*, or where *stream* is no terminal, one frame is printed. *read* is one snapshot; it is called from a
    thread of its own and may take its time. What the first one raises is raised here; later ones only mean that the
    picture grows old. *details* are the lines of one task, for Enter; it runs in the view's thread.
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
    view = BoardLive(stream, read, judged.paint, ascii=judged.ascii, refresh=refresh, details=details)
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
        details: Callable[[int, Look], list[Line]] | None = None,
    ) -> None:
        self._stream = stream
        self._read = read
        self._refresh = refresh
        self._details = details
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
        self._frozen = False
        self._selected: int | None = None
        self._open: int | None = None
        self._help = False
        self._ids: list[int] = []
        self._keys: keys.KeyReader | None = None
        self._key_names: frozenset[str] = frozenset()
        self._signals = _Signals({})

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
        def ends(code: int) -> Callable[[], None]:
            return lambda: self._inbox.put(("end", code))

        self._signals = _Signals(
            {
                "SIGINT": ends(130),
                "SIGTERM": ends(143),
                "SIGHUP": ends(129),
                "SIGWINCH": lambda: self._inbox.put(("resize", None)),
                "SIGCONT": lambda: self._inbox.put(("continue", None)),
                "SIGTSTP": self._on_stop_key,
            },
            chain=False,
        )
        self._signals.install()
        try:
            if stdin is not None and keys.usable(stdin, self._stream):
                self._keys = keys.KeyReader(stdin, lambda name: self._inbox.put(("key", name)))
                self._key_names = frozenset({"select", "p", "?", "q"} | ({"open"} if self._details else set()))
                self._keys.start()
            yield
        finally:
            self._ended.set()
            if self._keys is not None:
                self._keys.close()
            self._screen.close()
            self._signals.remove()

    def _step(self) -> int | None:
        """Wait for what happens next and show it; return the exit code when that is the end."""
        try:
            what, value = self._inbox.get(timeout=REST_SECONDS)
        except Empty:
            if self._regain() or self._away is not None:
                self._draw()
            return None
        if what == "end":
            return int(value)
        if what == "key" and self._key(value):
            return 0
        if what == "snapshot":
            self._away = None
            if not self._frozen:
                self._take(value)
        elif what == "away":
            self._away = value
        elif what in ("resize", "continue"):
            self._screen.redraw()
        self._regain()
        self._draw()
        return None

    def _regain(self) -> bool:
        """Set the terminal for keys anew after a stop, once in the foreground; return whether that was to be done."""
        if self._keys is None or self._keys.taken or not foreground(self._stream):
            return False
        self._keys.take()
        self._screen.redraw()
        return self._keys.taken

    def _take(self, snapshot: Snapshot) -> None:
        """Take a new snapshot. Rows keep their places for a while, and as long as the cursor is on one."""
        self._received = time.monotonic()
        keep = self._selected is not None or self._received - self._ranked_at < RANK_SECONDS
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
        look = Look(*size(self._stream), ascii=self._ascii, keys=self._key_names)
        if self._away is not None:
            lines = board.render_away(snapshot, self._away, _now(), look, refresh=self._pace, order=self._order)
        elif self._help:
            lines = help_lines(look)
        elif self._open is not None and self._details is not None:
            lines = self._opened(self._details, self._open, look)
        else:
            lines = self._board(snapshot, look)
        self._ids = [line.task_id for line in lines if line.task_id is not None] or self._ids
        self._screen.draw(lines, look.width, look.height)

    def _board(self, snapshot: Snapshot, look: Look) -> list[Line]:
        if not self._frozen:
            now = snapshot.taken_at + timedelta(seconds=time.monotonic() - self._received)
            return self._frame(snapshot, now, look)
        age = time.monotonic() - self._received
        top = Line(look).fill(f"frozen {int(age)}s; p goes on", look.width, "bold yellow")
        below = replace(look, height=look.height - 1)
        return [top, *self._frame(snapshot, snapshot.taken_at, below)]

    def _frame(self, snapshot: Snapshot, now: datetime, look: Look) -> list[Line]:
        chosen, order = self._selected, self._order
        return board.render(snapshot, now, look, refresh=self._pace, selected=chosen, order=order)

    def _opened(self, details: Callable[[int, Look], list[Line]], task_id: int, look: Look) -> list[Line]:
        try:
            return details(task_id, look)[: look.height]
        except Exception as error:  # noqa: BLE001 - shown where the details would be
            return [look.line((f"task {task_id}: ", "bold")).fill(reason_of(error), look.width - 20, "red")]

    def _key(self, name: str) -> bool:
        """Do what key *name* means; return whether it means the end."""
        if name == "q":
            return True
        if name == "?":
            self._help = not self._help
        elif name == "esc":
            self._help, self._open = False, None
            self._selected = None
        elif name == "p":
            self._frozen = not self._frozen
        elif name == "enter" and self._selected is not None:
            self._open = self._selected
        elif self._open is None:
            self._move(name)
        return False

    def _move(self, name: str) -> None:
        ids = list(dict.fromkeys(self._ids))
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pgup": -10, "pgdn": 10, "home": -len(ids), "end": len(ids)}
        if name not in steps or not ids:
            return
        if self._selected not in ids:
            self._selected = ids[-1] if name == "end" else ids[0]
            return
        at = ids.index(self._selected) + steps[name]
        self._selected = ids[max(0, min(len(ids) - 1, at))]

    def _on_stop_key(self) -> None:
        if self._keys is not None:
            self._keys.give_back()
        self._screen.close()
        self._signals.stop_here()


def is_slow(error: Exception) -> bool:
    """Return whether a snapshot failed because it took too long."""
    return "statement timeout" in f"{error} {error.__cause__ or ''}"


def reason_of(error: Exception) -> str:
    """Return why a snapshot failed, in one short line."""
    if is_slow(error):
        return "reading takes too long"
    if isinstance(error, OrchestratorError):
        text = error.message
    elif classify(error):
        text = reason(error)
    else:
        return f"{type(error).__name__}: {error}".strip().split("\n")[0]
    text = text.removeprefix("the database cannot be reached: ").strip().split("\n")[0]
    # libpq names the server first and asks a question last; between them stands what happened.
    text = re.sub(r".*\bfailed: (?:FATAL: +|error: )?", "", text)
    text = re.split(r" (?=Is the server |This probably means )", text)[0]
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


_HELP = (
    ("arrows, j k, PgUp, PgDn, Home, End", "select"),
    ("Enter", "open the selected task"),
    ("Esc", "back"),
    ("p", "freeze the picture, go on"),
    ("?", "this list"),
    ("q, Ctrl-C", "quit"),
)


def help_lines(look: Look) -> list[Line]:
    """Return all keys that exist."""
    width = max(len(key) for key, _ in _HELP)
    lines = [rule(look, "keys")]
    for key, what in _HELP:
        line = look.line("  ", (f"{key:<{width}}", "bold"), "  ") if not look.tiny else look.line((key, "bold"), " ")
        lines.append(line.add(what).trimmed())
    return lines[: look.height]
