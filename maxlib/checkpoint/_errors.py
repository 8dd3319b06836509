"""Errors of checkpoints."""

import re


class SaveError(RuntimeError):
    """Error for a step that could not be written; earlier steps are unchanged.

    Attributes:
        step: The missing step.
        reason: What went wrong, in one line.
    """

    def __init__(self, message: str, *, step: int, reason: str | None = None):
        super().__init__(message)
        self.step, self.reason = step, message if reason is None else reason


class UnsavedError(RuntimeError):
    """Error that ends a run after too many consecutive failed saves.

    Attributes:
        last_good: The newest step on disk; None if there is none.
    """

    def __init__(self, message: str, *, last_good: int | None):
        super().__init__(message)
        self.last_good = last_good


class InUseError(RuntimeError):
    """Error for a directory that another run has taken over."""


class DamagedError(RuntimeError):
    """Error for stored data that differs from what was saved.

    Attributes:
        step: The damaged step, None for a checkpoint that is not a step of a run.
        leaves: The damaged leaves, such as "params: layers.groups.0.0.attn.q.w".
    """

    def __init__(self, message: str, *, step: int | None = None, leaves: tuple[str, ...] = ()):
        super().__init__(message)
        self.step, self.leaves = step, leaves


def summary(error: BaseException, most: int = 300) -> str:
    """Summarizes an error in one line: the first error of a group, and the operating system's message if tensorstore's
    contains it.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split()) or type(error).__name__
    if match := re.search(r"([^:]+) \[os_error_code='(\d+)'\]", text):
        return f"[Errno {match[2]}] {match[1].strip()}"
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def shorten(names: list[str], most: int = 12) -> str:
    """Returns a line for each of the first names, of which there may be thousands."""
    rest = [f"... and {len(names) - most} more"] if len(names) > most else []
    return "".join(f"\n  {name}" for name in [*names[:most], *rest])
