"""From what an agent said and how its process ended to one outcome: the table of ``docs/agents.md``, as code.

The rows are tried from top to bottom and the first that fits decides:

    we asked it to end                        → the class that was asked for
    it asked a person                         → suspended   asked; the task waits for the answer
    it asked only what it had been told       → transient   asked_again
    exit code that the agent's author mapped  → that class (``done`` not where the agent said it failed)
    it said that it failed                    → the class of what it said: 429 → rate_limited, 401 → unauthenticated, …
    exit 75 / 77                              → transient / permanent
    it said that it succeeded                 → done; another exit code or a signal than 0 is a note
    a signal                                  → transient   signal
    exit 0, a result was due and none came    → transient   no_result
    exit 0                                    → done
    its last words name a fault we know       → the class of that fault
    exit code that its CLI gives a meaning    → that class
    any other exit code                       → transient   exit_code
"""

from __future__ import annotations

import signal as signals
from collections.abc import Collection, Mapping
from typing import Any

from orchestrator.agents.faults import Fault, from_status, from_text, shorten
from orchestrator.agents.readers import Findings
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass

EXIT_TRANSIENT = 75
EXIT_PERMANENT = 77
_CLIS = frozenset({"claude", "codex", "gemini", "opencode"})

_GEMINI = {
    41: (OutcomeClass.UNAUTHENTICATED, "authentication"),
    42: (OutcomeClass.PERMANENT, "invalid_input"),
    44: (OutcomeClass.PERMANENT, "sandbox"),
    52: (OutcomeClass.PERMANENT, "config"),
    53: (OutcomeClass.OVER_BUDGET, "max_turns"),
}
"""Exit codes that one CLI documents for itself."""
_GEMINI_STATUSES = {status % 256: status for status in (400, 401, 403, 404, 408, 429, 500, 502, 503, 504, 529)}
"""It also ends with an HTTP status, of which the system keeps the lowest eight bits: 401 arrives as 145."""


def verdict(
    findings: Findings,
    *,
    exit_code: int | None,
    signal: int | None,
    exit_codes: Mapping[int, str],
    stop_reason: OutcomeClass | None,
    stop_message: str | None = None,
    answered: Collection[str] = (),
) -> Outcome:
    """Return the outcome of an attempt: class, cause, message, result, session and notes.

    ``stop_reason`` is why we ended the attempt; leave it None if the agent had given its result before. ``exit_codes``
    are the agent author's own (names of outcome classes), ``answered`` the names of the questions whose answers the
    attempt was started with. Usage, transcript and elapsed time are the caller's to add.
    """
    notes = list(findings.notes)
    result = findings.result if findings.has_result else None

    def ends(status: OutcomeClass, cause: str | None = None, message: str | None = None, **more: Any) -> Outcome:
        return Outcome(
            status=status,
            cause=cause,
            message=shorten(message) if message else None,
            result=result,
            exit_code=exit_code,
            signal=signal,
            session=findings.session,
            notes=tuple(notes),
            **more,
        )

    def fails(fault: Fault) -> Outcome:
        return ends(fault.status, fault.cause, fault.message, retry_at=fault.retry_at, retry_after=fault.retry_after)

    ended = _how_it_ended(exit_code, signal)
    if stop_reason is not None:
        return ends(stop_reason, str(stop_reason), stop_message)
    if findings.asks:
        # Asked under a name that was answered before it began: to suspend it again could go on for ever, at a price.
        fresh = tuple(ask for ask in findings.asks if ask.name not in answered)
        if fresh:
            return ends(OutcomeClass.SUSPENDED, "asked", fresh[0].question, asks=fresh)
        name = findings.asks[0].name
        text = f"it asked {name!r:.200} again, which had been answered; a new question needs another name"
        return ends(OutcomeClass.TRANSIENT, "asked_again", text)

    mapped = exit_codes.get(exit_code) if exit_code is not None and signal is None else None
    fault = findings.fault if findings.is_error else None
    last = findings.last_line
    if mapped is not None and not (mapped == OutcomeClass.DONE and fault is not None):
        status = OutcomeClass(mapped)
        if status is OutcomeClass.DONE:
            return ends(status)
        if fault is not None:
            notes.append(f"the agent said: {shorten(fault.message, 500)}")
        told_at = reset_of_fault(fault, last) if status is OutcomeClass.RATE_LIMITED else {}
        return ends(status, "exit_code", _with(ended, fault.message if fault else last), **told_at)
    if fault is not None:
        return fails(fault)
    if signal is None and exit_code == EXIT_TRANSIENT:
        return ends(OutcomeClass.TRANSIENT, "exit_code", _with(ended, last))
    if signal is None and exit_code == EXIT_PERMANENT:
        return ends(OutcomeClass.PERMANENT, "exit_code", _with(ended, last))
    if findings.succeeded:
        if exit_code or signal is not None:
            notes.append(f"{ended} after it had said that it succeeded; its result counts")
        return ends(OutcomeClass.DONE)
    if signal is not None:
        return ends(OutcomeClass.TRANSIENT, "signal", _with(ended, last))
    if not exit_code:
        if findings.result_due and not findings.has_result:
            return ends(OutcomeClass.TRANSIENT, "no_result", _with(f"exit 0 without {findings.result_due}", last))
        return ends(OutcomeClass.DONE)
    # The last words of a program that we know nothing of are one line; a known CLI says more around them.
    words = findings.last_lines if findings.output in _CLIS else findings.last_lines[-1:]
    named = next((found for line in reversed(words) if (found := from_text(line))), None)
    if named is not None:
        return ends(
            named.status,
            named.cause,
            _with(ended, named.message),
            retry_at=named.retry_at,
            retry_after=named.retry_after,
        )
    if findings.output == "gemini":
        if exit_code in _GEMINI:
            status, cause = _GEMINI[exit_code]
            return ends(status, cause, _with(ended, last))
        if exit_code in _GEMINI_STATUSES:
            http = from_status(_GEMINI_STATUSES[exit_code])
            return ends(http.status, http.cause, _with(f"{ended} ({http.message})", last))
    return ends(OutcomeClass.TRANSIENT, "exit_code", _with(ended, last))


def reset_of_fault(fault: Fault | None, last: str) -> dict[str, Any]:
    """When a rate limit that only an exit code names is over, if the agent's words say so."""
    found = fault or from_text(last)
    return {} if found is None else {"retry_at": found.retry_at, "retry_after": found.retry_after}


def _how_it_ended(exit_code: int | None, signal: int | None) -> str:
    if signal is not None:
        try:
            return f"killed by {signals.Signals(signal).name}"
        except ValueError:
            return f"killed by signal {signal}"
    return f"exit {exit_code}" if exit_code is not None else "ended"


def _with(ended: str, words: str) -> str:
    return f"{ended}: {shorten(words, 1_000)}" if words.strip() else ended
