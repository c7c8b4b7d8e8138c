"""``value``: the decorator of all records that never change."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

V = TypeVar("V")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[V]) -> type[V]:
    """Make *cls* a dataclass with slots whose fields are set once: who checks types refuses a second time.

    Python itself would refuse as well with ``frozen=True``, and sets every field by a call for that: the claim of one
    task then takes 10 µs to make instead of 0.8, as much as all else that a claim costs. It would also write and compile
    six methods for each class, which with all of ours is a tenth of a short command; here one of each serves them all.
    """
    for name, method in _METHODS.items():
        if name not in vars(cls):
            setattr(cls, name, method)
    return dataclass(slots=True, repr=False, eq=False)(cls)


def _repr(self: Any) -> str:
    shown = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{type(self).__qualname__}({shown})"


def _compared(given: Any) -> tuple[Any, ...]:
    return tuple(getattr(given, each.name) for each in fields(given) if each.compare)


def _eq(self: Any, other: object) -> Any:
    return _compared(self) == _compared(other) if type(self) is type(other) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_compared(self))


_METHODS = {"__repr__": _repr, "__eq__": _eq, "__hash__": _hash}


def with_field(given: V, name: str, new: Any) -> V:
    """A copy of the value *given* with one field changed; ``dataclasses.replace`` takes four times as long."""
    copy: V = object.__new__(type(given))
    for each in given.__slots__:  # type: ignore[attr-defined]
        setattr(copy, each, getattr(given, each))
    setattr(copy, name, new)
    return copy


__all__ = ["value", "with_field"]
