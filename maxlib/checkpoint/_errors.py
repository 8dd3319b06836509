"""What can go wrong with a checkpoint, by name."""


class SaveError(RuntimeError):
    """A step could not be written; the steps before it are as they were.

    Attributes:
      step: the step that is not there.
    """

    def __init__(self, message: str, *, step: int):
        super().__init__(message)
        self.step = step


class InUseError(RuntimeError):
    """Another run has this directory."""


class DamagedError(RuntimeError):
    """What is stored is not what was saved.

    Attributes:
      step: the damaged step, None for a checkpoint that is not a step of a run.
      leaves: what is damaged, such as "params: layers.body.0.attn.q.w".
    """

    def __init__(self, message: str, *, step: int | None = None, leaves: tuple[str, ...] = ()):
        super().__init__(message)
        self.step, self.leaves = step, leaves


def shorten(names: list[str], most: int = 12) -> str:
    """A line for each name, of which there may be thousands."""
    more = [f"... and {len(names) - most} more"] if len(names) > most else []
    return "".join(f"\n  {name}" for name in [*names[:most], *more])
