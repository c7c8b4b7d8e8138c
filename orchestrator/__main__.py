"""``python -m orchestrator``, and the entry point of the ``orchestrator`` command."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; the return value is the exit code."""
    try:
        from orchestrator.cli.app import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
