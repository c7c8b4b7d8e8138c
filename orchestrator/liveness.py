"""Who this process is on its host, whether another one is gone, and a clock that does not stop when a laptop sleeps.

Only the system is asked here, never the database. What the system does not tell is None, and a process of which too
little is known counts as alive: a wrong "gone" would start a second copy of its tasks.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from pathlib import Path

from orchestrator.domain.identity import Identity

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_token: tuple[int, str] | None = None


def boot_clock() -> float:
    """Seconds since some moment before this process; goes on while the machine sleeps, where the system has such a clock."""
    return time.clock_gettime(_CLOCK)


def identity() -> Identity:
    """Return who this process is. The token stays the same for its lifetime; a forked child gets its own."""
    global _token
    pid = os.getpid()
    if _token is None or _token[0] != pid:
        _token = pid, secrets.token_hex(8)
    return Identity(
        host=socket.gethostname() or "localhost",
        pid=pid,
        boot_id=_first_line("/proc/sys/kernel/random/boot_id"),
        pid_namespace=_link("/proc/self/ns/pid"),
        process_started=started(pid),
        token=_token[1],
    )


def started(pid: int) -> int | None:
    """When process *pid* started, in clock ticks since boot; None if that cannot be told."""
    found = _stat(pid)
    return None if found is None else found[1]


def gone(pid: int, process_started: int | None) -> str | None:
    """Say why the process that had *pid* and start time *process_started* is no more; None while it may still live.

    Only for processes of this host, boot and PID namespace. A zombie is gone; one that merely cannot be looked at
    (another user's, behind ``hidepid``) is not.
    """
    found = _stat(pid)
    if found is None:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return f"its process {pid} is gone"
        except OSError:
            return None
        return None
    state, start = found
    if process_started is not None and start != process_started:
        return f"its process {pid} is gone; the number is another's now"
    if state in "ZX" and not _other_threads(pid):
        return f"its process {pid} is a zombie"
    return None


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name in parentheses may hold anything, blanks and parentheses too.
    rest = data[data.rfind(b")") + 2 :].split(b" ", 20)
    if len(rest) < 20:
        return None
    return rest[0].decode("ascii", "replace"), int(rest[19])


def _other_threads(pid: int) -> bool:
    """Whether threads of *pid* still run although its first one has ended: they may be in the middle of something."""
    try:
        threads = [int(name.name) for name in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return False
    for thread in threads:
        if thread == pid:
            continue
        try:
            data = Path(f"/proc/{pid}/task/{thread}/stat").read_bytes()
        except OSError:
            continue
        if data[data.rfind(b")") + 2 : data.rfind(b")") + 3] not in (b"Z", b"X"):
            return True
    return False


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text().strip() or None
    except OSError:
        return None


def _link(path: str) -> str | None:
    try:
        return str(Path(path).readlink())
    except OSError:
        return None


__all__ = ["Identity", "boot_clock", "gone", "identity", "started"]
