"""Types of agent functions: what an annotation says holds for input and result, and nothing that was produced is lost."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from orchestrator import Orchestrator, Worker
from orchestrator.agents.functions import AgentFunction
from orchestrator.agents.functions import agent as as_agent
from orchestrator.agents.python import PythonAgent
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput
from tests import typed_functions as functions
from tests.commands import Cli
from tests.running import a_claim, execute, run_async
from tests.typed_functions import Line, Order
from tests.working import orchestrator, query, statuses

ORDER = {"number": 7, "lines": [{"item": "a", "count": 2}, {"item": "b"}], "due": "2026-12-01"}
CONFIG = """
[agents.bill]
python = "tests.typed_functions:bill"

[agents.gone]
python = "tests.not_there:at_all"
"""


@pytest.fixture
def orc(database_url: str) -> Iterator[Orchestrator]:
    """An orchestrator of the test's own."""
    with orchestrator(database_url) as made:
        yield made


def run(function: AgentFunction[..., Any], value: Any) -> Outcome:
    """One execution with *value* as its input."""
    made = PythonAgent.from_function(function)
    try:
        return execute(made, a_claim(input=value))
    finally:
        run_async(made.aclose)


@pytest.mark.parametrize("function", [functions.bill, functions.bill_apart], ids=["loop", "child"])
def test_input_and_result_are_what_the_annotations_say(function: AgentFunction[..., Any]) -> None:
    """The function gets a dataclass with parts, and the run gets the model's fields as JSON."""
    outcome = run(function, ORDER)
    assert (outcome.status, outcome.message) == (OutcomeClass.DONE, None)
    assert outcome.result == {"number": 7, "total": 3.0}


@pytest.mark.parametrize("function", [functions.bill, functions.bill_apart], ids=["loop", "child"])
def test_an_input_of_another_shape_fails_for_good(function: AgentFunction[..., Any]) -> None:
    """The function is not called; the message names the type and each field, with what was found there."""
    outcome = run(function, {"number": "seven", "lines": [{"count": 1}]})
    assert (outcome.status, outcome.cause) == (OutcomeClass.PERMANENT, "bad_input")
    message = outcome.message or ""
    assert message.startswith("input: expected Order: number: ")
    assert "found 'seven'" in message
    assert "lines.0.item: Field required" in message


@pytest.mark.parametrize("function", [functions.says, functions.says_apart], ids=["loop", "child"])
@pytest.mark.parametrize("returned", [{"number": 1, "total": -2}, {"no": "number"}, "text", None, [1]])
def test_a_result_of_another_shape_fails_and_is_kept(function: AgentFunction[..., Any], returned: Any) -> None:
    """It breaks a rule of the model, has other fields or is no object at all: the run has it all the same."""
    outcome = run(function, returned)
    assert (outcome.status, outcome.cause) == (OutcomeClass.PERMANENT, "bad_result")
    assert (outcome.message or "").startswith("result: expected Receipt: ")
    assert outcome.result == returned


@pytest.mark.parametrize("function", [functions.says, functions.says_apart], ids=["loop", "child"])
def test_what_can_be_read_as_the_result_is_taken(function: AgentFunction[..., Any]) -> None:
    """A mapping with the right fields will do, and is stored as the model has it."""
    outcome = run(function, {"number": "5", "total": 1})
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, {"number": 5, "total": 1.0})


def test_types_inside_of_types() -> None:
    """Lists of dataclasses, in and out."""
    outcome = run(functions.lines, [{"item": "x"}])
    assert outcome.result == [{"number": 1, "lines": [{"item": "x", "count": 1}], "due": None}]
    assert run(functions.lines, {"item": "x"}).cause == "bad_input"


@pytest.mark.parametrize("function", [functions.loose, functions.unknown_result])
def test_what_says_little_is_left_alone(function: AgentFunction[..., Any]) -> None:
    """Any, dict, and names that only a type checker knows: nothing is checked."""
    outcome = run(function, {"a": "no number"})
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, {"a": "no number"})


def test_an_input_type_that_nobody_knows_is_refused() -> None:
    """It was asked for and cannot be kept: said when the agent is made, with the way out."""
    with pytest.raises(InvalidInput, match=r"Context\[Unknown\]") as refused:
        PythonAgent.from_function(as_agent("it")(functions.unknown_input))
    assert "TYPE_CHECKING" in (refused.value.hint or "")


def test_a_bad_result_is_in_the_run_and_not_in_the_task(orc: Orchestrator, engine: Engine) -> None:
    """Through the database: the task has failed and has no result; what was produced is in its run."""
    orc.add("says", {"no": "number"})
    Worker(orc, [functions.says]).run(until_idle=True)
    assert statuses(engine) == {"failed": 1}
    assert query(engine, "SELECT error_cause, result FROM tasks") == [("bad_result", None)]
    assert query(engine, "SELECT status, result FROM runs") == [("permanent", {"no": "number"})]


def test_added_by_its_function(orc: Orchestrator, engine: Engine) -> None:
    """The function instead of its name: an input of its type is stored as JSON, one that fits as well."""
    orc.add(functions.bill, Order(7, [Line("a", 2)], date(2026, 12, 1)), title="by type")
    orc.add_many([{"agent": functions.bill, "input": {"number": "8", "lines": []}}])
    assert query(engine, "SELECT agent, input FROM tasks ORDER BY id") == [
        ("bill", {"number": 7, "lines": [{"item": "a", "count": 2}], "due": "2026-12-01"}),
        ("bill", {"number": 8, "lines": [], "due": None}),
    ]
    Worker(orc, [functions.bill]).run(until_idle=True)
    assert statuses(engine) == {"done": 2}


@pytest.mark.parametrize("wrong", [{"number": 7}, Order("x", []), "text", None])  # type: ignore[arg-type]
def test_a_wrong_input_is_refused_at_add(orc: Orchestrator, engine: Engine, wrong: Any) -> None:
    """All or nothing: the good ones beside it are not added either."""
    with pytest.raises(InvalidInput, match="input of agent 'bill': expected Order: "):
        orc.add_many([{"agent": functions.bill, "input": ORDER}, {"agent": functions.bill, "input": wrong}])
    assert query(engine, "SELECT count(*) FROM tasks") == [(0,)]


def test_the_command_line_checks_what_it_adds(cli: Cli, engine: Engine) -> None:
    """By the annotation of the configured function, if it can be imported here; else its worker will."""
    cli.config(CONFIG)
    said = cli("add", "bill", "--input", "text", code=2)
    assert "input of agent 'bill': expected Order" in said.err
    assert query(engine, "SELECT count(*) FROM tasks") == [(0,)]
    cli("add", "gone", "--input", "text")


def test_a_plan_with_a_wrong_input_names_its_line(cli: Cli, engine: Engine) -> None:
    """Refused whole, with the line; a template is only known when it is filled, and is left to the worker."""
    cli.config(CONFIG)
    good = '{"agent": "bill", "input": {"number": 1, "lines": []}}\n'
    plan = cli.write("plan.jsonl", good + '{"agent": "bill", "input": {"number": 1}}\n')
    said = cli("submit", plan, code=2)
    assert "line 2" in said.err
    assert "lines: Field required" in said.err
    assert query(engine, "SELECT count(*) FROM tasks") == [(0,)]
    cli("submit", cli.write("good.jsonl", good))


def test_the_folder_of_a_definition_is_where_its_module_is_found(tmp_path: Path) -> None:
    """What cannot be imported here is not refused here."""
    from orchestrator.agents.python import input_fault
    from orchestrator.plans import agent_definition

    (tmp_path / "module_of_a_plan.py").write_text(
        "import dataclasses, orchestrator\n"
        "print('imported')\n"
        "@dataclasses.dataclass\nclass In:\n    n: int\n"
        "async def work(ctx: orchestrator.Context[In]) -> None: ...\n"
    )
    made = agent_definition("a", {"python": "module_of_a_plan:work"}, base_dir=str(tmp_path))
    assert input_fault(made, {"n": 1}) is None
    assert input_fault(made, {}) == "expected In: n: Field required"
    assert input_fault(agent_definition("a", {"python": "module_of_nobody:work"}), {}) is None
