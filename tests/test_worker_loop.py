"""The worker with real threads and a real database: claiming, recording, stopping, hints and limits."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from orchestrator.agents.protocol import Live, Stop
from orchestrator.domain.outcome import Claim, Outcome, Usage
from orchestrator.domain.words import OutcomeClass, TaskStatus
from orchestrator.errors import Conflict, DatabaseUnavailable, InvalidInput, UnknownAgent
from orchestrator.repositories.runs import Recorded
from orchestrator.service import Orchestrator
from orchestrator.settings import Settings
from orchestrator.worker import Observer, Worker, loop
from tests.conftest import WaitUntil
from tests.working import FakeAgent, Gate, Working, add, orchestrator, query, statuses

DONE = Outcome(OutcomeClass.DONE)


@pytest.fixture
def orc(database_url: str) -> Iterator[Orchestrator]:
    """An orchestrator of the test's own."""
    with orchestrator(database_url) as made:
        yield made


def test_it_works_until_nothing_is_left(engine: Engine, orc: Orchestrator) -> None:
    """Every task is done once, the agents are closed, and the worker's row says that it ended by itself."""
    ids = add(engine, 250)
    agent = FakeAgent()
    worker = Worker(orc, [agent], 20)
    assert worker.run(until_idle=True) == 0
    assert sorted(agent.started) == ids
    assert statuses(engine) == {"done": 250}
    assert query(engine, "SELECT count(*), sum(attempt) FROM runs WHERE status = 'done'") == [(250, 250)]
    assert query(engine, "SELECT stopped_at IS NOT NULL, dead_at FROM workers") == [(True, None)]
    assert agent.closed


def test_a_run_says_who_and_what(engine: Engine, orc: Orchestrator) -> None:
    """Result, worker and host are on the run row."""

    async def behave(_claim: Claim, _live: Live, _stop: Stop) -> Outcome:
        return Outcome(OutcomeClass.DONE, result={"answer": 42})

    add(engine)
    worker = Worker(orc, [FakeAgent(behave=behave)], name="one")
    worker.run(until_idle=True)
    ((result, name, host, elapsed),) = query(engine, "SELECT result, worker, host, duration_seconds FROM runs")
    assert (result, name, host) == ({"answer": 42}, "one", worker._who.host)
    assert elapsed >= 0


def test_it_never_holds_more_than_its_slots(engine: Engine, orc: Orchestrator, wait_until: WaitUntil) -> None:
    """Of 20 tasks 3 run on 3 slots, and nothing else is claimed (S08)."""
    add(engine, 20)
    gate = Gate()
    with Working(Worker(orc, [FakeAgent(behave=gate)], 3), until_idle=True) as working:
        for _ in range(3):
            gate.entered()
        # Two renewals later it still is so.
        before = query(engine, "SELECT renewed_at FROM workers")
        wait_until(
            lambda: query(
                engine,
                "SELECT 1 FROM workers WHERE renewed_at > CAST(:t AS timestamptz) + interval '0.3 s'",
                t=before[0][0],
            )
        )
        assert statuses(engine) == {"running": 3, "pending": 17}
        gate.open()
        working.join()
    assert statuses(engine) == {"done": 20}


def test_eight_workers_do_each_task_once(engine: Engine, database_url: str) -> None:
    """Eight workers on one queue: 200 tasks, 200 runs, each of attempt 1."""
    ids = add(engine, 200)
    orchestrators = [orchestrator(database_url) for _ in range(8)]
    agents = [FakeAgent() for _ in range(8)]
    workers = [Working(Worker(o, [a], 5), until_idle=True) for o, a in zip(orchestrators, agents, strict=True)]
    for working in workers:
        working.__enter__()
    for working in workers:
        working.join()
    for each in orchestrators:
        each.close()
    assert Counter(task_id for agent in agents for task_id in agent.started) == Counter(ids)
    assert query(engine, "SELECT count(*), max(attempt) FROM runs") == [(200, 1)]
    assert statuses(engine) == {"done": 200}


def test_only_its_own_agents_are_claimed(engine: Engine, orc: Orchestrator) -> None:
    """Tasks of another agent, held ones and later ones stay where they are, and do not keep it from being idle."""
    add(engine, 2, "a")
    add(engine, 2, "b")
    query(engine, "INSERT INTO tasks (agent, held_at) VALUES ('a', clock_timestamp())")
    query(
        engine,
        "INSERT INTO tasks (agent, due, available_at) VALUES ('a', false, clock_timestamp() + interval '1 hour')",
    )
    Worker(orc, [FakeAgent("a"), FakeAgent("c")]).run(until_idle=True)
    assert query(engine, "SELECT agent, status, count(*) FROM tasks GROUP BY 1, 2 ORDER BY 1, 2") == [
        ("a", "done", 2),
        ("a", "pending", 2),
        ("b", "pending", 2),
    ]


def test_until_idle_waits_for_retries(engine: Engine, orc: Orchestrator) -> None:
    """A task that waits for its next attempt is work left to do."""

    async def behave(claim: Claim, _live: Live, _stop: Stop) -> Outcome:
        return DONE if claim.attempt == 3 else Outcome(OutcomeClass.TRANSIENT, message="again")

    add(engine)
    Worker(orc, [FakeAgent(behave=behave)]).run(until_idle=True)
    assert query(engine, "SELECT status, attempt, retry_count FROM tasks") == [("done", 3, 2)]
    assert query(engine, "SELECT status FROM runs ORDER BY attempt") == [("transient",), ("transient",), ("done",)]


def test_until_idle_waits_for_what_another_worker_runs(
    engine: Engine, orc: Orchestrator, database_url: str, wait_until: WaitUntil
) -> None:
    """While a task of its agents runs elsewhere, its children may still come."""
    (parent,) = add(engine)
    gate = Gate()
    with Working(Worker(orc, [FakeAgent(behave=gate)])) as first, orchestrator(database_url) as other:
        gate.entered()
        orc.add("a", after=(parent,))
        agent = FakeAgent()
        second = Working(Worker(other, [agent]), until_idle=True)
        with second:
            wait_until(lambda: second.worker.id)
            first.worker.stop(30)
            gate.open()
            second.join()
    assert statuses(engine) == {"done": 2}
    assert len(agent.started) <= 1


def test_a_plan_of_its_own(engine: Engine, orc: Orchestrator) -> None:
    """With a plan only its tasks are claimed, and idle means idle for that plan."""
    ((plan,),) = query(engine, "INSERT INTO plans (name) VALUES ('p') RETURNING id")
    mine = add(engine, 3, plan_id=plan)
    add(engine, 2)
    agent = FakeAgent()
    Worker(orc, [agent], plan_id=plan).run(until_idle=True)
    assert sorted(agent.started) == mine


def test_a_hint_wakes_it_at_once(engine: Engine, orc: Orchestrator, database_url: str, wait_until: WaitUntil) -> None:
    """With a poll of an hour, an added task starts: the hint alone woke the worker."""
    gate = Gate()
    with orchestrator(database_url, Settings(heartbeat=5, lease=40, poll=3600, sweep=3600)) as slow:
        worker = Worker(slow, [FakeAgent(behave=gate)], watchdog=False)
        with Working(worker):
            wait_until(
                lambda: (
                    query(engine, "SELECT 1 FROM pg_stat_activity WHERE query = 'LISTEN orchestrator'")
                    and worker._claimer._next_poll
                )
            )
            orc.add("a")
            gate.entered()
            gate.open()


def test_a_polling_worker_needs_no_hint(engine: Engine, orc: Orchestrator) -> None:
    """A task that appears by plain INSERT is found by the poll."""
    gate = Gate()
    with Working(Worker(orc, [FakeAgent(behave=gate)])):
        add(engine)
        gate.entered()
        gate.open()


def test_a_task_that_becomes_due_starts(engine: Engine, orc: Orchestrator) -> None:
    """The promoter makes it due at its instant, though nobody tells the worker."""
    query(
        engine,
        "INSERT INTO tasks (agent, due, available_at)"
        " VALUES ('a', false, clock_timestamp() + interval '300 milliseconds')",
    )
    gate = Gate()
    with Working(Worker(orc, [FakeAgent(behave=gate)], sweep=3600)):
        gate.entered()
        ((early,),) = query(engine, "SELECT started_at < available_at FROM tasks")
        assert early is False
        gate.open()


def test_cancel_reaches_the_agent(engine: Engine, orc: Orchestrator) -> None:
    """A request on the running task stops its agent, and the task ends cancelled."""
    (task_id,) = add(engine)
    gate = Gate()
    with Working(Worker(orc, [FakeAgent(behave=gate)]), until_idle=True) as working:
        gate.entered()
        assert orc.cancel(task_id) is TaskStatus.RUNNING
        working.join()
    assert query(engine, "SELECT status, attempt FROM tasks") == [("cancelled", 1)]
    assert query(engine, "SELECT status FROM runs") == [("cancelled",)]


def test_a_cancel_wins_over_a_result(engine: Engine, orc: Orchestrator) -> None:
    """Accepted is accepted: the agent ended well in the same moment, yet the task is cancelled, the run stays done."""
    (task_id,) = add(engine)
    asked = threading.Event()

    async def behave(_claim: Claim, _live: Live, _stop: Stop) -> Outcome:
        await asyncio.to_thread(orc.cancel, task_id)
        asked.set()
        return DONE

    Worker(orc, [FakeAgent(behave=behave)]).run(until_idle=True)
    assert asked.is_set()
    assert query(engine, "SELECT status FROM tasks") == [("cancelled",)]
    assert query(engine, "SELECT status FROM runs") == [("done",)]


def test_cancels_at_any_moment_are_kept(engine: Engine, orc: Orchestrator) -> None:
    """60 short tasks, cancelled at whatever moment: accepted means cancelled, refused means done, nothing runs twice (S07)."""

    async def behave(claim: Claim, _live: Live, stop: Stop) -> Outcome:
        for _ in range(claim.task_id % 7):
            await asyncio.sleep(0)
        return DONE if stop.reason is None else Outcome(stop.reason)

    ids = add(engine, 60)
    accepted: set[int] = set()
    with Working(Worker(orc, [FakeAgent(behave=behave)], 4), until_idle=True) as working:
        for task_id in ids:
            try:
                orc.cancel(task_id)
            except Conflict:
                continue
            accepted.add(task_id)
        working.join()
    cancelled = {row.id for row in query(engine, "SELECT id FROM tasks WHERE status = 'cancelled'")}
    assert cancelled == accepted
    assert query(engine, "SELECT count(*) FROM tasks WHERE status = 'done'") == [(60 - len(accepted),)]
    assert query(engine, "SELECT max(attempt) FROM tasks") in ([(0,)], [(1,)])


def test_odd_numbers_of_one_agent_do_not_blind_the_screens(
    engine: Engine, orc: Orchestrator, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in a usage, NUL in words: the live columns of the neighbour, in the same statement, are shown all the same."""
    monkeypatch.setattr("orchestrator.worker.recorder.LIVE_EVERY", 0.05)
    gate = Gate()

    async def behave(claim: Claim, live: Live, stop: Stop) -> Outcome:
        live.usage(Usage(total_tokens=7, cost_usd=math.nan, carry={"bad": "\x00", "worse": {1, 2}}))
        live.progress(math.nan, "half\x00way")
        live.session("s\x00")
        live.write("stdout", "zero\x00\ud800")
        return await gate(claim, live, stop)

    add(engine, 2)
    with Working(Worker(orc, [FakeAgent(behave=behave)])):
        wait_until(lambda: query(engine, "SELECT 1 FROM tasks WHERE live_usage ->> 'total_tokens' = '7'"))
        gate.open()
        wait_until(lambda: statuses(engine) == {"done": 2})


def test_draining_hands_back_what_does_not_end(engine: Engine, orc: Orchestrator) -> None:
    """A stop without grace: pending again, no retry used up, with a run row of its own; then it can be done (S05)."""
    add(engine, max_retries=0)
    for attempt in (1, 2, 3):
        gate = Gate()
        with Working(Worker(orc, [FakeAgent(behave=gate)])):
            gate.entered()
        assert query(engine, "SELECT status, attempt, retry_count, lost_count FROM tasks") == [
            ("pending", attempt, 0, 0)
        ]
    Worker(orc, [FakeAgent()]).run(until_idle=True)
    assert query(engine, "SELECT status FROM tasks") == [("done",)]
    runs = query(engine, "SELECT status, cause FROM runs ORDER BY attempt")
    assert runs == [("interrupted", None)] * 3 + [("done", None)]


def test_draining_lets_agents_finish_within_the_grace(engine: Engine, orc: Orchestrator, wait_until: WaitUntil) -> None:
    """Nothing new is claimed, what runs may end."""
    add(engine, 2)
    gate = Gate()
    worker = Worker(orc, [FakeAgent(behave=gate)], 1)
    with Working(worker) as working:
        gate.entered()
        worker.stop(60)
        wait_until(worker._claimer.done.is_set)
        gate.open()
        working.join()
    assert statuses(engine) == {"done": 1, "pending": 1}


def test_an_operator_drains_a_worker(engine: Engine, orc: Orchestrator) -> None:
    """``drain`` ends it after its agents; nobody is stopped for it."""
    add(engine)
    gate = Gate()
    worker = Worker(orc, [FakeAgent(behave=gate)], name="drained")
    with Working(worker) as working:
        gate.entered()
        orc.drain("drained")
        assert worker._claimer.done.wait(30)
        gate.open()
        working.join()
        assert working.result == 0
    assert statuses(engine) == {"done": 1}


def test_a_claim_that_hangs_does_not_keep_the_worker(
    engine: Engine, orc: Orchestrator, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a dead network the claim never comes back: with no agent at work nobody is killed for it, and the worker ends."""
    hanging, go_on = threading.Event(), threading.Event()
    killed: list[object] = []

    def hang(*_: object, **__: object) -> object:
        hanging.set()
        go_on.wait()
        raise DatabaseUnavailable("the network is dead")

    monkeypatch.setattr(orc, "claim", hang)
    monkeypatch.setattr(loop, "end_agents", lambda *arguments: killed.append(arguments))
    with Working(Worker(orc, [FakeAgent()])) as working:
        wait_until(hanging.is_set)
        working.worker.stop(0)
        working.join()
    go_on.set()
    assert killed == []
    assert query(engine, "SELECT stopped_at FROM workers") == [(None,)]


def test_an_agent_that_will_not_stop_does_not_keep_the_worker(engine: Engine, orc: Orchestrator) -> None:
    """A coroutine that ignores every request is left behind; its task is handed back with a note."""
    inside = threading.Event()

    async def behave(_claim: Claim, _live: Live, _stop: Stop) -> Outcome:
        inside.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    add(engine)
    worker = Worker(orc, [FakeAgent(behave=behave)])
    with Working(worker) as working, pytest.MonkeyPatch.context() as patch:
        patch.setattr("orchestrator.worker.loop.STOPPING", 0.1)
        patch.setattr("orchestrator.worker.loop.KILLING", 0.1)
        assert inside.wait(30)
        worker.stop(0)
        working.join()
    assert statuses(engine) == {"pending": 1}
    ((status, cause, notes),) = query(engine, "SELECT status, cause, notes FROM runs")
    assert (status, cause) == ("interrupted", "did_not_stop")
    assert "did not end" in notes[0]


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3), KeyboardInterrupt()])
def test_what_an_agent_raises_ends_its_attempt_alone(engine: Engine, orc: Orchestrator, error: BaseException) -> None:
    """Even SystemExit is that attempt's failure: the worker goes on with the next task."""

    async def behave(claim: Claim, _live: Live, _stop: Stop) -> Outcome:
        if claim.attempt == 1:
            raise error
        return DONE

    add(engine, 2, max_retries=1)
    Worker(orc, [FakeAgent(behave=behave)], 1).run(until_idle=True)
    assert statuses(engine) == {"done": 2}
    assert query(engine, "SELECT DISTINCT status FROM runs WHERE attempt = 1") == [("transient",)]


def test_output_progress_and_usage_are_seen_while_it_runs(
    engine: Engine, orc: Orchestrator, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second later the transcript is readable and the task's row shows progress; both end complete (S34)."""
    monkeypatch.setattr("orchestrator.worker.recorder.LIVE_EVERY", 0.05)
    gate = Gate()

    async def behave(claim: Claim, live: Live, stop: Stop) -> Outcome:
        live.write("stdout", "first line\n")
        live.progress(25, "quarter")
        live.usage(Usage(input_tokens=5_000, complete=False))
        live.session("abc")
        outcome = await gate(claim, live, stop)
        live.write("stdout", "last words")
        return outcome

    (task_id,) = add(engine)
    worker = Worker(orc, [FakeAgent(behave=behave)])
    with Working(worker, until_idle=True) as working:
        gate.entered()
        (watched,) = worker.watched()
        assert (watched.last_output, watched.percent, watched.session) == ("first line", 25, "abc")
        wait_until(lambda: orc.events.of_attempt(task_id, 1))
        assert wait_until(
            lambda: query(
                engine,
                "SELECT progress_percent, progress_message, last_output, live_usage ->> 'input_tokens', session"
                " FROM tasks WHERE progress_percent IS NOT NULL",
            )
        ) == [(25, "quarter", "first line", "5000", "abc")]
        gate.open()
        working.join()
    assert "".join(event.text for event in orc.events.of_attempt(task_id, 1)) == "first line\nlast words"
    assert query(engine, "SELECT last_output, session FROM tasks") == [("last words", "abc")]
    run = query(engine, "SELECT transcript_bytes, transcript_dropped_bytes, input_tokens, cost_usd, session FROM runs")
    assert run == [(21, 0, 5000, None, "abc")]


def test_usage_of_a_stopped_attempt_is_kept_as_incomplete(engine: Engine, orc: Orchestrator) -> None:
    """Whoever stops an attempt pays for what it used: the tokens are there, the cost is unknown, not 0 (S34)."""
    gate = Gate()

    async def behave(claim: Claim, live: Live, stop: Stop) -> Outcome:
        live.usage(Usage(total_tokens=5_000))
        return await gate(claim, live, stop)

    (task_id,) = add(engine)
    with Working(Worker(orc, [FakeAgent(behave=behave)]), until_idle=True) as working:
        gate.entered()
        orc.cancel(task_id)
        working.join()
    assert query(engine, "SELECT total_tokens, usage_complete, cost_usd FROM runs") == [(5000, False, None)]


def test_no_transaction_is_open_while_agents_run(engine: Engine, database_url: str, wait_until: WaitUntil) -> None:
    """While ten agents work, no session of the worker is idle in transaction and at most four exist (S22)."""
    add(engine, 10)
    gate = Gate()
    url = database_url + ("&" if "?" in database_url else "?") + "application_name=s22"
    sample = (
        "SELECT count(*), count(*) FILTER (WHERE state = 'idle in transaction'), count(backend_xmin)"
        " FROM pg_stat_activity WHERE application_name = 's22' AND (state <> 'active' OR state IS NULL)"
    )
    with orchestrator(url) as orc, Working(Worker(orc, [FakeAgent(behave=gate)])):
        for _ in range(10):
            gate.entered()
        worst = (0, 0, 0)
        for _ in range(40):
            ((sessions, idle, pinned),) = query(engine, sample)
            worst = max(worst[0], sessions), max(worst[1], idle), max(worst[2], pinned)
        gate.open()
        wait_until(lambda: statuses(engine) == {"done": 10})
        assert 0 < worst[0] <= 4
        # A transaction may just be under way; it must not be the rule.
        assert query(
            engine,
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 's22'"
            " AND state = 'idle in transaction' AND state_change < clock_timestamp() - interval '1 second'",
        ) == [(0,)]


def test_records_are_committed_in_groups(engine: Engine, orc: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends while a commit is under way goes into the next one, however much it is."""
    batches: list[int] = []
    record = orc.record
    first, go = threading.Event(), threading.Event()

    def watched(batch: Any, **options: Any) -> list[Recorded]:
        batches.append(len(batch))
        first.set()
        assert go.wait(30)
        return record(batch, **options)

    monkeypatch.setattr(orc, "record", watched)
    gate = Gate()

    async def behave(claim: Claim, live: Live, stop: Stop) -> Outcome:
        return DONE if claim.task_id == ids[0] else await gate(claim, live, stop)

    ids = add(engine, 40)
    with Working(Worker(orc, [FakeAgent(behave=behave)], 40), until_idle=True) as working:
        for _ in range(39):
            gate.entered()
        assert first.wait(30)
        gate.open()
        while len(working.worker._desk.queue) < 39:
            threading.Event().wait(0.001)
        go.set()
        working.join()
    assert batches == [1, 39]
    assert statuses(engine) == {"done": 40}


def test_large_results_make_small_batches(engine: Engine, orc: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch ends at about 8 MB, whatever its number of rows."""
    monkeypatch.setattr("orchestrator.worker.recorder.BATCH_BYTES", 1000)
    batches: list[int] = []
    record = orc.record

    def watched(batch: Any, **options: Any) -> list[Recorded]:
        batches.append(sum(len(json.dumps(each.outcome.result)) for each in batch))
        return record(batch, **options)

    monkeypatch.setattr(orc, "record", watched)

    async def behave(_claim: Claim, _live: Live, _stop: Stop) -> Outcome:
        return Outcome(OutcomeClass.DONE, result="x" * 600)

    add(engine, 30)
    Worker(orc, [FakeAgent(behave=behave)], 30).run(until_idle=True)
    assert max(batches) <= 2 * 602
    assert statuses(engine) == {"done": 30}


def test_a_mistake_over_one_outcome_holds_no_neighbour_back(
    engine: Engine, orc: Orchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outcome that recording itself fails over is kept in the spool, its task gets another attempt, others are done."""
    record = orc.record

    def fragile(batch: Any, **options: Any) -> list[Recorded]:
        if any(each.outcome.result == "poison" for each in batch):
            raise RuntimeError("a fault of ours")
        return record(batch, **options)

    monkeypatch.setattr(orc, "record", fragile)
    ids = add(engine, 10)

    async def behave(claim: Claim, _live: Live, _stop: Stop) -> Outcome:
        poison = claim.task_id == ids[3] and claim.attempt == 1
        return Outcome(OutcomeClass.DONE, result="poison" if poison else "good")

    worker = Worker(orc, [FakeAgent(behave=behave)], sweep=3600)
    worker.run(until_idle=True)
    assert statuses(engine) == {"done": 10}
    assert query(engine, "SELECT cause FROM runs WHERE status <> 'done'") == [("unrecordable",)]
    kept = list(worker._recorder._spool.directory.iterdir())
    assert len(kept) == 1
    kept[0].unlink()


def test_observers_hear_of_everything_in_order(engine: Engine, orc: Orchestrator) -> None:
    """Started, ended, recorded for each task; a fault of an observer is nobody else's problem."""
    heard: list[tuple[str, int]] = []

    class Ears(Observer):
        def started(self, claim: Claim) -> None:
            heard.append(("started", claim.task_id))

        def ended(self, claim: Claim, outcome: Outcome) -> None:
            heard.append(("ended", claim.task_id))

        def recorded(self, claim: Claim, outcome: Outcome, recorded: Recorded) -> None:
            assert recorded.status is TaskStatus.DONE
            heard.append(("recorded", claim.task_id))

    class Broken(Observer):
        def started(self, claim: Claim) -> None:
            raise RuntimeError("a fault of the observer")

    (task_id,) = add(engine)
    Worker(orc, [FakeAgent()], observers=[Broken(), Ears()]).run(until_idle=True)
    assert heard == [("started", task_id), ("ended", task_id), ("recorded", task_id)]


def test_suspects_run_one_at_a_time(engine: Engine, orc: Orchestrator, wait_until: WaitUntil) -> None:
    """Of three tasks that a worker was lost with, one is held at a time; innocent ones are not held back (S04)."""
    suspects = add(engine, 3, lost_count=1)
    gate = Gate()

    async def behave(claim: Claim, live: Live, stop: Stop) -> Outcome:
        return await gate(claim, live, stop) if claim.task_id in suspects else DONE

    worker = Worker(orc, [FakeAgent(behave=behave)], 10, poll=0.02)
    with Working(worker, until_idle=True) as working:
        gate.entered()
        for _ in range(5):
            add(engine)
            wait_until(lambda: not query(engine, "SELECT 1 FROM tasks WHERE status <> 'done' AND lost_count = 0"))
            assert statuses(engine)["running"] == 1
        looks: list[int] = []

        def looked_twice() -> bool:
            # Taking empties the counters, and the recorder takes as well: what this sees adds up.
            looks.extend(each.empty_claims for each in worker.metrics.take())
            return sum(looks) > 1

        wait_until(looked_twice)
        assert statuses(engine)["running"] == 1
        gate.open()
        working.join()
    assert statuses(engine) == {"done": 8}


def test_live_columns_that_were_not_written_come_again(
    engine: Engine, orc: Orchestrator, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that somebody had locked in that moment is shown at the next flush, though the agent says nothing new."""
    monkeypatch.setattr("orchestrator.worker.recorder.LIVE_EVERY", 0.05)
    set_live, calls = orc.events.set_live, []

    def first_locked(rows: Any) -> set[tuple[int, int]]:
        calls.append(rows)
        return set_live(rows) if len(calls) > 1 else set()

    monkeypatch.setattr(orc.events, "set_live", first_locked)
    gate = Gate()

    async def behave(claim: Claim, live: Live, stop: Stop) -> Outcome:
        live.progress(10, None)
        return await gate(claim, live, stop)

    add(engine)
    with Working(Worker(orc, [FakeAgent(behave=behave)])):
        wait_until(lambda: query(engine, "SELECT 1 FROM tasks WHERE progress_percent = 10 AND status = 'running'"))
        gate.open()


def test_counts_of_the_minute_are_flushed(engine: Engine, orc: Orchestrator) -> None:
    """Claims with their lock hold, and ends by agent, are in the minutes table when the worker has ended."""
    add(engine, 30)
    Worker(orc, [FakeAgent()]).run(until_idle=True)
    assert query(engine, "SELECT sum(done), sum(claims) FROM minutes WHERE agent = 'a'") == [(30, 30)]
    hold = orc.minutes.lock_hold()
    assert hold.count > 0
    assert hold.mean is not None
    assert hold.mean > 0


def test_an_agent_nobody_knows_is_refused(orc: Orchestrator) -> None:
    """A name that no configuration has is named, before anything starts."""
    with pytest.raises(UnknownAgent, match="nobody"):
        Worker(orc, ["nobody"])


def test_a_heartbeat_of_more_than_half_a_lease_is_refused(orc: Orchestrator) -> None:
    """One clear message at the start (S01)."""
    with pytest.raises(InvalidInput, match="half of the lease"):
        Worker(orc, [FakeAgent()], heartbeat=6, lease=10)


def test_a_worker_runs_once(engine: Engine, orc: Orchestrator) -> None:
    """A second run is refused: its threads and its row are used up."""
    worker = Worker(orc, [FakeAgent()])
    worker.run(until_idle=True)
    with pytest.raises(InvalidInput, match="once"):
        worker.run()


def test_stop_before_run_is_heard(engine: Engine, orc: Orchestrator) -> None:
    """Whoever stops a worker that has not begun yet does not wait for it in vain."""
    worker = Worker(orc, [FakeAgent()])
    worker.stop()
    assert worker.run() == 0


def test_it_runs_on_the_callers_loop(engine: Engine, orc: Orchestrator) -> None:
    """``run_async`` shares the loop of an application and leaves it running."""
    add(engine, 3)

    async def application() -> int:
        return await Worker(orc, [FakeAgent()], signals=False).run_async(until_idle=True)

    assert asyncio.run(application()) == 0
    assert statuses(engine) == {"done": 3}
