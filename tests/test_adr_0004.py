"""ADR-0004: what the one long transaction did, that the three units do not, and that the lock is held for milliseconds."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from orchestrator import Orchestrator, OutcomeClass, TaskStatus, agent
from orchestrator.domain.outcome import Outcome
from orchestrator.liveness import identity
from orchestrator.repositories.tasks import Known
from orchestrator.settings import Settings


@pytest.fixture
def orc(database_url: str) -> Any:
    """An orchestrator on the test's database, closed afterwards."""
    with Orchestrator(database_url, settings=Settings()) as made:
        yield made


def test_the_old_way_blocks_the_record_for_as_long_as_the_claim_is_held(engine: Engine, orc: Orchestrator) -> None:
    """FOR UPDATE held while the agent works: another connection's run waits on its foreign key, and cannot be written."""
    task = orc.add("coder", "x")
    with engine.connect() as claiming, engine.connect() as recording:
        claiming.execute(text("SELECT id FROM tasks WHERE id = :id FOR UPDATE"), {"id": task.id})
        recording.execute(text("SET LOCAL lock_timeout = '200ms'"))
        with pytest.raises(OperationalError) as refused:
            recording.execute(
                text(
                    "INSERT INTO runs (task_id, attempt, status, started_at, finished_at)"
                    " VALUES (:id, 1, 'done', now(), now())"
                ),
                {"id": task.id},
            )
        assert getattr(refused.value.orig, "sqlstate", None) == "55P03"
        recording.rollback()
        claiming.rollback()


def test_the_new_way_records_over_another_connection_while_the_agent_works(orc: Orchestrator) -> None:
    """After the claim has committed nothing waits: the same insert, by another connection, goes through at once."""
    task = orc.add("coder", "x")
    worker = orc.register(identity(), name="w", slots=1, agents=["coder"])
    (claim,) = orc.claim(worker, [Known("coder")], 1).claims
    with psycopg.connect(orc.url or "", autocommit=True) as other:
        other.execute("SET lock_timeout = '200ms'")
        other.execute(
            "INSERT INTO runs (task_id, attempt, status, started_at, finished_at) VALUES (%s, 99, 'done', now(), now())",
            [task.id],
        )
    (recorded,) = orc.record([_done(claim)])
    assert recorded.status is TaskStatus.DONE


def test_a_claim_under_way_does_not_block_a_foreign_key_either(engine: Engine, orc: Orchestrator) -> None:
    """The claim locks FOR NO KEY UPDATE: even before its commit, a run of that task can be inserted."""
    task = orc.add("coder", "x")
    with engine.connect() as claiming, engine.connect() as recording:
        claiming.execute(text("SELECT id FROM tasks WHERE id = :id FOR NO KEY UPDATE SKIP LOCKED"), {"id": task.id})
        recording.execute(text("SET LOCAL lock_timeout = '200ms'"))
        recording.execute(
            text(
                "INSERT INTO runs (task_id, attempt, status, started_at, finished_at) VALUES (:id, 1, 'done', now(), now())"
            ),
            {"id": task.id},
        )
        recording.rollback()
        claiming.rollback()


def test_nothing_is_idle_in_transaction_while_an_agent_runs(orc: Orchestrator, database_url: str) -> None:
    """While the agent works, no session of this database has an open transaction, and no snapshot is pinned."""
    seen: list[tuple[Any, ...]] = []

    @agent("looker")
    async def looker(ctx: Any) -> None:
        with psycopg.connect(database_url, autocommit=True) as watching:
            seen.extend(
                watching.execute(
                    "SELECT state, query FROM pg_stat_activity WHERE datname = current_database()"
                    " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
                    " AND (state LIKE 'idle in transaction%' OR xact_start IS NOT NULL)"
                ).fetchall()
            )

    orc.add("looker")
    run = orc.run_next([looker])
    assert run is not None
    assert run.status == OutcomeClass.DONE
    assert seen == []


def test_the_lock_is_held_for_the_length_of_one_short_transaction(orc: Orchestrator) -> None:
    """A claim measures how long FOR UPDATE is held, and a hundred claimers never wait for one another's agents."""
    for _ in range(5):
        orc.add("coder", "x")
    worker = orc.register(identity(), name="w", slots=1, agents=["coder"])
    claimed = [orc.claim(worker, [Known("coder")], 1) for _ in range(5)]
    assert all(len(each.claims) == 1 for each in claimed)
    assert all(each.hold_seconds > 0 for each in claimed)
    with psycopg.connect(orc.url or "", autocommit=True) as other:
        held = other.execute(
            "SELECT count(*) FROM pg_locks WHERE relation = 'tasks'::regclass AND mode = 'RowShareLock'"
        ).fetchone()
    assert held == (0,)


def test_eight_workers_on_one_queue_run_each_task_once(orc: Orchestrator) -> None:
    """Eight claimers race for two hundred tasks: each is claimed exactly once, and none is left."""
    orc.add_many([{"agent": "coder", "input": n} for n in range(200)])
    taken: list[int] = []
    lock = threading.Lock()
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        with Orchestrator(orc.url, settings=Settings()) as own:
            worker = own.register(identity(), name=f"w{number}", slots=3, agents=["coder"])
            barrier.wait(30)
            while claims := own.claim(worker, [Known("coder")], 3).claims:
                with lock:
                    taken.extend(claim.task_id for claim in claims)
                own.record([_done(claim) for claim in claims])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(taken) == 200
    assert len(set(taken)) == 200


def _done(claim: Any) -> Any:
    from orchestrator.repositories.runs import Ended

    return Ended(claim, Outcome(OutcomeClass.DONE, elapsed=0.001), "w", "host")
