"""What went wrong, as one of the outcome classes: from an HTTP status, from an agent's own words, from an exception.

Text is judged only where an agent reports a failure; the words of a successful answer are never looked at. The patterns
are few and literal: a failure that none of them names is ``transient``, which costs a retry and nothing else.
"""

from __future__ import annotations

import math
import re
import traceback
from datetime import UTC, date, datetime, time, timedelta
from types import TracebackType
from typing import Any
from zoneinfo import ZoneInfo

from orchestrator.agents.functions import AgentFault, Permanent, RateLimited, Transient, Unauthenticated
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.values import value
from orchestrator.domain.words import OutcomeClass

MESSAGE_LIMIT = 2_000
"""Characters of a message; the whole text is in the transcript."""
TRACEBACK_LIMIT = 4_000


@value
class Fault:
    """A failure: its class, the finer cause, words for people, and when to come back if that was stated."""

    status: OutcomeClass
    cause: str
    message: str
    retry_at: datetime | None = None
    retry_after: float | None = None


def shorten(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """*text* without surrounding space, at most *limit* characters, cut in the middle of nothing that leads it."""
    text = text.strip()
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


# HTTP statuses ---------------------------------------------------------------------------------------------------------

_BY_STATUS: dict[int, tuple[OutcomeClass, str]] = {
    401: (OutcomeClass.UNAUTHENTICATED, "authentication"),
    402: (OutcomeClass.RATE_LIMITED, "billing"),
    403: (OutcomeClass.UNAUTHENTICATED, "authentication"),
    408: (OutcomeClass.TRANSIENT, "timeout"),
    409: (OutcomeClass.TRANSIENT, "http_409"),
    425: (OutcomeClass.TRANSIENT, "http_425"),
    429: (OutcomeClass.RATE_LIMITED, "rate_limit"),
    529: (OutcomeClass.RATE_LIMITED, "overloaded"),
}


def from_status(status: int, text: str = "", *, retry_after: float | None = None, now: datetime | None = None) -> Fault:
    """The fault that an HTTP *status* of 300 or more stands for; *text* is what came with it."""
    if status in _BY_STATUS:
        outcome, cause = _BY_STATUS[status]
    elif 500 <= status <= 599:
        outcome, cause = OutcomeClass.TRANSIENT, f"http_{status}"
    else:
        outcome, cause = OutcomeClass.PERMANENT, f"http_{status}"
    told = from_text(text, now=now) if text else None
    if told is not None and told.status is OutcomeClass.PERMANENT and status in (400, 413, 422):
        cause = told.cause
    retry_at = None
    if outcome is OutcomeClass.RATE_LIMITED and retry_after is None and text:
        retry_at, retry_after = reset_of(text, now=now)
    return Fault(outcome, cause, shorten(text) or f"HTTP status {status}", retry_at, retry_after)


def retry_after_seconds(value: str | None, *, now: datetime | None = None) -> float | None:
    """The seconds of a Retry-After header, which holds seconds or an HTTP date; None if it holds neither."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        pass
    else:
        return max(0.0, seconds) if math.isfinite(seconds) else None
    from email.utils import parsedate_to_datetime

    try:
        at = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return max(0.0, (at - (now or datetime.now(UTC))).total_seconds())


# Words -----------------------------------------------------------------------------------------------------------------

_WORDS: tuple[tuple[re.Pattern[str], OutcomeClass, str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), outcome, cause)
    for pattern, outcome, cause in (
        (
            r"prompt is too long|context[ _-]length|context[ _-]window|maximum context|input is too long|too many tokens in",
            OutcomeClass.PERMANENT,
            "context_too_long",
        ),
        (
            r"credit balance is too low|insufficient[_ ]quota|exceeded your current quota|billing[_ ]error",
            OutcomeClass.RATE_LIMITED,
            "billing",
        ),
        (
            r"usage limit|limit reached|hit your (?:\w+ ){0,2}limit|session limit|weekly limit|quota exceeded"
            r"|resource[_ ]exhausted",
            OutcomeClass.RATE_LIMITED,
            "usage_limit",
        ),
        (
            r"rate[_ -]?limit|too many requests|\b(?:status|error|code|http)\W{0,3}(?:code\W{0,2})?429\b",
            OutcomeClass.RATE_LIMITED,
            "rate_limit",
        ),
        (
            r"overloaded|experiencing high demand|\b(?:status|error|code|http)\W{0,3}(?:code\W{0,2})?529\b",
            OutcomeClass.RATE_LIMITED,
            "overloaded",
        ),
        (
            r"not logged in|please run /login|please log ?in|authentication[_ ]?(?:error|failed)|invalid (?:x-)?api[ _-]key"
            r"|incorrect api key|api key not valid|oauth token (?:has expired|revoked)|token (?:has )?expired|unauthorized"
            r"|\b(?:status|error|code|http)\W{0,3}(?:code\W{0,2})?40[13]\b|permission_error",
            OutcomeClass.UNAUTHENTICATED,
            "authentication",
        ),
        (
            r"invalid_request_error|\b(?:status|error|code|http)\W{0,3}(?:code\W{0,2})?400\b",
            OutcomeClass.PERMANENT,
            "invalid_request",
        ),
    )
)


def from_text(text: str, *, now: datetime | None = None) -> Fault | None:
    """The fault that an agent's own words about its failure name; None if they name none that we know."""
    head = text[:4_000]
    for pattern, outcome, cause in _WORDS:
        if pattern.search(head):
            retry_at, retry_after = reset_of(head, now=now) if outcome is OutcomeClass.RATE_LIMITED else (None, None)
            return Fault(outcome, cause, shorten(text), retry_at, retry_after)
    return None


_EPOCH = re.compile(r"\|\s*(\d{10})(?:\d{3})?\b")
_ISO = re.compile(r"\b(\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)")
_CLOCK = re.compile(
    r"(?:resets?|try again|available again|retry)\s*(?:at|on|:)?\s*"
    r"(?:(?P<month>jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?\s+(?P<day>\d{1,2})(?:st|nd|rd|th)?"
    r"(?:,?\s+(?P<year>\d{4}))?,?\s*(?:at\s+)?)?"
    r"(?P<hour>\d{1,2})(?::(?P<minute>\d\d))?\s*(?P<half>[ap]\.?m\.?)?"
    r"(?:\s*\(?(?P<zone>[A-Z][A-Za-z_+-]+(?:/[A-Za-z_+-]+)+|UTC|GMT)\)?)?",
    re.IGNORECASE,
)
_SPAN = re.compile(
    r"(?:(?:resets?|again|retry)\s*(?:in|after)|retry[-_ ]?after|retry[-_ ]?delay|wait)\W{0,4}"
    r"(?P<span>(?:\d+(?:\.\d+)?\s*(?:days?|d|hours?|hrs?|hr|h|minutes?|mins?|min|milliseconds?|ms|m|seconds?|secs?|sec|s)?"
    r"(?:\b|(?=\d))[\s,]*(?:and\s+)?){1,5})",
    re.IGNORECASE,
)
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|milli|d|h|m|s)?", re.IGNORECASE)
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_UNITS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001, "milli": 0.001, "": 1.0}


def reset_of(text: str, *, now: datetime | None = None) -> tuple[datetime | None, float | None]:
    """When a limit ends, as an instant or in seconds, if *text* says so in one of the usual ways.

    A time of day is the next one to come in the zone that is named, else in the zone of this host.
    """
    now = now or datetime.now(UTC)
    if found := _EPOCH.search(text):
        return datetime.fromtimestamp(int(found[1]), UTC), None
    if found := _SPAN.search(text):
        seconds = sum(float(count) * _UNITS[unit.lower()] for count, unit in _PART.findall(found["span"]))
        return None, seconds
    if found := _ISO.search(text):
        try:
            at = datetime.fromisoformat(found[1])
        except ValueError:
            at = None
        if at is not None:
            return at if at.tzinfo is not None else at.replace(tzinfo=UTC), None
    if found := _CLOCK.search(text):
        return _next_clock(found, now), None
    return None, None


def _next_clock(found: re.Match[str], now: datetime) -> datetime | None:
    if found["half"] is None and found["minute"] is None:
        return None
    hour, minute = int(found["hour"]), int(found["minute"] or 0)
    if found["half"]:
        hour = hour % 12 + (12 if found["half"][0] in "pP" else 0)
    if hour > 23 or minute > 59:
        return None
    try:
        zone = ZoneInfo(found["zone"].upper() if "/" not in found["zone"] else found["zone"]) if found["zone"] else None
    except (KeyError, ValueError, OSError):
        return None
    here = now.astimezone(zone)
    day: date = here.date()
    try:
        if found["month"]:
            month = _MONTHS.index(found["month"][:3].lower()) + 1
            day = date(int(found["year"] or day.year), month, int(found["day"]))
            if found["year"] is None and day < here.date() - timedelta(days=1):
                day = day.replace(year=day.year + 1)
    except ValueError:
        return None
    at = datetime.combine(day, time(hour, minute), zone)
    at = at.astimezone(UTC) if zone is not None else at.astimezone().astimezone(UTC)
    return at if at > now or found["month"] else at + timedelta(days=1)


# Exceptions ------------------------------------------------------------------------------------------------------------


def qualified_name(kind: type[BaseException]) -> str:
    """The name by which an exception's class is known: bare for built-in ones."""
    if kind in (Permanent, Transient, RateLimited, Unauthenticated):
        return f"orchestrator.{kind.__name__}"
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def told(error: BaseException) -> str:
    """What an exception says of itself, whatever its ``__str__`` does."""
    try:
        text = str(error)
    except Exception as worse:  # noqa: BLE001 - the error of an error must not hide the first one
        text = f"(its message cannot be made: {type(worse).__name__})"
    return text


def trace_of(error: BaseException, *, below: str | None = None) -> str:
    """The traceback of *error*, its end if it is long, without the frames of the file *below* that lead to it."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and below is not None and frames.tb_frame.f_code.co_filename == below:
        frames = frames.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # noqa: BLE001 - a broken __str__ or __cause__ of foreign code
        text = f"{qualified_name(type(error))}: {told(error)}"
    return text if len(text) <= TRACEBACK_LIMIT else "…" + text[-TRACEBACK_LIMIT:]


def from_exception(error: BaseException) -> Fault:
    """The fault that an exception of a Python agent stands for.

    ``Permanent``, ``Transient``, ``RateLimited`` and ``Unauthenticated`` say it themselves. An exception with an HTTP
    status (``status_code``, or that of its ``response``) is judged by it. All others are transient.
    """
    name = qualified_name(type(error))
    words = told(error)
    message = shorten(f"{type(error).__name__}: {words}" if words else type(error).__name__)
    if isinstance(error, AgentFault):
        cause = error.cause or name
        message = shorten(words) or message
        if isinstance(error, RateLimited):
            return Fault(OutcomeClass.RATE_LIMITED, cause, message, error.retry_at, error.retry_after)
        return Fault(error.outcome_class, cause, message)
    status, after = _http_status(error)
    if status is not None and status >= 400:
        fault = from_status(status, words, retry_after=after)
        # A wrong request of somebody's own code is not proof that the next attempt fails too.
        kind: OutcomeClass = fault.status if fault.status is not OutcomeClass.PERMANENT else OutcomeClass.TRANSIENT
        if fault.cause == "context_too_long":
            kind = OutcomeClass.PERMANENT
        return Fault(kind, name, message, fault.retry_at, fault.retry_after)
    return Fault(OutcomeClass.TRANSIENT, name, message)


def _http_status(error: BaseException) -> tuple[int | None, float | None]:
    response = getattr(error, "response", None)
    for holder in (error, response):
        status: Any = getattr(holder, "status_code", None)
        if isinstance(status, int) and not isinstance(status, bool):
            headers = getattr(response, "headers", None)
            try:
                value = headers.get("retry-after") if headers is not None else None
            except Exception:  # noqa: BLE001 - whatever a foreign response calls its headers
                value = None
            return status, retry_after_seconds(value if isinstance(value, str) else None)
    return None, None


def outcome_of(error: BaseException, *, below: str | None = None) -> Outcome:
    """The outcome of an attempt that *error* ended; the traceback is its note."""
    fault = from_exception(error)
    return Outcome(
        status=fault.status,
        cause=fault.cause,
        message=fault.message,
        retry_at=fault.retry_at,
        retry_after=fault.retry_after,
        notes=(trace_of(error, below=below),),
    )
