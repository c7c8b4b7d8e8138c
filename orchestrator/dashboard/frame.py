"""Lines and columns: what every screen is put together from.

Reading order: ``Look`` (size and character set), ``Line`` (the only way for text onto a screen: it cleans what it is
given), ``join`` (which columns fit), ``rule`` and ``bar``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from orchestrator.dashboard.text import ASCII_ELLIPSIS, ELLIPSIS, ascii_only, cells, clean, cut
from orchestrator.domain.values import value

NO_LIMIT = 1_000_000
"""The width of something that is no screen: nothing is cut."""

WIDE = 100
NARROW = 60

SYMBOLS: dict[str, tuple[str, str, str]] = {
    "running": ("▸", ">", "cyan"),
    "alert": ("!", "!", "red"),
    "waiting": ("?", "?", "bold magenta"),
    "stopping": ("■", "#", "yellow"),
    "retrying": ("↻", "~", "yellow"),
    "not_due": ("↻", "~", "yellow"),
    "ready": ("·", ".", ""),
    "done": ("✓", "+", "green"),
    "failed": ("✗", "x", "bold red"),
    "cancelled": ("⊘", "-", "dim"),
    "not_run": ("○", "o", "dim"),
    "blocked": ("○", "o", "dim"),
    "held": ("‖", "=", "yellow"),
}
"""Symbol, its ASCII form and its colour, by what it means."""

_SIGNS = {"━": "#", "╌": ".", "─": "-", "–": "-", "·": ".", ELLIPSIS: ASCII_ELLIPSIS}
_SPARKS = "▁▂▃▄▅▆▇█"
_ASCII_SPARKS = "_.:-=+*#"

_SGR = {
    "bold": "1",
    "dim": "2",
    "reverse": "7",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "magenta": "35",
    "cyan": "36",
}
_WEIGHTS = frozenset({"bold", "dim", "reverse"})


class Paint(Enum):
    """How much of a style reaches the stream: nothing, weight only (``NO_COLOR``), or all of it."""

    NONE = "none"
    WEIGHT = "weight"
    COLOR = "color"


@value
class Look:
    """The place that is drawn on: cells, rows, whether it is ASCII only, and the keys that work there.

    ``keys`` are the names that the hint line may show; empty: no hint line.
    """

    width: int = 80
    height: int = 24
    ascii: bool = False
    keys: frozenset[str] = frozenset()

    @property
    def wide(self) -> bool:
        return self.width >= WIDE

    @property
    def tiny(self) -> bool:
        return self.width < NARROW

    @property
    def ellipsis(self) -> str:
        return ASCII_ELLIPSIS if self.ascii else ELLIPSIS

    @property
    def separator(self) -> str:
        """What stands between items of one line."""
        return ", " if self.ascii else " · "

    def symbol(self, kind: str) -> str:
        """Return the sign for *kind*."""
        return SYMBOLS[kind][1 if self.ascii else 0]

    def sign(self, char: str) -> str:
        """Return *char* of our own drawing, or its ASCII form."""
        return _SIGNS[char] if self.ascii else char

    def show(self, text: str) -> str:
        """Return foreign *text* as it may be shown here."""
        text = clean(text)
        return ascii_only(text) if self.ascii else text

    def cut(self, text: str, width: int) -> str:
        """Return foreign *text* as it may be shown here, in at most *width* cells."""
        return cut(self.show(text), width, self.ellipsis)

    def line(self, *parts: str | tuple[str, str]) -> Line:
        """Return a line of *parts*, each a text or a text with its style."""
        line = Line(self)
        for part in parts:
            line.add(*((part,) if isinstance(part, str) else part))
        return line


class Line:
    """One line of a screen: pieces of harmless text with a style each.

    ``target`` is what the line is about, a task's id or an agent's name, where a cursor can stand on it. ``dimmed`` and
    ``marked`` (the cursor is here) take the place of every style in it.
    """

    __slots__ = ("dimmed", "look", "marked", "parts", "target", "width")

    def __init__(self, look: Look) -> None:
        self.look = look
        self.parts: list[tuple[str, str]] = []
        self.width = 0
        self.target: int | str | None = None
        self.dimmed = False
        self.marked = False

    def about(self, target: int | str | None) -> Line:
        """Say which task or agent this line is about."""
        self.target = target
        return self

    def add(self, text: str, style: str = "") -> Line:
        """Add *text* (cleaned) in *style*, a choice of the words bold, dim, reverse and the named colours."""
        if text:
            text = self.look.show(text)
            self.parts.append((text, style))
            self.width += cells(text)
        return self

    def symbol(self, kind: str, style: str | None = None) -> Line:
        """Add the sign for *kind* in its colour, or in *style*."""
        return self.add(self.look.symbol(kind), SYMBOLS[kind][2] if style is None else style)

    def to(self, column: int) -> Line:
        """Add spaces up to *column*, none if the line is there already."""
        return self.add(" " * (column - self.width))

    def fill(self, text: str, room: int, style: str = "") -> Line:
        """Add as much of *text* as fits in *room* cells."""
        return self.add(self.look.cut(text, room), style)

    def right(self, text: str, style: str = "", *, end: int | None = None) -> Line:
        """Add *text* so that it ends at *end* (the screen's edge); without an edge two spaces after what is there."""
        end = self.look.width if end is None else end
        if end >= NO_LIMIT:
            return self.add("  ").add(text, style)
        return self.to(end - cells(self.look.show(text))).add(text, style)

    def trimmed(self) -> Line:
        """Return this line without spaces at its end, and never wider than the screen."""
        if self.width <= self.look.width and self.parts and self.parts[-1][0][-1] != " ":
            return self
        while self.parts:
            text, style = self.parts[-1]
            bare = text.rstrip(" ")
            if bare:
                self.parts[-1] = (bare, style)
                break
            self.parts.pop()
        self.width = sum(cells(text) for text, _ in self.parts)
        if self.width <= self.look.width:
            return self
        short = Line(self.look).about(self.target)
        for text, style in self.parts:
            short.fill(text, self.look.width - short.width, style)
            if short.width >= self.look.width:
                break
        return short

    @property
    def text(self) -> str:
        """The line without any style."""
        return "".join(text for text, _ in self.parts)

    def painted(self, paint: Paint) -> str:
        """Return the line for a stream."""
        if paint is Paint.NONE:
            return self.text
        if self.marked:
            return f"\x1b[7m{self.text + ' ' * (min(self.look.width, 500) - self.width)}\x1b[0m"
        pieces = []
        for text, style in self.parts:
            words = ["dim"] if self.dimmed else style.split()
            codes = [_SGR[word] for word in words if paint is Paint.COLOR or word in _WEIGHTS]
            pieces.append(f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if codes else text)
        return "".join(pieces)

    def __repr__(self) -> str:
        return f"Line({self.text!r})"


@value
class Column:
    """A column: its width in cells, its rank (the smaller joins first), and the gap before it.

    The joined column with the largest ``rest`` takes what is left, up to ``most``; 0 takes nothing.
    """

    key: str
    width: int
    rank: int
    right: bool = False
    gap: int = 1
    caption: str = ""
    rest: int = 0
    most: int = NO_LIMIT


@value
class Place:
    """Where a joined column stands."""

    column: Column
    start: int
    width: int

    @property
    def end(self) -> int:
        return self.start + self.width


def join(columns: Sequence[Column], width: int) -> dict[str, Place]:
    """Return the columns that fit in *width*, in the order given, by key: by rank, whole or not at all."""
    joined: set[str] = set()
    used = 0
    for column in sorted(columns, key=lambda column: column.rank):
        need = column.width + (column.gap if joined else 0)
        if used + need > width:
            break
        joined.add(column.key)
        used += need
    chosen = [column for column in columns if column.key in joined]
    taker = max((column for column in chosen if column.rest), key=lambda column: column.rest, default=None)
    places: dict[str, Place] = {}
    at = 0
    for column in chosen:
        start = at + (column.gap if places else 0)
        own = column.width
        if taker is column:
            own = max(own, min(own + width - used, column.most))
        places[column.key] = Place(column, start, own)
        at = start + own
    return places


def row(look: Look, places: Mapping[str, Place], values: Mapping[str, tuple[str, str]]) -> Line:
    """Return a line with *values* (text, style) in their places; right-aligned text is never cut, other text is."""
    # Written out, not by Line.add: a full screen has thousands of cells, and each is cleaned and measured once here.
    line = Line(look)
    at = 0
    for key, place in places.items():
        text, style = values.get(key, ("", ""))
        if not text:
            continue
        text = look.show(text)
        width = cells(text)
        start = place.start
        if place.column.right:
            start += place.width - width
        elif width > place.width:
            text = cut(text, place.width, look.ellipsis)
            width = cells(text)
        if start > at:
            line.parts.append((" " * (start - at), ""))
            at = start
        line.parts.append((text, style))
        at += width
    line.width = at
    return line.trimmed()


def rule(look: Look, title: str, right: str = "", places: Mapping[str, Place] | None = None, *, width: int = 0) -> Line:
    """Return a pane's rule: its title, then either the captions of *places* or *right* at the end.

    A caption that would touch the title is left out, *right* too where it does not fit.
    """
    dash = look.sign("─")
    width = width or look.width
    line = look.line((dash * 2 + " ", "dim"), (look.cut(title, max(1, width - 6)), "bold"), " ")
    shown = [place for place in (places or {}).values() if place.column.caption and place.start > line.width]
    if shown:
        first = shown[0]
        start = first.end - cells(first.column.caption) if first.column.right else first.start
        line.add(dash * (min(start, first.start) - 1 - line.width), "dim")
        for place in shown:
            caption = place.column.caption
            start = place.end - cells(caption) if place.column.right else place.start
            if start > line.width and start + cells(caption) <= width:
                line.to(start).add(caption, "dim")
        return line
    tail = f" {right} {dash * 2}" if right else ""
    if line.width + cells(look.show(tail)) > width:
        tail = ""
    line.add(dash * (width - line.width - cells(look.show(tail))), "dim")
    if tail:
        line.add(f" {right} ").add(dash * 2, "dim")
    return line


def bar(look: Look, share: float, width: int) -> str:
    """Return a bar of *width* cells, full only from a share of 1 on."""
    used = width if share >= 1 else min(width - 1, max(0, round(share * width)))
    return look.sign("━") * used + look.sign("╌") * (width - used)


def spark(look: Look, values: Sequence[float]) -> str:
    """Return *values* as one small column each, against the largest of them."""
    signs = _ASCII_SPARKS if look.ascii else _SPARKS
    top = max(values, default=0.0)
    return "".join(signs[min(7, round(value / top * 7)) if top else 0] for value in values)


def widest(texts: Iterable[str], least: int = 0, most: int = NO_LIMIT) -> int:
    """Return the cells that the widest of *texts* takes, within *least* and *most*."""
    return min(most, max(least, max((cells(clean(text)) for text in texts), default=0)))


def plural(n: int, one: str, many: str | None = None) -> str:
    """Return ``1 task``, ``2,000 tasks``."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def wrapped(first: Line, text: str, style: str = "", *, indent: int = 0) -> list[Line]:
    """Return *text* behind *first*, in as many lines as it takes; only a word that is wider than a line is cut."""
    look = first.look
    if look.width >= NO_LIMIT:
        return [first.add(text, style)]
    lines, line, begun = [], first, False
    for word in look.show(text).split(" "):
        if begun and line.width + 1 + cells(word) > look.width:
            lines.append(line)
            line, begun = Line(look).add(" " * min(indent, max(0, look.width - 8))), False
        line.add(" " if begun else "", style).fill(word, look.width - line.width, style)
        begun = True
    return [*lines, line]
