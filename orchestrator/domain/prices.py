"""What tokens cost, for agents that report tokens and no USD: a table of prices by model, kept in the settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from orchestrator.domain.outcome import Usage

PRICED = "priced"
"""``cost_source`` of a cost that was worked out here; ``reported`` is one that the agent named itself."""

_DATED = re.compile(r"[-@](\d{8}|\d{4}-\d{2}-\d{2})$")


class Prices:
    """Prices by model: USD for a million tokens of ``input``, of ``output``, and of input read from a cache (``cached``)."""

    __slots__ = ("_table",)

    def __init__(self, table: Mapping[str, Mapping[str, float]]) -> None:
        self._table = table

    def __bool__(self) -> bool:
        return bool(self._table)

    def __contains__(self, model: object) -> bool:
        return isinstance(model, str) and self.of(model) is not None

    def of(self, model: str | None) -> Mapping[str, float] | None:
        """The prices of *model*: its own, else those of its name without a date at the end; None if there are none."""
        if model is None:
            return None
        return self._table.get(model) or self._table.get(_DATED.sub("", model))

    def priced(self, usage: Usage, model: str | None = None) -> Usage:
        """*usage* with its cost, if that can be known; one that the agent reported stays. *model* is for usage without one.

        Unknown stays None: without a price, and where only a sum of tokens is known.
        """
        if usage.cost_usd is not None or (usage.input_tokens is None and usage.output_tokens is None):
            return usage
        price = self.of(usage.model) if usage.model is not None else None
        price = price or self.of(model)
        if price is None:
            return usage
        cached = min(usage.cached_tokens or 0, usage.input_tokens or 0)
        fresh = (usage.input_tokens or 0) - cached
        cost = fresh * price["input"] + cached * price["cached"] + (usage.output_tokens or 0) * price["output"]
        return replace(usage, cost_usd=cost / 1_000_000, cost_source=PRICED)


__all__ = ["PRICED", "Prices"]
