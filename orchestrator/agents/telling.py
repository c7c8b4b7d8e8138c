"""What every adapter does with what its agent says: redact it, keep it as transcript, count usage, and pass the rest on.

``Output`` is one stream of bytes as it comes; ``Telling`` is the ``Signals`` that a reader calls, in front of the
worker's ``Live``. An adapter's attempt inherits from it.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable
from typing import Any

from orchestrator.agents.faults import Fault
from orchestrator.agents.meter import Meter, Report
from orchestrator.agents.protocol import LIMIT, Live
from orchestrator.agents.redact import Secrets
from orchestrator.domain.checkpoints import checkpoint_text
from orchestrator.domain.template import as_text
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput


class Output:
    """One stream of what an agent says: bytes in, redacted bytes and text out."""

    def __init__(self, name: str, secrets: Secrets) -> None:
        self.name = name
        self.bytes = 0
        self.replaced = False
        self._pending = 0
        self._last = b""
        self._redactor = secrets.stream() if secrets else None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, data: bytes, final: bool = False) -> tuple[bytes, str, int]:
        """Return what can be passed on: redacted bytes, their text, and how many bytes the agent wrote for it."""
        self.bytes += len(data)
        self._pending += len(data)
        if self._redactor is not None:
            data = self._redactor.feed(data)
            if final:
                data += self._redactor.flush()
        text = self._decoder.decode(data, final)
        if "\ufffd" in text and text.count("\ufffd") > (self._last + data).count(b"\xef\xbf\xbd"):
            self.replaced = True  # more of them than the agent itself has written
        self._last = data[-2:] if len(data) > 1 else (self._last + data)[-2:]
        if "\0" in text:
            text = text.replace("\0", "\ufffd")
            self.replaced = True
        size, self._pending = (self._pending, 0) if text else (0, self._pending)
        return data, text, size


class Telling:
    """The signals of one attempt, passed on to its ``Live``; usage goes through its meter first."""

    def __init__(self, live: Live, meter: Meter) -> None:
        self._live = live
        self._meter = meter
        self._tool: str | None = None
        self._limited = False
        self._grace: asyncio.TimerHandle | None = None

    def has_said_all(self, said: bool, seconds: float, end: Callable[[], None]) -> None:
        """Once its result or a question is there (*said*), *end* is called after *seconds*, unless it goes on."""
        if said and self._grace is None:
            self._grace = asyncio.get_running_loop().call_later(seconds, end)
        elif not said:
            self.lift_grace()

    def lift_grace(self) -> None:
        """Nothing ends it any more; at the attempt's own end as well."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def doing(self, tool: str | None) -> None:
        """The agent waits for *tool*, or for none; called whenever it has said something."""
        if tool != self._tool:
            self._tool, self._limited = tool, False
            self._live.activity(tool)

    def _goes_on(self) -> None:
        if self._limited:
            self._limited = False
            self._live.activity(self._tool)

    def message(self, text: str) -> None:
        """The agent said something to its user."""
        self._goes_on()
        self._live.write("message", text)

    def tool(self, name: str, text: str) -> None:
        """The agent used a tool."""
        self._live.write("tool", f"{name}: {text}")

    def usage(self, report: Report) -> None:
        """The agent reported usage: count it and say where the attempt stands."""
        self._goes_on()
        self._live.usage(self._meter.add(report))

    def session(self, session: str) -> None:
        """The agent named its session."""
        self._meter.session(session)
        self._live.session(session)

    def result(self, value: Any) -> None:
        """The agent gave its result; it goes into the outcome."""
        self._live.write("result", as_text(value))

    def error(self, fault: Fault) -> None:
        """The agent said that something failed. A limit may be one that it waits out by itself."""
        self._live.write("error", fault.message)
        if fault.status is OutcomeClass.RATE_LIMITED:
            self._limited = True
            self._live.activity(LIMIT)

    def progress(self, percent: float | None, message: str | None) -> None:
        """The agent said how far it is."""
        self._live.progress(percent, message)

    def checkpoint(self, name: str, value: Any) -> str | None:
        """The agent finished a step: keep its result for later attempts. Returns why that cannot be, else None.

        It is durable before the attempt's own end is recorded.
        """
        try:
            self._live.keep(name, checkpoint_text(name, value))
        except InvalidInput as error:
            return error.message
        return None
