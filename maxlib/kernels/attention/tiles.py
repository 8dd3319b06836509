"""Tiles that a kernel visits, from the key intervals of single queries, and their order along one row of tiles.

A tile is a block of queries times a block of keys. It is visited if any of its queries attends to any of its keys, and
full if every query attends to every key; a full tile needs no mask arithmetic.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def tiles_of(
    start: Int[Array, "B P"], end: Int[Array, "B P"], num_keys: int, block_q: int, block_k: int
) -> tuple[Bool[Array, "B Q K"], Bool[Array, "B Q K"]]:
    """Finds the tiles to visit and those that need no mask; the intervals may be in any order.

    Args:
        start: Index of the first key of each query, padded to whole blocks.
        end: Index after the last key of each query.
        num_keys: Number of keys.
        block_q: Queries per tile.
        block_k: Keys per tile.

    Returns:
        Two boolean arrays: Visited tiles, and full tiles.
    """
    start, end = (x.reshape(x.shape[0], -1, block_q) for x in (start, end))  # [B, P] -> [B, Q, block_q]
    seen = start < end
    # The union of the block's intervals, [first, last), overlaps the tile: visited. Their intersection covers it: full.
    first = jnp.min(jnp.where(seen, start, num_keys), axis=-1)[..., None]
    last = jnp.max(jnp.where(seen, end, 0), axis=-1)[..., None]
    left = jnp.arange(0, num_keys, block_k, dtype=jnp.int32)[None, None]
    visited = (left < last) & (first < left + block_k)
    full = (start.max(-1)[..., None] <= left) & (left + block_k <= end.min(-1)[..., None])
    return visited, full


def causal_tiles(rows: int, columns: int) -> int:
    """Counts the tiles of a `rows` x `columns` grid that a causal mask leaves if the last row attends to all columns.

    The visible keys of a call are data, which a compiler does not know. Kernels use this number to estimate their cost.
    """
    # Row r (from 0) reaches ceil((r + 1) * columns / rows) columns.
    return sum(-(-(row + 1) * columns // rows) for row in range(rows))


def walk(visited: Bool[Array, "B R C"], full: Bool[Array, "B R C"]) -> Int[Array, "B R 4"]:
    """Describes each row of tiles by four numbers: first visited, number visited, first full, number full.

    The full ones are the first unbroken run of full tiles. Tiles between two visited ones are visited too; intervals
    leave no such holes.
    """
    first, stop = _run(visited, to_last=True)
    full_first, full_stop = _run(full, to_last=False)
    return jnp.stack([first, stop - first, full_first, full_stop - full_first], axis=-1).astype(jnp.int32)


def _run(chosen, *, to_last: bool):
    """Returns the first chosen column, and the index after the last one (`to_last`) or after the first unbroken run."""
    columns = jnp.arange(chosen.shape[-1], dtype=jnp.int32)[None, None]
    first = jnp.argmax(chosen, axis=-1).astype(jnp.int32)
    if to_last:
        return first, jnp.max(jnp.where(chosen, columns + 1, first[..., None]), axis=-1)
    behind = ~chosen & (columns >= first[..., None])
    stop = jnp.min(jnp.where(behind, columns, chosen.shape[-1]), axis=-1)
    return first, jnp.where(chosen.any(-1), stop, first)
