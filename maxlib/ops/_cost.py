"""FLOP formulas of ops whose FLOPs cannot be counted from their code, because their loops depend on data."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax

Fn = TypeVar("Fn", bound=Callable)


class FlopsFormula(NamedTuple):
    """A formula of `register_flops`.

    Args:
        flops: Function of a call's arrays that returns its floating-point operations.
        fewest: A call with fewer arrays is a part of the op that remains in a backward pass; its matmuls are counted.
    """

    flops: Callable[..., Any]
    fewest: int


_formulas: dict[str, FlopsFormula] = {}


def register_flops(
    formula: Callable[..., Any], *, static: Sequence[str] = (), name: str | None = None
) -> Callable[[Fn], Fn]:
    """Registers a formula for the FLOPs of a function: a decorator, which also compiles the function (`jax.jit`).

    `observability.forward_flops`, and so MFU and the model FLOPs of plans, use the formula instead of counting the
    function's operations. It is needed for loops whose length depends on data (`lax.while_loop`), and for Pallas
    kernels without a `cost_estimate`. Matmuls, `lax.scan` and `lax.cond` need no formula.

    Args:
        formula: Function of the decorated function's arrays in order, without those that are None. An array of unknown
            value is passed as a `jax.ShapeDtypeStruct`. It returns the floating-point operations of one forward call.
        static: Names of the static arguments, as in `jax.jit`.
        name: Name of the operation in `maxlib.ops`; by default the function's qualified name, which is unique.
    """

    def wrap(fn: Fn) -> Fn:
        arrays = [parameter for parameter in inspect.signature(fn).parameters if parameter not in static]
        fn.__name__ = f"{fn.__module__}.{fn.__qualname__}" if name is None else f"maxlib.ops.{name}"
        _formulas[fn.__name__] = FlopsFormula(formula, min(len(arrays), 3))
        return cast(Fn, jax.jit(fn, static_argnames=static))

    return wrap


def registered_flops(name: str) -> FlopsFormula | None:
    """Returns the formula that `register_flops` registered for a jitted function of this name, or None."""
    return _formulas.get(name)
