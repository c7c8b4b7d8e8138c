"""What a stream can show: each stream is judged alone, by itself and the environment.

``examine`` answers whether a view may be drawn there and redrawn, how much colour it gets, and whether it is ASCII only.
``Screen`` is the one writer of escape codes; whatever it changes on a terminal it can take back at any time.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from orchestrator.dashboard.frame import NO_LIMIT, SYMBOLS, Line, Look, Paint
from orchestrator.dashboard.text import cells
from orchestrator.domain.values import value

_SIGNS = "".join(signs[0] for signs in SYMBOLS.values()) + "━╌─–…·▁█"

RELEASE = b"\x1b[?2026l\r\n\x1b[?25h"
"""What a region's terminal needs when there is no time for anything else: no open update, a new line, the cursor."""


@value
class Terminal:
    """A stream judged: ``live`` may be redrawn, ``paint`` is for what is written once, ``ascii`` for what it can encode.

    ``live`` is never true because of ``FORCE_COLOR``: that colours, it does not animate.
    """

    live: bool
    paint: Paint
    ascii: bool


def is_terminal(stream: IO[str] | None) -> bool:
    """Return whether *stream* is open and a terminal."""
    try:
        return stream is not None and stream.isatty()
    except (ValueError, OSError):
        return False


def examine(stream: IO[str] | None, *, plain: bool = False, environ: Mapping[str, str] | None = None) -> Terminal:
    """Judge *stream*. *plain* is the option of the same name: no view, though colours as ever."""
    environ = os.environ if environ is None else environ
    dumb = environ.get("TERM", "") in ("", "dumb", "unknown")
    capable = is_terminal(stream) and not dumb
    if environ.get("NO_COLOR"):
        paint = Paint.WEIGHT if capable else Paint.NONE
    else:
        paint = Paint.COLOR if capable or environ.get("FORCE_COLOR") else Paint.NONE
    return Terminal(capable and not plain, paint, _ascii(stream, environ))


def _ascii(stream: IO[str] | None, environ: Mapping[str, str]) -> bool:
    wish = environ.get("ORCHESTRATOR_ASCII", "")
    if wish not in ("", "0"):
        return True
    if not wish and is_terminal(stream) and environ.get("LC_ALL") in ("C", "POSIX"):
        return True  # Python writes UTF-8 all the same; who set this has a terminal that shows none
    try:
        _SIGNS.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def size(stream: IO[str] | None, environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Return columns and rows of the terminal; without one ``COLUMNS`` and ``LINES``, else 80 and 24."""
    environ = os.environ if environ is None else environ
    columns = rows = 0
    if stream is not None and is_terminal(stream):
        with contextlib.suppress(OSError, ValueError):
            columns, rows = os.get_terminal_size(stream.fileno())
    return columns or _positive(environ.get("COLUMNS"), 80), rows or _positive(environ.get("LINES"), 24)


def _positive(text: str | None, otherwise: int) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and 0 < int(text) < 10_000 else otherwise


def look_for(stream: IO[str] | None, environ: Mapping[str, str] | None = None) -> Look:
    """Return the ``Look`` for something that is written once: in a pipe nothing is cut, unless ``COLUMNS`` says so."""
    environ = os.environ if environ is None else environ
    columns, rows = size(stream, environ)
    if not is_terminal(stream) and not environ.get("COLUMNS"):
        columns = NO_LIMIT
    return Look(columns, rows, ascii=_ascii(stream, environ))


def print_lines(lines: Sequence[Line], stream: IO[str] | None = None) -> None:
    """Write *lines* to *stream* (stdout), in the colours that it takes. A closed pipe raises ``BrokenPipeError``."""
    stream = sys.stdout if stream is None else stream
    paint = examine(stream).paint
    stream.write("".join(f"{line.painted(paint)}\n" for line in lines))
    stream.flush()


def foreground(stream: IO[str]) -> bool:
    """Return whether this process may use the terminal of *stream* now; True where nobody can tell."""
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return True


class Screen:
    """Draws frames on a terminal: each frame is one write, bracketed as a synchronised update.

    ``full``: the alternate screen, overwritten from the top. Otherwise one region below what has been written, where
    history lines scroll up above it. A terminal that is gone makes every call do nothing. Not thread-safe.
    """

    def __init__(self, stream: IO[str], paint: Paint, *, full: bool) -> None:
        self._stream = stream
        self._paint = paint
        self._full = full
        self._open = False
        self._gone = False
        self._last: list[str] | None = None
        self._widths: list[int] = []

    @property
    def is_open(self) -> bool:
        return self._open

    def open(self) -> None:
        """Take the terminal: hide the cursor, with ``full`` change to the alternate screen."""
        if not self._open:
            self._open = True
            self._last = None
            self._widths = []
            self._write(("\x1b[?1049h" if self._full else "") + "\x1b[?25l")

    def close(self, *, keep: bool = False) -> None:
        """Give the terminal back: cursor, main screen. The region is erased, with *keep* it stays as it is."""
        if not self._open:
            return
        self._open = False
        if self._full:
            text = "\x1b[?1049l"
        elif keep:
            text = "\r\n" if self._widths else ""
        else:
            text = self._home() + "\x1b[J"
        self._widths = []
        self._last = None
        self._write(text + "\x1b[?25h")

    def draw(self, lines: Sequence[Line], width: int, height: int, history: Sequence[Line] = ()) -> bool:
        """Show *lines*, with *history* written above them; return False if nothing had to be written."""
        painted = [line.painted(self._paint) for line in lines]
        if painted == self._last and not history and self._open:
            return False
        self.open()
        pieces = ["\x1b[?2026h", "\x1b[H" if self._full else self._home(width)]
        for line in history:
            pieces.append(line.painted(self._paint) + ("" if line.width >= width else "\x1b[K") + "\r\n")
        widths = [cells(line.text) for line in lines]
        for at, text in enumerate(painted):
            pieces.append(("\r\n" if at else "") + text + ("" if widths[at] >= width else "\x1b[K"))
        # Erasing from a full last column would take the character in it, so the erasing starts a line below.
        if self._full and len(lines) < height:
            pieces.append("\r\n\x1b[J" if lines else "\x1b[J")
        elif not self._full:
            pieces.append("\x1b[J" if not widths or widths[-1] < width else "\r\n\x1b[J\x1b[A")
        pieces.append("\x1b[?2026l")
        self._write("".join(pieces))
        self._last = painted
        self._widths = widths
        return True

    def write_lines(self, lines: Sequence[Line]) -> None:
        """Write *lines* for good, without a region; one that is open is closed and stays."""
        self.close(keep=True)
        if lines:
            self._write("".join(f"{line.painted(self._paint)}\r\n" for line in lines))

    def redraw(self) -> None:
        """Make the next ``draw`` write its frame whatever it is."""
        self._last = None

    def _home(self, width: int | None = None) -> str:
        """Return the way from the end of the region to its first cell, counting the rows that a shrink wrapped."""
        if not self._widths:
            return "\r"
        columns = width or size(self._stream)[0]
        rows = sum(max(1, -(-used // columns)) for used in self._widths)
        return "\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "")

    def _write(self, text: str) -> None:
        if self._gone:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):
            self._gone = True
