"""Deprecation of public names; docs/versioning.md has the policy."""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def deprecated(instead: str, *, since: str, removed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator for a public function or method that users should no longer call.

    The function keeps working, warns when called, and its docstring mentions the deprecation. Type checkers and editors
    read `__deprecated__` (PEP 702).

    Args:
        instead: Its replacement.
        since: Version that deprecates it.
        removed: Version that removes it. From that version on, `tests/test_deprecation.py` fails until the function is
            removed.
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
