"""A worker in a process of its own: ``python -m tests.bench.worker URL SPEC``, with SPEC as JSON (``Spec``).

When it ends it prints one JSON document: what its claims took, its memory, its CPU, and when its agents started.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator import Orchestrator, Settings, Worker, agent
from orchestrator.agents.building import build
from orchestrator.agents.functions import Context
from orchestrator.agents.protocol import Agent
from orchestrator.domain.given import AgentDefinition
from orchestrator.service import AgentLike


@dataclass
class Spec:
    """What the worker is to be. ``kind``: async (on the loop), sync (in child processes), command (spawns ``true``).

    ``seconds`` is how long an async agent works; after ``stop_after`` starts the worker stops, if it is not 0; with
    ``starts`` it tells when each task began, by its input ``n``.
    """

    kind: str = "async"
    concurrency: int = 100
    agents: tuple[str, ...] = ("noop",)
    seconds: float = 0.0
    until_idle: bool = True
    stop_after: int = 0
    starts: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def as_argument(self) -> str:
        """The form that the command line takes."""
        return json.dumps(asdict(self))


@agent("noop")
def nothing(ctx: Context) -> None:
    """Runs in a child process, where it does nothing."""


def main(url: str, spec: Spec) -> dict[str, Any]:
    """Work until there is nothing left, or until told to stop; return what was found."""
    orc = Orchestrator(url, settings=Settings(**spec.settings))
    claims: list[tuple[int, float, float]] = []
    claim = orc.claim

    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        claimed = claim(*arguments, **options)
        if claimed.claims:
            claims.append((len(claimed.claims), claimed.hold_seconds * 1000, (time.perf_counter() - began) * 1000))
        return claimed

    orc.claim = timed  # type: ignore[method-assign]
    starts: list[tuple[int, int]] = []
    begun = 0
    worker: Worker

    async def work(ctx: Context) -> None:
        nonlocal begun
        if spec.starts:
            starts.append((ctx.input["n"], time.time_ns()))
        begun += 1
        if begun == spec.stop_after:
            worker.stop(0)
        if spec.seconds:
            await asyncio.sleep(spec.seconds)

    agents: list[AgentLike | Agent]
    if spec.kind == "command":
        agents = [build(AgentDefinition(name, "bench", command=("true",))) for name in spec.agents]
    elif spec.kind == "sync":
        from tests.bench.worker import nothing as importable  # not of __main__: child processes import it by name

        agents = [importable]
    else:
        agents = [agent(name)(work) for name in spec.agents]
    worker = Worker(orc, agents, spec.concurrency, grace=0.0)
    worker.run(until_idle=spec.until_idle)
    orc.close()
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "claims": claims,
        "cpu": used.ru_utime + used.ru_stime,
        "rss_mb": used.ru_maxrss / 1024,
        "starts": starts,
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    print(json.dumps(main(sys.argv[1], Spec(**json.loads(sys.argv[2])))))
