"""Checks of options with a few allowed values."""

from collections.abc import Sequence
from typing import Any


def check_choice(name: str, value: Any, choices: Sequence[Any], why: str = "") -> None:
    """Raises ValueError unless `value` is one of `choices`.

    Args:
        name: Name of the option.
        value: Its value.
        choices: The allowed values.
        why: Explanation to append to the error.
    """
    if value not in choices:
        listed = ", ".join(map(repr, choices[:-1]))
        raise ValueError(f"{name} must be {listed} or {choices[-1]!r}, got {value!r}{why and '; ' + why}")
