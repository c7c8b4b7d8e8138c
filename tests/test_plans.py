"""Plans: what they may say, what becomes of it, and that every fault is told at once with its line."""

from __future__ import annotations

import io
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.given import AgentDefinition, NewTask
from orchestrator.domain.outcome import Budget, RetryPolicy
from orchestrator.errors import InvalidPlan, UnknownAgent
from orchestrator.plans import (
    Plan,
    agent_definition,
    argv_faults,
    load_plan,
    with_results,
)
from tests.plan_files import AGENTS, INPUTS, TOML, YAML, FindFaults, Load, fault_finder, filled, loader


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write a plan file and load it with two configured agents."""
    return loader(tmp_path)


@pytest.fixture
def faults(tmp_path: Path) -> FindFaults:
    """Load a plan that is wrong and return its faults."""
    return fault_finder(tmp_path)


@pytest.mark.parametrize(("name", "text"), [("p.yaml", YAML), ("p.yml", YAML), ("p.toml", TOML)])
def test_everything_that_a_plan_may_say(name: str, text: str, load: Load, tmp_path: Path) -> None:
    """Each key arrives, in YAML as in TOML; params are filled in, quotes of results stay for the claim."""
    plan = load(text, name)
    local = plan.agents["local"]
    assert (plan.name, plan.warnings, plan.refused) == ("nightly", [], [])
    assert local == AgentDefinition(
        name="local",
        hash=local.hash,
        local=True,
        command=("fake", "--model", "{model}", "--", "{prompt}"),
        dir="sub",
        base_dir=str(tmp_path),
        env_set={"CI": "1"},
        env_unset=("X",),
        env_allow=("PATH",),
        env_secret=("TOKEN_OF_ANY",),
        exit_codes={0: "done", 3: "permanent"},
        budget=Budget(seconds=1800),
        max_retries=1,
        retry=RetryPolicy(1, 2, 60),
        line=local.line,
    )
    fix, check = plan.tasks
    assert fix == NewTask(
        agent="local",
        input='Fix tests/test_parser.py. Keep {file} and {"a": {}}.',
        params={"file": "tests/test_parser.py", "model": "small"},
        title="Fix",
        name="fix-parser",
        priority=-3,
        at=datetime(2026, 12, 1, 8, tzinfo=UTC),
        max_retries=0,
        retry=RetryPolicy(initial=0.5),
        budget=Budget(seconds=60),
        unique_key="k",
        concurrency_key="repo",
        tags={"team": "a"},
        definition=local.hash,
        task_hash=fix.task_hash,
        dir=str(tmp_path / "work"),
        line=fix.line,
    )
    assert (check.agent, check.after, check.template, check.definition) == ("review", ("fix-parser",), True, None)
    assert check.input == {"diff_of": "{fix-parser.result}", "{x}": 1}
    assert filled(check, {"fix-parser": {"n": 1}}) == {"diff_of": '{"n": 1}', "{x}": 1}


def test_yaml_and_toml_are_the_same_plan(load: Load) -> None:
    """The hashes cover what is said, not how or where it is written."""
    one, other = load(YAML), load(TOML, "p.toml")
    assert one.hash == other.hash
    assert [task.task_hash for task in one.tasks] == [task.task_hash for task in other.tasks]
    assert [type(each) for each in (one.tasks[1].input, one.tasks[0].params)] == [dict, dict]


def test_hash_of_a_task(load: Load, tmp_path: Path) -> None:
    """Another input, title or agent definition makes another hash; another line or folder does not."""
    first = load(YAML).tasks
    assert load("# a line more\n" + YAML).tasks[0].task_hash == first[0].task_hash
    (tmp_path / "elsewhere").mkdir()
    assert [task.task_hash for task in load(YAML, "elsewhere/q.yaml").tasks] == [task.task_hash for task in first]
    changed = load(YAML.replace("title: Fix", "title: Mend")).tasks
    assert changed[0].task_hash != first[0].task_hash
    assert changed[1].task_hash == first[1].task_hash
    other = load(YAML.replace("--model", "--mode")).tasks
    assert other[0].task_hash != first[0].task_hash
    assert other[0].definition != first[0].definition
    assert other[1].task_hash == first[1].task_hash


# -- placeholders -------------------------------------------------------------------------------------------------------

hostile = st.text(st.sampled_from("{}ab.x$`;' "), max_size=8) | st.sampled_from(["{b}", "{t.result}", "{{a}}", "$(x)"])


@given(a=hostile, result=hostile)
def test_values_never_become_syntax(a: str, result: str) -> None:
    """Whatever a param or a result holds, it arrives as it is: in the first round, in the second, and beside each other."""
    table = {
        "plan": "p",
        "agents": {"x": {"command": ["true"]}},
        "tasks": [
            {"name": "t", "agent": "x", "input": "{a}|{{a}}|{", "params": {"a": a}},
            {"name": "u", "agent": "x", "input": ["{a}|{t.result}|{{a}}|{"], "params": {"a": a}, "after": ["t"]},
        ],
    }
    text = io.StringIO()
    yaml.safe_dump(table, text)
    plan = _from_text(text.getvalue())
    first, second = plan.tasks
    assert (first.input, first.template) == (f"{a}|{{a}}|{{", False)
    assert second.template
    assert filled(second, {"t": result}) == [f"{a}|{result}|{{a}}|{{"]


def _from_text(text: str, **options: Any) -> Plan:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "p.yaml")
        path.write_text(text, encoding="utf-8")
        return load_plan(path, **options)


def test_unknown_placeholders(faults: FindFaults) -> None:
    """Each is told with its line and the nearest known name; a task is quoted by its result alone."""
    found = faults(
        """\
        tasks:
          - {name: one, agent: coder, input: "x"}
          - name: two
            agent: coder
            after: [one]
            params: {file: a, meta: {k: v}}
            input:
              text: "{fiel} {one} {one.reslt} {ona.result} {meta.kk} {if} {{if}}"
        """
    )
    assert {line for line, _ in found} == {7}
    assert [message for _, message in found] == [
        "task 'two': input: " + each
        for each in (
            "placeholder {meta.kk}: meta has no 'kk'; did you mean 'k'?",
            "placeholder {one.reslt}: a task is quoted as {one.result}",
            "placeholder {one}: a task is quoted as {one.result}",
            "unknown placeholder {fiel}; did you mean 'file'? (write {{fiel}} for the literal text)",
            "unknown placeholder {if}; known: file, meta, one.result (write {{if}} for the literal text)",
            "unknown placeholder {ona.result}; did you mean 'one.result'? (write {{ona.result}} for the literal text)",
        )
    ]


def test_placeholders_of_a_command(load: Load, faults: FindFaults) -> None:
    """An argv template knows its own names, the task's params and results; anything else is a fault of that task."""
    text = """\
    agents:
      a: {{command: [run, "{{title}} {{model}} {{workspace}}", "{{one.result.diff}}"]}}
    tasks:
      - {{name: one, agent: coder}}
      - {{name: two, agent: a, after: [one], params: {{{params}: m}}, input: "{{{{x}}}} {{ {{}}"}}
    """
    two = load(text.format(params="model")).tasks[1]
    assert two.template
    assert filled(two, {"one": {"diff": "d"}}) == "{x} { {}"
    assert with_results(two.params, {"one": 1}) == {"model": "m", "one": {"result": 1}}
    [(line, message)] = faults(text.format(params="modle"))
    assert (line, message.split("(")[0]) == (
        5,
        "task 'two': command of agent 'a': unknown placeholder {model}; did you mean 'modle'? ",
    )


def test_argv_faults_for_a_single_task() -> None:
    """The same check serves a task that comes from elsewhere."""
    made = agent_definition("a", {"command": ["run", "{prompt}", "{file}"]})
    assert argv_faults(made, {"file": "x"}) == []
    assert argv_faults(made, None) == [
        "unknown placeholder {file}; did you mean 'title'? (write {{file}} for the literal text)"
    ]


def test_a_param_and_a_task_of_one_name(load: Load, faults: FindFaults) -> None:
    """A placeholder that could mean either is refused; without such a placeholder nothing is wrong."""
    text = (
        "tasks:\n- {{name: a, agent: coder}}\n- {{agent: coder, after: [a], params: {{a: {{result: 1}}}}, input: '{}'}}"
    )
    assert len(load(text.format("x")).tasks) == 2
    assert "could mean the param or the task" in faults(text.format("{a.result}"))[0][1]


def test_hostile_names_are_data(load: Load) -> None:
    """Every hostile name may be a title, a key and a param; it arrives unchanged and says nothing."""
    names = [json.loads(line)["name"] for line in (INPUTS / "hostile-names.jsonl").read_text("utf-8").splitlines()]
    rows = [{"title": name, "unique_key": f"{name}-", "params": {"p": name}, "input": "<{p}>"} for name in names]
    plan = load("".join(json.dumps(row) + "\n" for row in rows), "p.jsonl", agent="coder")
    assert [task.title for task in plan.tasks] == names
    assert [task.input for task in plan.tasks] == [f"<{name}>" for name in names]


# -- faults -------------------------------------------------------------------------------------------------------------


def test_all_faults_at_once_with_lines(faults: FindFaults) -> None:
    """One reading finds what is wrong with agents, keys, kinds, names and order; each with its line."""
    found = faults(
        """\
        agents:
          a:
            command: "run it"
            promt: stdin
          b: {python: nodots, acp: [x]}
        tasks:
          - name: one
            agent: codr
            inptu: x
            depends_on: [x]
          - name: one
            agent: coder
            priority: high
            at: tomorrow
          - agent: a
            name: 12
            after: [nobody]
            max_retries: -1
            tags: {n: 1}
            budget: {seconds: 0, secnds: 1}
            retry: {factor: 0.5}
            approval: maybe
          - agent: coder
            after: [nobody, 0, true]
        """
    )
    assert [line for line, _ in found] == sorted(line for line, _ in found)
    text = "\n".join(f"{line}: {message}" for line, message in found)
    for expected in (
        """3: agent 'a': command: expected a list of arguments; write ["run", "it"], or shell: true""",
        "4: agent 'a': unknown key 'promt'; did you mean 'prompt'?",
        "5: agent 'b': expected exactly one of command, python, http, acp, plugin, found both python and acp",
        "8: task 'one': agent: unknown agent 'codr'; did you mean 'coder'?",
        "9: task 'one': unknown key 'inptu'; did you mean 'input'?",
        "10: task 'one': unknown key 'depends_on'; write after",
        "13: task 'one': priority: expected a whole number, from -2147483648, found 'high'",
        "14: task 'one': at: expected a time such as 2026-12-01T09:00:00+01:00, found 'tomorrow'",
        """16: name: expected text, found 12; put it in quotes: "12\"""",
        "18: max_retries: expected a whole number, 0 or more, found -1",
        """19: tags.n: expected text, found 1; put it in quotes: "1\"""",
        "20: budget.seconds: expected a number, more than 0, found 0",
        "20: budget: unknown key 'secnds'; did you mean 'seconds'?",
        "21: retry.factor: expected a number, 1 or more, found 0.5",
        "22: approval: expected true or false, found 'maybe'",
        "24: after: 0 is not the id of a task",
        "24: after: expected names of tasks, or ids, found true",
    ):
        assert expected in text
    assert "unknown agent 'a'" not in text


def test_order_is_parents_first(load: Load) -> None:
    """Tasks stand behind what they wait for, and else as in the file; a single name and ids may stand in after."""
    plan = load(
        """\
        tasks:
          - {name: e, agent: coder, after: d}
          - {name: b, agent: coder}
          - {name: d, agent: coder, after: [c, b, c, 7]}
          - {name: c, agent: coder}
          - {name: f, agent: coder}
        """
    )
    assert [task.name for task in plan.tasks] == ["b", "c", "d", "e", "f"]
    assert plan.tasks[2].after == ("c", "b", 7)


def test_cycles_and_unknown_parents(faults: FindFaults) -> None:
    """Each cycle is told once with names and lines, an unknown name with the nearest one."""
    assert faults(
        """\
        tasks:
          - {name: a, agent: coder, after: [c]}
          - {name: b, agent: coder, after: [a]}
          - {name: c, agent: coder, after: [b]}
          - {name: self, agent: coder, after: [self]}
          - {name: tail, agent: coder, after: [c]}
          - name: lost
            agent: coder
            after: [tial]
        """
    ) == [
        (2, "after: these tasks wait for each other: 'a' (line 2) → 'b' (line 3) → 'c' (line 4) → 'a'"),
        (5, "after: these tasks wait for each other: 'self' (line 5) → 'self'"),
        (6, "task 'tail': after: the task 'c' has faults itself"),
        (9, "task 'lost': after: there is no task 'tial'; did you mean 'tail'?"),
    ]


def test_long_chains(load: Load, faults: FindFaults) -> None:
    """A chain of 5,000 is put in order without recursion, and closed to a ring it is one short fault."""
    rows = [{"name": f"t{n}", "after": [f"t{n + 1}"] if n < 4_999 else []} for n in range(5_000)]
    plan = load("".join(json.dumps(row) + "\n" for row in rows), "p.jsonl", agent="coder")
    assert [task.name for task in plan.tasks] == [f"t{n}" for n in reversed(range(5_000))]
    rows[-1]["after"] = ["t0"]
    [(_, message)] = faults("".join(json.dumps(row) + "\n" for row in rows), "p.jsonl", agent="coder")
    assert len(message) < 400
    assert "… 4992 more …" in message


def test_equal_names(load: Load, faults: FindFaults) -> None:
    """Equal names are a fault that names the other line, unless the unique key makes them the same task."""
    one, two = '{"name": "n", "unique_key": "k"}\n', '{"name": "n"}\n'
    assert faults("\n" + one + two, "p.jsonl", agent="coder") == [
        (3, "task 'n': name: is already the name of the task in line 2")
    ]
    plan = load(one + one, "p.jsonl", agent="coder")
    assert len(plan.tasks) == 2
    assert plan.warnings == [(2, "unique_key 'k' was already seen in line 1: line 2 adds nothing")]


def test_tasks_that_may_meet_in_a_directory_are_warned_of(load: Load) -> None:
    """S36: two tasks that name one dir: one warning with both lines, none where something keeps them apart."""
    tasks = ["{agent: coder, dir: x}", "{agent: coder, dir: ./x/}", "{agent: coder, dir: x}", "{agent: coder, dir: y}"]
    plan = load("tasks:\n" + "".join(f"  - {task}\n" for task in tasks))
    ((line, said),) = plan.warnings
    assert line == 3
    assert said.startswith("tasks in lines 2 and 3 may work in ")
    for kept in (
        "tasks:\n  - {agent: coder, dir: x, concurrency_key: k}\n  - {agent: coder, dir: x, concurrency_key: k}\n",
        "tasks:\n  - {name: a, agent: coder, dir: x}\n  - {agent: coder, dir: x, after: [a]}\n",
        "agents: {here: {command: [a], workspace: directory}}\ntasks:\n"
        "  - {agent: here, dir: x}\n  - {agent: here, dir: x}\n",
    ):
        assert load(kept).warnings == []


def test_a_link_to_a_directory_is_that_directory(load: Load, tmp_path: Path) -> None:
    """S36: two names of one directory are warned of like one."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    plan = load("tasks:\n  - {agent: coder, dir: real}\n  - {agent: coder, dir: link/}\n")
    ((line, said),) = plan.warnings
    assert line == 3
    assert said.startswith(f"tasks in lines 2 and 3 may work in {tmp_path.resolve() / 'real'} at the same time")


def test_skip_invalid(load: Load) -> None:
    """Faulty tasks and what waits for them are left out and told; the rest is a plan."""
    text = """\
    {"name": "a"}
    {"name": "b", "priority": "x"}
    not json
    {"name": "c", "after": ["b"]}
    {"name": "d", "after": ["c"]}
    {"name": "e", "after": ["a"]}
    """
    plan = load(text, "p.jsonl", agent="coder", skip_invalid=True)
    assert [task.name for task in plan.tasks] == ["a", "e"]
    assert [line for line, _ in plan.refused] == [2, 3, 4, 5]
    assert plan.refused[2:] == [
        (4, "task 'c': after: the task 'b' has faults itself"),
        (5, "task 'd': after: the task 'c' has faults itself"),
    ]


def test_many_faults_are_counted(faults: FindFaults, load: Load) -> None:
    """The message has the first twenty, the error has all."""
    assert len(faults("{}\n" * 50, "p.jsonl")) == 50
    with pytest.raises(InvalidPlan, match=r"p.jsonl: 50 faults\n  line 1: [^$]* and 30 more$"):
        load("{}\n" * 50, "p.jsonl")


def test_agents_have_to_be_known(load: Load) -> None:
    """An unknown --agent is one error; a check that is turned off takes any name."""
    with pytest.raises(UnknownAgent, match="'codr'; did you mean 'coder'"):
        load('{"name": "a"}\n', "p.jsonl", agent="codr")
    assert load('{"agent": "elsewhere"}\n', "p.jsonl", check_agents=False).tasks[0].agent == "elsewhere"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", "a\x00"),
        ("title", "\x00"),
        ("unique_key", "\ud800"),
        ("params", {"k": "\x00"}),
        ("tags", {"\x00": "v"}),
    ],
)
def test_what_cannot_be_stored(field: str, value: Any, faults: FindFaults) -> None:
    """NUL and lone surrogates are refused with the field and the line, wherever they stand."""
    [(line, message), *_] = faults("\n" + json.dumps({field: value}), "p.jsonl", agent="coder")
    assert line == 2
    assert message.startswith(field)
    with pytest.raises(InvalidPlan):
        load_plan("-", agents=AGENTS, agent="coder", stdin=io.BytesIO(b'{"title": "' + b"x" * 20_000 + b'"}'))
