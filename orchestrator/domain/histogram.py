"""Counts in buckets of growing width: how long locks were held, so that many workers' minutes can be added up.

Bounds are fixed for good: stored counts of different versions must mean the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

BOUNDS_MS: tuple[float, ...] = tuple(round(0.05 * 1.25**step, 6) for step in range(64))
"""Upper bounds of the buckets in milliseconds, from 0.05 ms to about a minute; one more bucket takes what is longer."""

BUCKETS = len(BOUNDS_MS) + 1


def bucket(milliseconds: float) -> int:
    """The bucket that *milliseconds* counts in."""
    return bisect_left(BOUNDS_MS, milliseconds)


def added(counts: Iterable[Sequence[int]]) -> list[int]:
    """The sum of several lists of counts; a short list has zeros at its end."""
    total = [0] * BUCKETS
    for some in counts:
        for index, count in enumerate(some[:BUCKETS]):
            total[index] += count
    return total


def quantile(counts: Sequence[int], q: float) -> float | None:
    """The value in milliseconds that the share *q* of all counts lies at or below; None without counts.

    Exact to the width of a bucket (a quarter of the value); within a bucket the counts are taken as evenly spread.
    """
    total = sum(counts)
    if total == 0:
        return None
    wanted = q * total
    seen = 0
    for index, count in enumerate(counts):
        if count and seen + count >= wanted:
            low = BOUNDS_MS[index - 1] if index else 0.0
            high = BOUNDS_MS[min(index, len(BOUNDS_MS) - 1)]
            return low + (high - low) * max(0.0, wanted - seen) / count
        seen += count
    return BOUNDS_MS[-1]


__all__ = ["BOUNDS_MS", "BUCKETS", "added", "bucket", "quantile"]
