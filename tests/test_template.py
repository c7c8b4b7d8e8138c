"""Placeholders: what is one, what is not, and that values never become one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.template import check, is_name, literal, placeholders, render
from orchestrator.errors import InvalidInput

VALUES: dict[str, Any] = {
    "file": "a b.py",
    "n": 3,
    "none": None,
    "fix-parser": {"result": {"ok": True, "steps": ["one", {"deep": "é"}], "0": "key"}},
}
braces = st.text(st.sampled_from("{}a.-_ x0"), max_size=14)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("", ""),
        ("Fix {file}.", "Fix a b.py."),
        ("{n}{n} {none}", "33 null"),
        ("{fix-parser.result.ok}", "true"),
        ("{fix-parser.result.steps}", '["one", {"deep": "é"}]'),
        ("{fix-parser.result.steps.1.deep}", "é"),
        ("{fix-parser.result.0}", "key"),
        ("{{file}}", "{file}"),
        ("{{fix-parser.result}} {{unknown}}", "{fix-parser.result} {unknown}"),
        ("{{{file}}}", "{{file}}"),
        ("{{file}", "{a b.py"),
        ('{"status": "done", "a": {}}', '{"status": "done", "a": {}}'),
        ("{ file } {0.__class__} {} {{}} {1} %s $(x) {file!r} {file:>9}", None),
        ("{file", "{file"),
        ("file}", "file}"),
        ("{file.}", "{file.}"),
        ("{a:{file}}", "{a:a b.py}"),
        ("{\n}", "{\n}"),
    ],
)
def test_what_is_a_placeholder(template: str, text: str | None) -> None:
    """Only {name}, {name.path} and {{name}} are read; every other brace stays as it is."""
    assert render(template, VALUES) == (template if text is None else text)


def test_values_are_never_read_again() -> None:
    """A value that looks like a placeholder stays a value, also beside the template's own braces."""
    values = {"a": "{b} {{b}} {", "b": "B}"}
    assert render("{a}{b}{{b}}", values) == "{b} {{b}} {B}{b}"


@pytest.mark.parametrize("line", (Path(__file__).parent / "inputs" / "hostile-names.jsonl").read_text().splitlines())
def test_hostile_values_arrive_unchanged(line: str) -> None:
    """Every hostile name, put in as a value, comes out character for character."""
    name = json.loads(line)["name"]
    assert render("<{x}>", {"x": name, "secrets": "no"}) == f"<{name}>"


@given(braces)
def test_literal_renders_to_the_text(text: str) -> None:
    """literal() makes a template of any text that renders to that text and knows no placeholder."""
    assert render(literal(text), {}) == text
    assert placeholders(literal(text)) == []


@given(braces)
def test_placeholders_are_what_render_wants(template: str) -> None:
    """render() succeeds exactly when all of placeholders() are known, and replaces just those."""
    names = placeholders(template)
    values = {name.split(".")[0]: "v" for name in names}
    if all("." not in name for name in names):
        assert render(template, values).count("v") == len(names)
    if names:
        with pytest.raises(InvalidInput):
            render(template, {})


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{fil}", r"unknown placeholder \{fil\}; did you mean 'file'\?"),
        ("{fix-parser.reslt}", r"fix-parser has no 'reslt'; did you mean 'result'\?"),
        ("{fix-parser.result.steps.2}", r"fix-parser.result.steps is a list of 2 and has no '2'"),
        ("{file.upper}", r'file is "a b.py" and has no \'upper\''),
        ("{n.__class__}", r"n is 3 and has no '__class__'"),
    ],
)
def test_what_cannot_be_found(template: str, says: str) -> None:
    """An unknown name or path is an error that says where it ended; attributes cannot be reached."""
    with pytest.raises(InvalidInput, match=says):
        render(template, VALUES)


def test_check_names_each_unknown_placeholder_once() -> None:
    """check() reports every unknown name once, with the nearest known one and how to write it literally."""
    assert check("{file} {fiel} {fiel} {{free}} {zzz.q}", ["file", "n"]) == [
        "unknown placeholder {fiel}; did you mean 'file'? (write {{fiel}} for the literal text)",
        "unknown placeholder {zzz.q}; known: file, n (write {{zzz.q}} for the literal text)",
    ]
    assert check("no braces", []) == []
    assert check("{x}", []) == ["unknown placeholder {x}; there are none (write {{x}} for the literal text)"]


def test_quote_is_applied_to_values_alone() -> None:
    """A quoting function sees each value's text and nothing of the template."""
    assert render("'{file}' {{n}} {n}", VALUES, quote=lambda text: f"<{text}>") == "'<a b.py>' {n} <3>"


def test_names() -> None:
    """Names begin with a letter or underscore and hold letters, digits, underscores and hyphens of ASCII."""
    assert all(map(is_name, ["a", "_", "fix-parser", "A9_-"]))
    assert not any(map(is_name, ["", "9", "-a", "a b", "é", "a.b", "a\n"]))
