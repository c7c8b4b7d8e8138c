"""What readers tell: signals that remember, and JSON lines to read."""

from __future__ import annotations

import json
from typing import Any

from orchestrator.agents.faults import Fault
from orchestrator.agents.meter import Meter, Report
from orchestrator.domain.outcome import Usage


class Told:
    """Signals that remember."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.tools: list[tuple[str, str]] = []
        self.sessions: list[str] = []
        self.results: list[Any] = []
        self.checkpoints: dict[str, Any] = {}
        self.faults: list[Fault] = []
        self.progressed: list[tuple[float | None, str | None]] = []
        self.meter = Meter()

    def message(self, text: str) -> None:
        self.messages.append(text)

    def tool(self, name: str, text: str) -> None:
        self.tools.append((name, text))

    def usage(self, report: Report) -> None:
        self.meter.add(report)

    def session(self, session: str) -> None:
        self.sessions.append(session)

    def result(self, value: Any) -> None:
        self.results.append(value)

    def checkpoint(self, name: str, value: Any) -> str | None:
        self.checkpoints[name] = value
        return None

    def error(self, fault: Fault) -> None:
        self.faults.append(fault)

    def progress(self, percent: float | None, message: str | None) -> None:
        self.progressed.append((percent, message))

    @property
    def used(self) -> Usage:
        usage = self.meter.close(ended=True)
        assert usage is not None
        return usage


def lines(*events: Any) -> bytes:
    """Events as JSON lines."""
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)
