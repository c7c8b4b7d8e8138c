"""Budgets of tokens, USD and turns: judged from live usage, over all attempts of a task, with prices where needed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from orchestrator import Orchestrator, Worker
from orchestrator.agents.building import build
from orchestrator.agents.functions import Context, agent
from orchestrator.agents.protocol import AgentDefaults, Live, Stop
from orchestrator.agents.python import PythonAgent
from orchestrator.domain.outcome import Budget, Claim, Outcome, Usage
from orchestrator.domain.prices import Prices
from orchestrator.domain.words import OnLimit, OutcomeClass
from orchestrator.errors import InvalidInput, InvalidPlan
from orchestrator.plans import agent_definition, load_plan
from orchestrator.settings import Settings
from tests.running import FAKE, Heard, a_claim
from tests.working import QUICK, FakeAgent, orchestrator, query

PRICES = {"m": {"input": 10.0, "output": 100.0, "cached": 1.0}}
DONE = Outcome(OutcomeClass.DONE)
STREAMS = Path(__file__).parent / "inputs" / "usage-streams"


class Reporting:
    """A behaviour that reports totals of its usage, one each turn of the loop, until it is stopped."""

    def __init__(self, *used: Usage, tools: bool = False) -> None:
        self.used = used
        self.tools = tools
        self.reported = 0

    async def __call__(self, _claim: Claim, live: Live, stop: Stop) -> Outcome:
        for usage in self.used:
            live.usage(usage)
            self.reported += 1
            if self.tools:
                live.activity("bash")
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                if stop.reason is not None:
                    return Outcome(stop.reason, message=stop.message, usage=usage)
                live.activity(None)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if stop.reason is not None:
                return Outcome(stop.reason, message=stop.message, usage=usage)
        return Outcome(OutcomeClass.DONE, usage=self.used[-1] if self.used else None)


def run(
    behave: Any,
    budget: Budget,
    *,
    prices: dict[str, dict[str, float]] | None = None,
    model: str | None = None,
    meter: dict[str, Any] | None = None,
    heard: Heard | None = None,
) -> Outcome:
    """Execute one attempt as a worker does; no database is asked."""
    doing = FakeAgent(behave=behave)
    doing.defaults = AgentDefaults(model=model)
    orc = Orchestrator("postgresql://nowhere/none", settings=Settings(prices=prices or {}))
    claim = a_claim(budget=budget, meter=meter)

    async def once() -> Outcome:
        return await orc.execute(claim, doing, heard or Heard(), Stop())

    return asyncio.run(once())


def tokens(*totals: int) -> list[Usage]:
    """Reports of totals, a turn each."""
    return [Usage(total_tokens=total, turns=turn) for turn, total in enumerate(totals, 1)]


# -- at the limit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "said", "cause"),
    [
        (Budget(tokens=4000), "its budget of 4,000 tokens is used up (4,000 tokens)", "budget_tokens"),
        (Budget(usd=0.35), "its budget of $0.35 is used up ($0.40)", "budget_usd"),
        (Budget(turns=3), "its budget of 3 turns is used up (4 turns)", "budget_turns"),
    ],
)
def test_at_its_limit_an_attempt_is_ended(budget: Budget, said: str, cause: str) -> None:
    """With ``fail`` the report that reaches a limit is the last one; the outcome says which limit, and by how much."""
    reports = [Usage(total_tokens=1000 * n, cost_usd=0.1 * n, turns=n) for n in range(1, 10)]
    behave = Reporting(*reports)
    outcome = run(behave, budget)
    assert (outcome.status, outcome.cause, outcome.message) == (OutcomeClass.OVER_BUDGET, cause, said)
    assert behave.reported == 4
    assert outcome.usage is not None
    assert outcome.usage.total_tokens == 4000


def test_there_is_a_notice_at_80_percent() -> None:
    """Once, in the transcript and in the notes of the run; no notice where a limit is far."""
    heard = Heard()
    outcome = run(Reporting(*tokens(700, 850, 900)), Budget(tokens=1000, turns=100), heard=heard)
    assert outcome.status is OutcomeClass.DONE
    assert outcome.notes == ("85% of its budget of 1,000 tokens is used",)
    assert heard.written == [("note", "85% of its budget of 1,000 tokens is used")]


def test_a_turn_is_finished_when_its_tools_have_ended() -> None:
    """With ``finish_turn`` the tool that was started runs to its end; then the attempt ends, before another turn."""
    behave = Reporting(*tokens(500, 1200, 1300), tools=True)
    outcome = run(behave, Budget(tokens=1000, on_limit=OnLimit.FINISH_TURN))
    assert behave.reported == 2
    assert outcome.status is OutcomeClass.OVER_BUDGET
    assert outcome.usage is not None
    assert outcome.usage.total_tokens == 1200


def test_an_agent_without_tools_is_ended_at_its_next_turn() -> None:
    """Where no tool is told of, the next report of a later turn is where the turn was over; the same turn goes on."""
    reports = [Usage(total_tokens=total, turns=turn) for total, turn in ((900, 1), (1100, 2), (1150, 2), (1400, 3))]
    behave = Reporting(*reports, *tokens(5000))
    assert run(behave, Budget(tokens=1000, on_limit=OnLimit.FINISH_TURN)).status is OutcomeClass.OVER_BUDGET
    assert behave.reported == 4


def test_the_last_turn_may_be_the_one_that_answers() -> None:
    """An agent that ends by itself in the turn that it may finish is done, and the run says how much it used."""
    outcome = run(Reporting(*tokens(900, 1100)), Budget(tokens=1000, on_limit=OnLimit.FINISH_TURN))
    assert outcome.status is OutcomeClass.DONE
    assert (
        outcome.notes[-1] == "its budget of 1,000 tokens is used up (1,100 tokens), and it ended before it was stopped"
    )


def test_a_result_that_is_given_with_the_last_report_counts() -> None:
    """A function that reports its usage and returns has done its work: the result is not thrown away."""

    @agent("f")
    async def f(ctx: Context) -> str:
        ctx.usage(tokens=5000)
        return "paid for"

    outcome = run(PythonAgent.from_function(f).execute, Budget(tokens=1000))
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, "paid for")
    assert outcome.notes == (
        "its budget of 1,000 tokens is used up (5,000 tokens), and it ended before it was stopped",
    )


def test_what_earlier_attempts_used_counts() -> None:
    """The sum travels with the meter: the second attempt has what the first one left, the third does not begin."""
    budget = Budget(tokens=4000)
    first = run(Reporting(*tokens(1000, 3000)), budget)
    assert first.usage is not None
    behave = Reporting(*tokens(600, 900, 1200, 1500))
    second = run(behave, budget, meter=first.usage.carry)
    assert (second.status, behave.reported) == (OutcomeClass.OVER_BUDGET, 3)
    assert second.usage is not None
    behave = Reporting(*tokens(1))
    third = run(behave, budget, meter=second.usage.carry)
    assert (third.status, behave.reported) == (OutcomeClass.OVER_BUDGET, 0)
    assert third.message == "its budget of 4,000 tokens is used up (4,200 tokens) by earlier attempts"


# -- prices ------------------------------------------------------------------------------------------------------------


def test_tokens_get_their_price() -> None:
    """Input, output and what came from a cache each by their own price; by the model, with or without its date."""
    prices = Prices(Settings(prices=PRICES).prices)
    used = Usage(input_tokens=1_000_000, output_tokens=100_000, cached_tokens=400_000, model="m-20260101")
    priced = prices.priced(used)
    assert priced.cost_usd == pytest.approx(6.0 + 0.4 + 10.0)
    assert priced.cost_source == "priced"
    assert prices.priced(Usage(output_tokens=10), "m").cost_usd == pytest.approx(0.001)


@pytest.mark.parametrize(
    "used",
    [
        Usage(input_tokens=5, model="other"),
        Usage(input_tokens=5),
        Usage(total_tokens=5, model="m"),
        Usage(model="m"),
        Usage(),
    ],
)
def test_what_has_no_price_costs_an_unknown_amount(used: Usage) -> None:
    """Another model, no model, a sum that nobody can split, nothing at all: null, and not 0."""
    assert Prices(PRICES).priced(used).cost_usd is None


def test_a_reported_cost_stays() -> None:
    """What the agent says that it cost is not worked out again."""
    used = Usage(input_tokens=5, cost_usd=3.0, cost_source="reported", model="m")
    assert Prices(PRICES).priced(used) is used


def test_a_cap_in_usd_holds_for_an_agent_that_reports_tokens() -> None:
    """The price makes USD of its tokens while it runs, and of the run at its end."""
    reports = [Usage(input_tokens=n * 50_000, output_tokens=0, total_tokens=n * 50_000) for n in range(1, 6)]
    behave = Reporting(*reports)
    heard = Heard()
    outcome = run(behave, Budget(usd=1.2), prices=PRICES, model="m", heard=heard)
    assert (outcome.status, behave.reported) == (OutcomeClass.OVER_BUDGET, 3)
    assert outcome.usage is not None
    assert outcome.usage.cost_usd == pytest.approx(1.5)
    assert outcome.usage.cost_source == "priced"
    assert heard.used[0].cost_usd == pytest.approx(0.5)


def test_a_cap_that_could_not_be_judged_is_told() -> None:
    """Tokens without a cost and without a price: the run says that its budget of USD was not judged."""
    outcome = run(Reporting(*tokens(10)), Budget(usd=1.5))
    assert outcome.notes == ("what it cost is not known: its budget of $1.50 was not judged",)


@pytest.mark.parametrize(
    ("prices", "said"),
    [
        ({"m": {"input": 1}}, "prices.m: output is missing"),
        ({"m": {"input": 1, "output": -1}}, "prices.m.output: expected USD for a million tokens, found -1"),
        ({"m": {"input": 1, "output": True}}, "prices.m.output"),
        ({"m": {"input": 1, "outputs": 1}}, "unknown key 'prices.m.outputs'; did you mean 'output'"),
        ({"m": 3}, "prices.m: expected a table, found 3"),
    ],
)
def test_a_price_is_checked(prices: dict[str, Any], said: str) -> None:
    """A table that cannot be is refused by the name of its key."""
    with pytest.raises(InvalidInput, match=said.replace("?", ".").replace(".", r".")):
        Settings(prices=prices)


def plan(tmp_path: Path, text: str) -> Path:
    """A plan file."""
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return path


def test_a_cap_in_usd_without_a_price_is_refused_at_submit(tmp_path: Path) -> None:
    """Where an agent reports tokens only: by line, with the agent, the model, and what to write."""
    text = """agents:
  a: {command: [codex, exec, --json], output: codex}
  b: {command: [codex, exec, --json], output: codex, model: gpt-5, budget: {usd: 2}}
  c: {command: [claude, -p], output: claude, budget: {usd: 2}}
  d: {command: [codex, exec, --json], output: codex, model: m, budget: {usd: 2}}
tasks:
  - {agent: a, budget: {usd: 1}}
  - {agent: d}
"""
    with pytest.raises(InvalidPlan) as caught:
        load_plan(plan(tmp_path, text), prices=PRICES)
    first, second = caught.value.faults
    assert first[0] == 3
    assert "agent 'b': budget.usd: no price of model 'gpt-5' is known" in first[1]
    assert '[prices."gpt-5"] input = …, output = …' in first[1]
    assert second[0] == 7
    assert "agent 'a': codex reports tokens and no cost" in second[1]
    assert "model: NAME" in second[1]


def test_add_refuses_a_cap_without_a_price(database_url: str, engine: Engine) -> None:
    """The same by Python, for an agent that the configuration knows; nothing is added. With a price it is taken."""
    agents = {"codex": {"command": ["codex", "exec"], "output": "codex", "model": "m"}}
    with orchestrator(database_url, Settings(agents=agents)) as orc, pytest.raises(InvalidInput, match=r"model 'm'"):
        orc.add("codex", budget_usd=1.5)
    assert query(engine, "SELECT count(*) FROM tasks") == [(0,)]
    with orchestrator(database_url, Settings(agents=agents, prices=PRICES)) as orc:
        orc.add("codex", budget_usd=1.5)
    assert query(engine, "SELECT budget_usd FROM tasks") == [(1.5,)]


# -- through the database ----------------------------------------------------------------------------------------------


@pytest.fixture
def orc(database_url: str) -> Iterator[Orchestrator]:
    """An orchestrator on the test's database."""
    with orchestrator(database_url, QUICK) as made:
        yield made


def fake(*arguments: str, output: str = "claude", **more: Any) -> Any:
    """The stand-in agent as a command agent."""
    given = {"command": [*FAKE, *arguments], "output": output, **more}
    return build(agent_definition("fake", given, base_dir=str(STREAMS)))


def test_a_command_is_ended_in_the_middle(orc: Orchestrator, engine: Engine) -> None:
    """S34: a CLI that streams its usage is killed at its budget; tokens are kept, its cost stays unknown."""
    task = orc.add("fake", budget_tokens=4500)
    Worker(orc, [fake("usage-then-hang", max_retries=3)], 1).run(until_idle=True)
    (run_row,) = query(engine, "SELECT status, cause, total_tokens, cost_usd, usage_complete FROM runs")
    assert tuple(run_row) == ("over_budget", "budget_tokens", 5000, None, False)
    shown = orc.reading.task(task.id)
    assert (shown["status"], shown["error"]["class"]) == ("failed", "over_budget")


STEPS = """
import os, sys, time
attempt = os.environ["ORCHESTRATOR_ATTEMPT"]
for number, line in enumerate(open(f"{sys.argv[1]}-{attempt}.jsonl"), 1):
    print(line, end="", flush=True)
    if attempt == "2" and number == 3:
        time.sleep(600)
sys.exit(75)
"""


@pytest.mark.parametrize("kind", ["delta", "process_total", "session_total", "mixed", "reset"])
def test_the_budget_of_a_resumed_session_ends_it_at_the_third_report(
    orc: Orchestrator, engine: Engine, kind: str
) -> None:
    """S50: whatever the counter, 4,000 tokens are reached at 4,200, in the second attempt's third report."""
    task = orc.add(kind, budget_tokens=4000)
    definition = {
        "command": [sys.executable, "-c", STEPS, str(STREAMS / kind)],
        "output": "jsonl",
        "retry": {"initial": 0.01, "max": 0.01},
    }
    Worker(orc, [build(agent_definition(kind, definition, base_dir=str(STREAMS)))], 1).run(until_idle=True)
    runs = query(engine, "SELECT status, total_tokens FROM runs ORDER BY attempt")
    assert [tuple(each) for each in runs] == [("transient", 3000), ("over_budget", 1200)]
    assert orc.reading.task(task.id)["usage"]["total_tokens"] == 4200


def test_a_person_who_retries_gives_the_budget_again(orc: Orchestrator, engine: Engine) -> None:
    """What was spent is forgotten by ``retry``, and by nothing else; what the meter knows of sessions stays."""
    task = orc.add("a", budget_tokens=100)
    behave = Reporting(*tokens(150))
    worked = Worker(orc, [FakeAgent(behave=behave)], 1)
    behave.used = tuple(tokens(150, 160))
    worked.run(until_idle=True)
    assert orc.get(task.id).status == "failed"
    query(engine, "UPDATE tasks SET meter = meter || jsonb_build_object('session', 's')")
    orc.retry(task.id)
    assert query(engine, "SELECT meter FROM tasks") == [({"session": "s"},)]
    behave.used = tuple(tokens(50))
    Worker(orc, [FakeAgent(behave=behave)], 1).run(until_idle=True)
    assert orc.get(task.id).status == "done"


def test_a_person_may_give_more(orc: Orchestrator, engine: Engine) -> None:
    """With ``ask`` the task waits with a question; approved, the next attempt has the whole of what was granted."""
    task = orc.add("a", budget_tokens=100, on_limit="ask")
    behave = Reporting(*tokens(150, 160))
    Worker(orc, [FakeAgent(behave=behave)], 1).run(until_idle=True)
    assert orc.get(task.id).status == "waiting"
    ((kind, question, grants),) = query(engine, "SELECT kind, question, grants FROM questions")
    assert (kind, grants) == ("budget", {"tokens": 150})
    assert question == "Its budget of 100 tokens is used up (150 tokens). May it use 150 tokens more?"
    orc.approve(task.id)
    behave.used = tuple(tokens(90))
    Worker(orc, [FakeAgent(behave=behave)], 1).run(until_idle=True)
    assert query(engine, "SELECT status, budget_tokens FROM tasks") == [("done", 250)]


def test_an_agent_gives_its_budget_to_its_tasks(orc: Orchestrator, engine: Engine) -> None:
    """Tokens, USD, turns and what happens then come from the agent where the task says nothing."""
    orc.add("a")
    doing = FakeAgent()
    doing.defaults = AgentDefaults(budget=Budget(tokens=5, usd=1.5, turns=7, on_limit=OnLimit.FINISH_TURN))
    Worker(orc, [doing], 1).run(until_idle=True)
    rows = query(engine, "SELECT budget_tokens, budget_usd, budget_turns, on_limit FROM tasks")
    assert [tuple(row) for row in rows] == [(5, 1.5, 7, "finish_turn")]


def test_the_carried_sum_is_json() -> None:
    """What travels is a small JSON object."""
    outcome = run(Reporting(*tokens(10)), Budget(usd=5, tokens=100))
    assert outcome.usage is not None
    assert json.loads(json.dumps(outcome.usage.carry)) == {"spent": [10, None, 1]}
