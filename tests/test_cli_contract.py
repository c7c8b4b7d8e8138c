"""The contract of the command line that holds for every command: JSON, exit codes, help, errors, what it costs."""

from __future__ import annotations

import inspect
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from orchestrator.cli.commands import COMMANDS, LATER, load
from tests.commands import ROOT, Cli, environment, process, strict

FINE: dict[str, tuple[str, ...]] = {
    "submit": ("submit", "plan.yaml"),
    "run": ("run", "done.yaml"),
    "add": ("add", "coder", "--input", "x"),
    "list": ("list", "--status", "pending,done", "--search", "x", "--tag", "a=b"),
    "show": ("show", "1"),
    "runs": ("runs", "1"),
    "why": ("why", "1"),
    "status": ("status",),
    "alerts": ("alerts",),
    "dashboard": ("dashboard", "--once"),
    "costs": ("costs", "--by", "day", "--since", "7d"),
    "cancel": ("cancel", "1", "--dry-run"),
    "retry": ("retry", "--status", "failed", "--dry-run"),
    "hold": ("hold", "1"),
    "release": ("release", "1"),
    "priority": ("priority", "-5", "1"),
    "agents": ("agents",),
    "workers": ("workers",),
    "pause": ("pause", "coder", "--for", "30m"),
    "resume": ("resume", "coder"),
    "limit": ("limit", "--key", "k", "--max-running", "3"),
    "questions": ("questions",),
    "approve": ("approve", "--agent", "coder", "--dry-run"),
    "deny": ("deny", "--agent", "coder", "--dry-run"),
    "audit": ("audit", "--task", "1"),
    "workspaces": ("workspaces", "--clean", "--dry-run"),
    "doctor": ("doctor",),
    "metrics": ("metrics",),
    "prune": ("prune", "--older-than", "30d", "--dry-run"),
    "db status": ("db", "status"),
    "db url": ("db", "url"),
    "db upgrade": ("db", "upgrade"),
    "db sql": ("db", "sql"),
}
"""A call of every command with --json that ends by itself, and goes well on one pending task."""

NOT_FOUND = {
    "show": ("show", "999"),
    "runs": ("runs", "999"),
    "why": ("why", "999"),
    "logs": ("logs", "999"),
    "cancel": ("cancel", "999"),
    "retry": ("retry", "999"),
    "hold": ("hold", "999"),
    "release": ("release", "999"),
    "priority": ("priority", "3", "999"),
    "drain": ("drain", "nobody"),
    "approve": ("approve", "999"),
    "deny": ("deny", "999"),
    "answer": ("answer", "999", "yes"),
    "add": ("add", "coder", "--after", "999"),
}

BAD = {
    "submit": ("submit", "missing.yaml"),
    "run": ("run", "missing.yaml"),
    "add": ("add", "nobody"),
    "list": ("list", "--status", "finished"),
    "show": ("show", "x"),
    "runs": ("runs",),
    "why": ("why", "x"),
    "logs": ("logs", "-1"),
    "status": ("status", "--bogus"),
    "alerts": ("alerts", "extra"),
    "dashboard": ("dashboard", "--refresh", "no"),
    "costs": ("costs", "--by", "week"),
    "cancel": ("cancel",),
    "retry": ("retry", "--agent", "coder"),
    "hold": ("hold", "1.5"),
    "release": ("release", "0"),
    "priority": ("priority", "much", "1"),
    "agents": ("agents", "--bogus"),
    "workers": ("workers", "--bogus"),
    "pause": ("pause", "nobody"),
    "resume": ("resume",),
    "limit": ("limit", "coder", "--max-running", "3"),
    "drain": ("drain",),
    "workspaces": ("workspaces", "--force", "x"),
    "doctor": ("doctor", "--bogus"),
    "metrics": ("metrics", "extra"),
    "audit": ("audit", "--limit", "0"),
    "prune": ("prune", "--older-than", "long"),
    "db status": ("db", "status", "--bogus"),
    "db url": ("db", "url", "--bogus"),
    "db upgrade": ("db", "upgrade", "extra"),
    "db sql": ("db", "sql", "--revision", "nope"),
    "db": ("db", "bogus"),
    "": ("bogus",),
    "watchdog": ("watchdog", "--interval", "often"),
}


def _prepared(cli: Cli, engine: Engine) -> None:
    """One pending task, and two plans."""
    cli.write("plan.yaml", "tasks: [{name: a, agent: coder, input: x}]\n")
    cli.write("done.yaml", "tasks: []\n")
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO tasks (agent, title) VALUES ('coder', 't')"))


def _tasks(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM tasks")).scalar_one())


@pytest.mark.parametrize("name", FINE)
def test_json_is_one_document_when_all_is_fine(cli: Cli, engine: Engine, name: str) -> None:
    """A command that goes well prints one document with --json, also with warnings and debug logs on; else plain text."""
    _prepared(cli, engine)
    code = 1 if name == "alerts" else 0
    logging.getLogger("orchestrator").setLevel(logging.DEBUG)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            said = cli(*FINE[name], "--json", code=code)
    finally:
        logging.getLogger("orchestrator").setLevel(logging.NOTSET)
    found = said.json
    assert name in ("show", "run", "submit") or "error" not in found
    assert not isinstance(found.get("error"), dict)
    told = cli(*FINE[name], code=code)
    assert "\x1b" not in told.out + told.err
    assert told.out or told.err


@pytest.mark.parametrize("name", NOT_FOUND)
def test_what_is_not_there(cli: Cli, name: str) -> None:
    """What does not exist is exit code 4, as a document that names it and says what to do next."""
    said = cli(*NOT_FOUND[name], "--json", code=4)
    assert said.error["code"] == "not_found"
    assert re.search("999|nobody", said.error["message"])
    if name in ("show", "drain"):
        told = cli(*NOT_FOUND[name], code=4)
        assert told.out == ""
        assert told.err.startswith("error: ")


@pytest.mark.parametrize("name", BAD)
def test_usage_errors(cli: Cli, engine: Engine, name: str) -> None:
    """A wrong argument is exit code 2, whether typer or we refuse it; nothing is written, and nothing on stdout but JSON."""
    said = cli(*BAD[name], "--json", code=2)
    assert said.error["code"] in ("usage", "invalid_input", "invalid_plan", "unknown_agent")
    assert said.error["message"]
    told = cli(*BAD[name], code=2)
    assert told.out == ""
    assert told.err.startswith("error: ")
    assert _tasks(engine) == 0


@pytest.mark.parametrize("name", [name for name in FINE if name not in ("db sql", "db url", "doctor")])
def test_json_when_the_database_is_down(cli: Cli, engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A database that does not answer is exit code 6 and a document, for every command that needs one."""
    _prepared(cli, engine)
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", "postgresql://nobody:secret@127.0.0.1:1/none")
    said = cli(*FINE[name], "--json", code=6)
    assert said.error["code"] == "database_unavailable"
    assert "secret" not in said.out + said.err


def test_every_command_is_in_the_tables_above() -> None:
    """A new command cannot be forgotten: it has to stand in FINE, or be one that works until it is stopped."""
    named = {name.split()[0] for name in FINE} | {"worker", "watchdog", "logs", "drain", "answer"}
    assert {name for name, place in COMMANDS.items() if place.heading != LATER} == named


@pytest.mark.parametrize("name", [name for name, place in COMMANDS.items() if place.heading == LATER])
def test_what_comes_later_says_so(cli: Cli, name: str) -> None:
    """A command without machinery is listed, and refuses whatever it is given with exit code 2."""
    assert name in cli("--help").out
    said = cli(name, "7", "--whatever", "--json", code=2)
    assert "is not part of this version yet" in said.error["message"]
    assert "not part of this version yet" in cli(name, code=2).err


# -- help --------------------------------------------------------------------------------------------------------------


def _helped() -> list[tuple[str, ...]]:
    below = [("db", name) for name in load("db").commands]
    return [*((name,) for name in COMMANDS), *below]


@pytest.mark.parametrize("path", _helped(), ids=" ".join)
def test_help_reads_well_at_80_columns(cli: Cli, path: tuple[str, ...]) -> None:
    """The help of every command fits 80 columns, and shows an example that begins with its own name."""
    said = cli(*path, "--help")
    assert max(map(len, said.out.splitlines())) <= 80
    if path != ("db",) and COMMANDS[path[0]].heading != LATER:
        assert re.search(rf"orchestrator .*{path[-1]}\b", said.out.partition("Example")[2]), said.out
    assert cli(*path, "-h").out == said.out


def test_the_first_lines_of_the_help_are_those_of_the_commands() -> None:
    """The top level, which imports no command, says of each what its own help begins with."""
    for name, place in COMMANDS.items():
        if place.heading == LATER or name == "db":
            continue
        assert inspect.cleandoc(load(name).help).splitlines()[0] == place.summary, name


def test_help_does_not_load_the_machinery() -> None:
    """``orchestrator --help`` brings no SQLAlchemy, psycopg, rich, yaml, nor any module of a command."""
    code = (
        "import sys; from orchestrator.cli.app import main; code = main(['--help']); "
        "loaded = [n for n in sys.modules if n.split('.')[0] in ('sqlalchemy', 'psycopg', 'rich', 'yaml', 'alembic')]"
        " + [n for n in sys.modules if n.startswith('orchestrator.') and n.split('.')[1] not in ('cli', 'errors')]"
        " + [n for n in sys.modules if n in ('orchestrator.cli.looking', 'orchestrator.cli.running')]; "
        "print(loaded, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(None), cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"


def test_the_generated_pages_are_up_to_date() -> None:
    """docs/states.md and docs/reference/cli.md are what scripts/docs writes."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "docs", "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# -- errors for people -------------------------------------------------------------------------------------------------


def test_wrong_names_get_the_nearest_right_one(cli: Cli) -> None:
    """A mistyped command, option, status or agent is answered with the one that was meant."""
    assert "'list'" in cli("lits", code=2).err
    assert "--limit" in cli("list", "--limt", "3", code=2).err
    assert "'failed'" in cli("list", "--status", "faild", code=2).err
    assert "'coder'" in cli("add", "codr", code=2).err
    assert "'status'" in cli("db", "statu", code=2).err


def test_markup_and_control_characters_of_an_argument_are_shown_as_they_are(cli: Cli) -> None:
    """What an error quotes is neither markup nor a control sequence."""
    said = cli("add", "[/red]\x1b[2J\x9b", code=2)
    assert "[/red]" in said.err
    assert "\x1b" not in said.err
    assert "\x9b" not in said.err
    assert cli("add", "a\x1b[2Jb", "--json", code=2).error["message"].count("x1b") == 1


def test_a_fault_of_ours_is_exit_code_70(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that nobody expected is told with its trace on stderr, and as a document on stdout."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("nothing to divide")

    monkeypatch.setattr("orchestrator.repositories.reading.ReadingRepository.status", broken)
    said = cli("status", "--json", code=70)
    assert said.error["code"] == "internal"
    assert "nothing to divide" in said.error["message"]
    assert "Traceback" in said.err


def test_ctrl_c_in_a_short_command_is_exit_code_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt ends a command with 130 and, with --json, a document."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("orchestrator.repositories.reading.ReadingRepository.status", interrupted)
    assert cli("status", "--json", code=130).error["code"] == "interrupted"


def test_no_url_and_no_schema(cli: Cli, empty_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database without our tables is refused with what to run, until --migrate or db upgrade has been said."""
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", empty_database)
    said = cli("status", "--json", code=6)
    assert said.error["code"] == "schema_out_of_date"
    assert re.search(r"schema is at nothing, needs \d+: run orchestrator db upgrade", said.error["message"])
    assert cli("db", "status", "--json", code=6).json["schema"] is None
    assert cli("--migrate", "status", "--json").json["counts"]["pending"] == 0
    assert cli("db", "upgrade", "--json").json["changed"] is False
    assert cli("db", "status", "--json").json["compatible"] is True


def test_db_upgrade_says_what_it_did(cli: Cli, empty_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first upgrade changes the schema, the second one finds nothing to do."""
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", empty_database)
    first = cli("db", "upgrade", "--json").json
    assert (first["before"], first["changed"], first["schema"]) == (None, True, first["needs"])
    again = cli("db", "upgrade")
    assert again.out == ""
    assert "nothing to do" in again.err


def test_db_sql_is_a_script_that_makes_the_tables(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """``db sql`` needs no database and prints the DDL of every table."""
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", "postgresql://127.0.0.1:1/none")
    script = cli("db", "sql").out
    assert "CREATE TABLE tasks" in script
    assert "CREATE TABLE runs" in script


def test_the_embedded_server_is_not_touched_while_a_url_is_set(cli: Cli) -> None:
    """``db start`` and ``db stop`` are about the embedded server, and refuse to guess."""
    for command in ("start", "stop"):
        assert cli("db", command, "--json", code=5).error["code"] == "conflict"


def test_wrong_urls_are_usage_errors_that_do_not_show_the_password(cli: Cli) -> None:
    """A URL of another database is exit code 2; no message has the password."""
    said = cli("--database-url", "mysql://u:secret@h/d", "status", "--json", code=2)
    assert "secret" not in said.out + said.err


def test_both_spellings_of_the_url(cli: Cli) -> None:
    """postgresql+psycopg:// is the same database as postgresql://."""
    cli.add()
    other = cli.url.replace("postgresql://", "postgresql+psycopg://")
    assert cli("--database-url", other, "list", "--json").json["tasks"][0]["id"] == 1


def test_a_named_configuration_must_be_there(cli: Cli) -> None:
    """--config names a file that is read, or an error that names it."""
    said = cli("--config", "other.toml", "agents", "--json", code=2)
    assert "other.toml" in said.error["message"]
    cli.write("other.toml", '[agents.solo]\ncommand = ["true"]\n')
    names = [each["name"] for each in cli("--config", "other.toml", "agents", "--json").json["agents"]]
    assert names == ["solo"]


# -- real processes ----------------------------------------------------------------------------------------------------


def test_a_closed_pipe_ends_quietly_with_141(database_url: str, tmp_path: Path) -> None:
    """Whoever reads may stop reading: no traceback, exit code 141."""
    command = f"{sys.executable} -m orchestrator db sql; echo code $? >&2"
    done = subprocess.run(
        ["sh", "-c", f"({command}) | true"],
        env=environment(database_url, PYTHONWARNINGS="default"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    # "true" may be gone before or after the first write; the answer is the same.
    assert done.stderr.splitlines() == ["code 141"], done.stderr


def test_python_warnings_do_not_reach_stdout(database_url: str, tmp_path: Path) -> None:
    """With PYTHONWARNINGS=default and a closed stdin, stdout is the document alone."""
    said = process(
        "status", "--json", url=database_url, cwd=tmp_path, env={"PYTHONWARNINGS": "default"}, preexec_fn=_close_stdin
    )
    assert said.code == 0
    assert strict(said.out)["counts"]["pending"] == 0


def _close_stdin() -> None:
    import os

    os.close(0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stdout", "stderr"])
def test_closed_streams_do_no_harm(database_url: str, tmp_path: Path, how: str) -> None:
    """A process started with a stream closed works, and writes into nobody's socket."""
    import os

    number = {"stdout": 1, "stderr": 2}[how]
    closing: Callable[[], None] = lambda: os.close(number)  # noqa: E731
    said = process("add", "coder", "--force", url=database_url, cwd=tmp_path, preexec_fn=closing)
    assert said.code == 0
    listed = process("list", "--json", url=database_url, cwd=tmp_path)
    assert [task["id"] for task in strict(listed.out)["tasks"]] == [1]
