"""The surroundings of one run of chaos: a cluster with fsync, a folder, a home, and a mark that all its processes carry."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from orchestrator.database import schema
from orchestrator.database.engine import connection_parameters
from tests.chaos.ledger import VARIABLE
from tests.servers import Cluster

MARK = "CHAOS_RUN"
"""The environment variable that every process of a run carries."""

ROOT = Path(__file__).resolve().parent.parent.parent


class Environment:
    """Made on entry, removed on exit, whatever happened in between. ``keep`` leaves logs and ledger for people."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="orchestrator-chaos-"))
        self.folder.chmod(0o711)  # the server's user must pass through
        self.home = self.folder / "home"
        self.logs = self.folder / "logs"
        self.ledger = self.folder / "ledger"
        self.keep = False
        self.started: set[int] = set()
        """Pids of all workers of this run."""
        self.cluster = Cluster(self.folder / "server", {"fsync": "on", "full_page_writes": "on"})

    def __enter__(self) -> Environment:
        try:
            for folder in (self.home, self.logs):
                folder.mkdir()
            self.ledger.touch()
            schema.upgrade(self.cluster.start())
            self.rows(_KEEP)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end_processes()
        with contextlib.suppress(Exception):
            self.cluster.kill()
        shutil.rmtree(self.folder / "server", ignore_errors=True)
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def variables(self) -> dict[str, str]:
        """The environment of a worker."""
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ORCHESTRATOR_", "PG")) or name == "ORCHESTRATOR_PG_BINDIR"
        }
        own |= {MARK: self.token, VARIABLE: str(self.ledger), "ORCHESTRATOR_HOME": str(self.home)}
        own |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
        return own

    # -- the database, from outside of the product --------------------------------------------------------------------

    def rows(self, statement: str, *values: Any) -> list[dict[str, Any]]:
        """The rows of a statement, committed. Raises psycopg.OperationalError while the server is away."""
        parameters = connection_parameters(self.cluster.url, application_name="chaos")
        with psycopg.connect(**parameters, autocommit=True, row_factory=dict_row) as connection:
            cursor = connection.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []

    def end_server(self, how: str) -> None:
        """End the server: ``fast``, ``immediate`` (no checkpoint, as in a crash), or ``kill`` (its postmaster alone)."""
        if how == "fast":
            self.cluster.stop()
        elif how == "kill":
            self.cluster.kill()
        else:
            pid = self.cluster.server.status().pid
            if pid is not None:
                os.kill(pid, signal.SIGQUIT)
                deadline = time.monotonic() + 30
                while self.cluster.server.status().pid is not None and time.monotonic() < deadline:
                    time.sleep(0.02)

    def start_server(self) -> None:
        """Start it again. Raises what the last try raised, after a minute."""
        deadline = time.monotonic() + 60
        while True:
            try:
                self.cluster.start()
                return
            except Exception:
                # A killed postmaster's children may still hold its memory.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    # -- processes ----------------------------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """The living processes that carry the mark of this run, with their command lines."""
        mark = f"{MARK}={self.token}".encode()
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = command.strip()
        return found

    def guardians(self) -> dict[int, str]:
        """The living processes that guard the agents of workers of this run: they have an environment of their own."""
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if any(b"guardian.py" in word for word in words) and self._ours(words):
                        found[int(entry.name)] = b" ".join(words).decode(errors="replace").strip()
        return found

    def _ours(self, words: list[bytes]) -> bool:
        return any(word.isdigit() and int(word) in self.started for word in words)

    def end_processes(self) -> None:
        """SIGKILL whatever still carries the mark."""
        deadline = time.monotonic() + 15
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


_KEEP = """
CREATE SCHEMA chaos;
CREATE TABLE chaos.gone (kind text, what jsonb);
CREATE FUNCTION chaos.keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO chaos.gone VALUES (TG_TABLE_NAME, to_jsonb(OLD)); RETURN OLD; END $$;
CREATE TRIGGER keep BEFORE DELETE ON tasks FOR EACH ROW EXECUTE FUNCTION chaos.keep();
CREATE TRIGGER keep BEFORE DELETE ON runs FOR EACH ROW EXECUTE FUNCTION chaos.keep();
"""
"""What is pruned is kept beside, in the transaction that removes it: the judge must know all that ever was."""


def zombies(parents: set[int]) -> list[int]:
    """Pids of zombies whose parent is one of *parents*."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                if state == "Z" and int(parent) in parents:
                    found.append(int(entry.name))
    return found


def children(pid: int) -> list[int]:
    """Pids of the children of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for listing in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, listing.read_text().split())
    return found
