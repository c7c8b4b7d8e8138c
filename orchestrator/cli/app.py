"""The command line: one typer application, and the one place where an error becomes an exit code.

``commands`` says which commands there are and where they live. None of them imports the service, SQLAlchemy or rich
before it is called.

Exit codes: 0 ok · 1 the work failed · 2 usage · 3 waits for a person · 4 not found · 5 conflict · 6 database · 70 ours ·
130 interrupted · 141 pipe closed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.main import get_command

from orchestrator.cli import printing
from orchestrator.cli.commands import SETTINGS, Commands
from orchestrator.cli.state import State
from orchestrator.errors import OrchestratorError

PROGRAM = "orchestrator"
PIPE_CLOSED = 141
OURS = 70


app = typer.Typer(
    name=PROGRAM,
    cls=Commands,
    no_args_is_help=True,
    help=(
        "Run AI agents as durable tasks out of PostgreSQL.\n\n"
        "Without a database URL this user's embedded PostgreSQL is started.\n\n"
        "Start with:  orchestrator run plan.yaml"
    ),
    **{**SETTINGS, "add_completion": True},
)


def _version(wanted: bool) -> None:
    if wanted:
        from orchestrator.settings import __version__

        printing.text(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    database_url: Annotated[
        str | None,
        typer.Option(
            "--database-url", metavar="URL", help="The database; else ORCHESTRATOR_DATABASE_URL, else the file."
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="Else ORCHESTRATOR_CONFIG, else ./orchestrator.toml."),
    ] = None,
    migrate: Annotated[
        bool, typer.Option("--migrate", help="Upgrade the schema of the database that the URL names, if it must be.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    state = context.find_root().obj
    state.database_url = database_url
    state.config = config
    state.migrate = migrate


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Prints every error, in the form that the command line asked for."""
    args = list(sys.argv[1:] if argv is None else argv)
    printing.prepare_streams()
    state = State()
    try:
        code = _invoke(args, state)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        printing.discard_stdout()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return _told(state, args, "interrupted", "interrupted", None, printing.INTERRUPTED)


def _invoke(args: list[str], state: State) -> int:
    """Parse and run. What people can act on is told here; interrupts and closed pipes go to the caller."""
    from typer.exceptions import Abort, Exit, TyperException

    if os.environ.get("_ORCHESTRATOR_COMPLETE"):
        get_command(app).main(args, prog_name=PROGRAM)
    try:
        command = get_command(app)
        with command.make_context(PROGRAM, args, obj=state) as context:
            command.invoke(context)
        return 0
    except Exit as done:
        return done.exit_code
    except Abort as error:
        raise KeyboardInterrupt from error
    except BrokenPipeError:
        raise
    except TyperException as error:
        return _usage(error, state, args)
    except OrchestratorError as error:
        return _known(error, state, args)
    except Exception as error:  # noqa: BLE001 - the one place that tells every error
        return _foreign(error, state, args)


def _told(
    state: State, args: Sequence[str], code: str, message: str, hint: str | None, exit_code: int, **more: Any
) -> int:
    as_json = state.as_json if state.as_json is not None else _asks_for_json(args)
    try:
        printing.failure(code, message, hint, as_json=as_json, more=more)
        sys.stdout.flush()
    except BrokenPipeError:
        printing.discard_stdout()
        return PIPE_CLOSED
    return exit_code


def _asks_for_json(args: Sequence[str]) -> bool:
    """Whether ``--json`` is among the options, for errors that come before the options are understood."""
    options = args[: args.index("--")] if "--" in args else args
    return "--json" in options or "--jsonl" in options


def _usage(error: Any, state: State, args: Sequence[str]) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else PROGRAM
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        if not _asks_for_json(args):
            printing.note(message)
            return 2
        message = f"{path} needs a command"
    hint = f"{path} --help shows how it is used"
    if path == f"{PROGRAM} add" and "extra argument" in message:
        hint = 'what the agent is told goes in --input "TEXT"; ' + hint
    return _told(state, args, "usage", " ".join(message.split()), hint, 2)


def _known(error: OrchestratorError, state: State, args: Sequence[str]) -> int:
    more: dict[str, Any] = {}
    if error.ids:
        more["ids"] = {
            name: value if isinstance(value, int | list) else str(value) for name, value in error.ids.items()
        }
    faults = getattr(error, "faults", None)
    if faults is not None:
        more["faults"] = [{"line": line, "message": message} for line, message in faults]
    return _told(state, args, error.code, error.message, error.hint, error.exit_code, **more)


def _foreign(error: Exception, state: State, args: Sequence[str]) -> int:
    """Tell an error that nobody of ours raised: a passing fault of the database, or a fault of ours with its trace."""
    if "sqlalchemy" in sys.modules:
        from orchestrator.database.transient import classify, driver_error, reason, unavailable

        if classify(error) is not None:
            return _known(unavailable(error), state, args)
        driver = driver_error(error)
        state_code = (driver.sqlstate or "") if driver is not None else ""
        if state_code == "42501":
            hint = "GRANT it the right, or use the user that owns the tables"
            message = f"the database user may not do this: {reason(error)}"
            return _told(state, args, "database_unavailable", message, hint, 6)
        if state_code.startswith("22"):
            message = f"the database refused a value: {reason(error)}"
            return _told(state, args, "invalid_input", message, None, 2)
    import traceback

    printing.note("".join(traceback.format_exception(error)).rstrip())
    message = f"{type(error).__name__}: {error}"
    return _told(
        state, args, "internal", message, "this is a fault of orchestrator: please report the lines above", OURS
    )
