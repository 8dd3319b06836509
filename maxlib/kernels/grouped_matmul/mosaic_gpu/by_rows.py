"""Rows times their expert's matrix (forward, and the gradient of the rows), one tile of rows per block of threads.

Gate and up are computed together: the same rows times two matrices, and in the gradient a sum of two products.

A tile has rows of one expert. It begins where the expert's rows begin, rounded down to the memory unit's 8 rows, or a
multiple of 128 rows later. Rows of other experts that it reads are multiplied too, but not stored. Two warpgroups own
64 rows each; one more only asks for the next blocks. Blocks of the same columns of both matrices arrive together, so
that rows are read once and one warpgroup has both products in its registers.

Letters: r the 64 rows of a warpgroup, c 128 columns of the result, s 64 numbers that are summed in one step.
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
from maxlib.kernels.grouped_matmul.mosaic_gpu import groups

WARPGROUPS, ROWS, COLUMNS, SUMMED, STAGES = 2, 64, 128, 64, 4
REGISTERS = 232, 40  # per thread of a compute and of the memory warpgroup


class Scratch(NamedTuple):
    """Shared memory, and the barriers `ready` (bytes have arrived) and `free` (warpgroups are done) of each stage."""

    a: Any  # stage W r s
    b: Any  # stage c s, or stage s c, for each product
    ready: Any
    free: Any
    out: Any  # W r c


def by_rows(
    rows: Sequence[Float[Array, "M S"]],
    weights: Sequence[Sequence[Float[Array, "E _ _"]]],
    rows_per_expert: Int[Array, " E"],
    *,
    turned: bool,
    biases: Sequence[Float[Array, "E C"]] = (),
    activation: Callable | None = None,
    name: str,
) -> tuple[Float[Array, "M C"], ...]:
    """Computes the products `sum_j rows[j] @ weights[j][k][e] + biases[k][e]` for k = 0, 1, ...

    Args:
      rows: arrays of rows, sorted by expert.
      weights: for each of `rows`, one array of matrices for each product.
      rows_per_expert: number of rows of each expert e.
      turned: multiply by the transposed matrices, `rows[j] @ weights[j][k][e].T`.
      biases: one array for each product, or none.
      activation: function that joins the products to a single result, in float32; None to return all products.
      name: end of the kernel's name, for profiles.

    Returns:
      The products, or the one joined result. Rows of no expert are not written.
    """
    (M, _), dtype, width = rows[0].shape, rows[0].dtype, weights[0][0].shape[1 if turned else 2]
    products, shared = len(weights[0]), memory.matrices(dtype, SUMMED)
    b = shared(STAGES, COLUMNS, SUMMED) if turned else shared(STAGES, SUMMED, COLUMNS)
    scratch = Scratch(
        a=shared(STAGES, WARPGROUPS, ROWS, SUMMED),
        b=(b,) * products,
        ready=memory.barrier(STAGES, WARPGROUPS + products),
        free=memory.barrier(STAGES, WARPGROUPS),
        out=plgpu.SMEM((WARPGROUPS, ROWS, COLUMNS), dtype),
    )
    tiles = groups.tiles(rows_per_expert, M, WARPGROUPS * ROWS)
    call = _compat.kernel(
        functools.partial(_kernel, turned=turned, activation=activation),
        out_type=(jax.ShapeDtypeStruct((M, width), dtype),) * (products if activation is None else 1),
        scratch_types=(scratch,),
        grid=(-(-width // COLUMNS), len(tiles)),
        grid_names=("column", "tile"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="grouped_matmul_" + name,
        compiler_params=_compat.compiler_params(),
        flops=2 * products * width * sum(x.size for x in rows),
    )
    return call(rows, weights, [groups.whole_blocks(b, COLUMNS) for b in biases], tiles)


def _kernel(rows, weights, biases, tiles, *rest, turned: bool, activation: Callable | None):
    (*outs, scratch), warpgroup, tile = rest, lax.axis_index("warpgroup"), lax.axis_index("tile")
    expert, begin, first, last = (tiles[tile, i] for i in range(4))
    begin = pl.multiple_of(begin, groups.ALIGNED)
    columns = pl.ds(lax.axis_index("column") * COLUMNS, COLUMNS)
    steps = jnp.where(first < last, rows[0].shape[1] // SUMMED, 0)  # for each of `rows`

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        products = pl.run_scoped(
            functools.partial(_sum, scratch, warpgroup, len(rows) * steps, turned=turned),
            *[plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32)] * len(weights[0]),
        )
        if biases:
            products = [_add(product, bias.at[expert, columns]) for product, bias in zip(products, biases, strict=True)]
        place, here = scratch.out.at[warpgroup], begin + warpgroup * ROWS
        # Of this warpgroup's 64 rows, [skipped, skipped + count) belong to the tile's expert.
        skipped = jnp.clip(first - here, 0, ROWS)
        count = jnp.clip(last - here, skipped, ROWS) - skipped
        for out, result in zip(outs, products if activation is None else [activation(*products)], strict=True):
            place[...] = result.astype(out.dtype)
            plgpu.commit_smem()
            _store(place, out, columns, here, skipped, count)

    @pl.when(warpgroup == WARPGROUPS)
    def _memory():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        block = lambda matrix, summed: matrix.at[(expert, columns, summed) if turned else (expert, summed, columns)]
        for j, (some_rows, matrices) in enumerate(zip(rows, weights, strict=True)):
            blocks = [functools.partial(block, matrix) for matrix in matrices]
            _fetch(scratch, some_rows, begin, blocks, j * steps, steps)


def _fetch(scratch: Scratch, rows, begin, blocks, done, steps):
    """Starts the copies of `steps` steps, after the copies of `done` steps have been started."""

    @pl.loop(0, steps)
    def _(i):
        slot, summed = lax.rem(done + i, jnp.int32(STAGES)), pl.ds(i * SUMMED, SUMMED)
        pl.when(done + i >= STAGES)(lambda: plgpu.barrier_wait(scratch.free.at[slot]))
        for w in range(WARPGROUPS):
            source = rows.at[pl.ds(begin + w * ROWS, ROWS), summed]
            plgpu.copy_gmem_to_smem(source, scratch.a.at[slot, w], scratch.ready.at[slot])
        for block, b in zip(blocks, scratch.b, strict=True):
            plgpu.copy_gmem_to_smem(block(summed), b.at[slot], scratch.ready.at[slot])


def _sum(scratch: Scratch, warpgroup, steps, *accs, turned: bool):
    """Sums the products of all steps; the next step's matmuls are issued before this one's are done."""

    @pl.loop(0, steps)
    def _(i):
        slot = lax.rem(i, jnp.int32(STAGES))
        plgpu.barrier_wait(scratch.ready.at[slot])
        for acc, b in zip(accs, (x.at[slot] for x in scratch.b), strict=True):
            plgpu.wgmma(acc, scratch.a.at[slot, warpgroup], _compat.transpose(b) if turned else b)
        # This step's matmuls stay in flight; those of the step before are done, so its slot is free.
        plgpu.wgmma_wait(len(accs))
        pl.when(i > 0)(lambda: plgpu.barrier_arrive(scratch.free.at[lax.rem(i - 1, jnp.int32(STAGES))]))

    return [acc[...] for acc in accs]


def _add(product, bias):
    """Adds a bias of one number per column to a product in registers."""
    row = _compat.load(bias, plgpu.Layout.WGMMA.reduce(0))
    return product + lax.broadcast_in_dim(row, product.shape, [1])


def _store(place, out, columns, here, skipped, count):
    """Stores `count` rows after the skipped ones, in copies of 64, 32, 16 ... rows."""
    # The compiler must know the size of a copy, so one is made for each bit of `count`, the highest first.
    size = ROWS
    while size:
        row = skipped + (count & ~(2 * size - 1))

        @pl.when((count & size) != 0)
        def _(row=row, size=size):
            plgpu.copy_smem_to_gmem(place.at[pl.ds(row, size)], out.at[pl.ds(here + row, size), columns])

        size //= 2
    plgpu.wait_smem_to_gmem(0)
