"""Sizes of the engine's programs: few of them, so that similar requests share a program."""

from maxlib.hardware import current_device

_FEWEST_ROWS = 8  # of a step, unless the engine has fewer slots


def power_of_two(number: int) -> int:
    """Rounds a number up to a power of two; 0 stays 0."""
    return 1 << (number - 1).bit_length() if number else 0


def bucket(length: int) -> int:
    """Rounds a prompt's length up by less than a quarter, or to 16, so that four programs cover each doubling."""
    multiple = max(16, power_of_two(length) // 8)
    return -(-length // multiple) * multiple


def row_counts(slots: int) -> list[int]:
    """Returns the numbers of rows that a step may have: all slots, and halves of them. On CPUs, where time grows with
    rows, also three quarters of a large number.
    """
    counts = [slots]
    while counts[-1] >= 2 * _FEWEST_ROWS:
        count = counts[-1]
        quarters = [-(-3 * count // 4)] if count >= 8 * _FEWEST_ROWS and current_device()[0] == "cpu" else []
        counts += [*quarters, -(-count // 2)]
    return counts
