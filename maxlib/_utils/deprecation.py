"""Public names that are on their way out; docs/versioning.md says how long they stay."""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def deprecated(instead: str, *, since: str, removed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator for a public function or method that users should no longer call.

    The function keeps working, warns where it is called, and says so in its documentation. Type checkers and editors
    read `__deprecated__`, as PEP 702 has it.

    Args:
        instead: What to use in its place.
        since: Version that deprecates it.
        removed: Version that no longer has it. `tests/test_deprecation.py` fails there, until the function is gone.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        message = f"{function.__qualname__} is deprecated since maxlib {since} and ends with {removed}: use {instead}"

        @functools.wraps(function)
        def warning(*args: P.args, **kwargs: P.kwargs) -> R:
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        warning.__doc__ = f"{(function.__doc__ or '').rstrip()}\n\nDeprecated since {since}: use {instead}."
        warning.__deprecated__ = message  # pyright: ignore[reportAttributeAccessIssue]
        return warning

    return decorate
