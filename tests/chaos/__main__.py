"""``python -m tests.chaos --seconds N --seed N``: a report as JSON on stdout; exit code 0 = clean, 1 = violations.

Progress is on stderr. SIGINT and SIGTERM end it early, exit code 130; nothing stays behind. With violations the folder
with the logs and the ledger is kept and named in the report.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import threading
from types import FrameType
from typing import Any

from orchestrator.liveness import boot_clock
from tests.chaos.environment import Environment
from tests.chaos.fleet import Fleet
from tests.chaos.hand import Hand, say, wait
from tests.chaos.judge import NEVER, Judge, Violation, as_json

DRAIN = 150.0
"""Seconds that the healed fleet gets to finish everything."""
LIMIT = 360.0
"""Seconds beyond the time of chaos after which the run is given up."""


def main(arguments: list[str] | None = None) -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=5)
    given = parser.parse_args(arguments)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGHUP, _interrupt)
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(int(given.seconds + LIMIT))
    try:
        report = chaos(given.seconds, given.seed, given.workers)
    except KeyboardInterrupt as error:
        print(json.dumps({"seed": given.seed, "clean": False, "interrupted": str(error) or "SIGINT"}))
        return 130
    finally:
        signal.alarm(0)
    print(json.dumps(report, indent=2, default=str))
    return 0 if report["clean"] else 1


def _interrupt(number: int, _frame: FrameType | None) -> None:
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # the way out must not be interrupted
    raise KeyboardInterrupt(signal.Signals(number).name)


def _give_up(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"not finished {LIMIT:.0f} s after its time")


def chaos(seconds: float, seed: int, workers: int) -> dict[str, Any]:
    """One run; returns the report."""
    began = boot_clock()
    with Environment() as environment:
        fleet = Fleet(environment)
        hand = Hand(environment, fleet, random.Random(seed))
        judge = Judge(environment, fleet, hand)
        try:
            say(f"seed {seed}, {seconds:g} s, {workers} workers, in {environment.folder}")
            fleet.begin(workers)
            hand.act_until(boot_clock() + seconds)
            say("healing")
            hand.heal()
            violations = _drain(environment, fleet)
            violations += _stop(environment, fleet)
            violations += judge.verdict()
            counts = judge.counts()
        finally:
            try:
                hand.close()
            finally:
                fleet.close()
        environment.keep = bool(violations)
        say("clean" if not violations else f"{len(violations)} violations; see {environment.folder}")
        return {
            "seed": seed,
            "seconds": seconds,
            "clean": not violations,
            "violations": as_json(violations),
            "overlaps_with_stopped_workers": judge.allowed,
            "faults": dict(sorted(hand.done.items())),
            "counts": counts,
            "elapsed": round(boot_clock() - began, 1),
            "logs": sorted(map(str, environment.logs.glob("*.log"))) if violations else [],
        }


def _drain(environment: Environment, fleet: Fleet) -> list[Violation]:
    """Let the fleet finish everything that there is to do."""
    deadline = boot_clock() + DRAIN
    left: list[dict[str, Any]] = []
    while boot_clock() < deadline:
        fleet.revive()
        left = environment.rows(
            "SELECT id, status, attempt FROM tasks WHERE status NOT IN ('done', 'failed', 'cancelled')"
        )
        if not left and not _spooled(environment) and not fleet.zombies():
            return []
        wait(0.25)
    found = [Violation("drain", f"is still {row['status']}", row["id"], row["attempt"]) for row in left[:20]]
    found += [Violation("spool", f"left in the spool: {name}") for name in _spooled(environment)]
    found += [Violation("zombies", f"process {pid} was not collected by its worker") for pid in fleet.zombies()]
    return found


def _spooled(environment: Environment) -> list[str]:
    return sorted(path.name for path in environment.home.glob("spool/*/*"))


def _stop(environment: Environment, fleet: Fleet) -> list[Violation]:
    """Stop the workers as a deploy does, and look for what they left."""
    say("stopping")
    pids = [member.process.pid for member in fleet.members if member.process is not None]
    for member in fleet.members:
        fleet.terminate(member)
    deadline = boot_clock() + NEVER  # who took too long is judged later
    while any(member.process is not None for member in fleet.members) and boot_clock() < deadline:
        wait(0.05)
        fleet.reap()
    found = [
        Violation("shutdown", f"worker {member.name} has not ended {NEVER:g} s after SIGTERM")
        for member in fleet.members
        if member.process is not None
    ]
    deadline = boot_clock() + 30
    while (left := environment.processes() | environment.guardians()) and boot_clock() < deadline:
        wait(0.1)
    found += [Violation("processes", f"{pid} is left: {command}") for pid, command in left.items()]
    rows = environment.rows(
        "SELECT name, pid FROM workers WHERE stopped_at IS NULL AND dead_at IS NULL AND pid = ANY(%s)", pids
    )
    # One that got no processor for a second may have had no time for the last claim, and says no farewell then.
    rows = [row for row in rows if not any(e.pid == row["pid"] and e.starved > 1 for e in fleet.exits)]
    found += [Violation("sign off", f"worker {row['name']} pid {row['pid']} never signed off") for row in rows]
    return found


if __name__ == "__main__":
    sys.exit(main())
