"""Runs of consecutive numbers."""

from collections.abc import Iterable
from typing import SupportsIndex


def runs(numbers: Iterable[SupportsIndex]) -> list[tuple[int, int]]:
    """Returns the first and last of each run in sorted numbers: `[0, 1, 2, 5]` becomes `[(0, 2), (5, 5)]`."""
    pairs: list[tuple[int, int]] = []
    for number in map(int, numbers):
        if pairs and number == pairs[-1][1] + 1:
            pairs[-1] = pairs[-1][0], number
        else:
            pairs.append((number, number))
    return pairs


def ranges(numbers: Iterable[SupportsIndex]) -> list[str]:
    """Shortens sorted numbers: `[0, 1, 2, 5]` becomes `["0-2", "5"]`."""
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs(numbers)]
