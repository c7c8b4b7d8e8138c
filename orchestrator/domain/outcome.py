"""The values that pass between the three units: ``Claim`` out of the first, ``Outcome`` into the third.

Frozen, without I/O and without SQLAlchemy: agents and the worker know these and nothing of the database.
"""

from __future__ import annotations

import re
from dataclasses import field
from datetime import datetime
from typing import Any
from uuid import UUID

from orchestrator.domain.asking import Answered, Ask
from orchestrator.domain.values import value
from orchestrator.domain.words import OnLimit, OutcomeClass

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def traceparent(text: str | None) -> str | None:
    """Return *text* if it is a W3C traceparent, else None: whatever stands in a row or a variable must not be passed on."""
    return text if text is not None and _TRACEPARENT.fullmatch(text) else None


@value
class RetryPolicy:
    """Seconds before the next attempt: exponential with full jitter between 0 and min(max, initial × factor ** n)."""

    initial: float = 5.0
    factor: float = 2.0
    max: float = 600.0


@value
class Budget:
    """Limits of a task; None is no limit. Seconds count for each attempt, the others over all attempts of a task."""

    seconds: float | None = None
    tokens: int | None = None
    usd: float | None = None
    turns: int | None = None
    on_limit: OnLimit = OnLimit.FAIL


@value
class Usage:
    """What one attempt used, as far as known; None is unknown, never 0.

    ``counter`` is what the agent reported and we read: delta, process_total, session_total or mixed.
    ``complete`` is False when the attempt ended before its last report could come. ``cached_tokens`` is the part of
    ``input_tokens`` that came from a cache. ``carry`` is no amount: it is what the meter of the next attempt must know
    (a small JSON object: where the session's total stood, which ids counted, what earlier attempts used of a budget).
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    cost_usd: float | None = None
    cost_source: str | None = None
    counter: str | None = None
    complete: bool | None = None
    turns: int | None = None
    model: str | None = None
    carry: dict[str, Any] | None = None
    cached_tokens: int | None = None


@value
class TranscriptSize:
    """Bytes that the agent wrote, bytes left out of what is kept, and whether forbidden bytes were replaced."""

    bytes: int = 0
    dropped_bytes: int = 0
    replaced: bool = False


@value
class Claim:
    """A task as its worker holds it: everything that an agent needs, and the fence of three.

    The fence is ``(task_id, attempt, claimed_by)``. ``budget``, ``max_retries`` and ``retry`` are filled: what the task
    left open came from the agent's definition or from the defaults. ``session`` is that of the attempt before, ``meter``
    the ``Usage.carry`` of it. ``workspace`` is where that
    one worked. ``keyed``: it keeps others from its concurrency key or its directory while it runs.
    ``answered`` is what people said since the task was added, ``checkpoints`` what its
    steps have left, by name.
    ``waited``: seconds from when it could run until it was claimed. ``traceparent``: the W3C trace context of the unit
    before: of the adder in the task's row, of the claim or execution where spans are made.
    """

    task_id: int
    attempt: int
    claimed_by: UUID
    agent: str
    started_at: datetime
    input: Any = None
    params: dict[str, Any] = field(default_factory=dict)
    template: bool = False
    title: str | None = None
    name: str | None = None
    plan: str | None = None
    budget: Budget = Budget()
    retry: RetryPolicy = RetryPolicy()
    max_retries: int = 2
    retry_count: int = 0
    lost_count: int = 0
    limited_count: int = 0
    limited_since: datetime | None = None
    session: str | None = None
    meter: dict[str, Any] | None = None
    definition: str | None = None
    dir: str | None = None
    cancel_requested: bool = False
    keyed: bool = False
    workspace: dict[str, Any] | None = None
    answered: tuple[Answered, ...] = ()
    waited: float | None = None
    traceparent: str | None = None
    checkpoints: dict[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> dict[str, str]:
        """What people answered, by the names of the questions."""
        return {each.name: each.answer for each in self.answered}

    @property
    def told(self) -> list[str]:
        """What people answered to the attempt before this one, as lines for the transcript."""
        last = [each for each in self.answered if each.attempt == self.attempt - 1]
        return [f"{each.question} {each.answer}{f' (by {each.actor})' if each.actor else ''}" for each in last]


@value
class Outcome:
    """What came of one execution. Agents make it, ``settle`` reads it, ``record_run`` stores it.

    ``retry_at`` (an instant of the provider's clock) or ``retry_after`` (seconds) is the stated reset of a rate limit.
    ``elapsed`` is measured locally in seconds; ``result`` is a JSON value; ``workspace`` is where
    it worked and what it left; ``notes`` are sentences for the run row.
    ``variables`` are the names of what its environment held, never a value.
    ``asks`` are what a ``suspended`` attempt (or one that is ``over_budget``) asks a person: the task waits for the answers.
    """

    status: OutcomeClass
    cause: str | None = None
    message: str | None = None
    result: Any = None
    exit_code: int | None = None
    signal: int | None = None
    retry_at: datetime | None = None
    retry_after: float | None = None
    usage: Usage | None = None
    session: str | None = None
    transcript: TranscriptSize = TranscriptSize()
    notes: tuple[str, ...] = ()
    elapsed: float = 0.0
    workspace: dict[str, Any] | None = None
    asks: tuple[Ask, ...] = ()
    variables: tuple[str, ...] = ()
