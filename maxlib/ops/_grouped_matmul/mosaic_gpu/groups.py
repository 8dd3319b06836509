"""Whose rows are where: tables that the kernels read, computed by XLA before they start."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

ALIGNED = 8  # rows: the memory unit's tiles begin at multiples of it


def bounds(rows_per_expert: Int[Array, " E"]) -> Int[Array, "E 2"]:
    """Each expert's first and last (exclusive) row."""
    stop = jnp.cumsum(rows_per_expert)
    return jnp.stack([stop - rows_per_expert, stop], axis=1).astype(jnp.int32)


def tiles(rows_per_expert: Int[Array, " E"], num_rows: int, size: int) -> Int[Array, "tiles 4"]:
    """Each tile's expert, where it begins, and its first and last (exclusive) own row; as many tiles as there can be,
    the rest without rows.
    """
    E, stop = len(rows_per_expert), jnp.cumsum(rows_per_expert)
    start = stop - rows_per_expert
    begin = start // ALIGNED * ALIGNED
    count = jnp.where(rows_per_expert > 0, -(-(stop - begin) // size), 0)
    last = jnp.cumsum(count)
    tile = jnp.arange((num_rows + E * (size + ALIGNED)) // size + 1, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(last, tile, side="right"), E - 1)
    here = begin[expert] + (tile - last[expert] + count[expert]) * size
    table = jnp.stack([expert, here, jnp.maximum(start[expert], here), jnp.minimum(stop[expert], here + size)], axis=1)
    return jnp.where((tile < last[-1])[:, None], table, 0).astype(jnp.int32)


def whole_blocks(bias: Float[Array, "E C"], size: int) -> Float[Array, "E _"]:
    """In float32, with zeros behind, because a kernel reads `size` columns at a time."""
    return jnp.pad(bias.astype(jnp.float32), ((0, 0), (0, -bias.shape[1] % size)))
