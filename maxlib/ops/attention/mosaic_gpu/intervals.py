"""Which tiles the kernels visit, from the intervals of single queries.

A tile is a block of queries against a block of keys. It is visited if any of its queries sees any of its keys, and it is
full if all see all: then the kernel needs no mask arithmetic. Both kernels walk along one row (or column) of tiles and
take the full ones first; the order changes nothing but the rounding.
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


def walk(visited: Bool[Array, "B R C"], full: Bool[Array, "B R C"]) -> Int[Array, "B R 4"]:
    """For each row of tiles: first visited, number visited, first full, number full (of the first run of full ones).

    What lies between two visited tiles is visited too. All intervals at hand leave no such holes.
    """
    first, stop = _run(visited, whole=True)
    full_first, full_stop = _run(full, whole=False)
    return jnp.stack([first, stop - first, full_first, full_stop - full_first], axis=-1).astype(jnp.int32)


def _run(chosen, *, whole: bool):
    """From the first chosen column to behind the last (`whole`), or to behind the end of the first unbroken run."""
    columns = jnp.arange(chosen.shape[-1], dtype=jnp.int32)[None, None]
    first = jnp.argmax(chosen, axis=-1).astype(jnp.int32)
    if whole:
        return first, jnp.max(jnp.where(chosen, columns + 1, first[..., None]), axis=-1)
    behind = ~chosen & (columns >= first[..., None])
    stop = jnp.min(jnp.where(behind, columns, chosen.shape[-1]), axis=-1)
    return first, jnp.where(chosen.any(-1), stop, first)
