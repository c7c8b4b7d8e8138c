"""Hosts whose clocks are wrong by hours: only the database's clock decides what is due, late or dead (S02, S03)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sqlalchemy import Engine

from tests.conftest import WaitUntil
from tests.faults import Fleet
from tests.servers import TcpProxy
from tests.working import query, statuses

pytestmark = pytest.mark.slow

SHIFT = """
import datetime, os, time

_by = float(os.environ["WRONG_BY"])
_time, _time_ns, _real = time.time, time.time_ns, datetime.datetime
time.time = lambda: _time() + _by
time.time_ns = lambda: _time_ns() + int(_by * 1e9)


class _Meta(type(_real)):
    def __instancecheck__(cls, value):
        return isinstance(value, _real)


class _Shifted(_real, metaclass=_Meta):
    @classmethod
    def now(cls, tz=None):
        return _real.now(tz) + datetime.timedelta(seconds=_by)

    @classmethod
    def utcnow(cls):
        return _real.utcnow() + datetime.timedelta(seconds=_by)


datetime.datetime = _Shifted
"""
HOURS = 3600.0


def wrong_by(seconds: float, folder: Path) -> dict[str, str]:
    """The environment of a Python process whose clock of the day is wrong; what it starts in another way is not."""
    place = folder / "wrong"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(SHIFT)
    path = os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "WRONG_BY": str(seconds)}


def test_wrong_clocks_start_nothing_early_and_take_nothing_from_the_living(
    engine: Engine, database_url: str, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """One worker is three hours ahead, one three hours behind: due tasks start when they are due, all runs are first ones."""
    with Fleet(tmp_path, heartbeat=1, lease=4) as fleet:
        ahead = fleet.worker(database_url, "ahead", "--concurrency", "6", env=wrong_by(3 * HOURS, tmp_path))
        behind = fleet.worker(database_url, "behind", "--concurrency", "6", env=wrong_by(-3 * HOURS, tmp_path))
        clocks = "SELECT name, round(clock_ahead / 3600) FROM workers WHERE clock_ahead IS NOT NULL ORDER BY name"
        wait_until(lambda: query(engine, clocks) == [("ahead", 3), ("behind", -3)], 60)
        fleet.open("now")
        fleet.add(database_url, *["long"] * 2)
        fleet.add(database_url, *["now"] * 8)
        later = fleet.add(database_url, *["now"] * 10)
        query(
            engine,
            "UPDATE tasks SET available_at = clock_timestamp() + interval '5 s', due = false"
            " WHERE id = ANY(:later) AND status = 'pending'",
            later=later,
        )
        moved = query(engine, "SELECT id, available_at FROM tasks WHERE NOT due")
        wait_until(lambda: statuses(engine) == {"running": 2, "done": 18}, 60)
        first = fleet.read(what="begin")[0].at
        wait_until(lambda: fleet.read()[-1].at > first + 9)  # for two leases and more
        fleet.open("long")
        wait_until(lambda: statuses(engine) == {"done": 20}, 60)
        assert ahead.process.poll() is behind.process.poll() is None
        assert "Traceback" not in ahead.log.read_text() + behind.log.read_text()
    assert query(engine, "SELECT attempt, status, count(*) FROM runs GROUP BY 1, 2") == [(1, "done", 20)]
    assert query(engine, "SELECT count(*) FROM workers WHERE dead_at IS NOT NULL") == [(0,)]
    started = dict(query(engine, "SELECT task_id, started_at FROM runs"))
    assert len(moved) > 0
    assert [id_ for id_, due in moved if started[id_] < due] == []
    # The database's time of start and end, and seconds by a clock that only runs forward: none is off by hours.
    odd = "finished_at < started_at OR finished_at - started_at > interval '2 min' OR recorded_at - finished_at NOT BETWEEN"
    assert query(engine, f"SELECT id FROM runs WHERE {odd} interval '-1 s' AND interval '1 min'") == []


@pytest.mark.parametrize("hours", [3, -3])
def test_who_is_cut_off_with_a_wrong_clock_has_killed_its_agents_in_time(
    engine: Engine, database_url: str, tmp_path: Path, wait_until: WaitUntil, hours: int
) -> None:
    """Its lease is measured by a clock that nobody sets: what its agent wrote ends before the next attempt begins."""
    with Fleet(tmp_path, heartbeat=1, lease=8) as fleet, TcpProxy(database_url) as proxy:
        away = fleet.worker(proxy.url, "away", env=wrong_by(hours * HOURS, tmp_path))
        (task,) = fleet.add(database_url, "gate", deaf=True)
        wait_until(lambda: fleet.read(task, what="begin"), 60)
        fleet.worker(database_url, "near", env=wrong_by(-hours * HOURS, tmp_path))
        wait_until(lambda: query(engine, "SELECT 1 FROM workers WHERE name = 'near'"), 60)
        proxy.freeze()
        wait_until(lambda: fleet.read(task, attempt=2), 60)
        fleet.open("gate")
        wait_until(lambda: statuses(engine) == {"done": 1}, 60)
        proxy.thaw()
        wait_until(
            lambda: query(engine, "SELECT late ->> 'status' FROM runs WHERE attempt = 1") == [("interrupted",)], 60
        )
        first, second = fleet.read(task, 1), fleet.read(task, 2)
        assert first[-1].at < second[0].at
        assert away.process.poll() is None
    assert query(engine, "SELECT attempt, status FROM runs ORDER BY attempt") == [(1, "lost"), (2, "done")]
