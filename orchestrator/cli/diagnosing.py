"""What is wrong, and why: ``why`` of one task, ``doctor`` of the whole installation, ``metrics`` for those who watch."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from orchestrator.cli import options, printing, state
from orchestrator.cli.options import IdArgument, JsonOption
from orchestrator.errors import OrchestratorError

if TYPE_CHECKING:
    from orchestrator.domain.diagnosis import Check


def why(context: typer.Context, task_id: IdArgument, as_json: JsonOption = False) -> None:
    """Say why a task does not run, or what it is doing.

    The binding reason first, each with its number and the command that would
    change it; last what was checked and is not the cause.

    \b
    Examples:
      orchestrator why 7
      orchestrator why 7 --json | jq .reasons[0]
    """
    own = state.of(context, as_json)
    wanted = options.number(task_id, "task")
    with own.open() as orchestrator:
        facts = orchestrator.diagnosis.facts(wanted)
    from orchestrator.dashboard.terminal import look_for
    from orchestrator.dashboard.why import diagnose, render_why, why_json

    found = diagnose(facts)
    if as_json:
        printing.document(why_json(found))
    else:
        printing.lines(render_why(found, look_for(sys.stdout)))


# -- doctor ------------------------------------------------------------------------------------------------------------


def doctor(context: typer.Context, as_json: JsonOption = False) -> None:
    """Look for what is wrong, with remedies.

    Database, schema, indexes, vacuum, poolers, clocks, settings, agents and
    disk. Changes nothing. Exit code 1 when an error is found; a warning is no
    error.

    \b
    Examples:
      orchestrator doctor
      orchestrator doctor --json | jq '.checks[] | select(.state != "ok")'
    """
    own = state.of(context, as_json)
    found = list(_checks(own))
    if as_json:
        printing.document({"checks": [asdict(each) for each in found]})
    else:
        from orchestrator.dashboard.doctor import render_doctor
        from orchestrator.dashboard.terminal import look_for

        printing.lines(render_doctor(found, look_for(sys.stdout)))
    if any(each.state == "error" for each in found):
        raise typer.Exit(1)


def _checks(own: state.State) -> Iterator[Check]:
    """Every check that can be made; what one of them stumbles over does not keep the others from being made."""
    from orchestrator.dashboard import doctor as rules
    from orchestrator.database.embedded import home_directory
    from orchestrator.domain.diagnosis import Check

    try:
        settings = own.settings()
    except OrchestratorError as error:
        yield _failed("settings", error)
        return
    yield rules.settings_check({name: getattr(settings, name) for name in ("lease", "sweep", "heartbeat", "grace")})
    yield _agents(own)
    yield _hooks(own)
    home = home_directory()
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    yield rules.disk_check(str(home), shutil.disk_usage(there).free)
    if settings.database_url:
        yield Check("embedded", "ok", "not in use: a database URL is set")
        yield from _database(own, settings.database_url)
        return
    from orchestrator.database.embedded import EmbeddedServer

    status = EmbeddedServer(say=printing.note).status()
    if not status.running:
        text = f"the embedded PostgreSQL of {status.home} does not run; its database was not looked at"
        yield Check("embedded", "warning", text, "orchestrator db start")
        return
    yield Check("embedded", "ok", f"PostgreSQL {status.version} of {status.home} runs, pid {status.pid}")
    yield from _database(own, status.url)


def _failed(check: str, error: OrchestratorError) -> Check:
    from orchestrator.database.transient import SEE_DOCTOR
    from orchestrator.domain.diagnosis import Check

    hint = None if error.hint is None else error.hint.removesuffix(SEE_DOCTOR)
    return Check(check, "error", error.message, hint)


def _agents(own: state.State) -> Check:
    from orchestrator.agents.readiness import obstacles
    from orchestrator.dashboard.doctor import agents_check

    try:
        definitions = own.agents()
    except OrchestratorError as error:
        return _failed("agents", error)
    return agents_check({name: obstacles(each, os.environ) for name, each in definitions.items()})


def _hooks(own: state.State) -> Check:
    from orchestrator.dashboard.doctor import hooks_check
    from orchestrator.domain.alerts import Thresholds
    from orchestrator.hooks import read_hooks

    table = own.settings().alerts
    try:
        Thresholds.read(table)
        hooks = read_hooks(table.get("hooks", {}))
    except OrchestratorError as error:
        return _failed("hooks", error)
    found: dict[str, list[tuple[str, str]]] = {}
    for hook in hooks:
        found[hook.name] = [
            (f"{name} is not set here", f"set {name} for workers and watchdogs") for name in hook.missing(os.environ)
        ]
        if hook.command is not None and shutil.which(hook.command[0]) is None:
            found[hook.name].append((f"its command {hook.command[0]} was not found", "install it, or correct command"))
    return hooks_check(found)


def _database(own: state.State, url: str) -> Iterator[Check]:
    from orchestrator.dashboard import doctor as rules
    from orchestrator.database import schema
    from orchestrator.domain.diagnosis import Check
    from orchestrator.service import Orchestrator
    from orchestrator.settings import __version__

    try:
        orchestrator = Orchestrator(url, settings=own.settings())
        with orchestrator:
            facts = orchestrator.health.database()
            yield Check("database", "ok", f"{orchestrator.shown_url} answers")
            yield from rules.database_checks(facts, orchestrator.pooler)
            status = schema.status(url)
            yield rules.schema_check(status.have, status.need, status.compatible)
            if status.have == status.need:
                yield from rules.queue_checks(orchestrator.health.queue(), __version__)
                if names := [hook.name for hook in orchestrator.hooks]:
                    yield rules.deliveries_check(orchestrator.alerting.hooks(names))
    except OrchestratorError as error:
        yield _failed("database", error)


# -- metrics -----------------------------------------------------------------------------------------------------------


def metrics(context: typer.Context, as_json: JsonOption = False) -> None:
    """Print metrics as Prometheus text.

    The queue as it is now, and the last hour. Workers and the watchdog serve
    their own with --metrics-port. docs/metrics.md explains each name.

    \b
    Examples:
      orchestrator metrics
      orchestrator metrics > /var/lib/node_exporter/orchestrator.prom
    """
    own = state.of(context, as_json)
    with own.open() as orchestrator:
        numbers = orchestrator.health.numbers()
    from orchestrator.metrics import queue_families, text

    if as_json:
        samples = [
            {"name": sample.name, "labels": dict(sample.labels), "value": sample.value}
            for family in queue_families(numbers)
            for sample in family.samples
        ]
        printing.document({"metrics": samples})
    else:
        printing.raw(text(queue_families(numbers)))
