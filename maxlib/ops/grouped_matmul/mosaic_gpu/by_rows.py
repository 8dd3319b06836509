"""Rows times their expert's matrix (forward, and the gradient of the rows), a tile of rows of one expert per block of
threads.

A tile begins where its expert's rows begin, rounded down to the memory unit's 8 rows, or a multiple of 128 behind. What
it reads of other experts is multiplied too, and not stored. Two warpgroups own 64 rows each; one more only asks for the
next blocks.

Letters: r the 64 rows of a warpgroup, c 128 columns of the result, s 64 numbers that are summed in one step.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from maxlib.ops import _compat
from maxlib.ops.attention.mosaic_gpu import memory
from maxlib.ops.grouped_matmul.mosaic_gpu import groups

WARPGROUPS, ROWS, COLUMNS, SUMMED, STAGES = 2, 64, 128, 64, 4
REGISTERS = 232, 40  # per thread of a compute and of the memory warpgroup


class Scratch(NamedTuple):
    a: Any  # stage W r s
    b: Any  # stage c s, or stage s c
    ready: Any
    free: Any
    out: Any  # W r c


def by_rows(
    rows: Float[Array, "M S"], weights: Float[Array, "E _ _"], rows_per_expert: Int[Array, " E"], *, turned: bool
) -> Float[Array, "M C"]:
    """`rows @ weights[e]`, or with `turned` `rows @ weights[e].T`; rows of no expert are not written."""
    M, width = rows.shape[0], weights.shape[1 if turned else 2]
    a = memory.matrices(rows.dtype, SUMMED)
    scratch = Scratch(
        a=a(STAGES, WARPGROUPS, ROWS, SUMMED),
        b=a(STAGES, COLUMNS, SUMMED) if turned else a(STAGES, SUMMED, COLUMNS),
        ready=memory.barrier(STAGES, WARPGROUPS + 1),
        free=memory.barrier(STAGES, WARPGROUPS),
        out=plgpu.SMEM((WARPGROUPS, ROWS, COLUMNS), rows.dtype),
    )
    tiles = groups.tiles(rows_per_expert, M, WARPGROUPS * ROWS)
    call = plgpu.kernel(
        functools.partial(_kernel, turned=turned),
        out_type=jax.ShapeDtypeStruct((M, width), rows.dtype),
        scratch_types=(scratch,),
        grid=(-(-width // COLUMNS), len(tiles)),
        grid_names=("column", "tile"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="grouped_matmul_" + ("forward" if turned else "d_rows"),
        compiler_params=_compat.compiler_params(),
    )
    return call(rows, weights, tiles)


def _kernel(rows, weights, tiles, out, scratch, *, turned: bool):
    warpgroup, tile = lax.axis_index("warpgroup"), lax.axis_index("tile")
    expert, begin, first, last = (tiles[tile, i] for i in range(4))
    begin = pl.multiple_of(begin, groups.ALIGNED)
    columns = pl.ds(lax.axis_index("column") * COLUMNS, COLUMNS)
    steps = jnp.where(first < last, rows.shape[1] // SUMMED, 0)

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        product = pl.run_scoped(
            functools.partial(_sum, scratch, warpgroup, steps, turned=turned),
            plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32),
        )
        place = scratch.out.at[warpgroup]
        place[...] = product.astype(out.dtype)
        plgpu.commit_smem()
        here = begin + warpgroup * ROWS
        skipped = jnp.clip(first - here, 0, ROWS)
        _store(place, out, columns, here, skipped, jnp.clip(last - here, skipped, ROWS) - skipped)

    @pl.when(warpgroup == WARPGROUPS)
    def _memory():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")

        @pl.loop(0, steps)
        def _(i):
            slot, summed = lax.rem(i, jnp.int32(STAGES)), pl.ds(i * SUMMED, SUMMED)
            pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(scratch.free.at[slot]))
            for w in range(WARPGROUPS):
                source = rows.at[pl.ds(begin + w * ROWS, ROWS), summed]
                plgpu.copy_gmem_to_smem(source, scratch.a.at[slot, w], scratch.ready.at[slot])
            source = weights.at[expert, columns, summed] if turned else weights.at[expert, summed, columns]
            plgpu.copy_gmem_to_smem(source, scratch.b.at[slot], scratch.ready.at[slot])


def _sum(scratch: Scratch, warpgroup, steps, acc, *, turned: bool):
    """The products of all steps, the next one's matmul being issued before this one's is done."""

    @pl.loop(0, steps)
    def _(i):
        slot = lax.rem(i, jnp.int32(STAGES))
        plgpu.barrier_wait(scratch.ready.at[slot])
        b = scratch.b.at[slot]
        plgpu.wgmma(acc, scratch.a.at[slot, warpgroup], _compat.transpose(b) if turned else b)
        plgpu.wgmma_wait(1)
        pl.when(i > 0)(lambda: plgpu.barrier_arrive(scratch.free.at[lax.rem(i - 1, jnp.int32(STAGES))]))

    return acc[...]


def _store(place, out, columns, here, skipped, count):
    """`count` rows behind those that are skipped, as copies of 64, 32, 16 ... rows: the compiler must know their
    sizes.
    """
    size = ROWS
    while size:
        row = skipped + (count & ~(2 * size - 1))

        @pl.when((count & size) != 0)
        def _(row=row, size=size):
            plgpu.copy_smem_to_gmem(place.at[pl.ds(row, size)], out.at[pl.ds(here + row, size), columns])

        size //= 2
    plgpu.wait_smem_to_gmem(0)
