"""Plan files: what they may say, what becomes of it, and that every fault is told at once with its line."""

from __future__ import annotations

import io
import json
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.given import AgentDefinition, NewTask
from orchestrator.domain.outcome import Budget, RetryPolicy
from orchestrator.errors import InvalidInput, InvalidPlan, UnknownAgent
from orchestrator.plans import (
    Plan,
    agent_definition,
    argv_faults,
    definitions,
    load_plan,
    reading,
    resolve,
    secret_warnings,
    with_results,
)
from orchestrator.settings import Settings

INPUTS = Path(__file__).parent / "inputs"
CODER = agent_definition("coder", {"command": ["true"]})
AGENTS = {"coder": CODER, "review": agent_definition("review", {"python": "pkg.agents:review"})}

Load = Callable[..., Plan]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write a plan file and load it with two configured agents."""

    def written(text: str, name: str = "p.yaml", **options: Any) -> Plan:
        path = tmp_path / name
        path.write_bytes(textwrap.dedent(text).encode("utf-8"))
        return load_plan(path, **{"agents": AGENTS, **options})

    return written


@pytest.fixture
def faults(load: Load) -> Callable[..., list[tuple[int, str]]]:
    """Load a plan that is wrong and return its faults."""

    def found(text: str, name: str = "p.yaml", **options: Any) -> list[tuple[int, str]]:
        with pytest.raises(InvalidPlan) as caught:
            load(text, name, **options)
        assert caught.value.exit_code == 2
        assert all(message in caught.value.message for _, message in caught.value.faults[:20])
        return caught.value.faults

    return found


YAML = """\
plan: nightly
agents:
  local:
    command: [fake, --model, "{model}", --, "{prompt}"]
    env: {set: {CI: "1"}, unset: [X], allow: [PATH], secret: [TOKEN_OF_ANY]}
    budget: {seconds: 1800}
    max_retries: 1
    retry: {initial: 1, max: 60}
    exit_codes: {0: done, 3: permanent}
    dir: sub
tasks:
  - name: fix-parser
    agent: local
    input: "Fix {file}. Keep {{file}} and {\\"a\\": {}}."
    params: {file: tests/test_parser.py, model: small}
    title: Fix
    priority: -3
    at: 2026-12-01T09:00:00+01:00
    max_retries: 0
    retry: {initial: 0.5}
    budget: {seconds: 60}
    unique_key: k
    concurrency_key: repo
    tags: {team: a}
    dir: work
  - name: check
    agent: review
    after: [fix-parser]
    input: {diff_of: "{fix-parser.result}", "{x}": 1}
"""

TOML = """\
plan = "nightly"
[agents.local]
command = ["fake", "--model", "{model}", "--", "{prompt}"]
env = {set = {CI = "1"}, unset = ["X"], allow = ["PATH"], secret = ["TOKEN_OF_ANY"]}
budget.seconds = 1800
max_retries = 1
retry = {initial = 1, max = 60}
exit_codes = {0 = "done", 3 = "permanent"}
dir = "sub"
[[tasks]]
name = "fix-parser"
agent = "local"
input = 'Fix {file}. Keep {{file}} and {"a": {}}.'
params = {file = "tests/test_parser.py", model = "small"}
title = "Fix"
priority = -3
at = 2026-12-01T09:00:00+01:00
max_retries = 0
retry.initial = 0.5
budget = {seconds = 60}
unique_key = "k"
concurrency_key = "repo"
tags = {team = "a"}
dir = "work"
[[tasks]]
name = "check"
agent = "review"
after = ["fix-parser"]
input = {diff_of = "{fix-parser.result}", "{x}" = 1}
"""


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


def filled(task: NewTask, results: dict[str, Any]) -> Any:
    """Return the input as the agent of a claimed task sees it."""
    return resolve(task.input, with_results(task.params, results))


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


def test_unknown_placeholders(faults: Callable[..., list[tuple[int, str]]]) -> None:
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


def test_placeholders_of_a_command(load: Load, faults: Callable[..., list[tuple[int, str]]]) -> None:
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


def test_a_param_and_a_task_of_one_name(load: Load, faults: Callable[..., list[tuple[int, str]]]) -> None:
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


def test_all_faults_at_once_with_lines(faults: Callable[..., list[tuple[int, str]]]) -> None:
    """One reading finds what is wrong with agents, keys, kinds, names and order; each with its line."""
    found = faults(
        """\
        agents:
          a:
            command: "run it"
            promt: stdin
          b: {python: nodots, http: "https://x"}
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
            approval: true
          - agent: coder
            after: [nobody, 0, true]
        """
    )
    assert [line for line, _ in found] == sorted(line for line, _ in found)
    text = "\n".join(f"{line}: {message}" for line, message in found)
    for expected in (
        """3: agent 'a': command: expected a list of arguments; write ["run", "it"], or shell: true""",
        "4: agent 'a': unknown key 'promt'; did you mean 'prompt'?",
        "5: agent 'b': expected exactly one of command, python, http, acp, found both python and http",
        "5: agent 'b': http: an agent of kind 'http' is not supported yet",
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
        "22: approval: approval: true is not supported yet",
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


def test_cycles_and_unknown_parents(faults: Callable[..., list[tuple[int, str]]]) -> None:
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


def test_long_chains(load: Load, faults: Callable[..., list[tuple[int, str]]]) -> None:
    """A chain of 5,000 is put in order without recursion, and closed to a ring it is one short fault."""
    rows = [{"name": f"t{n}", "after": [f"t{n + 1}"] if n < 4_999 else []} for n in range(5_000)]
    plan = load("".join(json.dumps(row) + "\n" for row in rows), "p.jsonl", agent="coder")
    assert [task.name for task in plan.tasks] == [f"t{n}" for n in reversed(range(5_000))]
    rows[-1]["after"] = ["t0"]
    [(_, message)] = faults("".join(json.dumps(row) + "\n" for row in rows), "p.jsonl", agent="coder")
    assert len(message) < 400
    assert "… 4992 more …" in message


def test_equal_names(load: Load, faults: Callable[..., list[tuple[int, str]]]) -> None:
    """Equal names are a fault that names the other line, unless the unique key makes them the same task."""
    one, two = '{"name": "n", "unique_key": "k"}\n', '{"name": "n"}\n'
    assert faults("\n" + one + two, "p.jsonl", agent="coder") == [
        (3, "task 'n': name: is already the name of the task in line 2")
    ]
    plan = load(one + one, "p.jsonl", agent="coder")
    assert len(plan.tasks) == 2
    assert plan.warnings == [(2, "unique_key 'k' was already seen in line 1: line 2 adds nothing")]


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


def test_many_faults_are_counted(faults: Callable[..., list[tuple[int, str]]], load: Load) -> None:
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
def test_what_cannot_be_stored(field: str, value: Any, faults: Callable[..., list[tuple[int, str]]]) -> None:
    """NUL and lone surrogates are refused with the field and the line, wherever they stand."""
    [(line, message), *_] = faults("\n" + json.dumps({field: value}), "p.jsonl", agent="coder")
    assert line == 2
    assert message.startswith(field)
    with pytest.raises(InvalidPlan):
        load_plan("-", agents=AGENTS, agent="coder", stdin=io.BytesIO(b'{"title": "' + b"x" * 20_000 + b'"}'))


# -- formats ------------------------------------------------------------------------------------------------------------


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


def test_aliases(load: Load, faults: Callable[..., list[tuple[int, str]]]) -> None:
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


def test_without_libyaml(
    monkeypatch: pytest.MonkeyPatch, load: Load, faults: Callable[..., list[tuple[int, str]]]
) -> None:
    """The loader written in Python gives the same plan and faults with lines."""
    plan = load(YAML)
    pure = type("Pure", (yaml.SafeLoader,), {"yaml_implicit_resolvers": reading._Loader.yaml_implicit_resolvers})
    monkeypatch.setattr(reading, "_Loader", pure)
    assert load(YAML) == plan
    assert faults("tasks:\n\t- name: a\n") == [(2, "a tab stands in the indentation; YAML wants spaces")]
    assert "nested too deeply" in faults("a: " + "[" * 20_000)[0][1]


def test_toml_lines(faults: Callable[..., list[tuple[int, str]]]) -> None:
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
    [("a = 1\nb = \n", 2, "is not TOML"), ("a = 1\na = 2\n", 2, "is not TOML"), ('a = """\n\n', 3, "is not TOML")],
)
def test_broken_toml(text: str, line: int, says: str, faults: Callable[..., list[tuple[int, str]]]) -> None:
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
def test_lines_that_a_map_does_not_fit(row: Any, says: str, faults: Callable[..., list[tuple[int, str]]]) -> None:
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


# -- agents -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({}, "expected exactly one of command, python, http, acp, found none of them"),
        ({"command": []}, "names no program"),
        ({"command": [""]}, "names no program"),
        ({"command": ["a", 1]}, 'found 1 in it; put it in quotes: "1"'),
        ({"command": ["{prompt}"]}, "the program itself cannot be a placeholder"),
        ({"command": ["a", "\0"]}, "a NUL character"),
        ({"command": ["a"], "shell": True}, "with shell: true a command is one text"),
        ({"command": ["a"], "shell": "yes"}, "expected true or false, found 'yes'"),
        ({"command": ["a"], "prompt": "stdn"}, "expected one of stdin, argument, file, found 'stdn'"),
        ({"command": ["a"], "workspace": "worktree"}, "workspace 'worktree' is not supported yet"),
        ({"command": ["a"], "budget": {"tokens": 5}}, "a budget of tokens is not supported yet"),
        ({"command": ["a"], "budget": {"usd": 0.5}}, "a budget of usd is not supported yet"),
        ({"command": ["a"], "budget": {"turns": 5}}, "a budget of turns is not supported yet"),
        ({"command": ["a"], "budget": {"on_limit": "ask"}}, "on_limit 'ask' is not supported yet"),
        ({"acp": ["gemini", "--acp"]}, "an agent of kind 'acp' is not supported yet"),
        ({"python": "mod"}, "expected module:function, found 'mod'"),
        ({"python": "os.path:__import__('x')"}, "expected module:function"),
        ({"command": ["a"], "env": {"CI": "1"}}, "env: unknown key 'CI'; write env: {set: {NAME: value}}"),
        ({"command": ["a"], "env": {"set": {"N": 1}}}, "env.set.N: expected text, found 1; put it in quotes"),
        ({"command": ["a"], "env": {"set": {"A=B": "1"}}}, "'A=B' cannot be the name of a variable"),
        ({"command": ["a"], "env": {"secret": "X"}}, "env.secret: expected a list of texts, found 'X'"),
        ({"command": ["a"], "exit_codes": {"x": "done"}}, "expected an exit code from 0 to 255"),
        ({"command": ["a"], "exit_codes": {"3": "lost"}}, "expected one of done, transient"),
        ({"command": ["a"], "kill_grace": -1}, "expected a number, 0 or more, found -1"),
        ({"command": ["a"], "idle_seconds": float("inf")}, "expected a number, more than 0, found inf"),
        ({"command": ["a"], "isolation": "thread"}, "expected one of loop, process, found 'thread'"),
    ],
)
def test_agents_that_are_refused(mapping: dict[str, Any], says: str) -> None:
    """Each key is checked, with what was expected and what was found."""
    with pytest.raises(InvalidPlan) as caught:
        agent_definition("a", mapping, line=3)
    assert says in caught.value.message
    assert all(line == 3 for line, _ in caught.value.faults)


def test_agents_of_the_configuration(tmp_path: Path) -> None:
    """The same keys under [agents.NAME] make the same agent, not local; all faults are told at once."""
    path = tmp_path / "orchestrator.toml"
    path.write_text(
        '[agents.coder]\ncommand = ["true"]\nexit_codes = {3 = "permanent"}\n[agents.sh]\ncommand = "a|b"\nshell = true'
    )
    made = definitions(Settings.load(path, {}))
    assert made["coder"] == agent_definition(
        "coder", {"command": ["true"], "exit_codes": {"3": "permanent"}}, base_dir=str(tmp_path)
    )
    assert (made["sh"].command, made["sh"].shell, made["sh"].local) == ("a|b", True, False)
    path.write_text('[agents.a]\ncommand = "x"\n[agents.b]\npromt = 1\n')
    with pytest.raises(InvalidInput, match=r"orchestrator.toml: 3 faults in its agents") as caught:
        definitions(Settings.load(path, {}))
    assert "agent 'b': unknown key 'promt'" in caught.value.message


def test_definition_hash() -> None:
    """The hash is that of what the agent does: a default said aloud changes nothing, a changed word does."""
    base = agent_definition("a", {"command": ["x"]})
    assert len(base.hash) == 16
    assert agent_definition("a", {"command": ["x"], "prompt": "stdin", "kill_grace": 2}).hash == base.hash
    assert agent_definition("a", {"command": ["x"]}, local=True, base_dir="/elsewhere", line=9).hash == base.hash
    others = [
        agent_definition("b", {"command": ["x"]}),
        agent_definition("a", {"command": ["x", "y"]}),
        agent_definition("a", {"command": ["x"], "env": {"set": {"A": "1"}}}),
        agent_definition("a", {"command": ["x"], "budget": {"seconds": 1}}),
    ]
    assert len({base.hash, *(each.hash for each in others)}) == 5


def test_short_secrets_are_warned_about(load: Load) -> None:
    """A secret too short to be blackened safely is told, without its value; one that is not set is not."""
    text = "agents:\n  a: {command: [x], env: {set: {IN: abcde}, secret: [IN, OUT, LONG, NONE]}}\ntasks: [{agent: a}]"
    plan = load(text, environ={"OUT": "xyz", "LONG": "123456"})
    assert [line for line, _ in plan.warnings] == [2, 2]
    assert "secret IN has 5 characters" in plan.warnings[0][1]
    assert "secret OUT has 3 characters" in plan.warnings[1][1]
    assert not any("xyz" in message or "abcde" in message for _, message in plan.warnings)
    assert secret_warnings(plan.agents["a"], {"OUT": "x" * 6})[0] == plan.warnings[0][1]
