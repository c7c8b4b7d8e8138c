"""Takes secret values out of what a function says, as the adapters of commands and HTTP do with what they read.

``Hiding`` stands in front of the worker's ``Live``; ``without_secrets`` does the same to an outcome.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from orchestrator.agents.protocol import Live
from orchestrator.agents.redact import Redactor, Secrets
from orchestrator.domain.asking import Ask
from orchestrator.domain.outcome import Outcome, Usage


class Hiding:
    """A ``Live`` that passes everything on without the values of *secrets*. ``close`` at the attempt's end."""

    def __init__(self, live: Live, secrets: Secrets) -> None:
        self._live = live
        self._secrets = secrets
        self._streams: dict[str, Redactor] = {}

    def write(self, kind: str, text: str, size: int | None = None) -> None:
        """Add to the transcript; in stdout and stderr a value is also found where it is cut between two pieces."""
        if kind not in ("stdout", "stderr"):
            self._live.write(kind, self._secrets.text(text), size)
            return
        stream = self._streams.get(kind)
        if stream is None:
            stream = self._streams[kind] = self._secrets.stream()
        data = text.encode("utf-8", "surrogatepass")
        said = stream.feed(data).decode("utf-8", "surrogatepass")
        self._live.write(kind, said, len(data) if size is None else size)

    def close(self) -> None:
        """Pass on what was held back as the possible beginning of a value."""
        for kind, stream in self._streams.items():
            if rest := stream.flush():
                self._live.write(kind, rest.decode("utf-8", "surrogatepass"), 0)

    def progress(self, percent: float | None, message: str | None) -> None:
        """Set what the task row shows."""
        self._live.progress(percent, None if message is None else self._secrets.text(message))

    def usage(self, usage: Usage) -> None:
        """Set this attempt's own part so far."""
        self._live.usage(_used(usage, self._secrets))

    def session(self, session: str) -> None:
        """Set the session."""
        self._live.session(self._secrets.text(session))

    def workspace(self, told: dict[str, Any]) -> None:
        """Set where the attempt works."""
        self._live.workspace(told)

    def activity(self, what: str | None) -> None:
        """Say what it is doing."""
        self._live.activity(None if what is None else self._secrets.text(what))

    def keep(self, name: str, text: str) -> Future[Any]:
        """Keep a checkpoint. The function gets what is stored, as a later attempt would."""
        return self._live.keep(self._secrets.text(name), self._secrets.text(text))


def without_secrets(outcome: Outcome, secrets: Secrets) -> Outcome:
    """Return *outcome* without the values of *secrets* in anything that the function can have put into it."""

    def clean(text: str | None) -> str | None:
        return None if text is None else secrets.text(text)

    def asked(ask: Ask) -> Ask:
        return replace(
            ask,
            name=secrets.text(ask.name),
            question=secrets.text(ask.question),
            choices=tuple(dict.fromkeys(map(secrets.text, ask.choices))),
            default=clean(ask.default),
        )

    return replace(
        outcome,
        cause=clean(outcome.cause),
        message=clean(outcome.message),
        result=secrets.value(outcome.result),
        session=clean(outcome.session),
        notes=tuple(map(secrets.text, outcome.notes)),
        asks=tuple(map(asked, outcome.asks)),
        usage=None if outcome.usage is None else _used(outcome.usage, secrets),
    )


def _used(usage: Usage, secrets: Secrets) -> Usage:
    return replace(usage, model=secrets.value(usage.model), carry=secrets.value(usage.carry))


__all__ = ["Hiding", "without_secrets"]
