"""The ground that everything is measured on: one server with durable commits, databases by template, and processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg

from orchestrator.database import schema
from orchestrator.database.engine import connection_parameters
from tests.bench.worker import Spec
from tests.servers import Cluster, database_of

ROOT = Path(__file__).resolve().parent.parent.parent

SERVER = {
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "shared_buffers": "512MB",
    "max_connections": "250",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "15min",
    "wal_buffers": "16MB",
    "maintenance_work_mem": "256MB",
    "random_page_cost": "1.1",
    "jit": "off",
    "autovacuum_naptime": "10s",
}
"""Every commit is on the disk before it is answered. The rest is what a server that is only a queue would have."""
HASTY = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}
"""For smoke runs, whose figures nobody reads."""

PATIENCE = 600.0
"""Seconds after which a process that was to end by itself is given up."""


class Running:
    """A worker process that was started; ``end`` returns what it found."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log
        self.seen = psutil.Process(process.pid)

    def end(self, *, tell: bool = False, patience: float = PATIENCE) -> dict[str, Any]:
        """Wait for its end, with *tell* after telling it to stop. Raises RuntimeError when it did not end well."""
        if tell:
            self.process.send_signal(signal.SIGTERM)
        try:
            out, _ = self.process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, _ = self.process.communicate()
            raise RuntimeError(f"a worker had not ended after {patience:g} s; it said: {self._said()}") from None
        if self.process.returncode:
            raise RuntimeError(f"a worker ended with {self.process.returncode}; it said: {self._said()}")
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found

    def _said(self) -> str:
        return self.log.read_text(errors="replace")[-600:] or "nothing"


class Ground:
    """Made on entry, gone on exit. Databases are copies of templates, so that every run begins with the same pages."""

    def __init__(self, small: bool = False) -> None:
        self.settings = SERVER | (HASTY if small else {})
        self.folder = Path(tempfile.mkdtemp(prefix="orchestrator-bench-"))
        self.folder.chmod(0o711)  # the server's user must pass through
        self.cluster = Cluster(self.folder / "server", self.settings)
        self._templates: set[str] = set()
        self._running: list[Running] = []

    def __enter__(self) -> Ground:
        try:
            self.cluster.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running:
            if running.process.poll() is None:
                running.process.kill()
                running.process.wait()
        with contextlib.suppress(Exception):
            self.cluster.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- databases ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def session(self, url: str) -> Iterator[psycopg.Connection[Any]]:
        """A bare connection, each statement its own transaction."""
        with psycopg.connect(**connection_parameters(url, application_name="bench"), autocommit=True) as connection:
            yield connection

    def rows(self, url: str, statement: str, *values: Any) -> list[Any]:
        """The rows of one statement on *url*, committed."""
        with self.session(url) as session:
            cursor = session.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []

    def run(self, url: str, statement: str) -> None:
        """One statement on *url*, committed."""
        self.rows(url, statement)

    def one(self, url: str, statement: str, *values: Any) -> Any:
        """The first value of the first row."""
        return self.rows(url, statement, *values)[0][0]

    def fresh(self, template: str = "empty", fill: Callable[[str], None] | None = None) -> str:
        """The URL of a new database with the schema, and with what *fill* puts into it: made once for a *template*."""
        source = f"template_{template}"
        with self.session(self.cluster.url) as session:
            if template not in self._templates:
                session.execute(f"DROP DATABASE IF EXISTS {source} WITH (FORCE)")
                session.execute(f"CREATE DATABASE {source}")
                url = database_of(self.cluster.url, source)
                schema.upgrade(url)
                if fill is not None:
                    fill(url)
                self.rows(url, "VACUUM ANALYZE")
                self._templates.add(template)
            session.execute("DROP DATABASE IF EXISTS bench WITH (FORCE)")
            session.execute(f"CREATE DATABASE bench TEMPLATE {source} STRATEGY file_copy")
            session.execute("CHECKPOINT")
        return database_of(self.cluster.url, "bench")

    def bare(self, statements: str) -> str:
        """The URL of a new database that has only what *statements* make: for the limits."""
        with self.session(self.cluster.url) as session:
            session.execute("DROP DATABASE IF EXISTS bare WITH (FORCE)")
            session.execute("CREATE DATABASE bare")
        url = database_of(self.cluster.url, "bare")
        self.rows(url, statements)
        self.rows(url, "VACUUM ANALYZE")
        self.rows(url, "CHECKPOINT")
        return url

    def forget(self, template: str) -> None:
        """Drop a template: its disk space is needed for others."""
        self._templates.discard(template)
        self.rows(self.cluster.url, f"DROP DATABASE IF EXISTS template_{template} WITH (FORCE)")

    def server_cpu(self) -> float:
        """Seconds of CPU that the server's living processes have used so far."""
        pid = self.cluster.server.status().pid
        assert pid is not None
        postmaster = psutil.Process(pid)
        total = 0.0
        for process in [postmaster, *postmaster.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                used = process.cpu_times()
                total += used.user + used.system
        return total

    # -- processes ----------------------------------------------------------------------------------------------------

    def variables(self) -> dict[str, str]:
        """The environment of every process that is measured."""
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("ORCHESTRATOR_", "PG"))}
        return kept | {"ORCHESTRATOR_HOME": str(self.folder / "home"), "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}

    def start(self, url: str, spec: Spec) -> Running:
        """Start a worker."""
        log = self.folder / f"worker-{len(self._running)}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.worker", url, spec.as_argument()],
                cwd=ROOT,
                env=self.variables(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
        running = Running(process, log)
        self._running.append(running)
        return running

    def await_workers(self, url: str, number: int, patience: float = PATIENCE) -> None:
        """Wait until so many workers are registered and live."""
        self.wait(
            lambda: (
                self.one(url, "SELECT count(*) FROM workers WHERE stopped_at IS NULL AND dead_at IS NULL") >= number
            ),
            f"{number} workers",
            patience,
        )

    def wait(self, condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
        """Look every 0.1 s. Raises RuntimeError when a worker ended badly meanwhile, or after *patience*."""
        deadline = time.monotonic() + patience
        while not condition():
            for running in self._running:
                if running.process.poll():
                    running.end()
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} after {patience:g} s")
            time.sleep(0.1)
