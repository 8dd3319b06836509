"""FLOP formulas of ops whose loops depend on data, so that FLOPs cannot be counted from their code."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax

Fn = TypeVar("Fn", bound=Callable)


class Formula(NamedTuple):
    """A registered formula.

    Args:
      flops: the function that `register_flops` was given.
      fewest: a call with fewer arrays is a piece that a backward pass has left of the op; its own matmuls count.
    """

    flops: Callable[..., Any]
    fewest: int


FORMULAS: dict[str, Formula] = {}


def register_flops(formula: Callable[..., Any], *, static: Sequence[str] = ()) -> Callable[[Fn], Fn]:
    """Registers a formula for the FLOPs of a function: a decorator, which also compiles the function (`jax.jit`).

    `observability.forward_flops`, and with it MFU and the model's FLOPs in plans, takes the formula and does not look
    inside the function. A loop that ends when the data says so needs one (`lax.while_loop`), and a Pallas kernel
    without a `cost_estimate`. Matmuls, `lax.scan` and `lax.cond` are counted without.

    Args:
      formula: function of the decorated function's arrays in their order, without those that are None. It gets a
        `jax.ShapeDtypeStruct` for an array whose value is not known, and returns the floating-point operations of one
        forward call.
      static: names of the static arguments, as in `jax.jit`.
    """

    def wrap(fn: Fn) -> Fn:
        arrays = [name for name in inspect.signature(fn).parameters if name not in static]
        fn.__name__ = f"{fn.__module__}.{fn.__qualname__}"  # qualified, so that no other library uses it
        FORMULAS[fn.__name__] = Formula(formula, min(len(arrays), 3))
        return cast(Fn, jax.jit(fn, static_argnames=static))

    return wrap
