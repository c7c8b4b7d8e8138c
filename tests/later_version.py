"""The command line of a version that has more migrations: ``python -m tests.later_version FOLDER COMMAND …``."""

from __future__ import annotations

import sys
from pathlib import Path

from orchestrator.cli.app import main
from orchestrator.database import schema

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    schema.migrations_directory = lambda: folder
    raise SystemExit(main(sys.argv[2:]))
