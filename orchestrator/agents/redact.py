"""Takes secret values out of what an agent writes, before anybody stores or shows it.

It looks for values, not for patterns, in the bytes as they come: a value that is split between two reads is found
as well, because the end of a piece that could be the beginning of a value is held back until the next piece comes.
Also found is the value as it stands inside JSON, and inside JSON that stands inside JSON. What an agent encodes
otherwise (base64, reversed) is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

SHORTEST = 6
"""Characters below which a value is not looked for: it would be found everywhere."""


class Secrets:
    """The values that must not be seen, by name. One for each execution; ``stream`` for each of its outputs."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.too_short = tuple(sorted(name for name, value in values.items() if 0 < len(value) < SHORTEST))
        forms: dict[bytes, bytes] = {}
        for name, value in sorted(values.items()):
            if len(value) < SHORTEST:
                continue
            mark = f"[secret {re.sub(r'[^A-Za-z0-9_.-]', '_', name)}]".encode()
            escaped = {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
            # Tools answer in JSON, which then stands as a text within the JSON of an event.
            twice = {json.dumps(form, ensure_ascii=plain)[1:-1] for form in escaped for plain in (True, False)}
            for form in {value, value.strip(), *escaped, *twice}:
                if len(form) >= SHORTEST:
                    forms.setdefault(form.encode("utf-8", "surrogateescape"), mark)
        self.forms = dict(sorted(forms.items(), key=lambda pair: len(pair[0]), reverse=True))
        self.longest = max(map(len, self.forms), default=0)
        self.firsts = frozenset(form[0] for form in self.forms)
        # longest first: where one value begins with another, the longer one is the one that was meant
        self.pattern = re.compile(b"|".join(map(re.escape, self.forms))) if self.forms else None

    def __bool__(self) -> bool:
        return self.pattern is not None

    def clean(self, data: bytes) -> bytes:
        """Return *data*, which is whole, without the values."""
        if self.pattern is None or not any(form in data for form in self.forms):
            return data
        return self.pattern.sub(lambda found: self.forms[found.group()], data)

    def text(self, text: str) -> str:
        """Return *text* without the values."""
        if self.pattern is None:
            return text
        return self.clean(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")

    def value(self, value: Any) -> Any:
        """Return a JSON value without the values, in its texts and keys."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.value(key): self.value(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        return value

    def stream(self) -> Redactor:
        """Return the state for one output."""
        return Redactor(self)


class Redactor:
    """One output of an agent: ``feed`` in pieces of any size, ``flush`` at its end."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return what can be passed on now: without the values, less an end that may be the beginning of one."""
        secrets = self._secrets
        if secrets.pattern is None:
            return data
        data = self._held + data
        hold = self._beginning(data, 0)
        if hold == len(data) and not any(form in data for form in secrets.forms):
            self._held = b""
            return data
        parts: list[bytes] = []
        at = 0
        for found in secrets.pattern.finditer(data):
            # what is held back from before this value on may become a longer value that swallows it
            if hold <= found.start():
                break
            parts += (data[at : found.start()], secrets.forms[found.group()])
            at = found.end()
            if hold < at:
                hold = self._beginning(data, at)
        parts.append(data[at:hold])
        self._held = data[hold:]
        return b"".join(parts)

    def flush(self) -> bytes:
        """Return what was held back, at the end of the output."""
        data, self._held = self._held, b""
        return self._secrets.clean(data)

    def _beginning(self, data: bytes, least: int) -> int:
        """Return where, from *least* on, the end of *data* begins that may be the beginning of a value."""
        secrets = self._secrets
        for at in range(max(least, len(data) - secrets.longest + 1), len(data)):
            if data[at] in secrets.firsts:
                size = len(data) - at
                end = data[at:]
                if any(len(form) > size and form.startswith(end) for form in secrets.forms):
                    return at
        return len(data)
