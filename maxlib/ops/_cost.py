"""FLOP formulas of ops whose FLOPs cannot be counted from their code, because their loops depend on data."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax

Fn = TypeVar("Fn", bound=Callable)


class Formula(NamedTuple):
    """A registered formula.

    Args:
      flops: the function that `register_flops` was given.
      fewest: a call with fewer arrays is a part of the op that remains in a backward pass; its matmuls are counted.
    """

    flops: Callable[..., Any]
    fewest: int


FORMULAS: dict[str, Formula] = {}


def register_flops(formula: Callable[..., Any], *, static: Sequence[str] = ()) -> Callable[[Fn], Fn]:
    """Registers a formula for the FLOPs of a function: a decorator, which also compiles the function (`jax.jit`).

    `observability.forward_flops`, and so MFU and the model FLOPs of plans, use the formula instead of counting the
    function's operations. It is needed for loops whose length depends on data (`lax.while_loop`), and for Pallas
    kernels without a `cost_estimate`. Matmuls, `lax.scan` and `lax.cond` need no formula.

    Args:
      formula: function of the decorated function's arrays in order, without those that are None. An array of unknown
          value is passed as a `jax.ShapeDtypeStruct`. It returns the floating-point operations of one forward call.
      static: names of the static arguments, as in `jax.jit`.
    """

    def wrap(fn: Fn) -> Fn:
        arrays = [name for name in inspect.signature(fn).parameters if name not in static]
        fn.__name__ = f"{fn.__module__}.{fn.__qualname__}"  # qualified, so that it is unique
        FORMULAS[fn.__name__] = Formula(formula, min(len(arrays), 3))
        return cast(Fn, jax.jit(fn, static_argnames=static))

    return wrap
