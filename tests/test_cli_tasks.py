"""Tasks on the command line: adding, submitting, looking, changing; names and values that are also syntax."""

from __future__ import annotations

import json
import re
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session

from tests.commands import CONTROL, Cli, process, strict
from tests.making import BROKEN, CRASHED, DONE, Making

INPUTS = Path(__file__).parent / "inputs"


def _hostile() -> list[str]:
    lines = (INPUTS / "hostile-names.jsonl").read_text().splitlines()
    return [name for name in (json.loads(line)["name"] for line in lines) if name.strip()]


@pytest.fixture
def making(engine: Engine) -> Making:
    """A queue with one worker that tests let do what they want."""
    return Making.on(engine)


# -- add ---------------------------------------------------------------------------------------------------------------


def test_add_says_what_it_added(cli: Cli) -> None:
    """The answer has id, created and status; the task has what was given, and null for what was not."""
    said = cli("add", "coder", "--json").json
    assert said == {"id": 1, "created": True, "status": "pending"}
    task = cli("show", "1", "--json").json
    assert (task["agent"], task["input"], task["title"], task["max_retries"]) == ("coder", None, None, None)
    assert task["runs"] == []
    assert "task 2 added" in cli("add", "coder").out


def test_add_takes_every_option_of_a_task(cli: Cli) -> None:
    """What the options say is what is stored."""
    cli("add", "coder")
    cli(
        *(
            "add",
            "coder",
            "--input",
            "{not} a template: {{x}}",
            "--title",
            "T",
            "--priority",
            "-3",
            "--max-retries",
            "0",
        ),
        *("--budget-seconds", "1h30m", "--unique-key", "k", "--after", "1", "--tag", "team=billing", "--tag", "a=b=c"),
        *("--param", "file=x.py", "--json"),
    )
    task = cli("show", "2", "--json").json
    assert task["input"] == "{not} a template: {{x}}"
    assert (task["title"], task["priority"], task["max_retries"], task["unique_key"]) == ("T", -3, 0, "k")
    assert task["budget"]["seconds"] == 5400
    assert task["depends_on"] == [1]
    assert task["status"] == "blocked"
    assert task["tags"] == {"team": "billing", "a": "b=c"}


def test_input_comes_from_a_file_or_from_standard_input(cli: Cli) -> None:
    """--input-file takes a file or, as -, standard input; without it standard input is not read."""
    cli.write("prompt.txt", "from a file\n")
    cli("add", "coder", "--input-file", "prompt.txt")
    cli("add", "coder", "--input-file", "-", stdin="från röret".encode())
    cli("add", "coder", stdin=b"unread")
    listed = cli("list", "--json").json["tasks"]
    assert [task["input"] for task in listed] == [None, "från röret", "from a file\n"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (("--input-file", "none.txt"), b"", "none.txt"),
        (("--input-file", "-"), b"ab\xff", "byte 3 is 0xff"),
        (("--input", "x", "--input-file", "-"), b"", "not both"),
        (("--param", "novalue"), b"", "NAME=VALUE"),
        (("--tag", "a=1", "--tag", "a=2"), b"", "twice"),
        (("--at", "soon"), b"", "--at"),
        (("--at", "+3 fortnights"), b"", "--at"),
        (("--budget-seconds", "0"), b"", "more than 0"),
        (("--budget-seconds", "ten"), b"", "--budget-seconds"),
        (("--max-retries", "-1"), b"", "--max-retries"),
        (("--after", "first"), b"", "'first'"),
        (("--title", "x" * 10_001), b"", "title"),
    ],
)
def test_add_refuses_what_it_cannot_store(
    cli: Cli, engine: Engine, arguments: tuple[str, ...], stdin: bytes, words: str
) -> None:
    """A wrong value is exit code 2 with a message that names it, and nothing is inserted."""
    said = cli("add", "coder", *arguments, "--json", code=2, stdin=stdin)
    assert words in said.error["message"]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM tasks")).scalar_one() == 0


@pytest.mark.parametrize("stdin", [b"a\0b", b"\0"])
def test_a_nul_byte_is_refused_by_the_name_of_its_field(cli: Cli, stdin: bytes) -> None:
    """What PostgreSQL cannot store is refused at the door, with the field and the remedy."""
    said = cli("add", "coder", "--input-file", "-", "--json", code=2, stdin=stdin)
    assert "input" in said.error["message"]
    for option in ("--title", "--unique-key"):
        assert (
            option.strip("-").replace("-", "_")
            in cli("add", "coder", option, "a\0b", "--json", code=2).error["message"]
        )


def test_at_takes_instants_and_spans(cli: Cli, making: Making) -> None:
    """An ISO time is that instant, a span counts from the database's time."""
    cli("add", "coder", "--at", "2030-01-31T09:00+01:00")
    cli("add", "coder", "--at", "+1h")
    cli("add", "coder", "--at", "now+60s")
    at = {task["id"]: datetime.fromisoformat(task["available_at"]) for task in cli("list", "--json").json["tasks"]}
    assert at[1] == datetime(2030, 1, 31, 8, tzinfo=UTC)
    (now,) = making.query("SELECT clock_timestamp()")
    assert timedelta(minutes=55) < at[2] - now[0] <= timedelta(hours=1)
    assert timedelta(seconds=0) < at[3] - now[0] <= timedelta(seconds=60)


def test_an_unknown_agent_needs_force(cli: Cli) -> None:
    """A name that no configuration knows is refused with the nearest one, and taken with --force."""
    said = cli("add", "codr", "--json", code=2)
    assert said.error["code"] == "unknown_agent"
    assert "'coder'" in said.error["message"]
    assert cli("add", "codr", "--force", "--json").json["created"] is True


def test_a_placeholder_of_the_agent_must_be_given(cli: Cli) -> None:
    """What the agent's command asks for has to come as a --param, and is told before anything is stored."""
    cli.config('[agents.lint]\ncommand = ["echo", "{file}"]\n')
    said = cli("add", "lint", "--json", code=2)
    assert "file" in said.error["message"]
    assert cli("add", "lint", "--param", "file=x; touch pwned", "--json").json["created"] is True


def test_a_unique_key_adds_once(cli: Cli) -> None:
    """While a live task has the key, adding gives its id and says that nothing was created."""
    first = cli("add", "coder", "--unique-key", "nightly", "--json").json
    again = cli("add", "coder", "--unique-key", "nightly", "--json").json
    assert first == {"id": 1, "created": True, "status": "pending"}
    assert again == {"id": 1, "created": False, "status": "pending"}


@pytest.mark.slow
def test_ten_processes_add_one_key(database_url: str, tmp_path: Path) -> None:
    """Of ten processes at once one creates the task; all succeed and give the same id."""
    from concurrent.futures import ThreadPoolExecutor

    def add(_: int) -> Any:
        said = process(
            *("add", "coder", "--force", "--unique-key", "nightly", "--json"), url=database_url, cwd=tmp_path
        )
        assert said.code == 0, said
        return strict(said.out)

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(add, range(10)))
    assert {answer["id"] for answer in answers} == {1}
    assert sorted(answer["created"] for answer in answers) == [False] * 9 + [True]


# -- names and values that are also syntax -----------------------------------------------------------------------------


def test_hostile_names_are_stored_found_and_shown_harmlessly(cli: Cli, making: Making) -> None:
    """Agents, titles, keys and tags of any spelling come back exactly, and reach a screen without control characters."""
    names = _hostile()
    for name in names:
        at = cli(
            "add", "--force", "--title", name, "--unique-key", name, "--tag", f"k={name}", "--json", "--", name
        ).json
        assert at["created"] is True, name
    listed = cli("list", "--json").json["tasks"]
    assert [(t["agent"], t["title"], t["unique_key"], t["tags"]["k"]) for t in reversed(listed)] == [
        (name, name, name, name) for name in names
    ]
    plain = cli("list").out
    for name in ("[/red] [bold", "[link=x]y[/link] :smile: \\[z]", "[2026-01-01] fix", "%s %d %(x)s 100%"):
        assert name in plain
    assert not CONTROL.search(plain)
    assert len(plain.splitlines()) == len(names) + 1
    for number in (23, 24, 26, 27, 28, 29, 30):
        shown = cli("show", str(number)).out
        assert not CONTROL.search(shown)
    assert "\\x1b[2J" in plain
    assert "\\x9b31m" in plain
    (row,) = making.query("SELECT count(*) FROM tasks")
    assert row[0] == len(names)


def test_filters_find_hostile_names_and_take_them_literally(cli: Cli) -> None:
    """% and _ in --search are themselves; an agent is matched whole."""
    for name in ("100% sure", "a_b", "axb", "it's", 'say "hi"', "plain"):
        cli("add", "--force", name, "--title", name)

    def found(*arguments: str) -> list[str]:
        return sorted(task["title"] for task in cli("list", *arguments, "--json").json["tasks"])

    assert found("--search", "%") == ["100% sure"]
    assert found("--search", "_") == ["a_b"]
    assert found("--search", "'") == ["it's"]
    assert found("--search", '"HI"') == ['say "hi"']
    assert found("--agent", "a_b") == ["a_b"]
    assert found("--agent", "%") == []
    assert found("--agent", "plain,axb", "--agent", "a_b") == ["a_b", "axb", "plain"]


def test_what_an_agent_said_reaches_the_screen_harmlessly(cli: Cli, making: Making) -> None:
    """Escape sequences in output are escapes on a screen, and as they were with --raw and --json."""
    evil = "\x7f\x1b[2J\x1b]0;t\x07ok\rsucceeded\n[/red]\n"
    task_id = making.add()
    (claim,) = making.claim()
    _say(making, claim, evil)
    making.end(claim, BROKEN)
    for command in (("logs", str(task_id)), ("show", str(task_id))):
        said = cli(*command).out
        assert "\\x1b[2J" in said
        assert "[/red]" in said
        assert not CONTROL.search(said.replace("\n", ""))
    assert cli("logs", str(task_id), "--raw").out == evil
    events = [strict(line) for line in cli("logs", str(task_id), "--json").out.splitlines()]
    assert "".join(event["text"] for event in events) == evil


def _say(making: Making, claim: Any, *pieces: str, kind: str = "stdout") -> None:
    from orchestrator.repositories.events import EventRepository, NewEvent

    events = [
        NewEvent(claim.task_id, claim.attempt, claim.claimed_by, seq, kind, piece, len(piece.encode()))
        for seq, piece in enumerate(pieces)
    ]
    EventRepository(making.engine).add(events)


# -- submit ------------------------------------------------------------------------------------------------------------

PLAN = """
tasks:
  - {name: a, agent: coder, input: one}
  - {name: b, agent: review, after: [a]}
"""


def test_submit_answers_as_the_contract_says(cli: Cli) -> None:
    """A plan's tasks are created once; submitting again finds them all."""
    cli.write("plan.yaml", PLAN)
    first = cli("submit", "plan.yaml", "--json").json
    assert (first["plan"], first["created"], first["existing"], first["refused"]) == ("plan", 2, 0, [])
    assert first["tasks"] == [{"id": 1, "name": "a", "created": True}, {"id": 2, "name": "b", "created": True}]
    again = cli("submit", "plan.yaml", "--json").json
    assert (again["created"], again["existing"]) == (0, 2)
    assert "2 existing" in cli("submit", "plan.yaml").out
    assert cli("submit", "plan.yaml", "--fresh", "--json").json["created"] == 2


def test_submit_names_what_a_plan_no_longer_has(cli: Cli) -> None:
    """A task that was taken out of the plan is named, and left alone."""
    cli.write("plan.yaml", PLAN)
    cli("submit", "plan.yaml")
    cli.write("plan.yaml", "tasks: [{name: a, agent: coder, input: one}]\n")
    said = cli("submit", "plan.yaml", "--json")
    assert said.json["removed"] == [2]
    assert "no longer in the plan" in said.err


def test_submit_is_all_or_nothing_unless_told_otherwise(cli: Cli) -> None:
    """A faulty plan is refused with every line, or, with --skip-invalid, taken without the faulty tasks."""
    cli.write("plan.jsonl", '{"agent": "coder"}\n{"agent": "codr"}\n{"agent": 3}\n')
    said = cli("submit", "plan.jsonl", "--json", code=2)
    assert said.error["code"] == "invalid_plan"
    assert [fault["line"] for fault in said.error["faults"]] == [2, 3]
    assert cli("list", "--json").json["tasks"] == []
    taken = cli("submit", "plan.jsonl", "--skip-invalid", "--json").json
    assert (taken["created"], [each["line"] for each in taken["refused"]]) == (1, [2, 3])


def test_submit_maps_the_records_of_another_tool(cli: Cli) -> None:
    """--map names which of their fields is which; it is repeatable and takes comma lists; the input is no template."""
    cli.write("other.jsonl", '{"instance_id": "i-1", "problem_statement": "fix {this}", "x": 1}\n' * 2)
    said = cli(
        *("submit", "other.jsonl", "--agent", "coder", "--map", "input=problem_statement,unique_key=instance_id"),
        "--json",
    )
    assert (said.json["created"], said.json["existing"]) == (1, 1)
    assert "warning" in said.err
    task = cli("show", "1", "--json").json
    assert (task["input"], task["unique_key"]) == ("fix {this}", "i-1")


def test_submit_reads_json_lines_from_standard_input(cli: Cli) -> None:
    """- is JSON lines on standard input; its plan is called stdin unless --name says otherwise."""
    said = cli("submit", "-", "--name", "piped", "--json", stdin=b'{"agent": "coder", "name": "a"}\n')
    assert said.json["plan"] == "piped"


def test_agents_of_a_plan_need_a_word(cli: Cli) -> None:
    """Agents that only the plan knows are refused by submit unless --plan-agents says that somebody will load it."""
    cli.write("own.yaml", 'agents: {mine: {command: ["true"]}}\ntasks: [{name: a, agent: mine}]\n')
    said = cli("submit", "own.yaml", "--json", code=2)
    assert "mine" in said.error["message"]
    assert "--plan-agents" in said.error["hint"]
    assert cli("submit", "own.yaml", "--plan-agents", "--json").json["created"] == 1


# -- list, show, runs, logs --------------------------------------------------------------------------------------------


def test_list_is_newest_first_and_paged(cli: Cli, making: Making) -> None:
    """A page ends with the id to go on behind; the last one with null."""
    for _ in range(5):
        making.add()
    first = cli("list", "--limit", "2", "--json").json
    assert ([task["id"] for task in first["tasks"]], first["next_after_id"]) == ([5, 4], 4)
    last = cli("list", "--limit", "3", "--after-id", "4", "--json").json
    assert ([task["id"] for task in last["tasks"]], last["next_after_id"]) == ([3, 2, 1], None)
    assert "2 shown; more: --after-id 4" in cli("list", "--limit", "2").err


def test_list_as_json_lines(cli: Cli, making: Making) -> None:
    """--jsonl prints one object a line."""
    making.add()
    making.add()
    lines = cli("list", "--jsonl").out.splitlines()
    assert [json.loads(line)["id"] for line in lines] == [2, 1]
    assert cli("list", "--jsonl", "--status", "done").out == ""


def test_list_of_nothing_says_so_on_stderr(cli: Cli) -> None:
    """No match is exit code 0, with a word on stderr and nothing on stdout."""
    said = cli("list")
    assert (said.out, said.err) == ("", "no task matches\n")


def test_list_tells_what_pending_means(cli: Cli, making: Making) -> None:
    """Retrying, held and not due tasks are pending in the status column, and told apart by their note."""
    for options in ({}, {"max_retries": 3}, {}, {"at": datetime.now(UTC) + timedelta(days=2)}):
        making.add(**options)
    cli("hold", "3")
    making.run(1, DONE)
    making.run(2, CRASHED)
    making.query("UPDATE tasks SET available_at = clock_timestamp() + interval '1 hour', due = false WHERE id = 2")
    rows = {line.split()[1]: line for line in cli("list").out.splitlines()[1:]}
    assert "done" in rows["1"]
    assert "pending" in rows["2"]
    assert re.search(r"2 of 4 in (59m|1h).*exit 1", rows["2"])
    assert "held" in rows["3"]
    assert "not before" in rows["4"]


def test_show_has_the_runs_and_what_to_do_next(cli: Cli, making: Making) -> None:
    """The JSON is the task with its runs; the screen says why it failed and what would help."""
    task_id = making.add(title="bench", max_retries=0)
    making.run(task_id, BROKEN)
    found = cli("show", str(task_id), "--json").json
    assert found["error"] == {"class": "permanent", "cause": "bad_input", "message": "cannot be done"}
    assert [(run["attempt"], run["status"]) for run in found["runs"]] == [(1, "permanent")]
    assert cli("runs", str(task_id), "--json").json["runs"] == found["runs"]
    screen = cli("show", str(task_id)).out
    assert "cannot be done" in screen
    assert f"orchestrator retry {task_id}" in screen


def test_the_next_try_time_is_shown(cli: Cli, making: Making) -> None:
    """A rate limit with a reset time waits for it: class and time are in the JSON, and the screen prints when."""
    from orchestrator.domain.outcome import Outcome
    from orchestrator.domain.words import OutcomeClass

    task_id = making.add(max_retries=3)
    making.run(task_id, Outcome(OutcomeClass.RATE_LIMITED, cause="429", message="limit", retry_after=3600, elapsed=0.1))
    found = cli("show", str(task_id), "--json").json
    assert (found["status"], found["retry_count"], found["error"]["class"]) == ("pending", 0, "rate_limited")
    assert datetime.fromisoformat(found["next_attempt_at"]) > datetime.now(UTC) + timedelta(minutes=50)
    assert re.search(r"in (59m|1h)", cli("show", str(task_id)).out)


def test_logs_of_attempts(cli: Cli, making: Making) -> None:
    """Without --attempt the last one is printed; --tail cuts lines; an attempt that there is not is refused."""
    task_id = making.add(max_retries=3)
    for attempt in (1, 2):
        making.query("UPDATE tasks SET available_at = clock_timestamp(), due = true")
        (claim,) = making.claim()
        _say(making, claim, f"attempt {attempt}\nsec", "ond\n", "third")
        making.end(claim, CRASHED)
    assert cli("logs", str(task_id)).out == "attempt 2\nsecond\nthird\n"
    assert cli("logs", str(task_id), "--attempt", "1").out == "attempt 1\nsecond\nthird\n"
    assert cli("logs", str(task_id), "--tail", "2").out == "second\nthird\n"
    assert cli("logs", str(task_id), "--tail", "0").out == ""
    said = cli("logs", str(task_id), "--attempt", "3", "--json", code=2)
    assert "no attempt 3" in said.error["message"]
    lines = [json.loads(line) for line in cli("logs", str(task_id), "--json").out.splitlines()]
    assert {line["attempt"] for line in lines} == {2}
    assert lines[0].keys() == {"task_id", "attempt", "seq", "kind", "at", "bytes", "text"}


def test_logs_of_a_task_that_never_ran(cli: Cli, making: Making) -> None:
    """Nothing on stdout, a word on stderr, exit code 0."""
    said = cli("logs", str(making.add()))
    assert said.out == ""
    assert "not been started" in said.err


def test_logs_follow_to_the_end_of_an_ended_task(cli: Cli, making: Making) -> None:
    """-f replays what there is, and ends when the task has ended."""
    task_id = making.add()
    (claim,) = making.claim()
    _say(making, claim, "one\n", "two\n")
    making.end(claim, DONE)
    assert cli("logs", str(task_id), "-f").out == "one\ntwo\n"


# -- changing ----------------------------------------------------------------------------------------------------------


def test_cancel_and_its_exit_codes(cli: Cli, making: Making) -> None:
    """Cancelled, being cancelled and cancelled before are 0; done is 5; a running task is only asked."""
    pending, running, done = making.add(priority=0), making.add(priority=5), making.add(priority=9)
    making.run(done)
    making.claim()
    first = cli("cancel", str(pending), "--json").json
    assert (first["changed"], first["requested"]) == ([pending], [])
    assert cli("cancel", str(pending), "--json").json["already"] == [pending]
    assert cli("cancel", str(running), "--json").json["requested"] == [running]
    assert cli("cancel", str(running), "--json").json["already"] == [running]
    assert f"1 task already cancelled or asked to end: {running}" in cli("cancel", str(running)).out
    assert cli("cancel", str(done), "--json", code=5).error["code"] == "conflict"
    mixed = cli("cancel", f"{pending},{done}", "--json", code=5).json
    assert (mixed["already"], [each["id"] for each in mixed["skipped"]]) == ([pending], [done])


def test_retry_opens_only_what_has_failed_or_was_cancelled(cli: Cli, making: Making) -> None:
    """A failed task is pending again with its counts at 0 and its attempts kept; a pending one is exit code 5."""
    failed, pending = making.add(priority=1), making.add()
    making.run(failed, BROKEN)
    assert cli("retry", str(failed), "--json").json["changed"] == [failed]
    task = cli("show", str(failed), "--json").json
    assert (task["status"], task["retry_count"], task["lost_count"], task["attempt"]) == ("pending", 0, 0, 1)
    assert cli("retry", str(pending), "--json", code=5).error["code"] == "conflict"


def test_bulk_changes_need_yes_and_go_to_the_audit_trail(cli: Cli, making: Making) -> None:
    """Filters alone change nothing without --yes; --dry-run says what would be done; who and why is kept."""
    for agent in ("coder", "coder", "review"):
        making.add(agent)
    said = cli("cancel", "--agent", "coder", "--json", code=2)
    assert "--yes" in said.error["message"]
    tried = cli("cancel", "--agent", "coder", "--dry-run", "--json").json
    assert (tried["dry_run"], tried["changed"]) == (True, [1, 2])
    assert making.status(1, 2, 3) == ["pending"] * 3
    cli("cancel", "--agent", "coder", "--yes", "--reason", "superseded")
    assert making.status(1, 2, 3) == ["cancelled", "cancelled", "pending"]
    entries = cli("audit", "--json").json["audit"]
    assert [(each["task_id"], each["actor"], each["action"], each["reason"]) for each in entries] == [
        (2, "ops", "cancel", "superseded"),
        (1, "ops", "cancel", "superseded"),
    ]
    assert cli("audit", "--task", "1", "--json").json["audit"][0]["task_id"] == 1
    assert "superseded" in cli("audit").out


def test_hold_release_and_priority(cli: Cli, making: Making) -> None:
    """A held task is not claimed until it is released; the larger priority is claimed first."""
    first, second = making.add(), making.add()
    cli("hold", str(first))
    cli("priority", "-5", str(second))
    assert [claim.task_id for claim in making.claim(1)] == [second]
    assert making.claim(1) == []
    cli("release", str(first))
    assert [claim.task_id for claim in making.claim(1)] == [first]
    assert cli("show", str(second), "--json").json["priority"] == -5


def test_pause_and_resume(cli: Cli, making: Making) -> None:
    """A paused agent is not claimed, and says so; resume undoes it, and says whether there was anything to undo."""
    making.add("coder")
    assert cli("pause", "coder", "--for", "30m", "--json").json == {
        "agents": ["coder"],
        "paused": True,
        "seconds": 1800.0,
    }
    assert making.claim() == []
    (coder,) = (each for each in cli("agents", "--json").json["agents"] if each["name"] == "coder")
    assert (coder["state"], coder["configured"], coder["kind"]) == ("paused", True, "command")
    assert cli("resume", "coder", "--json").json["was_paused"] == ["coder"]
    assert cli("resume", "coder", "--json").json["was_paused"] == []
    assert len(making.claim()) == 1


def test_drain_by_name(cli: Cli, making: Making) -> None:
    """A worker is drained by the name that screens show."""
    (name,) = (each["name"] for each in cli("workers", "--json").json["workers"])
    assert cli("drain", name, "--json").json["worker"] == name
    (row,) = making.query("SELECT draining_at IS NOT NULL FROM workers")
    assert row[0] is True


def test_prune_removes_what_is_old(cli: Cli, making: Making) -> None:
    """Ended tasks that are old enough go, with --dry-run they are only counted; live ones stay."""
    old, live = making.add(), making.add()
    making.run(old)
    making.query("UPDATE tasks SET finished_at = finished_at - interval '40 days' WHERE id = :id", id=old)
    tried = cli("prune", "--older-than", "30d", "--dry-run", "--json").json
    assert (tried["dry_run"], tried["rows"]["tasks"]) == (True, 1)
    assert cli("prune", "--older-than", "30d").out.startswith("removed: runs 1, tasks 1, about")
    assert [task["id"] for task in cli("list", "--json").json["tasks"]] == [live]


def test_a_prune_that_is_interrupted_says_what_it_removed(
    cli: Cli, making: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C lets the batch come to its end: what went is told and in the audit trail; exit code 130."""
    monkeypatch.setattr("orchestrator.repositories.retention.BATCH", 2)
    old = [making.add() for _ in range(5)]
    for task in old:
        making.run(task)
    making.query("UPDATE tasks SET finished_at = finished_at - interval '40 days'")

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    event.listen(Session, "after_commit", interrupt, once=True)
    said = cli("prune", "--older-than", "30d", code=130)
    assert said.out.startswith("removed: runs 2, tasks 2, about")
    assert "interrupted: the rest is still there; run it again" in said.err
    assert making.query("SELECT details -> 'rows' ->> 'tasks' AS gone FROM audit WHERE action = 'prune'") == [("2",)]
    assert len(cli("list", "--json").json["tasks"]) == 3


# -- the whole queue ---------------------------------------------------------------------------------------------------


def test_status_and_alerts(cli: Cli, making: Making) -> None:
    """Status has the contract's keys; ready tasks without a worker are an alert, and alerts are exit code 1."""
    assert cli("alerts").code == 0
    making.add("nobodyhome")
    status = cli("status", "--json").json
    assert status.keys() == {"counts", "agents", "running", "workers", "lock_hold_ms", "alerts", "questions"}
    assert status["counts"]["pending"] == 1
    assert status["counts"]["finished"]["estimate"] is True
    assert status["lock_hold_ms"].keys() == {"mean", "p50", "p99", "count"}
    found = cli("alerts", "--json", code=1).json["alerts"]
    assert [(each["kind"], each["name"]) for each in found] == [("no_worker", "nobodyhome")]
    assert "orchestrator worker --agent nobodyhome" in cli("alerts", code=1).out


def test_costs_name_the_runs_of_unknown_cost(cli: Cli, making: Making) -> None:
    """Sums are of what is known, with the number of runs whose cost is not."""
    from dataclasses import replace

    from orchestrator.domain.outcome import Usage

    making.add()
    making.run(1, replace(DONE, usage=Usage(total_tokens=900, cost_usd=0.25)))
    making.add()
    making.run(2, DONE)
    (row,) = cli("costs", "--json").json["costs"]
    assert (row["agent"], row["runs"], row["unknown_cost_runs"], row["cost_usd"]) == ("coder", 2, 1, 0.25)
    assert "$0.25+" in cli("costs").out
    for by in ("day", "plan", "model"):
        assert by in cli("costs", "--by", by, "--since", "7d", "--json").json["costs"][0]


def test_screens_without_unicode(cli: Cli, making: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    """ORCHESTRATOR_ASCII=1: symbols and data are ASCII."""
    monkeypatch.setenv("ORCHESTRATOR_ASCII", "1")
    making.add(title="日本語 …")
    for command in (("list",), ("show", "1"), ("status",), ("dashboard", "--once")):
        assert cli(*command).out.isascii()
