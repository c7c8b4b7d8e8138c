"""What the tests of faults have in common: real worker processes, agents with a ledger, and looks at a restless database."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import psutil
import psycopg
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from orchestrator.database.engine import connection_parameters
from tests.commands import ROOT, start

AGENT = ROOT / "tests" / "beating_agent.py"

CONFIG = """\
heartbeat = {heartbeat}
lease = {lease}
sweep = {sweep}
poll = 0.5
grace = 1
retry = {{initial = 0.2, factor = 2, max = 2}}

[agents.a]
command = {command}
output = "json"
kill_grace = 1
"""


def ask(url: str, statement: str, *values: Any) -> list[Any]:
    """The rows of a statement, on a connection of its own; committed."""
    with psycopg.connect(**connection_parameters(url, application_name="test")) as connection:
        cursor = connection.execute(statement, values or None)
        return cursor.fetchall() if cursor.description else []


@contextmanager
def fresh_engine(url: str) -> Iterator[Any]:
    """An engine that connects anew for each use, for the helpers that take an engine while the server is restarted."""
    engine = create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(**connection_parameters(url)), poolclass=NullPool
    )
    yield engine
    engine.dispose()


class Line(NamedTuple):
    """One line of the ledger."""

    task: int
    attempt: int
    what: str
    at: float


@dataclass
class WorkerProcess:
    """``orchestrator worker`` in a process of its own; its log is in a file."""

    name: str
    process: subprocess.Popen[str]
    log: Path

    def lines(self, words: str) -> list[str]:
        """The lines of its log with *words* in them."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if words in line]

    def cpu(self) -> float:
        """Seconds of CPU that it has used, its agents not counted."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def ended(self) -> int:
        """Wait for its end; return the exit code."""
        return self.process.wait(60)


class Fleet:
    """Worker processes with one kind of agent, in a folder; at the end of the block they are killed."""

    def __init__(self, folder: Path, *, heartbeat: float = 1.0, lease: float = 60.0, sweep: float = 1.0) -> None:
        self.folder = folder
        self.ledger = folder / "ledger"
        command = json.dumps([sys.executable, "-S", "-E", str(AGENT)])
        (folder / "orchestrator.toml").write_text(
            CONFIG.format(heartbeat=heartbeat, lease=lease, sweep=sweep, command=command)
        )
        self._started: list[WorkerProcess] = []

    def worker(self, url: str, name: str, *arguments: str, **options: Any) -> WorkerProcess:
        """Start a worker."""
        log = self.folder / f"{name}.log"
        with log.open("ab") as file:
            process = start(
                "worker", "--name", name, *arguments, url=url, cwd=self.folder, stdout=file, stderr=file, **options
            )
        made = WorkerProcess(name, process, log)
        self._started.append(made)
        return made

    def add(self, url: str, *gates: str, deaf: bool = False, **columns: Any) -> list[int]:
        """Add one task for each of *gates*: its agent ends when ``open`` was called with that name."""
        ids = []
        for gate in gates:
            prompt = {"ledger": str(self.ledger), "until": str(self.folder / gate), "deaf": deaf}
            names = "".join(f", {name}" for name in columns)
            places = ", %s" * len(columns)
            ((id_,),) = ask(
                url,
                f"INSERT INTO tasks (agent, input{names}) VALUES ('a', to_jsonb(%s::text){places}) RETURNING id",
                json.dumps(prompt),
                *columns.values(),
            )
            ids.append(id_)
        return ids

    def open(self, gate: str) -> None:
        """Let the agents behind *gate* end."""
        (self.folder / gate).touch()

    def read(self, task: int | None = None, attempt: int | None = None, what: str | None = None) -> list[Line]:
        """The ledger, in the order of time."""
        found = []
        for line in self.ledger.read_text().splitlines() if self.ledger.exists() else ():
            words = line.split()
            if len(words) == 4:
                found.append(Line(int(words[0]), int(words[1]), words[2], float(words[3])))
        return sorted(
            (
                line
                for line in found
                if task in (None, line.task) and attempt in (None, line.attempt) and what in (None, line.what)
            ),
            key=lambda line: line.at,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        for each in self._started:
            if kind is not None:
                print(f"--- log of {each.name}\n{each.log.read_text(errors='replace')}")
            for child in (
                psutil.Process(each.process.pid).children(recursive=True) if each.process.poll() is None else ()
            ):
                child.kill()
            each.process.kill()
            each.process.wait()


__all__ = ["Fleet", "Line", "WorkerProcess", "ask", "fresh_engine"]
