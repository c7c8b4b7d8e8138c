"""``output: openai``: what a server answers that speaks OpenAI's Chat Completions, at once or as a stream of chunks."""

from __future__ import annotations

from typing import Any

from orchestrator.agents.faults import Fault, from_status, from_text, shorten
from orchestrator.agents.meter import DELTA, Amount, Report, tokens
from orchestrator.agents.reading import JOINED_LIMIT, EventReader, Signals, flatten, mapping, parse, text_of
from orchestrator.domain.words import OutcomeClass


class OpenaiReader(EventReader):
    """The result is the text of the first choice; a tool call that nobody runs is a note.

    A whole answer may be spread over several lines; chunks come one a line.
    """

    output = "openai"
    due = "a choice with a finish_reason"

    def __init__(self, signals: Signals) -> None:
        super().__init__(signals)
        self._parts: list[str] = []
        self._size = 0
        self._document = bytearray()
        self._events = 0

    def _read(self, data: bytes) -> None:
        if not self._events and len(self._document) + len(data) <= JOINED_LIMIT:
            self._document += data
        super()._read(data)

    def _end(self) -> None:
        super()._end()
        if not self._events:
            try:
                whole = parse(bytes(self._document))
            except ValueError:
                return
            if isinstance(whole, dict):
                self._event(whole)

    def _event(self, event: dict[str, Any]) -> None:
        if error := event.get("error"):
            self._events += 1
            self._say_failed(error)
            return
        choices = event.get("choices")
        if not isinstance(choices, list):
            return
        self._events += 1
        self._count(event)
        choice = mapping(choices[0]) if choices else {}
        whole = mapping(choice.get("message"))
        said = flatten(whole.get("content") if whole else mapping(choice.get("delta")).get("content"))
        self._size += len(said)
        if said and self._size <= JOINED_LIMIT:
            self._parts.append(said)
        if said:
            self._signals.message(said)
        if (whole or mapping(choice.get("delta"))).get("tool_calls"):
            self._findings.note("it asked for a tool, and none is offered here")
        if (reason := text_of(choice.get("finish_reason"))) is not None:
            self.has_result = True
            self._result("".join(self._parts), succeeded=True)
            if reason in ("length", "content_filter"):
                self._findings.note(f"warning: the answer is not whole (finish_reason {reason})")

    def _count(self, event: dict[str, Any]) -> None:
        usage = mapping(event.get("usage"))
        read, wrote = tokens(usage.get("prompt_tokens")), tokens(usage.get("completion_tokens"))
        total = tokens(usage.get("total_tokens"))
        if read is not None or wrote is not None or total is not None:
            amount = Amount(read, wrote, (read or 0) + (wrote or 0) if total is None else total)
            model = text_of(event.get("model"))
            self._signals.usage(Report(amount, DELTA, text_of(event.get("id")), turns=1, model=model, final=True))

    def _say_failed(self, error: Any) -> None:
        words = flatten(mapping(error).get("message")) or flatten(error) or "an error without a message"
        status = mapping(error).get("status", mapping(error).get("code"))
        if isinstance(status, int) and 400 <= status <= 599:
            fault: Fault | None = from_status(status, words)
        else:
            fault = from_text(words)
        self.has_result = True
        self._failed(fault or Fault(OutcomeClass.TRANSIENT, "agent_error", shorten(words)))


__all__ = ["OpenaiReader"]
