"""``doctor``: each check on a database or host that is well, and on one that is not."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine

from orchestrator.agents.readiness import obstacles
from orchestrator.dashboard import doctor
from orchestrator.dashboard.frame import Look
from orchestrator.dashboard.text import cells
from orchestrator.database import schema
from orchestrator.database.engine import connection_parameters, make_engine
from orchestrator.domain import histogram
from orchestrator.domain.diagnosis import Check, DatabaseFacts, QueueFacts, SessionFacts
from orchestrator.domain.snapshot import LockHold
from orchestrator.plans.agents import agent_definition
from orchestrator.repositories import health
from orchestrator.repositories.health import HealthRepository
from orchestrator.repositories.minutes import MinuteCounts, MinuteRepository
from tests.commands import Cli
from tests.making import Making, new_worker
from tests.servers import PgBouncer

WELL = DatabaseFacts(
    version_number=170002,
    version="17.2",
    encoding="UTF8",
    read_only=False,
    clock_ahead=0.01,
    clock_error=0.01,
    settings={"default_transaction_isolation": "read committed", "fsync": "on", "statement_timeout": "0"},
    connections=10,
    max_connections=97,
    sees_all=True,
    old_transactions=(),
    idle_in_transaction=(),
    prepared=(),
    slots=(),
    autovacuum_off=(),
    pooled=False,
    heard=True,
)
QUEUE = QueueFacts((), (), (), (), LockHold(), (), ())


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {each.check: each for each in checks}


@pytest.fixture
def sick(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A session beside ours whose changes are undone at the end."""
    with psycopg.connect(**connection_parameters(database_url, application_name="orchestrator test")) as connection:
        yield connection
        connection.rollback()


# -- the rules ----------------------------------------------------------------------------------------------------


def test_a_database_that_is_well_has_no_remedy() -> None:
    """Every check is ok, and none has a remedy."""
    found = [*doctor.database_checks(WELL, None), *doctor.queue_checks(QUEUE, "1.0")]
    assert {each.state for each in found} == {"ok"}
    assert not [each for each in found if each.remedy]


@pytest.mark.parametrize(
    ("changed", "check", "state", "text", "remedy"),
    [
        ({"version_number": 130010, "version": "13.10"}, "version", "error", "13.10", "14 to 18"),
        ({"version_number": 190001, "version": "19.1"}, "version", "warning", "newer", "upgrade"),
        ({"encoding": "SQL_ASCII"}, "encoding", "error", "SQL_ASCII", "createdb --encoding UTF8"),
        ({"read_only": True}, "writable", "error", "standby", "target_session_attrs=read-write"),
        ({"clock_ahead": -7.5}, "clock", "warning", "7.5s behind", "time service"),
        ({"connections": 95}, "connections", "warning", "95 of 97", "max_connections"),
        (
            {"settings": {"default_transaction_isolation": "serializable"}},
            "server_settings",
            "error",
            "serializable",
            "read committed",
        ),
        ({"settings": {"statement_timeout": "500"}}, "server_settings", "error", "500 ms", "statement_timeout = 0"),
        ({"settings": {"idle_session_timeout": "5000"}}, "server_settings", "warning", "5000 ms", "= 0"),
        (
            {"settings": {"fsync": "off", "synchronous_commit": "off"}},
            "server_settings",
            "warning",
            "fsync",
            "fsync = on",
        ),
        ({"autovacuum_off": ("all",)}, "autovacuum", "warning", "off", "autovacuum = on"),
        ({"autovacuum_off": ("tasks",)}, "autovacuum", "warning", "tasks", "ALTER TABLE tasks RESET"),
        (
            {"old_transactions": (SessionFacts("psql of ann", 4000.0, 77),)},
            "horizon",
            "warning",
            "psql of ann for 1h06m",
            "pg_terminate_backend(77)",
        ),
        ({"prepared": (SessionFacts("it's", 4000.0),)}, "horizon", "warning", "prepared", "ROLLBACK PREPARED 'it''s'"),
        (
            {"slots": (SessionFacts("old", bytes=5 << 30),)},
            "horizon",
            "warning",
            "5.0 GB of WAL",
            "pg_drop_replication_slot('old')",
        ),
        (
            {"idle_in_transaction": (SessionFacts("orchestrator of ann", 60.0, 78),)},
            "transactions",
            "error",
            "idle in a transaction",
            "pg_terminate_backend(78)",
        ),
        ({"pooled": True, "heard": False}, "pooler", "warning", "polling alone", 'pooler = "transaction"'),
        ({"heard": False}, "pooler", "warning", "did not arrive", "between here and the server"),
    ],
)
def test_what_is_wrong_with_a_database_has_its_remedy(
    changed: Mapping[str, Any], check: str, state: str, text: str, remedy: str
) -> None:
    """One thing wrong makes one check fail, with its numbers and what to do; the others stay well."""
    found = by_name(doctor.database_checks(replace(WELL, **changed), None))
    bad = found.pop(check)
    assert bad.state == state
    assert text in bad.text
    assert remedy in (bad.remedy or "")
    assert {each.state for each in found.values()} == {"ok"}


def test_the_setting_of_the_pooler_has_to_fit() -> None:
    """A transaction-mode pooler is fine when it is set, and the setting is a warning without a pooler."""
    pooled = replace(WELL, pooled=True, heard=False)
    assert by_name(doctor.database_checks(pooled, "transaction"))["pooler"].state == "ok"
    assert by_name(doctor.database_checks(replace(pooled, heard=True), None))["pooler"].state == "ok"
    assert by_name(doctor.database_checks(WELL, "transaction"))["pooler"].state == "warning"


@pytest.mark.parametrize(
    ("have", "compatible", "state"),
    [("0001", True, "ok"), ("0002", True, "ok"), ("0002", False, "error"), (None, False, "error")],
)
def test_the_schema(have: str | None, compatible: bool, state: str) -> None:
    """At head or one compatible step newer is fine; nothing, or another one, is an error with the command."""
    found = doctor.schema_check(have, "0001", compatible)
    assert found.state == state
    assert ("orchestrator db upgrade" in (found.remedy or "")) is (state == "error")


def test_settings_that_contradict_each_other() -> None:
    """Values that are allowed each and do harm together are warnings that say what to set."""
    fine = {"lease": 40.0, "sweep": 5.0, "heartbeat": 10.0, "grace": 20.0}
    assert doctor.settings_check(fine).state == "ok"
    for changed in ({"sweep": 60.0}, {"heartbeat": 18.0}, {"grace": 7200.0}):
        found = doctor.settings_check(fine | changed)
        assert found.state == "warning"
        assert found.remedy


def test_a_disk_that_is_nearly_full() -> None:
    """Below a gigabyte is a warning, below a tenth of it an error."""
    states = [doctor.disk_check("/x", free).state for free in (5 << 30, 1 << 29, 1 << 20)]
    assert states == ["ok", "warning", "error"]


@pytest.mark.parametrize("width", [20, 80, 1_000_000])
def test_the_screen_says_the_remedy_below_the_fault(width: int) -> None:
    """Every fault has its remedy on the next line; lines are as wide as the screen at most; the sums come last."""
    checks = [Check("a", "ok", "fine"), Check("b", "error", "bad " * 30, "do this"), Check("c", "warning", "odd")]
    lines = [line.text for line in doctor.render_doctor(checks, Look(width))]
    assert max(map(cells, lines)) <= width
    assert "  remedy: do this" in lines
    assert " ".join(lines).endswith("1 error, 1 warning in 3 checks")


# -- agents -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"command": ["no-such-program-here"]}, "no-such-program-here was not found"),
        ({"command": ["./missing"]}, "./missing was not found"),
        ({"command": ["cat"], "dir": "nowhere"}, "nowhere does not exist"),
        ({"command": ["cat"], "env": {"set": {"PATH": "/nowhere"}}}, "cat was not found"),
        ({"command": ["cat"], "env": {"secret": ["NO_SUCH_SECRET_SET"]}}, "NO_SUCH_SECRET_SET is not set"),
        ({"python": "no_such_module_here:work"}, "no_such_module_here was not found"),
    ],
)
def test_an_agent_that_could_not_start(tmp_path: Path, given: dict[str, Any], text: str) -> None:
    """A missing program, directory, module or secret is found without starting anything."""
    definition = agent_definition("a", given, base_dir=str(tmp_path))
    ((fault, remedy),) = obstacles(definition, {"PATH": "/usr/bin:/bin"})
    assert text in fault
    assert remedy


@pytest.mark.parametrize(
    "given", [{"command": ["cat"]}, {"command": "exit 1", "shell": True}, {"python": "json:dumps"}, {"python": "own:f"}]
)
def test_an_agent_that_could_start(tmp_path: Path, given: dict[str, Any]) -> None:
    """Programs on the PATH, the shell, installed modules and those beside the configuration are there."""
    (tmp_path / "own.py").write_text("raise SystemExit('imported')")
    assert obstacles(agent_definition("a", given, base_dir=str(tmp_path)), {"PATH": "/usr/bin:/bin"}) == []


# -- a real database ----------------------------------------------------------------------------------------------


def test_the_test_database_is_well(engine: Engine, database_url: str) -> None:
    """What is read of a migrated database is well in every check but the durability that tests do without."""
    repository = HealthRepository(engine, database_url)
    found = by_name(
        [*doctor.database_checks(repository.database(), None), *doctor.queue_checks(repository.queue(), "x")]
    )
    assert {name: each for name, each in found.items() if each.state != "ok" and name != "server_settings"} == {}
    assert repository.database().heard


def test_a_schema_that_was_changed_by_hand(empty_database: str) -> None:
    """A dropped index, a dropped and a foreign column, another type: each is named as drift, the index as missing."""
    schema.upgrade(empty_database)
    own = make_engine(empty_database, pool_size=1)
    try:
        with own.begin() as connection:
            for change in (
                "DROP INDEX tasks_held",
                "ALTER TABLE tasks ADD COLUMN extra text",
                "ALTER TABLE audit DROP COLUMN subject",
                "ALTER TABLE tasks ALTER COLUMN plan_order TYPE bigint",
            ):
                connection.exec_driver_sql(change)
        facts = HealthRepository(own, empty_database).queue()
    finally:
        own.dispose()
    checks = by_name(doctor.queue_checks(facts, "x"))
    assert checks["drift"].state == checks["indexes"].state == "error"
    for text in ("index tasks_held is missing", "column tasks.extra is not ours", "column audit.subject is missing"):
        assert text in facts.drift
    assert any("column tasks.plan_order: type is BIGINT" in each for each in facts.drift)
    assert (facts.missing_indexes, facts.invalid_indexes) == (("tasks_held",), ())


def test_an_index_that_was_not_finished(engine: Engine, database_url: str) -> None:
    """What a failed CREATE INDEX CONCURRENTLY leaves behind is named, with the command that makes it anew."""
    made = Making.on(engine)
    made.query("INSERT INTO audit (actor, action) VALUES ('x', 'x'), ('x', 'x')")
    with psycopg.connect(**connection_parameters(database_url), autocommit=True) as connection:
        try:
            with pytest.raises(psycopg.errors.UniqueViolation):
                connection.execute("CREATE UNIQUE INDEX CONCURRENTLY audit_half ON audit (actor)")
            facts = HealthRepository(engine, database_url).queue()
        finally:
            connection.execute("DROP INDEX audit_half")
    assert facts.invalid_indexes == ("audit_half",)
    remedy = by_name(doctor.queue_checks(facts, "x"))["indexes"].remedy
    assert remedy == "REINDEX INDEX CONCURRENTLY audit_half"


def test_old_and_idle_transactions_are_found(
    engine: Engine, database_url: str, sick: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction that has written and waits pins the horizon, and as one of ours it is an error."""
    monkeypatch.setattr(health, "OLD", 0.0)
    monkeypatch.setattr(health, "IDLE", 0.0)
    sick.execute("INSERT INTO audit (actor, action) VALUES ('x', 'x')")
    facts = HealthRepository(engine, database_url).database()
    pid = sick.info.backend_pid
    assert pid in [each.pid for each in facts.old_transactions]
    assert pid in [each.pid for each in facts.idle_in_transaction]
    sick.rollback()
    assert pid not in [each.pid for each in HealthRepository(engine, database_url).database().old_transactions]


def test_autovacuum_that_is_off_for_a_table(engine: Engine, database_url: str) -> None:
    """A storage setting of one table is found."""
    made = Making.on(engine)
    made.query("ALTER TABLE audit SET (autovacuum_enabled = false)")
    try:
        facts = HealthRepository(engine, database_url).database()
    finally:
        made.query("ALTER TABLE audit RESET (autovacuum_enabled)")
    assert facts.autovacuum_off == ("audit",)


def test_silent_workers_other_versions_and_slow_claims(engine: Engine, database_url: str) -> None:
    """Workers and lock holds of the last hour are judged by their numbers."""
    worker = new_worker(engine, "slow")
    made = Making.on(engine)
    holds = [0] * histogram.BUCKETS
    holds[histogram.bucket(80.0)] = 10
    MinuteRepository(engine).add(worker, [MinuteCounts("", claims=10, hold_ms=800.0, holds=holds)])
    made.query("UPDATE workers SET renewed_at = now() - interval '30 seconds', version = '0.0.1' WHERE name = 'slow'")
    checks = by_name(doctor.queue_checks(HealthRepository(engine, database_url).queue(), "1.0"))
    assert {name for name, each in checks.items() if each.state == "warning"} == {"lock_hold", "workers", "versions"}
    assert "1 worker silent: slow" in checks["workers"].text
    assert "0.0.1" in checks["versions"].text


@pytest.mark.real
def test_a_transaction_mode_pooler_is_seen(server_url: str, engine: Engine) -> None:
    """Behind PgBouncer in transaction mode the sessions are not the server's own, and nothing is heard."""
    with PgBouncer(server_url) as bouncer:
        alone = make_engine(bouncer.url, pool_size=1)
        try:
            facts = HealthRepository(alone, bouncer.url).database()
        finally:
            alone.dispose()
    assert (facts.pooled, facts.heard) == (True, False)


# -- the command --------------------------------------------------------------------------------------------------


def test_the_command(cli: Cli) -> None:
    """Warnings are exit code 0, an error is 1; people and machines get the same checks."""
    document = cli("doctor", "--json").json
    names = [each["check"] for each in document["checks"]]
    assert names[:6] == ["settings", "agents", "hooks", "disk", "embedded", "database"]
    assert {"version", "schema", "drift", "indexes", "pooler", "workers"} <= set(names)
    assert all(each.keys() == {"check", "state", "text", "remedy"} for each in document["checks"])
    cli.config("[agents.coder]\ncommand = ['no-such-program-here']\n")
    said = cli("doctor", code=1)
    assert "agents           coder: its command no-such-program-here was not found" in said.out
    assert "remedy: coder: install it" in said.out


def test_the_command_without_a_database(
    cli: Cli, empty_database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unreachable, without tables, not UTF-8 or not started: a check says so, and the others are made."""
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", "postgresql://nobody:secret@127.0.0.1:1/none")
    said = cli("doctor", "--json", code=1)
    checks = {each["check"]: each for each in said.json["checks"]}
    assert checks["database"]["state"] == "error"
    assert checks["agents"]["state"] == "ok"
    assert "secret" not in said.out
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", empty_database)
    checks = {each["check"]: each for each in cli("doctor", "--json", code=1).json["checks"]}
    assert (checks["schema"]["state"], checks["schema"]["remedy"]) == ("error", "orchestrator db upgrade")
    assert "drift" not in checks
    monkeypatch.delenv("ORCHESTRATOR_DATABASE_URL")
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "none"))
    checks = {each["check"]: each for each in cli("doctor", "--json").json["checks"]}
    assert (checks["embedded"]["state"], checks["embedded"]["remedy"]) == ("warning", "orchestrator db start")
    assert not (tmp_path / "none").exists()
    cli.config("heartbeat = 100\n")
    assert cli("doctor", "--json", code=1).json["checks"][0]["check"] == "settings"


def test_nothing_is_left_in_the_database(cli: Cli, engine: Engine) -> None:
    """The doctor changes nothing and leaves no session behind."""
    with contextlib.closing(psycopg.connect(**connection_parameters(cli.url, application_name="t"))) as connection:
        before = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        ).fetchone()
    cli("doctor")
    made = Making(engine, new_worker(engine))
    (after,) = made.query(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    assert before is not None
    assert after[0] <= before[0] + 1


def test_hooks_that_could_not_tell(cli: Cli, engine: Engine) -> None:
    """A variable that is not set and a program that is not there are named; so is what a hook did not hear, and why."""
    cli.config(
        '[alerts.hooks.pager]\nurl = "https://pager.invalid/s3cret"\nsecret_env = "NO_SUCH_KEY"\n'
        '[alerts.hooks.mail]\ncommand = ["no-such-mailer"]\n'
    )
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO alerts (kind, key, subject, name, what) VALUES ('no_worker', 'k', 'agent', 'a', 'x')"
        )
        connection.exec_driver_sql(
            "INSERT INTO alert_deliveries (alert_id, hook, failures, error)"
            " SELECT id, 'pager', 2, 'answered with status 500' FROM alerts"
        )
    found = {each["check"]: each for each in cli("doctor", "--json").json["checks"]}
    assert found["hooks"]["text"] == (
        "pager: NO_SUCH_KEY is not set here; mail: its command no-such-mailer was not found"
    )
    assert found["hooks"]["state"] == found["deliveries"]["state"] == "warning"
    assert found["deliveries"]["text"] == "pager: 1 not heard yet (answered with status 500)"
    assert "s3cret" not in str(found)
    cli.config("[alerts.hooks.pager]\n")
    wrong = {each["check"]: each for each in cli("doctor", "--json", code=1).json["checks"]}
    assert wrong["hooks"]["state"] == "error"


def test_an_index_that_has_grown_too_large(engine: Engine, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that are gone leave their pages behind; remaking the index heals it, as the remedy says."""
    monkeypatch.setattr(health, "BLOAT_BYTES", 64 << 10)
    made = Making.on(engine)
    made.query("INSERT INTO tasks (agent) SELECT 'coder' FROM generate_series(1, 8000)")
    made.query("DELETE FROM tasks")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM (ANALYZE) tasks")
        found = HealthRepository(engine, database_url).queue()
        assert {"tasks_ready", "tasks_pkey"} <= {name for name, _, _ in found.bloated}
        check = by_name(doctor.queue_checks(found, "1"))["indexes"]
        assert (check.state, "REINDEX INDEX CONCURRENTLY tasks_" in str(check.remedy)) == ("warning", True)
        assert re.search(r"tasks_\w+ takes [\d.]+ [KM]B and needs about ", check.text)
        connection.exec_driver_sql("REINDEX TABLE tasks")
    assert HealthRepository(engine, database_url).queue().bloated == ()


def test_clocks_and_ears_of_workers(engine: Engine, database_url: str) -> None:
    """A worker whose clock is not the database's is named with its host and how much; so is one that hears nothing."""
    new_worker(engine, "early")
    new_worker(engine, "late")
    made = Making.on(engine)
    made.query("UPDATE workers SET clock_ahead = CASE name WHEN 'early' THEN 75 WHEN 'late' THEN -3 ELSE 0.5 END")
    made.query("UPDATE workers SET deaf_since = clock_timestamp() WHERE name = 'late'")
    checks = by_name(doctor.queue_checks(HealthRepository(engine, database_url).queue(), "1"))
    clocks = checks["worker_clocks"]
    assert clocks.state == "warning"
    assert "early on host is 1m15s ahead" in clocks.text
    assert "late on host is 3.0s behind" in clocks.text
    assert "1 worker without a connection that hears of new tasks: late" in checks["workers"].text
