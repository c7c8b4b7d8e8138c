"""What is kept how long by itself: the table ``[retention]`` of the settings, and spans of time as people write them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from orchestrator.domain.values import value
from orchestrator.errors import InvalidInput, did_you_mean

DAY = 86_400.0
MAX_SECONDS = 3650 * DAY

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": DAY, "w": 7 * DAY}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|w)")


def span(text: str) -> float | None:
    """Return the seconds of ``30s``, ``1h30m``, ``2d`` or a bare number; None for any other text, or over ten years."""
    bare = text.strip().lower()
    value: float | None = None
    if re.fullmatch(r"\d+(\.\d+)?", bare):
        value = float(bare)
    elif bare and _SPAN.sub("", bare).strip() == "":
        value = sum(float(amount) * _UNITS[unit] for amount, unit in _SPAN.findall(bare))
    return value if value is not None and math.isfinite(value) and value <= MAX_SECONDS else None


class Rule(NamedTuple):
    """What ended more than ``older_than`` seconds ago goes: ``kind`` of tasks in ``statuses``, or another kind."""

    kind: str
    statuses: tuple[str, ...]
    older_than: float


@value
class Retention:
    """How long what has ended is kept, in seconds since it ended; None: until somebody prunes it.

    - ``done``, ``cancelled``, ``failed``: tasks with their runs, which hold what they cost, and their transcripts
    - ``transcripts``, ``failed_transcripts``: transcripts alone, of tasks that are done or cancelled, and that failed
    - ``minutes``, ``workers``: the numbers that screens read for an hour, and rows of workers that have ended
    - ``plans``, ``audit``: plans without tasks, and the audit trail
    - ``every``: the pause between two passes
    """

    done: float | None = None
    cancelled: float | None = None
    failed: float | None = None
    transcripts: float | None = None
    failed_transcripts: float | None = None
    minutes: float | None = 30 * DAY
    workers: float | None = 30 * DAY
    plans: float | None = None
    audit: float | None = None
    every: float = 3600.0

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Retention:
        """Return what ``[retention]`` sets; ``"never"`` keeps for good. Raises InvalidInput."""
        known = [each.name for each in fields(cls)]
        values: dict[str, float | None] = {}
        for key, each in table.items():
            if key not in known:
                raise InvalidInput(f"unknown key 'retention.{key}'{did_you_mean(key, known)}")
            values[key] = _seconds(key, each)
        return cls(**values)  # type: ignore[arg-type]

    def rules(self) -> list[Rule]:
        """What goes, the small parts first: transcripts before their tasks, tasks before what only they needed."""
        found = []
        for key, statuses in (("transcripts", ("done", "cancelled")), ("failed_transcripts", ("failed",))):
            if (seconds := getattr(self, key)) is not None:
                found.append(Rule("transcripts", statuses, seconds))
        ages: dict[float, list[str]] = {}
        for status in ("done", "cancelled", "failed"):
            if (seconds := getattr(self, status)) is not None:
                ages.setdefault(seconds, []).append(status)
        found += [Rule("tasks", tuple(statuses), seconds) for seconds, statuses in ages.items()]
        for kind in ("minutes", "workers", "plans", "audit"):
            if (seconds := getattr(self, kind)) is not None:
                found.append(Rule(kind, (), seconds))
        return found


def _seconds(key: str, value: Any) -> float | None:
    found: float | None = None
    if value == "never" and key != "every":
        return None
    if isinstance(value, str):
        found = span(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= MAX_SECONDS:
        found = float(value)
    if not found:
        more = "" if key == "every" else ', or "never"'
        raise InvalidInput(f'retention.{key}: expected a span of time like "30d" or "12h"{more}, found {value!r}')
    return found
