"""A command agent that keeps a ledger outside the database: when it began, that it still works, and when it ended.

Its prompt is JSON: ``{"ledger": FILE, "until": FILE, "deaf": BOOL}``. It works until the second file is there, and prints
``{"worked": true}``. A deaf one does not hear SIGTERM. It imports little, since it is started often.
"""

import json
import os
import signal
import sys
import time


def main() -> None:
    asked = json.load(sys.stdin)
    if asked.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    who = f"{os.environ['ORCHESTRATOR_TASK_ID']} {os.environ['ORCHESTRATOR_ATTEMPT']}"
    ledger = os.open(asked["ledger"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str) -> None:
        os.write(ledger, f"{who} {what} {time.clock_gettime(time.CLOCK_MONOTONIC)}\n".encode())

    note("begin")
    while not os.path.exists(asked["until"]):
        time.sleep(0.02)
        note("beat")
    print(json.dumps({"worked": True}))
    note("end")


if __name__ == "__main__":
    main()
