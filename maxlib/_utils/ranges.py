"""Runs of consecutive numbers."""

from collections.abc import Iterable
from typing import SupportsIndex


def runs(numbers: Iterable[SupportsIndex]) -> list[tuple[int, int]]:
    """Returns the first and last of each run in sorted numbers: `[0, 1, 2, 5]` becomes `[(0, 2), (5, 5)]`."""
    found: list[tuple[int, int]] = []
    for number in map(int, numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def ranges(numbers: Iterable[SupportsIndex]) -> list[str]:
    """Shortens sorted numbers: `[0, 1, 2, 5]` becomes `["0-2", "5"]`."""
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs(numbers)]
