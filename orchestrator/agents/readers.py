"""Reading what agents say: bytes of any size and kind in, signals at once and findings at the end.

Reading order: ``make_reader``'s table at the end, then the readers for text and JSON, the lines of the contract, and
``EventsFile``. Those for the event streams of CLIs are in ``clis``. No reader ever raises for what an agent wrote: what
cannot be read is passed over, and what was left out is a note.
"""

from __future__ import annotations

from typing import Any

from orchestrator.agents.clis import (
    ClaudeMessages,
    ClaudeReader,
    CodexReader,
    GeminiReader,
    OpencodeReader,
    read_claude_result,
)
from orchestrator.agents.faults import shorten
from orchestrator.agents.meter import read_report
from orchestrator.agents.openai import OpenaiReader
from orchestrator.agents.reading import (
    LINE_LIMIT,
    TEXT_LIMIT,
    EventReader,
    Findings,
    Lines,
    Reader,
    Signals,
    Tail,
    last_document,
    merge,
    parse,
    text_of,
)
from orchestrator.domain.asking import read_ask
from orchestrator.errors import InvalidInput

__all__ = ["OUTPUTS", "EventsFile", "Findings", "Reader", "Signals", "make_reader", "merge"]


class TextReader(Reader):
    """Whatever stands on stdout is the result: all of it, or its end."""

    def __init__(self, signals: Signals) -> None:
        super().__init__(signals)
        self._text = Tail(TEXT_LIMIT)

    def _read(self, data: bytes) -> None:
        self._text.feed(data)

    def _end(self) -> None:
        findings = self._findings
        findings.result, findings.has_result = self._text.text().strip(), True
        if self._text.cut:
            findings.note(f"the result is the last {TEXT_LIMIT // 1024} KB of {self._text.size} bytes of output")


class JsonReader(Reader):
    """All of stdout is one JSON document; else the last one that fills one or more lines."""

    output = "json"
    due = "a JSON document on stdout"

    def __init__(self, signals: Signals) -> None:
        super().__init__(signals)
        self._held = bytearray()
        self._late: Tail | None = None

    def _read(self, data: bytes) -> None:
        if self._late is not None:
            self._late.feed(data)
        elif len(self._held) + len(data) <= LINE_LIMIT:
            self._held += data
        else:
            self._late = Tail(1024 * 1024)
            self._late.feed(bytes(self._held[-1024 * 1024 :]) + data)
            self._held.clear()

    def _end(self) -> None:
        if self._late is None:
            text = self._held.decode("utf-8", "replace").strip()
        else:
            text = self._late.text()
            self._findings.note(f"more than {LINE_LIMIT >> 20} MB on stdout: only its last lines were read as JSON")
        try:
            value = parse(text)
        except ValueError:
            try:
                value = last_document(text)
            except ValueError:
                return
        # All events of a CLI may be one list, with its result as the last.
        last = value[-1] if isinstance(value, list) and value else value
        if isinstance(last, dict) and last.get("type") == "result" and "is_error" in last:
            read_claude_result(self, last)
        else:
            self._result(value, succeeded=False)


# The contract's own lines ----------------------------------------------------------------------------------------------

CONTRACT_LINES = frozenset({"progress", "usage", "checkpoint", "session", "result", "ask"})


def read_contract_line(event: dict[str, Any], findings: Findings, signals: Signals) -> None:
    """Take in one line of the events file; a line that is not as the contract says is left out with a note."""
    kind = event.get("type")
    if kind == "progress":
        percent = event.get("percent")
        valid = isinstance(percent, int | float) and not isinstance(percent, bool) and 0 <= percent <= 100
        if percent is not None and not valid:
            findings.note(f"progress must be a number from 0 to 100, found {shorten(str(percent), 40)}")
        message = event.get("message")
        said = shorten(message, 500) if isinstance(message, str) else None
        if valid or said is not None:
            signals.progress(float(percent) if valid and percent is not None else None, said)
    elif kind == "usage":
        report = read_report(event)
        if isinstance(report, str):
            findings.note(report)
        else:
            signals.usage(report)
    elif kind == "session":
        if session := text_of(event.get("id")):
            if session != findings.session:
                findings.session = session
                signals.session(session)
        else:
            findings.note("a session without an id (a text) was ignored")
    elif kind == "result":
        findings.result, findings.has_result = event.get("value"), True
        signals.result(findings.result)
    elif kind == "checkpoint":
        if (name := text_of(event.get("name"))) and "value" in event:
            if name not in findings.checkpoints:  # the first write wins
                findings.checkpoints[name] = event["value"]
                if (fault := signals.checkpoint(name, event["value"])) is not None:
                    findings.note(f"a checkpoint was not kept: {fault}")
        else:
            findings.note("a checkpoint without name (a text) and value was ignored")
    elif kind == "ask":
        try:
            findings.ask(read_ask(event))
        except InvalidInput as error:
            findings.note(f"a question was ignored: {error.message}")


class EventsFile:
    """The file that ``ORCHESTRATOR_EVENTS`` names, as it grows. A hostile line is left out with a note."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._lines = Lines(1024 * 1024)
        self._findings = Findings(output="events")

    @property
    def asked(self) -> bool:
        """Whether the agent asked a person: then its exit code does not count, and it has only its grace to end."""
        return bool(self._findings.asks)

    def feed(self, data: bytes) -> None:
        """Read what was appended."""
        for line in self._lines.feed(data):
            self._line(line)

    def begin_again(self) -> None:
        """Say that the file was written anew: what was read of it stays, and its lines come from the first one on."""
        self.feed(b"\n")
        self._findings.note("the events file was written anew instead of appended to: it was read from its start again")

    def close(self) -> Findings:
        """Return what is known, once nothing more comes."""
        for line in self._lines.close():
            self._line(line)
        if self._lines.left_out:
            self._findings.note(f"{self._lines.left_out} lines of more than 1 MB in the events file were left out")
        return self._findings

    def _line(self, line: bytes) -> None:
        try:
            event = parse(line.strip())
        except ValueError:
            event = None
        if not isinstance(event, dict) or str(event.get("type")) not in CONTRACT_LINES:
            known = ", ".join(sorted(CONTRACT_LINES))
            self._findings.note(f"a line of the events file was ignored: expected a JSON object of type {known}")
            return
        read_contract_line(event, self._findings, self._signals)


class JsonlReader(EventReader):
    """JSON objects: the lines of the contract, and the last object of type ``result``, else the last object."""

    output = "jsonl"

    def __init__(self, signals: Signals) -> None:
        super().__init__(signals)
        self._last: dict[str, Any] | None = None
        self._claude = ClaudeMessages()

    def _event(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "result" and ("is_error" in event or "subtype" in event):
            read_claude_result(self, event)
        elif kind == "result":
            value = event.get("value", event.get("result", event))
            self._result(value, succeeded=False)
            self.has_result = True
        elif str(kind) in CONTRACT_LINES:
            read_contract_line(event, self._findings, self._signals)
        elif kind in ("assistant", "user", "system"):
            self._session(event.get("session_id"))
            self.busy = self._claude.read(event, self._signals)
        else:
            self._last = event

    def _end(self) -> None:
        super()._end()
        if not self._findings.has_result and self._last is not None:
            self._result(self._last, succeeded=False)


_READERS: dict[str, type[Reader]] = {
    reader.output: reader
    for reader in (
        TextReader,
        JsonReader,
        JsonlReader,
        ClaudeReader,
        CodexReader,
        GeminiReader,
        OpencodeReader,
        OpenaiReader,
    )
}
OUTPUTS = tuple(_READERS)


def make_reader(output: str, signals: Signals) -> Reader:
    """Return a reader for *output*: text, json, jsonl, claude, codex, gemini, opencode or openai."""
    try:
        kind = _READERS[output]
    except KeyError:
        raise InvalidInput(f"output {output!r} is not known", hint=f"use one of {', '.join(OUTPUTS)}") from None
    return kind(signals)
