"""Keys from a terminal: a small thread that turns bytes into names, and touches neither screen nor database.

stdin is in cbreak mode: no echo, no line buffer, while Ctrl-C, Ctrl-Z and Ctrl-\\ stay signals. A burst that is not one
key is a paste and is dropped, so that a pasted ``xy`` cancels nothing. End of file or an error: keys off, view on.
"""

from __future__ import annotations

import contextlib
import os
import select
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

JOIN_SECONDS = 0.05
"""How long the rest of an escape sequence may take."""


def name_of(burst: bytes) -> str | None:
    """Return the name of the one key that *burst* is, None for anything else."""
    if burst in _NAMES:
        return _NAMES[burst]
    with contextlib.suppress(UnicodeDecodeError):
        text = burst.decode()
        if len(text) == 1 and text.isprintable():
            return text
    return None


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
    """Reads keys until ``close``; *on_key* gets their names, from the reader's thread."""

    def __init__(self, stdin: IO[str], on_key: Callable[[str], None]) -> None:
        self._stdin = stdin
        self._fd = stdin.fileno()
        self._on_key = on_key
        self._settings: list[object] | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._read, name="keys", daemon=True)
        self._ended = threading.Event()

    def start(self) -> None:
        """Change the terminal's settings and read. Raises nothing: a terminal that is gone has no keys."""
        self.take()
        self._thread.start()

    def take(self) -> None:
        """Set cbreak mode, remembering the settings as they were; nothing in the background."""
        if self._settings is not None or not foreground(self._stdin):
            return
        with contextlib.suppress(termios.error, OSError):
            settings = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd, termios.TCSADRAIN)
            self._settings = settings

    @property
    def taken(self) -> bool:
        """Whether the terminal has our settings now."""
        return self._settings is not None

    def give_back(self) -> None:
        """Put the settings back as they were."""
        settings, self._settings = self._settings, None
        if settings is not None:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(self._fd, termios.TCSADRAIN, settings)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the thread and put the settings back. May be called twice."""
        if self._ended.is_set():
            return
        self._ended.set()
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self.give_back()
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _read(self) -> None:
        while not self._ended.is_set():
            burst = self._burst()
            if burst is None:
                return
            name = name_of(burst)
            if name is not None and not self._ended.is_set():
                self._on_key(name)

    def _burst(self) -> bytes | None:
        """Return the bytes that came together, None at the end of it all."""
        try:
            ready, _, _ = select.select([self._fd, self._wake_read], [], [])
            if self._wake_read in ready:
                return None
            burst = os.read(self._fd, 4096)
            if not burst:
                return None
            while burst == b"\x1b" or (burst.startswith(b"\x1b") and burst not in _NAMES):
                ready, _, _ = select.select([self._fd], [], [], JOIN_SECONDS)
                more = os.read(self._fd, 4096) if ready else b""
                if not more:
                    break
                burst += more
        except (OSError, ValueError):
            return None
        return burst
