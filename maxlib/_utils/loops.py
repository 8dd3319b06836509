"""Loops over blocks of arrays. One block needs no loop: such programs compile in less time, and XLA fuses across it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax


def scan(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
    """Runs `step(carry, x)` for each x along the first axis of `xs`, as `jax.lax.scan` does."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return jax.lax.scan(step, carry, xs)
    carry, out = step(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], out)


def each(f: Callable[[Any], Any], xs: Any) -> Any:
    """Returns `f(x)` for each x along the first axis of `xs`, as `jax.lax.map` does."""
    return scan(lambda _, x: (None, f(x)), None, xs)[1]


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many constants, and how many carried values, the inputs of a scan's equation begin with."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry = (len(list(inputs)) for inputs in list(params["ft_in"].unpack())[:2])  # from jax 0.12
    return consts, carry
