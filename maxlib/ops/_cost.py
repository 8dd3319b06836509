"""FLOPs of ops whose loops depend on data, so that they cannot be read off their code."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax

Fn = TypeVar("Fn", bound=Callable)

FORMULAS: dict[str, Callable[..., Any]] = {}


def counted(formula: Callable[..., Any], *, static: Sequence[str] = ()) -> Callable[[Fn], Fn]:
    """Compiles a function under its own name; whoever counts FLOPs asks `formula` and does not look inside.

    formula: takes the arrays among the arguments in their order, those that are None left out. One whose value is not
    known comes as a `jax.ShapeDtypeStruct`. Returns the floating-point operations of one call.
    """

    def wrap(fn: Fn) -> Fn:
        fn.__name__ = f"{fn.__module__}.{fn.__qualname__}"  # no function of somebody else's has this one
        FORMULAS[fn.__name__] = formula
        return cast(Fn, jax.jit(fn, static_argnames=static))

    return wrap
