"""Loops over blocks of arrays. One block needs no loop: such programs compile in less time, and XLA fuses across it."""

from collections.abc import Callable
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
