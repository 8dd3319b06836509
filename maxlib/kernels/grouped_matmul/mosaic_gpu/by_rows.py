"""Rows times their expert's matrix (forward, and the gradient of the rows), one tile of rows per block of threads.

Gate and up are computed together: the same rows times two matrices, and in the gradient a sum of two products.

A tile has rows of one expert. It begins where the expert's rows begin, rounded down to the memory unit's 8 rows, or a
multiple of 128 rows later. Rows of other experts that it reads are multiplied too, but not stored. Rows of no expert
have tiles of zeros. Two warpgroups own 64 rows each; one more only asks for the next blocks. Blocks of the same columns
of both matrices arrive together, so that rows are read once and one warpgroup has both products in its registers.

Every processor runs one block of threads to the end: it takes tiles P, 2P, ... after its first, so that the next tile's
blocks arrive while this one is stored. The columns of the same rows follow each other: while the processors work on
them, the rows stay in the L2 cache.

Letters: r the 64 rows of a warpgroup, c 128 or 256 columns of the result, s 64 numbers that are summed in one step, P
processors.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from maxlib.kernels import _compat
from maxlib.kernels.attention.mosaic_gpu import memory
from maxlib.kernels.attention.mosaic_gpu.config import processors
from maxlib.kernels.grouped_matmul import rows as row_tables
from maxlib.kernels.grouped_matmul.mosaic_gpu.config import REGISTERS, ROWS, SUMMED, WARPGROUPS, Tiles

STORED = 64  # columns of a copy out of shared memory: rows of 128 bytes


class Scratch(NamedTuple):
    """Shared memory, and the barriers `ready` (bytes have arrived) and `free` (warpgroups are done) of each stage."""

    a: Any  # stage W r s
    b: Any  # stage c s, or stage s c, for each product
    ready: Any
    free: Any
    out: Any  # W c/64 r 64


def by_rows(
    rows: Sequence[Float[Array, "M S"]],
    weights: Sequence[Sequence[Float[Array, "E _ _"]]],
    rows_per_expert: Int[Array, " E"],
    *,
    turned: bool,
    biases: Sequence[Float[Array, "E C"]] = (),
    activation: Callable | None = None,
    name: str,
    sizes: Tiles,
) -> tuple[Float[Array, "M C"], ...]:
    """Computes the products `sum_j rows[j] @ weights[j][k][e] + biases[k][e]` for k = 0, 1, ...

    Args:
        rows: Arrays of rows, sorted by expert.
        weights: For each of `rows`, one array of matrices for each product.
        rows_per_expert: Number of rows of each expert e.
        turned: Multiply by the transposed matrices, `rows[j] @ weights[j][k][e].T`.
        biases: One array for each product, or none.
        activation: Function that joins the products to a single result, in float32; None to return all products.
        name: End of the kernel's name, for profiles.
        sizes: Tiles of each product.

    Returns:
        The products, or the one joined result; zeros in rows of no expert.
    """
    (M, _), dtype, width = rows[0].shape, rows[0].dtype, weights[0][0].shape[1 if turned else 2]
    products = len(weights[0])
    tiles, used = row_tables.tiles(rows_per_expert, M, WARPGROUPS * ROWS)
    num_columns = -(-width // sizes.columns)
    call = _compat.kernel(
        functools.partial(_kernel, turned=turned, activation=activation, num_columns=num_columns, sizes=sizes),
        out_type=(jax.ShapeDtypeStruct((M, width), dtype),) * (products if activation is None else 1),
        scratch_types=(_scratch(dtype, products, turned, sizes),),
        grid=(min(processors(), len(tiles) * num_columns),),
        grid_names=("processor",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="grouped_matmul_" + name,
        compiler_params=_compat.compiler_params(),
        flops=2 * products * width * sum(x.size for x in rows),
    )
    return call(rows, weights, [row_tables.whole_blocks(b, sizes.columns) for b in biases], tiles, used)


def _scratch(dtype, products: int, turned: bool, sizes: Tiles) -> Scratch:
    shared, stages, columns = memory.matrices(dtype, SUMMED), sizes.stages, sizes.columns
    return Scratch(
        a=shared(stages, WARPGROUPS, ROWS, SUMMED),
        b=(shared(stages, columns, SUMMED) if turned else shared(stages, SUMMED, columns),) * products,
        ready=memory.barrier(stages, WARPGROUPS + products),
        free=memory.barrier(stages, WARPGROUPS),
        out=memory.single_rows(dtype, WARPGROUPS, columns // STORED, ROWS, STORED),
    )


class _Tile(NamedTuple):
    """What a block of threads computes at a time: [first, last) of the rows from `begin`, times some columns."""

    expert: Any
    begin: Any
    first: Any
    last: Any
    column: Any  # the first one
    columns: Any
    is_real: Any  # False for rows of no expert
    steps: Any  # for each array of rows; none for rows of no expert


def _tile(tiles, index, rows, weights, num_columns: int, sizes: Tiles) -> _Tile:
    row, column = lax.div(index, jnp.int32(num_columns)), lax.rem(index, jnp.int32(num_columns))
    expert, begin, first, last = (tiles[row, i] for i in range(4))
    experts = weights[0][0].shape[0]
    return _Tile(
        expert=jnp.minimum(expert, experts - 1),
        begin=pl.multiple_of(begin, row_tables.ALIGNED),
        first=first,
        last=last,
        column=pl.multiple_of(column * sizes.columns, sizes.columns),
        columns=pl.ds(column * sizes.columns, sizes.columns),
        is_real=expert < experts,
        steps=jnp.where(expert < experts, rows[0].shape[1] // SUMMED, 0),
    )


def _kernel(rows, weights, biases, tiles, used, *rest, turned: bool, activation, num_columns: int, sizes: Tiles):
    (*outs, scratch), warpgroup, processor = rest, lax.axis_index("warpgroup"), lax.axis_index("processor")
    count = jnp.int32(min(processors(), tiles.shape[0] * num_columns))  # blocks of threads in the grid
    mine = lax.div(used[0] * num_columns - processor + count - 1, count)  # tiles of this block

    def tile(i):
        return _tile(tiles, processor + i * count, rows, weights, num_columns, sizes)

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(REGISTERS[0], action="increase")

        def compute_tile(i, done):
            here = tile(i)
            steps = len(rows) * here.steps
            products = pl.run_scoped(
                functools.partial(_sum, scratch, warpgroup, done, steps, turned=turned, sizes=sizes),
                *[plgpu.WGMMAAccumulatorRef((ROWS, sizes.columns), jnp.float32)] * len(weights[0]),
            )
            if biases:
                products = [_add(x, b.at[here.expert, here.columns]) for x, b in zip(products, biases, strict=True)]
            for out, x in zip(outs, products if activation is None else [activation(*products)], strict=True):
                _store(_or_zero(here, x).astype(out.dtype), scratch.out.at[warpgroup], out, here, warpgroup)
            return done + steps

        lax.fori_loop(0, mine, compute_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == WARPGROUPS)
    def _memory():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")

        def fetch_tile(i, done):
            here = tile(i)
            for some_rows, matrices in zip(rows, weights, strict=True):
                _fetch(scratch, some_rows, matrices, here, done, turned=turned, sizes=sizes)
                done = done + here.steps
            return done

        lax.fori_loop(0, mine, fetch_tile, jnp.int32(0))


def _fetch(scratch: Scratch, rows, matrices, tile: _Tile, done, *, turned: bool, sizes: Tiles):
    """Starts the copies of a tile's steps, after the copies of `done` steps have been started."""

    @pl.loop(0, tile.steps)
    def _(i):
        slot, summed = lax.rem(done + i, jnp.int32(sizes.stages)), pl.ds(i * SUMMED, SUMMED)
        pl.when(done + i >= sizes.stages)(lambda: plgpu.barrier_wait(scratch.free.at[slot]))
        for w in range(WARPGROUPS):
            source = rows.at[pl.ds(tile.begin + w * ROWS, ROWS), summed]
            plgpu.copy_gmem_to_smem(source, scratch.a.at[slot, w], scratch.ready.at[slot])
        place = (tile.expert, tile.columns, summed) if turned else (tile.expert, summed, tile.columns)
        for matrix, b in zip(matrices, scratch.b, strict=True):
            plgpu.copy_gmem_to_smem(matrix.at[place], b.at[slot], scratch.ready.at[slot])


def _sum(scratch: Scratch, warpgroup, done, steps, *accs, turned: bool, sizes: Tiles):
    """Sums the products of a tile's steps; the next step's matmuls are issued before this one's are done."""

    def slot(step):
        return lax.rem(done + step, jnp.int32(sizes.stages))

    def free(step):
        plgpu.barrier_arrive(scratch.free.at[slot(step)])

    @pl.loop(0, steps)
    def _(i):
        here = slot(i)
        plgpu.barrier_wait(scratch.ready.at[here])
        for acc, b in zip(accs, (x.at[here] for x in scratch.b), strict=True):
            plgpu.wgmma(acc, scratch.a.at[here, warpgroup], _compat.transpose(b) if turned else b)
        # This step's matmuls stay in flight; those of the step before are done, so its slot is free.
        plgpu.wgmma_wait(len(accs))
        pl.when(i > 0)(lambda: free(i - 1))

    totals = [acc[...] for acc in accs]
    pl.when(steps > 0)(lambda: free(steps - 1))  # for the first blocks of the next tile
    return totals


def _add(product, bias):
    """Adds a bias of one number per column to a product in registers."""
    row = _compat.load(bias, plgpu.Layout.WGMMA.reduce(0))
    return product + lax.broadcast_in_dim(row, product.shape, [1])


def _or_zero(tile: _Tile, result):
    """Returns zeros in place of the result of a tile without an expert, which may have a bias."""
    row = plgpu.broadcasted_iota(jnp.int32, result.shape, 0, layout=plgpu.Layout.WGMMA)
    return jnp.where(row < jnp.where(tile.is_real, ROWS, 0), result, 0.0)


def _store(result, place, out, tile: _Tile, warpgroup):
    """Stores a warpgroup's rows of the tile in copies of 64, 32, 16 ... rows, which it does not wait for."""
    here = tile.begin + warpgroup * ROWS
    # Of these 64 rows, [skipped, skipped + count) belong to the tile's expert.
    skipped = jnp.clip(tile.first - here, 0, ROWS)
    count = jnp.clip(tile.last - here, skipped, ROWS) - skipped
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copies before have read what is overwritten here
    parts = range(0, result.shape[1], STORED)
    for i, left in enumerate(parts):
        place.at[i][...] = lax.slice(result, (0, left), (ROWS, left + STORED))
    plgpu.commit_smem()
    # The compiler must know the size of a copy, so one is made for each bit of `count`, the highest first.
    size = ROWS
    while size:
        row = skipped + (count & ~(2 * size - 1))

        @pl.when((count & size) != 0)
        def _(row=row, size=size):
            for i, left in enumerate(parts):
                target = out.at[pl.ds(here + row, size), pl.ds(tile.column + left, STORED)]
                plgpu.copy_smem_to_gmem(place.at[i, pl.ds(row, size)], target)

        size //= 2
