"""Tables as text."""

from rich.console import Console, RenderableType


def to_text(shown: RenderableType, *, width: int = 120) -> str:
    """Renders a rich table as plain text, without leading and trailing blank lines or trailing spaces."""
    # In a notebook it would display an empty output, and write the codes of colours into the text.
    console = Console(width=width, force_jupyter=False, color_system=None)
    with console.capture() as capture:
        console.print(shown)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())
