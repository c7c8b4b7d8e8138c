"""The judge of chaos: it sees what it is there for, and lets pass what ``docs/guarantees.md`` allows."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.chaos.fleet import LEASE, Exit
from tests.chaos.judge import NEVER, Judge
from tests.chaos.ledger import read
from tests.chaos.watch import Sample, Watch, waits


def judge(
    tmp_path: Path,
    lines: str,
    runs: list[dict[str, Any]],
    *,
    status: str = "done",
    renewed: float = 100.0,
    frozen: list[list[float]] | None = None,
    starved: list[list[float]] | None = None,
) -> Judge:
    """A judge over task 1, all of whose runs were on the worker W with pid 7, which was declared dead."""
    file = tmp_path / "ledger"
    file.write_text(lines)
    environment: Any = SimpleNamespace(ledger=file, rows=lambda *_: [])
    fleet: Any = SimpleNamespace(frozen={7: frozen or []}, members=[], exits=[], watch=Watch())
    fleet.watch.samples[7] = [Sample(end, 0.1, end - start) for start, end in starved or []]
    hand: Any = SimpleNamespace(added={1}, deeds=[])
    made = Judge(environment, fleet, hand)
    made.ledger, made.offset = read(file), 0.0
    whole = [{"worker_id": "W", "cause": None, "result": None, "recorded": 1e9, **run} for run in runs]
    last = whole[-1] if whole else {"result": None}
    made.tasks = {
        1: {
            "status": status,
            "attempt": len(runs),
            "runs": whole,
            "claimed_by": None,
            "max_retries": 2,
            "retry_count": 0,
            "result": last["result"],
        }
    }
    made.workers = {"W": {"name": "w1", "pid": 7, "renewed": renewed, "dead_at": "yes", "dead_why": "silent"}}
    return made


def rules(found: Any) -> list[str]:
    """The names of the rules that were broken."""
    return [violation.rule for violation in found]


TWICE = "100 1 1 begin 9 loop\n108 1 1 beat 9 loop\n107 1 2 begin 9 loop\n108 1 2 end 9 loop\n"
LOST_THEN_DONE: list[dict[str, Any]] = [
    {"attempt": 1, "status": "lost", "recorded": 106.0},
    {"attempt": 2, "status": "done", "result": "1.2"},
]


def test_an_overlap_is_seen(tmp_path: Path) -> None:
    """Attempt 1 still wrote when attempt 2 had begun, and after it was recorded."""
    made = judge(tmp_path, TWICE, LOST_THEN_DONE)
    assert rules(made._overlaps()) == ["no overlap"]
    assert rules(made._alive_after_record()) == ["gone when recorded"]
    assert made.allowed == []


def test_an_overlap_with_a_stopped_worker_is_counted(tmp_path: Path) -> None:
    """Its worker stood still when its lease ended, in one go or in two: allowed, and in the report."""
    for frozen in ([[101.0, 107.8]], [[101.0, 104.0], [104.5, 107.8]]):
        made = judge(tmp_path, TWICE, LOST_THEN_DONE, frozen=frozen)
        assert rules(made._overlaps()) == []
        assert rules(made._alive_after_record()) == []
        assert len(made.allowed) == 2


def test_a_stop_that_was_over_in_time_excuses_nothing(tmp_path: Path) -> None:
    """It went on long before its lease ended, or stood still only afterwards."""
    for span in ([100.0, 101.0], [100.0 + LEASE + 1, 120.0]):
        made = judge(tmp_path, TWICE, LOST_THEN_DONE, frozen=[span])
        assert rules(made._overlaps()) == ["no overlap"]


def test_an_overlap_with_a_worker_that_got_no_processor_is_counted(tmp_path: Path) -> None:
    """The machine was busy with other things when its lease ended: as if it had been stopped, and only then."""
    made = judge(tmp_path, TWICE, LOST_THEN_DONE, starved=[[103.0, 105.5], [105.5, 107.0]])
    assert rules(made._overlaps()) == []
    assert len(made.allowed) == 1
    made = judge(tmp_path, TWICE, LOST_THEN_DONE, starved=[[100.0, 101.0], [104.0, 104.1]])
    assert rules(made._overlaps()) == ["no overlap"]


def test_how_long_a_shutdown_took_is_asked_of_the_worker(tmp_path: Path) -> None:
    """What it waited for a processor is not its own time, unless it took for ever."""
    made = judge(tmp_path, "", [])
    for seconds, starved, expected in ((3.0, 0.0, []), (20.0, 1.0, ["shutdown"]), (20.0, 15.0, [])):
        made.fleet.exits = [Exit("w1", 7, 0, 100.0, seconds, starved)]
        assert rules(made._exits()) == expected
    made.fleet.exits = [Exit("w1", 7, 0, 100.0, NEVER + 1, NEVER)]
    assert rules(made._exits()) == ["shutdown"]


def test_an_exit_code_is_asked_of_what_was_a_worker(tmp_path: Path) -> None:
    """Without a database at its start it ends with 6, also when its row was written and nobody told it; later it may not."""
    made = judge(tmp_path, "", [])
    made.fleet.exits = [Exit("w1", 7, 6, 0.0, 1.0)]
    assert rules(made._exits()) == []
    made = judge(tmp_path, "", [{"attempt": 1, "status": "done"}])
    made.fleet.exits = [Exit("w1", 7, 6, 0.0, 1.0)]
    assert rules(made._exits()) == ["exit code"]


def test_the_kernel_tells_who_waits_for_a_processor() -> None:
    """Where it does: each thread of this process has a number of seconds."""
    assert all(seconds >= 0 for seconds in waits(os.getpid()).values())


def test_work_without_a_run_and_runs_without_work_are_seen(tmp_path: Path) -> None:
    """A ledger entry of an attempt that no row knows, an attempt that began twice, and a done run that did nothing."""
    done: list[dict[str, Any]] = [{"attempt": 1, "status": "done", "result": "1.1"}]
    ok = "100 1 1 begin 9 loop\n101 1 1 end 9 loop\n"
    assert rules(judge(tmp_path, ok, done)._recorded()) == []
    assert rules(judge(tmp_path, ok + "102 1 2 begin 9 loop\n", done)._recorded()) == ["no side effect without a run"]
    assert "one execution an attempt" in rules(judge(tmp_path, "99 1 1 begin 8 loop\n" + ok, done)._recorded())
    assert rules(judge(tmp_path, "", done)._recorded()) == ["done is complete"]


def test_rows_that_do_not_add_up_are_seen(tmp_path: Path) -> None:
    """A missing run, a task that has not ended, and one that is done twice without having been opened again."""
    done: dict[str, Any] = {"status": "done", "result": "1.1"}
    made = judge(tmp_path, "", [{"attempt": 1, **done}])
    assert rules(made._counted()) == rules(made._terminal()) == []
    assert rules(judge(tmp_path, "", [{"attempt": 2, **done}])._counted()) == ["one run an attempt"]
    assert rules(judge(tmp_path, "", [], status="running")._terminal()) == ["terminal"]
    twice = judge(tmp_path, "", [{"attempt": 1, **done}, {"attempt": 2, **done}])
    assert rules(twice._counted()) == ["done once"]
