"""Rows about size: backlogs, history, a pinned snapshot, many agents at once, a fleet, and a worker that does nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

from tests.bench.figures import Figure, quantile
from tests.bench.ground import Running
from tests.bench.rows import POLL, TASKS, Bench, recorded_rate
from tests.bench.worker import Spec

DISTINCT = tuple(f"noop{n}" for n in range(1_000))

_NOISE = {
    "pending": "INSERT INTO tasks (agent, input) SELECT 'noop', jsonb_build_object('n', -g) FROM generate_series(1, {n}) g",
    "future": (
        "INSERT INTO tasks (agent, input, due, available_at)"
        " SELECT 'noop', jsonb_build_object('n', -g), false, now() + interval '1 day' + g * interval '1 ms'"
        " FROM generate_series(1, {n}) g"
    ),
    "blocked": (
        "WITH parents AS (INSERT INTO tasks (agent, held_at, is_parent)"
        " SELECT 'parent', now(), true FROM generate_series(1, 1000) RETURNING id),"
        " children AS (INSERT INTO tasks (agent, status, input)"
        " SELECT 'noop', 'blocked', jsonb_build_object('n', -g) FROM generate_series(1, {n}) g RETURNING id)"
        " INSERT INTO task_dependencies (task_id, depends_on)"
        " SELECT id, (SELECT min(id) FROM parents) + id % 1000 FROM children"
    ),
    "others": (
        "INSERT INTO tasks (agent, input) SELECT 'other' || g % 10, jsonb_build_object('n', -g)"
        " FROM generate_series(1, {n}) g"
    ),
    "distinct": (
        "INSERT INTO tasks (agent, input) SELECT 'noop' || g % 1000, jsonb_build_object('n', -g)"
        " FROM generate_series(1, {n}) g"
    ),
    "history": (
        "WITH old AS (INSERT INTO tasks (agent, input, status, attempt, started_at, finished_at)"
        " SELECT 'noop', jsonb_build_object('n', -g), 'done', 1, now(), now() FROM generate_series(1, {n}) g RETURNING id)"
        " INSERT INTO runs (task_id, attempt, status, started_at, finished_at, recorded_at)"
        " SELECT id, 1, 'done', now(), now(), now() FROM old"
    ),
}
"""What lies in the tables beside the tasks that are measured. No two plans: all are analysed before the worker starts."""


def backlog(bench: Bench) -> list[Figure]:
    """W4: the first tasks of a drain with a million others behind, before or beside them."""
    million = bench.size(1_000_000, 2_000)
    shown = f"{million:,}"
    return _beside(
        bench,
        {
            "pending": (f"{shown} pending", Spec()),
            "future": (f"{shown} future-dated", Spec()),
            "blocked": (f"{shown} blocked", Spec()),
            "others": (f"{shown} of other agents", Spec()),
            "distinct": (f"{shown} of 1,000 agents, all of this worker", Spec(agents=DISTINCT)),
        },
        million,
        0.9,
        0.98,
    )


def history(bench: Bench) -> list[Figure]:
    """W5: the first tasks of a drain beside a history of a million that are done."""
    million = bench.size(1_000_000, 2_000)
    return _beside(bench, {"history": (f"{million:,} done", Spec())}, million, 0.95, 0.98)


def _beside(bench: Bench, kinds: dict[str, tuple[str, Spec]], noise: int, must: float, goal: float) -> list[Figure]:
    """The rate of the first tasks with *noise* rows of each kind, beside the rate with 1,000 pending."""
    window = bench.size(10_000, 500)
    against = "1,000 pending"
    figures = {kind: Figure(name, "tasks/s", must, goal, against=against) for kind, (name, _) in kinds.items()}
    small = Figure(against, "tasks/s")

    def filler(kind: str, number: int) -> Callable[[str], None]:
        def fill(url: str) -> None:
            if kind != "distinct":
                # In front of what lies behind: the older tasks are claimed first.
                ready = TASKS.format(n=window + window // 5)
                before, after = (ready, _NOISE[kind]) if kind == "pending" else (_NOISE[kind], ready)
                bench.ground.rows(url, before.format(n=number))
                bench.ground.rows(url, after.format(n=number))
            else:
                bench.ground.rows(url, _NOISE[kind].format(n=number + window + window // 5))

        return fill

    def measure(kind: str, number: int, spec: Spec) -> float:
        url = bench.ground.fresh(f"beside_{kind}_{number}", filler(kind, number))
        spec.stop_after = window + window // 10
        bench.ground.start(url, spec).end()
        return recorded_rate(bench.ground, url, window)

    for number in bench.each_run():
        few = measure("pending", 1_000, Spec())
        small.add(few)
        for kind, (_, spec) in kinds.items():
            figures[kind].add(measure(kind, noise, spec), few)
            if number == bench.runs - 1:
                bench.ground.forget(f"beside_{kind}_{noise}")
    return [small, *figures.values()]


def pinned(bench: Bench) -> list[Figure]:
    """W6: a drain of 50,000 while another session holds a snapshot: no dead row can be removed."""
    figure = Figure("last fifth", "tasks/s", 0.8, 0.95, against="first fifth")
    number = bench.size(50_000, 1_000)
    fifth = number // 5
    when = "SELECT extract(epoch FROM recorded_at)::float FROM runs ORDER BY recorded_at, id"
    for _ in bench.each_run():
        url = bench.pending(number)
        with bench.ground.session(url) as session:
            session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            session.execute("SELECT pg_current_xact_id(), count(*) FROM pg_class")
            bench.ground.start(url, Spec()).end()
            session.execute("ROLLBACK")
        bench.check_once(url, number)
        times = [at for (at,) in bench.ground.rows(url, when)]
        began = bench.ground.one(url, "SELECT extract(epoch FROM min(started_at))::float FROM runs")
        first, last = fifth / (times[fifth - 1] - began), fifth / (times[-1] - times[-fifth - 1])
        figure.add(last, first)
    return [figure]


def together(bench: Bench) -> list[Figure]:
    """2,000 async agents of 30 s at once in one process."""
    return _together(bench, bench.size(2_000, 50))


def ten_thousand(bench: Bench) -> list[Figure]:
    """The goal beyond ``together``: 10,000 async agents of 30 s at once in one process."""
    return _together(bench, bench.size(10_000, 100))


def _together(bench: Bench, number: int) -> list[Figure]:
    renewal = Figure("longest pause between renewals", "s", 12.0, at_most=True, note="they are due every 10 s")
    memory = Figure("memory", "MB", 200, at_most=True)
    cpu = Figure("CPU of the worker once started", "% of a core", 20, at_most=True)
    start = Figure("from the add to the last start", "s")
    seconds = bench.size(30, 2)
    for _ in bench.each_run():
        url = bench.ground.fresh()
        worker = bench.ground.start(url, Spec(concurrency=number, seconds=seconds, until_idle=False))
        bench.ground.await_workers(url, 1)
        began = time.monotonic()
        bench.ground.rows(url, TASKS.format(n=number))
        _running(bench, url, number)
        start.add(time.monotonic() - began)
        time.sleep(seconds / 6)
        used, at = _cpu_of(worker), time.monotonic()
        renewals = _renewals(bench, url, seconds / 2)
        cpu.add((_cpu_of(worker) - used) / (time.monotonic() - at) * 100)
        _ended(bench, url, number)
        renewals |= _renewals(bench, url, 0)
        lost = bench.ground.one(url, "SELECT count(*) FROM runs WHERE status <> 'done' OR attempt > 1")
        if lost:
            raise RuntimeError(f"{lost} attempts did not end as done at the first attempt")
        memory.add(worker.end(tell=True)["rss_mb"])
        renewal.add(max((b - a for a, b in pairwise(sorted(renewals))), default=None))
    return [renewal, memory, cpu, start]


def fleet(bench: Bench) -> list[Figure]:
    """40 worker processes with 250 async agents of 60 s each: 10,000 at once on this machine."""
    lost = Figure("leases lost", "workers", 0, at_most=True)
    claim = Figure("claim p99, with the wait for the database", "ms", 100, at_most=True)
    database = Figure("CPU of the database, steady", "% of a core", None, 50, at_most=True)
    started = Figure("from the add to the last start", "s")
    workers, each, seconds = bench.size(40, 2), bench.size(250, 20), bench.size(60, 3)
    number = workers * each
    for _ in bench.each_run():
        url = bench.ground.fresh()
        running = []
        for n in range(workers):
            running.append(bench.ground.start(url, Spec(concurrency=each, seconds=seconds, until_idle=False)))
            if n % 4 == 3:  # a host starts its processes one after the other, too
                bench.ground.await_workers(url, n - 3)
        bench.ground.await_workers(url, workers)
        began = time.monotonic()
        bench.ground.rows(url, TASKS.format(n=number))
        bench.ground.rows(url, "NOTIFY orchestrator")
        _running(bench, url, number)
        started.add(time.monotonic() - began)
        time.sleep(seconds / 6)
        used, at = bench.ground.server_cpu(), time.monotonic()
        time.sleep(seconds / 3)
        database.add((bench.ground.server_cpu() - used) / (time.monotonic() - at) * 100)
        _ended(bench, url, number)
        lost.add(bench.ground.one(url, "SELECT count(*) FROM workers WHERE dead_at IS NOT NULL"))
        took: list[float] = []
        for worker in running:
            took += [seconds for _, _, seconds in worker.end(tell=True)["claims"]]
        claim.add(quantile(took, 0.99))
        bench.check_once(url, number)
    return [lost, claim, database, started]


def idle(bench: Bench) -> list[Figure]:
    """A worker without work: its transactions beside the polls, and its CPU."""
    polls = Figure("transactions for each poll, renewal and sweep far away", "transactions", 1.0, at_most=True)
    all_ = Figure("transactions with renewal and sweep", "transactions/s")
    cpu = Figure("CPU", "% of a core", 0.5, at_most=True)
    seconds = bench.size(30, 4)
    for _ in bench.each_run():
        apart = {"heartbeat": 3_600.0, "lease": 7_200.0, "sweep": 3_600.0}
        rate, _ = _idle(bench, Spec(until_idle=False, settings=apart), seconds)
        polls.add(rate * POLL * 0.9)  # polls are jittered downwards, to 0.8 to 1.0 of the setting
        rate, used = _idle(bench, Spec(until_idle=False), seconds)
        all_.add(rate)
        cpu.add(used * 100)
    return [polls, all_, cpu]


def _idle(bench: Bench, spec: Spec, seconds: float) -> tuple[float, float]:
    """Transactions a second, and the worker's share of a core."""
    url = bench.ground.fresh()
    commits = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = 'bench'"
    worker = bench.ground.start(url, spec)
    bench.ground.await_workers(url, 1)
    time.sleep(2)
    watched = bench.ground.cluster.url  # from another database: looking is not counted
    before, used, at = bench.ground.one(watched, commits), _cpu_of(worker), time.monotonic()
    time.sleep(seconds)
    spent = time.monotonic() - at
    share = (_cpu_of(worker) - used) / spent
    time.sleep(1.5)  # sessions report what they did with a delay, those that are idle at once: the last second is late
    rate = (bench.ground.one(watched, commits) - before) / (spent + 1.5)
    worker.end(tell=True)
    return rate, share


def _cpu_of(worker: Running) -> float:
    used = worker.seen.cpu_times()
    return used.user + used.system


def _running(bench: Bench, url: str, number: int) -> None:
    query = "SELECT count(*) FROM tasks WHERE attempt > 0"
    bench.ground.wait(lambda: bench.ground.one(url, query) >= number, f"{number} agents at once", 120)


def _ended(bench: Bench, url: str, number: int) -> None:
    bench.ground.wait(
        lambda: bench.ground.one(url, "SELECT count(*) FROM runs") >= number, f"end of {number} agents", 180
    )


def _renewals(bench: Bench, url: str, seconds: float) -> set[float]:
    """The instants of renewals that were seen in so many seconds."""
    query = "SELECT extract(epoch FROM renewed_at)::float FROM workers"
    end, seen = time.monotonic() + seconds, set()
    while True:
        seen |= {at for (at,) in bench.ground.rows(url, query)}
        if time.monotonic() >= end:
            return seen
        time.sleep(0.25)
