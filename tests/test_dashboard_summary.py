"""The plain lines and the summary of ``run``."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from orchestrator.dashboard import short
from orchestrator.dashboard.frame import NO_LIMIT, Look
from orchestrator.dashboard.plain import PlainLines, line, running_line
from orchestrator.dashboard.summary import end_text, render
from orchestrator.dashboard.text import cells
from orchestrator.domain.snapshot import PlanTask, Question, RunEvent, RunView, Spend, TaskError

NOW = datetime(2026, 11, 28, 12, 15, 14).astimezone()


def at(clock: str) -> datetime:
    """Return the instant of *clock* on the day of NOW."""
    return datetime.combine(NOW.date(), datetime.strptime(clock, "%H:%M:%S").time()).astimezone()


def ended_view() -> RunView:
    """Return the plan of the captures at its end: nine of its twenty tasks, the rest alike."""

    def done(
        task_id: int, name: str, elapsed: float, tokens: int | None, usd: float | None, attempt: int = 1
    ) -> PlanTask:
        return PlanTask(
            task_id, name, "coder", "done", attempt=attempt, elapsed=elapsed, spend=Spend(tokens=tokens, usd=usd)
        )

    return RunView(
        "migrate-v3",
        at("12:00:52"),
        (
            done(101, "survey", 48, 41_000, 0.11),
            done(102, "port-auth", 171, 380_000, 0.84),
            *(done(103 + n, f"port-{n}", 171, 379_000, 1.11) for n in range(6)),
            done(109, "port-billing", 402, 512_000, 1.60, 2),
            done(110, "port-invoices", 97, None, None),
            done(111, "test-catalog", 97, None, None, 2),
            *(done(112 + n, f"x{n}", 9.9, None, None) for n in range(4)),
            PlanTask(
                116,
                "review",
                "claude",
                "cancelled",
                attempt=1,
                elapsed=31,
                spend=Spend(tokens=12_000, usd=0.04),
                error=TaskError("cancelled", None, "by ops, superseded"),
            ),
            done(117, "docs", 214, 166_000, None),
            done(118, "changelog", 66, 52_000, 0.16),
            PlanTask(
                119,
                "bench",
                "tests",
                "failed",
                attempt=1,
                elapsed=0.1,
                error=TaskError("permanent", "command_not_found", "hyperfine: command not found"),
            ),
            PlanTask(
                120,
                "release-pr",
                "coder",
                "cancelled",
                error=TaskError("cancelled", "parent_cancelled", "needs review (cancelled)"),
            ),
        ),
        ended_at=NOW,
        file="migrate-v3.yaml",
    )


SUMMARY = """\
  id  task           outcome                       attempts   time tokens   cost
✓ 101 survey         done                                 1    48s    41k  $0.11
✓ 102 port-auth      done                                 1  2m51s   380k  $0.84
…
✓ 109 port-billing   done                                 2  6m42s   512k  $1.60
…
✓ 111 test-catalog   done                                 2  1m37s      –      –
…
⊘ 116 review         cancelled: by ops, superseded        1    31s    12k  $0.04
✓ 117 docs           done                                 1  3m34s   166k      ?
✓ 118 changelog      done                                 1  1m06s    52k  $0.16
✗ 119 bench          permanent: command_not_found         1   0.1s      –      –
○ 120 release-pr     not run: needs review (cance…        –      –      –      –
migrate-v3  17 done · 1 failed · 1 cancelled · 1 not run    14m22s   3.4M $9.41+
✗ 119 bench: hyperfine: command not found    orchestrator logs 119
? cost of 117 is unknown: the total is at least $9.41
again: orchestrator run migrate-v3.yaml --retry-failed"""


def test_summary_at_80_columns() -> None:
    """The summary is the one of the design, letter by letter."""
    lines = [line.text for line in render(ended_view(), NOW, Look(), again="orchestrator run migrate-v3.yaml")]
    expected = SUMMARY.split("\n")
    assert [text for text in lines if text in expected] == [text for text in expected if text != "…"]
    assert len(lines) == 20 + 5


def test_summary_in_a_pipe_cuts_nothing() -> None:
    """Where there is no screen every outcome stands in full and no line is padded out."""
    lines = [line.text for line in render(ended_view(), NOW, Look(NO_LIMIT), again="orchestrator run p.yaml")]
    assert any("not run: needs review (cancelled)" in text for text in lines)
    assert not any("…" in text for text in lines)
    assert max(map(len, lines)) < 130


@pytest.mark.parametrize("width", [20, 40, 59, 60, 80, 120])
def test_summary_fits(width: int) -> None:
    """No line is wider than the screen, and ids stay whole."""
    lines = [line.text for line in render(ended_view(), NOW, Look(width), again="orchestrator run migrate-v3.yaml")]
    assert all(cells(text) <= width for text in lines)
    for number in range(101, 121):
        assert any(f" {number} " in f" {text} " for text in lines)


def test_summary_of_a_large_plan_counts_what_is_done() -> None:
    """Over fifty tasks the done ones are one line."""
    tasks = tuple(PlanTask(n, f"t{n}", "a", "done", attempt=1) for n in range(1, 61))
    view = RunView(
        "p", NOW - timedelta(seconds=5), (*tasks, PlanTask(61, "bad", "a", "failed", attempt=1)), ended_at=NOW
    )
    lines = [line.text for line in render(view, NOW, Look())]
    assert "✓ 60 done" in lines
    assert sum(" t" in text and "task" not in text for text in lines) == 0


def test_summary_says_how_to_answer() -> None:
    """Questions that are left come with the command that answers them."""
    question = Question(109, "Drop it?", choices=("yes please", "no"))
    view = RunView("p", at("12:00:00"), (PlanTask(109, "t", "a", "waiting", attempt=1, question=question),))
    lines = [line.text for line in render(view, NOW, Look(), again="orchestrator run p.yaml")]
    assert "? 109 t: Drop it?    orchestrator answer 109 'yes please'" in lines
    assert lines[-1] == "again: orchestrator run p.yaml"


PLAIN = """\
12:00:52 plan migrate-v3: 20 tasks (20 new), 4 slots, database embedded
12:00:52 start    101 survey coder attempt 1
12:01:40 done     101 survey 48s $0.11 41k tokens
12:04:19 retry    111 test-catalog exit 1: 3 failed, 41 passed; attempt 2 of 3 in 26s
12:04:20 failed   119 bench permanent command_not_found: hyperfine: command not found
12:04:31 waiting  109 port-billing asks: Drop legacy_invoices, or keep it as a view? drop/keep: orchestrator answer 109 drop
12:07:02 database away: connection refused; agents go on, results wait
12:07:19 database back after 17s: 2 results written
12:15:14 end      17 done, 1 failed, 1 cancelled, 1 not run; 14m22s; 3.4M tokens; $9.41+"""


def plain_events() -> list[RunEvent]:
    """Return one event of each kind that the captures show."""
    question = Question(109, "Drop legacy_invoices, or keep it as a view?", choices=("drop", "keep"))
    return [
        RunEvent(at("12:00:52"), "plan", name="migrate-v3", detail="20 tasks (20 new), 4 slots, database embedded"),
        RunEvent(at("12:00:52"), "start", 101, "survey", "coder", attempt=1),
        RunEvent(at("12:01:40"), "done", 101, "survey", elapsed=48, spend=Spend(usd=0.11, tokens=41_000)),
        RunEvent(
            at("12:04:19"),
            "retry",
            111,
            "test-catalog",
            attempt=1,
            attempts=3,
            detail="exit 1: 3 failed, 41 passed",
            next_at=at("12:04:45"),
        ),
        RunEvent(
            at("12:04:20"),
            "failed",
            119,
            "bench",
            error_class="permanent",
            cause="command_not_found",
            detail="hyperfine: command not found",
        ),
        RunEvent(at("12:04:31"), "waiting", 109, "port-billing", question=question),
        RunEvent(at("12:07:02"), "away", detail="database away: connection refused; agents go on, results wait"),
        RunEvent(at("12:07:19"), "back", detail="database back after 17s: 2 results written"),
        RunEvent(NOW, "end", detail=end_text(ended_view(), NOW)),
    ]


def test_plain_lines() -> None:
    """The plain lines are the ones of the design, letter by letter."""
    assert "\n".join(line(event) for event in plain_events()) == PLAIN


def test_a_minute_of_silence_gets_one_running_line() -> None:
    """A sign of life after sixty seconds, and only then."""
    tasks = (PlanTask(108, "port-search", "a", "running", started_at=at("12:00:00")), PlanTask(9, "z", "a", "done"))
    view = RunView("p", NOW, tasks)
    lines = PlainLines()
    assert lines.tick(view, at("12:04:00")) == []
    assert lines.tick(view, at("12:04:59")) == []
    assert lines.tick(view, at("12:05:00")) == ["12:05:00 running  1: 108 port-search 5m00s"]
    assert lines.tick(view, at("12:05:59")) == []
    assert running_line(tasks[1:], NOW).endswith("running  none")


def test_a_large_plan_counts_starts_and_ends_but_tells_failures() -> None:
    """Over five hundred tasks start and done give way to one count every ten seconds."""
    view = RunView("p", NOW, tuple(PlanTask(n, f"t{n}", "a", "pending") for n in range(501)))
    lines = PlainLines()
    assert lines.event(RunEvent(at("12:00:00"), "start", 1, "t1"), view) == []
    assert lines.event(RunEvent(at("12:00:09"), "done", 1, "t1"), view) == []
    assert lines.event(RunEvent(at("12:00:09"), "failed", 2, "t2"), view) == ["12:00:09 failed   2 t2"]
    assert lines.event(RunEvent(at("12:00:10"), "start", 3, "t3"), view) == [
        "12:00:10 count    2 started, 1 done; 0 of 501 ended"
    ]


def test_plain_lines_carry_no_controls_of_foreign_text() -> None:
    """An agent's output cannot forge a line or move the cursor."""
    event = replace(plain_events()[4], detail="\x1b[2J\r12:00:00 done\n101", name="\u202eevil")
    text = line(event)
    assert text.isprintable()
    assert "\\x1b[2J\\x0d12:00:00 done 101" in text
    assert line(event, ascii=True).isascii()


def test_the_total_is_whole_in_a_pipe() -> None:
    """Where nothing limits the width the line of totals has the plan's name, all counts and all figures."""
    view = RunView(
        "a-plan-with-a-name-that-is-longer-than-its-columns",
        at("12:00:52"),
        (
            PlanTask(1, "a", "coder", "done", attempt=1, elapsed=1, spend=Spend(tokens=10, usd=0.5)),
            PlanTask(2, "b", "coder", "failed", attempt=1, elapsed=1, error=TaskError("transient", None, "no")),
            PlanTask(3, "c", "coder", "blocked", needs=(2,)),
        ),
    )
    (total,) = (each.text for each in render(view, NOW, Look(NO_LIMIT, 24)) if view.plan in each.text)
    assert total == f"{view.plan}  1 done · 1 failed · 1 blocked  14m22s  10  $0.50"


def test_nothing_is_said_twice() -> None:
    """A cause that repeats the class is left out, on every line that has both."""
    error = TaskError("timed_out", "timed_out", "over its budget of 5 seconds")
    task = PlanTask(1, "a", "coder", "failed", attempt=1, elapsed=5, error=error)
    view = RunView("p", at("12:00:52"), (task,))
    drawn = [each.text for each in render(view, NOW, Look(120, 24))]
    event = RunEvent(
        NOW, "failed", 1, "a", "coder", 1, error_class="timed_out", cause="timed_out", detail=error.message
    )
    for text in (*drawn, line(event)):
        assert text.count("timed_out") <= 1
    assert any("timed_out: over its budget of 5 seconds" in text for text in drawn)
    assert short.reason("timed_out", "timed_out", "over its budget") == "timed_out: over its budget"
    assert short.reason("permanent", "bad_input", "HTTP 422") == "permanent: bad_input: HTTP 422"
