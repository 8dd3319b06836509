"""How all kernels start: a grid of lanes times tiles, and blocks of arrays that go with them.

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

from maxlib.ops._attention.mosaic_tpu.visits import Table, Tile


class Block(NamedTuple):
    """How an array is cut: a block's shape (None: one, without an axis), and which block a lane's tile has.

    fetched: how many blocks a lane has to fetch (or write), None for one with every tile.
    """

    array: Any
    shape: tuple[int | None, ...]
    place: Callable[[Any, Tile], tuple[Any, ...]]
    fetched: int | None = None


class Work(NamedTuple):
    """What is told to the compiler: how many tiles a lane visits, and for each the products of its matmuls and the
    exponentials.
    """

    tiles: float
    products: int
    exps: int

    def cost(self, lanes: int, blocks: Sequence[Block]) -> pl.CostEstimate:
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
    """Runs `kernel(tile, *given, *out, *scratch)` for every tile.

    table: of one part, for all lanes, or of a part for each lane. scratch: shapes, float32, kept from tile to tile.
    vmem: bytes of vector memory that may be used.
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
    """A block of `B K blocks rows width` that belongs to a row of tiles; heads share it where K is 1."""
    return _by_head(x, lambda tile: tile.row)._replace(fetched=x.shape[0] * x.shape[2])


def passing(x) -> Block:
    """One that belongs to a column of tiles."""
    return _by_head(x, lambda tile: tile.column)


def _by_head(x, which: Callable) -> Block:
    shared = x.shape[1] == 1
    return Block(
        x,
        (None, None, None, *x.shape[3:]),
        lambda head, tile: (tile.batch, 0 if shared else head, which(tile), 0, 0),
    )
