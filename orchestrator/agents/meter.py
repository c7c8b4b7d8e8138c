"""Counting what an attempt used, from reports that mean different things.

Agents report in four ways, and the same number means something else in each:

    delta           what one message or step used; an id counts once, also across the attempts of a task
    process_total   the sum since the agent's process started
    session_total   the sum since its session started, earlier attempts included
    mixed           the last step and the session's sum together; the sum wins

``Meter`` turns any of them into this attempt's own part. A total covers every difference that was reported before it; a
total that falls starts anew; unknown stays None and never becomes 0. ``Usage.carry`` is what the next attempt's meter
must know: where the session stood and which ids were counted.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import replace
from typing import Any, Final, NamedTuple

from orchestrator.domain.outcome import Usage
from orchestrator.domain.values import value

DELTA: Final = "delta"
PROCESS_TOTAL: Final = "process_total"
SESSION_TOTAL: Final = "session_total"
MIXED: Final = "mixed"
COUNTERS: Final = (DELTA, PROCESS_TOTAL, SESSION_TOTAL, MIXED)

_MOST = 1e15
"""A count beyond this is a mistake of the agent, not usage: it would only spoil every sum."""
_TRACE = 1e-9
_IDS_HELD = 20_000
_IDS_CARRIED = 1_000


class Amount(NamedTuple):
    """Tokens and USD; None is unknown. ``cached`` is the part of ``input`` that came from a cache."""

    input: int | None = None
    output: int | None = None
    total: int | None = None
    cost: float | None = None
    cached: int | None = None

    def known(self) -> bool:
        """Whether anything is known at all."""
        return any(value is not None for value in self)


def _join(first: Amount, second: Amount, sign: int = 1) -> Amount:
    """*first* plus (or minus) *second*, field by field; a field that neither knows stays unknown."""

    def one(a: Any, b: Any) -> Any:
        return a if b is None else (a or 0) + sign * b

    return Amount._make((one(a, b) if sign > 0 or a is not None else None for a, b in zip(first, second, strict=True)))


def _most(first: Amount, second: Amount) -> Amount:
    return Amount._make((b if a is None else a if b is None else max(a, b) for a, b in zip(first, second, strict=True)))


@value
class Report:
    """One statement of usage by an agent. ``last`` belongs to ``mixed`` alone.

    ``turns`` is the attempt's count so far. ``final`` marks the last word of an agent that has one; ``provisional``
    says that such a last word is still to come. ``carried`` ids are kept for the next attempt.
    """

    amount: Amount = Amount()
    kind: str = DELTA
    id: str | None = None
    last: Amount | None = None
    turns: int | None = None
    model: str | None = None
    final: bool = False
    provisional: bool = False
    carried: bool = False


class _Total:
    """A counter that its agent adds up itself."""

    def __init__(self, base: Amount) -> None:
        self.base = base
        self.seen = Amount()
        self.before = Amount()

    def read(self, total: Amount) -> None:
        last = _most(self.base, self.seen)
        if _falls(total, last):
            # Only what it speaks of starts anew; where it does not name tokens, or USD, those stand as they stood.
            again = [new is not None for new in total]
        else:
            # Money may have a counter of its own, and a sum of fractions may come out a trace smaller.
            again = [False] * len(total)
            if total.cost is not None and last.cost is not None and total.cost < last.cost * (1 - _TRACE):
                again[Amount._fields.index("cost")] = True
        self.before = _chosen(again, self.own(), self.before)
        self.base = _chosen(again, Amount(), self.base)
        # A part that is told smaller now, within a sum that is not, stays where it was.
        grown = _chosen([new is not None for new in total], _most(last, total), self.seen)
        self.seen = _chosen(again, total, grown)

    def own(self) -> Amount:
        return _join(_join(self.seen, self.base, -1), self.before)

    def reached(self) -> Amount:
        """Where the counter stands, also in what this attempt has not spoken of."""
        return _most(self.base, self.seen)


def _falls(new: Amount, old: Amount) -> bool:
    """Whether a total of tokens started anew: by their sum, where it is known, as a part of it may be told otherwise."""
    if new.total is not None and old.total is not None:
        return new.total < old.total
    pairs = ((new.input, old.input), (new.output, old.output))
    return any(a is not None and b is not None and a < b for a, b in pairs)


def _chosen(first: list[bool], one: Amount, other: Amount) -> Amount:
    return Amount._make((a if chosen else b for chosen, a, b in zip(first, one, other, strict=True)))


class Meter:
    """The usage of one attempt. ``carry`` is ``Usage.carry`` of the attempt before, ``resumed`` that its session goes on."""

    def __init__(self, carry: dict[str, Any] | None = None, *, resumed: bool = False) -> None:
        carry = carry if isinstance(carry, dict) else {}
        session = carry.get("session")
        amount = carry.get("amount")
        self._session: str | None = session if isinstance(session, str) else None
        self._base: Amount | None = Amount(*amount) if isinstance(amount, list) and len(amount) in (4, 5) else None
        ids = carry.get("ids")
        self._earlier: dict[str, None] = dict.fromkeys(str(one) for one in ids) if isinstance(ids, list) else {}
        self._resumed = resumed
        self._ids: OrderedDict[str, Amount] = OrderedDict()
        self._carried: OrderedDict[str, None] = OrderedDict()
        self._deltas = Amount()
        self._process: _Total | None = None
        self._in_session: _Total | None = None
        self._kind: str | None = None
        self._turns: int | None = None
        self._model: str | None = None
        self._final = False
        self._provisional = False

    def session(self, session: str) -> None:
        """Say which session the totals belong to; another one than before starts from nothing."""
        if self._session is not None and session != self._session:
            if self._in_session is None:
                self._base = None
            self._resumed = False
        self._session = session

    def add(self, report: Report) -> Usage:
        """Count *report* and return the attempt's usage so far."""
        if report.turns is not None:
            self._turns = max(self._turns or 0, report.turns)
        self._model = report.model or self._model
        self._final = self._final or report.final
        self._provisional = self._provisional or report.provisional
        if report.kind == DELTA:
            self._add_delta(report)
        elif report.amount.known():
            self._add_total(report)
        return self.usage()

    def _add_delta(self, report: Report) -> None:
        amount = report.amount
        if not amount.known():
            return
        if report.id is not None:
            key = _key(report.id)
            if key in self._earlier:
                return
            before = self._ids.get(key)
            grown = amount if before is None else _most(before, amount)
            self._ids[key] = grown
            if len(self._ids) > _IDS_HELD:
                self._ids.popitem(last=False)
            if report.carried:
                self._carried[key] = None
                if len(self._carried) > _IDS_CARRIED:
                    self._carried.popitem(last=False)
            # The same message is often told once a block, sometimes with more tokens each time.
            amount = grown if before is None else _join(grown, before, -1)
        self._deltas = _join(self._deltas, amount)
        self._kind = self._kind or DELTA

    def _add_total(self, report: Report) -> None:
        if report.kind == PROCESS_TOTAL:
            if self._process is None:
                self._process = _Total(Amount())
            self._process.read(report.amount)
            if self._in_session is None:
                self._kind = PROCESS_TOTAL
                self._cover(report.amount)
            return
        if self._in_session is None:
            self._in_session = _Total(self._first_base(report))
        self._in_session.read(report.amount)
        self._kind = report.kind
        self._cover(report.amount)

    def _cover(self, total: Amount) -> None:
        """Forget the differences that *total* covers: those of tokens, those of USD, or both."""
        told = any(value is not None for value in (total.input, total.output, total.total))
        covered = [told, told, told, total.cost is not None, told]
        self._deltas = _chosen(covered, Amount(), self._deltas)

    def _first_base(self, report: Report) -> Amount:
        """What the session had used before this attempt."""
        if self._base is not None:
            return self._base
        if report.last is not None:
            return _join(report.amount, report.last, -1)
        # A resumed session whose earlier total was lost: its first report is all we can measure from.
        return report.amount if self._resumed else Amount()

    def usage(self, complete: bool | None = None) -> Usage:
        """This attempt's own part so far; ``complete`` as given."""
        own = Amount()
        for counter in (self._in_session, self._process):
            if counter is not None:
                part = counter.own()
                own = Amount._make((a if a is not None else b for a, b in zip(own, part, strict=True)))
        own = _join(own, self._deltas)
        total = own.total
        if total is None and (own.input is not None or own.output is not None):
            total = (own.input or 0) + (own.output or 0)
        return Usage(
            input_tokens=own.input,
            output_tokens=own.output,
            total_tokens=total,
            cost_usd=own.cost,
            cost_source="reported" if own.cost is not None else None,
            counter=self._kind,
            complete=complete,
            turns=self._turns,
            model=self._model,
            carry=self._carry(),
            cached_tokens=own.cached,
        )

    def _carry(self) -> dict[str, Any] | None:
        carry: dict[str, Any] = {}
        amount = self._in_session.reached() if self._in_session is not None else self._base
        if amount is not None:
            carry["amount"] = list(amount if amount.cached is not None else amount[:4])
            if self._session is not None:
                carry["session"] = self._session
        ids = [*self._earlier, *self._carried][-_IDS_CARRIED:]
        if ids:
            carry["ids"] = ids
        return carry or None

    def close(self, *, ended: bool) -> Usage | None:
        """The attempt's usage at its end, None if nothing was ever reported.

        ``ended``: the agent ended by itself, so no report can be missing, unless it owes the last word of its kind.
        """
        if self._kind is None and self._turns is None and self._model is None:
            carry = self._carry()
            return Usage(carry=carry) if carry else None
        return self.usage(complete=self._final or (ended and not self._provisional))


def _key(name: str) -> str:
    return name if len(name) <= 64 else hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()


def tokens(value: Any) -> int | None:
    """*value* as a number of tokens; None if it is not one."""
    return int(value) if _counts(value) else None


def dollars(value: Any) -> float | None:
    """*value* as USD; None if it is not an amount."""
    return float(value) if _counts(value) else None


def _counts(value: Any) -> bool:
    # Comparing is exact for integers of any length, and false for NaN.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST


def amount(fields: Any) -> Amount:
    """The tokens and USD of a mapping in the words of the contract; a bare number is tokens."""
    if not isinstance(fields, dict):
        return Amount(total=tokens(fields))
    read = tokens(fields.get("input_tokens"))
    wrote = tokens(fields.get("output_tokens"))
    total = tokens(fields.get("tokens", fields.get("total_tokens")))
    if total is None and (read is not None or wrote is not None):
        total = (read or 0) + (wrote or 0)
    return Amount(read, wrote, total, dollars(fields.get("cost_usd")), tokens(fields.get("cached_tokens")))


def read_report(fields: dict[str, Any]) -> Report | str:
    """A ``{"type": "usage"}`` line of the contract as a report, or a sentence about what is wrong with it."""
    kind = fields.get("kind", DELTA)
    if kind not in COUNTERS:
        return f"usage of an unknown kind {str(kind)[:40]!r} was ignored; known are {', '.join(COUNTERS)}"
    last = None
    whole = amount(fields)
    if kind == MIXED:
        last = amount(fields.get("last"))
        whole = amount(fields.get("total"))
        if whole.cost is None:
            whole = whole._replace(cost=dollars(fields.get("cost_usd")))
        last = last if last.known() else None
    turns = tokens(fields.get("turns"))
    model = fields.get("model")
    if not whole.known() and turns is None:
        return "usage without a valid number of tokens or USD was ignored"
    name = fields.get("id")
    return Report(
        amount=whole,
        kind=kind,
        id=str(name) if isinstance(name, str | int) and not isinstance(name, bool) else None,
        last=last,
        turns=turns,
        model=model if isinstance(model, str) else None,
        carried=True,
    )


def add_up(first: Usage | None, second: Usage | None) -> Usage | None:
    """The sum of two attempts' usage; what neither knows stays unknown."""
    if first is None or second is None:
        return first or second

    def one(a: Any, b: Any) -> Any:
        return a if b is None else b if a is None else a + b

    return replace(
        second,
        input_tokens=one(first.input_tokens, second.input_tokens),
        output_tokens=one(first.output_tokens, second.output_tokens),
        total_tokens=one(first.total_tokens, second.total_tokens),
        cost_usd=one(first.cost_usd, second.cost_usd),
        cached_tokens=one(first.cached_tokens, second.cached_tokens),
        turns=one(first.turns, second.turns),
    )
