"""Keeping an attempt within its task's budget of tokens, USD and turns, whatever kind of agent makes it.

``Spending`` stands between an agent and the ``Live`` that it speaks to. Each report of usage gets its cost by the price
table, where the agent named none, and is added to what earlier attempts of the task used. At 80 % of a limit there is a
notice. At the limit the attempt is asked to end; with ``finish_turn`` only when its turn is over, and with ``ask`` it leaves a
question for a person. What the attempts of a
task used together travels from one to the next in ``Usage.carry``, as the counters of the meter do.
"""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

from orchestrator.agents.protocol import Live, Stop
from orchestrator.domain.asking import Ask, QuestionKind
from orchestrator.domain.outcome import Budget, Claim, Outcome, Usage
from orchestrator.domain.prices import Prices
from orchestrator.domain.words import OnLimit, OutcomeClass

NOTICE_AT = 0.8
"""The share of a limit at which there is a notice."""

SPENT = "spent"
"""The key of ``Usage.carry`` that holds what the attempts of a task have used of its budget."""


class Spent(NamedTuple):
    """What was used; None is unknown, and counts as nothing against a limit."""

    tokens: int | None = None
    usd: float | None = None
    turns: int | None = None


def needed(claim: Claim, prices: Prices) -> bool:
    """Whether there is anything to watch over: a limit, or prices."""
    budget = claim.budget
    return bool(prices) or budget.tokens is not None or budget.usd is not None or budget.turns is not None


class Spending:
    """The ``Live`` of an attempt whose spending is watched. Calls come from any thread, ``stop`` is asked on *loop*."""

    def __init__(
        self,
        claim: Claim,
        live: Live,
        stop: Stop,
        prices: Prices,
        *,
        model: str | None = None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._attempt = claim.attempt
        self._budget = claim.budget
        self._limits = _limits(claim.budget)
        self._live = live
        self._stop = stop
        self._prices = prices
        self._model = model
        self._loop = loop
        self._before = spent_before(claim)
        self._noticed = {name for name, limit in self._limits.items() if _of(self._before, name) >= NOTICE_AT * limit}
        self._over: tuple[str, str] | None = None
        self._over_at: Usage | None = None
        self._tool: str | None = None
        self._notes: list[str] = []

    def over_before_it_began(self) -> Outcome | None:
        """The outcome of an attempt for which earlier ones have left nothing; None when it may begin."""
        over = self._reached(self._before, at_start=True)
        if over is None:
            return None
        limit, said = over
        said = f"{said} by earlier attempts"
        return Outcome(
            OutcomeClass.OVER_BUDGET, cause=f"budget_{limit}", message=said, asks=self._asks(limit, said, self._before)
        )

    # -- Live ---------------------------------------------------------------------------------------------------------

    def write(self, kind: str, text: str, size: int | None = None) -> None:
        """Pass on what is written."""
        self._live.write(kind, text, size)

    def progress(self, percent: float | None, message: str | None) -> None:
        """Pass on how far it is."""
        self._live.progress(percent, message)

    def session(self, session: str) -> None:
        """Pass on the session."""
        self._live.session(session)

    def workspace(self, told: dict[str, Any]) -> None:
        """Pass it on."""
        self._live.workspace(told)

    def keep(self, name: str, text: str) -> Future[Any]:
        """Pass it on."""
        return self._live.keep(name, text)

    def activity(self, what: str | None) -> None:
        """Pass on what it does; with no tool open any more, a turn that had to be finished is over."""
        self._live.activity(what)
        ended = self._tool is not None and what is None
        self._tool = what
        if self._over is not None and ended:
            self._end()

    def usage(self, usage: Usage) -> None:
        """Pass on what was used, with its cost, and ask for the end when a limit is reached."""
        usage = self._completed(usage)
        self._live.usage(usage)
        if self._limits:
            self._judge(usage)

    # -- judging ------------------------------------------------------------------------------------------------------

    def conclude(self, outcome: Outcome) -> Outcome:
        """*outcome* with the cost of its usage, and with what there is to say about the budget."""
        usage = None if outcome.usage is None else self._completed(outcome.usage)
        if usage is not None and self._limits:
            self._notice(self._sum(usage))
            over = self._over or self._reached(self._sum(usage))
            if over is not None and outcome.status is not OutcomeClass.OVER_BUDGET:
                self._note(f"{over[1]}, and it ended before it was stopped")
            if self._budget.usd is not None and usage.cost_usd is None and usage.total_tokens is not None:
                self._note(f"what it cost is not known: its budget of {_shown('usd', self._budget.usd)} was not judged")
        if outcome.status is OutcomeClass.OVER_BUDGET and self._over is not None:
            limit, said = self._over
            spent = self._before if usage is None else self._sum(usage)
            outcome = replace(outcome, cause=f"budget_{limit}", message=said, asks=self._asks(limit, said, spent))
        return replace(outcome, usage=usage, notes=(*outcome.notes, *self._notes))

    def _asks(self, limit: str, said: str, spent: Spent) -> tuple[Ask, ...]:
        """With ``ask``: whether it may use as much again. An approval leaves it the whole of that, whatever was used."""
        if self._budget.on_limit is not OnLimit.ASK:
            return ()
        more = self._limits[limit] + max(0, _of(spent, limit) - self._limits[limit])
        grants = more if limit == "usd" else math.ceil(more)
        question = f"{said[0].upper()}{said[1:]}. May it use {_shown(limit, grants)} more?"
        name = f"budget {self._attempt}"
        grant = {limit: grants}
        return (Ask(name, question, QuestionKind.BUDGET, ("yes", "no"), yes="yes", no="no", grants=grant),)

    def _completed(self, usage: Usage) -> Usage:
        usage = self._prices.priced(usage, self._model)
        if self._limits:
            usage = replace(usage, carry={**(usage.carry or {}), SPENT: list(self._sum(usage))})
        return usage

    def _sum(self, usage: Usage) -> Spent:
        return _plus(self._before, Spent(usage.total_tokens, usage.cost_usd, usage.turns))

    def _judge(self, usage: Usage) -> None:
        spent = self._sum(usage)
        self._notice(spent)
        if self._over is None:
            self._over = self._reached(spent)
            if self._over is None:
                return
            self._over_at = usage
            if self._budget.on_limit is not OnLimit.FINISH_TURN:
                self._end()
            else:
                self._tell(f"{self._over[1]}: it ends when its turn is over")
        elif self._over_at is not None and _next_turn(self._over_at, usage):
            self._end()

    def _reached(self, spent: Spent, *, at_start: bool = False) -> tuple[str, str] | None:
        """The limit that is used up, and a sentence. The last turn that is allowed may be made to its end."""
        for name, limit in self._limits.items():
            used = _of(spent, name)
            whole = name == "turns" and not at_start and self._budget.on_limit is not OnLimit.FINISH_TURN
            if used > limit or (used == limit and not whole):
                return name, f"its budget of {_shown(name, limit)} is used up ({_shown(name, used)})"
        return None

    def _notice(self, spent: Spent) -> None:
        for name, limit in self._limits.items():
            used = _of(spent, name)
            if name not in self._noticed and used >= NOTICE_AT * limit:
                self._noticed.add(name)
                if used < limit:
                    self._tell(f"{used / limit:.0%} of its budget of {_shown(name, limit)} is used")

    def _end(self) -> None:
        assert self._over is not None
        # Not at once: a function that returns right after its report has given its result.
        self._loop.call_soon_threadsafe(self._stop.request, OutcomeClass.OVER_BUDGET, self._over[1])

    def _tell(self, text: str) -> None:
        self._note(text)
        self._live.write("note", text)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)


def spent_before(claim: Claim) -> Spent:
    """What earlier attempts of the task have used of its budget."""
    stored = claim.meter.get(SPENT) if isinstance(claim.meter, dict) else None
    if not isinstance(stored, list) or len(stored) != len(Spent._fields):
        return Spent()
    known = (value if isinstance(value, int | float) and not isinstance(value, bool) else None for value in stored)
    return Spent(*known)  # type: ignore[arg-type]


def _limits(budget: Budget) -> dict[str, float]:
    found = {"tokens": budget.tokens, "usd": budget.usd, "turns": budget.turns}
    return {name: limit for name, limit in found.items() if limit is not None}


def _of(spent: Spent, name: str) -> float:
    value: float | None = getattr(spent, name)
    return 0 if value is None else value


def _plus(first: Spent, second: Spent) -> Spent:
    def one(a: Any, b: Any) -> Any:
        return a if b is None else b if a is None else a + b

    return Spent._make(one(a, b) for a, b in zip(first, second, strict=True))


def _next_turn(then: Usage, now: Usage) -> bool:
    """Whether *now* is of a later turn than *then*; for agents that count no turns each report is one."""
    if then.turns is not None and now.turns is not None:
        return now.turns > then.turns
    return (now.total_tokens or 0, now.cost_usd or 0) > (then.total_tokens or 0, then.cost_usd or 0)


def _shown(name: str, amount: float) -> str:
    if name == "usd":
        return f"${amount:,.2f}" if amount >= 0.1 or not amount else f"${amount:.3g}"
    return f"{amount:,.0f} {name}"


__all__ = ["NOTICE_AT", "SPENT", "Spending", "needed", "spent_before"]
