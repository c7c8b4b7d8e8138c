"""``AsyncOrchestrator``: the same operations for applications on an event loop. Each call runs in a thread of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.agents.functions import AgentFunction
from orchestrator.domain.entities import Run, Task
from orchestrator.domain.given import NewTask
from orchestrator.domain.words import TaskStatus
from orchestrator.errors import WaitTimeout
from orchestrator.repositories.adding import Added
from orchestrator.service import Orchestrator
from orchestrator.settings import Settings


class AsyncOrchestrator:
    """``add``, ``add_many``, ``wait``, ``status``, ``get``, ``runs``, ``cancel`` and the answers to questions, awaited."""

    def __init__(self, url: str | None = None, *, settings: Settings | None = None) -> None:
        self.sync = Orchestrator(url, settings=settings)

    @classmethod
    async def embedded(cls, home: str | os.PathLike[str] | None = None) -> AsyncOrchestrator:
        """Use this user's embedded PostgreSQL: start it or attach to it, and migrate it."""
        made = await asyncio.to_thread(Orchestrator.embedded, home)
        self = cls.__new__(cls)
        self.sync = made
        return self

    async def add(self, agent: str | AgentFunction[..., Any], input: Any = None, **options: Any) -> Added:  # noqa: A002
        """As ``Orchestrator.add``, without ``session``: a transaction of the caller's belongs to the caller's thread."""
        return await asyncio.to_thread(lambda: self.sync.add(agent, input, **options))

    async def add_many(self, tasks: Iterable[Mapping[str, Any] | NewTask]) -> list[Added]:
        """As ``Orchestrator.add_many``."""
        return await asyncio.to_thread(self.sync.add_many, tasks)

    async def wait(self, task_id: int, timeout: float | None = None) -> Task:
        """As ``Orchestrator.wait``; cancelling the call ends the waiting."""
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while True:
            left = 1.0 if deadline is None else deadline - asyncio.get_running_loop().time()
            try:
                return await asyncio.to_thread(self.sync.wait, task_id, max(0.0, min(1.0, left)))
            except WaitTimeout as error:
                if deadline is not None and asyncio.get_running_loop().time() >= deadline:
                    message = f"{error.message.rpartition(' after ')[0]} after {timeout:g} seconds"
                    raise WaitTimeout(message, hint=error.hint, **error.ids) from None

    async def get(self, task_id: int) -> Task:
        """As ``Orchestrator.get``."""
        return await asyncio.to_thread(self.sync.get, task_id)

    async def runs(self, task_id: int) -> list[Run]:
        """As ``Orchestrator.runs``."""
        return await asyncio.to_thread(self.sync.runs, task_id)

    async def status(self) -> dict[str, Any]:
        """As ``Orchestrator.status``."""
        return await asyncio.to_thread(self.sync.status)

    async def cancel(self, task_id: int, *, actor: str = "python", reason: str | None = None) -> TaskStatus:
        """As ``Orchestrator.cancel``."""
        return await asyncio.to_thread(self.sync.cancel, task_id, actor=actor, reason=reason)

    async def approve(self, task_id: int, **options: Any) -> TaskStatus:
        """As ``Orchestrator.approve``."""
        return await asyncio.to_thread(self.sync.approve, task_id, **options)

    async def deny(self, task_id: int, **options: Any) -> TaskStatus:
        """As ``Orchestrator.deny``."""
        return await asyncio.to_thread(self.sync.deny, task_id, **options)

    async def answer(self, task_id: int, text: str, **options: Any) -> TaskStatus:
        """As ``Orchestrator.answer``."""
        return await asyncio.to_thread(self.sync.answer, task_id, text, **options)

    async def questions(self, **options: Any) -> list[dict[str, Any]]:
        """As ``Orchestrator.questions.list``."""
        return await asyncio.to_thread(self.sync.questions.list, **options)

    async def close(self) -> None:
        """Close every connection."""
        await asyncio.to_thread(self.sync.close)


__all__ = ["AsyncOrchestrator"]
