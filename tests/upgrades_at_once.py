"""Upgrades by many processes at one moment: ``python -m tests.upgrades_at_once COUNT FOLDER URL…``.

All that takes long is imported before the processes are forked, so that they really begin together. For each URL in turn,
COUNT processes run ``orchestrator db upgrade`` with the migrations in FOLDER; a line of their exit codes is printed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from orchestrator.cli import database
from orchestrator.cli.app import main
from orchestrator.database import schema


def at_once(count: int, url: str) -> list[int]:
    """Fork *count* processes that upgrade *url*; return their exit codes."""
    gate, go = os.pipe()
    children = []
    for _ in range(count):
        if (pid := os.fork()) == 0:
            os.close(go)
            os.read(gate, 1)  # until all are there and the other end is closed
            code = 70
            try:
                code = main(["--database-url", url, "db", "upgrade"])
            finally:
                os._exit(code)
        children.append(pid)
    os.close(gate)
    os.close(go)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


if __name__ == "__main__":
    assert database
    folder = Path(sys.argv[2])
    schema.migrations_directory = lambda: folder
    for each in sys.argv[3:]:
        print(*at_once(int(sys.argv[1]), each), flush=True)
