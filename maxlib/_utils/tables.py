"""Tables as text."""

from rich.console import Console, RenderableType


def to_text(shown: RenderableType, *, width: int = 120) -> str:
    """Renders a table of rich as plain lines, without blank ones at its ends and blanks at theirs."""
    console = Console(width=width, force_jupyter=False)  # in a notebook it would show an empty output of its own
    with console.capture() as capture:
        console.print(shown)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())
