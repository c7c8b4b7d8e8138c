"""A measured number: the median of its runs, the ratio to a limit of the same run, and what is asked of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Figure:
    """One number of a row. ``must`` and ``goal`` ask something of the ratio if there is a limit, else of the value.

    They are lower bounds, with ``at_most`` upper ones.
    """

    name: str
    unit: str
    must: float | None = None
    goal: float | None = None
    at_most: bool = False
    against: str | None = None
    """What the ratio is to; for people."""
    note: str | None = None
    values: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def add(self, value: float | None, limit: float | None = None) -> None:
        """Add what one run found; None: it found nothing, and the run does not count."""
        if value is not None:
            self.values.append(value)
            if limit is not None:
                self.limits.append(limit)

    @property
    def ratio(self) -> float | None:
        """The median of the ratios of each run; None without a limit, or with one too small to be measured."""
        if not self.limits:
            return None
        ratios = [value / limit for value, limit in zip(self.values, self.limits, strict=True) if limit]
        return statistics.median(ratios) if ratios else None

    def met(self) -> str | None:
        """``goal``, ``must`` or ``no``; None if nothing is asked or nothing was measured."""
        judged = statistics.median(self.values) if self.values and self.against is None else self.ratio
        if self.must is None or judged is None:
            return None
        for word, asked in (("goal", self.goal), ("must", self.must)):
            if asked is not None and (judged <= asked if self.at_most else judged >= asked):
                return word
        return "no"

    def as_json(self) -> dict[str, Any]:
        """What the report has of it."""
        shown: dict[str, Any] = {"name": self.name, "unit": self.unit}
        shown["median"] = _short(statistics.median(self.values)) if self.values else None
        shown["runs"] = [_short(value) for value in self.values]
        if self.limits:
            shown["limit"] = {"name": self.against, "median": _short(statistics.median(self.limits))}
            shown["limit"]["runs"] = [_short(limit) for limit in self.limits]
        ratio = self.ratio
        shown["ratio"] = None if ratio is None else _short(ratio)
        shown |= {"must": self.must, "goal": self.goal, "at_most": self.at_most, "met": self.met()}
        if self.note:
            shown["note"] = self.note
        return shown


def quantile(values: Sequence[float], q: float) -> float | None:
    """The value that the share *q* of *values* lies at or below; None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


def _short(value: float) -> float:
    return round(value) if abs(value) >= 1000 else float(f"{value:.4g}")
