"""The embedded server: its life, its places, who runs it, and what killed processes leave."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from orchestrator.database import embedded
from orchestrator.database.embedded import EmbeddedServer, find_binaries, home_directory
from orchestrator.database.engine import connection_parameters
from orchestrator.errors import Conflict, EmbeddedServerError
from tests.conftest import WaitUntil
from tests.servers import FAST

START = """
import sys
from orchestrator.database.embedded import EmbeddedServer
print(EmbeddedServer(sys.argv[1], settings={"fsync": "off"}).start())
"""


@pytest.fixture
def home(test_folder: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A home for a server of this test's own, removed at the end with whatever runs in it."""
    folder = test_folder / f"e{abs(hash(request.node.nodeid)) % 10**9}"
    yield folder
    kill(EmbeddedServer(folder))
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(test_folder: Path) -> Iterator[Path]:
    """A stopped, initialised home, to be copied: initdb is the slow part."""
    folder = test_folder / "prepared"
    server = EmbeddedServer(folder, settings=FAST, say=print)
    server.start()
    server.stop()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def prepared(cluster: Path, home: Path) -> EmbeddedServer:
    """A server that has been set up and does not run."""
    subprocess.run(["cp", "-a", str(cluster), str(home)], check=True)
    return EmbeddedServer(home, settings=FAST)


def kill(server: EmbeddedServer) -> None:
    """SIGKILL the postmaster, if it runs."""
    pid = server.status().pid
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def answers(url: str) -> bool:
    """Does the server do work?"""
    with psycopg.connect(**connection_parameters(url)) as connection:
        return connection.execute("SELECT 1").fetchone() == (1,)


def starter(home: Path) -> subprocess.Popen[str]:
    """Another process that starts the server."""
    return subprocess.Popen(
        [sys.executable, "-c", START, str(home)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_cold_start_gives_a_utf8_database(home: Path) -> None:
    """From nothing to a URL that answers, in UTF-8, knowing upper and lower case where the version can."""
    told: list[str] = []
    server = EmbeddedServer(home, settings=FAST, say=told.append)
    url = server.start()
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT current_setting('server_encoding'), current_database(), lower('ÄÖЖ')"
        ).fetchone()
        assert row is not None
        assert row[:2] == ("UTF8", "orchestrator")
        if connection.info.server_version >= 170000:
            assert row[2] == "äöж"
    status = server.status()
    assert status.running
    assert status.version
    assert not list(server.base.glob("init-*"))
    # Root is told once whom the server runs as; nobody else is told anything, and nobody twice.
    assert len(told) == (1 if os.geteuid() == 0 else 0)
    assert server.stop()
    assert server.start() == url
    assert len(told) <= 1


def test_attaching_leaves_the_server_alone(prepared: EmbeddedServer) -> None:
    """A second start, by another object, gives the same URL and the same process."""
    url = prepared.start()
    pid = prepared.status().pid
    assert EmbeddedServer(prepared.home).start() == url
    assert prepared.status().pid == pid
    assert answers(url)


def test_the_socket_is_private_and_there_is_no_port(prepared: EmbeddedServer) -> None:
    """Only the owner gets to the socket, and nothing listens on TCP."""
    url = prepared.start()
    assert prepared.sock.stat().st_mode & 0o777 == 0o700
    assert prepared.data.stat().st_mode & 0o777 == 0o700
    with psycopg.connect(url) as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)


def test_stop_and_stop_again(prepared: EmbeddedServer) -> None:
    """Stopping ends the process; stopping what does not run says so; a status changes nothing."""
    prepared.start()
    assert prepared.stop() is True
    assert prepared.status().running is False
    assert prepared.stop() is False
    assert EmbeddedServer(prepared.home / "nothing").stop() is False
    assert not (prepared.home / "nothing").exists()


def test_a_stopped_server_stays_stopped(prepared: EmbeddedServer) -> None:
    """A client that reconnects after the stop gets an error, not a new server."""
    url = prepared.start()
    prepared.stop()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)
    assert prepared.status().running is False


def test_workers_keep_it_from_being_stopped(prepared: EmbeddedServer) -> None:
    """While a worker is connected a stop is a conflict; other clients do not count, and force does it."""
    url = prepared.start()
    with (
        psycopg.connect(url, application_name=f"{embedded.WORKER_APPLICATION} w1"),
        pytest.raises(Conflict, match="1 worker"),
    ):
        prepared.stop()
    with psycopg.connect(url, application_name=f"{embedded.WORKER_APPLICATION} w1"):
        assert prepared.stop(force=True)
    prepared.start()
    with psycopg.connect(url, application_name="psql"):
        assert prepared.stop()


def test_after_sigkill_of_the_server(prepared: EmbeddedServer) -> None:
    """A killed postmaster, its lock files and its children that are just noticing: the next start works."""
    url = prepared.start()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept (i int)")
    kill(prepared)
    assert prepared.start() == url
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)


def test_a_server_that_ends_as_it_is_found(
    prepared: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    """Killed a moment ago it still looked alive, and then answers nobody: it is started anew."""
    url = prepared.start()
    pid = prepared.status().pid
    kill(prepared)
    wait_until(lambda: prepared.status().pid is None)
    looks = iter([pid])
    look = EmbeddedServer._pid
    monkeypatch.setattr(EmbeddedServer, "_pid", lambda self: next(looks, None) or look(self))
    assert prepared.start() == url
    assert answers(url)


@pytest.fixture
def identity(prepared: EmbeddedServer) -> dict[str, int]:
    """Popen's arguments for a process of the user that the server runs as; only such a one misleads PostgreSQL."""
    user = prepared._server_user()
    return {"user": user.uid, "group": user.gid} if user else {}


def pid_file(server: EmbeddedServer, pid: int) -> None:
    """What a postmaster that was killed leaves, in its data and beside its socket."""
    lines = f"{pid}\n{server.data}\n0\n5432\n{server.sock}\n"
    for path, text in (
        (server.data / "postmaster.pid", lines + "\n0 0\nready\n"),
        (server.sock / ".s.PGSQL.5432.lock", lines),
    ):
        path.write_text(text)
        shutil.chown(path, server.data.owner(), server.data.group())


def test_a_recycled_process_number_is_not_a_server(prepared: EmbeddedServer, identity: dict[str, int]) -> None:
    """After a container's restart the pid in postmaster.pid may be anybody's."""
    stranger = subprocess.Popen(["sleep", "600"], **identity)  # type: ignore[call-overload]
    try:
        pid_file(prepared, stranger.pid)
        assert prepared.status().running is False
        assert answers(prepared.start())
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_zombie_is_not_a_server(prepared: EmbeddedServer, identity: dict[str, int], wait_until: WaitUntil) -> None:
    """A postmaster that nobody reaps answers kill(pid, 0) for ever; it is no server."""
    zombie = subprocess.Popen(["sh", "-c", "exit 0", "postgres", "-D", str(prepared.data)], **identity)  # type: ignore[call-overload]
    state = Path(f"/proc/{zombie.pid}/stat")
    wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z")
    try:
        pid_file(prepared, zombie.pid)
        assert prepared.status().running is False
        assert answers(prepared.start())
    finally:
        zombie.wait()


def test_a_half_written_pid_file(prepared: EmbeddedServer) -> None:
    """A disk that was full left an empty postmaster.pid: not running, and it starts."""
    (prepared.data / "postmaster.pid").write_text("")
    assert prepared.status().pid is None
    assert answers(prepared.start())


def test_many_starters_after_a_kill(prepared: EmbeddedServer) -> None:
    """Four processes start the killed server at once: all get the URL of one server."""
    url = prepared.start()
    kill(prepared)
    processes = [starter(prepared.home) for _ in range(4)]
    results = [process.communicate(timeout=60) for process in processes]
    assert [out.strip() for out, _ in results] == [url] * 4, results
    assert answers(url)


@pytest.mark.slow
def test_many_starters_from_nothing(home: Path) -> None:
    """Six processes start from an empty home: one initdb, one server, six URLs."""
    processes = [starter(home) for _ in range(6)]
    results = [process.communicate(timeout=60) for process in processes]
    url = EmbeddedServer(home).url()
    assert [out.strip() for out, _ in results] == [url] * 6, results
    assert sum("running as root" in err for _, err in results) == (1 if os.geteuid() == 0 else 0)
    assert not list((home / "postgres").glob("init-*"))


@pytest.mark.slow
def test_killed_in_the_middle_of_initdb(home: Path, wait_until: WaitUntil) -> None:
    """A start that is killed during initdb leaves nothing that the next one trips over."""
    first = starter(home)
    base = home / "postgres"
    wait_until(lambda: list(base.glob("init-*/global")))
    first.kill()
    first.communicate()
    assert not (base / "data").exists()
    server = EmbeddedServer(home, settings=FAST)
    assert answers(server.start())
    server.stop()
    server.start()  # by now the orphaned initdb has ended, so nothing is left of it
    assert not list(base.glob("init-*"))


def test_a_starter_killed_while_holding_the_lock(prepared: EmbeddedServer, wait_until: WaitUntil) -> None:
    """The kernel frees the lock of a killed process: the next start does not wait for it."""
    code = (
        "import sys, time; from orchestrator.database.embedded import EmbeddedServer\n"
        "server = EmbeddedServer(sys.argv[1])\n"
        "with server._lock(server._server_user()):\n    print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(prepared.home)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.communicate()
    assert answers(prepared.start())


def test_waiting_for_a_holder_ends(prepared: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits too long for the lock is told which process holds it."""
    other = EmbeddedServer(prepared.home)
    monkeypatch.setattr(embedded, "LOCK_SECONDS", 0.0)
    with other._lock(other._server_user()), pytest.raises(EmbeddedServerError, match=f"process {os.getpid()} "):
        prepared.start()


def test_another_major_version_is_refused(prepared: EmbeddedServer) -> None:
    """Data of another PostgreSQL is named with both versions and left as it is."""
    version = prepared.data / "PG_VERSION"
    version.write_text("12\n")
    with pytest.raises(EmbeddedServerError, match="PostgreSQL 12, the installed binaries are") as raised:
        prepared.start()
    assert raised.value.hint is not None
    assert "pg_dump" in raised.value.hint
    assert version.read_text() == "12\n"


def test_a_server_that_cannot_start_shows_why(prepared: EmbeddedServer) -> None:
    """The error holds the server's own words."""
    server = EmbeddedServer(prepared.home, settings={"shared_buffers": "nonsense"})
    with pytest.raises(EmbeddedServerError, match="nonsense"):
        server.start()


def test_a_long_path_gets_a_short_socket(prepared: EmbeddedServer, test_folder: Path) -> None:
    """A home whose socket path would not fit gets a directory below /tmp, the same for every process."""
    long = test_folder / ("d" * 120)
    prepared.home.rename(long)
    server = EmbeddedServer(long, settings=FAST)
    try:
        assert server.sock.parent == Path("/tmp")
        assert server.sock == EmbeddedServer(long).sock
        assert answers(server.start())
    finally:
        kill(server)
        shutil.rmtree(long, ignore_errors=True)
        shutil.rmtree(server.sock, ignore_errors=True)


@pytest.mark.parametrize("plant", [Path.touch, lambda path: path.symlink_to("/var")], ids=["file", "link"])
def test_a_foreign_thing_in_place_of_the_socket(prepared: EmbeddedServer, plant: Callable[[Path], None]) -> None:
    """What a stranger put where the socket directory belongs is neither followed nor taken over."""
    shutil.rmtree(prepared.sock, ignore_errors=True)
    before = Path("/var").stat()
    plant(prepared.sock)
    with pytest.raises(EmbeddedServerError, match="is not a directory of user"):
        prepared.start()
    assert Path("/var").stat().st_uid == before.st_uid
    assert Path("/var").stat().st_mode == before.st_mode


def test_the_callers_pg_variables_do_not_matter(prepared: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """PGDATA, PGPORT and friends belong to another server."""
    for name in ("PGDATA", "PGDATABASE", "PGUSER", "PGHOST", "PGCLIENTENCODING"):
        monkeypatch.setenv(name, "sjis" if name == "PGCLIENTENCODING" else "nowhere")
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGHOSTADDR", "127.0.0.1")
    assert answers(prepared.start())


def test_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """ORCHESTRATOR_HOME, else XDG, else ~/.local/share; for root a place that the server's user can reach."""
    assert home_directory({"ORCHESTRATOR_HOME": "/x/y"}) == Path("/x/y")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert home_directory({"XDG_DATA_HOME": "/x"}) == Path("/var/lib/orchestrator")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert home_directory({"XDG_DATA_HOME": "/x"}) == Path("/x/orchestrator")
    assert home_directory({"XDG_DATA_HOME": "relative", "HOME": "/h"}) == Path("/h/.local/share/orchestrator")


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without binaries the error names the extra, has exit code 6, and no other PostgreSQL is searched for."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(EmbeddedServerError) as raised:
        find_binaries({"PATH": "/usr/lib/postgresql/15/bin"})
    assert raised.value.exit_code == 6
    assert raised.value.hint is not None
    assert "pip install 'orchestrator[embedded]'" in raised.value.hint


def test_a_wrong_binary_folder_is_named(tmp_path: Path) -> None:
    """ORCHESTRATOR_PG_BINDIR is not silently replaced by something else."""
    (tmp_path / "initdb").touch()
    with pytest.raises(EmbeddedServerError, match="pg_ctl, postgres is not there"):
        find_binaries({"ORCHESTRATOR_PG_BINDIR": str(tmp_path)})


def test_a_home_that_cannot_be_made(tmp_path: Path) -> None:
    """A home below a file: the error says which setting to change."""
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedServerError, match="cannot be used") as raised:
        EmbeddedServer(tmp_path / "file" / "home").start()
    assert raised.value.hint is not None
    assert "ORCHESTRATOR_HOME" in raised.value.hint


def test_a_user_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user id that /etc/passwd does not know is explained before PostgreSQL complains."""
    monkeypatch.setattr(os, "geteuid", lambda: 987654)
    with pytest.raises(EmbeddedServerError, match="user id 987654 has no name"):
        EmbeddedServer(tmp_path / "home").start()


def test_root_without_anybody_to_drop_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root in an image without 'postgres' and 'nobody' is told what to do."""

    def unknown(_name: str) -> None:
        raise KeyError

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwnam", unknown)
    with pytest.raises(EmbeddedServerError, match="no user 'postgres' or 'nobody'"):
        EmbeddedServer(tmp_path / "home").start()


def test_a_home_that_the_servers_user_cannot_reach(tmp_path: Path) -> None:
    """Root's closed folder stays closed; the error says what to set. An ordinary user's own closed folder is fine."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    server = EmbeddedServer(closed / "home", settings=FAST, say=lambda _line: None)
    if os.geteuid() == 0:
        with pytest.raises(EmbeddedServerError, match="cannot reach"):
            server.start()
    else:
        assert answers(server.start())
        server.stop()
    assert closed.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_binaries_that_the_servers_user_cannot_reach(prepared: EmbeddedServer, tmp_path: Path) -> None:
    """A virtual environment below a closed home: root's server runs on a copy, made once."""
    install = find_binaries().parent
    hidden = tmp_path / "hidden" / "package"
    shutil.copytree(install, hidden / install.name, symlinks=True)
    libraries = install.parent.parent / f"{install.parent.name}.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, hidden.parent / "package.libs", symlinks=True)
    hidden.parent.chmod(0o700)
    server = EmbeddedServer(prepared.home, binaries=hidden / install.name / "bin", settings=FAST)
    assert answers(server.start())
    server.stop()
    assert answers(server.start())
    assert len(list(server.base.glob("install-*"))) == (1 if os.geteuid() == 0 else 0)
    assert not list(server.base.glob("copy-*"))
