"""The forward kernel: a block of queries stays on a multiprocessor, its visible keys and values are streamed.

Two or three compute warpgroups own 64 queries each; one more warpgroup only asks the memory unit (TMA) for the next
blocks (the design of FlashAttention-3, https://arxiv.org/abs/2407.08608).

Letters: W compute warpgroups, P queries padded to whole tiles, r the 64 queries of a warpgroup, c the keys of a block.
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
from maxlib.kernels.attention.mosaic_gpu.config import ROWS, Tiles
from maxlib.kernels.attention.mosaic_gpu.logits import hide, online_softmax, per_row, settle, spread
from maxlib.kernels.attention.tiles import causal_tiles, tiles_of, walk


class Scratch(NamedTuple):
    """Shared memory and the barriers that guard it. `turn` lets one warpgroup at a time feed the tensor cores."""

    q_out: Any  # W r Hk and, in the same memory, W r Hv: the output overwrites the queries
    k: memory.Stream  # stage c Hk
    v: memory.Stream  # stage c Hv
    lse: Any  # W r
    loaded: Any
    turn: Any
    finished: Any


def forward(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B S K Hk"],
    v: Float[Array, "B S K Hv"],
    start: Int[Array, "B P"],
    end: Int[Array, "B P"],
    sinks: Float[Array, " N"],
    *,
    logits: Logits,
    tiles: Tiles,
    parts: int = 1,
    name: str = "forward",
) -> tuple[Float[Array, "Bp T N Hv"], Float[Array, "Bp N P"]]:
    """Computes the output and the log-sum-exp of every row; sinks (`-inf` for none) and log-sum-exp are in base 2.

    The visited blocks of keys are distributed in turn over `parts` blocks of threads, so that each has work however few
    keys are filled. Their results are concatenated along the batch axis (Bp = B * parts).
    """
    (B, T, N, Hk), (S, _, Hv) = q.shape, v.shape[1:]
    padded = start.shape[1]  # P
    visits = walk(*tiles_of(start, end, S, tiles.rows, tiles.columns))
    # An empty block of queries processes one masked tile, so that the loop's first step needs no condition.
    visits = visits.at[..., 1].max(1)
    pairs = B * N * causal_tiles(padded // tiles.rows, -(-S // tiles.columns)) * tiles.rows * tiles.columns
    call = _compat.kernel(
        functools.partial(_kernel, logits=logits, tiles=tiles),
        out_type=(
            jax.ShapeDtypeStruct((B * parts, T, N, Hv), q.dtype),
            jax.ShapeDtypeStruct((B * parts, N, padded), jnp.float32),
        ),
        scratch_types=(_scratch(Hk, Hv, q.dtype, tiles),),
        grid=(N, padded // tiles.rows, B * parts),
        grid_names=("head", "tile", "part"),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="attention_" + name,
        compiler_params=_compat.compiler_params(),
        flops=2 * pairs * (Hk + Hv),
        exps=pairs,
    )
    return call(q, k, v, start, end, visits, sinks)


def _scratch(key_dim: int, value_dim: int, dtype, tiles: Tiles) -> Scratch:
    W, stages = tiles.warpgroups, tiles.stages
    shared = memory.matrices(dtype, key_dim, value_dim, tiles.columns)
    return Scratch(
        q_out=plgpu.RefUnion(shared(W, ROWS, key_dim), shared(W, ROWS, value_dim)),
        k=memory.stream(tiles, shared(stages, tiles.columns, key_dim)),
        v=memory.stream(tiles, shared(stages, tiles.columns, value_dim)),
        lse=plgpu.SMEM((W, ROWS), jnp.float32),
        loaded=memory.barrier(W),
        turn=memory.barrier(W),
        finished=memory.barrier(1, W),
    )


def _kernel(q, k, v, start, end, visits, sinks, out, lse, scratch, *, logits: Logits, tiles: Tiles):
    head, index, warpgroup = (lax.axis_index(name) for name in ("head", "part", "warpgroup"))
    parts = out.shape[0] // q.shape[0]  # of a row's keys
    batch, part = lax.div(index, jnp.int32(parts)), lax.rem(index, jnp.int32(parts))
    # Later queries attend to more keys under a causal mask. The longest tiles start first, so that no processor is left
    # with one of them at the end.
    tile = visits.shape[1] - 1 - lax.axis_index("tile")
    visited, full, block = memory.deal(*(visits[batch, tile, i] for i in range(4)), part=part, parts=parts)

    @pl.when(warpgroup < tiles.warpgroups)
    def _compute():
        plgpu.set_max_registers(tiles.registers[0], action="increase")
        rows = pl.ds(tile * tiles.rows + warpgroup * ROWS, ROWS)
        local = scratch._replace(q_out=[x.at[warpgroup] for x in scratch.q_out], lse=scratch.lse.at[warpgroup])
        memory.load(scratch.loaded.at[warpgroup], (q.at[batch, rows, head], local.q_out[0]))
        by_row = plgpu.Layout.WGMMA.reduce(1)
        ends = [lambda x=_compat.load(x.at[batch, rows], by_row): x for x in (start, end)]
        turns = memory.Turns(scratch.turn, warpgroup, tiles.warpgroups)
        result = _attend(local, turns, block, visited, full, ends, logits=logits, tiles=tiles)
        _store(result, local, sinks[head], out.at[index, rows, head], lse.at[index, head, rows])

    @pl.when(warpgroup == tiles.warpgroups)
    def _memory():
        plgpu.set_max_registers(tiles.registers[1], action="decrease")
        kv_head = lax.div(head, jnp.int32(q.shape[2] // k.shape[2]))

        @pl.loop(0, visited)
        def _(step):
            keys = batch, pl.ds(block(step) * tiles.columns, tiles.columns), kv_head
            memory.feed(step, tiles.stages, [(scratch.k, (k.at[keys],)), (scratch.v, (v.at[keys],))])


def _attend(local: Scratch, turns: memory.Turns, block, visited, full, ends, *, logits: Logits, tiles: Tiles):
    """Runs the online softmax over all visited blocks; step i issues q k(i) and p(i-1) v(i-1) together."""
    columns = tiles.columns
    (k,), (v,), queries = local.k.buffers, local.v.buffers, local.q_out[0]
    zeros = plgpu.layout_cast(jnp.zeros((ROWS, v.shape[2]), jnp.float32), plgpu.Layout.WGMMA)

    def slot(step):
        return lax.rem(step, jnp.int32(tiles.stages))

    def softmax(products, step, peak, total, *, masked: bool):
        bent = logits.bend(products)
        if masked:
            bent = hide(bent, ends, block(step) * columns, axis=1)
        return online_softmax(bent, peak, total, logits.factor)

    def first_scores(scores):
        turns.take()
        plgpu.wgmma(scores, queries, _compat.transpose(k.at[0]))
        turns.give()
        return scores[...]

    def step(i, carry, *, masked: bool):
        acc, probs, peak, total = carry
        here, before = slot(i), slot(i - 1)  # the step before has waited for the keys

        def multiply(scores, acc_ref):
            acc_ref[...] = acc
            turns.take()
            plgpu.wgmma(scores, queries, _compat.transpose(k.at[here]))
            plgpu.barrier_wait(local.v.ready.at[before])
            plgpu.wgmma(acc_ref, probs, v.at[before])
            turns.give()
            # Wait for all but one matmul: the softmax of this step runs while p(i-1) v(i-1) is still in flight.
            products = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            plgpu.barrier_arrive(local.k.free.at[here])
            new = softmax(products, i, peak, total, masked=masked)
            # The wait for the next keys is a branch, and keeps the exponentials in front of the wait for p v.
            return settle(new, acc_ref, lambda: memory.ahead(local.k, i + 1, visited, tiles.stages))

        # Rounding must stay behind the wait: registers that a matmul reads may not be written while one is in flight.
        (new_probs, new_peak, total, shrink), acc = pl.run_scoped(multiply, scores_ref, acc_ref)
        plgpu.barrier_arrive(local.v.free.at[before])
        return acc * spread(shrink, acc), new_probs.astype(probs.dtype), new_peak, total

    def last_values(acc_ref):
        acc_ref[...] = acc
        plgpu.wgmma(acc_ref, probs, v.at[slot(visited - 1)])
        return acc_ref[...]

    scores_ref, acc_ref = (plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape in ((ROWS, columns), zeros.shape))
    plgpu.barrier_wait(local.k.ready.at[0])
    products = pl.run_scoped(first_scores, scores_ref)
    plgpu.barrier_arrive(local.k.free.at[0])
    probs, peak, total, _ = softmax(products, jnp.int32(0), per_row(LOWEST), per_row(0.0), masked=True)
    memory.ahead(local.k, jnp.int32(1), visited, tiles.stages)
    carry = zeros, probs.astype(v.dtype), peak, total
    # Full tiles come first and need no mask. Step 0 was masked in any case: the row may have no full tile.
    carry = lax.fori_loop(1, full, functools.partial(step, masked=False), carry)
    acc, probs, peak, total = lax.fori_loop(jnp.maximum(full, 1), visited, functools.partial(step, masked=True), carry)
    plgpu.barrier_wait(local.v.ready.at[slot(visited - 1)])
    return pl.run_scoped(last_values, acc_ref), peak, total


def _store(result, local: Scratch, sink, out, lse):
    """Divides by the total, including the sink's share, and stores; empty rows become zeros and `-inf`."""
    acc, peak, total = result
    # The sink is one more logit without a value: it joins the maximum and the total, not the weighted sum.
    top = jnp.maximum(peak, sink)
    total = total * jnp.exp2(peak - top) + jnp.exp2(sink - top)
    share = jnp.where(total > 0, jnp.exp2(peak - top) / total, 0.0)
    local.lse[...] = jnp.where(total > 0, top + jnp.log2(total), -jnp.inf)
    queries, place = local.q_out
    if queries.shape != place.shape:  # then the output of one warpgroup overlaps the queries of another
        memory.finish_together(local.finished.at[0])
    place[...] = (acc * spread(share, acc)).astype(out.dtype)
    memory.store((place, out), (local.lse, lse))
