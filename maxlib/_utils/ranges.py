"""Sorted numbers as text."""

from collections.abc import Iterable
from typing import SupportsIndex


def ranges(numbers: Iterable[SupportsIndex]) -> list[str]:
    """Shortens sorted numbers: `[0, 1, 2, 5]` becomes `["0-2", "5"]`."""
    parts: list[list[int]] = []
    for number in map(int, numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts]
