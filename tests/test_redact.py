"""Secrets never pass, however the bytes are cut; everything else passes as it is."""

from __future__ import annotations

import base64
import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.agents.redact import Secrets

TOKEN = "sk-ant-0123456789"


def through(secrets: Secrets, data: bytes, cuts: list[int]) -> bytes:
    """What comes out when *data* goes in cut at *cuts*."""
    stream = secrets.stream()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    out = b"".join(stream.feed(data[a:b]) for a, b in pairwise(edges))
    return out + stream.flush()


def test_a_value_is_replaced_by_its_name() -> None:
    """The mark says which secret stood there."""
    assert Secrets({"API_TOKEN": TOKEN}).clean(f"a {TOKEN} b".encode()) == b"a [secret API_TOKEN] b"
    assert Secrets({"API_TOKEN": TOKEN}).text(f"Bearer {TOKEN}") == "Bearer [secret API_TOKEN]"


def test_every_cut_in_two_is_the_same() -> None:
    """Where a chunk ends makes no difference, byte for byte."""
    secrets = Secrets({"A": TOKEN, "B": "sk-ant-0123456789-and-more", "C": "abcabcabd"})
    data = f"x {TOKEN}{TOKEN} sk-ant-0123456789-and-more abcabcabcabd sk-ant-01 ".encode() + TOKEN[:-1].encode()
    whole = through(secrets, data, [])
    assert whole == b"x [secret A][secret A] [secret B] abc[secret C] sk-ant-01 " + TOKEN[:-1].encode()
    for cut in range(len(data)):
        assert through(secrets, data, [cut]) == whole, cut


@given(
    st.lists(st.sampled_from(["abcdef", "abcabcdef", "efabcd", "ab", "c", "\n", '"', "é"]), max_size=12),
    st.lists(st.integers(0, 200), max_size=30),
)
def test_any_cuts_are_the_same_and_nothing_passes(words: list[str], cuts: list[int]) -> None:
    """For values that begin and end like each other as well: no cut changes the output, no value is in it."""
    secrets = Secrets({"A": "abcdef", "B": "efabcd", "C": "abcabcdef"})
    data = "".join(words).encode()
    out = through(secrets, data, cuts)
    assert out == through(secrets, data, []) == secrets.clean(data)
    assert b"abcdef" not in out


def test_a_value_inside_json_is_found() -> None:
    """Quotes, backslashes and letters beyond ASCII are found as JSON writes them, in both spellings."""
    value = 'pä"ss\\word\n1'
    secrets = Secrets({"PASSWORD": value})
    inner = [json.dumps({"k": value}), json.dumps({"k": value}, ensure_ascii=False)]
    outer = [json.dumps({"k": each}, ensure_ascii=plain) for each in inner for plain in (True, False)]
    for text in (*inner, *outer, value):
        clean = secrets.text(text)
        assert "word" not in clean, text
        assert "[secret PASSWORD]" in clean
    assert json.loads(secrets.text(json.dumps({"k": value}))) == {"k": "[secret PASSWORD]"}


def test_short_values_are_named_and_not_looked_for() -> None:
    """A value of five characters would be found everywhere: it is reported instead."""
    secrets = Secrets({"PIN": "12345", "EMPTY": "", "LONG": TOKEN})
    assert secrets.too_short == ("PIN",)
    assert secrets.text("12345 " + TOKEN) == "12345 [secret LONG]"
    assert not Secrets({"PIN": "12345"})


def test_what_holds_no_secret_passes_at_once() -> None:
    """Only an end that may be the beginning of a value is held back."""
    stream = Secrets({"A": TOKEN}).stream()
    assert stream.feed(b"hello sk-anx") == b"hello sk-anx"
    assert stream.feed(b"hello sk-an") == b"hello "
    assert stream.feed(b"y") == b"sk-any"
    assert stream.flush() == b""


def test_other_encodings_are_out_of_reach() -> None:
    """Documented limit: base64 of a value is not recognised."""
    hidden = base64.b64encode(TOKEN.encode())
    assert Secrets({"A": TOKEN}).clean(hidden) == hidden
