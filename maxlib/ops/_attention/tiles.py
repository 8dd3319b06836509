"""Which tiles a kernel visits, from the intervals of single queries.

A tile is a block of queries against a block of keys. It is visited if any of its queries sees any of its keys, and it
is full if all see all: then the kernel needs no mask arithmetic.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def tiles(
    start: Int[Array, "B P"], end: Int[Array, "B P"], num_keys: int, block_q: int, block_k: int
) -> tuple[Bool[Array, "B Q K"], Bool[Array, "B Q K"]]:
    """Per tile: whether it is visited, and whether it is full. The ends of the intervals may be in any order."""
    start, end = (x.reshape(x.shape[0], -1, block_q) for x in (start, end))
    seen = start < end
    first = jnp.min(jnp.where(seen, start, num_keys), axis=-1)[..., None]
    last = jnp.max(jnp.where(seen, end, 0), axis=-1)[..., None]
    left = jnp.arange(0, num_keys, block_k, dtype=jnp.int32)[None, None]
    visited = (left < last) & (first < left + block_k)
    full = (start.max(-1)[..., None] <= left) & (left + block_k <= end.min(-1)[..., None])
    return visited, full


def causal_tiles(rows: int, columns: int) -> int:
    """How many of `rows` x `columns` tiles a causal mask leaves where the rows' queries see all keys in the end.

    What a call sees is data, which no compiler knows: this is what kernels tell it for an estimate of their cost.
    """
    return sum(-(-(row + 1) * columns // rows) for row in range(rows))
