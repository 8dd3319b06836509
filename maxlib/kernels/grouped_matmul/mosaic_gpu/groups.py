"""Tables of the rows of each expert, which XLA computes before the kernels start."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

ALIGNED = 8  # rows: the memory unit's tiles begin at multiples of it


def bounds(rows_per_expert: Int[Array, " E"]) -> Int[Array, "E 2"]:
    """Returns the first and last (exclusive) row of each expert."""
    stop = jnp.cumsum(rows_per_expert)
    return jnp.stack([stop - rows_per_expert, stop], axis=1).astype(jnp.int32)


def tiles(rows_per_expert: Int[Array, " E"], num_rows: int, size: int) -> Int[Array, "tiles 4"]:
    """Returns four numbers per tile: its expert, where it begins, and its first and last (exclusive) own row.

    The table has as many tiles as `num_rows` rows can need; those that are not needed have no rows.
    """
    E, stop = len(rows_per_expert), jnp.cumsum(rows_per_expert)
    start = stop - rows_per_expert
    begin = start // ALIGNED * ALIGNED
    count = jnp.where(rows_per_expert > 0, -(-(stop - begin) // size), 0)
    last = jnp.cumsum(count)  # tiles of the experts up to each one
    tile = jnp.arange((num_rows + E * (size + ALIGNED)) // size + 1, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(last, tile, side="right"), E - 1)
    here = begin[expert] + (tile - last[expert] + count[expert]) * size
    table = jnp.stack([expert, here, jnp.maximum(start[expert], here), jnp.minimum(stop[expert], here + size)], axis=1)
    return jnp.where((tile < last[-1])[:, None], table, 0).astype(jnp.int32)


def whole_blocks(bias: Float[Array, "E C"], size: int) -> Float[Array, "E _"]:
    """Pads a bias to whole blocks of `size` columns, which a kernel reads at a time, and converts it to float32."""
    return jnp.pad(bias.astype(jnp.float32), ((0, 0), (0, -bias.shape[1] % size)))
