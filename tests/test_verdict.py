"""From words and exit codes to one outcome, and from failures to their class (S15, S32)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agents.faults import (
    from_exception,
    from_status,
    from_text,
    outcome_of,
    reset_of,
    retry_after_seconds,
)
from orchestrator.agents.functions import Permanent, RateLimited, Transient, Unauthenticated
from orchestrator.agents.readers import Findings, make_reader
from orchestrator.agents.verdict import verdict
from orchestrator.domain.asking import Ask
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from tests.told import Told, lines

TRANSCRIPTS = Path(__file__).parent / "inputs" / "agent-transcripts"
NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


def judge(
    output: str,
    stdout: bytes = b"",
    exit_code: int | None = 0,
    *,
    stderr: bytes = b"",
    signal: int | None = None,
    exit_codes: dict[int, str] | None = None,
    stop: OutcomeClass | None = None,
) -> Outcome:
    """The verdict over an agent that wrote this and ended so."""
    reader = make_reader(output, Told())
    reader.feed("stdout", stdout)
    reader.feed("stderr", stderr)
    return verdict(
        reader.close(),
        exit_code=exit_code,
        signal=signal,
        exit_codes=exit_codes or {},
        stop_reason=stop,
        stop_message="why",
    )


def result(**fields: Any) -> bytes:
    """A result event of Claude Code."""
    return lines({"type": "result", "subtype": "success", "is_error": False, "result": "fine", **fields})


@pytest.mark.parametrize(
    ("file", "output", "exit_code", "status", "message"),
    [
        ("1-ok", "claude", 0, "done", None),
        ("2-rate-limited-success", "claude", 0, "rate_limited", "Limit reached, resets 9pm (America/Chicago)"),
        ("3-ok-but-exit-1", "claude", 1, "done", None),
        ("4-denied", "claude", 0, "done", None),
        ("5-other-cli", "codex", 0, "done", None),
        ("6-other-cli-failed", "codex", 0, "transient", "stream disconnected before completion"),
        ("6-other-cli-failed", "codex", 1, "transient", "stream disconnected before completion"),
    ],
)
def test_recorded_transcripts(file: str, output: str, exit_code: int, status: str, message: str | None) -> None:
    """Each recorded stream ends as a good operator expects."""
    outcome = judge(output, (TRANSCRIPTS / f"{file}.jsonl").read_bytes(), exit_code)
    assert (outcome.status, outcome.message, outcome.exit_code) == (status, message, exit_code)


def test_success_with_an_error_flag_is_not_done() -> None:
    """Exit 0 and subtype success do not count when the event says is_error; the stated reset is kept."""
    outcome = judge("claude", (TRANSCRIPTS / "2-rate-limited-success.jsonl").read_bytes(), 0)
    assert outcome.status is OutcomeClass.RATE_LIMITED
    assert outcome.cause == "rate_limit"
    assert outcome.retry_at is not None
    assert outcome.retry_at.astimezone(UTC).hour in (2, 3)
    assert timedelta(0) < outcome.retry_at - datetime.now(UTC) <= timedelta(days=1)


def test_a_good_result_with_a_bad_exit_code_shows_both() -> None:
    """A paid success stays one; the exit code is on the run and in a note."""
    outcome = judge("claude", (TRANSCRIPTS / "3-ok-but-exit-1.jsonl").read_bytes(), 1)
    assert (outcome.status, outcome.result, outcome.exit_code) == ("done", "All done.", 1)
    assert outcome.notes == ("exit 1 after it had said that it succeeded; its result counts",)
    killed = judge("claude", result(), None, signal=11)
    assert (killed.status, killed.signal) == ("done", 11)
    assert "SIGSEGV" in killed.notes[0]


CASES: list[tuple[str, dict[str, Any], str, str | None, str | None]] = [
    ("text, exit 0", {"output": "text", "stdout": b"hi"}, "done", None, None),
    ("silent, exit 0", {"output": "text"}, "done", None, None),
    ("exit 1", {"output": "text", "exit_code": 1, "stderr": b"a\nboom\n\n"}, "transient", "exit_code", "exit 1: boom"),
    (
        "exit 1, words on stdout",
        {"output": "text", "exit_code": 1, "stdout": b"no"},
        "transient",
        "exit_code",
        "exit 1: no",
    ),
    ("exit 1, silent", {"output": "text", "exit_code": 1}, "transient", "exit_code", "exit 1"),
    ("exit 75", {"output": "claude", "stdout": result(), "exit_code": 75}, "transient", "exit_code", "exit 75"),
    ("exit 77", {"output": "text", "exit_code": 77, "stderr": b"bad"}, "permanent", "exit_code", "exit 77: bad"),
    ("signal", {"output": "text", "exit_code": None, "signal": 9}, "transient", "signal", "killed by SIGKILL"),
    ("mapped", {"output": "text", "exit_code": 3, "exit_codes": {3: "permanent"}}, "permanent", "exit_code", "exit 3"),
    ("mapped over 75", {"output": "text", "exit_code": 75, "exit_codes": {75: "done"}}, "done", None, None),
    (
        "mapped over words",
        {"output": "claude", "stdout": result(is_error=True), "exit_code": 3, "exit_codes": {3: "permanent"}},
        "permanent",
        "exit_code",
        "exit 3: fine",
    ),
    (
        "mapped to done, but it failed",
        {"output": "claude", "stdout": result(is_error=True, result="x"), "exit_code": 3, "exit_codes": {3: "done"}},
        "transient",
        "agent_error",
        "x",
    ),
    ("no result", {"output": "claude", "exit_code": 0}, "transient", "no_result", "exit 0 without a result event"),
    (
        "no JSON",
        {"output": "json", "stdout": b"hm"},
        "transient",
        "no_result",
        "exit 0 without a JSON document on stdout: hm",
    ),
    ("no last event", {"output": "codex"}, "transient", "no_result", "exit 0 without a turn.completed event"),
    ("JSON lines without any", {"output": "jsonl"}, "done", None, None),
    (
        "turns used up",
        {"output": "claude", "stdout": result(subtype="error_max_turns", result=None), "exit_code": 1},
        "over_budget",
        "max_turns",
        "the agent's own limit of turns was reached",
    ),
    (
        "USD used up",
        {"output": "claude", "stdout": result(subtype="error_max_budget_usd", result="x"), "exit_code": 1},
        "over_budget",
        "max_budget",
        "x",
    ),
    (
        "401",
        {"output": "claude", "stdout": result(is_error=True, api_error_status=401)},
        "unauthenticated",
        "authentication",
        "fine",
    ),
    (
        "500",
        {"output": "claude", "stdout": result(is_error=True, api_error_status=500)},
        "transient",
        "http_500",
        "fine",
    ),
    (
        "529",
        {"output": "claude", "stdout": result(is_error=True, api_error_status=529)},
        "rate_limited",
        "overloaded",
        "fine",
    ),
    (
        "400",
        {"output": "claude", "stdout": result(is_error=True, api_error_status=400)},
        "permanent",
        "http_400",
        "fine",
    ),
    (
        "the words of a lost login",
        {
            "output": "claude",
            "stdout": result(is_error=True, result="API Error: 401 authentication_error"),
            "exit_code": 1,
        },
        "unauthenticated",
        "authentication",
        "API Error: 401 authentication_error",
    ),
    (
        "the name of a lost login as the last word",
        {"output": "jsonl", "stderr": b"AuthenticationError\n", "exit_code": 1},
        "unauthenticated",
        "authentication",
        "exit 1: AuthenticationError",
    ),
    (
        "too long",
        {"output": "claude", "stdout": result(is_error=True, api_error_status=400, result="Prompt is too long")},
        "permanent",
        "context_too_long",
        "Prompt is too long",
    ),
    (
        "a plan used up, told as success",
        {"output": "claude", "stdout": result(result="Claude AI usage limit reached|1893456000")},
        "rate_limited",
        "usage_limit",
        "Claude AI usage limit reached|1893456000",
    ),
    (
        "stderr names a limit",
        {"output": "text", "exit_code": 1, "stderr": b"Error code: 429 - slow down\n"},
        "rate_limited",
        "rate_limit",
        "exit 1: Error code: 429 - slow down",
    ),
    (
        "the answer of a success speaks of limits",
        {"output": "claude", "stdout": result(result="The rate limit is 429 per day; not logged in users get 401.")},
        "done",
        None,
        None,
    ),
    (
        "gemini 401",
        {"output": "gemini", "exit_code": 145},
        "unauthenticated",
        "authentication",
        "exit 145 (HTTP status 401)",
    ),
    (
        "gemini 42",
        {"output": "gemini", "exit_code": 42, "stderr": b"no session"},
        "permanent",
        "invalid_input",
        "exit 42: no session",
    ),
    ("145 of something else", {"output": "text", "exit_code": 145}, "transient", "exit_code", "exit 145"),
    (
        "stopped",
        {"output": "text", "exit_code": None, "signal": 15, "stop": OutcomeClass.TIMED_OUT},
        "timed_out",
        "timed_out",
        "why",
    ),
    (
        "stopped, exit 0",
        {"output": "text", "exit_code": 0, "stop": OutcomeClass.CANCELLED},
        "cancelled",
        "cancelled",
        "why",
    ),
]


@pytest.mark.parametrize(
    ("given", "status", "cause", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_the_table(given: dict[str, Any], status: str, cause: str | None, message: str | None) -> None:
    """One row of the table of docs/agents.md."""
    outcome = judge(**given)
    assert (str(outcome.status), outcome.cause, outcome.message) == (status, cause, message)


def test_a_question_has_no_exit_code() -> None:
    """An agent that asked a person is suspended with its questions; its exit code does not matter."""
    ask = Ask("send", "Send it?")
    for code in (0, 1, 75):
        outcome = verdict(Findings(asks=[ask]), exit_code=code, signal=None, exit_codes={}, stop_reason=None)
        assert (outcome.status, outcome.cause, outcome.message) == (OutcomeClass.SUSPENDED, "asked", "Send it?")
        assert outcome.asks == (ask,)


def test_a_question_that_was_answered_is_not_asked_for_ever() -> None:
    """An attempt that asks only what it had been told uses up a retry; what is new beside it is asked (S53)."""
    old, new = Ask("send", "Send it?"), Ask("to", "To whom?")

    def judged(*asks: Ask) -> Outcome:
        findings = Findings(asks=list(asks))
        return verdict(findings, exit_code=0, signal=None, exit_codes={}, stop_reason=None, answered={"send": "denied"})

    again = judged(old)
    assert (again.status, again.cause) == (OutcomeClass.TRANSIENT, "asked_again")
    assert again.message == "it asked 'send' again, which had been answered; a new question needs another name"
    assert judged(old, new).asks == (new,)


@pytest.mark.parametrize(
    ("text", "at", "seconds"),
    [
        ("Limit reached, resets 9pm (America/Chicago)", "2026-12-01T03:00+00:00", None),
        ("Limit reached, resets 5am (America/Chicago)", "2026-12-01T11:00+00:00", None),
        ("Limit reached ∙ resets 7:30am (America/Chicago)", "2026-11-30T13:30+00:00", None),
        ("You've hit your limit · resets Dec 3 at 3pm (UTC)", "2026-12-03T15:00+00:00", None),
        ("resets at 12am (UTC)", "2026-12-01T00:00+00:00", None),
        ("Claude AI usage limit reached|1893456000", "2030-01-01T00:00+00:00", None),
        ("try again at 2026-12-02T10:00:00Z", "2026-12-02T10:00+00:00", None),
        ("Please try again in 20s.", None, 20.0),
        ("Please try again in 1m30s", None, 90.0),
        ("try again in 3 days 4 hours 12 minutes.", None, 274_320.0),
        ("Retry-After: 7", None, 7.0),
        ('"retryDelay": "34s"', None, 34.0),
        ("retry after 500ms", None, 0.5),
        ("wait 2 hours", None, 7200.0),
        ("resets 9pm (Nowhere/Atall)", None, None),
        ("resets 27:99", None, None),
        ("tried 3 times, giving up", None, None),
        ("resets Feb 31 at 3pm (UTC)", None, None),
    ],
)
def test_when_a_limit_ends(text: str, at: str | None, seconds: float | None) -> None:
    """A stated reset is read as an instant or as seconds; what is not stated is not guessed."""
    found, after = reset_of(text, now=NOW)
    assert found == (None if at is None else datetime.fromisoformat(at))
    assert after == (None if seconds is None else pytest.approx(seconds))


def test_retry_after_headers() -> None:
    """The header holds seconds or a date; anything else is nothing."""
    assert retry_after_seconds("7") == 7
    assert retry_after_seconds("Mon, 30 Nov 2026 12:01:00 GMT", now=NOW) == 60
    assert retry_after_seconds("soon") is None
    assert retry_after_seconds(None) is None
    assert from_status(429, "x", retry_after=7).retry_after == 7


@pytest.mark.parametrize(
    ("text", "status", "cause"),
    [
        ("Overloaded", "rate_limited", "overloaded"),
        ("You've hit your usage limit. Upgrade or try again in 2 days.", "rate_limited", "usage_limit"),
        ("We're currently experiencing high demand", "rate_limited", "overloaded"),
        ("Not logged in · Please run /login", "unauthenticated", "authentication"),
        ("Invalid API key", "unauthenticated", "authentication"),
        ("Your credit balance is too low", "rate_limited", "billing"),
        ("This model's maximum context length is 128000 tokens", "permanent", "context_too_long"),
    ],
)
def test_the_words_of_failures(text: str, status: str, cause: str) -> None:
    """The usual words of providers are known."""
    fault = from_text(text)
    assert fault is not None
    assert (str(fault.status), fault.cause) == (status, cause)


def test_unknown_words_name_no_fault() -> None:
    """Words that nobody listed decide nothing."""
    for text in ("stream disconnected", "401 tests passed", "line 429: syntax error", "exit", ""):
        assert from_text(text) is None, text


class HttpError(Exception):
    """As HTTP clients raise it."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"HTTP {status}")
        self.status_code = status
        self.response = type("Response", (), {"status_code": status, "headers": headers or {}})()


class Sneaky(Exception):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("error", "status", "cause"),
    [
        (ValueError("x"), "transient", "ValueError"),
        (HttpError(429, {"retry-after": "3"}), "rate_limited", "tests.test_verdict.HttpError"),
        (HttpError(401), "unauthenticated", "tests.test_verdict.HttpError"),
        (HttpError(503), "transient", "tests.test_verdict.HttpError"),
        (HttpError(404), "transient", "tests.test_verdict.HttpError"),
        (Permanent("bad"), "permanent", "orchestrator.Permanent"),
        (Permanent("bad", cause="bad_order"), "permanent", "bad_order"),
        (Transient("later"), "transient", "orchestrator.Transient"),
        (Unauthenticated("login"), "unauthenticated", "orchestrator.Unauthenticated"),
        (RateLimited(30), "rate_limited", "orchestrator.RateLimited"),
        (SystemExit(3), "transient", "SystemExit"),
        (Sneaky(), "transient", "tests.test_verdict.Sneaky"),
    ],
)
def test_exceptions(error: BaseException, status: str, cause: str) -> None:
    """An exception says its class itself, by its HTTP status, or is transient; the cause is its name."""
    fault = from_exception(error)
    assert str(fault.status) == status
    assert f"tests.{fault.cause}".endswith(cause)
    assert fault.message


def test_stated_waits_of_exceptions() -> None:
    """Retry-after comes from the exception itself or from its response."""
    assert from_exception(RateLimited(30)).retry_after == 30
    assert from_exception(HttpError(429, {"retry-after": "3"})).retry_after == 3


def test_a_traceback_is_bounded() -> None:
    """The traceback of an endless recursion and of an endless message fits into a note."""
    try:
        raise ValueError("x" * 1_000_000)
    except ValueError as error:
        outcome = outcome_of(error)
    assert outcome.message is not None
    assert len(outcome.message) <= 2_000
    assert len(outcome.notes[0]) < 5_000


def test_the_reference_names_every_cause_and_output() -> None:
    """The pages of agents have the words that runs show, and a recipe for each CLI."""
    docs = Path(__file__).parent.parent / "docs"
    text = "".join(page.read_text() for page in (docs / "agents.md", *sorted((docs / "agents").glob("*.md"))))
    causes = {str(cause) for _, _, _, cause, _ in CASES if cause} - set(OutcomeClass)
    missing = sorted(cause for cause in causes - {"http_500", "http_400"} if f"`{cause}`" not in text)
    assert missing == []
    assert all(f"output: {output}\n" in text for output in ("text", "claude", "codex", "gemini", "opencode"))
    assert all(f"`{status}`" in text for status in OutcomeClass if status != "suspended")
