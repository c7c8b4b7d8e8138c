"""Foreign text made harmless, and measured in terminal cells.

Titles, output, errors, names and questions are data. Whatever could move the cursor, reorder or hide text becomes a
visible escape before anything is measured; brackets and ``:smile:`` stay, since nothing here knows markup.
"""

from __future__ import annotations

import re
from functools import lru_cache

from rich.cells import get_character_cell_size

ELLIPSIS = "…"
ASCII_ELLIPSIS = ".."

_NEWLINE = re.compile(r"\r\n|[\n\t]")
_VARIATION = re.compile("[\ufe00-\ufe0f]")
_HARMFUL = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, DEL, C1
    "\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb"  # zero width, bidi, fillers
    "\ud800-\udfff"  # lone surrogates cannot be encoded
    "\U000e0000-\U000e0fff]"  # tags and variation selectors
)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


@lru_cache(maxsize=2048)
def _cleaned(text: str) -> str:
    return _HARMFUL.sub(_escape, _VARIATION.sub("", _NEWLINE.sub(" ", text)))


def clean(text: str) -> str:
    """Return *text* as one line that any terminal shows as it stands.

    Controls, bidi and zero-width characters become ``\\x1b``-style escapes; a newline or tab becomes a space;
    selectors that change how wide the character before them is are dropped. Cleaning twice changes nothing.
    """
    if text.isascii() and text.isprintable():
        return text
    return _cleaned(text) if len(text) <= 1000 else _cleaned.__wrapped__(text)


def ascii_only(text: str) -> str:
    """Return *text* with every character outside ASCII as ``?``."""
    return text if text.isascii() else "".join(char if char < "\x80" else "?" for char in text)


@lru_cache(maxsize=4096)
def _cell(char: str) -> int:
    return get_character_cell_size(char)


def cells(text: str) -> int:
    """Return how many terminal cells *text* takes; wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return _measured(text) if len(text) <= 1000 else sum(map(_cell, text))


@lru_cache(maxsize=2048)
def _measured(text: str) -> int:
    return sum(map(_cell, text))


def cut(text: str, width: int, ellipsis: str = ELLIPSIS) -> str:
    """Return *text* in at most *width* cells, ended by *ellipsis* if something was left out.

    A wide character is never halved. Where not even the ellipsis fits, as much of it as fits is returned.
    """
    if cells(text) <= width:
        return text
    room = width - len(ellipsis)
    if room < 0:
        return ellipsis[: max(0, width)]
    used = 0
    for at, char in enumerate(text):  # noqa: B007 - used after the loop
        used += _cell(char)
        if used > room:
            break
    return text[:at].rstrip() + ellipsis


def pad(text: str, width: int) -> str:
    """Return *text* followed by spaces up to *width* cells; longer text is returned as it is."""
    return text + " " * (width - cells(text))


def pad_left(text: str, width: int) -> str:
    """Return *text* after as many spaces as make it *width* cells; longer text is returned as it is."""
    return " " * (width - cells(text)) + text
