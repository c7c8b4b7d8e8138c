"""The checks of ``doctor``: rules over what was read, and their screen. Both are pure.

An ``error`` keeps tasks from being worked, or loses something; a ``warning`` will cost time or sleep. Each has its remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.dashboard import short
from orchestrator.dashboard.frame import Line, Look, plural, wrapped
from orchestrator.domain.diagnosis import Check, DatabaseFacts, QueueFacts, SessionFacts
from orchestrator.repositories.alerting import HookState

OLDEST, NEWEST = 14, 18
"""PostgreSQL major versions that this is tested with."""
CLOCK = 2.0
"""Seconds of skew that are worth a word."""
HOLD_MS = 50.0
FULL = 0.85
"""Share of the server's connections that is worth a word."""
DISK = 1 << 30
"""Bytes free below which the disk of ORCHESTRATOR_HOME is nearly full; a tenth of it is too full to go on."""
SHORT_IDLE_MS = 60_000

_SIGN = {"ok": "done", "warning": "alert", "error": "failed"}


def database_checks(facts: DatabaseFacts, pooler: str | None) -> Iterator[Check]:
    """The checks of any database. *pooler* is the setting."""
    major = facts.version_number // 10_000
    if major < OLDEST:
        yield Check("version", "error", f"PostgreSQL {facts.version}", f"use PostgreSQL {OLDEST} to {NEWEST}")
    elif major > NEWEST:
        text = f"PostgreSQL {facts.version} is newer than what this version is tested with"
        yield Check("version", "warning", text, "upgrade orchestrator")
    else:
        yield Check("version", "ok", f"PostgreSQL {facts.version}")
    if facts.encoding == "UTF8":
        yield Check("encoding", "ok", "UTF-8")
    else:
        remedy = "createdb --encoding UTF8 --template template0 NAME, and use that database"
        yield Check("encoding", "error", f"the database is {facts.encoding}, expected UTF-8", remedy)
    if facts.read_only:
        text = "the server is a standby, or default_transaction_read_only is on"
        yield Check("writable", "error", text, "name the primary: several hosts and target_session_attrs=read-write")
    else:
        yield Check("writable", "ok", "the server takes writes")
    yield _clock(facts)
    yield _connections(facts)
    yield _server_settings(facts)
    yield _autovacuum(facts)
    yield _horizon(facts)
    yield _idle(facts)
    yield _pooler(facts, pooler)


def _clock(facts: DatabaseFacts) -> Check:
    skew, error = facts.clock_ahead, facts.clock_error
    if abs(skew) - error > CLOCK:
        side = "ahead of" if skew > 0 else "behind"
        text = f"this host's clock is {short.duration(abs(skew))} {side} the database's"
        return Check("clock", "warning", text, "run a time service on both; leases go by the database's clock alone")
    return Check("clock", "ok", f"within {max(abs(skew), error):.2f} s of the database's")


def _connections(facts: DatabaseFacts) -> Check:
    text = f"{facts.connections:,} of {facts.max_connections:,} connections are in use"
    if facts.connections >= FULL * facts.max_connections:
        return Check("connections", "warning", text, "raise max_connections, or put a pooler before it (4 a worker)")
    return Check("connections", "ok", text)


def _server_settings(facts: DatabaseFacts) -> Check:
    given = facts.settings
    faults: list[tuple[str, str, str]] = []
    isolation = given.get("default_transaction_isolation", "read committed")
    if isolation != "read committed":
        remedy = "ALTER ROLE … SET default_transaction_isolation = 'read committed'"
        faults.append(
            ("error", f"default_transaction_isolation is {isolation}: claims would fail on each other", remedy)
        )
    timeout = int(given.get("statement_timeout", "0") or 0)
    if 0 < timeout < 5_000:
        remedy = "ALTER ROLE … SET statement_timeout = 0"
        faults.append(("error", f"statement_timeout is {timeout} ms: large records would never be written", remedy))
    idle = int(given.get("idle_session_timeout", "0") or 0)
    if 0 < idle < SHORT_IDLE_MS:
        text = f"idle_session_timeout is {idle} ms: connections are cut between two heartbeats"
        faults.append(("warning", text, "ALTER ROLE … SET idle_session_timeout = 0"))
    for name in ("fsync", "full_page_writes"):
        if given.get(name) == "off":
            text = f"{name} is off: a crash of the server can lose everything"
            faults.append(("warning", text, f"{name} = on in postgresql.conf"))
    if given.get("synchronous_commit") == "off":
        text = "synchronous_commit is off: a crash of the server forgets the last claims and records"
        faults.append(("warning", text, "ALTER ROLE … SET synchronous_commit = on"))
    return _joined("server_settings", faults, "read committed, durable, no short timeouts")


def _joined(check: str, faults: Sequence[tuple[str, str, str]], well: str) -> Check:
    """One check out of several faults: as bad as the worst of them."""
    if not faults:
        return Check(check, "ok", well)
    state = "error" if any(each[0] == "error" for each in faults) else "warning"
    remedies = list(dict.fromkeys(each[2] for each in faults))
    return Check(check, state, "; ".join(each[1] for each in faults), "; ".join(remedies))


def _autovacuum(facts: DatabaseFacts) -> Check:
    if facts.autovacuum_off == ("all",):
        text = "autovacuum or track_counts is off: dead rows slow every claim down"
        return Check("autovacuum", "warning", text, "autovacuum = on and track_counts = on in postgresql.conf")
    if facts.autovacuum_off:
        text = f"autovacuum is off for {', '.join(facts.autovacuum_off)}"
        remedy = "; ".join(f"ALTER TABLE {each} RESET (autovacuum_enabled)" for each in facts.autovacuum_off)
        return Check("autovacuum", "warning", text, remedy)
    return Check("autovacuum", "ok", "on for all tables")


def _named(sessions: Sequence[SessionFacts]) -> str:
    parts = []
    for each in sessions[:3]:
        pid = f"pid {each.pid} " if each.pid is not None else ""
        age = f" for {short.age(each.seconds)}" if each.seconds is not None else ""
        parts.append(f"{pid}({each.who}{age})")
    more = f" and {len(sessions) - 3:,} more" if len(sessions) > 3 else ""
    return ", ".join(parts) + more


def _horizon(facts: DatabaseFacts) -> Check:
    faults: list[tuple[str, str, str]] = []
    if facts.old_transactions:
        number = plural(len(facts.old_transactions), "old transaction")
        pid = facts.old_transactions[0].pid
        text = f"{number} keeps vacuum from removing dead rows: {_named(facts.old_transactions)}"
        faults.append(("warning", text, f"end it: SELECT pg_terminate_backend({pid})"))
    if facts.prepared:
        text = f"{plural(len(facts.prepared), 'prepared transaction')} left open: {_named(facts.prepared)}"
        gid = facts.prepared[0].who.replace("'", "''")
        faults.append(("warning", text, f"ROLLBACK PREPARED '{gid}'"))
    if facts.slots:
        size = sum(each.bytes or 0 for each in facts.slots)
        number = plural(len(facts.slots), "replication slot")
        text = f"{number} that nobody uses, keeping {short.size(size)} of WAL: {_named(facts.slots)}"
        name = facts.slots[0].who.replace("'", "''")
        faults.append(("warning", text, f"SELECT pg_drop_replication_slot('{name}')"))
    well = "no old transaction, prepared transaction or unused slot"
    return _joined("horizon", faults, well if facts.sees_all else f"{well}, as far as this user may see sessions")


def _idle(facts: DatabaseFacts) -> Check:
    if facts.idle_in_transaction:
        text = f"sessions of ours are idle in a transaction: {_named(facts.idle_in_transaction)}"
        remedy = (
            f"SELECT pg_terminate_backend({facts.idle_in_transaction[0].pid}), and report it: no unit of work waits"
        )
        return Check("transactions", "error", text, remedy)
    return Check("transactions", "ok", "no session of ours is idle in a transaction")


def _pooler(facts: DatabaseFacts, setting: str | None) -> Check:
    if facts.pooled and setting != "transaction" and not facts.heard:
        text = "a transaction-mode pooler is in the way: notifications do not arrive, work is found by polling alone"
        return Check("pooler", "warning", text, 'set pooler = "transaction", or connect past the pooler')
    if not facts.pooled and setting == "transaction":
        text = 'pooler = "transaction" is set, but the sessions are the server\'s own: hints and prepared statements are off'
        return Check("pooler", "warning", text, "leave pooler out of the settings")
    if not facts.pooled and not facts.heard:
        text = "a notification did not arrive within 2 s: work is found by polling alone"
        return Check("pooler", "warning", text, "look at what lies between here and the server, and at its load")
    if facts.pooled:
        how = "in transaction mode, as set" if setting == "transaction" else "in session mode: notifications arrive"
        return Check("pooler", "ok", f"a pooler {how}")
    return Check("pooler", "ok", "none in the way; notifications arrive")


# -- the queue ----------------------------------------------------------------------------------------------------


def schema_check(have: str | None, need: str, compatible: bool) -> Check:
    """The check of the revision."""
    if have == need:
        return Check("schema", "ok", f"at {have}")
    if compatible:
        return Check("schema", "ok", f"at {have}, one step newer than {need} and compatible")
    if have is None:
        return Check("schema", "error", f"the database has no tables of ours, needs {need}", "orchestrator db upgrade")
    remedy = "orchestrator db upgrade; if it does not know that revision, install the version that the others use"
    return Check("schema", "error", f"at {have}, needs {need}", remedy)


def queue_checks(facts: QueueFacts, version: str) -> Iterator[Check]:
    """The checks of our own tables and workers."""
    yield _drift(facts)
    faults: list[tuple[str, str, str]] = []
    if facts.missing_indexes:
        text = f"missing: {', '.join(facts.missing_indexes)}"
        faults.append(("error", text, "make it anew; orchestrator db sql has the statements"))
    if facts.invalid_indexes:
        remedy = "; ".join(f"REINDEX INDEX CONCURRENTLY {each}" for each in facts.invalid_indexes[:3])
        faults.append(("error", f"not valid: {', '.join(facts.invalid_indexes)}", remedy))
    for name, size, needed in facts.bloated[:5]:
        text = f"{name} takes {short.size(size)} and needs about {short.size(needed)}"
        faults.append(("warning", text, f"REINDEX INDEX CONCURRENTLY {name}"))
    yield _joined("indexes", faults, "all there, valid and no larger than they need be")
    dead = [
        ("warning", f"{table} has {gone:,} dead rows beside {live:,} live ones", f"VACUUM (ANALYZE) {table}")
        for table, gone, live in facts.dead_rows
    ]
    yield _joined("dead_rows", dead, "vacuum keeps up")
    yield _lock_hold(facts)
    yield _workers(facts)
    yield _worker_clocks(facts)
    others = [each for each in facts.worker_versions if each != version]
    if others:
        text = f"live workers of version {', '.join(others)}, this is {version}"
        yield Check("versions", "warning", text, "finish the deploy: drain the old workers, start new ones")
    else:
        yield Check(
            "versions", "ok", f"every live worker is {version}" if facts.worker_versions else f"this is {version}"
        )


def _drift(facts: QueueFacts) -> Check:
    if not facts.drift:
        return Check("drift", "ok", "the tables are as this version made them")
    shown = "; ".join(facts.drift[:5]) + (f"; and {len(facts.drift) - 5:,} more" if len(facts.drift) > 5 else "")
    return Check("drift", "error", shown, "undo the change by hand; orchestrator db sql shows what it should be")


def _lock_hold(facts: QueueFacts) -> Check:
    hold = facts.lock_hold
    if hold.p99 is None or hold.mean is None:
        return Check("lock_hold", "ok", "no claim in the last hour")
    text = f"p99 {hold.p99:.1f} ms, mean {hold.mean:.1f} ms of {plural(hold.count, 'claim')} in the last hour"
    if hold.p99 > HOLD_MS:
        remedy = f"it should stay below {HOLD_MS:g} ms: look at the server's disk and load, dead_rows and horizon here"
        return Check("lock_hold", "warning", text, remedy)
    return Check("lock_hold", "ok", text)


def _workers(facts: QueueFacts) -> Check:
    faults: list[tuple[str, str, str]] = []
    for state in ("silent", "dead"):
        found = [each for each in facts.workers if each.state == state]
        if found:
            named = ", ".join(each.name for each in found[:5]) + (" …" if len(found) > 5 else "")
            text = f"{plural(len(found), 'worker')} {state}: {named}"
            faults.append(("warning", text, "orchestrator watchdog --once takes their tasks back; see their hosts"))
    live = [each for each in facts.workers if each.state not in ("silent", "dead")]
    if deaf := [each.name for each in live if each.deaf_since is not None]:
        text = f"{plural(len(deaf), 'worker')} without a connection that hears of new tasks: {', '.join(deaf[:5])}"
        remedy = "they try again by themselves; see max_connections, pg_hba.conf and what lies between"
        faults.append(("warning", text, remedy))
    working = [each for each in live if each.slots]
    return _joined("workers", faults, f"{plural(len(working), 'worker')} alive" if working else "none is alive")


def _worker_clocks(facts: QueueFacts) -> Check:
    skewed = [each for each in facts.workers if each.clock_ahead is not None and abs(each.clock_ahead) > CLOCK]
    if not skewed:
        return Check("worker_clocks", "ok", f"those of all workers are within {CLOCK:g} s of the database's")
    told = [
        f"{each.name} on {each.host} is {short.duration(abs(each.clock_ahead or 0))}"
        f" {'ahead' if (each.clock_ahead or 0) > 0 else 'behind'}"
        for each in skewed[:5]
    ]
    more = f" and {len(skewed) - 5:,} more" if len(skewed) > 5 else ""
    remedy = (
        "run a time service on those hosts; the queue goes by the database's clock, their agents and logs by theirs"
    )
    return Check("worker_clocks", "warning", f"not the database's time: {', '.join(told)}{more}", remedy)


# -- this host ----------------------------------------------------------------------------------------------------


def settings_check(values: Mapping[str, Any]) -> Check:
    """The check of settings that are allowed each, and contradict each other."""
    faults: list[tuple[str, str, str]] = []
    lease, sweep, heartbeat, grace = (float(values[name]) for name in ("lease", "sweep", "heartbeat", "grace"))
    if sweep > lease:
        text = f"sweep of {sweep:g} s is longer than the lease of {lease:g} s: dead workers are found late"
        faults.append(("warning", text, f"set sweep to {lease / 8:g}"))
    if heartbeat > lease / 3:
        text = f"heartbeat of {heartbeat:g} s leaves room for one late renewal in a lease of {lease:g} s"
        faults.append(("warning", text, f"set heartbeat to {lease / 4:g}"))
    if grace > 3600:
        faults.append(
            ("warning", f"grace of {grace:g} s: a deploy waits that long", "set grace to what a deploy may take")
        )
    well = f"heartbeat {heartbeat:g} s, lease {lease:g} s, sweep {sweep:g} s"
    return _joined("settings", faults, well)


def agents_check(found: Mapping[str, Sequence[tuple[str, str]]]) -> Check:
    """The check of configured agents: by name what would stop each, with its remedy."""
    if not found:
        return Check("agents", "ok", "none is configured here")
    faults = [
        ("warning" if "secret" in text else "error", f"{name}: {text}", f"{name}: {remedy}")
        for name, obstacles in found.items()
        for text, remedy in obstacles
    ]
    return _joined("agents", faults, f"{plural(len(found), 'agent')} configured, each could start here")


def hooks_check(found: Mapping[str, Sequence[tuple[str, str]]]) -> Check:
    """The check of the hooks of alerts as they are configured: by name what would stop each here, with its remedy."""
    if not found:
        return Check("hooks", "ok", "none is configured: nobody is told of alerts")
    faults = [
        ("warning", f"{name}: {text}", f"{name}: {remedy}")
        for name, obstacles in found.items()
        for text, remedy in obstacles
    ]
    return _joined("hooks", faults, f"{plural(len(found), 'hook')} configured")


def deliveries_check(states: Sequence[HookState]) -> Check:
    """The check of what hooks have been told: whether it was heard."""
    faults: list[tuple[str, str, str]] = []
    for each in states:
        if not each.waiting and not each.gave_up:
            continue
        parts = [f"{each.waiting:,} not heard yet"] if each.waiting else []
        parts += [f"{each.gave_up:,} given up in the last 30 days"] if each.gave_up else []
        text = f"{each.hook}: {', '.join(parts)}" + (f" ({each.error})" if each.error else "")
        faults.append(("warning", text, f"see to what hook {each.hook} reaches; what waits is tried again by itself"))
    return _joined("deliveries", faults, "what hooks were told was heard")


def disk_check(folder: str, free: int) -> Check:
    """The check of the room for the embedded server and for kept outcomes."""
    text = f"{short.size(free)} free for {folder}"
    if free < DISK:
        state = "error" if free < DISK // 10 else "warning"
        return Check("disk", state, text, "make room, or set ORCHESTRATOR_HOME to another disk")
    return Check("disk", "ok", text)


# -- the screen ---------------------------------------------------------------------------------------------------


def render_doctor(checks: Sequence[Check], look: Look) -> list[Line]:
    """Return the screen of ``doctor``: a line for each check, and the remedy below what is not well."""
    lines: list[Line] = []
    for each in checks:
        name = f" {each.check}: " if look.tiny else f" {each.check:<16} "
        indent = 2 if look.tiny else len(name) + 1
        lines += wrapped(Line(look).symbol(_SIGN[each.state]).fill(name, look.width - 1), each.text, indent=indent)
        if each.remedy:
            lines += wrapped(Line(look).add("  remedy: ", "dim"), each.remedy, indent=4)
    states = [each.state for each in checks]
    bad, odd = states.count("error"), states.count("warning")
    text = f"{plural(bad, 'error')}, {plural(odd, 'warning')} in {plural(len(checks), 'check')}"
    lines += wrapped(Line(look), text)
    return lines


__all__ = [
    "agents_check",
    "database_checks",
    "deliveries_check",
    "disk_check",
    "hooks_check",
    "queue_checks",
    "render_doctor",
    "schema_check",
    "settings_check",
]
