"""The kernel for few queries against a cache of latents (MLA), whose first channels are the values, too.

A block of threads has 64 rows, each a head of a query, and reads every block of latents once, for scores and values (as
FlashMLA does, https://github.com/deepseek-ai/FlashMLA). The accumulators of 512 channels do not fit into the registers
of one warpgroup. Therefore two warpgroups own half of the channels each. Both compute all scores: the tensor cores wait
for memory anyway, and so the warpgroups exchange neither maxima nor probabilities.

Letters: r the 64 rows, P rows padded to whole tiles, c the latents of a block, Hw half of the values' channels.
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
from maxlib.kernels.attention.logits import LOWEST, Logits
from maxlib.kernels.attention.mosaic_gpu import memory
from maxlib.kernels.attention.mosaic_gpu.config import ROWS, HopperLatentTiles
from maxlib.kernels.attention.mosaic_gpu.logits import hide, online_softmax, per_row, spread

HALVES = 2  # warpgroups that compute


class Scratch(NamedTuple):
    """Shared memory and the barriers that guard it. `turn` lets one warpgroup at a time compute scores."""

    q: Any  # half r Hw: queries, which the output overwrites
    q_rest: Any  # r (Hk - Hv)
    values: Any  # half stage c Hw
    rest: Any  # stage c (Hk - Hv)
    lse: Any  # r
    loaded: Any
    turn: Any
    ready: Any
    free: Any
    finished: Any


def latents(
    q: Float[Array, "B R Hk"],
    keys: Float[Array, "B S Hk"],
    bounds: Int[Array, "2 B P"],
    visits: Int[Array, "B 4"],
    *,
    value_dim: int,
    logits: Logits,
    tiles: HopperLatentTiles,
    parts: int,
) -> tuple[Float[Array, "Bp R Hv"], Float[Array, "Bp P"]]:
    """Computes the output and the log-sum-exp (base 2) of every row; `keys[..., :value_dim]` are the values.

    As in `forward`, the visited blocks are distributed over `parts` blocks of threads (Bp = B * parts).

    Args:
        q: Queries, rows after rows.
        keys: Latents.
        bounds: First key of every row, and one past its last.
        visits: First visited block, number visited (at least 1), first full one, number full (`tiles.walk`).
        value_dim: Channels that are values.
        logits: The maths.
        tiles: Latents of a block, and blocks in flight.
        parts: Blocks of threads that share a row's keys.
    """
    (B, R, Hk), S, padded = q.shape, keys.shape[1], bounds.shape[2]
    call = _compat.kernel(
        functools.partial(_kernel, logits=logits, tiles=tiles),
        out_type=(
            jax.ShapeDtypeStruct((B * parts, R, value_dim), q.dtype),
            jax.ShapeDtypeStruct((B * parts, padded), jnp.float32),
        ),
        scratch_types=(_scratch(Hk, value_dim, q.dtype, tiles),),
        # Tiles of the same latents start together, so that all but the first find them in the cache.
        grid=(B, parts, padded // ROWS),
        grid_names=("row", "part", "tile"),
        num_threads=HALVES + 1,
        thread_name="warpgroup",
        kernel_name="attention_latents",
        compiler_params=_compat.compiler_params(),
        flops=2 * B * padded * S * (Hk + value_dim),
        exps=B * padded * S,
    )
    return call(q, keys, bounds, visits)


def _scratch(key_dim: int, value_dim: int, dtype, tiles: HopperLatentTiles) -> Scratch:
    half, rest = value_dim // HALVES, key_dim - value_dim
    shared = memory.matrices(dtype, half, rest, tiles.columns)
    return Scratch(
        q=shared(HALVES, ROWS, half),
        q_rest=shared(ROWS, rest),
        values=shared(HALVES, tiles.stages, tiles.columns, half),
        rest=shared(tiles.stages, tiles.columns, rest),
        lse=plgpu.SMEM((ROWS,), jnp.float32),
        loaded=memory.barrier(1, HALVES + 1),
        turn=memory.barrier(HALVES),
        ready=memory.barrier(tiles.stages, HALVES + 1),  # a copy for each half and one for the rest
        free=memory.barrier(tiles.stages, HALVES),
        finished=memory.barrier(1, HALVES),
    )


def _kernel(q, keys, bounds, visits, out, lse, scratch, *, logits: Logits, tiles: HopperLatentTiles):
    row, part, tile, warpgroup = (lax.axis_index(name) for name in ("row", "part", "tile", "warpgroup"))
    parts = out.shape[0] // q.shape[0]  # of a row's keys
    index, rows = row * parts + part, pl.ds(tile * ROWS, ROWS)
    visited, full, block = memory.deal(*(visits[row, i] for i in range(4)), part=part, parts=parts)

    @pl.when(warpgroup < HALVES)
    def _compute():
        plgpu.set_max_registers(tiles.registers[0], action="increase")
        by_row = plgpu.Layout.WGMMA.reduce(1)
        ends = [lambda x=_compat.load(bounds.at[i, row, rows], by_row): x for i in range(2)]
        plgpu.barrier_wait(scratch.loaded.at[0])
        turns = memory.Turns(scratch.turn, warpgroup, HALVES)
        result = _attend(scratch, turns, warpgroup, block, visited, full, ends, logits=logits, tiles=tiles)
        half = out.shape[2] // HALVES
        channels = pl.ds(warpgroup * half, half)
        _store(result, scratch, warpgroup, out.at[index, rows, channels], lse.at[index, rows])

    @pl.when(warpgroup == HALVES)
    def _memory():
        plgpu.set_max_registers(tiles.registers[1], action="decrease")
        _copy(q, (row, rows), [scratch.q.at[i] for i in range(HALVES)], scratch.q_rest, scratch.loaded.at[0])

        @pl.loop(0, visited)
        def _(step):
            slot = lax.rem(step, jnp.int32(tiles.stages))
            # The first slots are free from the beginning.
            pl.when(step >= tiles.stages)(lambda: plgpu.barrier_wait(scratch.free.at[slot]))
            place = row, pl.ds(block(step) * tiles.columns, tiles.columns)
            halves = [scratch.values.at[i, slot] for i in range(HALVES)]
            _copy(keys, place, halves, scratch.rest.at[slot], scratch.ready.at[slot])


def _copy(source, place, halves, rest, arrived):
    """Copies rows of latents (or queries) into shared memory: both halves of the values' channels, then the others."""
    width = halves[0].shape[1]
    for i, half in enumerate(halves):
        plgpu.copy_gmem_to_smem(source.at[*place, pl.ds(i * width, width)], half, arrived)
    plgpu.copy_gmem_to_smem(source.at[*place, pl.ds(HALVES * width, rest.shape[1])], rest, arrived)


def _attend(
    scratch: Scratch,
    turns: memory.Turns,
    warpgroup,
    block,
    visited,
    full,
    ends,
    *,
    logits: Logits,
    tiles: HopperLatentTiles,
):
    """Runs the online softmax over all visited blocks, for one half of the channels."""
    values, rest = scratch.values, scratch.rest
    zeros = plgpu.layout_cast(jnp.zeros((ROWS, values.shape[3]), jnp.float32), plgpu.Layout.WGMMA)
    scores_ref, acc_ref = (
        plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape in ((ROWS, tiles.columns), zeros.shape)
    )

    def step(i, carry, *, masked: bool):
        acc, peak, total = carry
        slot = lax.rem(i, jnp.int32(tiles.stages))

        def scores(ref):
            for half in range(HALVES):
                keys = values.at[_anew(half), slot]
                plgpu.wgmma(ref, scratch.q.at[_anew(half)], _compat.transpose(keys))
            plgpu.wgmma(ref, scratch.q_rest, _compat.transpose(rest.at[slot]))
            turns.give()
            return ref[...]

        plgpu.barrier_wait(scratch.ready.at[slot])
        turns.take()
        bent = logits.bend(pl.run_scoped(scores, scores_ref))
        if masked:
            bent = hide(bent, ends, block(i) * tiles.columns, axis=1)
        probs, peak, total, shrink = online_softmax(bent, peak, total, logits.factor)

        def weigh(ref):
            ref[...] = acc * spread(shrink, acc)
            plgpu.wgmma(ref, probs.astype(values.dtype), values.at[_anew(warpgroup), slot])
            return ref[...]

        acc = pl.run_scoped(weigh, acc_ref)
        plgpu.barrier_arrive(scratch.free.at[slot])
        return acc, peak, total

    # Full blocks come first and need no mask.
    carry = lax.fori_loop(0, full, functools.partial(step, masked=False), (zeros, per_row(LOWEST), per_row(0.0)))
    return lax.fori_loop(full, visited, functools.partial(step, masked=True), carry)


def _anew(index):
    """Returns an index whose address is computed at every use, as `memory.local` does."""
    return lax.optimization_barrier(jnp.int32(index))


def _store(result, scratch: Scratch, warpgroup, out, lse):
    """Divides by the total, and stores; empty rows become zeros and `-inf`."""
    acc, peak, total = result
    share = jnp.where(total > 0, 1 / total, 0.0)
    memory.finish_together(scratch.finished.at[0])  # the output overwrites queries that the other half may still read
    place = scratch.q.at[warpgroup]
    place[...] = (acc * spread(share, acc)).astype(out.dtype)
    memory.store((place, out))

    @pl.when(warpgroup == 0)  # both have the same sums
    def _():
        scratch.lse[...] = jnp.where(total > 0, peak + jnp.log2(total), -jnp.inf)
        memory.store((scratch.lse, lse))
