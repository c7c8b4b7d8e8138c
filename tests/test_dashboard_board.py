"""The frames of ``dashboard``: the captures of the design, and what holds at every size."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from orchestrator.dashboard.board import Away, ranked, render, render_away
from orchestrator.dashboard.frame import Look, Paint
from orchestrator.dashboard.text import cells
from orchestrator.domain.outcome import Budget
from orchestrator.domain.snapshot import (
    AgentRow,
    Alert,
    Count,
    Failure,
    LockHold,
    Minute,
    Question,
    RunningTask,
    ServerInfo,
    Snapshot,
    Spend,
    WorkerRow,
)

NOW = datetime(2026, 11, 28, 12, 4, 31).astimezone()
MINUTE, HOUR, DAY = 60, 3600, 86400


def ago(seconds: float) -> datetime:
    """Return the instant *seconds* before NOW."""
    return NOW - timedelta(seconds=seconds)


def clock(hours: int, minutes: int, seconds: int = 0) -> datetime:
    """Return that time on the day of NOW."""
    return NOW.replace(hour=hours, minute=minutes, second=seconds)


def task(
    task_id: int,
    name: str,
    agent: str,
    worker: str,
    age: float,
    budget: Budget,
    usd: float,
    output: str,
    quiet: float = 5,
) -> RunningTask:
    """Return a running task of the captures."""
    return RunningTask(
        task_id,
        agent,
        ago(age),
        name=name,
        worker=worker,
        budget=budget,
        spend=Spend(usd=usd),
        last_output=output,
        last_output_at=ago(quiet),
    )


def running() -> tuple[RunningTask, ...]:
    """Return the running tasks of the captures, in no good order."""
    of_time = Budget
    return (
        replace(
            task(48204, "triage-issues", "claude", "gpu-02", 866, of_time(seconds=1800), 0.71, "x"),
            cancel_requested_at=ago(3),
            stopping="cancel by ops: TERM sent, KILL in 1s",
        ),
        task(
            48233,
            "bisect-flake",
            "codex",
            "gpu-02",
            1411,
            of_time(seconds=3600),
            1.08,
            "git bisect run: 7 steps left",
            544,
        ),
        task(48087, "summarise [/red] Q3", "claude", "gpu-01", 905, Budget(usd=2.5), 2.21, "Fetched 14 of 22 filings"),
        task(
            48102,
            "審査: 契約書の要約",
            "claude",
            "gpu-01",
            1702,
            of_time(seconds=1790),
            2.31,
            "読み込み中 contracts/2026-11.pdf",
        ),
        task(
            48190, "port-billing", "coder", "gpu-05", 2820, of_time(seconds=1790), 2.44, "Running pytest tests/billing"
        ),
        replace(
            task(48213, "refactor-core", "coder", "gpu-03", 3041, of_time(seconds=3000), 4.12, "x"),
            will_not_stop="2 processes left",
        ),
    )


def snapshot() -> Snapshot:
    """Return the queue of the captures."""
    agents = (
        *(AgentRow(f"well-{n}", running=1, limit=5, oldest_ready_at=ago(60 + n)) for n in range(7)),
        AgentRow("claude", running=80, limit=80, ready=Count(12_031), oldest_ready_at=ago(2820), done_hour=422,
                 failed_hour=4, attempts_hour=400),
        AgentRow("tidy", state="paused", state_until=clock(12, 34), running=0, limit=10, ready=Count(96),
                 oldest_ready_at=ago(1260), done_hour=0),
        AgentRow("gemini", state="breaker", state_until=clock(13, 0), running=4, limit=40, ready=Count(8120),
                 oldest_ready_at=ago(3300), done_hour=112, failed_hour=31, attempts_hour=100),
        AgentRow("scraper", state="no_worker", running=0, ready=Count(1204), oldest_ready_at=ago(8040), done_hour=0),
        AgentRow("coder", running=60, limit=60, ready=Count(21_440), oldest_ready_at=ago(7440), done_hour=210,
                 failed_hour=2, attempts_hour=100),
    )  # fmt: skip
    up = ago(3 * DAY + 4 * HOUR)
    workers = (
        WorkerRow("1", "gpu-01", slots=40, running=40, renewed_at=ago(2), started_at=up),
        WorkerRow("2", "gpu-02", slots=40, running=36, renewed_at=ago(6), started_at=up),
        WorkerRow("3", "gpu-03", state="stopping", stopping=1, slots=40, running=40, renewed_at=ago(3), started_at=up),
        WorkerRow("4", "cpu-02", state="draining", slots=42, running=38, renewed_at=ago(4), started_at=ago(11 * DAY + 2 * HOUR)),
        WorkerRow("5", "gpu-07", state="silent", slots=40, running=30, renewed_at=ago(31), started_at=up),
        *(WorkerRow(f"w{n}", f"gpu-1{n}", slots=42, running=20, renewed_at=ago(1), started_at=up) for n in range(5)),
    )  # fmt: skip
    alerts = (
        Alert("over_budget", "task", "port-billing", "157% of 30m00s", 48190, ago(1020), "orchestrator cancel 48190"),
        Alert("breaker_open", "agent", "gemini", "breaker open until 13:00 (usage limit), 8,120 ready", None, ago(300),
              "orchestrator resume gemini"),
        Alert("worker_silent", "worker", "gpu-07", "silent 31s of 40s lease, holds 30 tasks", None, ago(31)),
        Alert("no_worker", "agent", "scraper", "no live worker, 1,204 ready tasks wait", None, ago(8040),
              "orchestrator worker --agent scraper"),
        Alert("will_not_stop", "task", "refactor-core", "will not stop: TERM, KILL sent; 2 processes left", 48213,
              ago(42), "orchestrator why 48213"),
    )  # fmt: skip
    questions = (
        Question(47990, "Second?", name="later", asked_at=ago(100)),
        Question(47911, "Publish 2.4 to production?", name="publish-docs", choices=("yes", "no"), asked_at=ago(724)),
        Question(47991, "Third?", name="later", asked_at=ago(90)),
    )
    failures = (
        Failure(47810, "scraper", clock(12, 4, 12), "scrape-eu-114", error_class="permanent", cause="bad_input",
                message="HTTP 422 from api.example.com"),
        Failure(48150, "tests", clock(12, 3, 58), "tests-8839", error_class="transient", cause="exit_code",
                message="exit 1: 3 failed, 41 passed", attempt=3, max_retries=2, retry_count=3),
    )  # fmt: skip
    done = [39] * 35 + [38] * 19 + [41, 41, 41, 41, 40, 20]  # the last one is the minute that goes on
    failed = [1] * 15 + [0] * 39 + [1, 0, 1, 0, 1, 0]
    minutes = tuple(
        Minute(clock(12, 4) - timedelta(minutes=59 - n), done=good, failed=bad, usd=38.2 / 60)
        for n, (good, bad) in enumerate(zip(done, failed, strict=True))
    )
    return Snapshot(
        NOW,
        ServerInfo("db-1", "agents", 5432, "17.2", "1.0", "0007"),
        workers,
        agents,
        running(),
        Count(300),
        ready=Count(50_128),
        retrying=Count(214),
        blocked=Count(1930),
        alerts=alerts,
        questions=questions,
        failures=failures,
        minutes=minutes,
        lock_hold=LockHold(1.8, 1.2, 9.4, 148_201),
        read_seconds=0.038,
    )


ALL_KEYS = frozenset({"select", "open", "pane", "/", "a", "x", "?", "q"})

BOARD_80 = """\
db-1/agents   10 workers, 1 silent                          refresh 1s  12:04:31
300/412 running · 50,128 ready · 214 retrying · 1,930 blocked   41/min  $38.20/h
── needs you ───────────────────────────────────────── 5 alerts · 3 questions ──
! 48213 refactor-core  will not stop: TERM, KILL sent; 2 processes left      42s
! agent scraper        no live worker, 1,204 ready tasks wait              2h14m
! worker gpu-07        silent 31s of 40s lease, holds 30 tasks               31s
? 47911 publish-docs   Publish 2.4 to production?  yes / no                  12m
… 4 more: 2 alerts, 2 questions                                            1 all
── running 300 ────────── agent      age       bdgt     cost last output
! 48213  refactor-core    coder   50m41s ━━━━━ 101%    $4.12 will not stop: 2 p…
! 48190  port-billing     coder   47m00s ━━━━━ 157%    $2.44 Running pytest tes…
▸ 48102  審査: 契約書の…  claude  28m22s ━━━━╌  95%    $2.31 読み込み中 contrac…
▸ 48087  summarise [/red… claude  15m05s ━━━━╌ 88%$    $2.21 Fetched 14 of 22 f…
▸ 48233  bisect-flake     codex   23m31s ━━╌╌╌  39%    $1.08 git bisect run: 7…
■ 48204  triage-issues    claude  14m26s ━━╌╌╌  48%    $0.71 cancel by ops: TER…
── agents 12 ───────────────────────── running   ready oldest done/h fail clears
scraper   no live worker                     0   1,204  2h14m      0       never
gemini    breaker to 13:00                4/40   8,120 55m00s    112  31%    ~3d
tidy      paused to 12:34                 0/10      96 21m00s      0       never
… 9 more, nothing wrong with them
── latest failures ──────────────────────────────────────── 18 of 2,329 in 1h ──
12:04:12 ✗ 47810 scrape-eu-114  permanent: bad_input: HTTP 422 from api.example…
12:03:58 ✗ 48150 tests-8839     transient: exit 1: 3 failed, 41 passed (attempt…
 ↑↓ select  ⏎ open  1-5 pane  / filter  a answer  x cancel  ? keys  q quit"""


def text(look: Look, what: Snapshot | None = None, refresh: float | None = 1.0) -> str:
    """Return the frame as a screen without colours shows it."""
    return "\n".join(line.text for line in render(what or snapshot(), NOW, look, refresh=refresh))


def test_dashboard_at_80_columns() -> None:
    """The frame of 80×24 is the one of the design, letter by letter."""
    assert text(Look(80, 24, keys=ALL_KEYS)) == BOARD_80


def test_dashboard_at_120_columns() -> None:
    """The wide frame has every line of the design's capture."""
    lines = text(Look(120, 40, keys=ALL_KEYS)).splitlines()
    assert len(lines) <= 40
    for expected in """\
db-1:5432/agents  PostgreSQL 17.2, orchestrator 1.0   10 workers, 1 silent                   refresh 1s, 38 ms  12:04:31
300/412 running · 50,128 ready · 214 retrying · 1,930 blocked                                         oldest ready 2h14m
── needs you ───────────────────────────────────────────────────────────────────────────────── 5 alerts · 3 questions ──
! 48213 refactor-core  will not stop: TERM, KILL sent; 2 processes left        42s                orchestrator why 48213
! agent scraper        no live worker, 1,204 ready tasks wait                2h14m   orchestrator worker --agent scraper
! agent gemini         breaker open until 13:00 (usage limit), 8,120 ready      5m            orchestrator resume gemini
? 47911 publish-docs   Publish 2.4 to production?  yes / no                    12m         orchestrator answer 47911 yes
── running 300 ──────────── agent   worker     age budget            cost  quiet last output
! 48213  refactor-core      coder   gpu-03  50m41s ━━━━━━━━ 101%    $4.12        will not stop: 2 processes left
! 48190  port-billing       coder   gpu-05  47m00s ━━━━━━━━ 157%    $2.44        Running pytest tests/billing
▸ 48102  審査: 契約書の要約 claude  gpu-01  28m22s ━━━━━━━╌  95%    $2.31        読み込み中 contracts/2026-11.pdf
▸ 48087  summarise [/red]…  claude  gpu-01  15m05s ━━━━━━━╌ 88%$    $2.21        Fetched 14 of 22 filings
▸ 48233  bisect-flake       codex   gpu-02  23m31s ━━━╌╌╌╌╌  39%    $1.08  9m04s git bisect run: 7 steps left
■ 48204  triage-issues      claude  gpu-02  14m26s ━━━━╌╌╌╌  48%    $0.71        cancel by ops: TERM sent, KILL in 1s
── agents 12 ───────────────────── running   ready oldest done/h fail clears  ── workers 10 ────────  slots  beat     up
scraper   no live worker                 0   1,204  2h14m      0       never  gpu-07   silent         30/40   31s  3d04h
gemini    breaker to 13:00            4/40   8,120 55m00s    112  31%    ~3d  gpu-03   stopping 1     40/40    3s  3d04h
tidy      paused to 12:34             0/10      96 21m00s      0       never  cpu-02   draining       38/42    4s 11d02h
coder                                60/60  21,440  2h04m    210   2%    ~4d  gpu-01                  40/40    2s  3d04h
claude                               80/80  12,031 47m00s    422   1%    ~1d  gpu-02                  36/40    6s  3d04h
… 5 more, nothing wrong with them                                             … 3 more, nothing wrong with them
── latest failures ──────────────────────────────────────────────────────────────────────────────── 18 of 2,329 in 1h ──
12:04:12 ✗ 47810 scrape-eu-114      scraper  permanent   bad_input: HTTP 422 from api.example.com
12:03:58 ✗ 48150 tests-8839         tests    transient   exit 1: 3 failed, 41 passed (attempt 3 of 3)
 ↑↓ select  ⏎ open  1-5 pane  / filter  a answer  x cancel  ? keys  q quit""".splitlines():
        assert expected in lines
    assert lines[2][20:].split("   ")[0] == " 41.1/min · 1h: 2,311 done, 18 failed · $38.20/h"
    assert lines[2].endswith("   lock hold 1.8 ms mean, 1.2 p50, 9.4 p99")


BOARD_40 = """\
agents ▸300 ·50,128 !5 ?3       12:04:31
! 48213 will not stop: TERM, KILL sent;…
! scraper no live worker, 1,204 ready t…
? 47911 Publish 2.4 to production?  yes…
… 5 more: 3 alerts, 2 questions
! 48213 refactor-core       50m41s 101%
! 48190 port-billing        47m00s 157%
▸ 48102 審査: 契約書の要約  28m22s  95%
▸ 48087 summarise [/red] Q3 15m05s 88%$
▸ 48233 bisect-flake        23m31s  39%"""

BOARD_20 = """\
agents ▸300 !5 ?3
! 48213 will not st…
… 7 more: 4 alerts,…
! 48213 refa… 50m41s
! 48190 port… 47m00s"""


def test_dashboard_on_tiny_screens() -> None:
    """The frames of 40×10 (the design's, letter by letter) and 20×5."""
    assert text(Look(40, 10)) == BOARD_40
    assert text(Look(20, 5)) == BOARD_20


def test_dashboard_in_ascii_carries_the_same_rows() -> None:
    """Without Unicode every line is ASCII, and as many lines stand there."""
    lines = text(Look(80, 24, ascii=True, keys=ALL_KEYS)).splitlines()
    assert len(lines) == 24
    assert all(line.isascii() for line in lines)
    assert "> 48102  ??: ??????       claude  28m22s ####.  95%    $2.31 ????? contracts/2.." in lines


def test_empty_queue_says_how_to_begin() -> None:
    """A database without tasks shows the two commands to start with."""
    empty = Snapshot(NOW, ServerInfo("db-1", "agents", 5432), any_task=False)
    assert text(Look(80, 24), empty).splitlines() == [
        "db-1/agents   no live worker",
        "no task yet; start with one of",
        '  orchestrator add coder --input "Fix the failing test"',
        "  orchestrator run plan.yaml",
    ]


def test_nothing_needs_you_is_one_line() -> None:
    """Without alerts and questions the pane is one line, and its rows go to the running tasks."""
    lines = text(Look(80, 24), replace(snapshot(), alerts=(), questions=())).splitlines()
    assert lines[2] == "✓ nothing needs you"
    assert lines[3].startswith("── running 300 ")


def test_unknown_numbers_are_never_zero() -> None:
    """What nobody measured is left empty or marked, and capped counts say so."""
    bare = Snapshot(
        NOW,
        ServerInfo("db-1", "agents"),
        running=(RunningTask(7, "a", ago(4), spend=Spend(tokens=5)),),
        running_count=Count(1),
        ready=Count(25_000, capped=True),
        agents=(AgentRow("a", ready=Count(25_000, capped=True)),),
    )
    for look in (Look(80, 24), Look(120, 40)):
        shown = text(look, bare)
        assert "25,000+ ready" in shown
        assert "$0" not in shown
        assert "0/min" not in shown
        assert "lock hold" not in shown
        assert "0%" not in shown
        assert re.search(r"7 +a .* \?", shown)


def test_database_away_keeps_the_last_picture_dimmed_under_one_bright_line() -> None:
    """The line says since when, why, and when the next try is; the picture keeps its ages."""
    away = Away(NOW, "connection refused", NOW + timedelta(seconds=17))
    later = NOW + timedelta(seconds=14)
    lines = render_away(snapshot(), away, later, Look(100, 24), refresh=1.0)
    assert lines[0].text == ("database away 14s: connection refused; next try in 3s; below is as of 12:04:31")
    long = replace(away, error="server closed the connection unexpectedly before anybody could tell")
    assert render_away(snapshot(), long, later, Look())[0].text == (
        "database away 14s: server closed the c…; next try in 3s; below is as of 12:04:31"
    )
    assert len(lines) == 24
    assert any("50m41s" in line.text for line in lines)
    assert "\x1b[2m" not in lines[0].painted(Paint.COLOR)
    assert all("\x1b[2m" in line.painted(Paint.COLOR) for line in lines[1:] if line.text)
    assert render_away(None, away, later, Look())[0].text.startswith("database away 14s: connection refused")


BAD = ("[/red]", "[link=x]y[/link]", "\x1b[2J\x1b]52;c;eA==\x07", "a\rsucceeded", "\x9b31m", "\u202edcba", "zero\u200bwidth",
       "審査: 契約書の要約を全部", "e\u0301\u0301", "x" * 300, "\ud800", "tab\tnew\nline")  # fmt: skip


def hostile() -> Snapshot:
    """Return a snapshot whose every foreign text is one of BAD, with large numbers."""
    big = Count(25_000, capped=True)
    return Snapshot(
        NOW,
        ServerInfo("h\x1b[31m" + "o" * 60, "d\u202eb", 5432, "17\x07", "1.0"),
        tuple(WorkerRow(bad, bad, state="silent", slots=99_999, running=88_888, started_at=ago(10**8)) for bad in BAD),
        tuple(
            AgentRow(bad, state="paused", state_until=ago(-10**6), ready=big, oldest_ready_at=ago(10**8), running=99_999,
                     limit=99_999, done_hour=1, failed_hour=1, attempts_hour=1)
            for bad in BAD
        ),
        tuple(
            RunningTask(10**9 + n, bad, ago(10**7), title=bad, worker=bad, budget=Budget(seconds=1, tokens=1, usd=0.001),
                        spend=Spend(usd=123_456.0, tokens=10**12), last_output=bad, will_not_stop=bad if n % 2 else None)
            for n, bad in enumerate(BAD * 3)
        ),
        big, big, big, big, big, big, big,
        tuple(Alert(bad, bad, bad, bad, since=ago(10**7), command=bad) for bad in BAD),
        None,
        tuple(Question(10**9 + n, bad, bad, choices=(bad, bad), asked_at=ago(9)) for n, bad in enumerate(BAD)),
        None,
        tuple(Failure(10**9 + n, bad, ago(10**7), bad, bad, bad, bad, bad) for n, bad in enumerate(BAD)),
        read_seconds=1.5,
    )  # fmt: skip


@pytest.mark.parametrize(
    "size", [(80, 24), (120, 40), (40, 10), (20, 5), (200, 60), (60, 15), (99, 16), (100, 15), (30, 1)]
)
@pytest.mark.parametrize("ascii_only", [False, True])
def test_hostile_text_never_breaks_a_frame(size: tuple[int, int], ascii_only: bool) -> None:
    """No line is wider than the screen, no more lines than rows, no control character is left, running ids are whole."""
    for what in (hostile(), replace(snapshot(), server=hostile().server)):
        lines = render(what, NOW, Look(*size, ascii=ascii_only, keys=ALL_KEYS), refresh=1.0)
        assert len(lines) <= size[1]
        for line in lines:
            assert cells(line.text) <= size[0], line.text
            assert line.text.isprintable(), repr(line.text)
            assert not ascii_only or line.text.isascii()
            line.text.encode()
            if isinstance(line.target, int) and size[0] >= 40:
                assert f" {line.target}" in line.text


@pytest.mark.parametrize("width", [*range(20, 130)])
def test_every_width_is_correct(width: int) -> None:
    """From 20 columns on no line is too wide, and the ids of running tasks are whole."""
    for height in (5, 15, 24, 40):
        for line in render(snapshot(), NOW, Look(width, height, keys=ALL_KEYS), refresh=1.0):
            assert cells(line.text) <= width
            if line.target is not None:
                assert str(line.target) in line.text


def test_colour_says_nothing_of_its_own() -> None:
    """The text is the same in every paint; without colour only weights are left."""
    for line in render(snapshot(), NOW, Look(120, 40), refresh=1.0, selected=48190):
        assert re.sub(r"\x1b\[[\d;]*m", "", line.painted(Paint.COLOR)).rstrip() == line.painted(Paint.NONE)
        assert not re.search(r"\x1b\[[\d;]*3\dm", line.painted(Paint.WEIGHT))
        assert not re.search(r"\x1b\[(30|34|37|4\d|9\d|10\d)m", line.painted(Paint.COLOR))
        if line.target == 48190:
            assert line.painted(Paint.COLOR).startswith("\x1b[7m")


def test_two_hundred_tasks_are_drawn_in_a_few_milliseconds() -> None:
    """Drawing stays far below the pace of frames; the best of several counts, so that a busy machine does not matter."""
    one = snapshot()
    many = replace(one, running=tuple(replace(one.running[n % 6], id=n + 1) for n in range(200)))
    best = 1.0
    for _ in range(10):
        before = time.thread_time()
        render(many, NOW, Look(120, 40), refresh=1.0)
        best = min(best, time.thread_time() - before)
    assert best < 0.1


def test_rows_keep_their_places_while_somebody_reads() -> None:
    """Ids in the given order stay in it, whatever their rank; new ones come behind them."""
    by_rank = [task.id for task in ranked(snapshot(), NOW).running]
    assert by_rank == [48213, 48190, 48102, 48087, 48233, 48204]
    frame = render(snapshot(), NOW, Look(40, 10), order=[48204, 48233])
    assert [line.target for line in frame][5:] == [48204, 48233, 48213, 48190, 48102]
    kept = ranked(snapshot(), NOW, [48204, 48233, 1])
    assert [task.id for task in kept.running] == [48204, 48233, 48213, 48190, 48102, 48087]


def test_dead_workers_are_not_counted_as_alive() -> None:
    """A worker that is dead while its tasks are taken back shows as such, and its slots are not there."""
    what = replace(snapshot(), workers=(WorkerRow("1", "w1", slots=4), WorkerRow("2", "w2", slots=8, state="dead")))
    lines = text(Look(120, 40), what).splitlines()
    assert "1 worker, 1 dead" in lines[0]
    assert lines[1].startswith("300/4 running")
    assert any("w2       dead" in line for line in lines)
