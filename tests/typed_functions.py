"""Agent functions with types, which child processes and the command line import by name."""

from __future__ import annotations

import dataclasses
from datetime import date
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from orchestrator import Context, agent

if TYPE_CHECKING:
    from elsewhere import Unknown  # type: ignore[import-not-found]


@dataclasses.dataclass
class Line:
    """A part of an order."""

    item: str
    count: int = 1


@dataclasses.dataclass
class Order:
    """An input with parts."""

    number: int
    lines: list[Line]
    due: date | None = None


class Receipt(BaseModel):
    """A result with a rule of its own."""

    number: int
    total: float = Field(ge=0)


@agent("bill")
async def bill(ctx: Context[Order]) -> Receipt:
    """On the loop: dataclass to model."""
    return Receipt(number=ctx.input.number, total=float(sum(line.count for line in ctx.input.lines)))


@agent("bill-apart")
def bill_apart(ctx: Context[Order]) -> Receipt:
    """In a child: the same."""
    return Receipt(number=ctx.input.number, total=float(sum(line.count for line in ctx.input.lines)))


@agent("says")
async def says(ctx: Context) -> Receipt:
    """Return the input as it is, whatever it says of itself."""
    return ctx.input  # type: ignore[no-any-return]


@agent("says-apart")
def says_apart(ctx: Context) -> Receipt:
    """The same in a child."""
    return ctx.input  # type: ignore[no-any-return]


@agent("lines")
async def lines(ctx: Context[list[Line]]) -> list[Order]:
    """Types inside of types."""
    return [Order(1, ctx.input)]


@agent("loose")
async def loose(ctx: Context[Any]) -> dict[str, int]:
    """Types that say little are left alone."""
    return ctx.input  # type: ignore[no-any-return]


@agent("unknown-result")
async def unknown_result(ctx: Context) -> Unknown:
    """What only a type checker knows is left alone, too."""
    return ctx.input


async def unknown_input(ctx: Context[Unknown]) -> None:
    """This cannot be kept, so it is refused."""
