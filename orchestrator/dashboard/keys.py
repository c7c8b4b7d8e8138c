"""Keys from a terminal: a small thread that turns bytes into names, and touches neither screen nor database.

stdin is in cbreak mode: no echo, no line buffer, while Ctrl-C, Ctrl-Z and Ctrl-\\ stay signals. A burst that is not one
key is a paste and is no key, so that a pasted ``xy`` cancels nothing; a text field may take it. End of file or an
error: keys off, view on.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import threading
import tty
from collections.abc import Callable
from typing import IO

from orchestrator.dashboard.terminal import foreground, is_terminal

_NAMES = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down",
    b"\x1b[C": "right", b"\x1bOC": "right", b"\x1b[D": "left", b"\x1bOD": "left",
    b"\x1b[5~": "pgup", b"\x1b[6~": "pgdn",
    b"\x1b[H": "home", b"\x1bOH": "home", b"\x1b[1~": "home", b"\x1b[7~": "home",
    b"\x1b[F": "end", b"\x1bOF": "end", b"\x1b[4~": "end", b"\x1b[8~": "end",
    b"\r": "enter", b"\n": "enter", b"\x1b": "esc", b"\t": "tab", b"\x7f": "backspace", b"\x08": "backspace",
}  # fmt: skip

MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "pgup": -10, "pgdn": 10, "home": -1_000_000, "end": 1_000_000}
"""Keys that move something, and by how many rows. They change nothing, so a held key may come in bursts."""

JOIN_SECONDS = 0.05
"""How long the rest of an escape sequence may take."""

BURST_SECONDS = 0.01
"""What comes closer together than this was not typed key by key."""


def name_of(burst: bytes) -> str | None:
    """Return the name of the one key that *burst* is, None for anything else.

    The same moving key, or Esc, several times over, as a held key sends it to a busy process, is that key once.
    """
    if burst in _NAMES:
        return _NAMES[burst]
    text = text_of(burst)
    if len(text) == 1:
        return text
    for length in (1, 3, 4):
        first = burst[:length]
        name = _NAMES.get(first) or first.decode(errors="replace")
        if len(burst) > length and (name in MOVES or name == "esc") and burst == first * (len(burst) // length):
            return name
    return None


def text_of(burst: bytes) -> str:
    """Return the text that *burst* is, empty if there is anything in it that is not printable."""
    try:
        text = burst.decode()
    except UnicodeDecodeError:
        return ""
    return text if text.isprintable() else ""


def usable(stdin: IO[str] | None, view: IO[str]) -> bool:
    """Return whether stdin and the view are one terminal, with this process in its foreground."""
    if stdin is None or not is_terminal(stdin) or not is_terminal(view):
        return False
    try:
        one = os.fstat(stdin.fileno()).st_rdev == os.fstat(view.fileno()).st_rdev
        return one and os.tcgetpgrp(stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


class KeyReader:
    """Reads keys until ``close``, while it has the terminal.

    *on_key* gets the names of keys, *on_paste* the text of bursts that are no key; both are called from the reader's
    thread. In the background nothing is read: the keys are the shell's then.
    """

    def __init__(
        self, stdin: IO[str], on_key: Callable[[str], None], on_paste: Callable[[str], None] | None = None
    ) -> None:
        self._stdin = stdin
        self._fd = stdin.fileno()
        self._on_key = on_key
        self._on_paste = on_paste
        self._settings: list[object] | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._read, name="keys", daemon=True)
        self._ended = threading.Event()

    def start(self) -> None:
        """Change the terminal's settings and read. Raises nothing: a terminal that is gone has no keys."""
        self.take()
        self._thread.start()

    def take(self) -> None:
        """Set cbreak mode, remembering the settings as they were; nothing in the background. Does no harm twice."""
        if not foreground(self._stdin):
            return
        with contextlib.suppress(termios.error, OSError):
            settings = self._settings or termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd, termios.TCSADRAIN)
            self._settings = settings
            self._wake()

    @property
    def taken(self) -> bool:
        """Whether the terminal has our settings now."""
        return self._settings is not None

    def give_back(self, *, now: bool = False) -> None:
        """Put the settings back as they were; with *now* without waiting for what is still being written."""
        settings, self._settings = self._settings, None
        if settings is not None:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(self._fd, termios.TCSANOW if now else termios.TCSADRAIN, settings)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the thread and put the settings back. May be called twice."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self.give_back()
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    def _read(self) -> None:
        # A read that comes too late, when the shell has the terminal again, must fail instead of stopping the process.
        with contextlib.suppress(AttributeError, ValueError):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN})
        while not self._ended.is_set():
            try:
                burst = self._burst()
            except (OSError, ValueError):
                if foreground(self._stdin):
                    return
                continue
            if burst is None:
                return
            if self._ended.is_set() or not burst:
                continue
            name = name_of(burst)
            if name is not None:
                self._on_key(name)
            elif self._on_paste is not None and (text := text_of(burst.strip(b"\r\n"))):
                self._on_paste(text)

    def _burst(self) -> bytes | None:
        """Return the bytes that came together, None at end of file, nothing when it was woken for something else."""
        mine = self._settings is not None
        ready, _, _ = select.select([self._wake_read, self._fd] if mine else [self._wake_read], [], [])
        if self._wake_read in ready:
            os.read(self._wake_read, 64)
            return b""
        if not foreground(self._stdin):
            self._settings = None  # stopped and continued by others: the shell has set the terminal anew
        if self._settings is None:
            return b""
        burst = os.read(self._fd, 4096)
        if not burst:
            return None
        while True:
            part = (burst.startswith(b"\x1b") and burst not in _NAMES) or burst == b"\x1b"
            ready, _, _ = select.select([self._fd], [], [], JOIN_SECONDS if part else BURST_SECONDS)
            more = os.read(self._fd, 4096) if ready else b""
            if not more:
                return burst
            burst += more
