"""``value``: the decorator of the records that are made for every attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

V = TypeVar("V")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[V]) -> type[V]:
    """Make *cls* a dataclass with slots whose fields are set once: who checks types refuses a second time.

    Python itself would refuse as well with ``frozen=True``, and sets every field by a call for that: the claim of one
    task then takes 10 µs to make instead of 0.8, as much as all else that a claim costs.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


def with_field(given: V, name: str, new: Any) -> V:
    """A copy of the value *given* with one field changed; ``dataclasses.replace`` takes four times as long."""
    copy: V = object.__new__(type(given))
    for each in given.__slots__:  # type: ignore[attr-defined]
        setattr(copy, each, getattr(given, each))
    setattr(copy, name, new)
    return copy


__all__ = ["value", "with_field"]
