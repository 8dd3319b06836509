"""Sums of outer products per expert (the gradient of the weights), a tile of one matrix per block of threads.

The rows of an expert stream past, 64 at a time. In the first and last block, rows of other experts or of none, which
need not be finite, are set to zero in shared memory, in both operands, before they are multiplied. Two warpgroups own
64 rows of the tile each; one more only asks for the next blocks. An expert without rows gets zeros. Blocks of the same
expert follow each other, so that its rows stay in the L2 cache.

Letters: o 64 outputs of a warpgroup, i the inputs of a tile, s 64 rows that are summed in one step.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from maxlib.kernels import _compat
from maxlib.kernels.attention.mosaic_gpu import memory
from maxlib.kernels.grouped_matmul import rows as row_tables
from maxlib.kernels.grouped_matmul.mosaic_gpu.config import REGISTERS, SUMMED, WARPGROUPS, Tiles

OUTPUTS = 64  # of a warpgroup


class Scratch(NamedTuple):
    """Shared memory, and the barriers `ready` (bytes have arrived) and `free` (warpgroups are done) of each stage."""

    d_out: Any  # stage W s o
    rows: Any  # stage s i
    ready: Any
    free: Any
    cleared: Any  # a block of an expert's first or last rows has been cleared
    out: Any  # W o i


def by_experts(
    d_out: Float[Array, "M O"], rows: Float[Array, "M I"], rows_per_expert: Int[Array, " E"], dtype: Any, sizes: Tiles
) -> Float[Array, "E O I"]:
    """Computes `d_out[mine].T @ rows[mine]` for every expert, in `dtype`; a tile has `sizes.columns` inputs."""
    (O, I), E = (d_out.shape[1], rows.shape[1]), len(rows_per_expert)
    columns, stages, shared = sizes.columns, sizes.stages, memory.matrices(rows.dtype, SUMMED)
    scratch = Scratch(
        d_out=shared(stages, WARPGROUPS, SUMMED, OUTPUTS),
        rows=shared(stages, SUMMED, columns),
        ready=memory.barrier(stages, WARPGROUPS + 1),
        free=memory.barrier(stages, WARPGROUPS),
        cleared=memory.barrier(1, WARPGROUPS),
        out=memory.matrices(dtype, columns)(WARPGROUPS, OUTPUTS, columns),
    )
    call = _compat.kernel(
        functools.partial(_kernel, sizes=sizes),
        out_type=jax.ShapeDtypeStruct((E, O, I), dtype),
        scratch_types=(scratch,),
        grid=(E, -(-O // (WARPGROUPS * OUTPUTS)), -(-I // columns)),
        grid_names=("expert", "output", "input"),  # the last one varies fastest
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="grouped_matmul_d_weights",
        compiler_params=_compat.compiler_params(),
        flops=2 * O * rows.size,
    )
    return call(d_out, rows, row_tables.bounds(rows_per_expert))


def _kernel(d_out, rows, bounds, out, scratch, *, sizes: Tiles):
    warpgroup, expert = lax.axis_index("warpgroup"), lax.axis_index("expert")
    first, last = bounds[expert, 0], bounds[expert, 1]
    begin = lax.div(first, jnp.int32(row_tables.ALIGNED)) * row_tables.ALIGNED

    def output(w):
        return pl.ds((lax.axis_index("output") * WARPGROUPS + w) * OUTPUTS, OUTPUTS)

    inputs = pl.ds(lax.axis_index("input") * sizes.columns, sizes.columns)
    steps = jnp.where(first < last, lax.div(last - begin + SUMMED - 1, jnp.int32(SUMMED)), 0)

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        total = pl.run_scoped(
            functools.partial(_sum, scratch, warpgroup, begin, first, last, steps, sizes.stages),
            plgpu.WGMMAAccumulatorRef((OUTPUTS, sizes.columns), jnp.float32),
        )
        place = scratch.out.at[warpgroup]
        place[...] = total.astype(out.dtype)
        memory.store((place, out.at[expert, output(warpgroup), inputs]))

    @pl.when(warpgroup == WARPGROUPS)
    def _memory():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")

        @pl.loop(0, steps)
        def _(i):
            slot, summed = lax.rem(i, jnp.int32(sizes.stages)), pl.ds(begin + i * SUMMED, SUMMED)
            pl.when(i >= sizes.stages)(lambda: plgpu.barrier_wait(scratch.free.at[slot]))
            for w in range(WARPGROUPS):
                plgpu.copy_gmem_to_smem(d_out.at[summed, output(w)], scratch.d_out.at[slot, w], scratch.ready.at[slot])
            plgpu.copy_gmem_to_smem(rows.at[summed, inputs], scratch.rows.at[slot], scratch.ready.at[slot])


def _sum(scratch: Scratch, warpgroup, begin, first, last, steps, stages, acc):
    """Adds up `d_out^T rows` over all steps: [s, o]^T [s, i] -> [o, i]."""

    @pl.loop(0, steps)
    def _(i):
        slot = lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(scratch.ready.at[slot])
        a = scratch.d_out.at[slot, warpgroup]

        here = begin + i * SUMMED

        @pl.when((here < first) | (here + SUMMED > last))  # the block contains rows of other experts
        def _():
            _clear(a, here, first, last)
            pl.when(warpgroup == 0)(lambda: _clear(scratch.rows.at[slot], here, first, last))
            plgpu.commit_smem()
            memory.finish_together(scratch.cleared.at[0])  # both multiply with the same `rows`

        plgpu.wgmma(acc, _compat.transpose(a), scratch.rows.at[slot])
        # One matmul stays in flight; the one before it is done, so its slot is free for the next copy.
        plgpu.wgmma_wait(1)
        pl.when(i > 0)(lambda: plgpu.barrier_arrive(scratch.free.at[lax.rem(i - 1, jnp.int32(stages))]))

    return acc[...]


def _clear(block, here, first, last):
    """Sets rows outside [first, last) of a block in shared memory to zero; its own rows begin at `here`."""
    row = here + plgpu.broadcasted_iota(jnp.int32, block.shape, 0, layout=plgpu.Layout.WGMMA)
    values = _compat.load(block, plgpu.Layout.WGMMA).astype(jnp.float32)
    block[...] = jnp.where((first <= row) & (row < last), values, 0.0).astype(block.dtype)
