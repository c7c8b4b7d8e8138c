"""Plan files as text: YAML, TOML, JSON lines, and the lists of other tools."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.errors import InvalidInput, InvalidPlan
from orchestrator.plans import agent_definition, core_yaml, load_plan
from tests.plan_files import AGENTS, INPUTS, YAML, FindFaults, Load, fault_finder, filled, loader


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write a plan file and load it with two configured agents."""
    return loader(tmp_path)


@pytest.fixture
def faults(tmp_path: Path) -> FindFaults:
    """Load a plan that is wrong and return its faults."""
    return fault_finder(tmp_path)


@pytest.mark.parametrize(
    ("data", "line", "says"),
    [
        (b"tasks:\n\t- name: a\n", 2, "a tab stands in the indentation"),
        (b"tasks: []\nplan: a\nplan: b\n", 3, "the key 'plan' stands here again, first in line 2"),
        (b"plan: caf\xe9\n", 1, "is not UTF-8 text (byte 0xe9)"),
        ("plan: x".encode("utf-16"), 1, "is UTF-16"),
        (b"plan: a\n# \x00\n", 2, "the control character U+0000"),
        (b"tasks:\n  - !!python/object/apply:os.system [id]\n", 2, "the tag !!python/object/apply:os.system"),
        (b"plan: !mine x\n", 1, "the tag !mine is not supported"),
        (b"plan: a\n---\nplan: b\n", 2, "second document"),
        (b"- name: a\n", 1, "a list of tasks has to stand under tasks:"),
        (b"tasks: {a: {agent: coder}}\n", 1, "expected a list of tasks, found a table"),
        (b"tasks:\n- a\n", 2, "expected a task with its keys, found 'a'"),
        (b"tasks: [\n", 2, "is not YAML"),
        (b"plan: &a [*a]\n", 1, "stands inside of what it names"),
        (b"a: " + b"[" * 20_000, 0, ""),
        (b"task: []\n", 1, "unknown key 'task'; write tasks"),
        (b"? [a]\n: b\n", 1, "a key has to be plain text"),
    ],
)
def test_broken_yaml(data: bytes, line: int, says: str, tmp_path: Path) -> None:
    """What is wrong with the text itself is a fault with its line, and nothing in it is ever run."""
    path = tmp_path / "p.yaml"
    path.write_bytes(data)
    with pytest.raises(InvalidPlan) as caught:
        load_plan(path, agents=AGENTS)
    assert any(says in message and line in (0, at) for at, message in caught.value.faults), caught.value.faults


def test_aliases(load: Load, faults: FindFaults) -> None:
    """Anchors and merges work; a document that unfolds to many times its size is refused."""
    plan = load(
        """\
        x-common: &common {agent: coder, priority: 1, tags: &tags {a: b}}
        tasks:
          - {<<: *common, name: a, priority: 2}
          - {<<: [*common, {title: t}], name: b}
        """
    )
    assert [(task.agent, task.priority, task.title, task.tags) for task in plan.tasks] == [
        ("coder", 2, None, {"a": "b"}),
        ("coder", 1, "t", {"a": "b"}),
    ]
    bomb = "x-0: &a0 [x, x]\n" + "".join(f"x-{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    assert "unfold to many times" in faults(bomb)[0][1]


def test_yaml_scalars(load: Load) -> None:
    """Scalars follow YAML 1.2: yes, on, times and dates are text; numbers, null and true are what they look like."""
    [task] = load(
        """\
        tasks:
          - agent: coder
            input: [yes, on, 12:30:00, 2026-01-01, 010, 1_000, 0x1f, 0o17, -3, 1.5, 1e3, ~, null, true, "true", .5]
        """
    ).tasks
    assert task.input == [
        *("yes", "on", "12:30:00", "2026-01-01", 10, "1_000", 31, 15, -3, 1.5, 1000.0, None, None, True, "true", 0.5)
    ]


def test_without_libyaml(monkeypatch: pytest.MonkeyPatch, load: Load, faults: FindFaults) -> None:
    """The loader written in Python gives the same plan and faults with lines."""
    plan = load(YAML)
    pure = type("Pure", (yaml.SafeLoader,), {"yaml_implicit_resolvers": core_yaml._Loader.yaml_implicit_resolvers})
    monkeypatch.setattr(core_yaml, "_Loader", pure)
    assert load(YAML) == plan
    assert faults("tasks:\n\t- name: a\n") == [(2, "a tab stands in the indentation; YAML wants spaces")]
    assert "nested too deeply" in faults("a: " + "[" * 20_000)[0][1]


def test_toml_lines(faults: FindFaults) -> None:
    """Keys of tables, of arrays of tables, dotted, quoted, and behind multi-line values are found."""
    found = faults(
        '''\
        plan = """
        [[tasks]]
        nmae = 1 \\""" """ # three

        [agents."a b"]
        command = [
          "x", # ]
          "[",
        ]
        promt = 1
        [agents.c.env]
        sett = 1
        [[tasks]]
        agent = "coder"
        input = \'\'\'
        oops = 1
        \'\'\'
        [tasks.budget]
        secs = 1
        [[tasks]]
        agent = "codr"
        retry.inital = 1
        ''',
        "p.toml",
    )
    assert [
        (line, message.split("'")[1::2][-2 if "mean" in message else -1]) for line, message in found if "unk" in message
    ] == [
        (10, "promt"),
        (12, "sett"),
        (19, "secs"),
        (21, "codr"),
        (22, "inital"),
    ]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a = 1\nb = \n", 2, "is not TOML"),
        ("a = 1\na = 2\n", 2, "is not TOML"),
        ("a = 1\nb = " + "9" * 5000, 2, "holds a number of more digits"),
        ('a = """\n\n', 3, "is not TOML"),
    ],
)
def test_broken_toml(text: str, line: int, says: str, faults: FindFaults) -> None:
    """A syntax fault has its line."""
    [(found, message)] = faults(text, "p.toml")
    assert says in message
    assert found in (line, line + 1)


def test_json_lines_faults(tmp_path: Path) -> None:
    """Every broken line is told, and does not hide the next; blank lines, CRLF and a byte order mark are fine."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"name": "a"}\r\n\n[1]\n{"name": \n{"name": "b", "name": "c"}\ncaf\xe9\n'
        b'{"input": NaN}\n{"inptu": 1}\n' + b"[" * 100_000 + b'\n{"input": 1' + b"0" * 5_000 + b"}\n"
    )
    with pytest.raises(InvalidPlan) as caught:
        load_plan(path, agents=AGENTS, agent="coder")
    assert [line for line, _ in caught.value.faults] == [3, 4, 5, 6, 7, 8, 9, 10]
    assert caught.value.hint is not None
    assert "--map" in caught.value.hint


def test_standard_input() -> None:
    """A dash reads JSON lines from standard input."""
    plan = load_plan("-", agents=AGENTS, agent="coder", stdin=io.BytesIO(b'{"input": "x"}\n'))
    assert (plan.name, plan.tasks[0].input) == ("stdin", "x")
    assert load_plan("-", agents=AGENTS, agent="coder", plan_name="mine", stdin=io.BytesIO(b"")).name == "mine"


@pytest.mark.parametrize("name", ["plan.txt", "gone.yaml", "gone.jsonl"])
def test_files_that_are_no_plan(name: str, tmp_path: Path) -> None:
    """A suffix that says nothing, and a file that is not there, are errors of the input."""
    with pytest.raises(InvalidPlan, match=r"cannot tell the format|cannot be read: No such file"):
        load_plan(tmp_path / name)


@pytest.mark.parametrize(("name", "text"), [("p.yaml", ""), ("p.yaml", "tasks: []"), ("p.toml", ""), ("p.jsonl", "\n")])
def test_a_plan_with_no_tasks(name: str, text: str, load: Load) -> None:
    """Nothing to do is no fault, but is told."""
    plan = load(text, name)
    assert (plan.tasks, plan.warnings, plan.name) == ([], [(0, "the plan has no tasks")], "p")


# -- foreign lists ------------------------------------------------------------------------------------------------------

MAP = {"input": "problem_statement", "unique_key": "instance_id"}


def test_an_instance_list_as_it_is() -> None:
    """Mapped text is data to the last character; a repeated key is a warning that names both lines."""
    rows = [json.loads(line) for line in (INPUTS / "instances.jsonl").read_text("utf-8").splitlines()]
    plan = load_plan(INPUTS / "instances.jsonl", agents=AGENTS, agent="coder", map=MAP)
    assert [task.input for task in plan.tasks] == [row["problem_statement"] for row in rows]
    assert [task.unique_key for task in plan.tasks] == [row["instance_id"] for row in rows]
    assert not any(task.template for task in plan.tasks)
    assert plan.warnings == [(4, "unique_key 'borealis__queue-9' was already seen in line 3: line 4 adds nothing")]


def test_without_map_foreign_fields_are_faults() -> None:
    """The same list without a mapping is refused, and the hint says what to do."""
    with pytest.raises(InvalidPlan, match="unknown key 'problem_statement'") as caught:
        load_plan(INPUTS / "instances.jsonl", agents=AGENTS, agent="coder")
    assert caught.value.hint is not None


def test_what_a_map_may_say(load: Load) -> None:
    """Paths reach inside, objects stay JSON, numbers become text where text is wanted, all else is ignored."""
    row = {
        "id": 7,
        "a": {"b": [{"x": "{secrets} {{x}}"}]},
        "a.b": 1,
        "agent": "ignored",
        "name": 5,
        "NaN": float("nan"),
    }
    [task] = load(
        json.dumps(row),
        "p.jsonl",
        agent="coder",
        map={"unique_key": "id", "input": "a", "params.k": "a.b", "tags.id": "id", "title": "a.b.0.x"}
        | {"title": "a.b"},
    ).tasks
    assert (task.unique_key, task.input, task.params, task.tags, task.title, task.agent, task.name) == (
        *("7", row["a"], {"k": 1}, {"id": "7"}, "1", "coder", None),
    )
    [deep] = load(json.dumps(row), "p.jsonl", agent="coder", map={"input": "a.b.0.x"}).tasks
    assert (deep.input, deep.template) == ("{secrets} {{x}}", False)
    [literal] = load('{"a": "{{x}}"}', "p.jsonl", agent="coder", map={"input": "a"}).tasks
    assert literal.input == "{{x}}"


def test_mapped_text_beside_a_template(load: Load) -> None:
    """Even when the command quotes a result, mapped braces come through as they are."""
    made = agent_definition("a", {"command": ["run", "{first.result}"]})
    rows = [
        {"n": "first", "w": [], "i": "{first.result} {{x}}"},
        {"n": "b", "w": ["first"], "i": "{first.result} {{x}}"},
    ]
    plan = load(
        "".join(json.dumps(row) + "\n" for row in rows),
        "p.jsonl",
        agent="a",
        agents={"a": replace(made, command=("run", "{first.result}"))},
        map={"name": "n", "after": "w", "input": "i"},
        skip_invalid=True,
    )
    assert plan.tasks == []
    plan = load(
        json.dumps({"n": "first", "w": [], "i": "x", "g": "coder"}) + "\n" + json.dumps(rows[1] | {"g": "a"}) + "\n",
        "p.jsonl",
        agents={"a": made, **AGENTS},
        map={"name": "n", "after": "w", "input": "i", "agent": "g"},
    )
    task = plan.tasks[1]
    assert task.template
    assert filled(task, {"first": "R"}) == "{first.result} {{x}}"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"problem_statement": "x"}, "there is no field 'instance_id' for unique_key"),
        ({"problem_statement": "x", "instance_id": None}, "the field 'instance_id' for unique_key is null"),
        ({"problem_statement": "x", "instance_id": ["a"]}, "unique_key: expected text, found a list"),
        ({"problem_statement": "a\x00", "instance_id": "a"}, "input: a NUL character"),
    ],
)
def test_lines_that_a_map_does_not_fit(row: Any, says: str, faults: FindFaults) -> None:
    """A line without the mapped field is a fault of that line."""
    [(line, message)] = faults("\n" + json.dumps(row), "p.jsonl", agent="coder", map=MAP)
    assert line == 2
    assert says in message


@pytest.mark.parametrize(
    ("name", "map_", "says"),
    [
        ("p.yaml", MAP, "--map is for JSON lines"),
        ("p.jsonl", {"inptu": "a"}, "a task has no field 'inptu'; did you mean 'input'"),
        ("p.jsonl", {"budget.x": "a"}, "a task has no field 'budget.x'"),
        ("p.jsonl", {"input": ""}, "names no field"),
        ("p.jsonl", {"params": "a", "params.k": "b"}, "either params or params.k"),
    ],
)
def test_maps_that_make_no_sense(name: str, map_: dict[str, str], says: str, load: Load) -> None:
    """A wrong mapping is one error, not one for each line."""
    with pytest.raises(InvalidInput, match=says):
        load("", name, map=map_)


def test_long_lists(tmp_path: Path) -> None:
    """A long list is read line by line; all arrive in order."""
    path = tmp_path / "big.jsonl"
    with path.open("w") as file:
        for number in range(20_000):
            file.write(f'{{"id": {number}, "text": "do it", "more": [1, 2, 3]}}\n')
    plan = load_plan(path, agents=AGENTS, agent="coder", map={"input": "text", "unique_key": "id"})
    assert [task.unique_key for task in plan.tasks] == [str(number) for number in range(20_000)]
