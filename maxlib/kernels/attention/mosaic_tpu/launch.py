"""Launch of the kernels: a grid of lanes times tiles, and the blocks of arrays that belong to them.

Lanes are independent (heads, or parts of the work) and tiles come from a table (`visits`). The blocks of the next tile
are fetched while this one is computed, and a block that stays is fetched once.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxlib.kernels.attention.mosaic_tpu.visits import Table, Tile


class Block(NamedTuple):
    """An array and the way it is cut into blocks.

    Args:
      array: the array, or its shape and dtype.
      shape: shape of a block; None for an axis of size 1 that is dropped.
      place: function from a lane and a tile to the index of its block.
      fetched: number of blocks that a lane fetches (or writes); None for one with every tile.
    """

    array: Any
    shape: tuple[int | None, ...]
    place: Callable[[Any, Tile], tuple[Any, ...]]
    fetched: int | None = None


class Work(NamedTuple):
    """Estimate of a lane's work, for the compiler: the number of tiles, and the products and exponentials of each."""

    tiles: float
    products: int
    exps: int

    def cost(self, lanes: int, blocks: Sequence[Block]) -> pl.CostEstimate:
        """Returns the estimate for all lanes, with the bytes that their blocks move."""
        moved = sum(_bytes(block) * (self.tiles if block.fetched is None else block.fetched) for block in blocks)
        totals = self.tiles * 2 * self.products, self.tiles * self.exps, moved
        return pl.CostEstimate(*(int(lanes * total) for total in totals))


def _bytes(block: Block) -> int:
    return math.prod(size for size in block.shape if size is not None) * block.array.dtype.itemsize


def launch(
    name: str,
    kernel: Callable,
    table: tuple[Table, jax.Array, jax.Array],
    *,
    lanes: int,
    given: Sequence[Block],
    out: Sequence[Block],
    scratch: Sequence[tuple[int, ...]],
    work: Work,
    vmem: int,
) -> Sequence[jax.Array]:
    """Runs `kernel(tile, *given, *out, *scratch)` for every tile of every lane.

    Args:
      name: name of the kernel, for profiles.
      kernel: the function that computes one tile.
      table: tiles from `visits.table`: one part for all lanes, or one part per lane.
      lanes: number of independent lanes.
      given: inputs.
      out: results.
      scratch: shapes of float32 buffers that keep their contents from tile to tile.
      work: estimate of a lane's work.
      vmem: bytes of vector memory that the kernel may use.

    Returns:
      One array for each of `out`.
    """
    how, codes, count = table
    parts, length = codes.shape
    tile = lambda lane, i, codes: how.read(codes[i if parts == 1 else lane * length + i])
    spec = lambda block: pl.BlockSpec(block.shape, lambda lane, i, codes: block.place(lane, tile(lane, i, codes)))

    def body(codes, *refs):
        kernel(tile(pl.program_id(0), pl.program_id(1), codes), *refs)

    return pl.pallas_call(
        body,
        out_shape=[block.array for block in out],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(lanes, count),
            in_specs=list(map(spec, given)),
            out_specs=list(map(spec, out)),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem),
        cost_estimate=work.cost(lanes, (*given, *out)),
        name="attention_" + name,
    )(codes.reshape(-1), *(block.array for block in given))


def staying(x) -> Block:
    """Returns the blocks of `B K blocks rows width` that belong to rows of tiles; heads share them if K is 1."""
    return _by_head(x, lambda tile: tile.row)._replace(fetched=x.shape[0] * x.shape[2])


def passing(x) -> Block:
    """Returns the blocks of an array `B K blocks rows width` that belong to columns of tiles."""
    return _by_head(x, lambda tile: tile.column)


def _by_head(x, which: Callable) -> Block:
    shared = x.shape[1] == 1
    return Block(
        x,
        (None, None, None, *x.shape[3:]),
        lambda head, tile: (tile.batch, 0 if shared else head, which(tile), 0, 0),
    )
