"""Alert rules: where each begins, what it says, and the thresholds of ``[alerts]``. Those that need rows: test_reading."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from orchestrator.domain.alerts import DEFAULTS, ORDER, Thresholds, alerts
from orchestrator.domain.snapshot import AgentRow, Count, LockHold, RunningTask, Unserved, WorkerRow
from orchestrator.errors import InvalidInput
from orchestrator.repositories.reading import ReadingRepository
from orchestrator.repositories.tasks import Known
from orchestrator.repositories.workers import WorkerRepository
from orchestrator.service import Orchestrator
from orchestrator.settings import Settings
from tests.commands import Cli
from tests.making import Making, new_worker

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def waiting(since: float, **columns: Any) -> AgentRow:
    return AgentRow("coder", ready=Count(3), oldest_ready_at=ago(since), live_workers=1, **columns)


RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # kind: what is still well, what is not any more
    "will_not_stop": (
        {"running": [RunningTask(1, "coder", ago(500), cancel_requested_at=ago(61))]},
        {"running": [RunningTask(1, "coder", ago(500), cancel_requested_at=ago(63))]},
    ),
    "no_worker": (
        {"agents": [AgentRow("coder", "paused", unserved=(Unserved(Count(3)),))]},
        {"agents": [AgentRow("coder", unserved=(Unserved(Count(3)),))]},
    ),
    "worker_dead": ({"workers": [WorkerRow("1", "w")]}, {"workers": [WorkerRow("1", "w", state="dead")]}),
    "worker_silent": (
        {"workers": [WorkerRow("1", "w", state="draining", renewed_at=ago(19))]},
        {"workers": [WorkerRow("1", "w", state="silent", renewed_at=ago(21))]},
    ),
    "queue_not_draining": ({"agents": [waiting(3599)]}, {"agents": [waiting(3601)]}),
    "failures_spike": (
        {"agents": [AgentRow("coder", failed_hour=10, attempts_hour=20)]},
        {"agents": [AgentRow("coder", failed_hour=11, attempts_hour=21)]},
    ),
    "long_transaction": ({"oldest_transaction": 3599.0}, {"oldest_transaction": 3601.0}),
    "lock_hold": (
        {"hold": LockHold(1, 1, 50.0, 100)},
        {"hold": LockHold(1, 1, 51.0, 100)},
    ),
    "listener_down": (
        {"workers": [WorkerRow("1", "w", deaf_since=ago(59))]},
        {"workers": [WorkerRow("1", "w", deaf_since=ago(61))]},
    ),
    "transcript_disk": ({"transcript_bytes": 20 << 30}, {"transcript_bytes": (20 << 30) + 1}),
    "oldest_wait": (
        {"agents": [waiting(4 * 3600 - 1, attempts_hour=1)]},
        {"agents": [waiting(4 * 3600 + 1, attempts_hour=1)]},
    ),
}


def kinds(given: dict[str, Any], thresholds: Thresholds = DEFAULTS) -> list[str]:
    return [
        each.kind
        for each in alerts(NOW, **{"workers": [], "agents": [], "running": [], **given}, thresholds=thresholds)
    ]


@pytest.mark.parametrize("kind", RULES)
def test_where_each_rule_begins(kind: str) -> None:
    """Up to its default threshold nothing is said; beyond it this one alert, unless its kind is off."""
    well, ill = RULES[kind]
    assert kinds(well) == []
    assert kinds(ill) == [kind]
    assert kinds(ill, Thresholds(off=frozenset({kind}))) == []


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("will_not_stop", {"stopping": 62}),
        ("queue_not_draining", {"not_draining": 3602}),
        ("failures_spike", {"failed_share": 0.6}),
        ("failures_spike", {"failed_least": 12}),
        ("long_transaction", {"old_transaction": 3602}),
        ("lock_hold", {"hold_ms": 51}),
        ("lock_hold", {"hold_claims": 101}),
        ("listener_down", {"listener_down": 62}),
        ("transcript_disk", {"transcript_bytes": 30 << 30}),
        ("oldest_wait", {"oldest_wait": 14_402}),
    ],
    ids=lambda each: each if isinstance(each, str) else next(iter(each)),
)
def test_each_threshold_can_be_moved(kind: str, given: dict[str, Any]) -> None:
    """What ``[alerts]`` says is where the rule begins."""
    assert kinds(RULES[kind][1], Thresholds.read(given)) == []


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"oldest_wiat": 1}, "'alerts.oldest_wiat'; did you mean 'oldest_wait'"),
        ({"oldest_wait": "4h"}, "alerts.oldest_wait: expected a number"),
        ({"oldest_wait": True}, "alerts.oldest_wait: expected a number"),
        ({"hold_ms": 0}, "alerts.hold_ms: expected a number, more than 0"),
        ({"hold_ms": float("nan")}, "alerts.hold_ms"),
        ({"hold_ms": 10**400}, "alerts.hold_ms"),
        ({"failed_share": 1.5}, "alerts.failed_share"),
        ({"off": "lock_hold"}, "alerts.off: expected a list of kinds"),
        ({"off": ["lock_held"]}, "there is no kind 'lock_held'; did you mean 'lock_hold'"),
    ],
    ids=lambda each: None if isinstance(each, dict) else each[:20],
)
def test_thresholds_that_cannot_be(table: dict[str, Any], words: str) -> None:
    """The key, what was expected and what was found."""
    with pytest.raises(InvalidInput) as refused:
        Thresholds.read(table)
    assert words.split("; ")[0] in refused.value.message


def test_the_worst_comes_first() -> None:
    """By the kinds' rank, whatever the order of reading."""
    given: dict[str, list[Any]] = {"running": [], "agents": [], "workers": []}
    for _, ill in RULES.values():
        for name, rows in ill.items():
            if name in given:
                given[name] += rows
    found = kinds(given)
    assert len(found) >= 8
    assert found == sorted(found, key=ORDER.index)


def test_commands_are_for_a_shell() -> None:
    """A name that is also syntax is quoted in what is to be copied."""
    (alert,) = alerts(NOW, [], [AgentRow("my agent; rm", unserved=(Unserved(Count(1)),))], [])
    assert (alert.command, alert.what) == (
        "orchestrator worker --agent 'my agent; rm'",
        "no live worker, 1 ready task waits",
    )


def test_an_agent_of_a_plan_file_needs_a_worker_with_that_file(engine: Engine) -> None:
    """A namesake from the configuration does not serve it, and the command names the plan, not the agent."""
    made, read = Making.on(engine), ReadingRepository(engine)
    local = Known("coder", "hash-of-plan")
    made.query(
        "INSERT INTO tasks (agent, definition, plan) SELECT 'coder', 'hash-of-plan', 'm3' FROM generate_series(1, 2)"
    )
    new_worker(engine, "other", ["coder"])
    (alert,) = read.alerts()
    assert (alert.kind, alert.name, alert.plan) == ("no_worker", "coder", "m3")
    assert alert.what == "no live worker has loaded plan m3, 2 ready tasks wait"
    assert alert.command == "orchestrator worker --plan FILE"
    made.query("INSERT INTO tasks (agent) VALUES ('other')")
    assert sorted(str(each.command) for each in read.alerts()) == [
        "orchestrator worker --agent other",
        "orchestrator worker --plan FILE",
    ]
    made.query("DELETE FROM tasks WHERE agent = 'other'")
    new_worker(engine, "right", [local.route])
    assert read.alerts() == []
    assert [worker["agents"] for worker in read.workers() if worker["name"] == "right"] == [["coder"]]


def test_what_a_renewal_tells_of_its_process(engine: Engine) -> None:
    """Since when it hears nothing stays until it hears again; its clock is compared with the database's."""
    workers, read = WorkerRepository(engine), ReadingRepository(engine, Thresholds(listener_down=1e-9))
    worker = new_worker(engine, "w")
    made = Making.on(engine)

    def told() -> Any:
        return made.query("SELECT deaf_since, clock_ahead FROM workers WHERE id = :id", id=worker)[0]

    assert told().deaf_since is None
    workers.renew(worker, deaf=True)
    first = told().deaf_since
    workers.renew(worker, deaf=True)
    assert told().deaf_since == first is not None
    assert [(each.kind, each.name) for each in read.alerts()] == [("listener_down", "w")]
    workers.renew(worker)
    assert told().deaf_since is None
    assert read.alerts() == []
    assert abs(told().clock_ahead) < 60


def test_thresholds_come_from_the_configuration(cli: Cli, engine: Engine) -> None:
    """``alerts`` goes by the file: exit code 1 with its alert, 0 without; a wrong key is exit code 2."""
    Making.on(engine).add("nobody")
    assert "nobody" in cli("alerts", code=1).out
    cli.config('[alerts]\noff = ["no_worker"]\n')
    assert "no alert" in cli("alerts").err
    assert cli("alerts", "--json").json == {"alerts": []}
    cli.config("[alerts]\nhold = 5\n")
    assert "unknown key 'alerts.hold'" in cli("alerts", code=2).err


def test_a_library_checks_them_at_once(database_url: str) -> None:
    """An application hears of a wrong threshold before it connects."""
    with pytest.raises(InvalidInput, match=r"alerts\.hold_ms"):
        Orchestrator(database_url, settings=Settings(alerts={"hold_ms": -1}))
