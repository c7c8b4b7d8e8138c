"""The view of ``run``: its captures, and what holds at every size."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from orchestrator.dashboard.frame import Look, Paint
from orchestrator.dashboard.run_view import history, render
from orchestrator.dashboard.text import cells
from orchestrator.domain.outcome import Budget
from orchestrator.domain.snapshot import PlanTask, Question, RunEvent, RunView, Spend, TaskError

NOW = datetime(2026, 11, 28, 12, 4, 32).astimezone()


def ago(seconds: float) -> datetime:
    """Return the instant *seconds* before NOW."""
    return NOW - timedelta(seconds=seconds)


def running(
    task_id: int, name: str, agent: str, age: float, limit: float | None, usd: float | None, output: str
) -> PlanTask:
    """Return a running task that may run for *limit* seconds."""
    return PlanTask(
        task_id,
        name,
        agent,
        "running",
        attempt=1,
        max_retries=2,
        started_at=ago(age),
        budget=Budget(seconds=limit),
        spend=Spend(usd=usd),
        last_output=output,
    )


def plan_view() -> RunView:
    """Return the plan of the captures: 20 tasks, 8 ended."""
    done = tuple(
        PlanTask(101 + n, name, "coder", "done", attempt=1, spend=Spend(usd=usd, tokens=tokens, usd_partial=part))
        for n, name, usd, tokens, part in (
            (0, "survey", 0.11, 41_000, False),
            (1, "port-auth", 0.65, 380_000, True),
            (2, "port-catalog", 0.88, 500_000, False),
            (4, "port-email", 1.02, 980_000, False),
            (6, "test-jobs", None, None, False),
            (5, "a", None, None, False),
            (11, "b", None, None, False),
        )
    )
    question = Question(
        109,
        "Drop legacy_invoices, or keep it as a view?",
        choices=("drop", "keep"),
        default="keep",
        asked_at=ago(182),
    )
    blocked = (
        PlanTask(104, "c", "coder", "blocked", needs=(109,)),
        PlanTask(114, "d", "coder", "blocked", needs=(104,)),
        PlanTask(115, "e", "coder", "blocked", needs=(108,)),
        PlanTask(116, "review", "coder", "blocked", needs=(110,)),
        PlanTask(120, "release-pr", "coder", "blocked", needs=(109, 104, 110)),
    )
    live = (
        running(108, "port-search", "coder", 276, 300, 1.31, "edit  search/index.py (+41 −12)"),
        PlanTask(109, "port-billing", "claude", "waiting", attempt=1, question=question),
        running(110, "port-invoices", "coder", 123, 300, 0.62, "Running pytest tests/invoices -x"),
        PlanTask(
            111,
            "test-catalog",
            "tests",
            "pending",
            attempt=1,
            max_retries=2,
            retry_count=1,
            next_attempt_at=NOW + timedelta(seconds=12),
            error=TaskError("transient", "exit_code", "exit 1: 3 failed, 41 passed"),
        ),
        running(113, "test-email", "tests", 31, 119, None, "tests/email/test_send.py::test_bounce"),
        replace(running(117, "docs", "writer", 110, None, 0.28, "Reading docs/guide/upgrade.md"), budget=Budget()),
        PlanTask(118, "changelog", "writer", "pending"),
        PlanTask(
            119,
            "bench",
            "tests",
            "failed",
            attempt=1,
            error=TaskError("permanent", "command_not_found", "hyperfine: command not found"),
        ),
    )
    return RunView("migrate-v3", ago(401), done + live + blocked, slots=4, file="migrate-v3.yaml")


def text(view: RunView, look: Look) -> str:
    """Return the region as a screen without colours shows it."""
    return "\n".join(line.text for line in render(view, NOW, look))


RUN_80 = """\
migrate-v3 ━━━━━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 8/20   6m41s  $4.87+  1.9M tok
7 done · 1 failed · 4 running · 1 retrying · 1 waiting · 1 ready · 5 blocked
? 109 port-billing   Drop legacy_invoices, or keep it as a view?           3m02s
                     [1] drop  [2] keep             orchestrator answer 109 keep
✗ 119 bench          hyperfine: command not found         r retry, none needs it
▸ 108 port-search   coder   4m36s ━━━━━╌  92%  $1.31 edit  search/index.py (+41…
▸ 110 port-invoices coder   2m03s ━━╌╌╌╌  41%  $0.62 Running pytest tests/invoi…
▸ 117 docs          writer  1m50s              $0.28 Reading docs/guide/upgrade…
▸ 113 test-email    tests     31s ━━╌╌╌╌  26%        tests/email/test_send.py::…
↻ 111 test-catalog  attempt 2 of 3 in 12s exit 1: 3 failed, 41 passed
· 118 changelog     next free slot (4 of 4 in use)
○ 5 blocked: 3 behind ? 109 · 1 behind ▸ 108 · 1 behind ▸ 110
 ↑↓ select  ⏎ open  a answer  x cancel  t tree  ? keys   Ctrl-C stop"""

ALL_KEYS = frozenset({"select", "open", "a", "x", "t", "r", "?"})


def test_run_view_at_80_columns() -> None:
    """The region of 80×24 is the one of the design, letter by letter."""
    assert text(plan_view(), Look(80, 24, keys=ALL_KEYS)) == RUN_80


def test_run_view_at_120_columns_adds_limits_and_a_row_for_each_blocked_task() -> None:
    """Wide screens say the limit and what each blocked task needs."""
    lines = text(plan_view(), Look(120, 40)).splitlines()
    assert lines[0] == "migrate-v3 " + "━" * 31 + "╌" * 47 + " 8/20   6m41s  $4.87+  1.9M tok"
    assert (
        "▸ 108 port-search   coder   4m36s ━━━━━━━━━━━━━╌  92% of 5m00s  $1.31 edit  search/index.py (+41 −12)" in lines
    )
    assert "○ 120 release-pr    needs 3 tasks, behind ? 109" in lines
    assert "○ 115 e             needs 108 port-search" in lines


def test_run_view_in_ascii() -> None:
    """Without Unicode the same rows stand in ASCII letters."""
    lines = text(plan_view(), Look(80, 24, ascii=True)).splitlines()
    assert lines[0] == "migrate-v3 " + "#" * 15 + "." * 23 + " 8/20   6m41s  $4.87+  1.9M tok"
    assert "> 108 port-search   coder   4m36s #####.  92%  $1.31 edit  search/index.py (+4.." in lines
    assert lines[-1] == "o 5 blocked: 3 behind ? 109, 1 behind > 108, 1 behind > 110"
    assert all(line.isascii() for line in lines)


RUN_40 = """\
migrate-v3 ━━━━╌╌╌╌ 8/20    6m41s $4.87+
✓7 ✗1 ▸4 ↻1 ?1 ·1 ○5
? 109 Drop legacy_invoices, or keep it…
✗ 119 bench: hyperfine: command not fou…
▸ 108 port-search      4m36s  92%  $1.31
▸ 110 port-invoices    2m03s  41%  $0.62
▸ 117 docs             1m50s       $0.28
▸ 113 test-email         31s  26%
… 3 more"""


def test_run_view_at_40_columns() -> None:
    """The region of 40×10 is the one of the design, letter by letter."""
    assert text(plan_view(), Look(40, 10)) == RUN_40


def test_second_line_while_stopping_and_while_the_database_is_away() -> None:
    """What is wrong with all of it takes the place of the counts."""
    stopping = replace(plan_view(), stop_deadline=NOW + timedelta(seconds=14))
    assert text(stopping, Look()).splitlines()[1] == (
        "stopping: 4 agents have 14s to finish; Ctrl-C again ends them now"
    )
    away = replace(plan_view(), away_since=ago(14), unwritten=2, lease_until=NOW + timedelta(seconds=26))
    assert text(away, Look()).splitlines()[1] == (
        "database away 14s: agents go on, 2 results wait to be written, lease ends in 26s"
    )


HISTORY = """\
12:02:31 ✓ 103 port-catalog    2m58s  $0.88  31 files, 214 lines
12:03:58 ✓ 107 test-jobs       1m12s         44 passed
12:04:19 ↻ 111 test-catalog      38s         exit 1: 3 failed, 41 passed; attem…
12:04:20 ✗ 119 bench            0.1s         permanent: hyperfine: command not…"""


def events() -> list[RunEvent]:
    """Return four ends of attempts."""
    return [
        RunEvent(
            ago(121), "done", 103, "port-catalog", elapsed=178, spend=Spend(usd=0.88), detail="31 files, 214 lines"
        ),
        RunEvent(ago(34), "done", 107, "test-jobs", elapsed=72, detail="44 passed"),
        RunEvent(
            ago(13),
            "retry",
            111,
            "test-catalog",
            attempt=1,
            attempts=3,
            elapsed=38,
            detail="exit 1: 3 failed, 41 passed",
            next_at=ago(-13),
        ),
        RunEvent(
            ago(12),
            "failed",
            119,
            "bench",
            elapsed=0.1,
            error_class="permanent",
            cause="command_not_found",
            detail="hyperfine: command not found",
        ),
    ]


def test_history_lines() -> None:
    """Ended attempts stay as lines whose columns agree."""
    lines = [history(event, NOW, Look(), names=13) for event in events()]
    assert "\n".join(line.text for line in lines if line) == HISTORY


HOSTILE = (
    "[/red]",
    "[bold",
    "[link=x]y[/link]",
    ":smile:",
    "\x1b[2J\x1b]0;title\x07",
    "a\rsucceeded",
    "\x9b31m\x85",
    "abc\u202edcba",
    "zero\u200bwidth\u2066x",
    "審査: 契約書の要約を全部",
    "e\u0301\u0301\u0301",
    "👩\u200d💻 emoji",
    "x" * 300,
    "\ud800lone",
    "tab\tnew\nline",
)


def hostile_view() -> RunView:
    """Return a plan whose every foreign text is one of HOSTILE."""
    tasks = []
    statuses = ("running", "waiting", "failed", "pending", "blocked", "cancelled", "done")
    for n, bad in enumerate(HOSTILE * len(statuses)):
        status = statuses[n // len(HOSTILE)]
        tasks.append(
            PlanTask(
                1_000_000 + n,
                bad,
                bad,
                status,
                attempt=1,
                started_at=ago(100_000),
                budget=Budget(seconds=10, usd=1),
                spend=Spend(usd=1234.5, tokens=10**9),
                last_output=bad,
                will_not_stop=bad if n % 4 == 0 else None,
                error=TaskError("permanent", bad, bad) if status in ("failed", "cancelled") else None,
                question=Question(1_000_000 + n, bad, choices=(bad, bad), asked_at=ago(5))
                if status == "waiting"
                else None,
                needs=(1_000_000 + n - 20,),
                note=bad,
            )
        )
    return RunView("\x1b[31mplan" + "長" * 40, ago(90_000), tuple(tasks), away_error="\x1b[0m")


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (40, 10), (20, 5), (200, 200), (59, 12), (99, 33)])
@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("few", [False, True])
def test_hostile_text_never_breaks_a_region(size: tuple[int, int], ascii_only: bool, few: bool) -> None:
    """No line is wider than the screen, no control character is left, ids are whole."""
    view = hostile_view()
    if few:
        view = replace(view, tasks=view.tasks[:: len(view.tasks) // 40])
    look = Look(*size, ascii=ascii_only, keys=ALL_KEYS)
    lines = render(view, NOW, look)
    assert len(lines) <= size[1] - (1 if size[1] <= 12 else 3)
    for line in lines:
        assert cells(line.text) <= size[0], line.text
        assert line.text.isprintable(), repr(line.text)
        assert not ascii_only or line.text.isascii()
        assert "\x1b" not in line.text
        line.text.encode()
    ids = [part for line in lines[2:] for part in line.text.split()[1:2] if part.startswith("1000") or part.isdigit()]
    assert all(len(part) == 7 for part in ids if part.startswith("100"))


def test_text_is_the_same_with_and_without_colour() -> None:
    """Colours say nothing that the letters do not."""
    import re

    for line in render(plan_view(), NOW, Look()):
        assert re.sub(r"\x1b\[[\d;]*m", "", line.painted(Paint.COLOR)) == line.painted(Paint.NONE)
        assert not re.search(r"\x1b\[[\d;]*3\dm", line.painted(Paint.WEIGHT))
