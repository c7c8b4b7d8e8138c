"""Rows about speed: drains, latency, adding, lock holds, the command line. ``scale`` has those about size.

A row is a function that takes a ``Bench`` and returns its figures. Within each run, what is compared is measured in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from orchestrator import Orchestrator
from tests.bench import limits
from tests.bench.figures import Figure, quantile
from tests.bench.ground import ROOT, Ground
from tests.bench.worker import Spec

TASKS = "INSERT INTO tasks (agent, input) SELECT 'noop', jsonb_build_object('n', g) FROM generate_series(1, {n}) g"
POLL = 1.0
LOOP, PGBENCH = "bare psycopg loop, batches of 50", "pgbench, batches of 50, 16 clients"


@dataclass
class Bench:
    """What every row gets."""

    ground: Ground
    runs: int
    small: bool

    def size(self, full: int, small: int) -> int:
        """How many: *small* for a smoke run."""
        return small if self.small else full

    def each_run(self) -> Iterator[int]:
        """The numbers of the runs, told on stderr."""
        for number in range(self.runs):
            print(f"  run {number + 1} of {self.runs}", file=sys.stderr, flush=True)
            yield number

    # -- what rows have in common -------------------------------------------------------------------------------------

    def pending(self, number: int) -> str:
        """A new database with so many tasks that are ready."""
        return self.ground.fresh(f"pending_{number}", lambda url: self.ground.run(url, TASKS.format(n=number)))

    def drain(self, number: int, spec: Spec, processes: int = 1) -> tuple[float, list[dict[str, Any]], str]:
        """Tasks a second from the first claim to the last record, what the workers found, and the database."""
        url = self.pending(number)
        workers = [self.ground.start(url, spec) for _ in range(processes)]
        found = [worker.end() for worker in workers]
        self.check_once(url, number)
        return recorded_rate(self.ground, url, number), found, url

    def check_once(self, url: str, number: int) -> None:
        """Raise RuntimeError unless each of *number* tasks is done by one run."""
        query = "SELECT count(*), count(DISTINCT task_id), (SELECT count(*) FROM tasks WHERE status = 'done') FROM runs"
        if (counts := self.ground.rows(url, query)[0]) != (number, number, number):
            raise RuntimeError(f"{number} tasks, but runs, tasks with runs and tasks that are done are {counts}")


def recorded_rate(ground: Ground, url: str, number: int) -> float:
    """Tasks a second of the first *number* that were recorded, by the database's clock."""
    query = (
        "SELECT count(*), extract(epoch FROM max(recorded_at) - min(started_at))::float"
        " FROM (SELECT started_at, recorded_at FROM runs WHERE worker_id IS NOT NULL ORDER BY recorded_at, id LIMIT %s) AS f"
    )
    ((count, seconds),) = ground.rows(url, query, number)
    if count < number:
        raise RuntimeError(f"{count} of {number} tasks were recorded")
    return float(count / seconds)


# -- drains -----------------------------------------------------------------------------------------------------------


def drain(bench: Bench) -> list[Figure]:
    """W2: one process drains no-op async agents, concurrency 100 and 10; then two processes."""
    hundred = Figure("concurrency 100", "tasks/s", 0.8, 1.0, against=LOOP)
    ten = Figure("concurrency 10", "tasks/s", against=LOOP, note="asked to be compared with other queues")
    two = Figure("two processes", "tasks/s", 0.4, 0.6, against=PGBENCH)
    more = Figure("two processes beside one", "tasks/s", 1.2, 1.4, against="concurrency 100")
    cpu = Figure("CPU of the worker, concurrency 100", "µs/task")
    memory = Figure("memory of the worker, concurrency 100", "MB")
    number, fewer = bench.size(50_000, 1_000), bench.size(20_000, 500)
    for _ in bench.each_run():
        loop = limits.psycopg_loop(bench.ground, number)
        one, found, _ = bench.drain(number, Spec(concurrency=100))
        hundred.add(one, loop)
        cpu.add(found[0]["cpu"] / number * 1e6)
        memory.add(found[0]["rss_mb"])
        ten.add(bench.drain(fewer, Spec(concurrency=10))[0], loop)
        limit = limits.pgbench(bench.ground, bench.size(5, 1))
        both, _, _ = bench.drain(number, Spec(concurrency=100), processes=2)
        two.add(both, limit)
        more.add(both, one)
    return [hundred, ten, two, more, cpu, memory]


def commands(bench: Bench) -> list[Figure]:
    """W2 with command agents that run ``true``, concurrency 16."""
    figure = Figure("command agents", "tasks/s", 0.8, 0.95, against="bare asyncio loop, 16 at once, pipes read")
    plain = Figure("the same beside no pipes", "tasks/s", against="bare asyncio loop, 16 at once, no pipes")
    number = bench.size(3_000, 100)
    for _ in bench.each_run():
        bare = limits.spawning(bench.size(5, 1), 16, pipes=True)
        without = limits.spawning(bench.size(5, 1), 16, pipes=False)
        ours, _, _ = bench.drain(number, Spec(kind="command", concurrency=16))
        figure.add(ours, bare)
        plain.add(ours, without)
    return [figure, plain]


def children(bench: Bench) -> list[Figure]:
    """W2 with sync Python agents in warm child processes, concurrency 16."""
    figure = Figure("sync agents in child processes", "tasks/s", 2_000, 4_000)
    number = bench.size(10_000, 300)
    for _ in bench.each_run():
        figure.add(bench.drain(number, Spec(kind="sync", concurrency=16))[0])
    return [figure]


# -- latency ----------------------------------------------------------------------------------------------------------


def latency(bench: Bench) -> list[Figure]:
    """W3: from the commit of the add to the start of the function, one task each 50 ms; then by polling alone."""
    against = "bare LISTEN, claim, on psycopg"
    figures = {q: Figure(f"notified p{q:.0%}"[:-1], "ms", against=against) for q in (0.5, 0.95, 0.99)}
    polled = {
        0.5: Figure("polling alone p50", "ms"),
        0.99: Figure("polling alone p99", "ms", POLL * 1000 + 10, at_most=True),
    }
    number = bench.size(200, 20)
    for _ in bench.each_run():
        listener = limits.Listener(bench.ground)
        bare = _latencies(limits.pace_bare(listener, number, 0.05), listener.end())
        ours = _paced(bench, number, 0.05, Spec(until_idle=False, starts=True))
        for q, figure in figures.items():
            figure.add(quantile(ours, q), quantile(bare, q))
        # Behind a transaction-mode pooler nothing listens. The pause is no multiple of the poll: all phases are met.
        alone = Spec(until_idle=False, starts=True, settings={"pooler": "transaction"})
        waits = _paced(bench, number, POLL / 4.7, alone)
        for q, figure in polled.items():
            figure.add(quantile(waits, q))
    return [*figures.values(), *polled.values()]


def _paced(bench: Bench, number: int, pause: float, spec: Spec) -> list[float]:
    """Milliseconds from the commit of each add to its agent's start."""
    url = bench.ground.fresh()
    worker = bench.ground.start(url, spec)
    bench.ground.await_workers(url, 1)
    committed: dict[int, int] = {}
    with Orchestrator(url) as orc:
        orc.add("noop", {"n": -1})  # connects, prepares
        bench.ground.wait(lambda: bool(bench.ground.one(url, "SELECT count(*) FROM runs")), "first task")
        for n in range(number):
            time.sleep(pause)
            orc.add("noop", {"n": n})
            committed[n] = time.time_ns()
    done = f"SELECT count(*) = {number + 1} FROM runs"
    bench.ground.wait(lambda: bool(bench.ground.one(url, done)), "end of the paced tasks", 60)
    return _latencies(committed, dict(worker.end(tell=True)["starts"]))


def _latencies(committed: dict[int, int], started: dict[int, int]) -> list[float]:
    if missing := committed.keys() - started.keys():
        raise RuntimeError(f"{len(missing)} of {len(committed)} were never started")
    return [(started[n] - at) / 1e6 for n, at in committed.items()]


# -- adding -----------------------------------------------------------------------------------------------------------


def adding(bench: Bench) -> list[Figure]:
    """W1: add one by one, and many at once."""
    single = Figure("one by one", "tasks/s", against="bare psycopg INSERT, one by one")
    pgbench = Figure("one by one beside pgbench", "tasks/s", against="pgbench INSERT, one client")
    bulk = Figure("bulk", "tasks/s", 20_000, 40_000)
    copied = Figure("bulk beside COPY", "tasks/s", against="bare COPY without ids")
    number, many = bench.size(5_000, 100), bench.size(100_000, 2_000)
    for _ in bench.each_run():
        bare = limits.psycopg_insert(bench.ground, number)
        plain = limits.pgbench_insert(bench.ground, bench.size(3, 1))
        with Orchestrator(bench.ground.fresh()) as orc:
            orc.add("noop", {"n": 0})
            began = time.perf_counter()
            for n in range(number):
                orc.add("noop", {"n": n})
            rate = number / (time.perf_counter() - began)
        single.add(rate, bare)
        pgbench.add(rate, plain)
        copy = limits.psycopg_copy(bench.ground, many)
        with Orchestrator(bench.ground.fresh()) as orc:
            given = [{"agent": "noop", "input": {"n": n}} for n in range(many)]
            began = time.perf_counter()
            orc.add_many(given)
            rate = many / (time.perf_counter() - began)
        bulk.add(rate)
        copied.add(rate, copy)
    return [single, pgbench, bulk, copied]


# -- lock holds -------------------------------------------------------------------------------------------------------


def holds(bench: Bench) -> list[Figure]:
    """How long a claim's statement holds its row locks: calm queue (up to 10 at once), full drain, and long agents."""
    calm = Figure("calm queue, claims of up to 10, p99", "ms", 5, 2.5, at_most=True)
    long = Figure("the same with agents of 1 s, p99", "ms", 5, 2.5, at_most=True, note="independent of the run time")
    full = Figure("full drain, batches of up to 100, p99", "ms", 25, 12.5, at_most=True)
    number = bench.size(50_000, 1_000)
    for _ in bench.each_run():
        for figure, seconds in ((calm, 0.0), (long, 1.0)):
            figure.add(quantile(_calm(bench, seconds), 0.99))
        _, found, _ = bench.drain(number, Spec(concurrency=100))
        full.add(quantile([hold for _, hold, _ in found[0]["claims"]], 0.99))
    return [calm, long, full]


def _calm(bench: Bench, seconds: float) -> list[float]:
    """The holds of claims while ten tasks come every 50 ms."""
    url = bench.ground.fresh()
    worker = bench.ground.start(url, Spec(concurrency=1_000, seconds=seconds, until_idle=False))
    bench.ground.await_workers(url, 1)
    with Orchestrator(url) as orc:
        for _ in range(bench.size(200, 10)):
            orc.add_many([{"agent": "noop", "input": {"n": n}} for n in range(10)])
            time.sleep(0.05)
    left = "SELECT NOT EXISTS (SELECT FROM tasks WHERE status IN ('pending', 'running'))"
    bench.ground.wait(lambda: bool(bench.ground.one(url, left)), "end of the calm queue", 60)
    return [hold for count, hold, _ in worker.end(tell=True)["claims"] if count <= 10]


# -- the command line -------------------------------------------------------------------------------------------------

_NAMES = """
import runpy, sys
before = set(sys.modules)
sys.argv = ["orchestrator", *sys.argv[1:]]
try:
    runpy.run_module("orchestrator", run_name="__main__")
except SystemExit:
    pass
ours = [m for n, m in list(sys.modules.items()) if n not in before]
paths = [(m.__name__, getattr(m, "__file__", None) or "") for m in ours]
print("\\0" + " ".join(n for n, path in paths if "site-packages" in path and not n.startswith("orchestrator")))
"""


def command_line(bench: Bench) -> list[Figure]:
    """CPU of ``--help`` and ``list`` beside importing the third-party modules that they import; ``import orchestrator``."""
    url = bench.pending(10)
    given = bench.ground.variables() | {"ORCHESTRATOR_DATABASE_URL": url, "PYTHONDONTWRITEBYTECODE": ""}
    given["PYTHONPATH"] = str(ROOT)
    figures = []
    for command, must in ((["--help"], 1.7), (["list"], 1.4)):
        figure = Figure(
            f"orchestrator {command[0]}", "ms CPU", must, at_most=True, against="import of the same third-party modules"
        )
        done = subprocess.run(
            [sys.executable, "-c", _NAMES, *command], env=given, capture_output=True, text=True, check=True
        )
        modules = done.stdout.rpartition("\0")[2].split()
        imports = "".join(f"import {name}\n" for name in modules if name.isascii() and "-" not in name)
        for _ in bench.each_run():
            ours, theirs = [], []
            for _ in range(bench.size(10, 2)):
                theirs.append(_cpu([sys.executable, "-c", imports], given))
                ours.append(_cpu([sys.executable, "-m", "orchestrator", *command], given))
            figure.add(median(ours) * 1000, median(theirs) * 1000)
        figures.append(figure)
    bare = Figure("import orchestrator", "s", 0.1, at_most=True, note="CPU, with the start of the interpreter")
    for _ in bench.each_run():
        code = [sys.executable, "-c", "import orchestrator"]
        bare.add(median(_cpu(code, given) for _ in range(bench.size(10, 2))))
    return [*figures, bare]


def _cpu(command: list[str], environment: dict[str, str]) -> float:
    """Seconds of CPU that a command takes."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode:
        raise RuntimeError(f"{json.dumps(command)[:200]} ended with {process.returncode}: {said[-400:]!r}")
    return used.ru_utime + used.ru_stime
