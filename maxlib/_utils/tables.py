"""Tables as text."""

from rich.console import Console, RenderableType


def to_text(shown: RenderableType, *, width: int = 120) -> str:
    """Renders a rich table as plain text, without leading and trailing blank lines or trailing spaces."""
    console = Console(width=width, force_jupyter=False)  # in a notebook it would display an empty output
    with console.capture() as capture:
        console.print(shown)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())
