"""Ends the agents of another worker process on this host that is dead, before its tasks are given to others.

A dead worker's guardian does the same at the same moment; whoever comes first, the trees are gone when ``end_agents``
returns. The worker's UUID is enough: each agent carries a hash of it in its environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from uuid import UUID

from orchestrator.agents import census
from orchestrator.agents.processes import end_trees


def agents_of(worker: UUID | str) -> list[census.Process]:
    """Return the living processes on this host that descend from agents of *worker*."""
    found = census.tree(census.Census().look(), mark=census.worker_mark(worker))
    return [process for process in found if process.alive]


def end_agents(worker: UUID | str, grace: float = 2.0, spare: Iterable[int] = ()) -> census.Ended:
    """End all agents of *worker* on this host: SIGTERM, after *grace* seconds SIGKILL. Blocks until they are gone.

    Only for a worker that is known to be dead, on the same host, boot and PID namespace. ``survivors`` is empty unless
    the kernel would not let one go or it belongs to another user; then its task must not be given away here yet.
    """
    return end_trees(census.worker_mark(worker), grace, {os.getpid(), *spare})
