"""What the same work costs without the product: no fence, no lease, no metrics, no retries; a schema of two tables.

The statements are committed as durably as ours. A product that reaches them pays nothing for its guarantees.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from typing import Any

import psycopg

from orchestrator.database.embedded import EmbeddedServer
from orchestrator.database.engine import connection_parameters
from tests.bench.ground import ROOT, Ground

TABLES = """
CREATE TABLE jobs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    agent text NOT NULL,
    status text NOT NULL DEFAULT 'pending',
    priority int NOT NULL DEFAULT 0,
    attempt int NOT NULL DEFAULT 0,
    input jsonb,
    added_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at timestamptz,
    finished_at timestamptz
);
CREATE INDEX jobs_pending ON jobs (agent, priority DESC, id) WHERE status = 'pending';
CREATE TABLE results (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job bigint NOT NULL REFERENCES jobs (id),
    attempt int NOT NULL,
    status text NOT NULL,
    result jsonb,
    recorded_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (job, attempt)
);
"""
FILL = "INSERT INTO jobs (agent, input) SELECT 'noop', jsonb_build_object('n', g) FROM generate_series(1, {n}) g"
CLAIM = """
WITH picked AS MATERIALIZED (
    SELECT id FROM jobs WHERE status = 'pending' AND agent = 'noop' ORDER BY priority DESC, id LIMIT {batch}
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE jobs SET status = 'running', attempt = attempt + 1, started_at = clock_timestamp()
WHERE id = ANY (ARRAY(SELECT id FROM picked)) RETURNING jobs.id, jobs.attempt, jobs.input
"""
RESULTS = "INSERT INTO results (job, attempt, status) SELECT id, 1, 'done' FROM unnest({ids}::bigint[]) AS ended (id)"
DONE = """
UPDATE jobs SET status = 'done', finished_at = clock_timestamp()
WHERE id = ANY ({ids}::bigint[]) AND status = 'running'
"""


def psycopg_loop(ground: Ground, jobs: int, batch: int = 50) -> float:
    """Jobs a second of one process that claims a batch and records it, again and again, on one connection."""
    url = ground.bare(TABLES + FILL.format(n=jobs))
    claim, results, done = CLAIM.format(batch=batch), RESULTS.format(ids="%s"), DONE.format(ids="%s")
    with ground.session(url) as session:
        session.prepare_threshold = 1
        count, began = 0, time.perf_counter()
        while taken := session.execute(claim).fetchall():
            ids = [row[0] for row in taken]
            with session.transaction():
                session.execute(results, [ids])
                session.execute(done, [ids])
            count += len(ids)
        return count / (time.perf_counter() - began)


def pgbench(ground: Ground, seconds: float, *, clients: int = 16, batch: int = 50) -> float:
    """Jobs a second that ``pgbench`` claims and records in batches: nothing but the server's own work."""
    url = ground.bare(TABLES + FILL.format(n=max(20_000, int(60_000 * seconds))))
    picked, _, change = " ".join(CLAIM.format(batch=batch).split()).partition(") UPDATE ")
    done = " ".join(DONE.format(ids=":ids").split())
    file = ground.folder / "batch.sql"
    file.write_text(
        f"{picked}), taken AS (UPDATE {change}) SELECT coalesce(array_agg(id), '{{}}')::text AS ids FROM taken \\gset\n"
        f"BEGIN;\n{RESULTS.format(ids=':ids')};\n{done};\nCOMMIT;\n"
    )
    _pgbench(ground, url, file.name, seconds, clients)
    took = "SELECT count(*), extract(epoch FROM max(recorded_at) - min(recorded_at))::float FROM results"
    ((count, span),) = ground.rows(url, took)
    return float(count / max(span, 1e-3))


def pgbench_insert(ground: Ground, seconds: float) -> float:
    """Rows a second that one client of ``pgbench`` inserts, each committed."""
    url = ground.bare(TABLES)
    file = ground.folder / "insert.sql"
    file.write_text("INSERT INTO jobs (agent, input) VALUES ('noop', '{\"n\": 1}');\n")
    return _pgbench(ground, url, file.name, seconds, 1)


def _pgbench(ground: Ground, url: str, file: str, seconds: float, clients: int) -> float:
    server: EmbeddedServer = ground.cluster.server
    user = server._server_user()
    program = server._usable_binaries(user) / "pgbench"
    if not program.exists():
        raise RuntimeError("the PostgreSQL that is used has no pgbench")
    to = connection_parameters(url)
    arguments = [str(program), "-h", str(to["host"]), "-U", str(to["user"]), "-p", str(to.get("port", 5432)), "-n"]
    arguments += ["-M", "prepared", "-c", str(clients), "-j", "2", "-T", str(max(1, round(seconds))), "-f", file]
    done = subprocess.run(
        [*arguments, str(to["dbname"])], cwd=ground.folder, capture_output=True, text=True, check=False
    )
    found = re.search(r"tps = ([\d.]+)", done.stdout)
    if done.returncode or found is None:
        raise RuntimeError(f"pgbench: {done.stderr[-400:] or done.stdout[-400:]}")
    return float(found[1])


def psycopg_insert(ground: Ground, jobs: int) -> float:
    """Rows a second that one psycopg connection inserts, each committed."""
    url = ground.bare(TABLES)
    with ground.session(url) as session:
        session.prepare_threshold = 1
        began = time.perf_counter()
        for number in range(jobs):
            session.execute(
                "INSERT INTO jobs (agent, input) VALUES ('noop', jsonb_build_object('n', %s::int))", [number]
            )
        return jobs / (time.perf_counter() - began)


def psycopg_copy(ground: Ground, jobs: int) -> float:
    """Rows a second of one COPY of all of them, which gives no ids back."""
    url = ground.bare(TABLES)
    with ground.session(url) as session:
        began = time.perf_counter()
        with session.cursor().copy("COPY jobs (agent, input) FROM STDIN") as copy:
            for number in range(jobs):
                copy.write_row(("noop", f'{{"n": {number}}}'))
        return jobs / (time.perf_counter() - began)


def spawning(seconds: float, at_once: int, *, pipes: bool) -> float:
    """Processes (``true``) a second that a bare asyncio loop starts and waits for, with or without reading pipes."""
    return asyncio.run(_spawning(seconds, at_once, pipes))


async def _spawning(seconds: float, at_once: int, pipes: bool) -> float:
    where = asyncio.subprocess.PIPE if pipes else asyncio.subprocess.DEVNULL
    end = time.perf_counter() + seconds
    count = 0

    async def one_after_the_other() -> None:
        nonlocal count
        while time.perf_counter() < end:
            process = await asyncio.create_subprocess_exec(
                "true", stdin=asyncio.subprocess.DEVNULL, stdout=where, stderr=where
            )
            await process.communicate()
            count += 1

    began = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
    return count / (time.perf_counter() - began)


class Listener:
    """A bare consumer in a process of its own: LISTEN, claim one job, note the time. Gives the starts by input ``n``."""

    def __init__(self, ground: Ground) -> None:
        self.url = ground.bare(TABLES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.limits", self.url],
            cwd=ROOT,
            env=ground.variables(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "listening\n":
            raise RuntimeError("the bare listener did not start")

    def end(self) -> dict[int, int]:
        """Stop it and return what it noted, as ``time.time_ns``."""
        out, _ = self._process.communicate("", timeout=30)
        return {int(n): int(at) for n, at in (line.split() for line in out.splitlines())}


def _listen(url: str) -> None:
    ended = threading.Event()

    def await_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=await_end, daemon=True).start()
    starts: list[tuple[int, int]] = []
    parameters: dict[str, Any] = connection_parameters(url)
    with (
        psycopg.connect(**parameters, autocommit=True) as hears,
        psycopg.connect(**parameters, autocommit=True) as asks,
    ):
        asks.prepare_threshold = 1
        hears.execute("LISTEN jobs")
        print("listening", flush=True)
        while not ended.is_set():
            for _ in hears.notifies(timeout=0.5, stop_after=1):
                while taken := asks.execute(CLAIM.format(batch=1)).fetchall():
                    starts += [(row[2]["n"], time.time_ns()) for row in taken]
    for n, at in starts:
        print(n, at)


def pace_bare(listener: Listener, number: int, pause: float) -> dict[int, int]:
    """Add one job each *pause* seconds, notifying after the commit; return the instants after the commits."""
    committed: dict[int, int] = {}
    with psycopg.connect(**connection_parameters(listener.url), autocommit=True) as session:
        for n in range(number):
            time.sleep(pause)
            session.execute("INSERT INTO jobs (agent, input) VALUES ('noop', jsonb_build_object('n', %s::int))", [n])
            committed[n] = time.time_ns()
            session.execute("NOTIFY jobs")
    return committed


if __name__ == "__main__":
    _listen(sys.argv[1])
