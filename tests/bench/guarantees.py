"""What each guarantee costs: the same claims and records with one of them taken out, in a database of their own.

The statements are rewritten on their way to the server, by this module alone: the product has no switch for it. CPU of
the server and WAL a task are compared, which other load on the machine changes little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import event

from orchestrator import Orchestrator
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.liveness import identity
from orchestrator.repositories.claims import Known
from orchestrator.repositories.runs import Ended
from tests.bench.figures import Figure
from tests.bench.rows import Bench

BATCH = 100

_CONFLICT = " ON CONFLICT (task_id, attempt) DO NOTHING"
_CHECKS = """
DO $$ DECLARE one record; BEGIN
    FOR one IN SELECT conrelid::regclass AS at, conname FROM pg_constraint WHERE contype = 'c'
        AND conrelid IN ('tasks'::regclass, 'runs'::regclass)
    LOOP EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', one.at, one.conname); END LOOP;
END $$
"""


@dataclass(frozen=True)
class Without:
    """A guarantee that is taken out: by a change of the schema, or of every statement that has *old*."""

    name: str
    schema: str | None = None
    old: str | None = None
    new: str = ""


VARIANTS = (
    Without("everything on"),
    Without("without the lock of the worker's row in the claim", old=" FOR KEY SHARE"),
    Without(
        "without the fence of attempt and worker",
        old='tasks.attempt = "new".attempt AND tasks.claimed_by = "new".worker_id AND ',
    ),
    Without("without the runs row", old=_CONFLICT, new=" WHERE false" + _CONFLICT),
    Without("without the foreign key of runs", schema="ALTER TABLE runs DROP CONSTRAINT runs_task_id_fkey"),
    Without(
        "without one run an attempt (unique key)",
        schema="ALTER TABLE runs DROP CONSTRAINT runs_task_id_attempt_key",
        old=_CONFLICT,
    ),
    Without("without the checks of tasks and runs", schema=_CHECKS),
    Without("without durable commits", schema="ALTER DATABASE bench SET synchronous_commit = off"),
)


def guarantees(bench: Bench) -> list[Figure]:
    """What the server spends on a task with every guarantee, and with one of them taken out; batches of 100."""
    on = VARIANTS[0].name
    cpu = {each: Figure(f"{each.name}: CPU of the server", "µs/task", against=on) for each in VARIANTS}
    wal = {each: Figure(f"{each.name}: WAL", "bytes/task", against=on) for each in VARIANTS}
    number = bench.size(10_000, 300)
    for _ in bench.each_run():
        all_cpu = all_wal = 1.0
        for each in VARIANTS:
            spent, written = _spent(bench, each, number)
            if each.name == on:
                all_cpu, all_wal = spent, written
            cpu[each].add(spent, all_cpu)
            wal[each].add(written, all_wal)
    return [figure for each in VARIANTS for figure in (cpu[each], wal[each])]


def _spent(bench: Bench, without: Without, number: int) -> tuple[float, float]:
    """Microseconds of the server's CPU and bytes of WAL for each task that is claimed and recorded."""
    ground, url = bench.ground, bench.pending(number)
    if without.schema is not None:
        ground.run(url, without.schema)
    with Orchestrator(url) as orc:
        changed = _rewrite(orc, without)
        me = orc.register(identity(), name="bench", slots=1, agents=["noop"])
        known, done = [Known("noop")], Outcome(OutcomeClass.DONE)

        def work() -> int:
            claims = orc.claim(me, known, BATCH, keyed=False).claims
            if claims:
                orc.record([Ended(claim, done, "bench", "host") for claim in claims])
            return len(claims)

        warm = work()  # connects and prepares
        ground.run(url, "CHECKPOINT")
        position = ground.one(url, "SELECT pg_current_wal_insert_lsn()::text")
        used = ground.server_cpu()
        count = 0
        while took := work():
            count += took
        used = ground.server_cpu() - used
    if without.old is not None and not changed():
        raise RuntimeError(f"{without.name}: no statement has {without.old!r} any more")
    bench_count = ground.one(url, "SELECT count(*) FROM tasks WHERE status = 'done'")
    if bench_count != number or count + warm != number:
        raise RuntimeError(f"{without.name}: {bench_count} of {number} tasks are done")
    written = ground.one(url, "SELECT pg_current_wal_insert_lsn() - %s::pg_lsn", position)
    return used / count * 1e6, float(written) / count


def _rewrite(orc: Orchestrator, without: Without) -> Callable[[], bool]:
    """Have the statements of *orc* rewritten; return a function that says whether any was."""
    found = False

    def rewrite(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> tuple[str, Any]:
        nonlocal found
        if without.old is not None and without.old in statement:
            found = True
            statement = statement.replace(without.old, without.new)
        return statement, parameters

    event.listen(orc._engine, "before_cursor_execute", rewrite, retval=True)
    return lambda: found
