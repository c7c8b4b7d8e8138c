"""A minute of chaos, by a fixed seed; ``scripts/chaos`` runs it for longer and by other seeds. And the judge itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.environment import MARK
from tests.chaos.ledger import read

ROOT = Path(__file__).parent.parent
MEASURED = ("shutdown", "log")
"""Rules of the judge that ask how long something took, or how many lines were said about it."""


def chaos(*arguments: str) -> subprocess.Popen[str]:
    """Start it as ``scripts/chaos`` does."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(480)
def test_a_minute_of_chaos_is_clean() -> None:
    """Every invariant holds after a minute of kills, stops, cut networks, restarts, deploys, cancels and prunes.

    How long things took is judged by ``scripts/chaos`` on a machine of one's own; here it would judge the machine.
    """
    process = chaos("--seconds", "60", "--seed", "1")
    out, err = process.communicate()
    assert out, err[-4000:]
    report = json.loads(out)
    broken = [each for each in report["violations"] if each["rule"] not in MEASURED]
    assert broken == [], err[-4000:]
    assert process.returncode in (0, 1)
    assert report["counts"]["executions"] > 20
    assert len(report["faults"]) > 8


@pytest.mark.slow
@pytest.mark.real
def test_an_interrupted_chaos_leaves_nothing() -> None:
    """SIGTERM in the middle: exit code 130, no process and no folder of it is left."""
    process = chaos("--seconds", "60", "--seed", "2")
    assert process.stderr is not None
    first = process.stderr.readline()
    folder = Path(first.split(" in ")[1].strip())
    deadline = time.monotonic() + 60
    while "loop" not in (folder / "ledger").read_text() and time.monotonic() < deadline:
        process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=150)
    assert process.returncode == 130
    assert json.loads(out)["interrupted"] == "SIGTERM"
    assert not folder.exists()
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"CHAOS_LEDGER={folder}".encode() in environ and f"{MARK}=".encode() in environ:
                left.append(entry.name)
    assert left == []


def test_the_ledger_is_read(tmp_path: Path) -> None:
    """Begins, ends and the span of each attempt; a line that cannot be read is not dropped in silence."""
    file = tmp_path / "ledger"
    file.write_text("5.0 1 1 begin 7 loop\n5.2 1 1 beat 7 loop\n6.0 1 1 end 7 loop\n6.5 1 2 begin 8 loop\nnonsense\n")
    ledger = read(file)
    one = ledger.signs[1, 1]
    assert (one.begins, one.ends, one.first, one.last, one.ended_at) == (1, 1, 5.0, 6.0, 6.0)
    assert ledger.signs[1, 2].ends == 0
    assert ledger.broken == ["nonsense"]
    assert set(ledger.of_task()[1]) == {1, 2}
