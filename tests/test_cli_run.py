"""``run``, ``worker`` and ``watchdog``: plans worked to their end, what is shown of it, and how they are stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from tests.commands import CONFIG, CONTROL, Cli, process, start, strict
from tests.conftest import WaitUntil
from tests.making import Making, new_worker

CHAIN = """
agents:
  say: {command: [sh, -c, 'cat; echo " said"']}
tasks:
  - {name: a, agent: say, input: one}
  - {name: b, agent: say, input: two, after: [a]}
"""

MIXED = """
tasks:
  - {name: good, agent: coder, input: x}
  - {name: bad, agent: broken, max_retries: 0}
  - {name: child, agent: coder, after: [bad]}
"""


def _rows(engine: Engine, statement: str) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(text(statement)))


# -- run ---------------------------------------------------------------------------------------------------------------


def test_run_works_a_plan_to_its_end(cli: Cli, engine: Engine) -> None:
    """Plain lines on stderr, the summary on stdout, exit code 0; run again, there is nothing to do."""
    cli.write("chain.yaml", CHAIN)
    said = cli("run", "chain.yaml")
    lines = said.err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d plan chain: 2 tasks \(2 new\), 4 slots, database .*", lines[0])
    words = [line.split()[1] for line in lines]
    assert words == ["plan", "start", "done", "start", "done", "end"]
    assert [line.split()[1:3] for line in said.out.splitlines()[1:3]] == [["1", "a"], ["2", "b"]]
    assert "\x1b" not in said.out + said.err
    assert [row.status for row in _rows(engine, "SELECT status FROM tasks ORDER BY id")] == ["done", "done"]
    again = cli("run", "chain.yaml")
    assert "nothing to do: all 2 tasks of chain are done" in again.err
    assert [row[0] for row in _rows(engine, "SELECT count(*) FROM runs")] == [2]


def test_run_answers_in_json(cli: Cli) -> None:
    """The document has the plan, its tasks in the plan's order, each as show has it, and totals."""
    cli.write("mixed.yaml", MIXED)
    said = cli("run", "mixed.yaml", "--json", code=1).json
    assert said.keys() == {"plan", "tasks", "totals"}
    assert said["plan"] == "mixed"
    assert [(task["name"], task["status"]) for task in said["tasks"]] == [
        ("good", "done"),
        ("bad", "failed"),
        ("child", "cancelled"),
    ]
    assert said["tasks"][0]["result"] == "x"
    assert said["tasks"][2]["error"]["cause"] == "parent_failed"
    totals = said["totals"]
    assert (totals["tasks"], totals["done"], totals["failed"], totals["not_run"], totals["left"]) == (3, 1, 1, 1, 0)
    assert totals["cost_usd"] is None


def test_a_failure_is_exit_code_1_and_stands_near_the_prompt(cli: Cli) -> None:
    """The summary ends with the failure, the command that shows more, and how to go on."""
    cli.write("mixed.yaml", MIXED)
    out = cli("run", "mixed.yaml", code=1).out
    assert re.search(r"✗ 2 bad: .*orchestrator logs 2", out)
    assert out.splitlines()[-1] == "again: orchestrator run mixed.yaml --retry-failed"


def test_retry_failed_opens_what_failed_and_what_hangs_on_it(cli: Cli, engine: Engine) -> None:
    """After the agent was mended, --retry-failed does the rest and leaves what is done alone."""
    cli.write("mixed.yaml", MIXED)
    cli("run", "mixed.yaml", code=1)
    assert "nothing to do" in cli("run", "mixed.yaml", code=1).err
    (cli.folder / "mended").touch()
    cli.config('[agents.coder]\ncommand = ["cat"]\n[agents.broken]\ncommand = ["test", "-e", "mended"]\n')
    cli.write("mixed.yaml", MIXED)
    said = cli("run", "mixed.yaml", "--retry-failed", "--json").json
    assert [task["status"] for task in said["tasks"]] == ["done"] * 3
    assert [row[0] for row in _rows(engine, "SELECT count(*) FROM runs WHERE status = 'done'")] == [3]


def test_fresh_makes_all_anew(cli: Cli, engine: Engine) -> None:
    """--fresh runs done tasks again, under new ids."""
    cli.write("chain.yaml", CHAIN)
    cli("run", "chain.yaml")
    said = cli("run", "chain.yaml", "--fresh", "--json").json
    assert [task["id"] for task in said["tasks"]] == [3, 4]
    assert [task["status"] for task in said["tasks"]] == ["done", "done"]


def test_fail_fast_starts_nothing_more(cli: Cli, engine: Engine) -> None:
    """After the first failure what has not started does not start; exit code 1."""
    tasks = "".join(f"  - {{name: t{n}, agent: coder}}\n" for n in range(5))
    cli.write("plan.yaml", f"tasks:\n  - {{name: bad, agent: broken, priority: 9, max_retries: 0}}\n{tasks}")
    cli("run", "plan.yaml", "--fail-fast", "--concurrency", "1", code=1)
    assert [row[0] for row in _rows(engine, "SELECT count(*) FROM runs")] == [1]


def test_run_claims_only_its_own_plan(cli: Cli, making: Making) -> None:
    """A task of nobody's plan stays pending, though the agent is known."""
    other = making.add("say")
    coder = making.add("coder")
    cli.write("chain.yaml", CHAIN)
    cli("run", "chain.yaml")
    assert making.status(other, coder) == ["pending", "pending"]


def test_a_faulty_plan_runs_nothing(cli: Cli, engine: Engine) -> None:
    """All faults with their lines, exit code 2, no task."""
    cli.write("plan.yaml", "tasks:\n  - {name: a, agent: codr}\n  - {name: b, agent: coder, after: [c]}\n")
    said = cli("run", "plan.yaml", "--json", code=2)
    assert [fault["line"] for fault in said.error["faults"]] == [2, 3]
    assert _rows(engine, "SELECT 1 FROM tasks") == []


def test_an_empty_plan_is_nothing_to_do(cli: Cli) -> None:
    """A plan without tasks says so and is exit code 0."""
    cli.write("plan.yaml", "tasks: []\n")
    assert "has no tasks" in cli("run", "plan.yaml").err


def test_a_running_task_can_be_cancelled_from_elsewhere(cli: Cli, engine: Engine, wait_until: WaitUntil) -> None:
    """The run notices, ends the agent, and is exit code 1."""
    cli.write("plan.yaml", 'agents: {nap: {command: [sleep, "600"]}}\ntasks: [{name: a, agent: nap}]\n')

    def cancel() -> None:
        from orchestrator.repositories.filters import TaskFilter
        from orchestrator.repositories.operations import OperationsRepository

        wait_until(lambda: _rows(engine, "SELECT 1 FROM tasks WHERE status = 'running'"))
        OperationsRepository(engine).cancel(TaskFilter(ids=[1]), actor="ops", reason="superseded")

    thread = threading.Thread(target=cancel)
    thread.start()
    said = cli("run", "plan.yaml", code=1)
    thread.join()
    assert "cancelled" in said.out


def test_titles_and_results_do_not_disturb_the_view(cli: Cli) -> None:
    """Control characters and markup in names and output stay data, in lines and summary."""
    cli.write("say.sh", "printf '\\033[2J[/red] no' >&2; exit 77\n")
    cli.write("plan.yaml", 'agents: {say: {command: [sh, say.sh]}}\ntasks: [{name: "a\\e[2J[bold", agent: say}]\n')
    said = cli("run", "plan.yaml", code=1)
    assert not CONTROL.search(said.out + said.err)
    assert "\\x1b[2J[bold" in said.out
    assert "\\x1b[2J[/red] no" in said.err


def test_python_agents_live_beside_the_plan(cli: Cli) -> None:
    """A module in the plan's folder is found, wherever the command was called."""
    folder = cli.folder / "below"
    folder.mkdir()
    (folder / "mine_of_this_test.py").write_text("def shout(ctx):\n    return ctx.input.upper()\n")
    (folder / "plan.yaml").write_text(
        'agents: {shout: {python: "mine_of_this_test:shout"}}\ntasks: [{name: a, agent: shout, input: hi}]\n'
    )
    said = cli("run", "below/plan.yaml", "--json").json
    assert said["tasks"][0]["result"] == "HI"


# -- worker and watchdog -----------------------------------------------------------------------------------------------


def test_worker_until_idle(cli: Cli, making: Making) -> None:
    """It says once what it does, has a line for each start and end, and ends when nothing is left."""
    first, second, other = making.add("coder", input="x"), making.add("review"), making.add("elsewhere")
    said = cli("worker", "--until-idle", "--name", "w1")
    lines = said.err.splitlines()
    assert lines[0].startswith("worker w1 works until idle for broken, coder, review: 10 slots, postgresql://")
    assert said.out == ""
    assert sum(" start " in line for line in lines) == 2
    assert making.status(first, second, other) == ["done", "done", "pending"]


def test_worker_for_some_agents_and_quiet(cli: Cli, making: Making) -> None:
    """--agent is repeatable and takes comma lists; --quiet says nothing when nothing is wrong."""
    ids = [making.add(agent) for agent in ("coder", "review", "broken")]
    said = cli("worker", "--until-idle", "--agent", "coder,review", "--quiet")
    assert (said.out, said.err) == ("", "")
    assert making.status(*ids) == ["done", "done", "pending"]


def test_worker_knows_the_agents_of_a_plan_that_it_is_given(cli: Cli, making: Making) -> None:
    """Tasks of plan-local agents wait for a worker that has loaded this very plan."""
    cli.write("chain.yaml", CHAIN)
    cli("submit", "chain.yaml", "--plan-agents")
    cli("worker", "--until-idle", "--quiet")
    assert making.status(1, 2) == ["pending", "blocked"]
    cli("worker", "--until-idle", "--quiet", "--plan", "chain.yaml")
    assert making.status(1, 2) == ["done", "done"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--agent", "codr"), "'coder'"),
        (("--heartbeat", "30", "--lease", "40"), "heartbeat"),
        (("--metrics-port", "0"), "--metrics-port"),
        (("--grace", "long"), "--grace"),
        (("--concurrency", "0"), "--concurrency"),
    ],
)
def test_worker_refuses_what_cannot_work(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    """Wrong names and settings are exit code 2 before anything is claimed."""
    assert words in cli("worker", *arguments, code=2).err


def test_a_metrics_port_that_is_taken_is_told(cli: Cli) -> None:
    """The option reaches the worker: a port that somebody else has is exit code 2, with what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = cli("worker", "--until-idle", "--metrics-port", port, code=2)
    assert f"the metrics port {port} cannot be opened" in said.err


def test_a_worker_without_agents_says_what_to_do(cli: Cli) -> None:
    """No configuration is no worker."""
    cli.config("")
    assert "orchestrator.toml" in cli("worker", code=2).err


def test_watchdog_once_takes_back_the_tasks_of_the_dead(cli: Cli, making: Making) -> None:
    """A worker declared dead loses its tasks; the document names both."""
    task_id = making.add()
    making.claim()
    making.query("UPDATE workers SET dead_at = clock_timestamp()")
    # A witness that has been renewing for long: nothing is to be waited for.
    witness = new_worker(making.engine, "witness")
    making.query("UPDATE workers SET renewing_since = renewing_since - interval '1 hour' WHERE id = :id", id=witness)
    said = cli("watchdog", "--once", "--json").json
    assert [each["task_id"] for each in said["taken_back"]] == [task_id]
    assert making.status(task_id) == ["pending"]


# -- real processes ----------------------------------------------------------------------------------------------------

NAPS = 'agents: {nap: {command: [sleep, "600"]}}\ntasks: [{name: a, agent: nap}, {name: b, agent: nap}]\n'


@pytest.fixture
def begin() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start real processes; whatever a failed test leaves of them is ended."""
    with contextlib.ExitStack() as stack:

        def begin_one(*arguments: str, **options: Any) -> subprocess.Popen[str]:
            running = stack.enter_context(start(*arguments, **options))
            stack.callback(running.kill)
            return running

        yield begin_one


Begin = Callable[..., subprocess.Popen[str]]


@pytest.mark.slow
def test_ctrl_c_once_drains_and_twice_ends(
    database_url: str, engine: Engine, tmp_path: Path, wait_until: WaitUntil, begin: Begin
) -> None:
    """The first Ctrl-C lets agents finish, the second ends them: 130, a summary, tasks handed back, no process left."""
    (tmp_path / "plan.yaml").write_text(NAPS)
    running = begin("run", "plan.yaml", "--grace", "500", url=database_url, cwd=tmp_path, preexec_fn=_mind_interrupts)
    lines: list[str] = []
    reader = _read(running.stderr, lines)
    wait_until(lambda: _rows(engine, "SELECT 1 FROM tasks WHERE status = 'running' OFFSET 1"), 90)
    running.send_signal(signal.SIGINT)
    wait_until(lambda: any("stopping (SIGINT)" in line for line in lines), 90)
    assert running.poll() is None
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    reader.join(10)
    assert running.stdout is not None
    summary = running.stdout.read()
    assert "again: orchestrator run plan.yaml" in summary
    assert [row[0] for row in _rows(engine, "SELECT DISTINCT status FROM tasks")] == ["pending"]
    assert {row[0] for row in _rows(engine, "SELECT status FROM runs")} == {"interrupted"}


def _mind_interrupts() -> None:
    """Whoever starts the tests in the background may have Ctrl-C ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _read(stream: Any, lines: list[str]) -> threading.Thread:
    def read() -> None:
        with stream:
            for line in stream:
                lines.append(line)  # noqa: PERF402 - others look at the list meanwhile

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_two_runs_of_one_plan_at_once(database_url: str, engine: Engine, tmp_path: Path, begin: Begin) -> None:
    """Both succeed, and every task was run once."""
    tasks = "".join(f"  - {{name: t{n}, agent: say}}\n" for n in range(20))
    (tmp_path / "plan.yaml").write_text(
        f'agents: {{say: {{command: [sh, -c, "sleep 0.05; echo ok"]}}}}\ntasks:\n{tasks}'
    )
    both = [begin("run", "plan.yaml", "--json", url=database_url, cwd=tmp_path) for _ in range(2)]
    for each in both:
        out, err = each.communicate(timeout=110)
        assert each.returncode == 0, err
        assert strict(out)["totals"]["done"] == 20
    assert [row[0] for row in _rows(engine, "SELECT count(*) FROM runs")] == [20]


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1"}], ids=str)
def test_no_terminal_no_escape_codes(database_url: str, tmp_path: Path, env: dict[str, str]) -> None:
    """Piped, with closed stdin and whatever the environment says: plain lines, and colour only by FORCE_COLOR."""
    (tmp_path / "plan.yaml").write_text(CHAIN)
    said = process(
        "run", "plan.yaml", url=database_url, cwd=tmp_path, env=env, preexec_fn=lambda: os.close(0), stdin=None
    )
    assert said.code == 0, said
    assert "\x1b" not in said.err
    assert ("\x1b" in said.out) == ("FORCE_COLOR" in env)
    assert "\x1b[2" not in said.out.replace("\x1b[2m", "")
    assert len(said.err.splitlines()) == 6


@pytest.mark.slow
@pytest.mark.parametrize("stdin", ["terminal", "null", "pipe"])
def test_agents_see_the_end_of_their_input(database_url: str, tmp_path: Path, stdin: str) -> None:
    """Wherever the worker's own stdin leads, an agent that reads all of its input gets the prompt and then the end."""
    (tmp_path / "orchestrator.toml").write_text('[agents.coder]\ncommand = ["cat"]\n')
    process("add", "coder", "--input", "hello", url=database_url, cwd=tmp_path)
    master = slave = read = write = -1
    source: Any = subprocess.DEVNULL
    if stdin == "terminal":
        master, slave = os.openpty()
        source = slave
    elif stdin == "pipe":
        read, write = os.pipe()
        source = read
    try:
        said = process("worker", "--until-idle", url=database_url, cwd=tmp_path, stdin=source)
    finally:
        for number in (master, slave, read, write):
            if number >= 0:
                os.close(number)
    assert said.code == 0, said
    task = strict(process("show", "1", "--json", url=database_url, cwd=tmp_path).out)
    assert (task["status"], task["result"]) == ("done", "hello")


@pytest.mark.slow
def test_logs_follow_a_task_over_its_retry(database_url: str, tmp_path: Path, begin: Begin) -> None:
    """-f shows both attempts as they come, and ends with the task; as JSON lines every piece says its attempt."""
    script = "echo try $ORCHESTRATOR_ATTEMPT; until test -e go; do sleep 0.05; done; test $ORCHESTRATOR_ATTEMPT = 2"
    (tmp_path / "orchestrator.toml").write_text(
        f'[agents.twice]\ncommand = ["sh", "-c", "{script}"]\nretry = {{initial = 0.01}}\n'
    )
    process("add", "twice", url=database_url, cwd=tmp_path)
    worker = begin("worker", "--until-idle", url=database_url, cwd=tmp_path)
    following = begin("logs", "1", "-f", "--json", url=database_url, cwd=tmp_path)
    assert following.stdout is not None
    first = following.stdout.readline()
    (tmp_path / "go").touch()
    rest, err = following.communicate(timeout=90)
    assert following.returncode == 0, err
    assert worker.communicate(timeout=90)[0] == ""
    assert worker.returncode == 0
    pieces = [json.loads(line) for line in [first, *rest.splitlines()]]
    assert [(piece["attempt"], piece["text"]) for piece in pieces] == [(1, "try 1\n"), (2, "try 2\n")]


@pytest.mark.slow
def test_a_worker_that_is_told_twice_to_stop_ends_as_if_told_once(
    database_url: str, tmp_path: Path, begin: Begin
) -> None:
    """SIGTERM again, at any moment of its end: exit code 0, as a service manager expects it."""
    (tmp_path / "orchestrator.toml").write_text(CONFIG)
    for _ in range(3):
        worker = begin("worker", "--name", "w", url=database_url, cwd=tmp_path)
        assert worker.stderr is not None
        assert "works" in worker.stderr.readline()
        while worker.poll() is None:
            worker.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(0.005)
        assert worker.returncode == 0, worker.stderr.read()


@pytest.fixture
def making(engine: Engine) -> Making:
    """A queue with one worker that tests let do what they want."""
    return Making.on(engine)
