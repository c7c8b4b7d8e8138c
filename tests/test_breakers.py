"""The provider breaker (F23) and shared logins (F66, S52): who may start what, in one worker and between all of them."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine

from orchestrator import Orchestrator, Worker
from orchestrator.agents.building import build
from orchestrator.agents.logins import take_slot
from orchestrator.agents.protocol import Live, Stop
from orchestrator.dashboard.why import diagnose
from orchestrator.domain.given import Login
from orchestrator.domain.outcome import Claim, Outcome, Usage
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidPlan
from orchestrator.liveness import identity
from orchestrator.plans import agent_definition
from orchestrator.repositories.breakers import BreakerRepository, Refusal
from orchestrator.worker.gates import Gates
from tests.conftest import WaitUntil
from tests.running import a_claim
from tests.running import execute as execute_agent
from tests.working import QUICK, FakeAgent, Gate, Working, add, orchestrator, query, statuses

LIMITED = Outcome(OutcomeClass.RATE_LIMITED, message="slow down", retry_after=3600)
NO_LOGIN = Outcome(OutcomeClass.UNAUTHENTICATED, message="not logged in")
DONE = Outcome(OutcomeClass.DONE)


def refusal(login: str = "a", kind: OutcomeClass = OutcomeClass.RATE_LIMITED, **more: Any) -> Refusal:
    """A refused attempt."""
    return Refusal(login, (login,), kind, **more)


@pytest.fixture
def breakers(engine: Engine, database_url: str) -> BreakerRepository:
    """The repository on an empty table."""
    return BreakerRepository(engine)


@pytest.fixture
def orc(database_url: str) -> Iterator[Orchestrator]:
    """An orchestrator on the test's database."""
    with orchestrator(database_url, QUICK) as made:
        yield made


@contextmanager
def opened_for(engine: Engine, seconds: float) -> Iterator[None]:
    """What is refused inside closes its breaker for *seconds*, whatever time this machine takes for it."""
    ((before,),) = query(engine, "SELECT clock_timestamp()")
    yield
    ((after, until),) = query(engine, "SELECT clock_timestamp(), max(until) FROM breakers")
    assert before + timedelta(seconds=seconds) <= until <= after + timedelta(seconds=seconds)


def age(engine: Engine, seconds: float = 7200) -> None:
    """Let the time of all breakers come."""
    query(
        engine,
        f"UPDATE breakers SET until = until - interval '{seconds} s', probe_until = probe_until - interval '1 h'",
    )


# -- the table ---------------------------------------------------------------------------------------------------------


def test_a_stated_reset_counts(breakers: BreakerRepository) -> None:
    """An instant or a number of seconds, at most a week; a later one of another attempt wins, an earlier one does not."""
    breakers.refuse([refusal(retry_after=600), refusal("b", retry_at=datetime.now(UTC) + timedelta(days=30))])
    a, b = sorted(breakers.read(), key=lambda each: each.login)
    assert 590 < a.seconds <= 600
    assert 6.9 * 86_400 < b.seconds <= 7 * 86_400
    breakers.refuse([refusal(retry_after=60), refusal(retry_after=900)])
    (a,) = (each for each in breakers.read() if each.login == "a")
    assert 890 < a.seconds <= 900


def test_a_stated_reset_that_is_over_is_none(breakers: BreakerRepository) -> None:
    """The usual wait counts: a provider that says 0 seconds is not asked again and again."""
    breakers.refuse([refusal(retry_after=0), refusal("b", retry_at=datetime.now(UTC) - timedelta(seconds=5))])
    assert [20 < each.seconds <= 30 for each in breakers.read()] == [True, True]


def test_the_wait_grows_with_refused_probes_only(breakers: BreakerRepository, engine: Engine) -> None:
    """Without a stated reset: 30 s, then twice as long with each probe; attempts that were under way change nothing."""
    worker = uuid4()
    with opened_for(engine, 30):
        breakers.refuse([refusal(), refusal(), refusal()])
    age(engine)
    assert breakers.probe("a", worker, 30)
    with opened_for(engine, 60):
        breakers.refuse([refusal(probe=True)])
    (again,) = breakers.read()
    assert again.probe_by is None


def test_a_refused_login_is_asked_again_soon(breakers: BreakerRepository, engine: Engine) -> None:
    """Two seconds: the others of a login may only have lost the race for its token."""
    with opened_for(engine, 2):
        breakers.refuse([refusal(kind=OutcomeClass.UNAUTHENTICATED)])


def test_one_worker_probes_at_a_time(breakers: BreakerRepository, engine: Engine) -> None:
    """Not before its time; then one, for as long as it says that it goes on; then another. Who passed closes it."""
    first, second = uuid4(), uuid4()
    breakers.refuse([refusal()])
    assert not breakers.probe("a", first, 30)
    age(engine)
    assert breakers.probe("a", first, 30)
    assert not breakers.probe("a", second, 30)
    assert breakers.probe("a", first, 30)
    assert breakers.read()[0].probe_by == first
    age(engine)
    assert breakers.read()[0].probe_by is None
    assert breakers.probe("a", second, 30)
    breakers.passed("a", first)
    assert breakers.read()
    breakers.release("a", second)
    assert breakers.probe("a", first, 30)
    breakers.passed("a", first)
    assert breakers.read() == []
    assert not breakers.probe("a", first, 30)


# -- one worker --------------------------------------------------------------------------------------------------------


def logins(*names: str, **more: Any) -> list[FakeAgent]:
    """Agents by these names that share the login ``l``."""
    agents = [FakeAgent(name) for name in names]
    for each in agents:
        each.login = Login("l", **more)  # type: ignore[attr-defined]
    return agents


def gates_of(orc: Orchestrator, agents: list[FakeAgent]) -> Gates:
    """The gates of a worker of *agents*."""
    return Gates(agents, [orc.known(agent) for agent in agents], orc.breakers)


def offered(gates: Gates, free: int = 10) -> dict[str, int]:
    """How many each agent is offered, when nothing runs."""
    return {known.agent: limit for group, limit in gates.offers(free, list) for known in group}


def test_without_anything_shut_all_agents_are_offered_as_they_are(orc: Orchestrator) -> None:
    """The claim of a worker whose providers are well gets the very list that it always gets: nothing is worked out."""
    gates = gates_of(orc, [FakeAgent("a"), FakeAgent("b")])
    ((known, free),) = gates.offers(10, list)
    assert (known is gates._known, free) == (True, 10)


def test_what_another_worker_found_out_is_heard(orc: Orchestrator, engine: Engine) -> None:
    """All agents of the login are left out, others are not; after it closed, starts double each second."""
    gates = gates_of(orc, [*logins("a", "b"), FakeAgent("c")])
    orc.breakers.refuse([refusal("l", retry_after=60)])
    assert gates.exchange(uuid4()) is False
    assert offered(gates) == {"c": 10}
    query(engine, "DELETE FROM breakers")
    assert gates.exchange(uuid4()) is True
    assert offered(gates) == {"a": 1, "b": 1, "c": 10}
    name = "l"
    since, _ = gates._slow[name]
    gates._slow[name] = since - 2.5, 0
    assert offered(gates) == {"a": 5, "b": 5, "c": 10}
    gates._slow[name] = since - 60, 0
    assert offered(gates) == {"a": 10, "b": 10, "c": 10}


def test_a_login_bounds_what_runs_at_once_and_how_fast_it_starts(orc: Orchestrator) -> None:
    """The concurrency of a login counts all its agents; with a stagger one starts at a time."""
    gates = gates_of(orc, [*logins("a", "b", concurrency=3), FakeAgent("c")])
    assert offered(gates) == {"a": 3, "b": 3, "c": 10}
    gates = gates_of(orc, logins("a", stagger=60))
    assert offered(gates) == {"a": 1}
    gates.started([a_claim(agent="a")])
    assert offered(gates) == {}
    assert 0.05 <= gates.soon(100) <= 60


# -- through workers ---------------------------------------------------------------------------------------------------


class Provider:
    """A behaviour that is refused until ``served`` is set."""

    def __init__(self, refuses: Outcome) -> None:
        self.refuses = refuses
        self.served = threading.Event()
        self.starts = 0
        self.at_once = 0
        self.most = 0

    async def __call__(self, _claim: Claim, _live: Live, _stop: Stop) -> Outcome:
        self.starts += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        return DONE if self.served.is_set() else self.refuses


def test_one_refusal_keeps_all_other_tasks_where_they_are(
    orc: Orchestrator, engine: Engine, wait_until: WaitUntil
) -> None:
    """At most the slots are started; the rest stays pending and is charged nothing; another agent works on."""
    add(engine, 50)
    add(engine, 20, agent="b")
    provider = Provider(LIMITED)
    with Working(Worker(orc, [FakeAgent(behave=provider), FakeAgent("b")], 4)):
        wait_until(lambda: query(engine, "SELECT count(*) FROM tasks WHERE agent = 'b' AND status = 'done'") == [(20,)])
        wait_until(lambda: query(engine, "SELECT kind, agents, message FROM breakers"))
    assert provider.starts <= 4
    rows = query(engine, "SELECT sum(attempt), sum(retry_count) FROM tasks WHERE agent = 'a' AND status = 'pending'")
    assert tuple(rows[0]) == (provider.starts, 0)
    assert [tuple(row) for row in query(engine, "SELECT kind, agents, message FROM breakers")] == [
        ("rate_limited", ["a"], "slow down")
    ]


def test_another_worker_claims_nothing_behind_an_open_breaker(
    orc: Orchestrator, engine: Engine, wait_until: WaitUntil
) -> None:
    """A worker that has never been refused knows it from the table, before its first claim of a second has passed."""
    orc.breakers.refuse([refusal(retry_after=3600)])
    worker = Worker(orc, [FakeAgent(), FakeAgent("b")], 4)
    with Working(worker):
        wait_until(lambda: worker._gates._shut)
        add(engine, 1, agent="b")
        wait_until(lambda: statuses(engine) == {"done": 1})  # a claim that had begun before it knew is over
        add(engine, 5)
        add(engine, 1, agent="b")
        wait_until(lambda: statuses(engine).get("done") == 2)
    assert query(engine, "SELECT DISTINCT t.agent FROM runs r JOIN tasks t ON t.id = r.task_id") == [("b",)]


def test_a_probe_that_passes_opens_the_gate(orc: Orchestrator, engine: Engine, wait_until: WaitUntil) -> None:
    """When the time has come one task goes first; when it is done the others follow, and all are done."""
    add(engine, 12)
    provider = Provider(LIMITED)
    with Working(Worker(orc, [FakeAgent(behave=provider)], 3)):
        wait_until(lambda: query(engine, "SELECT 1 FROM breakers WHERE refusals = 1"))
        starts = provider.starts
        age(engine)
        wait_until(lambda: query(engine, "SELECT 1 FROM breakers WHERE refusals = 2"))
        assert provider.starts == starts + 1
        provider.served.set()
        age(engine)
        wait_until(lambda: not query(engine, "SELECT 1 FROM breakers"))
        assert query(engine, "SELECT count(*) > 0 FROM runs WHERE status = 'done'") == [(True,)]
        orc.agent_states.resume("a", actor="ops")
        query(engine, "UPDATE tasks SET available_at = now(), due = true WHERE status = 'pending'")
        wait_until(lambda: statuses(engine) == {"done": 12})


def test_the_first_sign_of_life_of_a_probe_opens_the_gate(
    orc: Orchestrator, engine: Engine, wait_until: WaitUntil
) -> None:
    """A probe that works for hours is served as soon as it has used tokens: nobody waits for its end."""
    gate = Gate()

    async def behave(claim: Claim, live: Live, stop: Stop) -> Outcome:
        live.usage(Usage(total_tokens=5))
        return await gate(claim, live, stop)

    orc.breakers.refuse([refusal()])
    age(engine)
    add(engine, 3)
    with Working(Worker(orc, [FakeAgent(behave=behave)], 3)):
        for _ in range(3):
            gate.entered()
        wait_until(lambda: query(engine, "SELECT 1 FROM breakers") == [])  # before any of them has ended
        gate.open()
        wait_until(lambda: statuses(engine) == {"done": 3})


def test_a_probe_that_is_interrupted_decides_nothing(orc: Orchestrator, engine: Engine, wait_until: WaitUntil) -> None:
    """A worker that ends hands its probe on: the breaker is as open as before, and another may probe at once."""
    orc.breakers.refuse([refusal()])
    age(engine)
    add(engine, 2)
    gate = Gate()
    with Working(Worker(orc, [FakeAgent(behave=gate)], 2)):
        gate.entered()
    assert [tuple(row) for row in query(engine, "SELECT refusals, probe_by FROM breakers")] == [(1, None)]


def test_resume_closes_a_breaker_and_wakes_what_was_refused(orc: Orchestrator, engine: Engine) -> None:
    """A person who knows better: no breaker, and the tasks that waited for the provider are due; others are not."""
    add(engine, 1, status="pending", due=False, limited_count=2)
    add(engine, 1, status="pending", due=False)
    orc.breakers.refuse([refusal()])
    assert orc.agent_states.resume("a", actor="ops").breaker
    assert query(engine, "SELECT due FROM tasks ORDER BY id") == [(True,), (False,)]
    assert query(engine, "SELECT details FROM audit") == [({"breaker": "rate_limited"},)]
    assert not orc.agent_states.resume("a", actor="ops")


def test_everybody_sees_an_open_breaker(orc: Orchestrator, engine: Engine) -> None:
    """``status``, ``alerts`` and ``why`` say until when, why, and by which task; a login only once a probe confirmed it."""
    (task,) = add(engine)
    orc.register(identity(), name="w", slots=1, agents=["a"], lease=120, heartbeat=60)
    orc.breakers.refuse([refusal(retry_after=3600, message="usage limit", task_id=7)])
    (agent,) = orc.status()["agents"]
    assert (agent["state"], agent["state_reason"]) == ("breaker", "usage limit")
    (alert,) = (each for each in orc.reading.alerts() if each.subject == "agent")
    assert (alert.kind, alert.command) == ("breaker_open", "orchestrator resume a")
    assert alert.what.startswith("breaker open for another ")
    assert alert.what.endswith(": usage limit")
    found = diagnose(orc.diagnosis.facts(task))
    assert found.reasons[0].reason == "breaker"
    assert found.reasons[0].text.startswith("agent a: breaker open until ")
    assert found.reasons[0].text.endswith(": usage limit, seen by 7")
    query(engine, "DELETE FROM breakers")
    orc.breakers.refuse([refusal(kind=OutcomeClass.UNAUTHENTICATED)])
    assert [each.kind for each in orc.reading.alerts() if each.subject == "agent"] == ["breaker_open"]
    orc.breakers.refuse([refusal(kind=OutcomeClass.UNAUTHENTICATED, probe=True, message="run /login")])
    (alert,) = (each for each in orc.reading.alerts() if each.subject == "agent")
    assert (alert.kind, alert.what) == ("needs_login", "needs a login: run /login")
    found = diagnose(orc.diagnosis.facts(task))
    assert found.reasons[0].text.startswith("agent a needs a login")


def test_run_next_takes_nothing_behind_an_open_breaker(orc: Orchestrator, engine: Engine) -> None:
    """The library's one-task door keeps to it as well."""
    add(engine)
    orc.breakers.refuse([refusal(retry_after=60)])
    assert orc.run_next([FakeAgent()]) is None
    assert statuses(engine) == {"pending": 1}


# -- S52 ---------------------------------------------------------------------------------------------------------------

LOGIN_AGENT = Path(__file__).parent / "inputs" / "fake_login_agent.py"


def login_agent(home: Path, mode: str, name: str = "cli", **more: Any) -> Any:
    """The stand-in CLI that shares one login with its siblings."""
    (home / "credentials.json").write_text(json.dumps({"refresh": 1, "expires": 0}))
    (home / "server.json").write_text(json.dumps({"refresh": 1, "expires": 0}))
    variables = {"LOGIN_DIR": str(home), "LOGIN_MODE": mode, "LOGIN_TTL": "1"}
    given = {"command": [sys.executable, str(LOGIN_AGENT)], "output": "jsonl", "env": {"set": variables}, **more}
    return build(agent_definition(name, given, base_dir=str(home)))


@pytest.mark.slow
def test_parallel_programs_of_one_login_all_end_done(orc: Orchestrator, engine: Engine, tmp_path: Path) -> None:
    """S52, race: some lose the race for the token and are tried again; none is failed, no retry is used up."""
    add(engine, 40, agent="cli")
    Worker(orc, [login_agent(tmp_path, "race", max_retries=0)], 6).run(until_idle=True)
    assert statuses(engine) == {"done": 40}
    assert query(engine, "SELECT count(*) FROM tasks WHERE retry_count > 0") == [(0,)]


@pytest.mark.slow
def test_a_revoked_login_wastes_no_tasks(
    orc: Orchestrator, engine: Engine, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """S52, revoked: a few starts are wasted, the rest waits; after the login a probe lets the plan go on."""
    add(engine, 20, agent="cli")
    with Working(Worker(orc, [login_agent(tmp_path, "revoked")], 5)):
        wait_until(lambda: "needs_login" in [each.kind for each in orc.reading.alerts()])
        wasted = query(engine, "SELECT count(*) FROM runs")[0][0]
        assert wasted <= 5 + 2
        (tmp_path / "logged_in").touch()
        orc.agent_states.resume("cli", actor="ops")
        wait_until(lambda: statuses(engine) == {"done": 20}, 60)


def test_an_agent_that_is_never_let_in_touches_no_other(
    orc: Orchestrator, engine: Engine, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """S52, bad: its tasks stay where they are behind the breaker, the healthy agent beside it does all of its own."""
    add(engine, 10, agent="cli")
    add(engine, 10, agent="b")
    with Working(Worker(orc, [login_agent(tmp_path, "bad"), FakeAgent("b")], 4)):
        wait_until(lambda: query(engine, "SELECT 1 FROM breakers WHERE kind = 'unauthenticated'"))
        wait_until(lambda: query(engine, "SELECT count(*) FROM tasks WHERE agent = 'b' AND status = 'done'") == [(10,)])
    assert query(engine, "SELECT count(*) FROM tasks WHERE agent = 'cli' AND status <> 'pending'") == [(0,)]
    assert (
        query(engine, "SELECT count(*) FROM runs WHERE task_id IN (SELECT id FROM tasks WHERE agent = 'cli')")[0][0]
        < 10
    )


# -- settings folders --------------------------------------------------------------------------------------------------


def test_each_attempt_has_a_settings_folder_of_its_own(tmp_path: Path) -> None:
    """The first free number; a folder that is given back is taken again."""
    login = Login("l", folder="slots/{slot}", variable="X")
    one, two = take_slot(login, str(tmp_path)), take_slot(login, str(tmp_path))
    assert [one.path, two.path] == [tmp_path / "slots" / "1", tmp_path / "slots" / "2"]
    assert one.path.stat().st_mode & 0o777 == 0o700
    one.free()
    three = take_slot(login, str(tmp_path))
    assert three.path == one.path
    two.free()
    three.free()


def test_a_command_sees_its_settings_folder(tmp_path: Path) -> None:
    """By the variable that its CLI knows, and by another one where it says so."""
    given = {"command": ["sh", "-c", "echo $CODEX_HOME"], "login": {"name": "l", "folder": "h{slot}"}}
    codex = agent_definition("c", {**given, "output": "codex"}, base_dir=str(tmp_path))
    assert codex.login == Login("l", None, 0.0, "h{slot}", "CODEX_HOME")
    named = {**given["login"], "variable": "CODEX_HOME"}  # type: ignore[dict-item]
    outcome = execute_agent(build(agent_definition("c", {**given, "login": named}, base_dir=str(tmp_path))))
    assert outcome.result == str(tmp_path / "h1")


@pytest.mark.parametrize(
    ("login", "said"),
    [
        ({"concurrency": 2}, "name: is missing"),
        ({"name": "l", "concurrency": 0}, "concurrency"),
        ({"name": "l", "folder": "x", "variable": "V"}, "expected {slot} in it"),
        ({"name": "l", "folder": "x{slot}"}, "needs variable"),
        (3, "login"),
    ],
)
def test_a_login_is_checked(login: Any, said: str) -> None:
    """What cannot be is refused by the name of its key."""
    with pytest.raises(InvalidPlan) as caught:
        agent_definition("a", {"command": ["a"], "login": login})
    assert said in str(caught.value)
