"""From bytes to plain tables that remember their lines: TOML and JSON lines. What the keys mean is not known here.

YAML stands in ``core_yaml``, whose library few commands need. TOML keeps no lines, so its keys are found by a scan of the
text. JSON lines are read one by one, and a broken line does not hide the faults behind it.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, time
from typing import Any

Fault = Callable[[int, str], None]
"""Where a reader says what is wrong: line and sentence."""


class Unreadable(Exception):
    """The file ends here: nothing after this fault can be trusted."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


class Table(dict[str, Any]):
    """A mapping with the line that it begins in and the line of each key."""

    __slots__ = ("line", "lines")

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.lines: dict[str, int] = {}


class Row(list[Any]):
    """A list with the line of each element."""

    __slots__ = ("lines",)

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[int] = []


def decoded(data: bytes) -> str:
    """Return the text of a whole file; a byte order mark is dropped."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Unreadable(1, "is UTF-16, expected UTF-8: save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        byte, line = data[fault.start], data.count(b"\n", 0, fault.start) + 1
        raise Unreadable(line, f"is not UTF-8 text (byte 0x{byte:02x}): save it as UTF-8") from fault


# -- TOML ---------------------------------------------------------------------------------------------------------------


def _long_number(text: str) -> int:
    """Return the line of the first row of digits that Python does not convert, 0 if there is none."""
    found = re.search(rf"[0-9_]{{{sys.get_int_max_str_digits()},}}", text)
    return text.count("\n", 0, found.start()) + 1 if found else 0


def read_toml(text: str) -> Table:
    """Return the document as Tables, Rows and scalars; dates and times become their ISO text."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column \d+\)", str(error))
        at_end = text.count("\n") + 1 if "end of document" in str(error) else 0
        message = re.sub(r" \(at .*\)$", "", str(error))
        raise Unreadable(int(found.group(1)) if found else at_end, f"is not TOML: {message}") from error
    except ValueError:  # the one that is not of TOML's own kind
        raise Unreadable(_long_number(text), "holds a number of more digits than can be read") from None
    except RecursionError:
        raise Unreadable(0, "is nested too deeply") from None
    lines = _toml_lines(text)
    try:
        table = _from_toml(raw, (), 1, lines)
    except RecursionError:
        raise Unreadable(0, "is nested too deeply") from None
    assert isinstance(table, Table)
    return table


def _from_toml(value: Any, path: tuple[str | int, ...], line: int, lines: dict[tuple[str | int, ...], int]) -> Any:
    line = lines.get(path, line)
    if isinstance(value, dict):
        table = Table(line)
        for key, each in value.items():
            table.lines[key] = lines.get((*path, key), line)
            table[key] = _from_toml(each, (*path, key), line, lines)
        return table
    if isinstance(value, list):
        row = Row()
        for at, each in enumerate(value):
            row.lines.append(lines.get((*path, at), line))
            row.append(_from_toml(each, (*path, at), line, lines))
        return row
    return value.isoformat() if isinstance(value, (datetime, date, time)) else value


_KEY_PART = re.compile(r"""\s*(?:([A-Za-z0-9_-]+)|"((?:[^"\\]|\\.)*)"|'([^']*)')\s*""")
_PLAIN_STRING = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'""")


def _toml_lines(text: str) -> dict[tuple[str | int, ...], int]:
    """Find the line of each header and each key at the start of a line; what stands inside of a value has none.

    A help for messages, so it may be content with less than the grammar: the text is known to be valid.
    """
    lines: dict[tuple[str | int, ...], int] = {}
    counts: dict[tuple[str | int, ...], int] = {}
    here: tuple[str | int, ...] = ()
    inside, depth = "", 0
    for number, row in enumerate(text.split("\n"), start=1):
        rest = row
        if not inside and depth <= 0:
            header = re.match(r"\s*(\[\[?)", row)
            keys, end = _key(row, header.end() if header else 0)
            if header and keys:
                here = ()
                for key in keys[:-1]:
                    here = (*here, key)
                    here = (*here, counts[here] - 1) if here in counts else here
                here = (*here, keys[-1])
                if header.group(1) == "[[":
                    lines.setdefault(here, number)
                    counts[here] = counts.get(here, 0) + 1
                    here = (*here, counts[here] - 1)
                lines[here] = number
                continue
            if keys and row[end : end + 1] == "=":
                for upto in range(1, len(keys) + 1):
                    lines.setdefault((*here, *keys[:upto]), number)
                rest = row[end + 1 :]
        inside, depth = _toml_state(rest, inside, max(depth, 0))
    return lines


def _key(row: str, at: int) -> tuple[list[str], int]:
    keys: list[str] = []
    while found := _KEY_PART.match(row, at):
        bare, double, single = found.groups()
        if double is not None:
            try:
                bare = json.loads(f'"{double}"')
            except ValueError:
                bare = double
        keys.append(bare if bare is not None else single)
        at = found.end()
        if row[at : at + 1] != ".":
            break
        at += 1
    return keys, at


def _toml_state(rest: str, inside: str, depth: int) -> tuple[str, int]:
    """Follow multi-line strings and brackets over one line: the quotes that are open after it, and the brackets."""
    at = 0
    while at < len(rest):
        if inside:
            end = rest.find(inside, at)
            while inside == '"""' and end > 0 and (len(rest[:end]) - len(rest[:end].rstrip("\\"))) % 2:
                end = rest.find(inside, end + 1)
            if end < 0:
                return inside, depth
            at, inside = end + 3, ""
        elif rest.startswith(('"""', "'''"), at):
            inside, at = rest[at : at + 3], at + 3
        elif rest[at] in "\"'":
            found = _PLAIN_STRING.match(rest, at)
            at = found.end() if found else at + 1
        elif rest[at] == "#":
            break
        else:
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(rest[at], 0)
            at += 1
    return inside, depth


# -- JSON lines ---------------------------------------------------------------------------------------------------------


def read_json_lines(
    rows: Iterable[bytes], fault: Fault, *, foreign: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and object of each line that is one; blank lines are passed over.

    In a *foreign* file an object may have the same key twice (the last counts), as most tools accept it.
    """
    hook = None if foreign else _no_duplicates
    for number, row in enumerate(rows, start=1):
        try:
            text = row.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            if not text:
                continue
            value = json.loads(text, object_pairs_hook=hook)
        except UnicodeDecodeError as error:
            fault(number, f"is not UTF-8 text (byte 0x{row[error.start]:02x})")
        except json.JSONDecodeError as error:
            fault(number, f"is not JSON: {error.msg} at column {error.colno}; each line has to be one JSON object")
        except _Twice as error:
            fault(number, f"the key {error.args[0]!r} stands twice in one object")
        except RecursionError:
            fault(number, "is nested too deeply")
        except ValueError as error:  # an integer with more digits than Python reads
            fault(number, f"is not JSON that can be read: {error}")
        else:
            if isinstance(value, dict):
                yield number, value
            else:
                fault(number, f"expected one JSON object, found {text[:40]}")


class _Twice(Exception):
    """A key that an object has twice."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(key)
            seen.add(key)
    return table
