"""What can go wrong with a checkpoint, by name."""

import re


class SaveError(RuntimeError):
    """A step could not be written; the steps before it are as they were.

    Attributes:
      step: the step that is not there.
    """

    def __init__(self, message: str, *, step: int):
        super().__init__(message)
        self.step = step


class UnsavedError(RuntimeError):
    """Too many saves in a row have failed for a run to go on.

    Attributes:
      last_good: the newest step that is on disk, None without one.
    """

    def __init__(self, message: str, *, last_good: int | None):
        super().__init__(message)
        self.last_good = last_good


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


def summary(error: BaseException, most: int = 300) -> str:
    """Returns what went wrong in one line: the first error of a group, the system's own words where tensorstore's
    message carries them.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split()) or type(error).__name__
    if found := re.search(r"([^:]+) \[os_error_code='(\d+)'\]", text):
        return f"[Errno {found[2]}] {found[1].strip()}"
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def shorten(names: list[str], most: int = 12) -> str:
    """A line for each name, of which there may be thousands."""
    more = [f"... and {len(names) - most} more"] if len(names) > most else []
    return "".join(f"\n  {name}" for name in [*names[:most], *more])
