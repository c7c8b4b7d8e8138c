"""The ground that all readers of agents' output stand on.

Reading order: ``Signals`` (who is told meanwhile), ``Findings`` (what is known at the end), ``Tail`` and ``Lines`` (bytes
in bounded memory), then ``Reader`` and ``EventReader``, which the kinds of output fill in. The kinds are in ``readers``
and ``clis``.
"""

from __future__ import annotations

import contextlib
import json
import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.agents.faults import Fault, shorten
from orchestrator.agents.meter import Report
from orchestrator.domain.asking import Ask

LINE_LIMIT = 16 * 1024 * 1024
"""A longer line is left out, with a note: an agent cannot make us hold more than this."""
TEXT_LIMIT = 64 * 1024
"""Bytes from the end of a text agent's stdout that become its result."""
_TAIL = 8 * 1024
JOINED_LIMIT = 1024 * 1024
_NOTES = 20
_ASKS = 20
_NO_BRACE = 64 * 1024


class Signals(Protocol):
    """Who is told what an agent says while it says it. Calls come in the order of the agent's words, on one thread."""

    def message(self, text: str) -> None:
        """The agent said *text* to its user."""

    def tool(self, name: str, text: str) -> None:
        """The agent uses the tool *name*; *text* is its input or what it answered, shortened."""

    def usage(self, report: Report) -> None:
        """The agent reported usage; a ``Meter`` makes this attempt's part of it."""

    def session(self, session: str) -> None:
        """The agent named its session, by which the next attempt can go on."""

    def result(self, value: Any) -> None:
        """The agent gave its result (a JSON value); a later one replaces it."""

    def error(self, fault: Fault) -> None:
        """The agent said that something failed; whether it is the end of it shows only at the end."""

    def progress(self, percent: float | None, message: str | None) -> None:
        """The agent said how far it is; None leaves that half as it was."""

    def checkpoint(self, name: str, value: Any) -> str | None:
        """The agent finished the step *name*; returns why its result cannot be kept, None if it can."""


@dataclass(slots=True)
class Findings:
    """What an agent said, once it has said everything.

    ``succeeded``: it said itself that it ended well, which an exit code alone does not. ``is_error`` and ``fault``: it
    said that it failed. ``result_due`` names what this kind of output must bring (empty: nothing).
    """

    output: str = "text"
    result: Any = None
    has_result: bool = False
    succeeded: bool = False
    is_error: bool = False
    fault: Fault | None = None
    result_due: str = ""
    session: str | None = None
    denied: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    checkpoints: dict[str, Any] = field(default_factory=dict)

    @property
    def last_line(self) -> str:
        """The last words that mean something: of stderr, else of stdout; empty if there were none."""
        return self.last_lines[-1] if self.last_lines else ""

    def ask(self, ask: Ask) -> None:
        """Keep a question: one of a name. Other words under that name are left out with a note, never put in its place."""
        same = next((one for one in self.asks if one.name == ask.name), None)
        if same is None and len(self.asks) < _ASKS:
            self.asks.append(ask)
        elif same is None:
            self.note(f"more than {_ASKS} questions at once: the others were left out")
        elif same.question != ask.question or (ask.choices and ask.choices != same.choices):
            what = "choices" if same.question == ask.question else "words"
            self.note(f"asked under the name {ask.name!r:.100} twice, with other {what}: the first question counts")

    def note(self, text: str) -> None:
        """Keep a sentence for the run row, once, and not without end."""
        if text not in self.notes and len(self.notes) < _NOTES:
            self.notes.append(text)


def merge(output: Findings, events: Findings) -> Findings:
    """Add what stood in the events file to what was read from the output. A result in the file is the result."""
    if events.has_result:
        output.result, output.has_result = events.result, True
    output.session = output.session or events.session
    for ask in events.asks:
        output.ask(ask)
    output.checkpoints.update(events.checkpoints)
    for note in events.notes:
        output.note(note)
    return output


# Bytes, lines, JSON ----------------------------------------------------------------------------------------------------


class Tail:
    """The last bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = bytearray()
        self.size = 0

    def feed(self, data: bytes) -> None:
        self.size += len(data)
        if len(data) >= self._limit:
            self._held[:] = data[-self._limit :]
            return
        self._held += data
        if len(self._held) > 2 * self._limit:
            del self._held[: -self._limit]

    @property
    def cut(self) -> bool:
        return self.size > self._limit

    def text(self) -> str:
        """The bytes as text, bad ones replaced; a character that the cut went through is left out."""
        data = bytes(self._held[-self._limit :])
        if self.cut:
            start = 0
            while start < min(4, len(data)) and data[start] & 0xC0 == 0x80:
                start += 1
            data = data[start:]
        return data.decode("utf-8", "replace")


class Lines:
    """Chunks of any size to whole lines that may hold a JSON object; a line of any length costs bounded memory."""

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self._limit = limit
        self._part = bytearray()
        self._skipping = False
        self.left_out = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that *data* completes, without those that hold no brace."""
        first = data.find(b"\n")
        if first < 0:
            self._hold(data)
            return
        self._hold(data[:first])
        if (line := self._take()) is not None:
            yield line
        last = data.rfind(b"\n")
        # Searching whole chunks for a brace is what makes gigabytes of plain lines cheap.
        if last > first and data.find(b"{", first, last) >= 0:
            for line in data[first + 1 : last].split(b"\n"):
                if b"{" in line:
                    yield line
        if last + 1 < len(data):
            self._hold(data[last + 1 :])

    def close(self) -> Iterator[bytes]:
        """The last line, if it had no end."""
        if (line := self._take()) is not None:
            yield line

    def _hold(self, data: bytes) -> None:
        if self._skipping:
            return
        if len(self._part) + len(data) > self._limit:
            if b"{" in self._part[:4096] or b"{" in data[:4096]:
                self.left_out += 1
            self._part.clear()
            self._skipping = True
            return
        self._part += data
        if len(self._part) > _NO_BRACE and b"{" not in self._part:
            # No object starts in it: there is no need to hold on to a wall of text until it ends.
            self._part.clear()
            self._skipping = True

    def _take(self) -> bytes | None:
        self._skipping = False
        if not self._part:
            return None
        line = bytes(self._part)
        self._part.clear()
        return line if b"{" in line else None


def _whole_number(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:  # more digits than Python converts
        return float(digits)


def parse(text: str | bytes) -> Any:
    """*text* as a JSON value, tolerant of control characters and of bytes that are not UTF-8; ValueError if it is none."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    text = text.lstrip("﻿")
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, strict=False, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


_OBJECT = re.compile(r'\{\s*["}]')
_LENIENT = json.JSONDecoder(strict=False)
_LENIENT_ABOUT_NUMBERS = json.JSONDecoder(strict=False, parse_int=_whole_number)


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at *start*, and where it ends; ValueError if there is none."""
    try:
        return _LENIENT.raw_decode(text, start)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return _LENIENT_ABOUT_NUMBERS.raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_objects(line: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects in *line*, in order, whatever noise stands before, between and behind them.

    What looks like an object but is cut ends the search, as all that follows may be a part of it. Only where such a
    beginning is at the start of the line, one object that lasts to the line's end is still looked for: two processes
    may have written at once.
    """
    text = line.decode("utf-8", "replace")
    found = _OBJECT.search(text)
    while found is not None:
        start = found.start()
        try:
            value, end = _decode(text, start)
        except ValueError:
            second = _OBJECT.search(text, 1) if start == 0 else None
            if second is not None and text.rstrip().endswith("}"):
                with contextlib.suppress(ValueError):
                    yield parse(text[second.start() :])
            return
        yield value
        found = _OBJECT.search(text, end)


def last_document(text: str) -> Any:
    """The last JSON value in *text* that fills one or more lines, with noise around it; ValueError if there is none.

    A part of a value is never taken for the whole: lines within a list or an object are not looked at one by one, and
    after one that is broken only a list or an object at the start of a line counts.
    """
    missing = value = object()
    at, broken = 0, False
    while at < len(text):
        end = _line_end(text, at)
        line = text[at:end]
        start = at + len(line) - len(line.lstrip(" \t\r\ufeff"))
        if text.startswith(("{", "["), start):
            if broken and start > at:
                at = end + 1
                continue
            try:
                read, past = _decode(text, start)
            except json.JSONDecodeError as error:
                if not text[error.pos :].strip():
                    break  # it is cut: all the rest is a part of it
                broken = broken or error.pos > end
                at = max(end + 1, text.rfind("\n", 0, error.pos) + 1)
                continue
            except ValueError:
                break
            end = _line_end(text, past)
            if not text[past:end].strip():
                value = read
        elif not broken and line.strip():
            with contextlib.suppress(ValueError):
                value = parse(line.strip())
        at = end + 1
    if value is missing:
        raise ValueError("no JSON")
    return value


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def flatten(content: Any) -> str:
    """The text of a message's content: a string, or blocks of which some are text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(part for part in map(flatten, content) if part)
    if isinstance(content, dict):
        text = content.get("text", content.get("content"))
        return flatten(text) if text is not None else ""
    return ""


def brief(value: Any, limit: int = 500) -> str:
    """A tool's input or answer on few characters."""
    if isinstance(value, dict) and len(value) == 1:
        value = next(iter(value.values()))
    return shorten(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), limit)


def text_of(value: Any) -> str | None:
    """*value* if it is a text that is not empty."""
    return value if isinstance(value, str) and value else None


def mapping(value: Any) -> dict[str, Any]:
    """*value* if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


# Readers ---------------------------------------------------------------------------------------------------------------


class Reader:
    """One attempt's output. ``feed`` as bytes come, ``close`` once at the end.

    ``has_result`` is True as soon as the agent has given its final result: from then on it has only ``result_grace`` to
    end. ``busy`` names the tool that it waits for, None between tools.
    """

    output = "text"
    due = ""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._findings = Findings(output=self.output, result_due=self.due)
        self._stdout = Tail(_TAIL)
        self._stderr = Tail(_TAIL)
        self.has_result = False
        self.busy: str | None = None

    @property
    def asked(self) -> bool:
        """Whether the agent asked a person: then its exit code does not count, and it has only that grace to end."""
        return bool(self._findings.asks)

    def feed(self, stream: str, data: bytes) -> None:
        """Read *data* that the agent wrote to *stream* (``stdout`` or ``stderr``)."""
        if stream == "stdout":
            self._stdout.feed(data)
            self._read(data)
        else:
            self._stderr.feed(data)

    def close(self) -> Findings:
        """Return what is known, once nothing more comes."""
        self._end()
        findings = self._findings
        for tail in (self._stdout, self._stderr):
            lines = [line.strip() for line in tail.text().splitlines() if self._means(line.strip())]
            if lines:
                findings.last_lines = [shorten(line, 1_000) for line in lines[-3:]]
        return findings

    def _means(self, line: str) -> bool:
        """Whether *line* says something to a person."""
        return bool(line)

    @abstractmethod
    def _read(self, data: bytes) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...

    def _session(self, session: Any) -> None:
        if (name := text_of(session)) and name != self._findings.session:
            self._findings.session = name
            self._signals.session(name)

    def _result(self, value: Any, *, succeeded: bool) -> None:
        findings = self._findings
        findings.result, findings.has_result, findings.succeeded = value, True, succeeded
        findings.is_error, findings.fault = False, None
        self._signals.result(value)

    def _unfinished(self) -> None:
        """It goes on after a result: that was not its last word, and only the next one counts."""
        findings = self._findings
        self.has_result = findings.has_result = findings.succeeded = False
        findings.result = None

    def _failed(self, fault: Fault) -> None:
        findings = self._findings
        findings.is_error, findings.succeeded, findings.fault = True, False, fault
        self._signals.error(fault)


class EventReader(Reader):
    """A stream of JSON objects, one a line, with whatever noise between them."""

    def __init__(self, signals: Signals) -> None:
        super().__init__(signals)
        self._lines = Lines()

    def _read(self, data: bytes) -> None:
        for line in self._lines.feed(data):
            self._line(line)

    def _means(self, line: str) -> bool:
        # What stands in events is read from them; as text it would only be mistaken for words about a failure.
        return bool(line) and not line.startswith("{")

    def _line(self, line: bytes) -> None:
        for event in parse_objects(line):
            try:
                self._event(event)
            except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError) as error:
                # A stream of a kind that we do not know yet must not end the attempt.
                self._findings.note(
                    f"an event of type {str(event.get('type'))[:40]!r} could not be read: {error}"[:300]
                )

    def _end(self) -> None:
        for line in self._lines.close():
            self._line(line)
        if self._lines.left_out:
            self._findings.note(f"{self._lines.left_out} lines of more than {LINE_LIMIT >> 20} MB were left out")

    @abstractmethod
    def _event(self, event: dict[str, Any]) -> None: ...
