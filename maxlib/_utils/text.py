"""Tables and lists of numbers as text, and a check of lists of texts."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    from rich.console import RenderableType


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


def to_text(shown: "RenderableType", *, width: int = 120) -> str:
    """Renders a rich table as plain text, without leading and trailing blank lines or trailing spaces."""
    from rich.console import Console  # here: workers of a loader that only shorten numbers do without

    # In a notebook it would display an empty output, and write the codes of colours into the text.
    console = Console(width=width, force_jupyter=False, color_system=None)
    with console.capture() as capture:
        console.print(shown)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())


def check_texts(name: str, value: Any) -> None:
    """Raises ValueError for one text where several are expected: its letters would be taken for them."""
    if isinstance(value, str):
        raise ValueError(f"{name} must be a list of texts, got {value!r:.40}: put it in a list")
