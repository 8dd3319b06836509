"""Compares two traced functions for equality, beyond their shapes."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


def is_same_program(a: ClosedJaxpr, b: ClosedJaxpr) -> bool:
    """Returns True if two functions certainly apply the same operations to the same constants; False if in doubt.

    Args:
        a: A function as `jax.make_jaxpr` returns it.
        b: The other one.
    """
    return _all_same(a.consts, b.consts) and _is_same_jaxpr(a.jaxpr, b.jaxpr)


def _is_same_jaxpr(a: Jaxpr, b: Jaxpr) -> bool:
    if a is b:  # jit's cache returns the same jaxpr for equal calls, so most inner functions end here
        return True
    # Each jaxpr has variables of its own. Number them by first appearance; corresponding variables get equal numbers.
    numbers: tuple[dict[Any, int], dict[Any, int]] = {}, {}

    def is_same_operand(x: Any, y: Any) -> bool:
        if isinstance(x, Literal) or isinstance(y, Literal):
            return isinstance(x, Literal) and isinstance(y, Literal) and x.aval == y.aval and _is_same(x.val, y.val)
        first, second = (seen.setdefault(v, len(seen)) for seen, v in zip(numbers, (x, y), strict=True))
        return first == second and x.aval == y.aval

    def are_same_operands(xs: Any, ys: Any) -> bool:
        return len(xs) == len(ys) and all(map(is_same_operand, xs, ys))

    inputs = are_same_operands([*a.constvars, *a.invars], [*b.constvars, *b.invars])
    return (
        inputs
        and len(a.eqns) == len(b.eqns)
        and all(
            x.primitive is y.primitive
            and are_same_operands(x.invars, y.invars)
            and are_same_operands(x.outvars, y.outvars)
            and x.params.keys() == y.params.keys()
            and _all_same(x.params.values(), y.params.values())
            for x, y in zip(a.eqns, b.eqns, strict=True)
        )
        and are_same_operands(a.outvars, b.outvars)
    )


def _all_same(xs: Iterable[Any], ys: Iterable[Any]) -> bool:
    xs, ys = list(xs), list(ys)
    return len(xs) == len(ys) and all(map(_is_same, xs, ys))


def _is_same(x: Any, y: Any) -> bool:
    """Compares parameters of a program: functions, arrays, shapes, names. Traced arrays and keys only equal
    themselves.
    """
    if x is y:
        return True
    if type(x) is not type(y) or isinstance(x, Tracer):
        return False
    if isinstance(x, ClosedJaxpr):
        return is_same_program(x, y)
    if isinstance(x, Jaxpr):
        return _is_same_jaxpr(x, y)
    if isinstance(x, tuple | list):
        return _all_same(x, y)
    if isinstance(x, jax.Array | np.ndarray):
        return x.dtype == y.dtype and not jnp.issubdtype(x.dtype, jax.dtypes.extended) and np.array_equal(x, y)
    return bool(x == y)
