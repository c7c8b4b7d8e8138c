"""``value``: records whose fields are set once, with what a dataclass has."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace

from orchestrator.domain.values import value, with_field


@value
class Point:
    """A record."""

    x: int
    y: int = 0
    note: str = field(default="n", repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Same:
    """The same record as Python makes it."""

    x: int
    y: int = 0
    note: str = field(default="n", repr=False, compare=False)


def test_a_value_is_what_a_frozen_dataclass_is() -> None:
    """Equality, hash, text, copies and fields are those of Python's own, but that a second setting is not refused."""
    assert repr(Point(1)) == repr(Same(1)).replace("Same", "Point")
    assert Point(1, 2) == Point(1, 2, "other") != Point(1)
    other: object = Same(1)
    assert Point(1) != other
    assert len({Point(1), Point(1, 0, "other"), Point(2)}) == 2
    assert asdict(replace(Point(1), y=5)) == {"x": 1, "y": 5, "note": "n"}
    assert with_field(Point(1), "y", 5) == Point(1, 5)
    assert [each.name for each in fields(Point)] == [each.name for each in fields(Same)]
    assert not hasattr(Point(1), "__dict__")
