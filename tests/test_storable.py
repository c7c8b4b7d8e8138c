"""What PostgreSQL refuses is replaced on the way out of an agent and refused on the way in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.types.json import Json, Jsonb

from orchestrator.database.engine import connection_parameters
from orchestrator.domain.storable import (
    MAX_DEPTH,
    NAME_MAX,
    TITLE_MAX,
    check_json,
    check_text,
    storable_json,
    storable_text,
)
from orchestrator.errors import InvalidInput

INPUTS = Path(__file__).parent / "inputs"

hostile_text = st.text(st.sampled_from('a\x00\ud83d\ude00\ud800\\u0{}[]"\ufffd ') | st.characters(), max_size=12)
hostile_json: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | hostile_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(hostile_text, inner, max_size=4),
    max_leaves=20,
)


def accepted(value: Any) -> bool:
    """Say whether PostgreSQL's json and jsonb would take the driver's text of *value*."""
    try:
        text = json.dumps(value, allow_nan=False)
        json.loads(text)
    except (ValueError, RecursionError):
        return False

    def fine(item: Any) -> bool:
        if isinstance(item, str):
            joined = json.loads(json.dumps(item))
            return "\x00" not in joined and not any("\ud800" <= each <= "\udfff" for each in joined)
        if isinstance(item, dict):
            return all(fine(key) and fine(each) for key, each in item.items())
        return all(map(fine, item)) if isinstance(item, list) else True

    return fine(value)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("plain ✓ 日本語 👩‍🚀", "plain ✓ 日本語 👩‍🚀"),
        ("a\x00b", "a\ufffdb"),
        ("\ud800", "\ufffd"),
        ("x\udc00y\ud800", "x\ufffdy\ufffd"),
        ("literal \\u0000 stays", "literal \\u0000 stays"),
        ("\x01\x1b[31m\r\n\x7f\u2028", "\x01\x1b[31m\r\n\x7f\u2028"),
    ],
)
def test_text_keeps_all_but_what_is_forbidden(text: str, clean: str) -> None:
    """NUL and lone surrogates become U+FFFD, one for each; all else stays, and the flag says which it was."""
    assert storable_text(text) == (clean, text != clean)


def test_two_halves_become_their_character() -> None:
    """A surrogate pair that came as two code points is one character, and nothing was lost."""
    assert storable_text("\ud83d\ude00!") == ("😀!", False)


@given(hostile_text)
def test_any_text_can_be_encoded(text: str) -> None:
    """Whatever came in, the clean text is UTF-8 without NUL, and clean text is left alone."""
    clean, replaced = storable_text(text)
    assert "\x00" not in clean.encode("utf-8").decode("utf-8")
    assert storable_text(clean) == (clean, False)
    assert replaced or clean == text or "\ud83d\ude00" in text or any("\ud800" <= each <= "\udfff" for each in text)


@given(hostile_json)
@settings(max_examples=300)
def test_any_json_is_accepted_afterwards(value: Any) -> None:
    """The clean value is accepted, is its own clean value, and a good value comes back as the same object."""
    clean, replaced = storable_json(value)
    assert accepted(clean)
    assert storable_json(clean) == (clean, False)
    if accepted(value):
        assert clean is value
        assert not replaced
    else:
        assert replaced or "\\ud83d\\ude00" in json.dumps(value)


@given(hostile_json)
def test_input_is_refused_exactly_when_output_would_be_changed(value: Any) -> None:
    """The two sides agree on what is wrong."""
    if accepted(value):
        check_json("input", value)
    else:
        with pytest.raises(InvalidInput, match=r"^input"):
            check_json("input", value)


def test_hostile_values() -> None:
    """Every line of the hostile values comes out storable; escaped text survives beside a real NUL."""
    cases = {
        line["case"]: line["result"]
        for line in map(json.loads, (INPUTS / "hostile-values.jsonl").read_text("utf-8").splitlines())
    }
    clean = {case: storable_json(value) for case, value in cases.items()}
    assert all(accepted(value) for value, _ in clean.values())
    assert clean["nul in value"] == ({"x": "a\ufffdb"}, True)
    assert clean["nul in key"] == ({"a\ufffd": 1}, True)
    assert clean["escaped text only, must survive"] == (cases["escaped text only, must survive"], False)
    assert clean["double escaped then nul"] == ({"x": "\\\\u0000 and \ufffd"}, True)
    assert clean["nan"] == ({"m": "NaN"}, True)
    assert clean["infinity"] == ({"m": ["Infinity", "-Infinity"]}, True)
    assert clean["deep nesting"] == (cases["deep nesting"], False)


def test_a_replaced_key_makes_way_for_those_that_were_there() -> None:
    """A key that becomes equal to another is numbered; no value is lost, the untouched key keeps its name."""
    value = dict(zip(["a\x00", "a\ufffd", "a\ud800", "z"], [1, 2, 3, 4], strict=True))
    assert storable_json(value) == ({"a\ufffd (2)": 1, "a\ufffd": 2, "a\ufffd (3)": 3, "z": 4}, True)


def test_depth_beyond_the_cap_is_kept_as_text() -> None:
    """What is nested too deep becomes the string of its own JSON text, at any depth."""
    deep: Any = "core\x00"
    for number in range(50_000):
        deep = [deep] if number % 2 else {"k": deep}
    clean, replaced = storable_json({"deep": deep, "n": 1})
    assert replaced
    assert clean["n"] == 1
    level, inner = 0, clean["deep"]
    while not isinstance(inner, str):
        inner, level = (inner[0] if isinstance(inner, list) else inner["k"]), level + 1
    assert level == MAX_DEPTH - 1
    assert inner.count("[") + inner.count("{") == 50_000 - level
    assert '"core\ufffd"' in inner
    assert storable_json(clean) == (clean, False)
    with pytest.raises(InvalidInput, match="nested deeper than 500"):
        check_json("input", deep)


def test_text_of_depth_is_json() -> None:
    """The text that a deep part becomes is the JSON of that part."""
    part: dict[str, Any] = {"a": [1, 2.5, None, True, {}], "b": {"c": [], "d": "é\n"}, "e": []}
    deep: Any = part
    for _ in range(MAX_DEPTH):
        deep = [deep]
    clean, _ = storable_json(deep)
    for _ in range(MAX_DEPTH):
        clean = clean[0]
    assert json.loads(clean) == part


def test_wide_values_are_not_deep_ones() -> None:
    """Many brackets side by side, or within strings, are not depth."""
    value = {"rows": [[n, {"x": "[[[{{{" * 10}] for n in range(2_000)]}
    assert storable_json(value) == (value, False)
    assert storable_json(value)[0] is value


def test_huge_integers_and_cycles() -> None:
    """An integer that Python will not print becomes its hexadecimal text; a value within itself is an error."""
    assert storable_json({"n": 1 << 20_000}) == ({"n": hex(1 << 20_000)}, True)
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidInput, match="contains itself"):
        storable_json(loop)


@pytest.mark.parametrize("alien", [b"bytes", {1, 2}, object(), 1j])
def test_what_json_has_no_form_for(alien: object) -> None:
    """A thing that is not JSON is an error that names the place and the type, on both sides."""
    for door in (lambda: storable_json({"a": [0, alien]}, "result"), lambda: check_json("result", {"a": [0, alien]})):
        with pytest.raises(InvalidInput, match=rf"^result\.a\[1\]: JSON has no form for {type(alien).__name__}$"):
            door()


def test_keys_are_spelled_as_the_driver_spells_them() -> None:
    """Numbers, truth values and null as keys become text in the same way on the slow path."""
    value = {True: "b", 7: "a", None: "c", 2.5: "d", "x": "\x00"}
    assert list(storable_json(value)[0]) == list(json.loads(json.dumps(value)))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("title", "a\x00b", r"^title: a NUL character \(U\+0000\) at position 1"),
        ("title", "ab\ud800", r"^title: half of a surrogate pair \(U\+D800\) at position 2"),
        ("title", "x" * (TITLE_MAX + 1), r"^title: 10,001 characters are too many, at most 10,000"),
        ("title", 7, "^title: expected text, found a number"),
    ],
)
def test_text_input_is_refused_by_name(field: str, value: Any, says: str) -> None:
    """The error names the field, what is wrong and where; it is one of exit code 2."""
    with pytest.raises(InvalidInput, match=says) as caught:
        check_text(field, value, TITLE_MAX)
    assert caught.value.exit_code == 2
    assert caught.value.ids == {"field": field}


def test_text_input_that_is_fine() -> None:
    """None, hostile but legal names and text of exactly the longest length pass."""
    check_text("title", None)
    check_text("title", "x" * TITLE_MAX, TITLE_MAX)
    for line in (INPUTS / "hostile-names.jsonl").read_text("utf-8").splitlines():
        check_text("name", json.loads(line)["name"], NAME_MAX)


def test_json_input_is_refused_with_its_place() -> None:
    """The error of a value names the way to it, in a form that can itself be shown and stored."""
    with pytest.raises(InvalidInput, match=r"^input\.steps\[1\]\.x: a NUL"):
        check_json("input", {"steps": [1, {"x": "\x00"}]})
    with pytest.raises(InvalidInput, match=r"^params\.a\ufffd: a NUL"):
        check_json("params", {"a\x00": 1})
    with pytest.raises(InvalidInput, match=r"^input\[0\]: NaN is not a number that JSON has"):
        check_json("input", [float("nan")])


def test_postgresql_agrees(server_url: str) -> None:
    """json, jsonb and text take every clean value and give it back; they refuse what the input side refuses."""
    with psycopg.connect(**connection_parameters(server_url), autocommit=True) as connection:

        @given(value=hostile_json, text=hostile_text)
        @settings(max_examples=60, deadline=None)
        def check(value: Any, text: str) -> None:
            clean, line = storable_json(value)[0], storable_text(text)[0]
            row = connection.execute(
                "SELECT %s::jsonb, %s::json, %s::text", [Jsonb(clean), Json(clean), line]
            ).fetchone()
            as_json = json.loads(json.dumps(clean))
            assert row is not None
            assert row[1:] == (as_json, line)  # jsonb writes a large float as an integer: the same number, not equal

        check()
        deep: Any = 0
        for _ in range(MAX_DEPTH):
            deep = [deep]
        for good in (deep, 10**4_000, 1.7e308, 2.5, -5e-324, "\\u0000 \\ud800", {"": {"\x7f\x1b": "\u2028😀"}}):
            check_json("input", good)
            row = connection.execute("SELECT %s::jsonb::text, %s::json::text", [Jsonb(good), Json(good)]).fetchone()
            assert row is not None
            assert all(json.loads(each, parse_int=int) == good or float(each) == good for each in row)
        for bad in ("\x00", {"a\x00": 1}, "\ud800", float("nan"), [float("inf")]):
            with pytest.raises(InvalidInput):
                check_json("input", bad)
            with pytest.raises(psycopg.DataError):
                connection.execute("SELECT %s::jsonb", [Jsonb(bad)])
