"""The workers: real ``orchestrator worker`` processes, each behind a proxy of its own, and what can be done to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.liveness import boot_clock
from tests.chaos.environment import ROOT, Environment, children, zombies
from tests.chaos.watch import Watch
from tests.servers import TcpProxy

LEASE, HEARTBEAT, SWEEP, POLL, GRACE = 5.0, 1.0, 1.0, 0.5, 1.0
KILL_GRACE = 0.5
SLOTS = 4
KINDS = ("loop", "child", "command", "deaf", "family")

CONFIG = f"""\
heartbeat = {HEARTBEAT}
lease = {LEASE}
sweep = {SWEEP}
poll = {POLL}
grace = {GRACE}
max_retries = 2
retry = {{initial = 0.2, factor = 2, max = 2}}

[agents.loop]
python = "tests.chaos.agents:on_loop"
kill_grace = {KILL_GRACE}

[agents.child]
python = "tests.chaos.agents:in_child"
kill_grace = {KILL_GRACE}
""" + "".join(
    f"""
[agents.{kind}]
command = ["sh", "{Path(__file__).parent / "agent.sh"}", "{kind}"]
kill_grace = {KILL_GRACE}
"""
    for kind in ("command", "deaf", "family")
)


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a worker process. ``asked`` is None when the hand killed it."""

    name: str
    pid: int
    code: int
    asked: float | None
    seconds: float
    starved: float = 0.0
    """How many of the seconds some thread of it waited for a processor."""


@dataclass(slots=True)
class Member:
    """One place of the fleet: a proxy, and the process that has the place now."""

    name: str
    proxy: TcpProxy
    log: Path
    process: subprocess.Popen[bytes] | None = None
    busy: bool = False
    """The hand is doing something to it; one thing at a time."""
    killed: bool = False
    asked: float | None = None
    starts: int = 0
    log_began: int = 0


@dataclass(slots=True)
class Fleet:
    """All places. ``frozen`` keeps, for each pid, when it was stopped and continued (boot clock)."""

    environment: Environment
    members: list[Member] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    frozen: dict[int, list[list[float]]] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)

    def begin(self, size: int) -> None:
        """Start *size* workers."""
        config = self.environment.folder / "orchestrator.toml"
        config.write_text(CONFIG)
        for number in range(1, size + 1):
            proxy = TcpProxy(self.environment.cluster.url)
            proxy.__enter__()
            member = Member(f"w{number}", proxy, self.environment.logs / f"w{number}.log")
            self.members.append(member)
            self.start(member)

    def start(self, member: Member) -> None:
        """Start the process of a place that has none."""
        assert member.process is None
        command = [sys.executable, "-m", "orchestrator", "--config", str(self.environment.folder / "orchestrator.toml")]
        command += ["--database-url", member.proxy.url, "worker", "--name", member.name, "--concurrency", str(SLOTS)]
        with member.log.open("ab") as log:
            member.log_began = log.tell()
            member.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment.variables(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.environment.started.add(member.process.pid)
        self.watch.add(member.process)
        member.killed, member.asked = False, None
        member.starts += 1

    def works(self, member: Member) -> bool:
        """Whether the process of a place has come so far that it works; one that only begins or ends is no victim."""
        if member.process is None or member.asked is not None:
            return False
        return b" start " in member.log.read_bytes()[member.log_began :]

    def reap(self) -> None:
        """Collect the workers that have ended."""
        for member in self.members:
            process = member.process
            if process is not None and (code := process.poll()) is not None:
                ended = self.watch.ended(process.pid)
                began = ended if member.asked is None else member.asked
                asked = None if member.killed else (member.asked or 0.0)
                starved = self.watch.starved(process.pid, began, ended)
                self.exits.append(Exit(member.name, process.pid, code, asked, ended - began, starved))
                member.process = None

    def revive(self) -> None:
        """Start every place that is empty and that the hand is not busy with: a service manager would do so, too."""
        self.reap()
        for member in self.members:
            if member.process is None and not member.busy:
                self.start(member)

    # -- what the hand does -------------------------------------------------------------------------------------------

    def kill(self, member: Member, *, guardian: bool = False) -> None:
        """SIGKILL the worker process alone, or also what guards its agents."""
        process = member.process
        if process is None:
            return
        helpers = [pid for pid in children(process.pid) if b"guardian.py" in _command(pid)] if guardian else []
        member.killed = True
        process.kill()
        for pid in helpers:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        self.reap()

    def terminate(self, member: Member) -> None:
        """SIGTERM, as in a deploy."""
        if member.process is not None:
            member.asked = boot_clock()
            member.process.terminate()

    def freeze(self, member: Member) -> None:
        """SIGSTOP: the worker stands still, its agents do not."""
        if member.process is not None:
            self.frozen.setdefault(member.process.pid, []).append([boot_clock(), float("inf")])
            member.process.send_signal(signal.SIGSTOP)

    def thaw(self, member: Member) -> None:
        """SIGCONT."""
        if member.process is not None:
            member.process.send_signal(signal.SIGCONT)
            for span in self.frozen.get(member.process.pid, [])[-1:]:
                span[1] = min(span[1], boot_clock())

    def heal(self) -> None:
        """Undo everything that is still done to a worker or its network."""
        for member in self.members:
            member.proxy.thaw()
            self.thaw(member)
            member.busy = False

    # -- the end ------------------------------------------------------------------------------------------------------

    def zombies(self) -> list[int]:
        """Zombies that a worker has not collected."""
        return zombies({member.process.pid for member in self.members if member.process is not None})

    def close(self) -> None:
        """Kill the workers that are left and close the proxies."""
        for member in self.members:
            if member.process is not None:
                with contextlib.suppress(OSError):
                    member.process.send_signal(signal.SIGCONT)
                member.process.kill()
                member.process.wait()
                member.process = None
            member.proxy.__exit__(None, None, None)
        self.members.clear()
        self.watch.close()


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
