"""What a command prints: one JSON document or lines for people on stdout, everything else on stderr.

Foreign text reaches a terminal only through ``dashboard.text.clean`` or as JSON, whose every character but printable
ASCII is escaped: so nothing in it is a control sequence, and all of it can be got back.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TextIO
from uuid import UUID

if TYPE_CHECKING:
    from orchestrator.dashboard.frame import Line


INTERRUPTED = 130
"""The exit code of what Ctrl-C ended."""


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return *value* as JSON in ASCII without control characters."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, indent=indent, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Decimal):
        return float(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def document(value: Any) -> None:
    """Print *value* as the one JSON document of this command."""
    _write(sys.stdout, json_text(value, indent=2) + "\n")


def json_line(value: Any) -> None:
    """Print *value* as one line of a stream of JSON lines, at once."""
    _write(sys.stdout, json_text(value) + "\n")
    sys.stdout.flush()


def text(said: str, *, flush: bool = False) -> None:
    """Print *said*, which is ours or cleaned already, as a line on stdout."""
    _write(sys.stdout, said + "\n")
    if flush:
        sys.stdout.flush()


def raw(said: str) -> None:
    """Print *said* as it is: only where somebody asked for it."""
    _write(sys.stdout, said)


def lines(drawn: Iterable[Line], stream: TextIO | None = None) -> None:
    """Print the lines of a renderer, painted as the stream allows."""
    from orchestrator.dashboard.terminal import examine

    stream = stream if stream is not None else sys.stdout
    paint = examine(stream).paint
    _write(stream, "".join(line.painted(paint) + "\n" for line in drawn))


def note(said: str) -> None:
    """Tell a person something on stderr; foreign text in it is made harmless. Where stderr is gone, nobody is told."""
    from orchestrator.dashboard.text import clean

    try:
        sys.stderr.write("".join(clean(line) + "\n" for line in said.split("\n")))
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def note_lines(drawn: Iterable[Line]) -> None:
    """Print the lines of a renderer on stderr."""
    try:
        lines(drawn, sys.stderr)
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def failure(code: str, message: str, hint: str | None, *, as_json: bool, more: Mapping[str, Any] | None = None) -> None:
    """Print an error: a document on stdout for machines, else message and next step on stderr."""
    if as_json:
        document({"error": {"code": code, "message": message, "hint": hint, **(more or {})}})
        return
    note(f"error: {message}")
    if hint:
        note(f"hint: {hint}")


def _write(stream: TextIO, said: str) -> None:
    try:
        stream.write(said)
    except ValueError as error:
        # A closed stream says so in a ValueError; whoever reads is gone, as with a closed pipe.
        raise BrokenPipeError(errno.EPIPE, str(error)) from error


# -- the streams -------------------------------------------------------------------------------------------------------


def prepare_streams() -> None:
    """Make the standard streams usable, whatever they were started as.

    A descriptor that is closed is opened on the null device, lest a socket take its number and be written to. What an
    encoding cannot carry is printed as an escape instead of raising.
    """
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def discard_stdout() -> None:
    """Let what is still buffered for a reader who has gone vanish without a word."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError, AttributeError):
        pass
