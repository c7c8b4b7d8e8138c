"""Who a worker process is on its host: what another process there needs in order to see whether it still exists."""

from __future__ import annotations

from orchestrator.domain.values import value


@value
class Identity:
    """One process. ``liveness.identity()`` makes it; None is what the system does not tell.

    A pid means something only together with ``boot_id`` and ``pid_namespace``; ``process_started`` (clock ticks since
    boot) tells it from a later process with the same number. ``token`` is random and names this very process.
    """

    host: str
    pid: int
    boot_id: str | None
    pid_namespace: str | None
    process_started: int | None
    token: str
