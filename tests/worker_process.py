"""A worker in a process of its own, for tests that kill it: ``python -m tests.worker_process URL MODE``.

It says ``inside`` on stdout when an agent works. Modes ``after-claim``, ``during-run``, ``before-record`` and
``after-record`` end the process by SIGKILL at that point; ``wait`` works until it is told to stop, ``tells`` as well, and
tells of usage and session before; ``stubborn`` does not stop even then; ``command`` runs a command with a grandchild that
ignores SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import Any, NoReturn

from orchestrator.agents.protocol import Agent, Live, Stop
from orchestrator.domain.given import AgentDefinition
from orchestrator.domain.outcome import Claim, Outcome, Usage
from orchestrator.domain.words import OutcomeClass
from orchestrator.service import AgentLike, Orchestrator
from orchestrator.settings import Settings
from orchestrator.worker import Worker
from tests.working import FakeAgent

GRANDCHILD = "trap '' TERM; (trap '' TERM; while :; do sleep 1; done) & echo inside $!; wait; wait"


def die() -> NoReturn:
    """End without any chance to clean up."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def main(url: str, mode: str, grace: float) -> int:
    """Run the worker; return its exit code."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    orc = Orchestrator(url, settings=Settings(heartbeat=1.0, lease=60.0, sweep=0.2, poll=0.1, grace=grace))
    claim, record = orc.claim, orc.record

    async def behave(_claim: Claim, live: Live, stop: Stop) -> Outcome:
        if mode == "tells":
            live.session("session-1")
            live.usage(Usage(900, 100, 1000, 0.25, "reported", "process_total", turns=3, model="m"))
        print("inside", flush=True)
        if mode == "during-run":
            die()
        if mode in ("before-record", "after-record"):
            return Outcome(OutcomeClass.DONE, result="from the killed one")
        if mode == "stubborn":
            await asyncio.Event().wait()
        return Outcome(await stop.wait())

    def claim_and_die(*arguments: Any, **options: Any) -> Any:
        claimed = claim(*arguments, **options)
        if claimed.claims:
            die()
        return claimed

    def record_and_die(*arguments: Any, **options: Any) -> Any:
        if mode == "after-record":
            record(*arguments, **options)
        die()

    if mode == "after-claim":
        orc.claim = claim_and_die  # type: ignore[method-assign]
    if mode in ("before-record", "after-record"):
        orc.record = record_and_die  # type: ignore[method-assign]
    agent: AgentLike | Agent = FakeAgent(behave=behave)
    if mode == "command":
        agent = command_agent()
    code = Worker(orc, [agent], 2, name="killed").run()
    orc.close()
    return code


def command_agent() -> Any:
    """A command whose grandchild will not hear of SIGTERM."""
    from orchestrator.agents.building import build

    return build(AgentDefinition("a", "hash", command=("sh", "-c", GRANDCHILD), kill_grace=0.3))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
