"""An order of the sequence that gives every device of the context axis the same work under a causal mask.

Of `2 n` equal chunks, device `i` holds the `i`-th and the `i`-th last: one early, whose queries see little, and one
late.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxlib.sharding._constrain import axis_of
from maxlib.sharding._layout import current
from maxlib.sharding._rules import drop_uneven, spec


def can_zigzag(length: int) -> bool:
    """Tells whether the layout in use splits queries by sequence, and `length` makes two chunks for each device."""
    axis, layout = axis_of("q_seq"), current()
    return axis is not None and layout is not None and length % (2 * layout.mesh.shape[axis]) == 0


def zigzag(x: jax.Array, *names: str | None) -> jax.Array:
    """Brings the axis called "seq" from the natural order into the zigzag one; every chunk travels once.

    Args:
        x: in natural order.
        names: one for each axis, "seq" among them.
    """
    return _exchange(x, names, _to_zigzag)


def unzigzag(x: jax.Array, *names: str | None) -> jax.Array:
    """Brings the axis called "seq" back into the natural order."""
    return _exchange(x, names, _from_zigzag)


def natural_order(x: jax.Array, parts: int, axis: int = 1) -> jax.Array:
    """Brings a whole array, in the order of `parts` devices' chunks, into the natural order."""
    order = [c for i in range(parts) for c in (i, 2 * parts - 1 - i)]  # of 3 devices: 0 5 | 1 4 | 2 3
    chunks = jnp.split(x, 2 * parts, axis=axis)
    return jnp.concatenate([chunks[order.index(c)] for c in range(2 * parts)], axis=axis)


def _exchange(x: jax.Array, names: tuple[str | None, ...], local: Callable[..., Any]) -> jax.Array:
    layout, axis = current(), axis_of("q_seq")
    assert layout is not None and axis is not None  # `can_zigzag` was asked before
    own = spec(names, {**layout.rules, "seq": axis}, what=f"activation {x.shape}")
    mesh = layout.mesh
    place, _ = drop_uneven(own, x.shape, mesh)
    run = lambda x: local(x, names.index("seq"), axis)
    return jax.shard_map(run, mesh=mesh, in_specs=(place,), out_specs=place, check_vma=False)(x)


def _holder(chunk: int, parts: int) -> int:
    return min(chunk, 2 * parts - 1 - chunk)


def _to_zigzag(x, dim: int, axis: str):
    """Moves all even chunks, then all odd ones, one to each device: device `j` has the chunks `2 j` and `2 j + 1`."""
    n = lax.axis_size(axis)
    even, odd = (
        lax.ppermute(chunk, axis, [(j, _holder(2 * j + k, n)) for j in range(n)])
        for k, chunk in enumerate(jnp.split(x, 2, axis=dim))
    )
    # Device `i` now has chunk `i` and chunk `2 n - 1 - i`; the early one is even where `i` is.
    return _pair(even, odd, dim, lax.axis_index(axis) % 2 == 0)


def _from_zigzag(x, dim: int, axis: str):
    n = lax.axis_size(axis)
    early, late = jnp.split(x, 2, axis=dim)
    is_even = lax.axis_index(axis) % 2 == 0
    chunks = jnp.where(is_even, early, late), jnp.where(is_even, late, early)
    moved = [
        lax.ppermute(chunk, axis, [(_holder(2 * j + k, n), j) for j in range(n)]) for k, chunk in enumerate(chunks)
    ]
    return jnp.concatenate(moved, axis=dim)


def _pair(even, odd, dim: int, even_first):
    return jnp.concatenate([jnp.where(even_first, even, odd), jnp.where(even_first, odd, even)], axis=dim)
