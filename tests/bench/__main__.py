"""``scripts/bench``: measures the product beside plain limits of the same machine. One JSON document on stdout.

Progress is on stderr. Each figure is the median of its runs; a ratio is the median of the ratios within each run. A
server of its own, with durable commits, is made below the temporary directory and removed. Exit code 0 when every row
could be measured, whatever it found; 1 when one could not; 2 for a wrong command line;
130 when interrupted, with a report of what was measured until then.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import psutil

from orchestrator.settings import __version__
from tests.bench import guarantees, rows, scale
from tests.bench.figures import Figure
from tests.bench.ground import Ground
from tests.bench.rows import Bench

ROWS: dict[str, Callable[[Bench], list[Figure]]] = {
    "drain": rows.drain,
    "commands": rows.commands,
    "children": rows.children,
    "latency": rows.latency,
    "adding": rows.adding,
    "backlog": scale.backlog,
    "history": scale.history,
    "pinned": scale.pinned,
    "holds": rows.holds,
    "guarantees": guarantees.guarantees,
    "together": scale.together,
    "ten-thousand": scale.ten_thousand,
    "fleet": scale.fleet,
    "idle": scale.idle,
    "cli": rows.command_line,
}


def main(arguments: list[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--rows", metavar="NAME,..", help="only these rows; --list names them (default: all)")
    parser.add_argument("--runs", metavar="N", type=int, help="runs of each row (default: 3, with --small 1)")
    parser.add_argument(
        "--small", action="store_true", help="tiny sizes, commits not durable: does it work? Its figures mean nothing"
    )
    parser.add_argument("--list", action="store_true", help="list the rows and end")
    given = parser.parse_args(arguments)
    if given.list:
        for name, row in ROWS.items():
            print(f"{name:14}{_says(row)}")
        return 0
    names = given.rows.split(",") if given.rows else list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    if given.runs is not None and given.runs < 1:
        parser.error(f"--runs: expected 1 or more, found {given.runs}")
    signal.signal(signal.SIGTERM, _interrupt)
    report = measure(names, given.runs or (1 if given.small else 3), given.small)
    print(json.dumps(report, indent=2))
    if report["interrupted"]:
        return 130
    return 1 if any("error" in row for row in report["rows"].values()) else 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _deaf() -> None:
    """From now on nothing interrupts: what is left is to tidy up and to report."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def measure(names: list[str], runs: int, small: bool) -> dict[str, Any]:
    """The report on *names*; interrupted, on those that were finished."""
    found: dict[str, Any] = {}
    interrupted = False
    began = time.monotonic()
    with Ground(small) as ground:
        bench = Bench(ground, runs, small)
        version = ground.one(ground.cluster.url, "SHOW server_version")
        for name in names:
            print(f"{name}: {_says(ROWS[name])}", file=sys.stderr, flush=True)
            at = time.monotonic()
            row: dict[str, Any] = {"says": _says(ROWS[name])}
            try:
                row["figures"] = [figure.as_json() for figure in ROWS[name](bench)]
            except KeyboardInterrupt:
                interrupted = True
                break
            except Exception as error:
                traceback.print_exc()
                row |= {"figures": [], "error": f"{type(error).__name__}: {error}"}
            found[name] = row | {"seconds": round(time.monotonic() - at, 1)}
            for figure in row["figures"]:
                print(
                    f"  {figure['name']}: {figure['median']} {figure['unit']}{_beside(figure)}",
                    file=sys.stderr,
                    flush=True,
                )
        _deaf()
    return {
        "version": __version__,
        "small": small,
        "runs": runs,
        "interrupted": interrupted,
        "seconds": round(time.monotonic() - began, 1),
        "machine": {
            "cores": os.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
            "load_at_the_end": round(os.getloadavg()[0], 2),
            "system": platform.system(),
            "python": platform.python_version(),
            "postgresql": version,
            "settings": ground.settings,
        },
        "rows": found,
    }


def _beside(figure: dict[str, Any]) -> str:
    return "" if figure["ratio"] is None else f", {figure['ratio']} of {figure['limit']['name']}"


def _says(row: Callable[[Bench], list[Figure]]) -> str:
    return (row.__doc__ or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
