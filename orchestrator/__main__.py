"""``python -m orchestrator``, and the entry point of the ``orchestrator`` command."""

from __future__ import annotations

import gc
import sys


def main() -> int:
    """Run the command line; the return value is the exit code."""
    # What a command imports is kept to its end; searching it for garbage again and again is a fifth of a short command.
    gc.set_threshold(50_000, 20, 20)
    try:
        from orchestrator.cli.app import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
