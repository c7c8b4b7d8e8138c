"""The transcript of one attempt while it runs: the head and the tail of what the agent says, within fixed memory.

The first 1 MB is kept as it comes, in pieces of at most 64 KB. After that only the newest 256 KB are kept; what lies
between is counted, not kept. ``take`` hands out what has to be written since the last time.
"""

from __future__ import annotations

from collections import deque

from orchestrator.domain.outcome import TranscriptSize
from orchestrator.domain.storable import storable_text
from orchestrator.repositories.events import TAIL, TAIL_SEQ, Piece, pack_tail

HEAD_BYTES = 1 << 20
TAIL_BYTES = 256 << 10
PIECE_BYTES = 64 << 10
HEAD_PIECES = 20_000
"""An agent that says one word at a time must not fill the database with rows either."""
TAIL_PIECES = 4_000

STREAMS = frozenset({"stdout", "stderr"})
"""Kinds whose pieces are stretches of one text: neighbours are joined. A piece of another kind is a thing of its own."""


class Transcript:
    """Collects pieces. Not safe for several threads at once: the caller holds a lock."""

    __slots__ = (
        "_dropped",
        "_head_bytes",
        "_head_full",
        "_new",
        "_new_parts",
        "_next",
        "_replaced",
        "_seen",
        "_tail",
        "_tail_bytes",
        "_tail_dirty",
    )

    def __init__(self) -> None:
        self._new: list[Piece] = []
        self._new_parts: list[str] = []
        self._next = 0
        self._head_bytes = 0
        self._head_full = False
        self._tail: deque[tuple[Piece, int]] = deque()
        self._tail_bytes = 0
        self._tail_dirty = False
        self._seen = 0
        self._dropped = 0
        self._replaced = False

    def add(self, kind: str, text: str, size: int | None = None) -> None:
        """Add *text*; ``size`` is the number of bytes that the agent wrote for it (default: its UTF-8 length).

        Characters that the database cannot hold are replaced, and ``size().replaced`` says so.
        """
        text, replaced = storable_text(text)
        self._replaced = self._replaced or replaced
        length = len(text) if text.isascii() else len(text.encode())
        written = length if size is None else size
        self._seen += written
        if not text:
            return
        if length <= PIECE_BYTES:
            self._add(kind, text, length, written)
            return
        for part, part_length in _split(text):
            share = min(part_length, written)
            written -= share
            self._add(kind, part, part_length, share)
        if written:
            # More bytes than text (a replacement is shorter than what it replaced): they belong to the last piece.
            self._grow_last(written)

    def take(self, *, tail: bool = True) -> list[Piece]:
        """Return the pieces that are to be written now, and forget them; with *tail* also the packed newest ones.

        The pieces of a failed write are given back by ``give_back``.
        """
        self._close_open()
        pieces, self._new = self._new, []
        if tail and self._tail_dirty:
            self._tail_dirty = False
            newest = [piece for piece, _ in self._tail]
            pieces.append(Piece(TAIL_SEQ, TAIL, pack_tail(newest), self._dropped))
        return pieces

    def give_back(self, pieces: list[Piece]) -> None:
        """Take back what could not be written."""
        self._close_open()
        self._new = [piece for piece in pieces if piece.seq != TAIL_SEQ] + self._new
        self._tail_dirty = self._tail_dirty or any(piece.seq == TAIL_SEQ for piece in pieces)

    @property
    def dirty(self) -> bool:
        """Whether ``take`` would return something."""
        return bool(self._new) or self._tail_dirty

    def size(self) -> TranscriptSize:
        """Bytes that came, bytes left out, and whether characters were replaced."""
        return TranscriptSize(self._seen, self._dropped, self._replaced)

    def _add(self, kind: str, text: str, length: int, written: int) -> None:
        if not self._head_full:
            if self._head_bytes + length <= HEAD_BYTES and self._next < HEAD_PIECES:
                self._head_bytes += length
                self._add_head(kind, text, length, written)
                return
            self._head_full = True
            self._close_open()
        last = self._tail[-1] if self._tail else None
        if last is not None and kind in STREAMS and last[0].kind == kind and last[1] + length <= PIECE_BYTES // 16:
            piece = Piece(last[0].seq, kind, last[0].text + text, last[0].size + written)
            self._tail[-1] = (piece, last[1] + length)
        else:
            self._tail.append((Piece(self._next, kind, text, written), length))
            self._next += 1
        self._tail_bytes += length
        self._tail_dirty = True
        while (self._tail_bytes > TAIL_BYTES or len(self._tail) > TAIL_PIECES) and len(self._tail) > 1:
            piece, gone = self._tail.popleft()
            self._tail_bytes -= gone
            self._dropped += piece.size

    def _add_head(self, kind: str, text: str, length: int, written: int) -> None:
        last = self._new[-1] if self._new else None
        if last is not None and self._new_parts and kind in STREAMS and last.kind == kind:
            joined = sum(map(len, self._new_parts)) if len(self._new_parts) < 64 else PIECE_BYTES
            if joined + length <= PIECE_BYTES // 4:
                self._new_parts.append(text)
                self._new[-1] = last._replace(size=last.size + written)
                return
        self._close_open()
        self._new.append(Piece(self._next, kind, text, written))
        self._new_parts = [text]
        self._next += 1

    def _grow_last(self, written: int) -> None:
        if self._tail:
            piece, length = self._tail[-1]
            self._tail[-1] = (piece._replace(size=piece.size + written), length)
        elif self._new:
            self._new[-1] = self._new[-1]._replace(size=self._new[-1].size + written)

    def _close_open(self) -> None:
        if len(self._new_parts) > 1 and self._new:
            self._new[-1] = self._new[-1]._replace(text="".join(self._new_parts))
        self._new_parts = []


def _split(text: str) -> list[tuple[str, int]]:
    """Cut *text* into parts of at most ``PIECE_BYTES`` bytes of UTF-8, never inside a character."""
    data = text.encode()
    parts = []
    start = 0
    while start < len(data):
        end = min(start + PIECE_BYTES, len(data))
        while end < len(data) and data[end] & 0xC0 == 0x80:
            end -= 1
        parts.append((data[start:end].decode(), end - start))
        start = end
    return parts


__all__ = ["HEAD_BYTES", "PIECE_BYTES", "STREAMS", "TAIL_BYTES", "Transcript"]
