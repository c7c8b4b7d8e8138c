"""Why the database gave no answer, in one line for a screen."""

from __future__ import annotations

import re

from orchestrator.database.transient import classify, reason
from orchestrator.errors import OrchestratorError


def is_slow(error: Exception) -> bool:
    """Return whether a snapshot failed because it took too long."""
    return "statement timeout" in f"{error} {error.__cause__ or ''}"


def reason_of(error: Exception) -> str:
    """Return why a snapshot failed, in one short line."""
    if is_slow(error):
        return "reading takes too long"
    if isinstance(error, OrchestratorError):
        text = error.message
    elif classify(error):
        text = reason(error)
    else:
        return f"{type(error).__name__}: {error}".strip().split("\n")[0]
    text = text.removeprefix("the database cannot be reached: ").strip().split("\n")[0]
    # libpq names the server first and asks a question last; between them stands what happened.
    text = re.sub(r".*\bfailed: (?:FATAL: +|error: )?", "", text)
    text = re.split(r" (?=Is the server |This probably means )", text)[0]
    if text == "No such file or directory":  # of the socket, which a server that does not run has not
        return "no server runs there"
    return text[:1].lower() + text[1:] if text[1:2].islower() else text
