"""What may be kept of a step: its name, and its result as JSON text of bounded size. Pure."""

from __future__ import annotations

import json
from typing import Any

from orchestrator.domain.storable import NAME_MAX, check_text, storable_json
from orchestrator.errors import InvalidInput

CHECKPOINT_MAX = 1_000_000
"""Longest result of a step, in characters of its JSON."""
CHECKPOINTS_MAX = 1_000
"""Most checkpoints of one task: every later attempt is given all of them."""
ALL_MAX = 16_000_000
"""Characters of all checkpoints of one task together."""


def checkpoint_text(name: str, value: Any) -> str:
    """Return *value* as the JSON text that is kept under *name*; what only JSON's columns refuse in it is replaced.

    Raises InvalidInput for a name that is none, and for a result that is no JSON or is too large.
    """
    if not isinstance(name, str) or not name.strip():
        raise InvalidInput(f"a step's name is a text that is not empty, found {name!r:.100}")
    check_text("step", name, NAME_MAX)
    text = json.dumps(storable_json(value, f"the result of step {name!r:.100}")[0], separators=(",", ":"))
    if len(text) > CHECKPOINT_MAX:
        raise InvalidInput(
            f"the result of step {name!r:.100} has {len(text):,} characters as JSON, at most {CHECKPOINT_MAX:,} are kept",
            hint="write it to a file and return its path",
        )
    return text


class Room:
    """How much more may be kept for one task."""

    def __init__(self, held: dict[str, Any]) -> None:
        self._left = CHECKPOINTS_MAX - len(held)
        self._characters = ALL_MAX - (len(json.dumps(held)) if held else 0)

    def take(self, name: str, text: str) -> None:
        """Take room for one more. Raises InvalidInput when there is none."""
        self._left -= 1
        self._characters -= len(text)
        if self._left < 0 or self._characters < 0:
            raise InvalidInput(
                f"step {name!r:.100}: a task keeps at most {CHECKPOINTS_MAX:,} checkpoints of {ALL_MAX:,} characters"
            )


__all__ = ["Room", "checkpoint_text"]
