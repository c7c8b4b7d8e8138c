"""Process trees: started clean, ended whole, nothing of others touched, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agents import census, custody, processes
from orchestrator.agents.processes import ProcessTree
from tests.conftest import WaitUntil
from tests.running import FAKE, WORKER, descriptors, is_running, pids_in, run_async, until

ENV = {"PATH": os.environ.get("PATH", os.defpath)}

ESCAPE = """
import os, sys, time
# a daemon as the book has it: fork, a session of its own, fork again, the parents gone
def daemon(file, wipe):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in (0, 1, 2):
                os.dup2(os.open("/dev/null", os.O_RDWR), fd)
            env = {} if wipe else dict(os.environ)
            os.execve(sys.executable, [sys.executable, FAKE, "beat", file, "600", "ignore"], env)
        os._exit(0)
    os.wait()
"""


def start(*argv: str, mark: str | None = None, **options: Any) -> ProcessTree:
    """A tree with the environment of a test."""
    return processes.spawn(argv, env=ENV, mark=mark or census.new_mark(WORKER, 1, 1), **options)


async def output(tree: ProcessTree) -> str:
    """Everything that a process says, once it has ended."""
    await tree.wait()
    data = b""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(tree.stdout, 65536):
            data += part
    tree.close()
    return data.decode()


def test_a_whole_tree_ends_even_where_sigterm_is_ignored(tmp_path: Path) -> None:
    """Parent, a child that ignores SIGTERM and a grandchild are all gone when ``end`` returns."""
    beats = tmp_path / "beats"

    async def main() -> None:
        tree = start(*FAKE, "tree", str(beats))
        pids = await until(lambda: len(found := pids_in(beats)) == 3 and found)
        ended = await tree.end(grace=0.2)
        assert not [pid for pid in pids if is_running(pid)]
        assert ended.forced
        assert not ended.survivors
        assert pids <= {process.pid for process in ended.ended}
        assert tree.returncode == -signal.SIGTERM
        assert not tree.has_rest()
        tree.close()

    run_async(main)


def test_sigterm_alone_suffices_where_it_is_heard(tmp_path: Path) -> None:
    """A tree that obeys is not killed, and nobody waits for the grace."""
    beats = tmp_path / "beats"

    async def main() -> None:
        tree = start(*FAKE, "beat", str(beats), "600")
        await until(lambda: pids_in(beats))
        ended = await asyncio.wait_for(tree.end(grace=600), 60)
        assert not ended.forced
        assert len(ended.ended) == 1
        tree.close()

    run_async(main)


def test_a_stopped_process_hears_sigterm(tmp_path: Path) -> None:
    """SIGSTOP does not save a process from a polite end."""
    beats = tmp_path / "beats"

    async def main() -> None:
        tree = start(*FAKE, "beat", str(beats), "600")
        await until(lambda: pids_in(beats))
        os.kill(tree.pid, signal.SIGSTOP)
        ended = await asyncio.wait_for(tree.end(grace=600), 60)
        assert not ended.forced
        tree.close()

    run_async(main)


def test_a_daemon_with_its_own_session_belongs_to_the_tree(tmp_path: Path) -> None:
    """A child that forked twice and made its own session is found by its mark, ended, and collected."""
    beats = tmp_path / "beats"
    script = f"FAKE = {FAKE[1]!r}\n{ESCAPE}\ndaemon({str(beats)!r}, False)\ntime.sleep(600)"

    async def main() -> None:
        tree = start(sys.executable, "-c", script)
        (daemon,) = await until(lambda: pids_in(beats))
        assert os.getsid(daemon) != tree.pid
        ended = await tree.end(grace=0.2)
        assert ended.forced
        assert not is_running(daemon)
        assert not Path(f"/proc/{daemon}").exists(), "it stayed as a zombie of ours"
        tree.close()

    run_async(main)


def test_what_a_finished_process_left_is_seen(tmp_path: Path) -> None:
    """``has_rest`` knows a leftover in the group and one that left it, and says no where there is none."""
    beats = tmp_path / "beats"
    script = f"FAKE = {FAKE[1]!r}\n{ESCAPE}\ndaemon({str(beats)!r}, False)"

    async def main() -> None:
        plain = start("true")
        await plain.wait()
        assert not plain.has_rest()
        plain.close()

        group = start("sh", "-c", "sleep 600 & exit 3")
        assert await group.wait() == 3
        assert group.has_rest()
        assert len((await group.end(grace=5)).ended) == 1
        group.close()

        gone = start(sys.executable, "-c", script)
        assert await gone.wait() == 0
        await until(lambda: pids_in(beats))
        assert gone.has_rest()
        await gone.end(grace=0.1)
        assert not gone.has_rest()
        assert not [pid for pid in pids_in(beats) if is_running(pid)]
        gone.close()

    run_async(main)


def test_neighbours_and_this_process_are_not_touched(tmp_path: Path) -> None:
    """Ending one tree leaves the other trees of the process, and other children of it, alone."""
    one, two = tmp_path / "one", tmp_path / "two"

    async def main() -> None:
        first, second = start(*FAKE, "tree", str(one)), start(*FAKE, "tree", str(two))
        other = subprocess.Popen(["sleep", "600"], start_new_session=True)
        await until(lambda: len(pids_in(one)) == 3 and len(pids_in(two)) == 3)
        await first.end(grace=0.1)
        assert not [pid for pid in pids_in(one) if is_running(pid)]
        assert all(is_running(pid) for pid in pids_in(two))
        await second.end(grace=0.1)
        assert not [pid for pid in pids_in(two) if is_running(pid)]
        assert other.poll() is None
        other.kill()
        other.wait()
        first.close()
        second.close()

    run_async(main)


def test_a_number_that_is_used_again_is_not_signalled() -> None:
    """A process is named by its pid and its start: the same pid with another start hears nothing."""
    child = subprocess.Popen(["sleep", "600"])
    known = census.one(child.pid)
    assert known is not None
    assert not census.send(known._replace(start=known.start - 1), signal.SIGKILL)
    assert child.poll() is None
    assert census.send(known, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


def test_many_short_processes_leave_nothing() -> None:
    """300 processes, 50 at a time: every exit code arrives, no zombie, no descriptor and no slot is left."""

    async def main() -> None:
        gate = asyncio.Semaphore(50)

        async def one(number: int) -> int:
            async with gate:
                tree = start("sh", "-c", f"exit {number % 100}")
                code = await tree.wait()
                assert not tree.has_rest()
                tree.close()
                return code

        await one(0)
        before = descriptors()
        codes = await asyncio.gather(*(one(number) for number in range(300)))
        assert codes == [number % 100 for number in range(300)]
        assert descriptors() == before
        assert not processes.keeper().trees
        assert not processes.keeper().strangers()

    run_async(main)


def test_an_orphan_that_ends_by_itself_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an agent let go of and what then ended does not stay as a zombie of this process."""
    monkeypatch.setattr(processes, "_ZOMBIE_AGE", 0.01)
    script = (
        "import os, sys\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: print(os.getpid(), flush=True)\n"
    )

    async def main() -> None:
        tree = start(sys.executable, "-c", script + "    os._exit(0)\nos.wait()\n")
        await tree.wait()
        await until(lambda: select.select([tree.stdout], [], [], 0)[0])  # the orphan may speak after its parent's end
        pid = int(os.read(tree.stdout, 100))
        tree.close()
        keep = processes.keeper()

        def collected() -> bool:
            keep.sweep()
            return not Path(f"/proc/{pid}").exists()

        await until(collected)

    run_async(main)


def test_others_children_are_left_for_others() -> None:
    """The sweep takes no exit code away from whoever started a process here."""

    async def main() -> None:
        other = subprocess.Popen(["sh", "-c", "exit 9"])
        tree = start("true")
        await tree.wait()
        await until(lambda: not is_running(other.pid))
        processes.keeper().sweep()
        tree.close()
        assert other.wait() == 9

    run_async(main)


def test_the_child_starts_clean() -> None:
    """No descriptors but three, a session of its own without terminal, an input that ends at once."""
    script = (
        "import os, sys\n"
        "names = sorted(int(n) for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}'))\n"
        "print(names, os.getsid(0) == os.getpid() == os.getpgrp(), sys.stdin.read() == '')\n"
        "try:\n    open('/dev/tty')\nexcept OSError:\n    print('no terminal')\n"
    )

    async def main() -> None:
        held = os.open(os.devnull, os.O_RDONLY)
        os.set_inheritable(held, True)
        try:
            said = await output(start(sys.executable, "-c", script))
        finally:
            os.close(held)
        assert said == "[0, 1, 2] True True\nno terminal\n"

    run_async(main)


PROBE = """
import asyncio, os, sys, threading
from orchestrator.agents import processes
async def main():
    tree = processes.spawn(["grep", "SigIgn", "/proc/self/status"], env=dict(os.environ), mark="m")
    await tree.wait()
    print(os.read(tree.stdout, 1000).decode().split()[1])
    tree.close()
def run():
    asyncio.run(main())
if sys.argv[1] == "main":
    run()
else:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize("thread", ["main", "other"])
def test_ignored_signals_are_not_inherited(thread: str) -> None:
    """A worker under nohup, or started in the background, has agents that hear SIGINT, SIGHUP and SIGPIPE."""

    def ignore() -> None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)

    done = subprocess.run(
        [sys.executable, "-c", PROBE, thread],
        preexec_fn=ignore,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env=own_environment(),
        check=False,
    )
    assert done.stdout.split() == ["0000000000000000"], done.stderr


def test_being_cancelled_ends_the_tree_all_the_same(tmp_path: Path) -> None:
    """A ladder whose task is cancelled goes to SIGKILL at once instead of leaving the tree."""
    beats = tmp_path / "beats"

    async def main() -> None:
        tree = start(*FAKE, "tree", str(beats))
        await until(lambda: len(pids_in(beats)) == 3)
        ending = asyncio.ensure_future(tree.end(grace=600))
        await until(lambda: tree.returncode is not None)  # SIGTERM has arrived
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert not [pid for pid in pids_in(beats) if is_running(pid)]
        tree.close()

    run_async(main)


HEADLESS = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)  # exit, of this thread alone
"""


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_process_whose_first_thread_has_ended_still_lives(cancelled: bool) -> None:
    """It is a zombie by its state, but its other threads run: it is ended as any other, and collected."""

    async def main() -> None:
        tree = start(sys.executable, "-c", HEADLESS)
        await until(lambda: "Z" in Path(f"/proc/{tree.pid}/status").read_text().split("State:")[1][:3])
        found = census.one(tree.pid)
        assert found is not None
        assert found.alive
        ending = asyncio.ensure_future(tree.end(grace=0.0))
        if cancelled:
            await asyncio.sleep(0)
            ending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await ending
        else:
            assert not (await ending).survivors
        assert tree.returncode == -signal.SIGKILL
        assert census.one(tree.pid) is None
        tree.close()

    run_async(main)


# -- a worker that dies ------------------------------------------------------------------------------------------------

STAND_IN = """
import asyncio, os, sys
from pathlib import Path
from orchestrator.agents import census, processes
FAKE, WORKER, beats, spoiled, told = sys.argv[1:6]
escape = os.environ.pop("ESCAPE")
async def main():
    def start(*argv):
        return processes.spawn(argv, env={"PATH": os.environ["PATH"]}, mark=census.new_mark(WORKER, 1, 1))
    if "harden" in sys.argv:
        assert processes.harden()
    start(sys.executable, FAKE, "tree", beats)
    start("env", "-i", sys.executable, FAKE, "beat", spoiled, "600")
    start(sys.executable, "-c", f"FAKE = {FAKE!r}\\n{escape}\\ndaemon({beats!r}, False)\\ntime.sleep(600)")
    if "stay" in sys.argv:
        await asyncio.Event().wait()
    wanted = Path(beats)
    while len({line.split()[0] for line in wanted.read_text().splitlines()} if wanted.exists() else ()) < 4:
        await asyncio.sleep(0.01)
    while not Path(spoiled).exists():
        await asyncio.sleep(0.01)
    Path(told).write_text(f"{processes.keeper().guardian} {processes.keeper().directory}")
    await asyncio.Event().wait()
asyncio.run(main())
"""


def own_environment() -> dict[str, str]:
    """An environment in which a script finds this package."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "ESCAPE": textwrap.dedent(ESCAPE)}


class StandIn:
    """A worker process in miniature: three trees of four beating processes, one more with an empty environment."""

    def __init__(
        self, folder: Path, wait_until: WaitUntil, *words: str, python: str = sys.executable, user: int | None = None
    ) -> None:
        self.beats, self.spoiled = folder / "beats", folder / "spoiled"
        told = folder / "told"
        self.process = subprocess.Popen(
            [python, "-c", STAND_IN, FAKE[1], str(WORKER), str(self.beats), str(self.spoiled), str(told), *words],
            env=own_environment(),
            stdin=subprocess.DEVNULL,
            user=user,
            cwd="/",
        )
        wait_until(lambda: self.process.poll() is not None or (told.exists() and told.read_text()), timeout=60)
        assert self.process.poll() is None, "the stand-in did not start"
        guardian, directory = told.read_text().split()
        self.guardian, self.directory = int(guardian), Path(directory)

    def running(self) -> set[int]:
        """Its agents' processes that still run."""
        return {pid for pid in pids_in(self.beats) | pids_in(self.spoiled) if is_running(pid)}

    def kill(self) -> None:
        """What the out-of-memory killer does."""
        self.process.kill()
        self.process.wait()


def test_a_killed_worker_leaves_no_tree(tmp_path: Path, wait_until: WaitUntil) -> None:
    """After SIGKILL of a worker the guardian ends all its trees, however they got away, and removes its files."""
    worker = StandIn(tmp_path, wait_until)
    assert len(worker.running()) == 5
    assert worker.directory.is_dir()
    worker.kill()
    wait_until(lambda: not worker.running())
    wait_until(lambda: not worker.directory.exists())
    wait_until(lambda: not is_running(worker.guardian))


def test_custody_ends_the_agents_of_a_dead_worker(tmp_path: Path, wait_until: WaitUntil) -> None:
    """Another process on the host ends the trees of a worker that died together with its guardian."""
    worker = StandIn(tmp_path, wait_until)
    os.kill(worker.guardian, signal.SIGKILL)
    worker.kill()
    assert len(worker.running()) == 5
    assert pids_in(worker.beats) <= {process.pid for process in custody.agents_of(WORKER)}
    ended = custody.end_agents(WORKER, grace=0.2)
    assert ended.forced
    assert not ended.survivors
    spoiled = pids_in(worker.spoiled)
    assert worker.running() <= spoiled  # an emptied environment hides from all but the guardian
    for pid in spoiled:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _ordinary_user() -> tuple[str, int | None]:
    """A Python that an ordinary user may execute, and that user's id; ourselves if we are one, or none can."""
    if os.geteuid() != 0:
        return sys.executable, None
    user = pwd.getpwnam("nobody").pw_uid
    code = "import sys; from orchestrator.agents import processes; sys.exit(sys.version_info < (3, 11))"
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            subprocess.run(
                [python, "-c", code], user=user, check=True, env=own_environment(), stderr=subprocess.DEVNULL
            )
            return python, user
    return sys.executable, None


def test_an_ordinary_user_whose_worker_is_undumpable_loses_no_tree(test_folder: Path, wait_until: WaitUntil) -> None:
    """Hardened and without privileges: the ladder and the guardian work, and agents cannot look into the worker."""
    python, user = _ordinary_user()
    folder = test_folder / "undumpable"
    folder.mkdir()
    folder.chmod(0o777)
    worker = StandIn(folder, wait_until, "harden", python=python, user=user)
    assert Path(f"/proc/{worker.process.pid}/environ").stat().st_uid == 0, "what is undumpable belongs to root"
    assert len(worker.running()) == 5
    worker.kill()
    wait_until(lambda: not worker.running())


def test_a_guardian_that_was_killed_is_replaced() -> None:
    """The next start of an agent brings a new guardian."""

    async def main() -> None:
        first = start("true")
        await first.wait()
        keep = processes.keeper()
        old = keep.guardian
        os.kill(old, signal.SIGKILL)
        await until(lambda: not is_running(old))
        second = start("true")
        await second.wait()
        assert keep.guardian != old
        assert is_running(keep.guardian)
        first.close()
        second.close()

    run_async(main)


def test_a_keeper_that_is_closed_leaves_nothing(wait_until: WaitUntil) -> None:
    """``close`` ends the guardian, removes the directory and gives every descriptor back."""

    async def main() -> None:
        tree = start("true")
        await tree.wait()
        tree.close()

    run_async(main)
    processes.keeper().close()
    before = descriptors()
    run_async(main)
    keep = processes.keeper()
    folder, guardian = Path(keep.directory), keep.guardian
    keep.close()
    assert not folder.exists()
    assert not Path(f"/proc/{guardian}").exists()
    assert descriptors() == before


def test_directories_of_the_dead_are_removed_and_those_of_the_living_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that died together with its guardian leaves a directory, which the next one removes: the lock tells."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living = processes.Keeper()
    kept = Path(living.directory)
    dead = tmp_path / "orchestrator-agents-dead"
    dead.mkdir()
    (dead / "lock").touch()
    for folder in (kept, dead):
        os.utime(folder, (0, 0))
    other = processes.Keeper()
    assert Path(other.directory).is_dir()
    assert kept.is_dir()
    assert not dead.exists()
    living.close()
    other.close()
