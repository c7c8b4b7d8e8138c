"""Two servers with synchronous replication: the primary dies under load, or the standby stops answering."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from orchestrator import service
from orchestrator.agents.protocol import Live, Stop
from orchestrator.database import schema, transient
from orchestrator.database.engine import connection_parameters, make_engine
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import DatabaseUnavailable
from orchestrator.repositories.runs import Recorded
from orchestrator.service import Orchestrator
from orchestrator.worker import Observer, Worker
from tests.conftest import WaitUntil
from tests.faults import ask
from tests.servers import Cluster
from tests.working import FakeAgent, Working, orchestrator

pytestmark = [pytest.mark.real, pytest.mark.slow]


class Pair:
    """A primary that waits for its standby with every commit."""

    def __init__(self, primary: Cluster, standby: Cluster) -> None:
        self.primary, self.standby = primary, standby
        hosts = f"{primary.server.sock},{standby.server.sock}"
        self.url = (
            f"postgresql://orchestrator@/orchestrator?host={hosts}&port=5432,5432&target_session_attrs=read-write"
        )

    def promote(self) -> None:
        """Make the standby the primary."""
        with psycopg.connect(self.standby.url, autocommit=True) as admin:
            assert admin.execute("SELECT pg_promote()").fetchone() == (True,)

    def receiver(self) -> int:
        """The pid of the standby's process that receives."""
        ((pid,),) = ask(self.standby.url, "SELECT pid FROM pg_stat_wal_receiver")
        return int(pid)


@pytest.fixture
def pair(test_folder: Path, wait_until: WaitUntil) -> Iterator[Pair]:
    """Both run, and replication is synchronous."""
    with Cluster(test_folder / "primary") as primary, primary.standby(test_folder / "standby") as standby:
        with psycopg.connect(**connection_parameters(primary.url), autocommit=True) as admin:
            # Only now: the standby, once promoted, waits for nobody.
            admin.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            admin.execute("SELECT pg_reload_conf()")
        wait_until(lambda: ask(primary.url, "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"))
        schema.upgrade(primary.url)
        yield Pair(primary, standby)


@pytest.fixture(autouse=True)
def _new_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other test's outage is going on."""
    monkeypatch.setattr(transient, "_episode", transient._Episode())


class Accepted(Observer):
    """What the worker was told to be committed."""

    def __init__(self) -> None:
        self.runs: Counter[tuple[int, int]] = Counter()

    def recorded(self, claim: Claim, outcome: Outcome, recorded: Recorded) -> None:
        if not recorded.late:
            self.runs[claim.task_id, claim.attempt] += 1


class Adding:
    """Adds tasks until told to stop; repeats what was not acknowledged, under the same key."""

    def __init__(self, orc: Orchestrator) -> None:
        self.acknowledged: list[int] = []
        self.error: Exception | None = None
        self._orc = orc
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._end.wait(0.01):
            tasks = [{"agent": "a", "unique_key": f"k{number}-{each}"} for each in range(10)]
            try:
                self.acknowledged += [added.id for added in self._orc.add_many(tasks)]
            except DatabaseUnavailable:
                continue
            except Exception as error:
                self.error = error
                return
            number += 1

    def stop(self) -> None:
        """End, and tell what went wrong."""
        self._end.set()
        self._thread.join(60)
        if self.error is not None:
            raise self.error


def test_the_primary_dies_under_load(pair: Pair, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture) -> None:
    """What was acknowledged before is there after the promotion; nothing is recorded twice, no task fails."""
    executed: Counter[tuple[int, int]] = Counter()

    async def work(claim: Claim, live: Live, _stop: Stop) -> Outcome:
        executed[claim.task_id, claim.attempt] += 1
        live.write("stdout", "worked\n")
        return Outcome(OutcomeClass.DONE, result=[claim.task_id])

    accepted = Accepted()
    with orchestrator(pair.url) as orc, orchestrator(pair.url) as other:
        adding = Adding(other)
        with Working(Worker(orc, [FakeAgent(behave=work)], 20, observers=[accepted]), grace=5):
            wait_until(lambda: sum(accepted.runs.values()) >= 300, 60)
            pair.primary.kill()
            before = set(accepted.runs)
            pair.promote()
            goal = len(before) + 300
            wait_until(lambda: adding.error or len(accepted.runs) >= goal, 60)
            adding.stop()
            url = pair.standby.url
            unfinished = "SELECT count(*) FROM tasks WHERE status NOT IN ('done', 'failed')"
            wait_until(lambda: ask(url, unfinished) == [(0,)], 60)
    runs = {(task, attempt): status for task, attempt, status in ask(url, "SELECT task_id, attempt, status FROM runs")}
    done = Counter(task for (task, _), status in runs.items() if status == "done")
    print(f"{len(before)} runs before, {len(accepted.runs)} in all, {len(adding.acknowledged)} tasks acknowledged")
    assert before <= {key for key, status in runs.items() if status == "done"}
    assert set(accepted.runs) <= set(runs)
    assert set(adding.acknowledged) <= set(done)
    assert set(done.values()) == {1}
    assert set(runs.values()) <= {"done", "interrupted"}
    assert set(executed.values()) == {1}
    assert ask(url, "SELECT DISTINCT status, retry_count, lost_count FROM tasks") == [("done", 0, 0)]
    assert "Traceback" not in caplog.text


def test_a_standby_that_does_not_answer(pair: Pair, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits wait for it, however long: they are not cut and repeated, so no session is left behind; then all go on."""
    monkeypatch.setattr(service, "make_engine", _impatient)
    accepted = Accepted()
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'orchestrator%'"
    with orchestrator(pair.url) as orc:
        with Working(Worker(orc, [FakeAgent()], observers=[accepted])):
            orc.add_many([{"agent": "a"}] * 10)
            wait_until(lambda: len(accepted.runs) == 10)
            pid = pair.receiver()
            os.kill(pid, signal.SIGSTOP)
            try:
                adding = threading.Thread(target=lambda: orc.add_many([{"agent": "a"}] * 10))
                adding.start()
                wait_until(lambda: ask(pair.primary.url, waiting)[0][0] >= 2)
                counts = []
                for _ in range(20):
                    threading.Event().wait(0.1)
                    counts += [count for (count,) in ask(pair.primary.url, sessions)]
            finally:
                os.kill(pid, signal.SIGCONT)
            adding.join()
            wait_until(lambda: len(accepted.runs) == 20)
    # Four of the worker and a question, which is gone again at once; one more for whoever adds.
    assert max(counts) <= 4 + 1 + 4
    assert ask(pair.primary.url, "SELECT attempt, status, count(*) FROM runs GROUP BY 1, 2") == [(1, "done", 20)]


def _impatient(url: str, **options: object) -> object:
    return make_engine(url, **{**options, "silence": 0.2})  # type: ignore[arg-type]
