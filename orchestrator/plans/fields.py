"""Reading the keys of one table: what is missing, unknown or of the wrong kind becomes a fault with its line."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from orchestrator.domain.storable import NAME_MAX, check_json, check_text
from orchestrator.errors import InvalidInput, did_you_mean
from orchestrator.plans.reading import Row, Table


class Faults:
    """All that is wrong with a file, as (line, sentence)."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []

    def add(self, line: int, message: str) -> None:
        """Note a fault; line 0 is the file as a whole."""
        self.found.append((line, message))


class Fields:
    """One table of a file under checks. *where* begins its messages, and a key of the wrong kind reads as None."""

    __slots__ = ("faults", "line", "lines", "table", "where")

    def __init__(self, table: Mapping[str, Any], line: int, where: str, faults: Faults) -> None:
        self.table = table
        self.line = table.line if isinstance(table, Table) else line
        self.lines: Mapping[str, int] = table.lines if isinstance(table, Table) else {}
        self.where = where
        self.faults = faults

    def at(self, key: str) -> int:
        """Return the line of *key*."""
        return self.lines.get(key, self.line)

    def fault(self, key: str, message: str) -> None:
        """Note a fault of *key*."""
        self.faults.add(self.at(key), f"{self.where}{key}: {message}")

    def only(self, known: Collection[str], hints: Mapping[str, str] | None = None) -> None:
        """Refuse every key that is not *known*; *hints* says what other tools' words are called here."""
        for key in self.table:
            if key in known:
                continue
            said = (hints or {}).get(key)
            end = f"; write {said}" if said else did_you_mean(key, known)
            self.faults.add(self.at(key), f"{self._here()}unknown key {key!r}{end}")

    def _here(self) -> str:
        """Return *where* for a message about the table itself: ``agent 'x': env: `` instead of ``agent 'x': env.``."""
        return self.where[:-1] + ": " if self.where.endswith(".") else self.where

    def text(self, key: str, *, longest: int | None = NAME_MAX, empty: bool = False) -> str | None:
        """Return the text of *key*, None if it is not there."""
        value = self.table.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            self.fault(key, f"expected text, found {shown(value)}{quoted(value)}")
            return None
        if not value and not empty:
            self.fault(key, "is empty")
            return None
        return value if self._storable(key, value, longest) else None

    def choice(self, key: str, words: Collection[str], default: str) -> str:
        """Return the word of *key*, *default* if it is not there."""
        value = self.table.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in words:
            self.fault(key, f"expected one of {', '.join(words)}, found {shown(value)}")
            return default
        return value

    def number(self, key: str, *, least: float | None = None, above: float | None = None) -> float | None:
        """Return the number of *key*: at least *least*, or more than *above*."""
        value = self.table.get(key)
        if value is None:
            return None
        wanted = "" if least is None and above is None else f", {least:g} or more" if above is None else ", more than 0"
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        if not good or (least is not None and value < least) or (above is not None and value <= above):
            self.fault(key, f"expected a number{wanted}, found {shown(value)}")
            return None
        return float(value)

    def whole(self, key: str, *, least: int, most: int = 2**31 - 1) -> int | None:
        """Return the whole number of *key*, within its limits."""
        value = self.table.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            low = f"{least} or more" if least >= 0 else f"from {least}"
            high = "" if value.__class__ is not int or value <= most else f", at most {most}"
            self.fault(key, f"expected a whole number, {low}{high}, found {shown(value)}")
            return None
        return value

    def flag(self, key: str) -> bool:
        """Return the truth value of *key*, False if it is not there."""
        value = self.table.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        self.fault(key, f"expected true or false, found {shown(value)}")
        return False

    def texts(self, key: str) -> tuple[str, ...] | None:
        """Return the list of texts of *key*, None if it is not there."""
        value = self.table.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            self.fault(key, f"expected a list of texts, found {shown(value)}")
            return None
        lines = value.lines if isinstance(value, Row) else [self.at(key)] * len(value)
        good = True
        for each, line in zip(value, lines, strict=True):
            if not isinstance(each, str):
                message = f"expected a list of texts, found {shown(each)} in it{quoted(each)}"
                self.faults.add(line, f"{self.where}{key}: {message}")
                good = False
            else:
                good = self._storable(key, each, None) and good
        return tuple(value) if good else None

    def inner(self, key: str) -> Fields | None:
        """Return the table of *key*, None if it is not there."""
        value = self.table.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fault(key, f"expected a table of keys and values, found {shown(value)}")
            return None
        return Fields(value, self.at(key), f"{self.where}{key}.", self.faults)

    def json(self, key: str) -> Any:
        """Return the value of *key*, which may be any JSON."""
        value = plain(self.table.get(key))
        try:
            check_json(key, value)
        except InvalidInput as error:
            self.faults.add(self.at(key), f"{self.where}{error.message}")
            return None
        return value

    def _storable(self, key: str, value: str, longest: int | None) -> bool:
        try:
            check_text(key, value, longest)
        except InvalidInput as error:
            self.faults.add(self.at(key), f"{self.where}{error.message}")
            return False
        return True


def plain(value: Any) -> Any:
    """Return *value* without lines. Only what a reader has made of YAML or TOML has any; all else is handed back."""
    if isinstance(value, Table):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, Row):
        return [plain(each) for each in value]
    return value


def shown(value: Any) -> str:
    """Return how a wrong value is spoken of."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def quoted(value: Any) -> str:
    """Return the advice to put a number or truth value in quotes where text was wanted."""
    if isinstance(value, (bool, int, float)):
        return f'; put it in quotes: "{shown(value)}"'
    return ""
