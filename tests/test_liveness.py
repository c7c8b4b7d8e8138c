"""Who a process is, and when it is gone: a wrong "gone" would start its tasks a second time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from orchestrator import liveness
from tests.conftest import WaitUntil


def test_identity_is_stable_and_names_this_process() -> None:
    """Two calls give the same answer, with this pid and the start time that /proc shows."""
    one, two = liveness.identity(), liveness.identity()
    assert one == two
    assert one.pid == os.getpid()
    assert one.process_started == liveness.started(os.getpid())


def test_a_forked_child_has_a_token_of_its_own() -> None:
    """The token names a process, not its code."""
    mine = liveness.identity().token
    script = "from orchestrator import liveness; print(liveness.identity().token)"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert other != mine


def test_a_living_process_is_not_gone() -> None:
    """Neither this one nor process 1, which belongs to somebody else."""
    assert liveness.gone(os.getpid(), liveness.started(os.getpid())) is None
    assert liveness.gone(1, liveness.started(1)) is None


def test_a_number_that_another_process_has_now_is_gone() -> None:
    """The same pid with another start time is not the process that we knew."""
    mine = liveness.started(os.getpid())
    assert mine is not None
    assert "another's" in (liveness.gone(os.getpid(), mine - 1) or "")


def test_a_process_that_ended_is_gone(wait_until: WaitUntil) -> None:
    """First as a zombie, then without any trace."""
    process = subprocess.Popen(["sleep", "1000"])
    start = liveness.started(process.pid)
    assert liveness.gone(process.pid, start) is None
    process.kill()
    why = wait_until(lambda: liveness.gone(process.pid, start))
    assert "zombie" in (why or "")
    process.wait()
    assert "is gone" in (liveness.gone(process.pid, start) or "")


def test_who_cannot_be_looked_at_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind hidepid another user's process has no entry in /proc; only the kernel's "no such process" counts."""
    monkeypatch.setattr(liveness, "_stat", lambda pid: None)

    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert liveness.gone(4711, 5) is None


def test_an_unknown_start_time_is_no_evidence() -> None:
    """A row without a start time is judged by the number alone."""
    assert liveness.gone(os.getpid(), None) is None
