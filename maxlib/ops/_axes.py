"""The check of arguments' axes by their letters."""

from typing import Any


def require(op: str, holds: bool, must: str, got: Any) -> None:
    """Raises ValueError unless a condition holds."""
    if not holds:
        raise ValueError(f"{op}: {must}, got {got}")


def check_axes(op: str, **arrays: tuple[Any, str]) -> dict[str, int]:
    """Checks that arrays have their axes, and that axes with the same letter have the same size.

    Args:
        op: Name of the operation, for errors.
        **arrays: Each array, or None, with its axes, such as `(q, "B T N H")`.

    Returns:
        The size of each letter.

    Raises:
        ValueError: When an array has other axes.
    """
    sizes: dict[str, int] = {}
    for name, (x, axes) in arrays.items():
        if x is None:
            continue
        letters = axes.split()
        known = ", ".join(f"{letter}={sizes[letter]}" for letter in letters if letter in sizes)
        must = f"{name} must have the axes {axes}" + (f" with {known}" if known else "")
        fits = len(x.shape) == len(letters) and all(
            sizes.setdefault(letter, size) == size for letter, size in zip(letters, x.shape, strict=True)
        )
        require(op, fits, must, f"shape {x.shape}")
    return sizes
