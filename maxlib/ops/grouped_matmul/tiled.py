"""Tiles of rows, each multiplied with one expert's matrix: the cost follows the rows, forward and backward.

An expert's rows are cut into full tiles, what remains into smaller ones, the last of which is rounded up. One loop per tile size runs over just the tiles that exist. (A `switch` over sizes inside one loop would
copy the whole result in every branch; small tiles cost mostly the reading of the matrix.)
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Tile(NamedTuple):
    """first: where its slice of rows begins, which stays inside the array. mine: `size 1`, which rows of it are this tile's."""

    expert: Int[Array, ""]
    first: Int[Array, ""]
    mine: Bool[Array, "S 1"]


def tiled(
    rows: Float[Array, "M I"], weights: Float[Array, "E O I"], rows_per_expert: Int[Array, " E"]
) -> Float[Array, "M O"]:
    if rows.shape[0] == 0:
        return jnp.zeros((0, weights.shape[1]), rows.dtype)
    return _tiled(*_vary_alike(rows, weights, rows_per_expert))


@jax.custom_vjp
def _tiled(rows, weights, rows_per_expert):
    return _by_expert(rows, weights, rows_per_expert, contract=2)


def _forward(rows, weights, rows_per_expert):
    return _tiled(rows, weights, rows_per_expert), (rows, weights, rows_per_expert)


def _backward(residuals, d_out):
    rows, weights, rows_per_expert = residuals
    d_rows = _by_expert(d_out, weights, rows_per_expert, contract=1)
    return d_rows, _outer(d_out, rows, weights, rows_per_expert), None


_tiled.defvjp(_forward, _backward)


def _by_expert(rows, weights, rows_per_expert, *, contract: int):
    """Rows times their expert's matrix, over its axis `contract` (of E O I)."""

    def step(tile: Tile, size: int, out):
        x = jax.lax.dynamic_slice_in_dim(rows, tile.first, size)
        w = weights[tile.expert].astype(rows.dtype)
        y = _dot(x, w, 1, contract - 1).astype(rows.dtype)
        old = jax.lax.dynamic_slice_in_dim(out, tile.first, size)
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(tile.mine, y, old), tile.first, axis=0)

    out = jnp.zeros_like(rows, shape=(rows.shape[0], weights.shape[3 - contract]))
    return _for_each_tile(step, rows_per_expert, rows.shape[0], out)


def _outer(d_out, rows, weights, rows_per_expert):
    """Each expert's sum of outer products: the gradient of `weights`."""

    def step(tile: Tile, size: int, total):
        x = jax.lax.dynamic_slice_in_dim(rows, tile.first, size)
        d = jnp.where(tile.mine, jax.lax.dynamic_slice_in_dim(d_out, tile.first, size), 0)
        x = jnp.where(tile.mine, x, 0)  # not every row that overlaps need be finite
        return jax.lax.dynamic_update_index_in_dim(total, total[tile.expert] + _dot(d, x, 0, 0), tile.expert, axis=0)

    zeros = jnp.zeros_like(weights, dtype=jnp.promote_types(rows.dtype, jnp.float32))
    return _for_each_tile(step, rows_per_expert, rows.shape[0], zeros).astype(weights.dtype)


def _dot(a, b, axis_a: int, axis_b: int):
    exact = jnp.promote_types(a.dtype, jnp.float32)
    return jax.lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=exact)


def _for_each_tile(step: Callable, rows_per_expert: Int[Array, " E"], num_rows: int, out: Array) -> Array:
    """`out = step(tile, size, out)` over all tiles."""
    ends = jnp.cumsum(rows_per_expert)
    start = ends - rows_per_expert
    left = rows_per_expert
    sizes = _tile_sizes(num_rows, len(rows_per_expert))
    for size in sizes:
        count = -(-left // size) if size == sizes[-1] else left // size
        out = _loop(step, size, start, ends, count, num_rows, out)
        start, left = start + count * size, left - count * size
    return out


def _loop(step, size: int, start, ends, count, num_rows: int, out):
    """The tiles of one size: `count` of them from `start` on, for each expert."""
    last = jnp.cumsum(count)

    def body(i, out):
        expert = jnp.sum(last <= i)
        begin = start[expert] + (i - last[expert] + count[expert]) * size
        first = jnp.minimum(begin, num_rows - size)
        row = first + jnp.arange(size)
        return step(Tile(expert, first, ((row >= begin) & (row < ends[expert]))[:, None]), size, out)

    return jax.lax.fori_loop(0, last[-1], body, out)


def _tile_sizes(M: int, E: int) -> list[int]:
    """Largest first. Reading a matrix costs about as much as 30 rows: few tiles matter as much as little rounding."""
    if M <= 64 * E:
        sizes = [64, 16]
    else:
        unit = 16 if M <= 128 * E else 32 if M <= 256 * E else 64
        sizes = [8 * unit, 4 * unit, 2 * unit, unit]
    return [size for size in sizes if size <= M] or [M]


def _vary_alike(*arrays: Array) -> list[Array]:
    """Inside shard_map, marks operands as varying wherever another one does, so that JAX sums their gradients there."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    everywhere = frozenset().union(*varying)
    missing = [tuple(sorted(everywhere - axes)) for axes in varying]
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, missing, strict=True)]
