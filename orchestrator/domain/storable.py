"""What PostgreSQL's text, json and jsonb columns refuse, and what becomes of it.

Output side (``storable_text``, ``storable_json``): what an agent produced is never lost for one bad character. The
forbidden part is replaced by a mark, everything else stays as it is, and the caller learns that something was replaced.

    NUL, surrogate without its other half      U+FFFD, one for each
    NaN, Infinity, -Infinity                   the strings "NaN", "Infinity", "-Infinity"
    an integer too long for Python to print    the string of its hexadecimal digits
    what is nested deeper than MAX_DEPTH       the string of its JSON text
    a key that became equal to another key     the key with " (2)", " (3)", … behind it

Input side (``check_text``, ``check_json``): a value that a person or an application hands in is never altered. It is
refused with ``InvalidInput``, which names the field and the place in it.

The usual value has nothing of the kind, so it is looked at once, as the JSON text that C code makes of it, and handed
back as the same object. Nothing here does I/O.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from orchestrator.errors import InvalidInput

MAX_DEPTH = 500
"""Levels of nesting that are kept as structure: well below what PostgreSQL, Python and readers of the row can take."""

MAX_JSON_BYTES = 200_000_000
"""Longest JSON input, in bytes of its text: jsonb ends at 256 MB for all keys and elements of one array or object."""

TITLE_MAX = 10_000
"""Longest title, in characters."""

NAME_MAX = 500
"""Longest name or key (of agents, tasks, plans, tags; unique and concurrency keys), in characters: it fits an index."""

_ENCODE = json.JSONEncoder(allow_nan=False).encode
_BAD_CHARACTER = re.compile("[\x00\ud800-\udfff]")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NOT_BRACKET = {code: None for code in range(128) if chr(code) not in "[]{}"}
_STEP = {"[": 1, "{": 1, "]": -1, "}": -1}


def storable_text(text: str) -> tuple[str, bool]:
    """Return *text* as a text column takes it, and whether something had to be replaced.

    NUL and surrogates without their other half become U+FFFD; two halves in a row become the character that they mean.
    """
    if not _BAD_CHARACTER.search(text):
        return text, False
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    clean = joined.replace("\x00", "\ufffd")
    return clean, clean.count("\ufffd") > text.count("\ufffd")


def storable_json(value: Any, field: str = "value") -> tuple[Any, bool]:
    """Return *value* as json and jsonb columns take it, and whether something had to be replaced.

    The same object comes back when nothing is wrong with it. Raises ``InvalidInput``, naming the place below *field*,
    for what JSON has no form for: bytes, dates, sets, objects, a structure that contains itself.
    """
    text = _dumped(value)
    if text is not None and _storable(text):
        return value, False
    return _Cleaning(field, strict=False).clean(value)


def check_text(field: str, value: str | None, max_length: int | None = None) -> None:
    """Refuse text that a text column would refuse, and text longer than *max_length* characters; None passes."""
    if value is None:
        return
    if not isinstance(value, str):
        raise InvalidInput(f"{field}: expected text, found {_kind(value)}", field=field)
    if max_length is not None and len(value) > max_length:
        raise InvalidInput(
            f"{field}: {len(value):,} characters are too many, at most {max_length:,} are allowed", field=field
        )
    bad = _BAD_CHARACTER.search(value)
    if bad is not None:
        raise InvalidInput(f"{field}: {_describe_character(bad)}", hint=_REMEDY, field=field)


def check_json(field: str, value: Any) -> None:
    """Refuse a value that json and jsonb columns would refuse, or that JSON has no form for.

    Raises ``InvalidInput`` naming the place: ``input.steps[3]: a NUL character …``.
    """
    text = _dumped(value)
    if text is None or not _storable(text):
        _Cleaning(field, strict=True).clean(value)
    elif len(text) > MAX_JSON_BYTES:
        raise InvalidInput(
            f"{field}: {len(text):,} bytes of JSON are too many, at most {MAX_JSON_BYTES:,} are allowed", field=field
        )


_REMEDY = "PostgreSQL cannot store it: take it out, or encode the value, for example as base64"


def _dumped(value: Any) -> str | None:
    """Return the JSON text as the driver would write it; None if there is none without changes."""
    try:
        return _ENCODE(value)
    except (ValueError, TypeError, RecursionError):
        return None


def _storable(text: str) -> bool:
    r"""Say whether the ASCII JSON *text* can be stored as it is.

    ``\u0000`` may stand there as the text of ``\\u0000``, and ``\ud83d\ude00`` is a good pair; the slow way tells them
    apart. All that is wanted here is that the usual value is known to be good at once.
    """
    if "\\u0000" in text or "\\ud" in text:
        try:
            for part in _JSON_STRING.findall(text) if "\\ud" in text else ():
                if "\\ud" in part:
                    json.loads(part).encode("utf-8")
        except UnicodeEncodeError:
            return False
        if "\\u0000" in text and any(
            "\x00" in json.loads(each) for each in _JSON_STRING.findall(text) if "\\u0000" in each
        ):
            return False
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return True
    brackets = _JSON_STRING.sub("", text).translate(_NOT_BRACKET)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0) <= MAX_DEPTH


def _kind(value: Any) -> str:
    """Return a short name of what kind of thing *value* is."""
    if value is None:
        return "null"
    return {"str": "text", "bool": "a truth value", "int": "a number", "float": "a number", "dict": "an object",
            "list": "a list"}.get(type(value).__name__, type(value).__name__)  # fmt: skip


def _describe_character(bad: re.Match[str]) -> str:
    if bad.group() == "\x00":
        return f"a NUL character (U+0000) at position {bad.start()}"
    return f"half of a surrogate pair (U+{ord(bad.group()):04X}) at position {bad.start()}"


class _Cleaning:
    """One pass over a value that is known to need it; without recursion, so that depth cannot end it.

    With *strict* the first fault is raised, without it each is replaced.
    """

    def __init__(self, field: str, *, strict: bool) -> None:
        self.field = field
        self.strict = strict
        self.replaced = False

    def clean(self, value: Any) -> tuple[Any, bool]:
        """Return the clean copy and whether anything in it was replaced."""
        root: list[Any] = [None]
        # (container, key, value, depth, path); a path is a chain of pairs, so that it costs nothing until it is wanted
        waiting: list[tuple[Any, Any, Any, int, Any]] = [(root, 0, value, 0, None)]
        while waiting:
            target, key, item, depth, path = waiting.pop()
            if isinstance(item, dict):
                if depth >= MAX_DEPTH:
                    target[key] = self._too_deep(item, path)
                    continue
                pairs = self._keys(item, path)
                new: dict[str, Any] = dict.fromkeys(pairs)
                target[key] = new
                waiting.extend(
                    (new, name, item[old], depth + 1, (path, name)) for name, old in reversed(list(pairs.items()))
                )
            elif isinstance(item, (list, tuple)):
                if depth >= MAX_DEPTH:
                    target[key] = self._too_deep(item, path)
                    continue
                row: list[Any] = [None] * len(item)
                target[key] = row
                waiting.extend((row, at, item[at], depth + 1, (path, at)) for at in range(len(item) - 1, -1, -1))
            else:
                target[key] = self._scalar(item, path)
        return root[0], self.replaced

    def _fault(self, path: Any, message: str, *, hint: str | None = None) -> InvalidInput:
        parts: list[str] = []
        while path is not None:
            path, step = path
            parts.append(f"[{step}]" if isinstance(step, int) else f".{step}")
        place = self.field + "".join(reversed(parts))
        if len(place) > 200:
            place = place[:200] + "…"
        place = _BAD_CHARACTER.sub("\ufffd", place)
        return InvalidInput(f"{place}: {message}", hint=hint, field=self.field)

    def _replace(self, path: Any, message: str, mark: Any) -> Any:
        if self.strict:
            raise self._fault(path, message, hint=_REMEDY)
        self.replaced = True
        return mark

    def _text(self, text: str, path: Any) -> str:
        bad = _BAD_CHARACTER.search(text)
        if bad is None:
            return text
        clean, replaced = storable_text(text)
        if self.strict:
            raise self._fault(path, _describe_character(bad), hint=_REMEDY)
        self.replaced = self.replaced or replaced
        return clean

    def _scalar(self, item: Any, path: Any) -> Any:
        if isinstance(item, str):
            return self._text(item, path)
        if item is None or isinstance(item, bool):
            return item
        if isinstance(item, int):
            try:
                int.__repr__(item)
            except ValueError:
                return self._replace(path, "an integer with too many digits", hex(item))
            return item
        if isinstance(item, float):
            if math.isfinite(item):
                return item
            return self._replace(path, f"{_not_finite(item)} is not a number that JSON has", _not_finite(item))
        raise self._fault(path, f"JSON has no form for {type(item).__name__}")

    def _keys(self, item: dict[Any, Any], path: Any) -> dict[str, Any]:
        """Return new key → old key, in order. A key that had to be changed makes way for those that did not."""
        clean: list[tuple[str, bool, Any]] = []
        for old in item:
            name = self._key(old, path)
            fixed = self._text(name, (path, name))
            clean.append((fixed, fixed != name, old))
        taken = {name for name, changed, _ in clean if not changed}
        pairs: dict[str, Any] = {}
        for name, changed, old in clean:
            free, number = name, 2
            while changed and (free in taken or free in pairs):
                free, number = f"{name} ({number})", number + 1
            pairs[free] = old
        return pairs

    def _key(self, key: Any, path: Any) -> str:
        if isinstance(key, str):
            return key
        if key is None or isinstance(key, (bool, int, float)):  # what json.dumps accepts as well, in the same spelling
            if isinstance(key, float) and not math.isfinite(key):
                return _not_finite(key)
            return str(self._scalar(key, path)) if type(key) is int else json.dumps(key)
        raise self._fault(path, f"a key of an object has to be text, found {type(key).__name__}")

    def _too_deep(self, item: Any, path: Any) -> str:
        if self.strict:
            raise self._fault(path, f"nested deeper than {MAX_DEPTH} levels")
        self.replaced = True
        return "".join(self._written(item, path))

    def _written(self, item: Any, path: Any) -> Iterator[str]:
        """Write JSON text of any depth, without recursion; the same replacements as elsewhere."""
        above: list[tuple[Any, Iterator[Any], str]] = []
        held: set[int] = set()

        def opened(value: Any) -> str:
            if id(value) in held:
                raise self._fault(path, "the value contains itself")
            held.add(id(value))
            if isinstance(value, dict):
                pairs = self._keys(value, path)
                above.append((value, iter([(name, value[old]) for name, old in pairs.items()]), "}"))
                return "{"
            above.append((value, iter([(None, each) for each in value]), "]"))
            return "["

        yield opened(item)
        first = True
        while above:
            value, rest, end = above[-1]
            step = next(rest, None)
            if step is None:
                above.pop()
                held.discard(id(value))
                yield end
                first = False
                continue
            name, child = step
            if not first:
                yield ", "
            if name is not None:
                yield json.dumps(name, ensure_ascii=False) + ": "
            first = isinstance(child, (dict, list, tuple))
            yield opened(child) if first else json.dumps(self._scalar(child, path), ensure_ascii=False)


def _not_finite(number: float) -> str:
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
