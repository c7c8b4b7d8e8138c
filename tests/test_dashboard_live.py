"""Views on a terminal: what a screen shows after frames, resizes, signals and keys, and what a pipe gets."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from orchestrator.dashboard.board_live import board_live
from orchestrator.dashboard.faults import reason_of
from orchestrator.dashboard.frame import NO_LIMIT, Look, Paint
from orchestrator.dashboard.keys import name_of
from orchestrator.dashboard.live import RunLive, RunPlain, run_live
from orchestrator.dashboard.terminal import Screen, examine, look_for, size
from orchestrator.dashboard.text import cells
from orchestrator.domain.snapshot import Count, PlanTask, Question, RunEvent, RunningTask, RunView, ServerInfo, Snapshot
from orchestrator.errors import DatabaseUnavailable
from tests.conftest import WaitUntil

NOW = datetime.now().astimezone()
ROOT = Path(__file__).resolve().parent.parent


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Emulator:
    """As much of a terminal as the views use: it wraps, scrolls, moves up, erases."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.lines = [""]
        self.row = self.column = 0
        self.cursor = True
        self.alternate = False

    def feed(self, text: str) -> None:
        for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[^\x1b]", text):
            if token == "\r":
                self.column = 0
            elif token == "\n":
                self._down()
            elif token[0] != "\x1b":
                if self.column >= self.columns:
                    self._down()
                    self.column = 0
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + token + line[self.column + 1 :]
                self.column += cells(token)
            else:
                self._control(token[2:-1], token[-1])

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    def _control(self, argument: str, final: str) -> None:
        if final == "A":
            self.row = max(0, self.row - int(argument or 1))
        elif final == "H":
            self.row = self.column = 0
        elif final == "K":
            self.lines[self.row] = self.lines[self.row][: self.column]
        elif final == "J":
            self.lines[self.row] = self.lines[self.row][: self.column]
            del self.lines[self.row + 1 :]
        elif argument == "?25":
            self.cursor = final == "h"
        elif argument == "?1049":
            self.alternate = final == "h"
        else:
            assert final == "m" or argument == "?2026", f"unknown control {argument}{final}"

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")


def draw(screen: Screen, texts: list[str], width: int = 20, history: tuple[str, ...] = ()) -> bool:
    """Draw *texts* as a frame of *width* columns."""
    look = Look(width, 10)
    return screen.draw([look.line(text) for text in texts], width, 10, [look.line(text) for text in history])


def test_a_region_is_rewritten_in_place_below_its_history() -> None:
    """History lines stay, in order; the region stands once below them, whatever its height was."""
    stream = Terminal()
    screen = Screen(stream, Paint.NONE, full=False)
    draw(screen, ["a" * 20, "b", "c"])
    draw(screen, ["a2", "b2"], history=("one", "x" * 20))
    draw(screen, ["a3", "b" * 20, "c3", "d3"], history=("two",))
    draw(screen, ["a4"])
    emulator = Emulator(20, 10)
    emulator.feed("before\n" + stream.getvalue())
    assert emulator.text == "before\none\n" + "x" * 20 + "\ntwo\na4"
    assert not emulator.cursor
    mark = len(stream.getvalue())
    screen.close()
    emulator.feed(stream.getvalue()[mark:] + "summary")
    assert emulator.text.endswith("two\nsummary")
    assert emulator.cursor


def test_a_frame_equal_to_the_last_is_not_written() -> None:
    """Nothing reaches the terminal when nothing has changed."""
    stream = Terminal()
    screen = Screen(stream, Paint.NONE, full=True)
    assert draw(screen, ["same"])
    mark = len(stream.getvalue())
    assert not draw(screen, ["same"])
    assert len(stream.getvalue()) == mark
    screen.redraw()
    assert draw(screen, ["same"])


def test_each_frame_is_one_synchronised_write() -> None:
    """A frame is bracketed, so that no half of one is seen; the full screen is overwritten, not erased first."""
    stream = Terminal()
    screen = Screen(stream, Paint.NONE, full=True)
    draw(screen, ["one"])
    mark = len(stream.getvalue())
    draw(screen, ["two", "x" * 20])
    frame = stream.getvalue()[mark:]
    assert frame.startswith("\x1b[?2026h\x1b[H")
    assert frame.endswith("\x1b[?2026l")
    assert "\x1b[2J" not in frame
    assert frame.index("two") < frame.index("\x1b[J")


def test_after_a_shrink_the_wrapped_rows_are_erased() -> None:
    """A terminal that got narrower has wrapped the region: all of its rows are overwritten."""
    stream = Terminal()
    screen = Screen(stream, Paint.NONE, full=False)
    draw(screen, ["a" * 20, "b" * 15, "c"])
    emulator = Emulator(10, 10)  # the same bytes on ten columns wrap as a reflowing terminal shows them
    emulator.feed("before\r\n" + stream.getvalue())
    mark = len(stream.getvalue())
    draw(screen, ["now", "narrow"], width=10)
    emulator.feed(stream.getvalue()[mark:])
    assert emulator.text == "before\nnow\nnarrow"


def test_a_terminal_that_is_gone_is_let_go() -> None:
    """A write that fails ends the drawing, not the work."""

    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    screen = Screen(Gone(), Paint.NONE, full=False)
    draw(screen, ["one"])
    draw(screen, ["two"])
    screen.close()


@pytest.mark.parametrize(
    ("terminal", "environ", "plain", "live", "paint"),
    [
        (True, {"TERM": "xterm"}, False, True, Paint.COLOR),
        (True, {"TERM": "xterm"}, True, False, Paint.COLOR),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False, True, Paint.WEIGHT),
        (True, {"TERM": "xterm", "NO_COLOR": "1", "FORCE_COLOR": "1"}, False, True, Paint.WEIGHT),
        (True, {"TERM": "dumb"}, False, False, Paint.NONE),
        (True, {}, False, False, Paint.NONE),
        (False, {"TERM": "xterm"}, False, False, Paint.NONE),
        (False, {"TERM": "xterm", "FORCE_COLOR": "1"}, False, False, Paint.COLOR),
        (False, {"TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False, Paint.NONE),
    ],
)
def test_each_stream_is_judged_alone(
    terminal: bool, environ: dict[str, str], plain: bool, live: bool, paint: Paint
) -> None:
    """A view needs a terminal that is not dumb; colour may be forced, animation may not."""
    judged = examine(Terminal() if terminal else io.StringIO(), plain=plain, environ=environ)
    assert (judged.live, judged.paint) == (live, paint)


def test_ascii_where_the_encoding_or_the_user_says_so() -> None:
    """Symbols are used only where the stream can carry them."""
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    utf8 = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    assert examine(latin, environ={}).ascii
    assert not examine(utf8, environ={}).ascii
    assert examine(utf8, environ={"ORCHESTRATOR_ASCII": "1"}).ascii
    assert not examine(utf8, environ={"ORCHESTRATOR_ASCII": "0"}).ascii
    assert examine(Terminal(), environ={"LC_ALL": "C"}).ascii
    assert not examine(Terminal(), environ={"LC_ALL": "C", "ORCHESTRATOR_ASCII": "0"}).ascii
    assert not examine(utf8, environ={"LC_ALL": "C"}).ascii


def test_sizes_without_a_terminal() -> None:
    """80 columns or COLUMNS; what is written once into a pipe is not cut."""
    pipe = io.StringIO()
    assert size(pipe, {}) == (80, 24)
    assert size(pipe, {"COLUMNS": "120", "LINES": "x"}) == (120, 24)
    assert look_for(pipe, {}).width == NO_LIMIT
    assert look_for(pipe, {"COLUMNS": "50"}).width == 50
    assert not examine(None, environ={"TERM": "xterm"}).live


def view(*tasks: PlanTask) -> RunView:
    """Return a view of *tasks*."""
    return RunView("p", NOW, tasks)


def test_run_live_shows_history_and_gives_the_terminal_back() -> None:
    """All events end above the region; after the end the cursor is there and the region is gone."""
    stream = Terminal()
    live = RunLive(stream, lambda: view(PlanTask(70, "task-70", "a", "running", started_at=NOW)), Paint.NONE)
    live.start()
    for n in range(30):
        live.event(RunEvent(NOW, "done", n, f"task-{n}", elapsed=1.0))
        live.changed()
    live.stop()
    live.stop()
    emulator = Emulator(80, 24)
    emulator.feed(stream.getvalue())
    lines = emulator.text.split("\n")
    assert [line.split()[3] for line in lines] == [f"task-{n}" for n in range(30)]
    assert emulator.cursor
    assert stream.getvalue().count("\x1b[?2026h") < 10


def test_a_fault_of_the_view_does_not_end_the_run() -> None:
    """What the source raises stays in the view."""

    def broken() -> RunView:
        raise ValueError("no")

    live = RunLive(Terminal(), broken, Paint.NONE)
    live.start()
    live.event(RunEvent(NOW, "done", 1, "x"))
    live.stop()


def test_run_live_keeps_the_region_when_asked() -> None:
    """Where the summary goes elsewhere the last region stays."""
    stream = Terminal()
    live = RunLive(stream, lambda: view(PlanTask(7, "seven", "a", "failed", attempt=1)), Paint.NONE)
    live.start()
    live.stop(keep=True)
    emulator = Emulator(80, 24)
    emulator.feed(stream.getvalue())
    assert "✗ 7 seven" in emulator.text
    assert emulator.cursor


@pytest.mark.parametrize(
    ("typed", "answer"), [("2\n", "keep it"), ("drop\n", "drop"), ("\n", "keep it"), ("", None), ("7\n", "7")]
)
def test_run_live_asks_at_the_terminal(typed: str, answer: str | None) -> None:
    """A number takes that choice, an empty line the default, end of file nothing."""
    stream = Terminal()
    live = RunLive(stream, view, Paint.NONE, stdin=io.StringIO(typed))
    question = Question(9, "Drop\x1b[2J it?", choices=("drop", "keep it"), default="keep it")
    assert live.ask(question) == answer
    assert "Drop\\x1b[2J it?" in stream.getvalue()


def test_a_question_at_the_terminal_is_told_again_after_a_stop(wait_until: WaitUntil) -> None:
    """Who comes back with fg sees what is waited for."""
    stream = Terminal()
    mine, others = os.pipe()
    with os.fdopen(mine) as stdin, os.fdopen(others, "w") as typed:
        live = RunLive(stream, view, Paint.NONE, stdin=stdin)
        live.start()
        asking = threading.Thread(target=live.ask, args=[Question(9, "Drop it?", choices=("drop", "keep it"))])
        asking.start()
        wait_until(lambda: stream.getvalue().count("answer: ") == 1)
        signal.raise_signal(signal.SIGCONT)
        wait_until(lambda: stream.getvalue().count("answer: ") == 2)
        assert stream.getvalue().count("[2] keep it") == 2
        typed.write("1\n")
        typed.flush()
        asking.join(10)
        live.stop()
    assert not asking.is_alive()


def test_no_terminal_no_escape_code() -> None:
    """In a pipe the run writes plain lines, flushed, without any escape code."""
    stream = io.StringIO()
    out = run_live(stream, lambda: view(PlanTask(1, "x", "a", "running", started_at=NOW)))
    assert isinstance(out, RunPlain)
    out.start()
    out.event(RunEvent(NOW, "done", 1, "x\x1b[2J"))
    out.changed()
    out.stop()
    assert stream.getvalue().endswith("done     1 x\\x1b[2J\n")
    assert "\x1b" not in stream.getvalue()
    stream.close()
    out.event(RunEvent(NOW, "done", 1, "x"))


def a_snapshot(n: int = 0) -> Snapshot:
    """Return a small snapshot with three running tasks."""
    now = datetime.now().astimezone()
    tasks = tuple(RunningTask(100 + k, "coder", now - timedelta(minutes=9 - k), name=f"t{k}", last_output=f"line {n}",
                              last_output_at=now) for k in range(3))  # fmt: skip
    return Snapshot(now, ServerInfo("h", "db"), running=tasks, running_count=Count(3))


@pytest.mark.parametrize("environ", [{}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}])
def test_dashboard_in_a_pipe_is_one_frame(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    """Without a terminal one snapshot is printed, without escape codes, and that is the end."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    assert board_live(stream, a_snapshot) == 0
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().count("── running 3 ") == 1
    assert all(cells(line) <= 80 for line in stream.getvalue().splitlines())


def test_keys_have_names_and_pastes_have_none() -> None:
    """One key is one name; a burst of several is a paste and means nothing."""
    assert [name_of(burst) for burst in (b"q", b"\x1b[A", b"\x1bOB", b"\r", b"\x1b", "é".encode())] == [
        "q", "up", "down", "enter", "esc", "é",
    ]  # fmt: skip
    assert [name_of(burst) for burst in (b"xy", b"x\n", b"\x1b[200~x", b"\x03", b"\xff")] == [None] * 5


def test_reasons_are_one_line() -> None:
    """The first line of what went wrong, and never a traceback."""
    assert reason_of(DatabaseUnavailable("connection refused\nmore")) == "connection refused"
    libpq = (
        'connection to server at "127.0.0.1", port 5432 failed: Connection refused Is the server running on that host?'
    )
    assert reason_of(DatabaseUnavailable(f"the database cannot be reached: {libpq}")) == "connection refused"
    assert reason_of(ValueError("bad")) == "ValueError: bad"
    assert reason_of(RuntimeError("canceling statement due to statement timeout")) == "reading takes too long"


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.test_dashboard_live import a_snapshot
from orchestrator.dashboard.board_live import board_live
from orchestrator.errors import DatabaseUnavailable
from tests.conftest import WaitUntil
from pathlib import Path
count = 0
def read():
    global count
    count += 1
    if Path({flag!r}).exists():
        raise DatabaseUnavailable("connection refused")
    return a_snapshot(count)
code = board_live(sys.stdout, read, refresh=0.05)
print("left", code)
"""


class Session:
    """A dashboard in a process of its own on a pseudo-terminal."""

    def __init__(self, flag: Path, arguments: list[str] | None = None) -> None:
        self.master, slave = pty.openpty()
        self.resize(80, 24)
        self.before = termios.tcgetattr(slave)
        self.slave = slave

        def lead() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTSTP, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)

        self.process = subprocess.Popen(
            [sys.executable, *(arguments or ["-c", SCRIPT.format(root=str(ROOT), flag=str(flag))])],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "PYTHONUTF8": "1"},
            preexec_fn=lead,
        )
        self.raw = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def key(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, condition: Callable[[str], object], start: int = 0) -> str:
        """Read until *condition* holds for what came after *start*; return all that came."""
        deadline = time.monotonic() + 60
        while not condition(self.raw[start:]):
            assert time.monotonic() < deadline, f"never came: {self.raw[start:][-2000:]!r}"
            ready, _, _ = select.select([self.master], [], [], 0.5)
            if ready:
                with contextlib.suppress(OSError):
                    self.raw += os.read(self.master, 65536).decode(errors="replace")
        return self.raw

    def end(self) -> int:
        """Read to the end of the process; return its exit code."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < deadline:
            ready, _, _ = select.select([self.master], [], [], 0.05)
            if ready:
                self.raw += os.read(self.master, 65536).decode(errors="replace")
        while select.select([self.master], [], [], 0)[0]:
            self.raw += os.read(self.master, 65536).decode(errors="replace")
        return self.process.wait(1)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def assert_restored(self) -> None:
        """Check that cursor, main screen and settings are as before."""
        assert self.raw.rindex("\x1b[?25h") > self.raw.rindex("\x1b[?25l")
        assert self.raw.rindex("\x1b[?1049l") > self.raw.rindex("\x1b[?1049h")
        assert termios.tcgetattr(self.slave) == self.before


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """Return a dashboard on a pseudo-terminal, its first frame drawn."""
    session = Session(tmp_path / "away")
    try:
        session.until(lambda raw: "? keys  q quit" in raw)
        yield session
    finally:
        session.close()


def test_dashboard_on_a_terminal(session: Session, tmp_path: Path) -> None:
    """Keys select and open help, a resize is drawn, an outage is said and survived, q leaves all as it was."""
    session.key("\x1b[B")
    session.until(lambda raw: "\x1b[7m" in raw)
    session.key("?")
    session.until(lambda raw: "freeze the picture" in raw)
    session.key("\x1b")
    mark = len(session.raw)
    session.resize(40, 10)
    session.until(lambda raw: re.search(r"db ▸3 +\d\d:\d\d:\d\d", raw.replace("\x1b[36m", "").replace("\x1b[0m", "")
                                        .replace("\x1b[1m", "")), mark)  # fmt: skip
    session.resize(80, 24)
    (tmp_path / "away").touch()
    session.until(lambda raw: "database away" in raw and "connection refused; next try in" in raw, mark)
    (tmp_path / "away").unlink()
    mark = len(session.raw)
    session.until(lambda raw: "refresh 0.05s" in raw and "away" not in raw[raw.rindex("\x1b[H") :], mark)
    session.key("q")
    assert session.end() == 0
    assert "left 0" in session.raw
    session.assert_restored()


@pytest.mark.parametrize(("how", "code"), [("\x03", 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_dashboard_restores_the_terminal_at_any_end(session: Session, how: str | int, code: int) -> None:
    """Ctrl-C, SIGTERM and SIGHUP leave cursor, screen and settings as they were."""
    if isinstance(how, str):
        session.key(how)
    else:
        session.process.send_signal(how)
    session.end()
    assert f"left {code}" in session.raw
    session.assert_restored()


SHELL = """
import os, signal, subprocess, sys, termios
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
before = termios.tcgetattr(0)

def foreground():
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)

job = subprocess.Popen([sys.executable, "-c", sys.argv[1]], preexec_fn=foreground)
_, status = os.waitpid(job.pid, os.WUNTRACED)
os.tcsetpgrp(0, os.getpid())
print("stopped", os.WIFSTOPPED(status), termios.tcgetattr(0) == before, flush=True)
sys.stdin.readline()
os.tcsetpgrp(0, job.pid)
os.killpg(job.pid, signal.SIGCONT)
code = job.wait()
os.tcsetpgrp(0, os.getpid())
print("ended", code, termios.tcgetattr(0) == before, flush=True)
"""


def test_ctrl_z_stops_for_real_and_comes_back(tmp_path: Path) -> None:
    """Ctrl-Z gives the terminal back and stops the process; continued, it draws whole and reads keys again."""
    script = SCRIPT.format(root=str(ROOT), flag=str(tmp_path / "away"))
    session = Session(tmp_path, ["-c", SHELL, script])
    try:
        session.until(lambda raw: "? keys  q quit" in raw)
        session.key("\x1a")
        session.until(lambda raw: re.search(r"stopped .*\n", raw))
        assert "stopped True True" in session.raw
        assert session.raw.rindex("\x1b[?1049l") > session.raw.rindex("\x1b[?1049h")
        assert session.raw.rindex("\x1b[?25h") > session.raw.rindex("\x1b[?25l")
        mark = len(session.raw)
        session.key("\n")
        session.until(lambda raw: "\x1b[?1049h" in raw and "? keys  q quit" in raw, mark)
        session.key("?")
        session.until(lambda raw: "freeze the picture" in raw, mark)
        session.key("q")
        session.until(lambda raw: re.search(r"ended .*\n", raw), mark)
        assert "ended 0 True" in session.raw
    finally:
        session.close()
