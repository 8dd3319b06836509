"""Tiles of rows, each multiplied by one expert's matrix: the cost is proportional to the rows in both passes.

The rows of an expert are cut into tiles of the largest size, the rest into smaller ones, and the last tile is rounded
up. One loop per size runs over the tiles that exist. (A `switch` over the sizes would copy the whole result in every
branch.)
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from maxlib._utils.varying import vary_alike
from maxlib.kernels.tile_sizes import TileSizes
from maxlib.ops._grouped_matmul.xla import accumulator, summed_in


@dataclasses.dataclass(frozen=True)
class TiledTiles(TileSizes):
    """Rows of the tiles of `tiled`, largest first: the rest that one leaves is cut by the next. At most all rows."""

    sizes: tuple[int, ...]

    kernel: ClassVar[str] = "grouped_matmul/tiled"

    def __post_init__(self):
        self.require()
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes), reverse=True):
            raise ValueError(f"TiledTiles: sizes must fall from one to the next, got {self.sizes}")

    def fit(self, M: int) -> list[int]:
        """Returns the sizes that M rows fill, or M."""
        return [size for size in self.sizes if size <= M] or [M]


class Tile(NamedTuple):
    """A slice of `size` rows from row `first`, within the array; `mine` marks the rows that belong to this tile."""

    first: Int[Array, ""]
    size: int
    mine: Bool[Array, "S 1"]

    def of(self, rows: Num[Array, "M I"]) -> Num[Array, "S I"]:
        """Returns the tile's slice of `rows`."""
        return jax.lax.dynamic_slice_in_dim(rows, self.first, self.size)


def tiled(
    rows: Num[Array, "M I"],
    weights: Num[Array, "E O I"] | Num[Array, "E I O"] | Any,
    rows_per_expert: Int[Array, " E"],
    weight_order: str = "EOI",
    out_dtype: Any = None,
    tiles: TiledTiles | None = None,
) -> Num[Array, "M O"]:
    """Computes `grouped_matmul` tile by tile, by default those of `tiled_tiles`."""
    contract = weight_order.index("I")  # 2 for "EOI", 1 for "EIO"; 3 - contract is the other one
    if rows.shape[0] == 0:
        return jnp.zeros((0, weights.shape[3 - contract]), out_dtype or rows.dtype)
    if out_dtype is not None or not isinstance(weights, jax.Array):
        sizes = _sizes(tiles, rows, rows_per_expert)
        return _by_expert(rows, weights, rows_per_expert, sizes, contract=contract, out_dtype=out_dtype)
    sizes = tuple(_sizes(tiles, rows, rows_per_expert))
    return _tiled(*vary_alike((rows, weights, rows_per_expert)), contract, sizes)


def _sizes(tiles: TiledTiles | None, rows, rows_per_expert) -> list[int]:
    return (tiles or tiled_tiles(len(rows), len(rows_per_expert))).fit(len(rows))


def tiled_outer(
    d_out: Num[Array, "M O"],
    rows: Num[Array, "M I"],
    rows_per_expert: Int[Array, " E"],
    tiles: TiledTiles | None = None,
    dtype: Any = None,
) -> Float[Array, "E O I"]:
    """Computes `grouped_outer` tile by tile, by default in the dtype of the sums."""
    dtype = dtype or summed_in(rows.dtype)
    if rows.shape[0] == 0:
        return jnp.zeros((len(rows_per_expert), d_out.shape[1], rows.shape[1]), dtype)
    d_out, rows, rows_per_expert = vary_alike((d_out, rows, rows_per_expert))
    return _outer(d_out, rows, rows_per_expert, dtype, _sizes(tiles, rows, rows_per_expert))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _tiled(rows, weights, rows_per_expert, contract, sizes):
    return _by_expert(rows, weights, rows_per_expert, sizes, contract=contract)


def _forward(rows, weights, rows_per_expert, contract, sizes):
    return _tiled(rows, weights, rows_per_expert, contract, sizes), (rows, weights, rows_per_expert)


def _backward(contract, sizes, residuals, d_out):
    rows, weights, rows_per_expert = residuals
    # y = x w^T: dx = dy w, and dw = dy^T x, summed over the rows of each expert.
    d_rows = _by_expert(d_out, weights, rows_per_expert, sizes, contract=3 - contract)
    pair = (d_out, rows) if contract == 2 else (rows, d_out)
    return d_rows, _outer(*pair, rows_per_expert, weights.dtype, sizes), None


_tiled.defvjp(_forward, _backward)


def _by_expert(rows, weights, rows_per_expert, sizes, *, contract: int, out_dtype: Any = None):
    """Multiplies rows by their expert's matrix, over the axis `contract` of `weights`."""
    dtype = out_dtype or rows.dtype

    def step(expert, start, stop, out):
        w = jax.tree.map(lambda a: a[expert], weights)[...]
        w = w if out_dtype else w.astype(rows.dtype)

        def multiply(tile: Tile, out):
            y = _dot(tile.of(rows), w, 1, contract - 1).astype(dtype)
            y = jnp.where(tile.mine, y, tile.of(out))  # a tile may overlap its neighbours: keep their results
            return jax.lax.dynamic_update_slice_in_dim(out, y, tile.first, axis=0)

        return _for_each_tile(multiply, start, stop, len(rows), sizes, out)

    out = jnp.zeros_like(rows, shape=(len(rows), weights.shape[3 - contract]), dtype=dtype)
    return _for_each_expert(step, rows_per_expert, out)


def _outer(d_out, rows, rows_per_expert, dtype, sizes):
    """Computes the sum of outer products of each expert: the gradient of the weights, `E O I`."""
    exact = summed_in(rows.dtype)
    shape = (len(rows_per_expert), d_out.shape[1], rows.shape[1])

    def add(tile: Tile, total):
        # Mask both operands: rows of other experts, or of no expert, may not be finite, and 0 * inf is NaN.
        d, x = (jnp.where(tile.mine, a, jnp.zeros_like(a)) for a in (tile.of(d_out), tile.of(rows)))
        return total + _dot(d, x, 0, 0).astype(exact)

    def step(expert, start, stop, out):
        total = jnp.zeros_like(rows, shape=shape[1:], dtype=exact)
        total = _for_each_tile(add, start, stop, len(rows), sizes, total)
        return jax.lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), expert, axis=0)

    return _for_each_expert(step, rows_per_expert, jnp.zeros_like(rows, shape=shape, dtype=dtype))


def _dot(a, b, axis_a: int, axis_b: int):
    contract = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(a, b, contract, preferred_element_type=accumulator(a.dtype))


def _for_each_expert(step: Callable, rows_per_expert: Int[Array, " E"], out: Array) -> Array:
    """Repeats `out = step(expert, start, stop, out)` over the experts that have rows."""
    stop = jnp.cumsum(rows_per_expert)
    used = rows_per_expert > 0
    first = jnp.argsort(~used, stable=True)  # experts with rows come first, in their order

    def body(i, out):
        expert = first[i]
        return step(expert, stop[expert] - rows_per_expert[expert], stop[expert], out)

    return jax.lax.fori_loop(0, used.sum(), body, out)


def _for_each_tile(step: Callable, start, stop, num_rows: int, sizes: Sequence[int], out: Array) -> Array:
    """Repeats `out = step(tile, out)` over tiles of the rows `[start, stop)`, one loop for each size."""
    for size in sizes:
        left = stop - start
        count = -(-left // size) if size == sizes[-1] else left // size

        def body(i, out, start=start, size=size):
            begin = start + i * size
            first = jnp.minimum(begin, num_rows - size)  # move the last tile back into the array
            row = first + jnp.arange(size)
            return step(Tile(first, size, ((row >= begin) & (row < stop))[:, None]), out)

        out = jax.lax.fori_loop(0, count, body, out)
        start = start + count * size
    return out


def tiled_tiles(M: int, E: int) -> TiledTiles:
    """Chooses tiles for M rows and E experts."""
    # Reading an expert's matrix costs as much as about 30 rows, so having few tiles matters as much as little padding.
    if M <= 64 * E:
        return TiledTiles((64, 16))
    unit = 16 if M <= 128 * E else 32 if M <= 256 * E else 64
    return TiledTiles((8 * unit, 4 * unit, 2 * unit, unit))
