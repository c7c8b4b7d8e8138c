"""What a claim needs to know and what it returns, beside the claims themselves; and what a row's budget and retry mean."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from sqlalchemy import BigInteger, Double, Integer, Row, Text, cast, func
from sqlalchemy.dialects.postgresql import JSONB

from orchestrator.domain.entities import Task
from orchestrator.domain.outcome import Budget, Claim, RetryPolicy, traceparent
from orchestrator.domain.values import value
from orchestrator.domain.words import OnLimit
from orchestrator.repositories.keys import Directory

ROUTE_SEPARATOR = "\x1f"
LONGEST_WAIT = 10 * 366 * 86_400.0
"""Seconds that a task waits for its next attempt at most, whatever its policy says."""
DEFAULT_RETRY = RetryPolicy()
DEFAULT_MAX_RETRIES = 2


@value
class Known:
    """An agent that a worker knows, with what it gives to tasks that left it open. One route of the claim."""

    agent: str
    definition: str | None = None
    max_retries: int = DEFAULT_MAX_RETRIES
    retry: RetryPolicy = DEFAULT_RETRY
    budget: Budget = Budget()
    directory: Directory | None = None
    """For an agent whose tasks keep each other out of their directory: which one that is."""

    @property
    def route(self) -> str:
        return self.agent if self.definition is None else f"{self.agent}{ROUTE_SEPARATOR}{self.definition}"


@value
class Claimed:
    """What one claim took, and what it cost: seconds that FOR UPDATE was held, and whether the worker still lives.

    ``keys``: whether tasks with keys were ready, if it looked for such; else None.
    """

    claims: list[Claim]
    hold_seconds: float
    alive: bool = True
    keys: bool | None = None


@value
class Look:
    """What a worker's agents could claim, by the claim's indexes: any task at all, one with a key, one that was lost.

    Whether it may in fact start (the agent is paused, its key has no room) is for the claim to find out.
    """

    alive: bool
    ready: bool
    keyed: bool
    suspects: bool


@lru_cache(256)
def stored_budget(
    seconds: float | None, tokens: int | None, usd: float | None, turns: int | None, on_limit: str | None
) -> Budget:
    return Budget(seconds, tokens, usd, turns, OnLimit(on_limit or OnLimit.FAIL))


@lru_cache(256)
def stored_policy(stored: str | None) -> RetryPolicy:
    return retry_policy(None if stored is None else json.loads(stored))


def retry_policy(stored: Any) -> RetryPolicy:
    """The policy of a ``retry`` column; what is missing in it, or makes no sense, has the product's default.

    Anybody may have written the column. A wait is at most LONGEST_WAIT: further on, times leave the database's range.
    """
    if not isinstance(stored, dict):
        return DEFAULT_RETRY

    def number(name: str, least: float) -> float:
        value = stored.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= least:
            value = getattr(DEFAULT_RETRY, name)
        return float(min(value, LONGEST_WAIT))

    return RetryPolicy(number("initial", 0), number("factor", 1), number("max", 0))


KNOWN: tuple[tuple[str, Any], ...] = (
    ("route", Text()),
    ("agent", Text()),
    ("max_retries", Integer()),
    ("retry", JSONB()),
    ("seconds", Double()),
    ("tokens", BigInteger()),
    ("usd", Double()),
    ("turns", Integer()),
    ("on_limit", Text()),
)


@lru_cache(64)
def described(agents: tuple[Known, ...]) -> tuple[str, list[str]]:
    """*agents* as the claim reads them, in the order of ``KNOWN``, and their routes."""
    rows = [
        (
            known.route,
            known.agent,
            known.max_retries,
            asdict(known.retry),
            known.budget.seconds,
            known.budget.tokens,
            known.budget.usd,
            known.budget.turns,
            known.budget.on_limit.value,
        )
        for known in agents
    ]
    names = [name for name, _ in KNOWN]
    return json.dumps([dict(zip(names, row, strict=True)) for row in rows]), [known.route for known in agents]


CLAIM_COLUMNS = (
    Task.id,
    Task.attempt,
    Task.claimed_by,
    Task.agent,
    Task.started_at,
    Task.input,
    Task.params,
    Task.template,
    Task.title,
    Task.name,
    Task.plan,
    Task.priority,
    Task.budget_seconds,
    Task.budget_tokens,
    Task.budget_usd,
    Task.budget_turns,
    Task.on_limit,
    cast(Task.retry, Text).label("retry"),
    Task.max_retries,
    Task.retry_count,
    Task.lost_count,
    Task.limited_count,
    Task.limited_since,
    Task.session,
    Task.definition,
    Task.dir,
    Task.meter,
    Task.cancel_requested_at,
    Task.workspace,
    Task.traceparent,
    cast(func.extract("epoch", Task.started_at - Task.available_at), Double).label("waited"),
)
_WIDTH = len(CLAIM_COLUMNS)


def claim_of(row: Row[Any]) -> Claim:
    """The claim in a row that begins with CLAIM_COLUMNS."""
    # By position: a claim is made thousands of times a second, and a lookup by name costs more than the value.
    (
        id_,
        attempt,
        claimed_by,
        agent,
        started_at,
        input_,
        params,
        template,
        title,
        name,
        plan,
        _priority,
        seconds,
        tokens,
        usd,
        turns,
        on_limit,
        retry,
        max_retries,
        retry_count,
        lost_count,
        limited_count,
        limited_since,
        session,
        definition,
        dir_,
        meter,
        cancel_requested_at,
        workspace,
        trace,
        waited,
    ) = row[:_WIDTH]
    return Claim(
        id_,
        attempt,
        claimed_by,
        agent,
        started_at,
        input_,
        params or {},
        template,
        title,
        name,
        plan,
        stored_budget(seconds, tokens, usd, turns, on_limit),
        stored_policy(retry),
        DEFAULT_MAX_RETRIES if max_retries is None else max_retries,
        retry_count,
        lost_count,
        limited_count,
        limited_since,
        session,
        meter,
        definition,
        dir_,
        cancel_requested_at is not None,
        workspace=workspace,
        waited=waited,
        traceparent=traceparent(trace),
    )


__all__ = [
    "CLAIM_COLUMNS",
    "DEFAULT_MAX_RETRIES",
    "DEFAULT_RETRY",
    "KNOWN",
    "ROUTE_SEPARATOR",
    "Claimed",
    "Known",
    "Look",
    "claim_of",
    "described",
    "retry_policy",
    "stored_budget",
    "stored_policy",
]
