"""Servers that a test may restart, kill, freeze or cut off: clusters, standbys, PgBouncer, and a TCP proxy.

All of them are reached by private sockets or on the loopback address only. Each is a context manager that leaves no
process behind. The proxy and PgBouncer connect to a cluster by its socket, so no cluster ever opens a port.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import psycopg
from pytest_postgresql.janitor import DatabaseJanitor

from orchestrator.database.embedded import NAME, EmbeddedServer
from orchestrator.database.engine import connection_parameters

FAST = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "32MB"}
"""Settings of servers that only tests use. A commit is still on its way to the disk when it is answered: tests kill."""


def database_of(url: str, name: str) -> str:
    """``url`` with another database."""
    front, question, query = url.partition("?")
    return f"{front.rpartition('/')[0]}/{name}{question}{query}"


@contextlib.contextmanager
def new_database(server_url: str, name: str) -> Iterator[str]:
    """Another, empty database on the same server, dropped at the end, whoever is still connected."""
    parameters = connection_parameters(server_url)
    janitor = DatabaseJanitor(
        user=parameters.get("user", NAME),
        host=parameters.get("host", ""),
        port=parameters.get("port", 5432),
        password=parameters.get("password"),
        dbname=name,
        template_dbname="template0",
        maintenance_dbname=parameters["dbname"],
    )
    with janitor:
        yield database_of(server_url, name)


class Cluster:
    """A PostgreSQL of a test's own. ``folder`` must be one that the server's user can reach: ``test_folder / name``."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.server = EmbeddedServer(folder, settings={**FAST, **(settings or {})}, say=lambda _line: None)
        self.folder = folder

    @property
    def url(self) -> str:
        """The URL of its database ``orchestrator``, by socket."""
        return self.server.url()

    def start(self) -> str:
        """Start it, also after ``stop`` or ``kill``; return the URL."""
        return self.server.start()

    def stop(self) -> None:
        """Stop it as an operator would (mode fast)."""
        self.server.stop(force=True)

    def restart(self) -> None:
        """Stop and start: sessions end with 57P01."""
        self.stop()
        self.start()

    def crash(self) -> None:
        """Stop it in immediate mode: sessions end without a word that can be relied on, the next start recovers."""
        pid = self.server.status().pid
        if pid is not None:
            os.kill(pid, signal.SIGQUIT)
            _await(lambda: self.server.status().pid is None, f"postmaster {pid} is still there after SIGQUIT")

    def kill(self) -> None:
        """SIGKILL the postmaster; returns when it is gone. Its children notice by themselves."""
        pid = self.server.status().pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            _await(lambda: self.server.status().pid is None, f"postmaster {pid} is still there after SIGKILL")

    def standby(self, folder: Path) -> Cluster:
        """A streaming standby of this running cluster, not started yet. ``SELECT pg_promote()`` makes it a primary."""
        copy = Cluster(folder)
        user = self.server._server_user()
        with copy.server._lock(user):
            binaries = copy.server._usable_binaries(user)
            copy.server._own(copy.server.data, user)
            arguments = ["-h", str(self.server.sock), "-p", "5432", "-U", NAME, "-D", str(copy.server.data)]
            copy.server._run(
                binaries / "pg_basebackup",
                *arguments,
                "-R",
                "-X",
                "stream",
                "--checkpoint=fast",
                "--no-sync",
                user=user,
            )
        return copy

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Postmasters that a killed one left half-dead are not worth a polite stop.
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class PgBouncer:
    """Debian's PgBouncer in front of one database, in transaction mode, on a free loopback port."""

    def __init__(self, url: str, *, pool_size: int = 3, mode: str = "transaction") -> None:
        self._target = connection_parameters(url)
        self._pool_size = pool_size
        self._mode = mode
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="orchestrator-pgbouncer-"))

    @property
    def url(self) -> str:
        """The URL through the pooler."""
        return f"postgresql://{self._target['user']}@127.0.0.1:{self.port}/{self._target['dbname']}"

    def __enter__(self) -> Self:
        target, file = self._target, self.folder / "pgbouncer.ini"
        file.write_text(
            "[databases]\n"
            f"{target['dbname']} = host={target['host']} port={target.get('port', 5432)} user={target['user']}\n"
            "[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = any\npool_mode = {self._mode}\ndefault_pool_size = {self._pool_size}\nmax_client_conn = 200\n"
            f"ignore_startup_parameters = extra_float_digits\nlogfile = {self.folder / 'log'}\n"
        )
        command = ["pgbouncer", "-q", str(file)]
        if os.geteuid() == 0:  # it refuses to run as root
            # The server's user is the one whom the cluster's private socket lets in.
            user = EmbeddedServer(self.folder)._server_user()
            assert user is not None
            shutil.chown(self.folder, user.name)
            command[1:1] = ["-u", user.name]
        executable = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
        self._process = subprocess.Popen(
            [executable, *command[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _await(self._answers, "PgBouncer does not answer")
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            log = self.folder / "log"
            raise AssertionError(f"PgBouncer ended: {log.read_text() if log.exists() else self._process.returncode}")
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.url, connect_timeout=2).close()
            return True
        return False

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class TcpProxy:
    """A loopback port that leads to a cluster's socket, and can fail in the ways of a network.

    - ``freeze()``: nothing passes and nothing is refused, as behind a firewall that drops packets; ``thaw()`` ends it.
    - ``mute()``: questions pass, answers do not: a commit happens and nobody learns of it; ``thaw()`` ends it.
    - ``stall(n)``: the connections of today, or the n-th of them, are dead in silence for good; new ones work.
    - ``cut()``: every connection is reset; ``refuse()``: also new ones, until ``thaw()``.
    """

    def __init__(self, url: str) -> None:
        self._parameters = connection_parameters(url)
        host, port = self._parameters["host"], self._parameters.get("port", 5432)
        self._target = f"{host}/.s.PGSQL.{port}" if str(host).startswith("/") else (str(host), int(port))
        self._lock = threading.Lock()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._from_server: dict[socket.socket, None] = {}  # in the order in which they were made
        self._stalled: list[socket.socket] = []
        self._frozen = self._muted = self._refusing = False
        self._stopping = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="tcp-proxy", daemon=True)
        self.port: int = self._listener.getsockname()[1]

    @property
    def url(self) -> str:
        """The URL through the proxy."""
        user, name = quote(str(self._parameters["user"])), quote(str(self._parameters["dbname"]))
        return f"postgresql://{user}@127.0.0.1:{self.port}/{name}"

    accepted = 0
    """How many connections were made since the beginning."""
    refused = 0
    """How many were refused."""

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        with self._lock:
            return len(self._from_server)

    def freeze(self) -> None:
        """Let nothing pass any more."""
        with self._lock:
            self._frozen = True

    def mute(self) -> None:
        """Let only the clients' bytes pass."""
        with self._lock:
            self._muted = True

    def stall(self, number: int | None = None) -> None:
        """Forget every connection that is made by now, or the one with that number, oldest first, without closing it."""
        with self._lock:
            servers = list(self._from_server)
            for server in servers if number is None else [servers[number]]:
                for end in (server, self._peers.pop(server)):
                    self._peers.pop(end, None)
                    self._selector.unregister(end)
                    self._stalled.append(end)
                del self._from_server[server]

    def thaw(self) -> None:
        """Let everything pass again; what was held back is delivered, except what ``mute`` swallowed."""
        with self._lock:
            self._frozen = self._muted = self._refusing = False

    def cut(self) -> None:
        """Reset every connection."""
        with self._lock:
            for one in list(self._peers):
                self._close(one, reset=True)

    def refuse(self) -> None:
        """Reset every connection, and those that are made from now on."""
        with self._lock:
            self._refusing = True
        self.cut()

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                frozen = self._frozen
            if frozen:
                # Bytes stay in the kernel, as they would on a line that is dead.
                time.sleep(0.005)
                continue
            for key, _ in self._selector.select(0.02):
                with self._lock:
                    if self._frozen:
                        break
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._peers:
                        self._forward(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self._refusing:
            self.refused += 1
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            return
        family = socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET
        server = socket.socket(family)
        try:
            server.connect(self._target)
        except OSError:
            server.close()
            client.close()
            return
        for one, other in ((client, server), (server, client)):
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)
        self._from_server[server] = None
        self.accepted += 1

    def _forward(self, one: socket.socket) -> None:
        try:
            data = one.recv(65536)
            if not data:
                self._close(one)
            elif not (self._muted and one in self._from_server):
                self._peers[one].sendall(data)
        except OSError:
            self._close(one)

    def _close(self, one: socket.socket, *, reset: bool = False) -> None:
        other = self._peers.pop(one, None)
        if other is None:
            return
        self._peers.pop(other, None)
        for end in (one, other):
            self._selector.unregister(end)
            if reset and end not in self._from_server:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._from_server.pop(end, None)
            end.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._thread.join()
        self.cut()
        for end in self._stalled:
            end.close()
        self._selector.close()
        self._listener.close()


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _await(condition: object, complaint: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    assert callable(condition)
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(complaint)
        time.sleep(0.01)
