"""FLOP formulas of ops whose loops depend on data, so that FLOPs cannot be counted from their code."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax

Fn = TypeVar("Fn", bound=Callable)

FORMULAS: dict[str, Callable[..., Any]] = {}


def counted(formula: Callable[..., Any], *, static: Sequence[str] = ()) -> Callable[[Fn], Fn]:
    """Returns a decorator that compiles a function under its own name and registers the formula for its FLOPs.

    Code that counts FLOPs uses `formula` and does not look inside the function.

    Args:
      formula: function of the array arguments in their order, without those that are None. An array whose value is
        not known is passed as a `jax.ShapeDtypeStruct`. It returns the floating-point operations of one call.
      static: names of the static arguments, as in `jax.jit`.
    """

    def wrap(fn: Fn) -> Fn:
        fn.__name__ = f"{fn.__module__}.{fn.__qualname__}"  # qualified, so that no other library uses it
        FORMULAS[fn.__name__] = formula
        return cast(Fn, jax.jit(fn, static_argnames=static))

    return wrap
