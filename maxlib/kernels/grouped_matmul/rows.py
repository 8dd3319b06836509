"""Rows sorted by expert: the expert of each row, which rows are used, the tables of tiles that kernels read, and the
run of a kernel for each entry of a batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

ALIGNED = 8  # rows: the memory unit's tiles begin at multiples of it
NAMES = "expert_gate", "expert_up"
"""What the two projections of experts are called in policies of `jax.checkpoint`."""


def owners(rows_per_expert: Int[Array, " E"], num_rows: int) -> Int[Array, " M"]:
    """Returns the expert of each row; E for rows beyond the last expert's."""
    # The number of experts whose rows end at or before this row.
    # As comparisons with all of them, in one pass; a search would be a loop of small kernels on a GPU.
    return jnp.searchsorted(jnp.cumsum(rows_per_expert), jnp.arange(num_rows), side="right", method="compare_all")


def only_used(rows: Num[Array, "M D"], rows_per_expert: Int[Array, " E"]) -> Num[Array, "M D"]:
    """Sets rows beyond the last expert's to zero."""
    used = (jnp.arange(len(rows)) < rows_per_expert.sum())[:, None]
    return jnp.where(used, rows, jnp.zeros_like(rows))


def bounds(rows_per_expert: Int[Array, " E"]) -> Int[Array, "E 2"]:
    """Returns the first and last (exclusive) row of each expert."""
    stop = jnp.cumsum(rows_per_expert)
    return jnp.stack([stop - rows_per_expert, stop], axis=1).astype(jnp.int32)


def tiles(
    rows_per_expert: Int[Array, " E"], num_rows: int, size: int
) -> tuple[Int[Array, "tiles 4"], Int[Array, " 1"]]:
    """Returns four numbers per tile, and how many tiles there are; the table has room for as many as there can be.

    The numbers are its expert, where it begins, and its first and last (exclusive) own row. Rows that are left over
    belong to an expert E without a matrix.
    """
    E = len(rows_per_expert)
    counts = jnp.append(rows_per_expert, num_rows - rows_per_expert.sum())
    start, stop = bounds(counts).T
    begin = start // ALIGNED * ALIGNED
    count = jnp.where(counts > 0, -(-(stop - begin) // size), 0)
    last = jnp.cumsum(count)  # tiles of the experts up to each one
    tile = jnp.arange((num_rows + (E + 1) * (size + ALIGNED)) // size + 1, dtype=jnp.int32)
    # The experts whose tiles end at or before this one: one comparison with each, where a search would be a loop.
    expert = jnp.minimum((last[None] <= tile[:, None]).sum(1), E)
    here = begin[expert] + (tile - last[expert] + count[expert]) * size
    table = jnp.stack([expert, here, jnp.maximum(start[expert], here), jnp.minimum(stop[expert], here + size)], axis=1)
    return jnp.where((tile < last[-1])[:, None], table, 0).astype(jnp.int32), last[-1:].astype(jnp.int32)


def whole_blocks(bias: Float[Array, "E C"], size: int) -> Float[Array, "E _"]:
    """Pads a bias to whole blocks of `size` columns, which a kernel reads at a time, and converts it to float32."""
    return jnp.pad(bias.astype(jnp.float32), ((0, 0), (0, -bias.shape[1] % size)))


def unbatched(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Wraps a kernel so that `jax.vmap` runs it for each entry of a batch in turn.

    The batch is usually the stages of a pipeline, and each device has one of them.

    Args:
        kernel: A function of arrays only, whose result is one array.

    Returns:
        The wrapped function.
    """
    mapped = jax.custom_batching.custom_vmap(kernel)

    @mapped.def_vmap
    def _(size: int, is_batched: list[bool], *arrays: Any):
        pairs = list(zip(arrays, is_batched, strict=True))
        return jnp.stack([mapped(*(a[i] if batched else a for a, batched in pairs)) for i in range(size)]), True

    return mapped
