"""Placeholders in the texts of plan files and in argv templates.

A placeholder is exactly ``{name}`` or ``{name.path}``, with name = ``[A-Za-z_][A-Za-z0-9_-]*`` and a path of keys and
list indexes between dots. ``{{name}}`` is the literal text ``{name}``. Every other brace is a literal brace: prompts
are full of JSON. There are no format specs, no attributes and no calls; a path walks dictionaries and lists alone.

A template is read once, from left to right: what a value brings along is never looked at again, so a value cannot
become a placeholder. Text that must never be a template goes through ``literal`` or past this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orchestrator.errors import InvalidInput, did_you_mean

_REFERENCE = r"[A-Za-z_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*"
_TEMPLATE = re.compile(r"\{\{(" + _REFERENCE + r")\}\}|\{(" + _REFERENCE + r")\}")
_PLACEHOLDER = re.compile(r"\{" + _REFERENCE + r"\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def is_name(text: str) -> bool:
    """Say whether *text* can stand in a placeholder."""
    return _NAME.fullmatch(text) is not None


def placeholders(template: str) -> list[str]:
    """Return the references of *template* (``name`` or ``name.path``), in order, each as often as it stands there."""
    if "{" not in template:
        return []
    return [found.group(2) for found in _TEMPLATE.finditer(template) if found.group(2) is not None]


def literal(text: str) -> str:
    """Return the template whose rendering is *text*, whatever braces *text* holds."""
    if "{" not in text:
        return text
    return _PLACEHOLDER.sub(lambda found: "{" + found.group() + "}", text)


def render(template: str, values: Mapping[str, Any], quote: Callable[[str], str] | None = None) -> str:
    """Return *template* with its placeholders replaced by *values*.

    Text is put in as it is, None, numbers, lists and objects as JSON. *quote*, if given, is applied to each value's
    text. Raises ``InvalidInput`` for a name or a path that *values* does not have.
    """
    if "{" not in template:
        return template

    def replaced(found: re.Match[str]) -> str:
        if found.group(1) is not None:
            return "{" + found.group(1) + "}"
        text = as_text(look_up(found.group(2), values))
        return quote(text) if quote is not None else text

    return _TEMPLATE.sub(replaced, template)


def look_up(reference: str, values: Mapping[str, Any]) -> Any:
    """Return the value that *reference* names; raise ``InvalidInput`` that says at which step it ended."""
    name, *path = reference.split(".")
    if name not in values:
        raise InvalidInput(f"unknown placeholder {{{reference}}}{did_you_mean(name, values)}", placeholder=reference)
    value: Any = values[name]
    walked = name
    for step in path:
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, (list, tuple)) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            raise InvalidInput(f"placeholder {{{reference}}}: {walked} {_lack(value, step)}", placeholder=reference)
        walked += "." + step
    return value


_SHELLS = re.compile(r"(?:.*/)?(?:sh|bash|dash|ash|zsh|ksh|mksh)", re.DOTALL)
_NAMES_AN_OPTION = re.compile(r"[-+][A-Za-z]*o|-[WX]")
_LANGUAGES = re.compile(r"(?:.*/)?(?:python[\d.]*|pypy[\d.]*|perl|ruby|node|nodejs|php)", re.DOTALL)


def code_in(parts: Sequence[str]) -> tuple[int, bool] | None:
    """Return which argument of a command is code that its program reads (``sh -c CODE``), and whether of a shell.

    None if there is none. Programs in front of it (``env``, ``nice``, ``sudo``) are passed over.
    """
    for at, part in enumerate(parts):
        shell = _SHELLS.fullmatch(part) is not None
        if not shell and _LANGUAGES.fullmatch(part) is None:
            continue
        option = re.compile(r"-[A-Za-z]*c[A-Za-z]*" if shell else r"-[A-Za-z]*[cepr]|--eval|--print")
        for index in range(at + 1, len(parts) - 1):
            if not parts[index].startswith(("-", "+")) and not _NAMES_AN_OPTION.fullmatch(parts[index - 1]):
                break  # a file is read, and what follows are its arguments
            if option.fullmatch(parts[index]):
                follows = range(index + 1, len(parts))
                code = next((each for each in follows if not shell or not parts[each].startswith(("-", "+"))), None)
                return None if code is None else (code, shell)
    return None


def as_text(value: Any) -> str:
    """Return how a value stands in a text: text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def check(template: str, known: Iterable[str]) -> list[str]:
    """Return a sentence for each placeholder whose name is not in *known*, with the nearest name that is."""
    names = placeholders(template)
    if not names:
        return []
    allowed = set(known)
    return [
        f"unknown placeholder {{{reference}}}{did_you_mean(reference.split('.')[0], allowed)}"
        f" (write {{{{{reference}}}}} for the literal text)"
        for reference in dict.fromkeys(names)
        if reference.split(".")[0] not in allowed
    ]


def _lack(value: Any, step: str) -> str:
    if isinstance(value, Mapping):
        return f"has no {step!r}{did_you_mean(step, map(str, value))}"
    if isinstance(value, (list, tuple)):
        return f"is a list of {len(value)} and has no {step!r}"
    return f"is {json.dumps(value, ensure_ascii=False)[:60]} and has no {step!r}"
