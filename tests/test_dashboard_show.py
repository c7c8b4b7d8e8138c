"""The screens of the short commands: the captures of the design, pipes, hostile text."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from orchestrator.dashboard import short
from orchestrator.dashboard.frame import NO_LIMIT, Look
from orchestrator.dashboard.show import (
    LogLines,
    list_end,
    logs_end,
    logs_gap,
    logs_head,
    render_list,
    render_runs,
    render_show,
    render_status,
)
from orchestrator.dashboard.text import cells, clean, cut
from orchestrator.domain.outcome import Budget
from orchestrator.domain.snapshot import Count, ServerInfo, Spend

NOW = datetime(2026, 11, 28, 12, 4, 31).astimezone()


def ago(seconds: float) -> str:
    """Return the instant *seconds* before NOW as the contract writes it."""
    return (NOW - timedelta(seconds=seconds)).isoformat()


def at(clock: str) -> str:
    """Return that time on the day of NOW as the contract writes it."""
    return datetime.combine(NOW.date(), datetime.strptime(clock, "%H:%M:%S").time()).astimezone().isoformat()


def task(task_id: int, status: str, agent: str, **changes: Any) -> dict[str, Any]:
    """Return a task object of the contract."""
    given = {
        "id": task_id, "agent": agent, "title": None, "status": status, "priority": 0, "attempt": 0, "retry_count": 0,
        "lost_count": 0, "max_retries": 2, "retry": None,
        "budget": {"seconds": None, "tokens": None, "usd": None, "turns": None, "on_limit": "fail"},
        "available_at": ago(1000), "created_at": ago(1000), "started_at": None, "finished_at": None,
        "claimed_by": None, "cancel_requested_at": None, "held_at": None, "plan": None, "name": None, "depends_on": [],
        "unique_key": None, "concurrency_key": None, "tags": {}, "input": None, "result": None, "error": None,
        "next_attempt_at": None, "usage": {"total_tokens": None, "cost_usd": None, "complete": None}, "session": None,
    }  # fmt: skip
    return {**given, **changes}


def tasks() -> list[dict[str, Any]]:
    """Return the tasks of the capture of ``list``."""
    budget = {"seconds": 1790, "tokens": None, "usd": None, "turns": None}
    return [
        task(48302, "pending", "claude", title="[/red]\x1b[2J job", created_at=ago(115)),
        task(48301, "pending", "gemini", title="翻訳: リリースノート v2.4 の全文", created_at=ago(128),
             note="breaker open until 13:00"),
        task(48190, "running", "coder", name="port-billing", started_at=ago(2820), attempt=1, budget=budget,
             usage={"cost_usd": 2.44}),
        task(48166, "pending", "embed", name="index-de", created_at=ago(192), attempt=2, retry_count=2,
             next_attempt_at=ago(-41), usage={"total_tokens": 12},
             error={"class": "transient", "cause": "exit_code", "message": "HTTP 503"}),
        task(48150, "failed", "tests", name="tests-8839", finished_at=ago(33), attempt=3,
             error={"class": "transient", "cause": "exit_code", "message": "exit 1: 3 failed, 41 passed"}),
        task(48099, "pending", "coder", name="purge-cache", created_at=ago(93_600), held_at=ago(50),
             note="held by ops: after the release"),
        task(47911, "waiting", "claude", name="publish-docs", created_at=ago(724), attempt=1,
             usage={"cost_usd": 0.18}, question={"text": "Publish 2.4 to production?"}),
    ]  # fmt: skip


LIST = """\
  id     status    task               agent      age   cost note
· 48302  pending   [/red]\\x1b[2J job  claude   1m55s      –
· 48301  pending   翻訳: リリースノ…  gemini   2m08s      – breaker open until…
▸ 48190  running   port-billing       coder   47m00s  $2.44 157% of 29m50s
↻ 48166  pending   index-de           embed    3m12s      ? 3 of 3 in 41s: HTTP…
✗ 48150  failed    tests-8839         tests      33s      – transient: exit 1:…
‖ 48099  pending   purge-cache        coder    1d02h      – held by ops: after…
? 47911  waiting   publish-docs       claude  12m04s  $0.18 asks: Publish 2.4 t…"""


def shown(lines: list[Any]) -> str:
    """Return lines as a screen without colours shows them."""
    return "\n".join(line.text for line in lines)


def test_list_at_80_columns() -> None:
    """The table is the one of the design, letter by letter."""
    assert shown(render_list(tasks(), NOW, Look())) == LIST
    assert list_end(7, 47911) == "7 shown; more: --after-id 47911"
    assert list_end(0, None) == "no task matches"
    assert list_end(3, None) == "3 shown"


def test_list_in_a_pipe_has_all_columns_uncut() -> None:
    """Without a screen nothing is cut and nothing is left out."""
    text = shown(render_list(tasks(), NOW, Look(NO_LIMIT)))
    assert "翻訳: リリースノート v2.4 の全文" in text
    assert "transient: exit 1: 3 failed, 41 passed" in text
    assert "…" not in text
    assert "\x1b" not in text


def failed_task() -> dict[str, Any]:
    """Return the task of the capture of ``show``."""

    def run(n: int, status: str, start: str, seconds: float, worker: str, message: str, **more: Any) -> dict[str, Any]:
        return {"attempt": n, "status": status, "started_at": at(start), "duration_seconds": seconds, "worker": worker,
                "message": message, "cause": "exit_code", "usage": {}, "notes": [], "late": None, **more}  # fmt: skip

    return task(
        48150, "failed", "tests", name="tests-8839", plan="ci-8839", priority=5, attempt=3, created_by="ci-bot",
        created_at=at("12:01:20"), started_at=at("12:01:22"), finished_at=at("12:03:58"),
        budget={"seconds": 600, "tokens": None, "usd": None, "turns": None},
        error={"class": "transient", "cause": "exit_code", "message": "exit 1: 3 failed, 41 passed"},
        runs=[
            run(1, "transient", "12:01:22", 49, "cpu-02", "exit 1: 3 failed, 41 passed"),
            run(2, "lost", "12:02:15", 8.1, "gpu-07", "worker lost", cause=None, late={"message": "exit 1"}),
            run(3, "transient", "12:03:06", 52, "cpu-01", "exit 1: 3 failed, 41 passed"),
        ],
    )  # fmt: skip


SHOW = """\
✗ 48150 tests-8839  failed 33s ago, after 3 attempts                plan ci-8839
  agent      tests (command), priority 5
  created    12:01:20 by ci-bot; started 12:01:22, ended 12:03:58 (2m36s)
  error      transient exit_code: exit 1: 3 failed, 41 passed
  budget     52s of 10m00s in the last attempt
  needed by  48151 deploy-8839 (blocked)
── attempts ────────────────────────────────────────────────────────────────────
 1 transient  12:01:22    49s      – cpu-02   exit 1: 3 failed, 41 passed
 2 lost       12:02:15   8.1s      – gpu-07   worker lost; late result: exit 1
 3 transient  12:03:06    52s      – cpu-01   exit 1: 3 failed, 41 passed
── last output of attempt 3 ─────────────────────────────────────────── 41 KB ──
  FAILED tests/test_auth.py::test_expiry - assert 401 == 200
  FAILED tests/test_auth.py::test_refresh - KeyError: 'exp'
  3 failed, 41 passed in 49.80s
next  orchestrator retry 48150   all of it: orchestrator logs 48150"""


def test_show_at_80_columns() -> None:
    """The screen is the one of the design, letter by letter."""
    lines = render_show(
        failed_task(),
        NOW,
        Look(),
        needed_by=[{"id": 48151, "name": "deploy-8839", "status": "blocked"}],
        output=[
            "FAILED tests/test_auth.py::test_expiry - assert 401 == 200",
            "FAILED tests/test_auth.py::test_refresh - KeyError: 'exp'",
            "3 failed, 41 passed in 49.80s",
        ],
        output_bytes=41_984,
        agent_kind="command",
    )
    assert shown(lines) == SHOW


def test_show_prints_twenty_lines_of_data() -> None:
    """Input and result are shown up to twenty lines, then their size and how to get them whole."""
    long = "\n".join(f"line {n}" for n in range(30))
    text = shown(render_show(task(1, "done", "a", input=long, result={"sent": True}), NOW, Look()))
    assert "line 19" in text
    assert "line 20" not in text
    assert "… 10 more lines, 229 B in all: --json" in text
    assert '"sent": true' in text


def test_show_says_what_to_do_next() -> None:
    """Each kind of task ends with the command that goes on from it."""

    def last(status: str, **changes: Any) -> str:
        return render_show(task(9, status, "a", **changes), NOW, Look())[-1].text

    assert last("running", started_at=ago(5), attempt=1) == "next  orchestrator logs -f 9"
    assert last("cancelled", finished_at=ago(5)) == "next  orchestrator retry 9"
    assert last("pending", held_at=ago(5)) == "next  orchestrator release 9"


def test_show_names_the_variables_of_the_newest_attempt() -> None:
    """Only where it is asked for: the names alone, on as many lines as they take."""
    given = failed_task()
    names = [f"VARIABLE_{n:02}" for n in range(12)]
    given["runs"][-1]["variables"] = names
    assert "VARIABLE" not in shown(render_show(given, NOW, Look()))
    lines = [line.text for line in render_show(given, NOW, Look(), variables=True)]
    at = next(n for n, text in enumerate(lines) if "variables of attempt 3" in text)
    assert "12 names, no values" in lines[at]
    assert " ".join(lines[at + 1 : at + 3]).split() == names


def test_runs_have_captions() -> None:
    """The table of ``runs`` names its columns."""
    lines = render_runs(failed_task()["runs"], NOW, Look(), captions=True)
    assert lines[0].text == " n outcome    started    time   cost worker   message"


STATUS = """\
db-1:5432/agents  PostgreSQL 17.2, orchestrator 1.0, schema 0007
tasks     300 running · 50,128 ready · 214 retrying · 1,930 blocked · 3 waiting
finished  ~10.2M done, ~48k failed  (the planner's estimates)
last hour 2,311 done, 18 failed attempts, $38.20+, 38.8/min
workers   10 live, 300 of 412 slots; 1 silent (gpu-07, 31s)
oldest    scraper 2h14m (no live worker), coder 2h04m, gemini 55m00s
lock hold 1.8 ms mean, 1.2 p50, 9.4 p99  (148,201 claims in 1h)
alerts    5: 48213 will not stop; scraper no live worker; …  orchestrator alerts"""


def test_status_at_80_columns() -> None:
    """The screen of ``status`` has every line of the design."""
    worker = {"name": "gpu-01", "state": "live", "running": 30, "slots": 41, "renewed_at": ago(2)}
    agents = [
        {"name": "scraper", "state": "no_worker", "ready": 1204, "oldest_wait_seconds": 8040.0},
        {"name": "gemini", "state": "ok", "ready": 8120, "retrying": 214, "oldest_wait_seconds": 3300.0},
        {"name": "coder", "state": "ok", "ready": 40_804, "oldest_wait_seconds": 7440.0},
    ]
    status = {
        "counts": {"pending": 50_342, "running": 300, "blocked": 1930, "waiting": 3, "capped": False,
                   "finished": {"done": 10_200_000, "failed": 48_000, "cancelled": 1, "estimate": True}},
        "agents": agents,
        "running": [],
        "workers": [{**worker} for _ in range(8)]
        + [{**worker, "slots": 44}, {"name": "gpu-07", "state": "silent", "running": 30, "slots": 40, "renewed_at": ago(31)}],
        "lock_hold_ms": {"mean": 1.8, "p50": 1.2, "p99": 9.4, "count": 148_201},
        "alerts": [{"task_id": 48213, "name": "x", "what": "will not stop"},
                   {"task_id": None, "name": "scraper", "what": "no live worker"},
                   *({"task_id": n, "name": "x", "what": "over budget: 157% of 30m00s"} for n in range(3))],
    }  # fmt: skip
    lines = render_status(
        status, NOW, Look(), server=ServerInfo("db-1", "agents", 5432, "17.2", "1.0", "0007"),
        last_hour=(2311, 18, 38.2, True),
    )  # fmt: skip
    got = shown(lines).splitlines()
    assert got[:7] == STATUS.splitlines()[:7]
    assert got[7].startswith("alerts    5: 48213 will not stop; scraper no live worker;")
    assert got[7].endswith("  orchestrator alerts")
    assert cells(got[7]) <= 80


def test_status_of_a_socket_is_local() -> None:
    """A server that is reached by a socket has no host name to show: it is local."""
    status = {
        "counts": {"pending": 0, "running": 0, "blocked": 0, "waiting": 0, "capped": False,
                   "finished": {"done": 0, "failed": 0, "cancelled": 0, "estimate": True}},
        "agents": [], "running": [], "workers": [], "lock_hold_ms": {}, "alerts": [],
    }  # fmt: skip
    server = ServerInfo(
        "/home/ann/.local/share/orchestrator/postgres/sock", "orchestrator", None, "18.0", "1.0", "0007"
    )
    lines = render_status(status, NOW, Look(), server=server, last_hour=(0, 0, 0.0, False))
    assert shown(lines).splitlines()[0] == "local/orchestrator  PostgreSQL 18.0, orchestrator 1.0, schema 0007"


def test_logs_frames_and_lines() -> None:
    """Frame lines say which attempt and how it ended; between them the agent's words stand as they are."""
    look = Look(74)
    run = {"status": "done", "duration_seconds": 211, "exit_code": 0, "worker": "laptop", "started_at": at("12:05:10"),
           "usage": {"total_tokens": 512_000, "cost_usd": 1.6}}  # fmt: skip
    head = logs_head(task(109, "done", "claude", name="port-billing"), run, 2, NOW, look)
    assert head.text == "── attempt 2 port-billing 109, claude, laptop, 12:05:10 ──────────────────"
    assert logs_end(run, Look(60)).text == "── done 3m31s, exit 0, 512k tokens, $1.60 ──────────────────"
    assert logs_gap(1_258_291, look).text == "… 1.2 MB left out (head 1 MB and tail 256 KB are kept) …"
    lines = LogLines(look)
    assert shown(lines.add("answer", "drop (by ops)")) == "answer drop (by ops)"
    assert lines.add("stdout", "I'll dr") == []
    assert shown(lines.add("stdout", "op it.\n\tindent\x1b[2J\r\nrest")) == "I'll drop it.\n        indent\\x1b[2J"
    assert shown(lines.add("tool", "bash ls")) == "rest\nbash ls"
    assert lines.rest() == []


HOSTILE = ("[/red]", "[link=x]y[/link]", "\x1b[2J\x1b]52;c;eA==\x07", "a\rdone", "\x9b31m", "\u202edcba", "z\u200bw",
           "審査: 契約書の要約を全部", "x" * 300, "\ud800", "tab\tnew\nline")  # fmt: skip


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, NO_LIMIT])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_hostile_text_never_breaks_a_command(width: int, ascii_only: bool) -> None:
    """No control character reaches the terminal, no line is too wide, ids are whole."""
    look = Look(width, ascii=ascii_only)
    many = []
    for n, bad in enumerate(HOSTILE):
        many.append(
            task(10**9 + n, ("failed", "running", "pending", "waiting", "cancelled")[n % 5], bad, name=bad, title=bad,
                 plan=bad, error={"class": "transient", "cause": bad, "message": bad}, tags={bad: bad}, note=bad,
                 started_at=ago(9**9 / 10), finished_at=ago(1) if n % 5 in (0, 4) else None, unique_key=bad, input=bad,
                 result={bad: bad}, attempt=1, created_by=bad, question={"text": bad}, session=bad,
                 runs=[{"attempt": 1, "status": "lost", "worker": bad, "message": bad, "late": {"message": bad},
                        "notes": [bad], "started_at": ago(10**6), "duration_seconds": 5, "usage": {}}])
        )  # fmt: skip
    lines = render_list(many, NOW, look)
    assert sum(any(str(each["id"]) in line.text for line in lines) for each in many) == len(many)
    for each in many:
        lines += render_show(each, NOW, look, needed_by=many, output=HOSTILE, output_bytes=5, agent_kind=each["agent"])
        lines.append(logs_head(each, each["runs"][0], 1, NOW, look))
        lines.append(logs_end(each["runs"][0], look))
        lines += LogLines(look).add("message", each["name"])
    for line in lines:
        assert line.text.isprintable(), repr(line.text)
        assert not ascii_only or line.text.isascii()
        line.text.encode()
        if line.look.width == width:
            assert cells(line.text) <= width


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (38, "38s"),
        (134, "2m14s"),
        (4020, "1h07m"),
        (273_600, "3d04h"),
        (59.9, "59s"),
        (-5, "0s"),
        (3600, "1h00m"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    """At most two units, never negative."""
    assert short.age(seconds) == text


def test_numbers() -> None:
    """Durations, money, tokens, bytes, counts, shares and queues as the design writes them."""
    assert [short.duration(s) for s in (0.4, 9.94, 9.96, 38.2)] == ["0.4s", "9.9s", "9s", "38s"]
    assert [short.money(m) for m in (0.41, 12.3, 1204.4, 999.999, 0, 0.004, None)] == [
        "$0.41", "$12.30", "$1,204", "$1,000", "$0.00", "$0.004", "?",
    ]  # fmt: skip
    assert short.money(4.87, partial=True) == "$4.87+"
    assert [short.tokens(t) for t in (812, 41_000, 1_900_000, 999_600, None)] == ["812", "41k", "1.9M", "1.0M", "?"]
    assert [short.size(b) for b in (512, 41_984, 1_258_291, 1024, None)] == ["512 B", "41 KB", "1.2 MB", "1 KB", "?"]
    assert short.counted(Count(25_000, capped=True)) == "25,000+"
    assert short.percent(0.999) == "99%"
    assert short.percent(1.57, "$") == "157%$"
    budget = Budget(seconds=100, usd=1.0, tokens=10, turns=4)
    assert short.nearest(budget, 50, Spend(usd=0.88)) == (0.88, "$")
    assert short.nearest(budget, None, Spend()) is None
    assert [short.clears(Count(n), done) for n, done in ((8120, 112), (0, 5), (5, 0), (30, 60), (5, None))] == [
        "~3d", "", "never", "~30m", "",
    ]  # fmt: skip
    assert short.of(3, 2, 3) == 3
    assert short.of(2, 2, 1) == 3
    assert short.of(2, None, 1) is None


def test_cutting_counts_cells() -> None:
    """A wide character is never halved, and combining marks take no room."""
    assert cut("審査契約", 5) == "審査…"
    assert cut("審査契約", 4) == "審…"
    assert cut("審査", 4) == "審査"
    assert cut("abcdef", 4, "..") == "ab.."
    assert cut("abc", 1) == "…"
    assert cut("abc", 0) == ""
    assert cut("e\u0301e\u0301e\u0301", 3) == "e\u0301e\u0301e\u0301"
    assert cut("word next", 6) == "word…"


def test_cleaning_makes_controls_visible_and_keeps_everything_else() -> None:
    """Escapes, bidi and invisible characters are shown; brackets and text stay; twice is the same as once."""
    for bad in HOSTILE:
        assert clean(clean(bad)) == clean(bad)
        assert clean(bad).isprintable()
    assert clean("[bold]x[/] :smile: é 審") == "[bold]x[/] :smile: é 審"
    assert clean("\x1b[2J\x9b\x7f\u202e\u200b\U000e0041") == "\\x1b[2J\\x9b\\x7f\\u202e\\u200b\\U000e0041"
    assert clean("a\r\nb\tc\nd\re") == "a b c d\\x0de"
